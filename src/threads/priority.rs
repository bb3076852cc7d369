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
//! end with the tenant's workspace. So do the threads that read what a context's code writes to the server, for as long as that takes.
//!
//! What other requests take of their threads is charged to one of many tenants when they have ended, and paid by its next
//! ones: each may be small, but there may be many. One that lasts pays in between, at the steps that it takes.

use std::cell::{Cell, RefCell};
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
use crate::threads::places::Places;
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
pub const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(200)];

/// What the threads of a tenant do that read much.
#[derive(Default)]
pub struct BackgroundWork {
    /// Guards the two, which are about time alone.
    used: Mutex<UsedTime>,
    is_closed: AtomicBool,
    /// For steps that nothing interrupts: one thread at a time.
    pub alone: Places,
}

/// What the threads of a tenant have used.
#[derive(Default)]
struct UsedTime {
    /// Until when one processor would have been busy with what they did.
    busy: Option<Instant>,
    /// What turns used at their ends, which is no part of that yet: since when, and how long. Each may be too little to
    /// pause for, but many of them are not.
    unpaid: Option<(Instant, Duration)>,
    /// Until when whoever begins has to pause for what was paid last: one of them pays for all.
    paid: Option<Instant>,
}

impl UsedTime {
    fn add(&mut self, used: Duration, since: Instant) -> Instant {
        let until = self.busy.map_or(since, |busy| busy.max(since)) + used;
        self.busy = Some(until);
        until
    }
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
    pub fn add(&self, used: Duration, since: Instant) -> Instant {
        lock(&self.used).add(used, since)
    }

    /// Leaves processor time that was used after `since` to be paid by the next turn that asks.
    pub fn leave(&self, used: Duration, since: Instant) {
        let used = used.min(MOST_UNPAID);
        // What lasted for long is not made up for either.
        let since = Instant::now()
            .checked_sub(MOST_UNPAID)
            .map_or(since, |least| since.max(least));
        let mut times = lock(&self.used);
        let (first, before) = times.unpaid.unwrap_or((since, Duration::ZERO));
        times.unpaid = Some((first.min(since), before + used));
    }

    /// Pays what turns have left, if it is worth a pause. Until when to pause for that, and for what was paid before.
    fn pay(&self) -> Option<Instant> {
        let mut times = lock(&self.used);
        if let Some((since, used)) = times.unpaid.filter(|(_, used)| *used >= STEPS_TIME) {
            times.unpaid = None;
            times.paid = Some(times.add(used, since));
        }
        times.paid.filter(|until| *until > Instant::now())
    }

    /// What requests have left to be paid.
    #[cfg(test)]
    pub fn unpaid(&self) -> Duration {
        let unpaid = lock(&self.used).unpaid;
        unpaid.map_or(Duration::ZERO, |(_, used)| used)
    }

    /// Whether anything was charged.
    #[cfg(test)]
    pub fn is_charged(&self) -> bool {
        let used = lock(&self.used);
        used.unpaid.is_some() || used.busy.is_some()
    }

    /// As after so much work.
    #[cfg(test)]
    pub fn owing(used: Duration) -> Arc<Self> {
        let work = Self::default();
        work.add(used, Instant::now());
        Arc::new(work)
    }
}

/// More is not owed for the end of a turn, which may have lasted for hours.
const MOST_UNPAID: Duration = Duration::from_secs(1);

thread_local! {
    /// Up to where the processor time of this thread was charged.
    static CHARGED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// The processor time of this thread; `None` where the kernel does not tell.
pub fn thread_time() -> Option<Duration> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).ok();
    time.map(Duration::from)
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
        turn.used = thread_time().unwrap_or_default();
        turn
    }

    /// Pauses before its first step, too, if the tenant's threads have used more than one processor: otherwise each of many
    /// requests that begin together would have a step for which nobody waits.
    #[must_use]
    pub fn after_others(mut self) -> Self {
        let busy = lock(&self.work.used).busy;
        self.until = busy.map_or(self.until, |busy| busy.max(self.until));
        self
    }

    /// The processor time since it was asked last, except what another turn of the thread was charged for.
    fn use_time(&mut self) -> Duration {
        let now = thread_time().unwrap_or(self.used);
        let charged = CHARGED.replace(now);
        now.saturating_sub(std::mem::replace(&mut self.used, now).max(charged))
    }

    /// Pauses if the tenant's threads have used more than one processor. To be called every few milliseconds. True
    /// if more pauses are owed: look whether the client is there, and call it again.
    #[must_use]
    pub fn give_way(&mut self) -> bool {
        let (now, [shortest, longest]) = (Instant::now(), PAUSES);
        if let Some(until) = self.work.pay() {
            self.until = self.until.max(until);
        }
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

    /// Takes the pauses that are owed, for a second at most: nobody looks whether the client is there.
    fn take_pauses(&mut self) {
        let begun = Instant::now();
        while self.give_way() && self.check_open().is_ok() && begun.elapsed() < MOST_UNPAID {}
    }

    /// A turn of the current thread that pays what the tenant's turns have left; `None` if that is not worth a pause.
    pub fn that_pays(work: &Arc<BackgroundWork>) -> Option<Self> {
        let until = work.pay()?;
        let mut turn = Self::of_this_thread(work);
        turn.until = turn.until.max(until);
        Some(turn)
    }

    /// The end of a request; `None` if it took nothing that others were not charged for.
    pub fn end(mut self) -> Option<EndedRequest> {
        let used = self.use_time();
        let since = self.until;
        (!used.is_zero()).then_some(EndedRequest { used, since })
    }

    /// Asks `interrupt`, and gives way each time before. What the thread uses after the last time is left to the next turn
    /// of the tenant.
    pub fn before<I: Interrupt>(self, interrupt: I) -> impl Interrupt + use<I> {
        let turn = self;
        GivesWay { interrupt, turn }
    }
}

