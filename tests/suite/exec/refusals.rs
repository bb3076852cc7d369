//! What is refused: every wrong field with a 400 that names it, every command that cannot start with
//! a code that says why, before any stream and without a trace; running out of something passes.

use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use super::{text_of, write_file, write_program};
use crate::fixture::{
    Connection, Mark, Outcome, PATIENCE, Server, TempDir, descendants_of, events_of, wait_until,
};
use crate::skip;

/// What may be said of a command that is longer than the kernel takes.
const TOO_LONG: [&str; 4] = ["bad_request", "not_found", "not_executable", "bad_cwd"];

/// Asserts a 400 whose text names the field, and that the connection goes on.
#[track_caller]
fn refused(connection: &mut Connection, body: &str, field: &str) {
    let reply = connection.request("POST", "/v1/exec", &[], body.as_bytes());
    assert_eq!(reply.status, 400, "{body:.200}: {}", reply.text());
    let error = reply.json();
    assert!(
        error["error"].as_str().unwrap().contains(field),
        "{body:.200}: {error} does not name {field}"
    );
    assert!(error["code"].is_string(), "{error}");
    let reply = connection.request("POST", "/v1/processes", &[], body.as_bytes());
    assert_eq!(
        reply.status,
        400,
        "as a process: {body:.200}: {}",
        reply.text()
    );
}

#[test]
fn every_wrong_type_is_a_400_that_names_the_field() {
    let server = Server::start();
    let mut connection = server.connect();
    for cmd in [
        "null",
        "\"\"",
        "[]",
        "[1]",
        "[\"echo\", null]",
        "[[\"a\"]]",
        "{\"a\": 1}",
        "1",
        "true",
        "\"a\\u0000b\"",
        "[\"echo\", \"a\\u0000b\"]",
    ] {
        refused(&mut connection, &format!("{{\"cmd\": {cmd}}}"), "cmd");
    }
    refused(&mut connection, "{}", "cmd");
    refused(&mut connection, "{\"Cmd\": \"true\"}", "cmd");
    for (field, values) in [
        ("shell", &["\"yes\"", "1", "[]", "{}"][..]),
        (
            "env",
            &[
                "\"A=1\"",
                "1",
                "true",
                "[]",
                "[\"A=1\"]",
                "{\"A\": []}",
                "{\"A\": {}}",
                "{\"A\": \"x\\u0000\"}",
                "{\"\": \"x\"}",
                "{\"A=B\": \"x\"}",
                "{\"A\\u0000\": \"x\"}",
            ],
        ),
        (
            "cwd",
            &["1", "true", "[]", "{}", "[\"/\"]", "\"/tmp\\u0000\""],
        ),
        (
            "timeout",
            &["\"5\"", "true", "[]", "{}", "0", "0.0", "-1", "-0.5"],
        ),
        ("stdin", &["1", "true", "[]", "{}", "[\"a\"]"]),
        ("background", &["\"yes\"", "1", "0", "[]", "{}"]),
        ("pty", &["\"yes\"", "1", "[]"]),
        ("tag", &["1", "true", "[]", "{}"]),
        ("encoding", &["\"latin1\"", "\"\"", "1", "true", "[]", "{}"]),
        (
            "on_disconnect",
            &["\"ignore\"", "\"\"", "1", "true", "[]", "{}"],
        ),
    ] {
        for value in values {
            refused(
                &mut connection,
                &format!("{{\"cmd\": \"true\", \"{field}\": {value}}}"),
                field,
            );
        }
    }
    let long = format!("\"{}\"", "x".repeat(65));
    for id in [
        "1",
        "true",
        "[]",
        "{}",
        "\"\"",
        "\"a b\"",
        "\"a/b\"",
        "\"é\"",
        "\"a\\u0000\"",
        "\"123\"",
        "\"p-1\"",
        "\"p-99999999999999999999\"",
        &long,
    ] {
        refused(
            &mut connection,
            &format!("{{\"cmd\": \"true\", \"id\": {id}}}"),
            "id",
        );
    }
    assert_eq!(
        server.get("/v1/processes").json(),
        json!([]),
        "nothing was started"
    );
}

#[test]
fn shell_must_agree_with_the_kind_of_command() {
    let server = Server::start();
    let mut connection = server.connect();
    refused(
        &mut connection,
        "{\"cmd\": \"true\", \"shell\": false}",
        "shell",
    );
    refused(
        &mut connection,
        "{\"cmd\": [\"true\"], \"shell\": true}",
        "shell",
    );
}

