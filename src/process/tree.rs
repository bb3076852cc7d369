//! Finds everything that a command has started and kills it.
//!
//! The machines this runs on offer no writable cgroups, so processes are found through /proc. A command's
//! are its leader, everything below it, and those that have lost their parents: orphans become children
//! of the server or of init, or of the first process of their namespaces, and are known there by the [`Mark`] that
//! they inherited. So a search looks
//! at the command's own tree and at the orphans, whatever else runs on the machine.
//!
//! Without marks, or if the kernel does not list children (`CONFIG_PROC_CHILDREN`), the search reads all
//! of /proc: the members of the leader's process group and session, and what descends from them.
//!
//! All processes are stopped before any is killed, so that they cannot start more meanwhile. The search
//! repeats until it finds no new process, even after the kill: a fork that was in progress when its
//! process was stopped may have ended in between. If the server itself is killed in between, the stopped
//! processes stay stopped.
//!
//! A pid read from /proc may belong to another process by the time it is used. Each process is
//! therefore signalled through a pidfd, after its start time was compared with the one that was read
//! before everything else about it.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl;

use super::children;
use super::holds::Holds;
use crate::confine::{self, Mark};
use crate::sys::proc::{self, Stat};
use crate::sys::{self, Pid, User};

/// How often a fork storm is searched before the processes found so far are killed.
const ROUNDS: usize = 64;

/// How long, so that one storm holds up no other deadline.
const STRIKE_LIMIT: Duration = Duration::from_millis(100);

/// After this many, what is found new outruns the search: each process ends before it is stopped, and
/// has started the next one.
const ROUNDS_OF_SINGLES: usize = 4;

/// How often in a row a search may find nothing new while processes end or start: they may belong to others.
/// An orphan that was listed and had ended before it was looked at is worth [`ROUNDS`].
const FRUITLESS_ROUNDS: usize = 8;

/// Threads of a process whose tracers are looked up: the search takes microseconds for each.
const TRACED_THREADS: usize = 256;

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
struct Snapshot {
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
    fn take() -> Self {
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

    /// The processes of all trees whose roots satisfy `is_root`.
    fn trees(&self, is_root: impl Fn(&Stat) -> bool) -> Vec<Stat> {
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
        found
    }
}

impl Stat {
    /// Whether the process is one of `leaders`, or in the process group or session of one.
    fn belongs_to(&self, leaders: &HashSet<Pid>) -> bool {
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

/// Where a search begins.
#[derive(Default)]
pub(super) struct Roots {
    /// Leaders of commands.
    pub(super) leaders: HashSet<Pid>,
    /// Processes that were found by other searches.
    pub(super) members: HashSet<Member>,
    /// Which orphans count.
    pub(super) orphans: Orphans,
    /// The threads of the server that have started the commands. Children that a command makes with
    /// `CLONE_PARENT` are theirs.
    pub(super) starters: HashSet<Pid>,
    /// The first processes of their namespaces, which adopt orphans there.
    pub(super) holders: HashSet<Pid>,
}

/// Which of the children that the server and its init have adopted a search looks for.
pub(super) enum Orphans {
    /// Those with these marks. Where commands have users of their own, orphans must have the same one:
    /// a process can take any lower mark than its own.
    Marked(HashMap<Mark, Option<User>>),
    /// Those whose command has ended.
    LeftBehind,
    /// All of the server's own. Init ends its children itself.
    Own,
}

impl Default for Orphans {
    fn default() -> Self {
        Self::Marked(HashMap::new())
    }
}

impl Orphans {
    /// The condition that an orphan fulfils.
    fn condition(&self) -> Box<dyn Fn(Pid) -> bool + '_> {
        match self {
            Self::Marked(marks) => Box::new(|pid| {
                let user = Mark::of(pid).and_then(|mark| marks.get(&mark));
                user.is_some_and(|user| {
                    user.is_none_or(|user| proc::real_user(pid) == Some(user.uid))
                })
            }),
            Self::LeftBehind => {
                let running = children::marks();
                Box::new(move |pid| Mark::of(pid).is_some_and(|mark| !running.contains(&mark)))
            }
            Self::Own => Box::new(|_| true),
        }
    }

    /// Whether orphans of a user can be among these, so that they may be stopped before anything else of them is known.
    fn mean_user(&self, uid: libc::uid_t) -> bool {
        match self {
            Self::Marked(marks) => {
                let mut users = marks.values();
                users.any(|user| user.is_none_or(|user| user.uid == uid))
            }
            Self::LeftBehind => false,
            Self::Own => true,
        }
    }

    /// The processes that adopt orphans. A server that is no subreaper has an init for a parent.
    fn adopters(&self) -> Vec<Pid> {
        let own = std::process::id().cast_signed();
        let parent = std::os::unix::process::parent_id().cast_signed();
        let has_init = !prctl::get_child_subreaper().unwrap_or(false);
        let is_init_meant = has_init && !matches!(self, Self::Own);
        [own]
            .into_iter()
            .chain(is_init_meant.then_some(parent))
            .collect()
    }
}

impl Roots {
    /// Passes all processes of the trees to `found`, zombies included, each as early as possible. Before
    /// it knows of which command an orphan is, it passes the orphan's number to `listed`. Returns whether
    /// processes may be missing.
    fn search(&self, found: &mut dyn FnMut(&Stat), listed: &mut dyn FnMut(Pid)) -> bool {
        if Mark::are_available() && proc::lists_children() {
            self.search_lists(found, listed)
        } else {
            self.search_all(found)
        }
    }

