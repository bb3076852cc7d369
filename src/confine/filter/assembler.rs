//! Writes programs of classic BPF (linux/filter.h, Documentation/networking/filter.rst); knows no system call.

use libc::{SECCOMP_RET_ERRNO, c_int, sock_filter};

// The kernel's evaluation of all numbers, which the parent module describes, understands no other instructions.
pub(super) const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
pub(super) const MASK: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;
pub(super) const IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
pub(super) const IF_AT_LEAST: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
pub(super) const IF_ANY_BIT: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
pub(super) const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

// Offsets in `struct seccomp_data`, in bytes.
pub(super) const CALL_NUMBER: u32 = 0;
pub(super) const CALL_ARCHITECTURE: u32 = 4;

/// The offset of the lower half of an argument: all that the kernel reads of an `int`.
pub(super) const fn low_word(argument: u32) -> u32 {
    16 + 8 * argument
}

/// The offset of the upper half.
pub(super) const fn high_word(argument: u32) -> u32 {
    low_word(argument) + 4
}

/// A jump target: the number of instructions from it to the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Label(usize);

/// Writes a program from its end to its start: BPF jumps only forward, so every target exists before the
/// jump to it.
#[derive(Default)]
pub(super) struct Assembler {
    reversed: Vec<sock_filter>,
}

impl Assembler {
    /// Returns a value to the kernel. The program has one instruction for each value.
    pub(super) fn answer(&mut self, value: u32) -> Label {
        let same = |instruction: &sock_filter| {
            u32::from(instruction.code) == RETURN && instruction.k == value
        };
        match self.reversed.iter().position(same) {
            Some(index) => Label(index + 1),
            None => self.push(RETURN, value, 0, 0),
        }
    }

    pub(super) fn errno(&mut self, errno: c_int) -> Label {
        self.answer(SECCOMP_RET_ERRNO | errno.cast_unsigned())
    }

    /// Loads a word of `struct seccomp_data` and continues with `next`, which was written last.
    pub(super) fn load(&mut self, offset: u32, next: Label) -> Label {
        debug_assert_eq!(next.0, self.reversed.len());
        self.push(LOAD, offset, 0, 0)
    }

    /// Masks the loaded word and continues with `next`, which was written last.
    pub(super) fn mask(&mut self, bits: u32, next: Label) -> Label {
        debug_assert_eq!(next.0, self.reversed.len());
        self.push(MASK, bits, 0, 0)
    }

    pub(super) fn branch(&mut self, test: u32, operand: u32, yes: Label, no: Label) -> Label {
        let distance = |target: Label| {
            u8::try_from(self.reversed.len() - target.0)
                .expect("the program is shorter than a jump reaches")
        };
        let (yes, no) = (distance(yes), distance(no));
        self.push(test, operand, yes, no)
    }

    /// Jumps by whether the loaded word is one of the values.
    pub(super) fn any_of(&mut self, values: &[c_int], yes: Label, no: Label) -> Label {
        values.iter().rev().fold(no, |no, value| {
            self.branch(IF_EQUAL, value.cast_unsigned(), yes, no)
        })
    }

    /// Jumps to the target of the range that contains the loaded word.
    pub(super) fn search(&mut self, runs: &[(u32, Label)]) -> Label {
        if let [(_, target)] = runs {
            return *target;
        }
        let (below, above) = runs.split_at(runs.len() / 2);
        let yes = self.search(above);
        let no = self.search(below);
        self.branch(IF_AT_LEAST, above[0].0, yes, no)
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

    pub(super) fn finish(self) -> Vec<sock_filter> {
        self.reversed.into_iter().rev().collect()
    }
}
