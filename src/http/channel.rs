//! A WebSocket on a connection, between two polls: messages in and out, pings, the closing handshake.
//!
//! Nothing here blocks but [`Channel::wait`]. The owner reads messages with [`Channel::next`] as long as it has
//! room for them, and adds output only when [`Channel::is_flushed`]: this bounds the buffers. Pings find
//! clients that have disconnected or are stuck. A slow client is not stuck: what it takes of the output counts as
//! a sign of life. [`websocket`](super::websocket) has the frames.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::reader::{ReceiveError, SocketReader};
use super::stream::StreamWriter;
use super::websocket::{
    Decoder, Received, append_binary, append_close, append_ping, append_pong, append_text, code,
};
use crate::client::Disconnected;
use crate::limits::ledger::{Charge, Item, Ledger, OverLimit};
use crate::sys::{Events, PollEntry, poll};
use crate::threads::priority::PacedRequest;

/// Bytes of one receive. Small, because each frame in it may be answered.
const RECEIVE_BYTES: usize = 4 * 1024;

/// Most bytes of answers to frames, besides the output, that wait for the client.
const MAX_UNSENT_BYTES: usize = 96 * 1024;

/// An incomplete message up to this size is not charged.
const FREE_MESSAGE_BYTES: usize = 8 * 1024;

/// Pings without an answer after which a client is given up.
const MAX_UNANSWERED: u32 = 2;

/// Time for the client to take the last frames, and to answer the closing one.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// How long a channel is quiet before its buffers are trimmed.
const TRIM_AFTER: Duration = Duration::from_secs(1);

/// A message of the client.
#[derive(Debug, PartialEq, Eq)]
pub enum Message {
    Text(String),
    Binary(Vec<u8>),
    /// The client closes. [`Channel::close`] is the answer.
    Close(Option<u16>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// The server's closing frame is in the buffer or sent, and the client's is awaited until then.
    Closing(Instant),
    /// As `Closing`, but nothing that the client sends is read any more.
    Failed(Instant),
    /// The client has closed; [`Channel::close`] answers.
    Closed,
}

/// Adds one frame.
fn push(writer: &mut StreamWriter, append: fn(&mut Vec<u8>, &[u8]), payload: &[u8]) {
    writer.push(|out| append(out, payload));
}

/// A WebSocket.
pub struct Channel<'c> {
    reader: &'c mut SocketReader,
    writer: &'c mut StreamWriter,
    decoder: Decoder,
    /// What was received; decoded up to `decoded`.
    received: Vec<u8>,
    decoded: usize,
    /// Whether there may be something to receive.
    is_ready: bool,
    ledger: Arc<Ledger>,
    /// For the incomplete message.
    charge: Option<Charge>,
    ping_interval: Duration,
    ping_at: Instant,
    /// Pings since the last sign of life.
    unanswered: u32,
    /// Whether the client did not take all at the last attempt.
    was_blocked: bool,
    phase: Phase,
}

impl<'c> Channel<'c> {
    /// Takes over a connection after the handshake.
    pub fn new(
        reader: &'c mut SocketReader,
        writer: &'c mut StreamWriter,
        ledger: Arc<Ledger>,
        ping_interval: Duration,
    ) -> Self {
        Self {
            reader,
            writer,
            decoder: Decoder::new(),
            received: Vec::new(),
            decoded: 0,
            // The client may have sent frames along with the request.
            is_ready: true,
            ledger,
            charge: None,
            ping_interval,
            ping_at: Instant::now() + ping_interval,
            unanswered: 0,
            was_blocked: false,
            phase: Phase::Open,
        }
    }

    /// Whether neither side has begun to close.
    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// Whether everything was sent.
    pub fn is_flushed(&self) -> bool {
        self.writer.is_flushed()
    }

    /// Adds a message of text.
    pub fn send_text(&mut self, text: &[u8]) {
        push(self.writer, append_text, text);
    }

    /// Adds a message of bytes.
    pub fn send_binary(&mut self, bytes: &[u8]) {
        push(self.writer, append_binary, bytes);
    }

    /// Adds the last frame. To a client that has closed already it is the answer.
    pub fn close(&mut self, code: Option<u16>, reason: &str) {
        let until = Instant::now() + CLOSE_LIMIT;
        self.phase = match self.phase {
            Phase::Open => Phase::Closing(until),
            Phase::Closed => Phase::Failed(until),
            Phase::Closing(_) | Phase::Failed(_) => return,
        };
        self.writer.push(|out| append_close(out, code, reason));
    }

    /// Adds the last frame to a client that is not read any more.
    fn fail(&mut self, code: u16, reason: &str) {
        self.close(Some(code), reason);
        self.phase = Phase::Failed(Instant::now() + CLOSE_LIMIT);
    }

    /// The next message; `None` if it has not arrived. After the end of the channel messages are dropped.
    ///
    /// # Errors
    /// The client has disconnected.
    pub fn next(&mut self) -> Result<Option<Message>, Disconnected> {
        while matches!(self.phase, Phase::Open | Phase::Closing(_)) && self.has_room() {
            PacedRequest::step();
            if self.decoded == self.received.len() && !self.receive()? {
                break;
            }
            let rest = &self.received[self.decoded..];
            let length = self.decoder.held() + rest.len();
            if length > FREE_MESSAGE_BYTES && self.charge_message(length).is_err() {
                self.fail(code::FAILED, "no memory is left for this message");
                break;
            }
            let received = match self.decoder.decode(&self.received[self.decoded..]) {
                Err(violation) => {
                    self.fail(violation.code(), violation.reason());
                    break;
                }
                Ok((count, received)) => {
                    self.decoded += count;
                    received
                }
            };
            let Some(received) = received else {
                continue;
            };
            if let Some(message) = self.handle(received) {
                return Ok(Some(message));
            }
        }
        Ok(None)
    }

