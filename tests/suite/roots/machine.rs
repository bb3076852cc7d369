//! What programs and clients expect of a machine, and how it begins and ends.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{holders_below, needs_roots, processes_of, root, root_with};
use crate::fixture::{
    PATIENCE, Server, assert_error, descriptors_of, homes_in, is_alive, is_root, stat_of,
    wait_until,
};
use crate::host::{first_user, lasting::end};
use crate::skip;

#[test]
fn root_may_change_everything() {
    needs_roots!(template, server);
    let sandbox = root(&server);
    assert_eq!(
        sandbox.sh("id; pwd; echo $HOME $USER $TMPDIR"),
        "uid=0(root) gid=0(root)\n/root\n/root root /tmp\n"
    );
    sandbox.sh(
        "mkdir /workspace && echo made > /workspace/file && rm -r /home && echo x >> /etc/passwd",
    );
    assert_eq!(
        sandbox.sh("cat /workspace/file; ls -d /home || true; tail -n 1 /etc/passwd"),
        "made\nx\n"
    );
    // The template and every other root are as they were.
    let other = root(&server);
    assert_eq!(
        other.sh("ls -d /workspace || ls -d /home; tail -n 1 /etc/passwd"),
        "/home\nhomeless:x:1001:1001::/nowhere:/bin/sh\n"
    );
    assert!(template.path("home/user").exists());
    assert!(!template.path("workspace").exists());
    let shown = sandbox.described();
    assert_eq!(shown["root"], "private");
    assert_eq!(shown["template"], "box");
    assert_eq!(shown["user"], "root");
    assert_eq!(shown["isolation"]["mode"], "namespaces");
    assert_eq!(shown["filesystem"]["root"], "private");
    assert_eq!(shown["home"], "/root");
}

#[test]
fn it_has_the_ids_of_a_machine() {
    needs_roots!(template, server);
    let sandbox = root(&server);
    sandbox.sh("touch /file");
    for id in ["0", "1", "1000", "65535"] {
        let shown = sandbox.sh(&format!("chown {id}:{id} /file && stat -c %u:%g /file"));
        assert_eq!(shown, format!("{id}:{id}\n"));
    }
    for id in ["65536", "100000", "4294967294"] {
        let outcome = sandbox.exec(&json!({ "cmd": ["chown", format!("{id}:{id}"), "/file"] }));
        assert_ne!(outcome.code(), Some(0), "{id}: {outcome:?}");
    }
    assert_eq!(sandbox.sh("stat -c %u:%g /file"), "65535:65535\n");
    let on_disk = fs::metadata(sandbox.on_disk().join("up/file")).unwrap();
    assert_eq!((on_disk.uid(), on_disk.gid()), (65_535, 65_535));
    // The template is not copied.
    assert_eq!(template.path("bin/su").metadata().unwrap().uid(), 0);
    assert_eq!(
        sandbox.sh("stat -c %u:%g:%a /bin/su /home/user"),
        "0:0:4755\n1000:1000:755\n"
    );
}

#[test]
fn commands_run_as_the_user_they_ask_for() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    assert_eq!(
        sandbox.sh_as("user", "id; pwd; echo $HOME $USER $LOGNAME"),
        "uid=1000(user) gid=1000(user) groups=50(staff)\n/home/user\n/home/user user user\n"
    );
    assert_eq!(sandbox.sh_as("1000", "id -un"), "user\n");
    assert_eq!(
        sandbox.sh_as("4321", "id -u; id -g; pwd"),
        "4321\n4321\n/\n"
    );
    assert_eq!(sandbox.sh_as("homeless", "id -u; pwd"), "1001\n/\n");
    let status = sandbox.sh_as("user", "cat /proc/self/status");
    for line in [
        "CapEff:\t0000000000000000",
        "CapPrm:\t0000000000000000",
        "NoNewPrivs:\t0",
        "Seccomp:\t2",
    ] {
        assert!(
            status.lines().any(|found| found == line),
            "{line}: {status}"
        );
    }
    let refused = sandbox.exec_as("user", "echo x > /etc/passwd || rm -r /root || echo x > /x");
    assert_ne!(refused.code(), Some(0));
    for user in ["nobody", "65536", "-1", "+1", "0x1", "a:b", "4294967296"] {
        let reply = sandbox.post("exec", &json!({ "cmd": "true", "user": user }));
        assert_error(&reply, 400, "bad_request");
    }
    // Another user of all commands.
    let other = root_with(&server, json!({ "user": "user" }));
    assert_eq!(other.sh("id -u; pwd"), "1000\n/home/user\n");
    assert_eq!(other.sh_as("root", "id -u"), "0\n");
    assert_eq!(other.described()["home"], "/home/user");
}

