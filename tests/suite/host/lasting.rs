//! Sandboxes that outlive their server: what is kept, what the next server makes of it, and what it refuses to.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::{
    SANDBOXES, create, first_user, homes_in, in_place_of, names_in, needs_root, target, with_users,
};
use crate::fixture::{
    Connection, HostPlace, PATIENCE, Sandbox, Server, TOKEN, assert_error, wait_until,
};
use crate::skip;

/// Ends a server by a signal, and returns where it was.
#[track_caller]
pub(crate) fn end(mut server: Server, signal: Signal) -> HostPlace {
    let is_orderly = signal != Signal::SIGKILL;
    let pid = if is_orderly {
        server.pid()
    } else {
        server.inner_pid()
    };
    kill(Pid::from_raw(pid), signal).unwrap();
    let status = server.wait_for_exit(Duration::from_secs(12));
    assert_eq!(status.code() == Some(0), is_orderly, "{}", server.log());
    server.place.take().unwrap()
}

/// What the server says of a sandbox.
#[track_caller]
pub(super) fn describe(server: &Server, id: &str) -> Value {
    let reply = server.get(&target(id, ""));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

#[track_caller]
pub(super) fn resume(server: &Server, id: &str) -> Value {
    let reply = server.post(&target(id, "/resume"), &json!({}));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

#[track_caller]
pub(super) fn stop(server: &Server, id: &str) -> Value {
    let reply = server.post(&target(id, "/pause"), &json!({"keep": "files"}));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

/// The records of a place, by their names.
fn records(place: &HostPlace) -> Vec<PathBuf> {
    let directory = place.homes().join(".sandboxes");
    let names = names_in(&directory).into_iter();
    let records = names.filter(|name| name.len() > 24 && name.as_bytes()[24] == b'.');
    records.map(|name| directory.join(name)).collect()
}

#[track_caller]
fn record_of(place: &HostPlace, id: &str) -> PathBuf {
    let all = records(place);
    let own = all.iter().find(|path| path.to_str().unwrap().contains(id));
    own.unwrap_or_else(|| panic!("{id} is not in {all:?}"))
        .clone()
}

#[test]
fn sandboxes_outlive_their_server_however_it_ends() {
    needs_root!();
    for (signal, why) in [
        (Signal::SIGTERM, "restart"),
        (Signal::SIGINT, "restart"),
        (Signal::SIGKILL, "crash"),
    ] {
        let server = Server::host().start();
        let body = json!({"env": {"COLOR": "red"}, "idle_timeout_secs": 900, "max_procs": 77});
        let sandbox = server.sandbox_with(&body);
        let other = server.sandbox();
        let (id, token) = (sandbox.id.clone(), sandbox.token.clone());
        let other_id = other.id.clone();
        sandbox.sh("echo content > file; mkdir -p a/b; ln -s file link; echo $COLOR > color");
        let first = sandbox.spawn(&json!({"cmd": "exec sleep 3600"}));
        let before = describe(&server, &id);
        assert_eq!(
            (&before["state"], &before["why"]),
            (&json!("running"), &Value::Null)
        );
        drop((sandbox, other));
        let place = end(server, signal);
        let next = in_place_of(&place).start();
        assert_eq!(place.processes(), [], "nothing of the former life");
        let mut after = describe(&next, &id);
        assert_eq!(
            (&after["state"], &after["why"]),
            (&json!("stopped"), &json!(why))
        );
        for member in ["state", "why", "state_since_ms", "isolation"] {
            let members = after.as_object_mut().unwrap();
            match before.get(member) {
                Some(value) => drop(members.insert(member.to_owned(), value.clone())),
                None => drop(members.remove(member)),
            }
        }
        assert_eq!(after, before);
        let all = next.get(SANDBOXES).json();
        let ids: Vec<_> = all
            .as_array()
            .unwrap()
            .iter()
            .map(|one| &one["id"])
            .collect();
        assert_eq!(ids, [&json!(id), &json!(other_id)], "in their order");

        // Files need no process.
        let own = |method: &str, rest: &str| {
            let mut connection = Connection::open(next.address, Some(token.clone()));
            connection.request(method, &target(&id, rest), &[], b"")
        };
        assert_eq!(own("GET", "/files/read?path=file").text(), "content\n");
        assert_eq!(own("GET", "/processes").json(), json!([]));
        assert_eq!(own("GET", "/network").status, 200);
        assert_eq!(describe(&next, &id)["state"], "stopped");
        let unknown = own(
            "GET",
            &format!("/processes/{}", first["id"].as_str().unwrap()),
        );
        assert_eq!(unknown.status, 404, "{}", unknown.text());

        // What needs one has the sandbox run again.
        let again = Sandbox::of(
            &next,
            &json!({"id": id, "token": token, "uid": before["uid"], "home": before["home"]}),
        );
        assert_eq!(
            again.sh("cat color; echo $COLOR; readlink link; ls -d a/b"),
            "red\nred\nfile\na/b\n"
        );
        let now = describe(&next, &id);
        assert_eq!(
            (&now["state"], &now["why"]),
            (&json!("running"), &Value::Null)
        );
        let second = again.spawn(&json!({"cmd": "exec sleep 3600"}));
        assert_ne!(first["id"], second["id"], "no id is given twice");
        assert_eq!(describe(&next, &other_id)["state"], "stopped");
        again.delete();
        assert_eq!(homes_in(place.homes()), [other_id.as_str()]);
        assert_eq!(next.delete(&target(&other_id, "")).json()["deleted"], true);
        assert_eq!(records(&place), Vec::<PathBuf>::new());
    }
}

#[test]
fn a_stopped_sandbox_has_files_and_takes_no_commands_until_it_is_resumed() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let id = sandbox.id.clone();
    sandbox.sh("echo one > file");
    let stream = sandbox.exec_stream(&json!({"cmd": "sleep 3600"}));
    sandbox.spawn(&json!({"cmd": "trap '' TERM; setsid sleep 3600 & exec sleep 3600"}));
    let stopped = stop(&server, &id);
    assert_eq!(
        (&stopped["state"], &stopped["why"]),
        (&json!("stopped"), &json!("asked"))
    );
    let exit = stream.last().unwrap();
    assert_eq!(
        (&exit["event"], &exit["reason"]),
        (&json!("exit"), &json!("killed"))
    );
    assert_eq!(sandbox.processes(), Vec::<i32>::new());
    let mut refused = vec![
        ("POST", "/exec", r#"{"cmd":"true"}"#),
        ("POST", "/processes", r#"{"cmd":"true"}"#),
        ("GET", "/proxy/80/", ""),
        ("POST", "/venv", ""),
    ];
    if cfg!(feature = "interpreter") {
        refused.push(("POST", "/contexts", "{}"));
        refused.push(("POST", "/execute", r#"{"code":"1"}"#));
    }
    for (method, rest, body) in refused {
        let reply = server.request(method, &target(&id, rest), body.as_bytes());
        assert_error(&reply, 409, "stopped");
    }
    let write = server.put(&target(&id, "/files/write?path=file"), b"two");
    assert_eq!(write.status, 200, "{}", write.text());
    // Again changes nothing.
    assert_eq!(stop(&server, &id), stopped);
    // Another server finds it as it is, and leaves it.
    drop(sandbox);
    let place = end(server, Signal::SIGKILL);
    let next = in_place_of(&place).start();
    let found = describe(&next, &id);
    assert_eq!(
        (&found["state"], &found["why"]),
        (&json!("stopped"), &json!("asked"))
    );
    assert_error(
        &next.post(&target(&id, "/exec"), &json!({"cmd": "true"})),
        409,
        "stopped",
    );
    let resumed = resume(&next, &id);
    assert_eq!(
        (&resumed["state"], &resumed["why"]),
        (&json!("running"), &Value::Null)
    );
    assert_eq!(resume(&next, &id), resumed, "again changes nothing");
    let outcome = next.post(&target(&id, "/exec"), &json!({"cmd": "cat file"}));
    assert!(outcome.text().contains("two"), "{}", outcome.text());
}

#[test]
fn work_on_files_goes_on_while_a_sandbox_stops_and_starts() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let id = &sandbox.id;
    let mut connection = server.connect();
    let length = 300_000;
    let head = format!(
        "PUT {} HTTP/1.1\r\nHost: x\r\nX-Sandbox-Token: {TOKEN}\r\nContent-Length: {length}\r\n\r\n",
        target(id, "/files/write?path=large")
    );
    connection.send(head.as_bytes());
    let part = vec![b'x'; length / 3];
    connection.send(&part);
    stop(&server, id);
    connection.send(&part);
    resume(&server, id);
    connection.send(&part);
    let reply = connection.read_reply();
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(sandbox.sh("wc -c < large").trim(), length.to_string());
}

#[test]
fn tokens_stay_what_they_are_and_the_hosts_changes() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let (id, token) = (sandbox.id.clone(), sandbox.token.clone());
    drop(sandbox);
    let place = end(server, Signal::SIGTERM);
    let builder = in_place_of(&place).no_token();
    let next = builder.env("SBX_TOKEN", "another").start();
    let ask = |token: &str, rest: &str| {
        let mut connection = Connection::open(next.address, Some(token.to_owned()));
        connection
            .request("GET", &target(&id, rest), &[], b"")
            .status
    };
    assert_eq!(ask(&token, "/files/list?path=/"), 200);
    assert_eq!(ask("another", "/files/list?path=/"), 200);
    assert_eq!(ask(TOKEN, "/files/list?path=/"), 403);
    let key = place.homes().join(".sandboxes/key");
    assert_eq!(fs::read_to_string(&key).unwrap(), TOKEN);
    assert_eq!(fs::metadata(key).unwrap().mode() & 0o7777, 0o600);
    let directory = fs::metadata(place.homes().join(".sandboxes")).unwrap();
    assert_eq!((directory.mode() & 0o7777, directory.uid()), (0o700, 0));
}

#[test]
fn without_keeping_nothing_stays() {
    needs_root!();
    let server = Server::host().start();
    create(&server, 3);
    let place = end(server, Signal::SIGKILL);
    assert_eq!(homes_in(place.homes()).len(), 3);
    let next = in_place_of(&place).env("SBX_KEEP", 0).start();
    assert_eq!(next.get(SANDBOXES).json(), json!([]));
    assert_eq!(
        (homes_in(place.homes()), records(&place)),
        (Vec::new(), Vec::new())
    );
    create(&next, 1);
    assert_eq!(records(&place), Vec::<PathBuf>::new());
}

/// Changes what a killed host has left, starts the next one, and returns what it logs of what it does not take over.
fn aside_after(
    change: impl FnOnce(&HostPlace, &[String]),
) -> (HostPlace, Vec<String>, Vec<String>, Value) {
    let server = Server::host().start();
    let (made, _) = create(&server, 3);
    let ids: Vec<String> = made.iter().map(|sandbox| sandbox.id.clone()).collect();
    drop(made);
    let place = end(server, Signal::SIGKILL);
    change(&place, &ids);
    let next = in_place_of(&place).start();
    let log = next.log();
    let lines = log.lines().filter(|line| line.contains("put aside"));
    let lines = lines.map(ToOwned::to_owned).collect();
    let left = next.get(SANDBOXES).json();
    drop(next);
    (place, ids, lines, left)
}

type Change = fn(&HostPlace, &[String]);

/// What happens to what a killed host has left: its name, what it is, why the next host refuses it, and of how many
/// sandboxes.
const DAMAGES: [(&str, Change, &str, usize); 9] = [
    (
        "cut",
        |place, ids| {
            let record = record_of(place, &ids[0]);
            let text = fs::read(&record).unwrap();
            fs::write(record, &text[..text.len() / 2]).unwrap();
        },
        "it is not whole",
        1,
    ),
    (
        "emptied",
        |place, ids| fs::write(record_of(place, &ids[0]), "").unwrap(),
        "it is not whole",
        1,
    ),
    (
        "exchanged",
        |place, ids| {
            let [one, other] = [&ids[0], &ids[1]].map(|id| record_of(place, id));
            let between = place.homes().join(".between");
            fs::rename(&one, &between).unwrap();
            fs::rename(&other, &one).unwrap();
            fs::rename(&between, &other).unwrap();
        },
        "it is that of sandbox",
        2,
    ),
    (
        "of a stranger",
        |place, ids| {
            chown(record_of(place, &ids[0]), Some(1), Some(1)).unwrap();
        },
        "belongs to root alone",
        1,
    ),
    (
        "readable",
        |place, ids| {
            let mode = fs::Permissions::from_mode(0o644);
            fs::set_permissions(record_of(place, &ids[0]), mode).unwrap();
        },
        "belongs to root alone",
        1,
    ),
    (
        "without a home",
        |place, ids| {
            fs::remove_dir_all(place.homes().join(&ids[0])).unwrap();
        },
        "it has no home",
        1,
    ),
    (
        "without a record",
        |place, ids| {
            fs::remove_file(record_of(place, &ids[0])).unwrap();
        },
        "its home has no record",
        1,
    ),
    (
        "with the home of a stranger",
        |place, ids| {
            chown(place.homes().join(&ids[0]), Some(0), Some(0)).unwrap();
        },
        "its home belongs to uid 0",
        1,
    ),
    (
        "with a link for a home",
        |place, ids| {
            let home = place.homes().join(&ids[0]);
            fs::rename(&home, place.homes().join("moved")).unwrap();
            std::os::unix::fs::symlink(place.homes().join("moved"), home).unwrap();
        },
        "its home is no directory",
        1,
    ),
];

#[test]
fn what_does_not_fit_together_is_put_aside_with_one_line_and_never_lost() {
    needs_root!();
    for (name, change, why, count) in DAMAGES {
        let (place, ids, lines, left) = aside_after(change);
        assert_eq!(lines.len(), count, "{name}: {lines:?}");
        assert!(
            lines.iter().all(|line| line.contains(why)),
            "{name}: {lines:?}"
        );
        let left: Vec<_> = left
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["id"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(left, ids[count..], "{name}");
        let aside = place.homes().join(".aside");
        let names = names_in(&aside);
        assert!(
            names.iter().any(|name| name.contains(&ids[0])),
            "{name}: {names:?}"
        );
        let mode = fs::metadata(aside).unwrap().mode();
        assert_eq!(mode & 0o7777, 0o700, "{name}");
    }
}

#[test]
fn a_uid_that_is_aside_is_given_to_nobody() {
    needs_root!();
    let builder = with_users(3);
    let range = format!("{}-{}", first_user(&builder), first_user(&builder) + 2);
    let server = builder.start();
    let (made, _) = create(&server, 2);
    let (lost, kept) = (made[0].id.clone(), made[1].id.clone());
    let taken: Vec<u64> = made
        .iter()
        .map(|one| describe(&server, &one.id)["uid"].as_u64().unwrap())
        .collect();
    drop(made);
    let place = end(server, Signal::SIGKILL);
    fs::remove_file(record_of(&place, &lost)).unwrap();
    for _ in 0..2 {
        let next = in_place_of(&place).env("SBX_UID_RANGE", &range).start();
        let made = next.post(SANDBOXES, &json!({"count": 3})).json();
        assert_eq!(
            (&made["rejected"], &made["rejected_code"]),
            (&json!(2), &json!("no_uid")),
            "{made}"
        );
        let uid = made["sandboxes"][0]["uid"].as_u64().unwrap();
        assert!(!taken.contains(&uid));
        let id = made["sandboxes"][0]["id"].as_str().unwrap();
        assert_eq!(next.delete(&target(id, "")).json()["deleted"], true);
        assert_eq!(describe(&next, &kept)["state"], "stopped");
        drop(next);
    }
}

#[test]
fn with_too_much_aside_a_host_does_not_start_and_says_what_to_do() {
    needs_root!();
    let server = Server::host().start();
    create(&server, 3);
    let place = end(server, Signal::SIGKILL);
    for record in records(&place) {
        fs::remove_file(record).unwrap();
    }
    let refused = |most: u32| {
        let mut command = in_place_of(&place).env("SBX_ASIDE_MAX", most).command();
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let text = refused(2);
    assert!(
        text.contains("SBX_ASIDE_MAX is 2") && text.contains(".aside"),
        "{text}"
    );
    assert_eq!(homes_in(place.homes()).len(), 3, "nothing was moved");
    let next = in_place_of(&place).env("SBX_ASIDE_MAX", 3).start();
    assert_eq!(next.get(SANDBOXES).json(), json!([]));
    drop(next);
    assert!(refused(2).contains("SBX_ASIDE_MAX is 2"));
}

#[test]
fn a_change_that_a_power_cut_has_torn_costs_the_change_alone() {
    needs_root!();
    let (place, ids, lines, left) = aside_after(|place, ids| {
        let record = record_of(place, &ids[0]);
        let text = fs::read(&record).unwrap();
        fs::write(
            place.homes().join(format!(".sandboxes/{}.2", ids[0])),
            &text[..9],
        )
        .unwrap();
        let torn = place.homes().join(format!(".sandboxes/{}.writing", ids[1]));
        fs::write(&torn, &text[..9]).unwrap();
        for name in [format!("{}.2", ids[0]), format!("{}.writing", ids[1])] {
            let mode = fs::Permissions::from_mode(0o600);
            fs::set_permissions(place.homes().join(".sandboxes").join(name), mode).unwrap();
        }
    });
    assert_eq!(lines, Vec::<String>::new());
    assert_eq!(left.as_array().unwrap().len(), ids.len());
    let names = names_in(place.homes().join(".sandboxes"));
    assert!(
        !names.iter().any(|name| name.ends_with("writing")),
        "{names:?}"
    );
}

#[test]
fn what_was_not_finished_is_finished() {
    needs_root!();
    let (place, ids, lines, left) = aside_after(|place, ids| {
        for (id, suffix) in [(&ids[0], "deleting"), (&ids[1], "making")] {
            let record = record_of(place, id);
            fs::rename(&record, record.with_extension(suffix)).unwrap();
        }
    });
    assert_eq!(lines, Vec::<String>::new());
    assert_eq!(left[0]["id"], ids[2]);
    assert_eq!(homes_in(place.homes()), [ids[2].as_str()]);
    assert!(
        records(&place)
            .iter()
            .all(|path| path.to_str().unwrap().contains(&ids[2]))
    );
}

#[test]
fn expiry_goes_on_and_idle_time_begins_anew() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({"idle_timeout_secs": 2}));
    let (id, home) = (sandbox.id.clone(), sandbox.home.clone());
    drop(sandbox);
    let place = end(server, Signal::SIGTERM);
    let next = in_place_of(&place).start();
    assert_eq!(describe(&next, &id)["state"], "stopped");
    wait_until("it is evicted", PATIENCE, || !home.exists());
    assert_eq!(next.get(&target(&id, "")).status, 404);
    wait_until("its record is gone", PATIENCE, || {
        records(&place).is_empty()
    });
}

#[test]
fn a_host_ends_for_idleness_when_all_are_stopped_and_the_next_has_them() {
    needs_root!();
    let mut server = Server::host().env("SBX_IDLE_TIMEOUT", 1).start();
    let sandbox = server.sandbox();
    let id = sandbox.id.clone();
    drop(sandbox);
    stop(&server, &id);
    assert_eq!(server.wait_for_exit(PATIENCE).code(), Some(0));
    let place = server.place.take().unwrap();
    let next = in_place_of(&place).start();
    let found = describe(&next, &id);
    assert_eq!(
        (&found["state"], &found["why"]),
        (&json!("stopped"), &json!("asked"))
    );
}

/// Has the disk of a server's homes take no changes, or changes again.
#[track_caller]
fn remount(server: &Server, how: &str) {
    let homes = server.place.as_ref().unwrap().homes();
    let status = Command::new("nsenter")
        .args(["-m", "-t", &server.inner_pid().to_string()])
        .args(["mount", "-o", &format!("remount,bind,{how}")])
        .arg(homes)
        .status();
    assert!(status.unwrap().success());
}

#[test]
fn a_disk_that_takes_no_changes_changes_nothing() {
    needs_root!();
    let script = "mkdir -m 711 \"$SBX_HOMES_DIR\" && mount --bind \"$SBX_HOMES_DIR\" \"$SBX_HOMES_DIR\" && exec \"$0\"";
    let probe = ["--mount", "mount", "-t", "tmpfs", "none", "/mnt"];
    let can_mount = Command::new("unshare").args(probe).status();
    if !can_mount.is_ok_and(|status| status.success()) {
        skip!("needs a mount namespace of its own, for a disk that becomes read-only");
    }
    let words = ["unshare", "--mount", "sh", "-c", script];
    let server = Server::host().wrapped_in(&words).start();
    let sandbox = server.sandbox_with(&json!({"name": "kept", "expires_in_secs": 3600}));
    sandbox.sh("echo kept > file");
    let id = sandbox.id.clone();
    drop(sandbox);
    let before = describe(&server, &id);
    let change = |body: &str| server.request("PATCH", &target(&id, ""), body.as_bytes());
    remount(&server, "ro");
    assert_error(&server.post(SANDBOXES, &json!({})), 507, "no_space");
    assert_error(
        &change(r#"{"name":"other","expires_in_secs":null}"#),
        507,
        "no_space",
    );
    assert_eq!(describe(&server, &id), before, "nothing has changed");
    assert_eq!(
        server.get(SANDBOXES).json().as_array().map(Vec::len),
        Some(1)
    );
    let read = server.get(&target(&id, "/files/read?path=file"));
    assert_eq!(read.text(), "kept\n");
    // What is held is written down, or not held.
    let pause = |body: Value| server.post(&target(&id, "/pause"), &body);
    assert_error(&pause(json!({"hold": true})), 507, "no_space");
    assert_eq!(describe(&server, &id)["state"], "running");
    assert_error(
        &pause(json!({"keep": "files", "hold": true})),
        507,
        "no_space",
    );
    assert_eq!(describe(&server, &id)["state"], "running");
    // Changes that fail take back nothing of others.
    for _ in 0..40 {
        assert_eq!(pause(json!({})).status, 200);
        std::thread::scope(|scope| {
            let renamed = scope.spawn(|| change(r#"{"name":"other"}"#));
            resume(&server, &id);
            assert_error(&renamed.join().unwrap(), 507, "no_space");
        });
        let now = describe(&server, &id);
        assert_eq!(now["state"], "running");
        assert!(now["expires_at_ms"].is_u64(), "its time goes on: {now}");
    }
    remount(&server, "rw");
    assert_eq!(change(r#"{"name":"other"}"#).json()["name"], "other");
    let place = end(server, Signal::SIGKILL);
    let next = in_place_of(&place).start();
    let found = describe(&next, &id);
    assert_eq!(
        (&found["name"], &found["why"]),
        (&json!("other"), &json!("crash"))
    );
    assert_eq!(next.get(SANDBOXES).json().as_array().map(Vec::len), Some(1));
    assert!(
        !place.homes().join(".aside").exists() || names_in(place.homes().join(".aside")).is_empty()
    );
}
