//! Every process of one workspace: starting, finding and listing them, and keeping ended ones for a
//! while.
//!
//! Ids that the server gives out (`p-1`, `p-2`, ...) are never reused. An id that a client chose makes
//! a start idempotent: while one request starts it, others with the same id wait and then get the
//! process. The last [`HISTORY`] ended processes are kept.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::children::{self, Command};
use super::driver::{CountedDriver, Driver, Drivers};
use super::logs::{Log, LogStore, LogTenant};
use super::oom;
use super::process::{Exit, Origin, Process, Reason, StdinSlot, finish, kill_trees};
use super::pump::{GivenInput, HeldTerminal, Pump, PumpOwner, on_pipe};
use super::shares::{OpenCount, OpenShare};
use super::start::Start;
use super::stdio::{Stdio, reopen, sealed_file};
use super::supervisor::Supervisor;
use super::terminal::{self, Terminal, share_terminals};
use super::tree::{Hunt, Orphans, Roots};
use crate::clock::now_ms;
use crate::codec::table::Table;
use crate::confine::{Confinement, KillWatch, Mark};
use crate::error::{Error, Kind, Result};
use crate::limits::activity::Activity;
use crate::limits::ledger::{Charge, Item, Ledger, OverLimit};
use crate::limits::work_clock::WorkClock;
use crate::spec::command::{CommandSpec, StdinSource};
use crate::spec::network::NetworkPolicy;
use crate::sys::{self, Pid};
use crate::threads::lock::{Condvar, Mutex, MutexGuard, lock};
use crate::threads::panics::contain;
use crate::{fault, logging};

/// How many ended processes a workspace keeps.
pub const HISTORY: usize = 256;

/// How long the end of a process is known at least, even if more than [`HISTORY`] have ended since.
const RECENT: Duration = Duration::from_secs(30);

/// Most ends that are known beyond the history.
const MAX_RECENT: usize = 4096;

/// Most bytes of their command lines: one command line may have megabytes.
const HISTORY_COMMAND_BYTES: usize = 4 << 20;

/// A start that takes longer than this may have been stopped, and is checked.
const START_CHECK_AFTER: Duration = Duration::from_secs(1);

/// What all registries of a server share.
pub struct Shared {
    supervisor: Arc<Supervisor>,
    logs: Arc<LogStore>,
    log_bytes: usize,
    /// `/dev/null`. A command without input gets it opened anew.
    null: File,
}

impl Shared {
    /// Keeps `log_bytes` of output for each process and `log_total_bytes` for all of them.
    ///
    /// # Errors
    /// No thread or descriptor is left for the supervisor.
    pub fn new(log_bytes: usize, log_total_bytes: usize) -> Result<Arc<Self>> {
        let null =
            File::open("/dev/null").map_err(|error| Error::io("cannot open /dev/null", &error))?;
        Ok(Arc::new(Self {
            supervisor: Supervisor::start()?,
            logs: Arc::new(LogStore::new(log_total_bytes)),
            log_bytes,
            null,
        }))
    }

    /// Bytes of output that are kept for all processes.
    pub fn log_bytes_kept(&self) -> usize {
        self.logs.total()
    }
}

/// What one workspace has open of what all share. It lasts as long as the workspace, whose registry is another in each run: another
/// sandbox that was given the output of a command can hold up the thread that would close it (see `driver`), and what an
/// ended run still has counts in the share of the next.
pub struct OpenCounts {
    terminals: OpenCount,
    commands: OpenCount,
    drivers: Arc<Drivers>,
    /// A request that nobody reads keeps the logs of an ended run.
    logs: Arc<LogTenant>,
}

impl OpenCounts {
    /// Of a workspace that has nothing open.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            terminals: OpenCount::among(&terminal::OPEN),
            commands: OpenCount::among(&OPEN),
            drivers: Arc::default(),
            logs: Arc::default(),
        })
    }
}

/// While others hold up so many threads of its ended runs, or keep files of so many of them in memory, a workspace does not run
/// again.
pub const MOST_HELD_RUNS: usize = 2;

/// How long what nothing holds up may take to end with its run.
pub const END_LIMIT: Duration = Duration::from_secs(2);

/// Commands whose output is open, in all workspaces.
static OPEN: AtomicU64 = AtomicU64::new(0);

/// How many descriptors of the server a command needs: three streams and a pidfd.
const DESCRIPTORS: u64 = 4;

/// The processes of one workspace.
pub struct Registry {
    shared: Arc<Shared>,
    activity: Arc<Activity>,
    ledger: Arc<Ledger>,
    open: Arc<OpenCounts>,
    next: AtomicU64,
    /// Never held while a command is being started.
    table: Mutex<ProcessTable>,
    /// Notified when a start has ended, successful or not.
    start_ended: Condvar,
    driver: Arc<Driver>,
    is_released: AtomicBool,
}

