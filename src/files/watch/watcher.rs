//! One watch of a tree: reads the kernel's events, keeps its directories watched, and tells what changed.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
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
use crate::files::search::{Filter, Matcher, Visit};
use crate::ledger::{Charge, Item, Ledger};

/// How long a file may be written to before that is told, if it is not closed.
const MODIFIED_AFTER: Duration = Duration::from_millis(50);

/// How long the second half of a move may take. The kernel adds both at once, so this is for a renaming thread that
/// is interrupted between them.
const MOVE_LIMIT: Duration = Duration::from_millis(25);

/// How often a directory is looked for that is not at its place.
const MISSED_TRIES: usize = 4;

/// Most events that are read before the first of them is settled.
const MAX_BACKLOG: usize = 1024;

/// Events that one step settles.
const STEP_EVENTS: usize = 1024;

/// Events that happened while the tree was read for the first time, and that nobody is told.
const MAX_SETTLED: usize = 100_000;

/// Bytes that are charged at a time.
const CHARGED_BYTES: usize = 32 * 1024;

/// What a remembered name takes, besides its bytes.
const NAME_BYTES: usize = 96;

/// What the kernel tells of a directory.
const EVENTS: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_MOVE)
    .union(AddWatchFlags::IN_MODIFY)
    .union(AddWatchFlags::IN_CLOSE_WRITE)
    .union(AddWatchFlags::IN_ATTRIB)
    .union(AddWatchFlags::IN_ONLYDIR);

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
pub enum Change {
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
    pub change: Change,
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
    /// A new directory cannot be watched: the kernel or the share has no watch left.
    NoWatches,
    /// The tenant holds its share of the server's memory.
    OverLimit,
    /// The kernel failed.
    Failed(Errno),
    /// Nobody wants to be told any more.
    Disconnected,
}

impl From<Disconnected> for Ended {
    fn from(_: Disconnected) -> Self {
        Self::Disconnected
    }
}

impl From<Error> for Ended {
    fn from(_: Error) -> Self {
        Self::OverLimit
    }
}

/// Takes what is told.
pub type Tell<'a> = &'a mut dyn FnMut(TreeEvent) -> std::result::Result<(), Disconnected>;

type Outcome<T = ()> = std::result::Result<T, Ended>;

/// A name in a directory.
type Place = (WatchDescriptor, Vec<u8>);

