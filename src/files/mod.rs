//! Files under one directory descriptor.
//!
//! [`Root`] is where a workspace's paths begin. Every operation opens the directory it needs from
//! there and acts on one last name in it, so that what was looked at is what is acted on. How a path
//! is resolved is the root's alone; in dedicated mode paths mean what they mean to any program on
//! the machine, links included.
//!
//! No HTTP here: errors carry kinds, and their texts the path as the client wrote it.

mod list;
pub mod name;
mod remove;
mod write;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat};
use nix::sys::stat::{FileStat, Mode, fstat, fstatat, mkdirat};
use nix::unistd::{LinkatFlags, UnlinkatFlags, unlinkat};

use crate::error::{Error, Kind, Result};
use name::{FilePath, split};

/// Links followed in one path before it is taken for a loop, as in the kernel.
const MAX_LINKS: usize = 40;

/// Where the paths of a workspace begin.
pub struct Root {
    /// Relative paths begin here; absolute ones at the machine's root.
    directory: OwnedFd,
}

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// A path that names it again.
    pub path: Vec<u8>,
    /// What it is; links are not followed.
    pub kind: FileKind,
    /// Bytes; of a link, those of its target, as whoever reads it gets them.
    pub size: u64,
    /// Milliseconds since 1970.
    pub modified_ms: i64,
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
    /// The whole machine, relative paths beginning at `directory`.
    ///
    /// # Errors
    /// The directory cannot be opened.
    pub fn machine(directory: &Path) -> Result<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let directory = nix::fcntl::open(directory, flags, Mode::empty()).map_err(|errno| {
            Error::system(format_args!("cannot open {}", directory.display()), errno)
        })?;
        Ok(Self { directory })
    }

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
            .map_err(|errno| Error::system(format_args!("cannot stat {path}"), errno))?;
        Ok(entry(
            &self.directory,
            path.bytes(),
            path.name().to_vec(),
            path.bytes().to_vec(),
            &status,
        ))
    }

    /// Opens a file for reading. A pipe or socket is refused without being opened: opening alone
    /// could wake, and then break, whoever waits at its other end.
    ///
    /// # Errors
    /// There is none, it is a directory, or reading it could wait for ever.
    pub fn open(&self, path: &FilePath) -> Result<Opened> {
        let failed = |errno| Error::system(format_args!("cannot read {path}"), errno);
        let refuse = |what: &str| {
            Error::new(
                Kind::NotRegular,
                format!(
                    "cannot read {path}: it is a {what}, which could wait for ever; use a command"
                ),
            )
        };
        let check = |status: &FileStat| match FileKind::of(status) {
            FileKind::Directory => Err(Error::new(
                Kind::IsDirectory,
                format!("cannot read {path}: it is a directory; list it"),
            )),
            FileKind::Pipe => Err(refuse("named pipe")),
            FileKind::Socket => Err(refuse("socket")),
            kind => Ok(kind),
        };
        check(
            &self
                .status(path.bytes(), AtFlags::empty())
                .map_err(failed)?,
        )?;
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let file = File::from(
            openat(&self.directory, path.bytes(), flags, Mode::empty()).map_err(failed)?,
        );
        let status = fstat(&file).map_err(failed)?;
        Ok(Opened {
            kind: check(&status)?,
            size: size(&status),
            file,
        })
    }

    /// Makes a directory and those above it. One that is there already is success.
    ///
    /// # Errors
    /// Something else is in the way.
    pub fn make_directory(&self, path: &FilePath, mode: Option<u32>) -> Result<()> {
        let failed = |errno| Error::system(format_args!("cannot make directory {path}"), errno);
        self.make_directories(path.bytes()).map_err(failed)?;
        if let Some(mode) = mode {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            let directory =
                openat(&self.directory, path.bytes(), flags, Mode::empty()).map_err(failed)?;
            nix::sys::stat::fchmod(&directory, Mode::from_bits_truncate(mode)).map_err(failed)?;
        }
        Ok(())
    }

    /// Gives a file or directory another name; what had that name is replaced. The directories
    /// above the new name are made.
    ///
    /// # Errors
    /// Nothing to move, something in the way, or a directory to another file system.
    pub fn rename(&self, from: &FilePath, to: &FilePath) -> Result<()> {
        let failed = |errno| Error::system(format_args!("cannot move {from} to {to}"), errno);
        let (from_parent, from_name) = self.parent(from, false)?;
        let status =
            fstatat(&from_parent, from_name, AtFlags::AT_SYMLINK_NOFOLLOW).map_err(failed)?;
        if FileKind::of(&status) == FileKind::Directory && self.leads_through(to, &status) {
            // Asked before anything is made: the parents of the new name would be made inside.
            return Err(failed(Errno::EINVAL));
        }
        let (to_parent, to_name) = self.parent(to, true)?;
        match nix::fcntl::renameat(&from_parent, from_name, &to_parent, to_name) {
            Ok(()) => Ok(()),
            Err(Errno::EXDEV) if FileKind::of(&status) == FileKind::Regular => {
                self.copy(from, to, &status)?;
                unlinkat(&from_parent, from_name, UnlinkatFlags::NoRemoveDir).map_err(failed)
            }
            Err(Errno::EXDEV) => Err(Error::new(
                Kind::CrossDevice,
                format!(
                    "cannot move {from} to {to}: it is another file system, and not a regular file; use cp in a command"
                ),
            )),
            Err(Errno::EEXIST) => Err(failed(Errno::ENOTEMPTY)),
            Err(errno) => Err(failed(errno)),
        }
    }

    /// Whether a directory is one of those above a path, as far as they exist.
    fn leads_through(&self, path: &FilePath, directory: &FileStat) -> bool {
        let mut above = path.bytes();
        let existing = loop {
            let Some((parent, _)) = split(above).filter(|(parent, _)| parent.len() < above.len())
            else {
                return false;
            };
            above = parent;
            if let Ok(existing) = self.open_directory(above) {
                break existing;
            }
        };
        let mut current = existing;
        loop {
            let Ok(status) = fstat(&current) else {
                return false;
            };
            if (status.st_dev, status.st_ino) == (directory.st_dev, directory.st_ino) {
                return true;
            }
            let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            let Ok(parent) = openat(&current, "..", flags, Mode::empty()) else {
                return false;
            };
            // The root is its own parent.
            if fstat(&parent)
                .is_ok_and(|above| (above.st_dev, above.st_ino) == (status.st_dev, status.st_ino))
            {
                return false;
            }
            current = parent;
        }
    }

    fn copy(&self, from: &FilePath, to: &FilePath, status: &FileStat) -> Result<()> {
        let mut source = self.open(from)?.file;
        let mut upload = self.upload(to, Some(status.st_mode & 0o7777), true)?;
        upload.set_owner(status.st_uid, status.st_gid);
        let mut buffer = vec![0; 256 * 1024];
        loop {
            let count = std::io::Read::read(&mut source, &mut buffer)
                .map_err(|error| Error::io(format_args!("cannot read {from}"), &error))?;
            if count == 0 {
                return upload.commit().map(drop);
            }
            upload.write(&buffer[..count])?;
        }
    }

    fn status(&self, path: &[u8], flags: AtFlags) -> std::result::Result<FileStat, Errno> {
        fstatat(&self.directory, path, flags)
    }

    /// Opens the directory that `path` has its last name in.
    fn parent<'a>(&self, path: &'a FilePath, make: bool) -> Result<(OwnedFd, &'a [u8])> {
        let Some((directory, name)) = split(path.bytes()) else {
            let kind = if path.bytes().iter().all(|byte| *byte == b'/') {
                Kind::Forbidden
            } else {
                Kind::Invalid
            };
            return Err(Error::new(
                kind,
                format!("cannot change {path}: the path must end in a name of its own"),
            ));
        };
        let opened = match self.open_directory(directory) {
            Err(Errno::ENOENT) if make => self
                .make_directories(directory)
                .and_then(|()| self.open_directory(directory)),
            other => other,
        };
        let opened = opened.map_err(|errno| {
            Error::system(format_args!("cannot open the directory of {path}"), errno)
        })?;
        Ok((opened, name))
    }

    fn open_directory(&self, path: &[u8]) -> std::result::Result<OwnedFd, Errno> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        openat(&self.directory, path, flags, Mode::empty())
    }

    fn make_directories(&self, path: &[u8]) -> std::result::Result<(), Errno> {
        // From the first that is missing down: found by going up, without recursion, so that a path
        // of thousands of components costs no stack.
        let mut missing: Vec<&[u8]> = Vec::new();
        let mut path = path;
        loop {
            match mkdirat(&self.directory, path, Mode::from_bits_truncate(0o777)) {
                Err(Errno::ENOENT) => {
                    let Some((parent, _)) =
                        split(path).filter(|(parent, _)| parent.len() < path.len())
                    else {
                        return Err(Errno::ENOENT);
                    };
                    missing.push(path);
                    path = parent;
                }
                Ok(()) => break,
                // Also for the root, `.` and `..`; a link to a directory is one.
                Err(Errno::EEXIST) => {
                    let status = self.status(path, AtFlags::empty())?;
                    if FileKind::of(&status) != FileKind::Directory {
                        return Err(if missing.is_empty() {
                            Errno::EEXIST
                        } else {
                            Errno::ENOTDIR
                        });
                    }
                    break;
                }
                Err(errno) => return Err(errno),
            }
        }
        while let Some(path) = missing.pop() {
            match mkdirat(&self.directory, path, Mode::from_bits_truncate(0o777)) {
                // Somebody else was faster: parallel uploads make the same parents.
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

/// Describes what `status` was read of; `lookup` is a path from `directory` that leads there.
fn entry(
    directory: &impl AsFd,
    lookup: &[u8],
    name: Vec<u8>,
    path: Vec<u8>,
    status: &FileStat,
) -> Entry {
    let kind = FileKind::of(status);
    let (size_shown, target) = if kind == FileKind::Link {
        // A dangling link keeps its own size: there is nothing to read behind it.
        let followed = fstatat(directory, lookup, AtFlags::empty());
        (
            followed.map_or_else(|_| size(status), |followed| size(&followed)),
            link_target(directory, lookup).ok(),
        )
    } else {
        (size(status), None)
    };
    Entry {
        name,
        path,
        kind,
        size: size_shown,
        modified_ms: status.st_mtime * 1000 + status.st_mtime_nsec / 1_000_000,
        mode: status.st_mode & 0o7777,
        uid: status.st_uid,
        gid: status.st_gid,
        inode: status.st_ino,
        links: status.st_nlink,
        target,
    }
}

fn size(status: &FileStat) -> u64 {
    u64::try_from(status.st_size).unwrap_or(0)
}

fn link_target(directory: &impl AsFd, path: &[u8]) -> std::result::Result<Vec<u8>, Errno> {
    use std::os::unix::ffi::OsStringExt;
    readlinkat(directory, path).map(OsStringExt::into_vec)
}

/// Names an open file that has no name, or gives it another (open(2), `O_TMPFILE`).
fn link_open_file(file: &File, directory: &OwnedFd, name: &[u8]) -> std::result::Result<(), Errno> {
    use std::os::fd::AsRawFd;
    let by_proc = format!("/proc/self/fd/{}", file.as_raw_fd());
    match nix::unistd::linkat(
        nix::fcntl::AT_FDCWD,
        by_proc.as_str(),
        directory,
        name,
        LinkatFlags::AT_SYMLINK_FOLLOW,
    ) {
        // No /proc here; this way wants CAP_DAC_READ_SEARCH, or a recent kernel.
        Err(Errno::ENOENT) => {
            nix::unistd::linkat(file, "", directory, name, AtFlags::AT_EMPTY_PATH)
        }
        other => other,
    }
}
