//! The users of a sandbox with a root of its own: whoever is asked for runs the command or the code, and makes the file.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::fixture::{
    Builder, Reply, Sandbox, Server, TempDir, assert_error, events_of, is_root, output_of,
};
use crate::skip;

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nalice:x:1001:1001::/home/alice:/bin/sh\n\
                      bob:x:1002:1002::/home/bob:/bin/sh\n";
const GROUP: &str = "root:x:0:\nalice:x:1001:\nbob:x:1002:\nstaff:x:50:bob,alice\n";

/// A directory of the machine that a root can be made of: busybox, and bash where it is.
pub(crate) fn template() -> TempDir {
    let directory = TempDir::new();
    let root = directory.path();
    for (name, mode) in [
        ("bin", 0o755),
        ("dev", 0o755),
        ("etc", 0o755),
        ("home", 0o755),
        ("proc", 0o755),
        ("root", 0o700),
        ("sys", 0o755),
        ("tmp", 0o1777),
    ] {
        let path = root.join(name);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    fs::set_permissions(root, fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(root.join("etc/passwd"), PASSWD).unwrap();
    fs::write(root.join("etc/group"), GROUP).unwrap();
    for (name, id) in [("alice", 1001), ("bob", 1002)] {
        let home = root.join("home").join(name);
        fs::create_dir(&home).unwrap();
        fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).unwrap();
        chown(&home, Some(id), Some(id)).unwrap();
    }
    let busybox = fs::read("/bin/busybox").or_else(|_| fs::read("/usr/bin/busybox"));
    fs::write(root.join("bin/busybox"), busybox.unwrap_or_default()).unwrap();
    let runs = fs::Permissions::from_mode(0o755);
    fs::set_permissions(root.join("bin/busybox"), runs).unwrap();
    for name in [
        "cat", "echo", "id", "ls", "mkdir", "sh", "sleep", "stat", "touch", "true", "tty",
    ] {
        symlink("busybox", root.join("bin").join(name)).unwrap();
    }
    add_bash(root);
    directory
}

/// Copies bash and its libraries.
fn add_bash(root: &Path) {
    let Ok(listed) = Command::new("ldd").arg("/bin/bash").output() else {
        return;
    };
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let words = listed.split_whitespace();
    for path in words
        .filter(|word| word.starts_with('/'))
        .chain(["/bin/bash"])
    {
        let to = root.join(&path[1..]);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(path, &to).unwrap();
    }
}

/// A host whose sandboxes can have roots of this template, by the name `own`.
pub(crate) fn host(template: &TempDir) -> Builder {
    let path = template.path().display();
    Server::host().env("SBX_TEMPLATES", format!("own={path}"))
}

/// Why there is no such root here; `None` if there is.
pub(crate) fn lack() -> Option<&'static str> {
    static LACK: LazyLock<Option<String>> = LazyLock::new(|| {
        if !is_root() {
            return Some("host mode needs root".to_owned());
        }
        let busybox = fs::read("/bin/busybox").or_else(|_| fs::read("/usr/bin/busybox"));
        if busybox.is_err() {
            return Some("needs busybox".to_owned());
        }
        let template = template();
        let server = host(&template).start();
        let made = server.post("/v1/sandboxes", &json!({ "root": "private" }));
        (made.status != 200).then(|| made.text())
    });
    LACK.as_deref()
}

/// Skips a test that cannot run here.
macro_rules! needs_roots {
    () => {
        if let Some(why) = crate::roots::users::lack() {
            skip!("{why}");
        }
    };
}
pub(crate) use needs_roots;

fn sandbox(server: &Server) -> Sandbox<'_> {
    server.sandbox_with(&json!({ "root": "private" }))
}

/// What a script writes that runs as a user.
#[track_caller]
fn sh(sandbox: &Sandbox<'_>, user: &str, script: &str) -> String {
    let outcome = sandbox.exec(&json!({ "cmd": script, "user": user }));
    assert_eq!(outcome.code(), Some(0), "{script}: {outcome:?}");
    outcome.stdout
}

