//! Walks through a directory tree in the order of names, with each directory before its contents.
//!
//! A tree may be thousands of levels deep, have millions of names in one directory, and change
//! during the walk. So there is no recursion, and the numbers of open directories and of names in memory are
//! bounded. Names that were dropped from memory are read again, from the name after the last one that was returned.
//! Each name is opened relative to its open directory, so no step follows a link or leaves
//! the tree, whatever is renamed meanwhile.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{FileStat, Mode, fstat};

use super::ignores::Ignores;
use super::matcher::Matcher;
use crate::codec::sort::sort;
use crate::error::Result;
use crate::files::describe::Description;
use crate::files::entry::{Entry, FileKind, Identity};
use crate::files::list::kind_of;
use crate::files::name::FilePath;
use crate::files::root::Root;
use crate::limits::ledger::{Charge, Item, Ledger};
use crate::sys::paths::{fstatat, openat};

/// Longest path of a directory that is entered. Programs do with 4096 bytes (`PATH_MAX`); what holds a path, often more than
/// once, would take megabytes in a tree that is made to be deep.
const MAX_PATH_BYTES: usize = 64 * 1024;

/// Levels whose directories stay open besides the last one, in walks and in copies. The parents of deeper ones are
/// opened again by `..`. Few, because a tenant chooses how deep a tree is, and may have a walk on each of its
/// connections.
pub(in crate::files) const HELD_LEVELS: usize = 3;

/// Names that one pass over a directory keeps. Few in unit tests, so that these see many batches.
const BATCH_NAMES: usize = if cfg!(test) { 16 } else { 16 * 1024 };

/// Most names in memory, of all levels together. Beyond that, the names of all levels but the last are dropped.
const MAX_PENDING_NAMES: usize = 4 * BATCH_NAMES;

/// Names that are read before the walk ends with its tenant.
const NAMES_BETWEEN_LOOKS: usize = 4096;

/// Memory of a name besides its bytes.
const NAME_BYTES: usize = size_of::<(Vec<u8>, Option<FileKind>)>() + 16;

/// Memory is charged in steps of this many bytes.
const CHARGED_BYTES: usize = 32 * 1024;

/// The work of a name, in steps of a pattern by a byte, and how much of it there is before others come first: about a millisecond.
const NAME_WORK: usize = 1000;
const MOST_WORK: usize = 300_000;

/// Most work of comparing a name with all patterns, which nothing interrupts: half a second. The path of an entry has no limit; one
/// for which it would be more is reported as unreadable.
const MOST_COMPARISON: usize = 1 << 28;

/// The flags that open a directory to read it.
const READ_DIRECTORY: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

/// What a walk leaves out.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Whether names that begin with a dot, such as `.git`, are left out.
    pub skips_hidden: bool,
    /// The names of the ignore files that are obeyed; later ones override earlier ones.
    pub ignore_files: &'static [&'static str],
    /// Entries that match are left out, with everything in them.
    pub exclude: Matcher,
    /// If it has patterns, only entries that match are [included](Found::is_included), with everything in them.
    pub include: Matcher,
    /// Most names of one directory that are looked at: a walk that finds more reads no further, and [has overflowed](Walk::has_overflowed).
    pub most_names: Option<usize>,
}

impl Filter {
    /// The filter of a search that does not ask for everything: leaves out hidden names, and what `.gitignore` and
    /// `.ignore` exclude.
    pub fn of_search() -> Self {
        Self {
            skips_hidden: true,
            ignore_files: &[".gitignore", ".ignore"],
            ..Self::default()
        }
    }

    /// Approximate memory of its patterns, in bytes.
    fn size(&self) -> usize {
        self.exclude.size() + self.include.size()
    }
}

