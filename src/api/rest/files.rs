//! Files: queries to typed operations, contents to bodies, entries to documents.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use serde_json::{Value, json};

use super::call::{Answer, Call, long_work};
use crate::api::content::body;
use crate::api::json::file::{EntryDocument, compare_request, page_response, paths_request};
use crate::api::json::list::to_json;
use crate::client::Peer;
use crate::codec::object::object;
use crate::codec::query::Query;
use crate::error::{Error, Result};
use crate::files::hash::{Digest, Hashed};
use crate::files::lines::LineRange;
use crate::files::name::FilePath;
use crate::files::{Condition, SkipList, SkipReason};
use crate::http::range::{Range, range_of};
use crate::http::request::BodyReader;
use crate::http::response::ChargedDocument;
use crate::http::{Body, Refusal, Response};
use crate::workspace::{Compared, FilePart, FileState, FileWrite, Span, UploadSource, Workspace};

/// `GET files/read`.
pub(super) fn read(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let path = path(&call.query, "path")?;
    let (offset, length) = (call.query.number("offset")?, call.query.number("length")?);
    if let Some(range) = lines(&call.query)? {
        let has_range = call.request.head.header("range").is_some();
        if has_range || offset.is_some() || length.is_some() {
            let text = "lines does not go with offset, length or a Range header";
            return Err(Error::invalid(text).into());
        }
        return read_lines(call, workspace, path, range);
    }
    let readable = workspace.open_file(path, length.is_some())?;
    let mut response =
        Response::new(200, Body::Empty).with_header("Content-Type", "application/octet-stream");
    let mut range = Range::None;
    if let Some(size) = readable.size() {
        response = response.with_header("Accept-Ranges", "bytes");
        if offset.is_none() && length.is_none() {
            range = range_of(&call.request.head, size);
        }
    }
    let size = readable.size().unwrap_or(0);
    let content = match range {
        Range::None => readable.part(offset, length)?,
        Range::Satisfiable { offset, length } => {
            let last = offset + length - 1;
            let range = format!("bytes {offset}-{last}/{size}");
            response = response.with_header("Content-Range", range);
            response.status = 206;
            readable.exactly(Span { offset, length })?
        }
        Range::Unsatisfiable => {
            let path = readable.path();
            let text = format!("cannot read {path}: the range begins after its end ({size} bytes)");
            let refusal = Refusal::new(416, "range", text);
            return Err(refusal.with_header("Content-Range", format!("bytes */{size}")));
        }
    };
    response.body = body(content);
    Ok(response)
}

/// `GET files/read?lines=`.
fn read_lines(
    call: &Call<'_, '_>,
    workspace: &Workspace,
    path: FilePath,
    range: LineRange,
) -> Answer {
    let readable = workspace.open_file(path, false)?;
    let (found, content) = readable.lines(range, workspace, &mut call.interrupt())?;
    let total = found.total;
    let shown = match found.lines {
        Some(LineRange { first, last }) => format!("{first}-{last}/{total}"),
        None => format!("*/{total}"),
    };
    Ok(Response::new(200, body(content))
        .with_header("Content-Type", "application/octet-stream")
        .with_header("X-Sbx-Lines", shown))
}

fn lines(query: &Query) -> Result<Option<LineRange>> {
    let accepted = "lines from 1, as 10-20, 10- or 10";
    query.parsed("lines", accepted, LineRange::parse)
}

/// `PUT files/write`.
pub(super) fn write(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    call.require_body()?;
    let query = &call.query;
    let path = path(query, "path")?;
    let part = match (query.number("offset")?, query.number("truncate_to")?) {
        (None, None) => FilePart::Whole,
        (None, Some(_)) => {
            let text = "truncate_to goes with offset: without one the body is the whole file";
            return Err(Error::invalid(text).into());
        }
        (Some(offset), truncate_to) => FilePart::Range {
            offset,
            truncate_to,
        },
    };
    let how = FileWrite {
        part,
        mode: query.mode("mode")?,
        makes_parents: query.optional_flag("mkdir")?.unwrap_or(true),
        condition: condition(query)?,
        is_hashed: wants_hash(query)?,
        attributes: None,
    };
    let (size, sha256) = workspace.write_file(&path, &how, &mut call.request.body)?;
    let mut document = object! { "path": path.to_string(), "size": size };
    if let Some(sha256) = sha256 {
        document["sha256"] = json!(sha256.to_string());
    }
    Ok(Response::json(&document))
}

