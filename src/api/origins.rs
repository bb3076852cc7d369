//! Which web pages may use the server from a browser: cross-origin resource sharing (the Fetch
//! standard, section 3.2).
//!
//! Only origins that the operator named get CORS headers. A preflight carries no token and needs none;
//! the request that follows needs its token.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::http::{Body, Refusal, Request, Response};

/// Headers that a page may send, besides the safelisted ones.
const REQUEST_HEADERS: &str = "X-Sandbox-Token, Authorization, Content-Type, Range, Mcp-Method, Mcp-Name, MCP-Protocol-Version";

/// Headers that a page may read, besides the safelisted ones.
const RESPONSE_HEADERS: &str = "Content-Range, Accept-Ranges, X-Next-Token";

/// Seconds for which a browser may remember the answer to a preflight.
const MAX_AGE: &str = "600";

/// Checks that a request names this machine as browsers of the same machine do. The name of any page can be made to
/// lead here (DNS rebinding), and the page is of the server's own origin then: where no token protects the server,
/// the name does.
///
/// # Errors
/// 403 for all other names.
pub(super) fn check_host(request: &Request<'_>) -> Result<(), Refusal> {
    match request.head.host() {
        Some(host) if !is_local(host) => {
            let text = "this server has no token, so it answers only requests to localhost, 127.0.0.1 or [::1]; set \
                        SBX_TOKEN to use it by another name";
            Err(Refusal::new(403, "forbidden", text))
        }
        _ => Ok(()),
    }
}

/// Whether a host is this machine, by a name that no other can have: an address of a loopback interface, or
/// `localhost` and what is below it (RFC 6761 section 6.3).
fn is_local(host: &[u8]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else {
        return false;
    };
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    if let Some(rest) = host.strip_prefix('[') {
        let Some((address, port)) = rest.split_once(']') else {
            return false;
        };
        let address = address.parse::<Ipv6Addr>();
        let is_end = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
        return is_end && address.is_ok_and(|address| address.to_canonical().is_loopback());
    }
    let (name, port) = host.split_once(':').unwrap_or((host, ""));
    let is_localhost = name
        .rsplit('.')
        .next()
        .is_some_and(|last| last.eq_ignore_ascii_case("localhost"));
    let is_loopback = || {
        name.parse::<Ipv4Addr>()
            .is_ok_and(|address| address.is_loopback())
    };
    is_port(port) && (is_localhost || is_loopback())
}

pub(super) struct Origins(pub(super) Vec<String>);

impl Origins {
    /// The origin of the page that sent a request, if it is allowed.
    pub(super) fn of(&self, request: &Request<'_>) -> Option<String> {
        let origin = request.head.header("origin")?;
        let mut allowed = self.0.iter();
        allowed
            .find(|allowed| allowed.as_bytes() == origin)
            .cloned()
    }

    /// Admits a client that is no browser, the server's own pages, and those of allowed origins. Browsers let any
    /// page open a WebSocket, and only the server can tell them apart (RFC 6455 section 10.2).
    ///
    /// # Errors
    /// 403 for all other pages.
    pub(super) fn admit(&self, request: &Request<'_>) -> Result<(), Refusal> {
        let mut origins = request.head.values("origin");
        let Some(origin) = origins.next() else {
            return Ok(());
        };
        // A proxy that changes the host says what it was. No page can: it would take a preflight.
        let hosts = [request.head.host(), request.head.header("x-forwarded-host")];
        let authority = [&b"https://"[..], b"http://"]
            .into_iter()
            .find_map(|scheme| origin.strip_prefix(scheme));
        let is_own = authority.is_some_and(|authority| {
            let mut hosts = hosts.into_iter().flatten();
            hosts.any(|host| authority.eq_ignore_ascii_case(host))
        });
        if origins.next().is_none() && (is_own || self.of(request).is_some()) {
            return Ok(());
        }
        let text = "pages of this Origin may not connect; SBX_ALLOWED_ORIGINS names those that may";
        Err(Refusal::new(403, "forbidden", text))
    }

    /// Lets the page of `origin` read an answer. A shared cache must not serve any answer to pages of
    /// other origins, so `Vary` is on all of them.
    pub(super) fn label(&self, response: Response, origin: Option<String>) -> Response {
        if self.0.is_empty() {
            return response;
        }
        let response = response.with_header("Vary", "Origin");
        let Some(origin) = origin else {
            return response;
        };
        response
            .with_header("Access-Control-Allow-Origin", origin)
            .with_header("Access-Control-Expose-Headers", RESPONSE_HEADERS)
    }
}

/// Whether a request is a preflight.
pub(super) fn is_preflight(request: &Request<'_>) -> bool {
    request.head.method == "OPTIONS"
        && request
            .head
            .header("access-control-request-method")
            .is_some()
}

/// Most bytes of the names of headers that a page asks for.
const MAX_ASKED_BYTES: usize = 2048;

/// Answers a preflight for a route with these methods. Pages may send whatever headers they ask for: E2B's clients send
/// many, and without a token none opens anything.
pub(super) fn preflight(request: &Request<'_>, origin: &str, methods: String) -> Response {
    let asked = request.head.header("access-control-request-headers");
    let asked = asked.and_then(|asked| std::str::from_utf8(asked).ok());
    let is_plain = |asked: &&str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_, ".contains(&byte);
        asked.len() <= MAX_ASKED_BYTES && asked.bytes().all(plain)
    };
    let headers = match asked.filter(is_plain) {
        Some(asked) if !asked.trim().is_empty() => format!("{REQUEST_HEADERS}, {asked}"),
        _ => REQUEST_HEADERS.to_owned(),
    };
    Response::new(204, Body::Empty)
        .with_header("Access-Control-Allow-Origin", origin)
        .with_header("Access-Control-Allow-Methods", methods)
        .with_header("Access-Control-Allow-Headers", headers)
        .with_header("Access-Control-Max-Age", MAX_AGE)
        .with_header("Vary", "Origin")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_local() {
        for host in [
            "localhost",
            "LOCALHOST:49983",
            "3000-machine.localhost:49983",
            "127.0.0.1",
            "127.1.2.3:80",
            "[::1]",
            "[::1]:49983",
            "[::ffff:127.0.0.1]:1",
        ] {
            assert!(is_local(host.as_bytes()), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:49983",
            "localhost.evil.example",
            "notlocalhost",
            "127.0.0.1.evil.example",
            "127.0.0.1:evil",
            "10.0.0.1",
            "0.0.0.0",
            "[::]",
            "[::1].evil.example",
            "[fe80::1]:80",
            "::1",
            "2130706433",
        ] {
            assert!(!is_local(host.as_bytes()), "{host}");
        }
    }
}
