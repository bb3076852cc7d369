//! Edits of text files in JSON.

use std::borrow::Cow;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::codec::fields::{Elements, Fields, JsonType, decoded, wrong_type};
use crate::error::{Error, Result};
use crate::files::hash::Digest;
use crate::files::name::FilePath;
use crate::files::text::{Count, Edit, EditTarget};
use crate::workspace::{EditRequest, Edited, FileChange, Patched};

/// Most edits of a request.
const MAX_EDITS: usize = 1000;

/// The digest that a file must have so that a request changes it.
///
/// # Errors
/// `Invalid` if it is none.
pub(in crate::api) fn expected_digest(fields: &mut Fields<'_>) -> Result<Option<Digest>> {
    let Some(text) = fields.string("if_sha256")? else {
        return Ok(None);
    };
    let wrong = || {
        Error::invalid(format_args!(
            "if_sha256 is {text:?}; it takes 64 hexadecimal digits"
        ))
    };
    Digest::parse(&text).map(Some).ok_or_else(wrong)
}

/// Reads the body of `files/edit`.
///
/// # Errors
/// `Invalid` if a field is missing, or has a wrong type or value.
pub(in crate::api) fn edit_request(fields: &mut Fields<'_>) -> Result<EditRequest> {
    let path = fields.required_string("path")?;
    let list = fields.required("edits", "an array of edits")?;
    if JsonType::of(list) != JsonType::Array {
        return Err(wrong_type("edits", "an array of edits", list));
    }
    let list = decoded::<Elements<'_>>("edits", list)?.0;
    if list.is_empty() || list.len() > MAX_EDITS {
        let count = list.len();
        return Err(Error::invalid(format_args!(
            "edits has {count} edits; it takes 1 to {MAX_EDITS}"
        )));
    }
    let edits = list.iter().enumerate();
    let edits = edits
        .map(|(number, edit)| one_edit(number, edit))
        .collect::<Result<_>>()?;
    let expected = expected_digest(fields)?;
    Ok(EditRequest {
        path: FilePath::new(path.as_bytes())?,
        edits,
        expected_sha256: expected,
        is_dry_run: fields.boolean("dry_run")?.unwrap_or(false),
    })
}

fn one_edit(number: usize, raw: &RawValue) -> Result<Edit> {
    let failed = |error: Error| Error::invalid(format_args!("edits[{number}]: {error}"));
    if JsonType::of(raw) != JsonType::Object {
        return Err(wrong_type(&format!("edits[{number}]"), "an object", raw));
    }
    let mut fields = Fields::parse(raw.get().as_bytes()).map_err(failed)?;
    let mut read = || {
        let (old, lines) = (fields.string("old")?, fields.string("lines")?);
        let count = fields.take("count");
        let place = match (old, lines, count) {
            (Some(old), None, count) => EditTarget::Text {
                old: old.into_bytes(),
                count: count.map_or(Ok(Count::Exactly(1)), count_of)?,
            },
            (None, Some(lines), None) => line_range(&lines)?,
            _ => {
                return Err(Error::invalid(
                    "it takes old and new, with count if you like, or lines and new",
                ));
            }
        };
        let new = fields.required_string("new")?;
        Ok(Edit {
            place,
            new: new.into_bytes(),
        })
    };
    read().map_err(failed)
}

fn count_of(raw: &RawValue) -> Result<Count> {
    let accepted = "a whole number from 1 to 1000000, or \"all\"";
    match raw.get() {
        "\"all\"" => Ok(Count::All),
        text => match text.parse() {
            Ok(count @ 1..=1_000_000) => Ok(Count::Exactly(count)),
            _ => Err(Error::invalid(format_args!(
                "count is {raw}; it takes {accepted}"
            ))),
        },
    }
}

/// `10-12`, or `10` for one line.
fn line_range(text: &str) -> Result<EditTarget> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| {
        let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse()
            .ok()
            .filter(|number| is_plain && *number > 0_u64)
    };
    match (number(first), number(last)) {
        (Some(first), Some(last)) if first <= last => Ok(EditTarget::Lines { first, last }),
        _ => Err(Error::invalid(format_args!(
            "lines is {text:?}; it takes numbers from 1 such as \"10-12\""
        ))),
    }
}

/// What an edit did.
#[derive(Serialize)]
pub(in crate::api) struct EditDocument<'a> {
    path: String,
    replaced: usize,
    size: u64,
    sha256: String,
    diff: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    diff_truncated: Option<bool>,
}

