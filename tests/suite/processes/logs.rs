//! Logs: offsets without a gap that is not reported, and readers that do not affect each other.

use std::net::Shutdown;
use std::thread;

use serde_json::{Value, json};

use super::{follow, logs, path, stdout_of, wait};
use crate::fixture::{
    EventStream, Gate, Mark, PATIENCE, Server, TempDir, memory_of, numbered_text, output_of, reset,
    wait_until,
};

#[test]
fn logs_of_a_running_process_end_with_where_they_stopped() {
    let server = Server::start();
    let mut gate = Gate::new();
    let script = format!(
        "echo one; echo bad >&2; : < {}; echo two; exit 4",
        gate.path()
    );
    let process = server.spawn(&json!({"cmd": script}));
    wait_until("its output is in", PATIENCE, || {
        let entry = server.entry(&process["id"]);
        entry["stdout_bytes"] == 4 && entry["stderr_bytes"] == 4
    });
    let first = logs(&server, &process, "");
    let end = first.last().unwrap();
    assert_eq!(
        (&end["event"], &end["running"]),
        (&json!("end"), &json!(true))
    );
    assert_eq!(
        (&end["stdout_offset"], &end["stderr_offset"]),
        (&json!(4), &json!(4))
    );
    assert_eq!(output_of(&first, "stdout", 0).data, b"one\n");
    assert_eq!(output_of(&first, "stderr", 0).data, b"bad\n");
    assert!(
        first
            .iter()
            .all(|event| event["event"] != "start" && event["event"] != "exit")
    );
    assert_eq!(logs(&server, &process, "?follow=0"), first);
    // Taking up from there, there is nothing yet.
    let nothing = logs(&server, &process, "?stdout_offset=4&stderr_offset=4");
    assert_eq!(nothing.len(), 1, "{nothing:?}");
    gate.open();
    wait(&server, &process);
    let rest = logs(&server, &process, "?stdout_offset=4&stderr_offset=4");
    assert_eq!(output_of(&rest, "stdout", 4).data, b"two\n");
    let exit = rest.last().unwrap();
    assert_eq!(
        (&exit["event"], &exit["exit_code"], &exit["signal"]),
        (&json!("exit"), &json!(4), &Value::Null)
    );
    assert_eq!(
        (&exit["reason"], &exit["timed_out"]),
        (&json!("exited"), &json!(false))
    );
    assert!(exit["duration_ms"].is_u64());
    assert_eq!(
        logs(&server, &process, "?follow=1").last(),
        Some(exit),
        "following what has ended ends"
    );
}

#[test]
fn logs_can_be_taken_up_at_any_offset() {
    let server = Server::start();
    let text = numbered_text(3000);
    let process = server.spawn(&json!({"cmd": "cat; printf error >&2", "stdin": text}));
    wait(&server, &process);
    for offset in (0..=3000).step_by(97).chain([1, 2999, 3000]) {
        let events = logs(&server, &process, &format!("?stdout_offset={offset}"));
        let output = output_of(&events, "stdout", offset as u64);
        assert_eq!(output.dropped, 0);
        assert_eq!(output.data, &text.as_bytes()[offset..], "from {offset}");
        assert_eq!(
            output_of(&events, "stderr", 0).data,
            b"error",
            "the other stream is whole"
        );
    }
    let events = logs(&server, &process, "?stdout_offset=3000&stderr_offset=2");
    assert_eq!(output_of(&events, "stderr", 2).data, b"ror");
    assert_eq!(output_of(&events, "stdout", 3000).data, b"");
    for bad in [
        "abc",
        "-1",
        "1.5",
        "",
        "99999999999999999999999",
        "0x10",
        "1e3",
    ] {
        for name in ["stdout_offset", "stderr_offset"] {
            let reply = server.get(&path(&process, &format!("/logs?{name}={bad}")));
            assert_eq!(reply.status, 400, "{name}={bad}: {}", reply.text());
            assert!(reply.text().contains(name), "{}", reply.text());
        }
    }
    assert_eq!(
        server.get(&path(&process, "/logs?follow=maybe")).status,
        400
    );
}

