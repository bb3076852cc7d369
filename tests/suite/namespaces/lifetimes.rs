//! Everything ends with its command, its sandbox or the server, whoever has adopted it; and nothing is left.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::{Way, holders_of, needs_namespaces, sandbox, sandbox_with};
use crate::fixture::{
    Mark, PATIENCE, Sandbox, Server, all_processes, best_of, count_entries, homes_in, is_alive,
    pid_of, wait_until,
};

/// A command that leaves processes behind in every way: in the background, in sessions of their own, and as
/// orphans that ignore signals.
fn scatter(mark: &Mark) -> String {
    format!(
        "sleep {mark} & (setsid sleep {mark} &) ; (setsid sh -c 'trap \"\" TERM HUP; (sleep {mark} &); exec sleep {mark}' &) ; \
         exec sleep {mark}"
    )
}

const SCATTERED: usize = 5;

#[test]
fn a_command_ends_with_all_that_it_has_started() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let sandbox = sandbox(&server);
        let (mark, other) = (Mark::new(), Mark::new());
        let bystander = sandbox.spawn(&json!({ "cmd": scatter(&other) }));
        other.wait_for(SCATTERED);

        let process = sandbox.spawn(&json!({ "cmd": scatter(&mark) }));
        mark.wait_for(SCATTERED);
        let id = process["id"].as_str().unwrap();
        let reply = sandbox.post(&format!("processes/{id}/kill"), &json!({}));
        assert_eq!(reply.status, 200, "{}", reply.text());
        mark.wait_gone(PATIENCE);

        let process = sandbox.spawn(&json!({ "cmd": scatter(&mark) }));
        mark.wait_for(SCATTERED);
        let id = process["id"].as_str().unwrap();
        let reply = sandbox.request("DELETE", &format!("processes/{id}"), b"");
        assert_eq!(reply.status, 200, "{}", reply.text());
        mark.wait_gone(PATIENCE);

        let outcome = sandbox.exec(&json!({ "cmd": scatter(&mark), "timeout": 1 }));
        assert_eq!(outcome.exit["timed_out"], true, "{outcome:?}");
        mark.wait_gone(PATIENCE);

        let stream = sandbox.exec_stream(&json!({ "cmd": scatter(&mark) }));
        mark.wait_for(SCATTERED);
        drop(stream);
        mark.wait_gone(PATIENCE);

        assert_eq!(other.pids().len(), SCATTERED, "what others run goes on");
        let id = bystander["id"].as_str().unwrap();
        sandbox.request("DELETE", &format!("processes/{id}"), b"");
        other.wait_gone(PATIENCE);
        wait_until("orphans are reaped", PATIENCE, || {
            let holder = holders_of(&server)[0];
            all_processes()
                .iter()
                .all(|process| process.parent != holder)
        });
    }
}

#[test]
fn a_process_is_shown_by_the_number_that_it_has_outside() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let sandbox = sandbox(&server);
        let mark = Mark::new();
        let process = sandbox.spawn(&json!({ "cmd": format!("exec sleep {mark}") }));
        let pid = mark.any();
        assert_eq!(pid_of(&process), pid);
        let by_pid = sandbox.get(&format!("processes/{pid}")).json();
        assert_eq!(by_pid["id"], process["id"]);
        let reply = sandbox.post(
            &format!("processes/{pid}/kill"),
            &json!({ "signal": "TERM" }),
        );
        assert_eq!(reply.status, 200);
        mark.wait_gone(PATIENCE);
    }
}

#[test]
fn a_sandbox_ends_with_everything_in_it() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let (mark, other) = (Mark::new(), Mark::new());
        let doomed = sandbox_with(&server, json!({ "max_procs": 64 }));
        let spared = sandbox(&server);
        doomed.spawn(&json!({ "cmd": scatter(&mark) }));
        spared.spawn(&json!({ "cmd": scatter(&other) }));
        mark.wait_for(SCATTERED);
        other.wait_for(SCATTERED);
        // Not before: it leaves the others no process.
        doomed.spawn(&json!({ "cmd": "f() { f | f & }; f" }));
        wait_until("it is full", PATIENCE, || doomed.processes().len() > 32);
        doomed.delete();
        assert_eq!(mark.pids(), Vec::<i32>::new());
        assert_eq!(other.pids().len(), SCATTERED);
        wait_until("one holder is left", PATIENCE, || {
            holders_of(&server).len() == 1
        });
        spared.delete();
    }
}

