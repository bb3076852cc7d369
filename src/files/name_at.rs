//! A name in a directory that is held open: the pair that the `*at` system calls take.
//!
//! A [`NameAt`] is as safe as the resolving that led to it: [`Root`](super::Root) opened its directory
//! beneath the root, its name has no slash and is neither `.` nor `..`, and no call here follows a
//! link.

use std::fs::File;
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{FchmodatFlags, FileStat, Mode};
use nix::unistd::UnlinkatFlags;

use super::entry::{Identity, link_target, open_found};
use crate::sys::paths::{fchmodat, fstatat, openat, unlinkat};

/// With these flags open(2) follows no link, and does not wait for the other end of a pipe.
const CAREFUL: OFlag = OFlag::O_NOFOLLOW
    .union(OFlag::O_NONBLOCK)
    .union(OFlag::O_NOCTTY)
    .union(OFlag::O_CLOEXEC);

/// A directory and one name in it, which need not exist.
pub(super) struct NameAt {
    pub(super) directory: OwnedFd,
    pub(super) name: Vec<u8>,
}

/// What is the same for two pairs of directory and name exactly if they are the same place for a file.
pub(super) fn key(directory: &OwnedFd, name: &[u8]) -> nix::Result<Vec<u8>> {
    let directory = Identity::of_open(directory)?;
    Ok([&directory.bytes()[..], name].concat())
}

impl NameAt {
    /// What is the same for two names exactly if they are the same place for a file.
    pub(super) fn key(&self) -> nix::Result<Vec<u8>> {
        key(&self.directory, &self.name)
    }

    pub(super) fn status(&self) -> nix::Result<FileStat> {
        fstatat(
            &self.directory,
            &self.name[..],
            AtFlags::AT_SYMLINK_NOFOLLOW,
        )
    }

    /// The status of the file, `None` if there is none.
    pub(super) fn existing(&self) -> nix::Result<Option<FileStat>> {
        match self.status() {
            Err(Errno::ENOENT) => Ok(None),
            status => status.map(Some),
        }
    }

    /// Opens the file, which waits for nobody. No pipe is opened (`ENXIO`).
    pub(super) fn open(&self, flags: OFlag) -> nix::Result<File> {
        let find = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let found = openat(&self.directory, &self.name[..], find, Mode::empty())?;
        let again = || {
            openat(
                &self.directory,
                &self.name[..],
                flags | CAREFUL,
                Mode::empty(),
            )
        };
        open_found(&found, flags | CAREFUL, again).map(File::from)
    }

    /// Makes the file, and opens it for writing.
    pub(super) fn make(&self) -> nix::Result<File> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
        let mode = Mode::from_bits_truncate(0o666);
        openat(&self.directory, &self.name[..], flags | CAREFUL, mode).map(File::from)
    }

    /// Opens the file for writing; a pipe too, if a process reads it. That can take as long as whoever has the pipe open likes.
    pub(super) fn open_even_pipe(&self) -> nix::Result<File> {
        let flags = OFlag::O_WRONLY | CAREFUL;
        openat(&self.directory, &self.name[..], flags, Mode::empty()).map(File::from)
    }

    pub(super) fn set_mode(&self, mode: u32) -> nix::Result<()> {
        let mode = Mode::from_bits_truncate(mode);
        fchmodat(
            &self.directory,
            &self.name[..],
            mode,
            FchmodatFlags::NoFollowSymlink,
        )
    }

    pub(super) fn link_target(&self) -> nix::Result<Vec<u8>> {
        link_target(&self.directory, &self.name)
    }

    /// Removes anything but a directory.
    pub(super) fn unlink(&self) -> nix::Result<()> {
        unlinkat(&self.directory, &self.name[..], UnlinkatFlags::NoRemoveDir)
    }
}