#[test]
fn programs_change_users_by_their_own_means() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    assert_eq!(sandbox.sh("su user -c 'id -u; id -g'"), "1000\n1000\n");
    // Programs that the root of the sandbox marks so, on the files of the template.
    sandbox.sh("cp /bin/busybox /own; chmod 4755 /probe; chown 7:7 /own; chmod 6755 /own");
    let mut command = sandbox.probe().command(&[&["status"]]);
    command["user"] = json!("user");
    let outcome = sandbox.exec(&command);
    let text = outcome.stdout.replace("\\t", " ").replace("\\n", "\n");
    for line in ["Uid: 1000 0 0 0", "CapEff: 00000000a80425fb"] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
}

#[test]
fn every_port_can_be_served_and_reached() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    sandbox.sh("mkdir /www && echo served > /www/page");
    for (user, port) in [("root", 80), ("user", 8080), ("user", 443)] {
        let command = format!("exec busybox httpd -f -p {port} -h /www");
        sandbox.spawn(&json!({ "cmd": command, "user": user }));
        let waited = sandbox.get(&format!("ports/{port}/wait?timeout=20"));
        assert_eq!(waited.json()["listening"], true, "{}", waited.text());
        let reply = sandbox.get(&format!("proxy/{port}/page"));
        assert_eq!((reply.status, &*reply.text()), (200, "served\n"), "{port}");
    }
    // Not another's.
    let other = root(&server);
    let reply = other.get("proxy/80/page");
    assert_error(&reply, 502, "unreachable");
}

#[test]
fn sockets_of_its_users_are_ports_by_name() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    let probe = sandbox.probe();
    for (user, name) in [("root", "one"), ("user", "two")] {
        let path = format!("/run/sbx/proxy/{name}.sock");
        let mut command = probe.command(&[&["unix-listen", &path], &["stay"]]);
        command["user"] = json!(user);
        sandbox.spawn(&command);
        let waited = sandbox.get(&format!("ports/{name}/wait?timeout=20"));
        assert_eq!(waited.json()["listening"], true, "{}", waited.text());
    }
    let ports = sandbox.get("ports").text();
    assert!(ports.contains("one") && ports.contains("two"), "{ports}");
    assert_eq!(sandbox.sh("echo $SBX_PROXY_DIR"), "/run/sbx/proxy\n");
}

#[test]
fn terminals_belong_to_their_users() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    for (user, uid) in [("root", 0), ("user", 1000), ("4321", 4321)] {
        // The server keeps others of the group from it.
        let command = json!({ "cmd": "stat -c %u:%g:%a $(tty); echo typed > $(tty); test -t 0 && test -t 1 && id -u", "user": user, "pty": true });
        let outcome = sandbox.exec(&command);
        assert_eq!(outcome.code(), Some(0), "{outcome:?}");
        let text = outcome.stdout.replace('\r', "");
        assert!(text.starts_with(&format!("{uid}:5:600\n")), "{text}");
        assert!(text.ends_with(&format!("typed\n{uid}\n")), "{text}");
    }
    // Those of others are not opened by a user, and are by root.
    let spawned = sandbox.spawn(&json!({ "cmd": "tty > /tmp/tty; exec sleep 1000", "pty": true }));
    assert!(spawned["id"].is_string());
    wait_until("it has a terminal", PATIENCE, || {
        sandbox.exec(&json!({ "cmd": "test -s /tmp/tty" })).code() == Some(0)
    });
    let outcome = sandbox.exec_as("user", "echo x > $(cat /tmp/tty)");
    assert_ne!(outcome.code(), Some(0));
}

