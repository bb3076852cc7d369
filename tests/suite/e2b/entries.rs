//! What files are, and changes to directories.

use std::os::unix::fs::{PermissionsExt, symlink};

use serde_json::{Value, json};

use super::{Door, everywhere, machine, on_a_host};
use crate::fixture::TempDir;

const STAT: &str = "/filesystem.Filesystem/Stat";
const LIST: &str = "/filesystem.Filesystem/ListDir";
const MAKE: &str = "/filesystem.Filesystem/MakeDir";
const MOVE: &str = "/filesystem.Filesystem/Move";
const REMOVE: &str = "/filesystem.Filesystem/Remove";

fn at(path: &str) -> Value {
    json!({ "path": path })
}

/// A directory in the home, and its path as commands see it.
fn directory(door: &Door<'_>, name: &str) -> String {
    door.ok(REMOVE, &at(name));
    let made = door.ok(MAKE, &at(name));
    made["entry"]["path"].as_str().unwrap().to_owned()
}

#[test]
fn a_file_is_described_as_commands_see_it() {
    everywhere(|door| {
        let place = directory(door, "e2b-stat");
        door.sh(&format!(
            "cd {place} && printf hello > f && chmod 640 f && touch -d 2026-01-31T12:00:00.5Z f"
        ));
        for path in [
            "e2b-stat/f",
            "~/e2b-stat/f",
            "./e2b-stat//f",
            &format!("{place}/f"),
        ] {
            let entry = &door.ok(STAT, &at(path))["entry"];
            assert_eq!(entry["name"], "f");
            assert_eq!(entry["type"], "FILE_TYPE_FILE");
            assert_eq!(entry["path"], format!("{place}/f"));
            assert_eq!(entry["size"], "5");
            assert_eq!(entry["mode"], 0o640);
            assert_eq!(entry["permissions"], "-rw-r-----");
            assert_eq!(entry["modifiedTime"], "2026-01-31T12:00:00.500Z");
            // In a sandbox that is the name of the user in E2B's images.
            let own = match &*door.id {
                "machine" => door.sh("echo $USER").text(),
                _ => "user".to_owned(),
            };
            assert_eq!(
                (&entry["owner"], &entry["group"]),
                (&own.trim().into(), &own.trim().into())
            );
        }
        let entry = &door.ok(STAT, &at("e2b-stat/"))["entry"];
        assert_eq!(
            (&entry["type"], &entry["path"]),
            (&"FILE_TYPE_DIRECTORY".into(), &place.as_str().into())
        );
        for path in ["e2b-stat/none", "e2b-stat/f/below", "e2b-stat/none/below"] {
            door.fails(STAT, &at(path), 404, "not_found");
        }
        for path in ["", "~other/x", "a\0b"] {
            door.fails(STAT, &at(path), 400, "invalid_argument");
        }
        door.ok(REMOVE, &at("e2b-stat"));
    });
}

#[test]
fn a_directory_is_listed_to_its_depth() {
    everywhere(|door| {
        let place = directory(door, "e2b-list");
        door.sh(&format!("cd {place} && mkdir -p a/b/c && touch a/1 a/b/2 a/b/c/3 z '.hidden' 'sp ace'; ln -s a link"));
        let names = |depth: Value| -> Vec<String> {
            let message = json!({ "path": "e2b-list", "depth": depth });
            let entries = door.ok(LIST, &message);
            let entries = entries["entries"].as_array().unwrap();
            let path = |entry: &Value| {
                let path = entry["path"].as_str().unwrap();
                path.strip_prefix(&format!("{place}/")).unwrap().to_owned()
            };
            entries.iter().map(path).collect()
        };
        let first = [".hidden", "a", "link", "sp ace", "z"];
        for depth in [Value::Null, json!(0), json!(1)] {
            assert_eq!(names(depth), first);
        }
        assert_eq!(
            names(json!(2)),
            [".hidden", "a", "a/1", "a/b", "link", "sp ace", "z"]
        );
        let all = [
            ".hidden", "a", "a/1", "a/b", "a/b/2", "a/b/c", "a/b/c/3", "link", "sp ace", "z",
        ];
        assert_eq!(names(json!(4_294_967_295_u32)), all);
        door.fails(LIST, &at("e2b-list/z"), 400, "invalid_argument");
        door.fails(LIST, &at("e2b-list/none"), 404, "not_found");
        door.fails(
            LIST,
            &json!({ "path": "e2b-list", "depth": -1 }),
            400,
            "invalid_argument",
        );
        door.ok(REMOVE, &at("e2b-list"));
    });
}

