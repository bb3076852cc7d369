//! One sandbox and its settings.
//!
//! A value stands for one run of it, or for the time between two: what it keeps meanwhile is [`Lasting`]. Its
//! [`Workspace`] knows what runs in it; the table of the host knows whether it still exists, and replaces the value when
//! it stops or starts. So nothing of one run can meet the processes of another.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

use super::life::{By, Expiry, Left, Life, SettingsChange, Waker};
use super::records::{Record, RecordFile};
use super::standing::{Pausing, SandboxState};
use super::stopped;
use super::tcp_ports::PortLease;
use crate::client::{Interrupt, Stopped};
use crate::confine::{
    FileIdentity, GrantedPaths, IN_MEMORY, Limits, MemoryDisk, Namespaces, Policy, PrivateRoot,
};
use crate::error::{Error, Kind, Result};
use crate::files::{DiskUse, Root};
use crate::limits::ledger::Ledger;
use crate::logging;
use crate::process::Reason;
use crate::spec::isolation::Isolation;
use crate::spec::network::NetworkPolicy;
use crate::spec::sandbox::{
    LifeRules, Phase, ResourceLimits, RootSpec, SandboxSpec, Settings, StopCause,
};
use crate::sys::paths::open;
use crate::sys::{self, User};
use crate::threads::lock::{Mutex, lock};
use crate::workspace::Workspace;

/// Whether a sandbox is being deleted.
pub(super) struct IsEnding(pub(super) bool);

/// Whether a thread of the maintenance does something with a sandbox, and when the next one may.
#[derive(Default)]
pub(super) struct Turn {
    pub(super) is_taken: bool,
    pub(super) not_before: Option<Instant>,
}

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
    /// What the paths that it was given led to at its creation.
    pub(super) given: Arc<[FileIdentity]>,
    /// What of it has changed since; guards the value alone.
    pub(super) life: Mutex<Life>,
    /// Whether a thread of the maintenance does something with it.
    pub(super) turn: Mutex<Turn>,
    /// The phase that is written down, or about to be.
    pub(super) current: Mutex<Phase>,
    /// Its token, once somebody has asked whose a token is.
    pub(super) token: OnceLock<String>,
    pub(super) ports: PortLease,
    /// The root that it has of its own; set before anybody sees the sandbox.
    pub(super) root: OnceLock<Arc<PrivateRoot>>,
    /// What is held for its clients and its processes.
    pub(super) ledger: Arc<Ledger>,
    /// What its files take on the disk.
    pub(super) disk: DiskUse,
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
    /// Whether it is being deleted: its user may soon be another sandbox's. Held while the watchdog signals the user.
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

    /// What is written down of it.
    pub(super) fn record(&self, phase: Phase) -> Record {
        let life = lock(&self.life);
        let (expires_at_ms, left_ms) = match life.left {
            Left::Unlimited => (None, None),
            Left::Until(expiry) => (Some(expiry.at_ms), None),
            Left::Standing(left) => (None, u64::try_from(left.as_millis()).ok()),
        };
        let settings = life.settings.clone();
        let (rests, stands, is_held) = (life.rests, life.stands, life.is_held);
        drop(life);
        Record {
            id: self.id.clone(),
            number: self.number,
            uid: self.user.uid,
            created_at_ms: self.created_at_ms,
            expires_at_ms,
            left_ms,
            rests,
            stands,
            is_held,
            settings,
            phase,
            tcp_ports: self.ports.machine_ports(),
            spec: Arc::clone(&self.spec),
            given: Arc::clone(&self.given),
        }
    }

    /// What surrounds its commands.
    pub fn isolation(&self) -> Isolation {
        self.spec.isolation.unwrap_or_default()
    }

    /// Most processes and threads at once.
    pub fn max_processes(&self) -> u64 {
        self.resource_limits().processes.unwrap_or(u64::MAX)
    }

    /// What its commands reach over the network.
    pub fn network(&self) -> &NetworkPolicy {
        self.spec.network.as_ref().unwrap_or(&NetworkPolicy::Open)
    }
}

