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

/// Tries everything that a descriptor of a terminal, or its node, is good for, on every terminal but its
/// own, and prints what it was allowed. A descriptor by `O_PATH` can be had of any node.
const ATTACKS: &str = r"
import fcntl, os, struct, termios

def attempt(name, act, *arguments):
    try:
        result = act(*arguments)
        print('ALLOWED', name, result, flush=True)
    except OSError:
        pass

own, victims = os.ttyname(0), 0
word = struct.pack('i', 0)
requests = dict(
    TIOCSCTTY=0x540e, TIOCSTI=0x5412, TIOCGPGRP=0x540f, TIOCSPGRP=0x5410, TIOCGSID=0x5429, TIOCSWINSZ=0x5414,
    TIOCSETD=0x5423, TIOCCONS=0x541d, TIOCGPTPEER=0x5441, TIOCSIG=0x40045436, TIOCSPTLCK=0x40045431, TCXONC=0x540a)
for number in os.listdir('/dev/pts'):
    node = '/dev/pts/' + number
    if node in (own, '/dev/pts/ptmx'):
        continue
    victims += 1
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        attempt('open', os.open, node, flags | os.O_NOCTTY)
    attempt('chmod', os.chmod, node, 0o666)
    attempt('chown', os.chown, node, os.getuid(), -1)
    attempt('unlink', os.unlink, node)
    attempt('rename', os.rename, node, node + '0')
    attempt('link', os.link, node, 'terminal')
    attempt('utime', os.utime, node)
    try:
        path = os.open(node, os.O_PATH)
    except OSError:
        continue
    attempt('reopen', os.open, f'/proc/self/fd/{path}', os.O_RDWR)
    for name, request in requests.items():
        attempt(name, fcntl.ioctl, path, request, word)
        attempt(name + ' 1', fcntl.ioctl, path, request, 1)
for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
        if os.stat('/proc/' + pid).st_uid == os.getuid():
            continue
    except OSError:
        continue
    for number in range(3):
        attempt('open of a process', os.open, f'/proc/{pid}/fd/{number}', os.O_RDWR | os.O_NOCTTY)
# Another session may not have this one's terminal either, even if it says that it takes it by force.
if os.fork() == 0:
    os.setsid()
    for force in (0, 1):
        attempt('steal', fcntl.ioctl, 0, termios.TIOCSCTTY, force)
    os._exit(0)
os.wait()
print('victims', victims, flush=True)
";

#[test]
fn no_system_call_reaches_the_terminal_of_another_sandbox() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().env("PATH", super::SYSTEM_PATH).start();
    let (victim, attacker) = (server.sandbox(), server.sandbox());
    let place = Place::Sandbox(&victim);
    let shell = place.shell();
    node(&shell);
    let body = json!({ "cmd": ["python3", "-c", ATTACKS], "pty": true });
    let outcome = attacker.exec(&body);
    let said = outcome.stdout.trim_end();
    let victims = said.strip_prefix("victims ").map(str::parse::<u32>);
    assert!(matches!(victims, Some(Ok(1..))), "{said}{}", outcome.stderr);
    shell.press("stty size; tty -s && echo fine\n");
    shell.expect("24 80\r\nfine\r\n");
    // The same attacks have an effect where they may.
    let own = victim.exec(&body).stdout;
    assert!(
        own.contains("ALLOWED open ") && own.contains("ALLOWED chmod"),
        "{own}"
    );
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
