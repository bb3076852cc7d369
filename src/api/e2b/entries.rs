//! The unary calls of `filesystem.Filesystem`: what files are, and changes to directories.

use std::sync::Arc;

use nix::unistd::{Gid, Group, Uid, User};
use serde_json::Value;

use super::access::{USUAL_USER, check_user, user_of};
use super::calls::{Call, Document, ListAnswer, ListBody};
use super::errors::E2bError;
use super::paths::{ClientPath, Paths};
use crate::client::Stopped;
use crate::codec::fields::Fields;
use crate::codec::object::{object, object_of};
use crate::codec::time::rfc3339;
use crate::error::Kind;
use crate::files::name::show;
use crate::files::{Attribute, Description, Entry, FileKind};
use crate::spec::account::Names;
use crate::workspace::Workspace;

/// The names of the attributes that hold metadata begin so.
pub(super) const METADATA_PREFIX: &str = "user.e2b.";

/// Most links that lead to each other.
const MAX_LINKS: usize = 8;

/// `Stat`.
pub(super) fn stat(call: &mut Call<'_, '_>, workspace: &Workspace, fields: Fields<'_>) -> Document {
    let path = only_path(call, workspace, fields, "path")?;
    entry(workspace, &path)
}

/// `ListDir`.
pub(super) fn list(
    call: &mut Call<'_, '_>,
    workspace: &Workspace,
    mut fields: Fields<'_>,
) -> ListAnswer {
    let depth = fields.whole("depth", 0..=u32::MAX.into())?;
    let depth = usize::try_from(depth.unwrap_or(0).max(1)).unwrap_or(usize::MAX);
    let path = only_path(call, workspace, fields, "path")?;
    let mut documents = Documents::of(workspace);
    let mut body = ListBody::new(Some("entries"), &workspace.ledger)?;
    let listed = workspace.describe_tree(
        &path.file,
        depth,
        METADATA_PREFIX,
        &mut call.interrupt(),
        |relative, description| {
            let shown = Paths::join(&path.shown, relative);
            body.push(&documents.entry(description, &shown))
        },
    );
    listed.map_err(|failure| failure.unless_missing(workspace, &path.file))?;
    Ok(body)
}

/// `MakeDir`.
pub(super) fn make_directory(
    call: &mut Call<'_, '_>,
    workspace: &Workspace,
    fields: Fields<'_>,
) -> Document {
    let path = only_path(call, workspace, fields, "path")?;
    if let Err(error) = workspace.make_new_directory(&path.file)
        // E2B's agent makes directories as root, for the user.
        && !(error.kind() == Kind::Forbidden && workspace.make_directory_by_root(&path.file)?)
    {
        return Err(error.into());
    }
    entry(workspace, &path)
}

/// `Move`.
pub(super) fn rename(
    call: &mut Call<'_, '_>,
    workspace: &Workspace,
    mut fields: Fields<'_>,
) -> Document {
    let from = fields.string("source")?;
    let to = only_path(call, workspace, fields, "destination")?;
    let missing = || E2bError::invalid("source is missing");
    let from = Paths::of(workspace).read(from.ok_or_else(missing)?.as_bytes())?;
    let moved = workspace.move_file(&from.file, &to.file, &mut call.interrupt());
    moved.map_err(|stopped| E2bError::from(stopped).unless_missing(workspace, &from.file))?;
    entry(workspace, &to)
}

/// `Remove`.
pub(super) fn remove(
    call: &mut Call<'_, '_>,
    workspace: &Workspace,
    fields: Fields<'_>,
) -> Document {
    let path = only_path(call, workspace, fields, "path")?;
    match workspace.delete_file(&path.file, true, &mut call.interrupt()) {
        // Below a file there is nothing, either.
        Err(Stopped::Failed(error))
            if matches!(error.kind(), Kind::NotFound | Kind::NotDirectory) => {}
        removed => removed?,
    }
    Ok(object! {})
}

/// The path in a field, for a caller that may act.
pub(super) fn only_path(
    call: &Call<'_, '_>,
    workspace: &Workspace,
    mut fields: Fields<'_>,
    name: &'static str,
) -> Result<ClientPath, E2bError> {
    check_user(workspace, user_of(call.request)?.as_deref())?;
    let path = fields.string(name)?.unwrap_or_default();
    if path.is_empty() {
        return Err(E2bError::invalid(format_args!("{name} is missing")));
    }
    Paths::of(workspace).read(path.as_bytes())
}

fn entry(workspace: &Workspace, path: &ClientPath) -> Document {
    let description = workspace.describe_file(&path.file, METADATA_PREFIX);
    let description =
        description.map_err(|error| E2bError::from(error).unless_missing(workspace, &path.file))?;
    let shown = match path.shown.trim_end_matches('/') {
        "" => "/",
        shown => shown,
    };
    let entry = Documents::of(workspace).entry(&description, shown);
    Ok(object! { "entry": entry })
}

/// Writes what files are. Names of accounts are looked up once.
pub(super) struct Documents<'w> {
    workspace: &'w Workspace,
    paths: Paths<'w>,
    /// The names of users and of groups, where the sandbox has its own.
    own: Option<Arc<[Names; 2]>>,
    /// Those of the machine, as far as they were asked for.
    users: Names,
    groups: Names,
}

