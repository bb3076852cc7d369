//! What can change of a sandbox while it lives, and what becomes of it by its rules: names, labels, lifetimes, idleness.

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant, UNIX_EPOCH};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::lasting::{describe, end, resume, stop};
use super::{SANDBOXES, in_place_of, needs_root, target};
use crate::fixture::{PATIENCE, Reply, Sandbox, Server, assert_error, wait_until};
use crate::walls::probe::Probe;

#[track_caller]
fn change(server: &Server, id: &str, body: &Value) -> Value {
    let reply = patch(server, id, body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

#[track_caller]
fn patch(server: &Server, id: &str, body: &Value) -> Reply {
    server.request("PATCH", &target(id, ""), body.to_string().as_bytes())
}

#[track_caller]
fn pause(server: &Server, id: &str, body: &Value) -> Value {
    let reply = server.post(&target(id, "/pause"), body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

/// Waits until a sandbox is in a state, and returns what the server says of it.
#[track_caller]
fn until(server: &Server, id: &str, state: &str) -> Value {
    wait_until(state, PATIENCE, || describe(server, id)["state"] == state);
    describe(server, id)
}

#[track_caller]
fn until_gone(server: &Server, id: &str) {
    let is_gone = || server.get(&target(id, "")).status == 404;
    wait_until("it is deleted", PATIENCE, is_gone);
}

fn true_in(server: &Server, id: &str) -> Reply {
    server.post(&target(id, "/exec"), &json!({"cmd": "true"}))
}

fn now_ms() -> u64 {
    let now = UNIX_EPOCH.elapsed().unwrap();
    u64::try_from(now.as_millis()).unwrap()
}

/// A sandbox, with a request by its own token.
fn by_itself(sandbox: &Sandbox<'_>, method: &str, rest: &str, body: &Value) -> Reply {
    let text = body.to_string();
    let route = target(&sandbox.id, rest);
    sandbox
        .connect()
        .request(method, &route, &[], text.as_bytes())
}

#[test]
fn settings_change_while_a_sandbox_lives_and_outlive_the_server() {
    needs_root!();
    let server = Server::host().start();
    let made = json!({"name": "first", "labels": {"team": "a"}, "idle_timeout_secs": 600});
    let id = server.sandbox_with(&made).id.clone();
    let first = describe(&server, &id);
    assert_eq!(
        [
            &first["name"],
            &first["labels"],
            &first["idle_by"],
            &first["on_idle"]
        ],
        [
            &json!("first"),
            &json!({"team": "a"}),
            &json!("work"),
            &json!("delete")
        ]
    );
    let body = json!({
        "name": "second", "labels": {"team": "b", "run/1": ""}, "expires_in_secs": 3600, "on_expiry": "stop",
        "on_idle": "pause", "auto_resume": true,
    });
    let changed = change(&server, &id, &body);
    for (name, value) in [
        ("name", json!("second")),
        ("labels", json!({"team": "b", "run/1": ""})),
        ("on_expiry", json!("stop")),
        ("idle_timeout_secs", json!(600)),
        ("idle_by", json!("requests")),
        ("on_idle", json!("pause")),
        ("auto_resume", json!(true)),
    ] {
        assert_eq!(changed[name], value, "{name}");
    }
    let expiry = changed["expires_at_ms"].as_u64().unwrap();
    assert!(
        (now_ms() + 3_500_000..now_ms() + 3_601_000).contains(&expiry),
        "{expiry}"
    );
    assert_eq!(
        change(&server, &id, &json!({})),
        changed,
        "nothing is asked for"
    );
    let place = end(server, Signal::SIGKILL);
    let next = in_place_of(&place).start();
    let mut found = describe(&next, &id);
    for name in ["state", "state_since_ms", "why", "limits"] {
        found[name] = changed[name].clone();
    }
    found
        .as_object_mut()
        .unwrap()
        .retain(|name, _| name != "why");
    let mut changed = changed;
    changed
        .as_object_mut()
        .unwrap()
        .retain(|name, _| name != "why");
    assert_eq!(found, changed);
    let removal = json!({
        "name": null, "labels": null, "expires_in_secs": null, "on_expiry": null, "idle_timeout_secs": 0,
        "on_idle": null, "auto_resume": null,
    });
    let plain = change(&next, &id, &removal);
    assert_eq!(
        [
            &plain["name"],
            &plain["labels"],
            &plain["expires_at_ms"],
            &plain["idle_timeout_secs"]
        ],
        [&Value::Null, &json!({}), &Value::Null, &Value::Null]
    );
    assert_eq!(plain["on_expiry"], "delete");
}

#[test]
fn what_cannot_change_is_refused_and_changes_nothing() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let before = describe(&server, &sandbox.id);
    for body in [
        json!({"name": "x", "network": "blocked"}),
        json!({"name": "x", "env": {}}),
        json!({"name": "x", "something": 1}),
        json!({"name": "x", "labels": {"a b": "c"}}),
        json!({"name": "x", "on_idle": "sleep"}),
        json!({"name": ""}),
        json!([]),
    ] {
        assert_error(&patch(&server, &sandbox.id, &body), 400, "bad_request");
    }
    // Its own token changes its name.
    for body in [
        json!({"name": "x", "labels": {}}),
        json!({"expires_in_secs": null}),
        json!({"auto_resume": true}),
    ] {
        let reply = by_itself(&sandbox, "PATCH", "", &body);
        assert_error(&reply, 403, "forbidden");
    }
    assert_eq!(describe(&server, &sandbox.id), before);
    let named = by_itself(&sandbox, "PATCH", "", &json!({"name": "mine"}));
    assert_eq!(named.json()["name"], "mine");
    let other = server.sandbox();
    let mut stranger = other.connect();
    let reply = stranger.request("PATCH", &target(&sandbox.id, ""), &[], b"{}");
    assert_error(&reply, 403, "forbidden");
    assert_error(&patch(&server, "none", &json!({})), 404, "not_found");
}

#[test]
fn an_idle_sandbox_is_paused_or_stopped_and_goes_on_with_the_next_request() {
    needs_root!();
    let server = Server::host().start();
    let rules = json!({"idle_timeout_secs": 1, "on_idle": "pause"});
    let sandbox = server.sandbox_with(&rules);
    let process = sandbox.spawn(&json!({"cmd": "sleep 3600"}));
    // Its process does not count.
    assert_eq!(until(&server, &sandbox.id, "paused")["idle_by"], "requests");
    assert_error(&true_in(&server, &sandbox.id), 409, "paused");
    change(&server, &sandbox.id, &json!({"auto_resume": true}));
    let done = true_in(&server, &sandbox.id);
    assert_eq!(done.status, 200, "{}", done.text());
    let pid = i32::try_from(process["pid"].as_i64().unwrap()).unwrap();
    assert!(sandbox.processes().contains(&pid), "it is the same run");
    // Again, and to files alone.
    change(&server, &sandbox.id, &json!({"on_idle": "stop"}));
    assert_eq!(until(&server, &sandbox.id, "stopped")["why"], "timeout");
    assert_eq!(sandbox.processes(), Vec::<i32>::new());
    assert_eq!(true_in(&server, &sandbox.id).status, 200);
    assert_eq!(describe(&server, &sandbox.id)["why"], Value::Null);
}

#[test]
fn a_sandbox_with_a_process_is_not_idle_if_processes_count() {
    needs_root!();
    let server = Server::host().start();
    let rules = json!({"idle_timeout_secs": 1, "on_idle": "stop", "idle_by": "work"});
    let sandbox = server.sandbox_with(&rules);
    let process = sandbox.spawn(&json!({"cmd": "sleep 2.5"}));
    let pid = i32::try_from(process["pid"].as_i64().unwrap()).unwrap();
    let begun = Instant::now();
    until(&server, &sandbox.id, "stopped");
    assert!(begun.elapsed() > Duration::from_millis(2500));
    assert!(!sandbox.processes().contains(&pid));
}

#[test]
fn a_change_is_no_work_and_a_resume_is() {
    needs_root!();
    let server = Server::host().start();
    let rules = json!({"idle_timeout_secs": 2, "on_idle": "pause"});
    let sandbox = server.sandbox_with(&rules);
    let mut count = 0;
    // Names and limits are changed without an end, and it is idle all the same.
    wait_until("it is paused", PATIENCE, || {
        count += 1;
        let body = json!({"name": format!("name {count}"), "max_procs": 50 + count % 50});
        change(&server, &sandbox.id, &body)["state"] == "paused"
    });
    for _ in 0..2 {
        let resumed = resume(&server, &sandbox.id);
        let since = |document: &Value| document["state_since_ms"].as_u64().unwrap();
        let again = until(&server, &sandbox.id, "paused");
        assert!(since(&again) - since(&resumed) >= 1900, "{resumed} {again}");
    }
}

#[test]
fn what_cannot_be_paused_is_stopped_by_its_rule() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({"on_expiry": "pause"}));
    sandbox.sh("cp /bin/true leased");
    let path = sandbox.home.join("leased").display().to_string();
    let probe = Probe::new(&sandbox);
    sandbox.spawn(&probe.command(&[&["lease", &path], &["stay"]]));
    let locks = || std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let inode = std::fs::metadata(&path).unwrap().ino();
    let has = |word: &str| {
        let is_it = |line: &str| line.contains(word) && line.contains(&format!(":{inode} "));
        locks().lines().any(is_it)
    };
    wait_until("it has a lease", PATIENCE, || has("LEASE"));
    std::thread::scope(|scope| {
        // The kernel waits in execve until the lease is given back.
        let hanging = scope.spawn(|| sandbox.post("exec", &json!({"cmd": [path]})));
        wait_until("the start hangs", PATIENCE, || has("BREAKING"));
        change(&server, &sandbox.id, &json!({"expires_in_secs": 0}));
        assert_eq!(until(&server, &sandbox.id, "stopped")["why"], "timeout");
        hanging.join().unwrap();
    });
    assert_eq!(sandbox.processes(), Vec::<i32>::new());
}

#[test]
fn a_sandbox_that_somebody_has_rest_is_not_idle_after_a_restart() {
    needs_root!();
    let server = Server::host().start();
    let rules = json!({"idle_timeout_secs": 2});
    let [left_alone, by_tenant, by_host, held] = [(); 4].map(|()| server.sandbox_with(&rules));
    assert_eq!(
        by_itself(&by_tenant, "POST", "/pause", &json!({})).status,
        200
    );
    pause(&server, &by_host.id, &json!({}));
    pause(&server, &held.id, &json!({"hold": true}));
    let ids = [left_alone, by_tenant, by_host, held].map(|sandbox| sandbox.id.clone());
    let place = end(server, Signal::SIGKILL);
    let next = in_place_of(&place).start();
    until_gone(&next, &ids[0]);
    for id in &ids[1..] {
        assert_eq!(describe(&next, id)["why"], "crash");
    }
    // They run again, and are idle then as any other.
    for id in &ids[1..3] {
        assert_eq!(true_in(&next, id).status, 200);
        until_gone(&next, id);
    }
    assert_error(&true_in(&next, &ids[3]), 409, "stopped");
}

#[test]
fn a_sandbox_whose_time_is_over_meanwhile_is_not_started_by_a_request() {
    needs_root!();
    let server = Server::host().start();
    let body = json!({"expires_in_secs": 1, "on_expiry": "stop", "idle_timeout_secs": 600});
    let sandbox = server.sandbox_with(&body);
    let expiry = describe(&server, &sandbox.id)["expires_at_ms"]
        .as_u64()
        .unwrap();
    let id = sandbox.id.clone();
    drop(sandbox);
    let place = end(server, Signal::SIGKILL);
    wait_until("its time is over", PATIENCE, || now_ms() > expiry);
    let next = in_place_of(&place).start();
    assert_error(&true_in(&next, &id), 409, "stopped");
    let over = || describe(&next, &id)["expires_at_ms"] == Value::Null;
    wait_until("the rule was carried out", PATIENCE, over);
    assert_error(&true_in(&next, &id), 409, "stopped");
    assert!(resume(&next, &id)["expires_at_ms"].as_u64() > Some(expiry));
    assert_eq!(true_in(&next, &id).status, 200);
}

#[test]
fn a_request_keeps_a_sandbox_from_idleness() {
    needs_root!();
    let server = Server::host().start();
    let rules = json!({"idle_timeout_secs": 1, "on_idle": "pause"});
    let sandbox = server.sandbox_with(&rules);
    let done = sandbox.post("exec", &json!({"cmd": "sleep 3; echo done"}));
    assert!(done.text().contains("done"), "{}", done.text());
    until(&server, &sandbox.id, "paused");
}

#[test]
fn a_held_sandbox_is_resumed_by_the_host_alone() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({"auto_resume": true}));
    let id = sandbox.id.clone();
    let own = by_itself(&sandbox, "POST", "/pause", &json!({"hold": true}));
    assert_error(&own, 403, "forbidden");
    // What it pauses itself, any request resumes.
    assert_eq!(
        by_itself(&sandbox, "POST", "/pause", &json!({})).status,
        200
    );
    assert_eq!(true_in(&server, &id).status, 200);
    assert_eq!(describe(&server, &id)["state"], "running");
    for keep in ["memory", "files"] {
        let held = pause(&server, &id, &json!({"keep": keep, "hold": true}));
        assert_eq!(held["held"], true);
        assert_eq!(true_in(&server, &id).status, 409);
        let refused = by_itself(&sandbox, "POST", "/resume", &json!({}));
        assert_error(&refused, 403, "forbidden");
        // Nor does it give up what the host keeps in memory.
        let refused = by_itself(&sandbox, "POST", "/pause", &json!({"keep": "files"}));
        assert_error(&refused, 403, "forbidden");
        assert_eq!(resume(&server, &id)["held"], Value::Null);
    }
    // It stays held whatever happens to the server.
    pause(&server, &id, &json!({"hold": true}));
    let token = sandbox.token.clone();
    drop(sandbox);
    let place = end(server, Signal::SIGKILL);
    let next = in_place_of(&place).start();
    let found = describe(&next, &id);
    assert_eq!(
        (&found["state"], &found["held"]),
        (&json!("stopped"), &json!(true))
    );
    assert_error(&true_in(&next, &id), 409, "stopped");
    let mut own = next.connect();
    own.token = Some(token);
    assert_error(
        &own.request("POST", &target(&id, "/resume"), &[], b""),
        403,
        "forbidden",
    );
    resume(&next, &id);
    assert_eq!(true_in(&next, &id).status, 200);
}

