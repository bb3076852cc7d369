//! Messages: what each era of the protocol demands, and every refusal.

use serde_json::{Value, json};

use super::{
    ACCEPT, Endpoint, MODERN, SERVER_INFO, document_of, events_of, everywhere, machine, modern,
    on_a_host,
};
use crate::fixture::{Reply, Server, TOKEN, assert_error};

const LEGACY: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

/// Asserts that a message was refused with this status and code.
#[track_caller]
fn assert_failure(reply: &Reply, status: u16, code: i32) -> Value {
    assert_eq!(reply.status, status, "{}", reply.text());
    let document = reply.json();
    assert_eq!(document["jsonrpc"], "2.0");
    assert_eq!(document["error"]["code"], code, "{document}");
    assert!(document["error"]["message"].is_string());
    assert!(document.get("id").is_some() && document.get("result").is_none());
    document
}

/// A request of the present era with some headers left out, or with another value.
#[track_caller]
fn with_headers(endpoint: &Endpoint<'_>, change: &[(&str, Option<&str>)]) -> Reply {
    let (headers, body) = modern(
        "tools/call",
        &json!({ "name": "processes", "arguments": {} }),
    );
    let changed = |name: &str| change.iter().find(|(changed, _)| *changed == name);
    let headers = headers
        .iter()
        .filter_map(|(name, value)| match changed(name) {
            Some((_, other)) => Some((*name, (*other)?)),
            None => Some((*name, &**value)),
        });
    endpoint.post(&headers.collect::<Vec<_>>(), body.to_string().as_bytes())
}

#[test]
fn what_there_is_is_discovered() {
    everywhere(|endpoint| {
        let reply = endpoint.modern("server/discover", &json!({}));
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.header("content-type"), Some("application/json"));
        let result = &reply.json()["result"];
        let versions = [&[MODERN], &LEGACY[..]].concat();
        assert_eq!(result["supportedVersions"], json!(versions));
        assert_eq!(result["capabilities"], json!({ "tools": {} }));
        assert!(result["instructions"].as_str().unwrap().contains("sandbox"));
        assert_eq!(result["resultType"], "complete");
        assert_eq!(result["cacheScope"], "private");
        assert!(result["ttlMs"].as_u64().unwrap() > 0);
        let info = &result["_meta"][SERVER_INFO];
        assert_eq!(info["name"], "sbx-server");
        assert_eq!(info["version"], env!("CARGO_PKG_VERSION"));
    });
}

#[test]
fn tools_are_listed_in_their_order_in_both_eras() {
    const NAMES: [&str; 13] = [
        "run",
        "start",
        "output",
        "input",
        "stop",
        "processes",
        "read_file",
        "write_file",
        "edit_file",
        "list_files",
        "glob",
        "grep",
        "ports",
    ];
    everywhere(|endpoint| {
        let present = endpoint.modern("tools/list", &json!({})).json()["result"].clone();
        let former = endpoint.legacy("tools/list", &json!({})).json()["result"].clone();
        assert_eq!(present["tools"], former["tools"]);
        let names = former["tools"]
            .as_array()
            .unwrap()
            .iter()
            .map(|tool| tool["name"].as_str().unwrap());
        assert!(names.eq(NAMES));
        assert_eq!(present["resultType"], "complete");
        assert_eq!(present["cacheScope"], "private");
        assert!(former.get("resultType").is_none() && former.get("_meta").is_none());
        let paged = endpoint.modern("tools/list", &json!({ "cursor": "x" }));
        assert_failure(&paged, 400, -32602);
    });
}

