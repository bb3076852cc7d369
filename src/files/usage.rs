//! Disk usage: of the files beneath a root, and of their file system.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use nix::fcntl::OFlag;
use nix::sys::statvfs::fstatvfs;

use super::entry::FileKind;
use super::name::{FilePath, Tree};
use super::root::Files;
use super::search::{Filter, Visit};
use crate::client::{Interrupt, Stopped};
use crate::codec::sort::sort;
use crate::error::{Error, Kind};
use crate::limits::ledger::{Item, Ledger};
use crate::threads::lock::{Mutex, lock};
use crate::threads::places::Places;

/// The space of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disk {
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes in all.
    pub bytes: u64,
}

impl Disk {
    /// The space of the file system that holds `file` (statvfs(3)); `None` if the kernel does not tell.
    pub fn of(file: impl AsFd) -> Option<Self> {
        let status = fstatvfs(file).ok()?;
        let block = status.fragment_size();
        Some(Self {
            used_bytes: (status.blocks() - status.blocks_free()) * block,
            bytes: status.blocks() * block,
        })
    }
}

/// The unit of `st_blocks` (stat(2)).
const BLOCK_BYTES: u64 = 512;

/// Most files that one answer looks at: a sandbox decides how many it has, and a client waits.
const MAX_FILES: usize = 20_000;

/// What a file with several names takes in memory, in a list that doubles.
const LINK_BYTES: usize = 2 * size_of::<(u64, u64)>();

/// The figure of one tenant. Its clients may ask for it all at once: one of them walks at a time, and all who waited for it
/// share what the next one finds.
#[derive(Default)]
pub struct DiskUse {
    walking: Places,
    /// When the last walk began, and what it found.
    found: Mutex<Option<(Instant, Option<u64>)>>,
}

impl DiskUse {
    /// What `walk` finds, or has found for another who asked.
    ///
    /// # Errors
    /// Those of `walk`; or it was interrupted.
    pub fn share(
        &self,
        interrupt: &mut dyn Interrupt,
        walk: impl FnOnce(&mut dyn Interrupt) -> Result<Option<u64>, Stopped>,
    ) -> Result<Option<u64>, Stopped> {
        let asked = Instant::now();
        let _place = self.walking.take(interrupt)?;
        let found = *lock(&self.found);
        if let Some((begun, bytes)) = found
            && begun >= asked
        {
            return Ok(bytes);
        }
        let begun = Instant::now();
        let bytes = walk(interrupt)?;
        *lock(&self.found) = Some((begun, bytes));
        Ok(bytes)
    }
}

impl Files<'_> {
    /// The space of the file system that the root is on.
    pub fn disk(&self) -> Option<Disk> {
        let start = self.start(Tree::Main).ok()?;
        let root = self.resolve_in(start, b".", OFlag::O_PATH | OFlag::O_DIRECTORY);
        Disk::of(root.ok()?)
    }

    /// Bytes that the files below the root take on the disk; a file with several names counts once.
    /// Directories that the owner may not read are left out. `None` if that is the root, or if there are more than
    /// [`MAX_FILES`]. The walk's memory is charged to the ledger.
    ///
    /// # Errors
    /// `OverLimit`; or it was interrupted.
    pub fn disk_bytes(
        &self,
        ledger: &Arc<Ledger>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Option<u64>, Stopped> {
        let filter = Filter {
            most_names: Some(MAX_FILES),
            ..Filter::default()
        };
        let mut walk = match self.walk(&FilePath::new(b".")?, filter, None, ledger) {
            Err(error) if error.kind() != Kind::OverLimit => return Ok(None),
            walk => walk?,
        };
        let (mut total, mut left) = (0, MAX_FILES);
        // The numbers of files with several names, and their blocks.
        let mut linked = Vec::new();
        let mut charge = ledger.charge(Item::Responses, 0).map_err(Error::from)?;
        while let Some(visit) = walk.next()? {
            interrupt.check()?;
            let found = match visit {
                Visit::Entry(found) => found,
                Visit::Unreadable(b".", _) => return Ok(None),
                Visit::Passed | Visit::Unreadable(..) => continue,
            };
            let Some(rest) = left.checked_sub(1) else {
                return Ok(None);
            };
            left = rest;
            let Ok(status) = found.status() else {
                continue;
            };
            let blocks = u64::try_from(status.st_blocks).unwrap_or(0);
            if status.st_nlink < 2 || found.kind == FileKind::Directory {
                total += blocks;
                continue;
            }
            if linked.len() == linked.capacity() {
                let bytes = (linked.len() + 64) * LINK_BYTES;
                charge.set(bytes).map_err(Error::from)?;
            }
            linked.push((status.st_ino, blocks));
        }
        if walk.has_overflowed() {
            return Ok(None);
        }
        sort(&mut linked);
        linked.dedup_by_key(|(number, _)| *number);
        total += linked.iter().map(|(_, blocks)| blocks).sum::<u64>();
        Ok(Some(total * BLOCK_BYTES))
    }
}
