//! The environment, read once and turned into a [`Config`] that cannot be wrong.
//!
//! Every variable is validated at start, whether this mode uses it or not, so that a typing error
//! is seen by whoever made it. Nothing else in the program reads the server's environment for
//! settings, and nothing here acts on them.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

/// The variables, their defaults and meanings, as `--help` prints them.
const VARIABLES: &[(&str, &str, &str)] = &[
    (
        "SBX_PORT",
        "49983",
        "listen port; 0 = any free one, printed on the ready line",
    ),
    (
        "SBX_BIND",
        "0.0.0.0 with a token, else 127.0.0.1",
        "listen address; one beyond loopback needs a token or SBX_INSECURE=1",
    ),
    (
        "SBX_TOKEN",
        "unset",
        "when set, everything but /health needs it in X-Sandbox-Token",
    ),
    (
        "SBX_INSECURE",
        "0",
        "1 = allow what is refused for safety: no token beyond loopback, or in host mode",
    ),
    (
        "SBX_IDLE_TIMEOUT",
        "unset",
        "seconds without work after which the server exits 0; 0 or unset = never",
    ),
    (
        "SBX_HOST_MODE",
        "0",
        "1 = host mode: many sandboxes, made and deleted under /v1/sandboxes",
    ),
    (
        "SBX_CAPACITY",
        "unlimited",
        "most sandboxes at once (host mode)",
    ),
    (
        "SBX_HOMES_DIR",
        "/sbx/homes",
        "where homes live (host mode)",
    ),
    (
        "SBX_UID_RANGE",
        "20000-64999",
        "uids for sandboxes (host mode)",
    ),
    (
        "SBX_MIN_LANDLOCK_ABI",
        "6",
        "least Landlock ABI that host mode starts with",
    ),
    (
        "SBX_ALLOW_UNCONFINED",
        "0",
        "1 = start host mode with less, and say so in /health",
    ),
    (
        "SBX_STRICT_SCOPES",
        "0",
        "1 = the host token does not open a sandbox's own routes (host mode)",
    ),
    ("SBX_LOG_BYTES", "4194304", "output kept per process, bytes"),
    (
        "SBX_LOG_TOTAL_BYTES",
        "268435456",
        "output kept for all processes, bytes",
    ),
    (
        "SBX_PING_SECS",
        "15",
        "seconds between keep-alive events on quiet streams",
    ),
    ("SBX_MAX_CONNECTIONS", "4096", "more get 503"),
    ("SBX_LOG", "info", "debug = one more line a request"),
];

/// Where and how the server is to run.
#[derive(Debug, Clone)]
pub struct Config {
    /// The address to listen on; port 0 stands for any free one.
    pub listen: SocketAddr,
    /// The token that opens the API; without one the API is open.
    pub token: Option<Secret>,
    /// How long the server stays without work; `None` is for ever.
    pub idle_timeout: Option<Duration>,
    /// Bytes of output kept per process.
    pub log_bytes: usize,
    /// Bytes of output kept for all processes together.
    pub log_total_bytes: usize,
    /// Silence on a stream after which a `ping` is sent.
    pub ping_interval: Duration,
    /// Connections served at once.
    pub max_connections: usize,
    /// Whether each request is logged.
    pub log_requests: bool,
    /// Settings of host mode; without them the machine is one sandbox.
    pub host: Option<HostSettings>,
    /// Whether the host token does not open a sandbox's own routes.
    pub strict_scopes: bool,
}

/// How a machine holds many sandboxes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSettings {
    /// Most sandboxes at once.
    pub capacity: usize,
    /// Where homes are made, an absolute path.
    pub homes: PathBuf,
    /// The users that sandboxes get; groups have the same numbers.
    pub users: RangeInclusive<u32>,
    /// The least Landlock ABI that will do.
    pub min_landlock_abi: u32,
    /// Whether to go on with less.
    pub allow_unconfined: bool,
}

/// A value that must not be printed.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Keeps `value` out of every log.
    pub fn new(value: impl Into<Vec<u8>>) -> Self {
        Self(value.into())
    }

    /// The bytes, for comparing.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("(secret)")
    }
}

