//! A process that holds the lock of its pipe holds up whoever reads or closes the pipe in the server, without a limit and
//! whatever kills that thread (splice(2)). That is a thread of its own sandbox.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::probe::Probe;
use crate::fixture::{
    Held, PATIENCE, Sandbox, Server, TempDir, assert_error, descriptors_of, is_root, kinds,
    threads_of, wait_until, wait_until_received,
};
use crate::skip;

/// The ways to hold a pipe.
const WAYS: [&str; 5] = ["splice", "sendfile", "terminal", "stdin", "reader"];

/// A sandbox with a process that is given pipes at a socket, and holds their locks.
struct Accomplice<'server> {
    /// The directory of the socket, which others may be allowed to reach.
    shared: TempDir,
    socket: String,
    sandbox: Sandbox<'server>,
    /// The process.
    holder: Value,
}

impl<'server> Accomplice<'server> {
    fn of(server: &'server Server) -> Self {
        let shared = TempDir::new();
        std::fs::set_permissions(shared.path(), Permissions::from_mode(0o777)).unwrap();
        let socket = shared.join("holder");
        let body = json!({ "isolation": "landlock", "read_write_paths": [shared.path()] });
        let sandbox = server.sandbox_with(&body);
        let holder = sandbox.spawn(&Probe::new(&sandbox).command(&[&["hold-given", &socket]]));
        wait_until("it listens", PATIENCE, || {
            std::path::Path::new(&socket).exists()
        });
        Self {
            shared,
            socket,
            sandbox,
            holder,
        }
    }

    fn sandbox_that_reaches_it(&self, mut body: Value) -> Sandbox<'server> {
        body["read_write_paths"] = json!([self.shared.path()]);
        self.sandbox.server.sandbox_with(&body)
    }

    /// Ends the process.
    fn let_go(&self) {
        let route = format!("processes/{}", self.holder["id"].as_str().unwrap());
        let deleted = self.sandbox.request("DELETE", &route, b"");
        assert_eq!(deleted.status, 200);
    }
}

/// A command that leaves a process behind which holds one of its pipes. More is written to its stdin than a pipe has room
/// for.
fn holding(probe: &Probe<'_>, way: &str) -> Value {
    let program = probe.words().join(" ");
    let cmd = format!("exec 9<&0; echo '[[\"hold-pipe\",\"{way}\"]]' | {program}");
    json!({ "cmd": cmd, "stdin": " ".repeat(300_000) })
}

/// Starts a command that leaves a process behind which holds one of its pipes, and waits until the server's thread waits
/// for it.
fn hold(probe: &Probe<'_>, way: &str) -> Value {
    let process = probe.sandbox.spawn(&holding(probe, way));
    let pid = probe.sandbox.server.inner_pid();
    wait_until(&format!("a thread waits: {way}"), PATIENCE, || {
        threads_of(pid, "pumps")
            .iter()
            .any(|thread| is_blocked(thread))
    });
    process
}

/// Whether a thread is in a sleep that no signal ends.
fn is_blocked(thread: &str) -> bool {
    let stat = std::fs::read_to_string(format!("{thread}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| rest.starts_with(" D"))
}

/// How many threads of a sandbox sleep.
fn count_sleepers(sandbox: &Sandbox<'_>) -> usize {
    let threads_of = |pid| {
        std::fs::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten()
    };
    let threads = sandbox.processes().into_iter().flat_map(threads_of);
    threads
        .filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("stat")).ok())
        .filter(|stat| {
            stat.rsplit(')')
                .next()
                .is_some_and(|rest| rest.starts_with(" S"))
        })
        .count()
}

