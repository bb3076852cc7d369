//! Removes files and whole trees.
//!
//! A tree may be thousands of levels deep, hold millions of names and change while it is removed. So
//! there is no recursion, one directory is open at a time (and read through another descriptor), a
//! bounded number of names is held, few if the tenant has no memory left for them, and no link is followed:
//! each step goes down into a directory that was opened without following links, or up to a directory that is
//! still the parent.
//!
//! Removal ends at a deadline, because a client waits for the answer. A second call continues where the
//! first one stopped.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{FchmodatFlags, Mode, fstat};
use nix::unistd::UnlinkatFlags;

use super::entry::{DIRECTORY, FileKind, Identity};
use super::name::FilePath;
use super::name_at::NameAt;
use super::root::{Missing, Root};
use super::write::temporary_name;
use crate::client::{Interrupt, Stopped};
use crate::error::{Error, Kind, Result};
use crate::limits::ledger::Charge;
use crate::sys::paths::{fchmodat, openat, renameat, unlinkat};

impl Root {
    /// Removes a file, a link (not its target) or an empty directory; with `recursive` a directory and
    /// everything in it. Names in memory are added to the `charge`, if they are for a tenant.
    ///
    /// # Errors
    /// `NotFound`; `NotEmpty` without `recursive`; `Unfinished` if something is left after
    /// [`REMOVAL_LIMIT`]; or it was interrupted.
    pub fn remove(
        &self,
        path: &FilePath,
        recursive: bool,
        charge: Option<Charge>,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<(), Stopped> {
        let deadline = Instant::now() + REMOVAL_LIMIT;
        self.remove_until(path, recursive, deadline, charge, interrupt)
    }

    /// Removes a directory if it is empty.
    ///
    /// # Errors
    /// `NotFound`, `NotEmpty`, `NotDirectory`.
    pub fn remove_directory(&self, path: &FilePath) -> Result<()> {
        let NameAt { directory, name } = self.name_at(path, Missing::Refuse)?;
        unlinkat(&directory, name.as_slice(), UnlinkatFlags::RemoveDir)
            .map_err(|errno| Error::system(format_args!("cannot delete {path}"), errno))
    }

    /// Takes a file away from its name. It is removed when the value is dropped, unless it is put back.
    ///
    /// # Errors
    /// `NotFound`, `Forbidden`.
    pub fn set_aside<'files>(&'files self, path: &'files FilePath) -> Result<Aside<'files>> {
        let failed = |errno| Error::system(format_args!("cannot delete {path}"), errno);
        let target = self.name_at(path, Missing::Refuse)?;
        let (key, hidden) = (target.key().map_err(failed)?, temporary_name());
        let NameAt { directory, name } = &target;
        renameat(directory, &name[..], directory, &hidden[..]).map_err(failed)?;
        Ok(Aside {
            root: self,
            path,
            key,
            target: Some(target),
            hidden,
        })
    }

    pub(super) fn remove_until(
        &self,
        path: &FilePath,
        recursive: bool,
        deadline: Instant,
        charge: Option<Charge>,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<(), Stopped> {
        let failed = |errno| Error::system(format_args!("cannot delete {path}"), errno);
        let name_at = self.name_at(path, Missing::Refuse)?;
        let status = name_at.status().map_err(failed)?;
        if FileKind::of(&status) != FileKind::Directory {
            return Ok(name_at.unlink().map_err(failed)?);
        }
        let empty = UnlinkatFlags::RemoveDir;
        match unlinkat(&name_at.directory, name_at.name.as_slice(), empty) {
            Err(Errno::ENOTEMPTY | Errno::EEXIST) if recursive => {
                let NameAt { directory, name } = name_at;
                let mut looked = Ok(());
                let mut goes_on = || {
                    looked = interrupt.check();
                    looked.is_ok() && Instant::now() < deadline
                };
                let refuse = Protected::Refuse;
                let is_gone = remove_tree(directory, &name, &mut goes_on, refuse, charge);
                if is_gone.map_err(failed)? {
                    return Ok(());
                }
                looked?;
                let why = "some entries are deleted; repeat the request for the rest";
                let text = format!("cannot delete all of {path} in one request: {why}");
                Err(Error::new(Kind::Unfinished, text).into())
            }
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => {
                let why = "the directory is not empty; recursive=1 deletes its entries too";
                let text = format!("cannot delete {path}: {why}");
                Err(Error::new(Kind::NotEmpty, text).into())
            }
            other => Ok(other.map_err(failed)?),
        }
    }
}

/// A file that was taken away from its name.
pub struct Aside<'files> {
    root: &'files Root,
    path: &'files FilePath,
    /// The [key](NameAt::key) of the name.
    key: Vec<u8>,
    /// The name, in a directory that is open; `None` if it was closed.
    target: Option<NameAt>,
    /// The name in the same directory that it has meanwhile; empty if nothing is left to do.
    hidden: Vec<u8>,
}

impl Aside<'_> {
    /// Closes its directory: a request may have any number that are closed. It is found again by its path.
    pub fn close(&mut self) {
        self.target = None;
    }

