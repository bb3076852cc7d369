//! The receiving half of a connection: a buffer in front of a socket, and the heads of messages.
//!
//! Both sides of a proxied exchange are read through it. It keeps what was received and not consumed,
//! so pipelined bytes are not lost, and it limits every wait. It may call `parse` and `sys`; where a
//! body ends is up to `body`.

use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{SpliceFFlags, splice};
use nix::sys::socket::{MsgFlags, recv};

use super::parse::{
    self, Head, MAX_HEAD_BYTES, MAX_TARGET_BYTES, ParseError, Progress, ResponseHead,
};
use crate::limits::ledger::{Charge, Item, Ledger, OverLimit};
use crate::sys::{self, Events, PollEntry, poll};

/// From the first byte of a head to its last.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
/// Between two bytes of a body; the socket's receive timeout.
pub const BODY_LIMIT: Duration = Duration::from_secs(60);
/// An idle connection is closed after this many receive timeouts in a row: 120 s.
const IDLE_TIMEOUTS: usize = 2;
/// Size of one receive while a head is read.
const HEAD_RECEIVE_BYTES: usize = 4 * 1024;
/// A head up to this length is not charged.
const FREE_HEAD_BYTES: usize = 2 * HEAD_RECEIVE_BYTES;
/// What a head takes as a multiple of its length: a buffer that grows, and the parsed fields.
const USES_OF_HEAD: usize = 3;
/// Size of one receive of a chunked body, which is searched for its framing.
const CHUNKED_RECEIVE_BYTES: usize = 64 * 1024;

/// The receiving half of a connection.
pub struct SocketReader<S = Arc<TcpStream>> {
    socket: S,
    buffer: Vec<u8>,
    /// Bytes at the beginning of `buffer` that were consumed.
    consumed: usize,
    /// Unconsumed bytes in which the parser has found no complete head.
    scanned: usize,
    /// Bytes received since the connection began.
    received: u64,
    /// False inside [`SocketReader::without_blocking`].
    blocks: bool,
    /// Ends a wait in addition to [`BODY_LIMIT`].
    deadline: Option<Instant>,
    /// Ends the wait for a head in addition to [`HEAD_LIMIT`].
    head_deadline: Option<Instant>,
    /// For a large head. That of a request is charged until the next one.
    head_charge: Option<Charge>,
    /// What large heads and the buffer of a chunked body are charged to.
    ledger: Option<Arc<Ledger>>,
    chunk_charge: Option<Charge>,
}

/// Why a message, or its rest, cannot be received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiveError {
    /// The sender closed its side.
    Closed,
    /// The connection broke.
    Reset,
    /// A limit passed; inside [`SocketReader::without_blocking`], nothing has arrived.
    TimedOut,
    /// The bytes are not HTTP.
    Parse(ParseError),
    /// The body is larger than this many bytes, the handler's limit.
    TooLarge(u64),
    /// The server has no memory for the body.
    NoMemory,
    /// The tenant holds its share of the server's memory.
    OverLimit(OverLimit),
}

impl From<OverLimit> for ReceiveError {
    fn from(error: OverLimit) -> Self {
        Self::OverLimit(error)
    }
}

impl From<ParseError> for ReceiveError {
    fn from(error: ParseError) -> Self {
        Self::Parse(error)
    }
}

impl<S: AsFd> SocketReader<S> {
    pub fn new(socket: S) -> Self {
        Self {
            socket,
            buffer: Vec::new(),
            consumed: 0,
            scanned: 0,
            received: 0,
            blocks: true,
            deadline: None,
            head_deadline: None,
            head_charge: None,
            ledger: None,
            chunk_charge: None,
        }
    }

    /// Charges large heads of responses and the buffer of a chunked body to `ledger`.
    pub fn charge_to(&mut self, ledger: &Arc<Ledger>) {
        self.ledger = Some(Arc::clone(ledger));
    }

    /// The socket, for polling and sending.
    pub fn socket(&self) -> &S {
        &self.socket
    }

    /// Bytes received since the connection began.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Limits all further waits; `None` leaves the limit between two bytes.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Limits how long heads of requests may take, and the silence before them.
    pub fn limit_head(&mut self, deadline: Option<Instant>) {
        self.head_deadline = deadline;
    }

    /// What was received and not consumed.
    pub fn unused(&self) -> &[u8] {
        &self.buffer[self.consumed..]
    }

    /// Consumes bytes of [`SocketReader::unused`].
    pub fn consume(&mut self, count: usize) {
        self.consumed += count;
        if self.consumed == self.buffer.len() {
            self.buffer.clear();
            self.consumed = 0;
        }
    }

    /// Gives buffer memory back that a quiet connection does not need.
    pub fn trim(&mut self) {
        self.buffer.shrink_to(HEAD_RECEIVE_BYTES);
    }

    /// Runs `receive`, in which nothing waits: where nothing has arrived, it fails with `TimedOut`.
    pub fn without_blocking<T>(&mut self, receive: impl FnOnce(&mut Self) -> T) -> T {
        self.blocks = false;
        let result = receive(self);
        self.blocks = true;
        result
    }

