//! Memory under a limit of the server's address space (setrlimit(2), `RLIMIT_AS`).
//!
//! A failed allocation ends the whole server, but a refusal costs one client an error. So everything
//! large whose size a client decides reserves its [`Room`] first. The limit is computed and not probed by
//! allocating, because another thread may need that memory at the same moment.

use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use crate::proc;

/// Bytes that are reserved, and mostly not allocated yet.
static RESERVED: AtomicU64 = AtomicU64::new(0);

/// A reservation of memory, released on drop.
#[must_use]
pub struct Room(u64);

impl Room {
    /// Reserves memory; `None` if the limit leaves less.
    pub fn take(bytes: usize) -> Option<Self> {
        let bytes = bytes as u64;
        let reserved = RESERVED.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let room = Self(bytes);
        left().is_none_or(|left| reserved <= left).then_some(room)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        RESERVED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Bytes that the server may still allocate; `None` means no limit.
pub fn left() -> Option<u64> {
    let (limit, _) = getrlimit(Resource::RLIMIT_AS).ok()?;
    if limit == RLIM_INFINITY {
        return None;
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let used = proc::bytes_in(&status, "VmSize:").unwrap_or(0);
    Some(limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_ends_with_its_value() {
        const BYTES: usize = 1 << 40;
        let room = Room::take(BYTES).unwrap();
        assert!(RESERVED.load(Ordering::Relaxed) >= BYTES as u64);
        drop(room);
        assert!(RESERVED.load(Ordering::Relaxed) < BYTES as u64);
    }
}