/// What a request took that has ended.
pub struct EndedRequest {
    used: Duration,
    since: Instant,
}

impl EndedRequest {
    /// Leaves it to the next turn of a tenant that asks.
    pub fn leave_to(self, work: &BackgroundWork) {
        work.leave(self.used, self.since);
    }

    /// Charges it to a tenant whose next requests do not show whose they are. Pauses for it at once, if the thread `may_pause`.
    pub fn pay_for(self, work: &Arc<BackgroundWork>, may_pause: bool) {
        self.leave_to(work);
        let turn = may_pause.then(|| BackgroundTurn::that_pays(work));
        if let Some(mut turn) = turn.flatten() {
            turn.take_pauses();
        }
    }
}

thread_local! {
    /// How the request is paced that this thread answers, and when it was looked at last.
    static PACED: RefCell<Option<(BackgroundTurn, Instant)>> = const { RefCell::new(None) };
}

/// The request that the current thread answers. It is not paced any more when this is dropped.
#[derive(Default)]
pub struct PacedRequest(());

impl PacedRequest {
    /// Paces it from now on, as work of this tenant.
    pub fn pace(work: &Arc<BackgroundWork>) {
        PACED.set(Some((BackgroundTurn::of_this_thread(work), Instant::now())));
    }

    /// It has received or sent something, and will again. Pauses if the tenant has used more than one processor, and no lock
    /// may be held therefore. A step may take a microsecond, so not each looks at the processor time.
    pub fn step() {
        PACED.with_borrow_mut(|paced| {
            if let Some((turn, looked_at)) = paced
                && looked_at.elapsed() >= PAUSES[0]
            {
                turn.take_pauses();
                *looked_at = Instant::now();
            }
        });
    }
}

impl Drop for PacedRequest {
    fn drop(&mut self) {
        PACED.take();
    }
}

/// Steps of a thread that does other things between them, and goes on with those while the steps pause.
///
/// A step may be so small that to ask for the thread's processor time would take a good part of it. So that is asked for
/// once in many steps. It includes what came between them, and their time on the clock includes waits for a processor:
/// the smaller of both counts.
pub struct BackgroundSteps {
    turn: BackgroundTurn,
    /// When the last step began.
    begun: Instant,
    /// How long the steps took for which there was no pause yet.
    took: Duration,
}

/// So long are steps between two pauses. What takes less, and is all that there is, never waits for the tenant's others.
pub const STEPS_TIME: Duration = Duration::from_millis(5);

impl BackgroundSteps {
    /// Steps of the current thread.
    pub fn of_this_thread(work: &Arc<BackgroundWork>) -> Self {
        Self {
            turn: BackgroundTurn::of_this_thread(work),
            begun: Instant::now(),
            took: Duration::ZERO,
        }
    }

    pub fn begin(&mut self) {
        self.begun = Instant::now();
        if self.took.is_zero() {
            // What came before is no part of it, and the time without steps is not made up for.
            self.turn.use_time();
            self.turn.until = self.begun;
        }
    }

    /// The step has ended. Until when there must be no other, if there must not be one now.
    pub fn end(&mut self) -> Option<Instant> {
        let now = Instant::now();
        self.took += now - self.begun;
        if self.took < STEPS_TIME {
            return None;
        }
        let used = std::mem::take(&mut self.took).min(self.turn.use_time());
        let until = self.turn.work.add(used, self.turn.until);
        Some(until).filter(|until| *until > now)
    }
}

/// Gives way each time that it is asked.
struct GivesWay<I> {
    interrupt: I,
    turn: BackgroundTurn,
}

impl<I: Interrupt> Interrupt for GivesWay<I> {
    fn check(&mut self) -> std::result::Result<(), Stopped> {
        self.turn.pass(&mut || self.interrupt.check())
    }
}

