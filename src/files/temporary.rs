//! The tree of temporary files of a sandbox, which ends when its processes are stopped; and what others keep in memory of
//! the runs that have ended.
//!
//! A run has file systems in memory. A request that is in one keeps it, with all that is in it, and so does a process of another
//! sandbox that was given a file of it. The kernel tells when nobody does any more: whoever watches a directory learns that its
//! file system was unmounted (inotify(7), `IN_UNMOUNT`), and does not keep it mounted by that.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};

use crate::logging;
use crate::threads::lock::{Mutex, lock};

/// The temporary files of one sandbox, and the file systems in memory of its runs.
#[derive(Default)]
pub(super) struct Temporary {
    /// Where the tree of the present run begins. The lock guards the value alone.
    start: Mutex<Option<Arc<OwnedFd>>>,
    /// For each run, how many of its file systems exist. The lock guards the list alone.
    runs: Mutex<Vec<Arc<AtomicUsize>>>,
}

impl Temporary {
    /// The directory that the tree begins at, if there is one.
    pub(super) fn start(&self) -> Option<Arc<OwnedFd>> {
        lock(&self.start).clone()
    }

    /// A run begins: these are its file systems in memory, and this is where its temporary files are, if it has any.
    pub(super) fn begin(&self, start: Option<OwnedFd>, all: &[OwnedFd]) {
        if !all.is_empty() {
            let run = Arc::new(AtomicUsize::new(0));
            let mut watched = lock(&WATCHED);
            let mut are_watched = true;
            for directory in all {
                are_watched &= watched.add(directory, &run);
            }
            drop(watched);
            lock(&self.runs).push(run);
            if !are_watched {
                logging::about(
                    "files",
                    format_args!(
                        "no inotify instance or watch is left (fs.inotify.max_user_instances, max_user_watches): what others keep of a \
                         sandbox's /tmp and /dev/shm after its stop is not counted"
                    ),
                );
            }
        }
        *lock(&self.start) = start.map(Arc::new);
    }

    /// The run is over.
    pub(super) fn end(&self) {
        *lock(&self.start) = None;
    }

    /// Of how many runs somebody keeps something, the present one included.
    pub(super) fn count_kept(&self) -> usize {
        forget_ended_trees();
        let mut runs = lock(&self.runs);
        runs.retain(|run| run.load(Ordering::Relaxed) > 0);
        runs.len()
    }
}

/// Lets go of what it takes to know whether trees are still kept, once there are none. Call it now and then.
pub fn forget_ended_trees() {
    let unused = lock(&WATCHED).look();
    // Closing it can take the kernel a moment.
    drop(unused);
}

/// The file systems of all runs. Locked while watches are made or events read, neither of which waits.
static WATCHED: Mutex<Watched> = Mutex::new(Watched {
    inotify: None,
    counts: None,
});

struct Watched {
    /// `None` while there is nothing to watch. The kernel has few instances.
    inotify: Option<Inotify>,
    /// Where each file system is counted.
    counts: Option<HashMap<WatchDescriptor, Arc<AtomicUsize>>>,
}

impl Watched {
    /// Counts a file system until it is gone. False if the server has no instance of inotify or no watch left.
    fn add(&mut self, directory: &OwnedFd, count: &Arc<AtomicUsize>) -> bool {
        if self.inotify.is_none() {
            let flags = InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK;
            self.inotify = Inotify::init(flags).ok();
        }
        let path = format!("/proc/self/fd/{}", directory.as_raw_fd());
        // The event is sent whatever is asked for.
        let asked = AddWatchFlags::IN_DELETE_SELF;
        let watch = self.inotify.as_ref();
        let watch = watch.and_then(|inotify| inotify.add_watch(&*path, asked).ok());
        if let Some(watch) = watch {
            count.fetch_add(1, Ordering::Relaxed);
            let counts = self.counts.get_or_insert_default();
            counts.insert(watch, Arc::clone(count));
        }
        watch.is_some()
    }

    /// Takes those out of the count that have gone. Returns the instance if it is needed no more.
    fn look(&mut self) -> Option<Inotify> {
        let gone = AddWatchFlags::IN_UNMOUNT | AddWatchFlags::IN_IGNORED;
        let counts = self.counts.get_or_insert_default();
        while let Some(Ok(events)) = self.inotify.as_ref().map(Inotify::read_events) {
            for event in events.iter().filter(|event| event.mask.intersects(gone)) {
                if let Some(count) = counts.remove(&event.wd) {
                    count.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
        if counts.is_empty() {
            return self.inotify.take();
        }
        None
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
    fn a_run_counts_as_long_as_somebody_has_a_file_of_it() {
        let Some(first) = tree() else {
            return;
        };
        let temporary = Temporary::default();
        let file = format!("/proc/self/fd/{}/file", first.as_raw_fd());
        let file = File::open(file).unwrap();
        temporary.begin(None, &[first, tree().unwrap()]);
        // Its second file system has gone.
        wait_for(&temporary, 1);
        let second = tree().unwrap();
        let start = second.try_clone().unwrap();
        temporary.begin(Some(start), &[second]);
        assert!(temporary.start().is_some());
        wait_for(&temporary, 2);
        temporary.end();
        assert!(temporary.start().is_none());
        wait_for(&temporary, 1);
        drop(file);
        wait_for(&temporary, 0);
    }
}
