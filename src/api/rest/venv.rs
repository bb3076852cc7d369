//! The virtual environment of a workspace.

use super::call::{Answer, Call, long_work};
use crate::api::json::command::{VenvDocument, venv_request};
use crate::http::Response;
use crate::workspace::Workspace;

/// `POST venv`.
pub(super) fn make(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let path = call.parse_optional(venv_request)?;
    let mut making = workspace.make_venv(path)?;
    long_work(call, move |interrupt| {
        let venv = making.run(interrupt)?;
        Ok(Response::json(&VenvDocument::of(&venv)))
    })
}

/// `GET venv`.
pub(super) fn describe(_: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    Ok(Response::json(&VenvDocument::of(&workspace.venv()?)))
}
