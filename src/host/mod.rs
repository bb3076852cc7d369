//! Many sandboxes on one machine: creates, finds and deletes them.
//!
//! A sandbox is a [`Workspace`] with its own user, home and ruleset. One lock decides the capacity: a
//! slot is reserved before anything is made and given back when everything is gone, so the capacity is
//! exact under concurrency. A uid is reused only after the kernel reported no process of it.
//!
//! This file has the state of a host, and what can be asked of it. [`making`], [`phases`], [`pausing`], [`changing`], [`maintaining`] and
//! [`ending`] are the life of a sandbox. Their parts have files of their own: [`standing`] says what
//! stands still, [`table`] counts, [`users`] assigns uids, [`claims`]
//! keeps other hosts off them, [`leftovers`] ends what an earlier server left, [`ids`] makes ids, [`homes`] directories, [`roots`] puts roots together, [`store`] keeps what they are made of, [`records`]
//! writes down what lasts, [`snapshots`] is what requests do with the store, [`builds`] makes templates by steps, [`signals`] kills, [`watchdog`] looks at the memory of sandboxes.

#[cfg(all(feature = "e2b", feature = "file-tools"))]
mod builds;
mod changing;
mod claims;
mod ending;
mod homes;
mod ids;
mod leftovers;
mod life;
mod maintaining;
mod making;
mod pausing;
mod phases;
mod records;
mod roots;
mod ruling;
mod sandbox;
mod signals;
mod snapshots;
mod standing;
mod store;
mod table;
mod tcp_ports;
mod unfinished;
mod users;
mod watchdog;

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use crate::codec::sort::sort_by;
use crate::config::{HostSettings, Secret};
use crate::confine::{Limiter, Policy};
use crate::egress::Egress;
use crate::error::{Error, Kind, Result};
use crate::files::Disk;
use crate::interpreter::ContextsSettings;
use crate::limits::activity::IdleBy;
use crate::limits::ledger::{Budget, Ledger};
use crate::logging;
use crate::process::registry::Shared;
use crate::spec::isolation::{DefaultIsolation, Isolation};
use crate::spec::network::NetworkPolicy;
use crate::sys::{self, User, proc};
use crate::threads::lock::{Condvar, Mutex, MutexGuard, lock};
#[cfg(all(feature = "e2b", feature = "file-tools"))]
pub use builds::{Build, BuildStep, LogLine, Stage, Verb};
use claims::Claims;
pub use ending::AllEnded;
use homes::Homes;
use ids::Ids;
pub use life::{By, LimitsChange, RulesChange, SettingsChange, Waker};
use records::Records;
use records::adoption::{Adoption, adopt};
use roots::Roots;
pub use roots::check_templates;
use ruling::Bounds;
pub use sandbox::Sandbox;
use signals::Signaller;
pub use standing::SandboxState;
pub use store::{Snapshot, is_id as is_snapshot_id};
use table::SandboxTable;
pub use table::Shortage;
use tcp_ports::TcpPorts;
use unfinished::Unfinished;
use users::Users;
pub use users::{check_rights, check_token_file};

/// Default limit of processes and threads of a sandbox for each processor: programs start threads by the
/// number of processors, and the load on other tenants depends on it too.
const PROCESSES_PER_PROCESSOR: u64 = 128;

/// Bounds of the default limit.
const MAX_PROCESSES: RangeInclusive<u64> = 256..=4096;

/// The sandboxes of a machine.
pub struct Host {
    policy: Arc<Policy>,
    shared: Arc<Shared>,
    contexts: ContextsSettings,
    budget: Arc<Budget>,
    homes: Homes,
    /// What sandboxes with a root of their own are made of.
    roots: Roots,
    /// Whether sandboxes that choose nothing have one.
    has_roots_by_default: bool,
    /// What is written down of sandboxes; `None` if they end with the server.
    records: Option<Arc<Records>>,
    /// What an earlier server has left, until it is taken over; guards the value alone.
    found: Mutex<Adoption>,
    /// What an earlier server has not removed, until somebody does, and the uids that are taken for other reasons; guards
    /// the value alone.
    unfinished: Mutex<(Unfinished, Vec<u32>)>,
    /// Held as long as the server lives.
    _claims: Claims,
    signaller: Signaller,
    /// Guards which sandboxes exist and the free slots; never held while a sandbox is made or removed.
    table: Mutex<SandboxTable>,
    /// Notified when the table changes: for waiting deletions and the maintenance.
    changed: Condvar,
    default_max_processes: u64,
    default_network: NetworkPolicy,
    egress: Arc<Egress>,
    default_isolation: Isolation,
    tcp_ports: Arc<TcpPorts>,
    limiter: Limiter,
    /// The users of all sandboxes.
    users: RangeInclusive<u32>,
    /// How long sandboxes may rest.
    bounds: Bounds,
    /// How many rules are being carried out.
    ruling: AtomicUsize,
    /// Whether the watchdog runs.
    is_watching: AtomicBool,
    /// Paths that no sandbox is given.
    private: Vec<PathBuf>,
    /// Directories with the files that name devices.
    cdi: Vec<PathBuf>,
}