fn condition(query: &Query) -> Result<Condition> {
    let content = query.parsed("if_sha256", "64 hexadecimal digits", Digest::parse)?;
    match (content, query.flag("if_absent")?) {
        (None, false) => Ok(Condition::Always),
        (None, true) => Ok(Condition::Absent),
        (Some(digest), false) => Ok(Condition::Content(digest)),
        (Some(_), true) => Err(Error::invalid(
            "if_sha256 and if_absent together never hold; send one of them",
        )),
    }
}

impl UploadSource for BodyReader<'_> {
    type Error = Refusal;

    fn remaining(&self) -> Option<u64> {
        Self::remaining(self)
    }

    fn read(&mut self, buffer: &mut [u8]) -> std::result::Result<usize, Refusal> {
        Ok(Self::read(self, buffer)?)
    }

    fn splice(&mut self, pipe: BorrowedFd<'_>) -> std::result::Result<Option<usize>, Refusal> {
        Ok(Self::splice(self, pipe)?)
    }

    fn client(&self) -> Box<dyn Peer + Send> {
        Box::new(self.watch_client())
    }
}

/// `GET files/list`.
pub(super) fn list(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let query = &call.query;
    let path = path(query, "path")?;
    let limit = query.number("limit")?;
    let detail = detail(query)?;
    // A cursor is a name as it was shown, so it is read as paths are.
    let after = query
        .value("after")?
        .filter(|after| !after.is_empty())
        .map(FilePath::new)
        .transpose()?;
    let page = workspace.list_files(&path, after.as_ref(), limit, &mut call.interrupt())?;
    Ok(page_response(page, path, detail))
}

/// `GET files/stat`.
pub(super) fn stat(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let (path, detail) = (path(&call.query, "path")?, detail(&call.query)?);
    let wants_hash = wants_hash(&call.query)?;
    let entry = workspace.stat_file(&path)?;
    if !wants_hash {
        let document = EntryDocument::of(&entry, path.to_string(), detail);
        return Ok(Response::json(&document));
    }
    let mut files = workspace.hash_file(path.clone())?;
    long_work(call, move |interrupt| {
        let (_, hashed) = files.run(interrupt)?.remove(0);
        let mut document = EntryDocument::of(&entry, path.to_string(), detail);
        document.sha256 = Some(hashed?.sha256.to_string());
        Ok(Response::json(&document))
    })
}

/// `POST files/hash`.
pub(super) fn hash(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    call.require_body()?;
    let paths = call.parse(paths_request)?;
    let mut files = workspace.hash_files(paths)?;
    let ledger = Arc::clone(&workspace.ledger);
    long_work(call, move |interrupt| {
        let results = files.run(interrupt)?.into_iter();
        let documents = results.map(|(path, result)| match result {
            Ok(Hashed { size, sha256 }) => object! {
                "path": path.to_string(), "size": size, "sha256": sha256.to_string()
            },
            Err(error) => {
                let Refusal { text, code, .. } = error.into();
                object! { "path": path.to_string(), "error": text, "code": code }
            }
        });
        let mut document = ChargedDocument::new(&ledger).map_err(Error::from)?;
        push_list(&mut document, "{\"files\":[", documents)?;
        Ok(ended(document, "}\n")?)
    })
}

/// Adds a list behind `begin`.
fn push_list(
    document: &mut ChargedDocument,
    begin: &str,
    items: impl Iterator<Item = Value>,
) -> Result<()> {
    let mut before = begin;
    let mut is_empty = true;
    for item in items {
        let item = to_json(&item);
        document.push(before.len() + item.len(), |out| {
            out.extend_from_slice(before.as_bytes());
            out.extend_from_slice(&item);
        })?;
        (before, is_empty) = (",", false);
    }
    let before = if is_empty { begin } else { "" };
    document.push(begin.len() + 1, |out| {
        out.extend_from_slice(before.as_bytes());
        out.push(b']');
    })?;
    Ok(())
}

