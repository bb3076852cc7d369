//! The receiving half of a connection: what was received and not used yet, and how far a body has
//! come.
//!
//! It serves both sides of a relayed exchange, the client's and the upstream server's. Waiting has a
//! limit everywhere; where somebody polls, nothing here waits at all.

use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{SpliceFFlags, splice};
use nix::sys::socket::{MsgFlags, recv};

use super::chunked::{Decoder, Step};
use super::parse::{self, Framing, Head, ParseError, Progress, ResponseHead};
use super::response::Refusal;
use crate::sys::{self, Events, PollEntry, poll};

/// From the first byte of a head to its last.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
/// Between two bytes of a body; the socket's receive timeout.
pub(super) const BODY_LIMIT: Duration = Duration::from_secs(60);
/// Receive timeouts in a row, without a byte of a request, after which a connection is closed: 120 s.
const IDLE_TIMEOUTS: usize = 2;
/// What is received at once while waiting for a head.
const HEAD_RECEIVE_BYTES: usize = 4 * 1024;
/// What is received at once of a chunked body, which must be looked through for its framing.
const CHUNKED_RECEIVE_BYTES: usize = 64 * 1024;

/// What is asked for at once of a body that is spliced; no pipe holds so much.
const MAX_SPLICED_BYTES: usize = 1 << 30;

/// The receiving half of a connection, with what was received and not used yet.
pub(super) struct Input<S = Arc<TcpStream>> {
    socket: S,
    buffer: Vec<u8>,
    used: usize,
    /// Bytes that came in all.
    received: u64,
    /// Whether it is waited for what has not come.
    waits: bool,
    /// Until when what is being waited for has to come, besides the limit between two bytes.
    deadline: Option<Instant>,
}

/// Why no (more of a) request comes.
#[derive(Debug)]
pub enum ReceiveError {
    /// The sender has closed.
    Closed,
    /// The connection is broken.
    Reset,
    /// It took too long.
    TimedOut,
    /// What came is no HTTP.
    Parse(ParseError),
    /// A body is larger than the handler takes.
    TooLarge(u64),
    /// There is no memory for a body.
    NoMemory,
}

