//! Answers: one JSON document, or Server-Sent Events whose last one is that document.
//!
//! A call that asks for progress is answered by events from the start, and one that takes long from then on, so that no
//! proxy ends it.

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::calls::{Room, ToolCall, ToolResult};
use super::client::ToolClient;
use super::listing;
use super::message::{Era, RpcError, server_info};
use super::tools::Invocation;
use crate::api::context::Context;
use crate::client::{Disconnected, Interrupt, Stopped, Uninterrupted, check_peer, send_all_within};
use crate::codec::object::object;
use crate::error::Error;
use crate::http::late::LateStream;
use crate::http::request::WholeBody;
use crate::http::stream::SEND_LIMIT;
use crate::http::{Body, Refusal, Response};
use crate::limits::ledger::OverLimit;
use crate::logging;
use crate::workspace::Lease;

#[derive(Serialize)]
struct Document<'a, R> {
    jsonrpc: &'static str,
    id: &'a RawValue,
    result: R,
}

/// A result with what clients of its era expect of any.
pub(super) fn finished(result: Value, era: Era) -> Map<String, Value> {
    let Value::Object(mut result) = result else {
        return Map::new();
    };
    if era == Era::Modern {
        result.insert("resultType".to_owned(), "complete".into());
        let meta = object! { "io.modelcontextprotocol/serverInfo": server_info() };
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

/// The document, in a buffer of `room` bytes that grows if they are not enough, and is cut if they are too many.
fn to_json(id: &RawValue, result: impl Serialize, room: usize) -> Vec<u8> {
    let mut document = Vec::with_capacity(room);
    // Fails only for maps whose keys are not strings; no document has any.
    let _ = serde_json::to_writer(
        &mut document,
        &Document {
            jsonrpc: "2.0",
            id,
            result,
        },
    );
    // The end of the line is added.
    document.shrink_to(document.len() + 1);
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
    room: &mut Room,
) -> Vec<u8> {
    let mut value = result.into_value();
    let [held, written] = sizes(&value);
    let mut bytes = written + FRAME_BYTES;
    if let Err(error) = room.reserve(held + bytes) {
        value = failed(tool, Error::from(error)).into_value();
        bytes = 0;
    }
    to_json(id, finished(value, era), bytes)
}

/// The answer with a document that is known.
pub(super) fn of_json(mut document: Vec<u8>) -> Response {
    document.push(b'\n');
    Response::new(200, Body::Bytes(document)).with_header("Content-Type", "application/json")
}

/// The answer to a request that calls no tool. It is made when it is due.
pub(super) enum Known {
    /// A small result.
    Result(Box<RawValue>, Era, Value),
    /// That of `tools/list`.
    List(Box<RawValue>, Era),
}

impl Known {
    /// At least the bytes of its document.
    fn bytes(&self) -> usize {
        let (id, result) = match self {
            Self::Result(id, ..) => (id, 0),
            Self::List(id, era) => (id, listing(*era).get().len()),
        };
        id.get().len() + result + FRAME_BYTES
    }

    /// Its document.
    pub(super) fn to_json(&self) -> Vec<u8> {
        match self {
            Self::Result(id, era, result) => {
                to_json(id, finished(result.clone(), *era), self.bytes())
            }
            Self::List(id, era) => to_json(id, listing(*era), self.bytes()),
        }
    }
}

/// What answers a request.
pub(super) enum Step {
    /// The document of a failure, which is kept already.
    Refused(Vec<u8>),
    Known(Known),
    /// The call of a tool: its id, its era, the call.
    Call(Box<RawValue>, Era, Invocation),
}

/// What answers a body.
pub(super) enum Steps {
    One(Step),
    Batch(Vec<Step>),
}

impl Steps {
    /// Whether a tool is called that needs processes.
    pub(super) fn need_processes(&self) -> bool {
        let needs = |step: &Step| matches!(step, Step::Call(_, _, call) if call.tool.is_running);
        match self {
            Self::One(step) => needs(step),
            Self::Batch(steps) => steps.iter().any(needs),
        }
    }
}

/// The answer of tools that are called when it is due, one after the other. `body` is what was charged for the
/// arguments, and `room` has the failures.
pub(super) fn perform(
    context: &Context,
    steps: Steps,
    body: WholeBody,
    lease: Lease,
    mut room: Room,
) -> Response {
    let ping_interval = context.machine.ping_interval;
    let held = lease.share().ok();
    let find = move |stream: &mut LateStream| {
        let (steps, mut is_batch) = match steps {
            Steps::One(step) => (vec![step], false),
            Steps::Batch(steps) => (steps, true),
        };
        let mut client = ToolClient::new(stream, ping_interval);
        let mut answers = Vec::new();
        let nobody = &mut Uninterrupted;
        let paced = &mut lease.paced(nobody);
        for step in steps {
            // Each is little work, but a batch may have very many.
            if is_batch && paced.check().is_err() {
                return None;
            }
            match answer(step, &lease, &mut client, &mut room) {
                Ok(document) => answers.push(document),
                Err(Unanswered::Disconnected) => return None,
                Err(Unanswered::TooLarge) => {
                    answers = vec![too_large()];
                    is_batch = false;
                    break;
                }
            }
        }
        drop(body);
        if client.stream.has_begun() {
            // Clients take one message from each event. The buffer of the stream charges its copy.
            for document in answers {
                client.event(&document);
            }
            let _ = send_all_within(&mut client, SEND_LIMIT);
            return None;
        }
        let document = if is_batch {
            batch(answers, &mut room)
        } else {
            answers.pop()?
        };
        let charge = room.into_charge(document.capacity());
        Some(of_json(document).charged(charge))
    };
    Response::new(200, Body::Late(Box::new(find)))
        .with_header("X-Accel-Buffering", "no")
        .holding(held)
}

/// Answers a batch for which there is no room.
pub(super) fn too_large() -> Vec<u8> {
    let text = "the answers to this batch are too large together; send fewer requests";
    RpcError::invalid(text).to_json()
}

/// The answer to a batch: all messages in one list.
fn batch(answers: Vec<Vec<u8>>, room: &mut Room) -> Vec<u8> {
    let bytes: usize = answers.iter().map(|document| document.len() + 1).sum();
    if room.reserve(bytes + 2).is_err() {
        return too_large();
    }
    let mut list = Vec::with_capacity(bytes + 2);
    for document in answers {
        list.push(if list.is_empty() { b'[' } else { b',' });
        list.extend_from_slice(&document);
    }
    list.push(b']');
    list
}

/// Why a request has no answer.
#[derive(Debug, PartialEq, Eq)]
enum Unanswered {
    Disconnected,
    TooLarge,
}

impl From<Disconnected> for Unanswered {
    fn from(_: Disconnected) -> Self {
        Self::Disconnected
    }
}

impl From<OverLimit> for Unanswered {
    fn from(_: OverLimit) -> Self {
        Self::TooLarge
    }
}

/// One message, which `room` keeps. No tool is called for a client that has disconnected, or in a workspace that has
/// ended.
fn answer(
    step: Step,
    lease: &Lease,
    client: &mut ToolClient<'_>,
    room: &mut Room,
) -> Result<Vec<u8>, Unanswered> {
    check_peer(client)?;
    let document = match step {
        Step::Refused(document) => return Ok(document),
        Step::Known(known) => {
            room.reserve(known.bytes())?;
            known.to_json()
        }
        Step::Call(id, era, invocation) => {
            let Invocation {
                tool,
                arguments,
                progress_token,
            } = invocation;
            client.begin_call(progress_token);
            let mut call = ToolCall {
                workspace: lease,
                client,
                room,
            };
            let called = lease.share().map_err(Stopped::from);
            let result = match called.and_then(|_lease| tool.call(&mut call, &arguments)) {
                Ok(result) => result,
                Err(Stopped::Failed(error)) => failed(tool.name, error),
                Err(Stopped::Disconnected | Stopped::Due) => return Err(Unanswered::Disconnected),
            };
            drop(arguments);
            charged_document(&id, era, tool.name, result, room)
        }
    };
    room.keep(document.capacity())?;
    Ok(document)
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::{TcpListener, TcpStream};
    use std::path::Path;
    use std::time::Duration;

    use nix::sys::socket::{setsockopt, sockopt};

    use super::super::{cacheable, tools};
    use serde_json::json;

    use super::*;
    use crate::limits::ledger::Budget;
    use crate::workspace::Workspace;

    fn id() -> Box<RawValue> {
        RawValue::from_string("1".to_owned()).unwrap()
    }

    fn list() -> Step {
        Step::Known(Known::List(id(), Era::Legacy))
    }

    /// A call that makes a file.
    fn write() -> Step {
        let arguments = json!({ "path": "made", "content": "x" }).to_string();
        let invocation = Invocation {
            tool: tools::find("write_file").unwrap(),
            arguments: RawValue::from_string(arguments).unwrap(),
            progress_token: None,
        };
        Step::Call(id(), Era::Legacy, invocation)
    }

    /// The answer to the client at the other end of `near`.
    fn answered(
        step: Step,
        lease: &Lease,
        room: &mut Room,
        near: &TcpStream,
    ) -> Result<Vec<u8>, Unanswered> {
        let near = near.try_clone().unwrap();
        let mut stream = LateStream::for_test(near, &lease.ledger);
        let mut client = ToolClient::new(&mut stream, Duration::from_secs(30));
        answer(step, lease, &mut client, room)
    }

    fn connection() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [listener.accept().unwrap().0, far]
    }

    #[test]
    fn a_list_of_tools_is_made_once() {
        let first = listing(Era::Legacy);
        let expected = cacheable(json!({ "tools": tools::list() }));
        assert_eq!(
            serde_json::from_str::<Value>(first.get()).unwrap(),
            expected
        );
        assert!(std::ptr::eq(first, listing(Era::Legacy)));
        let modern: Value = serde_json::from_str(listing(Era::Modern).get()).unwrap();
        assert_eq!(modern["resultType"], "complete");
        let known = Known::List(id(), Era::Modern);
        assert!(known.to_json().len() <= known.bytes());
    }

    #[test]
    fn the_known_answers_of_a_batch_are_charged_before_they_are_made() {
        let workspace = Workspace::for_test(Path::new("/"));
        let lease = workspace.lease().unwrap();
        let [near, _far] = connection();
        let length = listing(Era::Legacy).get().len();
        // One item may hold half of it.
        let ledger = Budget::new(20 * length as u64).whole();
        let mut room = Room::new(&ledger);
        let mut answer = || answered(list(), &lease, &mut room, &near);
        let made = std::iter::from_fn(|| answer().ok()).count();
        assert!((8..10).contains(&made), "{made}");
        assert_eq!(answer(), Err(Unanswered::TooLarge));
    }

    #[test]
    fn a_command_is_not_started_if_there_is_no_room_to_tell() {
        let workspace = Workspace::for_test(Path::new("/"));
        let lease = workspace.lease().unwrap();
        let [near, _far] = connection();
        let mut words = vec![""; 1000];
        words[0] = "true";
        let arguments = json!({ "cmd": words }).to_string();
        let start = Step::Call(
            id(),
            Era::Legacy,
            Invocation {
                tool: tools::find("start").unwrap(),
                arguments: RawValue::from_string(arguments).unwrap(),
                progress_token: None,
            },
        );
        let mut room = Room::new(&Budget::new(64 << 10).whole());
        let document = answered(start, &lease, &mut room, &near).unwrap();
        let document: Value = serde_json::from_slice(&document).unwrap();
        let code = &document["result"]["structuredContent"]["code"];
        assert_eq!(code, "over_limit", "{document}");
        assert!(lease.processes.list().is_empty());
    }

    #[test]
    fn no_tool_is_called_once_client_or_workspace_is_gone() {
        let home = std::env::temp_dir().join(format!("sbx-mcp-{}", std::process::id()));
        fs::create_dir(&home).unwrap();
        let workspace = Workspace::for_test(&home);
        let lease = workspace.lease().unwrap();
        let mut room = Room::new(&lease.ledger);
        let [near, far] = connection();
        workspace.close();
        let document = answered(write(), &lease, &mut room, &near).unwrap();
        let document: Value = serde_json::from_slice(&document).unwrap();
        let code = &document["result"]["structuredContent"]["code"];
        assert_eq!(code, "shutting_down", "{document}");

        let workspace = Workspace::for_test(&home);
        let lease = workspace.lease().unwrap();
        let now = libc::linger {
            l_onoff: 1,
            l_linger: 0,
        };
        setsockopt(&far, sockopt::Linger, &now).unwrap();
        drop(far);
        let outcome = answered(write(), &lease, &mut room, &near);
        assert_eq!(outcome, Err(Unanswered::Disconnected));
        // Empty.
        fs::remove_dir(&home).unwrap();
    }
}
