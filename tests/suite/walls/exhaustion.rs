//! A sandbox that uses up everything it can get: the server and a neighbour keep answering within a
//! second, and when it is deleted everything is as before.

use std::io::{ErrorKind, Read, Write};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::probe::Probe;
use super::race_length;
use crate::fixture::{
    Answer, Ask, Connection, Outcome, PATIENCE, Reply, Sandbox, Server, Stop, Subjects, TempDir,
    WebSocket, assert_error, best_of, cpu_time_of, descriptors_of, events_of, frame, is_root,
    may_lower_nice, memory_of, output_of, routes, status_of, wait_until,
};
use crate::skip;

/// What the server and a neighbour promise while a sandbox attacks.
/// Without its walls nothing is served for as long as the attack lasts.
const PROMPT: Duration = Duration::from_secs(3);

/// Asserts that the promise is kept. Measured several times, because a machine has more to do than
/// these tests; what a sandbox can bring about, it brings about every time.
#[track_caller]
fn expect_prompt(server: &Server, neighbour: &Sandbox<'_>) {
    let health = best_of(5, || {
        let begun = Instant::now();
        assert_eq!(server.get("/health").status, 200);
        begun.elapsed()
    });
    assert!(health < PROMPT, "/health took {health:?}");
    let exec = best_of(5, || {
        let begun = Instant::now();
        assert_eq!(neighbour.sh("echo here"), "here\n");
        begun.elapsed()
    });
    assert!(exec < PROMPT, "a neighbour's command took {exec:?}");
}

/// One test at a time uses the machine up.
static MACHINE: Mutex<()> = Mutex::new(());

/// Runs `worst` in a sandbox, and expects promptness throughout a race's length; then the sandbox is
/// deleted, and nothing of it may be left.
#[track_caller]
fn withstand<'a>(server: &'a Server, wish: &serde_json::Value, worst: impl FnOnce(&Sandbox<'a>)) {
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let neighbour = server.sandbox();
    // Whatever is made once and then kept.
    server.sandbox().delete();
    assert_eq!(neighbour.sh("echo here"), "here\n");
    let pid = server.inner_pid();
    let usage = || (descriptors_of(pid), status_of(pid, "Threads"));
    let mut before = (0, 0);
    wait_until("the server is at rest", PATIENCE, || {
        before = usage();
        before.1 <= 6
    });
    let sandbox = server.sandbox_with(wish);
    worst(&sandbox);
    let deadline = Instant::now() + race_length();
    while Instant::now() < deadline {
        expect_prompt(server, &neighbour);
    }
    let begun = Instant::now();
    sandbox.delete();
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "deleting took {:?}",
        begun.elapsed()
    );
    wait_until("everything is as before", PATIENCE, || {
        let (descriptors, threads) = usage();
        descriptors <= before.0 && threads <= before.1
    });
    expect_prompt(server, &neighbour);
}

#[test]
fn processes_that_become_as_many_as_they_can() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    // To many kernels each session is one that wants its share of the processors: so many sessions
    // are a matter of how many processes a sandbox may have.
    for (act, most) in [
        (&["fork-storm"][..], 512),
        (&["fork-storm", "in-sessions"], 64),
    ] {
        withstand(&server, &json!({ "max_procs": most }), |sandbox| {
            let probe = Probe::new(sandbox);
            sandbox.spawn(&probe.command(&[act]));
            // A shell that cannot start anything says so; or there is no place left for the shell.
            // Until the storm has every place, commands still run.
            let command = json!({ "cmd": "cat /dev/null; cat /dev/null" });
            wait_until("the storm has every place", PATIENCE, || {
                let reply = sandbox.post("exec", &command);
                if reply.status == 200 {
                    return Outcome::of(events_of(&reply.body)).code() != Some(0);
                }
                assert_eq!((reply.status, &*reply.code()), (400, "no_resources"));
                true
            });
            let processes = sandbox.processes().len();
            assert!(processes > most / 2, "{processes} of {most}");
            // The kernel lets one more in, which changes its user before it is counted.
            assert!(processes <= most + 1, "{processes} of {most}");
        });
    }
}

/// The kernel divides the processor between sessions (autogroups) first.
#[test]
#[ignore = "500 busy processes keep other tests from their work"]
fn a_timeout_beside_a_sandbox_that_asks_for_the_processor_in_many_sessions() {
    if !is_root() {
        skip!("needs root");
    }
    if !may_lower_nice() {
        skip!("needs CAP_SYS_NICE");
    }
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let server = Server::host().start();
    let neighbour = server.sandbox();
    let sandbox = server.sandbox_with(&json!({ "max_procs": 512 }));
    let probe = Probe::new(&sandbox);
    sandbox.spawn(&probe.command(&[&["fork-storm", "in-sessions"]]));
    wait_until("the storm blows", PATIENCE, || {
        sandbox.processes().len() > 300
    });
    let outcome = neighbour.exec(&json!({ "cmd": ["sleep", "1000"], "timeout": 0.5 }));
    let took = outcome.exit["duration_ms"].as_u64().unwrap();
    assert_eq!(outcome.exit["reason"], "timeout");
    assert!(took < 3000, "a timeout of 0.5 s ended after {took} ms");
    sandbox.delete();
}

