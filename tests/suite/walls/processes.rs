//! No process outside a sandbox is seen into, signalled or traced from inside.

use std::fs;

use serde_json::json;

use super::Neighbour;
use super::probe::{ARGUMENTS, Plan, Probe};
use crate::fixture::{PATIENCE, Server, Stop, is_root, kinds, secret_server, stat_of, wait_until};
use crate::skip;

/// What a process shows of itself in /proc to those who may trace it, and only to them.
fn look_into(plan: &mut Plan, pid: &str) {
    let below = |name: &str| format!("/proc/{pid}/{name}");
    for name in [
        "environ",
        "mem",
        "maps",
        "smaps",
        "auxv",
        "pagemap",
        "stack",
        "syscall",
        "io",
        "map_files",
    ] {
        plan.add(&["read", &below(name)], "EACCES|EPERM|ENOENT");
    }
    for name in [
        "mem",
        "oom_score_adj",
        "clear_refs",
        "timerslack_ns",
        "coredump_filter",
        "comm",
    ] {
        plan.add(&["write", &below(name)], "EACCES|EPERM");
    }
    for name in ["cwd", "root", "exe", "fd/0", "ns/mnt", "ns/user"] {
        plan.add(&["readlink", &below(name)], "EACCES|EPERM");
    }
    for name in [
        "fd",
        "fdinfo",
        "map_files",
        "cwd/.",
        "root/.",
        "task/self/fd",
    ] {
        plan.add(&["list", &below(name)], "EACCES|EPERM|ENOENT");
    }
    plan.add(&["read", &below("root/etc/passwd")], "EACCES");
    plan.add(&["exec", &below("exe")], "EACCES");
}

/// What can be done to a process by its number.
fn reach_into(plan: &mut Plan, pid: &str) {
    let refused = "EPERM|EACCES|ESRCH";
    for signal in [0, 1, 2, 9, 10, 15, 18, 19] {
        plan.add(&["kill", pid, &signal.to_string()], "EPERM");
    }
    let call = |plan: &mut Plan, number: i64, arguments: &[&str]| {
        let number = number.to_string();
        let act: Vec<&str> = ["syscall", number.as_str()]
            .iter()
            .chain(arguments)
            .copied()
            .collect();
        plan.add(&act, refused);
    };
    call(plan, libc::SYS_tgkill, &[pid, pid, "9"]);
    call(plan, libc::SYS_tkill, &[pid, "9"]);
    call(plan, libc::SYS_rt_sigqueueinfo, &[pid, "9", "buffer"]);
    for request in [16, 0x4206] {
        call(
            plan,
            libc::SYS_ptrace,
            &[&request.to_string(), pid, "0", "0"],
        );
    }
    call(
        plan,
        libc::SYS_process_vm_readv,
        &[pid, "iov", "1", "iov", "1", "0"],
    );
    call(
        plan,
        libc::SYS_process_vm_writev,
        &[pid, "iov", "1", "iov", "1", "0"],
    );
    call(plan, libc::SYS_kcmp, &[pid, "self", "0", "0", "0"]);
    call(plan, libc::SYS_prlimit64, &[pid, "7", "0", "buffer"]);
    call(plan, libc::SYS_prlimit64, &[pid, "7", "buffer", "0"]);
    call(plan, libc::SYS_setpriority, &["0", pid, "19"]);
    call(plan, libc::SYS_sched_setaffinity, &[pid, "8", "buffer"]);
    call(plan, libc::SYS_sched_setscheduler, &[pid, "5", "buffer"]);
    call(plan, libc::SYS_ioprio_set, &["1", pid, "0x6000"]);
    call(
        plan,
        libc::SYS_migrate_pages,
        &[pid, "1", "buffer", "buffer"],
    );
    call(plan, libc::SYS_setpgid, &[pid, pid]);
    call(plan, libc::SYS_get_robust_list, &[pid, "buffer", "buffer"]);
    // By a descriptor of the process, which anybody can get.
    let path = format!("open:/proc/{pid}");
    call(plan, libc::SYS_pidfd_send_signal, &[&path, "9", "0", "0"]);
}

#[test]
fn the_server_and_its_init_can_neither_be_looked_into_nor_touched() {
    if !is_root() {
        skip!("needs root");
    }
    let mut server = Server::host().start();
    let sandbox = server.sandbox();
    let mut plan = Plan::default();
    for pid in [
        server.inner_pid(),
        server.pid(),
        std::process::id().cast_signed(),
        1,
    ] {
        let pid = pid.to_string();
        look_into(&mut plan, &pid);
        reach_into(&mut plan, &pid);
    }
    Probe::new(&sandbox).check(&plan);
    assert_eq!(server.get("/health").status, 200);
    assert!(server.is_running());
}

