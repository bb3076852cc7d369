//! The thread that drives one interpreter: it starts it, hands out executions, reads what comes back, and ends it.
//!
//! It alone reads the socket and the two pipes, and appends what it reads to the events of the execution before it
//! reads again. The bridge sees to it that only one of the three holds something new whenever the order matters
//! (`PROTOCOL.md`, "The sync rule"). It alone sends signals and executions, so an interrupt is sent before the next
//! execution, or not at all. The end of the interpreter is told by its pidfd; the end of the socket tells little,
//! because any child may have a copy.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::context::{Context, CountedInterpreter, Order, Phase, START_LIMIT, count_execution};
use super::event::{CodeError, End, EndReason, Event, Start};
use super::execution::{Execution, ExecutionSpec, ExecutionState};
use super::frame::{self, Incoming, Run, Wire};
use crate::bell::Listener;
use crate::codec::cut_character;
use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::ledger::{Charge, Item};
use crate::panics::contain;
use crate::process::ring::Stream;
use crate::process::{Buffer, Exit, Process, Pump, Reason};
use crate::sync::lock;
use crate::sys::{Ending, Events, PollEntry, poll, refuse_descriptors};

/// Between two SIGINTs: a storm of them overflows the stack of handlers.
const SIGNAL_PAUSE: Duration = Duration::from_millis(10);

/// How long a process may run whose bridge has gone. One that is dying tells its own status.
const CLOSED_LIMIT: Duration = Duration::from_secs(1);

/// How long a spare is kept.
const SPARE_LIMIT: Duration = Duration::from_secs(600);

/// What a bridge may be told, besides an execution, before it reads it.
const MAX_ANSWERS: usize = 64 * 1024;

/// What is read from the socket at once, and before anything else is looked at.
const READ_BYTES: usize = 16 * 1024;
const TURN_BYTES: usize = 1 << 20;

/// After a small read of output there is no other for so long: code that prints line by line would wake this thread
/// and its client's for each of them, and wait for the processor itself.
const READ_PAUSE: Duration = Duration::from_millis(1);

/// What a read of output gives that keeps up with the code.
const LARGE_READ: u64 = 16 * 1024;

/// Most bytes of the last words of an interpreter that could not be started.
const LAST_WORDS: usize = 2048;

/// Starts interpreters for a context, one after the other, until one ends that is not to be started again.
pub(super) fn run(context: &Arc<Context>) {
    loop {
        let driven = contain(|| match Driver::start(context) {
            Ok(driver) => driver.drive(),
            Err(error) => fail(context, "it could not be started", Some(error)),
        });
        if driven.is_err() {
            let _ = contain(|| abandon(context));
        }
        let is_over = context.change(|state| {
            let is_restarted = state.is_restarting();
            state.orders.clear();
            if is_restarted {
                state.begin_generation();
            } else {
                state.has_driver = false;
            }
            !is_restarted
        });
        if is_over {
            return;
        }
    }
}

/// The context has no interpreter any more. What waits for it never runs, unless another is to be started.
fn fail(context: &Context, why: &str, error: Option<Error>) {
    let queued = context.change(|state| {
        state.running = None;
        state.asked = None;
        if state.is_restarting() {
            return VecDeque::new();
        }
        if !matches!(state.phase, Phase::Dead(..)) {
            state.phase = Phase::Dead(why.to_owned(), error);
        }
        std::mem::take(&mut state.queue)
    });
    for execution in queued {
        context.end_execution(&execution, EndReason::ContextDead, false);
    }
}

