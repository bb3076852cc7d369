//! The environment, read once and turned into a valid [`Config`].
//!
//! The server checks every variable at start, including those of the other mode, so that a typing error
//! is found by the person who made it. No other module reads settings from the environment. `table`
//! lists the variables, `token` makes and reads tokens, `origins` parses web origins.

mod origins;
mod table;
mod token;

use std::cell::Cell;
use std::ffi::OsString;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use crate::logging;
use crate::spec::isolation::DefaultIsolation;
use crate::spec::network::NetworkPolicy;
use crate::sys::IDS_OF_SANDBOX;
use table::{Variable, decimal};
pub use token::{MadeToken, Secret};

#[derive(Debug, Clone)]
pub struct Config {
    /// The address to listen on; port 0 stands for any free one.
    pub listen: SocketAddr,
    /// The token that opens the API; without one the API is open.
    pub token: Option<Secret>,
    /// The same token if the server made it, to show to the operator.
    pub made_token: Option<MadeToken>,
    /// The file that the token was read from.
    pub token_file: Option<PathBuf>,
    /// Origins whose browser pages may call the API, as browsers send them in `Origin`.
    pub allowed_origins: Vec<String>,
    /// Serves only programs of this machine: there is no token, and none is asked of others.
    pub is_local: bool,
    /// Time without work until the server exits; `None` means never.
    pub idle_timeout: Option<Duration>,
    /// Bytes of output kept per process.
    pub log_bytes: usize,
    /// Bytes of output kept for all processes.
    pub log_total_bytes: usize,
    /// Most interpreter contexts of a workspace.
    #[cfg(feature = "interpreter")]
    pub contexts: usize,
    /// The doors that the operator may close.
    pub doors: Doors,
    /// Further templates that clients of E2B may name; `*` is any.
    #[cfg(feature = "e2b")]
    pub e2b_templates: Vec<String>,
    /// Silence on a stream before a `ping`.
    pub ping_interval: Duration,
    /// Maximum number of connections.
    pub max_connections: usize,
    /// Logs one line per request.
    pub log_requests: bool,
    /// What commands reach over the network: on a host those of sandboxes that choose nothing else.
    pub network: NetworkPolicy,
    /// Settings of host mode; `None` selects dedicated mode.
    pub host: Option<HostSettings>,
    /// Refuses the host token on a sandbox's own routes.
    pub strict_scopes: bool,
}

/// Doors that are open unless the operator closes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Doors {
    /// That for clients of the Model Context Protocol.
    #[cfg(feature = "mcp")]
    pub mcp: bool,
    /// That for browsers: the console.
    #[cfg(feature = "console")]
    pub console: bool,
}

/// Settings of host mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSettings {
    /// Maximum number of sandboxes.
    pub capacity: usize,
    /// Directory of the homes, an absolute path.
    pub homes: PathBuf,
    /// Whether sandboxes outlive the server.
    pub keep: bool,
    /// How many homes and records of no sandbox may be put aside.
    pub max_aside: usize,
    /// How long a sandbox may be paused; `None` for as long as it takes.
    pub paused_limit: Option<Duration>,
    /// How long it may be stopped.
    pub stopped_limit: Option<Duration>,
    /// User ids of the sandboxes, which are their group ids too.
    pub users: RangeInclusive<u32>,
    /// Lowest Landlock ABI of the kernel to start with.
    pub min_landlock_abi: u32,
    /// Starts without some isolation layers.
    pub allow_unconfined: bool,
    /// Directories with the files that name devices.
    pub cdi: Vec<PathBuf>,
    /// TCP ports that sandboxes can be given; `None` for none.
    pub tcp_ports: Option<RangeInclusive<u16>>,
    /// What sandboxes with a root of their own are made of.
    pub roots: RootSettings,
    pub snapshots: SnapshotSettings,
    /// The isolation of sandboxes that choose none.
    pub isolation: DefaultIsolation,
    /// The file with the host's token.
    pub token_file: Option<PathBuf>,
}