/// A walk in progress.
pub struct Walk<'files> {
    root: &'files Root,
    filter: Filter,
    ignores: Ignores,
    /// The directories from the first one to the current one.
    levels: Vec<WalkLevel>,
    /// The path of the last entry, relative to the first directory.
    path: Vec<u8>,
    /// `Some` if the last entry is a directory to enter next; whether that is included.
    entering: Option<bool>,
    /// The directory to enter, if it is open.
    opened: Option<OwnedFd>,
    /// The remaining components of the path to continue after.
    resume: Option<VecDeque<Vec<u8>>>,
    /// The number of names in memory, and the bytes of these and of the patterns.
    pending: usize,
    bytes: usize,
    charge: Charge,
    /// What was done since others came first, and whether it is time for that.
    work: usize,
    is_due: bool,
    has_overflowed: bool,
    /// How many states of the filter, and of what else is compared, a name goes through for each byte of its path.
    states: usize,
    /// The errno and the path of what could not be read and is still to be reported.
    lost: Option<Errno>,
    lost_path: Vec<u8>,
    /// Fails the next reading of a directory.
    #[cfg(test)]
    pub(super) failing: Option<Errno>,
}

/// A directory on the current path.
struct WalkLevel {
    /// Open in the first [`HELD_LEVELS`] levels and in the last one.
    directory: Option<Dir>,
    /// By this a directory that was closed is recognized again; `None` if it stays open.
    identity: Option<Identity>,
    /// Its next names in reverse order.
    names: Vec<(Vec<u8>, Option<FileKind>)>,
    /// Whether it may have more names than `names`.
    is_partly_read: bool,
    /// The length of its path, including the slash after it.
    base: usize,
    is_included: bool,
}

/// One step of a walk.
pub enum Visit<'walk> {
    /// A file, link or directory. The contents of a directory follow, unless they are
    /// [skipped](Walk::skip_contents).
    Entry(Found<'walk>),
    /// Names were passed that are left out, which may have taken long: others come first.
    Passed,
    /// The entry at this path, or the rest of its contents, cannot be read, or is on another mount (`EXDEV`). The
    /// first directory is `.`. Entries that are only [gone](is_gone) are not reported.
    Unreadable(&'walk [u8], Errno),
}

/// Whether an error means that the name was removed, or is now that of another file.
pub fn is_gone(errno: Errno) -> bool {
    let gone = [Errno::ENOENT, Errno::ESTALE, Errno::ENOTDIR, Errno::ELOOP];
    gone.contains(&errno)
}

/// A name that a walk found, in a directory that is open.
#[derive(Clone, Copy)]
pub struct Found<'walk> {
    root: &'walk Root,
    /// The directory that has the name. Callers must open names in it without following links.
    pub directory: &'walk Dir,
    /// The path relative to the first directory.
    pub path: &'walk [u8],
    /// The last component of the path.
    pub name: &'walk [u8],
    /// The type of the file; a link is not followed.
    pub kind: FileKind,
    /// Whether the filter includes it. Directories that are not included are reported too, because entries in them
    /// may be included.
    pub is_included: bool,
}

impl Found<'_> {
    /// The attributes; a link is not followed.
    ///
    /// # Errors
    /// `ENOENT` if it was removed meanwhile; `EACCES` if the directory may be read but not searched.
    pub fn status(&self) -> nix::Result<FileStat> {
        fstatat(self.directory, self.name, AtFlags::AT_SYMLINK_NOFOLLOW)
    }

    /// The entry as a listing shows it; `None` if it was removed meanwhile.
    pub fn entry(&self) -> Option<Entry> {
        let by_target = self.root.sizes_links_by_target;
        match Entry::read(self.directory, self.name, by_target) {
            Ok(entry) => Some(entry),
            Err(Errno::ENOENT) => None,
            Err(_) => Some(Entry::unknown(self.name.to_vec(), self.kind)),
        }
    }

    /// The full description, with the extended attributes whose names begin with `prefix`; `None` if it was removed
    /// meanwhile.
    pub fn describe(&self, prefix: &str) -> Option<Description> {
        let (directory, entry) = (self.directory.as_fd(), self.entry()?);
        Some(self.root.describe_in(directory, self.name, entry, prefix))
    }

    /// Opens it without blocking.
    ///
    /// # Errors
    /// As openat2(2); `ELOOP` for a link; in a sandbox `EXDEV` for a file on another mount.
    pub fn open(&self, flags: OFlag) -> nix::Result<std::fs::File> {
        let careful = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        self.root
            .open_name(self.directory, self.name, flags | careful)
            .map(std::fs::File::from)
    }
}

