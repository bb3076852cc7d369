//! The system calls that are denied to commands: three tables, and a small compiler that makes
//! a seccomp filter of them (seccomp(2), Documentation/userspace-api/seccomp_filter.rst).
//!
//! Landlock guards the file system and the network, and the uid guards other users' processes. The tables
//! deny what neither covers. [`calls::KERNEL`] has calls that reach deep into the kernel and that no ordinary program
//! makes, and calls that make objects which outlive the sandbox; [`calls::SHARED_IPC`] has more of those, which sandboxes
//! with namespaces may make. [`calls::CHANGE_OF_ROOT`] is denied to all but those with a root of their own, which hold
//! capabilities in a user namespace that owns nothing. [`calls::NETWORK`] has sockets that Landlock's rules do not see, and what bypasses those rules.
//! Commands of a sandbox get all; a command of a dedicated machine whose network is confined gets the last only. They
//! are deny-lists, because ordinary programs must never notice them: every other call is allowed, including those that future
//! kernels add.
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
//! - personality, prctl and seccomp except for filters, `arch_prctl`, `lsm_set_self_attr`, mseal, pkeys,
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
//! [`calls`] has the tables, [`checks`] decides by arguments, and [`assembler`] writes the instructions; here they become
//! one program. The child attaches it, in `sys`.

mod assembler;
mod calls;
mod checks;
#[cfg(test)]
mod simulator;

use std::ops::RangeInclusive;

use libc::{ENOSYS, SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS, sock_filter};

use crate::codec::sort::sort_by;
use assembler::{Assembler, CALL_ARCHITECTURE, CALL_NUMBER, IF_EQUAL, Label};
use calls::{Call, denied};

/// Whose commands a filter is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// A sandbox's.
    Sandbox,
    /// Those of a sandbox with namespaces, which has System V IPC and message queues of its own.
    Namespaces,
    /// Those of a sandbox with a root of its own, whose root may change the root of a process.
    PrivateRoot,
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

/// The filter for the architecture that this program is compiled for.
pub fn program(subject: Subject, sockets: Sockets) -> Vec<sock_filter> {
    compile(Architecture::COMPILED_FOR, subject, sockets)
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

#[cfg(test)]
mod tests {
    use super::assembler::RETURN;
    use super::simulator::{ALL, BOTH, Verdict::*, run, usual, verdict_on};
    use super::*;

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
    fn the_program_is_for_this_machine_and_every_jump_stays_in_it() {
        for (subject, sockets) in ALL {
            let own = program(subject, sockets);
            assert_eq!(own, compile(Architecture::COMPILED_FOR, subject, sockets));
            for program in BOTH.map(|architecture| compile(architecture, subject, sockets)) {
                // Far below the kernel's 4096 (BPF_MAXINSNS): it is checked and translated at each start
                // of a command.
                assert!(program.len() < 200, "{}", program.len());
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
