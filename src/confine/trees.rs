//! The trees of private roots that are durable. Each stays open until nobody uses it, and is closed by a thread that nobody waits for.
//!
//! Whoever closes an overlay last has the kernel write back the whole file system that its changes are on (`ovl_sync_fs` in
//! fs/overlayfs/super.c). That takes as long as others write there, and cannot be interrupted. So no request and none of
//! the server's own threads may be the last one: another reference is kept here.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::sys;
use crate::threads::Thread;
use crate::threads::lock::{Mutex, lock};

/// With more that wait to be closed no root is made. Where the server may open few files, it is an eighth of these.
const MOST_WAITING: usize = 256;

struct Trees {
    /// Those that are used, or wait for their end, the oldest first.
    kept: Vec<Arc<OwnedFd>>,
    /// Whether a thread closes some. A second one would wait for the same writes.
    is_closing: bool,
}

/// All trees. The lock guards the value alone.
static TREES: Mutex<Trees> = Mutex::new(Trees {
    kept: Vec::new(),
    is_closing: false,
});

/// Keeps a tree until nobody else has it.
pub(super) fn keep(tree: OwnedFd) -> Arc<OwnedFd> {
    let tree = Arc::new(tree);
    lock(&TREES).kept.push(Arc::clone(&tree));
    tree
}

/// Whether there are trees.
pub fn have_trees() -> bool {
    !lock(&TREES).kept.is_empty()
}

/// Has those closed that nobody uses any more. Call it once a second as long as there are trees.
pub fn close_unused_trees() {
    let mut trees = lock(&TREES);
    if trees.is_closing || !trees.kept.iter().any(is_unused) {
        return;
    }
    trees.is_closing = true;
    drop(trees);
    // Without a thread the next call tries again.
    if Thread::new("trees").start(close_all).is_err() {
        lock(&TREES).is_closing = false;
    }
}

/// Checks that not too many wait for their end: each has a descriptor, and memory of the kernel that no limit counts.
///
/// # Errors
/// `OverLimit`.
pub fn check_waiting_trees() -> Result<()> {
    let waiting = |trees: &Trees| trees.kept.iter().filter(|tree| is_unused(tree)).count();
    let waiting = waiting(&lock(&TREES));
    let descriptors = sys::limits(libc::RLIMIT_NOFILE).rlim_cur / 8;
    let most = MOST_WAITING.min(usize::try_from(descriptors).unwrap_or(MOST_WAITING));
    // Otherwise the maintenance does it, mostly when nothing is made: a process that is being started has a copy of each
    // descriptor for a moment, and would close the last one.
    if waiting > most / 2 {
        close_unused_trees();
    }
    if waiting < most {
        return Ok(());
    }
    let text = format!(
        "{waiting} roots of deleted sandboxes wait until what others write is on the disk; try again later"
    );
    Err(Error::new(Kind::OverLimit, text))
}

/// Nobody gets another reference to it: they are made of references.
fn is_unused(tree: &Arc<OwnedFd>) -> bool {
    Arc::strong_count(tree) == 1
}

/// Closes one after the other.
fn close_all() {
    loop {
        let mut trees = lock(&TREES);
        let Some(at) = trees.kept.iter().position(is_unused) else {
            trees.is_closing = false;
            return;
        };
        let tree = trees.kept.remove(at);
        drop(trees);
        drop(tree);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Write};
    use std::time::{Duration, Instant};

    use nix::fcntl::{FcntlArg, OFlag};

    use super::*;

    #[test]
    fn whoever_drops_a_tree_does_not_close_it() {
        let (read, mut write) = std::io::pipe().unwrap();
        nix::fcntl::fcntl(&write, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        let tree = keep(read.into());
        let other = Arc::clone(&tree);
        drop(tree);
        close_unused_trees();
        assert!(have_trees());
        write.write_all(b"it is used").unwrap();
        drop(other);
        write.write_all(b"it is kept").unwrap();
        close_unused_trees();
        let limit = Instant::now() + Duration::from_secs(20);
        let is_closed = |result: std::io::Result<()>| {
            result.is_err_and(|error| error.kind() == ErrorKind::BrokenPipe)
        };
        while !is_closed(write.write_all(b".")) {
            assert!(Instant::now() < limit, "it is open");
        }

        // As if one took long to close.
        while std::mem::replace(&mut lock(&TREES).is_closing, true) {
            assert!(Instant::now() < limit, "it goes on closing");
        }
        let file = || std::fs::File::open("/dev/null").unwrap();
        let least = sys::limits(libc::RLIMIT_NOFILE).rlim_cur / 8;
        for _ in 0..MOST_WAITING.min(usize::try_from(least).unwrap()) {
            check_waiting_trees().unwrap();
            drop(keep(file().into()));
        }
        let refused = check_waiting_trees().unwrap_err();
        assert_eq!(refused.kind(), Kind::OverLimit);
        lock(&TREES).is_closing = false;
        close_unused_trees();
        while check_waiting_trees().is_err() {
            assert!(Instant::now() < limit, "they wait");
        }
    }
}
