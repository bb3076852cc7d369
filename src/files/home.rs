//! The homes of sandboxes: made for an owner, and removed whatever the owner has put there.
//!
//! Both work below a descriptor of the directory that holds the homes, which is the server's own and
//! nobody else's to change. Making is on the way of every sandbox's start, so it is the fewest calls
//! that leave no moment in which the home is somebody else's. Removing is done as root, which no mode
//! keeps out (`CAP_DAC_OVERRIDE`, which a user namespace's root has over the users it maps): nothing
//! is ever chmod'ed for it.

use std::os::fd::OwnedFd;
use std::time::Instant;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{Gid, Uid, fchown};

use super::name::show;
use super::remove::remove_tree;
use super::root::DIRECTORY;
use crate::error::{Error, Kind, Result};
use crate::sys::{ActingAs, User};

/// Only the owner's.
const PRIVATE: Mode = Mode::S_IRWXU;

/// What every home has from the start: where temporary files go, and where servers put the sockets
/// that the port proxy looks for. Parents come before what is in them.
const FURNITURE: [&str; 3] = [".tmp", ".sbx", ".sbx/proxy"];

/// Makes the home `name` in `homes` with all that belongs in it, and opens it.
///
/// To be called as root. `name` is one component, chosen by the server.
///
/// # Errors
/// [`Kind::Exists`], and that home is left alone; or it cannot be made or given away, and nothing is
/// left of it.
pub fn make_home(homes: &OwnedFd, name: &[u8], owner: User) -> Result<OwnedFd> {
    let failed = |errno| Error::system(format_args!("cannot make the home {}", show(name)), errno);
    mkdirat(homes, name, PRIVATE).map_err(failed)?;
    furnish(homes, name, owner).map_err(|errno| {
        // What went wrong is what is told.
        let _ = remove_home(homes, name, None);
        failed(errno)
    })
}

fn furnish(homes: &OwnedFd, name: &[u8], owner: User) -> std::result::Result<OwnedFd, Errno> {
    // For reading, not O_PATH: the owner is changed through it.
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let home = openat(homes, name, flags, Mode::empty())?;
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    fchown(&home, Some(uid), Some(gid))?;
    let _acting = ActingAs::new(owner)?;
    for directory in FURNITURE {
        mkdirat(&home, directory, PRIVATE)?;
    }
    Ok(home)
}

/// Removes the home `name` from `homes`; one that is not there is removed already. Links are removed
/// and not followed, and memory is bounded whatever is in there. False if it is not all gone when the
/// `deadline` has come.
///
/// To be called as root, when nothing of its owner runs any more.
///
/// # Errors
/// Something is mounted in it, or put into it again and again: what could be removed is gone.
pub fn remove_home(homes: &OwnedFd, name: &[u8], deadline: Option<Instant>) -> Result<bool> {
    openat(homes, ".", DIRECTORY, Mode::empty())
        .and_then(|homes| remove_tree(homes, name, deadline))
        .map_err(|errno| {
            let (home, why) = (show(name), errno.desc().to_lowercase());
            // The kind is the server's own trouble, whatever the errno would mean to a client.
            Error::new(
                Kind::System,
                format!("cannot remove the home {home}: {why} ({errno:?})"),
            )
        })
}
