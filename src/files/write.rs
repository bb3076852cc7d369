//! Writes files: whole files atomically, ranges in place.
//!
//! A whole file is written to an inode without a name (`O_TMPFILE`), which replaces the old file when it
//! is complete. Until then there is nothing to clean up: a client that disconnects, a full disk or a
//! killed server leaves the old file and no litter. Where the file system has no such inodes, a hidden
//! file beside the target is used and removed on failure; only a killed server leaves it. The same holds for an
//! upload that is closed until its turn comes ([`ClosedUpload`]), because a request has many.
//!
//! A file that cannot be replaced, because it is a mount point or its directory is not writable, is
//! overwritten with the complete upload. An upload that breaks off changes nothing there either, but a
//! reader during the copy may see both contents. Only devices and pipes are written as the bytes come.

use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, FallocateFlags, OFlag, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::{FileStat, Mode, fchmod, fstat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchown, ftruncate};

use super::condition::{Condition, Turn, changed, check_again, check_version, exists};
use super::describe::{Attribute, attribute_error, clear_attributes, set_attributes};
use super::entry::{FileKind, FileVersion, Identity, size};
use super::hash::Digest;
use super::name::FilePath;
use super::name_at::NameAt;
use super::root::{Root, opening_error};
use super::splice_pipe::SplicePipe;
use crate::client::{Interrupt, Stopped};
use crate::error::{Error, Kind, Result};
use crate::sys::paths::{linkat, open, openat, renameat, unlinkat};

/// Tries to open a file that other requests make, replace or protect at the same time.
const ATTEMPTS: usize = 16;

/// Why a file is not written that was something else before.
const MEANWHILE: &str = "another program changed it meanwhile; read it again";

/// Directories for uploads that cannot be staged beside their target, in order of preference. Memory
/// comes last.
const STAGING_DIRECTORIES: [&str; 2] = ["/tmp", "/var/tmp"];

/// A whole file that is being received.
pub struct Upload<'files> {
    shown: String,
    file: File,
    written: u64,
    mode: Option<u32>,
    /// How the complete file replaces the target; `None` for a device or pipe, which is written directly.
    commit: Option<Commit>,
    /// Ends before [`Files`](super::Files), while the thread still acts as the owner.
    files: PhantomData<&'files Root>,
}

/// The replacement of a file by a complete upload.
struct Commit {
    target: NameAt,
    /// Whether the target exists.
    replaces: bool,
    /// Mode, user and group of the file that is replaced.
    kept: Option<(u32, u32, u32)>,
    staging: Staging,
    /// Whether there must be no file.
    is_exclusive: bool,
    /// What the file gets in place of those of its attributes whose names begin so.
    attributes: Option<(&'static str, Vec<Attribute>)>,
}

/// A complete upload that waits in a hidden file beside its target, without a descriptor: a request may have any number
/// of them. The file is removed when the value is dropped, if the path still leads to its directory.
pub struct ClosedUpload<'files> {
    root: &'files Root,
    path: &'files FilePath,
    /// The [key](NameAt::key) of the target: whatever the path leads to later, no other one is written.
    key: Vec<u8>,
    /// The name of the hidden file; empty if it needs none any more.
    hidden: Vec<u8>,
    /// Of the hidden file.
    identity: Identity,
    written: u64,
    mode: Option<u32>,
    replaces: bool,
    kept: Option<(u32, u32, u32)>,
}

/// Where the bytes of an upload are until it is complete.
pub(super) enum Staging {
    /// An inode without a name on the target's file system.
    Unnamed,
    /// A hidden file beside the target.
    Named(Vec<u8>),
    /// Another file system, or memory: it can only be copied.
    Elsewhere,
}

/// A range that is being written into a file.
pub struct RangedWrite<'files> {
    shown: String,
    target: NameAt,
    file: File,
    offset: u64,
    truncate_to: Option<u64>,
    mode: Option<u32>,
    /// Whether this request made the file.
    is_new: bool,
    /// Ends before [`Files`](super::Files), while the thread still acts as the owner.
    files: PhantomData<&'files Root>,
}

