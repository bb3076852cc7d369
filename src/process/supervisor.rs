//! The thread that drives every process no client waits for.
//!
//! It sleeps in epoll over their pipes and pidfds until the next deadline, so neither a process nor a
//! timeout costs a thread. Besides background processes it drives foreground commands whose client
//! disconnected, and the pipes that a descendant keeps open after its command has ended.
//!
//! It takes only short locks and never blocks elsewhere: a second thread kills what has run out of
//! time, because that searches /proc. Commands that are being started have no driver yet; their deadlines
//! are enforced here too.
//!
//! It also reaps the children of the server that are no commands.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::children;
use super::process::{Process, Reason, strike_trees};
use super::pump::{Buffer, Pump};
use super::read_size::ReadSize;
use super::ring::Stream;
use super::start::Start;
use super::tree::Hunt;
use crate::error::{Error, Result};
use crate::threads::Thread;
use crate::threads::lock::{Condvar, Mutex, lock};
use crate::threads::panics::{Panicked, contain};
use crate::{fault, logging};

/// Takes over pumps from other threads.
pub(super) struct Supervisor {
    epoll: Epoll,
    wakeup: EventFd,
    /// Tells that a child has ended. The server blocks SIGCHLD.
    child_ended: SignalFd,
    /// Pumps that the thread has not taken up yet.
    inbox: Mutex<Vec<Pump>>,
    /// Whether an owner of pumps was released since the thread last looked.
    has_released: AtomicBool,
    starts: Mutex<Starts>,
    /// What the other thread has not taken up yet.
    orders: Mutex<Vec<Task>>,
    has_orders: Condvar,
}

/// The commands with a deadline that are being started.
#[derive(Default)]
struct Starts {
    listed: Vec<Arc<Start>>,
    /// When the thread wakes up by itself; `None` means never.
    next_wakeup: Option<Instant>,
}

// The data of an epoll event is the key of its pump times four, plus what its descriptor is for.
const STDOUT: u64 = 0;
const STDERR: u64 = 1;
const INPUT: u64 = 2;
const PIDFD: u64 = 3;

// The data of the other events; no pump has these keys.
const WAKEUP: u64 = u64::MAX;
const CHILD_ENDED: u64 = u64::MAX - 1;

/// Time between the end of a child and the look for children that are no commands: most are commands,
/// and reaped by their drivers.
const REAPING_DELAY: Duration = Duration::from_millis(100);

