//! The event stream of a command: NDJSON, one event a line, as clients read it.
//!
//! Clients split lines as Python's `str.splitlines` does, so besides what JSON demands, U+0085,
//! U+2028 and U+2029 are escaped. Text is put together again where a read has cut a character in
//! two: its first bytes wait for the rest. Every output event says where in its stream it begins
//! (`offset`) and how many raw bytes it stands for (`bytes`), so a client that loses its connection
//! knows what it has.

use std::io::Write;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::base64;
use super::wire::{Encoding, ExitEvent};
use crate::http::stream::StreamWriter;
use crate::process::ring::{Cursor, Stream};
use crate::process::{Audience, Client, Exit, Gone, Process};
use crate::sys::Events;

/// Puts what happens to a process into events.
pub(super) struct EventWriter<'a> {
    stream: &'a mut StreamWriter,
    encoding: Encoding,
    /// Silence after which a ping is due.
    ping: Duration,
    /// Per stream, the beginning of a character whose end has not been read yet, and its offset.
    carried: [(u64, Vec<u8>); 2],
    /// Per stream, whether a gap was told of just now, which may have cut a character in two.
    torn: [bool; 2],
}

impl<'a> EventWriter<'a> {
    pub(super) fn new(stream: &'a mut StreamWriter, encoding: Encoding, ping: Duration) -> Self {
        Self {
            stream,
            encoding,
            ping,
            carried: [(0, Vec::new()), (0, Vec::new())],
            torn: [false; 2],
        }
    }

    /// The first event; `attached` if the process was there before.
    pub(super) fn start(&mut self, process: &Process, attached: bool) {
        let attached = if attached { ",\"attached\":true" } else { "" };
        // An id has no characters that JSON escapes.
        let (pid, id) = (process.pid(), process.id());
        self.line(|out| {
            write!(
                out,
                "{{\"event\":\"start\",\"pid\":{pid},\"id\":\"{id}\"{attached}}}"
            )
        });
    }

    fn line(&mut self, write: impl FnOnce(&mut Vec<u8>) -> std::io::Result<()>) {
        self.stream.push(|out| {
            // Writing to memory does not fail.
            let _ = write(out);
            out.push(b'\n');
        });
    }

    fn event(&mut self, stream: Stream, offset: u64, data: &[u8]) {
        let encoding = self.encoding;
        let (name, bytes) = (stream.name(), data.len());
        self.line(|out| {
            out.reserve(data.len() + data.len() / 2 + 80);
            write!(
                out,
                "{{\"event\":\"{name}\",\"offset\":{offset},\"bytes\":{bytes},"
            )?;
            match encoding {
                Encoding::Utf8 => {
                    out.extend_from_slice(b"\"data\":\"");
                    append_text(out, data);
                }
                Encoding::Base64 => {
                    out.extend_from_slice(b"\"data_b64\":\"");
                    base64::append(out, data);
                }
            }
            out.write_all(b"\"}")
        });
    }

    fn gap(&mut self, stream: Stream, offset: u64, bytes: u64) {
        let name = stream.name();
        self.line(|out| {
            write!(out, "{{\"event\":\"dropped\",\"stream\":\"{name}\",\"offset\":{offset},\"bytes\":{bytes}}}")
        });
    }

    /// Gives up waiting for the rest of a character.
    fn release(&mut self, stream: Stream) {
        let (offset, carried) = std::mem::take(&mut self.carried[stream.index()]);
        if !carried.is_empty() {
            self.event(stream, offset, &carried);
        }
    }
}

impl Client for EventWriter<'_> {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.stream.descriptor()
    }

    fn interest(&self) -> Events {
        self.stream.interest()
    }

    fn ready(&mut self, events: Events) -> Result<(), Gone> {
        self.stream.ready(events).map_err(|_| Gone)
    }
}