impl Root {
    /// Begins to write a whole file. The new file gets the owner of the old one, and its mode unless
    /// `mode` is given.
    ///
    /// # Errors
    /// `IsDirectory`, `NotRegular`, `Forbidden`, `NotFound` without `make_parents`, `NoSpace`.
    pub fn upload(
        &self,
        path: &FilePath,
        mode: Option<u32>,
        make_parents: bool,
    ) -> Result<Upload<'_>> {
        let failed = |errno| self.error(format_args!("cannot write {path}"), errno);
        let (target, existing) = self.target(path, make_parents)?;
        let mut kept = None;
        if let Some(existing) = &existing {
            match FileKind::of(existing) {
                FileKind::Directory => return Err(is_directory(path)),
                FileKind::Regular => kept = Some(attributes(existing)),
                FileKind::Pipe if !self.is_whole_machine() => {
                    let text = format!(
                        "cannot write {path}: it is a named pipe, which could block without end; use a command"
                    );
                    return Err(Error::new(Kind::NotRegular, text));
                }
                FileKind::Pipe => {
                    let file = opened_existing(target.open_even_pipe(), path)?;
                    return Ok(Upload::new(path, file, mode, None));
                }
                _ => {
                    let file = open_existing(&target, path)?;
                    return Ok(Upload::new(path, file, mode, None));
                }
            }
        }
        let private = mode.is_some() || kept.is_some();
        let (file, staging) = match stage(&target.directory, private) {
            // The directory takes no new names, but the file itself may be writable.
            Err(Errno::EACCES | Errno::EPERM | Errno::EROFS) if kept.is_some() => {
                open_existing(&target, path)?;
                (
                    self.stage_elsewhere(path).map_err(failed)?,
                    Staging::Elsewhere,
                )
            }
            staged => staged.map_err(failed)?,
        };
        let commit = Commit {
            target,
            replaces: kept.is_some(),
            kept,
            staging,
            is_exclusive: false,
            attributes: None,
        };
        Ok(Upload::new(path, file, mode, Some(commit)))
    }

    /// Makes an inode for an upload that will be copied to its target. Within a sandbox it is the sandbox's: what is anywhere
    /// else would count for nobody, and be memory where the machine has no disk for it.
    fn stage_elsewhere(&self, path: &FilePath) -> nix::Result<File> {
        if self.is_whole_machine() {
            return stage_on_machine();
        }
        let start = self.start(path.tree())?;
        let (file, mut staging) = stage(&start, true)?;
        // It needs no name: it is copied.
        staging.remove(&start);
        Ok(file)
    }

    /// What is the same for two paths exactly if they name the same place for a file. Of a path that leads
    /// nowhere, the path below this root.
    pub fn key(&self, path: &FilePath) -> Vec<u8> {
        let target = self.target(path, false).ok();
        let found = target.and_then(|(target, _)| target.key().ok());
        found.unwrap_or_else(|| {
            let start = self.start(path.tree()).and_then(Identity::of_open);
            let start = start.map(Identity::bytes).unwrap_or_default();
            [&start[..], path.bytes()].concat()
        })
    }

    /// Begins to write at an offset of a file, which is made if it is missing and never truncated. With
    /// a `mode`, an own file is written even if its mode forbids it: clients send the mode with every
    /// range, and the first range that ends must not lock the others out.
    ///
    /// # Errors
    /// `IsDirectory`; `NotRegular` for a pipe or socket; `Forbidden`; `NotFound` without `make_parents`.
    pub fn write_range(
        &self,
        path: &FilePath,
        offset: u64,
        truncate_to: Option<u64>,
        mode: Option<u32>,
        make_parents: bool,
    ) -> Result<RangedWrite<'_>> {
        let failed = |errno| self.error(format_args!("cannot write {path}"), errno);
        let mut last = Errno::EBUSY;
        for _ in 0..ATTEMPTS {
            let (target, existing) = self.target(path, make_parents)?;
            if let Some(existing) = &existing {
                check_offsets(existing, path)?;
            }
            // No O_CREAT for an existing file: in a sticky directory the kernel refuses it for another
            // user's file, even if that is writable (proc(5), protected_regular).
            let opened = match existing {
                None => target.make(),
                Some(status) => match target.open(OFlag::O_WRONLY) {
                    Err(Errno::EACCES) if mode.is_some() => open_protected(&target, &status),
                    opened => opened,
                },
            };
            let file = match opened {
                Ok(file) => file,
                // Another range made, removed or protected it since it was checked.
                Err(errno @ (Errno::EEXIST | Errno::ENOENT | Errno::ESTALE)) => {
                    last = errno;
                    continue;
                }
                Err(errno) => return Err(failed(errno)),
            };
            let status = fstat(&file).map_err(failed)?;
            check_offsets(&status, path)?;
            return Ok(RangedWrite {
                shown: path.to_string(),
                target,
                file,
                offset,
                // A device has no size.
                truncate_to: truncate_to.filter(|_| FileKind::of(&status) == FileKind::Regular),
                mode,
                is_new: existing.is_none(),
                files: PhantomData,
            });
        }
        Err(failed(match last {
            Errno::ESTALE => Errno::EACCES,
            last => last,
        }))
    }
}

