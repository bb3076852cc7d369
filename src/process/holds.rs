//! Who stops processes of others for a moment, and whose stand still meanwhile.
//!
//! A search for the processes of a command may have to stop an orphan before it knows whose it is, and lets it go on
//! when it is another's. It must not do so to what a pause has stopped, and what it holds must not count as stopped when
//! a pause begins. So a pause makes its user exempt first, and waits until nothing of that user is held.

use std::time::Duration;

use crate::sys::Pid;
use crate::sys::proc;
use crate::threads::lock::{Condvar, Mutex, lock};

/// How long a pause waits for searches. One holds nothing for as long as this.
const HOLD_LIMIT: Duration = Duration::from_secs(1);

struct Searches {
    /// Users whose processes stand still.
    exempt: Vec<libc::uid_t>,
    /// The users of the processes that are held.
    held: Vec<libc::uid_t>,
}

static SEARCHES: Mutex<Searches> = Mutex::new(Searches {
    exempt: Vec::new(),
    held: Vec::new(),
});

/// Notified when processes are held no more.
static RELEASED: Condvar = Condvar::new();

/// Keeps the processes of a user from being held.
pub(super) struct Exemption(libc::uid_t);

impl Exemption {
    /// Waits until none is held.
    pub(super) fn new(uid: libc::uid_t) -> Self {
        let mut searches = lock(&SEARCHES);
        searches.exempt.push(uid);
        let are_held = |searches: &mut Searches| searches.held.contains(&uid);
        drop(RELEASED.wait_while_for(searches, HOLD_LIMIT, are_held));
        Self(uid)
    }

    #[cfg(test)]
    pub(super) fn is_there(uid: libc::uid_t) -> bool {
        lock(&SEARCHES).exempt.contains(&uid)
    }
}

impl Drop for Exemption {
    fn drop(&mut self) {
        remove(&mut lock(&SEARCHES).exempt, self.0);
    }
}

/// The processes that one search holds.
#[derive(Default)]
pub(super) struct Holds(Vec<(Pid, libc::uid_t)>);

impl Holds {
    /// Holds a process that `stop` stops. False if it is stopped already, or stands still with its user.
    pub(super) fn hold(&mut self, pid: Pid, stop: impl FnOnce()) -> bool {
        let Some(uid) = proc::real_user(pid) else {
            return false;
        };
        {
            let mut searches = lock(&SEARCHES);
            if searches.exempt.contains(&uid) {
                return false;
            }
            searches.held.push(uid);
        }
        self.0.push((pid, uid));
        if proc::is_stopped(pid) {
            self.release(&[pid]);
            return false;
        }
        stop();
        true
    }

    /// They go on, or are about to be killed.
    pub(super) fn release(&mut self, pids: &[Pid]) {
        if self.0.is_empty() {
            return;
        }
        let mut searches = lock(&SEARCHES);
        self.0.retain(|(pid, uid)| {
            let is_released = pids.contains(pid);
            if is_released {
                remove(&mut searches.held, *uid);
            }
            !is_released
        });
        drop(searches);
        RELEASED.notify_all();
    }
}

/// Removes one of several that are equal.
fn remove(uids: &mut Vec<libc::uid_t>, uid: libc::uid_t) {
    if let Some(at) = uids.iter().position(|other| *other == uid) {
        uids.swap_remove(at);
    }
}
