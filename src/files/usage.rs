//! Disk usage: of the files beneath a root, and of their file system.

use std::collections::HashSet;
use std::os::fd::AsFd;

use nix::dir::Dir;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::statvfs::fstatvfs;

use super::entry::FileKind;
use super::name::Tree;
use super::root::Files;
use crate::error::{Error, Result};
use crate::sys::paths::fstatat;

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

/// Most bytes of paths of directories that wait to be read.
const MAX_BYTES: usize = 4 << 20;

/// Longest path that is opened; files below a longer one are not counted (`PATH_MAX`).
const MAX_PATH_BYTES: usize = 4000;

impl Files<'_> {
    /// The space of the file system that the root is on.
    pub fn disk(&self) -> Option<Disk> {
        let start = self.start(Tree::Main).ok()?;
        let root = self.resolve_in(start, b".", OFlag::O_PATH | OFlag::O_DIRECTORY);
        Disk::of(root.ok()?)
    }

    /// Bytes that the files below the root take on the disk; a file with several names counts once.
    /// Directories that the owner may not read are left out. `None` if there are more than
    /// [`MAX_FILES`].
    ///
    /// # Errors
    /// The root cannot be read.
    pub fn disk_bytes(&self) -> Result<Option<u64>> {
        let mut total = 0;
        let start = self.start(Tree::Main);
        let start = start.map_err(|errno| Error::system("cannot read the home", errno))?;
        let mut left = MAX_FILES;
        let mut left_bytes = MAX_BYTES;
        let mut seen = HashSet::new();
        let mut pending = vec![b".".to_vec()];
        while let Some(path) = pending.pop() {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
            let opened = self.resolve_in(&start, &path, flags);
            let mut directory = match opened.and_then(Dir::from_fd) {
                Ok(directory) => directory,
                Err(errno) if path == b"." => {
                    return Err(Error::system("cannot read the home", errno));
                }
                Err(_) => continue,
            };
            let names: Vec<_> = directory
                .iter()
                .filter_map(|found| Some(found.ok()?.file_name().to_owned()))
                .filter(|name| !matches!(name.to_bytes(), b"." | b".."))
                .take(left + 1)
                .collect();
            if names.len() > left {
                return Ok(None);
            }
            left -= names.len();
            for name in names {
                let nofollow = AtFlags::AT_SYMLINK_NOFOLLOW;
                let Ok(status) = fstatat(&directory, name.as_c_str(), nofollow) else {
                    continue;
                };
                if status.st_nlink < 2
                    || FileKind::of(&status) == FileKind::Directory
                    || seen.insert(status.st_ino)
                {
                    total += u64::try_from(status.st_blocks).unwrap_or(0) * BLOCK_BYTES;
                }
                if FileKind::of(&status) == FileKind::Directory
                    && path.len() + name.count_bytes() < MAX_PATH_BYTES
                {
                    let below = [&path, &b"/"[..], name.to_bytes()].concat();
                    let Some(left) = left_bytes.checked_sub(below.len()) else {
                        return Ok(None);
                    };
                    left_bytes = left;
                    pending.push(below);
                }
            }
        }
        Ok(Some(total))
    }
}
