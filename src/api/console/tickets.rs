//! `/t/{ticket}/...`: a server behind a port, for a tab of a browser that opens it by its address alone.
//!
//! Pages of such a server have the console's address, and nobody trusts them. So each answer makes a browser give
//! them an origin of their own (`sandbox`, Content Security Policy level 3): they can neither read what the console
//! keeps nor call the API as it does. Fields that speak for the whole address are dropped. For such a page its own
//! server is another origin, which has to allow its requests: whoever knows the ticket may send them anyway.

use crate::api::context::{Context, enter_by_ticket};
use crate::api::forward::{self, forward};
use crate::api::origins::{is_preflight, preflight};
use crate::http::{Body, Refusal, Request, Response};
use crate::relay::FieldChanges;

/// Fields that are added to each answer.
const ADDED: &[(&str, &str)] = &[
    (
        "Content-Security-Policy",
        "sandbox allow-scripts allow-forms",
    ),
    ("Access-Control-Allow-Origin", "*"),
    ("Referrer-Policy", "no-referrer"),
];

/// Fields of answers that are about all of this address, or that are set here.
const DROPPED: &[&str] = &[
    "access-control-allow-credentials",
    "access-control-allow-origin",
    "alt-svc",
    "clear-site-data",
    "cross-origin-opener-policy",
    "nel",
    "referrer-policy",
    "report-to",
    "reporting-endpoints",
    "service-worker-allowed",
    "set-cookie",
    "strict-transport-security",
    "www-authenticate",
];

/// Credentials for this server, for the proxy before it, and for its address.
const WITHHELD: [&str; 3] = ["x-sandbox-token", "authorization", "cookie"];

/// Answers a request for the server that `ticket` leads to. `path` is empty, or begins with a slash.
pub(super) fn answer(
    context: &Context,
    request: &mut Request<'_>,
    ticket: &[u8],
    path: &[u8],
) -> Response {
    let answer = try_answer(context, request, ticket, path);
    let answer = answer.unwrap_or_else(Response::from);
    // The answer to a preflight has one of them.
    ADDED.iter().fold(answer, |answer, (name, value)| {
        if answer.headers.iter().any(|(other, _)| other == name) {
            return answer;
        }
        answer.with_header(name, *value)
    })
}

fn try_answer(
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
    let (workspace, port) = context.tickets.open(ticket).ok_or_else(unknown)?;
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
    let lease = enter_by_ticket(request, &workspace)?.ok_or_else(unknown)?;
    let changes = FieldChanges {
        dropped: DROPPED,
        home: Some(forward::home(&port, [b"/t/", ticket].concat())),
    };
    let answer = forward(request, &lease, &port, path, &WITHHELD, changes)?;
    Ok(answer.holding(lease))
}
