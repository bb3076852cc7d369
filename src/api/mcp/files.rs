//! Tools for files.

use std::fmt::Write;
use std::io::Read;

use serde_json::Value;
use serde_json::value::RawValue;

use super::calls::{Image, Outcome, Room, ToolCall, ToolResult, fields, to_value};
use crate::api::json::edit::{EditDocument, edit_request, expected_digest};
use crate::api::json::file::EntryDocument;
use crate::api::json::search::{append_match, glob_request, grep_request, next_of_glob};
use crate::client::{Disconnected, Interrupt, Stopped};
use crate::codec::base64;
use crate::codec::fields::Fields;
use crate::codec::object::object;
use crate::error::{Error, Kind, Result};
use crate::files::hash::Hasher;
use crate::files::lines::LineRange;
use crate::files::name::{FilePath, show};
use crate::files::text::is_binary;
use crate::files::{Condition, FileKind, SkipReason, end_of};
use crate::limits::ledger::OverLimit;
use crate::workspace::{
    Content, FilePart, FileWrite, GrepSink, Match, MemorySource, SortOrder, Summary,
};

/// Most bytes of a file in a result.
const MAX_TEXT_BYTES: usize = 256 * 1024;

/// Most bytes of an image in a result.
const MAX_IMAGE_BYTES: u64 = 5 << 20;

/// Most entries of a list.
const MAX_ENTRIES: usize = 1000;

/// The deepest list.
const MAX_DEPTH: u64 = 32;

/// Most bytes of matches in a result, and the files that are named as left out.
const MAX_MATCH_BYTES: usize = 256 * 1024;
const MAX_SKIPPED: usize = 100;

/// Most bytes of a matching line in the text.
const MAX_LINE_BYTES: usize = 300;

/// A path is that of commands.
fn path_of(call: &ToolCall<'_, '_>, fields: &mut Fields<'_>) -> Result<FilePath> {
    let path = FilePath::new(fields.required_string("path")?.as_bytes())?;
    call.workspace.view().file(path)
}

