//! The JSON of this project's own API: what requests ask for, what answers say, and a code for each kind of
//! failure.
//!
//! Several doors speak it: one sends a document as a body, another as the result of a tool. What frames it is theirs.

pub(in crate::api) mod command;
#[cfg(feature = "interpreter")]
pub(in crate::api) mod context;
pub(in crate::api) mod edit;
mod errors;
pub(in crate::api) mod file;
pub(in crate::api) mod list;
pub(in crate::api) mod network;
pub(in crate::api) mod sandbox;
pub(in crate::api) mod search;
pub(super) mod settings;
#[cfg(feature = "file-tools")]
pub(in crate::api) mod snapshot;
pub(in crate::api) mod watch;

#[cfg(test)]
use crate::codec::fields::Fields;
use crate::error::Result;
use crate::files::name::FilePath;

/// A path that may be left out: then it is the directory that relative paths begin at.
pub(in crate::api) fn optional_path(given: Option<&[u8]>) -> Result<FilePath> {
    FilePath::new(given.unwrap_or(b"."))
}

/// What a function reads in a body, for the tests of such functions.
#[cfg(test)]
pub(in crate::api) fn parsed<T>(
    body: impl AsRef<[u8]>,
    read: impl FnOnce(&mut Fields<'_>) -> Result<T>,
) -> Result<T> {
    read(&mut Fields::parse_optional(body.as_ref())?)
}