#[test]
fn headers_must_say_what_the_body_says() {
    everywhere(|endpoint| {
        assert_eq!(with_headers(endpoint, &[]).status, 200);
        for name in ["mcp-protocol-version", "mcp-method", "mcp-name"] {
            for other in [None, Some(""), Some("tools/list"), Some("2025-11-25")] {
                let document =
                    assert_failure(&with_headers(endpoint, &[(name, other)]), 400, -32020);
                assert_eq!(document["id"], 7);
            }
        }
        let (headers, body) = modern("tools/list", &json!({}));
        for (name, value) in &headers {
            let mut twice: Vec<_> = headers
                .iter()
                .map(|(name, value)| (*name, &**value))
                .collect();
            twice.push((name, value));
            let reply = endpoint.post(&twice, body.to_string().as_bytes());
            assert_failure(&reply, 400, -32020);
        }
        // A name that no header can have is encoded.
        for (encoded, is_right) in [
            ("=?base64?cHJvY2Vzc2Vz?=", true),
            ("=?base64?cHJvY2Vzc2V?=", false),
            ("=?base64?cHJvY2Vzc2Vz", false),
            ("=?base64?/w==?=", false),
        ] {
            let reply = with_headers(endpoint, &[("mcp-name", Some(encoded))]);
            assert_eq!(reply.status == 200, is_right, "{encoded}: {}", reply.text());
        }
    });
}

#[test]
fn a_request_tells_its_version_and_capabilities() {
    everywhere(|endpoint| {
        let version = "io.modelcontextprotocol/protocolVersion";
        let capabilities = "io.modelcontextprotocol/clientCapabilities";
        let headers = [
            ("mcp-protocol-version", MODERN),
            ("mcp-method", "tools/list"),
        ];
        for params in [
            json!(null),
            json!({}),
            json!({ "_meta": null }),
            json!({ "_meta": 1 }),
            json!({ "_meta": {} }),
            json!({ "_meta": { version: MODERN } }),
            json!({ "_meta": { capabilities: {} } }),
            json!({ "_meta": { version: 2026, capabilities: {} } }),
        ] {
            let body =
                json!({ "jsonrpc": "2.0", "id": "x", "method": "tools/list", "params": params });
            let reply = endpoint.post(&headers, body.to_string().as_bytes());
            assert_eq!(assert_failure(&reply, 400, -32602)["id"], "x");
        }
        // Who the client is may be left out.
        let params = json!({ "_meta": { version: MODERN, capabilities: {} } });
        let body = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": params });
        assert_eq!(
            endpoint.post(&headers, body.to_string().as_bytes()).status,
            200
        );
    });
}

#[test]
fn an_unknown_version_is_answered_with_the_known_ones() {
    everywhere(|endpoint| {
        for version in ["1900-01-01", "2099-12-31", "", "x"] {
            let params = json!({ "_meta": {
                "io.modelcontextprotocol/protocolVersion": version,
                "io.modelcontextprotocol/clientCapabilities": {},
            } });
            let body =
                json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": params });
            let headers = [
                ("mcp-protocol-version", version),
                ("mcp-method", "tools/list"),
            ];
            let reply = endpoint.post(&headers, body.to_string().as_bytes());
            let error = assert_failure(&reply, 400, -32022)["error"].clone();
            assert_eq!(error["data"]["requested"], version);
            assert_eq!(
                error["data"]["supported"],
                json!([&[MODERN], &LEGACY[..]].concat())
            );
            // Of a former era the header alone tells.
            let body = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" });
            let reply = endpoint.post(&headers[..1], body.to_string().as_bytes());
            assert_failure(&reply, 400, -32022);
        }
        for version in LEGACY {
            let body = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" });
            let headers = [("mcp-protocol-version", version)];
            assert_eq!(
                endpoint.post(&headers, body.to_string().as_bytes()).status,
                200,
                "{version}"
            );
        }
    });
}