/// The kernel counts inotify instances for the server as a whole.
#[test]
fn watches_that_become_as_many_as_they_can() {
    if !is_root() {
        skip!("needs root");
    }
    let limits = TempDir::new();
    std::fs::write(limits.join("16"), "16\n").unwrap();
    let script = format!(
        "mount --bind {}/16 /proc/sys/fs/inotify/max_user_instances && exec \"$0\"",
        limits.path().display()
    );
    let words = ["unshare", "--mount", "sh", "-c", &script];
    let tried = Command::new(words[0])
        .args(&words[1..])
        .arg("true")
        .status();
    if !tried.is_ok_and(|status| status.success()) {
        skip!("no file can be mounted over another");
    }
    let server = Server::host().wrapped_in(&words).start();
    withstand(&server, &json!({}), |sandbox| {
        let watch = |sandbox: &Sandbox<'_>| sandbox.post("files/watches", &json!({"path": "."}));
        let target = sandbox.target("files/watch?path=.");
        let mut streams: Vec<_> = (0..3)
            .map(|_| sandbox.connect().stream("GET", &target, b""))
            .collect();
        for stream in &mut streams {
            assert_eq!(stream.next_output().unwrap()["event"], "watching");
        }
        let refused = (0..64).map(|_| watch(sandbox)).position(|reply| {
            if reply.status != 200 {
                assert_error(&reply, 503, "no_watches");
            }
            reply.status != 200
        });
        assert_eq!(
            refused,
            Some(4),
            "half of what is not the server's own, with the streams"
        );
        let late = server.sandbox();
        for _ in 0..4 {
            assert_eq!(watch(&late).status, 200, "there are some for others");
        }
        assert_error(&watch(&late), 503, "no_watches");
        // A stream that is not read ends with its connection.
        drop(streams);
        wait_until("the streams are given back", PATIENCE, || {
            watch(&late).status == 200
        });
        late.delete();
    });
}

/// Each event of a deep tree is about a path of many names, in each watch.
#[test]
fn watches_of_a_deep_tree_take_one_processor_and_end_with_their_sandbox() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let used = || cpu_time_of(server.inner_pid());
    // Within this time it uses nothing for a second.
    let comes_to_rest = |limit: Duration| {
        let mut last = (used(), Instant::now());
        wait_until("the watches have nothing to do", limit, || {
            let now = used();
            if now > last.0 + Duration::from_millis(20) {
                last = (now, Instant::now());
            }
            last.1.elapsed() > Duration::from_secs(1)
        });
    };
    withstand(&server, &json!({}), |sandbox| {
        let deep = "d/".repeat(1000);
        sandbox.sh(&format!("mkdir -p {deep}"));
        for _ in 0..4 {
            let mut watch = sandbox.connect();
            let target = sandbox.target("files/watch?path=.&recursive=1");
            watch.send_request("GET", &target, &[], b"");
            assert_eq!(watch.read_head().status, 200);
            assert!(watch.read_chunk().is_some(), "it has begun");
            std::thread::spawn(move || std::io::copy(&mut watch.stream, &mut std::io::sink()));
        }
        let storm = format!("cd {deep} && while :; do echo > x; echo > y; done");
        let storm = json!({ "cmd": storm });
        let process = sandbox.spawn(&storm);
        let (begun, before, limit) = (Instant::now(), used(), Duration::from_secs(3));
        wait_until("they have used some time", 3 * PATIENCE, || {
            used() >= before + limit
        });
        let took = begun.elapsed();
        assert!(took >= limit.mul_f64(0.6), "more than one: {took:?}");
        let kill = format!("processes/{}/kill", process["id"].as_str().unwrap());
        assert_eq!(sandbox.post(&kill, &json!({})).status, 200);
        comes_to_rest(PATIENCE);
        sandbox.spawn(&storm);
    });
    comes_to_rest(Duration::from_secs(3));
}

/// What a client of E2B reads of many processes, or of many files that have changed, is work on what the tenant has.
#[test]
fn looks_of_e2b_at_much_take_one_processor() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    // Of each, as much as a look reads.
    let print = json!({ "cmd": "head -c 70000 /dev/zero | tr '\\0' '\\n'" });
    for _ in 0..100 {
        assert_eq!(sandbox.exec(&print).code(), Some(0));
    }
    let logs = format!("/sandboxes/{}/logs?limit=1", sandbox.id);
    take_one_processor(&server, &sandbox, || ("GET", logs.clone(), String::new()));
    let create = json!({ "path": ".", "includeEntry": true }).to_string();
    let watchers: Vec<Value> = (0..20)
        .map(|_| {
            let target = "/filesystem.Filesystem/CreateWatcher";
            let reply = ask_as_e2b(&mut server.connect(), &sandbox, "POST", target, &create);
            assert_eq!(reply.status, 200, "{}", reply.text());
            reply.json()["watcherId"].clone()
        })
        .collect();
    sandbox.sh("seq 2000 | xargs touch");
    let storm = sandbox.spawn(&json!({ "cmd": "while :; do seq 2000 | xargs touch; done" }));
    let next = AtomicUsize::new(0);
    take_one_processor(&server, &sandbox, || {
        let at = next.fetch_add(1, Ordering::Relaxed) % watchers.len();
        let target = "/filesystem.Filesystem/GetWatcherEvents".to_owned();
        (
            "POST",
            target,
            json!({ "watcherId": watchers[at] }).to_string(),
        )
    });
    let kill = format!("processes/{}/kill", storm["id"].as_str().unwrap());
    assert_eq!(sandbox.post(&kill, &json!({})).status, 200);
    // Each is six bytes in JSON.
    let environment = json!({ "LONG": "\u{1}".repeat(100_000) });
    for _ in 0..20 {
        sandbox.spawn(&json!({ "cmd": ["sleep", "1000"], "env": environment }));
    }
    let list = "/process.Process/List";
    take_one_processor(&server, &sandbox, || {
        ("POST", list.to_owned(), "{}".to_owned())
    });
    let call = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": { "name": "processes" } });
    let batch = json!(vec![call; 20]).to_string();
    let mcp = sandbox.target("mcp");
    take_one_processor(&server, &sandbox, || ("POST", mcp.clone(), batch.clone()));
    sandbox.delete();
}

