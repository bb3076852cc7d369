//! Renames with conditions, which nix has for some C libraries only.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::NixPath;
use nix::errno::Errno;

/// The condition of a [`rename`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rename {
    /// The files of both names change places.
    Exchange,
    /// No file has the new name.
    ToNewName,
}

/// Renames a file within a directory (rename(2)).
///
/// # Errors
/// `EEXIST` if the name is not new; `EINVAL` if the file system knows no conditions.
pub fn rename(
    directory: BorrowedFd<'_>,
    from: &[u8],
    to: &[u8],
    condition: Rename,
) -> Result<(), Errno> {
    let flags = match condition {
        Rename::Exchange => libc::RENAME_EXCHANGE,
        Rename::ToNewName => libc::RENAME_NOREPLACE,
    };
    let directory = directory.as_raw_fd();
    let result = from.with_nix_path(|from| {
        to.with_nix_path(|to| {
            let (from, to) = (from.as_ptr(), to.as_ptr());
            // SAFETY: both C strings outlive the call, and the descriptor is open.
            unsafe { libc::syscall(libc::SYS_renameat2, directory, from, directory, to, flags) }
        })
    })??;
    Errno::result(result).map(drop)
}
