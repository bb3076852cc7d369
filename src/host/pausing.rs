//! Pauses sandboxes: all processes are stopped, kept in memory, and go on later.
//!
//! The freezer of the sandbox's cgroup stops them where there is one, else signals do ([`Standstill`]). Meanwhile no
//! command starts, and the time of the workspace stands still: deadlines of commands and contexts, and idle time. Files
//! can be used, processes be killed, and the sandbox be deleted.
//!
//! A pause that fails leaves everything running.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::{Host, Sandbox, stopped, unknown};
use crate::clock::now_ms;
use crate::error::{Error, Kind, Result};
use crate::process::Standstill;
use crate::threads::lock::{Condvar, Mutex, lock};
use crate::workspace::Lease;
use crate::{fault, logging};

/// How long stopping may take.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// The pauses between two looks at processes that do not stand still: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_micros(50);
const MAX_PAUSE: Duration = Duration::from_millis(10);

/// What the processes of a sandbox do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SandboxState {
    Running,
    /// They stand still, in memory.
    Paused,
    /// There are none.
    Stopped,
}

impl SandboxState {
    /// The word for programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
        }
    }
}

/// The answer to a request for a change.
enum Begun {
    /// The caller changes the state; this stands still.
    Changing(Option<Still>),
    /// It is as wanted.
    Unchanged,
    /// The run is over: the sandbox has another phase, or is about to.
    Over,
}

/// The state of a sandbox while it runs, which one request at a time changes.
pub(super) struct Pausing {
    current: Mutex<Current>,
    /// Notified when a change has ended, successful or not.
    changed: Condvar,
}

struct Current {
    /// What stands still; `None` while the sandbox runs.
    still: Option<Still>,
    /// Milliseconds since 1970.
    since_ms: u64,
    is_changing: bool,
    is_over: bool,
}

/// What keeps processes from running.
enum Still {
    /// The freezer of the cgroup.
    Frozen,
    /// They were sent SIGSTOP.
    Stopped(Standstill),
}

impl Current {
    fn state(&self) -> SandboxState {
        match self.still {
            None => SandboxState::Running,
            Some(_) => SandboxState::Paused,
        }
    }
}

