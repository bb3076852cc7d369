//! One sandbox and its settings.
//!
//! A value stands for one run of it, or for the time between two: what it keeps meanwhile is [`Lasting`]. Its
//! [`Workspace`] knows what runs in it; the table of the host knows whether it still exists, and replaces the value when
//! it stops or starts. So nothing of one run can meet the processes of another.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::pausing::Pausing;
use super::records::{Record, RecordFile};
use super::tcp_ports::PortLease;
use crate::clock::now_ms;
use crate::confine::{GrantedPaths, IN_MEMORY, Limits, MemoryDisk, Namespaces, Policy};
use crate::error::Result;
use crate::limits::ledger::Ledger;
use crate::logging;
use crate::process::Reason;
use crate::spec::isolation::Isolation;
use crate::spec::network::NetworkPolicy;
use crate::spec::sandbox::{Phase, SandboxSpec, StopCause};
use crate::sys::User;
use crate::threads::lock::{Mutex, lock};
use crate::workspace::Workspace;

/// The end of a sandbox's life.
#[derive(Debug, Clone, Copy)]
pub struct Expiry {
    at: Instant,
    /// Milliseconds since 1970.
    pub at_ms: u64,
}

impl Expiry {
    /// After this time. `None` for one that no clock can show.
    pub fn after(lifetime: Duration) -> Option<Self> {
        let at_ms = now_ms() + u64::try_from(lifetime.as_millis()).ok()?;
        Some(Self {
            at: Instant::now().checked_add(lifetime)?,
            at_ms,
        })
    }

    /// At this time of the clock on the wall, in milliseconds since 1970.
    pub(super) fn at_ms(at_ms: u64) -> Option<Self> {
        let left = Duration::from_millis(at_ms.saturating_sub(now_ms()));
        let at = Instant::now().checked_add(left)?;
        Some(Self { at, at_ms })
    }
}

/// Whether a sandbox is being deleted.
pub(super) struct IsEnding(pub(super) bool);

/// What a sandbox keeps from its creation to its deletion, through stops and restarts of the server.
pub struct Lasting {
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
    /// What was chosen at its creation, with the defaults of that time.
    pub spec: Arc<SandboxSpec>,
    /// When it is deleted, whatever runs in it; `None` means never.
    pub(super) expiry: Mutex<Option<Expiry>>,
    /// The phase that is written down, or about to be.
    pub(super) current: Mutex<Phase>,
    /// Its token, once somebody has asked whose a token is.
    pub(super) token: OnceLock<String>,
    pub(super) ports: PortLease,
    /// What is held for its clients and its processes.
    pub(super) ledger: Arc<Ledger>,
    /// Where it is written down.
    pub(super) file: Arc<RecordFile>,
}

/// A sandbox during one phase of its life.
pub struct Sandbox {
    pub(super) lasting: Arc<Lasting>,
    pub phase: Phase,
    /// Its limits as a whole.
    pub limits: Arc<Limits>,
    /// Paths that its commands reach besides those of all sandboxes.
    pub(super) granted: Arc<GrantedPaths>,
    pub(super) policy: Arc<Policy>,
    /// `None` if its commands have the machine's.
    pub(super) namespaces: Option<Arc<Namespaces>>,
    /// Whether the log says that its namespaces are lost.
    pub(super) is_loss_known: AtomicBool,
    /// Whether it is being deleted: its user may soon be another sandbox's. Held while the watchdog or a pause
    /// signals the user.
    pub(super) is_ending: Mutex<IsEnding>,
    pub(super) pausing: Pausing,
    pub(super) workspace: Arc<Workspace>,
}

impl Deref for Sandbox {
    type Target = Lasting;

    fn deref(&self) -> &Lasting {
        &self.lasting
    }
}

impl Lasting {
    /// Counts sandboxes in the order of their creation.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Its token, which `derive` makes of its id the first time.
    pub fn token(&self, derive: impl FnOnce(&str) -> String) -> &str {
        self.token.get_or_init(|| derive(&self.id))
    }

    /// When it is deleted, whatever runs in it; `None` means never.
    pub fn expiry(&self) -> Option<Expiry> {
        *lock(&self.expiry)
    }

    /// What is written down of it.
    pub(super) fn record(&self, phase: Phase) -> Record {
        Record {
            id: self.id.clone(),
            number: self.number,
            uid: self.user.uid,
            created_at_ms: self.created_at_ms,
            expires_at_ms: self.expiry().map(|expiry| expiry.at_ms),
            phase,
            tcp_ports: self.ports.machine_ports(),
            spec: Arc::clone(&self.spec),
        }
    }

    /// What surrounds its commands.
    pub fn isolation(&self) -> Isolation {
        self.spec.isolation.unwrap_or_default()
    }

    /// Most processes and threads at once.
    pub fn max_processes(&self) -> u64 {
        self.spec.max_processes.unwrap_or(u64::MAX)
    }