#[test]
fn a_former_client_initializes_without_a_session() {
    everywhere(|endpoint| {
        let versions = LEGACY.iter().map(|version| (json!(version), *version));
        let unknown =
            [json!("2024-10-07"), json!("x"), json!(null)].map(|version| (version, LEGACY[0]));
        for (asked, given) in versions.chain(unknown) {
            let params = json!({
                "protocolVersion": asked, "capabilities": {}, "clientInfo": { "name": "test", "version": "1" }
            });
            let reply = endpoint.legacy("initialize", &params);
            assert_eq!(reply.status, 200, "{}", reply.text());
            assert_eq!(reply.header("mcp-session-id"), None);
            let result = &reply.json()["result"];
            assert_eq!(result["protocolVersion"], given, "{asked}");
            assert_eq!(result["capabilities"], json!({ "tools": {} }));
            assert_eq!(result["serverInfo"]["name"], "sbx-server");
        }
        let params = json!({ "protocolVersion": 1 });
        assert_failure(&endpoint.legacy("initialize", &params), 200, -32602);
        assert_eq!(
            endpoint.legacy("ping", &json!({})).json()["result"],
            json!({})
        );
        // A session of before is ignored.
        let body = json!({ "jsonrpc": "2.0", "id": 1, "method": "ping" });
        let headers = [("mcp-session-id", "gone"), ("last-event-id", "7")];
        assert_eq!(
            endpoint.post(&headers, body.to_string().as_bytes()).status,
            200
        );
    });
}

#[test]
fn unknown_methods_are_refused_in_the_way_of_their_era() {
    everywhere(|endpoint| {
        for method in [
            "initialize",
            "ping",
            "logging/setLevel",
            "resources/list",
            "prompts/list",
            "tools/Call",
            "",
            "subscriptions/listen",
        ] {
            let document = assert_failure(&endpoint.modern(method, &json!({})), 404, -32601);
            assert_eq!(document["id"], 7);
        }
        for method in ["server/discover", "resources/list", "logging/setLevel", ""] {
            assert_failure(&endpoint.legacy(method, &json!({})), 200, -32601);
        }
        let call = json!({ "name": "no_such_tool", "arguments": {} });
        let document = assert_failure(&endpoint.modern("tools/call", &call), 400, -32602);
        let text = document["error"]["message"].as_str().unwrap();
        assert!(
            text.contains("no_such_tool") && text.contains("edit_file"),
            "{text}"
        );
        assert_failure(&endpoint.legacy("tools/call", &call), 200, -32602);
    });
}

#[test]
fn notifications_are_accepted_and_answered_by_nothing() {
    everywhere(|endpoint| {
        for (headers, method) in [
            (&[][..], "notifications/initialized"),
            (
                &[("mcp-protocol-version", "2025-06-18")],
                "notifications/cancelled",
            ),
            (
                &[("mcp-protocol-version", MODERN)],
                "notifications/cancelled",
            ),
            (&[], "tools/list"),
        ] {
            let body = json!({ "jsonrpc": "2.0", "method": method, "params": { "requestId": 1 } });
            let reply = endpoint.post(headers, body.to_string().as_bytes());
            assert_eq!(
                (reply.status, reply.text()),
                (202, String::new()),
                "{method}"
            );
        }
        let body = json!({ "jsonrpc": "2.0", "method": "notifications/x" }).to_string();
        let reply = endpoint.post(&[("mcp-protocol-version", "1900-01-01")], body.as_bytes());
        assert_failure(&reply, 400, -32022);
    });
}

