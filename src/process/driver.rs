//! The thread that drives every process of one workspace that no client waits for.
//!
//! It sleeps in epoll over their pipes and pidfds until the next timer. Besides background processes it drives
//! foreground commands whose client disconnected, and the pipes that a descendant keeps open after its command has
//! ended. It starts when there is something to drive, and ends when there has been nothing for a while.
//!
//! Each workspace has one of its own, because a call on a pipe can take as long as a process that has it open likes:
//! splice(2) from a socket holds the lock of the pipe while it waits for data. Reading, `FIONREAD` and closing wait for
//! that lock whatever their flags, and no signal ends that. So nobody outside the workspace waits for this thread, and
//! nothing waits for it without a limit: the supervisor kills what has run out of time, and a kill ends what
//! holds the lock. What holds it can belong to another sandbox, which was given the pipe. Then the thread outlasts its run of
//! the sandbox; so these threads are counted for all runs together.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::pump::{Buffer, Pump};
use super::read_size::ReadSize;
use super::ring::Stream;
use super::supervisor::{self, StartedLater, Supervisor, Task};
use crate::codec::table::Table;
use crate::error::{Error, Kind, Result, cause};
use crate::threads::Thread;
use crate::threads::lock::{Condvar, Mutex, lock};
use crate::threads::panics::contain;
use crate::{fault, logging};

/// Takes over the pumps of one workspace from other threads.
pub(super) struct Driver {
    supervisor: Arc<Supervisor>,
    drivers: Arc<Drivers>,
    seat: Mutex<Seat>,
    /// Whether the workspace was released.
    is_released: AtomicBool,
}

/// Counts the threads of a workspace that read what its processes write, in all of its runs.
#[derive(Default)]
pub(super) struct Drivers {
    living: Mutex<usize>,
    /// Notified when one has ended.
    ended: Condvar,
}

impl Drivers {
    /// Counts one more thread.
    pub(super) fn count(self: &Arc<Self>) -> CountedDriver {
        *lock(&self.living) += 1;
        CountedDriver(Arc::clone(self))
    }

    /// Waits until there are fewer than `most`. False if there are not within `limit`.
    pub(super) fn wait_below(&self, most: usize, limit: Duration) -> bool {
        let are_many = |living: &mut usize| *living >= most;
        let living = lock(&self.living);
        self.ended.wait_while_for(living, limit, are_many).1
    }
}

/// A thread that reads what processes of a workspace write, and is counted until this is dropped.
pub struct CountedDriver(Arc<Drivers>);

impl Drop for CountedDriver {
    fn drop(&mut self) {
        *lock(&self.0.living) -= 1;
        self.0.ended.notify_all();
    }
}

#[derive(Default)]
struct Seat {
    /// Pumps that the thread has not taken up yet.
    inbox: Vec<Pump>,
    /// What the thread waits for; `None` if there is no thread.
    epoll: Option<Arc<Epoll>>,
}

// The data of an epoll event is the key of its pump times four, plus what its descriptor is for.
const STDOUT: u64 = 0;
const STDERR: u64 = 1;
const INPUT: u64 = 2;
const PIDFD: u64 = 3;

/// The data of the other event; no pump has this key.
const WAKEUP: u64 = u64::MAX;

/// How long the thread stays when there is nothing to drive.
const STAY: Duration = Duration::from_secs(1);

/// Events that are taken at once.
const EVENTS: usize = 64;

impl Driver {
    /// Without a thread. Those that it starts are among `drivers`.
    pub(super) fn new(supervisor: &Arc<Supervisor>, drivers: &Arc<Drivers>) -> Arc<Self> {
        Arc::new(Self {
            supervisor: Arc::clone(supervisor),
            drivers: Arc::clone(drivers),
            seat: Mutex::default(),
            is_released: AtomicBool::new(false),
        })
    }

    /// Takes over a pump. If no thread can be started now, the supervisor tries again until one is there.
    pub(super) fn adopt(self: &Arc<Self>, pump: Pump) {
        lock(&self.seat).inbox.push(pump);
        self.drive_inbox();
    }

