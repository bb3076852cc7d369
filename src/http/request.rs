//! A request as a handler sees it: the head, and a body that is read on demand.
//!
//! The body reader knows where the body ends and nothing can be read beyond it. It sends
//! `100 Continue` when the first byte is wanted, so a refused upload is refused before it is sent.

use std::net::{IpAddr, TcpStream};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};

pub use super::input::ReceiveError;
use super::input::{Input, Remaining};
use super::parse::Head;
use super::stream::{Disconnected, StreamWriter};
use crate::memory::Room;
use crate::sys::Events;

/// For all of a body that nobody wants.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// Memory that reading JSON may take at once, as a multiple of its length: itself, a string in it as it
/// grows while its escapes are undone, and the copy that is kept.
const USES_OF_BODY: usize = 4;

/// As long as a body may become without more room than any connection has.
const FREE_BODY_BYTES: usize = 64 * 1024;

/// One request.
pub struct Request<'c> {
    /// Everything but the body.
    pub head: Head,
    /// The body.
    pub body: BodyReader<'c>,
    /// Whether answering may take its time. It may not on the thread that is kept for when there is
    /// no other.
    pub may_last: bool,
}

impl Request<'_> {
    /// Where the client is, as far as this machine can tell.
    pub fn client_address(&self) -> Option<IpAddr> {
        let address = self.body.input.socket().peer_addr().ok()?;
        Some(address.ip().to_canonical())
    }
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
            let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
            match send(self.socket.as_raw_fd(), line, flags) {
                // Where there is no room, what is there already does the same.
                Ok(_) | Err(Errno::EAGAIN) => {}
                Err(_) => return Err(Disconnected),
            }
        }
        Ok(())
    }
}

/// All of a body, with room for what is made of it.
pub struct WholeBody {
    bytes: Vec<u8>,
    _room: Room,
}

impl Deref for WholeBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The body of a request, up to its end.
pub struct BodyReader<'c> {
    input: &'c mut Input,
    left: Remaining,
    /// The client waits for a go-ahead that was not given yet.
    awaits_continue: bool,
    /// The client understands interim responses.
    http_1_1: bool,
}

impl<'c> BodyReader<'c> {
    pub(super) fn new(input: &'c mut Input, head: &Head) -> Self {
        Self {
            input,
            left: Remaining::new(head.framing),
            awaits_continue: head.expects_continue,
            http_1_1: head.minor_version == 1,
        }
    }

    /// Bytes that are still to come, where the client said.
    pub fn remaining(&self) -> Option<u64> {
        match self.left {
            Remaining::Length(left) => Some(left),
            Remaining::Ended => Some(0),
            Remaining::Chunked(_) | Remaining::UntilClose | Remaining::Failed => None,
        }
    }

    /// The client, to be watched while something else is waited for.
    pub fn watch_client(&self) -> ClientWatch {
        ClientWatch {
            socket: Arc::clone(self.input.socket()),
            half_closed: false,
            can_probe: self.http_1_1,
        }
    }

    /// Reads what there is, at least one byte; 0 at the end of the body.
    ///
    /// # Errors
    /// The body does not come to its end.
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, ReceiveError> {
        self.give_go_ahead()?;
        self.left.read(self.input, into)
    }

    /// Moves what there is into an empty pipe, at least one byte, without copying it. `None` if it can
    /// only be [read](Self::read), or is over.
    ///
    /// # Errors
    /// The body does not come to its end.
    pub fn splice(&mut self, pipe: BorrowedFd<'_>) -> Result<Option<usize>, ReceiveError> {
        self.give_go_ahead()?;
        self.left.splice(self.input, pipe)
    }

    /// Appends what has come, at most about `most` bytes, without waiting for any. The go-ahead is the
    /// caller's to give.
    pub(super) fn append_available(
        &mut self,
        out: &mut Vec<u8>,
        most: usize,
    ) -> Result<(), ReceiveError> {
        self.left.append_available(self.input, out, most)
    }

