//! Creates, describes and deletes sandboxes. Operations inside a sandbox act on its workspace.

use std::sync::Arc;

use super::call::{Answer, Call};
use crate::api::json::list::ListDocument;
use crate::api::json::sandbox::{
    CreatedDocument, Keep, SandboxDocument, pause_request, sandbox_request,
};
use crate::codec::object::object;
use crate::host::{AllEnded, Host, Sandbox, Shortage};
use crate::http::Response;
use crate::spec::sandbox::StopCause;

/// `GET /v1/sandboxes`.
pub(super) fn list(call: &mut Call<'_, '_>, host: &Host) -> Answer {
    let mut sandboxes = host.list().into_iter();
    let landlock_abi = call.context.machine.landlock_abi;
    let append_next = move |out: &mut Vec<u8>| {
        let Some(sandbox) = sandboxes.next() else {
            return Ok(false);
        };
        let document = SandboxDocument::of(&sandbox, landlock_abi, None);
        serde_json::to_writer(out, &document).map(|()| true)
    };
    Ok(ListDocument::array(append_next).respond())
}

/// `POST /v1/sandboxes`.
pub(super) fn create(call: &mut Call<'_, '_>, host: &Host) -> Answer {
    let (count, spec) = call.parse_optional(sandbox_request)?;
    let (made, shortage) = host.create(count, &spec)?;
    let with_token = |sandbox: &Arc<Sandbox>| {
        let token = call.context.authenticator.sandbox_token(&sandbox.id);
        document(call, sandbox, Some(token))
    };
    Ok(Response::json(&CreatedDocument {
        rejected: count - made.len(),
        rejected_code: shortage.map(Shortage::code),
        rejected_reason: shortage.map(|shortage| shortage.to_string()),
        sandboxes: made.iter().map(with_token).collect(),
    }))
}

/// `DELETE /v1/sandboxes`.
pub(super) fn delete_all(_: &mut Call<'_, '_>, host: &Host) -> Answer {
    let AllEnded { count, removing } = host.delete_all()?;
    let mut answer = object! { "deleted": count };
    if removing > 0 {
        answer["removing"] = removing.into();
    }
    Ok(Response::json(&answer))
}

/// `GET /v1/sandboxes/{id}`.
pub(super) fn describe(call: &mut Call<'_, '_>, host: &Host, id: &str) -> Answer {
    Ok(Response::json(&document(call, &*host.find(id)?, None)))
}

/// `DELETE /v1/sandboxes/{id}`.
pub(super) fn delete(call: &mut Call<'_, '_>, host: &Host, id: &str) -> Answer {
    call.request.slot.waits_for_end();
    let ended = host.delete(id)?;
    let mut answer = object! { "id": id, "deleted": ended.is_first_report };
    if ended.is_removing {
        answer["removing"] = true.into();
    }
    Ok(Response::json(&answer))
}

/// `POST /v1/sandboxes/{id}/pause`.
pub(super) fn pause(call: &mut Call<'_, '_>, host: &Host, id: &str) -> Answer {
    let sandbox = match call.parse_optional(pause_request)? {
        Keep::Memory => host.pause(id)?,
        Keep::Files => host.stop(id, StopCause::Asked)?,
    };
    Ok(Response::json(&document(call, &sandbox, None)))
}

/// `POST /v1/sandboxes/{id}/resume`.
pub(super) fn resume(call: &mut Call<'_, '_>, host: &Host, id: &str) -> Answer {
    call.parse_optional(|_| Ok(()))?;
    let sandbox = host.resume(id)?;
    Ok(Response::json(&document(call, &sandbox, None)))
}

/// `GET /v1/sandboxes/{id}/token`.
pub(super) fn token(call: &Call<'_, '_>, host: &Host, id: &str) -> Answer {
    let sandbox = host.find(id)?;
    let token = call.context.authenticator.sandbox_token(&sandbox.id);
    Ok(Response::json(&object! { "id": id, "token": token }))
}

fn document(call: &Call<'_, '_>, sandbox: &Sandbox, token: Option<String>) -> SandboxDocument {
    SandboxDocument::of(sandbox, call.context.machine.landlock_abi, token)
}
