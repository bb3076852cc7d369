//! Pauses sandboxes: all processes are stopped, kept in memory, and go on later.
//!
//! The freezer of the sandbox's cgroup stops them where there is one, else signals do ([`Standstill`]). Meanwhile no
//! command starts, and the time of the workspace stands still: deadlines of commands and contexts, and idle time. Files
//! can be used, processes be killed, and the sandbox be deleted.
//!
//! A pause that fails leaves everything running. While processes are being stopped the sandbox is not deleted, so that no signal meets
//! the next sandbox of its user: a deletion calls the pause off and comes after it.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::life::{By, Waker};
use super::phases::Change;
use super::standing::{SandboxState, Still};
use super::{Host, Sandbox, log_of, stopped};
use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::process::{Kept, Standstill, users_that_move};
use crate::threads::lock::{Mutex, lock};

/// How long stopping may take.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// How long processes that do not stand still may take to be stopped again.
const KEEPING_LIMIT: Duration = Duration::from_millis(500);

/// The pauses between two looks at processes that do not stand still: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_micros(50);
const MAX_PAUSE: Duration = Duration::from_millis(10);

impl Host {
    /// Stops all processes of a sandbox. One that is paused is left as it is, and so is one of which a rule wants that no
    /// longer. Returns whether it was paused by this.
    ///
    /// # Errors
    /// `NotFound`, even if it is deleted meanwhile. `Busy` if not all can be stopped in time, and `NoSpace` if that it is held
    /// cannot be written down; all go on then. `Stopped` if it has no processes. `ShuttingDown`.
    pub fn pause(&self, id: &str, by: By) -> Result<(Arc<Sandbox>, bool)> {
        let is_due = |sandbox: &Sandbox| match sandbox.state().0 {
            SandboxState::Stopped if !matches!(by, By::Rule(_)) => Err(stopped(id)),
            SandboxState::Running => Ok(self.is_wanted(sandbox, by)),
            SandboxState::Paused | SandboxState::Stopped => {
                Ok(sandbox.may_rest_more(by) && self.is_wanted(sandbox, by))
            }
        };
        let change = match self.begin_change(id, by == By::Tenant, &is_due)? {
            Ok(change) => change,
            Err(unchanged) => return Ok((unchanged, false)),
        };
        let sandbox = &change.sandbox;
        let pauses = sandbox.state().0 == SandboxState::Running;
        if pauses {
            let begun = Instant::now();
            let mut standstill = Beginning {
                host: self,
                sandbox,
                still: None,
                is_done: false,
            };
            standstill.stop(begun + STOP_LIMIT)?;
            self.note_rest(sandbox, by)?;
            standstill.is_done = true;
            sandbox.pausing.set(standstill.still.take());
            log_of(
                id,
                format_args!("paused, in {} us", begun.elapsed().as_micros()),
            );
        } else {
            self.note_rest(sandbox, by)?;
        }
        Ok((Arc::clone(sandbox), pauses))
    }

    /// Lets all processes of a paused sandbox go on.
    pub(super) fn let_go_on(&self, change: &Change<'_>, waker: Waker) -> Arc<Sandbox> {
        let sandbox = &change.sandbox;
        let begun = Instant::now();
        let still = sandbox.pausing.still();
        drop(Beginning {
            host: self,
            sandbox,
            still,
            is_done: false,
        });
        sandbox.pausing.set(None);
        sandbox.end_rest(waker);
        self.write_down_if_possible(sandbox);
        let id = &sandbox.id;
        log_of(
            id,
            format_args!("resumed, in {} us", begun.elapsed().as_micros()),
        );
        Arc::clone(sandbox)
    }
}

