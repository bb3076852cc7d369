//! Signalling whatever runs as a user, until nothing does.
//!
//! One call signals all of a user's processes at once, so that no fork storm gets around it
//! ([`sys::signal_user`]). It takes a process to do it; where none is to be had, they are signalled one
//! by one.

use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::sandbox::Sandbox;
use crate::error::{Error, Kind, Result};
use crate::proc;
use crate::process::Reason;
use crate::sys::{self, ActingAs, User};

/// Where the search for a user that is nobody's begins, downwards: above it are numbers with a meaning,
/// and a container has none beyond.
const LAST_USER: u32 = 65_533;

/// Who signals sandboxes' processes.
pub(super) struct Signaller {
    /// A user that is nobody's, see [`sys::signal_user`]. Guards that only one signals at a time.
    guise: Mutex<User>,
}

impl Signaller {
    /// Looks for a user that is nobody's, and none of `users`.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn new(users: &RangeInclusive<u32>) -> Result<Self> {
        let accounts = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        let has_account = |uid: &u32| {
            let number = uid.to_string();
            accounts
                .lines()
                .any(|line| line.split(':').nth(2) == Some(number.as_str()))
        };
        let nobody = (1..=LAST_USER)
            .rev()
            .filter(|uid| !users.contains(uid) && !has_account(uid))
            .map(|uid| User { uid, gid: uid })
            .find(|user| !sys::user_has_processes(*user) && ActingAs::new(*user).is_ok());
        let guise = nobody.ok_or_else(|| {
            Error::new(
                Kind::System,
                "cannot hold sandboxes: SBX_UID_RANGE leaves no uid that nobody has; the server needs one",
            )
        })?;
        Ok(Self {
            guise: Mutex::new(guise),
        })
    }

    /// Kills whatever runs as a sandbox's user, until nothing does, but no longer than until `deadline`.
    ///
    /// # Errors
    /// Something still does.
    pub(super) fn empty(&self, sandbox: &Sandbox, deadline: Instant) -> Result<()> {
        let processes = &sandbox.workspace.processes;
        let mut pause = Duration::from_micros(100);
        // In this order: what was being started at the first look may run at the second.
        while processes.is_starting() || sys::user_has_processes(sandbox.user) {
            if Instant::now() >= deadline {
                return Err(Error::new(
                    Kind::System,
                    format!(
                        "cannot end sandbox {}: something of it was killed and has not died",
                        sandbox.id
                    ),
                ));
            }
            processes.expect_kill(Reason::Deleted);
            self.signal(sandbox.user, libc::SIGKILL);
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Signals whatever runs as a user.
    pub(super) fn signal(&self, user: User, signal: i32) {
        let guise = self.guise.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = !sys::user_has_processes(*guise);
        if !is_free || sys::signal_user(user, signal, *guise).is_err() {
            drop(guise);
            // Where no process is to be had, as when a sandbox has taken all that there may be: one
            // after the other, until there is one.
            signal_each(user, signal);
        }
    }
}

/// Signals the processes of a user one by one, each as the one it was when it was looked at.
fn signal_each(user: User, signal: i32) {
    for pid in proc::processes() {
        if proc::real_user(pid) != Some(user.uid) {
            continue;
        }
        let Ok(process) = sys::pidfd_open(pid) else {
            continue;
        };
        // The number may have been given to another in between.
        if proc::real_user(pid) == Some(user.uid) {
            let _ = sys::pidfd_signal(process.as_fd(), signal);
        }
    }
}
