//! The output of processes, kept within a bound for all of them together.
//!
//! Each ring has its own limit; the [`LogStore`] adds them up. When the sum is too large, the workspace
//! whose logs take most gives way: whole logs of its ended processes first, the one that ended longest
//! ago before the others, and then the oldest part of the largest ring of its running ones. So nobody
//! loses a log to a workspace that prints more, nor a quiet process to a chatty one beside it.

use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use super::ring::{Cursor, Piece, Ring, Stream};
use crate::clock::now_ms;
use crate::codec::sort::sort_by;
use crate::threads::lock::{Mutex, lock, try_lock};
use crate::threads::panics::contain;

/// The output of one process.
pub(super) struct Log {
    store: Arc<LogStore>,
    tenant: Arc<LogTenant>,
    /// Held for the length of a copy.
    ring: Mutex<Ring>,
    ended: OnceLock<Instant>,
}

impl Log {
    /// An empty log of at most `limit` bytes.
    pub(super) fn new(store: &Arc<LogStore>, tenant: &Arc<LogTenant>, limit: usize) -> Arc<Self> {
        let log = Arc::new(Self {
            store: Arc::clone(store),
            tenant: Arc::clone(tenant),
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
            ring.note_time(now_ms());
            ring.append(stream, data);
            offset
        })
    }

    /// Changes the ring and accounts for the memory.
    fn update<T>(&self, change: impl FnOnce(&mut Ring) -> T) -> T {
        let mut ring = lock(&self.ring);
        let before = ring.footprint();
        let result = contain(|| change(&mut ring));
        let after = ring.footprint();
        drop(ring);
        self.store.account(&self.tenant, before, after);
        result.unwrap_or_else(|panicked| panicked.resume())
    }

    /// Bytes that a stream has carried so far.
    pub(super) fn written(&self, stream: Stream) -> u64 {
        lock(&self.ring).written(stream)
    }

    /// The first offset of a stream that is held.
    pub(super) fn held_from(&self, stream: Stream) -> u64 {
        lock(&self.ring).held_from(stream)
    }

    /// Bytes that both streams have carried so far.
    pub(super) fn position(&self) -> u64 {
        lock(&self.ring).position()
    }

    /// Looks at the ring, for no longer than a copy takes.
    pub(super) fn look<T>(&self, look: impl FnOnce(&Ring) -> T) -> T {
        look(&lock(&self.ring))
    }

    /// See [`Ring::last_time`].
    pub(super) fn last_time(&self) -> Option<u64> {
        lock(&self.ring).last_time()
    }

    /// See [`Ring::read`].
    pub(super) fn read(
        &self,
        cursor: &mut Cursor,
        buffer: &mut Vec<u8>,
        most: usize,
    ) -> Option<Piece> {
        lock(&self.ring).read(cursor, buffer, most)
    }

    /// See [`Ring::copy`].
    pub(super) fn copy(
        &self,
        stream: Stream,
        position: u64,
        bytes: usize,
        buffer: &mut Vec<u8>,
    ) -> bool {
        lock(&self.ring).copy(stream, position, bytes, buffer)
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
                ring.free_oldest(bytes);
            }
        });
    }

    fn footprint(&self) -> usize {
        lock(&self.ring).footprint()
    }

    fn has_ended(&self) -> bool {
        self.ended.get().is_some()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.store.account(&self.tenant, self.footprint(), 0);
    }
}

/// Bytes that the logs of one workspace take. Signed: a ring may shrink before its growth was added.
#[derive(Default)]
pub(super) struct LogTenant(AtomicIsize);

/// Names the lock of the one thread that reclaims memory, which locks logs meanwhile.
#[derive(Default)]
struct Reclaiming;

/// The logs of all processes of the server.
pub(super) struct LogStore {
    limit: usize,
    /// Bytes that all rings take.
    total: LogTenant,
    logs: Mutex<Vec<Weak<Log>>>,
    /// Held by the one thread that reclaims memory.
    reclaiming: Mutex<Reclaiming>,
}

