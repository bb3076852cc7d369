//! The server's own life: as the first process of a machine, through a thousand commands, and to
//! its end, by a signal or for want of work.
//!
//! The promises held here: orphans are reaped; a signal ends everything that runs and then the
//! server, with 0; nothing is left of a finished command, neither a zombie nor a thread nor a
//! descriptor; the idle timeout ends the server when nothing is going on, and never before.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::fixture::{
    BINARY, Builder, Connection, Gate, Mark, NAMESPACE, Outcome, PATIENCE, Server, Stop, TOKEN,
    TempDir, best_of, count_entries, descendants_of, has_namespaces, in_session, init_of,
    numbered_text, open_terminal, reset, send_harmless_signals, stat_of, wait_until,
};
use crate::skip;

/// What every process gets after the TERM, and four seconds for the rest of the work on a busy machine: a
/// grace that began anew would take twice five.
const LAST_WORD: Duration = Duration::from_secs(9);

// ------------------------------------------------------------------------------------- helpers

/// A server that is to be PID 1.
fn as_pid_1() -> Builder {
    Server::builder().wrapped_in(&NAMESPACE)
}

/// A server that has to be an init although it is not PID 1.
fn with_init_flag() -> Builder {
    Server::builder().wrapped_in(&["sh", "-c", "exec \"$0\" --init"])
}

fn send(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

/// Sends a signal to a server and returns how long it took to end; the status must be 0.
#[track_caller]
fn end_with(server: &mut Server, pid: i32, signal: Signal) -> Duration {
    let begin = Instant::now();
    send(pid, signal);
    let status = server.wait_for_exit(Duration::from_secs(30));
    let taken = begin.elapsed();
    assert_eq!(status.code(), Some(0), "{status}\n{}", server.log());
    taken
}

fn zombies_below(pid: i32) -> Vec<i32> {
    descendants_of(pid)
        .into_iter()
        .filter(|process| process.state == 'Z')
        .map(|process| process.pid)
        .collect()
}

/// Runs a command of the kind that `index` says, to whatever end it comes.
fn run_one_of_all_kinds(server: &Server, mark: &Mark, index: usize) {
    let ended = |id: &serde_json::Value| {
        let reply = server.get(&format!("/v1/processes/{}/wait", id.as_str().unwrap()));
        assert_eq!(reply.status, 200, "{}", reply.text());
    };
    match index % 17 {
        0 => assert_eq!(server.exec(&json!({"cmd": "echo hi"})).stdout, "hi\n"),
        1 => assert_eq!(
            server
                .post("/v1/exec", &json!({"cmd": ["no-such-program-here"]}))
                .status,
            400
        ),
        2 => assert_eq!(server.exec(&json!({"cmd": "kill -9 $$"})).exit["signal"], 9),
        3 => {
            let body =
                json!({"cmd": format!("setsid sleep {mark} & sleep {mark}"), "timeout": 0.1});
            assert_eq!(server.exec(&body).exit["timed_out"], true);
        }
        4 => ended(&server.spawn(&json!({"cmd": ["true"]}))["id"]),
        5 | 6 => {
            let process = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
            let path = format!("/v1/processes/{}", process["id"].as_str().unwrap());
            if index % 17 == 5 {
                assert_eq!(server.delete(&path).json()["killed"], true);
            } else {
                assert_eq!(
                    server
                        .post(&format!("{path}/kill"), &json!({"signal": "TERM"}))
                        .json()["signaled"],
                    true
                );
                ended(&process["id"]);
            }
        }
        7 | 8 => {
            let mut stream =
                server.exec_stream(&json!({"cmd": format!("sleep {mark} & sleep {mark}")}));
            assert_eq!(stream.next().unwrap()["event"], "start");
            if index % 17 == 7 {
                drop(stream);
            } else {
                reset(stream.connection);
            }
        }
        9 => {
            let text = numbered_text(100_000);
            assert!(server.exec(&json!({"cmd": ["cat"], "stdin": text})).stdout == text);
            assert_eq!(
                server.exec(&json!({"cmd": ["true"], "stdin": text})).code(),
                Some(0)
            );
        }
        10 => assert_eq!(
            server.exec(&json!({"cmd": "sleep 0.5 & echo left"})).stdout,
            "left\n"
        ),
        11 => {
            let body = json!({"cmd": "echo once", "id": format!("once-{index}")});
            for _ in 0..2 {
                assert_eq!(server.exec(&body).stdout, "once\n");
            }
        }
        12 => {
            let mut stream =
                server.exec_stream(&json!({"cmd": ["sleep", "0.2"], "on_disconnect": "keep"}));
            assert_eq!(stream.next().unwrap()["event"], "start");
        }
        13 => {
            let process = server.spawn(&json!({"cmd": ["cat"]}));
            let path = format!("/v1/processes/{}", process["id"].as_str().unwrap());
            let reply = server.request("POST", &format!("{path}/stdin?eof=1"), b"text");
            assert_eq!(reply.json()["written"], 4);
            ended(&process["id"]);
        }
        14 => {
            // Followed by one that goes, its stdin never used and never closed.
            let process = server.spawn(&json!({"cmd": format!("echo hi; exec sleep {mark}")}));
            let path = format!("/v1/processes/{}", process["id"].as_str().unwrap());
            let mut stream = server.stream("GET", &format!("{path}/logs?follow=1"), b"");
            assert_eq!(stream.next_output().unwrap()["data"], "hi\n");
            drop(stream);
            assert_eq!(server.delete(&path).json()["killed"], true);
        }
        15 => {
            // Daemons in all ways: orphans of the group, of the session, and beyond.
            let script =
                "(sleep 0.1 &); (setsid sh -c 'sleep 0.1 & sleep 0.05' &) >/dev/null 2>&1; echo ok";
            assert_eq!(server.exec(&json!({"cmd": script})).stdout, "ok\n");
        }
        _ => assert_eq!(
            server.request("POST", "/v1/exec", b"{\"cmd\": 1}").status,
            400
        ),
    }
}

fn run_all_kinds(server: &Server, mark: &Mark, count: usize) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count {
                        return;
                    }
                    run_one_of_all_kinds(server, mark, index);
                }
            });
        }
    });
}

