//! One process: its identity, its life and its log, shared by its driver, its clients and the registry.
//!
//! Exactly one driver reaps a process. Signals are sent under the lock that reaping takes, so a pid
//! that the kernel has given to another process is never signalled.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::logs::Log;
use super::ring::{Cursor, Ring, Stream};
use super::terminal::Terminal;
use super::tree::{self, Hunt, Orphans, Roots};
use super::{children, oom};
use crate::client::Client;
use crate::confine::{KillWatch, Mark, MemoryKill};
use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::limits::ledger::{Charge, Ledger};
use crate::spec::command::{
    CommandLine, CommandSpec, EnvironmentChange, Fingerprint, TerminalSize, environment_bytes,
};
use crate::sys::{self, Ending, Pid, Spawned, User, proc};
use crate::threads::lock::{Mutex, lock};
use crate::threads::notify::Notifier;
use crate::threads::panics::contain;

/// Why a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    Exited,
    /// A signal that this server did not send.
    Signaled,
    /// Its timeout passed.
    Timeout,
    /// The kernel's OOM killer.
    OutOfMemory,
    /// The limit on the memory of its whole sandbox.
    MemoryLimit,
    /// A signal that a client asked for, or the server's own end.
    Killed,
    /// A client deleted it, or its sandbox.
    Deleted,
    /// Its client disconnected.
    Disconnected,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// The exit status or the signal.
    pub ending: Ending,
    pub reason: Reason,
    /// From the start to the end.
    pub duration: Duration,
}

/// What happens to a process whose client disconnects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnDisconnect {
    /// Its whole tree is killed.
    Kill,
    /// It continues as a background process.
    Keep,
}

/// A client that receives the events of a process.
///
/// Events go into the buffer of the subscriber's [`Client`]. The driver of a subscriber adds more only
/// when that buffer is empty, which passes a slow client's pace down to the command's pipe.
pub trait Subscriber {
    /// The connection that the events go to.
    fn client(&mut self) -> &mut dyn Client;
    /// Adds output; `offset` is that of its first byte in the stream.
    fn output(&mut self, stream: Stream, offset: u64, data: &[u8]);
    /// Adds a gap: bytes that the ring has dropped.
    fn dropped(&mut self, stream: Stream, offset: u64, bytes: u64);
    /// Adds the last event.
    fn exit(&mut self, exit: &Exit);
    /// Adds the last event of a subscription that does not wait for the end; `cursor` is where to
    /// continue.
    fn caught_up(&mut self, cursor: &Cursor);
}

/// A command that was started, running or ended.
pub struct Process {
    /// Unique in the workspace: `p-N`, or the client's choice.
    pub id: String,
    /// The pid, which the kernel may reuse once the process was reaped.
    pub pid: Pid,
    /// See [`Self::pid_inside`].
    pid_inside: OnceLock<Pid>,
    /// The command as the client sent it.
    pub command: CommandLine,
    /// Its changes to the workspace's environment.
    pub environment: Vec<EnvironmentChange>,
    /// The working directory that was asked for; `None` means the workspace's.
    pub directory: Option<String>,
    /// `None` if the server chose the id: such a start is never compared.
    fingerprint: Option<Fingerprint>,
    /// The client's label.
    pub tag: Option<String>,
    /// Milliseconds since 1970.
    pub started_at_ms: u64,
    started: Instant,
    /// What its descendants are known by.
    pub(super) origin: Origin,
    pub(super) log: Arc<Log>,
    /// An interpreter of a context, which is no work and in no list.
    pub(super) is_interpreter: bool,
    /// `None` for a process with pipes.
    pub(super) terminal: Option<Terminal>,
    /// Tells kills for memory; `None` without a sandbox.
    pub(super) kill_watch: Option<KillWatch>,
    /// Held while signalling and while reaping.
    life: Mutex<Life>,
    /// Guards who owns the writing end, not the writing.
    pub(super) stdin: Mutex<StdinSlot>,
    /// Notifies when there is output, the process has ended, its terminal was resized, or its stdin is
    /// free for others.
    pub(super) notifier: Arc<Notifier>,
    /// Odd while a thread is in a call on a pipe of the process, which a process that has the pipe open can hold up;
    /// grows by one before and after each.
    pub(super) pipe_calls: AtomicU64,
    /// For the texts.
    charge: Charge,
}

