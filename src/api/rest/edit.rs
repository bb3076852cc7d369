//! Changes of text files: requests to typed operations, what was changed to documents.

use super::call::{Answer, Call};
use crate::api::json::edit::{EditDocument, PatchDocument, edit_request};
use crate::api::json::optional_path;
use crate::error::Error;
use crate::http::Response;
use crate::workspace::Workspace;

/// `POST files/edit`.
pub(super) fn edit(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let request = call.parse(edit_request)?;
    let edited = workspace.edit_file(&request, &mut call.interrupt())?;
    Ok(Response::json(&EditDocument::of(&request.path, &edited)))
}

/// Longest patch in bytes.
const MAX_PATCH_BYTES: u64 = 16 << 20;

/// Most parts that are taken off the names of a patch.
const MAX_STRIP: u64 = 100;

/// `POST files/patch`.
pub(super) fn patch(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    call.require_body()?;
    let query = &call.query;
    let directory = optional_path(query.value("path")?)?;
    let strip = query.number("strip")?.unwrap_or(1);
    if strip > MAX_STRIP {
        let text = format!("strip={strip}: not accepted; it takes 0 to {MAX_STRIP}");
        return Err(Error::invalid(text).into());
    }
    let is_dry_run = query.flag("dry_run")?;
    let body = call
        .request
        .body
        .read_all(MAX_PATCH_BYTES, &call.request.ledger)?;
    let strip = usize::try_from(strip).unwrap_or(usize::MAX);
    let patched =
        workspace.patch_files(&directory, &body, strip, is_dry_run, &mut call.interrupt())?;
    Ok(Response::json(&PatchDocument::of(&patched)))
}
