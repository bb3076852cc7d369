//! The machine that the server serves, as one sandbox or as a host of many. It decides when the server
//! has been idle for too long, and ends everything in the right order.

use std::ffi::OsString;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::codec::table::Table;
use crate::config::{Config, Secret};
use crate::confine::Confinement;
use crate::egress::{Egress, Exits};
use crate::error::{Error, Kind, Result};
use crate::files::{Disk, Root};
use crate::host::Host;
use crate::http::slots::ConnectionSlots;
use crate::interpreter::ContextsSettings;
use crate::limits::activity::IdleBy;
use crate::limits::ledger::{Budget, Ledger};
use crate::limits::memory;
use crate::ports::Ports;
use crate::process::registry::Shared;
use crate::sys::{self, proc::process_limit};
use crate::threads::Thread;
use crate::threads::lock::{Mutex, lock};
use crate::workspace::{Lease, Needs, Workspace};

/// Time between SIGTERM and SIGKILL for processes when the server ends.
const GRACE: Duration = Duration::from_secs(5);

/// How often a busy server checks whether it is idle. It ends late by at most this much.
const BUSY_CHECK: Duration = Duration::from_secs(2);

/// What a quiet connection takes, in the kernel too: a thread, the used part of its stack, a socket.
const CONNECTION_BYTES: u64 = 32 * 1024;

/// Descriptors of the server for each connection of a host: its socket, and what its request opens.
const CONNECTION_DESCRIPTORS: u64 = 8;

/// Connections that a host serves, however few descriptors and threads it may have.
const LEAST_CONNECTIONS: u64 = 16;

/// The id of a machine that is the only sandbox, at doors where sandboxes have ids.
pub const MACHINE_ID: &str = "machine";

/// The machine, in one of its two modes.
pub struct Machine {
    kind: MachineKind,
    started: Instant,
    idle_timeout: Option<Duration>,
    /// Silence on a stream after which a ping is due.
    pub ping_interval: Duration,
    /// The kernel's Landlock ABI, 0 without Landlock.
    pub landlock_abi: u32,
    shared: Arc<Shared>,
    /// What a client has written on a machine that is the only sandbox, to find it by.
    labels: Mutex<Table<String, String>>,
    /// What requests about no workspace are charged to.
    pub operator: Arc<Ledger>,
    /// The open connections.
    pub slots: ConnectionSlots,
    /// Where filtered connections of commands leave.
    pub egress: Arc<Egress>,
}

/// How many connections there can be. On a host they leave descriptors and threads to the operator, whatever sandboxes do
/// with theirs; a machine that is the only sandbox keeps nobody out but itself.
fn most_connections(config: &Config, memory: u64) -> usize {
    let mut most = memory / 8 / CONNECTION_BYTES;
    if config.host.is_some() {
        // The soft limit is raised to it later.
        let descriptors = sys::limits(libc::RLIMIT_NOFILE).rlim_max;
        let threads = process_limit().unwrap_or(u64::MAX);
        let bound = (descriptors / CONNECTION_DESCRIPTORS).min(threads / 2);
        most = most.min(bound.max(LEAST_CONNECTIONS));
    }
    config
        .max_connections
        .min(usize::try_from(most).unwrap_or(usize::MAX))
}

enum MachineKind {
    /// The machine is one sandbox.
    Dedicated(Arc<Workspace>),
    /// The machine holds many sandboxes.
    Host(Arc<Host>),
}

use MachineKind::{Dedicated, Host as Many};

/// The workspace that a request is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// The machine itself, in dedicated mode.
    Machine,
    /// The sandbox of this id.
    Sandbox(&'a str),
}

impl Machine {
    /// Sets up the workspace or the host. Commands of a dedicated machine get `environment`.
    ///
    /// # Errors
    /// No thread, descriptor or working directory; or the machine cannot hold sandboxes.
    pub fn new(config: &Config, environment: Vec<(OsString, OsString)>) -> Result<Self> {
        // Of the available memory, requests hold at most a half, logs and connections an eighth each. The
        // rest is for the kernel's buffers and for what is freed and not given back.
        let memory = memory::limit();
        let budget = Budget::new(memory / 2);
        let most = usize::try_from(memory / 8).unwrap_or(usize::MAX);
        let shared = Shared::new(config.log_bytes.min(most), config.log_total_bytes.min(most))?;
        let most_connections = most_connections(config, memory);
        let slots = ConnectionSlots::new(most_connections, Arc::clone(&budget));
        let egress = Egress::new(slots.clone());
        let contexts = ContextsSettings {
            #[cfg(feature = "interpreter")]
            most: config.contexts,
            #[cfg(feature = "interpreter")]
            journal_bytes: config.log_bytes.min(most),
        };
        let kind = if let Some(settings) = &config.host {
            let path = environment.iter().find(|(name, _)| name == "PATH");
            let search = path.map(|(_, value)| value.as_os_str());
            let host = Host::new(
                settings,
                search,
                config.network.clone(),
                Arc::clone(&egress),
                Arc::clone(&shared),
                Arc::clone(&budget),
                contexts,
            )?;
            let own = Arc::clone(&host);
            Thread::new("maintenance")
                .essential()
                .start(move || own.run_maintenance())
                .map_err(|error| Error::io("cannot start the maintenance of sandboxes", &error))?;
            Many(host)
        } else {
            let directory = std::env::current_dir()
                .map_err(|error| Error::io("cannot find the working directory", &error))?;
            let root = Root::machine(&directory)?;
            let ledger = budget.whole();
            let exits = Exits::new(Arc::clone(&egress), Arc::clone(&ledger), None);
            let network = config.network.clone();
            let confinement = Confinement::dedicated(environment, directory, network, exits)?;
            let shared = Arc::clone(&shared);
            let ports = Ports::machine();
            Dedicated(Workspace::new(
                root,
                confinement,
                ports,
                shared,
                ledger,
                contexts,
            ))
        };
        Ok(Self {
            kind,
            started: Instant::now(),
            idle_timeout: config.idle_timeout,
            ping_interval: config.ping_interval,
            landlock_abi: sys::landlock_abi(),
            shared,
            labels: Mutex::default(),
            operator: budget.whole(),
            slots,
            egress,
        })
    }

