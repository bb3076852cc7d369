//! Programs that do not work in other sandboxes and do in namespaces: rows of the table in docs/host-mode.md.

use std::process::Command;

use serde_json::json;

use super::{Way, needs_namespaces, sandbox, sandbox_with};
use crate::fixture::{PATIENCE, TempDir, wait_until};

/// What needs a program that a machine may lack.
fn has(program: &str) -> bool {
    let found = Command::new("sh")
        .args(["-c", "command -v \"$0\"", program])
        .output();
    found.is_ok_and(|output| output.status.success())
}

#[test]
fn what_fails_elsewhere_works() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let (inside, outside) = (sandbox(&server), server.sandbox());
        for (program, command, expected) in [
            ("sh", "echo hello > /tmp/file && cat /tmp/file", "hello"),
            ("sh", "echo hello > /var/tmp/more && cat /tmp/more", "hello"),
            (
                "sh",
                "ls / | grep -x usr; ls /dev | grep -x null",
                "usr\nnull",
            ),
            ("whoami", "whoami", "sandbox"),
            ("id", "id -un; id -gn", "sandbox\nsandbox"),
            (
                "ssh-keygen",
                "ssh-keygen -q -t ed25519 -N '' -f key && cut -d' ' -f1 key.pub",
                "ssh-ed25519",
            ),
            (
                "node",
                "node -e 'console.log(require(\"os\").userInfo().username)'",
                "sandbox",
            ),
            (
                "tmux",
                "env -u TMUX_TMPDIR TERM=xterm tmux new -d -s one 'sleep 100' && tmux ls -F '#{session_name}' && tmux kill-server",
                "one",
            ),
            (
                "python3",
                "python3 -c 'import multiprocessing as m; print(m.Pool(2).map(abs, [-1, 2]))'",
                "[1, 2]",
            ),
            (
                "python3",
                "python3 -c 'from concurrent.futures import ProcessPoolExecutor as P\nwith P(2) as p: print(list(p.map(abs, [-1, 2])))'",
                "[1, 2]",
            ),
            (
                "python3",
                "python3 -c 'from multiprocessing import shared_memory as s\nm = s.SharedMemory(create=True, size=9); m.buf[0] = 7; print(m.buf[0]); m.unlink()'",
                "7",
            ),
            (
                "python3",
                "python3 -c 'import getpass, os, pwd; print(pwd.getpwuid(os.getuid()).pw_dir == os.environ[\"HOME\"])'",
                "True",
            ),
            (
                "ipcmk",
                "ipcmk -M 4096 >/dev/null && ipcs -m | grep -c sandbox",
                "1",
            ),
        ] {
            if !has(program) {
                eprintln!("SKIPPED: no {program}");
                continue;
            }
            let run = |sandbox: &crate::fixture::Sandbox<'_>| {
                sandbox.exec(&json!({ "cmd": command, "timeout": 60 }))
            };
            let here = run(&inside);
            assert_eq!(here.stdout.trim(), expected, "{way:?} {command}: {here:?}");
            assert_eq!(here.code(), Some(0), "{way:?} {command}: {here:?}");
            let there = run(&outside);
            let is_same = there.code() == Some(0) && there.stdout.trim() == expected;
            assert!(!is_same, "it works elsewhere too: {command}");
        }
        assert_eq!(inside.sh("ls /tmp/file").trim(), "/tmp/file", "it stays");
    }
}

#[test]
fn a_web_server_listens_on_a_port_of_its_choice() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let sandbox = sandbox(&server);
        assert_eq!(
            sandbox.put("files/write?path=page.txt", b"hello").status,
            200
        );
        sandbox.spawn(&json!({ "cmd": "exec python3 -m http.server 8000 --bind 127.0.0.1" }));
        let reply = sandbox.get("ports/8000/wait?timeout=20");
        assert_eq!(reply.status, 200, "{}", reply.text());
        let reply = sandbox.get("proxy/8000/page.txt");
        assert_eq!((reply.status, reply.text().as_str()), (200, "hello"));
    }
}