impl Upload<'_> {
    fn new(path: impl fmt::Display, file: File, mode: Option<u32>, commit: Option<Commit>) -> Self {
        Self {
            shown: path.to_string(),
            file,
            written: 0,
            mode,
            commit,
            files: PhantomData,
        }
    }

    /// Begins to replace `target`, which is `shown` in errors. The file is private until a mode is
    /// [set](Self::set_mode).
    ///
    /// # Errors
    /// `IsDirectory` if the target is one; `Forbidden`, `NoSpace`.
    pub(super) fn replacing(target: NameAt, shown: impl fmt::Display) -> Result<Self> {
        let failed = |errno| Error::system(format_args!("cannot write {shown}"), errno);
        let existing = target.existing().map_err(failed)?;
        if existing.is_some_and(|existing| FileKind::of(&existing) == FileKind::Directory) {
            return Err(is_directory(shown));
        }
        let (file, staging) = stage(&target.directory, true).map_err(failed)?;
        let commit = Commit {
            target,
            replaces: existing.is_some(),
            kept: None,
            staging,
            is_exclusive: false,
            attributes: None,
        };
        Ok(Self::new(shown, file, None, Some(commit)))
    }

    /// Gives the complete file the mode and the owner of another.
    pub(super) fn keep_attributes(&mut self, like: &FileStat) {
        if let Some(commit) = &mut self.commit {
            commit.kept = Some(attributes(like));
        }
    }

    /// Gives the complete file a mode.
    pub(super) fn set_mode(&mut self, mode: u32) {
        self.mode = Some(mode);
    }

    /// Gives the complete file extended attributes (xattr(7)), and no others whose names begin with `prefix`.
    ///
    /// # Errors
    /// `Unsupported` if the file system has none, `TooLarge` if they are too large for it.
    pub fn set_attributes(&mut self, prefix: &'static str, attributes: &[Attribute]) -> Result<()> {
        set_attributes(self.file.as_fd(), attributes)
            .map_err(|errno| attribute_error(&self.shown, errno))?;
        if let Some(commit) = &mut self.commit {
            commit.attributes = Some((prefix, attributes.to_vec()));
        }
        Ok(())
    }

    /// The staged file. Its bytes are written by other means than [`Upload::write`].
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Appends bytes; returns how many were taken, 0 if a pipe is full.
    ///
    /// # Errors
    /// `NoSpace`; `NotRegular` if a pipe has no reader any more.
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

    /// Appends the `count` bytes in a pipe. Only for a [staged](Self::is_staged) upload.
    ///
    /// # Errors
    /// `NoSpace`.
    pub fn splice_from(&mut self, splice_pipe: &mut SplicePipe, count: usize) -> Result<()> {
        splice_pipe
            .splice_to(&self.file, None, count)
            .map_err(|error| Error::io(format_args!("cannot write {}", self.shown), &error))?;
        self.written += count as u64;
        Ok(())
    }

    /// Whether the bytes wait for the commit; false for a device or pipe, which gets them directly.
    pub fn is_staged(&self) -> bool {
        self.commit.is_some()
    }

    /// The file, device or pipe that is written, for polling.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The error of a pipe without a reader.
    pub fn unread(&self) -> Error {
        Error::new(
            Kind::NotRegular,
            format!("cannot write {}: no process reads the pipe", self.shown),
        )
    }

    /// As [`Upload::commit`], in a turn that was taken before the target was read, if it is still this
    /// version, or still missing. A program that is no request is not kept out between the check and the
    /// rename.
    ///
    /// # Errors
    /// `Changed`; the target cannot be replaced. The old file is unchanged.
    pub fn commit_over(mut self, _turn: &Turn, expected: Option<&FileVersion>) -> Result<()> {
        if let Some(commit) = &mut self.commit {
            let existing = commit.target.existing().map_err(|errno| {
                opening_error(format_args!("cannot write {}", self.shown), errno)
            })?;
            if existing.as_ref().map(FileVersion::of_status).as_ref() != expected {
                return Err(changed(&self.shown, MEANWHILE));
            }
            commit.is_exclusive = expected.is_none();
        }
        self.commit().map(drop)
    }

    /// Checks again that the target has the content with this hash. Returns the version that has; `None` for a device
    /// or pipe.
    ///
    /// # Errors
    /// `Changed`; the target cannot be read; or it was interrupted.
    pub fn check_again(
        &self,
        expected: Digest,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Option<FileVersion>, Stopped> {
        let target = self.commit.as_ref().map(|commit| &commit.target);
        target
            .map(|target| check_again(&self.shown, target, expected, interrupt))
            .transpose()
    }

    /// Replaces the target with the complete file if the condition holds: for one on the content, if the target is
    /// still the version that was [checked](Self::check_again). Returns the size in bytes.
    ///
    /// # Errors
    /// `Exists`; `Changed`; the target cannot be replaced. The old file is unchanged.
    pub fn commit_if(mut self, condition: Condition, checked: Option<&FileVersion>) -> Result<u64> {
        let Some(commit) = &mut self.commit else {
            return self.commit();
        };
        match condition {
            Condition::Absent if commit.replaces => return Err(exists(&self.shown)),
            Condition::Absent => commit.is_exclusive = true,
            Condition::Always | Condition::Content(_) => {}
        }
        let _turn = self.turn()?;
        if let (Some(version), Some(commit)) = (checked, &self.commit) {
            check_version(&self.shown, &commit.target, version)?;
        }
        self.commit()
    }

    /// Closes a complete upload to `path` that has no attributes. `None` if it cannot wait beside its target: then it is gone,
    /// and is to be written anew when its turn comes.
    ///
    /// # Errors
    /// `NoSpace`, `Forbidden`.
    pub fn close<'a>(
        mut self,
        root: &'a Root,
        path: &'a FilePath,
    ) -> Result<Option<ClosedUpload<'a>>> {
        let Some(commit) = &mut self.commit else {
            return Ok(None);
        };
        let mut close = || {
            let (key, identity) = (commit.target.key()?, Identity::of_open(&self.file)?);
            let hidden = commit
                .staging
                .give_up(&self.file, &commit.target.directory)?;
            Ok(hidden.map(|hidden| ClosedUpload {
                root,
                path,
                key,
                hidden,
                identity,
                written: self.written,
                mode: self.mode,
                replaces: commit.replaces,
                kept: commit.kept,
            }))
        };
        close().map_err(|errno| opening_error(format_args!("cannot write {}", self.shown), errno))
    }

    /// Waits for the turn to replace the target; `None` for a device or pipe.
    ///
    /// # Errors
    /// `Changed` if others take too long.
    pub(super) fn turn(&self) -> Result<Option<Turn>> {
        let target = self.commit.as_ref().map(|commit| &commit.target);
        let turn = target.map(|NameAt { directory, name }| Turn::at(directory, name, &self.shown));
        turn.transpose()
    }

    /// Replaces the target with the complete file; returns the size in bytes.
    ///
    /// # Errors
    /// The target cannot be replaced; the old file is unchanged.
    pub fn commit(mut self) -> Result<u64> {
        let committed = match &mut self.commit {
            None => set_mode(&self.file, self.mode),
            Some(commit) => commit.run(&self.file, self.mode),
        };
        committed
            .map_err(|errno| opening_error(format_args!("cannot write {}", self.shown), errno))?;
        Ok(self.written)
    }
}