impl<'w> Documents<'w> {
    pub(super) fn of(workspace: &'w Workspace) -> Self {
        let (mut users, mut groups) = (Names::new(), Names::new());
        if let Some(user) = workspace.user() {
            users.insert(user.uid, USUAL_USER.to_owned());
            groups.insert(user.gid, USUAL_USER.to_owned());
        }
        Self {
            workspace,
            paths: Paths::of(workspace),
            own: workspace.names(),
            users,
            groups,
        }
    }

    /// Describes a file that is shown at a path.
    pub(super) fn entry(&mut self, description: &Description, shown: &str) -> Value {
        let Description {
            entry,
            followed,
            attributes,
        } = description;
        let name = shown.rsplit('/').next().unwrap_or_default().to_owned();
        let (target, path) = match followed {
            _ if entry.kind != FileKind::Link => (None, None),
            // Links are followed on a machine only, where commands see the same paths.
            Some((target, path)) => (Some(target.clone()), Some(show(path))),
            None => self.look_along(entry, shown),
        };
        // Of a link, kind and mode are those of its target, as far as it is known.
        let seen = target.as_ref().unwrap_or(entry);
        let mut document = object! {
            "name": name,
            "type": type_of(seen.kind),
            "path": shown,
            "size": seen.size.to_string(),
            "mode": seen.mode,
            "permissions": permissions(seen),
            "owner": self.user(entry.uid),
            "group": self.group(entry.gid),
        };
        if let Some(time) = seen.modified_ms {
            document["modifiedTime"] = rfc3339(time).into();
        }
        if entry.kind == FileKind::Link {
            document["symlinkTarget"] = path.into();
            document["isSymlink"] = true.into();
        }
        if !attributes.is_empty() {
            document["metadata"] = metadata_document(attributes);
        }
        document
    }

    /// Where a link leads that is not followed here: what is there, and its path. It is looked for by names alone, so
    /// it may be known only as a path.
    fn look_along(&self, link: &Entry, shown: &str) -> (Option<Entry>, Option<String>) {
        let mut link = link.clone();
        let mut shown = shown.to_owned();
        for _ in 0..MAX_LINKS {
            let (directory, _) = shown.rsplit_once('/').unwrap_or_default();
            let text = link.target.as_deref().unwrap_or_default();
            let absolute = match text {
                [b'/', ..] => text.to_vec(),
                _ => [directory.as_bytes(), b"/", text].concat(),
            };
            let Ok(path) = self.paths.absolute(&absolute) else {
                return (None, Some(show(text)));
            };
            shown = show(&path);
            let found = self.paths.read(&path).ok();
            let found = found.and_then(|path| self.workspace.stat_file(&path.file).ok());
            match found {
                Some(next) if next.kind == FileKind::Link => link = next,
                found => return (found, Some(shown)),
            }
        }
        (None, Some(shown))
    }

    fn user(&mut self, uid: u32) -> String {
        if let Some(own) = &self.own {
            return name_of(&own[0], uid);
        }
        let look_up = || {
            let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
            user.map_or_else(|| uid.to_string(), |user| user.name)
        };
        self.users.entry(uid).or_insert_with(look_up).clone()
    }

    fn group(&mut self, gid: u32) -> String {
        if let Some(own) = &self.own {
            return name_of(&own[1], gid);
        }
        let look_up = || {
            let group = Group::from_gid(Gid::from_raw(gid)).ok().flatten();
            group.map_or_else(|| gid.to_string(), |group| group.name)
        };
        self.groups.entry(gid).or_insert_with(look_up).clone()
    }
}

/// A number without a name is shown as such.
fn name_of(names: &Names, id: u32) -> String {
    names.get(&id).cloned().unwrap_or_else(|| id.to_string())
}

/// The metadata of a file, by key.
pub(super) fn metadata_document(attributes: &[Attribute]) -> Value {
    let members = attributes.iter().filter_map(|Attribute { name, value }| {
        let key = name.strip_prefix(METADATA_PREFIX)?;
        let value = String::from_utf8_lossy(value).into_owned();
        Some((key.to_owned(), value.into()))
    });
    object_of(members)
}

fn type_of(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Regular => "FILE_TYPE_FILE",
        FileKind::Directory => "FILE_TYPE_DIRECTORY",
        FileKind::Link => "FILE_TYPE_SYMLINK",
        FileKind::Pipe | FileKind::Socket | FileKind::CharacterDevice | FileKind::BlockDevice => {
            "FILE_TYPE_UNSPECIFIED"
        }
    }
}

/// Kind and permissions as ls(1) shows them.
fn permissions(entry: &Entry) -> String {
    let kind = match entry.kind {
        FileKind::Regular => '-',
        FileKind::Directory => 'd',
        FileKind::Link => 'l',
        FileKind::Pipe => 'p',
        FileKind::Socket => 's',
        FileKind::CharacterDevice => 'c',
        FileKind::BlockDevice => 'b',
    };
    let bits = (0..9).map(|bit| {
        let is_set = entry.mode & (0o400 >> bit) != 0;
        let letter = ['r', 'w', 'x'][bit % 3];
        if is_set { letter } else { '-' }
    });
    std::iter::once(kind).chain(bits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_shown_as_ls_shows_them() {
        for (kind, mode, expected) in [
            (FileKind::Regular, 0o644, "-rw-r--r--"),
            (FileKind::Directory, 0o1755, "drwxr-xr-x"),
            (FileKind::Link, 0o777, "lrwxrwxrwx"),
            (FileKind::Pipe, 0, "p---------"),
        ] {
            let entry = Entry {
                kind,
                mode,
                ..Entry::default()
            };
            assert_eq!(permissions(&entry), expected);
        }
    }
}
