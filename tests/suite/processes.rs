//! Background processes: the registry, the logs and everything that can be done to a process.
//!
//! The promises held here: a list that clients can rely on; logs with offsets, in which nothing is
//! missing without being said and which cost a bounded amount of memory however many processes
//! write however much; readers that cost nobody else anything; standard input of any size; kill,
//! wait and delete that mean what they say, by id or by pid.

use std::collections::BTreeSet;
use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use crate::fixture::{
    EventStream, Gate, Mark, Output, PATIENCE, Reply, Server, TempDir, events_of, memory_of,
    numbered_text, output_of, random_bytes, reset, stat_of, wait_until,
};

// ------------------------------------------------------------------------------------- helpers

/// The path of a process and what may follow it.
fn path(process: &Value, rest: &str) -> String {
    format!("/v1/processes/{}{rest}", process["id"].as_str().unwrap())
}

/// The process as the registry has it.
#[track_caller]
fn entry(server: &Server, process: &Value) -> Value {
    let reply = server.get(&path(process, ""));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

/// Waits for the end of a process.
#[track_caller]
fn wait(server: &Server, process: &Value) -> Value {
    let reply = server.get(&path(process, "/wait"));
    assert_eq!(reply.status, 200, "{}", reply.text());
    let ended = reply.json();
    assert_eq!(
        ended["running"], false,
        "wait without a timeout returns at the end"
    );
    ended
}

/// All events of a process's logs from the given offsets.
#[track_caller]
fn logs(server: &Server, process: &Value, query: &str) -> Vec<Value> {
    let reply = server.get(&path(process, &format!("/logs{query}")));
    assert_eq!(reply.status, 200, "{}", reply.text());
    events_of(&reply.body)
}

#[track_caller]
fn stdout_of(server: &Server, process: &Value) -> Output {
    output_of(&logs(server, process, ""), "stdout", 0)
}

fn follow(server: &Server, process: &Value) -> EventStream {
    server.stream("GET", &path(process, "/logs?follow=1"), b"")
}

fn feed(server: &Server, process: &Value, query: &str, body: &[u8]) -> Reply {
    server.request("POST", &path(process, &format!("/stdin{query}")), body)
}

#[track_caller]
fn is_error(reply: &Reply, status: u16, code: &str) {
    assert_eq!(reply.status, status, "{}", reply.text());
    assert_eq!(reply.code(), code, "{}", reply.text());
}

fn pid_of(process: &Value) -> i32 {
    i32::try_from(process["pid"].as_i64().unwrap()).unwrap()
}

fn server_pid(server: &Server) -> i32 {
    server.pid().cast_signed()
}

fn now_ms() -> u64 {
    u64::try_from(SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap()
}

/// The ids in the list, in its order.
fn listed(server: &Server) -> Vec<String> {
    let list = server.get("/v1/processes").json();
    list.as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["id"].as_str().unwrap().to_owned())
        .collect()
}

// ------------------------------------------------------------------------- start, list, describe

#[test]
fn a_start_answers_at_once_with_pid_id_and_tag() {
    let server = Server::start();
    let mark = Mark::new();
    for (route, body) in [
        (
            "/v1/processes",
            json!({"cmd": ["sleep", mark.to_string()], "tag": "web server"}),
        ),
        (
            "/v1/procs",
            json!({"cmd": ["sleep", mark.to_string()], "tag": "web server", "background": true}),
        ),
        (
            "/v1/exec",
            json!({"cmd": ["sleep", mark.to_string()], "tag": "web server", "background": true}),
        ),
    ] {
        let begin = Instant::now();
        let reply = server.post(route, &body);
        assert!(
            begin.elapsed() < Duration::from_secs(5),
            "the answer does not wait for the end"
        );
        assert_eq!(reply.status, 200, "{route}: {}", reply.text());
        assert!(
            reply
                .header("content-type")
                .unwrap()
                .starts_with("application/json"),
            "{route}"
        );
        let process = reply.json();
        assert!(
            stat_of(pid_of(&process)).is_some(),
            "{route}: the pid is alive"
        );
        let id = process["id"].as_str().unwrap();
        assert!(
            id.strip_prefix("p-")
                .unwrap()
                .bytes()
                .all(|byte| byte.is_ascii_digit()),
            "{id}"
        );
        assert_eq!(process["tag"], "web server", "{route}");
        assert_eq!(process["background"], true, "{route}");
        assert_eq!(process["running"], true, "{route}");
    }
    assert_eq!(server.spawn(&json!({"cmd": "true"}))["tag"], Value::Null);
}

#[test]
fn the_list_is_a_bare_array_oldest_first_with_everything_in_it() {
    let server = Server::start();
    let mark = Mark::new();
    assert_eq!(server.get("/v1/processes").body, b"[]");
    let begin = now_ms();
    let shell = format!("echo é; sleep {mark}; :");
    let argv = json!(["sh", "-c", "echo out; echo error >&2; exit 3", "\u{2028}"]);
    let running = server.spawn(&json!({"cmd": shell, "tag": "a"}));
    let finished = server.spawn(&json!({"cmd": argv}));
    let killed = server.spawn(&json!({"cmd": ["sleep", mark.to_string()], "tag": ""}));
    let end = now_ms();
    wait(&server, &finished);
    server.post(&path(&killed, "/kill"), &json!({"signal": 15}));
    wait(&server, &killed);
    wait_until("its output is in", PATIENCE, || {
        entry(&server, &running)["stdout_bytes"] == 3
    });

    let list = server.get("/v1/processes").json();
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 3);
    for (listed, started) in list.iter().zip([&running, &finished, &killed]) {
        assert_eq!(
            (&listed["id"], &listed["pid"]),
            (&started["id"], &started["pid"])
        );
        let started_at = listed["started_at_ms"].as_u64().unwrap();
        assert!(
            (begin..=end).contains(&started_at),
            "{started_at} is between {begin} and {end}"
        );
        for key in [
            "cmd",
            "tag",
            "running",
            "exit_code",
            "signal",
            "reason",
            "background",
            "stdout_bytes",
            "stderr_bytes",
        ] {
            assert!(listed.get(key).is_some(), "{key} is in {listed}");
        }
        assert_eq!(listed, &entry(&server, started), "one is like in the list");
    }
    assert_eq!(
        (&list[0]["cmd"], &list[0]["tag"]),
        (&json!(shell), &json!("a")),
        "as it was sent"
    );
    assert_eq!(
        (
            &list[0]["running"],
            &list[0]["exit_code"],
            &list[0]["signal"]
        ),
        (&json!(true), &Value::Null, &Value::Null)
    );
    assert_eq!(
        (&list[0]["reason"], &list[0]["duration_ms"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!((&list[1]["cmd"], &list[1]["tag"]), (&argv, &Value::Null));
    assert_eq!(
        (
            &list[1]["running"],
            &list[1]["exit_code"],
            &list[1]["signal"]
        ),
        (&json!(false), &json!(3), &Value::Null)
    );
    assert_eq!(
        (
            &list[1]["reason"],
            &list[1]["stdout_bytes"],
            &list[1]["stderr_bytes"]
        ),
        (&json!("exited"), &json!(4), &json!(6))
    );
    assert!(list[1]["duration_ms"].is_u64());
    assert_eq!(
        (
            &list[2]["running"],
            &list[2]["exit_code"],
            &list[2]["signal"]
        ),
        (&json!(false), &Value::Null, &json!(15))
    );
    assert_eq!(
        (&list[2]["reason"], &list[2]["tag"]),
        (&json!("killed"), &json!(""))
    );
}

#[test]
fn both_route_families_are_the_same() {
    let server = Server::start();
    let mark = Mark::new();
    for (one, other) in [("processes", "procs"), ("procs", "processes")] {
        let started = server
            .post(
                &format!("/v1/{one}"),
                &json!({"cmd": format!("cat; exec sleep {mark}")}),
            )
            .json();
        let id = started["id"].as_str().unwrap();
        let at = |rest: &str| format!("/v1/{other}/{id}{rest}");
        assert_eq!(server.get(&at("")).json()["pid"], started["pid"]);
        assert_eq!(
            server.get(&format!("/v1/{other}")).json(),
            server.get(&format!("/v1/{one}")).json()
        );
        assert_eq!(
            server.request("POST", &at("/stdin?eof=1"), b"hello").json()["written"],
            5
        );
        let mut stream = server.stream("GET", &at("/logs?follow=1"), b"");
        assert_eq!(stream.next_output().unwrap()["data"], "hello");
        assert_eq!(
            server.get(&at("/wait?timeout=0.01")).json()["running"],
            true
        );
        assert_eq!(
            server.post(&at("/kill"), &json!({"signal": "TERM"})).json()["signaled"],
            true
        );
        assert_eq!(stream.next_output().unwrap()["reason"], "killed");
        assert_eq!(server.get(&at("/wait")).json()["signal"], 15);
        assert_eq!(server.delete(&at("")).json()["killed"], false);
        assert_eq!(server.get(&at("")).status, 404);
    }
}

#[test]
fn ids_are_never_used_again() {
    let server = Server::start();
    let mut seen = BTreeSet::new();
    let mut last = 0;
    for round in 0..60 {
        let process = server.spawn(&json!({"cmd": ["true"]}));
        let id = process["id"].as_str().unwrap();
        let number: u64 = id.strip_prefix("p-").unwrap().parse().unwrap();
        assert!(number > last, "{id} after p-{last}");
        last = number;
        assert!(seen.insert(id.to_owned()));
        if round % 2 == 0 {
            server.delete(&path(&process, ""));
        }
    }
}

#[test]
fn unknown_processes_are_404_and_wrong_methods_405() {
    let server = Server::start();
    server.spawn(&json!({"cmd": ["true"]}));
    for id in [
        "p-99999",
        "p-0",
        "nope",
        "4194304",
        "0",
        "-1",
        "p-",
        "p-1x",
        "P-1",
        "%2e%2e",
        "p-99999999999999999999999999",
    ] {
        for (method, rest) in [
            ("GET", ""),
            ("GET", "/logs"),
            ("GET", "/wait"),
            ("POST", "/kill"),
            ("POST", "/stdin"),
            ("DELETE", ""),
        ] {
            let reply = server.request(method, &format!("/v1/processes/{id}{rest}"), b"");
            assert_eq!(reply.status, 404, "{method} {id}{rest}: {}", reply.text());
        }
    }
    for (method, target, allowed) in [
        ("PUT", "/v1/processes", "POST"),
        ("DELETE", "/v1/processes", "POST"),
        ("POST", "/v1/processes/p-1", "DELETE"),
        ("PUT", "/v1/processes/p-1/kill", "POST"),
        ("DELETE", "/v1/processes/p-1/logs", "GET"),
        ("GET", "/v1/processes/p-1/stdin", "POST"),
        ("GET", "/v1/exec", "POST"),
    ] {
        let reply = server.request(method, target, b"");
        assert_eq!(reply.status, 405, "{method} {target}: {}", reply.text());
        assert!(
            reply.header("allow").unwrap().contains(allowed),
            "{method} {target}: {:?}",
            reply.header("allow")
        );
    }
}

#[test]
fn a_decimal_pid_stands_for_the_process() {
    let server = Server::start();
    let mark = Mark::new();
    let started = server.spawn(&json!({"cmd": format!("echo hi; exec sleep {mark}"), "tag": "t"}));
    let pid = started["pid"].to_string();
    let at = |rest: &str| format!("/v1/processes/{pid}{rest}");
    assert_eq!(server.get(&at("")).json()["id"], started["id"]);
    let mut stream = server.stream("GET", &at("/logs?follow=1"), b"");
    assert_eq!(stream.next_output().unwrap()["data"], "hi\n");
    assert_eq!(
        server.get(&at("/wait?timeout=0.01")).json()["running"],
        true
    );
    assert_eq!(
        server.post(&at("/kill"), &json!({"signal": "CONT"})).json()["signaled"],
        true
    );
    let reply = server.delete(&at(""));
    assert_eq!((reply.status, &reply.json()["killed"]), (200, &json!(true)));
    mark.wait_gone(PATIENCE);
    // A pid that is not one of the server's own processes is nobody.
    for pid in [server.pid(), std::process::id(), 1] {
        assert_eq!(server.delete(&format!("/v1/processes/{pid}")).status, 404);
        assert_eq!(
            server
                .post(
                    &format!("/v1/processes/{pid}/kill"),
                    &json!({"signal": "CONT"})
                )
                .status,
            404
        );
    }
    // Nor is the pid of a grandchild.
    let parent = server.spawn(&json!({"cmd": format!("sleep {mark} & echo $!; wait")}));
    let mut stream = follow(&server, &parent);
    let grandchild = stream.next_output().unwrap()["data"]
        .as_str()
        .unwrap()
        .trim()
        .to_owned();
    assert_eq!(
        server.delete(&format!("/v1/processes/{grandchild}")).status,
        404
    );
    assert_eq!(server.delete(&path(&parent, "")).json()["killed"], true);
}

#[test]
fn a_pid_still_stands_for_a_process_that_has_ended_by_itself() {
    // Old clients kill by pid, and must not get an error when the process was faster.
    let server = Server::start();
    let started = server.spawn(&json!({"cmd": "exit 3"}));
    wait(&server, &started);
    let target = format!("/v1/processes/{}", started["pid"]);
    assert_eq!(server.get(&target).json()["exit_code"], 3);
    let reply = server.delete(&target);
    assert_eq!(
        (reply.status, &reply.json()["killed"]),
        (200, &json!(false))
    );
}

#[test]
fn the_last_256_finished_processes_are_remembered_and_running_ones_always() {
    let server = Server::start();
    let mark = Mark::new();
    let oldest = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
    let mut ids = Vec::new();
    for round in 0..300 {
        // One kind forgets like the other.
        if round % 3 == 0 {
            let process = server.spawn(&json!({"cmd": format!("echo {round}")}));
            wait(&server, &process);
            ids.push(process["id"].as_str().unwrap().to_owned());
        } else {
            let outcome = server.exec(&json!({"cmd": format!("echo {round}")}));
            ids.push(outcome.start["id"].as_str().unwrap().to_owned());
        }
    }
    let mut expected = vec![oldest["id"].as_str().unwrap().to_owned()];
    expected.extend_from_slice(&ids[300 - 256..]);
    assert_eq!(listed(&server), expected);
    let forgotten = format!("/v1/processes/{}", ids[0]);
    assert_eq!(server.get(&forgotten).status, 404);
    let reply = server.delete(&forgotten);
    assert_eq!(
        (reply.status, &reply.json()["killed"]),
        (200, &json!(false)),
        "it was once there"
    );
    let remembered = server.get(&format!("/v1/processes/{}/logs", ids[44]));
    assert_eq!(
        output_of(&events_of(&remembered.body), "stdout", 0).data,
        b"44\n"
    );
    assert_eq!(entry(&server, &oldest)["running"], true);
}

#[test]
fn a_background_start_that_fails_leaves_nothing() {
    let server = Server::start();
    is_error(
        &server.post("/v1/processes", &json!({"cmd": ["no-such-program-here"]})),
        400,
        "not_found",
    );
    is_error(
        &server.post(
            "/v1/processes",
            &json!({"cmd": "true", "cwd": "/nonexistent"}),
        ),
        400,
        "bad_cwd",
    );
    assert_eq!(server.get("/v1/processes").json(), json!([]));
}

#[test]
fn a_start_under_the_same_id_happens_once_in_the_background_too() {
    let server = Server::start();
    let mark = Mark::new();
    let body = json!({"cmd": format!("echo up; exec sleep {mark}"), "id": "web"});
    let started: BTreeSet<String> = thread::scope(|scope| {
        let workers: Vec<_> = (0..16)
            .map(|_| scope.spawn(|| server.spawn(&body)["pid"].to_string()))
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .collect()
    });
    assert_eq!(started.len(), 1, "one pid: {started:?}");
    mark.wait_for(1);
    assert_eq!(mark.pids().len(), 1);
    assert_eq!(listed(&server), ["web"]);
    is_error(
        &server.post("/v1/processes", &json!({"cmd": "true", "id": "web"})),
        409,
        "id_in_use",
    );
    // A client in the foreground can attach to what runs in the background.
    let mut stream = server.exec_stream(&body);
    assert_eq!(stream.next().unwrap()["attached"], true);
    assert_eq!(stream.next_output().unwrap()["data"], "up\n");
    assert_eq!(server.delete("/v1/processes/web").json()["killed"], true);
    assert_eq!(stream.next_output().unwrap()["reason"], "deleted");
}

// ------------------------------------------------------------------------------------------ logs

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
        let entry = entry(&server, &process);
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
            entry(&server, &process)["stdout_bytes"] == count
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
        entry(&server, &process)["stdout_bytes"],
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
    let before = memory_of(server_pid(&server), "VmHWM");
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
    let grown = memory_of(server_pid(&server), "VmHWM") - before;
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
    let threads = || crate::fixture::count_entries(&format!("/proc/{}/task", server.pid()));
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
    assert_eq!(entry(&server, &process)["running"], true);
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

// ------------------------------------------------------------------------------- bounds of memory

#[test]
fn all_logs_together_are_bounded_and_the_longest_finished_go_first() {
    const RING: u64 = 1 << 20;
    const TOTAL: u64 = 4 << 20;
    let server = Server::builder()
        .env("SBX_LOG_BYTES", RING)
        .env("SBX_LOG_TOTAL_BYTES", TOTAL)
        .start();
    let directory = TempDir::new();
    let text = numbered_text(900 << 10);
    std::fs::write(directory.path().join("text"), &text).unwrap();
    let processes: Vec<Value> = (0..12)
        .map(|_| {
            let process = server.spawn(&json!({"cmd": ["cat", directory.join("text")]}));
            wait(&server, &process);
            process
        })
        .collect();
    let mut kept = 0;
    let mut sizes = Vec::new();
    for process in &processes {
        let events = logs(&server, process, "");
        let output = output_of(&events, "stdout", 0);
        assert_eq!(
            output.end,
            text.len() as u64,
            "what is gone is said: {:?}",
            events[0]
        );
        assert!(text.as_bytes().ends_with(&output.data));
        assert_eq!(events.last().unwrap()["exit_code"], 0);
        kept += output.data.len() as u64;
        sizes.push(output.data.len());
    }
    assert!(kept <= TOTAL, "{kept} bytes are kept of at most {TOTAL}");
    assert!(
        kept >= TOTAL / 2,
        "only {kept} bytes are kept of {TOTAL}: {sizes:?}"
    );
    assert_eq!(sizes[11], text.len(), "the newest is whole: {sizes:?}");
    assert!(sizes.is_sorted(), "the oldest go first: {sizes:?}");
    assert_eq!(sizes[0], 0, "{sizes:?}");
}

#[test]
fn running_processes_are_within_the_bound_too() {
    const RING: u64 = 1 << 20;
    const TOTAL: u64 = 4 << 20;
    let server = Server::builder()
        .env("SBX_LOG_BYTES", RING)
        .env("SBX_LOG_TOTAL_BYTES", TOTAL)
        .start();
    let mark = Mark::new();
    let processes: Vec<Value> = (0..12)
        .map(|_| {
            let script = format!("yes text | tr -d '\\n' | head -c 1000000; exec sleep {mark}");
            server.spawn(&json!({"cmd": script}))
        })
        .collect();
    wait_until("all have written", PATIENCE, || {
        processes
            .iter()
            .all(|process| entry(&server, process)["stdout_bytes"] == 1_000_000)
    });
    let kept: u64 = processes
        .iter()
        .map(|process| stdout_of(&server, process).data.len() as u64)
        .sum();
    assert!(kept <= TOTAL, "{kept} bytes are kept of at most {TOTAL}");
    assert!(kept >= TOTAL / 2, "only {kept} bytes are kept of {TOTAL}");
    for process in &processes {
        assert_eq!(
            stdout_of(&server, process).end,
            1_000_000,
            "the rest is said to be lost"
        );
    }
}

#[test]
fn the_memory_behind_the_logs_is_bounded() {
    const MIB: u64 = 1 << 20;
    let server = Server::builder()
        .env("SBX_LOG_BYTES", 8 * MIB)
        .env("SBX_LOG_TOTAL_BYTES", 32 * MIB)
        .start();
    let before = memory_of(server_pid(&server), "VmRSS");
    for _ in 0..10 {
        // 160 MiB in all; four at a time, so that some run while others are forgotten.
        let batch: Vec<Value> = (0..4)
            .map(|_| server.spawn(&json!({"cmd": ["head", "-c", "8388608", "/dev/zero"]})))
            .collect();
        for process in &batch {
            wait(&server, process);
        }
    }
    let peak = memory_of(server_pid(&server), "VmHWM") - before;
    assert!(
        peak < 56 * MIB,
        "the server grew by {} MiB for at most 32 MiB of logs",
        peak / MIB
    );
    for id in listed(&server) {
        server.delete(&format!("/v1/processes/{id}"));
    }
    let after = memory_of(server_pid(&server), "VmRSS")
        - before.min(memory_of(server_pid(&server), "VmRSS"));
    assert!(
        after < 16 * MIB,
        "{} MiB are left when all logs are deleted",
        after / MIB
    );
}

#[test]
fn small_processes_cost_little() {
    let server = Server::start();
    for _ in 0..20 {
        server.exec(&json!({"cmd": "echo hi"}));
    }
    let before = memory_of(server_pid(&server), "VmRSS");
    for _ in 0..200 {
        server.exec(&json!({"cmd": "echo hi"}));
    }
    let grown = memory_of(server_pid(&server), "VmRSS").saturating_sub(before);
    assert!(
        grown < 8 << 20,
        "200 remembered commands of three bytes cost {grown} bytes"
    );
}

// ------------------------------------------------------------------------------------- wait, kill

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
    assert_eq!(entry(&server, &process)["running"], true);
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
        entry(&server, &process)["running"],
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

// ------------------------------------------------------------------------------------------ delete

#[test]
fn delete_kills_the_tree_and_forgets_and_says_who_did_it() {
    let server = Server::start();
    let mark = Mark::new();
    let process = server.spawn(&json!({"cmd": format!("trap '' TERM; setsid sh -c 'sleep {mark} & sleep {mark}' & sleep {mark} & sleep {mark}; :")}));
    mark.wait_for(6);
    let mut stream = follow(&server, &process);
    let mut patient = server.connect();
    patient.send_request("GET", &path(&process, "/wait"), &[], b"");
    let reply = server.delete(&path(&process, ""));
    assert_eq!(reply.status, 200);
    assert_eq!(
        (&reply.json()["killed"], &reply.json()["id"]),
        (&json!(true), &process["id"])
    );
    mark.wait_gone(Duration::from_secs(2));
    let exit = stream.next_output().unwrap();
    assert_eq!(
        (&exit["event"], &exit["reason"], &exit["signal"]),
        (&json!("exit"), &json!("deleted"), &json!(9))
    );
    assert!(stream.next().is_none());
    // Whoever waited is told; whoever came to wait too late finds nothing.
    let waited = patient.read_reply();
    if waited.status == 200 {
        assert_eq!(waited.json()["reason"], "deleted");
    } else {
        assert_eq!(waited.status, 404, "{}", waited.text());
    }
    assert_eq!(server.get(&path(&process, "")).status, 404, "forgotten");
    assert_eq!(listed(&server), Vec::<String>::new());
    for _ in 0..2 {
        let reply = server.delete(&path(&process, ""));
        assert_eq!(
            (reply.status, &reply.json()["killed"]),
            (200, &json!(false)),
            "once more"
        );
    }
}

#[test]
fn delete_of_what_has_ended_forgets_it_and_killed_nothing() {
    let server = Server::start();
    let process = server.spawn(&json!({"cmd": ["true"]}));
    wait(&server, &process);
    let reply = server.delete(&path(&process, ""));
    assert_eq!(
        (reply.status, &reply.json()["killed"]),
        (200, &json!(false))
    );
    assert_eq!(server.get(&path(&process, "")).status, 404);
    // What an ended command left running is not the process any more, and lives on.
    let mark = Mark::new();
    let outcome = server.exec(&json!({"cmd": format!("sleep {mark} & echo")}));
    assert_eq!(outcome.code(), Some(0));
}

#[test]
fn of_many_deletes_one_has_killed() {
    let server = Server::start();
    let mark = Mark::new();
    for _ in 0..10 {
        let process = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
        let killed: usize = thread::scope(|scope| {
            let workers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| server.delete(&path(&process, ""))))
                .collect();
            workers
                .into_iter()
                .map(|worker| worker.join().unwrap())
                .map(|reply| {
                    assert_eq!(reply.status, 200, "{}", reply.text());
                    usize::from(reply.json()["killed"] == true)
                })
                .sum()
        });
        assert_eq!(killed, 1);
    }
    mark.wait_gone(PATIENCE);
}

#[test]
fn a_foreground_command_can_be_deleted_and_its_client_is_told() {
    let server = Server::start();
    let mark = Mark::new();
    let mut stream = server.exec_stream(&json!({"cmd": ["sleep", mark.to_string()]}));
    let start = stream.next().unwrap();
    assert_eq!(server.delete(&path(&start, "")).json()["killed"], true);
    let exit = stream.next_output().unwrap();
    assert_eq!(
        (&exit["event"], &exit["reason"], &exit["signal"]),
        (&json!("exit"), &json!("deleted"), &json!(9))
    );
    assert!(stream.next().is_none());
    mark.wait_gone(PATIENCE);
}

#[test]
fn a_delete_that_meets_the_end_tells_the_truth() {
    // The race between an end by itself and a kill: whichever came first, the followed stream and
    // the answer must tell the same story. Several at once, because a delete may also come when
    // the process was reaped and what it wrote is still being read.
    let server = Server::start();
    let meet = |round: u64| {
        let process = server.spawn(&json!({"cmd": ["sleep", format!("0.0{}", round % 10)]}));
        let stream = follow(&server, &process);
        if round.is_multiple_of(2) {
            thread::sleep(Duration::from_millis(round % 20));
        }
        let killed = server.delete(&path(&process, "")).json()["killed"].clone();
        let exit = stream.last().unwrap();
        let expected = if killed == true {
            ("deleted", json!(9))
        } else {
            ("exited", Value::Null)
        };
        assert_eq!(
            (exit["reason"].as_str().unwrap(), exit["signal"].clone()),
            expected,
            "round {round}"
        );
    };
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..25).for_each(meet));
        }
    });
}

