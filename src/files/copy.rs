//! Copies files and trees, in steps of milliseconds.
//!
//! Data stays in the kernel: as a shared extent where the file system has such (reflink), else by
//! `copy_file_range(2)`, and holes stay holes. Every file takes its name when it is complete. A copy keeps modes and
//! times, and links as they are; it belongs to whom the server acts as, and loses the set-user-ID and set-group-ID bits if
//! that changes the owner. Hard links become files of their own. No link is followed below the two paths.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{OFlag, copy_file_range};
use nix::sys::stat::{FchmodatFlags, FileStat, Mode, UtimensatFlags, fstat, futimens};
use nix::sys::time::TimeSpec;
use nix::unistd::{Whence, ftruncate, lseek};

use super::condition::{Condition, Turn};
use super::entry::{DIRECTORY, FileKind, Identity, link_target, size};
use super::name::{FilePath, show};
use super::name_at::NameAt;
use super::read::ContentEnd;
use super::rename::place_link;
use super::root::{Files, Missing, opening_error};
use super::search::{Filter, HELD_LEVELS, Visit};
use super::skip::{SkipList, SkipReason};
use super::write::Upload;
use crate::client::{Interrupt, Stopped};
use crate::error::{Error, Kind, Result};
use crate::limits::ledger::Ledger;
use crate::sys::paths::{fchmodat, mkdirat, openat, utimensat};
use crate::{fault, sys};

/// Bytes that the kernel copies in one step.
const STEP_BYTES: usize = 8 << 20;

/// Bytes that are read and written in one step.
const BUFFER_BYTES: usize = 64 * 1024;

/// What was copied so far, and what was left out.
#[derive(Debug, Default, Clone)]
pub struct CopyReport {
    /// Regular files.
    pub files: u64,
    /// Directories that were made.
    pub dirs: u64,
    /// Symbolic links.
    pub links: u64,
    /// Bytes of the files.
    pub bytes: u64,
    /// What was left out.
    pub skipped: SkipList,
}

/// A copy in progress. Run it, and drop it, while the thread acts as the owner.
pub struct Copying {
    from: FilePath,
    to: FilePath,
    report: CopyReport,
    /// The file that is being copied.
    file: Option<FileCopy>,
    tree: Option<CopyTree>,
}

/// The directories of a tree's copy, from the first to the one that is filled.
struct CopyTree {
    /// The first directory of the copy: a walk must not enter it.
    identity: Identity,
    levels: Vec<CopyLevel>,
    /// The relative path of the entry that was begun last.
    after: Option<Vec<u8>>,
}

struct CopyLevel {
    identity: Identity,
    /// Open in the first levels and the last one.
    directory: Option<OwnedFd>,
    /// Of the original, if this copy made the directory.
    status: Option<FileStat>,
}

