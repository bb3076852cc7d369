//! `wait` and `kill`: the result of a process, and signals to its group.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{follow, logs, path, wait};
use crate::fixture::{Gate, Mark, PATIENCE, Server, pid_of, reset, stat_of, wait_until};

#[test]
fn wait_returns_at_the_end_or_after_its_timeout() {
    let server = Server::start();
    let mut gate = Gate::new();
    let process = server.spawn(&json!({"cmd": format!("echo out; : < {}; exit 11", gate.path())}));
    let begin = Instant::now();
    let reply = server.get(&path(&process, "/wait?timeout=0.4"));
    assert!(begin.elapsed() >= Duration::from_millis(400));
    assert_eq!(
        (reply.status, &reply.json()["running"]),
        (200, &json!(true))
    );
    assert!(
        reply
            .header("content-type")
            .unwrap()
            .starts_with("application/json")
    );
    assert_eq!(
        server.get(&path(&process, "/wait?timeout=0")).json()["running"],
        true
    );
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..10)
            .map(|index| {
                let method = if index % 2 == 0 { "GET" } else { "POST" };
                let (server, target) = (&server, path(&process, "/wait"));
                let mut connection = server.connect();
                connection.send_request(method, &target, &[], b"");
                scope.spawn(move || connection.read_reply())
            })
            .collect();
        // One that goes away must not take anything with it.
        let mut gone = server.connect();
        gone.send_request("GET", &path(&process, "/wait"), &[], b"");
        reset(gone);
        gate.open();
        for waiter in waiting {
            let ended = waiter.join().unwrap().json();
            assert_eq!(
                (&ended["running"], &ended["exit_code"], &ended["reason"]),
                (&json!(false), &json!(11), &json!("exited"))
            );
            assert_eq!(
                (&ended["id"], &ended["stdout_bytes"]),
                (&process["id"], &json!(4))
            );
        }
    });
    assert_eq!(
        wait(&server, &process)["exit_code"],
        11,
        "waiting for what has ended"
    );
    for bad in ["abc", "-1", "", "1s", "NaN", "inf"] {
        assert_eq!(
            server
                .get(&path(&process, &format!("/wait?timeout={bad}")))
                .status,
            400,
            "{bad}"
        );
    }
}

#[test]
fn a_long_wait_keeps_the_connection_alive_and_is_still_json() {
    let server = Server::builder().env("SBX_PING_SECS", 1).start();
    let process = server.spawn(&json!({"cmd": "sleep 2.5; exit 1"}));
    let mut connection = server.connect();
    let reply = connection.request("GET", &path(&process, "/wait"), &[], b"");
    assert_eq!(reply.json()["exit_code"], 1);
    let leading = reply
        .body
        .iter()
        .take_while(|byte| byte.is_ascii_whitespace())
        .count();
    assert!(leading >= 1, "something was sent meanwhile");
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
}

#[test]
fn signals_are_sent_by_name_or_number() {
    let server = Server::start();
    let mark = Mark::new();
    for (signal, number) in [
        (json!("HUP"), 1),
        (json!("SIGHUP"), 1),
        (json!("INT"), 2),
        (json!("QUIT"), 3),
        (json!("SIGABRT"), 6),
        (json!("KILL"), 9),
        (json!("USR1"), 10),
        (json!("SIGUSR2"), 12),
        (json!("PIPE"), 13),
        (json!("ALRM"), 14),
        (json!("SIGTERM"), 15),
        (json!("TERM"), 15),
        (json!(1), 1),
        (json!(9), 9),
        (json!(15), 15),
        (json!(40), 40),
    ] {
        let process = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
        let reply = server.post(&path(&process, "/kill"), &json!({"signal": signal}));
        assert_eq!(reply.status, 200, "{signal}: {}", reply.text());
        let answer = reply.json();
        assert_eq!(
            (
                &answer["id"],
                answer["signal"].as_i64(),
                &answer["signaled"]
            ),
            (&process["id"], Some(number), &json!(true))
        );
        let ended = wait(&server, &process);
        assert_eq!(
            (ended["signal"].as_i64(), &ended["exit_code"]),
            (Some(number), &Value::Null),
            "{signal}"
        );
        assert_eq!(ended["reason"], "killed", "{signal}");
        // And again: there is nothing left to signal.
        let answer = server
            .post(&path(&process, "/kill"), &json!({"signal": signal}))
            .json();
        assert_eq!(answer["signaled"], false, "{signal}");
        assert_eq!(wait(&server, &process), ended, "what was told stays true");
    }
}

