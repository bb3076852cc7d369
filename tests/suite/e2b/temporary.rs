//! `/tmp`: in a sandbox with namespaces clients reach the one that its commands have.

use std::os::unix::fs::{PermissionsExt, symlink};

use serde_json::{Value, json};

use super::{Door, api, on_a_host};
use crate::fixture::{PATIENCE, TempDir, assert_error, wait_until};
use crate::namespaces::{Way, can_be_had};

const STAT: &str = "/filesystem.Filesystem/Stat";
const LIST: &str = "/filesystem.Filesystem/ListDir";
const MAKE: &str = "/filesystem.Filesystem/MakeDir";
const MOVE: &str = "/filesystem.Filesystem/Move";
const REMOVE: &str = "/filesystem.Filesystem/Remove";
const RAW: [(&str, &str); 1] = [("content-type", "application/octet-stream")];

/// Does the same in each way to make namespaces.
#[track_caller]
fn in_namespaces(check: impl Fn(&Door<'_>)) {
    if !crate::fixture::is_root() || !can_be_had() {
        crate::skip!("needs root, and the rights to make namespaces");
    }
    for way in Way::BOTH {
        let server = way.builder().env("SBX_ISOLATION", "namespaces").start();
        check(&Door::open(&server));
    }
}

fn at(path: &str) -> Value {
    json!({ "path": path })
}

#[track_caller]
fn upload(door: &Door<'_>, path: &str, content: &[u8]) {
    let reply = door.request("POST", &format!("/files?path={path}"), &RAW, content);
    assert_eq!(reply.status, 200, "{path}: {}", reply.text());
    assert_eq!(reply.json()[0]["path"], path);
}

#[track_caller]
fn download(door: &Door<'_>, path: &str) -> String {
    let reply = door.request("GET", &format!("/files?path={path}"), &[], b"");
    assert_eq!(reply.status, 200, "{path}: {}", reply.text());
    reply.text()
}

/// It ends when its sandbox is stopped, but for an upload that goes on: of those there are no more than two.
#[test]
fn uploads_into_those_of_ended_runs_do_not_add_up() {
    in_namespaces(|door| {
        let change = |route: &str, body: Value| {
            let target = format!("/v1/sandboxes/{}/{route}", door.id);
            let body = body.to_string();
            door.server.request("POST", &target, body.as_bytes())
        };
        let mut uploads = Vec::new();
        for run in 1..=2 {
            let mut client = door.connect();
            let headers = [
                ("e2b-sandbox-id", &*door.id),
                ("x-access-token", &door.token),
                ("content-length", "100000"),
                RAW[0],
            ];
            let before = count_unnamed(door);
            client.send_request("POST", "/files?path=/tmp/f", &headers, &[0; 9000]);
            uploads.push(client);
            wait_until("it has begun", PATIENCE, || count_unnamed(door) > before);
            assert_eq!(change("pause", json!({ "keep": "files" })).status, 200);
            if run == 1 {
                assert_eq!(change("resume", json!({})).status, 200);
            }
        }
        assert_error(&change("resume", json!({})), 503, "over_limit");
        drop(uploads.remove(0));
        let resumed = || change("resume", json!({})).status == 200;
        wait_until("one of them is gone", PATIENCE, resumed);
        assert_eq!(door.sh("ls /tmp | grep -v sbx-test").text(), "");
    });
}

/// The files without a name that the server has open.
fn count_unnamed(door: &Door<'_>) -> usize {
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", door.server.inner_pid())).unwrap();
    let targets = descriptors.filter_map(|one| std::fs::read_link(one.ok()?.path()).ok());
    targets
        .filter(|target| target.to_string_lossy().ends_with("(deleted)"))
        .count()
}

#[test]
fn files_and_commands_share_it() {
    in_namespaces(|door| {
        upload(door, "/tmp/new/dir/f", b"hello");
        assert_eq!(
            door.sh("cat /tmp/new/dir/f; stat -c %u /tmp/new/dir/f; id -u")
                .text()
                .split_once('\n')
                .map(|(first, rest)| {
                    let first = first.strip_prefix("hello").unwrap();
                    first == rest.trim()
                }),
            Some(true),
            "the file belongs to the sandbox's user"
        );
        door.sh("printf there > /tmp/by-command; mkdir /tmp/new/empty");
        assert_eq!(download(door, "/tmp/by-command"), "there");
        let entry = &door.ok(STAT, &at("/tmp/by-command"))["entry"];
        assert_eq!(
            (&entry["name"], &entry["path"], &entry["size"]),
            (&json!("by-command"), &json!("/tmp/by-command"), &json!("5"))
        );
        let listed = door.ok(LIST, &json!({ "path": "/tmp/new", "depth": 3 }));
        let paths: Vec<_> = listed["entries"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["path"].as_str().unwrap())
            .collect();
        assert_eq!(paths, ["/tmp/new/dir", "/tmp/new/dir/f", "/tmp/new/empty"]);
        let made = door.ok(MAKE, &at("/tmp/made/deep"));
        assert_eq!(made["entry"]["path"], "/tmp/made/deep");
        door.ok(REMOVE, &at("/tmp/new"));
        door.ok(REMOVE, &at("/tmp/none"));
        assert_eq!(
            door.sh("ls /tmp | grep -v sbx-test").text(),
            "by-command\nmade\n"
        );
        assert_eq!(door.ok(STAT, &at("/tmp"))["entry"]["path"], "/tmp");
        for method in [REMOVE, MAKE] {
            assert_ne!(door.call(method, &at("/tmp")).status, 200, "{method}");
        }
        door.fails(STAT, &at("/tmp/none"), 404, "not_found");
        // The home has a directory of this name besides.
        upload(door, "/tmp/one", b"1");
        door.fails(STAT, &at("tmp/one"), 404, "not_found");
    });
}

#[test]
fn files_move_between_it_and_the_home() {
    in_namespaces(|door| {
        upload(door, "/tmp/f", b"content");
        let home = door.sh("pwd").text().trim().to_owned();
        let moved = |from: &str, to: &str| {
            let message = json!({ "source": from, "destination": to });
            let moved = door.ok(MOVE, &message);
            assert_eq!(moved["entry"]["path"], to);
        };
        moved("/tmp/f", &format!("{home}/sub/f"));
        assert_eq!(
            door.sh("cat sub/f; ls /tmp | grep -v sbx-test").text(),
            "content"
        );
        moved(&format!("{home}/sub/f"), "/tmp/sub/g");
        assert_eq!(door.sh("cat /tmp/sub/g; ls sub").text(), "content");
        moved("/tmp/sub", "/tmp/other");
        assert_eq!(
            door.sh("ls /tmp /tmp/other").text().lines().last(),
            Some("g")
        );
        let into_itself = json!({ "source": "/tmp/other", "destination": "/tmp/other/below/x" });
        assert_ne!(door.call(MOVE, &into_itself).status, 200);
    });
}

#[test]
fn far_times_are_those_that_a_timestamp_can_have() {
    in_namespaces(|door| {
        // Of 64 bits, as those of tmpfs are.
        door.sh(
            "mkdir /tmp/t; touch -d @-100000000000000 /tmp/t/a; touch -d @100000000000000 /tmp/t/b",
        );
        let listed = door.ok(LIST, &json!({ "path": "/tmp/t" }));
        let times = [0, 1].map(|at| &listed["entries"][at]["modifiedTime"]);
        assert_eq!(
            times,
            ["0001-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z"]
        );
    });
}

#[test]
fn changes_are_watched() {
    in_namespaces(|door| {
        door.ok(MAKE, &at("/tmp/watched"));
        let message = json!({ "path": "/tmp/watched", "includeEntry": true });
        let id = door.ok("/filesystem.Filesystem/CreateWatcher", &message)["watcherId"].clone();
        door.sh("echo > /tmp/watched/f");
        let mut events = Vec::new();
        wait_until("the event", PATIENCE, || {
            let message = json!({ "watcherId": id });
            let found = door.ok("/filesystem.Filesystem/GetWatcherEvents", &message);
            events.extend(found["events"].as_array().unwrap().iter().cloned());
            events
                .iter()
                .any(|event| event["type"] == "EVENT_TYPE_CREATE")
        });
        assert_eq!(events[0]["name"], "f");
    });
}

#[test]
fn no_path_leads_out_of_it() {
    let outside = TempDir::new();
    std::fs::set_permissions(outside.path(), PermissionsExt::from_mode(0o777)).unwrap();
    symlink("/etc/passwd", outside.path().join("link")).unwrap();
    let secret = outside.path().join("secret");
    std::fs::write(&secret, "secret").unwrap();
    std::fs::set_permissions(&secret, PermissionsExt::from_mode(0o644)).unwrap();
    in_namespaces(|door| {
        let machine = outside.path().display().to_string();
        door.sh(&format!(
            "cd /tmp; ln -s /etc/passwd file; ln -s / root; ln -s .. up; ln -s {machine} machine; mkdir d; mkfifo pipe"
        ));
        for path in [
            "/tmp/file",
            "/tmp/root/etc/passwd",
            "/tmp/up/etc/passwd",
            "/tmp/machine/link",
            "/tmp/machine/secret",
            "/tmp/machine",
            "/tmp/d/../../etc/passwd",
        ] {
            let target = format!("/files?path={path}");
            let reply = door.request("GET", &target, &[], b"");
            assert!(
                [403, 404].contains(&reply.status),
                "{path}: {}",
                reply.text()
            );
            let reply = door.request("POST", &format!("{target}/new"), &RAW, b"x");
            assert!(
                [400, 403, 404].contains(&reply.status),
                "{path}: {}",
                reply.text()
            );
        }
        // The machine's own is another one.
        upload(door, &format!("{machine}/new"), b"x");
        assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 2);
    });
}