#[test]
fn shared_memory_is_there_and_has_a_limit() {
    needs_roots!(_template, server);
    let sandbox = root_with(&server, json!({ "max_mem_mb": 64 }));
    sandbox.sh_as("user", "echo x > /dev/shm/file");
    for user in ["root", "user"] {
        let command = "head -c 200000000 /dev/zero > /dev/shm/large; stat -c %s /dev/shm/large; rm /dev/shm/large";
        let outcome = sandbox.exec_as(user, command);
        let size: u64 = outcome.stdout.trim().parse().unwrap();
        assert!(size <= 64 << 20, "{size}");
        assert_ne!(outcome.stderr, "", "{outcome:?}");
    }
    let many = sandbox.exec(&json!({
        "cmd": "cd /dev/shm; i=0; while : > f$i; do i=$((i+1)); done; echo $i > /tmp/count", "timeout": 60
    }));
    assert_ne!(many.code(), Some(0));
    let count: u64 = sandbox.sh("ls /dev/shm | wc -l").trim().parse().unwrap();
    assert!(count <= 64 * 1024, "{count}");
}

#[test]
fn files_are_where_programs_see_them() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    let written = sandbox.put("files/write?path=/workspace/new/file&mkdir=1", b"text");
    assert!(written.status < 300, "{}", written.text());
    assert_eq!(
        sandbox.sh("cat /workspace/new/file; stat -c %u:%g /workspace/new/file"),
        "text0:0\n"
    );
    assert!(sandbox.put("files/write?path=relative", b"at home").status < 300);
    assert_eq!(sandbox.sh("cat /root/relative"), "at home");
    // Links mean what they mean inside.
    sandbox.sh("ln -s /workspace /link; ln -s ../../../../workspace/new /root/up; ln -s /etc/shadow /secret");
    for path in [
        "/link/new/file",
        "up/file",
        "/link/../workspace/new/file",
        "/../workspace/new/file",
    ] {
        let reply = sandbox.get(&format!("files/read?path={path}"));
        assert_eq!((reply.status, &*reply.text()), (200, "text"), "{path}");
    }
    assert_error(&sandbox.get("files/read?path=/secret"), 404, "not_found");
    assert!(sandbox.put("files/write?path=/link/through", b"x").status < 300);
    assert_eq!(sandbox.sh("cat /workspace/through"), "x");
    // What the machine has at these paths is not there.
    for path in [
        "/proc/self/environ",
        "/dev/null",
        "/sys/kernel",
        &server.place.as_ref().unwrap().homes().display().to_string(),
    ] {
        let reply = sandbox.get(&format!("files/read?path={path}"));
        assert!(
            reply.status >= 400 && reply.status < 500,
            "{path}: {}",
            reply.text()
        );
    }
    // Where root has no right by permissions it has it by being root.
    sandbox.sh_as("user", "mkdir -m 700 /home/user/own; echo private > /home/user/own/file; chmod 600 /home/user/own/file");
    assert_eq!(
        sandbox.get("files/read?path=/home/user/own/file").text(),
        "private\n"
    );
    // A user has only its own.
    let other = root_with(&server, json!({ "user": "user" }));
    assert!(other.put("files/write?path=mine", b"x").status < 300);
    assert_eq!(other.sh("stat -c %u:%g /home/user/mine"), "1000:1000\n");
    for path in ["/etc/passwd", "/new", "/root/x"] {
        let reply = other.put(&format!("files/write?path={path}"), b"x");
        assert_error(&reply, 403, "forbidden");
    }
}

#[test]
fn ids_are_shown_as_they_are_inside() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    sandbox
        .sh("mkdir /d; echo a > /d/a; echo b > /d/b; chown 1000:50 /d/a; chown 65535:65534 /d/b");
    let listed = sandbox.get("files/list?path=/d&detail=full").json();
    let mut ids: Vec<(Value, Value, Value)> = listed["entries"]
        .as_array()
        .or(listed.as_array())
        .unwrap()
        .iter()
        .map(|entry| {
            (
                entry["name"].clone(),
                entry["uid"].clone(),
                entry["gid"].clone(),
            )
        })
        .collect();
    ids.sort_by_key(|(name, ..)| name.to_string());
    assert_eq!(
        json!(ids),
        json!([["a", 1000, 50], ["b", 65_535, 65_534]]),
        "{listed}"
    );
    let archive = sandbox.get("files/archive?path=/d&format=tar");
    assert_eq!(archive.status, 200);
    sandbox.put("files/write?path=/archive.tar", &archive.body);
    let shown = sandbox.sh("tar tvf /archive.tar | awk '{print $2, $6}' | sort");
    assert!(
        shown.contains("1000/50 ") && shown.contains("65535/65534 "),
        "{shown}"
    );
    sandbox.sh("mkdir /e && tar xf /archive.tar -C /e");
    assert_eq!(
        sandbox.sh("cd /e; stat -c %u:%g $(find . -name a) $(find . -name b)"),
        "1000:50\n65535:65534\n"
    );
}

