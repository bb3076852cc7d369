//! The servers inside a workspace: passing requests on to them, listing them, waiting for them.
//!
//! A proxied request reaches its server as it was sent, but for what is about the way it came. What
//! opens this server, or the proxy before it, is not the sandbox's to know: `X-Sandbox-Token` and
//! `Authorization` are held back. `Host` is `localhost`, for plain requests and upgrades alike,
//! because development servers refuse names that they do not know; the name that the client used is
//! in `X-Forwarded-Host`.

use std::sync::Arc;
use std::time::Duration;

use super::Answer;
use super::events::DocumentWriter;
use super::query::Query;
use super::wire::{ListenerDocument, PortDocument};
use crate::http::parse::Head;
use crate::http::stream::StreamWriter;
use crate::http::upstream::{Forward, RelayError, exchange};
use crate::http::{Body, Refusal, Request, Response};
use crate::ports::Port;
use crate::workspace::Workspace;

/// Not passed on: secrets of the way here, what is written anew, and what was meant for a proxy.
const WITHHELD: [&str; 8] = [
    "x-sandbox-token",
    "authorization",
    "proxy-authorization",
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-proto",
    "x-forwarded-host",
    "x-forwarded-prefix",
];

/// `ANY proxy/{port}{path}`.
pub(super) fn forward(
    request: &mut Request<'_>,
    workspace: &Workspace,
    port: &[u8],
    path: &[u8],
) -> Answer {
    let port = workspace.ports.parse(port)?;
    if request.head.method == "CONNECT" {
        return Err(Refusal::new(
            501,
            "not_implemented",
            "CONNECT is not passed on; other protocols than HTTP begin with an Upgrade",
        ));
    }
    let socket = workspace.ports.connect(&port)?;
    let forward = Forward {
        target: target(path, request.head.query.as_deref()),
        host: &host(&port),
        withheld: &WITHHELD,
        added: forwarded(request, path),
    };
    exchange(request, socket, &forward).map_err(|error| match error {
        RelayError::Client(error) => error.into(),
        RelayError::Upstream(text) => Refusal::new(
            502,
            "bad_response",
            format!("the server at port {port} cannot be understood: {text}"),
        ),
    })
}

/// As the server is to see it, percent-escapes and all.
fn target(path: &[u8], query: Option<&[u8]>) -> Vec<u8> {
    let mut target = if path.is_empty() { b"/" } else { path }.to_vec();
    if let Some(query) = query {
        target.push(b'?');
        target.extend_from_slice(query);
    }
    target
}

fn host(port: &Port) -> String {
    port.number().map_or_else(
        || "localhost".to_owned(),
        |number| format!("localhost:{number}"),
    )
}

/// The fields that tell a server where it stands. The proxy before this one knows best how the client
/// came: what it says about that is kept, and the way from there to here is added to it.
fn forwarded(request: &Request<'_>, path: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let head = &request.head;
    let client = request.client_address().map(|address| address.to_string());
    let client = client.unwrap_or_else(|| "unknown".to_owned());
    let mut way: Vec<&[u8]> = head.values("x-forwarded-for").collect();
    way.push(client.as_bytes());
    // Everything before the server's own path.
    let own_prefix = &head.path[..head.path.len() - path.len()];
    let mut prefix = head.header("x-forwarded-prefix").unwrap_or_default();
    prefix = prefix.strip_suffix(b"/").unwrap_or(prefix);
    let mut added = vec![
        ("X-Forwarded-For", way.join(&b", "[..])),
        ("X-Forwarded-Prefix", [prefix, own_prefix].concat()),
        (
            "X-Forwarded-Proto",
            said_or(head, "x-forwarded-proto", Some(b"http")).unwrap_or_default(),
        ),
    ];
    let host = said_or(head, "x-forwarded-host", head.header("host"));
    added.extend(host.map(|host| ("X-Forwarded-Host", host)));
    added
}

fn said_or(head: &Head, name: &str, otherwise: Option<&[u8]>) -> Option<Vec<u8>> {
    let said: Vec<&[u8]> = head.values(name).collect();
    if said.is_empty() {
        otherwise.map(<[u8]>::to_vec)
    } else {
        Some(said.join(&b", "[..]))
    }
}

/// `GET ports`.
pub(super) fn list(workspace: &Workspace) -> Answer {
    let listeners = workspace.ports.list()?;
    Ok(Response::json(
        &listeners
            .iter()
            .map(ListenerDocument::of)
            .collect::<Vec<_>>(),
    ))
}

/// `GET ports/{port}/wait`.
pub(super) fn wait(workspace: &Workspace, port: &str, query: &Query, ping: Duration) -> Answer {
    let limit = query.seconds("timeout")?;
    let port = workspace.ports.parse(port.as_bytes())?;
    let ports = Arc::clone(&workspace.ports);
    let body = Body::Stream(Box::new(move |stream: &mut StreamWriter| {
        let waited = ports.wait(&port, limit, &mut DocumentWriter { stream, ping });
        if let Ok(listening) = waited {
            let document = PortDocument::of(&port, listening);
            let document = serde_json::to_vec(&document).unwrap_or_default();
            stream.push(|out| out.extend_from_slice(&document));
        }
    }));
    Ok(Response::new(200, body).with_header("Content-Type", "application/json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_sees_path_and_query_as_they_were_sent() {
        for (path, query, expected) in [
            ("", None, "/"),
            ("", Some("a=b"), "/?a=b"),
            ("/", None, "/"),
            ("/", Some(""), "/?"),
            ("//a//", None, "//a//"),
            ("/%2F/../%", Some("a=b&c?d"), "/%2F/../%?a=b&c?d"),
        ] {
            let target = target(path.as_bytes(), query.map(str::as_bytes));
            assert_eq!(target, expected.as_bytes());
        }
    }
}
