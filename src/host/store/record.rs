//! What is written down of a snapshot.

use super::Snapshot;
use crate::codec::fields::Fields;
use crate::error::Result;
use crate::host::records::record::{Members, Unreadable, object, unseal};
use crate::spec::command::EnvironmentChange;

/// The layout that this version writes, and the only one that it reads.
const FORMAT: u64 = 1;

/// What is imported of a file of the machine: as it was found, and the digest of its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::host) struct Origin {
    pub(in crate::host) found: String,
    pub(in crate::host) sha256: String,
}

/// What commands of a root have unless something else is asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RootSettings {
    pub environment: Vec<EnvironmentChange>,
    /// Where they start; `None` for the home of their user.
    pub directory: Option<String>,
    pub user: Option<String>,
}

impl Snapshot {
    /// The text of its record.
    pub(super) fn to_text(&self) -> Vec<u8> {
        let mut members = Members::of_record(FORMAT);
        members.text("id", Some(&self.id));
        members.text("name", self.name.as_deref());
        let numbers = [
            ("number", self.number),
            ("created_at_ms", self.created_at_ms),
            ("files", self.files),
            ("bytes", self.bytes),
            ("skipped", self.skipped),
            ("weight", self.weight),
        ];
        for (name, number) in numbers {
            members.number(name, Some(number));
        }
        if let Some(origin) = &self.origin {
            members.text("found", Some(&origin.found));
            members.text("sha256", Some(&origin.sha256));
        }
        let RootSettings {
            environment,
            directory,
            user,
        } = &self.settings;
        members.environment("env", environment);
        members.text("directory", directory.as_deref());
        members.text("user", user.as_deref());
        members.seal()
    }

    /// Reads the text of a record.
    ///
    /// # Errors
    /// It is none, or a later version's.
    pub(super) fn parse(text: &[u8]) -> std::result::Result<Self, Unreadable> {
        let mut fields = unseal(text, FORMAT)?;
        read(&mut fields).map_err(|_| Unreadable::Broken)
    }
}

fn read(fields: &mut Fields<'_>) -> Result<Snapshot> {
    let mut number = |name| {
        let number = fields.whole(name, 0..=u64::MAX)?;
        Ok::<_, crate::error::Error>(number.unwrap_or(0))
    };
    let [number, created_at_ms, files, bytes, skipped, weight] = [
        number("number")?,
        number("created_at_ms")?,
        number("files")?,
        number("bytes")?,
        number("skipped")?,
        number("weight")?,
    ];
    let (found, sha256) = (fields.string("found")?, fields.string("sha256")?);
    let settings = RootSettings {
        environment: object(fields, "env")?,
        directory: fields.string("directory")?,
        user: fields.string("user")?,
    };
    Ok(Snapshot {
        id: fields.required_string("id")?,
        name: fields.string("name")?,
        number,
        created_at_ms,
        files,
        bytes,
        skipped,
        weight,
        settings,
        origin: found
            .zip(sha256)
            .map(|(found, sha256)| Origin { found, sha256 }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_nothing_less_is() {
        let origin = Some(Origin {
            found: "1:2:3".to_owned(),
            sha256: "ab".to_owned(),
        });
        for (name, origin) in [(None, None), (Some("a\"\n".to_owned()), origin)] {
            let snapshot = Snapshot {
                id: "s-0".to_owned(),
                name,
                number: 1,
                created_at_ms: 2,
                files: 3,
                bytes: 4,
                skipped: 5,
                weight: u64::MAX,
                settings: RootSettings {
                    environment: vec![("A".to_owned(), Some("=\n".to_owned()))],
                    directory: origin.as_ref().map(|_| "/srv".to_owned()),
                    user: origin.as_ref().map(|_| "www".to_owned()),
                },
                origin,
            };
            let text = snapshot.to_text();
            assert_eq!(Snapshot::parse(&text).unwrap(), snapshot);
            for end in 0..text.len() {
                assert!(Snapshot::parse(&text[..end]).is_err(), "{end} bytes");
            }
            for at in 0..text.len() {
                let mut broken = text.clone();
                broken[at] ^= 1;
                assert!(Snapshot::parse(&broken).is_err(), "byte {at}");
            }
        }
    }
}