/// A variable that cannot be used; the text names it, its value and what is accepted.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigError(String);

impl fmt::Display for ConfigError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl Config {
    /// Reads and checks every `SBX_*` variable.
    ///
    /// # Errors
    /// The first variable whose value is not accepted, or a combination that would be unsafe.
    pub fn from_variables(variables: BTreeMap<String, String>) -> Result<Self, ConfigError> {
        let variables = Variables(variables);
        let is_host = variables.flag("SBX_HOST_MODE")?;
        let host = variables.host_settings()?;
        let insecure = variables.flag("SBX_INSECURE")?;
        let token = variables.token()?;
        let default_address = if token.is_some() {
            Ipv4Addr::UNSPECIFIED
        } else {
            Ipv4Addr::LOCALHOST
        };
        let address = variables.parsed(
            "SBX_BIND",
            IpAddr::V4(default_address),
            "an IPv4 or IPv6 address",
        )?;
        if token.is_none() && !address.is_loopback() && !insecure {
            return Err(ConfigError(format!(
                "SBX_BIND={address}: anyone who reaches this address could run commands; set SBX_TOKEN, \
                 or SBX_INSECURE=1 to allow it"
            )));
        }
        if token.is_none() && is_host && !insecure {
            return Err(ConfigError(
                "SBX_HOST_MODE=1: every sandbox could manage all others; set SBX_TOKEN, or SBX_INSECURE=1 to allow it"
                    .to_owned(),
            ));
        }
        let port = variables.parsed("SBX_PORT", 49983, "a port from 0 to 65535")?;
        let idle = variables.seconds("SBX_IDLE_TIMEOUT", 0)?;
        let log_bytes = variables.size("SBX_LOG_BYTES", 4 << 20, 4096)?;
        let log_total_bytes = variables.size("SBX_LOG_TOTAL_BYTES", 256 << 20, 4096)?;
        let ping = variables.seconds("SBX_PING_SECS", 15)?;
        if ping.is_zero() {
            return Err(variables.unacceptable(
                "SBX_PING_SECS",
                "a whole number of seconds from 1 to 4294967295",
            ));
        }
        Ok(Self {
            listen: SocketAddr::new(address, port),
            token,
            idle_timeout: (!idle.is_zero()).then_some(idle),
            log_bytes,
            log_total_bytes,
            ping_interval: ping,
            max_connections: variables.size("SBX_MAX_CONNECTIONS", 4096, 1)?,
            log_requests: variables.choice("SBX_LOG", &["info", "debug"])? == "debug",
            host: is_host.then_some(host),
            strict_scopes: variables.flag("SBX_STRICT_SCOPES")?,
        })
    }
}

/// The port that `sbx-server health` asks, by the same rules as the server's own.
///
/// # Errors
/// `SBX_PORT` does not parse.
pub fn port(variables: BTreeMap<String, String>) -> Result<u16, ConfigError> {
    Variables(variables).parsed("SBX_PORT", 49983, "a port from 0 to 65535")
}

/// The text of `--help`.
pub fn help() -> String {
    let mut text = String::from(
        "sbx-server: turns the machine it starts on into a sandbox, driven over HTTP\n\n\
         usage: sbx-server            serve until idle or told to stop\n       \
         sbx-server --init     the same, and be the init of its processes even when not PID 1\n       \
         sbx-server health     exit 0 when the server on this machine answers\n       \
         sbx-server --help | --version\n\n\
         environment:\n",
    );
    for (name, default, meaning) in VARIABLES {
        // Writing to memory does not fail.
        let _ = writeln!(text, "  {name:<22}{meaning} [{default}]");
    }
    text
}

/// The variables as they were found, with the ways to read one.
struct Variables(BTreeMap<String, String>);

impl Variables {
    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn unacceptable(&self, name: &str, accepted: &str) -> ConfigError {
        ConfigError(format!(
            "{name}={}: not accepted; it takes {accepted}",
            self.get(name).unwrap_or_default().escape_debug()
        ))
    }

