//! Many sandboxes on one machine: creates, finds and deletes them.
//!
//! A sandbox is a [`Workspace`] with its own user, home and ruleset. One lock decides the capacity: a
//! slot is reserved before anything is made and given back when everything is gone, so the capacity is
//! exact under concurrency. A uid is reused only after the kernel reported no process of it.
//!
//! This file has the life of a sandbox from creation to deletion. Its parts have files of their own:
//! [`table`] counts, [`users`] assigns uids, [`claims`] keeps other hosts off them, [`leftovers`] ends what an earlier server
//! left, [`homes`] makes directories, [`signals`] kills, [`watchdog`] looks at the memory of sandboxes.

mod claims;
mod homes;
mod leftovers;
mod sandbox;
mod signals;
mod table;
mod tcp_ports;
mod users;
mod watchdog;

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::clock::now_ms;
use crate::codec::sort::sort_by;
use crate::config::HostSettings;
use crate::confine::{Grants, Limiter, Policy, SandboxSettings};
use crate::egress::{Egress, Exits};
use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::files::{Disk, Root};
use crate::interpreter::ContextsSettings;
use crate::isolation::{DefaultIsolation, Isolation};
use crate::ledger::{Budget, Ledger};
use crate::logging;
use crate::panics::contain;
use crate::ports::{Ports, TcpPortsInside};
use crate::posture::Posture;
use crate::proc;
use crate::process::Reason;
use crate::process::registry::Shared;
use crate::sync::{Condvar, Mutex, MutexGuard, lock};
use crate::sys::{self, User};
use crate::workspace::{Lease, Workspace};
use claims::Claims;
use homes::Homes;
pub use sandbox::{Expiry, Labels, Sandbox, SandboxSpec};
use signals::Signaller;
pub use table::Shortage;
use table::{Ids, Reservation, SandboxTable};
use tcp_ports::TcpPorts;
use users::Users;
pub use users::{check_rights, check_token_file};

/// Default limit of processes and threads of a sandbox for each processor: programs start threads by the
/// number of processors, and the load on other tenants depends on it too.
const PROCESSES_PER_PROCESSOR: u64 = 128;

/// Bounds of the default limit.
const MAX_PROCESSES: RangeInclusive<u64> = 256..=4096;

/// How long to wait for killed processes to be gone.
const EMPTYING_LIMIT: Duration = Duration::from_secs(20);

/// Time between SIGTERM and SIGKILL when the server ends.
const GRACE: Duration = Duration::from_secs(5);

/// Most time before a deletion is answered; clients give up after 60 s. The rest is removed in the
/// background, in unit tests everything.
const ANSWER_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 40 });

/// How long to wait for killed processes when the server ends.
const FINAL_EMPTYING_LIMIT: Duration = Duration::from_secs(1);

/// How long that and the removal of homes may take when the server ends.
const REMOVAL_LIMIT: Duration = Duration::from_secs(3);

/// How long the clients of a deleted sandbox may take to read their last answers.
const PARTING_LIMIT: Duration = Duration::from_secs(3);

/// Interval of the maintenance: idle sandboxes, starts that hang, clients of deleted sandboxes.
const ROUND: Duration = Duration::from_secs(1);

/// Most time for one sandbox on a thread that deletes several.
const BACKGROUND_LIMIT: Duration = Duration::from_secs(10);

/// The same on the maintenance thread, if no other thread could be started.
const INLINE_LIMIT: Duration = Duration::from_secs(1);

/// Maintenance rounds between two retries of stuck deletions.
const STUCK_ROUNDS: u64 = 10;

/// The sandboxes of a machine.
pub struct Host {
    policy: Arc<Policy>,
    shared: Arc<Shared>,
    contexts: ContextsSettings,
    budget: Arc<Budget>,
    homes: Homes,
    /// Held as long as the server lives.
    _claims: Claims,
    signaller: Signaller,
    /// Guards which sandboxes exist and the free slots; never held while a sandbox is made or removed.
    table: Mutex<SandboxTable>,
    /// Notified when the table changes: for waiting deletions and the maintenance.
    changed: Condvar,
    default_max_processes: u64,
    default_network: Posture,
    egress: Arc<Egress>,
    default_isolation: Isolation,
    tcp_ports: Arc<TcpPorts>,
    limiter: Limiter,
    /// The users of all sandboxes.
    users: RangeInclusive<u32>,
    /// Whether the watchdog runs.
    is_watching: AtomicBool,
    /// Paths that no sandbox is given.
    private: Vec<PathBuf>,
}

