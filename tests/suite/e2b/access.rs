//! Whose request it is, and whether its credentials open what it asks for.

use std::io::{Read, Write};
use std::net::TcpListener;

use serde_json::{Value, json};

use super::{Door, api, long_key, machine, on_a_host};
use crate::fixture::{Reply, Server, TOKEN, encode_base64};

const LIST: &str = "/process.Process/List";

/// One request to each kind of route of a sandbox.
const ROUTES: [(&str, &str); 8] = [
    ("POST", LIST),
    ("POST", "/filesystem.Filesystem/Stat"),
    ("GET", "/files?path=x"),
    ("POST", "/files?path=x"),
    ("GET", "/contexts"),
    ("POST", "/execute"),
    ("GET", "/metrics"),
    ("GET", "/envs"),
];

fn bare(server: &Server, method: &str, target: &str, headers: &[(&str, &str)]) -> Reply {
    let mut connection = server.connect();
    connection.token = None;
    let headers = [&[("content-type", "application/json")], headers].concat();
    connection.request(method, target, &headers, b"{}")
}

#[test]
fn a_token_opens_its_own_sandbox_and_no_other() {
    on_a_host(|server| {
        let (own, other) = (Door::open(server), Door::open(server));
        let long = long_key();
        for (method, target) in ROUTES {
            let refused = |headers: &[(&str, &str)]| {
                let reply = bare(server, method, target, headers);
                assert_eq!(reply.status, 401, "{target} {headers:?}: {}", reply.text());
                if target.starts_with("/process") {
                    assert_eq!(reply.json()["code"], "unauthenticated");
                } else if target.starts_with("/files?") {
                    assert_eq!(reply.json()["code"], 401);
                }
            };
            refused(&[("e2b-sandbox-id", &own.id)]);
            refused(&[("e2b-sandbox-id", &own.id), ("x-access-token", "")]);
            refused(&[
                ("e2b-sandbox-id", &own.id),
                ("x-access-token", &other.token),
            ]);
            refused(&[
                ("e2b-sandbox-id", &other.id),
                ("x-access-token", &own.token),
            ]);
            refused(&[("x-access-token", "wrong")]);
            refused(&[("e2b-sandbox-id", &own.id), ("x-access-token", &long)]);
            refused(&[("e2b-sandbox-id", &own.id), ("x-sandbox-token", &own.token)]);
            for name in ["x-access-token", "e2b-traffic-access-token"] {
                for token in [&own.token, TOKEN] {
                    let headers = [("e2b-sandbox-id", &*own.id), (name, token)];
                    let reply = bare(server, method, target, &headers);
                    assert_ne!(reply.status, 401, "{target}: {}", reply.text());
                }
            }
            // Clients that send no id are known by their token.
            let reply = bare(server, method, target, &[("x-access-token", &own.token)]);
            assert_ne!(reply.status, 401, "{target}: {}", reply.text());
        }
        assert_eq!(own.sh("cat x").text(), "{}", "what its own token uploaded");
    });
}

#[test]
fn the_api_takes_its_key_only() {
    on_a_host(|server| {
        let door = Door::open(server);
        let long = long_key();
        let own = format!("/sandboxes/{}", door.id);
        for (method, target) in [
            ("GET", "/v2/sandboxes"),
            ("POST", "/v2/sandboxes"),
            ("GET", &*own),
            ("GET", "/v3/templates"),
        ] {
            for headers in [
                &[][..],
                &[("x-api-key", "wrong")],
                &[("x-api-key", "e2b_")],
                &[("x-api-key", "")],
            ] {
                // A route that other doors have too is theirs without any of these headers.
                if headers.is_empty() && !target.starts_with("/v") {
                    continue;
                }
                let reply = bare(server, method, target, headers);
                assert_eq!(reply.status, 401, "{target} {headers:?}");
                assert_eq!(reply.json()["code"], 401);
            }
        }
        for key in [TOKEN, &long] {
            assert_eq!(
                bare(server, "GET", "/v2/sandboxes", &[("x-api-key", key)]).status,
                200
            );
        }
        // Its own token lets it be looked at and ended, and nothing else.
        let key = [("x-api-key", &*door.token)];
        assert_eq!(bare(server, "GET", &own, &key).status, 200);
        assert_eq!(bare(server, "GET", "/v2/sandboxes", &key).status, 401);
        assert_eq!(
            bare(server, "POST", &format!("{own}/timeout"), &key).status,
            401
        );
        assert_eq!(
            bare(server, "POST", &format!("{own}/connect"), &key).status,
            401
        );
        let other = Door::open(server);
        assert_eq!(
            bare(server, "DELETE", &format!("/sandboxes/{}", other.id), &key).status,
            401
        );
        assert_eq!(bare(server, "DELETE", &own, &key).status, 204);
        assert_eq!(other.sh("echo hi").text(), "hi\n");
        assert_eq!(
            api(server, "GET", "/v2/sandboxes", &Value::Null)
                .json()
                .as_array()
                .unwrap()
                .len(),
            1
        );
    });
}