/// What has no steps between which it could pause, or only short ones, is paid by the next requests.
#[test]
fn requests_with_the_token_of_a_sandbox_take_one_processor() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let print = json!({ "cmd": "head -c 70000 /dev/zero | tr '\\0' '\\n'" });
    let printed = sandbox.spawn(&print)["id"].as_str().unwrap().to_owned();
    // Each is six bytes in JSON.
    let long = "\u{1}".repeat(3000);
    for _ in 0..50 {
        sandbox.exec(&json!({ "cmd": ["true", long] }));
    }
    let members: Vec<String> = (0..20_000).map(|n| format!("\"m{n}\":0")).collect();
    let members = format!("{{\"paths\":[\"none\"],{}}}", members.join(","));
    let call = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": { "name": "processes" } });
    let asks = [
        ("GET", "processes".to_owned(), String::new()),
        ("GET", format!("processes/{printed}/logs"), String::new()),
        ("POST", "files/hash".to_owned(), members),
        ("POST", "mcp".to_owned(), call.to_string()),
    ];
    let headers = [
        ("content-type", "application/json"),
        ("accept", "application/json, text/event-stream"),
    ];
    for (method, route, body) in &asks {
        let target = sandbox.target(route);
        asks_take_one_processor(&server, || {
            let connection = &mut sandbox.connect();
            connection.request(method, &target, &headers, body.as_bytes())
        });
    }
    // What others ask does not wait for it.
    assert_eq!(server.get(&sandbox.target("processes")).status, 200);
    sandbox.delete();
}

/// Each is woken by all that the process writes, and nothing is sent to who waits for its end.
#[test]
fn those_that_wait_for_a_process_take_one_processor() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let writer =
        "awk 'BEGIN { for (;;) { printf \"x\"; fflush(); for (n = 0; n < 20000; n++); } }'";
    let writer = sandbox.spawn(&json!({ "cmd": writer }))["id"].clone();
    let target = sandbox.target(&format!("processes/{}/wait", writer.as_str().unwrap()));
    let waiting: Vec<Connection> = (0..300)
        .map(|_| {
            let mut connection = sandbox.connect();
            connection.send_request("GET", &target, &[], b"");
            connection
        })
        .collect();
    takes_one_processor(&server, || std::thread::sleep(Duration::from_millis(50)));
    drop(waiting);
    sandbox.delete();
}

/// Each read from their full pipes calls everybody who waits for room.
#[test]
fn commands_whose_output_is_costly_to_read_take_one_processor() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let code = "import os, resource, select, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
outputs = [os.dup(1) for _ in range(min(most // 2, 1000))]
waiting = []
while len(waiting) * len(outputs) < 200_000:
    waiting.append(select.epoll())
    for output in outputs: waiting[-1].register(output, select.EPOLLOUT | select.EPOLLET)
open('ready.' + sys.argv[1], 'x')
while True: os.write(1, bytes(65536))";
    let start = |n: usize| json!({ "cmd": ["python3", "-c", code, n.to_string()] });
    // Some are read by the threads of their clients, and some by the thread of the sandbox.
    sandbox.spawn(&start(0));
    sandbox.spawn(&start(1));
    std::thread::scope(|scope| {
        for n in 2..5 {
            let (mut connection, target) = (sandbox.connect(), sandbox.target("exec"));
            let body = start(n).to_string();
            scope.spawn(move || connection.request("POST", &target, &[], body.as_bytes()));
        }
        wait_until("they write", 6 * PATIENCE, || {
            sandbox.sh("ls | grep -c ready || true") == "5\n"
        });
        takes_one_processor(&server, || std::thread::sleep(Duration::from_millis(50)));
        sandbox.delete();
    });
}

/// Their pipes rest, and are read to the end all the same.
#[test]
fn output_that_is_costly_to_read_arrives_whole() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let code = "import os, select
outputs = [os.dup(1) for _ in range(100)]
waiting = [select.epoll() for _ in range(500)]
for one in waiting:
    for output in outputs: one.register(output, select.EPOLLOUT | select.EPOLLET)
for _ in range(100): os.write(1, bytes(65536))";
    let body = json!({ "cmd": ["python3", "-c", code] });
    let spawned: Vec<_> = (0..3).map(|_| sandbox.spawn(&body)).collect();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let ran = sandbox.exec(&body);
                assert_eq!(ran.code(), Some(0), "{}", ran.stderr);
                assert_eq!(ran.stdout.len(), 100 * 65536);
            });
        }
    });
    for process in spawned {
        let route = format!(
            "processes/{}/wait?timeout=60",
            process["id"].as_str().unwrap()
        );
        let ended = sandbox.get(&route).json();
        assert_eq!(ended["running"], false, "{ended}");
        assert_eq!(ended["stdout_bytes"], 100 * 65536, "{ended}");
    }
    sandbox.delete();
}

