//! What authenticates a client to this server does not reach a server inside, by no door: a client may send all that it
//! has to all of them.

use std::path::Path;

use serde_json::json;

use super::sandboxes::serve_in;
use super::{Backend, Way};
use crate::fixture::{Connection, HANDSHAKE, Server, TOKEN, encode_base64, is_root};
use crate::skip;

/// How a door is asked: method, target, header fields, body.
type Asking<'a> = (&'a str, &'a str, Vec<(&'a str, &'a str)>, &'a [u8]);

/// A subprotocol that carries a token.
fn subprotocol(token: &str) -> String {
    let encoded = encode_base64(token.as_bytes());
    let encoded = encoded.trim_end_matches('=');
    format!("sbx.bearer.{}", encoded.replace('+', "-").replace('/', "_"))
}

/// All that a client can have, as it may send it; each with what the server inside must not see of it.
fn carriers(token: &str) -> Vec<(&'static str, String, String)> {
    let plain = |name: &'static str, value: String| (name, value, token.to_owned());
    let mut carriers = vec![
        plain("Authorization", format!("Bearer {token}")),
        plain("Authorization", format!("bearer   {token}")),
        plain("X-API-KEY", format!("e2b_{token}")),
    ];
    for name in [
        "X-Sandbox-Token",
        "X-Access-Token",
        "E2B-Traffic-Access-Token",
        "X-API-KEY",
        "Proxy-Authorization",
    ] {
        carriers.push(plain(name, token.to_owned()));
    }
    let offered = subprotocol(token);
    carriers.push(("Sec-WebSocket-Protocol", offered.clone(), offered));
    carriers
}

/// The names by which a server may know a header.
fn spellings(name: &str) -> [String; 5] {
    [
        name.to_owned(),
        name.to_lowercase(),
        name.to_uppercase(),
        name.replace('-', "_"),
        name.replacen('-', "_", 1),
    ]
}

/// The token of the machine as E2B's clients have it.
#[track_caller]
fn token_of_machine(server: &Server) -> String {
    let headers = [("x-api-key", TOKEN)];
    let made = Way::connect(server).request(
        "POST",
        "/v2/sandboxes",
        &headers,
        b"{\"templateID\":\"base\"}",
    );
    made.json()["envdAccessToken"].as_str().unwrap().to_owned()
}

#[test]
fn no_door_passes_on_what_any_door_takes() {
    let server = Server::start();
    let backend = Backend::saying("fine");
    let machine = token_of_machine(&server);
    for way in Way::all(&server, backend.port) {
        for (name, value, secret) in [carriers(TOKEN), carriers(&machine)].concat() {
            for name in spellings(name) {
                // Where it is one of the way's own, the same again.
                let is_own = way
                    .headers
                    .iter()
                    .any(|(own, _)| own.eq_ignore_ascii_case(&name));
                if is_own && secret != TOKEN {
                    continue;
                }
                let mut client = Way::connect(&server);
                let reply = way.request(&mut client, "GET", "/", &[(&name, &value)], b"");
                assert_eq!(reply.text(), "fine", "{} {name}", way.name);
                let head = backend.next().head;
                assert!(!head.contains(&secret), "{} {name}: {head}", way.name);
            }
        }
        // All of it at once, and in an upgrade.
        let all = carriers(TOKEN);
        let headers = all.iter().map(|(name, value, _)| (*name, &**value));
        let headers: Vec<_> = headers
            .chain(HANDSHAKE)
            .chain([("X-API-KEY", "x")])
            .collect();
        way.request(&mut Way::connect(&server), "GET", "/", &headers, b"");
        let head = backend.next().head;
        for secret in [TOKEN, &subprotocol(TOKEN)] {
            assert!(!head.contains(secret), "{}: {head}", way.name);
        }
        assert!(head.contains("Upgrade: websocket"), "{head}");
    }
}

