//! The promise of conditional writes: nothing is written unless the file is as the client says, and of
//! clients that race each one either wins or is told.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::{MIB, Mount, Place, begin, expect_error, expect_ok, mkfifo, target};
use crate::fixture::{Server, Stop, TempDir, names_in, random_bytes, sha256};
use crate::skip;

#[test]
fn a_file_that_must_be_absent_is_never_replaced() {
    Place::each(|place| {
        let written = expect_ok(&place.put("files/write?path=@deep/new&if_absent=1", b"first"));
        assert_eq!(written["size"], 5);
        let reply = place.put("files/write?path=@deep/new&if_absent=1", b"second");
        expect_error(&reply, 409, "exists");
        assert_eq!(fs::read(place.path("deep/new")).unwrap(), b"first");
        let reply = place.put("files/write?path=@deep&if_absent=1", b"second");
        expect_error(&reply, 409, "exists");
        expect_ok(&place.put("files/write?path=@deep/new&if_absent=0", b"third"));
        assert_eq!(fs::read(place.path("deep/new")).unwrap(), b"third");
        assert_eq!(names_in(place.path("deep")), ["new"]);
    });
}

#[test]
fn a_file_is_replaced_only_if_it_has_the_content() {
    Place::each(|place| {
        place.make("file", "old");
        let old = sha256(b"old");
        let write = |name: &str, hash: &str, body: &[u8]| {
            place.put(&format!("files/write?path=@{name}&if_sha256={hash}"), body)
        };
        let reply = write("file", &sha256(b"other"), b"new");
        expect_error(&reply, 409, "changed");
        assert_eq!(reply.json()["sha256"], old, "it says what there is");
        expect_error(&write("none/none", &old, b"new"), 409, "changed");
        assert!(!place.path("none").exists(), "nothing was made for it");
        fs::create_dir(place.path("dir")).unwrap();
        place.give(&place.path("dir"));
        expect_error(&write("dir", &old, b"new"), 409, "is_directory");
        mkfifo(place.path("pipe"));
        place.give(&place.path("pipe"));
        expect_error(&write("pipe", &old, b"new"), 409, "not_regular");
        for hash in ["", "abc", &old[1..], &old.replace('a', "g")] {
            expect_error(&write("file", hash, b"new"), 400, "bad_request");
        }
        for rest in ["&if_absent=1", "&offset=0"] {
            let reply = write("file", &format!("{old}{rest}"), b"new");
            expect_error(&reply, 400, "bad_request");
        }
        let reply = place.put("files/write?path=@file&offset=0&if_absent=1", b"new");
        expect_error(&reply, 400, "bad_request");
        assert_eq!(fs::read(place.path("file")).unwrap(), b"old");
        expect_ok(&write("file", &old.to_uppercase(), b"new"));
        assert_eq!(fs::read(place.path("file")).unwrap(), b"new");
        expect_error(&write("file", &old, b"newer"), 409, "changed");
        assert_eq!(fs::read(place.path("file")).unwrap(), b"new");
    });
}

#[test]
fn a_condition_that_does_not_hold_is_told_before_the_body_is_sent() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("file"), "old").unwrap();
    let none = sha256(b"none");
    for (rest, code) in [
        (format!("&if_sha256={none}"), "changed"),
        ("&if_absent=1".to_owned(), "exists"),
    ] {
        let target = target("write", dir.join("file"), &rest);
        let mut connection = begin(&server, "PUT", &target, 100 * MIB);
        expect_error(&connection.read_reply(), 409, code);
    }
}

#[test]
fn what_changes_during_the_upload_is_not_overwritten() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("file"), "old").unwrap();
    let old = sha256(b"old");
    for (name, rest, code) in [
        ("file", format!("&if_sha256={old}"), "changed"),
        ("new", "&if_absent=1".to_owned(), "exists"),
    ] {
        let target = target("write", dir.join(name), &rest);
        let mut connection = begin(&server, "PUT", &target, 2 * MIB);
        connection.send(&random_bytes(MIB, 1));
        if super::open_files(&server, dir.path()).is_none() {
            skip!("only root can see how far the server has come");
        }
        super::wait_for_upload(&server, dir.path(), 1);
        fs::write(dir.join(name), "by another").unwrap();
        connection.send(&random_bytes(MIB, 2));
        expect_error(&connection.read_reply(), 409, code);
        assert_eq!(fs::read(dir.join(name)).unwrap(), b"by another");
    }
    assert_eq!(names_in(dir.path()), ["file", "new"], "no litter");
}