#[derive(Default)]
struct ProcessTable {
    /// By number, that is in the order of their starts.
    processes: Table<u64, Arc<Process>>,
    by_id: HashMap<String, u64>,
    starts: Vec<Arc<Start>>,
    /// Number of starts so far, those that failed too.
    begun: u64,
    /// Those of contexts that have not ended.
    interpreters: Vec<Arc<Process>>,
    /// Numbers of ended processes, the oldest end first.
    ended: VecDeque<u64>,
    /// Bytes of their command lines.
    ended_command_bytes: usize,
    /// The ends of processes that the history has no room for, and when they were told.
    recent: VecDeque<(Instant, Pid, Exit)>,
    /// Chosen ids and pids of processes that were removed: deleting them again is no error.
    removed_ids: VecDeque<String>,
    removed_pids: VecDeque<Pid>,
    /// No more starts.
    closed: bool,
    /// No starts for now.
    paused: bool,
    /// Why the caller kills all by their user, those too that are being started.
    expected_end: Option<Reason>,
}

/// The commands that are being started at one moment.
#[derive(Debug, PartialEq, Eq)]
pub struct Starts {
    /// The pids of their children.
    pub pids: Vec<Pid>,
    /// How many have begun so far. If the number is the same later, no other child came in between.
    pub begun: u64,
}

/// The result of [`Registry::start`].
#[expect(
    clippy::large_enum_variant,
    reason = "it is taken apart where it is returned"
)]
pub enum StartOutcome {
    /// A new process. The caller drives it.
    Started(Pump),
    /// The chosen id belongs to this process, which runs the same command.
    AlreadyExists(Arc<Process>),
}

/// What a process is to its workspace.
enum Role {
    /// Listed, work while it runs, and remembered after its end.
    Command,
    /// The interpreter of a context, with the socket of its bridge.
    Interpreter(OwnedFd),
}

/// What the server closes of a command's descriptors after the start.
type ChildHalf = ([Arc<OwnedFd>; 3], Option<OwnedFd>);

/// Lists a [`Start`] until it is dropped; shutdown and other starts with its id wait for that.
struct StartGuard<'a> {
    registry: &'a Registry,
    start: Arc<Start>,
    /// Whether a pump drives the child.
    is_driven: bool,
}

impl StartGuard<'_> {
    /// A pump drives the child from now on.
    fn hand_over(&mut self, process: &Arc<Process>) {
        let command: Weak<Process> = Arc::downgrade(process);
        let started = (
            process.pid,
            process.origin.mark,
            command as Weak<dyn Command>,
        );
        children::end_start(&self.start, Some(started));
        self.is_driven = true;
    }
}

impl Drop for StartGuard<'_> {
    fn drop(&mut self) {
        self.registry.shared.supervisor.unwatch_start(&self.start);
        if !self.is_driven {
            // There is a child only after a panic. It leads a group since it has called execve. The supervisor reaps it
            // as a child that is no command.
            if let Some(pid) = self.start.pid() {
                let _ = sys::signal_group(pid, libc::SIGKILL);
            }
            self.start.kill();
            children::end_start(&self.start, None);
        }
        let starts = &mut lock(&self.registry.table).starts;
        starts.retain(|start| !Arc::ptr_eq(start, &self.start));
        self.registry.start_ended.notify_all();
    }
}

impl ProcessTable {
    /// The number of a process that is listed. A removed process's id may belong to another one.
    fn number_of(&self, process: &Arc<Process>) -> Option<u64> {
        let number = *self.by_id.get(&process.id)?;
        let listed = self.processes.get(&number)?;
        Arc::ptr_eq(listed, process).then_some(number)
    }

    fn get(&self, id: &str) -> Option<&Arc<Process>> {
        self.processes.get(self.by_id.get(id)?)
    }

    /// Remembers how a process that is about to be forgotten has ended.
    fn note_recent(&mut self, number: u64) {
        let now = Instant::now();
        while let Some((at, ..)) = self.recent.front()
            && (self.recent.len() >= MAX_RECENT || now - *at > RECENT)
        {
            self.recent.pop_front();
        }
        let process = self.processes.get(&number);
        if let Some((process, exit)) = process.and_then(|process| Some((process, process.exit()?)))
        {
            self.recent.push_back((now, process.pid_inside(), exit));
        }
    }

    /// Removes a process, wherever it is in the order of ends.
    fn remove(&mut self, number: u64) {
        let Some(process) = self.processes.remove(&number) else {
            return;
        };
        self.by_id.remove(&process.id);
        if let Some(at) = self.ended.iter().position(|ended| *ended == number) {
            self.ended.remove(at);
            self.ended_command_bytes -= process.text_bytes();
        }
        // A given id is recognized by its number.
        if given_number(&process.id).is_none() {
            push_bounded(&mut self.removed_ids, process.id.clone());
        }
        push_bounded(&mut self.removed_pids, process.pid);
    }
}

