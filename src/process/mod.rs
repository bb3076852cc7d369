//! Commands: starting them, moving their output, ending them, remembering them.
//!
//! A [`Process`] is what everybody shares: its identity, its life and its ring of output. The
//! pipes belong to one [`pump::Pump`], and a pump always has exactly one driver: the connection
//! that waits for a foreground command, or the [`supervisor`] for everything else. Only the driver
//! reaps, and whoever signals does so under the lock that reaping takes, so a process number that
//! the kernel has given to somebody else is never signalled.
//!
//! Nothing here knows HTTP or JSON: a client is an [`Audience`] with a descriptor to poll.

mod follow;
#[cfg(test)]
mod fuzz;
mod logs;
mod oom;
mod pump;
pub mod registry;
pub mod ring;
pub mod supervisor;
mod tree;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::command::{CommandLine, Fingerprint};
use crate::error::{Error, Kind, Result};
use crate::sys::{self, Ending, Events, Pid, PollEntry, poll};
use logs::LogStore;
use ring::{Cursor, Piece, Ring, Stream};

pub use pump::{OnGone, Pump};

/// Why a process is no longer running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// It exited.
    Exited,
    /// A signal that did not come through this server ended it.
    Signaled,
    /// Its time was up.
    Timeout,
    /// The kernel ended it because memory ran out.
    OutOfMemory,
    /// A signal that was asked for ended it.
    Killed,
    /// It was deleted.
    Deleted,
    /// Its client went away.
    Disconnected,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// Status or signal.
    pub ending: Ending,
    /// Who or what was behind it.
    pub reason: Reason,
    /// From start to end.
    pub duration: Duration,
}

/// Somebody at the other end of a connection, who may go away at any time.
pub trait Client {
    /// What to poll to learn that the client can take more, or is gone.
    fn descriptor(&self) -> BorrowedFd<'_>;
    /// The events to poll for.
    fn interest(&self) -> Events;
    /// Told what poll found.
    ///
    /// # Errors
    /// The client is gone.
    fn ready(&mut self, events: Events) -> std::result::Result<(), Gone>;
}

/// Somebody who watches a process, over a connection that must never be waited for.
///
/// Events are put into the audience's own buffer; [`Audience::flush`] sends what can be sent. The
/// drivers put more in only when the buffer is empty, which bounds it and passes a slow client's
/// pace down to the command's pipe.
pub trait Audience: Client {
    /// Bytes of a stream, the first of which has this offset in it.
    fn output(&mut self, stream: Stream, offset: u64, data: &[u8]);
    /// Bytes that are no longer there.
    fn dropped(&mut self, stream: Stream, offset: u64, bytes: u64);
    /// The end of the process.
    fn exit(&mut self, exit: &Exit);
    /// The end of what there is of a process that still runs; the cursor says how far that was.
    fn caught_up(&mut self, cursor: &Cursor);
    /// A sign of life.
    fn ping(&mut self);
    /// Silence after which a ping is due.
    fn patience(&self) -> Duration;
    /// Sends what can be sent without waiting.
    ///
    /// # Errors
    /// The client is gone.
    fn flush(&mut self) -> std::result::Result<(), Gone>;
    /// Whether everything has been sent.
    fn is_flushed(&self) -> bool;
}

/// The client is no longer there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gone;

/// One started command, running or ended.
pub struct Process {
    id: String,
    pid: Pid,
    command: CommandLine,
    /// Only of one whose id was chosen: others are never compared.
    fingerprint: Option<Fingerprint>,
    tag: Option<String>,
    started_at_ms: u64,
    started: Instant,
    logs: Arc<LogStore>,
    /// Guards whether the process number is still ours; signalling and reaping both happen under it.
    life: Mutex<Life>,
    /// Guards the output, for the length of a copy.
    ring: Mutex<Ring>,
    /// Guards who holds the writing end of stdin, not the writing.
    stdin: Mutex<Stdin>,
    /// Guards the list of those to wake.
    watchers: Mutex<Vec<Arc<EventFd>>>,
}