/// The result of a deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Whether this call deleted the sandbox.
    pub is_first_report: bool,
    /// Whether its home is still being removed.
    pub is_removing: bool,
}

/// The result of deleting all sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllEnded {
    /// Number of sandboxes that this call deleted.
    pub count: usize,
    /// Number of homes that are still being removed.
    pub removing: usize,
}

impl Host {
    /// Prepares the machine; `search` is the PATH of commands after the sandbox's own directories, and `network`
    /// the posture of sandboxes that choose none.
    ///
    /// Call it before the server changes its own limits: commands get the original ones.
    ///
    /// # Errors
    /// `System` if the machine lacks something that the promises need; the text names it.
    pub fn new(
        settings: &HostSettings,
        search: Option<&std::ffi::OsStr>,
        network: Posture,
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
        let claims = Claims::take(&settings.users, &settings.homes)?;
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
        let signaller = Signaller::new(&settings.users, &claims)?;
        leftovers::end(&settings.users, &accounts, &signaller);
        homes.sweep();
        let ids = Ids::new()?;
        // A missing right shows at start. Sandboxes are counted from 1.
        let unused = ids.of(0);
        drop(homes.make(&unused, first)?);
        homes.remove(&unused, None)?;
        let random = sys::random_bytes()
            .map_err(|errno| Error::system("cannot choose the first uid", errno))?;
        let users = Users::new(&settings.users, u64::from_le_bytes(random), accounts);
        Ok(Arc::new(Self {
            policy,
            shared,
            contexts,
            budget,
            homes,
            _claims: claims,
            signaller,
            table: Mutex::new(SandboxTable::new(settings.capacity, users, ids)),
            changed: Condvar::new(),
            default_max_processes: default_max_processes(),
            default_network: network,
            egress,
            default_isolation,
            tcp_ports: TcpPorts::new(settings.tcp_ports.clone()),
            limiter: Limiter::new(),
            users: settings.users.clone(),
            is_watching: AtomicBool::new(false),
            private: [&settings.homes]
                .into_iter()
                .chain(&settings.token_file)
                .cloned()
                .collect(),
        }))
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

    /// The names of the network postures that sandboxes can have here.
    pub fn postures(&self) -> Vec<&'static str> {
        self.policy.postures()
    }