#[test]
fn what_becomes_of_a_sandbox_whose_time_is_over_is_its_rule() {
    needs_root!();
    let server = Server::host().start();
    for (fate, state) in [("pause", "paused"), ("stop", "stopped")] {
        let sandbox = server.sandbox_with(&json!({"on_expiry": fate}));
        sandbox.spawn(&json!({"cmd": "sleep 3600"}));
        change(&server, &sandbox.id, &json!({"expires_in_secs": 1}));
        let over = until(&server, &sandbox.id, state);
        assert_eq!(over["expires_at_ms"], Value::Null, "its time stands still");
        // It lives as long again.
        let again = resume(&server, &sandbox.id);
        assert!(again["expires_at_ms"].as_u64() > Some(now_ms() - 1000));
        until(&server, &sandbox.id, state);
    }
    let sandbox = server.sandbox();
    sandbox.spawn(&json!({"cmd": "sleep 3600"}));
    change(&server, &sandbox.id, &json!({"expires_in_secs": 1}));
    until_gone(&server, &sandbox.id);
}

#[test]
fn time_stands_still_in_a_rest_that_the_host_wants_and_in_no_other() {
    needs_root!();
    let server = Server::host().start();
    let life = json!({"expires_in_secs": 100});
    let left = |document: &Value| document["expires_at_ms"].as_u64().unwrap() - now_ms();
    for keep in ["memory", "files"] {
        let [tenants, hosts] = [(); 2].map(|()| server.sandbox_with(&life));
        let expiry = describe(&server, &hosts.id)["expires_at_ms"].clone();
        let body = json!({ "keep": keep });
        assert_eq!(by_itself(&tenants, "POST", "/pause", &body).status, 200);
        let own = describe(&server, &tenants.id);
        assert!(own["expires_at_ms"].is_u64(), "{own}");
        assert!(pause(&server, &hosts.id, &body)["expires_at_ms"].is_null());
        let paused = Instant::now();
        wait_until("time has passed", PATIENCE, || {
            paused.elapsed() > Duration::from_secs(1)
        });
        // The first has what it had at any time, the second a second more than it would.
        assert_eq!(
            resume(&server, &tenants.id)["expires_at_ms"],
            own["expires_at_ms"]
        );
        let again = resume(&server, &hosts.id);
        assert!(
            again["expires_at_ms"].as_u64() > expiry.as_u64().map(|at| at + 900),
            "{again}"
        );
        assert!(left(&again) < 100_000, "it has not begun anew");
        // What is set meanwhile stands still too.
        pause(&server, &hosts.id, &body);
        assert!(
            change(&server, &hosts.id, &json!({"expires_in_secs": 50}))["expires_at_ms"].is_null()
        );
        assert!(left(&resume(&server, &hosts.id)) > 40_000);
    }
}

