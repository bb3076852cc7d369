//! Networks in JSON: the policy that a request asks for, what was allowed and refused, and the servers inside.

use std::sync::Arc;

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::codec::fields::{Fields, JsonType, Members, decoded, strings, wrong_type};
use crate::egress::{Report, VerdictRecord};
use crate::error::{Error, Result};
use crate::ports::{Listener, Port};
use crate::spec::network::{Filter, NetworkPolicy, Protocol, Rule, Rules, Upstream};

/// Most rules in each of `allow` and `deny`.
const MAX_RULES: usize = 256;

/// What `network` takes.
const ACCEPTED: &str = "open, blocked, or an object with mode";

/// The members of the object.
const MEMBERS: [&str; 7] = [
    "mode",
    "allow",
    "deny",
    "proxy",
    "socks",
    "transparent",
    "share",
];

/// What a request asks for.
#[derive(Debug)]
pub(in crate::api) struct AskedNetwork {
    pub(in crate::api) policy: NetworkPolicy,
    /// Whether an open one is to be the machine's, for a sandbox with a root of its own too.
    pub(in crate::api) is_shared: bool,
}

/// The policy that a request asks for; `None` if it asks for none.
///
/// # Errors
/// `Invalid`; `Unavailable` for what this version cannot do.
pub(in crate::api) fn policy(fields: &mut Fields<'_>) -> Result<Option<NetworkPolicy>> {
    Ok(asked(fields)?.map(|asked| asked.policy))
}

/// The network that a request asks for; `None` if it asks for none.
///
/// # Errors
/// As [`policy`].
pub(in crate::api) fn asked(fields: &mut Fields<'_>) -> Result<Option<AskedNetwork>> {
    let Some(value) = fields.take("network") else {
        return Ok(None);
    };
    match JsonType::of(value) {
        JsonType::String => {
            let word: String = decoded("network", value)?;
            let policy = NetworkPolicy::named(&word);
            let policy = policy.ok_or_else(|| {
                Error::invalid(format_args!("network is {word:?}; it takes {ACCEPTED}"))
            });
            policy.map(|policy| {
                Some(AskedNetwork {
                    policy,
                    is_shared: false,
                })
            })
        }
        JsonType::Object => of_object(value).map(Some),
        _ => Err(wrong_type("network", ACCEPTED, value)),
    }
}

fn of_object(value: &RawValue) -> Result<AskedNetwork> {
    let Members(members) = decoded("network", value)?;
    // A rule under a wrong name would not hold, so unknown members are not ignored here.
    if let Some(unknown) = members
        .iter()
        .map(|(name, _)| name)
        .find(|name| !MEMBERS.contains(&&***name))
    {
        let text = format_args!("network has {unknown:?}; it takes {}", MEMBERS.join(", "));
        return Err(Error::invalid(text));
    }
    let mut fields = Fields::from(Members(members));
    let modes = [("allowlist", 0), ("open", 1), ("blocked", 2)];
    let mode = fields.choice("mode", &modes)?;
    let mode = mode
        .ok_or_else(|| Error::invalid("network takes mode, which is allowlist, open or blocked"))?;
    let allow = rules(&mut fields, "allow")?;
    let deny = rules(&mut fields, "deny")?;
    let proxy = upstream(&mut fields, "proxy", Protocol::Http)?;
    let socks = upstream(&mut fields, "socks", Protocol::Socks)?;
    let is_transparent = fields.boolean("transparent")?.unwrap_or(false);
    let is_shared = fields.boolean("share")?.unwrap_or(false);
    if proxy.is_some() && socks.is_some() {
        return Err(Error::invalid("network takes proxy or socks, and not both"));
    }
    let upstream = proxy.or(socks);
    let has_more = deny.is_some() || upstream.is_some() || is_transparent;
    let deny = deny.unwrap_or_default();
    let filtered = |allow, deny, upstream| {
        let mut filter = Filter::new(Rules { allow, deny }, upstream);
        filter.is_transparent = is_transparent;
        Ok(NetworkPolicy::Filtered(Arc::new(filter)))
    };
    if is_shared && (mode != 1 || has_more) {
        let text = "network takes share with mode open and nothing else: nothing of a network that is shared is filtered";
        return Err(Error::invalid(text));
    }
    let policy = match (mode, allow) {
        (0, Some(allow)) => filtered(Some(allow), deny, upstream),
        (0, None) => Err(Error::invalid(
            "network with mode allowlist takes allow, an array",
        )),
        (1, Some(_)) => Err(Error::invalid(
            "network with mode open takes no allow: everything is reached that deny does not name",
        )),
        // Without rules all programs get through in any case.
        (1, None) if deny.is_empty() && upstream.is_none() => Ok(NetworkPolicy::Open),
        (1, None) => filtered(None, deny, upstream),
        (_, None) if !has_more => Ok(NetworkPolicy::Blocked),
        _ => Err(Error::invalid(
            "network with mode blocked takes nothing else",
        )),
    }?;
    Ok(AskedNetwork { policy, is_shared })
}

