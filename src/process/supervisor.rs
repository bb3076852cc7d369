//! The thread that serves all workspaces: it kills what has run out of time, and reaps.
//!
//! It sleeps in epoll until the next deadline, so no timeout costs a thread. It touches nothing that a process has open:
//! a call on a pipe can wait for a process without an end ([`super::driver`]), and everybody's deadlines would wait
//! with it. It takes only short locks and never blocks elsewhere: a second thread kills, because that searches
//! /proc.
//!
//! Whoever drives a command enforces its deadline first; this thread does so when the driver is late, because it waits
//! for a pipe. Commands that are being started have no driver yet.
//!
//! It also reaps the children of the server that are no commands, and starts the drivers that could not be started at
//! once.

use std::collections::VecDeque;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::children::{self, Others};
use super::process::{Process, Reason, strike_trees};
use super::pump::PumpOwner;
use super::start::Start;
use super::tree::Hunt;
use crate::error::{Error, Result};
use crate::sys::Pid;
use crate::threads::Thread;
use crate::threads::lock::{Condvar, Mutex, lock};
use crate::threads::panics::{Panicked, contain};
use crate::{fault, logging};

/// What all workspaces share.
pub(super) struct Supervisor {
    epoll: Epoll,
    wakeup: EventFd,
    /// Readable for ever.
    always_ready: EventFd,
    /// Tells that a child has ended. The server blocks SIGCHLD.
    child_ended: SignalFd,
    starts: Mutex<Starts>,
    /// Drivers that have pumps and could not be started.
    waiting: Mutex<Vec<Arc<dyn StartedLater>>>,
    /// What the other thread has not taken up yet.
    orders: Mutex<Vec<Task>>,
    has_orders: Condvar,
}

/// The commands with a deadline.
#[derive(Default)]
struct Starts {
    /// Those that are being started.
    listed: Vec<Arc<Start>>,
    /// Those that were started and have not ended.
    watched: Vec<Watched>,
    /// When the thread wakes up by itself; `None` means never.
    next_wakeup: Option<Instant>,
}

/// A driver that could not be started.
pub(super) trait StartedLater: Send + Sync {
    /// Tries again.
    fn start_again(self: Arc<Self>);
}

/// A command whose driver may be late.
struct Watched {
    process: Arc<Process>,
    owner: Arc<dyn PumpOwner>,
    /// By the clock of the workspace.
    deadline: Instant,
    look_at: Instant,
    /// The calls on its pipes at the last look after the deadline.
    calls: Option<u64>,
}

impl Watched {
    /// What is to be done about it.
    fn look(&mut self, now: Instant) -> Option<Task> {
        let clock = self.owner.clock();
        if clock.now() < self.deadline {
            // It has stood still.
            self.look_at = clock.wake_at(self.deadline) + LATE;
            return None;
        }
        self.look_at = now + (clock.now() - self.deadline).clamp(LATE, MAX_LATE);
        let process = Arc::clone(&self.process);
        if process.is_running() {
            return Some(Task::KillTrees(vec![process]));
        }
        // It has ended, and its end is not known because something that it left behind holds up a call.
        let calls = process.pipe_calls.load(Ordering::Relaxed);
        let before = self.calls.replace(calls);
        (before == Some(calls) && calls % 2 == 1).then_some(Task::KillLeftBehind(process))
    }
}

// The data of the events.
const WAKEUP: u64 = 0;
const CHILD_ENDED: u64 = 1;

/// Time between the end of a child and the look for children that are no commands: most are commands,
/// and reaped by their drivers.
const REAPING_DELAY: Duration = Duration::from_millis(100);

/// How late a driver may enforce a deadline. The times between two looks at a command that is overdue are longer and longer.
const LATE: Duration = Duration::from_millis(250);
const MAX_LATE: Duration = Duration::from_secs(10);

/// How often the child of an overdue start is killed, until the start has ended.
const START_KILL_INTERVAL: Duration = Duration::from_millis(20);

/// How often a driver is started again that could not be started.
const DRIVER_INTERVAL: Duration = Duration::from_millis(100);

/// Pause between two strikes against processes that start others faster than they are found.
const HUNT_PAUSE: Duration = Duration::from_millis(10);

/// How long such processes are hunted.
const HUNT_LIMIT: Duration = Duration::from_secs(60);

