//! The event stream of a command: NDJSON, one event per line.
//!
//! Clients split lines as Python's `str.splitlines` does, so the events escape U+0085, U+2028 and
//! U+2029 besides the characters that JSON requires. Where a read cuts a character in two, its first bytes wait for the
//! rest. Every output event has the offset of its first byte in its stream (`offset`) and its number
//! of raw bytes (`bytes`), so a client that loses its connection knows where to resume.

use std::io::Write;
use std::time::Duration;

use crate::api::json::command::{Encoding, ExitEvent};
use crate::client::Client;
use crate::codec::plain::PlainText;
use crate::codec::{base64, cut_character, escape};
use crate::http::stream::{StreamClient, StreamWriter};
use crate::process::ring::{Cursor, Stream};
use crate::process::{EVENT_BYTES, Exit, Process, Subscriber};

/// Writes what happens to a process as events.
pub(super) struct EventWriter<'a> {
    client: StreamClient<'a>,
    encoding: Encoding,
    /// Per stream, the first bytes of a character that was read in part, and their offset.
    carried: [(u64, Vec<u8>); 2],
    /// Per stream, whether the last event was a gap, which may have cut a character in two.
    torn: [bool; 2],
    /// Per stream, if clients get text without control sequences.
    plain: Option<[PlainStream; 2]>,
}

/// A stream of which only the text is sent. Its events count the bytes of what is left out, too.
#[derive(Default)]
struct PlainStream {
    /// `None` until there is output after the beginning or a gap.
    filter: Option<PlainText>,
    /// Where the next event begins.
    from: u64,
    /// Up to where the output was read.
    to: u64,
}

impl<'a> EventWriter<'a> {
    /// What is sent while nothing happens.
    pub(super) const PING: &'static [u8] = b"{\"event\":\"ping\"}\n";

    pub(super) fn new(
        stream: &'a mut StreamWriter,
        encoding: Encoding,
        ping_interval: Duration,
    ) -> Self {
        stream.cover(EVENT_BYTES);
        Self {
            client: StreamClient::new(stream, Self::PING, ping_interval),
            encoding,
            carried: [(0, Vec::new()), (0, Vec::new())],
            torn: [false; 2],
            plain: None,
        }
    }

    /// Sends the text without the control sequences of a terminal. Offsets still count raw bytes.
    pub(super) fn plain(mut self) -> Self {
        self.plain = Some(<[PlainStream; 2]>::default());
        self
    }

    /// Writes the first event. `attached` means that the process was already there; `ignored` is the member that tells
    /// what of the request was ignored.
    pub(super) fn start(&mut self, process: &Process, attached: bool, ignored: &str) {
        let attached = if attached { ",\"attached\":true" } else { "" };
        // An id has no characters that JSON escapes.
        let (pid, id) = (process.pid, &process.id);
        self.line(|out| {
            write!(
                out,
                "{{\"event\":\"start\",\"pid\":{pid},\"id\":\"{id}\"{attached}{ignored}}}"
            )
        });
    }

    fn line(&mut self, write: impl FnOnce(&mut Vec<u8>) -> std::io::Result<()>) {
        self.client.push(|out| {
            // Writing to memory does not fail.
            let _ = write(out);
            out.push(b'\n');
        });
    }

    fn event(&mut self, stream: Stream, offset: u64, data: &[u8]) {
        self.event_of(stream, offset, data.len() as u64, data);
    }

    /// An event about this many bytes of the stream, of which `data` is sent.
    fn event_of(&mut self, stream: Stream, offset: u64, bytes: u64, data: &[u8]) {
        let encoding = self.encoding;
        let name = stream.name();
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

    /// Sends the text in the next output, up to the last character or sequence that is whole.
    fn plain_output(&mut self, stream: Stream, offset: u64, data: &[u8]) {
        let Some(plain) = &mut self.plain else {
            return;
        };
        let plain = &mut plain[stream.index()];
        let filter = plain.filter.get_or_insert_with(|| {
            plain.from = offset;
            PlainText::new(offset == 0)
        });
        let mut text = Vec::new();
        filter.push(data, &mut text);
        plain.to = offset + data.len() as u64;
        let (from, to) = (plain.from, plain.to - filter.pending());
        if !text.is_empty() {
            plain.from = to;
            self.event_of(stream, from, to - from, &text);
        }
    }

    /// Sends what is left of a stream of text, even if it is only the number of its bytes.
    fn release_plain(&mut self, stream: Stream) {
        let Some(plain) = &mut self.plain else {
            return;
        };
        let plain = std::mem::take(&mut plain[stream.index()]);
        let mut text = Vec::new();
        if let Some(mut filter) = plain.filter {
            filter.finish(&mut text);
        }
        if plain.to > plain.from {
            self.event_of(stream, plain.from, plain.to - plain.from, &text);
        }
    }

    /// Sends the first bytes of a character without waiting for the rest.
    fn release(&mut self, stream: Stream) {
        self.release_plain(stream);
        let (offset, carried) = std::mem::take(&mut self.carried[stream.index()]);
        if !carried.is_empty() {
            self.event(stream, offset, &carried);
        }
    }
}

impl Subscriber for EventWriter<'_> {
    fn client(&mut self) -> &mut dyn Client {
        &mut self.client
    }

    fn output(&mut self, stream: Stream, mut offset: u64, mut data: &[u8]) {
        if self.encoding == Encoding::Base64 && self.plain.is_none() {
            return self.event(stream, offset, data);
        }
        if std::mem::take(&mut self.torn[stream.index()]) {
            // The rest of a character whose first bytes were dropped counts as dropped.
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
        if self.plain.is_some() {
            return self.plain_output(stream, offset, data);
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
        self.torn[stream.index()] = self.encoding == Encoding::Utf8 || self.plain.is_some();
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
        // A client that resumes reads a half character or sequence again, whole.
        let [stdout, stderr] = Stream::ALL.map(|stream| {
            let (offset, carried) = &self.carried[stream.index()];
            let plain = self.plain.as_ref().map(|plain| &plain[stream.index()]);
            if let Some(filter) = plain.and_then(|plain| plain.filter.as_ref()) {
                cursor.next(stream) - filter.pending()
            } else if carried.is_empty() {
                cursor.next(stream)
            } else {
                *offset
            }
        });
        self.line(|out| {
            write!(
                out,
                "{{\"event\":\"end\",\"running\":true,\"stdout_offset\":{stdout},\"stderr_offset\":{stderr}}}"
            )
        });
    }
}
