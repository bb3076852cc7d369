//! The end: after every byte, at once, and with all that the process has started.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Place, everywhere};
use crate::fixture::{
    Gate, Mark, Outcome, PATIENCE, Server, is_alive, is_root, may_look_into_processes, reset,
    wait_until,
};
use crate::skip;

/// More than the terminal, the line discipline and a read hold.
const LONG: &str = r#"BEGIN { for (i = 0; i < 1000; i++) printf("%99d\n", i) }"#;

fn long_output() -> String {
    let lines: Vec<String> = (0..1000).map(|line| format!("{line:>99}\r\n")).collect();
    lines.concat()
}

#[test]
fn exit_follows_every_byte() {
    everywhere(|place| {
        let (body, expected) = (json!({ "cmd": ["awk", LONG], "pty": true }), long_output());
        for _ in 0..15 {
            let outcome = Outcome::of(place.stream("POST", "exec", &body).collect());
            assert_eq!(outcome.code(), Some(0));
            assert!(outcome.stdout == expected, "{} bytes", outcome.stdout.len());
        }
        for _ in 0..15 {
            let screen = place.open(&body);
            assert_eq!(screen.end()["stdout_bytes"], expected.len());
            screen.fetch();
            assert!(screen.seen.borrow().1 == expected.as_bytes());
        }
    });
}

#[test]
fn exit_is_told_at_once_whoever_holds_the_terminal() {
    everywhere(|place| {
        let mark = Mark::new();
        let script = format!("trap '' HUP; sleep {mark} & echo done; exit 7");
        let started = Instant::now();
        let body = json!({ "cmd": script, "pty": true, "id": "left" });
        let outcome = Outcome::of(place.stream("POST", "exec", &body).collect());
        // A promise of 250 ms, on a machine that has other things to do.
        assert!(started.elapsed() < PATIENCE / 2);
        assert_eq!((outcome.code(), &outcome.stdout[..]), (Some(7), "done\r\n"));
        assert!(is_alive(mark.any()), "what ignores the hangup stays");
        assert_eq!(place.request("DELETE", "processes/left", b"").status, 200);
        mark.wait_gone(PATIENCE);
    });
}

#[test]
fn a_writer_without_end_does_not_hold_back_the_exit() {
    everywhere(|place| {
        let mark = Mark::new();
        let script = format!("trap '' HUP; yes {mark} & sleep 0.1; exit 5");
        for id in ["first", "second"] {
            let body = json!({ "cmd": script, "pty": true, "id": id });
            let events: Vec<Value> = if id == "first" {
                place.stream("POST", "exec", &body).collect()
            } else {
                assert_eq!(place.post("processes", &body).status, 200);
                let logs = format!("processes/{id}/logs?follow=1");
                place.stream("GET", &logs, &Value::Null).collect()
            };
            assert_eq!(events.last().unwrap()["exit_code"], 5);
            assert_eq!(
                place
                    .request("DELETE", &format!("processes/{id}"), b"")
                    .status,
                200
            );
            mark.wait_gone(PATIENCE);
        }
    });
}

#[test]
fn what_is_written_after_the_exit_is_in_the_log() {
    let server = Server::start();
    let place = Place::Machine(&server);
    let mut gate = Gate::new();
    let script = format!("trap '' HUP; (: < {}; echo late) & echo early", gate.path());
    let screen = place.open(&json!({ "cmd": script, "pty": true }));
    screen.end();
    screen.expect("early\r\n");
    gate.open();
    screen.expect("late\r\n");
    assert_eq!(screen.entry()["stdout_bytes"], 13);
}

#[test]
fn closing_all_descriptors_is_not_the_end() {
    everywhere(|place| {
        let script =
            "exec <&- >&- 2>&-; sleep 0.2; exec </dev/tty >/dev/tty; echo back; tty; exit 4";
        let screen = place.open(&json!({ "cmd": script, "pty": true }));
        assert_eq!(screen.end()["exit_code"], 4);
        screen.expect("back\r\n/dev/tty\r\n");
    });
}

#[test]
fn the_end_hangs_up_on_the_foreground() {
    everywhere(|place| {
        // The client sees it before the leader exits, so the leader's end is not what ends it.
        let script = "(trap 'echo hung up; exit' HUP; echo ready; while :; do sleep 0.05; done) & \
                      read line; exit 0";
        let screen = place.open(&json!({ "cmd": script, "pty": true }));
        screen.expect("ready\r\n");
        screen.press("\n");
        assert_eq!(screen.end()["exit_code"], 0);
        screen.expect("hung up\r\n");
    });
}