    /// The names of the limits that a sandbox as a whole can have here.
    pub fn limits(&self) -> Vec<&'static str> {
        self.limiter.offered()
    }

    /// Number of sandboxes.
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
        let table = self.table();
        let sandbox = table.sandboxes.get(id)?;
        Some(Arc::clone(&sandbox.workspace.ledger))
    }

    /// A lease on a sandbox's workspace.
    ///
    /// # Errors
    /// `NotFound`, also while it is being deleted.
    pub fn lease(&self, id: &str) -> Result<Lease> {
        self.find(id)?.workspace.lease().map_err(|_| unknown(id))
    }

    /// Makes as many of `count` sandboxes as there is capacity for: all of those, or none. Says why it makes no more.
    ///
    /// # Errors
    /// `Unavailable` if the machine cannot enforce what is asked for. `System`, `NoSpace`, `ShuttingDown`; nothing is
    /// left of any of them.
    pub fn create(
        &self,
        count: usize,
        spec: &SandboxSpec,
    ) -> Result<(Vec<Arc<Sandbox>>, Option<Shortage>)> {
        let network = self.network_of(spec);
        let isolation = self.isolation_of(spec);
        self.policy.check_isolation(isolation)?;
        self.policy.check_network(isolation, network)?;
        let has_network = isolation.owns_network(network);
        if spec.tcp_ports > 0 && *network != Posture::Open && !has_network {
            let text = format!(
                "tcp_ports cannot be had with network {}: sockets of this posture listen on no TCP port",
                network.name()
            );
            return Err(Error::new(Kind::Unavailable, text));
        }
        self.limiter.check(spec.whole)?;
        let (read, write) = (&spec.read_only_paths, &spec.read_write_paths);
        let grants = Grants::open(read, write, &self.private, &self.users)?;
        let (reservations, shortage) = self.table().reserve(count)?;
        let mut reserved = Reserved {
            host: self,
            reservations,
        };
        let made: Result<Vec<_>> = reserved
            .reservations
            .iter()
            .map(|reservation| self.make(reservation, spec, &grants))
            .collect();
        // On an error the finished ones are dropped before `reserved`, which frees descriptors for the removals.
        let made = made.inspect_err(|error| {
            logging::info(format_args!("cannot make a sandbox: {error}"));
        })?;
        let mut table = self.table();
        // So that nothing fails between the first and the last.
        table.sandboxes.reserve(made.len());
        for sandbox in &made {
            let known = Arc::clone(sandbox);
            table.sandboxes.insert(sandbox.id.clone(), known);
        }
        table.reserved -= made.len();
        reserved.reservations.clear();
        drop(table);
        self.changed.notify_all();
        for sandbox in &made {
            let Sandbox { id, user, .. } = &**sandbox;
            logging::info(format_args!("sandbox {id} created, uid {}", user.uid));
        }
        Ok((made, shortage))
    }

    /// Makes one sandbox, or finds the one that a request with the same key has made.
    ///
    /// # Errors
    /// As [`Host::create`]; `OverLimit` if the host is full.
    pub fn create_once(&self, spec: &SandboxSpec) -> Result<Arc<Sandbox>> {
        let Some(key) = &spec.labels.key else {
            return self.create_one(spec);
        };
        let is_making = |table: &mut SandboxTable| table.keys.contains(key);
        let mut table = self.changed.wait_while(self.table(), is_making);
        let known = table.sandboxes.values();
        let known = known
            .into_iter()
            .find(|sandbox| sandbox.labels.key.as_ref() == Some(key));
        if let Some(known) = known {
            return Ok(Arc::clone(known));
        }
        table.keys.insert(key.clone());
        drop(table);
        let _key = KeyInUse { host: self, key };
        self.create_one(spec)
    }

    fn create_one(&self, spec: &SandboxSpec) -> Result<Arc<Sandbox>> {
        let (mut made, shortage) = self.create(1, spec)?;
        made.pop().ok_or_else(|| {
            let why = shortage.map_or_else(String::new, |shortage| format!(": {shortage}"));
            let text = format!("the host is full{why}; delete a sandbox");
            Error::new(Kind::OverLimit, text)
        })
    }

    /// Finds a sandbox by what only its own clients know.
    pub fn find_by(&self, is_it: impl Fn(&Sandbox) -> bool) -> Option<Arc<Sandbox>> {
        // Without the table's lock: there may be thousands.
        let all: Vec<_> = self.table().sandboxes.values().cloned().collect();
        all.into_iter().find(|sandbox| is_it(sandbox))
    }

    /// Ends a sandbox after this time from now, whatever runs in it.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn set_lifetime(&self, id: &str, lifetime: Duration) -> Result<()> {
        // Under the table's lock: one whose time is over is taken out of it under the same.
        let table = self.table();
        let sandbox = table.sandboxes.get(id).ok_or_else(|| unknown(id))?;
        sandbox.set_lifetime(lifetime);
        Ok(())
    }

    /// Ends a sandbox no earlier than after this time from now. One that has no end keeps none.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn extend_lifetime(&self, id: &str, least: Duration) -> Result<Arc<Sandbox>> {
        let table = self.table();
        let sandbox = table.sandboxes.get(id).ok_or_else(|| unknown(id))?;
        sandbox.extend_lifetime(least);
        Ok(Arc::clone(sandbox))
    }

    /// What commands of a new sandbox reach.
    fn network_of<'a>(&'a self, spec: &'a SandboxSpec) -> &'a Posture {
        spec.network.as_ref().unwrap_or(&self.default_network)
    }

    /// What surrounds a new sandbox.
    fn isolation_of(&self, spec: &SandboxSpec) -> Isolation {
        spec.isolation.unwrap_or(self.default_isolation)
    }

    fn make(
        &self,
        reservation: &Reservation,
        spec: &SandboxSpec,
        grants: &Grants,
    ) -> Result<Arc<Sandbox>> {
        let network = self.network_of(spec).clone();
        let isolation = self.isolation_of(spec);
        let lease = if isolation.owns_network(&network) {
            self.tcp_ports.of_own_network(spec.tcp_ports)
        } else {
            self.tcp_ports.take(spec.tcp_ports)?
        };
        let home = self.homes.make(&reservation.id, reservation.user)?;
        fault::point("home");
        if sys::is_getting_scarce(home.as_fd()) {
            let act = "cannot make a sandbox: the server needs its last descriptors for the existing ones; \
                       delete some, or raise the limit on open files";
            return Err(Error::system(act, Errno::EMFILE));
        }
        let path = self.homes.path.join(&reservation.id);
        let max_processes = spec.max_processes.unwrap_or(self.default_max_processes);
        let ledger = self.budget.ledger();
        let user = Some(reservation.user);
        let exits = Exits::new(Arc::clone(&self.egress), Arc::clone(&ledger), user);
        let id = &reservation.id;
        // A command in namespaces is started by a process that ends at once.
        let starter = u64::from(isolation == Isolation::Namespaces);
        let limits = self
            .limiter
            .apply(id, spec.whole, max_processes + starter)?;
        let confinement = self.policy.confine(SandboxSettings {
            id: &reservation.id,
            user: reservation.user,
            home: &path,
            shown_home: spec.shown_home.as_deref().unwrap_or(&path),
            home_directory: home.as_fd(),
            environment: &spec.environment,
            max_processes,
            max_memory: spec.max_memory,
            isolation,
            network: network.clone(),
            exits,
            grants,
            tcp_ports: lease.ports(),
            whole: &limits,
        })?;
        fault::point("sandbox");
        let home = Arc::new(home);
        let namespaces = confinement.namespaces().cloned();
        let tcp = match confinement.own_network() {
            Some(namespaces) => TcpPortsInside::All(Arc::clone(namespaces)),
            None => TcpPortsInside::Given(lease.ports().to_vec()),
        };
        let ports = Ports::home(Arc::clone(&home), reservation.user, tcp);
        // Before any command can change what is there.
        let temporary = namespaces.as_ref().map(|inside| inside.open_temporary());
        let temporary = temporary.transpose().map_err(|errno| {
            Error::system("cannot open the temporary directory of a sandbox", errno)
        })?;
        let root = Root::home(home, reservation.user).with_temporary(temporary.flatten());
        let shared = Arc::clone(&self.shared);
        Ok(Arc::new(Sandbox {
            id: reservation.id.clone(),
            number: reservation.number,
            user: reservation.user,
            home: path,
            created_at_ms: now_ms(),
            idle_timeout: spec.idle_timeout,
            expiry: Mutex::new(spec.lifetime.and_then(Expiry::after)),
            labels: spec.labels.clone(),
            token: OnceLock::new(),
            max_processes,
            max_memory: spec.max_memory,
            limits,
            is_ending: Mutex::new(false),
            network,
            granted: Arc::clone(&grants.paths),
            policy: Arc::clone(&self.policy),
            namespaces,
            is_loss_known: AtomicBool::new(false),
            ports: lease,
            workspace: Workspace::new(root, confinement, ports, shared, ledger, self.contexts),
        }))
    }

    /// Deletes a sandbox: kills its processes, removes its home, frees its user and slot. A home that is
    /// too large to be removed in time is removed in the background; user and slot stay taken until then.
    ///
    /// # Errors
    /// `NotFound` for an unknown id. `System` if something cannot be ended or removed: the sandbox is no
    /// longer listed, keeps its slot and user, and the deletion is retried.
    pub fn delete(&self, id: &str) -> Result<Ended> {
        let deadline = Instant::now() + ANSWER_LIMIT;
        let mut table = self.table();
        while !table.sandboxes.contains_key(id) {
            let is_ending = table.is_ending(id);
            let left = deadline.saturating_duration_since(Instant::now());
            if table.has_ended(id) || (is_ending && left.is_zero()) {
                return Ok(Ended {
                    is_first_report: false,
                    is_removing: is_ending || table.stuck.contains_key(id),
                });
            }
            if !is_ending {
                break;
            }
            table = self.changed.wait_for(table, Some(left));
        }
        let sandbox = table.take(id).ok_or_else(|| unknown(id))?;
        drop(table);
        self.end(&sandbox, "deleted", deadline)
    }

    /// Deletes all sandboxes, and retries the stuck ones.
    ///
    /// # Errors
    /// The first deletion that failed; the others are done.
    pub fn delete_all(&self) -> Result<AllEnded> {
        let deadline = Instant::now() + ANSWER_LIMIT;
        // All are taken before the first is killed: after another request has deleted one, its uid may
        // belong to a new sandbox.
        let mut table = self.table();
        let ids = table.sandboxes.keys().chain(table.stuck.keys()).cloned();
        let ids: Vec<_> = ids.collect();
        let all: Vec<_> = ids.iter().filter_map(|id| table.take(id)).collect();
        drop(table);
        let (mut count, mut failure) = (0, None);
        self.end_all(&all, "deleted", deadline, |result| match result {
            Ok(ended) => count += usize::from(ended.is_first_report),
            Err(error) => failure = failure.take().or(Some(error)),
        });
        // Other requests may be deleting some.
        let left = deadline.saturating_duration_since(Instant::now());
        self.wait_while(left, |table| !table.ending.is_empty());
        if let Some(error) = failure {
            return Err(error);
        }
        let table = self.table();
        let removing = table.ending.len() + table.retried.len() + table.stuck.len();
        Ok(AllEnded { count, removing })
    }

    /// Deletes a sandbox that was taken out of the table. What is left of its home at the `deadline` is
    /// removed later.
    fn end(&self, sandbox: &Arc<Sandbox>, how: &str, deadline: Instant) -> Result<Ended> {
        let mut ended = Err(unknown(&sandbox.id));
        let report = |result| ended = result;
        self.end_all(std::slice::from_ref(sandbox), how, deadline, report);
        ended
    }

    /// Deletes sandboxes that were taken out of the table, each as soon as it is empty: what cannot be
    /// emptied holds up no other. Reports each result.
    fn end_all(
        &self,
        all: &[Arc<Sandbox>],
        how: &str,
        deadline: Instant,
        mut report: impl FnMut(Result<Ended>),
    ) {
        let begun = Instant::now();
        let mut unsettled = Unsettled {
            host: self,
            left: all.iter().map(|one| (one.number, one)).collect(),
        };
        for sandbox in all {
            sandbox.workspace.close();
            *lock(&sandbox.is_ending) = true;
        }
        let mut shares = Shares::new(all.len(), deadline);
        let emptying_deadline = deadline.min(begun + EMPTYING_LIMIT);
        let done = |sandbox: &Arc<Sandbox>, is_empty: bool| {
            let share = shares.next();
            // What panics for one of them holds up no other.
            let result = contain(|| {
                fault::point("deletion");
                sandbox.workspace.release();
                if !is_empty {
                    let id = &sandbox.id;
                    let text =
                        format!("cannot end sandbox {id}: a process was killed but has not ended");
                    return Err(Error::new(Kind::System, text));
                }
                sandbox.limits.discard();
                self.homes.remove(&sandbox.id, Some(share))
            });
            let result = result.unwrap_or_else(|_| Err(failed_to_delete()));
            let settled = self.settle(sandbox, result, how, begun.elapsed());
            unsettled.left.remove(&sandbox.number);
            report(settled);
        };
        fault::point("emptying");
        self.signaller
            .empty(all, Reason::Deleted, emptying_deadline, done);
    }

    /// Records the result of a deletion: true if nothing is left, false if a part of the home is.
    fn settle(
        &self,
        sandbox: &Arc<Sandbox>,
        result: Result<bool>,
        how: &str,
        taken: Duration,
    ) -> Result<Ended> {
        let Sandbox { id, user, .. } = &**sandbox;
        let outcome = match &result {
            Ok(true) => format!(", in {} us", taken.as_micros()),
            Ok(false) => " stays taken: its home is large and still being removed".to_owned(),
            Err(error) => format!(" stays taken: something is left: {error}"),
        };
        logging::info(format_args!(
            "sandbox {id} {how}, uid {}{outcome}",
            user.uid
        ));
        let is_first_report = self.table().settle(sandbox, &result);
        self.changed.notify_all();
        result.map(|is_gone| Ended {
            is_first_report,
            is_removing: !is_gone,
        })
    }

    /// Runs as long as the server: evicts idle sandboxes, retries stuck deletions, and kills starts that
    /// hang.
    pub fn run_maintenance(self: &Arc<Self>) {
        for round in 0_u64.. {
            let mut table = self.changed.wait_while(self.table(), |table| {
                table.occupied() == 0 && table.parting.is_empty()
            });
            let has_time = |(since, _): &(Instant, _)| since.elapsed() < PARTING_LIMIT;
            let parting = std::mem::take(&mut table.parting);
            let (parting, late): (Vec<_>, Vec<_>) = parting.into_iter().partition(has_time);
            table.parting = parting;
            let all: Vec<_> = table.sandboxes.values().cloned().collect();
            let mut retried = Vec::new();
            if round % STUCK_ROUNDS == 0 {
                let stuck: Vec<_> = table.stuck.keys().cloned().collect();
                retried.extend(stuck.iter().filter_map(|id| table.take(id)));
            }
            drop(table);
            fault::point("maintenance");
            for (_, ledger) in late {
                ledger.connections.shut_down();
            }
            let mut evicted = Vec::new();
            for sandbox in &all {
                // A sandbox that panics here costs no other one its maintenance.
                let is_idle = contain(|| {
                    sandbox.report_loss();
                    sandbox.limits.finish_kill();
                    sandbox.workspace.processes.kill_stopped_starts();
                    let limit = sandbox.idle_timeout;
                    limit.is_some_and(|limit| sandbox.workspace.close_if_idle(limit))
                });
                let is_idle = is_idle.unwrap_or(false);
                let mut table = self.table();
                // Unless a request is deleting it already.
                if (is_idle || sandbox.has_expired())
                    && let Some(sandbox) = table.take(&sandbox.id)
                {
                    evicted.push(sandbox);
                }
            }
            self.limiter.tidy();
            if all.iter().any(|sandbox| sandbox.limits.watched().is_some()) {
                watchdog::ensure_running(self);
            }
            drop(all);
            // Separately: retries took long before.
            self.end_in_background(retried, "tried again");
            self.end_in_background(evicted, "evicted");
            thread::sleep(ROUND);
        }
    }

    /// Deletes sandboxes on another thread, because removing a large home takes a while. A deletion that
    /// does not end in time is retried later, so that it does not delay the others.
    fn end_in_background(self: &Arc<Self>, leaving: Vec<Arc<Sandbox>>, how: &'static str) {
        if leaving.is_empty() {
            return;
        }
        let leaving = Arc::new(leaving);
        let (host, theirs) = (Arc::clone(self), Arc::clone(&leaving));
        let end_all = move |host: &Self, leaving: &[Arc<Sandbox>], limit: Duration| {
            let count = u32::try_from(leaving.len()).unwrap_or(u32::MAX);
            host.end_all(leaving, how, Instant::now() + limit * count, |_| {});
        };
        let thread = thread::Builder::new()
            .name("ending".to_owned())
            .stack_size(256 * 1024)
            .spawn(move || end_all(&host, &theirs, BACKGROUND_LIMIT));
        if thread.is_err() {
            // What has panicked is tried again later.
            let _ = contain(|| end_all(self, &leaving, INLINE_LIMIT));
        }
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
        let is_busy = |sandbox: &Arc<Sandbox>| sandbox.workspace.idle_for().is_none();
        self.table().sandboxes.values().any(is_busy)
    }

    /// How long there has been no sandbox; `None` while there is one.
    pub fn empty_for(&self) -> Option<Duration> {
        self.table().empty_for()
    }

    /// Closes the host if there has been no sandbox for `limit`: creation is refused afterwards.
    pub fn close_if_empty(&self, limit: Duration) -> bool {
        let mut table = self.table();
        table.closed |= table.empty_for().is_some_and(|empty| empty >= limit);
        table.closed
    }

    /// Ends the processes of all sandboxes (SIGTERM, then SIGKILL after [`GRACE`]) and removes the homes.
    pub fn shut_down(&self) {
        self.table().closed = true;
        // Sandboxes that are being made are ended with the others.
        self.wait_while(GRACE, |table| table.reserved > 0);
        let mut all = self.list();
        all.extend(self.table().stuck.values().cloned());
        for sandbox in &all {
            sandbox.workspace.close();
        }
        let left = || -> Vec<&Arc<Sandbox>> {
            let runs = |sandbox: &&Arc<Sandbox>| signals::is_active(sandbox, false);
            all.iter().filter(runs).collect()
        };
        for sandbox in left() {
            sandbox.workspace.processes.hang_up_terminals();
            sandbox.workspace.processes.expect_signal(libc::SIGTERM);
            self.signaller.signal(sandbox.user, libc::SIGTERM);
            // A stopped process handles SIGTERM only when it continues.
            self.signaller.signal(sandbox.user, libc::SIGCONT);
        }
        let deadline = Instant::now() + GRACE;
        while !left().is_empty() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        let emptying_deadline = Instant::now() + FINAL_EMPTYING_LIMIT;
        let removal_deadline = Instant::now() + REMOVAL_LIMIT;
        let mut shares = Shares::new(all.len(), removal_deadline);
        let mut unfinished = Vec::new();
        // The home of one that is not empty goes too: whatever runs there ends with the server.
        let done = |sandbox: &Arc<Sandbox>, _is_empty| {
            sandbox.limits.discard();
            if !matches!(
                self.homes.remove(&sandbox.id, Some(shares.next())),
                Ok(true)
            ) {
                unfinished.push(Arc::clone(sandbox));
            }
        };
        self.signaller
            .empty(&all, Reason::Killed, emptying_deadline, done);
        for sandbox in unfinished {
            let _ = self.homes.remove(&sandbox.id, Some(removal_deadline));
        }
        let left = removal_deadline.saturating_duration_since(Instant::now());
        self.wait_while(left, |table| {
            !table.ending.is_empty() || !table.retried.is_empty()
        });
    }

    /// Waits until the condition is false, at most for `limit`.
    fn wait_while(&self, limit: Duration, condition: impl Fn(&SandboxTable) -> bool) {
        let condition = |table: &mut SandboxTable| condition(table);
        drop(self.changed.wait_while_for(self.table(), limit, condition));
    }
}

