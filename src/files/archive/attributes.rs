//! Mode, time and owner that a member gives to its file.
//!
//! Only how they are set, and in which order: the owner before the mode, whose bits a change of the owner
//! clears, and the mode of a directory last, because it may forbid the rest. When a directory gets them is
//! the matter of [`unpack`](super::unpack), and what a header says of them that of
//! [`members`](super::members).

use std::fs::File;
use std::os::fd::OwnedFd;

use nix::fcntl::AtFlags;
use nix::sys::stat::{FchmodatFlags, Mode, UtimensatFlags, fchmod, futimens};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, fchown};

use super::header::Time;
use crate::sys::paths::{fchmodat, fchownat, utimensat};

/// What a member says of its file.
#[derive(Clone, Copy, Default)]
pub(super) struct Attributes {
    pub(super) mode: Option<u32>,
    pub(super) modified: Option<Time>,
    pub(super) owner: Option<(Uid, Gid)>,
}

impl Attributes {
    const NOT: TimeSpec = TimeSpec::UTIME_OMIT;

    fn time(&self) -> Option<TimeSpec> {
        let Time {
            seconds,
            nanoseconds,
        } = self.modified?;
        Some(TimeSpec::new(seconds, nanoseconds.into()))
    }

    /// Sets a new file's attributes. The owner first: that clears bits of the mode (chown(2)).
    pub(super) fn apply(&self, file: &File) -> nix::Result<()> {
        if let Some((uid, gid)) = self.owner {
            fchown(file, Some(uid), Some(gid))?;
        }
        if let Some(mode) = self.mode {
            fchmod(file, Mode::from_bits_truncate(mode))?;
        }
        self.time()
            .map_or(Ok(()), |modified| futimens(file, &Self::NOT, &modified))
    }

    pub(super) fn apply_to_link(&self, directory: &OwnedFd, name: &[u8]) -> nix::Result<()> {
        if let Some((uid, gid)) = self.owner {
            let nofollow = AtFlags::AT_SYMLINK_NOFOLLOW;
            fchownat(directory, name, Some(uid), Some(gid), nofollow)?;
        }
        let nofollow = UtimensatFlags::NoFollowSymlink;
        self.time().map_or(Ok(()), |modified| {
            utimensat(directory, name, &Self::NOT, &modified, nofollow)
        })
    }

    /// Sets a directory's attributes by a descriptor that cannot be read. The mode last: it may forbid the
    /// rest.
    pub(super) fn apply_to_directory(&self, directory: &OwnedFd) -> nix::Result<()> {
        if let Some((uid, gid)) = self.owner {
            fchownat(directory, ".", Some(uid), Some(gid), AtFlags::empty())?;
        }
        if let Some(modified) = self.time() {
            let follow = UtimensatFlags::FollowSymlink;
            utimensat(directory, ".", &Self::NOT, &modified, follow)?;
        }
        let follow = FchmodatFlags::FollowSymlink;
        self.mode.map_or(Ok(()), |mode| {
            fchmodat(directory, ".", Mode::from_bits_truncate(mode), follow)
        })
    }
}
