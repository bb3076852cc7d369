//! The tree of temporary files of a sandbox, which ends when its processes are stopped; and what others keep of those that
//! have ended.
//!
//! A request that is in the tree keeps it in memory, with all that is in it, and so does a process of another sandbox that was
//! given a file of it. The kernel tells when nobody does any more: whoever watches a directory learns that its file system was
//! unmounted (inotify(7), `IN_UNMOUNT`), and does not keep it mounted by that.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};

use crate::threads::lock::{Mutex, lock};

/// The temporary files of one sandbox.
#[derive(Default)]
pub(super) struct Temporary {
    /// Where the present tree begins. The lock guards the value alone.
    start: Mutex<Option<Arc<OwnedFd>>>,
    /// How many of the trees before are still kept.
    kept: Arc<AtomicUsize>,
}

impl Temporary {
    /// The directory that the tree begins at, if there is one.
    pub(super) fn start(&self) -> Option<Arc<OwnedFd>> {
        lock(&self.start).clone()
    }

    /// From here on the tree is this one, on a file system of its own; or there is none.
    pub(super) fn set(&self, start: Option<OwnedFd>) {
        let start = start.map(Arc::new);
        let before = std::mem::replace(&mut *lock(&self.start), start);
        if let Some(before) = before {
            lock(&ENDED).note(&before, &self.kept);
        }
    }

    /// How many of the trees before this one somebody still keeps.
    pub(super) fn count_kept(&self) -> usize {
        lock(&ENDED).look();
        self.kept.load(Ordering::Relaxed)
    }
}

/// Lets go of what it takes to know whether trees that have ended are still kept, once none is. Call it now and then.
pub fn forget_ended_trees() {
    lock(&ENDED).look();
}

/// The trees of all sandboxes that have ended. Locked while watches are made or events read, neither of which waits.
static ENDED: LazyLock<Mutex<Ended>> = LazyLock::new(Mutex::default);

/// Trees that have ended and may still be kept.
#[derive(Default)]
struct Ended {
    /// `None` while there are none. The kernel has few instances.
    inotify: Option<Inotify>,
    /// Where each is counted.
    kept: HashMap<WatchDescriptor, Arc<AtomicUsize>>,
}

impl Ended {
    /// Counts a tree until it is gone. If the server has no instance of inotify or no watch left, it is not counted.
    fn note(&mut self, tree: &OwnedFd, count: &Arc<AtomicUsize>) {
        self.look();
        if self.inotify.is_none() {
            let flags = InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK;
            self.inotify = Inotify::init(flags).ok();
        }
        let path = format!("/proc/self/fd/{}", tree.as_raw_fd());
        // The event is sent whatever is asked for.
        let asked = AddWatchFlags::IN_DELETE_SELF;
        let watch = self.inotify.as_ref();
        let watch = watch.and_then(|inotify| inotify.add_watch(&*path, asked).ok());
        if let Some(watch) = watch {
            count.fetch_add(1, Ordering::Relaxed);
            self.kept.insert(watch, Arc::clone(count));
        }
    }

    /// Takes those out of the count that have gone.
    fn look(&mut self) {
        let gone = AddWatchFlags::IN_UNMOUNT | AddWatchFlags::IN_IGNORED;
        while let Some(Ok(events)) = self.inotify.as_ref().map(Inotify::read_events) {
            for event in events.iter().filter(|event| event.mask.intersects(gone)) {
                if let Some(count) = self.kept.remove(&event.wd) {
                    count.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
        if self.kept.is_empty() {
            self.inotify = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::*;

    static COUNT: AtomicUsize = AtomicUsize::new(0);

    /// A tree on a file system of its own, which has no name any more.
    fn tree() -> Option<OwnedFd> {
        if !nix::unistd::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "needs root");
            return None;
        }
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("sbx-ended-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        let mut mount = Command::new("mount");
        let mounted = mount.args(["-t", "tmpfs", "none"]).arg(&path).status();
        assert!(mounted.unwrap().success());
        fs::write(path.join("file"), "text").unwrap();
        let opened = File::open(&path).unwrap();
        let unmounted = Command::new("umount").arg("-l").arg(&path).status();
        assert!(unmounted.unwrap().success());
        fs::remove_dir(&path).unwrap();
        Some(opened.into())
    }

    fn wait_for(temporary: &Temporary, count: usize) {
        let limit = Instant::now() + Duration::from_secs(20);
        while temporary.count_kept() != count {
            assert!(Instant::now() < limit, "{}", temporary.count_kept());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_tree_that_has_ended_counts_as_long_as_somebody_has_a_file_of_it() {
        let Some(first) = tree() else {
            return;
        };
        let temporary = Temporary::default();
        let file = format!("/proc/self/fd/{}/file", first.as_raw_fd());
        let file = File::open(file).unwrap();
        temporary.set(Some(first));
        assert_eq!(temporary.count_kept(), 0);
        temporary.set(tree());
        wait_for(&temporary, 1);
        // Nobody has anything of the second.
        temporary.set(None);
        wait_for(&temporary, 1);
        drop(file);
        wait_for(&temporary, 0);
    }
}
