//! An answer that begins late: as a whole when it is known, or as a stream if the client has to wait.
//!
//! A handler that cannot tell how long its work takes would have to choose the head of the answer before it knows.
//! [`LateStream`] lets it choose meanwhile. Until then the client is watched as it is during the request.

use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::request::WaitingClient;
use super::stream::StreamWriter;
use crate::client::{Disconnected, Peer};
use crate::limits::ledger::Ledger;
use crate::sys::Events;

/// The client of such an answer.
pub struct LateStream {
    writer: StreamWriter,
    /// The head, without its type; `None` once the answer has begun.
    head: Option<StreamHead>,
    ledger: Arc<Ledger>,
}

/// The head of a stream, as the connection frames it.
pub(super) struct StreamHead {
    /// The status line and the header fields, without the empty line.
    pub(super) lines: Vec<u8>,
    pub(super) chunked: bool,
}

impl LateStream {
    pub(super) fn new(
        socket: &Arc<TcpStream>,
        head: StreamHead,
        http_1_1: bool,
        ledger: &Arc<Ledger>,
    ) -> Self {
        Self {
            writer: StreamWriter::for_interim(Arc::clone(socket), http_1_1),
            head: Some(head),
            ledger: Arc::clone(ledger),
        }
    }

    /// Whether the answer is a stream by now.
    pub fn has_begun(&self) -> bool {
        self.head.is_none()
    }

    /// Begins a stream of this type.
    pub fn begin(&mut self, content_type: &str) {
        let Some(StreamHead { mut lines, chunked }) = self.head.take() else {
            return;
        };
        lines.extend_from_slice(format!("Content-Type: {content_type}\r\n\r\n").as_bytes());
        let is_half_closed = self.writer.is_half_closed();
        let writer = StreamWriter::new(Arc::clone(self.writer.socket()), lines, chunked);
        self.writer = writer.charged_to(&self.ledger);
        if is_half_closed {
            let _ = self.writer.ready(Events::PEER_CLOSED);
        }
    }

    /// Adds one piece of a stream that has begun, see [`StreamWriter::push`].
    pub fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.writer.push(write);
    }

    /// See [`StreamWriter::flush`].
    ///
    /// # Errors
    /// The client has disconnected.
    pub fn flush(&mut self) -> Result<(), Disconnected> {
        self.writer.flush()
    }

    /// Whether everything was sent.
    pub fn is_flushed(&self) -> bool {
        self.writer.is_flushed()
    }

    /// Whether the client closed its sending side.
    pub fn is_half_closed(&self) -> bool {
        self.writer.is_half_closed()
    }

    /// The client, for another who watches it.
    pub fn watch_client(&self) -> WaitingClient {
        let is_early = self.head.as_ref().is_some_and(|head| head.chunked);
        let socket = Arc::clone(self.writer.socket());
        WaitingClient(StreamWriter::for_interim(socket, is_early))
    }

    /// The stream, if the answer has begun as one.
    pub(super) fn into_stream(self) -> Option<StreamWriter> {
        self.head.is_none().then_some(self.writer)
    }
}

#[cfg(test)]
impl LateStream {
    /// For an answer by HTTP/1.1 on this socket.
    pub fn for_test(socket: TcpStream, ledger: &Arc<Ledger>) -> Self {
        let lines = b"HTTP/1.1 200 OK\r\n".to_vec();
        let chunked = true;
        let head = StreamHead { lines, chunked };
        Self::new(&Arc::new(socket), head, true, ledger)
    }
}

impl Peer for LateStream {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.writer.descriptor()
    }

    fn interest(&self) -> Events {
        self.writer.interest()
    }

    fn ready(&mut self, events: Events) -> Result<(), Disconnected> {
        self.writer.ready(events)?;
        if self.writer.is_half_closed() && !self.has_begun() {
            // Only sending tells whether the client is gone.
            self.writer.probe();
        }
        self.writer.flush()
    }
}
