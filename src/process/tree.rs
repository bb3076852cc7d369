//! Finds everything that descends from a process and kills it.
//!
//! The machines this runs on offer no writable cgroups, so the tree is read from /proc: the members
//! of the leader's process group, the members of its session (job control makes new groups there),
//! and every descendant of these (a child that called setsid). All of them are stopped before any is
//! killed: the children of a killed process move to init, where they can no longer be found. The
//! search repeats until it finds no new process. If the server itself is killed in between, the
//! stopped processes stay stopped.
//!
//! A pid read from /proc may belong to another process by the time it is used. Each process is
//! therefore signalled through a pidfd, after its start time was compared with the one that was read.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;

use nix::errno::Errno;

use crate::proc::{self, Stat};
use crate::sys::{self, Pid};

/// How often a fork storm is searched before the processes found so far are killed.
const ROUNDS: usize = 64;

/// The identity of a process. It stays unique after the kernel reuses the pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Member {
    pid: Pid,
    start_time: u64,
}

impl Member {
    /// Sends a signal, unless the process has ended.
    pub(super) fn signal(&self, signal: i32) {
        let pidfd = sys::pidfd_open(self.pid);
        if !self.is_alive() {
            return;
        }
        let sent = pidfd.and_then(|pidfd| sys::pidfd_signal(pidfd.as_fd(), signal));
        // An old seccomp filter may refuse these calls, or no descriptor is free. The pid was right a
        // moment ago, and the small risk of a reused pid is better than a process left behind.
        if sent.is_err_and(|errno| errno != Errno::ESRCH) {
            let _ = sys::signal_process(self.pid, signal);
        }
    }

    fn is_alive(&self) -> bool {
        proc::stat(self.pid, &mut Vec::new())
            .is_some_and(|stat| stat.start_time == self.start_time && !stat.zombie)
    }
}

/// All processes of the machine.
pub(super) struct Snapshot {
    processes: Vec<Stat>,
    /// The kernel started again at low pids while /proc was read, so processes may be missing.
    pid_wrapped: bool,
}

impl Snapshot {
    /// Reads /proc. The snapshot is empty if /proc does not show the server's own pid namespace; only
    /// process groups can be reached then.
    ///
    /// The list of pids is older than the look at each of them: a process that forks and ends in
    /// between would be missed together with its child. So the pids allocated meanwhile are looked up
    /// too, until there are no more. They are higher than those of the list, unless the kernel reached
    /// its highest pid and started again.
    pub(super) fn take() -> Self {
        let mut buffer = Vec::new();
        let mut stat = |pid| proc::stat(pid, &mut buffer);
        let mut newest = proc::newest_pid();
        let mut snapshot = Self {
            processes: proc::processes().filter_map(&mut stat).collect(),
            pid_wrapped: false,
        };
        for _ in 0..ROUNDS {
            let (Some(before), Some(now)) = (newest, proc::newest_pid()) else {
                break;
            };
            snapshot.pid_wrapped = now < before;
            if now <= before || snapshot.processes.is_empty() {
                break;
            }
            let allocated = (before + 1..=now).filter_map(&mut stat);
            snapshot.processes.extend(allocated);
            newest = Some(now);
        }
        snapshot
    }

    /// The living processes of all trees whose roots satisfy `is_root`.
    pub(super) fn trees(&self, is_root: impl Fn(&Stat) -> bool) -> Vec<Stat> {
        let mut children: HashMap<Pid, Vec<&Stat>> = HashMap::new();
        for process in &self.processes {
            children.entry(process.parent).or_default().push(process);
        }
        let mut seen = HashSet::new();
        let roots = self.processes.iter().filter(|stat| is_root(stat));
        let mut pending: Vec<&Stat> = roots.collect();
        let mut found = Vec::new();
        while let Some(process) = pending.pop() {
            if seen.insert(process.pid) {
                found.push(*process);
                pending.extend(children.get(&process.pid).into_iter().flatten());
            }
        }
        found.retain(|process| !process.zombie);
        found
    }
}

