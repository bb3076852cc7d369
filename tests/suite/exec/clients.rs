//! Clients that go away, that are slow, or that are many: a vanished one is noticed within a second
//! and its command killed or kept; none of them costs the server more than a bounded amount.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{half_close, read_until, stream_pid, wait_until_blocked, write_file, written_by};
use crate::fixture::{
    EventStream, Gate, Mark, Outcome, PATIENCE, Server, TempDir, best_of, expect_same, memory_of,
    numbered_text, output_of, reset, stat_of, wait_until,
};

/// A second, within which a client that went away must be noticed, and what measuring it costs.
const NOTICED: Duration = Duration::from_millis(1100);

/// What a client does when it goes.
type Vanish<'a> = &'a dyn Fn(EventStream, &Mark);

/// How long after `vanish` the marked processes are gone, at best; they must be gone each time.
fn noticed_after(server: &Server, script: &str, vanish: impl Fn(EventStream, &Mark)) -> Duration {
    best_of(3, || {
        let mark = Mark::new();
        let script = script.replace("MARK", &mark.to_string());
        let mut stream = server.exec_stream(&json!({"cmd": script}));
        read_until(&mut stream, "ready\n");
        // The last program in the line has been started, too.
        wait_until("the command is under way", PATIENCE, || {
            mark.pids().iter().any(|pid| {
                std::fs::read_link(format!("/proc/{pid}/exe"))
                    .is_ok_and(|exe| !exe.ends_with("dash"))
            })
        });
        vanish(stream, &mark);
        let begin = Instant::now();
        mark.wait_gone(PATIENCE);
        begin.elapsed()
    })
}

