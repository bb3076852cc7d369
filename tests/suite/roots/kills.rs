//! A server that is killed in the middle of making, changing or ending a root, and what its successor finds.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::{Template, needs_roots, processes_of, root, root_with};
use crate::faults::panics::{faulty_program, start};
use crate::files::Mount;
use crate::fixture::{
    HostPlace, PATIENCE, Random, Server, TempDir, all_processes, find, homes_in, is_alive, is_root,
    names_in, uid_of, wait_until,
};
use crate::host::lasting::end;
use crate::skip;

/// The first processes of namespaces whose server has ended: children of whoever adopts orphans, or of nobody here.
fn orphaned_holders(before: &[i32]) -> Vec<i32> {
    let pids = all_processes().into_iter().map(|process| process.pid);
    pids.filter(|pid| before.contains(pid) && is_alive(*pid) && is_holder(*pid))
        .collect()
}

fn is_holder(pid: i32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    find(&line, b"hold-namespaces").is_some()
}

/// Starts the next server, and expects that it has what it lists and nothing else.
#[track_caller]
fn expect_tidy(template: &Template, place: HostPlace, before: &[i32], what: &str) -> Server {
    let mut next = template.next(&place).start();
    wait_until("nothing of the former life runs", PATIENCE, || {
        orphaned_holders(before).is_empty()
            && place.processes().is_empty()
            && roots_of(&place).is_empty()
    });
    let all = next.get("/v1/sandboxes").json();
    let mut listed: Vec<String> = all
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["id"].as_str().unwrap().to_owned())
        .collect();
    listed.sort();
    let homes = place.homes();
    wait_until("what was being deleted is gone", PATIENCE, || {
        homes_in(&homes) == listed
    });
    assert_eq!(
        names_in(homes.join(".aside")),
        Vec::<String>::new(),
        "{what}: {}",
        next.log()
    );
    super::assert_no_mounts(&homes);
    next.place = Some(place);
    // All of them are as good as new.
    for id in &listed {
        let target = format!("/v1/sandboxes/{id}");
        let resumed = next.post(&format!("{target}/resume"), &json!({}));
        assert_eq!(resumed.status, 200, "{what}: {}", resumed.text());
        let reply = next.post(
            &format!("{target}/exec"),
            &json!({ "cmd": "id -u && echo x > /x" }),
        );
        assert!(
            reply.text().contains("\"exit_code\":0"),
            "{what}: {}",
            reply.text()
        );
        assert_eq!(next.delete(&target).json()["deleted"], true, "{what}");
    }
    assert_eq!(homes_in(&homes), Vec::<String>::new(), "{what}");
    next
}

/// The processes that have ids of roots of this place.
fn roots_of(place: &HostPlace) -> Vec<i32> {
    let range = place.range();
    let (first, last) = range.split_once('-').unwrap();
    let [first, last]: [u32; 2] = [first, last].map(|uid| uid.parse().unwrap());
    processes_of(&(1_000_000 + first * 65_536..1_000_000 + (last + 1) * 65_536))
}

/// None where the server has just been killed.
fn holders_of(server: &Server) -> Vec<i32> {
    let of_init = all_processes()
        .into_iter()
        .filter(|process| process.parent == server.pid());
    of_init
        .flat_map(|process| super::holders_below(process.pid))
        .collect()
}

/// Asks without counting on an answer.
fn ask(server: &Server, method: &str, target: &str, body: &Value) -> Option<Value> {
    let (address, token) = (server.address, crate::fixture::TOKEN);
    let body = body.to_string();
    let mut stream = std::net::TcpStream::connect(address).ok()?;
    let length = body.len();
    let head = format!(
        "{method} {target} HTTP/1.0\r\nX-Sandbox-Token: {token}\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    std::io::Write::write_all(&mut stream, head.as_bytes()).ok()?;
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut stream, &mut answer).ok()?;
    serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
}