/// The other sandboxes and the operator are served.
#[track_caller]
fn expect_service(server: &Server, neighbour: &Sandbox<'_>) {
    let begun = Instant::now();
    let process = neighbour.spawn(&json!({ "cmd": "sleep 0.1; echo done" }));
    let route = |id: &Value, rest: &str| format!("processes/{}/{rest}", id.as_str().unwrap());
    let ended = neighbour
        .get(&route(&process["id"], "wait?timeout=20"))
        .text();
    assert!(ended.contains("\"reason\":\"exited\""), "{ended}");
    assert!(
        neighbour
            .get(&route(&process["id"], "logs"))
            .text()
            .contains("done")
    );
    let process = neighbour.spawn(&json!({ "cmd": ["sleep", "1000"], "timeout": 0.3 }));
    let ended = neighbour
        .get(&route(&process["id"], "wait?timeout=20"))
        .text();
    assert!(ended.contains("\"reason\":\"timeout\""), "{ended}");
    // Orphans are reaped, or the sandbox could make no more of them.
    let daemons = "for i in $(seq 20); do (setsid true &); done; sleep 0.3; echo made";
    for _ in 0..3 {
        assert_eq!(neighbour.sh(daemons), "made\n");
    }
    assert_eq!(neighbour.sh("sleep 1000 & echo here"), "here\n");
    assert_eq!(server.get("/health").status, 200);
    // Each part has a limit of its own; beside other tests all of them together take long.
    assert!(begun.elapsed() < 3 * PATIENCE, "{:?}", begun.elapsed());
}

#[test]
fn a_held_pipe_holds_up_nobody_else() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    for kind in kinds(&server) {
        let quiet = Held::after_one(&server, &kind);
        for way in WAYS {
            let sandbox = server.sandbox_with(&kind);
            let neighbour = server.sandbox_with(&json!({ "max_procs": 32 }));
            hold(&Probe::new(&sandbox), way);
            expect_service(&server, &neighbour);
            // Idle sandboxes go.
            let idle = server.sandbox_with(&json!({ "idle_timeout_secs": 1 }));
            let route = format!("/v1/sandboxes/{}", idle.id);
            wait_until("the idle one goes", PATIENCE, || {
                server.get(&route).status == 404
            });
            std::mem::forget(idle);
            sandbox.delete();
            neighbour.delete();
            quiet.await_of(&server);
        }
    }
}

#[test]
fn a_held_pipe_does_not_outlast_a_deadline_or_a_kill() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    for way in WAYS {
        let mut command = holding(&probe, way);
        command["timeout"] = json!(1);
        let begun = Instant::now();
        let exit = sandbox.exec(&command).exit;
        assert!(begun.elapsed() < PATIENCE);
        assert!(
            ["exited", "timeout"].contains(&exit["reason"].as_str().unwrap()),
            "{exit}"
        );
        let process = hold(&probe, way);
        // What runs beside it has its deadline.
        let other = sandbox.spawn(&json!({ "cmd": ["sleep", "1000"], "timeout": 0.5 }));
        let pid = i32::try_from(other["pid"].as_i64().unwrap()).unwrap();
        wait_until("the other one is killed", PATIENCE, || {
            crate::fixture::stat_of(pid).is_none_or(|stat| stat.state == 'Z')
        });
        let route = format!("processes/{}", process["id"].as_str().unwrap());
        assert_eq!(sandbox.request("DELETE", &route, b"").status, 200, "{way}");
        assert_eq!(sandbox.sh("echo here"), "here\n");
    }
    // A command that has ended by itself leaves a process behind that goes on.
    sandbox.delete();
    wait_until("the thread goes", PATIENCE, || {
        threads_of(server.inner_pid(), "pumps").is_empty()
    });
}

