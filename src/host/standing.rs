//! What the processes of a sandbox do, and what keeps them from running.
//!
//! Only whoever has the sandbox for a change changes this (`pausing.rs`, `phases.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::now_ms;
use crate::process::Standstill;
use crate::threads::lock::{Mutex, lock};

/// What the processes of a sandbox do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SandboxState {
    Running,
    /// They stand still, in memory.
    Paused,
    /// There are none.
    Stopped,
}

impl SandboxState {
    pub const ALL: [Self; 3] = [Self::Running, Self::Paused, Self::Stopped];

    /// The word for programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
        }
    }
}

/// What the processes of a sandbox do in one phase of its life. Only whoever has the sandbox for a change changes this.
pub(super) struct Pausing(Mutex<Current>);

struct Current {
    /// What stands still; `None` while the sandbox runs.
    still: Option<Still>,
    /// Milliseconds since 1970.
    since_ms: u64,
    /// The same by the clock that nobody sets, and how long it was so already then.
    since: Instant,
    before: Duration,
}

/// What keeps processes from running.
#[derive(Clone)]
pub(super) enum Still {
    /// The freezer of the cgroup.
    Frozen,
    /// They were sent SIGSTOP. Locked by whoever has the sandbox for a change.
    Stopped(Arc<Mutex<Standstill>>),
}

impl Pausing {
    /// A phase that began at this time, in milliseconds since 1970.
    pub(super) fn new(since_ms: u64) -> Self {
        Self(Mutex::new(Current {
            still: None,
            since_ms,
            since: Instant::now(),
            before: Duration::from_millis(now_ms().saturating_sub(since_ms)),
        }))
    }

    /// What stands still; `None` while the sandbox runs.
    pub(super) fn still(&self) -> Option<Still> {
        lock(&self.0).still.clone()
    }

    /// Whether processes were stopped by signals.
    pub(super) fn is_by_signals(&self) -> bool {
        matches!(lock(&self.0).still, Some(Still::Stopped(_)))
    }

    /// Since when this is so, in milliseconds since 1970.
    pub(super) fn since_ms(&self) -> u64 {
        lock(&self.0).since_ms
    }

    /// How long this is so, whatever happened to the clock on the wall meanwhile.
    pub(super) fn lasts(&self) -> Duration {
        let current = lock(&self.0);
        current.before + current.since.elapsed()
    }

    /// From here on this stands still, or nothing.
    pub(super) fn set(&self, still: Option<Still>) {
        let new = Current {
            still,
            since_ms: now_ms(),
            since: Instant::now(),
            before: Duration::ZERO,
        };
        let former = std::mem::replace(&mut *lock(&self.0), new);
        // Not under the lock: what stood still lets searches go on, under theirs.
        drop(former);
    }
}