/// What a request that nobody reads keeps of an ended run is its sandbox's own.
#[test]
fn logs_of_former_runs_push_out_nobody_elses() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().env("SBX_LOG_TOTAL_BYTES", 8 << 20).start();
    let victim = server.sandbox();
    let log = victim.spawn(&json!({ "cmd": "head -c 1000000 /dev/zero" }));
    let log = format!("processes/{}", log["id"].as_str().unwrap());
    victim.get(&format!("{log}/wait"));
    let sandbox = server.sandbox();
    let mut stalled = Vec::new();
    for _ in 0..12 {
        let print = sandbox.spawn(&json!({ "cmd": "head -c 4000000 /dev/zero" }));
        let id = print["id"].as_str().unwrap();
        sandbox.get(&format!("processes/{id}/wait"));
        let target = sandbox.target(&format!("processes/{id}/logs"));
        stalled.push(sandbox.connect().stream("GET", &target, b""));
        for (change, body) in [("pause", json!({ "keep": "files" })), ("resume", json!({}))] {
            let reply = sandbox.post(change, &body);
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
    }
    let kept = victim.get(&format!("{log}/logs?encoding=base64"));
    let text = kept.text();
    assert!(!text.contains("\"dropped\""), "{}", &text[..200]);
    drop(stalled);
    sandbox.delete();
    victim.delete();
}

/// Paths are held and sent, some of them a hundred times in one answer.
#[test]
fn a_tree_as_deep_as_can_be_costs_no_memory() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    // Deeper than one process could by a path, and unreadable at the end.
    let code = "import os
name = b'\\xff' * 250
for _ in range(1500):
    os.mkdir(name)
    os.chdir(name)
for n in range(100): os.mkdir(str(n), 0)";
    let made = sandbox.exec(&json!({ "code": code, "language": "python" }));
    assert_eq!(made.code(), Some(0), "{made:?}");
    let peak = || memory_of(server.inner_pid(), "VmHWM");
    let before = peak();
    let call = json!({
        "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": { "name": "grep", "arguments": { "pattern": "x" } },
    });
    let headers = [
        ("content-type", "application/json"),
        ("accept", "application/json, text/event-stream"),
    ];
    for (route, body) in [
        ("files/compare", json!({ "path": ".", "entries": [] })),
        ("files/copy?from=.&to=copy", json!({})),
        ("mcp", call),
    ] {
        let mut connection = sandbox.connect();
        let target = sandbox.target(route);
        let body = body.to_string();
        let reply = connection.request("POST", &target, &headers, body.as_bytes());
        assert!(reply.body.len() < 1 << 20, "{route}: {}", reply.body.len());
    }
    let after = peak();
    assert!(after < before + (24 << 20), "{before} {after}");
    sandbox.delete();
}

fn ask_as_e2b(
    connection: &mut Connection,
    sandbox: &Sandbox<'_>,
    method: &str,
    target: &str,
    body: &str,
) -> Reply {
    let headers = [
        ("x-api-key", &*sandbox.token),
        ("x-access-token", &*sandbox.token),
        ("e2b-sandbox-id", &*sandbox.id),
        ("content-type", "application/json"),
        ("accept", "application/json, text/event-stream"),
    ];
    connection.request(method, target, &headers, body.as_bytes())
}

fn take_one_processor(
    server: &Server,
    sandbox: &Sandbox<'_>,
    next: impl Fn() -> (&'static str, String, String) + Sync,
) {
    asks_take_one_processor(server, || {
        let (method, target, body) = next();
        ask_as_e2b(&mut server.connect(), sandbox, method, &target, &body)
    });
}

/// Asks from several connections until the server has used three seconds of processor time.
fn asks_take_one_processor(server: &Server, ask: impl Fn() -> Reply + Sync) {
    takes_one_processor(server, || {
        let reply = ask();
        // A watcher that is read too rarely has lost some.
        assert!(matches!(reply.status, 200 | 500), "{}", reply.text());
    });
}

/// Has several threads do something until the server has used three seconds of processor time.
fn takes_one_processor(server: &Server, act: impl Fn() + Sync) {
    let used = || cpu_time_of(server.inner_pid());
    let is_over = AtomicBool::new(false);
    let (begun, before, limit) = (Instant::now(), used(), Duration::from_secs(3));
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    act();
                }
            });
        }
        wait_until("they have used some time", 6 * PATIENCE, || {
            used() >= before + limit
        });
        let took = begun.elapsed();
        is_over.store(true, Ordering::Relaxed);
        assert!(took >= limit.mul_f64(0.75), "more than one: {took:?}");
    });
}

