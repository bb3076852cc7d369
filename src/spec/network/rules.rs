//! The rules of a network: what they may say, and which of them decides about a connection.
//!
//! Pure functions. Whoever asks resolves names and tells which addresses are the machine's own.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use super::address::{Address, Kind, Network};

/// Where a connection shall lead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    /// A DNS name in lower case, without a dot at its end.
    Name(String),
    Address(Address),
}

/// Most characters of a name (RFC 1035).
const MAX_NAME: usize = 253;

/// Most bytes of a rule: a name with an asterisk, a dot at its end and a port. Verdicts are kept with it.
const MAX_RULE: usize = MAX_NAME + "*..:65535".len();

impl Host {
    /// Reads a name or an address; an IPv6 address may be in brackets. `None` if it is neither, and for another way to
    /// write an address of IPv4 than four decimal numbers: resolvers do not agree on those.
    pub fn parse(text: &str) -> Option<Self> {
        if let Some(inner) = text.strip_prefix('[') {
            let address: Ipv6Addr = inner.strip_suffix(']')?.parse().ok()?;
            return Some(Self::Address(address.into()));
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            return Some(Self::Address(address.into()));
        }
        let name = text.strip_suffix('.').unwrap_or(text);
        let is_label = |label: &str| {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
            (1..=63).contains(&label.len()) && label.bytes().all(plain)
        };
        let is_name = name.len() <= MAX_NAME && name.split('.').all(is_label);
        (is_name && !ends_in_a_number(name)).then(|| Self::Name(name.to_ascii_lowercase()))
    }
}

/// Whether programs take a name for an address of IPv4 (URL Standard, "ends in a number"; `inet_aton(3)`).
fn ends_in_a_number(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    match last.split_at_checked(2) {
        Some(("0x" | "0X", digits)) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
        _ => last.bytes().all(|byte| byte.is_ascii_digit()),
    }
}

/// As in a URL: IPv6 in brackets.
impl fmt::Display for Host {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => formatter.write_str(name),
            Self::Address(address) => match address.ip() {
                IpAddr::V4(address) => write!(formatter, "{address}"),
                IpAddr::V6(address) => write!(formatter, "[{address}]"),
            },
        }
    }
}

/// Splits `HOST:PORT`; the port may be missing. `None` if either is malformed.
pub fn host_and_port(text: &str) -> Option<(Host, Option<u16>)> {
    // The colons of an IPv6 address are in brackets.
    let split = match text.rfind(']') {
        Some(bracket) => text[bracket + 1..].find(':').map(|at| bracket + 1 + at),
        None => text.rfind(':'),
    };
    let Some(colon) = split else {
        return Some((Host::parse(text)?, None));
    };
    Some((
        Host::parse(&text[..colon])?,
        Some(port(&text[colon + 1..])?),
    ))
}

/// A port in digits, above 0.
fn port(text: &str) -> Option<u16> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
    let port = text.parse().ok().filter(|port| *port > 0);
    port.filter(|_| is_plain)
}

/// What a rule is about.
#[derive(Debug, Clone, PartialEq, Eq)]
enum RuleTarget {
    Name(String),
    /// Every name that ends in this, which begins with a dot.
    Below(String),
    Network(Network),
    /// Addresses of a kind, and names that lead to them.
    Kind(Kind, &'static [&'static str]),
    /// Names, written as in rules.
    Names(&'static [&'static str]),
}