#[test]
fn a_root_outlasts_its_processes() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    sandbox.sh("echo kept > /kept; rm /etc/group; echo kept > /tmp/kept; chown 1234 /kept; echo gone > /dev/shm/gone");
    sandbox.spawn(&json!({ "cmd": "exec sleep 1000", "user": "user" }));
    for _ in 0..3 {
        sandbox.stop();
        assert_eq!(sandbox.get("files/read?path=/kept").text(), "kept\n");
        sandbox.start();
        assert_eq!(
            sandbox.sh(
                "cat /kept /tmp/kept; stat -c %u /kept; ls /etc/group /dev/shm/gone 2>&1 | wc -l"
            ),
            "kept\nkept\n1234\n2\n"
        );
    }
    sandbox.delete();
}

#[test]
fn a_root_outlasts_its_server() {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        needs_roots!(template, server);
        let sandbox = root_with(&server, json!({ "user": "user" }));
        sandbox.sh_as(
            "root",
            "echo kept > /kept; rm /etc/group; chown 1234:4321 /kept",
        );
        sandbox.spawn(&json!({ "cmd": "exec sleep 1000" }));
        let (id, ids) = (sandbox.id.clone(), sandbox.ids.clone());
        let token = sandbox.token.clone();
        let holder = holders_below(server.inner_pid());
        assert_eq!(holder.len(), 1);
        let place = end(server, signal);
        wait_until("all of it has ended", PATIENCE, || {
            processes_of(&ids).is_empty() && !is_alive(holder[0])
        });
        let mut next = template.next(&place).start();
        next.place = Some(place);
        let mut shown = next.get(&format!("/v1/sandboxes/{id}")).json();
        assert_eq!(shown["state"], "stopped");
        assert_eq!(shown["ids"]["first"], ids.start);
        shown["token"] = json!(token);
        let sandbox = super::Root::of(&next, &shown);
        sandbox.start();
        assert_eq!(
            sandbox.sh(
                "cat /kept; stat -c %u:%g /kept; id -u; ls /etc/group 2>/dev/null || echo none"
            ),
            "kept\n1234:4321\n1000\nnone\n"
        );
        sandbox.delete();
        let homes = next.place.as_ref().unwrap().homes();
        assert_eq!(homes_in(&homes), Vec::<String>::new());
    }
}

/// Without its template it is put aside, not lost.
#[test]
fn a_server_without_the_template_leaves_a_root_alone() {
    needs_roots!(template, server);
    let sandbox = root(&server);
    sandbox.sh("echo kept > /kept");
    let id = sandbox.id.clone();
    let place = end(server, Signal::SIGTERM);
    let mut other = crate::host::in_place_of(&place).start();
    assert_eq!(other.get(&format!("/v1/sandboxes/{id}")).status, 404);
    other.place = Some(place);
    let place = end(other, Signal::SIGTERM);
    assert!(place.homes().join(".aside").read_dir().unwrap().count() > 0);
    let kept = std::process::Command::new("find")
        .args([place.homes().to_str().unwrap(), "-name", "kept"])
        .output()
        .unwrap();
    assert_ne!(kept.stdout, b"");
    drop(template);
}

#[test]
fn deleting_leaves_nothing() {
    needs_roots!(_template, server);
    let pid = server.inner_pid();
    root(&server).delete();
    let before = descriptors_of(pid);
    for _ in 0..5 {
        let sandbox = root(&server);
        sandbox.sh(
            "mkdir -p /a/b/c; echo x > /a/b/c/d; chmod 000 /a/b; chown -R 1000 /a; rm -r /home",
        );
        for user in ["root", "user", "7"] {
            sandbox.spawn(
                &json!({ "cmd": "trap '' TERM; while :; do sleep 1000; done", "user": user }),
            );
        }
        assert!(sandbox.own_processes().len() >= 3);
        assert_eq!(holders_below(pid).len(), 1);
        sandbox.delete();
        assert_eq!(holders_below(pid), Vec::<i32>::new());
    }
    wait_until("its mounts are closed", PATIENCE, || {
        descriptors_of(pid) <= before + 1
    });
    assert_eq!(
        homes_in(server.place.as_ref().unwrap().homes()),
        Vec::<String>::new()
    );
}