#[test]
fn a_hold_is_lost_to_no_request_that_comes_meanwhile() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({"auto_resume": true}));
    sandbox.spawn(&json!({"cmd": "sleep 3600"}));
    for round in 0..20 {
        let keep = ["memory", "files"][round % 2];
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| by_itself(&sandbox, "POST", "/resume", &json!({})));
                scope.spawn(|| true_in(&server, &sandbox.id));
            }
            pause(&server, &sandbox.id, &json!({"keep": keep, "hold": true}));
            let refused = by_itself(&sandbox, "POST", "/resume", &json!({}));
            let held = describe(&server, &sandbox.id);
            // Commands that had begun before end after this.
            resume(&server, &sandbox.id);
            assert_error(&refused, 403, "forbidden");
            assert_ne!(held["state"], "running", "{keep}: {held}");
            assert_eq!(held["held"], true, "{keep}");
        });
    }
}

#[test]
fn requests_that_come_at_once_resume_a_sandbox_and_are_all_carried_out() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({"auto_resume": true}));
    sandbox.spawn(&json!({"cmd": "sleep 3600"}));
    for keep in ["memory", "files", "memory", "files"] {
        pause(&server, &sandbox.id, &json!({ "keep": keep }));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let done = sandbox.post("exec", &json!({"cmd": "echo done"}));
                    assert_eq!(done.status, 200, "{}", done.text());
                    assert!(done.text().contains("done"), "{}", done.text());
                });
            }
        });
    }
}