impl Root {
    /// Begins a walk in the directory `path`, after the entry at the relative path `after`. The walk's memory
    /// is charged to the ledger.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory` or `Forbidden` if the directory cannot be opened; `OverLimit` if the tenant has no
    /// memory left.
    pub fn walk(
        &self,
        path: &FilePath,
        filter: Filter,
        after: Option<&[u8]>,
        ledger: &Arc<Ledger>,
    ) -> Result<Walk<'_>> {
        let failed = |errno| self.error(format_args!("cannot read {path}"), errno);
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let directory = self.resolve(path, flags).map_err(failed)?;
        self.walk_in(directory, filter, after, ledger)?
            .map_err(failed)
    }

    /// Begins a walk in a directory that was opened beneath this root for reading.
    ///
    /// # Errors
    /// `OverLimit` if the tenant has no memory left; the inner errno if the directory cannot be read.
    pub(in crate::files) fn walk_in(
        &self,
        directory: OwnedFd,
        filter: Filter,
        after: Option<&[u8]>,
        ledger: &Arc<Ledger>,
    ) -> Result<nix::Result<Walk<'_>>> {
        let components = |path: &[u8]| {
            let components = path.split(|byte| *byte == b'/');
            components
                .filter(|name| !name.is_empty())
                .map(<[u8]>::to_vec)
                .collect()
        };
        let patterns = filter.size();
        let states = filter.exclude.states() + filter.include.states();
        let mut walk = Walk {
            root: self,
            filter,
            ignores: Ignores::new(ledger.charge(Item::Responses, 0)?),
            levels: Vec::new(),
            path: Vec::new(),
            entering: None,
            opened: None,
            resume: after.map(components),
            pending: 0,
            bytes: patterns,
            charge: ledger.charge(Item::Responses, patterns)?,
            work: 0,
            is_due: false,
            has_overflowed: false,
            states,
            lost: None,
            lost_path: Vec::new(),
            #[cfg(test)]
            failing: None,
        };
        if !walk.filter.ignore_files.is_empty() {
            let names = walk.filter.ignore_files;
            walk.ignores.enter_above(self, &directory, names)?;
        }
        let is_included = walk.filter.include.is_empty();
        let directory = match Dir::from_fd(directory) {
            Ok(directory) => directory,
            Err(errno) => return Ok(Err(errno)),
        };
        Ok(walk.push(directory, None, is_included)?.map(|()| walk))
    }

    /// Opens a name in a directory that was opened beneath this root, without following a link.
    pub(in crate::files) fn open_name(
        &self,
        directory: impl AsFd,
        name: &[u8],
        flags: OFlag,
    ) -> nix::Result<OwnedFd> {
        self.resolve_in(directory, name, flags | OFlag::O_NOFOLLOW)
    }
}