impl Registry {
    /// An empty registry, whose first process has this number. Its running processes count as activity.
    pub fn new(
        shared: Arc<Shared>,
        activity: Arc<Activity>,
        ledger: Arc<Ledger>,
        open: Arc<OpenCounts>,
        first: u64,
    ) -> Arc<Self> {
        let driver = Driver::new(&shared.supervisor, &open.drivers);
        Arc::new(Self {
            shared,
            driver,
            activity,
            ledger,
            open,
            next: AtomicU64::new(first),
            table: Mutex::default(),
            start_ended: Condvar::new(),
            is_released: AtomicBool::new(false),
        })
    }

    /// Starts a command, or finds the process that has its chosen id.
    ///
    /// # Errors
    /// The command cannot be started; `IdInUse` if a different command has the id; `Paused`; `ShuttingDown`.
    pub fn start(
        self: &Arc<Self>,
        spec: CommandSpec,
        confinement: &Confinement,
    ) -> Result<StartOutcome> {
        // Before a process with the same id is found.
        let network = confinement.network(spec.network.as_ref())?;
        if spec.user.is_some() {
            confinement.account(spec.user.as_deref())?;
        }
        let mut table = lock(&self.table);
        if let Some(id) = &spec.id {
            table = self.start_ended.wait_while(table, |table| {
                let mut starts = table.starts.iter();
                starts.any(|start| start.id.as_ref() == Some(id))
            });
            let id = id.as_str();
            if let Some(existing) = table.get(id) {
                if existing.is_same_command(&spec) {
                    return Ok(StartOutcome::AlreadyExists(Arc::clone(existing)));
                }
                let text = format!(
                    "cannot start {id}: the id belongs to a different command; choose another, or delete that one"
                );
                return Err(Error::new(Kind::IdInUse, text));
            }
        }
        let pump = self.start_in(table, spec, &network, confinement, Role::Command)?;
        Ok(StartOutcome::Started(pump))
    }

    /// Starts the interpreter of a context, which finds `socket` as descriptor 4. It is in no
    /// list, has no number, is no activity, and is forgotten when it has ended; with the workspace it ends like
    /// any other process.
    ///
    /// # Errors
    /// It cannot be started; `Paused`; `ShuttingDown`.
    pub fn start_interpreter(
        self: &Arc<Self>,
        spec: CommandSpec,
        confinement: &Confinement,
        socket: OwnedFd,
    ) -> Result<Pump> {
        let network = confinement.network(spec.network.as_ref())?;
        let role = Role::Interpreter(socket);
        self.start_in(lock(&self.table), spec, &network, confinement, role)
    }

    fn start_in(
        self: &Arc<Self>,
        mut table: MutexGuard<'_, ProcessTable>,
        spec: CommandSpec,
        network: &NetworkPolicy,
        confinement: &Confinement,
        role: Role,
    ) -> Result<Pump> {
        if table.closed {
            return Err(self.refusal());
        }
        if table.paused {
            return Err(paused());
        }
        let now = Instant::now();
        let deadline = spec.timeout.and_then(|timeout| now.checked_add(timeout));
        let start = Arc::new(Start::new(spec.id.clone(), now, deadline));
        table.starts.push(Arc::clone(&start));
        table.begun += 1;
        drop(table);
        let mut guard = StartGuard {
            registry: self,
            start: Arc::clone(&start),
            is_driven: false,
        };
        children::list_start(&start);
        self.shared.supervisor.watch_start(&start);
        let started = self.start_new(spec, network, confinement, &mut guard, role);
        // The end of the sandbox ends what is being started in any of many ways.
        let (pump, child_half) = started.map_err(|error| {
            if self.is_closed() {
                self.refusal()
            } else {
                error
            }
        })?;
        drop(guard);
        if let Some(deadline) = pump.deadline {
            let owner: Arc<Self> = Arc::clone(self);
            self.shared
                .supervisor
                .watch(pump.process(), owner, deadline);
        }
        // Closing a pipe can take as long as the process likes: see `driver`. So it is no part of the start.
        on_pipe(pump.process(), || drop(child_half));
        if start.has_timed_out() {
            pump.process().kill_tree(Reason::Timeout);
        }
        Ok(pump)
    }

    /// The descriptors of a command.
    fn stdio(&self, spec: &CommandSpec, confinement: &Confinement) -> Result<Stdio> {
        let has_null = spec.terminal.is_none() && spec.input == StdinSource::Empty;
        let null = has_null.then(|| reopen(&self.shared.null)).transpose()?;
        let _acting = confinement.act_as(spec.user.as_deref())?;
        let mut stdio = match &spec.terminal {
            Some(terminal) => {
                let namespaces = confinement.namespaces();
                let directory = namespaces.map(|namespaces| namespaces.terminals());
                Stdio::terminal(terminal.size, directory)?
            }
            None => Stdio::pipes(null)?,
        };
        stdio.passed = spec.passed_code().map(sealed_file).transpose()?;
        Ok(stdio)
    }