#[test]
fn the_operator_bounds_how_long_sandboxes_rest() {
    needs_root!();
    let server = Server::host()
        .env("SBX_PAUSED_SECS", 1)
        .env("SBX_STOPPED_SECS", 2)
        .start();
    let sandbox = server.sandbox_with(&json!({"expires_in_secs": 3600}));
    sandbox.spawn(&json!({"cmd": "sleep 3600"}));
    // A tenant does not live longer by that.
    assert_eq!(
        by_itself(&sandbox, "POST", "/pause", &json!({})).status,
        200
    );
    let stopped = until(&server, &sandbox.id, "stopped");
    assert_eq!(stopped["why"], "timeout");
    assert!(stopped["expires_at_ms"].is_u64(), "{stopped}");
    assert_eq!(sandbox.processes(), Vec::<i32>::new());
    until_gone(&server, &sandbox.id);
}

#[test]
fn lists_show_what_one_asks_for_page_by_page() {
    needs_root!();
    let server = Server::host().start();
    let made = |body: &Value| server.sandbox_with(body).id.clone();
    let ids: Vec<String> = (0..5)
        .map(|number| {
            let parity = ["even", "odd"][number % 2];
            made(&json!({"name": parity, "labels": {"all": "x", "parity": parity}}))
        })
        .collect();
    pause(&server, &ids[1], &json!({}));
    stop(&server, &ids[3]);
    let list = |query: &str| -> (Vec<String>, Value) {
        let reply = server.get(&format!("{SANDBOXES}?{query}"));
        assert_eq!(reply.status, 200, "{query}: {}", reply.text());
        let page = reply.json();
        let found = page["sandboxes"].as_array().unwrap().iter();
        let found = found.map(|one| one["id"].as_str().unwrap().to_owned());
        (found.collect(), page["next"].clone())
    };
    let of = |numbers: &[usize]| -> Vec<String> {
        numbers.iter().map(|number| ids[*number].clone()).collect()
    };
    let bare = server.get(SANDBOXES).json();
    assert_eq!(bare.as_array().map(Vec::len), Some(5), "a bare array");
    for (query, numbers) in [
        ("label=all=x", &[0, 1, 2, 3, 4][..]),
        ("label=all=x&label=parity=odd", &[1, 3]),
        ("label=parity=none", &[]),
        ("name=even", &[0, 2, 4]),
        ("state=running", &[0, 2, 4]),
        ("state=paused", &[1]),
        ("state=stopped&label=all=x", &[3]),
    ] {
        assert_eq!(list(query), (of(numbers), Value::Null), "{query}");
    }
    assert_eq!(list("limit=2"), (of(&[0, 1]), json!(ids[1])));
    assert_eq!(
        list(&format!("limit=2&after={}", ids[1])),
        (of(&[2, 3]), json!(ids[3]))
    );
    assert_eq!(
        list(&format!("limit=2&after={}", ids[3])),
        (of(&[4]), Value::Null)
    );
    // The last one that was used comes last.
    assert_eq!(true_in(&server, &ids[2]).status, 200);
    assert_eq!(list("sort=idle&state=running").0.last(), Some(&ids[2]));
    let hungry = json!({"cmd": "head -c 40000000 /dev/zero | tail -c 40000000 | sleep 3600"});
    server.post(&target(&ids[4], "/processes"), &hungry);
    wait_until("it takes most", PATIENCE, || {
        list("sort=memory").0[0] == ids[4]
    });
    for query in [
        "limit=0",
        "limit=1001",
        "state=dead",
        "sort=size",
        "label=x",
        "other=1",
    ] {
        assert_error(
            &server.get(&format!("{SANDBOXES}?{query}")),
            400,
            "bad_request",
        );
    }
    let gone = server.get(&format!("{SANDBOXES}?after=gone"));
    assert_error(&gone, 404, "not_found");
    let metrics = server.get("/v1/metrics").text();
    for line in ["running\"} 3", "paused\"} 1", "stopped\"} 1"] {
        let line = format!("sbx_sandboxes{{state=\"{line}\n");
        assert!(metrics.contains(&line), "{line}: {metrics}");
    }
}
