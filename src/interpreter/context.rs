//! A context: the state that requests and the driver share, and the requests.
//!
//! Requests change the state under its lock and notify the driver. Everything that concerns the interpreter is
//! done by the driver alone, in the order in which it finds it.

use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::event::{End, EndReason, Event};
use super::execution::{
    Abandoned, Execution, ExecutionSpec, ExecutionState, ExecutionSubscriber, held_bytes,
};
use crate::client::{Disconnected, Interrupt, Stopped};
use crate::codec::most_json_bytes;
use crate::confine::Confinement;
use crate::error::{Error, Kind, Result};
use crate::limits::activity::Activity;
use crate::limits::ledger::{Charge, Item, Ledger};
use crate::process::registry::Registry;
use crate::process::{Process, Reason};
use crate::spec::command::{
    CommandLine, CommandSpec, EnvironmentChange, Fingerprint, environment_bytes,
};
use crate::spec::language::Language;
use crate::spec::network::NetworkPolicy;
use crate::threads::Thread;
use crate::threads::lock::{Condvar, Mutex, MutexGuard, lock};
use crate::threads::notify::Notifier;
use crate::threads::priority::BackgroundWork;

/// Most executions that wait in a context.
pub(super) const MAX_QUEUED: usize = 64;

/// How many executions a context remembers.
const HISTORY: usize = 64;

/// How long an interrupt is waited for that may not kill.
const INTERRUPT_WAIT: Duration = Duration::from_secs(2);

/// How long the end of an interpreter is waited for that was killed.
const KILL_WAIT: Duration = Duration::from_secs(15);

/// How long a driver may take to kill its interpreter.
const DRIVER_LIMIT: Duration = Duration::from_secs(1);

/// How often a request that waits for an interpreter checks its connection.
const LOOK_PAUSE: Duration = Duration::from_millis(50);

/// How long an interpreter may take until it is ready.
pub(super) const START_LIMIT: Duration = Duration::from_secs(60);

/// Where the interpreter finds the bridge's socket.
const BRIDGE_DESCRIPTOR: i32 = 4;

/// Who lists contexts.
pub(super) trait Home: Send + Sync {
    /// The interpreter of a context has ended. What nobody can use any more is forgotten.
    fn forget_ended(&self, context: &Context);
}

/// What all contexts of a workspace use.
pub(super) struct Site {
    pub(super) processes: Arc<Registry>,
    pub(super) confinement: Arc<Confinement>,
    pub(super) ledger: Arc<Ledger>,
    pub(super) activity: Arc<Activity>,
    /// Work on what the tenant has much of.
    pub(super) background: Arc<BackgroundWork>,
    /// Bytes of events that an execution keeps.
    pub(super) journal_bytes: usize,
    /// Starts and drives the interpreters of a context, on a thread of its own.
    pub(super) drive: fn(&Arc<Context>),
}

/// What a client asks of a new context.
#[derive(Debug, Clone, Default)]
pub struct ContextSpec {
    /// Chosen by the client.
    pub id: Option<String>,
    /// `auto`, or one of the language's.
    pub backend: Option<String>,
    /// `None` for the workspace's.
    pub directory: Option<String>,
    /// Changes to the workspace's environment.
    pub environment: Vec<EnvironmentChange>,
    /// The client's label.
    pub tag: Option<String>,
    /// What it may reach over the network; `None` for what all commands of the workspace may.
    pub network: Option<NetworkPolicy>,
    /// The user of its interpreter; `None` for whoever runs the commands of the workspace.
    pub user: Option<String>,
}

impl ContextSpec {
    /// Bytes in memory, approximately.
    pub(super) fn bytes(&self) -> usize {
        let texts = [&self.directory, &self.tag, &self.user];
        let texts = texts.into_iter().flatten();
        // Its rules are also those of its egress listener.
        let network = self.network.as_ref().map_or(0, NetworkPolicy::size);
        environment_bytes(&self.environment) + texts.map(String::len).sum::<usize>() + 2 * network
    }

