//! Processes: waits for them, signals them, and forks.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::time::Duration;

use nix::errno::Errno;

use super::clone::{ChildStack, clone};
use super::identity::User;
use super::poll::{Events, PollEntry, poll};

pub type Pid = libc::pid_t;

/// Raises the nice value of the calling thread (setpriority(2)). It cannot be lowered again without
/// `CAP_SYS_NICE`, so the thread should have nothing else to do.
pub fn make_thread_nice(nice: c_int) {
    // SAFETY: takes integers. On Linux, process 0 is the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
}

/// The number of the calling thread.
pub fn thread_id() -> Pid {
    // SAFETY: no arguments.
    unsafe { libc::gettid() }
}

/// Whether two processes have the same address space (kcmp(2), `KCMP_VM`). So do two whose first threads have ended:
/// the kernel compares what these have left, which is nothing.
///
/// # Errors
/// `ESRCH` if one of them has ended. `EPERM` without `CAP_SYS_PTRACE`; a container's filter may give any other.
pub fn have_one_address_space(one: Pid, other: Pid) -> Result<bool, Errno> {
    const KCMP_VM: c_int = 1;
    // SAFETY: plain integers.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) };
    Errno::result(order).map(|order| order == 0)
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It exited with this status.
    Exited(i32),
    /// This signal killed it.
    Signaled(i32),
    /// Another thread or process reaped it, which is a defect.
    Unknown,
}

/// Reaps a child. Without `block`, returns `None` while it runs. It runs, too, while it is stopped and this process traces
/// it, which a child can ask for by itself (ptrace(2), `PTRACE_TRACEME`): waits report that whatever is waited for.
///
/// # Errors
/// `ECHILD` if it was reaped already.
pub fn wait(pidfd: BorrowedFd<'_>, block: bool) -> Result<Option<Ending>, Errno> {
    // `__WALL`: before its execve a child has no exit signal.
    let flags = libc::WEXITED | libc::__WALL | if block { 0 } else { libc::WNOHANG };
    loop {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: waitid fills `info`, and all zeroes (no child) are a value of it.
        let (result, info) = unsafe {
            let id = libc::id_t::try_from(pidfd.as_raw_fd()).unwrap_or_default();
            let result = libc::waitid(libc::P_PIDFD, id, info.as_mut_ptr(), flags);
            (Errno::result(result), info.assume_init())
        };
        match result {
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
            Ok(_) => {
                // SAFETY: waitid sets these fields, as SIGCHLD does.
                let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
                return Ok(match info.si_code {
                    _ if pid == 0 => None,
                    libc::CLD_EXITED => Some(Ending::Exited(status)),
                    libc::CLD_KILLED | libc::CLD_DUMPED => Some(Ending::Signaled(status)),
                    _ => continue,
                });
            }
        }
    }
}

/// Reaps any child that has ended; `None` if none has. Only for init, which shares its children with no
/// other code.
///
/// # Errors
/// `ECHILD` if there is no child.
pub fn wait_any() -> Result<Option<(Pid, Ending)>, Errno> {
    let mut status = 0;
    // SAFETY: waitpid writes one integer.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
    Ok(match Errno::result(pid)? {
        0 => None,
        pid if libc::WIFSIGNALED(status) => Some((pid, Ending::Signaled(libc::WTERMSIG(status)))),
        pid => Some((pid, Ending::Exited(libc::WEXITSTATUS(status)))),
    })
}

/// A child that has ended and was not reaped; `None` if there is none. Leaves it as it is, and does not
/// find children that [`super::spawn()`] and [`signal_user`] started and that have not called execve.
///
/// # Errors
/// `ECHILD` if there is no child. `EAGAIN` if a traced one has stopped: that was taken note of, and there may be others.
pub fn ended_child() -> Result<Option<Pid>, Errno> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: waitid fills `info`, all zeroes (no child) are a value of it, and it sets the pid.
    let (info, pid) = unsafe {
        Errno::result(libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), flags))?;
        let info = info.assume_init();
        (info, info.si_pid())
    };
    let has_stopped = [libc::CLD_TRAPPED, libc::CLD_STOPPED].contains(&info.si_code);
    if pid != 0 && has_stopped {
        // Without its end: should it end just now, the next call finds that.
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        let id = libc::id_t::try_from(pid).unwrap_or_default();
        let flags = libc::WSTOPPED | libc::WNOHANG;
        // SAFETY: as above.
        unsafe { libc::waitid(libc::P_PID, id, info.as_mut_ptr(), flags) };
        return Err(Errno::EAGAIN);
    }
    Ok(Some(pid).filter(|pid| *pid != 0))
}

/// Reaps a child that [`ended_child`] has found.
pub fn reap(pid: Pid) {
    // SAFETY: plain integers and a null pointer.
    unsafe { libc::waitpid(pid, ptr::null_mut(), libc::WNOHANG) };
}

