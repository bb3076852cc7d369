//! Moving files.

use std::io::{Read, Seek, SeekFrom};

use serde_json::json;

use super::query::Query;
use super::wire::{EntryDocument, PageDocument};
use super::{Answer, invalid, received, require_body};
use crate::error::{Error, Kind};
use crate::files::name::{FilePath, show};
use crate::files::{FileKind, Opened};
use crate::http::{Body, Refusal, Request, Response};
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

/// The part of a file that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    offset: u64,
    length: u64,
}

/// `GET files/read`.
pub(super) fn read(request: &Request<'_>, workspace: &Workspace, query: &Query) -> Answer {
    let path = path(query, "path")?;
    let (offset, length) = (query.number("offset")?, query.number("length")?);
    let mut opened = workspace.root.open(&path)?;
    let failed = |error: std::io::Error| {
        Refusal::from(Error::io(format_args!("cannot read {path}"), &error))
    };
    if opened.kind != FileKind::Regular {
        return read_device(opened, &path, offset, length);
    }
    let size = opened.size;
    let mut status = 200;
    let mut headers = vec![("Accept-Ranges", "bytes".to_owned())];
    let mut span = Span {
        offset: 0,
        length: size,
    };
    if offset.is_some() || length.is_some() {
        let offset = offset.unwrap_or(0);
        span = Span {
            offset,
            length: length.unwrap_or(u64::MAX).min(size.saturating_sub(offset)),
        };
    } else if let Some(range) = request.head.header("range") {
        match byte_range(range, size) {
            Range::None => {}
            Range::Satisfiable(part) => {
                status = 206;
                let last = part.offset + part.length - 1;
                headers.push((
                    "Content-Range",
                    format!("bytes {}-{last}/{size}", part.offset),
                ));
                span = part;
            }
            Range::Unsatisfiable => {
                let text =
                    format!("cannot read {path}: the range begins after its end ({size} bytes)");
                let refusal = Refusal::new(416, "range", text);
                return Err(refusal.with_header("Content-Range", format!("bytes */{size}")));
            }
        }
    }
    if span.offset > 0 {
        opened
            .file
            .seek(SeekFrom::Start(span.offset))
            .map_err(failed)?;
    }
    // A file of size 0 may be one of /proc's, which have no size and yet content.
    let is_whole = status == 200
        && span
            == (Span {
                offset: 0,
                length: size,
            })
        && length.is_none();
    let unsized_length = if is_whole && size == 0 {
        SMALL_FILE_BYTES
    } else {
        span.length
    };
    let body = if unsized_length <= SMALL_FILE_BYTES {
        let mut start = Vec::new();
        (&mut opened.file)
            .take(unsized_length)
            .read_to_end(&mut start)
            .map_err(failed)?;
        if is_whole && size == 0 && start.len() as u64 == SMALL_FILE_BYTES {
            Body::Reader(Box::new(std::io::Cursor::new(start).chain(opened.file)))
        } else if status == 206 && (start.len() as u64) < span.length {
            // It has become shorter since its size was read; the range that was promised is not there.
            Body::File {
                file: opened.file,
                length: span.length,
                start,
            }
        } else {
            Body::Bytes(start)
        }
    } else {
        Body::File {
            file: opened.file,
            length: span.length,
            start: Vec::new(),
        }
    };
    let mut response =
        Response::new(status, body).with_header("Content-Type", "application/octet-stream");
    response.headers.extend(headers);
    Ok(response)
}

/// A device has no end that could be waited for: it is read as far as it gives bytes at once.
fn read_device(
    mut opened: Opened,
    path: &FilePath,
    offset: Option<u64>,
    length: Option<u64>,
) -> Answer {
    let Some(length) = length else {
        let text =
            format!("cannot read {path}: it is a device, which may have no end; give a length");
        return Err(Error::new(Kind::NotRegular, text).into());
    };
    let failed = |error: std::io::Error| {
        Refusal::from(Error::io(format_args!("cannot read {path}"), &error))
    };
    if let Some(offset) = offset {
        opened.file.seek(SeekFrom::Start(offset)).map_err(failed)?;
    }
    let body = Body::Reader(Box::new(UntilDry(opened.file.take(length))));
    Ok(Response::new(200, body).with_header("Content-Type", "application/octet-stream"))
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
enum Range {
    /// Nothing that is understood: the whole file is the answer (RFC 9110 section 14.2).
    None,
    Satisfiable(Span),
    Unsatisfiable,
}

fn byte_range(header: &[u8], size: u64) -> Range {
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
    let root = &workspace.root;
    let size = match offset {
        None if truncate_to.is_some() => {
            return Err(invalid(
                "truncate_to goes with offset: without one the body is the whole file",
            ));
        }
        None => {
            let mut upload = root.upload(&path, mode, make_parents)?;
            each_piece(request, |piece| Ok(upload.write(piece)?))?;
            upload.commit()?
        }
        Some(offset) => {
            let end = offset.checked_add(request.body.remaining().unwrap_or(0));
            if end.is_none_or(|end| i64::try_from(end).is_err()) {
                return Err(invalid(
                    "offset and the body's length together are larger than any file",
                ));
            }
            let mut range = root.write_range(&path, offset, truncate_to, mode, make_parents)?;
            each_piece(request, |piece| Ok(range.write(piece)?))?;
            range.commit()?
        }
    };
    Ok(Response::json(
        &json!({ "path": path.to_string(), "size": size }),
    ))
}

fn each_piece(
    request: &mut Request<'_>,
    mut take: impl FnMut(&[u8]) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    let expected = request
        .body
        .remaining()
        .and_then(|left| usize::try_from(left).ok())
        .unwrap_or(UPLOAD_BYTES);
    let mut buffer = vec![0; expected.clamp(1, UPLOAD_BYTES)];
    loop {
        match request.body.read(&mut buffer).map_err(received)? {
            0 => return Ok(()),
            count => take(&buffer[..count])?,
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
        .root
        .list(&path, after.as_ref().map(FilePath::bytes), limit)?;
    Ok(Response::json(&PageDocument {
        entries: page
            .entries
            .iter()
            .map(|entry| EntryDocument::of(entry, detail))
            .collect(),
        next: page.next.as_deref().map(show),
    }))
}

/// `GET files/stat`.
pub(super) fn stat(workspace: &Workspace, query: &Query) -> Answer {
    let entry = workspace.root.stat(&path(query, "path")?)?;
    Ok(Response::json(&EntryDocument::of(&entry, detail(query)?)))
}

/// `DELETE files/delete`.
pub(super) fn delete(workspace: &Workspace, query: &Query) -> Answer {
    let recursive = query.flag("recursive")?;
    workspace.root.remove(&path(query, "path")?, recursive)?;
    Ok(Response::json(&json!({ "deleted": true })))
}

/// `POST files/mkdir`.
pub(super) fn make_directory(workspace: &Workspace, query: &Query) -> Answer {
    let mode = query.mode("mode")?;
    let path = path(query, "path")?;
    workspace.root.make_directory(&path, mode)?;
    Ok(Response::json(&json!({ "path": path.to_string() })))
}

/// `POST files/move`.
pub(super) fn rename(workspace: &Workspace, query: &Query) -> Answer {
    let (from, to) = (path(query, "from")?, path(query, "to")?);
    workspace.root.rename(&from, &to)?;
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
