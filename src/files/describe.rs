//! What a file is in full: besides its entry, where a link leads, and the attributes that clients have given it.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::fstat;
use nix::unistd::{Gid, Uid};

use super::entry::{Entry, FileKind};
use super::name::FilePath;
use super::name_at::NameAt;
use super::root::{Missing, Root};
use crate::error::{Error, Kind, Result};
use crate::sys::paths::fchownat;
use crate::sys::{attribute, attribute_names, attribute_names_of, remove_attribute, set_attribute};

/// Most bytes of the names of all attributes of a file, and of a value: what Linux allows (xattr(7)).
const MAX_ATTRIBUTE_BYTES: usize = 64 * 1024;

/// Most bytes of the attributes of one file that are shown, names and values.
const MAX_SHOWN_BYTES: usize = 16 * 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attribute {
    /// With its namespace, as in `user.name`.
    pub name: String,
    /// Any bytes.
    pub value: Vec<u8>,
}

/// A file in full.
pub struct Description {
    /// Its entry; a link is not followed.
    pub entry: Entry,
    /// What a link leads to, and the path of that; `None` if it is no link, or is not followed here.
    pub followed: Option<(Entry, Vec<u8>)>,
    /// Those of its attributes that were asked for.
    pub attributes: Vec<Attribute>,
}

impl Root {
    /// Describes a file, with the attributes whose names begin with `prefix`.
    ///
    /// # Errors
    /// `NotFound`, or the path may not be searched.
    pub fn describe(&self, path: &FilePath, prefix: &str) -> Result<Description> {
        let entry = self.stat(path)?;
        match self.name_at(path, Missing::Refuse) {
            Ok(NameAt { directory, name }) => {
                Ok(self.describe_in(directory.as_fd(), &name, entry, prefix))
            }
            // A path that ends in `.`, `..` or the root.
            Err(_) => Ok(Description {
                entry,
                followed: None,
                attributes: Vec::new(),
            }),
        }
    }

    /// Sets the owner of a file to the one that it has: whoever watches it is notified that its attributes changed. Nothing
    /// happens if that is not allowed.
    pub fn renew_owner(&self, path: &FilePath) {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        let Ok(file) = self.resolve(path, flags) else {
            return;
        };
        if let Ok(found) = fstat(&file) {
            let (user, group) = (Uid::from_raw(found.st_uid), Gid::from_raw(found.st_gid));
            let _ = fchownat(&file, "", Some(user), Some(group), AtFlags::AT_EMPTY_PATH);
        }
    }

    /// As [`Root::describe`], for the entry of a name in a directory that was opened beneath this root.
    pub(super) fn describe_in(
        &self,
        directory: BorrowedFd<'_>,
        name: &[u8],
        entry: Entry,
        prefix: &str,
    ) -> Description {
        Description {
            followed: self.followed(directory, name, &entry),
            entry,
            attributes: attributes_at(directory, name, prefix, MAX_SHOWN_BYTES),
        }
    }

    fn followed(
        &self,
        directory: BorrowedFd<'_>,
        name: &[u8],
        entry: &Entry,
    ) -> Option<(Entry, Vec<u8>)> {
        if entry.kind != FileKind::Link {
            return None;
        }
        let target = self.resolve_in(directory, name, OFlag::O_PATH).ok()?;
        let path = self.path_of(&target).unwrap_or_else(|| b"/".to_vec());
        let entry = Entry::new(Vec::new(), &fstat(&target).ok()?);
        Some((entry, path))
    }
}

/// The attributes of a name in a directory, as far as they have `room`. What cannot be read is left out: few file systems lack them, and nobody
/// can have set any there.
pub(super) fn attributes_at(
    directory: BorrowedFd<'_>,
    name: &[u8],
    prefix: &str,
    mut room: usize,
) -> Vec<Attribute> {
    // The kernel has no such call that takes a directory before Linux 6.13.
    let mut path = format!("/proc/self/fd/{}/", directory.as_raw_fd()).into_bytes();
    path.extend_from_slice(name);
    let names = attribute_names(&path, MAX_ATTRIBUTE_BYTES).unwrap_or_default();
    let names = names.split(|byte| *byte == 0);
    let asked = names.filter(|name| name.starts_with(prefix.as_bytes()));
    let read = |name: &[u8]| {
        Some(Attribute {
            value: attribute(&path, name, MAX_ATTRIBUTE_BYTES).ok()?,
            name: String::from_utf8(name.to_vec()).ok()?,
        })
    };
    let fits = |attribute: &Attribute| {
        let bytes = attribute.name.len() + attribute.value.len();
        let fits = bytes <= room;
        room -= if fits { bytes } else { 0 };
        fits
    };
    asked.filter_map(read).filter(fits).collect()
}

/// Sets attributes of an open file.
pub(super) fn set_attributes(file: BorrowedFd<'_>, attributes: &[Attribute]) -> nix::Result<()> {
    let mut attributes = attributes.iter();
    attributes.try_for_each(|Attribute { name, value }| set_attribute(file, name, value))
}

/// Removes the attributes of an open file whose names begin with `prefix`.
pub(super) fn clear_attributes(file: BorrowedFd<'_>, prefix: &str) -> nix::Result<()> {
    let names = attribute_names_of(file, MAX_ATTRIBUTE_BYTES).unwrap_or_default();
    for name in names.split(|byte| *byte == 0) {
        if name.starts_with(prefix.as_bytes()) {
            remove_attribute(file, name)?;
        }
    }
    Ok(())
}

/// Why an attribute of a file cannot be set.
pub(super) fn attribute_error(shown: impl fmt::Display, errno: Errno) -> Error {
    let act = format!("cannot set metadata of {shown}");
    match errno {
        Errno::EOPNOTSUPP => Error::new(
            Kind::Unsupported,
            format!("{act}: its file system has no extended attributes (EOPNOTSUPP)"),
        ),
        Errno::ENOSPC | Errno::EDQUOT | Errno::E2BIG | Errno::ERANGE => Error::new(
            Kind::TooLarge,
            format!("{act}: they are too large for its file system ({errno:?})"),
        ),
        errno => Error::system(act, errno),
    }
}
