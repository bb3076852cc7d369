//! The door for clients of the Model Context Protocol (MCP): tools over the operations that all doors share.
//!
//! It speaks Streamable HTTP and keeps no state: each request has all that its answer needs. [`message`] reads
//! requests of both eras of the protocol and knows its errors, [`tools`] has the table of tools, and [`reply`] is
//! the way back: one JSON document, or a stream of events for those who wait. Each family of tools has a file.

#![allow(
    clippy::unnecessary_wraps,
    reason = "tools stand in one table, so they have one type"
)]

mod calls;
mod client;
mod commands;
mod files;
mod message;
mod output;
mod reply;
mod tools;

use std::sync::OnceLock;

use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use super::context::Context;
use super::credentials::{is_same, presented_token};
use crate::auth::Access;
use crate::codec::fields::{Fields, JsonType, Members, decoded};
use crate::codec::object::object;
use crate::error::Kind;
use crate::http::parse::Head;
use crate::http::{Body, Refusal, Request, Response};
use crate::machine::Scope;
use crate::workspace::Needs;
use calls::Room;
use message::{Era, LEGACY, MODERN, Message, Received, RpcError, server_info};
use reply::{Known, Step, Steps};
use tools::Invocation;

/// The methods of the endpoint.
const ALLOW: &str = "POST, OPTIONS";

/// Most bytes of a message.
const MAX_BODY_BYTES: u64 = 16 << 20;

/// What a client may do with what it was told, in milliseconds: the tools change only with the server.
const FRESH_MS: u64 = 3_600_000;

/// For models: what the tools are about.
const INSTRUCTIONS: &str = "A Linux sandbox: run commands and work on files in it. run waits for a command; start \
    leaves one running, and output, input and stop go on with it. Relative paths begin at the working directory of \
    the sandbox. Prefer edit_file to rewriting a file, and grep and glob to running commands for them.";

/// What a request is about.
pub(super) enum Target<'a> {
    /// What the token of the request opens.
    Own,
    /// The sandbox with this id.
    Sandbox(&'a str),
}

impl<'a> Target<'a> {
    /// What a request with this path is about; `None` if it is another door's, or the operator has closed this one.
    pub(super) fn find(context: &Context, path: &'a [u8]) -> Option<Self> {
        if !context.doors.mcp {
            return None;
        }
        if path == b"/mcp" {
            return Some(Self::Own);
        }
        let id = path
            .strip_prefix(b"/v1/sandboxes/")?
            .strip_suffix(b"/mcp")?;
        let id = std::str::from_utf8(id).ok()?;
        let is_id = !id.is_empty() && !id.contains('/');
        is_id.then_some(Self::Sandbox(id))
    }
}

impl super::Target for Target<'_> {
    fn name(&self) -> &'static str {
        "mcp"
    }

    fn allow(&self) -> String {
        ALLOW.to_owned()
    }

    /// It admits a page only after its token, and whether or not there is one.
    fn admits_origins(&self) -> bool {
        true
    }

    fn answer(&self, context: &Context, request: &mut Request<'_>) -> Result<Response, Refusal> {
        let own;
        let scope = match (self, context.machine.host()) {
            (Self::Sandbox(id), _) => Scope::Sandbox(id),
            (Self::Own, Err(_)) => Scope::Machine,
            (Self::Own, Ok(_)) => {
                own = sandbox_of_token(context, request);
                own.as_deref().map_or(Scope::Machine, Scope::Sandbox)
            }
        };
        let access = match scope {
            Scope::Machine => Access::Machine,
            Scope::Sandbox(id) => Access::Inside(id),
        };
        context.authenticate(request, access, false)?;
        if scope == Scope::Machine && context.machine.host().is_ok() {
            let text = "the token of the host is for no sandbox; use that of one here, or \
                        /v1/sandboxes/{id}/mcp";
            return Err(Refusal::new(404, "not_found", text));
        }
        answer(context, request, scope)
    }
}

/// The sandbox of a host that the token of a request opens.
fn sandbox_of_token(context: &Context, request: &Request<'_>) -> Option<String> {
    let (_, token) = presented_token(request, false).ok()?;
    let token = token?;
    context.sandbox_whose_token(|own| is_same(own, &token))
}

