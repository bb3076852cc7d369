//! What nobody uses goes away, and what is in use does not, however silent it is.
//!
//! Time is measured by witnesses: a sandbox with the same timeout in which nothing is going on. When
//! it has been evicted, one that is still there is there because something is going on in it.

use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{SANDBOXES, delete, needs_root, target, try_request};
use crate::fixture::{
    Connection, Outcome, PATIENCE, Sandbox, Server, Stop, assert_error, events_of, wait_until,
};
use crate::skip;

/// Makes a sandbox that may be idle for so many seconds.
#[track_caller]
fn idling(server: &Server, seconds: u64) -> Sandbox<'_> {
    server.sandbox_with(&json!({ "idle_timeout_secs": seconds }))
}

fn exists(sandbox: &Sandbox<'_>) -> bool {
    match sandbox.server.get(&target(&sandbox.id, "")).status {
        200 => true,
        404 => false,
        other => panic!("{other}"),
    }
}

#[track_caller]
fn wait_evicted(sandbox: &Sandbox<'_>) {
    wait_until("it is evicted", PATIENCE, || !exists(sandbox));
    // It is gone from the list first, and from the machine when a delete answers.
    assert!(!delete(sandbox.server, &sandbox.id));
    assert!(!sandbox.home.exists());
    assert_eq!(sandbox.processes(), Vec::<i32>::new());
}

/// Waits until a sandbox made now would have been evicted.
#[track_caller]
fn outlast(server: &Server, seconds: u64) {
    wait_evicted(&idling(server, seconds));
}

#[test]
fn an_idle_sandbox_is_evicted_and_not_before_its_time() {
    needs_root!();
    let server = Server::host().start();
    let told = idling(&server, 2);
    let one = server.get(&target(&told.id, "")).json();
    assert_eq!(one["idle_timeout_secs"], 2);
    let for_ever = server.sandbox();
    let begun = Instant::now();
    let sandbox = idling(&server, 2);
    wait_until("it is evicted", PATIENCE, || !exists(&sandbox));
    assert!(
        begun.elapsed() >= Duration::from_secs(2),
        "early is not fine"
    );
    for route in ["processes", "files/list?path=/"] {
        assert_error(&sandbox.get(route), 404, "not_found");
    }
    assert_error(
        &sandbox.post("exec", &json!({"cmd": "true"})),
        404,
        "not_found",
    );
    assert_error(
        &server.get(&target(&sandbox.id, "/token")),
        404,
        "not_found",
    );
    wait_evicted(&sandbox);
    wait_evicted(&told);
    assert_eq!(for_ever.sh("echo on"), "on\n");
    assert_eq!(super::homes_of(&server), [for_ever.id]);
}

#[test]
fn an_evicted_sandbox_s_place_and_user_are_free() {
    needs_root!();
    let server = super::with_users(1).env("SBX_CAPACITY", 1).start();
    let first = idling(&server, 1);
    // What it left behind does not keep it.
    let outcome =
        first.exec(&json!({"cmd": "setsid sleep 3600 > /dev/null 2>&1 < /dev/null & echo $!"}));
    assert_eq!(outcome.code(), Some(0));
    let mut second = None;
    wait_until("there is room again", PATIENCE, || {
        second = super::create(&server, 1).0.pop();
        second.is_some()
    });
    let second = second.unwrap();
    assert_eq!(second.uid, first.uid);
    assert_eq!(second.processes(), Vec::<i32>::new());
    assert!(!first.home.exists());
}

/// A request whose body stops in the middle.
fn half_an_upload(sandbox: &Sandbox<'_>, target: &str) -> Connection {
    let mut upload = sandbox.connect();
    let length = [("Content-Length", "1000")];
    upload.send_request("PUT", &sandbox.target(target), &length, b"the beginning");
    crate::fixture::wait_until_received(&upload.stream);
    upload
}

