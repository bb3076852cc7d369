//! What is not complete yet, beside its place: a file that is being received, or with `atomic=1` a whole
//! tree. It takes its place in one step, and is removed if it does not.
//!
//! Nothing here knows archives: content, names and attributes come from [`unpack`](super::unpack). The
//! staging of a file is shared with other writes ([`write`](crate::files)).

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{FchmodatFlags, FileStat, Mode, fstat};
use nix::unistd::{Gid, Uid};

use super::attributes::Attributes;
use crate::files::entry::DIRECTORY;
use crate::files::name::show;
use crate::files::name_at::NameAt;
use crate::files::remove::{Protected, remove_tree};
use crate::files::root::Root;
use crate::files::write::{Staging, stage, temporary_name};
use crate::limits::ledger::Charge;
use crate::logging;
use crate::sys::paths::{fchmodat, mkdirat, openat};
use crate::sys::{Rename, rename};

/// A file that is being received, beside its place.
pub(super) struct StagedFile<'d> {
    pub(super) file: File,
    staging: Staging,
    directory: &'d OwnedFd,
}

impl<'d> StagedFile<'d> {
    pub(super) fn make(directory: &'d OwnedFd) -> nix::Result<Self> {
        let (file, staging) = stage(directory, true)?;
        Ok(Self {
            file,
            staging,
            directory,
        })
    }

    /// Gives the file its name; fails with `EEXIST` if another has it.
    pub(super) fn take_new_name(&mut self, name: &[u8]) -> nix::Result<()> {
        self.staging.take_new_name(&self.file, self.directory, name)
    }

    /// Gives the file its name in place of another that has it.
    pub(super) fn take_name(&mut self, name: &[u8]) -> nix::Result<()> {
        self.staging.take_name(&self.file, self.directory, name)
    }
}

impl Drop for StagedFile<'_> {
    fn drop(&mut self) {
        self.staging.remove(self.directory);
    }
}

/// A directory beside its place, removed with all that is in it unless it takes that place.
pub(super) struct StagingTree<'t> {
    root: &'t Root,
    target: &'t NameAt,
    name: Vec<u8>,
    /// The mode of a new directory.
    mode: u32,
    /// For what is in memory while it is removed.
    charge: Option<Charge>,
}

impl<'t> StagingTree<'t> {
    pub(super) fn make(root: &'t Root, target: &'t NameAt, charge: Charge) -> nix::Result<Self> {
        let name = temporary_name();
        mkdirat(
            &target.directory,
            name.as_slice(),
            Mode::from_bits_truncate(0o777),
        )?;
        let mut staging = Self {
            root,
            target,
            name,
            mode: 0,
            charge: Some(charge),
        };
        let directory = staging.open()?;
        staging.mode = fstat(&directory)?.st_mode & 0o7777;
        // Nobody else sees what is not complete.
        let private = Mode::from_bits_truncate(0o700);
        fchmodat(&directory, ".", private, FchmodatFlags::FollowSymlink)?;
        Ok(staging)
    }

    pub(super) fn open(&self) -> nix::Result<OwnedFd> {
        let flags = DIRECTORY | OFlag::O_NOFOLLOW;
        openat(
            &self.target.directory,
            self.name.as_slice(),
            flags,
            Mode::empty(),
        )
    }

    /// Takes the place of the `existing` directory, if there is one, which is then removed. Its mode and
    /// owner are kept unless the archive says otherwise.
    pub(super) fn finish(
        &mut self,
        top: &Attributes,
        existing: Option<&FileStat>,
    ) -> nix::Result<()> {
        let directory = self.open()?;
        let mut attributes = *top;
        let mode = existing.map_or(self.mode, |existing| existing.st_mode & 0o7777);
        attributes.mode = attributes.mode.or(Some(mode));
        let own = fstat(&directory)?;
        attributes.owner = attributes.owner.or_else(|| {
            let existing = existing?;
            let is_same = (existing.st_uid, existing.st_gid) == (own.st_uid, own.st_gid);
            let owner = (
                Uid::from_raw(existing.st_uid),
                Gid::from_raw(existing.st_gid),
            );
            (!is_same).then_some(owner)
        });
        attributes.apply_to_directory(&directory)?;
        let NameAt { directory, name } = self.target;
        let (directory, new) = (directory.as_fd(), self.name.as_slice());
        if existing.is_some() {
            // What is removed with this value is then the old directory.
            rename(directory, new, name, Rename::Exchange)
        } else {
            rename(directory, new, name, Rename::ToNewName)
        }
    }
}

impl Drop for StagingTree<'_> {
    fn drop(&mut self) {
        // Whoever has closed the root removes all that is in it.
        if !self.root.is_closed()
            && let Ok(directory) = openat(&self.target.directory, ".", DIRECTORY, Mode::empty())
        {
            let (root, charge) = (self.root, self.charge.take());
            let mut goes_on = || !root.is_closed();
            let removed = remove_tree(directory, &self.name, &mut goes_on, Protected::Open, charge);
            // It has another name if it took its place.
            if !matches!(removed, Ok(_) | Err(Errno::ENOENT)) {
                let name = show(&self.name);
                logging::info(format_args!(
                    "cannot delete {name}, which is no longer used"
                ));
            }
        }
    }
}