#[test]
fn directories_are_made_moved_and_removed() {
    everywhere(|door| {
        let place = directory(door, "e2b-dirs");
        let made = door.ok(MAKE, &at("e2b-dirs/x/y"));
        assert_eq!(made["entry"]["path"], format!("{place}/x/y"));
        door.fails(MAKE, &at("e2b-dirs/x/y"), 409, "already_exists");
        door.fails(MAKE, &at("e2b-dirs/x"), 409, "already_exists");
        door.sh(&format!("echo 1 > {place}/x/f"));
        door.fails(MAKE, &at("e2b-dirs/x/f"), 400, "invalid_argument");
        let moving = json!({ "source": "e2b-dirs/x", "destination": "e2b-dirs/new/parent/z" });
        let moved = door.ok(MOVE, &moving);
        assert_eq!(moved["entry"]["path"], format!("{place}/new/parent/z"));
        door.fails(MOVE, &moving, 404, "not_found");
        door.fails(
            MOVE,
            &json!({ "destination": "x" }),
            400,
            "invalid_argument",
        );
        assert_eq!(
            door.sh(&format!("cat {place}/new/parent/z/f")).text(),
            "1\n"
        );
        for _ in 0..2 {
            assert_eq!(door.ok(REMOVE, &at("e2b-dirs/new")), json!({}));
        }
        door.fails(STAT, &at("e2b-dirs/new"), 404, "not_found");
        door.ok(REMOVE, &at("e2b-dirs"));
    });
}

#[test]
fn links_are_followed_on_a_machine_and_named_in_a_sandbox() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    let place = TempDir::new();
    std::fs::write(place.path().join("f"), "hello").unwrap();
    std::fs::set_permissions(place.path().join("f"), PermissionsExt::from_mode(0o600)).unwrap();
    symlink("f", place.path().join("link")).unwrap();
    symlink("none", place.path().join("dangling")).unwrap();
    let entry = &door.ok(STAT, &at(&place.join("link")))["entry"];
    assert_eq!(entry["type"], "FILE_TYPE_FILE");
    assert_eq!(
        (&entry["mode"], &entry["size"]),
        (&0o600.into(), &"5".into())
    );
    assert_eq!(entry["symlinkTarget"], place.join("f"));
    assert_eq!(entry["isSymlink"], true);
    let entry = &door.ok(STAT, &at(&place.join("dangling")))["entry"];
    assert_eq!(entry["type"], "FILE_TYPE_SYMLINK");
    assert_eq!(entry["symlinkTarget"], place.join("none"));

    on_a_host(|server| {
        let door = Door::open(server);
        let home = door.sh("pwd").text().trim().to_owned();
        let above = home.rsplit_once('/').unwrap().0;
        door.sh(
            "ln -s /etc/passwd out; ln -s .. up; echo hi > f; chmod 640 f; ln -s f in; ln -s ./in in2; ln -s \"$PWD\" home; \
             ln -s none dangling; ln -s round round; mkdir d; ln -s ../f d/in; ln -s /home/user/d usual",
        );
        let own = |name: &str| format!("{home}/{name}");
        for (name, kind, target) in [
            ("out", "SYMLINK", "/etc/passwd".to_owned()),
            ("up", "SYMLINK", above.to_owned()),
            ("in", "FILE", own("f")),
            ("in2", "FILE", own("f")),
            ("d/in", "FILE", own("f")),
            ("home", "DIRECTORY", home.clone()),
            ("usual", "DIRECTORY", own("d")),
            ("dangling", "SYMLINK", own("none")),
            ("round", "SYMLINK", own("round")),
        ] {
            let entry = &door.ok(STAT, &at(name))["entry"];
            assert_eq!(entry["type"], format!("FILE_TYPE_{kind}"), "{entry}");
            assert_eq!(entry["symlinkTarget"], target, "{entry}");
            assert_eq!(entry["isSymlink"], true, "{entry}");
            assert_eq!(
                (&entry["owner"], &entry["group"]),
                (&"user".into(), &"user".into())
            );
            if kind == "FILE" {
                assert_eq!(
                    (&entry["mode"], &entry["size"]),
                    (&0o640.into(), &"3".into())
                );
            }
            if !name.contains('/') {
                let listed = door.ok(LIST, &at("."));
                assert!(
                    listed["entries"].as_array().unwrap().contains(entry),
                    "{listed}"
                );
            }
        }
        door.fails(LIST, &at("up"), 403, "permission_denied");
        door.fails(STAT, &at("up/x"), 403, "permission_denied");
    });
}

