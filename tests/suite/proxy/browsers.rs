//! What a server inside sends never becomes a page of the server's own address, whatever browser asks for it.

use crate::fixture::{Connection, Reply, Server, assert_error, is_root};
use crate::proxy::sandboxes::serve_in;
use crate::proxy::{Accepted, Backend, SilentPort};
use crate::skip;

/// Gives a page an origin of its own.
const POLICY: &str = "sandbox allow-scripts allow-forms";

/// All values of a field of an answer.
fn values<'r>(reply: &'r Reply, name: &str) -> Vec<&'r str> {
    let fields = reply.headers.iter();
    let named = fields.filter(|(other, _)| other == name);
    named.map(|(_, value)| &**value).collect()
}

#[track_caller]
fn assert_apart(reply: &Reply) {
    let policies = values(reply, "content-security-policy");
    assert!(policies.contains(&POLICY), "{reply:?}");
}

fn open_server() -> Server {
    Server::builder().no_token().start()
}

/// Headers by which a browser shows that it would make a page of the answer.
const NAVIGATIONS: &[&[(&str, &str)]] = &[
    // Over plain HTTP there is nothing else.
    &[("Upgrade-Insecure-Requests", "1")],
    &[("upgrade-insecure-requests", "")],
    &[("Sec-Fetch-Mode", "navigate")],
    &[
        ("Sec-Fetch-Mode", "navigate"),
        ("Sec-Fetch-Site", "none"),
        ("Sec-Fetch-Dest", "document"),
    ],
    &[
        ("Sec-Fetch-Mode", "navigate"),
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Dest", "document"),
    ],
    &[("Sec-Fetch-Mode", "no-cors"), ("Sec-Fetch-Dest", "object")],
    &[("Sec-Fetch-Dest", "embed")],
    &[("Sec-Fetch-Dest", "iframe")],
    &[("Sec-Fetch-Dest", "frame")],
    &[("Sec-Fetch-Mode", "cors"), ("Sec-Fetch-Mode", "navigate")],
];

#[test]
fn every_answer_below_a_port_has_an_origin_of_its_own() {
    let server = Server::start();
    let hostile = "Content-Type: text/html\r\nContent-Security-Policy: sandbox allow-same-origin allow-scripts\r\n\
                   Content-Length: 2\r\n\r\nok";
    for status in [
        "200 OK",
        "404 No",
        "500 Bad",
        "299 Odd",
        "426 Up\r\nUpgrade: x",
    ] {
        let backend = Backend::answering(format!("HTTP/1.1 {status}\r\n{hostile}"));
        for method in [
            "GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW",
        ] {
            let reply = server
                .connect()
                .request(method, &backend.path("/a"), &[], b"");
            // Policies add up: a page has what all of them allow.
            assert_apart(&reply);
            assert_eq!(values(&reply, "content-security-policy").len(), 2);
            backend.next();
        }
    }
    // An upgrade that is refused, and one for which something else comes.
    let backend = Backend::answering(format!("HTTP/1.1 200 OK\r\n{hostile}"));
    let upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket")];
    let mut connection = server.connect();
    let reply = connection.request("GET", &backend.path("/"), &upgrade, b"");
    assert_eq!(reply.status, 200);
    assert_apart(&reply);
    // What this server says in its place.
    let silent = SilentPort::new();
    let garbage = Backend::answering("<script>alert(1)</script>");
    for (target, status) in [
        (format!("/v1/proxy/{}/", silent.port), 502),
        (garbage.path("/"), 502),
        ("/v1/proxy/<script>/".to_owned(), 400),
        ("/v1/proxy/0".to_owned(), 400),
    ] {
        let reply = server.get(&target);
        assert_eq!(reply.status, status, "{target}: {}", reply.text());
        assert_apart(&reply);
    }
    let mut stranger = server.connect();
    stranger.token = None;
    assert_apart(&stranger.request("GET", &backend.path("/"), &[], b""));
}

