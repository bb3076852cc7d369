//! Writing files: whole ones so that a reader sees the old content or the new, ranges in place.
//!
//! A whole file is written to an inode without a name (`O_TMPFILE`), which takes its place under the
//! name only when it is complete. Until then there is nothing to clean up: a client that goes away,
//! a full disk or a killed server leaves the old file and no litter. Where the file system has no
//! such inodes, a hidden file beside the target is used, and removed on failure; a server killed
//! with one leaves it.
//!
//! A file that nothing can take the place of, because it is mounted there or nothing may be added to
//! its directory, is overwritten with the complete upload: one that breaks off changes nothing there
//! either, but who reads during the copying may see both contents. Only devices and pipes are written
//! to as the bytes come.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, FallocateFlags, OFlag, fallocate, openat, renameat};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::{FileStat, Mode, fchmod, fstat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchown, ftruncate, linkat, unlinkat};

use super::conduit::Conduit;
use super::name::FilePath;
use super::root::{Place, opening_error};
use super::{FileKind, Root, size};
use crate::error::{Error, Kind, Result};

/// Tries to open a file that others make, replace or protect at the same time.
const ATTEMPTS: usize = 16;

/// Where an upload waits whose own directory takes no more names, in order of preference; memory
/// comes last.
const WAITING_PLACES: [&str; 2] = ["/tmp", "/var/tmp"];

/// A whole file on its way.
pub struct Upload<'files> {
    shown: String,
    file: File,
    written: u64,
    /// The mode that was asked for.
    mode: Option<u32>,
    /// Where it goes when it is complete; nowhere, if it is written to a device or pipe directly.
    landing: Option<Landing>,
    /// It ends as it began, as the owner of the files.
    files: PhantomData<&'files Root>,
}

/// Where an upload ends up.
struct Landing {
    place: Place,
    /// Whether there was something.
    replaces: bool,
    /// Mode, user and group that the file has unless others are asked for.
    kept: Option<(u32, u32, u32)>,
    staging: Staging,
}

/// Where an upload waits.
enum Staging {
    /// On the target's file system, without a name.
    Unnamed,
    /// Beside the target.
    Named(Vec<u8>),
    /// Where it can only be copied from.
    Elsewhere,
}

/// A range on its way into a file.
pub struct RangedWrite<'files> {
    shown: String,
    place: Place,
    file: File,
    offset: u64,
    truncate_to: Option<u64>,
    mode: Option<u32>,
    /// Whether the file was made for this range.
    is_new: bool,
    /// It ends as it began, as the owner of the files.
    files: PhantomData<&'files Root>,
}

impl Root {
    /// Begins to write a whole file. A file that is replaced hands on its mode (unless `mode` is
    /// given) and its owner. `make_parents` makes the directories above it.
    ///
    /// # Errors
    /// The place cannot be written to.
    pub fn upload(
        &self,
        path: &FilePath,
        mode: Option<u32>,
        make_parents: bool,
    ) -> Result<Upload<'_>> {
        let failed = |errno| self.error(format_args!("cannot write {path}"), errno);
        let (place, existing) = self.target(path, make_parents)?;
        let upload = |file, landing| Upload {
            shown: path.to_string(),
            file,
            written: 0,
            mode,
            landing,
            files: PhantomData,
        };
        let mut kept = None;
        if let Some(existing) = &existing {
            match FileKind::of(existing) {
                FileKind::Directory => return Err(is_directory(path)),
                FileKind::Regular => kept = Some(attributes(existing)),
                _ => return Ok(upload(open_existing(&place, path)?, None)),
            }
        }
        let private = mode.is_some() || kept.is_some();
        let (file, staging) = match stage(&place.directory, private) {
            // Nothing may be added to the directory, but the file itself may be writable.
            Err(Errno::EACCES | Errno::EPERM | Errno::EROFS) if kept.is_some() => {
                open_existing(&place, path)?;
                (stage_elsewhere().map_err(failed)?, Staging::Elsewhere)
            }
            staged => staged.map_err(failed)?,
        };
        Ok(upload(
            file,
            Some(Landing {
                place,
                replaces: kept.is_some(),
                kept,
                staging,
            }),
        ))
    }

    /// Begins to write at an offset, into a file that is made if it is missing and never emptied.
    /// With a `mode` a file of one's own is written although its mode forbids it: the mode comes
    /// with every range, and the first to end must not lock the others out.
    ///
    /// # Errors
    /// The place cannot be written to, or has no offsets.
    pub fn write_range(
        &self,
        path: &FilePath,
        offset: u64,
        truncate_to: Option<u64>,
        mode: Option<u32>,
        make_parents: bool,
    ) -> Result<RangedWrite<'_>> {
        let mut last = Errno::EBUSY;
        for _ in 0..ATTEMPTS {
            let (place, existing) = self.target(path, make_parents)?;
            if let Some(existing) = &existing {
                check_offsets(existing, path)?;
            }
            // Not O_CREAT for a file that is there: in a sticky directory that is refused for
            // somebody else's even where writing is allowed (proc(5), protected_regular).
            let opened = match existing {
                None => place.open(OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL),
                Some(status) => match place.open(OFlag::O_WRONLY) {
                    Err(Errno::EACCES) if mode.is_some() => open_protected(&place, &status),
                    opened => opened,
                },
            };
            let file = match opened {
                Ok(file) => file,
                // Made, removed or protected by another range since it was looked at.
                Err(errno @ (Errno::EEXIST | Errno::ENOENT | Errno::ESTALE)) => {
                    last = errno;
                    continue;
                }
                Err(errno) => {
                    last = errno;
                    break;
                }
            };
            let status = fstat(&file)
                .map_err(|errno| self.error(format_args!("cannot write {path}"), errno))?;
            check_offsets(&status, path)?;
            return Ok(RangedWrite {
                shown: path.to_string(),
                place,
                file,
                offset,
                // A device has no size to set.
                truncate_to: truncate_to.filter(|_| FileKind::of(&status) == FileKind::Regular),
                mode,
                is_new: existing.is_none(),
                files: PhantomData,
            });
        }
        let last = if last == Errno::ESTALE {
            Errno::EACCES
        } else {
            last
        };
        Err(self.error(format_args!("cannot write {path}"), last))
    }
}

