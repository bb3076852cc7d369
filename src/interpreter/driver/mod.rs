//! The thread that drives one interpreter: it starts it, hands out executions, reads what comes back, and ends it.
//!
//! It alone reads the socket and the two pipes, and appends what it reads to the events of the execution before it
//! reads again. The bridge sees to it that only one of the three holds something new whenever the order matters
//! (`PROTOCOL.md`, "The sync rule"). It alone sends signals and executions, so an interrupt is sent before the next
//! execution, or not at all. Its pidfd reports the end of the interpreter; the end of the socket says little,
//! because any child may have a copy.

mod ending;
mod messages;
mod output;
mod received;

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::context::{Context, CountedInterpreter, Phase, Request, START_LIMIT};
use super::event::{EndReason, Event, Start};
use super::execution::{Execution, ExecutionSpec, ExecutionState};
use super::frame::{self, Run, Wire};
use crate::error::{Error, Result};
use crate::fault;
use crate::limits::ledger::{Charge, Item};
use crate::limits::work_clock::WorkClock;
use crate::process::ring::Stream;
use crate::process::{Buffer, Process, Pump, Reason};
use crate::sys::{Events, PollEntry, poll, refuse_descriptors};
use crate::threads::lock::lock;
use crate::threads::notify::Listener;
use crate::threads::panics::contain;
use crate::threads::priority::BackgroundSteps;
use ending::explained;
use output::Output;
use received::Received;

/// How long a process may run whose bridge has gone. One that is dying tells its own status.
const CLOSED_LIMIT: Duration = Duration::from_secs(1);

/// How long a spare is kept.
const SPARE_LIMIT: Duration = Duration::from_secs(600);

/// What may be sent to a bridge, besides an execution, before it reads it.
const MAX_ANSWERS: usize = 64 * 1024;

/// After a small read of output there is no other for so long: code that prints line by line would wake this thread
/// and its client's for each of them, and wait for the processor itself.
const READ_PAUSE: Duration = Duration::from_millis(1);

/// What a read of output gives that keeps up with the code.
const LARGE_READ: u64 = 16 * 1024;

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

struct Driver {
    context: Arc<Context>,
    pump: Pump,
    socket: UnixStream,
    wire: Wire,
    received: Received,
    /// What the bridge has not read.
    outgoing: Vec<u8>,
    sent: usize,
    /// For what of it clients have sent, but for code.
    sent_charges: Vec<Charge>,
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
    /// The work for messages.
    steps: BackgroundSteps,
    /// Until when no messages are read, because the tenant's others come before.
    unread_until: Option<Instant>,
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
            received: Received::new(site.ledger.charge(Item::Executions, 0)?),
            buffer: Buffer::of(&site.ledger),
            listener: context.notifier.listen(),
            context: Arc::clone(context),
            pump,
            socket,
            wire,
            allowed: outgoing.len() + MAX_ANSWERS,
            outgoing,
            sent: 0,
            sent_charges: Vec::new(),
            output: Output::of(&process),
            stage: Stage::Starting {
                until: site.activity.clock().now() + START_LIMIT,
            },
            is_spare,
            paused_until: None,
            steps: BackgroundSteps::of_this_thread(&site.background),
            unread_until: None,
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

    /// The time of the workspace, which all of its timers are in but those of its pump.
    fn clock(&self) -> &WorkClock {
        self.context.site.activity.clock()
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
            self.unread_until.take_if(|until| *until <= Instant::now());
            let [notifier, socket, ended, outputs @ ..] = self.poll(is_reading);
            if notifier.any() {
                self.listener.clear();
            }
            if matches!(self.stage, Stage::Running(_)) {
                fault::point("execution");
            }
            // There is no more of it, and it may say how the code has ended.
            let is_last = ended.any() && self.unread_until.take().is_some();
            if is_reading && (is_last || socket.any() && self.unread_until.is_none()) {
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
        let takes_messages = is_reading && unsent < self.allowed && self.unread_until.is_none();
        let interest = Events::NONE
            .and_if(takes_messages, Events::READABLE)
            .and_if(unsent > 0, Events::WRITABLE);
        // Its end would be reported whatever is asked for, and is not looked at before it is read.
        let has_interest = takes_messages || unsent > 0;
        let socket = self.closed.is_none() && has_interest;
        let pause = self.paused_until.filter(|_| is_reading);
        let pause = pause.map(|until| until.saturating_duration_since(Instant::now()));
        let pause = pause.filter(|pause| !pause.is_zero());
        let rest = self.pump.rests_until().filter(|_| is_reading);
        let rest = rest.map(|until| until.saturating_duration_since(Instant::now()));
        let has_outputs = is_reading && pause.is_none() && rest.is_none();
        let output = |stream| {
            let pipe = self.pump.output(stream).filter(|_| has_outputs);
            PollEntry::new(pipe, Events::READABLE)
        };
        let mut entries = [
            PollEntry::new(self.listener.descriptor(), Events::READABLE),
            PollEntry::new(socket.then(|| self.socket.as_fd()), interest),
            PollEntry::new(self.pump.awaited_pidfd(), Events::READABLE),
            output(Stream::Stdout),
            output(Stream::Stderr),
        ];
        let interval = self.listener.interval();
        let timer = self.timer();
        let limit = timer.map(|at| at.saturating_duration_since(Instant::now()));
        let unread = self
            .unread_until
            .map(|until| until.saturating_duration_since(Instant::now()));
        let limits = [limit, interval, pause, unread, rest];
        poll(&mut entries, limits.into_iter().flatten().min());
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
        let others = [self.signal_at, closed.filter(|_| self.fate.is_none())];
        let own = stage.into_iter().chain(others).flatten().min();
        let own = own.map(|at| self.clock().wake_at(at));
        own.into_iter().chain(self.pump.timer()).min()
    }

    fn check_timers(&mut self) {
        let now = self.clock().now();
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
                Request::Interrupt {
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
                Request::Answer { k, value, charge } => {
                    self.sent_charges.push(charge);
                    // The code may have ended without it.
                    if matches!(self.stage, Stage::Running(_)) {
                        frame::input_reply(k, value.as_deref(), &mut self.outgoing);
                    }
                }
                Request::Adopt(charge) => {
                    self.sent_charges.push(charge);
                    self.adopt();
                }
                Request::Restart => {
                    // Looked for again when this interpreter has ended.
                    self.context.state_guard().orders.push(Request::Restart);
                    if self.fate.is_none() {
                        self.kill(Fate::Restarted);
                    }
                }
                Request::Delete => self.kill(Fate::Deleted),
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
                until: self.clock().now() + START_LIMIT,
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
        let (started, now) = (Instant::now(), self.clock().now());
        self.stage = Stage::Running(Running {
            execution,
            started,
            count,
            asks: spec.asks,
            kill_after: spec.kill_after,
            deadline: spec.timeout.and_then(|timeout| now.checked_add(timeout)),
            kill_at: None,
            has_begun: false,
            cause: None,
            has_result: false,
        });
    }

    fn read_available(&mut self) {
        let output = &mut self.output;
        let mut deliver = |stream, offset, data: &[u8]| output.add(stream, offset, data);
        self.pump.read_available(&mut self.buffer, &mut deliver);
    }
}
