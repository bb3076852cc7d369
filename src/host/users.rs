//! The uids of sandboxes, one each, and the rights that the server needs to assign them.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::iter::Chain;
use std::ops::{Range, RangeInclusive};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::config::HostSettings;
use crate::confine::is_among_programs;
use crate::error::{Error, Kind, Result};
use crate::sys::{ActingAs, User};

/// The free uids. A fresh uid is taken before a used one, and of those the one that has been free for
/// longest: files that a sandbox left outside its home stay out of reach of others as long as possible. So does what those
/// of an earlier server left, because each begins at another place of the range.
pub(super) struct Users {
    fresh: Chain<RangeInclusive<u32>, Range<u32>>,
    freed: VecDeque<u32>,
    /// Uids that no sandbox has, but that still have processes.
    aside: Vec<u32>,
    /// Uids that are not fresh: accounts, and those that sandboxes had at the start.
    taken: Vec<u32>,
}

impl Users {
    /// The users of a range, from a place of it on that a random number decides, without those that are `taken`.
    pub(super) fn new(range: &RangeInclusive<u32>, random: u64, taken: Vec<u32>) -> Self {
        let (first, last) = (*range.start(), *range.end());
        let count = u64::from(last - first) + 1;
        // Less than the length, which fits.
        let begin = first + u32::try_from(random % count).unwrap_or(0);
        Self {
            fresh: (begin..=last).chain(first..begin),
            freed: VecDeque::new(),
            aside: Vec::new(),
            taken,
        }
    }

    /// Takes a user for which `is_busy` is false; `None` if all are taken or busy.
    pub(super) fn take(&mut self, is_busy: impl Fn(User) -> bool) -> Option<User> {
        let mut reconsidered = false;
        loop {
            let taken = &self.taken;
            let fresh = self.fresh.find(|uid| !taken.contains(uid));
            let Some(uid) = fresh.or_else(|| self.freed.pop_front()) else {
                // The last resort: a uid that was busy earlier may be free by now.
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

    /// The number of uids that are put aside: something still has them, or had when it was last looked.
    pub(super) fn aside(&self) -> usize {
        self.aside.len()
    }

    /// Gives back a user that has no process any more.
    pub(super) fn free(&mut self, user: User) {
        self.freed.push_back(user.uid);
    }
}

/// The numbers in `users` that are an account's or a group's on this machine. A sandbox has its uid for a gid, too.
///
/// # Errors
/// `System` if a list of them cannot be read.
pub(super) fn accounts(users: &RangeInclusive<u32>) -> Result<Vec<u32>> {
    let mut numbers = Vec::new();
    // The third field is the number, and in the first file the fourth is a group's.
    for (path, fields) in [("/etc/passwd", 2..4), ("/etc/group", 2..3)] {
        let list = match std::fs::read(path) {
            Ok(list) => list,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => {
                let act = format_args!("cannot hold sandboxes: cannot read {path}");
                return Err(Error::io(act, &error));
            }
        };
        for line in String::from_utf8_lossy(&list).lines() {
            let fields = line.split(':').skip(fields.start).take(fields.len());
            numbers.extend(fields.filter_map(|field| field.parse::<u32>().ok()));
        }
    }
    numbers.retain(|number| users.contains(number));
    Ok(numbers)
}

/// Checks that the server may act as the users of the range.
///
/// # Errors
/// `System`; the text names the missing right.
pub fn check_rights(settings: &HostSettings) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return refuse("the server must run as root to give each its own user");
    }
    for uid in [*settings.users.start(), *settings.users.end()] {
        if ActingAs::new(User { uid, gid: uid }).is_err() {
            return refuse(&format!(
                "uid {uid} of SBX_UID_RANGE does not exist in this user namespace, or the server may not act as it"
            ));
        }
    }
    Ok(())
}

/// Checks that commands of sandboxes cannot read the file that holds the host's token.
///
/// # Errors
/// `System` if all users may read it and it is in a directory that every sandbox may read.
pub fn check_token_file(path: &Path) -> Result<()> {
    let status = path.metadata();
    let is_readable = status.is_ok_and(|status| status.permissions().mode() & 0o004 != 0);
    if !is_readable || !is_among_programs(path) {
        return Ok(());
    }
    let path = path.display();
    refuse(&format!(
        "each could read SBX_TOKEN_FILE {path}; take the permission from others (chmod o-r; defaultMode: 0400 of a \
         Kubernetes secret)"
    ))
}

fn refuse(why: &str) -> Result<()> {
    let text = format!("cannot hold sandboxes: {why}");
    Err(Error::new(Kind::System, text))
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
        let mut users = Users::new(&(1..=3), 0, Vec::new());
        assert_eq!([take(&mut users), take(&mut users)], [Some(1), Some(2)]);
        users.free(user(2));
        users.free(user(1));
        let all: Vec<_> = std::iter::from_fn(|| take(&mut users)).collect();
        assert_eq!(all, [3, 2, 1]);
    }

    #[test]
    fn they_go_round_from_wherever_they_begin() {
        for (random, expected) in [(3, [4, 5, 6]), (7, [5, 6, 4]), (u64::MAX, [4, 5, 6])] {
            let mut users = Users::new(&(4..=6), random, Vec::new());
            let all: Vec<_> = std::iter::from_fn(|| take(&mut users)).collect();
            assert_eq!(all, expected, "{random}");
        }
        let mut users = Users::new(&(0..=u32::MAX), u64::from(u32::MAX), Vec::new());
        assert_eq!(
            [take(&mut users), take(&mut users)],
            [Some(u32::MAX), Some(0)]
        );
    }

    #[test]
    fn an_account_is_never_given() {
        let mut users = Users::new(&(1..=3), 2, vec![1, 3]);
        assert_eq!([take(&mut users), take(&mut users)], [Some(2), None]);
    }

    #[test]
    fn a_busy_one_is_not_given_until_it_is_free() {
        let mut users = Users::new(&(1..=2), 0, Vec::new());
        assert_eq!(users.take(|user| user.uid == 1), Some(user(2)));
        assert_eq!(users.take(|user| user.uid == 1), None);
        assert_eq!(users.take(|_| false), Some(user(1)));
        assert_eq!(users.take(|_| false), None);
    }
}
