//! How many there are: never more than was promised, exactly as many as there is room for, and all
//! of a request's or none.

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use serde_json::json;

use super::{SANDBOXES, create, delete, first_user, homes_of, list, needs_root, with_users};
use crate::fixture::{PATIENCE, Server, Stop, stat_of, wait_until};
use crate::skip;

/// Watches the list until told to stop; the most that were ever in it.
fn watch(server: &Server, stop: &Stop, most: &AtomicU64) {
    let mut connection = server.connect();
    while !stop.is_set() {
        let reply = connection.request("GET", SANDBOXES, &[], b"");
        let count = reply.json().as_array().unwrap().len();
        most.fetch_max(count as u64, Ordering::Relaxed);
    }
}

#[test]
fn sixty_four_creators_at_once_get_exactly_what_there_is_room_for() {
    const CAPACITY: u64 = 41;
    needs_root!();
    let server = Server::host().env("SBX_CAPACITY", CAPACITY).start();
    for round in 0..3 {
        let (made, most) = (AtomicU64::new(0), AtomicU64::new(0));
        let stop = Stop::default();
        thread::scope(|scope| {
            scope.spawn(|| watch(&server, &stop, &most));
            let stop = stop.guard();
            let creators: Vec<_> = (0..64u64)
                .map(|creator| {
                    let (server, made) = (&server, &made);
                    scope.spawn(move || {
                        // One each in the first round, up to three in the others.
                        let count = 1 + (creator * 7 + round) % 3 * round.min(1);
                        let (mine, rejected) = create(server, count);
                        assert_eq!(mine.len() as u64 + rejected, count);
                        made.fetch_add(mine.len() as u64, Ordering::Relaxed);
                    })
                })
                .collect();
            for creator in creators {
                creator.join().unwrap();
            }
            drop(stop);
        });
        assert_eq!(made.into_inner(), CAPACITY);
        assert!(most.into_inner() <= CAPACITY);
        let listed = list(&server);
        let users: BTreeSet<_> = listed.iter().map(|entry| entry["uid"].as_u64()).collect();
        assert_eq!(
            (listed.len() as u64, users.len() as u64),
            (CAPACITY, CAPACITY)
        );
        assert_eq!(homes_of(&server).len() as u64, CAPACITY);
        assert_eq!(server.delete(SANDBOXES).json()["deleted"], CAPACITY);
        assert_eq!(homes_of(&server), Vec::<String>::new());
    }
}

#[test]
fn coming_and_going_never_goes_over_the_capacity_and_loses_no_place() {
    const CAPACITY: u64 = 13;
    needs_root!();
    let server = Server::host().env("SBX_CAPACITY", CAPACITY).start();
    let most = AtomicU64::new(0);
    let stop = Stop::default();
    thread::scope(|scope| {
        scope.spawn(|| watch(&server, &stop, &most));
        let stop = stop.guard();
        let visitors: Vec<_> = (0..32u64)
            .map(|visitor| {
                let server = &server;
                scope.spawn(move || {
                    for turn in 0..8 {
                        let (mine, _) = create(server, 1 + (visitor + turn) % 4);
                        for sandbox in mine {
                            assert!(delete(server, &sandbox.id));
                        }
                    }
                })
            })
            .collect();
        for visitor in visitors {
            visitor.join().unwrap();
        }
        drop(stop);
    });
    assert!(most.into_inner() <= CAPACITY);
    assert_eq!(server.get("/health").json()["sandboxes"], 0);
    assert_eq!(homes_of(&server), Vec::<String>::new());
    let (made, rejected) = create(&server, CAPACITY + 1);
    assert_eq!(
        (made.len() as u64, rejected),
        (CAPACITY, 1),
        "every place is free again"
    );
}