fn rules(fields: &mut Fields<'_>, name: &'static str) -> Result<Option<Vec<Rule>>> {
    let accepted = format!("an array of at most {MAX_RULES} rules");
    let Some(array) = fields.take(name) else {
        return Ok(None);
    };
    let texts = strings(&format!("network.{name}"), &accepted, array)?;
    if texts.len() > MAX_RULES {
        let text = format!(
            "network.{name} has {} rules; it takes {accepted}",
            texts.len()
        );
        return Err(Error::invalid(text));
    }
    let parsed = texts.iter().map(|text| {
        Rule::parse(text).ok_or_else(|| {
            let text = format_args!("network.{name} has {text:?}; it takes {}", Rule::ACCEPTED);
            Error::invalid(text)
        })
    });
    parsed.collect::<Result<_>>().map(Some)
}

/// A proxy of the client's own. The text of an error never quotes the URL, which may hold a password.
fn upstream(
    fields: &mut Fields<'_>,
    name: &'static str,
    protocol: Protocol,
) -> Result<Option<Upstream>> {
    let Some(url) = fields.string(name)? else {
        return Ok(None);
    };
    let example = match protocol {
        Protocol::Http => "http://user:password@host:port; TLS to the proxy is not supported",
        Protocol::Socks => "socks5h://user:password@host:port",
    };
    let refused = || Error::invalid(format_args!("network.{name} takes a URL such as {example}"));
    Upstream::parse(protocol, &url)
        .ok_or_else(refused)
        .map(Some)
}

/// A policy in an answer.
#[derive(Serialize)]
#[serde(untagged)]
pub(in crate::api) enum NetworkPolicyDocument {
    Word(&'static str),
    Filter {
        mode: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        allow: Option<Vec<String>>,
        deny: Vec<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        proxy: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        socks: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        transparent: Option<bool>,
    },
}

impl NetworkPolicyDocument {
    pub(in crate::api) fn of(policy: &NetworkPolicy) -> Self {
        let NetworkPolicy::Filtered(filter) = policy else {
            return Self::Word(policy.name());
        };
        let texts = |rules: &[Rule]| rules.iter().map(|rule| rule.text().to_owned()).collect();
        let url = |protocol| {
            let upstream = filter.upstream.as_ref();
            let upstream = upstream.filter(|upstream| upstream.protocol == protocol);
            upstream.map(ToString::to_string)
        };
        let allow = filter.rules.allow.as_ref();
        Self::Filter {
            mode: allow.map_or("open", |_| "allowlist"),
            allow: allow.map(|rules| texts(rules)),
            deny: texts(&filter.rules.deny),
            proxy: url(Protocol::Http),
            socks: url(Protocol::Socks),
            transparent: filter.is_transparent.then_some(true),
        }
    }
}

/// The answer of `GET network`.
#[derive(Serialize)]
pub(in crate::api) struct NetworkDocument {
    posture: NetworkPolicyDocument,
    allowed: u64,
    refused: u64,
    recent: Vec<VerdictDocument>,
}

#[derive(Serialize)]
struct VerdictDocument {
    at_ms: u64,
    host: Box<str>,
    port: u16,
    verdict: &'static str,
    rule: Box<str>,
}

impl From<VerdictRecord> for VerdictDocument {
    fn from(record: VerdictRecord) -> Self {
        let VerdictRecord {
            at_ms,
            host,
            port,
            is_allowed,
            rule,
        } = record;
        let verdict = if is_allowed { "allowed" } else { "refused" };
        Self {
            at_ms,
            host,
            port,
            verdict,
            rule,
        }
    }
}

impl NetworkDocument {
    /// Describes a policy, and what was allowed and refused under it.
    pub(in crate::api) fn of((policy, report): (&NetworkPolicy, Report)) -> Self {
        let Report {
            allowed,
            refused,
            recent,
        } = report;
        Self {
            posture: NetworkPolicyDocument::of(policy),
            allowed,
            refused,
            recent: recent.into_iter().map(VerdictDocument::from).collect(),
        }
    }
}

/// Reads the request to reach a port: its number, or its name, as the port proxy takes it in a path.
///
/// # Errors
/// `Invalid` if it is missing, or is neither a text nor a number.
pub(in crate::api) fn port_request(fields: &mut Fields<'_>) -> Result<String> {
    let accepted = "a whole number or a name";
    let port = fields.required("port", accepted)?;
    let is_whole = || port.get().bytes().all(|byte| byte.is_ascii_digit());
    match JsonType::of(port) {
        JsonType::String => decoded("port", port),
        JsonType::Number if is_whole() => Ok(port.get().to_owned()),
        _ => Err(wrong_type("port", accepted, port)),
    }
}

/// A port as in a URL: a number, or the name of a socket.
fn port_value(port: &Port) -> Value {
    match port.number() {
        Some(number) => json!(number),
        None => json!(port.to_string()),
    }
}

#[derive(Serialize)]
pub(in crate::api) struct ListenerDocument<'a> {
    port: Value,
    address: &'a str,
    pid: Option<i32>,
    command: Option<&'a str>,
}