/// A text, or some of its lines, or an image.
pub(super) fn read(call: &mut ToolCall<'_, '_>, arguments: &RawValue) -> Outcome {
    let mut fields = fields(arguments)?;
    let path = path_of(call, &mut fields)?;
    let accepted = |text: &str| {
        Error::invalid(format_args!(
            "lines is {text:?}; it takes lines from 1, as 10-20, 10- or 10"
        ))
    };
    let asked = fields.string("lines")?;
    let range = asked.map(|text| LineRange::parse(&text).ok_or_else(|| accepted(&text)));
    let is_whole = range.is_none();
    let all = LineRange {
        first: 1,
        last: u64::MAX,
    };
    let range = range.transpose()?.unwrap_or(all);
    let readable = call.workspace.open_file(path.clone(), false)?;
    let size = readable.size();
    // The bytes, and the text twice, in which an invalid byte has three.
    let held = usize::try_from(size.unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
    call.reserve(7 * held.min(MAX_TEXT_BYTES))?;
    let (found, content) = readable.lines(range, call.workspace, call.client)?;
    let mut bytes = start_of(content, MAX_TEXT_BYTES + 1).map_err(|error| failed(&path, &error))?;
    if is_binary(&bytes) {
        return read_image(call, &path, &bytes).map_err(Stopped::from);
    }
    let first = found.lines.map_or(range.first, |lines| lines.first);
    let is_cut = bytes.len() > MAX_TEXT_BYTES;
    if is_cut {
        // Whole lines, unless there is only one.
        bytes.truncate(MAX_TEXT_BYTES);
        let end = memchr::memrchr(b'\n', &bytes).map_or(bytes.len(), |end| end + 1);
        bytes.truncate(end);
    }
    let lines = bytes.split_inclusive(|byte| *byte == b'\n').count() as u64;
    let shown = if lines == 0 {
        format!("*/{}", found.total)
    } else {
        format!("{first}-{}/{}", first + lines - 1, found.total)
    };
    let mut structured = object! {
        "path": path.to_string(),
        "size": size,
        "lines": shown.as_str(),
        "truncated": is_cut,
    };
    if is_whole && !is_cut {
        let mut hasher = Hasher::default();
        hasher.feed(&bytes);
        structured["sha256"] = hasher.finish().to_string().into();
    }
    let content = String::from_utf8_lossy(&bytes);
    if matches!(content, std::borrow::Cow::Owned(_)) {
        structured["lossy"] = true.into();
    }
    structured["content"] = (*content).into();
    let mut text = content.into_owned();
    if is_cut {
        let _ = write!(
            text,
            "\n[lines {shown}; read_file takes lines for the rest]"
        );
    }
    Ok(ToolResult::new(text, structured))
}

fn failed(path: &FilePath, error: &std::io::Error) -> Error {
    Error::io(format_args!("cannot read {path}"), error)
}

/// At most this many of the first bytes.
fn start_of(content: Content, most: usize) -> std::io::Result<Vec<u8>> {
    let (mut bytes, mut source): (_, Box<dyn Read>) = match content {
        Content::Bytes(bytes) => (bytes, Box::new(std::io::empty())),
        Content::File { file, start, .. } => (start, Box::new(file)),
        Content::Reader(reader) => (Vec::new(), reader),
    };
    let room = most.saturating_sub(bytes.len()) as u64;
    source.as_mut().take(room).read_to_end(&mut bytes)?;
    bytes.truncate(most);
    Ok(bytes)
}

/// The image that a binary file is.
fn read_image(call: &mut ToolCall<'_, '_>, path: &FilePath, start: &[u8]) -> Result<ToolResult> {
    let Some(media_type) = media_type(start) else {
        let text = format!(
            "cannot read {path}: it is binary; run a command such as file, xxd or strings on it"
        );
        return Err(Error::new(Kind::Binary, text));
    };
    let readable = call.workspace.open_file(path.clone(), false)?;
    let size = readable.size().unwrap_or(0);
    if size > MAX_IMAGE_BYTES {
        let text = format!(
            "cannot show {path}: the image has {size} bytes, and at most {MAX_IMAGE_BYTES} are shown"
        );
        return Err(Error::new(Kind::TooLarge, text));
    }
    // The file and its Base64; it may grow meanwhile.
    let most = usize::try_from(size).unwrap_or(usize::MAX);
    call.reserve(3 * most)?;
    let content = readable.part(None, None)?;
    let bytes = start_of(content, most).map_err(|error| failed(path, &error))?;
    let structured =
        object! { "path": path.to_string(), "size": bytes.len(), "media_type": media_type };
    let text = format!("{path}: {media_type}, {} bytes", bytes.len());
    Ok(ToolResult::new(text, structured).with_image(Image {
        data: base64::encode(&bytes),
        media_type,
    }))
}

/// The type of an image that models take, by its first bytes.
fn media_type(start: &[u8]) -> Option<&'static str> {
    match start {
        [0x89, b'P', b'N', b'G', ..] => Some("image/png"),
        [0xff, 0xd8, 0xff, ..] => Some("image/jpeg"),
        [b'G', b'I', b'F', b'8', ..] => Some("image/gif"),
        [
            b'R',
            b'I',
            b'F',
            b'F',
            _,
            _,
            _,
            _,
            b'W',
            b'E',
            b'B',
            b'P',
            ..,
        ] => Some("image/webp"),
        _ => None,
    }
}

/// A whole file.
pub(super) fn write(call: &mut ToolCall<'_, '_>, arguments: &RawValue) -> Outcome {
    let mut fields = fields(arguments)?;
    let path = path_of(call, &mut fields)?;
    let content = fields.required_string("content")?;
    let mode = fields.string("mode")?.map(|text| {
        let mode = u32::from_str_radix(&text, 8).ok();
        let is_mode = text.bytes().all(|byte| byte.is_ascii_digit());
        mode.filter(|mode| is_mode && *mode <= 0o7777)
            .ok_or_else(|| {
                Error::invalid(format_args!(
                    "mode is {text:?}; it takes octal permission bits such as \"644\""
                ))
            })
    });
    let expected = expected_digest(&mut fields)?;
    let how = FileWrite {
        part: FilePart::Whole,
        mode: mode.transpose()?,
        makes_parents: true,
        condition: expected.map_or(Condition::Always, Condition::Content),
        is_hashed: true,
        attributes: None,
    };
    let watch = || call.client.watch();
    let mut source = MemorySource::new(content.as_bytes(), &watch);
    let (size, sha256) = call.workspace.write_file(&path, &how, &mut source)?;
    let sha256 = sha256.map(|digest| digest.to_string());
    let structured = object! { "path": path.to_string(), "size": size, "sha256": sha256 };
    Ok(ToolResult::new(
        format!("wrote {size} bytes to {path}"),
        structured,
    ))
}

