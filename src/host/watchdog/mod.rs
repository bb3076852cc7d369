//! The memory watchdog: ends what runs in a sandbox that is above its limit, where no cgroup keeps the limit.
//!
//! Each second it lists all processes and reads what those of limited sandboxes hold of their own. With all shared
//! memory of the machine that is never less than what a sandbox holds. Only where this bound is above the limit the
//! exact figure is taken, which costs ten times as much, and as seldom as keeps the cost small. It runs only while
//! there is a sandbox to watch.
//!
//! A sandbox decides how long the exact look at it takes, by its processes, their mappings and their descriptors. So
//! each look has a thread, and the sweep waits for it only as long as ordinary ones take. A look that takes longer is
//! given up, and its sandbox is costly. Costly ones are looked at one after the other, beside the sweeps, and together
//! take half a processor at most. Such a look takes as long as it takes, so that nothing escapes its limit by being
//! costly.

mod memory;
mod sharing;

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::Host;
use super::sandbox::Sandbox;
use crate::logging;
use crate::sys::{self, Pid};
use crate::threads::Thread;
use crate::threads::lock::{Condvar, Mutex, lock};
use memory::{Member, Reader};

/// The time between two sweeps.
const ROUND: Duration = Duration::from_secs(1);

/// The time between exact looks at one sandbox is so many times what the last ones took.
const SHARE: u32 = 40;

/// The longest time between them, unless the look takes longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A growth by this part of the limit calls for a look at once.
const GROWTH: u64 = 8;

/// The time between two looks that both must find a sandbox above its limit. A process may be counted twice for
/// a moment.
const CONFIRMED_AFTER: Duration = Duration::from_millis(10);

/// How long a sweep waits for an exact look. Looks at ordinary sandboxes take a few milliseconds. A costly sandbox whose
/// look took less than half of it is an ordinary one again.
const PATIENCE: Duration = Duration::from_millis(100);

/// The nice value of looks that take longer.
const COSTLY_NICE: i32 = 10;

