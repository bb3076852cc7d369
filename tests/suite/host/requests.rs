//! Requests that meet their sandbox's deletion end cleanly, and nothing that they asked for happens
//! late.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::{Value, json};

use super::{create, create_for_trouble, delete, needs_root};
use crate::fixture::{
    Connection, EventStream, PATIENCE, READ_ONE, Sandbox, Server, assert_error, kinds, wait_until,
};

/// The `exit` with which a stream ends, after what it said before.
#[track_caller]
fn last(stream: EventStream) -> (Vec<Value>, Value) {
    let mut events: Vec<Value> = stream.filter(|event| event["event"] != "ping").collect();
    let exits = events
        .iter()
        .filter(|event| event["event"] == "exit")
        .count();
    assert_eq!(exits, 1, "{events:?}");
    let exit = events.pop().unwrap();
    assert_eq!(exit["event"], "exit", "it comes last");
    (events, exit)
}

#[track_caller]
fn is_deleted(exit: &Value) {
    assert_eq!(exit["reason"], "deleted", "{exit}");
    assert_eq!(exit["signal"], 9, "{exit}");
    assert_eq!(exit["exit_code"], Value::Null, "{exit}");
    assert_eq!(exit["timed_out"], false, "{exit}");
}

#[test]
fn a_running_command_is_told_as_deleted_with_all_it_wrote() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let mut streams: Vec<_> = (0..5)
        .map(|number| {
            sandbox.exec_stream(&json!({
                "cmd": format!("seq 1000; echo {number} >&2; setsid sleep 3600 & exec sleep 3600")
            }))
        })
        .collect();
    for stream in &mut streams {
        while stream.next().unwrap()["event"] != "stderr" {}
    }
    // One that has ended keeps the end that it had.
    let over = sandbox.exec_stream(&json!({"cmd": "exit 7"}));
    let (_, exit) = last(over);
    assert_eq!(
        (&exit["reason"], &exit["exit_code"]),
        (&json!("exited"), &json!(7))
    );
    assert!(delete(&server, &sandbox.id));
    for stream in streams {
        is_deleted(&last(stream).1);
    }
}

#[test]
fn output_that_was_not_read_yet_is_still_delivered() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let stream = sandbox.exec_stream(&json!({
        "cmd": "seq 20000; touch written; exec sleep 3600", "encoding": "base64"
    }));
    wait_until("all is written", PATIENCE, || {
        sandbox.home.join("written").exists()
    });
    assert!(delete(&server, &sandbox.id));
    let (events, exit) = last(stream);
    let output = crate::fixture::output_of(&events, "stdout", 0);
    let lines: Vec<_> = (1..=20000).map(|number: u32| number.to_string()).collect();
    let expected = lines.join("\n") + "\n";
    assert!(
        output.data == expected.as_bytes(),
        "{} bytes",
        output.data.len()
    );
    is_deleted(&exit);
}

#[test]
fn followers_and_waiters_are_told() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let process = sandbox.spawn(&json!({"cmd": "echo begun; setsid sleep 3600 & exec sleep 3600"}));
    let route = |rest: &str| {
        sandbox.target(&format!(
            "processes/{}{rest}",
            process["id"].as_str().unwrap()
        ))
    };
    let mut followers: Vec<_> = (0..3)
        .map(|_| {
            sandbox
                .connect()
                .stream("GET", &route("/logs?follow=1"), b"")
        })
        .collect();
    for follower in &mut followers {
        assert_eq!(follower.next_output().unwrap()["data"], "begun\n");
    }
    let mut waiters: Vec<_> = (0..3)
        .map(|_| {
            let mut connection = sandbox.connect();
            connection.send_request("GET", &route("/wait"), &[], b"");
            connection
        })
        .collect();
    // An answered request on a connection of its own: those before it have arrived by then, for a
    // waiter that comes late gets 404.
    for waiter in &waiters {
        crate::fixture::wait_until_received(&waiter.stream);
    }
    assert_eq!(sandbox.get("processes").status, 200);
    assert!(delete(&server, &sandbox.id));
    for follower in followers {
        is_deleted(&last(follower).1);
    }
    for waiter in &mut waiters {
        let reply = waiter.read_reply();
        let told = reply.json();
        if reply.status == 200 {
            assert_eq!(told["running"], false, "{told}");
            is_deleted(&json!({
                "reason": told["reason"], "signal": told["signal"], "exit_code": told["exit_code"], "timed_out": false
            }));
        } else {
            assert_eq!(reply.status, 404, "{told}");
        }
    }
}