/// The lists that rules name.
const LISTS: &[(&str, RuleTarget)] = &[
    (
        "@cloud-metadata",
        RuleTarget::Kind(
            Kind::CloudMetadata,
            &["metadata", "metadata.google.internal", "metadata.goog"],
        ),
    ),
    ("@private", RuleTarget::Kind(Kind::Private, &[])),
    (
        "localhost",
        RuleTarget::Kind(
            Kind::Machine,
            &[
                "localhost",
                "localhost.localdomain",
                "ip6-localhost",
                "ip6-loopback",
            ],
        ),
    ),
    (
        "@pypi",
        RuleTarget::Names(&["pypi.org", "files.pythonhosted.org", "pypi.python.org"]),
    ),
    (
        "@npm",
        RuleTarget::Names(&["registry.npmjs.org", "registry.yarnpkg.com"]),
    ),
    (
        "@crates",
        RuleTarget::Names(&["crates.io", "index.crates.io", "static.crates.io"]),
    ),
    (
        "@github",
        RuleTarget::Names(&["github.com", "*.github.com", "*.githubusercontent.com"]),
    ),
    (
        "@huggingface",
        RuleTarget::Names(&["huggingface.co", "*.huggingface.co", "hf.co", "*.hf.co"]),
    ),
];

/// One entry of `allow` or `deny`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// As written.
    text: String,
    target: RuleTarget,
    /// `None` for every port.
    port: Option<u16>,
}

impl Rule {
    /// What a rule can be, for messages.
    pub const ACCEPTED: &str = "names, *.names, addresses, networks such as 10.0.0.0/8, each also with :port, and the \
                                lists @cloud-metadata, @private, @pypi, @npm, @crates, @github, @huggingface";

    /// The addresses at which a machine reaches itself alone.
    pub fn loopback() -> Vec<Self> {
        let networks = ["127.0.0.0/8", "::1"].into_iter();
        networks.filter_map(Self::parse).collect()
    }

    /// Reads a rule; `None` if it is none.
    pub fn parse(text: &str) -> Option<Self> {
        let rule = |target, port| {
            let text = text.to_owned();
            Some(Self { text, target, port })
        };
        if text.len() > MAX_RULE {
            return None;
        }
        let is_address = text.parse::<IpAddr>().is_ok();
        let (rest, number) = match text.rsplit_once(':') {
            Some((rest, digits)) if !is_address && !digits.contains([']', '/']) => {
                // Without brackets the colon may be one of an IPv6 network.
                if rest.contains(':') && !rest.ends_with(']') {
                    return None;
                }
                (rest, Some(port(digits)?))
            }
            _ => (text, None),
        };
        let lower = rest.to_ascii_lowercase();
        let mut lists = LISTS.iter();
        if let Some((_, target)) = lists.find(|(name, _)| *name == lower) {
            return rule(target.clone(), number);
        }
        if let Some(parent) = rest.strip_prefix("*.") {
            let Host::Name(name) = Host::parse(parent)? else {
                return None;
            };
            return rule(RuleTarget::Below(format!(".{name}")), number);
        }
        if let Some((address, prefix)) = rest.split_once('/') {
            let (address, prefix) = match address.strip_prefix('[') {
                Some(address) => (address, prefix.strip_suffix(']')?),
                None => (address, prefix),
            };
            let is_number = prefix.bytes().all(|byte| byte.is_ascii_digit());
            let prefix = prefix.parse().ok().filter(|_| is_number)?;
            let network = Network::new(address.parse().ok()?, prefix)?;
            return rule(RuleTarget::Network(network), number);
        }
        match Host::parse(rest)? {
            Host::Name(name) => rule(RuleTarget::Name(name), number),
            Host::Address(address) => rule(RuleTarget::Network(Network::only(address)), number),
        }
    }

    /// As written.
    pub fn text(&self) -> &str {
        &self.text
    }

    fn is_about(&self, port: u16) -> bool {
        self.port.is_none_or(|own| own == port)
    }

    fn has_name(&self, name: &str) -> bool {
        let is_listed = |rule: &str| match rule.strip_prefix('*') {
            Some(end) => name.ends_with(end),
            None => name == rule,
        };
        match &self.target {
            RuleTarget::Name(own) => own == name,
            RuleTarget::Below(end) => name.len() > end.len() && name.ends_with(end.as_str()),
            RuleTarget::Kind(_, names) | RuleTarget::Names(names) => {
                names.iter().any(|own| is_listed(own))
            }
            RuleTarget::Network(_) => false,
        }
    }

