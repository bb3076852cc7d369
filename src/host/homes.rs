//! The directory of homes (`SBX_HOMES_DIR`): locked by one server, writable only by root, and cleared of
//! what an earlier server left.
//!
//! `files` makes and removes single homes below the directory's descriptor.

use std::fs::{DirBuilder, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag, open};
use nix::sys::stat::{Mode, fstat};

use super::claims::{LOCK_LIMIT, LOCK_PAUSE};
use super::table::is_id;
use crate::confine::is_among_programs;
use crate::error::{Error, Kind, Result};
use crate::files::{self, Disk};
use crate::logging;
use crate::sys::{ActingAs, User};

/// The directory of homes, open.
pub(super) struct Homes {
    pub(super) path: PathBuf,
    directory: OwnedFd,
    /// Held as long as the server lives: two servers must not share homes.
    _lock: Flock<File>,
}

impl Homes {
    /// Opens the directory, makes it if it is missing, and locks it.
    ///
    /// # Errors
    /// `System` if the directory is unsuitable: the text says why.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let failed = |error: std::io::Error| {
            Error::io(format_args!("cannot use SBX_HOMES_DIR {shown}"), &error)
        };
        let refused = |why: &str| {
            let text = format!("cannot use SBX_HOMES_DIR {shown}: {why}");
            Err(Error::new(Kind::System, text))
        };
        // Missing components are made, so they are no links.
        let existing = path.ancestors().find(|above| above.exists());
        if existing.is_some_and(is_among_programs) {
            return refused(
                "every sandbox may read this directory; choose one outside of the system directories",
            );
        }
        // Mode 0711: users may pass through to their own home, but not list the directory.
        DirBuilder::new()
            .recursive(true)
            .mode(0o711)
            .create(path)
            .map_err(failed)?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let directory = open(path, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
        let status = fstat(&directory).map_err(|errno| failed(errno.into()))?;
        if status.st_uid != 0 || status.st_mode & 0o022 != 0 {
            return refused(
                "others may write to it; it must belong to root and be writable only by root",
            );
        }
        let mut file = File::from(directory.try_clone().map_err(failed)?);
        let deadline = Instant::now() + LOCK_LIMIT;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => {
                    return Ok(Self {
                        path: path.to_owned(),
                        directory,
                        _lock: lock,
                    });
                }
                Err((_, Errno::EWOULDBLOCK)) if Instant::now() >= deadline => {
                    return refused("another server has its sandboxes there");
                }
                Err((unlocked, Errno::EWOULDBLOCK)) => file = unlocked,
                Err((_, errno)) => return Err(failed(errno.into())),
            }
            thread::sleep(LOCK_PAUSE);
        }
    }

    /// The space of the file system.
    pub(super) fn disk(&self) -> Option<Disk> {
        Disk::of(&self.directory)
    }

    /// Makes a home.
    ///
    /// # Errors
    /// As [`files::make_home`].
    pub(super) fn make(&self, name: &str, owner: User) -> Result<OwnedFd> {
        files::make_home(&self.directory, name.as_bytes(), owner)
    }

    /// Removes a home; false if something is left at the `deadline`.
    ///
    /// # Errors
    /// As [`files::remove_home`].
    pub(super) fn remove(&self, name: &str, deadline: Option<Instant>) -> Result<bool> {
        files::remove_home(&self.directory, name.as_bytes(), deadline)
    }

    /// Checks that the user of a sandbox can reach the directory.
    ///
    /// # Errors
    /// `Forbidden` if it cannot.
    pub(super) fn check_reachable(&self, user: User) -> Result<()> {
        let (inside, flags) = (self.path.join("."), OFlag::O_PATH | OFlag::O_CLOEXEC);
        let opened = ActingAs::new(user).and_then(|_acting| open(&inside, flags, Mode::empty()));
        opened.map(drop).map_err(|errno| {
            let path = self.path.display();
            let act = format!(
                "cannot use SBX_HOMES_DIR {path}: sandboxes could not enter it, or a directory above it"
            );
            Error::system(act, errno)
        })
    }

    /// Removes the homes that a killed server left.
    pub(super) fn sweep(&self) {
        let Ok(entries) = std::fs::read_dir(&self.path) else {
            return;
        };
        for name in entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
            if is_id(&name)
                && let Err(error) = self.remove(&name, None)
            {
                logging::info(format_args!("cannot remove the old home {name}: {error}"));
            }
        }
    }
}
