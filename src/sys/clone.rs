//! Starting a process that shares the server's memory, which [`super::spawn()`], [`super::signal_user`] and
//! [`super::Holder`] do. What runs in it is the caller's.

use std::arch::asm;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;

/// A stack for a process that shares the server's memory. It must outlive that process, or its first
/// execve. Such a process only makes system calls, so a few frames are enough.
pub(super) struct ChildStack(Vec<MaybeUninit<u128>>);

impl ChildStack {
    const BYTES: usize = 32 * 1024;

    pub(super) fn new() -> Self {
        Self(Vec::with_capacity(Self::BYTES / size_of::<u128>()))
    }

    /// The highest address: the stack grows down.
    pub(super) fn top(&mut self) -> *mut c_void {
        self.0.as_mut_ptr().wrapping_add(self.0.capacity()).cast()
    }
}

/// Starts a process that shares this one's memory and runs `entry` with every signal blocked: the
/// server's handlers must not run in it.
///
/// It has no exit signal, so only [`super::wait`] finds it, until it calls execve: [`super::ended_child`]
/// does not.
///
/// The caller keeps `stack` and what `argument` points to alive until the process ends or calls
/// execve.
pub(super) fn clone(
    entry: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
    stack: &mut ChildStack,
    flags: c_int,
) -> Result<(libc::pid_t, OwnedFd), Errno> {
    let mut pidfd: c_int = -1;
    let flags = flags | libc::CLONE_VM | libc::CLONE_PIDFD;
    // SAFETY: the stack is 16-aligned; the caller keeps it and the argument alive.
    let (result, errno) = with_signals_blocked(|| unsafe {
        let result = libc::clone(entry, stack.top(), flags, argument, &raw mut pidfd);
        (result, Errno::last())
    });
    if result < 0 {
        return Err(errno);
    }
    if pidfd < 0 {
        // Kernels before Linux 5.2 ignore CLONE_PIDFD. The stack stays in use until the process ends.
        // SAFETY: plain integers and a null pointer.
        unsafe {
            libc::kill(result, libc::SIGKILL);
            while libc::waitpid(result, ptr::null_mut(), libc::__WALL) < 0
                && Errno::last() == Errno::EINTR
            {}
        }
        return Err(Errno::ENOSYS);
    }
    // SAFETY: the kernel stored a new descriptor there, which nothing else owns.
    Ok((result, unsafe { OwnedFd::from_raw_fd(pidfd) }))
}

/// As [`clone`], in a cgroup if there is one. Where the kernel cannot start a process there, the child has to
/// [enter](enter_cgroup) the one with the directory that is stored in `to_enter` before it runs.
pub(super) fn clone_in(
    cgroup: Option<BorrowedFd<'_>>,
    to_enter: &Cell<Option<RawFd>>,
    entry: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
    stack: &mut ChildStack,
    flags: c_int,
) -> Result<(libc::pid_t, OwnedFd), Errno> {
    let cloned = cgroup.and_then(|cgroup| clone_into_cgroup(entry, argument, stack, flags, cgroup));
    cloned.unwrap_or_else(|| {
        to_enter.set(cgroup.map(|cgroup| cgroup.as_raw_fd()));
        clone(entry, argument, stack, flags)
    })
}

/// Moves the calling process into the cgroup with this directory.
///
/// # Safety
/// Only in a child that makes system calls only.
pub(super) unsafe fn enter_cgroup(directory: RawFd) -> Result<(), Errno> {
    let flags = libc::O_WRONLY | libc::O_CLOEXEC;
    // SAFETY: plain integers and constant texts. "0" is the process that writes it.
    unsafe {
        let name = c"cgroup.procs".as_ptr();
        let file = Errno::result(libc::syscall(libc::SYS_openat, directory, name, flags))?;
        let written = Errno::result(libc::syscall(libc::SYS_write, file, c"0".as_ptr(), 1));
        libc::syscall(libc::SYS_close, file);
        written.map(drop)
    }
}

