//! What the server serves: the machine as one sandbox, or as a host of many; how long it may be idle,
//! and how it ends.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::confine::Confinement;
use crate::error::{Error, Kind, Result};
use crate::files::{Disk, Root};
use crate::host::Host;
use crate::memory;
use crate::ports::Ports;
use crate::process::registry::Shared;
use crate::sys;
use crate::workspace::{Lease, Workspace};

/// How long processes have to end by themselves when the server ends.
const GRACE: Duration = Duration::from_secs(5);

/// How often a busy server looks whether it has become idle: by so much it may end late.
const BUSY_CHECK: Duration = Duration::from_secs(2);

/// Everything the server serves.
pub struct Machine {
    kind: MachineKind,
    started: Instant,
    idle_timeout: Option<Duration>,
    ping_interval: Duration,
    landlock_abi: u32,
    shared: Arc<Shared>,
}

enum MachineKind {
    /// It is one sandbox.
    Dedicated(Arc<Workspace>),
    /// It has many.
    Host(Arc<Host>),
}

use MachineKind::{Dedicated, Host as Many};

/// Which workspace a request is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// The machine itself.
    Machine,
    /// The sandbox of this id.
    Sandbox(&'a str),
}

impl Machine {
    /// Sets up the workspace, or the place for many; commands of a dedicated machine will have
    /// `environment`.
    ///
    /// # Errors
    /// No thread, no descriptor, no working directory; or the machine cannot hold sandboxes.
    pub fn new(config: &Config, environment: Vec<(OsString, OsString)>) -> Result<Self> {
        // Where memory is limited, most of it is for work.
        let most = memory::left().map_or(usize::MAX, |left| {
            usize::try_from(left / 4).unwrap_or(usize::MAX)
        });
        let shared = Shared::new(config.log_bytes.min(most), config.log_total_bytes.min(most))?;
        let kind = if let Some(settings) = &config.host {
            let path = environment.iter().find(|(name, _)| name == "PATH");
            let search = path.map(|(_, value)| value.as_os_str());
            let host = Host::new(settings, search, Arc::clone(&shared))?;
            let own = Arc::clone(&host);
            thread::Builder::new()
                .name("caretaker".to_owned())
                .stack_size(256 * 1024)
                .spawn(move || own.look_after())
                .map_err(|error| Error::io("cannot look after sandboxes", &error))?;
            Many(host)
        } else {
            let directory = std::env::current_dir()
                .map_err(|error| Error::io("cannot find the working directory", &error))?;
            let confinement = Confinement::dedicated(environment, directory.clone());
            let root = Root::machine(Path::new(&directory))?;
            let ports = Ports::machine();
            Dedicated(Workspace::new(
                root,
                confinement,
                ports,
                Arc::clone(&shared),
            ))
        };
        Ok(Self {
            kind,
            started: Instant::now(),
            idle_timeout: config.idle_timeout,
            ping_interval: config.ping_interval,
            landlock_abi: sys::landlock_abi(),
            shared,
        })
    }

    /// The right to work in a workspace.
    ///
    /// # Errors
    /// There is none of that scope here, or it is ending.
    pub fn lease(&self, scope: Scope<'_>) -> Result<Lease> {
        match (&self.kind, scope) {
            (Dedicated(workspace), Scope::Machine) => workspace.lease(),
            (Many(host), Scope::Sandbox(id)) => host.lease(id),
            (Dedicated(_), Scope::Sandbox(_)) => Err(no_sandboxes()),
            (Many(_), Scope::Machine) => Err(no_machine()),
        }
    }

    /// Whether it is one sandbox.
    ///
    /// # Errors
    /// It has many.
    pub fn check_dedicated(&self) -> Result<()> {
        match &self.kind {
            Dedicated(_) => Ok(()),
            Many(_) => Err(no_machine()),
        }
    }

    /// Its sandboxes.
    ///
    /// # Errors
    /// It is one.
    pub fn host(&self) -> Result<&Host> {
        match &self.kind {
            Dedicated(_) => Err(no_sandboxes()),
            Many(host) => Ok(host),
        }
    }

    /// The word for what it is.
    pub fn mode(&self) -> &'static str {
        match &self.kind {
            Dedicated(_) => "dedicated",
            Many(_) => "host",
        }
    }

    /// What stands between its sandboxes and everything else.
    pub fn layers(&self) -> Vec<&'static str> {
        match &self.kind {
            Dedicated(_) => Vec::new(),
            Many(host) => host.layers(),
        }
    }

    /// How many sandboxes it has.
    pub fn sandboxes(&self) -> usize {
        match &self.kind {
            Dedicated(_) => 0,
            Many(host) => host.count(),
        }
    }

    /// How many commands run.
    pub fn processes_running(&self) -> usize {
        match &self.kind {
            Dedicated(workspace) => workspace.processes.count_running(),
            Many(host) => host.processes_running(),
        }
    }

    /// Bytes of output that are kept.
    pub fn log_bytes(&self) -> usize {
        self.shared.log_bytes_kept()
    }

    /// The space where files are written.
    pub fn disk(&self) -> Option<Disk> {
        match &self.kind {
            Dedicated(workspace) => workspace.files().ok()?.disk(),
            Many(host) => host.disk(),
        }
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

    /// How long nothing has been going on; none while something is. For a host, that is having
    /// sandboxes.
    fn idle_for(&self) -> Option<Duration> {
        match &self.kind {
            Dedicated(workspace) => workspace.idle_for(),
            Many(host) => host.empty_for(),
        }
    }

    /// How long at most until [`Machine::has_idled_out`] can become true; `None` is for ever.
    pub fn next_idle_check(&self) -> Option<Duration> {
        let limit = self.idle_timeout?;
        // While something is going on the whole limit lies ahead, but from when on is not known yet.
        Some(
            self.idle_for()
                .map_or(limit.min(BUSY_CHECK), |idle| limit.saturating_sub(idle)),
        )
    }

    /// Whether nothing has been going on for the idle timeout; then nothing can begin any more.
    pub fn has_idled_out(&self) -> bool {
        self.idle_timeout.is_some_and(|limit| match &self.kind {
            Dedicated(workspace) => workspace.close_if_idle(limit),
            Many(host) => host.close_if_empty(limit),
        })
    }

    /// Ends every process that is known, and what descends from it. What an ended command left behind
    /// is init's to end, see `init`.
    pub fn shut_down(&self) {
        match &self.kind {
            Dedicated(workspace) => workspace.processes.shut_down(GRACE),
            Many(host) => host.shut_down(),
        }
    }

    /// Gives the streams that are still open a moment to deliver the ends of their commands.
    pub fn wait_for_streams(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let busy = || match &self.kind {
            Dedicated(workspace) => workspace.idle_for().is_none(),
            Many(host) => host.is_busy(),
        };
        while busy() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn no_machine() -> Error {
    Error::new(
        Kind::NotFound,
        "the machine itself cannot be used here: this server is in host mode, where each sandbox has its own \
         /v1/sandboxes/{id}/exec, /files and /processes",
    )
}

fn no_sandboxes() -> Error {
    Error::new(
        Kind::NotFound,
        "there are no sandboxes here: this server is in dedicated mode, where the whole machine is one; use /v1/exec, \
         /v1/files and /v1/processes",
    )
}
