//! Hostile archives: nothing of them gets out of the tree, and nothing is left of one that is refused.

use std::fs;
use std::os::unix::fs::MetadataExt;

use serde_json::Value;

use super::{
    Member, SNAPSHOTS, archive, attributes_of, begin, file, id_of, listed, made, needs_store, put,
    store, with,
};
use crate::archives::Tar;
use crate::fixture::{PATIENCE, Server, TempDir, assert_error, names_in, wait_until};

/// The store is as it was, and the server well.
#[track_caller]
fn check_nothing_left(server: &Server, what: &str) {
    let store = store(server);
    wait_until("nothing is left", PATIENCE, || names_in(&store).is_empty());
    assert_eq!(listed(server), Vec::<Value>::new(), "{what}");
    assert_eq!(server.get("/health").status, 200, "{what}");
}

#[test]
fn no_archive_gets_out_of_its_tree() {
    let outside = TempDir::new();
    let victim = outside.path().join("victim");
    fs::write(&victim, "kept").unwrap();
    let (directory, victim) = (outside.join(""), victim.to_str().unwrap().to_owned());
    let up = format!("{}{}", "../".repeat(30), victim.trim_start_matches('/'));
    needs_store!(server);
    let link = |name, link| Member {
        typeflag: b'2',
        name,
        link,
        ..Member::default()
    };
    let hard = |name, link| Member {
        typeflag: b'1',
        name,
        link,
        ..Member::default()
    };
    let attacks: [(&str, Vec<Member<'_>>); 16] = [
        ("absolute", vec![file(&victim, b"x")]),
        ("up", vec![file(&up, b"x")]),
        ("up inside", vec![file("a/../../b", b"x")]),
        (
            "through a link",
            vec![link("out", &directory), file("out/victim", b"x")],
        ),
        (
            "through a relative link",
            vec![link("out", ".."), file("out/x", b"x")],
        ),
        (
            "through a chain",
            vec![
                link("a", "b"),
                link("b", &directory),
                file("a/victim", b"x"),
            ],
        ),
        (
            "a directory that is a link",
            vec![
                link("out", &directory),
                Member {
                    typeflag: b'5',
                    mode: 0o777,
                    ..file("out/", b"")
                },
                hard("got", "out/victim"),
            ],
        ),
        ("a hard link out", vec![hard("got", &victim)]),
        ("a hard link up", vec![hard("got", &up)]),
        (
            "a hard link through a link",
            vec![link("out", &directory), hard("got", "out/victim")],
        ),
        ("a hard link to nothing", vec![hard("got", "never")]),
        (
            "a pipe through a link",
            vec![
                link("out", &directory),
                Member {
                    typeflag: b'6',
                    ..file("out/pipe", b"")
                },
            ],
        ),
        ("a name with NUL", vec![link("a", "")]),
        (
            "a file where a directory is",
            vec![file("a/b", b"x"), file("a", b"x")],
        ),
        (
            "a directory where a file is",
            vec![file("a", b"x"), file("a/b", b"x")],
        ),
        (
            "the name of the root",
            vec![file("./", b"x"), hard(".", "a")],
        ),
    ];
    for (what, members) in &attacks {
        let reply = put(&server, "a", &archive(members));
        assert!(
            (400..=409).contains(&reply.status),
            "{what}: {}",
            reply.text()
        );
        assert_eq!(fs::read_to_string(&victim).unwrap(), "kept", "{what}");
        assert_eq!(names_in(outside.path()), ["victim"], "{what}");
        check_nothing_left(&server, what);
    }
    // A link that leads out is no harm by itself: it leads where it does inside of a sandbox.
    let id = id_of(&made(&server, "a", &archive(&[link("out", &directory)])));
    let found = fs::read_link(store(&server).join(id).join("out")).unwrap();
    assert_eq!(found.to_str().unwrap(), directory);
}

#[test]
fn ids_that_no_sandbox_has_are_refused() {
    needs_store!(server);
    for owner in [(65_536, 0), (0, 65_536), (1_000_000, 1_000_000)] {
        let reply = put(
            &server,
            "a",
            &archive(&[Member {
                owner,
                ..file("a", b"")
            }]),
        );
        assert_error(&reply, 400, "bad_request");
        assert!(reply.text().contains("65535"), "{}", reply.text());
        check_nothing_left(&server, "an id");
    }
    // As pax says it, and in base 256.
    let pax = Tar::default().pax(&[("uid", b"65536")]);
    let reply = put(&server, "a", &with(pax, &[file("a", b"")]).end());
    assert_error(&reply, 400, "bad_request");
    let last = Member {
        owner: (65_535, 65_535),
        ..file("a", b"")
    };
    made(&server, "a", &archive(&[last]));
}

#[test]
fn an_archive_that_is_cut_anywhere_leaves_nothing() {
    needs_store!(server);
    let directory = Member {
        typeflag: b'5',
        ..file("d/", b"")
    };
    let whole = archive(&[directory, file("d/one", &[b'x'; 700]), file("two", b"2")]);
    for end in (0..whole.len())
        .step_by(97)
        .chain([whole.len() - 1, whole.len() - 512])
    {
        let reply = put(&server, "a", &whole[..end]);
        assert_error(&reply, 400, "bad_archive");
    }
    check_nothing_left(&server, "cut");
    for other in [&b"PK\x03\x04"[..], b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0"] {
        let reply = put(&server, "a", &[other, &[0; 1024]].concat());
        assert_error(&reply, 415, "unsupported");
    }
    // The client is gone in the middle.
    for end in [10, 600, 1500] {
        drop(begin(&server, "a", &whole, end));
        check_nothing_left(&server, "gone");
    }
    let missing = server.request("PUT", &format!("{SNAPSHOTS}?name=a"), b"");
    assert!([400, 411].contains(&missing.status), "{}", missing.text());
    made(&server, "a", &whole);
}

#[test]
fn a_name_that_comes_twice_is_the_last_one() {
    needs_store!(server);
    let suid = Member {
        mode: 0o4755,
        ..file("a", b"first")
    };
    let hard = Member {
        typeflag: b'1',
        link: "a",
        ..file("b", b"")
    };
    let link = Member {
        typeflag: b'2',
        link: "a",
        ..file("c", b"")
    };
    let pipe = Member {
        typeflag: b'6',
        ..file("d", b"")
    };
    let again = [
        file("a", b"second"),
        file("c", b"no link"),
        file("d", b"no pipe"),
    ];
    let members: Vec<_> = [suid, hard, link, pipe].into_iter().chain(again).collect();
    let tree = store(&server).join(id_of(&made(&server, "a", &archive(&members))));
    let read = |name: &str| {
        let status = fs::symlink_metadata(tree.join(name)).unwrap();
        assert!(status.is_file(), "{name}");
        (
            fs::read_to_string(tree.join(name)).unwrap(),
            status.mode() & 0o7777,
        )
    };
    assert_eq!(read("a"), ("second".to_owned(), 0o644));
    // The other name of the first file still is that file.
    assert_eq!(read("b"), ("first".to_owned(), 0o4755));
    assert_eq!(read("c"), ("no link".to_owned(), 0o644));
    assert_eq!(read("d"), ("no pipe".to_owned(), 0o644));
}

#[test]
fn attributes_that_the_kernel_refuses_end_an_import() {
    needs_store!(server);
    let bad: &[(&str, &[u8])] = &[("SCHILY.xattr.security.capability", b"nonsense")];
    let tar = with(Tar::default().pax(bad), &[file("a", b"")]);
    assert_error(&put(&server, "a", &tar.end()), 400, "bad_archive");
    check_nothing_left(&server, "attributes");
    // Those of others are dropped, whatever they say.
    let others: &[(&str, &[u8])] = &[
        ("SCHILY.xattr.security.ima", b"nonsense"),
        ("SCHILY.xattr.system.posix_acl_access", b"nonsense"),
        ("SCHILY.xattr.trusted.overlay.metacopy", b""),
        ("SCHILY.xattr.user.overlay.metacopy", b""),
    ];
    let tar = with(Tar::default().pax(others), &[file("a", b"")]);
    let id = id_of(&made(&server, "a", &tar.end()));
    assert_eq!(attributes_of(&store(&server).join(id).join("a")), []);
}