    /// Waits for the next request and reads its head. `None` if the client closes instead, in the
    /// middle of a head too, or stays idle for 120 s, or until the [limit](Self::limit_head). A large head is charged to
    /// what `ledger_for_much` returns, a chunked body to `ledger`. `before_wait` gets the socket before each receive.
    pub fn read_head(
        &mut self,
        ledger: &Arc<Ledger>,
        ledger_for_much: impl Fn() -> Arc<Ledger>,
        before_wait: impl Fn(BorrowedFd<'_>),
    ) -> Result<Option<Head>, ReceiveError> {
        // What is left is charged as a part of the next head, so it keeps no buffer of a large message.
        self.discard_consumed();
        self.buffer.shrink_to(FREE_HEAD_BYTES);
        self.head_charge = None;
        self.chunk_charge = None;
        self.ledger = Some(Arc::clone(ledger));
        let mut begun: Option<Instant> = None;
        let mut timeouts = 0;
        loop {
            // Careless clients send line ends after a body (RFC 9112 section 2.2). They are skipped
            // here because they do not begin a request, whose time is limited.
            while self.unused().starts_with(b"\r\n") {
                self.consume(2);
                self.scanned = self.scanned.saturating_sub(2);
            }
            if let Some(head) = self.take_head(parse::head)? {
                return Ok(Some(head));
            }
            let length = self.unused().len();
            if length == 0 {
                self.buffer = Vec::new();
                begun = None;
                self.deadline = self.head_deadline;
            } else {
                self.charge_head(|_| Some(ledger_for_much()))?;
                let begun = *begun.get_or_insert_with(Instant::now);
                let limit = begun + HEAD_LIMIT;
                self.deadline = Some(self.head_deadline.map_or(limit, |own| own.min(limit)));
            }
            before_wait(self.socket.as_fd());
            let received = self.receive_more_of_head();
            let deadline = self.deadline.take();
            match received {
                Ok(()) => {}
                Err(ReceiveError::TimedOut) if deadline.is_some() && length == 0 => {
                    return Ok(None);
                }
                Err(error @ ReceiveError::TimedOut) if deadline.is_some() => return Err(error),
                Err(ReceiveError::TimedOut) if timeouts + 1 < IDLE_TIMEOUTS => timeouts += 1,
                Err(_) => return Ok(None),
            }
        }
    }

    /// Charges what has arrived of a head, if it is large.
    fn charge_head(
        &mut self,
        ledger: impl FnOnce(&Self) -> Option<Arc<Ledger>>,
    ) -> Result<(), OverLimit> {
        let length = self.unused().len();
        if length <= FREE_HEAD_BYTES {
            return Ok(());
        }
        let bytes = length * USES_OF_HEAD;
        if let Some(charge) = &mut self.head_charge {
            charge.set(bytes)?;
        } else if let Some(ledger) = ledger(self) {
            self.head_charge = Some(ledger.charge(Item::Heads, bytes)?);
        }
        Ok(())
    }

    /// Reads the head of a response without blocking; `None` until all of it has arrived. A large head is charged, see
    /// [`SocketReader::charge_to`], as long as this reader lasts: whoever asked for it may keep it as long.
    pub fn try_read_response_head(&mut self) -> Result<Option<ResponseHead>, ReceiveError> {
        self.without_blocking(|reader| {
            loop {
                if let Some(head) = reader.take_head(parse::response_head)? {
                    return Ok(Some(head));
                }
                match reader.receive_more_of_head() {
                    Ok(()) => reader.charge_head(|reader| reader.ledger.clone())?,
                    Err(ReceiveError::TimedOut) => return Ok(None),
                    Err(error) => return Err(error),
                }
            }
        })
    }

    /// Consumes a head if all of it was received. The parser is asked only if bytes came that can
    /// change its answer: otherwise a head that arrives byte by byte would cost its square.
    fn take_head<H>(
        &mut self,
        parse: fn(&[u8]) -> Result<Progress<H>, ParseError>,
    ) -> Result<Option<H>, ReceiveError> {
        if is_worth_parsing(self.unused(), self.scanned)
            && let Progress::Complete(head, length) = parse(self.unused())?
        {
            self.consume(length);
            self.scanned = 0;
            return Ok(Some(head));
        }
        self.scanned = self.unused().len();
        Ok(None)
    }

    /// Receives by way of the stack, so that a connection that waits for a head has no buffer: 12.5 KiB
    /// of memory instead of 16.5. Not inlined, so that the stack it uses is the part that
    /// handling a request has touched anyway.
    #[inline(never)]
    fn receive_more_of_head(&mut self) -> Result<(), ReceiveError> {
        let mut received = [0; HEAD_RECEIVE_BYTES];
        let count = self.receive(&mut received)?;
        self.discard_consumed();
        self.buffer.extend_from_slice(&received[..count]);
        Ok(())
    }

    /// Receives more of a chunked body, behind the unused bytes.
    pub fn receive_chunks(&mut self) -> Result<(), ReceiveError> {
        self.discard_consumed();
        let mut most = CHUNKED_RECEIVE_BYTES;
        if let Some(ledger) = &self.ledger {
            let charge = self
                .chunk_charge
                .get_or_insert_with(|| ledger.charge_up_to(Item::Bodies, most, HEAD_RECEIVE_BYTES));
            most = charge.bytes();
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let result = self.receive_append(&mut buffer, most);
        self.buffer = buffer;
        result.map(drop)
    }

    fn discard_consumed(&mut self) {
        self.buffer.drain(..self.consumed);
        self.consumed = 0;
    }

    /// Takes unused bytes; receives only if there are none.
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, ReceiveError> {
        let unused = self.unused();
        if unused.is_empty() {
            return self.receive(into);
        }
        let count = unused.len().min(into.len());
        into[..count].copy_from_slice(&unused[..count]);
        self.consume(count);
        Ok(count)
    }

    /// As [`SocketReader::read`], but appends at most `most` bytes to `out`.
    pub fn read_append(&mut self, out: &mut Vec<u8>, most: usize) -> Result<usize, ReceiveError> {
        let unused = self.unused();
        if unused.is_empty() {
            return self.receive_append(out, most);
        }
        let count = unused.len().min(most);
        out.extend_from_slice(&unused[..count]);
        self.consume(count);
        Ok(count)
    }

    /// Moves at most `most` bytes into a pipe that has room, without copying them. `None` if the
    /// kernel cannot, or if there are unused bytes, which are not in the kernel any more.
    pub fn splice(
        &mut self,
        pipe: BorrowedFd<'_>,
        most: usize,
    ) -> Result<Option<usize>, ReceiveError> {
        if !self.unused().is_empty() {
            return Ok(None);
        }
        let mut is_refused = false;
        let received = self.receive_by(|socket, _| {
            let result = splice(socket, None, pipe, None, most, SpliceFFlags::empty());
            is_refused = matches!(result, Err(Errno::ENOSYS | Errno::EPERM | Errno::EINVAL));
            result
        });
        if is_refused {
            return Ok(None);
        }
        received.map(Some)
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, ReceiveError> {
        self.receive_by(|socket, blocks| {
            let mut flags = MsgFlags::empty();
            flags.set(MsgFlags::MSG_DONTWAIT, !blocks);
            recv(socket.as_raw_fd(), into, flags)
        })
    }

    fn receive_append(&mut self, out: &mut Vec<u8>, most: usize) -> Result<usize, ReceiveError> {
        self.receive_by(|socket, blocks| sys::receive_append(socket, out, most, blocks))
    }

    /// Receives once, and at least one byte. Waits for the socket's receive timeout, or until the
    /// deadline if there is one.
    fn receive_by(
        &mut self,
        mut receive: impl FnMut(BorrowedFd<'_>, bool) -> Result<usize, Errno>,
    ) -> Result<usize, ReceiveError> {
        loop {
            if let Some(deadline) = self.deadline {
                let left = deadline.saturating_duration_since(Instant::now());
                let mut readable = [PollEntry::new(self.socket.as_fd(), Events::READABLE)];
                if left.is_zero() || !poll(&mut readable, Some(left)) {
                    return Err(ReceiveError::TimedOut);
                }
            }
            match receive(self.socket.as_fd(), self.blocks) {
                Ok(0) => return Err(ReceiveError::Closed),
                Ok(count) => {
                    self.received += count as u64;
                    return Ok(count);
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Err(ReceiveError::TimedOut),
                Err(_) => return Err(ReceiveError::Reset),
            }
        }
    }
}

/// Whether the parser could answer something new, having seen the first `scanned` bytes. Line ends, NUL
/// and the limits decide a head; the first bytes already tell another protocol.
fn is_worth_parsing(bytes: &[u8], scanned: usize) -> bool {
    let begins = scanned < 8 && bytes.len() > scanned;
    let crossed = |limit: usize| scanned < limit && bytes.len() >= limit;
    let decides = |byte: &u8| matches!(byte, b'\n' | b'\r' | 0);
    begins
        || bytes[scanned..].iter().any(decides)
        || crossed(MAX_TARGET_BYTES + 65)
        || crossed(MAX_HEAD_BYTES)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::limits::ledger::Budget;

    /// A server inside may begin a head and never end it, for any number of clients.
    #[test]
    fn the_head_of_a_response_is_charged_while_it_arrives() {
        let ledger = Budget::new(200_000).whole();
        let is_free = || ledger.charge(Item::Heads, 100_000).is_ok();
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut reader = SocketReader::new(near);
        reader.charge_to(&ledger);
        let begin = [&b"HTTP/1.1 200 OK\r\nA: "[..], &vec![b'x'; 20_000]].concat();
        far.write_all(&begin).unwrap();
        assert!(matches!(reader.try_read_response_head(), Ok(None)));
        assert!(!is_free());
        far.write_all(&vec![b'x'; 20_000]).unwrap();
        let refused = reader.try_read_response_head();
        assert!(matches!(refused, Err(ReceiveError::OverLimit(_))));
        drop(reader);
        assert!(is_free());
    }
}
