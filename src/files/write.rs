//! Writing files: whole ones so that a reader sees the old content or the new, ranges in place.
//!
//! A whole file is written to an inode without a name (`O_TMPFILE`), which takes its place under the
//! name only when it is complete. Until then there is nothing to clean up: a client that goes away,
//! a full disk or a killed server leaves the old file and no litter. Where the file system has no
//! such inodes, a hidden file beside the target is used, and removed on failure.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, renameat};
use nix::sys::stat::{FileStat, Mode, fchmod, fstat, fstatat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchown, unlinkat};

use super::name::{FilePath, split};
use super::{FileKind, MAX_LINKS, Root, link_open_file, link_target};
use crate::error::{Error, Kind, Result};
use crate::sys::{Events, PollEntry, poll};

/// How long a pipe may take no data before its writer gives up.
const PIPE_PATIENCE: Duration = Duration::from_secs(10);

/// A whole file on its way.
pub struct Upload {
    shown: String,
    file: File,
    written: u64,
    /// The mode that was asked for.
    mode: Option<u32>,
    /// The mode of the file that is replaced.
    kept_mode: Option<u32>,
    owner: Option<(u32, u32)>,
    landing: Landing,
}

/// Where an upload ends up.
enum Landing {
    /// Under this name, as a whole.
    Replace {
        directory: OwnedFd,
        name: Vec<u8>,
        /// Whether there was something under the name.
        replaces: bool,
        staging: Staging,
    },
    /// In something that cannot be replaced: a device or pipe, or a file in a directory that
    /// nothing may be added to.
    InPlace { truncate: bool },
}

/// Where an upload waits.
enum Staging {
    /// It has no name.
    Unnamed,
    /// Beside the target.
    Named(Vec<u8>),
}

/// A range on its way into a file.
pub struct RangedWrite {
    shown: String,
    file: File,
    offset: u64,
    truncate_to: Option<u64>,
    mode: Option<u32>,
}

/// Where a whole file is to go: links are resolved, parents made.
struct Target {
    directory: OwnedFd,
    name: Vec<u8>,
    existing: Option<FileStat>,
}

impl Root {
    /// Begins to write a whole file. A file that is replaced hands on its mode (unless `mode` is
    /// given) and its owner. `make_parents` makes the directories above it.
    ///
    /// # Errors
    /// The place cannot be written to.
    pub fn upload(&self, path: &FilePath, mode: Option<u32>, make_parents: bool) -> Result<Upload> {
        let failed = |errno| Error::system(format_args!("cannot write {path}"), errno);
        let target = self.target(path, make_parents)?;
        let mut upload = Upload {
            shown: path.to_string(),
            // Replaced below; a descriptor is needed in every case.
            file: File::from(
                target
                    .directory
                    .try_clone()
                    .map_err(|error| Error::io(format_args!("cannot write {path}"), &error))?,
            ),
            written: 0,
            mode,
            kept_mode: None,
            owner: None,
            landing: Landing::InPlace { truncate: false },
        };
        if let Some(existing) = &target.existing {
            match FileKind::of(existing) {
                FileKind::Regular => {
                    upload.kept_mode = Some(existing.st_mode & 0o7777);
                    upload.owner = Some((existing.st_uid, existing.st_gid));
                }
                FileKind::Directory => {
                    return Err(Error::new(
                        Kind::IsDirectory,
                        format!("cannot write {path}: it is a directory"),
                    ));
                }
                _ => {
                    upload.file = open_in_place(&target, path)?;
                    return Ok(upload);
                }
            }
        }
        match stage(&target.directory) {
            Ok((file, staging)) => {
                upload.file = file;
                upload.landing = Landing::Replace {
                    directory: target.directory,
                    name: target.name,
                    replaces: target.existing.is_some(),
                    staging,
                };
            }
            // Nothing may be added to the directory, but the file itself may be writable.
            Err(Errno::EACCES | Errno::EPERM | Errno::EROFS) if target.existing.is_some() => {
                upload.file = open_in_place(&target, path)?;
                upload.landing = Landing::InPlace { truncate: true };
            }
            Err(errno) => return Err(failed(errno)),
        }
        Ok(upload)
    }

