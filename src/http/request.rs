//! A request as a handler sees it: the head, and a body that is read on demand.
//!
//! [`BodyReader`] knows where the body ends, and nothing reads beyond it. It sends `100 Continue` when
//! the first byte is wanted, so an upload can be refused before it is sent.

use std::net::IpAddr;
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::socket::{MsgFlags, send};

use super::body::BodyDecoder;
use super::kept::KeptSlot;
use super::parse::Head;
pub use super::reader::ReceiveError;
use super::reader::SocketReader;
use super::slots::ConnectionSlot;
use super::stream::StreamWriter;
use crate::client::{Disconnected, Peer};
use crate::codec::parsed_bytes;
use crate::limits::ledger::{Charge, Item, Ledger};
use crate::limits::memory::Room;
use crate::sys::{self, Events};
use crate::threads::priority::PacedRequest;

/// Most bytes of an unread body that are dropped to keep the connection open.
const MAX_DRAINED_BYTES: u64 = 64 * 1024;

/// Time for that.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// The peak of memory that reading JSON takes, as a multiple of its length: the document, a string that
/// grows while its escapes are undone, and the copy that is kept.
const USES_OF_BODY: usize = 4;

/// A body up to this length is not charged: a tenant beyond its share can still end its processes.
const FREE_BODY_BYTES: usize = 8 * 1024;

pub struct Request<'c> {
    /// The request line and the header fields.
    pub head: Head,
    /// The body, unread.
    pub body: BodyReader<'c>,
    /// Whether the answer may take long. It may not on the spare thread, which serves when no other
    /// thread can be started.
    pub may_block: bool,
    /// The place of the connection among all, which the handler gives to whoever shows a token.
    pub slot: &'c mut ConnectionSlot,
    /// What the request and its response hold is charged to it: at first to the owner of the slot.
    pub ledger: Arc<Ledger>,
    /// Whether that is the tenant that it was admitted for, so that what the answer takes is charged to it.
    pub is_admitted: bool,
    /// Whether the connection ends with the answer.
    pub closes: bool,
    /// Where a connection to another server may be, and may stay. A handler that does not take it and may last clears it.
    pub kept: &'c Arc<KeptSlot>,
}

impl Request<'_> {
    /// Charges what the request takes to the tenant that it was admitted for, whose ledger it has.
    pub fn admit(&mut self) {
        self.is_admitted = true;
        if !self.ledger.is_whole() && self.may_block {
            PacedRequest::pace(&self.ledger.work);
        }
    }

    /// The address at the far end of the connection: the client's, or that of a proxy.
    pub fn client_address(&self) -> Option<IpAddr> {
        let address = self.body.reader.socket().peer_addr().ok()?;
        Some(address.ip().to_canonical())
    }

    /// Whose program is at the far end of the connection.
    pub fn sender(&self) -> Sender {
        let socket = self.body.reader.socket();
        let (Ok(own), Ok(peer)) = (socket.local_addr(), socket.peer_addr()) else {
            return Sender::Unknown;
        };
        if let Some(uid) = sys::tcp_peer_uid(own, peer) {
            return Sender::User(uid);
        }
        if sys::is_delivered_here(peer.ip().to_canonical()) {
            Sender::Unknown
        } else {
            Sender::Elsewhere
        }
    }
}

/// Whose program has sent a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sender {
    /// A user's of this machine.
    User(u32),
    /// One of another machine, or of another network namespace.
    Elsewhere,
    /// One of this machine whose user the kernel does not tell, for example because it has closed its socket.
    Unknown,
}

/// The client of a request that has not been answered yet.
///
/// A client that closed its sending half may be gone or may wait for the answer. Only sending tells,
/// so it gets an interim response.
pub struct WaitingClient(pub(super) StreamWriter);

impl Peer for WaitingClient {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.descriptor()
    }

    fn interest(&self) -> Events {
        self.0.interest()
    }

    fn ready(&mut self, events: Events) -> Result<(), Disconnected> {
        self.0.ready(events)?;
        if self.0.is_half_closed() {
            self.0.probe();
        }
        self.0.flush()
    }
}

/// A whole body, and the memory promised for what is parsed from it.
pub struct WholeBody {
    bytes: Vec<u8>,
    held: Option<Held>,
}

type Held = (Charge, Room);

/// Promises memory.
fn hold(ledger: &Arc<Ledger>, bytes: usize) -> Result<Held, ReceiveError> {
    let charge = ledger.charge(Item::Bodies, bytes)?;
    Ok((charge, Room::take(bytes).ok_or(ReceiveError::NoMemory)?))
}

