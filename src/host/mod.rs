//! Many sandboxes in one machine: making them, finding them, ending them.
//!
//! A sandbox is a [`Workspace`] with a user, a home and a ruleset of its own. How many there are is
//! decided under one lock, before anything is made and after everything is gone, so the capacity is
//! exact whatever arrives at once. A user is given again only after the kernel said that nothing
//! runs as it.
//!
//! Here is the life of a sandbox, from its making to its end. What it is made of has files of its own:
//! [`table`] counts, [`users`] are given, [`homes`] made, [`signals`] sent.

mod homes;
mod sandbox;
mod signals;
mod table;
mod users;

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::errno::Errno;

use crate::config::HostSettings;
use crate::confine::{Policy, SandboxSettings};
use crate::error::{Error, Kind, Result};
use crate::files::{Disk, Root};
use crate::logging;
use crate::ports::Ports;
use crate::proc;
use crate::process::Reason;
use crate::process::registry::Shared;
use crate::sys::{self, User};
use crate::workspace::{Lease, Workspace};
use homes::Homes;
pub use sandbox::{Sandbox, Wish};
use signals::Signaller;
use table::{Ids, Place, Table};
use users::Users;
pub use users::check_rights;

/// Processes and threads that a sandbox may have at once unless its maker says otherwise, for each
/// processor: programs start threads by their number, and how long everybody else waits for a turn
/// goes by the same.
const PROCESSES_PER_PROCESSOR: u64 = 128;

/// The bounds of that.
const MAX_PROCESSES: RangeInclusive<u64> = 256..=4096;

/// How long the processes of a sandbox are given to be gone after they were killed. They cannot
/// refuse, but the kernel may be busy with them.
const EMPTYING_LIMIT: Duration = Duration::from_secs(20);

/// How long processes have to end by themselves when the server ends.
const GRACE: Duration = Duration::from_secs(5);

/// How long a client waits for sandboxes to be gone: it gives up after 60 s without an answer. What is
/// left then is removed without it. In unit tests that is everything.
const ANSWER_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 40 });

/// How long removing homes may take when the server ends.
const REMOVAL_LIMIT: Duration = Duration::from_secs(3);

/// How often sandboxes are looked at for idleness, and for starts that stand still.
const ROUND: Duration = Duration::from_secs(1);

/// How long one sandbox may take of a thread that ends several.
const PATIENCE_ASIDE: Duration = Duration::from_secs(10);

/// The same where there is no such thread, and all others wait to be looked after.
const PATIENCE_WITHIN: Duration = Duration::from_secs(1);

/// After how many rounds those that could not be ended are tried again.
const STUCK_ROUNDS: u64 = 10;

/// The sandboxes of a machine.
pub struct Host {
    policy: Arc<Policy>,
    shared: Arc<Shared>,
    homes: Homes,
    signaller: Signaller,
    /// Guards who there is and who may be; never held while something is made or removed.
    table: Mutex<Table>,
    /// Tells those that wait for a sandbox to be gone, and whoever looks after idle ones.
    changed: Condvar,
    default_max_processes: u64,
}

/// How the end of a sandbox came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Whether it was this call that ended it.
    pub is_news: bool,
    /// Whether its home is still being removed.
    pub is_removing: bool,
}

/// How the end of all came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllEnded {
    /// How many this call ended.
    pub count: usize,
    /// How many homes are still being removed.
    pub removing: usize,
}

impl Host {
    /// Prepares the machine; `search` is where programs are found besides a sandbox's own.
    ///
    /// To be called before the server changes its own limits: commands get those it was started with.
    ///
    /// # Errors
    /// The machine cannot hold sandboxes as they are promised: the text says what is missing.
    pub fn new(
        settings: &HostSettings,
        search: Option<&std::ffi::OsStr>,
        shared: Arc<Shared>,
    ) -> Result<Arc<Self>> {
        let policy = Policy::new(search, settings.allow_unconfined)?;
        if policy.landlock_abi() < settings.min_landlock_abi && !settings.allow_unconfined {
            return Err(Error::new(
                Kind::System,
                format!(
                    "cannot hold sandboxes: the kernel has Landlock ABI {} (0 is none, or hidden by a filter), and {} is \
                     needed; use a newer kernel, or SBX_MIN_LANDLOCK_ABI or SBX_ALLOW_UNCONFINED=1 to go on with less",
                    policy.landlock_abi(),
                    settings.min_landlock_abi
                ),
            ));
        }
        let homes = Homes::open(&settings.homes)?;
        let uid = *settings.users.start();
        let first = User { uid, gid: uid };
        homes.check_way(first)?;
        let signaller = Signaller::new(&settings.users)?;
        homes.sweep();
        let ids = Ids::new()?;
        // Sandboxes are counted from 1.
        homes.try_one(&ids.of(0), first)?;
        let users = Users::new(settings.users.clone());
        Ok(Arc::new(Self {
            policy,
            shared,
            homes,
            signaller,
            table: Mutex::new(Table::new(settings.capacity, users, ids)),
            changed: Condvar::new(),
            default_max_processes: default_max_processes(),
        }))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Every critical section leaves the table whole.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What stands around each sandbox.
    pub fn layers(&self) -> Vec<&'static str> {
        self.policy.layers()
    }

