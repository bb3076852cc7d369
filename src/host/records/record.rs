//! What is written down of a sandbox, as text: a line of JSON, and a line with its SHA-256.
//!
//! The digest tells a whole record from one that a power cut has left in part. `format` is the number of the layout:
//! a record with a higher one was written by a later version, which may mean something else by the same names.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use crate::codec::fields::{self, Fields, JsonType, decoded, strings};
use crate::codec::table::Table;
use crate::confine::FileIdentity;
use crate::error::{Error, Result};
use crate::limits::activity::IdleBy;
use crate::spec::command::EnvironmentChange;
use crate::spec::isolation::Isolation;
use crate::spec::network::{Filter, NetworkPolicy, Protocol, Rule, Rules, Upstream};
use crate::spec::sandbox::{
    Fate, LifeRules, Phase, ResourceLimits, RootChoice, RootSpec, SandboxSpec, Settings, StopCause,
    WholeLimits,
};

/// The layout that this version writes, and the only one that it reads.
const FORMAT: u64 = 1;

/// A sandbox as it is written down.
#[derive(Clone)]
pub(in crate::host) struct Record {
    pub(in crate::host) id: String,
    pub(in crate::host) number: u64,
    pub(in crate::host) uid: u32,
    /// Milliseconds since 1970.
    pub(in crate::host) created_at_ms: u64,
    /// Milliseconds since 1970; `None` for a sandbox that never expires.
    pub(in crate::host) expires_at_ms: Option<u64>,
    /// How many milliseconds are left of a life that stands still.
    pub(in crate::host) left_ms: Option<u64>,
    /// Whether somebody has it rest.
    pub(in crate::host) rests: bool,
    /// Whether its time stands still.
    pub(in crate::host) stands: bool,
    /// Whether only the host's token ends its rest.
    pub(in crate::host) is_held: bool,
    /// What of it can change, as it is now.
    pub(in crate::host) settings: Settings,
    pub(in crate::host) phase: Phase,
    /// The ports of the machine that are its own.
    pub(in crate::host) tcp_ports: Vec<u16>,
    /// What was chosen at its creation, with the defaults of that time.
    pub(in crate::host) spec: Arc<SandboxSpec>,
    /// What the paths that it was given led to at its creation: the read-only ones first.
    pub(in crate::host) given: Arc<[FileIdentity]>,
}

/// Why a text is no record that this version reads.
#[derive(Debug)]
pub(in crate::host) enum Unreadable {
    /// It is not whole, or not in the layout.
    Broken,
    /// A later version has written it.
    Newer(u64),
}

impl fmt::Display for Unreadable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broken => formatter.write_str("it is not whole"),
            Self::Newer(format) => write!(
                formatter,
                "it has format {format}, and this version reads {FORMAT}"
            ),
        }
    }
}

/// Writes the members of a JSON object.
pub(in crate::host) struct Members(String);

impl Members {
    /// An object that begins with the number of the layout.
    pub(in crate::host) fn of_record(format: u64) -> Self {
        let mut members = Self::begin();
        members.number("format", Some(format));
        members
    }

    /// The text of a record, which ends with these members.
    pub(in crate::host) fn seal(self) -> Vec<u8> {
        let mut text = self.end();
        text.push('\n');
        let digest = format!("{:x}\n", Sha256::digest(&text));
        text += &digest;
        text.into_bytes()
    }

    fn begin() -> Self {
        Self(String::from("{"))
    }

    /// Adds a member that is JSON already. Members without a value are left out.
    fn raw(&mut self, name: &str, json: Option<String>) {
        let Some(json) = json else {
            return;
        };
        if self.0.len() > 1 {
            self.0.push(',');
        }
        self.0 += &quoted(name);
        self.0.push(':');
        self.0 += &json;
    }

    pub(in crate::host) fn number(&mut self, name: &str, number: Option<u64>) {
        self.raw(name, number.map(|number| number.to_string()));
    }

    pub(in crate::host) fn text(&mut self, name: &str, text: Option<&str>) {
        self.raw(name, text.map(quoted));
    }

    /// Adds an object of variables: null for one that is removed.
    pub(in crate::host) fn environment(&mut self, name: &str, changes: &[EnvironmentChange]) {
        let mut environment = Self::begin();
        for (name, value) in changes {
            let value = value.as_deref().map_or_else(|| "null".to_owned(), quoted);
            environment.raw(name, Some(value));
        }
        self.raw(name, Some(environment.end()));
    }

