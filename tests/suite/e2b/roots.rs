//! Sandboxes with a root of their own: which template a name means, and who acts.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Door, Ran, api};
use crate::fixture::{Reply, Server, cpu_time_of, decode_base64, encode_base64};
use crate::roots::users::{host, needs_roots, template};
use crate::skip;

/// The header of a client that acts as a user.
fn basic(user: &str) -> String {
    format!("Basic {}", encode_base64(format!("{user}:").as_bytes()))
}

/// What a script writes that runs as a user.
#[track_caller]
fn sh_as(door: &Door<'_>, user: &str, script: &str) -> String {
    let start = json!({
        "process": { "cmd": "/bin/bash", "args": ["-l", "-c", script] },
        "stdin": false,
    });
    let credentials = basic(user);
    let headers = [("authorization", &*credentials)];
    let stream = door.begin("/process.Process/Start", &start, &headers);
    let ran = Ran::of(&stream.rest());
    assert_eq!(ran.end["exitCode"].as_i64().unwrap_or(0), 0, "{ran:?}");
    ran.text()
}

#[track_caller]
fn call_as(door: &Door<'_>, user: &str, method: &str, message: &Value) -> Reply {
    let credentials = basic(user);
    let headers = [
        ("content-type", "application/json"),
        ("authorization", &*credentials),
    ];
    let body = message.to_string();
    door.request("POST", method, &headers, body.as_bytes())
}

fn open<'a>(server: &'a Server, template: &str) -> Door<'a> {
    Door::with(server, &json!({ "templateID": template }))
}

const WHO: &str = "echo $(id -u) $(id -g) $HOME $USER $(pwd)";

#[test]
fn the_usual_user_is_made_and_others_are_asked_for() {
    needs_roots!();
    let template = template();
    fs::create_dir(template.path().join("etc/sudoers.d")).unwrap();
    // Without an end of line, and with the usual number taken.
    let passwd = "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh";
    fs::write(template.path().join("etc/passwd"), passwd).unwrap();
    chown(template.path().join("home/alice"), Some(1000), Some(1000)).unwrap();
    fs::write(template.path().join("etc/shadow"), "root:*:1::::::\n").unwrap();
    let shadow = template.path().join("etc/shadow");
    fs::set_permissions(shadow, fs::Permissions::from_mode(0o600)).unwrap();
    let server = host(&template).start();
    let door = &open(&server, "own");
    let ran = door.sh(WHO);
    let id = "1003";
    assert_eq!(
        ran.text(),
        format!("{id} {id} /home/user user /home/user\n"),
        "{ran:?}"
    );
    assert_eq!(sh_as(door, "user", WHO), ran.text());
    assert_eq!(sh_as(door, "root", WHO), "0 0 /root root /root\n");
    assert_eq!(sh_as(door, "alice", "id -u"), "1000\n");
    let lists = sh_as(
        door,
        "root",
        "cat /etc/passwd /etc/shadow /etc/sudoers.d/90-sbx; stat -c %a%u%g /etc/sudoers.d/90-sbx /home/user",
    );
    let expected = format!(
        "{passwd}\nuser:x:{id}:{id}::/home/user:/bin/bash\nroot:*:1::::::\nuser:*:19000:0:99999:7:::\n\
         user ALL=(ALL:ALL) NOPASSWD:ALL\n44000\n755{id}{id}\n"
    );
    assert_eq!(lists, expected);
    // The template stays as it was.
    assert_eq!(
        fs::read_to_string(template.path().join("etc/passwd")).unwrap(),
        passwd
    );
    let refused = call_as(
        door,
        "nobody",
        "/filesystem.Filesystem/Stat",
        &json!({ "path": "/" }),
    );
    assert_eq!(refused.status, 401, "{}", refused.text());
    assert!(
        refused.text().contains("invalid username"),
        "{}",
        refused.text()
    );
}