    fn start_new(
        self: &Arc<Self>,
        spec: CommandSpec,
        network: &NetworkPolicy,
        confinement: &Confinement,
        guard: &mut StartGuard<'_>,
        role: Role,
    ) -> Result<(Pump, ChildHalf)> {
        let start = Arc::clone(&guard.start);
        fault::point("start");
        let (number, socket) = match role {
            Role::Command => (Some(&self.next), None),
            Role::Interpreter(socket) => (None, Some(socket)),
        };
        let mut texts = self.charge_texts(spec.start_bytes())?;
        let held_stdin = self.ledger.charge(Item::Stdin, spec.input.held_bytes())?;
        let command_share = self.share_commands()?;
        let share = spec
            .terminal
            .is_some()
            .then(|| share_terminals(&self.open.terminals));
        let share = share.transpose()?;
        let namespaces = confinement.namespaces();
        let mut stdio = self.stdio(&spec, confinement)?;
        stdio.passed = socket.or(stdio.passed);
        if spec.background {
            // So that nothing is started that nothing would read.
            self.driver.start()?;
        }
        oom::begin();
        let started = (start.since, now_ms());
        let origin = Origin {
            mark: Mark::next(),
            user: confinement.user(),
            starter: sys::thread_id(),
            holder: namespaces.map(|namespaces| namespaces.holder().pid()),
        };
        let (own, passed) = (stdio.child(), stdio.passed.as_ref().map(AsFd::as_fd));
        // Before the process can be killed.
        let kill_watch = confinement.limits().map(KillWatch::begin);
        let spawned = confinement.spawn(&spec, network, own, passed, origin.mark, &start.pid)?;
        fault::point("started");
        let held = share.map(|share| HeldTerminal {
            terminal: Some(Arc::clone(&stdio.child[0])),
            _share: share,
        });
        let number = number.map(|next| next.fetch_add(1, Ordering::Relaxed));
        let id = match (&spec.id, number) {
            (Some(id), _) => id.as_str().to_owned(),
            (None, Some(number)) => format!("p-{number}"),
            (None, None) => "interpreter".to_owned(),
        };
        let log = Log::new(&self.shared.logs, &self.open.logs, self.shared.log_bytes);
        // Cannot fail, because it is less than before. From the spawn on nothing may: the process has no driver yet.
        let _ = texts.set(spec.kept_bytes());
        let mut process = Process::new(id, &spec, spawned, started, origin, log, texts);
        let terminal = spec.terminal.zip(stdio.input.clone());
        process.terminal = terminal.map(|(spec, master)| Terminal::new(spec, master));
        process.kill_watch = kill_watch;
        process.is_interpreter = number.is_none();
        let given = match (stdio.input, spec.input) {
            (Some(master), _) if held.is_some() => {
                *lock(&process.stdin) = StdinSlot::Open(master);
                None
            }
            (Some(pipe), StdinSource::Given(bytes)) if !bytes.is_empty() => Some(GivenInput {
                pipe,
                bytes,
                written: 0,
                _charge: held_stdin,
            }),
            (Some(pipe), StdinSource::Open) => {
                *lock(&process.stdin) = StdinSlot::Open(pipe);
                None
            }
            _ => None,
        };
        let process = Arc::new(process);
        let owner = Arc::clone(self);
        let pump = Pump::new(
            Arc::clone(&process),
            owner,
            stdio.outputs,
            held,
            given,
            // The clock does not stop while a command is being started.
            start.deadline.map(|at| self.clock().of(at)),
            command_share,
        );
        if !process.is_interpreter {
            self.activity.begin();
        }
        guard.hand_over(&process);
        let listed = contain(|| {
            fault::point("driven");
            self.list_process(number, &process);
        });
        if let Err(panicked) = listed {
            // It would run on, and nobody could find it.
            process.kill_tree(Reason::Killed);
            // It may be reaped while the start is still listed.
            start.pid.store(0, Ordering::Release);
            panicked.resume();
        }
        Ok((pump, (stdio.child, stdio.passed)))
    }

    /// Counts one more command whose output the server reads. All together may use half of the server's descriptors, and a
    /// sandbox as many as are left of these, so that it keeps nobody from being served.
    ///
    /// # Errors
    /// `OverLimit`.
    fn share_commands(&self) -> Result<OpenShare> {
        let (share, own) = self.open.commands.add();
        let most = sys::limits(libc::RLIMIT_NOFILE).rlim_cur / 2 / DESCRIPTORS;
        if self.ledger.is_whole() || own <= most.saturating_sub(OPEN.load(Ordering::Relaxed)) {
            return Ok(share);
        }
        let text = format!(
            "cannot start the command: the output of {} others is open here; end the processes that have it open",
            own - 1
        );
        Err(Error::new(Kind::OverLimit, text))
    }

    /// Charges the texts of a command. Forgets as many ended processes as it needs room for, the oldest end
    /// first.
    fn charge_texts(&self, bytes: usize) -> std::result::Result<Charge, OverLimit> {
        loop {
            let charged = self.ledger.charge(Item::Commands, bytes);
            if charged.is_ok() {
                return charged;
            }
            let mut table = lock(&self.table);
            let Some(oldest) = table.ended.front().copied() else {
                return charged;
            };
            table.remove(oldest);
        }
    }

