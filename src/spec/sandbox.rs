//! A sandbox as a client wants it, and the phases of its life.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::command::EnvironmentChange;
use super::isolation::Isolation;
use super::network::NetworkPolicy;
use crate::codec::table::Table;
use crate::limits::activity::IdleBy;

/// The settings that a client chooses for new sandboxes.
#[derive(Debug, Clone, Default)]
pub struct SandboxSpec {
    /// Variables that are added to the environment of every command.
    pub environment: Arc<[EnvironmentChange]>,
    /// What surrounds its commands; `None` for the host's default.
    pub isolation: Option<Isolation>,
    /// What its commands reach over the network; `None` for the host's default.
    pub network: Option<NetworkPolicy>,
    /// Whether an open network is the machine's although the root is the sandbox's own.
    pub shares_network: bool,
    /// Absolute paths of the machine that its commands can read.
    pub read_only_paths: Vec<String>,
    /// Those that they can change.
    pub read_write_paths: Vec<String>,
    /// Names of the devices that it is given.
    pub devices: Vec<String>,
    /// How many TCP ports its commands can listen on.
    pub tcp_ports: usize,
    /// What of it can change later, as it is at first.
    pub settings: Settings,
    /// What it was made from.
    pub template: String,
    /// Which root is asked for.
    pub root_choice: RootChoice,
    /// Names the request that makes it: the same request again gets the same sandbox.
    pub key: Option<String>,
    /// What its root is made of; `None` for the machine's.
    pub root: Option<RootSpec>,
    /// Where commands see the home if they have mounts of their own; `None` for where it is.
    pub shown_home: Option<PathBuf>,
    /// Whether a template is built in it: the next server does not take it over.
    pub is_build: bool,
}

/// Whether a text is a name of the Container Device Interface, `vendor.com/class=name`.
pub fn is_device_name(text: &str) -> bool {
    let Some((vendor, rest)) = text.split_once('/') else {
        return false;
    };
    let Some((class, name)) = rest.split_once('=') else {
        return false;
    };
    let is_word = |word: &str, others: &str| {
        let is_alone = |c: char| c.is_ascii_alphanumeric();
        word.starts_with(is_alone)
            && word.ends_with(is_alone)
            && word.chars().all(|c| is_alone(c) || others.contains(c))
    };
    let is_kind =
        |word: &str| word.starts_with(|c: char| c.is_ascii_alphabetic()) && is_word(word, "_-.");
    is_kind(vendor) && is_kind(class) && is_word(name, "_-.:") && text.len() <= MAX_DEVICE_NAME
}

/// Longest name of a device.
const MAX_DEVICE_NAME: usize = 256;

/// A root of a sandbox's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RootSpec {
    /// The name of what it is made of, or the id of a snapshot.
    pub template: String,
    /// The id of the snapshot that this has meant; `None` for a directory of the machine.
    pub snapshot: Option<String>,
    /// Who runs commands that choose nobody; `None` for whoever the template names.
    pub user: Option<String>,
    /// Where commands start, if that is a directory; else, and for `None`, in the home of their user.
    pub directory: Option<String>,
    /// Whether its files need not outlast a failure of the machine: nothing waits for the disk then.
    pub is_volatile: bool,
}

/// Which root a client asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum RootChoice {
    /// That of the host's default.
    #[default]
    Default,
    /// The machine's, shared with others.
    Shared,
    /// One of its own, of a template or of the default one.
    Private {
        template: Option<String>,
        user: Option<String>,
        /// Whether the account of the user is made where the template has none.
        makes_user: bool,
        /// See [`RootSpec::is_volatile`].
        is_volatile: bool,
    },
}

/// What can change of a sandbox while it lives.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// What people call it. Others may have the same name.
    pub name: Option<String>,
    /// What its client has written on it, to find it by: values by name.
    pub labels: Arc<Table<String, String>>,
    /// How long it lives from when this was set; `None` means for ever.
    pub lifetime: Option<Duration>,
    pub rules: LifeRules,
    pub limits: ResourceLimits,
}

/// How much a sandbox may take of the machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResourceLimits {
    /// Most processes and threads at once; `None` means the host's default.
    pub processes: Option<u64>,
    /// Most bytes of data of each process (`RLIMIT_DATA`); `None` means no limit.
    pub data: Option<u64>,
    /// Limits of the sandbox as a whole.
    pub whole: WholeLimits,
}