/// A panic has ended the driver of an interpreter. It is killed, and what it executed is over.
fn abandon(context: &Context) {
    const WHY: &str = "the server failed while it drove the interpreter; its log says where";
    let (process, unfinished) = context.change(|state| {
        if !state.is_restarting() {
            state.phase = Phase::Dead(WHY.to_owned(), None);
        }
        let is_waiting = |execution: &&Arc<Execution>| {
            let mut queue = state.queue.iter();
            queue.any(|waiting| Arc::ptr_eq(waiting, execution))
        };
        let started = state.history.iter().filter(|one| !is_waiting(one));
        let unfinished = started.filter(|one| !matches!(one.state(), ExecutionState::Ended(_)));
        (
            state.process.clone(),
            unfinished.cloned().collect::<Vec<_>>(),
        )
    });
    if let Some(process) = process {
        // It may be what has panicked.
        let _ = contain(|| {
            process.kill_tree(Reason::Killed);
            process.kill_left_behind();
        });
    }
    for execution in unfinished {
        context.end_execution(&execution, EndReason::Died, false);
    }
    fail(context, WHY, None);
    if let Some(home) = context.home.upgrade() {
        home.forget_ended(context);
    }
}

/// What the interpreter is doing.
enum Stage {
    Starting {
        until: Instant,
    },
    /// Ready, and nobody's.
    Spare {
        until: Instant,
    },
    /// It takes the directory and the environment of its context.
    Adopting {
        until: Instant,
    },
    Idle,
    Running(Running),
}

struct Running {
    execution: Arc<Execution>,
    started: Instant,
    count: u64,
    asks: bool,
    kill_after: Duration,
    deadline: Option<Instant>,
    kill_at: Option<Instant>,
    /// The bridge has told that SIGINT would interrupt the code: one that comes earlier is lost.
    has_begun: bool,
    /// Why SIGINT was sent, or will be when the code has begun.
    cause: Option<EndReason>,
    has_result: bool,
}

/// Why the interpreter was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// For the sake of the execution that ran.
    Stopped(EndReason),
    Restarted,
    Deleted,
    /// Nobody wanted the spare.
    Unused,
    NotReady,
    Broken,
}

/// Cuts output into events: whole characters, up to the limit of the execution.
struct Output {
    execution: Option<Arc<Execution>>,
    process: Arc<Process>,
    /// The first bytes of a character, their offset and their position.
    carried: [(u64, u64, Vec<u8>); 2],
    left: u64,
    dropped: [u64; 2],
}

struct Driver {
    context: Arc<Context>,
    pump: Pump,
    socket: UnixStream,
    wire: Wire,
    /// What has arrived and is no whole message.
    incoming: Vec<u8>,
    incoming_charge: Charge,
    /// What the bridge has not read.
    outgoing: Vec<u8>,
    sent: usize,
    /// How much that may be before the socket is not read any more.
    allowed: usize,
    buffer: Buffer,
    output: Output,
    stage: Stage,
    /// It was started for nobody.
    is_spare: bool,
    listener: Listener,
    /// Until when output is not read by itself.
    paused_until: Option<Instant>,
    /// The last SIGINT.
    signalled: Option<Instant>,
    /// One that is due.
    signal_at: Option<Instant>,
    /// SIGINT was sent since the last execution began.
    is_signalled: bool,
    /// The bridge has closed its socket.
    closed: Option<Instant>,
    fate: Option<Fate>,
    /// What the bridge said when it could not start.
    failure: Option<Error>,
    _counted: CountedInterpreter,
}

impl Driver {
    fn start(context: &Arc<Context>) -> Result<Self> {
        let failed = |error| Error::io("cannot start the interpreter", &error);
        let (socket, far) = UnixStream::pair().map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        refuse_descriptors(socket.as_fd());
        let site = &context.site;
        let is_spare = context.identity().is_none();
        let pump = site
            .processes
            .start_interpreter(context.command()?, &site.confinement, OwnedFd::from(far))
            .map_err(|error| explained(context, error))?;
        let process = Arc::clone(pump.process());
        context.change(|state| state.process = Some(Arc::clone(&process)));
        fault::point("interpreter");
        let wire = context.language.wire();
        let (_, bridge) = context.language.scripts();
        let mut outgoing = Vec::new();
        frame::source(wire, bridge, &mut outgoing);
        if wire == Wire::Frames {
            frame::init(
                &context.backend,
                &context.language.modules(&context.backend),
                &mut outgoing,
            );
        }
        Ok(Self {
            incoming_charge: site.ledger.charge(Item::Executions, 0)?,
            buffer: Buffer::of(&site.ledger),
            listener: context.bell.listen(),
            context: Arc::clone(context),
            pump,
            socket,
            wire,
            incoming: Vec::new(),
            allowed: outgoing.len() + MAX_ANSWERS,
            outgoing,
            sent: 0,
            output: Output::of(&process),
            stage: Stage::Starting {
                until: Instant::now() + START_LIMIT,
            },
            is_spare,
            paused_until: None,
            signalled: None,
            signal_at: None,
            is_signalled: false,
            closed: None,
            fate: None,
            failure: None,
            _counted: CountedInterpreter::new(),
        })
    }

