//! CPU priority: the server before its commands, short requests before heavy I/O.
//!
//! The kernel makes an autogroup of each session, and divides the processor between the autogroups
//! first; nice values count only within one (sched(7)). A command that starts many sessions would get
//! many shares, and the server one. So the server raises the nice value of its autogroup. Threads keep
//! theirs, but those that search, hash and edit: the lowest one for all was measured to make the server
//! slower. A nice value cannot be lowered again, so such work has a thread of its own.
//!
//! These threads have the server's large share too, whatever their nice value, as have those that pack, unpack and watch.
//! So those of a tenant take one processor together: each pauses until one would have done what all of them did. They
//! end with the tenant's workspace.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{getpid, getsid};

use super::Thread;
use crate::client::{Interrupt, Stopped};
use crate::error::{Error, Kind, Result};
use crate::sys::make_thread_nice;
use crate::threads::lock::{Condvar, Mutex, lock};
use crate::threads::panics::joined;
use crate::{fault, logging};

/// The nice value of work that reads much for one request.
const BACKGROUND_NICE: i32 = 10;

fn background_thread() -> Thread {
    Thread::new("background").keeping_memory()
}

fn no_thread(error: &std::io::Error) -> Error {
    logging::about(
        "threads",
        format_args!("no thread for a request that reads much: {error}"),
    );
    let text = format!("the machine has no thread left for this request: {error}; try again later");
    Error::new(Kind::NoThreads, text)
}

/// The shortest and the longest pause. A client that leaves waits for one.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(200)];

/// What the threads of a tenant do that read much.
#[derive(Default)]
pub struct BackgroundWork {
    /// Until when one processor would have been busy with what they did.
    busy: Mutex<Option<Instant>>,
    is_closed: AtomicBool,
}

impl BackgroundWork {
    /// Ends it, because there is nothing left to work on.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// # Errors
    /// `NotFound` if it was ended.
    pub fn check_open(&self) -> Result<()> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(Error::deleted());
        }
        Ok(())
    }

    /// Adds processor time that was used after `since`. Until when whoever used it has to pause.
    fn add(&self, used: Duration, since: Instant) -> Instant {
        let mut busy = lock(&self.busy);
        let until = busy.map_or(since, |busy| busy.max(since)) + used;
        *busy = Some(until);
        until
    }

    /// As after so much work.
    #[cfg(test)]
    pub fn owing(used: Duration) -> Arc<Self> {
        let busy = Mutex::new(Some(Instant::now() + used));
        let is_closed = AtomicBool::new(false);
        Arc::new(Self { busy, is_closed })
    }
}

/// One of these threads.
pub struct BackgroundTurn {
    work: Arc<BackgroundWork>,
    /// The processor time of the thread when it was asked last.
    used: Duration,
    /// Since when the thread has not paused; until when it has to, if that is later than now.
    until: Instant,
}

impl BackgroundTurn {
    /// A turn of a thread that has not begun.
    fn new(work: &Arc<BackgroundWork>) -> Self {
        Self {
            work: Arc::clone(work),
            used: Duration::ZERO,
            until: Instant::now(),
        }
    }

    /// A turn of the current thread.
    pub fn of_this_thread(work: &Arc<BackgroundWork>) -> Self {
        let mut turn = Self::new(work);
        turn.use_time();
        turn
    }

    /// The processor time since it was asked last.
    fn use_time(&mut self) -> Duration {
        let now = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(self.used, Duration::from);
        now.saturating_sub(std::mem::replace(&mut self.used, now))
    }

    /// Pauses if the tenant's threads have used more than one processor. To be called every few milliseconds. True
    /// if more pauses are owed: look whether the client is there, and call it again.
    #[must_use]
    pub fn give_way(&mut self) -> bool {
        let (now, [shortest, longest]) = (Instant::now(), PAUSES);
        if now >= self.until + shortest {
            let used = self.use_time();
            self.until = self.work.add(used, self.until).max(now);
        }
        let left = self.until.saturating_duration_since(now);
        if left >= shortest {
            std::thread::sleep(left.min(longest));
        }
        left > longest
    }

    /// # Errors
    /// `NotFound` if the work was ended.
    pub fn check_open(&self) -> Result<()> {
        self.work.check_open()
    }

    /// Takes all pauses that are owed, and asks after each whether to go on.
    ///
    /// # Errors
    /// `NotFound` if the work was ended; those of `ask`.
    pub fn pass(
        &mut self,
        ask: &mut dyn FnMut() -> std::result::Result<(), Stopped>,
    ) -> std::result::Result<(), Stopped> {
        let mut owes = true;
        while owes {
            owes = self.give_way();
            self.check_open()?;
            ask()?;
        }
        Ok(())
    }

    /// Asks `interrupt`, and gives way each time before.
    pub fn before(self, interrupt: &mut dyn Interrupt) -> impl Interrupt + '_ {
        let turn = self;
        GivesWay { interrupt, turn }
    }
}

/// Gives way each time that it is asked.
struct GivesWay<'a> {
    interrupt: &'a mut dyn Interrupt,
    turn: BackgroundTurn,
}