impl Upload<'_> {
    /// Begins to replace whatever is at a place, which must not be a directory, with a file that has
    /// the mode and owner of another.
    pub(super) fn replacing(place: Place, path: &FilePath, like: &FileStat) -> Result<Self> {
        let failed = |errno| Error::system(format_args!("cannot write {path}"), errno);
        let existing = place.existing().map_err(failed)?;
        if existing.is_some_and(|existing| FileKind::of(&existing) == FileKind::Directory) {
            return Err(is_directory(path));
        }
        let (file, staging) = stage(&place.directory, true).map_err(failed)?;
        Ok(Self {
            shown: path.to_string(),
            file,
            written: 0,
            mode: None,
            landing: Some(Landing {
                place,
                replaces: existing.is_some(),
                kept: Some(attributes(like)),
                staging,
            }),
            files: PhantomData,
        })
    }

    /// Adds as many of the bytes at the end as can be taken; 0 if a pipe is full.
    ///
    /// # Errors
    /// The disk is full, or the pipe's reader has gone.
    pub fn write(&mut self, data: &[u8]) -> Result<usize> {
        loop {
            match self.file.write(data) {
                Ok(count) => {
                    self.written += count as u64;
                    return Ok(count);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Err(self.unread()),
                Err(error) => {
                    let act = format_args!("cannot write {}", self.shown);
                    return Err(Error::io(act, &error));
                }
            }
        }
    }

    /// Adds the `count` bytes that were put into a conduit. Only where it [lands](Self::lands).
    ///
    /// # Errors
    /// The disk is full.
    pub fn pour(&mut self, conduit: &mut Conduit, count: usize) -> Result<()> {
        conduit
            .pour(&self.file, None, count)
            .map_err(|error| Error::io(format_args!("cannot write {}", self.shown), &error))?;
        self.written += count as u64;
        Ok(())
    }

    /// Whether it becomes a file, rather than being written to a device or pipe as it comes.
    pub fn lands(&self) -> bool {
        self.landing.is_some()
    }

    /// What is written to, for waiting until it takes more.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The error of a pipe that takes nothing.
    pub fn unread(&self) -> Error {
        Error::new(
            Kind::NotRegular,
            format!("cannot write {}: nobody reads the pipe", self.shown),
        )
    }

    /// Puts the complete file in its place; its size.
    ///
    /// # Errors
    /// It cannot be put there; the old file is left.
    pub fn commit(mut self) -> Result<u64> {
        let landed = match &mut self.landing {
            None => set_mode(&self.file, self.mode),
            Some(landing) => landing.land(&self.file, self.mode),
        };
        landed
            .map_err(|errno| opening_error(format_args!("cannot write {}", self.shown), errno))?;
        Ok(self.written)
    }
}

impl Landing {
    fn land(&mut self, file: &File, mode: Option<u32>) -> std::result::Result<(), Errno> {
        if !matches!(self.staging, Staging::Elsewhere) {
            match self.replace(file, mode) {
                // Something is mounted there, as container engines do with /etc/hosts; or the file
                // may be written but neither given to its owner nor renamed over.
                Err(Errno::EBUSY | Errno::EPERM | Errno::EACCES) if self.replaces => {}
                other => return other,
            }
        }
        self.copy_over(file, mode)
    }

