//! What stays closed inside namespaces, and what they close besides.

use std::fs;

use serde_json::json;

use super::{Way, holders_of, needs_namespaces, sandbox};
use crate::fixture::{PATIENCE, Server, TOKEN, count_entries, is_alive, secret_server, wait_until};
use crate::walls::probe::{Plan, Probe};

#[test]
fn only_its_own_processes_are_seen() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let (one, other) = (sandbox(&server), sandbox(&server));
        let running = other.spawn(&json!({ "cmd": "exec sleep 1000.25" }));
        let seen = one.sh("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'; ls -d /proc/[0-9]* | wc -l");
        assert!(!seen.contains("1000.25"), "{seen}");
        let count: usize = seen.lines().last().unwrap().trim().parse().unwrap();
        assert!(count <= 6, "{seen}");
        // By its number outside, it is somebody else or nobody.
        let pid = running["pid"].to_string();
        let outcome = one.exec(&json!({ "cmd": format!("kill -9 {pid}; kill -9 -1; true") }));
        assert!(
            outcome.exit["signal"] == json!(9) || outcome.code() == Some(0),
            "{outcome:?}"
        );
        assert!(is_alive(pid.parse().unwrap()));
        assert_eq!(one.sh("echo still here").trim(), "still here");
    }
}

#[test]
fn files_of_others_are_not_there() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let (one, other) = (sandbox(&server), sandbox(&server));
        other.sh("echo secret > /tmp/secret; echo secret > /dev/shm/secret; echo secret > secret; chmod -R 777 . /tmp/secret");
        let mut plan = Plan::default();
        let theirs = other.home.join("secret").to_str().unwrap().to_owned();
        for path in [
            "/tmp/secret",
            "/dev/shm/secret",
            &theirs,
            "/root",
            "/home",
            "/run",
            "/boot",
        ] {
            plan.add(&["read", path], "ENOENT");
            plan.add(&["list", path], "ENOENT");
        }
        for path in [
            "/x", "/usr/x", "/etc/x", "/dev/x", "/proc/x", "/sys/x", "/var/x", "/bin/x",
        ] {
            plan.add(&["create", path], "EACCES|EROFS|ENOENT|EPERM");
            plan.add(&["mkdir", path], "EACCES|EROFS|ENOENT|EPERM");
        }
        for path in ["/etc/passwd", "/etc/group"] {
            plan.add(&["read", path], "ok");
            plan.add(&["write", path], "EACCES|EROFS");
            plan.add(&["unlink", path], "EACCES|EROFS|EBUSY");
            plan.add(&["rename", path, "/etc/other"], "EACCES|EROFS|EBUSY");
        }
        for path in [
            "/proc/sysrq-trigger",
            "/proc/sys/kernel/core_pattern",
            "/proc/sys/kernel/hostname",
            "/proc/1/oom_score_adj",
        ] {
            plan.add(&["write", path], "EACCES|EROFS|EPERM|ENOENT");
        }
        let probe = Probe::new(&one);
        probe.check(&plan);
        // What is in memory outside is not what is inside.
        assert!(!std::path::Path::new("/dev/shm/secret").exists());
        assert!(!std::path::Path::new("/tmp/secret").exists());
    }
}

#[test]
fn mounts_and_namespaces_stay_as_they_are() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let sandbox = sandbox(&server);
        let probe = Probe::new(&sandbox);
        let mut plan = Plan::default();
        let mut refuse = |call: i64, arguments: &[&str], expected: &str| {
            let call = call.to_string();
            let words: Vec<&str> = ["syscall", &call]
                .iter()
                .chain(arguments)
                .copied()
                .collect();
            plan.add(&words, expected);
        };
        refuse(libc::SYS_mount, &["0", "0", "0", "0", "0"], "EPERM");
        refuse(libc::SYS_umount2, &["0", "0"], "EPERM");
        refuse(libc::SYS_chroot, &["0"], "EPERM");
        refuse(libc::SYS_pivot_root, &["0", "0"], "EPERM");
        refuse(libc::SYS_setns, &["0", "0"], "EPERM");
        for flag in [
            libc::CLONE_NEWUSER,
            libc::CLONE_NEWNS,
            libc::CLONE_NEWPID,
            libc::CLONE_NEWNET,
            libc::CLONE_NEWIPC,
        ] {
            refuse(libc::SYS_unshare, &[&flag.to_string()], "EPERM");
        }
        refuse(libc::SYS_sethostname, &["0", "0"], "EPERM");
        refuse(libc::SYS_keyctl, &["0", "0", "0", "0", "0"], "EPERM");
        refuse(libc::SYS_io_uring_setup, &["0", "0"], "ENOSYS");
        probe.check(&plan);
        let status = sandbox.sh("cat /proc/self/status");
        for line in [
            "NoNewPrivs:\t1",
            "Seccomp:\t2",
            "CapEff:\t0000000000000000",
            "CapPrm:\t0000000000000000",
            "CapAmb:\t0000000000000000",
        ] {
            assert!(
                status.lines().any(|found| found == line),
                "{line}: {status}"
            );
        }
        let uid = sandbox.uid;
        assert!(
            status.contains(&format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}")),
            "{status}"
        );
        assert!(
            status.lines().any(|line| line.trim_end() == "Groups:"),
            "{status}"
        );
    }
}

