//! A paused sandbox: nothing in it runs, nothing in it notices, and all else goes on.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::{needs_root, target};
use crate::fixture::{
    Held, PATIENCE, Reply, Sandbox, Server, WebSocket, assert_error, cpu_time_of, has_namespaces,
    is_alive, pid_of, stat_of, wait_until,
};
use crate::skip;

#[track_caller]
fn change(sandbox: &Sandbox<'_>, act: &str) -> Value {
    let reply = sandbox.post(act, &json!({}));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

#[track_caller]
fn pause(sandbox: &Sandbox<'_>) -> Value {
    let document = change(sandbox, "pause");
    assert_eq!(document["state"], "paused");
    document
}

#[track_caller]
fn resume(sandbox: &Sandbox<'_>) -> Value {
    let document = change(sandbox, "resume");
    assert_eq!(document["state"], "running");
    document
}

/// What the threads of a sandbox do that are not stopped, by process: those in vfork(2) cannot run before their child.
fn moving(sandbox: &Sandbox<'_>) -> Vec<String> {
    let mut moving = Vec::new();
    for pid in sandbox.processes() {
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten()
        {
            let path = task.unwrap().path();
            let stat = std::fs::read_to_string(path.join("stat")).unwrap_or_default();
            let state = stat.rsplit(") ").next().unwrap_or_default();
            let state = state.chars().next().unwrap_or('X');
            let status = std::fs::read_to_string(path.join("status")).unwrap_or_default();
            let pending = status.lines().any(|line| {
                let mask = line
                    .strip_prefix("SigPnd:")
                    .or(line.strip_prefix("ShdPnd:"));
                let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
                mask.is_some_and(|mask| mask & 1 << 18 != 0)
            });
            if !("TtZX".contains(state) || state == 'D' && pending) {
                moving.push(format!("{pid}: {}", stat.trim_end()));
            }
        }
    }
    moving
}

/// The processor time of each process.
fn used(sandbox: &Sandbox<'_>) -> BTreeMap<i32, Duration> {
    let pids = sandbox.processes().into_iter();
    pids.filter_map(|pid| Some((pid, stat_of(pid)?.cpu)))
        .collect()
}

/// Nothing runs for a while, and no process comes or goes. One that was executing a program when it was stopped may be root's
/// for a moment (proc(5)), and is seen only later: it has used nothing.
#[track_caller]
fn assert_still(sandbox: &Sandbox<'_>, time: Duration) {
    assert_eq!(moving(sandbox), Vec::<String>::new());
    let before = used(sandbox);
    let until = Instant::now() + time;
    while Instant::now() < until {
        thread::sleep(Duration::from_millis(20));
        assert_eq!(moving(sandbox), Vec::<String>::new());
    }
    let mut after = used(sandbox);
    after.retain(|pid, time| before.contains_key(pid) || !time.is_zero());
    assert_eq!(after, before);
}

/// Programs that do what is hard to stop: about a hundred processes.
const CROWD: &str = r#"
import ctypes, os, signal, subprocess, sys, threading, time
libc = ctypes.CDLL(None)
def forks():
    while True:
        pid = os.fork()
        if pid == 0: os._exit(0)
        os.waitpid(pid, 0)
def execs():
    while True: subprocess.run(["/bin/true"])
def sleeps():
    while True: time.sleep(0.05)
def writes(n):
    while True:
        with open(f"w{n}", "w") as file: file.write("x" * 100000)
def spins():
    while True: pass
def threads():
    for _ in range(3): threading.Thread(target=sleeps, daemon=True).start()
    while True: subprocess.run(["/bin/true"])
def traces():
    pid = os.fork()
    if pid == 0:
        libc.ptrace(0, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        while True: os.getppid()
    os.waitpid(pid, 0)
    while True:
        libc.ptrace(24, pid, 0, 0)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status): sys.exit(9)
def dies():
    # Each process starts the next one and ends.
    while True:
        if os.fork(): os._exit(0)
        os.setsid() if os.getpid() % 2 else None
        time.sleep(0.0005)
kinds = [forks] * 2 + [execs] * 3 + [sleeps] * 80 + [lambda n=n: writes(n) for n in range(2)] + [spins, spins, threads, threads, traces, traces]
if len(sys.argv) > 1: kinds += [dies]
for kind in kinds:
    if os.fork() == 0:
        try: kind()
        finally: os._exit(8)
print("ready", flush=True)
while True: time.sleep(1000)
"#;

/// Starts the crowd, and waits until it is complete.
fn crowd(sandbox: &Sandbox<'_>, arguments: &str) -> Value {
    assert_eq!(
        sandbox
            .put("files/write?path=crowd.py", CROWD.as_bytes())
            .status,
        200
    );
    let process = sandbox.spawn(&json!({"cmd": format!("exec python3 crowd.py {arguments}")}));
    let id = process["id"].as_str().unwrap().to_owned();
    wait_until("the crowd is there", 3 * PATIENCE, || {
        sandbox
            .get(&format!("processes/{id}/logs"))
            .text()
            .contains("ready")
            && sandbox.processes().len() >= 90
    });
    process
}

#[test]
fn a_hundred_processes_stand_still_and_go_on() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({"max_procs": 400}));
    let leader = crowd(&sandbox, "");
    let mut times = Vec::new();
    for round in 0..10 {
        let begun = Instant::now();
        pause(&sandbox);
        let paused = begun.elapsed();
        let time = if round == 0 { 1000 } else { 60 };
        assert_still(&sandbox, Duration::from_millis(time));
        let begun = Instant::now();
        resume(&sandbox);
        times.push((paused, begun.elapsed()));
        let before = used(&sandbox).values().sum::<Duration>();
        wait_until("they go on", PATIENCE, || {
            used(&sandbox).values().sum::<Duration>() > before + Duration::from_millis(20)
        });
    }
    eprintln!("pause and resume: {times:?}");
    assert!(is_alive(pid_of(&leader)));
    // Whoever has ended has told that something went wrong.
    let logs = sandbox.get(&format!(
        "processes/{}/logs",
        leader["id"].as_str().unwrap()
    ));
    assert!(!logs.text().contains("Traceback"), "{}", logs.text());
    sandbox.delete();
}