impl Pausing {
    /// A sandbox that was just made.
    pub(super) fn new(created_at_ms: u64) -> Self {
        Self {
            current: Mutex::new(Current {
                still: None,
                since_ms: created_at_ms,
                is_changing: false,
                is_over: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Waits for the end of a change, and begins the next one.
    fn begin(&self, wanted: SandboxState) -> Begun {
        let is_changing = |current: &mut Current| current.is_changing;
        let mut current = self.changed.wait_while(lock(&self.current), is_changing);
        if current.is_over {
            return Begun::Over;
        }
        if current.state() == wanted {
            return Begun::Unchanged;
        }
        current.is_changing = true;
        Begun::Changing(current.still.take())
    }

    /// Waits for the end of a change, and lets no other begin. Returns whether the sandbox is paused.
    pub(super) fn end_run(&self) -> bool {
        let is_changing = |current: &mut Current| current.is_changing;
        let mut current = self.changed.wait_while(lock(&self.current), is_changing);
        current.is_over = true;
        current.still.is_some()
    }
}

impl Sandbox {
    /// What its processes do, and since when in milliseconds since 1970.
    pub fn state(&self) -> (SandboxState, u64) {
        if self.phase.stopped.is_some() {
            return (SandboxState::Stopped, self.phase.since_ms);
        }
        let current = lock(&self.pausing.current);
        (current.state(), current.since_ms)
    }

    /// Lets go on what a frozen cgroup holds, so that it handles signals.
    pub(super) fn thaw(&self) {
        self.limits.thaw();
    }
}

impl Host {
    /// Stops all processes of a sandbox. One that is paused is left as it is.
    ///
    /// # Errors
    /// `NotFound`, even if it is deleted meanwhile. `Busy` if not all can be stopped in time; all go on then. `Stopped` if it
    /// has no processes.
    pub fn pause(&self, id: &str) -> Result<Arc<Sandbox>> {
        let (sandbox, _lease) = self.running(id)?;
        match sandbox.pausing.begin(SandboxState::Paused) {
            Begun::Changing(_) => {}
            Begun::Unchanged => return Ok(sandbox),
            Begun::Over => return Err(stopped(id)),
        }
        let begun = Instant::now();
        let mut change = Change {
            host: self,
            sandbox: &sandbox,
            still: None,
            before: SandboxState::Running,
            result: SandboxState::Running,
        };
        change.stop(begun + STOP_LIMIT)?;
        change.result = SandboxState::Paused;
        drop(change);
        logging::info(format_args!(
            "sandbox {id} paused, in {} us",
            begun.elapsed().as_micros()
        ));
        Ok(sandbox)
    }

    /// Lets all processes of a sandbox go on. One that runs is left as it is.
    ///
    /// # Errors
    /// `NotFound`, even if it is deleted meanwhile; `Stopped` if it has none.
    pub(super) fn let_go_on(&self, id: &str) -> Result<Arc<Sandbox>> {
        let (sandbox, _lease) = self.running(id)?;
        let still = match sandbox.pausing.begin(SandboxState::Running) {
            Begun::Changing(still) => still,
            Begun::Unchanged => return Ok(sandbox),
            Begun::Over => return Err(stopped(id)),
        };
        let begun = Instant::now();
        drop(Change {
            host: self,
            sandbox: &sandbox,
            still,
            before: SandboxState::Paused,
            result: SandboxState::Running,
        });
        if sandbox.workspace.is_closed() {
            return Err(unknown(id));
        }
        logging::info(format_args!(
            "sandbox {id} resumed, in {} us",
            begun.elapsed().as_micros()
        ));
        Ok(sandbox)
    }
}

impl Host {
    /// A sandbox that runs, or is paused.
    fn running(&self, id: &str) -> Result<(Arc<Sandbox>, Lease)> {
        let sandbox = self.settled(id)?;
        if sandbox.phase.stopped.is_some() {
            return Err(stopped(id));
        }
        let lease = sandbox.workspace.lease().map_err(|_| unknown(id))?;
        Ok((sandbox, lease))
    }
}

/// A change of the state that has begun. When this is dropped, by a failure or a panic too, the sandbox is paused or
/// runs, and others can change it.
struct Change<'a> {
    host: &'a Host,
    sandbox: &'a Arc<Sandbox>,
    /// What was stopped so far.
    still: Option<Still>,
    before: SandboxState,
    result: SandboxState,
}

impl Change<'_> {
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
            self.still = Some(Still::Stopped(Standstill::new(self.sandbox.user)));
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
        match &mut self.still {
            Some(Still::Stopped(standstill)) => {
                // Its user may soon be another sandbox's.
                let is_ending = lock(&sandbox.is_ending);
                if is_ending.0 || sandbox.workspace.is_closed() {
                    return Err(unknown(&sandbox.id));
                }
                let stop_all = || host.signaller.signal(sandbox.user, libc::SIGSTOP);
                Ok(standstill.stop(|uid| is_other(host, sandbox, uid), stop_all, deadline))
            }
            Some(Still::Frozen) if sandbox.workspace.is_closed() => Err(unknown(&sandbox.id)),
            Some(Still::Frozen) | None => Ok(sandbox.limits.is_frozen()),
        }
    }

    fn busy(&self, why: &str) -> Error {
        let id = &self.sandbox.id;
        let text = format!("cannot pause sandbox {id}: {why}; all of it runs on; try again");
        Error::new(Kind::Busy, text)
    }

    fn go_on(&mut self) {
        let (host, sandbox) = (self.host, self.sandbox);
        match self.still.take() {
            Some(Still::Frozen) => sandbox.limits.thaw(),
            Some(Still::Stopped(mut standstill)) => {
                let is_ending = lock(&sandbox.is_ending);
                if !is_ending.0 {
                    standstill.go_on(|uid| is_other(host, sandbox, uid));
                }
            }
            None => {}
        }
        sandbox.workspace.clock().go_on();
        sandbox.workspace.processes.allow_starts();
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        if self.result == SandboxState::Running {
            self.go_on();
        }
        let pausing = &self.sandbox.pausing;
        let mut current = lock(&pausing.current);
        current.still = self.still.take();
        if self.result != self.before {
            current.since_ms = now_ms();
        }
        current.is_changing = false;
        drop(current);
        pausing.changed.notify_all();
    }
}

/// Whether a uid is another sandbox's.
fn is_other(host: &Host, sandbox: &Sandbox, uid: u32) -> bool {
    uid != sandbox.user.uid && host.users.contains(&uid)
}
