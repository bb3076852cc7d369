//! A machine that cannot hold sandboxes as they are promised is refused at the start, with a
//! sentence; or, told to go on, what is missing is said wherever it is asked.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use nix::errno::Errno;
use serde_json::{Value, json};

use super::{needs_root, target};
use crate::fixture::{Builder, PATIENCE, Server, TempDir, assert_error, public_copy, wait_until};
use crate::skip;

/// Starts what must not start; its last words.
#[track_caller]
fn refused(mut command: Command, status: i32) -> String {
    let output: Output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{text}");
    assert!(output.stdout.is_empty());
    assert!(!text.contains("listening on"), "{text}");
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 1, "one sentence: {text}");
    text
}

#[track_caller]
fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

#[test]
fn without_a_token_a_host_is_refused() {
    let builder = || Server::host().no_token();
    says(
        &refused(builder().command(), 2),
        &["SBX_HOST_MODE", "SBX_TOKEN", "SBX_INSECURE"],
    );
    says(
        &refused(builder().env("SBX_TOKEN", "").command(), 2),
        &["SBX_TOKEN"],
    );
}

#[test]
fn without_a_token_a_host_may_be_insisted_on() {
    needs_root!();
    let server = Server::host().no_token().env("SBX_INSECURE", 1).start();
    let sandbox = server.sandbox();
    assert!(!sandbox.token.is_empty());
    assert_eq!(sandbox.sh("echo on"), "on\n");
}

#[test]
fn as_anybody_but_root_a_host_is_refused() {
    needs_root!();
    let dir = TempDir::new();
    let program = public_copy(&dir);
    let builder = Server::host();
    let mut command = Command::new(program);
    command
        .env_clear()
        .envs(super::variables(&builder))
        .current_dir("/");
    command.uid(65534).gid(65534);
    says(&refused(command, 1), &["root"]);
}

#[test]
fn where_the_users_do_not_exist_a_host_is_refused() {
    needs_root!();
    let words = ["unshare", "--user", "--map-root-user"];
    let probe = Command::new(words[0])
        .args(&words[1..])
        .arg("true")
        .output();
    if !probe.is_ok_and(|output| output.status.success()) {
        skip!("needs a user namespace, in which only root exists");
    }
    let builder = Server::host().wrapped_in(&words);
    let first = super::first_user(&builder).to_string();
    let text = refused(builder.command(), 1);
    // Without a right to change groups in such a namespace, that is what is missing first.
    assert!(
        text.contains("SBX_UID_RANGE") && text.contains(&first) || text.contains("groups"),
        "{text}"
    );
}

#[test]
fn a_range_that_is_half_there_is_refused() {
    needs_root!();
    for (range, status) in [
        ("65535-65536", 2),
        ("0-10", 2),
        ("30-20", 2),
        ("a-b", 2),
        ("20000", 2),
    ] {
        let command = Server::host().env("SBX_UID_RANGE", range).command();
        says(&refused(command, status), &["SBX_UID_RANGE", range]);
    }
}

#[test]
fn homes_that_sandboxes_could_not_reach_are_refused() {
    needs_root!();
    let dir = TempDir::new();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let homes = dir.join("homes");
    says(
        &refused(Server::host().env("SBX_HOMES_DIR", &homes).command(), 1),
        &["SBX_HOMES_DIR", &homes, "EACCES"],
    );
    std::fs::write(dir.join("file"), "kept").unwrap();
    for homes in [
        dir.join("file"),
        dir.join("file/homes"),
        "/proc/homes".to_owned(),
    ] {
        let text = refused(Server::host().env("SBX_HOMES_DIR", &homes).command(), 1);
        says(&text, &["SBX_HOMES_DIR", &homes]);
    }
    assert_eq!(std::fs::read(dir.join("file")).unwrap(), b"kept");
    for homes in ["homes", "", "./homes"] {
        says(
            &refused(Server::host().env("SBX_HOMES_DIR", homes).command(), 2),
            &["SBX_HOMES_DIR"],
        );
    }
}

