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

/// Most bytes of a file that tells no size, as those of /proc: some have no end.
const MAX_UNSIZED_BYTES: u64 = 64 << 20;

/// Where the content of a file ends that is read once: what is appended meanwhile is left out.
pub(super) struct ContentEnd(u64);

impl ContentEnd {
    /// Of a file that had this size when it was opened.
    pub(super) fn new(size: u64) -> Self {
        Self(size)
    }

    /// The end, as far as it is known when `offset` bytes have been read. A file that was empty ends where it
    /// does after the first bytes were found.
    ///
    /// # Errors
    /// `EFBIG` if the file tells no size and goes on.
    pub(super) fn after(&mut self, offset: u64, file: &File) -> nix::Result<u64> {
        if self.0 == 0 && offset > 0 {
            self.0 = size(&fstat(file)?);
        }
        match self.0 {
            0 if offset >= MAX_UNSIZED_BYTES => Err(Errno::EFBIG),
            0 => Ok(MAX_UNSIZED_BYTES),
            end => Ok(end),
        }
    }
}

impl Root {
    /// The attributes of a file. A link is not followed.
    ///
    /// # Errors
    /// `NotFound`, even below something that is no directory; `Forbidden`.
    pub fn stat(&self, path: &FilePath) -> Result<Entry> {
        let status = self
            .status(path, AtFlags::AT_SYMLINK_NOFOLLOW)
            .map_err(|errno| {
                // To a client that asks whether a path exists, a file in its middle means no.
                let is_missing = errno == Errno::ENOTDIR;
                let errno = if is_missing { Errno::ENOENT } else { errno };
                self.error(format_args!("cannot stat {path}"), errno)
            })?;
        let mut entry = Entry::new(path.name().to_vec(), &status);
        if entry.kind == FileKind::Link {
            entry.target = self
                .resolve(path, OFlag::O_PATH | OFlag::O_NOFOLLOW)
                .and_then(|link| link_target(&link, b""))
                .ok();
            // A dangling link keeps its own size: there is nothing to read behind it.
            if self.sizes_links_by_target
                && let Ok(followed) = self.status(path, AtFlags::empty())
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
        let status = self.status(path, AtFlags::empty());
        check(&status.map_err(failed)?)?;
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let file = File::from(self.resolve(path, flags).map_err(failed)?);
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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_that_grows_or_tells_no_size_has_an_end() {
        let path = std::env::temp_dir().join(format!("sbx-content-end-{}", std::process::id()));
        let mut writer = File::create(&path).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut end = ContentEnd::new(0);
        assert_eq!(end.after(0, &file), Ok(MAX_UNSIZED_BYTES));
        for _ in 0..3 {
            writer.write_all(b"12345").unwrap();
            assert_eq!(end.after(2, &file), Ok(5));
        }
        assert_eq!(ContentEnd::new(7).after(9, &file), Ok(7));
        let endless = File::open("/proc/self/pagemap").unwrap();
        let mut end = ContentEnd::new(0);
        assert_eq!(end.after(1, &endless), Ok(MAX_UNSIZED_BYTES));
        let after = end.after(MAX_UNSIZED_BYTES, &endless);
        assert_eq!(after, Err(Errno::EFBIG));
    }
}