/// An interactive shell with jobs in groups, and one in a session, of their own.
const JOBS: &str = "sleep MARK & setsid sleep MARK & nohup sleep MARK >/dev/null 2>&1 & sleep MARK";

#[test]
fn delete_timeout_and_kill_take_the_whole_tree() {
    everywhere(|place| {
        let end_of = |screen: &super::Screen<'_>, how: &str, mark: &Mark| {
            screen.press(&format!("{}\n", JOBS.replace("MARK", &mark.to_string())));
            mark.wait_for(4);
            match how {
                "delete" => {
                    let reply = place.request("DELETE", &screen.route(""), b"");
                    assert_eq!(reply.json()["killed"], true);
                }
                "kill" => {
                    assert_eq!(screen.post("/kill", &json!({})).json()["signaled"], true);
                    assert_eq!(screen.end()["reason"], "killed");
                }
                _ => assert_eq!(screen.end()["reason"], "timeout"),
            }
            mark.wait_gone(PATIENCE);
        };
        for how in ["delete", "kill", "timeout"] {
            let mut body = json!({ "cmd": ["bash", "--norc", "-i"], "pty": true });
            if how == "timeout" {
                body["timeout"] = json!(3);
            }
            end_of(&place.open(&body), how, &Mark::new());
        }
    });
}

#[test]
fn a_client_that_vanishes_ends_its_own_command_and_no_other() {
    everywhere(|place| {
        let mark = Mark::new();
        let run = |id: &str, more: Value| {
            let mut body = json!({ "cmd": ["sleep", mark.to_string()], "pty": true, "id": id });
            body.as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            let mut stream = place.stream("POST", "exec", &body);
            assert_eq!(stream.next().unwrap()["id"], id);
            stream
        };
        let background = place.open(&json!({ "cmd": ["sleep", mark.to_string()], "pty": true }));
        let follow = background.route("/logs?follow=1");
        let follower = place.stream("GET", &follow, &Value::Null);
        let kept = run("kept", json!({ "on_disconnect": "keep" }));
        let killed = run("killed", json!({}));
        for stream in [follower, kept, killed] {
            reset(stream.connection);
        }
        let running = |id: &str| place.get(&format!("processes/{id}")).json()["running"] == true;
        wait_until("its command ends", PATIENCE, || !running("killed"));
        let ended = place.get("processes/killed").json();
        assert_eq!(ended["reason"], "disconnected");
        assert!(running("kept"));
        assert_eq!(background.entry()["running"], true);
        for id in ["kept", background.process["id"].as_str().unwrap()] {
            place.request("DELETE", &format!("processes/{id}"), b"");
        }
    });
}

#[test]
fn the_server_keeps_no_terminal_of_what_has_ended() {
    if !may_look_into_processes() {
        skip!("the server's descriptors cannot be seen without CAP_SYS_PTRACE");
    }
    let server = Server::start();
    let place = Place::Machine(&server);
    let terminals = || {
        let entries = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap();
        let links = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        links
            .filter(|link| link.starts_with("/dev/pts") || link.ends_with("ptmx"))
            .count()
    };
    let screens: Vec<_> = (0..5)
        .map(|_| place.open(&json!({ "cmd": "read line", "pty": true })))
        .collect();
    assert_eq!(terminals(), 10, "both ends of each");
    for screen in &screens {
        screen.press("\n");
        screen.end();
    }
    wait_until("all are closed", PATIENCE, || terminals() == 0);
}

/// An interactive shell ignores SIGTERM, and would take all of the five seconds that a server waits.
#[test]
fn a_server_that_ends_hangs_up_on_shells() {
    let mut machine = Server::start();
    wait_in_a_shell(&Place::Machine(&machine));
    ends_promptly(&mut machine);
    if is_root() {
        let mut host = Server::host().env("PATH", super::SYSTEM_PATH).start();
        let sandbox = host.sandbox();
        wait_in_a_shell(&Place::Sandbox(&sandbox));
        ends_promptly(&mut host);
    }
}

/// Starts a shell that waits for a command.
fn wait_in_a_shell(place: &Place<'_>) {
    let shell = place.shell();
    shell.press("echo wai\"\"ts; sleep 1000\n");
    shell.expect("waits\r\n");
}

#[track_caller]
fn ends_promptly(server: &mut Server) {
    let asked = Instant::now();
    server.signal(libc::SIGTERM);
    server.wait_for_exit(PATIENCE);
    assert!(
        asked.elapsed() < Duration::from_secs(4),
        "{:?}",
        asked.elapsed()
    );
}
