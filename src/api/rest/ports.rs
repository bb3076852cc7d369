//! The servers inside a workspace: forwarding requests to them, listing them, waiting for them.

use super::call::{Answer, Call, json_later};
#[cfg(feature = "console")]
use crate::api::browsers;
use crate::api::browsers::{OF_ADDRESS, no_service_worker, wants_page, wants_service_worker};
use crate::api::forward;
use crate::api::json::network::{ListenerDocument, PortDocument};
#[cfg(feature = "console")]
use crate::api::json::network::{TicketDocument, port_request};
#[cfg(feature = "console")]
use crate::http::Body;
use crate::http::{Refusal, Response};
use crate::ports::Port;
use crate::relay::{Cookies, FieldChanges};
use crate::workspace::Workspace;

/// `ANY proxy/{port}{path}`.
///
/// # Errors
/// 403 if a browser asks for a program that would answer for all of this address.
pub(super) fn forward(
    call: &mut Call<'_, '_>,
    workspace: &Workspace,
    port: &[u8],
    path: &[u8],
) -> Answer {
    let port = workspace.ports.parse(port)?;
    let head = &call.request.head;
    if wants_service_worker(head) {
        return Err(no_service_worker());
    }
    if wants_page(head) {
        return page_instead(call, workspace, &port, path);
    }
    let changes = FieldChanges {
        dropped: vec![OF_ADDRESS],
        cookies: Cookies::Below {
            prefix: forward::own_prefix(head, path).to_vec(),
            request: path.to_vec(),
        },
        ..FieldChanges::default()
    };
    forward::forward(
        call.context,
        call.request,
        workspace,
        &port,
        path,
        &[],
        changes,
    )
}

/// Fields of the page that is shown in place of one of a server inside. It keeps its origin, so that the browser says
/// with its form where that comes from, and nothing else is allowed to it.
#[cfg(feature = "console")]
const PAGE_FIELDS: [(&str, &str); 5] = [
    ("Content-Type", "text/html; charset=utf-8"),
    (
        "Content-Security-Policy",
        "sandbox allow-forms allow-same-origin; default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; \
         frame-ancestors 'none'",
    ),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
];

/// What a browser gets that would make a page of this server's origin of the answer: a page with a button, so that
/// nothing happens by a link alone. The button leads to a ticket, at whose address the page of the server inside has an
/// origin of its own.
///
/// # Errors
/// 403 if the request is neither to look at the page nor that of its button.
#[cfg_attr(
    not(feature = "console"),
    expect(unused_variables, reason = "tickets are the console's")
)]
fn page_instead(call: &Call<'_, '_>, workspace: &Workspace, port: &Port, path: &[u8]) -> Answer {
    #[cfg(feature = "console")]
    {
        let head = &call.request.head;
        if browsers::is_safe(head) {
            let page = Body::Bytes(include_bytes!("open.html").to_vec());
            let fields = PAGE_FIELDS.iter();
            return Ok(
                fields.fold(Response::new(403, page), |page, (name, value)| {
                    page.with_header(name, *value)
                }),
            );
        }
        let says_origin = head.header("origin").is_some() && !browsers::is_foreign(head);
        let is_own = browsers::is_own(head)
            || (says_origin && call.context.origins.admit(call.request).is_ok());
        if head.method == "POST" && is_own {
            let opens = call.context.ticket_target(workspace, port.clone())?;
            let ticket = call.context.tickets.make(&workspace.ledger, opens)?;
            let target = forward::target(path, head.query.as_deref());
            let location = format!("/t/{ticket}{}", String::from_utf8_lossy(&target));
            return Ok(Response::new(303, Body::Empty).with_header("Location", location));
        }
    }
    let text = "a page of a server inside would be a page of this server; make an address for it by POST tickets";
    Err(Refusal::new(403, "forbidden", text))
}

/// `GET ports`.
pub(super) fn list(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let listed = workspace.list_ports(&mut call.interrupt())?;
    let documents = listed.listeners.iter().map(ListenerDocument::of);
    Ok(Response::json(&documents.collect::<Vec<_>>()).charged(listed.charge))
}

#[cfg(feature = "console")]
/// `POST tickets`: an address that leads to a port without a token.
pub(super) fn ticket(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    call.require_body()?;
    let port = call.parse(port_request)?;
    let port = workspace.ports.parse(port.as_bytes())?;
    let target = call.context.ticket_target(workspace, port.clone())?;
    let ticket = call.context.tickets.make(&workspace.ledger, target)?;
    Ok(Response::json(&TicketDocument::of(&port, &ticket)))
}

/// `GET ports/{port}/wait`.
pub(super) fn wait(call: &Call<'_, '_>, workspace: &Workspace, port: Port) -> Answer {
    let limit = call.query.seconds("timeout")?;
    let wait = workspace.wait_for_port(port)?;
    Ok(json_later(call.ping_interval(), move |client| {
        let listening = wait.run(limit, client).ok()?;
        Some(Response::json(&PortDocument::of(wait.port(), listening)))
    }))
}