impl<'a> ListenerDocument<'a> {
    /// Describes a listening socket.
    pub(in crate::api) fn of(listener: &'a Listener) -> Self {
        let process = listener.process.as_ref();
        Self {
            port: port_value(&listener.port),
            address: &listener.address,
            pid: process.map(|owner| owner.pid),
            command: process.map(|owner| owner.command.as_str()),
        }
    }
}

/// Whether something listens on a port.
#[derive(Serialize)]
pub(in crate::api) struct PortDocument {
    port: Value,
    listening: bool,
}

impl PortDocument {
    /// Describes a port at the end of a wait.
    pub(in crate::api) fn of(port: &Port, listening: bool) -> Self {
        Self {
            port: port_value(port),
            listening,
        }
    }
}

/// An address that leads to a port without a token.
#[derive(Serialize)]
pub(in crate::api) struct TicketDocument {
    port: Value,
    path: String,
}

impl TicketDocument {
    /// Describes a ticket for a port.
    pub(in crate::api) fn of(port: &Port, ticket: &str) -> Self {
        Self {
            port: port_value(port),
            path: format!("/t/{ticket}/"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(network: &str) -> std::result::Result<NetworkPolicy, String> {
        let body = format!("{{\"network\":{network}}}");
        let mut fields = Fields::parse(body.as_bytes()).unwrap();
        let policy = policy(&mut fields).map_err(|error| error.to_string())?;
        Ok(policy.unwrap())
    }

    fn shown(policy: &NetworkPolicy) -> String {
        serde_json::to_string(&NetworkPolicyDocument::of(policy)).unwrap()
    }

    #[test]
    fn what_is_asked_for_is_shown() {
        for text in [
            r#""open""#,
            r#""blocked""#,
            r#"{"mode":"allowlist","allow":[],"deny":[]}"#,
            r#"{"mode":"allowlist","allow":["@pypi","*.example.com:443","10.0.0.0/8"],"deny":["@private"]}"#,
            r#"{"mode":"open","deny":["@cloud-metadata"]}"#,
            r#"{"mode":"allowlist","allow":["@pypi"],"deny":[],"transparent":true}"#,
            r#"{"mode":"open","deny":[],"proxy":"http://proxy.example:3128"}"#,
            r#"{"mode":"allowlist","allow":["a.example"],"deny":[],"socks":"socks5h://[::1]:1080"}"#,
        ] {
            assert_eq!(shown(&parsed(text).unwrap()), text);
        }
        assert_eq!(parsed(r#"{"mode":"open"}"#), Ok(NetworkPolicy::Open));
        let nothing_to_lead = parsed(r#"{"mode":"open","transparent":true}"#);
        assert_eq!(nothing_to_lead, Ok(NetworkPolicy::Open));
        assert_eq!(parsed(r#"{"mode":"blocked"}"#), Ok(NetworkPolicy::Blocked));
    }

    #[test]
    fn credentials_are_not_shown() {
        let policy = parsed(r#"{"mode":"open","proxy":"http://me:secret@proxy:1"}"#).unwrap();
        assert!(!shown(&policy).contains("secret"));
        let refused = parsed(r#"{"mode":"open","proxy":"https://me:secret@proxy:1"}"#).unwrap_err();
        assert!(!refused.contains("secret"), "{refused}");
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for (text, part) in [
            ("1", "network is a number"),
            (r#""allowlist""#, "network is \"allowlist\""),
            ("{}", "takes mode"),
            (r#"{"mode":"none"}"#, "mode"),
            (r#"{"mode":"allowlist"}"#, "takes allow"),
            (r#"{"mode":"allowlist","allow":"a"}"#, "network.allow"),
            (r#"{"mode":"allowlist","allow":[1]}"#, "network.allow"),
            (r#"{"mode":"allowlist","allow":["a/b"]}"#, "\"a/b\""),
            (r#"{"mode":"allowlist","allow":["a"],"denny":[]}"#, "denny"),
            (r#"{"mode":"open","allow":["a"]}"#, "takes no allow"),
            (r#"{"mode":"blocked","deny":["a"]}"#, "takes nothing else"),
            (
                r#"{"mode":"open","proxy":"http://a","socks":"socks5h://a"}"#,
                "not both",
            ),
            (
                r#"{"mode":"blocked","transparent":true}"#,
                "takes nothing else",
            ),
            (
                r#"{"mode":"open","deny":["a"],"transparent":1}"#,
                "transparent",
            ),
        ] {
            let refused = parsed(text).unwrap_err();
            assert!(refused.contains(part), "{text}: {refused}");
        }
        let many = vec!["\"a\""; MAX_RULES + 1].join(",");
        let text = format!("{{\"mode\":\"allowlist\",\"allow\":[{many}]}}");
        assert!(parsed(&text).unwrap_err().contains("257 rules"));
    }
}