/// Sets the score by which the kernel chooses what it kills when memory runs out, of the calling process (proc(5)). A machine
/// without /proc has no such setting.
///
/// # Safety
/// Only in a child that makes system calls only.
pub(super) unsafe fn write_oom_score(score: &[u8]) -> bool {
    let flags = libc::O_WRONLY | libc::O_CLOEXEC;
    // SAFETY: a constant text, and bytes that outlive the call.
    unsafe {
        let path = c"/proc/self/oom_score_adj".as_ptr();
        // A raw call: musl's open makes two.
        let file = libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags);
        if file < 0 {
            return false;
        }
        libc::syscall(libc::SYS_write, file, score.as_ptr(), score.len());
        libc::syscall(libc::SYS_close, file);
        true
    }
}

/// Whether clone3(2) was refused before: kernels before Linux 5.7 cannot start a process in a cgroup, and some
/// containers' filters hide the call.
static IS_REFUSED: AtomicBool = AtomicBool::new(false);

/// The argument of clone3(2) up to the field that Linux 5.7 added (`struct clone_args`, version 2).
#[repr(C)]
#[derive(Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// As [`clone`], but the process is in a cgroup from its first instruction. Moving it there later makes the kernel
/// wait for a grace period, which takes milliseconds. `None` if this machine cannot do it.
fn clone_into_cgroup(
    entry: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
    stack: &mut ChildStack,
    flags: c_int,
    cgroup: BorrowedFd<'_>,
) -> Option<Result<(libc::pid_t, OwnedFd), Errno>> {
    // `linux/sched.h`.
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
    if IS_REFUSED.load(Ordering::Relaxed) {
        return None;
    }
    let mut pidfd: c_int = -1;
    let flags = flags | libc::CLONE_VM | libc::CLONE_PIDFD;
    let arguments = CloneArguments {
        flags: u64::from(flags.cast_unsigned()) | CLONE_INTO_CGROUP,
        pidfd: (&raw mut pidfd).expose_provenance() as u64,
        stack: stack.0.as_mut_ptr().expose_provenance() as u64,
        stack_size: ChildStack::BYTES as u64,
        cgroup: u64::try_from(cgroup.as_raw_fd()).ok()?,
        ..CloneArguments::default()
    };
    // SAFETY: the stack is 16-aligned; the caller keeps it and the argument alive.
    let result = with_signals_blocked(|| unsafe { clone3(&arguments, entry, argument) });
    match Errno::from_raw(i32::try_from(-result).unwrap_or(0)) {
        Errno::ENOSYS | Errno::EPERM | Errno::EINVAL | Errno::E2BIG => {
            IS_REFUSED.store(true, Ordering::Relaxed);
            None
        }
        errno if result < 0 => Some(Err(errno)),
        _ => {
            let pid = libc::pid_t::try_from(result).ok()?;
            // SAFETY: the kernel stored a new descriptor there, which nothing else owns.
            Some(Ok((pid, unsafe { OwnedFd::from_raw_fd(pidfd) })))
        }
    }
}

/// clone3(2) by hand: its child begins on another stack, so it cannot return through a function of the C library.
/// Returns the pid, or the errno as a negative number.
///
/// # Safety
/// As for clone(2) with `CLONE_VM`: `arguments` names a stack that stays until the child ends or calls execve.
unsafe fn clone3(
    arguments: &CloneArguments,
    entry: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
) -> i64 {
    let result: i64;
    // SAFETY: the parent only gets a number. The child has the registers that the parent had, an empty stack, and
    // ends with what `entry` returns. A call pushes what keeps the stack aligned as its function expects it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "mov edi, eax",
            "mov eax, {exit}",
            "syscall",
            "ud2",
            "2:",
            exit = const libc::SYS_exit,
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") std::ptr::from_ref(arguments),
            in("rsi") size_of::<CloneArguments>(),
            in("r12") argument,
            in("r13") entry,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "svc #0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x0, x10",
            "blr x11",
            "mov x8, {exit}",
            "svc #0",
            "brk #0",
            "2:",
            exit = const libc::SYS_exit,
            inlateout("x0") std::ptr::from_ref(arguments) => result,
            in("x1") size_of::<CloneArguments>(),
            in("x8") libc::SYS_clone3,
            in("x10") argument,
            in("x11") entry,
        );
    }
    result
}

/// Calls `act` with every signal blocked in this thread.
fn with_signals_blocked<T>(act: impl FnOnce() -> T) -> T {
    // SAFETY: the C library fills both sets before they are read.
    unsafe {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let result = act();
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        result
    }
}
