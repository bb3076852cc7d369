//! Faults of the machine: no further process, no memory, no /proc, a clock that jumps. A request that
//! fails names the reason, existing data is not lost, and service recovers when the fault ends.
//!
//! Faults of the program itself are in [`panics`].
//!
//! Elsewhere: full disks and disks without inodes (`files::atomic`, `host::capacity`,
//! `walls::exhaustion`); descriptors, threads and address space that connections use up (`hostile`);
//! limits of one user's processes and of descriptors that commands use up (`exec::refusals`).

pub mod panics;

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::files::send_what_is_wanted;
use crate::fixture::{
    Builder, EventStream, Mark, PATIENCE, Reply, Server, Stop, TOKEN, TempDir, events_of,
    has_namespaces, is_root, numbered_text, output_of, parse_replies, status_of, wait_until,
};
use crate::skip;

/// One request on a connection of its own, which the server may refuse before it has read anything.
#[track_caller]
fn ask(server: &Server, method: &str, target: &str, body: &str) -> Reply {
    let mut connection = server.connect();
    let request = format!(
        "{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Sandbox-Token: {TOKEN}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let _ = connection.stream.write_all(request.as_bytes());
    let mut replies = parse_replies(&connection.read_to_close()).unwrap();
    assert_eq!(replies.len(), 1, "{method} {target}");
    replies.remove(0)
}

/// What a command writes; none if it is refused.
fn try_to_run(server: &Server, target: &str, body: &Value) -> Option<String> {
    let reply = ask(server, "POST", target, &body.to_string());
    if reply.status != 200 {
        return None;
    }
    let output = output_of(&events_of(&reply.body), "stdout", 0);
    Some(String::from_utf8(output.data).unwrap())
}

// ---------------------------------------------------------------- processes

/// A cgroup in which there may be so many processes and threads.
struct Crowd(PathBuf);

impl Crowd {
    /// None where this machine lets nobody make one.
    fn of(most: usize) -> Option<Self> {
        let name = format!("sbx-test-{}-{most}", std::process::id());
        ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"]
            .iter()
            .map(|hierarchy| Self(PathBuf::from(hierarchy).join(&name)))
            .find(|crowd| {
                // What a cgroup has is there already; a plain directory in its place has nothing.
                let limit = || {
                    fs::File::options()
                        .write(true)
                        .open(crowd.0.join("pids.max"))
                };
                fs::create_dir(&crowd.0).is_ok()
                    && limit().is_ok_and(|mut limit| write!(limit, "{most}").is_ok())
            })
    }

    /// A server that is in it, with all that it starts.
    fn holding(&self, builder: Builder) -> Server {
        let enter = format!(
            "echo $$ > '{}/cgroup.procs' && exec \"$0\"",
            self.0.display()
        );
        builder.wrapped_in(&["sh", "-c", &enter]).start()
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while fs::remove_dir(&self.0).is_err() && self.0.exists() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[track_caller]
fn expect_no_process(refused: &Reply) {
    let known = [(400, "no_resources"), (503, "no_threads")];
    let seen = (refused.status, &*refused.code());
    assert!(known.contains(&seen), "{seen:?}: {}", refused.text());
    if refused.status == 400 {
        assert!(refused.text().contains("EAGAIN"), "{}", refused.text());
    }
}

/// Starts sleepers at `target` until there is no process left, at least a few; how many.
#[track_caller]
fn fill(server: &Server, target: &str, mark: &Mark) -> usize {
    let body = json!({ "cmd": ["sleep", mark.to_string()] });
    for started in 0..100 {
        let reply = ask(server, "POST", target, &body.to_string());
        if reply.status != 200 {
            expect_no_process(&reply);
            assert!(started > 3, "{started}");
            return started;
        }
    }
    panic!("the limit was never met");
}

#[test]
fn a_machine_that_is_full_of_processes_says_so_and_is_well_when_they_are_gone() {
    let Some(crowd) = Crowd::of(32) else {
        skip!("there is no cgroup for processes that may be written");
    };
    let server = crowd.holding(Server::builder());
    let kept = server.spawn(&json!({ "cmd": "echo before; cat" }));
    let mark = Mark::new();
    let count = fill(&server, "/v1/processes", &mark);
    for _ in 0..20 {
        let refused = ask(&server, "POST", "/v1/exec", r#"{"cmd":["echo","on"]}"#);
        // A connection that has just ended may have left room.
        if refused.status != 200 {
            expect_no_process(&refused);
        }
    }
    // The last place may be taken by a connection that has just ended.
    let mut running = Vec::new();
    wait_until("a list of what runs", PATIENCE, || {
        let listed = ask(&server, "GET", "/v1/processes", "");
        if listed.status == 200 {
            running = listed.json().as_array().unwrap().clone();
            running.retain(|process| process["running"] == true);
        }
        running.len() == count + 1
    });
    for process in &running {
        if process["id"] != kept["id"] {
            let target = format!("/v1/processes/{}", process["id"].as_str().unwrap());
            wait_until("it can be deleted", PATIENCE, || {
                ask(&server, "DELETE", &target, "").status == 200
            });
        }
    }
    mark.wait_gone(PATIENCE);
    wait_until("commands run again", PATIENCE, || {
        let body = json!({ "cmd": "echo on | cat" });
        try_to_run(&server, "/v1/exec", &body).is_some_and(|text| text == "on\n")
    });
    let target = format!("/v1/processes/{}", kept["id"].as_str().unwrap());
    let stdin = format!("{target}/stdin?eof=1");
    assert_eq!(server.put(&stdin, b"after\n").status, 200);
    let logs = server.stream("GET", &format!("{target}/logs?follow=1"), b"");
    let output = output_of(&logs.collect::<Vec<_>>(), "stdout", 0);
    assert_eq!(output.data, b"before\nafter\n");
    drop(server);
}

#[test]
fn a_host_that_is_full_of_processes_can_delete_sandboxes() {
    if !is_root() {
        skip!("needs root");
    }
    let Some(crowd) = Crowd::of(48) else {
        skip!("there is no cgroup for processes that may be written");
    };
    let server = crowd.holding(Server::host());
    let neighbour = server.sandbox();
    assert_eq!(neighbour.put("files/write?path=kept", b"kept").status, 200);
    for _ in 0..3 {
        let sandbox = server.sandbox();
        let mark = Mark::new();
        fill(&server, &sandbox.target("processes"), &mark);
        let body = json!({ "cmd": ["echo", "on"] });
        let reply = ask(
            &server,
            "POST",
            &neighbour.target("exec"),
            &body.to_string(),
        );
        if reply.status != 200 {
            expect_no_process(&reply);
        }
        // Whoever can end what fills the machine is heard, and what it takes is at hand.
        let target = format!("/v1/sandboxes/{}", sandbox.id);
        wait_until("it can be deleted", PATIENCE, || {
            let reply = ask(&server, "DELETE", &target, "");
            assert!([200, 503].contains(&reply.status), "{}", reply.text());
            reply.status == 200
        });
        mark.wait_gone(PATIENCE);
        assert!(!sandbox.home.exists());
        wait_until("a neighbour's commands run again", PATIENCE, || {
            let target = neighbour.target("exec");
            let body = json!({ "cmd": "cat kept | cat" });
            try_to_run(&server, &target, &body).is_some_and(|text| text == "kept")
        });
    }
    drop(server);
}

// ---------------------------------------------------------------- memory

#[test]
fn a_body_that_there_is_no_memory_for_is_503_and_hurts_nobody() {
    const MIB: u64 = 1 << 20;
    let can_limit = Command::new("prlimit").arg("--version").output();
    if can_limit.is_err() {
        skip!("needs prlimit");
    }
    let base = {
        let server = Server::start();
        let _ = server.exec(&json!({ "cmd": "true" }));
        status_of(server.pid(), "VmSize") * 1024
    };
    let input = numbered_text(14 << 20);
    let large = json!({ "cmd": "cksum", "stdin": input })
        .to_string()
        .into_bytes();
    let mut statuses = Vec::new();
    for more in [8, 16, 24, 48, 96, 320] {
        let limit = base + more * MIB;
        let option = format!("--as={limit}:{limit}");
        let mut server = Server::builder().wrapped_in(&["prlimit", &option]).start();
        let kept = server.spawn(&json!({ "cmd": "echo kept; cat" }));
        for clients in [1, 4] {
            let replies: Vec<Reply> = thread::scope(|scope| {
                let asking: Vec<_> = (0..clients)
                    .map(|_| {
                        scope.spawn(|| send_what_is_wanted(&server, "POST", "/v1/exec", &large))
                    })
                    .collect();
                asking.into_iter().map(|one| one.join().unwrap()).collect()
            });
            for reply in replies {
                statuses.push(reply.status);
                match reply.status {
                    200 => assert!(reply.text().contains(&input.len().to_string())),
                    503 => {
                        let code = reply.code();
                        // The spare thread, which serves where there is no memory for another, starts no command.
                        let known = ["no_memory", "over_limit", "no_threads"];
                        assert!(known.contains(&&*code), "{}", reply.text());
                    }
                    status => panic!("{status}: {}", reply.text()),
                }
            }
        }
        // Logs are no reason to end either.
        for _ in 0..4 {
            let body = json!({ "cmd": "head -c 8000000 /dev/zero" });
            let reply = server.post("/v1/processes", &body);
            assert!([200, 503].contains(&reply.status), "{}", reply.text());
        }
        wait_until("they have ended", PATIENCE, || {
            let listed = server.get("/v1/processes").json();
            let running = |process: &&Value| process["running"] == true;
            listed.as_array().unwrap().iter().filter(running).count() == 1
        });
        assert!(server.is_running(), "{more} MiB more: {}", server.log());
        assert_eq!(server.exec(&json!({ "cmd": "echo on" })).stdout, "on\n");
        let target = format!("/v1/processes/{}/logs", kept["id"].as_str().unwrap());
        let logs = server.stream("GET", &target, b"");
        let output = output_of(&logs.collect::<Vec<_>>(), "stdout", 0);
        // What is over may make room for what goes on, and the oldest goes first.
        assert!(output.data == b"kept\n" || output.dropped == 5);
    }
    assert!(
        statuses.contains(&200) && statuses.contains(&503),
        "{statuses:?}"
    );
}

// ---------------------------------------------------------------- /proc

/// Starts a server in a namespace where /proc is an empty directory.
fn without_proc(builder: Builder) -> Server {
    // Not exec: a host's init is not told of its parent's end, but ends with the namespace's first
    // process, which is the shell.
    let script = "mount -t tmpfs -o ro none /proc && \"$0\"; exit";
    let words = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "sh",
        "-c",
        script,
    ];
    builder.wrapped_in(&words).start()
}

#[test]
fn without_proc_a_server_serves() {
    if !is_root() || !has_namespaces() {
        skip!("needs root, and namespaces of its own");
    }
    let server = without_proc(Server::builder());
    let dir = TempDir::new();
    let text = numbered_text(1 << 20);
    let outcome = server.exec(&json!({ "cmd": ["cat"], "stdin": text }));
    assert!(outcome.stdout == text && outcome.code() == Some(0));
    for _ in 0..2 {
        // The second time it replaces a file.
        let target = format!("/v1/files/write?path={}", dir.join("file"));
        let reply = server.put(&target, text.as_bytes());
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(fs::read_to_string(dir.join("file")).unwrap(), text);
    let part = format!("/v1/files/write?path={}&offset=1", dir.join("file"));
    assert_eq!(server.put(&part, b"part").status, 200);
    let changed = fs::read_to_string(dir.join("file")).unwrap();
    assert!(changed[1..].starts_with("part") && changed.len() == text.len());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no litter");
    // Of a tree that cannot be seen, its group is what can be ended.
    let mark = Mark::new();
    let body = json!({ "cmd": format!("sleep {mark} & sleep {mark}"), "timeout": 0.3 });
    assert_eq!(server.exec(&body).exit["reason"], "timeout");
    mark.wait_gone(PATIENCE);
    let process = server.spawn(&json!({ "cmd": format!("sleep {mark} & sleep {mark}") }));
    mark.wait_for(2);
    let target = format!("/v1/processes/{}", process["id"].as_str().unwrap());
    assert_eq!(server.delete(&target).json()["killed"], true);
    mark.wait_gone(PATIENCE);
    assert_eq!(server.get("/v1/metrics").status, 200);
    for target in ["/v1/ports", "/v1/ports/1/wait?timeout=0"] {
        let reply = server.get(target);
        let is_said = reply.status == 500 && reply.text().contains("/proc/net/tcp");
        assert!(reply.status == 200 || is_said, "{target}: {}", reply.text());
    }
    assert_eq!(server.get("/v1/proxy/1/").status, 502);
}

#[test]
fn without_proc_a_host_keeps_its_promises() {
    if !is_root() || !has_namespaces() {
        skip!("needs root, and namespaces of its own");
    }
    let server = without_proc(Server::host());
    let (sandbox, neighbour) = (server.sandbox(), server.sandbox());
    let mark = Mark::new();
    for sandbox in [&sandbox, &neighbour] {
        assert_eq!(sandbox.put("files/write?path=file", b"one").status, 200);
        assert_eq!(sandbox.get("files/read?path=file").text(), "one");
        assert_eq!(
            sandbox.put("files/write?path=file&offset=1", b"wn").status,
            200
        );
        assert_eq!(
            sandbox.sh("cat file; pwd"),
            format!("own{}\n", sandbox.home.display())
        );
    }
    let body = json!({ "cmd": format!("sleep {mark} & sleep {mark}"), "timeout": 0.3 });
    assert_eq!(sandbox.exec(&body).exit["reason"], "timeout");
    mark.wait_gone(PATIENCE);
    // By user nothing is out of reach.
    sandbox.spawn(
        &json!({ "cmd": format!("setsid sleep {mark} & setsid sleep {mark} & sleep {mark}") }),
    );
    mark.wait_for(3);
    let target = format!("/v1/sandboxes/{}", sandbox.id);
    assert_eq!(server.delete(&target).json()["deleted"], true);
    assert_eq!(mark.pids(), Vec::<i32>::new());
    assert!(!sandbox.home.exists());
    assert_eq!(neighbour.sh("cat file"), "own");
    assert_eq!(server.get("/v1/metrics").status, 200);
    // A server behind a name is reached through /proc: without it the client gets an error.
    let listen = "import os,socket,time; os.chdir(os.environ['SBX_PROXY_DIR']); s=socket.socket(socket.AF_UNIX); \
                  s.bind('app.sock'); s.listen(); print('on', flush=True); time.sleep(3600)";
    if PathBuf::from("/usr/bin/python3").exists() {
        let mut stream =
            neighbour.exec_stream(&json!({ "cmd": ["/usr/bin/python3", "-c", listen] }));
        wait_until("it listens", PATIENCE, || {
            stream
                .next_output()
                .is_none_or(|event| event["event"] == "stdout")
        });
        let reply = neighbour.get("proxy/app/");
        assert_eq!(reply.status, 502, "{}", reply.text());
    }
}

// ---------------------------------------------------------------- the clock

/// The clock that can be set is nobody's here: `clippy.toml` keeps it out of every deadline. This is
/// the other clock, as a machine has it that has been up for a moment, or for a hundred years.
#[test]
fn a_server_serves_at_any_time_of_its_machines_life() {
    let uptime = fs::read_to_string("/proc/uptime").unwrap();
    let uptime: u64 = uptime.split('.').next().unwrap().parse().unwrap();
    for offset in [format!("-{uptime}"), "4000000000".to_owned()] {
        let words = [
            "unshare",
            "--time",
            "--monotonic",
            &offset,
            "--boottime",
            &offset,
            "--fork",
            "--kill-child",
        ];
        let probe = Command::new(words[0])
            .args(&words[1..])
            .arg("true")
            .stderr(Stdio::null())
            .status();
        if !probe.is_ok_and(|status| status.success()) {
            skip!("time cannot be unshared here");
        }
        let server = Server::builder()
            .env("SBX_PING_SECS", 1)
            .wrapped_in(&words)
            .start();
        assert!(server.get("/health").json()["uptime_ms"].as_u64().unwrap() < 60_000);
        let mark = Mark::new();
        let body = json!({ "cmd": format!("echo on; sleep {mark}"), "timeout": 1.5 });
        let begun = Instant::now();
        let events: Vec<Value> = server.exec_stream(&body).collect();
        assert!(begun.elapsed() >= Duration::from_millis(1500));
        assert!(
            events.iter().any(|event| event["event"] == "ping"),
            "{events:?}"
        );
        let exit = events.last().unwrap();
        assert_eq!(exit["reason"], "timeout");
        let took = exit["duration_ms"].as_u64().unwrap();
        assert!((1500..20_000).contains(&took), "{exit}");
        // Times of what is kept are times of the day.
        let process = server.spawn(&json!({ "cmd": ["true"] }));
        let now = std::time::SystemTime::UNIX_EPOCH
            .elapsed()
            .unwrap()
            .as_millis();
        let started = u128::from(process["started_at_ms"].as_u64().unwrap());
        assert!(now.abs_diff(started) < 60_000, "{process}");
        let wait = format!(
            "/v1/processes/{}/wait?timeout=60",
            process["id"].as_str().unwrap()
        );
        assert_eq!(server.get(&wait).json()["exit_code"], 0);
    }
}

// ---------------------------------------------------------------- the neighbour

#[test]
fn others_output_arrives_during_a_storm_of_timeouts() {
    /// Commands that time out at once, each with a child that has left its session.
    const COUNT: usize = 200;
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let tenant = server.sandbox_with(&json!({ "max_procs": 1000 }));
    let neighbour = server.sandbox();
    let mark = Mark::new();
    let mut ticking =
        neighbour.exec_stream(&json!({ "cmd": "while :; do echo tick; sleep 0.05; done" }));
    let stop = Stop::default();
    let (slowest_tick, slowest_command) = thread::scope(|scope| {
        let guard = stop.guard();
        let ticks = scope.spawn(|| longest(&stop, || next_tick(&mut ticking)));
        let commands =
            scope.spawn(|| longest(&stop, || assert_eq!(neighbour.sh("echo here"), "here\n")));
        let due = Instant::now() + Duration::from_secs(5);
        let mut connection = tenant.connect();
        for _ in 0..COUNT {
            let left = due.saturating_duration_since(Instant::now()).as_secs_f64();
            let body = json!({
                "cmd": format!("setsid sleep {mark} & sleep {mark}"),
                "timeout": left.max(0.1),
            });
            let body = body.to_string();
            let target = tenant.target("processes");
            let reply = connection.request("POST", &target, &[], body.as_bytes());
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
        wait_until("all have timed out", 3 * PATIENCE, || {
            let listed = tenant.get("processes").json();
            let has_timed_out = |process: &Value| process["reason"] == "timeout";
            listed.as_array().unwrap().iter().all(has_timed_out)
        });
        mark.wait_gone(PATIENCE);
        drop(guard);
        (ticks.join().unwrap(), commands.join().unwrap())
    });
    // The storm itself takes a second or two; nobody is to wait for the end of it.
    for slowest in [slowest_tick, slowest_command] {
        assert!(
            slowest < Duration::from_secs(5),
            "{slowest_tick:?}, {slowest_command:?}"
        );
    }
    tenant.delete();
}

/// The longest that `act` takes, until it is time to end.
fn longest(stop: &Stop, mut act: impl FnMut()) -> Duration {
    let mut longest = Duration::ZERO;
    while !stop.is_set() {
        let begun = Instant::now();
        act();
        longest = longest.max(begun.elapsed());
    }
    longest
}

fn next_tick(stream: &mut EventStream) {
    let event = stream.next_output().unwrap();
    assert!(
        ["start", "stdout"]
            .iter()
            .any(|kind| event["event"] == *kind),
        "{event}"
    );
}