impl Files<'_> {
    /// Begins to copy a file or link, or with `recursive` a directory. With `overwrite` a file replaces a file,
    /// and a directory is added to a directory.
    ///
    /// # Errors
    /// `NotFound`; `IsDirectory` without `recursive`, or where a file is to be; `NotDirectory`; `Exists` without
    /// `overwrite`; `NotRegular`; `Invalid` if it would be inside of itself.
    pub fn copy(
        &self,
        from: &FilePath,
        to: &FilePath,
        recursive: bool,
        overwrite: bool,
    ) -> Result<Copying> {
        let failed = |errno| self.error(format_args!("cannot copy {from} to {to}"), errno);
        let refused = |kind, why: &str| Error::new(kind, format!("cannot copy {from}: {why}"));
        let itself = || refused(Kind::Invalid, "the copy would be inside of itself");
        let source = self.name_at(from, Missing::Refuse)?;
        let status = source.status().map_err(failed)?;
        let kind = FileKind::of(&status);
        match kind {
            FileKind::Regular | FileKind::Link => {}
            FileKind::Directory if recursive => {}
            FileKind::Directory => {
                let why = "it is a directory; recursive=1 copies it";
                return Err(refused(Kind::IsDirectory, why));
            }
            _ => {
                let why = "it is a pipe, socket or device, which has no content to copy";
                return Err(refused(Kind::NotRegular, why));
            }
        }
        // Opened before anything is made.
        let original = match kind {
            FileKind::Regular => Some(self.open(from, false)?.file),
            _ => None,
        };
        let missing = match kind {
            FileKind::Directory => Missing::MakeOutside(Identity::of(&status)),
            _ => Missing::Make,
        };
        let target = self.name_at(to, missing).map_err(|error| match kind {
            FileKind::Directory if error.kind() == Kind::Invalid => itself(),
            _ => error,
        })?;
        let existing = target.existing().map_err(failed)?;
        if existing.is_some() && self.is_outside(&target) {
            return Err(failed(Errno::EXDEV));
        }
        let is_inside = kind == FileKind::Directory
            && self
                .lies_within(&target.directory, Identity::of(&status))
                .map_err(failed)?;
        if existing.is_some_and(|found| Identity::of(&found) == Identity::of(&status)) {
            return Err(refused(Kind::Invalid, "from and to are the same"));
        }
        if is_inside {
            return Err(itself());
        }
        if existing.is_some() && !overwrite {
            return Err(Error::new(
                Kind::Exists,
                format!(
                    "cannot copy to {to}: it exists; overwrite=1 replaces a file and adds to a directory"
                ),
            ));
        }
        let mut copying = Copying {
            from: from.clone(),
            to: to.clone(),
            report: CopyReport::default(),
            file: None,
            tree: None,
        };
        match (kind, original) {
            (FileKind::Regular, Some(original)) => {
                copying.file = Some(FileCopy::new(original, target, to.to_string(), !overwrite)?);
            }
            (FileKind::Link, _) => {
                let content = source.link_target().map_err(failed)?;
                let _turn = Turn::at(&target.directory, &target.name, to)?;
                copy_link(&content, &status, &target, !overwrite).map_err(failed)?;
                copying.report.links = 1;
            }
            _ => {
                let (level, is_new) = CopyLevel::make(&target, status, failed)?;
                copying.report.dirs = u64::from(is_new);
                copying.tree = Some(CopyTree {
                    identity: level.identity,
                    levels: vec![level],
                    after: None,
                });
            }
        }
        Ok(copying)
    }
}

