//! How many directories may be watched. The kernel counts all watches of the server together, so each tenant
//! has a share of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The kernel's limits of watches: of the machine, and of the user namespace.
const LIMITS: [&str; 2] = [
    "/proc/sys/fs/inotify/max_user_watches",
    "/proc/sys/user/max_inotify_watches",
];

/// The watches of one tenant.
pub struct WatchShare {
    used: AtomicUsize,
    most: usize,
}

impl WatchShare {
    /// A share that is a function of what the kernel allows the server.
    pub fn new(share_of: impl FnOnce(usize) -> usize) -> Arc<Self> {
        Arc::new(Self {
            used: AtomicUsize::new(0),
            most: share_of(kernel_limit()),
        })
    }

    /// The most directories that the tenant may watch.
    pub fn most(&self) -> usize {
        self.most
    }

    pub(super) fn take(&self) -> bool {
        let more = |used: usize| Some(used + 1).filter(|used| *used <= self.most);
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        self.used.fetch_update(set, fetch, more).is_ok()
    }

    pub(super) fn give_back(&self, count: usize) {
        self.used.fetch_sub(count, Ordering::Relaxed);
    }
}

fn kernel_limit() -> usize {
    let limits = LIMITS
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok()?.trim().parse().ok());
    limits.min().unwrap_or(usize::MAX)
}
