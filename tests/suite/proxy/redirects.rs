//! What a server inside can make a client do that follows its redirects: ask it for another of its paths, and nothing else.

use std::path::Path;

use serde_json::json;

use super::sandboxes::PYTHON;
use super::{Accepted, Backend, Way};
use crate::fixture::{Server, TOKEN, assert_error, is_root};
use crate::skip;

/// A server that redirects to what is after `/to?`.
fn redirecting() -> Backend {
    Backend::start(|mut connection: Accepted| {
        while let Some(request) = connection.read_request() {
            let target = request.line().split(' ').nth(1).unwrap();
            let to = target.split_once('?').map_or("", |(_, to)| to).to_owned();
            connection.send(format!(
                "HTTP/1.1 307 Temporary Redirect\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n"
            ));
        }
    })
}

#[test]
fn a_redirect_leads_to_the_server_that_sends_it() {
    let server = Server::start();
    let backend = redirecting();
    let inside = format!("http://localhost:{}", backend.port);
    for way in Way::all(&server, backend.port) {
        let mut client = Way::connect(&server);
        let prefix = &way.prefix;
        let host = match &way.headers[..] {
            [("Host", host), ..] => host,
            _ => "localhost",
        };
        let deep = "../".repeat(9);
        for (location, expected) in [
            ("/x?a=b".to_owned(), format!("{prefix}/x?a=b")),
            (format!("{prefix}/x"), format!("{prefix}/x")),
            (format!("{inside}/x"), format!("{prefix}/x")),
            (
                format!("https://{host}{prefix}/x"),
                format!("https://{host}{prefix}/x"),
            ),
            (
                "/../../../../v1/sandboxes".to_owned(),
                format!("{prefix}/v1/sandboxes"),
            ),
            ("/%2e%2E/v1/exec".to_owned(), format!("{prefix}/v1/exec")),
            (format!("{deep}v1/exec"), format!("{prefix}/v1/exec")),
            (format!("{inside}/../v1/exec"), format!("{prefix}/v1/exec")),
            ("next".to_owned(), "next".to_owned()),
        ] {
            let reply = way.get(&mut client, &format!("/a/to?{location}"));
            assert_eq!(
                (reply.status, reply.header("location")),
                (307, Some(&*expected)),
                "{}: {location}",
                way.name
            );
        }
    }
}

/// The server inside knows nothing of the proxy that speaks HTTPS for it.
#[test]
fn a_redirect_takes_no_client_from_https_to_plain_http() {
    let server = Server::start();
    let backend = redirecting();
    for way in Way::all(&server, backend.port) {
        let prefix = &way.prefix;
        let to = format!("http://box.example{prefix}/x");
        for (proto, expected) in [
            ("https", format!("{prefix}/x")),
            ("http", format!("{prefix}/x")),
        ] {
            let fields = [
                ("X-Forwarded-Host", "box.example"),
                ("X-Forwarded-Proto", proto),
            ];
            let mut client = Way::connect(&server);
            let reply = way.request(&mut client, "GET", &format!("/to?{to}"), &fields, b"");
            assert_eq!(
                reply.header("location"),
                Some(&*expected),
                "{}: {proto}",
                way.name
            );
        }
    }
}

/// A client would take its token along, to this server as to others.
#[test]
fn a_redirect_elsewhere_is_told_and_not_followed() {
    let server = Server::start();
    let backend = redirecting();
    for way in Way::all(&server, backend.port) {
        let mut client = Way::connect(&server);
        for location in [
            "http://evil.example/",
            "//evil.example/",
            "/\\evil.example/",
            "http:/v1/exec",
            "javascript:alert(1)",
            "http://localhost:1/",
            "/..%2f..%2f..%2fv1/exec",
            "..%252f..%252fv1/exec",
            "/..%5c..;/v1/exec",
        ] {
            let reply = way.get(&mut client, &format!("/to?{location}"));
            // A ticket is a secret in the address, which is not sent along.
            let fields = if way.name == "ticket" {
                ("location", "x-sbx-location")
            } else {
                ("x-sbx-location", "location")
            };
            assert_eq!(
                (reply.header(fields.0), reply.header(fields.1)),
                (Some(location), None),
                "{}",
                way.name
            );
        }
    }
    // Where no token is sent, none is taken along.
    let open = Server::builder().no_token().start();
    let reply = Way::connect(&open).request("GET", &backend.path("/to?//other/"), &[], b"");
    assert_eq!(reply.header("location"), Some("//other/"));
    let key = [("Authorization", "Bearer hf_somebody")];
    let reply = Way::connect(&open).request("GET", &backend.path("/to?//other/"), &key, b"");
    assert_eq!(reply.header("location"), None);
}