impl Copying {
    /// Copies until all is done, and returns what was.
    ///
    /// # Errors
    /// It was interrupted; or as read(2) and write(2). What is copied stays.
    pub fn run(
        &mut self,
        files: &Files<'_>,
        ledger: &Arc<Ledger>,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<CopyReport, Stopped> {
        self.finish_file(interrupt)?;
        let after = match &self.tree {
            None => return Ok(std::mem::take(&mut self.report)),
            Some(tree) => tree.after.clone(),
        };
        let mut walk = files.walk(&self.from, Filter::default(), after.as_deref(), ledger)?;
        loop {
            interrupt.check()?;
            let Some(tree) = &mut self.tree else { break };
            let found = match walk.next()? {
                None => break,
                Some(Visit::Entry(found)) => found,
                Some(Visit::Passed) => continue,
                Some(Visit::Unreadable(path, errno)) => {
                    self.report.skipped.add(path, SkipReason::of(errno));
                    continue;
                }
            };
            let path = found.path.to_vec();
            tree.after = Some(path.clone());
            let failed = |errno| {
                let (from, path) = (&self.from, show(&path));
                opening_error(format_args!("cannot copy {}", from.join(&path)), errno)
            };
            tree.rise_to(&path).map_err(failed)?;
            let status = match found.status() {
                Err(Errno::ENOENT) => continue,
                status => status.map_err(failed)?,
            };
            let target = tree.target(found.name).map_err(failed)?;
            if tree.adds() && files.is_outside(&target) {
                let (to, path) = (&self.to, show(&path));
                let act = format_args!("cannot copy to {}", to.join(&path));
                return Err(files.error(act, Errno::EXDEV).into());
            }
            match FileKind::of(&status) {
                FileKind::Directory if Identity::of(&status) == tree.identity => {
                    walk.skip_contents();
                    self.report.skipped.add(&path, SkipReason::Itself);
                }
                FileKind::Directory => {
                    let (level, is_new) = CopyLevel::make(&target, status, failed)?;
                    tree.push(level);
                    self.report.dirs += u64::from(is_new);
                }
                FileKind::Link => {
                    let content = link_target(found.directory, found.name).map_err(failed)?;
                    let _turn = Turn::at(&target.directory, &target.name, show(&path))?;
                    copy_link(&content, &status, &target, false).map_err(failed)?;
                    self.report.links += 1;
                }
                FileKind::Regular => match found.open(OFlag::O_RDONLY) {
                    Ok(original) => {
                        let shown = self.to.join(&show(&path));
                        self.file = Some(FileCopy::new(original, target, shown, false)?);
                        self.finish_file(interrupt)?;
                    }
                    // Removed meanwhile, or replaced by a link.
                    Err(Errno::ENOENT | Errno::ELOOP) => {}
                    Err(errno @ (Errno::EACCES | Errno::EPERM | Errno::EXDEV)) => {
                        self.report.skipped.add(&path, SkipReason::of(errno));
                    }
                    Err(errno) => return Err(failed(errno).into()),
                },
                FileKind::Pipe => self.report.skipped.add(&path, SkipReason::Fifo),
                FileKind::Socket => self.report.skipped.add(&path, SkipReason::Socket),
                FileKind::CharacterDevice | FileKind::BlockDevice => {
                    self.report.skipped.add(&path, SkipReason::Device);
                }
            }
        }
        if let Some(tree) = &mut self.tree {
            while !tree.levels.is_empty() {
                tree.leave().map_err(|errno| {
                    Error::system(format_args!("cannot copy to {}", self.to), errno)
                })?;
            }
        }
        Ok(std::mem::take(&mut self.report))
    }

    fn finish_file(&mut self, interrupt: &mut dyn Interrupt) -> std::result::Result<(), Stopped> {
        if let Some(file) = &mut self.file {
            file.run(interrupt)?;
        }
        if let Some(file) = self.file.take() {
            self.report.bytes += file.commit()?;
            self.report.files += 1;
        }
        Ok(())
    }
}

impl CopyTree {
    fn push(&mut self, level: CopyLevel) {
        let depth = self.levels.len();
        if let Some(last) = self.levels.last_mut()
            && depth > HELD_LEVELS
        {
            last.directory = None;
        }
        self.levels.push(level);
    }

    /// Whether the last directory was there before, and something may be in it.
    fn adds(&self) -> bool {
        self.levels
            .last()
            .is_some_and(|level| level.status.is_none())
    }

    /// The name in the copy's last directory.
    fn target(&self, name: &[u8]) -> nix::Result<NameAt> {
        let last = self
            .levels
            .last()
            .and_then(|level| level.directory.as_ref());
        Ok(NameAt {
            directory: openat(last.ok_or(Errno::ENOENT)?, ".", DIRECTORY, Mode::empty())?,
            name: name.to_vec(),
        })
    }

    /// Leaves the directories that the entry at a relative path is not in.
    fn rise_to(&mut self, path: &[u8]) -> nix::Result<()> {
        let depth = path.split(|byte| *byte == b'/').count();
        while self.levels.len() > depth {
            self.leave()?;
        }
        Ok(())
    }