    /// Begins to write at an offset, into a file that is made if it is missing and never emptied.
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
    ) -> Result<RangedWrite> {
        let failed = |errno| Error::system(format_args!("cannot write {path}"), errno);
        let mut has_size = true;
        if let Ok(status) = self.status(path.bytes(), AtFlags::empty()) {
            // Asked before it is opened: opening a pipe could wake whoever waits at its other end.
            match FileKind::of(&status) {
                FileKind::Regular => {}
                FileKind::CharacterDevice | FileKind::BlockDevice => has_size = false,
                FileKind::Directory => {
                    return Err(Error::new(
                        Kind::IsDirectory,
                        format!("cannot write {path}: it is a directory"),
                    ));
                }
                _ => {
                    return Err(Error::new(
                        Kind::NotRegular,
                        format!(
                            "cannot write {path} at an offset: it is a pipe or socket, which has none"
                        ),
                    ));
                }
            }
        }
        let flags = OFlag::O_WRONLY
            | OFlag::O_CREAT
            | OFlag::O_NONBLOCK
            | OFlag::O_NOCTTY
            | OFlag::O_CLOEXEC;
        let open = || {
            openat(
                &self.directory,
                path.bytes(),
                flags,
                Mode::from_bits_truncate(0o666),
            )
        };
        let file = match open() {
            Err(Errno::ENOENT) if make_parents => match split(path.bytes()) {
                Some((parent, _)) => self.make_directories(parent).and_then(|()| open()),
                None => Err(Errno::EISDIR),
            },
            other => other,
        };
        let file = File::from(file.map_err(failed)?);
        Ok(RangedWrite {
            shown: path.to_string(),
            file,
            offset,
            // A device has no size to set.
            truncate_to: truncate_to.filter(|_| has_size),
            mode,
        })
    }

    /// Follows the last component's links by hand, because what replaces a file must take the place
    /// of the link's target and not of the link.
    fn target(&self, path: &FilePath, make_parents: bool) -> Result<Target> {
        let failed = |errno| Error::system(format_args!("cannot write {path}"), errno);
        if path.bytes().ends_with(b"/") {
            return Err(Error::new(
                Kind::IsDirectory,
                format!("cannot write {path}: it names a directory"),
            ));
        }
        let (mut directory, name) = self.parent(path, make_parents)?;
        let mut name = name.to_vec();
        for _ in 0..MAX_LINKS {
            let existing = match fstatat(&directory, name.as_slice(), AtFlags::AT_SYMLINK_NOFOLLOW)
            {
                Ok(status) => status,
                Err(Errno::ENOENT) => {
                    return Ok(Target {
                        directory,
                        name,
                        existing: None,
                    });
                }
                Err(errno) => return Err(failed(errno)),
            };
            if FileKind::of(&existing) != FileKind::Link {
                return Ok(Target {
                    directory,
                    name,
                    existing: Some(existing),
                });
            }
            let target = link_target(&directory, &name).map_err(failed)?;
            let (parent, last) = split(&target).ok_or_else(|| failed(Errno::EISDIR))?;
            let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            directory = openat(&directory, parent, flags, Mode::empty()).map_err(failed)?;
            name = last.to_vec();
        }
        Err(failed(Errno::ELOOP))
    }
}

impl Upload {
    /// Adds bytes at the end.
    ///
    /// # Errors
    /// The disk is full, or a pipe is not read.
    pub fn write(&mut self, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            match self.file.write(data) {
                Ok(count) => {
                    self.written += count as u64;
                    data = &data[count..];
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    self.wait_for_reader()?;
                }
                Err(error) => {
                    return Err(Error::io(
                        format_args!("cannot write {}", self.shown),
                        &error,
                    ));
                }
            }
        }
        Ok(())
    }

    /// Gives the file to somebody once it is complete.
    pub(super) fn set_owner(&mut self, uid: u32, gid: u32) {
        self.owner = Some((uid, gid));
    }

    fn wait_for_reader(&self) -> Result<()> {
        if poll(
            &mut [PollEntry::new(self.file.as_fd(), Events::WRITABLE)],
            Some(PIPE_PATIENCE),
        ) {
            return Ok(());
        }
        Err(Error::new(
            Kind::NotRegular,
            format!("cannot write {}: nobody reads the pipe", self.shown),
        ))
    }

    /// Puts the complete file in its place; its size.
    ///
    /// # Errors
    /// It cannot be put there; the old file is left.
    pub fn commit(mut self) -> Result<u64> {
        self.put_in_place()
            .map_err(|errno| Error::system(format_args!("cannot write {}", self.shown), errno))?;
        Ok(self.written)
    }

    fn put_in_place(&mut self) -> std::result::Result<(), Errno> {
        match &self.landing {
            Landing::InPlace { truncate } => {
                if *truncate {
                    nix::unistd::ftruncate(&self.file, length(self.written)?)?;
                }
                set_mode(&self.file, self.mode)
            }
            Landing::Replace { replaces, .. } => {
                let replaces = *replaces;
                match self.replace() {
                    // Something is mounted there, as container engines do with /etc/hosts; or the
                    // file may be written but neither given to its owner nor renamed over.
                    Err(Errno::EBUSY | Errno::EPERM | Errno::EACCES) if replaces => {
                        self.copy_over()
                    }
                    other => other,
                }
            }
        }
    }

    /// Puts the staged file under the name.
    fn replace(&mut self) -> std::result::Result<(), Errno> {
        let Landing::Replace {
            directory,
            name,
            replaces,
            staging,
        } = &mut self.landing
        else {
            return Ok(());
        };
        if let Some((uid, gid)) = self.owner {
            let status = fstat(&self.file)?;
            if (status.st_uid, status.st_gid) != (uid, gid) {
                fchown(
                    &self.file,
                    Some(Uid::from_raw(uid)),
                    Some(Gid::from_raw(gid)),
                )?;
            }
        }
        // After the owner: changing that takes set-user-ID bits away (chown(2)).
        set_mode(&self.file, self.mode.or(self.kept_mode))?;
        if let Staging::Unnamed = staging {
            if !*replaces {
                match link_open_file(&self.file, directory, name) {
                    Err(Errno::EEXIST) => {}
                    other => return other,
                }
            }
            // An existing name can only be replaced by renaming, so the file needs a name first.
            let temporary = temporary_name();
            link_open_file(&self.file, directory, &temporary)?;
            *staging = Staging::Named(temporary);
        }
        if let Staging::Named(temporary) = staging {
            renameat(
                &*directory,
                temporary.as_slice(),
                &*directory,
                name.as_slice(),
            )?;
            *staging = Staging::Unnamed;
        }
        Ok(())
    }

    /// Writes the complete upload over a file that cannot be replaced.
    fn copy_over(&self) -> std::result::Result<(), Errno> {
        let Landing::Replace {
            directory, name, ..
        } = &self.landing
        else {
            return Ok(());
        };
        let to_errno =
            |error: std::io::Error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
        let flags = OFlag::O_WRONLY | OFlag::O_NOFOLLOW | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let target = File::from(openat(directory, name.as_slice(), flags, Mode::empty())?);
        let mut buffer = vec![0; 256 * 1024];
        let mut offset = 0;
        while offset < self.written {
            let count = self.file.read_at(&mut buffer, offset).map_err(to_errno)?;
            if count == 0 {
                break;
            }
            target
                .write_all_at(&buffer[..count], offset)
                .map_err(to_errno)?;
            offset += count as u64;
        }
        nix::unistd::ftruncate(&target, length(self.written)?)?;
        set_mode(&target, self.mode)
    }
}

