//! The directories of a watch: how they are reached, watched, read with all that is below them, and given up.
//!
//! A directory is opened name by name, and counts only if the kernel says that it is the one that is watched. Few stay
//! open during a step, so that an event of a deep tree does not cost a call for each name above; none does after it.
//! What events mean is the matter of [`settle`](super::settle).

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::inotify::{AddWatchFlags, Inotify, WatchDescriptor};

use super::super::event::{Ended, EventSink, Outcome, Settings, TreeChange, TreeEvent};
use super::super::nodes::Nodes;
use super::{CHARGED_BYTES, EVENTS, NameIn, Watcher};
use crate::client::{Interrupt, Stopped};
use crate::files::entry::{DIRECTORY, FileKind, Identity};
use crate::files::root::Files;
use crate::files::search::{Filter, Visit, is_gone};
use crate::limits::ledger::Ledger;

/// Most directories that stay open during a step.
const MAX_OPEN: usize = 4;

/// Checks, and takes no event.
struct Silent<'a>(&'a mut dyn EventSink);

impl EventSink for Silent<'_> {
    fn event(&mut self, _: TreeEvent) -> Outcome {
        Ok(())
    }

    fn check(&mut self) -> Outcome {
        self.0.check()
    }
}

impl Watcher {
    /// Puts a directory that is known at another place.
    pub(super) fn put(&mut self, key: WatchDescriptor, (parent, name): &NameIn) -> Outcome {
        match self.nodes.put(key, *parent, name) {
            Some(removed) => self.give_up(&removed),
            // The tree is not what the events said.
            None => self.is_incomplete = true,
        }
        self.charge_for_nodes()
    }

    pub(super) fn charge_for_nodes(&mut self) -> Outcome {
        let bytes = self.nodes.bytes() + self.found_bytes;
        if bytes > self.charge.bytes() {
            let charged = self.charge.set(bytes + CHARGED_BYTES);
            charged.map_err(|_| Ended::OverLimit)?;
        }
        Ok(())
    }

    /// Stops watching a directory and what is below.
    pub(in crate::files::watch) fn forget(&mut self, key: WatchDescriptor) {
        let removed = self.nodes.remove(key);
        self.give_up(&removed);
    }

    pub(super) fn give_up(&mut self, removed: &[WatchDescriptor]) {
        for key in removed {
            // The kernel has removed those of directories that are gone.
            let _ = self.inotify.rm_watch(*key);
        }
        self.share.directories.give_back(removed.len());
    }

    /// Watches a directory that is new at a place, and tells what is in it.
    pub(super) fn add_below(
        &mut self,
        files: &Files<'_>,
        place: &NameIn,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        if !self.settings.recursive {
            return Ok(());
        }
        let Ok(parent) = self.open_directory(files, place.0) else {
            self.miss(place);
            return Ok(());
        };
        let directory = match unless_lacking(files.open_name(&parent, &place.1, DIRECTORY))? {
            Ok(directory) => directory,
            Err(errno) => return self.pass(errno, sink),
        };
        match self.add(&directory, place, sink)? {
            Ok(key) => self.read_below(files, &directory, key, sink),
            Err(errno) => self.pass(errno, sink),
        }
    }

    /// Watches a directory at a place.
    pub(super) fn add(
        &mut self,
        directory: &OwnedFd,
        place: &NameIn,
        sink: &mut dyn EventSink,
    ) -> Outcome<nix::Result<WatchDescriptor>> {
        let mut added = add_watch(&self.inotify, directory, EVENTS);
        if let Ok(key) = added
            && let Some(other) = self.nodes.place(key)
        {
            // It has left that place, which will be reported. Until then nothing that is in it may be reported twice.
            self.deleted(&other, true, sink)?;
            added = add_watch(&self.inotify, directory, EVENTS);
        }
        let key = match unless_lacking(added)? {
            Ok(key) if self.nodes.has(key) => return Ok(Err(Errno::ELOOP)),
            Ok(key) => key,
            Err(errno) => return Ok(Err(errno)),
        };
        if !self.share.directories.take() {
            let _ = self.inotify.rm_watch(key);
            return Err(Ended::NoWatches);
        }
        let Some(removed) = self.nodes.put(key, place.0, &place.1) else {
            self.give_up(&[key]);
            return Ok(Err(Errno::ESTALE));
        };
        self.give_up(&removed);
        if let Some(notes) = self.nodes.notes(key) {
            notes.epoch = self.epoch;
        }
        self.charge_for_nodes()?;
        Ok(Ok(key))
    }