#[test]
fn bodies_that_are_not_an_object_are_refused() {
    let server = Server::start();
    let mut connection = server.connect();
    let deep = "[".repeat(100_000);
    let deep_field = format!(
        "{{\"cmd\": \"true\", \"env\": {}",
        "{\"a\":".repeat(100_000)
    );
    // What is not looked at need not be refused, but must not be a crash either.
    let deep_unknown = format!(
        "{{\"cmd\": \"true\", \"x\": {}{}}}",
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    for body in [
        "",
        " ",
        "null",
        "true",
        "1",
        "\"true\"",
        "[]",
        "[\"cmd\"]",
        "{",
        "{\"cmd\": \"true\"",
        "{\"cmd\": \"true\"} x",
        "{\"cmd\": \"true\"}{\"cmd\": \"true\"}",
        "{'cmd': 'true'}",
        "{\"cmd\": \"\\ud800\"}",
        "{\"cmd\": \"true\",}",
        "{\"cmd\": \"true\", \"timeout\": NaN}",
        "{\"cmd\": \"true\", \"timeout\": Infinity}",
        "cmd=true",
        &deep,
        &deep_field,
    ] {
        let reply = connection.request("POST", "/v1/exec", &[], body.as_bytes());
        assert_eq!(reply.status, 400, "{body:.80}: {}", reply.text());
        assert!(reply.json()["error"].is_string());
    }
    let reply = connection.request("POST", "/v1/exec", &[], b"{\"cmd\": \"echo \xff\"}");
    assert_eq!(reply.status, 400, "not UTF-8: {}", reply.text());
    assert_eq!(
        server.get("/v1/processes").json(),
        json!([]),
        "nothing was started"
    );
    let reply = connection.request("POST", "/v1/exec", &[], deep_unknown.as_bytes());
    assert!(matches!(reply.status, 200 | 400), "{}", reply.text());
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
}

#[test]
fn numbers_beyond_any_clock_are_no_crash() {
    let server = Server::start();
    for timeout in [
        "1e300",
        "1e999",
        "1e-300",
        "99999999999999999999999999",
        "9223372036854775808",
    ] {
        let body = format!("{{\"cmd\": \"echo ok\", \"timeout\": {timeout}}}");
        let reply = server.request("POST", "/v1/exec", body.as_bytes());
        // Far away is as good as never; what cannot be represented may be refused instead.
        assert!(
            matches!(reply.status, 200 | 400),
            "{timeout}: {} {}",
            reply.status,
            reply.text()
        );
        if reply.status == 200 && timeout != "1e-300" {
            assert_eq!(
                Outcome::of(events_of(&reply.body)).stdout,
                "ok\n",
                "{timeout}"
            );
        }
    }
}

#[test]
fn unknown_fields_are_ignored_and_null_is_absent() {
    let server = Server::start();
    let outcome =
        server.exec(&json!({"cmd": "echo hi", "frobnicate": [1, {"a": null}], "": 1, "Env": 3}));
    assert_eq!(outcome.stdout, "hi\n");
    let outcome = server.exec(&json!({
        "cmd": "echo hi", "shell": null, "env": null, "cwd": null, "timeout": null, "stdin": null, "background": null,
        "tag": null, "encoding": null, "on_disconnect": null, "id": null, "pty": null,
    }));
    assert_eq!(outcome.stdout, "hi\n");
}

/// Asserts that a command does not start, on both routes, with this code and no trace.
#[track_caller]
fn cannot_start(server: &Server, body: &Value, codes: &[&str]) {
    for route in ["/v1/exec", "/v1/processes"] {
        let reply = server.post(route, body);
        assert_eq!(reply.status, 400, "{body}: {}", reply.text());
        assert!(
            codes.contains(&reply.code().as_str()),
            "{body}: {} is none of {codes:?}",
            reply.text()
        );
    }
}

#[test]
fn a_command_that_cannot_start_is_a_400_with_a_code() {
    let server = Server::start();
    let directory = TempDir::new();
    let plain = write_file(&directory, "plain", "echo hi\n");
    let not_a_program = write_program(&directory, "garbage", "\u{1}\u{2}\u{3}");
    let lost_interpreter = write_program(&directory, "lost", "#!/nonexistent/interpreter\n");
    std::os::unix::fs::symlink("/nonexistent", directory.path().join("dangling")).unwrap();
    std::os::unix::fs::symlink("loop", directory.path().join("loop")).unwrap();

    cannot_start(
        &server,
        &json!({"cmd": ["no-such-program-here"]}),
        &["not_found"],
    );
    cannot_start(
        &server,
        &json!({"cmd": ["/nonexistent/program"]}),
        &["not_found"],
    );
    cannot_start(
        &server,
        &json!({"cmd": ["", "x"]}),
        &["not_found", "bad_request"],
    );
    cannot_start(
        &server,
        &json!({"cmd": [directory.join("dangling")]}),
        &["not_found"],
    );
    cannot_start(&server, &json!({"cmd": [lost_interpreter]}), &["not_found"]);
    cannot_start(
        &server,
        &json!({"cmd": [format!("{plain}/below")]}),
        &["not_found"],
    );
    cannot_start(&server, &json!({"cmd": [plain]}), &["not_executable"]);
    cannot_start(
        &server,
        &json!({"cmd": [not_a_program]}),
        &["not_executable"],
    );
    cannot_start(
        &server,
        &json!({"cmd": [directory.path()]}),
        &["not_executable"],
    );
    cannot_start(
        &server,
        &json!({"cmd": ["plain"], "env": {"PATH": directory.path()}}),
        &["not_executable"],
    );
    for cwd in [
        "/nonexistent".to_owned(),
        plain.clone(),
        directory.join("loop"),
        directory.join("dangling"),
        format!("{plain}/x"),
    ] {
        cannot_start(&server, &json!({"cmd": "true", "cwd": cwd}), &["bad_cwd"]);
    }
    // More than the kernel takes as arguments is an answer too.
    cannot_start(
        &server,
        &json!({"cmd": ["true", "x".repeat(300_000)]}),
        &TOO_LONG,
    );
    cannot_start(&server, &json!({"cmd": ["x".repeat(300_000)]}), &TOO_LONG);
    cannot_start(
        &server,
        &json!({"cmd": "true", "cwd": "x/".repeat(5000)}),
        &TOO_LONG,
    );

    assert_eq!(
        server.get("/v1/processes").json(),
        json!([]),
        "none of them is in the registry"
    );
    assert_eq!(
        descendants_of(server.pid())
            .iter()
            .filter(|process| process.state == 'Z')
            .count(),
        0
    );

    // The text says what was tried, so that a user can act.
    let reply = server.post("/v1/exec", &json!({"cmd": ["no-such-program-here"]}));
    assert!(
        reply.text().contains("no-such-program-here"),
        "{}",
        reply.text()
    );
    let reply = server.post("/v1/exec", &json!({"cmd": "true", "cwd": "/nonexistent"}));
    assert!(reply.text().contains("/nonexistent"), "{}", reply.text());
}

/// The words that run a program as a user that nobody else is, with limits of `prlimit`.
fn as_nobody_else(uid: &str, limit: &str) -> Vec<String> {
    let words = [
        "prlimit",
        limit,
        "setpriv",
        "--reuid",
        uid,
        "--regid",
        uid,
        "--clear-groups",
    ];
    words.map(str::to_owned).to_vec()
}

fn can_run_as(words: &[String]) -> bool {
    std::process::Command::new(&words[0])
        .args(&words[1..])
        .args([crate::fixture::BINARY, "--version"])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

#[test]
fn what_may_not_be_reached_is_refused_with_a_code() {
    let words = as_nobody_else("54320", "--core=0");
    if !can_run_as(&words) {
        skip!("cannot run the server as another user");
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let server = Server::builder().wrapped_in(&words).start();
    let directory = TempDir::new();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let program = write_program(&directory, "tool", "#!/bin/sh\n");
    cannot_start(
        &server,
        &json!({"cmd": [program]}),
        &["permission", "not_executable"],
    );
    cannot_start(
        &server,
        &json!({"cmd": "true", "cwd": directory.path()}),
        &["permission", "bad_cwd"],
    );
    assert_eq!(
        server
            .exec(&json!({"cmd": ["id", "-u"], "cwd": "/"}))
            .stdout,
        "54320\n"
    );
}

/// Starts sleepers until one is refused, checks the refusal, and that all is well again after.
fn exhaust(server: &Server, mark: &Mark, accepted: &[(u16, &str)]) {
    let mut ids = Vec::new();
    let refusal = loop {
        assert!(ids.len() < 300, "the limit was never met");
        let reply = server.post(
            "/v1/processes",
            &json!({"cmd": ["sleep", mark.to_string()]}),
        );
        if reply.status != 200 {
            break reply;
        }
        ids.push(reply.json()["id"].as_str().unwrap().to_owned());
    };
    assert!(ids.len() > 3, "only {} could run", ids.len());
    let seen = (refusal.status, refusal.code());
    assert!(
        accepted
            .iter()
            .any(|(status, code)| seen == (*status, (*code).to_owned())),
        "{seen:?}: {}",
        refusal.text()
    );
    for id in ids {
        wait_until("a process can be deleted", PATIENCE, || {
            server.delete(&format!("/v1/processes/{id}")).status == 200
        });
    }
    mark.wait_gone(PATIENCE);
    wait_until("commands run again", PATIENCE, || {
        let reply = server.post("/v1/exec", &json!({"cmd": "echo again | cat"}));
        reply.status == 200 && text_of(&reply.body).0 == "again\n"
    });
}

#[test]
fn running_out_of_processes_is_a_clear_error_that_passes() {
    let words = as_nobody_else("54321", "--nproc=40");
    if !can_run_as(&words) {
        skip!("cannot run the server as another user");
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let server = Server::builder().wrapped_in(&words).start();
    let mark = Mark::new();
    exhaust(
        &server,
        &mark,
        &[(400, "no_resources"), (503, "no_threads")],
    );
}

#[test]
fn running_out_of_descriptors_is_a_clear_error_that_passes() {
    let server = Server::builder()
        .wrapped_in(&["prlimit", "--nofile=64:64"])
        .start();
    let mark = Mark::new();
    exhaust(
        &server,
        &mark,
        &[
            (400, "no_resources"),
            (500, "internal"),
            (503, "too_many_connections"),
        ],
    );
}
