//! Being PID 1: reaping what nobody waits for, and ending everything when told to.
//!
//! The program splits in two before it has a second thread. The parent stays PID 1 (or the
//! subreaper, with `--init`) and does nothing but reap; the child is the server. So orphans end up
//! with a process that has no children of its own to confuse them with, and the server reaps
//! exactly what it started.

use std::collections::HashSet;
use std::ffi::c_int;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::error::{Error, Result};
use crate::sys::{self, Ending, Events, Pid, PollEntry, poll};

/// From SIGTERM to SIGKILL for what the server itself did not start.
const GRACE: Duration = Duration::from_secs(5);

/// Splits. Returns in the server, with the number of its init; the init process never returns from
/// here.
///
/// # Errors
/// There is no process or descriptor to be had.
pub fn split() -> Result<Init> {
    let init = Init(std::process::id());
    let failed = |errno| Error::system("cannot become init", errno);
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGCHLD] {
        signals.add(signal);
    }
    // Blocked before the split, so that none is lost; the server unblocks SIGCHLD for itself.
    signals.thread_block().map_err(failed)?;
    if std::process::id() != 1 {
        prctl::set_child_subreaper(true).map_err(failed)?;
    }
    let Some(server) = sys::fork().map_err(failed)? else {
        let mut own = SigSet::empty();
        own.add(Signal::SIGCHLD);
        own.thread_unblock().map_err(failed)?;
        init.keep()?;
        return Ok(init);
    };
    let status =
        match SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK) {
            Ok(arrivals) => supervise(server, &arrivals),
            Err(_) => 1,
        };
    std::process::exit(status)
}

/// The process that was there before, and reaps.
#[derive(Debug, Clone, Copy)]
pub struct Init(u32);

impl Init {
    /// An init that is killed takes the server along. To be called by the first thread, and again when
    /// it has acted as another user: the kernel forgets it then (prctl(2), `PR_SET_PDEATHSIG`).
    ///
    /// # Errors
    /// It has been killed already.
    pub fn keep(self) -> Result<()> {
        let failed = |errno| Error::system("cannot stay with init", errno);
        prctl::set_pdeathsig(Signal::SIGKILL).map_err(failed)?;
        if std::os::unix::process::parent_id() == self.0 {
            Ok(())
        } else {
            Err(failed(Errno::ESRCH))
        }
    }
}

/// Reaps until the server has ended, then ends the rest; the exit status.
fn supervise(server: Pid, arrivals: &SignalFd) -> c_int {
    let mut told_at = None;
    let mut asked = HashSet::new();
    let ending = loop {
        if let Some(ending) = reap_until(server) {
            break ending;
        }
        poll(
            &mut [PollEntry::new(arrivals.as_fd(), Events::READABLE)],
            None,
        );
        while let Ok(Some(arrival)) = arrivals.read_signal() {
            let signal = arrival.ssi_signo.cast_signed();
            if signal != libc::SIGCHLD {
                told_at.get_or_insert_with(Instant::now);
                let _ = sys::signal_process(server, signal);
                let orphans = children().into_iter().filter(|child| *child != server);
                ask_to_end(orphans, &mut asked);
            }
        }
    };
    end_orphans(
        arrivals,
        told_at.unwrap_or_else(Instant::now) + GRACE,
        asked,
    );
    match ending {
        Ending::Exited(status) => status,
        Ending::Signaled(signal) => 128 + signal,
        Ending::Unknown => 1,
    }
}

fn reap_until(server: Pid) -> Option<Ending> {
    while let Ok(Some((pid, ending))) = sys::wait_any(false) {
        if pid == server {
            return Some(ending);
        }
    }
    None
}

/// Asks what is left to end, and kills it at `deadline`. Children of what is killed become children
/// of this process in turn, so it goes on until there is none.
fn end_orphans(arrivals: &SignalFd, deadline: Instant, mut asked: HashSet<Pid>) {
    loop {
        loop {
            match sys::wait_any(false) {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => return,
            }
        }
        let now = Instant::now();
        if now >= deadline + Duration::from_secs(1) {
            return;
        }
        let orphans = children();
        if now >= deadline {
            for orphan in orphans {
                let _ = sys::signal_process(orphan, libc::SIGKILL);
            }
        } else {
            // A number that is no child's any more may be the next child's.
            asked.retain(|asked| orphans.contains(asked));
            ask_to_end(orphans.into_iter(), &mut asked);
        }
        let mut entries = [PollEntry::new(arrivals.as_fd(), Events::READABLE)];
        poll(&mut entries, Some(Duration::from_millis(20)));
        while let Ok(Some(_)) = arrivals.read_signal() {}
    }
}

/// Asks those that have not been asked before.
fn ask_to_end(children: impl Iterator<Item = Pid>, asked: &mut HashSet<Pid>) {
    for child in children.filter(|child| asked.insert(*child)) {
        let _ = sys::signal_process(child, libc::SIGTERM);
        // A stopped process takes it only when it goes on.
        let _ = sys::signal_process(child, libc::SIGCONT);
    }
}

/// The children of this process; unreaped, so their numbers are their own. Where /proc does not tell,
/// PID 1 can still speak to everybody at once.
fn children() -> Vec<Pid> {
    let own = std::process::id();
    let listed = sys::proc_shows_this_namespace()
        .then(|| std::fs::read_to_string(format!("/proc/self/task/{own}/children")).ok())
        .flatten();
    match listed {
        Some(listed) => listed
            .split_ascii_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect(),
        None if own == 1 => vec![EVERYBODY],
        None => Vec::new(),
    }
}

/// To kill(2): every process that may be signalled, but for PID 1 and the caller.
const EVERYBODY: Pid = -1;
