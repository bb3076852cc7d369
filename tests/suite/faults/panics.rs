//! Panics: the work that panics is over, everything that it held is free again, and all other work goes on.
//!
//! Two techniques make a server panic. A program whose data is broken on purpose does so wherever it takes that data
//! for good. A program that is built with the feature `fault-points` does so at a place of the test's choice, while
//! something is held there; the guards are listed in [`GUARDS`].

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::ask;
use crate::fixture::{
    BINARY, Builder, Mark, PATIENCE, Reply, Sandbox, Server, TempDir, WebSocket, descriptors_of,
    events_of, has_namespaces, homes_in, is_root, names_in, status_of, wait_until,
};
use crate::skip;

/// Starts another program than the one that is tested, with the environment of a builder.
pub fn start(builder: Builder, program: &Path) -> Server {
    let mut command = Command::new(program);
    for (name, value) in builder.command().get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    builder.start_as(command)
}

// ---------------------------------------------------------------- broken data

/// A copy of the program in which some of the data that it carries is broken.
fn broken_program(dir: &TempDir, data: &[u8]) -> String {
    let mut program = fs::read(BINARY).unwrap();
    let mut starts = program.windows(data.len());
    let start = starts.position(|window| window == data).unwrap();
    // Its length stands before it.
    program[start + 4..start + 1000].fill(0xff);
    let path = dir.join("sbx-server");
    fs::write(&path, program).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

const CONTRACT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/openapi.json"));
const SCRIPTS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/scripts"));

/// The panics that a server has logged.
fn panics_of(server: &Server) -> usize {
    server.log().matches("panicked at ").count()
}

/// Waits until a server has logged so many panics, and asserts that there are no more.
#[track_caller]
fn expect_panics(server: &Server, count: usize) {
    wait_until("the panic is in the log", PATIENCE, || {
        panics_of(server) >= count
    });
    assert_eq!(panics_of(server), count, "{}", server.log());
}

#[test]
fn a_panic_ends_one_request_and_not_the_server() {
    let dir = TempDir::new();
    let program = broken_program(&dir, CONTRACT);
    let mut server = start(Server::builder(), Path::new(&program));
    let running = server.spawn(&json!({ "cmd": "sleep 1000" }));
    for round in 1..=20 {
        let reply = ask(&server, "GET", "/openapi.json", "");
        assert_eq!((reply.status, &*reply.code()), (500, "internal"));
        assert_eq!(reply.header("connection"), Some("close"));
        assert_eq!(server.exec(&json!({ "cmd": "echo on" })).stdout, "on\n");
        expect_panics(&server, round);
    }
    assert_eq!(server.entry(&running["id"])["running"], true);
    // It ends as if nothing had been.
    server.signal(Signal::SIGTERM as i32);
    let status = server.wait_for_exit(PATIENCE);
    assert!(status.success(), "{status}");
}

/// Data that is decompressed once: the first use panics, and every later one must too, instead of waiting for the
/// first.
#[test]
fn a_start_that_panics_holds_up_no_other_and_no_deletion() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let dir = TempDir::new();
    let program = broken_program(&dir, SCRIPTS);
    let server = start(Server::host(), Path::new(&program));
    let before = Holdings::of(&server);
    let sandbox = server.sandbox();
    for body in [
        json!({ "code": "print(1)", "id": "job" }),
        json!({ "code": "print(1)", "id": "job" }),
        json!({ "code": "print(2)" }),
    ] {
        let reply = sandbox.post("exec", &body);
        assert_eq!((reply.status, &*reply.code()), (500, "internal"), "{body}");
        assert_eq!(sandbox.sh("echo on"), "on\n");
    }
    assert_eq!(
        sandbox
            .exec(&json!({ "cmd": "echo it", "id": "job" }))
            .stdout,
        "it\n"
    );
    sandbox.delete();
    before.wait_for(&server);
}

// ---------------------------------------------------------------- what is held

/// What a server holds for its clients.
#[derive(Debug, PartialEq, Eq, PartialOrd)]
struct Holdings {
    connections: u64,
    descriptors: usize,
    threads: u64,
}