#[test]
fn files_belong_to_the_user_that_a_client_names() {
    needs_roots!();
    let template = template();
    let server = host(&template).start();
    let door = &open(&server, "own");
    let kind = [("content-type", "application/octet-stream")];
    let write = |target: &str| door.request("POST", target, &kind, b"text");
    for (target, path) in [
        ("/files?path=mine", "/home/user/mine"),
        ("/files?path=mine&username=user", "/home/user/mine"),
        ("/files?path=~/mine&username=alice", "/home/alice/mine"),
        ("/files?path=mine&username=root", "/root/mine"),
    ] {
        let written = write(target);
        assert_eq!(written.status, 200, "{}", written.text());
        assert_eq!(written.json()[0]["path"], path);
    }
    assert_eq!(write("/files?path=/etc/x").status, 403);
    assert_eq!(write("/files?path=/etc/x&username=root").status, 200);
    assert_eq!(write("/files?path=x&username=nobody").status, 401);
    let entry = |user: &str, path: &str| {
        let reply = call_as(
            door,
            user,
            "/filesystem.Filesystem/Stat",
            &json!({ "path": path }),
        );
        assert_eq!(reply.status, 200, "{}", reply.text());
        let entry = reply.json()["entry"].clone();
        let text = |name: &str| entry[name].as_str().unwrap().to_owned();
        [text("path"), text("owner"), text("group")].join(" ")
    };
    assert_eq!(entry("user", "mine"), "/home/user/mine user user");
    assert_eq!(entry("alice", "mine"), "/home/alice/mine alice alice");
    assert_eq!(entry("root", "mine"), "/root/mine root root");
    let denied = call_as(
        door,
        "user",
        "/filesystem.Filesystem/Stat",
        &json!({ "path": "/home/alice/mine" }),
    );
    assert_eq!(denied.status, 403, "{}", denied.text());
    let made = call_as(
        door,
        "alice",
        "/filesystem.Filesystem/MakeDir",
        &json!({ "path": "d/e" }),
    );
    assert_eq!(made.json()["entry"]["owner"], "alice", "{}", made.text());
}

/// Frameworks begin with a directory such as `/workspace`, as the usual user.
#[test]
fn directories_that_are_missing_are_made_for_the_user() {
    needs_roots!();
    let template = template();
    let server = host(&template).start();
    let door = &open(&server, "own");
    let make_directory = |user: &str, path: &str| {
        let path = json!({ "path": path });
        call_as(door, user, "/filesystem.Filesystem/MakeDir", &path)
    };
    let write = |target: &str| {
        let kind = [("content-type", "application/octet-stream")];
        door.request("POST", target, &kind, b"text").status
    };
    let made = make_directory("user", "/workspace/a");
    assert_eq!(made.status, 200, "{}", made.text());
    assert_eq!(write("/files?path=/workspace/file"), 200);
    assert_eq!(write("/files?path=/app/b/file&username=alice"), 200);
    let owners =
        "cd /; stat -c '%n %U %a' workspace workspace/a workspace/file app app/b app/b/file etc";
    assert_eq!(
        sh_as(door, "root", owners),
        "workspace user 755\nworkspace/a user 755\nworkspace/file user 644\n\
         app alice 755\napp/b alice 755\napp/b/file alice 644\netc root 755\n"
    );
    // What is there stays closed.
    assert_eq!(write("/files?path=/etc/file"), 403);
    assert_eq!(write("/files?path=/root/file"), 403);
    assert_eq!(make_directory("alice", "/workspace").status, 409);
}

/// Programs send signals to the pid that a client was told.
#[test]
fn pids_are_those_that_programs_of_the_sandbox_see() {
    needs_roots!();
    let template = template();
    let server = host(&template).start();
    for template in ["own", "base"] {
        let door = &open(&server, template);
        let sleep = json!({ "process": { "cmd": "/bin/sh", "args": ["-c", "echo $$; exec sleep 1000"] }, "stdin": false });
        let mut stream = door.begin("/process.Process/Start", &sleep, &[]);
        let pid = stream.next().unwrap().1["event"]["start"]["pid"].clone();
        let data = stream.next().unwrap().1["event"]["data"]["stdout"].clone();
        let printed = decode_base64(data.as_str().unwrap());
        assert_eq!(printed, format!("{pid}\n").as_bytes(), "{template}");
        let listed = door.ok("/process.Process/List", &json!({}));
        assert_eq!(listed["processes"][0]["pid"], pid, "{listed}");
        let again = json!({ "process": { "pid": pid } });
        let mut again = door.begin("/process.Process/Connect", &again, &[]);
        assert_eq!(again.next().unwrap().1["event"]["start"]["pid"], pid);
        door.sh(&format!("kill -KILL {pid}"));
        for stream in [stream, again] {
            let told = stream.rest();
            let end = told
                .iter()
                .find_map(|(_, message)| message["event"].get("end"));
            assert_eq!(end.unwrap()["status"], "signal: killed", "{told:?}");
        }
    }
}

