//! A body that is written as things happen, to a client (or an upstream server) that must never be
//! waited for.
//!
//! Pieces go into a buffer, framed as chunks; [`StreamWriter::flush`] sends what the socket takes.
//! Whoever writes keeps the buffer small by writing only when it is empty. The socket also tells
//! whether the client is still there: a reset or a hang-up is the end, while an end of file may
//! only mean that the client will send no more ([`StreamWriter::is_half_closed`]); a byte sent to a
//! client that is truly gone is answered by a reset, which the next poll reports.

use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};

use crate::sys::Events;

/// Digits of a chunk's size, fixed so that it can be filled in afterwards; leading zeros are allowed.
const SIZE_DIGITS: usize = 8;

/// Memory that an empty buffer keeps: for one large read, and a little.
const MAX_KEPT_BYTES: usize = 264 * 1024;

/// And when nothing has been sent for a while.
const RESTING_BYTES: usize = 8 * 1024;

/// Where a streamed body goes.
pub struct StreamWriter<S = Arc<TcpStream>> {
    socket: S,
    pending: Vec<u8>,
    sent: usize,
    chunked: bool,
    half_closed: bool,
    /// Whether a byte was sent only to learn whether somebody is there.
    probed: bool,
}

/// The client is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disconnected;

#[cfg(test)]
impl StreamWriter {
    /// One that frames nothing and is never flushed, for tests that take what is pushed.
    pub fn for_test(socket: TcpStream) -> Self {
        Self::new(Arc::new(socket), Vec::new(), false)
    }

    /// What was pushed and not sent.
    pub fn take_pending(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.pending)
    }
}

impl<S: AsFd> StreamWriter<S> {
    /// Begins with what precedes the body.
    pub(super) fn new(socket: S, head: Vec<u8>, chunked: bool) -> Self {
        Self {
            socket,
            pending: head,
            sent: 0,
            chunked,
            half_closed: false,
            probed: false,
        }
    }

    /// Adds one piece: what `write` appends to the buffer it is given.
    pub fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
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

    /// Adds bytes that are no part of the body.
    pub(super) fn push_raw(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// Once in a body of chunks, sends a byte that means nothing: one more leading zero of the next
    /// chunk's size. If nobody is there, a reset answers it.
    pub(super) fn probe(&mut self) {
        if self.chunked && !self.probed {
            self.probed = true;
            self.pending.push(b'0');
        }
    }

    /// Gives up what is not sent.
    pub(super) fn discard(&mut self) {
        self.pending = Vec::new();
        self.sent = 0;
    }

    /// Ends the body.
    pub(super) fn finish(&mut self) {
        if self.chunked {
            self.pending.extend_from_slice(b"0\r\n\r\n");
        }
    }

    /// Sends what the socket takes now.
    ///
    /// # Errors
    /// The client is gone.
    pub fn flush(&mut self) -> Result<(), Disconnected> {
        self.try_flush().map_err(|_| Disconnected)
    }

    /// The same, for whom it matters how the other side went.
    pub(super) fn try_flush(&mut self) -> Result<(), Errno> {
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
        // One large event must not cost its size for the rest of a long stream.
        self.pending.shrink_to(MAX_KEPT_BYTES);
        Ok(())
    }

    /// Whether it has memory that it does not need while nothing is sent.
    pub(super) fn can_rest(&self) -> bool {
        self.is_flushed() && self.pending.capacity() > RESTING_BYTES
    }

    /// Gives that memory back.
    pub(super) fn rest(&mut self) {
        self.pending.shrink_to(RESTING_BYTES);
    }

    /// Whether everything was sent.
    pub fn is_flushed(&self) -> bool {
        self.pending.is_empty()
    }

    /// How much is not sent yet.
    pub(super) fn pending(&self) -> usize {
        self.pending.len() - self.sent
    }

    /// The socket, for polling.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// What to poll the socket for.
    pub fn interest(&self) -> Events {
        Events::NONE
            .and_if(!self.half_closed, Events::PEER_CLOSED)
            .and_if(!self.is_flushed(), Events::WRITABLE)
    }

    /// Told what poll found.
    ///
    /// # Errors
    /// The client is gone.
    pub fn ready(&mut self, events: Events) -> Result<(), Disconnected> {
        if events.has(Events::BROKEN) {
            return Err(Disconnected);
        }
        self.half_closed |= events.has(Events::PEER_CLOSED);
        Ok(())
    }

    /// Whether the client will send no more; it may be gone, or only be waiting.
    pub fn is_half_closed(&self) -> bool {
        self.half_closed
    }
}