struct Life {
    /// Whether it goes on without clients.
    background: bool,
    /// Those that started it, or joined in by its id, and have not gone away.
    clients: usize,
    /// Until it is reaped.
    pidfd: Option<Arc<OwnedFd>>,
    /// How many are killing the tree. It is not reaped meanwhile: its number, by which the tree is
    /// found, stays its own, and nothing that was stopped is forgotten.
    killers: usize,
    /// Why the whole tree is being killed.
    cause: Option<Reason>,
    /// The signals that were asked for, bit n for signal n.
    asked: u64,
    /// Set when it was reaped.
    ending: Option<(Ending, Instant)>,
    /// Set when, besides, all it wrote is in the ring. Clients are told only then.
    exit: Option<Exit>,
}

enum Stdin {
    /// Given at the start, ended by a client, or the process is gone.
    Closed,
    Open(OwnedFd),
    /// A [`StdinWriter`] has it.
    Busy,
}

/// Kills processes and everything that descends from them; how many of them this stopped.
fn kill_trees(processes: &[Arc<Process>], cause: Reason) -> usize {
    let mut killed = 0;
    let begun: Vec<&Arc<Process>> = processes
        .iter()
        .filter(|process| {
            let begun = process.begin_kill(cause);
            killed += usize::from(begun == Some(true));
            begun.is_some()
        })
        .collect();
    if !begun.is_empty() {
        tree::kill(&begun.iter().map(|process| process.pid).collect());
    }
    for process in begun {
        process.end_kill();
    }
    killed
}