#[test]
fn whoever_feeds_a_command_is_let_go() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let process = sandbox.spawn(&json!({"cmd": format!("{READ_ONE}; exec sleep 3600")}));
    let of_process = |rest: &str| {
        let id = process["id"].as_str().unwrap();
        sandbox.target(&format!("processes/{id}/{rest}"))
    };
    let target = of_process("stdin");
    // More than the pipe holds, so that it is in the middle for as long as the process lives.
    let body = vec![b'x'; 1 << 20];
    let mut writer = sandbox.connect();
    writer.send_request("POST", &target, &[], &body);
    let mut output = server.stream("GET", &of_process("logs?follow=1"), b"");
    assert!(output.next_output().is_some());
    let reply = sandbox.connect().request("POST", &target, &[], b"x");
    assert_error(&reply, 409, "stdin_busy");
    let mut feeder = sandbox.exec_stream(&json!({
        "cmd": "exec sleep 3600", "stdin": "x".repeat(1 << 20)
    }));
    assert_eq!(feeder.next().unwrap()["event"], "start");
    assert!(delete(&server, &sandbox.id));
    let reply = writer.read_reply();
    assert!(matches!(reply.status, 404 | 409), "{}", reply.text());
    is_deleted(&last(feeder).1);
}

#[test]
fn an_upload_in_the_middle_ends_and_leaves_nothing() {
    needs_root!();
    let server = Server::host().start();
    for query in ["path=big", "path=d/e/big", "path=big&offset=0"] {
        let sandbox = server.sandbox();
        let mut upload = sandbox.connect();
        let headers = [("Content-Length", "8000000"), ("Connection", "close")];
        upload.send_request(
            "PUT",
            &sandbox.target(&format!("files/write?{query}")),
            &headers,
            &vec![b'x'; 4_000_000],
        );
        crate::fixture::wait_until_received(&upload.stream);
        assert!(delete(&server, &sandbox.id));
        assert!(!sandbox.home.exists());
        // The rest comes to nothing: an error, or nobody who listens.
        let _ = upload.stream.write_all(&vec![b'x'; 4_000_000]);
        if let Some(status) = answer(&mut upload) {
            assert!(status >= 400, "{query}: {status}");
        }
        assert!(!sandbox.home.exists(), "{query}");
    }
    assert_eq!(super::homes_of(&server), Vec::<String>::new());
}

/// The status of what comes on a connection, if anything does.
fn answer(connection: &mut Connection) -> Option<u16> {
    let bytes = connection.read_to_close();
    let text = String::from_utf8_lossy(&bytes);
    text.split(' ').nth(1)?.parse().ok()
}

#[test]
fn a_download_in_the_middle_does_not_hold_the_deletion_up() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    sandbox.sh("head -c 64000000 /dev/zero > big");
    let mut download = sandbox.connect();
    let close = [("Connection", "close")];
    download.send_request("GET", &sandbox.target("files/read?path=big"), &close, b"");
    let head = download.read_head();
    assert_eq!(head.status, 200);
    assert_eq!(head.header("content-length"), Some("64000000"));
    assert!(delete(&server, &sandbox.id));
    assert!(!sandbox.home.exists());
    // What was begun may be finished, or broken off; never with other bytes.
    let mut left = 64_000_000;
    while left > 0 {
        let mut piece = vec![1; 65536];
        let count = download.stream.read(&mut piece).unwrap_or(0);
        if count == 0 {
            break;
        }
        assert!(piece[..count].iter().all(|byte| *byte == 0));
        left -= count.min(left);
    }
}