#[test]
fn what_speaks_for_the_whole_address_is_dropped() {
    const DROPPED: &[&str] = &[
        "Accept-CH",
        "Alt-Svc",
        "clear-site-data",
        "CRITICAL-CH",
        "Cross-Origin-Opener-Policy",
        "Expect-CT",
        "NEL",
        "Origin-Agent-Cluster",
        "Public-Key-Pins",
        "Report-To",
        "Reporting-Endpoints",
        "Sec-Session-Registration",
        "Secure-Session-Registration",
        "Service-Worker-Allowed",
        "Set-Login",
        "Shared-Storage-Write",
        "Speculation-Rules",
        "Strict-Transport-Security",
        "Supports-Loading-Mode",
        "Use-As-Dictionary",
        "WWW-Authenticate",
    ];
    let fields = DROPPED.join(": x\r\n") + ": x\r\n";
    let early = format!("HTTP/1.1 103 Early Hints\r\n{fields}X-Early: 1\r\n\r\n");
    let backend = Backend::answering(format!(
        "{early}HTTP/1.1 200 OK\r\n{fields}X-Kept: 1\r\nETag: \"a\"\r\nContent-Length: 2\r\n\r\nok"
    ));
    let server = Server::start();
    let made = server
        .post("/v1/tickets", &serde_json::json!({ "port": backend.port }))
        .json();
    for target in [backend.path("/"), made["path"].as_str().unwrap().to_owned()] {
        let mut connection = server.connect();
        connection.send_request("GET", &target, &[], b"");
        let reply = connection.read_reply();
        assert_eq!(reply.status, 200);
        for name in DROPPED {
            let name = name.to_ascii_lowercase();
            assert!(values(&reply, &name).is_empty(), "{target}: {name}");
        }
        assert_eq!(values(&reply, "x-kept"), ["1"]);
        assert_eq!(values(&reply, "etag"), ["\"a\""]);
    }
}

/// A proxy before the server obeys these: it sends a file of its own, or the answer of an address that nobody else may ask.
#[test]
fn no_server_inside_commands_a_proxy_on_the_way() {
    let fields = [
        "X-Accel-Redirect: /secret",
        "X-Accel-Expires: 9",
        "x-accel-charset: x",
        "X-ACCEL-LIMIT-RATE: 1",
        "X-Sendfile: /etc/shadow",
        "X-LIGHTTPD-send-file: /etc/shadow",
        "X-LIGHTTPD-send-tempfile: /etc/shadow",
        "X-Sendfile-Type: x",
        "X-Reproxy-URL: http://127.0.0.1/",
        "X-REPROXY-file: /etc/shadow",
        "X-Envoy-Retry-On: 5xx",
        "x-drupal-cache-tags: a",
        "surrogate-capability: x",
        "X-LiteSpeed-Location: /secret",
        "Surrogate-Control: max-age=600",
        "surrogate-key: a",
        "CDN-Cache-Control: max-age=600",
        "Cloudflare-CDN-Cache-Control: max-age=600",
        "Cache-Tag: a",
        "Edge-Control: cache-maxage=10m",
        "X-Accel-Buffering: no",
    ];
    let fields = fields.join("\r\n");
    let backend = Backend::answering(format!(
        "HTTP/1.1 200 OK\r\n{fields}\r\nContent-Length: 2\r\n\r\nok"
    ));
    let server = Server::start();
    let made = server
        .post("/v1/tickets", &serde_json::json!({ "port": backend.port }))
        .json();
    let name = format!("{}-machine.localhost", backend.port);
    for (target, host) in [
        (&*backend.path("/"), "localhost"),
        (made["path"].as_str().unwrap(), "localhost"),
        ("/", &name),
    ] {
        let reply = server
            .connect()
            .request("GET", target, &[("Host", host)], b"");
        assert_eq!(reply.status, 200, "{target} {host}");
        let commands = reply.headers.iter().filter(|(name, _)| {
            let name = name.to_ascii_lowercase();
            [
                "x-accel-",
                "x-sendfile",
                "x-lighttpd",
                "x-reproxy",
                "x-envoy-",
                "x-drupal-cache-",
                "x-litespeed",
                "surrogate-",
                "cdn-",
                "cloudflare-",
                "cache-tag",
                "edge-",
            ]
            .iter()
            .any(|start| name.starts_with(start))
        });
        let left: Vec<_> = commands.map(|(_, value)| value.as_str()).collect();
        assert_eq!(left, ["no"], "{target} {host}: {:?}", reply.headers);
    }
}

#[test]
fn cookies_stay_below_their_port() {
    let server = Server::start();
    let backend = Backend::answering(
        "HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nset-cookie: b=2; Path=/; HttpOnly\r\nSet-Cookie: c=3;PATH=/x ; domain=localhost\r\n\
         Set-Cookie: d=4; Path=/y; Path=/z; Domain=.x; Domain=y\r\nSet-Cookie: __Host-e=5; Secure; Path=/\r\nContent-Length: 0\r\n\r\n",
    );
    let prefix = format!("/v1/proxy/{}", backend.port);
    for (rest, directory) in [
        ("", ""),
        ("/", ""),
        ("/page", ""),
        ("/dir/page?x=/y/", "/dir"),
    ] {
        let reply = server.get(&backend.path(rest));
        assert_eq!(
            values(&reply, "set-cookie"),
            [
                format!("a=1; Path={prefix}{directory}"),
                format!("b=2; HttpOnly; Path={prefix}"),
                format!("c=3; Path={prefix}/x"),
                format!("d=4; Path={prefix}/z"),
                format!("__Host-e=5; Secure; Path={prefix}"),
            ],
            "{rest}"
        );
    }
    // They come back as they were set.
    let mut connection = server.connect();
    connection.request("GET", &backend.path("/"), &[("Cookie", "a=1; b=2")], b"");
    for _ in 0..4 {
        backend.next();
    }
    assert_eq!(backend.next().value("cookie"), "a=1; b=2");
}

