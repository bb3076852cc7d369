//! Copying and comparing memory, without musl's functions for it.
//!
//! musl begins every copy with an instruction for long ones, and compares byte by byte. The copies of a request are
//! short: names, values, pieces of JSON. With these functions `/health` is answered a sixth more often. Other
//! architectures keep musl's functions, of which those for copying are written for short ones too.
//!
//! What moves more than eight bytes is written in assembly: the compiler may turn copies of arrays, and loops, into calls
//! of these very functions.

use std::arch::asm;
use std::ffi::{c_int, c_void};

/// The largest copy that needs no loop: two times four registers.
const SHORT: usize = 128;

/// From this size on the processor's own loop is faster.
const LONG: usize = 1024;

/// Loads the value at the beginning and the one up to the end of `size` bytes, which may overlap, then stores both: so
/// source and target may overlap too.
///
/// # Safety
/// `size` bytes can be read and written there, and are one to two values.
unsafe fn copy_ends<T: Copy>(to: *mut u8, from: *const u8, size: usize) {
    // SAFETY: by the contract both are inside.
    unsafe {
        let end = size - size_of::<T>();
        let first = from.cast::<T>().read_unaligned();
        let last = from.add(end).cast::<T>().read_unaligned();
        to.cast::<T>().write_unaligned(first);
        to.add(end).cast::<T>().write_unaligned(last);
    }
}

/// Copies up to [`SHORT`] bytes, whether they overlap or not.
///
/// # Safety
/// `size` bytes, at most so many, can be read and written there.
unsafe fn copy_short(to: *mut u8, from: *const u8, size: usize) {
    // SAFETY: each size is within the bounds of its branch. The assembly loads as many registers from the beginning as
    // up to the end, and then stores them.
    unsafe {
        match size {
            0 => {}
            1 => to.write(from.read()),
            2..4 => copy_ends::<u16>(to, from, size),
            4..8 => copy_ends::<u32>(to, from, size),
            8..16 => copy_ends::<u64>(to, from, size),
            16..32 => asm!(
                "movups {a}, [{from}]",
                "movups {b}, [{from} + {size} - 16]",
                "movups [{to}], {a}",
                "movups [{to} + {size} - 16], {b}",
                from = in(reg) from, to = in(reg) to, size = in(reg) size,
                a = out(xmm_reg) _, b = out(xmm_reg) _,
                options(nostack, preserves_flags),
            ),
            32..64 => asm!(
                "movups {a}, [{from}]",
                "movups {b}, [{from} + 16]",
                "movups {c}, [{from} + {size} - 32]",
                "movups {d}, [{from} + {size} - 16]",
                "movups [{to}], {a}",
                "movups [{to} + 16], {b}",
                "movups [{to} + {size} - 32], {c}",
                "movups [{to} + {size} - 16], {d}",
                from = in(reg) from, to = in(reg) to, size = in(reg) size,
                a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
                options(nostack, preserves_flags),
            ),
            _ => asm!(
                "movups {a}, [{from}]",
                "movups {b}, [{from} + 16]",
                "movups {c}, [{from} + 32]",
                "movups {d}, [{from} + 48]",
                "movups {e}, [{from} + {size} - 64]",
                "movups {f}, [{from} + {size} - 48]",
                "movups {g}, [{from} + {size} - 32]",
                "movups {h}, [{from} + {size} - 16]",
                "movups [{to}], {a}",
                "movups [{to} + 16], {b}",
                "movups [{to} + 32], {c}",
                "movups [{to} + 48], {d}",
                "movups [{to} + {size} - 64], {e}",
                "movups [{to} + {size} - 48], {f}",
                "movups [{to} + {size} - 32], {g}",
                "movups [{to} + {size} - 16], {h}",
                from = in(reg) from, to = in(reg) to, size = in(reg) size,
                a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
                e = out(xmm_reg) _, f = out(xmm_reg) _, g = out(xmm_reg) _, h = out(xmm_reg) _,
                options(nostack, preserves_flags),
            ),
        }
    }
}

/// Copies from the beginning on: for memory that does not overlap, or whose target is before its source.
///
/// # Safety
/// `size` bytes, more than [`SHORT`], can be read and written there.
unsafe fn copy_up(to: *mut u8, from: *const u8, size: usize) {
    // SAFETY: what the instructions read and write is within `size`, by the number of rounds. The last bytes may be
    // overwritten before the loop gets there, so they are loaded first. The direction flag is clear by the ABI.
    unsafe {
        if size >= LONG {
            asm!(
                "movups {a}, [rsi + {size} - 16]",
                "lea {end}, [rdi + {size} - 16]",
                "rep movsq",
                "movups [{end}], {a}",
                size = in(reg) size, end = out(reg) _, a = out(xmm_reg) _,
                inout("rcx") size / 8 => _, inout("rsi") from => _, inout("rdi") to => _,
                options(nostack, preserves_flags),
            );
            return;
        }
        asm!(
            "movups {e}, [{from} + {size} - 64]",
            "movups {f}, [{from} + {size} - 48]",
            "movups {g}, [{from} + {size} - 32]",
            "movups {h}, [{from} + {size} - 16]",
            "lea {end}, [{to} + {size} - 64]",
            "shr {size}, 6",
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
            "sub {size}, 1",
            "jnz 2b",
            "movups [{end}], {e}",
            "movups [{end} + 16], {f}",
            "movups [{end} + 32], {g}",
            "movups [{end} + 48], {h}",
            from = inout(reg) from => _, to = inout(reg) to => _, size = inout(reg) size => _,
            end = out(reg) _,
            a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
            e = out(xmm_reg) _, f = out(xmm_reg) _, g = out(xmm_reg) _, h = out(xmm_reg) _,
            options(nostack),
        );
    }
}

/// Copies from the end on: for memory whose target is behind its source and overlaps it.
///
/// # Safety
/// As for [`copy_up`].
unsafe fn copy_down(to: *mut u8, from: *const u8, size: usize) {
    // SAFETY: as in `copy_up`, in the other direction.
    unsafe {
        asm!(
            "movups {e}, [{from}]",
            "movups {f}, [{from} + 16]",
            "movups {g}, [{from} + 32]",
            "movups {h}, [{from} + 48]",
            "mov {begin}, {to}",
            "add {from}, {size}",
            "add {to}, {size}",
            "shr {size}, 6",
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
            "sub {size}, 1",
            "jnz 2b",
            "movups [{begin}], {e}",
            "movups [{begin} + 16], {f}",
            "movups [{begin} + 32], {g}",
            "movups [{begin} + 48], {h}",
            from = inout(reg) from => _, to = inout(reg) to => _, size = inout(reg) size => _,
            begin = out(reg) _,
            a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
            e = out(xmm_reg) _, f = out(xmm_reg) _, g = out(xmm_reg) _, h = out(xmm_reg) _,
            options(nostack),
        );
    }
}

/// memcpy(3).
///
/// # Safety
/// `size` bytes can be read at `from` and written at `to`, and do not overlap.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut c_void, from: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: by the contract.
    unsafe {
        if size <= SHORT {
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
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut c_void, from: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: by the contract. The difference wraps where the target is before the source.
    unsafe {
        if size <= SHORT {
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
#[inline]
unsafe fn ordered(from: *const u8) -> u64 {
    // SAFETY: by the contract.
    u64::from_be(unsafe { from.cast::<u64>().read_unaligned() })
}

/// memcmp(3): negative, 0 or positive, by the first byte that differs.
///
/// # Safety
/// `size` bytes can be read at both.
#[unsafe(no_mangle)]
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
#[unsafe(no_mangle)]
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
