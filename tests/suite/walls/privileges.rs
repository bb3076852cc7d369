//! Nothing gives a command a privilege or another identity.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use super::probe::{Plan, Probe, set_file_capabilities};
use crate::fixture::{Sandbox, Server, TempDir, is_root};
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

/// What an effective uid is, by a program that is not told.
const WHO: &str = "cat /proc/self/status";

/// Whether a program that is to give its user privileges does so outside a sandbox.
fn works_outside(program: &Path, uid: u32) -> bool {
    let output = Command::new(program)
        .args(["-c", "exec cat /proc/self/status"])
        .uid(uid)
        .gid(uid)
        .current_dir("/")
        .output();
    output.is_ok_and(|output| privileges_in(&String::from_utf8_lossy(&output.stdout)))
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

/// Puts a shell somewhere that `change` makes dangerous; where it works outside, it must not inside.
fn try_inside(sandbox: &Sandbox<'_>, place: &Path, name: &str, change: impl FnOnce(&Path)) -> bool {
    let program = place.join(name);
    fs::copy(fs::canonicalize("/bin/sh").unwrap(), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    change(&program);
    let works = works_outside(&program, sandbox.uid);
    for command in [
        format!("exec {} -c 'exec cat /proc/self/status'", program.display()),
        format!(
            "exec {} -p -c 'exec cat /proc/self/status'",
            program.display()
        ),
    ] {
        let outcome = sandbox.exec(&serde_json::json!({ "cmd": command }));
        if outcome.code() == Some(0) {
            assert!(
                !privileges_in(&outcome.stdout),
                "{name}: {}",
                outcome.stdout
            );
        }
    }
    works
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
    let mut proved = 0;
    for place in &places {
        proved += u32::from(try_inside(&sandbox, place, "setuid", |path| {
            fs::set_permissions(path, fs::Permissions::from_mode(0o4755)).unwrap();
        }));
        proved += u32::from(try_inside(&sandbox, place, "setgid", |path| {
            fs::set_permissions(path, fs::Permissions::from_mode(0o2755)).unwrap();
        }));
        proved += u32::from(try_inside(&sandbox, place, "capable", |path| {
            if let Err(error) = set_file_capabilities(path) {
                eprintln!("no file capabilities here: {error}");
            }
        }));
    }
    // The shell itself may give up what it was given; the kernel has given it all the same.
    eprintln!("{proved} of {} would have worked outside", places.len() * 3);
    for program in ["su", "sudo", "mount", "passwd", "newgrp", "pkexec"] {
        let outcome = sandbox.exec(&serde_json::json!({
            "cmd": format!("{program} -c '{WHO}' </dev/null"), "timeout": 10,
        }));
        assert!(
            !outcome.stdout.contains("Uid:\t0"),
            "{program}: {outcome:?}"
        );
        assert!(!outcome.stdout.contains("uid=0"), "{program}: {outcome:?}");
    }
}