// --------------------------------------------------------------------- nothing is left of commands

#[test]
fn a_thousand_commands_of_all_kinds_leave_no_zombie_thread_or_descriptor() {
    let server = Server::start();
    let mark = Mark::new();
    let pid = server.pid();
    let held = || {
        (
            count_entries(&format!("/proc/{pid}/task")),
            count_entries(&format!("/proc/{pid}/fd")),
        )
    };
    // Everything that is made when it is first needed, is; then the count is taken at rest.
    run_all_kinds(&server, &mark, 68);
    let mut rest = (held(), Instant::now());
    wait_until("the server comes to rest", PATIENCE, || {
        let now = held();
        if now != rest.0 {
            rest = (now, Instant::now());
        }
        rest.1.elapsed() > Duration::from_millis(1500)
    });
    let (threads, descriptors) = rest.0;
    run_all_kinds(&server, &mark, 1000);
    wait_until("no process is left", PATIENCE, || {
        descendants_of(pid).is_empty()
    });
    mark.wait_gone(PATIENCE);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (threads_now, descriptors_now) = held();
        if threads_now <= threads && descriptors_now <= descriptors {
            break;
        }
        if Instant::now() > deadline {
            let open: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
                .unwrap()
                .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
                .map(|link| link.to_string_lossy().into_owned())
                .collect();
            panic!(
                "{threads_now} threads for {threads}, {descriptors_now} descriptors for {descriptors}: {open:?}"
            );
        }
        thread::sleep(Duration::from_millis(20));
    }
    let list = server.get("/v1/processes").json();
    let running: Vec<_> = list
        .as_array()
        .unwrap()
        .iter()
        .filter(|entry| entry["running"] == true)
        .collect();
    assert!(running.is_empty(), "{running:?}");
}

