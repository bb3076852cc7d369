//! Nothing gives a command a privilege or another identity.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::json;

use super::probe::{ARGUMENTS, Plan, Probe, command, outcomes, set_file_capabilities};
use crate::fixture::{Outcome, Sandbox, Server, TempDir, copy_program, events_of, is_root};
use crate::skip;

#[test]
fn no_call_changes_who_a_command_is() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let other = server.sandbox();
    let sandbox = server.sandbox();
    let mut plan = Plan::default();
    let own = sandbox.uid.to_string();
    for id in [0, 1, other.uid, 65_534] {
        let id = id.to_string();
        let mut refuse = |call: i64, arguments: &[&str]| {
            let call = call.to_string();
            let act: Vec<&str> = ["syscall", &call]
                .iter()
                .chain(arguments)
                .copied()
                .collect();
            plan.add(&act, "EPERM");
        };
        refuse(libc::SYS_setuid, &[&id]);
        refuse(libc::SYS_setgid, &[&id]);
        refuse(libc::SYS_setreuid, &[&id, "-1"]);
        refuse(libc::SYS_setreuid, &["-1", &id]);
        refuse(libc::SYS_setregid, &[&id, "-1"]);
        refuse(libc::SYS_setresuid, &["-1", "-1", &id]);
        refuse(libc::SYS_setresuid, &[&own, &id, &own]);
        refuse(libc::SYS_setresgid, &["-1", "-1", &id]);
        refuse(libc::SYS_setgroups, &["1", "buffer"]);
        refuse(libc::SYS_setgroups, &["0", "buffer"]);
        plan.add(&["exec-as", &id, "/bin/true"], "EPERM");
        plan.add(&["chown", "probe", &id], "EPERM");
        // These do not fail: they change nothing, and say who it was.
        for call in [libc::SYS_setfsuid, libc::SYS_setfsgid] {
            plan.add(&["syscall", &call.to_string(), &id], "ok");
        }
        plan.add(&["list", other.home.to_str().unwrap()], "EACCES");
        plan.add(&["read", "/etc/shadow"], "EACCES");
    }
    let (prctl, capset) = (libc::SYS_prctl.to_string(), libc::SYS_capset.to_string());
    for (option, operand, expected) in [
        // PR_SET_NO_NEW_PRIVS off, PR_SET_SECCOMP off and strict with nothing, PR_SET_SECUREBITS,
        // PR_CAP_AMBIENT_RAISE, PR_CAPBSET_DROP.
        (38, "0", "EINVAL"),
        (22, "0", "EINVAL"),
        (28, "0", "EPERM"),
        (47, "2", "EPERM"),
        (24, "0", "EPERM"),
    ] {
        plan.add(
            &[
                "syscall",
                &prctl,
                &option.to_string(),
                operand,
                "0",
                "0",
                "0",
            ],
            expected,
        );
    }
    // A header of version 3, then all capabilities, is not zeroes: the kernel refuses both.
    plan.add(&["syscall", &capset, "buffer", "buffer"], "EINVAL|EPERM");
    // To be dumpable again is everybody's right, and shows nothing but itself.
    plan.add(&["syscall", &prctl, "4", "1", "0", "0", "0"], "ok");
    plan.add(&["syscall", &prctl, "4", "2", "0", "0", "0"], "EINVAL");
    Probe::new(&sandbox).check(&plan);
    let status = sandbox.sh("cat /proc/self/status");
    assert!(status.contains("NoNewPrivs:\t1"));
}

#[test]
fn devices_can_be_made_nowhere() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let mut plan = Plan::default();
    let call = libc::SYS_mknodat.to_string();
    for kind in [libc::S_IFCHR, libc::S_IFBLK] {
        for (major, minor) in [(1, 1), (1, 3), (8, 0), (5, 1), (0, 0)] {
            let device = (major << 8 | minor).to_string();
            let mode = (kind | 0o666).to_string();
            // A whiteout, 0:0, is a device that Linux lets everybody make; it cannot be opened.
            let expected = if kind == libc::S_IFCHR && major == 0 {
                "EPERM|ok"
            } else {
                "EPERM"
            };
            plan.add(
                &["syscall", &call, "-100", "text:device", &mode, &device],
                expected,
            );
            plan.add(&["read", "device"], "ENOENT|ENXIO");
            plan.add(&["unlink", "device"], "ENOENT|ok");
        }
    }
    Probe::new(&sandbox).check(&plan);
}