struct Life {
    /// It continues without clients.
    background: bool,
    /// Clients that started it, or attached by its id, and are still connected.
    clients: usize,
    /// `None` once it was reaped.
    pidfd: Option<Arc<OwnedFd>>,
    /// Threads that are killing the tree, or signal the foreground. They find it by the pid, so the process
    /// is not reaped meanwhile.
    killers: usize,
    /// Why the whole tree is killed.
    kill_reason: Option<Reason>,
    /// Signals that clients asked for: bit n is signal n.
    requested_signals: u64,
    /// Set when it was reaped.
    ending: Option<(Ending, Instant)>,
    /// Set when, in addition, all its output is in the log. Only then are clients told.
    exit: Option<Exit>,
}

/// What the descendants of a command are known by when they have lost their parents.
#[derive(Debug, Clone, Copy)]
pub(super) struct Origin {
    /// `None` if the server gives no marks.
    pub(super) mark: Option<Mark>,
    /// The command's user; `None` for the server's own.
    pub(super) user: Option<User>,
    /// The server's thread that has started it.
    pub(super) starter: Pid,
    /// The first process of its namespaces, if it has any of its own.
    pub(super) holder: Option<Pid>,
}

/// The writing end of a process's stdin.
pub(super) enum StdinSlot {
    /// The input was given at the start, a client has ended it, or the process has ended.
    Closed,
    Open(Arc<OwnedFd>),
    /// A [`super::StdinWriter`] owns it.
    Busy {
        /// Another one was refused meanwhile, and is woken up when it is free.
        is_awaited: bool,
    },
}

/// How long a client waits until nothing of a tree moves any more. Only a fork storm takes long.
const HUNT_LIMIT: Duration = Duration::from_secs(10);

/// Kills processes with all their descendants. Returns how many of `processes` this call is the first
/// to kill, and the hunt for what was started meanwhile; `None` if all have ended already.
pub(super) fn strike_trees(processes: &[Arc<Process>], reason: Reason) -> (usize, Option<Hunt>) {
    let mut first = 0;
    let mut leaders = Vec::new();
    for process in processes {
        if let Some((held, is_first)) = process.begin_kill(reason) {
            first += usize::from(is_first);
            leaders.push(held);
        }
    }
    if leaders.is_empty() {
        return (0, None);
    }
    let mut roots = roots(leaders.iter().map(|held| held.process));
    roots.leaders = leaders.iter().map(|held| held.process.pid).collect();
    let mut hunt = Hunt::new(roots);
    hunt.strike();
    fault::point("killing");
    drop(leaders);
    hunt.forget_leaders();
    (first, Some(hunt))
}

/// Kills processes with all their descendants, until nothing of the trees is left; returns how many of
/// `processes` this call is the first to kill.
pub(super) fn kill_trees(processes: &[Arc<Process>], reason: Reason) -> usize {
    let (first, hunt) = strike_trees(processes, reason);
    if let Some(hunt) = hunt {
        finish(hunt);
    }
    first
}

/// Goes on until nothing new is found.
pub(super) fn finish(mut hunt: Hunt) {
    let deadline = Instant::now() + HUNT_LIMIT;
    while hunt.strike() && Instant::now() < deadline {}
}

/// Where the orphans of these processes are found.
fn roots<'a>(processes: impl Iterator<Item = &'a Process> + Clone) -> Roots {
    let origins = processes.map(|process| process.origin);
    let marks = origins
        .clone()
        .filter_map(|origin| Some((origin.mark?, origin.user)));
    Roots {
        orphans: Orphans::Marked(marks.collect()),
        starters: origins.clone().map(|origin| origin.starter).collect(),
        holders: origins.filter_map(|origin| origin.holder).collect(),
        ..Roots::default()
    }
}

/// A process that is not reaped, so that its pid is its own, until this is dropped.
struct HeldProcess<'a> {
    process: &'a Process,
    /// Whether its group is killed then.
    is_killed: bool,
}

impl Drop for HeldProcess<'_> {
    fn drop(&mut self) {
        let mut life = lock(&self.process.life);
        if self.is_killed {
            let _ = sys::signal_group(self.process.pid, libc::SIGKILL);
        }
        life.killers -= 1;
    }
}

impl Process {
    /// A process that was just started for `spec`.
    pub(super) fn new(
        id: String,
        spec: &CommandSpec,
        spawned: Spawned,
        (started, started_at_ms): (Instant, u64),
        origin: Origin,
        log: Arc<Log>,
        charge: Charge,
    ) -> Self {
        Self {
            id,
            pid: spawned.pid,
            pid_inside: OnceLock::new(),
            command: spec.line().clone(),
            environment: spec.environment().to_vec(),
            directory: spec.directory().map(str::to_owned),
            fingerprint: spec.id.is_some().then(|| spec.fingerprint()),
            tag: spec.tag.clone(),
            started_at_ms,
            started,
            origin,
            log,
            is_interpreter: false,
            terminal: None,
            kill_watch: None,
            life: Mutex::new(Life {
                background: spec.background,
                clients: usize::from(!spec.background),
                pidfd: Some(Arc::new(spawned.pidfd)),
                killers: 0,
                kill_reason: None,
                requested_signals: 0,
                ending: None,
                exit: None,
            }),
            stdin: Mutex::new(StdinSlot::Closed),
            notifier: Arc::default(),
            pipe_calls: AtomicU64::new(0),
            charge,
        }
    }