    /// Bytes of it for a spare.
    pub(super) fn sent_bytes(&self) -> usize {
        let changes = self.environment.iter();
        let values = changes.flat_map(|(name, value)| [Some(name), value.as_ref()]);
        let texts = values.chain([self.directory.as_ref()]).flatten();
        texts.map(|text| most_json_bytes(text)).sum()
    }
}

/// Who a context is. A spare is nobody yet.
pub(super) struct Identity {
    pub(super) id: String,
    pub(super) spec: ContextSpec,
    /// For what was asked for, as long as the context is known.
    pub(super) _charge: Charge,
    pub(super) created_at_ms: u64,
    /// It was a spare.
    pub(super) is_warm: bool,
    /// It goes with its first execution.
    pub(super) is_stateless: bool,
}

/// What a context is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContextState {
    /// Its interpreter is not ready.
    Starting,
    /// It waits for code.
    Idle,
    Busy,
    /// Its interpreter has ended, for this reason.
    Dead(String),
}

/// One interpreter that stays.
pub struct Context {
    /// What its code is in.
    pub language: Language,
    /// `auto`, or the back end that was asked for.
    pub(super) backend: String,
    identity: OnceLock<Identity>,
    pub(super) site: Arc<Site>,
    /// Where it is listed.
    pub(super) home: Weak<dyn Home>,
    state: Mutex<Lifecycle>,
    /// Notified when an interpreter is ready, has failed or has ended.
    changed: Condvar,
    /// Notifies when there is something to do for the driver.
    pub(super) notifier: Arc<Notifier>,
}

/// Guarded by the lock of its context, which is held briefly and never across I/O.
pub(super) struct Lifecycle {
    pub(super) phase: Phase,
    /// The back end and the version that the bridge has told.
    pub(super) told: Option<(String, String)>,
    pub(super) process: Option<Arc<Process>>,
    pub(super) generation: u64,
    /// Executions of this generation.
    pub(super) count: u64,
    pub(super) running: Option<Arc<Execution>>,
    pub(super) queue: VecDeque<Arc<Execution>>,
    /// Those that were asked for, the oldest first.
    pub(super) history: VecDeque<Arc<Execution>>,
    pub(super) orders: Vec<Request>,
    /// The number of the question that the code waits for.
    pub(super) asked: Option<u64>,
    /// A thread drives it.
    pub(super) has_driver: bool,
    /// It has no other interpreter after this one.
    is_deleted: bool,
    next_execution: u64,
}

pub(super) enum Phase {
    Starting,
    Ready,
    /// The reason in a word, and the error if it never was ready.
    Dead(String, Option<Error>),
}

/// What a request wants of the driver.
pub(super) enum Request {
    Interrupt {
        execution: Arc<Execution>,
        cause: EndReason,
        kill_after: Option<Duration>,
    },
    Answer {
        k: u64,
        value: Option<String>,
        /// Until the bridge has it.
        charge: Charge,
    },
    /// The spare has an identity now. The charge is for what it is sent.
    Adopt(Charge),
    Restart,
    Delete,
}

/// What an interrupt has done.
pub struct Interrupted {
    /// Whether there was something to interrupt.
    pub was_sent: bool,
    pub execution: Option<String>,
    /// Whether it has ended.
    pub has_ended: bool,
}

impl Context {
    pub(super) fn new(
        language: Language,
        backend: &str,
        site: &Arc<Site>,
        home: Weak<dyn Home>,
    ) -> Arc<Self> {
        Arc::new(Self {
            language,
            backend: backend.to_owned(),
            identity: OnceLock::new(),
            site: Arc::clone(site),
            home,
            state: Mutex::new(Lifecycle {
                phase: Phase::Starting,
                told: None,
                process: None,
                generation: 1,
                count: 0,
                running: None,
                queue: VecDeque::new(),
                history: VecDeque::new(),
                orders: Vec::new(),
                asked: None,
                has_driver: true,
                is_deleted: false,
                next_execution: 1,
            }),
            changed: Condvar::new(),
            notifier: Arc::default(),
        })
    }

