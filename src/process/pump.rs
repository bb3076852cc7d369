//! Moves a command's bytes: its output from the pipes or the terminal into the log (and to the client that
//! waits), and its given input from memory into its stdin.
//!
//! A pump always has one driver. A foreground command is driven by [`Pump::run_foreground`] on its
//! client's thread: one poll over the client, the outputs, the input and the pidfd. No data is handed
//! between threads, and a slow client slows the command down, because its output is not read. The
//! driver of the workspace drives all other pumps through the same few methods.
//!
//! Complete output needs no timer: what the main process wrote is in the pipe before waitid returns. So when the
//! process is reaped, the pump looks how many bytes each pipe holds and moves that many (at the client's pace, if there
//! is one). Then `exit` may follow, whatever a descendant still does with the pipe. After that, the pump still reads
//! the pipes to their end, so that such a descendant never gets SIGPIPE. It closes them earlier only when the workspace
//! ends: another sandbox may have been given the other end, and could keep it open for ever.
//!
//! A terminal works in the same way; its only output is what its master reads. A terminal does not tell how much it
//! holds, so the pump reads it until it is empty, and at most [`TERMINAL_HOLDS`] bytes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::children::Command;
use super::pace::{self, PipePace};
use super::process::{Exit, OnDisconnect, Process, Reason, StdinSlot, Subscriber};
use super::read_size::ReadSize;
use super::ring::Stream;
use super::shares::OpenShare;
use super::stdio::Outputs;
use crate::client::{Client, Disconnected, KeepAlive};
use crate::fault;
use crate::limits::ledger::{Charge, Ledger};
use crate::limits::work_clock::WorkClock;
use crate::sys::{self, Events, PollEntry, poll};

/// What a pump reports to.
pub(super) trait PumpOwner: Send + Sync {
    /// Drives a pump that has lost its driver.
    fn adopt(&self, pump: Pump);
    /// A process has ended and its log is complete.
    fn ended(&self, process: &Arc<Process>);
    /// Whether the workspace has ended, so that nobody wants what still arrives from ended processes.
    fn is_released(&self) -> bool;
    /// The time of the workspace, which deadlines are in.
    fn clock(&self) -> &WorkClock;
}

/// The buffer that output is read into. It grows for a command that writes much.
pub struct Buffer {
    bytes: Vec<u8>,
    read_size: ReadSize,
}

impl Buffer {
    /// A buffer for output that goes to a client of the tenant with this ledger.
    pub fn of(ledger: &Arc<Ledger>) -> Self {
        Self::new(ReadSize::new(ledger))
    }

    pub(super) fn new(read_size: ReadSize) -> Self {
        let bytes = Vec::new();
        Self { bytes, read_size }
    }

    fn space(&mut self) -> &mut [u8] {
        if self.bytes.is_empty() {
            self.bytes = vec![0; self.read_size.bytes()];
        }
        &mut self.bytes
    }

    /// Gives its memory back, and is small when it is used again.
    pub(super) fn release(&mut self) {
        *self = Self::new(ReadSize::uncharged());
    }

    pub(super) fn is_held(&self) -> bool {
        !self.bytes.is_empty()
    }
}

/// The server's ends of a process's standard streams, and what is still to be done for the process.
pub struct Pump {
    process: Arc<Process>,
    owner: Arc<dyn PumpOwner>,
    /// Where each stream is read; `None` after its end.
    pub(super) outputs: Outputs,
    /// `None` without a terminal.
    terminal: Option<HeldTerminal>,
    /// `None` when nothing is left to write.
    pub(super) input: Option<GivenInput>,
    /// The writing ends of its stdin since its end. Only the driver of the workspace closes them, because that can take as
    /// long as a descendant likes.
    unused: [Option<Arc<OwnedFd>>; 2],
    /// When the process is killed, by the clock of the workspace; `None` without a timeout.
    pub(super) deadline: Option<Instant>,
    /// Set while the process should have ended but cannot be reaped.
    recheck: Option<Recheck>,
    /// When the driver of the workspace looks at it next. It changes with the clock of the workspace.
    pub(super) scheduled: Option<Instant>,
    /// Whether the process has ended but could not be reaped: its pidfd stays readable, so polling it is useless.
    is_held: bool,
    phase: Phase,
    /// The tenant's share of commands whose output is open: descendants may keep it open after the end.
    share: Option<OpenShare>,
    pace: PipePace,
    /// Whether the driver of the workspace leaves its pipes out.
    pub(super) is_resting: bool,
}

