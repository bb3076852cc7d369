//! The trees of private roots. Each stays open until nobody uses it, and is closed by a thread that nobody waits for.
//!
//! Whoever closes an overlay last has the kernel write back the whole file system that its changes are on (`ovl_sync_fs` in
//! fs/overlayfs/super.c). That takes as long as others write there, and cannot be interrupted. So no request and none of
//! the server's own threads may be the last one: another reference is kept here.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::threads::Thread;
use crate::threads::lock::{Mutex, lock};

/// Threads that close trees at once. They wait for the same writes for the most part.
const MOST_CLOSERS: usize = 8;

struct Trees {
    /// Those that are used, or wait for their end.
    kept: Vec<Arc<OwnedFd>>,
    /// How many threads close some.
    closers: usize,
}

/// All trees. The lock guards the value alone.
static TREES: Mutex<Trees> = Mutex::new(Trees {
    kept: Vec::new(),
    closers: 0,
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
    let unused = trees.kept.iter().filter(|tree| is_unused(tree)).count();
    let new = unused.min(MOST_CLOSERS).saturating_sub(trees.closers);
    trees.closers += new;
    drop(trees);
    for _ in 0..new {
        // Without a thread the next call tries again.
        if Thread::new("trees").start(close_all).is_err() {
            lock(&TREES).closers -= 1;
        }
    }
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
            trees.closers -= 1;
            return;
        };
        let tree = trees.kept.swap_remove(at);
        drop(trees);
        drop(tree);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Write};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn whoever_drops_a_tree_does_not_close_it() {
        let (read, mut write) = std::io::pipe().unwrap();
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
    }
}
