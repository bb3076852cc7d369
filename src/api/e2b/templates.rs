//! Templates: which ones there are, and how clients build others.

use super::access::USUAL_USER;
use super::calls::{Answer, Call};
use super::documents::{Size, VERSION, page, page_of, uptime_ms};
use super::errors::E2bError;
use crate::clock::now_ms;
use crate::codec::object::object;
use crate::codec::query::percent_decoded;
use crate::codec::time::rfc3339;
use crate::host::{Host, Snapshot, is_snapshot_id};
use crate::http::Response;
use crate::spec::sandbox::RootChoice;
use crate::sys::proc;

/// The templates that clients ask for unless they choose one. Both are the default.
pub(super) const TEMPLATES: [&str; 2] = ["base", "code-interpreter-v1"];

/// Before the name of a template, where a client asks whether there is one.
const ALIASES: &str = "/templates/aliases/";

/// The build of what nobody has built.
const NO_BUILD: &str = "00000000-0000-0000-0000-000000000000";

/// `GET /templates`: the names that clients may give. `GET /v2/templates` has them in pages.
pub(super) fn list(call: &mut Call<'_, '_>, _: &str) -> Answer {
    let templates = templates(call);
    let all = templates.names().count();
    let has_pages = call.request.head.path.starts_with(b"/v2/");
    let (limit, next) = if has_pages {
        page(&call.query)?
    } else {
        (all, None)
    };
    // The token is how many were on the pages before.
    let before = next.map_or(0, |next| usize::try_from(next).unwrap_or(all));
    let names = templates.names().skip(before).take(limit);
    let documents: Vec<_> = names
        .map(|name| document(call, name, templates.snapshot(name).as_ref()))
        .collect();
    let end = before + documents.len();
    Ok(page_of(&documents, (end < all).then_some(end as u64)))
}

/// A template that has a name, and the snapshot that it is.
fn document(call: &Call<'_, '_>, name: &str, snapshot: Option<&Snapshot>) -> serde_json::Value {
    let size = Size::of_machine(&proc::machine_use());
    let disk = call.context.machine.disk();
    let created = snapshot.map_or_else(
        || now_ms().saturating_sub(uptime_ms(call)),
        |snapshot| snapshot.created_at_ms,
    );
    let created = rfc3339(created.cast_signed());
    object! {
        "templateID": snapshot.map_or(name, |snapshot| &snapshot.id),
        "buildID": snapshot.map_or_else(|| NO_BUILD.to_owned(), |own| build_id(&own.id)),
        "aliases": [name],
        "names": [name],
        "public": true,
        "cpuCount": size.processors,
        "memoryMB": size.memory >> 20,
        "diskSizeMB": disk.map_or(0, |disk| disk.bytes >> 20),
        "envdVersion": VERSION,
        "createdAt": created.as_str(),
        "updatedAt": created.as_str(),
        "createdBy": (),
        "lastSpawnedAt": (),
        "spawnCount": 0,
        "buildCount": 0,
        "buildStatus": "ready",
    }
}

/// The id of the build that has made a snapshot, in the form of clients: a UUID.
pub(super) fn build_id(id: &str) -> String {
    let digits = id.trim_start_matches("s-");
    let part = |from, to| digits.get(from..to).unwrap_or_default();
    let parts = [part(0, 8), part(8, 12), part(12, 16), part(16, 20)];
    format!("{}-{}00000000", parts.join("-"), part(20, 24))
}

/// The snapshot that a build has made; `None` if it is no id of one.
fn snapshot_id(build: &str) -> Option<String> {
    let digits = build.replace('-', "");
    let id = format!("s-{}", digits.get(..24)?);
    (is_snapshot_id(&id) && build_id(&id) == build).then_some(id)
}

/// `GET /templates/{template}/tags`: what there is of a name, as `NAME:TAG`.
pub(super) fn tags(call: &mut Call<'_, '_>, key: &str) -> Answer {
    let key = decoded(key)?;
    let templates = templates(call);
    let name = templates.kept(&key).and_then(|own| own.name);
    let name = plain_name(name.as_deref().unwrap_or(&key));
    let tagged = templates.roots.iter().filter_map(|root| {
        let tag = match root.strip_prefix(&*name)? {
            "" => "default",
            rest => rest.strip_prefix('-').filter(|tag| !tag.is_empty())?,
        };
        let snapshot = templates.kept(root)?;
        Some(object! {
            "tag": tag,
            "buildID": build_id(&snapshot.id),
            "createdAt": rfc3339(snapshot.created_at_ms.cast_signed()).as_str(),
        })
    });
    let tagged: Vec<_> = tagged.collect();
    if tagged.is_empty() {
        return Err(unknown(&key));
    }
    Ok(page_of(&tagged, None))
}

