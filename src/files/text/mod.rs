//! Changes of text: edits, and the unified diff that tells what they changed. All of it is pure.

mod diff;
mod edit;
#[cfg(test)]
mod fuzz;

pub use diff::{Splice, spliced, unified};
pub use edit::{Count, Edit, Place, Unfit, plan};

/// Where bytes that are no text are looked for.
pub const BINARY_WITHIN: usize = 64 * 1024;

/// Whether a file that begins so is binary: it has a NUL.
pub fn is_binary(start: &[u8]) -> bool {
    let start = &start[..start.len().min(BINARY_WITHIN)];
    memchr::memchr(0, start).is_some()
}
