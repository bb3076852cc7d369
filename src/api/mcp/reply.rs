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
use crate::ledger::Item;
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