/// `GET /templates/aliases/{name}`: whether a name is that of a template.
pub(super) fn find(call: &mut Call<'_, '_>, _: &str) -> Answer {
    let path = &call.request.head.path;
    let name = path.strip_prefix(ALIASES.as_bytes()).unwrap_or_default();
    let name = String::from_utf8_lossy(&percent_decoded(name)?).into_owned();
    let templates = templates(call);
    if templates.root(&name).is_none() {
        return Err(unknown(&name));
    }
    let id = templates.snapshot(&name).map_or(name, |found| found.id);
    Ok(Response::json(
        &object! { "templateID": id, "public": true },
    ))
}

/// `GET /templates/{template}`.
pub(super) fn describe(call: &mut Call<'_, '_>, key: &str) -> Answer {
    let key = decoded(key)?;
    let templates = templates(call);
    let found = templates.root(&key).ok_or_else(|| unknown(&key))?;
    let snapshot = templates.snapshot(&key);
    let name = match &found {
        RootChoice::Private {
            template: Some(template),
            ..
        } => template,
        _ => &key,
    };
    let mut document = document(call, name, snapshot.as_ref());
    let build = object! {
        "buildID": document["buildID"].clone(),
        "status": "ready",
        "createdAt": document["createdAt"].clone(),
        "updatedAt": document["updatedAt"].clone(),
        "cpuCount": document["cpuCount"].clone(),
        "memoryMB": document["memoryMB"].clone(),
    };
    document["builds"] = [build].into();
    Ok(Response::json(&document))
}

pub(super) fn decoded(text: &str) -> Result<String, E2bError> {
    let decoded = percent_decoded(text.as_bytes())?;
    Ok(String::from_utf8_lossy(&decoded).into_owned())
}

pub(super) fn unknown(name: &str) -> E2bError {
    E2bError::not_found(format_args!("there is no template {name:?}"))
}

/// What clients may name.
#[derive(Default)]
pub(super) struct Templates<'a> {
    /// Those of the operator, each with the template of roots that it means, if it says so: `NAME`, `NAME=TEMPLATE`, or
    /// `*` in place of any name.
    more: &'a [String],
    /// What roots of sandboxes can be made of.
    roots: Vec<String>,
    /// The one of these that a name without one means; `None` for the image that the server runs in.
    default: Option<&'a str>,
    host: Option<&'a Host>,
}

pub(super) fn templates<'a>(call: &Call<'a, '_>) -> Templates<'a> {
    let machine = &call.context.machine;
    Templates {
        more: &call.context.e2b_templates,
        roots: machine.templates(),
        default: machine.default_template(),
        host: machine.host().ok(),
    }
}

/// The name of a template of the store that an image or a build has: without the tag that is meant where none is, and
/// with `-` for what such a name cannot have.
pub(super) fn plain_name(name: &str) -> String {
    let usual = [":latest", ":default"].into_iter();
    let name = usual.fold(name, |name, tag| name.strip_suffix(tag).unwrap_or(name));
    name.to_ascii_lowercase().replace(['/', ':'], "-")
}

