//! The machine as a sandbox: its one workspace, how long it may be idle, how it ends.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::confine::Confinement;
use crate::error::{Error, Result};
use crate::files::Root;
use crate::process::registry::Shared;
use crate::sys;
use crate::workspace::{Lease, Workspace};

/// How long processes have to end by themselves when the server ends.
const GRACE: Duration = Duration::from_secs(5);

/// How often a busy server looks whether it has become idle: by so much it may end late.
const BUSY_CHECK: Duration = Duration::from_secs(2);

/// Everything the server serves.
pub struct Machine {
    workspace: Arc<Workspace>,
    started: Instant,
    idle_timeout: Option<Duration>,
    ping_interval: Duration,
    landlock_abi: u32,
}

impl Machine {
    /// Sets up the workspace; commands will have `environment`.
    ///
    /// # Errors
    /// No thread, no descriptor, no working directory.
    pub fn new(
        config: &Config,
        environment: impl IntoIterator<Item = (std::ffi::OsString, std::ffi::OsString)>,
    ) -> Result<Self> {
        let directory = std::env::current_dir()
            .map_err(|error| Error::io("cannot find the working directory", &error))?;
        let shared = Shared::new(config.log_bytes, config.log_total_bytes)?;
        let confinement = Confinement::dedicated(environment, directory.clone());
        Ok(Self {
            workspace: Workspace::new(Root::machine(Path::new(&directory))?, confinement, shared),
            started: Instant::now(),
            idle_timeout: config.idle_timeout,
            ping_interval: config.ping_interval,
            landlock_abi: sys::landlock_abi(),
        })
    }

    /// The right to work on the machine itself.
    ///
    /// # Errors
    /// The server is ending.
    pub fn lease(&self) -> Result<Lease> {
        self.workspace.lease()
    }

    /// Since the start.
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// The kernel's Landlock ABI, 0 without Landlock.
    pub fn landlock_abi(&self) -> u32 {
        self.landlock_abi
    }

    /// Silence on a stream after which a ping is due.
    pub fn ping_interval(&self) -> Duration {
        self.ping_interval
    }

    /// How long at most until [`Machine::has_idled_out`] can become true; `None` is for ever.
    pub fn next_idle_check(&self) -> Option<Duration> {
        let limit = self.idle_timeout?;
        // While something is going on the whole limit lies ahead, but from when on is not known yet.
        Some(
            self.workspace
                .idle_for()
                .map_or(limit.min(BUSY_CHECK), |idle| limit.saturating_sub(idle)),
        )
    }

    /// Whether nothing has been going on for the idle timeout; then nothing can begin any more.
    pub fn has_idled_out(&self) -> bool {
        self.idle_timeout
            .is_some_and(|limit| self.workspace.close_if_idle(limit))
    }

    /// Ends every process that is known, and what descends from it. What an ended command left behind
    /// is init's to end, see `init`.
    pub fn shut_down(&self) {
        self.workspace.processes.shut_down(GRACE);
    }

    /// Gives the streams that are still open a moment to deliver the ends of their commands.
    pub fn wait_for_streams(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        while self.workspace.idle_for().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
