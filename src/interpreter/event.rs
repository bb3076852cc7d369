//! What happens in an execution, as values: each door writes them in its own form.

use std::sync::Arc;
use std::time::Duration;

use crate::codec::shortened;
use crate::limits::ledger::Charge;
use crate::process::ring::Stream;
use crate::sys::{Ending, Pid};

/// One event of an execution. Events are numbered from 0 without a gap.
#[derive(Clone)]
pub enum Event {
    /// It waits until this many others have ended.
    Queued {
        /// At least 1.
        position: usize,
    },
    /// It runs.
    Start(Start),
    /// Output: whole characters, unless the last ones of the execution are not.
    Output {
        /// Its stream.
        stream: Stream,
        /// Of the first byte, in the generation.
        offset: u64,
        /// Their number.
        bytes: usize,
    },
    /// A display or the result.
    Bundle(Arc<Bundle>),
    /// What was displayed is to be removed.
    Clear {
        /// Not before the next output.
        wait: bool,
    },
    /// The code asks for a line of input.
    Input {
        /// What to show the user.
        prompt: String,
        /// Whether the line is a secret.
        password: bool,
    },
    /// An exception ended the code.
    Error(Arc<CodeError>),
    /// Output beyond the limit of the execution was thrown away.
    Dropped {
        /// Its stream.
        stream: Stream,
        /// Bytes.
        bytes: u64,
    },
    /// The last event.
    End(End),
}

/// The beginning of an execution.
#[derive(Debug, Clone)]
pub struct Start {
    /// Its number in the generation, from 1.
    pub count: u64,
    /// How often the interpreter was started, from 1.
    pub generation: u64,
    /// Whether nothing ran in this generation before.
    pub is_fresh: bool,
    /// The interpreter's.
    pub pid: Pid,
    /// Bytes that each stream of the generation has carried before.
    pub offsets: [u64; 2],
}

/// A value in several forms.
pub struct Bundle {
    /// Whether it is the value of the last expression.
    pub is_main: bool,
    /// A JSON object of values by MIME type.
    pub data: String,
    /// A JSON object.
    pub metadata: String,
    /// Names the display, so that a later one can replace it.
    pub display_id: Option<String>,
    /// Whether it replaces the one with its id.
    pub is_update: bool,
    /// A JSON object: bytes that were left out, by MIME type.
    pub dropped: Option<String>,
    /// For its texts, until the last reader has them: the events of its execution may have dropped it before.
    pub charge: Charge,
}

impl Bundle {
    /// Bytes in memory, approximately.
    pub fn size(&self) -> usize {
        self.charge.bytes()
    }
}

/// An exception.
#[derive(Debug, PartialEq)]
pub struct CodeError {
    pub name: String,
    pub value: String,
    /// Lines.
    pub traceback: Vec<String>,
}

impl CodeError {
    /// Bytes in memory, approximately.
    pub fn size(&self) -> usize {
        let lines = self.traceback.iter().map(|line| line.len() + 32);
        self.name.len() + self.value.len() + lines.sum::<usize>()
    }

    /// The beginning of its texts.
    pub(super) fn shortened(&self) -> Self {
        let [name, value] =
            [&self.name, &self.value].map(|text| shortened(text, 1024).into_owned());
        Self {
            name,
            value,
            traceback: Vec::new(),
        }
    }
}

/// Why an execution ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReason {
    /// The code came to its end.
    Completed,
    /// By an exception, or an exit status that is not 0.
    Error,
    /// A client interrupted it.
    Interrupted,
    /// Its time was up.
    Timeout,
    /// Its client disconnected.
    Disconnected,
    /// The interpreter ended.
    Died,
    /// The kernel's OOM killer ended the interpreter.
    OutOfMemory,
    /// The sandbox was above its limit on memory.
    MemoryLimit,
    /// The context was restarted.
    Restarted,
    /// The context was deleted.
    Deleted,
    /// It was taken out of the queue.
    Cancelled,
    /// The context died before it ran.
    ContextDead,
}

impl EndReason {
    /// The word for clients.
    pub fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Error => "error",
            Self::Interrupted => "interrupted",
            Self::Timeout => "timeout",
            Self::Disconnected => "disconnected",
            Self::Died => "died",
            Self::OutOfMemory => "oom",
            Self::MemoryLimit => "memory_limit",
            Self::Restarted => "restarted",
            Self::Deleted => "deleted",
            Self::Cancelled => "cancelled",
            Self::ContextDead => "context_dead",
        }
    }
}

/// The end of an execution.
#[derive(Debug, Clone)]
pub struct End {
    pub reason: EndReason,
    /// Whether the next execution finds what this one left. False only if the interpreter has ended.
    pub is_kept: bool,
    /// The number of the execution; 0 if it never ran.
    pub count: u64,
    /// The exit status that the code asked for, or the end of the interpreter.
    pub ending: Option<Ending>,
    /// Whether its time was up, however it ended then.
    pub has_timed_out: bool,
    /// From its start.
    pub duration: Duration,
}
