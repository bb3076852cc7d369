//! Every process of one workspace: started, found, listed, remembered for a while.
//!
//! Ids the server gives out (`p-1`, `p-2`, ...) are never used again. An id that a client chose makes
//! a start idempotent: while one request is starting it, others with the same id wait, and then
//! find the process. Of the processes that have ended the last [`HISTORY`] are kept.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::logs::LogStore;
use super::ring::Ring;
use super::supervisor::Supervisor;
use super::tree::{self, Member, Snapshot, Status};
use super::{Life, Process, Pump, Reason, Stdin, kill_trees, lock};
use crate::activity::Activity;
use crate::command::{ChosenId, CommandSpec, Input};
use crate::confine::Confinement;
use crate::error::{Error, Kind, Result};
use crate::logging;
use crate::sys::{self, Pid};

/// Ended processes that a workspace remembers.
pub const HISTORY: usize = 256;

/// Bytes of their command lines that it remembers with them: a command may have megabytes.
const HISTORY_COMMAND_BYTES: usize = 4 << 20;

/// How long a start may stand still before it is looked at.
const START_PATIENCE: Duration = Duration::from_secs(1);

/// What all registries of a server share.
pub struct Shared {
    supervisor: Arc<Supervisor>,
    logs: Arc<LogStore>,
    log_bytes: usize,
    /// What a command without input reads from.
    null: File,
}

impl Shared {
    /// `log_bytes` for each process, `log_total_bytes` for all of them.
    ///
    /// # Errors
    /// No thread or descriptor for the supervisor.
    pub fn new(log_bytes: usize, log_total_bytes: usize) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            supervisor: Supervisor::start()?,
            logs: Arc::new(LogStore::new(log_total_bytes)),
            log_bytes,
            null: File::open("/dev/null")
                .map_err(|error| Error::io("cannot open /dev/null", &error))?,
        }))
    }
}

impl Shared {
    /// Bytes of output that are kept for all processes.
    pub fn log_bytes_kept(&self) -> usize {
        self.logs.total()
    }
}

/// The processes of one workspace.
pub struct Registry {
    shared: Arc<Shared>,
    activity: Arc<Activity>,
    next: AtomicU64,
    /// Guards who is known; never held while something is started.
    table: Mutex<Table>,
    /// Tells those that wait for an id that a start has ended, one way or the other.
    started: Condvar,
}

#[derive(Default)]
struct Table {
    /// By the order of starting.
    processes: BTreeMap<u64, Arc<Process>>,
    by_id: HashMap<String, u64>,
    /// Chosen ids that are being started.
    starting: HashSet<String>,
    /// Those that are being started.
    starts: Vec<Arc<Start>>,
    /// Those that have ended, the longest ago first.
    ended: VecDeque<u64>,
    /// Bytes of the command lines of those.
    ended_command_bytes: usize,
    /// Chosen ids that were deleted, so that deleting again is no error; the newest last.
    deleted: VecDeque<String>,
    /// No more starts.
    closed: bool,
}

impl Table {
    /// Under which number a process is known. Its id alone does not tell: a chosen one may be
    /// somebody else's by now.
    fn number_of(&self, process: &Arc<Process>) -> Option<u64> {
        let number = *self.by_id.get(&process.id)?;
        let known = self.processes.get(&number)?;
        Arc::ptr_eq(known, process).then_some(number)
    }
}

impl Table {
    /// Remembers a chosen id, so that deleting it again is no error. Those the server gave out are
    /// known by their number.
    fn remember_deleted(&mut self, process: &Process) {
        if given_number(&process.id).is_none() {
            self.deleted.push_back(process.id.clone());
            if self.deleted.len() > HISTORY {
                self.deleted.pop_front();
            }
        }
    }
}

/// A process that is being started.
struct Start {
    since: Instant,
    /// Its number, once it has one.
    pid: AtomicI32,
}