// ------------------------------------------------------------------------------------------- stdin

#[test]
fn stdin_stays_open_until_it_is_ended() {
    let server = Server::start();
    let process = server.spawn(&json!({"cmd": ["cat"]}));
    let mut stream = follow(&server, &process);
    for (method, query, text) in [
        ("POST", "", "one"),
        ("PUT", "?eof=0", "two é\u{2028}"),
        ("POST", "?eof=false", "\0three\n"),
    ] {
        let reply = server.request(
            method,
            &path(&process, &format!("/stdin{query}")),
            text.as_bytes(),
        );
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json(), json!({"written": text.len(), "eof": false}));
        assert_eq!(
            stream.next_output().unwrap()["data"],
            text,
            "it is passed on at once"
        );
    }
    assert_eq!(
        feed(&server, &process, "", b"").json(),
        json!({"written": 0, "eof": false})
    );
    assert_eq!(entry(&server, &process)["running"], true);
    assert_eq!(
        feed(&server, &process, "?eof=1", b"end").json(),
        json!({"written": 3, "eof": true})
    );
    assert_eq!(stream.next_output().unwrap()["data"], "end");
    assert_eq!(stream.next_output().unwrap()["exit_code"], 0);
    is_error(&feed(&server, &process, "", b"late"), 409, "stdin_closed");
    is_error(&feed(&server, &process, "?eof=1", b""), 409, "stdin_closed");

    let process = server.spawn(&json!({"cmd": "cat; echo end"}));
    assert_eq!(
        feed(&server, &process, "?eof=true", b"").json(),
        json!({"written": 0, "eof": true})
    );
    wait(&server, &process);
    assert_eq!(stdout_of(&server, &process).data, b"end\n");
}

