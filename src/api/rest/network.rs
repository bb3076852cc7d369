//! `GET network`, which says what commands reach, and what was allowed and refused.

use super::call::{Answer, Call};
use crate::api::json::network::NetworkDocument;
use crate::http::Response;
use crate::workspace::Workspace;

/// `GET network`.
pub(super) fn describe(_: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    Ok(Response::json(&NetworkDocument::of(workspace.network())))
}
