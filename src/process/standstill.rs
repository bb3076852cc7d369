//! Stops all processes of a user, and lets them go on.
//!
//! A process counts as stopped when each of its threads is: in a stop of a signal or a tracer, or in a sleep in the
//! kernel that nothing ends (a parent in vfork(2)) with SIGSTOP pending. Such a thread stops before it returns to its
//! program. Processes are looked at until all count as stopped twice in a row, because a fork that was in progress may
//! end after the first look.
//!
//! Nobody inside should notice. A shell that waits for its job sees it stop (wait(2), `WUNTRACED`) unless the shell is
//! stopped before, and the job goes on before the shell does. So parents are stopped before their children, and each
//! generation has stopped before the next one is signalled; children go on before their parents. A process that was
//! stopped before stays so.
//!
//! A tracee in a stop of its tracer gets SIGSTOP too: should the tracer be killed meanwhile, it does not go on.

use std::collections::{HashMap, HashSet};
use std::thread;
use std::time::{Duration, Instant};

use super::holds::Exemption;
use super::tree::Member;
use crate::sys::proc::{self, Stat, ThreadState};
use crate::sys::{self, Pid, User};

/// How long a generation may take to stop before the next one is signalled all the same. On a busy machine each
/// process has to get the processor to stop.
const GENERATION_LIMIT: Duration = Duration::from_millis(100);

/// The pauses between two looks at a generation: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_micros(30);
const MAX_PAUSE: Duration = Duration::from_millis(5);

/// After such a pause the threads of a process that still moves are signalled one by one.
const SIGNAL_LIMIT: Duration = Duration::from_micros(200);

/// After this many rounds, processes start faster than they are found.
const ROUNDS_OF_SINGLES: usize = 4;

/// The processes of a user that stand still, or are about to. No search holds them as long as this
/// exists.
pub struct Standstill {
    user: User,
    _exemption: Exemption,
    /// Those that were stopped before, and stay so when the others go on.
    before: HashSet<Member>,
    /// Those that were sent SIGSTOP.
    signalled: HashSet<Member>,
    /// Processes of other users.
    others: HashSet<Pid>,
    newest: Option<Pid>,
    rounds: usize,
    /// Looks in a row that have found nothing that moves.
    calm: usize,
    /// How often something has moved after all stood still.
    broken: usize,
}

/// What was found of processes that should stand still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// All do.
    Calm,
    /// Something moved, for the first time. All stand still again.
    Stopped,
    /// What moved was killed.
    Killed,
    /// Some move still.
    Restless,
}

/// Those of some users that have a process which does not stand still, by their uids. One pass through all processes.
pub fn users_that_move(is_meant: impl Fn(u32) -> bool) -> HashSet<u32> {
    let mut buffer = Vec::new();
    let moving = proc::processes().filter_map(|pid| {
        let uid = proc::user(pid).filter(|uid| is_meant(*uid))?;
        let stat = proc::stat(pid, &mut buffer)?;
        let moves = !stat.zombie && motion_of(&stat, &mut buffer) == Motion::Moves;
        moves.then_some(uid)
    });
    moving.collect()
}

/// A process of the user.
struct Found {
    member: Member,
    parent: Pid,
    pid: Pid,
    motion: Motion,
}

/// What a process can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Motion {
    Moves,
    /// A signal has stopped it.
    Stopped,
    /// It waits for its tracer.
    Traced,
}

impl Standstill {
    /// Nothing is stopped yet.
    pub fn new(user: User) -> Self {
        Self {
            user,
            // What is held would count as stopped before.
            _exemption: Exemption::new(user.uid),
            before: HashSet::new(),
            signalled: HashSet::new(),
            others: HashSet::new(),
            newest: None,
            rounds: 0,
            calm: 0,
            broken: 0,
        }
    }

    /// Looks again at processes that stood still. What moves has had itself let go on, or was by the kernel: it is stopped
    /// again the first time, and killed from then on, because a process can have a timer let it go on without an end.
    /// `signal_all` signals all processes of the user at once.
    pub fn keep(
        &mut self,
        is_other: impl Fn(u32) -> bool,
        signal_all: impl Fn(libc::c_int),
        deadline: Instant,
    ) -> Kept {
        let mut moving = self.look(&is_other, &mut Vec::new());
        moving.retain(|process| process.motion == Motion::Moves);
        if moving.is_empty() {
            return Kept::Calm;
        }
        self.broken += 1;
        let kills = self.broken > 1;
        for process in moving.iter().filter(|_| kills) {
            process.member.signal(libc::SIGKILL);
        }
        self.calm = 0;
        while !self.stop(&is_other, || signal_all(libc::SIGSTOP), deadline) {
            if Instant::now() >= deadline {
                return Kept::Restless;
            }
            thread::sleep(FIRST_PAUSE);
        }
        if kills { Kept::Killed } else { Kept::Stopped }
    }

