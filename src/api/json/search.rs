//! Searches in JSON: what to search for, and what was found.

use std::io::Write;

use serde_json::json;

use super::file::EntryDocument;
use super::list::ListDocument;
use crate::api::json::optional_path;
use crate::codec::escape;
use crate::codec::fields::{Fields, JsonType, decoded, strings};
use crate::error::{Error, Result};
use crate::files::name::{FilePath, show};
use crate::files::search::{Case, Matcher, Options};
use crate::http::Response;
use crate::workspace::{Glob, Globbed, Grep, Kinds, Match, SortKey, SortOrder};

/// The words for kinds of files.
pub(in crate::api) const KINDS: [(&str, Kinds); 4] = [
    ("file", Kinds::Files),
    ("dir", Kinds::Directories),
    ("link", Kinds::Links),
    ("any", Kinds::Any),
];

/// The words for orders: whether it is that of names.
pub(in crate::api) const SORTS: [(&str, bool); 2] = [("name", true), ("mtime", false)];

/// The order of a search, with the place to continue at: the path of the last entry, after its time and
/// a colon where the order is that of times.
pub(in crate::api) fn order(is_by_name: Option<bool>, after: Option<&[u8]>) -> Result<SortOrder> {
    let after = after.filter(|after| !after.is_empty());
    let path = |text: &[u8]| Ok::<_, Error>(FilePath::new(text)?.bytes().to_vec());
    if is_by_name.unwrap_or(true) {
        return Ok(SortOrder::Name(after.map(path).transpose()?));
    }
    let moment = |text: &[u8]| {
        let colon = text.iter().position(|byte| *byte == b':');
        let (time, shown) = colon.map(|colon| (&text[..colon], &text[colon + 1..]))?;
        let modified = std::str::from_utf8(time).ok()?.parse().ok()?;
        let path = path(shown).ok()?;
        Some(SortKey { modified, path })
    };
    let bad = || Error::invalid("after must be the `next` of an earlier answer with sort=mtime");
    let after = after.map(|text| moment(text).ok_or_else(bad)).transpose()?;
    Ok(SortOrder::Modified(after))
}

/// Reads the arguments of a search by names.
///
/// # Errors
/// `Invalid` if one has a wrong type or value.
pub(in crate::api) fn glob_request(fields: &mut Fields<'_>) -> Result<Glob> {
    let path = fields.string("path")?;
    let patterns = match fields.take("pattern") {
        Some(one) if JsonType::of(one) == JsonType::String => vec![decoded("pattern", one)?],
        Some(list) => strings("pattern", "a pattern, or an array of patterns", list)?,
        None => Vec::new(),
    };
    let is_by_name = fields.choice("sort", &SORTS)?;
    let after = fields.string("after")?;
    Ok(Glob {
        path: optional_path(path.as_deref().map(str::as_bytes))?,
        patterns: Matcher::new(patterns.iter().map(String::as_bytes))?,
        kinds: fields.choice("type", &KINDS)?.unwrap_or_default(),
        all: fields.boolean("all")?.unwrap_or(false),
        limit: fields.whole("limit", 0..=u64::MAX)?,
        order: order(is_by_name, after.as_deref().map(str::as_bytes))?,
    })
}

/// The words for case.
const CASES: [(&str, Case); 3] = [
    ("sensitive", Case::Sensitive),
    ("insensitive", Case::Insensitive),
    ("smart", Case::Smart),
];

/// Reads the body of `files/grep`.
///
/// # Errors
/// `Invalid` if a field is missing, or has a wrong type or value.
pub(in crate::api) fn grep_request(fields: &mut Fields<'_>) -> Result<Grep> {
    let pattern = fields.required_string("pattern")?;
    let path = fields.string("path")?;
    let globs = fields.take("glob");
    let globs = globs.map(|list| strings("glob", "an array of patterns", list));
    let globs = globs.transpose()?.unwrap_or_default();
    let mut flag = |name: &'static str| Ok::<_, Error>(fields.boolean(name)?.unwrap_or(false));
    let (is_literal, is_word, is_multiline, all) = (
        flag("literal")?,
        flag("word")?,
        flag("multiline")?,
        flag("all")?,
    );
    let case = fields.choice("case", &CASES)?.unwrap_or_default();
    let mut number = |name: &'static str| fields.whole(name, 0..=u64::MAX);
    Ok(Grep {
        path: optional_path(path.as_deref().map(str::as_bytes))?,
        pattern,
        options: Options {
            is_literal,
            case,
            is_word,
            is_multiline,
        },
        globs: Matcher::new(globs.iter().map(String::as_bytes))?,
        all,
        context: [number("before")?, number("after")?],
        limit: number("limit")?,
        per_file: number("per_file")?,
        max_file_bytes: number("max_file_bytes")?,
    })
}