    /// Goes up from a directory that is complete, and gives it the mode and the times of the original.
    fn leave(&mut self) -> nix::Result<()> {
        let Some(level) = self.levels.pop() else {
            return Ok(());
        };
        let directory = level.directory.ok_or(Errno::ENOENT)?;
        if let Some(above) = self.levels.last_mut()
            && above.directory.is_none()
        {
            // Before the mode is set, which may forbid it.
            let up = openat(&directory, "..", DIRECTORY, Mode::empty())?;
            if Identity::of_open(&up)? != above.identity {
                // It was moved meanwhile.
                return Err(Errno::EBUSY);
            }
            above.directory = Some(up);
        }
        let Some(status) = &level.status else {
            return Ok(());
        };
        let mode = kept_mode(status, &fstat(&directory)?);
        let (accessed, modified) = times(status);
        let follow = UtimensatFlags::FollowSymlink;
        utimensat(&directory, ".", &accessed, &modified, follow)?;
        fchmodat(&directory, ".", mode, FchmodatFlags::FollowSymlink)
    }
}

impl CopyLevel {
    /// Makes the copy of a directory, or takes the one that is there.
    fn make(
        target: &NameAt,
        status: FileStat,
        failed: impl Copy + Fn(Errno) -> Error,
    ) -> Result<(Self, bool)> {
        // Its own mode may not let anything be made in it.
        let made = mkdirat(&target.directory, target.name.as_slice(), Mode::S_IRWXU);
        if let Err(errno) = made
            && errno != Errno::EEXIST
        {
            return Err(failed(errno));
        }
        let flags = DIRECTORY | OFlag::O_NOFOLLOW;
        let opened = openat(
            &target.directory,
            target.name.as_slice(),
            flags,
            Mode::empty(),
        );
        let directory = opened.map_err(failed)?;
        let level = Self {
            identity: Identity::of_open(&directory).map_err(failed)?,
            directory: Some(directory),
            status: made.is_ok().then_some(status),
        };
        Ok((level, made.is_ok()))
    }
}

/// The mode of a copy: bits that give the owner's rights to others only if it is the same owner.
fn kept_mode(original: &FileStat, copy: &FileStat) -> Mode {
    let owner = |status: &FileStat| (status.st_uid, status.st_gid);
    let kept = if owner(original) == owner(copy) {
        0o7777
    } else {
        0o1777
    };
    Mode::from_bits_truncate(original.st_mode & kept)
}

fn times(status: &FileStat) -> (TimeSpec, TimeSpec) {
    (
        TimeSpec::new(status.st_atime, status.st_atime_nsec),
        TimeSpec::new(status.st_mtime, status.st_mtime_nsec),
    )
}

/// Makes the same link.
fn copy_link(
    content: &[u8],
    status: &FileStat,
    target: &NameAt,
    is_exclusive: bool,
) -> nix::Result<()> {
    place_link(content, target, is_exclusive, |directory, name| {
        let (accessed, modified) = times(status);
        let nofollow = UtimensatFlags::NoFollowSymlink;
        utimensat(directory, name, &accessed, &modified, nofollow)
    })
}

/// A file that is being copied.
struct FileCopy {
    original: File,
    status: FileStat,
    upload: Upload<'static>,
    shown: String,
    is_exclusive: bool,
    offset: u64,
    /// Whether the kernel may copy; else the bytes are read and written.
    in_kernel: bool,
    end: ContentEnd,
}

impl FileCopy {
    fn new(original: File, target: NameAt, shown: String, is_exclusive: bool) -> Result<Self> {
        let status = fstat(&original)
            .map_err(|errno| Error::system(format_args!("cannot copy to {shown}"), errno))?;
        let upload = Upload::replacing(target, &shown)?;
        let is_cloned =
            size(&status) > 0 && sys::clone_file(upload.file().as_fd(), original.as_fd()).is_ok();
        Ok(Self {
            offset: if is_cloned { size(&status) } else { 0 },
            end: ContentEnd::new(size(&status)),
            original,
            status,
            upload,
            shown,
            is_exclusive,
            in_kernel: true,
        })
    }