    /// Looks at all processes, and stops those that move. Returns whether they stand still. `is_other` tells uids that
    /// are certainly another user's; `stop_all` sends SIGSTOP to all processes of the user at once.
    /// It gives up at the deadline.
    pub fn stop(
        &mut self,
        is_other: impl Fn(u32) -> bool,
        stop_all: impl FnOnce(),
        deadline: Instant,
    ) -> bool {
        let mut buffer = Vec::new();
        let found = self.look(&is_other, &mut buffer);
        let is_first_sight = self.rounds <= ROUNDS_OF_SINGLES;
        self.rounds += 1;
        for process in &found {
            let is_new = !self.signalled.contains(&process.member);
            if process.motion == Motion::Stopped && is_first_sight && is_new {
                self.before.insert(process.member);
            }
        }
        let mut moving = found;
        moving.retain(|process| match process.motion {
            Motion::Moves => true,
            Motion::Stopped => false,
            Motion::Traced => !self.signalled.contains(&process.member),
        });
        self.calm = if moving.is_empty() { self.calm + 1 } else { 0 };
        if self.rounds > ROUNDS_OF_SINGLES && !moving.is_empty() {
            stop_all();
        }
        while !moving.is_empty() && Instant::now() < deadline {
            let pids: HashSet<Pid> = moving.iter().map(|process| process.pid).collect();
            let (mut next, mut later): (Vec<_>, Vec<_>) = moving
                .into_iter()
                .partition(|process| !pids.contains(&process.parent));
            if next.is_empty() {
                // Numbers were used again meanwhile.
                std::mem::swap(&mut next, &mut later);
            }
            for process in &next {
                self.signalled.insert(process.member);
                // Something has let it go on since.
                self.before.remove(&process.member);
                process.member.signal(libc::SIGSTOP);
            }
            let limit = Instant::now() + GENERATION_LIMIT;
            let mut pause = FIRST_PAUSE;
            loop {
                next.retain(|process| {
                    let stat = proc::stat(process.pid, &mut buffer);
                    let stat = stat.filter(|stat| stat.member() == process.member && !stat.zombie);
                    stat.is_some_and(|stat| motion_of(&stat, &mut buffer) == Motion::Moves)
                });
                if next.is_empty() || Instant::now() >= limit {
                    break;
                }
                if pause > SIGNAL_LIMIT {
                    for process in &next {
                        stop_threads(process.pid, &mut buffer);
                    }
                }
                thread::sleep(pause);
                pause = (pause * 2).min(MAX_PAUSE);
            }
            moving = later;
        }
        let is_calm = self.calm >= 2;
        if is_calm {
            // It may stay so for long, and others are many.
            self.others = HashSet::new();
        }
        is_calm
    }

    /// Lets the processes go on that were not stopped before.
    pub fn go_on(&mut self, is_other: impl Fn(u32) -> bool) {
        let found = self.look(&is_other, &mut Vec::new());
        let parents: HashMap<Pid, Pid> = found.iter().map(|one| (one.pid, one.parent)).collect();
        let generation = |process: &Found| {
            let ancestors =
                std::iter::successors(Some(process.pid), |pid| parents.get(pid).copied());
            // There is no circle but by a number that was used again.
            ancestors.take(parents.len() + 1).count()
        };
        let generations: Vec<usize> = found.iter().map(generation).collect();
        let youngest = generations.iter().copied().max().unwrap_or(0);
        for generation in (1..=youngest).rev() {
            let all = found.iter().zip(&generations);
            for (process, _) in all.filter(|(_, its)| **its == generation) {
                if !self.before.contains(&process.member) {
                    process.member.signal(libc::SIGCONT);
                }
            }
        }
    }

    /// The living processes of the user.
    fn look(&mut self, is_other: &impl Fn(u32) -> bool, buffer: &mut Vec<u8>) -> Vec<Found> {
        let newest = proc::newest_pid();
        if newest < self.newest {
            // Numbers are used again.
            self.others.clear();
        }
        self.newest = newest;
        let mut found = Vec::new();
        for pid in proc::processes() {
            if self.others.contains(&pid) {
                continue;
            }
            let is_ours = !proc::owner(pid).is_none_or(is_other)
                && proc::real_user(pid) == Some(self.user.uid);
            if !is_ours {
                self.others.insert(pid);
                continue;
            }
            if let Some(stat) = proc::stat(pid, buffer)
                && !stat.zombie
            {
                found.push(Found {
                    member: stat.member(),
                    parent: stat.parent,
                    pid,
                    motion: motion_of(&stat, buffer),
                });
            }
        }
        found
    }
}

