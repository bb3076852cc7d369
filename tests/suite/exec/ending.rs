//! The end of a command: one `exit`, true, last and prompt, whatever a grandchild does with the
//! pipes; and a timeout that leaves nothing of the tree, whatever the tree has done to hide.

use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::{read_until, write_file};
use crate::fixture::{
    EventStream, Mark, MemoryGroup, Outcome, PATIENCE, Server, TempDir, best_of, events_of,
    output_of, stat_of, wait_until,
};
use crate::skip;

#[test]
fn exit_comes_within_250_ms_though_a_grandchild_holds_the_pipes() {
    let server = Server::start();
    let mark = Mark::new();
    let mut connection = server.connect();
    let body = json!({"cmd": format!("sleep {mark} & echo done")}).to_string();
    let best = best_of(5, || {
        let begin = Instant::now();
        // The whole reply is read: the stream, too, must end, and leave the connection usable.
        let reply = connection.request("POST", "/v1/exec", &[], body.as_bytes());
        let taken = begin.elapsed();
        let outcome = Outcome::of(events_of(&reply.body));
        assert_eq!(outcome.stdout, "done\n");
        assert_eq!(outcome.exit["reason"], "exited");
        taken
    });
    assert!(
        best < Duration::from_millis(250),
        "the fastest of five took {best:?}"
    );
    assert_eq!(mark.pids().len(), 5, "the sleepers live on");
    drop(connection);
    // Longer than a client's absence may go unnoticed: it must not be taken out on the sleepers.
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(
        mark.pids().len(),
        5,
        "the sleepers live on after the client has gone"
    );
}

#[test]
fn a_grandchild_that_floods_the_pipes_does_not_hold_up_the_exit() {
    let server = Server::start();
    let late = best_of(3, || {
        let mark = Mark::new();
        let begin = Instant::now();
        let script = format!("yes {mark} & yes {mark} >&2 & sleep 0.2; exit 3");
        let events: Vec<Value> = server.exec_stream(&json!({"cmd": script})).collect();
        let taken = begin.elapsed();
        output_of(&events, "stdout", 0);
        output_of(&events, "stderr", 0);
        let exit = events.last().unwrap();
        assert_eq!(exit["exit_code"], 3);
        assert_eq!(mark.pids().len(), 2, "the writers live on");
        taken.saturating_sub(Duration::from_millis(exit["duration_ms"].as_u64().unwrap()))
    });
    // Megabytes lie in the socket then, and this client is slow to read them: what must not be is an
    // exit that waits for a pause.
    assert!(late < Duration::from_secs(2), "{late:?} after the end");
}

#[test]
fn a_plain_command_ends_promptly() {
    let server = Server::start();
    let best = best_of(5, || {
        let begin = Instant::now();
        assert_eq!(server.exec(&json!({"cmd": ["true"]})).code(), Some(0));
        begin.elapsed()
    });
    assert!(
        best < Duration::from_millis(100),
        "the fastest of five took {best:?}"
    );
}

#[test]
fn a_server_left_behind_survives_writing_to_the_old_pipes() {
    let directory = TempDir::new();
    let server = Server::start();
    let mark = Mark::new();
    let counter = directory.join("counter");
    // Each round is more than a pipe holds, on both streams; a write that fails is the end of it.
    let script = format!(
        "(: {mark}; i=0; while head -c 100000 /dev/zero && head -c 100000 /dev/zero >&2; do \
         i=$((i+1)); echo $i > {counter}; done) & echo started"
    );
    // Through a connection that closes at once, as real clients do.
    let outcome = server.exec(&json!({"cmd": script}));
    assert_eq!(outcome.exit["exit_code"], 0);
    let count = || {
        std::fs::read_to_string(&counter)
            .ok()
            .and_then(|text| text.trim().parse::<u64>().ok())
            .unwrap_or(0)
    };
    // What was begun before the exit could still lie in the pipe, so many rounds.
    wait_until("the left-behind server goes on writing", PATIENCE, || {
        count() > 50
    });
    // And when its record is long forgotten.
    for _ in 0..300 {
        server.exec(&json!({"cmd": ["true"]}));
    }
    let id = outcome.start["id"].as_str().unwrap();
    assert_eq!(
        server.get(&format!("/v1/processes/{id}")).status,
        404,
        "its record has gone"
    );
    let then = count();
    wait_until("it goes on writing without its record", PATIENCE, || {
        count() > then + 50
    });
}

