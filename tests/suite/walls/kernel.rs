//! The system calls that a sandbox is refused, attempted one by one, by the numbers that libc has.

use serde_json::json;

use super::probe::{Plan, Probe};
use crate::fixture::{Server, is_root, kinds};
use crate::skip;

/// What is refused whatever its arguments. Where libc has no number yet it is the same on every
/// architecture.
fn refused() -> Vec<(&'static str, i64, &'static str)> {
    macro_rules! calls {
        ($errno:literal: $($name:ident)*) => {
            [$((stringify!($name).trim_start_matches("SYS_"), libc::$name, $errno)),*]
        };
    }
    let mut all = vec![
        ("open_tree_attr", 467, "EPERM"),
        ("statmount", 457, "ENOSYS"),
        ("listmount", 458, "ENOSYS"),
        ("listns", 470, "ENOSYS"),
    ];
    all.extend(calls!("EPERM":
        SYS_mount SYS_umount2 SYS_pivot_root SYS_chroot SYS_open_tree SYS_move_mount SYS_fsopen
        SYS_fsconfig SYS_fsmount SYS_fspick SYS_mount_setattr SYS_setns
        SYS_add_key SYS_request_key SYS_keyctl
        SYS_bpf SYS_perf_event_open SYS_userfaultfd SYS_fanotify_init SYS_open_by_handle_at
        SYS_init_module SYS_finit_module SYS_delete_module SYS_kexec_load SYS_kexec_file_load
        SYS_reboot SYS_swapon SYS_swapoff SYS_syslog
        SYS_settimeofday SYS_clock_settime SYS_sethostname SYS_setdomainname SYS_acct
        SYS_quotactl SYS_quotactl_fd SYS_vhangup
    ));
    all.extend(calls!("ENOSYS":
        SYS_clone3 SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register SYS_memfd_secret
        SYS_shmget SYS_shmat SYS_shmctl SYS_shmdt SYS_semget SYS_semop SYS_semctl SYS_semtimedop
        SYS_msgget SYS_msgsnd SYS_msgrcv SYS_msgctl SYS_mq_open SYS_mq_unlink
        SYS_nfsservctl SYS_lookup_dcookie SYS_io_setup SYS_sched_setattr
        SYS_landlock_create_ruleset
    ));
    #[cfg(target_arch = "x86_64")]
    {
        all.extend(calls!("EPERM": SYS_iopl SYS_ioperm));
        all.extend(calls!("ENOSYS": SYS_modify_ldt SYS__sysctl SYS_uselib));
    }
    all
}

#[test]
fn every_refused_call_is_refused_whatever_it_is_given() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let mut plan = Plan::default();
    for (_, number, errno) in refused() {
        let number = number.to_string();
        plan.add(&["syscall", &number], errno);
        plan.add(
            &["syscall", &number, "-1", "-1", "-1", "-1", "-1", "-1"],
            errno,
        );
        plan.add(
            &[
                "syscall", &number, "buffer", "buffer", "buffer", "buffer", "buffer",
            ],
            errno,
        );
    }
    Probe::new(&sandbox).check(&plan);
}

/// The test's own list has everything that the server's table has.
#[test]
fn no_call_of_the_table_is_left_out_of_this_test() {
    let source = include_str!("../../../src/confine/filter/calls.rs");
    let tables = source.split_once("const NETWORK").unwrap().1;
    let tables = tables.split_once("const TERMINAL_COMMANDS").unwrap().0;
    let names: Vec<&str> = tables
        .split(['(', '\n'])
        .filter_map(|text| text.strip_prefix('"')?.split('"').next())
        .collect();
    assert!(names.len() > 70, "the table is not read right: {names:?}");
    let known = refused();
    for name in names {
        let by_arguments = [
            "clone",
            "unshare",
            "socket",
            "socketpair",
            "setsockopt",
            "sendto",
            "sendmsg",
            "sendmmsg",
            "ioctl",
            "fcntl",
            "fadvise64",
            "sched_setscheduler",
            "seccomp",
            "prctl",
            // See the tests of limits (state.rs).
            "setrlimit",
            "prlimit64",
            // Left to the server, under a transparent network only.
            "connect",
            "listen",
        ];
        let elsewhere = cfg!(not(target_arch = "x86_64"))
            && ["iopl", "ioperm", "modify_ldt", "_sysctl", "uselib"].contains(&name);
        assert!(
            by_arguments.contains(&name)
                || elsewhere
                || known.iter().any(|(known, _, _)| *known == name),
            "{name} is not attempted"
        );
    }
}