#[test]
fn stdin_that_is_not_open_is_409() {
    let server = Server::start();
    let mark = Mark::new();
    let given = server.spawn(&json!({"cmd": format!("cat; exec sleep {mark}"), "stdin": "given"}));
    is_error(&feed(&server, &given, "", b"more"), 409, "stdin_closed");
    let empty =
        server.spawn(&json!({"cmd": format!("cat; echo end; exec sleep {mark}"), "stdin": ""}));
    is_error(&feed(&server, &empty, "", b"more"), 409, "stdin_closed");
    wait_until("an empty stdin has ended", PATIENCE, || {
        stdout_of(&server, &empty).data == b"end\n"
    });
    wait_until("a given stdin was fed", PATIENCE, || {
        stdout_of(&server, &given).data == b"given"
    });
    let mut stream = server.exec_stream(&json!({"cmd": ["sleep", mark.to_string()]}));
    let foreground = stream.next().unwrap();
    is_error(
        &feed(&server, &foreground, "", b"more"),
        409,
        "stdin_closed",
    );
    let closed = server.spawn(&json!({"cmd": format!("exec <&-; echo ready; exec sleep {mark}")}));
    assert_eq!(
        follow(&server, &closed).next_output().unwrap()["data"],
        "ready\n"
    );
    is_error(&feed(&server, &closed, "", b"more"), 409, "stdin_closed");
    let ended = server.spawn(&json!({"cmd": ["true"]}));
    wait(&server, &ended);
    is_error(&feed(&server, &ended, "", b"more"), 409, "stdin_closed");
    is_error(&feed(&server, &ended, "?eof=1", b""), 409, "stdin_closed");
    let open = server.spawn(&json!({"cmd": ["cat"]}));
    for bad in ["?eof=maybe", "?eof=", "?eof=2", "?eof=1&eof=0"] {
        assert_eq!(feed(&server, &open, bad, b"x").status, 400, "{bad}");
    }
    assert_eq!(
        feed(&server, &open, "?eof=1", b"").status,
        200,
        "none of it was done"
    );
    wait(&server, &open);
    assert_eq!(stdout_of(&server, &open).data, b"");
}