    fn has_address(&self, address: Address) -> bool {
        match &self.target {
            RuleTarget::Network(network) => network.contains(address),
            RuleTarget::Kind(kind, _) => Kind::of(address) == Some(*kind),
            RuleTarget::Name(_) | RuleTarget::Below(_) | RuleTarget::Names(_) => false,
        }
    }

    /// Whether it names what is closed otherwise: addresses of a kind. A range that happens to hold them does not.
    fn opens(&self, kind: Kind) -> bool {
        match &self.target {
            RuleTarget::Network(network) => kind.covers(*network),
            RuleTarget::Kind(own, _) => *own == kind,
            RuleTarget::Name(_) | RuleTarget::Below(_) | RuleTarget::Names(_) => false,
        }
    }

    /// Whether it names this address alone.
    fn is_only(&self, address: Address) -> bool {
        matches!(&self.target, RuleTarget::Network(network) if *network == Network::only(address))
    }

    /// Whether everything that it is about is something that another is about.
    fn is_within(&self, other: &Self) -> bool {
        if other.port.is_some() && other.port != self.port {
            return false;
        }
        let listed = |names: &[&str]| {
            names
                .iter()
                .all(|name| Self::parse(name).is_some_and(|rule| rule.is_within_names_of(other)))
        };
        match &self.target {
            RuleTarget::Network(own) => match &other.target {
                RuleTarget::Network(network) => own.is_within(*network),
                RuleTarget::Kind(kind, _) => kind.covers(*own),
                RuleTarget::Name(_) | RuleTarget::Below(_) | RuleTarget::Names(_) => false,
            },
            RuleTarget::Kind(kind, _) => {
                matches!(&other.target, RuleTarget::Kind(other, _) if other == kind)
            }
            RuleTarget::Names(names) => listed(names),
            RuleTarget::Name(_) | RuleTarget::Below(_) => self.is_within_names_of(other),
        }
    }

    /// The same for a rule about one name, or those below one.
    fn is_within_names_of(&self, other: &Self) -> bool {
        let within = |own: &str| match &self.target {
            RuleTarget::Below(end) => own.strip_prefix('*').is_some_and(|own| end.ends_with(own)),
            RuleTarget::Name(name) => match own.strip_prefix('*') {
                Some(own) => name.ends_with(own),
                None => name == own,
            },
            _ => false,
        };
        match &other.target {
            RuleTarget::Name(name) => within(name),
            RuleTarget::Below(end) => within(&format!("*{end}")),
            RuleTarget::Kind(_, names) | RuleTarget::Names(names) => {
                names.iter().any(|own| within(own))
            }
            RuleTarget::Network(_) => false,
        }
    }
}

/// Whether a connection may be made, and which rule says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    pub is_allowed: bool,
    /// The rule as written, or a word for what has no rule.
    pub rule: String,
}

impl Verdict {
    /// A connection that may be made.
    pub fn allowed(rule: &str) -> Self {
        Self {
            is_allowed: true,
            rule: rule.to_owned(),
        }
    }

    /// A connection that may not be made.
    pub fn refused(rule: &str) -> Self {
        Self {
            is_allowed: false,
            rule: rule.to_owned(),
        }
    }
}

/// What decides about connections.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    /// What is reached; `None` for everything that is not denied.
    pub allow: Option<Vec<Rule>>,
    /// What is not reached in any case.
    pub deny: Vec<Rule>,
}

/// The word for what no rule allows.
const NOT_LISTED: &str = "not in allow";

impl Rules {
    /// Bytes in memory, approximately: a rule has its text, and a part of it again.
    pub fn size(&self) -> usize {
        let rules = self.allow.iter().flatten().chain(&self.deny);
        rules
            .map(|rule| size_of::<Rule>() + 2 * rule.text.len())
            .sum()
    }

    /// Decides about a name before it is looked up, so that nobody is asked about a name that is not allowed.
    pub fn judge_name(&self, name: &str, port: u16) -> Verdict {
        let is_about = |rule: &Rule| rule.is_about(port);
        self.judge(name, is_about, is_about)
    }