impl<'files> ClosedUpload<'files> {
    /// Opens it again.
    ///
    /// # Errors
    /// `Changed` if the path leads to another directory, or the hidden file is another one. `Forbidden`, `NotFound`.
    pub fn reopen(mut self) -> Result<Upload<'files>> {
        let path = self.path;
        let mut target = self.target()?;
        // Its directory has both names.
        let name = std::mem::replace(&mut target.name, std::mem::take(&mut self.hidden));
        let opened = target.open(OFlag::O_RDWR);
        let hidden = std::mem::replace(&mut target.name, name);
        let commit = Commit {
            target,
            replaces: self.replaces,
            kept: self.kept,
            staging: Staging::Named(hidden),
            is_exclusive: false,
            attributes: None,
        };
        let file =
            opened.map_err(|errno| opening_error(format_args!("cannot write {path}"), errno))?;
        if Identity::of_open(&file) != Ok(self.identity) {
            return Err(changed(path, MEANWHILE));
        }
        let mut upload = Upload::new(path, file, self.mode, Some(commit));
        upload.written = self.written;
        Ok(upload)
    }

    fn target(&self) -> Result<NameAt> {
        let (target, _) = self.root.target(self.path, false)?;
        let is_same = target.key().as_ref() == Ok(&self.key);
        is_same
            .then_some(target)
            .ok_or_else(|| changed(self.path, MEANWHILE))
    }
}

