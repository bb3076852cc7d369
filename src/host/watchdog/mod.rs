//! The memory watchdog: ends what runs in a sandbox that is above its limit, where no cgroup keeps the limit.
//!
//! Each second it lists all processes and reads what those of limited sandboxes hold of their own. With all shared
//! memory of the machine that is never less than what a sandbox holds. Only where this bound is above the limit the
//! exact figure is taken, which costs ten times as much, and as seldom as keeps the cost small. It runs only while
//! there is a sandbox to watch.

mod memory;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::Host;
use super::sandbox::Sandbox;
use crate::logging;
use crate::panics;
use crate::sync::lock;
use crate::sys::{self, Pid};
use memory::{Member, Reader};

/// The time between two sweeps.
const ROUND: Duration = Duration::from_secs(1);

/// The time between exact looks at one sandbox is so many times what the last ones took.
const SHARE: u32 = 40;

/// The longest time between them.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A growth by this part of the limit calls for a look at once.
const GROWTH: u64 = 8;

/// The time between two looks that both must find a sandbox above its limit. A process may be counted twice for
/// a moment.
const CONFIRMED_AFTER: Duration = Duration::from_millis(10);

/// Starts the watchdog if it does not run. Without a thread for it, it looks once.
pub(super) fn ensure_running(host: &Arc<Host>) {
    if host.is_watching.swap(true, Ordering::AcqRel) {
        return;
    }
    let watched = Arc::clone(host);
    let thread = thread::Builder::new()
        .name("watchdog".to_owned())
        .stack_size(256 * 1024)
        .spawn(move || {
            panics::depend_on_this_thread();
            let mut rounds = Rounds::new();
            while rounds.sweep(&watched) {
                thread::sleep(ROUND);
            }
            watched.is_watching.store(false, Ordering::Release);
        });
    if thread.is_err() {
        Rounds::new().sweep(host);
        host.is_watching.store(false, Ordering::Release);
    }
}

/// What is remembered from sweep to sweep.
struct Rounds {
    reader: Reader,
    /// The last exact looks.
    looks: Vec<Look>,
    /// How long the exact looks of the last sweep with any took together.
    cost: Duration,
}

/// The last exact look at a sandbox.
#[derive(Debug, Clone, Copy)]
struct Look {
    /// The number of the sandbox.
    sandbox: u64,
    at: Instant,
    /// The bound at that time.
    bound: u64,
}

/// What the cheap look tells of a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Bound {
    private: u64,
    shared: u64,
}

impl Bound {
    fn of<'a>(members: impl Iterator<Item = &'a Member>) -> Self {
        members.fold(Self::default(), |sum, member| Self {
            private: sum.private + member.private,
            shared: sum.shared + member.shared,
        })
    }

    /// The most that the sandbox can hold: what its processes have of their own, and all that the machine holds of
    /// shared memory and memory files.
    fn most(self, machine_shared: Option<u64>) -> u64 {
        machine_shared.map_or(u64::MAX, |shared| self.private.saturating_add(shared))
    }
}

impl Look {
    /// Whether another one is due at a sandbox with this bound.
    fn is_outdated(self, bound: u64, limit: u64, pause: Duration, now: Instant) -> bool {
        let has_grown = bound >= self.bound.saturating_add(limit / GROWTH);
        has_grown || now.saturating_duration_since(self.at) >= pause
    }
}

impl Rounds {
    fn new() -> Self {
        Self {
            reader: Reader::new(),
            looks: Vec::new(),
            cost: Duration::ZERO,
        }
    }