/// Ends what keeps a killed host from ending that has had some of the same uids, and so keeps its port. False if there is
/// no such host.
///
/// # Errors
/// `System`: its lock cannot be looked at.
pub fn free_port(settings: &HostSettings) -> Result<bool> {
    let users = &settings.users;
    let other = Claims::holder(users, &settings.homes)?;
    Ok(other.is_some_and(|other| leftovers::end_of_killed(&other, users)))
}

impl Host {
    /// Prepares the machine; `search` is the PATH of commands after the sandbox's own directories, and `network`
    /// the policy of sandboxes that choose none.
    ///
    /// Call it before the server changes its own limits: commands get the original ones.
    ///
    /// # Errors
    /// `System` if the machine lacks something that the promises need; the text names it.
    pub fn new(
        settings: &HostSettings,
        search: Option<&std::ffi::OsStr>,
        network: NetworkPolicy,
        egress: Arc<Egress>,
        shared: Arc<Shared>,
        budget: Arc<Budget>,
        contexts: ContextsSettings,
    ) -> Result<Arc<Self>> {
        let policy = Policy::new(search, settings.allow_unconfined)?;
        let (abi, least) = (policy.landlock_abi(), settings.min_landlock_abi);
        if abi < least && !settings.allow_unconfined {
            let text = format!(
                "cannot hold sandboxes: the kernel has Landlock ABI {abi} (0 is none, or hidden by a filter), and {least} is \
                 needed; use a newer kernel, or SBX_MIN_LANDLOCK_ABI or SBX_ALLOW_UNCONFINED=1 to go on with less"
            );
            return Err(Error::new(Kind::System, text));
        }
        let default_isolation = default_isolation(&policy, settings.isolation, &network);
        policy.check_isolation(default_isolation)?;
        policy.check_network(default_isolation, &network)?;
        let homes = Homes::open(&settings.homes)?;
        let claims = Claims::take(&settings.users, &settings.homes, |other| {
            leftovers::end_of_killed(other, &settings.users);
        })?;
        let accounts = users::accounts(&settings.users)?;
        let first = settings
            .users
            .clone()
            .find(|uid| !accounts.contains(uid))
            .map(|uid| User { uid, gid: uid })
            .ok_or_else(|| {
                let text =
                    "cannot hold sandboxes: every uid of SBX_UID_RANGE has an account or a group";
                Error::new(Kind::System, text)
            })?;
        homes.check_reachable(first)?;
        let roots = Roots::open(settings, &accounts, &claims, &homes, &policy)?;
        let signaller = Signaller::new(&settings.users, &claims)?;
        let records = settings.keep.then(|| Records::open(&homes)).transpose()?;
        let adoption = match &records {
            Some(records) => adopt(
                &homes,
                records,
                &roots,
                &settings.users,
                &accounts,
                settings.max_aside,
            )?,
            None => Adoption::default(),
        };
        let known = adoption.uids();
        leftovers::end(&settings.users, &accounts, &known, &signaller);
        // It may take long, and may fail: only when nothing of an earlier server runs any more.
        roots.import_archives(&budget.whole())?;
        let unfinished = Unfinished::at_start(&homes, records.as_ref(), &adoption.removals);
        let ids = Ids::new()?;
        // A missing right shows at start.
        match homes.make_trial(first) {
            Ok(()) => {}
            // What is there is kept, and can be deleted.
            Err(error) if error.kind() == Kind::NoSpace => {
                logging::info(format_args!("no sandbox can be made: {error}"));
            }
            Err(error) => return Err(error),
        }
        let random = sys::random_bytes()
            .map_err(|errno| Error::system("cannot choose the first uid", errno))?;
        let otherwise_taken = [&accounts[..], &known, &adoption.aside].concat();
        let taken = [&otherwise_taken[..], &unfinished.uids()].concat();
        let users = Users::new(&settings.users, u64::from_le_bytes(random), taken);
        let numbers = adoption.records.iter().map(|(record, _)| record.number);
        let table = SandboxTable::new(settings.capacity, users, ids, numbers.max().unwrap_or(0));
        let host = Arc::new(Self {
            has_roots_by_default: settings.isolation == DefaultIsolation::Strongest
                && roots.default().is_some()
                && roots.check().is_ok(),
            roots,
            policy,
            shared,
            contexts,
            budget,
            homes,
            records: records.map(Arc::new),
            found: Mutex::new(adoption),
            unfinished: Mutex::new((unfinished, otherwise_taken)),
            _claims: claims,
            signaller,
            table: Mutex::new(table),
            changed: Condvar::new(),
            default_max_processes: default_max_processes(),
            default_network: network,
            egress,
            default_isolation,
            tcp_ports: TcpPorts::new(settings.tcp_ports.clone()),
            limiter: Limiter::new(),
            users: settings.users.clone(),
            bounds: Bounds {
                paused: settings.paused_limit,
                stopped: settings.stopped_limit,
            },
            ruling: AtomicUsize::new(0),
            is_watching: AtomicBool::new(false),
            private: [&settings.homes]
                .into_iter()
                .chain(&settings.snapshots.directory)
                .chain(&settings.token_file)
                .cloned()
                .collect(),
            cdi: settings.cdi.clone(),
        });
        Ok(host)
    }

