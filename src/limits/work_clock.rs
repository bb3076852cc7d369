//! Time in a workspace: it stands still while the workspace is paused, so that deadlines and idle time do too.

use std::time::{Duration, Instant};

use crate::threads::lock::{Mutex, lock};

/// While the clock stands still, whoever waits for a deadline looks again no sooner than after this time. Later than
/// the deadline by this much at most.
const LEAST_WAIT: Duration = Duration::from_millis(50);

/// A clock that can be stopped. Its times are for comparisons with others of the same clock only.
#[derive(Default)]
pub struct WorkClock(Mutex<Standing>);

#[derive(Default)]
struct Standing {
    /// How long it has stood still so far.
    stood: Duration,
    /// Since when it stands still.
    since: Option<Instant>,
}

impl Standing {
    fn now(&self) -> Instant {
        self.of(self.since.unwrap_or_else(Instant::now))
    }

    fn of(&self, real: Instant) -> Instant {
        // No clock has stood still for longer than the machine has run.
        real.checked_sub(self.stood).unwrap_or(real)
    }
}

impl WorkClock {
    pub fn now(&self) -> Instant {
        lock(&self.0).now()
    }

    /// What it shows at a real time, if it does not stop before.
    pub fn of(&self, real: Instant) -> Instant {
        lock(&self.0).of(real)
    }

    /// The real time at which it is worth looking whether this time has come. Nobody needs to be woken when the
    /// clock goes on: who waits for it while it stands still looks again after the time that is left, which is never
    /// later than the time itself.
    pub fn wake_at(&self, at: Instant) -> Instant {
        let standing = lock(&self.0);
        if standing.since.is_some() {
            let left = at.saturating_duration_since(standing.now());
            let now = Instant::now();
            return now.checked_add(left.max(LEAST_WAIT)).unwrap_or(at);
        }
        at.checked_add(standing.stood).unwrap_or(at)
    }

    pub fn is_stopped(&self) -> bool {
        lock(&self.0).since.is_some()
    }

    /// Stops it, unless it stands still.
    pub fn stop(&self) {
        lock(&self.0).since.get_or_insert_with(Instant::now);
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        let mut standing = lock(&self.0);
        if let Some(since) = standing.since.take() {
            standing.stood += since.elapsed();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    #[test]
    fn what_it_shows_stands_still_while_it_is_stopped() {
        let clock = WorkClock::default();
        let real = Instant::now();
        assert_eq!(clock.of(real), real);
        clock.stop();
        let stopped = clock.now();
        sleep(Duration::from_millis(20));
        clock.stop();
        assert!(clock.is_stopped());
        assert_eq!(clock.now(), stopped);
        clock.go_on();
        clock.go_on();
        let stood = clock.now().elapsed();
        assert!(stood >= Duration::from_millis(20), "{stood:?}");
        assert!(clock.now() >= stopped);
    }

    #[test]
    fn a_deadline_is_moved_by_as_long_as_it_stood() {
        let clock = WorkClock::default();
        let hour = Duration::from_secs(3600);
        let deadline = clock.now() + hour;
        assert_eq!(clock.wake_at(deadline), deadline);
        clock.stop();
        sleep(Duration::from_millis(20));
        // As much is left as was when it stopped.
        let wait = clock.wake_at(deadline) - Instant::now();
        assert!(wait > Duration::from_secs(3599), "{wait:?}");
        // One that is near is not waited for by looking all the time.
        let near = clock.wake_at(clock.now()) - Instant::now();
        assert!(near > LEAST_WAIT / 2 && near <= LEAST_WAIT, "{near:?}");
        clock.go_on();
        let moved = clock.wake_at(deadline) - deadline;
        assert!(moved >= Duration::from_millis(20), "{moved:?}");
    }
}