/// Locks what a panic elsewhere may have poisoned: every critical section here leaves its data whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Process {
    /// The name under which the workspace knows it.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its number, while it runs; afterwards only a memory.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// What it runs, as the client said it.
    pub fn command(&self) -> &CommandLine {
        &self.command
    }

    /// The client's own label.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// Milliseconds since 1970.
    pub fn started_at_ms(&self) -> u64 {
        self.started_at_ms
    }

    /// Whether it has no client that waits for it.
    pub fn is_background(&self) -> bool {
        lock(&self.life).background
    }

    /// Whether it has not been seen to end.
    fn is_running(&self) -> bool {
        lock(&self.life).ending.is_none()
    }

    /// Whether SIGKILL has ended it. A kill of the tree may meet an end that came before.
    fn died_of_kill(&self) -> bool {
        let ending = lock(&self.life).ending;
        matches!(ending, Some((Ending::Signaled(libc::SIGKILL), _)))
    }

    /// Its end, once all it wrote can be read.
    pub fn exit(&self) -> Option<Exit> {
        lock(&self.life).exit
    }

    /// Bytes a stream has carried so far.
    pub fn written(&self, stream: Stream) -> u64 {
        lock(&self.ring).written(stream)
    }

    /// Sends a signal to its process group. False when it has ended.
    ///
    /// # Errors
    /// The kernel refuses the signal.
    pub fn signal(&self, signal: i32) -> Result<bool> {
        let mut life = lock(&self.life);
        if life.ending.is_some() {
            return Ok(false);
        }
        life.asked |= 1 << (signal & 63);
        sys::signal_group(self.pid, signal).map_err(|errno| {
            Error::system(format_args!("cannot signal process {}", self.id), errno)
        })?;
        Ok(true)
    }

    /// A signal is about to be sent to it by somebody who does so process by process.
    fn expect_signal(&self, signal: i32) {
        lock(&self.life).asked |= 1 << (signal & 63);
    }

    /// Kills it and everything that descends from it. False when it had ended, or somebody else is
    /// killing it already: of several that kill it, one stopped it.
    pub fn kill_tree(self: &Arc<Self>, cause: Reason) -> bool {
        kill_trees(std::slice::from_ref(self), cause) > 0
    }

    /// Stops its group, which then forks no more while the rest is looked for, and holds off
    /// reaping. `None` when it has ended; else whether this is the first to kill it.
    fn begin_kill(&self, cause: Reason) -> Option<bool> {
        let mut life = lock(&self.life);
        if life.ending.is_some() {
            return None;
        }
        life.killers += 1;
        let _ = sys::signal_group(self.pid, libc::SIGSTOP);
        let is_first = life.cause.is_none();
        life.cause.get_or_insert(cause);
        Some(is_first)
    }

    fn end_kill(&self) {
        let mut life = lock(&self.life);
        let _ = sys::signal_group(self.pid, libc::SIGKILL);
        life.killers -= 1;
    }

    /// One more client follows its run as if it had started it.
    pub fn join(&self) {
        lock(&self.life).clients += 1;
    }

    /// A client whose run it is goes away before the end. When the last one goes and none wanted it
    /// kept, it is killed.
    pub fn leave(self: &Arc<Self>, on_gone: OnGone) {
        let is_unwanted = {
            let mut life = lock(&self.life);
            life.clients -= 1;
            life.background |= on_gone == OnGone::Keep;
            life.clients == 0 && !life.background
        };
        if is_unwanted {
            self.kill_tree(Reason::Disconnected);
        }
    }

    /// Waits until it has ended and its output is complete; at most `limit`. True when it has.
    pub fn wait_ended(self: &Arc<Self>, limit: Duration) -> bool {
        let watch = self.watch();
        let deadline = Instant::now() + limit;
        while self.exit().is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            if let Ok(watch) = &watch {
                poll(
                    &mut [PollEntry::new(watch.event.as_fd(), Events::READABLE)],
                    Some(left),
                );
                watch.clear();
            } else {
                // No descriptor left to be woken by.
                std::thread::sleep(left.min(Duration::from_millis(10)));
            }
        }
        true
    }

    /// Waits for the end as [`Process::wait_ended`] does, for a client: it is kept company with
    /// pings, and the wait ends when it goes away.
    ///
    /// # Errors
    /// The client is gone.
    pub fn wait_with(
        self: &Arc<Self>,
        audience: &mut dyn Audience,
        limit: Option<Duration>,
    ) -> std::result::Result<(), Gone> {
        follow::wait(self, audience, limit)
    }

    /// Shows a client the output from `cursor` on: to its end, or (not `live`) as far as it goes now.
    ///
    /// # Errors
    /// The client is gone.
    pub fn follow(
        self: &Arc<Self>,
        cursor: Cursor,
        live: bool,
        audience: &mut dyn Audience,
    ) -> std::result::Result<(), Gone> {
        follow::follow(self, cursor, live, audience)
    }

    /// Takes the writing end of its stdin.
    ///
    /// # Errors
    /// It is closed, or another client is writing.
    pub fn stdin(self: &Arc<Self>) -> Result<StdinWriter> {
        let mut slot = lock(&self.stdin);
        match std::mem::replace(&mut *slot, Stdin::Busy) {
            Stdin::Open(pipe) => Ok(StdinWriter {
                process: Arc::clone(self),
                pipe: Some(pipe),
            }),
            Stdin::Closed => {
                *slot = Stdin::Closed;
                Err(self.stdin_closed())
            }
            Stdin::Busy => Err(Error::new(
                Kind::StdinBusy,
                format!(
                    "cannot write to process {}: another request is writing to it; wait for that one",
                    self.id
                ),
            )),
        }
    }

    fn stdin_closed(&self) -> Error {
        Error::new(
            Kind::StdinClosed,
            format!(
                "cannot write to process {}: its stdin is closed, or was given when it started",
                self.id
            ),
        )
    }

    /// Records what was read from a stream and wakes who follows; the offset of the first byte.
    fn append(&self, stream: Stream, data: &[u8]) -> u64 {
        let (offset, before, after) = {
            let mut ring = lock(&self.ring);
            let before = ring.footprint();
            let offset = ring.written(stream);
            ring.append(stream, data);
            (offset, before, ring.footprint())
        };
        self.logs.account(before, after);
        self.wake_watchers();
        offset
    }

    /// How much output there is by now, in both streams.
    fn position(&self) -> u64 {
        lock(&self.ring).position()
    }

    /// Reads on for one reader.
    fn read(&self, cursor: &mut Cursor, buffer: &mut Vec<u8>) -> Option<Piece> {
        lock(&self.ring).read(cursor, buffer)
    }

    /// Reaps it if it has ended. Only its driver calls this.
    fn reap(&self) -> bool {
        let mut life = lock(&self.life);
        if life.killers > 0 {
            return false;
        }
        if let Some(pidfd) = &life.pidfd {
            let ending = sys::wait(pidfd.as_fd(), false);
            // Nobody else reaps; but if somebody did, waiting on would never end.
            if let Some(ending) = ending.unwrap_or(Some(Ending::Unknown)) {
                life.ending = Some((ending, Instant::now()));
                life.pidfd = None;
            }
        }
        life.ending.is_some()
    }

    /// Makes its end known, all output being in the ring.
    fn publish(&self) -> Option<Exit> {
        let (ending, ended, cause, asked) = {
            let life = lock(&self.life);
            let (ending, ended) = life.ending?;
            (ending, ended, life.cause, life.asked)
        };
        if ending == Ending::Exited(128 + libc::SIGKILL) {
            // A shell's word for a child that SIGKILL ended: if memory was the cause, that is the kill.
            oom::killed_one();
        }
        let reason = match (ending, cause) {
            (Ending::Exited(_), _) => Reason::Exited,
            (Ending::Signaled(libc::SIGKILL), Some(cause)) => cause,
            (Ending::Signaled(signal), _) if asked & (1 << (signal & 63)) != 0 => Reason::Killed,
            (Ending::Signaled(libc::SIGKILL), None) if oom::killed_one() => Reason::OutOfMemory,
            (Ending::Signaled(_) | Ending::Unknown, _) => Reason::Signaled,
        };
        let exit = Exit {
            ending,
            reason,
            duration: ended - self.started,
        };
        lock(&self.life).exit = Some(exit);
        *lock(&self.stdin) = Stdin::Closed;
        self.wake_watchers();
        Some(exit)
    }

    fn watch(self: &Arc<Self>) -> Result<Watch> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| Error::system("cannot follow the process", errno))?;
        let event = Arc::new(event);
        lock(&self.watchers).push(Arc::clone(&event));
        Ok(Watch {
            process: Arc::clone(self),
            event,
        })
    }

    fn wake_watchers(&self) {
        for event in lock(&self.watchers).iter() {
            // Fails only when the counter is full, that is: already awake.
            let _ = event.write(1);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let footprint = self
            .ring
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .footprint();
        self.logs.account(footprint, 0);
    }
}