/// The answer with a document that ends with `end`.
fn ended(mut document: ChargedDocument, end: &str) -> Result<Response> {
    document.push(end.len(), |out| out.extend_from_slice(end.as_bytes()))?;
    Ok(document.respond())
}

/// `POST files/compare`.
pub(super) fn compare(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    call.require_body()?;
    let (tree, files) = call.parse(compare_request)?;
    let mut comparison = workspace.compare_files(tree, files, &mut call.interrupt())?;
    let ledger = Arc::clone(&workspace.ledger);
    long_work(call, move |interrupt| {
        let found = comparison.run(interrupt)?;
        let mut document = ChargedDocument::new(&ledger).map_err(Error::from)?;
        let different = paths(&found, FileState::Different);
        push_list(&mut document, "{\"different\":[", different)?;
        let missing = paths(&found, FileState::Missing);
        let before = format!(",\"extra\":{},\"missing\":[", found.extra);
        push_list(&mut document, &before, missing)?;
        let skipped = Value::from(names(found.skipped));
        let end = format!(
            ",\"skipped\":{skipped},\"skipped_total\":{}}}\n",
            found.skipped.total
        );
        Ok(ended(document, &end)?)
    })
}

/// The skipped files that the answer names.
fn names(skipped: &SkipList) -> Vec<Value> {
    let document = |(name, reason): &(String, SkipReason)| object! { "name": name.as_str(), "reason": reason.word() };
    skipped.first.iter().map(document).collect()
}

fn paths(found: &Compared<'_>, state: FileState) -> impl Iterator<Item = Value> {
    let files = found.files.iter().filter(move |file| file.state == state);
    files.map(|file| file.path.to_string().into())
}

/// `DELETE files/delete`.
pub(super) fn delete(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let recursive = call.query.flag("recursive")?;
    let path = path(&call.query, "path")?;
    workspace.delete_file(&path, recursive, &mut call.interrupt())?;
    Ok(Response::json(&object! { "deleted": true }))
}

/// `POST files/mkdir`.
pub(super) fn make_directory(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let mode = call.query.mode("mode")?;
    let path = path(&call.query, "path")?;
    workspace.make_directory(&path, mode)?;
    Ok(Response::json(&object! { "path": path.to_string() }))
}

/// `POST files/move`.
pub(super) fn rename(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let (from, to) = (path(&call.query, "from")?, path(&call.query, "to")?);
    workspace.move_file(&from, &to, &mut call.interrupt())?;
    Ok(Response::json(&object! { "path": to.to_string() }))
}

/// `POST files/copy`.
pub(super) fn copy(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let query = &call.query;
    let (recursive, overwrite) = (query.flag("recursive")?, query.flag("overwrite")?);
    let (from, to) = (path(query, "from")?, path(query, "to")?);
    let mut copy = workspace.copy_file(&from, &to, recursive, overwrite)?;
    long_work(call, move |interrupt| {
        let report = copy.run(interrupt)?;
        Ok(Response::json(&object! {
            "path": to.to_string(),
            "files": report.files,
            "dirs": report.dirs,
            "links": report.links,
            "bytes": report.bytes,
            "skipped": names(&report.skipped),
            "skipped_total": report.skipped.total,
        }))
    })
}

/// `POST files/chmod`.
pub(super) fn change_mode(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let query = &call.query;
    let (mode, recursive) = (query.mode("mode")?, query.flag("recursive")?);
    let path = path(query, "path")?;
    let result = workspace.change_mode(&path, mode, recursive, &mut call.interrupt())?;
    Ok(Response::json(&object! {
        "path": path.to_string(), "changed": result.changed, "skipped": result.skipped
    }))
}

pub(super) fn path(query: &Query, name: &str) -> Result<FilePath> {
    let missing = || Error::invalid(format_args!("the parameter {name} is missing"));
    FilePath::new(query.value(name)?.ok_or_else(missing)?)
}

fn wants_hash(query: &Query) -> Result<bool> {
    Ok(query.choice("hash", &[("sha256", true)])?.unwrap_or(false))
}

fn detail(query: &Query) -> Result<bool> {
    Ok(query.choice("detail", &[("full", true)])?.unwrap_or(false))
}