    /// Takes over the sandboxes of an earlier server. Call it once, when the server may open as many files as it ever may.
    ///
    /// # Errors
    /// A home cannot be opened.
    pub fn take_over(self: &Arc<Self>) -> Result<()> {
        let found = std::mem::take(&mut *lock(&self.found));
        self.adopt(found.records, found.last_run)?;
        let (unfinished, taken) = std::mem::take(&mut *lock(&self.unfinished));
        unfinished.finish(self, taken);
        Ok(())
    }

    /// The key that the tokens of sandboxes are derived with; `None` if that is up to the server.
    ///
    /// # Errors
    /// `System`: it can neither be read nor written.
    pub fn token_key(&self, token: Option<&Secret>) -> Result<Option<Secret>> {
        let records = self.records.as_ref();
        records.map(|records| records.key(token)).transpose()
    }

    fn table(&self) -> MutexGuard<'_, SandboxTable> {
        lock(&self.table)
    }

    /// The isolation layers that each sandbox has.
    pub fn layers(&self) -> Vec<&'static str> {
        self.policy.layers(None)
    }

    /// The isolation of sandboxes that choose none.
    pub fn default_isolation(&self) -> Isolation {
        self.default_isolation
    }

    /// The names of the kinds of isolation that sandboxes can have here.
    pub fn isolations(&self) -> Vec<&'static str> {
        self.policy.isolations()
    }

    /// The names of what roots of sandboxes can be made of.
    pub fn templates(&self) -> Vec<String> {
        self.roots.names()
    }

    /// Those of them that the operator has named.
    pub fn given_templates(&self) -> Vec<String> {
        self.roots.given_names()
    }

    /// The template of roots of sandboxes that choose nothing; `None` if they have none of their own.
    pub fn default_template(&self) -> Option<&str> {
        self.roots.default().filter(|_| self.roots.check().is_ok())
    }

    /// Why sandboxes cannot have roots of their own here; `None` if they can.
    pub fn lack_of_roots(&self) -> Option<String> {
        self.roots.check().err().map(|error| error.to_string())
    }

    /// The names of the network policies that sandboxes can have here.
    pub fn network_policies(&self) -> Vec<&'static str> {
        self.policy.network_policies()
    }

    /// The names of the limits that a sandbox as a whole can have here.
    pub fn limits(&self) -> Vec<&'static str> {
        self.limiter.offered()
    }

    pub fn count(&self) -> usize {
        self.table().sandboxes.len()
    }

    /// All sandboxes, in the order of their creation.
    pub fn list(&self) -> Vec<Arc<Sandbox>> {
        let mut all: Vec<_> = self.table().sandboxes.values().cloned().collect();
        sort_by(&mut all, |one, other| one.number.cmp(&other.number));
        all
    }

    /// The sandbox with this id.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn find(&self, id: &str) -> Result<Arc<Sandbox>> {
        let found = self.table().sandboxes.get(id).cloned();
        found.ok_or_else(|| unknown(id))
    }

    /// Whether there was a sandbox with this id a short time ago.
    pub fn has_ended(&self, id: &str) -> bool {
        let table = self.table();
        table.is_ending(id) || table.has_ended(id)
    }

    /// What a sandbox holds; `None` if there is no such sandbox.
    pub fn ledger_of(&self, id: &str) -> Option<Arc<Ledger>> {
        self.table().ledger_of(id)
    }

    /// What the sandbox with this uid holds.
    pub fn ledger_of_user(&self, uid: u32) -> Option<Arc<Ledger>> {
        self.table().ledger_of_user(uid)
    }

    /// Finds a sandbox by what only its own clients know.
    pub fn find_by(&self, is_it: impl Fn(&Sandbox) -> bool) -> Option<Arc<Sandbox>> {
        // Without the table's lock: there may be thousands.
        let all: Vec<_> = self.table().sandboxes.values().cloned().collect();
        all.into_iter().find(|sandbox| is_it(sandbox))
    }

    /// Number of commands that run in all sandboxes.
    pub fn processes_running(&self) -> usize {
        let running = |sandbox: &Arc<Sandbox>| sandbox.workspace.processes.count_running();
        self.list().iter().map(running).sum()
    }

    /// The space of the file system that holds the homes.
    pub fn disk(&self) -> Option<Disk> {
        self.homes.disk()
    }

    /// Whether a request or a command is active in any sandbox.
    pub fn is_busy(&self) -> bool {
        let is_busy = |sandbox: &Arc<Sandbox>| sandbox.workspace.idle_for(IdleBy::Work).is_none();
        self.table().sandboxes.values().any(is_busy)
    }

    /// How long there has been no sandbox; `None` while there is one.
    pub fn empty_for(&self) -> Option<Duration> {
        let empty = self.table().empty_for();
        empty.filter(|_| !self.is_making_templates())
    }

    /// Closes the host if there has been no sandbox for `limit`: creation is refused afterwards.
    pub fn close_if_empty(&self, limit: Duration) -> bool {
        let is_store_busy = self.is_making_templates();
        let mut table = self.table();
        let is_changing = !table.changing.is_empty() || is_store_busy;
        table.closed |= !is_changing && table.empty_for().is_some_and(|empty| empty >= limit);
        table.closed
    }
}

