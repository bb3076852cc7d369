//! Moving files.

use std::io::{Cursor, Read, Seek, SeekFrom};
use std::time::Duration;

use serde_json::json;

use super::query::Query;
use super::wire::{EntryDocument, PageDocument};
use super::{Answer, invalid, received, require_body};
use crate::error::Error;
use crate::files::name::FilePath;
use crate::files::{Conduit, FileKind, Opened, Upload};
use crate::http::request::{ClientWatch, ReceiveError};
use crate::http::stream::Disconnected;
use crate::http::{Body, Refusal, Request, Response};
use crate::sys::{Events, PollEntry, poll};
use crate::workspace::Workspace;

/// Entries of one page, unless the client says otherwise: a client that does not page gets whole
/// directories of ordinary size.
const PAGE_ENTRIES: u64 = 10_000;
const MAX_PAGE_ENTRIES: u64 = 100_000;

/// Up to here a file is read before the head is sent, so that both go out at once, and so that the
/// length of what only claims a size (in /proc and /sys) is known.
const SMALL_FILE_BYTES: u64 = 64 * 1024;

/// What is received at once of an upload.
const UPLOAD_BYTES: usize = 256 * 1024;

/// From here on the bytes of an upload are spliced into the file, which costs a pipe, rather than read
/// and written.
const SPLICED_BYTES: u64 = 256 * 1024;

/// What is read at once of an upload that is spliced otherwise: what came with the head.
const FIRST_BYTES: usize = 64 * 1024;

/// How long a pipe may take no data before its writer gives up.
const PIPE_PATIENCE: Duration = Duration::from_secs(10);

/// The part of a file that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// `GET files/read`.
pub(super) fn read(request: &Request<'_>, workspace: &Workspace, query: &Query) -> Answer {
    let path = path(query, "path")?;
    let (offset, length) = (query.number("offset")?, query.number("length")?);
    let files = workspace.files()?;
    let opened = files.open(&path, length.is_some())?;
    let size = opened.size;
    let is_regular = opened.kind == FileKind::Regular;
    let mut response =
        Response::new(200, Body::Empty).with_header("Content-Type", "application/octet-stream");
    if is_regular {
        response = response.with_header("Accept-Ranges", "bytes");
    }
    let mut span = Span {
        offset: offset.unwrap_or(0),
        length: length.unwrap_or(u64::MAX),
    };
    let is_plain = offset.is_none() && length.is_none();
    let mut is_whole = span.offset == 0 && length.is_none();
    if is_regular {
        span.length = span.length.min(size.saturating_sub(span.offset));
        match range_header(request, size).filter(|_| is_plain) {
            Some(Range::Satisfiable(part)) => {
                let last = part.offset + part.length - 1;
                let range = format!("bytes {}-{last}/{size}", part.offset);
                response = response.with_header("Content-Range", range);
                response.status = 206;
                span = part;
                is_whole = false;
            }
            Some(Range::Unsatisfiable) => {
                let text =
                    format!("cannot read {path}: the range begins after its end ({size} bytes)");
                let refusal = Refusal::new(416, "range", text);
                return Err(refusal.with_header("Content-Range", format!("bytes */{size}")));
            }
            Some(Range::None) | None => {}
        }
    }
    response.body = if is_regular {
        file_body(opened, span, is_whole, response.status == 206)
    } else {
        device_body(opened, offset, span.length)
    }
    .map_err(|error| Error::io(format_args!("cannot read {path}"), &error))?;
    Ok(response)
}

/// A part of a regular file. A `promised` part is sent whole or the connection is closed; of another
/// there may be less than there was when it was measured.
fn file_body(
    Opened { mut file, size, .. }: Opened,
    Span { offset, length }: Span,
    is_whole: bool,
    promised: bool,
) -> std::io::Result<Body> {
    // Beyond where a file can end the kernel does not seek, and there is nothing to read.
    if offset > 0 && length > 0 {
        file.seek(SeekFrom::Start(offset))?;
    }
    // A file of size 0 may be one of /proc's, which have no size and yet content.
    let is_unsized = is_whole && size == 0;
    let at_once = if is_unsized { SMALL_FILE_BYTES } else { length };
    let mut start = Vec::new();
    if at_once <= SMALL_FILE_BYTES {
        // In one call, where growing it would take one for each step.
        start.reserve_exact(usize::try_from(at_once).unwrap_or(0));
        (&mut file).take(at_once).read_to_end(&mut start)?;
        if is_unsized && start.len() as u64 == at_once {
            return Ok(Body::Reader(Box::new(Cursor::new(start).chain(file))));
        }
        if !promised || start.len() as u64 == length {
            return Ok(Body::Bytes(start));
        }
    }
    Ok(Body::File {
        file,
        length,
        start,
    })
}

