//! Many sandboxes in one machine: making them, finding them, ending them.
//!
//! A sandbox is a [`Workspace`] with a user, a home and a ruleset of its own. How many there are is
//! decided under one lock, before anything is made and after everything is gone, so the capacity is
//! exact whatever arrives at once. A user is given again only after the kernel said that nothing
//! runs as it.

mod users;

use std::collections::{HashMap, VecDeque};
use std::fmt::Write;
use std::fs::{DirBuilder, File};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag, open};
use nix::sys::stat::{Mode, fstat};
use sha2::{Digest, Sha256};

use crate::command::EnvironmentChange;
use crate::config::HostSettings;
use crate::confine::{Policy, SandboxSettings, is_among_programs};
use crate::error::{Error, Kind, Result};
use crate::files::{self, Disk, Root};
use crate::logging;
use crate::ports::Ports;
use crate::proc;
use crate::process::Reason;
use crate::process::registry::Shared;
use crate::sys::{self, ActingAs, User};
use crate::workspace::{Lease, Workspace};
use users::Users;

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

/// After how many rounds those that could not be ended are tried again.
const STUCK_ROUNDS: u64 = 10;

/// Ended sandboxes whose ids are remembered, so that ending one again is no error.
const REMEMBERED: usize = 4096;

/// What an id has of randomness; two digits each.
const ID_BYTES: usize = 12;

/// The sandboxes of a machine.
pub struct Host {
    /// What ids are made from.
    secret: [u8; 32],
    policy: Arc<Policy>,
    shared: Arc<Shared>,
    capacity: usize,
    homes_path: PathBuf,
    homes: OwnedFd,
    /// Held for as long as the server lives: homes are one server's.
    _lock: Flock<File>,
    /// Guards who there is and who may be; never held while something is made or removed.
    table: Mutex<Table>,
    /// Tells those that wait for a sandbox to be gone, and whoever looks after idle ones.
    changed: Condvar,
    /// Who signals sandboxes' processes, see [`sys::signal_user`]. Guards that only one does so at a
    /// time.
    guise: Mutex<User>,
    default_max_processes: u64,
}

struct Table {
    sandboxes: HashMap<String, Arc<Sandbox>>,
    /// Being made.
    reserved: usize,
    /// Being ended.
    ending: Vec<Ending>,
    /// Those that are not gone yet, because something of them is left. They are no sandboxes any more,
    /// and have their place and their user all the same.
    stuck: HashMap<String, Arc<Sandbox>>,
    /// The newest last.
    ended: VecDeque<String>,
    users: Users,
    made: u64,
    /// Since when there has been no sandbox.
    empty_since: Option<Instant>,
    /// No more are made.
    closed: bool,
}

/// A sandbox on its way out.
struct Ending {
    id: String,
    /// Whether it was stuck before.
    is_retry: bool,
}

impl Table {
    /// Places that are taken.
    fn occupied(&self) -> usize {
        self.sandboxes.len() + self.reserved + self.ending.len() + self.stuck.len()
    }

    fn is_ending(&self, id: &str) -> bool {
        self.ending.iter().any(|ending| ending.id == id)
    }

    /// Takes out a sandbox that is there, or partly there, to be ended.
    fn take(&mut self, id: &str) -> Option<Arc<Sandbox>> {
        let found = self.sandboxes.remove(id);
        let is_retry = found.is_none();
        let sandbox = found.or_else(|| self.stuck.remove(id))?;
        let id = id.to_owned();
        self.ending.push(Ending { id, is_retry });
        Some(sandbox)
    }

    /// Whether its end was told of.
    fn has_ended(&self, id: &str) -> bool {
        self.ended.iter().any(|ended| ended == id)
    }

    /// Takes an ending sandbox for ended; whether that is news.
    fn note_end(&mut self, id: &str, is_retry: bool) -> bool {
        // Only who was stuck may have been told of before: there are many to look through.
        if is_retry && self.has_ended(id) {
            return false;
        }
        self.ended.push_back(id.to_owned());
        if self.ended.len() > REMEMBERED {
            self.ended.pop_front();
        }
        true
    }

