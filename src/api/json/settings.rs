//! What can change of a sandbox while it lives, in JSON.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::codec::fields::{Change, Fields, JsonType, Members, decoded, wrong_type};
use crate::codec::table::Table;
use crate::error::{Error, Result};
use crate::host::{LimitsChange, RulesChange, Sandbox, SettingsChange};
use crate::limits::activity::IdleBy;
use crate::spec::sandbox::{Fate, Settings};

/// Most characters of the name of a sandbox.
const MAX_NAME: usize = 128;

/// Most labels of a sandbox, most bytes of the name of one, and of its value.
const MAX_LABELS: usize = 64;
const MAX_LABEL_NAME: usize = 128;
const MAX_LABEL_VALUE: usize = 1024;

/// Largest `max_procs`.
const MAX_PROCESSES: u64 = 1 << 20;

/// Largest `max_mem_mb` and `max_total_mem_mb`, in MiB.
const MAX_MEMORY_MB: u64 = 1 << 30;

/// The values of `max_cpu`, in seconds of processor time for each second.
const CPU: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(4096);

/// The same for people.
const ACCEPTED_CPU: &str = "a number of processors from 0.1 to 4096";

/// What labels are, for people.
const ACCEPTED_LABELS: &str = "an object of at most 64 texts of at most 1024 bytes, named with 1 to 128 letters, digits, and . _ / -";

/// Reads what can change. In a change null removes a value.
///
/// # Errors
/// `Invalid` if a field has a wrong type or value.
pub(in crate::api) fn settings_change(fields: &mut Fields<'_>) -> Result<SettingsChange> {
    let idle_timeout = match fields.removable("idle_timeout_secs", seconds)? {
        // 0 means never, as in SBX_IDLE_TIMEOUT.
        Change::Set(Duration::ZERO) => Change::Remove,
        other => other,
    };
    Ok(SettingsChange {
        name: fields.removable("name", name)?,
        labels: fields.removable("labels", labels)?.or_default(),
        lifetime: fields.removable("expires_in_secs", seconds)?,
        rules: RulesChange {
            idle_timeout,
            idle_by: fields.removable("idle_by", |fields, name| {
                fields.choice(name, &IdleBy::NAMES)
            })?,
            on_idle: fields.removable("on_idle", fate)?.or_default(),
            on_expiry: fields.removable("on_expiry", fate)?.or_default(),
            auto_resume: fields
                .removable("auto_resume", Fields::boolean)?
                .or_default(),
        },
        limits: LimitsChange {
            processes: fields.removable("max_procs", |fields, name| {
                fields.whole(name, 1..=MAX_PROCESSES)
            })?,
            data: fields.removable("max_mem_mb", megabytes)?,
            memory: fields.removable("max_total_mem_mb", megabytes)?,
            cpu: fields.removable("max_cpu", |fields, name| {
                fields.processors(name, ACCEPTED_CPU, CPU)
            })?,
        },
    })
}

/// The settings of a new sandbox.
///
/// # Errors
/// As [`settings_change`].
pub(in crate::api) fn settings(fields: &mut Fields<'_>) -> Result<Settings> {
    let mut settings = Settings::default();
    settings_change(fields)?.apply(&mut settings);
    Ok(settings)
}

/// Whether a change is one that a sandbox's own token may make: of its name alone.
pub(in crate::api) fn is_of_name(change: &SettingsChange) -> bool {
    let SettingsChange {
        name: _,
        labels,
        lifetime,
        rules,
        limits,
    } = change;
    labels.is_none()
        && *lifetime == Change::Keep
        && *rules == RulesChange::default()
        && *limits == LimitsChange::default()
}

fn seconds(fields: &mut Fields<'_>, name: &'static str) -> Result<Option<Duration>> {
    let seconds = fields.whole(name, 0..=u32::MAX.into())?;
    Ok(seconds.map(Duration::from_secs))
}

/// Mebibytes, in bytes.
fn megabytes(fields: &mut Fields<'_>, name: &'static str) -> Result<Option<u64>> {
    let megabytes = fields.whole(name, 1..=MAX_MEMORY_MB)?;
    Ok(megabytes.map(|megabytes| megabytes << 20))
}

fn fate(fields: &mut Fields<'_>, name: &'static str) -> Result<Option<Fate>> {
    fields.choice(name, &Fate::NAMES)
}

/// What people call a sandbox.
fn name(fields: &mut Fields<'_>, field: &'static str) -> Result<Option<String>> {
    let name = fields.string(field)?;
    if let Some(name) = &name
        && (!(1..=MAX_NAME).contains(&name.chars().count()) || name.chars().any(char::is_control))
    {
        return Err(Error::invalid(format_args!(
            "{field} takes 1 to {MAX_NAME} characters, and no control characters"
        )));
    }
    Ok(name)
}

