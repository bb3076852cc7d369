//! Watches in JSON.

use crate::codec::fields::{Fields, strings};
use crate::error::Result;
use crate::files::name::FilePath;
use crate::files::search::Matcher;
use crate::files::watch::Settings;

/// Reads the body of a request for a watch, and the id that the client chose.
///
/// # Errors
/// `Invalid` if a field has a wrong type or value.
pub(in crate::api) fn watch_request(fields: &mut Fields<'_>) -> Result<(Settings, Option<String>)> {
    let path = fields.required_string("path")?;
    let patterns = fields.take("exclude");
    let patterns = patterns.map(|list| strings("exclude", "a list of patterns", list));
    let patterns = patterns.transpose()?.unwrap_or_default();
    let settings = Settings {
        path: FilePath::new(path.as_bytes())?,
        recursive: fields.boolean("recursive")?.unwrap_or(false),
        exclude: Matcher::new(patterns.iter().map(String::as_bytes))?,
    };
    Ok((settings, fields.string("id")?))
}
