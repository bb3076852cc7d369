//! Copying and comparing memory, without musl's functions for it.
//!
//! musl begins every copy with an instruction for long ones, and compares byte by byte. The copies of a request are
//! short: names, values, pieces of JSON. Other architectures keep musl's functions, of which those for copying are
//! written for short ones too.

#![allow(
    clippy::inline_always,
    reason = "a call in between would take longer than what these do"
)]

use std::arch::asm;
use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_storeu_si128};
use std::ffi::{c_int, c_void};

/// What one register holds.
const WORD: usize = size_of::<__m128i>();

/// What a loop copies at once.
const BLOCK: usize = 4 * WORD;

/// From this size on the processor's own loop is faster.
const LONG: usize = 2048;

/// Loads `N` values from the beginning and as many up to the end of `size` bytes, which may overlap, then stores all
/// of them: so source and target may overlap too.
///
/// # Safety
/// `size` bytes can be read and written there, and are at least `N` values and at most twice as many.
#[inline(always)]
unsafe fn copy_ends<T: Copy, const N: usize>(to: *mut u8, from: *const u8, size: usize) {
    // SAFETY: by the contract all of these are inside.
    unsafe {
        let end = size - N * size_of::<T>();
        let first = from.cast::<[T; N]>().read_unaligned();
        let last = from.add(end).cast::<[T; N]>().read_unaligned();
        to.cast::<[T; N]>().write_unaligned(first);
        to.add(end).cast::<[T; N]>().write_unaligned(last);
    }
}

/// A block in registers.
#[derive(Clone, Copy)]
struct Block([__m128i; 4]);

impl Block {
    /// # Safety
    /// A block can be read there.
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: by the contract; the instruction needs no alignment.
        Self([0, 1, 2, 3].map(|at| unsafe { _mm_loadu_si128(from.add(at * WORD).cast()) }))
    }

    /// # Safety
    /// A block can be written there.
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        for (at, word) in self.0.into_iter().enumerate() {
            // SAFETY: by the contract; the instruction needs no alignment.
            unsafe { _mm_storeu_si128(to.add(at * WORD).cast(), word) };
        }
    }
}

/// Copies up to two blocks, whether they overlap or not.
///
/// # Safety
/// `size` bytes, at most two blocks, can be read and written there.
#[inline(always)]
unsafe fn copy_short(to: *mut u8, from: *const u8, size: usize) {
    // SAFETY: each size is within the bounds of its branch.
    unsafe {
        match size {
            0 => {}
            1 => to.write(from.read()),
            2..4 => copy_ends::<u16, 1>(to, from, size),
            4..8 => copy_ends::<u32, 1>(to, from, size),
            8..16 => copy_ends::<u64, 1>(to, from, size),
            16..32 => copy_ends::<__m128i, 1>(to, from, size),
            32..64 => copy_ends::<__m128i, 2>(to, from, size),
            _ => {
                let (first, last) = (Block::load(from), Block::load(from.add(size - BLOCK)));
                first.store(to);
                last.store(to.add(size - BLOCK));
            }
        }
    }
}

/// Copies from the beginning on: for memory that does not overlap, or whose target is before its source.
///
/// # Safety
/// `size` bytes, more than two blocks, can be read and written there.
unsafe fn copy_up(to: *mut u8, from: *const u8, size: usize) {
    // SAFETY: what the instructions read and write is within `size`, by the number of rounds. The compiler would make
    // a call of memcpy(3) from a loop. The end may be overwritten before the loop gets there, so it is loaded first.
    unsafe {
        let last = Block::load(from.add(size - BLOCK));
        if size >= LONG {
            asm!(
                "rep movsq",
                inout("rcx") size / 8 => _, inout("rsi") from => _, inout("rdi") to => _,
                options(nostack, preserves_flags),
            );
        } else {
            asm!(
                "2:",
                "movups {a}, [{from}]",
                "movups {b}, [{from} + 16]",
                "movups {c}, [{from} + 32]",
                "movups {d}, [{from} + 48]",
                "movups [{to}], {a}",
                "movups [{to} + 16], {b}",
                "movups [{to} + 32], {c}",
                "movups [{to} + 48], {d}",
                "add {from}, 64",
                "add {to}, 64",
                "sub {rounds}, 1",
                "jnz 2b",
                from = inout(reg) from => _, to = inout(reg) to => _,
                rounds = inout(reg) size / BLOCK => _,
                a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
                options(nostack),
            );
        }
        last.store(to.add(size - BLOCK));
    }
}

/// Copies from the end on: for memory whose target is behind its source and overlaps it.
///
/// # Safety
/// As for [`copy_up`].
unsafe fn copy_down(to: *mut u8, from: *const u8, size: usize) {
    // SAFETY: as in `copy_up`, in the other direction.
    unsafe {
        let first = Block::load(from);
        asm!(
            "2:",
            "movups {a}, [{from} - 16]",
            "movups {b}, [{from} - 32]",
            "movups {c}, [{from} - 48]",
            "movups {d}, [{from} - 64]",
            "movups [{to} - 16], {a}",
            "movups [{to} - 32], {b}",
            "movups [{to} - 48], {c}",
            "movups [{to} - 64], {d}",
            "sub {from}, 64",
            "sub {to}, 64",
            "sub {rounds}, 1",
            "jnz 2b",
            from = inout(reg) from.add(size) => _, to = inout(reg) to.add(size) => _,
            rounds = inout(reg) size / BLOCK => _,
            a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
            options(nostack),
        );
        first.store(to);
    }
}

