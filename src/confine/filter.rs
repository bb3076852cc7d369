//! The system calls that are denied to commands: three tables, and a small compiler that makes
//! a seccomp filter of them (seccomp(2), Documentation/userspace-api/seccomp_filter.rst).
//!
//! Landlock guards the file system and the network, and the uid guards other users' processes. The tables
//! deny what neither covers. [`KERNEL`] has calls that reach deep into the kernel and that no ordinary program
//! makes, and calls that make objects which outlive the sandbox; [`SHARED_IPC`] has more of those, which sandboxes
//! with namespaces may make. [`NETWORK`] has sockets that Landlock's rules do not see, and what bypasses those rules.
//! Commands of a sandbox get all; a command of a dedicated machine whose network is confined gets the last only. They are deny-lists, because ordinary programs must never notice
//! them: every other call is allowed, also those that future kernels add.
//!
//! The errno is one that programs handle: `EPERM` where only privileged programs would succeed, `ENOSYS`
//! where programs support older kernels and have a fallback, `EAFNOSUPPORT`, `EPROTONOSUPPORT` and, for
//! [`libc::TCP_ULP`], `ENOENT` as from a kernel without the protocol, `EINVAL` and `ENOPROTOOPT` as from one without
//! filters of calls and of sockets.
//!
//! Allowed on purpose:
//! - ptrace, `process_vm_*`, `process_madvise`, `pidfd_getfd`, kcmp, signals, nice values and memory
//!   policy: the kernel requires the same uid, and debuggers need them;
//! - adjtimex, `clock_adjtime`: without a capability they only read;
//! - personality, prctl and seccomp except for filters, `arch_prctl`, Landlock, `lsm_set_self_attr`, mseal, pkeys,
//!   shadow stacks: they affect only the caller;
//! - `file_setattr`, xattrs, `name_to_handle_at`, inotify: they need access to the path;
//! - sysfs(2), ustat: harmless; `create_module` and the like: no supported kernel has them.
//!
//! The program decides by the call's number wherever it can, with comparisons only. Since Linux 5.11 the
//! kernel evaluates such a program for every number when it is attached, and never again for the calls
//! that it allows (`seccomp_cache_prepare` in kernel/seccomp.c). So ordinary calls cost next to nothing,
//! and a command pays for the attaching. Numbers are merged into ranges with one answer, and a binary
//! search over their boundaries takes about seven comparisons; a linear search makes a program that takes
//! ten times as long to attach. Only clone, unshare, prctl, seccomp, socket, socketpair, setsockopt, sendto, sendmsg,
//! sendmmsg, fcntl, ioctl and `sched_setscheduler` have their arguments checked.
//!
//! This module makes the program; the child attaches it, in `sys`.

use std::ops::RangeInclusive;

use libc::{
    EAFNOSUPPORT, EINVAL, ENETUNREACH, ENOENT, ENOPROTOOPT, ENOSYS, EOPNOTSUPP, EPERM,
    EPROTONOSUPPORT, ESOCKTNOSUPPORT, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO,
    SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_USER_NOTIF, c_int, sock_filter,
};

use crate::codec::sort::sort_by;