/// What a process can do as a whole: it moves if one of its threads can return to its program.
fn motion_of(process: &Stat, buffer: &mut Vec<u8>) -> Motion {
    let pid = process.pid;
    if process.threads <= 1 {
        return motion_of_thread(pid, process);
    }
    let mut motion = Motion::Stopped;
    for thread in proc::threads(pid) {
        let Some(stat) = proc::stat_of_thread(pid, thread, buffer) else {
            continue;
        };
        match motion_of_thread(pid, &stat) {
            Motion::Moves => return Motion::Moves,
            Motion::Traced => motion = Motion::Traced,
            Motion::Stopped => {}
        }
    }
    motion
}

/// Stops a process by those of its threads that move. The kernel leaves a signal to a process to one thread, which may
/// be the one that sleeps in vfork(2): the others go on then.
fn stop_threads(pid: Pid, buffer: &mut Vec<u8>) {
    for thread in proc::threads(pid) {
        let stat = proc::stat_of_thread(pid, thread, buffer);
        if stat.is_some_and(|stat| motion_of_thread(pid, &stat) == Motion::Moves) {
            // It may have ended.
            let _ = sys::signal_thread(pid, thread, libc::SIGSTOP);
        }
    }
}

fn motion_of_thread(pid: Pid, thread: &Stat) -> Motion {
    match thread.state {
        ThreadState::Traced => Motion::Traced,
        ThreadState::Stopped | ThreadState::Ended => Motion::Stopped,
        ThreadState::Blocked if proc::has_pending(pid, thread.pid, libc::SIGSTOP) => {
            Motion::Stopped
        }
        ThreadState::Blocked | ThreadState::Runs => Motion::Moves,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};

    use super::super::holds::Holds;
    use super::*;

    /// Children of the test that run as a user of their own.
    fn child(uid: u32, script: &str) -> Option<Child> {
        if !nix::unistd::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "needs root");
            return None;
        }
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", script])
            .uid(uid)
            .gid(uid)
            .current_dir("/");
        Some(command.spawn().unwrap())
    }

    fn stand_still(user: User) -> Standstill {
        let mut standstill = Standstill::new(user);
        let limit = Instant::now() + Duration::from_secs(20);
        while !standstill.stop(|_| false, || (), Instant::now() + Duration::from_secs(60)) {
            assert!(Instant::now() < limit);
        }
        standstill
    }

    #[test]
    fn what_was_stopped_before_stays_so() {
        let uid = 63_900 + std::process::id() % 90;
        let user = User { uid, gid: uid };
        let Some(mut runs) = child(uid, "while :; do :; done") else {
            return;
        };
        let mut stopped = child(uid, "kill -STOP $$; while :; do :; done").unwrap();
        let [runs_pid, stopped_pid] = [&runs, &stopped].map(|child| child.id().cast_signed());
        while !proc::is_stopped(stopped_pid) {
            thread::sleep(Duration::from_millis(1));
        }
        for _ in 0..20 {
            let mut standstill = stand_still(user);
            assert!(proc::is_stopped(runs_pid));
            standstill.go_on(|_| false);
            assert!(!proc::is_stopped(runs_pid));
            assert!(proc::is_stopped(stopped_pid));
        }
        for child in [&mut runs, &mut stopped] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_search_leaves_alone_what_stands_still_and_is_waited_for() {
        let uid = 63_800 + std::process::id() % 90;
        let user = User { uid, gid: uid };
        let Some(mut sleeper) = child(uid, "exec sleep 1000") else {
            return;
        };
        let pid = sleeper.id().cast_signed();
        while proc::real_user(pid) != Some(uid) {
            thread::sleep(Duration::from_millis(1));
        }
        let mut holds = Holds::default();
        assert!(holds.hold(pid, |_| true, || ()));
        let pausing = thread::spawn(move || stand_still(user));
        while !Exemption::is_there(uid) {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(!proc::is_stopped(pid), "it waits until the search is over");
        holds.release(&[pid]);
        let mut standstill = pausing.join().unwrap();
        assert!(proc::is_stopped(pid));
        assert!(!holds.hold(pid, |_| true, || unreachable!("it stands still")));
        standstill.go_on(|_| false);
        drop(standstill);
        assert!(holds.hold(pid, |_| true, || ()));
        holds.release(&[pid]);
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
}
