//! What a request acts on: files under a root, commands under a confinement, processes in a
//! registry.
//!
//! A handler is given a [`Lease`] and never asks what kind of workspace it has: what differs between
//! kinds is inside the root and the confinement. The lease counts as activity while it lives, so
//! nothing is ended for idleness in the middle of a request, a stream or a transfer.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::confine::Confinement;
use crate::error::{Error, Kind, Result};
use crate::files::Root;
use crate::process::registry::{Registry, Shared};

/// One place where commands run and files live.
pub struct Workspace {
    /// Its files.
    pub root: Root,
    /// How its commands are started.
    pub confinement: Confinement,
    /// Its processes.
    pub processes: Arc<Registry>,
    activity: Arc<Activity>,
}

impl Workspace {
    /// A workspace with no processes.
    pub fn new(root: Root, confinement: Confinement, shared: Arc<Shared>) -> Arc<Self> {
        let activity = Arc::new(Activity::new());
        let processes = Registry::new(shared, Arc::clone(&activity));
        Arc::new(Self {
            root,
            confinement,
            processes,
            activity,
        })
    }

    /// The right to work here.
    ///
    /// # Errors
    /// The workspace is ending.
    pub fn lease(self: &Arc<Self>) -> Result<Lease> {
        if !self.activity.begin_unless_closed() {
            return Err(Error::new(Kind::ShuttingDown, "the server is ending"));
        }
        Ok(Lease {
            workspace: Arc::clone(self),
        })
    }

    /// How long nothing has been going on; `None` while something is.
    pub fn idle_for(&self) -> Option<Duration> {
        self.activity.idle_for()
    }

    /// Ends the workspace if nothing has been going on for `limit`; no lease is given afterwards.
    pub fn close_if_idle(&self, limit: Duration) -> bool {
        self.activity.close_if_idle(limit)
    }
}

/// A workspace in use.
pub struct Lease {
    workspace: Arc<Workspace>,
}

impl Deref for Lease {
    type Target = Workspace;

    fn deref(&self) -> &Workspace {
        &self.workspace
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.workspace.activity.end();
    }
}

/// Counts what is going on in a workspace: leases and running processes.
pub struct Activity(Mutex<Count>);

struct Count {
    active: usize,
    last: Instant,
    closed: bool,
}

impl Activity {
    fn new() -> Self {
        Self(Mutex::new(Count {
            active: 0,
            last: Instant::now(),
            closed: false,
        }))
    }

    fn count(&self) -> std::sync::MutexGuard<'_, Count> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something begins (inside a lease, so the workspace cannot be closed).
    pub fn begin(&self) {
        self.count().active += 1;
    }

    fn begin_unless_closed(&self) -> bool {
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

    fn idle_for(&self) -> Option<Duration> {
        let count = self.count();
        (count.active == 0).then(|| count.last.elapsed())
    }

    fn close_if_idle(&self, limit: Duration) -> bool {
        let mut count = self.count();
        if count.active == 0 && count.last.elapsed() >= limit {
            count.closed = true;
        }
        count.closed
    }
}
