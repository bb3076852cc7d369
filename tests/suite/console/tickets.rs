//! Tickets: a browser reaches a server behind a port by an address alone, and the server's pages reach nothing else.

use serde_json::{Value, json};

use crate::fixture::{Connection, Reply, Server, assert_error, is_root};
use crate::proxy::sandboxes::serve_in;
use crate::proxy::{Accepted, Backend};
use crate::skip;

const POLICY: &str = "sandbox allow-scripts allow-forms";

/// The path of a new ticket, without the slash at its end.
#[track_caller]
fn ticket_for(server: &Server, port: u16) -> String {
    let made = server.post("/v1/tickets", &json!({ "port": port })).json();
    assert_eq!(made["port"], port);
    let path = made["path"].as_str().unwrap();
    let secret = path.strip_prefix("/t/").unwrap().strip_suffix('/').unwrap();
    assert!(
        secret.len() == 64 && secret.bytes().all(|byte| byte.is_ascii_hexdigit()),
        "{path}"
    );
    path.trim_end_matches('/').to_owned()
}

fn stranger(server: &Server) -> Connection {
    let mut connection = server.connect();
    connection.token = None;
    connection
}

#[track_caller]
fn get(server: &Server, target: &str, headers: &[(&str, &str)]) -> Reply {
    stranger(server).request("GET", target, headers, b"")
}

/// All values of a field of an answer.
fn values<'r>(reply: &'r Reply, name: &str) -> Vec<&'r str> {
    let fields = reply.headers.iter();
    let named = fields.filter(|(other, _)| other.eq_ignore_ascii_case(name));
    named.map(|(_, value)| &**value).collect()
}

/// Whether a browser gives the page an origin of its own.
#[track_caller]
fn assert_apart(reply: &Reply) {
    assert!(values(reply, "content-security-policy").contains(&POLICY));
    assert_eq!(values(reply, "access-control-allow-origin"), ["*"]);
    assert_eq!(values(reply, "referrer-policy"), ["no-referrer"]);
}

#[test]
fn a_ticket_leads_to_its_port_without_a_token() {
    let server = Server::start();
    let backend = Backend::saying("hello");
    let path = ticket_for(&server, backend.port);
    let reply = get(
        &server,
        &format!("{path}/a%2Fb?c=d"),
        &[
            ("Cookie", "a=b"),
            ("X-Sandbox-Token", "x"),
            ("Authorization", "Bearer y"),
        ],
    );
    assert_eq!((reply.status, &*reply.text()), (200, "hello"));
    assert_apart(&reply);
    let received = backend.next();
    assert_eq!(received.line(), "GET /a%2Fb?c=d HTTP/1.1");
    for name in ["cookie", "authorization", "x-sandbox-token"] {
        assert!(received.values(name).is_empty(), "{name}");
    }
    assert_eq!(received.value("x-forwarded-prefix"), path);
    // Any method, with its body.
    let mut connection = stranger(&server);
    let reply = connection.request("PATCH", &format!("{path}/"), &[], b"body");
    assert_eq!(reply.status, 200);
    let received = backend.next();
    assert_eq!(
        (received.line(), &*received.body),
        ("PATCH / HTTP/1.1", &b"body"[..])
    );
    // The links of the page begin at the slash.
    let reply = get(&server, &format!("{path}?q=1"), &[]);
    assert_eq!(
        (reply.status, reply.header("location")),
        (308, Some(&*format!("{path}/?q=1")))
    );
    backend.expect_nothing();
}

#[test]
fn what_is_no_ticket_leads_nowhere() {
    let server = Server::start();
    let backend = Backend::saying("hello");
    let path = ticket_for(&server, backend.port);
    let longer = format!("{path}0/");
    let upper = path.to_uppercase().replace("/T/", "/t/");
    let zeros = format!("/t/{}/", "0".repeat(64));
    for target in [
        "/t/",
        "/t//",
        "/t/x",
        &longer,
        &path[..66],
        &upper,
        &zeros,
        "/t/%00/",
    ] {
        let reply = get(&server, target, &[]);
        assert_error(&reply, 404, "not_found");
        assert_apart(&reply);
    }
    // A token opens none.
    assert_error(&server.get("/t/x/"), 404, "not_found");
    assert_error(&get(&server, "/t", &[]), 403, "forbidden");
    backend.expect_nothing();
}