#[test]
fn whatever_is_going_on_in_it_keeps_a_sandbox() {
    const SECONDS: u64 = 3;
    needs_root!();
    let server = Server::host().start();
    let new = || idling(&server, SECONDS);
    let silent = json!({"cmd": "exec sleep 3600"});
    let running = new();
    let foreground = running.exec_stream(&silent);
    let background = new();
    let sleeper = background.spawn(&silent);

    let told = new();
    let cat = told.spawn(&json!({"cmd": "exec cat"}));
    let route = |sandbox: &Sandbox<'_>, process: &Value, rest: &str| {
        sandbox.target(&format!(
            "processes/{}{rest}",
            process["id"].as_str().unwrap()
        ))
    };
    let logs = route(&told, &cat, "/logs?follow=1");
    let follower = told.connect().stream("GET", &logs, b"");

    let uploaded = new();
    let upload = half_an_upload(&uploaded, "files/write?path=file");

    let fed = new();
    let reader = fed.spawn(&json!({"cmd": "exec cat > file"}));
    let typing = half_an_upload(
        &fed,
        &format!("processes/{}/stdin", reader["id"].as_str().unwrap()),
    );

    // Its process is over, but nobody reads what is told of it: many times what sockets hold.
    let unread = new();
    let writer = unread.spawn(&json!({"cmd": "head -c 4000000 /dev/zero | tr '\\0' '\\1'"}));
    let ended = unread.get(&format!(
        "processes/{}/wait",
        writer["id"].as_str().unwrap()
    ));
    assert_eq!(ended.json()["stdout_bytes"], 4_000_000);
    let mut download = unread.connect();
    download.send_request("GET", &route(&unread, &writer, "/logs"), &[], b"");
    assert_eq!(download.read_head().status, 200);

    let awaited = new();
    let process = awaited.spawn(&silent);
    let mut waiter = awaited.connect();
    waiter.send_request(
        "GET",
        &route(&awaited, &process, "/wait?timeout=3600"),
        &[],
        b"",
    );

    let asked = new();
    let busy = [
        &running,
        &background,
        &told,
        &uploaded,
        &fed,
        &unread,
        &awaited,
        &asked,
    ];
    let stop = Stop::default();
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.is_set() {
                assert_eq!(asked.get("processes").status, 200);
                thread::sleep(Duration::from_millis(100));
            }
        });
        let guard = stop.guard();
        for _ in 0..2 {
            outlast(&server, SECONDS);
        }
        for (index, sandbox) in busy.iter().enumerate() {
            assert!(exists(sandbox), "number {index}");
        }
        drop(guard);
    });

    // When it is over, they go.
    drop((foreground, follower, upload, typing, download, waiter));
    for (sandbox, process) in [
        (&background, &sleeper),
        (&told, &cat),
        (&fed, &reader),
        (&awaited, &process),
    ] {
        let _ = sandbox.request(
            "DELETE",
            &format!("processes/{}", process["id"].as_str().unwrap()),
            b"",
        );
    }
    for sandbox in busy {
        wait_evicted(sandbox);
    }
}

#[test]
fn the_time_begins_anew_when_a_command_ends() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = idling(&server, 3);
    let outcome = sandbox.exec(&json!({"cmd": "sleep 3.5"}));
    assert_eq!(outcome.code(), Some(0));
    let told = Instant::now();
    assert!(
        exists(&sandbox),
        "it has been idle since the command ended, not since it began"
    );
    wait_until("it is evicted", PATIENCE, || !exists(&sandbox));
    // By the server's clock it ended a little before that was told here.
    assert!(
        told.elapsed() > Duration::from_millis(1500),
        "{:?}",
        told.elapsed()
    );
}

#[test]
fn a_command_that_meets_the_eviction_runs_to_its_end_or_not_at_all() {
    needs_root!();
    let server = Server::host().start();
    let sandboxes: Vec<_> = (0..40).map(|_| idling(&server, 1)).collect();
    let begun = Instant::now();
    thread::scope(|scope| {
        for (index, sandbox) in (0..).zip(&sandboxes) {
            scope.spawn(move || {
                // Each at another moment of the second in which they are evicted.
                thread::sleep(
                    Duration::from_millis(1000 + 30 * index).saturating_sub(begun.elapsed()),
                );
                let reply = sandbox.post("exec", &json!({"cmd": "sleep 0.1; pwd"}));
                if reply.status == 200 {
                    let outcome = Outcome::of(events_of(&reply.body));
                    let home = format!("{}\n", sandbox.home.display());
                    assert_eq!((outcome.code(), outcome.stdout), (Some(0), home));
                } else {
                    assert_error(&reply, 404, "not_found");
                }
            });
        }
    });
    sandboxes.iter().for_each(wait_evicted);
}

