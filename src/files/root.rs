//! Where the paths of a workspace begin, and the one place that resolves them.
//!
//! Nothing outside this file sees the descriptor that paths begin at. An operation asks for a
//! descriptor of the file, or for a [`NameAt`]: the directory, held open, and the last name in it. So
//! the root alone decides what a path may cross, and renames above it do not matter any more.

use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat};
use nix::sys::stat::{FchmodatFlags, FileStat, Mode, fchmodat, fstat, fstatat, mkdirat};
use nix::unistd::geteuid;

use super::beneath::Resolver;
use super::entry::{DIRECTORY, Identity, open_found};
use super::name::{FilePath, Tree, split};
use super::name_at::NameAt;
use super::temporary::Temporary;
use crate::error::{Error, Kind, Result};
use crate::sys::{ActingAs, User};

/// Links that are followed at the end of a path, as in the kernel (`path_resolution(7)`).
const MAX_LINKS: usize = 40;

/// In [`Root::acting`]: no other thread may begin to act as the owner.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// The directory that the paths of a workspace begin at.
pub struct Root {
    directory: Arc<OwnedFd>,
    /// [`Tree::Temporary`].
    temporary: Temporary,
    resolution: Resolution,
    /// Whether a write to a link goes to its target; otherwise it is refused.
    follows_last_link: bool,
    /// Whether a link is shown with the size of its target, which is what a read returns.
    pub(super) sizes_links_by_target: bool,
    /// How many times threads act as the owner at the moment, and whether others may begin to.
    acting: AtomicUsize,
}

/// How paths are resolved.
enum Resolution {
    /// As for any program on the machine: relative paths begin at the directory, links lead anywhere.
    Machine,
    /// As if the directory were the root: a leading slash means the directory, no path leads out of
    /// it, and no link is followed.
    Beneath { resolver: Resolver, owner: User },
}

/// A root in use: while the value lives, the calling thread accesses files as their owner.
///
/// So the kernel protects other files twice: paths do not lead out, and if one did, the owner could
/// not open what it leads to. New files belong to the owner from the start, with the mode that the
/// server's umask gives them. The thread keeps its other privileges; one of them shows: it may use the
/// blocks that a file system reserves (`CAP_SYS_RESOURCE`).
pub struct Files<'root> {
    root: &'root Root,
    _acting: Option<ActingAs>,
    /// Ends after the acting.
    _counted: Counted<'root>,
}

/// A thread that acts as the owner, or is about to.
struct Counted<'root>(&'root AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Deref for Files<'_> {
    type Target = Root;

    fn deref(&self) -> &Root {
        self.root
    }
}

/// What to do about missing directories of a path.
#[derive(Clone, Copy)]
pub(super) enum Missing {
    Refuse,
    Make,
    /// Makes them, unless that would be inside this directory.
    MakeOutside(Identity),
}

impl Root {
    /// The whole machine; relative paths begin at `directory`.
    ///
    /// # Errors
    /// The directory cannot be opened.
    pub fn machine(directory: &Path) -> Result<Self> {
        let directory_fd = open(directory, DIRECTORY, Mode::empty()).map_err(|errno| {
            Error::system(format_args!("cannot open {}", directory.display()), errno)
        })?;
        Ok(Self {
            directory: Arc::new(directory_fd),
            temporary: Temporary::default(),
            resolution: Resolution::Machine,
            follows_last_link: true,
            sizes_links_by_target: true,
            acting: AtomicUsize::new(0),
        })
    }