impl Holdings {
    fn of(server: &Server) -> Self {
        let metrics = server.get("/v1/metrics").text();
        let mut lines = metrics.lines();
        let connections = lines.find_map(|line| line.strip_prefix("sbx_connections "));
        let pid = match server.place {
            Some(_) => server.inner_pid(),
            None => server.pid(),
        };
        Self {
            connections: connections.unwrap().parse().unwrap(),
            descriptors: descriptors_of(pid),
            threads: status_of(pid, "Threads"),
        }
    }

    /// Waits until the server holds no more than this.
    #[track_caller]
    fn wait_for(&self, server: &Server) {
        let mut last = None;
        let is_free = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait_until("all that was held is free", PATIENCE, || {
                let now = last.insert(Self::of(server));
                now.connections <= self.connections
                    && now.descriptors <= self.descriptors
                    && now.threads <= self.threads
            });
        }));
        assert!(is_free.is_ok(), "{self:?} before, {last:?} now");
    }
}

// ---------------------------------------------------------------- fault points

/// The program with fault points and with the names of its functions, which is built for these tests.
pub fn faulty_program() -> &'static Path {
    static PROGRAM: OnceLock<std::path::PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let built = Path::new(BINARY);
        let (profile, target) = (built.parent().unwrap(), built.ancestors().nth(3).unwrap());
        let faults = target.join("faults");
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args(["build", "--locked", "--bin", "sbx-server"])
            .args(["--features", "fault-points", "--target-dir"])
            .arg(&faults)
            .env("CARGO_PROFILE_RELEASE_STRIP", "none");
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success(), "cannot build it");
        faults.join(built.strip_prefix(target).unwrap())
    })
}

fn faulty(builder: Builder, fault: &str) -> Server {
    start(builder.env("SBX_FAULT", fault), faulty_program())
}

/// Something that a client asks for. It is done twice: the first time the server panics.
struct Attempt<'a> {
    sandbox: &'a Sandbox<'a>,
    /// Whether the server panics this time.
    panics: bool,
}

impl Attempt<'_> {
    /// The answer to a request: 500 if the server panics.
    #[track_caller]
    fn ask(&self, method: &str, route: &str, body: &[u8]) -> Reply {
        let reply = self.sandbox.request(method, route, body);
        if self.panics {
            assert_eq!(reply.status, 500, "{route}: {}", reply.text());
            assert_eq!(reply.code(), "internal", "{route}");
        } else {
            assert!(reply.status < 300, "{route}: {}", reply.text());
        }
        reply
    }

    #[track_caller]
    fn post(&self, route: &str, body: &Value) -> Reply {
        self.ask("POST", route, body.to_string().as_bytes())
    }

    /// The events of a stream, which breaks off if the server panics.
    #[track_caller]
    fn stream(&self, method: &str, route: &str, body: &Value) -> Vec<Value> {
        let mut connection = self.sandbox.connect();
        let target = self.sandbox.target(route);
        connection.send_request(method, &target, &[], body.to_string().as_bytes());
        let mut received = Vec::new();
        loop {
            received.append(&mut connection.take_buffered());
            if received.ends_with(b"\r\n0\r\n\r\n") || !connection.fill() {
                break;
            }
        }
        let text = String::from_utf8_lossy(&received);
        // Nothing of it may have been sent.
        let has_begun = text.starts_with("HTTP/1.1 200 ");
        assert!(has_begun || (self.panics && text.is_empty()), "{text}");
        let is_whole = text.ends_with("\r\n0\r\n\r\n");
        assert_eq!(is_whole, !self.panics, "{route}: {text}");
        let mut body = Vec::new();
        for line in received.split(|byte| *byte == b'\n') {
            if line.first() == Some(&b'{') {
                body.extend_from_slice(line);
                body.push(b'\n');
            }
        }
        events_of(&body)
    }

    /// Nothing in the home that was not asked for.
    #[track_caller]
    fn expect_names(&self, expected: &[&str]) {
        let mut names = names_in(&self.sandbox.home);
        names.retain(|name| !name.starts_with('.'));
        assert_eq!(names, expected);
    }
}

