//! The private root of a sandbox: a template that it sees as its own `/`, and changes alone.
//!
//! An overlay lies over the template, whose files stay as they are; what the sandbox changes is beside its home. Both show
//! the ids of the sandbox's block as ids from 0 on, so that its root is nobody on the machine. The server keeps a tree of
//! the overlay without a place in any directory: files are reached through it, and each run gets a copy of it for its
//! namespaces. No path of the sandbox is followed but inside of that tree.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag};
use nix::sys::stat::{FchmodatFlags, FileStat, Mode, fchmod, fstat};
use nix::unistd::{Gid, Uid, UnlinkatFlags};

use super::trees;
use crate::error::{Error, Kind, Result};
use crate::spec::account::{self, Account, Names};
use crate::spec::sandbox::RootSpec;
use crate::sys::paths::{fchmodat, fchownat, mkdirat, openat, openat2, unlinkat};
use crate::sys::{self, ActingAs, MountError, MountStep, User, UserNamespace};
use crate::threads::lock::{Mutex, lock};
use crate::threads::priority::thread_time;

/// Who runs commands where nobody else is chosen.
const USUAL_ACCOUNT: &str = "root";

/// Where a sandbox with a root of its own has the sockets that the port proxy connects to.
pub(super) const PROXY_DIRECTORY: &str = "/run/sbx/proxy";

/// Longer names are those of no account: errors repeat them.
const MAX_NAME: usize = 256;

/// The lists of accounts: of users, and of groups.
const LISTS: [&str; 2] = ["etc/passwd", "etc/group"];

/// More than the kernel's clock of files goes on at once.
const CLOCK_STEP: Duration = Duration::from_millis(50);

/// Longer lists of accounts are read so far.
const MAX_ACCOUNT_BYTES: u64 = 256 << 10;

/// Processes that the server starts inside to start a command, or to signal all.
const STARTERS: u64 = 2;

/// Most processor time for finding where the mounts of a start belong: more takes links that are laid for it.
const MOUNT_POINTS_TIME: Duration = Duration::from_secs(1);

/// The root of one sandbox.
pub struct PrivateRoot {
    /// The first id of its block.
    first: libc::uid_t,
    tree: Arc<OwnedFd>,
    /// Who runs commands that choose nobody.
    user: String,
    /// Where commands start that choose nothing, if that is a directory.
    directory: Option<String>,
    /// The namespace of the last run, or the one that its tree was made with, and how many processes it allows. Guards the
    /// value alone.
    users: Mutex<(u64, Arc<UserNamespace>)>,
    /// Guards what is known of its accounts, and the reading of their lists: one thread has them in memory at a time.
    accounts: Mutex<KnownNames>,
}

/// The names of users and groups, as their lists had them in these states.
#[derive(Default)]
struct KnownNames {
    /// The states, and when they were first seen.
    states: Option<([ListState; 2], Instant)>,
    /// Whether another change would show: the kernel's clock of files stands still for some milliseconds.
    have_settled: bool,
    names: Arc<[Names; 2]>,
}

/// What changes with the content of a list: its number, its size, and times in seconds and nanoseconds; `None` without one.
type ListState = Option<[i64; 6]>;

impl PrivateRoot {
    /// Puts an overlay over a template. `own` is a directory of root alone, with `up` and `work` in it. `max_processes` is
    /// what its first run is expected to have: that run then needs no user namespace of its own.
    ///
    /// # Errors
    /// `System` if the kernel refuses it.
    pub fn new(
        template: BorrowedFd<'_>,
        own: BorrowedFd<'_>,
        first: libc::uid_t,
        spec: &RootSpec,
        max_processes: u64,
    ) -> Result<Arc<Self>> {
        let act = "cannot make the root of a sandbox";
        let users = new_users(first, max_processes)
            .map_err(|errno| Error::system(format_args!("{act}: user namespace"), errno))?;
        let root = User {
            uid: first,
            gid: first,
        };
        let tree =
            sys::overlay(template, own, &users, root, spec.is_volatile).map_err(|error| {
                Error::system(format_args!("{act}: {}", step_of(error)), error.errno)
            })?;
        Ok(Arc::new(Self {
            first,
            // Whoever closes one that is not durable waits for nothing.
            tree: if spec.is_volatile {
                Arc::new(tree)
            } else {
                trees::keep(tree)
            },
            user: spec.user.as_deref().unwrap_or(USUAL_ACCOUNT).to_owned(),
            directory: spec.directory.clone(),
            users: Mutex::new((max_processes, Arc::new(users))),
            accounts: Mutex::default(),
        }))
    }