#[test]
fn its_users_share_one_number_of_processes() {
    needs_roots!(_template, server);
    let sandbox = root_with(&server, json!({ "max_procs": 20 }));
    let command = "for n in $(seq 30); do sleep 1000 & done 2>/dev/null; wait";
    for user in ["1", "2", "3", "user"] {
        let reply = sandbox.post("processes", &json!({ "cmd": command, "user": user }));
        // It may be full before the shell starts.
        assert!(
            reply.status == 200 || reply.status == 400,
            "{}",
            reply.text()
        );
    }
    let counted = || sandbox.own_processes().len();
    wait_until("as many run as may", PATIENCE, || counted() >= 18);
    for _ in 0..50 {
        assert!(counted() <= 22, "{}", counted());
    }
    sandbox.delete();
}

/// More than the server could allow itself.
#[test]
fn as_many_processes_as_there_can_be_may_be_asked_for() {
    needs_roots!(_template, server);
    let sandbox = root_with(&server, json!({ "max_procs": 1_000_000 }));
    assert_eq!(sandbox.sh_as("user", "echo on"), "on\n");
    sandbox.stop();
    sandbox.start();
    assert_eq!(sandbox.sh("echo on"), "on\n");
}

#[test]
fn its_users_share_one_limit_of_memory() {
    needs_roots!(_template, server);
    let sandbox = root_with(&server, json!({ "max_total_mem_mb": 100 }));
    let probe = sandbox.probe();
    let mut hogs = Vec::new();
    for user in ["1", "2", "3", "4"] {
        let mut command = probe.command(&[&["hog-memory", "40"], &["stay"]]);
        command["user"] = json!(user);
        hogs.push(sandbox.spawn(&command)["id"].as_str().unwrap().to_owned());
    }
    wait_until("all are ended for it", PATIENCE, || {
        hogs.iter().all(|id| {
            let entry = sandbox.get(&format!("processes/{id}")).json();
            entry["reason"] == "memory_limit"
        })
    });
    assert_eq!(sandbox.sh("echo on"), "on\n");
}

#[test]
fn a_pause_stops_processes_of_every_user() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    let command = "i=0; while :; do i=$((i+1)); echo $i > /tmp/$(id -u); done";
    for user in ["root", "user", "4321"] {
        sandbox.spawn(&json!({ "cmd": command, "user": user }));
    }
    wait_until("all run", PATIENCE, || {
        ["0", "1000", "4321"]
            .iter()
            .all(|user| sandbox.on_disk().join(format!("up/tmp/{user}")).exists())
    });
    for _ in 0..3 {
        let paused = sandbox.post("pause", &json!({}));
        assert_eq!(paused.json()["state"], "paused", "{}", paused.text());
        let states = || -> Vec<char> {
            let pids = sandbox.own_processes().into_iter();
            pids.filter_map(|pid| Some(stat_of(pid)?.state)).collect()
        };
        let seen = states();
        assert!(
            seen.len() >= 3 && seen.iter().all(|state| "TtZ".contains(*state)),
            "{seen:?}"
        );
        let resumed = sandbox.post("resume", &json!({}));
        assert_eq!(resumed.json()["state"], "running", "{}", resumed.text());
        wait_until("all go on", PATIENCE, || {
            states().iter().all(|state| *state != 'T')
        });
    }
    sandbox.post("pause", &json!({}));
    sandbox.delete();
}

#[test]
fn its_processes_are_counted() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    for user in ["root", "user", "4321"] {
        sandbox.spawn(&json!({ "cmd": "exec sleep 1000", "user": user }));
    }
    sandbox.sh("head -c 3000000 /dev/zero > /large");
    let reply = sandbox.get("metrics");
    assert_eq!(reply.status, 200, "{}", reply.text());
    let metrics = server.connect().request(
        "GET",
        &sandbox.target("metrics?disk=1"),
        &[("Accept", "application/json")],
        b"",
    );
    let metrics = metrics.json();
    let text = metrics.to_string();
    let found = &metrics["processes"];
    assert!(found.as_u64().is_some_and(|count| count >= 3), "{text}");
    let disk = metrics["disk_bytes"].as_u64().unwrap_or(0);
    assert!((3_000_000..50_000_000).contains(&disk), "{text}");
}

