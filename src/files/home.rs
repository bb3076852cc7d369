//! Makes and removes the homes of sandboxes.
//!
//! Both work below a descriptor of the directory that holds the homes, which only the server may
//! change. Every sandbox's start makes a home, so it takes as few system calls as possible, and the
//! home is never accessible to other users. Root removes it, whatever modes its owner left
//! (`CAP_DAC_OVERRIDE`, which root of a user namespace has over the users that it maps).

use std::os::fd::OwnedFd;
use std::time::Instant;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::Mode;
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchown};

use super::beneath::Resolver;
use super::entry::DIRECTORY;
use super::name::show;
use super::remove::{Protected, remove_tree};
use crate::error::{Error, Kind, Result, cause};
use crate::sys::paths::{fstatat, mkdirat, openat, unlinkat};
use crate::sys::{ActingAs, User};

/// Mode 0700.
const PRIVATE: Mode = Mode::S_IRWXU;

/// The directories of a new home: for temporary files (`TMPDIR`), and for the sockets that the port proxy
/// connects to (`SBX_PROXY_DIR`). Parents come first.
const INITIAL_DIRECTORIES: [&str; 3] = [".tmp", ".sbx", ".sbx/proxy"];

/// Makes the home `name` in `homes` with its initial directories, and opens it.
///
/// Call it as root. `name` is one path component, chosen by the server.
///
/// # Errors
/// `Exists` if there is such a home, which stays unchanged. After any other error nothing is left, unless it cannot be
/// removed.
pub fn make_home(homes: &OwnedFd, name: &[u8], owner: User) -> Result<OwnedFd> {
    let failed = |errno| Error::system(format_args!("cannot make the home {}", show(name)), errno);
    mkdirat(homes, name, PRIVATE).map_err(failed)?;
    populate(homes, name, owner).map_err(|errno| {
        // Report the first error, not that of cleaning up.
        let _ = remove_home(homes, name, None);
        failed(errno)
    })
}

fn populate(homes: &OwnedFd, name: &[u8], owner: User) -> nix::Result<OwnedFd> {
    // Not O_PATH: fchown(2) needs a real descriptor.
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let home = openat(homes, name, flags, Mode::empty())?;
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    fchown(&home, Some(uid), Some(gid))?;
    let _acting = ActingAs::new(owner)?;
    for directory in INITIAL_DIRECTORIES {
        mkdirat(&home, directory, PRIVATE)?;
    }
    Ok(home)
}

/// Removes the home `name` from `homes`; a missing one is no error. Removes links and does not follow
/// them, in bounded memory. Returns false if something is left at the `deadline`, or new files keep appearing.
///
/// Call it as root, when no process of the owner runs any more.
///
/// # Errors
/// `System` if something is mounted in the home: the rest is removed.
pub fn remove_home(homes: &OwnedFd, name: &[u8], deadline: Option<Instant>) -> Result<bool> {
    let mut goes_on = || deadline.is_none_or(|deadline| Instant::now() < deadline);
    remove_home_while(homes, name, &mut goes_on)
}

/// The same, as long as it `goes_on`, which is asked before each name.
pub(super) fn remove_home_while(
    homes: &OwnedFd,
    name: &[u8],
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<bool> {
    if remove_unused(homes, name).is_ok() {
        return Ok(true);
    }
    // A file system that is read-only refuses to remove even a name that is missing.
    let status = fstatat(homes, name, AtFlags::AT_SYMLINK_NOFOLLOW);
    if matches!(status, Err(Errno::ENOENT)) {
        return Ok(true);
    }
    let removed = openat(homes, ".", DIRECTORY, Mode::empty())
        .and_then(|homes| remove_tree(homes, name, goes_on, Protected::Refuse, None));
    match removed {
        // New files keep appearing.
        Err(Errno::ENOTEMPTY) => Ok(false),
        // An internal error, whatever the errno would mean for a client's path.
        removed => removed.map_err(|errno| {
            let text = format!("cannot remove the home {}: {}", show(name), cause(errno));
            Error::new(Kind::System, text)
        }),
    }
}

/// Removes a home that has nothing but its initial directories, in a quarter of the system calls. Removes empty
/// directories only, so whatever fails may be left to [`remove_tree`].
fn remove_unused(homes: &OwnedFd, name: &[u8]) -> nix::Result<()> {
    let resolver = Resolver::of_machine(homes);
    let home = resolver.open(homes, name, DIRECTORY)?;
    let empty = UnlinkatFlags::RemoveDir;
    for directory in INITIAL_DIRECTORIES.iter().rev() {
        match directory.split_once('/') {
            Some((parent, name)) => {
                let parent = resolver.open(&home, parent.as_bytes(), DIRECTORY)?;
                unlinkat(parent, name, empty)?;
            }
            None => unlinkat(&home, *directory, empty)?,
        }
    }
    unlinkat(homes, name, empty)
}
