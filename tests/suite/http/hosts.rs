//! Which host a request is for: said once, in a form that has one reading, and by the target before the field.

use crate::fixture::{Server, TOKEN, assert_error};
use crate::proxy::Backend;

/// Sends a head as it is, on a connection of its own.
#[track_caller]
fn status(server: &Server, head: &str) -> u16 {
    let mut connection = server.connect();
    connection.send(format!("{head}\r\n\r\n").as_bytes());
    connection.read_reply().status
}

#[test]
fn a_request_says_once_which_host_it_is_for() {
    let server = Server::start();
    for fields in [
        "",
        "\r\nHost: a\r\nHost: b",
        "\r\nHost: a\r\nhost: a",
        "\r\nHost: a b",
        "\r\nHost: a, b",
        "\r\nHost: a/b",
        "\r\nHost: user@a",
        "\r\nHost: http://a",
        "\r\nHost: a:80:80",
        "\r\nHost: a:port",
        "\r\nHost: ::1",
        "\r\nHost: [::1",
        "\r\nHost: \"a\"",
        "\r\nHost: a\\b",
        "\r\nHost: a?b",
        "\r\nHost: \u{e9}",
        "\r\nHost_: a",
    ] {
        for target in ["/health", "http://sandbox/health", "*"] {
            for method in ["GET", "OPTIONS", "BREW"] {
                let mut connection = server.connect();
                let head = format!("{method} {target} HTTP/1.1{fields}\r\n\r\n");
                connection.send(head.as_bytes());
                let reply = connection.read_reply();
                assert_error(&reply, 400, "bad_request");
                assert_eq!(reply.header("connection"), Some("close"), "{head}");
                connection.expect_close();
            }
        }
    }
    for host in [
        "",
        " ",
        "a",
        "A.b-c_d",
        "a:",
        "a:80",
        "127.0.0.1:1",
        "[::1]",
        "[::1]:65535",
    ] {
        assert_eq!(
            status(&server, &format!("GET /health HTTP/1.1\r\nHost:{host}")),
            200,
            "{host}"
        );
    }
    // HTTP/1.0 has no such field.
    assert_eq!(status(&server, "GET /health HTTP/1.0"), 200);
    assert_eq!(status(&server, "GET /health HTTP/1.0\r\nHost: a b"), 400);
}

#[test]
fn a_target_that_is_a_url_has_a_host() {
    let server = Server::start();
    for target in [
        "http:///health",
        "http://:80/health",
        "https:///health",
        "http://user@a/health",
        "http://a:x/health",
        "http://a b/health",
        "http://[::1/health",
    ] {
        let head = format!("GET {target} HTTP/1.1\r\nHost: localhost");
        assert_eq!(status(&server, &head), 400, "{target}");
    }
    for target in [
        "http://a/health",
        "https://a:1/health",
        "http://[::1]:80/health",
    ] {
        let head = format!("GET {target} HTTP/1.1\r\nHost: b");
        assert_eq!(status(&server, &head), 200, "{target}");
    }
}

/// Whoever may name the host in two places would pass a check with one and be served by the other.
#[test]
fn the_target_decides_over_the_field() {
    let open = Server::builder().no_token().start();
    let ask =
        |target: &str, fields: &str| status(&open, &format!("GET {target} HTTP/1.1\r\n{fields}"));
    assert_eq!(
        ask("http://localhost/v1/processes", "Host: evil.example"),
        200
    );
    for scheme in ["http", "https"] {
        let target = format!("{scheme}://evil.example/v1/processes");
        assert_eq!(ask(&target, "Host: localhost"), 403);
    }
    // The origin of a page is compared with it, too.
    for (target, host, origin, expected) in [
        ("/v1/processes", "localhost:1", "http://localhost:1", 200),
        (
            "http://localhost:1/v1/processes",
            "localhost:2",
            "http://localhost:1",
            200,
        ),
        (
            "https://localhost:1/v1/processes",
            "localhost:2",
            "https://localhost:1",
            200,
        ),
        (
            "http://localhost:1/v1/processes",
            "localhost:2",
            "http://localhost:2",
            403,
        ),
        (
            "https://localhost:1/v1/processes",
            "localhost:2",
            "http://localhost:2",
            403,
        ),
    ] {
        assert_eq!(
            ask(target, &format!("Host: {host}\r\nOrigin: {origin}")),
            expected,
            "{target} {origin}"
        );
    }
    // A server inside learns it.
    let server = Server::start();
    let backend = Backend::saying("fine");
    for scheme in ["http", "https"] {
        let target = format!("{scheme}://outer.example:7{}", backend.path("/"));
        let token = format!("Host: inner\r\nX-Sandbox-Token: {TOKEN}");
        assert_eq!(
            status(&server, &format!("GET {target} HTTP/1.1\r\n{token}")),
            200
        );
        assert_eq!(backend.next().value("x-forwarded-host"), "outer.example:7");
    }
}