/// What a start led to.
pub enum Started {
    /// A new process, to be driven by whoever asked.
    New(Pump),
    /// The process that is already there under the chosen id.
    Existing(Arc<Process>),
}

impl Registry {
    /// An empty registry; its running processes count as activity.
    pub fn new(shared: Arc<Shared>, activity: Arc<Activity>) -> Arc<Self> {
        Arc::new(Self {
            shared,
            activity,
            next: AtomicU64::new(1),
            table: Mutex::default(),
            started: Condvar::new(),
        })
    }

    pub(super) fn supervisor(&self) -> &Supervisor {
        &self.shared.supervisor
    }

    /// Starts a command, or finds the one that its chosen id already stands for.
    ///
    /// # Errors
    /// It cannot be started, or the id stands for a different command.
    pub fn start(
        self: &Arc<Self>,
        spec: CommandSpec,
        confinement: &Confinement,
    ) -> Result<Started> {
        let _claim = match &spec.id {
            None => None,
            Some(id) => match self.claim(id, &spec)? {
                Ok(claim) => Some(claim),
                Err(existing) => return Ok(Started::Existing(existing)),
            },
        };
        self.start_new(spec, confinement).map(Started::New)
    }

    /// Reserves a chosen id, or finds the process that has it.
    fn claim(
        self: &Arc<Self>,
        id: &ChosenId,
        spec: &CommandSpec,
    ) -> Result<std::result::Result<Claim, Arc<Process>>> {
        let id = id.as_str();
        let mut table = lock(&self.table);
        while table.starting.contains(id) {
            table = self
                .started
                .wait(table)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let Some(existing) = table
            .by_id
            .get(id)
            .and_then(|number| table.processes.get(number))
        else {
            table.starting.insert(id.to_owned());
            return Ok(Ok(Claim {
                registry: Arc::clone(self),
                id: id.to_owned(),
            }));
        };
        if existing.fingerprint != Some(spec.fingerprint()) {
            return Err(Error::new(
                Kind::IdInUse,
                format!(
                    "cannot start {id}: the id belongs to a different command; choose another, or delete that one"
                ),
            ));
        }
        Ok(Err(Arc::clone(existing)))
    }

    fn start_new(
        self: &Arc<Self>,
        mut spec: CommandSpec,
        confinement: &Confinement,
    ) -> Result<Pump> {
        let starting = self.begin_start()?;
        // The pipes are the command's, so that it may open them again, as /dev/stderr.
        let acting = confinement.act()?;
        let (stdout, stdout_write) = pipe()?;
        let (stderr, stderr_write) = pipe()?;
        let stdin = match &spec.input {
            Input::Empty => None,
            Input::Given(_) | Input::Open => Some(pipe()?),
        };
        drop(acting);
        // The server's ends never block it, whatever a command does with its own.
        let own_ends = [&stdout, &stderr]
            .into_iter()
            .chain(stdin.iter().map(|(_, write)| write));
        for end in own_ends {
            fcntl(end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(no_pipe)?;
        }
        let fingerprint = spec.id.is_some().then(|| spec.fingerprint());
        #[expect(clippy::disallowed_methods, reason = "clients are told")]
        let started_at_ms = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or(Duration::ZERO)
            .as_millis();
        let started = Instant::now();
        let spawned = {
            let read = stdin
                .as_ref()
                .map_or(self.shared.null.as_fd(), |(read, _)| read.as_fd());
            let streams = [read, stdout_write.as_fd(), stderr_write.as_fd()];
            confinement.spawn(&spec, streams, &starting.start.pid)?
        };
        drop((stdout_write, stderr_write));
        let stdin = stdin.map(|(_, write)| write);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let id = spec
            .id
            .as_ref()
            .map_or_else(|| format!("p-{number}"), |id| id.as_str().to_owned());
        let (feed, slot) = match (stdin, std::mem::replace(&mut spec.input, Input::Empty)) {
            (Some(pipe), Input::Given(bytes)) if !bytes.is_empty() => {
                (Some((pipe, bytes)), Stdin::Closed)
            }
            (Some(pipe), Input::Open) => (None, Stdin::Open(pipe)),
            _ => (None, Stdin::Closed),
        };
        let process = Arc::new(Process {
            id,
            pid: spawned.pid,
            command: spec.line().clone(),
            fingerprint,
            tag: spec.tag.clone(),
            started_at_ms: u64::try_from(started_at_ms).unwrap_or(u64::MAX),
            started,
            logs: Arc::clone(&self.shared.logs),
            life: Mutex::new(Life {
                background: spec.background,
                clients: usize::from(!spec.background),
                pidfd: Some(Arc::new(spawned.pidfd)),
                killers: 0,
                cause: None,
                asked: 0,
                ending: None,
                exit: None,
            }),
            ring: Mutex::new(Ring::new(self.shared.log_bytes)),
            stdin: Mutex::new(slot),
            watchers: Mutex::default(),
        });
        self.activity.begin();
        self.shared.logs.register(&process);
        {
            let mut table = lock(&self.table);
            table.by_id.insert(process.id.clone(), number);
            table.processes.insert(number, Arc::clone(&process));
        }
        logging::debug(format_args!(
            "process {} started, pid {}",
            process.id, process.pid
        ));
        let deadline = spec
            .timeout
            .and_then(|timeout| started.checked_add(timeout));
        let outputs: [OwnedFd; 2] = [stdout, stderr];
        Ok(Pump::new(
            process,
            Arc::clone(self),
            outputs,
            feed,
            deadline,
        ))
    }

    /// Announces a start, so that closing waits until it is in the table.
    fn begin_start(&self) -> Result<Starting<'_>> {
        let mut table = lock(&self.table);
        if table.closed {
            return Err(Error::new(
                Kind::ShuttingDown,
                "cannot start a command: the sandbox is ending",
            ));
        }
        let start = Arc::new(Start {
            since: Instant::now(),
            pid: AtomicI32::new(0),
        });
        table.starts.push(Arc::clone(&start));
        Ok(Starting {
            registry: self,
            start,
        })
    }

    /// Refuses further starts.
    pub fn close(&self) {
        lock(&self.table).closed = true;
    }

    /// Whether something is being started: with that, the number of processes can still grow after
    /// closing.
    pub fn is_starting(&self) -> bool {
        !lock(&self.table).starts.is_empty()
    }

    /// Says why those that run are about to be killed, by somebody who does so by their user.
    pub fn expect_kill(&self, cause: Reason) {
        for process in self.running() {
            lock(&process.life).cause.get_or_insert(cause);
        }
    }

    /// Says that those that run are about to be sent a signal, by somebody who does so by their user.
    pub fn expect_signal(&self, signal: i32) {
        for process in self.running() {
            process.expect_signal(signal);
        }
    }

    /// Kills what was stopped on its way to execve: what runs as the same user can do that, and the
    /// server's thread would wait for it for ever.
    pub fn kill_stopped_starts(&self) {
        let suspects: Vec<_> = lock(&self.table).starts.clone();
        for start in suspects {
            let pid = start.pid.load(Ordering::Acquire);
            if pid == 0 || start.since.elapsed() < START_PATIENCE || !tree::is_stopped(pid) {
                continue;
            }
            let table = lock(&self.table);
            // While it is in the list and announced the process is not reaped, and the number its own.
            if table.starts.iter().any(|other| Arc::ptr_eq(other, &start))
                && start.pid.load(Ordering::Acquire) == pid
            {
                let _ = sys::signal_process(pid, libc::SIGKILL);
            }
        }
    }

    /// A process has ended and its output is complete.
    pub(super) fn ended(&self, process: &Arc<Process>) {
        self.activity.end();
        if let Some(exit) = process.exit() {
            logging::debug(format_args!(
                "process {} ended: {:?}, {:?}",
                process.id, exit.ending, exit.reason
            ));
        }
        let mut table = lock(&self.table);
        // A deleted one is not remembered.
        let Some(number) = table.number_of(process) else {
            return;
        };
        table.ended.push_back(number);
        table.ended_command_bytes += process.command.size();
        while table.ended.len() > HISTORY
            || (table.ended_command_bytes > HISTORY_COMMAND_BYTES && table.ended.len() > 1)
        {
            let Some(oldest) = table.ended.pop_front() else {
                return;
            };
            if let Some(process) = table.processes.remove(&oldest) {
                table.ended_command_bytes -= process.command.size();
                table.by_id.remove(&process.id);
                table.remember_deleted(&process);
            }
        }
    }

    /// All that are known, in the order they were started.
    pub fn list(&self) -> Vec<Arc<Process>> {
        lock(&self.table).processes.values().cloned().collect()
    }

    /// The process that `name` stands for: its id, or the pid of the latest process that had it.
    pub fn find(&self, name: &str) -> Option<Arc<Process>> {
        let table = lock(&self.table);
        if let Some(number) = table.by_id.get(name) {
            return table.processes.get(number).cloned();
        }
        let pid: Pid = Some(name)
            .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))?
            .parse()
            .ok()?;
        table
            .processes
            .values()
            .rev()
            .find(|process| process.pid == pid)
            .cloned()
    }

    /// Kills a process with all its descendants and forgets it; `None` if there never was one of
    /// that name. True when this call is what stopped it.
    ///
    /// # Errors
    /// The kernel does not let it die yet; it is not forgotten then.
    pub fn delete(&self, name: &str) -> Result<Option<bool>> {
        let Some(process) = self.find(name) else {
            return Ok(self.was_known(name).then_some(false));
        };
        let is_first = process.kill_tree(Reason::Deleted);
        // SIGKILL is not refused, but a process in the kernel's hands may take its time to die.
        if process.is_running() && !process.wait_ended(Duration::from_secs(10)) {
            return Err(Error::new(
                Kind::System,
                format!("cannot delete {name}: it was killed and has not died yet; try again"),
            ));
        }
        self.forget(&process);
        Ok(Some(is_first && process.died_of_kill()))
    }

    fn forget(&self, process: &Arc<Process>) {
        let mut table = lock(&self.table);
        let Some(number) = table.number_of(process) else {
            return;
        };
        table.by_id.remove(&process.id);
        table.processes.remove(&number);
        if let Some(at) = table.ended.iter().position(|ended| *ended == number) {
            table.ended.remove(at);
            table.ended_command_bytes -= process.command.size();
        }
        table.remember_deleted(process);
    }

    /// Whether the name was once a process's.
    fn was_known(&self, name: &str) -> bool {
        match given_number(name) {
            Some(number) => (1..self.next.load(Ordering::Relaxed)).contains(&number),
            None => lock(&self.table)
                .deleted
                .iter()
                .any(|deleted| deleted == name),
        }
    }

    /// Refuses further starts and asks every process to end, with all that descends from it;
    /// what has not ended after `grace` is killed.
    pub fn shut_down(&self, grace: Duration) {
        let mut table = lock(&self.table);
        table.closed = true;
        while !table.starts.is_empty() {
            table = self
                .started
                .wait(table)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(table);
        let deadline = Instant::now() + grace;
        let mut asked: HashSet<Member> = HashSet::new();
        loop {
            let snapshot = Snapshot::take();
            // Looked at after the snapshot: what had not been reaped then still has its number.
            let running = self.running();
            let leaders: HashSet<Pid> = running.iter().map(|process| process.pid).collect();
            let is_root =
                |status: &Status| status.belongs_to(&leaders) || asked.contains(&status.member());
            let living: HashSet<Member> = snapshot
                .trees(is_root)
                .into_iter()
                .map(Status::member)
                .collect();
            if running.is_empty() && living.is_empty() {
                return;
            }
            if Instant::now() >= deadline {
                break;
            }
            if asked.is_empty() {
                for process in &running {
                    process.expect_signal(libc::SIGTERM);
                }
            }
            for member in living.difference(&asked) {
                member.signal(libc::SIGTERM);
                // A stopped process takes the first signal only when it goes on.
                member.signal(libc::SIGCONT);
            }
            asked.extend(living);
            if let Some(process) = running.first() {
                process.wait_ended(Duration::from_millis(20));
            } else {
                // What is not a child of this process cannot be waited for, only looked at.
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let left = self.running();
        kill_trees(&left, Reason::Killed);
        tree::kill_members(&asked);
        for process in left {
            process.wait_ended(Duration::from_millis(500));
        }
    }

    /// How many have not ended.
    pub fn count_running(&self) -> usize {
        let table = lock(&self.table);
        table.processes.len() - table.ended.len()
    }

    fn running(&self) -> Vec<Arc<Process>> {
        let mut all = self.list();
        all.retain(|process| process.exit().is_none());
        all
    }
}

/// Announces a [`Start`]; shutting down waits until it is dropped.
struct Starting<'a> {
    registry: &'a Registry,
    start: Arc<Start>,
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        let starts = &mut lock(&self.registry.table).starts;
        starts.retain(|start| !Arc::ptr_eq(start, &self.start));
        self.registry.started.notify_all();
    }
}

fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(no_pipe)?;
    if sys::is_scarce(write.as_fd()) {
        return Err(no_pipe(Errno::EMFILE));
    }
    Ok((read, write))
}

fn no_pipe(errno: Errno) -> Error {
    Error::system("cannot make a pipe for the command", errno)
}

/// N of `p-N`.
fn given_number(id: &str) -> Option<u64> {
    id.strip_prefix("p-")
        .filter(|digits| {
            digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0')
        })?
        .parse()
        .ok()
}

/// A chosen id that is being started; others wait until it is dropped.
struct Claim {
    registry: Arc<Registry>,
    id: String,
}

impl Drop for Claim {
    fn drop(&mut self) {
        lock(&self.registry.table).starting.remove(&self.id);
        self.registry.started.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::CommandLine;

    /// A process of this program, which nobody drives.
    fn start(program: &[&str]) -> (Pump, Arc<Process>) {
        let shared = Shared::new(4096, 4096).unwrap();
        let registry = Registry::new(shared, Arc::new(Activity::new()));
        let line = CommandLine::Program(program.iter().map(|&word| word.to_owned()).collect());
        let spec = CommandSpec::new(line, Vec::new(), None).unwrap();
        let confinement = Confinement::dedicated(std::env::vars_os(), "/".into());
        let Started::New(pump) = registry.start(spec, &confinement).unwrap() else {
            unreachable!("its id is new");
        };
        let process = registry.list().remove(0);
        (pump, process)
    }

    fn reap(process: &Process) {
        while !process.reap() {
            std::thread::yield_now();
        }
    }

    /// What [`Registry::delete`] goes by: the end is known when it is reaped, which may be long before
    /// its output was read and clients are told.
    #[test]
    fn a_kill_that_came_too_late_has_killed_nothing() {
        let (_pump, process) = start(&["true"]);
        let pidfd = lock(&process.life).pidfd.clone().unwrap();
        let mut entries = [sys::PollEntry::new(pidfd.as_fd(), sys::Events::READABLE)];
        sys::poll(&mut entries, None);
        assert!(
            process.kill_tree(Reason::Deleted),
            "nobody has seen its end"
        );
        reap(&process);
        assert!(process.exit().is_none());
        assert!(!process.died_of_kill());

        let (_pump, process) = start(&["sleep", "1000"]);
        assert!(process.kill_tree(Reason::Deleted));
        reap(&process);
        assert!(process.died_of_kill());
    }
}
