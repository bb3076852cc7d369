//! A directory of files that only root reads and writes: each is whole, or not there.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Deref;
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat, renameat};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::{UnlinkatFlags, fsync, unlinkat};

/// What a file is called until it is whole, after the first part of its name.
pub(in crate::host) const WRITING: &str = "writing";

/// No record is longer: the environment of a sandbox is bounded, and so is a request.
const MAX_RECORD_BYTES: u64 = 64 << 20;

/// The directory, open.
pub(in crate::host) struct Directory(pub(in crate::host) OwnedFd);

impl Deref for Directory {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.0
    }
}

impl Directory {
    /// Reads a file that only root can have written; `None` if there is none.
    pub(in crate::host) fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = match openat(&self.0, name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::ENOENT) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let status = fstat(&file)?;
        if status.st_uid != 0 || status.st_mode & (libc::S_IFMT | 0o077) != libc::S_IFREG {
            return Err(io::Error::other("it is no file that belongs to root alone"));
        }
        let mut content = Vec::new();
        let limit = MAX_RECORD_BYTES + 1;
        File::from(file).take(limit).read_to_end(&mut content)?;
        if content.len() as u64 == limit {
            return Err(io::Error::other("it is too long"));
        }
        Ok(Some(content))
    }

    /// Writes a file under another name first, and renames it when it is whole.
    pub(in crate::host) fn write(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let own = name.split_once('.').map_or(name, |(own, _)| own);
        let temporary = format!("{own}.{WRITING}");
        match self.create(&temporary, content) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                // A server that was killed has left it.
                self.unlink(&temporary)?;
                self.create(&temporary, content)?;
            }
            created => created?,
        }
        self.rename(&temporary, name).inspect_err(|_| {
            let _ = self.unlink(&temporary);
        })
    }

    /// Makes a file that only root can read. Nothing is left if it cannot be written.
    pub(in crate::host) fn create(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let flags =
            OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        let mut file = File::from(openat(&self.0, name, flags, mode)?);
        file.write_all(content).inspect_err(|_| {
            let _ = self.unlink(name);
        })
    }

    pub(in crate::host) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(&self.0, from, &self.0, to)?)
    }

    /// Waits until a file and its name are on the disk.
    pub(in crate::host) fn sync(&self, name: &str) -> io::Result<()> {
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        File::from(openat(&self.0, name, flags, Mode::empty())?).sync_all()?;
        Ok(fsync(&self.0)?)
    }

    pub(in crate::host) fn unlink(&self, name: &str) -> nix::Result<()> {
        unlinkat(&self.0, name, UnlinkatFlags::NoRemoveDir)
    }
}