#[test]
fn a_sandbox_has_as_many_processes_as_it_was_made_with() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let small = server.sandbox_with(&json!({ "max_procs": 10 }));
    let neighbour = server.sandbox_with(&json!({ "max_procs": 10 }));
    let probe = Probe::new(&small);
    let outcome = probe.run_one(&["fork-limit"]);
    assert_eq!(outcome, "8 EAGAIN", "the one that asks is two threads");
    // It left the others, and they are the sandbox's alone.
    assert_eq!(small.processes().len(), 8);
    assert_eq!(Probe::new(&neighbour).run_one(&["fork-limit"]), "8 EAGAIN");
    small.delete();
    neighbour.delete();
}

#[test]
fn memory_that_is_used_up() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let mut got = 0;
    withstand(&server, &json!({ "max_mem_mb": 64 }), |sandbox| {
        let outcome = Probe::new(sandbox).run_one(&["hog-memory", "512"]);
        let (megabytes, error) = outcome.split_once(' ').unwrap();
        assert_eq!(error, "ENOMEM");
        got = megabytes.parse().unwrap();
    });
    assert!((32..=64).contains(&got), "{got} of 64 megabytes");
    // Without a limit, as far as a test may go.
    withstand(&server, &json!({}), |sandbox| {
        let probe = Probe::new(sandbox);
        for _ in 0..2 {
            sandbox.spawn(&probe.command(&[&["hog-memory", "256"], &["stay"]]));
        }
    });
}

#[test]
fn a_sandbox_cannot_open_all_the_files_that_the_machine_can_have_open() {
    if !is_root() {
        skip!("needs root");
    }
    let machine = std::fs::read_to_string("/proc/sys/fs/file-max").unwrap();
    let machine: u64 = machine.trim().parse().unwrap();
    let server = Server::host().start();
    for processes in [1, 64, 1024, 100_000] {
        let sandbox = server.sandbox_with(&json!({ "max_procs": processes }));
        let limits = sandbox.sh("ulimit -n; ulimit -Hn");
        for limit in limits.lines().map(|limit| limit.parse::<u64>().unwrap()) {
            let all = limit * processes;
            assert!(limit <= 1024 || all <= machine / 4, "{all} of {machine}");
        }
        sandbox.delete();
    }
}

#[test]
fn descriptors_that_are_used_up() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    withstand(&server, &json!({}), |sandbox| {
        let probe = Probe::new(sandbox);
        for _ in 0..5 {
            sandbox.spawn(&probe.command(&[&["hog-descriptors"], &["stay"]]));
        }
    });
}

/// A command that has ended costs the server descriptors as long as one of its descendants has its output open.
#[test]
fn outputs_that_stay_open_after_their_commands() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host()
        .wrapped_in(&["prlimit", "--nofile=1024:1024"])
        .start();
    withstand(&server, &json!({}), |sandbox| {
        // A program that others give their output to, over a socket: so they are no processes of its sandbox any more.
        let keeper = "import socket
server = socket.socket(socket.AF_UNIX)
server.bind('keeper')
server.listen(256)
kept = []
while True:
    connection, _ = server.accept()
    kept.append(socket.recv_fds(connection, 1, 2))
    connection.sendall(b'.')";
        let keeper = sandbox.spawn(&json!({ "cmd": ["python3", "-c", keeper] }));
        wait_until("the keeper listens", PATIENCE, || {
            sandbox.home.join("keeper").exists()
        });
        let give = "import socket
connection = socket.socket(socket.AF_UNIX)
connection.connect('keeper')
socket.send_fds(connection, [b'.'], [1, 2])
connection.recv(1)";
        let command = json!({ "cmd": ["python3", "-c", give] });
        // A thousand would take all descriptors of the server several times.
        let refused = (0..1000).find_map(|_| {
            let reply = sandbox.post("processes", &command);
            (reply.status != 200).then_some(reply)
        });
        let refused = refused.expect("a command is refused");
        assert_error(&refused, 503, "over_limit");
        assert!(descriptors_of(server.inner_pid()) < 700);
        let route = format!("processes/{}", keeper["id"].as_str().unwrap());
        assert_eq!(sandbox.request("DELETE", &route, b"").status, 200);
        wait_until("there is room again", PATIENCE, || {
            sandbox.post("processes", &json!({ "cmd": "true" })).status == 200
        });
    });
}

#[test]
fn connections_to_the_server_that_never_finish_a_request() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host()
        .wrapped_in(&["/bin/sh", "-c", "ulimit -S -n 1024; exec \"$0\""])
        .start();
    let address = server.address.to_string();
    withstand(&server, &json!({}), |sandbox| {
        let probe = Probe::new(sandbox);
        for _ in 0..2 {
            probe.hold(&[&["half-open", &address, "500"]]);
        }
    });
}

/// Takes a mount away when the test ends.
struct Unmount<'a>(&'a TempDir);
impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount")
            .arg("-l")
            .arg(self.0.path())
            .status();
    }
}

#[test]
fn a_disk_that_is_full() {
    if !is_root() {
        skip!("needs root");
    }
    let disk = TempDir::new();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=16m,mode=755", "none"])
        .arg(disk.path())
        .output()
        .is_ok_and(|output| output.status.success());
    if !mounted {
        skip!("cannot mount a small disk here");
    }
    let unmount = Unmount(&disk);
    let server = Server::host()
        .env("SBX_HOMES_DIR", disk.join("homes"))
        .start();
    let neighbour = server.sandbox();
    assert_eq!(neighbour.put("files/write?path=kept", b"old").status, 200);
    let sandbox = server.sandbox();
    sandbox.exec(&json!({ "cmd": "cat /dev/zero > big" }));
    let reply = neighbour.put("files/write?path=kept", &vec![1; 1 << 20]);
    assert_eq!((reply.status, reply.code().as_str()), (507, "no_space"));
    assert_eq!(neighbour.get("files/read?path=kept").text(), "old");
    expect_prompt(&server, &neighbour);
    sandbox.delete();
    assert_eq!(
        neighbour
            .put("files/write?path=kept", &vec![1; 1 << 20])
            .status,
        200
    );
    drop((server, unmount));
}