    /// Watches all directories below the first one. What is found is not told, but counted.
    pub(super) fn read_tree(&mut self, files: &Files<'_>, sink: &mut dyn EventSink) -> Outcome {
        if !self.settings.recursive {
            return Ok(());
        }
        let directory = self.open_root(files)?;
        self.is_silent = true;
        let read = self.read_below(files, &directory, self.nodes.root(), sink);
        self.is_silent = false;
        read
    }

    /// Watches the directories below one that is watched, and tells everything in it.
    pub(super) fn read_below(
        &mut self,
        files: &Files<'_>,
        directory: &OwnedFd,
        key: WatchDescriptor,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        let readable = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let opened = files.open_name(directory, b".", readable);
        let opened = match unless_lacking(opened)? {
            Ok(opened) => opened,
            Err(errno) => return self.pass(errno, sink),
        };
        let ledger = Arc::clone(&self.ledger);
        let walk = files.walk_in(opened, Filter::default(), None, &ledger)?;
        let mut walk = match unless_lacking(walk)? {
            Ok(walk) => walk,
            Err(errno) => return self.pass(errno, sink),
        };
        // The directories from the first to the current one.
        let mut way = vec![key];
        while let Some(visit) = walk.next()? {
            sink.check()?;
            let found = match visit {
                Visit::Entry(found) => found,
                Visit::Passed => continue,
                Visit::Unreadable(_, errno) => {
                    let _ = unless_lacking(Err::<(), _>(errno))?;
                    self.pass(errno, sink)?;
                    continue;
                }
            };
            way.truncate(found.path.split(|byte| *byte == b'/').count());
            let Some(parent) = way.last() else { break };
            let place = (*parent, found.name.to_vec());
            let kind = found.kind;
            let is_directory = kind == FileKind::Directory;
            let Some(path) = self.told_path(&place, is_directory) else {
                walk.skip_contents();
                continue;
            };
            let opened =
                is_directory.then(|| files.open_name(found.directory, found.name, DIRECTORY));
            let change = TreeChange::Created;
            sink.event(TreeEvent { change, path, kind })?;
            self.find(&place)?;
            let Some(opened) = opened else { continue };
            let added = match unless_lacking(opened)? {
                Ok(directory) => {
                    let added = self.add(&directory, &place, sink)?;
                    added.map(|key| (key, directory))
                }
                Err(errno) => Err(errno),
            };
            match added {
                Ok((key, directory)) => {
                    way.push(key);
                    // Another may have its name by now.
                    walk.enter_opened(directory);
                }
                Err(errno) => {
                    self.pass(errno, sink)?;
                    walk.skip_contents();
                }
            }
        }
        Ok(())
    }

    /// Passes a directory that cannot be watched, if it is none of the tree. What is new and may not be read is lost until
    /// its mode changes, and that is reported.
    pub(super) fn pass(&self, errno: Errno, sink: &mut dyn EventSink) -> Outcome {
        match errno {
            // One on another mount.
            Errno::EXDEV => Ok(()),
            // That will be reported.
            errno if is_gone(errno) => Ok(()),
            Errno::EACCES | Errno::EPERM if !self.is_strict => {
                Ok(sink.event(TreeEvent::overflow())?)
            }
            errno => Err(Ended::Failed(errno)),
        }
    }

    /// Makes the watch complete again after events were lost, and says so.
    pub(super) fn recover(&mut self, files: &Files<'_>, sink: &mut dyn EventSink) -> Outcome {
        self.backlog.clear();
        self.missed.clear();
        self.missed_tries = 0;
        self.modified.clear();
        self.found.clear();
        self.found_bytes = 0;
        let old: Vec<_> = self.nodes.keys().collect();
        self.nodes = Nodes::new(self.nodes.root());
        // What is watched already costs nothing more.
        self.share.directories.give_back(old.len() - 1);
        let was_strict = std::mem::replace(&mut self.is_strict, true);
        let read = self.read_tree(files, &mut Silent(sink));
        self.is_strict = was_strict;
        for key in old.into_iter().filter(|key| !self.nodes.has(*key)) {
            let _ = self.inotify.rm_watch(key);
        }
        // Last: whoever reads the tree now sees what no event will say.
        sink.event(TreeEvent::overflow())?;
        read
    }

    /// Opens the directory that is watched, if it is still at its path.
    pub(super) fn open_root(&self, files: &Files<'_>) -> Outcome<OwnedFd> {
        let opened = files.resolve(&self.settings.path, DIRECTORY);
        let failed = |errno| match errno {
            // Something else is there, or a way out of the tree.
            errno if is_gone(errno) || errno == Errno::EXDEV => Ended::Deleted,
            errno => Ended::Failed(errno),
        };
        let root = unless_lacking(opened)?.map_err(failed)?;
        if Identity::of_open(&root).map_err(Ended::Failed)? != self.identity {
            return Err(Ended::Deleted);
        }
        Ok(root)
    }