impl<'a> EditDocument<'a> {
    /// Describes an edit of the file `path`.
    pub(in crate::api) fn of(path: &FilePath, edited: &'a Edited) -> Self {
        Self {
            path: path.to_string(),
            replaced: edited.replaced,
            size: edited.size,
            sha256: edited.sha256.to_string(),
            diff: String::from_utf8_lossy(&edited.diff),
            diff_truncated: edited.diff_is_cut.then_some(true),
        }
    }
}

/// What a patch did.
#[derive(Serialize)]
pub(in crate::api) struct PatchDocument<'a> {
    files: Vec<PatchedDocument<'a>>,
}

impl<'a> PatchDocument<'a> {
    /// Describes what was done to these files.
    pub(in crate::api) fn of(patched: &'a [Patched]) -> Self {
        let files = patched.iter().map(PatchedDocument::of).collect();
        Self { files }
    }
}

/// What it did to a file.
#[derive(Serialize)]
struct PatchedDocument<'a> {
    path: &'a str,
    change: &'static str,
    hunks: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    moved: Option<&'a [i64]>,
}

impl<'a> PatchedDocument<'a> {
    fn of(patched: &'a Patched) -> Self {
        let is_moved = patched.moved.iter().any(|lines| *lines != 0);
        Self {
            path: &patched.path,
            change: match patched.change {
                FileChange::Created => "created",
                FileChange::Modified => "modified",
                FileChange::Deleted => "deleted",
                FileChange::Renamed => "renamed",
                FileChange::Copied => "copied",
            },
            hunks: patched.moved.len(),
            from: patched.from.as_deref(),
            moved: is_moved.then_some(&patched.moved),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::json::parsed;

    #[test]
    fn edits_are_read_from_json() {
        let sha256 = "ab".repeat(32);
        let body = json!({"path": "a", "edits": [
            {"old": "x", "new": "y"}, {"old": "x", "new": "", "count": "all"}, {"old": "x", "new": "", "count": 3},
            {"lines": "10-12", "new": "z"}, {"lines": "7", "new": ""},
        ], "if_sha256": sha256, "dry_run": true});
        let request = parsed(body.to_string().as_bytes(), edit_request).unwrap();
        let text = |count| EditTarget::Text {
            old: b"x".to_vec(),
            count,
        };
        let places: Vec<_> = request
            .edits
            .iter()
            .map(|edit| edit.place.clone())
            .collect();
        assert_eq!(
            places,
            [
                text(Count::Exactly(1)),
                text(Count::All),
                text(Count::Exactly(3)),
                EditTarget::Lines {
                    first: 10,
                    last: 12
                },
                EditTarget::Lines { first: 7, last: 7 },
            ]
        );
        assert_eq!(request.expected_sha256, Digest::parse(&sha256));
        assert!(request.is_dry_run);
    }

    #[test]
    fn a_wrong_edit_is_named() {
        let edit = json!({"old": "x", "new": "y"});
        for (body, named) in [
            (json!({"edits": [edit]}), "path"),
            (json!({"path": "a"}), "edits"),
            (json!({"path": "a", "edits": []}), "edits"),
            (json!({"path": "a", "edits": "x"}), "edits"),
            (json!({"path": "a", "edits": [edit, 7]}), "edits[1]"),
            (json!({"path": "a", "edits": [{"old": "x"}]}), "new"),
            (json!({"path": "a", "edits": [{"new": "x"}]}), "old and new"),
            (
                json!({"path": "a", "edits": [{"old": "x", "lines": "1", "new": "x"}]}),
                "old and new",
            ),
            (
                json!({"path": "a", "edits": [{"lines": "1", "count": 1, "new": "x"}]}),
                "old and new",
            ),
            (
                json!({"path": "a", "edits": [{"lines": "0", "new": "x"}]}),
                "lines",
            ),
            (
                json!({"path": "a", "edits": [{"lines": "3-2", "new": "x"}]}),
                "lines",
            ),
            (
                json!({"path": "a", "edits": [{"lines": "+1", "new": "x"}]}),
                "lines",
            ),
            (
                json!({"path": "a", "edits": [{"old": "x", "new": "y", "count": 0}]}),
                "count",
            ),
            (
                json!({"path": "a", "edits": [{"old": "x", "new": "y", "count": "some"}]}),
                "count",
            ),
            (
                json!({"path": "a", "edits": [{"old": 1, "new": "y"}]}),
                "old",
            ),
            (
                json!({"path": "a", "edits": [edit], "if_sha256": "abc"}),
                "if_sha256",
            ),
            (
                json!({"path": "a", "edits": [edit], "dry_run": 1}),
                "dry_run",
            ),
        ] {
            let Err(error) = parsed(body.to_string().as_bytes(), edit_request) else {
                panic!("{body}")
            };
            assert!(error.to_string().contains(named), "{error}");
        }
    }
}
