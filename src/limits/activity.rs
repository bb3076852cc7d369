//! The activity of a workspace, from which its idle time is measured.

use std::time::{Duration, Instant};

use super::work_clock::WorkClock;
use crate::threads::lock::{Mutex, lock};

/// Counts the leases and the running processes of a workspace.
///
/// One lock guards the count and the closing, so that no activity begins in a closed workspace.
pub struct Activity {
    counts: Mutex<Counts>,
    /// Idle time stands still with it.
    clock: WorkClock,
}

struct Counts {
    active: usize,
    /// When the latest activity ended, by the clock of the workspace.
    last: Instant,
    closed: bool,
}

impl Activity {
    /// No activity. The idle time starts.
    pub fn new() -> Self {
        let clock = WorkClock::default();
        Self {
            counts: Mutex::new(Counts {
                active: 0,
                last: clock.now(),
                closed: false,
            }),
            clock,
        }
    }

    /// The time of the workspace.
    pub fn clock(&self) -> &WorkClock {
        &self.clock
    }

    /// Begins an activity. The caller holds a lease, so the workspace is open.
    pub fn begin(&self) {
        lock(&self.counts).active += 1;
    }

    /// Begins an activity; false if the workspace is closed.
    pub fn begin_unless_closed(&self) -> bool {
        let mut state = lock(&self.counts);
        if !state.closed {
            state.active += 1;
        }
        !state.closed
    }

    pub fn end(&self) {
        let now = self.clock.now();
        let mut state = lock(&self.counts);
        state.active -= 1;
        state.last = state.last.max(now);
    }

    /// The idle time; `None` while there is activity.
    pub fn idle_for(&self) -> Option<Duration> {
        let now = self.clock.now();
        let state = lock(&self.counts);
        (state.active == 0).then(|| now.saturating_duration_since(state.last))
    }

    /// Whether leases are refused.
    pub fn is_closed(&self) -> bool {
        lock(&self.counts).closed
    }

    /// Closes the workspace, even during activity.
    pub fn close(&self) {
        lock(&self.counts).closed = true;
    }

    /// Closes the workspace if it has been idle for `limit`; returns whether it is closed.
    pub fn close_if_idle(&self, limit: Duration) -> bool {
        let now = self.clock.now();
        let mut state = lock(&self.counts);
        if state.active == 0 && now.saturating_duration_since(state.last) >= limit {
            state.closed = true;
        }
        state.closed
    }
}
