//! `/files`: the content of files, in both directions.

use std::os::fd::BorrowedFd;

use serde_json::{Value, json};

use super::access::check_user;
use super::calls::{Answer, Call, ListBody};
use super::entries::METADATA_PREFIX;
use super::errors::{Code, E2bError};
use super::multipart::Multipart;
use super::paths::{ClientPath, Paths};
use crate::api::content::body;
use crate::client::Peer;
use crate::codec::object::object;
use crate::error::Kind;
use crate::files::{Attribute, Condition};
use crate::http::parse::Head;
use crate::http::range::{Range, range_of};
use crate::http::request::BodyReader;
use crate::http::{Body, Response};
use crate::workspace::{FilePart, FileWrite, GunzipSource, Span, UploadSource, Workspace};

/// The headers that carry metadata of an uploaded file begin so.
const METADATA_HEADER: &str = "x-metadata-";

/// Most bytes of the name of an attribute after its prefix (xattr(7)).
const MAX_METADATA_KEY: usize = 246;

/// Most bytes of all metadata of a file.
const MAX_METADATA_BYTES: usize = 4096;

/// Most files of one request.
const MAX_FILES: usize = 10_000;

/// `GET /files`.
pub(super) fn read(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    check_user(workspace, user(call)?.as_deref())?;
    let path = path(call, workspace)?;
    let ClientPath { file, shown } = path.ok_or_else(|| E2bError::invalid("path is missing"))?;
    let readable = workspace.open_file(file.clone(), false).map_err(|error| {
        if error.kind() == Kind::IsDirectory {
            return E2bError::invalid(format_args!("{shown} is a directory"));
        }
        E2bError::from(error).unless_missing(workspace, &file)
    })?;
    let mut response =
        Response::new(200, Body::Empty).with_header("Content-Type", "application/octet-stream");
    let size = readable.size().unwrap_or(0);
    let content = match range_of(&call.request.head, size) {
        Range::None => readable.part(None, None)?,
        Range::Satisfiable { offset, length } => {
            let last = offset + length - 1;
            response =
                response.with_header("Content-Range", format!("bytes {offset}-{last}/{size}"));
            response.status = 206;
            readable.exactly(Span { offset, length })?
        }
        Range::Unsatisfiable => {
            let text = format!("the range begins after the end of {shown} ({size} bytes)");
            return Err(E2bError::invalid(text)
                .with_status(416)
                .with_header("Content-Range", format!("bytes */{size}")));
        }
    };
    response.body = body(content);
    Ok(response)
}

/// `POST /files`.
pub(super) fn write(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    check_user(workspace, user(call)?.as_deref())?;
    let only = path(call, workspace)?;
    let attributes = metadata(&call.request.head)?;
    let metadata = Metadata(&attributes);
    let how = FileWrite {
        part: FilePart::Whole,
        mode: None,
        makes_parents: true,
        condition: Condition::Always,
        is_hashed: false,
        attributes: Some((METADATA_PREFIX, attributes.clone())),
    };
    let ledger = &workspace.ledger;
    let kind = call.request.head.header("content-type").unwrap_or_default();
    let kind = kind.to_vec();
    let is_compressed = is_gzip(&call.request.head)?;
    let mut written = ListBody::new(None, ledger)?;
    let mut count = 0;
    let body = &mut call.request.body;
    if let Some(mut parts) = Multipart::new(&kind, body, ledger)? {
        if is_compressed {
            let text = "Content-Encoding: gzip goes with application/octet-stream only";
            return Err(E2bError::unimplemented(text));
        }
        let paths = Paths::of(workspace);
        while let Some(head) = parts.next()? {
            if head.name != "file" {
                continue;
            }
            if count == MAX_FILES || (only.is_some() && count > 0) {
                let text =
                    format!("the body has more than {count} files; the first {count} were written");
                return Err(E2bError::invalid(text));
            }
            count += 1;
            let named;
            let path = if let Some(path) = &only {
                path
            } else {
                let missing = || E2bError::invalid("a part names no file, and there is no path");
                let name = head.filename.filter(|name| !name.is_empty());
                named = paths.read(name.ok_or_else(missing)?.as_bytes())?;
                &named
            };
            receive(workspace, path, &how, &mut AnySource(&mut parts))?;
            written.push(&metadata.document(path))?;
        }
        return written.respond();
    }
    let path = only.ok_or_else(|| E2bError::invalid("path is missing"))?;
    let mut source = Plain(body);
    if is_compressed {
        let mut source = GunzipSource::new(&mut source, workspace)?;
        receive(workspace, &path, &how, &mut AnySource(&mut source))?;
    } else {
        receive(workspace, &path, &how, &mut AnySource(&mut source))?;
    }
    Ok(Response::json(&json!([metadata.document(&path)])))
}