/// Many clients make the same files; each file has exactly one maker.
fn race_to_make(server: &Server, directory: &str) {
    for round in 0..20 {
        let path = format!("{directory}/{round}");
        let target = target("write", &path, "&if_absent=1");
        let makers: Vec<usize> = thread::scope(|scope| {
            let clients: Vec<_> = (0..8)
                .map(|client| {
                    let target = &target;
                    scope.spawn(move || {
                        let body = format!("client {client}");
                        let reply = server.put(target, body.as_bytes());
                        if reply.status == 200 {
                            return Some(client);
                        }
                        expect_error(&reply, 409, "exists");
                        None
                    })
                })
                .collect();
            let clients = clients.into_iter();
            clients
                .filter_map(|client| client.join().unwrap())
                .collect()
        });
        assert_eq!(makers.len(), 1, "{makers:?}");
        let content = fs::read_to_string(&path).unwrap();
        assert_eq!(content, format!("client {}", makers[0]));
    }
    assert_eq!(names_in(directory).len(), 20, "no litter");
}

#[test]
fn of_many_makers_of_a_file_one_wins() {
    let server = Server::start();
    let dir = TempDir::new();
    race_to_make(&server, dir.path().to_str().unwrap());
}

#[test]
fn of_many_makers_of_a_file_one_wins_on_a_file_system_in_user_space() {
    let dir = TempDir::new();
    for name in ["below", "mount"] {
        fs::create_dir(dir.join(name)).unwrap();
    }
    let at = dir.path().join("mount");
    let Some(_mount) = Mount::in_user_space(&dir.path().join("below"), &at) else {
        skip!("nothing can be mounted by bindfs here");
    };
    race_to_make(&Server::start(), at.to_str().unwrap());
}

#[test]
fn clients_that_count_in_one_file_lose_nothing() {
    Place::each(|place| {
        place.make("count", "0");
        let refused = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut connection = place.connect();
                    for _ in 0..25 {
                        loop {
                            let read = place.target("files/read?path=@count");
                            let count = connection.request("GET", &read, &[], b"").text();
                            let hash = sha256(count.as_bytes());
                            let write = format!("files/write?path=@count&if_sha256={hash}");
                            let next = (count.parse::<u32>().unwrap() + 1).to_string();
                            let target = place.target(&write);
                            let reply = connection.request("PUT", &target, &[], next.as_bytes());
                            if reply.status == 200 {
                                break;
                            }
                            expect_error(&reply, 409, "changed");
                            if reply.header("connection") == Some("close") {
                                connection = place.connect();
                            }
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(fs::read_to_string(place.path("count")).unwrap(), "100");
        eprintln!("{refused:?} were told to try again");
    });
}

/// Writers that append on condition, against one that puts a new beginning there by other routes: whatever
/// is read after that begins with it, unless a write was based on what was there before.
#[test]
fn a_write_with_a_condition_loses_no_file_that_was_moved_there() {
    Place::each(|place| {
        place.make("log", "0:");
        let stop = Stop::default();
        thread::scope(|scope| {
            let _stopped = stop.guard();
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut connection = place.connect();
                    while !stop.is_set() {
                        let read = place.target("files/read?path=@log");
                        let text = connection.request("GET", &read, &[], b"").text();
                        let hash = sha256(text.as_bytes());
                        let write =
                            place.target(&format!("files/write?path=@log&if_sha256={hash}"));
                        let next = format!("{text}+");
                        let reply = connection.request("PUT", &write, &[], next.as_bytes());
                        if reply.status != 200 {
                            expect_error(&reply, 409, "changed");
                        }
                        if reply.header("connection") == Some("close") {
                            connection = place.connect();
                        }
                    }
                });
            }
            let mut connection = place.connect();
            let wrong = (1..=300).find_map(|round| {
                let mut send = |method, route: &str, body: &str| {
                    let target = place.target(route);
                    let reply = connection.request(method, &target, &[], body.as_bytes());
                    assert_eq!(reply.status, 200, "{}", reply.text());
                    reply.text()
                };
                let begin = format!("{round}:");
                send("PUT", "files/write?path=@next", &begin);
                send("POST", "files/move?from=@next&to=@log", "");
                let found = send("GET", "files/read?path=@log", "");
                (!found.starts_with(&begin)).then_some((begin, found))
            });
            assert_eq!(wrong, None);
        });
    });
}

#[test]
fn a_write_tells_the_hash_of_what_was_written() {
    Place::each(|place| {
        for (size, rest) in [
            (0, ""),
            (1, "&mode=600"),
            (64 * 1024 + 1, "&mkdir=0"),
            (3 * MIB, "&if_absent=0"),
        ] {
            let content = random_bytes(size, 1);
            let route = format!("files/write?path=@file&hash=sha256{rest}");
            let written = expect_ok(&place.put(&route, &content));
            assert_eq!(written["sha256"], sha256(&content));
            assert_eq!(written["size"], size);
            assert!(fs::read(place.path("file")).unwrap() == content);
        }
        let written = expect_ok(&place.put("files/write?path=@file", b"x"));
        assert!(written.get("sha256").is_none(), "only if it is asked for");
        for rest in ["&hash=md5", "&hash=sha256&offset=0"] {
            let reply = place.put(&format!("files/write?path=@file{rest}"), b"y");
            expect_error(&reply, 400, "bad_request");
        }
        assert_eq!(fs::read(place.path("file")).unwrap(), b"x");
    });
}