    fn texts(&mut self, name: &str, texts: &[String]) {
        let texts: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
        self.raw(name, Some(format!("[{}]", texts.join(","))));
    }

    fn flag(&mut self, name: &str, is_set: bool) {
        self.raw(name, Some(is_set.to_string()));
    }

    fn end(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("a text is JSON")
}

impl Record {
    /// The text of the record.
    pub(super) fn to_text(&self) -> Vec<u8> {
        let (spec, phase) = (&*self.spec, self.phase);
        let mut members = Members::of_record(FORMAT);
        members.text("id", Some(&self.id));
        members.number("number", Some(self.number));
        members.number("uid", Some(self.uid.into()));
        members.number("created_at_ms", Some(self.created_at_ms));
        members.number("expires_at_ms", self.expires_at_ms);
        members.number("left_ms", self.left_ms);
        members.flag("rests", self.rests);
        members.flag("stands", self.stands);
        members.flag("held", self.is_held);
        let Settings {
            name,
            labels,
            lifetime,
            rules,
            limits,
        } = &self.settings;
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs());
        members.text("name", name.as_deref());
        let mut pairs = Members::begin();
        for (name, value) in labels.iter() {
            pairs.text(name, Some(value));
        }
        members.raw("labels", Some(pairs.end()));
        members.number("lifetime_secs", seconds(*lifetime));
        members.number("idle_secs", seconds(rules.idle_timeout));
        members.text("idle_by", rules.idle_by.map(IdleBy::name));
        members.text("on_idle", Some(rules.on_idle.name()));
        members.text("on_expiry", Some(rules.on_expiry.name()));
        members.flag("auto_resume", rules.auto_resume);
        members.number("runs", Some(phase.runs));
        members.text("stopped", phase.stopped.map(StopCause::name));
        members.number("since_ms", Some(phase.since_ms));
        members.environment("env", &spec.environment);
        members.number("processes", limits.processes);
        members.number("data_bytes", limits.data);
        members.number("memory_bytes", limits.whole.memory);
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        members.number("cpu_us", limits.whole.cpu.map(micros));
        members.text("isolation", spec.isolation.map(Isolation::name));
        if let Some(network) = &spec.network {
            write_network(&mut members, network);
        }
        members.texts("read_only", &spec.read_only_paths);
        members.texts("read_write", &spec.read_write_paths);
        let given: Vec<String> = self.given.iter().map(ToString::to_string).collect();
        members.texts("given", &given);
        members.texts("devices", &spec.devices);
        members.number("own_ports", Some(spec.tcp_ports as u64));
        let ports: Vec<String> = self.tcp_ports.iter().map(u16::to_string).collect();
        members.texts("tcp_ports", &ports);
        members.text("template", Some(&spec.template));
        if let Some(root) = &spec.root {
            members.text("root_template", Some(&root.template));
            members.text("root_snapshot", root.snapshot.as_deref());
            members.text("root_user", root.user.as_deref());
            members.text("root_directory", root.directory.as_deref());
            members.flag("root_volatile", root.is_volatile);
        }
        members.text("key", spec.key.as_deref());
        let shown_home = spec.shown_home.as_ref();
        members.text("shown_home", shown_home.and_then(|path| path.to_str()));
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

/// The members of a record in a layout.
///
/// # Errors
/// It is none, or a later version's.
pub(in crate::host) fn unseal(
    text: &[u8],
    format: u64,
) -> std::result::Result<Fields<'_>, Unreadable> {
    let line = text.iter().position(|byte| *byte == b'\n');
    let (document, digest) = text.split_at(line.ok_or(Unreadable::Broken)? + 1);
    if format!("{:x}\n", Sha256::digest(document)).as_bytes() != digest {
        return Err(Unreadable::Broken);
    }
    let mut fields = Fields::parse(document).map_err(|_| Unreadable::Broken)?;
    match fields.whole("format", 0..=u64::MAX) {
        Ok(Some(found)) if found == format => Ok(fields),
        Ok(Some(found)) if found > format => Err(Unreadable::Newer(found)),
        _ => Err(Unreadable::Broken),
    }
}

fn read(fields: &mut Fields<'_>) -> Result<Record> {
    let whole = |fields: &mut Fields<'_>, name| fields.whole(name, 0..=u64::MAX);
    let needed = |fields: &mut Fields<'_>, name| whole(fields, name)?.ok_or_else(|| broken(name));
    let texts = |fields: &mut Fields<'_>, name| {
        let array = fields.take(name).ok_or_else(|| broken(name))?;
        strings(name, "", array)
    };
    let isolation = fields.choice("isolation", &Isolation::NAMES)?;
    let labels = object(fields, "labels")?.into_iter();
    let labels = labels.map(|(name, value)| (name, value.unwrap_or_default()));
    let labels = Table::from(labels.collect::<Vec<_>>());
    let flag = |fields: &mut Fields<'_>, name| fields.boolean(name)?.ok_or_else(|| broken(name));
    let fate = |fields: &mut Fields<'_>, name| {
        let fate = fields.choice(name, &Fate::NAMES)?;
        fate.ok_or_else(|| broken(name))
    };
    let settings = Settings {
        name: fields.string("name")?,
        labels: Arc::new(labels),
        lifetime: whole(fields, "lifetime_secs")?.map(Duration::from_secs),
        rules: LifeRules {
            idle_timeout: whole(fields, "idle_secs")?.map(Duration::from_secs),
            idle_by: fields.choice("idle_by", &IdleBy::NAMES)?,
            on_idle: fate(fields, "on_idle")?,
            on_expiry: fate(fields, "on_expiry")?,
            auto_resume: flag(fields, "auto_resume")?,
        },
        limits: ResourceLimits {
            processes: whole(fields, "processes")?,
            data: whole(fields, "data_bytes")?,
            whole: WholeLimits {
                memory: whole(fields, "memory_bytes")?,
                cpu: whole(fields, "cpu_us")?.map(Duration::from_micros),
            },
        },
    };
    let ports = texts(fields, "tcp_ports")?.into_iter();
    let ports = ports.map(|port| port.parse().map_err(|_| broken("tcp_ports")));
    let given = texts(fields, "given")?;
    let given = given
        .iter()
        .map(|text| FileIdentity::parse(text).ok_or_else(|| broken("given")));
    let given = given.collect::<Result<Vec<_>>>()?;
    let spec = SandboxSpec {
        environment: object(fields, "env")?.into(),
        isolation,
        network: Some(network(fields)?),
        // What it has got is its network.
        shares_network: false,
        read_only_paths: texts(fields, "read_only")?,
        read_write_paths: texts(fields, "read_write")?,
        devices: match fields.take("devices") {
            Some(array) => strings("devices", "", array)?,
            // A record of before there were any.
            None => Vec::new(),
        },
        tcp_ports: usize::try_from(needed(fields, "own_ports")?).unwrap_or(usize::MAX),
        settings: Settings::default(),
        template: fields.required_string("template")?,
        root_choice: RootChoice::default(),
        root: match fields.string("root_template")? {
            Some(template) => Some(RootSpec {
                template,
                snapshot: fields.string("root_snapshot")?,
                user: fields.string("root_user")?,
                directory: fields.string("root_directory")?,
                is_volatile: flag(fields, "root_volatile")?,
            }),
            None => None,
        },
        key: fields.string("key")?,
        shown_home: fields.string("shown_home")?.map(Into::into),
        is_build: false,
    };
    if given.len() != spec.read_only_paths.len() + spec.read_write_paths.len() {
        return Err(broken("given"));
    }
    Ok(Record {
        id: fields.required_string("id")?,
        number: needed(fields, "number")?,
        uid: u32::try_from(needed(fields, "uid")?).map_err(|_| broken("uid"))?,
        created_at_ms: needed(fields, "created_at_ms")?,
        expires_at_ms: whole(fields, "expires_at_ms")?,
        left_ms: whole(fields, "left_ms")?,
        rests: flag(fields, "rests")?,
        stands: flag(fields, "stands")?,
        is_held: flag(fields, "held")?,
        settings,
        phase: Phase {
            runs: needed(fields, "runs")?,
            stopped: fields.choice("stopped", &StopCause::NAMES)?,
            since_ms: needed(fields, "since_ms")?,
        },
        tcp_ports: ports.collect::<Result<_>>()?,
        spec: Arc::new(spec),
        given: given.into(),
    })
}