#[test]
fn the_first_process_is_out_of_reach_and_has_nothing() {
    needs_namespaces!();
    for way in Way::BOTH {
        let (server, secret) = secret_server(way.builder());
        let sandbox = sandbox(&server);
        let holder = *holders_of(&server).first().expect("there is one");
        let probe = Probe::new(&sandbox);
        let mut plan = Plan::default();
        for signal in ["1", "9", "15", "19"] {
            plan.add(&["kill", "1", signal], "EPERM");
        }
        for name in ["environ", "mem", "maps", "auxv"] {
            plan.add(&["read", &format!("/proc/1/{name}")], "EACCES|EPERM");
        }
        for name in ["cwd", "root", "exe", "fd/0", "ns/mnt", "ns/user"] {
            plan.add(
                &["readlink", &format!("/proc/1/{name}")],
                "EACCES|EPERM|ENOENT",
            );
        }
        for name in ["fd", "root/.", "cwd/.", "map_files"] {
            plan.add(&["list", &format!("/proc/1/{name}")], "EACCES|EPERM");
        }
        plan.add(&["pidfd-attack", "1"], "EPERM EPERM");
        let attach = libc::SYS_ptrace.to_string();
        plan.add(&["syscall", &attach, "16", "1", "0", "0"], "EPERM");
        let read = libc::SYS_process_vm_readv.to_string();
        plan.add(
            &["syscall", &read, "1", "iov", "1", "iov", "1", "0"],
            "EPERM",
        );
        probe.check(&plan);
        assert!(is_alive(holder));

        let shown = |name: &str| fs::read(format!("/proc/{holder}/{name}")).unwrap();
        assert_eq!(shown("environ"), b"", "no variable");
        assert!(!String::from_utf8_lossy(&shown("cmdline")).contains(&secret));
        assert_ne!(secret, TOKEN);
        for entry in fs::read_dir(format!("/proc/{holder}/fd")).unwrap() {
            let path = entry.unwrap().path();
            let target = fs::read_link(&path).unwrap();
            assert_eq!(target.to_str(), Some("/dev/null"), "{path:?}");
        }
        assert!(count_entries(&format!("/proc/{holder}/fd")) <= 3);
        let status = String::from_utf8(shown("status")).unwrap();
        for line in [
            "NoNewPrivs:\t1",
            "CapEff:\t0000000000000000",
            "CapPrm:\t0000000000000000",
        ] {
            assert!(status.lines().any(|found| found == line), "{status}");
        }
        // Its own memory is small.
        let rss = crate::fixture::memory_of(holder, "RssAnon");
        assert!(rss < 1 << 20, "{rss}");
    }
}

#[test]
fn processes_have_a_limit() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let sandbox = super::sandbox_with(&server, json!({ "max_procs": 20 }));
        let command = "for n in $(seq 40); do sleep 100 & done 2>/dev/null; wait";
        let process = sandbox.spawn(&json!({ "cmd": command }));
        assert!(process["id"].is_string());
        let counted = || sandbox.processes().len();
        // The shell may give up where it cannot start another one.
        wait_until("as many run as may", PATIENCE, || counted() >= 19);
        for _ in 0..20 {
            assert!(counted() <= 20);
        }
        sandbox.delete();
    }
}

#[test]
fn memory_for_files_has_a_limit() {
    needs_namespaces!();
    let server = Server::host().start();
    let sandbox = super::sandbox_with(&server, json!({ "max_mem_mb": 64 }));
    for path in ["/tmp/large", "/dev/shm/large"] {
        let command = format!("head -c 200M /dev/zero > {path}; stat -c %s {path}; rm {path}");
        let outcome = sandbox.exec(&json!({ "cmd": command }));
        let size: u64 = outcome.stdout.trim().parse().unwrap();
        assert!(size <= 64 << 20, "{size}");
        assert!(outcome.stderr.contains("No space left"), "{outcome:?}");
    }
}