    /// The tree through which the server reaches its files.
    pub fn tree(&self) -> &Arc<OwnedFd> {
        &self.tree
    }

    /// Who runs commands that choose nobody.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// Its root, as the machine sees it.
    pub fn root(&self) -> User {
        self.outside(0, 0)
    }

    /// One of its users, as the machine sees it.
    pub fn outside(&self, uid: u32, gid: u32) -> User {
        User {
            uid: self.first + uid,
            gid: self.first + gid,
        }
    }

    /// The tree for the namespaces of a run.
    pub(super) fn mount(&self) -> std::result::Result<OwnedFd, Errno> {
        sys::clone_mount(self.tree.as_fd())
    }

    /// The user namespace of a run with so many processes at most.
    pub(super) fn users(
        &self,
        max_processes: u64,
    ) -> std::result::Result<Arc<UserNamespace>, Errno> {
        let known = lock(&self.users).clone();
        if known.0 == max_processes {
            return Ok(known.1);
        }
        let users = Arc::new(new_users(self.first, max_processes)?);
        *lock(&self.users) = (max_processes, Arc::clone(&users));
        Ok(users)
    }

    /// Who a command is that asks for a user, or for none.
    ///
    /// # Errors
    /// `Invalid` if there is no such account.
    pub fn account(&self, asked: Option<&str>) -> Result<Account> {
        let wanted = asked.unwrap_or(&self.user);
        if wanted.len() > MAX_NAME {
            let text = format!("user takes at most {MAX_NAME} bytes");
            return Err(Error::invalid(text));
        }
        let _turn = lock(&self.accounts);
        let [passwd, group] = LISTS.map(|path| self.text(path));
        Account::find(wanted, &passwd, &group).ok_or_else(|| {
            Error::invalid(format_args!(
                "there is no user {wanted:?} in this sandbox; it takes a name of its /etc/passwd or a number up to 65535"
            ))
        })
    }

    /// Who runs commands that choose nobody; root if that account is not there any more.
    pub fn usual_account(&self) -> Account {
        let found = self.account(None);
        found.unwrap_or_else(|_| Account {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
            name: USUAL_ACCOUNT.to_owned(),
            home: "/root".to_owned(),
        })
    }

    /// A file of the sandbox, as far as it is a text; empty if there is none.
    fn text(&self, path: &str) -> String {
        let mut text = Vec::new();
        if let Ok(file) = self.open(path) {
            let _ = file.take(MAX_ACCOUNT_BYTES).read_to_end(&mut text);
        }
        String::from_utf8_lossy(&text).into_owned()
    }

