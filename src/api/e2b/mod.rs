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
#[cfg(feature = "file-tools")]
mod builds;
mod calls;
#[cfg(feature = "interpreter")]
mod code;
mod connect;
mod documents;
mod entries;
mod errors;
mod files;
mod logs;
mod multipart;
mod paths;
mod processes;
mod routes;
mod sandboxes;
mod signature;
mod templates;
mod watches;

use super::browsers::OWN;
use super::context::{Context, note_failure};
use super::forward::forward;
use crate::auth::Access;
use crate::codec::query::Query;
use crate::error::Error;
use crate::http::parse::Head;
use crate::http::{Body, Refusal, Request, Response};
use crate::limits::ledger::OverLimit;
use crate::relay::{Cookies, FieldChanges};
use crate::workspace::Needs;
use access::AskedSandbox;
use calls::Call;
use errors::E2bError;
use routes::Operation;

pub(super) use routes::Target;

impl super::Target for Target<'_> {
    fn name(&self) -> &'static str {
        self.name()
    }

    fn allow(&self) -> String {
        self.allow()
    }

    fn is_proxied(&self) -> bool {
        self.port().is_some()
    }

    /// What people open at a port has its own origin.
    fn is_page(&self) -> bool {
        self.is_proxied()
    }

    fn has_secret(&self) -> bool {
        self.is_signed()
    }

    /// Servers of one sandbox have an origin each, and may be parts of one program.
    fn is_beside(&self, head: &Head) -> bool {
        self.is_proxied() && routes::is_beside(head)
    }

    fn fields(&self) -> &'static [(&'static str, &'static str)] {
        if self.is_proxied() { &[] } else { OWN }
    }

    fn no_room(&self, head: &Head, limit: OverLimit) -> Response {
        let failure = E2bError::from(Error::from(limit));
        failure.respond(self.style(&head.method))
    }

    fn answer(&self, context: &Context, request: &mut Request<'_>) -> Result<Response, Refusal> {
        Ok(answer(context, request, self))
    }
}

fn answer(context: &Context, request: &mut Request<'_>, target: &Target<'_>) -> Response {
    let answered = try_answer(context, request, target);
    answered.unwrap_or_else(|failure| {
        if failure.is_for_operator() {
            let tenant = target.listed().or(target.labelled());
            let tenant = tenant.map(|id| format!("sandbox {id}"));
            let tenant = tenant.unwrap_or_else(|| "the machine".to_owned());
            note_failure(&tenant, request, failure.status, &failure.text);
        }
        failure.respond(target.style(&request.head.method))
    })
}