#[test]
fn kill_without_a_signal_is_sigkill() {
    let server = Server::start();
    let mark = Mark::new();
    for body in ["", "{}", "{\"signal\": null}"] {
        let process =
            server.spawn(&json!({"cmd": format!("trap '' TERM; sleep {mark}; sleep {mark}")}));
        let reply = server.request("POST", &path(&process, "/kill"), body.as_bytes());
        assert_eq!(
            (reply.status, &reply.json()["signal"]),
            (200, &json!(9)),
            "{body:?}"
        );
        assert_eq!(wait(&server, &process)["signal"], 9);
    }
}

#[test]
fn what_is_no_signal_is_refused_and_kills_nothing() {
    let server = Server::start();
    let mark = Mark::new();
    let process = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
    for signal in [
        "\"NOPE\"",
        "\"\"",
        "\"SIG\"",
        "0",
        "-9",
        "-1",
        "65",
        "1000",
        "9.5",
        "true",
        "[]",
        "{}",
        "[9]",
        "4294967305",
        "\"SIGSIGTERM\"",
    ] {
        let body = format!("{{\"signal\": {signal}}}");
        let reply = server.request("POST", &path(&process, "/kill"), body.as_bytes());
        assert_eq!(reply.status, 400, "{signal}: {}", reply.text());
        assert!(reply.text().contains("signal"), "{}", reply.text());
    }
    for body in ["[]", "9", "\"TERM\"", "{", "nonsense"] {
        assert_eq!(
            server
                .request("POST", &path(&process, "/kill"), body.as_bytes())
                .status,
            400,
            "{body}"
        );
    }
    assert_eq!(server.entry(&process["id"])["running"], true);
    assert_eq!(mark.pids().len(), 1);
}

#[test]
fn a_signal_goes_to_the_whole_group() {
    let server = Server::start();
    let mark = Mark::new();
    let process = server
        .spawn(&json!({"cmd": format!("sleep {mark} & (sleep {mark}; :) & sleep {mark}; :")}));
    mark.wait_for(5);
    server.post(&path(&process, "/kill"), &json!({"signal": "TERM"}));
    mark.wait_gone(PATIENCE);
    assert_eq!(wait(&server, &process)["signal"], 15);
}

#[test]
fn a_process_may_handle_a_signal_or_stop_and_go_on() {
    let server = Server::start();
    let mark = Mark::new();
    // A shell that starts programs all the time would not do: while it waits for one that is stopped
    // before its execve, it cannot be stopped itself (vfork).
    let script = format!(
        "trap 'echo caught; exit 7' USR1; sleep {mark} & echo ready; while :; do wait; done"
    );
    let process = server.spawn(&json!({"cmd": script}));
    let mut stream = follow(&server, &process);
    assert_eq!(stream.next_output().unwrap()["data"], "ready\n");
    let pid = pid_of(&process);
    assert_eq!(
        server
            .post(&path(&process, "/kill"), &json!({"signal": "STOP"}))
            .json()["signaled"],
        true
    );
    wait_until("it is stopped", PATIENCE, || {
        stat_of(pid).unwrap().state == 'T'
    });
    assert_eq!(
        server.entry(&process["id"])["running"],
        true,
        "stopped is not ended"
    );
    assert_eq!(
        server
            .post(&path(&process, "/kill"), &json!({"signal": "CONT"}))
            .json()["signaled"],
        true
    );
    wait_until("it goes on", PATIENCE, || {
        stat_of(pid).unwrap().state != 'T'
    });
    server.post(&path(&process, "/kill"), &json!({"signal": "USR1"}));
    // The shell may have something to say about its sleep, which got the signal too.
    let caught = stream.find(|event| event["event"] == "stdout").unwrap();
    assert_eq!(caught["data"], "caught\n");
    let exit = stream.next_output().unwrap();
    assert_eq!(
        (&exit["exit_code"], &exit["signal"]),
        (&json!(7), &Value::Null)
    );
}

#[test]
fn a_background_timeout_ends_the_tree() {
    let server = Server::start();
    let mark = Mark::new();
    let process = server
        .spawn(&json!({"cmd": format!("setsid sleep {mark} & sleep {mark}"), "timeout": 0.6}));
    let ended = wait(&server, &process);
    assert_eq!(
        (&ended["reason"], &ended["signal"]),
        (&json!("timeout"), &json!(9))
    );
    mark.wait_gone(Duration::from_secs(2));
    let exit = logs(&server, &process, "").pop().unwrap();
    assert_eq!(
        (&exit["event"], &exit["timed_out"]),
        (&json!("exit"), &json!(true))
    );
}
