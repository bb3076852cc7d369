//! Moving a command's bytes: its output from the pipes into the ring (and to the client that
//! waits), its input from the request into the pipe.
//!
//! A foreground command is driven by [`Pump::attend`] on its client's own thread: one poll over the
//! client, both pipes, stdin and the pidfd, so there is no hand-over between threads and a slow
//! client holds the command back by not being read for. Everything else is driven by the
//! supervisor, through the same few methods.
//!
//! Completeness needs no timer: what the main process wrote is in the pipe before waitid returns.
//! So once it is reaped, as many bytes as each pipe then holds are moved (at the client's pace, if
//! there is one), and `exit` may follow, whatever a grandchild still does with the pipe. After that
//! the pipes are read on to their end, so that such a grandchild never gets SIGPIPE.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;

use super::registry::Registry;
use super::ring::Stream;
use super::{Audience, Exit, Gone, Process, Reason};
use crate::sys::{self, Events, PollEntry, poll};

/// Where output is read into. Most commands write little, and cost no more than that; one that
/// writes much is soon read by as much as a pipe holds.
pub(super) struct Buffer(Vec<u8>);

impl Buffer {
    const LEAST: usize = 4 * 1024;
    const MOST: usize = 64 * 1024;

    pub(super) fn new() -> Self {
        Self(vec![0; Self::LEAST])
    }
}

/// The pipes of one process, and what is still to be done about it.
pub struct Pump {
    process: Arc<Process>,
    registry: Arc<Registry>,
    outputs: [Option<OwnedFd>; 2],
    input: Option<Feed>,
    deadline: Option<Instant>,
    phase: Phase,
}

/// How far the process has come.
enum Phase {
    /// It has not been reaped.
    Running(Arc<OwnedFd>),
    /// It has ended, and so many bytes that it wrote to each stream are still in the pipe.
    Draining([usize; 2]),
    /// Its end is known.
    Over,
}

/// Input that was given with the command and is not written yet.
struct Feed {
    pipe: OwnedFd,
    bytes: Vec<u8>,
    written: usize,
}

/// How attending a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Departure {
    /// The process ended, and its `exit` was put into the client's buffer.
    Ended,
    /// The client went away before.
    ClientGone,
}

impl Pump {
    pub(super) fn new(
        process: Arc<Process>,
        registry: Arc<Registry>,
        outputs: [OwnedFd; 2],
        input: Option<(OwnedFd, Vec<u8>)>,
        deadline: Option<Instant>,
    ) -> Self {
        let pidfd = super::lock(&process.life).pidfd.clone();
        let phase = pidfd.map_or(Phase::Draining([0, 0]), Phase::Running);
        Self {
            process,
            registry,
            outputs: outputs.map(Some),
            input: input.map(|(pipe, bytes)| Feed {
                pipe,
                bytes,
                written: 0,
            }),
            deadline,
            phase,
        }
    }

    /// The process whose pipes these are.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// Leaves the rest to the supervisor.
    pub fn detach(self) {
        let registry = Arc::clone(&self.registry);
        registry.supervisor().adopt(self);
    }

