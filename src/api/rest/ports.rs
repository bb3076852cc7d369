//! The servers inside a workspace: forwarding requests to them, listing them, waiting for them.

use super::call::{Answer, Call, json_later};
use crate::api::forward;
use crate::api::json::documents::{ListenerDocument, PortDocument, TicketDocument};
use crate::api::json::requests::port_request;
use crate::http::{Request, Response};
use crate::ports::Port;
use crate::relay::FieldChanges;
use crate::workspace::Workspace;

/// Credentials, which are for this server or for the proxy before it.
const WITHHELD: [&str; 2] = ["x-sandbox-token", "authorization"];

/// `ANY proxy/{port}{path}`.
pub(super) fn forward(
    request: &mut Request<'_>,
    workspace: &Workspace,
    port: &[u8],
    path: &[u8],
) -> Answer {
    let port = workspace.ports.parse(port)?;
    let changes = FieldChanges::default();
    forward::forward(request, workspace, &port, path, &WITHHELD, changes)
}

/// `GET ports`.
pub(super) fn list(_: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let listeners = workspace.ports.list()?;
    let documents = listeners.iter().map(ListenerDocument::of);
    Ok(Response::json(&documents.collect::<Vec<_>>()))
}

/// `POST tickets`: an address that leads to a port without a token.
pub(super) fn ticket(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    call.require_body()?;
    let port = port_request(&call.json_body()?)?;
    let port = workspace.ports.parse(port.as_bytes())?;
    let ticket = call
        .context
        .tickets
        .make(workspace.downgrade(), port.clone())?;
    Ok(Response::json(&TicketDocument::of(&port, &ticket)))
}

/// `GET ports/{port}/wait`.
pub(super) fn wait(call: &Call<'_, '_>, workspace: &Workspace, port: Port) -> Answer {
    let limit = call.query.seconds("timeout")?;
    let wait = workspace.ports.wait(port)?;
    Ok(json_later(call.ping_interval(), move |client| {
        let listening = wait.run(limit, client).ok()?;
        serde_json::to_vec(&PortDocument::of(wait.port(), listening)).ok()
    }))
}
