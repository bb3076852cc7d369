//! Requests that are for a server inside a workspace.
//!
//! Such a request reaches its server as it was sent, except for the headers that describe its way and those that
//! authenticate the client to this server. `Host` is `localhost`, for plain requests and upgrades alike,
//! because development servers refuse names that they do not know; the name that the client used is
//! in `X-Forwarded-Host`.

use crate::http::parse::{Framing, Head};
use std::sync::Arc;

use crate::http::{Refusal, Request, Response};
use crate::ports::Port;
use crate::relay::{FieldChanges, Forward, Home, RelayError, exchange};
use crate::workspace::Workspace;

/// Headers that are not forwarded: those that this proxy writes itself, and what is for it as a proxy.
const OWN: [&str; 6] = [
    "proxy-authorization",
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-proto",
    "x-forwarded-host",
    "x-forwarded-prefix",
];

/// Forwards a request to the server behind a port, which sees `path` and nothing of what is before it.
/// Of its headers, those that are `withheld` are not for that server. `changes` are made in its answer.
pub(super) fn forward(
    request: &mut Request<'_>,
    workspace: &Workspace,
    port: &Port,
    path: &[u8],
    withheld: &[&str],
    changes: FieldChanges,
) -> Result<Response, Refusal> {
    if request.head.method == "CONNECT" {
        return Err(Refusal::new(
            501,
            "not_implemented",
            "CONNECT is not passed on; other protocols than HTTP begin with an Upgrade",
        ));
    }
    let key = key(&request.head, port, path, withheld);
    let slot = Arc::clone(request.kept);
    let kept = can_be_repeated(&request.head).then(|| slot.take(&key));
    let withheld = [&OWN, withheld].concat();
    let forward = Forward {
        target: target(path, request.head.query.as_deref()),
        host: &host(port),
        withheld: &withheld,
        added: forwarded(request, path),
        counter: None,
        changes,
        keep: Some((slot, key)),
    };
    let answer = match kept
        .flatten()
        .map(|connection| exchange(request, connection, &forward))
    {
        // Without one, or when the server has closed it while the request was on its way.
        None | Some(Err(RelayError::NoAnswer(_))) => {
            let connection = workspace.ports.connect(port)?;
            exchange(request, Arc::new(connection), &forward)
        }
        Some(answer) => answer,
    };
    answer.map_err(|error| match error {
        RelayError::Client(error) => error.into(),
        RelayError::Upstream(text) | RelayError::NoAnswer(text) => Refusal::new(
            502,
            "bad_response",
            format!("the server at port {port} cannot be understood: {text}"),
        ),
    })
}

/// What requests have in common that may use one connection: the way here, and the credentials.
fn key(head: &Head, port: &Port, path: &[u8], withheld: &[&str]) -> Vec<u8> {
    let mut key = format!("{port}\n").into_bytes();
    key.extend_from_slice(&head.path[..head.path.len() - path.len()]);
    for name in ["host"].iter().chain(withheld) {
        for value in head.values(name) {
            key.extend_from_slice(format!("\n{name}: ").as_bytes());
            key.extend_from_slice(value);
        }
    }
    key
}

/// Whether a request can be sent again if its connection was closed meanwhile (RFC 9110 section 9.2.2).
fn can_be_repeated(head: &Head) -> bool {
    let is_safe = matches!(&*head.method, "GET" | "HEAD" | "OPTIONS");
    is_safe && matches!(head.framing, Framing::None | Framing::Length(0))
}

/// Where clients find the server behind a port whose paths are below `prefix`.
pub(super) fn home(port: &Port, prefix: Vec<u8>) -> Home {
    Home {
        origin: format!("http://{}", host(port)),
        prefix,
    }
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
        (
            "X-Forwarded-Proto",
            header_or(head, "x-forwarded-proto", Some(b"http")).unwrap_or_default(),
        ),
    ];
    let prefix = [prefix, own_prefix].concat();
    if !prefix.is_empty() {
        added.push(("X-Forwarded-Prefix", prefix));
    }
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