/// A place where something is held, and how a client gets the server there.
struct Guard {
    fault: &'static str,
    /// What is freed there.
    held: &'static str,
    attempt: fn(&Attempt<'_>),
}

/// Every kind of guard that a sandbox's client can have a panic under.
const GUARDS: &[Guard] = &[
    Guard {
        fault: "request",
        held: "the lease, the connection's place, what the request is charged",
        attempt: |attempt| drop(attempt.ask("GET", "files/list?path=.", b"")),
    },
    Guard {
        fault: "start",
        held: "the start that is listed by its id",
        attempt: |attempt| drop(attempt.post("exec", &json!({ "cmd": "true", "id": "job" }))),
    },
    Guard {
        fault: "started",
        held: "a child that nothing drives yet",
        attempt: |attempt| start_something(attempt, "exec"),
    },
    Guard {
        fault: "driven",
        held: "a pump whose process is not listed yet",
        attempt: |attempt| start_something(attempt, "exec"),
    },
    Guard {
        fault: "foreground",
        held: "the pump of a command that its client follows, and the client's part in it",
        attempt: follow_a_command,
    },
    Guard {
        fault: "supervised",
        held: "a pump of the supervisor",
        attempt: run_in_the_background,
    },
    Guard {
        fault: "timeouts",
        held: "the processes whose time is up",
        attempt: run_out_of_time,
    },
    Guard {
        fault: "killing",
        held: "a process that is not reaped because its tree is being killed",
        attempt: run_out_of_time,
    },
    Guard {
        fault: "reason",
        held: "the end of a process, which clients wait for",
        attempt: |attempt| {
            let outcome = attempt.sandbox.exec(&json!({ "cmd": "exit 3" }));
            assert_eq!(
                (outcome.code(), &outcome.exit["reason"]),
                (Some(3), &json!("exited"))
            );
        },
    },
    Guard {
        fault: "follow",
        held: "a cursor in a log, and a listener",
        attempt: |attempt| {
            let started = attempt.sandbox.spawn(&json!({ "cmd": "echo hello" }));
            let id = started["id"].as_str().unwrap();
            let route = format!("processes/{id}/logs?follow=1");
            attempt.stream("GET", &route, &json!({}));
        },
    },
    Guard {
        fault: "stdin",
        held: "the turn to write to a process",
        attempt: |attempt| {
            let started = attempt.sandbox.spawn(&json!({ "cmd": "cat" }));
            let route = format!("processes/{}/stdin", started["id"].as_str().unwrap());
            attempt.ask("PUT", &route, b"hello");
            assert_eq!(attempt.sandbox.put(&route, b"again").status, 200);
        },
    },
    Guard {
        fault: "typing",
        held: "a viewer of a terminal, and its turn to type",
        attempt: type_into_a_terminal,
    },
    Guard {
        fault: "upload",
        held: "a file that is complete and not in its place",
        attempt: |attempt| {
            let file = attempt.sandbox.home.join("file");
            let before = fs::read(&file).unwrap_or_default();
            attempt.ask("PUT", "files/write?path=file", b"new");
            let after = if attempt.panics { &*before } else { b"new" };
            assert_eq!(fs::read(&file).unwrap_or_default(), after);
            attempt.expect_names(if attempt.panics { &[] } else { &["file"] });
        },
    },
    Guard {
        fault: "edit",
        held: "the turn to replace a file",
        attempt: |attempt| {
            let route = "files/write?path=file";
            assert_eq!(attempt.sandbox.put(route, b"old text").status, 200);
            let edits = json!([{ "old": "old", "new": "new" }]);
            attempt.post("files/edit", &json!({ "path": "file", "edits": edits }));
        },
    },
    Guard {
        fault: "copy",
        held: "a copy that is staged",
        attempt: |attempt| {
            let route = "files/write?path=from";
            assert_eq!(attempt.sandbox.put(route, b"text").status, 200);
            attempt.ask("POST", "files/copy?from=from&to=to&overwrite=1", b"");
            attempt.expect_names(if attempt.panics {
                &["from"]
            } else {
                &["from", "to"]
            });
        },
    },
    Guard {
        fault: "unpack",
        held: "a directory that is unpacked beside its place",
        attempt: |attempt| {
            attempt
                .sandbox
                .sh("mkdir -p .from && echo text > .from/file");
            let archive = attempt.sandbox.get("files/archive?path=.from");
            assert_eq!(archive.status, 200);
            let target = "files/archive?path=to&atomic=1";
            attempt.ask("PUT", target, &archive.body);
            attempt.expect_names(if attempt.panics { &[] } else { &["to"] });
        },
    },
    Guard {
        fault: "background",
        held: "a thread that reads much, and the tenant's turn",
        attempt: |attempt| {
            // A small one would be read by the connection's own thread.
            attempt.sandbox.sh("head -c 4000000 /dev/zero > large");
            attempt.post("files/hash", &json!({ "paths": ["large"] }));
        },
    },
    Guard {
        fault: "prepared",
        held: "such a thread that was started before the answer",
        attempt: |attempt| {
            attempt.stream("POST", "files/grep", &json!({ "pattern": "x" }));
        },
    },
    Guard {
        fault: "watches",
        held: "the thread of a sandbox's watches",
        attempt: watch_a_tree,
    },
    Guard {
        fault: "relay",
        held: "a connection to a server inside",
        attempt: forward_a_request,
    },
    Guard {
        fault: "interpreter",
        held: "an interpreter that is being started",
        attempt: |attempt| {
            let body = json!({ "language": "bash", "id": "own" });
            let reply = attempt.sandbox.post("contexts", &body);
            if attempt.panics {
                assert_eq!(reply.status, 409, "{}", reply.text());
                assert_eq!(reply.code(), "context_dead");
                let deleted = attempt.sandbox.request("DELETE", "contexts/own", b"");
                assert_eq!(deleted.status, 200, "{}", deleted.text());
            } else {
                assert_eq!(reply.status, 200, "{}", reply.text());
            }
        },
    },
    Guard {
        fault: "execution",
        held: "an interpreter that executes something",
        attempt: execute_code,
    },
    Guard {
        fault: "network",
        held: "the thread of a sandbox's filtered network",
        attempt: |attempt| make_a_socket(attempt, "socket.socket()"),
    },
    Guard {
        fault: "way-out",
        held: "a connection to the proxy of a sandbox",
        attempt: |attempt| {
            let ask = "p = socket.create_connection(('127.0.0.1', int(os.environ['HTTP_PROXY'].rsplit(':', 1)[1])))\n\
                       p.sendall(b'GET http://127.0.0.1:1/ HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')\n\
                       assert b' 500 ' not in p.recv(99)";
            make_a_socket(attempt, ask);
        },
    },
];

fn start_something(attempt: &Attempt<'_>, route: &str) {
    let mark = Mark::new();
    let seconds = if attempt.panics {
        mark.to_string()
    } else {
        "0".to_owned()
    };
    let body =
        json!({ "cmd": format!("sleep {seconds}"), "id": format!("job-{}", attempt.panics) });
    attempt.post(route, &body);
    mark.wait_gone(PATIENCE);
    if attempt.panics {
        // The id is free.
        let again = attempt
            .sandbox
            .exec(&json!({ "cmd": "echo it", "id": "job-true" }));
        // Unless the process was listed: then the command is another one.
        assert!(again.stdout == "it\n" || again.exit.is_null(), "{again:?}");
    }
}

fn follow_a_command(attempt: &Attempt<'_>) {
    for on_disconnect in ["kill", "keep"] {
        let mark = Mark::new();
        let rest = if attempt.panics {
            format!("exec sleep {mark}")
        } else {
            "true".to_owned()
        };
        // Only the first stream breaks off.
        let attempt = Attempt {
            panics: attempt.panics && on_disconnect == "kill",
            ..*attempt
        };
        let id = format!("{on_disconnect}-{}", rest.len());
        let body = json!({
            "cmd": format!("echo begun; {rest}"),
            "timeout": 2, "id": id, "on_disconnect": on_disconnect,
        });
        let events = attempt.stream("POST", "exec", &body);
        let exits = events.iter().filter(|event| event["event"] == "exit");
        assert_eq!(exits.count(), usize::from(!attempt.panics), "{events:?}");
        mark.wait_gone(PATIENCE);
        let route = format!("processes/{id}");
        wait_until("its end is known", PATIENCE, || {
            attempt.sandbox.get(&route).json()["running"] == false
        });
        let deleted = attempt.sandbox.request("DELETE", &route, b"");
        assert_eq!(deleted.status, 200, "{}", deleted.text());
    }
}

fn run_in_the_background(attempt: &Attempt<'_>) {
    let (first, other) = (Mark::new(), Mark::new());
    let sandbox = attempt.sandbox;
    let id = sandbox.spawn(&json!({ "cmd": format!("echo begun; exec sleep {first}") }));
    let id = id["id"].as_str().unwrap();
    let process = || sandbox.get(&format!("processes/{id}")).json();
    if attempt.panics {
        wait_until("it is over", PATIENCE, || process()["running"] == false);
        assert_eq!(process()["reason"], "killed");
        first.wait_gone(PATIENCE);
    }
    let neighbour = sandbox.spawn(&json!({ "cmd": format!("echo begun; exec sleep {other}") }));
    other.wait_for(1);
    for id in [id, neighbour["id"].as_str().unwrap()] {
        let route = format!("processes/{id}");
        assert_eq!(sandbox.request("DELETE", &route, b"").status, 200);
    }
}

fn run_out_of_time(attempt: &Attempt<'_>) {
    let mark = Mark::new();
    // In the background: a foreground command's own thread enforces its time.
    let body = json!({ "cmd": format!("setsid sleep {mark} & sleep {mark}"), "timeout": 0.3 });
    let started = attempt.sandbox.spawn(&body);
    let route = format!("processes/{}", started["id"].as_str().unwrap());
    wait_until("its time is up", PATIENCE, || {
        attempt.sandbox.get(&route).json()["running"] == false
    });
    assert_eq!(attempt.sandbox.get(&route).json()["reason"], "timeout");
    assert_eq!(attempt.sandbox.request("DELETE", &route, b"").status, 200);
    mark.wait_gone(PATIENCE);
}

fn type_into_a_terminal(attempt: &Attempt<'_>) {
    let sandbox = attempt.sandbox;
    let body = json!({ "cmd": "cat", "pty": true });
    let started = sandbox.spawn(&body);
    let target = sandbox.target(&format!(
        "processes/{}/attach",
        started["id"].as_str().unwrap()
    ));
    let mut socket = WebSocket::open(sandbox.connect(), &target);
    socket.type_in("first\n");
    if attempt.panics {
        // Its connection is closed without a close frame.
        while socket.connection.fill() {}
        socket = WebSocket::open(sandbox.connect(), &target);
        socket.type_in("second\n");
        socket.read_until("second\r\nsecond");
    } else {
        socket.read_until("first\r\nfirst");
    }
}

fn watch_a_tree(attempt: &Attempt<'_>) {
    let sandbox = attempt.sandbox;
    let id = format!("w-{}", attempt.panics);
    let reply = sandbox.post("files/watches", &json!({ "path": ".", "id": id }));
    assert_eq!(reply.status, 200, "{}", reply.text());
    let events = format!("files/watches/{id}/events?timeout=30");
    if attempt.panics {
        // It has ended, or it is not known any more.
        let reply = sandbox.get(&events);
        let has_ended = reply.text().contains("\"reason\":\"closed\"");
        assert!(has_ended || reply.status == 404, "{}", reply.text());
    } else {
        sandbox.sh("touch new");
        assert!(sandbox.get(&events).text().contains("new"));
    }
}

/// A server inside that answers each request, and goes on when a client has gone.
const PAGE: &str = r#"
import os, socket
os.chdir(os.environ["SBX_PROXY_DIR"])
listener = socket.socket(socket.AF_UNIX)
listener.bind("app.sock")
listener.listen(9)
print("on", flush=True)
while True:
    connection, _ = listener.accept()
    try:
        connection.recv(9999)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    except OSError:
        pass
    connection.close()
"#;

fn forward_a_request(attempt: &Attempt<'_>) {
    let sandbox = attempt.sandbox;
    let socket = sandbox.home.join(".sbx/proxy/app.sock");
    if !socket.exists() {
        let mut server = sandbox.exec_stream(
            &json!({ "cmd": ["/usr/bin/python3", "-c", PAGE], "on_disconnect": "keep" }),
        );
        wait_until("it listens", PATIENCE, || {
            server
                .next_output()
                .is_none_or(|event| event["event"] == "stdout")
        });
    }
    attempt.ask("GET", "proxy/app/", b"");
}

fn execute_code(attempt: &Attempt<'_>) {
    let sandbox = attempt.sandbox;
    let id = format!("own-{}", attempt.panics);
    let made = sandbox.post("contexts", &json!({ "language": "bash", "id": id }));
    assert_eq!(made.status, 200, "{}", made.text());
    let route = format!("contexts/{id}/execute");
    let whole = Attempt {
        panics: false,
        ..*attempt
    };
    let events = whole.stream("POST", &route, &json!({ "code": "echo hello" }));
    let end = events.last().unwrap();
    let context = sandbox.get(&format!("contexts/{id}")).json();
    if attempt.panics {
        assert_eq!(end["reason"], "died", "{events:?}");
        assert_eq!(context["state"], "dead", "{context}");
        let again = sandbox.post(&format!("contexts/{id}/restart"), &json!({}));
        assert_eq!(again.status, 200, "{}", again.text());
    }
    let events = whole.stream("POST", &route, &json!({ "code": "echo hello" }));
    assert_eq!(events.last().unwrap()["reason"], "completed", "{events:?}");
    let deleted = sandbox.request("DELETE", &format!("contexts/{id}"), b"");
    assert_eq!(deleted.status, 200, "{}", deleted.text());
}

/// Has a command do something in a filtered network. It fails if the server panics, and does not wait.
fn make_a_socket(attempt: &Attempt<'_>, code: &str) {
    let body = json!({
        "cmd": ["/usr/bin/python3", "-c", format!("import os, socket\n{code}")],
        "network": { "mode": "allowlist", "allow": ["127.0.0.1:1"] },
        "timeout": 60,
    });
    let outcome = attempt.sandbox.exec(&body);
    assert_eq!(outcome.exit["reason"], "exited", "{outcome:?}");
    assert_eq!(outcome.code() == Some(0), !attempt.panics, "{outcome:?}");
}

#[test]
#[ignore = "builds the program with fault points"]
fn whatever_is_held_in_a_panic_is_free_afterwards() {
    if !is_root() {
        skip!("host mode needs root");
    }
    for Guard {
        fault,
        held,
        attempt,
    } in GUARDS
    {
        println!("{fault}: {held}");
        let server = faulty(Server::host().env("SBX_CAPACITY", 2), fault);
        let neighbour = server.sandbox();
        let before = Holdings::of(&server);
        for _ in 0..2 {
            let sandbox = server.sandbox();
            let panics = panics_of(&server) == 0;
            attempt(&Attempt {
                sandbox: &sandbox,
                panics,
            });
            expect_panics(&server, 1);
            attempt(&Attempt {
                sandbox: &sandbox,
                panics: false,
            });
            sandbox.delete();
        }
        before.wait_for(&server);
        assert_eq!(neighbour.sh("echo on"), "on\n");
        expect_panics(&server, 1);
    }
}

#[test]
#[ignore = "builds the program with fault points"]
fn a_connection_that_panics_between_requests_is_closed() {
    let server = faulty(Server::builder(), "connection");
    let mut connection = server.connect();
    connection.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_eq!(connection.read_to_close(), b"");
    expect_panics(&server, 1);
    Holdings {
        connections: 1,
        ..Holdings::of(&server)
    }
    .wait_for(&server);
}

#[test]
#[ignore = "builds the program with fault points"]
fn a_command_that_is_kept_ends_at_its_timeout_when_its_driver_panics() {
    let server = faulty(Server::builder(), "foreground");
    let mark = Mark::new();
    let body = json!({
        "cmd": format!("echo begun; exec sleep {mark}"),
        "timeout": 2, "id": "victim", "on_disconnect": "keep",
    });
    let mut connection = server.connect();
    connection.send_request("POST", "/v1/exec", &[], body.to_string().as_bytes());
    let received = connection.read_to_close();
    assert!(!String::from_utf8_lossy(&received).contains("\"exit\""));
    mark.wait_for(1);
    assert_eq!(server.entry(&json!("victim"))["running"], true);
    let waited = server.get("/v1/processes/victim/wait?timeout=60").json();
    assert_eq!(waited["reason"], "timeout", "{waited}");
    mark.wait_gone(PATIENCE);
    for _ in 0..2 {
        assert_eq!(server.delete("/v1/processes/victim").status, 200);
    }
}

/// A client whose thread panics has disconnected: the process ends with its last client.
#[test]
#[ignore = "builds the program with fault points"]
fn a_client_that_panics_keeps_no_process() {
    let server = faulty(Server::builder(), "follow");
    let mark = Mark::new();
    let body = json!({ "cmd": format!("exec sleep {mark}"), "id": "shared" });
    let mut first = server.exec_stream(&body);
    assert_eq!(first.next().unwrap()["event"], "start");
    let mut second = server.connect();
    second.send_request("POST", "/v1/exec", &[], body.to_string().as_bytes());
    second.read_to_close();
    expect_panics(&server, 1);
    mark.wait_for(1);
    drop(first);
    mark.wait_gone(PATIENCE);
}

/// What panics about one sandbox holds up the deletion of no other.
#[test]
#[ignore = "builds the program with fault points"]
fn a_deletion_that_panics_holds_up_no_other() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = faulty(Server::host(), "deletion");
    let homes = server.place.as_ref().unwrap().homes();
    for _ in 0..8 {
        server.sandbox();
    }
    assert_eq!(server.delete("/v1/sandboxes").status, 500);
    expect_panics(&server, 1);
    assert_eq!(homes_in(&homes).len(), 1, "seven are gone");
}

