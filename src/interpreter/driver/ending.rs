//! How executions and the interpreter end, and why.

use std::sync::Arc;
use std::time::Duration;

use super::{Driver, Fate, Stage, fail};
use crate::error::{Error, Kind};
use crate::interpreter::context::{Context, Phase, count_execution};
use crate::interpreter::event::{CodeError, End, EndReason, Event};
use crate::process::{Exit, Reason};
use crate::sys::Ending;

/// Most bytes of the last words of an interpreter that could not be started.
const LAST_WORDS: usize = 2048;

/// Between two SIGINTs: a storm of them overflows the stack of handlers.
const SIGNAL_PAUSE: Duration = Duration::from_millis(10);

impl Driver {
    /// Sends SIGINT for the execution that runs.
    pub(super) fn interrupt(&mut self, cause: EndReason, kill_after: Option<Duration>) {
        let now = self.clock().now();
        if let Stage::Running(running) = &mut self.stage {
            running.execution.disregard_clients();
            if running.cause.is_none() {
                // The code may not get to its end before what it has sent is read.
                self.unread_until = None;
            }
            if running.cause.is_none() || cause == EndReason::Timeout {
                running.cause = Some(cause);
            }
            let kill_at = kill_after.and_then(|after| now.checked_add(after));
            running.kill_at = running.kill_at.into_iter().chain(kill_at).min();
        }
        match self.signalled.map(|at| at + SIGNAL_PAUSE) {
            Some(at) if at > now => self.signal_at = Some(at),
            _ => self.signal(),
        }
    }

    pub(super) fn signal(&mut self) {
        self.signal_at = None;
        // The execution may have ended while the signal was due.
        if matches!(&self.stage, Stage::Running(running) if running.has_begun) {
            self.signalled = Some(self.clock().now());
            self.is_signalled = true;
            // It may have ended.
            let _ = self.process().signal(libc::SIGINT);
        }
    }

    /// Kills the interpreter with everything that it has started.
    pub(super) fn kill(&mut self, fate: Fate) {
        self.fate.get_or_insert(fate);
        let reason = match fate {
            Fate::Deleted => Reason::Deleted,
            Fate::Stopped(EndReason::Timeout) => Reason::Timeout,
            _ => Reason::Killed,
        };
        self.process().kill_tree(reason);
        self.pump.expect_end();
    }

    /// Ends the execution as the bridge says.
    pub(super) fn end_by_code(
        &mut self,
        error: Option<CodeError>,
        exit_code: Option<u8>,
        is_interrupted: bool,
    ) {
        let Stage::Running(running) = &self.stage else {
            return;
        };
        let reason = match (running.cause, &error) {
            (Some(EndReason::Timeout), _) => EndReason::Timeout,
            (Some(cause), Some(_)) => cause,
            (Some(cause), None) if is_interrupted => cause,
            (None, None) if is_interrupted => EndReason::Interrupted,
            (None, Some(_)) => EndReason::Error,
            (_, None) => EndReason::Completed,
        };
        let ending = exit_code.map(|code| Ending::Exited(code.into()));
        self.end_running(reason, true, ending, error);
        self.stage = Stage::Idle;
        if self.context.is_stateless() {
            self.kill(Fate::Deleted);
        }
    }

    fn end_running(
        &mut self,
        reason: EndReason,
        is_kept: bool,
        ending: Option<Ending>,
        error: Option<CodeError>,
    ) {
        let Stage::Running(running) = &self.stage else {
            return;
        };
        self.output.finish();
        let execution = Arc::clone(&running.execution);
        if let Some(error) = error {
            execution.append(Event::Error(Arc::new(error)));
        }
        let end = End {
            reason,
            is_kept,
            count: running.count,
            ending,
            has_timed_out: running.cause == Some(EndReason::Timeout),
            duration: running.started.elapsed(),
        };
        {
            let mut state = self.context.state_guard();
            state.running = None;
            state.asked = None;
        }
        self.signal_at = None;
        count_execution(running.started);
        // Whoever looks after the end of a stateless execution finds no context of it.
        if self.context.is_stateless()
            && let Some(home) = self.context.home.upgrade()
        {
            home.forget_ended(&self.context);
        }
        if execution.end(end) {
            self.context.site.activity.end();
        }
    }

