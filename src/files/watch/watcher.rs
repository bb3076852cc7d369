//! One watch of a tree: reads the kernel's events, keeps its directories watched, and tells what changed.
//!
//! The events of a directory that is watched are a log of its names, and a watch belongs to a directory and not to
//! its path. A directory that is new is looked at later than its events say, so what is found in it may be newer
//! than events that are still to come. It stays right because names that change are told again: each event that
//! touches a place makes the watch forget what it found there, and look anew. Only a directory that was found before
//! all events were settled once ([`Notes::epoch`](super::nodes::Notes)) is told as moved, with what is in it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::BuildHasher;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use nix::sys::stat::fstatat;

use super::limits::WatchShare;
use super::nodes::Nodes;
use crate::client::{Disconnected, Interrupt, Stopped};
use crate::error::{Detail, Error, Kind};
use crate::files::entry::{DIRECTORY, FileKind, Identity};
use crate::files::name::FilePath;
use crate::files::root::Files;
use crate::files::search::{Filter, Matcher, Visit, is_gone};
use crate::ledger::{Charge, Item, Ledger};

/// How long a file may be written to before that is told, if it is not closed.
const MODIFIED_AFTER: Duration = Duration::from_millis(50);

/// How long the second half of a move may take. The kernel adds both at once, so this is for a renaming thread that
/// is interrupted between them.
const MOVE_LIMIT: Duration = Duration::from_millis(25);

/// How often places are looked at whose directories cannot be reached, before that counts as a loss.
const MISSED_TRIES: usize = 8;

/// Most such places.
const MAX_MISSED: usize = 512;

/// Most files that are known to be written to. Of more each write is told.
const MAX_MODIFIED: usize = 4096;

/// Most events that are read before the first of them is settled.
const MAX_BACKLOG: usize = 1024;

/// Events that one step settles.
const STEP_EVENTS: usize = 1024;

/// How long it may take to settle what happened while the tree was read for the first time, which nobody is told.
const SETTLE_LIMIT: Duration = Duration::from_secs(2);

/// Bytes that are charged at a time.
const CHARGED_BYTES: usize = 32 * 1024;

/// What a remembered name takes, besides its bytes.
const NAME_BYTES: usize = 96;

/// What the kernel tells of a directory.
pub(super) const EVENTS: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_MOVE)
    .union(AddWatchFlags::IN_MODIFY)
    .union(AddWatchFlags::IN_CLOSE_WRITE)
    .union(AddWatchFlags::IN_ATTRIB)
    .union(AddWatchFlags::IN_ONLYDIR)
    // What the first one has besides stays.
    .union(AddWatchFlags::from_bits_retain(libc::IN_MASK_ADD));

/// The same of the first one, whose parent is not watched.
const ROOT_EVENTS: AddWatchFlags = EVENTS
    .union(AddWatchFlags::IN_DELETE_SELF)
    .union(AddWatchFlags::IN_MOVE_SELF);

/// What of a tree is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The directory.
    pub path: FilePath,
    /// Whether the directories in it are watched too.
    pub recursive: bool,
    /// What is left out, with all that is in it. Relative to the path.
    pub exclude: Matcher,
}

/// What happened to a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreeChange {
    /// It is new, or came from outside of the tree.
    Created,
    /// Its content was written to.
    Modified,
    /// It is gone, or went out of the tree.
    Deleted,
    /// It had this path before. What had the new path before is gone.
    Moved(Vec<u8>),
    /// Its mode, owner or times changed.
    Attributes,
    /// Changes were lost: the tree has to be read again.
    Overflow,
}

/// A change in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeEvent {
    /// What happened.
    pub change: TreeChange,
    /// Relative to the directory that is watched.
    pub path: Vec<u8>,
    /// The type; of what is gone only whether it was a directory.
    pub kind: FileKind,
}

/// Why a watch is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The directory is not at its path any more.
    Deleted,
    /// Nobody deleted the directory: the watch itself was, or its workspace ends.
    Closed,
    /// A new directory cannot be watched: the kernel or the share has no watch left.
    NoWatches,
    /// The tenant holds its share of the server's memory.
    OverLimit,
    /// The kernel failed.
    Failed(Errno),
    /// Nobody wants to be told any more.
    Disconnected,
}

