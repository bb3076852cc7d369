//! Finding files by their names.

use std::cmp::Ordering;

use crate::client::{Interrupt, Stopped};
use crate::codec::sort::sort_by;
use crate::error::{Error, Result};
use crate::files::name::FilePath;
use crate::files::search::{Filter, Found, Matcher, Verdict, Visit};
use crate::files::{Entry, FileKind};
use crate::limits::ledger::{Charge, Item};
use crate::threads::priority::run_in_background;
use crate::workspace::lease::Workspace;

/// Entries that one request finds, unless the client sets a limit.
const GLOB_ENTRIES: u64 = 1000;
const MAX_GLOB_ENTRIES: u64 = 100_000;

/// Memory is charged in steps of this many bytes.
const CHARGED_BYTES: usize = 32 * 1024;

pub struct Glob {
    /// The directory to look in.
    pub path: FilePath,
    /// What to pick: of the patterns that match a path the last one decides. One with `!` takes out, a
    /// directory with all that is in it.
    pub patterns: Matcher,
    /// What kinds to pick.
    pub kinds: Kinds,
    /// Whether to look also at hidden names and at what ignore files exclude.
    pub all: bool,
    /// Most entries.
    pub limit: Option<u64>,
    /// The order of the entries, and where to continue.
    pub order: SortOrder,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Kinds {
    /// All.
    #[default]
    Any,
    /// Neither directories nor links.
    Files,
    Directories,
    Links,
}

impl Kinds {
    fn have(self, kind: FileKind) -> bool {
        match self {
            Self::Any => true,
            Self::Files => !matches!(kind, FileKind::Directory | FileKind::Link),
            Self::Directories => kind == FileKind::Directory,
            Self::Links => kind == FileKind::Link,
        }
    }
}

/// The order of what is found.
pub enum SortOrder {
    /// By name, directories before what is in them, after this path.
    Name(Option<Vec<u8>>),
    /// The newest first, and by path where the times are equal, after this one.
    Modified(Option<SortKey>),
}

/// The place of a file in the order of modification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SortKey {
    /// Nanoseconds since 1970.
    pub modified: i128,
    /// Relative to the directory that is searched.
    pub path: Vec<u8>,
}

impl Ord for SortKey {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_time = other.modified.cmp(&self.modified);
        by_time.then_with(|| self.path.cmp(&other.path))
    }
}

impl PartialOrd for SortKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A file that was found.
pub struct GlobEntry {
    /// Its place in the order; sorted by name, only the path counts.
    pub moment: SortKey,
    /// Its attributes.
    pub entry: Entry,
}

pub struct Globbed {
    /// In the order that was asked for.
    pub entries: Vec<GlobEntry>,
    /// Whether there is more after the last entry.
    pub has_more: bool,
    /// For the entries.
    pub charge: Charge,
}

impl Workspace {
    /// Finds files by patterns. Links are found and not followed. What is in a
    /// directory that cannot be read is left out: the answer is a list of names and has no place to tell it.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, a limit that is not accepted, `OverLimit`, `NoThreads`; or it was interrupted.
    pub fn glob(
        &self,
        glob: &Glob,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Globbed, Stopped> {
        // Stays so only if there is no thread.
        let mut globbed = Err(Stopped::Due);
        run_in_background(&self.background, interrupt, &mut |interrupt| {
            globbed = self.find(glob, interrupt);
        })?;
        globbed
    }

    fn find(
        &self,
        glob: &Glob,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Globbed, Stopped> {
        let limit = glob.limit.unwrap_or(GLOB_ENTRIES);
        if !(1..=MAX_GLOB_ENTRIES).contains(&limit) {
            let text = format!("limit={limit}: not accepted; it takes 1 to {MAX_GLOB_ENTRIES}");
            return Err(Error::invalid(text).into());
        }
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let filter = if glob.all {
            Filter::default()
        } else {
            Filter::of_search()
        };
        let (after, is_by_name) = match &glob.order {
            SortOrder::Name(after) => (after.as_deref(), true),
            SortOrder::Modified(_) => (None, false),
        };
        let patterns = glob.patterns.size();
        let mut kept = Kept {
            entries: Vec::new(),
            bytes: patterns,
            charge: self
                .ledger
                .charge(Item::Responses, patterns)
                .map_err(Error::from)?,
        };
        let picks_all = glob.patterns.only_excepts();
        let files = self.files()?;
        let mut walk = files.walk(&glob.path, filter, after, &self.ledger)?;
        walk.also_compares(&glob.patterns);
        // One more than the limit means that there is a next page.
        while !is_by_name || kept.entries.len() <= limit {
            interrupt.check()?;
            let Some(visit) = walk.next()? else { break };
            let Visit::Entry(found) = visit else { continue };
            let is_directory = found.kind == FileKind::Directory;
            let is_picked = match glob.patterns.decide(found.path, is_directory) {
                Some(Verdict::Matched) => true,
                Some(Verdict::Excepted) => {
                    walk.skip_contents();
                    continue;
                }
                None => picks_all,
            };
            if !is_picked || !glob.kinds.have(found.kind) {
                continue;
            }
            match &glob.order {
                SortOrder::Name(_) => kept.add(&found, 0)?,
                SortOrder::Modified(after) => kept.add_by_time(&found, after.as_ref(), limit)?,
            }
        }
        if !is_by_name {
            kept.cut(limit + 1);
        }
        let mut entries = kept.entries;
        let has_more = entries.len() > limit;
        entries.truncate(limit);
        Ok(Globbed {
            entries,
            has_more,
            charge: kept.charge,
        })
    }
}

/// The entries that are kept: all in the order of the walk, or some of the first in that of times.
struct Kept {
    entries: Vec<GlobEntry>,
    bytes: usize,
    charge: Charge,
}

impl Kept {
    fn add(&mut self, found: &Found<'_>, modified: i128) -> Result<()> {
        let Some(entry) = found.entry() else {
            return Ok(());
        };
        let moment = SortKey {
            modified,
            path: found.path.to_vec(),
        };
        let entry = GlobEntry { moment, entry };
        self.bytes += entry.size();
        if self.bytes > self.charge.bytes() {
            self.charge.set(self.bytes + CHARGED_BYTES)?;
        }
        self.entries.push(entry);
        Ok(())
    }

    /// Keeps the first `limit` entries after a place, and one more.
    fn add_by_time(
        &mut self,
        found: &Found<'_>,
        after: Option<&SortKey>,
        limit: usize,
    ) -> Result<()> {
        let Ok(status) = found.status() else {
            return Ok(());
        };
        let modified =
            i128::from(status.st_mtime) * 1_000_000_000 + i128::from(status.st_mtime_nsec);
        let moment = SortKey {
            modified,
            path: found.path.to_vec(),
        };
        if after.is_some_and(|after| moment <= *after) {
            return Ok(());
        }
        if self.entries.len() > 2 * limit {
            self.cut(limit + 1);
        }
        self.add(found, modified)
    }

    /// Sorts by time, and keeps the first `count`.
    fn cut(&mut self, count: usize) {
        sort_by(&mut self.entries, |one, other| {
            one.moment.cmp(&other.moment)
        });
        let beyond = self.entries.drain(count.min(self.entries.len())..);
        self.bytes -= beyond.map(|entry| entry.size()).sum::<usize>();
    }
}

impl GlobEntry {
    fn size(&self) -> usize {
        let target = self.entry.target.as_ref().map_or(0, Vec::len);
        2 * size_of::<Self>() + self.moment.path.len() + self.entry.name.len() + target + 48
    }
}
