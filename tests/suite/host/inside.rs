//! In a sandbox everything about commands is as on a machine of one's own, and no sandbox's
//! processes are another's.

use std::time::Duration;

use serde_json::{Value, json};

use super::needs_root;
use crate::fixture::{
    Mark, PATIENCE, Sandbox, Server, assert_error, events_of, is_alive, numbered_text, output_of,
    pid_of, reset, wait_until,
};

fn route(process: &Value, rest: &str) -> String {
    format!("processes/{}{rest}", process["id"].as_str().unwrap())
}

#[track_caller]
fn wait(sandbox: &Sandbox<'_>, process: &Value) -> Value {
    let reply = sandbox.get(&route(process, "/wait"));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

#[test]
fn output_arrives_while_the_command_runs() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let mut stream = sandbox.exec_stream(&json!({
        "cmd": "mkfifo gate; echo before; echo aside >&2; read line < gate; echo $line; exit 3"
    }));
    assert_eq!(stream.next_output().unwrap()["event"], "start");
    let mut seen = [stream.next_output().unwrap(), stream.next_output().unwrap()];
    seen.sort_by_key(|event| event["event"].to_string());
    assert_eq!(
        (&seen[0]["data"], &seen[1]["data"]),
        (&json!("aside\n"), &json!("before\n"))
    );
    sandbox.sh("echo after > gate");
    assert_eq!(stream.next_output().unwrap()["data"], "after\n");
    let exit = stream.next_output().unwrap();
    assert_eq!(
        (&exit["exit_code"], &exit["reason"]),
        (&json!(3), &json!("exited"))
    );
    assert!(stream.next().is_none());
}

#[test]
fn bytes_pass_through_a_command_unchanged() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let text = format!("é\u{85}\u{2028}{}", numbered_text(3_000_000));
    let outcome = sandbox.exec(&json!({"cmd": ["cat"], "stdin": text}));
    assert!(outcome.stdout == text, "{} bytes", outcome.stdout.len());
    let binary = json!({"cmd": "printf '\\377\\000\\001'", "encoding": "base64"});
    let events: Vec<Value> = sandbox.exec_stream(&binary).collect();
    assert_eq!(output_of(&events, "stdout", 0).data, [255, 0, 1]);
    assert_eq!(
        sandbox.exec(&json!({"cmd": ["cat"]})).stdout,
        "",
        "stdin is empty"
    );
}

#[test]
fn a_command_starts_in_the_home_or_below() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let home = sandbox.home.to_str().unwrap();
    assert_eq!(sandbox.sh("mkdir -p a/b; pwd").trim(), home);
    let pwd = |cwd: &str| sandbox.exec(&json!({"cmd": "pwd", "cwd": cwd})).stdout;
    assert_eq!(pwd("a/b").trim(), format!("{home}/a/b"));
    assert_eq!(pwd(&format!("{home}/a")).trim(), format!("{home}/a"));
    for (body, code) in [
        (json!({"cmd": "pwd", "cwd": "nowhere"}), "bad_cwd"),
        (json!({"cmd": ["no-such-program"]}), "not_found"),
        (json!({"cmd": ["./a"]}), "not_executable"),
    ] {
        assert_error(&sandbox.post("exec", &body), 400, code);
    }
    // A directory that its owner alone may enter is entered as the sandbox, not as root.
    let other = server.sandbox();
    let reply = sandbox.post(
        "exec",
        &json!({"cmd": "pwd", "cwd": other.home.to_str().unwrap()}),
    );
    assert_error(&reply, 400, "bad_cwd");
}

#[test]
fn a_timeout_ends_the_whole_tree() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let mark = Mark::new();
    let outcome = sandbox.exec(&json!({
        "cmd": format!("echo kept; setsid sleep {mark} & (sleep {mark} &) & trap '' TERM; sleep {mark}"),
        "timeout": 0.5
    }));
    assert_eq!(outcome.stdout, "kept\n");
    assert_eq!(
        (&outcome.exit["timed_out"], &outcome.exit["reason"]),
        (&json!(true), &json!("timeout"))
    );
    mark.wait_gone(PATIENCE);
    assert_eq!(sandbox.sh("echo on"), "on\n");
}