impl Supervisor {
    /// Starts the threads.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub(super) fn start() -> Result<Arc<Self>> {
        let failed = |errno| Error::system("cannot start the supervisor", errno);
        let wakeup = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let signals = SigSet::from(Signal::SIGCHLD);
        let ready = EventFd::from_value_and_flags(1, EfdFlags::EFD_CLOEXEC);
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let supervisor = Arc::new(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed)?,
            wakeup: wakeup.map_err(failed)?,
            always_ready: ready.map_err(failed)?,
            child_ended: SignalFd::with_flags(&signals, flags).map_err(failed)?,
            starts: Mutex::default(),
            waiting: Mutex::default(),
            orders: Mutex::default(),
            has_orders: Condvar::new(),
        });
        let event = EpollEvent::new(EpollFlags::EPOLLIN, WAKEUP);
        let added = supervisor.epoll.add(&supervisor.wakeup, event);
        added.map_err(failed)?;
        let added = supervisor.epoll.add(&supervisor.child_ended, child_event());
        added.map_err(failed)?;
        let own = Arc::clone(&supervisor);
        start_thread("timeouts", move || own.carry_out())?;
        let own = Arc::clone(&supervisor);
        start_thread("supervisor", move || own.run())?;
        Ok(supervisor)
    }

    /// A descriptor that is readable for ever, by which any epoll instance can be woken.
    pub(super) fn always_ready(&self) -> &EventFd {
        &self.always_ready
    }

    /// Starts a driver as soon as that is possible.
    pub(super) fn start_later(&self, driver: Arc<dyn StartedLater>) {
        let mut waiting = lock(&self.waiting);
        if !waiting.iter().any(|other| Arc::ptr_eq(other, &driver)) {
            waiting.push(driver);
        }
        drop(waiting);
        let _ = self.wakeup.write(1);
    }

    /// Enforces the deadline of a start until it is unwatched.
    pub(super) fn watch_start(&self, start: &Arc<Start>) {
        let Some(deadline) = start.deadline else {
            return;
        };
        let mut starts = lock(&self.starts);
        starts.listed.push(Arc::clone(start));
        if starts.next_wakeup.is_none_or(|next| deadline < next) {
            starts.next_wakeup = Some(deadline);
            let _ = self.wakeup.write(1);
        }
    }

    /// The start has ended: its child is not killed from here on.
    pub(super) fn unwatch_start(&self, start: &Arc<Start>) {
        if start.deadline.is_some() {
            let listed = &mut lock(&self.starts).listed;
            listed.retain(|other| !Arc::ptr_eq(other, start));
        }
    }

    /// Enforces the deadline of a command, by the clock of its workspace, if its driver does not.
    pub(super) fn watch(
        &self,
        process: &Arc<Process>,
        owner: Arc<dyn PumpOwner>,
        deadline: Instant,
    ) {
        let look_at = owner.clock().wake_at(deadline) + LATE;
        let mut starts = lock(&self.starts);
        starts.watched.push(Watched {
            process: Arc::clone(process),
            owner,
            deadline,
            look_at,
            calls: None,
        });
        if starts.next_wakeup.is_none_or(|next| look_at < next) {
            starts.next_wakeup = Some(look_at);
            let _ = self.wakeup.write(1);
        }
    }

    /// The end of the command is known.
    pub(super) fn unwatch(&self, process: &Arc<Process>) {
        let mut starts = lock(&self.starts);
        let is_meant = |watched: &Watched| Arc::ptr_eq(&watched.process, process);
        let at = starts.watched.iter().position(is_meant);
        let watched = at.map(|at| starts.watched.swap_remove(at));
        // It may be the last owner.
        drop(starts);
        drop(watched);
    }

    fn run(&self) {
        let mut reap_at = None;
        let mut hiding = None;
        let mut events = [EpollEvent::empty(); 2];
        loop {
            let count = match self.epoll.wait(&mut events, self.timeout(reap_at)) {
                Ok(count) => count,
                Err(Errno::EINTR) => 0,
                Err(errno) => {
                    logging::info(format_args!("supervisor: epoll_wait: {errno:?}"));
                    // Everybody depends on this thread.
                    panic!("the supervisor cannot wait");
                }
            };
            for event in &events[..count] {
                if event.data() == WAKEUP {
                    let _ = self.wakeup.read();
                } else {
                    reap_at = Some(Instant::now() + REAPING_DELAY);
                }
            }
            let now = Instant::now();
            self.enforce_deadlines(now);
            for driver in std::mem::take(&mut *lock(&self.waiting)) {
                driver.start_again();
            }
            if reap_at.is_some_and(|at| at <= now) {
                reap_at = self.reap_others(now, &mut hiding);
            }
        }
    }

    /// The time until the next deadline.
    fn timeout(&self, reap_at: Option<Instant>) -> EpollTimeout {
        let now = Instant::now();
        let is_waiting = !lock(&self.waiting).is_empty();
        let waiting = is_waiting.then(|| now + DRIVER_INTERVAL);
        let mut starts = lock(&self.starts);
        let deadlines = starts.listed.iter().filter_map(|start| {
            let deadline = start.deadline?;
            Some(if deadline <= now {
                now + START_KILL_INTERVAL
            } else {
                deadline
            })
        });
        let looks = starts.watched.iter().map(|watched| watched.look_at);
        let next = deadlines.chain(looks).chain(waiting).chain(reap_at).min();
        starts.next_wakeup = next;
        timeout_until(next)
    }

    fn enforce_deadlines(&self, now: Instant) {
        let mut starts = lock(&self.starts);
        for start in &starts.listed {
            start.enforce_deadline(now);
        }
        let is_due = |watched: &mut Watched| watched.look_at <= now;
        let due: Vec<_> = starts.watched.extract_if(.., is_due).collect();
        drop(starts);
        for mut watched in due {
            if let Some(task) = watched.look(now) {
                self.order(task);
            }
            // If it ends just now, the next look forgets it.
            if watched.process.exit().is_none() {
                lock(&self.starts).watched.push(watched);
            }
        }
    }

    /// Reaps the children that are no commands, and waits for the end of the next child; or tells when to try again.
    /// A command that is still `hiding` others then is reaped too: its driver waits for something.
    fn reap_others(&self, now: Instant, hiding: &mut Option<Pid>) -> Option<Instant> {
        while let Ok(Some(_)) = self.child_ended.read_signal() {}
        loop {
            match children::reap_others() {
                Others::Reaped => break,
                // Deadlines are first.
                Others::Left => return Some(now),
                Others::Hidden(pid) => {
                    let is_late = hiding.replace(pid) == Some(pid);
                    if !(is_late && children::reap_for_driver(pid)) {
                        return Some(now + REAPING_DELAY);
                    }
                }
            }
        }
        let _ = self.epoll.modify(&self.child_ended, &mut child_event());
        None
    }
}

