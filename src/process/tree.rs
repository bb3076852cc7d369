//! Finding everything that descends from a process, and killing it.
//!
//! There are no cgroups to write in the machines this runs on, so the tree is read from /proc: what
//! is in the leader's group, what is in its session (job control makes new groups there), and
//! whatever has one of those for an ancestor (a child that called setsid). Everything found is
//! stopped before anything is killed: a process that is killed leaves its children to init, where
//! they can no longer be found. Stopping repeats until a look finds nobody new.
//!
//! A number from /proc may be somebody else's by the time it is used, so each process is signalled
//! through a pidfd that was checked, after it was opened, against the start time that was read.

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};

use crate::sys::{self, Pid};

/// A fork storm gets this many rounds of looking before what was found is killed all the same.
const ROUNDS: usize = 64;

/// What `/proc/<pid>/stat` says (proc(5)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Status {
    pid: Pid,
    zombie: bool,
    parent: Pid,
    group: Pid,
    session: Pid,
    start_time: u64,
}

/// Kills all descendants of `leader`, and the leader; `pidfd` proves that the number is still its own.
pub(super) fn kill_descendants(leader: Pid, pidfd: BorrowedFd<'_>) {
    let mut stopped: HashMap<Pid, u64> = HashMap::new();
    for _ in 0..ROUNDS {
        let processes = snapshot();
        // A zombie still answers to signal 0: only a reaped leader has lost its number.
        if sys::pidfd_signal(pidfd, 0).is_err() {
            break;
        }
        let members = members(leader, &processes);
        let mut found_new = false;
        for member in members.iter().filter(|member| !member.zombie) {
            if stopped.get(&member.pid) != Some(&member.start_time) {
                signal(member.pid, member.start_time, libc::SIGSTOP);
                stopped.insert(member.pid, member.start_time);
                // Those of the group were stopped before the look and cannot have forked since.
                found_new |= member.group != leader;
            }
        }
        if !found_new {
            break;
        }
    }
    for (pid, start_time) in stopped {
        signal(pid, start_time, libc::SIGKILL);
    }
}

fn members(leader: Pid, processes: &[Status]) -> Vec<Status> {
    let mut children: HashMap<Pid, Vec<&Status>> = HashMap::new();
    for process in processes {
        children.entry(process.parent).or_default().push(process);
    }
    let mut seen = HashSet::new();
    let mut pending: Vec<&Status> = processes
        .iter()
        .filter(|process| {
            process.pid == leader || process.group == leader || process.session == leader
        })
        .collect();
    let mut members = Vec::new();
    while let Some(process) = pending.pop() {
        if seen.insert(process.pid) {
            members.push(*process);
            pending.extend(children.get(&process.pid).into_iter().flatten());
        }
    }
    members
}

fn signal(pid: Pid, start_time: u64, signal: i32) {
    let Ok(pidfd) = sys::pidfd_open(pid) else {
        return;
    };
    if status(pid, &mut Vec::new()).is_some_and(|status| status.start_time == start_time) {
        let _ = sys::pidfd_signal(pidfd.as_fd(), signal);
    }
}

fn snapshot() -> Vec<Status> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let mut buffer = Vec::new();
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid| status(pid, &mut buffer))
        .collect()
}

fn status(pid: Pid, buffer: &mut Vec<u8>) -> Option<Status> {
    buffer.clear();
    std::fs::File::open(format!("/proc/{pid}/stat"))
        .ok()?
        .read_to_end(buffer)
        .ok()?;
    parse(pid, buffer)
}

/// The name in parentheses may hold anything, parentheses and spaces too: fields begin after the last.
fn parse(pid: Pid, stat: &[u8]) -> Option<Status> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    Some(Status {
        pid,
        zombie: matches!(*fields.first()?, "Z" | "X"),
        parent: fields.get(1)?.parse().ok()?,
        group: fields.get(2)?.parse().ok()?,
        session: fields.get(3)?.parse().ok()?,
        start_time: fields.get(19)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_name_does_not_shift_the_fields() {
        let stat = b"7 (a) S 1 1 1 (b) R 2 3 4 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 99 0 0\n";
        let status = parse(7, stat).unwrap();
        assert_eq!(
            (
                status.parent,
                status.group,
                status.session,
                status.start_time
            ),
            (2, 3, 4, 99)
        );
    }

    #[test]
    fn finds_group_session_and_descendants_of_both() {
        let process = |pid, parent, group, session| Status {
            pid,
            zombie: false,
            parent,
            group,
            session,
            start_time: 1,
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
        let mut found: Vec<Pid> = members(10, &all).iter().map(|member| member.pid).collect();
        found.sort_unstable();
        assert_eq!(found, [10, 11, 12, 13, 14]);
    }
}
