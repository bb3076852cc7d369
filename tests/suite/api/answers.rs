//! JSON answers end with a newline, the end of a wait is an exit event, and what the HTTP parser
//! refuses is counted.

use serde_json::json;

use crate::fixture::{
    Answer, PATIENCE, ReservedPort, Server, Subjects, TempDir, assert_error, events_of, routes,
    wait_until,
};

/// What a route of the table answers where it cannot do what it is for, by the row's pattern.
const REFUSALS: [(&str, u16, &str); 3] = [
    ("processes/{process}/attach", 426, "upgrade_required"),
    ("proxy/{port}/{path}", 502, "unreachable"),
    ("contexts/{context}/input", 409, "not_asked"),
];

#[test]
fn every_route_does_what_it_is_for_and_its_json_ends_with_a_newline() {
    let server = Server::start();
    let dir = TempDir::new();
    let closed = ReservedPort::new();
    let names =
        Subjects::below(dir.path().to_str().unwrap()).with("port", &closed.number().to_string());
    for route in routes().filter(|route| route.answer != Answer::Endless) {
        std::fs::write(dir.join("kept"), "kept\n").unwrap();
        let ask = route.ask("/v1", &names);
        let reply = ask.send(&mut server.connect());
        let text = reply.text();
        match REFUSALS
            .iter()
            .find(|(pattern, ..)| *pattern == route.pattern)
        {
            Some((_, status, code)) => assert_error(&reply, *status, code),
            None => assert!((200..300).contains(&reply.status), "{ask:?}: {text}"),
        }
        let kind = reply.header("content-type").unwrap();
        match route.answer {
            Answer::Json => {
                assert_eq!(kind, "application/json", "{ask:?}");
                reply.json();
                check_line(&text);
            }
            Answer::Events => {
                assert_eq!(kind, "application/x-ndjson", "{ask:?}");
                // A watch may have nothing to tell.
                let count = events_of(&reply.body).len();
                assert_eq!(text.lines().count(), count, "{text:?}");
            }
            Answer::Bytes | Answer::Endless => {}
        }
    }
    for target in ["/health", "/v1/access", "/v1/nope", "/v1/exec"] {
        check_line(&server.get(target).text());
    }
    let contract = server.get("/openapi.json");
    contract.json();
    assert!(contract.text().ends_with("}\n"));
}

#[track_caller]
fn check_line(text: &str) {
    assert!(text.ends_with('\n'), "{text:?}");
    assert_eq!(text.lines().count(), 1, "{text:?}");
}

#[test]
fn a_wait_ends_with_an_exit_event_that_is_also_the_process() {
    let server = Server::builder().env("SBX_PING_SECS", 1).start();
    let process = server.spawn(&json!({"cmd": "sleep 1.5; exit 3", "tag": "mine"}));
    let wait = format!("/v1/processes/{}/wait", process["id"].as_str().unwrap());
    let running = server.get(&format!("{wait}?timeout=0")).json();
    assert_eq!(running["event"], "running");
    assert_eq!(running["running"], true);
    assert!(running["timed_out"].is_null() && running["duration_ms"].is_null());
    let reply = server.get(&wait);
    assert!(reply.body.starts_with(b" "), "a ping came before the end");
    let ended = reply.json();
    for (field, value) in [
        ("event", json!("exit")),
        ("id", process["id"].clone()),
        ("pid", process["pid"].clone()),
        ("tag", json!("mine")),
        ("running", json!(false)),
        ("exit_code", json!(3)),
        ("signal", json!(null)),
        ("reason", json!("exited")),
        ("timed_out", json!(false)),
    ] {
        assert_eq!(ended[field], value, "{field}");
    }
    assert!(ended["duration_ms"].as_u64().unwrap() >= 1500, "{ended}");
    assert!(ended["stdout_bytes"].is_u64());
}

#[test]
fn a_wait_tells_a_timeout_of_the_command() {
    let server = Server::start();
    for family in ["processes", "procs"] {
        let process = server.spawn(&json!({"cmd": "sleep 1000", "timeout": 0.2}));
        let wait = format!("/v1/{family}/{}/wait", process["id"].as_str().unwrap());
        let ended = server.request("POST", &wait, b"").json();
        assert_eq!(ended["event"], "exit");
        assert_eq!(ended["timed_out"], true);
        assert_eq!(ended["reason"], "timeout");
    }
}

#[test]
fn requests_that_the_parser_refuses_are_counted() {
    let server = Server::start();
    let long = format!(
        "GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "x".repeat(17_000)
    );
    for (request, status) in [
        ("nonsense\r\n\r\n", 400),
        (long.as_str(), 414),
        (
            "PUT / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nExpect: x\r\n\r\n",
            417,
        ),
    ] {
        let mut connection = server.connect();
        connection.send(request.as_bytes());
        assert_eq!(connection.read_reply().status, status);
        let line = format!("sbx_requests_total{{route=\"none\",status=\"{status}\"}} 1");
        wait_until(&line, PATIENCE, || {
            server.get("/v1/metrics").text().contains(&line)
        });
    }
}