fn try_answer(
    context: &Context,
    request: &mut Request<'_>,
    target: &Target<'_>,
) -> Result<Response, E2bError> {
    access::check_ids(request, target.labelled())?;
    let named = target.labelled().unwrap_or_default();
    if target.is_gone() {
        return Err(E2bError::gone_at(named));
    }
    if let Some(port) = target.port() {
        let answered = at_port(context, request, named, port);
        return answered.map_err(|failure| failure.at_name(named));
    }
    let route = target.route(&request.head.method)?;
    // Parameters that are not known are ignored: newer clients have more.
    let query = Query::parse(request.head.query.as_deref())?;
    let mut call = Call {
        context,
        request,
        query,
    };
    let named = target.labelled();
    let listed = target.listed().unwrap_or_default();
    let place = match route.operation {
        Operation::Api(_) | Operation::Unavailable(_) => {
            access::of_api(context, call.request, Access::Machine)?;
            AskedSandbox::Machine
        }
        Operation::OwnApi(_) => {
            access::of_api(context, call.request, Access::Sandbox(listed))?;
            AskedSandbox::Machine
        }
        Operation::ApiInside(_) => {
            access::of_api(context, call.request, Access::Inside(listed))?;
            AskedSandbox::Machine
        }
        #[cfg(feature = "file-tools")]
        Operation::Upload(_) => {
            access::of_upload(context, &mut call, listed)?;
            AskedSandbox::Machine
        }
        Operation::Health => access::of_health(context, call.request, named)?,
        Operation::Files(_) => access::of_files(context, &mut call, named)?,
        Operation::Sandbox(_)
        | Operation::Unary(_)
        | Operation::List(_)
        | Operation::ServerStream(_)
        | Operation::ClientStream(_)
        | Operation::Code(_) => access::of_sandbox(context, call.request, named)?,
    };
    if call.request.head.method == "OPTIONS" {
        return Ok(Response::new(204, Body::Empty).with_header("Allow", target.allow()));
    }
    match route.operation {
        Operation::Api(answer) | Operation::OwnApi(answer) | Operation::ApiInside(answer) => {
            answer(&mut call, listed)
        }
        #[cfg(feature = "file-tools")]
        Operation::Upload(answer) => answer(&mut call, listed),
        Operation::Unavailable(sentence) => Err(E2bError::unimplemented(sentence)),
        Operation::Health if !access::runs(context, &place) => Err(E2bError::gone()),
        Operation::Health => Ok(Response::new(204, Body::Empty)),
        Operation::Sandbox(answer) => inside(&mut call, &place, answer),
        Operation::Files(answer) => inside_as(&mut call, &place, files::user, |call, lease| {
            answer(call, lease)
        }),
        Operation::Unary(answer) => inside(&mut call, &place, |call, lease| {
            connect::check_unary(call.request)?;
            let body = call.body()?;
            connect::unary(&answer(call, lease, connect::message(&body)?)?)
        }),
        Operation::List(answer) => inside(&mut call, &place, |call, lease| {
            connect::check_unary(call.request)?;
            let body = call.body()?;
            answer(call, lease, connect::message(&body)?)?.respond()
        }),
        Operation::ServerStream(answer) => inside(&mut call, &place, |call, lease| {
            connect::check_stream(call.request)?;
            // All of it is read before the head of the answer is sent: some clients stop sending then.
            let answered = call.body().and_then(|body| {
                let message = connect::only_message(&body)?;
                answer(call, lease, connect::message(message)?)
            });
            let answered = answered.map_err(|failure| failure.unless_ended(lease));
            Ok(answered.unwrap_or_else(|failure| connect::failed_stream(&failure)))
        }),
        Operation::ClientStream(answer) => inside(&mut call, &place, |call, lease| {
            connect::check_stream(call.request)?;
            Ok(match answer(call, lease) {
                Ok(document) => connect::only_answer(&document),
                Err(failure) => connect::failed_stream(&failure.unless_ended(lease)),
            })
        }),
        Operation::Code(answer) => inside(&mut call, &place, |call, lease| {
            answer(call, lease, target.context())
        }),
    }
}

/// Answers a request for the server behind a port of the sandbox `id`.
fn at_port(
    context: &Context,
    request: &mut Request<'_>,
    id: &str,
    number: u16,
) -> Result<Response, E2bError> {
    let place = access::of_port(context, request, Some(id))?;
    let lease = access::enter(context, request, &place, Needs::Running)?;
    let path = request.head.path.clone();
    let port = lease.ports.parse(number.to_string().as_bytes())?;
    let changes = FieldChanges {
        cookies: Cookies::OfHost,
        // A cache that does not tell names apart must not serve what one has answered at another.
        varies_by_host: true,
        ..FieldChanges::default()
    };
    match forward(context, request, &lease, &port, &path, &[], changes) {
        Ok(response) => Ok(response.holding(lease)),
        Err(refusal) if refusal.code == "unreachable" => Err(E2bError::not_open(id, number)),
        Err(refusal) => Ok(refusal.into()),
    }
}

/// Does something in a sandbox; the lease lasts until the last byte of the answer is sent.
fn inside(
    call: &mut Call<'_, '_>,
    place: &AskedSandbox,
    answer: impl FnOnce(&mut Call<'_, '_>, &crate::workspace::Workspace) -> Result<Response, E2bError>,
) -> Result<Response, E2bError> {
    inside_as(call, place, |call| access::user_of(call.request), answer)
}

/// The same, as the user that the request asks for where there are several.
fn inside_as(
    call: &mut Call<'_, '_>,
    place: &AskedSandbox,
    user: impl FnOnce(&Call<'_, '_>) -> Result<Option<String>, E2bError>,
    answer: impl FnOnce(&mut Call<'_, '_>, &crate::workspace::Workspace) -> Result<Response, E2bError>,
) -> Result<Response, E2bError> {
    let lease = access::enter(call.context, call.request, place, Needs::Running)?;
    let lease = if lease.has_own_root() {
        access::act_as(lease, user(call)?)?
    } else {
        lease
    };
    let answered = answer(call, &lease).map_err(|failure| failure.unless_gone(&lease))?;
    Ok(answered.holding(lease))
}