#[test]
fn no_command_starts_late() {
    needs_root!();
    let server = Server::host().start();
    let statuses = Mutex::new(BTreeSet::new());
    let kinds = kinds(&server);
    for (round, kind) in (0..12).flat_map(|round| kinds.iter().map(move |kind| (round, kind))) {
        let sandbox = server.sandbox_with(kind);
        let begun = Mutex::new(0);
        thread::scope(|scope| {
            for worker in 0..8 {
                let (sandbox, statuses, begun) = (&sandbox, &statuses, &begun);
                scope.spawn(move || {
                    let route = if worker % 2 == 0 { "exec" } else { "processes" };
                    loop {
                        let status = start_one(sandbox, route);
                        statuses.lock().unwrap().insert(status);
                        *begun.lock().unwrap() += 1;
                        if status != 200 {
                            break;
                        }
                    }
                });
            }
            // At another moment of the starting in every round.
            wait_until("some have started", PATIENCE, || {
                *begun.lock().unwrap() >= 4 + round
            });
            assert!(delete(&server, &sandbox.id));
            assert_eq!(sandbox.processes(), Vec::<i32>::new(), "at the answer");
            assert!(!sandbox.home.exists());
        });
        assert_eq!(
            sandbox.processes(),
            Vec::<i32>::new(),
            "when all requests are over"
        );
        assert!(!sandbox.home.exists());
    }
    let statuses = statuses.into_inner().unwrap();
    assert!(
        statuses.is_subset(&BTreeSet::from([200, 404, 503])),
        "{statuses:?}"
    );
}

/// A program that is open for writing is tried for a while, so the deletion comes in the middle of the start.
#[test]
fn a_start_that_the_deletion_ends_is_refused_like_one_that_comes_after_it() {
    needs_root!();
    let server = Server::host().start();
    for kind in kinds(&server) {
        let sandbox = server.sandbox_with(&kind);
        sandbox.sh("echo '#!/bin/sh' > busy && chmod 755 busy");
        let path = sandbox.home.join("busy");
        let writer = std::fs::OpenOptions::new().append(true).open(path);
        let _writer = writer.unwrap();
        let body = json!({ "cmd": ["./busy"] });
        let begun = AtomicUsize::new(0);
        thread::scope(|scope| {
            for route in ["exec", "processes"].repeat(4) {
                let (sandbox, body, begun) = (&sandbox, &body, &begun);
                scope.spawn(move || {
                    loop {
                        begun.fetch_add(1, Ordering::Relaxed);
                        let reply = sandbox.post(route, body);
                        match reply.status {
                            // Killed before it began.
                            200 => break,
                            404 => return assert_error(&reply, 404, "not_found"),
                            503 => return assert_error(&reply, 503, "shutting_down"),
                            _ => assert!(reply.text().contains("ETXTBSY"), "{}", reply.text()),
                        }
                    }
                });
            }
            wait_until("all are starting", PATIENCE, || {
                begun.load(Ordering::Relaxed) >= 16
            });
            assert!(delete(&server, &sandbox.id));
        });
    }
}

/// Asks for a command that would be there to be seen, by either route; the status.
fn start_one(sandbox: &Sandbox<'_>, route: &str) -> u16 {
    let mut connection = sandbox.connect();
    let body = json!({"cmd": "setsid sleep 3600 & exec sleep 3600"}).to_string();
    connection.send_request("POST", &sandbox.target(route), &[], body.as_bytes());
    let head = connection.read_head();
    if route == "processes" || head.status != 200 {
        return connection.read_body(head).status;
    }
    // Only the beginning; then the client goes, while the sandbox is being deleted.
    let chunk = connection.read_chunk().unwrap();
    assert!(String::from_utf8_lossy(&chunk).contains("start"));
    head.status
}