fn network(fields: &mut Fields<'_>) -> Result<NetworkPolicy> {
    let rules = |fields: &mut Fields<'_>, name| {
        let Some(array) = fields.take(name) else {
            return Ok(None);
        };
        let rules = strings(name, "", array)?.into_iter();
        let rules = rules.map(|text| Rule::parse(&text).ok_or_else(|| broken(name)));
        rules.collect::<Result<Vec<_>>>().map(Some)
    };
    let name = fields.required_string("network")?;
    if let Some(policy) = NetworkPolicy::named(&name) {
        return Ok(policy);
    }
    let is_socks = fields.boolean("is_socks")?.unwrap_or(false);
    let protocol = if is_socks {
        Protocol::Socks
    } else {
        Protocol::Http
    };
    let proxy = fields.string("proxy")?;
    let upstream = proxy.map(|url| Upstream::parse(protocol, &url).ok_or_else(|| broken("proxy")));
    let allow = rules(fields, "allow")?;
    let deny = rules(fields, "deny")?.unwrap_or_default();
    let mut filter = Filter::new(Rules { allow, deny }, upstream.transpose()?);
    filter.is_transparent = fields.boolean("is_transparent")?.unwrap_or(false);
    Ok(NetworkPolicy::Filtered(Arc::new(filter)))
}