#[test]
fn what_cannot_be_made_is_refused() {
    needs_roots!(template, server);
    let health = server.get("/health").json();
    assert_eq!(health["isolation"]["templates"], json!(["box"]));
    for (body, status, code) in [
        (
            json!({ "root": "private", "isolation": "landlock" }),
            400,
            "bad_request",
        ),
        (
            json!({ "root": "private", "template": "other" }),
            400,
            "bad_request",
        ),
        (
            json!({ "root": "private", "template": "" }),
            400,
            "bad_request",
        ),
        (
            json!({ "root": "private", "template": "../box" }),
            400,
            "bad_request",
        ),
        (
            json!({ "root": "private", "user": "x".repeat(257) }),
            400,
            "bad_request",
        ),
        (
            json!({ "root": "private", "read_only_paths": ["/usr"] }),
            400,
            "bad_request",
        ),
        (
            json!({ "root": "private", "read_write_paths": ["/tmp"] }),
            400,
            "bad_request",
        ),
        (
            json!({ "root": "shared", "template": "box" }),
            400,
            "bad_request",
        ),
        (json!({ "template": "box" }), 400, "bad_request"),
        (json!({ "user": "root" }), 400, "bad_request"),
        (json!({ "root": "other" }), 400, "bad_request"),
        (json!({ "root": 5 }), 400, "bad_request"),
    ] {
        let reply = server.post("/v1/sandboxes", &body);
        assert_eq!(
            (reply.status, &*reply.code()),
            (status, code),
            "{body}: {}",
            reply.text()
        );
    }
    assert_eq!(server.get("/v1/sandboxes").json(), json!([]));
    drop(template);
}

#[test]
fn a_machine_without_the_means_says_why() {
    needs_roots!(template, _able);
    let refuses = |server: &Server, why: &str, status: u16, code: &str| {
        let reply = server.post("/v1/sandboxes", &json!({ "root": "private" }));
        assert_eq!(
            (reply.status, &*reply.code()),
            (status, code),
            "{}",
            reply.text()
        );
        assert!(reply.text().contains(why), "{}", reply.text());
        // Others go on.
        assert_eq!(server.sandbox().sh("echo on"), "on\n");
    };
    let without = template
        .builder()
        .wrapped_in(&["setpriv", "--bounding-set=-sys_admin"])
        .start();
    let why = super::lack(&without).unwrap();
    assert!(
        why.contains("EPERM") || why.contains("not permitted"),
        "{why}"
    );
    refuses(&without, "root private is unavailable", 400, "unavailable");
    let none = Server::host().start();
    assert_eq!(super::lack(&none), None, "a snapshot would do");
    refuses(&none, "SBX_TEMPLATES", 400, "bad_request");
    // Blocks are counted from uid 0 on: one for the first uid of the server alone.
    let builder = template.builder();
    let last = 1_000_000 + (first_user(&builder) + 1) * 65_536 - 1;
    let builder = builder.env("SBX_ID_BLOCKS", format!("1000000-{last}"));
    let few = builder.start();
    let reply = few.post("/v1/sandboxes", &json!({ "root": "private", "count": 3 }));
    assert_eq!(reply.json()["rejected"], 2, "{}", reply.text());
    refuses(&few, "SBX_ID_BLOCKS", 503, "no_ids");
    let first = super::Root::of(&few, &reply.json()["sandboxes"][0]);
    first.sh("echo on");
    first.delete();
    super::root(&few).delete();
    let nothing = template
        .builder()
        .env("SBX_ID_BLOCKS", "1000000-1200000")
        .start();
    refuses(&nothing, "SBX_ID_BLOCKS", 400, "unavailable");
}

