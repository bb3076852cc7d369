//! Resolves paths that must not leave a directory, even while its owner changes what is in it.
//!
//! The kernel does it in one atomic step where it can (openat2(2), `RESOLVE_BENEATH`). Where that call
//! is missing, or hidden by a container's seccomp filter, a walk gives the same answers: it opens
//! component by component, without following links, and checks each before the next. It holds one
//! descriptor at a time, and 16 bytes for each directory above (at most `PATH_MAX` / 2 of them): on
//! `..` it goes up by the kernel's own `..` and checks that it arrives where it came from.
//!
//! Both refuse with the same two errors: `ELOOP` for a link, wherever it is and wherever it leads, and
//! `EXDEV` for what is outside, above the directory or on another mount.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag};
use nix::sys::stat::{FileStat, Mode, fstat};

use super::entry::{DIRECTORY, FileKind, Identity};
use crate::sys;
use crate::sys::paths::{openat, openat2};

/// No way out, no links of any kind, no other mounts.
const CONFINED: ResolveFlag = ResolveFlag::RESOLVE_BENEATH
    .union(ResolveFlag::RESOLVE_NO_SYMLINKS)
    .union(ResolveFlag::RESOLVE_NO_MAGICLINKS)
    .union(ResolveFlag::RESOLVE_NO_XDEV);

/// Tries of openat2(2) before the walk takes over. With `..` in a path the call fails with `EAGAIN` when
/// anything on the machine is renamed meanwhile, and other tenants can cause that as long as they
/// like. The walk depends on its own path only.
const ATTEMPTS: usize = 32;

/// The way to resolve a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resolver {
    /// openat2(2).
    Kernel,
    /// openat(2), component by component.
    Walk,
}

impl Resolver {
    /// The best one that works on this machine; tried once per process.
    pub(super) fn of_machine(directory: &OwnedFd) -> Self {
        static FOUND: OnceLock<Resolver> = OnceLock::new();
        *FOUND.get_or_init(|| Self::find(directory))
    }

    /// Tries openat2(2) with a directory that can be opened. Any failure means the walk, which works
    /// everywhere: a seccomp filter may fail the call with any errno.
    pub(super) fn find(directory: &OwnedFd) -> Self {
        match ask_kernel(directory, b".", DIRECTORY) {
            Ok(_) => Self::Kernel,
            Err(_) => Self::Walk,
        }
    }

    /// Opens the file at a path; leading slashes mean the directory. No link is followed, not even at
    /// the end: `O_PATH | O_NOFOLLOW` opens the link itself.
    ///
    /// # Errors
    /// As openat2(2) with [`CONFINED`]; `EBUSY` if a directory was moved while the walk was in it.
    pub(super) fn open(
        self,
        directory: impl AsFd,
        path: &[u8],
        flags: OFlag,
    ) -> nix::Result<OwnedFd> {
        let start = path.iter().position(|byte| *byte != b'/');
        let path = start.map_or(&b"."[..], |start| &path[start..]);
        // The walk needs no limit, but gives the kernel's answer.
        if path.len() >= usize::try_from(libc::PATH_MAX).unwrap_or(usize::MAX) {
            return Err(Errno::ENAMETOOLONG);
        }
        let flags = flags | OFlag::O_CLOEXEC;
        if self == Self::Kernel {
            for _ in 0..ATTEMPTS {
                match ask_kernel(&directory, path, flags) {
                    Err(Errno::EAGAIN) => {}
                    other => return other,
                }
            }
        }
        walk(directory, path, flags)
    }
}

fn ask_kernel(directory: impl AsFd, path: &[u8], flags: OFlag) -> nix::Result<OwnedFd> {
    let how = OpenHow::new().flags(flags).resolve(CONFINED);
    openat2(directory, path, how)
}

fn walk(directory: impl AsFd, path: &[u8], flags: OFlag) -> nix::Result<OwnedFd> {
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
            // With O_NOFOLLOW a link at the end is no directory, and nothing worse.
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

/// The mount of an open file, as far as the kernel tells it.
struct Mount {
    id: Option<u64>,
    /// Only for directories: on overlayfs a file may show the device of a lower layer.
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
        let ids = self.id.zip(other.id);
        // Devices before Linux 5.8.
        ids.or(self.device.zip(other.device))
            .is_some_and(|(own, other)| own != other)
    }
}
