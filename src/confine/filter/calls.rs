//! The tables of denied calls: the numbers of each call on both architectures, and how it is denied. A call is added here,
//! and to `refused` in tests/suite/walls/kernel.rs.

use libc::{ENOSYS, EPERM, c_int};

use super::checks::Denial;
use super::{Sockets, Subject};

/// A system call and its number on each architecture that has it.
pub(super) struct Call {
    /// For tests, and for whoever reads the tables: the kernel knows numbers only.
    #[cfg(test)]
    pub(super) name: &'static str,
    pub(super) x86_64: Option<u32>,
    pub(super) aarch64: Option<u32>,
}

#[cfg_attr(
    not(test),
    expect(unused_variables, reason = "tests alone compare names")
)]
const fn call(name: &'static str, x86_64: u32, aarch64: u32) -> Call {
    Call {
        #[cfg(test)]
        name,
        x86_64: Some(x86_64),
        aarch64: Some(aarch64),
    }
}

#[cfg_attr(
    not(test),
    expect(unused_variables, reason = "tests alone compare names")
)]
const fn x86_64_only(name: &'static str, number: u32) -> Call {
    Call {
        #[cfg(test)]
        name,
        x86_64: Some(number),
        aarch64: None,
    }
}

/// How each list of calls is denied.
pub(super) type Table = [(Denial, &'static [Call])];

/// What would bypass the rules for the network. Numbers from 424 on are the same everywhere.
pub(super) const NETWORK: &Table = &[
    (
        Denial::UnusualSockets,
        &[call("socket", 41, 198), call("socketpair", 53, 199)],
    ),
    // With a port range of its own, a socket that listens without bind gets the port of its choice, which
    // Landlock's rules for bind do not see: also one that a server waits for on another address family.
    // A socket that lingers makes whoever closes its last descriptor wait, for years if its owner likes
    // (socket(7)). That may be a thread of the server, which holds copies of sockets, or one of the kernel, which
    // closes what programs have sent to themselves (net/unix/garbage.c).
    // With a timeout of its own (tcp(7), `TCP_USER_TIMEOUT`) the kernel keeps a closed connection, and the data that its
    // peer has not acknowledged, for up to 24 days; without one for about 100 seconds (`tcp_orphan_retries`).
    // An upper layer protocol replaces the operations of a TCP socket by those of a module of the kernel (`tls`, `smc`,
    // `espintcp`), and Landlock knows TCP's only. Programs that ask for `tls` encrypt by themselves without it.
    (Denial::SocketOptions, &[call("setsockopt", 54, 208)]),
    // Data that opens its connection (tcp(7), RFC 7413) is sent without connect, and Landlock's rules for
    // connect do not see it.
    (
        Denial::FastOpen(3),
        &[call("sendto", 44, 206), call("sendmmsg", 307, 269)],
    ),
    (Denial::FastOpen(2), &[call("sendmsg", 46, 211)]),
    // Operations of an io_uring bypass every other rule of the tables.
    (
        Denial::Always(ENOSYS),
        &[
            call("io_uring_setup", 425, 425),
            call("io_uring_enter", 426, 426),
            call("io_uring_register", 427, 427),
        ],
    ),
];

/// What is left to the server where it connects sockets.
const REDIRECTED: &Table = &[(
    Denial::Left,
    &[call("connect", 42, 203), call("listen", 50, 201)],
)];

/// The rest of what is denied to sandboxes.
pub(super) const KERNEL: &Table = &[
    // Mounts belong to the machine.
    (
        Denial::Always(EPERM),
        &[
            call("mount", 165, 40),
            call("umount2", 166, 39),
            call("pivot_root", 155, 41),
            call("open_tree", 428, 428),
            call("move_mount", 429, 429),
            call("fsopen", 430, 430),
            call("fsconfig", 431, 431),
            call("fsmount", 432, 432),
            call("fspick", 433, 433),
            call("mount_setattr", 442, 442),
            call("open_tree_attr", 467, 467),
        ],
    ),
    // Lists of mounts and namespaces: programs fall back to /proc.
    (
        Denial::Always(ENOSYS),
        &[
            call("statmount", 457, 457),
            call("listmount", 458, 458),
            call("listns", 470, 470),
        ],
    ),
    // A user namespace gives its creator every capability in it, and with that access to most of the
    // kernel's privileged code. clone3 has its flags in memory, which a filter cannot read; C libraries
    // fall back to clone.
    (Denial::CloneFlags, &[call("clone", 56, 220)]),
    (Denial::Unsharing, &[call("unshare", 272, 97)]),
    (Denial::Always(ENOSYS), &[call("clone3", 435, 435)]),
    (Denial::Always(EPERM), &[call("setns", 308, 268)]),
    (
        Denial::Commands(&TERMINAL_COMMANDS),
        &[call("ioctl", 16, 29)],
    ),
    // The server makes a command's pipes, and their memory is charged to its user: larger ones would
    // make those of other sandboxes smaller (pipe(7), `pipe-user-pages-soft`).
    // Whoever uses a file of a directory walks through all that asked to be told of it, without a limit but that of open
    // files: the directories of libraries are everybody's.
    (
        Denial::Commands(&[libc::F_SETPIPE_SZ, F_NOTIFY]),
        &[call("fcntl", 72, 25)],
    ),
    // What can be read can be thrown out of the machine's memory, and has to be read from the disk for the next one.
    (Denial::Forgetting, &[call("fadvise64", 221, 223)]),
    // Idle processes get next to no time beside busy ones. One that holds a lock of the kernel keeps everybody waiting
    // who needs the lock, for example for the entries of a directory. The other call has the policy in memory.
    (
        Denial::Commands(&[
            libc::SCHED_IDLE,
            libc::SCHED_IDLE | libc::SCHED_RESET_ON_FORK,
        ]),
        &[call("sched_setscheduler", 144, 119)],
    ),
    (Denial::Always(ENOSYS), &[call("sched_setattr", 314, 274)]),
    // The machine has only so many events of asynchronous I/O for everybody (`fs.aio-max-nr`), and one process can take
    // all. Databases fall back to threads.
    (Denial::Always(ENOSYS), &[call("io_setup", 206, 0)]),
    // The kernel compiles filters into memory of which the machine has only so much for everybody
    // (`net.core.bpf_jit_limit`): one sandbox that takes all keeps the server from attaching the filter without which no
    // command starts.
    (
        Denial::Mode(&[SECCOMP_SET_MODE_FILTER]),
        &[call("seccomp", 317, 277)],
    ),
    (
        Denial::Mode(&[libc::PR_SET_SECCOMP, SECCOMP_MODE_FILTER]),
        &[call("prctl", 157, 167)],
    ),
    // A limit of 1 alone keeps the kernel from starting the machine's program for core dumps, as root (core(5)): with 0 it does
    // that. Programs that want no core dumps have what they want.
    (Denial::CoreLimit(0, None), &[call("setrlimit", 160, 164)]),
    (
        Denial::CoreLimit(1, Some(2)),
        &[call("prlimit64", 302, 261)],
    ),
    // Rules of Landlock take memory of the kernel that no limit of a process sees: a descriptor may hold megabytes.
    (
        Denial::Always(ENOSYS),
        &[call("landlock_create_ruleset", 444, 444)],
    ),
    // Keyrings belong to uids: the next sandbox with the uid would get them.
    (
        Denial::Always(EPERM),
        &[
            call("add_key", 248, 217),
            call("request_key", 249, 218),
            call("keyctl", 250, 219),
        ],
    ),
    // Large, young or rarely used parts of the kernel that attacks often start from.
    (
        Denial::Always(EPERM),
        &[
            call("bpf", 321, 280),
            call("perf_event_open", 298, 241),
            call("userfaultfd", 323, 282),
            call("fanotify_init", 300, 262),
        ],
    ),
    // Secret memory is never swapped, and no limit counts it after it is unmapped while its descriptor is
    // open. modify_ldt serves 16-bit programs.
    (
        Denial::Always(ENOSYS),
        &[
            call("memfd_secret", 447, 447),
            x86_64_only("modify_ldt", 154),
        ],
    ),
    // Handles open files without a path and bypass the permissions of directories.
    (
        Denial::Always(EPERM),
        &[call("open_by_handle_at", 304, 265)],
    ),
    // The kernel itself: modules, swap, reboot, log.
    (
        Denial::Always(EPERM),
        &[
            call("init_module", 175, 105),
            call("finit_module", 313, 273),
            call("delete_module", 176, 106),
            call("kexec_load", 246, 104),
            call("kexec_file_load", 320, 294),
            call("reboot", 169, 142),
            call("swapon", 167, 224),
            call("swapoff", 168, 225),
            call("syslog", 103, 116),
        ],
    ),
    // Settings and hardware of the machine. They need capabilities too, and a sandbox has none: this is
    // the second lock.
    (
        Denial::Always(EPERM),
        &[
            call("settimeofday", 164, 170),
            call("clock_settime", 227, 112),
            call("sethostname", 170, 161),
            call("setdomainname", 171, 162),
            call("acct", 163, 89),
            call("quotactl", 179, 60),
            call("quotactl_fd", 443, 443),
            call("vhangup", 153, 58),
            x86_64_only("iopl", 172),
            x86_64_only("ioperm", 173),
        ],
    ),
    // Calls that newer kernels have removed.
    (
        Denial::Always(ENOSYS),
        &[
            x86_64_only("_sysctl", 156),
            x86_64_only("uselib", 134),
            call("nfsservctl", 180, 42),
            call("lookup_dcookie", 212, 18),
        ],
    ),
];

/// What is denied where programs of root have nothing of their own to change.
pub(super) const CHANGE_OF_ROOT: &Table = &[(Denial::Always(EPERM), &[call("chroot", 161, 51)])];

/// What is denied besides where sandboxes share their IPC objects.
pub(super) const SHARED_IPC: &Table = &[
    // These objects belong to uids and exist until they are removed. The calls on existing ones are denied
    // too: their ids are small numbers.
    (
        Denial::Always(ENOSYS),
        &[
            call("shmget", 29, 194),
            call("shmat", 30, 196),
            call("shmctl", 31, 195),
            call("shmdt", 67, 197),
            call("semget", 64, 190),
            call("semop", 65, 193),
            call("semctl", 66, 191),
            call("semtimedop", 220, 192),
            call("msgget", 68, 186),
            call("msgsnd", 69, 189),
            call("msgrcv", 70, 188),
            call("msgctl", 71, 187),
            call("mq_open", 240, 180),
            call("mq_unlink", 241, 181),
        ],
    ),
];

/// The command of fcntl(2) for news of a directory, which libc does not name.
const F_NOTIFY: c_int = 1026;

/// ioctls that type into a terminal (`TIOCSTI`, `TIOCLINUX`) or set a line discipline (`TIOCSETD`), which
/// makes drivers of modems and buses reachable from any pseudoterminal. asm-generic/ioctls.h, which
/// both architectures use.
pub(super) const TERMINAL_COMMANDS: [c_int; 3] = [0x5412, 0x541c, 0x5423];

/// The modes of seccomp(2) and of prctl(2) that attach a filter, which libc has as unsigned.
const SECCOMP_SET_MODE_FILTER: c_int = libc::SECCOMP_SET_MODE_FILTER.cast_signed();
const SECCOMP_MODE_FILTER: c_int = libc::SECCOMP_MODE_FILTER.cast_signed();

/// The lists of calls that are denied to a subject, or left to the server.
pub(super) fn denied(
    subject: Subject,
    sockets: Sockets,
) -> impl Iterator<Item = &'static (Denial, &'static [Call])> {
    let (kernel, root, shared): (&Table, &Table, &Table) = match subject {
        Subject::Sandbox => (KERNEL, CHANGE_OF_ROOT, SHARED_IPC),
        Subject::Namespaces => (KERNEL, CHANGE_OF_ROOT, &[]),
        Subject::PrivateRoot => (KERNEL, &[], &[]),
        Subject::Machine => (&[], &[], &[]),
    };
    let redirected: &Table = match sockets {
        Sockets::Redirected => REDIRECTED,
        Sockets::Usual | Sockets::HandedOut | Sockets::None => &[],
    };
    let own = kernel.iter().chain(root).chain(shared);
    NETWORK.iter().chain(own).chain(redirected)
}

#[cfg(test)]
mod tests {
    use libc::EAFNOSUPPORT;

    use super::super::Architecture;
    use super::super::simulator::{BOTH, Verdict::*, find, run, usual, verdict, verdict_on};
    use super::*;

    /// All numbers of an architecture that the table has an opinion about.
    fn numbers(architecture: Architecture) -> Vec<u32> {
        denied(Subject::Sandbox, Sockets::Usual)
            .flat_map(|(_, calls)| *calls)
            .filter_map(|call| architecture.number_of(call))
            .collect()
    }

    #[test]
    fn every_call_of_the_table_is_refused_with_its_errno_and_its_neighbours_are_allowed() {
        for architecture in BOTH {
            let listed = numbers(architecture);
            for (denial, calls) in denied(Subject::Sandbox, Sockets::Usual) {
                let Denial::Always(errno) = *denial else {
                    continue;
                };
                for call in *calls {
                    let Some(number) = architecture.number_of(call) else {
                        continue;
                    };
                    for arguments in [[0; 6], [u64::MAX; 6]] {
                        assert_eq!(
                            verdict_on(architecture, number, arguments),
                            Refused(errno),
                            "{} on {architecture:?}",
                            call.name
                        );
                    }
                }
            }
            for number in listed
                .iter()
                .flat_map(|number| [number.saturating_sub(1), number + 1])
            {
                if !listed.contains(&number) {
                    assert_eq!(
                        verdict_on(architecture, number, [u64::MAX; 6]),
                        Allowed,
                        "{number} on {architecture:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn no_number_is_refused_that_the_table_does_not_have() {
        for architecture in BOTH {
            let program = usual(architecture);
            let listed = numbers(architecture);
            for number in 0..512 {
                let run = run(&program, architecture.audit_number(), number, [0; 6]);
                assert!(
                    listed.contains(&number) || run.verdict == Allowed && !run.looked_at_arguments,
                    "{number} on {architecture:?}"
                );
            }
        }
    }

    /// The refused calls once more, and independently of the table: their names as libc knows them,
    /// whose numbers are those of the architecture that this is compiled for.
    macro_rules! assert_refused {
        ($errno:expr; $($name:ident)*) => {$(
            let number = u32::try_from(libc::$name).expect("numbers are small");
            assert_eq!(
                verdict_on(Architecture::COMPILED_FOR, number, [0; 6]),
                Refused($errno),
                stringify!($name)
            );
            let name = stringify!($name).trim_start_matches("SYS_");
            assert_eq!(Architecture::COMPILED_FOR.number_of(find(name)), Some(number), "{name}");
        )*};
    }

    #[test]
    fn what_reaches_into_the_kernel_or_outlives_a_sandbox_is_refused_by_the_number_that_libc_has() {
        assert_refused!(EPERM;
            SYS_mount SYS_umount2 SYS_pivot_root SYS_chroot SYS_open_tree SYS_move_mount SYS_fsopen
            SYS_fsconfig SYS_fsmount SYS_fspick SYS_mount_setattr SYS_setns
            SYS_add_key SYS_request_key SYS_keyctl
            SYS_bpf SYS_perf_event_open SYS_userfaultfd SYS_fanotify_init SYS_open_by_handle_at
            SYS_init_module SYS_finit_module SYS_delete_module SYS_kexec_load
            SYS_reboot SYS_swapon SYS_swapoff SYS_syslog
            SYS_settimeofday SYS_clock_settime SYS_sethostname SYS_setdomainname SYS_acct
            SYS_quotactl SYS_quotactl_fd SYS_vhangup
        );
        assert_refused!(ENOSYS;
            SYS_clone3 SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register SYS_memfd_secret
            SYS_shmget SYS_shmat SYS_shmctl SYS_shmdt SYS_semget SYS_semop SYS_semctl SYS_semtimedop
            SYS_msgget SYS_msgsnd SYS_msgrcv SYS_msgctl SYS_mq_open SYS_mq_unlink
            SYS_nfsservctl SYS_lookup_dcookie SYS_io_setup SYS_sched_setattr
        );
        #[cfg(target_arch = "x86_64")]
        {
            assert_refused!(EPERM; SYS_iopl SYS_ioperm);
            assert_refused!(ENOSYS; SYS_modify_ldt SYS__sysctl SYS_uselib);
        }
        assert_refused!(EAFNOSUPPORT; SYS_socket SYS_socketpair);
        for (name, number) in [
            ("clone", libc::SYS_clone),
            ("unshare", libc::SYS_unshare),
            ("setsockopt", libc::SYS_setsockopt),
            ("sendto", libc::SYS_sendto),
            ("sendmsg", libc::SYS_sendmsg),
            ("sendmmsg", libc::SYS_sendmmsg),
            ("ioctl", libc::SYS_ioctl),
            ("fcntl", libc::SYS_fcntl),
            ("sched_setscheduler", libc::SYS_sched_setscheduler),
            ("seccomp", libc::SYS_seccomp),
            ("prctl", libc::SYS_prctl),
            ("fadvise64", libc::SYS_fadvise64),
        ] {
            let listed = Architecture::COMPILED_FOR.number_of(find(name));
            assert_eq!(listed.map(i64::from), Some(number), "{name}");
        }
        // Those that libc does not have everywhere.
        for (name, x86_64, aarch64, errno) in [
            ("kexec_file_load", 320, 294, EPERM),
            ("open_tree_attr", 467, 467, EPERM),
            ("statmount", 457, 457, ENOSYS),
            ("listmount", 458, 458, ENOSYS),
            ("listns", 470, 470, ENOSYS),
        ] {
            let numbers = BOTH.map(|architecture| architecture.number_of(find(name)));
            assert_eq!(numbers, [Some(x86_64), Some(aarch64)], "{name}");
            assert_eq!(verdict(name, &[]), Refused(errno), "{name}");
        }
    }

    /// Taken from the kernel's headers by name: `asm/unistd_64.h` and asm-generic/unistd.h.
    const LISTED: [(Architecture, &[u32]); 2] = [
        (
            Architecture::X86_64,
            &[
                16, 29, 30, 31, 41, 44, 46, 53, 54, 56, 64, 65, 66, 67, 68, 69, 70, 71, 72, 103,
                134, 144, 153, 154, 155, 156, 157, 160, 161, 163, 164, 165, 166, 167, 168, 169,
                170, 171, 172, 173, 175, 176, 179, 180, 206, 212, 220, 221, 227, 240, 241, 246,
                248, 249, 250, 272, 298, 300, 302, 304, 307, 308, 313, 314, 317, 320, 321, 323,
                425, 426, 427, 428, 429, 430, 431, 432, 433, 435, 442, 443, 444, 447, 457, 458,
                467, 470,
            ],
        ),
        (
            Architecture::Aarch64,
            &[
                0, 18, 25, 29, 39, 40, 41, 42, 51, 58, 60, 89, 97, 104, 105, 106, 112, 116, 119,
                142, 161, 162, 164, 167, 170, 180, 181, 186, 187, 188, 189, 190, 191, 192, 193,
                194, 195, 196, 197, 198, 199, 206, 208, 211, 217, 218, 219, 220, 223, 224, 225,
                241, 261, 262, 265, 268, 269, 273, 274, 277, 280, 282, 294, 425, 426, 427, 428,
                429, 430, 431, 432, 433, 435, 442, 443, 444, 447, 457, 458, 467, 470,
            ],
        ),
    ];

    #[test]
    fn the_tables_numbers_are_those_of_the_kernels_headers() {
        for (architecture, expected) in LISTED {
            let mut listed = numbers(architecture);
            listed.sort_unstable();
            assert_eq!(listed, expected, "{architecture:?}");
        }
    }

    /// What programs live on.
    const EVERYDAY: &[Call] = &[
        call("read", 0, 63),
        call("write", 1, 64),
        x86_64_only("open", 2),
        call("close", 3, 57),
        x86_64_only("stat", 4),
        call("fstat", 5, 80),
        x86_64_only("poll", 7),
        call("lseek", 8, 62),
        call("mmap", 9, 222),
        call("mprotect", 10, 226),
        call("munmap", 11, 215),
        call("brk", 12, 214),
        call("rt_sigaction", 13, 134),
        call("rt_sigprocmask", 14, 135),
        call("rt_sigreturn", 15, 139),
        call("pread64", 17, 67),
        call("writev", 20, 66),
        call("sched_yield", 24, 124),
        call("mremap", 25, 216),
        call("madvise", 28, 233),
        call("dup", 32, 23),
        call("nanosleep", 35, 101),
        call("getpid", 39, 172),
        call("sendfile", 40, 71),
        call("connect", 42, 203),
        call("accept", 43, 202),
        call("recvmsg", 47, 212),
        call("bind", 49, 200),
        call("listen", 50, 201),
        call("getsockopt", 55, 209),
        x86_64_only("fork", 57),
        x86_64_only("vfork", 58),
        call("execve", 59, 221),
        call("exit", 60, 93),
        call("wait4", 61, 260),
        call("kill", 62, 129),
        call("uname", 63, 160),
        call("flock", 73, 32),
        call("fsync", 74, 82),
        call("getcwd", 79, 17),
        call("chdir", 80, 49),
        x86_64_only("rename", 82),
        call("umask", 95, 166),
        call("ptrace", 101, 117),
        call("setuid", 105, 146),
        call("setsid", 112, 157),
        call("sigaltstack", 131, 132),
        call("personality", 135, 92),
        call("mlock", 149, 228),
        x86_64_only("arch_prctl", 158),
        call("adjtimex", 159, 171),
        call("gettid", 186, 178),
        call("futex", 202, 98),
        call("sched_setaffinity", 203, 122),
        x86_64_only("epoll_create", 213),
        call("getdents64", 217, 61),
        call("set_tid_address", 218, 96),
        call("timer_create", 222, 107),
        call("clock_gettime", 228, 113),
        call("exit_group", 231, 94),
        call("epoll_ctl", 233, 21),
        call("tgkill", 234, 131),
        call("mbind", 237, 235),
        call("waitid", 247, 95),
        call("inotify_add_watch", 254, 27),
        call("openat", 257, 56),
        call("mknodat", 259, 33),
        call("newfstatat", 262, 79),
        call("ppoll", 271, 73),
        call("splice", 275, 76),
        call("epoll_pwait", 281, 22),
        call("timerfd_create", 283, 85),
        call("fallocate", 285, 47),
        call("eventfd2", 290, 19),
        call("pipe2", 293, 59),
        call("name_to_handle_at", 303, 264),
        call("process_vm_readv", 310, 270),
        call("kcmp", 312, 272),
        call("renameat2", 316, 276),
        call("getrandom", 318, 278),
        call("memfd_create", 319, 279),
        call("execveat", 322, 281),
        call("membarrier", 324, 283),
        call("copy_file_range", 326, 285),
        call("pkey_alloc", 330, 289),
        call("statx", 332, 291),
        call("rseq", 334, 293),
        x86_64_only("uretprobe", 335),
        call("pidfd_send_signal", 424, 424),
        call("pidfd_open", 434, 434),
        call("close_range", 436, 436),
        call("openat2", 437, 437),
        call("pidfd_getfd", 438, 438),
        call("faccessat2", 439, 439),
        call("epoll_pwait2", 441, 441),
        call("landlock_add_rule", 445, 445),
        call("landlock_restrict_self", 446, 446),
        call("futex_waitv", 449, 449),
        call("cachestat", 451, 451),
        call("fchmodat2", 452, 452),
        call("map_shadow_stack", 453, 453),
        call("futex_wait", 455, 455),
        call("lsm_set_self_attr", 460, 460),
        call("mseal", 462, 462),
        call("setxattrat", 463, 463),
        call("removexattrat", 466, 466),
        call("file_getattr", 468, 468),
        call("file_setattr", 469, 469),
        call("rseq_slice_yield", 471, 471),
    ];

    #[test]
    fn everyday_calls_are_allowed_by_their_number_alone_within_a_dozen_instructions() {
        for architecture in BOTH {
            let program = usual(architecture);
            for call in EVERYDAY {
                let Some(number) = architecture.number_of(call) else {
                    continue;
                };
                let run = run(&program, architecture.audit_number(), number, [u64::MAX; 6]);
                assert_eq!(run.verdict, Allowed, "{} on {architecture:?}", call.name);
                assert!(!run.looked_at_arguments, "{}", call.name);
                assert!(
                    run.instructions <= 12,
                    "{}: {}",
                    call.name,
                    run.instructions
                );
            }
        }
    }
}