/// A device has no end that could be waited for: it is read as far as it gives bytes at once.
fn device_body(
    Opened { mut file, .. }: Opened,
    offset: Option<u64>,
    length: u64,
) -> std::io::Result<Body> {
    if let Some(offset) = offset {
        file.seek(SeekFrom::Start(offset))?;
    }
    let mut device = UntilDry(file.take(length));
    // Here, because an error can still be answered.
    let mut start = vec![0; usize::try_from(length.min(SMALL_FILE_BYTES)).unwrap_or(0)];
    let count = device.read(&mut start)?;
    start.truncate(count);
    Ok(if count == 0 {
        Body::Bytes(start)
    } else {
        Body::Reader(Box::new(Cursor::new(start).chain(device)))
    })
}

/// A reader for which "nothing now" is the end.
struct UntilDry<R>(R);

impl<R: Read> Read for UntilDry<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self.0.read(buffer) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(0),
            other => other,
        }
    }
}

/// What a Range header comes to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Range {
    /// Nothing that is understood: the whole file is the answer (RFC 9110 section 14.2).
    None,
    Satisfiable(Span),
    Unsatisfiable,
}

/// The range that a request asks for in its header. Only GET has ranges; and one that is wanted only
/// of a certain version is not, because versions have no tags here (RFC 9110 sections 13.1.5, 14.2).
fn range_header(request: &Request<'_>, size: u64) -> Option<Range> {
    let head = &request.head;
    let header = head.header("range")?;
    (head.method == "GET" && head.header("if-range").is_none()).then(|| byte_range(header, size))
}

pub(super) fn byte_range(header: &[u8], size: u64) -> Range {
    let parse = || -> Option<Range> {
        let set = std::str::from_utf8(header).ok()?.strip_prefix("bytes=")?;
        let (first, last) = set.trim().split_once('-')?;
        let number = |text: &str| -> Option<u64> {
            if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            // Beyond any size there can be: the same as the largest.
            Some(text.parse().unwrap_or(u64::MAX))
        };
        if first.is_empty() {
            let length = number(last)?.min(size);
            return Some(if length == 0 {
                Range::Unsatisfiable
            } else {
                Range::Satisfiable(Span {
                    offset: size - length,
                    length,
                })
            });
        }
        let first = number(first)?;
        let last = if last.is_empty() {
            u64::MAX
        } else {
            number(last)?
        };
        if last < first {
            return None;
        }
        if first >= size {
            return Some(Range::Unsatisfiable);
        }
        Some(Range::Satisfiable(Span {
            offset: first,
            length: last.min(size - 1) - first + 1,
        }))
    };
    parse().unwrap_or(Range::None)
}

/// `PUT files/write`.
pub(super) fn write(request: &mut Request<'_>, workspace: &Workspace, query: &Query) -> Answer {
    require_body(request)?;
    let path = path(query, "path")?;
    let offset = query.number("offset")?;
    let truncate_to = query.number("truncate_to")?;
    let mode = query.mode("mode")?;
    let make_parents = query.optional_flag("mkdir")?.unwrap_or(true);
    let files = workspace.files()?;
    let size = match offset {
        None if truncate_to.is_some() => {
            return Err(invalid(
                "truncate_to goes with offset: without one the body is the whole file",
            ));
        }
        None => {
            let mut upload = files.upload(&path, mode, make_parents)?;
            let mut client = request.body.watch_client();
            let is_spliced = upload.lands();
            each_piece(request, is_spliced, |piece| match piece {
                Piece::Spliced(conduit, count) => Ok(upload.pour(conduit, count)?),
                Piece::Read(mut bytes) => {
                    while !bytes.is_empty() {
                        match upload.write(bytes)? {
                            0 => wait_for_room(&upload, &mut client)?,
                            count => bytes = &bytes[count..],
                        }
                    }
                    Ok(())
                }
            })?;
            upload.commit()?
        }
        Some(offset) => {
            let end = offset.checked_add(request.body.remaining().unwrap_or(0));
            if end.is_none_or(|end| i64::try_from(end).is_err()) {
                return Err(invalid(
                    "offset and the body's length together are larger than any file",
                ));
            }
            let mut range = files.write_range(&path, offset, truncate_to, mode, make_parents)?;
            each_piece(request, true, |piece| match piece {
                Piece::Spliced(conduit, count) => Ok(range.pour(conduit, count)?),
                Piece::Read(bytes) => Ok(range.write(bytes)?),
            })?;
            range.commit()?
        }
    };
    Ok(Response::json(
        &json!({ "path": path.to_string(), "size": size }),
    ))
}

/// Waits until a pipe takes more, as long as the client is there.
fn wait_for_room(upload: &Upload<'_>, client: &mut ClientWatch) -> Result<(), Refusal> {
    let mut entries = [
        PollEntry::new(upload.descriptor(), Events::WRITABLE),
        PollEntry::new(client.descriptor(), client.interest()),
    ];
    if !poll(&mut entries, Some(PIPE_PATIENCE)) {
        return Err(upload.unread().into());
    }
    let found = entries[1].events();
    client
        .ready(found)
        .map_err(|Disconnected| received(ReceiveError::Closed))
}