/// A name of a host says nothing about a request to the API.
#[test]
fn a_sandbox_that_the_host_names_does_not_open_the_api() {
    on_a_host(|server| {
        let door = Door::open(server);
        let other = Door::with(
            server,
            &json!({ "templateID": "base", "metadata": { "secret": "x" } }),
        );
        let host = format!("49983-{}.localhost", door.id);
        let key = [("X-API-KEY", &*door.token)];
        for target in [
            "/sandboxes",
            "/v2/sandboxes",
            "/snapshots",
            "/v3/templates",
            "/sandboxes/none",
        ] {
            let reply = named(server, &host, target, &key);
            assert_eq!(reply.status, 401, "{target}: {}", reply.text());
        }
        let target = format!("/sandboxes/{}", other.id);
        assert_eq!(named(server, &host, &target, &key).status, 401);
        assert_eq!(
            named(server, &host, &format!("{target}/metrics"), &key).status,
            401
        );
        assert_eq!(
            named(server, &host, &format!("/sandboxes/{}", door.id), &key).status,
            200
        );
    });
}

#[test]
fn the_api_key_is_not_passed_to_servers_in_a_sandbox() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    for (key, is_passed) in [("the app's", true), (TOKEN, false), (&*long_key(), false)] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let serving = std::thread::spawn(move || echo_head(&listener));
        let headers = [("X-Access-Token", &*door.token), ("X-API-KEY", key)];
        let seen = named(&server, &format!("{port}-machine.x"), "/", &headers).text();
        serving.join().unwrap();
        assert_eq!(seen.contains(key), is_passed, "{seen}");
    }
}

#[test]
fn methods_are_listed_and_pages_may_use_this_door() {
    let origin = "https://app.example";
    let server = Server::builder().env("SBX_ALLOWED_ORIGINS", origin).start();
    let door = Door::open(&server);
    let reply = door.request("OPTIONS", "/files", &[], b"");
    assert_eq!(
        (reply.status, reply.header("allow")),
        (204, Some("GET, POST, OPTIONS"))
    );
    assert_eq!(bare(&server, "OPTIONS", "/files", &[]).status, 401);
    let headers = [
        ("Origin", origin),
        ("Access-Control-Request-Method", "POST"),
        (
            "Access-Control-Request-Headers",
            "connect-protocol-version,e2b-sandbox-id,x-access-token",
        ),
    ];
    let reply = bare(&server, "OPTIONS", LIST, &headers);
    assert_eq!(reply.status, 204);
    let allowed = reply.header("access-control-allow-headers").unwrap();
    for name in [
        "connect-protocol-version",
        "e2b-sandbox-id",
        "x-access-token",
        "X-Sandbox-Token",
    ] {
        assert!(allowed.contains(name), "{allowed}");
    }
    let broken = [
        headers[0],
        headers[1],
        ("Access-Control-Request-Headers", "a\"<b"),
    ];
    let reply = bare(&server, "OPTIONS", LIST, &broken);
    assert!(
        !reply
            .header("access-control-allow-headers")
            .unwrap()
            .contains('<')
    );
}

#[test]
fn with_strict_scopes_the_host_token_stays_outside() {
    if !crate::fixture::is_root() {
        crate::skip!("host mode needs root");
    }
    let server = Server::host().env("SBX_STRICT_SCOPES", 1).start();
    let door = Door::open(&server);
    let headers = [("e2b-sandbox-id", &*door.id), ("x-access-token", TOKEN)];
    assert_eq!(bare(&server, "POST", LIST, &headers).status, 401);
    assert_eq!(door.ok(LIST, &json!({}))["processes"], json!([]));
    // What its commands have written, neither.
    let logs = format!("/sandboxes/{}/logs", door.id);
    let reply = super::api(&server, "GET", &logs, &Value::Null);
    assert_eq!(reply.status, 401, "{}", reply.text());
}

