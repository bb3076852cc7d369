//! The activity of a workspace, from which its idle time is measured: requests and processes.

use std::time::{Duration, Instant};

use super::work_clock::WorkClock;
use crate::threads::lock::{Mutex, lock};

/// What a workspace is idle without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdleBy {
    /// Requests, and processes.
    Work,
    /// Requests alone.
    Requests,
}

impl IdleBy {
    /// Both by their names.
    pub const NAMES: [(&str, Self); 2] = [("work", Self::Work), ("requests", Self::Requests)];

    pub fn name(self) -> &'static str {
        match self {
            Self::Work => "work",
            Self::Requests => "requests",
        }
    }
}

/// Counts the leases of a workspace, one for each request, and its running processes.
///
/// One lock guards the count and the closing, so that no activity begins in a closed workspace.
pub struct Activity {
    counts: Mutex<Counts>,
    /// Idle time stands still with it.
    clock: WorkClock,
}

struct Counts {
    requests: Kind,
    processes: Kind,
    closed: bool,
}

/// Activity of one kind.
struct Kind {
    active: usize,
    /// When the latest one ended, by the clock of the workspace.
    last: Instant,
}

impl Kind {
    fn new(now: Instant) -> Self {
        Self {
            active: 0,
            last: now,
        }
    }

    fn end(&mut self, now: Instant) {
        self.active -= 1;
        self.last = self.last.max(now);
    }

    /// How long there has been none; `None` while there is one.
    fn idle_for(&self, now: Instant) -> Option<Duration> {
        (self.active == 0).then(|| now.saturating_duration_since(self.last))
    }
}

impl Counts {
    fn idle_for(&self, by: IdleBy, now: Instant) -> Option<Duration> {
        let requests = self.requests.idle_for(now)?;
        match by {
            IdleBy::Requests => Some(requests),
            IdleBy::Work => Some(requests.min(self.processes.idle_for(now)?)),
        }
    }
}

impl Activity {
    /// No activity. The idle time starts.
    pub fn new() -> Self {
        let clock = WorkClock::default();
        Self {
            counts: Mutex::new(Counts {
                requests: Kind::new(clock.now()),
                processes: Kind::new(clock.now()),
                closed: false,
            }),
            clock,
        }
    }

    /// The time of the workspace.
    pub fn clock(&self) -> &WorkClock {
        &self.clock
    }

    /// Begins what is not a request: a process, or code. The caller holds a lease, so the workspace is open.
    pub fn begin(&self) {
        lock(&self.counts).processes.active += 1;
    }

    /// Ends what [`Activity::begin`] began.
    pub fn end(&self) {
        let now = self.clock.now();
        lock(&self.counts).processes.end(now);
    }

    /// Begins a request; false if the workspace is closed.
    pub fn begin_request(&self) -> bool {
        let mut state = lock(&self.counts);
        if !state.closed {
            state.requests.active += 1;
        }
        !state.closed
    }

    pub fn end_request(&self) {
        let now = self.clock.now();
        lock(&self.counts).requests.end(now);
    }

    /// Ends a request that is no work: idle time goes on as if it had not been.
    pub fn end_quiet_request(&self) {
        lock(&self.counts).requests.active -= 1;
    }

    /// The idle time; `None` while there is activity of what it is measured by.
    pub fn idle_for(&self, by: IdleBy) -> Option<Duration> {
        let now = self.clock.now();
        lock(&self.counts).idle_for(by, now)
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
    pub fn close_if_idle(&self, by: IdleBy, limit: Duration) -> bool {
        let now = self.clock.now();
        let mut state = lock(&self.counts);
        state.closed |= state.idle_for(by, now).is_some_and(|idle| idle >= limit);
        state.closed
    }
}