/// A tree that is watched. Use it while the thread acts as the owner of the files.
pub struct Watcher {
    settings: Settings,
    /// Of the directory that is watched.
    identity: Identity,
    inotify: Inotify,
    nodes: Nodes<WatchDescriptor>,
    /// Events that were read and not settled.
    backlog: VecDeque<InotifyEvent>,
    /// Until when the first of them, the first half of a move, waits for the second.
    waits_until: Option<Instant>,
    /// Files that were written to, and when that is told.
    modified: HashMap<Place, Instant>,
    /// When the first of them may be due.
    modified_at: Option<Instant>,
    /// Names that were told because they were found; their own events may still come.
    found: HashSet<Place>,
    found_bytes: usize,
    /// Directories that were not at their place any more when they were to be watched, and how often that was
    /// tried: perhaps only a directory above them was renamed, which is about to be told.
    missed: HashMap<Place, usize>,
    /// The last change of names, if it was a move.
    last_move: Option<(Place, Place)>,
    share: Arc<WatchShare>,
    ledger: Arc<Ledger>,
    charge: Charge,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.share.give_back(self.nodes.len());
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
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK);
        let inotify = inotify.map_err(|errno| match errno {
            Errno::EMFILE => {
                let why = "the server has as many watches open as the kernel lets it (fs.inotify.max_user_instances)";
                Error::new(Kind::NoWatches, format!("cannot watch {path}: {why}"))
            }
            errno => failed(errno),
        })?;
        let too_many = |files: &Files<'_>, interrupt: &mut dyn Interrupt| {
            let dirs = count_directories(settings, files, ledger, interrupt)?;
            let limit = share.most() as u64;
            let text = format!(
                "cannot watch {path}: it has {dirs} directories, and this tenant may watch {limit} \
                 (fs.inotify.max_user_watches); exclude some of them"
            );
            let error = Error::new(Kind::NoWatches, text)
                .with("dirs", Detail::Number(dirs))
                .with("limit", Detail::Number(limit));
            Err(Stopped::Failed(error))
        };
        if !share.take() {
            return too_many(files, interrupt);
        }
        let added = add_watch(&inotify, &root, ROOT_EVENTS);
        let first = match added {
            Ok(first) => first,
            Err(errno) => {
                share.give_back(1);
                return match errno {
                    Errno::ENOSPC => too_many(files, interrupt),
                    errno => Err(failed(errno).into()),
                };
            }
        };
        drop(root);
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
            missed: HashMap::new(),
            last_move: None,
            share: Arc::clone(share),
            ledger: Arc::clone(ledger),
            charge: ledger.charge(Item::Watches, 0).map_err(Error::from)?,
        };
        let mut seen = 0;
        let mut stopped = None;
        let mut count = |_| {
            seen += 1;
            match interrupt.check() {
                Ok(()) => Ok(()),
                Err(why) => {
                    stopped = Some(why);
                    Err(Disconnected)
                }
            }
        };
        let mut settle = || {
            watcher.read_tree(files, true, &mut count)?;
            // What came meanwhile is part of the beginning.
            for _ in 0..MAX_SETTLED / STEP_EVENTS {
                if watcher.step(files, &mut count)? != Next::Now {
                    break;
                }
            }
            Ok(())
        };
        let settled: Outcome = settle();
        match (settled, stopped) {
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
            (Err(Ended::Deleted | Ended::Disconnected), None) => Err(failed(Errno::ENOENT).into()),
        }
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
            let is_drained = self.backlog.len() >= MAX_BACKLOG || !self.read_events()?;
            let Some(event) = self.backlog.front() else {
                // Events of names that were found have come by now.
                self.found = HashSet::new();
                self.found_bytes = 0;
                if self.look_for_missed(files, tell)? {
                    continue;
                }
                if !self.missed.is_empty() {
                    return Ok(Next::At(Instant::now() + MOVE_LIMIT));
                }
                return Ok(self.modified_at.map_or(Next::Event, Next::At));
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
        match self.inotify.read_events() {
            Ok(events) => {
                self.backlog.extend(events);
                Ok(true)
            }
            Err(Errno::EAGAIN) => Ok(false),
            Err(Errno::EINTR) => Ok(true),
            Err(errno) => Err(Ended::Failed(errno)),
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
            return self.recover(files, tell);
        }
        let is_root = event.wd == self.nodes.root();
        let Some(name) = event.name else {
            let ends = AddWatchFlags::IN_DELETE_SELF
                | AddWatchFlags::IN_UNMOUNT
                | AddWatchFlags::IN_IGNORED;
            if is_root && mask.intersects(ends) {
                return Err(Ended::Deleted);
            }
            if is_root && mask.contains(AddWatchFlags::IN_MOVE_SELF) {
                return self.open_root(files).map(drop);
            }
            if mask.intersects(AddWatchFlags::IN_UNMOUNT | AddWatchFlags::IN_IGNORED) {
                self.forget(event.wd);
            }
            return Ok(());
        };
        let name = std::os::unix::ffi::OsStringExt::into_vec(name);
        let is_directory = mask.contains(AddWatchFlags::IN_ISDIR);
        let place = (event.wd, name);
        if mask.contains(AddWatchFlags::IN_MOVED_FROM) {
            // Its place is one before what it was, because the first event is taken.
            let second = partner.and_then(|index| self.backlog.remove(index - 1));
            return match second {
                Some(InotifyEvent {
                    wd,
                    name: Some(name),
                    ..
                }) => {
                    let to = (wd, std::os::unix::ffi::OsStringExt::into_vec(name));
                    self.moved(files, &place, &to, is_directory, tell)
                }
                _ => self.deleted(&place, is_directory, tell),
            };
        }
        if mask.intersects(AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO) {
            self.last_move = None;
            return self.created(files, &place, is_directory, tell);
        }
        if mask.contains(AddWatchFlags::IN_DELETE) {
            self.last_move = None;
            return self.deleted(&place, is_directory, tell);
        }
        if mask.contains(AddWatchFlags::IN_MODIFY) {
            if self.told_path(&place, false).is_some() {
                let due = Instant::now() + MODIFIED_AFTER;
                self.modified.entry(place).or_insert(due);
                self.modified_at.get_or_insert(due);
            }
            return Ok(());
        }
        if mask.contains(AddWatchFlags::IN_CLOSE_WRITE) {
            if self.modified.remove(&place).is_some() {
                self.tell_of(files, &place, Change::Modified, tell)?;
            }
            return Ok(());
        }
        if mask.contains(AddWatchFlags::IN_ATTRIB) {
            let path = self.told_path(&place, is_directory);
            self.tell_of(files, &place, Change::Attributes, tell)?;
            // Perhaps it may be read now.
            if is_directory && self.nodes.child(place.0, &place.1).is_none() && path.is_some() {
                self.add_below(files, &place, tell)?;
            }
        }
        Ok(())
    }

    /// The path of a place, unless it is unknown or excluded.
    fn told_path(&self, (directory, name): &Place, is_directory: bool) -> Option<Vec<u8>> {
        let path = join(self.nodes.path(*directory)?, name);
        (!self.settings.exclude.covers(&path, is_directory)).then_some(path)
    }

    /// Tells a change of what is at a place now.
    fn tell_of(
        &mut self,
        files: &Files<'_>,
        place: &Place,
        change: Change,
        tell: Tell<'_>,
    ) -> Outcome {
        let kind = self.kind_at(files, place);
        if let Some(path) = self.told_path(place, kind == FileKind::Directory) {
            tell(TreeEvent { change, path, kind })?;
        }
        Ok(())
    }

    /// The type of what is at a place now; that of a file if nothing is.
    fn kind_at(&self, files: &Files<'_>, place: &Place) -> FileKind {
        self.status_at(files, place).unwrap_or(FileKind::Regular)
    }

    fn status_at(&self, files: &Files<'_>, (directory, name): &Place) -> Option<FileKind> {
        let status = self
            .open_directory(files, *directory)
            .and_then(|directory| fstatat(&directory, &name[..], AtFlags::AT_SYMLINK_NOFOLLOW));
        status.ok().map(|status| FileKind::of(&status))
    }

    fn tell_modified(&mut self, files: &Files<'_>, tell: Tell<'_>) -> Outcome {
        let now = Instant::now();
        if self.modified_at.is_none_or(|at| now < at) {
            return Ok(());
        }
        let due = |(place, at): (&Place, &Instant)| (*at <= now).then(|| place.clone());
        let due: Vec<Place> = self.modified.iter().filter_map(due).collect();
        for place in due {
            self.modified.remove(&place);
            self.tell_of(files, &place, Change::Modified, tell)?;
        }
        self.modified_at = self.modified.values().min().copied();
        Ok(())
    }

    fn created(
        &mut self,
        files: &Files<'_>,
        place: &Place,
        is_directory: bool,
        tell: Tell<'_>,
    ) -> Outcome {
        let was_told = self.found.remove(place);
        let Some(path) = self.told_path(place, is_directory) else {
            return Ok(());
        };
        if !was_told {
            let kind = if is_directory {
                FileKind::Directory
            } else {
                self.kind_at(files, place)
            };
            let change = Change::Created;
            tell(TreeEvent { change, path, kind })?;
        }
        if is_directory && !(was_told && self.nodes.child(place.0, &place.1).is_some()) {
            self.add_below(files, place, tell)?;
        }
        Ok(())
    }

    fn deleted(&mut self, place: &Place, is_directory: bool, tell: Tell<'_>) -> Outcome {
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
            let change = Change::Deleted;
            tell(TreeEvent { change, path, kind })?;
        }
        Ok(())
    }

    fn moved(
        &mut self,
        files: &Files<'_>,
        from: &Place,
        to: &Place,
        is_directory: bool,
        tell: Tell<'_>,
    ) -> Outcome {
        // Two names that are exchanged are two moves, of which the first seems to replace what the second moves.
        let is_back = self.last_move.take() == Some((to.clone(), from.clone()));
        self.last_move = Some((from.clone(), to.clone()));
        if self.modified.remove(from).is_some() {
            self.tell_of(files, from, Change::Modified, tell)?;
        }
        let (old, new) = (
            self.told_path(from, is_directory),
            self.told_path(to, is_directory),
        );
        match (old, new) {
            (None, None) => {}
            (Some(_), None) => self.deleted(from, is_directory, tell)?,
            (None, Some(_)) => {
                self.modified.remove(to);
                self.created(files, to, is_directory, tell)?;
            }
            (Some(old), Some(path)) => {
                self.modified.remove(to);
                self.found.remove(from);
                self.missed.remove(from);
                self.found.remove(to);
                let kind = if is_directory {
                    FileKind::Directory
                } else {
                    self.kind_at(files, to)
                };
                let change = Change::Moved(old);
                tell(TreeEvent { change, path, kind })?;
                self.move_node(files, from, to, is_directory, tell)?;
            }
        }
        let is_there = is_back && self.status_at(files, from).is_some();
        if is_there {
            self.tell_anew(files, from, tell)?;
        }
        if is_there || is_back && is_directory {
            self.tell_anew(files, to, tell)?;
        }
        Ok(())
    }

    /// Tells what is at a place now as if it were new, with all that is in it.
    fn tell_anew(&mut self, files: &Files<'_>, place: &Place, tell: Tell<'_>) -> Outcome {
        let found = self.status_at(files, place);
        let is_directory = found == Some(FileKind::Directory);
        self.found.clear();
        self.deleted(place, is_directory, tell)?;
        if found.is_some() {
            self.created(files, place, is_directory, tell)?;
        }
        Ok(())
    }

    /// Gives the node of a directory that was moved its new place, and makes sure that it is the directory which
    /// is there.
    fn move_node(
        &mut self,
        files: &Files<'_>,
        from: &Place,
        to: &Place,
        is_directory: bool,
        tell: Tell<'_>,
    ) -> Outcome {
        let known = self.nodes.child(from.0, &from.1);
        if !is_directory || !self.settings.recursive {
            return Ok(());
        }
        let Some(key) = known else {
            // What was told of it under its new name was for what seems to be replaced.
            self.found.clear();
            return self.add_below(files, to, tell);
        };
        let opened = self
            .open_directory(files, to.0)
            .and_then(|parent| files.open_name(&parent, &to.1, DIRECTORY));
        match opened.map(|directory| add_watch(&self.inotify, &directory, EVENTS)) {
            // Another directory has the name already.
            Ok(Ok(other)) if other != key => {
                if !self.nodes.has(other) {
                    let _ = self.inotify.rm_watch(other);
                }
                self.forget(key);
                self.tell_anew(files, to, tell)
            }
            Ok(Err(Errno::ENOSPC)) => Err(Ended::NoWatches),
            // It was moved again, which will be told.
            _ => self.place(key, to),
        }
    }

    /// Puts a node at a place.
    fn place(&mut self, key: WatchDescriptor, (parent, name): &Place) -> Outcome {
        match self.nodes.put(key, *parent, name) {
            Some(removed) => self.give_up(&removed),
            // The tree is not what the events said.
            None => self.forget(key),
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
        self.share.give_back(removed.len());
    }

    /// Watches a directory that is new at a place, and tells what is in it.
    fn add_below(&mut self, files: &Files<'_>, place: &Place, tell: Tell<'_>) -> Outcome {
        if !self.settings.recursive {
            return Ok(());
        }
        let opened = self
            .open_directory(files, place.0)
            .and_then(|parent| files.open_name(&parent, &place.1, DIRECTORY));
        let Ok(directory) = opened else {
            // If the whole tree is gone, no event says so.
            self.open_root(files)?;
            self.missed.entry(place.clone()).or_default();
            return Ok(());
        };
        self.missed.remove(place);
        if let Added::Watched(key) = self.add(&directory, place)? {
            self.read_below(files, &directory, key, false, tell)?;
        }
        Ok(())
    }

    /// Tries again to watch the directories that were not at their places. True if something was found.
    fn look_for_missed(&mut self, files: &Files<'_>, tell: Tell<'_>) -> Outcome<bool> {
        let mut has_found = false;
        for place in self.missed.keys().cloned().collect::<Vec<_>>() {
            self.add_below(files, &place, tell)?;
            let Some(tries) = self.missed.get_mut(&place) else {
                has_found = true;
                continue;
            };
            *tries += 1;
            if *tries == MISSED_TRIES {
                self.missed.remove(&place);
            }
        }
        Ok(has_found)
    }

    /// Watches a directory at a place.
    fn add(&mut self, directory: &OwnedFd, place: &Place) -> Outcome<Added> {
        let key = match add_watch(&self.inotify, directory, EVENTS) {
            Ok(key) => key,
            Err(Errno::ENOSPC) => return Err(Ended::NoWatches),
            Err(Errno::ENOMEM) => return Err(Ended::OverLimit),
            Err(Errno::EACCES) => return Ok(Added::Unreadable),
            Err(_) => return Ok(Added::Gone),
        };
        if !self.nodes.has(key) && !self.share.take() {
            let _ = self.inotify.rm_watch(key);
            return Err(Ended::NoWatches);
        }
        match self.nodes.put(key, place.0, &place.1) {
            Some(removed) => self.give_up(&removed),
            None if self.nodes.has(key) => self.forget(key),
            None => {
                let _ = self.inotify.rm_watch(key);
                self.share.give_back(1);
            }
        }
        self.charge_for_nodes()?;
        Ok(if self.nodes.has(key) {
            Added::Watched(key)
        } else {
            Added::Gone
        })
    }

    /// Watches all directories below the first one.
    fn read_tree(&mut self, files: &Files<'_>, is_strict: bool, tell: Tell<'_>) -> Outcome {
        if !self.settings.recursive {
            return Ok(());
        }
        let directory = self.open_root(files)?;
        self.read_below(files, &directory, self.nodes.root(), is_strict, tell)
    }

    /// Watches the directories below one that is watched, and tells everything in it. A strict reading fails if a
    /// directory may not be read.
    fn read_below(
        &mut self,
        files: &Files<'_>,
        directory: &OwnedFd,
        key: WatchDescriptor,
        is_strict: bool,
        tell: Tell<'_>,
    ) -> Outcome {
        let readable = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let opened = files.open_name(directory, b".", readable);
        let Ok(opened) = opened else {
            return Ok(());
        };
        let ledger = Arc::clone(&self.ledger);
        let Ok(mut walk) = files.walk_in(opened, Filter::default(), None, &ledger)? else {
            return Ok(());
        };
        // The directories from the first to the current one.
        let mut way = vec![key];
        while let Some(visit) = walk.next()? {
            let found = match visit {
                Visit::Entry(found) => found,
                Visit::Unreadable(_, Errno::EACCES) if is_strict => {
                    return Err(Ended::Failed(Errno::EACCES));
                }
                Visit::Unreadable(..) => continue,
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
            if !self.found.contains(&place) {
                let change = Change::Created;
                tell(TreeEvent { change, path, kind })?;
                self.found_bytes += place.1.len() + NAME_BYTES;
                self.found.insert(place.clone());
                self.charge_for_nodes()?;
            }
            let Some(opened) = opened else { continue };
            let added = match opened {
                Ok(directory) => self.add(&directory, &place)?,
                Err(_) => Added::Gone,
            };
            match added {
                Added::Watched(key) => way.push(key),
                Added::Unreadable if is_strict => return Err(Ended::Failed(Errno::EACCES)),
                Added::Unreadable | Added::Gone => walk.skip_contents(),
            }
        }
        Ok(())
    }

    /// Makes the watch complete again after events were lost, and says so.
    fn recover(&mut self, files: &Files<'_>, tell: Tell<'_>) -> Outcome {
        self.backlog.clear();
        self.missed.clear();
        self.modified.clear();
        self.found.clear();
        self.found_bytes = 0;
        let old: Vec<_> = self.nodes.keys().collect();
        self.nodes = Nodes::new(self.nodes.root());
        // What is watched already costs nothing more.
        self.share.give_back(old.len() - 1);
        let read = self.read_tree(files, false, &mut |_| Ok(()));
        for key in old.into_iter().filter(|key| !self.nodes.has(*key)) {
            let _ = self.inotify.rm_watch(key);
        }
        self.found.clear();
        self.found_bytes = 0;
        // Last: whoever reads the tree now sees what no event will say.
        tell(TreeEvent {
            change: Change::Overflow,
            path: Vec::new(),
            kind: FileKind::Directory,
        })?;
        read
    }

    /// Opens the directory that is watched, if it is still at its path.
    fn open_root(&self, files: &Files<'_>) -> Outcome<OwnedFd> {
        let path = self.settings.path.bytes();
        let root = files.resolve(path, DIRECTORY).map_err(|_| Ended::Deleted)?;
        match Identity::of_open(&root) {
            Ok(identity) if identity == self.identity => Ok(root),
            _ => Err(Ended::Deleted),
        }
    }

    /// Opens a directory that is watched, name by name.
    fn open_directory(&self, files: &Files<'_>, key: WatchDescriptor) -> nix::Result<OwnedFd> {
        let path = self.nodes.path(key).ok_or(Errno::ENOENT)?;
        let mut directory = self.open_root(files).map_err(|_| Errno::ENOENT)?;
        for name in path.split(|byte| *byte == b'/') {
            if !name.is_empty() {
                directory = files.open_name(&directory, name, DIRECTORY)?;
            }
        }
        Ok(directory)
    }
}

/// What came of a directory that was to be watched.
enum Added {
    Watched(WatchDescriptor),
    /// Its owner may not read it.
    Unreadable,
    Gone,
}

/// When to go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Now,
    At(Instant),
    Event,
}

/// Adds a watch for a directory that is open by `O_PATH`.
fn add_watch(
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