#[test]
fn a_signature_opens_one_file_for_one_purpose() {
    let sign = |path: &str, purpose: &str, token: &str, expires: Option<u64>| {
        let after = expires.map_or_else(String::new, |at| format!(":{at}"));
        let text = format!("{path}:{purpose}::{token}{after}");
        let digest: Vec<u8> = crate::fixture::sha256(text.as_bytes())
            .as_bytes()
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect();
        let encoded = encode_base64(&digest);
        let encoded = encoded.trim_end_matches('=').replace('+', "%2B");
        let after = expires.map_or_else(String::new, |at| format!("&signature_expiration={at}"));
        format!("/files?path={path}&signature=v1_{encoded}{after}")
    };
    on_a_host(|server| {
        let (own, other) = (Door::open(server), Door::open(server));
        for door in [&own, &other] {
            door.sh(&format!("echo {} > f; echo secret > g", door.id));
        }
        let get = |target: &str| bare(server, "GET", target, &[]);
        for door in [&own, &other] {
            // The link names no sandbox: it is the one whose token verifies it.
            let reply = get(&sign("f", "read", &door.token, None));
            assert_eq!(reply.text().trim(), door.id);
            let later = u64::MAX >> 1;
            assert_eq!(
                get(&sign("f", "read", &door.token, Some(later)))
                    .text()
                    .trim(),
                door.id
            );
        }
        let good = sign("f", "read", &own.token, None);
        for target in [
            sign("f", "read", &own.token, Some(5)),
            sign("f", "write", &own.token, None),
            sign("f", "read", "other", None),
            good.replace("path=f", "path=g"),
            format!("{good}&username=user"),
            format!("{good}&signature_expiration=99999999999"),
            good.replace("v1_", "v2_"),
            "/files?path=f&signature=".to_owned(),
        ] {
            let reply = get(&target);
            assert_eq!(
                (reply.status, &reply.json()["code"]),
                (401, &json!(401)),
                "{target}"
            );
            // A token beside it does not count.
            let headers = [("e2b-sandbox-id", &*own.id), ("x-access-token", &own.token)];
            assert_eq!(bare(server, "GET", &target, &headers).status, 401);
        }
        let late = get(&sign("f", "read", &own.token, Some(5))).json();
        assert_eq!(late["message"], "signature is already expired");
        let headers = [("e2b-sandbox-id", &*other.id)];
        assert_eq!(bare(server, "GET", &good, &headers).status, 401);
        let mut connection = server.connect();
        connection.token = None;
        let headers = [("content-type", "application/octet-stream")];
        let reply = connection.request(
            "POST",
            &sign("new", "write", &own.token, None),
            &headers,
            b"x",
        );
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(own.sh("cat new").text(), "x");
        let reply = connection.request("POST", &good, &headers, b"x");
        assert_eq!(reply.status, 401);
    });
}

#[test]
fn a_machine_without_a_token_takes_everything_and_one_with_a_token_nothing() {
    let open = Server::builder().no_token().start();
    for headers in [
        &[][..],
        &[("e2b-sandbox-id", "debug_sandbox_id")],
        &[("x-access-token", "any")],
    ] {
        assert_eq!(bare(&open, "POST", LIST, headers).status, 200);
        assert_eq!(bare(&open, "GET", "/contexts", headers).status, 200);
    }
    let closed = Server::start();
    assert_eq!(bare(&closed, "POST", LIST, &[]).status, 401);
    assert_eq!(
        bare(
            &closed,
            "POST",
            LIST,
            &[("e2b-sandbox-id", "debug_sandbox_id")]
        )
        .status,
        502
    );
    assert_eq!(
        bare(&closed, "GET", "/health", &[("e2b-sandbox-id", "other")]).status,
        502
    );
    assert_eq!(
        bare(&closed, "GET", "/health", &[("e2b-sandbox-id", "machine")]).status,
        204
    );
}