/// What requests change of it. All that changes it is called while nobody else does.
impl Lasting {
    /// What of it can change, as it is now.
    pub fn settings(&self) -> Settings {
        lock(&self.life).settings.clone()
    }

    pub fn rules(&self) -> LifeRules {
        lock(&self.life).settings.rules
    }

    pub fn resource_limits(&self) -> ResourceLimits {
        lock(&self.life).settings.limits
    }

    /// When its time is over; `None` for never, or while it stands still.
    pub fn expiry(&self) -> Option<Expiry> {
        lock(&self.life).expiry()
    }

    /// Whether only the host's token ends its rest.
    pub fn is_held(&self) -> bool {
        lock(&self.life).is_held
    }

    /// Whether somebody has it rest.
    pub(super) fn rests(&self) -> bool {
        lock(&self.life).rests
    }

    /// Whether its time is over.
    pub(super) fn has_expired(&self) -> bool {
        lock(&self.life).is_over()
    }

    /// Whether its time is over, and nothing is to be left of it.
    pub(super) fn is_over(&self) -> bool {
        lock(&self.life).is_to_be_deleted()
    }

    /// Whether nothing is left of its time, even where that stands still.
    pub(super) fn has_ended(&self) -> bool {
        lock(&self.life).has_ended()
    }

    /// Whether it ends earlier than after this time from now.
    pub(super) fn ends_before(&self, least: Duration) -> bool {
        lock(&self.life).ends_before(least)
    }

    /// Whether this would be a change.
    pub(super) fn is_changed_by(&self, change: &SettingsChange) -> bool {
        lock(&self.life).is_changed_by(change)
    }

    /// Whether a rest by this one would change something.
    pub(super) fn may_rest_more(&self, by: By) -> bool {
        lock(&self.life).may_rest_more(by)
    }

    /// Changes it. Returns what it was before.
    pub(super) fn change(&self, change: SettingsChange) -> Life {
        self.with_life(|life| life.change(change))
    }

    /// Gives it this time from now on. Returns what it was before.
    pub(super) fn set_left(&self, time: Duration) -> Life {
        self.with_life(|life| life.set_left(time))
    }

    /// It rests from here on. Returns what it was before, if that is another.
    pub(super) fn begin_rest(&self, by: By) -> Option<Life> {
        let mut is_other = false;
        let before = self.with_life(|life| is_other = life.begin_rest(by));
        is_other.then_some(before)
    }

    /// Its rest is over. Returns what it was before.
    pub(super) fn end_rest(&self, waker: Waker) -> Life {
        self.with_life(|life| life.go_on(waker == Waker::Host))
    }

    /// Takes back a change, before anybody else changes it.
    pub(super) fn take_back(&self, before: Life) {
        *lock(&self.life) = before;
    }

    /// Changes its life. Returns what that was before.
    fn with_life(&self, change: impl FnOnce(&mut Life)) -> Life {
        let mut life = lock(&self.life);
        let before = life.clone();
        change(&mut life);
        before
    }
}

impl Sandbox {
    /// What its processes do, and since when in milliseconds since 1970.
    pub fn state(&self) -> (SandboxState, u64) {
        let state = match self.pausing.still() {
            _ if self.phase.stopped.is_some() => SandboxState::Stopped,
            Some(_) => SandboxState::Paused,
            None => SandboxState::Running,
        };
        (state, self.pausing.since_ms())
    }

    /// Lets go on what a frozen cgroup holds, so that it handles signals.
    pub(super) fn thaw(&self) {
        self.limits.thaw();
    }

    /// Whether this one may have it run, which rests.
    ///
    /// # Errors
    /// `Forbidden`, `Paused`, `Stopped`.
    pub(super) fn check_waker(&self, waker: Waker) -> Result<()> {
        let (id, cause) = (&self.id, self.phase.stopped);
        let may = match waker {
            Waker::Tenant => {
                self.check_not_held()?;
                true
            }
            Waker::Host => true,
            Waker::Request { starts } => {
                // Nor is it one that its time was over meanwhile.
                let is_accident = cause.is_some_and(StopCause::is_accident) && !self.has_ended();
                !self.is_held() && (self.rules().auto_resume || (starts && is_accident))
            }
        };
        match cause {
            _ if may => Ok(()),
            Some(_) => Err(stopped(id)),
            None => {
                let text = format!("sandbox {id} is paused; resume it");
                Err(Error::new(Kind::Paused, text))
            }
        }
    }

