//! Changes of text: edits, the unified diff that tells what they changed, and patches. All of it is pure.

mod diff;
mod edit;
#[cfg(test)]
mod fuzz;
mod patch;

pub use diff::{Splice, spliced, unified};
pub use edit::{Count, Edit, EditError, EditTarget, MAX_PLACES, plan};
pub use patch::{FilePatch, apply, parse};

/// Where bytes that are no text are looked for.
pub const BINARY_WITHIN: usize = 64 * 1024;

/// Whether a file that begins so is binary: it has a NUL.
pub fn is_binary(start: &[u8]) -> bool {
    let start = &start[..start.len().min(BINARY_WITHIN)];
    memchr::memchr(0, start).is_some()
}
