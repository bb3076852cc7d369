//! What a server is told in headers, what is kept from it, and what comes back.

use super::{Backend, Way};
use crate::fixture::{Server, TOKEN};

#[test]
fn secrets_of_the_way_do_not_reach_the_server() {
    let server = Server::start();
    let backend = Backend::saying("fine");
    let mut connection = server.connect();
    let headers = [
        ("Authorization", "Bearer hf_secret"),
        ("AUTHORIZATION", "Basic hf_secret"),
        ("Proxy-Authorization", "Basic hf_secret"),
        ("x-SANDBOX-token", TOKEN),
        ("Cookie", "session=1"),
    ];
    let reply = connection.request("GET", &backend.path("/"), &headers, b"");
    assert_eq!(reply.text(), "fine");
    let head = backend.next().head;
    assert!(!head.contains(TOKEN), "{head}");
    assert!(!head.contains("hf_secret"), "{head}");
    assert!(head.contains("Cookie: session=1"), "{head}");
}

#[test]
fn headers_about_one_connection_stay_there() {
    let server = Server::start();
    let backend = Backend::answering(
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: X-Mine, keep-alive\r\nX-Mine: a\r\n\
         Keep-Alive: timeout=5\r\nProxy-Connection: x\r\nTrailer: T\r\nUpgrade: h2c\r\nTE: x\r\n\
         X-Other: b\r\nSet-Cookie: one\r\nSet-Cookie: two\r\n\r\nok",
    );
    let mut connection = server.connect();
    let headers = [
        ("Connection", "X-Hop, keep-alive"),
        ("Connection", "x-other-hop"),
        ("X-Hop", "1"),
        ("X-Other-Hop", "2"),
        ("Keep-Alive", "300"),
        ("Proxy-Connection", "keep-alive"),
        ("TE", "trailers"),
        ("Trailer", "X-T"),
        ("Upgrade", "websocket"),
        ("X-End", "stays"),
        ("X-End", "stays twice"),
    ];
    let reply = connection.request("GET", &backend.path("/"), &headers, b"");
    let received = backend.next();
    for name in [
        "x-hop",
        "x-other-hop",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "upgrade",
    ] {
        assert!(received.values(name).is_empty(), "{name}: {received:?}");
    }
    assert!(received.values("connection").is_empty());
    assert_eq!(received.values("x-end"), ["stays", "stays twice"]);
    for name in [
        "connection",
        "x-mine",
        "keep-alive",
        "proxy-connection",
        "trailer",
        "upgrade",
        "te",
    ] {
        assert_eq!(reply.header(name), None, "{name}");
    }
    assert_eq!(reply.header("x-other"), Some("b"));
    let cookies: Vec<_> = reply
        .headers
        .iter()
        .filter(|(name, _)| name == "set-cookie")
        .map(|(_, value)| value.as_str())
        .collect();
    let path = format!("; Path={}", backend.path(""));
    assert_eq!(cookies, [format!("one{path}"), format!("two{path}")]);
    assert_eq!(reply.text(), "ok");
}

#[test]
fn names_keep_their_case_and_values_their_bytes() {
    let server = Server::start();
    let backend = Backend::answering(
        "HTTP/1.1 200 All is Well\r\nX-MiXed: a  b\tc\r\ncontent-LENGTH: 0\r\n\r\n",
    );
    let mut connection = server.connect();
    let headers = [("X-mIXED", "1  2\t3"), ("Empty", "")];
    connection.send_request("GET", &backend.path("/"), &headers, b"");
    connection
        .stream
        .shutdown(std::net::Shutdown::Write)
        .unwrap();
    let bytes = String::from_utf8(connection.read_to_close()).unwrap();
    assert!(bytes.contains("HTTP/1.1 200 All is Well\r\n"), "{bytes}");
    assert!(bytes.contains("\r\nX-MiXed: a  b\tc\r\n"), "{bytes}");
    let received = backend.next();
    assert!(
        received.head.contains("\r\nX-mIXED: 1  2\t3\r\n"),
        "{received:?}"
    );
    assert!(received.head.contains("\r\nEmpty: \r\n"), "{received:?}");
}

#[test]
fn a_server_is_told_where_it_stands() {
    let server = Server::start();
    let backend = Backend::saying("fine");
    server.get(&backend.path("/a"));
    let received = backend.next();
    assert_eq!(
        received.value("host"),
        format!("localhost:{}", backend.port)
    );
    assert_eq!(received.value("x-forwarded-for"), "127.0.0.1");
    assert_eq!(received.value("x-forwarded-proto"), "http");
    assert_eq!(received.value("x-forwarded-host"), "sandbox");
    assert_eq!(received.value("x-forwarded-prefix"), backend.path(""));
}