    /// Begins work in a workspace, which lasts as long as the lease.
    ///
    /// # Errors
    /// `NotFound` if there is no such workspace, `ShuttingDown` if it is ending, `Stopped` if it needs processes and the
    /// sandbox has none; those of starting it.
    pub fn lease(&self, scope: Scope<'_>, needs: Needs) -> Result<Lease> {
        match (&self.kind, scope) {
            (Dedicated(workspace), Scope::Machine) => workspace.lease(),
            (Many(host), Scope::Sandbox(id)) => host.lease(id, needs),
            _ => Err(self.wrong_mode()),
        }
    }

    /// The ledger of a sandbox; `None` if there is no such sandbox.
    pub fn ledger_of(&self, sandbox: &str) -> Option<Arc<Ledger>> {
        self.as_host()?.ledger_of(sandbox)
    }

    /// The ledger of the sandbox that has this uid.
    pub fn ledger_of_user(&self, uid: u32) -> Option<Arc<Ledger>> {
        self.as_host()?.ledger_of_user(uid)
    }

    /// What a client has written on a machine that is the only sandbox.
    pub fn labels(&self) -> Table<String, String> {
        lock(&self.labels).clone()
    }

    /// Writes this on a machine that is the only sandbox, in place of what was there.
    pub fn set_labels(&self, labels: Table<String, String>) {
        *lock(&self.labels) = labels;
    }

    /// Whether there is a sandbox with this id.
    pub fn has_sandbox(&self, id: &str) -> bool {
        match &self.kind {
            Dedicated(_) => id == MACHINE_ID,
            Many(host) => host.find(id).is_ok(),
        }
    }

    /// Checks that workspaces of this scope exist in the server's mode.
    ///
    /// # Errors
    /// `NotFound`, with the routes of the mode.
    pub fn check(&self, scope: Scope<'_>) -> Result<()> {
        match (&self.kind, scope) {
            (Dedicated(_), Scope::Machine) | (Many(_), Scope::Sandbox(_)) => Ok(()),
            _ => Err(self.wrong_mode()),
        }
    }

    /// The host of sandboxes.
    ///
    /// # Errors
    /// `NotFound` if the machine is dedicated.
    pub fn host(&self) -> Result<&Host> {
        self.as_host().ok_or_else(|| self.wrong_mode())
    }

    /// The host of sandboxes, for what outlives a request.
    ///
    /// # Errors
    /// `NotFound` if the machine is dedicated.
    #[cfg(all(feature = "e2b", feature = "file-tools"))]
    pub fn shared_host(&self) -> Result<&Arc<Host>> {
        match &self.kind {
            Dedicated(_) => Err(self.wrong_mode()),
            Many(host) => Ok(host),
        }
    }

    /// The host of sandboxes; `None` if the machine is dedicated.
    fn as_host(&self) -> Option<&Host> {
        match &self.kind {
            Dedicated(_) => None,
            Many(host) => Some(host),
        }
    }

    /// Takes over the sandboxes of an earlier server. Call it once, before the first request.
    ///
    /// # Errors
    /// As [`Host::take_over`].
    pub fn take_over(&self) -> Result<()> {
        match &self.kind {
            Dedicated(_) => Ok(()),
            Many(host) => host.take_over(),
        }
    }

    /// The server ends because it was idle: there is nothing to end, and on a host something to write down.
    pub fn end_idle(&self) {
        if let Some(host) = self.as_host() {
            host.shut_down();
        }
    }

    /// The key that the tokens of sandboxes are derived with; `None` if that is the host token.
    ///
    /// # Errors
    /// `System`: it can neither be read nor written.
    pub fn token_key(&self, token: Option<&Secret>) -> Result<Option<Secret>> {
        self.as_host()
            .map_or(Ok(None), |host| host.token_key(token))
    }