    /// The number of those that are there, or coming or going, has changed. What could not be ended is
    /// none of them: a host must not live on for it.
    fn note_occupation(&mut self) {
        let going = self.ending.iter().filter(|ending| !ending.is_retry).count();
        if self.sandboxes.len() + self.reserved + going > 0 {
            self.empty_since = None;
        } else {
            self.empty_since.get_or_insert_with(Instant::now);
        }
    }

    /// Takes back a user, for good if something of it may be left.
    fn give_back(&mut self, user: User, is_clean: bool) {
        if is_clean {
            self.users.free(user);
        } else {
            self.users.set_aside(user);
        }
        self.note_occupation();
    }
}

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

/// One of them.
pub struct Sandbox {
    id: String,
    number: u64,
    user: User,
    home: PathBuf,
    created_at_ms: u64,
    idle_timeout: Option<Duration>,
    max_processes: u64,
    max_memory: Option<u64>,
    workspace: Arc<Workspace>,
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
        let (homes, lock) = open_homes(&settings.homes)?;
        let guise = explore(settings)?;
        sweep(&homes, &settings.homes);
        let secret = sys::random_bytes()
            .map_err(|errno| Error::system("cannot make ids for sandboxes", errno))?;
        let host = Arc::new(Self {
            secret,
            policy,
            shared,
            capacity: settings.capacity,
            homes_path: settings.homes.clone(),
            homes,
            _lock: lock,
            table: Mutex::new(Table {
                sandboxes: HashMap::new(),
                reserved: 0,
                ending: Vec::new(),
                stuck: HashMap::new(),
                ended: VecDeque::new(),
                users: Users::new(settings.users.clone()),
                made: 0,
                empty_since: Some(Instant::now()),
                closed: false,
            }),
            changed: Condvar::new(),
            guise: Mutex::new(guise),
            default_max_processes: default_max_processes(),
        });
        host.try_home(*settings.users.start())?;
        Ok(host)
    }

    /// Makes a home and removes it: what would be missing for that is better known now.
    fn try_home(&self, uid: u32) -> Result<()> {
        // Sandboxes are counted from 1.
        let name = self.id(0);
        drop(files::make_home(
            &self.homes,
            name.as_bytes(),
            User { uid, gid: uid },
        )?);
        self.remove_home(&name, None).map(drop)
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
        let places = self.reserve(count)?;
        let made: Result<Vec<_>> = places.iter().map(|place| self.make(place, wish)).collect();
        let made = made.inspect_err(|error| {
            logging::info(format_args!("cannot make a sandbox: {error}"));
            // Those that were made are gone, and with them descriptors that removing may need.
            for place in &places {
                let is_clean = self.remove_home(&place.id, None).is_ok();
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

    /// Sets aside what sandboxes need that must not be promised twice.
    fn reserve(&self, count: usize) -> Result<Vec<Place>> {
        let mut table = self.table();
        if table.closed {
            return Err(Error::new(
                Kind::ShuttingDown,
                "cannot make a sandbox: the server is ending",
            ));
        }
        let room = self.capacity.saturating_sub(table.occupied());
        let mut places = Vec::new();
        while places.len() < count.min(room)
            && let Some(user) = table.users.take(sys::user_has_processes)
        {
            table.made += 1;
            places.push(Place {
                id: self.id(table.made),
                number: table.made,
                user,
            });
        }
        table.reserved += places.len();
        table.note_occupation();
        Ok(places)
    }

    /// The id of the sandbox of this number: nobody can guess it, and no other has it.
    fn id(&self, number: u64) -> String {
        let mut digest = Sha256::new();
        digest.update(self.secret);
        digest.update(number.to_le_bytes());
        let digest = digest.finalize();
        let mut id = String::with_capacity(2 * ID_BYTES);
        for byte in &digest[..ID_BYTES] {
            // Writing to memory does not fail.
            let _ = write!(id, "{byte:02x}");
        }
        id
    }

    fn make(&self, place: &Place, wish: &Wish) -> Result<Arc<Sandbox>> {
        let home = files::make_home(&self.homes, place.id.as_bytes(), place.user)?;
        if sys::is_getting_scarce(home.as_fd()) {
            let act = "cannot make a sandbox: the server needs its last descriptors for those there are; \
                       delete some, or raise the limit on open files";
            return Err(Error::system(act, Errno::EMFILE));
        }
        self.furnish(place, home, wish).map(Arc::new)
    }

    fn furnish(&self, place: &Place, home: OwnedFd, wish: &Wish) -> Result<Sandbox> {
        let path = self.homes_path.join(&place.id);
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

    fn remove_home(&self, id: &str, deadline: Option<Instant>) -> Result<bool> {
        files::remove_home(&self.homes, id.as_bytes(), deadline)
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
                self.signal(sandbox.user, libc::SIGKILL);
            }
        }
        let emptying_deadline = Instant::now() + EMPTYING_LIMIT;
        for sandbox in &all {
            // What cannot be emptied is told of when it is to be ended.
            let _ = self.empty(sandbox, emptying_deadline);
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
        let theirs = |table: &Table| table.ending.iter().any(|ending| !ending.is_retry);
        self.wait_while(left, theirs);
        if let Some(error) = failure {
            return Err(error);
        }
        let table = self.table();
        let removing = table.ending.len() + table.stuck.len();
        Ok(AllEnded { count, removing })
    }

    /// Ends a sandbox that was moved from the sandboxes to the ending ones. What is left of its home at
    /// the `deadline` is removed later.
    fn end(&self, sandbox: &Arc<Sandbox>, how: &str, deadline: Option<Instant>) -> Result<Ended> {
        let begun = Instant::now();
        sandbox.workspace.close();
        let emptying = begun + EMPTYING_LIMIT;
        let emptied = self.empty(
            sandbox,
            deadline.map_or(emptying, |limit| limit.min(emptying)),
        );
        let result = emptied.and_then(|()| self.remove_home(&sandbox.id, deadline));
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
        let mut table = self.table();
        let place = table.ending.iter().position(|ending| ending.id == *id);
        let is_retry = place.is_some_and(|place| table.ending.swap_remove(place).is_retry);
        let is_news = result.is_ok() && table.note_end(id, is_retry);
        if let Ok(true) = result {
            table.give_back(*user, true);
        } else {
            table.stuck.insert(id.clone(), Arc::clone(sandbox));
            table.note_occupation();
        }
        drop(table);
        self.changed.notify_all();
        result.map(|is_gone| Ended {
            is_news,
            is_removing: !is_gone,
        })
    }

    /// Kills whatever runs as a sandbox's user, until nothing does, but no longer than until `deadline`.
    fn empty(&self, sandbox: &Sandbox, deadline: Instant) -> Result<()> {
        let processes = &sandbox.workspace.processes;
        let mut pause = Duration::from_micros(100);
        // In this order: what was being started at the first look may run at the second.
        while processes.is_starting() || sys::user_has_processes(sandbox.user) {
            if Instant::now() >= deadline {
                return Err(Error::new(
                    Kind::System,
                    format!(
                        "cannot end sandbox {}: something of it was killed and has not died",
                        sandbox.id
                    ),
                ));
            }
            processes.expect_kill(Reason::Deleted);
            self.signal(sandbox.user, libc::SIGKILL);
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Signals whatever runs as a user.
    fn signal(&self, user: User, signal: i32) {
        let guise = self.guise.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = !sys::user_has_processes(*guise);
        if !is_free || sys::signal_user(user, signal, *guise).is_err() {
            drop(guise);
            // Where no process is to be had, as when a sandbox has taken all that there may be: one
            // after the other, until there is one.
            signal_each(user, signal);
        }
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
            let mut leaving: Vec<(Arc<Sandbox>, &str)> = Vec::new();
            if round % STUCK_ROUNDS == 0 {
                let stuck: Vec<_> = table.stuck.keys().cloned().collect();
                let retried = stuck.iter().filter_map(|id| table.take(id));
                leaving.extend(retried.map(|sandbox| (sandbox, "tried again")));
            }
            drop(table);
            for sandbox in &all {
                sandbox.workspace.processes.kill_stopped_starts();
                let is_idle = sandbox
                    .idle_timeout
                    .is_some_and(|limit| sandbox.workspace.close_if_idle(limit));
                // Deleted in the meantime: then that is somebody else's work.
                if is_idle && let Some(sandbox) = self.table().take(&sandbox.id) {
                    leaving.push((sandbox, "evicted"));
                }
            }
            drop(all);
            if !leaving.is_empty() {
                self.end_aside(leaving);
            }
            thread::sleep(ROUND);
        }
    }

    /// Ends sandboxes on a thread of its own: removing a large home takes a while.
    fn end_aside(self: &Arc<Self>, leaving: Vec<(Arc<Sandbox>, &'static str)>) {
        let leaving = Arc::new(leaving);
        let (host, theirs) = (Arc::clone(self), Arc::clone(&leaving));
        let end_all = move |host: &Self, leaving: &[(Arc<Sandbox>, &str)]| {
            for (sandbox, how) in leaving {
                // What cannot be ended is logged, and tried again.
                let _ = host.end(sandbox, how, None);
            }
        };
        let thread = thread::Builder::new()
            .name("ending".to_owned())
            .stack_size(256 * 1024)
            .spawn(move || end_all(&host, &theirs));
        if thread.is_err() {
            end_all(self, &leaving);
        }
    }

    /// How many commands run in all of them.
    pub fn processes_running(&self) -> usize {
        let running = |sandbox: &Arc<Sandbox>| sandbox.workspace.processes.count_running();
        self.list().iter().map(running).sum()
    }

    /// The space where homes are.
    pub fn disk(&self) -> Option<Disk> {
        Disk::of(&self.homes)
    }

    /// Whether anything is going on in any of them.
    pub fn is_busy(&self) -> bool {
        let is_busy = |sandbox: &Arc<Sandbox>| sandbox.workspace.idle_for().is_none();
        self.table().sandboxes.values().any(is_busy)
    }

    /// How long there has been no sandbox; none while there is one.
    pub fn empty_for(&self) -> Option<Duration> {
        self.table().empty_since.map(|since| since.elapsed())
    }

    /// Ends the host if there has been no sandbox for `limit`; none is made afterwards.
    pub fn close_if_empty(&self, limit: Duration) -> bool {
        let mut table = self.table();
        table.closed |= table
            .empty_since
            .is_some_and(|since| since.elapsed() >= limit);
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
            self.signal(sandbox.user, libc::SIGTERM);
            // A stopped process takes the first signal only when it goes on.
            self.signal(sandbox.user, libc::SIGCONT);
        }
        let deadline = Instant::now() + GRACE;
        while !left().is_empty() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        for sandbox in left() {
            sandbox.workspace.processes.expect_kill(Reason::Killed);
            self.signal(sandbox.user, libc::SIGKILL);
        }
        let removal_deadline = Instant::now() + REMOVAL_LIMIT;
        for sandbox in &all {
            if self.empty(sandbox, removal_deadline).is_ok() {
                let _ = self.remove_home(&sandbox.id, Some(removal_deadline));
            }
        }
        let left = removal_deadline.saturating_duration_since(Instant::now());
        self.wait_while(left, |table| !table.ending.is_empty());
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

/// Where a sandbox will be.
struct Place {
    id: String,
    number: u64,
    user: User,
}

fn unknown(id: &str) -> Error {
    Error::new(
        Kind::NotFound,
        format!("there is no sandbox {id}; it may have been deleted, or idle for too long"),
    )
}

fn is_id(name: &str) -> bool {
    let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.len() == 2 * ID_BYTES && name.bytes().all(is_digit)
}

/// Whether this process can be what sandboxes need it to be.
///
/// # Errors
/// What it cannot.
pub fn check_rights(settings: &HostSettings) -> Result<()> {
    let refuse = |why: String| {
        Err(Error::new(
            Kind::System,
            format!("cannot hold sandboxes: {why}"),
        ))
    };
    if !nix::unistd::geteuid().is_root() {
        return refuse("the server must run as root to give each its own user".to_owned());
    }
    for uid in [*settings.users.start(), *settings.users.end()] {
        if ActingAs::new(User { uid, gid: uid }).is_err() {
            return refuse(format!(
                "uid {uid} of SBX_UID_RANGE does not exist in this user namespace, or the server may not act as it"
            ));
        }
    }
    Ok(())
}

/// Opens where homes are made, making it if need be, and takes it for this server.
fn open_homes(path: &Path) -> Result<(OwnedFd, Flock<File>)> {
    let shown = path.display();
    let failed =
        |error: std::io::Error| Error::io(format_args!("cannot use SBX_HOMES_DIR {shown}"), &error);
    let refused = |why: &str| {
        let text = format!("cannot use SBX_HOMES_DIR {shown}: {why}");
        Err(Error::new(Kind::System, text))
    };
    // What is not there yet is no link.
    let existing = path.ancestors().find(|above| above.exists());
    if existing.is_some_and(is_among_programs) {
        return refused(
            "every sandbox may read what is there; choose a directory outside of the system's",
        );
    }
    // Everybody may pass through, to a home of one's own, and nobody look around.
    DirBuilder::new()
        .recursive(true)
        .mode(0o711)
        .create(path)
        .map_err(failed)?;
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let directory = open(path, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
    let status = fstat(&directory).map_err(|errno| failed(errno.into()))?;
    if status.st_uid != 0 || status.st_mode & 0o022 != 0 {
        return refused("others may write to it; it must be root's and nobody else's to change");
    }
    let file = File::from(directory.try_clone().map_err(failed)?);
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok((directory, lock)),
        Err(_) => refused("another server has its sandboxes there"),
    }
}

/// Finds out what there is of users: whether sandboxes' can get to where homes are made, and one that
/// is nobody's, to signal them as.
fn explore(settings: &HostSettings) -> Result<User> {
    let user = |uid| User { uid, gid: uid };
    let look = || {
        let _acting = ActingAs::new(user(*settings.users.start()))?;
        let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
        open(&settings.homes.join("."), flags, Mode::empty())
    };
    let accounts = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let has_account = |uid: &u32| {
        let number = uid.to_string();
        accounts
            .lines()
            .any(|line| line.split(':').nth(2) == Some(number.as_str()))
    };
    let find_nobody = || {
        (1..=LAST_USER)
            .rev()
            .filter(|uid| !settings.users.contains(uid) && !has_account(uid))
            .map(user)
            .find(|user| !sys::user_has_processes(*user) && ActingAs::new(*user).is_ok())
    };
    look().map_err(|errno| {
        let path = settings.homes.display();
        Error::system(
            format_args!(
                "cannot use SBX_HOMES_DIR {path}: sandboxes could not enter it, or a directory above it"
            ),
            errno,
        )
    })?;
    find_nobody().ok_or_else(|| {
        Error::new(
            Kind::System,
            "cannot hold sandboxes: SBX_UID_RANGE leaves no uid that nobody has; the server needs one",
        )
    })
}

/// Where the search for a user that is nobody's begins, downwards: above it are numbers with a meaning,
/// and a container has none beyond.
const LAST_USER: u32 = 65_533;

/// Signals the processes of a user one by one, each as the one it was when it was looked at.
fn signal_each(user: User, signal: i32) {
    for pid in proc::processes() {
        if proc::real_user(pid) != Some(user.uid) {
            continue;
        }
        let Ok(process) = sys::pidfd_open(pid) else {
            continue;
        };
        // The number may have been given to another in between.
        if proc::real_user(pid) == Some(user.uid) {
            let _ = sys::pidfd_signal(process.as_fd(), signal);
        }
    }
}

/// Removes the homes that an earlier server left because it was killed.
fn sweep(homes: &OwnedFd, path: &Path) {
    let Ok(entries) = std::fs::read_dir(path) else {
        return;
    };
    for name in entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
        if is_id(&name)
            && let Err(error) = files::remove_home(homes, name.as_bytes(), None)
        {
            logging::info(format_args!("cannot remove the old home {name}: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
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