    /// The Landlock ABI of their rulesets, 0 without.
    pub fn landlock_abi(&self) -> u32 {
        self.policy.landlock_abi()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.table().sandboxes.len()
    }

    /// All of them, in the order they were made.
    pub fn list(&self) -> Vec<Arc<Sandbox>> {
        let mut all: Vec<_> = self.table().sandboxes.values().cloned().collect();
        all.sort_by_key(|sandbox| sandbox.number);
        all
    }

    /// All of them, and after them those that could not be ended yet.
    fn list_with_stuck(&self) -> Vec<Arc<Sandbox>> {
        let mut all = self.list();
        all.extend(self.table().stuck.values().cloned());
        all
    }

    /// One of them.
    ///
    /// # Errors
    /// There is none of that id.
    pub fn find(&self, id: &str) -> Result<Arc<Sandbox>> {
        let found = self.table().sandboxes.get(id).cloned();
        found.ok_or_else(|| unknown(id))
    }

    /// The right to work in one of them.
    ///
    /// # Errors
    /// There is none of that id, or it is ending.
    pub fn lease(&self, id: &str) -> Result<Lease> {
        self.find(id)?.workspace.lease().map_err(|_| unknown(id))
    }

    /// Makes as many of `count` as there is room for: all of those, or none and an error.
    ///
    /// # Errors
    /// One cannot be made.
    pub fn create(&self, count: usize, wish: &Wish) -> Result<Vec<Arc<Sandbox>>> {
        let places = self.table().reserve(count)?;
        let made: Result<Vec<_>> = places.iter().map(|place| self.make(place, wish)).collect();
        let made = made.inspect_err(|error| {
            logging::info(format_args!("cannot make a sandbox: {error}"));
            // Those that were made are gone, and with them descriptors that removing may need.
            for place in &places {
                let is_clean = self.homes.remove(&place.id, None).is_ok();
                let mut table = self.table();
                table.reserved -= 1;
                table.give_back(place.user, is_clean);
            }
            self.changed.notify_all();
        })?;
        let mut table = self.table();
        for sandbox in &made {
            let known = Arc::clone(sandbox);
            table.sandboxes.insert(sandbox.id.clone(), known);
        }
        table.reserved -= made.len();
        drop(table);
        self.changed.notify_all();
        for sandbox in &made {
            let Sandbox { id, user, .. } = &**sandbox;
            logging::info(format_args!("sandbox {id} created, uid {}", user.uid));
        }
        Ok(made)
    }

    fn make(&self, place: &Place, wish: &Wish) -> Result<Arc<Sandbox>> {
        let home = self.homes.make(&place.id, place.user)?;
        if sys::is_getting_scarce(home.as_fd()) {
            let act = "cannot make a sandbox: the server needs its last descriptors for those there are; \
                       delete some, or raise the limit on open files";
            return Err(Error::system(act, Errno::EMFILE));
        }
        self.furnish(place, home, wish).map(Arc::new)
    }

