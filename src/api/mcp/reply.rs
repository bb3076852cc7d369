//! Answers: one JSON document, or Server-Sent Events whose last one is that document.
//!
//! A call that asks for progress is answered by events from the start, and one that takes long from then on, so that no
//! proxy ends it.

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::calls::{FREE_BYTES, ToolCall, ToolResult};
use super::client::ToolClient;
use super::message::{Era, Failure, server_info};
use super::tools::Invocation;
use crate::api::context::Context;
use crate::client::{Stopped, send_all_within};
use crate::error::Error;
use crate::http::late::LateStream;
use crate::http::request::WholeBody;
use crate::http::stream::SEND_LIMIT;
use crate::http::{Body, Refusal, Response};
use crate::limits::ledger::{Charge, Item};
use crate::logging;
use crate::workspace::Lease;

#[derive(Serialize)]
struct Document<'a> {
    jsonrpc: &'static str,
    id: &'a RawValue,
    result: Map<String, Value>,
}

/// A result with what clients of its era expect of any.
fn finished(result: Value, era: Era) -> Map<String, Value> {
    let Value::Object(mut result) = result else {
        return Map::new();
    };
    if era == Era::Modern {
        result.insert("resultType".to_owned(), "complete".into());
        let meta = json!({ "io.modelcontextprotocol/serverInfo": server_info() });
        result.insert("_meta".to_owned(), meta);
    }
    result
}

/// At least the bytes of a result in memory and as JSON, without what [`finished`] adds.
fn sizes(value: &Value) -> [usize; 2] {
    /// A value, and its place in a list or a map.
    const NODE_BYTES: usize = 96;
    let text = |text: &str| {
        let escaped = |byte: u8| byte < b' ' || matches!(byte, b'"' | b'\\');
        text.len() + 5 * text.bytes().filter(|byte| escaped(*byte)).count() + 3
    };
    let mut sizes = [NODE_BYTES, 24];
    let mut add = |more: [usize; 2]| {
        sizes[0] += more[0];
        sizes[1] += more[1];
    };
    match value {
        Value::String(string) => add([string.len(), text(string)]),
        Value::Array(items) => items.iter().for_each(|item| add(self::sizes(item))),
        Value::Object(members) => members.iter().for_each(|(name, item)| {
            add([NODE_BYTES + name.len(), text(name)]);
            add(self::sizes(item));
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
    sizes
}

/// The document, in a buffer of `room` bytes that grows if they are not enough.
pub(super) fn to_json(id: &RawValue, era: Era, result: Value, room: usize) -> Vec<u8> {
    let mut document = Vec::with_capacity(room);
    // Fails only for maps whose keys are not strings; no document has any.
    let _ = serde_json::to_writer(
        &mut document,
        &Document {
            jsonrpc: "2.0",
            id,
            result: finished(result, era),
        },
    );
    document
}

/// What a document has besides its result.
const FRAME_BYTES: usize = 2048;

/// The document of a tool's result. What it takes is charged before it is made; without room for it the result is why.
fn charged_document(
    id: &RawValue,
    era: Era,
    tool: &str,
    result: ToolResult,
    charge: &mut Charge,
) -> Vec<u8> {
    let mut value = result.into_value();
    let [held, written] = sizes(&value);
    let mut room = written + FRAME_BYTES;
    if room > FREE_BYTES
        && let Err(error) = charge.set(held + room)
    {
        value = failed(tool, Error::from(error)).into_value();
        room = 0;
    }
    to_json(id, era, value, room)
}

/// The answer with a document that is known.
pub(super) fn of_json(mut document: Vec<u8>) -> Response {
    document.push(b'\n');
    Response::new(200, Body::Bytes(document)).with_header("Content-Type", "application/json")
}

/// What answers a request.
pub(super) enum Step {
    /// A message.
    Known(Vec<u8>),
    /// The call of a tool: its id, its era, the call.
    Call(Box<RawValue>, Era, Invocation),
}

/// What answers a body.
pub(super) enum Steps {
    One(Step),
    Batch(Vec<Step>),
}

/// The answer of tools that are called when it is due, one after the other. `body` is what was charged for the
/// arguments.
pub(super) fn perform(context: &Context, steps: Steps, body: WholeBody, lease: Lease) -> Response {
    let ping_interval = context.machine.ping_interval;
    let held = lease.share().ok();
    let find = move |stream: &mut LateStream| {
        let (steps, is_batch) = match steps {
            Steps::One(step) => (vec![step], false),
            Steps::Batch(steps) => (steps, true),
        };
        let mut client = ToolClient::new(stream, ping_interval);
        let mut answers = Vec::new();
        for step in steps {
            answers.push(answer(step, &lease, &mut client)?);
        }
        drop(body);
        if client.stream.has_begun() {
            // Clients take one message from each event. The buffer of the stream charges its copy.
            for (document, _charge) in answers {
                client.event(&document);
            }
            let _ = send_all_within(&mut client, SEND_LIMIT);
            return None;
        }
        if is_batch {
            return Some(batch(answers, &lease));
        }
        let (document, charge) = answers.pop()?;
        Some(of_json(document).charged(charge))
    };
    Response::new(200, Body::Late(Box::new(find)))
        .with_header("X-Accel-Buffering", "no")
        .holding(held)
}

/// A message, and what it takes.
type Charged = (Vec<u8>, Charge);

/// The answer to a batch: all messages in one list.
fn batch(answers: Vec<Charged>, lease: &Lease) -> Response {
    let bytes = answers.iter().map(|(document, _)| document.len() + 1).sum();
    let Ok(charge) = lease.ledger.charge(Item::Responses, bytes) else {
        let text = "the answers to this batch are too large together; send fewer requests";
        return of_json(Failure::invalid(text).to_json());
    };
    let mut list = Vec::with_capacity(bytes + 2);
    for (document, _charge) in answers {
        list.push(if list.is_empty() { b'[' } else { b',' });
        list.extend_from_slice(&document);
    }
    list.push(b']');
    of_json(list).charged(charge)
}

/// One message, and what it takes; `None` if the client has disconnected.
fn answer(step: Step, lease: &Lease, client: &mut ToolClient<'_>) -> Option<Charged> {
    let (id, era, invocation) = match step {
        Step::Known(document) => {
            let charge = lease.ledger.charge(Item::Responses, document.len()).ok()?;
            return Some((document, charge));
        }
        Step::Call(id, era, invocation) => (id, era, invocation),
    };
    let Invocation {
        tool,
        arguments,
        progress_token,
    } = invocation;
    client.begin_call(progress_token);
    // A charge of nothing is never refused.
    let mut charge = lease.ledger.charge(Item::Responses, 0).ok()?;
    let mut call = ToolCall {
        workspace: lease,
        client,
        charge: &mut charge,
    };
    let result = match tool.call(&mut call, &arguments) {
        Ok(result) => result,
        Err(Stopped::Failed(error)) => failed(tool.name, error),
        Err(Stopped::Disconnected | Stopped::Due) => return None,
    };
    drop(arguments);
    let document = charged_document(&id, era, tool.name, result, &mut charge);
    Some((document, charge))
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