    /// # Errors
    /// `Forbidden` if only the host's token ends its rest.
    pub(super) fn check_not_held(&self) -> Result<()> {
        if self.is_held() {
            let id = &self.id;
            let text = format!("sandbox {id} is held: only the host's token changes its rest");
            return Err(Error::new(Kind::Forbidden, text));
        }
        Ok(())
    }

    /// What runs in it, and its files.
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    /// The TCP ports that its commands can listen on.
    pub fn tcp_ports(&self) -> &[u16] {
        self.ports.ports()
    }

    /// Its root, if that is its own: what it is made of, the user of its commands and the first of its ids.
    pub fn own_root(&self) -> Option<(&RootSpec, &str, u32)> {
        let (spec, root) = (self.spec.root.as_ref()?, self.root.get()?);
        Some((spec, root.user(), root.root().uid))
    }

    /// The home as clients know it: inside of a root of its own, else on the machine.
    pub fn shown_home(&self) -> &Path {
        match self.root.get() {
            Some(_) => &self.workspace.home().in_sandbox,
            None => &self.lasting.home,
        }
    }

    /// The paths that its commands can read, and not change.
    pub fn read_only_paths(&self) -> Vec<String> {
        if self.root.get().is_some() {
            return Vec::new();
        }
        let system = self.policy.paths(false).map(str::to_owned);
        system
            .chain(self.granted.read_only.iter().cloned())
            .collect()
    }

    /// The paths that its commands can change, the home first.
    pub fn read_write_paths(&self) -> Vec<String> {
        if self.root.get().is_some() {
            return vec!["/".to_owned()];
        }
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

    /// Its namespaces, if its processes have many users, which are in a root of their own.
    pub(super) fn namespaces_of_many(&self) -> Option<&Arc<Namespaces>> {
        let namespaces = self.namespaces.as_ref();
        namespaces.filter(|_| self.root.get().is_some())
    }

    /// Whether there is a process of it, whoever its user is.
    pub(super) fn has_processes(&self) -> bool {
        match self.namespaces_of_many() {
            Some(namespaces) => namespaces.signal_all(0).is_ok(),
            None => sys::user_has_processes(self.user),
        }
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
        if self.root.get().is_some() {
            return match self.network() {
                NetworkPolicy::Filtered(_) => vec!["udp", "icmp"],
                NetworkPolicy::Open => vec!["tcp_bind"],
                NetworkPolicy::Blocked => Vec::new(),
            };
        }
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

    /// Bytes that its home takes on the disk; `None` if it has too many files, or cannot be read. Walks through the home.
    ///
    /// # Errors
    /// `OverLimit`; `NotFound` if it was deleted; or it was interrupted.
    pub fn disk_bytes(
        &self,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Option<u64>, Stopped> {
        if self.root.get().is_some() {
            // What differs from its template.
            let own = own_files(&self.lasting.home)?;
            return own.files()?.disk_bytes(&self.ledger, interrupt);
        }
        let files = self.workspace.files()?;
        files.disk_bytes(&self.ledger, interrupt)
    }

    /// The same for its own clients, as work of its own of which there is one at a time.
    ///
    /// # Errors
    /// As [`Sandbox::disk_bytes`].
    pub fn own_disk_bytes(
        &self,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Option<u64>, Stopped> {
        let mut paced = self.workspace.paced(interrupt);
        let walk = |interrupt: &mut dyn Interrupt| self.disk_bytes(interrupt);
        self.lasting.disk.share(&mut paced, walk)
    }
}

/// The files of a root that differ from its template.
fn own_files(home: &Path) -> Result<Root> {
    let act = "cannot look at the files of a sandbox";
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let upper = open(&home.join("up"), flags, Mode::empty());
    let upper = upper.map_err(|errno| Error::system(act, errno))?;
    Ok(Root::home(upper, User { uid: 0, gid: 0 }))
}