/// memcpy(3).
///
/// # Safety
/// `size` bytes can be read at `from` and written at `to`, and do not overlap.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn memcpy(to: *mut c_void, from: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: by the contract.
    unsafe {
        if size <= 2 * BLOCK {
            copy_short(to.cast(), from.cast(), size);
        } else {
            copy_up(to.cast(), from.cast(), size);
        }
    }
    to
}

/// memmove(3).
///
/// # Safety
/// `size` bytes can be read at `from` and written at `to`.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn memmove(to: *mut c_void, from: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: by the contract. The difference wraps where the target is before the source.
    unsafe {
        if size <= 2 * BLOCK {
            copy_short(to.cast(), from.cast(), size);
        } else if to.addr().wrapping_sub(from.addr()) >= size {
            copy_up(to.cast(), from.cast(), size);
        } else {
            copy_down(to.cast(), from.cast(), size);
        }
    }
    to
}

/// Eight bytes as a number whose order is theirs.
///
/// # Safety
/// They can be read there.
#[inline(always)]
unsafe fn ordered(from: *const u8) -> u64 {
    // SAFETY: by the contract.
    u64::from_be(unsafe { from.cast::<u64>().read_unaligned() })
}

/// memcmp(3): negative, 0 or positive, by the first byte that differs.
///
/// # Safety
/// `size` bytes can be read at both.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn memcmp(one: *const c_void, other: *const c_void, size: usize) -> c_int {
    let (one, other) = (one.cast::<u8>(), other.cast::<u8>());
    // SAFETY: what is read is within `size`.
    unsafe {
        if size < 8 {
            for at in 0..size {
                let (one, other) = (one.add(at).read(), other.add(at).read());
                if one != other {
                    return c_int::from(one) - c_int::from(other);
                }
            }
            return 0;
        }
        // The last eight bytes may have some of those before.
        let mut at = 0;
        loop {
            let (mine, theirs) = (ordered(one.add(at)), ordered(other.add(at)));
            if mine != theirs {
                return mine.cmp(&theirs) as c_int;
            }
            if at == size - 8 {
                return 0;
            }
            at = (at + 8).min(size - 8);
        }
    }
}

/// bcmp(3): 0 if the bytes are the same.
///
/// # Safety
/// As for [`memcmp`].
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn bcmp(one: *const c_void, other: *const c_void, size: usize) -> c_int {
    // SAFETY: by the contract.
    unsafe { memcmp(one, other, size) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every size up to some blocks, and sizes about where another way begins.
    fn sizes() -> impl Iterator<Item = usize> {
        (0..400).chain(LONG - 70..LONG + 70).chain([5000, 65_536])
    }

    fn numbered(size: usize) -> Vec<u8> {
        (0..size)
            .map(|at| (at * 7 + at / 251).to_le_bytes()[0])
            .collect()
    }

    #[test]
    fn a_copy_is_whole_and_touches_nothing_else() {
        for size in sizes() {
            for [from_at, to_at] in [[0, 0], [1, 0], [0, 3], [5, 13], [15, 1]] {
                let from = numbered(from_at + size);
                let mut to = vec![0xaa; to_at + size + 16];
                // SAFETY: both have `size` bytes from there on.
                let result = unsafe {
                    let to = to.as_mut_ptr().add(to_at).cast();
                    memcpy(to, from.as_ptr().add(from_at).cast(), size) == to
                };
                assert!(result);
                assert_eq!(to[to_at..to_at + size], from[from_at..], "{size}");
                let mut around = to[..to_at].iter().chain(&to[to_at + size..]);
                assert!(around.all(|byte| *byte == 0xaa), "{size}");
            }
        }
    }

    #[test]
    fn memory_moves_over_itself() {
        for size in sizes() {
            for distance in [1, 7, 8, 16, 31, 63, 64, 65, 130, 1000] {
                for [from_at, to_at] in [[0, distance], [distance, 0]] {
                    let mut memory = numbered(size + distance);
                    let expected = memory[from_at..from_at + size].to_vec();
                    let base = memory.as_mut_ptr();
                    // SAFETY: both ranges are in the vector.
                    unsafe { memmove(base.add(to_at).cast(), base.add(from_at).cast(), size) };
                    assert_eq!(
                        memory[to_at..to_at + size],
                        expected,
                        "{size} by {distance}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_first_byte_that_differs_decides() {
        let compare = |one: &[u8], other: &[u8]| {
            let size = one.len();
            // SAFETY: both are as long.
            let results = unsafe {
                let (one, other) = (one.as_ptr().cast(), other.as_ptr().cast());
                (memcmp(one, other, size), bcmp(one, other, size))
            };
            assert_eq!(results.0 == 0, results.1 == 0);
            results.0.signum()
        };
        for size in 0..70 {
            let one = numbered(size);
            assert_eq!(compare(&one, &one), 0);
            for at in 0..size {
                let mut other = one.clone();
                other[at] = other[at].wrapping_add(128);
                // What comes later says the opposite.
                other[at + 1..].iter_mut().for_each(|byte| *byte = !*byte);
                let expected = one[at].cmp(&other[at]) as c_int;
                assert_eq!(compare(&one, &other), expected, "{size}, {at}");
                assert_eq!(compare(&other, &one), -expected, "{size}, {at}");
            }
        }
    }
}