impl Drop for ClosedUpload<'_> {
    fn drop(&mut self) {
        if !self.hidden.is_empty()
            && let Ok(target) = self.target()
        {
            let hidden = std::mem::take(&mut self.hidden);
            Staging::Named(hidden).remove(&target.directory);
        }
    }
}

impl Commit {
    fn run(&mut self, file: &File, mode: Option<u32>) -> nix::Result<()> {
        if !matches!(self.staging, Staging::Elsewhere) {
            match self.replace(file, mode) {
                // A mount point, as container engines make of /etc/hosts; or a file that may be written
                // but not given to its owner or renamed over.
                Err(Errno::EBUSY | Errno::EPERM | Errno::EACCES) if self.replaces => {}
                other => return other,
            }
        }
        self.copy_over(file, mode)
    }

    /// Gives the staged file the target's name.
    fn replace(&mut self, file: &File, mode: Option<u32>) -> nix::Result<()> {
        if let Some((_, uid, gid)) = self.kept {
            let status = fstat(file)?;
            if (status.st_uid, status.st_gid) != (uid, gid) {
                fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
            }
        }
        // After chown, which clears set-user-ID bits (chown(2)).
        set_mode(file, mode.or(self.kept.map(|(mode, ..)| mode)))?;
        let NameAt { directory, name } = &self.target;
        if !self.replaces {
            match self.staging.take_new_name(file, directory, name) {
                Err(Errno::EEXIST) if !self.is_exclusive => {}
                // The file system has no hard links. Only one of several makes the name.
                Err(Errno::EPERM | Errno::EOPNOTSUPP | Errno::ENOSYS) if self.is_exclusive => {
                    drop(self.target.make()?);
                }
                Err(Errno::EPERM | Errno::EOPNOTSUPP | Errno::ENOSYS) => {}
                other => return other,
            }
        }
        self.staging.take_name(file, directory, name)
    }

    /// Copies the complete upload over a file that cannot be replaced.
    fn copy_over(&self, file: &File, mode: Option<u32>) -> nix::Result<()> {
        let to_errno =
            |error: std::io::Error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
        let target = self.target.open(OFlag::O_WRONLY)?;
        if FileKind::of(&fstat(&target)?) != FileKind::Regular {
            // The file was replaced after it was checked.
            return Err(Errno::EBUSY);
        }
        let written = fstat(file)?.st_size;
        // Fails before anything is changed if the disk is full. Not every file system can tell.
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
        if let Some((prefix, attributes)) = &self.attributes {
            clear_attributes(target.as_fd(), prefix)?;
            set_attributes(target.as_fd(), attributes)?;
        }
        set_mode(&target, mode)
    }
}

impl Drop for Commit {
    fn drop(&mut self) {
        self.staging.remove(&self.target.directory);
    }
}

impl Staging {
    /// Gives a staged file a name in its directory, which no file may have: `EEXIST` otherwise.
    pub(super) fn take_new_name(
        &mut self,
        file: &File,
        directory: &OwnedFd,
        name: &[u8],
    ) -> nix::Result<()> {
        match self {
            Self::Unnamed => link_open_file(file, directory, name),
            Self::Named(temporary) => {
                linkat(
                    directory,
                    temporary.as_slice(),
                    directory,
                    name,
                    AtFlags::empty(),
                )?;
                self.remove(directory);
                Ok(())
            }
            Self::Elsewhere => Err(Errno::EXDEV),
        }
    }