/// What another sandbox holds of a run that has ended counts in the next: else a sandbox would get a new share by each stop
/// and start, and take all of them.
#[test]
fn a_held_pipe_of_a_run_that_has_ended_counts_in_the_next() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host()
        .wrapped_in(&["prlimit", "--nofile=1024:1024"])
        .start();
    let pid = server.inner_pid();
    // All commands may have half of the descriptors, four each, and one sandbox half of that.
    let share = 1024 / 2 / 4 / 2;
    for kind in kinds(&server) {
        let accomplice = Accomplice::of(&server);
        let mut limits = kind.clone();
        limits["max_procs"] = json!(256);
        let sandbox = accomplice.sandbox_that_reaches_it(limits);
        let neighbour = server.sandbox_with(&json!({}));
        let give = Probe::new(&sandbox).command(&[&["give-output", &accomplice.socket]]);
        let sleep = json!({ "cmd": ["sleep", "1000"] });
        let blocked = || {
            let threads = threads_of(pid, "pumps");
            threads.iter().filter(|thread| is_blocked(thread)).count()
        };
        let stop = json!({ "keep": "files" });
        let mut started = 0;
        for run in 1..=2 {
            sandbox.spawn(&give);
            wait_until("a thread waits", PATIENCE, || blocked() == run);
            started += 1;
            // The first run leaves a little.
            let refused = loop {
                if run == 1 && started == share / 2 {
                    break None;
                }
                let reply = sandbox.post("processes", &sleep);
                if reply.status != 200 {
                    break Some(reply);
                }
                started += 1;
            };
            if let Some(refused) = refused {
                assert_error(&refused, 503, "over_limit");
            }
            assert!(started <= share, "{started} in {run} runs");
            assert!(descriptors_of(pid) < 700);
            assert_eq!(neighbour.sh("echo here"), "here\n");
            assert_eq!(sandbox.post("pause", &stop).status, 200);
            assert_eq!(blocked(), run);
            let resumed = sandbox.post("resume", &json!({}));
            if run == 1 {
                assert_eq!(resumed.status, 200, "{}", resumed.text());
            } else {
                assert_error(&resumed, 503, "over_limit");
            }
        }
        expect_service(&server, &neighbour);
        accomplice.let_go();
        assert_eq!(sandbox.post("resume", &json!({})).status, 200);
        for _ in 0..share / 2 {
            sandbox.spawn(&sleep);
        }
        // Runs that nothing holds up follow one another at once.
        for _ in 0..4 {
            assert_eq!(sandbox.sh("sleep 1000 & echo here"), "here\n");
            assert_eq!(sandbox.post("pause", &stop).status, 200);
            assert_eq!(sandbox.post("resume", &json!({})).status, 200);
        }
    }
}

/// A start that such a process holds up fails after two seconds. Whoever waits for it has a share of the connections
/// meanwhile, also without a token: a ticket leads to a sandbox.
#[test]
fn who_waits_for_a_start_that_is_held_up_has_the_share_of_its_sandbox() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().env("SBX_MAX_CONNECTIONS", 64).start();
    let pid = server.inner_pid();
    let accomplice = Accomplice::of(&server);
    let sandbox = accomplice.sandbox_that_reaches_it(json!({ "isolation": "landlock" }));
    let made = sandbox.post("tickets", &json!({ "port": "8000" })).json();
    let ticket = made["path"].as_str().unwrap();
    let give = Probe::new(&sandbox).command(&[&["give-output", &accomplice.socket]]);
    let stop = json!({ "keep": "files" });
    for run in 1..=2 {
        sandbox.spawn(&give);
        wait_until("a thread waits", PATIENCE, || {
            let threads = threads_of(pid, "pumps");
            threads.iter().filter(|thread| is_blocked(thread)).count() == run
        });
        assert_eq!(sandbox.post("pause", &stop).status, 200);
        if run == 1 {
            assert_eq!(sandbox.post("resume", &json!({})).status, 200);
        }
    }
    let mut resuming = sandbox.connect();
    resuming.send_request("POST", &sandbox.target("resume"), &[], b"{}");
    wait_until_received(&resuming.stream);
    // The connections that wait are at most a quarter of all.
    let mut clients: Vec<_> = (0..40).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.send_request("GET", ticket, &[], b"");
    }
    let refused = clients
        .iter_mut()
        .map(|client| client.read_reply())
        .filter(|reply| {
            reply.status == 503 && reply.text().contains("no room for more connections")
        })
        .count();
    assert!(refused >= 20, "{refused}");
    assert_error(&resuming.read_reply(), 503, "over_limit");
}