impl Templates<'_> {
    /// The operator's names, and what each means.
    fn more(&self) -> impl Iterator<Item = (&str, Option<&str>)> {
        self.more.iter().map(|entry| match entry.split_once('=') {
            Some((name, template)) => (name, Some(template)),
            None => (&**entry, None),
        })
    }

    /// All names, each once.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let more = self.more().map(|(name, _)| name);
        let more = more.filter(|name| *name != "*" && !TEMPLATES.contains(name));
        let roots = self.roots.iter().map(String::as_str);
        let roots = roots
            .filter(|root| !TEMPLATES.contains(root) && self.more().all(|(name, _)| name != *root));
        TEMPLATES.into_iter().chain(more).chain(roots)
    }

    /// The root that a name means, which may be that of a build; `None` if there is no such template.
    pub(super) fn root(&self, asked: &str) -> Option<RootChoice> {
        let (untagged, tag) = asked.split_once(':').unwrap_or((asked, ""));
        if untagged.is_empty() {
            return None;
        }
        // Each build is a tag of its template, from its end on.
        if let Some(built) = snapshot_id(tag) {
            return self.root_of(&[&built]);
        }
        let names = [asked, &plain_name(asked), untagged];
        self.root_of(&names).or_else(|| self.root_of(&["*"]))
    }

    /// The root that the name of an image means. Another version is another image, and `*` is none.
    #[cfg(feature = "file-tools")]
    pub(super) fn root_of_image(&self, asked: &str) -> Option<RootChoice> {
        let plain = plain_name(asked);
        let found = self.root_of(&[asked, &plain]).filter(|_| asked != "*");
        // That of clients which name none.
        found.or_else(|| self.root("base").filter(|_| plain == "e2bdev-base"))
    }

    /// The entry of the operator that this name would mean instead of a template with it.
    #[cfg(feature = "file-tools")]
    pub(super) fn entry_for(&self, asked: &str) -> Option<&str> {
        let untagged = asked.split(':').next().unwrap_or_default();
        let names = [asked, untagged].map(plain_name);
        let mut more = self.more().map(|(name, _)| name);
        more.find(|name| names.contains(&plain_name(name)))
    }

    /// The root that the first known one of these names means.
    fn root_of(&self, names: &[&str]) -> Option<RootChoice> {
        let of_operator = |wanted: &str| self.more().find(|(name, _)| *name == wanted);
        let is_root = |name: &&&str| {
            let is_id = is_snapshot_id(name);
            is_id && self.kept(name).is_some() || self.roots.iter().any(|root| root == **name)
        };
        let mut names_of_operator = names.iter().filter_map(|name| of_operator(name));
        let template = match (names_of_operator.next(), names.iter().find(is_root)) {
            (Some((_, template)), _) => template,
            (None, Some(own)) => Some(&**own),
            (None, None) if names.iter().any(|name| TEMPLATES.contains(name)) => None,
            (None, None) => return None,
        };
        Some(match template.or(self.default) {
            Some(template) => RootChoice::Private {
                template: Some(template.to_owned()),
                user: Some(USUAL_USER.to_owned()),
                makes_user: true,
                is_volatile: false,
            },
            None => RootChoice::Shared,
        })
    }

    /// The snapshot with a name or an id.
    fn kept(&self, key: &str) -> Option<Snapshot> {
        self.host?.snapshot(key).ok()
    }

    /// The snapshot that a name means.
    fn snapshot(&self, asked: &str) -> Option<Snapshot> {
        match self.root(asked)? {
            RootChoice::Private { template, .. } => self.kept(&template?),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_have_the_names_of_templates() {
        for (asked, expected) in [
            ("python:3.12", "python-3.12"),
            ("Debian:latest", "debian"),
            ("mine:default", "mine"),
            ("ghcr.io/Team/image:v1", "ghcr.io-team-image-v1"),
            ("", ""),
        ] {
            assert_eq!(plain_name(asked), expected);
        }
        let id = "s-0123456789abcdef01234567";
        let build = "01234567-89ab-cdef-0123-456700000000";
        assert_eq!(build_id(id), build);
        assert_eq!(snapshot_id(build).as_deref(), Some(id));
        for other in [
            "",
            "v1",
            "01234567-89ab-cdef-0123-456700000001",
            "0123456789ab-cdef-0123-456700000000-",
            "01234567-89ab-cdef-0123-45670000000",
            "0123456x-89ab-cdef-0123-456700000000",
            "01234567-89AB-cdef-0123-456700000000",
            "ééééééééééééééééé",
        ] {
            assert_eq!(snapshot_id(other), None, "{other}");
        }
    }

    #[test]
    fn names_mean_templates() {
        let more = ["mine", "team/x", "base", "old=deb", "py=bb"].map(str::to_owned);
        let roots = ["deb", "py"].map(str::to_owned).to_vec();
        let template = |templates: &Templates<'_>, asked: &str| match templates.root(asked) {
            None => "none".to_owned(),
            Some(RootChoice::Private { template, .. }) => template.unwrap(),
            Some(_) => "image".to_owned(),
        };
        let templates = Templates {
            more: &more,
            roots: roots.clone(),
            default: None,
            host: None,
        };
        for (asked, expected) in [
            ("base", "image"),
            ("base:v2", "image"),
            ("code-interpreter-v1", "image"),
            ("mine:v2", "image"),
            ("team/x", "image"),
            ("old", "deb"),
            ("deb:1", "deb"),
            // The operator's word holds.
            ("py", "bb"),
            ("min", "none"),
            ("*", "none"),
            ("", "none"),
            (":", "none"),
        ] {
            assert_eq!(template(&templates, asked), expected, "{asked}");
        }
        for (asked, expected) in [
            ("mine", Some("mine")),
            ("Mine:v2", Some("mine")),
            ("team-x", Some("team/x")),
            ("team/x:latest", Some("team/x")),
            ("mine-v2", None),
            ("deb", None),
        ] {
            assert_eq!(templates.entry_for(asked), expected, "{asked}");
        }
        let names: Vec<_> = templates.names().collect();
        let expected = [
            "base",
            "code-interpreter-v1",
            "mine",
            "team/x",
            "old",
            "py",
            "deb",
        ];
        assert_eq!(names, expected);
        // With a default, what means nothing else is that.
        for (entry, default, expected) in [
            ("*", None, "image"),
            ("*", Some("deb"), "deb"),
            ("*=py", Some("deb"), "py"),
        ] {
            let more = [entry.to_owned()];
            let any = Templates {
                more: &more,
                roots: roots.clone(),
                default,
                host: None,
            };
            assert_eq!(template(&any, "anything"), expected);
            for image in ["anything", "*", ""] {
                assert_eq!(any.root_of_image(image), None);
            }
            assert_eq!(any.root_of_image("e2bdev/base"), any.root("base"));
            assert_eq!(template(&any, "base"), default.unwrap_or("image"));
            assert_eq!(
                (template(&any, ""), any.names().count()),
                ("none".to_owned(), 4)
            );
        }
    }
}