/// Where a host has its snapshots, and their bounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotSettings {
    /// An absolute path; `None` for a place among the homes.
    pub directory: Option<PathBuf>,
    /// Most bytes of all of them together.
    pub bytes: u64,
    /// Most of them.
    pub most: usize,
}

impl Default for SnapshotSettings {
    fn default() -> Self {
        Self {
            directory: None,
            bytes: u64::MAX,
            most: usize::MAX,
        }
    }
}

/// What a host is told about roots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootSettings {
    /// Directories and archives of the machine, by the names of templates.
    pub templates: Vec<(String, PathBuf)>,
    /// The template of sandboxes that choose none.
    pub default: Option<String>,
    /// Where the blocks of ids are.
    pub ids: RangeInclusive<u32>,
}

impl Default for RootSettings {
    fn default() -> Self {
        Self {
            templates: Vec::new(),
            default: None,
            ids: 1_000_000..=4_000_000_000,
        }
    }
}

/// Why the settings cannot be used: the variable, its value, and what it accepts.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigError(String);

impl fmt::Display for ConfigError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl Config {
    /// Reads and checks every variable, and the file of `SBX_TOKEN_FILE`.
    ///
    /// # Errors
    /// A value that is not accepted, or an unsafe combination.
    pub fn from_variables(variables: &Variables) -> Result<Self, ConfigError> {
        let is_host = variables.flag(&table::HOST_MODE);
        let host = variables.host_settings();
        let insecure = variables.flag(&table::INSECURE);
        let bind = variables.read_if_set(&table::BIND, |text| text.parse().ok());
        let (token, made_token) = variables.token();
        let token_file = variables
            .get(&table::TOKEN_FILE)
            .filter(|_| made_token.is_none())
            .map(PathBuf::from);
        let address = bind.unwrap_or(IpAddr::V4(match token {
            Some(_) => Ipv4Addr::UNSPECIFIED,
            None => Ipv4Addr::LOCALHOST,
        }));
        let origins = variables.read_if_set(&table::ALLOWED_ORIGINS, origins::parse);
        let idle_timeout = variables.number_if_set(&table::IDLE_TIMEOUT);
        let config = Self {
            is_local: token.is_none() && !insecure,
            listen: SocketAddr::new(address, variables.number(&table::PORT)),
            token,
            made_token,
            token_file,
            allowed_origins: origins.unwrap_or_default(),
            idle_timeout: idle_timeout
                .filter(|seconds| *seconds > 0)
                .map(Duration::from_secs),
            log_bytes: variables.number(&table::LOG_BYTES),
            log_total_bytes: variables.number(&table::LOG_TOTAL_BYTES),
            #[cfg(feature = "interpreter")]
            contexts: variables.number(&table::CONTEXTS),
            doors: Doors {
                #[cfg(feature = "mcp")]
                mcp: variables.flag(&table::MCP),
                #[cfg(feature = "console")]
                console: variables.flag(&table::CONSOLE),
            },
            #[cfg(feature = "e2b")]
            e2b_templates: variables
                .read_if_set(&table::E2B_TEMPLATES, templates)
                .unwrap_or_default(),
            ping_interval: Duration::from_secs(variables.number(&table::PING_SECS)),
            max_connections: variables.number(&table::MAX_CONNECTIONS),
            log_requests: variables.read(&table::LOG, |text| match text {
                "info" => Some(false),
                "debug" => Some(true),
                _ => None,
            }),
            network: variables.read(&table::NETWORK, NetworkPolicy::named),
            host: is_host.then_some(host),
            strict_scopes: variables.flag(&table::STRICT_SCOPES),
        };
        variables.check()?;
        if config.token.is_none() && !insecure {
            let hint = "set SBX_TOKEN, or SBX_INSECURE=1 to allow it";
            if !address.is_loopback() {
                return Err(ConfigError(format!(
                    "SBX_BIND={address}: anyone who reaches this address could run commands; {hint}"
                )));
            }
            if is_host {
                return Err(ConfigError(format!(
                    "SBX_HOST_MODE=1: every sandbox could manage all others; {hint}"
                )));
            }
        }
        Ok(config)
    }
}