#[test]
fn pid_1_reaps_every_orphan_and_loses_no_exit_code() {
    if !has_namespaces() {
        skip!("unshare --pid does not work here");
    }
    let server = as_pid_1().start();
    let init = init_of(&server);
    let mark = Mark::new();
    let own = descendants_of(init).len();
    thread::scope(|scope| {
        // Orphans die all the time, while ...
        scope.spawn(|| {
            for _ in 0..60 {
                let script =
                    "for i in 1 2 3 4 5; do (sleep 0.0$i &); (setsid sleep 0.0$i &); done; exit 5";
                assert_eq!(server.exec(&json!({"cmd": script})).code(), Some(5));
            }
        });
        // ... the ends of others must still reach who waits for them.
        scope.spawn(|| {
            for code in 0..200 {
                assert_eq!(
                    server.exec(&json!({"cmd": format!("exit {code}")})).code(),
                    Some(code)
                );
            }
        });
    });
    run_all_kinds(&server, &mark, 170);
    wait_until("no orphan is left", PATIENCE, || {
        descendants_of(init).len() <= own
    });
    assert_eq!(zombies_below(init), Vec::<i32>::new());
    // An orphan's parent is the first process, from which it is reaped.
    let outcome =
        server.exec(&json!({"cmd": format!("(setsid sleep {mark} &) >/dev/null 2>&1; echo ok")}));
    assert_eq!(outcome.stdout, "ok\n");
    let orphan = mark.find("it is an orphan", |pid| {
        stat_of(pid).is_some_and(|process| process.parent == init)
    });
    send(orphan, Signal::SIGKILL);
    wait_until("it is reaped", PATIENCE, || {
        descendants_of(init).len() <= own
    });
}

#[test]
fn init_can_be_asked_for_outside_a_namespace() {
    let mut server = with_init_flag().start();
    let init = server.pid();
    let mark = Mark::new();
    let own = descendants_of(init).len();
    let script = format!("(setsid sleep {mark} &) >/dev/null 2>&1; (sleep 0.1 &); echo ok");
    assert_eq!(server.exec(&json!({"cmd": script})).stdout, "ok\n");
    mark.find("the orphan is the server's", |pid| {
        descendants_of(init)
            .iter()
            .any(|process| process.pid == pid)
    });
    wait_until("the other orphan is reaped", PATIENCE, || {
        descendants_of(init).len() == own + 1
    });
    assert_eq!(zombies_below(init), Vec::<i32>::new());
    end_with(&mut server, init, Signal::SIGTERM);
    mark.wait_gone(Duration::from_secs(1));
}

// -------------------------------------------------------------------------------- ended by a signal

/// A server with processes of every kind, all of which carry the mark and obey TERM unless
/// `stubborn`.
fn populate(server: &Server, mark: &Mark, stubborn: bool) {
    let trap = if stubborn {
        "trap '' TERM INT HUP QUIT; "
    } else {
        ""
    };
    for script in [
        format!("{trap}exec sleep {mark}"),
        format!("{trap}sleep {mark} & sleep {mark}"),
        format!("{trap}setsid sh -c 'sleep {mark} & sleep {mark}' & wait"),
        format!("{trap}(setsid sleep {mark} &) >/dev/null 2>&1; exec sleep {mark}"),
    ] {
        server.spawn(&json!({"cmd": script}));
    }
    // What an ended command has left behind.
    server.exec(&json!({"cmd": format!("{trap}sleep {mark} & (setsid sleep {mark} &) & echo")}));
    mark.wait_for(10);
}

#[test]
fn as_pid_1_a_signal_ends_everything_promptly_when_all_obey() {
    if !has_namespaces() {
        skip!("unshare --pid does not work here");
    }
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let best = best_of(3, || {
            let mut server = as_pid_1().start();
            let mark = Mark::new();
            populate(&server, &mark, false);
            let init = init_of(&server);
            let taken = end_with(&mut server, init, signal);
            assert_eq!(mark.pids(), Vec::<i32>::new(), "{signal}");
            taken
        });
        assert!(best < Duration::from_secs(1), "{signal}: {best:?} at best");
    }
}