/// Nothing is weaker when the holder is gone: the sandbox takes no commands.
#[test]
fn a_sandbox_whose_first_process_is_killed_is_lost_and_says_so() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let sandbox = sandbox(&server);
        let mark = Mark::new();
        sandbox.spawn(&json!({ "cmd": format!("exec sleep {mark}") }));
        let holder = holders_of(&server)[0];
        mark.wait_for(1);
        kill(Pid::from_raw(holder), Signal::SIGKILL).unwrap();
        mark.wait_gone(PATIENCE);
        wait_until("the holder ends", PATIENCE, || !is_alive(holder));
        for _ in 0..3 {
            let reply = sandbox.post("exec", &json!({ "cmd": "echo weaker" }));
            assert_eq!(reply.status, 500, "{}", reply.text());
            assert!(reply.text().contains("first process"), "{}", reply.text());
        }
        assert_ne!(sandbox.get("proxy/8000/").status, 200);
        assert_eq!(sandbox.get("ports").status, 500);
        wait_until("the log says so", PATIENCE, || {
            server
                .log()
                .contains(&format!("sandbox {} is lost", sandbox.id))
        });
        sandbox.delete();
        assert_eq!(super::sandbox(&server).sh("echo again").trim(), "again");
    }
}

#[test]
fn a_server_that_is_killed_takes_them_along() {
    needs_namespaces!();
    for way in Way::BOTH {
        let mut server = way.builder().start();
        let mark = Mark::new();
        let sandbox = sandbox(&server);
        sandbox.spawn(&json!({ "cmd": scatter(&mark) }));
        mark.wait_for(SCATTERED);
        let holders = holders_of(&server);
        assert_eq!(holders.len(), 1);
        let inner = Pid::from_raw(server.inner_pid());
        // Init would end them too, later.
        server.signal(libc::SIGSTOP);
        kill(inner, Signal::SIGKILL).unwrap();
        mark.wait_gone(PATIENCE);
        // The holder waits until all that ended with it was reaped.
        server.signal(libc::SIGCONT);
        wait_until("the holder ends", PATIENCE, || !is_alive(holders[0]));
        server.wait_for_exit(PATIENCE);
    }
}

/// A holder may not be ready to notice that its server is gone.
#[test]
fn a_server_that_is_killed_while_it_makes_them_leaves_none() {
    needs_namespaces!();
    for way in Way::BOTH {
        for round in 0..12 {
            let mut server = way.builder().start();
            let homes = server.place.as_ref().unwrap().homes();
            let inner = Pid::from_raw(server.inner_pid());
            let body = json!({ "isolation": "namespaces", "network": "blocked", "count": 40 });
            let body = body.to_string();
            let mut request = server.connect();
            request.send_request("POST", "/v1/sandboxes", &[], body.as_bytes());
            // Anywhere in the middle.
            let some = 1 + 3 * round;
            wait_until("some are made", PATIENCE, || homes_in(&homes).len() >= some);
            kill(inner, Signal::SIGKILL).unwrap();
            drop(request);
            server.wait_for_exit(PATIENCE);
            wait_until("no holder is left", PATIENCE, || {
                all_processes()
                    .iter()
                    .all(|process| !shows(process.pid, &homes))
            });
        }
    }
}

/// Whether a process has a mount of one of these homes.
fn shows(pid: i32, homes: &Path) -> bool {
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    mounts.contains(homes.to_str().unwrap())
}

#[test]
fn a_server_that_ends_waits_for_processes_and_for_no_holder() {
    needs_namespaces!();
    let shortest = best_of(3, || {
        let mut server = Server::host().start();
        let mark = Mark::new();
        let sandbox = sandbox(&server);
        sandbox.spawn(&json!({ "cmd": format!("exec sleep {mark}") }));
        mark.wait_for(1);
        let begun = Instant::now();
        server.signal(libc::SIGTERM);
        server.wait_for_exit(PATIENCE);
        let taken = begun.elapsed();
        assert_eq!(mark.pids(), Vec::<i32>::new());
        taken
    });
    // Those that do not end by themselves get five.
    assert!(shortest < Duration::from_secs(4), "{shortest:?}");
}

