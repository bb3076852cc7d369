//! The bound on the output of all processes together.
//!
//! Each ring has its own limit; this adds them up. When the sum is too large, the output of the
//! processes that ended longest ago goes first, whole; when only running ones are left, the largest
//! ring gives up its oldest part, so a quiet process does not lose its log to a chatty one.

use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::{Process, lock};

/// What all rings hold, and who they belong to.
pub struct LogStore {
    limit: usize,
    /// Signed: a ring may be shrunk before its growth has been added.
    total: AtomicIsize,
    /// Guards the list of everybody with a ring; not the rings.
    members: Mutex<Vec<Weak<Process>>>,
    /// Guards nothing but makes reclaiming one thread's work at a time.
    reclaiming: Mutex<()>,
}

impl LogStore {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            total: AtomicIsize::new(0),
            members: Mutex::default(),
            reclaiming: Mutex::default(),
        }
    }

    pub(super) fn register(&self, process: &Arc<Process>) {
        let mut members = lock(&self.members);
        if members.len() == members.capacity() {
            members.retain(|member| member.strong_count() > 0);
        }
        members.push(Arc::downgrade(process));
    }

    /// A ring's footprint changed. No lock of a process may be held.
    pub(super) fn account(&self, before: usize, after: usize) {
        let change = after.cast_signed() - before.cast_signed();
        self.total.fetch_add(change, Ordering::Relaxed);
        if change > 0 && self.excess() > 0 {
            self.reclaim();
        }
    }

    fn reclaim(&self) {
        let Ok(_turn) = self.reclaiming.try_lock() else {
            return;
        };
        let members: Vec<Arc<Process>> = lock(&self.members)
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        let mut ended: Vec<_> = members
            .iter()
            .filter_map(|process| Some((lock(&process.life).ending?.1, process)))
            .collect();
        ended.sort_by_key(|(ended, _)| *ended);
        for (_, process) in ended {
            if self.excess() == 0 {
                return;
            }
            self.shrink(process, usize::MAX);
        }
        while self.excess() > 0 {
            let Some(largest) = members
                .iter()
                .max_by_key(|process| lock(&process.ring).footprint())
            else {
                return;
            };
            let footprint = lock(&largest.ring).footprint();
            if footprint == 0 {
                return;
            }
            // More than is needed now, so that not every append comes here again.
            self.shrink(largest, self.excess().max(footprint / 8));
        }
    }

    /// Bytes that all rings take.
    pub(super) fn total(&self) -> usize {
        usize::try_from(self.total.load(Ordering::Relaxed)).unwrap_or(0)
    }

    fn excess(&self) -> usize {
        self.total().saturating_sub(self.limit)
    }

    fn shrink(&self, process: &Process, bytes: usize) {
        let freed = {
            let mut ring = lock(&process.ring);
            let before = ring.footprint();
            if bytes >= before {
                ring.clear();
            } else {
                ring.drop_oldest(bytes);
            }
            before - ring.footprint()
        };
        self.total.fetch_sub(freed.cast_signed(), Ordering::Relaxed);
    }
}
