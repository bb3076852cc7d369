//! Moves files: by rename(2), or across file systems by a copy that takes the new name when it is
//! complete.

use std::io::Read;
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{FileStat, fstat, futimens};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, UnlinkatFlags};

use super::condition::Turn;
use super::entry::{FileKind, Identity};
use super::name::FilePath;
use super::name_at::NameAt;
use super::root::{Missing, Root, opening_error};
use super::write::{Upload, temporary_name};
use crate::client::{Interrupt, Stopped};
use crate::error::{Error, Kind};
use crate::sys::paths::{fchownat, renameat, symlinkat, unlinkat};

impl Root {
    /// Moves a file or directory. Replaces a file at the new name; a link there, not its target. Makes
    /// the parents of the new name.
    ///
    /// # Errors
    /// `NotFound`; `NotEmpty`, `IsDirectory` or `NotDirectory` if something is in the way; `CrossDevice` for
    /// a directory or a special file on another file system. What `interrupt` says, which is asked in a copy.
    pub fn rename(
        &self,
        from: &FilePath,
        to: &FilePath,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<(), Stopped> {
        let failed = |errno| Error::system(format_args!("cannot move {from} to {to}"), errno);
        let old = self.name_at(from, Missing::Refuse)?;
        let status = old.status().map_err(failed)?;
        let missing = if FileKind::of(&status) == FileKind::Directory {
            // The kernel refuses to move a directory into itself, but only after parents were made.
            Missing::MakeOutside(Identity::of(&status))
        } else {
            Missing::Make
        };
        let new = self.name_at(to, missing)?;
        if two_names_of_one(&old, &new, &status).map_err(failed)? {
            // rename(2) would do nothing.
            return Ok(old.unlink().map_err(failed)?);
        }
        let turn = Turn::at(&new.directory, &new.name, to)?;
        let renamed = renameat(&old.directory, &old.name[..], &new.directory, &new.name[..]);
        // A copy takes time, and its own turn when it is complete.
        drop(turn);
        match (renamed, FileKind::of(&status)) {
            (Err(Errno::EXDEV), FileKind::Regular) => copy(&old, new, to, interrupt)?,
            (Err(Errno::EXDEV), FileKind::Link) => {
                let _turn = Turn::at(&new.directory, &new.name, to)?;
                copy_link(&old, &new, &status).map_err(failed)?;
            }
            (Err(Errno::EXDEV), _) => {
                let why = "the kernel cannot rename it across this boundary (another file system, or a lower layer of the image); run mv";
                let text = format!("cannot move {from} to {to}: {why}");
                return Err(Error::new(Kind::CrossDevice, text).into());
            }
            (Err(Errno::EEXIST), _) => return Err(failed(Errno::ENOTEMPTY).into()),
            (renamed, _) => return Ok(renamed.map_err(failed)?),
        }
        Ok(old.unlink().map_err(failed)?)
    }
}

/// Whether two names are hard links of the same file, and not one name written twice.
fn two_names_of_one(old: &NameAt, new: &NameAt, status: &FileStat) -> nix::Result<bool> {
    if status.st_nlink < 2 || FileKind::of(status) == FileKind::Directory {
        return Ok(false);
    }
    let same_file = new
        .existing()?
        .is_some_and(|existing| Identity::of(&existing) == Identity::of(status));
    Ok(same_file
        && (old.name != new.name
            || Identity::of_open(&old.directory)? != Identity::of_open(&new.directory)?))
}

/// Copies a regular file with its mode, owner and times.
fn copy(
    old: &NameAt,
    new: NameAt,
    to: &FilePath,
    interrupt: &mut dyn Interrupt,
) -> std::result::Result<(), Stopped> {
    let failed = |errno| opening_error(format_args!("cannot copy to {to}"), errno);
    let mut source = old.open(OFlag::O_RDONLY).map_err(failed)?;
    let status = fstat(&source).map_err(failed)?;
    if FileKind::of(&status) != FileKind::Regular {
        // The file was replaced after it was checked.
        return Err(failed(Errno::EBUSY).into());
    }
    let mut upload = Upload::replacing(new, to)?;
    upload.keep_attributes(&status);
    let mut buffer = vec![0; 256 * 1024];
    loop {
        interrupt.check()?;
        let count = source
            .read(&mut buffer)
            .map_err(|error| Error::io(format_args!("cannot copy to {to}"), &error))?;
        if count == 0 {
            break;
        }
        let mut data = &buffer[..count];
        while !data.is_empty() {
            data = &data[upload.write(data)?..];
        }
    }
    let accessed = TimeSpec::new(status.st_atime, status.st_atime_nsec);
    let modified = TimeSpec::new(status.st_mtime, status.st_mtime_nsec);
    futimens(upload.descriptor(), &accessed, &modified).map_err(failed)?;
    let _turn = upload.turn()?;
    upload.commit()?;
    Ok(())
}

/// Makes the same link at the new name.
fn copy_link(old: &NameAt, new: &NameAt, status: &FileStat) -> nix::Result<()> {
    place_link(&old.link_target()?, new, false, |directory, name| {
        let (owner, group) = (Uid::from_raw(status.st_uid), Gid::from_raw(status.st_gid));
        let nofollow = AtFlags::AT_SYMLINK_NOFOLLOW;
        fchownat(directory, name, Some(owner), Some(group), nofollow)
    })
}

/// Makes a link, `complete`s it and gives it its name. An exclusive one replaces nothing; another one needs
/// a [`Turn`].
pub(super) fn place_link(
    content: &[u8],
    new: &NameAt,
    is_exclusive: bool,
    complete: impl FnOnce(&OwnedFd, &[u8]) -> nix::Result<()>,
) -> nix::Result<()> {
    let NameAt { directory, name } = new;
    let make = |name: &[u8]| {
        symlinkat(content, directory, name)?;
        complete(directory, name)
    };
    if is_exclusive {
        make(name)
    } else {
        replace_by(directory, name, make)
    }
}

/// Lets `make` make a link under a temporary name, and gives it this name, in place of the file that has it. That
/// needs a [`Turn`].
pub(super) fn replace_by(
    directory: &OwnedFd,
    name: &[u8],
    make: impl FnOnce(&[u8]) -> nix::Result<()>,
) -> nix::Result<()> {
    let temporary = temporary_name();
    let temporary = temporary.as_slice();
    let placed = make(temporary).and_then(|()| renameat(directory, temporary, directory, name));
    if placed.is_err() {
        let _ = unlinkat(directory, temporary, UnlinkatFlags::NoRemoveDir);
    }
    placed
}
