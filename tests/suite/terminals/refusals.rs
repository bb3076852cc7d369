//! What is not done, and what the answer says.

use serde_json::{Value, json};

use super::{Place, everywhere};
use crate::fixture::{Builder, Server, TempDir, assert_error, is_root};
use crate::skip;

#[test]
fn a_terminal_that_cannot_be_is_refused_before_anything_starts() {
    everywhere(|place| {
        for (field, value) in [
            ("pty", json!("xterm")),
            ("pty", json!(1)),
            ("pty", json!([])),
            ("rows", json!({ "rows": 0 })),
            ("rows", json!({ "rows": 4097, "cols": 80 })),
            ("rows", json!({ "rows": -1 })),
            ("rows", json!({ "rows": 24.5 })),
            ("cols", json!({ "cols": "80" })),
            ("cols", json!({ "cols": 0 })),
            ("term", json!({ "term": "" })),
            ("term", json!({ "term": "a b" })),
            ("term", json!({ "term": "../etc" })),
            ("term", json!({ "term": "x".repeat(65) })),
            ("term", json!({ "term": 1 })),
        ] {
            for route in ["exec", "processes"] {
                let reply = place.post(route, &json!({ "cmd": "echo hi", "pty": value }));
                assert_error(&reply, 400, "bad_request");
                assert!(reply.text().contains(field), "{value}: {}", reply.text());
            }
        }
        for route in ["exec", "processes"] {
            for stdin in ["", "text"] {
                let body = json!({ "cmd": "cat", "pty": true, "stdin": stdin });
                let reply = place.post(route, &body);
                assert_error(&reply, 400, "bad_request");
                assert!(reply.text().contains("stdin and pty"), "{}", reply.text());
            }
        }
        assert_eq!(place.get("processes").json(), json!([]));
        // Without a terminal, or with null, all is as ever.
        for pty in [json!(false), json!(null)] {
            let reply = place.post(
                "processes",
                &json!({ "cmd": "cat", "pty": pty, "stdin": "" }),
            );
            assert_eq!(reply.json()["pty"], Value::Null);
        }
    });
}

#[test]
fn what_needs_a_terminal_needs_one_that_is_there() {
    everywhere(|place| {
        let size = json!({ "rows": 30, "cols": 100 });
        let foreground = json!({ "signal": "INT", "group": "foreground" });
        let pipes = place.open(&json!({ "cmd": ["cat"] }));
        assert_error(&pipes.post("/resize", &size), 409, "not_pty");
        assert_error(&pipes.post("/kill", &foreground), 409, "not_pty");
        assert_eq!(pipes.entry()["running"], true);
        let ended = place.open(&json!({ "cmd": "true", "pty": true }));
        ended.end();
        assert_error(&ended.post("/resize", &size), 409, "not_running");
        let expected = json!({ "id": ended.process["id"], "signal": 2, "signaled": false });
        assert_eq!(ended.post("/kill", &foreground).json(), expected);
        assert_eq!(ended.entry()["pty"]["rows"], 24, "its size is remembered");
        for (rest, body) in [("/resize", &size), ("/kill", &foreground)] {
            assert_error(
                &place.post(&format!("processes/p-99{rest}"), body),
                404,
                "not_found",
            );
        }
    });
}

#[test]
fn sizes_and_groups_are_checked() {
    everywhere(|place| {
        let screen = place.open(&json!({ "cmd": ["cat"], "pty": true }));
        for body in [
            json!({}),
            json!({ "rows": 10 }),
            json!({ "cols": 10 }),
            json!({ "rows": 0, "cols": 10 }),
            json!({ "rows": 10, "cols": 4097 }),
            json!({ "rows": "10", "cols": 10 }),
            json!({ "rows": 10, "cols": null }),
            json!([10, 10]),
        ] {
            assert_error(&screen.post("/resize", &body), 400, "bad_request");
        }
        assert_eq!(screen.entry()["pty"]["rows"], 24);
        for body in [
            json!({ "signal": "INT", "group": "all" }),
            json!({ "signal": "INT", "group": 1 }),
            json!({ "signal": "NOPE", "group": "foreground" }),
        ] {
            assert_error(&screen.post("/kill", &body), 400, "bad_request");
        }
        assert_eq!(screen.entry()["running"], true);
    });
}