fn write_network(members: &mut Members, network: &NetworkPolicy) {
    members.text("network", Some(network.name()));
    let NetworkPolicy::Filtered(filter) = network else {
        return;
    };
    let texts = |rules: &[Rule]| -> Vec<String> {
        rules.iter().map(|rule| rule.text().to_owned()).collect()
    };
    if let Some(allow) = &filter.rules.allow {
        members.texts("allow", &texts(allow));
    }
    members.texts("deny", &texts(&filter.rules.deny));
    if let Some(upstream) = &filter.upstream {
        members.text("proxy", Some(&upstream.url()));
        let is_socks = upstream.protocol == Protocol::Socks;
        members.raw("is_socks", Some(is_socks.to_string()));
    }
    members.raw("is_transparent", Some(filter.is_transparent.to_string()));
}

/// Reads an object of variables.
///
/// # Errors
/// It is none.
pub(in crate::host) fn object(
    fields: &mut Fields<'_>,
    name: &'static str,
) -> Result<Vec<EnvironmentChange>> {
    let value = fields.take(name).ok_or_else(|| broken(name))?;
    let fields::Members(members) = decoded(name, value)?;
    let decode = |(name, value): (String, &RawValue)| {
        let is_null = JsonType::of(value) == JsonType::Null;
        let value = (!is_null).then(|| decoded(&name, value)).transpose()?;
        Ok((name, value))
    };
    members.into_iter().map(decode).collect()
}

fn broken(name: &str) -> Error {
    Error::invalid(format_args!("a record has no {name} as it should be"))
}

