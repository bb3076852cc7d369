//! What a workspace has open of something limited: for all workspaces together, and for itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many a workspace has open.
pub(super) struct OpenCount(Arc<Counts>);

/// One of them, until dropped.
pub(super) struct OpenShare(Arc<Counts>);

struct Counts {
    own: AtomicU64,
    all: &'static AtomicU64,
}

impl OpenCount {
    /// None yet, and counted among `all`.
    pub(super) fn among(all: &'static AtomicU64) -> Self {
        let own = AtomicU64::new(0);
        Self(Arc::new(Counts { own, all }))
    }

    /// Counts one more. Returns with it how many are open here.
    pub(super) fn add(&self) -> (OpenShare, u64) {
        self.0.all.fetch_add(1, Ordering::Relaxed);
        let own = self.0.own.fetch_add(1, Ordering::Relaxed) + 1;
        (OpenShare(Arc::clone(&self.0)), own)
    }
}

impl Drop for OpenShare {
    fn drop(&mut self) {
        self.0.own.fetch_sub(1, Ordering::Relaxed);
        self.0.all.fetch_sub(1, Ordering::Relaxed);
    }
}