/// Nothing is left of a sandbox whose making panics: neither its home nor its place, which is the only one.
#[test]
#[ignore = "builds the program with fault points"]
fn a_sandbox_whose_making_panics_leaves_nothing() {
    if !is_root() {
        skip!("host mode needs root");
    }
    for fault in ["home", "sandbox"] {
        let mut bodies = vec![json!({})];
        bodies.extend(has_namespaces().then(|| json!({ "isolation": "namespaces" })));
        for body in bodies {
            let builder = Server::host().env("SBX_CAPACITY", 1);
            let server = faulty(builder, &format!("{fault}:6"));
            let homes = server.place.as_ref().unwrap().homes();
            // What the first one of its kind brings stays.
            let mut before = None;
            for _ in 0..6 {
                let reply = server.post("/v1/sandboxes", &body);
                assert_eq!((reply.status, &*reply.code()), (500, "internal"), "{body}");
                assert_eq!(homes_in(&homes).len(), 0, "no home is left");
                before.get_or_insert_with(|| Holdings::of(&server));
            }
            before.unwrap().wait_for(&server);
            let sandbox = server.sandbox_with(&body);
            assert_eq!(sandbox.sh("echo on"), "on\n");
            sandbox.delete();
        }
    }
}

/// A deletion that panics is taken up again, and the place of the sandbox is free then.
#[test]
#[ignore = "builds the program with fault points"]
fn a_deletion_that_panics_is_retried() {
    if !is_root() {
        skip!("host mode needs root");
    }
    for (fault, asks_again) in [
        ("deletion", true),
        ("deletion", false),
        ("emptying", true),
        ("emptying", false),
    ] {
        let server = faulty(Server::host().env("SBX_CAPACITY", 1), fault);
        let mark = Mark::new();
        let sandbox = server.sandbox();
        sandbox.spawn(&json!({ "cmd": format!("sleep {mark}") }));
        let target = format!("/v1/sandboxes/{}", sandbox.id);
        assert_eq!(server.delete(&target).status, 500);
        if asks_again {
            assert_eq!(server.delete(&target).status, 200);
        }
        mark.wait_gone(PATIENCE);
        wait_until("its place is free", 3 * PATIENCE, || {
            let made = server.post("/v1/sandboxes", &json!({})).json();
            made["sandboxes"].as_array().unwrap().len() == 1
        });
        assert!(!sandbox.home.exists());
    }
}