impl Stat {
    /// Whether the process is one of `leaders`, or in the process group or session of one.
    pub(super) fn belongs_to(&self, leaders: &HashSet<Pid>) -> bool {
        [self.pid, self.group, self.session]
            .iter()
            .any(|pid| leaders.contains(pid))
    }

    /// The identity of the process.
    pub(super) fn member(&self) -> Member {
        Member {
            pid: self.pid,
            start_time: self.start_time,
        }
    }
}

/// Kills `leaders` and everything that descends from them. The caller has stopped their process
/// groups and does not reap them before this returns.
pub(super) fn kill(leaders: &HashSet<Pid>) {
    stop_and_kill(
        |stat| stat.belongs_to(leaders),
        |stat| leaders.contains(&stat.group),
    );
}

/// Kills these processes and everything that descends from them.
pub(super) fn kill_members(members: &HashSet<Member>) {
    stop_and_kill(|stat| members.contains(&stat.member()), |_| false);
}

/// Stops the trees below all roots until a search finds no new process, then kills them. A process
/// that was stopped before the search had no chance to fork, so it needs no further search.
fn stop_and_kill(is_root: impl Fn(&Stat) -> bool, was_stopped: impl Fn(&Stat) -> bool) {
    let mut stopped: HashSet<Member> = HashSet::new();
    for _ in 0..ROUNDS {
        let snapshot = Snapshot::take();
        let mut search_again = snapshot.pid_wrapped;
        for stat in snapshot.trees(&is_root) {
            let member = stat.member();
            if stopped.insert(member) {
                member.signal(libc::SIGSTOP);
                search_again |= !was_stopped(&stat);
            }
        }
        if !search_again {
            break;
        }
    }
    for member in stopped {
        member.signal(libc::SIGKILL);
    }
}

/// Whether a signal or a tracer has stopped the process.
pub(super) fn is_stopped(pid: Pid) -> bool {
    proc::stat(pid, &mut Vec::new()).is_some_and(|stat| stat.stopped)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_number_that_another_process_has_by_now_is_not_signalled() {
        let mut child = std::process::Command::new("sleep")
            .arg("3600")
            .spawn()
            .unwrap();
        let pid = child.id().cast_signed();
        let start_time = proc::stat(pid, &mut Vec::new()).unwrap().start_time;
        let earlier = Member {
            pid,
            start_time: start_time - 1,
        };
        let was_alive = earlier.is_alive();
        earlier.signal(libc::SIGKILL);
        // Of two signals that end a process, it is ended by the first.
        Member { pid, start_time }.signal(libc::SIGTERM);
        let ended_by = child.wait().unwrap().signal();
        assert!(!was_alive);
        assert_eq!(ended_by, Some(libc::SIGTERM));
    }

    #[test]
    fn finds_group_session_and_descendants_of_both() {
        let process = |pid, parent, group, session| Stat {
            pid,
            zombie: false,
            stopped: false,
            parent,
            group,
            session,
            ticks: 0,
            start_time: 1,
            resident_pages: 0,
        };
        let all = [
            process(1, 0, 1, 1),
            process(10, 1, 10, 10),  // the leader
            process(11, 10, 10, 10), // in its group
            process(12, 1, 12, 10),  // a job whose parent has ended
            process(13, 12, 13, 13), // a daemon below that job
            process(14, 13, 13, 13),
            process(20, 1, 20, 20), // unrelated
        ];
        let all = Snapshot {
            processes: all.to_vec(),
            pid_wrapped: false,
        };
        let mut found: Vec<Pid> = all
            .trees(|stat| stat.belongs_to(&HashSet::from([10])))
            .iter()
            .map(|stat| stat.pid)
            .collect();
        found.sort_unstable();
        assert_eq!(found, [10, 11, 12, 13, 14]);
    }
}
