//! What an archive of a root keeps, in and out; names, documents and pages.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::{
    Member, SNAPSHOTS, archive, attributes_of, check_tidy, contents, file, id_of, listed, made,
    needs_store, put, store, store_of, with,
};
use crate::archives::Tar;
use crate::fixture::{Builder, PATIENCE, Server, TempDir, assert_error};
use crate::host::in_place_of;

/// A capability of a file (`VFS_CAP_REVISION_2`, effective): to open raw sockets.
const CAPABILITY: &[u8] = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// An archive with everything that a root may have.
fn rich() -> Vec<u8> {
    let directory = |name, mode| Member {
        typeflag: b'5',
        name,
        mode,
        ..Member::default()
    };
    let tar = with(
        Tar::default(),
        &[
            directory("./", 0o755),
            directory("tmp/", 0o1777),
            directory("closed/", 0o500),
            Member {
                owner: (65_535, 1000),
                mode: 0o600,
                ..file("closed/of-last", b"mine")
            },
            Member {
                mode: 0o4755,
                ..file("su", b"program")
            },
            Member {
                mode: 0o2755,
                owner: (0, 50),
                ..file("setgid", b"program")
            },
            Member {
                typeflag: b'1',
                link: "su",
                ..file("same", b"")
            },
            Member {
                typeflag: b'2',
                link: "/etc/passwd",
                mode: 0o777,
                owner: (7, 8),
                ..file("link", b"")
            },
            Member {
                typeflag: b'6',
                mode: 0o622,
                owner: (5, 6),
                ..file("pipe", b"")
            },
            Member {
                typeflag: b'3',
                ..file("null", b"")
            },
            Member {
                typeflag: b'4',
                ..file("disk", b"")
            },
            file(".wh.gone", b"no whiteout"),
            file(".wh..wh..opq", b""),
        ],
    );
    let attributes: &[(&str, &[u8])] = &[
        ("SCHILY.xattr.user.note", b"a\0b"),
        ("SCHILY.xattr.security.capability", CAPABILITY),
        ("SCHILY.xattr.user.overlay.redirect", b"/etc"),
        ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
        ("SCHILY.xattr.trusted.mine", b"y"),
    ];
    let tar = with(tar.pax(attributes), &[file("ping", b"program")]);
    let of_directory: &[(&str, &[u8])] = &[("SCHILY.xattr.user.kind", b"directory")];
    with(tar.pax(of_directory), &[directory("marked/", 0o755)]).end()
}

#[test]
fn a_root_comes_in_and_goes_out_as_it_is() {
    needs_store!(server);
    let document = made(&server, "rich", &rich());
    let id = id_of(&document);
    let tree = store(&server).join(&id);
    let mode = |name: &str| fs::symlink_metadata(tree.join(name)).unwrap().mode() & 0o7777;
    let owner = |name: &str| {
        let status = fs::symlink_metadata(tree.join(name)).unwrap();
        (status.uid(), status.gid())
    };
    for (name, expected, of) in [
        ("", 0o755, (0, 0)),
        ("tmp", 0o1777, (0, 0)),
        ("closed", 0o500, (0, 0)),
        ("closed/of-last", 0o600, (65_535, 1000)),
        ("su", 0o4755, (0, 0)),
        ("same", 0o4755, (0, 0)),
        ("setgid", 0o2755, (0, 50)),
        ("pipe", 0o622, (5, 6)),
    ] {
        assert_eq!((mode(name), owner(name)), (expected, of), "{name}");
    }
    assert_eq!(owner("link"), (7, 8));
    assert_eq!(
        fs::read_link(tree.join("link")).unwrap(),
        Path::new("/etc/passwd")
    );
    assert!(
        fs::symlink_metadata(tree.join("pipe"))
            .unwrap()
            .file_type()
            .is_fifo()
    );
    let inode = |name: &str| fs::metadata(tree.join(name)).unwrap().ino();
    assert_eq!(inode("same"), inode("su"));
    // A whiteout is one only in a layer of an image.
    assert_eq!(fs::read(tree.join(".wh.gone")).unwrap(), b"no whiteout");
    assert!(tree.join(".wh..wh..opq").exists());
    for name in ["null", "disk"] {
        assert!(!tree.join(name).exists(), "{name}");
    }
    let kept = [
        ("security.capability".to_owned(), CAPABILITY.to_vec()),
        ("user.note".to_owned(), b"a\0b".to_vec()),
    ];
    assert_eq!(attributes_of(&tree.join("ping")), kept);
    let of_directory = [("user.kind".to_owned(), b"directory".to_vec())];
    assert_eq!(attributes_of(&tree.join("marked")), of_directory);
    let expected = json!({
        "id": id, "name": "rich", "created_at_ms": document["created_at_ms"], "kind": "root", "stored": "tree",
        "files": 7, "bytes": 4 + 7 + 7 + 11 + 7, "skipped": 2, "settings": { "env": [], "cwd": null, "user": null },
    });
    assert_eq!(document, expected);
    for key in ["rich", &id] {
        assert_eq!(
            server.get(&format!("{SNAPSHOTS}/{key}")).json(),
            expected,
            "{key}"
        );
    }
    // And out again, twice over.
    for format in ["tar", "tar.gz"] {
        let target = format!("{SNAPSHOTS}/rich/archive?format={format}");
        let out = server.get(&target);
        assert_eq!(out.status, 200, "{}", out.text());
        let again = id_of(&made(&server, "again", &out.body));
        assert_eq!(
            contents(&store(&server).join(again)),
            contents(&tree),
            "{format}"
        );
    }
    let head = server.request("HEAD", &format!("{SNAPSHOTS}/rich/archive"), b"");
    assert_eq!((head.status, head.body.len()), (200, 0));
    check_tidy(&server);
}