/// Directories and programs that all have: nobody is told of each use of them, or throws them out of memory.
#[test]
fn what_is_shared_is_not_made_slow_for_others() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let code = "import fcntl, os
shared = os.open('/usr/bin', os.O_RDONLY)
try:
    print(fcntl.fcntl(shared, fcntl.F_NOTIFY, fcntl.DN_ACCESS | fcntl.DN_MULTISHOT))
except OSError as error:
    print(error.errno)
program = os.open('/proc/self/exe', os.O_RDONLY)
print(os.posix_fadvise(program, 0, 0, os.POSIX_FADV_DONTNEED))";
    let ran = server
        .sandbox()
        .exec(&serde_json::json!({ "cmd": ["python3", "-c", code] }));
    let expected = format!("{}\nNone\n", libc::EPERM);
    assert_eq!(ran.stdout, expected, "{}", ran.stderr);
}

#[test]
fn no_namespace_can_be_made_or_entered() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let mut plan = Plan::default();
    let (clone, unshare) = (libc::SYS_clone.to_string(), libc::SYS_unshare.to_string());
    for flag in [
        libc::CLONE_NEWNS,
        libc::CLONE_NEWCGROUP,
        libc::CLONE_NEWUTS,
        libc::CLONE_NEWIPC,
        libc::CLONE_NEWUSER,
        libc::CLONE_NEWPID,
        libc::CLONE_NEWNET,
        0x80, // CLONE_NEWTIME
    ] {
        let alone = flag.to_string();
        plan.add(&["syscall", &unshare, &alone], "EPERM");
        plan.add(
            &["syscall", &unshare, &(flag | libc::CLONE_FILES).to_string()],
            "EPERM",
        );
        if flag != 0x80 {
            let forking = (flag | libc::SIGCHLD).to_string();
            plan.add(&["syscall", &clone, &forking], "EPERM");
            let user = (flag | libc::CLONE_NEWUSER | libc::SIGCHLD).to_string();
            plan.add(&["syscall", &clone, &user], "EPERM");
        }
        for path in ["open:/proc/self/ns/user", "open:/proc/self/ns/mnt"] {
            plan.add(
                &["syscall", &libc::SYS_setns.to_string(), path, &alone],
                "EPERM|EACCES",
            );
        }
    }
    // A container's own filter may allow nothing at all of it.
    let files = libc::CLONE_FILES.to_string();
    plan.add(&["syscall", &unshare, &files], "ok|EPERM");
    plan.add(&["syscall", &clone, &libc::SIGCHLD.to_string()], "ok");
    Probe::new(&sandbox).check(&plan);
}

/// A child that `CLONE_PARENT` gives to the server is nobody's to reap, and its zombie keeps the uid busy.
#[test]
fn no_process_becomes_a_child_of_the_server() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let clone = libc::SYS_clone.to_string();
    let mut plan = Plan::default();
    for flags in [libc::CLONE_PARENT, libc::CLONE_PARENT | libc::SIGCHLD] {
        plan.add(&["syscall", &clone, &flags.to_string()], "EPERM");
    }
    Probe::new(&sandbox).check(&plan);
    let reply = server.delete(&format!("/v1/sandboxes/{}", sandbox.id));
    assert_eq!(reply.status, 200, "{reply:?}");
}