#[test]
fn an_offset_inside_a_character_costs_that_character_only() {
    let server = Server::start();
    let process = server.spawn(&json!({"cmd": ["printf", "a€b😀c"]}));
    wait(&server, &process);
    for (offset, expected) in [(1, "€b😀c"), (4, "b😀c"), (5, "😀c"), (9, "c")] {
        let events = logs(&server, &process, &format!("?stdout_offset={offset}"));
        assert_eq!(
            output_of(&events, "stdout", offset).data,
            expected.as_bytes()
        );
    }
    for (offset, expected) in [(2, "b😀c"), (3, "b😀c"), (6, "c"), (8, "c")] {
        let events = logs(&server, &process, &format!("?stdout_offset={offset}"));
        let output = output_of(&events, "stdout", offset);
        assert_eq!(output.end, 10);
        let text = String::from_utf8(output.data).unwrap();
        assert_eq!(
            text.trim_start_matches('\u{fffd}'),
            expected,
            "from {offset}"
        );
    }
}

#[test]
fn a_character_is_whole_even_for_one_who_asks_again_and_again() {
    let server = Server::start();
    let (mut first, mut second) = (Gate::new(), Gate::new());
    // "€", with its last byte a long time after the others.
    let script = format!(
        "printf 'a\\342\\202'; : < {}; printf '\\254b'; : < {}",
        first.path(),
        second.path()
    );
    let process = server.spawn(&json!({"cmd": script}));
    let written = |count: u64| {
        wait_until("the output is in", PATIENCE, || {
            server.entry(&process["id"])["stdout_bytes"] == count
        });
    };
    written(3);
    let begin = logs(&server, &process, "");
    first.open();
    written(5);
    let offset = begin.last().unwrap()["stdout_offset"].as_u64().unwrap();
    let rest = logs(&server, &process, &format!("?stdout_offset={offset}"));
    second.open();
    let begin = output_of(&begin, "stdout", 0);
    assert_eq!(begin.end, offset, "the offset is that of what was told");
    let text = [begin.data, output_of(&rest, "stdout", offset).data].concat();
    assert_eq!(String::from_utf8(text).unwrap(), "a€b");
}

#[test]
fn a_gap_does_not_cut_characters() {
    // No power of two is a multiple of three: the ring's own edge is inside of a character.
    for (character, ring) in [("€", 65536), ("€", 65537), ("😀", 65537), ("é", 65537)] {
        let server = Server::builder().env("SBX_LOG_BYTES", ring).start();
        let directory = TempDir::new();
        let text = format!("-{}", character.repeat(100_000));
        std::fs::write(directory.path().join("text"), &text).unwrap();
        let process = server.spawn(&json!({"cmd": ["cat", directory.join("text")]}));
        wait(&server, &process);
        let output = stdout_of(&server, &process);
        assert_eq!(output.end, text.len() as u64);
        let data = String::from_utf8(output.data).unwrap();
        assert!(text.ends_with(&data), "{character}: {:?}...", &data[..9]);
        assert!(data.len() > 32_000);
    }
}

