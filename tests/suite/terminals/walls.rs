//! A sandbox's terminals are its own, though all sandboxes share /dev/pts.

use serde_json::{Value, json};

use super::Place;
use crate::fixture::{Mark, PATIENCE, Server, is_alive, is_root, wait_until};
use crate::skip;

/// The node of a terminal, as the process in it knows it.
fn node(screen: &super::Screen<'_>) -> String {
    screen.press("tty\n");
    screen.expect("tty\r\n");
    screen.expect("$ ").trim_end().to_owned()
}

#[test]
fn no_other_sandbox_opens_a_terminal() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().env("PATH", super::SYSTEM_PATH).start();
    let (victim, attacker) = (server.sandbox(), server.sandbox());
    let place = Place::Sandbox(&victim);
    let shell = place.shell();
    let node = node(&shell);
    assert!(node.starts_with("/dev/pts/"), "{node}");
    for act in [
        format!("cat {node}"),
        format!("echo harm > {node}"),
        format!("stty -F {node} -a"),
        format!("stty -F {node} rows 3"),
        format!("chmod 666 {node}"),
        format!("cat < /proc/{}/fd/0", shell.process["pid"]),
        format!("echo harm > /proc/{}/fd/1", shell.process["pid"]),
    ] {
        for pty in [false, true] {
            let outcome = attacker.exec(&json!({ "cmd": act, "pty": pty, "timeout": 10 }));
            assert_ne!(outcome.code(), Some(0), "{act}");
            let said = outcome.stdout + &outcome.stderr;
            let is_refused = ["ermission denied", "not permitted"];
            assert!(
                is_refused.iter().any(|text| said.contains(text)),
                "{act}: {said}"
            );
        }
    }
    shell.press("stty size; echo fine\n");
    let seen = shell.expect("24 80\r\nfine\r\n");
    assert!(!seen.contains("harm"), "{seen}");
    // Its own sandbox may.
    let own = victim.exec(&json!({ "cmd": format!("echo from beside > {node}") }));
    assert_eq!(own.code(), Some(0), "{own:?}");
    shell.expect("from beside\r\n");
}

#[test]
fn nobody_types_for_others_by_a_system_call() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().env("PATH", super::SYSTEM_PATH).start();
    let sandbox = server.sandbox();
    let program = "import fcntl, os, termios\n\
        for name in ('TIOCSTI', 'TIOCSETD'):\n\
        \x20   try:\n\
        \x20       fcntl.ioctl(0, getattr(termios, name), b'\\x02\\0\\0\\0')\n\
        \x20       print(name, 'done')\n\
        \x20   except OSError as error:\n\
        \x20       print(name, error.errno)\n";
    let body = json!({ "cmd": ["python3", "-c", program], "pty": true });
    assert_eq!(sandbox.exec(&body).stdout, "TIOCSTI 1\r\nTIOCSETD 1\r\n");
}

/// A terminal remembers the number of a group that has ended. The number may be another's by then.
#[test]
fn a_signal_for_a_foreground_that_has_ended_reaches_nobody() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().env("PATH", super::SYSTEM_PATH).start();
    let (attacker, victim) = (server.sandbox(), server.sandbox());
    let mark = Mark::new();
    // It puts a group into the foreground that ends at once, and stays itself.
    let program = "import os, signal, sys\n\
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)\n\
        child = os.fork()\n\
        if child == 0:\n\
        \x20   signal.pause()\n\
        os.setpgid(child, child)\n\
        os.tcsetpgrp(0, child)\n\
        os.kill(child, 9)\n\
        os.waitpid(child, 0)\n\
        print('group', child, flush=True)\n\
        signal.pause()\n";
    let place = Place::Sandbox(&attacker);
    let screen = place.open(&json!({ "cmd": ["python3", "-c", program], "pty": true }));
    screen.expect("group ");
    let group: i32 = screen.expect("\r\n").parse().unwrap();
    assert!(!is_alive(group));
    let bystander = victim.spawn(&json!({ "cmd": ["sleep", mark.to_string()] }));
    for signal in ["TERM", "KILL", "INT"] {
        let answer = screen.interrupt(signal);
        // The kernel itself sends INT, to the group that it means.
        assert_eq!(answer["signaled"], Value::Bool(signal == "INT"), "{answer}");
    }
    assert_eq!(screen.entry()["running"], true);
    assert!(is_alive(crate::fixture::pid_of(&bystander)));
    place.request("DELETE", &screen.route(""), b"");
    wait_until("the server answers", PATIENCE, || {
        server.get("/health").status == 200
    });
}
