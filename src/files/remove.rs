//! Removing files and whole trees.
//!
//! A tree may be thousands of levels deep and may change while it is removed, so there is no
//! recursion, only one descriptor is open at a time, and nothing is ever followed: each step goes
//! down into a directory that was opened without following links, or up to one that is still the
//! parent it came from.

use std::os::fd::OwnedFd;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, fstat, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::name::FilePath;
use super::{FileKind, Root};
use crate::error::{Error, Kind, Result};

impl Root {
    /// Removes what a path names: a file, a link (not its target), an empty directory, or with
    /// `recursive` a directory and everything in it.
    ///
    /// # Errors
    /// Nothing is there, or a directory is not empty.
    pub fn remove(&self, path: &FilePath, recursive: bool) -> Result<()> {
        let failed = |errno| Error::system(format_args!("cannot delete {path}"), errno);
        let (parent, name) = self.parent(path, false)?;
        let status = fstatat(&parent, name, AtFlags::AT_SYMLINK_NOFOLLOW).map_err(failed)?;
        if FileKind::of(&status) != FileKind::Directory {
            return unlinkat(&parent, name, UnlinkatFlags::NoRemoveDir).map_err(failed);
        }
        match unlinkat(&parent, name, UnlinkatFlags::RemoveDir) {
            Err(Errno::ENOTEMPTY | Errno::EEXIST) if recursive => {
                remove_tree(parent, name).map_err(failed)
            }
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => Err(Error::new(
                Kind::NotEmpty,
                format!(
                    "cannot delete {path}: the directory is not empty; recursive=1 deletes what is in it too"
                ),
            )),
            other => other.map_err(failed),
        }
    }
}

/// Times a directory is gone through again because something was put into it meanwhile.
const ROUNDS: usize = 8;

/// A directory on the way down.
struct Level {
    /// Its name in its parent.
    name: Vec<u8>,
    /// What identifies the parent when coming back up.
    parent: (u64, u64),
    /// Entries that are still to be removed.
    pending: Vec<Vec<u8>>,
}

/// Removes the directory `name` of `parent` and everything in it.
fn remove_tree(parent: OwnedFd, name: &[u8]) -> std::result::Result<(), Errno> {
    let mut current = parent;
    let mut levels: Vec<Level> = Vec::new();
    let mut refilled = 0;
    let mut to_enter = Some(name.to_vec());
    loop {
        if let Some(name) = to_enter.take() {
            let status = fstat(&current)?;
            current = openat(&current, name.as_slice(), DIRECTORY, Mode::empty())?;
            let parent = (status.st_dev, status.st_ino);
            levels.push(Level {
                name,
                parent,
                pending: names(&current)?,
            });
        }
        let Some(level) = levels.last_mut() else {
            return Ok(());
        };
        if let Some(name) = level.pending.pop() {
            if !remove_simple(&current, &name)? {
                to_enter = Some(name);
            }
            continue;
        }
        let above = openat(&current, "..", DIRECTORY, Mode::empty())?;
        let status = fstat(&above)?;
        if (status.st_dev, status.st_ino) != level.parent {
            // It was moved meanwhile: what is above now is not ours to touch.
            return Err(Errno::EBUSY);
        }
        current = above;
        let Some(Level { name, .. }) = levels.pop() else {
            return Ok(());
        };
        if !remove_simple(&current, &name)? {
            refilled += 1;
            if refilled > ROUNDS {
                return Err(Errno::ENOTEMPTY);
            }
            to_enter = Some(name);
        }
    }
}

/// Enough to find names in a directory, and to be one: reading it needs more.
const DIRECTORY: OFlag = OFlag::O_PATH
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

/// Removes anything but a directory that has entries; false if it is one.
fn remove_simple(directory: &OwnedFd, name: &[u8]) -> std::result::Result<bool, Errno> {
    match unlinkat(directory, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => return Ok(true),
        // EISDIR is Linux's word for a directory; EPERM is what POSIX says.
        Err(Errno::EISDIR | Errno::EPERM) => {}
        Err(errno) => return Err(errno),
    }
    match unlinkat(directory, name, UnlinkatFlags::RemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(true),
        Err(Errno::ENOTEMPTY | Errno::EEXIST) => Ok(false),
        // It is no directory: then removing it as a file was truly not permitted.
        Err(Errno::ENOTDIR) => Err(Errno::EPERM),
        Err(errno) => Err(errno),
    }
}

fn names(directory: &OwnedFd) -> std::result::Result<Vec<Vec<u8>>, Errno> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    Dir::openat(directory, ".", flags, Mode::empty())?
        .iter()
        .map(|found| found.map(|found| found.file_name().to_bytes().to_vec()))
        .filter(|name| !matches!(name.as_deref(), Ok(b"." | b"..")))
        .collect()
}
