//! Snapshots in JSON.

use serde_json::Value;

use crate::codec::object::object;
use crate::host::Snapshot;

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
