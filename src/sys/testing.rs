//! What only tests need: hiding system calls, racing renames, and counting coverage.

use std::ffi::CStr;

use nix::errno::Errno;

/// Exchanges two names atomically (rename(2), `RENAME_EXCHANGE`).
///
/// # Errors
/// As rename(2).
pub fn exchange_names(one: &CStr, other: &CStr) -> Result<(), Errno> {
    // SAFETY: both C strings outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_renameat2,
            libc::AT_FDCWD,
            one.as_ptr(),
            libc::AT_FDCWD,
            other.as_ptr(),
            libc::RENAME_EXCHANGE,
        )
    };
    Errno::result(result).map(drop)
}

/// Makes a system call fail with `errno` on this thread for good, as on a kernel without it or in a
/// container whose filter refuses it (seccomp(2)).
///
/// # Errors
/// As seccomp(2).
pub fn hide_system_call(number: libc::c_long, errno: Errno) -> Result<(), Errno> {
    let statement = |code: u32, k: u32, jt: u8| libc::sock_filter {
        code: u16::try_from(code).unwrap_or(u16::MAX),
        jt,
        jf: 0,
        k,
    };
    let number = u32::try_from(number).map_err(|_| Errno::EINVAL)?;
    let mut filter = [
        // The first word of struct seccomp_data is the number.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, number, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
        statement(
            libc::BPF_RET | libc::BPF_K,
            libc::SECCOMP_RET_ERRNO | errno as u32,
            0,
        ),
    ];
    let program = libc::sock_fprog {
        len: 4,
        filter: filter.as_mut_ptr(),
    };
    nix::sys::prctl::set_no_new_privs()?;
    // SAFETY: the program and its filter outlive the call, which copies them.
    let result = unsafe {
        let mode = libc::SECCOMP_SET_MODE_FILTER;
        libc::syscall(libc::SYS_seccomp, mode, 0, &raw const program)
    };
    Errno::result(result).map(drop)
}

/// The execution counts of the program's regions (`-C instrument-coverage`).
#[cfg(guided)]
pub fn execution_counters() -> &'static [std::sync::atomic::AtomicU64] {
    unsafe extern "C" {
        // From LLVM's profiling runtime (compiler-rt, InstrProfiling.h).
        fn __llvm_profile_begin_counters() -> *mut u64;
        fn __llvm_profile_end_counters() -> *mut u64;
    }
    // SAFETY: the two bound a section that holds only counters. They are aligned, live as long as the
    // program, and are read and written as whole words.
    unsafe {
        let (begin, end) = (
            __llvm_profile_begin_counters(),
            __llvm_profile_end_counters(),
        );
        std::slice::from_raw_parts(begin.cast(), (end.addr() - begin.addr()) / size_of::<u64>())
    }
}
