//! How much memory there is: limits of the machine, of its container (cgroups) and of the server's address
//! space (setrlimit(2), `RLIMIT_AS`).
//!
//! A failed allocation ends the whole server, but a refusal costs one client an error. So everything
//! large whose size a client decides reserves its [`Room`] first. The limit is computed and not probed by
//! allocating, because another thread may need that memory at the same moment.

use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use crate::sys::proc;

/// Bytes that are reserved, and mostly not allocated yet.
static RESERVED: AtomicU64 = AtomicU64::new(0);

/// A reservation of address space, released on drop.
#[must_use]
pub struct Room(u64);

impl Room {
    /// Reserves address space; `None` if the limit leaves less.
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

/// Bytes of address space that the server may still take; `None` means no limit.
fn left() -> Option<u64> {
    let (limit, _) = getrlimit(Resource::RLIMIT_AS).ok()?;
    if limit == RLIM_INFINITY {
        return None;
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let used = proc::bytes_in(&status, "VmSize:").unwrap_or(0);
    Some(limit.saturating_sub(used))
}

/// Bytes of memory that the server may have: the least of what its address space leaves, the limits of
/// its cgroups and the machine's memory. The commands' memory is in the same cgroups, but the kernel
/// ends a command before it ends the server.
pub fn limit() -> u64 {
    let machine = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let groups = limit_files(&groups);
    let limits = groups.iter().filter_map(|file| proc::number_in(file));
    limits
        .chain(proc::bytes_in(&machine, "MemTotal:"))
        .chain(left())
        .min()
        .unwrap_or(u64::MAX)
}

/// The files with the limits of the groups that `/proc/self/cgroup` names and of all groups above them, in
/// both versions of cgroups. In a container a group may be mounted as the root, and its name not exist.
fn limit_files(groups: &str) -> Vec<String> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            names if names.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let mut path = path.trim_end_matches('/');
        files.push(format!("{root}{path}/{file}"));
        while let Some((above, _)) = path.rsplit_once('/') {
            path = above;
            files.push(format!("{root}{path}/{file}"));
        }
    }
    files
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

    #[test]
    fn the_groups_above_limit_too() {
        assert_eq!(
            limit_files("4:cpu,memory:/a/b\n1:cpu:/x\n0::/c\ngarbage\n"),
            [
                "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
                "/sys/fs/cgroup/c/memory.max",
                "/sys/fs/cgroup/memory.max",
            ]
        );
    }

    #[test]
    fn this_machine_has_some_memory() {
        assert!((1 << 20..1 << 50).contains(&limit()), "{}", limit());
    }
}
