//! Refuses connections of sandboxes that make others wait in the queue of connections to accept.
//!
//! Connections are accepted in the order in which they came, so a sandbox that opens them faster than they are served
//! delays everybody's. While the queue is short, nobody waits, and everybody is served, however fast they connect.
//! While it is longer, a sandbox beyond its share is refused before its connection costs a slot and a thread. The share
//! is what each user would have if all users that connect were equally fast. A sandbox that connects alone has all of
//! it, until the queue is so long that the next client would have to wait. Clients that are not sandboxes are never
//! refused, and count as one user.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Length of a window. Connections of the current window and of the one before it count.
const WINDOW: Duration = Duration::from_millis(100);

/// Connections that a sandbox may open in two windows in any case.
const LEAST_SHARE: usize = 64;

/// Most waiting connections of a short queue: all of them are accepted in a few milliseconds.
const SHORT_QUEUE: u32 = 32;

/// Waiting connections from which the next client would wait too long, in the order of 50 milliseconds.
const LONG_QUEUE: u32 = 256;

/// Who opens connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Opener {
    /// A user that may be a sandbox's; `None` if the kernel does not tell which.
    Local(Option<u32>),
    /// Everybody else.
    Other,
}

/// The connections that were accepted recently while the queue was not short.
#[derive(Default)]
pub struct Rush {
    /// When the current window began.
    begun: Option<Instant>,
    /// By user: in the current window, and in the one before it.
    opened: HashMap<Opener, [usize; 2]>,
}

/// Whether the queue is so short that it does not matter who opens the connections.
pub fn is_short(waiting: u32) -> bool {
    waiting <= SHORT_QUEUE
}

impl Rush {
    /// Whether to refuse a connection of `opener` while `waiting` more wait behind it. If [`is_short`] holds for them,
    /// `opener` does not matter, so the caller need not ask the kernel for it: asking takes longer than the rest of
    /// accepting.
    pub fn is_flood(&mut self, waiting: u32, opener: Opener, now: Instant) -> bool {
        self.turn(now);
        if is_short(waiting) {
            return false;
        }
        let own = self.opened.entry(opener).or_default();
        own[0] += 1;
        let own = own.iter().sum::<usize>();
        let users = self.opened.len();
        let all = self.opened.values().flatten().sum::<usize>();
        // A quarter more, so that a user that is as fast as the others is not refused by chance.
        let share = all * 5 / (4 * users);
        let is_beyond = users > 1 && own > share || waiting >= LONG_QUEUE;
        opener != Opener::Other && own > LEAST_SHARE && is_beyond
    }

    /// Forgets the windows that have passed.
    fn turn(&mut self, now: Instant) {
        while self.begun.is_none_or(|begun| now >= begun + WINDOW) {
            self.opened.retain(|_, counts| {
                *counts = [0, counts[0]];
                counts[1] > 0
            });
            let next = self.begun.filter(|_| !self.opened.is_empty());
            self.begun = Some(next.map_or(now, |begun| begun + WINDOW));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SANDBOX: Opener = Opener::Local(Some(7));

    /// Neither short nor long.
    const QUEUE: u32 = LONG_QUEUE - 1;

    /// How many of `count` connections are refused, each with `waiting` more behind it.
    fn refused(rush: &mut Rush, opener: Opener, count: usize, waiting: u32, now: Instant) -> usize {
        let is_flood = |_: &usize| rush.is_flood(waiting, opener, now);
        (0..count).filter(is_flood).count()
    }

    #[test]
    fn nobody_is_refused_while_the_queue_is_short() {
        let (mut rush, now) = (Rush::default(), Instant::now());
        assert_eq!(refused(&mut rush, Opener::Other, 9, SHORT_QUEUE, now), 0);
        assert_eq!(refused(&mut rush, SANDBOX, 10_000, SHORT_QUEUE, now), 0);
        assert!(rush.opened.is_empty());
    }

    #[test]
    fn a_sandbox_is_refused_what_is_beyond_its_share_while_others_connect() {
        let (mut rush, now) = (Rush::default(), Instant::now());
        let alone = refused(&mut rush, SANDBOX, 1000, QUEUE, now);
        assert_eq!(alone, 0, "it is alone");
        assert_eq!(refused(&mut rush, Opener::Other, 1, QUEUE, now), 0);
        assert_eq!(refused(&mut rush, SANDBOX, 1000, QUEUE, now), 1000);
        // Another sandbox that opens only a few is not refused.
        let other = Opener::Local(Some(8));
        assert_eq!(refused(&mut rush, other, LEAST_SHARE, QUEUE, now), 0);
        // When nobody else has connected for two windows, it is alone again.
        let mut later = now;
        for _ in 0..3 {
            later += WINDOW;
            refused(&mut rush, SANDBOX, 100, QUEUE, later);
        }
        assert_eq!(refused(&mut rush, SANDBOX, 1000, QUEUE, later), 0);
    }

    #[test]
    fn a_sandbox_alone_is_refused_what_others_would_wait_for() {
        let (mut rush, now) = (Rush::default(), Instant::now());
        let count = LEAST_SHARE + 100;
        assert_eq!(refused(&mut rush, SANDBOX, count, LONG_QUEUE, now), 100);
        assert_eq!(refused(&mut rush, SANDBOX, 100, QUEUE, now), 0);
        let few = LEAST_SHARE / 2;
        let other = Opener::Local(Some(8));
        assert_eq!(refused(&mut rush, other, few, LONG_QUEUE, now), 0);
        assert_eq!(refused(&mut rush, Opener::Other, 500, LONG_QUEUE, now), 0);
    }

    #[test]
    fn who_is_as_fast_as_others_and_who_is_no_sandbox_is_not_refused() {
        let (mut rush, now) = (Rush::default(), Instant::now());
        let users = [Some(7), Some(8), None].map(Opener::Local);
        for _ in 0..1000 {
            for user in users {
                assert_eq!(refused(&mut rush, user, 1, QUEUE, now), 0);
            }
        }
        let later = now + WINDOW;
        assert_eq!(refused(&mut rush, Opener::Other, 5000, QUEUE, now), 0);
        assert_eq!(refused(&mut rush, Opener::Other, 5000, QUEUE, later), 0);
        refused(&mut rush, Opener::Other, 1, QUEUE, now + 2 * WINDOW);
        // Three users that flood are refused although none is faster than the others.
        for user in users.repeat(2) {
            refused(&mut rush, user, 10_000, QUEUE, now + 2 * WINDOW);
        }
        for user in users {
            assert!(refused(&mut rush, user, 10_000, QUEUE, now + 3 * WINDOW) > 0);
        }
    }

    #[test]
    fn what_was_opened_is_forgotten_after_two_windows() {
        let (mut rush, now) = (Rush::default(), Instant::now());
        refused(&mut rush, SANDBOX, 1000, QUEUE, now);
        refused(&mut rush, Opener::Other, 1, SHORT_QUEUE, now + 2 * WINDOW);
        assert!(rush.opened.is_empty());
    }
}
