//! What moving the bytes of a tenant's commands may take of the processor.
//!
//! A read from a full pipe calls whoever waits for room in it, within the read. A program can let a million entries of
//! epoll instances wait for its own output (epoll(7)), and then each read takes a tenth of a second of the
//! server's time. A write to its stdin is the same the other way round, and a terminal is no better than a pipe. No
//! interrupt comes through meanwhile, so threads that unmap memory wait for that processor, and waste theirs.
//!
//! So what takes more than is ordinary is charged to the tenant, as other work of the server is
//! ([`crate::threads::priority`]). The command's pipes rest while the tenant has used more than one processor: they are
//! neither read nor written, and nothing else waits. What is ordinary costs nothing, however often: what commands write
//! is not paced.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limits::ledger::Ledger;
use crate::threads::priority::{BackgroundWork, PAUSES, STEPS_TIME, thread_time};

/// An ordinary call on a pipe takes no longer. One that moves 64 KiB takes about 15 us. It is small, because a command can
/// have each call take just as long.
pub(super) const CALL: Duration = Duration::from_micros(25);

/// To send what was read takes no longer. The client decides about that, and not the command.
pub(super) const DELIVERY: Duration = Duration::from_millis(1);

/// The pipes of one command, and the thread that reads and writes them.
pub(super) struct PipePace {
    /// `None` for a tenant that has the machine for itself.
    work: Option<Arc<BackgroundWork>>,
    /// Up to where it was looked at what the thread uses: its processor time, and when that was.
    looked_at: (Option<Duration>, Instant),
    /// What is not charged yet.
    used: Duration,
    /// Since when that was used.
    since: Instant,
    /// Until when the pipes rest.
    until: Instant,
}

impl PipePace {
    /// For pipes of this tenant.
    pub(super) fn of(ledger: &Ledger) -> Self {
        let now = Instant::now();
        Self {
            work: (!ledger.is_whole()).then(|| Arc::clone(&ledger.work)),
            looked_at: (None, now),
            used: Duration::ZERO,
            since: now,
            until: now,
        }
    }

    /// What this thread uses from here on is for the pipes.
    pub(super) fn begin(&mut self) {
        if self.work.is_some() {
            self.looked_at = (thread_time(), Instant::now());
        }
    }

    /// Charges what the thread has used since then, or since it was charged last, beyond what is `ordinary`.
    pub(super) fn charge(&mut self, ordinary: Duration) {
        let (Some(before), since) = self.looked_at else {
            return;
        };
        // To look at the clock is much cheaper than to ask for the processor time.
        if since.elapsed() <= ordinary {
            return;
        }
        self.begin();
        let used = self.looked_at.0.unwrap_or(before).saturating_sub(before);
        let Some((work, used)) = self.work.as_ref().zip(used.checked_sub(ordinary)) else {
            return;
        };
        if self.used.is_zero() {
            self.since = since;
        }
        self.used += used;
        if self.used >= STEPS_TIME {
            self.until = work.add(std::mem::take(&mut self.used), self.since);
        }
    }

    /// When to ask again whether the pipes still rest; `None` if they do not.
    pub(super) fn rests_until(&self) -> Option<Instant> {
        let work = self.work.as_ref()?;
        let (now, [shortest, longest]) = (Instant::now(), PAUSES);
        // Nobody waits for what has been deleted, which wakes nothing up.
        let rests = self.until >= now + shortest && work.check_open().is_ok();
        rests.then(|| self.until.min(now + longest))
    }
}

/// What was too little to rest for is left to the tenant's next request: there may be many such commands.
impl Drop for PipePace {
    fn drop(&mut self) {
        if let Some(work) = self.work.as_ref().filter(|_| !self.used.is_zero()) {
            work.leave(self.used, self.since);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ledger::Budget;

    const AT: fn(u64) -> Duration = Duration::from_millis;

    fn busy(pace: &mut PipePace, time: Duration) {
        pace.begin();
        let until = thread_time().unwrap() + time;
        while thread_time().unwrap() < until {}
        pace.charge(CALL);
    }

    #[test]
    fn pipes_rest_when_calls_take_more_than_ordinary_ones() {
        let ledger = Budget::new(1 << 20).ledger();
        let mut pace = PipePace::of(&ledger);
        // One processor can do what one command costs.
        busy(&mut pace, AT(20));
        assert!(ledger.work.is_charged());
        assert!(pace.until < Instant::now() + PAUSES[0]);
        // It has to do what others cost as well.
        ledger.work.add(AT(3_600_000), Instant::now());
        let mut other = PipePace::of(&ledger);
        busy(&mut other, AT(1));
        assert_eq!(other.rests_until(), None);
        busy(&mut other, AT(5));
        let again = other.rests_until().unwrap();
        assert!(again <= Instant::now() + PAUSES[1]);
        assert!(other.until > Instant::now() + AT(3_000_000));
        // Waiting is no work.
        let mut third = PipePace::of(&ledger);
        third.begin();
        std::thread::sleep(AT(50));
        third.charge(CALL);
        assert_eq!(third.rests_until(), None);
        // Nothing waits for what has been deleted.
        ledger.work.close();
        assert_eq!(other.rests_until(), None);
        // What is too little to rest for is left.
        let before = ledger.work.unpaid();
        busy(&mut other, AT(1));
        drop(other);
        assert!(ledger.work.unpaid() + CALL >= before + AT(1));
    }

    #[test]
    fn a_tenant_that_has_the_machine_for_itself_is_not_paced() {
        let ledger = Budget::new(1 << 20).whole();
        let mut pace = PipePace::of(&ledger);
        busy(&mut pace, AT(10));
        assert!(!ledger.work.is_charged());
        assert_eq!(pace.rests_until(), None);
    }
}
