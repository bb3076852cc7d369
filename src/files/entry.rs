//! What the kernel tells about a file: its kind, its attributes, its identity.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{FileStat, Mode, fstat};

use crate::sys::paths::{fstatat, open, readlinkat};
use crate::sys::proc;

/// Flags that open a directory to resolve names in it. Reading its entries needs another descriptor.
pub(super) const DIRECTORY: OFlag = OFlag::O_PATH
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_CLOEXEC);

/// The type of a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileKind {
    #[default]
    Regular,
    Directory,
    Link,
    Pipe,
    Socket,
    CharacterDevice,
    BlockDevice,
}

impl FileKind {
    /// The kind of a file with these attributes.
    pub fn of(status: &FileStat) -> Self {
        match status.st_mode & libc::S_IFMT {
            libc::S_IFDIR => Self::Directory,
            libc::S_IFLNK => Self::Link,
            libc::S_IFIFO => Self::Pipe,
            libc::S_IFSOCK => Self::Socket,
            libc::S_IFCHR => Self::CharacterDevice,
            libc::S_IFBLK => Self::BlockDevice,
            _ => Self::Regular,
        }
    }
}

/// A directory entry with its attributes.
#[derive(Debug, Clone, Default)]
pub struct Entry {
    /// The last component of the path.
    pub name: Vec<u8>,
    /// The type; links are not followed.
    pub kind: FileKind,
    /// Bytes.
    pub size: u64,
    /// Milliseconds since 1970; `None` if the attributes could not be read.
    pub modified_ms: Option<i64>,
    /// The permission bits, at most `0o7777`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Inode number.
    pub inode: u64,
    /// Number of hard links.
    pub links: u64,
    /// The content of a symbolic link.
    pub target: Option<Vec<u8>>,
}

/// When a file was modified: milliseconds since 1970, rounded down.
pub fn modified_ms(status: &FileStat) -> i64 {
    let seconds = status.st_mtime.saturating_mul(1000);
    seconds.saturating_add(status.st_mtime_nsec / 1_000_000)
}

impl Entry {
    pub(super) fn new(name: Vec<u8>, status: &FileStat) -> Self {
        Self {
            name,
            kind: FileKind::of(status),
            size: size(status),
            modified_ms: Some(modified_ms(status)),
            mode: status.st_mode & 0o7777,
            uid: proc::id_inside(status.st_uid),
            gid: proc::id_inside(status.st_gid),
            inode: status.st_ino,
            #[allow(clippy::useless_conversion, reason = "32 bits wide on aarch64")]
            links: u64::from(status.st_nlink),
            target: None,
        }
    }

    /// The entry `name` of a directory. A link is not followed, except for its size if `sized_by_target`;
    /// a dangling link keeps its own.
    pub(super) fn read(
        directory: impl AsFd,
        name: &[u8],
        sized_by_target: bool,
    ) -> nix::Result<Self> {
        let status = fstatat(&directory, name, AtFlags::AT_SYMLINK_NOFOLLOW)?;
        let mut entry = Self::new(name.to_vec(), &status);
        if entry.kind == FileKind::Link {
            entry.target = link_target(&directory, name).ok();
            if sized_by_target && let Ok(followed) = fstatat(&directory, name, AtFlags::empty()) {
                entry.size = size(&followed);
            }
        }
        Ok(entry)
    }

    /// An entry whose attributes cannot be read.
    pub(super) fn unknown(name: Vec<u8>, kind: FileKind) -> Self {
        Self {
            name,
            kind,
            ..Self::default()
        }
    }
}

/// The size in bytes.
pub(super) fn size(status: &FileStat) -> u64 {
    u64::try_from(status.st_size).unwrap_or(0)
}

/// What changes when the content of a file is changed or the file is replaced.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct FileVersion {
    identity: Identity,
    pub kind: FileKind,
    /// Bytes.
    pub size: u64,
    modified: (i64, i64),
}

impl FileVersion {
    pub(super) fn of_status(status: &FileStat) -> Self {
        Self {
            identity: Identity::of(status),
            kind: FileKind::of(status),
            size: size(status),
            modified: (status.st_mtime, status.st_mtime_nsec),
        }
    }

    /// The version of an open file.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn of(file: impl AsFd) -> nix::Result<Self> {
        fstat(file).map(|status| Self::of_status(&status))
    }
}

/// Device and inode number: equal for two descriptors of the same file only.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Identity(u64, u64);

impl Identity {
    pub(super) fn of(status: &FileStat) -> Self {
        Self(status.st_dev, status.st_ino)
    }

    pub(super) fn of_open(file: impl AsFd) -> nix::Result<Self> {
        fstat(file).map(|status| Self::of(&status))
    }

    pub(super) fn bytes(self) -> [u8; 16] {
        (u128::from(self.0) << 64 | u128::from(self.1)).to_ne_bytes()
    }
}

/// Opens a file that has been found (`O_PATH | O_NOFOLLOW`), unless that is a link or a pipe. Opening a pipe takes its lock,
/// whatever the flags, and splice(2) keeps it for as long as whoever has the pipe open likes. Where there is no /proc, `again`
/// opens the file by its name, which may be another one's by then.
///
/// # Errors
/// As open(2): `ELOOP` for a link, `ENXIO` for a pipe.
pub(super) fn open_found(
    found: &OwnedFd,
    flags: OFlag,
    again: impl FnOnce() -> nix::Result<OwnedFd>,
) -> nix::Result<OwnedFd> {
    match FileKind::of(&fstat(found)?) {
        FileKind::Link => return Err(Errno::ELOOP),
        FileKind::Pipe => return Err(Errno::ENXIO),
        _ => {}
    }
    // The name here is a link to the file.
    let flags = flags.difference(OFlag::O_NOFOLLOW) | OFlag::O_CLOEXEC;
    let name = format!("/proc/self/fd/{}", found.as_raw_fd());
    match open(&*name, flags, Mode::empty()) {
        Err(Errno::ENOENT) => again(),
        opened => opened,
    }
}

/// The content of the symbolic link `name` in `directory`; of the link that is open itself if `name`
/// is empty.
pub(super) fn link_target(directory: &impl AsFd, name: &[u8]) -> nix::Result<Vec<u8>> {
    use std::os::unix::ffi::OsStringExt;
    readlinkat(directory, name).map(OsStringExt::into_vec)
}
