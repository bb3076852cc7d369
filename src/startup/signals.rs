//! The signals that others send to the program: which of them end it, and which have no effect.
//!
//! SIGTERM, SIGINT and SIGQUIT end it. SIGHUP ends it only if it was started on a terminal and not told to
//! survive that (nohup(1)): a terminal that closes sends it, but so does an operator who wants a service to read its
//! settings again. All other signals that would end a process are dropped, because a host that dies of one leaves the
//! processes of its sandboxes. Signals that faults cause keep their effect, as do those that stop and continue.
//!
//! The signals are blocked and read from a descriptor. A child's mask is emptied in any case, so this costs a child
//! nothing, and no handler can run in one before its execve.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::sys;

/// The signals that are left alone: those of faults, those that stop and continue, those that the program ignores
/// itself, those that the kernel ignores, and SIGCHLD.
const LEFT_ALONE: [Signal; 16] = [
    Signal::SIGILL,
    Signal::SIGTRAP,
    Signal::SIGABRT,
    Signal::SIGBUS,
    Signal::SIGFPE,
    Signal::SIGSEGV,
    Signal::SIGSYS,
    Signal::SIGTSTP,
    Signal::SIGTTIN,
    Signal::SIGTTOU,
    Signal::SIGCONT,
    Signal::SIGPIPE,
    Signal::SIGXFSZ,
    Signal::SIGURG,
    Signal::SIGWINCH,
    Signal::SIGCHLD,
];

/// Receives the signals of this process.
pub struct Signals {
    descriptor: SignalFd,
    hangup_ends: bool,
}

impl Signals {
    /// Blocks the signals, and SIGCHLD, and receives them from here on. SIGCHLD is received only `with_children`: a
    /// server's supervisor has a descriptor of its own for it.
    ///
    /// Call it before there is a second thread: threads inherit the mask.
    ///
    /// # Errors
    /// As signalfd(2).
    pub fn watch(with_children: bool) -> Result<Self, Errno> {
        let mut blocked = SigSet::all();
        for signal in LEFT_ALONE {
            blocked.remove(signal);
        }
        let mut received = blocked;
        blocked.add(Signal::SIGCHLD);
        if with_children {
            received = blocked;
        }
        let survives_hangup = sys::is_ignored(libc::SIGHUP);
        blocked.thread_block()?;
        sys::ignore_reserved_signals();
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Self {
            descriptor: SignalFd::with_flags(&received, flags)?,
            // Opening it fails without a controlling terminal. Asked before the signal comes: a terminal that has closed
            // controls nothing.
            hangup_ends: !survives_hangup && File::open("/dev/tty").is_ok(),
        })
    }

    /// Takes all signals that have arrived. Whether one of them ends the program.
    pub fn take_end(&self) -> bool {
        let mut ends = false;
        while let Ok(Some(received)) = self.descriptor.read_signal() {
            ends |= match received.ssi_signo.cast_signed() {
                libc::SIGTERM | libc::SIGINT | libc::SIGQUIT => true,
                libc::SIGHUP => self.hangup_ends,
                _ => false,
            };
        }
        ends
    }
}

impl AsFd for Signals {
    /// Readable when a signal has arrived.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
