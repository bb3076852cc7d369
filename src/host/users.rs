//! The users that sandboxes are given, one each, and what the server must be to give them.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use crate::config::HostSettings;
use crate::error::{Error, Kind, Result};
use crate::sys::{ActingAs, User};

/// Which users are free. A new one is preferred to one that was in use, and of those the one that
/// has been free for longest: what a sandbox leaves where the server does not look is found as late
/// as possible by another.
pub(super) struct Users {
    fresh: RangeInclusive<u32>,
    freed: VecDeque<u32>,
    /// Those that something still runs as, although no sandbox has them.
    aside: Vec<u32>,
}

impl Users {
    pub(super) fn new(range: RangeInclusive<u32>) -> Self {
        Self {
            fresh: range,
            freed: VecDeque::new(),
            aside: Vec::new(),
        }
    }

    /// A user that nothing runs as, by what `is_busy` says; none if there is none.
    pub(super) fn take(&mut self, is_busy: impl Fn(User) -> bool) -> Option<User> {
        let mut reconsidered = false;
        loop {
            let Some(uid) = self.fresh.next().or_else(|| self.freed.pop_front()) else {
                // The last resort: one that was busy once may be no longer.
                if reconsidered || self.aside.is_empty() {
                    return None;
                }
                reconsidered = true;
                self.freed.extend(std::mem::take(&mut self.aside));
                continue;
            };
            let user = User { uid, gid: uid };
            if !is_busy(user) {
                return Some(user);
            }
            self.aside.push(uid);
        }
    }

    /// Nothing runs as this user any more.
    pub(super) fn free(&mut self, user: User) {
        self.freed.push_back(user.uid);
    }

    /// Something still runs as this user, or has left something behind.
    pub(super) fn set_aside(&mut self, user: User) {
        self.aside.push(user.uid);
    }
}

/// Whether this process can be what sandboxes need it to be.
///
/// # Errors
/// What it cannot.
pub fn check_rights(settings: &HostSettings) -> Result<()> {
    let refuse = |why: String| {
        Err(Error::new(
            Kind::System,
            format!("cannot hold sandboxes: {why}"),
        ))
    };
    if !nix::unistd::geteuid().is_root() {
        return refuse("the server must run as root to give each its own user".to_owned());
    }
    for uid in [*settings.users.start(), *settings.users.end()] {
        if ActingAs::new(User { uid, gid: uid }).is_err() {
            return refuse(format!(
                "uid {uid} of SBX_UID_RANGE does not exist in this user namespace, or the server may not act as it"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(users: &mut Users) -> Option<u32> {
        users.take(|_| false).map(|user| user.uid)
    }

    fn user(uid: u32) -> User {
        User { uid, gid: uid }
    }

    #[test]
    fn those_that_were_free_for_longest_come_first() {
        let mut users = Users::new(1..=3);
        assert_eq!([take(&mut users), take(&mut users)], [Some(1), Some(2)]);
        users.free(user(2));
        users.free(user(1));
        let all: Vec<_> = std::iter::from_fn(|| take(&mut users)).collect();
        assert_eq!(all, [3, 2, 1]);
    }

    #[test]
    fn a_busy_one_is_not_given_until_it_is_free() {
        let mut users = Users::new(1..=2);
        assert_eq!(users.take(|user| user.uid == 1), Some(user(2)));
        assert_eq!(users.take(|user| user.uid == 1), None);
        assert_eq!(users.take(|_| false), Some(user(1)));
        assert_eq!(users.take(|_| false), None);
        users.set_aside(user(2));
        assert_eq!(users.take(|_| false), Some(user(2)));
    }
}