#[test]
fn a_terminal_is_one_of_the_sandbox() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let sandbox = sandbox(&server);
        let command = "tty; test -t 0 && test -w \"$(tty)\" && echo own; ls /dev/pts | sort | tr '\\n' ' '; \
                       echo typed > /dev/tty";
        let outcome = sandbox.exec(&json!({ "pty": true, "cmd": command }));
        let shown = outcome.stdout.replace('\r', "");
        assert_eq!(shown, "/dev/pts/0\nown\n0 ptmx typed\n", "{outcome:?}");
        // Its programs can open more, and see none of other sandboxes.
        // Its number depends on whether the terminal of the command before is closed by then.
        sandbox.spawn(&json!({ "pty": true, "cmd": "tty > given; exec sleep 1000" }));
        let script = "until test -s given; do sleep 0.01; done; cat given; \
                      python3 -c 'import os, pty; m, s = pty.openpty(); print(os.ttyname(s))'";
        let shown = sandbox.sh(script);
        let terminals: Vec<&str> = shown.lines().collect();
        let [given, opened] = terminals[..] else {
            panic!("two terminals: {shown:?}")
        };
        assert_ne!(opened, given, "each has its own");
        for terminal in [opened, given] {
            assert!(terminal.starts_with("/dev/pts/"), "{shown:?}");
        }
        let other = super::sandbox(&server);
        assert_eq!(other.sh("ls /dev/pts").trim(), "ptmx");
    }
}

#[test]
fn paths_that_it_was_given_are_there() {
    needs_namespaces!();
    for way in Way::BOTH {
        let directory = TempDir::new();
        let path = |name: &str| directory.join(name);
        for name in ["read", "read/inner", "write"] {
            std::fs::create_dir(path(name)).unwrap();
        }
        for name in ["read/file", "read/inner/file", "write/file", "alone"] {
            std::fs::write(path(name), "content").unwrap();
        }
        let opened = Command::new("chmod")
            .arg("-R")
            .arg("a+rwX")
            .arg(directory.path())
            .status();
        assert!(opened.unwrap().success());
        let server = way.builder().start();
        let sandbox = sandbox_with(
            &server,
            json!({
                "read_only_paths": [path("read"), path("alone"), path("alone")],
                "read_write_paths": [path("write")],
            }),
        );
        for name in ["read/file", "read/inner/file", "write/file", "alone"] {
            assert_eq!(sandbox.sh(&format!("cat {}", path(name))), "content");
        }
        sandbox.sh(&format!("echo changed > {}", path("write/file")));
        assert_eq!(
            std::fs::read_to_string(path("write/file")).unwrap(),
            "changed\n"
        );
        for name in ["read/file", "read/inner/file", "alone"] {
            let outcome = sandbox.exec(&json!({ "cmd": format!("echo x > {}", path(name)) }));
            assert_ne!(outcome.code(), Some(0), "{outcome:?}");
            assert_eq!(std::fs::read_to_string(path(name)).unwrap(), "content");
        }
    }
}

#[test]
fn interpreters_and_environments_work_inside() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let sandbox = sandbox(&server);
        let context = sandbox.post("contexts", &json!({ "language": "python" }));
        assert_eq!(context.status, 200, "{}", context.text());
        let id = context.json()["id"].as_str().unwrap().to_owned();
        let code = "import os, multiprocessing as m; print(open('/tmp/x', 'w').write('abc'), m.Lock() is not None)";
        let body = json!({ "code": code }).to_string();
        let target = sandbox.target(&format!("contexts/{id}/execute"));
        let events = sandbox.connect().stream("POST", &target, body.as_bytes());
        let text = format!("{:?}", events.collect::<Vec<_>>());
        assert!(text.contains("3 True"), "{text}");
        wait_until(
            "files of the API and of commands are the same",
            PATIENCE,
            || {
                sandbox.put("files/write?path=from-api", b"1").status == 200
                    && sandbox.sh("cat from-api; stat -c %U from-api") == "1sandbox\n"
            },
        );
    }
}