/// Starts a server on a machine whose limit on terminals is what `setup` makes it.
fn server_after(builder: Builder, setup: &str) -> Server {
    let script = format!("{setup} && exec \"$@\"");
    builder
        .wrapped_in(&["unshare", "--mount", "sh", "-c", &script, "sh"])
        .start()
}

fn may_mount() -> bool {
    let mut command = std::process::Command::new("unshare");
    is_root()
        && command
            .args(["--mount", "mount", "--bind", "/dev/null", "/dev/ptmx"])
            .status()
            .is_ok_and(|status| status.success())
}

#[test]
fn without_terminals_on_the_machine_other_commands_run() {
    if !may_mount() {
        skip!("may not mount");
    }
    let server = server_after(Server::builder(), "mount --bind /dev/null /dev/ptmx");
    for route in ["/v1/exec", "/v1/processes"] {
        let reply = server.post(route, &json!({ "cmd": "true", "pty": true }));
        assert_error(&reply, 503, "no_terminals");
    }
    assert_eq!(server.exec(&json!({ "cmd": "true" })).code(), Some(0));
}

#[test]
fn without_bash_the_shell_is_sh() {
    if !may_mount() {
        skip!("may not mount");
    }
    let server = server_after(Server::builder(), "mount --bind /dev/null /bin/bash");
    let place = Place::Machine(&server);
    let screen = place.open(&json!({ "pty": true, "env": { "PS1": "$ " } }));
    screen.press("echo $((6*7)) $0; exit 3\n");
    screen.expect("42 /bin/sh\r\n");
    assert_eq!(screen.end()["exit_code"], 3);
}

/// A server on a machine that says that it has ten terminals, of which the kernel keeps two, and none is open.
fn server_with_ten(builder: Builder) -> (TempDir, Server) {
    let directory = TempDir::new();
    for (name, value) in [("max", 10), ("reserve", 2), ("nr", 0)] {
        std::fs::write(directory.join(name), format!("{value}\n")).unwrap();
    }
    let path = directory.path().display();
    let server = server_after(
        builder,
        &format!("mount --bind {path} /proc/sys/kernel/pty"),
    );
    (directory, server)
}

#[test]
fn a_sandbox_with_its_share_of_terminals_leaves_others_theirs() {
    if !may_mount() {
        skip!("may not mount");
    }
    let (directory, server) = server_with_ten(Server::host());
    let (greedy, other) = (server.sandbox(), server.sandbox());
    let open = |sandbox, count| {
        std::fs::write(directory.join("nr"), format!("{count}\n")).unwrap();
        Place::Sandbox(sandbox).post("processes", &json!({ "cmd": ["cat"], "pty": true }))
    };
    for count in 0..4 {
        assert_eq!(open(&greedy, count).status, 200);
    }
    assert_error(&open(&greedy, 4), 503, "over_limit");
    assert_eq!(open(&other, 4).status, 200);
    assert_eq!(open(&other, 5).status, 200);
    assert_error(&open(&other, 6), 503, "over_limit");
    // Without a terminal all is as ever.
    assert_eq!(greedy.sh("echo here"), "here\n");
}

#[test]
fn one_workspace_leaves_as_many_terminals_as_it_has() {
    if !may_mount() {
        skip!("may not mount");
    }
    let (directory, server) = server_with_ten(Server::builder());
    let place = Place::Machine(&server);
    let open = |count| {
        std::fs::write(directory.join("nr"), format!("{count}\n")).unwrap();
        let reply = place.post("processes", &json!({ "cmd": ["cat"], "pty": true }));
        if reply.status == 200 {
            return reply.json()["id"].as_str().unwrap().to_owned();
        }
        reply.code()
    };
    let ids: Vec<String> = (0..4).map(open).collect();
    assert!(ids.iter().all(|id| id.starts_with("p-")), "{ids:?}");
    assert_eq!(open(4), "over_limit", "it has four, and four are left");
    place.request("DELETE", &format!("processes/{}", ids[0]), b"");
    crate::fixture::wait_until(
        "its terminal counts no more",
        crate::fixture::PATIENCE,
        || open(3).starts_with("p-"),
    );
    assert_eq!(open(8), "no_terminals");
}
