//! Finding files: patterns, lists of patterns, ignore files, and a walk that obeys them.
//!
//! [`pattern`] and [`matcher`] are pure. [`walk`] goes through a tree beneath a descriptor, as the
//! owner of the files, and follows no link. Archives and watches use the same walk and matcher.

mod expression;
#[cfg(test)]
mod fuzz;
mod ignores;
mod matcher;
mod pattern;
#[cfg(test)]
mod tests;
mod walk;

pub use expression::{Case, Options, SEARCHER_BYTES, Searcher, line_end, line_start};
pub use matcher::{Matcher, Verdict};
pub(in crate::files) use walk::HELD_LEVELS;
pub use walk::{Filter, Found, Visit, is_gone};