/// Answers an authenticated request about a workspace.
fn answer(
    context: &Context,
    request: &mut Request<'_>,
    scope: Scope<'_>,
) -> Result<Response, Refusal> {
    context.machine.check(scope)?;
    context.origins.admit(request)?;
    match &*request.head.method {
        "POST" => {}
        "OPTIONS" => return Ok(Response::new(204, Body::Empty).with_header("Allow", ALLOW)),
        method => {
            let text = format!(
                "an MCP endpoint has no method {method}; it has {ALLOW}: there are no sessions, and no stream \
                 besides the answers"
            );
            return Err(Refusal::new(405, "method_not_allowed", text).with_header("Allow", ALLOW));
        }
    }
    if !accepts_both(&request.head) {
        let text = "Accept must list application/json and text/event-stream";
        return Err(Refusal::new(406, "not_acceptable", text));
    }
    let mut lease = context.enter(request, scope, Needs::Files)?;
    let body = request.body.read_json(MAX_BODY_BYTES, &request.ledger)?;
    let head = &request.head;
    let mut room = Room::new(&lease.ledger);
    let steps = match Received::parse(&body, head) {
        Ok(Received::One(message)) => match dispatch(head, message, false) {
            Ok(None) => return Ok(nothing()),
            Ok(Some(Step::Known(answer))) => return Ok(reply::of_json(answer.to_json())),
            Ok(Some(call)) => Steps::One(call),
            Err(failure) => return Ok(failure.into()),
        },
        Ok(Received::Batch(messages)) => {
            let mut steps = Vec::with_capacity(messages.len());
            for message in messages {
                match dispatch(head, message, true) {
                    Ok(step) => steps.extend(step),
                    Err(failure) => {
                        let document = failure.to_json();
                        if room.keep(document.len()).is_err() {
                            return Ok(reply::of_json(reply::too_large()));
                        }
                        steps.push(Step::Refused(document));
                    }
                }
            }
            if steps.is_empty() {
                return Ok(nothing());
            }
            Steps::Batch(steps)
        }
        Err(failure) => return Ok(failure.into()),
    };
    if steps.need_processes() {
        // In a sandbox that rests its files can be used in any case.
        match context.enter(request, scope, Needs::Processes) {
            Ok(running) => lease = running,
            Err(error) if matches!(error.kind(), Kind::Stopped | Kind::Paused) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(reply::perform(context, steps, body, lease, room))
}

/// The answer to notifications.
fn nothing() -> Response {
    Response::new(202, Body::Empty)
}

/// Whether a client takes both kinds of answers.
fn accepts_both(head: &Head) -> bool {
    let accepts = |kind: &str| {
        let (family, _) = kind.split_once('/').unwrap_or((kind, ""));
        let family = format!("{family}/*");
        let values = head
            .values("accept")
            .flat_map(|value| value.split(|byte| *byte == b','));
        let mut types = values.map(|value| {
            let end = value.iter().position(|byte| *byte == b';');
            value[..end.unwrap_or(value.len())].trim_ascii()
        });
        types.any(|found| {
            let is = |kind: &str| found.eq_ignore_ascii_case(kind.as_bytes());
            is(kind) || is(&family) || is("*/*")
        })
    };
    accepts("application/json") && accepts("text/event-stream")
}

/// What answers a message; `None` for a notification.
fn dispatch(head: &Head, message: &RawValue, in_batch: bool) -> Result<Option<Step>, RpcError> {
    let Message {
        id,
        method,
        mut params,
        era,
    } = Message::parse(message, head)?;
    let Some(id) = id else {
        // There is nothing that a notification could change: to cancel a request is to close its connection.
        return Ok(None);
    };
    let at = |failure: RpcError| failure.about(id, era);
    if in_batch && (era == Era::Modern || method == "initialize") {
        return Err(at(RpcError::invalid("this is no part of a batch")));
    }
    let result = match (&*method, era) {
        ("server/discover", Era::Modern) => discovery(),
        ("initialize", Era::Legacy) => introduction(&mut params).map_err(at)?,
        ("ping", Era::Legacy) => object! {},
        ("tools/list", _) => {
            if params.take("cursor").is_some() {
                return Err(at(RpcError::params(
                    "cursor is not one that this server has given",
                )));
            }
            return Ok(Some(Step::Known(Known::List(id.to_owned(), era))));
        }
        ("tools/call", _) => {
            let invocation = invocation(&mut params, head, era).map_err(at)?;
            return Ok(Some(Step::Call(id.to_owned(), era, invocation)));
        }
        _ => return Err(at(RpcError::method(&method))),
    };
    let known = Known::Result(id.to_owned(), era, result);
    Ok(Some(Step::Known(known)))
}

/// The answer to `server/discover`.
fn discovery() -> Value {
    let versions: Vec<_> = MODERN.iter().chain(LEGACY).copied().collect();
    cacheable(object! {
        "supportedVersions": versions,
        "capabilities": capabilities(),
        "instructions": INSTRUCTIONS,
    })
}

/// The result of `tools/list`, the same for all clients of an era.
fn listing(era: Era) -> &'static RawValue {
    static RESULTS: [OnceLock<Box<RawValue>>; 2] = [const { OnceLock::new() }; 2];
    RESULTS[usize::from(era == Era::Modern)].get_or_init(|| {
        let result = cacheable(object! { "tools": tools::list() });
        // Fails only for maps whose keys are not strings; no document has any.
        to_raw_value(&reply::finished(result, era)).unwrap_or_default()
    })
}

/// The answer to `initialize`: in the version that was asked for, if it is known.
fn introduction(params: &mut Fields<'_>) -> Result<Value, RpcError> {
    let asked = params.string("protocolVersion");
    let asked = asked.map_err(RpcError::params)?;
    let known = LEGACY
        .iter()
        .find(|version| asked.as_deref() == Some(**version));
    Ok(object! {
        "protocolVersion": *known.unwrap_or(&LEGACY[0]),
        "capabilities": capabilities(),
        "serverInfo": server_info(),
        "instructions": INSTRUCTIONS,
    })
}

fn capabilities() -> Value {
    object! { "tools": object! {} }
}

/// Says for how long a result is fresh, and that it is for its client only.
fn cacheable(mut result: Value) -> Value {
    result["ttlMs"] = FRESH_MS.into();
    result["cacheScope"] = "private".into();
    result
}

/// The tool that a request calls, and its arguments.
fn invocation(params: &mut Fields<'_>, head: &Head, era: Era) -> Result<Invocation, RpcError> {
    let name = params.string("name");
    let name = name.map_err(RpcError::params)?;
    let name = name.ok_or_else(|| RpcError::params("name is missing"))?;
    if era == Era::Modern {
        message::check_name(head, &name)?;
    }
    let tool = tools::find(&name).ok_or_else(|| {
        let names: Vec<_> = tools::TOOLS.iter().map(|tool| tool.name).collect();
        let names = names.join(", ");
        RpcError::params(format_args!("there is no tool {name:?}; there are {names}"))
    })?;
    let arguments = match params.take("arguments") {
        Some(arguments) if JsonType::of(arguments) == JsonType::Object => arguments.to_owned(),
        Some(_) => return Err(RpcError::params("arguments is no object")),
        None => RawValue::from_string("{}".to_owned()).unwrap_or_default(),
    };
    let progress_token = match params.take("_meta") {
        Some(meta) if JsonType::of(meta) == JsonType::Object => {
            let meta: Members<'_> = decoded("_meta", meta).map_err(RpcError::params)?;
            Fields::from(meta)
                .take("progressToken")
                .map(RawValue::to_owned)
        }
        _ => None,
    };
    if progress_token
        .as_deref()
        .is_some_and(|token| !message::is_id(token))
    {
        return Err(RpcError::params(
            "progressToken is neither a string nor a whole number of at most 1024 bytes",
        ));
    }
    Ok(Invocation {
        tool,
        arguments,
        progress_token,
    })
}