    /// Gives a staged file a name in its directory, in place of the file that has it.
    pub(super) fn take_name(
        &mut self,
        file: &File,
        directory: &OwnedFd,
        name: &[u8],
    ) -> nix::Result<()> {
        // Only rename(2) replaces an existing name, so the file needs a name first.
        self.hide(file, directory)?;
        if let Self::Named(temporary) = self {
            renameat(directory, temporary.as_slice(), directory, name)?;
            *self = Self::Unnamed;
        }
        Ok(())
    }

    /// Gives a staged file a hidden name in its directory, if it has none.
    fn hide(&mut self, file: &File, directory: &OwnedFd) -> nix::Result<()> {
        if let Self::Unnamed = self {
            let temporary = temporary_name();
            link_open_file(file, directory, &temporary)?;
            *self = Self::Named(temporary);
        }
        Ok(())
    }

    /// Leaves a staged file under its hidden name, from now on to somebody else; `None` if it is in no directory.
    fn give_up(&mut self, file: &File, directory: &OwnedFd) -> nix::Result<Option<Vec<u8>>> {
        self.hide(file, directory)?;
        let Self::Named(temporary) = self else {
            return Ok(None);
        };
        let temporary = std::mem::take(temporary);
        *self = Self::Unnamed;
        Ok(Some(temporary))
    }

    /// Removes the name that the file was given before it took its place.
    pub(super) fn remove(&mut self, directory: &OwnedFd) {
        if let Self::Named(temporary) = self {
            let _ = unlinkat(directory, temporary.as_slice(), UnlinkatFlags::NoRemoveDir);
            *self = Self::Unnamed;
        }
    }
}

impl RangedWrite<'_> {
    /// Writes the next bytes.
    ///
    /// # Errors
    /// `NoSpace`; `Invalid` if the file would be too large for the file system.
    pub fn write(&mut self, data: &[u8]) -> Result<()> {
        let written = self.file.write_all_at(data, self.offset);
        self.advance(written, data.len())
    }

    /// Writes the `count` bytes in a pipe.
    ///
    /// # Errors
    /// As [`RangedWrite::write`].
    pub fn splice_from(&mut self, splice_pipe: &mut SplicePipe, count: usize) -> Result<()> {
        let written = splice_pipe.splice_to(&self.file, Some(self.offset), count);
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

    /// Sets the requested size and mode; returns the size of the file in bytes.
    ///
    /// # Errors
    /// `Forbidden`, `Invalid`.
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

    /// Removes the file if this request made it and no other range has written to it.
    fn give_up(&self) {
        if self.is_new && fstat(&self.file).is_ok_and(|status| status.st_size == 0) {
            let _ = self.target.unlink();
        }
    }
}

/// Mode, user and group.
fn attributes(status: &FileStat) -> (u32, u32, u32) {
    (status.st_mode & 0o7777, status.st_uid, status.st_gid)
}

fn is_directory(path: impl fmt::Display) -> Error {
    Error::new(
        Kind::IsDirectory,
        format!("cannot write {path}: it is a directory"),
    )
}

/// Refuses files that have no offsets, before they are opened: opening a pipe can wake the process at
/// its other end.
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

/// Opens a file that is written in place.
fn open_existing(target: &NameAt, path: &FilePath) -> Result<File> {
    opened_existing(target.open(OFlag::O_WRONLY), path)
}

fn opened_existing(opened: nix::Result<File>, path: &FilePath) -> Result<File> {
    opened.map_err(|errno| match errno {
        Errno::ENXIO => Error::new(
            Kind::NotRegular,
            format!("cannot write {path}: it is a socket, or a pipe that nobody reads or may write to here"),
        ),
        errno => opening_error(format_args!("cannot write {path}"), errno),
    })
}

/// Opens an own file whose mode forbids writing; `ESTALE` if another request protects it again at that
/// moment. Restores the mode immediately: a range that breaks off must not change it.
fn open_protected(target: &NameAt, status: &FileStat) -> nix::Result<File> {
    let mode = status.st_mode & 0o7777;
    if FileKind::of(status) != FileKind::Regular || target.set_mode(mode | 0o200).is_err() {
        return Err(Errno::EACCES);
    }
    let opened = target.open(OFlag::O_WRONLY);
    let _ = target.set_mode(mode);
    opened.map_err(|errno| match errno {
        Errno::EACCES => Errno::ESTALE,
        errno => errno,
    })
}

