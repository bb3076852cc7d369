//! JSON answers end with a newline, the end of a wait is an exit event, and what the HTTP parser
//! refuses is counted.

use serde_json::json;

use crate::fixture::{PATIENCE, Server, TempDir, wait_until};

#[test]
#[allow(clippy::too_many_lines, reason = "it is a list")]
fn json_answers_end_with_a_newline() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.path().display();
    std::fs::write(dir.join("file"), "text").unwrap();
    let process = server.spawn(&json!({"cmd": "true"}));
    let one = format!("/v1/processes/{}", process["id"].as_str().unwrap());
    for (method, target, body) in [
        ("GET", "/health", ""),
        ("GET", "/openapi.json", ""),
        ("GET", "/v1/processes", ""),
        ("GET", &one, ""),
        ("GET", &format!("{one}/wait"), ""),
        ("GET", &format!("{one}/logs"), ""),
        ("POST", "/v1/exec", r#"{"cmd":"echo hi"}"#),
        ("POST", "/v1/processes", r#"{"cmd":"true"}"#),
        (
            "POST",
            "/v1/processes",
            r#"{"cmd":"sleep 1000","pty":true,"id":"terminal"}"#,
        ),
        (
            "POST",
            "/v1/processes/terminal/resize",
            r#"{"rows":9,"cols":9}"#,
        ),
        ("GET", "/v1/processes/terminal/attach", ""),
        ("GET", &format!("/v1/files/list?path={path}"), ""),
        ("GET", &format!("/v1/files/stat?path={path}"), ""),
        ("GET", &format!("/v1/files/glob?path={path}"), ""),
        (
            "POST",
            &format!("/v1/files/patch?path={path}"),
            "diff --git a/made b/made\nnew file mode 100644\n",
        ),
        (
            "POST",
            "/v1/files/grep",
            &format!(r#"{{"pattern":"x","path":"{path}"}}"#),
        ),
        (
            "POST",
            "/v1/files/edit",
            &format!(r#"{{"path":"{path}/new","edits":[{{"old":"","new":"x"}}]}}"#),
        ),
        (
            "GET",
            &format!("/v1/files/stat?path={path}/file&hash=sha256"),
            "",
        ),
        ("POST", "/v1/files/hash", r#"{"paths":["/dev/null"]}"#),
        (
            "POST",
            "/v1/files/compare",
            &format!(r#"{{"path":"{path}","entries":[{{"path":"x","size":1}}]}}"#),
        ),
        (
            "POST",
            &format!("/v1/files/copy?from={path}/file&to={path}/copy"),
            "",
        ),
        (
            "POST",
            &format!("/v1/files/chmod?path={path}/file&mode=600"),
            "",
        ),
        (
            "POST",
            "/v1/files/watches",
            &format!(r#"{{"path":"{path}","id":"mine"}}"#),
        ),
        ("GET", "/v1/files/watches/mine/events", ""),
        ("DELETE", "/v1/files/watches/mine", ""),
        ("GET", "/v1/languages", ""),
        ("POST", "/v1/contexts", r#"{"language":"bash","id":"mine"}"#),
        ("GET", "/v1/contexts", ""),
        ("GET", "/v1/contexts/mine", ""),
        (
            "POST",
            "/v1/contexts/mine/execute",
            r#"{"code":"true","id":"first"}"#,
        ),
        ("POST", "/v1/contexts/mine/interrupt", ""),
        ("POST", "/v1/contexts/mine/input", r#"{"value":"x"}"#),
        ("GET", "/v1/contexts/mine/executions", ""),
        ("GET", "/v1/contexts/mine/executions/first", ""),
        ("GET", "/v1/contexts/mine/executions/first/events", ""),
        ("GET", "/v1/contexts/mine/logs", ""),
        ("POST", "/v1/contexts/mine/restart", ""),
        ("DELETE", "/v1/contexts/mine", ""),
        ("POST", "/v1/execute", r#"{"code":"1","language":"cobol"}"#),
        ("POST", "/execute", r#"{"code":"1","language":"cobol"}"#),
        ("POST", "/v1/exec", r#"{"code":"true","language":"bash"}"#),
        ("GET", "/v1/network", ""),
        ("GET", "/v1/venv", ""),
        ("POST", "/v1/venv", &format!(r#"{{"path":"{path}/venv"}}"#)),
        ("GET", "/v1/venv", ""),
        ("GET", "/v1/ports", ""),
        (
            "GET",
            &format!("/v1/ports/{}/wait?timeout=0", server.address.port()),
            "",
        ),
        ("GET", "/v1/nope", ""),
        ("GET", "/v1/exec", ""),
    ] {
        let reply = server.request(method, target, body.as_bytes());
        let text = reply.text();
        assert!(
            text.ends_with('\n') && !text.ends_with("\n\n"),
            "{target}: {text:?}"
        );
        let kind = reply.header("content-type").unwrap();
        if kind == "application/json" {
            reply.json();
            assert_eq!(
                text.lines().count() == 1,
                target != "/openapi.json",
                "{text}"
            );
        }
    }
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