/// What the process that a program becomes is, outside of any sandbox.
fn status_outside(program: &Path, uid: u32) -> String {
    let mut child = Command::new(program)
        .args(ARGUMENTS)
        .uid(uid)
        .gid(uid)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(br#"[["status"]]"#)
        .unwrap();
    let output = child.wait_with_output().unwrap();
    outcomes(&String::from_utf8_lossy(&output.stdout)).remove(0)
}

/// Whether a process has an identity or a capability that a sandbox has not.
fn privileges_in(status: &str) -> bool {
    let line = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("no {name} in {status:?}"))
    };
    let capable = |name: &str| u64::from_str_radix(line(name).trim(), 16).unwrap() != 0;
    let ids: Vec<&str> = line("Uid:").split_whitespace().collect();
    let groups: Vec<&str> = line("Gid:").split_whitespace().collect();
    ids.contains(&"0")
        || groups.contains(&"0")
        || ids.iter().any(|id| *id != ids[0])
        || capable("CapEff:")
        || capable("CapPrm:")
}

/// Puts a program somewhere and makes it dangerous; whatever it gives outside, it gives nothing in a
/// sandbox. Whether it does outside.
fn try_inside(sandbox: &Sandbox<'_>, place: &Path, change: impl FnOnce(&Path)) -> bool {
    let program = place.join("program");
    copy_program(std::env::current_exe().unwrap(), &program);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    change(&program);
    let body = command(program.to_str().unwrap(), &json!([["status"]]));
    let reply = sandbox.post("exec", &body);
    // What cannot be given is not left out of some programs: those do not start.
    if reply.status == 400 {
        assert_eq!(reply.code(), "permission", "{}", reply.text());
    } else {
        let outcome = Outcome::of(events_of(&reply.body));
        let status = outcomes(&outcome.stdout);
        assert_eq!(status.len(), 1, "{outcome:?}");
        assert!(!privileges_in(&status[0]), "{}", status[0]);
    }
    let is_dangerous = privileges_in(&status_outside(&program, sandbox.uid));
    fs::remove_file(program).unwrap();
    is_dangerous
}

#[test]
fn programs_that_would_give_privileges_give_none() {
    if !is_root() {
        skip!("needs root");
    }
    let _ = fs::create_dir("/opt");
    let place = TempDir::below("/opt").or_else(|_| TempDir::below("/usr/local"));
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let mut places = vec![sandbox.home.clone()];
    if let Ok(place) = &place {
        places.push(place.path().to_owned());
    }
    for place in &places {
        for mode in [0o4755, 0o2755, 0o6755] {
            let works = try_inside(&sandbox, place, |path| {
                fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
            });
            assert!(works, "{mode:o} means nothing here, so nothing is proved");
        }
        let mut marked = Ok(());
        let works = try_inside(&sandbox, place, |path| marked = set_file_capabilities(path));
        match marked {
            Ok(()) => assert!(
                works,
                "capabilities mean nothing here, so nothing is proved"
            ),
            Err(error) => eprintln!("no file capabilities here: {error}"),
        }
    }
    for program in ["su", "sudo", "mount", "passwd", "newgrp", "pkexec"] {
        let command = format!("{program} -c 'cat /proc/self/status; id' </dev/null");
        let outcome = sandbox.exec(&json!({ "cmd": command, "timeout": 10 }));
        assert!(
            !outcome.stdout.contains("Uid:\t0"),
            "{program}: {outcome:?}"
        );
        assert!(!outcome.stdout.contains("uid=0"), "{program}: {outcome:?}");
    }
}