fn set_mode(file: &File, mode: Option<u32>) -> nix::Result<()> {
    mode.map_or(Ok(()), |mode| fchmod(file, Mode::from_bits_truncate(mode)))
}

/// Makes the inode for an upload. A `private` one is not readable by others until it has its final mode.
pub(super) fn stage(directory: &OwnedFd, private: bool) -> nix::Result<(File, Staging)> {
    let mode = Mode::from_bits_truncate(if private { 0o600 } else { 0o666 });
    let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC;
    match openat(directory, ".", flags | OFlag::O_TMPFILE, mode) {
        Ok(file) => return Ok((File::from(file), Staging::Unnamed)),
        // Kernels and file systems without O_TMPFILE (open(2)).
        Err(Errno::EOPNOTSUPP | Errno::EISDIR | Errno::EINVAL | Errno::ENOENT | Errno::ENOSYS) => {}
        Err(errno) => return Err(errno),
    }
    let name = temporary_name();
    let named = flags | OFlag::O_CREAT | OFlag::O_EXCL;
    let file = openat(directory, name.as_slice(), named, mode)?;
    Ok((File::from(file), Staging::Named(name)))
}

/// Makes an inode on the machine for an upload that will be copied to its target.
fn stage_on_machine() -> nix::Result<File> {
    let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    let mode = Mode::from_bits_truncate(0o600);
    STAGING_DIRECTORIES
        .iter()
        .find_map(|directory| open(*directory, flags, mode).ok())
        .map_or_else(|| memfd_create("upload", MFdFlags::MFD_CLOEXEC), Ok)
        .map(File::from)
}

/// How the names of files begin that are not complete.
const UPLOAD_PREFIX: &str = ".sbx-upload-";

/// Whether a file, by its name, is an upload that is not complete, or was not before it got another name.
pub fn is_temporary(path: &[u8]) -> bool {
    let name = path.rsplit(|byte| *byte == b'/').next();
    name.is_some_and(|name| name.starts_with(UPLOAD_PREFIX.as_bytes()))
}

/// A hidden name that no other upload uses.
pub(super) fn temporary_name() -> Vec<u8> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    #[expect(clippy::disallowed_methods, reason = "need only differ each time")]
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = since_1970.unwrap_or_default().as_nanos();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{UPLOAD_PREFIX}{:x}-{now:x}-{count:x}", std::process::id()).into_bytes()
}

/// Gives an open file a name (open(2), `O_TMPFILE`).
fn link_open_file(file: &File, directory: &OwnedFd, name: &[u8]) -> nix::Result<()> {
    match linkat(file, "", directory, name, AtFlags::AT_EMPTY_PATH) {
        // That needs CAP_DAC_READ_SEARCH or Linux 6.10, and is the quicker way.
        Err(Errno::ENOENT) => link_through_proc(file, directory, name),
        other => other,
    }
}

fn link_through_proc(file: &File, directory: &OwnedFd, name: &[u8]) -> nix::Result<()> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let follow = AtFlags::AT_SYMLINK_FOLLOW;
    linkat(AT_FDCWD, path.as_bytes(), directory, name, follow)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unnamed_file_gets_a_name_in_either_way_and_replaces_none() {
        type Link = fn(&File, &OwnedFd, &[u8]) -> nix::Result<()>;
        let path = std::env::temp_dir().join(format!("sbx-link-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        let directory = OwnedFd::from(File::open(&path).unwrap());
        for (link, name) in [(link_open_file as Link, "a"), (link_through_proc, "b")] {
            let (file, staging) = stage(&directory, true).unwrap();
            // Not every file system has unnamed files.
            if let Staging::Unnamed = staging {
                file.write_all_at(b"content", 0).unwrap();
                link(&file, &directory, name.as_bytes()).unwrap();
                assert_eq!(std::fs::read(path.join(name)).unwrap(), b"content");
                let again = link(&file, &directory, name.as_bytes());
                assert_eq!(again, Err(Errno::EEXIST));
            }
        }
        std::fs::remove_dir_all(&path).unwrap();
    }
}
