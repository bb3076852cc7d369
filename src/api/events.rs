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

use super::wire::{Encoding, ExitEvent};
use super::{base64, escape};
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
                    escape::append(out, data);
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

#[cfg(test)]
mod tests {
    use super::*;

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