#[test]
#[ignore = "takes more than a minute"]
fn a_hundred_processes_take_no_processor_for_a_minute() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({"max_procs": 400}));
    crowd(&sandbox, "");
    pause(&sandbox);
    assert_still(&sandbox, Duration::from_secs(60));
    sandbox.delete();
}

#[test]
fn processes_that_start_the_next_one_and_end_are_caught() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({"max_procs": 400}));
    crowd(&sandbox, "storm");
    for _ in 0..5 {
        pause(&sandbox);
        assert_still(&sandbox, Duration::from_millis(100));
        resume(&sandbox);
    }
    pause(&sandbox);
    sandbox.delete();
}

/// Many times: a shell that is stopped after its job would see the job stop.
#[test]
fn shells_notice_nothing_and_stopped_jobs_stay_stopped() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let shell = |job: &str| {
        let process = sandbox.spawn(&json!({
            "cmd": ["bash", "--norc", "-i"], "pty": true, "env": {"PS1": "$ "}
        }));
        let socket = cfg!(feature = "attach").then(|| attach(&sandbox, &process));
        type_in(&sandbox, &process, job);
        (process, socket)
    };
    let nested = "bash --norc -i -c 'bash --norc -i -c \"sleep 1000 | cat | cat\"'\n";
    let shells: Vec<_> = (0..6)
        .map(|number| match number {
            0 | 1 => shell("sleep 1000\n"),
            2 => shell(nested),
            3 => shell("while :; do sleep 0.003; done\n"),
            4 => shell("sleep 1000 | cat | cat\n"),
            _ => shell("(sleep 1000; true) & wait\n"),
        })
        .collect();
    let stopped = sandbox.spawn(&json!({
        "cmd": ["bash", "--norc", "-i"], "pty": true, "env": {"PS1": "$ "}
    }));
    type_in(&sandbox, &stopped, "sleep 999\n");
    let named = |name: &str| -> Vec<i32> {
        let pids = sandbox.processes().into_iter();
        pids.filter(|pid| {
            std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line == name.as_bytes())
        })
        .collect()
    };
    wait_until("the jobs run", PATIENCE, || {
        named("sleep\x00999\0").len() == 1 && named("sleep\x001000\0").len() == 5
    });
    let job = named("sleep\x00999\0")[0];
    type_in(&sandbox, &stopped, "\u{1a}");
    wait_until("the job is stopped", PATIENCE, || {
        stat_of(job).unwrap().state == 'T'
    });
    for _ in 0..40 {
        pause(&sandbox);
        assert_eq!(moving(&sandbox), Vec::<String>::new());
        resume(&sandbox);
        thread::sleep(Duration::from_millis(3));
        assert_eq!(stat_of(job).unwrap().state, 'T');
    }
    wait_until("all go on", PATIENCE, || {
        named("sleep\x001000\0")
            .into_iter()
            .all(|pid| stat_of(pid).unwrap().state == 'S')
    });
    for (process, _socket) in &shells {
        let said = logs(&sandbox, process);
        assert!(!said.contains("Stopped"), "{said}");
        assert!(
            !said.contains("Done") && !said.contains("Continued"),
            "{said}"
        );
    }
    let said = logs(&sandbox, &stopped);
    assert_eq!(said.matches("Stopped").count(), 1, "{said}");
    type_in(&sandbox, &stopped, "fg\n");
    wait_until("it goes on", PATIENCE, || {
        stat_of(job).unwrap().state == 'S'
    });
    sandbox.delete();
}

