//! What stays closed to the root of a sandbox: everything that is not its own.

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::{SocketAddr as UnixAddress, UnixDatagram, UnixListener};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{Root, holders_below, needs_roots, root, root_with};
use crate::fixture::{PATIENCE, Server, Stop, TOKEN, descriptors_of, is_alive, wait_until};
use crate::walls::probe::{Plan, command, outcomes};
use crate::walls::races::{hammer, tells_enough};
use crate::walls::{Marker, Vault, race_length};

/// Who attacks.
const USERS: [&str; 2] = ["root", "user"];

/// Shows the user without asking the list of accounts for it.
const OWN_UID: &str = "grep ^Uid: /proc/self/status | cut -f 2";

/// Runs a plan as a user.
#[track_caller]
fn check_as(root: &Root<'_>, user: &str, plan: &Plan) {
    let mut command = command(super::PROBE, &json!(plan.acts()));
    command["user"] = json!(user);
    let outcome = root.exec(&command);
    let outcomes = outcomes(&outcome.stdout);
    assert!(!outcomes.is_empty(), "{outcome:?}");
    plan.compare(&outcomes);
}

/// Adds a system call to a plan.
fn refuse(plan: &mut Plan, call: i64, arguments: &[&str], expected: &str) {
    let call = call.to_string();
    let words: Vec<&str> = ["syscall", &call]
        .into_iter()
        .chain(arguments.iter().copied())
        .collect();
    plan.add(&words, expected);
}

#[test]
fn the_first_process_is_out_of_reach_and_has_nothing() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    let holder = holders_below(server.inner_pid())[0];
    let mut plan = Plan::default();
    for signal in ["1", "9", "15", "19"] {
        plan.add(&["kill", "1", signal], "EPERM");
    }
    for name in [
        "environ", "mem", "maps", "auxv", "io", "pagemap", "stack", "syscall",
    ] {
        plan.add(&["read", &format!("/proc/1/{name}")], "EACCES|EPERM");
    }
    for name in [
        "mem",
        "oom_score_adj",
        "uid_map",
        "attr/current",
        "clear_refs",
        "comm",
    ] {
        plan.add(&["write", &format!("/proc/1/{name}")], "EACCES|EPERM|EROFS");
    }
    for name in ["cwd", "root", "exe", "fd/0", "ns/mnt", "ns/user", "ns/pid"] {
        plan.add(
            &["readlink", &format!("/proc/1/{name}")],
            "EACCES|EPERM|ENOENT",
        );
    }
    for name in ["fd", "root/.", "root/etc", "cwd/.", "map_files"] {
        plan.add(&["list", &format!("/proc/1/{name}")], "EACCES|EPERM");
    }
    plan.add(&["read", "/proc/1/root/etc/passwd"], "EACCES|EPERM");
    plan.add(&["pidfd-attack", "1"], "EPERM EPERM");
    refuse(&mut plan, libc::SYS_ptrace, &["16", "1", "0", "0"], "EPERM");
    refuse(
        &mut plan,
        libc::SYS_ptrace,
        &["0x4206", "1", "0", "0"],
        "EPERM",
    );
    refuse(
        &mut plan,
        libc::SYS_process_vm_readv,
        &["1", "iov", "1", "iov", "1", "0"],
        "EPERM",
    );
    refuse(
        &mut plan,
        libc::SYS_setpriority,
        &["0", "1", "19"],
        "EPERM|EACCES",
    );
    refuse(
        &mut plan,
        libc::SYS_prlimit64,
        &["1", "7", "buffer", "0"],
        "EPERM",
    );
    for user in USERS {
        check_as(&sandbox, user, &plan);
    }
    // All that root can signal is killed, and that is not all.
    sandbox.exec(&json!({ "cmd": "kill -9 -1; echo on" }));
    assert!(is_alive(holder));
    assert_eq!(sandbox.sh("echo on"), "on\n");

    let shown = |name: &str| fs::read(format!("/proc/{holder}/{name}")).unwrap();
    assert_eq!(shown("environ"), b"", "no variable");
    assert!(!String::from_utf8_lossy(&shown("cmdline")).contains(TOKEN));
    for entry in fs::read_dir(format!("/proc/{holder}/fd")).unwrap() {
        let target = fs::read_link(entry.unwrap().path()).unwrap();
        assert_eq!(target.to_str(), Some("anon_inode:[eventfd]"));
    }
    let status = String::from_utf8(shown("status")).unwrap();
    for line in [
        "NoNewPrivs:\t1",
        "CapEff:\t0000000000000000",
        "CapPrm:\t0000000000000000",
        "CapBnd:\t0000000000000000",
    ] {
        assert!(
            status.lines().any(|found| found == line),
            "{line}: {status}"
        );
    }
}

