//! A request as a handler sees it: the head, and a body that is read on demand.
//!
//! The body reader knows where the body ends and nothing can be read beyond it. It sends
//! `100 Continue` when the first byte is wanted, so a refused upload is refused before it is sent.

use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

use super::chunked::{Decoder, Step};
use super::parse::{self, Framing, Head, ParseError, Progress};
use super::response::Refusal;
use super::stream::Disconnected;
use crate::sys::{Events, PollEntry, poll};

/// From the first byte of a head to its last.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
/// Between two bytes of a body; the socket's receive timeout.
pub(super) const BODY_LIMIT: Duration = Duration::from_secs(60);
/// For all of a body that nobody wants.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);
/// Receive timeouts in a row, without a byte of a request, after which a connection is closed: 120 s.
const IDLE_TIMEOUTS: usize = 2;
/// What is received at once while waiting for a head: an idle connection keeps this much memory.
const HEAD_RECEIVE_BYTES: usize = 4 * 1024;
/// What is received at once of a chunked body, which must be looked through for its framing.
const CHUNKED_RECEIVE_BYTES: usize = 64 * 1024;

/// One request.
pub struct Request<'c> {
    /// Everything but the body.
    pub head: Head,
    /// The body.
    pub body: BodyReader<'c>,
}

/// The receiving half of a connection, with what was received and not used yet.
pub(super) struct Input {
    socket: Arc<TcpStream>,
    buffer: Vec<u8>,
    used: usize,
    /// Bytes that came in all.
    received: u64,
    /// Until when what is being waited for has to come, besides the limit between two bytes.
    deadline: Option<Instant>,
}

/// Why no (more of a) request comes.
#[derive(Debug)]
pub enum ReceiveError {
    /// The client has closed, or the connection is broken.
    Closed,
    /// It took too long.
    TimedOut,
    /// What came is no HTTP.
    Parse(ParseError),
    /// A body is larger than the handler takes.
    TooLarge(u64),
}

impl From<ReceiveError> for Refusal {
    fn from(error: ReceiveError) -> Self {
        match error {
            // Nobody reads this answer.
            ReceiveError::Closed => {
                Self::new(400, "disconnected", "the client closed the connection")
            }
            ReceiveError::TimedOut => Self::new(
                408,
                "timeout",
                "the request took too long to arrive: a head has 10 s, and 60 s may pass between bytes of a body",
            ),
            ReceiveError::TooLarge(limit) => Self::new(
                413,
                "too_large",
                format!("the body is larger than {limit} bytes; use files/write for large data"),
            ),
            ReceiveError::Parse(ParseError::Malformed(what)) => {
                Self::new(400, "bad_request", format!("this is not HTTP/1.1: {what}"))
            }
            ReceiveError::Parse(ParseError::HeadTooLarge) => Self::new(
                431,
                "head_too_large",
                format!(
                    "the request's head is larger than {} bytes or has more than {} fields",
                    super::MAX_HEAD_BYTES,
                    super::MAX_HEADERS
                ),
            ),
            ReceiveError::Parse(ParseError::TargetTooLong) => Self::new(
                414,
                "uri_too_long",
                format!(
                    "the request target is longer than {} bytes",
                    super::MAX_TARGET_BYTES
                ),
            ),
            ReceiveError::Parse(ParseError::ExpectationUnknown) => Self::new(
                417,
                "expectation_failed",
                "the only expectation understood is 100-continue",
            ),
        }
    }
}

impl Input {
    pub(super) fn new(socket: Arc<TcpStream>) -> Self {
        Self {
            socket,
            buffer: Vec::new(),
            used: 0,
            received: 0,
            deadline: None,
        }
    }

    fn unused(&self) -> &[u8] {
        &self.buffer[self.used..]
    }

    fn consume(&mut self, count: usize) {
        self.used += count;
        if self.used == self.buffer.len() {
            self.buffer.clear();
            self.used = 0;
        }
    }

    /// Waits for the next request and reads its head; `None` when no further one comes.
    pub(super) fn read_head(&mut self) -> Result<Option<Head>, ReceiveError> {
        let mut begun: Option<Instant> = None;
        let mut timeouts = 0;
        // How much of the buffer the parser has seen in vain.
        let mut seen = 0;
        loop {
            // Line ends before a request are left over from a careless client: no request has begun.
            while seen == 0 && self.unused().starts_with(b"\r\n") {
                self.consume(2);
            }
            if is_worth_parsing(self.unused(), seen) {
                match parse::head(self.unused()).map_err(ReceiveError::Parse)? {
                    Progress::Complete(head, length) => {
                        self.consume(length);
                        return Ok(Some(head));
                    }
                    Progress::Partial => {}
                }
            }
            seen = self.unused().len();
            if seen == 0 {
                // An idle connection keeps no more than it needs for the next head.
                self.buffer.shrink_to(HEAD_RECEIVE_BYTES);
            } else {
                let begun = *begun.get_or_insert_with(Instant::now);
                self.deadline = Some(begun + HEAD_LIMIT);
            }
            let received = self.receive(HEAD_RECEIVE_BYTES);
            let deadline = self.deadline.take();
            match received {
                Ok(()) => {}
                Err(ReceiveError::TimedOut) if deadline.is_some() => {
                    return Err(ReceiveError::TimedOut);
                }
                Err(ReceiveError::TimedOut) => {
                    timeouts += 1;
                    if timeouts == IDLE_TIMEOUTS {
                        return Ok(None);
                    }
                }
                // A connection may end between requests; in the middle of a head nobody wants an answer.
                Err(_) => return Ok(None),
            }
        }
    }