    /// Lets a client send the body that waits for `100 Continue`.
    fn give_go_ahead(&mut self) -> Result<(), ReceiveError> {
        let line = self.take_go_ahead();
        let socket = self.input.socket().as_raw_fd();
        if !line.is_empty() && send(socket, line, MsgFlags::MSG_NOSIGNAL) != Ok(line.len()) {
            self.left = Remaining::Failed;
            return Err(ReceiveError::Closed);
        }
        Ok(())
    }

    /// What lets a client send its body, for whoever sends that without waiting; nothing if the client
    /// does not wait for it.
    pub(super) fn take_go_ahead(&mut self) -> &'static [u8] {
        if std::mem::take(&mut self.awaits_continue) {
            b"HTTP/1.1 100 Continue\r\n\r\n"
        } else {
            b""
        }
    }

    /// Whether the client waits for a go-ahead.
    pub(super) fn awaits_go_ahead(&self) -> bool {
        self.awaits_continue
    }

    /// Whether the body was read to its end.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.left, Remaining::Ended)
    }

    /// Whether reading has something to tell without waiting.
    pub(super) fn has_more_at_hand(&self) -> bool {
        self.left.has_failed() || (!self.is_over() && !self.input.unused().is_empty())
    }

    /// What is sent to the client besides a response.
    pub(super) fn client_writer(&self) -> StreamWriter {
        StreamWriter::new(Arc::clone(self.input.socket()), Vec::new(), false)
    }

    /// What the client sends, beyond any request.
    pub(super) fn connection(&mut self) -> &mut Input {
        self.input
    }

    /// Reads all of a body of at most `limit` bytes.
    ///
    /// # Errors
    /// It is larger, or does not come to its end; or there is no memory for it.
    pub fn read_all(&mut self, limit: u64) -> Result<WholeBody, ReceiveError> {
        let announced = self.remaining().unwrap_or(0);
        if announced > limit {
            return Err(ReceiveError::TooLarge(limit));
        }
        let room_for = |length: usize| {
            Room::take(length.saturating_mul(USES_OF_BODY)).ok_or(ReceiveError::NoMemory)
        };
        // What is announced and will not be had is refused before it is sent.
        drop(room_for(usize::try_from(announced).unwrap_or(usize::MAX))?);
        let mut room = room_for(0)?;
        let mut body = Vec::new();
        let mut length = 0;
        loop {
            if body.len() == length {
                // Memory follows what has come, not what was announced.
                let next = length + length.clamp(4096, 1 << 20);
                if next > FREE_BODY_BYTES {
                    drop(room);
                    room = room_for(next)?;
                }
                body.resize(next, 0);
            }
            let count = self.read(&mut body[length..])?;
            if count == 0 {
                body.truncate(length);
                return Ok(WholeBody {
                    bytes: body,
                    _room: room,
                });
            }
            length += count;
            if length as u64 > limit {
                return Err(ReceiveError::TooLarge(limit));
            }
        }
    }

    /// Whether what is left can be read for nothing; if not, the connection has to be closed.
    pub(super) fn is_drainable(&self) -> bool {
        match self.left {
            Remaining::Ended => true,
            Remaining::Failed | Remaining::UntilClose => false,
            Remaining::Length(left) => !self.awaits_continue && left <= super::MAX_DRAINED_BYTES,
            Remaining::Chunked(_) => !self.awaits_continue,
        }
    }

    /// Reads what is left for nothing. False when there is too much of it. Seldom needed, and its buffer
    /// is no part of what every connection has on its stack.
    #[inline(never)]
    pub(super) fn drain(&mut self) -> bool {
        if !self.is_drainable() {
            return false;
        }
        let start = self.input.received();
        self.input.set_deadline(Some(Instant::now() + DRAIN_LIMIT));
        let mut scratch = [0; 4096];
        let drained = loop {
            match self.read(&mut scratch) {
                Ok(0) => break true,
                Ok(_) if self.input.received() - start <= super::MAX_DRAINED_BYTES => {}
                _ => break false,
            }
        };
        self.input.set_deadline(None);
        drained
    }
}
