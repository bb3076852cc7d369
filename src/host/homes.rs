//! The directory that homes are in: one server's, nobody else's to change, and cleared of what an
//! earlier server left.
//!
//! Homes are made and removed below its descriptor, by `files`; here is what makes it fit for that.

use std::fs::{DirBuilder, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::fcntl::{Flock, FlockArg, OFlag, open};
use nix::sys::stat::{Mode, fstat};

use super::table::is_id;
use crate::confine::is_among_programs;
use crate::error::{Error, Kind, Result};
use crate::files::{self, Disk};
use crate::logging;
use crate::sys::{ActingAs, User};

/// Where homes are made.
pub(super) struct Homes {
    path: PathBuf,
    directory: OwnedFd,
    /// Held for as long as the server lives: homes are one server's.
    _lock: Flock<File>,
}

impl Homes {
    /// Opens where homes are made, making it if need be, and takes it for this server.
    ///
    /// # Errors
    /// It is no place for homes: the text says why.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let failed = |error: std::io::Error| {
            Error::io(format_args!("cannot use SBX_HOMES_DIR {shown}"), &error)
        };
        let refused = |why: &str| {
            let text = format!("cannot use SBX_HOMES_DIR {shown}: {why}");
            Err(Error::new(Kind::System, text))
        };
        // What is not there yet is no link.
        let existing = path.ancestors().find(|above| above.exists());
        if existing.is_some_and(is_among_programs) {
            return refused(
                "every sandbox may read what is there; choose a directory outside of the system's",
            );
        }
        // Everybody may pass through, to a home of one's own, and nobody look around.
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
                "others may write to it; it must be root's and nobody else's to change",
            );
        }
        let file = File::from(directory.try_clone().map_err(failed)?);
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Self {
                path: path.to_owned(),
                directory,
                _lock: lock,
            }),
            Err(_) => refused("another server has its sandboxes there"),
        }
    }

    /// Where a home is.
    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The space that there is for them.
    pub(super) fn disk(&self) -> Option<Disk> {
        Disk::of(&self.directory)
    }

    /// Makes the home of this name.
    ///
    /// # Errors
    /// As [`files::make_home`].
    pub(super) fn make(&self, name: &str, owner: User) -> Result<OwnedFd> {
        files::make_home(&self.directory, name.as_bytes(), owner)
    }

    /// Removes it; false if it is not all gone when the `deadline` has come.
    ///
    /// # Errors
    /// As [`files::remove_home`].
    pub(super) fn remove(&self, name: &str, deadline: Option<Instant>) -> Result<bool> {
        files::remove_home(&self.directory, name.as_bytes(), deadline)
    }

    /// Makes a home and removes it: what would be missing for that is better known now.
    ///
    /// # Errors
    /// It cannot be made or removed.
    pub(super) fn try_one(&self, name: &str, owner: User) -> Result<()> {
        drop(self.make(name, owner)?);
        self.remove(name, None).map(drop)
    }

    /// Whether sandboxes can get to where homes are made.
    ///
    /// # Errors
    /// This one cannot.
    pub(super) fn check_way(&self, user: User) -> Result<()> {
        let look = || {
            let _acting = ActingAs::new(user)?;
            let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
            open(&self.path.join("."), flags, Mode::empty())
        };
        look().map(drop).map_err(|errno| {
            let path = self.path.display();
            Error::system(
                format_args!(
                    "cannot use SBX_HOMES_DIR {path}: sandboxes could not enter it, or a directory above it"
                ),
                errno,
            )
        })
    }

    /// Removes the homes that an earlier server left because it was killed.
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
