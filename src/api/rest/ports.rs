//! The servers inside a workspace: forwarding requests to them, listing them, waiting for them.
//!
//! A proxied request reaches its server as it was sent, except for the headers that describe its way.
//! `X-Sandbox-Token` and `Authorization` authenticate the client to this server or to the proxy before
//! it, so they are not forwarded. `Host` is `localhost`, for plain requests and upgrades alike,
//! because development servers refuse names that they do not know; the name that the client used is
//! in `X-Forwarded-Host`.

use super::call::{Answer, Call, json_later};
use super::documents::{ListenerDocument, PortDocument};
use crate::http::parse::Head;
use crate::http::{Refusal, Request, Response};
use crate::ports::Port;
use crate::relay::{Forward, RelayError, exchange};
use crate::workspace::Workspace;

/// Headers that are not forwarded: credentials, and those that this proxy writes itself.
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
        counter: None,
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

/// The request target for the server, with the percent-escapes of the client.
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

/// The `X-Forwarded-` fields. They keep the values of an earlier proxy, and add the hop from that proxy
/// to this server.
fn forwarded(request: &Request<'_>, path: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let head = &request.head;
    let client = request.client_address().map(|address| address.to_string());
    let client = client.unwrap_or_else(|| "unknown".to_owned());
    let mut way: Vec<&[u8]> = head.values("x-forwarded-for").collect();
    way.push(client.as_bytes());
    // The part of the path before the path of the server behind the port.
    let own_prefix = &head.path[..head.path.len() - path.len()];
    let mut prefix = head.header("x-forwarded-prefix").unwrap_or_default();
    prefix = prefix.strip_suffix(b"/").unwrap_or(prefix);
    let mut added = vec![
        ("X-Forwarded-For", way.join(&b", "[..])),
        ("X-Forwarded-Prefix", [prefix, own_prefix].concat()),
        (
            "X-Forwarded-Proto",
            header_or(head, "x-forwarded-proto", Some(b"http")).unwrap_or_default(),
        ),
    ];
    let host = header_or(head, "x-forwarded-host", head.header("host"));
    added.extend(host.map(|host| ("X-Forwarded-Host", host)));
    added
}

fn header_or(head: &Head, name: &str, otherwise: Option<&[u8]>) -> Option<Vec<u8>> {
    let said: Vec<&[u8]> = head.values(name).collect();
    if said.is_empty() {
        otherwise.map(<[u8]>::to_vec)
    } else {
        Some(said.join(&b", "[..]))
    }
}

/// `GET ports`.
pub(super) fn list(_: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let listeners = workspace.ports.list()?;
    let documents = listeners.iter().map(ListenerDocument::of);
    Ok(Response::json(&documents.collect::<Vec<_>>()))
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