/// Half a server would hang its clients.
#[test]
#[ignore = "builds the program with fault points"]
fn a_panic_of_a_thread_that_everybody_needs_ends_the_server_and_its_sandboxes() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let mut server = faulty(Server::host(), "maintenance");
    // Its maintenance begins with the first sandbox. Whether that one's client gets an answer is open.
    let mut connection = server.connect();
    connection.send_request("POST", "/v1/sandboxes", &[], b"{}");
    let status = server.wait_for_exit(PATIENCE);
    assert_eq!(status.code(), Some(101), "{}", server.log());
    let place = server.place.as_ref().unwrap();
    wait_until("nothing runs", PATIENCE, || place.processes().is_empty());
}

/// What panics again and again costs what it is about each time, and nothing else.
#[test]
#[ignore = "builds the program with fault points"]
fn panics_of_the_supervisor_cost_one_process_each() {
    let server = faulty(Server::builder(), "supervised:20");
    let before = Holdings::of(&server);
    for round in 1..=20 {
        let process = server.spawn(&json!({ "cmd": "echo begun; exec sleep 1000" }));
        wait_until("it is over", PATIENCE, || {
            server.entry(&process["id"])["running"] == false
        });
        expect_panics(&server, round);
    }
    let mark = Mark::new();
    let process = server.spawn(&json!({ "cmd": format!("echo begun; exec sleep {mark}") }));
    mark.wait_for(1);
    let target = format!("/v1/processes/{}", process["id"].as_str().unwrap());
    assert_eq!(server.delete(&target).status, 200);
    before.wait_for(&server);
}