#[test]
fn a_program_that_stops_or_kills_whatever_its_sandbox_starts() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    for signal in [libc::SIGSTOP, libc::SIGKILL] {
        withstand(&server, &json!({}), |sandbox| {
            let probe = Probe::new(sandbox);
            sandbox.spawn(&probe.command(&[&["signal-everybody", &signal.to_string()]]));
            let deadline = Instant::now() + race_length();
            while Instant::now() < deadline {
                // Each either starts, and is stopped until its time is over, or is said not to have.
                let begun = Instant::now();
                let body = json!({ "cmd": ["true"], "timeout": 0.2 });
                let reply = sandbox.post("exec", &body);
                assert!(matches!(reply.status, 200 | 400 | 500), "{}", reply.text());
                let took = begun.elapsed();
                assert!(took < Duration::from_secs(10), "{took:?}");
            }
        });
    }
}

#[test]
fn files_that_their_owner_lets_nobody_open() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    withstand(&server, &json!({}), |sandbox| {
        sandbox.sh(
            "cp /bin/sh program; echo old > file; echo old > other; mkdir dir; echo old > dir/file",
        );
        let probe = Probe::new(sandbox);
        probe.hold(&[
            &["lease", "program"],
            &["lease", "file"],
            &["lease", "dir/file"],
        ]);
        let (prefix, names) = (sandbox.prefix(), Subjects::below("."));
        let names = names.with("old", "file");
        let of_files = routes().filter(|route| {
            // A stream that does not end would be waited for, and the file is needed to the end.
            route.answer != Answer::Endless
                && !["files/move", "files/delete"].contains(&route.pattern)
        });
        let asks = of_files.flat_map(|route| route.asks_at_files(&prefix, &names, ["file", "new"]));
        let more = [
            ("GET", "files/read?path=file&offset=0&length=1"),
            ("PUT", "files/write?path=file&offset=0"),
            ("GET", "files/archive?path=/"),
            ("POST", "files/copy?from=other&to=file&overwrite=1"),
            ("POST", "files/move?from=other&to=dir/file"),
            ("POST", "files/grep {\"pattern\":\"old\"}"),
            (
                "POST",
                "files/patch --- a/file\n+++ b/file\n@@ -1 +1 @@\n-old\n+new\n",
            ),
            ("GET", "files/glob?pattern=file"),
            ("DELETE", "files/delete?path=dir&recursive=1"),
        ]
        .map(|(method, route)| {
            let (path, body) = route.split_once(' ').unwrap_or((route, "new"));
            Ask::new(method, sandbox.target(path), body)
        });
        for ask in asks.chain(more) {
            let begun = Instant::now();
            let reply = ask.send(&mut sandbox.connect());
            let took = begun.elapsed();
            assert!(took < Duration::from_secs(5), "{ask:?}: {took:?}");
            assert!(reply.status < 600, "{}", reply.text());
        }
        // A command whose program it is does not start until the kernel has lost its patience; that
        // is its sandbox's own affair, and does not keep it from being deleted.
        let mut connection = sandbox.connect();
        let body = json!({ "cmd": ["./program", "-c", "true"] }).to_string();
        connection.send_request("POST", &sandbox.target("exec"), &[], body.as_bytes());
        wait_until("it is on its way", PATIENCE, || {
            sandbox.processes().len() == 2
        });
    });
}

/// Begins to wait for a port of a sandbox on which nothing will listen.
fn wait_for_nothing(sandbox: &Sandbox<'_>, name: &str) -> Connection {
    let mut waiting = sandbox.connect();
    let target = sandbox.target(&format!("ports/{name}/wait"));
    waiting.send_request("GET", &target, &[], b"");
    assert_eq!(waiting.read_head().status, 200);
    waiting
}

#[test]
fn waits_for_ports_beside_thousands_of_sockets() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().env("SBX_PING_SECS", 1).start();
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    for part in 0..10 {
        probe.hold(&[&["unix-listen-many", &part.to_string(), "500"]]);
    }
    // Bound but not listening, so that a look finds something.
    sandbox.sh("mkdir -p .sbx/proxy");
    probe.hold(&[&["unix-bind", ".sbx/proxy/bound.sock"]]);
    let mut waiting: Vec<Connection> = (0..40)
        .map(|number| wait_for_nothing(&sandbox, if number % 2 == 0 { "bound" } else { "none" }))
        .collect();
    // The waits last longer than the first looks, which come fast.
    let last = waiting.last_mut().unwrap();
    last.read_chunk().unwrap();
    let before = cpu_time_of(server.inner_pid());
    for _ in 0..3 {
        last.read_chunk().unwrap();
    }
    let used = cpu_time_of(server.inner_pid()).saturating_sub(before);
    assert!(used < Duration::from_millis(600), "{used:?}");
}