#[test]
fn what_the_ring_has_lost_is_said_in_its_place() {
    const RING: u64 = 64 << 10;
    let server = Server::builder().env("SBX_LOG_BYTES", RING).start();
    let directory = TempDir::new();
    let text = numbered_text(1 << 20);
    let total = text.len() as u64;
    std::fs::write(directory.path().join("text"), &text).unwrap();
    let process = server.spawn(&json!({"cmd": ["cat", directory.join("text")]}));
    wait(&server, &process);

    let events = logs(&server, &process, "");
    assert_eq!(events[0]["event"], "dropped", "{}", events[0]);
    assert_eq!(
        events
            .iter()
            .filter(|event| event["event"] == "dropped")
            .count(),
        1
    );
    let output = output_of(&events, "stdout", 0);
    assert_eq!(output.end, total);
    assert_eq!(output.dropped + output.data.len() as u64, total);
    assert_eq!(
        output.data,
        &text.as_bytes()[usize::try_from(output.dropped).unwrap()..],
        "the end is what is kept"
    );
    let kept = output.data.len() as u64;
    assert!(
        (RING / 2..=RING).contains(&kept),
        "{kept} bytes kept in a ring of {RING}"
    );
    assert_eq!(events.last().unwrap()["event"], "exit");
    assert_eq!(
        server.entry(&process["id"])["stdout_bytes"],
        total,
        "what was written is counted, not what is kept"
    );

    // From within what is lost, from its edge, and from within what is kept.
    let edge = output.dropped;
    for offset in [1, edge - 1, edge, edge + 1, total - 1, total] {
        let events = logs(&server, &process, &format!("?stdout_offset={offset}"));
        let output = output_of(&events, "stdout", offset);
        assert_eq!(output.dropped, edge.saturating_sub(offset), "from {offset}");
        assert_eq!(
            output.data,
            &text.as_bytes()[usize::try_from(offset.max(edge)).unwrap()..],
            "from {offset}"
        );
    }
}

#[test]
fn a_ring_keeps_the_end_of_both_streams_in_bounds() {
    const RING: u64 = 64 << 10;
    let server = Server::builder().env("SBX_LOG_BYTES", RING).start();
    let script = "i=0; while [ $i -lt 6000 ]; do echo out $i line of output; echo err $i line of errors >&2; i=$((i+1)); done";
    let process = server.spawn(&json!({"cmd": script}));
    wait(&server, &process);
    let events = logs(&server, &process, "");
    let (stdout, stderr) = (
        output_of(&events, "stdout", 0),
        output_of(&events, "stderr", 0),
    );
    assert!(stdout.dropped > 0 && stderr.dropped > 0);
    assert!((stdout.data.len() + stderr.data.len()) as u64 <= RING);
    assert!(stdout.data.ends_with(b"out 5999 line of output\n"));
    assert!(stderr.data.ends_with(b"err 5999 line of errors\n"));
}

#[test]
fn many_readers_follow_at_once_and_each_gets_everything() {
    let server = Server::start();
    let mut gate = Gate::new();
    let directory = TempDir::new();
    let text = numbered_text(1 << 20);
    std::fs::write(directory.path().join("text"), &text).unwrap();
    let script = format!(
        "echo first; : < {}; cat {}; echo error >&2; exit 2",
        gate.path(),
        directory.join("text")
    );
    let process = server.spawn(&json!({"cmd": script}));
    let expected = format!("first\n{text}");
    let check = |events: &[Value]| {
        let output = output_of(events, "stdout", 0);
        assert_eq!(output.dropped, 0);
        assert!(
            output.data == expected.as_bytes(),
            "{} bytes",
            output.data.len()
        );
        assert_eq!(output_of(events, "stderr", 0).data, b"error\n");
        let exits = events
            .iter()
            .filter(|event| event["event"] == "exit")
            .count();
        assert_eq!(
            (exits, &events.last().unwrap()["exit_code"]),
            (1, &json!(2))
        );
    };
    thread::scope(|scope| {
        let readers: Vec<_> = (0..24)
            .map(|_| {
                let mut stream = follow(&server, &process);
                let first = stream.next_output().unwrap();
                assert_eq!(
                    first["data"], "first\n",
                    "it is told while the process runs"
                );
                scope.spawn(move || std::iter::once(first).chain(stream).collect::<Vec<Value>>())
            })
            .collect();
        gate.open();
        for reader in readers {
            check(&reader.join().unwrap());
        }
    });
    check(&logs(&server, &process, "?follow=1"));
}