/// How often the child of an overdue start is killed, until the start has ended.
const START_KILL_INTERVAL: Duration = Duration::from_millis(20);

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
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let supervisor = Arc::new(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed)?,
            wakeup: wakeup.map_err(failed)?,
            child_ended: SignalFd::with_flags(&signals, flags).map_err(failed)?,
            inbox: Mutex::default(),
            has_released: AtomicBool::new(false),
            starts: Mutex::default(),
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

    /// Takes over a pump.
    pub(super) fn adopt(&self, pump: Pump) {
        lock(&self.inbox).push(pump);
        let _ = self.wakeup.write(1);
    }

    /// An owner of pumps was released: what others keep open of it is closed.
    pub(super) fn note_release(&self) {
        self.has_released.store(true, Ordering::Release);
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

    fn run(&self) {
        let mut driven = Driven::default();
        let mut buffer = Buffer::new(ReadSize::uncharged());
        let mut events = vec![EpollEvent::empty(); 256];
        loop {
            let count = match self.epoll.wait(&mut events, self.timeout(&driven)) {
                Ok(count) => count,
                Err(Errno::EINTR) => 0,
                Err(errno) => {
                    logging::info(format_args!("supervisor: epoll_wait: {errno:?}"));
                    // Everybody depends on this thread.
                    panic!("the supervisor cannot wait");
                }
            };
            for event in &events[..count] {
                match event.data() {
                    WAKEUP => {
                        let _ = self.wakeup.read();
                        let arrived = std::mem::take(&mut *lock(&self.inbox));
                        for pump in arrived {
                            let key = driven.add(pump);
                            self.drive(&mut driven, key, &mut buffer, Self::take_up);
                        }
                        self.close_left_over(&mut driven, &mut buffer);
                    }
                    CHILD_ENDED => driven.reap_at = Some(Instant::now() + REAPING_DELAY),
                    data => self.drive(
                        &mut driven,
                        data >> 2,
                        &mut buffer,
                        |this, driven, key, buffer| this.handle(driven, key, data & 3, buffer),
                    ),
                }
            }
            self.check_timers(&mut driven, &mut buffer);
        }
    }

    /// The time until the next timer, rounded up, so that it has passed afterwards.
    fn timeout(&self, driven: &Driven) -> EpollTimeout {
        let now = Instant::now();
        let timer = driven.timers.first().map(|(at, _)| *at);
        let mut starts = lock(&self.starts);
        let deadlines = starts.listed.iter().filter_map(|start| {
            let deadline = start.deadline?;
            Some(if deadline <= now {
                now + START_KILL_INTERVAL
            } else {
                deadline
            })
        });
        let next = deadlines.chain(timer).chain(driven.reap_at).min();
        starts.next_wakeup = next;
        next.map_or(EpollTimeout::NONE, |at| {
            let left = at.saturating_duration_since(now) + Duration::from_millis(1);
            EpollTimeout::try_from(left).unwrap_or(EpollTimeout::MAX)
        })
    }

    fn check_timers(&self, driven: &mut Driven, buffer: &mut Buffer) {
        let now = Instant::now();
        for start in &lock(&self.starts).listed {
            start.enforce_deadline(now);
        }
        let mut due = Vec::new();
        while let Some((at, key)) = driven.timers.first().copied()
            && at <= now
        {
            driven.timers.pop_first();
            self.drive(driven, key, buffer, |this, driven, key, buffer| {
                let Some(pump) = driven.pumps.get_mut(&key) else {
                    return;
                };
                if pump.take_due() {
                    due.push(Arc::clone(pump.process()));
                }
                if let Some(interval) = pump.take_recheck(now) {
                    pump.finish(buffer, &mut |_, _, _| {});
                    if pump.is_overdue(interval) {
                        this.order(Task::KillTracers(Arc::clone(pump.process())));
                    }
                }
                driven.schedule(key);
                this.let_go(driven, key);
            });
        }
        if !due.is_empty() {
            self.order(Task::KillTrees(due));
        }
        if driven.reap_at.is_some_and(|at| at <= now) {
            self.reap_others(driven, now);
        }
    }

    /// Reaps the children that are no commands, and waits for the end of the next child.
    fn reap_others(&self, driven: &mut Driven, now: Instant) {
        while let Ok(Some(_)) = self.child_ended.read_signal() {}
        driven.reap_at = if children::reap_others() {
            let _ = self.epoll.modify(&self.child_ended, &mut child_event());
            None
        } else {
            Some(now + REAPING_DELAY)
        };
    }

    /// Does what is due for one pump. A panic costs its process, which would have no driver otherwise, and no other.
    fn drive(
        &self,
        driven: &mut Driven,
        key: u64,
        buffer: &mut Buffer,
        act: impl FnOnce(&Self, &mut Driven, u64, &mut Buffer),
    ) {
        let pump = driven.pumps.get(&key);
        let pidfd = pump.and_then(|pump| pump.pidfd().cloned());
        if contain(|| act(self, driven, key, buffer)).is_err() {
            // The pump may have let go of it, and nothing else would end its watch.
            self.unwatch(pidfd.as_ref().map(|pidfd| pidfd.as_fd()));
            self.give_up(driven, key, buffer);
        }
    }

    /// Closes the outputs of ended processes that only others keep open.
    fn close_left_over(&self, driven: &mut Driven, buffer: &mut Buffer) {
        if !self.has_released.swap(false, Ordering::Acquire) {
            return;
        }
        let pumps = driven.pumps.iter();
        let left_over = pumps.filter(|(_, pump)| pump.is_left_over());
        let keys: Vec<_> = left_over.map(|(key, _)| *key).collect();
        for key in keys {
            self.drive(driven, key, buffer, |this, driven, key, _| {
                this.let_go(driven, key);
            });
        }
    }

    /// Lets go of a pump if nothing is left to do for it.
    fn let_go(&self, driven: &mut Driven, key: u64) {
        let Some(pump) = driven.pumps.get_mut(&key) else {
            return;
        };
        if pump.is_left_over() {
            for stream in Stream::ALL {
                self.unwatch(pump.output(stream));
            }
            pump.close_outputs();
        }
        if pump.is_done() {
            driven.pumps.remove(&key);
        }
    }

    /// Begins to drive a pump.
    fn take_up(&self, driven: &mut Driven, key: u64, buffer: &mut Buffer) {
        let Some(pump) = driven.pumps.get_mut(&key) else {
            return;
        };
        // The process may have ended before its client disconnected, and no event would follow.
        pump.finish(buffer, &mut |_, _, _| {});
        if pump.is_over() {
            // Most such pipes were open in other children that had not called execve yet, and are at their
            // end.
            for stream in Stream::ALL {
                pump.read_or_close(stream, buffer, &mut |_, _, _| {});
            }
            self.let_go(driven, key);
        }
        let Some(pump) = driven.pumps.get_mut(&key) else {
            return;
        };
        if let Err(errno) = self.watch(pump, key) {
            // The kernel has no memory for the watch.
            let line = format_args!(
                "process {}: cannot be watched ({errno:?}), killed",
                pump.process().id
            );
            logging::about("processes", line);
            self.give_up(driven, key, buffer);
            return;
        }
        driven.schedule(key);
    }

    /// Has a process killed that cannot be watched or has made its driver panic, and waits for its end by timers alone.
    /// What it has written is read if that is possible; what it writes from now on is lost.
    fn give_up(&self, driven: &mut Driven, key: u64, buffer: &mut Buffer) {
        let Some(pump) = driven.pumps.get_mut(&key) else {
            return;
        };
        for (descriptor, ..) in watched(pump) {
            self.unwatch(descriptor);
        }
        let _ = contain(|| pump.read_available(buffer, &mut |_, _, _| {}));
        // Descendants that write to them get SIGPIPE.
        pump.close_outputs();
        pump.input = None;
        pump.expect_end();
        self.order(Task::Kill(Arc::clone(pump.process())));
        driven.schedule(key);
        self.let_go(driven, key);
    }

    fn watch(&self, pump: &Pump, key: u64) -> nix::Result<()> {
        for (descriptor, purpose, flags) in watched(pump) {
            if let Some(descriptor) = descriptor {
                let event = EpollEvent::new(flags, key << 2 | purpose);
                self.epoll.add(descriptor, event)?;
            }
        }
        Ok(())
    }

    /// Removes a descriptor that is about to be closed. Closing alone does not remove it (epoll(7))
    /// while a child that has not called execve has a copy, and the kernel would go on reporting it.
    fn unwatch(&self, descriptor: Option<BorrowedFd<'_>>) {
        if let Some(descriptor) = descriptor {
            let _ = self.epoll.delete(descriptor);
        }
    }

    fn handle(&self, driven: &mut Driven, key: u64, purpose: u64, buffer: &mut Buffer) {
        let Some(pump) = driven.pumps.get_mut(&key) else {
            return;
        };
        fault::point("supervised");
        match purpose {
            STDOUT | STDERR => {
                let stream = Stream::ALL[usize::from(purpose == STDERR)];
                if pump.read(stream, buffer, &mut |_, _, _| {}) {
                    self.unwatch(pump.output(stream));
                    pump.outputs[stream.index()] = None;
                }
            }
            INPUT => {
                if pump.feed() {
                    self.unwatch(pump.input());
                    pump.input = None;
                }
            }
            _ => {
                // The process reads no more input, reaped or not.
                self.unwatch(pump.input());
                let pidfd = pump.pidfd().cloned();
                pump.finish(buffer, &mut |_, _, _| {});
                if pump.awaited_pidfd().is_none() {
                    self.unwatch(pidfd.as_ref().map(|pidfd| pidfd.as_fd()));
                }
                driven.schedule(key);
            }
        }
        self.let_go(driven, key);
    }
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

/// The descriptors of a pump, each with its purpose and the events to watch for.
fn watched(pump: &Pump) -> [(Option<BorrowedFd<'_>>, u64, EpollFlags); 4] {
    [
        (pump.output(Stream::Stdout), STDOUT, EpollFlags::EPOLLIN),
        (pump.output(Stream::Stderr), STDERR, EpollFlags::EPOLLIN),
        (pump.input(), INPUT, EpollFlags::EPOLLOUT),
        (pump.awaited_pidfd(), PIDFD, EpollFlags::EPOLLIN),
    ]
}

/// What the supervisor leaves to the other thread.
enum Task {
    /// The time of these processes is up.
    KillTrees(Vec<Arc<Process>>),
    /// Nothing can watch this process.
    Kill(Arc<Process>),
    /// This process should have ended, and a tracer may hold it up.
    KillTracers(Arc<Process>),
}

impl Supervisor {
    fn order(&self, order: Task) {
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
            let (mut due, mut unwatched) = (Vec::new(), Vec::new());
            for order in orders {
                match order {
                    Task::KillTrees(processes) => due.extend(processes),
                    Task::Kill(process) => unwatched.push(process),
                    Task::KillTracers(process) => drop(contain(|| process.kill_tracers())),
                }
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

/// The pumps that the thread drives, and its timers.
#[derive(Default)]
struct Driven {
    pumps: HashMap<u64, Pump>,
    /// When to look at which pump.
    timers: BTreeSet<(Instant, u64)>,
    /// When to reap children that are no commands.
    reap_at: Option<Instant>,
    next_key: u64,
}

impl Driven {
    fn add(&mut self, pump: Pump) -> u64 {
        let key = self.next_key;
        self.next_key += 1;
        self.pumps.insert(key, pump);
        key
    }

    /// Sets the timer of a pump anew.
    fn schedule(&mut self, key: u64) {
        let Some(pump) = self.pumps.get_mut(&key) else {
            return;
        };
        let next = pump.timer();
        if let Some(at) = std::mem::replace(&mut pump.scheduled, next) {
            self.timers.remove(&(at, key));
        }
        self.timers.extend(next.map(|at| (at, key)));
    }
}
