//! The activity of a workspace, from which its idle time is measured.

use std::time::{Duration, Instant};

use crate::threads::lock::{Mutex, lock};

/// Counts the leases and the running processes of a workspace.
///
/// One lock guards the count and the closing, so that no activity begins in a closed workspace.
pub struct Activity(Mutex<Counts>);

struct Counts {
    active: usize,
    /// When the latest activity ended.
    last: Instant,
    closed: bool,
}

impl Activity {
    /// No activity. The idle time starts.
    pub fn new() -> Self {
        Self(Mutex::new(Counts {
            active: 0,
            last: Instant::now(),
            closed: false,
        }))
    }

    /// Begins an activity. The caller holds a lease, so the workspace is open.
    pub fn begin(&self) {
        lock(&self.0).active += 1;
    }

    /// Begins an activity; false if the workspace is closed.
    pub fn begin_unless_closed(&self) -> bool {
        let mut state = lock(&self.0);
        if !state.closed {
            state.active += 1;
        }
        !state.closed
    }

    pub fn end(&self) {
        let mut state = lock(&self.0);
        state.active -= 1;
        state.last = Instant::now();
    }

    /// The idle time; `None` while there is activity.
    pub fn idle_for(&self) -> Option<Duration> {
        let state = lock(&self.0);
        (state.active == 0).then(|| state.last.elapsed())
    }

    /// Whether leases are refused.
    pub fn is_closed(&self) -> bool {
        lock(&self.0).closed
    }

    /// Closes the workspace, even during activity.
    pub fn close(&self) {
        lock(&self.0).closed = true;
    }

    /// Closes the workspace if it has been idle for `limit`; returns whether it is closed.
    pub fn close_if_idle(&self, limit: Duration) -> bool {
        let mut state = lock(&self.0);
        if state.active == 0 && state.last.elapsed() >= limit {
            state.closed = true;
        }
        state.closed
    }
}