#[track_caller]
fn ok(reply: &Reply) -> Value {
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

const WHO: &str = "echo $(id -u) $(id -g) $(id -G) $HOME $USER $LOGNAME $(pwd)";

#[test]
fn commands_run_as_whom_they_ask_for() {
    needs_roots!();
    let template = template();
    let server = host(&template).start();
    let sandbox = sandbox(&server);
    for (user, expected) in [
        (
            "alice",
            "1001 1001 1001 50 /home/alice alice alice /home/alice",
        ),
        ("1002", "1002 1002 1002 50 /home/bob bob bob /home/bob"),
        ("4711", "4711 4711 4711 / 4711 4711 /"),
        ("root", "0 0 0 /root root root /root"),
    ] {
        assert_eq!(sh(&sandbox, user, WHO).trim(), expected);
    }
    assert_eq!(sandbox.sh(WHO).trim(), "0 0 0 /root root root /root");
    // A terminal is its user's.
    let body = json!({ "cmd": "stat -c %u $(tty); echo x > $(tty)", "pty": true, "user": "alice" });
    let outcome = sandbox.exec(&body);
    assert_eq!(outcome.code(), Some(0), "{outcome:?}");
    assert_eq!(outcome.stdout, "1001\r\nx\r\n");
    // The kernel holds them to what they may do.
    let outcome = sandbox.exec(&json!({ "cmd": "ls /home/bob", "user": "alice" }));
    assert_eq!(outcome.code(), Some(1), "{outcome:?}");
    // One that is there since a moment ago.
    sandbox.sh("echo 'carol:x:2000:1001::/tmp:/bin/sh' >> /etc/passwd");
    let expected = "2000 1001 1001 /tmp carol carol /tmp";
    assert_eq!(sh(&sandbox, "carol", WHO).trim(), expected);
}

#[test]
fn nothing_is_started_for_an_unknown_user() {
    needs_roots!();
    let template = template();
    let server = host(&template).start();
    let sandbox = sandbox(&server);
    let long = "a".repeat(1000);
    for user in ["nobody", "", "65536", "-1", "alice:bob", &long] {
        for (route, more) in [
            ("exec", json!({})),
            ("processes", json!({ "id": "chosen" })),
            ("processes", json!({ "pty": true })),
        ] {
            let mut body = json!({ "cmd": "touch /tmp/started", "user": user });
            body.as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            assert_error(&sandbox.post(route, &body), 400, "bad_request");
        }
        let body = json!({ "language": "bash", "user": user });
        assert_error(&sandbox.post("contexts", &body), 400, "bad_request");
        assert_error(
            &sandbox.get(&format!("files/list?path=/&user={user}")),
            400,
            "bad_request",
        );
    }
    assert_eq!(ok(&sandbox.get("processes")), json!([]));
    assert_eq!(sandbox.sh("ls /tmp"), "");
    // Another user is another command.
    let mut body = json!({ "cmd": "sleep 1000", "id": "chosen", "user": "alice" });
    let process = sandbox.spawn(&body);
    assert_eq!(sandbox.spawn(&body)["pid"], process["pid"]);
    body["user"] = json!("bob");
    assert_error(&sandbox.post("processes", &body), 409, "id_in_use");
    body["user"] = json!("nobody");
    assert_error(&sandbox.post("processes", &body), 400, "bad_request");
}

#[test]
fn elsewhere_a_user_is_ignored_and_the_answer_tells() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let body = json!({ "cmd": "true", "user": "alice" });
    assert_eq!(
        ok(&sandbox.post("processes", &body))["ignored"],
        json!(["user"])
    );
    let events = events_of(&sandbox.post("exec", &body).body);
    assert_eq!(events[0]["ignored"], json!(["user"]));
    let made = ok(&sandbox.post("files/mkdir?path=x&user=alice", &json!({})));
    assert_eq!(made["ignored"], json!(["user"]));
    assert_eq!(sandbox.get("files/stat?path=x&user=alice").status, 200);
}

