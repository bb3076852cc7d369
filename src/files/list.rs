//! Lists a directory in pages, sorted by the bytes of the names.
//!
//! A page begins after a name, not at a number, so entries that come and go between two pages neither
//! shift nor repeat the others. A page holds names only. The attributes of an entry are read when the
//! entry is sent, so a slow client does not cost more memory than the names.

use std::collections::BinaryHeap;

use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};

use super::entry::{Entry, FileKind};
use super::name::FilePath;
use super::root::Root;
use crate::client::{Interrupt, Stopped};
use crate::error::Error;
use crate::limits::ledger::Charge;
use crate::sys::paths::fstatat;

/// What a name takes besides its bytes: its place in the heap, which doubles, and the allocator's header.
const NAME_BYTES: usize = 2 * size_of::<(Vec<u8>, FileKind)>() + 16;

/// Names that are read before the client is looked at: the work of about a millisecond.
const NAMES_BETWEEN_LOOKS: usize = 4096;

/// Names are charged in steps of this many bytes.
const CHARGED_BYTES: usize = 32 * 1024;

/// A part of a directory: entries in the order of their names.
pub struct Page {
    directory: Dir,
    names: std::vec::IntoIter<(Vec<u8>, FileKind)>,
    /// For the names.
    _charge: Charge,
    sizes_links_by_target: bool,
    /// Whether the owner may search the directory. Entries are read when the thread no longer acts as
    /// the owner, and the server itself may search everything.
    is_searchable: bool,
    /// The cursor of the next page; `None` on the last one.
    pub after: Option<Vec<u8>>,
}

impl Root {
    /// The first `limit` entries whose names are greater than `after`. Their memory is added to `charge`.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `Forbidden`, `OverLimit`; or it was interrupted.
    pub fn list(
        &self,
        path: &FilePath,
        after: Option<&[u8]>,
        limit: usize,
        mut charge: Charge,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Page, Stopped> {
        let failed = |errno| self.error(format_args!("cannot list {path}"), errno);
        let mut directory = self
            .resolve(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)
            .and_then(Dir::from_fd)
            .map_err(failed)?;
        // A max-heap of limit + 1 names: a smaller name replaces the largest one, and a name beyond the
        // limit means that there is another page.
        let mut names = BinaryHeap::new();
        let mut bytes = 0;
        for (passed, found) in directory.iter().enumerate() {
            if passed % NAMES_BETWEEN_LOOKS == NAMES_BETWEEN_LOOKS - 1 {
                interrupt.check()?;
            }
            let found = found.map_err(failed)?;
            let name = found.file_name().to_bytes();
            if name == b"." || name == b".." || after.is_some_and(|after| name <= after) {
                continue;
            }
            if names.len() > limit {
                let largest = names.peek();
                if largest.is_some_and(|(largest, _): &(Vec<u8>, _)| name > largest.as_slice()) {
                    continue;
                }
                bytes -= names.pop().map_or(0, |(name, _)| name.len() + NAME_BYTES);
            }
            bytes += name.len() + NAME_BYTES;
            if bytes > charge.bytes() {
                charge.set(bytes + CHARGED_BYTES).map_err(Error::from)?;
            }
            names.push((
                name.to_vec(),
                kind_of(found.file_type()).unwrap_or_default(),
            ));
        }
        let is_searchable = fstatat(&directory, ".", AtFlags::empty()).is_ok();
        let mut names = names.into_sorted_vec();
        let more = names.len() > limit;
        names.truncate(limit);
        Ok(Page {
            directory,
            after: names.last().filter(|_| more).map(|(name, _)| name.clone()),
            names: names.into_iter(),
            _charge: charge,
            sizes_links_by_target: self.sizes_links_by_target,
            is_searchable,
        })
    }
}

impl Iterator for Page {
    type Item = Entry;

    fn next(&mut self) -> Option<Entry> {
        loop {
            let (name, kind) = self.names.next()?;
            if !self.is_searchable {
                return Some(Entry::unknown(name, kind));
            }
            return match Entry::read(&self.directory, &name, self.sizes_links_by_target) {
                Ok(entry) => Some(entry),
                // Removed since it was read.
                Err(Errno::ENOENT) => continue,
                // A dead mount, or a directory that may not be searched. The others are listed.
                Err(_) => Some(Entry::unknown(name, kind)),
            };
        }
    }
}

/// The kind that readdir(3) reports. Some file systems report none.
pub(super) fn kind_of(reported: Option<Type>) -> Option<FileKind> {
    Some(match reported? {
        Type::Directory => FileKind::Directory,
        Type::Symlink => FileKind::Link,
        Type::Fifo => FileKind::Pipe,
        Type::Socket => FileKind::Socket,
        Type::CharacterDevice => FileKind::CharacterDevice,
        Type::BlockDevice => FileKind::BlockDevice,
        Type::File => FileKind::Regular,
    })
}
