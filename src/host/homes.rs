//! The directory of homes (`SBX_HOMES_DIR`): locked by one server, and writable only by root.
//!
//! `files` makes and removes single homes below the directory's descriptor.

use std::fs::{DirBuilder, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, Flock, FlockArg, OFlag};
use nix::sys::stat::{FchmodatFlags, Mode, fstat};

use super::claims::{LOCK_LIMIT, LOCK_PAUSE};
use super::ids::is_id;
use crate::codec::sort::sort;
use crate::confine::is_among_programs;
use crate::error::{Error, Kind, Result, cause};
use crate::files::{self, Disk};
use crate::sys::paths::{fchmodat, fstatat, mkdirat, open, openat, renameat};
use crate::sys::{ActingAs, User};

/// Where homes and records are put that belong to no sandbox. The name is no id.
const ASIDE: &str = ".aside";

/// A home that is made at the start and removed at once. The name is no id: what a server leaves of it that is killed then
/// is nobody's home, and the next one removes it.
const TRIAL: &str = ".trial";

/// How directories are opened whose names others cannot choose, or may have made a link of.
const HOME: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

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
        match lock_alone(&directory).map_err(failed)? {
            Some(lock) => Ok(Self {
                path: path.to_owned(),
                directory,
                _lock: lock,
            }),
            None => refused("another server has its sandboxes there"),
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

    /// Makes a home and removes it.
    ///
    /// # Errors
    /// As [`files::make_home`] and [`files::remove_home`].
    pub(super) fn make_trial(&self, owner: User) -> Result<()> {
        let mut made = self.make(TRIAL, owner);
        if matches!(&made, Err(error) if error.kind() == Kind::Exists) {
            self.remove(TRIAL, None)?;
            made = self.make(TRIAL, owner);
        }
        drop(made?);
        self.remove(TRIAL, None).map(drop)
    }

    /// Makes a home for the root of a sandbox that is tried out.
    ///
    /// # Errors
    /// As [`Homes::make_trial`].
    pub(super) fn make_trial_root(&self, owner: User) -> Result<OwnedFd> {
        self.remove(TRIAL, None)?;
        let home = self.make(TRIAL, owner)?;
        make_directories(&home).map_err(|errno| Error::system("cannot make a root", errno))?;
        Ok(home)
    }

    /// Removes what was tried out.
    ///
    /// # Errors
    /// As [`files::remove_home`].
    pub(super) fn remove_trial(&self) -> Result<bool> {
        self.remove(TRIAL, None)
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

    /// Opens the home of a sandbox that exists.
    ///
    /// # Errors
    /// It is no directory, or of somebody else.
    pub(super) fn open_home(&self, id: &str, owner: User) -> Result<OwnedFd> {
        let act = format_args!("cannot open the home of sandbox {id}");
        let home = openat(&self.directory, id, HOME, Mode::empty());
        let home = home.map_err(|errno| Error::system(act, errno))?;
        match fstat(&home) {
            Ok(status) if status.st_uid == owner.uid => Ok(home),
            Ok(_) => Err(Error::system(act, Errno::EPERM)),
            Err(errno) => Err(Error::system(act, errno)),
        }
    }

    /// Why the home of a sandbox is not the one that its record means; `None` if it is.
    pub(super) fn objection(&self, id: &str, uid: u32) -> Option<String> {
        let flags = AtFlags::AT_SYMLINK_NOFOLLOW;
        match fstatat(&self.directory, id, flags) {
            Err(Errno::ENOENT) => Some("it has no home".to_owned()),
            Err(errno) => Some(format!("its home cannot be used: {}", cause(errno))),
            Ok(status) if status.st_mode & libc::S_IFMT != libc::S_IFDIR => {
                Some("its home is no directory".to_owned())
            }
            Ok(status) if status.st_uid != uid => {
                let owner = status.st_uid;
                Some(format!(
                    "its home belongs to uid {owner}, and its record says {uid}"
                ))
            }
            Ok(_) => None,
        }
    }

    /// The uid of a home; `None` if there is none.
    pub(super) fn owner(&self, id: &str) -> Option<u32> {
        let status = fstatat(&self.directory, id, AtFlags::AT_SYMLINK_NOFOLLOW);
        status.ok().map(|status| status.st_uid)
    }

    /// The names of homes that there are.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn ids(&self) -> Result<Vec<String>> {
        ids_in(&self.directory).map_err(|errno| Error::system("cannot read SBX_HOMES_DIR", errno))
    }

    /// The directory that the homes are in.
    ///
    /// # Errors
    /// `System` if there is no descriptor left.
    pub(super) fn directory(&self) -> Result<OwnedFd> {
        let copy = self.directory.try_clone();
        copy.map_err(|error| Error::io("cannot open the homes", &error))
    }

    /// Opens a directory among the homes that only root can enter, and makes it if it is missing.
    ///
    /// # Errors
    /// `System` if it is unsuitable.
    pub(super) fn private_directory(&self, name: &str) -> Result<OwnedFd> {
        open_private(&self.directory, name).map_err(|errno| {
            let path = self.path.join(name);
            let text = format!(
                "cannot use {}, which must be a directory of root alone: {}",
                path.display(),
                cause(errno)
            );
            Error::new(Kind::System, text)
        })
    }

    /// Opens a directory among the homes that only root can enter; `None` if it is missing.
    ///
    /// # Errors
    /// It is no such directory.
    pub(super) fn existing_directory(&self, name: &str) -> nix::Result<Option<OwnedFd>> {
        match open_existing(&self.directory, name) {
            Ok(directory) => Ok(Some(directory)),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Where homes and records are put that belong to no sandbox.
    ///
    /// # Errors
    /// `System` if the directory is unsuitable.
    pub(super) fn aside(&self) -> Result<Aside> {
        Ok(Aside {
            path: self.path.join(ASIDE),
            directory: self.private_directory(ASIDE)?,
        })
    }
}

/// Makes the directories of a root's own files in a home.
///
/// # Errors
/// That of mkdir(2) or chmod(2).
pub(super) fn make_directories(home: &OwnedFd) -> nix::Result<()> {
    for (name, mode) in [("up", 0o755), ("work", 0o700)] {
        let mode = Mode::from_bits_truncate(mode);
        match mkdirat(home, name, mode) {
            Ok(()) => fchmodat(home, name, mode, FchmodatFlags::NoFollowSymlink)?,
            Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// The directory of what belongs to no sandbox.
pub(super) struct Aside {
    path: PathBuf,
    directory: OwnedFd,
}

impl Aside {
    pub(super) fn path(&self) -> PathBuf {
        self.path.clone()
    }

    pub(super) fn descriptor(&self) -> &OwnedFd {
        &self.directory
    }

    /// The sandboxes of which there is something.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn ids(&self) -> Result<Vec<String>> {
        let mut ids = self.names()?;
        for id in &mut ids {
            if let Some((own, _)) = id.split_once('.') {
                *id = own.to_owned();
            }
        }
        sort(&mut ids);
        ids.dedup();
        Ok(ids)
    }

    /// The uids that the homes have.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn owners(&self) -> Result<Vec<u32>> {
        let owner = |name: &String| {
            let status = fstatat(&self.directory, name.as_str(), AtFlags::AT_SYMLINK_NOFOLLOW);
            status.ok().map(|status| status.st_uid)
        };
        Ok(self.names()?.iter().filter_map(owner).collect())
    }

    /// Moves the home of a sandbox here, if it has one.
    ///
    /// # Errors
    /// It cannot be moved, for example because one of the same name is here.
    pub(super) fn take(&self, homes: &Homes, id: &str) -> nix::Result<()> {
        match renameat(&homes.directory, id, &self.directory, id) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    fn names(&self) -> Result<Vec<String>> {
        names_in(&self.directory).map_err(|errno| {
            let act = format_args!("cannot read {}", self.path.display());
            Error::system(act, errno)
        })
    }
}

/// Locks a directory for this server alone; `None` if another one keeps it.
///
/// # Errors
/// That of flock(2).
pub(super) fn lock_alone(directory: &OwnedFd) -> std::io::Result<Option<Flock<File>>> {
    let mut file = File::from(directory.try_clone()?);
    let deadline = Instant::now() + LOCK_LIMIT;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(Some(lock)),
            Err((_, Errno::EWOULDBLOCK)) if Instant::now() >= deadline => return Ok(None),
            Err((unlocked, Errno::EWOULDBLOCK)) => file = unlocked,
            Err((_, errno)) => return Err(errno.into()),
        }
        thread::sleep(LOCK_PAUSE);
    }
}

/// The names in a directory.
pub(super) fn names_in(directory: &OwnedFd) -> nix::Result<Vec<String>> {
    let mut names = Vec::new();
    let mut opened = Dir::from_fd(openat(directory, ".", HOME, Mode::empty())?)?;
    for entry in opened.iter() {
        if let Ok(name) = entry?.file_name().to_str()
            && name != "."
            && name != ".."
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

fn ids_in(directory: &OwnedFd) -> nix::Result<Vec<String>> {
    let mut names = names_in(directory)?;
    names.retain(|name| is_id(name));
    Ok(names)
}

/// Opens a directory that only root can enter, and makes it if it is missing.
///
/// # Errors
/// The directory cannot be made; `EPERM` if something else has the name.
pub(super) fn open_private(parent: &OwnedFd, name: &str) -> nix::Result<OwnedFd> {
    match mkdirat(parent, name, Mode::S_IRWXU) {
        // Instead of EEXIST on a read-only file system.
        Ok(()) | Err(Errno::EEXIST | Errno::EROFS) => {}
        Err(errno) => return Err(errno),
    }
    open_existing(parent, name)
}

fn open_existing(parent: &OwnedFd, name: &str) -> nix::Result<OwnedFd> {
    private(openat(parent, name, HOME, Mode::empty())?)
}

/// Opens a directory that only root can enter.
///
/// # Errors
/// That of open(2); `EPERM` if others can enter it.
pub(super) fn open_private_at(path: &Path) -> nix::Result<OwnedFd> {
    private(open(path, HOME, Mode::empty())?)
}

fn private(directory: OwnedFd) -> nix::Result<OwnedFd> {
    let status = fstat(&directory)?;
    let is_ours = status.st_uid == 0 && status.st_mode.trailing_zeros() >= 6;
    is_ours.then_some(directory).ok_or(Errno::EPERM)
}
