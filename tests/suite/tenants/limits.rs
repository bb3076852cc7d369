//! Limits of a sandbox as a whole: what is above its limit is ended, whatever kind of memory it uses, and nothing
//! else is. Whether a cgroup or the watchdog keeps the limit, clients see the same.

use serde_json::{Value, json};

use super::expect_service;
use crate::fixture::{PATIENCE, Reply, Sandbox, Server, assert_error, is_root, wait_until};
use crate::skip;
use crate::walls::probe::Probe;

const SANDBOXES: &str = "/v1/sandboxes";

/// The limit of most tests, in MiB: more than the probe needs, and little for the machine.
const LIMIT: u64 = 64;

/// A sandbox with a limit on its memory.
fn limited(server: &Server, megabytes: u64) -> Sandbox<'_> {
    server.sandbox_with(&json!({ "max_total_mem_mb": megabytes }))
}

/// What the metrics tell of a sandbox.
fn figures(sandbox: &Sandbox<'_>) -> Value {
    let fields = [("Accept", "application/json")];
    let mut connection = sandbox.server.connect();
    let metrics = connection
        .request("GET", "/v1/metrics", &fields, b"")
        .json();
    let all = metrics["per_sandbox"].as_array().unwrap().iter();
    let mut own = all.filter(|figures| figures["id"] == sandbox.id.as_str());
    own.next().unwrap().clone()
}

/// What the server can limit, and how.
fn offered(server: &Server) -> Vec<Value> {
    let health = server.get("/health").json();
    health["isolation"]["limits"].as_array().unwrap().clone()
}

fn kills(server: &Server) -> u64 {
    let fields = [("Accept", "application/json")];
    let metrics = server
        .connect()
        .request("GET", "/v1/metrics", &fields, b"")
        .json();
    metrics["memory_limit_kills"].as_u64().unwrap()
}

/// What is known of a process.
fn process(sandbox: &Sandbox<'_>, id: &str) -> Value {
    sandbox.get(&format!("processes/{id}")).json()
}

fn start(sandbox: &Sandbox<'_>, body: &Value) -> String {
    sandbox.spawn(body)["id"].as_str().unwrap().to_owned()
}

/// Does these acts, which must be ended for the sandbox's limit, with everything else in it. A neighbour with as
/// small a limit, and the server, go on; and so does the sandbox itself.
#[track_caller]
fn expect_end(acts: &[&[&str]]) {
    let server = Server::host().start();
    let greedy = limited(&server, LIMIT);
    let neighbour = limited(&server, LIMIT);
    let bystander = json!({ "cmd": ["sleep", "1000"] });
    let (own, theirs) = (start(&greedy, &bystander), start(&neighbour, &bystander));
    let probe = Probe::new(&greedy);
    let acts: Vec<&[&str]> = acts.iter().copied().chain([&["stay"][..]]).collect();
    let outcome = greedy.exec(&probe.command(&acts));
    assert_eq!(outcome.exit["reason"], "memory_limit", "{outcome:?}");
    assert_eq!(outcome.exit["signal"], 9, "{outcome:?}");
    wait_until("the rest of the sandbox has ended", PATIENCE, || {
        process(&greedy, &own)["reason"] == "memory_limit" && greedy.processes().is_empty()
    });
    assert_eq!(kills(&server), 2);
    assert_eq!(process(&neighbour, &theirs)["running"], true);
    expect_service(&server, &neighbour);
    assert_eq!(greedy.sh("echo again"), "again\n");
    greedy.delete();
    neighbour.delete();
}

#[test]
fn private_memory_counts() {
    if !is_root() {
        skip!("needs root");
    }
    expect_end(&[&["hog-memory", "200"]]);
}

#[test]
fn shared_memory_counts() {
    if !is_root() {
        skip!("needs root");
    }
    expect_end(&[&["hog-shared", "200"]]);
}

#[test]
fn memory_files_count_mapped_or_not() {
    if !is_root() {
        skip!("needs root");
    }
    expect_end(&[&["hog-mapped-file", "200"]]);
    expect_end(&[&["hog-file", "200"]]);
}

#[test]
fn many_small_processes_count_together() {
    if !is_root() {
        skip!("needs root");
    }
    expect_end(&[&["copies", "40"], &["hog-memory", "5"]]);
}

#[test]
fn memory_of_a_process_that_hides_counts() {
    if !is_root() {
        skip!("needs root");
    }
    expect_end(&[&["hide"], &["hog-memory", "200"]]);
}

/// A process that forks all the time has a child that no list of processes shows yet.
#[test]
fn a_sandbox_that_forks_while_it_is_killed_ends() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let body = json!({ "max_total_mem_mb": LIMIT, "max_procs": 100 });
    let greedy = server.sandbox_with(&body);
    let probe = Probe::new(&greedy);
    let outcome = greedy.exec(&probe.command(&[&["hog-memory", "100"], &["fork-storm"]]));
    assert_eq!(outcome.exit["reason"], "memory_limit", "{outcome:?}");
    wait_until("nothing of the storm is left", PATIENCE, || {
        greedy.processes().is_empty()
    });
    assert_eq!(greedy.sh("echo again"), "again\n");
}

