//! One sandbox, and what it was asked to be.
//!
//! What is going on in it is its workspace's; whether it is there is the table's.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::command::EnvironmentChange;
use crate::error::Result;
use crate::sys::User;
use crate::workspace::Workspace;

/// What sandboxes are to be like.
#[derive(Debug, Clone, Default)]
pub struct Wish {
    /// What their commands find in their environment besides.
    pub environment: Arc<[EnvironmentChange]>,
    /// How long one may be idle; none is for ever.
    pub idle_timeout: Option<Duration>,
    /// Most processes and threads at once.
    pub max_processes: Option<u64>,
    /// Most bytes of data of each process.
    pub max_memory: Option<u64>,
}

/// A sandbox.
pub struct Sandbox {
    pub(super) id: String,
    /// In the order in which they are made.
    pub(super) number: u64,
    pub(super) user: User,
    pub(super) home: PathBuf,
    pub(super) created_at_ms: u64,
    pub(super) idle_timeout: Option<Duration>,
    pub(super) max_processes: u64,
    pub(super) max_memory: Option<u64>,
    pub(super) workspace: Arc<Workspace>,
}

impl Sandbox {
    /// The name under which it is known.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Who its commands are.
    pub fn user(&self) -> User {
        self.user
    }

    /// Where it lives.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// Milliseconds since 1970.
    pub fn created_at_ms(&self) -> u64 {
        self.created_at_ms
    }

    /// How long it may be idle.
    pub fn idle_timeout(&self) -> Option<Duration> {
        self.idle_timeout
    }

    /// Most processes and threads at once.
    pub fn max_processes(&self) -> u64 {
        self.max_processes
    }

    /// What its home takes on the disk, in bytes; none if it has too many files. Costs a walk through
    /// it.
    ///
    /// # Errors
    /// It cannot be walked through.
    pub fn disk_bytes(&self) -> Result<Option<u64>> {
        self.workspace.files()?.disk_bytes()
    }

    /// Most bytes of data of each process.
    pub fn max_memory(&self) -> Option<u64> {
        self.max_memory
    }
}