#[test]
fn homes_that_others_may_change_are_refused() {
    needs_root!();
    let dir = TempDir::new();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let homes = dir.join("homes");
    let left = dir.join("homes/0123456789abcdef01234567");
    std::fs::create_dir_all(&left).unwrap();
    for (mode, owner) in [(0o1777, 0), (0o775, 0), (0o711, 65_534)] {
        std::os::unix::fs::chown(&homes, Some(owner), Some(0)).unwrap();
        std::fs::set_permissions(&homes, PermissionsExt::from_mode(mode)).unwrap();
        let command = Server::host().env("SBX_HOMES_DIR", &homes).command();
        let text = refused(command, 1);
        says(&text, &["SBX_HOMES_DIR", &homes, "others may write"]);
        assert!(std::fs::exists(&left).unwrap(), "nothing is swept there");
    }
}

#[test]
fn homes_that_every_sandbox_may_read_are_refused() {
    needs_root!();
    let Ok(below) = TempDir::below("/usr/local") else {
        skip!("nothing can be made in /usr/local");
    };
    let homes = below.join("homes");
    let command = Server::host().env("SBX_HOMES_DIR", &homes).command();
    says(
        &refused(command, 1),
        &["SBX_HOMES_DIR", &homes, "every sandbox may read"],
    );
    let made = std::fs::exists(&homes).unwrap();
    assert!(!made, "what is refused is not made either");
}

#[test]
fn a_host_handles_no_signal_itself() {
    needs_root!();
    // A handler would run in what is on its way to a program, where its own sandbox can signal it,
    // on the server's memory.
    let server = Server::host().start();
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.inner_pid())).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    assert_eq!(caught.unwrap().trim(), "0000000000000000");
}

#[test]
fn homes_are_made_where_there_were_none() {
    needs_root!();
    let dir = TempDir::new();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let homes = dir.join("a/b/homes");
    let server = Server::host().env("SBX_HOMES_DIR", &homes).start();
    let sandbox = server.sandbox();
    assert!(sandbox.home.starts_with(&homes));
    assert_eq!(sandbox.sh("pwd").trim(), sandbox.home.to_str().unwrap());
    let outcome = sandbox.exec(&json!({ "cmd": format!("ls {homes}") }));
    assert_ne!(
        outcome.code(),
        Some(0),
        "nobody looks around among homes: {outcome:?}"
    );
}

/// What a server says of its sandboxes, everywhere it says it; they must agree.
#[track_caller]
fn isolation_of(server: &Server) -> (u64, Vec<String>) {
    let mut health = server.get("/health").json()["isolation"].clone();
    // What can be chosen is the machine's.
    for choices in ["postures", "isolations", "default", "limits"] {
        health.as_object_mut().unwrap().remove(choices).unwrap();
    }
    health.as_object_mut().unwrap().remove("no_private_root");
    let isolation = |mut sandbox: Value| {
        let mut isolation = sandbox["isolation"].take();
        let mode = isolation.as_object_mut().unwrap().remove("mode");
        assert_eq!(mode, Some(json!("landlock")));
        isolation
    };
    let made = server.post(super::SANDBOXES, &json!({})).json();
    let made = &made["sandboxes"][0];
    assert_eq!(isolation(made.clone()), health);
    let id = made["id"].as_str().unwrap();
    let sandbox = server.get(&target(id, "")).json();
    assert_eq!(isolation(sandbox), health);
    assert_eq!(isolation(super::list(server).remove(0)), health);
    assert!(super::delete(server, id));
    let layers: Vec<String> = serde_json::from_value(health["layers"].clone()).unwrap();
    let abi = health["landlock_abi"].as_u64().unwrap();
    let log = server.log();
    let ready = log
        .lines()
        .find(|line| line.contains("listening on"))
        .unwrap();
    says(
        ready,
        &[
            "mode=host",
            &format!("isolation={} landlock_abi={abi}", layers.join(",")),
        ],
    );
    (abi, layers)
}

