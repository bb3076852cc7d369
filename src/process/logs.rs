//! The output of processes, kept within a bound for all of them together.
//!
//! Each ring has its own limit; the [`LogStore`] adds them up. When the sum is too large, it drops
//! whole logs of ended processes first, the one that ended longest ago before the others. When only
//! running processes are left, the largest ring loses its oldest part, so that a quiet process does
//! not lose its log to a chatty one.

use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use super::ring::{Cursor, Piece, Ring, Stream};
use crate::sync::lock;

/// The output of one process.
pub(super) struct Log {
    store: Arc<LogStore>,
    /// Held for the length of a copy.
    ring: Mutex<Ring>,
    ended: OnceLock<Instant>,
}

impl Log {
    /// An empty log of at most `limit` bytes.
    pub(super) fn new(store: &Arc<LogStore>, limit: usize) -> Arc<Self> {
        let log = Arc::new(Self {
            store: Arc::clone(store),
            ring: Mutex::new(Ring::new(limit)),
            ended: OnceLock::new(),
        });
        let mut logs = lock(&store.logs);
        if logs.len() == logs.capacity() {
            logs.retain(|log| log.strong_count() > 0);
        }
        logs.push(Arc::downgrade(&log));
        log
    }

    /// Adds what was read from a stream; returns the offset of its first byte in that stream.
    pub(super) fn append(&self, stream: Stream, data: &[u8]) -> u64 {
        self.update(|ring| {
            let offset = ring.written(stream);
            ring.append(stream, data);
            offset
        })
    }

    /// Changes the ring and accounts for the memory.
    fn update<T>(&self, change: impl FnOnce(&mut Ring) -> T) -> T {
        let mut ring = lock(&self.ring);
        let before = ring.footprint();
        let result = change(&mut ring);
        let after = ring.footprint();
        drop(ring);
        self.store.account(before, after);
        result
    }

    /// Bytes that a stream has carried so far.
    pub(super) fn written(&self, stream: Stream) -> u64 {
        lock(&self.ring).written(stream)
    }

    /// Bytes that both streams have carried so far.
    pub(super) fn position(&self) -> u64 {
        lock(&self.ring).position()
    }

    /// See [`Ring::read`].
    pub(super) fn read(&self, cursor: &mut Cursor, buffer: &mut Vec<u8>) -> Option<Piece> {
        lock(&self.ring).read(cursor, buffer)
    }

    /// Records when the process ended: a log that ended early is dropped early.
    pub(super) fn set_ended(&self, at: Instant) {
        let _ = self.ended.set(at);
    }

    /// Drops at least `bytes` of the oldest output.
    fn shrink(&self, bytes: usize) {
        self.update(|ring| {
            if bytes >= ring.footprint() {
                ring.clear();
            } else {
                ring.drop_oldest(bytes);
            }
        });
    }

    fn footprint(&self) -> usize {
        lock(&self.ring).footprint()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.store.account(self.footprint(), 0);
    }
}

/// The logs of all processes of the server.
pub(super) struct LogStore {
    limit: usize,
    /// Bytes that all rings take. Signed: a ring may shrink before its growth was added.
    total: AtomicIsize,
    logs: Mutex<Vec<Weak<Log>>>,
    /// Held by the one thread that reclaims memory.
    reclaiming: Mutex<()>,
}

impl LogStore {
    /// `limit` in bytes, for all logs together.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            total: AtomicIsize::new(0),
            logs: Mutex::default(),
            reclaiming: Mutex::default(),
        }
    }

    /// Records that a ring's footprint changed. The caller holds no lock of a log.
    fn account(&self, before: usize, after: usize) {
        let change = after.cast_signed() - before.cast_signed();
        self.total.fetch_add(change, Ordering::Relaxed);
        if change > 0 && self.excess() > 0 {
            self.reclaim();
        }
    }

    fn reclaim(&self) {
        let Ok(_guard) = self.reclaiming.try_lock() else {
            return;
        };
        let logs: Vec<Arc<Log>> = lock(&self.logs).iter().filter_map(Weak::upgrade).collect();
        let mut ended: Vec<&Arc<Log>> = logs
            .iter()
            .filter(|log| log.ended.get().is_some())
            .collect();
        ended.sort_by_key(|log| log.ended.get());
        for log in ended {
            if self.excess() == 0 {
                return;
            }
            log.shrink(usize::MAX);
        }
        while self.excess() > 0 {
            let Some(largest) = logs.iter().max_by_key(|log| log.footprint()) else {
                return;
            };
            let footprint = largest.footprint();
            if footprint == 0 {
                return;
            }
            // At least an eighth of the ring, so that not every append has to reclaim.
            largest.shrink(self.excess().max(footprint / 8));
        }
    }

    /// Bytes that all rings take.
    pub(super) fn total(&self) -> usize {
        usize::try_from(self.total.load(Ordering::Relaxed)).unwrap_or(0)
    }

    fn excess(&self) -> usize {
        self.total().saturating_sub(self.limit)
    }
}