#[test]
fn a_killed_host_leaves_its_port_to_the_next_one() {
    if !is_root() {
        skip!("needs root");
    }
    for kills_init in [false, true] {
        let mut server = Server::host().start();
        let sandbox = server.sandbox();
        hold(&Probe::new(&sandbox), "splice");
        std::mem::forget(sandbox);
        let inner = server.inner_pid();
        if kills_init {
            server.signal(Signal::SIGKILL as i32);
        }
        kill(Pid::from_raw(inner), Signal::SIGKILL).unwrap();
        server.wait_for_exit(PATIENCE + Duration::from_secs(6));
        let place = server.place.take().unwrap();
        let next = Server::host()
            .env("SBX_PORT", server.address.port())
            .env("SBX_UID_RANGE", place.range())
            .env("SBX_HOMES_DIR", place.homes().display())
            .start();
        assert_eq!(next.sandbox().sh("echo here"), "here\n");
    }
}

#[test]
fn a_sandbox_has_one_thread_for_its_processes_and_none_without() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let threads = || threads_of(server.inner_pid(), "pumps").len();
    let processes: Vec<_> = (0..20)
        .map(|_| sandbox.spawn(&json!({ "cmd": ["sleep", "1000"] })))
        .collect();
    assert_eq!(threads(), 1);
    for process in processes {
        let route = format!("processes/{}", process["id"].as_str().unwrap());
        assert_eq!(sandbox.request("DELETE", &route, b"").status, 200);
    }
    wait_until("there is none", PATIENCE, || threads() == 0);
    assert_eq!(sandbox.sh("echo here"), "here\n");
}

/// Has `tree/name` be a file and a pipe in turn.
const EXCHANGE: &str = r"
import os
open('plain', 'w').write('text')
while True:
    for name in ('plain', 'held'):
        os.link(name, 'next')
        os.rename('next', 'tree/name')
";

/// Opening a pipe takes its lock. So the routes of files open none, not even one that takes the place of a file in the
/// moment between looking and opening.
#[test]
fn a_held_pipe_among_the_files_holds_up_no_request() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    for kind in kinds(&server) {
        let sandbox = server.sandbox_with(&kind);
        let program = Probe::new(&sandbox).words().join(" ");
        sandbox.spawn(&json!({ "cmd": format!(
            "mkdir tree; mkfifo held; exec 1<>held; echo '[[\"hold-pipe\",\"splice\"]]' | {program}; exec sleep 1000"
        ) }));
        // The one that holds it, and `sleep`.
        wait_until("it is held", PATIENCE, || {
            sandbox.processes().len() == 2 && count_sleepers(&sandbox) == 2
        });
        assert_error(
            &sandbox.put("files/write?path=held", b"text"),
            409,
            "not_regular",
        );
        sandbox.spawn(&json!({ "cmd": ["python3", "-c", EXCHANGE] }));
        wait_until("the names are exchanged", PATIENCE, || {
            sandbox.home.join("tree/name").exists()
        });
        let write = |route: &str| sandbox.put(route, b"text").status;
        let post = |route: &str, body: &Value| sandbox.post(route, body).status;
        for _ in 0..100 {
            // Those that replace the name do so once.
            let requests = [
                sandbox.get("files/read?path=tree/name").status,
                sandbox.get("files/read?path=tree/name&offset=1").status,
                write("files/write?path=tree/name&offset=1"),
                write("files/write?path=tree/name"),
                post("files/hash", &json!({ "paths": ["tree/name"] })),
                post("files/grep", &json!({ "path": "tree", "pattern": "text" })),
                sandbox.get("files/archive?path=tree").status,
                post(
                    "files/copy?from=tree&to=other&recursive=1&overwrite=1",
                    &json!({}),
                ),
            ];
            assert!(requests.iter().all(|status| *status < 500), "{requests:?}");
        }
        sandbox.delete();
    }
}