    /// Opens a directory that is watched, name by name from the nearest one above that is open. That one may have been
    /// moved since it was opened; its watch will tell, and what is in it is what its events are about.
    ///
    /// # Errors
    /// `ESTALE` if it is not at its place, or cannot be reached there.
    pub(in crate::files::watch) fn open_directory(
        &mut self,
        files: &Files<'_>,
        key: WatchDescriptor,
    ) -> nix::Result<Arc<OwnedFd>> {
        self.reach(files, key).ok_or(Errno::ESTALE)
    }

    fn reach(&mut self, files: &Files<'_>, key: WatchDescriptor) -> Option<Arc<OwnedFd>> {
        let (mut names, mut at) = (Vec::new(), key);
        let mut directory = loop {
            if !self.nodes.has(at) {
                return None;
            }
            if let Some(index) = self.open.iter().position(|(open, _)| *open == at) {
                // The last one is the one that was used last.
                self.open[index..].rotate_left(1);
                break Arc::clone(&self.open.last()?.1);
            }
            let Some((parent, name)) = self.nodes.place(at) else {
                let root = self.open_root(files).ok()?;
                break self.keep_open(at, root);
            };
            names.push((at, name));
            at = parent;
        };
        while let Some((at, name)) = names.pop() {
            let opened = files.open_name(&directory, &name, DIRECTORY).ok()?;
            // The one above is kept too: others beside this one are next.
            directory = if names.len() < 2 {
                // Another may have its place by now.
                if self.key_of(&opened)? != at {
                    return None;
                }
                self.keep_open(at, opened)
            } else {
                Arc::new(opened)
            };
        }
        Some(directory)
    }

    fn keep_open(&mut self, key: WatchDescriptor, directory: OwnedFd) -> Arc<OwnedFd> {
        let directory = Arc::new(directory);
        if self.open.len() >= MAX_OPEN {
            self.open.remove(0);
        }
        self.open.push((key, Arc::clone(&directory)));
        directory
    }

    /// The directory that is at a place now, if it is known.
    pub(super) fn directory_at(
        &mut self,
        files: &Files<'_>,
        (parent, name): &NameIn,
    ) -> Option<WatchDescriptor> {
        let parent = self.open_directory(files, *parent).ok()?;
        self.key_of(&files.open_name(&parent, name, DIRECTORY).ok()?)
    }

    /// Which of the known directories this is: one that is watched already has its watch.
    pub(super) fn key_of(&self, directory: &OwnedFd) -> Option<WatchDescriptor> {
        let key = add_watch(&self.inotify, directory, EVENTS).ok()?;
        if self.nodes.has(key) {
            return Some(key);
        }
        let _ = self.inotify.rm_watch(key);
        None
    }
}

/// Ends the watch if the server or the kernel lacks what it takes to look: then it would be a part only.
pub(super) fn unless_lacking<T>(result: nix::Result<T>) -> Outcome<nix::Result<T>> {
    match result {
        Err(Errno::ENOSPC) => Err(Ended::NoWatches),
        Err(errno @ (Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM)) => Err(Ended::Failed(errno)),
        result => Ok(result),
    }
}

/// Adds a watch for a directory that is open by `O_PATH`.
pub(in crate::files::watch) fn add_watch(
    inotify: &Inotify,
    directory: &OwnedFd,
    flags: AddWatchFlags,
) -> nix::Result<WatchDescriptor> {
    // The kernel takes a path only. This one leads to the descriptor, whatever happens to names.
    let path = format!("/proc/self/fd/{}", directory.as_raw_fd());
    inotify.add_watch(&path[..], flags)
}

pub(super) fn count_directories(
    settings: &Settings,
    files: &Files<'_>,
    ledger: &Arc<Ledger>,
    interrupt: &mut dyn Interrupt,
) -> std::result::Result<u64, Stopped> {
    let mut walk = files.walk(&settings.path, Filter::default(), None, ledger)?;
    let mut count = 1;
    while let Some(visit) = walk.next()? {
        interrupt.check()?;
        if let Visit::Entry(found) = visit
            && found.kind == FileKind::Directory
        {
            if settings.exclude.covers(found.path, true) {
                walk.skip_contents();
            } else {
                count += 1;
            }
        }
    }
    Ok(count)
}
