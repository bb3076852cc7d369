//! Listing a directory in pages, sorted by the bytes of the names.
//!
//! A page begins after a name, not at a number, so entries that come and go between two pages
//! neither shift nor repeat the others. Only its names are held: what is known about each is found
//! out when it is its turn, so that a wide directory costs its names and a slow client no more.

use std::collections::BinaryHeap;

use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::fstatat;

use super::name::FilePath;
use super::root::link_target;
use super::{Entry, FileKind, Root, size};
use crate::error::Result;

/// Part of a directory: its entries in order.
pub struct Page {
    directory: Dir,
    names: std::vec::IntoIter<(Vec<u8>, FileKind)>,
    sizes_links_by_target: bool,
    /// Whether who listed the directory may also look at what is in it. A page is read when nobody
    /// acts for a sandbox any more, and then the server may.
    is_searchable: bool,
    /// The name to go on after, if there is more.
    pub after: Option<Vec<u8>>,
}

impl Root {
    /// The first `limit` entries whose names come after `after`.
    ///
    /// # Errors
    /// It is no directory, or cannot be read.
    pub fn list(&self, path: &FilePath, after: Option<&[u8]>, limit: usize) -> Result<Page> {
        let failed = |errno| self.error(format_args!("cannot list {path}"), errno);
        let mut directory = self
            .resolve(path.bytes(), OFlag::O_RDONLY | OFlag::O_DIRECTORY)
            .and_then(Dir::from_fd)
            .map_err(failed)?;
        // The largest on top: it goes when a smaller one is found. One more than the page holds
        // tells whether there is another page.
        let mut names = BinaryHeap::new();
        for found in directory.iter() {
            let found = found.map_err(failed)?;
            let name = found.file_name().to_bytes();
            if name == b"." || name == b".." || after.is_some_and(|after| name <= after) {
                continue;
            }
            if names.len() > limit {
                if names
                    .peek()
                    .is_some_and(|(last, _): &(Vec<u8>, _)| name > last.as_slice())
                {
                    continue;
                }
                names.pop();
            }
            names.push((name.to_vec(), kind(found.file_type())));
        }
        let is_searchable = fstatat(&directory, ".", AtFlags::empty()).is_ok();
        let mut names = names.into_sorted_vec();
        let more = names.len() > limit;
        names.truncate(limit);
        Ok(Page {
            directory,
            after: names.last().filter(|_| more).map(|(name, _)| name.clone()),
            names: names.into_iter(),
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
            let status = |flags| fstatat(&self.directory, name.as_slice(), flags);
            let found = match status(AtFlags::AT_SYMLINK_NOFOLLOW) {
                Ok(found) => found,
                // Gone since it was read.
                Err(Errno::ENOENT) => continue,
                // A dead mount, or a directory whose names only may be read: the others are listed
                // all the same.
                Err(_) => return Some(Entry::unknown(name, kind)),
            };
            let (mut shown_size, mut target) = (size(&found), None);
            if FileKind::of(&found) == FileKind::Link {
                target = link_target(&self.directory, &name).ok();
                if self.sizes_links_by_target
                    && let Ok(followed) = status(AtFlags::empty())
                {
                    shown_size = size(&followed);
                }
            }
            return Some(Entry {
                size: shown_size,
                target,
                ..Entry::new(name, &found)
            });
        }
    }
}

/// What the directory itself says of an entry.
fn kind(of: Option<Type>) -> FileKind {
    match of {
        Some(Type::Directory) => FileKind::Directory,
        Some(Type::Symlink) => FileKind::Link,
        Some(Type::Fifo) => FileKind::Pipe,
        Some(Type::Socket) => FileKind::Socket,
        Some(Type::CharacterDevice) => FileKind::CharacterDevice,
        Some(Type::BlockDevice) => FileKind::BlockDevice,
        Some(Type::File) | None => FileKind::Regular,
    }
}