    /// The living processes of the trees.
    pub(super) fn living(&self) -> HashSet<Member> {
        let mut living = HashSet::new();
        let mut found = |process: &Stat| {
            if !process.zombie {
                living.insert(process.member());
            }
        };
        self.search(&mut found, &mut |_| ());
        living
    }

    /// Follows the lists of children: the trees first, then the orphans. A process whose parent ends
    /// meanwhile is in the one or in the other.
    fn search_lists(&self, found: &mut dyn FnMut(&Stat), listed: &mut dyn FnMut(Pid)) -> bool {
        let mut search = Search::new(found);
        let own = std::process::id().cast_signed();
        for leader in &self.leaders {
            search.add(*leader, |process| process.parent == own);
        }
        for member in &self.members {
            // Its number may belong to another process by now.
            search.add(member.pid, |process| process.member() == *member);
        }
        search.has_lost = false;
        let commands = children::commands();
        let is_orphan = self.orphans.condition();
        let starters = self.starters.iter().map(|thread| (own, *thread));
        let adopters = self.orphans.adopters().into_iter();
        let adopters = adopters.chain(self.holders.iter().copied());
        let adopters = adopters.map(|pid| (pid, pid));
        for (adopter, thread) in starters.chain(adopters) {
            let mut orphans = proc::children_of_thread(adopter, thread);
            orphans.retain(|pid| *pid != own && !commands.contains(pid));
            // The latest ones come last, and are gone first.
            orphans.iter().rev().copied().for_each(&mut *listed);
            for orphan in orphans {
                search.add(orphan, |process| is_orphan(process.pid));
            }
        }
        search.has_lost
    }

    fn search_all(&self, found: &mut dyn FnMut(&Stat)) -> bool {
        let snapshot = Snapshot::take();
        let commands = children::commands();
        let mut adopters = self.orphans.adopters();
        adopters.extend(&self.holders);
        let is_orphan = self.orphans.condition();
        let trees = snapshot.trees(|process| {
            process.belongs_to(&self.leaders)
                || self.members.contains(&process.member())
                || (adopters.contains(&process.parent)
                    && !commands.contains(&process.pid)
                    && !adopters.contains(&process.pid)
                    && is_orphan(process.pid))
        });
        trees.iter().for_each(found);
        snapshot.pid_wrapped
    }
}

/// A search through the lists of children.
struct Search<'a> {
    seen: HashSet<Pid>,
    found: &'a mut dyn FnMut(&Stat),
    /// Whether a listed process had ended before it was looked at. Its children may be orphans by then.
    has_lost: bool,
    buffer: Vec<u8>,
}

impl<'a> Search<'a> {
    fn new(found: &'a mut dyn FnMut(&Stat)) -> Self {
        Self {
            seen: HashSet::new(),
            found,
            has_lost: false,
            buffer: Vec::new(),
        }
    }

