//! A command that is being started. The thread that starts it is suspended until the child has called
//! execve or has ended, so other threads enforce its deadline and its end.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Instant;

use crate::spec::command::ChosenId;
use crate::sys::{self, Pid, proc};

/// A command that is being started.
pub(super) struct Start {
    pub(super) id: Option<ChosenId>,
    pub(super) since: Instant,
    /// When the command is killed.
    pub(super) deadline: Option<Instant>,
    /// Stored by the child itself before anything else; 0 until it exists, and when it has failed.
    pub(super) pid: AtomicI32,
    timed_out: AtomicBool,
}

impl Start {
    pub(super) fn new(id: Option<ChosenId>, since: Instant, deadline: Option<Instant>) -> Self {
        Self {
            id,
            since,
            deadline,
            pid: AtomicI32::new(0),
            timed_out: AtomicBool::new(false),
        }
    }

    /// The child's pid, once it exists.
    pub(super) fn pid(&self) -> Option<Pid> {
        Some(self.pid.load(Ordering::Acquire)).filter(|pid| *pid != 0)
    }

    /// Whether the child was killed at its deadline.
    pub(super) fn has_timed_out(&self) -> bool {
        self.timed_out.load(Ordering::Acquire)
    }

    /// Kills the child if its deadline has passed. The caller knows that the start is still listed.
    pub(super) fn enforce_deadline(&self, now: Instant) {
        if self.deadline.is_some_and(|deadline| deadline <= now) && self.pid().is_some() {
            self.timed_out.store(true, Ordering::Release);
            self.kill();
        }
    }

    /// Kills the child. A child that cannot execute its program is reaped while the start is still listed, and
    /// its pid is cleared before.
    pub(super) fn kill(&self) {
        if let Some(pid) = self.pid()
            && let Ok(child) = sys::pidfd_open(pid)
            && self.pid() == Some(pid)
        {
            let _ = sys::pidfd_signal(child.as_fd(), libc::SIGKILL);
        }
    }

    /// Whether a signal or a tracer has stopped the child.
    pub(super) fn is_stopped(&self) -> bool {
        self.pid().is_some_and(proc::is_stopped)
    }
}