/// By the number of processors, and at most a quarter of the container's limit.
fn default_max_processes() -> u64 {
    let processors = proc::processors() as u64;
    let usual =
        (processors * PROCESSES_PER_PROCESSOR).clamp(*MAX_PROCESSES.start(), *MAX_PROCESSES.end());
    proc::process_limit().map_or(usual, |most| usual.min(most / 4).max(1))
}

/// Writes what has happened to a sandbox to the log, unless there is too much of that: its tenant can bring it about.
fn log_of(id: &str, what: fmt::Arguments<'_>) {
    let sandbox = format!("sandbox {id}");
    logging::about(&sandbox, format_args!("{sandbox} {what}"));
}

fn changing(id: &str) -> Error {
    let text = format!("sandbox {id} is being stopped or started; try again");
    Error::new(Kind::Unfinished, text)
}

fn stopped(id: &str) -> Error {
    let text = format!("sandbox {id} is stopped: it has files and no processes; resume it");
    Error::new(Kind::Stopped, text)
}

fn unknown(id: &str) -> Error {
    Error::new(
        Kind::NotFound,
        format!("there is no sandbox {id}; it may have been deleted, or idle for too long"),
    )
}

/// The isolation of sandboxes that choose none.
fn default_isolation(
    policy: &Policy,
    chosen: DefaultIsolation,
    network: &NetworkPolicy,
) -> Isolation {
    let strongest = Isolation::Namespaces;
    let check = || {
        policy.check_isolation(strongest)?;
        policy.check_network(strongest, network)
    };
    match chosen {
        DefaultIsolation::Fixed(isolation) => isolation,
        DefaultIsolation::Strongest => match check() {
            Ok(()) => strongest,
            Err(error) => {
                logging::info(format_args!("SBX_ISOLATION=auto means landlock: {error}"));
                Isolation::Landlock
            }
        },
    }
}
