//! Removing files and whole trees.
//!
//! A tree may be thousands of levels deep, hold millions of names and change while it is removed, so
//! there is no recursion, only one directory is open at a time (and read through another descriptor),
//! a bounded number of names is held, and nothing is ever followed: each step goes down into a
//! directory that was opened without following links, or up to one that is still the parent it came
//! from.
//!
//! Whoever removes says until when: a client waits for its answer only so long. What is gone by then
//! stays gone, and who begins again goes on where it ended.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::name::FilePath;
use super::root::{DIRECTORY, Identity, Missing};
use super::{FileKind, Root};
use crate::error::{Error, Kind, Result};

impl Root {
    /// Removes what a path names: a file, a link (not its target), an empty directory, or with
    /// `recursive` a directory and everything in it.
    ///
    /// # Errors
    /// Nothing is there, or a directory is not empty; or there is so much in it that it is not all gone
    /// after [`REMOVAL_LIMIT`].
    pub fn remove(&self, path: &FilePath, recursive: bool) -> Result<()> {
        self.remove_until(path, recursive, Instant::now() + REMOVAL_LIMIT)
    }

    pub(super) fn remove_until(
        &self,
        path: &FilePath,
        recursive: bool,
        deadline: Instant,
    ) -> Result<()> {
        let failed = |errno| Error::system(format_args!("cannot delete {path}"), errno);
        let place = self.place(path, Missing::Refuse)?;
        let status = place.status().map_err(failed)?;
        if FileKind::of(&status) != FileKind::Directory {
            return place.unlink().map_err(failed);
        }
        let empty = UnlinkatFlags::RemoveDir;
        match unlinkat(&place.directory, place.name.as_slice(), empty) {
            Err(Errno::ENOTEMPTY | Errno::EEXIST) if recursive => {
                let is_gone = remove_tree(place.directory, &place.name, Some(deadline));
                if is_gone.map_err(failed)? {
                    return Ok(());
                }
                Err(Error::new(
                    Kind::Unfinished,
                    format!(
                        "cannot delete {path} in one go: there is too much in it; a part is gone, ask again for the rest"
                    ),
                ))
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

/// How long a client waits for a directory to be gone. It gives up after 60 s without an answer.
const REMOVAL_LIMIT: Duration = Duration::from_secs(45);

/// Times a directory is gone through again because something was put into it meanwhile.
const ROUNDS: usize = 8;

/// Names read from a directory at once: one may have millions. Few in unit tests, which thereby see
/// many batches.
const BATCH_NAMES: usize = if cfg!(test) { 64 } else { 4096 };

/// Names that are held at most before another batch is read, of all levels together.
const MAX_PENDING_NAMES: usize = 4 * BATCH_NAMES;

/// A directory on the way down: 32 bytes, whatever is in it and whatever it is called.
struct Level {
    identity: Identity,
    /// Where its names begin among those that are pending.
    first: usize,
    /// Whether it may have names that are not pending.
    is_partly_read: bool,
}

/// Removes what `name` is in `parent`, and if that is a directory everything in it that is on its
/// mount: what is mounted below is not part of it. What somebody else removes meanwhile is as good as
/// removed. False if it is not all gone when the `deadline` has come.
///
/// A name stays pending until it is gone, so that it need not be kept for the way up; when there are
/// too many, all are forgotten and read again by whoever needs them.
///
/// # Errors
/// `EBUSY` if something is mounted there or a directory is moved away meanwhile; `ENOTEMPTY` if
/// something is put into one again and again; else as unlink(2), open(2) and readdir(3).
pub(super) fn remove_tree(
    parent: OwnedFd,
    name: &[u8],
    deadline: Option<Instant>,
) -> std::result::Result<bool, Errno> {
    let mut current = parent;
    let mut levels = vec![Level {
        identity: Identity::of_open(&current)?,
        first: 0,
        is_partly_read: false,
    }];
    let mut pending = vec![name.to_vec()];
    let (mut device, mut left, mut refilled) = (None, None, 0);
    while let Some(level) = levels.last_mut() {
        if let Some(name) = pending[level.first..].last() {
            // Asked only where something is left.
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            let flags = DIRECTORY | OFlag::O_NOFOLLOW;
            let entered = if remove_simple(&current, name)? {
                Err(Errno::ENOENT)
            } else {
                openat(&current, name.as_slice(), flags, Mode::empty())
            };
            let directory = match entered {
                Err(Errno::ENOENT) => {
                    pending.pop();
                    continue;
                }
                entered => entered?,
            };
            let status = fstat(&directory)?;
            if *device.get_or_insert(status.st_dev) != status.st_dev {
                return Err(Errno::EBUSY);
            }
            let identity = Identity::of(&status);
            if left == Some(identity) {
                refilled += 1;
                if refilled > ROUNDS {
                    return Err(Errno::ENOTEMPTY);
                }
            }
            if pending.len() > MAX_PENDING_NAMES {
                // The first stays: it is all that is asked of the parent, which is never read.
                pending.truncate(1);
                for level in &mut levels[1..] {
                    level.first = 1;
                    level.is_partly_read = true;
                }
            }
            levels.push(Level {
                identity,
                first: pending.len(),
                is_partly_read: read_names(&directory, &mut pending)?,
            });
            current = directory;
        } else if level.is_partly_read {
            level.is_partly_read = read_names(&current, &mut pending)?;
        } else {
            left = levels.pop().map(|level| level.identity);
            let Some(level) = levels.last() else {
                break;
            };
            current = openat(&current, "..", DIRECTORY, Mode::empty())?;
            if Identity::of_open(&current)? != level.identity {
                // It was moved meanwhile: what is above now is not ours to touch.
                return Err(Errno::EBUSY);
            }
        }
    }
    Ok(true)
}

/// Removes anything but a directory that has entries; false if it is one.
fn remove_simple(directory: &OwnedFd, name: &[u8]) -> std::result::Result<bool, Errno> {
    match unlinkat(directory, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => return Ok(true),
        // EISDIR is Linux's word for a directory; EPERM is what POSIX says.
        Err(Errno::EISDIR | Errno::EPERM) => {}
        Err(errno) => return Err(errno),
    }
    // This says EBUSY of what something is mounted on, also if that is of the same device.
    match unlinkat(directory, name, UnlinkatFlags::RemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(true),
        Err(Errno::ENOTEMPTY | Errno::EEXIST) => Ok(false),
        // It is no directory: then removing it as a file was truly not permitted.
        Err(Errno::ENOTDIR) => Err(Errno::EPERM),
        Err(errno) => Err(errno),
    }
}

/// Adds a batch of a directory's names; whether there are more.
fn read_names(directory: &OwnedFd, into: &mut Vec<Vec<u8>>) -> std::result::Result<bool, Errno> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut directory = match Dir::openat(directory, ".", flags, Mode::empty()) {
        // The directory itself is gone.
        Err(Errno::ENOENT) => return Ok(false),
        opened => opened?,
    };
    let limit = into.len() + BATCH_NAMES;
    for found in directory.iter() {
        let found = found?;
        let name = found.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        if into.len() == limit {
            return Ok(true);
        }
        into.push(name.to_vec());
    }
    Ok(false)
}
