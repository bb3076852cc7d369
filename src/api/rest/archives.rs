//! Archives: queries to typed operations, reports to documents.

use serde_json::json;

use super::call::{Answer, Call};
use super::files::path;
use crate::files::name::show;
use crate::files::{Overwrite, Skipped, Unpacking};
use crate::http::Response;
use crate::workspace::{MAX_ARCHIVE_FILES, Workspace};

/// The values of `overwrite`.
const OVERWRITES: [(&str, Overwrite); 3] = [
    ("replace", Overwrite::Replace),
    ("keep", Overwrite::Keep),
    ("fail", Overwrite::Fail),
];

/// `PUT files/archive`.
pub(super) fn unpack(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    call.require_body()?;
    let query = &call.query;
    let path = path(query, "path")?;
    let strip = query.number("strip")?.unwrap_or(0);
    let options = Unpacking {
        strip: usize::try_from(strip).unwrap_or(usize::MAX),
        overwrite: query
            .choice("overwrite", &OVERWRITES)?
            .unwrap_or(Overwrite::Replace),
        dry_run: query.flag("dry_run")?,
        owners: query.flag("owners")?,
        make_parents: query.optional_flag("mkdir")?.unwrap_or(true),
        max_bytes: query.number("max_bytes")?.unwrap_or(u64::MAX),
        max_files: query.number("max_files")?.unwrap_or(MAX_ARCHIVE_FILES),
    };
    let is_atomic = query.flag("atomic")?;
    let source = &mut call.request.body;
    let done = workspace.unpack_archive(&path, options, is_atomic, source)?;
    Ok(Response::json(&json!({
        "path": path.to_string(),
        "files": done.files,
        "dirs": done.directories,
        "links": done.links,
        "bytes": done.bytes,
        "skipped": done.skipped.iter().map(skipped).collect::<Vec<_>>(),
        "skipped_total": done.skipped_total,
    })))
}

fn skipped(file: &Skipped) -> serde_json::Value {
    json!({ "name": show(&file.name), "reason": file.reason })
}