/// Holds acts below the limit until the server has told that exactly so much is used, and expects them to live.
#[track_caller]
fn expect_life(limit: u64, acts: &[&[&str]], last: &[&str], used: std::ops::Range<u64>) {
    let server = Server::host().start();
    let sandbox = limited(&server, limit);
    let probe = Probe::new(&sandbox);
    let acts: Vec<&[&str]> = acts.iter().copied().chain([last]).collect();
    let id = start(&sandbox, &probe.command(&acts));
    let mut seen = 0;
    wait_until("its memory was measured three times", PATIENCE, || {
        let figures = figures(&sandbox);
        assert_eq!(figures["memory_limit_bytes"], limit << 20);
        let bytes = figures["memory_limit_used_bytes"].as_u64().unwrap();
        seen += u32::from(used.contains(&(bytes >> 20)));
        std::thread::sleep(std::time::Duration::from_millis(500));
        seen >= 3
    });
    assert_eq!(process(&sandbox, &id)["running"], true);
    assert_eq!(kills(&server), 0);
}

#[test]
fn shared_memory_counts_once_however_many_processes_have_it() {
    if !is_root() {
        skip!("needs root");
    }
    // Together they are up to 21 times as large.
    expect_life(
        200,
        &[&["hog-shared", "60"], &["copies", "20"]],
        &["stay"],
        60..200,
    );
}

#[test]
fn a_memory_file_counts_once_mapped_and_open() {
    if !is_root() {
        skip!("needs root");
    }
    expect_life(100, &[&["hog-mapped-file", "60"]], &["stay"], 60..100);
}

#[test]
fn a_program_that_starts_others_is_not_counted_for_each() {
    if !is_root() {
        skip!("needs root");
    }
    expect_life(100, &[&["hog-memory", "60"]], &["start-programs"], 60..200);
}

/// Killing by a client, and a timeout, have their own reasons also where there is a limit.
#[test]
fn other_ends_keep_their_reasons() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = limited(&server, LIMIT);
    let outcome = sandbox.exec(&json!({ "cmd": ["sleep", "1000"], "timeout": 0.2 }));
    assert_eq!(outcome.exit["reason"], "timeout");
    let outcome = sandbox.exec(&json!({ "cmd": "kill -9 $$" }));
    assert_eq!(outcome.exit["reason"], "signaled");
    assert_eq!(kills(&server), 0);
}

#[test]
fn a_sandbox_shows_its_limits_and_what_keeps_them() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let offered = offered(&server);
    let has = |name: &str| offered.iter().any(|one| one == name);
    let by = if has("memory_cgroup") {
        "cgroup"
    } else {
        "watchdog"
    };
    assert!(has(&format!("memory_{by}")), "{offered:?}");

    let sandbox = limited(&server, 512);
    let shown = sandbox
        .server
        .get(&format!("{SANDBOXES}/{}", sandbox.id))
        .json();
    assert_eq!(shown["max_total_mem_mb"], 512);
    assert_eq!(shown["max_cpu"], Value::Null);
    assert_eq!(shown["limits"]["memory"], by);
    assert_eq!(shown["limits"].get("cpu"), None);
    let layers = shown["isolation"]["layers"].as_array().unwrap();
    assert!(
        layers.contains(&json!(format!("memory_{by}"))),
        "{layers:?}"
    );

    let reply = server.post(SANDBOXES, &json!({ "max_cpu": 0.5 }));
    if has("cpu_cgroup") {
        let made = reply.json()["sandboxes"][0].clone();
        assert_eq!(made["max_cpu"], 0.5);
        assert_eq!(made["limits"]["cpu"], "cgroup");
    } else {
        assert_error(&reply, 400, "unavailable");
        assert!(reply.text().contains("max_cpu"), "{}", reply.text());
    }

    let other = server.sandbox();
    let shown = server.get(&format!("{SANDBOXES}/{}", other.id)).json();
    assert_eq!(shown["limits"], json!({ "processes": "rlimit" }));
    assert_eq!(shown["max_total_mem_mb"], Value::Null);
    assert!(figures(&other).get("memory_limit_bytes").is_none());
}

/// Changes a sandbox by the host's token.
fn change(sandbox: &Sandbox<'_>, body: &Value) -> Reply {
    let target = format!("{SANDBOXES}/{}", sandbox.id);
    let body = body.to_string();
    sandbox.server.request("PATCH", &target, body.as_bytes())
}