impl TreeEvent {
    /// Events were lost.
    pub fn overflow() -> Self {
        Self {
            change: TreeChange::Overflow,
            path: Vec::new(),
            kind: FileKind::Directory,
        }
    }
}

impl Ended {
    /// Whether changes are lost by it, because the watch should have gone on.
    pub fn is_loss(self) -> bool {
        matches!(self, Self::NoWatches | Self::OverLimit | Self::Failed(_))
    }
}

impl From<Disconnected> for Ended {
    fn from(_: Disconnected) -> Self {
        Self::Disconnected
    }
}

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        match error.kind() {
            Kind::OverLimit => Self::OverLimit,
            _ => Self::Failed(Errno::EIO),
        }
    }
}

/// Takes what is told.
pub type Tell<'a> = &'a mut dyn FnMut(TreeEvent) -> std::result::Result<(), Disconnected>;

type Outcome<T = ()> = std::result::Result<T, Ended>;

/// A name in a directory that is watched.
type NameIn = (WatchDescriptor, Vec<u8>);

/// A tree that is watched. Use it while the thread acts as the owner of the files.
pub struct Watcher {
    settings: Settings,
    /// Of the directory that is watched.
    identity: Identity,
    pub(super) inotify: Inotify,
    pub(super) nodes: Nodes<WatchDescriptor>,
    /// Events that were read and not settled.
    backlog: VecDeque<InotifyEvent>,
    /// Until when the first of them, the first half of a move, waits for the second.
    waits_until: Option<Instant>,
    /// Files that were written to, and when that is told.
    modified: HashMap<NameIn, Instant>,
    /// When the first of them may be due.
    modified_at: Option<Instant>,
    /// Names that were told because they were found; their own events may still come.
    found: HashSet<NameIn>,
    found_bytes: usize,
    /// New names whose directories could not be reached: one above was renamed, which will be told.
    pub(super) missed: HashSet<NameIn>,
    missed_tries: usize,
    /// How often all events were settled.
    epoch: u64,
    /// What is found is not told.
    is_silent: bool,
    /// A directory that cannot be read ends the watch: it must not pass for one that is empty.
    is_strict: bool,
    /// Something was lost.
    pub(super) is_incomplete: bool,
    pub(super) share: Arc<WatchShare>,
    ledger: Arc<Ledger>,
    charge: Charge,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.share.directories.give_back(self.nodes.len());
        self.share.trees.give_back(1);
    }
}

