//! Resolving paths that must not leave a directory, whatever its owner does to it meanwhile.
//!
//! The kernel does it where it can (openat2(2), `RESOLVE_BENEATH`), as one atomic step. Where that
//! call is missing, or hidden by a container's filter that is older than it, a walk gives the same
//! answers: component by component, each opened without following a link and looked at before the
//! next. It holds one descriptor however deep it goes, and of the directories above only what
//! identifies them (16 bytes each, of at most `PATH_MAX` / 2): on `..` it goes up by the kernel's own
//! `..` and checks that this is where it came from.
//!
//! What both refuse is told by two errors: `ELOOP` for a link, wherever it is and wherever it leads,
//! and `EXDEV` for what is outside: above the directory, or on another mount.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::{FileStat, Mode, fstat};

use super::FileKind;
use super::root::{DIRECTORY, Identity};
use crate::sys;

/// Nothing that leads out, and nothing that leads anywhere by a name's content.
const CONFINED: ResolveFlag = ResolveFlag::RESOLVE_BENEATH
    .union(ResolveFlag::RESOLVE_NO_SYMLINKS)
    .union(ResolveFlag::RESOLVE_NO_MAGICLINKS)
    .union(ResolveFlag::RESOLVE_NO_XDEV);

/// Times the kernel is asked again: with `..` in a path it gives up when anything on the machine is
/// renamed meanwhile, which neighbours can bring about for as long as they like. The walk, which
/// looks only at its own path, has no such moment.
const ATTEMPTS: usize = 32;

/// Who resolves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resolver {
    /// openat2(2).
    Kernel,
    /// openat(2), component by component.
    Walk,
}

impl Resolver {
    /// The best that works on this machine, found out once.
    pub(super) fn of_machine(directory: &OwnedFd) -> Self {
        static FOUND: OnceLock<Resolver> = OnceLock::new();
        *FOUND.get_or_init(|| Self::find(directory))
    }

    /// Tries, with a directory that can be opened. Any failure means the walk: a filter may answer
    /// with whatever it likes, and the walk is right everywhere.
    pub(super) fn find(directory: &OwnedFd) -> Self {
        match ask_kernel(directory, b".", DIRECTORY) {
            Ok(_) => Self::Kernel,
            Err(_) => Self::Walk,
        }
    }

    /// Opens what a path leads to; leading slashes mean the directory. No link is followed, at the
    /// end of the path either: one can be opened with `O_PATH | O_NOFOLLOW` alone.
    ///
    /// # Errors
    /// As openat2(2) with [`CONFINED`]; `EBUSY` when a directory was moved while the way led through
    /// it.
    pub(super) fn open(
        self,
        directory: &OwnedFd,
        path: &[u8],
        flags: OFlag,
    ) -> Result<OwnedFd, Errno> {
        let start = path.iter().position(|byte| *byte != b'/');
        let path = start.map_or(&b"."[..], |start| &path[start..]);
        // The walk has no need of a limit of its own, only the same answer.
        if path.len() >= usize::try_from(libc::PATH_MAX).unwrap_or(usize::MAX) {
            return Err(Errno::ENAMETOOLONG);
        }
        let flags = flags | OFlag::O_CLOEXEC;
        if self == Self::Kernel {
            for _ in 0..ATTEMPTS {
                match ask_kernel(directory, path, flags) {
                    Err(Errno::EAGAIN) => {}
                    other => return other,
                }
            }
        }
        walk(directory, path, flags)
    }
}

fn ask_kernel(directory: &OwnedFd, path: &[u8], flags: OFlag) -> Result<OwnedFd, Errno> {
    openat2(
        directory,
        path,
        OpenHow::new().flags(flags).resolve(CONFINED),
    )
}

fn walk(directory: &OwnedFd, path: &[u8], flags: OFlag) -> Result<OwnedFd, Errno> {
    let mut current = openat(directory, ".", DIRECTORY, Mode::empty())?;
    let status = fstat(&current)?;
    let mount = Mount::of(&current, &status);
    // The directories from the first to the current one.
    let mut way = vec![Identity::of(&status)];
    let names_directory = path.ends_with(b"/") || flags.contains(OFlag::O_DIRECTORY);
    let mut components = path
        .split(|byte| *byte == b'/')
        .filter(|name| !name.is_empty())
        .peekable();
    while let Some(name) = components.next() {
        match name {
            b"." => continue,
            b".." => {
                way.pop();
                let expected = way.last().ok_or(Errno::EXDEV)?;
                current = openat(&current, "..", DIRECTORY, Mode::empty())?;
                if Identity::of_open(&current)? != *expected {
                    return Err(Errno::EBUSY);
                }
                continue;
            }
            _ => {}
        }
        let careful = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        let found = openat(&current, name, careful | OFlag::O_CLOEXEC, Mode::empty())?;
        let status = fstat(&found)?;
        if Mount::of(&found, &status).is_another_than(&mount) {
            return Err(Errno::EXDEV);
        }
        let is_last = components.peek().is_none();
        match FileKind::of(&status) {
            FileKind::Link if is_last && !names_directory && flags.contains(careful) => {}
            // Where it is not to be followed, it is only no directory.
            FileKind::Link
                if is_last
                    && !path.ends_with(b"/")
                    && flags.contains(OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW) =>
            {
                return Err(Errno::ENOTDIR);
            }
            FileKind::Link => return Err(Errno::ELOOP),
            FileKind::Directory if !is_last => {
                way.push(Identity::of(&status));
                current = found;
                continue;
            }
            FileKind::Directory => {}
            _ if !is_last || names_directory => return Err(Errno::ENOTDIR),
            _ => {}
        }
        return if flags.contains(OFlag::O_PATH) {
            Ok(found)
        } else {
            openat(&current, name, flags | OFlag::O_NOFOLLOW, Mode::empty())
        };
    }
    openat(&current, ".", flags, Mode::empty())
}

/// What an open file is mounted as, as far as it can be told.
struct Mount {
    id: Option<u64>,
    /// Of directories only: a file may show the device of a layer below its own (overlayfs).
    device: Option<u64>,
}

impl Mount {
    fn of(file: &OwnedFd, status: &FileStat) -> Self {
        let is_directory = FileKind::of(status) == FileKind::Directory;
        Self {
            id: sys::mount_id(file.as_fd()),
            device: is_directory.then_some(status.st_dev),
        }
    }

    fn is_another_than(&self, other: &Self) -> bool {
        match (self.id, other.id) {
            (Some(id), Some(other)) => id != other,
            // Before Linux 5.8.
            _ => self
                .device
                .is_some_and(|device| other.device.is_some_and(|other| device != other)),
        }
    }
}