/// The namespaces of every process of the machine, by their numbers.
fn namespaces() -> BTreeSet<String> {
    let kinds = ["mnt", "pid", "net", "ipc", "uts", "cgroup", "user"];
    let processes = all_processes().into_iter();
    let paths =
        processes.flat_map(|process| kinds.map(|kind| format!("/proc/{}/ns/{kind}", process.pid)));
    paths
        .filter_map(|path| {
            fs::read_link(path)
                .ok()?
                .into_os_string()
                .into_string()
                .ok()
        })
        .collect()
}

#[test]
fn many_sandboxes_come_and_go_and_leave_nothing() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let cycle = |server: &Server| {
            let made = server.post(
                "/v1/sandboxes",
                &json!({ "count": 8, "isolation": "namespaces", "network": "blocked" }),
            );
            assert_eq!(made.status, 200, "{}", made.text());
            let made = made.json();
            for made in made["sandboxes"].as_array().unwrap() {
                let sandbox = Sandbox::of(server, made);
                sandbox.sh("(sleep 100 &) ; echo hello > /tmp/file");
                let socket = sandbox.get("proxy/8000/");
                assert_eq!(socket.status, 502);
                sandbox.delete();
            }
        };
        cycle(&server);
        let pid = server.inner_pid();
        let mounts = || {
            fs::read_to_string(format!("/proc/{pid}/mountinfo"))
                .unwrap()
                .lines()
                .count()
        };
        let (before, open, seen) = (
            mounts(),
            count_entries(&format!("/proc/{pid}/fd")),
            namespaces(),
        );
        for _ in 0..5 {
            cycle(&server);
        }
        assert_eq!(mounts(), before);
        assert_eq!(holders_of(&server), Vec::<i32>::new());
        wait_until("no descriptor is left", PATIENCE, || {
            count_entries(&format!("/proc/{pid}/fd")) <= open
        });
        wait_until("no zombie is left", PATIENCE, || {
            all_processes().iter().all(|process| process.parent != pid)
        });
        let own = namespaces();
        let left: Vec<_> = own.difference(&seen).collect();
        // Other tests make namespaces as well, but no process of this server is in any.
        let of_server = |name: &&&String| {
            let mine = ["mnt", "pid", "net"]
                .map(|kind| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap());
            mine.iter().any(|one| one.to_str() == Some(name.as_str()))
        };
        assert_eq!(left.iter().filter(of_server).count(), 0);
    }
}

#[test]
fn a_pause_keeps_what_namespaces_have_in_memory_and_a_stop_does_not() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let sandbox = sandbox(&server);
        let mark = Mark::new();
        sandbox.sh("echo home > file; echo memory > /tmp/file; echo memory > /dev/shm/file");
        sandbox.spawn(&json!({ "cmd": scatter(&mark) }));
        mark.wait_for(SCATTERED);
        let change = |act: &str, body: Value| {
            let target = format!("/v1/sandboxes/{}/{act}", sandbox.id);
            let reply = server.post(&target, &body);
            assert_eq!(reply.status, 200, "{}", reply.text());
        };
        let files = "cat file; cat /tmp/file /dev/shm/file 2> /dev/null || echo none";
        change("pause", json!({}));
        assert_eq!(sandbox.get("files/read?path=file").text(), "home\n");
        change("resume", json!({}));
        mark.wait_for(SCATTERED);
        assert_eq!(sandbox.sh(files), "home\nmemory\nmemory\n");
        change("pause", json!({ "keep": "files" }));
        mark.wait_gone(PATIENCE);
        assert_eq!(holders_of(&server), Vec::<i32>::new());
        change("resume", json!({}));
        assert_eq!(sandbox.sh(files), "home\nnone\n");
        assert_eq!(holders_of(&server).len(), 1);
    }
}