/// With a port range, `listen` without `bind` takes the port that the sandbox chooses.
#[test]
fn no_socket_gets_a_port_range_of_its_own() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let setsockopt = libc::SYS_setsockopt.to_string();
    let mut plan = Plan::default();
    for level in ["0", "0xdeadbeef00000000"] {
        plan.add(
            &["syscall", &setsockopt, "0", level, "51", "buffer", "4"],
            "ENOPROTOOPT",
        );
    }
    // Other options reach the kernel, which finds that stdin is no socket.
    for (level, option) in [("0", "50"), ("6", "51")] {
        plan.add(
            &["syscall", &setsockopt, "0", level, option, "buffer", "4"],
            "ENOTSOCK",
        );
    }
    Probe::new(&sandbox).check(&plan);
}

/// The kernel compiles filters into memory that all sandboxes and the server share (`net.core.bpf_jit_limit`). The
/// programs here are valid, so that a kernel that is asked attaches them.
#[test]
fn no_filter_is_attached_from_inside() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let mut plan = Plan::default();
    let seccomp = libc::SYS_seccomp.to_string();
    let prctl = libc::SYS_prctl.to_string();
    let setsockopt = libc::SYS_setsockopt.to_string();
    for operation in ["1", "0xdeadbeef00000001"] {
        for flags in ["0", "1", "2", "4", "8"] {
            for program in ["filter", "0", "buffer"] {
                plan.add(&["syscall", &seccomp, operation, flags, program], "EINVAL");
            }
        }
    }
    for option in ["22", "0xdeadbeef00000016"] {
        for mode in ["2", "0xdeadbeef00000002"] {
            plan.add(&["syscall", &prctl, option, mode, "filter"], "EINVAL");
        }
    }
    for family in ["unix", "tcp", "udp", "route"] {
        let socket = format!("socket:{family}");
        for level in ["1", "0xdeadbeef00000001"] {
            for option in ["25", "26", "50", "51", "52", "62", "0xdeadbeef0000001a"] {
                let act = [
                    "syscall",
                    &setsockopt,
                    &socket,
                    level,
                    option,
                    "filter",
                    "16",
                ];
                plan.add(&act, "ENOPROTOOPT");
            }
        }
    }
    // What there is besides: the mode, the actions of the kernel, and the removal of a filter that is not there.
    plan.add(&["syscall", &prctl, "21", "0", "0"], "ok");
    plan.add(&["syscall", &seccomp, "2", "0", "buffer"], "ok");
    let detach = [
        "syscall",
        &setsockopt,
        "socket:unix",
        "1",
        "27",
        "buffer",
        "4",
    ];
    plan.add(&detach, "ENOENT");
    for kind in kinds(&server) {
        let sandbox = server.sandbox_with(&kind);
        Probe::new(&sandbox).check(&plan);
        assert_eq!(sandbox.sh("echo here"), "here\n");
    }
}

/// An upper layer protocol (`TCP_ULP`) makes a TCP socket one that Landlock's rules for TCP may not see.
#[test]
fn a_tcp_socket_gets_no_other_protocol() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let setsockopt = libc::SYS_setsockopt.to_string();
    let mut plan = Plan::default();
    for level in ["6", "0xdeadbeef00000006"] {
        for option in ["31", "0xdeadbeef0000001f"] {
            for name in ["text:tls", "text:smc", "text:espintcp", "buffer", "0"] {
                plan.add(
                    &["syscall", &setsockopt, "0", level, option, name, "4"],
                    "ENOENT",
                );
            }
        }
    }
    for (level, option) in [("6", "30"), ("6", "32"), ("0", "31"), ("1", "31")] {
        plan.add(
            &["syscall", &setsockopt, "0", level, option, "buffer", "4"],
            "ENOTSOCK",
        );
    }
    for network in ["open", "blocked"] {
        let sandbox = server.sandbox_with(&json!({ "network": network }));
        Probe::new(&sandbox).check(&plan);
    }
    // OpenSSL asks for `tls` here (SSL_OP_ENABLE_KTLS), and encrypts by itself.
    let code = "import socket, ssl, subprocess, threading
