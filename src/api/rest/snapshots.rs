//! Snapshots: what roots of sandboxes are made of.

use std::sync::Arc;

use super::archives;
use super::call::{Answer, Call};
use crate::api::json::snapshot::{check_name, document};
use crate::codec::object::object;
use crate::error::{Error, Kind};
use crate::files::search::Filter;
use crate::files::{Extent, Packing};
use crate::host::Host;
use crate::http::Response;
use crate::workspace::{Archive, UploadReader};

/// Snapshots of a page unless the client sets a limit, and the most.
const PAGE: u64 = 100;
const MAX_PAGE: u64 = 1000;

/// `PUT /v1/snapshots`.
pub(super) fn import(call: &mut Call<'_, '_>, host: &Host) -> Answer {
    call.require_body()?;
    let name = call.query.text("name")?;
    let name = name.as_deref();
    name.map_or(Ok(()), check_name)?;
    let ledger = Arc::clone(&call.request.ledger);
    let mut input = UploadReader::new(&mut call.request.body, &ledger.work, &ledger);
    let made = host.import_snapshot(name, &mut input, &ledger);
    match (made, input.take_error()) {
        (Err(_), Some(broken_off)) => Err(broken_off),
        (made, _) => {
            let mut response = Response::json(&document(&made?));
            response.status = 201;
            Ok(response)
        }
    }
}

/// `GET /v1/snapshots`.
pub(super) fn list(call: &mut Call<'_, '_>, host: &Host) -> Answer {
    let query = &call.query;
    let (name, after) = (query.text("name")?, query.text("after")?);
    let limit = query.number("limit")?.unwrap_or(PAGE);
    if !(1..=MAX_PAGE).contains(&limit) {
        let text = format_args!("limit={limit}: not accepted; it takes 1 to {MAX_PAGE}");
        return Err(Error::invalid(text).into());
    }
    let mut all = host.snapshots();
    if let Some(after) = after {
        let place = all.iter().position(|own| own.id == after);
        let place = place.ok_or_else(|| {
            let text = format!("after={after}: there is no such snapshot any more; list anew");
            Error::new(Kind::NotFound, text)
        })?;
        all.drain(..=place);
    }
    all.retain(|own| name.is_none() || own.name == name);
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let has_more = all.len() > limit;
    all.truncate(limit);
    let last = all.last().filter(|_| has_more);
    let next = last.map(|last| last.id.clone());
    let documents: Vec<_> = all.iter().map(document).collect();
    Ok(Response::json(
        &object! { "snapshots": documents, "next": next },
    ))
}

/// `GET /v1/snapshots/{s}`.
pub(super) fn describe(_: &mut Call<'_, '_>, host: &Host, key: &str) -> Answer {
    Ok(Response::json(&document(&host.snapshot(key)?)))
}

/// `DELETE /v1/snapshots/{s}`.
pub(super) fn delete(_: &mut Call<'_, '_>, host: &Host, key: &str) -> Answer {
    let (id, is_removing) = host.delete_snapshot(key)?;
    let mut answer = object! { "id": id, "deleted": true };
    if is_removing {
        answer["removing"] = true.into();
    }
    Ok(Response::json(&answer))
}

/// `GET /v1/snapshots/{s}/archive`.
pub(super) fn archive(call: &mut Call<'_, '_>, host: &Host, key: &str) -> Answer {
    let packing = Packing {
        filter: Filter::default(),
        is_compressed: archives::is_compressed(&call.query)?,
        // Nobody changes it, so all of it can be read.
        fails: true,
        extent: Extent::Root,
        newer_than: None,
    };
    let (root, pin) = host.open_snapshot(key)?;
    let archive = Archive::of_root(root, &call.request.ledger, packing)?;
    Ok(archives::send(call, archive).holding(pin))
}
