//! Searches: queries and JSON to typed operations, what was found to documents and events.

use super::call::{Answer, Call};
use super::documents::glob_response;
use super::files::optional_path;
use crate::codec::query::Query;
use crate::error::{Error, Result};
use crate::files::name::FilePath;
use crate::files::search::Matcher;
use crate::workspace::{Glob, Kinds, Moment, Order, Workspace};

/// The words for kinds of files.
const KINDS: [(&str, Kinds); 4] = [
    ("file", Kinds::Files),
    ("dir", Kinds::Directories),
    ("link", Kinds::Links),
    ("any", Kinds::Any),
];

/// `GET files/glob`.
pub(super) fn glob(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let query = &call.query;
    let path = optional_path(query.value("path")?)?;
    let glob = Glob {
        path: path.clone(),
        patterns: Matcher::new(query.values("pattern"))?,
        kinds: query.choice("type", &KINDS)?.unwrap_or_default(),
        all: query.flag("all")?,
        limit: query.number("limit")?,
        order: order(query)?,
    };
    let is_by_name = matches!(glob.order, Order::Name(_));
    let mut client = call.request.body.watch_client();
    let found = workspace.glob(glob, &mut client)?;
    Ok(glob_response(found, path, is_by_name))
}

/// The order of a search, with the place to continue at: the path of the last entry, after its time and
/// a colon where the order is that of times.
fn order(query: &Query) -> Result<Order> {
    let sort = [("name", true), ("mtime", false)];
    let is_by_name = query.choice("sort", &sort)?.unwrap_or(true);
    let after = query.value("after")?.filter(|after| !after.is_empty());
    let path = |text: &[u8]| Ok::<_, Error>(FilePath::new(text)?.bytes().to_vec());
    if is_by_name {
        return Ok(Order::Name(after.map(path).transpose()?));
    }
    let moment = |text: &[u8]| {
        let colon = text.iter().position(|byte| *byte == b':');
        let (time, shown) = colon.map(|colon| (&text[..colon], &text[colon + 1..]))?;
        let modified = std::str::from_utf8(time).ok()?.parse().ok()?;
        let path = path(shown).ok()?;
        Some(Moment { modified, path })
    };
    let bad = || Error::invalid("after is not what next said in an answer with sort=mtime");
    let after = after.map(|text| moment(text).ok_or_else(bad)).transpose()?;
    Ok(Order::Modified(after))
}