fn attach(sandbox: &Sandbox<'_>, process: &Value) -> WebSocket {
    let route = format!("processes/{}/attach", process["id"].as_str().unwrap());
    WebSocket::open(sandbox.connect(), &sandbox.target(&route))
}

#[track_caller]
fn type_in(sandbox: &Sandbox<'_>, process: &Value, text: &str) {
    let route = format!("processes/{}/stdin", process["id"].as_str().unwrap());
    let reply = sandbox.put(&route, text.as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[track_caller]
fn logs(sandbox: &Sandbox<'_>, process: &Value) -> String {
    let reply = sandbox.get(&format!(
        "processes/{}/logs?plain=1",
        process["id"].as_str().unwrap()
    ));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.text()
}

#[test]
fn a_command_starts_before_a_pause_or_not_at_all() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let is_over = AtomicBool::new(false);
    let (mut ran, mut refused) = (0, 0);
    thread::scope(|scope| {
        let starters: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let (mut ran, mut refused) = (0, 0);
                    while !is_over.load(Ordering::Relaxed) {
                        let body = json!({"cmd": "echo said"}).to_string();
                        let mut connection = sandbox.connect();
                        connection.send_request(
                            "POST",
                            &sandbox.target("exec"),
                            &[],
                            body.as_bytes(),
                        );
                        let reply = connection.read_reply();
                        match reply.status {
                            200 => {
                                assert!(reply.text().contains("said"), "{}", reply.text());
                                ran += 1;
                            }
                            409 => {
                                assert_error(&reply, 409, "paused");
                                refused += 1;
                            }
                            _ => panic!("{}", reply.text()),
                        }
                    }
                    (ran, refused)
                })
            })
            .collect();
        for _ in 0..60 {
            pause(&sandbox);
            assert_eq!(moving(&sandbox), Vec::<String>::new());
            thread::sleep(Duration::from_millis(2));
            assert_eq!(moving(&sandbox), Vec::<String>::new());
            resume(&sandbox);
            thread::sleep(Duration::from_millis(3));
        }
        is_over.store(true, Ordering::Relaxed);
        for starter in starters {
            let (its_ran, its_refused) = starter.join().unwrap();
            ran += its_ran;
            refused += its_refused;
        }
    });
    assert!(ran > 0 && refused > 0, "{ran} {refused}");
}