#[test]
fn a_sandbox_waits_for_its_ports_within_its_share() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let mut waiting: Vec<Connection> = (0..64)
        .map(|_| wait_for_nothing(&sandbox, "none"))
        .collect();
    let refused = sandbox.get("ports/none/wait?timeout=0");
    assert_error(&refused, 503, "over_limit");
    // Nobody else is refused anything.
    assert_eq!(sandbox.sh("echo here"), "here\n");
    let neighbour = server.sandbox();
    let reply = neighbour.get("ports/none/wait?timeout=0");
    assert_eq!(reply.json()["listening"], false);
    waiting.pop();
    wait_until("there is a place again", PATIENCE, || {
        sandbox.get("ports/none/wait?timeout=0").status == 200
    });
}

/// Viewers that read nothing of an output without end, as many as a sandbox may have, and one that sends frames
/// without end.
#[test]
fn a_sandbox_that_attaches_to_its_terminal_without_end_costs_a_neighbour_nothing() {
    if !is_root() {
        skip!("needs root");
    }
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let server = Server::host().env("SBX_MAX_CONNECTIONS", 128).start();
    let (sandbox, neighbour) = (server.sandbox(), server.sandbox());
    let target = |sandbox: &Sandbox<'_>, cmd: &str| {
        let process = sandbox.spawn(&json!({ "cmd": cmd, "pty": true }));
        sandbox.target(&format!(
            "processes/{}/attach",
            process["id"].as_str().unwrap()
        ))
    };
    let loud = target(&sandbox, "exec yes");
    let before = memory_of(server.inner_pid(), "VmRSS");
    let mut held = Vec::new();
    let refused = (0..128).find_map(|_| {
        match WebSocket::try_open(sandbox.connect(), &loud, &[]) {
            Ok(socket) => held.push(socket),
            Err(reply) => return Some(reply),
        }
        None
    });
    assert_error(&refused.expect("it may have them all"), 503, "over_limit");
    let frames = frame(0x89, &[b'p'; 125]).repeat(100);
    let flooding = held.pop().unwrap().connection.stream;
    let limit = Some(Duration::from_millis(100));
    flooding.set_write_timeout(limit).unwrap();
    while (&flooding).write_all(&frames).is_ok() {}
    expect_prompt(&server, &neighbour);
    let mut other = WebSocket::open(neighbour.connect(), &target(&neighbour, "exec cat"));
    other.type_in("here\n");
    other.read_until("here\r\nhere\r\n");
    let after = memory_of(server.inner_pid(), "VmRSS");
    assert!(after < before + (32 << 20), "{before} then {after}");
}

#[test]
fn a_sandbox_that_prints_more_than_all_logs_may_take_costs_a_neighbour_no_log() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host()
        .env("SBX_LOG_BYTES", 1 << 20)
        .env("SBX_LOG_TOTAL_BYTES", 4 << 20)
        .start();
    let neighbour = server.sandbox();
    let sandbox = server.sandbox();
    let run = |sandbox: &Sandbox<'_>, command: &str| {
        let process = sandbox.spawn(&json!({ "cmd": command }));
        let route = format!("processes/{}/wait", process["id"].as_str().unwrap());
        assert_eq!(sandbox.get(&route).json()["exit_code"], 0);
        process["id"].as_str().unwrap().to_owned()
    };
    let finished: Vec<String> = (0..3)
        .map(|_| run(&neighbour, "head -c 200000 /dev/zero | tr '\\0' x"))
        .collect();
    // Some finish, and some still run.
    for _ in 0..8 {
        run(&sandbox, "head -c 2000000 /dev/zero");
        sandbox.spawn(&json!({ "cmd": "head -c 2000000 /dev/zero; echo; echo done; sleep 1000" }));
    }
    wait_until("all of it was printed", PATIENCE, || {
        let printed = sandbox.get("processes").json();
        let running = printed.as_array().unwrap().iter();
        running
            .filter(|process| process["running"] == true)
            .all(|process| process["stdout_bytes"].as_u64() > Some(2_000_000))
    });
    for id in finished {
        let reply = neighbour.get(&format!("processes/{id}/logs"));
        let output = output_of(&events_of(&reply.body), "stdout", 0);
        assert_eq!((output.dropped, output.data.len()), (0, 200_000));
    }
}