    /// The interpreter has ended.
    pub(super) fn finish(mut self, exit: &Exit) {
        let why = self.why(exit);
        let reason = match (self.fate, exit.reason) {
            (Some(Fate::Stopped(reason)), _) => reason,
            (Some(Fate::Restarted), _) => EndReason::Restarted,
            (Some(Fate::Deleted), _) | (None, Reason::Deleted) => EndReason::Deleted,
            (None, Reason::OutOfMemory) => EndReason::OutOfMemory,
            (None, Reason::MemoryLimit) => EndReason::MemoryLimit,
            _ => EndReason::Died,
        };
        let error = match self.stage {
            Stage::Starting { .. } | Stage::Spare { .. } | Stage::Adopting { .. } => {
                let failure = self.failure.take();
                let is_ending = self.context.site.processes.is_closed();
                let ending =
                    is_ending.then(|| Error::new(Kind::ShuttingDown, "the sandbox is ending"));
                // The end of the sandbox ends whatever starts in it, in any of many ways.
                Some(ending.or(failure).unwrap_or_else(|| self.not_ready(&why)))
            }
            Stage::Idle | Stage::Running(_) => None,
        };
        // The end is not reported before nothing of it is left.
        self.pump.close_outputs();
        self.process().kill_left_behind();
        if matches!(self.stage, Stage::Running(_)) {
            // The state is lost for whoever looks at the context after the end.
            self.context.change(|state| {
                if !matches!(state.phase, Phase::Dead(..)) && !state.is_restarting() {
                    state.phase = Phase::Dead(why.clone(), None);
                }
            });
            self.end_running(reason, false, Some(exit.ending), None);
        }
        fail(&self.context, &why, error);
        if let Some(home) = self.context.home.upgrade() {
            home.forget_ended(&self.context);
        }
    }

    /// Why it has ended, in a few words.
    fn why(&self, exit: &Exit) -> String {
        match (self.fate, exit.reason, exit.ending) {
            (Some(Fate::Stopped(EndReason::Timeout)), ..) => {
                "its time was up, and the code went on after SIGINT".to_owned()
            }
            (Some(Fate::Stopped(_)), ..) => "the code went on after it was interrupted".to_owned(),
            (Some(Fate::Restarted), ..) => "it was restarted".to_owned(),
            (Some(Fate::Deleted), ..) | (None, Reason::Deleted, _) => "it was deleted".to_owned(),
            (Some(Fate::Unused), ..) => "nobody needed it".to_owned(),
            (Some(Fate::NotReady), ..) => "it was not ready in time".to_owned(),
            (Some(Fate::Broken), ..) => "its bridge was broken by the code".to_owned(),
            (None, Reason::OutOfMemory, _) => "the machine ran out of memory".to_owned(),
            (None, Reason::MemoryLimit, _) => {
                "the sandbox was above its limit on memory".to_owned()
            }
            (None, _, Ending::Exited(status)) => {
                format!("the interpreter exited with status {status}")
            }
            (None, _, Ending::Signaled(signal)) => {
                format!("signal {signal} ended the interpreter")
            }
            (None, _, Ending::Unknown) => "the interpreter ended".to_owned(),
        }
    }

    /// An interpreter that never was ready, with its last words.
    fn not_ready(&self, why: &str) -> Error {
        let words = self.process().last_words(LAST_WORDS);
        let language = self.context.language.name();
        let text = format!("cannot start {language}: {why}; it said: {words}");
        Error::new(Kind::KernelFailed, text)
    }
}

/// Says in a sentence that the interpreter is missing.
pub(super) fn explained(context: &Context, error: Error) -> Error {
    if error.kind() != Kind::ProgramNotFound {
        return error;
    }
    let (name, program) = (context.language.name(), context.language.program());
    Error::new(
        Kind::ProgramNotFound,
        format!("cannot start {name}: there is no {program} in PATH"),
    )
}
