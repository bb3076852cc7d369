//! Signals all processes of a user, and kills them until none is left.
//!
//! One kill(2) call reaches all processes of a user at once, so a fork storm cannot escape it
//! ([`sys::signal_user`]). It needs a new process; if the machine has none left, the processes are
//! signalled one by one.

use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use super::sandbox::Sandbox;
use crate::error::{Error, Kind, Result};
use crate::proc;
use crate::process::Reason;
use crate::sync::lock;
use crate::sys::{self, ActingAs, User};

/// Where the search for an unused uid begins, downwards: 65534 and 65535 have a meaning, and a container's
/// user namespace often ends there.
const LAST_USER: u32 = 65_533;

/// Sends signals to the processes of sandboxes.
pub(super) struct Signaller {
    /// The unused uid that [`sys::signal_user`] sends from. The lock allows one sender at a time.
    sender_uid: Mutex<User>,
}

impl Signaller {
    /// Looks for a uid that has no account and no process and is not one of `users`.
    ///
    /// # Errors
    /// `System` if no uid is free.
    pub(super) fn new(users: &RangeInclusive<u32>) -> Result<Self> {
        let accounts = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        let uid = |account: &str| account.split(':').nth(2)?.parse().ok();
        let accounts: Vec<u32> = accounts.lines().filter_map(uid).collect();
        let unused = (1..=LAST_USER)
            .rev()
            .filter(|uid| !users.contains(uid) && !accounts.contains(uid))
            .map(|uid| User { uid, gid: uid })
            .find(|user| !sys::user_has_processes(*user) && ActingAs::new(*user).is_ok());
        let sender_uid = unused.map(Mutex::new).ok_or_else(|| {
            let text =
                "cannot hold sandboxes: SBX_UID_RANGE leaves no unused uid, and the server needs one";
            Error::new(Kind::System, text)
        })?;
        Ok(Self { sender_uid })
    }

    /// Kills the processes of a sandbox's user until none is left, or until `deadline`.
    ///
    /// # Errors
    /// `System` if a process is left at the deadline.
    pub(super) fn empty(&self, sandbox: &Sandbox, deadline: Instant) -> Result<()> {
        let processes = &sandbox.workspace.processes;
        let mut pause = Duration::from_micros(100);
        // In this order: a command that was starting at the first check may run at the second.
        while processes.is_starting() || sys::user_has_processes(sandbox.user) {
            if Instant::now() >= deadline {
                let id = &sandbox.id;
                let text =
                    format!("cannot end sandbox {id}: a process was killed but has not ended");
                return Err(Error::new(Kind::System, text));
            }
            processes.expect_kill(Reason::Deleted);
            self.signal(sandbox.user, libc::SIGKILL);
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Signals all processes of a user.
    pub(super) fn signal(&self, user: User, signal: i32) {
        let sender_uid = lock(&self.sender_uid);
        let is_free = !sys::user_has_processes(*sender_uid);
        if !is_free || sys::signal_user(user, signal, *sender_uid).is_err() {
            drop(sender_uid);
            // No process is left for the sender, for example because a sandbox has taken them all.
            signal_each(user, signal);
        }
    }
}

/// Signals the processes of a user one by one, through pidfds.
fn signal_each(user: User, signal: i32) {
    for pid in proc::processes() {
        if proc::real_user(pid) == Some(user.uid)
            && let Ok(process) = sys::pidfd_open(pid)
            // The pid may have been reused in between.
            && proc::real_user(pid) == Some(user.uid)
        {
            let _ = sys::pidfd_signal(process.as_fd(), signal);
        }
    }
}