#[test]
fn mounts_namespaces_and_the_kernel_are_not_its() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    let mut plan = Plan::default();
    macro_rules! calls {
        ($errno:literal: $($name:ident)*) => {
            for call in [$(libc::$name),*] {
                for arguments in [&["0", "0", "0", "0", "0"][..], &["-1", "-1", "-1", "-1", "-1"], &["buffer", "buffer", "buffer", "buffer", "buffer"]] {
                    refuse(&mut plan, call, arguments, $errno);
                }
            }
        };
    }
    calls!("EPERM":
        SYS_mount SYS_umount2 SYS_pivot_root SYS_open_tree SYS_move_mount SYS_fsopen
        SYS_fsconfig SYS_fsmount SYS_fspick SYS_mount_setattr SYS_setns
        SYS_add_key SYS_request_key SYS_keyctl
        SYS_bpf SYS_perf_event_open SYS_userfaultfd SYS_fanotify_init SYS_open_by_handle_at
        SYS_init_module SYS_finit_module SYS_delete_module SYS_kexec_load SYS_kexec_file_load
        SYS_reboot SYS_swapon SYS_swapoff SYS_syslog
        SYS_settimeofday SYS_clock_settime SYS_sethostname SYS_setdomainname SYS_acct
        SYS_quotactl SYS_quotactl_fd SYS_vhangup
    );
    calls!("ENOSYS":
        SYS_clone3 SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register SYS_memfd_secret
        SYS_landlock_create_ruleset SYS_io_setup
    );
    for flag in [
        libc::CLONE_NEWUSER,
        libc::CLONE_NEWNS,
        libc::CLONE_NEWPID,
        libc::CLONE_NEWNET,
        libc::CLONE_NEWIPC,
        libc::CLONE_NEWUTS,
        libc::CLONE_NEWCGROUP,
        0x80,
    ] {
        refuse(&mut plan, libc::SYS_unshare, &[&flag.to_string()], "EPERM");
        if flag != 0x80 {
            let flags = (flag | libc::SIGCHLD).to_string();
            refuse(
                &mut plan,
                libc::SYS_clone,
                &[&flags, "0", "0", "0", "0"],
                "EPERM",
            );
        }
    }
    for name in ["mnt", "user", "pid", "net", "ipc", "uts", "cgroup"] {
        refuse(
            &mut plan,
            libc::SYS_setns,
            &[&format!("open:/proc/self/ns/{name}"), "0"],
            "EPERM",
        );
    }
    plan.add(&["raise-limit", &libc::RLIMIT_NPROC.to_string()], "EPERM");
    plan.add(&["raise-limit", &libc::RLIMIT_NOFILE.to_string()], "EPERM");
    // It stays whatever is asked for.
    let core = libc::RLIMIT_CORE.to_string();
    plan.add(&["raise-limit", &core], "ok");
    plan.add(&["limit", &core], "1 1");
    for user in USERS {
        check_as(&sandbox, user, &plan);
    }
    for user in USERS {
        let mut command = sandbox.probe().command(&[&["other-architecture"]]);
        command["user"] = json!(user);
        let outcome = sandbox.exec(&command);
        let signal = &outcome.exit["signal"];
        assert!(
            *signal == libc::SIGSYS || *signal == libc::SIGSEGV,
            "{outcome:?}"
        );
    }
    if cfg!(target_arch = "x86_64") {
        let mut plan = Plan::default();
        for number in ["0x40000027", "0x40000208", "520", "545"] {
            plan.add(&["syscall", number], "ENOSYS");
        }
        check_as(&sandbox, "root", &plan);
    }
}

#[test]
fn sockets_that_reach_deeper_are_refused() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    let sharing = shared(&server, 0);
    let mut plan = Plan::default();
    let refusals = "EPERM|EACCES|EAFNOSUPPORT|ENETUNREACH|EPROTONOSUPPORT|ESOCKTNOSUPPORT|EINVAL";
    for (family, kind, protocol) in [
        // Packet and raw sockets, ICMP too.
        (17, 3, 0),
        (17, 2, 0),
        (17, 10, 0),
        (2, 3, 255),
        (2, 3, 1),
        (2, 3, 6),
        (10, 3, 255),
        (10, 3, 58),
        (1, 3, 17),
        // vsock, crypto, Bluetooth, XDP, CAN, TIPC, Kernel connection multiplexor, QIPCRTR, SMC.
        (40, 1, 0),
        (40, 2, 0),
        (38, 5, 0),
        (31, 3, 1),
        (44, 3, 0),
        (29, 3, 1),
        (30, 1, 0),
        (41, 2, 0),
        (42, 2, 0),
        (43, 1, 0),
        // Netlink of auditing, events of devices, filters, IPsec, connectors.
        (16, 3, 9),
        (16, 3, 15),
        (16, 3, 12),
        (16, 3, 6),
        (16, 3, 11),
        // MPTCP.
        (2, 1, 262),
    ] {
        if family == 1 {
            continue;
        }
        let [family, kind, protocol] =
            [family, kind, protocol].map(|number: i32| number.to_string());
        refuse(
            &mut plan,
            libc::SYS_socket,
            &[&family, &kind, &protocol],
            refusals,
        );
    }
    for user in USERS {
        check_as(&sandbox, user, &plan);
        check_as(&sharing, user, &plan);
    }
    // The network is its own: nothing of the machine's loopback is there, the server least of all.
    let mut plan = Plan::default();
    plan.add(
        &["tcp-connect", &server.address.to_string()],
        "ECONNREFUSED|EACCES|ENETUNREACH|EPERM",
    );
    check_as(&sandbox, "root", &plan);
    for sandbox in [&sandbox, &sharing] {
        let interfaces = sandbox.exec(&json!({ "cmd": "ip link add x type dummy; ip addr add 10.9.9.9/32 dev lo; ip link set lo mtu 1234; ip route add 10.9.9.0/24 dev lo; ip link" }));
        assert!(
            interfaces.stdout.contains("LOOPBACK,UP") && !interfaces.stdout.contains("dummy"),
            "{interfaces:?}"
        );
        assert!(
            interfaces.stderr.contains("not permitted") && !interfaces.stdout.contains("mtu 1234"),
            "{interfaces:?}"
        );
    }
}

#[test]
fn it_pings_itself_whatever_its_ids_are() {
    needs_roots!(_template, server, "SBX_ID_BLOCKS" = "1000000000-4294967294");
    let sandbox = root(&server);
    assert!(sandbox.ids.start > i32::MAX.cast_unsigned(), "too low");
    let call = libc::SYS_socket.to_string();
    let mut plan = Plan::default();
    // A datagram socket of ICMP.
    plan.add(&["syscall", &call, "2", "2", "1"], "ok");
    for user in USERS {
        check_as(&sandbox, user, &plan);
    }
}

