//! Requests that are for a server inside a workspace.
//!
//! Such a request reaches its server as it was sent, except for the headers that describe its way and those that
//! authenticate the client to this server, at whichever door. `Host` is `localhost`, for plain requests and upgrades alike,
//! because development servers refuse names that they do not know; the name that the client used is
//! in `X-Forwarded-Host`.

use std::sync::Arc;

use super::context::Context;
use super::credentials::{self, TokenHeader, forms_of_key, is_bearer, is_same};
use crate::auth::Access;
use crate::http::handshake::subprotocols;
use crate::http::parse::{Framing, Head};
use crate::http::{Refusal, Request, Response};
use crate::machine::MACHINE_ID;
use crate::ports::Port;
use crate::relay::{
    FieldChanges, Forward, Home, RelayError, exchange, is_same_field, wants_upgrade,
};
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

/// Fields of answers that no door passes on. `Clear-Site-Data` clears the cookies of all names beside this one too. By the
/// others an answer commands a proxy on its way, such as nginx, to send a file or the answer of another address in its
/// place, or a cache to keep it (RFC 9213), whatever `Cache-Control` says, or to forget others. `X-Accel-Buffering` is not
/// among them: it keeps a stream flowing.
const DROPPED: &[&str] = &[
    "akamai-cache-control",
    "cache-tag",
    "cdn-cache-control",
    "clear-site-data",
    "cloudflare-cdn-cache-control",
    "edge-cache-tag",
    "edge-control",
    "netlify-cdn-cache-control",
    "surrogate-*",
    "vercel-cdn-cache-control",
    "x-accel-charset",
    "x-accel-expires",
    "x-accel-limit-rate",
    "x-accel-redirect",
    "x-drupal-cache-*",
    "x-envoy-*",
    "x-lighttpd-send-*",
    "x-litespeed-*",
    "x-reproxy-*",
    "x-sendfile*",
    "xkey",
];