#[test]
fn nobody_but_root_reaches_what_is_in_the_store() {
    needs_store!(server);
    let suid = Member {
        mode: 0o4755,
        ..file("su", b"#!/bin/sh\nid -u\n")
    };
    let id = id_of(&made(&server, "box", &archive(&[suid])));
    let store = store(&server);
    let status = fs::metadata(&store).unwrap();
    assert_eq!((status.uid(), status.mode() & 0o7777), (0, 0o700));
    let program = store.join(&id).join("su");
    assert_eq!(fs::metadata(&program).unwrap().mode() & 0o7777, 0o4755);
    let shown = program.display();
    let landlock = server.sandbox_with(&json!({ "isolation": "landlock" }));
    for command in [
        format!("cat {shown}"),
        shown.to_string(),
        format!("ls {}", store.display()),
    ] {
        let outcome = landlock.exec(&json!({ "cmd": command }));
        assert_ne!(outcome.code(), Some(0), "{command}: {outcome:?}");
    }
    // And of the machine's own users, whom no Landlock keeps out.
    let ran = Command::new("/bin/cat")
        .arg(&program)
        .uid(40_001)
        .gid(40_001)
        .output()
        .unwrap();
    assert!(!ran.status.success() && ran.stdout.is_empty(), "{ran:?}");
    let asked = json!({ "read_only_paths": [store] });
    assert_error(&server.post("/v1/sandboxes", &asked), 403, "forbidden");
}

#[test]
fn a_new_snapshot_takes_a_name_over_and_the_old_one_keeps_its_id() {
    needs_store!(server);
    let first = id_of(&made(&server, "a", &archive(&[file("one", b"1")])));
    let second = id_of(&made(&server, "a", &archive(&[file("two", b"2")])));
    assert_ne!(first, second);
    let named = |key: &str| server.get(&format!("{SNAPSHOTS}/{key}")).json()["name"].clone();
    assert_eq!((named(&first), named(&second)), (Value::Null, json!("a")));
    assert_eq!(id_of(&server.get(&format!("{SNAPSHOTS}/a")).json()), second);
    let of_name = server.get(&format!("{SNAPSHOTS}?name=a")).json();
    assert_eq!(of_name["snapshots"].as_array().unwrap().len(), 1);
    // Archives of roots seldom name the root: everybody may enter it.
    let tree = store(&server).join(&second);
    assert_eq!(fs::metadata(tree).unwrap().mode() & 0o7777, 0o755);
    // Without a name.
    let reply = server.put(SNAPSHOTS, &archive(&[file("three", b"3")]));
    assert_eq!((reply.status, &reply.json()["name"]), (201, &Value::Null));
    let deleted = server.delete(&format!("{SNAPSHOTS}/a")).json();
    assert_eq!(deleted, json!({ "id": second, "deleted": true }));
    for key in ["a", &second] {
        for method in ["GET", "DELETE"] {
            let reply = server.request(method, &format!("{SNAPSHOTS}/{key}"), b"");
            assert_error(&reply, 404, "not_found");
        }
        let reply = server.get(&format!("{SNAPSHOTS}/{key}/archive"));
        assert_error(&reply, 404, "not_found");
    }
    assert_eq!(listed(&server).len(), 2);
    check_tidy(&server);
}

#[test]
fn names_that_are_none_are_refused() {
    needs_store!(server);
    let archive = archive(&[file("one", b"1")]);
    let long = "a".repeat(65);
    for name in [
        "",
        "A",
        "a/b",
        "a%20b",
        "%C3%A9",
        "a%00",
        ".",
        "..",
        &long,
        "s-0123456789abcdef01234567",
    ] {
        assert_error(&put(&server, name, &archive), 400, "bad_request");
    }
    let longest = "a".repeat(64);
    for name in ["0", "._-", &longest, "s-0", "s-0123456789abcdef0123456"] {
        made(&server, name, &archive);
    }
    check_tidy(&server);
}