    fn run(&mut self, interrupt: &mut dyn Interrupt) -> std::result::Result<(), Stopped> {
        let mut buffer = Vec::new();
        loop {
            interrupt.check()?;
            let is_over = self.step(&mut buffer).map_err(|errno| {
                Error::system(format_args!("cannot copy to {}", self.shown), errno)
            })?;
            if is_over {
                return Ok(());
            }
        }
    }

    /// Copies a piece. True at the end.
    fn step(&mut self, buffer: &mut Vec<u8>) -> nix::Result<bool> {
        fault::point("copy");
        let end = self.end.after(self.offset, &self.original)?;
        if self.offset >= end {
            return Ok(true);
        }
        if self.in_kernel {
            let data = self.data(end);
            if data.is_empty() {
                // A hole up to the end.
                self.offset = end.min(size(&fstat(&self.original)?));
                self.finish()?;
                return Ok(true);
            }
            let position = |offset: u64| i64::try_from(offset).map_err(|_| Errno::EFBIG);
            let (mut from, mut to) = (position(data.start)?, position(data.start)?);
            let most = usize::try_from(data.end - data.start).unwrap_or(usize::MAX);
            let copied = copy_file_range(
                &self.original,
                Some(&mut from),
                self.upload.file(),
                Some(&mut to),
                most.min(STEP_BYTES),
            );
            match copied {
                Ok(0)
                | Err(
                    Errno::EINVAL | Errno::EXDEV | Errno::ENOSYS | Errno::EOPNOTSUPP | Errno::EPERM,
                ) => {
                    self.in_kernel = false;
                    self.offset = data.start;
                }
                Err(Errno::EINTR) => {}
                copied => self.offset = data.start + copied? as u64,
            }
            return Ok(false);
        }
        buffer.resize(BUFFER_BYTES, 0);
        let most =
            usize::try_from(end - self.offset).map_or(BUFFER_BYTES, |left| left.min(BUFFER_BYTES));
        let to_errno =
            |error: std::io::Error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
        let count = self
            .original
            .read_at(&mut buffer[..most], self.offset)
            .map_err(to_errno)?;
        if count == 0 {
            self.finish()?;
            return Ok(true);
        }
        self.upload
            .file()
            .write_all_at(&buffer[..count], self.offset)
            .map_err(to_errno)?;
        self.offset += count as u64;
        Ok(false)
    }

    /// The next bytes that are no hole; empty if there are none up to the `end`. All of the rest where the file
    /// system does not tell.
    fn data(&self, end: u64) -> std::ops::Range<u64> {
        let seek = |offset: u64, whence| {
            let offset = i64::try_from(offset).map_err(|_| Errno::EFBIG)?;
            lseek(&self.original, offset, whence).map(i64::cast_unsigned)
        };
        match seek(self.offset, Whence::SeekData) {
            Err(Errno::ENXIO) if size(&self.status) > 0 => self.offset..self.offset,
            Err(_) => self.offset..end,
            Ok(start) => {
                let hole = seek(start, Whence::SeekHole).unwrap_or(end);
                start.min(end)..hole.min(end)
            }
        }
    }

    /// Ends the copy with a hole, if the original does.
    fn finish(&mut self) -> nix::Result<()> {
        ftruncate(
            self.upload.file(),
            i64::try_from(self.offset).map_err(|_| Errno::EFBIG)?,
        )
    }

    fn commit(mut self) -> Result<u64> {
        let failed = |errno| Error::system(format_args!("cannot copy to {}", self.shown), errno);
        let copy = fstat(self.upload.file()).map_err(failed)?;
        let (accessed, modified) = times(&self.status);
        futimens(self.upload.file(), &accessed, &modified).map_err(failed)?;
        self.upload.set_mode(kept_mode(&self.status, &copy).bits());
        let condition = if self.is_exclusive {
            Condition::Absent
        } else {
            Condition::Always
        };
        self.upload.commit_if(condition, None)?;
        Ok(size(&copy))
    }
}