/// Interpreters have threads of their own, for which the same holds.
#[cfg(feature = "interpreter")]
#[test]
fn a_held_pipe_of_a_context_counts_in_the_next_run() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let pid = server.inner_pid();
    for kind in kinds(&server) {
        let accomplice = Accomplice::of(&server);
        let sandbox = accomplice.sandbox_that_reaches_it(kind);
        let socket = &accomplice.socket;
        // It writes nothing to the pipe itself: what waits for the pipe's lock cannot be killed.
        let code = format!(
            "import socket\nto = socket.socket(socket.AF_UNIX)\nto.connect('{socket}')\n\
             socket.send_fds(to, [b'x'], [1])\nto.recv(1)\nimport time; time.sleep(1000)"
        );
        let blocked = || {
            let threads = threads_of(pid, "context");
            threads.iter().filter(|thread| is_blocked(thread)).count()
        };
        // All of its threads: one of them waits for who gives it something.
        let all_sleep = || {
            let [pid] = accomplice.sandbox.processes()[..] else {
                return None;
            };
            let threads = usize::try_from(crate::fixture::status_of(pid, "Threads")).unwrap();
            (count_sleepers(&accomplice.sandbox) == threads).then_some(threads)
        };
        wait_until("it waits", PATIENCE, || all_sleep().is_some());
        let before = all_sleep().unwrap();
        for run in 1..=2 {
            let made = sandbox.post("contexts", &json!({ "language": "python", "id": "c" }));
            assert_eq!(made.status, 200, "{}", made.text());
            let mut client = sandbox.connect();
            let body = json!({ "code": code }).to_string();
            let target = sandbox.target("contexts/c/execute");
            client.send_request("POST", &target, &[], body.as_bytes());
            wait_until("it is held", PATIENCE, || all_sleep() == Some(before + run));
            let stop = json!({ "keep": "files" });
            let stopped = sandbox.post("pause", &stop);
            assert_eq!(stopped.status, 200, "{}", stopped.text());
            wait_until("a thread waits", PATIENCE, || blocked() == run);
            let resumed = sandbox.post("resume", &json!({}));
            if run == 1 {
                assert_eq!(resumed.status, 200, "{}", resumed.text());
            } else {
                assert_error(&resumed, 503, "over_limit");
            }
        }
        accomplice.let_go();
        wait_until("it starts", PATIENCE, || {
            sandbox.post("resume", &json!({})).status == 200
        });
    }
}

#[cfg(feature = "interpreter")]
#[test]
fn a_context_whose_own_code_holds_its_pipe_is_deleted_all_the_same() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let pid = server.inner_pid();
    for kind in kinds(&server) {
        let sandbox = server.sandbox_with(&kind);
        let words = json!(Probe::new(&sandbox).words());
        let code = format!(
            "import subprocess\nsubprocess.run({words}, input=b'[[\"hold-pipe\",\"reader\"]]')"
        );
        let made = sandbox.post("contexts", &json!({ "language": "python", "id": "c" }));
        assert_eq!(made.status, 200, "{}", made.text());
        let mut client = sandbox.connect();
        let body = json!({ "code": code }).to_string();
        let target = sandbox.target("contexts/c/execute");
        client.send_request("POST", &target, &[], body.as_bytes());
        wait_until("its thread waits", PATIENCE, || {
            let threads = threads_of(pid, "context");
            threads.iter().any(|thread| is_blocked(thread))
        });
        let deleted = sandbox.request("DELETE", "contexts/c", b"");
        assert_eq!(deleted.status, 200, "{}", deleted.text());
        wait_until("the thread ends", PATIENCE, || {
            let threads = threads_of(pid, "context");
            !threads.iter().any(|thread| is_blocked(thread))
        });
    }
}
