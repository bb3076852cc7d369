//! Making, finding and ending sandboxes.

use serde_json::json;

use super::route::Resource;
use super::wire::{self, CreatedDocument, Isolation, SandboxDocument, SandboxRequest};
use super::{Answer, MAX_JSON_BYTES, received};
use crate::auth::Authenticator;
use crate::host::{AllEnded, Host, Sandbox};
use crate::http::{Request, Response};

/// Answers what is about sandboxes as a whole; their insides are workspaces.
pub(super) fn answer(
    request: &mut Request<'_>,
    resource: Resource<'_>,
    method: &str,
    host: &Host,
    authenticator: &Authenticator,
) -> Answer {
    let isolation = || Isolation {
        landlock_abi: host.landlock_abi(),
        layers: host.layers(),
    };
    let describe = |sandbox: &Sandbox| SandboxDocument::of(sandbox, isolation());
    match (resource, method) {
        (Resource::Sandboxes, "POST") => {
            let body = request.body.read_all(MAX_JSON_BYTES).map_err(received)?;
            let SandboxRequest { count, wish } = wire::sandbox_request(&body)?;
            let made = host.create(count, &wish)?;
            let sandboxes: Vec<_> = made
                .iter()
                .map(|sandbox| {
                    describe(sandbox).with_token(authenticator.sandbox_token(sandbox.id()))
                })
                .collect();
            Ok(Response::json(&CreatedDocument {
                rejected: count - made.len(),
                sandboxes,
            }))
        }
        (Resource::Sandboxes, "DELETE") => {
            let AllEnded { count, removing } = host.delete_all()?;
            let mut answer = json!({ "deleted": count });
            if removing > 0 {
                answer["removing"] = removing.into();
            }
            Ok(Response::json(&answer))
        }
        (Resource::Sandbox(id), "DELETE") => {
            let ended = host.delete(id)?;
            let mut answer = json!({ "id": id, "deleted": ended.is_news });
            if ended.is_removing {
                answer["removing"] = true.into();
            }
            Ok(Response::json(&answer))
        }
        (Resource::Sandbox(id), _) => Ok(Response::json(&describe(&*host.find(id)?))),
        (Resource::SandboxToken(id), _) => {
            let sandbox = host.find(id)?;
            let token = authenticator.sandbox_token(sandbox.id());
            Ok(Response::json(&json!({ "id": id, "token": token })))
        }
        _ => Ok(Response::json(
            &host
                .list()
                .iter()
                .map(|sandbox| describe(sandbox))
                .collect::<Vec<_>>(),
        )),
    }
}
