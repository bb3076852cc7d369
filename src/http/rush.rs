//! How fast the users of this machine open connections.
//!
//! A sandbox that opens more than its share of the last fifth of a second is refused before the connection costs a slot and
//! a thread. The share is what each user would have if all that connect were equally fast: whoever is alone is not refused,
//! nor is who opens few. Whoever is no sandbox is not refused at all, and all of them count as one.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long a window is. This one and the one before it count.
const WINDOW: Duration = Duration::from_millis(100);

/// What everybody may open in two windows.
const LEAST_SHARE: usize = 1024;

/// Who opens connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Opener {
    /// A user who may be a sandbox's; `None` if the kernel does not tell which.
    Local(Option<u32>),
    /// Anybody else.
    Other,
}

/// The connections that were accepted lately.
#[derive(Default)]
pub struct Rush {
    begun: Option<Instant>,
    /// By user: in this window, and in the one before it.
    opened: HashMap<Opener, [usize; 2]>,
    all: [usize; 2],
}

impl Rush {
    /// Whether so few connections came that it does not matter whom the next one comes from.
    pub fn is_quiet(&mut self, now: Instant) -> bool {
        self.turn(now);
        self.all.iter().sum::<usize>() < LEAST_SHARE
    }

    /// Counts a connection. Whether it is beyond the share of its user. One that came while it was [quiet](Self::is_quiet)
    /// has no opener, and is nobody's: as a user of its own it would be somebody beside whoever is alone.
    pub fn is_flood(&mut self, opener: Option<Opener>, now: Instant) -> bool {
        self.turn(now);
        self.all[0] += 1;
        let Some(opener) = opener else { return false };
        let own = self.opened.entry(opener).or_default();
        own[0] += 1;
        let own = own.iter().sum::<usize>();
        let users = self.opened.len();
        // A quarter more, so that who is as fast as the others is not refused by chance.
        let share = self.all.iter().sum::<usize>() * 5 / (4 * users);
        opener != Opener::Other && users > 1 && own > share.max(LEAST_SHARE)
    }

    fn turn(&mut self, now: Instant) {
        while self.begun.is_none_or(|begun| now >= begun + WINDOW) {
            self.opened.retain(|_, counts| {
                *counts = [0, counts[0]];
                counts[1] > 0
            });
            self.all = [0, self.all[0]];
            let next = self.begun.filter(|_| self.all[1] > 0);
            self.begun = Some(next.map_or(now, |begun| begun + WINDOW));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SANDBOX: Opener = Opener::Local(Some(7));

    /// How many of so many connections are refused.
    fn refused(rush: &mut Rush, opener: Opener, count: usize, now: Instant) -> usize {
        let is_flood = |_: &usize| rush.is_flood(Some(opener), now);
        (0..count).filter(is_flood).count()
    }

    #[test]
    fn a_sandbox_is_refused_what_is_beyond_its_share_while_others_connect() {
        let (mut rush, now) = (Rush::default(), Instant::now());
        let alone = refused(&mut rush, SANDBOX, LEAST_SHARE, now);
        assert_eq!(alone, 0, "it is alone");
        assert_eq!(refused(&mut rush, Opener::Other, 1, now), 0);
        assert_eq!(refused(&mut rush, SANDBOX, 1000, now), 1000);
        // The few of another one are not.
        assert_eq!(
            refused(&mut rush, Opener::Local(Some(8)), LEAST_SHARE, now),
            0
        );
        // When nobody else has come for two windows it is alone again.
        let mut later = now;
        for _ in 0..3 {
            later += WINDOW;
            refused(&mut rush, SANDBOX, 100, later);
        }
        assert_eq!(refused(&mut rush, SANDBOX, 2 * LEAST_SHARE, later), 0);
    }

    #[test]
    fn who_is_as_fast_as_others_and_who_is_no_sandbox_is_not_refused() {
        let (mut rush, now) = (Rush::default(), Instant::now());
        let users = [Some(7), Some(8), None].map(Opener::Local);
        for _ in 0..2 * LEAST_SHARE {
            for user in users {
                assert_eq!(refused(&mut rush, user, 1, now), 0);
            }
        }
        assert_eq!(refused(&mut rush, Opener::Other, 5000, now), 0);
        assert_eq!(refused(&mut rush, Opener::Other, 5000, now + WINDOW), 0);
        refused(&mut rush, Opener::Other, 1, now + 2 * WINDOW);
        // Three that flood do not cover each other.
        for user in users.repeat(2) {
            refused(&mut rush, user, 10_000, now + 2 * WINDOW);
        }
        for user in users {
            assert!(refused(&mut rush, user, 10_000, now + 3 * WINDOW) > 0);
        }
    }

    #[test]
    fn who_came_while_it_was_quiet_is_nobody_beside_a_sandbox_alone() {
        let (mut rush, now) = (Rush::default(), Instant::now());
        for _ in 0..16 {
            assert!(!rush.is_flood(None, now));
        }
        assert_eq!(refused(&mut rush, SANDBOX, 2 * LEAST_SHARE, now), 0);
        assert!(!rush.is_quiet(now));
    }

    #[test]
    fn it_is_quiet_again_after_two_windows() {
        let (mut rush, now) = (Rush::default(), Instant::now());
        refused(&mut rush, SANDBOX, LEAST_SHARE - 1, now);
        assert!(rush.is_quiet(now));
        refused(&mut rush, SANDBOX, 1, now);
        assert!(!rush.is_quiet(now));
        assert!(!rush.is_quiet(now + WINDOW));
        assert!(rush.is_quiet(now + 2 * WINDOW));
        assert!(rush.opened.is_empty());
    }
}