/// What a pump holds of a terminal.
pub(super) struct HeldTerminal {
    /// Open until the process is reaped, so that a program may close all its descriptors and open the
    /// terminal again: once nobody has the terminal open, reading its master reports the end.
    pub(super) terminal: Option<Arc<OwnedFd>>,
    pub(super) _share: OpenShare,
}

/// More bytes than a terminal holds for its master. So what a process wrote before its end is among the next
/// `TERMINAL_HOLDS` bytes, even if other processes go on writing.
const TERMINAL_HOLDS: usize = 128 * 1024;

enum Phase {
    /// Not reaped. The descriptor is the pidfd.
    Running(Arc<OwnedFd>),
    /// Reaped. The pipes still hold this many bytes that the process wrote to each stream, and a terminal
    /// at most this many.
    Draining([usize; 2]),
    /// The end of the process was published.
    Over,
}

/// When to look again, at growing intervals, at a process that should have ended but cannot be reaped.
///
/// A traced process is reaped by its tracer first (ptrace(2)). If the tracer does not wait for it, the pidfd is
/// readable but there is nothing to reap. If only another thread of it is traced, the pidfd is not even readable.
#[derive(Clone, Copy)]
struct Recheck {
    at: Instant,
    interval: Duration,
}

impl Recheck {
    const FIRST: Duration = Duration::from_millis(1);
    /// The longest interval; also how long tracers get before they are killed.
    const LAST: Duration = Duration::from_millis(128);

    fn after(interval: Duration) -> Self {
        let interval = interval.min(Self::LAST);
        let at = Instant::now() + interval;
        Self { at, interval }
    }
}

/// Input that was given with the command and is not written yet.
pub(super) struct GivenInput {
    pub(super) pipe: Arc<OwnedFd>,
    pub(super) bytes: Vec<u8>,
    pub(super) written: usize,
    pub(super) _charge: Charge,
}

impl Pump {
    /// Takes over a process that was just started. Its driver kills it at `deadline`, by the clock of the workspace.
    pub(super) fn new(
        process: Arc<Process>,
        owner: Arc<dyn PumpOwner>,
        outputs: Outputs,
        terminal: Option<HeldTerminal>,
        input: Option<GivenInput>,
        deadline: Option<Instant>,
        share: OpenShare,
    ) -> Self {
        let phase = process
            .pidfd()
            .map_or(Phase::Draining([0, 0]), Phase::Running);
        let pace = PipePace::of(process.ledger());
        Self {
            process,
            owner,
            outputs,
            terminal,
            input,
            unused: [None, None],
            deadline,
            recheck: None,
            scheduled: None,
            is_held: false,
            phase,
            share: Some(share),
            pace,
            is_resting: false,
        }
    }