#[test]
fn making_one_needs_a_token_and_a_port() {
    let server = Server::start();
    let reply = stranger(&server).request("POST", "/v1/tickets", &[], br#"{"port":80}"#);
    assert_error(&reply, 403, "forbidden");
    for (body, part) in [
        (json!({}), "port is missing"),
        (json!({ "port": null }), "port"),
        (json!({ "port": [80] }), "a whole number or a name"),
        (json!({ "port": 0 }), "0"),
        (json!({ "port": 65536 }), "65536"),
        (json!({ "port": 80.5 }), "a whole number"),
        (json!({ "port": -80 }), "a whole number"),
        (json!({ "port": "../x" }), "../x"),
    ] {
        let reply = server.post("/v1/tickets", &body);
        assert_error(&reply, 400, "bad_request");
        assert!(reply.text().contains(part), "{}", reply.text());
    }
    assert_error(&server.get("/v1/tickets"), 405, "method_not_allowed");
    let reply = server.request("POST", "/v1/tickets?port=80", br#"{"port":80}"#);
    assert_error(&reply, 400, "bad_request");
}

#[test]
fn there_are_so_many_tickets_and_no_more() {
    let server = Server::start();
    for _ in 0..64 {
        ticket_for(&server, 8000);
    }
    let reply = server.post("/v1/tickets", &json!({ "port": 8000 }));
    assert_error(&reply, 503, "over_limit");
}

#[test]
fn nothing_that_a_hostile_server_says_is_about_the_whole_address() {
    let server = Server::start();
    let backend = Backend::answering(
        "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nSet-Cookie: a=b; Path=/\r\nset-cookie: c=d\r\n\
         Service-Worker-Allowed: /\r\nCross-Origin-Opener-Policy: unsafe-none\r\nClear-Site-Data: \"*\"\r\n\
         Strict-Transport-Security: max-age=1\r\nAlt-Svc: h3=\":1\"\r\nReferrer-Policy: unsafe-url\r\n\
         Access-Control-Allow-Origin: https://evil.example\r\nAccess-Control-Allow-Credentials: true\r\n\
         Content-Security-Policy: sandbox allow-same-origin allow-scripts\r\nX-Kept: 1\r\nContent-Length: 2\r\n\r\nok",
    );
    let reply = get(
        &server,
        &format!("{}/", ticket_for(&server, backend.port)),
        &[],
    );
    assert_eq!(reply.status, 200);
    assert_apart(&reply);
    // Policies add up: a page has what all of them allow.
    assert_eq!(values(&reply, "content-security-policy").len(), 2);
    assert_eq!(values(&reply, "x-kept"), ["1"]);
    for name in [
        "set-cookie",
        "service-worker-allowed",
        "cross-origin-opener-policy",
        "clear-site-data",
        "strict-transport-security",
        "alt-svc",
        "access-control-allow-credentials",
    ] {
        assert!(values(&reply, name).is_empty(), "{name}");
    }
    // Below proxy/, where a client sends a token, what is about the answer alone passes.
    let reply = server.get(&backend.path("/"));
    assert_eq!(values(&reply, "set-cookie").len(), 2);
    assert_eq!(values(&reply, "content-security-policy").len(), 2);
    assert_eq!(values(&reply, "referrer-policy"), ["unsafe-url"]);
    assert_eq!(
        values(&reply, "access-control-allow-origin"),
        ["https://evil.example"]
    );
}

#[test]
fn redirects_stay_where_the_browser_finds_the_server() {
    let server = Server::start();
    let backend = Backend::start(|mut connection: Accepted| {
        while let Some(request) = connection.read_request() {
            let to = request.line().split(' ').nth(1).unwrap();
            let to = to.strip_prefix("/to?").unwrap_or_default().to_owned();
            connection.send(format!(
                "HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n"
            ));
        }
    });
    let path = ticket_for(&server, backend.port);
    let own = format!("http://localhost:{}", backend.port);
    for (location, expected) in [
        ("/login?a=b", format!("{path}/login?a=b")),
        ("/", format!("{path}/")),
        ("next", "next".to_owned()),
        (&*format!("{path}/known"), format!("{path}/known")),
        (&*format!("{own}{path}/known"), format!("{path}/known")),
        (&*format!("{path}known"), format!("{path}{path}known")),
        ("?q", "?q".to_owned()),
        ("//evil.example/", "//evil.example/".to_owned()),
        ("/\\evil.example/", "/\\evil.example/".to_owned()),
        ("https://example.org/x", "https://example.org/x".to_owned()),
        (&*format!("{own}/here"), format!("{path}/here")),
        (&*own, path.clone()),
        (&*format!("{own}0/"), format!("{own}0/")),
        (
            &*format!("{own}.evil.example/"),
            format!("{own}.evil.example/"),
        ),
    ] {
        let reply = get(&server, &format!("{path}/to?{location}"), &[]);
        assert_eq!(
            (reply.status, reply.header("location")),
            (302, Some(&*expected)),
            "{location}"
        );
        assert_apart(&reply);
    }
}

#[test]
fn pages_of_the_server_may_ask_it() {
    let server = Server::start();
    let backend = Backend::saying("hello");
    let target = format!("{}/api", ticket_for(&server, backend.port));
    let mut page = stranger(&server);
    let asking = [
        ("Origin", "null"),
        ("Access-Control-Request-Method", "PUT"),
        ("Access-Control-Request-Headers", "content-type, x-own"),
    ];
    let reply = page.request("OPTIONS", &target, &asking, b"");
    assert_eq!(reply.status, 204);
    assert_apart(&reply);
    assert!(values(&reply, "access-control-allow-methods")[0].contains("PUT"));
    assert!(values(&reply, "access-control-allow-headers")[0].contains("x-own"));
    backend.expect_nothing();
    // Without those fields it is a request for the server.
    assert_eq!(page.request("OPTIONS", &target, &[], b"").status, 200);
    assert_eq!(backend.next().line(), "OPTIONS /api HTTP/1.1");
    let reply = get(&server, &target, &[("Origin", "null")]);
    assert_eq!(reply.text(), "hello");
    assert_apart(&reply);
    assert_eq!(backend.next().value("origin"), "null");
}

#[test]
fn an_upgrade_goes_through_a_ticket() {
    let server = Server::start();
    let backend = Backend::start(|mut connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\nConnection: Upgrade\r\nSet-Cookie: a=b\r\n\r\n");
            while connection.fill() {
                let bytes = std::mem::take(&mut connection.buffer);
                connection.send(bytes);
            }
        }
    });
    let mut page = stranger(&server);
    let headers = [
        ("Connection", "Upgrade"),
        ("Upgrade", "echo"),
        ("Origin", "null"),
    ];
    page.send_request(
        "GET",
        &format!("{}/ws", ticket_for(&server, backend.port)),
        &headers,
        b"",
    );
    let head = page.read_head();
    assert_eq!(head.status, 101);
    assert!(values(&head, "set-cookie").is_empty());
    page.send(b"ping");
    assert_eq!(page.read_exactly(4), b"ping");
}