/// Forwards a request to the server behind a port, which sees `path` and nothing of what is before it.
/// Of its headers, those that are `withheld` are not for that server, besides [credentials](Withheld). `changes` are made
/// in its answer, besides dropping what no door passes on, and keeping its redirects where the client has found it.
pub(super) fn forward(
    context: &Context,
    request: &mut Request<'_>,
    workspace: &Workspace,
    port: &Port,
    path: &[u8],
    withheld: &[&str],
    mut changes: FieldChanges,
) -> Result<Response, Refusal> {
    if request.head.method == "CONNECT" {
        return Err(Refusal::new(
            501,
            "not_implemented",
            "CONNECT is not passed on; other protocols than HTTP begin with an Upgrade",
        ));
    }
    let Withheld {
        names,
        added,
        has_token,
    } = Withheld::of(context, &request.head);
    changes.dropped.push(DROPPED);
    changes.is_private |= has_token;
    changes.home = Some(home(&request.head, port, path, has_token));
    let slot = Arc::clone(request.kept);
    let key = key(&request.head, workspace, port, path, withheld);
    let kept = slot.take(&key);
    let can_share = can_share(&request.head);
    let forward = Forward {
        target: target(path, request.head.query.as_deref()),
        host: &host(port),
        withheld: &[&OWN, withheld, &names].concat(),
        added: [forwarded(request, path), added].concat(),
        counter: None,
        changes,
        keep: (can_share && request.head.keep_alive).then_some((slot, key)),
    };
    let answer = match kept
        .filter(|_| can_share)
        .map(|connection| exchange(request, connection, &forward))
    {
        // Without one, or when the server has closed it while the request was on its way, or what it has sent is no answer
        // to this request.
        None | Some(Err(RelayError::NoAnswer(_))) => {
            let connection = workspace.ports.connect(port)?;
            exchange(request, connection, &forward)
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

/// Characters of a sandbox's token, which are hexadecimal digits.
const TOKEN_DIGITS: usize = 64;

/// What of a request is not for a server in a workspace.
struct Withheld {
    /// The names of header fields.
    names: Vec<&'static str>,
    /// Fields in their place.
    added: Vec<(&'static str, Vec<u8>)>,
    /// Whether there is something that may be a token.
    has_token: bool,
}

impl Withheld {
    /// Finds the credentials of a request. Such a server may have API keys and subprotocols of its own, so of those only
    /// the ones that carry a token of this server are withheld.
    fn of(context: &Context, head: &Head) -> Self {
        const SUBPROTOCOLS: &str = "sec-websocket-protocol";
        let values = |name| {
            let fields = head.fields.iter();
            fields.filter_map(move |(other, value)| is_same_field(name, other).then_some(value))
        };
        let api_key = TokenHeader::API_KEY.name();
        let mut keys = values(api_key);
        let is_foreign = match (keys.next(), keys.next()) {
            (Some(key), None) => !opens_something(context, key),
            _ => false,
        };
        let mut names = credentials::NAMES.to_vec();
        names.retain(|name| !(is_foreign && *name == api_key));
        let mut offered = values(SUBPROTOCOLS).flat_map(|value| value.split(|byte| *byte == b','));
        let mut added = Vec::new();
        if offered.any(is_bearer) {
            names.push(SUBPROTOCOLS);
            let others: Vec<_> = subprotocols(head).filter(|name| !is_bearer(name)).collect();
            if !others.is_empty() {
                added.push(("Sec-WebSocket-Protocol", others.join(&b", "[..])));
            }
        }
        let has_token = head
            .fields
            .iter()
            .any(|(name, _)| names.iter().any(|other| is_same_field(name, other)));
        Self {
            names,
            added,
            has_token,
        }
    }
}

/// Whether an API key is a token of this server.
fn opens_something(context: &Context, key: &[u8]) -> bool {
    let authenticator = &context.authenticator;
    let is_token = |token: &[u8]| {
        let opens = |access| authenticator.check(Some(token), access).is_ok();
        let has_form = token.len() == TOKEN_DIGITS && token.iter().all(u8::is_ascii_hexdigit);
        opens(Access::Sandbox(MACHINE_ID))
            || (has_form
                && context
                    .sandbox_whose_token(|own| is_same(own, token))
                    .is_some())
    };
    authenticator.needs_token() && forms_of_key(key).into_iter().flatten().any(is_token)
}

/// What requests have in common that may use one connection: the server, the way here, the credentials, and the client
/// before a proxy.
fn key(head: &Head, workspace: &Workspace, port: &Port, path: &[u8], withheld: &[&str]) -> Vec<u8> {
    let mut key = format!("{}\n{port}\n", std::ptr::from_ref(workspace).addr()).into_bytes();
    key.extend_from_slice(own_prefix(head, path));
    key.push(b'\n');
    key.extend_from_slice(head.host().unwrap_or_default());
    for (name, value) in head.fields.iter() {
        let mut names = ["x-forwarded-for"]
            .iter()
            .chain(withheld)
            .chain(credentials::NAMES);
        if names.any(|other| other.eq_ignore_ascii_case(name)) {
            for part in [b"\n", name.as_bytes(), b":", value] {
                key.extend_from_slice(part);
            }
        }
    }
    key
}

/// Whether a request can share a connection with others. It can be sent again if the connection was closed meanwhile (RFC
/// 9110 section 9.2.2), and whatever the server inside reads of it, nothing is left that it could take for a request.
fn can_share(head: &Head) -> bool {
    let is_safe = matches!(&*head.method, "GET" | "HEAD" | "OPTIONS");
    is_safe && head.framing == Framing::None && !wants_upgrade(head)
}

/// Where a client has found the server behind a port, by a request for `path` of that server.
fn home(head: &Head, port: &Port, path: &[u8], has_token: bool) -> Home {
    let hosts = [head.host(), head.header("x-forwarded-host")];
    let hosts = hosts.into_iter().flatten();
    let hosts = hosts.flat_map(|hosts| hosts.split(|byte| *byte == b','));
    Home {
        inside: host(port),
        hosts: hosts
            .map(<[u8]>::trim_ascii)
            .filter(|host| !host.is_empty())
            .take(MAX_HOSTS)
            .map(<[u8]>::to_vec)
            .collect(),
        prefix: prefix(head, path),
        request: path.to_vec(),
        may_leave: !has_token,
    }
}

/// Names of this server that earlier proxies may have added, so many are known.
const MAX_HOSTS: usize = 8;

/// A longer prefix of earlier proxies is none: each redirect and cookie of an answer gets it.
const MAX_PREFIX_BYTES: usize = 1024;

/// What is before the path of the server behind a port, as its clients see it.
fn prefix(head: &Head, path: &[u8]) -> Vec<u8> {
    let outer = head.header("x-forwarded-prefix").unwrap_or_default();
    let outer = if outer.len() > MAX_PREFIX_BYTES {
        b""
    } else {
        outer
    };
    let outer = outer.strip_suffix(b"/").unwrap_or(outer);
    [outer, own_prefix(head, path)].concat()
}

/// The part of a request's path that is before the path of the server behind a port.
pub(super) fn own_prefix<'h>(head: &'h Head, path: &[u8]) -> &'h [u8] {
    &head.path[..head.path.len() - path.len()]
}

/// The request target for the server, with the percent-escapes of the client.
pub(super) fn target(path: &[u8], query: Option<&[u8]>) -> Vec<u8> {
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
    let mut added = vec![
        ("X-Forwarded-For", way.join(&b", "[..])),
        (
            "X-Forwarded-Proto",
            header_or(head, "x-forwarded-proto", Some(b"http")).unwrap_or_default(),
        ),
    ];
    let prefix = prefix(head, path);
    if !prefix.is_empty() {
        added.push(("X-Forwarded-Prefix", prefix));
    }
    let host = header_or(head, "x-forwarded-host", head.host());
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
