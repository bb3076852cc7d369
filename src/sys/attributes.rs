//! Extended attributes of files (xattr(7)), which nix does not wrap.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::NixPath;
use nix::errno::Errno;

/// Sets an extended attribute of an open file (fsetxattr(2)).
///
/// # Errors
/// `EOPNOTSUPP` if the file system has none; `ENOSPC`, `E2BIG` if they are too large for it.
pub fn set_attribute(file: BorrowedFd<'_>, name: &str, value: &[u8]) -> Result<(), Errno> {
    let result = name.with_nix_path(|name| {
        let (value, length) = (value.as_ptr().cast(), value.len());
        // SAFETY: the name ends with a NUL, the value has `length` bytes, and both outlive the call.
        unsafe { libc::fsetxattr(file.as_raw_fd(), name.as_ptr(), value, length, 0) }
    })?;
    Errno::result(result).map(drop)
}

/// Removes an extended attribute of an open file (fremovexattr(2)).
///
/// # Errors
/// `ENODATA` if it has none with this name.
pub fn remove_attribute(file: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    let result = name.with_nix_path(|name| {
        // SAFETY: the name ends with a NUL and outlives the call.
        unsafe { libc::fremovexattr(file.as_raw_fd(), name.as_ptr()) }
    })?;
    Errno::result(result).map(drop)
}

/// As [`attribute_names`], of an open file (flistxattr(2)).
///
/// # Errors
/// As [`attribute_names`].
pub fn attribute_names_of(file: BorrowedFd<'_>, most: usize) -> Result<Vec<u8>, Errno> {
    read(most, |buffer, length| {
        // SAFETY: the kernel writes at most `length` bytes to the buffer.
        Ok(unsafe { libc::flistxattr(file.as_raw_fd(), buffer.cast(), length) })
    })
}

/// The names of the extended attributes of a file, each with a NUL behind it (llistxattr(2)). A link at the end of
/// the path is not followed.
///
/// # Errors
/// Those of the path; `EOPNOTSUPP` if the file system has none; `ERANGE` if there are more than `most` bytes of names.
pub fn attribute_names(path: &[u8], most: usize) -> Result<Vec<u8>, Errno> {
    read(most, |buffer, length| {
        path.with_nix_path(|path| {
            // SAFETY: the path ends with a NUL, and the kernel writes at most `length` bytes to the buffer.
            unsafe { libc::llistxattr(path.as_ptr(), buffer.cast(), length) }
        })
    })
}

/// An extended attribute of a file (lgetxattr(2)). A link at the end of the path is not followed.
///
/// # Errors
/// Those of the path; `ENODATA` if it has none with this name; `ERANGE` if it is longer than `most` bytes.
pub fn attribute(path: &[u8], name: &[u8], most: usize) -> Result<Vec<u8>, Errno> {
    read(most, |buffer, length| {
        path.with_nix_path(|path| {
            name.with_nix_path(|name| {
                // SAFETY: both C strings end with a NUL, and the kernel writes at most `length` bytes to the buffer.
                unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), buffer.cast(), length) }
            })
        })?
    })
}

/// What `call` writes to a buffer of at most `most` bytes.
fn read(
    most: usize,
    call: impl Fn(*mut u8, usize) -> nix::Result<isize>,
) -> Result<Vec<u8>, Errno> {
    // Most files have none, which costs no buffer: a length of 0 asks for the size.
    let size = usize::try_from(Errno::result(call(std::ptr::null_mut(), 0)?)?).unwrap_or(0);
    if size == 0 {
        return Ok(Vec::new());
    }
    if size > most {
        return Err(Errno::ERANGE);
    }
    let mut buffer = vec![0; size];
    let written = Errno::result(call(buffer.as_mut_ptr(), size)?)?;
    buffer.truncate(usize::try_from(written).unwrap_or(0));
    Ok(buffer)
}