    fn process(&self) -> &Arc<Process> {
        self.pump.process()
    }

    /// Drives the interpreter until it has ended.
    fn drive(mut self) {
        loop {
            self.take_orders();
            if matches!(self.stage, Stage::Idle) {
                self.begin_next();
            }
            self.flush();
            let is_reading = self.is_reading();
            let [bell, socket, ended, outputs @ ..] = self.poll(is_reading);
            if bell.any() {
                self.listener.clear();
            }
            if matches!(self.stage, Stage::Running(_)) {
                fault::point("execution");
            }
            if socket.any() && is_reading {
                // Before the pipes: they were empty when it was sent.
                self.receive();
            }
            self.read_outputs(outputs);
            self.check_timers();
            let output = &mut self.output;
            let mut deliver = |stream, offset, data: &[u8]| output.add(stream, offset, data);
            let exit = self
                .pump
                .finish_if_due(ended.any(), &mut self.buffer, &mut deliver);
            if let Some(exit) = exit {
                return self.finish(&exit);
            }
        }
    }

    /// Reads the outputs that poll has named.
    fn read_outputs(&mut self, ready: [Events; 2]) {
        let before = self.process().position();
        for stream in Stream::ALL {
            if ready[stream.index()].any() {
                let output = &mut self.output;
                let mut deliver = |stream, offset, data: &[u8]| output.add(stream, offset, data);
                self.pump
                    .read_or_close(stream, &mut self.buffer, &mut deliver);
            }
        }
        let count = self.process().position() - before;
        if count > 0 {
            let pause = (count < LARGE_READ).then_some(READ_PAUSE);
            self.paused_until = pause.map(|pause| Instant::now() + pause);
        }
    }

    /// Whether what the code writes is read: not while its client has much to take. After a signal it is, because the
    /// code must get to its end.
    fn is_reading(&self) -> bool {
        match &self.stage {
            Stage::Running(running) if running.cause.is_none() => {
                !running.execution.is_backlogged()
            }
            _ => true,
        }
    }

    fn poll(&self, is_reading: bool) -> [Events; 5] {
        let unsent = self.outgoing.len() - self.sent;
        let interest = Events::NONE
            .and_if(is_reading && unsent < self.allowed, Events::READABLE)
            .and_if(unsent > 0, Events::WRITABLE);
        let pause = self.paused_until.filter(|_| is_reading);
        let pause = pause.map(|until| until.saturating_duration_since(Instant::now()));
        let pause = pause.filter(|pause| !pause.is_zero());
        let has_outputs = is_reading && pause.is_none();
        let output = |stream| {
            let pipe = self.pump.output(stream).filter(|_| has_outputs);
            PollEntry::new(pipe, Events::READABLE)
        };
        let mut entries = [
            PollEntry::new(self.listener.descriptor(), Events::READABLE),
            PollEntry::new(self.closed.is_none().then(|| self.socket.as_fd()), interest),
            PollEntry::new(self.pump.awaited_pidfd(), Events::READABLE),
            output(Stream::Stdout),
            output(Stream::Stderr),
        ];
        let interval = self.listener.interval();
        let timer = self.timer();
        let limit = timer.map(|at| at.saturating_duration_since(Instant::now()));
        poll(
            &mut entries,
            limit.into_iter().chain(interval).chain(pause).min(),
        );
        entries.map(|entry| entry.events())
    }