/// Asks each door, so that a header by which one comes to take a token is withheld as well.
#[test]
fn what_opens_a_door_is_withheld() {
    let server = Server::start();
    let backend = Backend::saying("fine");
    let ways = Way::all(&server, backend.port);
    let name = ways[2].headers[0].1.clone();
    let is_open = |headers: &[(&str, &str)]| {
        let doors: [Asking<'_>; 7] = [
            ("GET", "/v1/processes", vec![], b""),
            ("GET", "/v1/processes/p-0/attach", HANDSHAKE.to_vec(), b""),
            ("GET", "/v2/sandboxes", vec![], b""),
            ("GET", "/envs", vec![("E2b-Sandbox-Id", "machine")], b""),
            ("GET", "/contexts", vec![("E2b-Sandbox-Id", "machine")], b""),
            ("GET", "/", vec![("Host", &name)], b""),
            (
                "POST",
                "/mcp",
                vec![
                    ("Content-Type", "application/json"),
                    ("Accept", "application/json, text/event-stream"),
                ],
                br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#,
            ),
        ];
        doors.iter().any(|(method, target, own, body)| {
            let headers = [own, headers].concat();
            let reply = Way::connect(&server).request(method, target, &headers, body);
            !matches!(reply.status, 401 | 403 | 426)
        })
    };
    assert!(!is_open(&[]));
    let offered = subprotocol(TOKEN);
    let bearer = format!("Bearer {TOKEN}");
    let basic = format!(
        "Basic {}",
        encode_base64(format!("user:{TOKEN}").as_bytes())
    );
    let cookie = format!("token={TOKEN}");
    let prefixed = format!("e2b_{TOKEN}");
    let mut openers = Vec::new();
    for header in [
        "X-Sandbox-Token",
        "X-Access-Token",
        "E2B-Traffic-Access-Token",
        "X-API-KEY",
        "API-Key",
        "X-Auth-Token",
        "X-Authorization",
        "X-Token",
        "Token",
        "X-Session-Token",
        "Mcp-Session-Id",
        "X-Signature",
        "E2B-Access-Token",
        "X-SBX-Token",
        "Cookie",
        "Authorization",
        "Proxy-Authorization",
        "Sec-WebSocket-Protocol",
    ] {
        for value in [TOKEN, &bearer, &basic, &cookie, &prefixed, &offered] {
            if is_open(&[(header, value)]) {
                openers.push((header, value));
            }
        }
    }
    while backend.received.try_recv().is_ok() {}
    let mut names: Vec<_> = openers.iter().map(|(name, _)| *name).collect();
    names.dedup();
    assert_eq!(
        names,
        [
            "X-Sandbox-Token",
            "X-Access-Token",
            "E2B-Traffic-Access-Token",
            "X-API-KEY",
            "Authorization",
            "Sec-WebSocket-Protocol"
        ]
    );
    for way in &ways {
        for (header, value) in &openers {
            let mut client = Way::connect(&server);
            let reply = way.request(&mut client, "GET", "/", &[(header, value)], b"");
            assert_eq!(reply.text(), "fine", "{} {header}", way.name);
            let head = backend.next().head;
            assert!(!head.contains(*value), "{} {header}: {head}", way.name);
        }
    }
}

/// Servers have API keys and subprotocols of their own.
#[test]
fn what_is_the_servers_own_passes() {
    for server in [Server::start(), Server::builder().no_token().start()] {
        let backend = Backend::saying("fine");
        let has_token = server.connect().token.is_some();
        for mut way in Way::all(&server, backend.port) {
            if !has_token {
                way.headers.retain(|(name, _)| *name == "Host");
            }
            for key in ["the server's own", "e2b_0123", &"0".repeat(64), TOKEN] {
                if has_token && key == TOKEN {
                    continue;
                }
                let headers = [("x-Api-Key", key), ("Sec-WebSocket-Protocol", "a,b , c")];
                let mut client = Way::connect(&server);
                way.request(&mut client, "GET", "/", &headers, b"");
                let received = backend.next();
                assert_eq!(received.value("x-api-key"), key, "{}", way.name);
                assert_eq!(received.value("sec-websocket-protocol"), "a,b , c");
            }
            let mixed = format!("a, {} , b", subprotocol("x").to_uppercase());
            let headers = [
                ("Sec-WebSocket-Protocol", &*mixed),
                ("sec-websocket-protocol", "c"),
            ];
            let headers = [&HANDSHAKE[..], &headers].concat();
            way.request(&mut Way::connect(&server), "GET", "/", &headers, b"");
            assert_eq!(backend.next().value("sec-websocket-protocol"), "a, b, c");
        }
    }
}

#[test]
fn a_sandbox_gets_no_token_of_its_host() {
    if !is_root() {
        skip!("host mode needs root");
    }
    if !Path::new("/usr/bin/python3").exists() {
        skip!("there is no Python for programs in sandboxes");
    }
    let server = Server::host().start();
    let (sandbox, other) = (server.sandbox(), server.sandbox());
    assert!(serve_in(&sandbox, "8000"));
    let ticket = sandbox.post("tickets", &json!({ "port": "8000" })).json();
    let ticket = ticket["path"].as_str().unwrap().to_owned();
    let named = format!("8000-{}.localhost", sandbox.id);
    let proxied = sandbox.target("proxy/8000/");
    for token in [TOKEN, &sandbox.token, &other.token] {
        for (name, value, secret) in carriers(token) {
            for (target, own) in [
                (&*proxied, ("X-Sandbox-Token", &*sandbox.token)),
                (&ticket, ("X-Other", "x")),
                ("/", ("X-Access-Token", &*sandbox.token)),
            ] {
                if name.eq_ignore_ascii_case(own.0) {
                    continue;
                }
                let host = if target == "/" { &*named } else { "host" };
                let headers = [("Host", host), own, (name, &*value)];
                let mut client: Connection = Way::connect(&server);
                let text = client.request("GET", target, &headers, b"").text();
                assert!(text.starts_with("from "), "{target} {name}: {text}");
                assert!(!text.contains(&secret), "{target} {name}: {text}");
                assert!(!text.contains(&sandbox.token), "{target} {name}: {text}");
            }
        }
    }
}
