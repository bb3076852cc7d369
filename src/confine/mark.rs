//! The mark of a command: a number that all its descendants inherit and everyone can read.
//!
//! It is the hard limit of `RLIMIT_RTTIME`, lowered from infinity to [`BASE`] plus the number. The
//! limit means something only for real-time tasks, and 146,000 years mean nothing to those either. It
//! can be lowered without privileges, survives fork, execve and changes of user, and
//! `/proc/<pid>/limits` shows it to everyone (setrlimit(2)). A process can lower its own further:
//! then it, and what it starts, is no longer found by the mark.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sys::{self, Pid, Resource, proc};

/// The name of the limit in `/proc/<pid>/limits`.
const LIMIT: &str = "Max realtime timeout";

/// Marks start above this. Numbers below are limits that someone else has set.
const BASE: u64 = 1 << 62;

/// The number of a command, unique in the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mark(u64);

impl Mark {
    /// An unused mark. `None` if the server itself has such a limit, for example as a command of another
    /// server: its own processes could not be distinguished from the others then.
    pub fn next() -> Option<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self::are_available().then(|| Self(NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    /// Whether commands get marks.
    pub fn are_available() -> bool {
        static AVAILABLE: LazyLock<bool> =
            LazyLock::new(|| sys::limits(libc::RLIMIT_RTTIME).rlim_max == libc::RLIM_INFINITY);
        *AVAILABLE
    }

    /// The mark of a process; `None` if it has none or does not exist.
    pub fn of(pid: Pid) -> Option<Self> {
        let limit = proc::hard_limit(pid, LIMIT).filter(|limit| *limit != u64::MAX)?;
        limit.checked_sub(BASE).map(Self)
    }

    /// Whether a process was started by a command of a sandbox, of this server or an earlier one; `None` if there is no
    /// such process. Commands of a dedicated machine have marks too, and may gain privileges. A process that lowers its
    /// mark keeps a limit, which others rarely have, and an empty bounding set.
    pub fn is_of_sandbox(pid: Pid) -> Option<bool> {
        let limit = proc::hard_limit(pid, LIMIT)?;
        let (has_no_new_privileges, has_no_bounding_set) = proc::deprivation(pid)?;
        let is_limited = limit != u64::MAX && (limit >= BASE || has_no_bounding_set);
        Some(is_limited && has_no_new_privileges)
    }

    /// The limit that gives a process the mark.
    pub(super) fn limit(self) -> (Resource, libc::rlimit) {
        let limit = libc::rlimit {
            rlim_cur: BASE + self.0,
            rlim_max: BASE + self.0,
        };
        (libc::RLIMIT_RTTIME, limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_the_limit_has_no_mark() {
        assert!(Mark::are_available());
        assert_eq!(Mark::of(std::process::id().cast_signed()), None);
        assert_ne!(Mark::next(), Mark::next());
    }
}