    /// Gives the file its name back.
    pub fn put_back(mut self) {
        let hidden = std::mem::take(&mut self.hidden);
        // Whoever took the directory away meanwhile took the file with it.
        if let Some(NameAt { directory, name }) = self.find() {
            let _ = renameat(&directory, &hidden[..], &directory, &name[..]);
        }
    }

    /// The name; `None` if its path does not lead to it any more.
    fn find(&mut self) -> Option<NameAt> {
        self.target.take().or_else(|| {
            let found = self.root.name_at(self.path, Missing::Refuse).ok()?;
            (found.key().as_ref() == Ok(&self.key)).then_some(found)
        })
    }
}

impl Drop for Aside<'_> {
    fn drop(&mut self) {
        if !self.hidden.is_empty()
            && let Some(NameAt { directory, .. }) = self.find()
        {
            let _ = unlinkat(&directory, &self.hidden[..], UnlinkatFlags::NoRemoveDir);
        }
    }
}

/// How long a request may remove. Clients give up after 60 s without an answer.
const REMOVAL_LIMIT: Duration = Duration::from_secs(45);

/// How often a directory is read again because new files appeared in it.
const ROUNDS: usize = 8;

/// Names in one batch that is read from a directory. Few in unit tests, so that they see many batches.
const BATCH_NAMES: usize = if cfg!(test) { 64 } else { 4096 };

/// The same for a tenant that has no memory left.
const LEAST_NAMES: usize = BATCH_NAMES / 64;

/// Most batches in memory, of all levels together, before another one is read.
const MAX_PENDING_BATCHES: usize = 4;

/// Memory of a name, at most.
const NAME_BYTES: usize = 255 + 2 * size_of::<Vec<u8>>() + 16;

/// Names are charged in steps of this many bytes.
const CHARGED_BYTES: usize = 32 * 1024;

/// Names that were read and are not removed yet.
struct PendingNames {
    names: Vec<Vec<u8>>,
    /// How many are read in one batch.
    batch: usize,
    /// `None` for what the server itself removes, in one thread.
    charge: Option<Charge>,
}

impl PendingNames {
    fn add(&mut self, name: &[u8]) {
        self.names.push(name.to_vec());
        let bytes = self.names.len() * NAME_BYTES;
        if let Some(charge) = &mut self.charge
            && bytes > charge.bytes()
            && charge.set(bytes + CHARGED_BYTES).is_err()
        {
            self.batch = self.batch.min(LEAST_NAMES);
        }
    }
}

/// What happens to directories that their owner has protected against changes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Protected {
    /// They are not changed.
    Refuse,
    /// Their owner gets all rights first.
    Open,
}

/// A directory on the way down; 32 bytes.
struct RemovedLevel {
    identity: Identity,
    /// The index of its first name in `pending`.
    first: usize,
    /// Whether it may have names that are not in `pending`.
    is_partly_read: bool,
}