/// A root with the machine's network.
fn shared(server: &Server, tcp_ports: usize) -> Root<'_> {
    let network = json!({ "mode": "open", "share": true });
    root_with(
        server,
        json!({ "network": network, "tcp_ports": tcp_ports }),
    )
}

/// With the machine's network it has of it what any sandbox has.
#[test]
fn a_shared_network_is_no_more_than_that_of_others() {
    needs_roots!(_template, server);
    let sandbox = shared(&server, 0);
    assert_eq!(sandbox.described()["network"], "open");
    assert_eq!(sandbox.described()["restrictions"], json!(["tcp_bind"]));
    let layers = sandbox.described()["isolation"]["layers"].to_string();
    assert!(layers.contains("landlock_tcp_bind") && layers.contains("landlock_abstract_sockets"));
    let name = format!("sbx-test-shared-{}", std::process::id());
    let [stream, datagram] = ["stream", "datagram"].map(|kind| format!("{name}-{kind}"));
    let _listener = UnixListener::bind_addr(&UnixAddress::from_abstract_name(&stream).unwrap());
    let _receiver = UnixDatagram::bind_addr(&UnixAddress::from_abstract_name(&datagram).unwrap());
    let mut plan = Plan::default();
    plan.add(&["abstract-connect", &stream], "EPERM");
    plan.add(&["abstract-send", &datagram], "EPERM");
    for address in ["127.0.0.1:0", "0.0.0.0:80", "[::]:0"] {
        plan.add(&["tcp-bind", address], "EACCES|EPERM");
    }
    for name in [
        "ip_unprivileged_port_start",
        "ip_forward",
        "ping_group_range",
    ] {
        let path = format!("/proc/sys/net/ipv4/{name}");
        plan.add(&["write", &path], "EACCES|EPERM|EROFS");
    }
    for user in USERS {
        check_as(&sandbox, user, &plan);
    }
    let web = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = web.local_addr().unwrap().port();
    sandbox.sh(&format!("nc -w 3 127.0.0.1 {port} < /dev/null &"));
    web.accept().unwrap();
    // A command may have less than its sandbox.
    let outcome =
        sandbox.exec(&json!({ "cmd": format!("nc -w 3 127.0.0.1 {port}"), "network": "blocked" }));
    assert_ne!(outcome.code(), Some(0), "{outcome:?}");
    // What it sets in its own network the machine's does not get.
    let first_port = fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start").unwrap();
    assert_eq!(
        sandbox.sh("cat /proc/sys/net/ipv4/ip_unprivileged_port_start"),
        first_port
    );
}

#[test]
fn what_belongs_to_the_machine_cannot_be_written() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    let script = "
        for file in /proc/sysrq-trigger /proc/mtrr /proc/[a-z]* $(find /proc/sys /proc/irq /proc/bus /proc/fs /proc/driver /proc/tty /proc/acpi /proc/pressure -type f 2>/dev/null) \
            $(find /sys/kernel /sys/power /sys/fs/cgroup /sys/module -maxdepth 3 -type f 2>/dev/null); do
            [ -f $file ] || continue
            case $file in /proc/self*|/proc/thread-self*|/proc/mounts) continue;; esac
            if (: >> $file) 2>/dev/null; then echo $file; fi
            if chmod 777 $file 2>/dev/null; then echo chmod $file; fi
        done";
    for user in USERS {
        let found = sandbox.exec_as(user, script);
        assert_eq!(found.stdout, "", "{user}");
    }
    let mut plan = Plan::default();
    for path in [
        "/proc/new",
        "/sys/new",
        "/sys/fs/cgroup/new",
        "/dev/pts/new",
        "/proc/sys/new",
    ] {
        plan.add(&["create", path], "EACCES|EROFS|EPERM|ENOENT");
        plan.add(&["mkdir", path], "EACCES|EROFS|EPERM|ENOENT");
    }
    for path in [
        "/dev/null",
        "/dev/zero",
        "/dev/tty",
        "/dev/pts",
        "/dev/shm",
        "/proc",
        "/sys",
    ] {
        plan.add(&["chmod", path], "EPERM|EROFS|EACCES");
        plan.add(&["chown", path, "0"], "EPERM|EROFS|EOVERFLOW|EINVAL|EACCES");
        plan.add(&["unlink", path], "EBUSY|EISDIR");
        plan.add(&["rename", path, "/elsewhere"], "EBUSY|EXDEV");
    }
    check_as(&sandbox, "root", &plan);
    assert_eq!(
        sandbox.sh("echo x > /dev/null; hostname x 2>/dev/null || hostname"),
        sandbox.sh("hostname")
    );
}

