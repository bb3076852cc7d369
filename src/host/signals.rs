//! Signals all processes of a user, and kills them until none is left.
//!
//! One kill(2) call reaches all processes of a user at once, so a fork storm cannot escape it
//! ([`sys::signal_user`]). It needs a new process; if the machine has none left, the processes are
//! signalled one by one.

use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::claims::Claims;
use super::sandbox::Sandbox;
use super::users::accounts;
use crate::error::{Error, Kind, Result};
use crate::process::Reason;
use crate::sys::{self, ActingAs, User, proc};
use crate::threads::lock::{Mutex, lock};

/// Where the search for an unused uid begins, downwards: 65534 and 65535 have a meaning, and a container's
/// user namespace often ends there.
const LAST_USER: u32 = 65_533;

/// The pauses between two checks: the first, and the longest. A process that was killed ends within 100 µs.
const FIRST_PAUSE: Duration = Duration::from_micros(30);
const MAX_PAUSE: Duration = Duration::from_millis(20);

/// The time between two signals: one reaches all existing processes, so another is for a command that was
/// being started.
const KILL_AGAIN_AFTER: Duration = Duration::from_millis(2);

/// How long nothing is done but to kill, if that takes so long.
const KILLING_FIRST: Duration = Duration::from_millis(100);

/// How long the end of namespaces is left to itself.
const ALONE_FOR: Duration = Duration::from_millis(100);

/// After this time, killed processes that seem to live may be zombies. Init reaps its own sooner.
const ZOMBIES_AFTER: Duration = Duration::from_millis(500);

/// The pause between two checks then, which read /proc.
const ZOMBIE_PAUSE: Duration = Duration::from_millis(200);

/// How long the server's own threads may take to leave the files of a sandbox before its connections are cut, for which
/// they may wait. Those that work notice the end by themselves, in less time.
const LEAVING_LIMIT: Duration = Duration::from_secs(1);

/// Sends signals to the processes of sandboxes.
pub(super) struct Signaller {
    /// The unused uid that [`sys::signal_user`] sends from. The lock allows one sender at a time.
    sender_uid: Mutex<User>,
}

impl Signaller {
    /// Looks for a uid that has no account and no process, is not one of `users`, and is no other host's; claims it.
    ///
    /// # Errors
    /// `System` if no uid is free.
    pub(super) fn new(users: &RangeInclusive<u32>, claims: &Claims) -> Result<Self> {
        let all = 1..=LAST_USER;
        let accounts = accounts(&all)?;
        for uid in all.rev() {
            let user = User { uid, gid: uid };
            if !users.contains(&uid)
                && !accounts.contains(&uid)
                && !sys::user_has_processes(user)
                && ActingAs::new(user).is_ok()
                && claims.add_one(uid)?
            {
                let sender_uid = Mutex::new(user);
                return Ok(Self { sender_uid });
            }
        }
        let text =
            "cannot hold sandboxes: SBX_UID_RANGE leaves no unused uid, and the server needs one";
        Err(Error::new(Kind::System, text))
    }

    /// Kills the processes of sandboxes until none is left, and with `leaves` no thread of the server is in the files
    /// either, or until
    /// `deadline`. Passes each sandbox that is empty to
    /// `done`, and at the deadline the others, with false. `done` may take long, so all are killed first; but those that
    /// cannot be emptied hold up no other.
    pub(super) fn empty<'a>(
        &self,
        sandboxes: impl IntoIterator<Item = &'a Arc<Sandbox>>,
        reason: Reason,
        leaves: bool,
        deadline: Instant,
        mut done: impl FnMut(&'a Arc<Sandbox>, bool),
    ) {
        let mut left: Vec<_> = sandboxes.into_iter().collect();
        let begun = Instant::now();
        let (mut pause, mut next_kill) = (FIRST_PAUSE, begun);
        let mut empty = Vec::new();
        loop {
            let with_zombies_apart = begun.elapsed() >= ZOMBIES_AFTER;
            let is_left = |sandbox: &&Arc<Sandbox>| {
                sandbox.has_namespaces()
                    || is_active(sandbox, with_zombies_apart)
                    || (leaves && sandbox.workspace.is_in_use())
            };
            let (active, ended): (Vec<_>, Vec<_>) = left.into_iter().partition(is_left);
            left = active;
            empty.extend(ended);
            let now = Instant::now();
            if now >= next_kill {
                for sandbox in &left {
                    if leaves && begun.elapsed() >= LEAVING_LIMIT && sandbox.workspace.is_in_use() {
                        sandbox.workspace.ledger.connections.shut_down(false);
                    }
                    // Almost always enough where there are namespaces.
                    if !sandbox.end_namespaces(reason) || begun.elapsed() >= ALONE_FOR {
                        sandbox.workspace.processes.expect_kill(reason);
                        sandbox.limits.kill_all();
                        self.signal_sandbox(sandbox, libc::SIGKILL);
                    }
                }
                next_kill = now + KILL_AGAIN_AFTER;
            }
            if left.is_empty() || now >= deadline {
                break;
            }
            // One at a time: it may take long, and there is more to kill.
            if begun.elapsed() >= KILLING_FIRST
                && let Some(sandbox) = empty.pop()
            {
                done(sandbox, true);
            }
            thread::sleep(pause);
            pause = (pause * 2).min(if with_zombies_apart {
                ZOMBIE_PAUSE
            } else {
                MAX_PAUSE
            });
        }
        for sandbox in empty {
            done(sandbox, true);
        }
        for sandbox in left {
            done(sandbox, false);
        }
    }

    /// Signals all processes of a sandbox at once.
    pub(super) fn signal_sandbox(&self, sandbox: &Sandbox, signal: i32) {
        match sandbox.namespaces_of_many() {
            // There may be none.
            Some(namespaces) => drop(namespaces.signal_all(signal)),
            None => self.signal(sandbox.user, signal),
        }
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

/// Whether a process of a sandbox can still act, or a command is being started.
///
/// The kernel also counts zombies as processes of their user, and one that a stranger does not reap stays.
/// `with_zombies_apart` looks at /proc to tell. The answer is right only if all processes of the user
/// were sent SIGKILL before: then none can fork while /proc is read.
pub(super) fn is_active(sandbox: &Sandbox, with_zombies_apart: bool) -> bool {
    // In this order: a command that was starting at the first check may run at the second.
    sandbox.workspace.processes.is_starting()
        || (sys::user_has_processes(sandbox.user)
            && !(with_zombies_apart && proc::user_has_living(sandbox.user.uid) == Some(false)))
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