    /// Receives once, up to `most` bytes, to the end of the buffer.
    fn receive(&mut self, most: usize) -> Result<(), ReceiveError> {
        if self.used > 0 {
            self.buffer.drain(..self.used);
            self.used = 0;
        }
        let before = self.buffer.len();
        self.buffer.resize(before + most, 0);
        let mut buffer = std::mem::take(&mut self.buffer);
        let result = self.receive_into(&mut buffer[before..]);
        self.buffer = buffer;
        self.buffer
            .truncate(before + *result.as_ref().unwrap_or(&0));
        result.map(drop)
    }

    /// Receives what there is, waiting for at most [`BODY_LIMIT`], or until the deadline if one is set.
    fn receive_into(&mut self, into: &mut [u8]) -> Result<usize, ReceiveError> {
        loop {
            if let Some(deadline) = self.deadline {
                let left = deadline.saturating_duration_since(Instant::now());
                let mut readable = [PollEntry::new(self.socket.as_fd(), Events::READABLE)];
                if left.is_zero() || !poll(&mut readable, Some(left)) {
                    return Err(ReceiveError::TimedOut);
                }
            }
            match recv(self.socket.as_raw_fd(), into, MsgFlags::empty()) {
                Ok(0) => return Err(ReceiveError::Closed),
                Ok(count) => {
                    self.received += count as u64;
                    return Ok(count);
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Err(ReceiveError::TimedOut),
                Err(_) => return Err(ReceiveError::Closed),
            }
        }
    }
}

/// Whether the parser could say something new, having seen the first `seen` bytes: a head is decided
/// line by line, and by its limits.
fn is_worth_parsing(bytes: &[u8], seen: usize) -> bool {
    let crossed = |limit: usize| seen < limit && bytes.len() >= limit;
    let decides = |byte: &u8| matches!(byte, b'\n' | b'\r' | 0);
    bytes[seen..].iter().any(decides)
        || crossed(super::MAX_TARGET_BYTES + 65)
        || crossed(super::MAX_HEAD_BYTES)
}

/// Watches whether the client of a request is still there while it waits for its answer.
///
/// A client that has closed its sending half may be gone or may be waiting. Only sending tells: an
/// interim response, which any client of HTTP/1.1 passes over (RFC 9110 section 15.2), is answered
/// by a reset if nobody is there.
pub struct ClientWatch {
    socket: Arc<TcpStream>,
    half_closed: bool,
    can_probe: bool,
}

impl ClientWatch {
    /// The socket, for polling.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// What to poll the socket for.
    pub fn interest(&self) -> Events {
        Events::NONE.and_if(!self.half_closed, Events::PEER_CLOSED)
    }

    /// Told what poll found.
    ///
    /// # Errors
    /// The client is gone.
    pub fn ready(&mut self, events: Events) -> Result<(), Disconnected> {
        if events.has(Events::BROKEN) {
            return Err(Disconnected);
        }
        if events.has(Events::PEER_CLOSED) && !self.half_closed {
            self.half_closed = true;
            if !self.can_probe {
                return Ok(());
            }
            let line = b"HTTP/1.1 102 Processing\r\n\r\n";
            send(
                self.socket.as_raw_fd(),
                line,
                MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT,
            )
            .map_err(|_| Disconnected)?;
        }
        Ok(())
    }
}

/// The body of a request, up to its end.
pub struct BodyReader<'c> {
    input: &'c mut Input,
    state: State,
    /// The client waits for a go-ahead that was not given yet.
    awaits_continue: bool,
    /// The client understands interim responses.
    http_1_1: bool,
}

enum State {
    Length(u64),
    Chunked(Decoder),
    Ended,
    /// Reading failed: nothing is known about what follows on the connection.
    Failed,
}

impl<'c> BodyReader<'c> {
    pub(super) fn new(input: &'c mut Input, head: &Head) -> Self {
        let state = match head.framing {
            Framing::None | Framing::Length(0) => State::Ended,
            Framing::Length(length) => State::Length(length),
            Framing::Chunked => State::Chunked(Decoder::default()),
        };
        Self {
            input,
            state,
            awaits_continue: head.expects_continue,
            http_1_1: head.minor_version == 1,
        }
    }