subprocess.run(['openssl', 'req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes',
    '-subj', '/CN=here', '-keyout', 'key', '-out', 'certificate'], check=True, capture_output=True)
def context(protocol):
    made = ssl.SSLContext(protocol)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.options |= 8
    return made
server = socket.socket()
server.listen()
def serve():
    own = context(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain('certificate', 'key')
    with own.wrap_socket(server.accept()[0], server_side=True) as client: client.sendall(client.recv(5)[::-1])
threading.Thread(target=serve).start()
client = socket.create_connection(('127.0.0.1', server.getsockname()[1]), timeout=60)
client = context(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(client)
client.sendall(b'hello')
print(client.recv(5))";
    let outcome = server
        .sandbox()
        .exec(&json!({ "cmd": ["python3", "-c", code] }));
    assert_eq!(outcome.stdout, "b'olleh'\n", "{outcome:?}");
}

#[test]
fn nothing_is_typed_into_a_terminal_from_inside() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let ioctl = libc::SYS_ioctl.to_string();
    let mut plan = Plan::default();
    for command in ["0x5412", "0x541c", "0x5423", "0xdeadbeef00005412"] {
        plan.add(
            &["syscall", &ioctl, "open:/dev/ptmx", command, "text:x"],
            "EPERM",
        );
        plan.add(&["syscall", &ioctl, "0", command, "text:x"], "EPERM");
    }
    // TIOCGPTN, the number of a terminal of one's own, works.
    plan.add(
        &["syscall", &ioctl, "open:/dev/ptmx", "0x80045430", "buffer"],
        "ok",
    );
    Probe::new(&sandbox).check(&plan);
}

#[test]
fn no_pipe_is_made_larger_from_inside() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let fcntl = libc::SYS_fcntl.to_string();
    let (grow, size) = (
        libc::F_SETPIPE_SZ.to_string(),
        libc::F_GETPIPE_SZ.to_string(),
    );
    let mut plan = Plan::default();
    plan.add(&["syscall", &fcntl, "1", &grow, "1048576"], "EPERM");
    plan.add(&["syscall", &fcntl, "1", &size], "ok");
    Probe::new(&sandbox).check(&plan);
}

/// An idle process that holds a lock of the kernel keeps others waiting as long as its sandbox likes.
#[test]
fn no_process_is_scheduled_as_idle() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let schedule = libc::SYS_sched_setscheduler.to_string();
    let mut plan = Plan::default();
    for idle in ["5", "0x40000005", "0xdeadbeef00000005"] {
        plan.add(&["syscall", &schedule, "0", idle, "buffer"], "EPERM");
    }
    // Ordinary and batch scheduling.
    for policy in ["3", "0"] {
        plan.add(&["syscall", &schedule, "0", policy, "buffer"], "ok");
    }
    Probe::new(&sandbox).check(&plan);
}

#[test]
fn a_call_by_another_architectures_numbers_ends_the_program() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    let outcome = sandbox.exec(&probe.command(&[&["other-architecture"]]));
    let signal = &outcome.exit["signal"];
    // A kernel without 32-bit programs ends it in its own way.
    assert!(
        *signal == libc::SIGSYS || *signal == libc::SIGSEGV,
        "{outcome:?}"
    );
    if cfg!(target_arch = "x86_64") {
        // getpid and execve as x32 has them.
        let mut plan = Plan::default();
        for number in ["0x40000027", "0x40000208", "520", "545"] {
            plan.add(&["syscall", number], "ENOSYS");
        }
        probe.check(&plan);
    }
    let reply = sandbox.post("exec", &json!({ "cmd": "echo here" }));
    assert_eq!(reply.status, 200);
}