#[test]
fn what_is_no_message_is_refused() {
    everywhere(|endpoint| {
        for (body, code) in [
            ("", -32700),
            ("{", -32700),
            ("nothing", -32700),
            ("{} {}", -32700),
            ("\u{feff}{}", -32700),
            ("1", -32600),
            ("\"x\"", -32600),
            ("null", -32600),
            ("{}", -32600),
            // Batches.
            ("[]", -32600),
            (r#"{"id":1,"method":"ping"}"#, -32600),
            (r#"{"jsonrpc":"1.0","id":1,"method":"ping"}"#, -32600),
            (r#"{"jsonrpc":2.0,"id":1,"method":"ping"}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":1}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":1,"method":1}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":1.5,"method":"ping"}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":1e3,"method":"ping"}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":[1],"method":"ping"}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":true,"method":"ping"}"#, -32600),
            (
                r#"{"jsonrpc":"2.0","id":1,"method":"ping","params":[]}"#,
                -32602,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1,"method":"ping","params":1}"#,
                -32602,
            ),
            // Answers: nothing was asked.
            (r#"{"jsonrpc":"2.0","id":1,"result":{}}"#, -32600),
            (
                r#"{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"x"}}"#,
                -32600,
            ),
        ] {
            assert_failure(&endpoint.post(&[], body.as_bytes()), 400, code);
        }
        assert_failure(&endpoint.post(&[], b"\xff\xfe"), 400, -32700);
        for (params, named) in [
            (json!({}), "name"),
            (json!({ "name": 1 }), "name"),
            (json!({ "name": "run", "arguments": [] }), "arguments"),
            (json!({ "name": "run", "arguments": "x" }), "arguments"),
            (
                json!({ "name": "run", "_meta": { "progressToken": {} } }),
                "progressToken",
            ),
            (
                json!({ "name": "run", "_meta": { "progressToken": 1.5 } }),
                "progressToken",
            ),
        ] {
            let document = assert_failure(&endpoint.legacy("tools/call", &params), 200, -32602);
            let text = document["error"]["message"].as_str().unwrap();
            assert!(text.contains(named), "{params}: {text}");
        }
        // The id is given back as it came, whatever it is.
        for id in [
            "-1",
            "\"\"",
            "\"a\\u0000b\"",
            "123456789012345678901234567890",
            "\"\\ud83d\\ude00\"",
        ] {
            let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#);
            let reply = endpoint.post(&[], body.as_bytes());
            assert!(
                reply.text().contains(&format!("\"id\":{id},")),
                "{}",
                reply.text()
            );
        }
    });
}

#[test]
fn other_methods_and_answers_that_a_client_does_not_take_are_refused() {
    everywhere(|endpoint| {
        let token = format!("Bearer {}", endpoint.token);
        let own = [("authorization", &*token), ACCEPT];
        for method in ["GET", "DELETE", "PUT", "HEAD", "PATCH"] {
            let reply = endpoint
                .connect()
                .request(method, &endpoint.target, &own, b"");
            assert_eq!(reply.status, 405, "{method}");
            assert_eq!(reply.header("allow"), Some("POST, OPTIONS"), "{method}");
        }
        let reply = endpoint
            .connect()
            .request("OPTIONS", &endpoint.target, &own, b"");
        assert_eq!(
            (reply.status, reply.header("allow")),
            (204, Some("POST, OPTIONS"))
        );

        let ping = br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
        for accept in [
            "application/json",
            "text/event-stream",
            "text/html",
            "application/*, text/html",
            "",
        ] {
            let reply = endpoint.send(&[("accept", accept)], ping).read_reply();
            assert_error(&reply, 406, "not_acceptable");
        }
        assert_error(
            &endpoint.send(&[], ping).read_reply(),
            406,
            "not_acceptable",
        );
        for accept in [
            "*/*",
            "text/event-stream;q=0.5,application/json;q=0.9",
            "application/*, text/*",
            "Application/JSON, Text/Event-Stream",
        ] {
            assert_eq!(
                endpoint
                    .send(&[("accept", accept)], ping)
                    .read_reply()
                    .status,
                200,
                "{accept}"
            );
        }
        let split = [
            ("accept", "application/json"),
            ("accept", "text/event-stream"),
        ];
        assert_eq!(endpoint.send(&split, ping).read_reply().status, 200);

        let headers = [("content-length", "16777217"), ("expect", "100-continue")];
        assert_error(&endpoint.post(&headers, b""), 413, "too_large");
    });
}

#[test]
fn pages_of_other_origins_are_refused() {
    let server = Server::builder()
        .env("SBX_ALLOWED_ORIGINS", "https://app.example")
        .start();
    let endpoint = Endpoint::of(&server);
    let ping = br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    for (origin, status) in [
        ("https://app.example", 200),
        ("http://localhost", 200),
        ("http://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("null", 403),
        ("", 403),
    ] {
        let reply = endpoint.post(&[("origin", origin)], ping);
        assert_eq!(reply.status, status, "{origin}");
    }
    let preflight = [
        ("origin", "https://app.example"),
        ("access-control-request-method", "POST"),
        (
            "access-control-request-headers",
            "authorization, mcp-method, mcp-name, mcp-protocol-version, content-type",
        ),
    ];
    let reply = endpoint
        .connect()
        .request("OPTIONS", "/mcp", &preflight, b"");
    assert_eq!(
        (reply.status, reply.header("access-control-allow-methods")),
        (204, Some("POST, OPTIONS"))
    );
}

/// A page whose name was made to lead here is of the server's own origin.
#[test]
fn a_server_without_a_token_answers_to_no_name_of_a_page() {
    let server = Server::builder().no_token().start();
    let evil = [
        ("host", "evil.example:49983"),
        ("origin", "http://evil.example:49983"),
    ];
    for (method, target, body) in [
        (
            "POST",
            "/mcp",
            &br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#[..],
        ),
        ("POST", "/v1/exec", br#"{"cmd":"touch /tmp/never"}"#),
        ("GET", "/v1/files/read?path=/etc/passwd", b""),
        ("GET", "/health", b""),
        ("GET", "/files?path=/etc/passwd", b""),
        ("GET", "/", b""),
    ] {
        for headers in [&evil[..], &evil[..1]] {
            let headers = [headers, &[ACCEPT]].concat();
            let reply = server.connect().request(method, target, &headers, body);
            assert_error(&reply, 403, "forbidden");
            assert!(reply.text().contains("SBX_TOKEN"), "{}", reply.text());
        }
        for host in ["localhost:49983", "127.0.0.1", "[::1]:80"] {
            let reply = server
                .connect()
                .request(method, target, &[("host", host), ACCEPT], body);
            assert_ne!(reply.status, 403, "{host} {target}");
        }
    }
    // A token tells whose a request is, and then it may come by any name.
    let server = Server::start();
    assert_eq!(
        server
            .connect()
            .request("GET", "/v1/processes", &evil, b"")
            .status,
        200
    );
    let server = Server::builder().no_token().env("SBX_INSECURE", 1).start();
    assert_eq!(
        server
            .connect()
            .request("GET", "/v1/processes", &evil, b"")
            .status,
        200
    );
}

#[test]
fn a_token_opens_its_sandbox_and_no_other() {
    on_a_host(|server, sandbox| {
        let own = Endpoint::of_sandbox(server, sandbox);
        let ping = || json!({});
        assert_eq!(own.legacy("ping", &ping()).status, 200);
        let cwd = own.call("run", &json!({ "cmd": "pwd" }));
        assert_eq!(cwd["stdout"], format!("{}\n", sandbox.home.display()));

        let at = |target: &str, token: &str| Endpoint {
            server,
            target: target.to_owned(),
            token: token.to_owned(),
        };
        let other = server.sandbox();
        let named = format!("/v1/sandboxes/{}/mcp", sandbox.id);
        for (target, token, status) in [
            (&*named, &*sandbox.token, 200),
            (&named, TOKEN, 200),
            (&named, &other.token, 403),
            (&named, "wrong", 403),
            (&named, "", 403),
            ("/mcp", "wrong", 403),
            ("/mcp", "", 403),
            ("/mcp", TOKEN, 404),
            ("/v1/sandboxes/none/mcp", TOKEN, 404),
            ("/v1/sandboxes/none/mcp", &sandbox.token, 403),
            ("/v1/sandboxes//mcp", TOKEN, 404),
            ("/v1/mcp", TOKEN, 404),
            ("/mcp/", TOKEN, 404),
        ] {
            let reply = at(target, token).legacy("ping", &ping());
            assert_eq!(reply.status, status, "{target} {token}: {}", reply.text());
            assert!(reply.header("www-authenticate").is_none());
        }
        let reply = at("/mcp", TOKEN).legacy("ping", &ping());
        assert!(
            reply.text().contains("/v1/sandboxes/{id}/mcp"),
            "{}",
            reply.text()
        );
        // A token of a sandbox that is gone opens nothing.
        let gone = other.token.clone();
        other.delete();
        assert_eq!(at("/mcp", &gone).legacy("ping", &ping()).status, 403);
        // Either header will do, and the first counts.
        let message = br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
        for (headers, status) in [
            (vec![("x-sandbox-token", &*sandbox.token)], 200),
            (
                vec![
                    ("x-sandbox-token", "wrong"),
                    ("authorization", &format!("Bearer {}", sandbox.token)),
                ],
                403,
            ),
            (vec![], 403),
        ] {
            let headers = [headers, vec![ACCEPT]].concat();
            let reply = own.connect().request("POST", "/mcp", &headers, message);
            assert_eq!(reply.status, status);
        }
    });
    let server = Server::start();
    let reply = Endpoint {
        target: "/v1/sandboxes/machine/mcp".to_owned(),
        ..Endpoint::of(&server)
    }
    .legacy("ping", &json!({}));
    assert_error(&reply, 404, "not_found");
}

#[test]
fn strict_scopes_keep_the_token_of_the_host_out() {
    if !crate::fixture::is_root() {
        crate::skip!("host mode needs root");
    }
    let server = Server::host().env("SBX_STRICT_SCOPES", 1).start();
    let sandbox = server.sandbox();
    let named = Endpoint {
        target: format!("/v1/sandboxes/{}/mcp", sandbox.id),
        ..Endpoint::of(&server)
    };
    assert_eq!(named.legacy("ping", &json!({})).status, 403);
    let own = Endpoint {
        token: sandbox.token.clone(),
        ..named
    };
    assert_eq!(own.legacy("ping", &json!({})).status, 200);
}

#[test]
fn the_endpoint_can_be_turned_off() {
    let server = Server::builder().env("SBX_MCP", 0).start();
    let reply = Endpoint::of(&server).legacy("ping", &json!({}));
    assert_error(&reply, 404, "not_found");
}

#[test]
fn requests_are_counted() {
    let (_home, server) = machine();
    let endpoint = Endpoint::of(&server);
    endpoint.legacy("ping", &json!({}));
    endpoint.post(&[], b"[]");
    let metrics = server.get("/v1/metrics").text();
    for line in [
        r#"sbx_requests_total{route="mcp",status="200"} 1"#,
        r#"sbx_requests_total{route="mcp",status="400"} 1"#,
    ] {
        assert!(metrics.lines().any(|found| found == line), "{metrics}");
    }
    assert!(document_of(&endpoint.modern("tools/list", &json!({})))["result"].is_object());
}

/// Posts a batch of requests under a version, if it is named.
#[track_caller]
fn batch(endpoint: &Endpoint<'_>, version: Option<&str>, messages: &Value) -> Reply {
    let header = version.map(|version| ("mcp-protocol-version", version));
    endpoint.post(header.as_slice(), messages.to_string().as_bytes())
}

fn request(id: i32, method: &str, params: &Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params })
}

#[test]
fn the_revisions_that_have_batches_get_an_answer_for_each_request() {
    everywhere(|endpoint| {
        let run = |cmd: &str| json!({ "name": "run", "arguments": { "cmd": cmd } });
        let notification = json!({ "jsonrpc": "2.0", "method": "notifications/x" });
        let messages = json!([
            request(1, "ping", &json!({})),
            notification,
            request(2, "tools/call", &run("echo two > two; echo $((1 + 1))")),
            request(3, "tools/call", &run("cat two")),
            request(4, "tools/list", &json!({})),
            request(5, "no/method", &json!({})),
            request(6, "initialize", &json!({ "protocolVersion": "2025-03-26" })),
            { "jsonrpc": "2.0", "id": 7 },
            request(8, "tools/call", &json!({ "name": "no_tool" })),
            3,
        ]);
        for version in [None, Some("2025-03-26"), Some("2024-11-05")] {
            let reply = batch(endpoint, version, &messages);
            assert_eq!(reply.status, 200, "{}", reply.text());
            assert_eq!(reply.header("content-type"), Some("application/json"));
            let answers = reply.json();
            let ids: Vec<_> = answers
                .as_array()
                .unwrap()
                .iter()
                .map(|one| one["id"].clone())
                .collect();
            assert_eq!(json!(ids), json!([1, 2, 3, 4, 5, 6, 7, 8, null]));
            assert_eq!(answers[0]["result"], json!({}));
            assert_eq!(answers[1]["result"]["structuredContent"]["stdout"], "2\n");
            // One after the other.
            assert_eq!(answers[2]["result"]["structuredContent"]["stdout"], "two\n");
            assert!(answers[3]["result"]["tools"].is_array());
            let codes = [4, 5, 6, 7, 8].map(|index: usize| answers[index]["error"]["code"].clone());
            assert_eq!(
                json!(codes),
                json!([-32601, -32600, -32600, -32602, -32600])
            );
        }
        // Only notifications.
        let reply = batch(endpoint, None, &json!([notification, notification]));
        assert_eq!((reply.status, reply.text()), (202, String::new()));
        // With progress, each answer is an event.
        let mut call = run("echo printed");
        call["_meta"] = json!({ "progressToken": "p" });
        let messages = json!([
            request(1, "ping", &json!({})),
            request(2, "tools/call", &call)
        ]);
        let reply = batch(endpoint, None, &messages);
        assert_eq!(reply.header("content-type"), Some("text/event-stream"));
        let events = events_of(&reply.text());
        let ids = events.iter().filter_map(|event| event["id"].as_i64());
        assert_eq!(ids.collect::<Vec<_>>(), [1, 2]);
        assert!(
            events
                .iter()
                .any(|event| event["params"]["progressToken"] == "p"),
            "{events:?}"
        );
        for version in ["2025-06-18", "2025-11-25", MODERN, "1999-01-01"] {
            let messages = json!([request(1, "ping", &json!({}))]);
            assert_failure(&batch(endpoint, Some(version), &messages), 400, -32600);
        }
        let many = vec![request(1, "ping", &json!({})); 101];
        assert_failure(&batch(endpoint, None, &json!(many)), 400, -32600);
        let (_, modern) = modern("tools/list", &json!({}));
        let answers = batch(endpoint, None, &json!([modern])).json();
        assert!(answers[0]["error"]["code"].is_i64(), "{answers}");
        endpoint.call("run", &json!({ "cmd": "rm two" }));
    });
}

#[test]
fn ids_and_tokens_that_every_answer_would_repeat_are_short() {
    everywhere(|endpoint| {
        let ping = |id: &str| {
            let body = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"ping\"}}");
            endpoint.post(&[], body.as_bytes())
        };
        let [longest, longer] = [1022, 1023].map(|length| format!("\"{}\"", "i".repeat(length)));
        assert_eq!(ping(&longest).json()["id"].to_string(), longest);
        for id in [longer, "9".repeat(1025)] {
            let failure = assert_failure(&ping(&id), 400, -32600);
            assert_eq!(failure["id"], Value::Null);
        }
        let params = json!({
            "name": "processes", "arguments": {}, "_meta": { "progressToken": "t".repeat(2000) }
        });
        assert_failure(&endpoint.modern("tools/call", &params), 400, -32602);
        // What is quoted is cut.
        let params = json!({ "name": "\u{200b}".repeat(1 << 20), "arguments": {} });
        let body = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params });
        let reply = endpoint.post(&[], body.to_string().as_bytes());
        let failure = assert_failure(&reply, 200, -32602);
        let text = failure["error"]["message"].as_str().unwrap();
        assert!(
            text.starts_with("there is no tool ") && text.len() < 17 << 10,
            "{text}"
        );
    });
}
