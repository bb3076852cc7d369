//! The variables that configure the server: their names, defaults, accepted values and meanings.
//!
//! Each fact is written here once. [`super::Config`] parses values and defaults with this table,
//! `--help` prints it, error messages quote it, and a test compares `docs/configuration.md` with
//! it. A variable is read by its constant, so a name that is not in the table does not compile.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::codec::near;

/// A variable of the server's environment.
pub struct Variable {
    pub name: &'static str,
    /// The value of an unset variable, in the syntax of the environment. For a variable that
    /// [`super::Variables::read_if_set`] reads, it only describes what the server does then.
    pub default: &'static str,
    pub accepts: Accepts,
    pub meaning: &'static str,
}

/// The values that a variable accepts. Its `Display` completes the sentence "it takes ...".
pub enum Accepts {
    /// 0 or 1.
    Flag,
    /// A decimal number without a sign. A range up to `u64::MAX` has no upper limit.
    Number(RangeInclusive<u64>),
    /// Described by the text; the reader of the variable has the parser.
    Text(&'static str),
}

use Accepts::{Flag, Number, Text};

macro_rules! variables {
    ($($(#[$built:meta])? $name:ident = $default:literal, $accepts:expr, $meaning:literal;)*) => {
        $($(#[$built])? pub const $name: Variable = Variable {
            name: concat!("SBX_", stringify!($name)),
            default: $default,
            accepts: $accepts,
            meaning: $meaning,
        };)*

        /// All variables, in the order of `--help`.
        pub const ALL: &[Variable] = &[$($(#[$built])? $name),*];
    };
}

const SECONDS: u64 = u32::MAX as u64;

variables! {
    PORT = "49983", Number(0..=65535),
        "Port to listen on. 0 picks a free port, which the ready line names.";
    BIND = "0.0.0.0 with a token, else 127.0.0.1", Text("an IPv4 or IPv6 address"),
        "Address to listen on. An address other than loopback needs a token or SBX_INSECURE=1.";
    TOKEN = "unset", Text("printable ASCII characters without spaces, or auto"),
        "Token that clients must send. auto makes a random one.";
    TOKEN_FILE = "unset", Text("the path of a file"),
        "File with the token. With SBX_TOKEN=auto the server writes it, otherwise it reads it.";
    ALLOWED_ORIGINS = "unset",
        Text("origins such as https://app.example.com or http://localhost:5173, \
            separated by commas: \
            lower case, no path, no trailing slash, no default port, no *"),
        "Origins whose browser pages may call the API (CORS).";
    INSECURE = "0", Flag,
        "1 allows an address other than loopback, host mode and any host name without a token. \
            Pages of other origins stay refused.";
    IDLE_TIMEOUT = "never", Number(0..=SECONDS),
        "Seconds without work (host mode: without a sandbox) until the server exits. 0 is never.";
    HOST_MODE = "0", Flag,
        "1 selects host mode: many isolated sandboxes on this machine.";
    CAPACITY = "unlimited", Number(1..=u64::MAX),
        "Maximum number of sandboxes (host mode).";
    HOMES_DIR = "/sbx/homes", Text("an absolute path without colons"),
        "Directory of the sandboxes' homes (host mode).";
    KEEP = "1", Flag,
        "Sandboxes outlive the server: the next one at SBX_HOMES_DIR has them again, stopped (host mode).";
    ASIDE_MAX = "16", Number(0..=u64::MAX),
        "Homes and records that belong to no sandbox and are put aside; with more the server does not start (host mode).";
    PAUSED_SECS = "never", Number(1..=SECONDS),
        "Seconds after which a paused sandbox is stopped (host mode).";
    STOPPED_SECS = "never", Number(1..=SECONDS),
        "Seconds after which a stopped sandbox is deleted (host mode).";
    UID_RANGE = "20000-59999", Text("FIRST-LAST, uids from 1 to 65535"),
        "User and group ids of the sandboxes (host mode).";
    MIN_LANDLOCK_ABI = "6", Number(0..=255),
        "Lowest Landlock ABI of the kernel that host mode accepts.";
    ALLOW_UNCONFINED = "0", Flag,
        "1 starts host mode on a kernel without some isolation layers.";
    TEMPLATES = "none", Text("NAME=PATH pairs separated by commas: names of letters, digits, . _ -, and directories or tar archives"),
        "What sandboxes can have as a root of their own (host mode). An archive, plain or compressed by gzip, is unpacked into SBX_SNAPSHOTS_DIR once.";
    TEMPLATE = "none", Text("a name of SBX_TEMPLATES, or machine for a copy of this one"),
        "Root of sandboxes that ask for one of their own and name none. With SBX_ISOLATION=auto, of all that ask for nothing.";
    SNAPSHOTS_DIR = ".snapshots in SBX_HOMES_DIR", Text("an absolute path"),
        "Directory of the snapshots, which only root may enter, on a file system that maps ids (host mode).";
    SNAPSHOTS_BYTES = "unlimited", Number(0..=u64::MAX),
        "Most bytes of all snapshots together. Each file counts 4096 bytes besides its content (host mode).";
    SNAPSHOTS_MAX = "unlimited", Number(0..=u64::MAX),
        "Maximum number of snapshots (host mode).";
    ID_BLOCKS = "1000000-4000000000", Text("FIRST-LAST, ids from 65536 to 4294967294"),
        "User and group ids of sandboxes with a root of their own, 65536 for each.";
    CDI_DIRS = "/etc/cdi,/var/run/cdi", Text("absolute paths separated by commas"),
        "Directories with the files of the Container Device Interface that name devices for sandboxes (host mode). Of a name in two, the later counts.";
    TCP_PORT_RANGE = "none", Text("FIRST-LAST, ports from 1024 to 65535"),
        "TCP ports that sandboxes can be given to listen on (host mode).";
    ISOLATION = "landlock", Text("landlock, namespaces or auto"),
        "Isolation of sandboxes that choose none (host mode). auto: namespaces if they can be made here.";
    NETWORK = "open", Text("open or blocked"),
        "Network policy of sandboxes that choose none; in dedicated mode, of all commands.";
    STRICT_SCOPES = "0", Flag,
        "1 refuses the host's token on a sandbox's own routes (host mode).";
    LOG_BYTES = "4194304", Number(4096..=u64::MAX),
        "Bytes of output kept per process.";
    LOG_TOTAL_BYTES = "268435456", Number(4096..=u64::MAX),
        "Bytes of output kept for all processes.";
    #[cfg(feature = "interpreter")]
    CONTEXTS = "64", Number(0..=u64::MAX),
        "Maximum number of interpreter contexts, on a host for each sandbox.";
    #[cfg(feature = "mcp")]
    MCP = "1", Flag,
        "0 turns the endpoint for MCP clients off.";
    #[cfg(feature = "console")]
    CONSOLE = "1", Flag,
        "0 turns the web page at /console off.";
    #[cfg(feature = "e2b")]
    E2B_TEMPLATES = "none", Text("NAME or NAME=TEMPLATE, separated by commas; * is any name"),
        "Further templates that clients of E2B may name: each means TEMPLATE, else the default: SBX_TEMPLATE, or the image of the server.";
    PING_SECS = "15", Number(1..=SECONDS),
        "Seconds of silence on a stream before the server sends a ping.";
    MAX_CONNECTIONS = "4096", Number(1..=u64::MAX),
        "Maximum number of connections; fewer where memory, descriptors or threads are short. Further ones get 503.";
    LOG = "info", Text("info or debug"),
        "debug also logs one line per request.";
}

/// The variables that a build has only with a feature of cargo, and the features.
const OF_FEATURES: &[(&str, &str)] = &[
    ("SBX_CONTEXTS", "interpreter"),
    ("SBX_MCP", "mcp"),
    ("SBX_CONSOLE", "console"),
    ("SBX_E2B_TEMPLATES", "e2b"),
];

/// Variables with the server's prefix that other programs read: the clients, and the scripts that
/// download and start the server.
const FOREIGN: &[&str] = &[
    "SBX_MAX_HOSTS",
    "SBX_COMPAT_HOST_TOKEN",
    "SBX_DL_TOKEN",
    "SBX_SERVER_URL",
    "SBX_SERVER_URL_AARCH64",
    "SBX_SERVER_SHA256",
    "SBX_SERVER_SHA256_AARCH64",
    "SBX_SERVER_MOUNT",
    "SBX_ALLOW_UNVERIFIED_SERVER",
];

impl Variable {
    /// Parses a value of [`Accepts::Number`]; `None` if it is not in the range or not a `T`.
    pub fn number<T: TryFrom<u64>>(&self, text: &str) -> Option<T> {
        let Number(range) = &self.accepts else {
            return None;
        };
        let number = decimal(text).filter(|number| range.contains(number))?;
        T::try_from(number).ok()
    }
}

/// Parses a number that consists of digits; `str::parse` would also accept a plus sign.
pub fn decimal<T: FromStr>(text: &str) -> Option<T> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_plain)
}

impl fmt::Display for Accepts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Flag => formatter.write_str("0 or 1"),
            Number(range) if *range.end() == u64::MAX => {
                write!(formatter, "a whole number from {} up", range.start())
            }
            Number(range) => {
                let (least, most) = (range.start(), range.end());
                write!(formatter, "a whole number from {least} to {most}")
            }
            Text(text) => formatter.write_str(text),
        }
    }
}

/// The entries of `--help`.
pub fn help() -> String {
    let entry = |variable: &Variable| {
        let (name, default) = (variable.name, variable.default);
        let (meaning, accepts) = (variable.meaning, &variable.accepts);
        format!("  {name} [{default}]\n      {meaning}\n      Takes {accepts}.")
    };
    ALL.iter().map(entry).collect::<Vec<_>>().join("\n")
}

/// Whether the server, or a program around it, knows a variable of this name.
pub fn is_known(name: &str) -> bool {
    FOREIGN.contains(&name) || ALL.iter().any(|variable| variable.name == name)
}

/// The feature that a build must have for a variable of this name; `None` if every build has or lacks it.
pub fn feature_of(name: &str) -> Option<&'static str> {
    let mut of_features = OF_FEATURES.iter();
    of_features
        .find(|(variable, _)| *variable == name)
        .map(|(_, feature)| *feature)
}

