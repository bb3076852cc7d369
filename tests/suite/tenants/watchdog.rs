//! What programs try against the memory watchdog: to hide memory from it, to keep it busy, and to pin its threads.
//! Where a cgroup keeps the limit instead, the outcome is the same.

use std::net::TcpListener;
use std::time::Duration;

use serde_json::json;

use crate::fixture::{
    PATIENCE, Sandbox, Server, cpu_time_of_threads, is_root, threads_of, wait_until,
};
use crate::skip;
use crate::walls::probe::{Probe, hide_call};

/// The limit of most tests, in MiB.
const LIMIT: u64 = 64;

/// How long a sandbox may take that copies or measures a million mappings, on a busy machine.
const COSTLY: Duration = Duration::from_secs(120);

/// The names of the watchdog's threads.
const THREADS: [&str; 3] = ["watchdog", "measure", "measure-costly"];

/// A server that can compare address spaces, and one whose container does not let it.
fn servers() -> [Server; 2] {
    let builder = Server::host();
    let mut command = builder.command();
    hide_call(&mut command, libc::SYS_kcmp);
    [Server::host().start(), builder.start_as(command)]
}

fn limited(server: &Server, megabytes: u64) -> Sandbox<'_> {
    server.sandbox_with(&json!({ "max_total_mem_mb": megabytes }))
}

fn has_watchdog(server: &Server) -> bool {
    let limits = &server.get("/health").json()["isolation"]["limits"];
    limits
        .as_array()
        .unwrap()
        .contains(&json!("memory_watchdog"))
}

/// Does this act, which must be ended for the sandbox's limit.
#[track_caller]
fn expect_end(act: &[&str]) {
    for server in servers() {
        let sandbox = limited(&server, LIMIT);
        let mut command = Probe::new(&sandbox).command(&[act, &["stay"]]);
        command["timeout"] = json!(PATIENCE.as_secs());
        let outcome = sandbox.exec(&command);
        assert_eq!(outcome.exit["reason"], "memory_limit", "{outcome:?}");
        wait_until("the rest of the sandbox has ended", PATIENCE, || {
            sandbox.processes().is_empty()
        });
        assert_eq!(sandbox.sh("echo again"), "again\n");
        sandbox.delete();
    }
}

/// Does these acts, and expects that they are found to hold so many MiB, and live.
#[track_caller]
fn expect_life(acts: &[&[&str]], limit: u64, used: std::ops::Range<u64>) {
    for server in servers() {
        let sandbox = limited(&server, limit);
        let process = sandbox.spawn(&Probe::new(&sandbox).command(acts));
        let route = format!("processes/{}", process["id"].as_str().unwrap());
        let mut seen = 0;
        wait_until("its memory was measured three times", PATIENCE, || {
            let process = sandbox.get(&route).json();
            assert_eq!(process["running"], true, "{process}");
            let fields = [("Accept", "application/json")];
            let mut connection = server.connect();
            let metrics = connection.request("GET", "/v1/metrics", &fields, b"");
            let bytes = &metrics.json()["per_sandbox"][0]["memory_limit_used_bytes"];
            seen += u32::from(used.contains(&(bytes.as_u64().unwrap() >> 20)));
            std::thread::sleep(Duration::from_millis(200));
            seen >= 3
        });
        sandbox.delete();
    }
}

/// The threads of the parent wait as in vfork, and nothing in /proc tells the children from such of its own memory.
#[test]
fn memory_of_children_that_look_like_their_parent_counts() {
    if !is_root() {
        skip!("needs root");
    }
    expect_end(&["doubles", "24", "4"]);
}

#[test]
fn memory_of_a_process_without_its_first_thread_counts() {
    if !is_root() {
        skip!("needs root");
    }
    expect_end(&["without-first-thread", "200"]);
}

#[test]
fn a_memory_file_counts_that_only_a_vforked_child_has_open() {
    if !is_root() {
        skip!("needs root");
    }
    expect_end(&["waited-for", "file", "200"]);
}

#[test]
fn an_address_space_counts_once_however_many_processes_have_it() {
    if !is_root() {
        skip!("needs root");
    }
    let hog: &[&str] = &["hog-private", "60"];
    for how in ["vfork", "nested-vfork", "shared"] {
        // Each of four processes or more shows them.
        let acts = [hog, &["waited-for", how, "3"], &["stay"]];
        expect_life(&acts, 100, 60..100);
    }
    expect_life(&[hog, &["start-programs"]], 100, 60..100);
}

#[test]
fn a_sandbox_that_is_slow_to_measure_delays_no_other_and_is_ended_itself() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    if !has_watchdog(&server) {
        skip!("a cgroup keeps the limit");
    }
    let costly = limited(&server, 128);
    let probe = Probe::new(&costly);
    // Below the limit until all of them are there.
    let process =
        costly.spawn(&probe.command(&[&["mappings", "40000", "80"], &["copies", "19"], &["stay"]]));
    let route = format!("processes/{}", process["id"].as_str().unwrap());
    wait_until("it is slow to measure", COSTLY, || {
        let process = costly.get(&route).json();
        assert_eq!(process["running"], true, "{process}");
        costly.processes().len() == 20
    });
    let neighbour = limited(&server, LIMIT);
    let hog = Probe::new(&neighbour).command(&[&["hog-private", "200"], &["stay"]]);
    // It takes seconds to find that all 160 MiB are different ones.
    probe.hold(&[&["hog-shared", "80"]]);
    let outcome = neighbour.exec(&hog);
    assert_eq!(outcome.exit["reason"], "memory_limit", "{outcome:?}");
    assert_eq!(
        costly.get(&route).json()["running"],
        true,
        "it is measured first"
    );
    wait_until("what is slow to measure is ended too", COSTLY, || {
        costly.get(&route).json()["reason"] == "memory_limit"
    });
}

/// Who lets go last of the memory of a process that has ended closes what was mapped there.
#[test]
fn no_thread_stays_with_what_a_process_had_mapped() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    if !has_watchdog(&server) {
        skip!("a cgroup keeps the limit");
    }
    // It takes a few connections that nobody reads from.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // So much shared memory that others may be above their limit, which has to be measured.
    let other = server.sandbox();
    Probe::new(&other).hold(&[&["hog-shared", "80"]]);
    let pid = server.inner_pid();
    let used = || -> Duration {
        let each = THREADS.map(|name| cpu_time_of_threads(pid, name));
        each.iter().sum()
    };
    for _ in 0..3 {
        let sandbox = limited(&server, 90);
        Probe::new(&sandbox).hold(&[
            &["lingering-socket", &address],
            &["whole-mappings", "300", "60"],
        ]);
        let mut before = used();
        wait_until("it is being measured", PATIENCE, || {
            let used = used();
            before = before.min(used);
            used > before + Duration::from_millis(50)
        });
        sandbox.delete();
    }
    wait_until("no thread of the watchdog is left", PATIENCE, || {
        THREADS.iter().all(|name| threads_of(pid, name).is_empty())
    });
}