/// Names of templates: what E2B accepts as one, and `*`.
#[cfg(feature = "e2b")]
fn templates(text: &str) -> Option<Vec<String>> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    let name = |name: &str| name == "*" || (!name.is_empty() && name.chars().all(is_plain));
    let entry = |entry: &str| {
        let (own, template) = entry.split_once('=').unzip();
        let is_template = template.is_none_or(|template| template != "*" && name(template));
        (name(own.unwrap_or(entry)) && is_template).then(|| entry.to_owned())
    };
    text.split(',').map(entry).collect()
}

/// The port of the server, which `sbx-server health` asks.
///
/// # Errors
/// `SBX_PORT` is not accepted.
pub fn port(variables: &Variables) -> Result<u16, ConfigError> {
    let port = variables.number(&table::PORT);
    variables.check()?;
    Ok(port)
}

/// The text of `--help`.
pub fn help() -> String {
    format!(
        "\
sbx-server: turns the machine it starts on into a sandbox, driven over HTTP

usage: sbx-server            serve until idle or told to stop
       sbx-server --init     the same, and reap orphans even when not PID 1
       sbx-server health     exit 0 if the server on this machine answers
       sbx-server --help | --version | --licenses

environment [default]:
{}
",
        table::help()
    )
}

/// The variables of the environment that begin with `SBX_`. Reading one that is refused gives the default, and
/// [`Variables::check`] says so afterwards: a way out of the middle of the settings for each would be 5 KB of code.
pub struct Variables {
    all: Vec<(String, String)>,
    /// The first refusal.
    refused: Cell<Option<ConfigError>>,
}

impl Variables {
    /// Selects from `environment`. Other variables may hold any bytes; in these, bytes that are not
    /// UTF-8 become U+FFFD, which only paths accept.
    pub fn new(environment: &[(OsString, OsString)]) -> Self {
        let text = |bytes: &OsString| bytes.to_string_lossy().into_owned();
        let all = environment.iter();
        let own = all.filter(|(name, _)| name.as_encoded_bytes().starts_with(b"SBX_"));
        Self {
            all: own.map(|(name, value)| (text(name), text(value))).collect(),
            refused: Cell::new(None),
        }
    }

    /// A warning for each variable that has no effect. Values are left out: they may be secrets.
    pub fn warnings(&self) -> impl Iterator<Item = String> {
        let unknown = self.all.iter().filter(|(name, _)| !table::is_known(name));
        unknown.map(|(name, _)| {
            let shown = logging::quoted(name.as_bytes());
            match (table::feature_of(name), table::nearest(name)) {
                (Some(feature), _) => {
                    format!("{shown} is ignored: this build is without the feature {feature}")
                }
                (None, Some(near)) => format!("{shown} is not known; did you mean {near}?"),
                (None, None) => format!("{shown} is not known; it is ignored"),
            }
        })
    }

    fn get(&self, variable: &Variable) -> Option<&str> {
        let mut all = self.all.iter();
        all.find(|(name, _)| name == variable.name)
            .map(|(_, value)| value.as_str())
    }

    /// Whether all that was read is accepted.
    ///
    /// # Errors
    /// The first refusal.
    fn check(&self) -> Result<(), ConfigError> {
        self.refused.take().map_or(Ok(()), Err)
    }

    fn refuse(&self, error: ConfigError) {
        let first = self.refused.take().unwrap_or(error);
        self.refused.set(Some(first));
    }

    /// Parses the value, or the default if the variable is not set.
    fn read<T>(&self, variable: &Variable, parse: impl Fn(&str) -> Option<T>) -> T {
        self.read_if_set(variable, &parse)
            .unwrap_or_else(|| parse(variable.default).expect("it accepts its default"))
    }

