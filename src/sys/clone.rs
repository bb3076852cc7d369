//! Starting a process that shares the server's memory, which both [`super::spawn()`] and
//! [`super::signal_user`] do. What runs in it is the caller's.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;

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
    fn top(&mut self) -> *mut c_void {
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
    // SAFETY: the C library fills both sets before they are read. The stack is 16-aligned; the caller
    // keeps it and the argument alive.
    let (result, errno) = unsafe {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let flags = flags | libc::CLONE_VM | libc::CLONE_PIDFD;
        let result = libc::clone(entry, stack.top(), flags, argument, &raw mut pidfd);
        let errno = Errno::last();
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        (result, errno)
    };
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