#[test]
fn a_full_host_answers_200_and_says_how_many_it_rejected() {
    needs_root!();
    let server = Server::host().env("SBX_CAPACITY", 3).start();
    let (made, rejected) = create(&server, 5);
    assert_eq!((made.len(), rejected), (3, 2));
    for count in [1, 2, 10_000] {
        let reply = server.post(SANDBOXES, &json!({ "count": count })).json();
        assert_eq!(reply["sandboxes"], json!([]));
        assert_eq!(reply["rejected"], count);
        assert_eq!(reply["rejected_code"], "capacity");
        let reason = reply["rejected_reason"].as_str().unwrap();
        assert!(reason.contains("all 3 places of SBX_CAPACITY"), "{reason}");
    }
    assert_eq!(list(&server).len(), 3);
    assert!(delete(&server, &made[0].id));
    let reply = server.post(SANDBOXES, &json!({})).json();
    for absent in ["rejected_code", "rejected_reason"] {
        assert!(reply.get(absent).is_none(), "{reply}");
    }
    assert_eq!(made[2].sh("echo here"), "here\n");
}

#[test]
fn a_place_is_free_as_soon_as_delete_answers() {
    needs_root!();
    let server = Server::host().env("SBX_CAPACITY", 1).start();
    let mut connection = server.connect();
    let mut id = server.sandbox().id;
    for turn in 0..100 {
        assert_eq!(create(&server, 1).1, 1, "it is full");
        if turn % 10 == 0 {
            let body = json!({"cmd": "setsid sleep 3600 & exec sleep 3600"}).to_string();
            let target = format!("{SANDBOXES}/{id}/processes");
            assert_eq!(
                connection
                    .request("POST", &target, &[], body.as_bytes())
                    .status,
                200
            );
        }
        let target = format!("{SANDBOXES}/{id}");
        let reply = connection.request("DELETE", &target, &[], b"");
        assert_eq!(reply.json()["deleted"], true, "{}", reply.text());
        let reply = connection.request("POST", SANDBOXES, &[], b"").json();
        assert_eq!(reply["rejected"], 0, "turn {turn}");
        reply["sandboxes"][0]["id"]
            .as_str()
            .unwrap()
            .clone_into(&mut id);
    }
}

#[test]
fn where_there_are_fewer_users_than_places_the_users_count() {
    needs_root!();
    let server = with_users(3).env("SBX_CAPACITY", 50).start();
    let (made, rejected) = create(&server, 5);
    assert_eq!((made.len(), rejected), (3, 2));
    let reply = server.post(SANDBOXES, &json!({})).json();
    assert_eq!(
        (&reply["rejected"], &reply["rejected_code"]),
        (&json!(1), &json!("no_uid"))
    );
    let reason = reply["rejected_reason"].as_str().unwrap();
    assert!(
        reason.contains("all uids of SBX_UID_RANGE that can be given"),
        "{reason}"
    );
    assert!(delete(&server, &made[1].id));
    let (again, rejected) = create(&server, 2);
    assert_eq!((again.len(), rejected), (1, 1));
    assert_eq!(again[0].uid, made[1].uid);
}

#[test]
fn a_user_is_given_again_after_all_others() {
    needs_root!();
    let builder = with_users(4);
    let first = first_user(&builder);
    let server = builder.start();
    let mut before = Vec::new();
    for turn in 0..12 {
        let sandbox = server.sandbox();
        let offset = sandbox.uid - first;
        assert!(offset < 4);
        if let Some(last) = before.last() {
            let next = (last + 1) % 4;
            assert_eq!(offset, next, "{turn}: {before:?}");
        }
        before.push(offset);
        // What one user leaves outside its home is not found by the next in its place.
        assert_eq!(
            sandbox.sh("id -u; ls -A | wc -l"),
            format!("{}\n2\n", sandbox.uid)
        );
        sandbox.spawn(&json!({"cmd": "exec sleep 3600"}));
        sandbox.delete();
    }
}

/// Files in paths that sandboxes were given outlive them, and the server. The next server's first sandbox shall not own
/// what the last one's left.
#[test]
fn each_start_begins_at_another_user() {
    needs_root!();
    let firsts = (0..8).map(|_| {
        let builder = Server::host();
        let first = first_user(&builder);
        builder.start().sandbox().uid - first
    });
    let firsts: std::collections::BTreeSet<_> = firsts.collect();
    assert!(firsts.len() > 1, "eight times {firsts:?} of 64");
}

