//! Reads the attributes of files, and opens files for reading.

use std::fs::File;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{FileStat, fstat};

use super::entry::{Entry, FileKind, link_target, size};
use super::name::FilePath;
use super::root::Root;
use crate::error::{Error, Kind, Result};

/// A file that was opened for reading.
pub struct Opened {
    /// The file, at offset 0.
    pub file: File,
    /// Regular or a device; other kinds are not opened.
    pub kind: FileKind,
    /// Bytes when it was opened.
    pub size: u64,
    /// The permission bits, at most `0o7777`.
    pub mode: u32,
}

impl Root {
    /// The attributes of a file. A link is not followed.
    ///
    /// # Errors
    /// `NotFound`, also below something that is no directory; `Forbidden`.
    pub fn stat(&self, path: &FilePath) -> Result<Entry> {
        let status = self
            .status(path.bytes(), AtFlags::AT_SYMLINK_NOFOLLOW)
            .map_err(|errno| {
                // To a client that asks whether a path exists, a file in its middle means no.
                let is_missing = errno == Errno::ENOTDIR;
                let errno = if is_missing { Errno::ENOENT } else { errno };
                self.error(format_args!("cannot stat {path}"), errno)
            })?;
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

    /// Opens a file for reading; a device only `with_devices`. Kinds that are refused are not opened
    /// at all: opening a pipe can wake, and then break, the process at its other end, and opening some
    /// devices has side effects.
    ///
    /// # Errors
    /// `NotFound`; `IsDirectory`; `NotRegular` if reading could block without end.
    pub fn open(&self, path: &FilePath, with_devices: bool) -> Result<Opened> {
        let failed = |errno| self.error(format_args!("cannot read {path}"), errno);
        let check = |status: &FileStat| {
            let (kind, why) = match FileKind::of(status) {
                FileKind::Directory => (Kind::IsDirectory, "a directory; list it"),
                FileKind::Pipe => (
                    Kind::NotRegular,
                    "a named pipe, which could block without end; use a command",
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
        let status = self.status(path.bytes(), AtFlags::empty());
        check(&status.map_err(failed)?)?;
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let file = File::from(self.resolve(path.bytes(), flags).map_err(failed)?);
        // Again, of the descriptor: the name may mean another file than a moment ago.
        let status = fstat(&file).map_err(failed)?;
        Ok(Opened {
            kind: check(&status)?,
            size: size(&status),
            mode: status.st_mode & 0o7777,
            file,
        })
    }
}
