//! Where the paths of a workspace begin, and the one place that resolves them.
//!
//! Nothing outside this file sees the descriptor that paths begin at. An operation asks for a
//! descriptor of the file, or for a [`NameAt`]: the directory, held open, and the last name in it. So
//! the root alone decides what a path may cross, and renames above it do not matter any more.

use std::borrow::Cow;
use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{FchmodatFlags, FileStat, Mode, fstat};
use nix::unistd::{Gid, Uid, geteuid};

use super::beneath::Resolver;
use super::entry::{DIRECTORY, Identity, open_found};
use super::name::{FilePath, Tree, split};
use super::name_at::NameAt;
use super::temporary::Temporary;
use crate::error::{Error, Kind, Result};
use crate::spec::isolation::MACHINE_DIRECTORIES;
use crate::sys::paths::{fchmodat, fchownat, fstatat, mkdirat, open, openat};
use crate::sys::{self, ActingAs, IDS_OF_SANDBOX, User};

/// Links that are followed at the end of a path, as in the kernel (`path_resolution(7)`).
const MAX_LINKS: usize = 40;

/// In [`Root::acting`]: no other thread may begin to act as the owner.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// The directory that the paths of a workspace begin at.
pub struct Root {
    directory: Arc<OwnedFd>,
    /// [`Tree::Temporary`].
    temporary: Arc<Temporary>,
    resolution: Resolution,
    /// Whether a write to a link goes to its target; otherwise it is refused.
    follows_last_link: bool,
    /// Whether a link is shown with the size of its target, which is what a read returns.
    pub(super) sizes_links_by_target: bool,
    /// How many times threads act as the owner at the moment, and whether others may begin to. The roots of all accounts of a
    /// sandbox have it in common.
    acting: Arc<AtomicUsize>,
}

/// How paths are resolved.
enum Resolution {
    /// As for any program on the machine: relative paths begin at the directory, links lead anywhere.
    Machine,
    /// As if the directory were the root: a leading slash means the directory, no path leads out of
    /// it, and no link is followed.
    Beneath { resolver: Resolver, owner: User },
    /// As for a program whose root the directory is: links lead anywhere in it, and none out.
    Inside(Account),
}