/// The variable that `name` begins, or from whose name it differs by a few typing errors.
pub fn nearest(name: &str) -> Option<&'static str> {
    let names = ALL.iter().map(|variable| variable.name);
    let mut begun = names.clone().filter(|known| known.starts_with(name));
    if let Some(known) = begun.next().filter(|_| name.len() > "SBX_".len()) {
        return Some(known);
    }
    let (edits, nearest) = names
        .map(|known| (near::distance(name, known), known))
        .min()?;
    let most = name.len().saturating_sub("SBX_".len()) / 3;
    (edits <= most).then_some(nearest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_table_is_this_one() {
        let documented: Vec<String> = include_str!("../../docs/configuration.md")
            .lines()
            .skip_while(|line| !line.starts_with("| `SBX_"))
            .take_while(|line| !line.is_empty())
            .map(|line| line.replace('`', ""))
            .filter(|line| {
                let name = line.split(' ').nth(1).unwrap();
                is_known(name) || feature_of(name).is_none()
            })
            .collect();
        let expected: Vec<String> = ALL
            .iter()
            .map(|variable| {
                let Variable {
                    name,
                    default,
                    accepts,
                    meaning,
                } = variable;
                format!("| {name} | {default} | {accepts} | {meaning} |")
            })
            .collect();
        assert_eq!(documented, expected, "expected:\n{}", expected.join("\n"));
    }

    #[test]
    fn a_typing_error_finds_the_variable_that_was_meant() {
        for (typed, meant) in [
            ("SBX_PROT", Some("SBX_PORT")),
            ("SBX_TOKENFILE", Some("SBX_TOKEN_FILE")),
            ("SBX_TOKENS", Some("SBX_TOKEN")),
            ("SBX_IDLE_TIMEOUT_SECS", Some("SBX_IDLE_TIMEOUT")),
            ("SBX_HOST", Some("SBX_HOST_MODE")),
            ("SBX_", None),
            ("SBX_", None),
            ("SBX_WHATEVER", None),
            ("SBX_É", None),
        ] {
            assert_eq!(nearest(typed), meant, "{typed}");
        }
    }

    #[test]
    fn numbers_are_plain_and_in_their_range() {
        for text in [
            "",
            "+1",
            "-1",
            " 1",
            "1 ",
            "0x1",
            "65536",
            "99999999999999999999999",
        ] {
            assert_eq!(PORT.number::<u16>(text), None, "{text:?}");
        }
        assert_eq!(PORT.number("65535"), Some(65535u16));
        assert_eq!(LOG_BYTES.number::<usize>("4095"), None);
        assert_eq!(LOG_BYTES.number::<usize>("4096"), Some(4096));
    }
}
