//! What a request acts on: files under a root, commands under a confinement, processes in a
//! registry, servers behind ports.
//!
//! A handler is given a [`Lease`] and never asks what kind of workspace it has: what differs between
//! kinds is inside the root, the confinement and the ports. The lease counts as activity while it
//! lives, so nothing is ended for idleness in the middle of a request, a stream or a transfer.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::activity::Activity;
use crate::confine::Confinement;
use crate::error::{Error, Kind, Result};
use crate::files::{Files, Root};
use crate::ports::Ports;
use crate::process::registry::{Registry, Shared};

/// One place where commands run and files live.
pub struct Workspace {
    root: Root,
    /// How its commands are started.
    pub confinement: Confinement,
    /// Its processes.
    pub processes: Arc<Registry>,
    /// What listens there.
    pub ports: Arc<Ports>,
    activity: Arc<Activity>,
}

impl Workspace {
    /// A workspace with no processes.
    pub fn new(
        root: Root,
        confinement: Confinement,
        ports: Arc<Ports>,
        shared: Arc<Shared>,
    ) -> Arc<Self> {
        let activity = Arc::new(Activity::new());
        let processes = Registry::new(shared, Arc::clone(&activity));
        Arc::new(Self {
            root,
            confinement,
            processes,
            ports,
            activity,
        })
    }

    /// The right to work here.
    ///
    /// # Errors
    /// The workspace is ending.
    pub fn lease(self: &Arc<Self>) -> Result<Lease> {
        if !self.activity.begin_unless_closed() {
            return Err(Error::new(Kind::ShuttingDown, "the sandbox is ending"));
        }
        Ok(Lease {
            workspace: Arc::clone(self),
        })
    }

    /// Its files, for this thread, which is to them who they belong to until the value is dropped.
    ///
    /// # Errors
    /// The server may not act as the owner.
    pub fn files(&self) -> Result<Files<'_>> {
        self.root.files()
    }

    /// How long nothing has been going on; `None` while something is.
    pub fn idle_for(&self) -> Option<Duration> {
        self.activity.idle_for()
    }

    /// Whether what was done to its files is still there.
    ///
    /// # Errors
    /// The workspace has ended in the meantime, and its files with it.
    pub fn check_open(&self) -> Result<()> {
        if self.activity.is_closed() {
            let text = "the sandbox was deleted before this was done";
            return Err(Error::new(Kind::NotFound, text));
        }
        Ok(())
    }

    /// Ends the workspace: no lease is given and nothing is started afterwards.
    pub fn close(&self) {
        self.activity.close();
        self.processes.close();
        self.ports.close();
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
