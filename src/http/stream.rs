//! A body that is written in pieces, without blocking.
//!
//! Pieces go into a buffer, framed as chunks; [`StreamWriter::flush`] sends what the socket takes.
//! Writers add pieces only when the buffer is empty, which bounds it. The socket also tells whether
//! the far end is still there. A reset or a hang-up is the end; an end of file may only mean that the
//! client sends no more ([`StreamWriter::is_half_closed`]). A byte sent to a client that has disconnected is
//! answered by a reset, which the next poll reports.

use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};

use crate::client::{Client, Disconnected, Peer, send_all};
use crate::codec::{cut_character, escape};
use crate::limits::ledger::{Charge, Item, Ledger};
use crate::logging;
use crate::sys::Events;

/// A client that takes no data for this long while some is pending is disconnected. Shorter in unit
/// tests, which wait for it.
pub const SEND_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 300 });

/// Digits of a chunk's size. Fixed, so that the size can be filled in afterwards; leading zeros are
/// allowed.
const SIZE_DIGITS: usize = 8;

/// Capacity that an empty buffer keeps: one large read and its framing. One large event thus does not
/// cost its size for the rest of a long stream.
const MAX_KEPT_BYTES: usize = 264 * 1024;

/// Capacity that [`StreamWriter::trim`] leaves.
const TRIMMED_BYTES: usize = 8 * 1024;

/// What a body or the buffer of a stream may have without a charge. Streams of output charge
/// [more](StreamWriter::cover) before they read.
pub(super) const FREE_BYTES: usize = 64 * 1024;

/// Bytes of a large value that are added at a time: a multiple of three, which Base64 makes four of.
const PART_BYTES: usize = 2400;

/// What is sent before more of a large value is added. With one more part, as JSON, it needs no charge. Much less would
/// be many chunks, and some clients search all that they have for a line end after each.
const FULL_BYTES: usize = 48 * 1024;

/// The sending half of a connection, and the framing of one body.
pub struct StreamWriter<S = Arc<TcpStream>> {
    socket: S,
    pending: Vec<u8>,
    sent: usize,
    chunked: bool,
    half_closed: bool,
    /// Whether the body ends without its end.
    is_broken: bool,
    /// What [`StreamWriter::probe`] adds.
    probe: &'static [u8],
    /// Who holds the buffer; `None` if whoever writes the stream charges it.
    ledger: Option<Arc<Ledger>>,
    /// For the buffer beyond what is covered.
    charge: Option<Charge>,
    /// What the buffer may have without that.
    covered: usize,
}

impl StreamWriter {
    /// Moves what is to be sent to a stream of its own, for another thread; the caller ends the body.
    #[must_use]
    pub fn take(&mut self) -> Self {
        Self {
            socket: Arc::clone(&self.socket),
            pending: std::mem::take(&mut self.pending),
            sent: std::mem::take(&mut self.sent),
            probe: std::mem::take(&mut self.probe),
            ledger: self.ledger.clone(),
            charge: self.charge.take(),
            ..*self
        }
    }
}

#[cfg(test)]
impl StreamWriter {
    /// A stream without framing. Tests take what is pushed instead of flushing it.
    pub fn for_test(socket: TcpStream) -> Self {
        Self::new(Arc::new(socket), Vec::new(), false)
    }

    /// What was pushed and not sent.
    pub fn take_pending(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.pending)
    }
}

impl<S: AsFd> StreamWriter<S> {
    /// A stream that begins with `head`; pieces are framed if it is `chunked`.
    pub fn new(socket: S, head: Vec<u8>, chunked: bool) -> Self {
        Self {
            socket,
            pending: head,
            sent: 0,
            chunked,
            half_closed: false,
            is_broken: false,
            // A leading zero of the next chunk's size.
            probe: if chunked { b"0" } else { b"" },
            ledger: None,
            charge: None,
            covered: FREE_BYTES,
        }
    }

    /// Charges a large buffer to `ledger`. A stream whose tenant has no room is [broken off](Self::break_off).
    #[must_use]
    pub fn charged_to(mut self, ledger: &Arc<Ledger>) -> Self {
        self.ledger = Some(Arc::clone(ledger));
        self
    }

    /// Somebody else has charged this many bytes of the buffer.
    pub fn cover(&mut self, bytes: usize) {
        self.covered = self.covered.max(bytes);
    }

    /// Charges the existing buffer.
    fn settle(&mut self) {
        if self.pending.len() <= self.covered {
            return;
        }
        let held = self.pending.capacity();
        let Some(ledger) = &self.ledger else {
            return;
        };
        let charged = match &mut self.charge {
            Some(charge) => charge.set(held),
            None => ledger
                .charge(Item::Responses, held)
                .map(|charge| self.charge = Some(charge)),
        };
        if let Err(limit) = charged {
            logging::debug(format_args!("broke a stream off: {limit}"));
            self.discard();
            self.break_off();
        }
    }