#[test]
fn templates_that_are_none_end_the_start() {
    if !is_root() {
        skip!("needs root");
    }
    for value in [
        "",
        "box",
        "=/tmp",
        "box=tmp",
        "b/x=/tmp",
        "box=/tmp,box=/usr",
        "box=/tmp,",
        "box=/nowhere/at/all",
        "box=/dev/null",
    ] {
        let output = Server::host()
            .env("SBX_TEMPLATES", value)
            .command()
            .output()
            .unwrap();
        assert!(!output.status.success(), "{value}: {output:?}");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains("SBX_TEMPLATES"), "{value}: {text}");
    }
}

/// The home itself is closed, because what root of a sandbox marks as set-user-ID is that of the machine's root on the
/// disk.
#[test]
fn users_of_the_machine_do_not_reach_its_files() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    sandbox.sh("cp /bin/busybox /own; chmod 4755 /own");
    let file = sandbox.on_disk().join("up/own");
    let status = fs::metadata(&file).unwrap();
    assert_eq!(
        (status.uid(), status.permissions().mode() & 0o7777),
        (0, 0o4755)
    );
    for uid in [
        "12345",
        &sandbox.ids.start.to_string(),
        &(sandbox.ids.start + 1000).to_string(),
    ] {
        let output = std::process::Command::new("setpriv")
            .args([
                &format!("--reuid={uid}"),
                &format!("--regid={uid}"),
                "--clear-groups",
            ])
            .arg(&file)
            .args(["id", "-u"])
            .output()
            .unwrap();
        assert!(
            !output.status.success() && output.stdout.is_empty(),
            "{uid}: {output:?}"
        );
    }
}

/// What a tenant has done to its disk keeps no server from its start.
#[test]
fn a_root_that_cannot_be_made_again_keeps_no_other_from_it() {
    needs_roots!(template, server);
    let (broken, sound) = (root(&server), root(&server));
    sound.sh("echo kept > /kept");
    let (id, uid, on_disk) = (broken.id.clone(), broken.uid, broken.on_disk());
    let (other, token) = (sound.id.clone(), sound.token.clone());
    let place = end(server, Signal::SIGTERM);
    fs::remove_dir_all(on_disk.join("work")).unwrap();
    fs::write(on_disk.join("work"), "").unwrap();
    let mut next = template.next(&place).start();
    next.place = Some(place);
    assert!(next.log().contains(&id), "{}", next.log());
    let mut shown = next.get(&format!("/v1/sandboxes/{other}")).json();
    shown["token"] = json!(token);
    let sound = super::Root::of(&next, &shown);
    sound.start();
    assert_eq!(sound.sh("cat /kept"), "kept\n");
    // Nobody gets its uid, and its files stay.
    for _ in 0..70 {
        let reply = next.post("/v1/sandboxes", &json!({}));
        let made = reply.json();
        let Some(made) = made["sandboxes"].as_array().and_then(|made| made.first()) else {
            break;
        };
        assert_ne!(made["uid"], uid);
    }
    assert!(on_disk.join("up").exists());
}

#[test]
fn a_server_can_make_it_the_default() {
    needs_roots!(
        _template,
        server,
        "SBX_ISOLATION" = "auto",
        "SBX_TEMPLATE" = "box"
    );
    for (body, root) in [
        (json!({}), "private"),
        (json!({ "root": "private" }), "private"),
        (json!({ "root": "shared" }), "shared"),
        (json!({ "isolation": "landlock" }), "shared"),
        (json!({ "isolation": "namespaces" }), "shared"),
    ] {
        let reply = server.post("/v1/sandboxes", &body);
        let made = &reply.json()["sandboxes"][0];
        assert_eq!(made["root"], root, "{body}: {}", reply.text());
        assert_eq!(made["ids"].is_object(), root == "private");
        let layers = made["isolation"]["layers"].to_string();
        assert_eq!(
            layers.contains("no_new_privs"),
            root == "shared",
            "{layers}"
        );
        assert_eq!(
            layers.contains("private_root"),
            root == "private",
            "{layers}"
        );
    }
    for (name, value) in [
        ("SBX_TEMPLATE", "other"),
        ("SBX_ID_BLOCKS", "5-70000"),
        ("SBX_ID_BLOCKS", "1000000"),
        ("SBX_ID_BLOCKS", "2000000-1000000"),
        ("SBX_ID_BLOCKS", "1000000-4294967295"),
    ] {
        let output = Server::host().env(name, value).command().output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{name}={value}: {output:?}");
    }
}
