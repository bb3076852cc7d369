//! Files under one root.
//!
//! [`Root`] is where a workspace's paths begin and are resolved; every operation gets a descriptor
//! from it, or a directory and one last name in it, and acts on that. A root is used through
//! [`Files`], which holds the identity that its files belong to. Here is what is known of a file, and
//! how one is read; lists, moves, deletes and writes have files of their own, and so have the homes
//! that roots can be.
//!
//! No HTTP here: errors carry kinds, and their texts the path as the client wrote it.

mod beneath;
mod conduit;
#[cfg(test)]
mod fuzz;
mod home;
mod list;
pub mod name;
mod remove;
mod rename;
mod root;
#[cfg(test)]
mod tests;
mod usage;
mod write;

use std::fs::File;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{FchmodatFlags, FileStat, Mode, fchmodat, fstat};

use crate::error::{Error, Kind, Result};
pub use conduit::Conduit;
pub use home::{make_home, remove_home};
pub use list::Page;
use name::FilePath;
pub use root::{Files, Root};
use root::{Missing, link_target};
pub use usage::Disk;
pub use write::Upload;

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A named pipe.
    Pipe,
    /// A socket.
    Socket,
    /// A character device.
    CharacterDevice,
    /// A block device.
    BlockDevice,
}

impl FileKind {
    fn of(status: &FileStat) -> Self {
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

/// What is known about a name.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The last component.
    pub name: Vec<u8>,
    /// What it is; links are not followed.
    pub kind: FileKind,
    /// Bytes.
    pub size: u64,
    /// Milliseconds since 1970, if that is known.
    pub modified_ms: Option<i64>,
    /// The permission bits, `0o7777` at most.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Inode number.
    pub inode: u64,
    /// Hard links.
    pub links: u64,
    /// Where a link points to.
    pub target: Option<Vec<u8>>,
}

impl Entry {
    fn new(name: Vec<u8>, status: &FileStat) -> Self {
        let milliseconds = status
            .st_mtime
            .saturating_mul(1000)
            .saturating_add(status.st_mtime_nsec / 1_000_000);
        Self {
            name,
            kind: FileKind::of(status),
            size: size(status),
            modified_ms: Some(milliseconds),
            mode: status.st_mode & 0o7777,
            uid: status.st_uid,
            gid: status.st_gid,
            inode: status.st_ino,
            #[allow(clippy::useless_conversion, reason = "32 bits wide on aarch64")]
            links: u64::from(status.st_nlink),
            target: None,
        }
    }

    /// What is left to know of a name that can be seen and not looked at.
    fn unknown(name: Vec<u8>, kind: FileKind) -> Self {
        Self {
            name,
            kind,
            size: 0,
            modified_ms: None,
            mode: 0,
            uid: 0,
            gid: 0,
            inode: 0,
            links: 0,
            target: None,
        }
    }
}

/// A file that was opened for reading.
pub struct Opened {
    /// The file, at its beginning.
    pub file: File,
    /// What it is: regular, or a device.
    pub kind: FileKind,
    /// Its size when it was opened.
    pub size: u64,
}

impl Root {
    /// What a path stands for; a link stands for itself.
    ///
    /// # Errors
    /// Nothing is there, or it cannot be seen.
    pub fn stat(&self, path: &FilePath) -> Result<Entry> {
        let status = self
            .status(path.bytes(), AtFlags::AT_SYMLINK_NOFOLLOW)
            .map_err(|errno| match errno {
                // Below a file there is nothing: for whoever asks whether something exists, that is no.
                Errno::ENOTDIR => Errno::ENOENT,
                errno => errno,
            })
            .map_err(|errno| self.error(format_args!("cannot stat {path}"), errno))?;
        let mut entry = Entry::new(path.name().to_vec(), &status);
        if entry.kind == FileKind::Link {
            entry.target = self
                .resolve(path.bytes(), OFlag::O_PATH | OFlag::O_NOFOLLOW)
                .and_then(|link| link_target(&link, b""))
                .ok();
            // A dangling link keeps its own size: there is nothing to read behind it.
            if self.sizes_links_by_target
                && let Ok(followed) = self.status(path.bytes(), AtFlags::empty())
            {
                entry.size = size(&followed);
            }
        }
        Ok(entry)
    }

    /// Opens a file for reading, a device only `with_devices`. What is refused is not opened at
    /// all: opening alone could wake, and then break, whoever waits at the other end of a pipe, and
    /// makes some devices act.
    ///
    /// # Errors
    /// There is none, it is a directory, or reading it could wait for ever.
    pub fn open(&self, path: &FilePath, with_devices: bool) -> Result<Opened> {
        let failed = |errno| self.error(format_args!("cannot read {path}"), errno);
        let check = |status: &FileStat| {
            let (kind, why) = match FileKind::of(status) {
                FileKind::Directory => (Kind::IsDirectory, "a directory; list it"),
                FileKind::Pipe => (
                    Kind::NotRegular,
                    "a named pipe, which could wait for ever; use a command",
                ),
                FileKind::Socket => (Kind::NotRegular, "a socket, which cannot be read"),
                FileKind::CharacterDevice | FileKind::BlockDevice if !with_devices => (
                    Kind::NotRegular,
                    "a device, which may have no end; give a length",
                ),
                kind => return Ok(kind),
            };
            Err(Error::new(kind, format!("cannot read {path}: it is {why}")))
        };
        check(
            &self
                .status(path.bytes(), AtFlags::empty())
                .map_err(failed)?,
        )?;
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let file = File::from(self.resolve(path.bytes(), flags).map_err(failed)?);
        let status = fstat(&file).map_err(failed)?;
        Ok(Opened {
            kind: check(&status)?,
            size: size(&status),
            file,
        })
    }

    /// Makes a directory and those above it. One that is there already is success; it is given the
    /// `mode` all the same.
    ///
    /// # Errors
    /// Something else is in the way.
    pub fn make_directory(&self, path: &FilePath, mode: Option<u32>) -> Result<()> {
        let make = || {
            let directory = self.directory(path.bytes(), Missing::Make)?;
            let Some(mode) = mode.map(Mode::from_bits_truncate) else {
                return Ok(());
            };
            fchmodat(&directory, ".", mode, FchmodatFlags::FollowSymlink)
        };
        make().map_err(|errno| self.error(format_args!("cannot make directory {path}"), errno))
    }
}

fn size(status: &FileStat) -> u64 {
    u64::try_from(status.st_size).unwrap_or(0)
}