    /// What its commands reach over the network.
    pub fn network(&self) -> &NetworkPolicy {
        self.spec.network.as_ref().unwrap_or(&NetworkPolicy::Open)
    }

    /// Ends it after this time from now.
    pub(super) fn set_lifetime(&self, lifetime: Duration) {
        *lock(&self.expiry) = Expiry::after(lifetime);
    }

    /// Ends it no earlier than after this time from now. One that has no end keeps none. Returns whether that is a change.
    pub(super) fn extend_lifetime(&self, least: Duration) -> bool {
        if let Some(expiry) = &mut *lock(&self.expiry)
            && let Some(later) = Expiry::after(least)
            && later.at > expiry.at
        {
            *expiry = later;
            return true;
        }
        false
    }

    /// Whether its time is over.
    pub(super) fn has_expired(&self) -> bool {
        self.expiry()
            .is_some_and(|expiry| expiry.at <= Instant::now())
    }
}

impl Sandbox {
    /// How long it may be idle; `None` for any time. Stopped on purpose it waits for as long as it takes.
    pub(super) fn idle_limit(&self) -> Option<Duration> {
        let is_waiting = |cause: StopCause| !cause.is_accident();
        let limit = self.spec.idle_timeout;
        limit.filter(|_| !self.phase.stopped.is_some_and(is_waiting))
    }

    /// The TCP ports that its commands can listen on.
    pub fn tcp_ports(&self) -> &[u16] {
        self.ports.ports()
    }

    /// The paths that its commands can read, and not change.
    pub fn read_only_paths(&self) -> Vec<String> {
        let system = self.policy.paths(false).map(str::to_owned);
        system
            .chain(self.granted.read_only.iter().cloned())
            .collect()
    }

    /// The paths that its commands can change, the home first.
    pub fn read_write_paths(&self) -> Vec<String> {
        let home = self.home.to_string_lossy().into_owned();
        let devices = self.policy.paths(true).map(str::to_owned);
        let granted = self.granted.read_write.iter().cloned();
        let has_own = self.isolation() == Isolation::Namespaces;
        let own = IN_MEMORY.into_iter().filter(|_| has_own).map(str::to_owned);
        let all = [home].into_iter().chain(granted).chain(own);
        all.chain(devices).collect()
    }

    /// What surrounds its commands.
    pub fn isolation(&self) -> Isolation {
        self.spec.isolation.unwrap_or_default()
    }

    /// The isolation layers that it has.
    pub fn layers(&self) -> Vec<&'static str> {
        let mut layers = self.policy.layers(self.namespaces.as_deref());
        layers.extend(self.limits.layers());
        layers
    }

    /// Ends its namespaces, and with them all of its processes; false if it has none.
    pub(super) fn end_namespaces(&self, reason: Reason) -> bool {
        if let Some(namespaces) = &self.namespaces {
            self.workspace.processes.expect_kill(reason);
            namespaces.end();
        }
        self.namespaces.is_some()
    }

    /// The file systems in memory that it has of its own.
    pub(super) fn disks(&self) -> Vec<MemoryDisk> {
        let namespaces = self.namespaces.iter();
        namespaces.flat_map(|own| own.disks()).collect()
    }

    /// Whether its namespaces exist.
    pub(super) fn has_namespaces(&self) -> bool {
        self.namespaces.as_ref().is_some_and(|own| own.are_alive())
    }

    /// Tells in the log, once, when something has ended its namespaces.
    pub(super) fn report_loss(&self) {
        let is_lost = self.namespaces.is_some() && !self.has_namespaces();
        if is_lost && !self.is_loss_known.swap(true, Ordering::Relaxed) {
            let id = &self.id;
            logging::info(format_args!(
                "sandbox {id} is lost: the first process of its namespaces has ended; it takes no commands any more"
            ));
        }
    }

    /// What programs find missing: writing to `/tmp`, shared memory, TCP ports of their choice.
    pub fn restrictions(&self) -> Vec<&'static str> {
        let abi = self.policy.landlock_abi();
        let mut writable = self.granted.read_write.iter();
        let has_tmp = writable.any(|path| path == "/tmp");
        let has_own = self.isolation() == Isolation::Namespaces;
        let has_network = self.isolation().owns_network(self.network());
        let restrictions = [
            ("tmp", abi >= 1 && !has_tmp && !has_own),
            ("shm", abi >= 1 && !has_own),
            ("tcp_bind", abi >= 4 && !has_network),
        ];
        let holding = restrictions.into_iter().filter(|(_, holds)| *holds);
        holding.map(|(name, _)| name).collect()
    }

    /// Bytes that its home takes on the disk; `None` if it has too many files. Walks through the home.
    ///
    /// # Errors
    /// The home cannot be read.
    pub fn disk_bytes(&self) -> Result<Option<u64>> {
        self.workspace.files()?.disk_bytes()
    }
}
