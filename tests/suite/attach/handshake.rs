//! Who may attach, and what is no WebSocket.

use serde_json::json;

use super::in_both_modes;
use crate::fixture::{
    Connection, HANDSHAKE, PATIENCE, Server, TOKEN, WebSocket, assert_error, is_root,
    secret_server, wait_until,
};
use crate::skip;

/// Base64 for URLs, without padding.
fn url_base64(text: &str) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let bits: Vec<String> = text.bytes().map(|byte| format!("{byte:08b}")).collect();
    let bits = bits.concat();
    let digits = bits.as_bytes().chunks(6).map(|digit| {
        let digit = format!("{:0<6}", std::str::from_utf8(digit).unwrap());
        char::from(ALPHABET[usize::from_str_radix(&digit, 2).unwrap()])
    });
    digits.collect()
}

fn bearer(token: &str) -> String {
    format!("sbx.bearer.{}", url_base64(token))
}

#[test]
fn anything_but_a_websocket_is_told_to_upgrade() {
    in_both_modes(|place| {
        let id = place.terminal("echo hello");
        let target = place.target(&format!("processes/{id}/attach"));
        let mut requests: Vec<(&str, Vec<(&str, &str)>)> = vec![
            ("GET", vec![]),
            ("HEAD", vec![]),
            ("GET", [&HANDSHAKE[..], &[("Content-Length", "1")]].concat()),
        ];
        for missing in 0..HANDSHAKE.len() {
            let mut headers = HANDSHAKE.to_vec();
            headers.remove(missing);
            requests.push(("GET", headers));
        }
        for (wrong, value) in [(0, "h2c"), (1, "close"), (2, "8"), (3, "short")] {
            let mut headers = HANDSHAKE.to_vec();
            headers[wrong].1 = value;
            requests.push(("GET", headers));
        }
        for (method, headers) in requests {
            let mut connection = place.connect();
            let reply = connection.request(method, &target, &headers, b"");
            assert_eq!(reply.status, 426, "{headers:?}");
            assert_eq!(reply.header("upgrade"), Some("websocket"));
            assert_eq!(reply.header("sec-websocket-version"), Some("13"));
            if method != "HEAD" {
                assert_eq!(reply.code(), "upgrade_required");
            }
        }
        let reply = place.connect().request("POST", &target, &HANDSHAKE, b"");
        assert_error(&reply, 405, "method_not_allowed");
    });
}

#[test]
fn what_cannot_be_attached_is_refused_before_the_upgrade() {
    in_both_modes(|place| {
        let id = place.terminal("echo hello");
        let piped = place.post("processes", &json!({ "cmd": "sleep 60" }))["id"].clone();
        let piped = piped.as_str().unwrap();
        place.attach(&id, "").wait_for_event("exit");
        for (process, query, status, code) in [
            ("p-999", "", 404, "not_found"),
            (piped, "", 409, "not_pty"),
            (&id, "offset=8", 400, "bad_request"),
            (&id, "offset=-2", 400, "bad_request"),
            (&id, "offset=x", 400, "bad_request"),
            (&id, "mode=w", 400, "bad_request"),
            (&id, "take=2", 400, "bad_request"),
            (&id, "rows=24", 400, "bad_request"),
            (&id, "cols=80", 400, "bad_request"),
            (&id, "rows=0&cols=80", 400, "bad_request"),
            (&id, "rows=24&cols=4097", 400, "bad_request"),
            (&id, "mode=ro&take=1", 400, "bad_request"),
            (&id, "mode=ro&rows=24&cols=80", 400, "bad_request"),
            (&id, "mode=ro&rows=24", 400, "bad_request"),
            (&id, "mode=ro&take=1&rows=24&cols=80", 400, "bad_request"),
            (&id, "token=x", 400, "bad_request"),
        ] {
            let target = place.target(&format!("processes/{process}/attach?{query}"));
            let Err(reply) = WebSocket::try_open(place.connect(), &target, &[]) else {
                panic!("{query} was accepted");
            };
            assert_error(&reply, status, code);
        }
        // A WebSocket whose upgrade was refused leaves a connection for other requests.
        let target = place.target(&format!("processes/{piped}/attach"));
        let mut connection = place.connect();
        let reply = connection.request("GET", &target, &HANDSHAKE, b"");
        assert_error(&reply, 409, "not_pty");
        assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
        place.delete(piped);
    });
}