#[test]
fn a_vanished_client_ends_its_command_unless_it_is_to_be_kept() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let (killed, kept) = (Mark::new(), Mark::new());
    let run = |mark: &Mark, disposition: &str| {
        let mut stream = sandbox.exec_stream(&json!({
            "cmd": format!("echo begun; setsid sleep {mark} & exec sleep {mark}"),
            "on_disconnect": disposition, "id": format!("to-{disposition}")
        }));
        while stream.next().unwrap()["event"] != "stdout" {}
        mark.wait_for(2);
        reset(stream.connection);
    };
    run(&kept, "keep");
    run(&killed, "kill");
    killed.wait_gone(PATIENCE);
    assert_eq!(kept.pids().len(), 2, "it goes on");
    let logs = sandbox.get("processes/to-keep/logs");
    assert_eq!(events_of(&logs.body)[0]["data"], "begun\n");
    let reply = sandbox.request("DELETE", "processes/to-keep", b"");
    assert_eq!(reply.json()["killed"], true);
    kept.wait_gone(PATIENCE);
}

#[test]
fn background_processes_are_listed_read_fed_and_ended() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let cat = sandbox.spawn(&json!({"cmd": "echo ready; exec cat", "tag": "echo"}));
    let reply = sandbox.request("POST", &route(&cat, "/stdin"), b"one\n");
    assert_eq!(
        (reply.status, &reply.json()["written"]),
        (200, &json!(4)),
        "{}",
        reply.text()
    );
    let mut follower = sandbox.connect().stream(
        "GET",
        &sandbox.target(&route(&cat, "/logs?follow=1&stdout_offset=6")),
        b"",
    );
    let event = follower.next_output().unwrap();
    assert_eq!(
        (&event["data"], &event["offset"]),
        (&json!("one\n"), &json!(6))
    );
    let listed = sandbox.get("processes").json();
    assert_eq!(listed.as_array().unwrap().len(), 1);
    let entry = &listed[0];
    assert_eq!(
        (&entry["tag"], &entry["running"]),
        (&json!("echo"), &json!(true))
    );
    assert_eq!(entry["cmd"], "echo ready; exec cat");
    assert_eq!(
        sandbox
            .request("POST", &route(&cat, "/stdin?eof=1"), b"two")
            .status,
        200
    );
    let ended = wait(&sandbox, &cat);
    assert_eq!(
        (&ended["exit_code"], &ended["reason"]),
        (&json!(0), &json!("exited"))
    );
    let rest: Vec<Value> = follower.collect();
    assert_eq!(output_of(&rest, "stdout", 10).data, b"two");
    let by_pid = sandbox.get(&format!("procs/{}", pid_of(&cat)));
    assert_eq!(by_pid.json()["id"], cat["id"]);

    let sleeper = sandbox.spawn(&json!({"cmd": "exec sleep 3600"}));
    let reply = sandbox.post(&route(&sleeper, "/kill"), &json!({"signal": "TERM"}));
    assert_eq!(reply.json()["signaled"], true);
    let ended = wait(&sandbox, &sleeper);
    assert_eq!(
        (&ended["signal"], &ended["reason"]),
        (&json!(15), &json!("killed"))
    );
    let reply = sandbox.request("DELETE", &route(&sleeper, ""), b"");
    assert_eq!(reply.json()["killed"], false);
    let long = sandbox.spawn(&json!({"cmd": "exec sleep 3600"}));
    assert_eq!(
        sandbox.get(&route(&long, "/wait?timeout=0.1")).json()["running"],
        true
    );
    assert_eq!(
        sandbox.request("DELETE", &route(&long, ""), b"").json()["killed"],
        true
    );
    assert!(!is_alive(pid_of(&long)));
}

