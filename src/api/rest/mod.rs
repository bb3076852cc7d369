//! The door for HTTP and JSON: it parses a request into a typed operation and writes the answer.
//!
//! [`routes`] lists the operations, and each family of operations has a file that translates.
//! `workspace::operations` performs them, with their defaults and limits. No handler touches the socket.

#![allow(
    clippy::unnecessary_wraps,
    reason = "handlers stand in one table, so they have one type"
)]

mod archives;
mod attach;
mod call;
mod commands;
mod contexts;
mod contract;
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
mod search;
mod server;
mod simple;
mod venv;
mod watches;

use super::context::Context;
use crate::http::{Body, Refusal, Request, Response};
use routes::{InWorkspace, Operation, Route};

pub(super) use call::Answer;
use call::Call;
pub(super) use routes::Target;

/// Answers an admitted request for `path`, which names `target`.
pub(super) fn answer(
    context: &Context,
    request: &mut Request<'_>,
    path: &[u8],
    target: &Target<'_>,
) -> Answer {
    let method = &request.head.method;
    let path = String::from_utf8_lossy(path);
    let Some(Route { operation, .. }) = target.routes.first() else {
        let text = format!("there is nothing at {path}; GET /openapi.json lists every route");
        return Err(Refusal::new(404, "not_found", text));
    };
    match operation {
        Operation::Public(_) | Operation::Anyone(_) | Operation::Server(_) => {}
        Operation::Inside(_) => context.machine.check(target.scope)?,
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
    };
    let captures = target.captures;
    match route.operation {
        Operation::Public(answer) | Operation::Anyone(answer) | Operation::Server(answer) => {
            answer(&call)
        }
        Operation::Sandboxes(answer) => answer(&mut call, context.machine.host()?),
        Operation::Sandbox(answer) | Operation::OwnSandbox(answer) => {
            answer(&call, context.machine.host()?, captures.sandbox)
        }
        Operation::Inside(operation) => {
            let lease = context.enter(call.request, target.scope)?;
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
                    ports::forward(call.request, &lease, captures.port, captures.path)
                }
            };
            // The lease lasts until the last byte of the answer is sent.
            Ok(response?.holding(lease))
        }
    }
}