impl LogStore {
    /// `limit` in bytes, for all logs together.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            total: LogTenant::default(),
            logs: Mutex::default(),
            reclaiming: Mutex::default(),
        }
    }

    /// Records that a ring's footprint changed. The caller holds no lock of a log.
    fn account(&self, tenant: &LogTenant, before: usize, after: usize) {
        let change = after.cast_signed() - before.cast_signed();
        for sum in [tenant, &self.total] {
            sum.0.fetch_add(change, Ordering::Relaxed);
        }
        if change > 0 && self.excess() > 0 {
            self.reclaim();
        }
    }

    fn reclaim(&self) {
        let _guard = match try_lock(&self.reclaiming) {
            Some(guard) => guard,
            // Whoever reclaims may be slower than all those who append.
            None if self.excess() > self.limit / 8 => lock(&self.reclaiming),
            None => return,
        };
        let logs: Vec<Arc<Log>> = lock(&self.logs).iter().filter_map(Weak::upgrade).collect();
        while self.excess() > 0 {
            let Some(most) = logs.iter().max_by_key(|log| log.tenant.bytes()) else {
                return;
            };
            let tenant = &most.tenant;
            let own = || logs.iter().filter(|log| Arc::ptr_eq(&log.tenant, tenant));
            let mut ended: Vec<_> = own().filter(|log| log.has_ended()).collect();
            sort_by(&mut ended, |one, other| {
                one.ended.get().cmp(&other.ended.get())
            });
            let share = tenant.bytes();
            for log in ended {
                if self.excess() == 0 {
                    return;
                }
                log.shrink(usize::MAX);
            }
            if tenant.bytes() < share {
                // Another may have most.
                continue;
            }
            let Some(largest) = own().max_by_key(|log| log.footprint()) else {
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
        self.total.bytes()
    }

    fn excess(&self) -> usize {
        self.total().saturating_sub(self.limit)
    }
}

impl LogTenant {
    fn bytes(&self) -> usize {
        usize::try_from(self.0.load(Ordering::Relaxed)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the stream that a log still has.
    fn kept(log: &Log) -> usize {
        let (mut cursor, mut kept, mut buffer) = (Cursor::default(), 0, Vec::new());
        while let Some(piece) = log.read(&mut cursor, &mut buffer, usize::MAX) {
            if matches!(piece, Piece::Data { .. }) {
                kept += buffer.len();
            }
            buffer.clear();
        }
        kept
    }

    #[test]
    fn the_workspace_with_the_largest_logs_gives_way() {
        const KIB: usize = 1024;
        let store = Arc::new(LogStore::new(256 * KIB));
        let [quiet, loud] = [(); 2].map(|()| Arc::new(LogTenant::default()));
        let log = |tenant, bytes, ended: bool| {
            let log = Log::new(&store, tenant, 1 << 20);
            log.append(Stream::Stdout, &vec![b'x'; bytes]);
            if ended {
                log.set_ended(Instant::now());
            }
            log
        };
        // The first to end, and would be the first to go.
        let finished = log(&quiet, 32 * KIB, true);
        let early = log(&loud, 16 * KIB, true);
        let late = log(&loud, 16 * KIB, true);
        let running = log(&loud, 160 * KIB, false);
        assert!(store.excess() == 0 && kept(&early) > 0);

        while kept(&early) > 0 {
            running.append(Stream::Stdout, &[b'x'; 4 * KIB]);
        }
        assert_eq!(kept(&late), 16 * KIB, "the one that ended first goes first");
        for _ in 0..200 {
            running.append(Stream::Stdout, &[b'x'; 4 * KIB]);
        }
        assert_eq!(kept(&late), 0, "before anything of a running process");
        assert!(kept(&running) > 100 * KIB);
        assert_eq!(kept(&finished), 32 * KIB, "the other workspace keeps all");
        assert_eq!(store.excess(), 0);

        // Now the other one has most.
        drop((early, late, running));
        let more = log(&quiet, 240 * KIB, false);
        assert_eq!(kept(&finished), 0);
        assert!(kept(&more) > 100 * KIB);
    }

    /// A ring keeps a chunk for later use, which must not count as something that can be given up in parts.
    #[test]
    fn logs_give_way_also_when_each_has_only_a_little() {
        let store = Arc::new(LogStore::new(100_000));
        let tenant = Arc::new(LogTenant::default());
        let logs = [(); 3].map(|()| Log::new(&store, &tenant, 1 << 20));
        for _ in 0..4 {
            for log in &logs {
                log.append(Stream::Stdout, &vec![b'x'; 70_000]);
                assert_eq!(store.excess(), 0);
            }
        }
    }
}