    /// When something is due.
    fn timer(&self) -> Option<Instant> {
        let stage = match &self.stage {
            Stage::Starting { until } | Stage::Spare { until } | Stage::Adopting { until } => {
                [Some(*until), None]
            }
            Stage::Idle => [None, None],
            Stage::Running(running) => [running.deadline, running.kill_at],
        };
        let closed = self.closed.map(|at| at + CLOSED_LIMIT);
        let others = [
            self.pump.timer(),
            self.signal_at,
            closed.filter(|_| self.fate.is_none()),
        ];
        stage.into_iter().chain(others).flatten().min()
    }

    fn check_timers(&mut self) {
        let now = Instant::now();
        let is_due = |at: &Option<Instant>| at.is_some_and(|at| at <= now);
        if is_due(&self.signal_at) {
            self.signal();
        }
        if is_due(&self.closed.map(|at| at + CLOSED_LIMIT)) && self.fate.is_none() {
            self.kill(Fate::Broken);
        }
        match &mut self.stage {
            Stage::Starting { until } | Stage::Adopting { until } if *until <= now => {
                *until = now + START_LIMIT;
                self.kill(Fate::NotReady);
            }
            Stage::Spare { until } if *until <= now => {
                *until = now + SPARE_LIMIT;
                self.kill(Fate::Unused);
            }
            Stage::Running(running) => {
                if is_due(&running.kill_at) {
                    running.kill_at = None;
                    let cause = running.cause.unwrap_or(EndReason::Timeout);
                    self.kill(Fate::Stopped(cause));
                } else if is_due(&running.deadline) {
                    running.deadline = None;
                    let kill_after = running.kill_after;
                    self.interrupt(EndReason::Timeout, Some(kill_after));
                }
            }
            _ => {}
        }
    }

    fn take_orders(&mut self) {
        let orders = std::mem::take(&mut self.context.state_guard().orders);
        for order in orders {
            match order {
                Order::Interrupt {
                    execution,
                    cause,
                    kill_after,
                } => {
                    if let Stage::Running(running) = &self.stage
                        && Arc::ptr_eq(&running.execution, &execution)
                    {
                        self.interrupt(cause, kill_after);
                    }
                }
                Order::Answer { k, value } => {
                    // The code may have ended without it.
                    if matches!(self.stage, Stage::Running(_)) {
                        frame::input_reply(k, value.as_deref(), &mut self.outgoing);
                    }
                }
                Order::Adopt => self.adopt(),
                Order::Restart => {
                    // Looked for again when this interpreter has ended.
                    self.context.state_guard().orders.push(Order::Restart);
                    if self.fate.is_none() {
                        self.kill(Fate::Restarted);
                    }
                }
                Order::Delete => self.kill(Fate::Deleted),
            }
        }
    }

    fn adopt(&mut self) {
        // It was killed meanwhile, or has not been ready: that is found out by its end, and by `ready`.
        if let Stage::Spare { .. } = self.stage
            && let Some(spec) = self.context.spec()
        {
            let directory = Some(self.context.directory());
            frame::adopt(directory.as_deref(), &spec.environment, &mut self.outgoing);
            self.stage = Stage::Adopting {
                until: Instant::now() + START_LIMIT,
            };
        }
    }