#[test]
fn shared_paths_are_this_doors_by_their_headers_only() {
    on_a_host(|server| {
        let door = Door::open(server);
        // What other doors answer has their form.
        assert_eq!(server.get("/health").json()["status"], "ok");
        assert_eq!(server.get("/metrics").status, 404);
        let simple = server.post(
            &format!("/sandboxes/{}/execute", door.id),
            &json!({ "code": "print(1)" }),
        );
        assert_eq!(simple.header("content-type"), Some("application/x-ndjson"));
        let headers = [
            ("x-access-token", &*door.token),
            ("connect-protocol-version", "1"),
        ];
        for target in [
            "/v1/sandboxes",
            "/openapi.json",
            "/mcp",
            "/console/x",
            "/t/x",
        ] {
            let reply = bare(server, "GET", target, &headers);
            let form = reply.json();
            assert!(
                form["code"].is_null() || form["code"].is_string(),
                "{target}: {form}"
            );
        }
        for header in [
            "e2b-sandbox-port",
            "x-access-token",
            "connect-protocol-version",
            "x-api-key",
        ] {
            assert_eq!(
                bare(server, "GET", "/health", &[(header, "1")]).status,
                204,
                "{header}"
            );
        }
    });
}

/// Answers one request with its own head.
fn echo_head(listener: &TcpListener) {
    let (mut stream, _) = listener.accept().unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.extend(byte);
    }
    let length = head.len();
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
    stream
        .write_all(&[answer.as_bytes(), &head].concat())
        .unwrap();
}

/// Sends a request with this Host.
fn named(server: &Server, host: &str, target: &str, headers: &[(&str, &str)]) -> Reply {
    let mut connection = server.connect();
    let lines = headers
        .iter()
        .map(|(name, value)| format!("{name}: {value}\r\n"));
    let lines: Vec<_> = lines.collect();
    let head = format!(
        "GET {target} HTTP/1.1\r\nHost: {host}\r\n{}\r\n",
        lines.concat()
    );
    connection.send(head.as_bytes());
    connection.read_reply()
}

/// In the form that E2B's proxy has for them.
#[test]
fn a_port_that_is_not_open_is_named() {
    let (_home, machine) = machine();
    let check = |server: &Server, id: &str, token: &str| {
        // Nobody listens on port 1.
        let host = format!("1-{}.localhost", id.to_uppercase());
        let token = [("E2B-Traffic-Access-Token", token)];
        let closed = named(server, &host, "/path?query", &token);
        let message = "The sandbox is running but port is not open";
        assert_eq!(
            (closed.status, closed.json()),
            (
                502,
                json!({ "sandboxId": id, "message": message, "port": 1, "code": 502 })
            )
        );
        assert_eq!(closed.header("cache-control"), Some("no-store"));
        for wrong in [&[][..], &[("E2B-Traffic-Access-Token", "wrong")]] {
            let refused = named(server, &host, "/", wrong);
            assert_eq!(refused.status, 403, "{}", refused.text());
            let refused = refused.json();
            assert_eq!(
                (&refused["sandboxId"], &refused["code"]),
                (&json!(id), &json!(403))
            );
            let message = refused["message"].as_str().unwrap();
            assert!(
                message.starts_with("E2b-Traffic-Access-Token "),
                "{message}"
            );
        }
    };
    check(&machine, "machine", &Door::open(&machine).token);
    on_a_host(|server| {
        let door = Door::open(server);
        check(server, &door.id, &door.token);
    });
}

#[test]
fn a_host_names_a_port_of_a_sandbox() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = std::thread::spawn(move || (0..3).for_each(|_| echo_head(&listener)));
    let host = format!("{port}-machine.localhost:1234");
    for headers in [
        &[][..],
        &[("X-Access-Token", "wrong")],
        &[("Authorization", "Bearer app")],
    ] {
        assert_eq!(
            named(&server, &host, "/v1/exec?a=b", headers).status,
            403,
            "{headers:?}"
        );
    }
    let headers = [
        ("E2B-Traffic-Access-Token", &*door.token),
        ("Authorization", "Bearer app"),
        ("X-API-KEY", "the app's"),
    ];
    // Every path is the server's, even those of doors.
    let seen = named(&server, &host, "/v1/exec?a=b", &headers).text();
    assert!(seen.starts_with("GET /v1/exec?a=b HTTP/1.1\r\n"), "{seen}");
    for path in ["/console", "/t/x/"] {
        let seen = named(&server, &host, path, &headers).text();
        assert!(
            seen.starts_with(&format!("GET {path} HTTP/1.1\r\n")),
            "{seen}"
        );
    }
    serving.join().unwrap();
    assert!(
        !seen.contains("Bearer app"),
        "it may be for a proxy in between: {seen}"
    );
    assert!(seen.contains("X-API-KEY: the app's\r\n"), "{seen}");
    assert!(
        seen.contains(&format!("X-Forwarded-Host: {host}\r\n")),
        "{seen}"
    );
    assert!(!seen.contains(&door.token), "{seen}");
    // The ports that clients name for the sandbox itself are this door.
    for port in [49983, 49999] {
        let host = format!("{port}-machine.example.com");
        let reply = named(&server, &host, "/contexts", &headers);
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(named(&server, &host, "/health", &[]).status, 204);
    }
    // Other names are no names of sandboxes.
    for host in ["80-other.localhost", "x-machine.localhost", "80-machine"] {
        assert_eq!(
            named(&server, host, "/health", &[]).json()["status"],
            "ok",
            "{host}"
        );
    }
}

