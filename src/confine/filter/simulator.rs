//! Runs a filter as the kernel does, for tests.

use libc::{
    SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_USER_NOTIF, c_int,
    sock_filter,
};

use super::assembler::{IF_ANY_BIT, IF_AT_LEAST, IF_EQUAL, LOAD, MASK, RETURN};
use super::calls::{Call, denied};
use super::{Architecture, Sockets, Subject, compile};

pub(super) const BOTH: [Architecture; 2] = [Architecture::X86_64, Architecture::Aarch64];

pub(super) const ALL: [(Subject, Sockets); 16] = [
    (Subject::PrivateRoot, Sockets::Redirected),
    (Subject::PrivateRoot, Sockets::Usual),
    (Subject::PrivateRoot, Sockets::None),
    (Subject::PrivateRoot, Sockets::HandedOut),
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
pub(super) const HIGH_GARBAGE: u64 = 0xdead_beef_0000_0000;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Allowed,
    Left,
    Refused(c_int),
    Killed,
}
use Verdict::{Allowed, Killed, Left, Refused};

/// How the kernel comes to its verdict.
pub(super) struct Run {
    pub(super) verdict: Verdict,
    pub(super) instructions: usize,
    pub(super) looked_at_arguments: bool,
}

/// Runs a program as the kernel does; panics where the kernel would refuse to attach it, or could
/// not tell beforehand that a number is always allowed.
pub(super) fn run(
    program: &[sock_filter],
    audit_number: u32,
    number: u32,
    arguments: [u64; 6],
) -> Run {
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
pub(super) fn usual(architecture: Architecture) -> Vec<sock_filter> {
    compile(architecture, Subject::Sandbox, Sockets::Usual)
}

pub(super) fn verdict_on(architecture: Architecture, number: u32, arguments: [u64; 6]) -> Verdict {
    let program = usual(architecture);
    run(&program, architecture.audit_number(), number, arguments).verdict
}

pub(super) fn find(name: &str) -> &'static Call {
    denied(Subject::Sandbox, Sockets::Usual)
        .flat_map(|(_, calls)| *calls)
        .find(|call| call.name == name)
        .unwrap_or_else(|| panic!("{name} is not in the table"))
}

/// The verdict on a call of the table, which has to be the same everywhere.
pub(super) fn verdict(name: &str, arguments: &[u64]) -> Verdict {
    let mut all = [HIGH_GARBAGE | 0x7777_7777; 6];
    all[..arguments.len()].copy_from_slice(arguments);
    let [one, other] = BOTH.map(|architecture| {
        let number = architecture.number_of(find(name)).expect("both have it");
        verdict_on(architecture, number, all)
    });
    assert_eq!(one, other, "{name}");
    one
}

pub(super) fn int(value: c_int) -> u64 {
    u64::from(value.cast_unsigned())
}