#[test]
fn the_preferred_subprotocol_is_selected_and_never_the_token() {
    in_both_modes(|place| {
        let id = place.terminal("echo hello");
        let target = place.target(&format!("processes/{id}/attach"));
        for (offered, selected) in [
            ("sbx.pty.v1", Some("sbx.pty.v1")),
            ("sbx.raw.v1", Some("sbx.raw.v1")),
            ("other, sbx.raw.v1 , sbx.pty.v1", Some("sbx.raw.v1")),
            ("sbx.bearer.eA, sbx.pty.v1", Some("sbx.pty.v1")),
            ("sbx.bearer.eA", None),
            ("", None),
            (" , ", None),
        ] {
            let mut connection = place.connect();
            let headers = [&HANDSHAKE[..], &[("Sec-WebSocket-Protocol", offered)]].concat();
            connection.send_request("GET", &target, &headers, b"");
            let head = connection.read_head();
            assert_eq!(head.status, 101, "{offered}");
            assert_eq!(head.header("sec-websocket-protocol"), selected);
        }
        for unknown in ["tty, sbx.pty.v2", "tty", "sbx.bearer.eA, tty", "SBX.PTY.V1"] {
            let headers = [("Sec-WebSocket-Protocol", unknown)];
            let Err(reply) = WebSocket::try_open(place.connect(), &target, &headers) else {
                panic!("{unknown} would be misunderstood");
            };
            assert_error(&reply, 400, "bad_request");
            assert!(reply.text().contains("sbx.pty.v1"));
        }
    });
}

fn protocol(value: &str) -> (&str, &str) {
    ("Sec-WebSocket-Protocol", value)
}

fn connect_with(server: &Server, target: &str, headers: &[(&str, &str)]) -> Option<WebSocket> {
    let connection = Connection::open(server.address, None);
    match WebSocket::try_open(connection, target, headers) {
        Ok(socket) => Some(socket),
        Err(reply) => {
            assert_error(&reply, 403, "forbidden");
            None
        }
    }
}

#[test]
fn a_token_among_the_subprotocols_opens_what_it_opens_in_a_header() {
    let (server, secret) = secret_server(Server::builder().env("SBX_LOG", "debug"));
    let id = server.spawn(&json!({ "cmd": "read line", "pty": true }))["id"].clone();
    let target = format!("/v1/processes/{}/attach", id.as_str().unwrap());
    let right = format!("sbx.pty.v1, {}", bearer(&secret));

    assert!(connect_with(&server, &target, &[protocol(&right)]).is_some());
    let padded = format!("{}=", bearer(&secret));
    let (wrong, empty) = (bearer("wrong"), bearer(""));
    let two = format!("{right}, {}", bearer("wrong"));
    for value in ["sbx.pty.v1", &wrong, &padded, &empty, &two, "sbx.bearer.!"] {
        assert!(
            connect_with(&server, &target, &[protocol(value)]).is_none(),
            "{value}"
        );
    }
    // Where a header has a token, only that counts.
    for header in ["X-Sandbox-Token", "Authorization"] {
        let headers = [protocol(&right), (header, "Bearer wrong")];
        assert!(connect_with(&server, &target, &headers).is_none());
    }
    wait_until("all handshakes are in the log", PATIENCE, || {
        let log = server.log();
        log.contains("/attach 101") && log.matches("/attach 403").count() == 8
    });
    let encoded = url_base64(&secret);
    let log = server.log();
    assert!(!log.contains(&secret) && !log.contains(&encoded) && !log.contains("sbx.bearer.d"));
    server.delete(&format!("/v1/processes/{}", id.as_str().unwrap()));
}

#[test]
fn the_token_of_a_sandbox_among_the_subprotocols_opens_that_sandbox_alone() {
    if !is_root() {
        skip!("needs root");
    }
    for strict in [0, 1] {
        let server = Server::host().env("SBX_STRICT_SCOPES", strict).start();
        let (one, other) = (server.sandbox(), server.sandbox());
        let body = json!({ "cmd": "read line", "pty": true }).to_string();
        let started = one.request("POST", "processes", body.as_bytes()).json();
        let id = started["id"].as_str().unwrap();
        let target = one.target(&format!("processes/{id}/attach"));
        for (token, opens) in [
            (&one.token[..], true),
            (&other.token, false),
            (TOKEN, strict == 0),
        ] {
            let value = format!("{}, sbx.pty.v1", bearer(token));
            let headers = [("Sec-WebSocket-Protocol", &value[..])];
            assert_eq!(connect_with(&server, &target, &headers).is_some(), opens);
        }
    }
}

#[test]
fn pages_of_other_origins_cannot_connect() {
    let allowed = "https://console.example";
    let server = Server::builder()
        .env("SBX_ALLOWED_ORIGINS", allowed)
        .start();
    let id = server.spawn(&json!({ "cmd": "read line", "pty": true }))["id"].clone();
    let target = format!("/v1/processes/{}/attach", id.as_str().unwrap());
    // The requests of the fixture have this Host.
    for origin in ["http://sandbox", "https://SANDBOX", allowed] {
        let socket = WebSocket::try_open(server.connect(), &target, &[("Origin", origin)]);
        assert!(socket.is_ok(), "{origin}");
    }
    for origin in [
        "null",
        "",
        "sandbox",
        "http://sandbox.evil.example",
        "http://evil.example",
        "http://sandbox:8080",
        "https://console.example.evil",
        "http://console.example",
        "file://sandbox",
    ] {
        let Err(reply) = WebSocket::try_open(server.connect(), &target, &[("Origin", origin)])
        else {
            panic!("{origin} is admitted");
        };
        assert_error(&reply, 403, "forbidden");
    }
    let both = [
        ("Origin", "http://sandbox"),
        ("Origin", "http://evil.example"),
    ];
    assert!(WebSocket::try_open(server.connect(), &target, &both).is_err());
}