/// A part of an upload that has come.
enum Piece<'a> {
    /// It was read.
    Read(&'a [u8]),
    /// So many bytes of it are in a conduit.
    Spliced(&'a mut Conduit, usize),
}

fn each_piece(
    request: &mut Request<'_>,
    is_spliced: bool,
    mut take: impl FnMut(Piece<'_>) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    let body = &mut request.body;
    let mut conduit = body
        .remaining()
        .filter(|expected| is_spliced && *expected >= SPLICED_BYTES)
        .and_then(|_| Conduit::new());
    let mut buffer = Vec::new();
    loop {
        if let Some(conduit) = &mut conduit
            && let Some(count) = body.splice(conduit.entrance()).map_err(received)?
        {
            take(Piece::Spliced(conduit, count))?;
            continue;
        }
        if buffer.is_empty() {
            let expected = body.remaining().and_then(|left| usize::try_from(left).ok());
            let most = match conduit {
                Some(_) => FIRST_BYTES,
                None => UPLOAD_BYTES,
            };
            buffer = vec![0; expected.unwrap_or(most).clamp(1, most)];
        }
        match body.read(&mut buffer).map_err(received)? {
            0 => return Ok(()),
            count => take(Piece::Read(&buffer[..count]))?,
        }
    }
}

/// `GET files/list`.
pub(super) fn list(workspace: &Workspace, query: &Query) -> Answer {
    let path = path(query, "path")?;
    let limit = query.number("limit")?.unwrap_or(PAGE_ENTRIES);
    if !(1..=MAX_PAGE_ENTRIES).contains(&limit) {
        return Err(invalid(&format!(
            "limit={limit}: not accepted; it takes 1 to {MAX_PAGE_ENTRIES}"
        )));
    }
    let detail = detail(query)?;
    // A cursor is a name as it was shown, and goes through the same reading as a path.
    let after = query
        .value("after")?
        .filter(|after| !after.is_empty())
        .map(FilePath::new)
        .transpose()?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let page = workspace
        .files()?
        .list(&path, after.as_ref().map(FilePath::bytes), limit)?;
    let body = Body::Reader(Box::new(PageDocument::new(page, path, detail)));
    Ok(Response::new(200, body).with_header("Content-Type", "application/json"))
}

/// `GET files/stat`.
pub(super) fn stat(workspace: &Workspace, query: &Query) -> Answer {
    let (path, detail) = (path(query, "path")?, detail(query)?);
    let entry = workspace.files()?.stat(&path)?;
    let document = EntryDocument::of(&entry, path.to_string(), detail);
    Ok(Response::json(&document))
}

/// `DELETE files/delete`.
pub(super) fn delete(workspace: &Workspace, query: &Query) -> Answer {
    let recursive = query.flag("recursive")?;
    workspace
        .files()?
        .remove(&path(query, "path")?, recursive)?;
    Ok(Response::json(&json!({ "deleted": true })))
}

/// `POST files/mkdir`.
pub(super) fn make_directory(workspace: &Workspace, query: &Query) -> Answer {
    let mode = query.mode("mode")?;
    let path = path(query, "path")?;
    workspace.files()?.make_directory(&path, mode)?;
    Ok(Response::json(&json!({ "path": path.to_string() })))
}

/// `POST files/move`.
pub(super) fn rename(workspace: &Workspace, query: &Query) -> Answer {
    let (from, to) = (path(query, "from")?, path(query, "to")?);
    workspace.files()?.rename(&from, &to)?;
    Ok(Response::json(&json!({ "path": to.to_string() })))
}

fn path(query: &Query, name: &str) -> Result<FilePath, Refusal> {
    let value = query
        .value(name)?
        .ok_or_else(|| invalid(&format!("the parameter {name} is missing")))?;
    Ok(FilePath::new(value)?)
}

fn detail(query: &Query) -> Result<bool, Refusal> {
    Ok(query.choice("detail", &[("full", true)])?.unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_as_the_standard_has_them() {
        let part = |offset, length| Range::Satisfiable(Span { offset, length });
        for (header, expected) in [
            ("bytes=0-0", part(0, 1)),
            ("bytes=2-5", part(2, 4)),
            ("bytes=2-", part(2, 8)),
            ("bytes=-3", part(7, 3)),
            ("bytes=-30", part(0, 10)),
            ("bytes=5-99999999999999999999999", part(5, 5)),
            ("bytes=9-9", part(9, 1)),
            ("bytes=10-", Range::Unsatisfiable),
            ("bytes=99999999999999999999-", Range::Unsatisfiable),
            ("bytes=-0", Range::Unsatisfiable),
            ("bytes=5-2", Range::None),
            ("bytes=0-1,3-4", Range::None),
            ("bytes=a-b", Range::None),
            ("bytes=-", Range::None),
            ("bytes=+1-2", Range::None),
            ("lines=1-2", Range::None),
            ("", Range::None),
        ] {
            assert_eq!(byte_range(header.as_bytes(), 10), expected, "{header}");
        }
        assert_eq!(byte_range(b"bytes=0-", 0), Range::Unsatisfiable);
    }
}