#[test]
fn device_nodes_are_dead() {
    needs_roots!(template, server);
    for (name, kind, major, minor) in [
        ("null", libc::S_IFCHR, 1, 3),
        ("mem", libc::S_IFCHR, 1, 1),
        ("loop", libc::S_IFBLK, 7, 0),
    ] {
        let path = template.path(&format!("device-{name}"));
        let kind = nix::sys::stat::SFlag::from_bits_truncate(kind);
        let mode = nix::sys::stat::Mode::from_bits_truncate(0o666);
        if nix::sys::stat::mknod(&path, kind, mode, libc::makedev(major, minor)).is_err() {
            crate::skip!("needs the right to make device nodes");
        }
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    }
    let sandbox = root(&server);
    let mut plan = Plan::default();
    for name in ["null", "mem", "loop"] {
        let path = format!("/device-{name}");
        plan.add(&["read", &path], "EACCES");
        plan.add(&["write", &path], "EACCES");
        // Neither after it has become the sandbox's own, nor by another name.
        plan.add(&["chmod", &path], "ok");
        plan.add(&["read", &path], "EACCES");
        plan.add(&["link", &path, &format!("/link-{name}")], "ok");
        plan.add(&["read", &format!("/link-{name}")], "EACCES");
    }
    for directory in ["", "/tmp", "/dev", "/dev/shm", "/root"] {
        for (mode, number) in [
            (libc::S_IFCHR, "0x103"),
            (libc::S_IFBLK, "0x700"),
            (libc::S_IFCHR, "0x0"),
            (libc::S_IFCHR, "0x101"),
        ] {
            let (path, mode) = (format!("text:{directory}/made"), (mode | 0o666).to_string());
            // A whiteout opens nothing; in memory it may be made.
            let expected = if number == "0x0" && directory.starts_with("/dev") {
                "EPERM|ok"
            } else {
                "EPERM"
            };
            refuse(
                &mut plan,
                libc::SYS_mknod,
                &[&path, &mode, number],
                expected,
            );
            plan.add(&["unlink", &format!("{directory}/made")], "ENOENT|ok");
        }
    }
    check_as(&sandbox, "root", &plan);
    for name in ["null", "mem", "loop"] {
        let reply = sandbox.get(&format!("files/read?path=/device-{name}"));
        assert!((400..500).contains(&reply.status), "{}", reply.text());
    }
}

/// Who is taken first when memory runs out is the server's to say, and what it measures depends on the rest.
#[test]
fn what_the_server_has_set_for_processes_stays() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    let script = "
        sleep 1000 & exec 2>/dev/null
        for process in self thread-self $$ $!; do
            for name in oom_score_adj oom_adj coredump_filter autogroup timerslack_ns clear_refs comm sched; do
                [ -e /proc/$process/$name ] || continue
                (echo 0 > /proc/$process/$name) && echo /proc/$process/$name
            done
        done
        cat /proc/self/oom_score_adj /proc/$!/oom_score_adj";
    for user in USERS {
        let shown = sandbox.exec_as(user, script).stdout;
        let scores: Vec<i32> = shown.lines().map(|line| line.parse().unwrap()).collect();
        assert!(
            scores.len() == 2 && scores.iter().all(|score| *score >= 900),
            "{user}: {shown}"
        );
    }
}

#[test]
fn files_of_the_machine_are_not_reached() {
    needs_roots!(template, server);
    let vault = Vault::new();
    let sandbox = root(&server);
    sandbox.spawn(&json!({ "cmd": "cd /tmp; exec sleep 1000", "user": "user" }));
    let other = sandbox.spawn(&json!({ "cmd": "exec sleep 1000" }));
    assert!(other["pid"].is_number());
    let secret = vault.path("marker");
    let homes = server.place.as_ref().unwrap().homes().display().to_string();
    let mut plan = Plan::default();
    let template_path = template.path("").display().to_string();
    for path in [
        &secret,
        &homes,
        &template_path,
        &"/var/lib/dpkg".to_owned(),
        &"/usr".to_owned(),
    ] {
        plan.add(&["stat", path], "ENOENT");
        for way in [
            "/proc/self/root",
            "/proc/self/cwd",
            "/proc/thread-self/root",
        ] {
            plan.add(&["stat", &format!("{way}/../../../../..{path}")], "ENOENT");
            plan.add(&["stat", &format!("{way}{path}")], "ENOENT");
        }
    }
    // The ways out of chroot(2): a directory that is open outside, and names above the root.
    let escape = |plan: &mut Plan| {
        plan.add(&["mkdir", "/jail"], "ok|EEXIST");
        plan.add(&["chdir", "/"], "ok");
        refuse(plan, libc::SYS_chroot, &["text:/jail"], "ok");
        for _ in 0..40 {
            plan.add(&["chdir", ".."], "ok");
        }
        plan.add(&["stat", "probe"], "ok");
        refuse(plan, libc::SYS_chroot, &["text:."], "ok");
        plan.add(&["stat", "/probe"], "ok");
        plan.add(&["stat", &secret], "ENOENT");
        plan.add(&["stat", &homes], "ENOENT");
        plan.add(&["stat", "/usr"], "ENOENT");
    };
    escape(&mut plan);
    check_as(&sandbox, "root", &plan);
    let found = sandbox.sh("for dir in /proc/[0-9]*; do ls $dir/root/ $dir/cwd/ 2>/dev/null; done; cat /proc/*/mountinfo /proc/*/mounts 2>/dev/null; find / -xdev -name work -o -xdev -name up");
    for text in [
        &vault.marker.text,
        &homes,
        &template_path,
        &"\nusr\n".to_owned(),
        &"/work\n".to_owned(),
    ] {
        assert!(!found.contains(text.as_str()), "{text}: {found}");
    }
    // The table of mounts, as the kernel shows it, has no path of the machine.
    let shown = sandbox.sh("cat /proc/self/mountinfo");
    assert!(!shown.contains("sbx-test"), "{shown}");
    vault.check();
}