impl From<ReceiveError> for Refusal {
    fn from(error: ReceiveError) -> Self {
        match error {
            // Nobody reads this answer.
            ReceiveError::Closed | ReceiveError::Reset => {
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
            ReceiveError::NoMemory => Self::new(
                503,
                "no_memory",
                "the machine has no memory left for this body (ENOMEM); try again later, or use files/write for large data",
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

impl<S: AsFd> Input<S> {
    pub(super) fn new(socket: S) -> Self {
        Self {
            socket,
            buffer: Vec::new(),
            used: 0,
            received: 0,
            waits: true,
            deadline: None,
        }
    }

    /// Where it is received.
    pub(super) fn socket(&self) -> &S {
        &self.socket
    }

    /// Bytes that were received in all.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Sets until when what is read has to come.
    pub(super) fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// What was received and not used.
    pub(super) fn unused(&self) -> &[u8] {
        &self.buffer[self.used..]
    }

    /// Uses bytes.
    pub(super) fn consume(&mut self, count: usize) {
        self.used += count;
        if self.used == self.buffer.len() {
            self.buffer.clear();
            self.used = 0;
        }
    }

    /// Whether it has memory that it does not need while nothing comes.
    pub(super) fn can_rest(&self) -> bool {
        self.buffer.is_empty() && self.buffer.capacity() > HEAD_RECEIVE_BYTES
    }

    /// Gives that memory back.
    pub(super) fn rest(&mut self) {
        self.buffer.shrink_to(HEAD_RECEIVE_BYTES);
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
                // An idle connection keeps nothing.
                self.buffer = Vec::new();
            } else {
                let begun = *begun.get_or_insert_with(Instant::now);
                self.deadline = Some(begun + HEAD_LIMIT);
            }
            let received = self.receive_head();
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

    /// Receives more of a head: by way of the stack, which has the room anyway, so that a connection
    /// that waits keeps no memory for what may come. Apart from what handles the request, so that
    /// both use the same room.
    #[inline(never)]
    fn receive_head(&mut self) -> Result<(), ReceiveError> {
        self.forget_used();
        let mut received = [0; HEAD_RECEIVE_BYTES];
        let count = self.receive_into(&mut received)?;
        self.buffer.extend_from_slice(&received[..count]);
        Ok(())
    }

    /// Receives more of a chunked body, to the end of the buffer.
    fn receive_chunks(&mut self) -> Result<(), ReceiveError> {
        self.forget_used();
        let mut buffer = std::mem::take(&mut self.buffer);
        let result = self.receive_append(&mut buffer, CHUNKED_RECEIVE_BYTES);
        self.buffer = buffer;
        result.map(drop)
    }

    fn forget_used(&mut self) {
        self.buffer.drain(..self.used);
        self.used = 0;
    }

    /// Reads the head of a response as far as it has come, without waiting; `None` if that is not all
    /// of it. The parser has seen `seen` bytes of it in vain.
    pub(super) fn read_available_response(
        &mut self,
        seen: &mut usize,
    ) -> Result<Option<ResponseHead>, ReceiveError> {
        loop {
            if is_worth_parsing(self.unused(), *seen) {
                match parse::response_head(self.unused()).map_err(ReceiveError::Parse)? {
                    Progress::Complete(head, length) => {
                        self.consume(length);
                        *seen = 0;
                        return Ok(Some(head));
                    }
                    Progress::Partial => {}
                }
            }
            *seen = self.unused().len();
            self.waits = false;
            let received = self.receive_head();
            self.waits = true;
            match received {
                Ok(()) => {}
                Err(ReceiveError::TimedOut) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes what was received before, or else receives.
    pub(super) fn take(&mut self, into: &mut [u8]) -> Result<usize, ReceiveError> {
        let unused = self.unused();
        if unused.is_empty() {
            return self.receive_into(into);
        }
        let count = unused.len().min(into.len());
        into[..count].copy_from_slice(&unused[..count]);
        self.consume(count);
        Ok(count)
    }

    /// Receives what there is, waiting for at most [`BODY_LIMIT`], or until the deadline if one is set.
    fn receive_into(&mut self, into: &mut [u8]) -> Result<usize, ReceiveError> {
        let flags = if self.waits {
            MsgFlags::empty()
        } else {
            MsgFlags::MSG_DONTWAIT
        };
        self.receive_by(|socket, _| recv(socket.as_raw_fd(), into, flags))
    }

    /// The same, into a pipe that has room, without copying. `None` where the kernel does not do that.
    fn receive_spliced(
        &mut self,
        pipe: BorrowedFd<'_>,
        most: usize,
    ) -> Result<Option<usize>, ReceiveError> {
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

    /// The same, to the end of `out`.
    fn receive_append(&mut self, out: &mut Vec<u8>, most: usize) -> Result<usize, ReceiveError> {
        self.receive_by(|socket, waits| sys::receive_append(socket, out, most, waits))
    }

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
            match receive(self.socket.as_fd(), self.waits) {
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

/// Whether the parser could say something new, having seen the first `seen` bytes: a head is decided
/// line by line, and by its limits.
fn is_worth_parsing(bytes: &[u8], seen: usize) -> bool {
    // The first few bytes tell another protocol.
    let begins = seen < 8 && bytes.len() > seen;
    let crossed = |limit: usize| seen < limit && bytes.len() >= limit;
    let decides = |byte: &u8| matches!(byte, b'\n' | b'\r' | 0);
    begins
        || bytes[seen..].iter().any(decides)
        || crossed(super::MAX_TARGET_BYTES + 65)
        || crossed(super::MAX_HEAD_BYTES)
}

/// How much of a body is still to come.
pub(super) enum Remaining {
    /// So many bytes.
    Length(u64),
    /// Chunks.
    Chunked(Decoder),
    /// Everything until the sender closes, as only a response may have it.
    UntilClose,
    /// Nothing.
    Ended,
    /// Reading failed: nothing is known about what follows on the connection.
    Failed,
}

impl Remaining {
    pub(super) fn new(framing: Framing) -> Self {
        match framing {
            Framing::None | Framing::Length(0) => Self::Ended,
            Framing::Length(length) => Self::Length(length),
            Framing::Chunked => Self::Chunked(Decoder::default()),
        }
    }

    /// Reads what there is, at least one byte; 0 at the end of the body.
    pub(super) fn read<S: AsFd>(
        &mut self,
        input: &mut Input<S>,
        into: &mut [u8],
    ) -> Result<usize, ReceiveError> {
        let result = self.advance(input, into);
        if result.is_err() {
            *self = Self::Failed;
        }
        result
    }

    /// Moves what there is into a pipe that has room, at least one byte. `None` if it can only be read:
    /// it has no length, some of it was received already, nothing is left, or the kernel refuses.
    pub(super) fn splice<S: AsFd>(
        &mut self,
        input: &mut Input<S>,
        pipe: BorrowedFd<'_>,
    ) -> Result<Option<usize>, ReceiveError> {
        let Self::Length(left) = self else {
            return Ok(None);
        };
        if !input.unused().is_empty() {
            return Ok(None);
        }
        let most =
            usize::try_from(*left).map_or(MAX_SPLICED_BYTES, |left| left.min(MAX_SPLICED_BYTES));
        let result = input.receive_spliced(pipe, most);
        match &result {
            Ok(count) => *left -= count.unwrap_or(0) as u64,
            Err(_) => *self = Self::Failed,
        }
        if matches!(self, Self::Length(0)) {
            *self = Self::Ended;
        }
        result
    }

    /// Appends what has come, at most `most` bytes, without waiting for any.
    pub(super) fn append_available<S: AsFd>(
        &mut self,
        input: &mut Input<S>,
        out: &mut Vec<u8>,
        most: usize,
    ) -> Result<(), ReceiveError> {
        input.waits = false;
        let result = match self {
            Self::Chunked(_) => self.append_chunks(input, out, most),
            _ => self.append_plain(input, out, most),
        };
        input.waits = true;
        match result {
            Ok(()) | Err(ReceiveError::TimedOut) => Ok(()),
            Err(error) => {
                *self = Self::Failed;
                Err(error)
            }
        }
    }

    /// Large bodies move this way: straight to where they are sent from.
    fn append_plain<S: AsFd>(
        &mut self,
        input: &mut Input<S>,
        out: &mut Vec<u8>,
        most: usize,
    ) -> Result<(), ReceiveError> {
        let most = match self {
            Self::Length(left) => most.min(usize::try_from(*left).unwrap_or(usize::MAX)),
            Self::UntilClose => most,
            Self::Ended => return Ok(()),
            Self::Failed | Self::Chunked(_) => return Err(ReceiveError::Closed),
        };
        let unused = input.unused();
        let result = if unused.is_empty() {
            input.receive_append(out, most)
        } else {
            let count = unused.len().min(most);
            out.extend_from_slice(&unused[..count]);
            input.consume(count);
            Ok(count)
        };
        let count = match result {
            Err(ReceiveError::Closed) if matches!(self, Self::UntilClose) => {
                *self = Self::Ended;
                return Ok(());
            }
            other => other? as u64,
        };
        if let Self::Length(left) = self {
            *left -= count;
            if *left == 0 {
                *self = Self::Ended;
            }
        }
        Ok(())
    }

    fn append_chunks<S: AsFd>(
        &mut self,
        input: &mut Input<S>,
        out: &mut Vec<u8>,
        most: usize,
    ) -> Result<(), ReceiveError> {
        let begin = out.len();
        let mut length = begin;
        out.resize(begin + most, 0);
        let result = loop {
            match self.advance(input, &mut out[length..]) {
                Ok(0) => break Ok(()),
                Ok(count) => length += count,
                // What came before is good.
                Err(error) => break Err(error),
            }
            // Small chunks that came together go on together.
            if length == out.len() || input.unused().is_empty() {
                break Ok(());
            }
        };
        out.truncate(length);
        match result {
            Err(ReceiveError::TimedOut) | Ok(()) => Ok(()),
            Err(_) if length > begin => {
                // The next call fails.
                *self = Self::Failed;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Whether reading failed.
    pub(super) fn has_failed(&self) -> bool {
        matches!(self, Self::Failed)
    }

    fn advance<S: AsFd>(
        &mut self,
        input: &mut Input<S>,
        into: &mut [u8],
    ) -> Result<usize, ReceiveError> {
        let count = match self {
            Self::Ended => 0,
            Self::Failed => return Err(ReceiveError::Closed),
            Self::Length(left) => {
                let most = into.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                let count = input.take(&mut into[..most])?;
                *left -= count as u64;
                if *left == 0 {
                    *self = Self::Ended;
                }
                return Ok(count);
            }
            Self::UntilClose => match input.take(into) {
                Err(ReceiveError::Closed) => 0,
                other => other?,
            },
            Self::Chunked(decoder) => read_chunked(input, decoder, into)?,
        };
        if count == 0 {
            *self = Self::Ended;
        }
        Ok(count)
    }
}

fn read_chunked<S: AsFd>(
    input: &mut Input<S>,
    decoder: &mut Decoder,
    into: &mut [u8],
) -> Result<usize, ReceiveError> {
    loop {
        if input.unused().is_empty() {
            input.receive_chunks()?;
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