/// A descriptor that refers to this process only, even when its number is reused (`pidfd_open(2)`).
///
/// # Errors
/// `ESRCH` if there is no such process.
pub fn pidfd_open(pid: Pid) -> Result<OwnedFd, Errno> {
    // SAFETY: plain integers. The descriptor is new and nothing else owns it.
    unsafe {
        let descriptor = Errno::result(libc::syscall(libc::SYS_pidfd_open, pid, 0))?;
        let descriptor = RawFd::try_from(descriptor).unwrap_or(-1);
        Ok(OwnedFd::from_raw_fd(descriptor))
    }
}

/// Signals the process that a pidfd refers to.
///
/// # Errors
/// `ESRCH` if it was reaped, `EPERM`.
pub fn pidfd_signal(pidfd: BorrowedFd<'_>, signal: c_int) -> Result<(), Errno> {
    // SAFETY: plain integers and a null siginfo.
    let result = unsafe {
        let (pidfd, info) = (pidfd.as_raw_fd(), ptr::null::<c_void>());
        libc::syscall(libc::SYS_pidfd_send_signal, pidfd, signal, info, 0)
    };
    Errno::result(result).map(drop)
}

/// Signals a process group. The caller knows that its leader has not been reaped, so the number is
/// still its own.
///
/// # Errors
/// `ESRCH` if it has no process left.
pub fn signal_group(group: Pid, signal: c_int) -> Result<(), Errno> {
    debug_assert!(group > 1);
    // SAFETY: plain integers.
    Errno::result(unsafe { libc::kill(-group, signal) }).map(drop)
}

/// Signals a process by its number. The caller knows whose number it is: that of an unreaped child, or
/// of a process just looked at.
///
/// # Errors
/// `ESRCH` if there is no such process, `EPERM`.
pub fn signal_process(pid: Pid, signal: c_int) -> Result<(), Errno> {
    // SAFETY: plain integers.
    Errno::result(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Signals one thread of a process. The caller has just looked at both.
///
/// # Errors
/// `ESRCH` if there is no such thread, `EPERM`.
pub fn signal_thread(pid: Pid, thread: Pid, signal: c_int) -> Result<(), Errno> {
    // SAFETY: plain integers.
    Errno::result(unsafe { libc::syscall(libc::SYS_tgkill, pid, thread, signal) }).map(drop)
}

/// Signals every process of a user by one kill(2) from a process with that user's identity. The kernel
/// walks the processes without a break, and a process with a pending signal cannot fork, so not even a
/// fork bomb escapes SIGKILL.
///
/// The sending process has `user` as its effective user and `sender` as its real and saved one: it
/// may signal the user's processes, and they may not signal it.
///
/// The caller makes sure that nothing else runs as `sender`, another call of this function
/// included.
///
/// # Errors
/// That of clone(2), or `EAGAIN` if the sending process could not signal.
pub fn signal_user(user: User, signal: c_int, sender: User) -> Result<(), Errno> {
    struct SignalPlan {
        user: User,
        signal: c_int,
        sender: User,
    }
    /// Shares the server's memory and, with the waiting thread, the C library's state: it makes system
    /// calls only and leaves errno unread.
    extern "C" fn send(argument: *mut c_void) -> c_int {
        // SAFETY: `signal_user` passes an SignalPlan that outlives this process. Plain integers.
        unsafe {
            let order = &*argument.cast_const().cast::<SignalPlan>();
            let (uid, sender) = (order.user.uid, order.sender.uid);
            if libc::syscall(libc::SYS_setresuid, sender, uid, sender) < 0 {
                libc::_exit(1)
            }
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            libc::kill(-1, order.signal);
            libc::_exit(0)
        }
    }
    let order = SignalPlan {
        user,
        signal,
        sender,
    };
    let mut stack = ChildStack::new();
    // Not CLONE_VFORK: this thread must be able to kill a sender that hangs. The sender uses no
    // descriptor, so it needs no copy of the table.
    let argument = (&raw const order).cast_mut().cast();
    let (_, pidfd) = clone(send, argument, &mut stack, libc::CLONE_FILES)?;
    let mut entries = [PollEntry::new(pidfd.as_fd(), Events::READABLE)];
    while !poll(&mut entries, Some(SENDER_TIMEOUT)) {
        let _ = pidfd_signal(pidfd.as_fd(), libc::SIGKILL);
    }
    // `order` and `stack` live until here, and the sender has ended.
    match wait(pidfd.as_fd(), true)? {
        Some(Ending::Exited(0)) => Ok(()),
        _ => Err(Errno::EAGAIN),
    }
}

/// Signalling all processes of a machine takes milliseconds, and on a busy one the sender waits for
/// its turn.
const SENDER_TIMEOUT: Duration = Duration::from_secs(2);

/// Splits the process in two; `None` in the child. Call it before there is a second thread.
///
/// # Errors
/// As fork(2).
pub fn fork() -> Result<Option<Pid>, Errno> {
    // SAFETY: with one thread the child's memory is consistent.
    let pid = Errno::result(unsafe { libc::fork() })?;
    Ok((pid != 0).then_some(pid))
}