#[test]
fn a_process_that_closed_its_output_still_tells_its_end() {
    let server = Server::start();
    let begin = Instant::now();
    let outcome = server.exec(&json!({"cmd": "echo last; exec >&- 2>&-; sleep 0.5; exit 9"}));
    assert!(
        begin.elapsed() >= Duration::from_millis(500),
        "it ended later than its output did"
    );
    assert_eq!(outcome.stdout, "last\n");
    assert_eq!(outcome.code(), Some(9));
}

#[test]
fn exit_codes_and_signals_are_told_truly() {
    let server = Server::start();
    for code in [0, 1, 2, 100, 126, 127, 128, 137, 255] {
        let exit = server.exec(&json!({"cmd": format!("exit {code}")})).exit;
        assert_eq!(
            (exit["exit_code"].as_i64(), &exit["signal"]),
            (Some(code), &Value::Null)
        );
        assert_eq!(exit["reason"], "exited");
    }
    for signal in [1, 2, 6, 9, 10, 11, 13, 14, 15, 31, 40] {
        let exit = server
            .exec(&json!({"cmd": format!("kill -{signal} $$; sleep 5")}))
            .exit;
        assert_eq!(
            (&exit["exit_code"], exit["signal"].as_i64()),
            (&Value::Null, Some(signal))
        );
        assert_eq!(exit["reason"], "signaled");
        assert_eq!(exit["timed_out"], false);
    }
    assert_eq!(
        server.exec(&json!({"cmd": "no-such-program-here"})).code(),
        Some(127)
    );
    let directory = TempDir::new();
    let plain = write_file(&directory, "plain", "");
    assert_eq!(server.exec(&json!({"cmd": plain})).code(), Some(126));
}

#[test]
fn the_reason_says_who_ended_it() {
    let server = Server::start();
    let mark = Mark::new();
    let start = |extra: Value| {
        let mut body = json!({"cmd": format!("echo ready; exec sleep {mark}")});
        body.as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        let mut stream = server.exec_stream(&body);
        let id = stream.next().unwrap()["id"].as_str().unwrap().to_owned();
        read_until(&mut stream, "ready\n");
        (stream, id)
    };
    let ended = |mut stream: EventStream, signal: i64, reason: &str| {
        let exit = stream.next_output().unwrap();
        assert_eq!(exit["event"], "exit");
        assert_eq!(exit["reason"], reason);
        assert_eq!(exit["exit_code"], Value::Null);
        assert_eq!(exit["signal"], signal, "{reason}");
        assert_eq!(exit["timed_out"], reason == "timeout");
        assert!(stream.next().is_none(), "exit is last");
    };

    let (stream, id) = start(json!({}));
    assert_eq!(
        server
            .post(
                &format!("/v1/processes/{id}/kill"),
                &json!({"signal": "TERM"})
            )
            .status,
        200
    );
    ended(stream, 15, "killed");
    assert_eq!(server.entry(&json!(id))["reason"], "killed");

    let (stream, id) = start(json!({}));
    assert_eq!(
        server.delete(&format!("/v1/processes/{id}")).json()["killed"],
        true
    );
    ended(stream, 9, "deleted");

    let (stream, id) = start(json!({"timeout": 0.6}));
    ended(stream, 9, "timeout");
    assert_eq!(server.entry(&json!(id))["reason"], "timeout");

    let (stream, id) = start(json!({}));
    kill(Pid::from_raw(mark.any()), Signal::SIGTERM).unwrap();
    ended(stream, 15, "signaled");
    assert_eq!(server.entry(&json!(id))["reason"], "signaled");

    let (stream, id) = start(json!({}));
    drop(stream);
    wait_until("the record says disconnected", PATIENCE, || {
        server.entry(&json!(id))["reason"] == "disconnected"
    });
    let record = server.entry(&json!(id));
    assert_eq!(
        (&record["running"], &record["signal"], &record["exit_code"]),
        (&json!(false), &json!(9), &Value::Null)
    );
}

