//! What an event means: it is compared with what was found before, and becomes what is reported.
//!
//! Names are looked at here one at a time. How directories are reached and read is the matter of
//! [`reading`](super::reading).

use std::hash::BuildHasher;
use std::os::unix::ffi::OsStringExt;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::sys::inotify::{AddWatchFlags, WatchDescriptor};

use super::super::event::{Ended, EventSink, Outcome, TreeChange, TreeEvent};
use super::super::nodes::join;
use super::{NameIn, Watcher};
use crate::files::entry::FileKind;
use crate::files::root::Files;
use crate::files::search::Verdict;
use crate::sys::paths::fstatat;

/// How long a file may be written to before that is reported, if it is not closed.
const MODIFIED_AFTER: Duration = Duration::from_millis(50);

/// How often places are looked at whose directories cannot be reached, before that counts as a loss.
const MISSED_TRIES: usize = 8;

/// Most such places.
const MAX_MISSED: usize = 512;

/// Most files that are known to be written to. Of more each write is reported.
const MAX_MODIFIED: usize = 4096;

/// What a remembered name takes, besides its bytes.
const NAME_BYTES: usize = 96;

impl Watcher {
    /// Settles the first event, and what belongs to it.
    pub(super) fn settle(&mut self, files: &Files<'_>, sink: &mut dyn EventSink) -> Outcome {
        let partner = self.partner();
        let Some(event) = self.backlog.pop_front() else {
            return Ok(());
        };
        let mask = event.mask;
        if mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            self.is_incomplete = true;
            return Ok(());
        }
        let Some(name) = event.name else {
            return self.settle_own(files, event.wd, mask, sink);
        };
        let is_directory = mask.contains(AddWatchFlags::IN_ISDIR);
        let place = (event.wd, OsStringExt::into_vec(name));
        if mask.contains(AddWatchFlags::IN_MOVED_FROM) {
            // Its place is one before what it was, because the first event is taken.
            let second = partner.and_then(|index| self.backlog.remove(index - 1));
            if let Some((to, name)) = second.and_then(|event| Some((event.wd, event.name?))) {
                let to = (to, OsStringExt::into_vec(name));
                return self.moved(files, &place, &to, is_directory, sink);
            }
        }
        if mask.intersects(AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO) {
            self.note_move(&place, None);
            let is_move = mask.contains(AddWatchFlags::IN_MOVED_TO);
            self.created(files, &place, is_directory, is_move, sink)
        } else if mask.contains(AddWatchFlags::IN_DELETE) {
            self.note_move(&place, None);
            self.deleted(&place, is_directory, sink)
        } else if mask.contains(AddWatchFlags::IN_MOVED_FROM) {
            self.note_move(&place, None);
            self.deleted(&place, is_directory, sink)?;
            // Perhaps it was exchanged with what is not watched, and that was told before.
            self.look(files, &place, sink)
        } else if self.is_unnamed(files, &place) {
            Ok(())
        } else if mask.contains(AddWatchFlags::IN_MODIFY) {
            if self.modified.len() >= MAX_MODIFIED {
                return self.tell_of(files, &place, TreeChange::Modified, sink);
            }
            if self.told_path(&place, false).is_some() {
                let due = Instant::now() + MODIFIED_AFTER;
                self.modified.entry(place).or_insert(due);
                self.modified_at.get_or_insert(due);
            }
            Ok(())
        } else if mask.contains(AddWatchFlags::IN_CLOSE_WRITE) {
            if self.modified.remove(&place).is_some() {
                self.tell_of(files, &place, TreeChange::Modified, sink)?;
            }
            Ok(())
        } else {
            self.tell_of(files, &place, TreeChange::Attributes, sink)?;
            // Perhaps it may be read now.
            if is_directory
                && self.nodes.child(place.0, &place.1).is_none()
                && self.told_path(&place, true).is_some()
            {
                self.add_below(files, &place, sink)?;
            }
            Ok(())
        }
    }

    /// Whether an event is about a file without a name (`O_TMPFILE`), as uploads are until they are complete. The
    /// kernel names it by a number sign and its inode number.
    fn is_unnamed(&mut self, files: &Files<'_>, place: &NameIn) -> bool {
        let number = place.1.strip_prefix(b"#").unwrap_or_default();
        !number.is_empty()
            && number.iter().all(u8::is_ascii_digit)
            && self.kind_at(files, place) == Err(Errno::ENOENT)
    }

    /// Settles an event of a directory itself.
    pub(super) fn settle_own(
        &mut self,
        files: &Files<'_>,
        key: WatchDescriptor,
        mask: AddWatchFlags,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        let is_unmounted = mask.contains(AddWatchFlags::IN_UNMOUNT);
        if key == self.nodes.root() {
            let ends = AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_IGNORED;
            if is_unmounted || mask.intersects(ends) {
                return Err(Ended::Deleted);
            }
            if mask.contains(AddWatchFlags::IN_MOVE_SELF) {
                return self.open_root(files).map(drop);
            }
        } else if is_unmounted && let Some(place) = self.nodes.place(key) {
            return self.retell(files, &place, sink);
        }
        // Of others that are gone the directory above tells.
        Ok(())
    }

    /// The path of a place, unless it is unknown or excluded.
    pub(super) fn told_path(
        &mut self,
        (directory, name): &NameIn,
        is_directory: bool,
    ) -> Option<Vec<u8>> {
        let path = join(self.nodes.path(*directory)?, name);
        // What is excluded is not watched, so of the directories above none is.
        let verdict = self.settings.exclude.decide(&path, is_directory);
        (verdict != Some(Verdict::Matched)).then_some(path)
    }

    /// Tells a change of what is at a place now.
    pub(super) fn tell_of(
        &mut self,
        files: &Files<'_>,
        place: &NameIn,
        change: TreeChange,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        let kind = self.kind_at(files, place).unwrap_or_default();
        if let Some(path) = self.told_path(place, kind == FileKind::Directory) {
            sink.event(TreeEvent { change, path, kind })?;
        }
        Ok(())
    }

    /// The type of what is at a place now. `ESTALE` if its directory cannot be reached.
    pub(super) fn kind_at(
        &mut self,
        files: &Files<'_>,
        (directory, name): &NameIn,
    ) -> nix::Result<FileKind> {
        let directory = self.open_directory(files, *directory)?;
        let status = fstatat(&directory, &name[..], AtFlags::AT_SYMLINK_NOFOLLOW)?;
        Ok(FileKind::of(&status))
    }

    /// Whether nothing is at a place, after all that has happened.
    pub(super) fn is_gone(&mut self, files: &Files<'_>, place: &NameIn) -> Outcome<bool> {
        let is_absent = self
            .kind_at(files, place)
            .is_err_and(|errno| errno != Errno::ESTALE);
        Ok(is_absent && self.backlog.is_empty() && !self.read_events()?)
    }

    /// The type of what came to a place, by what is there now. If that cannot be seen, it is looked for later.
    pub(super) fn kind_of_new(
        &mut self,
        files: &Files<'_>,
        place: &NameIn,
        is_directory: bool,
    ) -> FileKind {
        if is_directory {
            return FileKind::Directory;
        }
        match self.kind_at(files, place) {
            // It was replaced, which will be reported.
            Ok(FileKind::Directory) => FileKind::Regular,
            Ok(kind) => kind,
            Err(errno) => {
                if errno == Errno::ESTALE {
                    self.miss(place);
                }
                FileKind::Regular
            }
        }
    }

    pub(super) fn tell_modified(&mut self, files: &Files<'_>, sink: &mut dyn EventSink) -> Outcome {
        let now = Instant::now();
        if self.modified_at.is_none_or(|at| now < at) {
            return Ok(());
        }
        let due = |(place, at): (&NameIn, &Instant)| (*at <= now).then(|| place.clone());
        let due: Vec<NameIn> = self.modified.iter().filter_map(due).collect();
        for place in due {
            sink.check()?;
            self.modified.remove(&place);
            self.tell_of(files, &place, TreeChange::Modified, sink)?;
        }
        self.modified_at = self.modified.values().min().copied();
        Ok(())
    }

    pub(super) fn created(
        &mut self,
        files: &Files<'_>,
        place: &NameIn,
        is_directory: bool,
        is_move: bool,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        let known = self.nodes.child(place.0, &place.1);
        // A move may have replaced what was found.
        let was_told = self.found.remove(place)
            && (!is_move || known.is_some() && self.directory_at(files, place) == known);
        let Some(path) = self.told_path(place, is_directory) else {
            return Ok(());
        };
        if was_told && (!is_directory || known.is_some()) {
            return Ok(());
        }
        if !was_told {
            if known.is_some() {
                self.deleted(place, true, sink)?;
            }
            let kind = self.kind_of_new(files, place, is_directory);
            let change = TreeChange::Created;
            sink.event(TreeEvent { change, path, kind })?;
        }
        if is_directory {
            self.add_below(files, place, sink)?;
        }
        Ok(())
    }

    pub(super) fn deleted(
        &mut self,
        place: &NameIn,
        is_directory: bool,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        self.modified.remove(place);
        self.found.remove(place);
        self.missed.remove(place);
        let path = self.told_path(place, is_directory);
        if let Some(key) = self.nodes.child(place.0, &place.1) {
            self.forget(key);
        }
        if let Some(path) = path {
            let kind = if is_directory {
                FileKind::Directory
            } else {
                FileKind::Regular
            };
            let change = TreeChange::Deleted;
            sink.event(TreeEvent { change, path, kind })?;
        }
        Ok(())
    }

    pub(super) fn moved(
        &mut self,
        files: &Files<'_>,
        from: &NameIn,
        to: &NameIn,
        is_directory: bool,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        if self.modified.remove(from).is_some() {
            self.tell_of(files, from, TreeChange::Modified, sink)?;
        }
        self.modified.remove(to);
        let moving = self.nodes.child(from.0, &from.1);
        // Two names that are exchanged are two moves, of which the first seems to replace what the second moves.
        let is_back = self.note_move(from, Some(to));
        if is_back && !self.is_gone(files, from)? {
            self.retell(files, from, sink)?;
            return self.retell(files, to, sink);
        }
        // Other things in it may be excluded at its new place.
        let is_same = is_directory && !self.settings.exclude.has_paths();
        let epoch = self.epoch;
        let is_certain = moving.is_none_or(|key| {
            let notes = self.nodes.notes(key);
            is_same && notes.is_some_and(|notes| notes.epoch < epoch)
        });
        let (old, new) = (
            self.told_path(from, is_directory),
            self.told_path(to, is_directory),
        );
        let (Some(old), Some(path), true) = (old, new, is_certain) else {
            self.deleted(from, is_directory, sink)?;
            self.created(files, to, is_directory, true, sink)?;
            return self.look(files, from, sink);
        };
        for place in [from, to] {
            self.found.remove(place);
            self.missed.remove(place);
        }
        let kind = self.kind_of_new(files, to, is_directory);
        let change = TreeChange::Moved(old);
        sink.event(TreeEvent { change, path, kind })?;
        if let Some(key) = moving {
            return self.put(key, to);
        }
        if let Some(replaced) = self.nodes.child(to.0, &to.1) {
            self.forget(replaced);
        }
        if is_directory {
            self.add_below(files, to, sink)?;
        }
        Ok(())
    }

    /// Remembers the last change of the names in a directory. True if this is a move, and the last change was the
    /// same move in the other direction: both directories are locked during an exchange, so its two moves follow each
    /// other in both.
    pub(super) fn note_move(&mut self, from: &NameIn, to: Option<&NameIn>) -> bool {
        let hash = |pair: (&NameIn, &NameIn)| self.modified.hasher().hash_one(pair);
        let there = to.map(|to| hash((from, to)));
        let back = to.map(|to| hash((to, from)));
        let is_back = to
            .and_then(|to| self.nodes.notes(to.0))
            .is_some_and(|notes| Some(std::mem::take(&mut notes.last_move)) == back);
        if let Some(notes) = self.nodes.notes(from.0) {
            notes.last_move = there.filter(|_| !is_back).unwrap_or_default();
        }
        is_back
    }

    /// Tells what is at a place now as if it were new, with all that is in it.
    pub(super) fn retell(
        &mut self,
        files: &Files<'_>,
        place: &NameIn,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        let is_directory = self.nodes.child(place.0, &place.1).is_some();
        self.deleted(place, is_directory, sink)?;
        self.look(files, place, sink)
    }

    /// Tells what is at a place now.
    pub(super) fn look(
        &mut self,
        files: &Files<'_>,
        place: &NameIn,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        match self.kind_at(files, place) {
            Ok(kind) => {
                self.created(files, place, kind == FileKind::Directory, false, sink)?;
                self.find(place)
            }
            Err(Errno::ESTALE) => {
                self.miss(place);
                Ok(())
            }
            // It is gone, which will be reported.
            Err(_) => Ok(()),
        }
    }

    /// Looks later at a place whose directory cannot be reached.
    pub(super) fn miss(&mut self, place: &NameIn) {
        if self.nodes.has(place.0) {
            self.missed.insert(place.clone());
        }
        self.is_incomplete |= self.missed.len() > MAX_MISSED;
    }

    /// Looks again at the places whose directories could not be reached.
    pub(super) fn look_for_missed(
        &mut self,
        files: &Files<'_>,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        // If the whole tree is gone, no event says so.
        self.open_root(files)?;
        for place in std::mem::take(&mut self.missed) {
            sink.check()?;
            self.look(files, &place, sink)?;
        }
        self.missed_tries += 1;
        if self.missed.is_empty() {
            self.missed_tries = 0;
        }
        self.is_incomplete |= self.missed_tries == MISSED_TRIES;
        Ok(())
    }

    /// Remembers that a name was told because it was found.
    pub(super) fn find(&mut self, place: &NameIn) -> Outcome {
        if self.is_silent {
            return Ok(());
        }
        self.found_bytes += place.1.len() + NAME_BYTES;
        self.found.insert(place.clone());
        self.charge_for_nodes()
    }
}