impl Audience for EventWriter<'_> {
    fn output(&mut self, stream: Stream, mut offset: u64, mut data: &[u8]) {
        if self.encoding == Encoding::Base64 {
            return self.event(stream, offset, data);
        }
        if std::mem::take(&mut self.torn[stream.index()]) {
            // The rest of a character whose beginning is gone is gone too.
            let rest = data
                .iter()
                .take(3)
                .take_while(|byte| **byte & 0xc0 == 0x80)
                .count();
            if rest > 0 {
                self.gap(stream, offset, rest as u64);
                offset += rest as u64;
                data = &data[rest..];
            }
        }
        let (carried_offset, carried) = std::mem::take(&mut self.carried[stream.index()]);
        let joined;
        let (offset, data) = if carried.is_empty() {
            (offset, data)
        } else {
            joined = [&carried, data].concat();
            (carried_offset, &joined[..])
        };
        let (whole, cut) = data.split_at(data.len() - cut_character(data));
        if !whole.is_empty() {
            self.event(stream, offset, whole);
        }
        self.carried[stream.index()] = (offset + whole.len() as u64, cut.to_vec());
    }

    fn dropped(&mut self, stream: Stream, offset: u64, bytes: u64) {
        self.release(stream);
        self.torn[stream.index()] = self.encoding == Encoding::Utf8;
        self.gap(stream, offset, bytes);
    }

    fn exit(&mut self, exit: &Exit) {
        for stream in Stream::ALL {
            self.release(stream);
        }
        let event = ExitEvent::of(exit);
        self.line(|out| Ok(serde_json::to_writer(out, &event)?));
    }

    fn caught_up(&mut self, cursor: &Cursor) {
        // Half a character is left to be read again, with its other half.
        let [stdout, stderr] = Stream::ALL.map(|stream| match &self.carried[stream.index()] {
            (offset, carried) if !carried.is_empty() => *offset,
            _ => cursor.next(stream),
        });
        self.line(|out| {
            write!(
                out,
                "{{\"event\":\"end\",\"running\":true,\"stdout_offset\":{stdout},\"stderr_offset\":{stderr}}}"
            )
        });
    }

    fn ping(&mut self) {
        self.line(|out| out.write_all(b"{\"event\":\"ping\"}"));
    }

    fn patience(&self) -> Duration {
        patience(self.stream, self.ping)
    }

    fn flush(&mut self) -> Result<(), Gone> {
        self.stream.flush().map_err(|_| Gone)
    }

    fn is_flushed(&self) -> bool {
        self.stream.is_flushed()
    }
}

/// Keeps a client company that waits for one JSON document: white space may precede it, and is a
/// sign of life to every proxy on the way.
pub(super) struct DocumentWriter<'a> {
    pub(super) stream: &'a mut StreamWriter,
    pub(super) ping: Duration,
}

impl Client for DocumentWriter<'_> {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.stream.descriptor()
    }

    fn interest(&self) -> Events {
        self.stream.interest()
    }

    fn ready(&mut self, events: Events) -> Result<(), Gone> {
        self.stream.ready(events).map_err(|_| Gone)
    }
}

impl Audience for DocumentWriter<'_> {
    fn output(&mut self, _: Stream, _: u64, _: &[u8]) {}

    fn dropped(&mut self, _: Stream, _: u64, _: u64) {}

    fn exit(&mut self, _: &Exit) {}

    fn caught_up(&mut self, _: &Cursor) {}

    fn ping(&mut self) {
        self.stream.push(|out| out.push(b' '));
    }

    fn patience(&self) -> Duration {
        patience(self.stream, self.ping)
    }

    fn flush(&mut self) -> Result<(), Gone> {
        self.stream.flush().map_err(|_| Gone)
    }

    fn is_flushed(&self) -> bool {
        self.stream.is_flushed()
    }
}

/// A client that has closed its sending half may go away altogether without a sign: then only what
/// is sent to it tells, and it has to be noticed within a second.
fn patience(stream: &StreamWriter, ping: Duration) -> Duration {
    if stream.is_half_closed() {
        ping.min(Duration::from_millis(500))
    } else {
        ping
    }
}

/// How many bytes at the end are the beginning of a character that goes on after them.
fn cut_character(data: &[u8]) -> usize {
    (1..=data.len().min(3))
        .find(|length| data[data.len() - length] >= 0xc0)
        .filter(|length| {
            let end = std::str::from_utf8(&data[data.len() - length..]);
            end.is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
        })
        .unwrap_or(0)
}

/// Appends bytes as the inside of a JSON string; each maximal part that is not UTF-8 becomes one
/// U+FFFD, as Unicode recommends.
fn append_text(out: &mut Vec<u8>, data: &[u8]) {
    if std::str::from_utf8(data).is_ok() {
        return append_escaped(out, data);
    }
    for chunk in data.utf8_chunks() {
        append_escaped(out, chunk.valid().as_bytes());
        if !chunk.invalid().is_empty() {
            out.extend_from_slice("\u{FFFD}".as_bytes());
        }
    }
}

/// The bytes of a word that may need an escape have their highest bit set in the result: controls,
/// quote, backslash, DEL, and the first bytes of U+0085 (C2 85) and of U+2028 and U+2029 (E2 80 A8,
/// E2 80 A9). The lowest one found is right; above it there may be false ones, from its borrow.
fn suspects(word: u64) -> u64 {
    const EACH: u64 = 0x0101_0101_0101_0101;
    let below = |limit: u64, word: u64| word.wrapping_sub(EACH * limit) & !word;
    let equal = |byte: u8| below(1, word ^ (EACH * u64::from(byte)));
    let found =
        below(0x20, word) | equal(b'"') | equal(b'\\') | equal(0x7f) | equal(0xc2) | equal(0xe2);
    found & (EACH << 7)
}