#[test]
fn the_kernel_kills_the_hog_and_not_the_server_and_the_reason_says_oom() {
    let Some(group) = MemoryGroup::new(96 << 20) else {
        skip!("no memory cgroup can be made here");
    };
    let server = group.holding(Server::builder());
    // tail keeps what has no line end until it has seen the end, which never comes.
    let outcome = server.exec(&json!({"cmd": ["tail", "/dev/zero"], "timeout": 60}));
    assert_eq!(outcome.exit["signal"], 9);
    assert_eq!(outcome.exit["reason"], "oom");
    assert_eq!(
        server.exec(&json!({"cmd": "echo fine"})).stdout,
        "fine\n",
        "the server lives"
    );
    // A death by SIGKILL is not always the kernel's doing.
    assert_eq!(
        server.exec(&json!({"cmd": "kill -9 $$"})).exit["reason"],
        "signaled"
    );
    drop(server);
}

/// Trees of every shape, as shell scripts; MARK stands for the mark.
const TREES: &[(&str, &str)] = &[
    ("the main process alone", "exec sleep MARK"),
    ("children", "sleep MARK & sleep MARK & sleep MARK"),
    (
        "orphans of its group",
        "(sleep MARK &); (sleep MARK &); sleep MARK",
    ),
    (
        "a child with a session of its own",
        "setsid sleep MARK & sleep MARK",
    ),
    (
        "a whole tree with a session of its own",
        "setsid sh -c 'sleep MARK & (sleep MARK &) sleep MARK' & sleep MARK",
    ),
    ("sessions in sessions", "sh NEST 12 MARK & sleep MARK"),
    (
        "job control",
        "bash -c 'set -m; sleep MARK & (sleep MARK; :) & sleep MARK | cat & wait'",
    ),
    (
        "stopped processes",
        "sleep MARK & kill -STOP $!; kill -STOP $$; sleep MARK",
    ),
    (
        "a stopped child with a session of its own",
        "setsid sh -c 'sleep MARK & kill -STOP $$; wait' & sleep MARK",
    ),
    (
        "those that ignore signals",
        "trap '' TERM INT HUP QUIT; setsid sleep MARK & sleep MARK; sleep MARK",
    ),
    (
        "one that forks without end",
        "while :; do sleep MARK & sleep 0.02; done",
    ),
    (
        "a session that begins sessions without end",
        "setsid sh -c 'while :; do setsid sleep MARK & sleep 0.005; done' & sleep MARK",
    ),
    (
        "sessions without end",
        "while :; do setsid sleep MARK & sleep 0.02; done",
    ),
    (
        "a chain, each link of which ends",
        "f() { : MARK; sleep 0.02; f & }; f & sleep MARK",
    ),
    (
        "such a chain as a job",
        "bash -c 'f() { : MARK; sleep 0.02; f & }; set -m; f & wait; sleep MARK'",
    ),
    (
        "one that closed its output",
        "exec >&- 2>&- <&-; sleep MARK & sleep MARK",
    ),
    (
        "a main process that waits for a stuck reader",
        "yes MARK | sleep MARK",
    ),
];

/// A script that starts itself in a new session, and so on, `$1` times.
const NEST: &str = "[ \"$1\" -gt 0 ] && setsid sh \"$0\" $(($1-1)) \"$2\" & sleep $2\n";