#[test]
fn deadlines_stand_still() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let limit = Duration::from_millis(1500);
    let background = sandbox.spawn(&json!({"cmd": "sleep 1000", "timeout": limit.as_secs_f64()}));
    let mut foreground =
        sandbox.exec_stream(&json!({"cmd": "sleep 1000", "timeout": limit.as_secs_f64()}));
    foreground.next();
    let begun = Instant::now();
    pause(&sandbox);
    thread::sleep(2 * limit);
    assert!(is_alive(pid_of(&background)));
    assert_eq!(moving(&sandbox), Vec::<String>::new());
    resume(&sandbox);
    let exit = foreground.find(|event| event["event"] == "exit").unwrap();
    let taken = begun.elapsed();
    assert_eq!(
        (&exit["reason"], &exit["timed_out"]),
        (&json!("timeout"), &json!(true))
    );
    assert!(taken + Duration::from_millis(200) > 3 * limit, "{taken:?}");
    assert!(taken < 3 * limit + Duration::from_secs(2), "{taken:?}");
    let route = format!("processes/{}/wait", background["id"].as_str().unwrap());
    assert_eq!(sandbox.get(&route).json()["reason"], "timeout");
}

#[test]
fn idle_time_stands_still() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({"idle_timeout_secs": 1}));
    pause(&sandbox);
    thread::sleep(Duration::from_secs(4));
    let described = server.get(&target(&sandbox.id, ""));
    assert_eq!(described.json()["state"], "paused");
    resume(&sandbox);
    wait_until("it is evicted", PATIENCE, || {
        server.get(&target(&sandbox.id, "")).status == 404
    });
}

/// Files, logs and lists are there, processes can be killed, and nothing else goes on by that.
#[test]
fn a_paused_sandbox_can_be_used_but_for_its_processes() {
    needs_root!();
    let server = Server::host().env("SBX_PING_SECS", "1").start();
    let sandbox = server.sandbox();
    let spin =
        || sandbox.spawn(&json!({"cmd": "echo begun; while :; do :; done & while :; do :; done"}));
    let [kept, killed, deleted] = [spin(), spin(), spin()];
    let id = |process: &Value| process["id"].as_str().unwrap().to_owned();
    let chain =
        sandbox.spawn(&json!({"cmd": "sleep 1000 & (sleep 1001 & sleep 1002 & wait) & wait"}));
    wait_until("all run", PATIENCE, || sandbox.processes().len() >= 10);
    let mut follower = sandbox.connect().stream(
        "GET",
        &sandbox.target(&format!("processes/{}/logs?follow=1", id(&kept))),
        b"",
    );
    assert_eq!(follower.next().unwrap()["data"], "begun\n");
    let document = pause(&sandbox);
    let since = &document["state_since_ms"];
    assert!(since.as_u64() > document["created_at_ms"].as_u64());
    assert_eq!(
        &pause(&sandbox)["state_since_ms"],
        since,
        "it is left as it is"
    );
    assert_eq!(follower.next().unwrap()["event"], "ping");
    assert_eq!(sandbox.put("files/write?path=x", b"y").status, 200);
    assert_eq!(sandbox.get("files/read?path=x").text(), "y");
    let listed = sandbox.get("processes").json();
    assert_eq!(
        listed
            .as_array()
            .map(Vec::len)
            .or(listed["processes"].as_array().map(Vec::len)),
        Some(4)
    );
    assert_error(
        &sandbox.post("exec", &json!({"cmd": "true"})),
        409,
        "paused",
    );
    assert_error(
        &sandbox.post("processes", &json!({"cmd": "true"})),
        409,
        "paused",
    );
    let kill = |process: &Value, signal: &str| -> Reply {
        sandbox.post(
            &format!("processes/{}/kill", id(process)),
            &json!({"signal": signal}),
        )
    };
    assert_error(&kill(&kept, "CONT"), 409, "paused");
    for process in [&killed, &chain] {
        assert_eq!(kill(process, "KILL").status, 200);
    }
    let route = format!("processes/{}", id(&deleted));
    assert_eq!(
        sandbox.request("DELETE", &route, b"").json()["killed"],
        true
    );
    wait_until("they are gone", PATIENCE, || sandbox.processes().len() == 2);
    assert_still(&sandbox, Duration::from_millis(300));
    resume(&sandbox);
    let before = cpu_time_of(pid_of(&kept));
    wait_until("it goes on", PATIENCE, || {
        cpu_time_of(pid_of(&kept)) > before
    });
    assert_ne!(&pause(&sandbox)["state_since_ms"], since);
    sandbox.delete();
}