#[test]
fn a_vanished_client_is_noticed_within_a_second() {
    let server = Server::start();
    let silent = "echo ready; setsid sleep MARK & sleep MARK";
    let flood = "echo ready; exec yes MARK";
    let blocked = |mark: &Mark| {
        wait_until_blocked(mark.any());
    };
    let cases: [(&str, &str, Vanish<'_>); 6] = [
        ("closed", silent, &|stream, _| drop(stream)),
        ("reset", silent, &|stream, _| reset(stream.connection)),
        ("closed with a full pipe", flood, &|stream, mark| {
            blocked(mark);
            drop(stream);
        }),
        ("reset with a full pipe", flood, &|stream, mark| {
            blocked(mark);
            reset(stream.connection);
        }),
        (
            "closed a while after its sending half",
            silent,
            &|stream, _| {
                half_close(&stream);
                thread::sleep(Duration::from_millis(1300));
                drop(stream);
            },
        ),
        (
            "the same, having read everything",
            silent,
            &|mut stream, _| {
                half_close(&stream);
                // What lies unread would make of the close a reset, which is easily seen.
                assert_eq!(stream.next().unwrap()["event"], "ping");
                drop(stream);
            },
        ),
    ];
    for (name, script, vanish) in cases {
        let best = noticed_after(&server, script, vanish);
        assert!(best < NOTICED, "{name}: noticed after {best:?} at best");
    }
}

#[test]
fn a_client_that_goes_while_output_flows_is_noticed() {
    let server = Server::start();
    let best = noticed_after(&server, "echo ready; yes MARK | cat", |mut stream, _| {
        for _ in 0..20 {
            stream.next_output().unwrap();
        }
        drop(stream);
    });
    assert!(best < NOTICED, "noticed after {best:?} at best");
}

#[test]
fn a_client_that_has_only_closed_its_sending_half_gets_its_result() {
    let server = Server::start();
    let stream = server.exec_stream(&json!({"cmd": "echo early; sleep 2.5; echo late; exit 5"}));
    half_close(&stream);
    let outcome = Outcome::of(stream.collect());
    assert_eq!(outcome.stdout, "early\nlate\n");
    assert_eq!(
        (outcome.code(), &outcome.exit["reason"]),
        (Some(5), &json!("exited"))
    );
}

#[test]
fn a_kept_command_goes_on_without_its_client_and_can_be_taken_up_again() {
    let server = Server::start();
    let directory = TempDir::new();
    let text = numbered_text(1 << 20);
    let file = write_file(&directory, "text", &text);
    for how in ["closed", "reset"] {
        let mut gate = Gate::new();
        let script = format!("cat {file}; : < {}; echo end; exit 6", gate.path());
        let mut stream = server.exec_stream(&json!({"cmd": script, "on_disconnect": "keep"}));
        let id = stream.next().unwrap()["id"].as_str().unwrap().to_owned();
        let mut events = Vec::new();
        while output_of(&events, "stdout", 0).end < 200_000 {
            events.push(stream.next_output().unwrap());
        }
        if how == "reset" {
            reset(stream.connection);
        } else {
            drop(stream);
        }
        let had = output_of(&events, "stdout", 0);
        // It is not held up by the reader it has lost.
        wait_until("the output is complete", PATIENCE, || {
            server.entry(&json!(id))["stdout_bytes"] == text.len()
        });
        assert_eq!(server.entry(&json!(id))["running"], true, "{how}");
        gate.open();
        let target = format!("/v1/processes/{id}/logs?follow=1&stdout_offset={}", had.end);
        let events: Vec<Value> = server.stream("GET", &target, b"").collect();
        let rest = output_of(&events, "stdout", had.end);
        assert_eq!(rest.dropped, 0);
        expect_same(
            "the output",
            &[had.data, rest.data].concat(),
            format!("{text}end\n").as_bytes(),
        );
        let exit = events.last().unwrap();
        assert_eq!(
            (&exit["event"], &exit["exit_code"], &exit["reason"]),
            (&json!("exit"), &json!(6), &json!("exited"))
        );
    }
}

#[test]
fn a_kept_command_still_gets_all_of_its_input_and_its_timeout() {
    let server = Server::start();
    let mut gate = Gate::new();
    let text = numbered_text(4 << 20);
    let script = format!(": < {}; wc -c; exec sleep 600", gate.path());
    let body = json!({"cmd": script, "stdin": text, "timeout": 3, "on_disconnect": "keep"});
    let mut stream = server.exec_stream(&body);
    let id = stream.next().unwrap()["id"].clone();
    drop(stream);
    wait_until("it is on its own", PATIENCE, || {
        server.entry(&id)["background"] == true
    });
    gate.open();
    let target = format!("/v1/processes/{}/logs?follow=1", id.as_str().unwrap());
    let events: Vec<Value> = server.stream("GET", &target, b"").collect();
    assert_eq!(
        output_of(&events, "stdout", 0).data,
        format!("{}\n", text.len()).as_bytes()
    );
    assert_eq!(events.last().unwrap()["reason"], "timeout");
}

#[test]
fn a_kept_command_that_was_blocked_by_its_client_goes_on() {
    let server = Server::start();
    let mark = Mark::new();
    let mut stream =
        server.exec_stream(&json!({"cmd": ["yes", mark.to_string()], "on_disconnect": "keep"}));
    let id = stream.next().unwrap()["id"].as_str().unwrap().to_owned();
    let pid = stream_pid(&server, &id);
    let blocked_at = wait_until_blocked(pid);
    drop(stream);
    wait_until("it writes on", PATIENCE, || {
        written_by(pid) > blocked_at + (20 << 20)
    });
    assert_eq!(
        server.delete(&format!("/v1/processes/{id}")).json()["killed"],
        true
    );
    mark.wait_gone(PATIENCE);
}

#[test]
fn a_connection_that_dies_right_after_exit_kills_nothing() {
    let server = Server::start();
    let mark = Mark::new();
    for round in 0..20 {
        let mut stream = server.exec_stream(&json!({"cmd": format!("sleep {mark} & echo done")}));
        let id = stream.next().unwrap()["id"].clone();
        // As real clients do it: reading stops at the exit event, whatever may follow.
        while stream.next_output().unwrap()["event"] != "exit" {}
        if round % 2 == 0 {
            reset(stream.connection);
        } else {
            drop(stream);
        }
        assert_eq!(server.entry(&id)["reason"], "exited");
    }
    thread::sleep(Duration::from_millis(1300));
    assert_eq!(mark.pids().len(), 20);
}

#[test]
fn a_slow_reader_slows_its_command_and_not_the_memory() {
    let directory = TempDir::new();
    let text = numbered_text(48 << 20);
    let file = write_file(&directory, "text", &text);
    let server = Server::start();
    let before = memory_of(server.pid(), "VmHWM");
    let mut stream = server.exec_stream(&json!({"cmd": ["cat", file]}));
    let start = stream.next().unwrap();
    let pid = i32::try_from(start["pid"].as_i64().unwrap()).unwrap();
    let written = wait_until_blocked(pid);
    assert!(
        written < 40 << 20,
        "{written} bytes were taken from the pipe for a reader that does not read"
    );
    let outcome_is_late = server.exec(&json!({"cmd": "echo other"}));
    assert_eq!(outcome_is_late.stdout, "other\n", "others are not held up");
    let events: Vec<Value> = stream.collect();
    let output = output_of(&events, "stdout", 0);
    assert_eq!(output.dropped, 0);
    expect_same("the output", &output.data, text.as_bytes());
    let grown = memory_of(server.pid(), "VmHWM").saturating_sub(before);
    assert!(grown < 16 << 20, "the server grew by {grown} bytes");
}

#[test]
fn waiting_costs_no_processor_time() {
    let server = Server::start();
    let mark = Mark::new();
    let sleeping = |script: &str| {
        let mut stream =
            server.exec_stream(&json!({"cmd": script.replace("MARK", &mark.to_string())}));
        read_until(&mut stream, "ready\n");
        stream
    };
    // Each of these leaves a descriptor that is ready for ever for whoever polls it carelessly.
    let closed_output = sleeping("echo ready; exec >&- 2>&-; sleep MARK");
    let closed_stderr = sleeping("echo ready; exec 2>&-; sleep MARK");
    let half_closed = sleeping("echo ready; sleep MARK");
    half_close(&half_closed);
    let mut sent_ahead = sleeping("echo ready; sleep MARK");
    sent_ahead
        .connection
        .send_request("GET", "/health", &[], b"");
    let mut stuck = server.exec_stream(&json!({"cmd": ["yes", mark.to_string()]}));
    wait_until_blocked(i32::try_from(stuck.next().unwrap()["pid"].as_i64().unwrap()).unwrap());
    let unread = server.exec_stream(
        &json!({"cmd": format!("exec sleep {mark}"), "stdin": numbered_text(1 << 20)}),
    );
    let closed_stdin = server.exec_stream(
        &json!({"cmd": format!("exec <&-; sleep {mark}"), "stdin": numbered_text(1 << 20)}),
    );
    server.exec(&json!({"cmd": format!("sleep {mark} & echo left behind")}));
    let writer_left =
        server.exec(&json!({"cmd": format!("(exec >&-; sleep {mark}) & echo half left behind")}));
    assert_eq!(writer_left.code(), Some(0));
    let background = server.spawn(&json!({"cmd": format!("exec >&-; sleep {mark}")}));
    let follower = server.stream(
        "GET",
        &format!(
            "/v1/processes/{}/logs?follow=1",
            background["id"].as_str().unwrap()
        ),
        b"",
    );

    let used = || stat_of(server.pid()).unwrap().cpu;
    let before = used();
    thread::sleep(Duration::from_secs(2));
    let spent = used().saturating_sub(before);
    assert!(
        spent < Duration::from_millis(300),
        "{spent:?} of processor time in two idle seconds"
    );
    drop((
        closed_output,
        closed_stderr,
        half_closed,
        sent_ahead,
        stuck,
        unread,
        closed_stdin,
        follower,
    ));
}

#[test]
fn three_hundred_commands_run_at_once() {
    let server = Server::start();
    let mut gate = Gate::new();
    let mut streams: Vec<EventStream> = (0..300)
        .map(|index| {
            let script = format!(
                "echo ready; : < {}; echo {index} out; echo {index} err >&2; exit {}",
                gate.path(),
                index % 200
            );
            server.exec_stream(&json!({"cmd": script}))
        })
        .collect();
    let mut ids = BTreeSet::new();
    let mut pids = BTreeSet::new();
    for stream in &mut streams {
        let start = stream.next().unwrap();
        ids.insert(start["id"].as_str().unwrap().to_owned());
        pids.insert(start["pid"].as_i64().unwrap());
        read_until(stream, "ready\n");
    }
    assert_eq!((ids.len(), pids.len()), (300, 300));
    let list = server.get("/v1/processes").json();
    assert_eq!(
        list.as_array()
            .unwrap()
            .iter()
            .filter(|entry| entry["running"] == true)
            .count(),
        300
    );
    gate.open();
    for (index, stream) in streams.iter_mut().enumerate() {
        let events: Vec<Value> = stream.collect();
        let text = |name: &str| {
            events
                .iter()
                .filter(|event| event["event"] == name)
                .map(|event| event["data"].as_str().unwrap())
                .collect::<String>()
        };
        assert_eq!(
            (text("stdout"), text("stderr")),
            (format!("{index} out\n"), format!("{index} err\n"))
        );
        let exit = events.last().unwrap();
        assert_eq!(
            (&exit["event"], exit["exit_code"].as_u64()),
            (&json!("exit"), Some(index as u64 % 200))
        );
    }
}