#[test]
fn a_browser_that_goes_to_a_port_gets_a_page_that_leads_to_a_ticket() {
    for server in [Server::start(), open_server()] {
        let backend = Backend::saying("<script>hostile</script>");
        let target = backend.path("/a%2Fb/?c=<script>&d=\"");
        for headers in NAVIGATIONS {
            for method in ["GET", "HEAD"] {
                let reply = server.connect().request(method, &target, headers, b"");
                assert_eq!(reply.status, 403, "{headers:?}");
                assert_eq!(
                    reply.header("content-type"),
                    Some("text/html; charset=utf-8")
                );
                let [policy] = values(&reply, "content-security-policy")[..] else {
                    panic!("{reply:?}");
                };
                for part in [
                    "default-src 'none'",
                    "form-action 'self'",
                    "frame-ancestors 'none'",
                    "base-uri 'none'",
                    "sandbox",
                ] {
                    assert!(policy.contains(part), "{policy}");
                }
                assert!(!policy.contains("allow-scripts"), "{policy}");
                assert_eq!(reply.header("cache-control"), Some("no-store"));
                let page = reply.text();
                assert!(
                    !page.contains("<script") && !page.contains("a%2Fb"),
                    "{page}"
                );
                assert!(
                    method == "HEAD" || page.contains("method=\"post\""),
                    "{page}"
                );
            }
        }
        backend.expect_nothing();
        // The button of the page, in a browser with and without metadata.
        let own = format!("http://{}", server.address);
        let host = server.address.to_string();
        for headers in [
            &[
                ("Sec-Fetch-Site", "same-origin"),
                ("Sec-Fetch-Mode", "navigate"),
            ][..],
            &[
                ("Host", &*host),
                ("Origin", &*own),
                ("Upgrade-Insecure-Requests", "1"),
            ],
        ] {
            let headers = [
                headers,
                &[("Content-Type", "application/x-www-form-urlencoded")],
            ]
            .concat();
            let reply = server.connect().request("POST", &target, &headers, b"");
            assert_eq!(reply.status, 303, "{}", reply.text());
            assert_apart(&reply);
            backend.expect_nothing();
            let location = reply.header("location").unwrap();
            let rest = &location["/t/".len() + 64..];
            assert_eq!(rest, "/a%2Fb/?c=<script>&d=\"");
            let mut tab = server.connect();
            tab.token = None;
            let page = tab.request(
                "GET",
                location,
                &[("Host", "localhost"), NAVIGATIONS[0][0]],
                b"",
            );
            assert_eq!(page.text(), "<script>hostile</script>");
            assert_apart(&page);
            backend.next();
        }
    }
}

/// The status of a form that a page sends to a port.
fn pressed(server: &Server, target: &str, headers: &[(&str, &str)]) -> u16 {
    let headers = [headers, &[("Upgrade-Insecure-Requests", "1")]].concat();
    server
        .connect()
        .request("POST", target, &headers, b"")
        .status
}

#[test]
fn nothing_happens_by_a_form_of_another_page() {
    for server in [Server::start(), open_server()] {
        let backend = Backend::saying("hello");
        let target = backend.path("/");
        let own = format!("http://{}", server.address);
        let host = server.address.to_string();
        let own_host = ("Host", &*host);
        for headers in [
            &[][..],
            &[own_host, ("Origin", "https://evil.example")],
            &[own_host, ("Origin", "null")],
            &[own_host, ("Origin", "http://127.0.0.1:1")],
            &[own_host, ("Origin", &*own), ("Origin", "null")],
            &[
                own_host,
                ("Origin", &*own),
                ("Sec-Fetch-Site", "cross-site"),
                ("Sec-Fetch-Mode", "navigate"),
            ],
            &[
                own_host,
                ("Origin", &*own),
                ("Sec-Fetch-Site", "same-site"),
                ("Sec-Fetch-Mode", "navigate"),
            ],
            &[("Sec-Fetch-Site", "none"), ("Sec-Fetch-Mode", "navigate")],
            &[
                ("Sec-Fetch-Site", "same-origin"),
                ("Sec-Fetch-Site", "cross-site"),
                ("Sec-Fetch-Mode", "navigate"),
            ],
        ] {
            assert_eq!(pressed(&server, &target, headers), 403, "{headers:?}");
        }
        for method in ["PUT", "DELETE", "PATCH", "OPTIONS"] {
            let headers = [
                ("Sec-Fetch-Site", "same-origin"),
                ("Sec-Fetch-Mode", "navigate"),
            ];
            let reply = server.connect().request(method, &target, &headers, b"");
            assert_error(&reply, 403, "forbidden");
            assert_apart(&reply);
        }
        backend.expect_nothing();
        // No ticket was made: all of them are left.
        for _ in 0..64 {
            let made = server.post("/v1/tickets", &serde_json::json!({ "port": 1 }));
            assert_eq!(made.status, 200, "{}", made.text());
        }
        let server_is_full = pressed(&server, &target, &[("Sec-Fetch-Site", "same-origin")]);
        assert_eq!(server_is_full, 503);
    }
}