/// A page that a browser still shows, of a sandbox that was deleted, would be a page of this server at that name.
#[test]
fn the_name_of_a_sandbox_that_is_gone_reaches_nothing() {
    let gone = "0123456789abcdef01234567";
    let refused = |server: &Server, host: &str, target: &str| {
        for headers in [
            &[][..],
            &[
                ("X-Sandbox-Token", TOKEN),
                ("X-Access-Token", TOKEN),
                ("X-API-KEY", TOKEN),
            ],
        ] {
            let reply = named(server, host, target, headers);
            assert_eq!(reply.status, 502, "{host} {target}: {}", reply.text());
            let id = host.split(['-', '.']).nth(1).unwrap().to_lowercase();
            let gone =
                json!({ "code": 502, "message": "The sandbox was not found", "sandboxId": id });
            assert_eq!(reply.json(), gone);
        }
    };
    let targets = [
        "/",
        "/health",
        "/v1/processes",
        "/v1/sandboxes",
        "/console",
        "/files?path=x",
        "/mcp",
        "/openapi.json",
        "/t/x/",
    ];
    let (_home, machine) = machine();
    let token = "0123456789abcdef".repeat(4);
    for server in [&machine, &Server::builder().no_token().start()] {
        for target in targets {
            for port in [1, 3000, 49983, 49999, 65535] {
                refused(server, &format!("{port}-{gone}.localhost"), target);
            }
            refused(
                server,
                &format!("3000-{}.localhost:49983", gone.to_uppercase()),
                target,
            );
            refused(server, &format!("3000-{token}.localhost"), target);
        }
        // The same by a target that is a URL.
        let reply = named(
            server,
            "localhost",
            &format!("http://3000-{gone}.localhost/v1/processes"),
            &[],
        );
        assert_eq!(reply.status, 502);
        // What no sandbox can be called is a name like any.
        for host in [
            "3000-other.localhost",
            "3000-0123.localhost",
            "x-0123456789abcdef01234567.localhost",
            "0-0123456789abcdef01234567.localhost",
        ] {
            assert_eq!(
                named(server, host, "/health", &[]).json()["status"],
                "ok",
                "{host}"
            );
        }
    }
    on_a_host(|server| {
        let door = Door::open(server);
        let host = format!("3000-{}.localhost", door.id);
        let token = [("X-Access-Token", &*door.token)];
        assert_eq!(
            named(server, &host, "/", &token).status,
            502,
            "nothing listens"
        );
        assert_eq!(named(server, &host, "/", &[]).status, 403);
        refused(server, "3000-machine.localhost", "/v1/sandboxes");
        assert_eq!(
            api(
                server,
                "DELETE",
                &format!("/sandboxes/{}", door.id),
                &Value::Null
            )
            .status,
            204
        );
        for target in targets {
            refused(server, &host, target);
            refused(server, &host.replace("3000", "49983"), target);
        }
    });
}

#[test]
fn a_request_names_one_sandbox() {
    on_a_host(|server| {
        let (own, other) = (Door::open(server), Door::open(server));
        let token = ("x-access-token", TOKEN);
        let ids = |ids: &[&str]| -> Vec<(&'static str, String)> {
            ids.iter()
                .map(|id| ("e2b-sandbox-id", (*id).to_owned()))
                .collect()
        };
        let ask = |host: &str, given: &[&str]| {
            let given = ids(given);
            let mut headers: Vec<(&str, &str)> =
                given.iter().map(|(name, id)| (*name, &**id)).collect();
            headers.push(token);
            named(server, host, "/files?path=missing", &headers).status
        };
        let own_name = format!("49983-{}.x", own.id);
        assert_eq!(ask("x", &[&own.id]), 404);
        assert_eq!(ask("x", &[&own.id, &own.id]), 404);
        assert_eq!(ask("x", &[&own.id, ""]), 404);
        assert_eq!(ask(&own_name, &[&own.id.to_uppercase()]), 404);
        assert_eq!(ask(&own_name, &[]), 404);
        assert_eq!(ask("x", &[&own.id, &other.id]), 400);
        assert_eq!(ask("x", &[&own.id, "x"]), 400);
        assert_eq!(ask(&own_name, &[&other.id]), 400);
        assert_eq!(ask(&own_name, &[&own.id, &other.id]), 400);
        // At the name of a port, too.
        let port_name = format!("3000-{}.x", own.id);
        assert_eq!(ask(&port_name, &[&other.id]), 400);
        assert_eq!(ask(&port_name, &[&own.id]), 502, "nothing listens");
        // The target decides over the field.
        let target = format!("http://{own_name}/files?path=missing");
        let headers = [token, ("e2b-sandbox-id", &*other.id)];
        assert_eq!(
            named(server, &format!("49983-{}.x", other.id), &target, &headers).status,
            400
        );
        let headers = [token, ("e2b-sandbox-id", &*own.id)];
        assert_eq!(
            named(server, &format!("49983-{}.x", other.id), &target, &headers).status,
            404
        );
    });
}