impl<I> Drop for GivesWay<I> {
    fn drop(&mut self) {
        let used = self.turn.use_time();
        self.turn.work.leave(used, self.turn.until);
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
        task(&mut turn.before(&mut *interrupt));
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
    let turn = BackgroundTurn::new(work).after_others();
    let nice_task = || {
        make_thread_nice(BACKGROUND_NICE);
        fault::point("background");
        task(turn);
    };
    let done = background_thread().run(nice_task);
    done.map_err(|error| no_thread(&error))
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
        let turn = BackgroundTurn::new(work).after_others();
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
    use crate::client::Uninterrupted;

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
    fn steps_pause_when_they_have_taken_their_time_and_not_before() {
        let at = Duration::from_millis;
        let busy = |time: Duration| {
            let cpu = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
            let until = cpu() + time;
            while cpu() < until {}
        };
        let owed = Duration::from_secs(3600);
        let before = Instant::now();
        let mut steps = BackgroundSteps::of_this_thread(&BackgroundWork::owing(owed));
        // Time between the steps does not count.
        for _ in 0..10 {
            steps.begin();
            // A busy machine may have taken the processor away.
            assert!(steps.end().is_none() || before.elapsed() > at(5));
            busy(at(1));
        }
        steps.begin();
        busy(at(6));
        let until = steps.end().unwrap();
        assert!(until >= before + owed + at(6));
        // Nor does the wait for a processor.
        steps.begin();
        std::thread::sleep(at(100));
        assert!(steps.end().unwrap() < until + at(50));
        // One processor can do what they do alone, and they do not make up for the time before.
        let mut steps = BackgroundSteps::of_this_thread(&Arc::default());
        let begun = Instant::now();
        steps.turn.until = begun.checked_sub(at(1000)).unwrap();
        steps.begin();
        busy(at(20));
        assert_eq!(steps.end(), None);
        let busy = lock(&steps.turn.work.used).busy;
        assert!(busy.unwrap() >= begun + at(19));
    }

    #[test]
    fn a_request_that_lasts_pauses_at_its_steps() {
        let paced = PacedRequest::default();
        PacedRequest::step();
        let work = BackgroundWork::owing(Duration::from_secs(3600));
        PacedRequest::pace(&work);
        work.leave(Duration::from_millis(100), Instant::now());
        let begun = Instant::now();
        while begun.elapsed() < MOST_UNPAID {
            PacedRequest::step();
        }
        let looked_at = || PACED.with_borrow(|paced| paced.as_ref().map(|(_, at)| *at));
        // One step took all of that time.
        assert!(looked_at().unwrap() >= begun + MOST_UNPAID);
        // Nobody waits for what has been deleted.
        work.close();
        std::thread::sleep(PAUSES[0]);
        PacedRequest::step();
        drop(paced);
        assert_eq!(looked_at(), None);
    }

    #[test]
    fn what_many_short_turns_use_is_paid_together() {
        let work = BackgroundWork::default();
        let (now, at) = (Instant::now(), Duration::from_millis);
        let ago = |time| now.checked_sub(at(time)).unwrap();
        work.leave(at(2), ago(50));
        work.leave(at(2), ago(10));
        assert_eq!(work.pay(), None);
        // One processor had the time since the first of them.
        work.leave(at(2), ago(5));
        assert_eq!(work.pay(), None);
        assert_eq!(lock(&work.used).busy, Some(ago(44)));
        assert_eq!(lock(&work.used).unpaid, None);
        work.add(at(9000), now);
        // There is no end to how long a turn may last, but to what it owes.
        work.leave(at(5000), ago(100_000));
        let until = now + at(9000) + MOST_UNPAID;
        assert_eq!(work.pay(), Some(until));
        // Those that begin meanwhile pause as long, and not for what others do from here on.
        work.add(at(100), now);
        assert_eq!(work.pay(), Some(until));
    }

    #[test]
    fn the_end_of_a_turn_is_charged_once() {
        let work = Arc::<BackgroundWork>::default();
        let turn = || BackgroundTurn::of_this_thread(&work).before(Uninterrupted);
        let outer = turn();
        let inner = turn();
        let until = thread_time().unwrap() + Duration::from_millis(20);
        while thread_time().unwrap() < until {}
        drop(inner);
        let unpaid = || lock(&work.used).unpaid.unwrap().1;
        let of_inner = unpaid();
        assert!(of_inner >= Duration::from_millis(20));
        drop(outer);
        assert!(unpaid() < of_inner + Duration::from_millis(10));
        // The next one pays before it begins.
        turn().check().unwrap();
        assert!(lock(&work.used).busy.is_some());
    }

    #[test]
    fn a_turn_after_others_pauses_before_its_first_step() {
        let owed = Duration::from_secs(3600);
        let (begun, work) = (Instant::now(), BackgroundWork::owing(owed));
        let mut turn = BackgroundTurn::of_this_thread(&work).after_others();
        assert!(turn.until >= begun + owed);
        assert!(turn.give_way());
        let turn = BackgroundTurn::of_this_thread(&Arc::default()).after_others();
        assert!(turn.until <= Instant::now());
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