#[test]
fn a_port_where_nothing_listens_is_an_error_that_is_apart_too() {
    let server = Server::start();
    let silent = crate::proxy::SilentPort::new();
    let reply = get(
        &server,
        &format!("{}/", ticket_for(&server, silent.port)),
        &[],
    );
    assert_error(&reply, 502, "unreachable");
    assert_apart(&reply);
}

#[test]
fn a_ticket_of_a_sandbox_ends_with_it() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().start();
    let (sandbox, other) = (server.sandbox(), server.sandbox());
    if !serve_in(&sandbox, "web") || !serve_in(&other, "web") {
        skip!("there is no Python for programs in sandboxes");
    }
    let ticket = |body: &Value| sandbox.post("tickets", body);
    let made = ticket(&json!({ "port": "web" })).json();
    assert_eq!(made["port"], "web");
    let path = made["path"].as_str().unwrap();
    let reply = get(&server, path, &[]);
    assert!(
        reply.text().starts_with(&format!("from {}\n", sandbox.id)),
        "{}",
        reply.text()
    );
    assert_apart(&reply);
    // The token of one opens no ticket of another, and a machine's route is not there.
    let mut connection = server.connect();
    connection.token = Some(sandbox.token.clone());
    let reply = connection.request("POST", &other.target("tickets"), &[], br#"{"port":"web"}"#);
    assert_error(&reply, 403, "forbidden");
    assert_error(
        &server.post("/v1/tickets", &json!({ "port": 80 })),
        404,
        "not_found",
    );

    // A connection that is open ends with the sandbox as well. (A request that comes after the deletion is refused, and
    // would keep its connection.)
    let mut open = stranger(&server);
    open.send_request("POST", path, &[("Connection", "close")], b"for ever");
    let path = path.to_owned();
    let waiting = std::thread::spawn(move || open.read_to_close());
    sandbox.delete();
    waiting.join().unwrap();
    let reply = get(&server, &path, &[]);
    assert_error(&reply, 404, "not_found");
    assert_apart(&reply);
}

#[test]
fn a_ticket_of_a_sandbox_that_rests_says_so_or_has_it_run() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    if !serve_in(&sandbox, "web") {
        skip!("python3 is not installed");
    }
    let made = sandbox.post("tickets", &json!({ "port": "web" })).json();
    let path = made["path"].as_str().unwrap();
    assert_eq!(get(&server, path, &[]).status, 200);
    let of_sandbox = |rest: &str| format!("/v1/sandboxes/{}{rest}", sandbox.id);
    assert_eq!(server.post(&of_sandbox("/pause"), &json!({})).status, 200);
    assert_error(&get(&server, path, &[]), 409, "paused");
    let body = json!({ "auto_resume": true }).to_string();
    let changed = server.request("PATCH", &of_sandbox(""), body.as_bytes());
    assert_eq!(changed.status, 200, "{}", changed.text());
    assert_eq!(get(&server, path, &[]).status, 200);
    assert_eq!(server.get(&of_sandbox("")).json()["state"], "running");
}