#[test]
fn sixty_four_mebibytes_of_stdin_arrive_intact() {
    let directory = TempDir::new();
    let text = numbered_text(64 << 20);
    let copy = directory.join("copy");
    // Large enough to keep it all, so that it can be read back from the logs.
    let server = Server::builder().env("SBX_LOG_BYTES", 80 << 20).start();
    let process = server.spawn(&json!({"cmd": ["tee", copy]}));
    let reply = feed(&server, &process, "?eof=1", text.as_bytes());
    assert_eq!(
        (reply.status, reply.json()),
        (200, json!({"written": text.len(), "eof": true}))
    );
    assert_eq!(wait(&server, &process)["exit_code"], 0);
    assert!(
        std::fs::read(&copy).unwrap() == text.as_bytes(),
        "the command got every byte"
    );
    let output = stdout_of(&server, &process);
    assert_eq!(output.dropped, 0);
    assert!(
        output.data == text.as_bytes(),
        "every byte came back: {}",
        output.data.len()
    );
}

#[test]
fn large_stdin_costs_no_memory() {
    let server = Server::start();
    let text = numbered_text(64 << 20);
    let before = memory_of(server_pid(&server), "VmHWM");
    let process = server.spawn(&json!({"cmd": ["sha256sum"]}));
    // In two requests, the first of them chunked.
    let (head, tail) = text.as_bytes().split_at(30_000_001);
    let mut connection = server.connect();
    connection.send_request(
        "POST",
        &path(&process, "/stdin"),
        &[("Transfer-Encoding", "chunked")],
        b"",
    );
    for piece in head.chunks(1_000_000) {
        connection.send(format!("{:x}\r\n", piece.len()).as_bytes());
        connection.send(piece);
        connection.send(b"\r\n");
    }
    connection.send(b"0\r\n\r\n");
    assert_eq!(
        connection.read_reply().json(),
        json!({"written": head.len(), "eof": false})
    );
    let reply = connection.request("POST", &path(&process, "/stdin?eof=1"), &[], tail);
    assert_eq!(reply.json(), json!({"written": tail.len(), "eof": true}));
    wait(&server, &process);
    let grown = memory_of(server_pid(&server), "VmHWM") - before;
    assert!(grown < 8 << 20, "the server grew by {grown} bytes");
    let directory = TempDir::new();
    std::fs::write(directory.path().join("text"), &text).unwrap();
    let expected = server
        .exec(&json!({"cmd": format!("sha256sum < {}", directory.join("text"))}))
        .stdout;
    assert_eq!(
        String::from_utf8(stdout_of(&server, &process).data).unwrap(),
        expected
    );
}