#[test]
fn a_neighbours_processes_can_neither_be_looked_into_nor_touched() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let neighbour = Neighbour::new(&server);
    let sandbox = server.sandbox();
    let body = json!({ "cmd": ["sleep", "1000"], "env": { "SECRET": neighbour.marker.text } });
    let pid = neighbour.sandbox.spawn(&body)["pid"].to_string();
    // Both are sandboxes' processes, the first one dumpable as any program is.
    let mut plan = Plan::default();
    look_into(&mut plan, &pid);
    reach_into(&mut plan, &pid);
    let probe = Probe::new(&sandbox);
    probe.check(&plan);
    assert!(matches!(stat_of(pid.parse().unwrap()).unwrap().state, 'S'));
    // Not by a descriptor of the process either, where a probe can hold one.
    let open = libc::SYS_pidfd_open.to_string();
    assert_eq!(probe.run_one(&["syscall", &open, &pid, "0"]), "ok");
    assert_eq!(probe.run_one(&["pidfd-attack", &pid]), "EPERM EPERM");
    let server_pid = server.inner_pid().to_string();
    assert_eq!(probe.run_one(&["pidfd-attack", &server_pid]), "EPERM EPERM");
}

#[test]
fn a_signal_to_everybody_ends_a_sandbox_and_nothing_else() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let neighbour = server.sandbox();
    let sandbox = server.sandbox();
    let theirs = neighbour.spawn(&json!({ "cmd": ["sleep", "1000"] }));
    let ours = sandbox.spawn(&json!({ "cmd": ["sleep", "1000"] }));
    let pid =
        |process: &serde_json::Value| i32::try_from(process["pid"].as_i64().unwrap()).unwrap();
    let probe = Probe::new(&sandbox);
    let mut plan = Plan::default();
    plan.add(&["kill", "-1", "9"], "ok");
    // Their groups, which have their numbers.
    for group in [pid(&theirs), server.pid(), server.inner_pid()] {
        plan.add(&["kill", &format!("-{group}"), "9"], "EPERM|ESRCH");
    }
    probe.check(&plan);
    wait_until("its own process has ended", PATIENCE, || {
        stat_of(pid(&ours)).is_none()
    });
    assert_eq!(stat_of(pid(&theirs)).unwrap().state, 'S');
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(neighbour.sh("echo here"), "here\n");
    assert_eq!(sandbox.sh("echo here"), "here\n");
}

/// A search for the processes of a command that outrun it stops what it finds before it knows of which command that is.
#[test]
fn the_end_of_a_storm_stops_and_resumes_no_process_of_a_neighbour() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    for kind in kinds(&server) {
        let (sandbox, neighbour) = (server.sandbox_with(&kind), server.sandbox());
        let victim = Probe::new(&neighbour);
        let hop = format!("{} {}", Probe::put(&sandbox), ARGUMENTS.join(" "));
        let hop = format!("echo '[[\"hop\",\"sign\"]]' | {hop} >/dev/null");
        let storm = format!("({hop} &); ({hop} &); exec sleep 1000");
        let storm = json!({ "cmd": storm, "timeout": 0.2 });
        let stop = Stop::default();
        std::thread::scope(|scope| {
            let _guard = stop.guard();
            for _ in 0..4 {
                scope.spawn(|| {
                    while !stop.is_set() {
                        sandbox.post("exec", &storm);
                    }
                });
            }
            assert_eq!(victim.run_one(&["orphans", "150", "told"]), "ok");
        });
        assert_eq!(fs::read(neighbour.home.join("told")).unwrap(), b"");
    }
}

#[test]
fn what_is_on_its_way_to_a_program_cannot_be_looked_into_by_its_own_sandbox() {
    if !is_root() {
        skip!("needs root");
    }
    // Until execve a new command is the server's memory under the sandbox's user. A program that
    // stops all of its user's processes and looks into them meets it there now and then.
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    let length = super::race_length();
    let stop = Stop::default();
    std::thread::scope(|scope| {
        let _guard = stop.guard();
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.is_set() {
                    let body = json!({ "cmd": ["true"], "timeout": 5 });
                    let reply = sandbox.post("exec", &body);
                    // A start that stood still for too long is ended.
                    assert!(matches!(reply.status, 200 | 400 | 500), "{}", reply.text());
                }
            });
        }
        let milliseconds = length.as_millis().to_string();
        // None of the commands can be inspected, even after execve: each has a domain of its own.
        let outcome = probe.run_one(&["peek", &milliseconds]);
        let (met, seen) = outcome.split_once(' ').unwrap();
        eprintln!("met {met} on their way");
        assert_eq!(seen, "");
    });
    assert_eq!(server.get("/health").status, 200);
    drop(sandbox);
}

#[test]
fn no_token_is_anywhere_in_proc() {
    if !is_root() {
        skip!("needs root");
    }
    let (server, token) = secret_server(Server::host());
    let sandbox = server.sandbox();
    for pid in [server.inner_pid(), server.pid()] {
        for name in ["environ", "cmdline"] {
            // In a container not even root reads the environment of a process that is not dumpable.
            let text = fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            assert!(!text.contains(token.as_str()), "{name} of {pid}: {text}");
            assert!(!text.contains(&sandbox.token));
        }
    }
    let everything =
        sandbox.sh("cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null; env; true");
    assert!(!everything.contains(token.as_str()));
    assert!(!everything.contains(&sandbox.token));
    assert!(!server.log().contains(token.as_str()));
}