    /// Adds the tree below a process that fulfils a condition, which is asked after its start time was
    /// read.
    fn add(&mut self, root: Pid, condition: impl Fn(&Stat) -> bool) {
        let mut pending = vec![(root, None)];
        while let Some((pid, parent)) = pending.pop() {
            if self.seen.contains(&pid) {
                continue;
            }
            let Some(process) = proc::stat(pid, &mut self.buffer) else {
                self.has_lost = true;
                continue;
            };
            let is_meant = match parent {
                None => condition(&process),
                // The child may have ended since it was listed, and its number belong to another.
                Some(parent) => parent == process.parent,
            };
            if is_meant {
                self.seen.insert(pid);
                // Whoever stops the process does so before its children are listed.
                (self.found)(&process);
                let children = proc::children(&process);
                if children.is_empty() {
                    continue;
                }
                let now = proc::stat(pid, &mut self.buffer);
                if now.is_some_and(|now| now.member() == process.member()) {
                    pending.extend(children.into_iter().map(|child| (child, Some(pid))));
                } else {
                    self.has_lost = true;
                }
            } else {
                self.has_lost |= parent.is_some();
            }
        }
    }
}

/// Counts the living processes that commands have left behind when they ended; `None` if they are not
/// known.
pub fn count_left_behind() -> Option<usize> {
    let roots = Roots {
        orphans: Orphans::LeftBehind,
        holders: confine::holders().into_iter().collect(),
        ..Roots::default()
    };
    Mark::are_available().then(|| roots.living().len())
}

/// The killing of trees, which takes several strikes if they grow meanwhile.
pub(super) struct Hunt {
    roots: Roots,
    /// Processes that were found and are being killed.
    known: HashSet<Member>,
    /// All searches so far.
    rounds: usize,
    /// Those in a row that found nothing new.
    fruitless: usize,
    held: Held,
}

impl Hunt {
    /// The caller has stopped the process groups of the leaders, and reaps none before it has called
    /// [`Hunt::forget_leaders`].
    pub(super) fn new(roots: Roots) -> Self {
        Self {
            roots,
            known: HashSet::new(),
            rounds: 0,
            fruitless: 0,
            held: Held::default(),
        }
    }

    /// Stops all processes until a search finds no new one, then kills them. Returns whether there
    /// may be more. In the process group of a leader a stopped process had no chance to fork, because a signal
    /// to a group also reaches a child that is being made, so they need no further search.
    pub(super) fn strike(&mut self) -> bool {
        self.roots.members.retain(Member::is_alive);
        let mut fresh = Vec::new();
        let mut search_again = false;
        let deadline = Instant::now() + STRIKE_LIMIT;
        for _ in 0..ROUNDS {
            let (roots, known, held) = (&self.roots, &mut self.known, &mut self.held);
            let mut ours = Vec::new();
            let is_outrun = self.rounds >= ROUNDS_OF_SINGLES;
            self.rounds += 1;
            let mut is_fruitful = false;
            search_again = false;
            let newest = proc::newest_pid();
            let mut found = |process: &Stat| {
                let member = process.member();
                ours.push(process.pid);
                if !known.insert(member) {
                    return;
                }
                is_fruitful = true;
                // The group of a leader was stopped before.
                if !roots.leaders.contains(&process.group) {
                    search_again = true;
                    if is_outrun {
                        stop_group(process);
                    }
                    if !process.zombie {
                        member.signal(libc::SIGSTOP);
                    }
                }
                if !process.zombie {
                    fresh.push(member);
                }
            };
            let mut listed = |pid| held.meet(pid, is_outrun, &roots.orphans);
            let is_incomplete = roots.search(&mut found, &mut listed);
            held.end_round(&ours);
            self.fruitless = if is_fruitful { 0 } else { self.fruitless + 1 };
            // The kernel's lists may leave out a process while others in them end, so a link of a chain of
            // processes may be missed. Its next link has a new pid.
            let is_changing = is_incomplete || proc::newest_pid() != newest;
            let patience = if is_incomplete {
                ROUNDS
            } else {
                FRUITLESS_ROUNDS
            };
            search_again |= is_changing && self.fruitless < patience;
            // What a process has started before it stopped is found below it.
            self.roots.members.extend(&fresh);
            if !search_again || Instant::now() >= deadline {
                break;
            }
        }
        for member in &fresh {
            member.signal(libc::SIGKILL);
        }
        self.held.release();
        search_again || !fresh.is_empty()
    }

    /// From here on the leaders may be reaped.
    pub(super) fn forget_leaders(&mut self) {
        self.roots.leaders.clear();
    }
}

/// Orphans that were stopped before it was known of which command they are, because a process that starts the next
/// one and ends at once is gone before it is looked at. None is another user's.
///
/// Those of other commands are resumed one round later, when what they forked has been examined.
#[derive(Default)]
struct Held {
    /// All orphans so far. One that stays is looked at as it is.
    met: HashSet<Pid>,
    /// Those that were stopped in this round.
    stopped: Vec<(Pid, OwnedFd)>,
    /// Those that were stopped in the one before.
    earlier: Vec<(Pid, OwnedFd)>,
    holds: Holds,
}

impl Held {
    fn meet(&mut self, pid: Pid, is_outrun: bool, orphans: &Orphans) {
        // Opened before the process's user is asked for: that is the user of what is signalled, or that has ended.
        if self.met.insert(pid)
            && is_outrun
            && let Ok(pidfd) = sys::pidfd_open(pid)
        {
            let is_meant = |uid| orphans.mean_user(uid);
            let stop = || {
                let _ = sys::pidfd_signal(pidfd.as_fd(), libc::SIGSTOP);
            };
            if self.holds.hold(pid, is_meant, stop) {
                self.stopped.push((pid, pidfd));
            }
        }
    }

