//! Where the paths of a workspace begin, and the one place where they are resolved.
//!
//! Nothing outside this file sees the descriptor that paths begin at. Whoever acts on a path asks
//! for a descriptor of what it leads to, or for a [`Place`]: the directory, held open, and the last
//! name in it. What a path may cross on its way is thereby the root's alone, and what was looked at
//! is what is acted on, whatever happens to the names above it meanwhile.
//!
//! A [`Place`] is as safe as the resolving that led to it: its directory is beneath the root, its name
//! has no slash and is neither `.` nor `..`, and no call that takes the two follows a link.

use std::fmt;
use std::fs::File;
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat};
use nix::sys::stat::{FchmodatFlags, FileStat, Mode, fchmodat, fstat, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::beneath::Resolver;
use super::name::{FilePath, split};
use crate::error::{Error, Kind, Result};
use crate::sys::{ActingAs, User};

/// Links followed at the end of one path before it is taken for a loop, as in the kernel.
const MAX_LINKS: usize = 40;

/// Enough to find names in a directory, and to be one: reading it needs more.
pub(super) const DIRECTORY: OFlag = OFlag::O_PATH
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_CLOEXEC);

/// Where the paths of a workspace begin.
pub struct Root {
    beginning: Arc<OwnedFd>,
    resolution: Resolution,
    /// Whether what is written to a link goes to its target; else it is refused.
    follows_last_link: bool,
    /// Whether a link is shown as large as its target, which is what whoever reads it gets.
    pub(super) sizes_links_by_target: bool,
}

/// What a path means to the kernel.
enum Resolution {
    /// What it means to any program on the machine: relative ones begin at the descriptor, and
    /// links lead anywhere.
    Machine,
    /// What it means to somebody for whom the descriptor is all there is: a leading slash is the
    /// descriptor, nothing leads out of it, and links lead nowhere.
    Beneath { resolver: Resolver, owner: User },
}

/// A root in use: while it lives, the calling thread is to files who the root's files belong to.
///
/// The kernel thereby stands twice between a client and what is not its own: paths do not lead out,
/// and if one did, its owner might not open what is there. What is made belongs to the owner with
/// no second step, and has the mode that a command's umask would give it, which is the server's.
/// The server keeps its other privileges meanwhile, of which one shows: it may use the blocks that a
/// file system reserves (`CAP_SYS_RESOURCE`).
pub struct Files<'root> {
    root: &'root Root,
    _acting: Option<ActingAs>,
}

impl Deref for Files<'_> {
    type Target = Root;

    fn deref(&self) -> &Root {
        self.root
    }
}

/// What is done about directories that are missing on a path.
#[derive(Clone, Copy)]
pub(super) enum Missing {
    Refuse,
    Make,
    /// They are made, unless that would be inside this directory.
    MakeOutside(Identity),
}

/// What tells one file from every other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity(u64, u64);

impl Identity {
    pub(super) fn of(status: &FileStat) -> Self {
        Self(status.st_dev, status.st_ino)
    }

    pub(super) fn of_open(file: impl AsFd) -> std::result::Result<Self, Errno> {
        fstat(file).map(|status| Self::of(&status))
    }
}

impl Root {
    /// The whole machine, relative paths beginning at `directory`.
    ///
    /// # Errors
    /// The directory cannot be opened.
    pub fn machine(directory: &Path) -> Result<Self> {
        let beginning = nix::fcntl::open(directory, DIRECTORY, Mode::empty()).map_err(|errno| {
            Error::system(format_args!("cannot open {}", directory.display()), errno)
        })?;
        Ok(Self {
            beginning: Arc::new(beginning),
            resolution: Resolution::Machine,
            follows_last_link: true,
            sizes_links_by_target: true,
        })
    }

    /// Everything beneath `directory`, as its `owner`.
    pub fn home(directory: impl Into<Arc<OwnedFd>>, owner: User) -> Self {
        let directory = directory.into();
        let resolver = Resolver::of_machine(&directory);
        Self::beneath(directory, owner, resolver)
    }

    pub(super) fn beneath(
        directory: impl Into<Arc<OwnedFd>>,
        owner: User,
        resolver: Resolver,
    ) -> Self {
        Self {
            beginning: directory.into(),
            resolution: Resolution::Beneath { resolver, owner },
            follows_last_link: false,
            sizes_links_by_target: false,
        }
    }