/// Wakes a poll when the process has more output or has ended.
struct Watch {
    process: Arc<Process>,
    event: Arc<EventFd>,
}

impl Watch {
    fn clear(&self) {
        let _ = self.event.read();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        lock(&self.process.watchers).retain(|event| !Arc::ptr_eq(event, &self.event));
    }
}

/// The right to write to a process, given back when dropped.
pub struct StdinWriter {
    process: Arc<Process>,
    pipe: Option<OwnedFd>,
}

impl StdinWriter {
    /// Writes all of `data`, at the process's pace. `client` is polled meanwhile, so that a client
    /// that hangs up does not leave a thread waiting for a process that never reads.
    ///
    /// # Errors
    /// The process no longer reads, or the client is gone.
    pub fn write(&mut self, mut data: &[u8], client: &mut dyn Client) -> Result<()> {
        while !data.is_empty() {
            let Some(pipe) = &self.pipe else {
                return Err(self.process.stdin_closed());
            };
            match nix::unistd::write(pipe, data) {
                Ok(count) => {
                    data = &data[count..];
                    continue;
                }
                Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => {}
                Err(_) => {
                    self.pipe = None;
                    return Err(self.process.stdin_closed());
                }
            }
            let pidfd = lock(&self.process.life).pidfd.clone();
            let mut entries = [
                PollEntry::new(pipe.as_fd(), Events::WRITABLE),
                PollEntry::new(pidfd.as_ref().map(|pidfd| pidfd.as_fd()), Events::READABLE),
                PollEntry::new(client.descriptor(), client.interest()),
            ];
            poll(&mut entries, None);
            let [writable, ended, client_events] = entries.map(|entry| entry.events());
            let (writable, ended) = (writable.any(), ended.any());
            if client.ready(client_events).is_err() {
                return Err(Error::new(
                    Kind::StdinBusy,
                    "the client went away while the process was not reading",
                ));
            }
            if (ended || pidfd.is_none()) && !writable {
                self.pipe = None;
                return Err(self.process.stdin_closed());
            }
        }
        Ok(())
    }

    /// Ends the process's input.
    pub fn close(mut self) {
        self.pipe = None;
    }
}

impl Drop for StdinWriter {
    fn drop(&mut self) {
        let mut slot = lock(&self.process.stdin);
        // Asked under the lock that publishing takes afterwards: the pipe cannot outlive the process.
        let ended = self.process.exit().is_some();
        *slot = match self.pipe.take() {
            Some(pipe) if !ended => Stdin::Open(pipe),
            _ => Stdin::Closed,
        };
    }
}