    /// Parses the value; `None` if the variable is not set.
    fn read_if_set<T>(&self, variable: &Variable, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let text = self.get(variable)?;
        let value = parse(text);
        if value.is_none() {
            self.refuse(variable.refuse(text));
        }
        value
    }

    fn number<T: TryFrom<u64>>(&self, variable: &Variable) -> T {
        self.read(variable, |text| variable.number(text))
    }

    fn number_if_set<T: TryFrom<u64>>(&self, variable: &Variable) -> Option<T> {
        self.read_if_set(variable, |text| variable.number(text))
    }

    fn flag(&self, variable: &Variable) -> bool {
        self.read(variable, |text| match text {
            "0" => Some(false),
            "1" => Some(true),
            _ => None,
        })
    }

    /// The host's token, and the same again if the server made it.
    fn token(&self) -> (Option<Secret>, Option<MadeToken>) {
        self.read_token().unwrap_or_else(|error| {
            self.refuse(error);
            (None, None)
        })
    }

    fn read_token(&self) -> Result<(Option<Secret>, Option<MadeToken>), ConfigError> {
        let file = self.read_if_set(&table::TOKEN_FILE, |path| {
            (!path.is_empty()).then(|| PathBuf::from(path))
        });
        let token = match (self.get(&table::TOKEN), file) {
            (None, None) => return Ok((None, None)),
            (None, Some(file)) => token::read(&file)?,
            (Some("auto"), file) => {
                let made = MadeToken::new(file)?;
                return Ok((Some(made.token.clone()), Some(made)));
            }
            (Some(""), _) => return Err(table::TOKEN.refuse("")),
            // The value may be most of a secret, so the error does not show it.
            (Some(text), _) if !token::is_token(text.as_bytes()) => {
                return Err(table::TOKEN.refuse("(secret)"));
            }
            (Some(_), Some(_)) => {
                let text = "SBX_TOKEN_FILE: not accepted together with a token in SBX_TOKEN; \
                            unset one of them, or set SBX_TOKEN=auto to write the file";
                return Err(ConfigError(text.to_owned()));
            }
            (Some(text), None) => Secret::new(text),
        };
        Ok((Some(token), None))
    }

    fn host_settings(&self) -> HostSettings {
        HostSettings {
            capacity: self.number_if_set(&table::CAPACITY).unwrap_or(usize::MAX),
            // PATH contains the homes, and a colon ends a directory there.
            homes: self.read(&table::HOMES_DIR, |path| {
                (path.starts_with('/') && !path.contains(':')).then(|| path.into())
            }),
            keep: self.flag(&table::KEEP),
            max_aside: self.number(&table::ASIDE_MAX),
            paused_limit: self
                .number_if_set(&table::PAUSED_SECS)
                .map(Duration::from_secs),
            stopped_limit: self
                .number_if_set(&table::STOPPED_SECS)
                .map(Duration::from_secs),
            users: self.read(&table::UID_RANGE, users),
            min_landlock_abi: self.number(&table::MIN_LANDLOCK_ABI),
            allow_unconfined: self.flag(&table::ALLOW_UNCONFINED),
            cdi: self.read(&table::CDI_DIRS, directories),
            tcp_ports: self.read_if_set(&table::TCP_PORT_RANGE, tcp_ports),
            roots: self.root_settings(),
            snapshots: SnapshotSettings {
                directory: self.read_if_set(&table::SNAPSHOTS_DIR, |path| {
                    path.starts_with('/').then(|| path.into())
                }),
                bytes: self
                    .number_if_set(&table::SNAPSHOTS_BYTES)
                    .unwrap_or(u64::MAX),
                most: self
                    .number_if_set(&table::SNAPSHOTS_MAX)
                    .unwrap_or(usize::MAX),
            },
            isolation: self.read(&table::ISOLATION, DefaultIsolation::named),
            token_file: self.get(&table::TOKEN_FILE).map(PathBuf::from),
        }
    }
}