#[test]
fn a_timeout_leaves_no_process_of_the_tree() {
    let directory = TempDir::new();
    let nest = write_file(&directory, "nest", NEST);
    let server = Server::start();
    thread::scope(|scope| {
        for (name, script) in TREES {
            let (server, nest) = (&server, &nest);
            scope.spawn(move || {
                let mark = Mark::new();
                let script = script
                    .replace("MARK", &mark.to_string())
                    .replace("NEST", nest);
                let events = server
                    .exec_stream(&json!({"cmd": format!("echo ready; {script}"), "timeout": 1.5}));
                let outcome = Outcome::of(events.collect());
                assert_eq!(
                    outcome.stdout, "ready\n",
                    "{name}: what was printed is kept"
                );
                let exit = &outcome.exit;
                assert_eq!(exit["timed_out"], true, "{name}: {exit}");
                assert_eq!(exit["reason"], "timeout", "{name}: {exit}");
                assert_eq!(exit["exit_code"], Value::Null, "{name}: {exit}");
                assert_eq!(exit["signal"], 9, "{name}: {exit}");
                let duration = exit["duration_ms"].as_u64().unwrap();
                // Not later than a machine allows that is busy with storms; punctuality has a test of
                // its own.
                assert!((1500..60_000).contains(&duration), "{name}: {duration} ms");
                let deadline = Instant::now() + PATIENCE;
                while !mark.pids().is_empty() {
                    let left = || {
                        let line = |pid: i32| {
                            std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()
                        };
                        mark.pids()
                            .into_iter()
                            .map(|pid| {
                                (
                                    stat_of(pid),
                                    String::from_utf8_lossy(&line(pid)).replace('\0', " "),
                                )
                            })
                            .collect::<Vec<_>>()
                    };
                    assert!(
                        Instant::now() < deadline,
                        "{name}: left over: {:#?}",
                        left()
                    );
                    thread::sleep(Duration::from_millis(10));
                }
            });
        }
    });
}

#[test]
fn a_timeout_comes_when_it_was_asked_for() {
    let server = Server::start();
    let mark = Mark::new();
    let mut late = Duration::MAX;
    for timeout in [0.05, 0.3, 1.0] {
        let begin = Instant::now();
        let exit = server
            .exec(&json!({"cmd": ["sleep", mark.to_string()], "timeout": timeout}))
            .exit;
        let taken = begin.elapsed();
        assert_eq!(exit["reason"], "timeout");
        assert!(
            taken >= Duration::from_secs_f64(timeout),
            "{taken:?} for {timeout}"
        );
        late = late.min(taken.saturating_sub(Duration::from_secs_f64(timeout)));
    }
    assert!(late < Duration::from_millis(500), "at best {late:?} late");
    // The smallest one is still a timeout, and a whole number is as good as a fraction.
    assert_eq!(
        server
            .exec(&json!({"cmd": ["sleep", mark.to_string()], "timeout": 1e-9}))
            .exit["timed_out"],
        true
    );
    assert_eq!(
        server
            .exec(&json!({"cmd": ["sleep", mark.to_string()], "timeout": 1}))
            .exit["timed_out"],
        true
    );
}

#[test]
fn a_command_that_ends_in_time_has_not_timed_out_and_nothing_is_killed_later() {
    let server = Server::start();
    let mark = Mark::new();
    let outcome = server.exec(&json!({"cmd": format!("sleep {mark} & exit 4"), "timeout": 0.8}));
    assert_eq!(
        (outcome.code(), &outcome.exit["timed_out"]),
        (Some(4), &json!(false))
    );
    // Beyond the deadline, which must have died with the command.
    thread::sleep(Duration::from_millis(1200));
    assert_eq!(
        mark.pids().len(),
        1,
        "what the command left behind is no business of its timeout"
    );
    assert_eq!(server.entry(&outcome.start["id"])["reason"], "exited");
}

#[test]
fn many_timeouts_at_once_all_come() {
    let server = Server::start();
    let mark = Mark::new();
    let mut streams: Vec<(usize, EventStream)> = (0..60)
        .map(|index| {
            // In an order that is not the order of their ends.
            let timeout = 0.5 + f64::from((index * 37) % 60) / 60.0;
            let body = json!({"cmd": ["sleep", mark.to_string()], "timeout": timeout});
            (usize::try_from(index).unwrap(), server.exec_stream(&body))
        })
        .collect();
    for (index, stream) in &mut streams {
        let exit = Outcome::of(stream.collect()).exit;
        assert_eq!(exit["reason"], "timeout", "{index}");
    }
    mark.wait_gone(Duration::from_secs(2));
}