#[test]
fn no_server_inside_can_install_a_service_worker() {
    let server = Server::start();
    let backend = Backend::saying("self.addEventListener('fetch', steal)");
    let made = server
        .post("/v1/tickets", &serde_json::json!({ "port": backend.port }))
        .json();
    for target in [
        backend.path("/sw.js"),
        format!("{}sw.js", made["path"].as_str().unwrap()),
    ] {
        for headers in [
            &[("Service-Worker", "script")][..],
            &[("service-worker", "")],
            &[
                ("Sec-Fetch-Dest", "serviceworker"),
                ("Sec-Fetch-Mode", "same-origin"),
                ("Sec-Fetch-Site", "same-origin"),
            ],
        ] {
            let reply = server.connect().request("GET", &target, headers, b"");
            assert_error(&reply, 403, "forbidden");
            assert_apart(&reply);
        }
    }
    backend.expect_nothing();
}

#[test]
fn programs_and_scripts_reach_the_server_inside() {
    let server = Server::start();
    let backend = Backend::saying("hello");
    for headers in [
        &[][..],
        &[("Sec-Fetch-Mode", "cors")],
        &[
            ("Sec-Fetch-Mode", "cors"),
            ("Sec-Fetch-Site", "same-origin"),
            ("Sec-Fetch-Dest", "empty"),
        ],
        &[
            ("Accept", "text/html"),
            ("User-Agent", "Mozilla/5.0"),
            ("Accept-Language", "en"),
        ],
    ] {
        for method in ["GET", "POST"] {
            let reply = server
                .connect()
                .request(method, &backend.path("/"), headers, b"");
            assert_eq!(reply.text(), "hello", "{headers:?}");
            backend.next();
        }
    }
    let echo = Backend::start(|mut connection: Accepted| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n");
            while connection.fill() {
                let bytes = std::mem::take(&mut connection.buffer);
                connection.send(bytes);
            }
        }
    });
    let mut socket = server.connect();
    let headers = [
        ("Connection", "keep-alive, Upgrade"),
        ("Upgrade", "websocket"),
        ("Origin", "http://sandbox"),
        ("Sec-Fetch-Mode", "websocket"),
        ("Sec-Fetch-Site", "same-origin"),
        ("Sec-Fetch-Dest", "empty"),
    ];
    socket.send_request("GET", &echo.path("/ws"), &headers, b"");
    assert_eq!(socket.read_head().status, 101);
    socket.send(b"ping");
    assert_eq!(socket.read_exactly(4), b"ping");
}

#[test]
fn a_sandbox_of_a_host_is_no_different() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    if !serve_in(&sandbox, "web") {
        skip!("there is no Python for programs in sandboxes");
    }
    let mut connection: Connection = server.connect();
    let target = sandbox.target("proxy/web/a?b");
    let reply = connection.request("GET", &target, &[], b"");
    assert!(reply.text().starts_with("from "), "{}", reply.text());
    assert_apart(&reply);
    for headers in NAVIGATIONS {
        let reply = connection.request("GET", &target, headers, b"");
        assert_eq!(reply.status, 403);
        assert!(
            reply.text().starts_with("<!doctype html>"),
            "{}",
            reply.text()
        );
    }
    let button = [
        ("Sec-Fetch-Site", "same-origin"),
        ("Sec-Fetch-Mode", "navigate"),
    ];
    let reply = connection.request("POST", &target, &button, b"");
    let location = reply.header("location").unwrap().to_owned();
    connection.token = None;
    let page = connection.request("GET", &location, &[], b"");
    assert!(page.text().contains("GET /a?b "), "{}", page.text());
    assert_apart(&page);
}
