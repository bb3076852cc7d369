//! Small encodings that the doors share: JSON fields, form-encoded queries, JSON text, Base64,
//! terminal output as plain text.
//!
//! Pure functions of bytes. Nothing here knows a route, a status or a mechanism.

pub mod fields;
pub mod plain;
pub mod queries;
pub mod query;

pub use sbx_bulk::{base64, escape};

/// The value of a word in a list of choices.
fn choose<T: Copy>(choices: &[(&str, T)], word: &str) -> Option<T> {
    let mut choices = choices.iter();
    choices
        .find(|(name, _)| *name == word)
        .map(|(_, value)| *value)
}

/// The words of a list of choices, for an error text.
fn accepted_words<T>(choices: &[(&str, T)]) -> String {
    let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
    words.join(" or ")
}