    /// A stream for what precedes a response: interim responses, if the client knows them.
    pub fn for_interim(socket: S, http_1_1: bool) -> Self {
        let probe = b"HTTP/1.1 102 Processing\r\n\r\n";
        Self {
            probe: if http_1_1 { probe } else { b"" },
            ..Self::new(socket, Vec::new(), false)
        }
    }

    /// Adds one piece of the body: what `write` appends to the buffer.
    pub fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        if self.is_broken {
            return;
        }
        self.append(write);
        self.settle();
    }

    fn append(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        if !self.chunked {
            write(&mut self.pending);
            return;
        }
        let start = self.pending.len();
        self.pending.extend_from_slice(&[b'0'; SIZE_DIGITS]);
        self.pending.extend_from_slice(b"\r\n");
        let data = self.pending.len();
        write(&mut self.pending);
        let mut size = self.pending.len() - data;
        if size == 0 {
            // An empty chunk would end the body.
            self.pending.truncate(start);
            return;
        }
        for digit in self.pending[start..start + SIZE_DIGITS].iter_mut().rev() {
            *digit = b"0123456789abcdef"[size & 15];
            size >>= 4;
        }
        self.pending.extend_from_slice(b"\r\n");
    }

    /// Adds bytes without framing.
    pub fn push_raw(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// Adds bytes that have no meaning, once, if the format has such bytes: a client that has disconnected answers
    /// them with a reset. All clients of HTTP/1.1 skip interim responses (RFC 9110 section 15.2).
    pub fn probe(&mut self) {
        self.pending
            .extend_from_slice(std::mem::take(&mut self.probe));
    }

    /// Drops what was not sent.
    pub fn discard(&mut self) {
        self.pending = Vec::new();
        self.sent = 0;
        self.charge = None;
    }

    /// Ends the connection instead of the body, so that no client takes it for whole.
    pub fn break_off(&mut self) {
        self.is_broken = true;
    }

    pub fn finish(&mut self) {
        if self.chunked {
            self.pending.extend_from_slice(b"0\r\n\r\n");
        }
    }

    /// Sends what the socket takes without blocking.
    ///
    /// # Errors
    /// The client has disconnected.
    pub fn flush(&mut self) -> Result<(), Disconnected> {
        self.try_flush().map_err(|_| Disconnected)
    }

    /// As [`StreamWriter::flush`], with the errno.
    ///
    /// # Errors
    /// The far end takes no more: `ECONNRESET`, `EPIPE`.
    pub fn try_flush(&mut self) -> Result<(), Errno> {
        if self.is_broken {
            return Err(Errno::ECONNABORTED);
        }
        while self.sent < self.pending.len() {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match send(
                self.descriptor().as_raw_fd(),
                &self.pending[self.sent..],
                flags,
            ) {
                Ok(count) => self.sent += count,
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        self.pending.clear();
        self.sent = 0;
        // What is charged is given back.
        let kept = match self.charge.take() {
            Some(_) => self.covered,
            None => MAX_KEPT_BYTES,
        };
        self.pending.shrink_to(kept);
        Ok(())
    }

    /// Gives buffer memory back that a quiet stream does not need.
    pub fn trim(&mut self) {
        self.pending.shrink_to(TRIMMED_BYTES);
    }

    /// Whether everything was sent.
    pub fn is_flushed(&self) -> bool {
        self.pending.is_empty()
    }

    /// Bytes that were not sent yet.
    pub fn pending(&self) -> usize {
        self.pending.len() - self.sent
    }

    /// The socket, to share.
    pub fn socket(&self) -> &S {
        &self.socket
    }

    /// The socket, to poll.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The events to poll the socket for.
    pub fn interest(&self) -> Events {
        Events::NONE
            .and_if(!self.half_closed, Events::PEER_CLOSED)
            .and_if(!self.is_flushed(), Events::WRITABLE)
    }

    /// Handles the events that poll reported.
    ///
    /// # Errors
    /// The client has disconnected.
    pub fn ready(&mut self, events: Events) -> Result<(), Disconnected> {
        if events.has(Events::BROKEN) {
            return Err(Disconnected);
        }
        self.half_closed |= events.has(Events::PEER_CLOSED);
        Ok(())
    }

    /// Whether the client closed its sending side. It may be gone, or wait for the rest.
    pub fn is_half_closed(&self) -> bool {
        self.half_closed
    }
}

/// The client of a streamed response.
pub struct StreamClient<'a> {
    writer: &'a mut StreamWriter,
    ping: &'static [u8],
    ping_interval: Duration,
}

/// The longest time between pings of a client that closed its sending half. Only sending tells whether
/// it has disconnected, and a client that has disconnected is noticed within a second.
const HALF_CLOSED_PING: Duration = Duration::from_millis(500);

impl<'a> StreamClient<'a> {
    /// `ping` is the keep-alive of the stream's format.
    pub fn new(writer: &'a mut StreamWriter, ping: &'static [u8], ping_interval: Duration) -> Self {
        Self {
            writer,
            ping,
            ping_interval,
        }
    }

    /// Adds one piece, see [`StreamWriter::push`].
    pub fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.writer.push(write);
    }

    /// Adds `before`, what `append` makes of a value, and `after`. A large value is sent part by part, so that a client
    /// that does not read holds a small buffer; `append` may make of a byte six. If the value is text, parts end where
    /// characters do, else at a multiple of three bytes.
    ///
    /// # Errors
    /// The client has disconnected.
    pub fn push_value(
        &mut self,
        before: &str,
        value: &[u8],
        after: &str,
        is_text: bool,
        append: fn(&mut Vec<u8>, &[u8]),
    ) -> Result<(), Disconnected> {
        let (mut before, mut rest) = (before, value);
        loop {
            self.push(|out| {
                out.extend_from_slice(before.as_bytes());
                while !rest.is_empty() && out.len() < FULL_BYTES {
                    let mut end = rest.len().min(PART_BYTES);
                    if end < rest.len() && is_text {
                        end -= cut_character(&rest[..end]);
                    }
                    let (part, later) = rest.split_at(end);
                    append(out, part);
                    rest = later;
                }
                if rest.is_empty() {
                    out.extend_from_slice(after.as_bytes());
                }
            });
            if !rest.is_empty() || self.writer.pending() >= FULL_BYTES {
                send_all(self)?;
            }
            if rest.is_empty() {
                return Ok(());
            }
            before = "";
        }
    }

    /// Adds a text in a JSON string, as [`StreamClient::push_value`] does.
    ///
    /// # Errors
    /// The client has disconnected.
    pub fn push_text(
        &mut self,
        before: &str,
        text: &[u8],
        after: &str,
    ) -> Result<(), Disconnected> {
        self.push_value(before, text, after, true, escape::append)
    }
}