#[cfg(test)]
impl Record {
    pub(super) fn for_test(id: &str, spec: SandboxSpec) -> Self {
        Self {
            id: id.to_owned(),
            number: 7,
            uid: 20_001,
            created_at_ms: 1_790_000_000_000,
            expires_at_ms: None,
            left_ms: None,
            rests: false,
            stands: false,
            is_held: false,
            settings: Settings::default(),
            phase: Phase {
                runs: 3,
                stopped: None,
                since_ms: 1_790_000_000_001,
            },
            tcp_ports: vec![8000, 8001],
            spec: Arc::new(spec),
            given: Arc::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(spec: SandboxSpec) -> Record {
        Record::for_test("0123456789abcdef01234567", spec)
    }

    fn full() -> Record {
        let rule = |text: &str| Rule::parse(text).unwrap();
        let rules = Rules {
            allow: Some(vec![rule("*.example.com:443"), rule("@pypi")]),
            deny: vec![rule("10.0.0.0/8")],
        };
        let upstream = Upstream::parse(Protocol::Socks, "socks5h://m%3Ae:p%40%25ss@proxy:9");
        let mut filter = Filter::new(rules, upstream);
        filter.is_transparent = true;
        let spec = SandboxSpec {
            environment: vec![
                ("A".to_owned(), None),
                ("B".to_owned(), Some("\"x\"\n\u{1f600}".to_owned())),
            ]
            .into(),
            isolation: Some(Isolation::Namespaces),
            network: Some(NetworkPolicy::Filtered(Arc::new(filter))),
            shares_network: false,
            read_only_paths: vec!["/opt/model".to_owned()],
            read_write_paths: vec!["/data".to_owned()],
            devices: vec!["nvidia.com/gpu=all".to_owned()],
            tcp_ports: 2,
            settings: Settings::default(),
            template: "base".to_owned(),
            key: Some("once".to_owned()),
            root_choice: RootChoice::default(),
            root: Some(RootSpec {
                template: "python".to_owned(),
                snapshot: Some("s-1".to_owned()),
                user: Some("user".to_owned()),
                directory: Some("/srv".to_owned()),
                is_volatile: true,
            }),
            shown_home: Some("/home/user".into()),
            is_build: false,
        };
        let mut record = record(spec);
        let given = ["9007199254740993 1790000000000000001", "7"];
        record.given = given
            .iter()
            .map(|text| FileIdentity::parse(text).unwrap())
            .collect();
        record.expires_at_ms = Some(1_790_000_009_999);
        record.left_ms = Some(1);
        record.rests = true;
        record.stands = true;
        record.is_held = true;
        record.settings = Settings {
            name: Some("a \"name\"".to_owned()),
            labels: Arc::new(Table::from(vec![("k".to_owned(), "v".to_owned())])),
            lifetime: Some(Duration::from_secs(3600)),
            rules: LifeRules {
                idle_timeout: Some(Duration::from_secs(600)),
                idle_by: Some(IdleBy::Work),
                on_idle: Fate::Pause,
                on_expiry: Fate::Stop,
                auto_resume: true,
            },
            limits: ResourceLimits {
                processes: Some(256),
                data: Some(1 << 30),
                whole: WholeLimits {
                    memory: Some(5 << 20),
                    cpu: Some(Duration::from_millis(1500)),
                },
            },
        };
        record.phase.stopped = Some(StopCause::Timeout);
        record
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        let plain = SandboxSpec {
            network: Some(NetworkPolicy::Blocked),
            ..SandboxSpec::default()
        };
        for written in [full(), record(plain)] {
            let read = Record::parse(&written.to_text()).unwrap();
            // All that is in a record is in its text.
            assert_eq!(read.to_text(), written.to_text());
            assert_eq!(read.spec.environment.len(), written.spec.environment.len());
            for (name, value) in written.spec.environment.iter() {
                let mut all = read.spec.environment.iter();
                assert!(all.any(|other| (&other.0, &other.1) == (name, value)));
            }
            let [one, other] = [&read, &written].map(|record| record.spec.network.as_ref());
            assert_eq!(one.unwrap().identity(), other.unwrap().identity());
            assert_eq!(read.given, written.given);
            assert_eq!(read.spec.root, written.spec.root);
            assert_eq!(read.spec.devices, written.spec.devices);
            assert_eq!(read.settings, written.settings);
            assert_eq!(
                [read.rests, read.stands, read.is_held],
                [written.rests, written.stands, written.is_held]
            );
            assert_eq!(read.left_ms, written.left_ms);
            assert_eq!(read.phase, written.phase);
            assert_eq!(
                (read.uid, read.expires_at_ms, &read.tcp_ports),
                (written.uid, written.expires_at_ms, &written.tcp_ports)
            );
        }
    }

    #[test]
    fn a_record_that_is_cut_anywhere_is_none() {
        let text = full().to_text();
        for end in 0..text.len() {
            let parsed = Record::parse(&text[..end]);
            assert!(matches!(parsed, Err(Unreadable::Broken)), "{end}");
        }
        for at in 0..text.len() {
            let mut other = text.clone();
            other[at] ^= 1;
            assert!(Record::parse(&other).is_err(), "{at}");
            other[at..].fill(0);
            assert!(Record::parse(&other).is_err(), "{at}");
        }
    }

    #[test]
    fn a_later_format_is_told_from_a_broken_one() {
        let text = String::from_utf8(full().to_text()).unwrap();
        let signed = |line: &str| format!("{line}\n{:x}\n", Sha256::digest(format!("{line}\n")));
        let line = text.lines().next().unwrap();
        assert!(Record::parse(signed(line).as_bytes()).is_ok());
        let newer = signed(&line.replacen("\"format\":1", "\"format\":2", 1));
        assert!(matches!(
            Record::parse(newer.as_bytes()),
            Err(Unreadable::Newer(2))
        ));
        for (from, to) in [
            ("\"format\":1", "\"format\":0"),
            ("\"uid\":20001", "\"uid\":-1"),
            ("\"uid\":20001", "\"uid\":99999999999"),
            ("\"network\":\"allowlist\"", "\"network\":null"),
            ("@pypi", "@nowhere"),
            (",\"7\"]", "]"),
            (",\"7\"]", ",\"x\"]"),
            ("\"stopped\":\"timeout\"", "\"stopped\":\"other\""),
        ] {
            let other = signed(&line.replacen(from, to, 1));
            let parsed = Record::parse(other.as_bytes());
            assert!(matches!(parsed, Err(Unreadable::Broken)), "{to}");
        }
    }
}