#[test]
fn nothing_outside_of_the_home_is_reached() {
    on_a_host(|server| {
        let door = Door::open(server);
        let other = Door::open(server);
        other.sh("echo secret > s");
        let home = other.ok(STAT, &at("~"))["entry"]["path"]
            .as_str()
            .unwrap()
            .to_owned();
        for path in [
            "/etc/passwd",
            "/",
            "/home/username",
            &format!("{home}/s"),
            &format!("/home/user/../{}/s", other.id),
            &format!("../{}/s", other.id),
            &format!("~/../{}/s", other.id),
            "..",
        ] {
            for method in [STAT, LIST, MAKE, REMOVE] {
                let text = door.fails(method, &at(path), 403, "permission_denied");
                assert!(!text.contains("secret"), "{text}");
            }
            let moving = json!({ "source": path, "destination": "stolen" });
            door.fails(MOVE, &moving, 403, "permission_denied");
            let moving = json!({ "source": "~/.tmp", "destination": path });
            door.fails(MOVE, &moving, 403, "permission_denied");
        }
        let text = door.fails(STAT, &at("/etc/passwd"), 403, "permission_denied");
        let own = door.ok(STAT, &at("~"))["entry"]["path"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(text.contains(&own), "it names the home: {text}");
        assert_eq!(other.sh("cat s").text(), "secret\n");
        // The home in E2B's images stands for the home.
        door.ok(MAKE, &at("/home/user/d"));
        assert_eq!(door.sh("ls -d d").text(), "d\n");
        assert_eq!(
            door.ok(STAT, &at("/home/user/d"))["entry"]["path"],
            format!("{own}/d")
        );
    });
}

#[test]
fn messages_are_read_as_protobuf_has_them() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    // Unknown fields, null for absent ones, an empty message.
    let message = json!({ "path": "/tmp", "depth": null, "new": { "a": [1] } });
    door.ok(LIST, &message);
    assert!(door.ok("/process.Process/List", &json!({}))["processes"].is_array());
    let headers = [
        ("content-type", "application/json; charset=utf-8"),
        ("content-encoding", "identity"),
    ];
    assert_eq!(
        door.request("POST", STAT, &headers, b"{\"path\":\"/\"}")
            .status,
        200
    );
    for (headers, status, code) in [
        (
            &[("content-type", "application/proto")][..],
            415,
            "invalid_argument",
        ),
        (
            &[("content-type", "application/connect+json")],
            415,
            "invalid_argument",
        ),
        (&[], 415, "invalid_argument"),
        (
            &[
                ("content-type", "application/json"),
                ("content-encoding", "gzip"),
            ],
            501,
            "unimplemented",
        ),
    ] {
        let reply = door.request("POST", STAT, headers, b"{\"path\":\"/\"}");
        assert_eq!((reply.status, reply.code().as_str()), (status, code));
        if status == 415 {
            let accepted = reply.header("accept-post");
            assert_eq!(accepted, Some("application/json, application/connect+json"));
        }
    }
    let headers = [("content-type", "application/json")];
    for body in [
        &b"{"[..],
        b"[]",
        b"7",
        b"{\"path\":7}",
        b"{\"path\":[\"/\"]}",
        b"\xff",
    ] {
        let reply = door.request("POST", STAT, &headers, body);
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (400, "invalid_argument")
        );
    }
    let reply = door.request("GET", STAT, &headers, b"");
    assert_eq!(
        (reply.status, reply.header("allow")),
        (405, Some("POST, OPTIONS"))
    );
    assert_eq!(
        door.request("POST", "/filesystem.Filesystem/None", &headers, b"{}")
            .status,
        404
    );
}