/// Starts the watchdog if it does not run. Without a thread for it, it looks once.
pub(super) fn ensure_running(host: &Arc<Host>) {
    if host.is_watching.swap(true, Ordering::AcqRel) {
        return;
    }
    let watched = Arc::clone(host);
    let thread = Thread::new("watchdog").essential().start(move || {
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
    /// The last exact looks, or those that are being taken.
    looks: Vec<Look>,
    /// How long the exact looks of the last sweep with any took together, without costly ones.
    cost: Duration,
    /// When the next look at a costly sandbox may begin.
    rests_until: Instant,
    reports: Arc<Reports>,
}

/// The last exact look at a sandbox.
#[derive(Debug, Clone, Copy)]
struct Look {
    /// The number of the sandbox.
    sandbox: u64,
    at: Instant,
    /// The bound at that time.
    bound: u64,
    is_running: bool,
    /// Whether another one is due at once: this one was given up, or has ended what ran.
    is_due: bool,
    /// Whether it takes long.
    is_costly: bool,
}

/// An exact look to be taken by another thread. Once begun, it reports when it is dropped.
struct ExactLook {
    host: Arc<Host>,
    sandbox: Arc<Sandbox>,
    limit: u64,
    /// The bound of the cheap look.
    bound: u64,
    pids: Vec<Pid>,
    at: Instant,
    is_begun: bool,
    is_given_up: Arc<AtomicBool>,
    /// Whether another look is due at once.
    is_due: AtomicBool,
    reports: Arc<Reports>,
}

/// The looks that have been taken.
#[derive(Default)]
struct Reports {
    list: Mutex<Vec<Report>>,
    has_changed: Condvar,
}

struct Report {
    /// The number of the sandbox.
    sandbox: u64,
    cost: Duration,
    /// Whether another look is due at once.
    is_due: bool,
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
        let pause = if self.is_costly { LONGEST_PAUSE } else { pause };
        let has_grown = bound >= self.bound.saturating_add(limit / GROWTH);
        let is_old = now.saturating_duration_since(self.at) >= pause;
        !self.is_running && (self.is_due || has_grown || is_old)
    }
}

impl Rounds {
    fn new() -> Self {
        Self {
            reader: Reader::new(),
            looks: Vec::new(),
            cost: Duration::ZERO,
            rests_until: Instant::now(),
            reports: Arc::default(),
        }
    }

    /// Looks at all sandboxes with a limit. False if there is none, and none is being looked at.
    fn sweep(&mut self, host: &Arc<Host>) -> bool {
        self.take_reports();
        let all = host.list().into_iter();
        let runs = all.filter(|sandbox| sandbox.phase.stopped.is_none());
        let watched = runs.filter_map(|sandbox| Some((sandbox.limits.watched()?, sandbox)));
        let watched: Vec<(u64, Arc<Sandbox>)> = watched.collect();
        let exists = |number| watched.iter().any(|(_, sandbox)| sandbox.number == number);
        self.looks
            .retain(|look| look.is_running || exists(look.sandbox));
        if watched.is_empty() {
            return !self.looks.is_empty();
        }
        let members = self.members(host, &watched);
        let machine_shared = memory::machine_shared();
        let pause = (self.cost * SHARE).clamp(ROUND / 2, LONGEST_PAUSE);
        let mut cost = Duration::ZERO;
        let mut next_costly: Option<(Instant, ExactLook)> = None;
        for (limit, sandbox) in watched {
            let uid = sandbox.user.uid;
            let own = members.iter().filter(|member| member.uid == uid);
            let bound = Bound::of(own.clone());
            let on_disks = sandbox.disks().iter().map(|disk| disk.bytes).sum();
            let shared = bound.shared.max(on_disks);
            let (most, now) = (bound.most(machine_shared), Instant::now());
            let last = self.look_at(sandbox.number).copied();
            let is_below = most <= limit || own.clone().next().is_none();
            if is_below || last.is_none() {
                sandbox.limits.note_use(bound.private + shared);
            }
            if is_below {
                let is_kept = |look: &Look| look.is_running || look.is_costly;
                self.looks
                    .retain(|look| look.sandbox != sandbox.number || is_kept(look));
                continue;
            }
            if last.is_some_and(|last| !last.is_outdated(most, limit, pause, now)) {
                continue;
            }
            let order = ExactLook {
                limit,
                bound: most,
                pids: own.map(|member| member.pid).collect(),
                at: now,
                is_begun: false,
                is_given_up: Arc::default(),
                is_due: AtomicBool::new(true),
                host: Arc::clone(host),
                sandbox,
                reports: Arc::clone(&self.reports),
            };
            match last.filter(|last| last.is_costly) {
                None => {
                    self.look_shortly(order);
                    cost += now.elapsed();
                }
                // The one that has waited longest is next.
                Some(last) => match &next_costly {
                    Some((at, _)) if *at <= last.at => {}
                    _ => next_costly = Some((last.at, order)),
                },
            }
        }
        if !cost.is_zero() {
            self.cost = cost;
        }
        if let Some((_, order)) = next_costly
            && !self.is_looking_at_costly()
            && Instant::now() >= self.rests_until
        {
            self.begin(order);
        }
        true
    }

    fn look_at(&mut self, sandbox: u64) -> Option<&mut Look> {
        self.looks.iter_mut().find(|look| look.sandbox == sandbox)
    }

    fn is_looking_at_costly(&self) -> bool {
        let is_one = |look: &Look| look.is_running && look.is_costly;
        self.looks.iter().any(is_one)
    }

    /// Has a look taken and waits for it a while. If it takes longer it is given up, and the sandbox is costly.
    fn look_shortly(&mut self, order: ExactLook) {
        let (number, is_given_up) = (order.sandbox.number, Arc::clone(&order.is_given_up));
        self.begin(order);
        let reports = Arc::clone(&self.reports);
        let waits = |list: &mut Vec<Report>| list.iter().all(|one| one.sandbox != number);
        let (list, _) = reports
            .has_changed
            .wait_while_for(lock(&reports.list), PATIENCE, waits);
        drop(list);
        self.take_reports();
        if let Some(look) = self.look_at(number)
            && look.is_running
        {
            look.is_costly = true;
            is_given_up.store(true, Ordering::Relaxed);
        }
    }

    /// Has a look taken by another thread, or by this one if there is no other.
    fn begin(&mut self, mut order: ExactLook) {
        let number = order.sandbox.number;
        let mut look = Look {
            sandbox: number,
            at: order.at,
            bound: order.bound,
            is_running: true,
            is_due: false,
            is_costly: false,
        };
        if let Some(last) = self.look_at(number) {
            look.is_costly = last.is_costly;
            *last = look;
        } else {
            self.looks.push(look);
        }
        let name = if look.is_costly {
            "measure-costly"
        } else {
            "measure"
        };
        order.is_begun = true;
        let order = Arc::new(order);
        let theirs = Arc::clone(&order);
        let thread = Thread::new(name).start(move || {
            if look.is_costly {
                sys::make_thread_nice(COSTLY_NICE);
            }
            theirs.carry_out();
        });
        if thread.is_err() {
            order.carry_out();
        }
    }

    /// Remembers which looks have been taken.
    fn take_reports(&mut self) {
        let reports = mem::take(&mut *lock(&self.reports.list));
        for report in reports {
            let Some(look) = self.look_at(report.sandbox) else {
                continue;
            };
            look.is_running = false;
            look.is_due = report.is_due;
            if look.is_costly {
                look.is_costly = report.is_due || report.cost >= PATIENCE / 2;
                self.rests_until = Instant::now() + report.cost;
            }
        }
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
}

impl ExactLook {
    /// Takes the exact figure, and ends what runs if it is above the limit.
    fn carry_out(&self) {
        let mut reader = Reader::new();
        let mut used = 0;
        for pause in [Duration::ZERO, CONFIRMED_AFTER] {
            thread::sleep(pause);
            let disks = self.sandbox.disks();
            let is_given_up = || self.is_given_up.load(Ordering::Relaxed);
            let found = memory::exact_use(
                &mut reader,
                self.sandbox.user,
                self.sandbox.root.get().map(|root| root.root()),
                &self.pids,
                &disks,
                self.limit,
                is_given_up,
            );
            let Some(found) = found else { return };
            used = found;
            self.sandbox.limits.note_use(used);
            if used <= self.limit {
                self.is_due.store(false, Ordering::Relaxed);
                return;
            }
        }
        end(&self.host, &self.sandbox, used, self.limit);
    }
}

impl Drop for ExactLook {
    fn drop(&mut self) {
        if self.is_begun {
            lock(&self.reports.list).push(Report {
                sandbox: self.sandbox.number,
                cost: self.at.elapsed(),
                is_due: self.is_due.load(Ordering::Relaxed),
            });
            self.reports.has_changed.notify_all();
        }
    }
}

/// Kills all that runs in a sandbox, which lives on. One signal reaches also what is forking; should anything be left
/// with its memory, the next sweep finds it.
fn end(host: &Host, sandbox: &Sandbox, used: u64, limit: u64) {
    let is_ending = lock(&sandbox.is_ending);
    // Measuring took long, and the limit may be another one now.
    let is_above = sandbox.limits.watched().is_some_and(|limit| used > limit);
    if is_ending.0 || !is_above || !sandbox.has_processes() {
        return;
    }
    sandbox.limits.note_kill();
    host.signaller.signal_sandbox(sandbox, libc::SIGKILL);
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
        let look = Look {
            sandbox: 1,
            at: now,
            bound: 1000,
            is_running: false,
            is_due: false,
            is_costly: false,
        };
        let is_outdated = |ago, bound| {
            let at = now.checked_sub(Duration::from_secs(ago)).unwrap();
            Look { at, bound, ..look }.is_outdated(1000, 800, pause, now)
        };
        assert!(is_outdated(2, 1000));
        assert!(!is_outdated(1, 1000));
        assert!(!is_outdated(1, 901));
        assert!(is_outdated(1, 900), "an eighth of the limit");
        let is_due = Look {
            is_due: true,
            ..look
        };
        assert!(is_due.is_outdated(1000, 800, pause, now));
        let is_running = Look {
            is_running: true,
            ..is_due
        };
        assert!(!is_running.is_outdated(1000, 800, pause, now));
        let at = now.checked_sub(pause).unwrap();
        let is_costly = Look {
            at,
            is_costly: true,
            ..look
        };
        assert!(!is_costly.is_outdated(1000, 800, pause, now));
        assert!(is_costly.is_outdated(1100, 800, pause, now));
    }
}
