//! Snapshots in JSON.

use serde_json::Value;

use crate::codec::object::object;
use crate::error::{Error, Result};
use crate::host::{Snapshot, is_snapshot_id};

/// Most characters of a name.
const MAX_NAME: usize = 64;

/// Checks the name of a new snapshot.
///
/// # Errors
/// `Invalid`.
pub(in crate::api) fn check_name(name: &str) -> Result<()> {
    let is_plain =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte);
    let is_taken = is_snapshot_id(name) || [".", ".."].contains(&name);
    if !(1..=MAX_NAME).contains(&name.len()) || !name.bytes().all(is_plain) || is_taken {
        let text = format_args!(
            "name={name}: not accepted; it takes 1 to {MAX_NAME} of a-z 0-9 . _ -, but neither . nor .. nor what looks like an id"
        );
        return Err(Error::invalid(text));
    }
    Ok(())
}

/// A snapshot.
pub(in crate::api) fn document(snapshot: &Snapshot) -> Value {
    let settings = &snapshot.settings;
    let names = settings.environment.iter().map(|(name, _)| &**name);
    object! {
        "id": &*snapshot.id,
        "name": snapshot.name.as_deref(),
        "created_at_ms": snapshot.created_at_ms,
        "kind": "root",
        "stored": "tree",
        "files": snapshot.files,
        "bytes": snapshot.bytes,
        "skipped": snapshot.skipped,
        // What variables hold may be secret.
        "settings": object! {
            "env": names.collect::<Vec<_>>(),
            "cwd": settings.directory.as_deref(),
            "user": settings.user.as_deref(),
        },
    }
}