    fn open(&self, path: &str) -> nix::Result<File> {
        let _acting = ActingAs::root_of_sandbox(self.root())?;
        // Looked at first: a pipe would be opened for good.
        let found = self.resolve(path, OFlag::O_PATH)?;
        if fstat(&found)?.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Err(Errno::EINVAL);
        }
        // Another may have the name by now. Nothing waits: O_NONBLOCK also means a lease.
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        self.resolve(path, flags).map(File::from)
    }

    fn resolve<P: ?Sized + AsRef<OsStr>>(&self, path: &P, flags: OFlag) -> nix::Result<OwnedFd> {
        sys::open_inside(self.tree.as_fd(), path.as_ref().as_bytes(), flags)
    }

    /// Where commands of an account start: in the directory of the template, or in its home.
    pub(super) fn start_of<'a>(&'a self, account: &'a Account) -> &'a Path {
        let own = self.directory.as_deref().map(Path::new);
        let own = own.filter(|own| self.is_directory(own));
        own.unwrap_or_else(|| self.home_of(account))
    }

    /// Where relative paths of an account begin: its home, or the root if that is none.
    pub(super) fn home_of<'a>(&self, account: &'a Account) -> &'a Path {
        let home = Path::new(&account.home);
        if self.is_directory(home) {
            home
        } else {
            Path::new("/")
        }
    }

    fn is_directory(&self, path: &Path) -> bool {
        self.find(path)
            .is_ok_and(|found| found.st_mode & libc::S_IFMT == libc::S_IFDIR)
    }

    fn find(&self, path: &Path) -> nix::Result<FileStat> {
        let _acting = ActingAs::root_of_sandbox(self.root())?;
        fstat(self.resolve(path, OFlag::O_PATH)?)
    }

    /// Opens what is to be mounted over in a mount of its tree: paths, and whether each is a directory. What is missing on the
    /// way is made, and belongs to its root. Links on the way lead where they do inside; one at the end, and any other file
    /// that is in the way, is removed: a process of the sandbox has made it when it ran before.
    ///
    /// # Errors
    /// `ELOOP` if links make it take too long; those of the system calls.
    pub(super) fn mount_points(
        &self,
        mount: BorrowedFd<'_>,
        points: &[(PathBuf, bool)],
    ) -> nix::Result<Vec<OwnedFd>> {
        let _acting = ActingAs::root_of_sandbox(self.root())?;
        // Without a limit where the kernel does not tell.
        let until = thread_time().map(|now| now + MOUNT_POINTS_TIME);
        let mut opened = Vec::new();
        for (path, is_directory) in points {
            let (mut here, mut left) = (None, path.components().count());
            let mut way = PathBuf::new();
            for part in path.components() {
                left -= 1;
                let Component::Normal(name) = part else {
                    continue;
                };
                way.push(name);
                let parent = here.as_ref().map_or(mount, OwnedFd::as_fd);
                let is_directory = left > 0 || *is_directory;
                let kind = if is_directory {
                    OFlag::O_DIRECTORY
                } else {
                    OFlag::empty()
                };
                let next = || match left {
                    0 => open_alone(parent, name, kind | OFlag::O_PATH),
                    _ => sys::open_inside(mount, way.as_os_str().as_bytes(), kind | OFlag::O_PATH),
                };
                let found = match next() {
                    Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => {
                        let removed = unlinkat(parent, name, UnlinkatFlags::NoRemoveDir);
                        // Something may have the name now. It is opened or refused next.
                        let made = if is_directory {
                            make_directory(parent, name, 0o755)
                        } else {
                            write_new(parent, name, 0o644, "")
                        };
                        let is_full = |done| matches!(done, Err(Errno::ENOSPC | Errno::EDQUOT));
                        let has_no_room = is_full(removed) || is_full(made);
                        next().map_err(|errno| if has_no_room { Errno::ENOSPC } else { errno })
                    }
                    found => found,
                };
                here = Some(found?);
                if thread_time() > until {
                    return Err(Errno::ELOOP);
                }
            }
            opened.extend(here);
        }
        Ok(opened)
    }

    /// Whether a path leads to a program.
    pub(super) fn has_program(&self, path: &Path) -> bool {
        self.find(path).is_ok_and(|found| {
            found.st_mode & libc::S_IFMT == libc::S_IFREG && found.st_mode & 0o111 != 0
        })
    }

    /// Makes what programs expect of a machine and its template lacks: names of the machine, who resolves others, a place for
    /// temporary files, and one for the sockets of servers. Call it before anything runs in it. What cannot be made is left
    /// at that: a template may be as it likes.
    ///
    /// # Errors
    /// `System` if the server cannot act as its root, or the account of its user cannot be made.
    pub fn furnish(&self, makes_user: bool) -> Result<()> {
        if makes_user {
            self.make_user().map_err(|errno| {
                let name = &self.user;
                Error::system(
                    format_args!("cannot make the account {name} in a sandbox"),
                    errno,
                )
            })?;
        }
        let _acting = ActingAs::root_of_sandbox(self.root())
            .map_err(|errno| Error::system("cannot act as the root of a sandbox", errno))?;
        let resolvers = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
        let _ = self.directory("etc", 0o755);
        let _ = self.fill(
            "hosts",
            "127.0.0.1 localhost\n::1 localhost ip6-localhost\n",
        );
        let _ = self.fill("resolv.conf", &resolvers);
        let _ = self.directory("tmp", 0o1777);
        self.make_proxy_directory();
        Ok(())
    }

    /// Makes the account of its user where the template has none, with a home, and lets it become root without a password
    /// where sudo is.
    fn make_user(&self) -> nix::Result<()> {
        let name = &self.user;
        let [passwd, group] = LISTS.map(|path| self.text(path));
        let shells = ["/bin/bash", "/bin/sh"];
        let shell = shells
            .iter()
            .find(|shell| self.has_program(Path::new(shell)));
        let shell = shell.unwrap_or(&shells[1]);
        let id = account::free_id(name, &passwd, &group);
        let _acting = ActingAs::root_of_sandbox(self.root())?;
        if let Some(id) = id {
            let named = account::names(&group)
                .into_iter()
                .find(|(_, of)| of == name);
            let gid = named.map_or(id, |(gid, _)| gid);
            self.directory("etc", 0o755)?;
            if gid == id {
                self.append("group", &format!("{name}:x:{gid}:\n"), true)?;
            }
            self.append("shadow", &format!("{name}:*:19000:0:99999:7:::\n"), false)?;
            let home = format!("home/{name}");
            let line = format!("{name}:x:{id}:{gid}::/{home}:{shell}\n");
            self.append("passwd", &line, true)?;
            self.directory("home", 0o755)?;
            self.directory(&home, 0o755)?;
            let parent = self.resolve("home", OFlag::O_PATH | OFlag::O_DIRECTORY)?;
            let owner = self.outside(id, gid);
            let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
            let nofollow = AtFlags::AT_SYMLINK_NOFOLLOW;
            fchownat(&parent, &**name, Some(uid), Some(gid), nofollow)?;
        }
        let rules = self.resolve("etc/sudoers.d", OFlag::O_PATH | OFlag::O_DIRECTORY);
        if let Ok(rules) = rules {
            let text = format!("{name} ALL=(ALL:ALL) NOPASSWD:ALL\n");
            match write_new(rules.as_fd(), "90-sbx".as_ref(), 0o440, &text) {
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Adds a line to a list in /etc. One that is missing is made if it `must_be` there.
    fn append(&self, name: &str, line: &str, must_be: bool) -> nix::Result<()> {
        let path = format!("etc/{name}");
        let found = match self.resolve(&*path, OFlag::O_PATH) {
            Err(Errno::ENOENT) if must_be => {
                let etc = self.resolve("etc", OFlag::O_PATH | OFlag::O_DIRECTORY)?;
                return write_new(etc.as_fd(), name.as_ref(), 0o644, line);
            }
            Err(Errno::ENOENT) => return Ok(()),
            found => found?,
        };
        if fstat(&found)?.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Err(Errno::EINVAL);
        }
        let flags = OFlag::O_RDWR | OFlag::O_APPEND | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let file = File::from(self.resolve(&*path, flags)?);
        let length = file.metadata().map_err(|error| errno_of(&error))?.len();
        let mut last = *b"\n";
        if length > 0 {
            file.read_exact_at(&mut last, length - 1)
                .map_err(|error| errno_of(&error))?;
        }
        let begin = if last == *b"\n" { "" } else { "\n" };
        let written = (&file).write_all(format!("{begin}{line}").as_bytes());
        written.map_err(|error| errno_of(&error))
    }

    /// The names of its users and of its groups, by number. Lists that have not changed are not read again.
    pub(super) fn names(&self) -> Arc<[Names; 2]> {
        let mut known = lock(&self.accounts);
        let states = LISTS.map(|path| self.find(Path::new(path)).ok().map(|file| state_of(&file)));
        let seen = known.states.filter(|(former, _)| *former == states);
        if seen.is_none() || !known.have_settled {
            let (_, since) = *known
                .states
                .insert(seen.unwrap_or((states, Instant::now())));
            known.have_settled = since.elapsed() > CLOCK_STEP;
            known.names = Arc::new(LISTS.map(|path| account::names(&self.text(path))));
        }
        Arc::clone(&known.names)
    }

    /// Makes the directory of the sockets, in which every user of the sandbox may make some.
    fn make_proxy_directory(&self) {
        let mut path = String::new();
        for name in PROXY_DIRECTORY.split('/').filter(|name| !name.is_empty()) {
            if !path.is_empty() {
                path.push('/');
            }
            path.push_str(name);
            let mode = if path == PROXY_DIRECTORY[1..] {
                0o1777
            } else {
                0o755
            };
            if self.directory(&path, mode).is_err() {
                return;
            }
        }
    }

    /// Makes a directory unless something has its name.
    fn directory(&self, path: &str, mode: u32) -> nix::Result<()> {
        let (parent, name) = path.rsplit_once('/').unwrap_or((".", path));
        let parent = self.resolve(parent, OFlag::O_PATH | OFlag::O_DIRECTORY)?;
        make_directory(parent.as_fd(), name.as_ref(), mode)
    }

    /// Writes a file of /etc that is missing, empty or a link to nothing.
    fn fill(&self, name: &str, text: &str) -> nix::Result<()> {
        let path = format!("etc/{name}");
        match self.resolve(&*path, OFlag::O_PATH) {
            Ok(found) if fstat(&found)?.st_size > 0 => return Ok(()),
            Ok(_) | Err(_) => {}
        }
        let etc = self.resolve("etc", OFlag::O_PATH | OFlag::O_DIRECTORY)?;
        let _ = unlinkat(&etc, name, UnlinkatFlags::NoRemoveDir);
        write_new(etc.as_fd(), name.as_ref(), 0o644, text)
    }
}

fn state_of(file: &FileStat) -> [i64; 6] {
    let number = file.st_ino.cast_signed();
    let (changed, written) = (file.st_ctime, file.st_mtime);
    let parts = [file.st_ctime_nsec, file.st_mtime_nsec];
    [number, file.st_size, changed, written, parts[0], parts[1]]
}

/// A user namespace in which commands have so many processes.
fn new_users(first: libc::uid_t, max_processes: u64) -> std::result::Result<UserNamespace, Errno> {
    // One that starts others is beside them.
    UserNamespace::new(first, max_processes.saturating_add(STARTERS))
}

/// Opens a name that is no link.
fn open_alone(directory: BorrowedFd<'_>, name: &OsStr, flags: OFlag) -> nix::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(flags | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
    openat2(directory, name, how)
}

/// Makes a directory unless something has its name.
fn make_directory(parent: BorrowedFd<'_>, name: &OsStr, mode: u32) -> nix::Result<()> {
    let mode = Mode::from_bits_truncate(mode);
    match mkdirat(parent, name, mode) {
        // The server's umask has taken bits away.
        Ok(()) => fchmodat(parent, name, mode, FchmodatFlags::NoFollowSymlink),
        Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Makes a file that nothing has the name of.
fn write_new(directory: BorrowedFd<'_>, name: &OsStr, mode: u32, text: &str) -> nix::Result<()> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    let mode = Mode::from_bits_truncate(mode);
    let mut file = File::from(openat(directory, name, flags, mode)?);
    file.write_all(text.as_bytes())
        .map_err(|error| errno_of(&error))?;
    // The server's umask has taken bits away.
    fchmod(&file, mode)
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}

impl fmt::Debug for PrivateRoot {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "PrivateRoot({})", self.first)
    }
}

/// What has failed.
pub(super) fn step_of(error: MountError) -> &'static str {
    match error.step {
        MountStep::Map => "show a directory under other ids",
        MountStep::Open => "open its own directories",
        MountStep::Begin | MountStep::Configure | MountStep::Make => "mount an overlay",
        MountStep::Write => "its own directories cannot be written to",
    }
}

/// Why roots of their own cannot be had.
pub fn root_unavailable(why: impl fmt::Display) -> Error {
    let text = format!("root private is unavailable on this machine: {why}");
    Error::new(Kind::Unavailable, text)
}