#[test]
fn a_server_that_is_killed_at_any_step_leaves_nothing() {
    needs_roots!(template, _able);
    let program: &Path = faulty_program();
    for fault in [
        "record",
        "home",
        "root directories",
        "root",
        "sandbox",
        "start of a sandbox",
        "pausing",
        "emptying",
        "deletion",
    ] {
        let builder = template.builder().env("SBX_FAULT", format!("{fault}:kill"));
        let mut server = start(builder, program);
        let mut before = Vec::new();
        let made = ask(
            &server,
            "POST",
            "/v1/sandboxes",
            &json!({ "root": "private" }),
        );
        if let Some(id) = made
            .as_ref()
            .and_then(|made| made["sandboxes"][0]["id"].as_str())
        {
            let target = format!("/v1/sandboxes/{id}");
            ask(
                &server,
                "POST",
                &format!("{target}/processes"),
                &json!({ "cmd": "exec sleep 1000", "user": "7" }),
            );
            before.extend(holders_of(&server));
            ask(
                &server,
                "POST",
                &format!("{target}/pause"),
                &json!({ "keep": "files" }),
            );
            ask(&server, "POST", &format!("{target}/resume"), &json!({}));
            if server.is_running() {
                before.extend(holders_of(&server));
            }
            ask(&server, "POST", &format!("{target}/pause"), &json!({}));
            ask(&server, "DELETE", &target, &json!({}));
        }
        assert_ne!(server.wait_for_exit(PATIENCE).code(), Some(0), "{fault}");
        let place = server.place.take().unwrap();
        expect_tidy(&template, place, &before, fault);
    }
}

#[test]
fn a_server_that_is_killed_at_any_moment_leaves_nothing() {
    needs_roots!(template, server);
    let kills = std::env::var("SBX_KILLS").map_or(4, |kills| kills.parse().unwrap());
    root(&server).delete();
    for round in 0..kills {
        let inner = server.inner_pid();
        let mut before = Vec::new();
        thread::scope(|scope| {
            for client in 0..3 {
                let server = &server;
                scope.spawn(move || {
                    let mut random = Random(round * 3 + client);
                    while let Some(made) = ask(server, "POST", "/v1/sandboxes", &json!({ "root": "private" })) {
                        let Some(id) = made["sandboxes"][0]["id"].as_str() else { continue };
                        let target = format!("/v1/sandboxes/{id}");
                        ask(server, "POST", &format!("{target}/processes"), &json!({ "cmd": "trap '' TERM; while :; do echo x > /x; done", "user": "7" }));
                        if random.one_in(2) {
                            ask(server, "POST", &format!("{target}/pause"), &json!({ "keep": "files" }));
                            ask(server, "POST", &format!("{target}/resume"), &json!({}));
                        }
                        if random.one_in(2) {
                            ask(server, "DELETE", &target, &json!({}));
                        }
                    }
                });
            }
            // Any moment will do.
            thread::sleep(Duration::from_millis(300 + Random(round).next() % 700));
            before = holders_of(&server);
            kill(Pid::from_raw(inner), Signal::SIGKILL).unwrap();
        });
        assert_ne!(server.wait_for_exit(PATIENCE).code(), Some(0));
        let place = server.place.take().unwrap();
        server = expect_tidy(&template, place, &before, "any moment");
    }
    assert!(uid_of(server.inner_pid()).is_some());
}

#[test]
fn a_server_that_found_a_root_ends_with_init() {
    needs_roots!(template, server);
    let sandbox = root(&server);
    let id = sandbox.id.clone();
    server.signal(libc::SIGKILL);
    server.wait_for_exit(PATIENCE);
    let place = server.place.take().unwrap();
    let mut next = template.next(&place).start();
    let found = next.get(&format!("/v1/sandboxes/{id}")).json();
    assert_eq!(found["filesystem"]["root"], "private", "{found}");
    let inner = next.inner_pid();
    next.signal(libc::SIGKILL);
    next.wait_for_exit(PATIENCE);
    wait_until("the server has ended too", PATIENCE, || !is_alive(inner));
    next.place = Some(place);
}

#[test]
fn files_that_need_not_be_durable_outlast_all_but_the_machine() {
    needs_roots!(template, server);
    let sandbox = root_with(&server, json!({ "durable": false }));
    assert_eq!(sandbox.described()["durable"], false);
    assert_eq!(root(&server).described()["durable"], true);
    let is_volatile = "grep ' / overlay ' /proc/self/mounts | grep -c volatile";
    assert_eq!(sandbox.sh(is_volatile).trim(), "1");
    sandbox.sh("echo kept > /kept; sync");
    sandbox.stop();
    sandbox.start();
    assert_eq!(sandbox.sh("cat /kept").trim(), "kept");
    let id = sandbox.id.clone();
    server.signal(libc::SIGKILL);
    server.wait_for_exit(PATIENCE);
    let place = server.place.take().unwrap();
    let mut next = template.next(&place).start();
    let target = format!("/v1/sandboxes/{id}");
    assert_eq!(
        next.post(&format!("{target}/resume"), &json!({})).status,
        200
    );
    let body = json!({ "cmd": format!("echo $({is_volatile}) $(cat /kept)") });
    let reply = next.post(&format!("{target}/exec"), &body);
    assert!(reply.text().contains("\"1 kept\\n\""), "{}", reply.text());
    assert_eq!(next.get(&target).json()["durable"], false);
    next.place = Some(place);
}

