//! Which signals the server ignores or handles, and their default effect for children.
//!
//! The raw system call: a C library refuses to tell about the signals that it reserves for itself.

use std::ffi::{c_int, c_long, c_void};
use std::ptr;
use std::sync::LazyLock;

/// `struct sigaction` of the raw system call on both targets: arm64 has the restorer too, though it
/// uses none.
#[repr(C)]
struct KernelSigaction {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

impl KernelSigaction {
    const DEFAULT: Self = Self {
        handler: libc::SIG_DFL,
        flags: 0,
        restorer: 0,
        mask: 0,
    };
}

/// The signals that the server ignores or handles. A child would inherit the ignored ones through
/// execve, and until then a handler would run on the server's memory, where the child's user can
/// trigger it.
///
/// Found with the first command rather than at the start, because it takes 64 system calls.
pub(super) fn changed_signals() -> &'static [c_int] {
    static CHANGED: LazyLock<Vec<c_int>> = LazyLock::new(|| {
        let is_changed =
            |signal: &c_int| handler(*signal).is_some_and(|handler| handler != libc::SIG_DFL);
        (1..=64).filter(is_changed).collect()
    });
    &CHANGED
}

/// What this process does on a signal: `SIG_DFL`, `SIG_IGN` or a handler.
fn handler(signal: c_int) -> Option<usize> {
    let mut action = KernelSigaction::DEFAULT;
    // SAFETY: the kernel fills `action` and changes nothing.
    let result = unsafe { sigaction(signal, ptr::null(), &raw mut action) };
    (result == 0).then_some(action.handler)
}

/// Whether this process ignores a signal, for example since it was started.
pub fn is_ignored(signal: c_int) -> bool {
    handler(signal) == Some(libc::SIG_IGN)
}

/// Ignores the signals that musl reserves for itself. It uses them only for calls that this program makes before it
/// has a second thread, or never, and a mask of its own functions cannot have them.
pub fn ignore_reserved_signals() {
    (32..=34).for_each(ignore_by_system_call);
}

/// Gives a signal its default effect, by a system call only.
pub(super) fn set_default(signal: c_int) {
    // SAFETY: installs no handler.
    unsafe { sigaction(signal, &KernelSigaction::DEFAULT, ptr::null_mut()) };
}

/// Ignores a signal, by a system call only.
pub(super) fn ignore_by_system_call(signal: c_int) {
    const IGNORE: KernelSigaction = KernelSigaction {
        handler: libc::SIG_IGN,
        ..KernelSigaction::DEFAULT
    };
    // SAFETY: installs no handler.
    unsafe { sigaction(signal, &IGNORE, ptr::null_mut()) };
}

/// # Safety
/// As for `rt_sigaction(2)`.
unsafe fn sigaction(
    signal: c_int,
    new: *const KernelSigaction,
    old: *mut KernelSigaction,
) -> c_long {
    let new = new.cast::<c_void>();
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, new, old, size_of::<u64>()) }
}

/// Gives a signal its default effect, whatever the server was started with. If SIGCHLD were ignored,
/// the kernel would reap children, and their exit statuses would be lost (wait(2)).
pub fn restore_default(signal: c_int) {
    // SAFETY: installs no handler.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// Ignores a signal in the server. Commands get its default effect.
pub fn ignore(signal: c_int) {
    // SAFETY: installs no handler.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}