/// Removes `name` from `parent`, and if it is a directory everything in it. Does not cross mounts. Files
/// that another process removes meanwhile count as removed. Returns false if something is left and it no longer
/// `goes_on`. Names in memory are added to the `charge`, if they are for a tenant.
///
/// A name stays in `pending` until it is gone, so the way up needs no names. When there are too many,
/// all are dropped, and each level reads its names again.
///
/// # Errors
/// `EBUSY` if something is mounted there or a directory is moved away meanwhile; `ENOTEMPTY` if new files
/// keep appearing; otherwise as unlink(2), open(2) and readdir(3).
pub(super) fn remove_tree(
    parent: OwnedFd,
    name: &[u8],
    goes_on: &mut dyn FnMut() -> bool,
    protected: Protected,
    charge: Option<Charge>,
) -> nix::Result<bool> {
    let mut current = parent;
    let mut levels = vec![RemovedLevel {
        identity: Identity::of_open(&current)?,
        first: 0,
        is_partly_read: false,
    }];
    let mut pending = PendingNames {
        names: vec![name.to_vec()],
        batch: BATCH_NAMES,
        charge,
    };
    let (mut device, mut left, mut refilled) = (None, None, 0);
    while let Some(level) = levels.last_mut() {
        if let Some(name) = pending.names[level.first..].last() {
            // Checked only while something is left.
            if !goes_on() {
                return Ok(false);
            }
            let flags = DIRECTORY | OFlag::O_NOFOLLOW;
            let entered = if remove_simple(&current, name)? {
                Err(Errno::ENOENT)
            } else {
                if protected == Protected::Open {
                    let (all, nofollow) = (Mode::S_IRWXU, FchmodatFlags::NoFollowSymlink);
                    let _ = fchmodat(&current, name.as_slice(), all, nofollow);
                }
                openat(&current, name.as_slice(), flags, Mode::empty())
            };
            let directory = match entered {
                Err(Errno::ENOENT) => {
                    pending.names.pop();
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
            if pending.names.len() > MAX_PENDING_BATCHES * pending.batch {
                // Except the first one: the parent is never read.
                pending.names.truncate(1);
                for level in &mut levels[1..] {
                    level.first = 1;
                    level.is_partly_read = true;
                }
            }
            levels.push(RemovedLevel {
                identity,
                first: pending.names.len(),
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
                // It was moved meanwhile: the directory above is not part of the tree.
                return Err(Errno::EBUSY);
            }
        }
    }
    Ok(true)
}

/// Removes anything but a directory with entries; false for such a directory.
fn remove_simple(directory: &OwnedFd, name: &[u8]) -> nix::Result<bool> {
    match unlinkat(directory, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => return Ok(true),
        // A directory is EISDIR on Linux, EPERM in POSIX.
        Err(Errno::EISDIR | Errno::EPERM) => {}
        Err(errno) => return Err(errno),
    }
    // EBUSY for a mount point, even of the same device.
    match unlinkat(directory, name, UnlinkatFlags::RemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(true),
        Err(Errno::ENOTEMPTY | Errno::EEXIST) => Ok(false),
        // No directory after all: removing the file was not permitted.
        Err(Errno::ENOTDIR) => Err(Errno::EPERM),
        Err(errno) => Err(errno),
    }
}

/// Appends a batch of a directory's names; returns whether there are more.
fn read_names(directory: &OwnedFd, into: &mut PendingNames) -> nix::Result<bool> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut directory = match Dir::openat(directory, ".", flags, Mode::empty()) {
        // The directory itself was removed.
        Err(Errno::ENOENT) => return Ok(false),
        opened => opened?,
    };
    let first = into.names.len();
    for found in directory.iter() {
        let found = found?;
        let name = found.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        if into.names.len() - first >= into.batch {
            return Ok(true);
        }
        into.add(name);
    }
    Ok(false)
}