/// Writes a file. E2B's agent sets its owner, and clients that watch see that.
fn receive(
    workspace: &Workspace,
    path: &ClientPath,
    how: &FileWrite,
    source: &mut AnySource<'_>,
) -> Result<(), E2bError> {
    let mut written = workspace.write_file(&path.file, how, source);
    if let Err(failure) = &written
        && failure.code == Code::PermissionDenied
        && let Some(directory) = path.file.ancestors().next()
        && workspace.make_directory_by_root(&directory)?
    {
        // Without a directory nothing of the source was read.
        written = workspace.write_file(&path.file, how, source);
    }
    written?;
    workspace.renew_owner(&path.file);
    Ok(())
}

/// The path in the query; `None` if there is none.
fn path(call: &Call<'_, '_>, workspace: &Workspace) -> Result<Option<ClientPath>, E2bError> {
    let path = call.query.value("path")?;
    let paths = Paths::of(workspace);
    path.map(|path| paths.read(path)).transpose()
}

/// The account in the query, which is what a signature is for.
pub(super) fn user(call: &Call<'_, '_>) -> Result<Option<String>, E2bError> {
    let name = call.query.value("username")?;
    Ok(name.map(|name| String::from_utf8_lossy(name).into_owned()))
}

fn is_gzip(head: &Head) -> Result<bool, E2bError> {
    let Some(encoding) = head.header("content-encoding") else {
        return Ok(false);
    };
    match encoding.to_ascii_lowercase().as_slice() {
        b"identity" => Ok(false),
        b"gzip" => Ok(true),
        _ => {
            let text = "Content-Encoding takes gzip or identity";
            Err(E2bError::unimplemented(text).with_status(415))
        }
    }
}

/// The metadata in the headers of an upload, as extended attributes.
fn metadata(head: &Head) -> Result<Vec<Attribute>, E2bError> {
    let mut attributes: Vec<Attribute> = Vec::new();
    for (name, value) in head.fields.iter() {
        let name = name.to_ascii_lowercase();
        let Some(key) = name.strip_prefix(METADATA_HEADER) else {
            continue;
        };
        let is_plain = value.iter().all(|byte| (b' '..=b'~').contains(byte));
        if key.is_empty() || key.len() > MAX_METADATA_KEY || !is_plain {
            let text = format!(
                "metadata takes keys of 1 to {MAX_METADATA_KEY} characters, and values of printable ASCII"
            );
            return Err(E2bError::invalid(text));
        }
        let name = format!("{METADATA_PREFIX}{key}");
        attributes.retain(|attribute| attribute.name != name);
        let value = value.to_vec();
        attributes.push(Attribute { name, value });
    }
    let bytes = |attribute: &Attribute| attribute.name.len() + attribute.value.len();
    if attributes.iter().map(bytes).sum::<usize>() > MAX_METADATA_BYTES {
        let text = format!("metadata has more than {MAX_METADATA_BYTES} bytes");
        return Err(E2bError::invalid(text));
    }
    Ok(attributes)
}

/// What was written, in the form of its clients.
struct Metadata<'a>(&'a [Attribute]);

impl Metadata<'_> {
    fn document(&self, path: &ClientPath) -> Value {
        let name = path.shown.rsplit('/').next().unwrap_or_default();
        let mut document = object! { "name": name, "type": "file", "path": path.shown.as_str() };
        if !self.0.is_empty() {
            document["metadata"] = super::entries::metadata_document(self.0);
        }
        document
    }
}

/// A source of any kind: the code that receives files is there once.
struct AnySource<'s>(&'s mut dyn UploadSource<Error = E2bError>);

impl UploadSource for AnySource<'_> {
    type Error = E2bError;

    fn remaining(&self) -> Option<u64> {
        self.0.remaining()
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, E2bError> {
        self.0.read(buffer)
    }

    fn splice(&mut self, pipe: BorrowedFd<'_>) -> Result<Option<usize>, E2bError> {
        self.0.splice(pipe)
    }

    fn client(&self) -> Box<dyn Peer + Send> {
        self.0.client()
    }
}

/// A body that is the content of one file.
pub(super) struct Plain<'b, 'c>(pub(super) &'b mut BodyReader<'c>);

impl UploadSource for Plain<'_, '_> {
    type Error = E2bError;

    fn remaining(&self) -> Option<u64> {
        self.0.remaining()
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, E2bError> {
        Ok(self.0.read(buffer)?)
    }

    fn splice(&mut self, pipe: BorrowedFd<'_>) -> Result<Option<usize>, E2bError> {
        Ok(self.0.splice(pipe)?)
    }

    fn client(&self) -> Box<dyn Peer + Send> {
        Box::new(self.0.watch_client())
    }
}