#[test]
fn one_writer_at_a_time_feeds_stdin() {
    let server = Server::start();
    let mark = Mark::new();
    let process = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
    let body = numbered_text(4 << 20);
    thread::scope(|scope| {
        let target = path(&process, "/stdin");
        let mut first = server.connect();
        // More than a pipe holds, and nobody reads: it is stuck until the process ends.
        let mut sender = first.stream.try_clone().unwrap();
        let head = format!(
            "POST {target} HTTP/1.1\r\nX-Sandbox-Token: {}\r\nContent-Length: {}\r\n\r\n",
            server.token.clone().unwrap(),
            body.len()
        );
        let body = &body;
        scope.spawn(move || {
            use std::io::Write as _;
            // The server may close in the middle of it.
            let _ = sender
                .write_all(head.as_bytes())
                .and_then(|()| sender.write_all(body.as_bytes()));
        });
        wait_until("another writer is told to wait", PATIENCE, || {
            let reply = server.request("POST", &target, b"");
            if reply.status == 409 {
                is_error(&reply, 409, "stdin_busy");
            }
            reply.status == 409
        });
        assert_eq!(server.delete(&path(&process, "")).json()["killed"], true);
        // The stuck one is let go, with an answer or with a close.
        let answer = String::from_utf8_lossy(&first.read_to_close()).into_owned();
        assert!(
            answer.is_empty()
                || answer.starts_with("HTTP/1.1 409 ")
                || answer.starts_with("HTTP/1.1 404 "),
            "{answer}"
        );
    });
}