#[test]
fn no_command_runs_as_the_next_sandbox_of_its_user() {
    needs_root!();
    // One user: whatever came late would run as the next sandbox's.
    let server = super::with_users(1).start();
    let failures = Mutex::new(Vec::new());
    for _ in 0..20 {
        let first = server.sandbox();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    loop {
                        let mut connection = first.connect();
                        let body = json!({"cmd": "echo $SBX_SANDBOX_ID"}).to_string();
                        let target = first.target("exec");
                        let reply = connection.request("POST", &target, &[], body.as_bytes());
                        if reply.status != 200 {
                            break;
                        }
                        let text = reply.text();
                        if text.contains("exited") && !text.contains(&first.id) {
                            failures.lock().unwrap().push(text);
                        }
                    }
                });
            }
            assert!(delete(&server, &first.id));
            let second = server.sandbox();
            assert_eq!(second.uid, first.uid);
            second.sh("sleep 3600 & true");
            for pid in second.processes() {
                let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
                let environment = String::from_utf8_lossy(&environment);
                assert!(!environment.contains(&first.id), "{environment}");
            }
            assert!(delete(&server, &second.id));
        });
    }
    assert_eq!(failures.into_inner().unwrap(), Vec::<String>::new());
}

#[test]
fn others_are_made_and_used_while_one_is_hard_to_end() {
    needs_root!();
    let server = Server::host().start();
    let hard = create_for_trouble(&server, 1).remove(0);
    hard.sh("seq 20000 | xargs touch");
    hard.spawn(&json!({"cmd": "f() { f | f & }; f; while :; do sleep 0.01; done"}));
    thread::scope(|scope| {
        let ender = scope.spawn(|| delete(&server, &hard.id));
        loop {
            let (made, _) = create(&server, 1);
            assert_eq!(made[0].sh("echo on"), "on\n");
            assert!(delete(&server, &made[0].id));
            if ender.is_finished() {
                break;
            }
        }
        assert!(ender.join().unwrap());
    });
    assert!(!hard.home.exists());
}

#[test]
fn a_home_that_its_owner_has_closed_costs_only_its_own_figure() {
    needs_root!();
    let server = Server::host().start();
    let (open, closed) = (server.sandbox(), server.sandbox());
    closed.sh("chmod 000 ~");
    let headers = [("Accept", "application/json")];
    let mut connection = server.connect();
    let reply = connection.request("GET", "/v1/metrics?disk=1", &headers, b"");
    assert_eq!(reply.status, 200, "{}", reply.text());
    let document = reply.json();
    let figure = |id: &str| {
        let all = document["per_sandbox"].as_array().unwrap();
        all.iter().find(|one| one["id"] == id).unwrap()["disk_bytes"].clone()
    };
    assert!(figure(&open.id).is_u64());
    assert_eq!(figure(&closed.id), Value::Null);
}

#[test]
fn what_a_sandbox_may_not_see_is_as_good_as_nothing_for_its_commands() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let secret = crate::fixture::TempDir::new();
    std::fs::set_permissions(
        secret.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o700),
    )
    .unwrap();
    std::fs::write(secret.join("there"), "secret").unwrap();
    sandbox.sh(&format!("ln -s {} link", secret.path().display()));
    for directory in [secret.path().display().to_string(), "./link".to_owned()] {
        let answers = ["there", "nowhere"].map(|name| {
            let body = json!({ "cmd": [format!("{directory}/{name}")] });
            let reply = sandbox.post("exec", &body);
            (reply.status, reply.text().replace(name, "NAME"))
        });
        assert_eq!(answers[0], answers[1]);
    }
}

#[test]
fn an_environment_that_no_command_could_start_with_is_refused() {
    needs_root!();
    let server = Server::host().start();
    let body = json!({ "count": 3, "env": { "A": "x".repeat(200_000) } });
    let reply = server.post(super::SANDBOXES, &body);
    assert_eq!(reply.status, 400, "{}", reply.text());
    assert!(super::list(&server).is_empty());
}
