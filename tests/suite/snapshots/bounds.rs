//! Bounds, and what happens at the same time: several imports, and a server that is killed.

use std::fs;
use std::path::Path;
use std::thread;

use serde_json::Value;

use super::images::of_layer;
use super::{
    Member, SNAPSHOTS, archive, begin, check_tidy, file, id_of, listed, made, needs_store, put,
    store, store_of, with,
};
use crate::archives::Tar;
use crate::faults::panics::{faulty_program, start};
use crate::files::Mount;
use crate::fixture::{PATIENCE, Server, TempDir, assert_error, names_in, random_bytes, wait_until};
use crate::host::in_place_of;
use crate::skip;

#[test]
fn zeros_of_a_root_take_no_room_on_the_disk() {
    needs_store!(server);
    let zeros = vec![0; 2 << 20];
    let all = [
        ("zeros", zeros.clone()),
        ("end", [&zeros[..], b"x"].concat()),
        ("start", [b"x", &zeros[..]].concat()),
    ];
    let members = all.each_ref().map(|(name, content)| file(name, content));
    let made = made(&server, "a", &with(Tar::default(), &members).end());
    let tree = store(&server).join(id_of(&made));
    for (name, content) in &all {
        let path = tree.join(name);
        assert!(fs::read(&path).unwrap() == *content, "{name}");
        let status = fs::metadata(&path).unwrap();
        let taken = std::os::unix::fs::MetadataExt::blocks(&status) * 512;
        assert!(taken < 1 << 20, "{name}: {taken}");
    }
}

#[test]
fn the_bounds_hold_and_leave_nothing() {
    let bytes = 100_000;
    needs_store!(
        server,
        "SBX_SNAPSHOTS_BYTES" = bytes,
        "SBX_SNAPSHOTS_MAX" = 2
    );
    let small = archive(&[file("a", &vec![b'x'; 10_000])]);
    let large = archive(&[file("a", &vec![b'x'; 60_000])]);
    let many: Vec<String> = (0..30).map(|number| number.to_string()).collect();
    let many: Vec<_> = many.iter().map(|name| file(name, b"")).collect();
    for (what, bomb) in [
        ("content", archive(&[file("a", &vec![b'x'; 100_001])])),
        (
            "a sum",
            archive(&[
                file("a", &vec![b'x'; 60_000]),
                file("b", &vec![b'x'; 60_000]),
            ]),
        ),
        // The holes of a sparse file count.
        ("a hole", {
            let sparse: &[(&str, &[u8])] = &[
                ("GNU.sparse.size", b"1099511627776"),
                ("GNU.sparse.map", b"0,1"),
            ];
            with(Tar::default().pax(sparse), &[file("a", b"x")]).end()
        }),
        ("empty files", archive(&many)),
        ("attributes", {
            let value = [b'x'; 3000];
            let pax: &[(&str, &[u8])] = &[("SCHILY.xattr.user.a", &value)];
            let tar = many[..15].iter().fold(Tar::default(), |tar, member| {
                with(tar.pax(pax), std::slice::from_ref(member))
            });
            tar.end()
        }),
        (
            "a device with content",
            archive(&[
                file("a", &[b'x'; 1000]),
                Member {
                    typeflag: b'9',
                    content: &vec![0; 200_000],
                    ..file("b", b"")
                },
            ]),
        ),
    ] {
        assert_error(&put(&server, "a", &bomb), 507, "no_space");
        assert_eq!(names_in(store(&server)), Vec::<String>::new(), "{what}");
    }
    made(&server, "a", &large);
    // The rest is too small for another one.
    assert_error(&put(&server, "b", &large), 507, "no_space");
    made(&server, "b", &small);
    assert_error(&put(&server, "c", &archive(&[])), 507, "no_space");
    check_tidy(&server);
    assert_eq!(server.delete(&format!("{SNAPSHOTS}/a")).status, 200);
    made(&server, "c", &large);
    check_tidy(&server);
    // They hold after a restart as before.
    let place = server.place.take().unwrap();
    server.signal(libc::SIGKILL);
    server.wait_for_exit(PATIENCE);
    server = in_place_of(&place)
        .env("SBX_SNAPSHOTS_BYTES", bytes)
        .start();
    server.place = Some(place);
    assert_error(&put(&server, "d", &large), 507, "no_space");
    check_tidy(&server);
}