    /// The pid by which programs of its sandbox know it. It stays what it was when it was first asked for, and is
    /// [`Self::pid`] if the process had ended by then.
    pub fn pid_inside(&self) -> Pid {
        *self.pid_inside.get_or_init(|| {
            let runs = self.exit().is_none();
            let found = runs.then(|| proc::own_number(self.pid)).flatten();
            found.unwrap_or(self.pid)
        })
    }

    /// Bytes of its texts in memory, approximately.
    pub(super) fn text_bytes(&self) -> usize {
        self.command.size() + environment_bytes(&self.environment)
    }

    /// Whether a start with the same chosen id asks for the same command.
    pub(super) fn is_same_command(&self, spec: &CommandSpec) -> bool {
        self.fingerprint == Some(spec.fingerprint())
    }

    /// Whether it continues without clients.
    pub fn is_background(&self) -> bool {
        lock(&self.life).background
    }

    /// Whether it was not reaped yet.
    pub(super) fn is_running(&self) -> bool {
        lock(&self.life).ending.is_none()
    }

    /// Whether SIGKILL ended it. It may have ended otherwise before a kill reached it.
    pub(super) fn died_of_kill(&self) -> bool {
        let ending = lock(&self.life).ending;
        matches!(ending, Some((Ending::Signaled(libc::SIGKILL), _)))
    }

    /// Readable when the process has ended; `None` once it was reaped.
    pub(super) fn pidfd(&self) -> Option<Arc<OwnedFd>> {
        lock(&self.life).pidfd.clone()
    }

    /// How it ended, once all its output is in the log.
    pub fn exit(&self) -> Option<Exit> {
        lock(&self.life).exit
    }

    /// What is held for its clients is charged to this ledger.
    pub(super) fn ledger(&self) -> &Arc<Ledger> {
        self.charge.ledger()
    }

    /// Bytes that a stream has carried so far.
    pub fn written(&self, stream: Stream) -> u64 {
        self.log.written(stream)
    }

    /// Bytes that both streams have carried so far.
    pub fn position(&self) -> u64 {
        self.log.position()
    }

    /// Looks at the output that is held. Its process waits meanwhile.
    pub fn look_at_output<T>(&self, look: impl FnOnce(&Ring) -> T) -> T {
        self.log.look(look)
    }

    /// When its last output came, in milliseconds since 1970.
    pub fn last_output_ms(&self) -> Option<u64> {
        self.log.last_time()
    }

    /// Appends to `buffer` this many bytes of a stream, the first of which is at a position. False if the log no
    /// longer holds them all.
    pub fn copy_output(
        &self,
        stream: Stream,
        position: u64,
        bytes: usize,
        buffer: &mut Vec<u8>,
    ) -> bool {
        self.log.copy(stream, position, bytes, buffer)
    }

    /// Its terminal.
    ///
    /// # Errors
    /// `NotPty` if it has none.
    pub fn terminal(&self) -> Result<&Terminal> {
        self.terminal.as_ref().ok_or_else(|| {
            let text = format!(
                "process {} has no terminal; start it with \"pty\":true for one",
                self.id
            );
            Error::new(Kind::NotPty, text)
        })
    }

    /// Sets the size of its terminal and wakes its followers.
    ///
    /// # Errors
    /// `NotPty`; `NotRunning` if it has ended.
    pub fn resize(&self, size: TerminalSize) -> Result<()> {
        if !self.terminal()?.set_size(size)? {
            let text = format!("cannot resize the terminal of {}: it has ended", self.id);
            return Err(Error::new(Kind::NotRunning, text));
        }
        self.notifier.notify();
        Ok(())
    }

    /// Sends a signal to its process group, or kills the whole tree if it is SIGKILL; false if the process
    /// has ended.
    ///
    /// # Errors
    /// The kernel refuses the signal.
    pub fn signal(self: &Arc<Self>, signal: i32) -> Result<bool> {
        if signal == libc::SIGKILL {
            let is_running = self.is_running();
            self.kill_tree(Reason::Killed);
            return Ok(is_running);
        }
        let mut life = lock(&self.life);
        if life.ending.is_some() {
            return Ok(false);
        }
        life.requested_signals |= bit(signal);
        sys::signal_group(self.pid, signal).map_err(|errno| {
            Error::system(format_args!("cannot signal process {}", self.id), errno)
        })?;
        Ok(true)
    }