    /// Decides about a name whose port is not known yet: whether any port of it may be allowed.
    pub fn judge_look_up(&self, name: &str) -> Verdict {
        self.judge(name, |deny| deny.port.is_none(), |_| true)
    }

    /// Decides about a name by the rules of each list that are about what is asked for.
    fn judge(
        &self,
        name: &str,
        is_denied: impl Fn(&Rule) -> bool,
        is_allowed: impl Fn(&Rule) -> bool,
    ) -> Verdict {
        let mut deny = self.deny.iter();
        if let Some(rule) = deny.find(|rule| is_denied(rule) && rule.has_name(name)) {
            return Verdict::refused(&rule.text);
        }
        let Some(allow) = &self.allow else {
            return Verdict::allowed("open");
        };
        let mut allow = allow.iter();
        match allow.find(|rule| is_allowed(rule) && rule.has_name(name)) {
            Some(rule) => Verdict::allowed(&rule.text),
            None => Verdict::refused(NOT_LISTED),
        }
    }

    /// Decides about an address: one that was asked for, or one of an allowed name. `is_own` tells that it leads to the
    /// machine.
    pub fn judge_address(&self, address: Address, port: u16, is_own: bool, named: bool) -> Verdict {
        let all = address.with_embedded();
        let has_it = |rule: &&Rule| {
            rule.is_about(port) && all.clone().any(|address| rule.has_address(address))
        };
        let is_of_machine = |rule: &&Rule| {
            is_own
                && rule.is_about(port)
                && matches!(rule.target, RuleTarget::Kind(Kind::Machine, _))
        };
        let mut deny = self.deny.iter();
        if let Some(rule) = deny.find(|rule| has_it(rule) || is_of_machine(rule)) {
            return Verdict::refused(&rule.text);
        }
        let Some(allow) = &self.allow else {
            return Verdict::allowed("open");
        };
        let mut open = allow.iter().filter(|rule| rule.is_about(port));
        for address in all.clone() {
            if let Some(kind) = Kind::of(address)
                && !open
                    .clone()
                    .any(|rule| rule.opens(kind) && rule.has_address(address))
            {
                return Verdict::refused(kind.rule());
            }
        }
        // Rules for the machine were asked above, if the address is of its kind.
        let is_open = |address| {
            Kind::of(address) == Some(Kind::Machine)
                || open.clone().any(|rule| rule.is_only(address))
        };
        if is_own && !all.clone().any(is_open) {
            return Verdict::refused(Kind::Machine.rule());
        }
        match open.find(has_it) {
            Some(rule) => Verdict::allowed(&rule.text),
            // The name was allowed, and its address is nobody's but the public's.
            None if named => Verdict::allowed("name"),
            None => Verdict::refused(NOT_LISTED),
        }
    }