    fn furnish(&self, place: &Place, home: OwnedFd, wish: &Wish) -> Result<Sandbox> {
        let path = self.homes.path_of(&place.id);
        let max_processes = wish.max_processes.unwrap_or(self.default_max_processes);
        let confinement = self.policy.confine(&SandboxSettings {
            id: &place.id,
            user: place.user,
            home: &path,
            home_directory: home.as_fd(),
            environment: &wish.environment,
            max_processes,
            max_memory: wish.max_memory,
        })?;
        let home = Arc::new(home);
        let ports = Ports::home(Arc::clone(&home), place.user);
        let root = Root::home(home, place.user);
        #[expect(clippy::disallowed_methods, reason = "clients are told")]
        let created = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(Sandbox {
            id: place.id.clone(),
            number: place.number,
            user: place.user,
            home: path,
            created_at_ms: u64::try_from(created.unwrap_or_default().as_millis())
                .unwrap_or(u64::MAX),
            idle_timeout: wish.idle_timeout,
            max_processes,
            max_memory: wish.max_memory,
            workspace: Workspace::new(root, confinement, ports, Arc::clone(&self.shared)),
        })
    }

    /// Ends a sandbox: kills what runs in it, removes its home, frees its user and its place. A home so
    /// large that it is not gone in time is removed without the caller; its user and its place stay
    /// taken until it is.
    ///
    /// # Errors
    /// There never was one of that id, or something of it cannot be ended; the sandbox is gone from
    /// the list all the same, but keeps its place and its user, and is tried again.
    pub fn delete(&self, id: &str) -> Result<Ended> {
        let deadline = Instant::now() + ANSWER_LIMIT;
        let mut table = self.table();
        while !table.sandboxes.contains_key(id) {
            let is_ending = table.is_ending(id);
            if table.has_ended(id) {
                return Ok(Ended {
                    is_news: false,
                    is_removing: is_ending || table.stuck.contains_key(id),
                });
            }
            if !is_ending {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Ended {
                    is_news: false,
                    is_removing: true,
                });
            }
            let waited = self.changed.wait_timeout(table, left);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let sandbox = table.take(id).ok_or_else(|| unknown(id))?;
        drop(table);
        self.end(&sandbox, "deleted", Some(deadline))
    }