#[test]
fn as_pid_1_a_signal_ends_those_that_ignore_it_within_six_seconds() {
    if !has_namespaces() {
        skip!("unshare --pid does not work here");
    }
    let mut server = as_pid_1().start();
    let mark = Mark::new();
    populate(&server, &mark, true);
    let stopped = server.spawn(&json!({"cmd": format!("sleep {mark} & kill -STOP $$")}));
    wait_until("one is stopped", PATIENCE, || {
        let pid = stopped["pid"].as_i64().unwrap();
        // The pid was told as the namespace knows it.
        mark.pids().into_iter().any(|outer| {
            let status =
                std::fs::read_to_string(format!("/proc/{outer}/status")).unwrap_or_default();
            status.contains("State:\tT")
                && status
                    .lines()
                    .any(|line| line.starts_with("NSpid:") && line.ends_with(&format!("\t{pid}")))
        })
    });
    let init = init_of(&server);
    let taken = end_with(&mut server, init, Signal::SIGTERM);
    assert!(taken < LAST_WORD, "{taken:?}");
    assert_eq!(mark.pids(), Vec::<i32>::new());
}

#[test]
fn as_pid_1_nothing_depends_on_a_proc_of_its_own() {
    if !has_namespaces() {
        skip!("unshare --pid does not work here");
    }
    // /proc is another namespace's here: its numbers mean other processes, or nobody.
    let foreign: Vec<&str> = NAMESPACE
        .into_iter()
        .filter(|word| *word != "--mount-proc")
        .collect();
    let best = best_of(3, || {
        let mut server = Server::builder().wrapped_in(&foreign).start();
        let (mark, other) = (Mark::new(), Mark::new());
        populate(&server, &mark, false);
        let body = json!({"cmd": format!("sleep {other} & sleep {other}"), "timeout": 0.3});
        assert_eq!(server.exec(&body).exit["reason"], "timeout");
        other.wait_gone(PATIENCE);
        assert!(mark.pids().len() >= 8, "a timeout hits nobody else");
        let init = init_of(&server);
        let taken = end_with(&mut server, init, Signal::SIGTERM);
        assert_eq!(mark.pids(), Vec::<i32>::new());
        taken
    });
    assert!(best < Duration::from_secs(1), "{best:?} at best");
}

#[test]
fn outside_a_namespace_a_signal_ends_every_process_and_then_the_server() {
    let mut server = Server::start();
    let mark = Mark::new();
    let pid = server.pid();
    for script in [
        format!("trap '' TERM; sleep {mark}; sleep {mark}"),
        format!("setsid sleep {mark} & sleep {mark}"),
        format!("trap '' TERM INT; setsid sh -c 'sleep {mark} & sleep {mark}' & wait"),
    ] {
        server.spawn(&json!({"cmd": script}));
    }
    let mut foreground = server.exec_stream(&json!({"cmd": ["sleep", mark.to_string()]}));
    foreground.next().unwrap();
    mark.wait_for(8);
    let taken = end_with(&mut server, pid, Signal::SIGTERM);
    assert!(taken < LAST_WORD, "{taken:?}");
    mark.wait_gone(Duration::from_secs(1));
}

#[test]
fn a_process_is_asked_before_it_is_killed() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGQUIT] {
        let mut server = Server::start();
        let directory = TempDir::new();
        let mark = Mark::new();
        let saved = directory.join("saved");
        let script = format!(
            "trap 'sleep 0.7; echo saved > {saved}; exit 0' TERM; echo ready; while :; do sleep 0.05; : {mark}; done"
        );
        let process = server.spawn(&json!({"cmd": script}));
        let path = format!(
            "/v1/processes/{}/logs?follow=1",
            process["id"].as_str().unwrap()
        );
        assert_eq!(
            server.stream("GET", &path, b"").next_output().unwrap()["data"],
            "ready\n"
        );
        let pid = server.pid();
        let taken = end_with(&mut server, pid, signal);
        assert_eq!(
            std::fs::read_to_string(&saved).unwrap(),
            "saved\n",
            "it had its time"
        );
        assert!(taken < LAST_WORD, "{taken:?}");
        mark.wait_gone(Duration::from_secs(1));
    }
}

