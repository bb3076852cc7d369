//! What a tenant may have of the kernel's watches and inotify instances, which the kernel counts for the server as a
//! whole.
//!
//! Of each kind one of many tenants may have as many as all of them together leave free, so whoever comes later gets
//! some. Some of them are the server's own, which needs them to know what is kept of a sandbox that was stopped. A tenant
//! that is the only one may have all.

use std::fs::read_to_string;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Of as many one is the server's own.
const RESERVED_PART: usize = 8;

/// What all tenants have: directories that are watched, and trees.
static DIRECTORIES: AtomicUsize = AtomicUsize::new(0);
static TREES: AtomicUsize = AtomicUsize::new(0);

/// The directories and the trees that all tenants watch.
pub fn watched() -> (usize, usize) {
    let [directories, trees] = [&DIRECTORIES, &TREES].map(|all| all.load(Ordering::Relaxed));
    (directories, trees)
}

/// The watches of one tenant.
pub struct WatchShare {
    pub(super) directories: Share,
    pub(super) trees: Share,
}

impl WatchShare {
    /// Nothing yet, of what the kernel allows the server.
    pub fn new(is_only_tenant: bool) -> Arc<Self> {
        let share = |all, name| Share {
            used: AtomicUsize::new(0),
            all,
            kernel_limit: OnceLock::new(),
            name,
            is_only_tenant,
        };
        Arc::new(Self {
            directories: share(&DIRECTORIES, "watches"),
            trees: share(&TREES, "instances"),
        })
    }
}

/// What a tenant has of one kind.
pub(super) struct Share {
    used: AtomicUsize,
    /// What all tenants have.
    all: &'static AtomicUsize,
    /// What they may have together, read when it is needed first: few tenants watch anything.
    kernel_limit: OnceLock<usize>,
    /// The kernel's name of the kind.
    name: &'static str,
    is_only_tenant: bool,
}

impl Share {
    fn most(&self) -> usize {
        let known = self.kernel_limit.get().copied();
        // Not kept if it cannot be read: it may be later.
        let found = known.or_else(|| {
            let limit = kernel_limit(self.name)?;
            Some(*self.kernel_limit.get_or_init(|| limit))
        });
        let limit = found.unwrap_or(usize::MAX);
        if self.is_only_tenant {
            return limit;
        }
        limit - limit.div_ceil(RESERVED_PART)
    }

    /// Takes one; false if the tenant has its share.
    pub(super) fn take(&self) -> bool {
        let own = self.used.fetch_add(1, Ordering::Relaxed) + 1;
        let own = if self.is_only_tenant { 1 } else { own };
        let most = self.most();
        let more = |all: usize| (all.saturating_add(own) <= most).then_some(all + 1);
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        let is_taken = self.all.fetch_update(set, fetch, more).is_ok();
        if !is_taken {
            self.used.fetch_sub(1, Ordering::Relaxed);
        }
        is_taken
    }

    pub(super) fn give_back(&self, count: usize) {
        self.used.fetch_sub(count, Ordering::Relaxed);
        self.all.fetch_sub(count, Ordering::Relaxed);
    }

    /// How many more the tenant may have if nobody else takes any.
    pub(super) fn left(&self) -> usize {
        let free = self.most().saturating_sub(self.all.load(Ordering::Relaxed));
        if self.is_only_tenant {
            return free;
        }
        let own = self.used.load(Ordering::Relaxed);
        free.saturating_add(1).saturating_sub(own) / 2
    }
}

/// The smaller one of the machine's limit and the user namespace's. `None` if neither can be read.
fn kernel_limit(name: &str) -> Option<usize> {
    let paths = [
        format!("/proc/sys/fs/inotify/max_user_{name}"),
        format!("/proc/sys/user/max_inotify_{name}"),
    ];
    let limits = paths
        .iter()
        .filter_map(|path| read_to_string(path).ok()?.trim().parse().ok());
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_leaves_as_many_as_it_has() {
        static ALL: AtomicUsize = AtomicUsize::new(0);
        let share = |is_only_tenant| Share {
            used: AtomicUsize::new(0),
            all: &ALL,
            kernel_limit: OnceLock::from(128),
            name: "",
            is_only_tenant,
        };
        let take_all = |share: &Share| {
            let left = share.left();
            let taken = (0..200).take_while(|_| share.take()).count();
            assert_eq!((taken, share.left()), (left, 0));
            taken
        };
        let tenants = [(); 4].map(|()| share(false));
        assert_eq!(tenants.each_ref().map(take_all), [56, 28, 14, 7]);
        let only = share(true);
        assert_eq!(take_all(&only), 7 + 128 / RESERVED_PART);
        only.give_back(23);
        tenants[0].give_back(56);
        assert_eq!(take_all(&tenants[3]), 28);
        assert_eq!(ALL.load(Ordering::Relaxed), 77);
    }
}
