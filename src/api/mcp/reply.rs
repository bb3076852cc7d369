//! Answers: one JSON document, or Server-Sent Events whose last one is that document.
//!
//! A call that asks for progress is answered by events from the start, and one that takes long from then on, so that no
//! proxy ends it.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::finished;
use super::message::Era;
use super::tools::{Invocation, ToolCall, ToolResult};
use crate::api::context::Context;
use crate::client::{Client, Disconnected, Interrupt, Lookout, Peer, Stopped, send_all_within};
use crate::error::Error;
use crate::http::late::LateStream;
use crate::http::request::WholeBody;
use crate::http::stream::SEND_LIMIT;
use crate::http::{Body, Refusal, Response};
use crate::ledger::Item;
use crate::logging;
use crate::sys::Events;
use crate::workspace::Lease;

/// How long a call may take before events are its answer.
const SILENT_FOR: Duration = Duration::from_secs(10);

/// The longest time between pings of a client that closed its sending half: only sending tells whether it is gone.
const HALF_CLOSED_PING: Duration = Duration::from_millis(500);

#[derive(Serialize)]
struct Document<'a> {
    jsonrpc: &'static str,
    id: &'a RawValue,
    result: Map<String, Value>,
}

fn to_json(id: &RawValue, era: Era, result: Value) -> Vec<u8> {
    // Fails only for maps whose keys are not strings; no document has any.
    serde_json::to_vec(&Document {
        jsonrpc: "2.0",
        id,
        result: finished(result, era),
    })
    .unwrap_or_default()
}

/// The answer with a result that is known.
pub(super) fn document(id: &RawValue, era: Era, result: Value) -> Response {
    of_json(to_json(id, era, result))
}

fn of_json(mut document: Vec<u8>) -> Response {
    document.push(b'\n');
    Response::new(200, Body::Bytes(document)).with_header("Content-Type", "application/json")
}

/// The answer of a tool that is called when the answer is due. `body` is what was charged for the arguments.
pub(super) fn call(
    context: &Context,
    id: Box<RawValue>,
    era: Era,
    invocation: Invocation,
    body: WholeBody,
    lease: Lease,
) -> Response {
    let ping_interval = context.machine.ping_interval;
    let held = lease.share().ok();
    let find = move |stream: &mut LateStream| {
        let Invocation {
            tool,
            arguments,
            progress_token,
        } = invocation;
        let mut client = ToolClient::new(stream, ping_interval, progress_token);
        let mut call = ToolCall {
            workspace: &lease,
            client: &mut client,
        };
        let result = match tool.call(&mut call, &arguments) {
            Ok(result) => result,
            Err(Stopped::Failed(error)) => failed(tool.name, error),
            Err(Stopped::Disconnected | Stopped::Due) => return None,
        };
        drop((arguments, body));
        let mut document = to_json(&id, era, result.into_value());
        let charge = match lease.ledger.charge(Item::Responses, 2 * document.len()) {
            Ok(charge) => charge,
            Err(error) => {
                let result = failed(tool.name, Error::from(error));
                document = to_json(&id, era, result.into_value());
                lease.ledger.charge(Item::Responses, 0).ok()?
            }
        };
        if !client.stream.has_begun() {
            return Some(of_json(document).holding(charge));
        }
        client.event(&document);
        drop(document);
        // The charge lasts until all is sent.
        let _ = send_all_within(&mut client, SEND_LIMIT);
        None
    };
    Response::new(200, Body::Late(Box::new(find)))
        .with_header("Cache-Control", "no-store")
        .with_header("X-Accel-Buffering", "no")
        .holding(held)
}

/// The result of a tool that failed: models are to read why.
fn failed(tool: &str, error: Error) -> ToolResult {
    let refusal = Refusal::from(error);
    if matches!(refusal.status, 500 | 507) {
        let text = logging::quoted(refusal.text.as_bytes());
        logging::about(
            "mcp",
            format_args!("failed {tool}: {} {text}", refusal.status),
        );
    }
    let structured = serde_json::to_value(&refusal).unwrap_or_default();
    ToolResult::new(refusal.text, structured).into_error()
}

/// The client of a call.
pub(super) struct ToolClient<'a> {
    stream: &'a mut LateStream,
    ping_interval: Duration,
    sent_at: Instant,
    lookout: Lookout,
    progress: Option<Progress>,
}

/// What is told of a call before it is over.
struct Progress {
    token: Box<RawValue>,
    amount: u64,
}

impl<'a> ToolClient<'a> {
    fn new(
        stream: &'a mut LateStream,
        ping_interval: Duration,
        progress_token: Option<Box<RawValue>>,
    ) -> Self {
        let mut client = Self {
            stream,
            ping_interval,
            sent_at: Instant::now(),
            lookout: Lookout::new(),
            progress: progress_token.map(|token| Progress { token, amount: 0 }),
        };
        if client.progress.is_some() {
            client.begin();
        }
        client
    }

    fn begin(&mut self) {
        self.stream.begin("text/event-stream");
    }

    /// Adds an event with a document.
    fn event(&mut self, document: &[u8]) {
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
        let notification = json!({
            "jsonrpc": "2.0",
            "method": "notifications/progress",
            "params": {
                "progressToken": progress.token,
                "progress": progress.amount,
                "message": text,
            },
        });
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