    /// What is beneath `directory`, accessed as its `owner`.
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
            directory: directory.into(),
            temporary: Temporary::default(),
            resolution: Resolution::Beneath { resolver, owner },
            follows_last_link: false,
            sizes_links_by_target: false,
            acting: AtomicUsize::new(0),
        }
    }

    /// A run begins, with a tree of temporary files if it has one, and these file systems in memory.
    pub fn begin_run(&self, temporary: Option<OwnedFd>, in_memory: &[OwnedFd]) {
        self.temporary.begin(temporary, in_memory);
    }

    /// The run is over: there is no tree of temporary files any more.
    pub fn end_run(&self) {
        self.temporary.end();
    }

    /// Whether there is such a tree.
    pub fn has_temporary(&self) -> bool {
        self.temporary.start().is_some()
    }

    /// Of how many runs, the present one included, a request or a process of another sandbox keeps something in memory.
    pub fn kept_runs(&self) -> usize {
        self.temporary.count_kept()
    }

    /// Whether files can be given to any user: by root of a machine that is one sandbox.
    pub fn may_set_owners(&self) -> bool {
        self.is_whole_machine() && geteuid().is_root()
    }

    /// Lets no thread begin to act as the owner, whose uid another sandbox gets as soon as this root is not
    /// [in use](Self::is_in_use) any more.
    pub fn close(&self) {
        if matches!(self.resolution, Resolution::Beneath { .. }) {
            self.acting.fetch_or(CLOSED, Ordering::SeqCst);
        }
    }

    /// Whether it is closed, so that what is in it is removed by others.
    pub(super) fn is_closed(&self) -> bool {
        self.acting.load(Ordering::SeqCst) & CLOSED != 0
    }

    /// Whether a thread acts as the owner.
    pub fn is_in_use(&self) -> bool {
        self.acting.load(Ordering::SeqCst) & !CLOSED != 0
    }

    /// Makes the calling thread act as the owner until the value is dropped.
    ///
    /// # Errors
    /// The server may not act as the owner; `NotFound` if the root is closed.
    pub fn files(&self) -> Result<Files<'_>> {
        let before = self.acting.fetch_add(1, Ordering::SeqCst);
        let counted = Counted(&self.acting);
        if before & CLOSED != 0 {
            return Err(Error::deleted());
        }
        let acting = match self.resolution {
            Resolution::Machine => None,
            Resolution::Beneath { owner, .. } => Some(ActingAs::new(owner).map_err(|errno| {
                Error::system(format_args!("cannot act as uid {}", owner.uid), errno)
            })?),
        };
        Ok(Files {
            root: self,
            _acting: acting,
            _counted: counted,
        })
    }

    /// Whether paths lead anywhere on the machine.
    pub(super) fn is_whole_machine(&self) -> bool {
        matches!(self.resolution, Resolution::Machine)
    }

    /// The directory that paths in a tree begin at. What is not there is outside.
    pub(super) fn start(&self, tree: Tree) -> nix::Result<Arc<OwnedFd>> {
        match tree {
            Tree::Main => Ok(Arc::clone(&self.directory)),
            Tree::Temporary => self.temporary.start().ok_or(Errno::EXDEV),
        }
    }

    /// The tree that a directory is in which was opened beneath this root.
    pub(super) fn tree_of(&self, directory: &OwnedFd) -> Tree {
        let device = |directory: &OwnedFd| fstat(directory).ok().map(|status| status.st_dev);
        let is_temporary = |start: &OwnedFd| device(start) == device(directory);
        match self.start(Tree::Temporary) {
            Ok(start) if is_temporary(&start) => Tree::Temporary,
            _ => Tree::Main,
        }
    }

    /// The path of a directory that was opened beneath this root, from the beginning of its tree and without links;
    /// empty for that beginning. Only a hint: the directory may be moved at any time.
    pub(super) fn path_of(&self, directory: &OwnedFd) -> Option<Vec<u8>> {
        let path = |directory: &OwnedFd| {
            let link = format!("/proc/self/fd/{}", directory.as_raw_fd());
            let path = std::fs::read_link(link).ok()?;
            Some(path.into_os_string().into_vec())
        };
        let path_of_it = path(directory)?;
        match self.resolution {
            Resolution::Machine => Some(path_of_it).filter(|path| path != b"/"),
            Resolution::Beneath { .. } => {
                let start = path(&*self.start(self.tree_of(directory)).ok()?)?;
                path_of_it.strip_prefix(&start[..]).map(<[u8]>::to_vec)
            }
        }
    }

    /// The error of an operation that resolved a path.
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

    /// Opens the file at a path.
    pub(super) fn resolve(&self, path: &FilePath, flags: OFlag) -> nix::Result<OwnedFd> {
        self.resolve_in(self.start(path.tree())?, path.bytes(), flags)
    }

    /// Opens a path that begins at a directory which was opened beneath this root. In a sandbox no pipe is opened.
    pub(super) fn resolve_in(
        &self,
        directory: impl AsFd,
        path: &[u8],
        flags: OFlag,
    ) -> nix::Result<OwnedFd> {
        match self.resolution {
            Resolution::Machine => {
                let flags = flags | OFlag::O_CLOEXEC;
                openat(directory, path, flags, Mode::empty())
            }
            // Neither opens a pipe.
            Resolution::Beneath { resolver, .. }
                if flags.intersects(OFlag::O_PATH | OFlag::O_DIRECTORY) =>
            {
                resolver.open(directory, path, flags)
            }
            Resolution::Beneath { resolver, .. } => {
                let find = OFlag::O_PATH | OFlag::O_NOFOLLOW;
                let found = resolver.open(&directory, path, find)?;
                open_found(&found, flags, || resolver.open(&directory, path, flags))
            }
        }
    }

    /// Whether a file belongs to the user that files are accessed as.
    pub(super) fn owns(&self, status: &FileStat) -> bool {
        let uid = match self.resolution {
            Resolution::Machine => geteuid().as_raw(),
            Resolution::Beneath { owner, .. } => owner.uid,
        };
        status.st_uid == uid
    }

    /// The status of the file that `resolve` would open, in one system call where there is one.
    pub(super) fn status(&self, path: &FilePath, flags: AtFlags) -> nix::Result<FileStat> {
        match self.resolution {
            Resolution::Machine => fstatat(self.start(path.tree())?, path.bytes(), flags),
            Resolution::Beneath { .. } => {
                let mut open_flags = OFlag::O_PATH;
                let nofollow = flags.contains(AtFlags::AT_SYMLINK_NOFOLLOW);
                open_flags.set(OFlag::O_NOFOLLOW, nofollow);
                fstat(self.resolve(path, open_flags)?)
            }
        }
    }

    pub(super) fn directory(&self, path: &FilePath, missing: Missing) -> nix::Result<OwnedFd> {
        self.directory_in(&*self.start(path.tree())?, path.bytes(), missing)
    }

    fn directory_in(&self, start: &OwnedFd, path: &[u8], missing: Missing) -> nix::Result<OwnedFd> {
        // Goes up to the first directory that exists, then makes the others one by one, without
        // recursion: a path of thousands of components costs no stack.
        let mut names = Vec::new();
        let mut above = path;
        let mut current = loop {
            match self.resolve_in(start, above, DIRECTORY) {
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
                // Parallel uploads make the same parents.
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(errno) => return Err(errno),
            }
            let flags = DIRECTORY | OFlag::O_NOFOLLOW;
            current = openat(&current, name, flags, Mode::empty())?;
        }
        Ok(current)
    }

    /// Makes a directory and its parents. An existing directory is no error, and gets the `mode` too.
    ///
    /// # Errors
    /// `NotDirectory` or `Exists` if something else is in the way.
    pub fn make_directory(&self, path: &FilePath, mode: Option<u32>) -> Result<()> {
        let make = || {
            let directory = self.directory(path, Missing::Make)?;
            let Some(mode) = mode.map(Mode::from_bits_truncate) else {
                return Ok(());
            };
            fchmodat(&directory, ".", mode, FchmodatFlags::FollowSymlink)
        };
        make().map_err(|errno| self.error(format_args!("cannot make directory {path}"), errno))
    }

    /// Opens the directory of a path; the last name need not exist.
    ///
    /// # Errors
    /// `Invalid` or `Forbidden` if the path ends in no name (`/`, `.`, `..`); or the directory cannot
    /// be opened.
    pub(super) fn name_at(&self, path: &FilePath, missing: Missing) -> Result<NameAt> {
        let Some((directory, name)) = split(path.bytes()) else {
            let is_root = path.bytes().iter().all(|byte| *byte == b'/');
            // `.` and `a/..` may be the home, which its owner may not move or delete.
            let kind = match self.resolution {
                Resolution::Machine if !is_root => Kind::Invalid,
                _ => Kind::Forbidden,
            };
            return Err(Error::new(
                kind,
                format!("cannot change {path}: the path must end in a name of its own"),
            ));
        };
        let opened = self
            .start(path.tree())
            .and_then(|start| self.directory_in(&start, directory, missing));
        let directory = opened.map_err(|errno| {
            self.error(format_args!("cannot open the directory of {path}"), errno)
        })?;
        Ok(NameAt {
            directory,
            name: name.to_vec(),
        })
    }

    /// The name that a write to a path changes, and the status of the file there. Links at the end are
    /// followed by hand: the new file must replace the target and not the link.
    ///
    /// # Errors
    /// `IsDirectory` if the path ends in a slash; `Forbidden` if a link may not be followed; or the
    /// directory cannot be opened.
    pub(super) fn target(
        &self,
        path: &FilePath,
        make_parents: bool,
    ) -> Result<(NameAt, Option<FileStat>)> {
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
        let mut name_at = self.name_at(path, missing)?;
        for _ in 0..MAX_LINKS {
            let existing = name_at.existing().map_err(failed)?;
            if existing.is_none_or(|existing| existing.st_mode & libc::S_IFMT != libc::S_IFLNK) {
                if existing.is_some() && self.is_outside(&name_at) {
                    return Err(failed(Errno::EXDEV));
                }
                return Ok((name_at, existing));
            }
            if !self.follows_last_link {
                break;
            }
            let target = name_at.link_target().map_err(failed)?;
            let (parent, name) = split(&target).ok_or_else(|| failed(Errno::EISDIR))?;
            name_at = NameAt {
                directory: openat(&name_at.directory, parent, DIRECTORY, Mode::empty())
                    .map_err(failed)?,
                name: name.to_vec(),
            };
        }
        Err(failed(Errno::ELOOP))
    }

    /// Whether a mount covers a name. Acting on the name would not notice it.
    pub(super) fn is_outside(&self, NameAt { directory, name }: &NameAt) -> bool {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        matches!(self.resolution, Resolution::Beneath { .. })
            && matches!(self.resolve_in(directory, name, flags), Err(Errno::EXDEV))
    }

    /// Whether `directory` is `other` or below it.
    pub(super) fn lies_within(&self, directory: &OwnedFd, other: Identity) -> nix::Result<bool> {
        // The way up ends where the tree begins: its owner may not go further.
        let top = match self.resolution {
            Resolution::Machine => None,
            Resolution::Beneath { .. } => {
                Some(Identity::of_open(self.start(self.tree_of(directory))?)?)
            }
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

/// The error of an operation that opened a file without blocking. `EAGAIN` means that a process holds
/// a lease on it: opening notifies the holder, and the kernel breaks the lease within 45 s (fcntl(2),
/// `F_SETLEASE`).
pub(super) fn opening_error(act: impl fmt::Display, errno: Errno) -> Error {
    match errno {
        Errno::EAGAIN => {
            let why = "a program holds a lease on it, which it was told to give up; try again";
            Error::new(Kind::Leased, format!("{act}: {why} ({errno:?})"))
        }
        errno => Error::system(act, errno),
    }
}
