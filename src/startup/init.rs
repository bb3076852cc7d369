//! PID 1: reaps orphans, and ends all processes on the signals that end the server.
//!
//! The program forks before it has a second thread. The parent stays PID 1 (or becomes the subreaper,
//! with `--init`) and only reaps; the child is the server. So orphans go to a process without other
//! children.

use std::collections::HashSet;
use std::ffi::c_int;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::signal::Signal;

use crate::error::{Error, Result};
use crate::startup::signals::Signals;
use crate::sys::proc::{self, ThreadState};
use crate::sys::{self, Ending, Events, Pid, PollEntry, poll};
use crate::threads::priority;

/// The time from SIGTERM to SIGKILL for orphans.
const GRACE: Duration = Duration::from_secs(5);

/// How often init looks whether the server was killed: the kernel tells only when all its threads have ended.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Forks into init and the server. Returns in the server only.
///
/// # Errors
/// No process is left, or init has died already.
pub fn split() -> Result<Init> {
    let init = Init(std::process::id());
    let failed = |errno| Error::system("cannot become init", errno);
    // Before the fork, so that none is lost.
    let signals = Signals::watch(true).map_err(failed)?;
    if std::process::id() != 1 {
        prctl::set_child_subreaper(true).map_err(failed)?;
    }
    let Some(server) = sys::fork().map_err(failed)? else {
        init.keep()?;
        // Its own session has its own autogroup. A terminal's signals reach init, which passes their meaning on.
        nix::unistd::setsid().map_err(failed)?;
        return Ok(init);
    };
    std::process::exit(supervise(server, &signals))
}

/// The init process, by its pid.
#[derive(Debug, Clone, Copy)]
pub struct Init(u32);

impl Init {
    /// Makes the kernel kill the server when init dies (prctl(2), `PR_SET_PDEATHSIG`). The first thread
    /// calls this, and again after it has acted as another user, which clears the setting.
    ///
    /// # Errors
    /// Init has died already.
    pub fn keep(self) -> Result<()> {
        let failed = |errno| Error::system("cannot tie the server to init", errno);
        prctl::set_pdeathsig(Signal::SIGKILL).map_err(failed)?;
        if std::os::unix::process::parent_id() == self.0 {
            Ok(())
        } else {
            Err(failed(Errno::ESRCH))
        }
    }
}

/// Reaps until the server has ended, then ends the orphans. Returns the exit status.
fn supervise(server: Pid, signals: &Signals) -> c_int {
    priority::raise();
    let mut signaled_at = None;
    let mut terminated = HashSet::new();
    let ending = loop {
        if let Some(ending) = reap_until(server) {
            break ending;
        }
        let mut entries = [PollEntry::new(signals.as_fd(), Events::READABLE)];
        let pause = if end_what_holds_up(server) {
            Duration::from_millis(20)
        } else {
            LOOK_INTERVAL
        };
        poll(&mut entries, Some(pause));
        if signals.take_end() {
            signaled_at.get_or_insert_with(Instant::now);
            // The one signal that ends the server whatever terminal it has.
            let _ = sys::signal_process(server, libc::SIGTERM);
            let orphans = children().into_iter().filter(|child| *child != server);
            terminate(orphans, &mut terminated);
        }
    };
    let deadline = signaled_at.unwrap_or_else(Instant::now) + GRACE;
    end_orphans(signals, deadline, terminated);
    match ending {
        Ending::Exited(status) => status,
        Ending::Signaled(signal) => 128 + signal,
        Ending::Unknown => 1,
    }
}

fn reap_until(server: Pid) -> Option<Ending> {
    while let Ok(Some((pid, ending))) = sys::wait_any() {
        if pid == server {
            return Some(ending);
        }
    }
    None
}

/// Kills the children of a server that was killed and cannot end: one of its threads is in a call on a pipe that a
/// process of a command holds up. False if the server has not died.
fn end_what_holds_up(server: Pid) -> bool {
    let has_died =
        proc::stat(server, &mut Vec::new()).is_some_and(|stat| stat.state == ThreadState::Ended);
    if has_died {
        let threads = proc::threads(server);
        let theirs = threads.flat_map(|thread| proc::children_of_thread(server, thread));
        let orphans = children().into_iter().filter(|child| *child != server);
        for child in theirs.chain(orphans) {
            let _ = sys::signal_process(child, libc::SIGKILL);
        }
    }
    has_died
}

/// Sends SIGTERM to all orphans, and SIGKILL after `deadline`. The children of an orphan that ends
/// become orphans in turn, so this repeats until there are none.
fn end_orphans(signals: &Signals, deadline: Instant, mut terminated: HashSet<Pid>) {
    loop {
        loop {
            match sys::wait_any() {
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
            // The kernel may reuse the pid of a reaped child for the next one.
            terminated.retain(|pid| orphans.contains(pid));
            terminate(orphans.into_iter(), &mut terminated);
        }
        let mut entries = [PollEntry::new(signals.as_fd(), Events::READABLE)];
        poll(&mut entries, Some(Duration::from_millis(20)));
        signals.take_end();
    }
}

/// Sends SIGTERM once to each of these children.
fn terminate(children: impl Iterator<Item = Pid>, terminated: &mut HashSet<Pid>) {
    for child in children.filter(|child| terminated.insert(*child)) {
        let _ = sys::signal_process(child, libc::SIGTERM);
        // A stopped process handles SIGTERM only after it continues.
        let _ = sys::signal_process(child, libc::SIGCONT);
    }
}

/// The children of this process. They are not reaped, so their pids are valid. If /proc does not list
/// them, PID 1 can still signal all processes with one call.
fn children() -> Vec<Pid> {
    let own = std::process::id();
    let listed = proc::shows_this_namespace()
        .then(|| std::fs::read_to_string(format!("/proc/self/task/{own}/children")).ok())
        .flatten();
    match listed {
        Some(listed) => listed
            .split_ascii_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect(),
        None if own == 1 => vec![ALL_PROCESSES],
        None => Vec::new(),
    }
}

/// For kill(2): every process but PID 1 and the caller.
const ALL_PROCESSES: Pid = -1;
