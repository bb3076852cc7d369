//! A sandbox's terminals are its own, though all sandboxes share /dev/pts.

use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::Place;
use crate::fixture::{NAMESPACE, Sandbox, Server, has_namespaces, init_of, is_root, pid_of};
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
    if !is_root() || !has_namespaces() {
        skip!("numbers are chosen in a namespace of their own, and that needs root");
    }
    let builder = Server::host().env("PATH", super::SYSTEM_PATH);
    let server = builder.wrapped_in(&NAMESPACE).start();
    let _init = EndedInit(init_of(&server));
    let (attacker, victim) = (server.sandbox(), server.sandbox());
    // It puts a group into the foreground that ends at once, and stays itself.
    let program = "import os, signal\n\
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
    let Some(bystander) = with_number(&victim, group) else {
        skip!("the kernel lets nobody choose the next number");
    };
    for signal in ["TERM", "KILL", "INT"] {
        let answer = screen.interrupt(signal);
        // The kernel itself sends INT, to the group that it means.
        assert_eq!(answer["signaled"], signal == "INT", "{answer}");
    }
    assert_eq!(screen.entry()["running"], true);
    let one = format!(
        "processes/{}/wait?timeout=0.2",
        bystander["id"].as_str().unwrap()
    );
    assert_eq!(victim.get(&one).json()["running"], true);
}

/// The first process of a host's namespace, which does not end with its parent. It is killed on drop.
struct EndedInit(i32);

impl Drop for EndedInit {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.0), Signal::SIGKILL);
    }
}

/// Starts a process that gets this number; `None` if that is not possible.
fn with_number(sandbox: &Sandbox<'_>, number: i32) -> Option<Value> {
    let init = init_of(sandbox.server).to_string();
    for attempt in 0..200 {
        // Threads of the server take numbers too.
        let last = number - 1 - attempt % 4;
        let choose = format!("echo {last} > /proc/sys/kernel/ns_last_pid");
        let status = Command::new("nsenter")
            .args(["--target", &init, "--pid", "sh", "-c", &choose])
            .status();
        if !status.is_ok_and(|status| status.success()) {
            return None;
        }
        let process = sandbox.spawn(&json!({ "cmd": ["sleep", "1000"] }));
        if pid_of(&process) == number {
            return Some(process);
        }
        let route = format!("processes/{}", process["id"].as_str().unwrap());
        sandbox.request("DELETE", &route, b"");
    }
    None
}