impl Variables {
    fn root_settings(&self) -> RootSettings {
        let templates = self.read_if_set(&table::TEMPLATES, templates_of_roots);
        let templates = templates.unwrap_or_default();
        let is_known = |name: &str| templates.iter().any(|(known, _)| known == name);
        let default = self.read_if_set(&table::TEMPLATE, |name| {
            (is_known(name) || (name == "machine" && cfg!(feature = "file-tools")))
                .then(|| name.to_owned())
        });
        let ids = self.read(&table::ID_BLOCKS, ids);
        RootSettings {
            templates,
            default,
            ids,
        }
    }
}

impl Variable {
    fn refuse(&self, value: &str) -> ConfigError {
        let Self { name, accepts, .. } = self;
        ConfigError(format!(
            "{name}={}: not accepted; it takes {accepts}",
            value.escape_debug()
        ))
    }
}

fn users(text: &str) -> Option<RangeInclusive<u32>> {
    let users = range_from(1, text)?;
    Some((*users.start()).into()..=(*users.end()).into())
}

fn ids(text: &str) -> Option<RangeInclusive<u32>> {
    let (first, last) = text.split_once('-')?;
    let (first, last): (u32, u32) = (decimal(first)?, decimal(last)?);
    // The ids below are those of the machine's users, and the last one is none.
    let is_range = first >= IDS_OF_SANDBOX && last < u32::MAX;
    (is_range && first <= last).then_some(first..=last)
}

/// Names of templates, and what they are made of.
fn templates_of_roots(text: &str) -> Option<Vec<(String, PathBuf)>> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let mut all: Vec<(String, PathBuf)> = Vec::new();
    for pair in text.split(',') {
        let (name, path) = pair.split_once('=')?;
        let is_name = !name.is_empty() && name.len() <= 64 && name.bytes().all(is_plain);
        let is_new = all.iter().all(|(known, _)| known != name);
        if !is_name || !is_new || !path.starts_with('/') {
            return None;
        }
        all.push((name.to_owned(), path.into()));
    }
    Some(all)
}

/// Absolute paths.
fn directories(text: &str) -> Option<Vec<PathBuf>> {
    let all = text.split(',');
    all.map(|path| path.starts_with('/').then(|| path.into()))
        .collect()
}

fn tcp_ports(text: &str) -> Option<RangeInclusive<u16>> {
    // Commands have no right to bind those below.
    range_from(1024, text)
}