    /// Hands out the next execution.
    fn begin_next(&mut self) {
        if self.fate.is_some() || self.closed.is_some() {
            return;
        }
        let (execution, count, generation) = {
            let mut state = self.context.state_guard();
            let Some(execution) = state.queue.pop_front() else {
                return;
            };
            state.running = Some(Arc::clone(&execution));
            state.count += 1;
            (execution, state.count, state.generation)
        };
        // What came before is nobody's.
        self.read_available();
        self.output = Output::of(self.pump.process());
        let process = Arc::clone(self.process());
        let spec = lock(&execution.spec).take();
        let spec = spec.unwrap_or_else(|| ExecutionSpec::new(String::new()));
        execution.begin(
            count,
            &process,
            Event::Start(Start {
                count,
                generation,
                is_fresh: count == 1,
                pid: process.pid,
                offsets: Stream::ALL.map(|stream| process.written(stream)),
            }),
        );
        self.output.execution = Some(Arc::clone(&execution));
        self.output.left = spec.max_output;
        let run = Run {
            code: &spec.code,
            count,
            stdin: spec.stdin.as_deref(),
            asks: spec.asks,
            environment: &spec.environment,
            sends_values: spec.sends_values,
            is_signalled: std::mem::take(&mut self.is_signalled),
        };
        frame::run(self.wire, &run, &mut self.outgoing);
        self.allowed = self.outgoing.len() + MAX_ANSWERS;
        let started = Instant::now();
        self.stage = Stage::Running(Running {
            execution,
            started,
            count,
            asks: spec.asks,
            kill_after: spec.kill_after,
            deadline: spec
                .timeout
                .and_then(|timeout| started.checked_add(timeout)),
            kill_at: None,
            has_begun: false,
            cause: None,
            has_result: false,
        });
    }