/// One answer to each request.
fn answer_all(listener: TcpListener, answer: &'static str) {
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n")
                && stream.read(&mut byte).is_ok_and(|count| count == 1)
            {
                head.push(byte[0]);
            }
            let _ = stream.write_all(answer.as_bytes());
        }
    });
}

#[test]
fn a_server_at_a_name_has_an_origin_of_its_own() {
    let server = Server::builder().no_token().start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = format!(
        "{}-machine.localhost:1",
        listener.local_addr().unwrap().port()
    );
    answer_all(
        listener,
        "HTTP/1.1 200 OK\r\nContent-Security-Policy: default-src 'self'\r\nSet-Cookie: a=b; Path=/x; Domain=localhost; Secure\r\n\
         Clear-Site-Data: \"cookies\"\r\nService-Worker-Allowed: /\r\nAccess-Control-Allow-Origin: *\r\nConnection: close\r\n\
         Content-Length: 5\r\n\r\nhello",
    );
    let link = [
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Mode", "navigate"),
        ("Sec-Fetch-Dest", "iframe"),
        ("Upgrade-Insecure-Requests", "1"),
    ];
    let reply = named(&server, &host, "/", &link);
    assert_eq!(reply.text(), "hello");
    let fields = |name: &str| -> Vec<&str> {
        let named = reply.headers.iter().filter(|(other, _)| other == name);
        named.map(|(_, value)| &**value).collect()
    };
    assert_eq!(fields("content-security-policy"), ["default-src 'self'"]);
    assert_eq!(fields("set-cookie"), ["a=b; Path=/x; Secure"]);
    assert_eq!(fields("service-worker-allowed"), ["/"]);
    assert!(fields("clear-site-data").is_empty());
    assert!(fields("cross-origin-resource-policy").is_empty());
    // Its own pages, and those of other ports of the same sandbox, may ask it. Others may not.
    let page = |site: &'static str, origin: &'static str| {
        let headers = [
            ("Sec-Fetch-Site", site),
            ("Sec-Fetch-Mode", "cors"),
            ("Origin", origin),
        ];
        named(&server, &host, "/api", &headers).status
    };
    assert_eq!(page("same-origin", "http://whatever"), 200);
    assert_eq!(page("cross-site", "http://8000-machine.localhost:1"), 200);
    assert_eq!(page("cross-site", "http://8000-machine.localhost:2"), 403);
    assert_eq!(page("same-site", "http://8000-other.localhost:1"), 403);
    assert_eq!(page("cross-site", "https://evil.example"), 403);
    assert_eq!(page("cross-site", "null"), 403);
}

/// A signed address is opened by pages of any site. Without a token there is nothing that a signature could prove.
#[test]
fn a_signature_is_a_token_where_there_is_one() {
    let image = [
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Mode", "no-cors"),
        ("Sec-Fetch-Dest", "image"),
    ];
    let (_home, server) = machine();
    let wrong = named(&server, "x", "/files?path=f&signature=v1_x", &image);
    assert_eq!(wrong.status, 401, "{}", wrong.text());
    assert_eq!(
        named(&server, "x", "/files?path=f&xsignature=v1_x", &image).status,
        403
    );
    let open = Server::builder().no_token().start();
    let reply = named(
        &open,
        "localhost",
        "/files?path=/etc/hostname&signature=v1_x",
        &image,
    );
    assert_eq!(reply.status, 403, "{}", reply.text());
}
