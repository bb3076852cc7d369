//! One watch of a tree: reads the kernel's events, keeps its directories watched, and tells what changed.
//!
//! The events of a directory that is watched are a log of its names, and a watch belongs to a directory and not to
//! its path. A directory that is new is looked at later than its events say, so what is found in it may be newer
//! than events that are still to come. It stays right because names that change are reported again: each event that
//! touches a place makes the watch forget what it found there, and look anew. Only a directory that was found before
//! all events were settled once ([`Notes::epoch`](super::nodes::Notes)) is reported as moved, with what is in it.
//!
//! Here is the order of things: when events are read, which one is settled, when to go on. What an event means is in
//! `settle`, how directories are reached and watched in `reading`.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};

mod reading;
mod settle;

pub(super) use reading::add_watch;
use reading::count_directories;

use super::event::{Ended, EventSink, Outcome, Settings, TreeEvent};
use super::limits::WatchShare;
use super::nodes::Nodes;
use crate::client::{Interrupt, Stopped};
use crate::error::{Detail, Error, Kind};
use crate::files::entry::{DIRECTORY, Identity};
use crate::files::root::Files;
use crate::limits::ledger::{Charge, Item, Ledger};

/// How long the second half of a move may take. The kernel adds both at once, so this is for a renaming thread that
/// is interrupted between them.
const MOVE_LIMIT: Duration = Duration::from_millis(25);

/// Most events that are read before the first of them is settled.
const MAX_BACKLOG: usize = 1024;

/// Events that one step settles.
const STEP_EVENTS: usize = 1024;

/// How long it may take to settle what happened while the tree was read for the first time, which is not reported.
const SETTLE_LIMIT: Duration = Duration::from_secs(2);

/// Bytes that are charged at a time.
const CHARGED_BYTES: usize = 32 * 1024;

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

/// A name in a directory that is watched.
type NameIn = (WatchDescriptor, Vec<u8>);

/// A tree that is watched. Use it while the thread acts as the owner of the files.
pub struct Watcher {
    settings: Settings,
    /// Of the directory that is watched.
    identity: Identity,
    pub(super) inotify: Inotify,
    pub(super) nodes: Nodes<WatchDescriptor>,
    /// Directories that stay open until the step ends, the one that was used last at the end.
    open: Vec<(WatchDescriptor, Arc<OwnedFd>)>,
    /// Events that were read and not settled.
    backlog: VecDeque<InotifyEvent>,
    /// Until when the first of them, the first half of a move, waits for the second.
    waits_until: Option<Instant>,
    /// Files that were written to, and when that is reported.
    modified: HashMap<NameIn, Instant>,
    /// When the first of them may be due.
    modified_at: Option<Instant>,
    /// Names that were told because they were found; their own events may still come.
    found: HashSet<NameIn>,
    found_bytes: usize,
    /// New names whose directories could not be reached: one above was renamed, which will be reported.
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
    _of_settings: Charge,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.share.directories.give_back(self.nodes.len());
        self.share.trees.give_back(1);
    }
}

impl Watcher {
    /// Watches a tree: what changes from now on is reported.
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
        let root = files.resolve(&path, DIRECTORY).map_err(failed)?;
        let identity = Identity::of_open(&root).map_err(failed)?;
        let charge = |bytes| ledger.charge(Item::Watches, bytes).map_err(Error::from);
        let (charge, of_settings) = (charge(0)?, charge(settings.size())?);
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
            open: Vec::new(),
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
            _of_settings: of_settings,
        };
        let mut beginning = Beginning {
            interrupt,
            stopped: None,
        };
        let begun = watcher.begin(files, SETTLE_LIMIT, &mut beginning);
        match (begun, beginning.stopped) {
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
        sink: &mut dyn EventSink,
    ) -> Outcome {
        self.read_tree(files, sink)?;
        let until = Instant::now() + settle_limit;
        let is_late = || Instant::now() >= until;
        let mut is_settled = false;
        while !is_settled && !is_late() {
            // One event may mean that a large part of the tree is read again.
            match self.step(files, &mut InTime { sink, until }) {
                Ok(Next::Now) => {}
                Ok(Next::At(_)) if !self.missed.is_empty() || !self.backlog.is_empty() => {
                    std::thread::sleep(MOVE_LIMIT);
                }
                Ok(_) => is_settled = true,
                Err(Ended::Disconnected) if is_late() => sink.check()?,
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
    pub fn advance(
        &mut self,
        files: &Files<'_>,
        sink: &mut dyn EventSink,
    ) -> Outcome<Option<Instant>> {
        Ok(match self.step(files, sink)? {
            Next::Now => Some(Instant::now()),
            Next::At(when) => Some(when),
            Next::Event => None,
        })
    }

    fn step(&mut self, files: &Files<'_>, sink: &mut dyn EventSink) -> Outcome<Next> {
        let next = self.settle_some(files, sink);
        // The kernel says that a directory was removed only when nobody has it open.
        self.open = Vec::new();
        self.nodes.forget_path();
        next
    }

    fn settle_some(&mut self, files: &Files<'_>, sink: &mut dyn EventSink) -> Outcome<Next> {
        for _ in 0..STEP_EVENTS {
            sink.check()?;
            self.tell_modified(files, sink)?;
            if std::mem::take(&mut self.is_incomplete) {
                self.recover(files, sink)?;
            }
            let is_drained = self.backlog.len() >= MAX_BACKLOG || !self.read_events()?;
            let Some(event) = self.backlog.front() else {
                self.confirm();
                if self.missed.is_empty() {
                    return Ok(self.modified_at.map_or(Next::Event, Next::At));
                }
                self.look_for_missed(files, sink)?;
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
            self.settle(files, sink)?;
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
}

/// Takes what is found while a watch begins, until it is interrupted.
struct Beginning<'a> {
    interrupt: &'a mut dyn Interrupt,
    stopped: Option<Stopped>,
}

impl EventSink for Beginning<'_> {
    fn event(&mut self, _: TreeEvent) -> Outcome {
        Ok(())
    }

    fn check(&mut self) -> Outcome {
        self.interrupt.check().map_err(|stopped| {
            self.stopped = Some(stopped);
            Ended::Disconnected
        })
    }
}

/// Takes no event, and no longer than until then.
struct InTime<'a> {
    sink: &'a mut dyn EventSink,
    until: Instant,
}

impl EventSink for InTime<'_> {
    fn event(&mut self, _: TreeEvent) -> Outcome {
        Ok(())
    }

    fn check(&mut self) -> Outcome {
        self.sink.check()?;
        if Instant::now() >= self.until {
            return Err(Ended::Disconnected);
        }
        Ok(())
    }
}

/// When to go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Now,
    At(Instant),
    Event,
}
