//! Changes of text: edits, the unified diff that tells what they changed, and patches. All of it is pure, but long
//! work asks whether to go on.

mod diff;
mod edit;
#[cfg(test)]
mod fuzz;
mod pace;
mod patch;

pub use diff::{Splice, diff_bytes, spliced, unified};
pub use edit::{Count, Edit, EditError, EditTarget, MAX_PLACES, plan};
pub use pace::Pace;
pub use patch::{FilePatch, Unapplied, Unread, apply, parse, room};

/// Where bytes that are no text are looked for.
pub const BINARY_WITHIN: usize = 64 * 1024;

/// Whether a file that begins so is binary: it has a NUL.
pub fn is_binary(start: &[u8]) -> bool {
    let start = &start[..start.len().min(BINARY_WITHIN)];
    memchr::memchr(0, start).is_some()
}

/// Most bytes of a text that an error tells.
const MAX_TOLD: usize = 8 * 1024;

/// As much of a text as an error tells. The text may be a whole file.
pub fn told(text: &[u8]) -> &[u8] {
    &text[..text.len().min(MAX_TOLD)]
}