#[test]
fn ids_and_attributes_stay_in_the_block() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    sandbox.sh("echo x > /file; mkdir /directory; ln -s file /link");
    let mut plan = Plan::default();
    for id in [
        "65536",
        "100000",
        "0x7fffffff",
        &sandbox.ids.start.to_string(),
        &(sandbox.ids.start + 5).to_string(),
        "0xfffffffe",
    ] {
        for path in ["text:/file", "text:/directory", "text:/link"] {
            refuse(&mut plan, libc::SYS_lchown, &[path, id, id], "EINVAL");
            refuse(&mut plan, libc::SYS_lchown, &[path, id, "-1"], "EINVAL");
            refuse(&mut plan, libc::SYS_lchown, &[path, "-1", id], "EINVAL");
        }
        refuse(&mut plan, libc::SYS_setuid, &[id], "EINVAL");
        refuse(&mut plan, libc::SYS_setgid, &[id], "EINVAL");
        refuse(&mut plan, libc::SYS_setresuid, &[id, id, id], "EINVAL");
    }
    for name in [
        "trusted.overlay.opaque",
        "trusted.overlay.redirect",
        "trusted.overlay.metacopy",
        "trusted.x",
        "security.ima",
    ] {
        for path in ["text:/file", "text:/directory"] {
            refuse(
                &mut plan,
                libc::SYS_setxattr,
                &[path, &format!("text:{name}"), "text:y", "1", "0"],
                "EPERM|EOPNOTSUPP",
            );
            refuse(
                &mut plan,
                libc::SYS_getxattr,
                &[path, &format!("text:{name}"), "buffer", "100"],
                "ENODATA|EPERM|EOPNOTSUPP",
            );
        }
    }
    check_as(&sandbox, "root", &plan);
    // By an archive too, whoever unpacks it.
    let directory = crate::fixture::TempDir::new();
    fs::write(directory.join("member"), "x").unwrap();
    let archive = directory.join("archive.tar");
    let made = Command::new("tar")
        .args(["-cf", &archive, "-C", directory.path().to_str().unwrap()])
        .args([
            "--owner=70000",
            "--group=3000000000",
            "--numeric-owner",
            "--format=posix",
            "member",
        ])
        .status();
    if made.is_ok_and(|status| status.success()) {
        let archive = fs::read(archive).unwrap();
        assert!(
            sandbox
                .put("files/write?path=/archive.tar", &archive)
                .status
                < 300
        );
        sandbox.exec(&json!({ "cmd": "mkdir /one; cd /one; tar xf /archive.tar" }));
        let reply = sandbox.put("files/archive?path=/two", &archive);
        assert!(reply.status < 500, "{}", reply.text());
    }
    let up = sandbox.on_disk().join("up");
    let mut stack = vec![up];
    let mut seen = 0;
    while let Some(path) = stack.pop() {
        let status = fs::symlink_metadata(&path).unwrap();
        assert!(
            status.uid() < 65_536 && status.gid() < 65_536,
            "{path:?}: {status:?}"
        );
        seen += 1;
        if status.is_dir() {
            stack.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
        }
    }
    assert!(seen > 5);
}

#[test]
fn others_are_not_seen() {
    needs_roots!(_template, server);
    let (one, other) = (root(&server), root(&server));
    assert!(one.ids.end <= other.ids.start || other.ids.end <= one.ids.start);
    let third = server.sandbox();
    let theirs = other.spawn(&json!({ "cmd": "echo secret > /secret; echo secret > /dev/shm/secret; exec sleep 1000.25" }));
    let listener = other.spawn(
        &other
            .probe()
            .command(&[&["abstract-listen", "theirs"], &["stay"]]),
    );
    assert!(listener["pid"].is_number());
    third.sh("echo secret > secret; chmod 777 . secret");
    let running = third.spawn(&json!({ "cmd": "exec sleep 1000.25" }));
    let mut plan = Plan::default();
    for path in [
        "/secret".to_owned(),
        "/dev/shm/secret".to_owned(),
        third.home.join("secret").display().to_string(),
        other.on_disk().display().to_string(),
    ] {
        plan.add(&["stat", &path], "ENOENT");
    }
    for process in [&theirs, &running] {
        let pid = process["pid"].to_string();
        plan.add(&["kill", &pid, "9"], "ESRCH|EPERM");
    }
    plan.add(&["abstract-connect", "theirs"], "ECONNREFUSED|EPERM");
    check_as(&one, "root", &plan);
    let seen = one.sh("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'; ls -d /proc/[0-9]*");
    assert!(!seen.contains("1000.25"), "{seen}");
    one.exec(&json!({ "cmd": "kill -9 -1" }));
    for process in [&theirs, &running] {
        assert!(is_alive(crate::fixture::pid_of(process)));
    }
    // One that is not confined by a root of its own does not reach these either.
    let path = other.on_disk().join("up/secret").display().to_string();
    let outcome = third.exec(&json!({ "cmd": ["cat", path] }));
    assert_ne!(outcome.code(), Some(0), "{outcome:?}");
}

#[test]
fn commands_on_their_way_cannot_be_inspected() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    let stop = Stop::default();
    thread::scope(|scope| {
        let _guard = stop.guard();
        for user in ["root", "root", "user"] {
            let (sandbox, stop) = (&sandbox, &stop);
            scope.spawn(move || {
                while !stop.is_set() {
                    let body = json!({ "cmd": "true", "user": user, "env": { "SECRET": TOKEN } });
                    let reply = sandbox.post("exec", &body);
                    assert!(matches!(reply.status, 200 | 400 | 500), "{}", reply.text());
                }
            });
        }
        let length = race_length().as_millis().to_string();
        let outcome = sandbox.probe().run_one(&["peek", &length]);
        let (met, seen) = outcome.split_once(' ').unwrap();
        eprintln!("met {met} on their way");
        assert_eq!(seen, "");
    });
    sandbox.exec(&json!({ "cmd": "kill -CONT -1" }));
    sandbox.delete();
}