/// Most characters of a line of a match.
const MAX_LINE_CHARACTERS: usize = 2000;

/// Characters before a match that are kept of a longer line.
const KEPT_BEFORE: usize = 500;

/// Appends the members of a match.
///
/// # Errors
/// Those of `out`.
pub(in crate::api) fn append_match(out: &mut Vec<u8>, found: &Match<'_>) -> std::io::Result<()> {
    let shown = Shown::of(found);
    out.extend_from_slice(b"\"path\":\"");
    escape::append(out, found.path.as_bytes());
    write!(
        out,
        "\",\"line\":{},\"offset\":{},\"text\":\"",
        found.line, shown.offset
    )?;
    escape::append(out, shown.text.as_bytes());
    out.extend_from_slice(b"\",\"spans\":");
    serde_json::to_writer(&mut *out, &shown.spans)?;
    let mut is_context_cut = false;
    for (name, lines) in ["before", "after"].iter().zip(&found.context) {
        write!(out, ",\"{name}\":[")?;
        for (number, line) in lines.iter().enumerate() {
            out.extend_from_slice(if number == 0 { b"\"" } else { b",\"" });
            is_context_cut |= !is_short(line);
            let line = &line[..line.len().min(4 * MAX_LINE_CHARACTERS)];
            let text: String = String::from_utf8_lossy(line)
                .chars()
                .take(MAX_LINE_CHARACTERS)
                .collect();
            escape::append(out, text.as_bytes());
            out.push(b'"');
        }
        out.push(b']');
    }
    if shown.is_cut {
        out.extend_from_slice(b",\"cut\":true");
    }
    if is_context_cut {
        out.extend_from_slice(b",\"context_cut\":true");
    }
    Ok(())
}

/// Whether all of a text is shown.
fn is_short(text: &[u8]) -> bool {
    text.len() <= MAX_LINE_CHARACTERS
        || text.len() <= 4 * MAX_LINE_CHARACTERS
            && String::from_utf8_lossy(text).chars().count() <= MAX_LINE_CHARACTERS
}

/// The text of a match as it is shown.
struct Shown {
    text: String,
    /// Characters of the text.
    spans: Vec<[usize; 2]>,
    /// Where the text begins in the file, in bytes.
    offset: u64,
    is_cut: bool,
}

impl Shown {
    fn of(found: &Match<'_>) -> Self {
        let is_cut = !is_short(found.text);
        let mut start = 0;
        if is_cut {
            let first = found.spans.first().map_or(0, |span| span.start);
            start = first.saturating_sub(KEPT_BEFORE);
            // Not within a character.
            start += found.text[start..]
                .iter()
                .take(3)
                .take_while(|byte| **byte & 0xc0 == 0x80)
                .count();
        }
        let window = &found.text[start..];
        let window = &window[..window.len().min(4 * MAX_LINE_CHARACTERS)];
        let (mut spans, mut at, mut characters) = (Vec::new(), 0, 0);
        for span in found.spans {
            let mut place = |byte: usize| {
                let byte = byte.saturating_sub(start).min(window.len());
                characters += String::from_utf8_lossy(&window[at..byte]).chars().count();
                at = byte;
                characters.min(MAX_LINE_CHARACTERS)
            };
            let ends = [place(span.start), place(span.end)];
            if ends[0] < ends[1] {
                spans.push(ends);
            }
        }
        Self {
            text: String::from_utf8_lossy(window)
                .chars()
                .take(MAX_LINE_CHARACTERS)
                .collect(),
            spans,
            offset: found.offset + start as u64,
            is_cut,
        }
    }
}