/// Changes of a file.
pub(super) fn edit(call: &mut ToolCall<'_, '_>, arguments: &RawValue) -> Outcome {
    let mut request = edit_request(&mut fields(arguments)?)?;
    request.path = call.workspace.view().file(request.path)?;
    let edited = call.workspace.edit_file(&request, call.client)?;
    let structured = to_value(&EditDocument::of(&request.path, &edited));
    Ok(ToolResult::new(
        String::from_utf8_lossy(&edited.diff),
        structured,
    ))
}

/// A list that entries are added to.
#[derive(Default)]
struct Entries {
    text: String,
    documents: Vec<Value>,
    /// What they take.
    bytes: usize,
}

/// What an entry takes besides its path, as a value.
const ENTRY_BYTES: usize = 1024;

/// Bytes that are charged at a time.
const STEP_BYTES: usize = 64 * 1024;

impl Entries {
    fn add(
        &mut self,
        call: &mut ToolCall<'_, '_>,
        path: &str,
        document: &EntryDocument,
        kind: FileKind,
    ) -> Result<()> {
        self.bytes += ENTRY_BYTES + 3 * path.len();
        if !call.room.covers(self.bytes) {
            call.reserve(self.bytes + STEP_BYTES)?;
        }
        let mark = match kind {
            FileKind::Directory => "/",
            FileKind::Link => "@",
            _ => "",
        };
        let _ = writeln!(self.text, "{path}{mark}");
        self.documents.push(to_value(document));
        Ok(())
    }

    fn finish(mut self, mut rest: Value, note: Option<String>) -> ToolResult {
        if self.documents.is_empty() {
            self.text.push_str("nothing\n");
        }
        self.text.extend(note);
        rest["entries"] = self.documents.into();
        ToolResult::new(self.text, rest)
    }
}

/// A directory, and those in it.
pub(super) fn list(call: &mut ToolCall<'_, '_>, arguments: &RawValue) -> Outcome {
    let mut fields = fields(arguments)?;
    let path = path_of(call, &mut fields)?;
    let depth = fields.whole("depth", 1..=MAX_DEPTH)?.unwrap_or(1);
    let mut entries = Entries::default();
    let truncated = list_directory(call, &path, "", depth, &mut entries)?;
    let note =
        truncated.then(|| "[there is more; list a directory below, or use glob]\n".to_owned());
    let rest = object! { "path": path.to_string(), "truncated": truncated };
    Ok(entries.finish(rest, note))
}

/// Adds what is in a directory, each directory before what is in it. Returns whether something is left out.
fn list_directory(
    call: &mut ToolCall<'_, '_>,
    directory: &FilePath,
    prefix: &str,
    depth: u64,
    entries: &mut Entries,
) -> std::result::Result<bool, Stopped> {
    call.client.check()?;
    let left = MAX_ENTRIES - entries.documents.len();
    if left == 0 {
        return Ok(true);
    }
    let page = call
        .workspace
        .list_files(directory, None, Some(left as u64), call.client);
    let page = match page {
        // It cannot be read, or is gone by now.
        Err(_) if !prefix.is_empty() => return Ok(false),
        page => page?,
    };
    let mut is_cut = page.after.is_some();
    for entry in page {
        if entries.documents.len() == MAX_ENTRIES {
            return Ok(true);
        }
        let name = show(&entry.name);
        let path = directory.join(&name);
        let shown = format!("{prefix}{name}");
        let below = (entry.kind == FileKind::Directory && depth > 1)
            .then(|| directory.child(&entry.name))
            .transpose()?;
        let document = EntryDocument::of(&entry, path, false);
        entries.add(call, &shown, &document, entry.kind)?;
        if let Some(below) = below {
            is_cut |= list_directory(call, &below, &format!("{shown}/"), depth - 1, entries)?;
        }
    }
    Ok(is_cut)
}