/// What becomes of a sandbox that is left alone, or whose time is over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LifeRules {
    /// How long it may be idle; `None` means for ever.
    pub idle_timeout: Option<Duration>,
    /// What it is idle without; `None` for what suits `on_idle`.
    pub idle_by: Option<IdleBy>,
    /// What then becomes of it.
    pub on_idle: Fate,
    /// What becomes of it when its time is over.
    pub on_expiry: Fate,
    /// Whether a request that needs processes has it run again.
    pub auto_resume: bool,
}

impl LifeRules {
    /// What the sandbox is idle without. What is deleted must have nothing left to do; what is kept can go on later.
    pub fn idle_by(self) -> IdleBy {
        self.idle_by.unwrap_or(match self.on_idle {
            Fate::Delete => IdleBy::Work,
            Fate::Pause | Fate::Stop => IdleBy::Requests,
        })
    }
}

/// What becomes of a sandbox by a rule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fate {
    /// Nothing is left of it.
    #[default]
    Delete,
    /// Its processes stand still, in memory.
    Pause,
    /// Its files are kept.
    Stop,
}

impl Fate {
    /// All by their names.
    pub const NAMES: [(&str, Self); 3] = [
        ("delete", Self::Delete),
        ("pause", Self::Pause),
        ("stop", Self::Stop),
    ];

    pub fn name(self) -> &'static str {
        name_in(&Self::NAMES, self)
    }
}

fn name_in<T: PartialEq + Copy>(names: &[(&'static str, T)], wanted: T) -> &'static str {
    let mut names = names.iter();
    let found = names.find(|(_, one)| *one == wanted);
    found.map_or("", |(name, _)| name)
}

/// The limits that a client asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WholeLimits {
    /// Most bytes of memory.
    pub memory: Option<u64>,
    /// Most processor time in each second: more than a second with several processors.
    pub cpu: Option<Duration>,
}

/// Why a sandbox does not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopCause {
    /// A client has stopped it.
    Asked,
    /// It was idle, or its time was over.
    Timeout,
    /// The server has ended.
    Restart,
    /// The server was killed.
    Crash,
    /// The machine has ended.
    Machine,
}

impl StopCause {
    /// The causes by their names.
    pub const NAMES: [(&str, Self); 5] = [
        ("asked", Self::Asked),
        ("timeout", Self::Timeout),
        ("restart", Self::Restart),
        ("crash", Self::Crash),
        ("machine", Self::Machine),
    ];

    pub fn name(self) -> &'static str {
        name_in(&Self::NAMES, self)
    }

    /// Whether nobody wanted it: a sandbox that is needed again then simply starts.
    pub fn is_accident(self) -> bool {
        !matches!(self, Self::Asked | Self::Timeout)
    }
}

/// A part of a sandbox's life: a run of it, or the time between two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Phase {
    /// How many times it has begun to run, the first time included.
    pub runs: u64,
    /// Why it does not run; `None` while it does.
    pub stopped: Option<StopCause>,
    /// Since when, in milliseconds since 1970.
    pub since_ms: u64,
}

/// Numbers that the processes of one run have to themselves, so that none is that of a process of another run.
const PROCESSES_OF_RUN: u64 = 10_000_000;

impl Phase {
    /// A run begins.
    pub fn begin(runs: u64, since_ms: u64) -> Self {
        Self {
            runs,
            stopped: None,
            since_ms,
        }
    }

    /// The run ends.
    pub fn end(self, cause: StopCause, since_ms: u64) -> Self {
        Self {
            stopped: Some(cause),
            since_ms,
            ..self
        }
    }

    /// The number of the first process.
    pub fn first_process(self) -> u64 {
        self.runs.saturating_sub(1) * PROCESSES_OF_RUN + 1
    }
}

#[cfg(test)]
mod tests {
    use super::is_device_name;

    #[test]
    fn names_of_devices_have_three_parts() {
        for name in [
            "nvidia.com/gpu=all",
            "nvidia.com/gpu=GPU-8e1f:0",
            "a/b=0",
            "vendor_1.example-x.com/class.of-it_2=m0.g1",
        ] {
            assert!(is_device_name(name), "{name}");
        }
        let long = format!("a/b={}", "x".repeat(253));
        for name in [
            "",
            "gpu",
            "nvidia.com/gpu",
            "nvidia.com=all",
            "/gpu=all",
            "nvidia.com/=all",
            "nvidia.com/gpu=",
            "1a/gpu=all",
            "a/1=all",
            "a./gpu=all",
            "a/gpu-=all",
            "a/gpu=-all",
            "a/gpu=all.",
            "a/gpu=a=b",
            "a/b/c=d",
            "a b/c=d",
            "a/b:c=d",
            "\u{e9}/b=d",
            "a/b=d\0",
            &long,
        ] {
            assert!(!is_device_name(name), "{name}");
        }
    }
}