    fn parsed<T: std::str::FromStr>(
        &self,
        name: &str,
        default: T,
        accepted: &str,
    ) -> Result<T, ConfigError> {
        match self.get(name) {
            None => Ok(default),
            // `"+1"` parses as a number and is no number anybody means.
            Some(text) if text.starts_with('+') => Err(self.unacceptable(name, accepted)),
            Some(text) => text.parse().map_err(|_| self.unacceptable(name, accepted)),
        }
    }

    fn flag(&self, name: &str) -> Result<bool, ConfigError> {
        match self.get(name) {
            None | Some("0") => Ok(false),
            Some("1") => Ok(true),
            Some(_) => Err(self.unacceptable(name, "0 or 1")),
        }
    }

    fn choice<'a>(&self, name: &str, accepted: &[&'a str]) -> Result<&'a str, ConfigError> {
        match self.get(name) {
            None => Ok(accepted[0]),
            Some(text) => accepted
                .iter()
                .find(|choice| **choice == text)
                .copied()
                .ok_or_else(|| self.unacceptable(name, &accepted.join(" or "))),
        }
    }

    fn seconds(&self, name: &str, default: u32) -> Result<Duration, ConfigError> {
        let seconds = self.parsed(
            name,
            default,
            "a whole number of seconds from 0 to 4294967295",
        )?;
        Ok(Duration::from_secs(seconds.into()))
    }

    fn size(&self, name: &str, default: usize, least: usize) -> Result<usize, ConfigError> {
        let accepted = format!("a whole number from {least} up");
        let size = self.parsed(name, default, &accepted)?;
        if size < least {
            Err(self.unacceptable(name, &accepted))
        } else {
            Ok(size)
        }
    }

    fn token(&self) -> Result<Option<Secret>, ConfigError> {
        let Some(token) = self.get("SBX_TOKEN") else {
            return Ok(None);
        };
        // The value is not repeated in the message: it may be most of a secret.
        if token.is_empty() {
            return Err(ConfigError(
                "SBX_TOKEN=: not accepted; it takes a token, or leave it unset".to_owned(),
            ));
        }
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(ConfigError(
                "SBX_TOKEN=(secret): not accepted; it takes printable ASCII characters without spaces".to_owned(),
            ));
        }
        Ok(Some(Secret::new(token)))
    }

    fn host_settings(&self) -> Result<HostSettings, ConfigError> {
        let homes = self.get("SBX_HOMES_DIR").unwrap_or("/sbx/homes");
        if !homes.starts_with('/') || homes.contains(':') {
            // Homes are in PATH, where a colon ends a directory.
            return Err(self.unacceptable("SBX_HOMES_DIR", "an absolute path without colons"));
        }
        Ok(HostSettings {
            capacity: self.size("SBX_CAPACITY", usize::MAX, 1)?,
            homes: homes.into(),
            users: self.users()?,
            min_landlock_abi: self
                .parsed("SBX_MIN_LANDLOCK_ABI", 6u8, "a Landlock ABI number")?
                .into(),
            allow_unconfined: self.flag("SBX_ALLOW_UNCONFINED")?,
        })
    }

    fn users(&self) -> Result<RangeInclusive<u32>, ConfigError> {
        let range = self.get("SBX_UID_RANGE").unwrap_or("20000-64999");
        let number = |text: &str| -> Option<u16> {
            let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse().ok().filter(|uid| is_plain && *uid > 0)
        };
        range
            .split_once('-')
            .and_then(|(first, last)| Some((number(first)?, number(last)?)))
            .filter(|(first, last)| first <= last)
            .map(|(first, last)| first.into()..=last.into())
            .ok_or_else(|| self.unacceptable("SBX_UID_RANGE", "FIRST-LAST, uids from 1 to 65535"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::from_variables(
            pairs
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
        )
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
    fn help_names_every_variable() {
        let help = help();
        for (name, _, _) in VARIABLES {
            assert!(help.contains(name));
        }
    }
}
