//! The terminal of a process: its size, its foreground group, and how many a workspace may have.
//!
//! What a terminal shows is the process's stdout, and what is typed goes through its stdin: see `pump`
//! and `stdin`. A process keeps its terminal as long as it runs. Nothing here knows the process: who signals
//! the foreground says which session that is, and keeps its leader from being reaped meanwhile.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;

use super::shares::{OpenCount, OpenShare};
use super::stdio::NO_TERMINAL;
use crate::error::{Error, Kind, Result};
use crate::spec::command::{TerminalSize, TerminalSpec};
use crate::sys::{self, Pid, proc};
use crate::threads::lock::{Mutex, lock};

/// The terminal of a process.
pub struct Terminal {
    spec: TerminalSpec,
    /// How often a viewer has taken the input over from all others.
    takeovers: AtomicU64,
    state: Mutex<TerminalState>,
}

struct TerminalState {
    /// `None` once the process has ended.
    master: Option<Arc<OwnedFd>>,
    /// As it was set last by a client. A program may set another.
    size: TerminalSize,
}

impl Terminal {
    pub(super) fn new(spec: TerminalSpec, master: Arc<OwnedFd>) -> Self {
        let size = spec.size;
        let state = TerminalState {
            master: Some(master),
            size,
        };
        Self {
            spec,
            takeovers: AtomicU64::new(0),
            state: Mutex::new(state),
        }
    }

    /// Its type, as in `TERM`.
    pub fn name(&self) -> &str {
        self.spec.name()
    }

    /// The size that a client set last. A follower that compares it with the one that it knows, whenever
    /// it is woken up, learns of every resize by another client.
    pub fn size(&self) -> TerminalSize {
        lock(&self.state).size
    }

    /// How often a viewer has taken the input over. Only those who joined after the last one may type.
    pub(super) fn takeovers(&self) -> u64 {
        self.takeovers.load(Ordering::Relaxed)
    }

    /// Takes the input over and returns the new count.
    pub(super) fn take_over(&self) -> u64 {
        self.takeovers.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Closed once nothing else uses it.
    pub(super) fn release_master(&self) {
        lock(&self.state).master = None;
    }

    /// Sets the size, which sends SIGWINCH to the foreground group. False if the process has ended.
    pub(super) fn set_size(&self, size: TerminalSize) -> Result<bool> {
        let mut state = lock(&self.state);
        let Some(master) = &state.master else {
            return Ok(false);
        };
        sys::set_terminal_size(master.as_fd(), size.rows(), size.columns())
            .map_err(|errno| Error::system("cannot resize the terminal", errno))?;
        state.size = size;
        Ok(true)
    }

    /// The character that ends a program's input. `^D` if the terminal has none, because programs that
    /// read single characters take that.
    pub fn end_of_file_character(&self) -> u8 {
        const CONTROL_D: u8 = 4;
        let master = lock(&self.state).master.clone();
        let character = master.and_then(|master| sys::end_of_file_character(master.as_fd()).ok());
        character.flatten().unwrap_or(CONTROL_D)
    }

    /// Sends a signal to the foreground group of the session that `leader` leads, which is not reaped
    /// meanwhile. Returns the group, or `None` if no process is in the foreground.
    pub(super) fn signal_foreground(&self, leader: Pid, signal: i32) -> nix::Result<Option<Pid>> {
        let Some(master) = lock(&self.state).master.clone() else {
            return Ok(None);
        };
        let Some(group) = sys::foreground_group(master.as_fd())? else {
            return Ok(None);
        };
        match sys::signal_from_terminal(master.as_fd(), signal) {
            Ok(()) => return Ok(Some(group)),
            Err(Errno::EINVAL | Errno::ENOTTY) => {}
            Err(errno) => return Err(errno),
        }
        // The terminal remembers the number of a group that has ended, which may be another sandbox's
        // by now.
        if group != leader && !proc::is_group_in_session(group, leader) {
            return Ok(None);
        }
        match sys::signal_group(group, signal) {
            Ok(()) => Ok(Some(group)),
            Err(Errno::ESRCH) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

/// The use of all terminals.
#[derive(Clone, Copy)]
pub struct TerminalUse {
    /// Terminals of running processes.
    pub open: u64,
    /// Clients that are attached.
    pub viewers: u64,
    /// Bytes of output that were read for them, since the start.
    pub sent_bytes: u64,
    /// Bytes that they have typed, since the start.
    pub typed_bytes: u64,
}

pub(super) static OPEN: AtomicU64 = AtomicU64::new(0);
pub(super) static VIEWERS: AtomicU64 = AtomicU64::new(0);
pub(super) static SENT_BYTES: AtomicU64 = AtomicU64::new(0);
pub(super) static TYPED_BYTES: AtomicU64 = AtomicU64::new(0);

/// The present use of all terminals.
pub fn terminal_use() -> TerminalUse {
    let [open, viewers, sent_bytes, typed_bytes] =
        [&OPEN, &VIEWERS, &SENT_BYTES, &TYPED_BYTES].map(|count| count.load(Ordering::Relaxed));
    TerminalUse {
        open,
        viewers,
        sent_bytes,
        typed_bytes,
    }
}

/// Counts one more terminal of a workspace. It may have as many as are left on the machine, so that none takes more than
/// half of them this way. What its commands open by themselves (`/dev/ptmx`) is not counted.
///
/// # Errors
/// `OverLimit`; `NoTerminals` if none is left.
pub(super) fn share_terminals(open: &OpenCount) -> Result<OpenShare> {
    let (share, own) = open.add();
    match free_terminals() {
        Some(0) => {
            let text = format!("{NO_TERMINAL}: all of the machine are in use");
            Err(Error::new(Kind::NoTerminals, text))
        }
        Some(free) if own > free => {
            let text = format!(
                "{NO_TERMINAL}: {} are open here and the machine has {free} more; end processes that have one",
                own - 1
            );
            Err(Error::new(Kind::OverLimit, text))
        }
        _ => Ok(share),
    }
}

/// The terminals that can still be opened on this machine (pty(7)); `None` if /proc does not tell. Those
/// that the kernel reserves for the first mount of devpts do not count.
fn free_terminals() -> Option<u64> {
    let number = |name| proc::number_in(&format!("/proc/sys/kernel/pty/{name}"));
    let most = number("max")?.saturating_sub(number("reserve").unwrap_or(0));
    Some(most.saturating_sub(number("nr")?))
}
