//! The door for HTTP and JSON: it parses a request into a typed operation and writes the answer.
//!
//! [`routes`] lists the operations, and each family of operations has a file that translates.
//! `workspace::operations` performs them, with their defaults and limits. No handler touches the socket.

#![allow(
    clippy::unnecessary_wraps,
    reason = "handlers stand in one table, so they have one type"
)]

#[cfg(feature = "file-tools")]
mod archives;
#[cfg(feature = "attach")]
mod attach;
mod call;
mod commands;
#[cfg(feature = "interpreter")]
mod contexts;
mod contract;
#[cfg(feature = "file-tools")]
mod edit;
mod events;
mod files;
#[cfg(test)]
mod fuzz;
mod metrics;
mod network;
mod ports;
mod routes;
mod sandboxes;
#[cfg(feature = "file-tools")]
mod search;
mod selection;
mod server;
#[cfg(feature = "interpreter")]
mod simple;
#[cfg(feature = "file-tools")]
mod snapshots;
mod venv;
#[cfg(feature = "file-tools")]
mod watches;

use super::browsers::{APART, OWN};
use super::context::{Context, note_failure};
use crate::auth::{Access, Holder};
use crate::fault;
use crate::http::{Body, Refusal, Request, Response};
use crate::workspace::Needs;
use routes::{InWorkspace, Operation, Route};

use call::{Answer, Call};
pub(super) use routes::Target;

impl super::Target for Target<'_> {
    fn name(&self) -> &'static str {
        self.name()
    }

    fn allow(&self) -> String {
        self.allow()
    }

    fn is_proxied(&self) -> bool {
        self.is_proxied()
    }

    fn is_page(&self) -> bool {
        let operation = self.routes.first().map(|route| route.operation);
        self.is_proxied() || matches!(operation, Some(Operation::Public(_)))
    }

    fn fields(&self) -> &'static [(&'static str, &'static str)] {
        if self.is_proxied() { &[APART] } else { OWN }
    }

    fn answer(&self, context: &Context, request: &mut Request<'_>) -> Answer {
        let answer = authenticate_and_answer(context, request, self);
        if let Err(refusal) = &answer
            && matches!(refusal.status, 500 | 507)
        {
            let tenant = match self.access(&request.head.method) {
                Some(Access::Inside(id) | Access::Sandbox(id)) => format!("sandbox {id}"),
                _ => "the machine".to_owned(),
            };
            note_failure(&tenant, request, refusal.status, &refusal.text);
        }
        answer
    }
}

fn authenticate_and_answer(
    context: &Context,
    request: &mut Request<'_>,
    target: &Target<'_>,
) -> Answer {
    let path = target.path;
    // MCP clients and browsers read these paths before they have a token.
    let is_public = path.starts_with(b"/.well-known/") || path == b"/favicon.ico";
    if let Some(access) = target.access(&request.head.method).filter(|_| !is_public) {
        context.authenticate(request, access, target.is_proxied())?;
    } else if context.is_operator(request) {
        // So that the connection stays the operator's, who perhaps asks for nothing but the health of the server.
        context.assign_slot(request, Holder::Operator)?;
    }
    if request.head.method == "OPTIONS" && path == b"*" {
        return Ok(Response::new(204, Body::Empty)
            .with_header("Allow", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"));
    }
    answer(context, request, target)
}

/// The parameter of a query that says whom files are accessed as.
const USER: &str = "user";

/// Answers an authenticated request.
fn answer(context: &Context, request: &mut Request<'_>, target: &Target<'_>) -> Answer {
    let method = &request.head.method;
    let path = String::from_utf8_lossy(target.path);
    let Some(Route { operation, .. }) = target.routes.first() else {
        let text = format!("there is nothing at {path}; GET /openapi.json lists every route");
        return Err(Refusal::new(404, "not_found", text));
    };
    match operation {
        Operation::Public(_) | Operation::Anyone(_) | Operation::Server(_) => {}
        Operation::Inside(_) | Operation::Running(_) => context.machine.check(target.scope)?,
        _ => drop(context.machine.host()?),
    }
    if method == "OPTIONS" && !target.is_proxied() {
        return Ok(Response::new(204, Body::Empty).with_header("Allow", target.allow()));
    }
    let Some(route) = target.route(method) else {
        let allow = target.allow();
        let text = format!("{path} has no method {method}; it has {allow}");
        return Err(Refusal::new(405, "method_not_allowed", text).with_header("Allow", allow));
    };
    let query = route.query(request.head.query.as_deref())?;
    let mut call = Call {
        context,
        request,
        query,
        ignored: Vec::new(),
    };
    let captures = target.captures;
    match route.operation {
        Operation::Public(answer) | Operation::Anyone(answer) | Operation::Server(answer) => {
            answer(&call)
        }
        Operation::Sandboxes(answer) => {
            let response = answer(&mut call, context.machine.host()?)?;
            Ok(call.tell_ignored(response))
        }
        Operation::Sandbox(answer) => answer(&call, context.machine.host()?, captures.sandbox),
        #[cfg(feature = "file-tools")]
        Operation::Snapshot(answer) => {
            let response = answer(&mut call, context.machine.host()?, captures.snapshot)?;
            Ok(call.tell_ignored(response))
        }
        Operation::OwnSandbox(answer) => {
            let response = answer(&mut call, context.machine.host()?, captures.sandbox)?;
            Ok(call.tell_ignored(response))
        }
        Operation::Inside(operation) | Operation::Running(operation) => {
            let needs = match route.operation {
                Operation::Running(_) => Needs::Processes,
                _ => Needs::Files,
            };
            let mut lease = context.enter(call.request, target.scope, needs)?;
            if let Some(user) = call.query.text(USER)? {
                if lease.has_own_root() {
                    lease = lease.share_as(&user)?;
                } else {
                    call.ignored.push(USER.to_owned());
                }
            }
            fault::point("request");
            let response = match operation {
                InWorkspace::Plain(answer) => answer(&mut call, &lease),
                InWorkspace::Process(answer) => answer(&mut call, &lease, captures.process),
                InWorkspace::Context(answer) => answer(&mut call, &lease, captures.context),
                InWorkspace::Execution(answer) => {
                    answer(&call, &lease, captures.context, captures.execution)
                }
                InWorkspace::Watch(answer) => answer(&mut call, &lease, captures.watch),
                InWorkspace::Port(answer) => {
                    answer(&call, &lease, lease.ports.parse(captures.port)?)
                }
                InWorkspace::Proxy => {
                    ports::forward(&mut call, &lease, captures.port, captures.path)
                }
            };
            // The lease lasts until the last byte of the answer is sent.
            Ok(call.tell_ignored(response?).holding(lease))
        }
    }
}
