//! Which web pages may use the server from a browser (`SBX_ALLOWED_ORIGINS`).

use crate::fixture::{Reply, Server, TOKEN};
use crate::proxy::Backend;

const PAGE: &str = "https://app.example";
const OTHER_PAGE: &str = "http://localhost:3000";

fn server() -> Server {
    let origins = format!("{PAGE},{OTHER_PAGE}");
    Server::builder()
        .env("SBX_ALLOWED_ORIGINS", origins)
        .start()
}

fn ask(server: &Server, method: &str, target: &str, headers: &[(&str, &str)]) -> Reply {
    let mut connection = server.connect();
    connection.token = None;
    connection.request(method, target, headers, b"")
}

fn preflight(server: &Server, target: &str, origin: &str, method: &str) -> Reply {
    preflight_with(server, target, origin, method, "authorization")
}

fn preflight_with(server: &Server, target: &str, origin: &str, method: &str, asked: &str) -> Reply {
    let headers = [
        ("Origin", origin),
        ("Access-Control-Request-Method", method),
        ("Access-Control-Request-Headers", asked),
    ];
    ask(server, "OPTIONS", target, &headers)
}

/// Headers that every page may send.
const USUAL_HEADERS: &str = "X-Sandbox-Token, Authorization, Content-Type, Range, Mcp-Method, Mcp-Name, MCP-Protocol-Version";

fn cors_headers(reply: &Reply) -> Vec<&str> {
    reply
        .headers
        .iter()
        .map(|(name, _)| name.as_str())
        .filter(|name| name.starts_with("access-control-") || *name == "vary")
        .collect()
}

#[track_caller]
fn assert_readable(reply: &Reply, origin: &str) {
    assert_eq!(
        reply.header("access-control-allow-origin"),
        Some(origin),
        "{reply:?}"
    );
    assert_eq!(reply.header("vary"), Some("Origin"));
    assert_eq!(
        reply.header("access-control-expose-headers"),
        Some("Content-Range, Accept-Ranges, X-Next-Token")
    );
}

#[test]
fn a_preflight_of_an_allowed_page_needs_no_token() {
    let server = server();
    for origin in [PAGE, OTHER_PAGE] {
        for (target, method, methods) in [
            ("/v1/exec", "POST", "POST, OPTIONS"),
            ("/v1/files/read?path=/a", "GET", "GET, HEAD, OPTIONS"),
            ("/v1/processes/p-1", "DELETE", "GET, DELETE, HEAD, OPTIONS"),
            ("/health", "GET", "GET, HEAD, OPTIONS"),
            // The request itself then gets 404.
            (
                "/v1/nope",
                "GET",
                "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS",
            ),
        ] {
            let reply = preflight(&server, target, origin, method);
            assert_eq!(reply.status, 204, "{target}: {}", reply.text());
            assert!(reply.body.is_empty());
            let header = |name| reply.header(name).unwrap_or_else(|| panic!("{name}"));
            assert_eq!(header("access-control-allow-origin"), origin);
            assert_eq!(header("access-control-allow-methods"), methods);
            assert_eq!(
                header("access-control-allow-headers"),
                format!("{USUAL_HEADERS}, authorization")
            );
            assert!(header("access-control-max-age").parse::<u32>().unwrap() > 0);
            assert_eq!(header("vary"), "Origin");
        }
    }
}

#[test]
fn a_page_may_send_the_headers_that_it_asks_for() {
    let server = server();
    let long = "a".repeat(4000);
    for (asked, more) in [
        (
            "x-api-key,e2b-sandbox-id,connect-protocol-version",
            ", x-api-key,e2b-sandbox-id,connect-protocol-version",
        ),
        ("", ""),
        (" ", ""),
        // No names of headers.
        ("x-a: b", ""),
        ("x-a;q=1", ""),
        (&long, ""),
    ] {
        for target in ["/v1/exec", "/process.Process/Start"] {
            let reply = preflight_with(&server, target, PAGE, "POST", asked);
            assert_eq!(reply.status, 204, "{asked}");
            assert_eq!(
                reply.header("access-control-allow-headers"),
                Some(&*format!("{USUAL_HEADERS}{more}")),
                "{asked}"
            );
        }
    }
}