impl Host {
    /// Stops again what moves in a paused sandbox. What does so again and again is killed.
    pub(super) fn keep_still(&self, id: &str) {
        let is_due = |sandbox: &Sandbox| Ok(sandbox.pausing.is_by_signals());
        let Ok(Ok(change)) = self.begin_change(id, false, &is_due) else {
            return;
        };
        let sandbox = &change.sandbox;
        let Some(Still::Stopped(standstill)) = sandbox.pausing.still() else {
            return;
        };
        let deadline = Instant::now() + KEEPING_LIMIT;
        let is_other = |uid| is_other(self, sandbox, uid);
        let signal_all = |signal| self.signaller.signal_sandbox(sandbox, signal);
        let mut standstill = lock(&standstill);
        let kept = standstill.keep(is_other, signal_all, deadline);
        let what = match kept {
            Kept::Calm => return,
            Kept::Stopped => "moved while it was paused, and was stopped again",
            Kept::Killed => {
                "does not stand still while it is paused: the processes that move were killed"
            }
            Kept::Restless => {
                signal_all(libc::SIGKILL);
                "does not let itself be kept still: all its processes were killed"
            }
        };
        log_of(id, format_args!("{what}"));
    }
}

/// Processes that are being stopped, or were. When this is dropped, by a failure or a panic too, they go on.
struct Beginning<'a> {
    host: &'a Host,
    sandbox: &'a Arc<Sandbox>,
    /// What was stopped so far.
    still: Option<Still>,
    /// Whether all stands still, and stays so.
    is_done: bool,
}

impl Beginning<'_> {
    fn stop(&mut self, deadline: Instant) -> Result<()> {
        let workspace = &self.sandbox.workspace;
        let left = deadline.saturating_duration_since(Instant::now());
        if !workspace.processes.refuse_starts(left) {
            return Err(self.busy("a command is being started and takes long"));
        }
        workspace.clock().stop();
        fault::point("pausing");
        if self.sandbox.limits.freeze() {
            self.still = Some(Still::Frozen);
        } else {
            self.still = Some(Still::Stopped(Arc::new(Mutex::new(Standstill::new(
                self.sandbox.user,
            )))));
        }
        let mut pause = FIRST_PAUSE;
        while !self.stands_still(deadline)? {
            if Instant::now() >= deadline {
                return Err(self.busy("its processes do not stop, or start others all the time"));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(MAX_PAUSE);
        }
        Ok(())
    }

    /// Has what moves stopped. Returns whether all processes stand still.
    fn stands_still(&mut self, deadline: Instant) -> Result<bool> {
        let (host, sandbox) = (self.host, self.sandbox);
        host.check_not_called_off(&sandbox.id)?;
        match &mut self.still {
            Some(Still::Stopped(standstill)) => {
                let stop_all = || host.signaller.signal_sandbox(sandbox, libc::SIGSTOP);
                let mut standstill = lock(standstill);
                Ok(standstill.stop(|uid| is_other(host, sandbox, uid), stop_all, deadline))
            }
            Some(Still::Frozen) | None => Ok(sandbox.limits.is_frozen()),
        }
    }

    fn busy(&self, why: &str) -> Error {
        let id = &self.sandbox.id;
        let text = format!("cannot pause sandbox {id}: {why}; all of it runs on; try again");
        Error::new(Kind::Busy, text)
    }
}

impl Drop for Beginning<'_> {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        let (host, sandbox) = (self.host, self.sandbox);
        match self.still.take() {
            Some(Still::Frozen) => sandbox.limits.thaw(),
            Some(Still::Stopped(standstill)) => {
                lock(&standstill).go_on(|uid| is_other(host, sandbox, uid));
            }
            None => {}
        }
        sandbox.workspace.clock().go_on();
        sandbox.workspace.processes.allow_starts();
    }
}

/// Whether a uid is another sandbox's.
fn is_other(host: &Host, sandbox: &Sandbox, uid: u32) -> bool {
    uid != sandbox.user.uid && host.users.contains(&uid)
}

/// Those of these sandboxes that are paused by signals and do not stand still: a process may have itself sent SIGCONT by a
/// timer, and the end of a process can have the kernel send it.
pub(super) fn restless(all: &[Arc<Sandbox>]) -> Vec<&Arc<Sandbox>> {
    let kept = all.iter().filter(|sandbox| sandbox.pausing.is_by_signals());
    let kept: HashMap<u32, _> = kept.map(|sandbox| (sandbox.user.uid, sandbox)).collect();
    if kept.is_empty() {
        return Vec::new();
    }
    let moving = users_that_move(|uid| kept.contains_key(&uid));
    let restless = moving.iter().filter_map(|uid| kept.get(uid).copied());
    restless.collect()
}