#[test]
fn a_context_runs_as_its_user() {
    needs_roots!();
    let template = template();
    let server = host(&template).start();
    let sandbox = sandbox(&server);
    if !template.path().join("bin/bash").exists() {
        skip!("needs bash");
    }
    let run = |context: &str| {
        let body = json!({ "code": WHO, "context": context });
        let reply = sandbox.post("execute", &body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        String::from_utf8(output_of(&events_of(&reply.body), "stdout", 0).data).unwrap()
    };
    let made = ok(&sandbox.post(
        "contexts",
        &json!({ "language": "bash", "id": "a", "user": "alice" }),
    ));
    assert_eq!(made["cwd"], "/home/alice");
    let expected = "1001 1001 1001 50 /home/alice alice alice /home/alice\n";
    assert_eq!(run("a"), expected);
    ok(&sandbox.post("contexts/a/restart", &json!({})));
    assert_eq!(run("a"), expected);
    let body = json!({ "language": "bash", "id": "b", "user": "bob", "cwd": "/tmp" });
    assert_eq!(ok(&sandbox.post("contexts", &body))["cwd"], "/tmp");
    assert_eq!(run("b"), "1002 1002 1002 50 /home/bob bob bob /tmp\n");
    // The id is a context of one user.
    let again = |user: &str| {
        sandbox.post(
            "contexts",
            &json!({ "language": "bash", "id": "a", "user": user }),
        )
    };
    assert_error(&again("bob"), 409, "id_in_use");
    assert_eq!(again("alice").status, 200);
}

#[test]
fn files_are_accessed_as_the_user_that_a_request_asks_for() {
    needs_roots!();
    let template = template();
    let server = host(&template).start();
    let sandbox = sandbox(&server);
    let owner = |path: &str| sandbox.sh(&format!("stat -c '%u %g' {path}"));
    ok(&sandbox.put("files/write?path=mine&user=alice", b"text"));
    assert_eq!(owner("/home/alice/mine"), "1001 1001\n");
    assert_eq!(sandbox.get("files/read?path=mine&user=1001").body, b"text");
    assert_eq!(
        sandbox.get("files/read?path=/home/alice/mine").body,
        b"text"
    );
    ok(&sandbox.put("files/write?path=of_root", b""));
    assert_eq!(owner("/root/of_root"), "0 0\n");
    let stat = ok(&sandbox.get("files/stat?path=mine&user=alice&detail=full"));
    assert_eq!(stat["uid"], 1001, "{stat}");
    // What a user may not do is refused.
    for (method, route) in [
        ("GET", "files/read?path=/home/alice/mine&user=bob"),
        ("PUT", "files/write?path=/home/alice/other&user=bob"),
        ("PUT", "files/write?path=/etc/passwd&user=bob"),
        ("GET", "files/list?path=/root&user=bob"),
        ("DELETE", "files/delete?path=/home/alice/mine&user=bob"),
        ("POST", "files/mkdir?path=/home/alice/d&user=bob"),
        ("POST", "files/chmod?path=/etc/passwd&mode=666&user=bob"),
        ("GET", "files/archive?path=/root&user=bob"),
        ("GET", "files/glob?path=/root&pattern=*&user=bob"),
        ("POST", "files/copy?from=/home/alice/mine&to=x&user=bob"),
        ("GET", "files/watch?path=/root&user=bob"),
    ] {
        assert_error(&sandbox.request(method, route, b""), 403, "forbidden");
    }
    let edit = json!({ "path": "mine", "edits": [{ "old": "text", "new": "more text" }] });
    ok(&sandbox.post("files/edit?user=alice", &edit));
    assert_error(
        &sandbox.post("files/edit?user=bob", &edit),
        404,
        "not_found",
    );
    let grep = json!({ "pattern": "more" });
    let lines = sandbox.post("files/grep?user=alice", &grep);
    assert!(lines.text().contains("more text"), "{}", lines.text());
    let lines = sandbox.post("files/grep?user=bob", &grep);
    assert!(!lines.text().contains("more text"), "{}", lines.text());
    let patch = b"--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+line\n";
    ok(&sandbox.request("POST", "files/patch?user=alice", patch));
    assert_eq!(owner("/home/alice/new"), "1001 1001\n");
    // A watch is of its user's files, and its id is of that watch.
    let watch = json!({ "path": ".", "id": "mine" });
    ok(&sandbox.post("files/watches?user=alice", &watch));
    ok(&sandbox.post("files/watches?user=alice", &watch));
    assert_error(
        &sandbox.post("files/watches?user=bob", &watch),
        409,
        "id_in_use",
    );
    sandbox.sh("touch /home/bob/his /home/alice/hers");
    let events = sandbox.get("files/watches/mine/events?timeout=10").text();
    assert!(
        events.contains("hers") && !events.contains("his\""),
        "{events}"
    );
}

#[test]
fn a_sandbox_ends_while_files_are_accessed_as_its_users() {
    needs_roots!();
    let template = template();
    let server = host(&template).start();
    let made = ok(&server.post("/v1/sandboxes", &json!({ "root": "private" })));
    let sandbox = Sandbox::of(&server, &made["sandboxes"][0]);
    let watch = json!({ "path": ".", "id": "mine" });
    ok(&sandbox.post("files/watches?user=alice", &watch));
    let mut upload = sandbox.connect();
    let target = sandbox.target("files/write?path=half&user=bob");
    let head = format!(
        "PUT {target} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-length: 100\r\n\r\nhalf",
        sandbox.token
    );
    upload.send(head.as_bytes());
    let reply = server.delete(&sandbox.prefix());
    assert_eq!(reply.status, 200, "{}", reply.text());
    let again = sandbox.get("files/list?path=.&user=alice");
    assert_eq!(again.status, 404, "{}", again.text());
    // Its block of ids is another's now.
    let next = self::sandbox(&server);
    assert_eq!(sh(&next, "bob", "ls -a ~ | cat").lines().count(), 2);
}

/// A tar archive with one file of an owner.
fn archive(name: &str, uid: u64, gid: u64) -> Vec<u8> {
    let mut header = [0_u8; 512];
    let mut put =
        |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, "0000644\0");
    put(108, &format!("{uid:07o}\0"));
    put(116, &format!("{gid:07o}\0"));
    put(124, "00000000000\0");
    put(136, "00000000000\0");
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    [&header[..], &[0; 1024]].concat()
}