    /// The process whose bytes this pump moves.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// Where a stream is read; `None` after its end.
    pub fn output(&self, stream: Stream) -> Option<BorrowedFd<'_>> {
        self.outputs[stream.index()].as_ref().map(|end| end.as_fd())
    }

    /// The pipe for the rest of the given input; `None` when nothing is left to write.
    pub(super) fn input(&self) -> Option<BorrowedFd<'_>> {
        self.input.as_ref().map(|input| input.pipe.as_fd())
    }

    /// Readable when the process has ended; `None` once it was reaped.
    pub(super) fn pidfd(&self) -> Option<&Arc<OwnedFd>> {
        match &self.phase {
            Phase::Running(pidfd) => Some(pidfd),
            Phase::Draining(_) | Phase::Over => None,
        }
    }

    /// The pidfd, while it can still report the end: not once the process was reaped, or has ended but cannot be
    /// reaped.
    pub fn awaited_pidfd(&self) -> Option<BorrowedFd<'_>> {
        let pidfd = self.pidfd().filter(|_| !self.is_held);
        pidfd.map(|pidfd| pidfd.as_fd())
    }

    /// Bytes that the ended process wrote to a stream and that were not read yet.
    fn left(&self, stream: Stream) -> usize {
        match &self.phase {
            Phase::Draining(left) => left[stream.index()],
            Phase::Running(_) | Phase::Over => 0,
        }
    }

    /// Whether the end was published. Descendants may still hold the pipes.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    /// Whether the process and its whole workspace have ended, and only others keep the outputs open.
    pub(super) fn is_left_over(&self) -> bool {
        self.is_over() && self.owner.is_released()
    }

    /// Whether nothing is left to do.
    pub(super) fn is_done(&self) -> bool {
        let mut open = self.outputs.iter().chain(&self.unused);
        self.is_over() && open.all(Option::is_none)
    }

    /// Reads an output once; appends the data to the log and passes it to `deliver`. Returns true at the end of the
    /// stream; then the caller must close it.
    pub(super) fn read(
        &mut self,
        stream: Stream,
        buffer: &mut Buffer,
        deliver: &mut dyn FnMut(Stream, u64, &[u8]),
    ) -> bool {
        let Some(pipe) = &self.outputs[stream.index()] else {
            return false;
        };
        let bytes = buffer.space();
        self.pace.begin();
        let result = on_pipe(&self.process, || nix::unistd::read(pipe, bytes));
        self.pace.charge(pace::CALL);
        let (count, is_end) = match result {
            Err(Errno::EINTR) => return false,
            // The pipe was readable, but a command can open its own output and read it too. A terminal is
            // empty, but a process still has it open.
            Err(Errno::EAGAIN) => (None, false),
            // A master gives EIO once nobody has the terminal open.
            Ok(0) | Err(_) => (None, true),
            Ok(count) => (Some(count), false),
        };
        if let Some(count) = count {
            let data = &buffer.bytes[..count];
            let offset = self.process.append(stream, data);
            deliver(stream, offset, data);
            if buffer.read_size.note(count) {
                buffer.bytes = Vec::new();
            }
            self.pace.charge(pace::DELIVERY);
        }
        if let Phase::Draining(left) = &mut self.phase {
            let left = &mut left[stream.index()];
            *left = count.map_or(0, |count| left.saturating_sub(count));
        }
        is_end
    }

    /// Reads an output once, and closes it at its end.
    pub fn read_or_close(
        &mut self,
        stream: Stream,
        buffer: &mut Buffer,
        deliver: &mut dyn FnMut(Stream, u64, &[u8]),
    ) {
        if self.read(stream, buffer, deliver) {
            self.outputs[stream.index()] = None;
        }
    }

    /// Reads what the outputs hold now, and no more, so that a flood of output does not hold the caller up.
    pub fn read_available(
        &mut self,
        buffer: &mut Buffer,
        deliver: &mut dyn FnMut(Stream, u64, &[u8]),
    ) {
        for stream in Stream::ALL {
            let held = self
                .output(stream)
                .and_then(|pipe| on_pipe(&self.process, || sys::readable_bytes(pipe)).ok());
            let end = self.process.written(stream) + held.unwrap_or(0) as u64;
            let mut before = None;
            // Stops when a read gets nothing: another process that has the pipe open may have read the rest.
            while self.process.written(stream) < end && before != Some(self.process.written(stream))
            {
                before = Some(self.process.written(stream));
                self.read_or_close(stream, buffer, deliver);
            }
        }
    }

    /// Writes as much of the given input as the pipe takes. Returns true when nothing is left to write;
    /// then the caller must close the input.
    pub(super) fn feed(&mut self) -> bool {
        let Some(input) = &mut self.input else {
            return false;
        };
        let rest = &input.bytes[input.written..];
        self.pace.begin();
        let result = on_pipe(&self.process, || nix::unistd::write(&input.pipe, rest));
        self.pace.charge(pace::CALL);
        match result {
            Ok(count) => input.written += count,
            Err(Errno::EINTR | Errno::EAGAIN) => return false,
            // The process has closed its stdin, as it may, without reading all of it.
            Err(_) => input.written = input.bytes.len(),
        }
        input.written == input.bytes.len()
    }

    /// Whether the deadline has passed. Clears it, so that the answer is true only once.
    pub(super) fn take_due(&mut self) -> bool {
        if self.deadline.is_none() {
            return false;
        }
        let now = self.owner.clock().now();
        let is_due = self.deadline.take_if(|deadline| *deadline <= now).is_some();
        if is_due {
            self.expect_end();
        }
        is_due
    }

    /// The interval that has passed since the last look at a process that should have ended; `None` if it is not time
    /// to look again.
    pub(super) fn take_recheck(&mut self, now: Instant) -> Option<Duration> {
        let Recheck { interval, .. } = self.recheck.filter(|recheck| recheck.at <= now)?;
        self.recheck = Some(Recheck::after(interval * 2));
        Some(interval)
    }

    /// Whether tracers have had enough time to wait for the process, after a recheck with this interval.
    pub(super) fn is_overdue(&self, interval: Duration) -> bool {
        self.pidfd().is_some() && interval >= Recheck::LAST
    }

    /// When to ask again whether its pipes rest, because the tenant's calls on pipes take too much of the processor; `None`
    /// if they do not. What the process left in them at its end is not waited for.
    pub fn rests_until(&self) -> Option<Instant> {
        let is_draining = matches!(self.phase, Phase::Draining(_));
        self.pace.rests_until().filter(|_| !is_draining)
    }

    /// When the deadline passes, the process must be looked at again, or its pipes may have rested, whichever is first.
    pub fn timer(&self) -> Option<Instant> {
        let recheck = self.recheck.map(|recheck| recheck.at);
        let deadline = self.deadline.map(|at| self.owner.clock().wake_at(at));
        // While the driver leaves its pipes out it must look again, also if their rest has ended just now.
        let rest = self.rests_until();
        let rest = rest.or_else(|| self.is_resting.then(Instant::now));
        [recheck, deadline, rest].into_iter().flatten().min()
    }

    /// Reaps the process if it has ended, and notes how much of its output is still in the pipes.
    fn reap(&mut self) {
        let Phase::Running(pidfd) = &self.phase else {
            return;
        };
        if self.process.reap() {
            let left = if let Some(held) = &mut self.terminal {
                held.terminal = None;
                [TERMINAL_HOLDS, 0]
            } else {
                Stream::ALL.map(|stream| {
                    let pipe = self.output(stream);
                    let bytes = |pipe| on_pipe(&self.process, || sys::readable_bytes(pipe)).ok();
                    pipe.and_then(bytes).unwrap_or(0)
                })
            };
            self.phase = Phase::Draining(left);
            self.deadline = None;
            self.recheck = None;
            self.unused[0] = self.input.take().map(|input| input.pipe);
        } else {
            let mut entries = [PollEntry::new(pidfd.as_fd(), Events::READABLE)];
            if !self.is_held && poll(&mut entries, Some(Duration::ZERO)) {
                self.is_held = true;
                self.recheck = Some(Recheck::after(Recheck::FIRST));
            }
        }
    }

    /// Publishes the end once all output of the reaped process was read.
    fn publish(&mut self) -> Option<Exit> {
        if !matches!(self.phase, Phase::Draining([0, 0])) {
            return None;
        }
        self.phase = Phase::Over;
        let published = self.process.publish();
        self.owner.ended(&self.process);
        let (exit, stdin) = published?;
        self.unused[1] = match stdin {
            StdinSlot::Open(end) => Some(end),
            StdinSlot::Closed | StdinSlot::Busy { .. } => None,
        };
        Some(exit)
    }

    /// Reaps the process if it has ended, reads its output, publishes the end and returns it.
    pub(super) fn finish(
        &mut self,
        buffer: &mut Buffer,
        deliver: &mut dyn FnMut(Stream, u64, &[u8]),
    ) -> Option<Exit> {
        self.reap();
        for stream in Stream::ALL {
            while self.left(stream) > 0 {
                self.read(stream, buffer, deliver);
            }
        }
        self.publish()
    }

    /// Like [`Pump::finish`], if the pidfd reported the end of the process (`is_told`) or it is time to look again.
    pub fn finish_if_due(
        &mut self,
        is_told: bool,
        buffer: &mut Buffer,
        deliver: &mut dyn FnMut(Stream, u64, &[u8]),
    ) -> Option<Exit> {
        let recheck = self.take_recheck(Instant::now());
        if !is_told && recheck.is_none() {
            return None;
        }
        let exit = self.finish(buffer, deliver);
        if recheck.is_some_and(|interval| self.is_overdue(interval)) {
            self.process.kill_tracers();
        }
        exit
    }

    /// Notes that the process was killed: from now on it is checked at intervals, even if the pidfd reports nothing.
    pub fn expect_end(&mut self) {
        self.recheck = Some(Recheck::after(Recheck::LAST));
    }

    /// Closes its stdin once its end was published.
    pub(super) fn close_unused(&mut self) {
        if self.is_over() {
            on_pipe(&self.process, || self.unused = [None, None]);
        }
    }

    /// Closes the outputs, so that nothing is left to do once the end was published. Processes that still write to them
    /// get SIGPIPE, and output that was not read is lost.
    pub fn close_outputs(&mut self) {
        self.outputs = [None, None];
        if let Phase::Draining(left) = &mut self.phase {
            *left = [0, 0];
        }
    }

    /// Drives the process until it ends, its client disconnects, or `until` has passed, and leaves the rest to the
    /// driver of the workspace. After `until`, the process goes on in the background.
    pub fn run_foreground(
        mut self,
        subscriber: &mut dyn Subscriber,
        on_disconnect: OnDisconnect,
        until: Option<Instant>,
    ) {
        match self.run_until_exit(subscriber, until) {
            Ok(true) => {}
            Ok(false) => self.process.leave(OnDisconnect::Keep),
            Err(Disconnected) => self.process.leave(on_disconnect),
        }
    }

    /// Returns whether the process has ended; false if `until` has passed.
    fn run_until_exit(
        &mut self,
        subscriber: &mut dyn Subscriber,
        until: Option<Instant>,
    ) -> Result<bool, Disconnected> {
        let mut buffer = Buffer::new(ReadSize::new(self.process.ledger()));
        let mut keep_alive = KeepAlive::new();
        loop {
            subscriber.client().flush()?;
            self.pace.charge(pace::DELIVERY);
            // Output is read only when the client has taken what was read before.
            let reading = subscriber.client().is_flushed();
            let wake_at = keep_alive.due_at(subscriber.client());
            let wake_at = until.map_or(wake_at, |until| until.min(wake_at));
            let [client, ended, input, outputs @ ..] =
                self.poll(subscriber.client(), reading, wake_at);
            let now = Instant::now();
            if self.take_due() {
                self.process.kill_tree(Reason::Timeout);
            }
            let recheck = self.take_recheck(now);
            subscriber.client().ready(client)?;
            if input.any() && self.feed() {
                self.input = None;
            }
            if ended.any() || recheck.is_some() {
                self.reap();
            }
            if recheck.is_some_and(|interval| self.is_overdue(interval)) {
                self.process.kill_tracers();
            }
            let mut deliver = |stream: Stream, offset: u64, data: &[u8]| {
                subscriber.output(stream, offset, data);
                fault::point("foreground");
                keep_alive.reset();
            };
            for stream in Stream::ALL {
                if (outputs[stream.index()].any() || (reading && self.left(stream) > 0))
                    && self.read(stream, &mut buffer, &mut deliver)
                {
                    self.outputs[stream.index()] = None;
                }
            }
            if let Some(exit) = self.publish() {
                subscriber.exit(&exit);
                // Usually no descendant holds the pipes. Then both are at their end, this closes them, and the
                // supervisor has nothing to do.
                for stream in Stream::ALL {
                    self.read_or_close(stream, &mut buffer, &mut |_, _, _| {});
                }
                return Ok(true);
            }
            if until.is_some_and(|until| now >= until) {
                return Ok(false);
            }
            keep_alive.ping_if_due(subscriber.client());
        }
    }

    /// Polls the client, the pidfd, the input and the two outputs, in this order.
    fn poll(&self, client: &dyn Client, reading: bool, wake_at: Instant) -> [Events; 5] {
        let rest = self.rests_until();
        let rests = rest.is_some();
        let output = |stream| {
            let output = self.output(stream).filter(|_| reading && !rests);
            PollEntry::new(output, Events::READABLE)
        };
        let mut entries = [
            PollEntry::new(client.descriptor(), client.interest()),
            PollEntry::new(self.awaited_pidfd(), Events::READABLE),
            PollEntry::new(self.input().filter(|_| !rests), Events::WRITABLE),
            output(Stream::Stdout),
            output(Stream::Stderr),
        ];
        let timers = [self.timer(), rest, Some(wake_at)];
        let until = timers.into_iter().flatten().min();
        let mut limit = until.map(|until| until.saturating_duration_since(Instant::now()));
        if reading && Stream::ALL.iter().any(|stream| self.left(*stream) > 0) {
            // A terminal may be empty already; then no event would end the wait.
            limit = Some(Duration::ZERO);
        }
        poll(&mut entries, limit);
        entries.map(|entry| entry.events())
    }
}

/// Makes a call on a pipe of a process, and lets the supervisor see that it takes long.
pub(super) fn on_pipe<T>(process: &Process, call: impl FnOnce() -> T) -> T {
    process.pipe_calls.fetch_add(1, Ordering::Relaxed);
    let result = call();
    process.pipe_calls.fetch_add(1, Ordering::Relaxed);
    result
}

/// A pump that is dropped with work left, even by a panic of its driver, goes to its owner, so that
/// every process is reaped.
impl Drop for Pump {
    fn drop(&mut self) {
        if self.is_done() {
            return;
        }
        self.owner.adopt(Self {
            process: Arc::clone(&self.process),
            owner: Arc::clone(&self.owner),
            outputs: std::mem::take(&mut self.outputs),
            terminal: self.terminal.take(),
            input: self.input.take(),
            unused: std::mem::take(&mut self.unused),
            deadline: self.deadline.take(),
            recheck: self.recheck.take(),
            scheduled: None,
            is_held: self.is_held,
            phase: std::mem::replace(&mut self.phase, Phase::Over),
            share: self.share.take(),
            pace: std::mem::replace(&mut self.pace, PipePace::of(self.process.ledger())),
            is_resting: false,
        });
    }
}