#[test]
fn imports_at_the_same_time_do_not_pass_the_bounds_together() {
    needs_store!(
        server,
        "SBX_SNAPSHOTS_BYTES" = 100_000,
        "SBX_SNAPSHOTS_MAX" = 2
    );
    let large = archive(&[file("a", &vec![b'x'; 60_000])]);
    let small = archive(&[file("a", b"1")]);
    let mut first = begin(&server, "a", &large, 2000);
    // Those that are not complete count, with what they say they have.
    assert_error(&put(&server, "b", &large), 507, "no_space");
    let mut second = begin(&server, "b", &small, 600);
    assert_error(&put(&server, "c", &small), 507, "no_space");
    first.send(&large[2000..]);
    assert_eq!(first.read_reply().status, 201);
    second.send(&small[600..]);
    assert_eq!(second.read_reply().status, 201);
    check_tidy(&server);
    for name in ["a", "b"] {
        assert_eq!(server.delete(&format!("{SNAPSHOTS}/{name}")).status, 200);
    }
    // What has ended in between, one way or another, counts no more.
    drop(begin(&server, "a", &large, 2000));
    wait_until("there is room", PATIENCE, || {
        put(&server, "a", &large).status == 201
    });
    check_tidy(&server);
}

#[test]
fn of_imports_of_one_name_the_last_has_it() {
    needs_store!(server);
    let [one, two] = [b"1", b"2"].map(|content| archive(&[file("a", content)]));
    let mut first = begin(&server, "a", &one, 300);
    let mut second = begin(&server, "a", &two, 300);
    assert_eq!(
        listed(&server),
        Vec::<Value>::new(),
        "half of one does not show"
    );
    second.send(&two[300..]);
    let second = second.read_reply().json();
    first.send(&one[300..]);
    let first = first.read_reply().json();
    assert_eq!(
        (&first["name"], &second["name"]),
        (&"a".into(), &"a".into())
    );
    assert_eq!(server.get(&format!("{SNAPSHOTS}/a")).json(), first);
    let named: Vec<_> = listed(&server)
        .into_iter()
        .map(|one| one["name"].clone())
        .collect();
    assert_eq!(named, [Value::Null, "a".into()]);
    // A storm leaves as many as have succeeded, and one with the name.
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| made(&server, "a", &one));
        }
    });
    let all = listed(&server);
    assert_eq!(all.len(), 6);
    assert_eq!(all.iter().filter(|one| one["name"] == "a").count(), 1);
    check_tidy(&server);
}

#[test]
fn a_server_that_is_killed_in_an_import_leaves_nothing_to_the_next() {
    needs_store!(server);
    let whole = archive(&[file("a", &[b'x'; 2000]), file("b", &[b'x'; 2000])]);
    let kept = id_of(&made(&server, "kept", &whole));
    for end in [300, 3000, whole.len() - 600] {
        let _connection = begin(&server, "a", &whole, end);
        let place = server.place.take().unwrap();
        server.signal(libc::SIGKILL);
        server.wait_for_exit(PATIENCE);
        assert_eq!(names_in(store_of(&place)).len(), 3, "half of one is there");
        // What a server may leave that is killed while it writes a record.
        fs::write(store_of(&place).join(format!("{kept}.writing")), "half").unwrap();
        server = in_place_of(&place).start();
        server.place = Some(place);
        assert_eq!(
            listed(&server).iter().map(id_of).collect::<Vec<_>>(),
            std::slice::from_ref(&kept)
        );
        check_tidy(&server);
    }
}