impl Walk<'_> {
    /// The next entry; `None` at the end.
    ///
    /// # Errors
    /// `OverLimit` if the tenant has no memory left.
    pub fn next(&mut self) -> Result<Option<Visit<'_>>> {
        if let Some(is_included) = self.entering.take()
            && let Err(errno) = self.enter(is_included)?
        {
            self.lose(self.path.len(), errno);
        }
        self.advance()
    }

    /// Counts what the caller compares each path with.
    pub fn also_compares(&mut self, with: &Matcher) {
        self.states += with.states();
    }

    /// Skips the contents of the directory that was returned last.
    pub fn skip_contents(&mut self) {
        self.entering = None;
        self.opened = None;
    }

    /// Continues with the contents of this directory, which was opened by the entry that was returned last. Without
    /// this, the walk enters what has that name when it goes on.
    pub(in crate::files) fn enter_opened(&mut self, directory: OwnedFd) {
        self.opened = Some(directory);
    }

    fn advance(&mut self) -> Result<Option<Visit<'_>>> {
        let (kind, is_included) = loop {
            if std::mem::take(&mut self.is_due) {
                return Ok(Some(Visit::Passed));
            }
            if let Some(errno) = self.lost.take() {
                return Ok(Some(Visit::Unreadable(&self.lost_path, errno)));
            }
            let Some(level) = self.levels.last_mut() else {
                return Ok(None);
            };
            let Some((name, kind)) = level.names.pop() else {
                if level.is_partly_read {
                    self.is_due = true;
                    self.refill()?;
                } else {
                    self.leave();
                }
                continue;
            };
            self.pending -= 1;
            self.bytes -= name.len() + NAME_BYTES;
            self.path.truncate(level.base);
            self.path.extend_from_slice(&name);
            let kind = match (kind, &level.directory) {
                (_, None) => Err(Errno::EBADF),
                (Some(kind), _) => Ok(kind),
                (None, Some(directory)) => {
                    let nofollow = AtFlags::AT_SYMLINK_NOFOLLOW;
                    let status = fstatat(directory, name.as_slice(), nofollow);
                    status.map(|status| FileKind::of(&status))
                }
            };
            let is_directory = kind == Ok(FileKind::Directory);
            let length = self.path.len();
            let comparison = self.ignores.work_of(length) + self.states * length;
            self.work += NAME_WORK + comparison;
            if self.work >= MOST_WORK {
                self.work = 0;
                self.is_due = true;
            }
            if comparison > MOST_COMPARISON {
                self.lose(length, Errno::ENAMETOOLONG);
                continue;
            }
            if self.filter.skips_hidden && name.starts_with(b".")
                || self.ignores.exclude(&self.path, is_directory)
                || self.filter.exclude.decide(&self.path, is_directory)
                    == Some(super::Verdict::Matched)
            {
                continue;
            }
            let kind = match kind {
                Ok(kind) => kind,
                Err(errno) => {
                    self.lose(self.path.len(), errno);
                    continue;
                }
            };
            let is_included = level.is_included
                || self.filter.include.decide(&self.path, is_directory)
                    == Some(super::Verdict::Matched);
            if self.is_before_resumed(&name) {
                if !is_directory {
                    self.resume = None;
                } else if let Err(errno) = self.enter(is_included)? {
                    self.resume = None;
                    self.lose(self.path.len(), errno);
                }
                continue;
            }
            if is_directory {
                self.entering = Some(is_included);
            } else if !is_included {
                continue;
            }
            break (kind, is_included);
        };
        let found = self.levels.last().and_then(|level| {
            Some(Found {
                root: self.root,
                directory: level.directory.as_ref()?,
                path: &self.path,
                name: &self.path[level.base..],
                kind,
                is_included,
            })
        });
        Ok(found.map(Visit::Entry))
    }

    /// Whether the name is on the path to continue after, so that it was returned by an earlier walk.
    fn is_before_resumed(&mut self, name: &[u8]) -> bool {
        let Some(resume) = &mut self.resume else {
            return false;
        };
        let is_on_path = resume.front().is_some_and(|first| first == name);
        if is_on_path {
            resume.pop_front();
        }
        if !is_on_path || resume.is_empty() {
            self.resume = None;
        }
        is_on_path
    }

    /// Enters the directory at the current path.
    fn enter(&mut self, is_included: bool) -> Result<nix::Result<()>> {
        let opened = self.opened.take();
        if self.path.len() > MAX_PATH_BYTES {
            return Ok(Err(Errno::ENAMETOOLONG));
        }
        let Some(level) = self.levels.last() else {
            return Ok(Ok(()));
        };
        let Some(parent) = &level.directory else {
            return Ok(Err(Errno::ENOENT));
        };
        let name = &self.path[level.base..];
        let opened = match opened {
            Some(directory) => self.root.open_name(directory, b".", READ_DIRECTORY),
            None => self.root.open_name(parent, name, READ_DIRECTORY),
        };
        let directory = match opened.and_then(Dir::from_fd) {
            Ok(directory) => directory,
            Err(errno) => return Ok(Err(errno)),
        };
        let mut identity = None;
        if self.levels.len() >= HELD_LEVELS {
            match Identity::of_open(&directory) {
                Ok(found) => identity = Some(found),
                Err(errno) => return Ok(Err(errno)),
            }
        }
        self.path.push(b'/');
        self.push(directory, identity, is_included)
    }

    /// Adds a level for the directory at the current path, and reads its first names.
    fn push(
        &mut self,
        directory: Dir,
        identity: Option<Identity>,
        is_included: bool,
    ) -> Result<nix::Result<()>> {
        self.levels.push(WalkLevel {
            directory: Some(directory),
            identity,
            names: Vec::new(),
            is_partly_read: true,
            base: self.path.len(),
            is_included,
        });
        if self.pending > MAX_PENDING_NAMES {
            self.drop_names();
        }
        let from = self.resume.as_ref().and_then(|rest| rest.front().cloned());
        let read = self.read(from.as_deref(), true)?;
        match read {
            Ok(ignore_files) => self.read_ignore_files(&ignore_files)?,
            Err(errno) => {
                self.pop();
                return Ok(Err(errno));
            }
        }
        if let [.., above, _] = &mut self.levels[..]
            && above.identity.is_some()
        {
            above.directory = None;
        }
        Ok(Ok(()))
    }

    /// Makes the next step report that the entry at the first `length` bytes of the current path cannot be read, unless
    /// it is gone.
    fn lose(&mut self, length: usize, errno: Errno) {
        if !is_gone(errno) {
            self.lost = Some(errno);
            self.lost_path = match &self.path[..length] {
                b"" => b".".to_vec(),
                path => path.to_vec(),
            };
        }
    }

    fn read_ignore_files(&mut self, found: &[bool]) -> Result<()> {
        let depth = self.levels.len();
        let Some(level) = self.levels.last() else {
            return Ok(());
        };
        let names = self.filter.ignore_files.iter().zip(found);
        for (name, _) in names.filter(|(_, is_found)| **is_found) {
            if let Some(directory) = &level.directory {
                self.ignores.enter(directory, name, depth, level.base)?;
            }
        }
        self.work += self.ignores.take_work();
        Ok(())
    }

    /// Drops the names of all levels but the last. They are read again when the walk comes back to these levels.
    fn drop_names(&mut self) {
        let Some((last, above)) = self.levels.split_last_mut() else {
            return;
        };
        for level in above {
            level.is_partly_read |= !level.names.is_empty();
            level.names = Vec::new();
        }
        self.pending = last.names.len();
        self.bytes = last
            .names
            .iter()
            .map(|(name, _)| name.len() + NAME_BYTES)
            .sum::<usize>()
            + self.filter.size();
    }

    /// Reads the names of the last level that follow the name that was returned last.
    fn refill(&mut self) -> Result<()> {
        let Some(base) = self.levels.last().map(|level| level.base) else {
            return Ok(());
        };
        let last = self.path[base.min(self.path.len())..].to_vec();
        if let Err(errno) = self.read(Some(&last), false)? {
            self.lose(base.saturating_sub(1), errno);
            self.leave();
        }
        Ok(())
    }

    /// Reads the smallest names of the last level: those from `from` on if `inclusive`, else those after it. Returns
    /// which of the ignore files the directory has.
    fn read(&mut self, from: Option<&[u8]>, inclusive: bool) -> Result<nix::Result<Vec<bool>>> {
        #[cfg(test)]
        if let Some(errno) = self.failing.take() {
            return Ok(Err(errno));
        }
        let mut has_ignores = vec![false; self.filter.ignore_files.len()];
        let levels = self.levels.capacity();
        let Some(WalkLevel {
            directory: Some(directory),
            names,
            is_partly_read,
            ..
        }) = self.levels.last_mut()
        else {
            return Ok(Err(Errno::ENOENT));
        };
        *is_partly_read = false;
        let own = self.path.capacity() + levels * size_of::<WalkLevel>();
        let mut failed = None;
        for (passed, found) in directory.iter().enumerate() {
            // A directory may have millions of names, and whoever deletes the sandbox waits.
            if passed % NAMES_BETWEEN_LOOKS == NAMES_BETWEEN_LOOKS - 1 {
                self.charge.ledger().work.check_open()?;
            }
            let found = match found {
                Ok(found) => found,
                Err(errno) => {
                    failed = Some(errno);
                    break;
                }
            };
            let name = found.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            // With the two that are passed.
            if self
                .filter
                .most_names
                .is_some_and(|most| passed >= most + 2)
            {
                self.has_overflowed = true;
                break;
            }
            if name.first() == Some(&b'.') {
                for (wanted, has) in self.filter.ignore_files.iter().zip(&mut has_ignores) {
                    *has |= wanted.as_bytes() == name;
                }
            }
            if from.is_some_and(|from| name < from || !inclusive && name == from) {
                continue;
            }
            names.push((name.to_vec(), kind_of(found.file_type())));
            self.bytes += name.len() + NAME_BYTES;
            if names.len() == 2 * BATCH_NAMES {
                sort(names);
                for (name, _) in names.drain(BATCH_NAMES..) {
                    self.bytes -= name.len() + NAME_BYTES;
                }
                *is_partly_read = true;
            }
            if self.bytes + own > self.charge.bytes() {
                self.charge.set(self.bytes + own + CHARGED_BYTES)?;
            }
        }
        sort(names);
        if *is_partly_read {
            // A name that was dropped may be smaller than one that came later, so only the first batch is complete.
            let beyond = names.drain(BATCH_NAMES.min(names.len())..);
            self.bytes -= beyond
                .map(|(name, _)| name.len() + NAME_BYTES)
                .sum::<usize>();
        }
        names.reverse();
        self.pending += names.len();
        Ok(failed.map_or(Ok(has_ignores), Err))
    }

    /// Whether a directory had more names than the filter lets it have.
    pub fn has_overflowed(&self) -> bool {
        self.has_overflowed
    }

    /// Removes the last level.
    fn pop(&mut self) -> Option<WalkLevel> {
        let left = self.levels.pop()?;
        self.ignores.leave(self.levels.len() + 1);
        self.path.truncate(left.base.saturating_sub(1));
        self.resume = None;
        self.pending -= left.names.len();
        self.bytes -= left
            .names
            .iter()
            .map(|(name, _)| name.len() + NAME_BYTES)
            .sum::<usize>();
        Some(left)
    }

    /// Goes up to the level above. If that cannot be found any more because the tree was changed, goes up further.
    fn leave(&mut self) {
        let Some(left) = self.pop() else { return };
        let Some(level) = self.levels.last_mut() else {
            return;
        };
        if level.directory.is_some() {
            return;
        }
        let up = left.directory.and_then(|directory| {
            let flags = READ_DIRECTORY.difference(OFlag::O_NOFOLLOW);
            let up = openat(&directory, "..", flags, Mode::empty()).ok()?;
            let identity = Identity::of(&fstat(&up).ok()?);
            (Some(identity) == level.identity).then_some(up)
        });
        match up.and_then(|up| Dir::from_fd(up).ok()) {
            Some(directory) => level.directory = Some(directory),
            None => self.find_again(),
        }
    }

    /// Opens the last level again, name by name from the last level that is open. Levels that cannot be opened
    /// any more are given up, which is reported unless they are gone.
    fn find_again(&mut self) {
        let is_open = |level: &WalkLevel| level.directory.is_some();
        let Some(mut at) = self.levels.iter().rposition(is_open) else {
            return;
        };
        while at + 1 < self.levels.len() {
            let (parent, child) = (&self.levels[at], &self.levels[at + 1]);
            let name = &self.path[parent.base..child.base - 1];
            let open = || {
                let parent = parent.directory.as_ref().ok_or(Errno::EBADF)?;
                let directory = self.root.open_name(parent, name, READ_DIRECTORY)?;
                if Some(Identity::of_open(&directory)?) != child.identity {
                    return Err(Errno::ESTALE);
                }
                Dir::from_fd(directory)
            };
            let directory = match open() {
                Ok(directory) => directory,
                Err(errno) => {
                    self.lose(child.base - 1, errno);
                    // The walk continues after the level that is lost.
                    while self.levels.len() > at + 1 {
                        self.pop();
                    }
                    break;
                }
            };
            if at >= HELD_LEVELS {
                self.levels[at].directory = None;
            }
            at += 1;
            self.levels[at].directory = Some(directory);
        }
    }
}