#[test]
fn a_reader_that_stops_reading_lets_the_writer_go() {
    let server = Server::start();
    let process = server.spawn(&json!({"cmd": ["head", "-c", "10"]}));
    let body = numbered_text(4 << 20);
    let mut connection = server.connect();
    let mut sender = connection.stream.try_clone().unwrap();
    let token = server.token.clone().unwrap();
    let target = path(&process, "/stdin");
    thread::scope(|scope| {
        scope.spawn(|| {
            use std::io::Write as _;
            let head = format!(
                "POST {target} HTTP/1.1\r\nX-Sandbox-Token: {token}\r\nContent-Length: {}\r\n\r\n",
                body.len()
            );
            let _ = sender
                .write_all(head.as_bytes())
                .and_then(|()| sender.write_all(body.as_bytes()));
        });
        let answer = String::from_utf8_lossy(&connection.read_to_close()).into_owned();
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 409 "),
            "{answer}"
        );
    });
    assert_eq!(wait(&server, &process)["exit_code"], 0);
    assert_eq!(stdout_of(&server, &process).data, &body.as_bytes()[..10]);
    is_error(&feed(&server, &process, "", b"x"), 409, "stdin_closed");
}

#[test]
fn a_writer_that_vanishes_leaves_stdin_open_for_the_next() {
    let server = Server::start();
    let process = server.spawn(&json!({"cmd": ["cat"]}));
    let mut stream = follow(&server, &process);
    let mut connection = server.connect();
    connection.send_request(
        "POST",
        &path(&process, "/stdin?eof=1"),
        &[("Content-Length", "1000")],
        b"part",
    );
    assert_eq!(stream.next_output().unwrap()["data"], "part");
    reset(connection);
    wait_until("the next writer is let in", PATIENCE, || {
        feed(&server, &process, "", b"").status == 200
    });
    assert_eq!(
        entry(&server, &process)["running"],
        true,
        "an upload that broke off is no end of file"
    );
    assert_eq!(feed(&server, &process, "?eof=1", b" rest").status, 200);
    assert_eq!(stream.next_output().unwrap()["data"], " rest");
    assert_eq!(stream.next_output().unwrap()["exit_code"], 0);
}