impl Watcher {
    /// Watches a tree: what changes from now on is told.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `Forbidden`; `NoWatches`, with the number of directories and the limit;
    /// `OverLimit`; or it was interrupted.
    pub fn new(
        settings: &Settings,
        files: &Files<'_>,
        share: &Arc<WatchShare>,
        ledger: &Arc<Ledger>,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Self, Stopped> {
        let path = settings.path.clone();
        let failed = |errno| files.error(format_args!("cannot watch {path}"), errno);
        let root = files.resolve(path.bytes(), DIRECTORY).map_err(failed)?;
        let identity = Identity::of_open(&root).map_err(failed)?;
        let charge = ledger.charge(Item::Watches, 0).map_err(Error::from)?;
        let too_many_trees = || {
            let why = "there are as many watches as the server may have for this tenant (fs.inotify.max_user_instances)";
            Error::new(Kind::NoWatches, format!("cannot watch {path}: {why}"))
        };
        let too_many = |files: &Files<'_>, interrupt: &mut dyn Interrupt| {
            let dirs = count_directories(settings, files, ledger, interrupt)?;
            let limit = share.directories.left() as u64;
            let text = format!(
                "cannot watch {path}: it has {dirs} directories, and this tenant may watch {limit} more \
                 (fs.inotify.max_user_watches); exclude some of them"
            );
            let error = Error::new(Kind::NoWatches, text)
                .with("dirs", Detail::Number(dirs))
                .with("limit", Detail::Number(limit));
            Err(Stopped::Failed(error))
        };
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK);
        let inotify = inotify.map_err(|errno| match errno {
            Errno::EMFILE => too_many_trees(),
            errno => failed(errno),
        })?;
        let added = add_watch(&inotify, &root, ROOT_EVENTS);
        drop(root);
        let first = match added {
            Err(Errno::ENOSPC) => return too_many(files, interrupt),
            added => added.map_err(failed)?,
        };
        if !share.trees.take() {
            return Err(too_many_trees().into());
        }
        if !share.directories.take() {
            share.trees.give_back(1);
            return too_many(files, interrupt);
        }
        let mut watcher = Self {
            settings: settings.clone(),
            identity,
            inotify,
            nodes: Nodes::new(first),
            backlog: VecDeque::new(),
            waits_until: None,
            modified: HashMap::new(),
            modified_at: None,
            found: HashSet::new(),
            found_bytes: 0,
            missed: HashSet::new(),
            missed_tries: 0,
            epoch: 0,
            is_silent: false,
            is_strict: true,
            is_incomplete: false,
            share: Arc::clone(share),
            ledger: Arc::clone(ledger),
            charge,
        };
        let mut stopped = None;
        let mut go_on = || {
            interrupt.check().map_err(|why| {
                stopped = Some(why);
                Disconnected
            })
        };
        let begun = watcher.begin(files, SETTLE_LIMIT, &mut go_on);
        match (begun, stopped) {
            (Ok(()), _) => Ok(watcher),
            (Err(_), Some(stopped)) => Err(stopped),
            (Err(Ended::NoWatches), None) => {
                drop(watcher);
                too_many(files, interrupt)
            }
            (Err(Ended::OverLimit), None) => {
                let text =
                    format!("cannot watch {path}: there is no memory for so many directories");
                Err(Error::new(Kind::OverLimit, text).into())
            }
            (Err(Ended::Failed(errno)), None) => Err(failed(errno).into()),
            (Err(Ended::Deleted | Ended::Closed | Ended::Disconnected), None) => {
                Err(failed(Errno::ENOENT).into())
            }
        }
    }

    /// Watches all directories, and settles what happens meanwhile: that is part of the beginning. If the tree does
    /// not come to rest in this time, the next step says that something was lost.
    pub(super) fn begin(
        &mut self,
        files: &Files<'_>,
        settle_limit: Duration,
        go_on: &mut dyn FnMut() -> std::result::Result<(), Disconnected>,
    ) -> Outcome {
        self.read_tree(files, &mut |_| go_on())?;
        let until = Instant::now() + settle_limit;
        let is_late = || Instant::now() >= until;
        let mut is_settled = false;
        while !is_settled && !is_late() {
            go_on()?;
            // One event may mean that a large part of the tree is read again.
            let mut go_on_in_time = |_: TreeEvent| match go_on() {
                Ok(()) if is_late() => Err(Disconnected),
                other => other,
            };
            match self.step(files, &mut go_on_in_time) {
                Ok(Next::Now) => {}
                Ok(Next::At(_)) if !self.missed.is_empty() || !self.backlog.is_empty() => {
                    std::thread::sleep(MOVE_LIMIT);
                }
                Ok(_) => is_settled = true,
                Err(Ended::Disconnected) if is_late() => go_on()?,
                Err(ended) => return Err(ended),
            }
        }
        self.is_incomplete |= !is_settled;
        self.is_strict = false;
        Ok(())
    }

    /// The directory and what of it is watched.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Directories that are watched.
    pub fn directories(&self) -> usize {
        self.nodes.len()
    }

    /// Readable when there are events.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    /// Tells what has happened, without waiting. Returns when to call again if nothing happens before.
    ///
    /// # Errors
    /// The watch is over.
    pub fn advance(&mut self, files: &Files<'_>, tell: Tell<'_>) -> Outcome<Option<Instant>> {
        Ok(match self.step(files, tell)? {
            Next::Now => Some(Instant::now()),
            Next::At(when) => Some(when),
            Next::Event => None,
        })
    }

    fn step(&mut self, files: &Files<'_>, tell: Tell<'_>) -> Outcome<Next> {
        for _ in 0..STEP_EVENTS {
            self.tell_modified(files, tell)?;
            if std::mem::take(&mut self.is_incomplete) {
                self.recover(files, tell)?;
            }
            let is_drained = self.backlog.len() >= MAX_BACKLOG || !self.read_events()?;
            let Some(event) = self.backlog.front() else {
                self.confirm();
                if self.missed.is_empty() {
                    return Ok(self.modified_at.map_or(Next::Event, Next::At));
                }
                self.look_for_missed(files, tell)?;
                if self.missed.is_empty() || self.is_incomplete {
                    continue;
                }
                return Ok(Next::At(Instant::now() + MOVE_LIMIT));
            };
            if event.mask.contains(AddWatchFlags::IN_MOVED_FROM) && self.partner().is_none() {
                let limit = Instant::now() + MOVE_LIMIT;
                let until = *self.waits_until.get_or_insert(limit);
                if is_drained && self.backlog.len() < MAX_BACKLOG && Instant::now() < until {
                    return Ok(Next::At(until));
                }
                if !is_drained {
                    continue;
                }
            }
            self.waits_until = None;
            self.settle(files, tell)?;
        }
        Ok(Next::Now)
    }

    /// Reads events; false if there are none.
    fn read_events(&mut self) -> Outcome<bool> {
        loop {
            match self.inotify.read_events() {
                Ok(events) => {
                    self.backlog.extend(events);
                    return Ok(true);
                }
                Err(Errno::EAGAIN) => return Ok(false),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(Ended::Failed(errno)),
            }
        }
    }

    /// All events were settled: what was found before is where it was found.
    fn confirm(&mut self) {
        self.epoch += 1;
        if self.found_bytes > 0 {
            self.found = HashSet::new();
            self.found_bytes = 0;
            // If it is more than before, it is charged later.
            let _ = self.charge.set(self.nodes.bytes() + CHARGED_BYTES);
        }
    }

    /// Where the second half of the move is whose first half is the first event.
    fn partner(&self) -> Option<usize> {
        let cookie = self.backlog.front()?.cookie;
        let is_partner = |event: &InotifyEvent| {
            event.mask.contains(AddWatchFlags::IN_MOVED_TO) && event.cookie == cookie
        };
        self.backlog.iter().position(is_partner)
    }

    /// Settles the first event, and what belongs to it.
    fn settle(&mut self, files: &Files<'_>, tell: Tell<'_>) -> Outcome {
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
            return self.settle_own(files, event.wd, mask, tell);
        };
        let is_directory = mask.contains(AddWatchFlags::IN_ISDIR);
        let place = (event.wd, OsStringExt::into_vec(name));
        if mask.contains(AddWatchFlags::IN_MOVED_FROM) {
            // Its place is one before what it was, because the first event is taken.
            let second = partner.and_then(|index| self.backlog.remove(index - 1));
            if let Some((to, name)) = second.and_then(|event| Some((event.wd, event.name?))) {
                let to = (to, OsStringExt::into_vec(name));
                return self.moved(files, &place, &to, is_directory, tell);
            }
        }
        if mask.intersects(AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO) {
            self.note_move(&place, None);
            let is_move = mask.contains(AddWatchFlags::IN_MOVED_TO);
            self.created(files, &place, is_directory, is_move, tell)
        } else if mask.contains(AddWatchFlags::IN_DELETE) {
            self.note_move(&place, None);
            self.deleted(&place, is_directory, tell)
        } else if mask.contains(AddWatchFlags::IN_MOVED_FROM) {
            self.note_move(&place, None);
            self.deleted(&place, is_directory, tell)?;
            // Perhaps it was exchanged with what is not watched, and that was told before.
            self.look(files, &place, tell)
        } else if mask.contains(AddWatchFlags::IN_MODIFY) {
            if self.modified.len() >= MAX_MODIFIED {
                return self.tell_of(files, &place, TreeChange::Modified, tell);
            }
            if self.told_path(&place, false).is_some() {
                let due = Instant::now() + MODIFIED_AFTER;
                self.modified.entry(place).or_insert(due);
                self.modified_at.get_or_insert(due);
            }
            Ok(())
        } else if mask.contains(AddWatchFlags::IN_CLOSE_WRITE) {
            if self.modified.remove(&place).is_some() {
                self.tell_of(files, &place, TreeChange::Modified, tell)?;
            }
            Ok(())
        } else {
            self.tell_of(files, &place, TreeChange::Attributes, tell)?;
            // Perhaps it may be read now.
            if is_directory
                && self.nodes.child(place.0, &place.1).is_none()
                && self.told_path(&place, true).is_some()
            {
                self.add_below(files, &place, tell)?;
            }
            Ok(())
        }
    }

    /// Settles an event of a directory itself.
    fn settle_own(
        &mut self,
        files: &Files<'_>,
        key: WatchDescriptor,
        mask: AddWatchFlags,
        tell: Tell<'_>,
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
            return self.retell(files, &place, tell);
        }
        // Of others that are gone the directory above tells.
        Ok(())
    }

    /// The path of a place, unless it is unknown or excluded.
    fn told_path(&self, (directory, name): &NameIn, is_directory: bool) -> Option<Vec<u8>> {
        let path = join(self.nodes.path(*directory)?, name);
        (!self.settings.exclude.covers(&path, is_directory)).then_some(path)
    }

    /// Tells a change of what is at a place now.
    fn tell_of(
        &mut self,
        files: &Files<'_>,
        place: &NameIn,
        change: TreeChange,
        tell: Tell<'_>,
    ) -> Outcome {
        let kind = self.kind_at(files, place).unwrap_or_default();
        if let Some(path) = self.told_path(place, kind == FileKind::Directory) {
            tell(TreeEvent { change, path, kind })?;
        }
        Ok(())
    }

    /// The type of what is at a place now. `ESTALE` if its directory cannot be reached.
    fn kind_at(&self, files: &Files<'_>, (directory, name): &NameIn) -> nix::Result<FileKind> {
        let directory = self.open_directory(files, *directory)?;
        let status = fstatat(&directory, &name[..], AtFlags::AT_SYMLINK_NOFOLLOW)?;
        Ok(FileKind::of(&status))
    }

    /// Whether nothing is at a place, after all that has happened.
    fn is_gone(&mut self, files: &Files<'_>, place: &NameIn) -> Outcome<bool> {
        let is_absent = self
            .kind_at(files, place)
            .is_err_and(|errno| errno != Errno::ESTALE);
        Ok(is_absent && self.backlog.is_empty() && !self.read_events()?)
    }

    /// The type of what came to a place, by what is there now. If that cannot be seen, it is looked for later.
    fn kind_of_new(&mut self, files: &Files<'_>, place: &NameIn, is_directory: bool) -> FileKind {
        if is_directory {
            return FileKind::Directory;
        }
        match self.kind_at(files, place) {
            // It was replaced, which will be told.
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

    fn tell_modified(&mut self, files: &Files<'_>, tell: Tell<'_>) -> Outcome {
        let now = Instant::now();
        if self.modified_at.is_none_or(|at| now < at) {
            return Ok(());
        }
        let due = |(place, at): (&NameIn, &Instant)| (*at <= now).then(|| place.clone());
        let due: Vec<NameIn> = self.modified.iter().filter_map(due).collect();
        for place in due {
            self.modified.remove(&place);
            self.tell_of(files, &place, TreeChange::Modified, tell)?;
        }
        self.modified_at = self.modified.values().min().copied();
        Ok(())
    }

    fn created(
        &mut self,
        files: &Files<'_>,
        place: &NameIn,
        is_directory: bool,
        is_move: bool,
        tell: Tell<'_>,
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
                self.deleted(place, true, tell)?;
            }
            let kind = self.kind_of_new(files, place, is_directory);
            let change = TreeChange::Created;
            tell(TreeEvent { change, path, kind })?;
        }
        if is_directory {
            self.add_below(files, place, tell)?;
        }
        Ok(())
    }

    fn deleted(&mut self, place: &NameIn, is_directory: bool, tell: Tell<'_>) -> Outcome {
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
            tell(TreeEvent { change, path, kind })?;
        }
        Ok(())
    }

    fn moved(
        &mut self,
        files: &Files<'_>,
        from: &NameIn,
        to: &NameIn,
        is_directory: bool,
        tell: Tell<'_>,
    ) -> Outcome {
        if self.modified.remove(from).is_some() {
            self.tell_of(files, from, TreeChange::Modified, tell)?;
        }
        self.modified.remove(to);
        let moving = self.nodes.child(from.0, &from.1);
        // Two names that are exchanged are two moves, of which the first seems to replace what the second moves.
        let is_back = self.note_move(from, Some(to));
        if is_back && !self.is_gone(files, from)? {
            self.retell(files, from, tell)?;
            return self.retell(files, to, tell);
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
            self.deleted(from, is_directory, tell)?;
            self.created(files, to, is_directory, true, tell)?;
            return self.look(files, from, tell);
        };
        for place in [from, to] {
            self.found.remove(place);
            self.missed.remove(place);
        }
        let kind = self.kind_of_new(files, to, is_directory);
        let change = TreeChange::Moved(old);
        tell(TreeEvent { change, path, kind })?;
        if let Some(key) = moving {
            return self.put(key, to);
        }
        if let Some(replaced) = self.nodes.child(to.0, &to.1) {
            self.forget(replaced);
        }
        if is_directory {
            self.add_below(files, to, tell)?;
        }
        Ok(())
    }

    /// Remembers the last change of the names in a directory. True if this is a move, and the last change was the
    /// same move in the other direction: both directories are locked during an exchange, so its two moves follow each
    /// other in both.
    fn note_move(&mut self, from: &NameIn, to: Option<&NameIn>) -> bool {
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
    fn retell(&mut self, files: &Files<'_>, place: &NameIn, tell: Tell<'_>) -> Outcome {
        let is_directory = self.nodes.child(place.0, &place.1).is_some();
        self.deleted(place, is_directory, tell)?;
        self.look(files, place, tell)
    }

    /// Tells what is at a place now.
    fn look(&mut self, files: &Files<'_>, place: &NameIn, tell: Tell<'_>) -> Outcome {
        match self.kind_at(files, place) {
            Ok(kind) => {
                self.created(files, place, kind == FileKind::Directory, false, tell)?;
                self.find(place)
            }
            Err(Errno::ESTALE) => {
                self.miss(place);
                Ok(())
            }
            // It is gone, which will be told.
            Err(_) => Ok(()),
        }
    }

    /// Looks later at a place whose directory cannot be reached.
    fn miss(&mut self, place: &NameIn) {
        if self.nodes.has(place.0) {
            self.missed.insert(place.clone());
        }
        self.is_incomplete |= self.missed.len() > MAX_MISSED;
    }

    /// Looks again at the places whose directories could not be reached.
    fn look_for_missed(&mut self, files: &Files<'_>, tell: Tell<'_>) -> Outcome {
        // If the whole tree is gone, no event says so.
        self.open_root(files)?;
        for place in std::mem::take(&mut self.missed) {
            self.look(files, &place, tell)?;
        }
        self.missed_tries += 1;
        if self.missed.is_empty() {
            self.missed_tries = 0;
        }
        self.is_incomplete |= self.missed_tries == MISSED_TRIES;
        Ok(())
    }

    /// Remembers that a name was told because it was found.
    fn find(&mut self, place: &NameIn) -> Outcome {
        if self.is_silent {
            return Ok(());
        }
        self.found_bytes += place.1.len() + NAME_BYTES;
        self.found.insert(place.clone());
        self.charge_for_nodes()
    }

    /// Puts a directory that is known at another place.
    fn put(&mut self, key: WatchDescriptor, (parent, name): &NameIn) -> Outcome {
        match self.nodes.put(key, *parent, name) {
            Some(removed) => self.give_up(&removed),
            // The tree is not what the events said.
            None => self.is_incomplete = true,
        }
        self.charge_for_nodes()
    }

    fn charge_for_nodes(&mut self) -> Outcome {
        let bytes = self.nodes.bytes() + self.found_bytes;
        if bytes > self.charge.bytes() {
            let charged = self.charge.set(bytes + CHARGED_BYTES);
            charged.map_err(|_| Ended::OverLimit)?;
        }
        Ok(())
    }

    /// Stops watching a directory and what is below.
    fn forget(&mut self, key: WatchDescriptor) {
        let removed = self.nodes.remove(key);
        self.give_up(&removed);
    }

    fn give_up(&mut self, removed: &[WatchDescriptor]) {
        for key in removed {
            // The kernel has removed those of directories that are gone.
            let _ = self.inotify.rm_watch(*key);
        }
        self.share.directories.give_back(removed.len());
    }

    /// Watches a directory that is new at a place, and tells what is in it.
    fn add_below(&mut self, files: &Files<'_>, place: &NameIn, tell: Tell<'_>) -> Outcome {
        if !self.settings.recursive {
            return Ok(());
        }
        let Ok(parent) = self.open_directory(files, place.0) else {
            self.miss(place);
            return Ok(());
        };
        let directory = match unless_lacking(files.open_name(&parent, &place.1, DIRECTORY))? {
            Ok(directory) => directory,
            Err(errno) => return self.pass(errno, tell),
        };
        match self.add(&directory, place, tell)? {
            Ok(key) => self.read_below(files, &directory, key, tell),
            Err(errno) => self.pass(errno, tell),
        }
    }

    /// Watches a directory at a place.
    fn add(
        &mut self,
        directory: &OwnedFd,
        place: &NameIn,
        tell: Tell<'_>,
    ) -> Outcome<nix::Result<WatchDescriptor>> {
        let mut added = add_watch(&self.inotify, directory, EVENTS);
        if let Ok(key) = added
            && let Some(other) = self.nodes.place(key)
        {
            // It has left that place, which will be told. Until then nothing may be told of what is in it twice.
            self.deleted(&other, true, tell)?;
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
    fn read_tree(&mut self, files: &Files<'_>, tell: Tell<'_>) -> Outcome {
        if !self.settings.recursive {
            return Ok(());
        }
        let directory = self.open_root(files)?;
        self.is_silent = true;
        let read = self.read_below(files, &directory, self.nodes.root(), tell);
        self.is_silent = false;
        read
    }

    /// Watches the directories below one that is watched, and tells everything in it.
    fn read_below(
        &mut self,
        files: &Files<'_>,
        directory: &OwnedFd,
        key: WatchDescriptor,
        tell: Tell<'_>,
    ) -> Outcome {
        let readable = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let opened = files.open_name(directory, b".", readable);
        let opened = match unless_lacking(opened)? {
            Ok(opened) => opened,
            Err(errno) => return self.pass(errno, tell),
        };
        let ledger = Arc::clone(&self.ledger);
        let walk = files.walk_in(opened, Filter::default(), None, &ledger)?;
        let mut walk = match unless_lacking(walk)? {
            Ok(walk) => walk,
            Err(errno) => return self.pass(errno, tell),
        };
        // The directories from the first to the current one.
        let mut way = vec![key];
        while let Some(visit) = walk.next()? {
            let found = match visit {
                Visit::Entry(found) => found,
                Visit::Unreadable(_, errno) => {
                    let _ = unless_lacking(Err::<(), _>(errno))?;
                    self.pass(errno, tell)?;
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
            tell(TreeEvent { change, path, kind })?;
            self.find(&place)?;
            let Some(opened) = opened else { continue };
            let added = match unless_lacking(opened)? {
                Ok(directory) => self.add(&directory, &place, tell)?,
                Err(errno) => Err(errno),
            };
            match added {
                Ok(key) => way.push(key),
                Err(errno) => {
                    self.pass(errno, tell)?;
                    walk.skip_contents();
                }
            }
        }
        Ok(())
    }

    /// Passes a directory that cannot be watched, if it is none of the tree. What is new and may not be read is lost until
    /// its mode changes, and that is told.
    fn pass(&self, errno: Errno, tell: Tell<'_>) -> Outcome {
        match errno {
            // One on another mount.
            Errno::EXDEV => Ok(()),
            // That will be told.
            errno if is_gone(errno) => Ok(()),
            Errno::EACCES | Errno::EPERM if !self.is_strict => Ok(tell(TreeEvent::overflow())?),
            errno => Err(Ended::Failed(errno)),
        }
    }

    /// Makes the watch complete again after events were lost, and says so.
    fn recover(&mut self, files: &Files<'_>, tell: Tell<'_>) -> Outcome {
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
        let read = self.read_tree(files, &mut |_| Ok(()));
        self.is_strict = was_strict;
        for key in old.into_iter().filter(|key| !self.nodes.has(*key)) {
            let _ = self.inotify.rm_watch(key);
        }
        // Last: whoever reads the tree now sees what no event will say.
        tell(TreeEvent::overflow())?;
        read
    }

    /// Opens the directory that is watched, if it is still at its path.
    fn open_root(&self, files: &Files<'_>) -> Outcome<OwnedFd> {
        let opened = files.resolve(self.settings.path.bytes(), DIRECTORY);
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

    /// Opens a directory that is watched, name by name.
    ///
    /// # Errors
    /// `ESTALE` if it is not at its place, or cannot be reached there.
    fn open_directory(&self, files: &Files<'_>, key: WatchDescriptor) -> nix::Result<OwnedFd> {
        let open = || {
            let path = self.nodes.path(key)?;
            let mut directory = self.open_root(files).ok()?;
            for name in path.split(|byte| *byte == b'/') {
                if !name.is_empty() {
                    directory = files.open_name(&directory, name, DIRECTORY).ok()?;
                }
            }
            // Another may have its place by now.
            (self.key_of(&directory)? == key).then_some(directory)
        };
        open().ok_or(Errno::ESTALE)
    }

    /// The directory that is at a place now, if it is known.
    fn directory_at(&self, files: &Files<'_>, (parent, name): &NameIn) -> Option<WatchDescriptor> {
        let parent = self.open_directory(files, *parent).ok()?;
        self.key_of(&files.open_name(&parent, name, DIRECTORY).ok()?)
    }

    /// Which of the known directories this is: one that is watched already has its watch.
    fn key_of(&self, directory: &OwnedFd) -> Option<WatchDescriptor> {
        let key = add_watch(&self.inotify, directory, EVENTS).ok()?;
        if self.nodes.has(key) {
            return Some(key);
        }
        let _ = self.inotify.rm_watch(key);
        None
    }
}

/// Ends the watch if the server or the kernel lacks what it takes to look: then it would be a part only.
fn unless_lacking<T>(result: nix::Result<T>) -> Outcome<nix::Result<T>> {
    match result {
        Err(Errno::ENOSPC) => Err(Ended::NoWatches),
        Err(errno @ (Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM)) => Err(Ended::Failed(errno)),
        result => Ok(result),
    }
}

/// When to go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Now,
    At(Instant),
    Event,
}

/// Adds a watch for a directory that is open by `O_PATH`.
pub(super) fn add_watch(
    inotify: &Inotify,
    directory: &OwnedFd,
    flags: AddWatchFlags,
) -> nix::Result<WatchDescriptor> {
    // The kernel takes a path only. This one leads to the descriptor, whatever happens to names.
    let path = format!("/proc/self/fd/{}", directory.as_raw_fd());
    inotify.add_watch(&path[..], flags)
}

fn count_directories(
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

fn join(mut directory: Vec<u8>, name: &[u8]) -> Vec<u8> {
    if !directory.is_empty() {
        directory.push(b'/');
    }
    directory.extend_from_slice(name);
    directory
}
