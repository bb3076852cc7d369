//! Listing a directory in pages, sorted by the bytes of the names.
//!
//! A page begins after a name, not at a number, so entries that come and go between two pages
//! neither shift nor repeat the others.

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, fstatat};

use super::name::FilePath;
use super::{Entry, Root, entry};
use crate::error::{Error, Result};

/// Part of a directory.
pub struct Page {
    /// Sorted by name.
    pub entries: Vec<Entry>,
    /// The name to go on after, if there is more.
    pub next: Option<Vec<u8>>,
}

impl Root {
    /// The first `limit` entries whose names come after `after`.
    ///
    /// # Errors
    /// It is no directory, or cannot be read.
    pub fn list(&self, path: &FilePath, after: Option<&[u8]>, limit: usize) -> Result<Page> {
        let failed = |errno| Error::system(format_args!("cannot list {path}"), errno);
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let directory =
            openat(&self.directory, path.bytes(), flags, Mode::empty()).map_err(failed)?;
        let mut directory = Dir::from_fd(directory).map_err(failed)?;
        let mut names: Vec<Vec<u8>> = Vec::new();
        for found in directory.iter() {
            let found = found.map_err(failed)?;
            let name = found.file_name().to_bytes();
            if name != b"." && name != b".." && after.is_none_or(|after| name > after) {
                names.push(name.to_vec());
            }
        }
        names.sort_unstable();
        let more = names.len() > limit;
        names.truncate(limit);
        let next = names.last().filter(|_| more).cloned();
        let mut entries = Vec::with_capacity(names.len());
        for name in names {
            match fstatat(&directory, name.as_slice(), AtFlags::AT_SYMLINK_NOFOLLOW) {
                Ok(status) => entries.push(entry(
                    &directory,
                    &name,
                    name.clone(),
                    path.join(&name),
                    &status,
                )),
                // Gone since it was read.
                Err(Errno::ENOENT) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
        Ok(Page { entries, next })
    }
}