    /// Sends a signal to the foreground group of its terminal; false if no process is there, or it has
    /// ended.
    ///
    /// # Errors
    /// `NotPty` if it has no terminal, or the kernel refuses the signal.
    pub fn signal_foreground(&self, signal: i32) -> Result<bool> {
        let terminal = self.terminal()?;
        // It is not reaped meanwhile, so its number is that of its session.
        let Some(held) = self.hold(&mut lock(&self.life)) else {
            return Ok(false);
        };
        let group = terminal.signal_foreground(self.pid, signal);
        if group == Ok(Some(self.pid)) {
            lock(&self.life).requested_signals |= bit(signal);
        }
        drop(held);
        let act = format_args!("cannot signal the foreground of process {}", self.id);
        let group = group.map_err(|errno| Error::system(act, errno))?;
        Ok(group.is_some())
    }

    /// Announces a signal that the caller sends by other means.
    pub(super) fn expect_signal(&self, signal: i32) {
        lock(&self.life).requested_signals |= bit(signal);
    }

    /// Announces a kill that the caller does by other means.
    pub(super) fn expect_kill(&self, reason: Reason) {
        lock(&self.life).kill_reason.get_or_insert(reason);
    }

    /// Kills it with all its descendants. False if it has ended, or if another thread is killing it
    /// already: exactly one caller gets true.
    pub fn kill_tree(self: &Arc<Self>, reason: Reason) -> bool {
        kill_trees(std::slice::from_ref(self), reason) > 0
    }

    /// Kills what it left behind when it ended.
    pub fn kill_left_behind(&self) {
        if let Some(hunt) = self.hunt_left_behind() {
            finish(hunt);
        }
    }

    /// The same, as a hunt that has not begun.
    pub(super) fn hunt_left_behind(&self) -> Option<Hunt> {
        self.origin.mark?;
        Some(Hunt::new(roots([self].into_iter())))
    }

    /// Kills tracers that hold up its end. A command that was killed ends whoever traces it; else only its
    /// own processes are meant.
    pub(super) fn kill_tracers(&self) {
        let (_held, was_killed) = {
            let mut life = lock(&self.life);
            let Some(held) = self.hold(&mut life) else {
                return;
            };
            (held, life.kill_reason.is_some())
        };
        let mark = self.origin.mark;
        tree::kill_tracers(self.pid, |tracer| {
            was_killed || (mark.is_some() && Mark::of(tracer) == mark)
        });
    }