impl Peer for StreamClient<'_> {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.writer.descriptor()
    }

    fn interest(&self) -> Events {
        self.writer.interest()
    }

    fn ready(&mut self, events: Events) -> Result<(), Disconnected> {
        self.writer.ready(events)
    }
}

impl Client for StreamClient<'_> {
    fn ping(&mut self) {
        let ping = self.ping;
        self.push(|out| out.extend_from_slice(ping));
    }

    fn ping_after(&self) -> Duration {
        if self.writer.is_half_closed() {
            self.ping_interval.min(HALF_CLOSED_PING)
        } else {
            self.ping_interval
        }
    }

    fn flush(&mut self) -> Result<(), Disconnected> {
        self.writer.flush()
    }

    fn is_flushed(&self) -> bool {
        self.writer.is_flushed()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;
    use crate::limits::ledger::Budget;

    fn connected() -> (StreamWriter, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, _) = listener.accept().unwrap();
        (StreamWriter::for_test(socket), far)
    }

    fn add(stream: &mut StreamWriter, bytes: usize) {
        stream.push(|out| out.resize(out.len() + bytes, b'x'));
    }

    #[test]
    fn a_large_buffer_is_charged_until_it_is_sent() {
        let ledger = Budget::new(1 << 20).whole();
        let is_free = || ledger.charge(Item::Responses, 400_000).is_ok();
        let (stream, mut far) = connected();
        let mut stream = stream.charged_to(&ledger);
        add(&mut stream, FREE_BYTES);
        assert!(is_free());
        add(&mut stream, 300_000);
        assert!(!is_free());
        // It is still held by another thread.
        let mut stream = stream.take();
        assert!(!is_free());
        let mut taken = vec![0; FREE_BYTES + 300_000];
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| far.read_exact(&mut taken).unwrap());
            let mut client = StreamClient::new(&mut stream, b"", Duration::from_secs(60));
            send_all(&mut client).unwrap();
            reader.join().unwrap();
        });
        assert!(is_free());
        // What somebody else charges is not charged twice.
        stream.cover(300_000);
        add(&mut stream, 300_000);
        assert!(is_free());
        stream.discard();
        // Without room for it the stream has no end.
        add(&mut stream, 600_000);
        assert!(is_free() && stream.is_flushed());
        assert_eq!(stream.flush(), Err(Disconnected));
    }

    #[test]
    fn a_large_value_is_added_in_small_parts() {
        let text = "\u{1}\u{e9}\u{20ac}".repeat(100_000);
        for (value, is_text, append) in [
            (&text, true, escape::append as fn(&mut Vec<u8>, &[u8])),
            (&text, false, crate::codec::base64::append),
            (&String::new(), true, escape::append),
        ] {
            let ledger = Budget::new(1 << 10).whole();
            let (stream, mut far) = connected();
            let mut stream = stream.charged_to(&ledger);
            let mut expected = b"<".to_vec();
            append(&mut expected, value.as_bytes());
            expected.push(b'>');
            let mut taken = vec![0; expected.len()];
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| far.read_exact(&mut taken).unwrap());
                let mut client = StreamClient::new(&mut stream, b"", Duration::from_secs(60));
                let value = value.as_bytes();
                client.push_value("<", value, ">", is_text, append).unwrap();
                send_all(&mut client).unwrap();
                reader.join().unwrap();
            });
            assert!(taken == expected);
        }
    }
}