    /// Has the pumps of the inbox driven, now or as soon as a thread can be started.
    pub(super) fn drive_inbox(self: &Arc<Self>) {
        if self.start().is_err() {
            self.supervisor.start_later(Arc::clone(self) as _);
        } else {
            self.wake();
        }
    }

    /// The workspace was released: what others keep open of it is closed, and the thread ends when it has nothing to drive.
    pub(super) fn note_release(&self) {
        self.is_released.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        let epoll = lock(&self.seat).epoll.clone();
        if let Some(epoll) = epoll {
            // What is always ready is reported once more.
            let _ = epoll.modify(self.supervisor.always_ready(), &mut wakeup());
        }
    }

    /// Starts the thread unless there is one.
    ///
    /// # Errors
    /// `NoResources`: no thread or descriptor is left.
    pub(super) fn start(self: &Arc<Self>) -> Result<()> {
        let no_resources = |why: &dyn std::fmt::Display| {
            let text = format!("cannot start a thread that reads the output of the command: {why}");
            Error::new(Kind::NoResources, text)
        };
        let failed = |errno| no_resources(&cause(errno));
        let epoll = {
            let mut seat = lock(&self.seat);
            if seat.epoll.is_some() {
                return Ok(());
            }
            let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed)?);
            let ready = self.supervisor.always_ready();
            epoll.add(ready, wakeup()).map_err(failed)?;
            seat.epoll = Some(Arc::clone(&epoll));
            epoll
        };
        let run = Run {
            driver: Arc::clone(self),
            epoll,
            _counted: self.drivers.count(),
        };
        let started = Thread::new("pumps").start(move || run.run(&mut Driven::default()));
        started.map(drop).map_err(|error| no_resources(&error))
    }
}

impl StartedLater for Driver {
    fn start_again(self: Arc<Self>) {
        self.drive_inbox();
    }
}

/// Reported once, until it is asked for again.
fn wakeup() -> EpollEvent {
    EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLONESHOT, WAKEUP)
}

/// The thread.
struct Run {
    driver: Arc<Driver>,
    epoll: Arc<Epoll>,
    _counted: CountedDriver,
}

/// The thread ends, or could not be started. What has arrived since gets another one.
impl Drop for Run {
    fn drop(&mut self) {
        let is_left = {
            let mut seat = lock(&self.driver.seat);
            let is_own = |epoll: &mut Arc<Epoll>| Arc::ptr_eq(epoll, &self.epoll);
            seat.epoll.take_if(is_own).is_some() && !seat.inbox.is_empty()
        };
        if is_left {
            let driver = Arc::clone(&self.driver);
            self.driver.supervisor.start_later(driver);
        }
    }
}

impl Run {
    /// Drives pumps until there have been none for a while. On a panic this value goes before the pumps do, which then
    /// get another thread.
    fn run(self, driven: &mut Driven) {
        let mut buffer = Buffer::new(ReadSize::uncharged());
        let mut events = [EpollEvent::empty(); EVENTS];
        loop {
            let is_transient = driven.pumps.is_empty() || buffer.is_held();
            let stay = if self.is_released() {
                Duration::ZERO
            } else {
                STAY
            };
            let timeout = driven.timeout(is_transient.then_some(stay));
            let count = match self.epoll.wait(&mut events, timeout) {
                Ok(count) => count,
                Err(Errno::EINTR) => 0,
                Err(errno) => {
                    logging::info(format_args!("pumps: epoll_wait: {errno:?}"));
                    panic!("the pumps of a workspace cannot be waited for");
                }
            };
            for event in &events[..count] {
                match event.data() {
                    WAKEUP => {
                        let arrived = std::mem::take(&mut lock(&self.driver.seat).inbox);
                        for pump in arrived {
                            let key = driven.add(pump);
                            self.drive(driven, key, &mut buffer, Self::take_up);
                        }
                        self.close_left_over(driven, &mut buffer);
                    }
                    data => self.drive(
                        driven,
                        data >> 2,
                        &mut buffer,
                        |this, driven, key, buffer| this.handle(driven, key, data & 3, buffer),
                    ),
                }
            }
            self.check_timers(driven, &mut buffer);
            if count == 0 {
                buffer.release();
                if driven.pumps.is_empty() && self.leaves() {
                    return;
                }
            }
        }
    }