    /// The first of its rules that allows something which others do not allow; `Err` without a rule if that is
    /// everything.
    ///
    /// # Errors
    /// As said.
    pub fn check_within(&self, others: &Self) -> Result<(), Option<&Rule>> {
        let Some(wider) = &others.allow else {
            return Ok(());
        };
        let own = self.allow.as_ref().ok_or(None)?;
        let is_wider = |rule: &&Rule| !wider.iter().any(|other| rule.is_within(other));
        own.iter()
            .find(is_wider)
            .map_or(Ok(()), |rule| Err(Some(rule)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(allow: &[&str], deny: &[&str]) -> Rules {
        let parse = |texts: &[&str]| {
            texts
                .iter()
                .map(|text| Rule::parse(text).unwrap())
                .collect()
        };
        Rules {
            allow: Some(parse(allow)),
            deny: parse(deny),
        }
    }

    fn is_reached(rules: &Rules, host: &str, port: u16) -> bool {
        let verdict = match Host::parse(host).unwrap() {
            Host::Name(name) => rules.judge_name(&name, port),
            Host::Address(address) => rules.judge_address(address, port, false, false),
        };
        verdict.is_allowed
    }

    #[test]
    fn hosts_are_names_or_addresses() {
        let name = |text: &str| Some(Host::Name(text.to_owned()));
        assert_eq!(Host::parse("Example.COM."), name("example.com"));
        for text in ["_sip.x-1", "0.a", "7f000001", "0x7g", "1.0y1", "x0"] {
            assert_eq!(Host::parse(text), name(text));
        }
        let address = |text: &str| Some(Host::Address(text.parse::<IpAddr>().unwrap().into()));
        assert_eq!(Host::parse("[::1]"), address("::1"));
        assert_eq!(Host::parse("1.2.3.4"), address("1.2.3.4"));
        for (written, shown) in [
            ("[::ffff:1.2.3.4]", "1.2.3.4"),
            ("0.0.0.0", "127.0.0.1"),
            ("[::]", "[::1]"),
        ] {
            assert_eq!(Host::parse(written).unwrap().to_string(), shown);
        }
        for text in [
            "",
            ".",
            "a..b",
            "a b",
            "a/b",
            "a@b",
            "[1.2.3.4]",
            "[::1",
            "é.fr",
            "a\0",
            // Names that programs take for addresses, and addresses with a zone.
            "0",
            "0.",
            "0x",
            "0X0",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0177.0.0.1",
            "127.0.0.01",
            "127.0.0.1.",
            "300.1.1.1",
            "a.9",
            "a.0Xa.",
            "[::1%1]",
            "fe80::1%lo",
            &"a".repeat(64),
        ] {
            assert_eq!(Host::parse(text), None, "{text}");
        }
        let parsed = |text: &str| host_and_port(text).map(|(host, port)| (host.to_string(), port));
        let shown = |host: &str, port| Some((host.to_owned(), port));
        assert_eq!(parsed("a.b:80"), shown("a.b", Some(80)));
        assert_eq!(parsed("[::1]:80"), shown("[::1]", Some(80)));
        assert_eq!(parsed("[::1]"), shown("[::1]", None));
        for text in [
            "a:0", "a:65536", "a:+1", "a:", "[::1]80", "a:b:80", ":80", "::1:80x",
        ] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for text in [
            "",
            "*",
            "*.",
            "*.*.com",
            "a.*.com",
            "10.0.0.0/33",
            "10.0.0.0/-1",
            "10.0.0/8",
            "@none",
            "a:0",
            "a:x",
            "http://a",
            "a/24",
            "*.1.2.3.4",
            "[fd00::/8",
            "::/0:80",
            "300.1.1.1",
            "*.1",
            "0:80",
            "0x7f000001",
            "127.1/8",
        ] {
            assert_eq!(Rule::parse(text), None, "{text}");
        }
        // What is kept of a rule has a bound, however it is written.
        for (start, end) in [
            ("a.example:", "80"),
            ("10.0.0.0/", "8"),
            ("fd00::/", "8"),
            ("10.0.0.0/8:", "80"),
        ] {
            let text = |zeros| format!("{start}{}{end}", "0".repeat(zeros));
            assert!(Rule::parse(&text(2)).is_some(), "{start}");
            assert_eq!(Rule::parse(&text(300)), None, "{start}");
        }
        let name = [["a"; 31].join("").as_str(); 8].join(".")[..251].to_owned();
        assert!(Rule::parse(&format!("*.{name}.:65535")).is_some());
        for text in [
            "fd00::/8",
            "[fd00::/8]:80",
            "[::1]:80",
            "::1",
            "10.0.0.0/8:443",
            "@private:22",
            "A.b:443",
        ] {
            assert_eq!(Rule::parse(text).unwrap().text(), text);
        }
    }

    #[test]
    fn names_are_matched_whole() {
        let rules = rules(
            &[
                "example.com",
                "*.example.org",
                "git.example.net:443",
                "@pypi",
            ],
            &["bad.example.org"],
        );
        for (host, port, expected) in [
            ("example.com", 80, true),
            ("EXAMPLE.com.", 80, true),
            ("www.example.com", 80, false),
            ("notexample.com", 80, false),
            ("a.example.org", 80, true),
            ("a.b.example.org", 80, true),
            ("example.org", 80, false),
            ("evilexample.org", 80, false),
            ("bad.example.org", 80, false),
            ("git.example.net", 443, true),
            ("git.example.net", 80, false),
            ("pypi.org", 443, true),
            ("files.pythonhosted.org", 443, true),
            ("example.com.evil.net", 80, false),
            ("1.1.1.1", 80, false),
        ] {
            assert_eq!(is_reached(&rules, host, port), expected, "{host}:{port}");
        }
    }

    #[test]
    fn what_is_not_public_must_be_named() {
        let all = rules(&["0.0.0.0/0", "::/0"], &[]);
        for host in [
            "127.0.0.1",
            "10.0.0.1",
            "169.254.169.254",
            "[::1]",
            "[fd00:ec2::254]",
            "[::ffff:10.0.0.1]",
            "[64:ff9b::a9fe:a9fe]",
            "[2002:7f00:1::]",
            "0.0.0.0",
            "[fe80::1]",
        ] {
            assert!(!is_reached(&all, host, 80), "{host}");
        }
        assert!(is_reached(&all, "1.1.1.1", 80));
        assert!(is_reached(&all, "[64:ff9b::101:101]", 80));
        let named = rules(
            &["10.1.0.0/16:5432", "127.0.0.1:8080", "169.254.169.254"],
            &[],
        );
        for (host, port, expected) in [
            ("10.1.9.9", 5432, true),
            ("10.1.9.9", 80, false),
            ("10.2.0.1", 5432, false),
            ("127.0.0.1", 8080, true),
            ("[::ffff:127.0.0.1]", 8080, true),
            ("127.0.0.1", 80, false),
            ("169.254.169.254", 80, true),
            ("169.254.169.253", 80, false),
        ] {
            assert_eq!(is_reached(&named, host, port), expected, "{host}:{port}");
        }
        let private = rules(&["@private"], &[]);
        assert!(is_reached(&private, "192.168.1.1", 80));
        assert!(!is_reached(&private, "169.254.169.254", 80));
        assert!(!is_reached(&private, "127.0.0.1", 80));
        let local = rules(&["localhost:80"], &[]);
        assert!(is_reached(&local, "localhost", 80) && is_reached(&local, "127.0.0.1", 80));
        assert!(!is_reached(&local, "localhost", 81) && !is_reached(&local, "10.0.0.1", 80));
        assert!(is_reached(&local, "LOCALHOST.", 80) && is_reached(&local, "ip6-localhost", 80));
    }

    #[test]
    fn rules_and_destinations_have_one_form() {
        let loopback = ["127.0.0.1", "0.0.0.0", "[::ffff:127.0.0.1]", "[::ffff:0:0]"];
        for rule in [
            "127.0.0.1",
            "0.0.0.0",
            "0.0.0.0/8",
            "::ffff:0.0.0.0",
            "::ffff:127.0.0.0/104",
        ] {
            let (allowed, denied) = (
                rules(&[rule], &[]),
                Rules {
                    allow: None,
                    deny: rules(&[], &[rule]).deny,
                },
            );
            for host in loopback {
                assert!(is_reached(&allowed, host, 80), "{rule} {host}");
                assert!(!is_reached(&denied, host, 80), "{rule} {host}");
            }
            for host in ["[::]", "[::1]", "10.0.0.1"] {
                assert!(!is_reached(&allowed, host, 80), "{rule} {host}");
                assert!(is_reached(&denied, host, 80), "{rule} {host}");
            }
        }
        // Through a translator.
        let denied = Rules {
            allow: None,
            deny: rules(&[], &["127.0.0.0/8"]).deny,
        };
        for host in ["[64:ff9b::7f00:1]", "[64:ff9b::]", "[::127.0.0.1]"] {
            assert!(!is_reached(&denied, host, 80), "{host}");
        }
        // The machine's own address is named by a rule for it alone, even where a translator leads to it.
        let own = |allow: &[&str], address: &str| {
            let address: IpAddr = address.parse().unwrap();
            let judged = rules(allow, &[]).judge_address(address.into(), 80, true, false);
            judged.is_allowed
        };
        let translated = "64:ff9b::203.0.113.1";
        assert!(!own(&["203.0.113.0/24"], "203.0.113.1"));
        assert!(!own(&["203.0.113.0/24", "64:ff9b::/96"], translated));
        assert!(own(&["203.0.113.1"], "203.0.113.1") && own(&["203.0.113.1"], translated));
    }

    /// An allowed name that leads to what is not public (DNS rebinding).
    #[test]
    fn the_address_of_an_allowed_name_is_judged_too() {
        let rules = rules(&["example.com", "10.1.0.0/16"], &["192.0.2.0/24"]);
        let judge = |address: &str, is_own| {
            rules
                .judge_address(address.parse::<IpAddr>().unwrap().into(), 80, is_own, true)
                .is_allowed
        };
        assert!(judge("1.1.1.1", false));
        assert!(judge("10.1.2.3", false));
        for address in [
            "127.0.0.1",
            "169.254.169.254",
            "10.2.0.1",
            "192.0.2.9",
            "::ffff:192.0.2.9",
        ] {
            assert!(!judge(address, false), "{address}");
        }
        // An address of the machine, whatever range it is from.
        assert!(!judge("1.1.1.1", true) && !judge("10.1.2.3", true));
    }

    #[test]
    fn all_addresses_of_the_machine_are_denied_by_its_name() {
        let open = Rules {
            allow: None,
            deny: rules(&[], &["localhost:80"]).deny,
        };
        let judge = |port, is_own| {
            let address = IpAddr::from([203, 0, 113, 7]).into();
            open.judge_address(address, port, is_own, false).is_allowed
        };
        assert!(!judge(80, true));
        assert!(judge(80, false) && judge(81, true));
    }

    #[test]
    fn everything_but_what_is_denied() {
        let open = Rules {
            allow: None,
            deny: rules(&[], &["@private", "evil.example", "127.0.0.0/8:22"]).deny,
        };
        for (host, port, expected) in [
            ("example.com", 80, true),
            ("evil.example", 80, false),
            ("10.0.0.1", 80, false),
            ("[64:ff9b::a00:1]", 80, false),
            ("127.0.0.1", 22, false),
            ("127.0.0.1", 80, true),
            ("169.254.169.254", 80, true),
        ] {
            assert_eq!(is_reached(&open, host, port), expected, "{host}:{port}");
        }
    }

    #[test]
    fn tightening_names_no_more_than_the_ceiling() {
        let ceiling = rules(
            &[
                "example.com",
                "*.example.org:443",
                "@github",
                "10.0.0.0/8",
                "@cloud-metadata",
            ],
            &[],
        );
        let wider = |allow: &[&str]| {
            let own = rules(allow, &[]);
            own.check_within(&ceiling)
                .err()
                .map(|rule| rule.unwrap().text().to_owned())
        };
        let narrow = [
            "example.com:443",
            "a.example.org:443",
            "*.a.example.org:443",
            "api.github.com",
            "*.github.com",
            "10.2.0.0/16",
            "10.0.0.1:80",
            "169.254.169.254",
            "@github:443",
        ];
        assert_eq!(wider(&narrow), None);
        for text in [
            "*.example.com",
            "a.example.org",
            "example.org:443",
            "*.example.org",
            "@pypi",
            "11.0.0.0/8",
            "0.0.0.0/0",
            "@private",
            "*.org:443",
        ] {
            assert_eq!(wider(&["example.com", text]).as_deref(), Some(text));
        }
        let open = Rules::default();
        assert_eq!(open.check_within(&ceiling), Err(None));
        assert_eq!(ceiling.check_within(&open), Ok(()));
        assert_eq!(open.check_within(&open), Ok(()));
    }
}