    /// Holds off reaping; `None` if it has ended.
    fn hold(&self, life: &mut Life) -> Option<HeldProcess<'_>> {
        if life.ending.is_some() {
            return None;
        }
        life.killers += 1;
        Some(HeldProcess {
            process: self,
            is_killed: false,
        })
    }

    /// Stops its process group, which then forks no more while its descendants are searched, and holds
    /// off reaping. What is returned kills the group when it is dropped, and tells whether this is the first kill;
    /// `None` if it has ended.
    fn begin_kill(&self, reason: Reason) -> Option<(HeldProcess<'_>, bool)> {
        let mut life = lock(&self.life);
        let mut held = self.hold(&mut life)?;
        held.is_killed = true;
        let _ = sys::signal_group(self.pid, libc::SIGSTOP);
        let is_first = life.kill_reason.is_none();
        life.kill_reason.get_or_insert(reason);
        Some((held, is_first))
    }

    /// Counts one more client, as if it had started the process.
    pub fn join(&self) {
        lock(&self.life).clients += 1;
    }

    /// Counts one client less. The tree is killed when the last one leaves and none wanted to keep it.
    pub fn leave(self: &Arc<Self>, on_disconnect: OnDisconnect) {
        let is_unwanted = {
            let mut life = lock(&self.life);
            // A client whose leaving panicked leaves once more.
            life.clients = life.clients.saturating_sub(1);
            life.background |= on_disconnect == OnDisconnect::Keep;
            life.clients == 0 && !life.background
        };
        if is_unwanted {
            self.kill_tree(Reason::Disconnected);
        }
    }

    /// Adds what was read from a stream to the log and wakes its followers; returns the offset of the
    /// first byte.
    pub(super) fn append(&self, stream: Stream, data: &[u8]) -> u64 {
        let offset = self.log.append(stream, data);
        self.notifier.notify();
        offset
    }

    /// Who has sent a SIGKILL that this server does not know of.
    fn unasked_kill(&self) -> Reason {
        match self.kill_watch.as_ref().and_then(KillWatch::cause) {
            Some(MemoryKill::Limit) => Reason::MemoryLimit,
            Some(MemoryKill::Machine) => Reason::OutOfMemory,
            None if oom::killed_one() => Reason::OutOfMemory,
            None => Reason::Signaled,
        }
    }

    /// Makes the end known. The process was reaped and all its output is in the log. Returns what is still open of its
    /// stdin besides, to be closed when the end is known everywhere.
    pub(super) fn publish(&self) -> Option<(Exit, StdinSlot)> {
        let (ending, kill_reason, requested_signals) = {
            let life = lock(&self.life);
            (life.ending, life.kill_reason, life.requested_signals)
        };
        let (ending, ended) = ending?;
        let find_reason = || {
            fault::point("reason");
            if ending == Ending::Exited(128 + libc::SIGKILL) {
                // A shell reports a child that SIGKILL ended. If the OOM killer did it, this is its kill.
                oom::killed_one();
            }
            match (ending, kill_reason) {
                (Ending::Exited(_), _) => Reason::Exited,
                (Ending::Signaled(libc::SIGKILL), Some(reason)) => reason,
                (Ending::Signaled(signal), _) if requested_signals & bit(signal) != 0 => {
                    Reason::Killed
                }
                (Ending::Signaled(libc::SIGKILL), None) => self.unasked_kill(),
                (Ending::Signaled(_) | Ending::Unknown, _) => Reason::Signaled,
            }
        };
        // Whatever becomes of the reason, clients wait for the end.
        let reason = contain(find_reason).unwrap_or(match ending {
            Ending::Exited(_) => Reason::Exited,
            Ending::Signaled(_) | Ending::Unknown => Reason::Signaled,
        });
        let exit = Exit {
            ending,
            reason,
            duration: ended - self.started,
        };
        lock(&self.life).exit = Some(exit);
        let stdin = std::mem::replace(&mut *lock(&self.stdin), StdinSlot::Closed);
        if let Some(terminal) = &self.terminal {
            terminal.release_master();
        }
        self.notifier.notify();
        Some((exit, stdin))
    }
}

/// Its driver calls this, and the supervisor if the driver does not.
impl children::Command for Process {
    fn reap(&self) -> bool {
        let mut life = lock(&self.life);
        if life.killers > 0 {
            return false;
        }
        if let Some(pidfd) = &life.pidfd
            && let Some(ending) = children::reap(self.pid, pidfd.as_fd())
        {
            let now = Instant::now();
            life.ending = Some((ending, now));
            life.pidfd = None;
            self.log.set_ended(now);
        }
        life.ending.is_some()
    }
}

/// The bit of a signal in a mask of signals.
fn bit(signal: i32) -> u64 {
    1 << (signal & 63)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use super::super::logs::LogStore;
    use super::*;
    use crate::limits::ledger::{Budget, Item};

    /// The kernel may have given its number to another process.
    #[test]
    fn what_was_reaped_gets_no_signal() {
        let mut other = Command::new("cat");
        other.process_group(0);
        other.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut other = other.spawn().unwrap();
        let program = CommandLine::Program(vec!["true".to_owned()]);
        let spec = CommandSpec::new(program, Vec::new(), None).unwrap();
        let spawned = Spawned {
            pid: Pid::try_from(other.id()).unwrap(),
            pidfd: std::fs::File::open("/dev/null").unwrap().into(),
            listener: None,
        };
        let origin = Origin {
            mark: None,
            user: None,
            starter: 0,
            holder: None,
        };
        let store = Arc::new(LogStore::new(4096));
        let log = Log::new(&store, &Arc::default(), 4096);
        let charge = Budget::new(1 << 20).whole().charge(Item::Commands, 0);
        let started = (Instant::now(), 0);
        let id = "p-1".to_owned();
        let process = Process::new(id, &spec, spawned, started, origin, log, charge.unwrap());
        let process = Arc::new(process);
        {
            let mut life = lock(&process.life);
            life.ending = Some((Ending::Exited(0), Instant::now()));
            life.pidfd = None;
        }
        for signal in [libc::SIGTERM, libc::SIGKILL] {
            assert!(!process.signal(signal).unwrap());
        }
        assert!(!process.kill_tree(Reason::Timeout));
        process.kill_left_behind();
        // A signal would end it before it reads this.
        other.stdin.take().unwrap().write_all(b"lives").unwrap();
        let mut text = String::new();
        other
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "lives");
        assert!(other.wait().unwrap().success());
    }
}