#[test]
fn no_route_leaves_a_root_in_which_names_change_under_it() {
    needs_roots!(template, server);
    let vault = Vault::new();
    let neighbour = root(&server);
    // Nowhere else, least of all in the hostile program, which the routes read too.
    let secret = &Marker::new().text;
    neighbour.sh(&format!("echo {secret} > /secret"));
    let sandbox = root(&server);
    let vault_path = vault.directory.path().display().to_string();
    let neighbours = neighbour.on_disk().join("up").display().to_string();
    let mut names = Vec::new();
    let mut pairs = Vec::new();
    for (name, other) in [
        ("dir-vault", vault_path.clone()),
        ("dir-neighbour", neighbours.clone()),
        ("dir-up", "../../../../../etc".to_owned()),
        ("dir-root", "/home".to_owned()),
        ("dir-work", "/../work".to_owned()),
        ("dir-proc", "/proc/1/root".to_owned()),
        ("file-vault", vault.path("marker")),
        ("file-neighbour", format!("{neighbours}/secret")),
        ("file-up", format!("../../../../..{}", vault.path("marker"))),
        ("file-fifo", "fifo".to_owned()),
        ("file-hard", "hard:own".to_owned()),
        ("file-dir", "dir".to_owned()),
        ("file-proc", "/proc/self/environ".to_owned()),
        ("file-device", "/dev/zero".to_owned()),
        ("dir-file", "file".to_owned()),
    ] {
        pairs.push(format!("{name}={other}"));
        names.push(name);
    }
    // What leads out in other sandboxes leads to something here.
    sandbox.sh(&format!(
        "mkdir -p {vault_path}; echo decoy > {}; cd /root; echo own > own; echo gift > gift",
        vault.path("marker")
    ));
    let mut act = vec!["swap"];
    act.extend(pairs.iter().map(String::as_str));
    let swapper = sandbox.spawn(&sandbox.probe().command(&[&act]));
    let counts = hammer(&sandbox, &names, &[&vault.marker.text, secret]);
    let running = sandbox.get(&format!("processes/{}", swapper["id"].as_str().unwrap()));
    // It may have lost its program or its files by a request.
    eprintln!("done and refused: {counts:?}; {}", running.text());
    assert!(tells_enough(&counts), "{counts:?}");
    vault.check();
    assert_eq!(neighbour.sh("cat /secret").trim(), *secret);
    assert!(template.path("home/user").exists() && template.path("bin/busybox").exists());
    sandbox.delete();
    vault.check();
}

#[test]
fn whatever_it_makes_of_its_directories_it_starts_again() {
    needs_roots!(_template, server);
    let vault = Vault::new();
    let target = vault.directory.path().display().to_string();
    for (what, script) in [
        ("links", "rm -rf $1; ln -s VAULT $1"),
        ("links up", "rm -rf $1; ln -s ../../../../../.. $1"),
        ("loops", "rm -rf $1; ln -s $1 $1"),
        ("files", "rm -rf $1; echo x > $1"),
        ("pipes", "rm -rf $1; mkfifo $1"),
        ("nothing", "rm -rf $1"),
        ("closed", "rm -rf $1; mkdir -m 000 $1; chown 65535:65535 $1"),
        (
            "others",
            "rm -rf $1; mkdir $1; echo x > $1/x; ln -s /etc $1/pts; ln -s / $1/shm",
        ),
    ] {
        let sandbox = root(&server);
        // What is mounted is in the way of its own name only, so the second life does the rest.
        let names = "run etc tmp root home var workspace";
        let script =
            format!("for name in {names}; do set -- x /$name; shift; {script}; done; true")
                .replace("VAULT", &target);
        sandbox.exec(&json!({ "cmd": script }));
        // By the file routes, which see what the mounts cover.
        for name in ["dev", "proc", "sys"] {
            sandbox.request(
                "DELETE",
                &format!("files/delete?recursive=1&path=/{name}"),
                b"",
            );
            match what {
                "files" => drop(sandbox.put(&format!("files/write?path=/{name}"), b"x")),
                "links" | "links up" | "loops" => {
                    sandbox.post(
                        &format!("files/move?from=/{}&to=/{name}", "run"),
                        &json!({}),
                    );
                }
                _ => {}
            }
        }
        for _ in 0..2 {
            sandbox.stop();
            sandbox.start();
            let outcome = sandbox.exec(&json!({ "cmd": ["/bin/busybox", "sh", "-c", "busybox id -u; busybox ls /proc/self/fd /dev/null /sys/kernel > /dev/null && echo all"] }));
            assert_eq!(outcome.stdout, "0\nall\n", "{what}: {outcome:?}");
        }
        vault.check();
        assert_eq!(server.get("/health").status, 200);
        sandbox.delete();
        vault.check();
    }
}

#[test]
fn a_closed_root_keeps_working() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    sandbox.sh("chmod 000 / && chown 65535:65535 /");
    assert_eq!(sandbox.sh("id -u"), "0\n");
    assert!(sandbox.put("files/write?path=/new", b"x").status < 300);
    let refused = sandbox.post("exec", &json!({ "cmd": "true", "user": "user" }));
    assert!(refused.status < 500, "{}", refused.text());
    sandbox.stop();
    sandbox.start();
    assert_eq!(sandbox.sh("cat /new; id -u"), "x0\n");
    sandbox.delete();
}

