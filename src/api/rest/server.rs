//! The routes without a token that describe the server.

use super::call::{Answer, Call};
use crate::api::context::{Context, Opened};
use crate::api::json::sandbox::{AccessDocument, Health, MachineDocument, PROTOCOL};
use crate::http::{Body, Response};

/// `GET /`: a text for people who find the server and do not know it.
pub(super) fn welcome(call: &Call<'_, '_>) -> Answer {
    let console = if has_console(call.context) {
        "Open /console in a browser.\n"
    } else {
        ""
    };
    let text = format!(
        "sbx-server {}, {} mode\n\n{console}\
         GET /openapi.json describes every request; GET /health tells whether the server is well.\n\
         All other requests need a token:\n\n    \
         X-Sandbox-Token: <token>\n\nor, without that header:\n\n    \
         Authorization: Bearer <token>\n",
        env!("CARGO_PKG_VERSION"),
        call.context.machine.mode()
    );
    Ok(Response::new(200, Body::Bytes(text.into_bytes()))
        .with_header("Content-Type", "text/plain; charset=utf-8"))
}

#[cfg(feature = "console")]
fn has_console(context: &Context) -> bool {
    context.doors.console
}

#[cfg(not(feature = "console"))]
fn has_console(_: &Context) -> bool {
    false
}

/// `GET /v1/access`: what the token of the request opens, for programs that have a token and nothing else.
pub(super) fn access(call: &Call<'_, '_>) -> Answer {
    let (opens, sandbox) = match call.context.opened_by(call.request)? {
        Opened::Nothing => ("nothing", None),
        Opened::Server => ("server", None),
        Opened::Sandbox(id) => ("sandbox", Some(id)),
    };
    Ok(Response::json(&AccessDocument {
        mode: call.context.machine.mode(),
        opens,
        sandbox,
    }))
}

/// `GET /health`.
pub(super) fn health(call: &Call<'_, '_>) -> Answer {
    let machine = &call.context.machine;
    Ok(Response::json(&Health {
        status: "ok",
        version: env!("CARGO_PKG_VERSION"),
        protocol: PROTOCOL,
        uptime_ms: machine.uptime().as_millis(),
        mode: machine.mode(),
        sandboxes: machine.sandboxes(),
        isolation: MachineDocument::of(machine),
    }))
}
