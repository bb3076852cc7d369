//! Whether anything is going on: what idleness is measured by.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Counts what is going on in a workspace: leases and running processes.
///
/// The lock guards the count and the time, so that closing cannot overlook a beginning.
pub struct Activity(Mutex<Count>);

struct Count {
    active: usize,
    last: Instant,
    closed: bool,
}

impl Activity {
    /// Nothing, since now.
    pub fn new() -> Self {
        Self(Mutex::new(Count {
            active: 0,
            last: Instant::now(),
            closed: false,
        }))
    }

    fn count(&self) -> MutexGuard<'_, Count> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something begins (inside a lease, so the workspace cannot be closed).
    pub fn begin(&self) {
        self.count().active += 1;
    }

    /// Something begins from outside; false if the workspace was closed before.
    pub fn begin_unless_closed(&self) -> bool {
        let mut count = self.count();
        if !count.closed {
            count.active += 1;
        }
        !count.closed
    }

    /// It has ended.
    pub fn end(&self) {
        let mut count = self.count();
        count.active -= 1;
        count.last = Instant::now();
    }

    /// How long nothing has been going on; `None` while something is.
    pub fn idle_for(&self) -> Option<Duration> {
        let count = self.count();
        (count.active == 0).then(|| count.last.elapsed())
    }

    /// Whether nothing can begin any more.
    pub fn is_closed(&self) -> bool {
        self.count().closed
    }

    /// Closes, whatever is going on; false if it was closed already.
    pub fn close(&self) -> bool {
        !std::mem::replace(&mut self.count().closed, true)
    }

    /// Closes if nothing has been going on for `limit`; whether it is closed.
    pub fn close_if_idle(&self, limit: Duration) -> bool {
        let mut count = self.count();
        if count.active == 0 && count.last.elapsed() >= limit {
            count.closed = true;
        }
        count.closed
    }
}