    /// Puts the staged file under the name.
    fn replace(&mut self, file: &File, mode: Option<u32>) -> std::result::Result<(), Errno> {
        if let Some((_, uid, gid)) = self.kept {
            let status = fstat(file)?;
            if (status.st_uid, status.st_gid) != (uid, gid) {
                fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
            }
        }
        // After the owner: changing that takes set-user-ID bits away (chown(2)).
        set_mode(file, mode.or(self.kept.map(|(mode, ..)| mode)))?;
        let Place { directory, name } = &self.place;
        if let Staging::Unnamed = self.staging {
            if !self.replaces {
                match link_open_file(file, directory, name) {
                    Err(Errno::EEXIST) => {}
                    other => return other,
                }
            }
            // An existing name can only be replaced by renaming, so the file needs a name first.
            let temporary = temporary_name();
            link_open_file(file, directory, &temporary)?;
            self.staging = Staging::Named(temporary);
        }
        if let Staging::Named(temporary) = &self.staging {
            renameat(directory, temporary.as_slice(), directory, name.as_slice())?;
            self.staging = Staging::Unnamed;
        }
        Ok(())
    }

    /// Writes the complete upload over a file that cannot be replaced.
    fn copy_over(&self, file: &File, mode: Option<u32>) -> std::result::Result<(), Errno> {
        let to_errno =
            |error: std::io::Error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
        let target = self.place.open(OFlag::O_WRONLY)?;
        if FileKind::of(&fstat(&target)?) != FileKind::Regular {
            // It was replaced after it was looked at.
            return Err(Errno::EBUSY);
        }
        let written = fstat(file)?.st_size;
        // What finds no room changes nothing; not every file system can tell.
        let room = fallocate(&target, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, written);
        if let Err(errno @ (Errno::ENOSPC | Errno::EDQUOT)) = room {
            return Err(errno);
        }
        let mut buffer = vec![0; 256 * 1024];
        let mut offset = 0;
        loop {
            let count = file.read_at(&mut buffer, offset).map_err(to_errno)?;
            if count == 0 {
                break;
            }
            target
                .write_all_at(&buffer[..count], offset)
                .map_err(to_errno)?;
            offset += count as u64;
        }
        ftruncate(&target, written)?;
        set_mode(&target, mode)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if let Staging::Named(temporary) = &self.staging {
            let directory = &self.place.directory;
            let _ = unlinkat(directory, temporary.as_slice(), UnlinkatFlags::NoRemoveDir);
        }
    }
}

impl RangedWrite<'_> {
    /// Writes the next bytes.
    ///
    /// # Errors
    /// The disk is full, or no file can be so large.
    pub fn write(&mut self, data: &[u8]) -> Result<()> {
        let written = self.file.write_all_at(data, self.offset);
        self.advance(written, data.len())
    }

    /// Writes the `count` bytes that were put into a conduit.
    ///
    /// # Errors
    /// The disk is full, or no file can be so large.
    pub fn pour(&mut self, conduit: &mut Conduit, count: usize) -> Result<()> {
        let written = conduit.pour(&self.file, Some(self.offset), count);
        self.advance(written, count)
    }

    fn advance(&mut self, written: std::io::Result<()>, count: usize) -> Result<()> {
        written.map_err(|error| {
            self.give_up();
            Error::io(format_args!("cannot write {}", self.shown), &error)
        })?;
        self.offset += count as u64;
        Ok(())
    }

    /// Sets the final size and mode, if any were asked for; the file's size.
    ///
    /// # Errors
    /// They cannot be set.
    pub fn commit(self) -> Result<u64> {
        let finish = || {
            if let Some(size) = self.truncate_to {
                ftruncate(&self.file, i64::try_from(size).map_err(|_| Errno::EFBIG)?)?;
            }
            set_mode(&self.file, self.mode)?;
            Ok(size(&fstat(&self.file)?))
        };
        finish().map_err(|errno| {
            self.give_up();
            Error::system(format_args!("cannot write {}", self.shown), errno)
        })
    }

    /// Removes a file that was made for a range that could not be written. Once another range has
    /// put something into it, it stays.
    fn give_up(&self) {
        if self.is_new && fstat(&self.file).is_ok_and(|status| status.st_size == 0) {
            let _ = self.place.unlink();
        }
    }
}

/// Mode, user and group.
fn attributes(status: &FileStat) -> (u32, u32, u32) {
    (status.st_mode & 0o7777, status.st_uid, status.st_gid)
}