#[test]
fn processes_of_many_users_end_at_once() {
    needs_roots!(_template, server);
    let sandbox = root_with(&server, json!({ "max_procs": 200 }));
    for user in ["root", "user", "1", "2", "3", "65535"] {
        let mut command = sandbox.probe().command(&[&["fork-storm", "in-sessions"]]);
        command["user"] = json!(user);
        let reply = sandbox.post("processes", &command);
        assert!(reply.status < 500, "{}", reply.text());
    }
    // Each becomes another user all the time.
    sandbox.post("processes", &json!({ "cmd": "while :; do for n in 11 12 13 14 15; do su user -c 'sleep 1000' & done; done" }));
    wait_until("as many run as may", PATIENCE, || {
        sandbox.own_processes().len() >= 150
    });
    for _ in 0..10 {
        assert!(sandbox.own_processes().len() <= 202);
        assert_eq!(server.get("/health").status, 200);
    }
    let begun = Instant::now();
    sandbox.delete();
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn lists_of_accounts_hold_nobody_up() {
    needs_roots!(_template, server);
    for (what, script) in [
        (
            "large",
            "truncate -s 100000000000 /etc/passwd; truncate -s 100000000 /etc/group",
        ),
        (
            "long",
            "yes root:x:0:0:root:/root:/bin/sh | head -c 10000000 > /etc/passwd",
        ),
        (
            "many groups",
            "i=0; while [ $i -lt 30000 ]; do echo g:x:$((i % 65536)):root,user; i=$((i+1)); done > /etc/group",
        ),
        (
            "a pipe",
            "rm /etc/passwd /etc/group; mkfifo /etc/passwd /etc/group",
        ),
        ("a directory", "rm /etc/passwd; mkdir /etc/passwd"),
        ("a loop", "rm /etc/passwd; ln -s passwd /etc/passwd"),
        ("a device", "rm /etc/passwd; ln -s /dev/zero /etc/passwd"),
        (
            "a process",
            "rm /etc/passwd; ln -s /proc/self/mem /etc/passwd",
        ),
        ("nothing", "rm -r /etc"),
        (
            "garbage",
            "head -c 1000000 /dev/urandom > /etc/passwd; head -c 1000000 /dev/urandom > /etc/group",
        ),
        (
            "other numbers",
            "echo root:x:65535:65535::/:/bin/sh > /etc/passwd; echo x:x:4294967295:0::/: >> /etc/passwd",
        ),
        ("a lease", ""),
    ] {
        let sandbox = root(&server);
        if what == "a lease" {
            let held = sandbox.probe();
            held.hold(&[&["lease", "/etc/passwd"]]);
        } else {
            sandbox.sh(script);
        }
        let begun = Instant::now();
        let expected = if what == "other numbers" {
            "65535\n"
        } else {
            "0\n"
        };
        for _ in 0..2 {
            assert_eq!(sandbox.sh(OWN_UID), expected, "{what}");
            let reply = sandbox.post("exec", &json!({ "cmd": "true", "user": "user" }));
            assert!(reply.status < 500, "{what}: {}", reply.text());
            assert!(sandbox.get("files/list?path=/").status < 300);
        }
        if what != "a lease" {
            sandbox.stop();
            sandbox.start();
            assert_eq!(sandbox.sh(OWN_UID), expected, "{what}");
        }
        assert!(
            begun.elapsed() < PATIENCE * 3,
            "{what}: {:?}",
            begun.elapsed()
        );
        sandbox.delete();
    }
}

#[test]
fn descriptors_that_are_sent_to_the_server_go_nowhere() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    let pid = server.inner_pid();
    sandbox.spawn(
        &sandbox
            .probe()
            .command(&[&["give-sockets", "/run/sbx/proxy/evil.sock"], &["stay"]]),
    );
    wait_until("it listens", PATIENCE, || {
        sandbox.get("ports/evil/wait?timeout=0").json()["listening"] == true
    });
    sandbox.get("proxy/evil/");
    let before = descriptors_of(pid);
    for _ in 0..20 {
        let reply = sandbox.get("proxy/evil/");
        assert!(reply.status >= 500, "{}", reply.text());
    }
    wait_until("they are closed", PATIENCE, || {
        descriptors_of(pid) <= before + 2
    });
}

#[test]
fn sockets_that_are_not_its_own_are_not_connected_to() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    let outside = crate::fixture::TempDir::new();
    let path = outside.path().join("outside.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let shown = path.display().to_string();
    sandbox.sh(&format!("cd /run/sbx/proxy; ln -s {shown} a.sock; ln -s ../../../../../../../..{shown} b.sock; echo x > c.sock; mkfifo d.sock; mkdir e.sock"));
    for name in ["a", "b", "c", "d", "e"] {
        let reply = sandbox.get(&format!("proxy/{name}/"));
        assert_eq!(
            (reply.status, &*reply.code()),
            (502, "unreachable"),
            "{name}: {}",
            reply.text()
        );
    }
    // Nor by a directory that is another.
    sandbox.sh(&format!(
        "rm -r /run/sbx/proxy; ln -s {} /run/sbx/proxy",
        outside.path().display()
    ));
    let reply = sandbox.get("proxy/outside/");
    assert_eq!((reply.status, &*reply.code()), (502, "unreachable"));
    sandbox.sh("rm -rf /run; ln -s /tmp /run");
    assert_eq!(sandbox.get("proxy/outside/").status, 502);
    assert!(sandbox.get("ports").status < 500);
    // What somebody of the machine has put there is not the sandbox's.
    let own = root(&server);
    let planted = own.on_disk().join("up/run/sbx/proxy/planted.sock");
    let _planted = std::os::unix::net::UnixListener::bind(&planted);
    symlink(&path, own.on_disk().join("up/run/sbx/proxy/link.sock")).unwrap();
    for name in ["planted", "link"] {
        let reply = own.get(&format!("proxy/{name}/"));
        assert_eq!(reply.status, 502, "{name}: {}", reply.text());
    }
}

/// A path with `..` fails while names change anywhere, and then for one that looks it up once.
#[test]
fn accounts_are_found_while_names_change() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    sandbox.sh("mkdir /real && mv /etc/passwd /real && ln -s ../etc/../real/passwd /etc/passwd");
    for _ in 0..2 {
        sandbox.spawn(
            &sandbox
                .probe()
                .command(&[&["swap", "file-one=file", "file-two=file"]]),
        );
    }
    for _ in 0..100 {
        let reply = sandbox.post("exec", &json!({ "cmd": ["/bin/true"], "user": "homeless" }));
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
}