    /// Lists a command, or an interpreter, which has no number.
    fn list_process(&self, number: Option<u64>, process: &Arc<Process>) {
        let (id, pid) = (&process.id, process.pid);
        logging::debug(format_args!("process {id} started, pid {pid}"));
        let mut table = lock(&self.table);
        if let Some(number) = number {
            table.by_id.insert(process.id.clone(), number);
            table.processes.insert(number, Arc::clone(process));
        } else {
            table.interpreters.push(Arc::clone(process));
        }
        let expected_end = table.expected_end;
        drop(table);
        if let Some(reason) = expected_end {
            process.expect_kill(reason);
        }
    }

    pub fn close(&self) {
        lock(&self.table).closed = true;
    }

    /// Nothing runs here any more. What others keep open of ended processes is closed once their output up to the end
    /// was read, and the logs, terminals and descriptors are free.
    pub fn release(&self) {
        self.is_released.store(true, Ordering::Release);
        self.driver.note_release();
    }

    /// Checks, when nothing of the workspace runs, that it may run again: each run that is held up has a thread of the server, so
    /// there must not be many.
    ///
    /// # Errors
    /// `OverLimit`.
    pub fn check_held_runs(&self, limit: Duration) -> Result<()> {
        if self.open.drivers.wait_below(MOST_HELD_RUNS, limit) {
            return Ok(());
        }
        let text = format!(
            "cannot start the sandbox: other processes hold the pipes of {MOST_HELD_RUNS} former runs of it; \
             end these processes, or delete their sandboxes"
        );
        Err(Error::new(Kind::OverLimit, text))
    }

    /// Counts a thread that reads what processes write, besides that of the registry.
    #[cfg(feature = "interpreter")]
    pub fn count_driver(&self) -> CountedDriver {
        self.open.drivers.count()
    }

    /// Why nothing starts any more.
    pub fn refusal(&self) -> Error {
        let (kind, text) = if self.activity.is_closed() {
            (Kind::ShuttingDown, "the sandbox is ending")
        } else {
            (Kind::Stopped, "the sandbox is stopped")
        };
        Error::new(kind, format_args!("cannot start a command: {text}"))
    }

    /// Whether nothing starts any more.
    pub fn is_closed(&self) -> bool {
        lock(&self.table).closed
    }

    /// Refuses starts until [`Registry::allow_starts`], and waits until those that have begun have ended: each command
    /// runs then, or does not exist. False if one takes longer than `limit`.
    pub fn refuse_starts(&self, limit: Duration) -> bool {
        let mut table = lock(&self.table);
        table.paused = true;
        let is_starting = |table: &mut ProcessTable| !table.starts.is_empty();
        self.start_ended.wait_while_for(table, limit, is_starting).1
    }

    /// # Errors
    /// `Paused` while starts are refused: no process takes anything.
    pub fn check_not_paused(&self) -> Result<()> {
        if lock(&self.table).paused {
            return Err(paused());
        }
        Ok(())
    }

    pub fn allow_starts(&self) {
        lock(&self.table).paused = false;
    }

    /// Whether a command is being started, so that the number of processes can grow after
    /// [`Registry::close`].
    pub fn is_starting(&self) -> bool {
        !lock(&self.table).starts.is_empty()
    }

    /// What tells a child that was not started yet from other processes: until execve it has the server's memory.
    /// `None` if a child may exist whose pid is not known yet.
    pub fn starts(&self) -> Option<Starts> {
        let table = lock(&self.table);
        let pids = table.starts.iter().map(|start| start.pid());
        Some(Starts {
            begun: table.begun,
            pids: pids.collect::<Option<_>>()?,
        })
    }

    /// Announces that the caller kills all processes by their user, until none runs.
    pub fn expect_kill(&self, reason: Reason) {
        lock(&self.table).expected_end = Some(reason);
        for process in self.running() {
            process.expect_kill(reason);
        }
    }

    /// Announces that the caller signals all running processes by their user.
    pub fn expect_signal(&self, signal: i32) {
        for process in self.running() {
            process.expect_signal(signal);
        }
    }

    /// Tells processes with a terminal that it goes, as closing a terminal does: interactive shells ignore
    /// SIGTERM.
    pub fn hang_up_terminals(&self) {
        for process in self.running() {
            if process.terminal().is_ok() {
                // It may have ended meanwhile.
                let _ = process.signal(libc::SIGHUP);
            }
        }
    }

    /// Kills children that were stopped before they called execve. Any process of the same user can stop
    /// them, and the server's thread would wait for them without end.
    pub fn kill_stopped_starts(&self) {
        let starts: Vec<_> = lock(&self.table).starts.clone();
        for start in starts {
            if start.since.elapsed() >= START_CHECK_AFTER && start.is_stopped() {
                let table = lock(&self.table);
                if table.starts.iter().any(|other| Arc::ptr_eq(other, &start)) {
                    start.kill();
                }
            }
        }
    }