#[test]
fn a_wrong_body_pauses_nothing() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    for body in [json!({"keep": "all"}), json!({"keep": 1}), json!([])] {
        assert_error(&sandbox.post("pause", &body), 400, "bad_request");
    }
    assert_eq!(
        server.get(&target(&sandbox.id, "")).json()["state"],
        "running"
    );
    assert_eq!(
        sandbox.post("pause", &json!({"keep": "memory"})).status,
        200
    );
    assert_eq!(
        sandbox.request("POST", "resume", b"").json()["state"],
        "running"
    );
    for act in ["pause", "resume"] {
        let reply = server.post(
            &target("000000000000000000000000", &format!("/{act}")),
            &json!({}),
        );
        assert_error(&reply, 404, "not_found");
    }
}

#[test]
fn pauses_resumes_and_a_deletion_meet() {
    needs_root!();
    let server = Server::host().start();
    for _ in 0..8 {
        let sandbox = server.sandbox();
        for _ in 0..5 {
            sandbox.spawn(&json!({"cmd": "while :; do /bin/true; done"}));
        }
        let ask = |act: &str| {
            let reply = sandbox.post(act, &json!({}));
            assert!([200, 404].contains(&reply.status), "{}", reply.text());
            reply.status
        };
        thread::scope(|scope| {
            for act in ["pause", "resume", "pause", "resume"] {
                scope.spawn(move || while ask(act) == 200 {});
            }
            thread::sleep(Duration::from_millis(100));
            scope.spawn(|| assert_eq!(server.delete(&target(&sandbox.id, "")).status, 200));
        });
        assert_eq!(sandbox.processes(), Vec::<i32>::new());
    }
}

/// A child that shares its parent's memory and never calls execve keeps the parent in the kernel.
#[test]
fn a_parent_that_waits_for_vfork_counts_as_stopped() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let program = r#"
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
def vfork():
    # The child of vfork runs on in this very frame, and only pauses.
    if libc.vfork() == 0:
        while True: libc.pause()
threading.Thread(target=lambda: [time.sleep(0.001) for _ in iter(int, 1)], daemon=True).start()
print("ready", flush=True)
vfork()
"#;
    sandbox.put("files/write?path=vfork.py", program.as_bytes());
    let process = sandbox.spawn(&json!({"cmd": "exec python3 vfork.py"}));
    wait_until("there is a child", PATIENCE, || {
        sandbox.processes().len() == 2 && stat_of(pid_of(&process)).unwrap().state == 'D'
    });
    for _ in 0..10 {
        let begun = Instant::now();
        pause(&sandbox);
        assert!(
            begun.elapsed() < Duration::from_secs(2),
            "{:?}",
            begun.elapsed()
        );
        assert_still(&sandbox, Duration::from_millis(50));
        resume(&sandbox);
    }
    sandbox.delete();
}