/// Divides the time up to a deadline fairly: what one does not use goes to those after it.
struct Shares {
    left: usize,
    deadline: Instant,
}

impl Shares {
    fn new(count: usize, deadline: Instant) -> Self {
        let left = count;
        Self { left, deadline }
    }

    /// The end of the next share.
    fn next(&mut self) -> Instant {
        let now = Instant::now();
        let count = u32::try_from(self.left.max(1)).unwrap_or(u32::MAX);
        self.left = self.left.saturating_sub(1);
        now + self.deadline.saturating_duration_since(now) / count
    }
}

/// By the number of processors, and at most a quarter of the container's limit.
fn default_max_processes() -> u64 {
    let processors = thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let usual =
        (processors * PROCESSES_PER_PROCESSOR).clamp(*MAX_PROCESSES.start(), *MAX_PROCESSES.end());
    proc::process_limit().map_or(usual, |most| usual.min(most / 4).max(1))
}

fn unknown(id: &str) -> Error {
    Error::new(
        Kind::NotFound,
        format!("there is no sandbox {id}; it may have been deleted, or idle for too long"),
    )
}

/// What is reserved for sandboxes that are being made. Nothing is left of those that are not done when this is dropped.
struct Reserved<'a> {
    host: &'a Host,
    reservations: Vec<Reservation>,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        for reservation in self.reservations.drain(..) {
            let is_clean = self.host.homes.remove(&reservation.id, None).is_ok();
            let mut table = self.host.table();
            table.reserved -= 1;
            table.give_back(reservation.user, is_clean);
            drop(table);
            self.host.changed.notify_all();
        }
    }
}