/// Parses `FIRST-LAST`, of which the first is `from` or more.
fn range_from(from: u16, text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-')?;
    let [first, last] = [decimal(first)?, decimal(last)?];
    (from <= first && first <= last).then_some(first..=last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::from_variables(&variables(pairs))
    }

    fn variables(pairs: &[(&str, &str)]) -> Variables {
        let environment: Vec<_> = pairs
            .iter()
            .map(|(name, value)| (name.into(), value.into()))
            .collect();
        Variables::new(&environment)
    }

    #[test]
    fn nothing_set_listens_on_loopback() {
        let config = read(&[]).unwrap();
        assert_eq!(config.listen, "127.0.0.1:49983".parse().unwrap());
        assert!(config.token.is_none());
        assert_eq!(config.log_bytes, 4 << 20);
    }

    #[test]
    fn a_token_opens_all_interfaces() {
        assert_eq!(
            read(&[("SBX_TOKEN", "t")]).unwrap().listen,
            "0.0.0.0:49983".parse().unwrap()
        );
    }

    #[test]
    fn beyond_loopback_needs_a_token_or_a_decision() {
        assert!(read(&[("SBX_BIND", "0.0.0.0")]).is_err());
        assert!(read(&[("SBX_BIND", "0.0.0.0"), ("SBX_INSECURE", "1")]).is_ok());
        assert!(read(&[("SBX_BIND", "127.0.0.2")]).is_ok());
    }

    #[test]
    fn every_bad_value_names_its_variable() {
        for (name, value) in [
            ("SBX_PORT", "65536"),
            ("SBX_PORT", ""),
            ("SBX_PORT", "+1"),
            ("SBX_BIND", "localhost"),
            ("SBX_TOKEN", ""),
            ("SBX_IDLE_TIMEOUT", "1.5"),
            ("SBX_IDLE_TIMEOUT", "-1"),
            ("SBX_HOST_MODE", "yes"),
            ("SBX_CAPACITY", "0"),
            ("SBX_HOMES_DIR", "homes"),
            ("SBX_UID_RANGE", "3-2"),
            ("SBX_UID_RANGE", "1-65536"),
            ("SBX_LOG_BYTES", "4k"),
            ("SBX_PING_SECS", "0"),
            ("SBX_MAX_CONNECTIONS", "0"),
            ("SBX_LOG", "loud"),
        ] {
            let ConfigError(text) = read(&[(name, value)]).unwrap_err();
            assert!(text.starts_with(&format!("{name}={value}")), "{text}");
        }
    }

    #[test]
    fn every_variable_is_read() {
        // No variable accepts the empty value, so one that accepts it has no effect.
        for variable in table::ALL {
            let ConfigError(text) = read(&[(variable.name, "")]).unwrap_err();
            let expected = format!(
                "{}=: not accepted; it takes {}",
                variable.name, variable.accepts
            );
            assert_eq!(text, expected);
        }
    }

    #[test]
    fn help_shows_the_whole_table() {
        let help = help();
        for variable in table::ALL {
            for text in [variable.name, variable.default, variable.meaning] {
                assert!(help.contains(text), "{text}");
            }
            assert!(
                help.contains(&variable.accepts.to_string()),
                "{}",
                variable.name
            );
        }
    }

    #[test]
    fn a_made_token_is_random_and_not_shown() {
        let [first, second] = [(); 2].map(|()| read(&[("SBX_TOKEN", "auto")]).unwrap());
        let token = first.token.as_ref().unwrap().expose();
        assert_eq!(token.len(), 64);
        assert!(token.iter().all(u8::is_ascii_hexdigit));
        assert_ne!(token, second.token.unwrap().expose());
        assert_eq!(first.listen.ip(), Ipv4Addr::UNSPECIFIED);
        let shown = format!("{first:?}");
        assert!(
            !shown.contains(std::str::from_utf8(token).unwrap()),
            "{shown}"
        );
    }

    #[test]
    fn a_token_and_a_file_of_one_contradict_each_other() {
        let ConfigError(text) =
            read(&[("SBX_TOKEN", "hidden"), ("SBX_TOKEN_FILE", "/no/such")]).unwrap_err();
        assert!(
            text.contains("SBX_TOKEN_FILE") && !text.contains("hidden"),
            "{text}"
        );
    }

    #[test]
    fn an_unknown_variable_is_a_warning_without_its_value() {
        let warnings =
            |name| -> Vec<String> { variables(&[(name, "hidden")]).warnings().collect() };
        assert_eq!(
            warnings("SBX_PROT"),
            ["SBX_PROT is not known; did you mean SBX_PORT?"]
        );
        assert_eq!(
            warnings("SBX_WHATEVER"),
            ["SBX_WHATEVER is not known; it is ignored"]
        );
        assert_eq!(
            warnings("SBX_A\nB"),
            ["SBX_A\\nB is not known; it is ignored"]
        );
        let long = "SBX_".to_owned() + &"A".repeat(9999);
        assert!(warnings(&long)[0].len() < 300);
        for known in [
            "SBX_PORT",
            "SBX_MAX_HOSTS",
            "SBX_DL_TOKEN",
            "SBX_SERVER_URL",
            "OTHER",
        ] {
            assert!(warnings(known).is_empty(), "{known}");
        }
    }
}
