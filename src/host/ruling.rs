//! Carries out the rules of sandboxes: what becomes of one that is left alone, whose time is over, or that has rested for
//! as long as the operator allows.
//!
//! The maintenance asks for each sandbox what is due, and deletes at once. To pause or to stop takes time, so threads do
//! it. Whoever changes the sandbox asks again when nobody else does, so that a rule does nothing that is no longer due. A sandbox
//! that does not let itself be paused is stopped: a rule that can be defeated is none.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::life::{By, Ruling, Why};
use super::standing::SandboxState;
use super::{Host, Sandbox};
use crate::error::Kind;
use crate::logging;
use crate::spec::sandbox::{Fate, StopCause};
use crate::threads::Thread;
use crate::threads::lock::lock;
use crate::threads::panics::contain;

/// Most threads that carry out rules at once: one sandbox that is hard to end does not hold up the others.
const MAX_THREADS: usize = 8;

/// How long a rule that could not be carried out waits, so that those of other sandboxes have the threads.
const FAILURE_PAUSE: Duration = Duration::from_secs(60);

/// What a thread does with a sandbox.
#[derive(Debug, Clone, Copy)]
pub(super) enum Task {
    /// Pauses or stops it.
    Rule(Ruling),
    /// Stops again what a signal of the sandbox's own has let go on.
    KeepStill,
}

/// How long a sandbox may rest; `None` for as long as it takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Bounds {
    /// Paused, until it is stopped.
    pub(super) paused: Option<Duration>,
    /// Stopped, until it is deleted.
    pub(super) stopped: Option<Duration>,
}

impl Sandbox {
    /// What a rule wants of it now.
    pub(super) fn due(&self, bounds: Bounds) -> Option<Ruling> {
        let ruling = |fate, why| Some(Ruling { fate, why });
        let rules = self.rules();
        if self.has_expired() {
            return ruling(rules.on_expiry, Why::Over);
        }
        let has_rested =
            |most: Option<Duration>| most.is_some_and(|most| self.pausing.lasts() >= most);
        let is_idle = || {
            let idle = self.workspace.idle_for(rules.idle_by());
            let limit = rules.idle_timeout;
            limit.is_some_and(|limit| idle.is_some_and(|idle| idle >= limit))
        };
        match self.state().0 {
            SandboxState::Running if is_idle() => ruling(rules.on_idle, Why::Idle),
            SandboxState::Paused if has_rested(bounds.paused) => ruling(Fate::Stop, Why::Rested),
            SandboxState::Stopped if has_rested(bounds.stopped) => {
                ruling(Fate::Delete, Why::Rested)
            }
            // Nobody has it rest, so it is as idle as one that runs.
            SandboxState::Stopped if self.was_stopped_by_accident() && is_idle() => {
                ruling(rules.on_idle, Why::Idle).filter(|ruling| ruling.fate == Fate::Delete)
            }
            _ => None,
        }
    }

    fn was_stopped_by_accident(&self) -> bool {
        self.phase.stopped.is_some_and(StopCause::is_accident) && !self.rests()
    }

    /// Ends its workspace for a rule that wants it deleted, if that is due still. Call it under the lock of the table.
    pub(super) fn close_if_due(&self, bounds: Bounds) -> bool {
        let rules = self.rules();
        match self.due(bounds) {
            Some(Ruling {
                fate: Fate::Delete,
                why: Why::Idle,
            }) => {
                let limit = rules.idle_timeout.unwrap_or(Duration::MAX);
                self.workspace.close_if_idle(rules.idle_by(), limit)
            }
            Some(ruling) => ruling.fate == Fate::Delete,
            None => false,
        }
    }
}

impl Host {
    /// Whether this is what somebody wants who has a sandbox rest: a rule may want it no longer.
    pub(super) fn is_wanted(&self, sandbox: &Sandbox, by: By) -> bool {
        match by {
            By::Tenant | By::Host { .. } => true,
            By::Rule(ruling) => sandbox.due(self.bounds) == Some(ruling),
        }
    }

    /// Does this with a sandbox, in a thread of its own. Later, if there are too many.
    pub(super) fn do_in_background(self: &Arc<Self>, sandbox: &Arc<Sandbox>, task: Task) {
        let now = Instant::now();
        let mut own = lock(&sandbox.turn);
        let is_early = own.not_before.is_some_and(|time| now < time);
        if own.is_taken || (is_early && matches!(task, Task::Rule(_))) {
            return;
        }
        own.is_taken = true;
        drop(own);
        let running = self.ruling.fetch_add(1, Ordering::AcqRel);
        let turn = TakenTurn {
            host: Arc::clone(self),
            sandbox: Arc::clone(sandbox),
        };
        if running >= MAX_THREADS {
            return;
        }
        // Without a thread the next round of the maintenance tries again.
        let _ = Thread::new("rules").start(move || {
            let (host, sandbox) = (&turn.host, &turn.sandbox);
            let is_done = contain(|| match task {
                Task::Rule(ruling) => host.rule(&sandbox.id, ruling),
                Task::KeepStill => {
                    host.keep_still(&sandbox.id);
                    true
                }
            });
            let failed_at = (!is_done.unwrap_or(false)).then(Instant::now);
            lock(&sandbox.turn).not_before = failed_at.map(|time| time + FAILURE_PAUSE);
        });
    }

    /// Whether a rule was carried out, or is no longer wanted.
    fn rule(&self, id: &str, ruling: Ruling) -> bool {
        let by = By::Rule(ruling);
        let done = match ruling.fate {
            Fate::Pause => match self.pause(id, by) {
                Err(error) if error.kind() == Kind::Busy => {
                    logging::info(format_args!("{error}; it is stopped instead"));
                    self.stop(id, by)
                }
                other => other,
            },
            Fate::Stop | Fate::Delete => self.stop(id, by),
        };
        match done {
            Err(error) if error.kind() != Kind::NotFound => {
                logging::info(format_args!("sandbox {id}: {error}"));
                false
            }
            _ => true,
        }
    }
}

/// A task that is being carried out, until this is dropped.
struct TakenTurn {
    host: Arc<Host>,
    sandbox: Arc<Sandbox>,
}

impl Drop for TakenTurn {
    fn drop(&mut self) {
        lock(&self.sandbox.turn).is_taken = false;
        self.host.ruling.fetch_sub(1, Ordering::AcqRel);
    }
}