    pub(super) fn state_guard(&self) -> MutexGuard<'_, Lifecycle> {
        lock(&self.state)
    }

    /// Changes the state and tells everybody who waits for it.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Lifecycle) -> T) -> T {
        let result = change(&mut lock(&self.state));
        self.changed.notify_all();
        result
    }

    /// Gives a context its identity. A spare gets it, if there is one already; `sent` is the charge for that.
    pub(super) fn identify(&self, identity: Identity, sent: Charge) {
        let is_warm = identity.is_warm;
        // Whoever takes a spare out of its place is the only one.
        let _ = self.identity.set(identity);
        if is_warm {
            lock(&self.state).orders.push(Request::Adopt(sent));
            self.notifier.notify();
        }
    }

    pub(super) fn identity(&self) -> Option<&Identity> {
        self.identity.get()
    }

    pub fn id(&self) -> &str {
        self.identity().map_or("spare", |identity| &identity.id)
    }

    /// What the client has asked for.
    pub fn spec(&self) -> Option<&ContextSpec> {
        self.identity().map(|identity| &identity.spec)
    }

    /// When it was made: milliseconds since 1970.
    pub fn created_at_ms(&self) -> u64 {
        self.identity().map_or(0, |identity| identity.created_at_ms)
    }

    /// Whether its interpreter was started before it was asked for.
    pub fn is_warm(&self) -> bool {
        self.identity().is_some_and(|identity| identity.is_warm)
    }

    /// The directory that its interpreter starts in.
    pub fn directory(&self) -> String {
        let directory = self.spec().and_then(|spec| spec.directory.clone());
        directory.unwrap_or_else(|| self.site.confinement.directory().display().to_string())
    }

    pub fn state(&self) -> ContextState {
        let state = lock(&self.state);
        match &state.phase {
            Phase::Starting => ContextState::Starting,
            Phase::Ready if state.running.is_some() => ContextState::Busy,
            Phase::Ready => ContextState::Idle,
            Phase::Dead(why, _) => ContextState::Dead(why.clone()),
        }
    }

    /// The back end and the version of its interpreter, once it is ready.
    pub fn told(&self) -> Option<(String, String)> {
        lock(&self.state).told.clone()
    }

    /// The process of its latest interpreter.
    pub fn process(&self) -> Option<Arc<Process>> {
        lock(&self.state).process.clone()
    }

    /// How often an interpreter was started, and how many executions the latest has had.
    pub fn counts(&self) -> (u64, u64) {
        let state = lock(&self.state);
        (state.generation, state.count)
    }

    /// The execution that runs, and how many wait.
    pub fn work(&self) -> (Option<String>, usize) {
        let state = lock(&self.state);
        let running = state.running.as_ref();
        (
            running.map(|execution| execution.id.clone()),
            state.queue.len(),
        )
    }

    /// The latest executions, the oldest first.
    pub fn executions(&self) -> Vec<Arc<Execution>> {
        let state = lock(&self.state);
        let older = state.history.len().saturating_sub(HISTORY);
        state.history.iter().skip(older).cloned().collect()
    }

    /// One of the latest executions.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn execution(&self, id: &str) -> Result<Arc<Execution>> {
        let state = lock(&self.state);
        let found = state.history.iter().find(|execution| execution.id == id);
        found.cloned().ok_or_else(|| {
            let text = format!("context {} knows no execution {id}", self.id());
            Error::new(Kind::NotFound, text)
        })
    }

    /// The command that starts its interpreter.
    pub(super) fn command(&self) -> Result<CommandSpec> {
        let (start, _) = self.language.scripts();
        let descriptor = BRIDGE_DESCRIPTOR.to_string();
        let words: &[&str] = match self.language {
            Language::Python => &["-c", start, &descriptor],
            Language::JavaScript => &["-e", start, &descriptor],
            Language::Bash => &["-c", start, "bash", &descriptor],
        };
        let words = [&[self.language.program()], words].concat();
        let words = words.into_iter().map(str::to_owned).collect();
        let spec = self.spec().cloned().unwrap_or_default();
        let mut command = CommandSpec::new(
            CommandLine::Program(words),
            spec.environment,
            spec.directory,
        )?;
        command.network = spec.network;
        command.user = spec.user;
        Ok(command)
    }

    /// Starts the thread that starts and drives its interpreter. The caller has noted it in the state.
    ///
    /// # Errors
    /// No thread is left.
    pub(super) fn start(self: &Arc<Self>) -> Result<()> {
        let own = Arc::clone(self);
        let counted = self.site.processes.count_driver();
        let started = Thread::new("context").start(move || {
            let _counted = counted;
            (own.site.drive)(&own);
        });
        started.map(drop).map_err(|error| {
            self.change(|state| {
                state.has_driver = false;
                state.phase = Phase::Dead("no thread was left".to_owned(), None);
            });
            let text = format!("cannot start the interpreter: {error}");
            Error::new(Kind::NoThreads, text)
        })
    }

    /// Waits until its interpreter is ready.
    ///
    /// # Errors
    /// It could not be started, or has ended; the client disconnected, and it is started all the same.
    pub(super) fn wait_ready(
        &self,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<(), Stopped> {
        let is_starting = |state: &mut Lifecycle| matches!(state.phase, Phase::Starting);
        // The driver gives up before that by itself.
        let clock = self.site.activity.clock();
        let until = clock.now() + START_LIMIT + KILL_WAIT;
        let mut state = lock(&self.state);
        while matches!(state.phase, Phase::Starting) && clock.now() < until {
            (state, _) = self.changed.wait_while_for(state, LOOK_PAUSE, is_starting);
            if is_starting(&mut state) {
                drop(state);
                interrupt.check()?;
                state = lock(&self.state);
            }
        }
        Err(Stopped::Failed(match &state.phase {
            Phase::Ready => return Ok(()),
            Phase::Dead(_, Some(error)) => error.clone(),
            Phase::Dead(why, None) => self.dead(why),
            Phase::Starting => Error::new(
                Kind::KernelFailed,
                "the interpreter could not be started in time",
            ),
        }))
    }

    fn dead(&self, why: &str) -> Error {
        let id = self.id();
        let text = format!("context {id} is dead: {why}; restart it");
        Error::new(Kind::ContextDead, text)
    }

    /// Asks for an execution, or finds the one that has its id. The caller holds a lease.
    ///
    /// # Errors
    /// `ContextDead`; `IdInUse` if other code has the id; `QueueFull`; `OverLimit`; `Invalid` for code that the
    /// interpreter cannot be given.
    pub fn execute(self: &Arc<Self>, spec: ExecutionSpec) -> Result<Asked> {
        if self.language == Language::Bash {
            check_for_bash(&spec)?;
        }
        let fingerprint = fingerprint(&spec);
        let mut state = lock(&self.state);
        if let Some(id) = &spec.id
            && let Some(existing) = state.history.iter().find(|execution| execution.id == *id)
        {
            if existing.fingerprint != fingerprint {
                let text = format!(
                    "cannot execute {id}: the id belongs to different code; choose another"
                );
                return Err(Error::new(Kind::IdInUse, text));
            }
            existing.join();
            return Ok(Asked {
                context: Arc::clone(self),
                execution: Arc::clone(existing),
                is_first: false,
            });
        }
        match &state.phase {
            Phase::Dead(why, _) => return Err(self.dead(why)),
            Phase::Starting | Phase::Ready => {}
        }
        if state.queue.len() >= MAX_QUEUED {
            let text = format!(
                "context {} has {MAX_QUEUED} executions waiting; wait for one to end, or use another context",
                self.id()
            );
            return Err(Error::new(Kind::QueueFull, text));
        }
        let charge = self.site.ledger.charge(Item::Executions, spec.bytes())?;
        let number = state.next_execution;
        state.next_execution += 1;
        let id = spec.id.clone().unwrap_or_else(|| format!("e-{number}"));
        let limit = self.site.journal_bytes;
        let execution = Execution::new(id, fingerprint, spec, limit, charge, &self.notifier);
        let position = state.queue.len() + usize::from(state.running.is_some());
        if position > 0 {
            execution.append(Event::Queued { position });
        }
        self.site.activity.begin();
        state.queue.push_back(Arc::clone(&execution));
        state.history.push_back(Arc::clone(&execution));
        if state.history.len() > HISTORY + MAX_QUEUED + 1 {
            let is_over =
                |execution: &Arc<Execution>| matches!(execution.state(), ExecutionState::Ended(_));
            let oldest = state.history.iter().position(is_over);
            oldest.and_then(|at| state.history.remove(at));
        }
        drop(state);
        self.notifier.notify();
        Ok(Asked {
            context: Arc::clone(self),
            execution,
            is_first: true,
        })
    }

    /// Interrupts an execution: this one, or the one that runs. One that waits leaves the queue. Waits for its end.
    ///
    /// # Errors
    /// `NotFound` if there is no execution with the id; the client disconnected, and it is interrupted all the same.
    pub fn interrupt(
        &self,
        id: Option<&str>,
        kill_after: Option<Duration>,
        client: &mut dyn Interrupt,
    ) -> std::result::Result<Interrupted, Stopped> {
        let execution = match id {
            Some(id) => Some(self.execution(id)?),
            None => lock(&self.state).running.clone(),
        };
        let Some(execution) = execution else {
            return Ok(Interrupted {
                was_sent: false,
                execution: None,
                has_ended: false,
            });
        };
        let was_sent = self.stop(&execution, EndReason::Interrupted, kill_after);
        let limit = kill_after.map_or(INTERRUPT_WAIT, |after| after.saturating_add(KILL_WAIT));
        let has_ended = was_sent && execution.wait_ended(limit, client)?;
        Ok(Interrupted {
            was_sent,
            execution: Some(execution.id.clone()),
            has_ended,
        })
    }

    /// Takes an execution out of the queue, or has the driver interrupt it. False if it has ended.
    fn stop(
        &self,
        execution: &Arc<Execution>,
        cause: EndReason,
        kill_after: Option<Duration>,
    ) -> bool {
        let mut state = lock(&self.state);
        let is_this = |other: &Arc<Execution>| Arc::ptr_eq(other, execution);
        if let Some(at) = state.queue.iter().position(is_this) {
            state.queue.remove(at);
            drop(state);
            self.end_execution(execution, EndReason::Cancelled, true);
            return true;
        }
        if !state.running.as_ref().is_some_and(is_this) {
            return false;
        }
        // The driver may be held up, and clients come and go meanwhile: one order says what all of them want.
        let waiting = state.orders.iter_mut().find_map(|order| match order {
            Request::Interrupt {
                execution,
                kill_after,
                ..
            } if is_this(execution) => Some(kill_after),
            _ => None,
        });
        match waiting {
            Some(earliest) => *earliest = [*earliest, kill_after].into_iter().flatten().min(),
            None => state.orders.push(Request::Interrupt {
                execution: Arc::clone(execution),
                cause,
                kill_after,
            }),
        }
        drop(state);
        self.notifier.notify();
        true
    }

    /// Ends an execution that never ran, or whose driver is lost.
    pub(super) fn end_execution(&self, execution: &Execution, reason: EndReason, is_kept: bool) {
        let is_first = execution.end(End {
            reason,
            is_kept,
            count: 0,
            ending: None,
            has_timed_out: false,
            duration: Duration::ZERO,
        });
        // The driver and a request may both end it.
        if is_first {
            self.site.activity.end();
        }
    }

    /// Answers the question of the code that runs; `None` is the end of input.
    ///
    /// # Errors
    /// `NotAsked`; `OverLimit`.
    pub fn answer(&self, value: Option<String>) -> Result<()> {
        let bytes = value.as_deref().map_or(0, held_bytes);
        let charge = self.site.ledger.charge(Item::Executions, bytes)?;
        let mut state = lock(&self.state);
        let Some(k) = state.asked.take() else {
            let text = format!("no code in context {} waits for input", self.id());
            return Err(Error::new(Kind::NotAsked, text));
        };
        state.orders.push(Request::Answer { k, value, charge });
        drop(state);
        self.notifier.notify();
        Ok(())
    }

    /// Ends its interpreter with everything that it has started, and starts it anew. What waits is not run.
    ///
    /// # Errors
    /// The interpreter cannot be started; the client disconnected.
    pub fn restart(
        self: &Arc<Self>,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<(), Stopped> {
        self.start_anew(true, interrupt)
    }

    /// As [`Context::restart`], unless its interpreter runs or is started by somebody else.
    ///
    /// # Errors
    /// The interpreter cannot be started.
    pub(super) fn revive(
        self: &Arc<Self>,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<(), Stopped> {
        self.start_anew(false, interrupt)
    }

    fn start_anew(
        self: &Arc<Self>,
        is_forced: bool,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<(), Stopped> {
        let state = lock(&self.state);
        if !is_forced && !matches!(state.phase, Phase::Dead(..)) {
            drop(state);
            return self.wait_ready(interrupt);
        }
        let is_ending =
            |state: &mut Lifecycle| state.has_driver && matches!(state.phase, Phase::Dead(..));
        let (mut state, _) = self.changed.wait_while_for(state, KILL_WAIT, is_ending);
        if state.is_deleted || (!is_forced && !matches!(state.phase, Phase::Dead(..))) {
            drop(state);
            return self.wait_ready(interrupt);
        }
        let queued = mem::take(&mut state.queue);
        let has_driver = mem::replace(&mut state.has_driver, true);
        if !has_driver {
            state.begin_generation();
        } else if !state.is_restarting() {
            state.orders.push(Request::Restart);
        }
        // Whoever asks from now on learns of the next one.
        state.phase = Phase::Starting;
        drop(state);
        for execution in queued {
            self.end_execution(&execution, EndReason::Restarted, false);
        }
        if has_driver {
            self.notifier.notify();
        } else {
            self.start()?;
        }
        self.wait_ready(interrupt)
    }

    /// Ends it with everything that it has started, and waits until that is gone. False if that was asked for before.
    ///
    /// # Errors
    /// The kernel has not let it die yet.
    pub(super) fn delete(&self) -> Result<bool> {
        let mut state = lock(&self.state);
        let is_first = !mem::replace(&mut state.is_deleted, true);
        state.phase = Phase::Dead("it was deleted".to_owned(), None);
        let queued = mem::take(&mut state.queue);
        if state.has_driver && is_first {
            state.orders.push(Request::Delete);
        }
        drop(state);
        self.notifier.notify();
        for execution in queued {
            self.end_execution(&execution, EndReason::Deleted, false);
        }
        let is_driven = |state: &mut Lifecycle| state.has_driver;
        let wait = |limit| {
            let state = lock(&self.state);
            self.changed.wait_while_for(state, limit, is_driven).0
        };
        let mut state = wait(DRIVER_LIMIT);
        if state.has_driver {
            // What it has started may hold up its driver (splice(2)), which then kills nothing.
            let process = state.process.clone();
            drop(state);
            if let Some(process) = process {
                process.kill_tree(Reason::Deleted);
            }
            state = wait(KILL_WAIT);
        }
        if state.has_driver {
            let text = format!(
                "cannot delete {}: it was killed and has not died yet; try again",
                self.id()
            );
            return Err(Error::new(Kind::System, text));
        }
        Ok(is_first)
    }

    /// Whether it is being deleted, or has been.
    pub(super) fn is_deleted(&self) -> bool {
        lock(&self.state).is_deleted
    }

    /// `auto`, or the back end that was asked for.
    pub fn backend(&self) -> &str {
        &self.backend
    }

    /// Whether it is of this language and back end.
    pub(super) fn is_kind(&self, language: Language, backend: &str) -> bool {
        self.language == language && self.backend == backend
    }

    /// Whether it is a spare that can be taken.
    pub(super) fn is_waiting(&self) -> bool {
        let state = lock(&self.state);
        matches!(state.phase, Phase::Starting) && state.told.is_some() && state.has_driver
    }

    /// Whether it goes with its first execution.
    pub(super) fn is_stateless(&self) -> bool {
        self.identity()
            .is_some_and(|identity| identity.is_stateless)
    }
}

impl Lifecycle {
    /// Another interpreter is to follow the present one.
    pub(super) fn is_restarting(&self) -> bool {
        let mut orders = self.orders.iter();
        !self.is_deleted && orders.any(|order| matches!(order, Request::Restart))
    }

    /// The next interpreter has nothing of the one before.
    pub(super) fn begin_generation(&mut self) {
        self.generation += 1;
        self.count = 0;
        self.told = None;
        self.asked = None;
        self.phase = Phase::Starting;
    }
}

/// An execution and the client that has asked for it. The execution learns of it when the client disconnects.
pub struct Asked {
    context: Arc<Context>,
    pub execution: Arc<Execution>,
    /// It made the execution, and did not find it.
    is_first: bool,
}

impl Asked {
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Sends all events from the beginning until the end.
    pub fn follow(self, subscriber: &mut dyn ExecutionSubscriber) {
        // On an error this value is dropped before the end.
        let _: std::result::Result<(), Disconnected> =
            self.execution.follow(0, true, self.is_first, subscriber);
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if self.is_first {
            self.execution.stop_asking();
        }
        if self.execution.leave() && self.execution.abandoned == Abandoned::Interrupt {
            self.context
                .stop(&self.execution, EndReason::Disconnected, None);
        }
    }
}

/// Bash gets its fields ended by NUL, and variables by name.
fn check_for_bash(spec: &ExecutionSpec) -> Result<()> {
    let stdin = spec.stdin.as_deref().unwrap_or_default();
    if spec.code.contains('\0') || stdin.contains('\0') {
        return Err(Error::invalid(
            "code and stdin of bash cannot have a NUL character",
        ));
    }
    let is_name = |name: &str| {
        let mut bytes = name.bytes();
        bytes
            .next()
            .is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_')
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    for (name, value) in &spec.environment {
        if !is_name(name) || value.contains('\0') {
            return Err(Error::invalid(format_args!(
                "env has a variable that bash cannot have: {name:?}"
            )));
        }
    }
    Ok(())
}

/// A digest of what decides what an execution does.
fn fingerprint(spec: &ExecutionSpec) -> Fingerprint {
    use sha2::{Digest, Sha256};
    let mut digest = Sha256::new();
    let mut part = |text: &str| {
        digest.update((text.len() as u64).to_le_bytes());
        digest.update(text.as_bytes());
    };
    part(&spec.code);
    part(if spec.stdin.is_some() { "stdin" } else { "" });
    part(spec.stdin.as_deref().unwrap_or_default());
    for (name, value) in &spec.environment {
        part(name);
        part(value);
    }
    digest.finalize().into()
}

/// What all contexts of the server have done.
pub struct InterpreterUse {
    /// Interpreters that run, spares included.
    pub contexts: usize,
    /// Executions that have ended.
    pub executions: u64,
    /// How long they took together.
    pub execution_time: Duration,
}

static CONTEXTS: AtomicUsize = AtomicUsize::new(0);
static EXECUTIONS: AtomicU64 = AtomicU64::new(0);
static MICROSECONDS: AtomicU64 = AtomicU64::new(0);

/// What all contexts of the server have done since its start.
pub fn interpreter_use() -> InterpreterUse {
    InterpreterUse {
        contexts: CONTEXTS.load(Ordering::Relaxed),
        executions: EXECUTIONS.load(Ordering::Relaxed),
        execution_time: Duration::from_micros(MICROSECONDS.load(Ordering::Relaxed)),
    }
}

/// Counts an interpreter until it is dropped.
pub(super) struct CountedInterpreter;

impl CountedInterpreter {
    pub(super) fn new() -> Self {
        CONTEXTS.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for CountedInterpreter {
    fn drop(&mut self) {
        CONTEXTS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts an execution that has ended.
pub(super) fn count_execution(started: Instant) {
    let took = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
    EXECUTIONS.fetch_add(1, Ordering::Relaxed);
    MICROSECONDS.fetch_add(took, Ordering::Relaxed);
}
