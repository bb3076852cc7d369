//! Files of the machine that a sandbox may be given: how one is opened, which stay closed, and what commands do with it.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{Mode, fstat};

use crate::sys::paths::{open, openat, readlinkat};

/// What no sandbox is given: the kernel's own file systems, devices, and what holds them.
const FORBIDDEN: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Most links on the way, as in the kernel.
const MAX_LINKS: usize = 40;

/// A path that commands reach.
pub(super) struct Grant {
    pub(super) file: OwnedFd,
    pub(super) access: GrantedAccess,
}

/// What commands do with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GrantedAccess {
    /// Read and execute.
    Read,
    /// Change.
    Write,
    /// Use a device.
    Device,
    /// Connect to a socket.
    Socket,
}

/// Where the paths lead that commands reach.
#[derive(Default)]
pub struct GrantedPaths {
    /// Those that can be read.
    pub read_only: Vec<String>,
    /// Those that can be changed.
    pub read_write: Vec<String>,
}

/// Whether a path is, is in, or holds what stays closed to all sandboxes.
pub(super) fn is_closed(real: &Path, private: &[PathBuf]) -> bool {
    let is_closed = |closed: &Path| real.starts_with(closed) || closed.starts_with(real);
    let resolved = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    FORBIDDEN.iter().any(|path| is_closed(Path::new(path)))
        || private.iter().any(|path| is_closed(&resolved(path)))
}

/// Opens a path step by step, so that nobody can change a step between the look at it and its use. `None` if a link is on
/// the way that one of these users has made, or can have put there.
pub(super) fn walk(path: &Path, users: &RangeInclusive<u32>) -> nix::Result<Option<OwnedFd>> {
    if path.as_os_str().len() >= usize::try_from(libc::PATH_MAX).unwrap_or(0) {
        return Err(Errno::ENAMETOOLONG);
    }
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
    // The last step first.
    let steps = |path: &Path| -> Vec<OsString> {
        let steps = path.components().rev();
        steps.map(|step| step.as_os_str().to_owned()).collect()
    };
    let root = || open("/", flags, Mode::empty());
    let (mut here, mut left, mut links) = (root()?, steps(path), 0);
    while let Some(step) = left.pop() {
        if Path::new(&step).components().next() == Some(Component::RootDir) {
            here = root()?;
            continue;
        }
        let next = openat(&here, &*step, flags, Mode::empty())?;
        let status = fstat(&next)?;
        if status.st_mode & libc::S_IFMT != libc::S_IFLNK {
            here = next;
            continue;
        }
        if [status.st_uid, fstat(&here)?.st_uid]
            .iter()
            .any(|owner| users.contains(owner))
        {
            return Ok(None);
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(Errno::ELOOP);
        }
        left.extend(steps(Path::new(&readlinkat(&next, "")?)));
    }
    Ok(Some(here))
}