/// Starts a server whose homes are on a small disk. Skips a test that cannot run here.
macro_rules! needs_small_disk {
    ($template:ident, $disk:ident, $homes:ident, $server:ident) => {
        if !is_root() {
            skip!("needs root");
        }
        let Some($template) = Template::new() else {
            skip!("there is no {}", super::BUSYBOX);
        };
        let $disk = TempDir::new();
        let Some(_mounted) = Mount::tmpfs($disk.path(), "size=64m,nr_inodes=2000,mode=755") else {
            skip!("cannot mount a small disk here");
        };
        let $homes = $disk.join("homes");
        let $server = $template.builder().env("SBX_HOMES_DIR", &$homes).start();
        if let Some(why) = super::lack(&$server) {
            skip!("{why}");
        }
    };
}

/// What one tenant has done to the disk puts nobody's sandbox aside, and whoever manages the host can end it.
#[test]
fn a_start_on_a_full_disk_keeps_what_there_is() {
    needs_small_disk!(template, disk, homes, server);
    let victim = root(&server);
    victim.sh("echo kept > /kept");
    let (kept, ids) = (victim.id.clone(), victim.ids.clone());
    let hog = root(&server);
    hog.exec(&json!({ "cmd": "n=0; while : > /f$n; do n=$((n+1)); done" }));
    let full = hog.id.clone();
    drop((victim, hog));
    let place = end(server, Signal::SIGKILL);
    wait_until("all of it has ended", PATIENCE, || {
        processes_of(&ids).is_empty()
    });
    let next = template.next(&place).env("SBX_HOMES_DIR", &homes).start();
    assert!(!next.log().contains("put aside"), "{}", next.log());
    let reply = next.delete(&format!("/v1/sandboxes/{full}"));
    assert_eq!(reply.status, 200, "{}", reply.text());
    let target = format!("/v1/sandboxes/{kept}");
    wait_until("it is taken over", 2 * PATIENCE, || {
        next.get(&target).status == 200
    });
    let made = next.get(&target).json();
    assert_eq!(made["state"], "stopped");
    let reply = next.post(&format!("{target}/resume"), &json!({}));
    assert_eq!(reply.status, 200, "{}", reply.text());
    let read = next.get(&format!("{target}/files/read?path=/kept"));
    assert_eq!(read.text(), "kept\n");
    assert_eq!(
        next.get("/v1/sandboxes").json().as_array().unwrap().len(),
        1
    );
    assert_eq!(next.delete(&target).json()["deleted"], true);
}

/// The last blocks and the last names are missed in other ways, and at other steps, than a full disk is.
#[test]
fn a_start_on_a_nearly_full_disk_keeps_what_there_is() {
    needs_small_disk!(template, disk, homes, server);
    let sandbox = root(&server);
    sandbox.sh("echo kept > /kept");
    let target = format!("/v1/sandboxes/{}", sandbox.id);
    drop(sandbox);
    let place = end(server, Signal::SIGTERM);
    let free = || nix::sys::statvfs::statvfs(disk.path()).unwrap();
    let filled = disk.path().join("filled");
    for left in (0..16).flat_map(|left| [(left, true), (left, false)]) {
        fs::create_dir(&filled).unwrap();
        match left {
            (names, true) => {
                for number in 0..free().files_free() - names {
                    fs::write(filled.join(number.to_string()), "").unwrap();
                }
            }
            (blocks, false) => {
                let bytes = (free().blocks_free() - blocks) * free().block_size();
                fs::write(
                    filled.join("file"),
                    vec![0; usize::try_from(bytes).unwrap()],
                )
                .unwrap();
            }
        }
        let mut next = template.next(&place).env("SBX_HOMES_DIR", &homes).start();
        assert!(
            !next.log().contains("put aside"),
            "{left:?}: {}",
            next.log()
        );
        next.signal(if left.0 % 2 == 0 {
            libc::SIGKILL
        } else {
            libc::SIGTERM
        });
        next.wait_for_exit(PATIENCE);
        fs::remove_dir_all(&filled).unwrap();
    }
    let mut next = template.next(&place).env("SBX_HOMES_DIR", &homes).start();
    let reply = next.post(&format!("{target}/resume"), &json!({}));
    assert_eq!(reply.status, 200, "{}", reply.text());
    let read = next.get(&format!("{target}/files/read?path=/kept"));
    assert_eq!(read.text(), "kept\n");
    next.place = Some(place);
}