    fn handle(&mut self, received: Received) -> Option<Message> {
        let message = match received {
            Received::Text(text) => Message::Text(text),
            Received::Binary(bytes) => Message::Binary(bytes),
            Received::Ping => {
                if self.is_open() {
                    push(self.writer, append_pong, self.decoder.control());
                }
                return None;
            }
            Received::Pong => {
                self.unanswered = 0;
                return None;
            }
            Received::Close(code) => {
                if self.is_open() {
                    self.phase = Phase::Closed;
                    return Some(Message::Close(code));
                }
                self.phase = Phase::Failed(Instant::now());
                return None;
            }
        };
        self.charge = None;
        self.is_open().then_some(message)
    }

    /// Charges an incomplete message of this length, whose buffer may double.
    fn charge_message(&mut self, length: usize) -> Result<(), OverLimit> {
        if let Some(charge) = &mut self.charge {
            return charge.set(2 * length);
        }
        self.charge = Some(self.ledger.charge(Item::Bodies, 2 * length)?);
        Ok(())
    }

    /// Whether frames may be answered: a client that takes nothing is not read either.
    fn has_room(&self) -> bool {
        self.writer.pending() < MAX_UNSENT_BYTES
    }

    /// Receives once; false if nothing has arrived.
    fn receive(&mut self) -> Result<bool, Disconnected> {
        if !std::mem::take(&mut self.is_ready) {
            return Ok(false);
        }
        self.received.clear();
        self.decoded = 0;
        let received = &mut self.received;
        let result = self
            .reader
            .without_blocking(|reader| reader.read_append(received, RECEIVE_BYTES));
        // What came with the request is there without poll.
        self.is_ready = !self.reader.unused().is_empty();
        match result {
            Ok(_) => Ok(true),
            Err(ReceiveError::TimedOut) => Ok(false),
            Err(_) => Err(Disconnected),
        }
    }

    /// Sends what the client takes.
    ///
    /// # Errors
    /// The client has disconnected.
    pub fn flush(&mut self) -> Result<(), Disconnected> {
        let before = self.writer.pending();
        self.writer.flush()?;
        let left = self.writer.pending();
        if std::mem::replace(&mut self.was_blocked, left > 0) && left < before {
            // It is slow, and alive.
            self.unanswered = 0;
        }
        Ok(())
    }

    /// Whether nothing is left to do: both sides have closed, or the time for that is over.
    pub fn is_over(&self) -> bool {
        match self.phase {
            Phase::Open | Phase::Closed => false,
            Phase::Closing(until) => Instant::now() >= until,
            Phase::Failed(until) => self.is_flushed() || Instant::now() >= until,
        }
    }

    /// Sleeps until the client has sent something, if its input is `wanted`, or takes more; until one of the
    /// `others` is ready, or `limit` has passed. Sends pings meanwhile.
    ///
    /// # Errors
    /// The client has disconnected.
    pub fn wait(
        &mut self,
        wanted: bool,
        others: [(Option<BorrowedFd<'_>>, Events); 2],
        limit: Option<Duration>,
    ) -> Result<(), Disconnected> {
        let is_reading = match self.phase {
            Phase::Open => wanted && self.has_room(),
            Phase::Closing(_) => self.has_room(),
            Phase::Failed(_) | Phase::Closed => false,
        };
        PacedRequest::step();
        let now = Instant::now();
        self.ping_if_due(wanted, now)?;
        let due_at = match self.phase {
            Phase::Open => Some(self.ping_at),
            Phase::Closing(until) | Phase::Failed(until) => Some(until),
            Phase::Closed => None,
        };
        let due_in = due_at.map(|at| at.saturating_duration_since(now));
        let has_more = is_reading && (self.is_ready || self.decoded < self.received.len());
        let no_time = has_more.then_some(Duration::ZERO);
        let limit = [limit, due_in, no_time].into_iter().flatten().min();

        let interest = Events::NONE
            .and_if(is_reading, Events::READABLE)
            .and_if(!is_reading && self.is_open(), Events::PEER_CLOSED)
            .and_if(!self.is_flushed(), Events::WRITABLE);
        let socket = Arc::clone(self.writer.socket());
        let [one, other] = others.map(|(descriptor, events)| PollEntry::new(descriptor, events));
        let mut entries = [PollEntry::new(socket.as_fd(), interest), one, other];
        let first = limit.map_or(TRIM_AFTER, |limit| limit.min(TRIM_AFTER));
        let rest = limit.map(|limit| limit.saturating_sub(first));
        if !poll(&mut entries, Some(first)) && rest != Some(Duration::ZERO) {
            self.writer.trim();
            poll(&mut entries, rest);
        }
        let events = entries[0].events();
        if events.has(Events::BROKEN.and_if(!is_reading, Events::PEER_CLOSED)) {
            return Err(Disconnected);
        }
        self.is_ready |= events.has(Events::READABLE);
        self.flush()
    }

    /// Sends a ping if one is due, or gives the client up. While its input is not wanted, its answers are not
    /// read, so none is missed; the pings keep the connection alive on its way.
    fn ping_if_due(&mut self, wanted: bool, now: Instant) -> Result<(), Disconnected> {
        if !self.is_open() || now < self.ping_at {
            return Ok(());
        }
        self.ping_at = now + self.ping_interval;
        if self.unanswered == MAX_UNANSWERED && wanted {
            self.fail(code::FAILED, "two pings were not answered");
            return self.flush();
        }
        self.unanswered = if wanted { self.unanswered + 1 } else { 0 };
        // Behind unsent data it would be useless.
        if self.is_flushed() {
            push(self.writer, append_ping, b"");
        }
        self.flush()
    }
}