    /// The right to use the root on this thread, until the value is dropped.
    ///
    /// # Errors
    /// The server may not act as the owner.
    pub fn files(&self) -> Result<Files<'_>> {
        let acting = match self.resolution {
            Resolution::Machine => None,
            Resolution::Beneath { owner, .. } => {
                let acting = ActingAs::new(owner).map_err(|errno| {
                    Error::system(format_args!("cannot act as uid {}", owner.uid), errno)
                })?;
                Some(acting)
            }
        };
        Ok(Files {
            root: self,
            _acting: acting,
        })
    }

    /// The error of an act for which a path had to be resolved.
    pub(super) fn error(&self, act: impl fmt::Display, errno: Errno) -> Error {
        let why = match (&self.resolution, errno) {
            (Resolution::Beneath { .. }, Errno::ELOOP) => {
                "it is a symbolic link, or goes through one, and links are not followed here"
            }
            (Resolution::Beneath { .. }, Errno::EXDEV) => "it is outside the sandbox",
            _ => return opening_error(act, errno),
        };
        Error::new(Kind::Forbidden, format!("{act}: {why} ({errno:?})"))
    }

    /// Opens what a path leads to.
    pub(super) fn resolve(&self, path: &[u8], flags: OFlag) -> std::result::Result<OwnedFd, Errno> {
        match self.resolution {
            Resolution::Machine => openat(
                &self.beginning,
                path,
                flags | OFlag::O_CLOEXEC,
                Mode::empty(),
            ),
            Resolution::Beneath { resolver, .. } => resolver.open(&self.beginning, path, flags),
        }
    }

    /// The status of what `resolve` would open, in one call where the kernel has one.
    pub(super) fn status(
        &self,
        path: &[u8],
        flags: AtFlags,
    ) -> std::result::Result<FileStat, Errno> {
        match self.resolution {
            Resolution::Machine => fstatat(&self.beginning, path, flags),
            Resolution::Beneath { .. } => {
                let itself = if flags.contains(AtFlags::AT_SYMLINK_NOFOLLOW) {
                    OFlag::O_NOFOLLOW
                } else {
                    OFlag::empty()
                };
                fstat(self.resolve(path, OFlag::O_PATH | itself)?)
            }
        }
    }

    /// Opens a directory.
    pub(super) fn directory(
        &self,
        path: &[u8],
        missing: Missing,
    ) -> std::result::Result<OwnedFd, Errno> {
        // The first that exists is found by going up, and the others are made one below the other,
        // without recursion: a path of thousands of components costs no stack.
        let mut names = Vec::new();
        let mut above = path;
        let mut current = loop {
            match self.resolve(above, DIRECTORY) {
                Err(Errno::ENOENT) if !matches!(missing, Missing::Refuse) => {}
                other => break other?,
            }
            let (parent, name) = split(above).ok_or(Errno::ENOENT)?;
            if parent == above {
                return Err(Errno::ENOENT);
            }
            names.push(name);
            above = parent;
        };
        if let Missing::MakeOutside(other) = missing
            && !names.is_empty()
            && self.lies_within(&current, other)?
        {
            return Err(Errno::EINVAL);
        }
        while let Some(name) = names.pop() {
            match mkdirat(&current, name, Mode::from_bits_truncate(0o777)) {
                // Somebody else was faster: parallel uploads make the same parents.
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(errno) => return Err(errno),
            }
            let flags = DIRECTORY | OFlag::O_NOFOLLOW;
            current = openat(&current, name, flags, Mode::empty())?;
        }
        Ok(current)
    }

    /// The place that a path names: its directory is opened, its last name need not exist.
    ///
    /// # Errors
    /// The path ends in no name of its own, or its directory cannot be opened.
    pub(super) fn place(&self, path: &FilePath, missing: Missing) -> Result<Place> {
        let Some((directory, name)) = split(path.bytes()) else {
            let is_root = path.bytes().iter().all(|byte| *byte == b'/');
            // `.` and `a/..` may be the home, which is not its owner's to move or delete.
            let kind = match self.resolution {
                Resolution::Machine if !is_root => Kind::Invalid,
                _ => Kind::Forbidden,
            };
            return Err(Error::new(
                kind,
                format!("cannot change {path}: the path must end in a name of its own"),
            ));
        };
        let directory = self.directory(directory, missing).map_err(|errno| {
            self.error(format_args!("cannot open the directory of {path}"), errno)
        })?;
        Ok(Place {
            directory,
            name: name.to_vec(),
        })
    }

    /// The place whose content is written under a path, and what is there. Links at the end are
    /// followed by hand, because what replaces a file must take the place of the link's target and
    /// not of the link.
    ///
    /// # Errors
    /// The path names a directory, or its directory cannot be opened.
    pub(super) fn target(
        &self,
        path: &FilePath,
        make_parents: bool,
    ) -> Result<(Place, Option<FileStat>)> {
        let failed = |errno| self.error(format_args!("cannot write {path}"), errno);
        if path.bytes().ends_with(b"/") {
            return Err(Error::new(
                Kind::IsDirectory,
                format!("cannot write {path}: it names a directory"),
            ));
        }
        let missing = if make_parents {
            Missing::Make
        } else {
            Missing::Refuse
        };
        let mut place = self.place(path, missing)?;
        for _ in 0..MAX_LINKS {
            let existing = place.existing().map_err(failed)?;
            if existing.is_none_or(|existing| existing.st_mode & libc::S_IFMT != libc::S_IFLNK) {
                if existing.is_some() && self.is_outside(path.bytes()) {
                    return Err(failed(Errno::EXDEV));
                }
                return Ok((place, existing));
            }
            if !self.follows_last_link {
                break;
            }
            let target = place.link_target().map_err(failed)?;
            let (parent, name) = split(&target).ok_or_else(|| failed(Errno::EISDIR))?;
            place = Place {
                directory: openat(&place.directory, parent, DIRECTORY, Mode::empty())
                    .map_err(failed)?,
                name: name.to_vec(),
            };
        }
        Err(failed(Errno::ELOOP))
    }

    /// Whether something is mounted over the last name of a path, which acting on a [`Place`] would
    /// not notice.
    fn is_outside(&self, path: &[u8]) -> bool {
        match self.resolution {
            Resolution::Machine => false,
            Resolution::Beneath { .. } => {
                let itself = OFlag::O_PATH | OFlag::O_NOFOLLOW;
                matches!(self.resolve(path, itself), Err(Errno::EXDEV))
            }
        }
    }

    /// Whether a directory is another one, or below it.
    fn lies_within(
        &self,
        directory: &OwnedFd,
        other: Identity,
    ) -> std::result::Result<bool, Errno> {
        // Above a home there is nothing to compare with, and its owner may not go there.
        let top = match self.resolution {
            Resolution::Machine => None,
            Resolution::Beneath { .. } => Some(Identity::of_open(&self.beginning)?),
        };
        let mut current = openat(directory, ".", DIRECTORY, Mode::empty())?;
        let mut here = Identity::of_open(&current)?;
        while here != other {
            if top == Some(here) {
                return Ok(false);
            }
            current = openat(&current, "..", DIRECTORY, Mode::empty())?;
            let above = Identity::of_open(&current)?;
            // The root is its own parent.
            if above == here {
                return Ok(false);
            }
            here = above;
        }
        Ok(true)
    }
}

