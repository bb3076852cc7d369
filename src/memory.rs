//! Memory, where the machine limits how much address space the server has (setrlimit(2), `RLIMIT_AS`).
//!
//! An allocation that fails ends the whole server; refusing what would need it costs one client an
//! error. So whatever is large and at a client's wish takes its [`Room`] first. It is looked up and not
//! tried out: what a trial takes, another thread may need at that moment.

use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

/// Bytes that are promised, and mostly not yet allocated.
static PROMISED: AtomicU64 = AtomicU64::new(0);

/// A promise of memory, which ends with the value.
#[must_use]
pub struct Room(u64);

impl Room {
    /// A promise of so many bytes; none if the limit does not leave them.
    pub fn take(bytes: usize) -> Option<Self> {
        let bytes = bytes as u64;
        let promised = PROMISED.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let room = Self(bytes);
        left().is_none_or(|left| promised <= left).then_some(room)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        PROMISED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Bytes that the server may still allocate; none if there is no limit.
pub fn left() -> Option<u64> {
    let (limit, _) = getrlimit(Resource::RLIMIT_AS).ok()?;
    if limit == RLIM_INFINITY {
        return None;
    }
    let used = std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|text| {
            let size = text.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
            size.trim().strip_suffix(" kB")?.parse::<u64>().ok()
        })
        .map_or(0, |kibibytes| kibibytes * 1024);
    Some(limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_ends_with_its_value() {
        const BYTES: usize = 1 << 40;
        let room = Room::take(BYTES).unwrap();
        assert!(PROMISED.load(Ordering::Relaxed) >= BYTES as u64);
        drop(room);
        assert!(PROMISED.load(Ordering::Relaxed) < BYTES as u64);
    }
}