#[test]
fn health_and_refused_requests_are_no_activity() {
    needs_root!();
    let server = Server::host().start();
    let other = server.sandbox();
    let sandbox = idling(&server, 1);
    let stop = Stop::default();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stranger = server.connect();
            stranger.token = Some(other.token.clone());
            let body = json!({"cmd": "true"}).to_string();
            while !stop.is_set() {
                assert_eq!(server.get("/health").status, 200);
                for (method, route) in [
                    ("POST", "exec"),
                    ("GET", "processes"),
                    ("PUT", "files/write?path=x"),
                ] {
                    let reply =
                        stranger.request(method, &sandbox.target(route), &[], body.as_bytes());
                    assert_eq!(reply.status, 403);
                }
            }
        });
        let _guard = stop.guard();
        wait_evicted(&sandbox);
    });
}

#[test]
fn a_host_without_sandboxes_ends_with_0_from_its_start_on() {
    needs_root!();
    let begun = Instant::now();
    let mut server = Server::host().env("SBX_IDLE_TIMEOUT", 2).start();
    let address = server.address;
    let status = server.wait_for_exit(PATIENCE);
    assert_eq!(status.code(), Some(0), "{status}: {}", server.log());
    assert!(
        begun.elapsed() >= Duration::from_secs(2),
        "early is not fine"
    );
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[test]
fn a_host_that_is_only_looked_at_ends_all_the_same() {
    needs_root!();
    let mut server = Server::host().env("SBX_IDLE_TIMEOUT", 2).start();
    let address = server.address;
    let stop = Stop::default();
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.is_set() && try_request(address, "GET", SANDBOXES, "").is_some() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let _guard = stop.guard();
        assert_eq!(server.wait_for_exit(PATIENCE).code(), Some(0));
    });
}

#[test]
fn a_host_stays_while_it_has_a_sandbox_and_ends_after_the_last() {
    needs_root!();
    let mut server = Server::host().env("SBX_IDLE_TIMEOUT", 3).start();
    let sandbox = server.sandbox();
    // Idle, but there; the other one lives for longer than the host would.
    let evicted = idling(&server, 4);
    wait_until("the one is evicted", PATIENCE, || !exists(&evicted));
    assert!(exists(&sandbox));
    let id = sandbox.id;
    let begun = Instant::now();
    assert!(delete(&server, &id));
    let status = server.wait_for_exit(PATIENCE);
    assert_eq!(status.code(), Some(0), "{}", server.log());
    assert!(
        begun.elapsed() >= Duration::from_secs(3),
        "early is not fine"
    );
    assert_eq!(super::homes_of(&server), Vec::<String>::new());
}

#[test]
fn a_host_ends_after_its_last_sandbox_was_evicted() {
    needs_root!();
    let mut server = Server::host().env("SBX_IDLE_TIMEOUT", 3).start();
    let sandbox = idling(&server, 1);
    sandbox.sh("echo x > file");
    assert_eq!(
        server.wait_for_exit(PATIENCE).code(),
        Some(0),
        "{}",
        server.log()
    );
    assert_eq!(super::homes_of(&server), Vec::<String>::new());
}

/// Takes a mount away when the test ends.
struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// What is left of it is no sandbox.
#[test]
fn a_sandbox_that_cannot_be_ended_does_not_keep_a_host() {
    needs_root!();
    let mut server = Server::host().env("SBX_IDLE_TIMEOUT", 2).start();
    let sandbox = server.sandbox();
    let id = sandbox.id.clone();
    // No removal takes this away.
    let mounted = sandbox.home.join("mounted");
    std::fs::create_dir(&mounted).unwrap();
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=1m", "none"]);
    if !mount
        .arg(&mounted)
        .status()
        .is_ok_and(|status| status.success())
    {
        skip!("cannot mount anything here");
    }
    let _unmount = Unmount(mounted);
    drop(sandbox);
    assert_error(&server.delete(&target(&id, "")), 500, "internal");
    assert_eq!(super::list(&server).len(), 0);
    let status = server.wait_for_exit(PATIENCE);
    assert_eq!(status.code(), Some(0), "{}", server.log());
    wait_until("what is left is told", PATIENCE, || {
        server.log().contains("is left")
    });
}