#[test]
fn a_writer_that_has_only_closed_its_sending_half_is_served_to_the_end() {
    let server = Server::start();
    let mut gate = Gate::new();
    // It reads nothing until the writer has said all it has to say.
    let process = server.spawn(&json!({"cmd": format!(": < {}; exec wc -c", gate.path())}));
    let body = numbered_text(200_000);
    let mut connection = server.connect();
    connection.send_request(
        "POST",
        &path(&process, "/stdin?eof=1"),
        &[],
        body.as_bytes(),
    );
    connection.stream.shutdown(Shutdown::Write).unwrap();
    wait_until("the writer is at work", PATIENCE, || {
        feed(&server, &process, "", b"").status == 409
    });
    gate.open();
    // The server may have asked, by an interim response, whether all of the client was gone.
    let head = loop {
        let head = connection.read_head();
        if head.status >= 200 {
            break head;
        }
    };
    let reply = connection.read_body(head);
    assert_eq!(
        (reply.status, reply.json()),
        (200, json!({"written": body.len(), "eof": true}))
    );
    wait(&server, &process);
    assert_eq!(stdout_of(&server, &process).data, b"200000\n");
}

// ------------------------------------------------------------------------------------- everything

#[test]
fn a_storm_of_everything_on_the_same_processes_breaks_nothing() {
    let server = Server::start();
    let mark = Mark::new();
    let body = |name: usize| {
        json!({"cmd": format!("cat; sleep {mark}"), "id": format!("target-{name}")}).to_string()
    };
    thread::scope(|scope| {
        for worker in 0..6_u64 {
            let (server, body) = (&server, &body);
            scope.spawn(move || {
                let mut connection = server.connect();
                for choice in random_bytes(400, worker + 1).chunks(2) {
                    let name = usize::from(choice[0] % 3);
                    let target = |rest: &str| format!("/v1/processes/target-{name}{rest}");
                    let reply = match choice[1] % 9 {
                        0 | 1 => {
                            connection.request("POST", "/v1/processes", &[], body(name).as_bytes())
                        }
                        2 => connection.request("DELETE", &target(""), &[], b""),
                        3 => connection.request(
                            "POST",
                            &target("/kill"),
                            &[],
                            b"{\"signal\": \"TERM\"}",
                        ),
                        4 => connection.request("POST", &target("/stdin"), &[], b"some input\n"),
                        5 => connection.request("POST", &target("/stdin?eof=1"), &[], b""),
                        6 => connection.request("GET", &target("/logs"), &[], b""),
                        7 => connection.request("GET", &target("/wait?timeout=0.01"), &[], b""),
                        _ => connection.request("GET", "/v1/processes", &[], b""),
                    };
                    assert!(
                        matches!(reply.status, 200 | 404 | 409),
                        "{} {}",
                        reply.status,
                        reply.text()
                    );
                }
            });
        }
    });
    for name in 0..3 {
        server.delete(&format!("/v1/processes/target-{name}"));
    }
    mark.wait_gone(PATIENCE);
    assert_eq!(listed(&server), Vec::<String>::new());
    assert_eq!(server.exec(&json!({"cmd": "echo fine"})).stdout, "fine\n");
}