/// Appends valid UTF-8 with its escapes. Looks at eight bytes at a time and copies whole runs,
/// because most text needs few.
fn append_escaped(out: &mut Vec<u8>, text: &[u8]) {
    let mut copied = 0;
    let mut at = 0;
    while at < text.len() {
        let word = match text[at..].first_chunk() {
            Some(word) => *word,
            None => padded(&text[at..]),
        };
        let found = suspects(u64::from_le_bytes(word));
        if found == 0 {
            at += 8;
            continue;
        }
        at += found.trailing_zeros() as usize / 8;
        out.extend_from_slice(&text[copied..at]);
        at += append_character(out, &text[at..]);
        copied = at;
    }
    out.extend_from_slice(&text[copied..]);
}

/// The last bytes of a text as a word, filled up with what needs no escape.
fn padded(rest: &[u8]) -> [u8; 8] {
    let mut word = [b' '; 8];
    word[..rest.len()].copy_from_slice(rest);
    word
}

/// Appends the character that `text` begins with, or its first byte; how many bytes were taken.
fn append_character(out: &mut Vec<u8>, text: &[u8]) -> usize {
    let (escape, taken): (&[u8], usize) = match text {
        [b'"', ..] => (b"\\\"", 1),
        [b'\\', ..] => (b"\\\\", 1),
        [b'\n', ..] => (b"\\n", 1),
        [b'\r', ..] => (b"\\r", 1),
        [b'\t', ..] => (b"\\t", 1),
        [0xc2, 0x85, ..] => (b"\\u0085", 2),
        [0xe2, 0x80, 0xa8, ..] => (b"\\u2028", 3),
        [0xe2, 0x80, 0xa9, ..] => (b"\\u2029", 3),
        [byte @ (0x00..=0x1f | 0x7f), ..] => {
            let digits = b"0123456789abcdef";
            out.extend_from_slice(b"\\u00");
            out.extend_from_slice(&[
                digits[usize::from(byte >> 4)],
                digits[usize::from(byte & 15)],
            ]);
            (b"", 1)
        }
        [byte, ..] => (&[*byte], 1),
        [] => (b"", 0),
    };
    out.extend_from_slice(escape);
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(data: &[u8]) -> String {
        let mut out = Vec::new();
        append_text(&mut out, data);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn what_is_escaped_reads_back_as_it_was() {
        let all: String = ('\0'..='\u{2100}')
            .chain(['\u{FFFD}', '\u{1F600}', '\u{10FFFF}'])
            .collect();
        let escaped = text(all.as_bytes());
        assert_eq!(
            serde_json::from_str::<String>(&format!("\"{escaped}\"")).unwrap(),
            all
        );
    }

    /// Whatever stands before and behind an escape, at every place in a word.
    #[test]
    fn escapes_are_found_at_every_place() {
        for special in [
            "\n",
            "\"",
            "\u{85}",
            "\u{2028}",
            "\u{7f}",
            "\u{ff}",
            "\u{2029}\u{1}",
            "\u{2027}",
        ] {
            for before in 0..20 {
                for after in 0..20 {
                    let all = ["x".repeat(before), special.to_owned(), "y".repeat(after)].concat();
                    let escaped = text(all.as_bytes());
                    let back: String = serde_json::from_str(&format!("\"{escaped}\"")).unwrap();
                    assert_eq!(back, all);
                    assert!(!escaped.contains('\u{2028}') && !escaped.contains('\u{85}'));
                }
            }
        }
    }

    /// What Python's `str.splitlines` takes for the end of a line.
    #[test]
    fn nothing_that_ends_a_line_is_left() {
        let breaks = "\n\r\u{b}\u{c}\u{1c}\u{1d}\u{1e}\u{85}\u{2028}\u{2029}";
        assert!(!text(breaks.as_bytes()).contains(|character| breaks.contains(character)));
    }

    #[test]
    fn only_what_is_not_utf8_is_replaced() {
        for data in [
            &b"a\xffb"[..],
            b"\xe2\x98",
            b"\xf0\x9f\x98\x80\x80",
            b"\xc2",
            b"\xed\xa0\x80",
            b"\xe2\x80",
        ] {
            assert_eq!(text(data), String::from_utf8_lossy(data));
        }
    }

    #[test]
    fn a_cut_character_is_recognised() {
        for (data, cut) in [
            (&b""[..], 0),
            (b"a", 0),
            (b"\xc3", 1),
            (b"a\xe2\x98", 2),
            (b"\xf0\x9f\x98", 3),
            (b"\xf0\x9f\x98\x80", 0),
            (b"\x98\x98\x98", 0),
            (b"\xff", 0),
            (b"\xe0\x80", 0),
            (b"\xed\xa0", 0),
        ] {
            assert_eq!(cut_character(data), cut, "{data:x?}");
        }
    }
}
