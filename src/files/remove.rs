//! Removing files and whole trees.
//!
//! A tree may be thousands of levels deep and may change while it is removed, so there is no
//! recursion, only one descriptor is open at a time, and nothing is ever followed: each step goes
//! down into a directory that was opened without following links, or up to one that is still the
//! parent it came from.

use std::os::fd::OwnedFd;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::name::FilePath;
use super::root::{DIRECTORY, Identity, Missing, Place};
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
        let place = self.place(path, Missing::Refuse)?;
        let status = place.status().map_err(failed)?;
        if FileKind::of(&status) != FileKind::Directory {
            return place.unlink().map_err(failed);
        }
        let name = place.name.as_slice();
        match unlinkat(&place.directory, name, UnlinkatFlags::RemoveDir) {
            Err(Errno::ENOTEMPTY | Errno::EEXIST) if recursive => {
                remove_tree(place, status.st_dev).map_err(failed)
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
    parent: Identity,
    /// Entries that are still to be removed.
    pending: Vec<Vec<u8>>,
}

/// Removes a directory and everything in it that is on its device: what is mounted below is not
/// part of it. What somebody else removes meanwhile is as good as removed.
fn remove_tree(top: Place, device: u64) -> std::result::Result<(), Errno> {
    let mut current = top.directory;
    let mut levels: Vec<Level> = Vec::new();
    let mut refilled = 0;
    let mut to_enter = Some(top.name);
    loop {
        if let Some(name) = to_enter.take() {
            let parent = Identity::of_open(&current)?;
            let flags = DIRECTORY | OFlag::O_NOFOLLOW;
            match openat(&current, name.as_slice(), flags, Mode::empty()) {
                Ok(directory) => {
                    if fstat(&directory)?.st_dev != device {
                        return Err(Errno::EBUSY);
                    }
                    current = directory;
                    levels.push(Level {
                        name,
                        parent,
                        pending: names(&current)?,
                    });
                }
                Err(Errno::ENOENT) => {}
                Err(errno) => return Err(errno),
            }
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
        if Identity::of_open(&above)? != level.parent {
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
    let names = Dir::openat(directory, ".", flags, Mode::empty()).and_then(|mut directory| {
        directory
            .iter()
            .map(|found| found.map(|found| found.file_name().to_bytes().to_vec()))
            .filter(|name| !matches!(name.as_deref(), Ok(b"." | b"..")))
            .collect()
    });
    match names {
        // The directory itself is gone.
        Err(Errno::ENOENT) => Ok(Vec::new()),
        names => names,
    }
}
