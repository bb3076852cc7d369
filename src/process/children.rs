//! The server's children: which of them are commands, and an end for the others.
//!
//! Orphans become children of the server unless it has an init, and a command without a filter can make
//! more by clone(2) with `CLONE_PARENT`. When they end, they must be reaped: a zombie keeps its pid and
//! its user for ever.
//!
//! A command must never be reaped here, because its driver waits for it. Three facts keep them apart:
//!
//! - A child between clone and execve has no exit signal, so waiting for any child does not find it
//!   (wait(2), `__WALL`). execve gives it the usual one.
//! - It stores its pid in its [`Start`] before it calls execve, and the start stays listed until the
//!   command is. So every command that can be found is known.
//! - Looking for a child, comparing it with those that are known, and reaping it happen under one lock.
//!   Drivers take the same lock to reap a command and to forget its pid, so a known pid is never that of
//!   another child.

use std::collections::{HashMap, HashSet};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, LazyLock, Weak};

use nix::errno::Errno;

use super::start::Start;
use crate::confine::Mark;
use crate::sys::{self, Ending, Pid};
use crate::threads::lock::{Mutex, lock};

/// A command that was started.
pub(super) trait Command: Send + Sync {
    /// Reaps it if it has ended, and returns whether it has.
    fn reap(&self) -> bool;
}

/// A command until it is reaped.
struct Running {
    mark: Option<Mark>,
    command: Weak<dyn Command>,
}

#[derive(Default)]
struct Commands {
    starts: Vec<Arc<Start>>,
    /// By pid.
    running: HashMap<Pid, Running>,
}

impl Commands {
    fn is_known(&self, pid: Pid) -> bool {
        self.running.contains_key(&pid) || self.starts.iter().any(|start| start.pid() == Some(pid))
    }
}

static COMMANDS: LazyLock<Mutex<Commands>> = LazyLock::new(Mutex::default);

/// Lists a start. Every start is listed before its child exists.
pub(super) fn list_start(start: &Arc<Start>) {
    lock(&COMMANDS).starts.push(Arc::clone(start));
}

/// Ends a start, with the command if it was started.
pub(super) fn end_start(
    start: &Arc<Start>,
    started: Option<(Pid, Option<Mark>, Weak<dyn Command>)>,
) {
    let mut commands = lock(&COMMANDS);
    if let Some((pid, mark, command)) = started {
        commands.running.insert(pid, Running { mark, command });
    }
    commands.starts.retain(|other| !Arc::ptr_eq(other, start));
}

/// Reaps a command that has ended; `None` if it cannot be reaped yet.
pub(super) fn reap(pid: Pid, pidfd: BorrowedFd<'_>) -> Option<Ending> {
    let mut commands = lock(&COMMANDS);
    // An error means that it was reaped elsewhere. Waiting on would never end.
    let ending = sys::wait(pidfd, false).unwrap_or(Some(Ending::Unknown))?;
    commands.running.remove(&pid);
    Some(ending)
}

/// So many are reaped under one hold of the lock: threads of a program can be traced by the server and end as fast as it reaps
/// them, and commands that begin or end wait for the lock.
const REAPED_AT_ONCE: usize = 64;

/// What was found of the children that have ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Others {
    /// All that are no commands were reaped.
    Reaped,
    /// There may be more.
    Left,
    /// This command has ended and hides others: call again when it was reaped.
    Hidden(Pid),
}

/// Reaps children that are no commands and have ended.
pub(super) fn reap_others() -> Others {
    if cfg!(test) {
        // The children of a test program are its tests', each of which waits for its own.
        return Others::Reaped;
    }
    let commands = lock(&COMMANDS);
    for _ in 0..REAPED_AT_ONCE {
        match sys::ended_child() {
            Ok(Some(pid)) if commands.is_known(pid) => return Others::Hidden(pid),
            Ok(Some(pid)) => sys::reap(pid),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Ok(None) | Err(_) => return Others::Reaped,
        }
    }
    Others::Left
}

/// Reaps a command whose driver does not. False if it cannot be reaped yet.
pub(super) fn reap_for_driver(pid: Pid) -> bool {
    let command = {
        let commands = lock(&COMMANDS);
        let running = commands.running.get(&pid);
        running.and_then(|running| running.command.upgrade())
    };
    command.is_some_and(|command| command.reap())
}

/// The pids of commands, being started or not reaped yet.
pub(super) fn commands() -> HashSet<Pid> {
    let commands = lock(&COMMANDS);
    let starting = commands.starts.iter().filter_map(|start| start.pid());
    starting.chain(commands.running.keys().copied()).collect()
}

/// The marks of the commands that were not reaped yet.
pub(super) fn marks() -> HashSet<Mark> {
    let mut marks = HashSet::new();
    let commands = lock(&COMMANDS);
    marks.extend(commands.running.values().filter_map(|running| running.mark));
    drop(commands);
    marks
}