/// Memory files that nothing maps are seen by whoever may look at the descriptors of a process.
#[test]
fn memory_of_a_process_with_several_ids_counts() {
    needs_roots!(template, server);
    memory_of_several_ids_counts(&server);
    // As in a container.
    let words = ["setpriv", "--bounding-set=-sys_ptrace"];
    let server = template.builder().wrapped_in(&words).start();
    assert_eq!(super::lack(&server), None);
    memory_of_several_ids_counts(&server);
}

#[track_caller]
fn memory_of_several_ids_counts(server: &Server) {
    let sandbox = root_with(server, json!({ "max_total_mem_mb": 100 }));
    sandbox.sh("chmod 4755 /probe");
    for acts in [
        &[&["hog-file", "150"][..], &["stay"]][..],
        &[&["hide"], &["hog-file", "150"], &["stay"]],
    ] {
        let mut command = sandbox.probe().command(acts);
        command["user"] = json!("user");
        let outcome = sandbox.exec(&command);
        assert_eq!(
            outcome.exit["reason"], "memory_limit",
            "{acts:?}: {outcome:?}"
        );
    }
    assert_eq!(sandbox.sh("echo on"), "on\n");
}

#[test]
fn trees_of_several_users_end_together() {
    needs_roots!(_template, server);
    let sandbox = root(&server);
    for command in [
        "su user -c 'sleep 1000' & su 7 -c true; wait",
        "su user -c 'setsid sleep 1000 & exit' & sleep 1000",
        "su user -c 'sleep 1000 & sleep 1000'",
    ] {
        let process = sandbox.spawn(&json!({ "cmd": command }));
        let is_one = |pid: &i32| crate::fixture::uid_of(*pid) == Some(sandbox.ids.start + 1000);
        wait_until("it runs as the user", PATIENCE, || {
            sandbox.own_processes().iter().any(is_one)
        });
        let route = format!("processes/{}", process["id"].as_str().unwrap());
        let reply = sandbox.request("DELETE", &route, b"");
        assert_eq!(reply.status, 200, "{}", reply.text());
        wait_until("all of it has ended", PATIENCE, || {
            sandbox.own_processes().is_empty()
        });
    }
    let outcome = sandbox.exec(&json!({ "cmd": "su user -c 'sleep 1000'", "timeout": 2 }));
    assert_eq!(outcome.exit["timed_out"], true, "{outcome:?}");
    wait_until("all of it has ended", PATIENCE, || {
        sandbox.own_processes().is_empty()
    });
}

/// What is mounted over a directory goes where the directory goes, and the tree of the server has nothing mounted.
#[test]
fn no_route_moves_what_the_machine_has_in_a_root() {
    needs_roots!(template, server);
    let root = root(&server);
    assert_eq!(root.sh("mkdir -p /x/y /v && echo kept").trim(), "kept");
    for name in ["dev", "proc", "sys"] {
        let link = format!("ln -s / /root-{name}");
        root.sh(&link);
        for path in [
            format!("/{name}"),
            format!("/{name}/"),
            format!("/x/../{name}"),
            format!("/root-{name}/{name}"),
            format!("../{name}"),
        ] {
            for (method, target) in [
                ("POST", format!("files/move?from={path}&to=/moved")),
                ("POST", format!("files/move?from=/v&to={path}")),
                ("DELETE", format!("files/delete?path={path}&recursive=1")),
                ("PUT", format!("files/archive?path={path}&atomic=1")),
            ] {
                let reply = root.request(method, &target, b"");
                assert!(
                    matches!(reply.status, 400 | 403 | 409),
                    "{method} {target}: {}",
                    reply.text()
                );
            }
        }
        let seen = root.sh(&format!(
            "grep -c ' /{name} ' /proc/mounts; ls -d /moved 2>&1; true"
        ));
        assert!(seen.starts_with("1\n"), "{name}: {seen}");
        assert!(seen.contains("No such file"), "{seen}");
    }
    root.delete();
}

/// When memory runs out, what a sandbox runs ends before the server and before what others run.
#[test]
fn commands_are_taken_first_when_memory_runs_out() {
    needs_roots!(template, server);
    let root = root(&server);
    let own = fs::read_to_string("/proc/self/oom_score_adj").unwrap();
    let expected = (own.trim().parse::<i32>().unwrap() + 900).min(1000);
    for user in ["root", "user"] {
        let score = root.sh_as(user, "cat /proc/self/oom_score_adj");
        assert_eq!(score.trim(), expected.to_string(), "{user}");
    }
}

#[test]
fn servers_on_the_loopback_of_the_machine_are_not_reached() {
    needs_roots!(template, server);
    let root = root(&server);
    let web = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    web.set_nonblocking(true).unwrap();
    let port = web.local_addr().unwrap().port();
    let gate = "${HTTP_PROXY##*:}";
    for host in [
        "127.0.0.1",
        "127.8.9.1",
        "0.0.0.0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "localhost",
    ] {
        let ask = format!(
            "printf 'CONNECT {host}:{port} HTTP/1.1\\r\\n\\r\\n' | nc -w 3 127.0.0.1 {gate} | head -n 1"
        );
        let answer = root.sh(&ask);
        assert!(
            answer.starts_with("HTTP/1.1 4") || answer.starts_with("HTTP/1.1 5"),
            "{host}: {answer}"
        );
    }
    root.exec(&json!({ "cmd": format!("nc -w 3 127.0.0.1 {port} < /dev/null") }));
    assert_eq!(
        web.accept().err().unwrap().kind(),
        std::io::ErrorKind::WouldBlock
    );
    let shown = root.described()["network"].clone();
    assert_eq!(
        shown,
        json!({ "mode": "open", "deny": ["127.0.0.0/8", "::1"], "transparent": true })
    );
}