    /// The number that the next process gets. Numbers are given in the order of the starts.
    pub fn next_number(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// The first running or remembered process with one of these numbers, and its number.
    pub fn first_in(&self, numbers: Range<u64>) -> Option<(u64, Arc<Process>)> {
        let table = lock(&self.table);
        let first = table.processes.first_from(&numbers.start);
        first
            .filter(|(number, _)| **number < numbers.end)
            .map(|(number, process)| (*number, Arc::clone(process)))
    }

    /// All running processes and those of the history, in the order of their starts.
    pub fn list(&self) -> Vec<Arc<Process>> {
        let table = lock(&self.table);
        let all = table.processes.iter();
        all.map(|(_, process)| Arc::clone(process)).collect()
    }

    /// The process with this id, or the latest one with this pid. A running process is always the
    /// latest one with its pid.
    pub fn find(&self, name: &str) -> Option<Arc<Process>> {
        let table = lock(&self.table);
        if let Some(process) = table.get(name) {
            return Some(Arc::clone(process));
        }
        let pid = parse_pid(name)?;
        let latest_first = table.processes.iter().rev();
        let mut latest_first = latest_first.map(|(_, process)| process);
        latest_first.find(|process| process.pid == pid).cloned()
    }

    /// The latest process that programs of the sandbox know by this pid.
    pub fn find_inside(&self, pid: Pid) -> Option<Arc<Process>> {
        let latest_first = self.list().into_iter().rev();
        let mut known = latest_first.filter(|process| process.pid_inside() == pid);
        let latest = known.next();
        // One that was asked for only after its end has the machine's pid, which may be that of another one inside.
        let running = latest.iter().cloned().chain(known);
        let mut running = running.filter(|process| process.exit().is_none());
        running.next().or(latest)
    }

    /// How the latest process with this pid inside has ended, if that was a short time ago and the history has no room for it.
    pub fn recent_end(&self, pid: Pid) -> Option<Exit> {
        let table = lock(&self.table);
        let mut latest_first = table.recent.iter().rev();
        let found = latest_first.find(|(_, ended, _)| *ended == pid)?;
        Some(found.2)
    }

    /// Kills a process with all its descendants and removes it. Returns whether this call killed it;
    /// `None` if no process ever had this id, and none of the latest had this pid.
    ///
    /// # Errors
    /// The process does not die in time. It is not removed then.
    pub fn delete(&self, name: &str) -> Result<Option<bool>> {
        let Some(process) = self.find(name) else {
            return Ok(self.was_removed(name).then_some(false));
        };
        let is_first = process.kill_tree(Reason::Deleted);
        if !is_first {
            process.kill_left_behind();
        }
        // A process that is blocked in the kernel dies of SIGKILL only when it returns from there.
        let limit = Duration::from_secs(10);
        if process.is_running() && !process.wait_ended(limit) && process.is_running() {
            return Err(Error::new(
                Kind::System,
                format!("cannot delete {name}: it was killed and has not died yet; try again"),
            ));
        }
        let mut table = lock(&self.table);
        if let Some(number) = table.number_of(&process) {
            table.remove(number);
        }
        Ok(Some(is_first && process.died_of_kill()))
    }

    fn was_removed(&self, name: &str) -> bool {
        if let Some(number) = given_number(name) {
            return (1..self.next.load(Ordering::Relaxed)).contains(&number);
        }
        let table = lock(&self.table);
        table.removed_ids.iter().any(|id| id == name)
            || parse_pid(name).is_some_and(|pid| table.removed_pids.contains(&pid))
    }

    /// Refuses further starts, sends SIGTERM to all processes and their descendants, and kills what is
    /// left after `grace`.
    pub fn shut_down(&self, grace: Duration) {
        self.close();
        self.end_starts();
        let deadline = Instant::now() + grace;
        let mut roots = Roots {
            orphans: Orphans::Own,
            ..Roots::default()
        };
        loop {
            let running = self.running();
            roots.leaders = running.iter().map(|process| process.pid).collect();
            let living = roots.living();
            if running.is_empty() && living.is_empty() {
                return;
            }
            if Instant::now() >= deadline {
                break;
            }
            if roots.members.is_empty() {
                self.hang_up_terminals();
                for process in &running {
                    process.expect_signal(libc::SIGTERM);
                }
            }
            for member in living.difference(&roots.members) {
                member.signal(libc::SIGTERM);
                // A stopped process handles SIGTERM only after it continues.
                member.signal(libc::SIGCONT);
            }
            roots.members.extend(living);
            if let Some(process) = running.first() {
                process.wait_ended(Duration::from_millis(20));
            } else {
                // The server does not wait for the rest by pidfds.
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let left = self.running();
        kill_trees(&left, Reason::Killed);
        roots.leaders.clear();
        finish(Hunt::new(roots));
        for process in left {
            process.wait_ended(Duration::from_millis(500));
        }
    }

    /// Waits until no command is being started. Kills those that take long, because something may hold
    /// them up: a signal that has stopped them, or a lease on their program.
    fn end_starts(&self) {
        let mut table = lock(&self.table);
        for _ in 0..2 {
            let is_starting = |table: &mut ProcessTable| !table.starts.is_empty();
            let waited = self
                .start_ended
                .wait_while_for(table, START_CHECK_AFTER, is_starting);
            table = waited.0;
            for start in &table.starts {
                start.kill();
            }
        }
    }

    /// How many commands have not ended.
    pub fn count_running(&self) -> usize {
        let table = lock(&self.table);
        table.processes.len() - table.ended.len()
    }

    /// All processes that have not ended, interpreters too.
    fn running(&self) -> Vec<Arc<Process>> {
        let mut all = self.list();
        all.extend_from_slice(&lock(&self.table).interpreters);
        all.retain(|process| process.exit().is_none());
        all
    }
}

impl PumpOwner for Registry {
    fn adopt(&self, pump: Pump) {
        self.driver.adopt(pump);
    }

    fn is_released(&self) -> bool {
        self.is_released.load(Ordering::Acquire)
    }

    fn clock(&self) -> &WorkClock {
        self.activity.clock()
    }

    fn ended(&self, process: &Arc<Process>) {
        if let Some(exit) = process.exit() {
            let (id, ending, reason) = (&process.id, exit.ending, exit.reason);
            logging::debug(format_args!("process {id} ended: {ending:?}, {reason:?}"));
        }
        self.shared.supervisor.unwatch(process);
        let mut table = lock(&self.table);
        if process.is_interpreter {
            let interpreters = &mut table.interpreters;
            interpreters.retain(|other| !Arc::ptr_eq(other, process));
            return;
        }
        self.activity.end();
        // A deleted process is not kept.
        let Some(number) = table.number_of(process) else {
            return;
        };
        table.ended.push_back(number);
        table.ended_command_bytes += process.text_bytes();
        while table.ended.len() > HISTORY
            || (table.ended_command_bytes > HISTORY_COMMAND_BYTES && table.ended.len() > 1)
        {
            let oldest = table.ended[0];
            table.note_recent(oldest);
            table.remove(oldest);
        }
    }
}

/// Adds to a queue that keeps the latest [`HISTORY`] values.
fn push_bounded<T>(queue: &mut VecDeque<T>, value: T) {
    queue.push_back(value);
    if queue.len() > HISTORY {
        queue.pop_front();
    }
}

/// The pid that a name stands for where it is no id.
fn parse_pid(name: &str) -> Option<Pid> {
    let is_decimal = name.bytes().all(|byte| byte.is_ascii_digit());
    is_decimal.then(|| name.parse().ok()).flatten()
}

/// N of `p-N`.
fn given_number(id: &str) -> Option<u64> {
    let number = id.strip_prefix("p-")?.parse().ok()?;
    (id == format!("p-{number}")).then_some(number)
}

fn paused() -> Error {
    Error::new(Kind::Paused, "the sandbox is paused; resume it first")
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::limits::activity::IdleBy;
    use crate::limits::ledger::Budget;
    use crate::spec::command::{ChosenId, CommandLine};
    use crate::sys::Ending;

    fn registry_in(shared: Arc<Shared>) -> Arc<Registry> {
        let ledger = Budget::new(1 << 20).whole();
        Registry::new(
            shared,
            Arc::new(Activity::new()),
            ledger,
            OpenCounts::new(),
            1,
        )
    }

    /// A process that nobody drives.
    fn start(program: &[&str]) -> (Pump, Arc<Process>) {
        let shared = Shared::new(4096, 4096).unwrap();
        let registry = registry_in(shared);
        let line = CommandLine::Program(program.iter().map(|&word| word.to_owned()).collect());
        let spec = CommandSpec::new(line, Vec::new(), None).unwrap();
        let confinement = Confinement::for_test();
        let StartOutcome::Started(pump) = registry.start(spec, &confinement).unwrap() else {
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

    /// Else a sandbox would get a new share by each stop and start, while the server cannot let go of the old one.
    #[test]
    fn what_an_ended_run_has_open_counts_in_the_next() {
        let open = OpenCounts::new();
        let [former, next] = [1, 2].map(|first| {
            let (shared, activity) = (Shared::new(4096, 4096).unwrap(), Activity::new());
            let ledger = Budget::new(1 << 20).whole();
            Registry::new(shared, Arc::new(activity), ledger, Arc::clone(&open), first)
        });
        let held = former.share_commands().unwrap();
        former.close();
        former.release();
        drop(former);
        assert_eq!(next.open.commands.add().1, 2);
        drop(held);
        assert_eq!(next.open.commands.add().1, 1);
    }

    /// [`Registry::delete`] relies on it: a process is reaped before its output was read and its end
    /// is published.
    #[test]
    fn a_kill_that_came_too_late_has_killed_nothing() {
        let (_pump, process) = start(&["true"]);
        let pidfd = process.pidfd().unwrap();
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

    /// Whoever follows a process stops at its end: what came after it would be lost.
    #[test]
    fn an_end_is_told_when_all_output_was_read() {
        let (mut pump, process) = start(&["sh", "-c", "echo some output; echo an error >&2"]);
        let pidfd = process.pidfd().unwrap();
        let mut entries = [sys::PollEntry::new(pidfd.as_fd(), sys::Events::READABLE)];
        sys::poll(&mut entries, None);
        let ledger = Budget::new(1 << 20).whole();
        let mut buffer = super::super::pump::Buffer::of(&ledger);
        let mut read = Vec::new();
        let exit = pump.finish(&mut buffer, &mut |_, _, data| {
            assert!(process.exit().is_none(), "the end came before the output");
            read.extend_from_slice(data);
        });
        assert_eq!(read, b"some output\nan error\n");
        assert!(exit.is_some() && process.exit() == exit);
    }

    #[test]
    fn a_chosen_id_is_that_of_one_command() {
        let registry = registry_in(Shared::new(4096, 4096).unwrap());
        let confinement = Confinement::for_test();
        let start = |id: &str, program: &str| {
            let line = CommandLine::Program(vec![program.to_owned()]);
            let mut spec = CommandSpec::new(line, Vec::new(), None).unwrap();
            spec.id = Some(ChosenId::new(id.to_owned()).unwrap());
            registry.start(spec, &confinement)
        };
        let Ok(StartOutcome::Started(_pump)) = start("job", "true") else {
            panic!("the id is new");
        };
        let found = || registry.find("job").unwrap();
        match start("job", "true") {
            Ok(StartOutcome::AlreadyExists(process)) => assert!(Arc::ptr_eq(&process, &found())),
            _ => panic!("it is the same command"),
        }
        assert_eq!(start("job", "false").err().unwrap().kind(), Kind::IdInUse);
        for other in ["Job", "jo", "job.", "job2"] {
            assert!(registry.find(other).is_none(), "{other:?}");
            let started = start(other, "true");
            assert!(matches!(started, Ok(StartOutcome::Started(_))), "{other:?}");
            assert_eq!(registry.find(other).unwrap().id, other);
            assert_eq!(found().id, "job");
        }
    }

    #[test]
    fn an_interpreter_is_no_work_and_in_no_list_but_ends_with_the_workspace() {
        let shared = Shared::new(4096, 4096).unwrap();
        let registry = registry_in(shared);
        let confinement = Confinement::for_test();
        let words = ["sh", "-c", "cat <&4; exec sleep 1000"].map(str::to_owned);
        let spec = CommandSpec::new(CommandLine::Program(words.into()), Vec::new(), None).unwrap();
        let (mut own, its) = std::os::unix::net::UnixStream::pair().unwrap();
        let pump = registry.start_interpreter(spec, &confinement, its.into());
        let process = Arc::clone(pump.unwrap().process());
        own.write_all(b"hello").unwrap();
        own.shutdown(std::net::Shutdown::Write).unwrap();
        while process.written(super::super::ring::Stream::Stdout) < 5 {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(registry.list().is_empty());
        assert_eq!((registry.count_running(), registry.next_number()), (0, 1));
        assert!(registry.find(&process.pid.to_string()).is_none());
        assert!(registry.find(&process.id).is_none());
        assert!(registry.activity.idle_for(IdleBy::Work).is_some());

        // As the workspace's end does. The end itself would also look for what other tests have started.
        assert_eq!(kill_trees(&registry.running(), Reason::Killed), 1);
        assert!(process.wait_ended(Duration::from_secs(5)));
        let exit = process.exit().map(|exit| (exit.ending, exit.reason));
        assert_eq!(
            exit,
            Some((Ending::Signaled(libc::SIGKILL), Reason::Killed))
        );
        while !lock(&registry.table).interpreters.is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(registry.activity.idle_for(IdleBy::Work).is_some());
        assert_eq!(
            own.read(&mut [0; 1]).unwrap(),
            0,
            "the server holds its end open"
        );
    }

    #[test]
    fn a_pid_stands_for_the_latest_process_that_had_it() {
        let shared = Shared::new(4096, 4096).unwrap();
        let registry = registry_in(Arc::clone(&shared));
        let line = CommandLine::Shell("true".to_owned());
        let spec = CommandSpec::new(line, Vec::new(), None).unwrap();
        for number in 1..=2 {
            let spawned = sys::Spawned {
                pid: 77,
                pidfd: File::open("/dev/null").unwrap().into(),
                listener: None,
            };
            let log = Log::new(&shared.logs, &registry.open.logs, 4096);
            let started = (Instant::now(), 0);
            let origin = Origin {
                mark: None,
                user: None,
                starter: 0,
                holder: None,
            };
            let texts = registry.charge_texts(0).unwrap();
            let id = format!("p-{number}");
            let process = Process::new(id, &spec, spawned, started, origin, log, texts);
            registry.list_process(Some(number), &Arc::new(process));
        }
        for id in ["p-2", "p-1"] {
            assert_eq!(registry.find("77").unwrap().id, id);
            let number = given_number(id).unwrap();
            lock(&registry.table).remove(number);
        }
        assert!(registry.find("77").is_none());
        assert!(registry.was_removed("77"));
        assert!(!registry.was_removed("78"));
    }
}