#[test]
fn a_page_reads_every_answer() {
    let server = server();
    let origin = ("Origin", PAGE);
    let token = ("X-Sandbox-Token", TOKEN);
    for (method, target, status) in [
        ("GET", "/health", 200),
        ("GET", "/openapi.json", 200),
        ("GET", "/v1/processes", 200),
        ("GET", "/v1/files/read?path=/etc/passwd", 200),
        ("GET", "/v1/files/read?path=/nope", 404),
        ("GET", "/v1/nope", 404),
        ("GET", "/v1/exec", 405),
        ("OPTIONS", "/v1/exec", 204),
        ("POST", "/v1/exec", 400),
    ] {
        let reply = ask(&server, method, target, &[origin, token]);
        assert_eq!(reply.status, status, "{method} {target}");
        assert_readable(&reply, PAGE);
        if status != 204 && target != "/health" && target != "/openapi.json" {
            let reply = ask(&server, method, target, &[origin]);
            assert_eq!(reply.status, 403, "{method} {target}");
            assert_readable(&reply, PAGE);
        }
    }
    let ranged = [origin, token, ("Range", "bytes=0-1")];
    let reply = ask(&server, "GET", "/v1/files/read?path=/etc/passwd", &ranged);
    assert_eq!(reply.status, 206);
    assert_readable(&reply, PAGE);
    // A stream, too.
    let mut connection = server.connect();
    let headers = [("Origin", OTHER_PAGE)];
    connection.send_request("POST", "/v1/exec", &headers, br#"{"cmd":"echo hi"}"#);
    let reply = connection.read_reply();
    assert!(reply.text().contains("\"exit\""), "{}", reply.text());
    assert_readable(&reply, OTHER_PAGE);
}

#[test]
fn other_pages_get_nothing() {
    let server = server();
    for origin in [
        "https://evil.example",
        "http://app.example",
        "https://app.example:8443",
        "https://app.example.evil.example",
        "https://xapp.example",
        "https://APP.example",
        "https://app.example/",
        "https://app.example,http://localhost:3000",
        "null",
        "*",
        "",
    ] {
        let reply = preflight(&server, "/v1/exec", origin, "POST");
        assert_eq!(reply.status, 403, "{origin}");
        assert_eq!(cors_headers(&reply), ["vary"], "{origin}: {reply:?}");
        let headers = [("Origin", origin), ("X-Sandbox-Token", TOKEN)];
        let reply = ask(&server, "GET", "/v1/processes", &headers);
        assert_eq!(
            reply.status, 403,
            "{origin}: a proxy may have added the token"
        );
        assert_eq!(cors_headers(&reply), ["vary"], "{origin}: {reply:?}");
    }
    let reply = server.get("/v1/processes");
    assert_eq!(cors_headers(&reply), ["vary"], "no page: {reply:?}");
}

#[test]
fn no_page_is_allowed_unless_it_is_named() {
    let server = Server::start();
    let reply = preflight(&server, "/v1/exec", PAGE, "POST");
    assert_eq!(reply.status, 403);
    assert!(cors_headers(&reply).is_empty(), "{reply:?}");
    let headers = [("Origin", PAGE), ("X-Sandbox-Token", TOKEN)];
    for target in ["/health", "/v1/processes", "/v1/nope"] {
        let reply = ask(&server, "GET", target, &headers);
        assert!(cors_headers(&reply).is_empty(), "{reply:?}");
    }
}

#[test]
fn options_without_a_preflight_needs_the_token() {
    let server = server();
    let reply = ask(&server, "OPTIONS", "/v1/exec", &[("Origin", PAGE)]);
    assert_eq!(reply.status, 403);
    assert_readable(&reply, PAGE);
    let asked = [("Access-Control-Request-Method", "POST")];
    assert_eq!(ask(&server, "OPTIONS", "/v1/exec", &asked).status, 403);
    // Nor is another method one.
    let headers = [("Origin", PAGE), asked[0]];
    assert_eq!(ask(&server, "POST", "/v1/exec", &headers).status, 403);
}

#[test]
fn a_proxied_server_says_itself_who_may_read_it() {
    let server = server();
    let backend = Backend::answering(
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nAccess-Control-Allow-Origin: *\r\nVary: Cookie\r\n\r\nok",
    );
    // Its preflight carries no token either, so it is not passed on.
    let reply = preflight(&server, &backend.path("/a"), PAGE, "PATCH");
    assert_eq!(reply.status, 204);
    let methods = reply.header("access-control-allow-methods").unwrap();
    assert!(methods.contains("PATCH"), "{methods}");
    backend.expect_nothing();
    let headers = [("Origin", PAGE), ("X-Sandbox-Token", TOKEN)];
    let reply = ask(&server, "GET", &backend.path("/a"), &headers);
    assert_eq!(reply.header("access-control-allow-origin"), Some("*"));
    assert_eq!(reply.header("vary"), Some("Cookie"));
    assert_eq!(cors_headers(&reply).len(), 2, "{reply:?}");
    assert_eq!(backend.next().value("origin"), PAGE);
    // Of a page that is not allowed it is a request like any other.
    let reply = preflight(&server, &backend.path("/a"), "https://evil.example", "GET");
    assert_eq!(reply.status, 403);
    backend.expect_nothing();
    // What this server answers in its place can be read.
    let reply = ask(&server, "GET", "/v1/proxy/1/", &headers);
    assert_eq!(reply.status, 502);
    assert_readable(&reply, PAGE);
    let reply = ask(&server, "GET", &backend.path("/a"), &headers[..1]);
    assert_eq!(reply.status, 403);
    assert_readable(&reply, PAGE);
}
