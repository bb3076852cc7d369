//! Files, trees and archives in JSON.

use serde::Serialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::list::ListDocument;
use crate::codec::fields::{Elements, Fields, JsonType, decoded, missing, wrong_type};
use crate::error::{Error, Result};
use crate::files::hash::Digest;
use crate::files::name::{FilePath, show};
use crate::files::{Entry, FileKind, Packed, Page, Skipped, Unpacked};
use crate::http::Response;
use crate::workspace::{ClientFile, FileState};

/// Reads the body of a request about several files.
///
/// # Errors
/// `Invalid` if `paths` is no list of paths.
pub(in crate::api) fn paths_request(fields: &mut Fields<'_>) -> Result<Vec<FilePath>> {
    let accepted = "a list of paths";
    let paths = fields.required("paths", accepted)?;
    if JsonType::of(paths) != JsonType::Array {
        return Err(wrong_type("paths", accepted, paths));
    }
    let paths = decoded::<Elements<'_>>("paths", paths)?.0;
    let path = |path: &RawValue| {
        if JsonType::of(path) != JsonType::String {
            return Err(wrong_type("paths", accepted, path));
        }
        FilePath::new(decoded::<String>("paths", path)?.as_bytes())
    };
    paths.into_iter().map(path).collect()
}

/// Reads the body of a request to compare a tree: its path, and the client's files.
///
/// # Errors
/// `Invalid` if a field is missing, or has a wrong type or value.
pub(in crate::api) fn compare_request(
    fields: &mut Fields<'_>,
) -> Result<(FilePath, Vec<ClientFile>)> {
    let tree = fields.required_string("path")?;
    let accepted = "an array of objects";
    let entries = fields.required("entries", accepted)?;
    if JsonType::of(entries) != JsonType::Array {
        return Err(wrong_type("entries", accepted, entries));
    }
    let read = |fields: &mut Fields<'_>| -> Result<_> {
        let path = fields.required_string("path")?;
        let digest = |text: String| {
            let wrong = || Error::invalid("sha256 takes 64 hexadecimal digits");
            Digest::parse(&text).ok_or_else(wrong)
        };
        Ok(ClientFile {
            path: FilePath::new(path.as_bytes())?,
            size: fields
                .whole("size", 0..=u64::MAX)?
                .ok_or_else(|| missing("size", "a number of bytes"))?,
            modified_ms: fields.integer("mtime_ms")?,
            sha256: fields.string("sha256")?.map(digest).transpose()?,
            state: FileState::default(),
        })
    };
    let entries = decoded::<Elements<'_>>("entries", entries)?.0.into_iter();
    let entries = entries.enumerate();
    let files = entries
        .map(|(number, entry)| fields.element("entries", number, entry, read))
        .collect::<Result<_>>()?;
    Ok((FilePath::new(tree.as_bytes())?, files))
}

/// A file or directory. Without detail it has exactly the keys of the clients' own type, whose
/// constructor fails on any other key.
#[derive(Serialize)]
pub(in crate::api) struct EntryDocument {
    name: String,
    path: String,
    #[serde(rename = "type")]
    kind: &'static str,
    size: u64,
    mtime_ms: Option<i64>,
    mode: String,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    detail: Option<Detail>,
    /// If it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::api) sha256: Option<String>,
}

#[derive(Serialize)]
struct Detail {
    name_b64: String,
    uid: u32,
    gid: u32,
    inode: u64,
    nlink: u64,
    kind: &'static str,
    link_target: Option<String>,
}

impl EntryDocument {
    /// Describes an entry. A client can use `path` to name it.
    pub(in crate::api) fn of(entry: &Entry, path: String, detail: bool) -> Self {
        Self {
            name: show(&entry.name),
            path,
            kind: type_word(entry.kind),
            size: entry.size,
            mtime_ms: entry.modified_ms,
            mode: format!("{:o}", entry.mode),
            detail: detail.then(|| Detail {
                name_b64: crate::codec::base64::encode(&entry.name),
                uid: entry.uid,
                gid: entry.gid,
                inode: entry.inode,
                nlink: entry.links,
                kind: match entry.kind {
                    FileKind::Regular => "file",
                    FileKind::Directory => "dir",
                    FileKind::Link => "symlink",
                    FileKind::Pipe => "fifo",
                    FileKind::Socket => "socket",
                    FileKind::CharacterDevice => "char",
                    FileKind::BlockDevice => "block",
                },
                link_target: entry.target.as_deref().map(show),
            }),
            sha256: None,
        }
    }
}

/// The type of a file in clients' words.
pub(in crate::api) fn type_word(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Directory => "dir",
        FileKind::Link => "symlink",
        _ => "file",
    }
}

/// One page of the directory `path`: `{"entries": [...], "next": ...}`.
pub(in crate::api) fn page_response(mut page: Page, path: FilePath, detail: bool) -> Response {
    let next = page.after.as_deref().map(show);
    let tail = format!("],\"next\":{}}}\n", json!(next)).into_bytes();
    let append_next = move |out: &mut Vec<u8>| {
        let Some(entry) = page.next() else {
            return Ok(false);
        };
        let path = path.join(&show(&entry.name));
        serde_json::to_writer(out, &EntryDocument::of(&entry, path, detail)).map(|()| true)
    };
    ListDocument::new(b"{\"entries\":[", append_next, tail).respond()
}

/// What an archive has, or what was made of it.
#[derive(Serialize)]
pub(in crate::api) struct ArchiveDocument {
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    files: u64,
    dirs: u64,
    links: u64,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    changed: Option<u64>,
    skipped: Vec<SkippedDocument>,
    skipped_total: u64,
}

impl ArchiveDocument {
    /// Describes what an archive has.
    pub(in crate::api) fn packed(done: &Packed) -> Self {
        Self {
            path: None,
            files: done.files,
            dirs: done.directories,
            links: done.links,
            bytes: done.bytes,
            changed: Some(done.changed),
            skipped: SkippedDocument::all(&done.skipped),
            skipped_total: done.skipped_total,
        }
    }

    /// Describes what was made of an archive beneath `path`.
    pub(in crate::api) fn unpacked(path: &FilePath, done: &Unpacked) -> Self {
        Self {
            path: Some(path.to_string()),
            files: done.files,
            dirs: done.directories,
            links: done.links,
            bytes: done.bytes,
            changed: None,
            skipped: SkippedDocument::all(&done.skipped),
            skipped_total: done.skipped_total,
        }
    }
}

#[derive(Serialize)]
struct SkippedDocument {
    name: String,
    reason: &'static str,
}

impl SkippedDocument {
    fn all(files: &[Skipped]) -> Vec<Self> {
        let document = |file: &Skipped| Self {
            name: show(&file.name),
            reason: file.reason.word(),
        };
        files.iter().map(document).collect()
    }
}