/// The error of an act for which a file had to be opened. Nothing is waited for when one is opened,
/// and the one thing that a regular file can make wait for is who has a lease on it: opening it has
/// told that program, and within 45 s the kernel takes the lease away (fcntl(2), `F_SETLEASE`).
pub(super) fn opening_error(act: impl fmt::Display, errno: Errno) -> Error {
    match errno {
        Errno::EAGAIN => Error::new(
            Kind::Leased,
            format!(
                "{act}: a program holds a lease on it, which it was told to give up; try again ({errno:?})"
            ),
        ),
        errno => Error::system(act, errno),
    }
}

/// A name in a directory that is held open. Nothing done here follows a link.
pub(super) struct Place {
    pub(super) directory: OwnedFd,
    pub(super) name: Vec<u8>,
}

impl Place {
    pub(super) fn status(&self) -> std::result::Result<FileStat, Errno> {
        fstatat(
            &self.directory,
            self.name.as_slice(),
            AtFlags::AT_SYMLINK_NOFOLLOW,
        )
    }

    /// What is there, if anything is.
    pub(super) fn existing(&self) -> std::result::Result<Option<FileStat>, Errno> {
        match self.status() {
            Err(Errno::ENOENT) => Ok(None),
            status => status.map(Some),
        }
    }

    /// Opens what is there, without waiting for whoever may be at its other end.
    pub(super) fn open(&self, flags: OFlag) -> std::result::Result<File, Errno> {
        let careful = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        openat(
            &self.directory,
            self.name.as_slice(),
            flags | careful,
            Mode::from_bits_truncate(0o666),
        )
        .map(File::from)
    }

    pub(super) fn set_mode(&self, mode: u32) -> std::result::Result<(), Errno> {
        fchmodat(
            &self.directory,
            self.name.as_slice(),
            Mode::from_bits_truncate(mode),
            FchmodatFlags::NoFollowSymlink,
        )
    }

    pub(super) fn link_target(&self) -> std::result::Result<Vec<u8>, Errno> {
        link_target(&self.directory, &self.name)
    }

    /// Removes anything but a directory.
    pub(super) fn unlink(&self) -> std::result::Result<(), Errno> {
        unlinkat(
            &self.directory,
            self.name.as_slice(),
            UnlinkatFlags::NoRemoveDir,
        )
    }
}

/// Where the link `name` in `directory` points to; the link that is open itself if `name` is empty.
pub(super) fn link_target(
    directory: &impl AsFd,
    name: &[u8],
) -> std::result::Result<Vec<u8>, Errno> {
    use std::os::unix::ffi::OsStringExt;
    readlinkat(directory, name).map(OsStringExt::into_vec)
}
