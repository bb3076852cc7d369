//! Moving a command's bytes: its output from the pipes into the ring (and to the client that
//! waits), its input from the request into the pipe.
//!
//! A foreground command is driven by [`Pump::attend`] on its client's own thread: one poll over the
//! client, both pipes, stdin and the pidfd, so there is no hand-over between threads and a slow
//! client holds the command back by not being read for. Everything else is driven by the
//! supervisor, through the same few methods.
//!
//! Completeness needs no timer: what the main process wrote is in the pipe before waitid returns.
//! So once it is reaped, as many bytes as each pipe then holds are moved, and `exit` may follow,
//! whatever a grandchild still does with the pipe. After that the pipes are read on to their end,
//! so that such a grandchild never gets SIGPIPE.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;

use super::registry::Registry;
use super::ring::Stream;
use super::{Audience, Exit, Gone, Process, Reason};
use crate::sys::{self, Events, PollEntry, poll};

/// One read: as much as a pipe holds.
pub(super) const READ_BYTES: usize = 64 * 1024;

/// The pipes of one process, and what is still to be done about it.
pub struct Pump {
    process: Arc<Process>,
    registry: Arc<Registry>,
    outputs: [Option<OwnedFd>; 2],
    input: Option<Feed>,
    deadline: Option<Instant>,
    /// Until the end of the process was dealt with.
    pidfd: Option<Arc<OwnedFd>>,
}

/// Input that was given with the command and is not written yet.
struct Feed {
    pipe: OwnedFd,
    bytes: Vec<u8>,
    written: usize,
}

/// How attending a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// The process ended, and its `exit` was put into the client's buffer.
    Ended,
    /// The client went away while the process runs on.
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
            pidfd,
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
        self.pidfd.as_ref().map(|pidfd| pidfd.as_fd())
    }

    /// The same, to be kept for as long as somebody else refers to it.
    pub(super) fn pidfd(&self) -> Option<Arc<OwnedFd>> {
        self.pidfd.clone()
    }

    /// When the process is to be killed.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether nothing is left to do.
    pub(super) fn is_done(&self) -> bool {
        self.pidfd.is_none() && self.outputs.iter().all(Option::is_none)
    }

    /// Moves what one read gives; `deliver` sees it too. Call when the pipe is readable.
    pub(super) fn read(
        &mut self,
        stream: Stream,
        buffer: &mut [u8],
        deliver: &mut dyn FnMut(Stream, u64, &[u8]),
    ) {
        let Some(pipe) = &self.outputs[stream.index()] else {
            return;
        };
        match nix::unistd::read(pipe, buffer) {
            Ok(0) => self.outputs[stream.index()] = None,
            Ok(count) => {
                let data = &buffer[..count];
                let offset = self.process.append(stream, data);
                deliver(stream, offset, data);
            }
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(_) => self.outputs[stream.index()] = None,
        }
    }

    /// Writes what the process takes of its input. Call when the pipe is writable, or broken.
    pub(super) fn feed(&mut self) {
        let Some(feed) = &mut self.input else { return };
        match nix::unistd::write(&feed.pipe, &feed.bytes[feed.written..]) {
            Ok(count) => feed.written += count,
            Err(Errno::EINTR | Errno::EAGAIN) => return,
            // It does not read any more; that is its business.
            Err(_) => feed.written = feed.bytes.len(),
        }
        if feed.written == feed.bytes.len() {
            self.input = None;
        }
    }

    /// Kills the process if its time is up.
    pub(super) fn enforce_deadline(&mut self, now: Instant) {
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.deadline = None;
            self.process.kill_tree(Reason::Timeout);
        }
    }

    /// Once the process has ended: reaps it, moves all it wrote, and makes the end known.
    pub(super) fn finish(
        &mut self,
        buffer: &mut [u8],
        deliver: &mut dyn FnMut(Stream, u64, &[u8]),
    ) -> Option<Exit> {
        if self.pidfd.is_none() || !self.process.reap() {
            return None;
        }
        for stream in Stream::ALL {
            let mut left = self
                .output(stream)
                .and_then(|pipe| sys::readable_bytes(pipe).ok())
                .unwrap_or(0);
            while left > 0 && self.outputs[stream.index()].is_some() {
                let size = left.min(buffer.len());
                let before = self.process.written(stream);
                self.read(stream, &mut buffer[..size], deliver);
                let moved = usize::try_from(self.process.written(stream) - before).unwrap_or(left);
                left -= moved.min(left);
            }
        }
        self.pidfd = None;
        self.deadline = None;
        self.input = None;
        let exit = self.process.publish();
        self.registry.ended(&self.process);
        exit
    }

    /// Serves the process's client until one of the two is gone; the rest is the supervisor's then.
    pub fn attend(mut self, audience: &mut dyn Audience, on_gone: OnGone) -> Departure {
        let departure = self.attend_until_departure(audience);
        if departure == Departure::ClientGone {
            match on_gone {
                OnGone::Kill => {
                    self.process.kill_tree(Reason::Disconnected);
                }
                OnGone::Keep => super::lock(&self.process.life).background = true,
            }
        }
        departure
    }

    fn attend_until_departure(&mut self, audience: &mut dyn Audience) -> Departure {
        let mut buffer = vec![0; READ_BYTES];
        let mut heard_at = Instant::now();
        loop {
            if audience.flush().is_err() {
                return Departure::ClientGone;
            }
            // Reading waits for the client, never the other way round.
            let reading = audience.is_flushed();
            let ready = self.poll(audience, reading, heard_at + audience.patience());
            let now = Instant::now();
            self.enforce_deadline(now);
            if audience.ready(ready.client).is_err() {
                return Departure::ClientGone;
            }
            if ready.input {
                self.feed();
            }
            let mut heard = false;
            let mut deliver = |stream: Stream, offset: u64, data: &[u8]| {
                audience.output(stream, offset, data);
                heard = true;
            };
            if ready.ending
                && let Some(exit) = self.finish(&mut buffer, &mut deliver)
            {
                audience.exit(&exit);
                return Departure::Ended;
            }
            for stream in Stream::ALL {
                if ready.outputs[stream.index()] {
                    self.read(stream, &mut buffer, &mut deliver);
                }
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
            pidfd: self.pidfd.take(),
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