    /// Bytes that are still to come, where the client said.
    pub fn remaining(&self) -> Option<u64> {
        match self.state {
            State::Length(left) => Some(left),
            State::Ended => Some(0),
            State::Chunked(_) | State::Failed => None,
        }
    }

    /// The client, to be watched while something else is waited for.
    pub fn watch_client(&self) -> ClientWatch {
        ClientWatch {
            socket: Arc::clone(&self.input.socket),
            half_closed: false,
            can_probe: self.http_1_1,
        }
    }

    /// Reads what there is, at least one byte; 0 at the end of the body.
    ///
    /// # Errors
    /// The body does not come to its end.
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, ReceiveError> {
        if self.awaits_continue {
            self.awaits_continue = false;
            let line = b"HTTP/1.1 100 Continue\r\n\r\n";
            if send(self.input.socket.as_raw_fd(), line, MsgFlags::MSG_NOSIGNAL) != Ok(line.len()) {
                self.state = State::Failed;
                return Err(ReceiveError::Closed);
            }
        }
        let result = match &mut self.state {
            State::Ended => return Ok(0),
            State::Failed => return Err(ReceiveError::Closed),
            State::Length(left) => read_length(self.input, left, into),
            State::Chunked(decoder) => read_chunked(self.input, decoder, into),
        };
        match result {
            Ok(0) => self.state = State::Ended,
            Ok(_) if matches!(self.state, State::Length(0)) => self.state = State::Ended,
            Ok(_) => {}
            Err(_) => self.state = State::Failed,
        }
        result
    }

    /// Reads all of a body of at most `limit` bytes.
    ///
    /// # Errors
    /// It is larger, or does not come to its end.
    pub fn read_all(&mut self, limit: u64) -> Result<Vec<u8>, ReceiveError> {
        let announced = self.remaining().unwrap_or(0);
        if announced > limit {
            return Err(ReceiveError::TooLarge(limit));
        }
        let mut body = Vec::new();
        let mut length = 0;
        loop {
            if body.len() == length {
                // Memory follows what has come, not what was announced.
                body.resize(length + length.clamp(4096, 1 << 20), 0);
            }
            let count = self.read(&mut body[length..])?;
            if count == 0 {
                body.truncate(length);
                return Ok(body);
            }
            length += count;
            if length as u64 > limit {
                return Err(ReceiveError::TooLarge(limit));
            }
        }
    }

    /// Whether what is left can be read for nothing; if not, the connection has to be closed.
    pub(super) fn is_drainable(&self) -> bool {
        match self.state {
            State::Ended => true,
            State::Failed => false,
            State::Length(left) => !self.awaits_continue && left <= super::MAX_DRAINED_BYTES,
            State::Chunked(_) => !self.awaits_continue,
        }
    }

    /// Reads what is left for nothing. False when there is too much of it.
    pub(super) fn drain(&mut self) -> bool {
        if !self.is_drainable() {
            return false;
        }
        let start = self.input.received;
        self.input.deadline = Some(Instant::now() + DRAIN_LIMIT);
        let mut scratch = [0; 4096];
        let drained = loop {
            match self.read(&mut scratch) {
                Ok(0) => break true,
                Ok(_) if self.input.received - start <= super::MAX_DRAINED_BYTES => {}
                _ => break false,
            }
        };
        self.input.deadline = None;
        drained
    }
}

fn read_length(input: &mut Input, left: &mut u64, into: &mut [u8]) -> Result<usize, ReceiveError> {
    let most = into.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
    let unused = input.unused();
    let count = if unused.is_empty() {
        input.receive_into(&mut into[..most])?
    } else {
        let count = unused.len().min(most);
        into[..count].copy_from_slice(&unused[..count]);
        input.consume(count);
        count
    };
    *left -= count as u64;
    Ok(count)
}

fn read_chunked(
    input: &mut Input,
    decoder: &mut Decoder,
    into: &mut [u8],
) -> Result<usize, ReceiveError> {
    loop {
        if input.unused().is_empty() {
            input.receive(CHUNKED_RECEIVE_BYTES)?;
        }
        let shown = input.unused();
        // Shown no more than fits, so that all data found can be taken at once; framing is small.
        let shown = &shown[..shown.len().min(into.len())];
        match decoder.step(shown).map_err(ReceiveError::Parse)? {
            Step::More(count) => input.consume(count),
            Step::Data { skip, length } => {
                into[..length].copy_from_slice(&shown[skip..skip + length]);
                input.consume(skip + length);
                return Ok(length);
            }
            Step::End(count) => {
                input.consume(count);
                return Ok(0);
            }
        }
    }
}
