//! The client of a call: the messages that it gets before the call is over, and what keeps its connection alive.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use serde_json::value::RawValue;

use crate::client::{Client, Disconnected, Interrupt, Lookout, Peer, Stopped};
use crate::codec::object::object;
use crate::http::late::LateStream;
use crate::sys::Events;

/// How long a call may take before events are its answer.
const SILENT_FOR: Duration = Duration::from_secs(10);

/// The longest time between pings of a client that closed its sending half: only sending tells whether it is gone.
const HALF_CLOSED_PING: Duration = Duration::from_millis(500);

/// The client of a call.
pub(super) struct ToolClient<'a> {
    pub(super) stream: &'a mut LateStream,
    ping_interval: Duration,
    sent_at: Instant,
    lookout: Lookout,
    progress: Option<Progress>,
}

/// The messages about a call before it is over.
struct Progress {
    token: Box<RawValue>,
    amount: u64,
}

impl<'a> ToolClient<'a> {
    pub(super) fn new(stream: &'a mut LateStream, ping_interval: Duration) -> Self {
        Self {
            stream,
            ping_interval,
            sent_at: Instant::now(),
            lookout: Lookout::new(),
            progress: None,
        }
    }

    /// Begins a call. For a client that asks for progress it begins a stream at once.
    pub(super) fn begin_call(&mut self, progress_token: Option<Box<RawValue>>) {
        self.progress = progress_token.map(|token| Progress { token, amount: 0 });
        if self.progress.is_some() {
            self.begin();
        }
    }

    fn begin(&mut self) {
        self.stream.begin("text/event-stream");
    }

    /// Adds an event with a document.
    pub(super) fn event(&mut self, document: &[u8]) {
        self.stream.push(|out| {
            out.reserve(document.len() + 32);
            out.extend_from_slice(b"event: message\ndata: ");
            out.extend_from_slice(document);
            out.extend_from_slice(b"\n\n");
        });
        self.sent_at = Instant::now();
    }

    /// Whether the client asked for progress.
    pub(super) fn wants_progress(&self) -> bool {
        self.progress.is_some()
    }

    /// Tells progress, if the client asked for it: how much there is more, and a text.
    pub(super) fn tell_progress(&mut self, more: u64, text: &str) {
        let Some(progress) = &mut self.progress else {
            return;
        };
        progress.amount += more;
        let notification = object! {
            "jsonrpc": "2.0",
            "method": "notifications/progress",
            "params": object! {
                "progressToken": serde_json::to_value(&progress.token).unwrap_or_default(),
                "progress": progress.amount,
                "message": text,
            },
        };
        self.event(notification.to_string().as_bytes());
    }

    /// Keeps the connection alive while things happen that the client is not told.
    pub(super) fn keep_alive(&mut self) {
        if self.sent_at.elapsed() >= self.ping_after() && self.is_flushed() {
            self.ping();
        }
    }

    /// The client, for another who watches it.
    pub(super) fn watch(&self) -> Box<dyn Peer + Send> {
        Box::new(self.stream.watch_client())
    }
}

impl Peer for ToolClient<'_> {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.stream.descriptor()
    }

    fn interest(&self) -> Events {
        self.stream.interest()
    }

    fn ready(&mut self, events: Events) -> Result<(), Disconnected> {
        self.stream.ready(events)
    }
}

impl Client for ToolClient<'_> {
    /// A comment, which begins the stream.
    fn ping(&mut self) {
        self.begin();
        self.stream.push(|out| out.extend_from_slice(b": ping\n\n"));
        self.sent_at = Instant::now();
    }

    fn ping_after(&self) -> Duration {
        if !self.stream.has_begun() {
            SILENT_FOR
        } else if self.stream.is_half_closed() {
            self.ping_interval.min(HALF_CLOSED_PING)
        } else {
            self.ping_interval
        }
    }

    fn flush(&mut self) -> Result<(), Disconnected> {
        self.stream.flush()
    }

    fn is_flushed(&self) -> bool {
        self.stream.is_flushed()
    }
}

impl Interrupt for ToolClient<'_> {
    fn check(&mut self) -> Result<(), Stopped> {
        if self.lookout.look(self.stream)? {
            self.keep_alive();
            self.flush()?;
        }
        Ok(())
    }
}