/// Files by their names.
pub(super) fn glob(call: &mut ToolCall<'_, '_>, arguments: &RawValue) -> Outcome {
    let mut glob = glob_request(&mut fields(arguments)?)?;
    glob.path = call.workspace.view().file(glob.path)?;
    if glob.limit.is_some_and(|limit| limit > MAX_ENTRIES as u64) {
        let text = format!("limit is too large; it takes 1 to {MAX_ENTRIES}");
        return Err(Error::invalid(text).into());
    }
    let found = call.workspace.glob(&glob, call.client)?;
    let next = next_of_glob(&found, matches!(glob.order, SortOrder::Name(_)));
    let mut entries = Entries::default();
    for one in &found.entries {
        let shown = show(&one.moment.path);
        let document = EntryDocument::of(&one.entry, glob.path.below(&shown), false);
        entries.add(call, &shown, &document, one.entry.kind)?;
    }
    let note = next
        .as_ref()
        .map(|next| format!("[there is more after {next}]\n"));
    Ok(entries.finish(object! { "next": next }, note))
}

/// Lines by what is in them.
pub(super) fn grep(call: &mut ToolCall<'_, '_>, arguments: &RawValue) -> Outcome {
    let mut request = grep_request(&mut fields(arguments)?)?;
    request.path = call.workspace.view().file(request.path)?;
    let mut found = Found {
        interrupt: call.client,
        room: call.room,
        refused: None,
        text: String::new(),
        matches: b"[".to_vec(),
        skipped: Vec::new(),
        is_full: false,
    };
    let searched = call.workspace.search_text(request, &mut found);
    let is_full = found.is_full;
    let Found {
        mut text,
        mut matches,
        skipped,
        refused,
        ..
    } = found;
    if let Some(refused) = refused {
        return Err(Error::from(refused).into());
    }
    let summary = match searched {
        Ok(summary) => Some(summary),
        Err(Stopped::Disconnected) if is_full => None,
        Err(stopped) => return Err(stopped),
    };
    matches.push(b']');
    // As values they take several times as much.
    call.reserve(text.capacity() + 16 * matches.len())?;
    let matches: Value = serde_json::from_slice(&matches).unwrap_or_default();
    let truncated = summary.is_none_or(|summary| summary.truncated);
    if text.is_empty() {
        text.push_str("no match\n");
    }
    if truncated {
        text.push_str("[there are more matches; search for less, or in fewer files]\n");
    }
    let mut structured = object! {
        "matches": matches,
        "skipped": skipped,
        "truncated": truncated,
    };
    if let Some(Summary {
        files,
        searched,
        skipped,
        ..
    }) = summary
    {
        structured["files"] = files.into();
        structured["searched"] = searched.into();
        structured["skipped_total"] = skipped.into();
    }
    Ok(ToolResult::new(text, structured))
}

/// What a search has found so far.
struct Found<'a> {
    interrupt: &'a mut dyn Interrupt,
    room: &'a mut Room,
    /// Why no more was taken.
    refused: Option<OverLimit>,
    text: String,
    /// A JSON array that has not ended.
    matches: Vec<u8>,
    skipped: Vec<Value>,
    /// No more was taken.
    is_full: bool,
}

impl GrepSink for Found<'_> {
    fn matched(&mut self, found: &Match<'_>) -> std::result::Result<(), Disconnected> {
        if self.matches.len() > MAX_MATCH_BYTES {
            self.is_full = true;
            return Err(Disconnected);
        }
        if self.matches.len() > 1 {
            self.matches.push(b',');
        }
        self.matches.push(b'{');
        // Writing to memory does not fail.
        let _ = append_match(&mut self.matches, found);
        self.matches.push(b'}');
        let line = &found.text[..found.text.len().min(MAX_LINE_BYTES)];
        let line = String::from_utf8_lossy(line);
        let _ = writeln!(self.text, "{}:{}:{line}", found.path, found.line);
        // A search may take long.
        let held = self.matches.capacity() + self.text.capacity();
        self.refused = self.room.reserve(held).err();
        if self.refused.is_some() {
            return Err(Disconnected);
        }
        self.tick()
    }

    fn skipped(&mut self, path: &str, why: SkipReason) -> std::result::Result<(), Disconnected> {
        if self.skipped.len() < MAX_SKIPPED {
            self.skipped
                .push(object! { "path": end_of(path.to_owned()), "reason": why.word() });
        }
        Ok(())
    }

    fn tick(&mut self) -> std::result::Result<(), Disconnected> {
        self.interrupt.check().map_err(|_| Disconnected)
    }

    fn ended(&mut self, _: Result<Summary>) -> std::result::Result<(), Disconnected> {
        Ok(())
    }
}
