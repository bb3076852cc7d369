//! Creates, describes and deletes sandboxes. Operations inside a sandbox act on its workspace.

use std::sync::Arc;

use super::call::{Answer, Call};
use super::selection::Selection;
use crate::api::json::list::ListDocument;
use crate::api::json::sandbox::{
    CreatedDocument, Keep, SandboxDocument, pause_request, sandbox_request,
};
use crate::api::json::settings::{is_of_name, settings_change};
use crate::codec::object::object;
use crate::host::{AllEnded, By, Host, Sandbox, Shortage, Waker};
use crate::http::{Refusal, Response};

/// `GET /v1/sandboxes`: all, or what the query selects.
pub(super) fn list(call: &mut Call<'_, '_>, host: &Host) -> Answer {
    let selection = Selection::of(&call.query)?;
    let landlock_abi = call.context.machine.landlock_abi;
    let (all, next) = match &selection {
        Some(selection) => selection.page(host.list())?,
        None => (host.list(), None),
    };
    let mut sandboxes = all.into_iter();
    let append_next = move |out: &mut Vec<u8>| {
        let Some(sandbox) = sandboxes.next() else {
            return Ok(false);
        };
        let document = SandboxDocument::of(&sandbox, landlock_abi, None);
        serde_json::to_writer(out, &document).map(|()| true)
    };
    Ok(match selection {
        Some(_) => ListDocument::page(b"{\"sandboxes\":[", append_next, next.as_deref()).respond(),
        None => ListDocument::array(append_next).respond(),
    })
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

/// `PATCH /v1/sandboxes/{id}`.
pub(super) fn change(call: &mut Call<'_, '_>, host: &Host, id: &str) -> Answer {
    let change = call.parse(settings_change)?;
    if let Some(name) = call.ignored.first() {
        let text = format!("{name} cannot be changed; it is chosen when the sandbox is made");
        return Err(Refusal::new(400, "bad_request", text));
    }
    let by = if call.is_operator() {
        By::Host { holds: false }
    } else {
        By::Tenant
    };
    if !is_of_name(&change) && by == By::Tenant {
        let text = "a sandbox's own token changes its name alone; the host's changes the rest";
        return Err(Refusal::new(403, "forbidden", text));
    }
    let sandbox = host.change(id, by, change)?;
    Ok(Response::json(&document(call, &sandbox, None)))
}

/// `POST /v1/sandboxes/{id}/pause`.
pub(super) fn pause(call: &mut Call<'_, '_>, host: &Host, id: &str) -> Answer {
    let (keep, holds) = call.parse_optional(pause_request)?;
    let by = match call.is_operator() {
        true => By::Host { holds },
        false if holds => {
            let text = "hold is for the host's token";
            return Err(Refusal::new(403, "forbidden", text));
        }
        false => By::Tenant,
    };
    let (sandbox, _) = match keep {
        Keep::Memory => host.pause(id, by)?,
        Keep::Files => host.stop(id, by)?,
    };
    Ok(Response::json(&document(call, &sandbox, None)))
}

/// `POST /v1/sandboxes/{id}/resume`.
pub(super) fn resume(call: &mut Call<'_, '_>, host: &Host, id: &str) -> Answer {
    call.parse_optional(|_| Ok(()))?;
    let waker = if call.is_operator() {
        Waker::Host
    } else {
        Waker::Tenant
    };
    let (sandbox, _) = host.resume(id, waker)?;
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