#[test]
fn names_mean_templates_as_the_operator_says() {
    needs_roots!();
    let template = template();
    let server = host(&template)
        .env("SBX_E2B_TEMPLATES", "mine=own,plain")
        .start();
    let listed = api(&server, "GET", "/templates", &Value::Null).json();
    let names = listed.as_array().unwrap().iter();
    let names: Vec<_> = names
        .map(|one| one["templateID"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        ["base", "code-interpreter-v1", "mine", "plain", "own"]
    );
    for (name, status) in [("own", 200), ("mine", 200), ("other", 404)] {
        let found = api(
            &server,
            "GET",
            &format!("/templates/aliases/{name}"),
            &Value::Null,
        );
        assert_eq!(found.status, status, "{name}");
    }
    for (name, is_private) in [
        ("own", true),
        ("mine:v1", true),
        ("plain", false),
        ("base", false),
    ] {
        let door = open(&server, name);
        let made = server.get(&format!("/v1/sandboxes/{}", door.id)).json();
        let expected = if is_private { "private" } else { "shared" };
        assert_eq!(made["root"], expected, "{name}: {made}");
    }
    drop(server);
    let server = host(&template).env("SBX_TEMPLATE", "own").start();
    let made = server
        .get(&format!("/v1/sandboxes/{}", open(&server, "base").id))
        .json();
    assert_eq!(made["template"], "own", "{made}");
    assert_eq!(made["user"], "user", "{made}");
}

/// The owner and the group of a file.
#[track_caller]
fn owners(door: &Door<'_>, path: &str) -> [String; 2] {
    let found = door.ok("/filesystem.Filesystem/Stat", &json!({ "path": path }));
    ["owner", "group"].map(|name| found["entry"][name].as_str().unwrap().to_owned())
}

#[test]
fn names_are_those_that_the_lists_have_now() {
    needs_roots!();
    let template = template();
    let server = host(&template).start();
    let door = &open(&server, "own");
    let path = "/home/alice";
    assert_eq!(owners(door, path), ["alice", "alice"]);
    for round in 0..20 {
        let name = ["clara", "diana"][round % 2];
        // Of the same length, and at once.
        let script = format!(
            "echo {name}:x:1001:1001::/:/bin/sh > /etc/passwd; echo {name}:x:1001: > /etc/group"
        );
        sh_as(door, "root", &script);
        assert_eq!(owners(door, path), [name, name], "{round}");
        assert_eq!(owners(door, path), [name, name], "{round}");
    }
    sh_as(
        door,
        "0",
        "busybox rm /etc/passwd; echo eva:x:1001: > /etc/new; busybox mv /etc/new /etc/group",
    );
    assert_eq!(owners(door, path), ["1001", "eva"]);
}

/// Whoever asks for many files has the lists read once.
#[test]
fn long_lists_of_accounts_cost_once() {
    needs_roots!();
    let template = template();
    let lines = |rest: &str| {
        let lines = (0..400_000).map(|number| format!("n{number}:x:{number}:{rest}\n"));
        lines.collect::<String>()
    };
    for (name, rest) in [("passwd", "0::/:"), ("group", "")] {
        fs::write(template.path().join("etc").join(name), lines(rest)).unwrap();
    }
    let server = host(&template).start();
    let door = &Door::with(&server, &json!({ "templateID": "own" }));
    assert_eq!(owners(door, "/etc"), ["n0", "n0"]);
    let pid = server.inner_pid();
    let before = cpu_time_of(pid);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    assert_eq!(owners(door, "/etc"), ["n0", "n0"]);
                }
            });
        }
    });
    let used = cpu_time_of(pid).saturating_sub(before);
    assert!(used < Duration::from_secs(4), "{used:?}");
    // A number that comes too late in them is shown as such.
    sh_as(
        door,
        "0",
        "busybox mkdir /tmp/late && busybox chown 60000:60000 /tmp/late",
    );
    assert_eq!(owners(door, "/tmp/late"), ["60000", "60000"]);
}
