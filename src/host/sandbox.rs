//! One sandbox and its settings.
//!
//! Its [`Workspace`] knows what runs in it; the table of the host knows whether it still exists.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::command::EnvironmentChange;
use crate::error::Result;
use crate::posture::Posture;
use crate::sys::User;
use crate::workspace::Workspace;

/// The settings that a client chooses for new sandboxes.
#[derive(Debug, Clone, Default)]
pub struct SandboxSpec {
    /// Variables that are added to the environment of every command.
    pub environment: Arc<[EnvironmentChange]>,
    /// Idle time after which the sandbox is evicted; `None` means never.
    pub idle_timeout: Option<Duration>,
    /// Most processes and threads at once.
    pub max_processes: Option<u64>,
    /// Most bytes of data of each process (`RLIMIT_DATA`); `None` means no limit.
    pub max_memory: Option<u64>,
    /// What its commands reach over the network; `None` for the host's default.
    pub network: Option<Posture>,
}

/// A sandbox.
pub struct Sandbox {
    /// The id: 24 hex digits.
    pub id: String,
    /// Counts sandboxes in the order of their creation.
    pub(super) number: u64,
    /// The user of its commands.
    pub user: User,
    /// The path of its home.
    pub home: PathBuf,
    /// Milliseconds since 1970.
    pub created_at_ms: u64,
    /// Idle time after which it is evicted; `None` means never.
    pub idle_timeout: Option<Duration>,
    /// Most processes and threads at once.
    pub max_processes: u64,
    /// Most bytes of data of each process; `None` means no limit.
    pub max_memory: Option<u64>,
    /// What its commands reach over the network.
    pub network: Posture,
    pub(super) workspace: Arc<Workspace>,
}

impl Sandbox {
    /// Bytes that its home takes on the disk; `None` if it has too many files. Walks through the home.
    ///
    /// # Errors
    /// The home cannot be read.
    pub fn disk_bytes(&self) -> Result<Option<u64>> {
        self.workspace.files()?.disk_bytes()
    }
}