#[test]
fn a_list_has_pages() {
    needs_store!(server);
    let archive = archive(&[file("one", b"1")]);
    let ids: Vec<_> = ["a", "b", "c"]
        .map(|name| id_of(&made(&server, name, &archive)))
        .into();
    assert_eq!(listed(&server).iter().map(id_of).collect::<Vec<_>>(), ids);
    let page = |rest: &str| {
        let page = server.get(&format!("{SNAPSHOTS}?{rest}")).json();
        let found = page["snapshots"]
            .as_array()
            .unwrap()
            .iter()
            .map(id_of)
            .collect::<Vec<_>>();
        (found, page["next"].clone())
    };
    assert_eq!(page("limit=2"), (ids[..2].to_vec(), json!(ids[1])));
    assert_eq!(
        page(&format!("limit=2&after={}", ids[1])),
        (ids[2..].to_vec(), Value::Null)
    );
    assert_eq!(
        page(&format!("after={}", ids[2])),
        (Vec::new(), Value::Null)
    );
    assert_eq!(page("name=b"), (ids[1..2].to_vec(), Value::Null));
    assert_eq!(page("name=nobody"), (Vec::new(), Value::Null));
    for (rest, status, code) in [
        ("limit=0", 400, "bad_request"),
        ("limit=1001", 400, "bad_request"),
        ("after=s-0", 404, "not_found"),
        ("sort=name", 400, "bad_request"),
    ] {
        let reply = server.get(&format!("{SNAPSHOTS}?{rest}"));
        assert_error(&reply, status, code);
    }
}

#[test]
fn snapshots_survive_the_server() {
    needs_store!(server);
    let (old, new) = (archive(&[file("one", b"1")]), archive(&[file("two", b"2")]));
    made(&server, "a", &old);
    made(&server, "a", &new);
    made(&server, "b", &new);
    let gone = id_of(&made(&server, "c", &new));
    assert_eq!(server.delete(&format!("{SNAPSHOTS}/c")).status, 200);
    let before = listed(&server);
    assert_eq!(before.len(), 3);
    for signal in [libc::SIGKILL, libc::SIGTERM] {
        let place = server.place.take().unwrap();
        server.signal(signal);
        server.wait_for_exit(PATIENCE);
        // What somebody else has put there is left alone.
        fs::write(store_of(&place).join("notes"), "mine").unwrap();
        fs::create_dir_all(store_of(&place).join("s-mine")).unwrap();
        server = in_place_of(&place).start();
        server.place = Some(place);
        assert_eq!(listed(&server), before);
        assert_eq!(
            fs::read_to_string(store(&server).join("notes")).unwrap(),
            "mine"
        );
        assert!(store(&server).join("s-mine").exists());
        assert!(!store(&server).join(&gone).exists());
    }
    // One whose record is not whole, or of a later version, is not shown, and not removed.
    let broken = id_of(&before[0]);
    let record = store(&server).join(format!("{broken}.record"));
    let place = server.place.take().unwrap();
    server.signal(libc::SIGKILL);
    server.wait_for_exit(PATIENCE);
    let text = fs::read(&record).unwrap();
    fs::write(&record, &text[..text.len() / 2]).unwrap();
    server = in_place_of(&place).start();
    server.place = Some(place);
    assert_eq!(listed(&server), before[1..]);
    assert!(store(&server).join(&broken).exists());
    assert!(server.log().contains(&broken), "{}", server.log());
}

#[test]
fn the_operator_chooses_the_place() {
    let directory = TempDir::new();
    let chosen = directory.path().join("deep/store");
    needs_store!(server, "SBX_SNAPSHOTS_DIR" = chosen.display());
    let id = id_of(&made(&server, "a", &archive(&[file("one", b"1")])));
    assert_eq!(fs::read(chosen.join(&id).join("one")).unwrap(), b"1");
    assert_eq!(fs::metadata(&chosen).unwrap().mode() & 0o7777, 0o700);
    assert!(!store(&server).exists());
    // No two servers have one store, and none has one that others can enter.
    let refused = |builder: Builder| {
        let output = builder
            .env("SBX_SNAPSHOTS_DIR", chosen.display())
            .command()
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let text = refused(Server::host());
    assert!(
        text.contains("another server has its snapshots there"),
        "{text}"
    );
    let place = server.place.take().unwrap();
    server.signal(libc::SIGTERM);
    server.wait_for_exit(PATIENCE);
    fs::set_permissions(&chosen, fs::Permissions::from_mode(0o755)).unwrap();
    let text = refused(in_place_of(&place));
    assert!(text.contains("SBX_SNAPSHOTS_DIR"), "{text}");
}