/// What a server has that is killed, or whose request panics, at a place of the test's choice.
#[test]
fn a_panic_or_a_kill_between_two_steps_leaves_a_whole_snapshot_or_none() {
    needs_store!(_able);
    let program: &Path = faulty_program();
    let whole = archive(&[file("a", b"1")]);
    let builder = Server::host()
        .env("SBX_FAULT", "snapshot")
        .env("SBX_SNAPSHOTS_MAX", 1);
    let server = start(builder, program);
    assert_error(&put(&server, "a", &whole), 500, "internal");
    check_tidy(&server);
    made(&server, "a", &whole);
    for (fault, expected) in [("snapshot", 1), ("snapshot record", 2)] {
        let mut server = Server::host().start();
        let first = id_of(&made(&server, "a", &whole));
        let place = server.place.take().unwrap();
        server.signal(libc::SIGTERM);
        server.wait_for_exit(PATIENCE);
        let builder = in_place_of(&place).env("SBX_FAULT", format!("{fault}:kill"));
        server = start(builder, program);
        let mut connection = server.connect();
        connection.send_request("PUT", &format!("{SNAPSHOTS}?name=a"), &[], &whole);
        server.wait_for_exit(PATIENCE);
        server = in_place_of(&place).start();
        server.place = Some(place);
        let all = listed(&server);
        assert_eq!(all.len(), expected, "{fault}");
        assert_eq!(id_of(&all[0]), first);
        // Of two records with one name the later one counts.
        let named: Vec<_> = all.iter().filter(|one| one["name"] == "a").collect();
        assert_eq!(named, [all.last().unwrap()], "{fault}");
        check_tidy(&server);
    }
}

#[test]
fn a_snapshot_that_is_read_is_not_deleted() {
    needs_store!(server);
    // More than sockets hold.
    let content = random_bytes(32 << 20, 1);
    made(&server, "a", &archive(&[file("a", &content)]));
    let mut reader = server.connect();
    let token = server.token.as_deref().unwrap();
    let head = format!(
        "GET {SNAPSHOTS}/a/archive HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {token}\r\n\r\n"
    );
    reader.send(head.as_bytes());
    assert_eq!(reader.read_head().status, 200);
    assert_error(&server.delete(&format!("{SNAPSHOTS}/a")), 409, "in_use");
    drop(reader);
    wait_until("it can be deleted", PATIENCE, || {
        server.delete(&format!("{SNAPSHOTS}/a")).status == 200
    });
    check_tidy(&server);
}

#[test]
fn a_full_disk_leaves_nothing_of_an_import() {
    let disk = TempDir::new();
    let Some(_disk) = Mount::tmpfs(disk.path(), "size=2m,mode=755") else {
        skip!("mounting a small tmpfs needs root");
    };
    let place = disk.join("snapshots");
    needs_store!(server, "SBX_SNAPSHOTS_DIR" = &place);
    let content = random_bytes(1 << 20, 1);
    let half = archive(&[file("a", &content)]);
    let whole = archive(&[file("a", &content), file("b", &content)]);
    let config = serde_json::json!({});
    for (what, archive) in [
        ("a root", &whole),
        // Its archive has room, and the tree of its layer besides that has none.
        ("an image", &of_layer(&half, &config)),
    ] {
        assert_error(&put(&server, "a", archive), 507, "no_space");
        wait_until("nothing is left", PATIENCE, || names_in(&place).is_empty());
        assert_eq!(listed(&server), Vec::<Value>::new(), "{what}");
    }
    made(&server, "a", &half);
}

#[test]
fn a_start_without_room_for_the_store_goes_on_and_tries_again() {
    let disk = TempDir::new();
    let Some(_disk) = Mount::tmpfs(disk.path(), "size=1m,nr_inodes=20,mode=755") else {
        skip!("mounting a small tmpfs needs root");
    };
    // Directories take places alone.
    let fill = |number: u32| fs::create_dir(disk.path().join(number.to_string()));
    let filled = (0..100).take_while(|number| fill(*number).is_ok()).count();
    assert!(filled > 10);
    needs_store!(server, "SBX_SNAPSHOTS_DIR" = disk.join("snapshots"));
    let whole = archive(&[file("a", b"1")]);
    assert_error(&put(&server, "a", &whole), 507, "no_space");
    assert_eq!(listed(&server), Vec::<Value>::new());
    assert_eq!(server.sandbox().sh("echo well"), "well\n");
    for number in 0..10 {
        fs::remove_dir(disk.path().join(number.to_string())).unwrap();
    }
    made(&server, "a", &whole);
}