/// The key of a request that is making a sandbox.
struct KeyInUse<'a> {
    host: &'a Host,
    key: &'a str,
}

impl Drop for KeyInUse<'_> {
    fn drop(&mut self) {
        self.host.table().keys.remove(self.key);
        self.host.changed.notify_all();
    }
}

/// The result of a deletion that has panicked.
fn failed_to_delete() -> Error {
    let text = "the server failed to delete the sandbox, and its log says where; it is tried again";
    Error::new(Kind::System, text)
}

/// Sandboxes whose deletion has not come to a result. After a panic it is retried.
struct Unsettled<'a> {
    host: &'a Host,
    /// By number.
    left: HashMap<u64, &'a Arc<Sandbox>>,
}

impl Drop for Unsettled<'_> {
    fn drop(&mut self) {
        for (_, sandbox) in self.left.drain() {
            let failed = Err(failed_to_delete());
            self.host.table().settle(sandbox, &failed);
            self.host.changed.notify_all();
        }
    }
}

/// The isolation of sandboxes that choose none.
fn default_isolation(policy: &Policy, chosen: DefaultIsolation, network: &Posture) -> Isolation {
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

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::path::PathBuf;

    use super::*;
    use crate::http::seats::Seats;

    /// A host with a reservation for one sandbox, in a directory of its own.
    struct Small {
        host: Arc<Host>,
        homes: PathBuf,
    }

    impl Small {
        /// As many sandboxes as users, which no other test has, of this run or another.
        fn new(count: u32) -> Self {
            let uid = 64_100 + std::process::id() % 250 * 4 + count;
            let users = uid..=uid + count - 1;
            let homes = std::env::temp_dir().join(format!("sbx-host-{uid}-{}", std::process::id()));
            let settings = HostSettings {
                capacity: users.clone().count(),
                homes: homes.clone(),
                users,
                min_landlock_abi: 0,
                allow_unconfined: true,
                tcp_ports: None,
                isolation: DefaultIsolation::Fixed(Isolation::Landlock),
                token_file: None,
            };
            let shared = Shared::new(4096, 4096).unwrap();
            let contexts = ContextsSettings::default();
            let budget = Budget::new(1 << 20);
            let egress = Egress::new(Seats::new(1, Arc::clone(&budget)));
            let host = Host::new(
                &settings,
                None,
                Posture::Open,
                egress,
                shared,
                budget,
                contexts,
            )
            .unwrap();
            Self { host, homes }
        }

        fn create(&self) -> Option<Arc<Sandbox>> {
            let (mut made, _) = self.host.create(1, &SandboxSpec::default()).unwrap();
            made.pop()
        }
    }

    impl Drop for Small {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.homes);
        }
    }

    /// The client gets its answer, and no other sandbox gets the user or the slot.
    #[test]
    fn a_home_that_is_not_gone_in_time_keeps_its_place_and_its_user_until_it_is() {
        if !nix::unistd::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "needs root");
            return;
        }
        let small = Small::new(1);
        let host = &small.host;
        let sandbox = small.create().unwrap();
        std::fs::write(sandbox.home.join("file"), "x").unwrap();
        let id = sandbox.id.clone();
        assert_eq!(host.empty_for(), None);
        let ended = |is_first_report, is_removing| Ended {
            is_first_report,
            is_removing,
        };
        assert_eq!(host.delete(&id).unwrap(), ended(true, true));
        assert!(sandbox.home.join("file").exists());
        assert_eq!(host.find(&id).err().unwrap().kind(), Kind::NotFound);
        assert_eq!(host.count(), 0);
        for _ in 0..2 {
            assert!(small.create().is_none(), "its reservation is taken");
            assert_eq!(host.delete(&id).unwrap(), ended(false, true));
            let all = AllEnded {
                count: 0,
                removing: 1,
            };
            assert_eq!(host.delete_all().unwrap(), all);
        }
        assert!(host.empty_for().is_some(), "a host does not live on for it");
        // As the maintenance does.
        let left = host.table().take(&id).unwrap();
        assert!(host.empty_for().is_some());
        assert_eq!(host.delete(&id).unwrap(), ended(false, true));
        assert!(small.create().is_none(), "its reservation is taken");
        assert!(host.empty_for().is_some());
        host.end(&left, "tried again", Instant::now() + BACKGROUND_LIMIT)
            .unwrap();
        assert!(!sandbox.home.exists());
        assert_eq!(host.delete(&id).unwrap(), ended(false, false));
        let next = small.create().unwrap();
        assert_eq!(next.user, sandbox.user);
        assert_eq!(host.empty_for(), None);
    }

    /// Removing the home of one may take longer than the deletion of all.
    #[test]
    fn all_are_killed_before_anything_of_one_is_removed() {
        if !nix::unistd::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "needs root");
            return;
        }
        let small = Small::new(2);
        let (all, _) = small.host.create(2, &SandboxSpec::default()).unwrap();
        let mut command = std::process::Command::new("/bin/sleep");
        let mut sleeper = command.arg("60").uid(all[1].user.uid).spawn().unwrap();
        let mut ended = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(60);
        let done = |sandbox: &Arc<Sandbox>, is_empty| {
            let mut has_ended = || {
                thread::sleep(Duration::from_millis(1));
                sleeper.try_wait().unwrap().is_some()
            };
            assert!((0..10_000).any(|_| has_ended()));
            ended.push((sandbox.number, is_empty));
        };
        let signaller = &small.host.signaller;
        signaller.empty(&all, Reason::Deleted, deadline, done);
        assert_eq!(ended, [(all[0].number, true), (all[1].number, true)]);
    }
}
