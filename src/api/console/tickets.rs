//! `/t/{ticket}/...`: a server behind a port, for a tab of a browser that opens it by its address alone.
//!
//! Pages of such a server have the console's address, and nobody trusts them. So each answer makes a browser give
//! them an origin of their own (`sandbox`, Content Security Policy level 3): they can neither read what the console
//! keeps nor call the API as it does. Fields that speak for the whole address are dropped. For such a page its own
//! server is another origin, which has to allow its requests: whoever knows the ticket may send them anyway.

use crate::api::browsers::{APART, OF_ADDRESS, no_service_worker, wants_service_worker};
use crate::api::context::{Context, enter_by_ticket};
use crate::api::forward::forward;
use crate::api::origins::{is_preflight, preflight};
use crate::http::{Body, Refusal, Request, Response};
use crate::relay::{Cookies, FieldChanges};

/// Fields that are added to each answer, but for the one that the answer to a preflight has.
pub(super) const ADDED: &[(&str, &str)] = &[
    APART,
    ("Access-Control-Allow-Origin", "*"),
    ("Referrer-Policy", "no-referrer"),
];

/// Fields of answers that are set here, or that have browsers send credentials to all of this address.
const DROPPED: &[&str] = &[
    "access-control-allow-credentials",
    "access-control-allow-origin",
    "referrer-policy",
    "set-cookie",
];

/// What a browser sends to all of this address, besides credentials for this server.
const WITHHELD: &[&str] = &["cookie"];

/// Answers a request for the server that `ticket` leads to. `path` is empty, or begins with a slash.
pub(super) fn answer(
    context: &Context,
    request: &mut Request<'_>,
    ticket: &[u8],
    path: &[u8],
) -> Result<Response, Refusal> {
    let unknown = || {
        let text = "this link is not known, or it has expired: it has to be opened within a minute, and used within \
                    an hour; open the port in the console again";
        Refusal::new(404, "not_found", text)
    };
    if wants_service_worker(&request.head) {
        return Err(no_service_worker());
    }
    let (owner, target) = context.tickets.open(ticket).ok_or_else(unknown)?;
    if is_preflight(request) {
        let methods = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS";
        return Ok(preflight(request, "*", methods.to_owned()));
    }
    if path.is_empty() {
        // Relative links of the page begin at the slash.
        let mut home = [b"/t/", ticket, b"/"].concat();
        if let Some(query) = &request.head.query {
            home = [&home[..], b"?", query].concat();
        }
        let home = String::from_utf8_lossy(&home).into_owned();
        return Ok(Response::new(308, Body::Empty).with_header("Location", home));
    }
    let sandbox = target.sandbox.as_deref();
    let lease = enter_by_ticket(context, request, &owner, sandbox)?.ok_or_else(unknown)?;
    let changes = FieldChanges {
        dropped: vec![OF_ADDRESS, DROPPED],
        cookies: Cookies::AsSent,
        is_private: true,
        ..FieldChanges::default()
    };
    let answer = forward(
        context,
        request,
        &lease,
        &target.port,
        path,
        WITHHELD,
        changes,
    )?;
    Ok(answer.holding(lease))
}
