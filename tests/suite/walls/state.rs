//! What a command in a sandbox is: every part of its state that it can read back.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde_json::json;

use super::probe::Probe;
use crate::fixture::{Server, is_root, may_lower_nice};
use crate::skip;

/// What the kernel says about a process that only reads it.
fn status(text: &str) -> BTreeMap<String, String> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| {
            let words: Vec<&str> = value.split_whitespace().collect();
            (name.to_owned(), words.join(" "))
        })
        .collect()
}

/// Sessions share the processor before processes do (sched(7)).
#[test]
fn the_servers_session_comes_before_those_of_commands() {
    if !is_root() {
        skip!("needs root");
    }
    let has_autogroups =
        fs::read_to_string("/proc/sys/kernel/sched_autogroup_enabled").is_ok_and(|on| on == "1\n");
    if !has_autogroups || !may_lower_nice() {
        skip!("needs CAP_SYS_NICE and a kernel with autogroups");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let pid = server.inner_pid();
    let autogroup = fs::read_to_string(format!("/proc/{pid}/autogroup")).unwrap();
    assert!(autogroup.ends_with(" nice -20\n"), "{autogroup}");
    let session = fs::read_to_string("/proc/self/autogroup").unwrap();
    assert!(!session.ends_with(" nice -20\n"), "not that of the tests");
    let inside = sandbox.sh("cat /proc/self/autogroup; echo -20 > /proc/self/autogroup || true");
    assert!(inside.ends_with(" nice 0\n"), "{inside}");
}

#[test]
fn a_command_has_its_own_user_no_capability_a_filter_and_no_signal_blocked_or_ignored() {
    if !is_root() {
        skip!("needs root");
    }
    // A server that was itself started with signals ignored, with groups, and with capabilities for
    // whatever it starts.
    let script = "trap '' HUP QUIT USR1 TERM
        if command -v setpriv >/dev/null; then
            exec setpriv --groups 4,24 --inh-caps +chown,+kill --ambient-caps +chown,+kill \"$0\"
        fi
        exec \"$0\"";
    let server = Server::host()
        .wrapped_in(&["/bin/sh", "-c", script])
        .start();
    let sandbox = server.sandbox();
    let uid = sandbox.uid;
    for body in [
        json!({ "cmd": ["cat", "/proc/self/status"] }),
        json!({ "cmd": "exec cat /proc/self/status" }),
        json!({ "cmd": "cat /proc/self/status", "timeout": 60 }),
    ] {
        let status = status(&sandbox.exec(&body).stdout);
        let four = [uid; 4].map(|uid| uid.to_string()).join(" ");
        for (name, expected) in [
            ("Uid", four.as_str()),
            ("Gid", &four),
            ("Groups", ""),
            ("CapInh", "0000000000000000"),
            ("CapPrm", "0000000000000000"),
            ("CapEff", "0000000000000000"),
            ("CapBnd", "0000000000000000"),
            ("CapAmb", "0000000000000000"),
            ("NoNewPrivs", "1"),
            ("Seccomp", "2"),
            ("SigBlk", "0000000000000000"),
            ("SigIgn", "0000000000000000"),
            ("SigPnd", "0000000000000000"),
            ("TracerPid", "0"),
        ] {
            assert_eq!(status[name], expected, "{name} of {body}");
        }
        // One filter more than the server itself has (a container's).
        let own = fs::read_to_string("/proc/self/status").unwrap();
        let own = self::status(&own);
        let count = |status: &BTreeMap<String, String>| status["Seccomp_filters"].parse::<u32>();
        assert_eq!(count(&status), count(&own).map(|count| count + 1));
    }
    // The system calls agree with the file system's view.
    assert_eq!(
        sandbox.sh("id -u; id -g; id -G"),
        format!("{uid}\n{uid}\n{uid}\n")
    );
    assert_eq!(Probe::new(&sandbox).run_one(&["groups"]), "0");
}

#[test]
fn a_command_has_no_descriptor_but_its_three_streams() {
    if !is_root() {
        skip!("needs root");
    }
    // Descriptors that the server was started with, by somebody who leaks them.
    let leaked: Vec<File> = (0..20)
        .map(|_| File::open("/etc/passwd").unwrap())
        .inspect(|file| {
            fcntl(file, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
        })
        .collect();
    let server = Server::host().start();
    drop(leaked);
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    // What the server has many of: connections, sandboxes, processes with their pipes, streams.
    let connections: Vec<_> = (0..50).map(|_| server.connect()).collect();
    let others: Vec<_> = (0..10).map(|_| server.sandbox()).collect();
    for other in &others {
        other.spawn(&json!({ "cmd": "sleep 1000" }));
        sandbox.spawn(&json!({ "cmd": "sleep 1000" }));
    }
    let streams: Vec<_> = others
        .iter()
        .map(|other| other.exec_stream(&json!({ "cmd": "sleep 1000" })))
        .collect();
    for _ in 0..5 {
        assert_eq!(probe.run_one(&["descriptors"]), "0 1 2");
    }
    let held = probe.hold(&[]);
    let open = std::fs::read_dir(format!("/proc/{}/fd", held["pid"])).unwrap();
    assert_eq!(open.count(), 3, "of a background process");
    drop((connections, streams));
}

#[test]
fn a_command_leads_a_session_and_a_process_group_of_its_own() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    let outcome = sandbox.exec(&probe.command(&[&["ids"]]));
    let pid = &outcome.start["pid"];
    assert!(
        outcome.stdout.contains(&format!("@\"{pid} {pid} {pid}\"")),
        "{outcome:?}"
    );
    // And no terminal: there is none to read from or type into.
    assert_eq!(probe.run_one(&["read", "/dev/tty"]), "ENXIO");
}

#[test]
fn limits_are_those_of_the_sandbox_and_cannot_be_raised() {
    if !is_root() {
        skip!("needs root");
    }
    let script = "ulimit -S -c 1000; ulimit -S -n 700; ulimit -H -n 900; exec \"$0\"";
    let server = Server::host()
        .wrapped_in(&["/bin/sh", "-c", script])
        .start();
    let plain = server.sandbox();
    let small = server.sandbox_with(&json!({ "max_procs": 77, "max_mem_mb": 96 }));
    let limit = |probe: &Probe<'_>, resource: u32| probe.run_one(&["limit", &resource.to_string()]);
    let unlimited = u64::MAX.to_string();
    // By the number of processors.
    let told = server.get(&format!("/v1/sandboxes/{}", plain.id)).json();
    let usual = told["max_procs"].as_u64().unwrap();
    assert!(usual > 0 && usual <= 4096, "{told}");
    for (sandbox, processes, memory) in [
        (&plain, usual, format!("{unlimited} {unlimited}")),
        (&small, 77, format!("{0} {0}", 96 << 20)),
    ] {
        let probe = Probe::new(sandbox);
        let resources = [
            (libc::RLIMIT_NPROC, format!("{processes} {processes}")),
            // Not 0: a program for core dumps would be started all the same.
            (libc::RLIMIT_CORE, "1 1".to_owned()),
            (libc::RLIMIT_NOFILE, "700 900".to_owned()),
            (libc::RLIMIT_DATA, memory),
        ];
        for (resource, expected) in resources {
            assert_eq!(
                limit(&probe, resource.cast_unsigned()),
                expected,
                "resource {resource}"
            );
        }
        for resource in [libc::RLIMIT_NPROC, libc::RLIMIT_NOFILE] {
            let act = ["raise-limit", &resource.to_string()];
            assert_eq!(probe.run_one(&act), "EPERM", "resource {resource}");
        }
        // Whatever is asked for: neither a higher one nor 0.
        let core = libc::RLIMIT_CORE.to_string();
        assert_eq!(probe.run_one(&["raise-limit", &core]), "ok");
        let call = libc::SYS_prlimit64.to_string();
        for value in ["buffer", "0x100000000"] {
            let act = ["syscall", &call, "0", &core, value, "0"];
            assert_eq!(probe.run_one(&act), "ok", "{value}");
        }
        let act = ["syscall", &call, "0", &core, "0", "buffer"];
        assert_eq!(probe.run_one(&act), "ok", "it is told");
        let kept = "ulimit -Sc 0; ulimit -Hc 0; grep '^Max core' /proc/self/limits";
        let kept = sandbox.sh(kept);
        let kept: Vec<&str> = kept.split_whitespace().rev().take(3).collect();
        assert_eq!(kept, ["bytes", "1", "1"]);
        if sandbox.id == small.id {
            let act = ["raise-limit", &libc::RLIMIT_DATA.to_string()];
            assert_eq!(probe.run_one(&act), "EPERM");
        }
        // In which case the shell tells of the signal, too.
        let crash = "cp /bin/sleep s; ./s 1000 & kill -SEGV $!; wait $! 2>/dev/null; ls; ulimit -c";
        assert_eq!(sandbox.sh(crash), "probe\ns\n0\n", "no core file");
        assert_eq!(
            sandbox.sh("nice"),
            "10\n",
            "less of the processor than the server"
        );
        assert_ne!(sandbox.sh("nice -n -1 nice 2>/dev/null"), "9\n");
        // Nor are the server's limits anybody's to change.
        let call = libc::SYS_prlimit64.to_string();
        let parent = server.inner_pid().to_string();
        for resource in [libc::RLIMIT_NPROC, libc::RLIMIT_NOFILE] {
            let resource = resource.to_string();
            let act = ["syscall", &call, &parent, &resource, "buffer", "0"];
            assert_eq!(probe.run_one(&act), "EPERM", "limits of the server");
        }
    }
}

#[test]
fn a_command_is_taken_before_the_server_when_memory_runs_out() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let score = |pid: &str| {
        let text = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        text.trim().parse::<i32>().unwrap()
    };
    let own = score(&server.inner_pid().to_string());
    let sandbox = server.sandbox();
    let inside = sandbox.sh("cat /proc/self/oom_score_adj");
    let inside: i32 = inside.trim().parse().unwrap();
    assert_eq!(inside, (own + 900).min(1000));
    // Nor does it come back below.
    let mut plan = super::probe::Plan::default();
    plan.add(
        &["put", "/proc/self/oom_score_adj", &own.to_string()],
        "EACCES",
    );
    plan.add(&["put", "/proc/self/oom_adj", "-17"], "EACCES|ENOENT");
    Probe::new(&sandbox).check(&plan);
    let spawned = sandbox.spawn(&json!({ "cmd": "sleep 1000" }));
    assert_eq!(score(&spawned["pid"].to_string()), inside);
}

