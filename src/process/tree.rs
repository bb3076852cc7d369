//! Finding everything that descends from a process, and killing it.
//!
//! There are no cgroups to write in the machines this runs on, so the tree is read from /proc: what
//! is in the leader's group, what is in its session (job control makes new groups there), and
//! whatever has one of those for an ancestor (a child that called setsid). Everything found is
//! stopped before anything is killed: a process that is killed leaves its children to init, where
//! they can no longer be found. Stopping repeats until a look finds nobody new. (A server that is
//! itself killed in between leaves them stopped.)
//!
//! A number from /proc may be somebody else's by the time it is used, so each process is signalled
//! through a pidfd that was checked, after it was opened, against the start time that was read.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;

use nix::errno::Errno;

use crate::proc::{self, Stat};
use crate::sys::{self, Pid};

/// A fork storm gets this many rounds of looking before what was found is killed all the same.
const ROUNDS: usize = 64;

/// A process at the moment it was looked at.
#[derive(Debug, Clone, Copy)]
pub(super) struct Status {
    pid: Pid,
    stat: Stat,
}

/// A process that was found, whatever becomes of its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Member {
    pid: Pid,
    start_time: u64,
}

impl Member {
    /// Sends a signal, if it still is that process.
    pub(super) fn signal(&self, signal: i32) {
        let pidfd = sys::pidfd_open(self.pid);
        if !self.is_alive() {
            return;
        }
        let sent = pidfd.and_then(|pidfd| sys::pidfd_signal(pidfd.as_fd(), signal));
        // A system call filter older than these calls, or no descriptor left: the number was right a
        // moment ago, and that is better than a process left behind.
        if sent.is_err_and(|errno| errno != Errno::ESRCH) {
            let _ = sys::signal_process(self.pid, signal);
        }
    }

    /// Whether it has not ended.
    pub(super) fn is_alive(&self) -> bool {
        proc::stat(self.pid, &mut Vec::new())
            .is_some_and(|stat| stat.start_time == self.start_time && !stat.zombie)
    }
}

/// All processes of the machine at one moment.
pub(super) struct Snapshot(Vec<Status>);

impl Snapshot {
    /// Reads /proc; empty where that does not tell of this process's own namespace. Then a group is
    /// all that can be reached.
    ///
    /// A list of numbers is older than what is then looked up by them: a process that has left a child
    /// and ended in between would be seen neither by itself nor by that. So numbers that were given
    /// out meanwhile are looked up too, until there are no more: a child has a higher one.
    pub(super) fn take() -> Self {
        let mut buffer = Vec::new();
        let mut status = |pid| {
            let stat = proc::stat(pid, &mut buffer)?;
            Some(Status { pid, stat })
        };
        let mut newest = proc::newest_number();
        let mut all: Vec<_> = proc::processes().filter_map(&mut status).collect();
        if all.is_empty() {
            return Self(all);
        }
        for _ in 0..ROUNDS {
            let (Some(before), Some(now)) = (newest, proc::newest_number()) else {
                break;
            };
            if now <= before {
                break;
            }
            all.extend((before + 1..=now).filter_map(&mut status));
            newest = Some(now);
        }
        Self(all)
    }

    /// The living of all trees whose roots satisfy `is_root`.
    pub(super) fn trees(&self, is_root: impl Fn(&Status) -> bool) -> Vec<Status> {
        let mut children: HashMap<Pid, Vec<&Status>> = HashMap::new();
        for process in &self.0 {
            children
                .entry(process.stat.parent)
                .or_default()
                .push(process);
        }
        let mut seen = HashSet::new();
        let mut pending: Vec<&Status> = self.0.iter().filter(|status| is_root(status)).collect();
        let mut found = Vec::new();
        while let Some(process) = pending.pop() {
            if seen.insert(process.pid) {
                found.push(*process);
                pending.extend(children.get(&process.pid).into_iter().flatten());
            }
        }
        found.retain(|process| !process.stat.zombie);
        found
    }
}

impl Status {
    /// Whether it is a leader, or in the group or session of one.
    pub(super) fn belongs_to(&self, leaders: &HashSet<Pid>) -> bool {
        [self.pid, self.stat.group, self.stat.session]
            .iter()
            .any(|number| leaders.contains(number))
    }

    /// The process, to be remembered.
    pub(super) fn member(self) -> Member {
        Member {
            pid: self.pid,
            start_time: self.stat.start_time,
        }
    }
}

/// Kills leaders, whose groups were stopped and which are not reaped before this returns, and
/// everything that descends from them.
pub(super) fn kill(leaders: &HashSet<Pid>) {
    kill_trees(|| {
        let mut found = Snapshot::take().trees(|status| status.belongs_to(leaders));
        // Those of the groups were stopped before the look: they need no further one.
        found.sort_by_key(|status| !leaders.contains(&status.stat.group));
        let settled = found.partition_point(|status| leaders.contains(&status.stat.group));
        (found.into_iter().map(Status::member).collect(), settled)
    });
}

/// Kills these processes and everything that descends from them.
pub(super) fn kill_members(members: &HashSet<Member>) {
    kill_trees(|| {
        let found = Snapshot::take().trees(|status| members.contains(&status.member()));
        (found.into_iter().map(Status::member).collect(), 0)
    });
}

/// Stops what `look` finds until it finds nobody new, then kills all of it. Of what is found, the
/// first so many are known to have been stopped already.
fn kill_trees(look: impl Fn() -> (Vec<Member>, usize)) {
    let mut stopped: HashSet<Member> = HashSet::new();
    for _ in 0..ROUNDS {
        let newest = proc::newest_number();
        let (found, settled) = look();
        // A look goes through the numbers upwards. When they began anew meanwhile, a process may have
        // left a child where the look had been, and ended before the look came to itself.
        let mut found_new = proc::newest_number() < newest;
        for (index, member) in found.into_iter().enumerate() {
            if stopped.insert(member) {
                member.signal(libc::SIGSTOP);
                found_new |= index >= settled;
            }
        }
        if !found_new {
            break;
        }
    }
    for member in stopped {
        member.signal(libc::SIGKILL);
    }
}

/// Whether a process is stopped, by a signal or a tracer.
pub(super) fn is_stopped(pid: Pid) -> bool {
    proc::stat(pid, &mut Vec::new()).is_some_and(|stat| stat.stopped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_group_session_and_descendants_of_both() {
        let process = |pid, parent, group, session| Status {
            pid,
            stat: Stat {
                zombie: false,
                stopped: false,
                parent,
                group,
                session,
                ticks: 0,
                start_time: 1,
                resident_pages: 0,
            },
        };
        let all = [
            process(1, 0, 1, 1),
            process(10, 1, 10, 10),  // the leader
            process(11, 10, 10, 10), // in its group
            process(12, 1, 12, 10),  // a job whose parent has gone
            process(13, 12, 13, 13), // a daemon below that job
            process(14, 13, 13, 13),
            process(20, 1, 20, 20), // somebody else
        ];
        let all = Snapshot(all.to_vec());
        let mut found: Vec<Pid> = all
            .trees(|status| status.belongs_to(&HashSet::from([10])))
            .iter()
            .map(|status| status.pid)
            .collect();
        found.sort_unstable();
        assert_eq!(found, [10, 11, 12, 13, 14]);
    }
}