impl Deref for WholeBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The body of a request.
pub struct BodyReader<'c> {
    reader: &'c mut SocketReader,
    decoder: BodyDecoder,
    /// The client waits for `100 Continue`.
    awaits_continue: bool,
    http_1_1: bool,
}

impl<'c> BodyReader<'c> {
    /// The body that follows `head`.
    pub fn new(reader: &'c mut SocketReader, head: &Head) -> Self {
        Self {
            reader,
            decoder: BodyDecoder::new(head.framing),
            awaits_continue: head.expects_continue,
            http_1_1: head.minor_version == 1,
        }
    }

    /// The body of a request whose head was refused: nothing of it can be read.
    pub fn unreadable(reader: &'c mut SocketReader) -> Self {
        Self {
            reader,
            decoder: BodyDecoder::Failed,
            awaits_continue: false,
            http_1_1: true,
        }
    }

    /// Bytes still to come; `None` if the client did not announce a length.
    pub fn remaining(&self) -> Option<u64> {
        match self.decoder {
            BodyDecoder::Length(left) => Some(left),
            BodyDecoder::Ended => Some(0),
            BodyDecoder::Chunked(_) | BodyDecoder::UntilClose | BodyDecoder::Failed => None,
        }
    }

    /// The client, to poll while the request waits for something else.
    pub fn watch_client(&self) -> WaitingClient {
        WaitingClient(self.client_writer())
    }

    /// Reads at least one byte; 0 at the end of the body.
    ///
    /// # Errors
    /// The rest of the body cannot be received.
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, ReceiveError> {
        self.send_go_ahead()?;
        self.decoder.read(self.reader, into)
    }

    /// Moves at least one byte into an empty pipe without copying it. `None` if the body can only be
    /// [read](Self::read), or has ended.
    ///
    /// # Errors
    /// The rest of the body cannot be received.
    pub fn splice(&mut self, pipe: BorrowedFd<'_>) -> Result<Option<usize>, ReceiveError> {
        self.send_go_ahead()?;
        self.decoder.splice(self.reader, pipe)
    }

    /// Appends what has arrived, at most `most` bytes, without blocking. The caller sends the
    /// [go-ahead](Self::take_go_ahead).
    ///
    /// # Errors
    /// The rest of the body cannot be received.
    pub fn append_available(&mut self, out: &mut Vec<u8>, most: usize) -> Result<(), ReceiveError> {
        self.decoder.append_available(self.reader, out, most)
    }

    fn send_go_ahead(&mut self) -> Result<(), ReceiveError> {
        let line = self.take_go_ahead();
        let socket = self.reader.socket().as_raw_fd();
        if !line.is_empty() && send(socket, line, MsgFlags::MSG_NOSIGNAL) != Ok(line.len()) {
            self.decoder = BodyDecoder::Failed;
            return Err(ReceiveError::Closed);
        }
        Ok(())
    }