#[test]
fn the_environment_is_what_the_sandbox_and_the_command_were_given_and_nothing_of_the_servers() {
    if !is_root() {
        skip!("needs root");
    }
    let path = "/usr/bin:/bin";
    let server = Server::host()
        .env("HF_TOKEN", "hf_secret")
        .env("LD_LIBRARY_PATH", "/nowhere")
        .env("SBX_CAPACITY", 7)
        .env("HOSTS_OWN", "secret")
        .env("PATH", path)
        .start();
    let sandbox = server.sandbox_with(&json!({ "env": {
        "OF_SANDBOX": "one", "BOTH": "sandbox", "NUMBER": 7, "GONE": "yes", "LOGNAME": "other",
    } }));
    let probe = Probe::new(&sandbox);
    let mut body = probe.command(&[&["environment"]]);
    body["env"] = json!({ "OF_COMMAND": "two", "BOTH": "command", "GONE": null });
    let outcome = sandbox.exec(&body);
    let line = outcome
        .stdout
        .lines()
        .find_map(|line| line.strip_prefix('@'))
        .unwrap();
    let listed: String = serde_json::from_str(line).unwrap();
    let home = sandbox.home.to_str().unwrap();
    let id = &sandbox.id;
    let mut expected = [
        "BOTH=command".to_owned(),
        format!("HOME={home}"),
        "LANG=C.UTF-8".to_owned(),
        "LOGNAME=other".to_owned(),
        "NUMBER=7".to_owned(),
        "OF_COMMAND=two".to_owned(),
        "OF_SANDBOX=one".to_owned(),
        format!("PATH={home}/.local/bin:{path}"),
        format!("SBX_PROXY_DIR={home}/.sbx/proxy"),
        format!("SBX_SANDBOX_ID={id}"),
        format!("TMPDIR={home}/.tmp"),
        "USER=sandbox".to_owned(),
    ];
    expected.sort();
    assert_eq!(listed, expected.join("\n"));
    // The next command knows nothing of the one before.
    assert!(!sandbox.sh("env").contains("OF_COMMAND"));
}