    /// The descriptor of an output, until its end was read.
    pub(super) fn output(&self, stream: Stream) -> Option<BorrowedFd<'_>> {
        self.outputs[stream.index()].as_ref().map(AsFd::as_fd)
    }

    /// The descriptor that wants the rest of the input.
    pub(super) fn input(&self) -> Option<BorrowedFd<'_>> {
        self.input.as_ref().map(|feed| feed.pipe.as_fd())
    }

    /// The descriptor that becomes readable when the process ends, until that was dealt with.
    pub(super) fn ending(&self) -> Option<BorrowedFd<'_>> {
        match &self.phase {
            Phase::Running(pidfd) => Some(pidfd.as_fd()),
            Phase::Draining(_) | Phase::Over => None,
        }
    }

    /// The same, to be kept for as long as somebody else refers to it.
    pub(super) fn pidfd(&self) -> Option<Arc<OwnedFd>> {
        match &self.phase {
            Phase::Running(pidfd) => Some(Arc::clone(pidfd)),
            Phase::Draining(_) | Phase::Over => None,
        }
    }

    /// What the ended process wrote to a stream and nobody has read yet.
    fn left(&self, stream: Stream) -> usize {
        match &self.phase {
            Phase::Draining(left) => left[stream.index()],
            Phase::Running(_) | Phase::Over => 0,
        }
    }

    /// When the process is to be killed.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether the end of the process is known; its pipes may live on.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    /// Whether nothing is left to do.
    pub(super) fn is_done(&self) -> bool {
        self.is_over() && self.outputs.iter().all(Option::is_none)
    }

    /// Moves what one read gives; `deliver` sees it too. Call when the pipe is readable. True at the
    /// end of the stream, and then it is to be closed.
    pub(super) fn read(
        &mut self,
        stream: Stream,
        buffer: &mut Buffer,
        deliver: &mut dyn FnMut(Stream, u64, &[u8]),
    ) -> bool {
        let Some(pipe) = &self.outputs[stream.index()] else {
            return false;
        };
        let mut is_over = false;
        // The pipe is not blocking: a command can read from its own output too, and take away what
        // poll saw.
        let count = match nix::unistd::read(pipe, &mut buffer.0) {
            Err(Errno::EINTR) => return false,
            Err(Errno::EAGAIN) => None,
            Ok(0) | Err(_) => {
                is_over = true;
                None
            }
            Ok(count) => {
                let data = &buffer.0[..count];
                let offset = self.process.append(stream, data);
                deliver(stream, offset, data);
                if count == buffer.0.len() && count < Buffer::MOST {
                    buffer.0 = vec![0; Buffer::MOST];
                }
                Some(count)
            }
        };
        if let Phase::Draining(left) = &mut self.phase {
            let left = &mut left[stream.index()];
            *left = count.map_or(0, |count| left.saturating_sub(count));
        }
        is_over
    }

    /// Closes an output that was read to its end.
    pub(super) fn close_output(&mut self, stream: Stream) {
        self.outputs[stream.index()] = None;
    }

    /// Writes what the process takes of its input. Call when the pipe is writable, or broken. True
    /// when it takes no more, and then it is to be closed.
    pub(super) fn feed(&mut self) -> bool {
        let Some(feed) = &mut self.input else {
            return false;
        };
        match nix::unistd::write(&feed.pipe, &feed.bytes[feed.written..]) {
            Ok(count) => feed.written += count,
            Err(Errno::EINTR | Errno::EAGAIN) => return false,
            // It does not read any more; that is its business.
            Err(_) => feed.written = feed.bytes.len(),
        }
        feed.written == feed.bytes.len()
    }

    /// Ends the process's input.
    pub(super) fn close_input(&mut self) {
        self.input = None;
    }

    /// Takes the deadline away, if it has passed.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        self.deadline.take_if(|deadline| *deadline <= now).is_some()
    }

    /// Once the process has ended: reaps it, and notes how much it wrote that is still in the pipes.
    fn note_end(&mut self) {
        if matches!(self.phase, Phase::Running(_)) && self.process.reap() {
            let left = Stream::ALL.map(|stream| {
                let pipe = self.output(stream);
                pipe.and_then(|pipe| sys::readable_bytes(pipe).ok())
                    .unwrap_or(0)
            });
            self.phase = Phase::Draining(left);
            self.deadline = None;
            self.input = None;
        }
    }

    /// Once all that the ended process wrote was read: makes the end known.
    fn settle(&mut self) -> Option<Exit> {
        if !matches!(self.phase, Phase::Draining([0, 0])) {
            return None;
        }
        self.phase = Phase::Over;
        let exit = self.process.publish();
        self.registry.ended(&self.process);
        exit
    }

    /// Deals with the end at once, for nobody who would have to be waited for.
    pub(super) fn finish(&mut self, buffer: &mut Buffer) -> Option<Exit> {
        self.note_end();
        for stream in Stream::ALL {
            while self.left(stream) > 0 {
                self.read(stream, buffer, &mut |_, _, _| {});
            }
        }
        self.settle()
    }

    /// Stops listening to whoever still holds the pipes.
    pub(super) fn abandon_outputs(&mut self) {
        self.outputs = [None, None];
    }

    /// Serves the process's client until one of the two is gone; the rest is the supervisor's then.
    pub fn attend(mut self, audience: &mut dyn Audience, on_gone: OnGone) {
        if self.attend_until_departure(audience) == Departure::ClientGone {
            self.process.leave(on_gone);
        }
    }

    fn attend_until_departure(&mut self, audience: &mut dyn Audience) -> Departure {
        let mut buffer = Buffer::new();
        let mut heard_at = Instant::now();
        loop {
            if audience.flush().is_err() {
                return Departure::ClientGone;
            }
            // Reading waits for the client, never the other way round.
            let reading = audience.is_flushed();
            let ready = self.poll(audience, reading, heard_at + audience.patience());
            let now = Instant::now();
            if self.is_due(now) {
                self.process.kill_tree(Reason::Timeout);
            }
            if audience.ready(ready.client).is_err() {
                return Departure::ClientGone;
            }
            if ready.input && self.feed() {
                self.close_input();
            }
            let mut heard = false;
            let mut deliver = |stream: Stream, offset: u64, data: &[u8]| {
                audience.output(stream, offset, data);
                heard = true;
            };
            if ready.ending {
                self.note_end();
            }
            for stream in Stream::ALL {
                if (ready.outputs[stream.index()] || (reading && self.left(stream) > 0))
                    && self.read(stream, &mut buffer, &mut deliver)
                {
                    self.close_output(stream);
                }
            }
            if let Some(exit) = self.settle() {
                audience.exit(&exit);
                // Usually nobody else had the pipes, and this reads their ends.
                for stream in Stream::ALL {
                    if self.read(stream, &mut buffer, &mut |_, _, _| {}) {
                        self.close_output(stream);
                    }
                }
                return Departure::Ended;
            }
            if heard {
                heard_at = now;
            } else if now >= heard_at + audience.patience() {
                if audience.is_flushed() {
                    audience.ping();
                }
                heard_at = now;
            }
        }
    }

    fn poll(&self, audience: &dyn Audience, reading: bool, ping_at: Instant) -> Ready {
        let output =
            |stream| PollEntry::new(self.output(stream).filter(|_| reading), Events::READABLE);
        let mut entries = [
            PollEntry::new(audience.descriptor(), audience.interest()),
            PollEntry::new(self.ending(), Events::READABLE),
            PollEntry::new(self.input(), Events::WRITABLE),
            output(Stream::Stdout),
            output(Stream::Stderr),
        ];
        let until = self
            .deadline
            .map_or(ping_at, |deadline| deadline.min(ping_at));
        poll(
            &mut entries,
            Some(until.saturating_duration_since(Instant::now())),
        );
        let [client, ending, input, stdout, stderr] = entries;
        Ready {
            client: client.events(),
            ending: ending.is_ready(),
            input: input.is_ready(),
            outputs: [stdout.is_ready(), stderr.is_ready()],
        }
    }
}

