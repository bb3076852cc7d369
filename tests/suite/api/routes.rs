//! `GET /`, and what is answered where there is no route.

use crate::fixture::{Server, TOKEN, assert_error, is_root};
use crate::skip;

#[test]
fn the_root_tells_a_stranger_what_this_is() {
    let server = Server::start();
    let mut stranger = server.connect();
    stranger.token = None;
    let reply = stranger.request("GET", "/", &[], b"");
    assert_eq!(reply.status, 200);
    let kind = reply.header("content-type").unwrap();
    assert!(kind.starts_with("text/plain"), "{kind}");
    let text = reply.text();
    for word in [
        "sbx-server",
        env!("CARGO_PKG_VERSION"),
        "dedicated mode",
        "/openapi.json",
        "X-Sandbox-Token",
        "Authorization: Bearer",
    ] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(text.ends_with('\n') && !text.contains(TOKEN));
    let head = stranger.request("HEAD", "/", &[], b"");
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(stranger.request("GET", "/?a=b", &[], b"").status, 200);
    let reply = stranger.request("POST", "/", &[], b"");
    assert_error(&reply, 405, "method_not_allowed");
    assert_eq!(reply.header("allow"), Some("GET, HEAD, OPTIONS"));
}

#[test]
fn a_missing_route_names_the_contract() {
    let server = Server::start();
    for target in ["/v1/nope", "/nope", "/v1/", "/v1/exec/", "/v1/files"] {
        let reply = server.get(target);
        assert_error(&reply, 404, "not_found");
        assert!(reply.text().contains("/openapi.json"), "{}", reply.text());
    }
}

#[test]
fn well_known_paths_are_missing_for_everybody() {
    // 401 or 403 would make clients of MCP look for a login.
    let server = Server::start();
    let mut stranger = server.connect();
    for token in [None, Some("wrong"), Some(TOKEN)] {
        stranger.token = token.map(str::to_owned);
        for path in [
            "/.well-known/oauth-protected-resource",
            "/.well-known/oauth-authorization-server/mcp",
            "/.well-known/",
        ] {
            assert_error(&stranger.request("GET", path, &[], b""), 404, "not_found");
        }
    }
    stranger.token = None;
    for path in ["/.well-known", "/v1/.well-known/a", "/.well-knownx/a"] {
        assert_error(&stranger.request("GET", path, &[], b""), 403, "forbidden");
    }
}

#[test]
fn a_missing_route_in_a_sandbox_is_missing_for_both_tokens() {
    if !is_root() {
        skip!("only root can be a host");
    }
    let server = Server::host().env("SBX_STRICT_SCOPES", 1).start();
    let (a, b) = (server.sandbox(), server.sandbox());
    let ask = |target: &str, token: Option<&str>| {
        let mut connection = server.connect();
        connection.token = token.map(str::to_owned);
        connection.request("GET", target, &[], b"")
    };
    for route in ["unknown", "exce", "files", "processes/p-1/log", ""] {
        let target = a.target(route);
        for token in [&a.token, TOKEN] {
            assert_error(&ask(&target, Some(token)), 404, "not_found");
        }
        for token in [None, Some("wrong"), Some(b.token.as_str())] {
            assert_error(&ask(&target, token), 403, "forbidden");
        }
    }
    // Elsewhere a sandbox's token tells nothing.
    for target in ["/v1/nope", "/nope", "/v1/sandboxes/"] {
        assert_error(&ask(target, Some(&a.token)), 403, "forbidden");
        assert_error(&ask(target, Some(TOKEN)), 404, "not_found");
    }
    // And what is a route stays closed.
    assert_error(&ask(&a.target("token"), Some(&a.token)), 403, "forbidden");
    assert_error(&ask(&a.target("processes"), Some(TOKEN)), 403, "forbidden");
}