    /// `ours` are the numbers of processes that stay stopped.
    fn end_round(&mut self, ours: &[Pid]) {
        self.stopped.retain(|(pid, _)| !ours.contains(pid));
        self.earlier.retain(|(pid, _)| !ours.contains(pid));
        self.holds.release(ours);
        for (pid, pidfd) in std::mem::take(&mut self.earlier) {
            // The kernel keeps a second signal until the process goes on: it was stopped before this search. The
            // first one is pending too until the process stops, so the order of these two looks matters.
            let is_stopped_twice =
                proc::is_stopped(pid) && proc::has_pending(pid, pid, libc::SIGSTOP);
            if !is_stopped_twice {
                let _ = sys::pidfd_signal(pidfd.as_fd(), libc::SIGCONT);
            }
            self.holds.release(&[pid]);
        }
        std::mem::swap(&mut self.earlier, &mut self.stopped);
    }

    fn release(&mut self) {
        self.end_round(&[]);
        self.end_round(&[]);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.release();
    }
}

/// Stops the process group of a process that was just looked at. The process may have ended, but while its
/// group has others, the number is the group's. A session of a command has no others.
fn stop_group(process: &Stat) {
    let own = nix::unistd::getsid(None).map_or(0, Pid::from);
    if process.session != own && process.group > 1 {
        let _ = sys::signal_group(process.group, libc::SIGSTOP);
    }
}

/// Kills the tracers of a process that hold up its end: a traced process is reaped by its tracer first.
/// `is_meant` chooses among them. The caller holds off reaping. A process can have its parent trace it, so this one and its
/// init may be among them.
pub(super) fn kill_tracers(pid: Pid, is_meant: impl Fn(Pid) -> bool) {
    let spared = [nix::unistd::getpid(), nix::unistd::getppid()].map(nix::unistd::Pid::as_raw);
    for tracer in proc::tracers(pid, TRACED_THREADS) {
        if !spared.contains(&tracer)
            && let Some(stat) = proc::stat(tracer, &mut Vec::new())
            && is_meant(tracer)
        {
            stat.member().signal(libc::SIGKILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn what_is_held_goes_on_whenever_it_has_stopped() {
        // A running process stops a few microseconds after the signal: before, between and after the looks at it.
        let mut child = std::process::Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let pid = child.id().cast_signed();
        let orphans = Orphans::Own;
        let mut stays = None;
        for round in 0..4000 {
            let mut held = Held::default();
            held.meet(pid, true, &orphans);
            let until = Instant::now() + Duration::from_nanos(round % 100 * 500);
            while Instant::now() < until {}
            drop(held);
            let limit = Instant::now() + Duration::from_secs(5);
            while proc::is_stopped(pid) && stays.is_none() {
                stays = (Instant::now() > limit).then_some(round);
            }
            if stays.is_some() {
                break;
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(stays, None);
    }

    /// A test runs in a thread that is not the first one, as requests do.
    #[test]
    fn a_process_that_has_its_parent_trace_it_does_not_end_that() {
        let code = "import ctypes, os, signal
ctypes.CDLL(None).ptrace(0, 0, 0, 0)
os.kill(os.getpid(), signal.SIGSTOP)";
        let child = std::process::Command::new("python3")
            .args(["-c", code])
            .spawn();
        let pid = child.unwrap().id().cast_signed();
        let limit = Instant::now() + Duration::from_secs(20);
        while proc::tracers(pid, 1).is_empty() || !proc::is_stopped(pid) {
            assert!(Instant::now() < limit, "it is not traced");
        }
        let own = std::process::id().cast_signed();
        assert_eq!(proc::tracers(pid, 1), [own].into());
        let pidfd = sys::pidfd_open(pid).unwrap();
        let state = sys::wait(pidfd.as_fd(), false).unwrap();
        kill_tracers(pid, |_| true);
        sys::pidfd_signal(pidfd.as_fd(), libc::SIGKILL).unwrap();
        let ending = sys::wait(pidfd.as_fd(), true).unwrap();
        assert_eq!(state, None, "a stop is no end");
        assert_eq!(ending, Some(sys::Ending::Signaled(libc::SIGKILL)));
    }

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
            state: proc::ThreadState::Runs,
            parent,
            group,
            session,
            ticks: 0,
            threads: 1,
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
