//! The calls on paths, as nix has them. Its functions are generic, and their copies for each type of path and directory
//! would be 20 KB of the program: these make one of each.

use std::ffi::{CStr, OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::Result;
use nix::fcntl::{self, AtFlags, OFlag, OpenHow};
use nix::sys::stat::{self, FchmodatFlags, FileStat, Mode, UtimensatFlags};
use nix::sys::time::TimeSpec;
use nix::unistd::{self, Gid, Uid, UnlinkatFlags};

/// What is the path of a file.
pub trait PathBytes {
    fn path_bytes(&self) -> &[u8];
}

impl PathBytes for [u8] {
    fn path_bytes(&self) -> &[u8] {
        self
    }
}

impl PathBytes for str {
    fn path_bytes(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl PathBytes for OsStr {
    fn path_bytes(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl PathBytes for CStr {
    fn path_bytes(&self) -> &[u8] {
        self.to_bytes()
    }
}

impl PathBytes for Path {
    fn path_bytes(&self) -> &[u8] {
        self.as_os_str().as_bytes()
    }
}

impl PathBytes for PathBuf {
    fn path_bytes(&self) -> &[u8] {
        self.as_path().path_bytes()
    }
}

/// As [`fcntl::open`].
pub fn open(path: &(impl PathBytes + ?Sized), flags: OFlag, mode: Mode) -> Result<OwnedFd> {
    fn inner(path: &[u8], flags: OFlag, mode: Mode) -> Result<OwnedFd> {
        fcntl::open(path, flags, mode)
    }
    inner(path.path_bytes(), flags, mode)
}

/// As [`fcntl::openat`].
pub fn openat(
    directory: impl AsFd,
    path: &(impl PathBytes + ?Sized),
    flags: OFlag,
    mode: Mode,
) -> Result<OwnedFd> {
    fn inner(directory: BorrowedFd<'_>, path: &[u8], flags: OFlag, mode: Mode) -> Result<OwnedFd> {
        fcntl::openat(directory, path, flags, mode)
    }
    inner(directory.as_fd(), path.path_bytes(), flags, mode)
}

/// As [`fcntl::openat2`].
pub fn openat2(
    directory: impl AsFd,
    path: &(impl PathBytes + ?Sized),
    how: OpenHow,
) -> Result<OwnedFd> {
    fn inner(directory: BorrowedFd<'_>, path: &[u8], how: OpenHow) -> Result<OwnedFd> {
        fcntl::openat2(directory, path, how)
    }
    inner(directory.as_fd(), path.path_bytes(), how)
}

/// As [`fcntl::readlinkat`].
pub fn readlinkat(directory: impl AsFd, path: &(impl PathBytes + ?Sized)) -> Result<OsString> {
    fn inner(directory: BorrowedFd<'_>, path: &[u8]) -> Result<OsString> {
        fcntl::readlinkat(directory, path)
    }
    inner(directory.as_fd(), path.path_bytes())
}

/// As [`fcntl::renameat`].
pub fn renameat(
    directory: impl AsFd,
    path: &(impl PathBytes + ?Sized),
    new_directory: impl AsFd,
    new_path: &(impl PathBytes + ?Sized),
) -> Result<()> {
    fn inner(
        directory: BorrowedFd<'_>,
        path: &[u8],
        new_directory: BorrowedFd<'_>,
        new_path: &[u8],
    ) -> Result<()> {
        fcntl::renameat(directory, path, new_directory, new_path)
    }
    inner(
        directory.as_fd(),
        path.path_bytes(),
        new_directory.as_fd(),
        new_path.path_bytes(),
    )
}

/// As [`stat::fstatat`].
pub fn fstatat(
    directory: impl AsFd,
    path: &(impl PathBytes + ?Sized),
    flags: AtFlags,
) -> Result<FileStat> {
    fn inner(directory: BorrowedFd<'_>, path: &[u8], flags: AtFlags) -> Result<FileStat> {
        stat::fstatat(directory, path, flags)
    }
    inner(directory.as_fd(), path.path_bytes(), flags)
}

/// As [`stat::mkdirat`].
pub fn mkdirat(directory: impl AsFd, path: &(impl PathBytes + ?Sized), mode: Mode) -> Result<()> {
    fn inner(directory: BorrowedFd<'_>, path: &[u8], mode: Mode) -> Result<()> {
        stat::mkdirat(directory, path, mode)
    }
    inner(directory.as_fd(), path.path_bytes(), mode)
}

/// As [`unistd::mkdir`].
pub fn mkdir(path: &(impl PathBytes + ?Sized), mode: Mode) -> Result<()> {
    fn inner(path: &[u8], mode: Mode) -> Result<()> {
        unistd::mkdir(path, mode)
    }
    inner(path.path_bytes(), mode)
}

/// As [`stat::fchmodat`].
pub fn fchmodat(
    directory: impl AsFd,
    path: &(impl PathBytes + ?Sized),
    mode: Mode,
    flag: FchmodatFlags,
) -> Result<()> {
    fn inner(
        directory: BorrowedFd<'_>,
        path: &[u8],
        mode: Mode,
        flag: FchmodatFlags,
    ) -> Result<()> {
        stat::fchmodat(directory, path, mode, flag)
    }
    inner(directory.as_fd(), path.path_bytes(), mode, flag)
}

/// As [`stat::utimensat`].
pub fn utimensat(
    directory: impl AsFd,
    path: &(impl PathBytes + ?Sized),
    accessed: &TimeSpec,
    modified: &TimeSpec,
    flag: UtimensatFlags,
) -> Result<()> {
    fn inner(
        directory: BorrowedFd<'_>,
        path: &[u8],
        accessed: &TimeSpec,
        modified: &TimeSpec,
        flag: UtimensatFlags,
    ) -> Result<()> {
        stat::utimensat(directory, path, accessed, modified, flag)
    }
    inner(
        directory.as_fd(),
        path.path_bytes(),
        accessed,
        modified,
        flag,
    )
}

/// As [`unistd::fchownat`].
pub fn fchownat(
    directory: impl AsFd,
    path: &(impl PathBytes + ?Sized),
    owner: Option<Uid>,
    group: Option<Gid>,
    flags: AtFlags,
) -> Result<()> {
    fn inner(
        directory: BorrowedFd<'_>,
        path: &[u8],
        owner: Option<Uid>,
        group: Option<Gid>,
        flags: AtFlags,
    ) -> Result<()> {
        unistd::fchownat(directory, path, owner, group, flags)
    }
    inner(directory.as_fd(), path.path_bytes(), owner, group, flags)
}

/// As [`unistd::unlinkat`].
pub fn unlinkat(
    directory: impl AsFd,
    path: &(impl PathBytes + ?Sized),
    flag: UnlinkatFlags,
) -> Result<()> {
    fn inner(directory: BorrowedFd<'_>, path: &[u8], flag: UnlinkatFlags) -> Result<()> {
        unistd::unlinkat(directory, path, flag)
    }
    inner(directory.as_fd(), path.path_bytes(), flag)
}

/// As [`unistd::linkat`].
pub fn linkat(
    directory: impl AsFd,
    path: &(impl PathBytes + ?Sized),
    new_directory: impl AsFd,
    new_path: &(impl PathBytes + ?Sized),
    flags: AtFlags,
) -> Result<()> {
    fn inner(
        directory: BorrowedFd<'_>,
        path: &[u8],
        new_directory: BorrowedFd<'_>,
        new_path: &[u8],
        flags: AtFlags,
    ) -> Result<()> {
        unistd::linkat(directory, path, new_directory, new_path, flags)
    }
    inner(
        directory.as_fd(),
        path.path_bytes(),
        new_directory.as_fd(),
        new_path.path_bytes(),
        flags,
    )
}

/// As [`unistd::symlinkat`].
pub fn symlinkat(
    target: &(impl PathBytes + ?Sized),
    directory: impl AsFd,
    path: &(impl PathBytes + ?Sized),
) -> Result<()> {
    fn inner(target: &[u8], directory: BorrowedFd<'_>, path: &[u8]) -> Result<()> {
        unistd::symlinkat(target, directory, path)
    }
    inner(target.path_bytes(), directory.as_fd(), path.path_bytes())
}