    /// The bytes that make a waiting client send its body; none if it does not wait.
    pub fn take_go_ahead(&mut self) -> &'static [u8] {
        if std::mem::take(&mut self.awaits_continue) {
            b"HTTP/1.1 100 Continue\r\n\r\n"
        } else {
            b""
        }
    }

    /// Whether the client waits for the go-ahead.
    pub fn awaits_go_ahead(&self) -> bool {
        self.awaits_continue
    }

    /// Whether the body was read to its end.
    pub fn is_over(&self) -> bool {
        matches!(self.decoder, BodyDecoder::Ended)
    }

    /// Whether [`BodyReader::append_available`] has something to report without receiving: bytes, or
    /// that reading failed before.
    pub fn has_more_at_hand(&self) -> bool {
        self.decoder.has_failed() || (!self.is_over() && !self.reader.unused().is_empty())
    }

    /// A stream to the client beside the response, for interim responses.
    pub fn client_writer(&self) -> StreamWriter {
        StreamWriter::for_interim(Arc::clone(self.reader.socket()), self.http_1_1)
    }

    /// The connection itself, for a protocol other than HTTP.
    pub fn connection(&mut self) -> &mut SocketReader {
        self.reader
    }

    /// Reads a whole body of at most `limit` bytes.
    ///
    /// # Errors
    /// `TooLarge`; `NoMemory`; `OverLimit`; or the rest of the body cannot be received.
    pub fn read_all(
        &mut self,
        limit: u64,
        ledger: &Arc<Ledger>,
    ) -> Result<WholeBody, ReceiveError> {
        let announced = self.remaining().unwrap_or(0);
        if announced > limit {
            return Err(ReceiveError::TooLarge(limit));
        }
        let room_for = |length: usize| {
            let is_free = length <= FREE_BODY_BYTES;
            let uses = if is_free {
                0
            } else {
                length.saturating_mul(USES_OF_BODY)
            };
            hold(ledger, uses)
        };
        // Refuses an announced body that does not fit before the client sends it.
        drop(room_for(usize::try_from(announced).unwrap_or(usize::MAX))?);
        let mut held = None;
        let mut body = Vec::new();
        let mut length = 0;
        while !self.is_over() {
            if body.len() == length {
                // Memory follows what has arrived, and not what was announced.
                let next = length + length.clamp(4096, 1 << 20);
                let end = usize::try_from(announced).unwrap_or(usize::MAX);
                let next = if end > length { next.min(end) } else { next };
                if next > FREE_BODY_BYTES {
                    drop(held.take());
                    held = Some(room_for(next)?);
                }
                body.resize(next, 0);
            }
            let count = self.read(&mut body[length..])?;
            if count == 0 {
                break;
            }
            length += count;
            if length as u64 > limit {
                return Err(ReceiveError::TooLarge(limit));
            }
        }
        body.truncate(length);
        Ok(WholeBody { bytes: body, held })
    }

    /// Reads a whole body of JSON, of which values without a text may take many times what they take in the body.
    ///
    /// # Errors
    /// As [`BodyReader::read_all`].
    pub fn read_json(
        &mut self,
        limit: u64,
        ledger: &Arc<Ledger>,
    ) -> Result<WholeBody, ReceiveError> {
        let mut body = self.read_all(limit, ledger)?;
        let parsed = body.len() + parsed_bytes(&body);
        if body.len() > FREE_BODY_BYTES && parsed > body.len() * USES_OF_BODY {
            drop(body.held.take());
            body.held = Some(hold(ledger, parsed)?);
        }
        Ok(body)
    }

    /// Whether [`BodyReader::drain`] may succeed; if not, the response announces the close.
    pub fn is_drainable(&self) -> bool {
        match self.decoder {
            BodyDecoder::Ended => true,
            BodyDecoder::Failed | BodyDecoder::UntilClose => false,
            BodyDecoder::Length(left) => !self.awaits_continue && left <= MAX_DRAINED_BYTES,
            BodyDecoder::Chunked(_) => !self.awaits_continue,
        }
    }

    /// Drops the rest of the body. False if it is too long or too slow, so that the connection must be
    /// closed. Not inlined: its buffer would be on the stack of every idle connection.
    #[inline(never)]
    pub fn drain(&mut self) -> bool {
        if !self.is_drainable() {
            return false;
        }
        let start = self.reader.received();
        self.reader.set_deadline(Some(Instant::now() + DRAIN_LIMIT));
        let mut scratch = [0; 4096];
        let drained = loop {
            match self.read(&mut scratch) {
                Ok(0) => break true,
                Ok(_) if self.reader.received() - start <= MAX_DRAINED_BYTES => {}
                _ => break false,
            }
        };
        self.reader.set_deadline(None);
        drained
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::http::parse::{self, Progress};
    use crate::limits::ledger::Budget;

    /// What is charged for a body of JSON; `None` if there is no room for it in so many bytes.
    fn charged(body: &str, budget: u64) -> Option<usize> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let head = format!(
            "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let Ok(Progress::Complete(head, _)) = parse::head(head.as_bytes()) else {
            panic!("{head}");
        };
        let body = body.to_owned();
        let sender = std::thread::spawn(move || client.write_all(body.as_bytes()).map(|()| client));
        let (socket, _) = listener.accept().unwrap();
        let mut reader = SocketReader::new(Arc::new(socket));
        let ledger = Budget::new(budget).whole();
        let read = BodyReader::new(&mut reader, &head).read_json(1 << 20, &ledger);
        let body = read.ok();
        let bytes = body.map(|body| body.held.as_ref().map_or(0, |(charge, _)| charge.bytes()));
        drop(reader);
        // The server may close before all is sent.
        let _ = sender.join().unwrap();
        bytes
    }

    #[test]
    fn small_values_are_charged_with_what_they_take() {
        let object = |count: usize| format!("{{{}}}", vec!["\"a\":0"; count].join(","));
        let text = |length: usize| format!("{{\"a\":\"{}\"}}", ",".repeat(length));
        assert_eq!(charged(&object(1000), 1 << 20), Some(0), "it is short");
        let many = charged(&object(10_000), 64 << 20).unwrap();
        assert!(many > 10_000 * 100, "{many}");
        assert_eq!(charged(&object(10_000), 2 << 20), None);
        let long = charged(&text(60_000), 2 << 20).unwrap();
        assert!((4 * 60_000..5 * 60_000).contains(&long), "{long}");
    }
}