/// A pump that is dropped with work left, as by a panic in its driver's thread, goes to the supervisor:
/// a process is never without somebody who reaps it.
impl Drop for Pump {
    fn drop(&mut self) {
        if self.is_done() {
            return;
        }
        let rest = Self {
            process: Arc::clone(&self.process),
            registry: Arc::clone(&self.registry),
            outputs: std::mem::take(&mut self.outputs),
            input: self.input.take(),
            deadline: self.deadline.take(),
            phase: std::mem::replace(&mut self.phase, Phase::Over),
        };
        rest.detach();
    }
}

/// What poll found.
struct Ready {
    client: Events,
    ending: bool,
    input: bool,
    outputs: [bool; 2],
}

/// What is to become of a process whose client goes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnGone {
    /// All of it is killed.
    Kill,
    /// It goes on as a background process.
    Keep,
}

/// Sends what is left in the client's buffer, at the client's pace.
///
/// # Errors
/// The client is gone.
pub(super) fn deliver_rest(audience: &mut dyn Audience) -> Result<(), Gone> {
    loop {
        audience.flush()?;
        if audience.is_flushed() {
            return Ok(());
        }
        let events = {
            let mut entries = [PollEntry::new(audience.descriptor(), audience.interest())];
            poll(&mut entries, None);
            entries[0].events()
        };
        audience.ready(events)?;
    }
}