    /// Looks at all sandboxes with a limit. False if there is none.
    fn sweep(&mut self, host: &Host) -> bool {
        let all = host.list().into_iter();
        let watched = all.filter_map(|sandbox| Some((sandbox.limits.watched()?, sandbox)));
        let watched: Vec<(u64, Arc<Sandbox>)> = watched.collect();
        if watched.is_empty() {
            return false;
        }
        let members = self.members(host, &watched);
        let machine_shared = memory::machine_shared();
        let pause = (self.cost * SHARE).clamp(ROUND / 2, LONGEST_PAUSE);
        let mut cost = Duration::ZERO;
        // What is not put back is forgotten.
        let looks = std::mem::take(&mut self.looks);
        for (limit, sandbox) in &watched {
            let uid = sandbox.user.uid;
            let own = members.iter().filter(|member| member.uid == uid);
            let bound = Bound::of(own.clone());
            let on_disks = sandbox.disks().iter().map(|disk| disk.bytes).sum();
            let shared = bound.shared.max(on_disks);
            sandbox.limits.note_use(bound.private + shared);
            let (most, now) = (bound.most(machine_shared), Instant::now());
            if most <= *limit || own.clone().next().is_none() {
                continue;
            }
            let mut last = looks.iter().filter(|look| look.sandbox == sandbox.number);
            let last = last.next().copied();
            if let Some(last) = last
                && !last.is_outdated(most, *limit, pause, now)
            {
                self.looks.push(last);
                continue;
            }
            let pids: Vec<Pid> = own.map(|member| member.pid).collect();
            if !self.look(host, sandbox, *limit, &pids) {
                self.looks.push(Look {
                    sandbox: sandbox.number,
                    at: now,
                    bound: most,
                });
            }
            cost += now.elapsed();
        }
        if !cost.is_zero() {
            self.cost = cost;
        }
        true
    }

    /// The processes of these sandboxes.
    fn members(&mut self, host: &Host, watched: &[(u64, Arc<Sandbox>)]) -> Vec<Member> {
        let find = |uid: libc::uid_t| {
            let mut all = watched.iter().map(|(_, sandbox)| sandbox);
            all.find(|sandbox| sandbox.user.uid == uid)
        };
        self.reader.members(
            |uid| find(uid).is_some(),
            |uid| host.users.contains(&uid),
            |uid| find(uid)?.workspace.processes.starts(),
        )
    }

    /// Takes the exact figure, and ends what runs if it is above the limit. Returns whether it was.
    fn look(&mut self, host: &Host, sandbox: &Sandbox, limit: u64, pids: &[Pid]) -> bool {
        let mut used = 0;
        for pause in [Duration::ZERO, CONFIRMED_AFTER] {
            thread::sleep(pause);
            let disks = sandbox.disks();
            used = memory::exact_use(&mut self.reader, sandbox.user, pids, &disks, limit);
            sandbox.limits.note_use(used);
            if used <= limit {
                return false;
            }
        }
        end(host, sandbox, used, limit);
        true
    }
}

/// Kills all that runs in a sandbox, which lives on. One signal reaches also what is forking; should anything be left
/// with its memory, the next sweep finds it.
fn end(host: &Host, sandbox: &Sandbox, used: u64, limit: u64) {
    let is_ending = lock(&sandbox.is_ending);
    if *is_ending || !sys::user_has_processes(sandbox.user) {
        return;
    }
    sandbox.limits.note_kill();
    host.signaller.signal(sandbox.user, libc::SIGKILL);
    sandbox.limits.note_kill();
    drop(is_ending);
    logging::info(format_args!(
        "sandbox {} held {used} bytes of memory, and its limit is {limit}: all its processes were killed",
        sandbox.id
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_never_below_what_may_be_hidden() {
        let bound = Bound {
            private: 10,
            shared: 5,
        };
        assert_eq!(bound.most(Some(7)), 17);
        assert_eq!(bound.most(None), u64::MAX);
    }

    #[test]
    fn a_look_is_due_after_a_pause_or_when_the_bound_has_grown() {
        let (pause, now) = (Duration::from_secs(2), Instant::now());
        let is_outdated = |ago, bound| {
            let at = now.checked_sub(Duration::from_secs(ago)).unwrap();
            let look = Look {
                sandbox: 1,
                at,
                bound,
            };
            look.is_outdated(1000, 800, pause, now)
        };
        assert!(is_outdated(2, 1000));
        assert!(!is_outdated(1, 1000));
        assert!(!is_outdated(1, 901));
        assert!(is_outdated(1, 900), "an eighth of the limit");
    }
}