    /// The error for a scope that the mode does not have.
    fn wrong_mode(&self) -> Error {
        let text = match &self.kind {
            Dedicated(_) => {
                "there are no sandboxes here: this server is in dedicated mode, where the whole machine is one; use \
                 /v1/exec, /v1/files and /v1/processes"
            }
            Many(_) => {
                "the machine itself cannot be used here: this server is in host mode, where each sandbox has its own \
                 /v1/sandboxes/{id}/exec, /files and /processes"
            }
        };
        Error::new(Kind::NotFound, text)
    }

    /// The name of the mode.
    pub fn mode(&self) -> &'static str {
        match &self.kind {
            Dedicated(_) => "dedicated",
            Many(_) => "host",
        }
    }

    /// The layers of confinement around each sandbox.
    pub fn layers(&self) -> Vec<&'static str> {
        self.as_host().map_or_else(Vec::new, Host::layers)
    }

    /// The isolation of sandboxes that choose none; `None` if there are no sandboxes.
    pub fn default_isolation(&self) -> Option<&'static str> {
        self.as_host().map(|host| host.default_isolation().name())
    }

    /// The kinds of isolation that a new sandbox can have.
    pub fn isolations(&self) -> Vec<&'static str> {
        self.as_host().map_or_else(Vec::new, Host::isolations)
    }

    /// The names of what roots of sandboxes can be made of.
    pub fn templates(&self) -> Vec<String> {
        self.as_host().map_or_else(Vec::new, Host::templates)
    }

    /// Those of them that the operator has named.
    pub fn given_templates(&self) -> Vec<String> {
        self.as_host().map_or_else(Vec::new, Host::given_templates)
    }

    /// The template of roots of sandboxes that choose nothing.
    pub fn default_template(&self) -> Option<&str> {
        self.as_host().and_then(Host::default_template)
    }

    /// Why sandboxes of a host cannot have roots of their own; `None` if they can.
    pub fn lack_of_roots(&self) -> Option<String> {
        self.as_host().and_then(Host::lack_of_roots)
    }

    /// The names of the limits that a sandbox as a whole can have here.
    pub fn limits(&self) -> Vec<&'static str> {
        self.as_host().map_or_else(Vec::new, Host::limits)
    }

    /// The names of the network policies that commands can have here.
    pub fn network_policies(&self) -> Vec<&'static str> {
        match &self.kind {
            Dedicated(workspace) => workspace.network_policies(),
            Many(host) => host.network_policies(),
        }
    }

    /// The number of sandboxes.
    pub fn sandboxes(&self) -> usize {
        self.as_host().map_or(0, Host::count)
    }

    /// The number of running commands.
    pub fn processes_running(&self) -> usize {
        match &self.kind {
            Dedicated(workspace) => workspace.processes.count_running(),
            Many(host) => host.processes_running(),
        }
    }

    /// Bytes of output in the logs.
    pub fn log_bytes(&self) -> usize {
        self.shared.log_bytes_kept()
    }

    /// The disk that files are written to; `None` if the kernel does not say.
    pub fn disk(&self) -> Option<Disk> {
        match &self.kind {
            Dedicated(workspace) => workspace.files().ok()?.disk(),
            Many(host) => host.disk(),
        }
    }

    /// Time since the start.
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// How long the machine has been idle; `None` while it is not. A host is idle without sandboxes.
    fn idle_for(&self) -> Option<Duration> {
        match &self.kind {
            Dedicated(workspace) => workspace.idle_for(IdleBy::Work),
            Many(host) => host.empty_for(),
        }
    }

    /// When to ask [`Machine::has_idled_out`] again; `None` means never.
    pub fn next_idle_check(&self) -> Option<Duration> {
        let limit = self.idle_timeout?;
        // A busy machine may become idle at any time, so it is checked at intervals.
        Some(
            self.idle_for()
                .map_or(limit.min(BUSY_CHECK), |idle| limit.saturating_sub(idle)),
        )
    }

    /// Whether the machine has been idle for the idle timeout. If so, it accepts no more work.
    pub fn has_idled_out(&self) -> bool {
        self.idle_timeout.is_some_and(|limit| match &self.kind {
            Dedicated(workspace) => workspace.close_if_idle(IdleBy::Work, limit),
            Many(host) => host.close_if_empty(limit),
        })
    }

    /// Ends all known processes and their descendants. `init` ends what finished commands left behind.
    pub fn shut_down(&self) {
        match &self.kind {
            Dedicated(workspace) => workspace.processes.shut_down(GRACE),
            Many(host) => host.shut_down(),
        }
    }

    /// Waits, at most for `limit`, until open streams have sent their last events.
    pub fn wait_for_streams(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let busy = || match &self.kind {
            Dedicated(workspace) => workspace.idle_for(IdleBy::Work).is_none(),
            Many(host) => host.is_busy(),
        };
        while busy() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
    }
}