#[test]
fn a_reader_that_does_not_read_costs_nobody_anything() {
    let server = Server::start();
    let mut gate = Gate::new();
    let directory = TempDir::new();
    let text = numbered_text(48 << 20);
    std::fs::write(directory.path().join("text"), &text).unwrap();
    let before = memory_of(server.pid(), "VmHWM");
    let script = format!(
        "echo first; : < {}; cat {}",
        gate.path(),
        directory.join("text")
    );
    let process = server.spawn(&json!({"cmd": script}));
    let mut stuck: Vec<EventStream> = (0..10).map(|_| follow(&server, &process)).collect();
    for stream in &mut stuck {
        assert_eq!(stream.next_output().unwrap()["data"], "first\n");
    }
    gate.open();
    // The process ends although ten readers stand still.
    wait(&server, &process);
    let healthy = follow(&server, &process).collect::<Vec<Value>>();
    let output = output_of(&healthy, "stdout", 0);
    let expected = format!("first\n{text}");
    assert_eq!(output.end, expected.len() as u64);
    assert!(expected.as_bytes().ends_with(&output.data));
    let grown = memory_of(server.pid(), "VmHWM").saturating_sub(before);
    assert!(
        grown < 24 << 20,
        "the server grew by {grown} bytes for a ring of 4 MiB and ten readers"
    );
    // When a slow one reads at last, what it has missed is said, and all the rest is right.
    for stream in stuck.into_iter().take(3) {
        let events: Vec<Value> = stream.collect();
        let slow = output_of(&events, "stdout", 6);
        assert_eq!(slow.end, expected.len() as u64);
        assert!(slow.dropped > 0, "nobody can have kept 48 MiB for it");
        let mut at = 6;
        for event in &events {
            let bytes = usize::try_from(event["bytes"].as_u64().unwrap_or(0)).unwrap();
            if event["event"] == "stdout" {
                assert!(
                    event["data"].as_str().unwrap() == &expected[at..at + bytes],
                    "at {at}"
                );
            }
            at += bytes;
        }
        assert_eq!(events.last().unwrap()["event"], "exit");
    }
}

#[test]
fn a_follower_that_goes_away_does_no_harm_and_leaves_nothing() {
    let server = Server::start();
    let mark = Mark::new();
    let process = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
    let threads = || crate::fixture::status_of(server.pid(), "Threads");
    server.get("/health");
    let before = threads();
    for round in 0..10 {
        let stream = follow(&server, &process);
        match round % 3 {
            0 => drop(stream),
            1 => reset(stream.connection),
            _ => {
                stream.connection.stream.shutdown(Shutdown::Write).unwrap();
                drop(stream);
            }
        }
    }
    wait_until("the followers' threads end", PATIENCE, || {
        threads() <= before
    });
    assert_eq!(server.entry(&process["id"])["running"], true);
    assert_eq!(mark.pids().len(), 1);
}

#[test]
fn followed_logs_are_pinged_when_they_are_quiet() {
    let server = Server::builder().env("SBX_PING_SECS", 1).start();
    let process = server.spawn(&json!({"cmd": "sleep 2.6; echo late"}));
    let events: Vec<Value> = follow(&server, &process).collect();
    let pings = events
        .iter()
        .take_while(|event| event["event"] != "stdout")
        .count();
    assert!((1..=3).contains(&pings), "{events:?}");
    assert!(
        events[..pings].iter().all(|event| event["event"] == "ping"),
        "{events:?}"
    );
}

#[test]
fn output_that_nobody_reads_does_not_block_a_process() {
    let server = Server::start();
    let process = server.spawn(
        &json!({"cmd": "head -c 26214400 /dev/zero; head -c 26214400 /dev/zero >&2; exit 5"}),
    );
    let ended = wait(&server, &process);
    assert_eq!(ended["exit_code"], 5);
    assert_eq!(
        (&ended["stdout_bytes"], &ended["stderr_bytes"]),
        (&json!(26_214_400), &json!(26_214_400))
    );
}