fn set_mode(file: &File, mode: Option<u32>) -> std::result::Result<(), Errno> {
    match mode {
        Some(mode) => fchmod(file, Mode::from_bits_truncate(mode)),
        None => Ok(()),
    }
}

fn length(bytes: u64) -> std::result::Result<i64, Errno> {
    i64::try_from(bytes).map_err(|_| Errno::EFBIG)
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Landing::Replace {
            directory,
            staging: Staging::Named(name),
            ..
        } = &self.landing
        {
            let _ = unlinkat(directory, name.as_slice(), UnlinkatFlags::NoRemoveDir);
        }
    }
}

impl RangedWrite {
    /// Writes the next bytes.
    ///
    /// # Errors
    /// The disk is full.
    pub fn write(&mut self, data: &[u8]) -> Result<()> {
        self.file
            .write_all_at(data, self.offset)
            .map_err(|error| Error::io(format_args!("cannot write {}", self.shown), &error))?;
        self.offset += data.len() as u64;
        Ok(())
    }

    /// Sets the final size and mode, if any were asked for; the file's size.
    ///
    /// # Errors
    /// They cannot be set.
    pub fn commit(self) -> Result<u64> {
        let failed = |errno| Error::system(format_args!("cannot write {}", self.shown), errno);
        if let Some(size) = self.truncate_to {
            let size = length(size).map_err(failed)?;
            nix::unistd::ftruncate(&self.file, size).map_err(failed)?;
        }
        set_mode(&self.file, self.mode).map_err(failed)?;
        Ok(super::size(&fstat(&self.file).map_err(failed)?))
    }
}

fn open_in_place(target: &Target, path: &FilePath) -> Result<File> {
    let flags = OFlag::O_WRONLY
        | OFlag::O_NONBLOCK
        | OFlag::O_NOCTTY
        | OFlag::O_NOFOLLOW
        | OFlag::O_CLOEXEC;
    match openat(
        &target.directory,
        target.name.as_slice(),
        flags,
        Mode::empty(),
    ) {
        Ok(file) => Ok(File::from(file)),
        Err(Errno::ENXIO) => Err(Error::new(
            Kind::NotRegular,
            format!("cannot write {path}: it is a socket, or a pipe that nobody reads"),
        )),
        Err(errno) => Err(Error::system(format_args!("cannot write {path}"), errno)),
    }
}

/// Makes the inode that an upload is written to.
fn stage(directory: &OwnedFd) -> std::result::Result<(File, Staging), Errno> {
    let unnamed = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
    match openat(directory, ".", unnamed, Mode::from_bits_truncate(0o666)) {
        Ok(file) => return Ok((File::from(file), Staging::Unnamed)),
        // What kernels and file systems without it say (open(2)).
        Err(Errno::EOPNOTSUPP | Errno::EISDIR | Errno::EINVAL | Errno::ENOENT | Errno::ENOSYS) => {}
        Err(errno) => return Err(errno),
    }
    let name = temporary_name();
    let named = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_RDWR | OFlag::O_CLOEXEC;
    let file = openat(
        directory,
        name.as_slice(),
        named,
        Mode::from_bits_truncate(0o666),
    )?;
    Ok((File::from(file), Staging::Named(name)))
}

/// A name that nobody else uses: hidden, and different each time.
fn temporary_name() -> Vec<u8> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos());
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!(".sbx-upload-{:x}-{now:x}-{count:x}", std::process::id()).into_bytes()
}