    /// Ends all there are now, those too that could not be ended before.
    ///
    /// # Errors
    /// The first of what could not be ended; the others are.
    pub fn delete_all(&self) -> Result<AllEnded> {
        let deadline = Instant::now() + ANSWER_LIMIT;
        // Taken before anything is done to them: what others end in the meantime may have given its user
        // to somebody else.
        let mut table = self.table();
        let ids = table.sandboxes.keys().chain(table.stuck.keys()).cloned();
        let ids: Vec<_> = ids.collect();
        let all: Vec<_> = ids.iter().filter_map(|id| table.take(id)).collect();
        drop(table);
        // They die while others are being waited for, and all before the first home is removed, which
        // may take long.
        for sandbox in &all {
            sandbox.workspace.close();
            if sys::user_has_processes(sandbox.user) {
                sandbox.workspace.processes.expect_kill(Reason::Deleted);
                self.signaller.signal(sandbox.user, libc::SIGKILL);
            }
        }
        let emptying_deadline = Instant::now() + EMPTYING_LIMIT;
        for sandbox in &all {
            // What cannot be emptied is told of when it is to be ended.
            let _ = self.signaller.empty(sandbox, emptying_deadline);
        }
        let (mut count, mut failure) = (0, None);
        for sandbox in &all {
            match self.end(sandbox, "deleted", Some(deadline)) {
                Ok(ended) => count += usize::from(ended.is_news),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        // Others may have begun to end some before.
        let left = deadline.saturating_duration_since(Instant::now());
        let theirs = |table: &Table| !table.ending.is_empty();
        self.wait_while(left, theirs);
        if let Some(error) = failure {
            return Err(error);
        }
        let table = self.table();
        let removing = table.ending.len() + table.retried.len() + table.stuck.len();
        Ok(AllEnded { count, removing })
    }

    /// Ends a sandbox that was moved from the sandboxes to the ending ones. What is left of its home at
    /// the `deadline` is removed later.
    fn end(&self, sandbox: &Arc<Sandbox>, how: &str, deadline: Option<Instant>) -> Result<Ended> {
        let begun = Instant::now();
        sandbox.workspace.close();
        let emptying = begun + EMPTYING_LIMIT;
        let emptied = self.signaller.empty(
            sandbox,
            deadline.map_or(emptying, |limit| limit.min(emptying)),
        );
        let result = emptied.and_then(|()| self.homes.remove(&sandbox.id, deadline));
        let Sandbox { id, user, .. } = &**sandbox;
        match &result {
            Ok(true) => logging::info(format_args!(
                "sandbox {id} {how}, uid {}, in {} us",
                user.uid,
                begun.elapsed().as_micros()
            )),
            Ok(false) => logging::info(format_args!(
                "sandbox {id} {how}, its home is large and still being removed, its uid {} stays taken",
                user.uid
            )),
            Err(error) => logging::info(format_args!(
                "sandbox {id} {how} but not gone, its uid {} stays taken: {error}",
                user.uid
            )),
        }
        let is_news = self.table().settle(sandbox, &result);
        self.changed.notify_all();
        result.map(|is_gone| Ended {
            is_news,
            is_removing: !is_gone,
        })
    }

    /// Looks after the sandboxes for as long as the server lives: ends those that were idle for too
    /// long, and starts that would never end.
    pub fn look_after(self: &Arc<Self>) {
        for round in 0_u64.. {
            let mut table = self.table();
            while table.occupied() == 0 {
                table = self
                    .changed
                    .wait(table)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            let all: Vec<_> = table.sandboxes.values().cloned().collect();
            let mut retried = Vec::new();
            if round % STUCK_ROUNDS == 0 {
                let stuck: Vec<_> = table.stuck.keys().cloned().collect();
                retried.extend(stuck.iter().filter_map(|id| table.take(id)));
            }
            drop(table);
            let mut evicted = Vec::new();
            for sandbox in &all {
                sandbox.workspace.processes.kill_stopped_starts();
                let is_idle = sandbox
                    .idle_timeout
                    .is_some_and(|limit| sandbox.workspace.close_if_idle(limit));
                // Deleted in the meantime: then that is somebody else's work.
                if is_idle && let Some(sandbox) = self.table().take(&sandbox.id) {
                    evicted.push(sandbox);
                }
            }
            drop(all);
            // Apart, for what is tried again has taken long before.
            self.end_aside(retried, "tried again");
            self.end_aside(evicted, "evicted");
            thread::sleep(ROUND);
        }
    }

    /// Ends sandboxes on a thread of its own: removing a large home takes a while. None of them keeps the
    /// others waiting for long: what is not gone in time is tried again, as what could not be ended is.
    fn end_aside(self: &Arc<Self>, leaving: Vec<Arc<Sandbox>>, how: &'static str) {
        if leaving.is_empty() {
            return;
        }
        let leaving = Arc::new(leaving);
        let (host, theirs) = (Arc::clone(self), Arc::clone(&leaving));
        let end_all = move |host: &Self, leaving: &[Arc<Sandbox>], patience: Duration| {
            for sandbox in leaving {
                let _ = host.end(sandbox, how, Some(Instant::now() + patience));
            }
        };
        let thread = thread::Builder::new()
            .name("ending".to_owned())
            .stack_size(256 * 1024)
            .spawn(move || end_all(&host, &theirs, PATIENCE_ASIDE));
        if thread.is_err() {
            end_all(self, &leaving, PATIENCE_WITHIN);
        }
    }

    /// How many commands run in all of them.
    pub fn processes_running(&self) -> usize {
        let running = |sandbox: &Arc<Sandbox>| sandbox.workspace.processes.count_running();
        self.list().iter().map(running).sum()
    }

    /// The space where homes are.
    pub fn disk(&self) -> Option<Disk> {
        self.homes.disk()
    }

    /// Whether anything is going on in any of them.
    pub fn is_busy(&self) -> bool {
        let is_busy = |sandbox: &Arc<Sandbox>| sandbox.workspace.idle_for().is_none();
        self.table().sandboxes.values().any(is_busy)
    }

    /// How long there has been no sandbox; none while there is one.
    pub fn empty_for(&self) -> Option<Duration> {
        self.table().empty_for()
    }

    /// Ends the host if there has been no sandbox for `limit`; none is made afterwards.
    pub fn close_if_empty(&self, limit: Duration) -> bool {
        let mut table = self.table();
        table.closed |= table.empty_for().is_some_and(|empty| empty >= limit);
        table.closed
    }

    /// Ends everything: asks all processes of all sandboxes to end, kills what has not after a grace,
    /// and removes the homes.
    pub fn shut_down(&self) {
        self.table().closed = true;
        // What is being made is ended with the others; what is being ended needs no help.
        self.wait_while(GRACE, |table| table.reserved > 0);
        let all = self.list_with_stuck();
        for sandbox in &all {
            sandbox.workspace.close();
        }
        let left = || -> Vec<&Arc<Sandbox>> {
            let runs = |sandbox: &&Arc<Sandbox>| {
                sandbox.workspace.processes.is_starting() || sys::user_has_processes(sandbox.user)
            };
            all.iter().filter(runs).collect()
        };
        for sandbox in left() {
            sandbox.workspace.processes.expect_signal(libc::SIGTERM);
            self.signaller.signal(sandbox.user, libc::SIGTERM);
            // A stopped process takes the first signal only when it goes on.
            self.signaller.signal(sandbox.user, libc::SIGCONT);
        }
        let deadline = Instant::now() + GRACE;
        while !left().is_empty() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        for sandbox in left() {
            sandbox.workspace.processes.expect_kill(Reason::Killed);
            self.signaller.signal(sandbox.user, libc::SIGKILL);
        }
        let removal_deadline = Instant::now() + REMOVAL_LIMIT;
        for sandbox in &all {
            if self.signaller.empty(sandbox, removal_deadline).is_ok() {
                let _ = self.homes.remove(&sandbox.id, Some(removal_deadline));
            }
        }
        let left = removal_deadline.saturating_duration_since(Instant::now());
        self.wait_while(left, |table| {
            !table.ending.is_empty() || !table.retried.is_empty()
        });
    }

    /// Waits for others to change the table, at most for `limit`.
    fn wait_while(&self, limit: Duration, condition: impl Fn(&Table) -> bool) {
        let waited = self
            .changed
            .wait_timeout_while(self.table(), limit, |table| condition(table));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// By the number of processors, and not more than a quarter of what the container may have in all.
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A host with a place for one sandbox, in a directory of its own.
    struct Small {
        host: Arc<Host>,
        homes: PathBuf,
    }

    impl Small {
        fn new(uid: u32) -> Self {
            let homes = std::env::temp_dir().join(format!("sbx-host-{uid}-{}", std::process::id()));
            let settings = HostSettings {
                capacity: 1,
                homes: homes.clone(),
                users: uid..=uid,
                min_landlock_abi: 0,
                allow_unconfined: true,
            };
            let shared = Shared::new(4096, 4096).unwrap();
            let host = Host::new(&settings, None, shared).unwrap();
            Self { host, homes }
        }

        fn create(&self) -> Option<Arc<Sandbox>> {
            self.host.create(1, &Wish::default()).unwrap().pop()
        }
    }

    impl Drop for Small {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.homes);
        }
    }

    /// No client is kept waiting for it, and nobody is given what it still has.
    #[test]
    fn a_home_that_is_not_gone_in_time_keeps_its_place_and_its_user_until_it_is() {
        if !nix::unistd::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "needs root");
            return;
        }
        let small = Small::new(65_012);
        let host = &small.host;
        let sandbox = small.create().unwrap();
        std::fs::write(sandbox.home().join("file"), "x").unwrap();
        let id = sandbox.id().to_owned();
        assert_eq!(host.empty_for(), None);
        let ended = |is_news, is_removing| Ended {
            is_news,
            is_removing,
        };
        assert_eq!(host.delete(&id).unwrap(), ended(true, true));
        assert!(sandbox.home().join("file").exists());
        assert_eq!(host.find(&id).err().unwrap().kind(), Kind::NotFound);
        assert_eq!(host.count(), 0);
        for _ in 0..2 {
            assert!(small.create().is_none(), "its place is taken");
            assert_eq!(host.delete(&id).unwrap(), ended(false, true));
            let all = AllEnded {
                count: 0,
                removing: 1,
            };
            assert_eq!(host.delete_all().unwrap(), all);
        }
        assert!(host.empty_for().is_some(), "a host does not live on for it");
        // As the caretaker does.
        let left = host.table().take(&id).unwrap();
        assert!(host.empty_for().is_some());
        assert_eq!(host.delete(&id).unwrap(), ended(false, true));
        assert!(small.create().is_none(), "its place is taken");
        assert!(host.empty_for().is_some());
        host.end(&left, "tried again", None).unwrap();
        assert!(!sandbox.home().exists());
        assert_eq!(host.delete(&id).unwrap(), ended(false, false));
        let next = small.create().unwrap();
        assert_eq!(next.user(), sandbox.user());
        assert_eq!(host.empty_for(), None);
    }
}