/// The time until a moment, rounded up, so that it has passed afterwards.
pub(super) fn timeout_until(next: Option<Instant>) -> EpollTimeout {
    next.map_or(EpollTimeout::NONE, |at| {
        let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        EpollTimeout::try_from(left).unwrap_or(EpollTimeout::MAX)
    })
}

/// Reported once, until it is asked for again.
fn child_event() -> EpollEvent {
    EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLONESHOT, CHILD_ENDED)
}

fn start_thread(name: &'static str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = Thread::new(name).keeping_memory().essential().start(body);
    let failed = |error| Error::io("cannot start the supervisor", &error);
    thread.map(drop).map_err(failed)
}

/// What the supervisor leaves to the other thread.
pub(super) enum Task {
    /// The time of these processes is up.
    KillTrees(Vec<Arc<Process>>),
    /// Nothing can watch this process.
    Kill(Arc<Process>),
    /// This process should have ended, and a tracer may hold it up.
    KillTracers(Arc<Process>),
    /// What this process left behind keeps its end from being known.
    KillLeftBehind(Arc<Process>),
}

impl Supervisor {
    pub(super) fn order(&self, order: Task) {
        lock(&self.orders).push(order);
        self.has_orders.notify_one();
    }

    /// Kills processes whose time is up, all that are due in one search. The thread exists from the start,
    /// because the processes it kills may leave no room for another one.
    ///
    /// Processes that start others faster than they are found are hunted between the orders, so that nobody
    /// else's deadline waits for them.
    fn carry_out(&self) {
        let mut hunts: VecDeque<(Instant, Hunt)> = VecDeque::new();
        loop {
            let orders = {
                let (none, orders) = (|orders: &mut Vec<_>| orders.is_empty(), lock(&self.orders));
                let mut orders = if hunts.is_empty() {
                    self.has_orders.wait_while(orders, none)
                } else {
                    self.has_orders.wait_while_for(orders, HUNT_PAUSE, none).0
                };
                std::mem::take(&mut *orders)
            };
            let (mut due, mut unwatched, mut left_behind) = (Vec::new(), Vec::new(), Vec::new());
            for order in orders {
                match order {
                    Task::KillTrees(processes) => due.extend(processes),
                    Task::Kill(process) => unwatched.push(process),
                    Task::KillTracers(process) => drop(contain(|| process.kill_tracers())),
                    Task::KillLeftBehind(process) => left_behind.push(process),
                }
            }
            for process in left_behind {
                let hunt = contain(|| process.hunt_left_behind()).ok().flatten();
                hunts.extend(hunt.map(|hunt| (Instant::now(), hunt)));
            }
            let mut strike = |processes: &[Arc<Process>], reason| {
                if processes.is_empty() {
                    return Ok(());
                }
                let (_, hunt) = contain(|| {
                    fault::point("timeouts");
                    strike_trees(processes, reason)
                })?;
                hunts.extend(hunt.map(|hunt| (Instant::now(), hunt)));
                Ok::<(), Panicked>(())
            };
            for (processes, reason) in [(due, Reason::Timeout), (unwatched, Reason::Killed)] {
                if strike(&processes, reason).is_err() {
                    // One of them may be the cause, and the others are due all the same.
                    for process in &processes {
                        let _ = strike(slice::from_ref(process), reason);
                    }
                }
            }
            if let Some((since, mut hunt)) = hunts.pop_front()
                && contain(|| hunt.strike()).unwrap_or(false)
                && since.elapsed() < HUNT_LIMIT
            {
                hunts.push_back((since, hunt));
            }
        }
    }
}