/// A system call and its number on each architecture that has it.
struct Call {
    /// For tests, and for whoever reads the tables: the kernel knows numbers only.
    #[cfg(test)]
    name: &'static str,
    x86_64: Option<u32>,
    aarch64: Option<u32>,
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

/// When a call is denied, and with which errno.
#[derive(Clone, Copy)]
enum Denial {
    /// Always, with this errno.
    Always(c_int),
    /// `EPERM` if one of the [`DENIED_CLONE_FLAGS`] is set.
    CloneFlags,
    /// `EPERM` for everything but [`UNSHARABLE`].
    Unsharing,
    /// All sockets but those that [`Assembler::socket_check`] allows, by [`Sockets`].
    UnusualSockets,
    /// `ENOPROTOOPT` for [`PORT_RANGE`] of `IPPROTO_IP`, `ENOENT` for [`libc::TCP_ULP`] of `IPPROTO_TCP`. Success without
    /// effect for [`libc::SO_LINGER`], [`libc::TCP_USER_TIMEOUT`] and, where the server answers look-ups,
    /// [`libc::IP_RECVERR`]. In sandboxes `ENOPROTOOPT` for the [`SOCKET_FILTERS`] of `SOL_SOCKET`.
    SocketOptions,
    /// Not denied but left to the server, which answers the call.
    Left,
    /// `EOPNOTSUPP` if the argument with this number, of flags, has `MSG_FASTOPEN`.
    FastOpen(u32),
    /// `EPERM` if the second argument, an `int`, is one of these commands.
    Commands(&'static [c_int]),
    /// `EINVAL` if the first arguments, of which there are at most two, are these.
    Mode(&'static [c_int]),
}

/// Whose commands a filter is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// A sandbox's.
    Sandbox,
    /// Those of a sandbox with namespaces, which has System V IPC and message queues of its own.
    Namespaces,
    /// Those of a dedicated machine, of which the network alone is confined.
    Machine,
}

/// The internet sockets that can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sockets {
    /// Those that other rules cover.
    Usual,
    /// TCP over IPv4, made by the server, to which the calls are left. Whatever else is asked for does not exist.
    HandedOut,
    /// The same, and the server connects them. Datagrams of IPv4 are made by it too, for look-ups of names.
    Redirected,
    /// None. The errno of IPv4 is the one that programs report as an unreachable network; without IPv6 they try
    /// IPv4.
    None,
}

/// How each list of calls is denied.
type Table = [(Denial, &'static [Call])];

/// What would bypass the rules for the network. Numbers from 424 on are the same everywhere.
const NETWORK: &Table = &[
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
const KERNEL: &Table = &[
    // Mounts belong to the machine.
    (
        Denial::Always(EPERM),
        &[
            call("mount", 165, 40),
            call("umount2", 166, 39),
            call("pivot_root", 155, 41),
            call("chroot", 161, 51),
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
    (
        Denial::Commands(&[libc::F_SETPIPE_SZ]),
        &[call("fcntl", 72, 25)],
    ),
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

/// What is denied besides where sandboxes share their IPC objects.
const SHARED_IPC: &Table = &[
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

/// The flags of clone(2) that are denied: those for namespaces, and `CLONE_PARENT`, which would make the
/// new process a child of the server. `CLONE_NEWTIME` is not among them: its bit is part of the exit
/// signal.
const DENIED_CLONE_FLAGS: u32 = (libc::CLONE_PARENT
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET)
    .cast_unsigned();

/// The flags of unshare(2) that make no namespace. An allow-list, unlike that of clone: new flags of
/// unshare take bits that have another meaning in clone (`CLONE_NEWTIME`; `UNSHARE_EMPTY_MNTNS` since
/// Linux 7.1), and ordinary programs use no others.
const UNSHARABLE: u32 = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM)
    .cast_unsigned();

/// ioctls that type into a terminal (`TIOCSTI`, `TIOCLINUX`) or set a line discipline (`TIOCSETD`), which
/// makes drivers of modems and buses reachable from any pseudoterminal. asm-generic/ioctls.h, which
/// both architectures use.
const TERMINAL_COMMANDS: [c_int; 3] = [0x5412, 0x541c, 0x5423];

/// The modes of seccomp(2) and of prctl(2) that attach a filter, which libc has as unsigned.
const SECCOMP_SET_MODE_FILTER: c_int = libc::SECCOMP_SET_MODE_FILTER.cast_signed();
const SECCOMP_MODE_FILTER: c_int = libc::SECCOMP_MODE_FILTER.cast_signed();

/// The options that attach a filter to a socket of any family: it takes the same memory as those of calls.
const SOCKET_FILTERS: [c_int; 4] = [
    libc::SO_ATTACH_FILTER,
    libc::SO_ATTACH_BPF,
    libc::SO_ATTACH_REUSEPORT_CBPF,
    libc::SO_ATTACH_REUSEPORT_EBPF,
];

/// `IP_LOCAL_PORT_RANGE` of linux/in.h, since Linux 6.3. The kernel takes it for IPv6 sockets too.
const PORT_RANGE: c_int = 51;

/// `SOCK_TYPE_MASK` of linux/net.h: above it are `SOCK_NONBLOCK` and `SOCK_CLOEXEC`.
const SOCKET_TYPE: u32 = 0xf;

/// The allowed protocols of internet sockets: the default of the type (`IPPROTO_IP`), TCP, UDP and echo
/// requests. Landlock's rules for TCP do not cover connections of other protocols (MPTCP, SMC, SCTP,
/// DCCP).
const INTERNET_PROTOCOLS: [c_int; 5] = [
    libc::IPPROTO_IP,
    libc::IPPROTO_TCP,
    libc::IPPROTO_UDP,
    libc::IPPROTO_ICMP,
    libc::IPPROTO_ICMPV6,
];

/// The filter for the architecture that this program is compiled for.
pub fn program(subject: Subject, sockets: Sockets) -> Vec<sock_filter> {
    compile(Architecture::COMPILED_FOR, subject, sockets)
}

/// The lists of calls that are denied to a subject, or left to the server.
fn denied(
    subject: Subject,
    sockets: Sockets,
) -> impl Iterator<Item = &'static (Denial, &'static [Call])> {
    let (kernel, shared): (&Table, &Table) = match subject {
        Subject::Sandbox => (KERNEL, SHARED_IPC),
        Subject::Namespaces => (KERNEL, &[]),
        Subject::Machine => (&[], &[]),
    };
    let redirected: &Table = match sockets {
        Sockets::Redirected => REDIRECTED,
        Sockets::Usual | Sockets::HandedOut | Sockets::None => &[],
    };
    NETWORK.iter().chain(kernel).chain(shared).chain(redirected)
}

/// An architecture that the table has numbers for. Both are little-endian; big-endian ARM has another
/// audit number and is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Architecture {
    X86_64,
    Aarch64,
}

impl Architecture {
    const COMPILED_FOR: Self = if cfg!(target_arch = "x86_64") {
        Self::X86_64
    } else if cfg!(target_arch = "aarch64") {
        Self::Aarch64
    } else {
        panic!("the table has no numbers for this architecture")
    };

    /// Its `AUDIT_ARCH_*` (linux/audit.h).
    fn audit_number(self) -> u32 {
        match self {
            Self::X86_64 => 0xc000_003e,
            Self::Aarch64 => 0xc000_00b7,
        }
    }

    fn number_of(self, call: &Call) -> Option<u32> {
        match self {
            Self::X86_64 => call.x86_64,
            Self::Aarch64 => call.aarch64,
        }
    }

    /// Further numbers of the same calls, which would bypass the table: x32 has the audit number of
    /// x86-64 and bit 30 set in the call's number, and kernels before 5.4 also accept its own calls (512
    /// to 547) without the bit. Denied with `ENOSYS`, as most kernels do, which are built without x32.
    fn aliases(self) -> &'static [RangeInclusive<u32>] {
        match self {
            Self::X86_64 => &[512..=547, 0x4000_0000..=u32::MAX],
            Self::Aarch64 => &[],
        }
    }
}

/// The numbers of calls, and the code that answers them.
type DeniedRange = (RangeInclusive<u32>, Label);

fn compile(architecture: Architecture, subject: Subject, sockets: Sockets) -> Vec<sock_filter> {
    let mut program = Assembler::default();
    let allow = program.answer(SECCOMP_RET_ALLOW);
    let kill = program.answer(SECCOMP_RET_KILL_PROCESS);
    let mut entries = Vec::new();
    for (denial, calls) in denied(subject, sockets) {
        let target = program.denial(*denial, subject, sockets, allow);
        entries.extend(calls.iter().filter_map(|call| {
            let number = architecture.number_of(call)?;
            Some((number..=number, target))
        }));
    }
    let missing = program.errno(ENOSYS);
    let aliases = architecture.aliases().iter().cloned();
    entries.extend(aliases.map(|numbers| (numbers, missing)));
    let by_number = program.search(&runs(entries, allow));
    let by_number = program.load(CALL_NUMBER, by_number);
    // First the architecture, which gives the numbers their meaning. Code of another one (32-bit code on
    // a 64-bit kernel) is killed: any errno could lead it astray.
    let start = program.branch(IF_EQUAL, architecture.audit_number(), by_number, kill);
    program.load(CALL_ARCHITECTURE, start);
    program.finish()
}

/// All numbers as ranges with one target each: the first number of each, ascending from 0.
fn runs(mut entries: Vec<DeniedRange>, otherwise: Label) -> Vec<(u32, Label)> {
    sort_by(&mut entries, |(one, _), (other, _)| {
        one.start().cmp(other.start())
    });
    let mut runs = Vec::new();
    let mut next = 0;
    for (numbers, target) in entries {
        let first = *numbers.start();
        debug_assert!(next <= first, "two calls have the number {first}");
        if next < first {
            runs.push((next, otherwise));
        }
        runs.push((first, target));
        next = numbers.end().saturating_add(1);
    }
    if next < u32::MAX {
        runs.push((next, otherwise));
    }
    runs.dedup_by_key(|(_, target)| *target);
    runs
}

// Classic BPF: linux/filter.h, Documentation/networking/filter.rst. The kernel's evaluation of all
// numbers (see above) understands no other instructions.
const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
const MASK: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;
const IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
const IF_AT_LEAST: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
const IF_ANY_BIT: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

// Offsets in `struct seccomp_data`, in bytes.
const CALL_NUMBER: u32 = 0;
const CALL_ARCHITECTURE: u32 = 4;

/// The offset of the lower half of an argument: all that the kernel reads of an `int`.
const fn low_word(argument: u32) -> u32 {
    16 + 8 * argument
}

/// The offset of the upper half.
const fn high_word(argument: u32) -> u32 {
    low_word(argument) + 4
}

/// A jump target: the number of instructions from it to the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Label(usize);

/// Writes a program from its end to its start: BPF jumps only forward, so every target exists before the
/// jump to it.
#[derive(Default)]
struct Assembler {
    reversed: Vec<sock_filter>,
}

impl Assembler {
    /// Returns a value to the kernel. The program has one instruction for each value.
    fn answer(&mut self, value: u32) -> Label {
        let same = |instruction: &sock_filter| {
            u32::from(instruction.code) == RETURN && instruction.k == value
        };
        match self.reversed.iter().position(same) {
            Some(index) => Label(index + 1),
            None => self.push(RETURN, value, 0, 0),
        }
    }

    fn errno(&mut self, errno: c_int) -> Label {
        self.answer(SECCOMP_RET_ERRNO | errno.cast_unsigned())
    }

    /// Loads a word of `struct seccomp_data` and continues with `next`, which was written last.
    fn load(&mut self, offset: u32, next: Label) -> Label {
        debug_assert_eq!(next.0, self.reversed.len());
        self.push(LOAD, offset, 0, 0)
    }

    /// Masks the loaded word and continues with `next`, which was written last.
    fn mask(&mut self, bits: u32, next: Label) -> Label {
        debug_assert_eq!(next.0, self.reversed.len());
        self.push(MASK, bits, 0, 0)
    }

    fn branch(&mut self, test: u32, operand: u32, yes: Label, no: Label) -> Label {
        let distance = |target: Label| {
            u8::try_from(self.reversed.len() - target.0)
                .expect("the program is shorter than a jump reaches")
        };
        let (yes, no) = (distance(yes), distance(no));
        self.push(test, operand, yes, no)
    }

    /// Jumps by whether the loaded word is one of the values.
    fn any_of(&mut self, values: &[c_int], yes: Label, no: Label) -> Label {
        values.iter().rev().fold(no, |no, value| {
            self.branch(IF_EQUAL, value.cast_unsigned(), yes, no)
        })
    }

    /// Jumps to the target of the range that contains the loaded word.
    fn search(&mut self, runs: &[(u32, Label)]) -> Label {
        if let [(_, target)] = runs {
            return *target;
        }
        let (below, above) = runs.split_at(runs.len() / 2);
        let yes = self.search(above);
        let no = self.search(below);
        self.branch(IF_AT_LEAST, above[0].0, yes, no)
    }

    fn denial(
        &mut self,
        denial: Denial,
        subject: Subject,
        sockets: Sockets,
        allow: Label,
    ) -> Label {
        match denial {
            Denial::Always(errno) => self.errno(errno),
            Denial::CloneFlags => {
                // The kernel reads the lower half only. The upper one may not be zero: an `int` with its
                // highest bit set (`CLONE_IO`) is sign-extended.
                let refuse = self.errno(EPERM);
                let flags = self.branch(IF_ANY_BIT, DENIED_CLONE_FLAGS, refuse, allow);
                self.load(low_word(0), flags)
            }
            Denial::Unsharing => {
                // The kernel reads all 64 bits and has no flags in the upper half.
                let refuse = self.errno(EPERM);
                let lower = self.branch(IF_ANY_BIT, !UNSHARABLE, refuse, allow);
                let lower = self.load(low_word(0), lower);
                let upper = self.branch(IF_EQUAL, 0, lower, refuse);
                self.load(high_word(0), upper)
            }
            Denial::UnusualSockets => self.socket_check(sockets, allow),
            Denial::Left => self.answer(SECCOMP_RET_USER_NOTIF),
            Denial::SocketOptions => {
                // The kernel reads the level and the option as `int`.
                let refuse = self.errno(ENOPROTOOPT);
                let pretend = self.errno(0);
                let filters: &[c_int] = match subject {
                    Subject::Sandbox | Subject::Namespaces => &SOCKET_FILTERS,
                    Subject::Machine => &[],
                };
                let of_socket = self.any_of(filters, refuse, allow);
                let of_socket = self.any_of(&[libc::SO_LINGER], pretend, of_socket);
                let of_socket = self.load(low_word(2), of_socket);
                let other = if sockets == Sockets::Redirected {
                    // glibc sets it for look-ups, and gives up without it. Unix sockets do not have it.
                    self.any_of(&[libc::IP_RECVERR], pretend, allow)
                } else {
                    allow
                };
                let option = self.any_of(&[PORT_RANGE], refuse, other);
                let option = self.load(low_word(2), option);
                let no_protocol = self.errno(ENOENT);
                let of_tcp = self.any_of(&[libc::TCP_USER_TIMEOUT], pretend, allow);
                let of_tcp = self.any_of(&[libc::TCP_ULP], no_protocol, of_tcp);
                let of_tcp = self.load(low_word(2), of_tcp);
                let level = self.any_of(&[libc::SOL_SOCKET], of_socket, allow);
                let level = self.any_of(&[libc::IPPROTO_TCP], of_tcp, level);
                let level = self.any_of(&[libc::IPPROTO_IP], option, level);
                self.load(low_word(1), level)
            }
            Denial::FastOpen(argument) => {
                // The kernel reads an `unsigned int`.
                let refuse = self.errno(EOPNOTSUPP);
                let fast_open = libc::MSG_FASTOPEN.cast_unsigned();
                let flags = self.branch(IF_ANY_BIT, fast_open, refuse, allow);
                self.load(low_word(argument), flags)
            }
            Denial::Commands(commands) => {
                // The kernel reads an `unsigned int`.
                let refuse = self.errno(EPERM);
                let command = self.any_of(commands, refuse, allow);
                self.load(low_word(1), command)
            }
            Denial::Mode(words) => {
                // The kernel reads an `int`, except for prctl's mode, whose upper half has to be zero.
                let refuse = self.errno(EINVAL);
                let words = [0, 1].into_iter().zip(words);
                words.rev().fold(refuse, |yes, (argument, word)| {
                    let word = self.any_of(&[*word], yes, allow);
                    self.load(low_word(argument), word)
                })
            }
        }
    }

    /// Allows Unix sockets of every type, `NETLINK_ROUTE`, which C libraries use to list network interfaces, and
    /// internet sockets by [`Sockets`]. All three arguments are an `int`.
    fn socket_check(&mut self, sockets: Sockets, allow: Label) -> Label {
        let no_family = self.errno(EAFNOSUPPORT);
        let no_protocol = self.errno(EPROTONOSUPPORT);

        let netlink = self.any_of(&[libc::NETLINK_ROUTE], allow, no_protocol);
        let netlink = self.load(low_word(2), netlink);
        let [ipv4, ipv6] = match sockets {
            Sockets::Usual => [self.usual_internet_sockets(allow); 2],
            Sockets::HandedOut | Sockets::Redirected => {
                let datagrams = sockets == Sockets::Redirected;
                [self.handed_out_sockets(datagrams), no_family]
            }
            Sockets::None => [self.errno(ENETUNREACH), no_family],
        };

        let family = self.any_of(&[libc::AF_NETLINK], netlink, no_family);
        let family = self.any_of(&[libc::AF_INET6], ipv6, family);
        let family = self.any_of(&[libc::AF_INET], ipv4, family);
        let family = self.any_of(&[libc::AF_UNIX], allow, family);
        self.load(low_word(0), family)
    }

    /// Leaves TCP to the server, and perhaps UDP. All three arguments are in registers, so that it sees what is checked
    /// here.
    fn handed_out_sockets(&mut self, datagrams: bool) -> Label {
        let leave = self.answer(SECCOMP_RET_USER_NOTIF);
        let refuse = self.errno(ENETUNREACH);
        let of_type = |program: &mut Self, protocol| {
            let protocol = program.any_of(&[libc::IPPROTO_IP, protocol], leave, refuse);
            program.load(low_word(2), protocol)
        };
        let datagram = if datagrams {
            of_type(self, libc::IPPROTO_UDP)
        } else {
            refuse
        };
        let stream = of_type(self, libc::IPPROTO_TCP);
        let kind = self.any_of(&[libc::SOCK_DGRAM], datagram, refuse);
        let kind = self.any_of(&[libc::SOCK_STREAM], stream, kind);
        let kind = self.mask(SOCKET_TYPE, kind);
        self.load(low_word(1), kind)
    }

    /// Allows streams and datagrams of the [`INTERNET_PROTOCOLS`].
    fn usual_internet_sockets(&mut self, allow: Label) -> Label {
        let no_type = self.errno(ESOCKTNOSUPPORT);
        let no_protocol = self.errno(EPROTONOSUPPORT);
        let refuse = self.errno(EPERM);
        let protocol = self.any_of(&INTERNET_PROTOCOLS, allow, no_protocol);
        let protocol = self.load(low_word(2), protocol);
        let unusual = self.any_of(&[libc::SOCK_RAW], refuse, no_type);
        let internet = self.any_of(&[libc::SOCK_STREAM, libc::SOCK_DGRAM], protocol, unusual);
        let internet = self.mask(SOCKET_TYPE, internet);
        self.load(low_word(1), internet)
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "libc's constants are wider than the field that they are for"
    )]
    fn push(&mut self, code: u32, k: u32, jt: u8, jf: u8) -> Label {
        let code = code as u16;
        self.reversed.push(sock_filter { code, jt, jf, k });
        Label(self.reversed.len())
    }

    fn finish(self) -> Vec<sock_filter> {
        self.reversed.into_iter().rev().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: [Architecture; 2] = [Architecture::X86_64, Architecture::Aarch64];

    const ALL: [(Subject, Sockets); 12] = [
        (Subject::Namespaces, Sockets::Redirected),
        (Subject::Sandbox, Sockets::Redirected),
        (Subject::Machine, Sockets::Redirected),
        (Subject::Namespaces, Sockets::Usual),
        (Subject::Namespaces, Sockets::None),
        (Subject::Namespaces, Sockets::HandedOut),
        (Subject::Sandbox, Sockets::Usual),
        (Subject::Sandbox, Sockets::HandedOut),
        (Subject::Sandbox, Sockets::None),
        (Subject::Machine, Sockets::Usual),
        (Subject::Machine, Sockets::HandedOut),
        (Subject::Machine, Sockets::None),
    ];

    /// What a caller may leave in the half of a register that the kernel does not look at.
    const HIGH_GARBAGE: u64 = 0xdead_beef_0000_0000;

    #[derive(Debug, PartialEq, Eq)]
    enum Verdict {
        Allowed,
        Left,
        Refused(c_int),
        Killed,
    }
    use Verdict::{Allowed, Killed, Left, Refused};

    /// How the kernel comes to its verdict.
    struct Run {
        verdict: Verdict,
        instructions: usize,
        looked_at_arguments: bool,
    }

    /// Runs a program as the kernel does; panics where the kernel would refuse to attach it, or could
    /// not tell beforehand that a number is always allowed.
    fn run(program: &[sock_filter], audit_number: u32, number: u32, arguments: [u64; 6]) -> Run {
        // struct seccomp_data; the instruction pointer, which nothing reads, is not zero.
        let mut data = Vec::new();
        data.extend(number.to_le_bytes());
        data.extend(audit_number.to_le_bytes());
        data.extend(0x1234_5678_9abc_def0_u64.to_le_bytes());
        data.extend(arguments.iter().flat_map(|argument| argument.to_le_bytes()));
        assert_eq!(data.len(), size_of::<libc::seccomp_data>());

        let mut accumulator = None;
        let mut position = 0;
        let mut looked_at_arguments = false;
        let mut instructions = 0;
        // Ends: jumps only go forward.
        loop {
            let instruction = &program[position];
            instructions += 1;
            let operand = instruction.k;
            let word = || accumulator.expect("something is loaded before it is used");
            let mut jump = |condition: bool| {
                position += usize::from(if condition {
                    instruction.jt
                } else {
                    instruction.jf
                });
            };
            match u32::from(instruction.code) {
                LOAD => {
                    let at = operand as usize;
                    assert_eq!(at % 4, 0, "words are aligned");
                    looked_at_arguments |= at >= 16;
                    let bytes = data[at..at + 4].try_into().expect("four bytes");
                    accumulator = Some(u32::from_le_bytes(bytes));
                }
                MASK => accumulator = Some(word() & operand),
                IF_EQUAL => jump(word() == operand),
                IF_AT_LEAST => jump(word() >= operand),
                IF_ANY_BIT => jump(word() & operand != 0),
                RETURN => {
                    let verdict = match operand {
                        SECCOMP_RET_ALLOW => Allowed,
                        SECCOMP_RET_USER_NOTIF => Left,
                        SECCOMP_RET_KILL_PROCESS => Killed,
                        other => {
                            assert_eq!(other & 0xffff_0000, SECCOMP_RET_ERRNO);
                            Refused((other & 0xffff).cast_signed())
                        }
                    };
                    return Run {
                        verdict,
                        instructions,
                        looked_at_arguments,
                    };
                }
                other => panic!("an instruction that is not expected here: {other:#x}"),
            }
            position += 1;
        }
    }

    /// The filter of a sandbox with an open network.
    fn usual(architecture: Architecture) -> Vec<sock_filter> {
        compile(architecture, Subject::Sandbox, Sockets::Usual)
    }

    fn verdict_on(architecture: Architecture, number: u32, arguments: [u64; 6]) -> Verdict {
        let program = usual(architecture);
        run(&program, architecture.audit_number(), number, arguments).verdict
    }

    fn find(name: &str) -> &'static Call {
        denied(Subject::Sandbox, Sockets::Usual)
            .flat_map(|(_, calls)| *calls)
            .find(|call| call.name == name)
            .unwrap_or_else(|| panic!("{name} is not in the table"))
    }

    /// The verdict on a call of the table, which has to be the same everywhere.
    fn verdict(name: &str, arguments: &[u64]) -> Verdict {
        let mut all = [HIGH_GARBAGE | 0x7777_7777; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        let [one, other] = BOTH.map(|architecture| {
            let number = architecture.number_of(find(name)).expect("both have it");
            verdict_on(architecture, number, all)
        });
        assert_eq!(one, other, "{name}");
        one
    }

    fn int(value: c_int) -> u64 {
        u64::from(value.cast_unsigned())
    }

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
                134, 144, 153, 154, 155, 156, 157, 161, 163, 164, 165, 166, 167, 168, 169, 170,
                171, 172, 173, 175, 176, 179, 180, 206, 212, 220, 227, 240, 241, 246, 248, 249,
                250, 272, 298, 300, 304, 307, 308, 313, 314, 317, 320, 321, 323, 425, 426, 427,
                428, 429, 430, 431, 432, 433, 435, 442, 443, 447, 457, 458, 467, 470,
            ],
        ),
        (
            Architecture::Aarch64,
            &[
                0, 18, 25, 29, 39, 40, 41, 42, 51, 58, 60, 89, 97, 104, 105, 106, 112, 116, 119,
                142, 161, 162, 167, 170, 180, 181, 186, 187, 188, 189, 190, 191, 192, 193, 194,
                195, 196, 197, 198, 199, 206, 208, 211, 217, 218, 219, 220, 224, 225, 241, 262,
                265, 268, 269, 273, 274, 277, 280, 282, 294, 425, 426, 427, 428, 429, 430, 431,
                432, 433, 435, 442, 443, 447, 457, 458, 467, 470,
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

    #[test]
    fn code_for_another_architecture_is_killed_whatever_it_calls() {
        let i386 = 0x4000_0003;
        let arm = 0x4000_0028;
        let big_endian_arm64 = 0x8000_00b7;
        for architecture in BOTH {
            let program = usual(architecture);
            for other in BOTH
                .map(Architecture::audit_number)
                .into_iter()
                .chain([i386, arm, big_endian_arm64, 0, u32::MAX])
                .filter(|other| *other != architecture.audit_number())
            {
                for number in (0..600).chain([0x4000_0000, u32::MAX]) {
                    assert_eq!(run(&program, other, number, [0; 6]).verdict, Killed);
                }
            }
        }
    }

    #[test]
    fn x32_has_no_calls() {
        let x32 = 0x4000_0000;
        for number in (512..=547)
            .chain((0..600).map(|number| x32 | number))
            .chain([0x7fff_ffff, 0x8000_0000, u32::MAX])
        {
            assert_eq!(
                verdict_on(Architecture::X86_64, number, [0; 6]),
                Refused(ENOSYS),
                "{number:#x}"
            );
        }
        for number in [511, 548, x32 - 1] {
            assert_eq!(verdict_on(Architecture::X86_64, number, [0; 6]), Allowed);
        }
        // Where there is no x32 these are numbers like others.
        for number in [512, 547, x32, u32::MAX] {
            assert_eq!(verdict_on(Architecture::Aarch64, number, [0; 6]), Allowed);
        }
    }

    #[test]
    fn a_child_gets_no_namespace_of_its_own_and_no_other_parent() {
        let thread = libc::CLONE_VM
            | libc::CLONE_FS
            | libc::CLONE_FILES
            | libc::CLONE_SIGHAND
            | libc::CLONE_THREAD
            | libc::CLONE_SYSVSEM
            | libc::CLONE_SETTLS
            | libc::CLONE_PARENT_SETTID
            | libc::CLONE_CHILD_CLEARTID;
        let fork = libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID | libc::SIGCHLD;
        let spawn = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
        let other = libc::CLONE_PTRACE | libc::CLONE_IO | libc::CLONE_UNTRACED;
        for flags in [0, thread, fork, spawn, other, 0xff] {
            assert_eq!(verdict("clone", &[int(flags)]), Allowed, "{flags:#x}");
            assert_eq!(verdict("clone", &[HIGH_GARBAGE | int(flags)]), Allowed);
            for denied in [
                libc::CLONE_PARENT,
                libc::CLONE_NEWNS,
                libc::CLONE_NEWCGROUP,
                libc::CLONE_NEWUTS,
                libc::CLONE_NEWIPC,
                libc::CLONE_NEWUSER,
                libc::CLONE_NEWPID,
                libc::CLONE_NEWNET,
            ] {
                let flags = int(flags | denied);
                assert_eq!(verdict("clone", &[flags]), Refused(EPERM), "{flags:#x}");
                assert_eq!(verdict("clone", &[HIGH_GARBAGE | flags]), Refused(EPERM));
            }
        }
        // Only the first argument has flags.
        assert_eq!(
            verdict("clone", &[0, u64::MAX, u64::MAX, u64::MAX]),
            Allowed
        );
    }

    #[test]
    fn a_process_can_stop_sharing_but_not_leave_its_namespaces() {
        let sharing = [
            libc::CLONE_VM,
            libc::CLONE_FS,
            libc::CLONE_FILES,
            libc::CLONE_SIGHAND,
            libc::CLONE_THREAD,
            libc::CLONE_SYSVSEM,
        ];
        let all = sharing.into_iter().fold(0, |all, flag| all | flag);
        assert_eq!(verdict("unshare", &[0]), Allowed);
        assert_eq!(verdict("unshare", &[int(all)]), Allowed);
        for bit in 0..64 {
            let flag = 1u64 << bit;
            let expected = if sharing.map(int).contains(&flag) {
                Allowed
            } else {
                Refused(EPERM)
            };
            assert_eq!(verdict("unshare", &[flag]), expected, "{flag:#x}");
            assert_eq!(verdict("unshare", &[int(all) | flag]), expected);
        }
        assert_eq!(verdict("unshare", &[u64::MAX]), Refused(EPERM));
    }

    #[test]
    fn only_sockets_that_other_rules_cover_can_be_made() {
        let raw = libc::SOCK_RAW;
        let (stream, datagram, packets) =
            (libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_SEQPACKET);
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let mut cases = vec![
            (libc::AF_UNIX, stream, 0, Allowed),
            (libc::AF_UNIX, datagram, 0, Allowed),
            (libc::AF_UNIX, packets, 0, Allowed),
            (libc::AF_UNIX, raw, 1, Allowed),
            (libc::AF_NETLINK, raw, libc::NETLINK_ROUTE, Allowed),
            (libc::AF_NETLINK, datagram, libc::NETLINK_ROUTE, Allowed),
        ];
        for family in [libc::AF_INET, libc::AF_INET6] {
            for protocol in [0, libc::IPPROTO_TCP] {
                cases.push((family, stream, protocol, Allowed));
            }
            for protocol in [
                0,
                libc::IPPROTO_UDP,
                libc::IPPROTO_ICMP,
                libc::IPPROTO_ICMPV6,
            ] {
                cases.push((family, datagram, protocol, Allowed));
            }
            // DCCP, RSVP, SCTP, UDP-Lite, SMC, MPTCP, raw, and what there is not.
            for protocol in [33, 46, 132, 136, 256, 262, 255, -1, 2, 5, 7, 16, 18, 57, 59] {
                for kind in [stream, datagram] {
                    cases.push((family, kind, protocol, Refused(EPROTONOSUPPORT)));
                }
            }
            for protocol in [0, libc::IPPROTO_TCP, libc::IPPROTO_ICMP] {
                cases.push((family, raw, protocol, Refused(EPERM)));
                // Reliable datagrams, SCTP's and DCCP's, the old way to packets, and what there is not.
                for kind in [0, 4, packets, 6, 7, 8, 9, 10, 15] {
                    cases.push((family, kind, protocol, Refused(ESOCKTNOSUPPORT)));
                }
            }
        }
        for protocol in (1..=22).chain([-1]) {
            cases.push((libc::AF_NETLINK, raw, protocol, Refused(EPROTONOSUPPORT)));
        }
        for family in (-1..=64).filter(|family| {
            ![
                libc::AF_UNIX,
                libc::AF_INET,
                libc::AF_INET6,
                libc::AF_NETLINK,
            ]
            .contains(family)
        }) {
            cases.push((family, stream, 0, Refused(EAFNOSUPPORT)));
        }
        for (family, kind, protocol, expected) in cases {
            // Flags that there are, and one that the kernel is left to complain about.
            for kind in [kind, kind | flags, kind | 0x10] {
                let arguments = [family, kind, protocol].map(int);
                for arguments in [arguments, arguments.map(|word| HIGH_GARBAGE | word)] {
                    for name in ["socket", "socketpair"] {
                        assert_eq!(
                            verdict(name, &arguments),
                            expected,
                            "{name} {family} {kind:#x} {protocol}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_blocked_network_has_sockets_of_the_machine_only() {
        for (architecture, subject) in BOTH.into_iter().flat_map(|architecture| {
            [Subject::Sandbox, Subject::Namespaces, Subject::Machine]
                .map(|subject| (architecture, subject))
        }) {
            let program = compile(architecture, subject, Sockets::None);
            let verdict = |name: &str, arguments: [u64; 6]| {
                let number = architecture.number_of(find(name)).expect("both have it");
                run(&program, architecture.audit_number(), number, arguments).verdict
            };
            for (family, kind, protocol) in
                (-1..=64).flat_map(|family| (0..=15).map(move |kind| (family, kind, kind % 3)))
            {
                let expected = match family {
                    libc::AF_UNIX => Allowed,
                    libc::AF_INET => Refused(ENETUNREACH),
                    libc::AF_NETLINK if protocol == libc::NETLINK_ROUTE => Allowed,
                    libc::AF_NETLINK => Refused(EPROTONOSUPPORT),
                    _ => Refused(EAFNOSUPPORT),
                };
                for upper in [0, HIGH_GARBAGE] {
                    let [family, kind, protocol] =
                        [family, kind, protocol].map(|word| upper | int(word));
                    for name in ["socket", "socketpair"] {
                        let arguments = [family, kind, protocol, 7, 7, 7];
                        assert_eq!(verdict(name, arguments), expected, "{name} {family:#x}");
                    }
                }
            }
            // What bypasses the rules is refused as ever.
            let fast_open = int(libc::MSG_FASTOPEN);
            assert_eq!(verdict("sendto", [fast_open; 6]), Refused(EOPNOTSUPP));
            assert_eq!(verdict("io_uring_setup", [0; 6]), Refused(ENOSYS));
            // The rest is denied to sandboxes only.
            let rest = match subject {
                Subject::Sandbox | Subject::Namespaces => Refused(EPERM),
                Subject::Machine => Allowed,
            };
            assert_eq!(verdict("mount", [0; 6]), rest);
            let shared = match subject {
                Subject::Sandbox => Refused(ENOSYS),
                Subject::Namespaces | Subject::Machine => Allowed,
            };
            for name in ["shmget", "semop", "msgrcv", "mq_open", "mq_unlink"] {
                assert_eq!(verdict(name, [0; 6]), shared, "{name}");
            }
            let other = run(&program, 0x4000_0003, 5, [0; 6]);
            assert_eq!(other.verdict, Killed);
        }
    }

    #[test]
    fn what_leads_a_connection_is_left_to_the_server() {
        let datagram = int(libc::SOCK_DGRAM | libc::SOCK_CLOEXEC);
        let (stream, udp, tcp) = (
            int(libc::SOCK_STREAM),
            int(libc::IPPROTO_UDP),
            int(libc::IPPROTO_TCP),
        );
        let (ipv4, ipv6) = (int(libc::AF_INET), int(libc::AF_INET6));
        let cases: [(Sockets, &str, [u64; 3], Verdict); 17] = [
            (Sockets::Redirected, "connect", [0; 3], Left),
            (Sockets::Redirected, "listen", [u64::MAX; 3], Left),
            (Sockets::HandedOut, "connect", [0; 3], Allowed),
            (Sockets::HandedOut, "listen", [0; 3], Allowed),
            (Sockets::Redirected, "socket", [ipv4, stream, 0], Left),
            (Sockets::Redirected, "socket", [ipv4, stream, tcp], Left),
            (Sockets::Redirected, "socket", [ipv4, datagram, 0], Left),
            (Sockets::Redirected, "socket", [ipv4, datagram, udp], Left),
            (
                Sockets::HandedOut,
                "socket",
                [ipv4, datagram, udp],
                Refused(ENETUNREACH),
            ),
            (
                Sockets::Redirected,
                "socket",
                [ipv4, datagram, tcp],
                Refused(ENETUNREACH),
            ),
            (
                Sockets::Redirected,
                "socket",
                [ipv4, stream, udp],
                Refused(ENETUNREACH),
            ),
            (
                Sockets::Redirected,
                "socket",
                [ipv6, stream, tcp],
                Refused(EAFNOSUPPORT),
            ),
            (
                Sockets::Redirected,
                "setsockopt",
                [3, 6, 31],
                Refused(ENOENT),
            ),
            // IP_RECVERR, which Unix sockets do not have.
            (Sockets::Redirected, "setsockopt", [3, 0, 11], Refused(0)),
            (Sockets::Redirected, "setsockopt", [3, 1, 11], Allowed),
            (Sockets::HandedOut, "setsockopt", [3, 0, 11], Allowed),
            (
                Sockets::Redirected,
                "setsockopt",
                [3, 0, 51],
                Refused(ENOPROTOOPT),
            ),
        ];
        for architecture in BOTH {
            for (sockets, name, [a, b, c], expected) in &cases {
                let program = compile(architecture, Subject::Sandbox, *sockets);
                let call = denied(Subject::Sandbox, Sockets::Redirected)
                    .flat_map(|(_, calls)| *calls)
                    .find(|call| call.name == *name);
                let number = architecture.number_of(call.unwrap()).expect("both have it");
                let arguments = [*a, *b, *c, 7, 7, 7];
                let run = run(&program, architecture.audit_number(), number, arguments);
                assert_eq!(run.verdict, *expected, "{sockets:?} {name} {a} {b} {c}");
            }
        }
    }

    #[test]
    fn a_socket_gets_no_port_range_of_its_own() {
        for upper in [0, HIGH_GARBAGE] {
            let option =
                |level: u64, name: u64| verdict("setsockopt", &[3, upper | level, upper | name]);
            assert_eq!(option(0, 51), Refused(ENOPROTOOPT));
            for (level, name) in [(0, 50), (0, 52), (6, 51), (41, 51), (51, 0)] {
                assert_eq!(option(level, name), Allowed, "{level} {name}");
            }
        }
    }

    #[test]
    fn no_socket_lingers() {
        let option = |level: u64, name: u64| {
            verdict(
                "setsockopt",
                &[3, HIGH_GARBAGE | level, HIGH_GARBAGE | name],
            )
        };
        assert_eq!(option(1, 13), Refused(0));
        assert_eq!(option(6, 18), Refused(0));
        for (level, name) in [
            (6, 17),
            (6, 19),
            (0, 18),
            (1, 18),
            (1, 12),
            (1, 14),
            (0, 13),
            (6, 13),
            (41, 13),
            (13, 1),
        ] {
            assert_eq!(option(level, name), Allowed, "{level} {name}");
        }
        assert_eq!((libc::SOL_SOCKET, libc::SO_LINGER), (1, 13));
        assert_eq!((libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT), (6, 18));
    }

    /// The arguments of a call that attaches a filter, and how that is refused.
    const ATTACHING: [(&str, [u64; 3], c_int); 6] = [
        ("seccomp", [1, 0, 0x7777], EINVAL),
        ("prctl", [22, 2, 0x7777], EINVAL),
        ("setsockopt", [3, 1, 26], ENOPROTOOPT),
        ("setsockopt", [3, 1, 50], ENOPROTOOPT),
        ("setsockopt", [3, 1, 51], ENOPROTOOPT),
        ("setsockopt", [3, 1, 52], ENOPROTOOPT),
    ];

    #[test]
    fn a_sandbox_attaches_no_filter() {
        for upper in [0, HIGH_GARBAGE, u64::MAX << 32] {
            for (name, arguments, errno) in ATTACHING {
                let arguments = arguments.map(|word| upper | word);
                assert_eq!(verdict(name, &arguments), Refused(errno), "{name}");
            }
            // The strict mode, what the kernel has, and what there is not.
            for operation in [0, 2, 3, 4, u64::from(u32::MAX)] {
                assert_eq!(verdict("seccomp", &[upper | operation, 1]), Allowed);
            }
            // The strict mode, reading the mode, and other options with an operand of 2.
            for arguments in [[22, 0], [22, 1], [22, 3], [21, 2], [23, 2], [1, 2], [2, 22]] {
                let arguments = arguments.map(|word| upper | word);
                assert_eq!(verdict("prctl", &arguments), Allowed, "{arguments:?}");
            }
            // Detaching and locking, neighbours, and the same numbers of other levels.
            for (level, option) in [(1, 27), (1, 44), (1, 68), (1, 25), (1, 49), (1, 53)]
                .into_iter()
                .chain([0, 6, 17, 41].map(|level| (level, 26)))
                .chain([6, 17, 41].map(|level| (level, 50)))
            {
                let arguments = [3, upper | level, upper | option];
                assert_eq!(verdict("setsockopt", &arguments), Allowed, "{arguments:?}");
            }
        }
        for (architecture, (subject, sockets)) in BOTH
            .into_iter()
            .flat_map(|architecture| ALL.map(|kind| (architecture, kind)))
        {
            let program = compile(architecture, subject, sockets);
            for (name, [a, b, c], errno) in ATTACHING {
                let number = architecture.number_of(find(name)).unwrap();
                let arguments = [a, b, c, 7, 7, 7];
                let run = run(&program, architecture.audit_number(), number, arguments);
                let expected = match subject {
                    Subject::Sandbox | Subject::Namespaces => Refused(errno),
                    // Nobody else needs the memory.
                    Subject::Machine => Allowed,
                };
                assert_eq!(run.verdict, expected, "{name} {subject:?} {sockets:?}");
            }
        }
    }

    #[test]
    fn a_tcp_socket_stays_one() {
        for upper in [0, HIGH_GARBAGE] {
            let option =
                |level: u64, name: u64| verdict("setsockopt", &[3, upper | level, upper | name]);
            assert_eq!(option(6, 31), Refused(ENOENT));
            for (level, name) in [(6, 30), (6, 32), (0, 31), (1, 31), (41, 31), (31, 6)] {
                assert_eq!(option(level, name), Allowed, "{level} {name}");
            }
        }
        assert_eq!((libc::IPPROTO_TCP, libc::TCP_ULP), (6, 31));
        for (architecture, (subject, sockets)) in BOTH
            .into_iter()
            .flat_map(|architecture| ALL.map(|kind| (architecture, kind)))
        {
            let program = compile(architecture, subject, sockets);
            let number = architecture.number_of(find("setsockopt")).unwrap();
            let arguments = [3, 6, 31, 7, 7, 7];
            let run = run(&program, architecture.audit_number(), number, arguments);
            assert_eq!(run.verdict, Refused(ENOENT), "{subject:?} {sockets:?}");
        }
    }

    #[test]
    fn no_connection_is_opened_with_its_first_data() {
        for (name, at) in [("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)] {
            for upper in [0, HIGH_GARBAGE] {
                for bit in 0..32 {
                    let mut arguments = [u64::MAX; 4];
                    arguments[at] = upper | 1 << bit;
                    let expected = if bit == 29 {
                        Refused(EOPNOTSUPP)
                    } else {
                        Allowed
                    };
                    assert_eq!(verdict(name, &arguments), expected, "{name} {bit}");
                }
            }
        }
        assert_eq!(libc::MSG_FASTOPEN, 1 << 29);
    }

    #[test]
    fn nothing_is_typed_into_a_terminal_and_no_line_discipline_is_loaded() {
        for command in [0x5412, 0x541c, 0x5423] {
            for upper in [0, HIGH_GARBAGE, u64::MAX << 32] {
                assert_eq!(verdict("ioctl", &[0, upper | command]), Refused(EPERM));
            }
            for neighbour in [command - 1, command + 1, command | 0x8000_0000] {
                assert_eq!(verdict("ioctl", &[0, neighbour]), Allowed);
            }
            // Only the second argument is the command.
            assert_eq!(verdict("ioctl", &[command, 0x5413, command]), Allowed);
        }
        for upper in [0, HIGH_GARBAGE] {
            let grow = upper | u64::try_from(libc::F_SETPIPE_SZ).unwrap();
            assert_eq!(verdict("fcntl", &[1, grow, 1 << 20]), Refused(EPERM));
            assert_eq!(verdict("fcntl", &[1, grow + 1]), Allowed);
            assert_eq!(verdict("fcntl", &[1, grow - 1]), Allowed);
        }
        assert_eq!(TERMINAL_COMMANDS[0], libc::TIOCSTI as c_int);
        assert_eq!(TERMINAL_COMMANDS[1], libc::TIOCLINUX as c_int);
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
        call("prlimit64", 302, 261),
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
        call("landlock_create_ruleset", 444, 444),
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

    #[test]
    fn the_program_is_for_this_machine_and_every_jump_stays_in_it() {
        for (subject, sockets) in ALL {
            let own = program(subject, sockets);
            assert_eq!(own, compile(Architecture::COMPILED_FOR, subject, sockets));
            for program in BOTH.map(|architecture| compile(architecture, subject, sockets)) {
                // Far below the kernel's 4096 (BPF_MAXINSNS): it is checked and translated at each start
                // of a command.
                assert!(program.len() < 170, "{}", program.len());
                for (position, instruction) in program.iter().enumerate() {
                    let furthest = usize::from(instruction.jt.max(instruction.jf));
                    assert!(position + furthest < program.len());
                }
                let last = program.last().expect("not empty");
                assert_eq!(u32::from(last.code), RETURN);
            }
        }
    }
}
