//! Who stops processes of others for a moment, and whose stand still meanwhile.
//!
//! A search for the processes of a command may have to stop an orphan of its user before it knows of which command it is,
//! and lets it go on when it is another's. It must not do so to what a pause has stopped, and what it holds must not count
//! as stopped when a pause begins. So a pause makes its user exempt first, and waits until nothing of that user is held.

use std::time::Duration;

use crate::sys::Pid;
use crate::sys::proc;
use crate::threads::lock::{Condvar, Mutex, lock};

/// How long a pause waits for searches. One holds nothing for as long as this.
const HOLD_LIMIT: Duration = Duration::from_secs(1);

struct Searches {
    /// Users whose processes stand still.
    exempt: Vec<libc::uid_t>,
    /// The processes that are held, with their users.
    held: Vec<(Pid, libc::uid_t)>,
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
        let are_held = |searches: &mut Searches| searches.held.iter().any(|(_, held)| *held == uid);
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
        let exempt = &mut lock(&SEARCHES).exempt;
        // Another pause of the same user may have begun.
        if let Some(at) = exempt.iter().position(|uid| *uid == self.0) {
            exempt.swap_remove(at);
        }
    }
}

/// The processes that one search holds.
#[derive(Default)]
pub(super) struct Holds(Vec<Pid>);

impl Holds {
    /// Holds a process that `stop` stops. False if its user is not meant or stands still, or another search holds it.
    pub(super) fn hold(
        &mut self,
        pid: Pid,
        is_meant: impl FnOnce(libc::uid_t) -> bool,
        stop: impl FnOnce(),
    ) -> bool {
        let Some(uid) = proc::user(pid).filter(|uid| is_meant(*uid)) else {
            return false;
        };
        let mut searches = lock(&SEARCHES);
        let is_held = searches.held.iter().any(|(held, _)| *held == pid);
        if is_held || searches.exempt.contains(&uid) {
            return false;
        }
        searches.held.push((pid, uid));
        self.0.push(pid);
        stop();
        true
    }

    /// They go on, or are about to be killed.
    pub(super) fn release(&mut self, pids: &[Pid]) {
        let is_released = |pid: &mut Pid| pids.contains(pid);
        let released: Vec<Pid> = self.0.extract_if(.., is_released).collect();
        if !released.is_empty() {
            let held = &mut lock(&SEARCHES).held;
            held.retain(|(pid, _)| !released.contains(pid));
            RELEASED.notify_all();
        }
    }
}