#[test]
fn it_is_gone_with_the_sandbox() {
    in_namespaces(|door| {
        upload(door, "/tmp/f", &vec![b'x'; 4 << 20]);
        let device = door.sh("stat -c %d /tmp").text();
        let is_open = || {
            let directory = format!("/proc/{}/fd", door.server.inner_pid());
            let links = std::fs::read_dir(directory).unwrap();
            links
                .filter_map(|link| std::fs::metadata(link.ok()?.path()).ok())
                .any(|found| {
                    std::os::unix::fs::MetadataExt::dev(&found).to_string() == device.trim()
                })
        };
        assert!(is_open());
        let target = format!("/sandboxes/{}", door.id);
        assert_eq!(
            api(door.server, "DELETE", &target, &Value::Null).status,
            204
        );
        wait_until("the server lets go of it", PATIENCE, || !is_open());
    });
}

#[test]
fn it_holds_no_more_than_its_share_of_the_memory() {
    in_namespaces(|door| {
        let body =
            json!({ "isolation": "namespaces", "network": "blocked", "max_total_mem_mb": 64 });
        let sandbox = door.server.sandbox_with(&body);
        let door = Door {
            server: door.server,
            id: sandbox.id.clone(),
            token: sandbox.token.clone(),
        };
        let part = vec![b'x'; 1 << 20];
        let mut count = 0;
        let reply = loop {
            let target = format!("/files?path=/tmp/{count}");
            let reply = door.request("POST", &target, &RAW, &part);
            if reply.status != 200 || count > 64 {
                break reply;
            }
            count += 1;
        };
        assert_eq!(reply.status, 507, "{count}: {}", reply.text());
        assert!((8..=16).contains(&count), "{count} MiB");
        door.ok(REMOVE, &at("/tmp/0"));
        upload(&door, "/tmp/again", &part);
    });
}

#[test]
fn without_one_the_variable_is_named() {
    on_a_host(|server| {
        let door = Door::open(server);
        let text = door.fails(STAT, &at("/tmp/x"), 403, "permission_denied");
        let directory = door.sh("echo $TMPDIR").text();
        let expected = format!("$TMPDIR, which is {}", directory.trim());
        assert!(text.contains(&expected), "{text}");
        let reply = door.request("POST", "/files?path=/tmp/x", &RAW, b"x");
        assert_eq!(reply.status, 403);
        assert!(reply.text().contains("$TMPDIR"), "{}", reply.text());
    });
}