#[test]
fn a_kernel_with_too_little_is_refused_unless_one_insists() {
    needs_root!();
    let builder = || Server::host().env("SBX_MIN_LANDLOCK_ABI", 99);
    says(
        &refused(builder().command(), 1),
        &[
            "Landlock",
            "99",
            "SBX_MIN_LANDLOCK_ABI",
            "SBX_ALLOW_UNCONFINED",
        ],
    );
    let here = isolation_of(
        &Server::host()
            .env("SBX_MIN_LANDLOCK_ABI", 0)
            .env("SBX_ALLOW_UNCONFINED", 1)
            .start(),
    );
    let insisted = builder().env("SBX_ALLOW_UNCONFINED", 1).start();
    // To insist makes nothing weaker than the kernel does.
    assert_eq!(isolation_of(&insisted), here);
    for value in ["-1", "six", "", "6.0", "256"] {
        let command = Server::host().env("SBX_MIN_LANDLOCK_ABI", value).command();
        says(&refused(command, 2), &["SBX_MIN_LANDLOCK_ABI"]);
    }
}

/// Makes Landlock's system calls fail with `ENOSYS`, as on an older kernel or under the filter of a
/// container.
fn without_landlock(builder: Builder) -> (Builder, Command) {
    let ret = libc::BPF_RET | libc::BPF_K;
    // The number of the call is the first word of what a filter is given (seccomp(2)); Landlock's
    // are the same on every architecture.
    let filter = vec![
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 2, 444),
        step(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 1, 0, 446),
        step(
            ret,
            0,
            0,
            libc::SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned(),
        ),
        step(ret, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    with_filter(builder, filter)
}

/// Makes netlink sockets fail, with which the kernel tells about sockets, as a container's filter may.
fn without_netlink(builder: Builder) -> (Builder, Command) {
    let (load, equals) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
    );
    let ret = libc::BPF_RET | libc::BPF_K;
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EAFNOSUPPORT.cast_unsigned();
    let filter = vec![
        step(load, 0, 0, 0),
        step(equals, 0, 3, u32::try_from(libc::SYS_socket).unwrap()),
        // The lower half of the first argument.
        step(load, 0, 0, 16),
        step(equals, 0, 1, libc::AF_NETLINK.cast_unsigned()),
        step(ret, 0, 0, refuse),
        step(ret, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    with_filter(builder, filter)
}

/// Refuses filters, as a sandbox and some containers do: every other operation of seccomp(2) works.
fn without_filters(builder: Builder) -> (Builder, Command) {
    let (load, equals) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
    );
    let ret = libc::BPF_RET | libc::BPF_K;
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EINVAL.cast_unsigned();
    let filter = vec![
        step(load, 0, 0, 0),
        step(equals, 0, 3, u32::try_from(libc::SYS_seccomp).unwrap()),
        // The lower half of the first argument.
        step(load, 0, 0, 16),
        step(equals, 0, 1, libc::SECCOMP_SET_MODE_FILTER),
        step(ret, 0, 0, refuse),
        step(ret, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    with_filter(builder, filter)
}

fn step(code: u32, jump_true: u8, jump_false: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: u16::try_from(code).unwrap(),
        jt: jump_true,
        jf: jump_false,
        k,
    }
}

/// Runs a server under a filter (seccomp(2)).
#[allow(unsafe_code)]
fn with_filter(builder: Builder, mut filter: Vec<libc::sock_filter>) -> (Builder, Command) {
    let mut command = builder.command();
    let length = u16::try_from(filter.len()).unwrap();
    let install = move || {
        let program = libc::sock_fprog {
            len: length,
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: plain integers; `program` and the filter that it points to outlive the calls.
        let status = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            )
        };
        Errno::result(status).map(drop).map_err(Into::into)
    };
    // SAFETY: two system calls and nothing that allocates or locks.
    unsafe { command.pre_exec(install) };
    (builder, command)
}

#[test]
fn where_no_filter_can_be_attached_a_host_is_refused() {
    needs_root!();
    let (_place, command) = without_filters(Server::host());
    says(
        &refused(command, 1),
        &["no seccomp filters", "SBX_ALLOW_UNCONFINED"],
    );
    let insisted = Server::host().env("SBX_ALLOW_UNCONFINED", 1);
    let (builder, command) = without_filters(insisted);
    let server = builder.start_as(command);
    let (_, layers) = isolation_of(&server);
    assert!(!layers.contains(&"seccomp".to_owned()), "{layers:?}");
    assert_eq!(server.sandbox().sh("echo here"), "here\n");
}

#[test]
fn where_landlock_is_hidden_a_host_is_refused() {
    needs_root!();
    let (_place, command) = without_landlock(Server::host());
    says(
        &refused(command, 1),
        &["Landlock ABI 0", "filter", "SBX_ALLOW_UNCONFINED"],
    );
    // What cannot be enforced is not the default either.
    let insisted = Server::host().env("SBX_ALLOW_UNCONFINED", 1);
    let (_place, command) = without_landlock(insisted.env("SBX_NETWORK", "blocked"));
    says(&refused(command, 1), &["network blocked", "Landlock ABI 0"]);
    // Less is asked for, but not none of it.
    let (_place, command) = without_landlock(Server::host().env("SBX_MIN_LANDLOCK_ABI", 1));
    says(&refused(command, 1), &["Landlock ABI 0"]);
}

#[test]
fn where_landlock_is_hidden_one_may_insist_and_is_told_what_is_missing() {
    needs_root!();
    let has_landlock = isolation_of(&Server::host().env("SBX_ALLOW_UNCONFINED", 1).start()).0 > 0;
    if !has_landlock {
        skip!("needs a kernel with Landlock, to hide it");
    }
    let (builder, command) = without_landlock(Server::host().env("SBX_ALLOW_UNCONFINED", 1));
    let server = builder.start_as(command);
    let (abi, layers) = isolation_of(&server);
    assert_eq!(abi, 0);
    assert!(
        !layers.iter().any(|layer| layer.contains("landlock")),
        "{layers:?}"
    );
    for layer in [
        "uid",
        "no_new_privs",
        "rlimits",
        "no_capabilities",
        "seccomp",
    ] {
        assert!(layers.iter().any(|is| is == layer), "{layers:?}");
    }
    let postures = &server.get("/health").json()["isolation"]["postures"];
    assert_eq!(*postures, json!(["open"]));
    let reply = server.post("/v1/sandboxes", &json!({ "network": "blocked" }));
    assert_error(&reply, 400, "unavailable");
    assert!(reply.text().contains("Landlock ABI 0"), "{}", reply.text());
    // It is the truth: what Landlock alone refuses is not refused, and what the rest refuses is.
    let (a, b) = (server.sandbox(), server.sandbox());
    let outside = TempDir::new();
    std::fs::set_permissions(outside.path(), PermissionsExt::from_mode(0o777)).unwrap();
    a.sh(&format!("echo x > {}", outside.join("file")));
    b.sh("echo mine > file");
    let outcome = a.exec(&json!({ "cmd": format!("cat {}/file", b.home.display()) }));
    assert_ne!(
        outcome.code(),
        Some(0),
        "homes are still closed: {outcome:?}"
    );
    a.delete();

    // And the same is refused where the layer is said to be on.
    let server = Server::host().env("SBX_ALLOW_UNCONFINED", 1).start();
    let command = json!({ "cmd": format!("echo x > {}", outside.join("other")) });
    assert_ne!(server.sandbox().exec(&command).code(), Some(0));
}

#[test]
fn without_a_token_and_without_a_way_to_tell_users_apart_no_user_is_served() {
    needs_root!();
    let builder = Server::host().no_token().env("SBX_INSECURE", 1);
    let (builder, command) = without_netlink(builder);
    let server = builder.start_as(command);
    assert_eq!(server.get("/health").status, 200);
    let reply = server.get(super::SANDBOXES);
    assert_error(&reply, 403, "forbidden");
    says(&reply.text(), &["does not tell which user", "SBX_TOKEN"]);
}

#[test]
fn hosts_of_whose_users_some_are_the_same_are_refused() {
    needs_root!();
    let builder = Server::host();
    let first = super::first_user(&builder);
    let range = |from: u32, to: u32| format!("{}-{}", first + from, first + to);
    let mut server = builder.env("SBX_UID_RANGE", range(10, 20)).start();
    let sandbox = server.sandbox();
    sandbox.spawn(&json!({"cmd": "exec sleep 3600"}));
    let holder = server.inner_pid();
    let refuse = |from, to| {
        let builder = Server::host().env("SBX_UID_RANGE", range(from, to));
        let homes = super::variables(&builder)["SBX_HOMES_DIR"].clone();
        let old = format!("{homes}/{}", "0".repeat(24));
        std::fs::create_dir_all(&old).unwrap();
        let text = refused(builder.command(), 1);
        let own = range(from, to);
        let theirs = range(10, 20);
        says(
            &text,
            &["SBX_UID_RANGE", &own, &theirs, &format!("pid {holder};")],
        );
        assert!(std::fs::exists(old).unwrap(), "it has touched nothing");
    };
    std::thread::scope(|scope| {
        for (from, to) in [(10, 20), (0, 10), (20, 30), (0, 63), (15, 15)] {
            scope.spawn(move || refuse(from, to));
        }
    });
    for (from, to) in [(0, 9), (21, 63)] {
        let beside = Server::host().env("SBX_UID_RANGE", range(from, to)).start();
        beside.sandbox().delete();
    }
    assert_eq!(sandbox.processes().len(), 1, "and its process runs");
    drop(sandbox);
    // What a killed server leaves does not hold the lock.
    server.signal(libc::SIGKILL);
    let _next = Server::host().env("SBX_UID_RANGE", range(0, 63)).start();
    server.wait_for_exit(PATIENCE);
}

/// Runs a server after these commands, which change mounts only for it. `None` where that is impossible.
pub(super) fn with_mounts(builder: Builder, commands: &str) -> Option<Builder> {
    let probe = ["--mount", "mount", "-t", "tmpfs", "none", "/run"];
    let probe = Command::new("unshare").args(probe).output();
    probe.is_ok_and(|output| output.status.success()).then(|| {
        let script = format!("set -e; {commands}; exec \"$0\"");
        builder.wrapped_in(&["unshare", "--mount", "sh", "-c", &script])
    })
}

#[test]
fn the_file_that_locks_uids_is_root_s_alone() {
    needs_root!();
    let dir = TempDir::new();
    std::fs::write(dir.join("kept"), "kept").unwrap();
    let link = format!("ln -s {} uids", dir.join("kept"));
    let make = "mkdir -m 700 sbx-server; cd sbx-server";
    let refusals = [
        "ln -s /tmp sbx-server",
        "touch sbx-server",
        "mkdir -m 777 sbx-server",
        "mkdir -m 700 sbx-server; chown 1234 sbx-server",
        &format!("{make}; {link}"),
        &format!("{make}; mkfifo -m 600 uids"),
        &format!("{make}; mkdir uids"),
        &format!("{make}; touch uids; chmod 604 uids"),
        &format!("{make}; touch uids; chmod 600 uids; chown 1234 uids"),
    ];
    for commands in refusals {
        let commands = format!("mount -t tmpfs none /run; cd /run; {commands}; cd /");
        let Some(builder) = with_mounts(Server::host(), &commands) else {
            skip!("needs a mount namespace");
        };
        let text = refused(builder.command(), 1);
        says(&text, &["/run/sbx-server", "root"]);
    }
    assert_eq!(std::fs::read(dir.join("kept")).unwrap(), b"kept");
    let lawful = "mount -t tmpfs none /run; mkdir -m 755 /run/sbx-server";
    drop(with_mounts(Server::host(), lawful).unwrap().start());
}

#[test]
fn where_run_is_read_only_the_file_that_locks_uids_is_beside_the_homes() {
    needs_root!();
    let read_only = "mount -t tmpfs -o ro none /run";
    let Some(builder) = with_mounts(Server::host(), read_only) else {
        skip!("needs a mount namespace");
    };
    let (range, homes) = {
        let mut variables = super::variables(&builder);
        let mut take = |name: &str| variables.remove(name).unwrap();
        (take("SBX_UID_RANGE"), take("SBX_HOMES_DIR"))
    };
    let server = builder.start();
    let file = homes.replace("/homes", "/.sbx-server/uids");
    let mode = std::fs::metadata(file).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    let other = Server::host()
        .env("SBX_UID_RANGE", &range)
        .env("SBX_HOMES_DIR", format!("{homes}-of-another"));
    let other = with_mounts(other, read_only).unwrap();
    says(
        &refused(other.command(), 1),
        &["SBX_UID_RANGE", &range, "overlap"],
    );
    server.sandbox().delete();
}

#[test]
fn a_uid_that_is_an_account_s_or_a_group_s_is_named_and_never_given() {
    needs_root!();
    let dir = TempDir::new();
    let builder = super::with_users(4);
    let first = super::first_user(&builder);
    let passwd = format!(
        "root:x:0:0::/:/bin/sh\n\u{e9}:x:{first}:{}::/:/bin/sh\n",
        first + 1
    );
    // Names need not be UTF-8.
    let passwd: Vec<u8> = passwd
        .chars()
        .map(|one| u8::try_from(one).unwrap())
        .collect();
    std::fs::write(dir.join("passwd"), passwd).unwrap();
    std::fs::write(dir.join("group"), format!("those:x:{}:\n", first + 2)).unwrap();
    let mounts = format!(
        "mount --bind {} /etc/passwd; mount --bind {} /etc/group",
        dir.join("passwd"),
        dir.join("group")
    );
    let Some(builder) = with_mounts(builder, &mounts) else {
        skip!("needs a mount namespace");
    };
    let server = builder.start();
    let log = server.log();
    let line = log.lines().find(|line| line.contains("accounts")).unwrap();
    for uid in first..first + 3 {
        assert!(line.contains(&uid.to_string()), "{log}");
    }
    for _ in 0..2 {
        let (made, rejected) = super::create(&server, 4);
        assert_eq!((made.len(), rejected), (1, 3));
        assert_eq!(made[0].uid, first + 3);
        assert!(super::delete(&server, &made[0].id));
    }
    let all = with_mounts(super::with_users(1), &mounts).unwrap();
    let all = all.env("SBX_UID_RANGE", format!("{first}-{}", first + 2));
    drop(server);
    says(&refused(all.command(), 1), &["SBX_UID_RANGE", "account"]);
}

#[test]
fn health_tells_the_mode_and_the_number_of_sandboxes() {
    needs_root!();
    let server = Server::host().start();
    let (made, _) = super::create(&server, 3);
    let count = || server.get("/health").json()["sandboxes"].clone();
    assert_eq!(count(), 3);
    assert!(super::delete(&server, &made[0].id));
    assert_eq!(count(), 2);
    let health = server.get("/health").json();
    assert_eq!(
        (&health["status"], &health["protocol"]),
        (&json!("ok"), &json!(3))
    );
    assert_ne!(health["isolation"]["layers"], Value::Array(Vec::new()));
    let idle = server.sandbox_with(&json!({"idle_timeout_secs": 1}));
    wait_until("an evicted one is not counted", PATIENCE, || count() == 2);
    drop(idle);
}