    /// Sends what the bridge takes.
    fn flush(&mut self) {
        while self.sent < self.outgoing.len() && self.closed.is_none() {
            match self.socket.write(&self.outgoing[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.closed = Some(Instant::now()),
            }
        }
        if self.outgoing.is_empty() {
            return;
        }
        if let Stage::Running(running) = &self.stage {
            running.execution.release_code();
        }
        self.sent = 0;
        self.outgoing.clear();
        self.outgoing.shrink_to(MAX_ANSWERS);
        self.allowed = MAX_ANSWERS;
    }

    /// Reads the socket and handles what has arrived whole.
    fn receive(&mut self) {
        let mut turn = 0;
        while turn < TURN_BYTES && self.closed.is_none() && self.fate != Some(Fate::Broken) {
            let length = self.incoming.len();
            let missing = frame::announced(self.wire, &self.incoming).saturating_sub(length);
            let room = missing.clamp(READ_BYTES, TURN_BYTES);
            if self.incoming_charge.set(length + room).is_err() {
                return self.break_off("its message is larger than this workspace may hold");
            }
            self.incoming.resize(length + room, 0);
            let read = self.socket.read(&mut self.incoming[length..]);
            self.incoming
                .truncate(length + read.as_ref().copied().unwrap_or(0));
            match read {
                Ok(0) => self.closed = Some(Instant::now()),
                Ok(count) => {
                    turn += count;
                    self.handle_messages();
                    self.flush();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.closed = Some(Instant::now()),
            }
        }
        if self.incoming.is_empty() {
            self.incoming = Vec::new();
            let _ = self.incoming_charge.set(0);
        }
    }

    fn handle_messages(&mut self) {
        let mut handled = 0;
        loop {
            let rest = &self.incoming[handled..];
            let message = match frame::whole(self.wire, rest) {
                Ok(None) => break,
                Ok(Some(length)) => {
                    handled += length;
                    frame::parse(self.wire, &rest[..length])
                }
                Err(error) => Err(error),
            };
            match message {
                Ok(message) => self.handle(message),
                Err(error) => return self.break_off(&error.to_string()),
            }
        }
        self.incoming.drain(..handled);
    }

    /// Gives up on an interpreter that does not keep to the protocol.
    fn break_off(&mut self, why: &str) {
        self.incoming = Vec::new();
        let _ = self.incoming_charge.set(0);
        crate::logging::debug(format_args!("context {}: {why}", self.context.id()));
        self.kill(Fate::Broken);
    }

    fn handle(&mut self, message: Incoming) {
        match message {
            Incoming::Ready { backend, version } => self.become_ready(backend, version),
            Incoming::Failed { error } => {
                let kind = match &*self.context.backend {
                    "auto" | "plain" => Kind::KernelFailed,
                    _ => Kind::NoBackend,
                };
                self.failure.get_or_insert_with(|| Error::new(kind, error));
            }
            Incoming::Adopted { error } => self.become_adopted(error),
            Incoming::Begun => {
                if let Stage::Running(running) = &mut self.stage
                    && !std::mem::replace(&mut running.has_begun, true)
                    && running.cause.is_some()
                {
                    self.signal();
                }
            }
            Incoming::Bundle { mut bundle, n } => {
                if let Stage::Running(running) = &mut self.stage {
                    // One result is all that there is.
                    bundle.is_main &= !std::mem::replace(&mut running.has_result, bundle.is_main);
                    running.has_result |= bundle.is_main;
                    running.execution.append(Event::Bundle(Arc::new(bundle)));
                }
                frame::synced(n, &mut self.outgoing);
            }
            Incoming::Clear { wait, n } => {
                if let Stage::Running(running) = &self.stage {
                    running.execution.append(Event::Clear { wait });
                }
                frame::synced(n, &mut self.outgoing);
            }
            Incoming::Sync { n } => {
                self.read_available();
                frame::synced(n, &mut self.outgoing);
            }
            Incoming::Input {
                k,
                prompt,
                password,
            } => match &self.stage {
                Stage::Running(running) if running.asks => {
                    self.context.state_guard().asked = Some(k);
                    running.execution.append(Event::Input { prompt, password });
                }
                _ => frame::input_reply(k, None, &mut self.outgoing),
            },
            Incoming::Done {
                error,
                exit_code,
                is_interrupted,
            } => {
                if self.wire == Wire::Lines {
                    self.read_available();
                }
                self.end_by_code(error, exit_code, is_interrupted);
            }
        }
    }

    fn become_ready(&mut self, backend: String, version: String) {
        if !matches!(self.stage, Stage::Starting { .. }) {
            return;
        }
        let is_spare = self.is_spare;
        self.context.change(|state| {
            state.told = Some((backend, version));
            if !is_spare && matches!(state.phase, Phase::Starting) {
                state.phase = Phase::Ready;
            }
        });
        self.stage = if is_spare {
            Stage::Spare {
                until: Instant::now() + SPARE_LIMIT,
            }
        } else {
            Stage::Idle
        };
    }

    fn become_adopted(&mut self, error: Option<String>) {
        if !matches!(self.stage, Stage::Adopting { .. }) {
            return;
        }
        if let Some(error) = error {
            self.failure = Some(Error::new(Kind::BadDirectory, error));
            return self.kill(Fate::NotReady);
        }
        self.stage = Stage::Idle;
        self.context.change(|state| {
            if matches!(state.phase, Phase::Starting) {
                state.phase = Phase::Ready;
            }
        });
    }

    fn read_available(&mut self) {
        let output = &mut self.output;
        let mut deliver = |stream, offset, data: &[u8]| output.add(stream, offset, data);
        self.pump.read_available(&mut self.buffer, &mut deliver);
    }

    /// Sends SIGINT for the execution that runs.
    fn interrupt(&mut self, cause: EndReason, kill_after: Option<Duration>) {
        let now = Instant::now();
        if let Stage::Running(running) = &mut self.stage {
            running.execution.disregard_clients();
            if running.cause.is_none() || cause == EndReason::Timeout {
                running.cause = Some(cause);
            }
            let kill_at = kill_after.and_then(|after| now.checked_add(after));
            running.kill_at = running.kill_at.into_iter().chain(kill_at).min();
        }
        match self.signalled.map(|at| at + SIGNAL_PAUSE) {
            Some(at) if at > now => self.signal_at = Some(at),
            _ => self.signal(),
        }
    }

    fn signal(&mut self) {
        self.signal_at = None;
        // The execution may have ended while the signal was due.
        if matches!(&self.stage, Stage::Running(running) if running.has_begun) {
            self.signalled = Some(Instant::now());
            self.is_signalled = true;
            // It may have ended.
            let _ = self.process().signal(libc::SIGINT);
        }
    }

    /// Kills the interpreter with everything that it has started.
    fn kill(&mut self, fate: Fate) {
        self.fate.get_or_insert(fate);
        let reason = match fate {
            Fate::Deleted => Reason::Deleted,
            Fate::Stopped(EndReason::Timeout) => Reason::Timeout,
            _ => Reason::Killed,
        };
        self.process().kill_tree(reason);
        self.pump.expect_end();
    }

    /// Ends the execution as the bridge says.
    fn end_by_code(
        &mut self,
        error: Option<CodeError>,
        exit_code: Option<u8>,
        is_interrupted: bool,
    ) {
        let Stage::Running(running) = &self.stage else {
            return;
        };
        let reason = match (running.cause, &error) {
            (Some(EndReason::Timeout), _) => EndReason::Timeout,
            (Some(cause), Some(_)) => cause,
            (Some(cause), None) if is_interrupted => cause,
            (None, None) if is_interrupted => EndReason::Interrupted,
            (None, Some(_)) => EndReason::Error,
            (_, None) => EndReason::Completed,
        };
        let ending = exit_code.map(|code| Ending::Exited(code.into()));
        self.end_running(reason, true, ending, error);
        self.stage = Stage::Idle;
        if self.context.is_stateless() {
            self.kill(Fate::Deleted);
        }
    }

    fn end_running(
        &mut self,
        reason: EndReason,
        is_kept: bool,
        ending: Option<Ending>,
        error: Option<CodeError>,
    ) {
        let Stage::Running(running) = &self.stage else {
            return;
        };
        self.output.finish();
        let execution = Arc::clone(&running.execution);
        if let Some(error) = error {
            execution.append(Event::Error(Arc::new(error)));
        }
        let end = End {
            reason,
            is_kept,
            count: running.count,
            ending,
            has_timed_out: running.cause == Some(EndReason::Timeout),
            duration: running.started.elapsed(),
        };
        {
            let mut state = self.context.state_guard();
            state.running = None;
            state.asked = None;
        }
        self.signal_at = None;
        count_execution(running.started);
        // Whoever looks after the end of a stateless execution finds no context of it.
        if self.context.is_stateless()
            && let Some(home) = self.context.home.upgrade()
        {
            home.forget_ended(&self.context);
        }
        if execution.end(end) {
            self.context.site.activity.end();
        }
    }

    /// The interpreter has ended.
    fn finish(mut self, exit: &Exit) {
        let why = self.why(exit);
        let reason = match (self.fate, exit.reason) {
            (Some(Fate::Stopped(reason)), _) => reason,
            (Some(Fate::Restarted), _) => EndReason::Restarted,
            (Some(Fate::Deleted), _) | (None, Reason::Deleted) => EndReason::Deleted,
            (None, Reason::OutOfMemory) => EndReason::OutOfMemory,
            (None, Reason::MemoryLimit) => EndReason::MemoryLimit,
            _ => EndReason::Died,
        };
        let error = match self.stage {
            Stage::Starting { .. } | Stage::Spare { .. } | Stage::Adopting { .. } => {
                let failure = self.failure.take();
                let is_ending = self.context.site.processes.is_closed();
                let ending =
                    is_ending.then(|| Error::new(Kind::ShuttingDown, "the sandbox is ending"));
                // The end of the sandbox ends whatever starts in it, in any of many ways.
                Some(ending.or(failure).unwrap_or_else(|| self.not_ready(&why)))
            }
            Stage::Idle | Stage::Running(_) => None,
        };
        // Nobody is told of the end before nothing of it is left.
        self.pump.close_outputs();
        self.process().kill_left_behind();
        if matches!(self.stage, Stage::Running(_)) {
            // The state is lost for whoever looks at the context after the end.
            self.context.change(|state| {
                if !matches!(state.phase, Phase::Dead(..)) && !state.is_restarting() {
                    state.phase = Phase::Dead(why.clone(), None);
                }
            });
            self.end_running(reason, false, Some(exit.ending), None);
        }
        fail(&self.context, &why, error);
        if let Some(home) = self.context.home.upgrade() {
            home.forget_ended(&self.context);
        }
    }

    /// Why it has ended, in a few words.
    fn why(&self, exit: &Exit) -> String {
        match (self.fate, exit.reason, exit.ending) {
            (Some(Fate::Stopped(EndReason::Timeout)), ..) => {
                "its time was up, and the code went on after SIGINT".to_owned()
            }
            (Some(Fate::Stopped(_)), ..) => "the code went on after it was interrupted".to_owned(),
            (Some(Fate::Restarted), ..) => "it was restarted".to_owned(),
            (Some(Fate::Deleted), ..) | (None, Reason::Deleted, _) => "it was deleted".to_owned(),
            (Some(Fate::Unused), ..) => "nobody needed it".to_owned(),
            (Some(Fate::NotReady), ..) => "it was not ready in time".to_owned(),
            (Some(Fate::Broken), ..) => "its bridge was broken by the code".to_owned(),
            (None, Reason::OutOfMemory, _) => "the machine ran out of memory".to_owned(),
            (None, Reason::MemoryLimit, _) => {
                "the sandbox was above its limit on memory".to_owned()
            }
            (None, _, Ending::Exited(status)) => {
                format!("the interpreter exited with status {status}")
            }
            (None, _, Ending::Signaled(signal)) => {
                format!("signal {signal} ended the interpreter")
            }
            (None, _, Ending::Unknown) => "the interpreter ended".to_owned(),
        }
    }

    /// An interpreter that never was ready, with its last words.
    fn not_ready(&self, why: &str) -> Error {
        let words = self.process().last_words(LAST_WORDS);
        let language = self.context.language.name();
        let text = format!("cannot start {language}: {why}; it said: {words}");
        Error::new(Kind::KernelFailed, text)
    }
}

/// Says in a sentence that there is no such interpreter.
fn explained(context: &Context, error: Error) -> Error {
    if error.kind() != Kind::ProgramNotFound {
        return error;
    }
    let (name, program) = (context.language.name(), context.language.program());
    Error::new(
        Kind::ProgramNotFound,
        format!("cannot start {name}: there is no {program} in PATH"),
    )
}

impl Output {
    fn of(process: &Arc<Process>) -> Self {
        Self {
            execution: None,
            process: Arc::clone(process),
            carried: Default::default(),
            left: 0,
            dropped: [0; 2],
        }
    }

    /// Adds what was just appended to the log.
    fn add(&mut self, stream: Stream, offset: u64, data: &[u8]) {
        let Some(execution) = &self.execution else {
            return;
        };
        let position = self.process.position() - data.len() as u64;
        let most = usize::try_from(self.left).unwrap_or(usize::MAX);
        let (data, beyond) = data.split_at(data.len().min(most));
        self.left -= data.len() as u64;
        self.dropped[stream.index()] += beyond.len() as u64;
        let carried = &mut self.carried[stream.index()];
        let (first_offset, first_position) = if carried.2.is_empty() {
            (offset, position)
        } else {
            (carried.0, carried.1)
        };
        let joined;
        let data = if carried.2.is_empty() {
            data
        } else {
            joined = [&carried.2, data].concat();
            &joined
        };
        let (whole, cut) = data.split_at(data.len() - cut_character(data));
        if !whole.is_empty() {
            execution.append_output(stream, first_offset, first_position, whole);
        }
        // A character that begins before these bytes is all that there is.
        let before = (data.len() - cut.len()) as u64;
        *carried = match (cut, whole) {
            ([], _) => (0, 0, Vec::new()),
            (cut, []) => (first_offset, first_position, cut.to_vec()),
            (cut, _) => {
                let before = before - carried.2.len() as u64;
                (offset + before, position + before, cut.to_vec())
            }
        };
    }

    /// Releases what is left at the end of the execution, and says what was thrown away.
    fn finish(&mut self) {
        let Some(execution) = self.execution.take() else {
            return;
        };
        for stream in Stream::ALL {
            let (offset, position, carried) = std::mem::take(&mut self.carried[stream.index()]);
            if !carried.is_empty() {
                execution.append_output(stream, offset, position, &carried);
            }
            let bytes = std::mem::take(&mut self.dropped[stream.index()]);
            if bytes > 0 {
                execution.append(Event::Dropped { stream, bytes });
            }
        }
    }
}