/// How a server that is no host can be started.
const KINDS: [fn() -> Builder; 2] = [Server::builder, with_init_flag];

/// Starts a server as the leader of a session, on a terminal or on none.
fn start_in_session(builder: Builder, terminal: Option<&OwnedFd>) -> Server {
    let mut command = builder.command();
    in_session(&mut command, terminal);
    builder.start_as(command)
}

#[test]
fn a_hangup_ends_a_server_on_a_terminal_as_a_signal_does() {
    for kind in KINDS {
        for has_closed in [false, true] {
            let (terminal, other_end) = open_terminal();
            let mut server = start_in_session(kind(), Some(&terminal));
            drop(terminal);
            let mark = Mark::new();
            server.spawn(&json!({"cmd": format!("setsid sleep {mark} & exec sleep {mark}")}));
            mark.wait_for(2);
            if has_closed {
                drop(other_end);
            } else {
                server.signal(Signal::SIGHUP as i32);
            }
            let status = server.wait_for_exit(LAST_WORD);
            assert_eq!(status.code(), Some(0), "{status}\n{}", server.log());
            assert_eq!(mark.pids(), Vec::<i32>::new());
        }
    }
}

#[test]
fn a_server_without_a_terminal_and_one_that_is_told_to_ignore_it_survive_a_hangup() {
    let nohup = ["sh", "-c", r#"trap '' HUP; exec "$0" "$@""#];
    for kind in KINDS {
        let (terminal, other_end) = open_terminal();
        let told = start_in_session(kind().wrapped_in(&nohup), Some(&terminal));
        drop(terminal);
        let without = start_in_session(kind(), None);
        for server in [&told, &without] {
            let before = server.exec(&json!({"cmd": "cat /proc/self/status"}));
            assert!(before.stdout.contains("SigIgn:\t0000000000000000"));
            server.signal(Signal::SIGHUP as i32);
        }
        drop(other_end);
        for mut server in [told, without] {
            assert_eq!(server.exec(&json!({"cmd": "echo on"})).stdout, "on\n");
            let pid = server.pid();
            end_with(&mut server, pid, Signal::SIGTERM);
        }
    }
}

#[test]
fn no_other_signal_ends_a_server_or_reaches_its_commands() {
    for kind in KINDS {
        let mut server = start_in_session(kind(), None);
        for _ in 0..2 {
            send_harmless_signals(server.pid());
            let outcome = server.exec(&json!({"cmd": "cat /proc/self/status"}));
            for field in ["SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt"] {
                let expected = format!("{field}:\t0000000000000000\n");
                assert!(outcome.stdout.contains(&expected), "{}", outcome.stdout);
            }
        }
        let pid = server.pid();
        end_with(&mut server, pid, Signal::SIGQUIT);
    }
}

#[test]
fn a_stream_that_is_cut_by_the_servers_end_tells_no_lie() {
    let mut server = Server::start();
    let mark = Mark::new();
    let mut connections: Vec<Connection> = (0..20)
        .map(|_| {
            let mut connection = server.connect();
            let body = json!({"cmd": format!("echo ready; exec sleep {mark}")}).to_string();
            connection.send_request("POST", "/v1/exec", &[], body.as_bytes());
            connection
        })
        .collect();
    mark.wait_for(20);
    let pid = server.pid();
    let taken = end_with(&mut server, pid, Signal::SIGTERM);
    assert!(taken < LAST_WORD, "{taken:?}");
    for connection in &mut connections {
        let text = String::from_utf8(connection.read_to_close()).unwrap();
        let exits: Vec<&str> = text
            .lines()
            .filter(|line| line.contains("\"event\":\"exit\""))
            .collect();
        assert!(exits.len() <= 1, "{exits:?}");
        for exit in exits {
            let exit: serde_json::Value = serde_json::from_str(exit).unwrap();
            assert_eq!(
                (&exit["exit_code"], &exit["signal"]),
                (&serde_json::Value::Null, &json!(15)),
                "{exit}"
            );
        }
    }
    mark.wait_gone(Duration::from_secs(1));
}

#[test]
fn a_second_signal_does_not_change_the_end() {
    let mut server = Server::start();
    let mark = Mark::new();
    let process = server
        .spawn(&json!({"cmd": format!("trap '' TERM; echo ready; sleep {mark}; sleep {mark}")}));
    let path = format!(
        "/v1/processes/{}/logs?follow=1",
        process["id"].as_str().unwrap()
    );
    assert_eq!(
        server.stream("GET", &path, b"").next_output().unwrap()["data"],
        "ready\n"
    );
    let pid = server.pid();
    let begin = Instant::now();
    for signal in [Signal::SIGTERM, Signal::SIGTERM, Signal::SIGINT] {
        send(pid, signal);
        thread::sleep(Duration::from_millis(100));
    }
    let status = server.wait_for_exit(Duration::from_secs(30));
    assert_eq!(status.code(), Some(0), "{status}");
    assert!(begin.elapsed() < LAST_WORD);
    mark.wait_gone(Duration::from_secs(1));
}

#[test]
fn a_signal_during_a_storm_of_commands_ends_it_all() {
    if !has_namespaces() {
        skip!("unshare --pid does not work here");
    }
    let mut server = as_pid_1().start();
    let mark = Mark::new();
    let init = init_of(&server);
    let address = server.address;
    let body = json!({"cmd": format!("sleep {mark} & echo"), "background": true}).to_string();
    let request = authorized("POST /v1/exec", &body);
    let stop = Stop::default();
    thread::scope(|scope| {
        let _stopping = stop.guard();
        for _ in 0..4 {
            // Until nobody listens any more.
            scope.spawn(|| while !stop.is_set() && ask(address, &request).is_some() {});
        }
        mark.wait_for(40);
        let taken = end_with(&mut server, init, Signal::SIGTERM);
        assert!(taken < LAST_WORD, "{taken:?}");
    });
    assert_eq!(mark.pids(), Vec::<i32>::new());
}

#[test]
fn when_what_serves_dies_the_first_process_does_not_stay() {
    if !has_namespaces() {
        skip!("unshare --pid does not work here");
    }
    let mut server = as_pid_1().start();
    let init = init_of(&server);
    let mark = Mark::new();
    server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
    mark.wait_for(1);
    let serving = descendants_of(init).into_iter().find(|process| {
        std::fs::read_link(format!("/proc/{}/exe", process.pid))
            .is_ok_and(|exe| exe == std::path::Path::new(BINARY))
    });
    // Where the first process serves itself, there is nothing to lose.
    let victim = serving.map_or(init, |process| process.pid);
    send(victim, Signal::SIGKILL);
    let status = server.wait_for_exit(Duration::from_secs(10));
    assert_ne!(status.code(), Some(0), "an end like this is no success");
    assert_eq!(mark.pids(), Vec::<i32>::new());
}

// ------------------------------------------------------------------------------------------- idle

/// A request with the token, on a connection of its own.
fn authorized(line: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{line} HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {TOKEN}\r\nConnection: close\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
}

/// One request that may find nobody there; the answer, if there was one.
fn ask(address: SocketAddr, request: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    (!answer.is_empty()).then_some(answer)
}

/// Asks the same again and again, until nobody is there; every answer must begin with `expected`.
fn keep_asking(address: SocketAddr, request: &str, expected: &str, stop: &Stop) {
    while !stop.is_set()
        && let Some(answer) = ask(address, request)
    {
        assert!(answer.starts_with(expected), "{answer}");
        thread::sleep(Duration::from_millis(50));
    }
}

fn idle_after(seconds: u64) -> Builder {
    Server::builder().env("SBX_IDLE_TIMEOUT", seconds)
}

/// Asserts that the server ends with 0, `timeout` after `since`: not before, and not much later.
#[track_caller]
fn expect_idle_exit(server: &mut Server, since: Instant, timeout: Duration) {
    let status =
        server.wait_for_exit(timeout.saturating_sub(since.elapsed()) + Duration::from_secs(4));
    let elapsed = since.elapsed();
    assert_eq!(status.code(), Some(0), "{status}\n{}", server.log());
    assert!(
        elapsed >= timeout,
        "ended after {elapsed:?}, before {timeout:?}"
    );
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn without_work_the_server_ends_with_0() {
    let begin = Instant::now();
    let mut server = idle_after(2).start();
    expect_idle_exit(&mut server, begin, 2 * SECOND);
}

#[test]
fn without_work_the_server_ends_with_0_as_pid_1_too() {
    if !has_namespaces() {
        skip!("unshare --pid does not work here");
    }
    let begin = Instant::now();
    let mut server = as_pid_1().env("SBX_IDLE_TIMEOUT", 1).start();
    expect_idle_exit(&mut server, begin, SECOND);
}

#[test]
fn without_an_idle_timeout_the_server_stays() {
    let mut server = Server::start();
    thread::sleep(3 * SECOND);
    assert!(server.is_running());
}

#[test]
fn every_authorized_request_begins_the_time_anew() {
    let mut server = idle_after(2).start();
    let mut since = Instant::now();
    for _ in 0..6 {
        thread::sleep(Duration::from_millis(700));
        since = Instant::now();
        assert_eq!(server.get("/v1/processes").status, 200);
    }
    expect_idle_exit(&mut server, since, 2 * SECOND);
}

#[test]
fn a_silent_foreground_command_is_work() {
    let mut server = idle_after(1).start();
    let begin = Instant::now();
    let outcome = server.exec(&json!({"cmd": "sleep 3.5; echo late"}));
    assert_eq!(
        (outcome.stdout.as_str(), outcome.code()),
        ("late\n", Some(0))
    );
    expect_idle_exit(&mut server, begin, Duration::from_millis(4500));
}

#[test]
fn a_background_process_is_work() {
    let mut server = idle_after(1).start();
    let begin = Instant::now();
    server.spawn(&json!({"cmd": ["sleep", "3.5"]}));
    expect_idle_exit(&mut server, begin, Duration::from_millis(4500));
}

#[test]
fn a_command_that_was_kept_without_its_client_is_work() {
    let mut server = idle_after(1).start();
    let begin = Instant::now();
    let mut stream = server.exec_stream(&json!({"cmd": "sleep 3", "on_disconnect": "keep"}));
    assert_eq!(stream.next().unwrap()["event"], "start");
    drop(stream);
    expect_idle_exit(&mut server, begin, 4 * SECOND);
}

#[test]
fn a_stream_that_its_client_does_not_read_is_work() {
    let text = numbered_text(16 << 20);
    let directory = TempDir::new();
    std::fs::write(directory.path().join("text"), &text).unwrap();
    let mut gate = Gate::new();
    // Last: its second runs from the start.
    let mut server = idle_after(1).start();
    let script = format!("cat {}; : < {}", directory.join("text"), gate.path());
    let process = server.spawn(&json!({"cmd": script, "stdin": ""}));
    let path = format!("/v1/processes/{}", process["id"].as_str().unwrap());
    let mut stream = server.stream("GET", &format!("{path}/logs?follow=1"), b"");
    stream.next().unwrap();
    gate.open();
    assert_eq!(server.get(&format!("{path}/wait")).json()["running"], false);
    // The process has ended; only the reading of its logs goes on, or rather does not.
    thread::sleep(3 * SECOND);
    assert!(server.is_running());
    let since = Instant::now();
    assert_eq!(stream.last().unwrap()["event"], "exit");
    expect_idle_exit(&mut server, since, SECOND);
}

#[test]
fn an_upload_is_work_from_its_start_to_its_end() {
    let mut server = idle_after(1).start();
    let directory = TempDir::new();
    let target = format!("/v1/files/write?path={}", directory.join("slow"));
    let mut connection = server.connect();
    connection.send_request("PUT", &target, &[("Content-Length", "8")], b"");
    let mut since = Instant::now();
    for byte in b"slow one" {
        thread::sleep(Duration::from_millis(450));
        since = Instant::now();
        connection.send(&[*byte]);
    }
    assert_eq!(connection.read_reply().status, 200);
    assert_eq!(
        std::fs::read_to_string(directory.join("slow")).unwrap(),
        "slow one"
    );
    expect_idle_exit(&mut server, since, SECOND);
}

#[test]
fn a_download_is_work_from_its_start_to_its_end() {
    let directory = TempDir::new();
    let text = numbered_text(32 << 20);
    std::fs::write(directory.path().join("large"), &text).unwrap();
    // Last: its second runs from the start.
    let mut server = idle_after(1).start();
    let mut connection = server.connect();
    connection.send_request(
        "GET",
        &format!("/v1/files/read?path={}", directory.join("large")),
        &[],
        b"",
    );
    let head = connection.read_head();
    assert_eq!(head.status, 200);
    thread::sleep(3 * SECOND);
    assert!(server.is_running());
    let since = Instant::now();
    assert!(connection.read_body(head).body == text.as_bytes());
    expect_idle_exit(&mut server, since, SECOND);
}

#[test]
fn asking_for_health_is_no_work() {
    let begin = Instant::now();
    let mut server = idle_after(2).start();
    let address = server.address;
    let request = authorized("GET /health", "");
    let stop = Stop::default();
    thread::scope(|scope| {
        let _stopping = stop.guard();
        scope.spawn(|| keep_asking(address, &request, "HTTP/1.1 200 ", &stop));
        expect_idle_exit(&mut server, begin, 2 * SECOND);
    });
}

#[test]
fn refused_requests_and_open_connections_are_no_work() {
    let begin = Instant::now();
    let mut server = idle_after(2).start();
    let address = server.address;
    // Connected and silent, in the middle of a head, and kept alive after an answer.
    let silent = server.connect();
    let mut half = server.connect();
    half.send(b"POST /v1/exec HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: ");
    let mut kept = server.connect();
    assert_eq!(kept.request("GET", "/health", &[], b"").status, 200);
    // Uploads without the token that go on and on.
    let mut refused = Connection::open(address, Some("wrong".to_owned()));
    refused.send_request(
        "PUT",
        "/v1/files/write?path=/tmp/never",
        &[("Content-Length", "60000")],
        b"x",
    );
    assert_eq!(refused.read_reply().status, 403);
    let stop = Stop::default();
    thread::scope(|scope| {
        let _stopping = stop.guard();
        for token in ["", "X-Sandbox-Token: wrong\r\n"] {
            for request in [
                format!(
                    "GET /v1/processes HTTP/1.1\r\nHost: localhost\r\n{token}Connection: close\r\n\r\n"
                ),
                format!(
                    "POST /v1/exec HTTP/1.1\r\nHost: localhost\r\n{token}Connection: close\r\nContent-Length: 14\r\n\r\n{{\"cmd\":\"true\"}}"
                ),
            ] {
                let stop = &stop;
                scope.spawn(move || keep_asking(address, &request, "HTTP/1.1 403 ", stop));
            }
        }
        expect_idle_exit(&mut server, begin, 2 * SECOND);
    });
    drop((silent, half, kept, refused));
}

#[test]
fn the_end_for_want_of_work_does_not_cut_a_command_short() {
    // Commands that begin just when the time is up: whichever comes first, a command that was
    // accepted is run to its end.
    for round in 0..4 {
        let mut server = idle_after(1).start();
        let begin = Instant::now();
        thread::sleep(Duration::from_millis(985 + round * 5));
        let body = json!({"cmd": "sleep 0.3; echo whole"}).to_string();
        let request = authorized("POST /v1/exec", &body);
        if let Some(answer) = ask(server.address, &request) {
            if answer.contains("\"event\":\"start\"") {
                let lines = answer.lines().filter(|line| line.starts_with('{'));
                let outcome = Outcome::of(
                    lines
                        .map(|line| serde_json::from_str(line).unwrap())
                        .collect(),
                );
                assert_eq!(outcome.stdout, "whole\n");
            } else {
                assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
            }
        }
        expect_idle_exit(&mut server, begin, Duration::from_millis(900));
    }
}