#[test]
fn what_the_proxy_before_says_is_kept_and_added_to() {
    let server = Server::start();
    let backend = Backend::saying("fine");
    let mut connection = server.connect();
    let headers = [
        ("X-Forwarded-For", "203.0.113.7"),
        ("X-Forwarded-For", "10.0.0.1, 10.0.0.2"),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Host", "job--49983.example.org"),
        ("X-Forwarded-Prefix", "/outer/"),
        ("Connection", "X-Forwarded-For"),
        // Said in words that nobody keeps up to date, or that another header can be taken for.
        ("Forwarded", "for=192.0.2.1"),
        ("X_Forwarded_For", "192.0.2.1"),
        ("x_forwarded-HOST", "elsewhere"),
        ("X_Sandbox_Token", "x"),
        ("X_Other", "kept"),
    ];
    connection.request("GET", &backend.path(""), &headers, b"");
    let received = backend.next();
    assert_eq!(
        received.value("x-forwarded-for"),
        "203.0.113.7, 10.0.0.1, 10.0.0.2, 127.0.0.1"
    );
    assert_eq!(received.value("x-forwarded-proto"), "https");
    assert_eq!(received.value("x-forwarded-host"), "job--49983.example.org");
    let prefix = format!("/outer{}", backend.path(""));
    assert_eq!(received.value("x-forwarded-prefix"), prefix);
    for name in [
        "forwarded",
        "x_forwarded_for",
        "x_forwarded-host",
        "x_sandbox_token",
    ] {
        assert!(received.values(name).is_empty(), "{name}: {received:?}");
    }
    assert_eq!(received.value("x_other"), "kept");
}

/// Where names become variables, as in CGI and WSGI, two names are one field.
#[test]
fn no_other_spelling_of_a_field_of_the_proxy_reaches_the_server() {
    let server = Server::start();
    let backend = Backend::saying("fine");
    for way in Way::all(&server, backend.port) {
        for name in [
            "Content-Length",
            "Transfer-Encoding",
            "Keep-Alive",
            "Proxy-Connection",
            "Proxy-Authorization",
            "X-Forwarded-For",
            "X-Forwarded-Proto",
            "X-Forwarded-Host",
            "X-Forwarded-Prefix",
            "X-Hop",
            "X-Own-Hop",
        ] {
            for other in ["_", ".", "~"] {
                let spelling = name.replace('-', other);
                // No digits: tickets have any of them.
                let headers = [
                    ("Connection", "x-hop, X_Own_Hop"),
                    (&*spelling, "zzz"),
                    (&*spelling.to_lowercase(), "zzz"),
                ];
                let mut client = Way::connect(&server);
                let reply = way.request(&mut client, "GET", "/", &headers, b"");
                assert_eq!(reply.text(), "fine", "{} {spelling}", way.name);
                let head = backend.next().head;
                assert!(!head.contains("zzz"), "{} {spelling}: {head}", way.name);
            }
        }
        // Beside the field itself, which frames the body.
        let framing = [
            ("Content-Length", "4"),
            ("Content_Length", "0"),
            ("Transfer_Encoding", "chunked"),
        ];
        way.request(&mut Way::connect(&server), "POST", "/", &framing, b"body");
        let received = backend.next();
        assert_eq!(received.value("content-length"), "4");
        assert_eq!(received.body, b"body");
        for name in ["content_length", "transfer_encoding"] {
            assert!(received.values(name).is_empty(), "{name}");
        }
        let others = [("Content_Type", "a"), ("X_Hop_", "b"), ("X.Y", "c")];
        way.request(&mut Way::connect(&server), "GET", "/", &others, b"");
        let received = backend.next();
        for (name, value) in others {
            assert_eq!(received.value(name), value);
        }
    }
}

#[test]
fn options_is_the_servers_to_answer() {
    let server = Server::start();
    let backend = Backend::answering("HTTP/1.1 200 OK\r\nAllow: BREW\r\nContent-Length: 0\r\n\r\n");
    let reply = server.request("OPTIONS", &backend.path("/"), b"");
    assert_eq!((reply.status, reply.header("allow")), (200, Some("BREW")));
    backend.next();
    let reply = server.request("CONNECT", &backend.path("/"), b"");
    assert_eq!((reply.status, &*reply.code()), (501, "not_implemented"));
    backend.expect_nothing();
}

#[test]
fn a_server_that_wants_an_upgrade_says_to_what() {
    let server = Server::start();
    let backend = Backend::answering(
        "HTTP/1.1 426 Upgrade Required\r\nUpgrade: websocket\r\nUpgrade: echo\r\nConnection: Upgrade, X-Hop\r\n\
         X-Hop: 1\r\nContent-Length: 2\r\n\r\nno",
    );
    let mut connection = server.connect();
    for _ in 0..2 {
        let reply = connection.request("GET", &backend.path("/"), &[], b"");
        assert_eq!((reply.status, &*reply.text()), (426, "no"));
        let values = |wanted: &str| -> Vec<_> {
            let headers = reply.headers.iter();
            headers
                .filter(|(name, _)| name == wanted)
                .map(|(_, value)| value.as_str())
                .collect()
        };
        assert_eq!(values("upgrade"), ["websocket", "echo"]);
        assert_eq!(values("connection"), ["Upgrade"]);
        assert_eq!(values("x-hop"), [""; 0]);
    }
}

#[test]
fn a_response_that_resets_a_form_has_no_content() {
    let server = Server::start();
    for rest in [
        "Content-Length: 0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "\r\n",
        "Content-Length: 5\r\n\r\nextra",
    ] {
        let backend = Backend::answering(format!("HTTP/1.1 205 Reset Content\r\n{rest}"));
        let mut connection = server.connect();
        for _ in 0..2 {
            let reply = connection.request("POST", &backend.path("/"), &[], b"x");
            assert_eq!((reply.status, &*reply.text()), (205, ""));
            assert_eq!(reply.header("content-length"), Some("0"));
            assert_eq!(reply.header("transfer-encoding"), None);
        }
        assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
    }
}