fn is_directory(path: &FilePath) -> Error {
    Error::new(
        Kind::IsDirectory,
        format!("cannot write {path}: it is a directory"),
    )
}

/// Refuses what cannot be written at an offset, if possible before it is opened: opening a pipe
/// could wake whoever waits at its other end.
fn check_offsets(status: &FileStat, path: &FilePath) -> Result<()> {
    match FileKind::of(status) {
        FileKind::Directory => Err(is_directory(path)),
        FileKind::Pipe | FileKind::Socket => Err(Error::new(
            Kind::NotRegular,
            format!("cannot write {path} at an offset: it is a pipe or socket, which has none"),
        )),
        _ => Ok(()),
    }
}

/// Opens what cannot be replaced.
fn open_existing(place: &Place, path: &FilePath) -> Result<File> {
    place.open(OFlag::O_WRONLY).map_err(|errno| match errno {
        Errno::ENXIO => Error::new(
            Kind::NotRegular,
            format!("cannot write {path}: it is a socket, or a pipe that nobody reads"),
        ),
        errno => opening_error(format_args!("cannot write {path}"), errno),
    })
}

/// Opens a file of one's own whose mode forbids writing; `ESTALE` if somebody else protects it again
/// at that moment. Its mode is as before at once: a range that breaks off must not change it.
fn open_protected(place: &Place, status: &FileStat) -> std::result::Result<File, Errno> {
    let mode = status.st_mode & 0o7777;
    if FileKind::of(status) != FileKind::Regular || place.set_mode(mode | 0o200).is_err() {
        return Err(Errno::EACCES);
    }
    let opened = place.open(OFlag::O_WRONLY);
    let _ = place.set_mode(mode);
    opened.map_err(|errno| match errno {
        Errno::EACCES => Errno::ESTALE,
        errno => errno,
    })
}

fn set_mode(file: &File, mode: Option<u32>) -> std::result::Result<(), Errno> {
    match mode {
        Some(mode) => fchmod(file, Mode::from_bits_truncate(mode)),
        None => Ok(()),
    }
}

/// Makes the inode that an upload is written to; a `private` one is nobody else's to read until it
/// has its final mode.
fn stage(directory: &OwnedFd, private: bool) -> std::result::Result<(File, Staging), Errno> {
    let mode = Mode::from_bits_truncate(if private { 0o600 } else { 0o666 });
    let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC;
    match openat(directory, ".", flags | OFlag::O_TMPFILE, mode) {
        Ok(file) => return Ok((File::from(file), Staging::Unnamed)),
        // What kernels and file systems without it say (open(2)).
        Err(Errno::EOPNOTSUPP | Errno::EISDIR | Errno::EINVAL | Errno::ENOENT | Errno::ENOSYS) => {}
        Err(errno) => return Err(errno),
    }
    let name = temporary_name();
    let named = flags | OFlag::O_CREAT | OFlag::O_EXCL;
    let file = openat(directory, name.as_slice(), named, mode)?;
    Ok((File::from(file), Staging::Named(name)))
}

/// Makes an inode for an upload that will be copied to where it belongs.
fn stage_elsewhere() -> std::result::Result<File, Errno> {
    let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    let mode = Mode::from_bits_truncate(0o600);
    WAITING_PLACES
        .iter()
        .find_map(|directory| nix::fcntl::open(*directory, flags, mode).ok())
        .map_or_else(|| memfd_create("upload", MFdFlags::MFD_CLOEXEC), Ok)
        .map(File::from)
}

/// A name that nobody else uses: hidden, and different each time.
pub(super) fn temporary_name() -> Vec<u8> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    #[expect(
        clippy::disallowed_methods,
        reason = "it only has to be another each time"
    )]
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos());
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!(".sbx-upload-{:x}-{now:x}-{count:x}", std::process::id()).into_bytes()
}

/// Names an open file that has no name, or gives it another (open(2), `O_TMPFILE`).
fn link_open_file(file: &File, directory: &OwnedFd, name: &[u8]) -> std::result::Result<(), Errno> {
    use std::os::fd::AsRawFd;
    let by_proc = format!("/proc/self/fd/{}", file.as_raw_fd());
    match linkat(
        nix::fcntl::AT_FDCWD,
        by_proc.as_str(),
        directory,
        name,
        AtFlags::AT_SYMLINK_FOLLOW,
    ) {
        // No /proc here; this way wants CAP_DAC_READ_SEARCH, or a recent kernel.
        Err(Errno::ENOENT) => linkat(file, "", directory, name, AtFlags::AT_EMPTY_PATH),
        other => other,
    }
}