/// Who accesses the files of a sandbox that has a root of its own.
struct Account {
    /// As the machine sees it.
    owner: User,
    /// Whether it is the sandbox's root, which may do what root does there.
    is_root: bool,
    /// Where relative paths begin: an absolute path inside.
    home: Vec<u8>,
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
    /// Makes them for this user, whom the machine knows by these numbers.
    MakeFor(User),
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
            temporary: Arc::default(),
            resolution: Resolution::Machine,
            follows_last_link: true,
            sizes_links_by_target: true,
            acting: Arc::default(),
        })
    }

    /// What is beneath `directory`, accessed as its `owner`.
    pub fn home(directory: impl Into<Arc<OwnedFd>>, owner: User) -> Self {
        let directory = directory.into();
        let resolver = Resolver::of_machine(&directory);
        Self::beneath(directory, owner, resolver)
    }

    /// What is in `directory`, a mount of its own, which is the root of a sandbox: absolute paths begin there, and others in
    /// the account's `home`.
    pub fn private(directory: Arc<OwnedFd>, owner: User, is_root: bool, home: &str) -> Self {
        Self {
            directory,
            temporary: Arc::default(),
            resolution: Resolution::Inside(Account {
                owner,
                is_root,
                home: home.as_bytes().to_vec(),
            }),
            follows_last_link: true,
            sizes_links_by_target: false,
            acting: Arc::default(),
        }
    }

    /// The same private root for another account: whoever [closes](Self::close) one of them closes all.
    #[must_use]
    pub fn for_account(&self, owner: User, is_root: bool, home: &str) -> Self {
        Self {
            temporary: Arc::clone(&self.temporary),
            acting: Arc::clone(&self.acting),
            ..Self::private(Arc::clone(&self.directory), owner, is_root, home)
        }
    }

    /// Where relative paths begin in a private root, and whom its files are accessed as.
    pub fn account(&self) -> Option<(&[u8], User)> {
        match &self.resolution {
            Resolution::Inside(account) => Some((&account.home, account.owner)),
            Resolution::Machine | Resolution::Beneath { .. } => None,
        }
    }

    pub(super) fn beneath(
        directory: impl Into<Arc<OwnedFd>>,
        owner: User,
        resolver: Resolver,
    ) -> Self {
        Self {
            directory: directory.into(),
            temporary: Arc::default(),
            resolution: Resolution::Beneath { resolver, owner },
            follows_last_link: false,
            sizes_links_by_target: false,
            acting: Arc::default(),
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

    /// Whether files can be given to any user: by root of a machine that is one sandbox, or of a private root.
    pub fn may_set_owners(&self) -> bool {
        match &self.resolution {
            Resolution::Machine => geteuid().is_root(),
            Resolution::Beneath { .. } => false,
            Resolution::Inside(account) => account.is_root,
        }
    }

    /// An owner and a group that files may be given to, as the machine knows them; `None` if there are none with these
    /// numbers.
    pub(super) fn owner(&self, uid: u64, gid: u64) -> Option<User> {
        let id = |number: u64| {
            let number = u32::try_from(number).ok()?;
            match &self.resolution {
                Resolution::Machine => Some(number),
                Resolution::Beneath { .. } => None,
                // The first id of a block is that of its root.
                Resolution::Inside(Account { owner, is_root, .. }) => {
                    (*is_root && number < IDS_OF_SANDBOX).then(|| owner.uid + number)
                }
            }
        };
        Some(User {
            uid: id(uid)?,
            gid: id(gid)?,
        })
    }

    /// Lets no thread begin to act as the owner, whose uid another sandbox gets as soon as this root is not
    /// [in use](Self::is_in_use) any more.
    pub fn close(&self) {
        if !self.is_whole_machine() {
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
        let (owner, acting) = match &self.resolution {
            Resolution::Machine => (0, Ok(None)),
            Resolution::Beneath { owner, .. } => (owner.uid, ActingAs::new(*owner).map(Some)),
            Resolution::Inside(Account { owner, is_root, .. }) if *is_root => {
                (owner.uid, ActingAs::root_of_sandbox(*owner).map(Some))
            }
            Resolution::Inside(Account { owner, .. }) => {
                (owner.uid, ActingAs::new(*owner).map(Some))
            }
        };
        let acting = acting
            .map_err(|errno| Error::system(format_args!("cannot act as uid {owner}"), errno))?;
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
            Resolution::Beneath { .. } | Resolution::Inside(_) => {
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
        self.resolve_in(self.start(path.tree())?, &self.whole(path.bytes()), flags)
    }

    /// A path from the beginning of its tree on.
    fn whole<'p>(&self, path: &'p [u8]) -> Cow<'p, [u8]> {
        match &self.resolution {
            Resolution::Inside(Account { home, .. }) if !path.starts_with(b"/") => {
                [home, &b"/"[..], path].concat().into()
            }
            _ => path.into(),
        }
    }

    /// The same of a path that begins at a directory of a private root, as links in it mean it. Only a hint: the directory
    /// may be moved at any time.
    fn through(&self, directory: impl AsFd, path: &[u8]) -> nix::Result<Vec<u8>> {
        if path.starts_with(b"/") {
            return Ok(path.to_vec());
        }
        let directory = openat(
            directory,
            ".",
            OFlag::O_PATH | OFlag::O_CLOEXEC,
            Mode::empty(),
        )?;
        let way = self.path_of(&directory).ok_or(Errno::ENOENT)?;
        Ok([b"/", &way[..], b"/", path].concat())
    }

    /// Opens a path in a private root.
    fn open_inside(&self, directory: impl AsFd, path: &[u8], flags: OFlag) -> nix::Result<OwnedFd> {
        let is_start = directory.as_fd().as_raw_fd() == self.directory.as_raw_fd();
        // A name that is no link is there whatever links mean.
        let is_name = flags.contains(OFlag::O_NOFOLLOW) && !path.contains(&b'/');
        if is_start || is_name {
            sys::open_inside(directory.as_fd(), path, flags)
        } else {
            let path = self.through(directory, path)?;
            sys::open_inside(self.directory.as_fd(), &path, flags)
        }
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
            Resolution::Inside(_) if flags.intersects(OFlag::O_PATH | OFlag::O_DIRECTORY) => {
                self.open_inside(directory, path, flags)
            }
            Resolution::Inside(_) => {
                let find = OFlag::O_PATH | (flags & OFlag::O_NOFOLLOW);
                let found = self.open_inside(&directory, path, find)?;
                open_found(&found, flags, || self.open_inside(&directory, path, flags))
            }
        }
    }

    /// Whether a file belongs to the user that files are accessed as.
    pub(super) fn owns(&self, status: &FileStat) -> bool {
        let uid = match self.resolution {
            Resolution::Machine => geteuid().as_raw(),
            Resolution::Beneath { owner, .. } | Resolution::Inside(Account { owner, .. }) => {
                owner.uid
            }
        };
        status.st_uid == uid
    }

    /// The status of the file that `resolve` would open, in one system call where there is one.
    pub(super) fn status(&self, path: &FilePath, flags: AtFlags) -> nix::Result<FileStat> {
        match self.resolution {
            Resolution::Machine => fstatat(self.start(path.tree())?, path.bytes(), flags),
            Resolution::Beneath { .. } | Resolution::Inside(_) => {
                let mut open_flags = OFlag::O_PATH;
                let nofollow = flags.contains(AtFlags::AT_SYMLINK_NOFOLLOW);
                open_flags.set(OFlag::O_NOFOLLOW, nofollow);
                fstat(self.resolve(path, open_flags)?)
            }
        }
    }

    pub(super) fn directory(&self, path: &FilePath, missing: Missing) -> nix::Result<OwnedFd> {
        let start = self.start(path.tree())?;
        self.directory_in(&start, &self.whole(path.bytes()), missing)
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
            let made = mkdirat(&current, name, Mode::from_bits_truncate(0o777));
            // Parallel uploads make the same parents.
            if let Err(errno) = made
                && errno != Errno::EEXIST
            {
                return Err(errno);
            }
            let flags = DIRECTORY | OFlag::O_NOFOLLOW;
            current = openat(&current, name, flags, Mode::empty())?;
            if let (Missing::MakeFor(owner), Ok(())) = (missing, made) {
                let (user, group) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
                fchownat(
                    &current,
                    "",
                    Some(user),
                    Some(group),
                    AtFlags::AT_EMPTY_PATH,
                )?;
            }
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

    /// Makes what is missing of a directory's path, for a user whom the machine knows by these numbers.
    ///
    /// # Errors
    /// As [`Root::make_directory`]; the owner of what was made cannot be set.
    pub fn make_directory_for(&self, path: &FilePath, owner: User) -> Result<()> {
        let made = self.directory(path, Missing::MakeFor(owner));
        let failed = |errno| self.error(format_args!("cannot make directory {path}"), errno);
        made.map(drop).map_err(failed)
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
            .and_then(|start| self.directory_in(&start, &self.whole(directory), missing));
        let directory = opened.map_err(|errno| {
            self.error(format_args!("cannot open the directory of {path}"), errno)
        })?;
        if self.is_of_machine(&directory, name) {
            let text = format!("cannot change {path}: what is there belongs to the machine");
            return Err(Error::new(Kind::Forbidden, text));
        }
        Ok(NameAt {
            directory,
            name: name.to_vec(),
        })
    }

    /// Whether a name is that of a directory over which each run of a private root has something of the machine. This tree has
    /// nothing there, so that the kernel would move or remove the directory, and with it what is mounted over it
    /// (`detach_mounts` in fs/namespace.c).
    fn is_of_machine(&self, directory: &OwnedFd, name: &[u8]) -> bool {
        let is_one = MACHINE_DIRECTORIES.iter().any(|own| own.as_bytes() == name);
        let identity = |directory: &OwnedFd| Identity::of_open(directory).ok();
        matches!(self.resolution, Resolution::Inside(_))
            && is_one
            && identity(directory).is_none_or(|found| Some(found) == identity(&self.directory))
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
            let directory = self.resolve_in(&name_at.directory, parent, DIRECTORY);
            name_at = NameAt {
                directory: directory.map_err(failed)?,
                name: name.to_vec(),
            };
        }
        Err(failed(Errno::ELOOP))
    }

    /// Whether a mount covers a name. Acting on the name would not notice it.
    pub(super) fn is_outside(&self, NameAt { directory, name }: &NameAt) -> bool {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        !self.is_whole_machine()
            && matches!(self.resolve_in(directory, name, flags), Err(Errno::EXDEV))
    }

    /// Whether `directory` is `other` or below it.
    pub(super) fn lies_within(&self, directory: &OwnedFd, other: Identity) -> nix::Result<bool> {
        // The way up ends where the tree begins: its owner may not go further.
        let top = match self.resolution {
            Resolution::Machine => None,
            Resolution::Beneath { .. } | Resolution::Inside(_) => {
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