impl Interrupt for GivesWay<'_> {
    fn check(&mut self) -> std::result::Result<(), Stopped> {
        self.turn.pass(&mut || self.interrupt.check())
    }
}

/// Runs `task` on a thread that gives way to others, and waits for it. The new thread does not inherit
/// the user that this one acts as on files.
///
/// # Errors
/// `NoThreads`; `task` did not begin.
pub fn run_in_background(
    work: &Arc<BackgroundWork>,
    interrupt: &mut dyn Interrupt,
    task: &mut (dyn FnMut(&mut dyn Interrupt) + Send),
) -> Result<()> {
    run_with_turn(work, &mut |turn| {
        task(&mut turn.before(interrupt));
    })
}

/// As [`run_in_background`], for a task that takes its turn itself.
///
/// # Errors
/// `NoThreads`; `task` did not begin.
pub fn run_with_turn(
    work: &Arc<BackgroundWork>,
    task: &mut (dyn FnMut(BackgroundTurn) + Send),
) -> Result<()> {
    let turn = BackgroundTurn::new(work);
    let nice_task = || {
        make_thread_nice(BACKGROUND_NICE);
        fault::point("background");
        task(turn);
    };
    std::thread::scope(|scope| {
        let thread = background_thread().start_scoped(scope, nice_task);
        let thread = thread.map_err(|error| no_thread(&error))?;
        joined(thread.join());
        Ok(())
    })
}

/// A thread that gives way to others and waits for its task: there is one before the answer begins.
pub struct BackgroundThread {
    giver: Giver,
    thread: JoinHandle<()>,
    turn: BackgroundTurn,
}

type Task = Box<dyn FnOnce() + Send>;

/// What a thread waits for.
#[derive(Default)]
struct Given {
    /// Guards whether the wait is over, and the task, if there is one.
    state: Mutex<(bool, Option<Task>)>,
    has_changed: Condvar,
}

/// Lets the thread go when it is dropped, with a task or without.
struct Giver(Arc<Given>);

impl Drop for Giver {
    fn drop(&mut self) {
        lock(&self.0.state).0 = true;
        self.0.has_changed.notify_one();
    }
}

impl BackgroundThread {
    /// # Errors
    /// `NoThreads`.
    pub fn start(work: &Arc<BackgroundWork>) -> Result<Self> {
        let shared = Arc::<Given>::default();
        let giver = Giver(Arc::clone(&shared));
        let thread = background_thread().start(move || {
            let waits = |(is_over, _): &mut (bool, _)| !*is_over;
            let state = lock(&shared.state);
            let task = shared.has_changed.wait_while(state, waits).1.take();
            if let Some(task) = task {
                fault::point("prepared");
                make_thread_nice(BACKGROUND_NICE);
                task();
            }
        });
        let thread = thread.map_err(|error| no_thread(&error))?;
        let turn = BackgroundTurn::new(work);
        Ok(Self {
            giver,
            thread,
            turn,
        })
    }

    /// Runs `task`, and waits for it.
    pub fn run(self, task: impl FnOnce(BackgroundTurn) + Send + 'static) {
        let Self {
            giver,
            thread,
            turn,
        } = self;
        lock(&giver.0.state).1 = Some(Box::new(move || task(turn)));
        drop(giver);
        joined(thread.join());
    }
}

/// Gives the autogroup of this process the largest share, if the process leads its session and has
/// `CAP_SYS_NICE`. Commands do not inherit it: each has a session of its own.
pub fn raise() {
    // Another leader's session has processes that are not the server's.
    if getsid(None) != Ok(getpid()) {
        return;
    }
    // Without CAP_SYS_ADMIN the kernel takes one such write in 100 ms on the whole machine, and init and
    // the server both make one.
    for _ in 0..5 {
        let written = std::fs::write("/proc/self/autogroup", "-20");
        let is_early = |error: std::io::Error| error.raw_os_error() == Some(Errno::EAGAIN as i32);
        if !written.is_err_and(is_early) {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_a_tenant_take_one_processor_together() {
        let work = BackgroundWork::default();
        let at = Duration::from_millis;
        let start = Instant::now();
        // One alone never pauses, however long its steps are.
        for (since, used) in [(0, 10), (10, 90), (100, 0), (1000, 1000)] {
            assert_eq!(
                work.add(at(used), start + at(since)),
                start + at(since + used)
            );
        }
        // Of several each pauses until one processor would have done the work of all, including those that ended.
        for thread in 1..=3 {
            let until = start + at(2000 + 100 * thread);
            assert_eq!(work.add(at(100), start + at(2000)), until);
        }
        // One that waited for its client does not make up for it.
        assert_eq!(work.add(at(0), start), start + at(2300));
    }

    #[test]
    fn a_turn_takes_all_pauses_that_it_owes() {
        let work = Arc::new(BackgroundWork::default());
        let mut turn = BackgroundTurn::of_this_thread(&work);
        assert!(!turn.give_way());
        let until = Instant::now() + Duration::from_secs(1);
        turn.until = until;
        let mut pauses = 1;
        while turn.give_way() {
            pauses += 1;
        }
        assert!(Instant::now() >= until && pauses >= 2, "{pauses}");
    }
}