/// What a client writes on a sandbox.
fn labels(
    fields: &mut Fields<'_>,
    field: &'static str,
) -> Result<Option<Arc<Table<String, String>>>> {
    let Some(value) = fields.take(field) else {
        return Ok(None);
    };
    if JsonType::of(value) != JsonType::Object {
        return Err(wrong_type(field, ACCEPTED_LABELS, value));
    }
    let Members(members) = decoded(field, value)?;
    let label = |(name, value): (String, &RawValue)| {
        let field = format!("{field}.{name}");
        if JsonType::of(value) != JsonType::String {
            return Err(wrong_type(&field, "a string", value));
        }
        Ok((name, decoded::<String>(&field, value)?))
    };
    let labels = members.into_iter().map(label).collect::<Result<Vec<_>>>()?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte);
    let is_fit = |(name, value): &(String, String)| {
        (1..=MAX_LABEL_NAME).contains(&name.len())
            && name.bytes().all(is_plain)
            && value.len() <= MAX_LABEL_VALUE
    };
    if labels.len() > MAX_LABELS || !labels.iter().all(is_fit) {
        return Err(Error::invalid(format_args!(
            "{field} takes {ACCEPTED_LABELS}"
        )));
    }
    Ok(Some(Arc::new(Table::from(labels))))
}

/// What can change of a sandbox, as it is.
#[derive(Serialize)]
pub(super) struct SettingsDocument {
    name: Option<String>,
    labels: Table<String, String>,
    /// When it expires, in milliseconds since 1970; null for never, and while its time stands still.
    expires_at_ms: Option<u64>,
    on_expiry: &'static str,
    idle_timeout_secs: Option<u64>,
    idle_by: &'static str,
    on_idle: &'static str,
    auto_resume: bool,
    /// Whether only the host's token resumes it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    held: bool,
}

impl SettingsDocument {
    pub(super) fn of(sandbox: &Sandbox) -> Self {
        let Settings {
            name,
            labels,
            lifetime: _,
            rules,
            limits: _,
        } = sandbox.settings();
        Self {
            name,
            labels: Table::clone(&labels),
            expires_at_ms: sandbox.expiry().map(|expiry| expiry.at_ms),
            on_expiry: rules.on_expiry.name(),
            idle_timeout_secs: rules.idle_timeout.map(|limit| limit.as_secs()),
            idle_by: rules.idle_by().name(),
            on_idle: rules.on_idle.name(),
            auto_resume: rules.auto_resume,
            held: sandbox.is_held(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(body: &str) -> Result<SettingsChange> {
        settings_change(&mut Fields::parse(body.as_bytes())?)
    }

    #[test]
    fn what_is_absent_stays_and_null_removes() {
        let nothing = change("{}").unwrap();
        assert!(nothing.name == Change::Keep && is_of_name(&nothing));
        let mut settings = settings(
            &mut Fields::parse(
                br#"{"name":"a","labels":{"k":"v"},"expires_in_secs":5,"idle_timeout_secs":7,"on_idle":"pause","auto_resume":true}"#,
            )
            .unwrap(),
        )
        .unwrap();
        let before = settings.clone();
        change("{}").unwrap().apply(&mut settings);
        assert_eq!(settings, before);
        assert_eq!(settings.rules.idle_by(), IdleBy::Requests);
        let removal = r#"{"name":null,"labels":null,"expires_in_secs":null,"idle_timeout_secs":null,"on_idle":null,"auto_resume":null}"#;
        change(removal).unwrap().apply(&mut settings);
        assert_eq!(settings, Settings::default());
        assert_eq!(settings.rules.idle_by(), IdleBy::Work);
    }

    #[test]
    fn names_and_labels_have_bounds() {
        let long = "x".repeat(MAX_NAME);
        let many = |count: usize| {
            let labels: Vec<_> = (0..count).map(|n| format!(r#""k{n}":"v""#)).collect();
            format!(r#"{{"labels":{{{}}}}}"#, labels.join(","))
        };
        let value = |length| format!(r#"{{"labels":{{"k":"{}"}}}}"#, "v".repeat(length));
        for fit in [
            format!(r#"{{"name":"{long}"}}"#),
            many(MAX_LABELS),
            value(MAX_LABEL_VALUE),
            r#"{"labels":{"a/b.c-d_1":""}}"#.to_owned(),
        ] {
            assert!(change(&fit).is_ok(), "{fit}");
        }
        for unfit in [
            format!(r#"{{"name":"{long}x"}}"#),
            many(MAX_LABELS + 1),
            value(MAX_LABEL_VALUE + 1),
            r#"{"name":""}"#.to_owned(),
            r#"{"name":"a\u0000"}"#.to_owned(),
            r#"{"name":7}"#.to_owned(),
            r#"{"labels":{"a b":""}}"#.to_owned(),
            r#"{"labels":{"":""}}"#.to_owned(),
            r#"{"labels":{"k":7}}"#.to_owned(),
            r#"{"labels":[]}"#.to_owned(),
            r#"{"on_idle":"sleep"}"#.to_owned(),
            r#"{"idle_by":7}"#.to_owned(),
            r#"{"expires_in_secs":-1}"#.to_owned(),
        ] {
            assert!(change(&unfit).is_err(), "{unfit}");
        }
    }

    #[test]
    fn a_name_is_all_that_a_sandbox_changes_itself() {
        assert!(is_of_name(&change(r#"{"name":null}"#).unwrap()));
        for more in [
            r#""labels":{}"#,
            r#""expires_in_secs":null"#,
            r#""idle_timeout_secs":0"#,
            r#""idle_by":null"#,
            r#""on_idle":"stop""#,
            r#""on_expiry":null"#,
            r#""auto_resume":false"#,
            r#""max_procs":null"#,
            r#""max_mem_mb":1"#,
            r#""max_total_mem_mb":1"#,
            r#""max_cpu":2"#,
        ] {
            assert!(
                !is_of_name(&change(&format!("{{{more}}}")).unwrap()),
                "{more}"
            );
        }
    }
}
