//! Answers: one JSON document, or Server-Sent Events whose last one is that document.
//!
//! A call that asks for progress is answered by events from the start, and one that takes long from then on, so that no
//! proxy ends it.

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::calls::{ToolCall, ToolResult};
use super::client::ToolClient;
use super::message::{Era, server_info};
use super::tools::Invocation;
use crate::api::context::Context;
use crate::client::{Stopped, send_all_within};
use crate::error::Error;
use crate::http::late::LateStream;
use crate::http::request::WholeBody;
use crate::http::stream::SEND_LIMIT;
use crate::http::{Body, Refusal, Response};
use crate::ledger::{Charge, Item};
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

/// A result as a message.
pub(super) fn to_json(id: &RawValue, era: Era, result: Value) -> Vec<u8> {
    // Fails only for maps whose keys are not strings; no document has any.
    serde_json::to_vec(&Document {
        jsonrpc: "2.0",
        id,
        result: finished(result, era),
    })
    .unwrap_or_default()
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
        let mut documents = Vec::new();
        let mut charges = Vec::new();
        for step in steps {
            let (document, charge) = answer(step, &lease, &mut client)?;
            documents.push(document);
            charges.push(charge);
        }
        drop(body);
        if client.stream.has_begun() {
            // Clients take one message from each event.
            for document in documents {
                client.event(&document);
            }
            // The charges last until all is sent.
            let _ = send_all_within(&mut client, SEND_LIMIT);
            return None;
        }
        let document = if is_batch {
            [b"[", &documents.join(&b',')[..], b"]"].concat()
        } else {
            documents.pop().unwrap_or_default()
        };
        Some(of_json(document).holding(charges))
    };
    Response::new(200, Body::Late(Box::new(find)))
        .with_header("X-Accel-Buffering", "no")
        .holding(held)
}

/// One message, and what it takes; `None` if the client has disconnected.
fn answer(step: Step, lease: &Lease, client: &mut ToolClient<'_>) -> Option<(Vec<u8>, Charge)> {
    let charge = |document: &Vec<u8>| {
        let bytes = 2 * document.len();
        lease.ledger.charge(Item::Responses, bytes)
    };
    let (id, era, invocation) = match step {
        Step::Known(document) => {
            let charge = charge(&document).ok()?;
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
    let mut call = ToolCall {
        workspace: lease,
        client,
    };
    let result = match tool.call(&mut call, &arguments) {
        Ok(result) => result,
        Err(Stopped::Failed(error)) => failed(tool.name, error),
        Err(Stopped::Disconnected | Stopped::Due) => return None,
    };
    drop(arguments);
    let document = to_json(&id, era, result.into_value());
    match charge(&document) {
        Ok(charge) => Some((document, charge)),
        Err(error) => {
            let result = failed(tool.name, Error::from(error));
            let document = to_json(&id, era, result.into_value());
            Some((document, lease.ledger.charge(Item::Responses, 0).ok()?))
        }
    }
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