#[test]
fn a_limit_on_memory_changes_for_what_runs() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = limited(&server, 1000);
    let probe = Probe::new(&sandbox);
    let hog = || {
        start(
            &sandbox,
            &probe.command(&[&["hog-memory", "200"], &["stay"]]),
        )
    };
    let uses = |megabytes: u64| {
        wait_until("it holds its memory", PATIENCE, || {
            let used = &figures(&sandbox)["memory_limit_used_bytes"];
            used.as_u64().unwrap() >= megabytes << 20
        });
    };
    let first = hog();
    uses(200);
    let changed = change(&sandbox, &json!({ "max_total_mem_mb": LIMIT })).json();
    assert_eq!(changed["max_total_mem_mb"], LIMIT);
    wait_until("what is above the new limit has ended", PATIENCE, || {
        process(&sandbox, &first)["reason"] == "memory_limit"
    });
    // The first limit was enough for this one.
    let changed = change(&sandbox, &json!({ "max_total_mem_mb": 500 })).json();
    assert_eq!(changed["max_total_mem_mb"], 500);
    let second = hog();
    uses(200);
    let changed = change(&sandbox, &json!({ "max_total_mem_mb": null })).json();
    assert_eq!(changed["max_total_mem_mb"], Value::Null);
    assert_eq!(changed["limits"].get("memory"), None);
    assert!(figures(&sandbox).get("memory_limit_bytes").is_none());
    assert_eq!(process(&sandbox, &second)["running"], true);
}

#[test]
fn limits_of_processes_change_for_those_that_start_then() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({ "max_procs": 100, "max_mem_mb": 300 }));
    let script =
        "awk '/^Max processes/ {p = $3} /^Max data/ {d = $4} END {print p, d}' /proc/self/limits";
    let limits = || sandbox.sh(script);
    assert_eq!(limits(), format!("100 {}\n", 300 << 20));
    let changed = change(&sandbox, &json!({ "max_procs": 50, "max_mem_mb": 200 })).json();
    assert_eq!(
        (&changed["max_procs"], &changed["max_mem_mb"]),
        (&json!(50), &json!(200))
    );
    assert_eq!(limits(), format!("50 {}\n", 200 << 20));
    // In the next run too, and without what is removed.
    change(&sandbox, &json!({ "max_procs": 60, "max_mem_mb": null }));
    assert_eq!(limits(), "60 unlimited\n");
    let target = |act: &str| format!("{SANDBOXES}/{}/{act}", sandbox.id);
    assert_eq!(
        server
            .post(&target("pause"), &json!({ "keep": "files" }))
            .status,
        200
    );
    change(&sandbox, &json!({ "max_mem_mb": 400 }));
    assert_eq!(server.post(&target("resume"), &json!({})).status, 200);
    assert_eq!(limits(), format!("60 {}\n", 400 << 20));
    // Without a limit of its own it has the host's.
    let usual = server.sandbox().sh(script);
    change(&sandbox, &json!({ "max_procs": null, "max_mem_mb": null }));
    assert_eq!(limits(), usual);
}

#[test]
fn a_limit_that_cannot_be_kept_changes_nothing() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let offered = offered(&server);
    let has = |name: &str| offered.iter().any(|one| one == name);
    let sandbox = server.sandbox();
    let described = || server.get(&format!("{SANDBOXES}/{}", sandbox.id)).json();
    let before = described();
    let change = |body: Value| change(&sandbox, &body);
    let reply = change(json!({ "name": "x", "max_cpu": 0.5 }));
    if has("cpu_cgroup") {
        assert_error(&reply, 409, "not_possible");
    } else {
        assert_error(&reply, 400, "unavailable");
    }
    if has("memory_cgroup") {
        // Its processes are in no cgroup.
        assert_error(
            &change(json!({ "max_total_mem_mb": LIMIT })),
            409,
            "not_possible",
        );
    }
    for wrong in [
        json!({ "max_total_mem_mb": 0 }),
        json!({ "max_procs": 0 }),
        json!({ "max_mem_mb": "1" }),
        json!({ "max_cpu": 5000 }),
    ] {
        assert_error(&change(wrong), 400, "bad_request");
    }
    assert_eq!(described(), before);
    // While it is stopped it gets every limit that there is.
    let target = |act: &str| format!("{SANDBOXES}/{}/{act}", sandbox.id);
    assert_eq!(
        server
            .post(&target("pause"), &json!({ "keep": "files" }))
            .status,
        200
    );
    let changed = change(json!({ "max_total_mem_mb": LIMIT })).json();
    assert_eq!(changed["max_total_mem_mb"], LIMIT);
    assert_eq!(server.post(&target("resume"), &json!({})).status, 200);
    let probe = Probe::new(&sandbox);
    let outcome = sandbox.exec(&probe.command(&[&["hog-memory", "200"], &["stay"]]));
    assert_eq!(outcome.exit["reason"], "memory_limit", "{outcome:?}");
}

#[test]
fn limits_that_are_none_are_refused() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    for body in [
        json!({ "max_total_mem_mb": 0 }),
        json!({ "max_total_mem_mb": -1 }),
        json!({ "max_total_mem_mb": 1.5 }),
        json!({ "max_total_mem_mb": "512" }),
        json!({ "max_cpu": 0 }),
        json!({ "max_cpu": 0.05 }),
        json!({ "max_cpu": 5000 }),
        json!({ "max_cpu": "1" }),
    ] {
        let reply = server.post(SANDBOXES, &body);
        assert_error(&reply, 400, "bad_request");
        assert!(reply.text().contains("max_"), "{}", reply.text());
    }
    assert_eq!(server.get("/health").json()["sandboxes"], 0);
}
