//! The door for E2B's SDKs: their Connect RPC with JSON, their file transfers, their sandboxes and their code
//! interpreter, over the operations that all doors share.
//!
//! [`routes`] lists what it serves and decides which requests are its own; [`access`] finds the sandbox that a request
//! is about and checks its credentials; [`connect`] is the codec of the RPC protocol. Each family of operations has a
//! file that translates, and [`errors`] the one table from a kind of error to what these clients see.

#![allow(
    clippy::unnecessary_wraps,
    reason = "handlers stand in one table, so they have one type"
)]

mod access;
mod calls;
mod code;
mod connect;
mod entries;
mod errors;
mod files;
mod multipart;
mod paths;
mod processes;
mod routes;
mod sandboxes;
mod signature;
mod watches;

use super::context::Context;
use crate::codec::query::Query;
use crate::http::{Request, Response};
use access::Place;
use calls::Call;
use errors::Failure;
use routes::Operation;

pub(super) use routes::Target;

/// Answers a request for `target`.
pub(super) fn answer(
    context: &Context,
    request: &mut Request<'_>,
    target: &Target<'_>,
) -> Response {
    let answered = try_answer(context, request, target);
    answered.unwrap_or_else(|failure| {
        if matches!(failure.status, 500 | 507) {
            let tenant = target.sandbox().map(|id| format!("sandbox {id}"));
            let tenant = tenant.unwrap_or_else(|| "the machine".to_owned());
            context.note_failure(&tenant, request, failure.status, &failure.text);
        }
        failure.respond(target.style(&request.head.method))
    })
}

fn try_answer(
    context: &Context,
    request: &mut Request<'_>,
    target: &Target<'_>,
) -> Result<Response, Failure> {
    if let Some(port) = target.port() {
        let place = access::of_port(context, request, target.sandbox())?;
        let lease = access::enter(context, request, &place)?;
        let response = super::forward::forward(
            request,
            &lease,
            port.to_string().as_bytes(),
            &request.head.path.clone(),
            &WITHHELD_FROM_PORTS,
        );
        return Ok(response.map_or_else(Response::from, |response| response.holding(lease)));
    }
    let route = target.route(&request.head.method)?;
    // Parameters that are not known are ignored: newer clients have more.
    let query = Query::parse(request.head.query.as_deref())?;
    let mut call = Call {
        context,
        request,
        query,
        held: None,
    };
    match route.operation {
        Operation::Api(answer) => {
            access::of_api(context, call.request, target.sandbox())?;
            answer(&mut call, target.sandbox().unwrap_or_default())
        }
        Operation::Unavailable(sentence) => {
            access::of_api(context, call.request, target.sandbox())?;
            Err(Failure::unimplemented(sentence))
        }
        Operation::Health => {
            access::check_health(context, call.request, target.sandbox())?;
            Ok(Response::new(204, crate::http::Body::Empty))
        }
        Operation::Sandbox(answer) => {
            let place = access::of_sandbox(context, call.request, target.sandbox())?;
            inside(&mut call, &place, answer)
        }
        Operation::Files(answer) => {
            let place = access::of_files(context, &mut call, target.sandbox())?;
            inside(&mut call, &place, answer)
        }
        Operation::Unary(answer) => {
            let place = access::of_sandbox(context, call.request, target.sandbox())?;
            connect::check_unary(call.request)?;
            inside(&mut call, &place, |call, lease| {
                let body = call.body()?;
                connect::unary(&answer(call, lease, connect::message(&body)?)?)
            })
        }
        Operation::ServerStream(answer) => {
            let place = access::of_sandbox(context, call.request, target.sandbox())?;
            connect::check_stream(call.request)?;
            inside(&mut call, &place, |call, lease| {
                // All of it is read before the head of the answer is sent: some clients stop sending then.
                let answered = call.body().and_then(|body| {
                    let message = connect::only_message(&body)?;
                    answer(call, lease, connect::message(message)?)
                });
                Ok(answered.unwrap_or_else(|failure| connect::failed_stream(&failure)))
            })
        }
        Operation::ClientStream(answer) => {
            let place = access::of_sandbox(context, call.request, target.sandbox())?;
            connect::check_stream(call.request)?;
            inside(&mut call, &place, |call, lease| {
                Ok(match answer(call, lease) {
                    Ok(document) => connect::only_answer(&document),
                    Err(failure) => connect::failed_stream(&failure),
                })
            })
        }
        Operation::Code(answer) => {
            let place = access::of_sandbox(context, call.request, target.sandbox())?;
            let id = target.context();
            inside(&mut call, &place, |call, lease| answer(call, lease, id))
        }
    }
}

/// Credentials of this door are not for the servers behind ports.
const WITHHELD_FROM_PORTS: [&str; 3] = [
    "x-sandbox-token",
    "x-access-token",
    "e2b-traffic-access-token",
];

/// Does something in a sandbox; the lease lasts until the last byte of the answer is sent.
fn inside(
    call: &mut Call<'_, '_>,
    place: &Place,
    answer: impl FnOnce(&mut Call<'_, '_>, &crate::workspace::Workspace) -> Result<Response, Failure>,
) -> Result<Response, Failure> {
    let lease = access::enter(call.context, call.request, place)?;
    let response = answer(call, &lease)?;
    Ok(response.holding((lease, call.held.take())))
}