#[test]
fn a_user_that_something_runs_as_is_not_given() {
    needs_root!();
    let builder = with_users(2);
    let first = first_user(&builder);
    // Not the server's child, so it cannot know of it but by looking.
    let mut stranger = Command::new("sleep")
        .arg("3600")
        .uid(first)
        .gid(first)
        .current_dir("/")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let server = builder.start();
    let (made, rejected) = create(&server, 2);
    assert_eq!((made.len(), rejected), (1, 1));
    assert_eq!(made[0].uid, first + 1);
    assert!(delete(&server, &made[0].id));
    assert_eq!(create(&server, 2).0[0].uid, first + 1, "still not");
    stranger.kill().unwrap();
    // A zombie still counts for its user.
    let pid = stranger.id().cast_signed();
    wait_until("it is a zombie", PATIENCE, || {
        stat_of(pid).is_some_and(|process| process.state == 'Z')
    });
    assert_eq!(create(&server, 1).1, 1, "not while there is a zombie of it");
    stranger.wait().unwrap();
    let (made, rejected) = create(&server, 2);
    assert_eq!((made.len(), rejected), (1, 1));
    assert_eq!(made[0].uid, first, "it is free now");
}

/// Asserts that so many cannot be made, with a reason that says `why`, that nothing of them is left,
/// and that a few can be made as ever.
#[track_caller]
fn all_or_nothing(server: &Server, homes: &PathBuf, count: u64, status: u16, why: &str) {
    let inner = server.inner_pid();
    // In a job's container not even root may look at the server.
    let counts = || std::fs::read_dir(format!("/proc/{inner}/fd")).map_or(0, Iterator::count);
    // The first sandbox may bring descriptors that stay.
    let (kept, _) = create(server, 1);
    assert_eq!(kept[0].sh("echo on"), "on\n");
    let mut before = 0;
    wait_until("the server is at rest", PATIENCE, || {
        let now = counts();
        std::mem::replace(&mut before, now) == now
    });
    for _ in 0..5 {
        let reply = server.post(SANDBOXES, &json!({ "count": count }));
        assert_eq!(reply.status, status, "{}", reply.text());
        let text = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(text.contains(why), "{text}");
        assert_eq!(list(server).len(), 1);
        assert_eq!(super::homes_in(homes), [kept[0].id.clone()]);
        wait_until("no descriptor is left of it", PATIENCE, || {
            counts() <= before
        });
    }
    assert_eq!(kept[0].sh("echo still"), "still\n");
    let (made, rejected) = create(server, 2);
    assert_eq!((made.len(), rejected), (2, 0));
    assert_eq!(made[1].sh("echo new"), "new\n");
    for sandbox in made.iter().chain(&kept) {
        assert!(delete(server, &sandbox.id));
    }
    assert_eq!(super::homes_in(homes), Vec::<String>::new());
}

#[test]
fn where_the_disk_is_full_half_way_nothing_is_made() {
    needs_root!();
    let script = "mkdir \"$SBX_HOMES_DIR\" && mount -t tmpfs -o nr_inodes=60,mode=711 none \"$SBX_HOMES_DIR\" && exec \"$0\"";
    let words = ["unshare", "--mount", "sh", "-c", script];
    let probe = ["--mount", "mount", "-t", "tmpfs", "none", "/mnt"];
    let can_mount = Command::new("unshare")
        .args(probe)
        .stderr(Stdio::null())
        .status();
    if !can_mount.is_ok_and(|status| status.success()) {
        skip!("needs a mount namespace of its own, for a disk that is soon full");
    }
    let server = Server::host().wrapped_in(&words).start();
    let homes = server.place.as_ref().unwrap().homes();
    let homes = PathBuf::from(format!("/proc/{}/root{}", server.pid(), homes.display()));
    all_or_nothing(&server, &homes, 40, 507, "ENOSPC");
}

#[test]
fn where_descriptors_run_out_half_way_nothing_is_made() {
    needs_root!();
    let limit = ["sh", "-c", "ulimit -n 90 && exec \"$0\""];
    let server = Server::host().wrapped_in(&limit).start();
    let homes = server.place.as_ref().unwrap().homes();
    all_or_nothing(&server, &homes, 60, 500, "EMFILE");
}