/// The compiler may turn loops into calls of the functions for memory, even those in these functions themselves
/// (`src/sys/memory.rs`), which then would never return.
#[test]
#[ignore = "builds the program with fault points"]
fn the_functions_for_memory_do_not_call_themselves() {
    const NAMES: [&str; 5] = ["memcpy", "memmove", "memcmp", "bcmp", "memset"];
    if !cfg!(target_arch = "x86_64") {
        skip!("other architectures have those of musl");
    }
    let objdump = Command::new("objdump")
        .arg("--disassemble")
        .arg(faulty_program())
        .output();
    let Ok(objdump) = objdump else {
        skip!("there is no objdump");
    };
    let (mut own, mut seen) = ("", Vec::new());
    let listing = String::from_utf8_lossy(&objdump.stdout);
    for line in listing.lines() {
        if let Some((_, name)) = line.split_once(" <")
            && let Some(name) = name.strip_suffix(">:")
        {
            own = name;
            seen.extend(NAMES.iter().find(|known| **known == own));
        }
        let is_meant = (NAMES.contains(&own) && own != "memset") || own.contains("3sys6memory");
        let target = line.rsplit_once('<').map(|(_, target)| target);
        let target = target.and_then(|target| target.strip_suffix('>'));
        if is_meant && let Some(target) = target.filter(|target| NAMES.contains(target)) {
            assert_eq!((own, target), ("bcmp", "memcmp"), "{line}");
        }
    }
    for name in ["memcpy", "memmove", "memcmp"] {
        assert!(seen.contains(&&name), "{name} is in the program");
    }
}