#[test]
fn archives_keep_owners_within_the_ids_of_the_sandbox() {
    needs_roots!();
    let template = template();
    let server = host(&template).start();
    let sandbox = sandbox(&server);
    let unpack = |more: &str, archive: &[u8]| {
        sandbox.put(&format!("files/archive?path=/home{more}"), archive)
    };
    ok(&unpack("&owners=1", &archive("a", 1001, 50)));
    ok(&unpack("&owners=1", &archive("b", 65535, 65535)));
    ok(&unpack("", &archive("c", 1001, 50)));
    let owners = sandbox.sh("cd /home; stat -c '%u %g' a b c");
    assert_eq!(owners, "1001 50\n65535 65535\n0 0\n");
    for (uid, gid) in [(65536, 0), (0, 65536), (1_000_000, 1_000_000)] {
        assert_error(
            &unpack("&owners=1", &archive("d", uid, gid)),
            400,
            "bad_request",
        );
    }
    let reply = unpack("&owners=1&user=alice", &archive("d", 1001, 1001));
    assert_error(&reply, 400, "bad_request");
    assert_error(
        &unpack("&user=alice", &archive("d", 0, 0)),
        403,
        "forbidden",
    );
    assert_eq!(sandbox.sh("ls /home"), "a\nalice\nb\nbob\nc\n");
    // The ids of an archive are those inside.
    let packed = sandbox.get("files/archive?path=/home/a&format=tar").body;
    assert_eq!(&packed[108..115], b"0001751", "{:?}", &packed[..130]);
}

#[test]
fn tools_of_mcp_take_a_user_where_there_are_several() {
    needs_roots!();
    let template = template();
    let server = host(&template).start();
    let call = |sandbox: &Sandbox<'_>, tool: &str, arguments: Value| {
        let params = json!({ "name": tool, "arguments": arguments });
        let message =
            json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params });
        let headers = [
            ("accept", "application/json, text/event-stream"),
            ("content-type", "application/json"),
            ("host", "localhost"),
        ];
        let body = message.to_string();
        let reply = sandbox
            .connect()
            .request("POST", "/mcp", &headers, body.as_bytes());
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.text()
    };
    let own = sandbox(&server);
    let ran = call(&own, "run", json!({ "cmd": WHO, "user": "alice" }));
    assert!(ran.contains("1001 1001 1001 50 /home/alice alice"), "{ran}");
    let refused = call(&own, "start", json!({ "cmd": "true", "user": "nobody" }));
    assert!(refused.contains("there is no user"), "{refused}");
    let shared = server.sandbox();
    let refused = call(&shared, "run", json!({ "cmd": "true", "user": "alice" }));
    assert!(refused.contains("a root of their own"), "{refused}");
}