#[test]
fn a_command_starts_in_a_home_that_is_its_users_alone_with_what_its_environment_names() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host()
        .wrapped_in(&["/bin/sh", "-c", "umask 077; exec \"$0\""])
        .start();
    let sandbox = server.sandbox();
    let home = sandbox.home.to_str().unwrap();
    for name in ["", ".tmp", ".sbx", ".sbx/proxy"] {
        let found = fs::symlink_metadata(sandbox.home.join(name)).unwrap();
        assert!(found.is_dir(), "{name}");
        assert_eq!(
            (found.uid(), found.gid()),
            (sandbox.uid, sandbox.uid),
            "{name}"
        );
        if name.is_empty() {
            assert_eq!(found.permissions().mode() & 0o7777, 0o700);
        }
    }
    let homes = sandbox.home.parent().unwrap();
    let homes = fs::metadata(homes).unwrap();
    assert_eq!(
        (homes.uid(), homes.permissions().mode() & 0o7777),
        (0, 0o711)
    );
    assert_eq!(sandbox.sh("pwd"), format!("{home}\n"));
    assert_eq!(sandbox.sh("cd && pwd; umask"), format!("{home}\n0022\n"));
    // TMPDIR, the proxy's directory, and programs of its own before the machine's.
    sandbox.sh("echo x > \"$TMPDIR/x\" && echo x > \"$SBX_PROXY_DIR/x\" && mkdir -p .local/bin");
    sandbox.sh("printf '#!/bin/sh\\necho own\\n' > .local/bin/cat && chmod +x .local/bin/cat");
    assert_eq!(sandbox.sh("cat"), "own\n");
    assert_eq!(sandbox.exec(&json!({ "cmd": ["cat"] })).stdout, "own\n");
}
