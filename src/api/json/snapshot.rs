//! Snapshots in JSON.

use serde_json::Value;

use crate::codec::object::object;
use crate::host::Snapshot;

/// A snapshot.
pub(in crate::api) fn document(snapshot: &Snapshot) -> Value {
    object! {
        "id": &*snapshot.id,
        "name": snapshot.name.as_deref(),
        "created_at_ms": snapshot.created_at_ms,
        "kind": "root",
        "stored": "tree",
        "files": snapshot.files,
        "bytes": snapshot.bytes,
        "skipped": snapshot.skipped,
        "settings": object! {},
    }
}