/// What is made of an answer is not longer than it by what the client asks for.
#[test]
fn an_answer_has_one_location_and_no_endless_prefix() {
    let server = Server::start();
    let answer = format!(
        "HTTP/1.1 200 OK\r\n{}Content-Length: 0\r\n\r\n",
        "Location: /\r\n".repeat(200)
    );
    let backend = Backend::answering(answer);
    let mut client = server.connect();
    let prefix = |count| "/x".repeat(count);
    for (length, kept) in [(512, true), (513, false), (30_000, false)] {
        let outer = prefix(length);
        let headers = [("X-Forwarded-Prefix", &*outer)];
        let reply = client.request("GET", &backend.path("/"), &headers, b"");
        let own = format!("/v1/proxy/{}/", backend.port);
        let expected = if kept { outer + &own } else { own };
        let locations = reply
            .headers
            .iter()
            .filter(|(name, _)| name.eq_ignore_ascii_case("location"));
        assert_eq!(
            locations
                .map(|(_, value)| value.clone())
                .collect::<Vec<_>>(),
            [expected]
        );
    }
}

/// What such redirects once did: a client with the host's token deleted another sandbox.
#[test]
fn a_sandbox_has_the_operator_do_nothing_to_another() {
    if !is_root() {
        skip!("host mode needs root");
    }
    if !Path::new(PYTHON).exists() {
        skip!("there is no Python for programs in sandboxes");
    }
    let server = Server::host().start();
    let (own, other) = (server.sandbox(), server.sandbox());
    let serving = format!(
        "import os, socket\n\
         server = socket.socket(socket.AF_UNIX)\n\
         server.bind(os.environ['SBX_PROXY_DIR'] + '/web.sock')\n\
         server.listen()\n\
         while True:\n    \
             client, _ = server.accept()\n    \
             client.recv(65536)\n    \
             client.sendall(b'HTTP/1.1 307 x\\r\\nLocation: /v1/sandboxes/{}\\r\\nContent-Length: 0\\r\\n\\r\\n')\n    \
             client.close()\n",
        other.id
    );
    own.spawn(&json!({ "cmd": [PYTHON, "-c", serving] }));
    let waited = own.get("ports/web/wait?timeout=60");
    assert_eq!(waited.json()["listening"], true, "{}", waited.text());
    let mut connection = server.connect();
    let reply = connection.request("DELETE", &own.target("proxy/web/hook"), &[], b"");
    let location = reply.header("location").unwrap().to_owned();
    assert_eq!(
        location,
        own.target(&format!("proxy/web/v1/sandboxes/{}", other.id))
    );
    assert_eq!(
        connection.request("DELETE", &location, &[], b"").status,
        307
    );
    assert_eq!(other.sh("echo lives"), "lives\n");
}

/// Caches before the server may not tell its names apart, nor know that a header is a credential.
#[test]
fn no_shared_cache_keeps_what_a_token_has_opened_or_one_name_answers_at_another() {
    let server = Server::start();
    let backend = Backend::answering(
        "HTTP/1.1 200 OK\r\nCache-Control: public, max-age=600\r\nVary: Cookie\r\nContent-Length: 2\r\n\r\nok",
    );
    for way in Way::all(&server, backend.port) {
        let reply = way.get(&mut Way::connect(&server), "/");
        let values = |name: &str| -> Vec<&str> {
            let fields = reply.headers.iter();
            let named = fields.filter(|(other, _)| other == name);
            named.map(|(_, value)| &**value).collect()
        };
        let caching = values("cache-control");
        assert_eq!(caching[0], "public, max-age=600");
        assert_eq!(caching.get(1), Some(&"private"), "{}", way.name);
        let varies = values("vary");
        // In one line: some caches read only the last.
        let at_name = way.name == "E2B's name";
        let expected = if at_name { "Cookie, Host" } else { "Cookie" };
        assert_eq!(varies, [expected], "{}", way.name);
    }
}

/// Browsers let any page open a WebSocket, and say nothing of it but its origin.
#[test]
fn pages_of_other_origins_reach_no_server_inside() {
    let open = Server::builder().no_token().start();
    let closed = Server::start();
    let backend = Backend::answering(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    );
    let name = format!("{}-machine.localhost", backend.port);
    let upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket")];
    for server in [&open, &closed] {
        // A proxy before the server has added the token.
        for (host, target) in [
            ("127.0.0.1:80", backend.path("/ws")),
            (&*name, "/ws".to_owned()),
        ] {
            let ask = |origin: &str, headers: &[(&str, &str)]| {
                let own = [
                    ("Host", host),
                    ("Origin", origin),
                    ("X-Sandbox-Token", TOKEN),
                    ("E2B-Traffic-Access-Token", TOKEN),
                ];
                let mut client = Way::connect(server);
                client.send_request("GET", &target, &[&own, headers].concat(), b"");
                client
            };
            for origin in ["http://evil.example", "null", "http://127.0.0.1:81", ""] {
                for headers in [&upgrade[..], &[]] {
                    let reply = ask(origin, headers).read_reply();
                    assert_error(&reply, 403, "forbidden");
                }
            }
            backend.expect_nothing();
            let own = format!("http://{host}");
            assert_eq!(ask(&own, &upgrade).read_head().status, 101);
            backend.next();
        }
    }
}