/// Where a search by names goes on; `None` if there is no more.
pub(in crate::api) fn next_of_glob(found: &Globbed, is_by_name: bool) -> Option<String> {
    let last = found.entries.last().filter(|_| found.has_more)?;
    let shown = show(&last.moment.path);
    Some(if is_by_name {
        shown
    } else {
        format!("{}:{shown}", last.moment.modified)
    })
}

/// What a search by names found: `{"entries": [...], "next": ...}`.
pub(in crate::api) fn glob_response(found: Globbed, path: FilePath, is_by_name: bool) -> Response {
    let next = next_of_glob(&found, is_by_name);
    let tail = format!("],\"next\":{}}}\n", json!(next)).into_bytes();
    let Globbed {
        entries, charge, ..
    } = found;
    let mut entries = entries.into_iter();
    let append_next = move |out: &mut Vec<u8>| {
        let Some(found) = entries.next() else {
            return Ok(false);
        };
        let path = path.below(&show(&found.moment.path));
        serde_json::to_writer(out, &EntryDocument::of(&found.entry, path, false)).map(|()| true)
    };
    ListDocument::new(b"{\"entries\":[", append_next, tail)
        .respond()
        .holding(charge)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::json::parsed;

    fn shown(text: &[u8], spans: &[std::ops::Range<usize>]) -> Shown {
        Shown::of(&Match {
            path: "x",
            line: 1,
            offset: 10,
            text,
            spans,
            context: [Vec::new(), Vec::new()],
        })
    }

    #[test]
    fn spans_are_in_characters_and_long_lines_are_cut_around_the_match() {
        let short = shown("\u{e9}\u{20ac}x\u{1f600}y".as_bytes(), &[2..6, 10..11]);
        assert_eq!(
            (short.spans, short.offset, short.is_cut),
            (vec![[1, 3], [4, 5]], 10, false)
        );
        let broken = shown(b"\xffa\xff", &[1..2, 2..3]);
        assert_eq!(
            (broken.text.as_str(), broken.spans),
            ("\u{fffd}a\u{fffd}", vec![[1, 2], [2, 3]])
        );
        let long = "\u{e9}".repeat(5000) + "here" + &"\u{e9}".repeat(5000);
        let cut = shown(long.as_bytes(), &[10_000..10_004, 10_004..20_004]);
        assert!(cut.is_cut);
        let [from, to] = cut.spans[0];
        let text: String = cut.text.chars().skip(from).take(to - from).collect();
        assert_eq!(
            (text.as_str(), cut.text.chars().count()),
            ("here", MAX_LINE_CHARACTERS)
        );
        assert_eq!(cut.spans[1], [to, MAX_LINE_CHARACTERS]);
        assert!(
            long.as_bytes()[usize::try_from(cut.offset).unwrap() - 10..]
                .starts_with(cut.text.as_bytes())
        );
        assert!(!shown(&"\u{e9}".repeat(2000).into_bytes(), &[]).is_cut);
    }

    #[test]
    fn a_search_is_read_from_json() {
        let body = json!({"pattern": "x", "glob": ["*.rs", "!b"], "case": "smart", "before": 2, "limit": 5});
        let grep = parsed(body.to_string().as_bytes(), grep_request).unwrap();
        assert_eq!(
            (grep.pattern.as_str(), grep.context, grep.limit),
            ("x", [Some(2), None], Some(5))
        );
        assert_eq!(grep.options.case, Case::Smart);
        for (body, named) in [
            (json!({}), "pattern"),
            (json!({"pattern": 1}), "pattern"),
            (json!({"pattern": "x", "glob": "x"}), "glob"),
            (json!({"pattern": "x", "glob": [1]}), "glob"),
            (json!({"pattern": "x", "glob": ["["]}), "["),
            (json!({"pattern": "x", "case": "any"}), "case"),
            (json!({"pattern": "x", "word": 1}), "word"),
            (json!({"pattern": "x", "limit": -1}), "limit"),
            (json!({"pattern": "x", "path": ""}), "path"),
        ] {
            let Err(error) = parsed(body.to_string().as_bytes(), grep_request) else {
                panic!("{body}")
            };
            assert!(error.to_string().contains(named), "{error}");
        }
    }
}