/// A process that has itself sent SIGCONT by timers, and whatever else it can reach. There is a timer for each time: a SIGSTOP
/// takes back a SIGCONT that was not delivered yet, and an interval timer whose signal is taken back never fires again.
const WAKER: &str = r#"
import ctypes, os, signal
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_long), ("signo", ctypes.c_int), ("notify", ctypes.c_int), ("rest", ctypes.c_long * 6)]
class Times(ctypes.Structure):
    _fields_ = [("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2)]
libc = ctypes.CDLL(None)
signal.signal(signal.SIGCONT, lambda *_: os.kill(-1, signal.SIGCONT))
for tenths in range(1, 250):
    timer = ctypes.c_void_p()
    event = Event(signo=signal.SIGCONT, notify=0)
    assert libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) == 0
    once = (ctypes.c_long * 2)(tenths // 10, tenths % 10 * 100_000_000)
    assert libc.timer_settime(timer, 0, ctypes.byref(Times(value=once)), None) == 0
open("ready", "w").close()
while True:
    pass
"#;

#[test]
fn what_lets_itself_go_on_does_not_run_while_it_is_paused() {
    needs_root!();
    if !crate::examples::is_installed("python3", "--version") {
        skip!("python3 is not installed");
    }
    let server = Server::host().start();
    let kinds: &[&str] = if has_namespaces() {
        &["landlock", "namespaces"]
    } else {
        &["landlock"]
    };
    for isolation in kinds {
        let sandbox = server.sandbox_with(&json!({ "isolation": isolation }));
        assert_eq!(
            sandbox
                .put("files/write?path=waker.py", WAKER.as_bytes())
                .status,
            200
        );
        let waker = sandbox.spawn(&json!({"cmd": "exec python3 waker.py"}));
        let other = sandbox.spawn(&json!({"cmd": "while :; do :; done"}));
        wait_until("it has its timers", PATIENCE, || {
            sandbox.home.join("ready").exists()
        });
        pause(&sandbox);
        let is_running = |process: &Value| {
            let route = format!("processes/{}", process["id"].as_str().unwrap());
            sandbox.get(&route).json()["running"] == true
        };
        wait_until("it is ended", PATIENCE, || !is_running(&waker));
        wait_until("the rest stands still", PATIENCE, || {
            moving(&sandbox).is_empty()
        });
        assert_still(&sandbox, Duration::from_secs(2));
        resume(&sandbox);
        let goes_on = || is_running(&other) != moving(&sandbox).is_empty();
        wait_until("the rest goes on, or is ended", PATIENCE, goes_on);
        sandbox.delete();
    }
}

#[test]
fn what_somebody_lets_go_on_by_mistake_is_stopped_again() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let process = sandbox.spawn(&json!({"cmd": "while :; do :; done"}));
    pause(&sandbox);
    let pid = i32::try_from(process["pid"].as_i64().unwrap()).unwrap();
    kill(Pid::from_raw(pid), Signal::SIGCONT).unwrap();
    wait_until("it is stopped again", PATIENCE, || {
        stat_of(pid).unwrap().state == 'T'
    });
    resume(&sandbox);
    wait_until("it goes on", PATIENCE, || {
        stat_of(pid).unwrap().state == 'R'
    });
}

#[test]
fn many_pauses_leave_nothing_behind() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    for _ in 0..5 {
        sandbox.spawn(&json!({"cmd": "while :; do sleep 0.01; done"}));
    }
    pause(&sandbox);
    resume(&sandbox);
    let before = Held::by(&server);
    for _ in 0..1000 {
        pause(&sandbox);
        resume(&sandbox);
    }
    before.await_of(&server);
    let is_stopped = |pid: &i32| stat_of(*pid).is_some_and(|stat| stat.state == 'T');
    assert!(!sandbox.processes().iter().any(is_stopped));
    assert_eq!(sandbox.sh("echo works"), "works\n");
}

#[test]
fn a_server_ends_with_a_paused_sandbox() {
    needs_root!();
    let mut server = Server::host().start();
    let pid = {
        let sandbox = server.sandbox();
        let process = sandbox.spawn(&json!({"cmd": "sleep 1000"}));
        pause(&sandbox);
        pid_of(&process)
    };
    let begun = Instant::now();
    server.signal(15);
    assert_eq!(server.wait_for_exit(PATIENCE).code(), Some(0));
    assert!(
        begun.elapsed() < Duration::from_secs(4),
        "{:?}",
        begun.elapsed()
    );
    assert!(!is_alive(pid));
}