    fn is_released(&self) -> bool {
        self.driver.is_released.load(Ordering::Acquire)
    }

    /// Gives the seat up unless pumps have arrived.
    fn leaves(&self) -> bool {
        let mut seat = lock(&self.driver.seat);
        let is_idle = seat.inbox.is_empty();
        if is_idle {
            seat.epoll = None;
        }
        is_idle
    }

    fn check_timers(&self, driven: &mut Driven, buffer: &mut Buffer) {
        let now = Instant::now();
        let mut due = Vec::new();
        while let Some((&(at, key), ())) = driven.timers.first()
            && at <= now
        {
            driven.timers.remove(&(at, key));
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
                this.rest_or_go_on(pump, key);
                driven.schedule(key);
                this.let_go(driven, key);
            });
        }
        if !due.is_empty() {
            self.order(Task::KillTrees(due));
        }
    }

    fn order(&self, task: Task) {
        self.driver.supervisor.order(task);
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
        if !self.is_released() {
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
        pump.close_unused();
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
        pump.is_resting = pump.rests_until().is_some();
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
        if let Some(pump) = driven.pumps.get_mut(&key)
            && self.rest_or_go_on(pump, key)
        {
            driven.schedule(key);
        }
        self.let_go(driven, key);
    }

    /// Leaves the pipes of a pump out while they rest. Returns whether that has changed.
    fn rest_or_go_on(&self, pump: &mut Pump, key: u64) -> bool {
        let rests = pump.rests_until().is_some();
        let has_changed = std::mem::replace(&mut pump.is_resting, rests) != rests;
        if has_changed {
            for (descriptor, purpose, flags) in watched(pump) {
                if let Some(descriptor) = descriptor {
                    let mut event = EpollEvent::new(flags, key << 2 | purpose);
                    let _ = self.epoll.modify(descriptor, &mut event);
                }
            }
        }
        has_changed
    }
}

/// The descriptors of a pump, each with its purpose and the events to watch for. Those of pipes that rest are only watched for
/// the end of all that have the other end open: then nobody waits for them.
fn watched(pump: &Pump) -> [(Option<BorrowedFd<'_>>, u64, EpollFlags); 4] {
    let [readable, writable] = if pump.is_resting {
        [EpollFlags::empty(); 2]
    } else {
        [EpollFlags::EPOLLIN, EpollFlags::EPOLLOUT]
    };
    [
        (pump.output(Stream::Stdout), STDOUT, readable),
        (pump.output(Stream::Stderr), STDERR, readable),
        (pump.input(), INPUT, writable),
        (pump.awaited_pidfd(), PIDFD, EpollFlags::EPOLLIN),
    ]
}

/// The pumps that the thread drives, and its timers.
#[derive(Default)]
struct Driven {
    pumps: HashMap<u64, Pump>,
    /// When to look at which pump.
    timers: Table<(Instant, u64), ()>,
    next_key: u64,
}

impl Driven {
    fn add(&mut self, pump: Pump) -> u64 {
        let key = self.next_key;
        self.next_key += 1;
        self.pumps.insert(key, pump);
        key
    }

    /// The time until the next timer, at most `limit`.
    fn timeout(&self, limit: Option<Duration>) -> EpollTimeout {
        let next = self.timers.first().map(|((at, _), ())| *at);
        let limit = limit.map(|limit| Instant::now() + limit);
        supervisor::timeout_until(next.into_iter().chain(limit).min())
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
        if let Some(at) = next {
            self.timers.insert((at, key), ());
        }
    }
}