#[test]
fn an_id_starts_a_command_once_and_is_each_sandbox_s_own() {
    needs_root!();
    let server = Server::host().start();
    let (a, b) = (server.sandbox(), server.sandbox());
    let body = json!({"cmd": "echo x >> count; cat count", "id": "job"});
    for _ in 0..3 {
        assert_eq!(a.exec(&body).stdout, "x\n");
    }
    assert_error(
        &a.post("exec", &json!({"cmd": "echo other", "id": "job"})),
        409,
        "id_in_use",
    );
    let other = b.exec(&json!({"cmd": "echo other", "id": "job"}));
    assert_eq!(other.stdout, "other\n");
    assert_eq!(a.sh("cat count"), "x\n");
    let first = a.get("processes/job").json();
    assert_eq!(first["cmd"], body["cmd"]);
}

#[test]
fn processes_of_one_are_nothing_to_another() {
    needs_root!();
    let server = Server::host().start();
    let (a, b) = (server.sandbox(), server.sandbox());
    let process = a.spawn(&json!({"cmd": "exec cat", "id": "mine"}));
    let anonymous = a.spawn(&json!({"cmd": "exec cat"}));
    assert_eq!(b.get("processes").json(), json!([]));
    // Ids are counted in each sandbox, so that B's first has the name of one of A's.
    let namesake = b.spawn(&json!({"cmd": "exec cat"}));
    let listed = b.get("processes").json();
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(listed[0]["pid"], namesake["pid"]);
    for pid in [&process, &anonymous].map(pid_of) {
        for name in [pid.to_string(), "mine".to_owned(), "p-999".to_owned()] {
            for (method, rest, body) in [
                ("GET", "", ""),
                ("GET", "/logs", ""),
                ("GET", "/logs?follow=1", ""),
                ("GET", "/wait", ""),
                ("POST", "/stdin?eof=1", "text"),
                ("POST", "/kill", ""),
                ("POST", "/kill", "{\"signal\":\"TERM\"}"),
                ("POST", "/kill", "{\"group\":\"foreground\"}"),
                ("POST", "/resize", "{\"rows\":1,\"cols\":1}"),
                ("DELETE", "", ""),
            ] {
                for word in ["processes", "procs"] {
                    let reply = b.request(method, &format!("{word}/{name}{rest}"), body.as_bytes());
                    assert_error(&reply, 404, "not_found");
                }
            }
        }
        assert!(is_alive(pid));
    }
    // Nor is a process that no sandbox has.
    for pid in [server.pid(), std::process::id().cast_signed(), 1] {
        for (method, rest) in [("GET", ""), ("POST", "/kill"), ("DELETE", "")] {
            assert_error(
                &b.request(method, &format!("processes/{pid}{rest}"), b""),
                404,
                "not_found",
            );
        }
    }
    assert_eq!(
        b.request("DELETE", &route(&namesake, ""), b"").json()["killed"],
        true
    );
    assert!(is_alive(pid_of(&process)) && is_alive(pid_of(&anonymous)));
    for name in ["mine".to_owned(), pid_of(&anonymous).to_string()] {
        let reply = a.request("DELETE", &format!("processes/{name}"), b"");
        assert_eq!(reply.json()["killed"], true, "{}", reply.text());
    }
}

#[test]
fn what_a_finished_process_wrote_is_forgotten_with_its_sandbox() {
    needs_root!();
    let server = super::with_users(1).start();
    let first = server.sandbox();
    first.spawn(&json!({"cmd": "echo secret; exec sleep 3600", "id": "job"}));
    assert!(super::delete(&server, &first.id));
    let second = server.sandbox();
    assert_eq!(second.get("processes").json(), json!([]));
    for name in ["job", "p-1"] {
        assert_error(
            &second.get(&format!("processes/{name}/logs")),
            404,
            "not_found",
        );
    }
}

#[test]
fn finished_commands_leave_no_process_behind_in_any_sandbox() {
    needs_root!();
    let server = Server::host().start();
    let (made, _) = super::create(&server, 4);
    for sandbox in &made {
        for _ in 0..10 {
            // Its orphan ends when init or somebody else has reaped it.
            assert_eq!(sandbox.sh("(sleep 0.05 &) ; true & echo on"), "on\n");
        }
    }
    wait_until("orphans are reaped", Duration::from_secs(10), || {
        made.iter().all(|sandbox| sandbox.processes().is_empty())
    });
}