/// Clients of a sandbox that read files, or walk through trees, without end.
#[test]
fn long_work_on_files_takes_one_processor_and_ends_with_its_sandbox() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let used = || cpu_time_of(server.inner_pid());
    let unhashed = "0".repeat(64);
    let compared = format!("files/write?path=huge&if_sha256={unhashed}");
    let kinds: [(&str, &str); 5] = [
        ("GET", "files/read?path=huge&lines=999999999-"),
        ("PUT", &compared),
        ("GET", "files/list?path=wide&limit=1"),
        ("POST", "files/chmod?path=tree&mode=755&recursive=1"),
        (
            "POST",
            "files/copy?from=tree&to=copy&recursive=1&overwrite=1",
        ),
    ];
    withstand(&server, &json!({}), |sandbox| {
        sandbox.sh(
            "truncate -s 4T huge; mkdir wide tree; (cd wide; seq 30000 | xargs touch); cd tree; \
             for i in $(seq 20); do mkdir $i; (cd $i; seq 500 | xargs touch); done",
        );
        for (method, route) in kinds {
            let limit = Duration::from_secs(1);
            let stop = Stop::default();
            let took = std::thread::scope(|scope| {
                let _stop = stop.guard();
                for _ in 0..4 {
                    scope.spawn(|| {
                        while !stop.is_set() {
                            let mut connection = sandbox.connect();
                            let closes = [("Connection", "close")];
                            connection.send_request(method, &sandbox.target(route), &closes, b"");
                            let mut stream = &connection.stream;
                            let soon = Duration::from_millis(20);
                            stream.set_read_timeout(Some(soon)).unwrap();
                            let is_over = |read: std::io::Result<usize>| match read {
                                Ok(count) => count == 0,
                                Err(error) => error.kind() != ErrorKind::WouldBlock,
                            };
                            while !stop.is_set() && !is_over(stream.read(&mut [0; 4096])) {}
                        }
                    });
                }
                let (before, begun) = (used(), Instant::now());
                wait_until("they have used some time", 3 * PATIENCE, || {
                    used() >= before + limit
                });
                begun.elapsed()
            });
            assert!(
                took >= limit.mul_f64(0.75),
                "{route}: more than one: {took:?}"
            );
        }
        // These go on while the sandbox is deleted.
        for (method, route) in &kinds[..2] {
            let mut connection = sandbox.connect();
            connection.send_request(method, &sandbox.target(route), &[], b"");
            std::thread::spawn(move || std::io::copy(&mut connection.stream, &mut std::io::sink()));
        }
    });
}

/// Many clients of a sandbox that send the same request again and again.
struct Crowd<'a> {
    method: &'a str,
    route: &'a str,
    body: &'a [u8],
}

impl Crowd<'_> {
    const CLIENTS: usize = 200;

    /// Lets them ask until the server has used some time for it, and deletes the sandbox while their requests go on. Together
    /// they get one processor and little memory, and all of it ends at once.
    #[track_caller]
    fn expect_modesty(&self, server: &Server, sandbox: &Sandbox<'_>) {
        let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
        let pid = server.inner_pid();
        let used = || cpu_time_of(pid);
        let request = format!(
            "{} {} HTTP/1.1\r\nHost: x\r\nX-Sandbox-Token: {}\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Accept: application/json, text/event-stream\r\nContent-Length: {}\r\n\r\n",
            self.method,
            sandbox.target(self.route),
            sandbox.token,
            self.body.len()
        );
        let request = [request.as_bytes(), self.body].concat();
        let is_over = AtomicBool::new(false);
        let peak = || memory_of(pid, "VmHWM") >> 20;
        let (first, limit) = (peak(), Duration::from_secs(3));
        let (took, ended) = std::thread::scope(|scope| {
            let (begun, before) = (Instant::now(), used());
            let ask = || {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        let mut socket = std::net::TcpStream::connect(server.address).unwrap();
                        // It may be refused before all of it is sent.
                        let _ = socket.write_all(&request);
                        let _ = std::io::copy(&mut socket, &mut std::io::sink());
                    }
                })
            };
            let clients: Vec<_> = (0..Self::CLIENTS).map(|_| ask()).collect();
            wait_until("they have used some time", 6 * PATIENCE, || {
                used() >= before + limit
            });
            let took = begun.elapsed();
            is_over.store(true, Ordering::Relaxed);
            let begun = Instant::now();
            // To remove the files may take longer.
            let target = format!("/v1/sandboxes/{}", sandbox.id);
            scope.spawn(move || assert_eq!(server.delete(&target).status, 200));
            for client in clients {
                client.join().unwrap();
            }
            (took, begun.elapsed())
        });
        let grown = peak() - first;
        let route = self.route;
        assert!(grown < 200, "{route}: {grown} MiB more");
        assert!(ended < PROMPT, "{route}: it ended after {ended:?}");
        assert!(
            took >= limit.mul_f64(0.75),
            "{route}: more than one: {took:?}"
        );
    }
}

#[test]
fn figures_of_a_large_home_take_one_processor_and_little_memory() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let long = "x".repeat(245);
    let touch = format!("seq -f '%05g{long}' 19900 | xargs touch");
    let made = sandbox.exec(&json!({ "cmd": touch }));
    assert_eq!(made.code(), Some(0));
    Crowd {
        method: "GET",
        route: "metrics?disk=1",
        body: b"",
    }
    .expect_modesty(&server, &sandbox);
}

#[test]
fn large_expressions_take_one_processor_and_little_memory() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let letter = |at: usize| char::from(b'a' + u8::try_from(at % 26).unwrap());
    let alternative = |at: usize| {
        let letters = (0..6).map(|index| letter(at * 7 + index));
        letters.chain(".{1,3}|".chars()).collect::<String>()
    };
    let pattern: String = (0..2450).map(alternative).collect();
    let grep =
        json!({ "path": "f", "pattern": pattern + "x", "case": "insensitive", "word": true });
    let call = json!({
        "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": { "name": "grep", "arguments": grep },
    });
    for (route, body) in [("files/grep", grep), ("mcp", call)] {
        let sandbox = server.sandbox();
        sandbox.sh("echo a > f");
        Crowd {
            method: "POST",
            route,
            body: body.to_string().as_bytes(),
        }
        .expect_modesty(&server, &sandbox);
    }
}
