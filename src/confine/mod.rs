//! How the commands of a workspace start: environment, working directory, limits and identity.
//!
//! A workspace has one [`Confinement`]. It prepares in the server everything that the child needs; the
//! child's steps are the ordered list of `sys::spawn`. In dedicated mode the machine is the sandbox, and
//! commands have the server's identity. In host mode a [`Policy`] holds what all sandboxes share, and each
//! sandbox has its own user, Landlock ruleset and environment.

mod cgroup;
mod filter;
mod grants;
mod limits;
mod mark;
mod namespaces;
mod network;
mod ruleset;
mod system_files;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockType};

use crate::command::{CommandLine, CommandSpec, EnvironmentChange};
use crate::egress::{Exits, Gate, MakeSocket};
use crate::error::{Error, Kind, Result};
use crate::isolation::Isolation;
use crate::posture::{Posture, TooWide};
use crate::sync::{Mutex, lock};
use crate::sys::{
    self, ActingAs, CallListener, ChildPlan, Resource, Restriction, SpawnError, SpawnStep, Spawned,
    User,
};
use filter::Subject;
pub use grants::{GrantedPaths, Grants};
pub use limits::{KillWatch, Limiter, Limits, MemoryKill, WholeLimits, ended_for_memory};
pub use mark::Mark;
pub use namespaces::{HOLDER_ARGUMENT, IN_MEMORY, MemoryDisk, Namespaces, holders};
use namespaces::{NamespaceMaker, NamespacesSpec};
use network::{Networks, TcpRules};
use ruleset::SystemRules;

/// PATH if the server's environment has none.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// LANG where nobody has chosen another: without it programs take text for ASCII.
const DEFAULT_LANG: &str = "C.UTF-8";

/// Added to the server's `oom_score_adj` for commands, so that the kernel kills a command first, in thousandths of
/// the memory: as long as the server holds less than this part. Memory that belongs to no process, such as
/// a file in memory, counts for none. Below the maximum of 1000, so that a command can still raise the score
/// of its own children.
const OOM_SCORE_STEP: i32 = 900;

/// How long a start is retried while the program is open for writing.
const BUSY_LIMIT: Duration = Duration::from_millis(200);

/// How the commands of one workspace are started.
pub struct Confinement {
    /// `NAME=value`, by name.
    environment: BTreeMap<OsString, CString>,
    /// Variables that the client chose for the sandbox; shared by sandboxes of one request.
    chosen: Arc<[EnvironmentChange]>,
    directory: PathBuf,
    /// The virtual environment of commands that start from now on.
    venv: Mutex<Option<String>>,
    limits: Vec<(Resource, libc::rlimit)>,
    /// What commands reach over the network unless they choose less.
    network: Posture,
    networks: Arc<Networks>,
    /// Those of commands whose network is confined.
    tcp_rules: TcpRules,
    /// Where filtered connections leave.
    exits: Arc<Exits>,
    /// `None` for commands with the server's identity.
    wall: Option<Wall>,
    /// `None` for commands in the server's own.
    namespaces: Option<Arc<Namespaces>>,
    /// Where filtered connections arrive if the network is the sandbox's own.
    inner_gate: Option<Arc<Gate>>,
}

/// The restrictions of a sandbox's commands.
struct Wall {
    user: User,
    /// The path of the home on the machine.
    home: PathBuf,
    whole: Arc<Limits>,
    ruleset: Option<OwnedFd>,
}

/// The `oom_score_adj` of commands, derived from the server's own. Read with the first command, because
/// /proc makes up a tenth of the server's start.
fn oom_score() -> &'static str {
    static SCORE: LazyLock<String> = LazyLock::new(|| {
        let own = std::fs::read_to_string("/proc/self/oom_score_adj")
            .ok()
            .and_then(|text| text.trim().parse::<i32>().ok())
            .unwrap_or(0);
        (own + OOM_SCORE_STEP).min(1000).to_string()
    });
    &SCORE
}

/// The limit on open files; call it before the server raises its own.
fn open_files() -> (Resource, libc::rlimit) {
    (libc::RLIMIT_NOFILE, sys::limits(libc::RLIMIT_NOFILE))
}

/// The restrictions that all sandboxes of a host share.
pub struct Policy {
    rules: SystemRules,
    has_filters: bool,
    networks: Arc<Networks>,
    /// For commands in namespaces of their sandbox.
    inner_networks: Arc<Networks>,
    namespaces: NamespaceMaker,
    /// PATH of commands after the sandbox's own directories.
    search: OsString,
    /// As the server was started with.
    open_files: (Resource, libc::rlimit),
    /// The files that all processes of the machine together can have open (proc(5)).
    machine_files: u64,
}

/// The settings of one sandbox.
pub struct SandboxSettings<'a> {
    /// The sandbox's id.
    pub id: &'a str,
    /// The user of its commands.
    pub user: User,
    /// The path of its home.
    pub home: &'a Path,
    /// Where commands see it if they have mounts of their own.
    pub shown_home: &'a Path,
    /// The home, open.
    pub home_directory: BorrowedFd<'a>,
    /// Variables that are added to the environment of every command.
    pub environment: &'a Arc<[EnvironmentChange]>,
    /// Most processes and threads at once.
    pub max_processes: u64,
    /// Most bytes of data of each process.
    pub max_memory: Option<u64>,
    /// What surrounds its commands.
    pub isolation: Isolation,
    /// What its commands reach over the network.
    pub network: Posture,
    /// Where its filtered connections leave.
    pub exits: Arc<Exits>,
    /// Paths that its commands reach besides.
    pub grants: &'a Grants,
    /// TCP ports that its commands can listen on.
    pub tcp_ports: &'a [u16],
    /// The limits of the sandbox as a whole.
    pub whole: &'a Arc<Limits>,
}

impl Policy {
    /// Call it before the server changes its own limits: commands get the original ones.
    ///
    /// # Errors
    /// `System` if the kernel has no seccomp filters, unless `allow_unconfined` is set.
    pub fn new(search: Option<&OsStr>, allow_unconfined: bool) -> Result<Arc<Self>> {
        let has_filters = sys::has_filters();
        if !has_filters && !allow_unconfined {
            return Err(Error::new(
                Kind::System,
                "cannot hold sandboxes: the kernel has no seccomp filters, or hides them; SBX_ALLOW_UNCONFINED=1 \
                 goes on without",
            ));
        }
        let rules = SystemRules::open();
        Ok(Arc::new(Self {
            has_filters,
            networks: Arc::new(Networks::new(Subject::Sandbox, rules.abi)),
            inner_networks: Arc::new(Networks::new(Subject::Namespaces, rules.abi)),
            namespaces: NamespaceMaker::new(),
            rules,
            search: searchable(search.unwrap_or(OsStr::new(DEFAULT_PATH))),
            open_files: open_files(),
            machine_files: std::fs::read_to_string("/proc/sys/fs/file-max")
                .ok()
                .and_then(|text| text.trim().parse().ok())
                .unwrap_or(u64::MAX),
        }))
    }

    /// The isolation layers, with those of these namespaces. Each is a step of the child: a command whose step fails
    /// does not start.
    pub fn layers(&self, namespaces: Option<&Namespaces>) -> Vec<&'static str> {
        let mut layers = vec!["uid", "no_new_privs", "rlimits", "no_capabilities"];
        layers.extend(self.has_filters.then_some("seccomp"));
        let has_network = namespaces.is_some_and(Namespaces::has_network);
        layers.extend(self.rules.layers(has_network));
        layers.extend(namespaces.into_iter().flat_map(Namespaces::layers));
        layers
    }

    /// Checks that a kind of isolation can be had here.
    ///
    /// # Errors
    /// `Unavailable`, with the reason.
    pub fn check_isolation(&self, isolation: Isolation) -> Result<()> {
        match isolation {
            Isolation::Landlock => Ok(()),
            Isolation::Namespaces => self.namespaces.check(),
        }
    }

    /// The names of the kinds of isolation that can be had here.
    pub fn isolations(&self) -> Vec<&'static str> {
        let names = Isolation::NAMES.into_iter();
        let offered = names.filter(|(_, isolation)| self.check_isolation(*isolation).is_ok());
        offered.map(|(name, _)| name).collect()
    }

    /// The Landlock ABI of the rulesets, 0 without Landlock.
    pub fn landlock_abi(&self) -> u32 {
        self.rules.abi
    }

    /// The names of the network postures that are enforced here.
    pub fn postures(&self) -> Vec<&'static str> {
        self.networks.offered()
    }

    /// The paths of the machine that all sandboxes can read, or those that they can write to.
    pub fn paths(&self, are_writable: bool) -> impl Iterator<Item = &'static str> {
        self.rules.paths(are_writable)
    }

    /// Checks that a network posture is enforced here for sandboxes with this isolation.
    ///
    /// # Errors
    /// `Unavailable`, with the reason.
    pub fn check_network(&self, isolation: Isolation, posture: &Posture) -> Result<()> {
        self.networks
            .check(posture, isolation.owns_network(posture))
    }

    /// The limit on open files of one of so many processes. Together they get a quarter of the machine's
    /// files, but each at least [`ENOUGH_FILES`].
    fn open_files(&self, max_processes: u64) -> (Resource, libc::rlimit) {
        let share = self.machine_files / 4 / max_processes.max(1);
        let most = share.max(ENOUGH_FILES);
        let (resource, given) = self.open_files;
        let limit = libc::rlimit {
            rlim_cur: given.rlim_cur.min(most),
            rlim_max: given.rlim_max.min(most),
        };
        (resource, limit)
    }

    /// Prepares the confinement of a sandbox.
    ///
    /// # Errors
    /// `System` if the ruleset cannot be made; `Unavailable`, `NoResources` or `System` if its namespaces cannot.
    pub fn confine(&self, sandbox: SandboxSettings<'_>) -> Result<Confinement> {
        let namespaces = match sandbox.isolation {
            Isolation::Landlock => None,
            Isolation::Namespaces => Some(self.namespaces.make(&NamespacesSpec {
                user: sandbox.user,
                home: sandbox.home,
                shown_home: sandbox.shown_home,
                granted: &sandbox.grants.paths,
                network: sandbox.isolation.owns_network(&sandbox.network),
                max_memory: most_in_memory(&sandbox),
            })?),
        };
        let inner_gate = match (&namespaces, &sandbox.network) {
            (Some(namespaces), Posture::Filtered(filter)) => {
                let own = Arc::clone(filter);
                Some(Gate::open_inside(own, inner_sockets(namespaces)).map(Arc::new)?)
            }
            _ => None,
        };
        let shown_home = match sandbox.isolation {
            Isolation::Landlock => sandbox.home,
            Isolation::Namespaces => sandbox.shown_home,
        };
        let home = shown_home.as_os_str();
        let below = |name: &str| shown_home.join(name).into_os_string();
        let mut path = below(".local/bin");
        path.push(":");
        path.push(&self.search);
        let ports: Vec<String> = sandbox.tcp_ports.iter().map(u16::to_string).collect();
        let first_port = ports.first().map(|port| ("PORT", port.into()));
        let all_ports = first_port
            .is_some()
            .then(|| ("SBX_TCP_PORTS", ports.join(",").into()));
        let environment = [
            ("PATH", path),
            ("HOME", home.to_owned()),
            ("TMPDIR", below(".tmp")),
            ("USER", USER_NAME.into()),
            ("LOGNAME", USER_NAME.into()),
            ("LANG", DEFAULT_LANG.into()),
            ("SBX_SANDBOX_ID", sandbox.id.into()),
            ("SBX_PROXY_DIR", below(".sbx/proxy")),
        ]
        .into_iter()
        .chain(first_port)
        .chain(all_ports)
        .filter_map(|(name, value)| Some((name.into(), entry(OsStr::new(name), &value)?)))
        .collect();
        let mut limits = vec![
            limit(libc::RLIMIT_NPROC, sandbox.max_processes),
            limit(libc::RLIMIT_CORE, 0),
            self.open_files(sandbox.max_processes),
        ];
        let max_memory = sandbox.max_memory;
        limits.extend(max_memory.map(|bytes| limit(libc::RLIMIT_DATA, bytes)));
        Ok(Confinement {
            environment,
            chosen: Arc::clone(sandbox.environment),
            directory: shown_home.to_owned(),
            venv: Mutex::default(),
            limits,
            network: sandbox.network,
            networks: Arc::clone(if namespaces.is_some() {
                &self.inner_networks
            } else {
                &self.networks
            }),
            tcp_rules: TcpRules::new(namespaces.clone()),
            exits: sandbox.exits,
            wall: Some(Wall {
                user: sandbox.user,
                home: sandbox.home.to_owned(),
                whole: Arc::clone(sandbox.whole),
                ruleset: self.rules.of_sandbox(
                    sandbox.home_directory,
                    sandbox.grants,
                    namespaces.as_deref(),
                    sandbox.tcp_ports,
                )?,
            }),
            namespaces,
            inner_gate,
        })
    }
}

/// Makes TCP sockets in the network of a sandbox, as long as that exists.
fn inner_sockets(namespaces: &Arc<Namespaces>) -> MakeSocket {
    let namespaces = Arc::downgrade(namespaces);
    Box::new(move || {
        let inside = namespaces.upgrade().ok_or(Errno::ENETDOWN);
        let socket = inside.and_then(|inside| inside.socket(AddressFamily::Inet, SockType::Stream));
        socket.map_err(|errno| {
            Error::system("cannot make a socket in the network of a sandbox", errno)
        })
    })
}

/// Most bytes of each directory that a sandbox has in memory, and of its System V shared memory, if its limits say so.
/// All three together leave room for processes: they stay when these are killed.
fn most_in_memory(sandbox: &SandboxSettings<'_>) -> Option<u64> {
    let whole = sandbox.whole.asked().memory.map(|bytes| bytes / 4);
    sandbox.max_memory.into_iter().chain(whole).min()
}

/// The entries of a PATH that sandboxes may read. With an entry such as /root/.local/bin a missing program
/// would look like a forbidden one.
fn searchable(path: &OsStr) -> OsString {
    let entries = std::env::split_paths(path).filter(|entry| is_among_programs(entry));
    // An empty PATH would mean the working directory.
    match std::env::join_paths(entries) {
        Ok(path) if !path.is_empty() => path,
        _ => DEFAULT_PATH.into(),
    }
}

/// Whether a path is beneath one of the directories of programs, which every sandbox may read.
pub fn is_among_programs(path: &Path) -> bool {
    let resolved = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let path = resolved(path);
    system_files::PROGRAMS
        .iter()
        .any(|directory| path.starts_with(resolved(Path::new(directory))))
}

/// Open files that every process of a sandbox may have: the usual soft limit, which programs expect.
const ENOUGH_FILES: u64 = 1024;

/// Where programs look for the proxy of a filtered network.
const PROXY_VARIABLES: [&str; 6] = [
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
];

/// The hosts that commands reach without the proxy in a network of their own (`NO_PROXY`).
const OWN_HOSTS: &str = "localhost,127.0.0.1";

/// The nice value of a sandbox's commands, so that the server gets the processor first.
const NICE: i32 = 10;

/// `USER` and `LOGNAME` in a sandbox. Outside of namespaces /etc/passwd has no entry for its uid.
pub const USER_NAME: &str = "sandbox";

/// A limit that the child cannot raise again, capped at the server's own hard limit.
fn limit(resource: Resource, most: u64) -> (Resource, libc::rlimit) {
    let most = most.min(sys::limits(resource).rlim_max);
    let limit = libc::rlimit {
        rlim_cur: most,
        rlim_max: most,
    };
    (resource, limit)
}

/// `NAME=value`; `None` if one of the two has a NUL.
fn entry(name: &OsStr, value: &OsStr) -> Option<CString> {
    CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok()
}

/// `NAME=value`, by name.
type Environment<'a> = BTreeMap<&'a OsStr, Cow<'a, CStr>>;

/// Sets a variable, or removes it if there is no value or one that cannot be a variable's.
fn set<'a>(environment: &mut Environment<'a>, name: &'a str, value: Option<&str>) {
    let name = OsStr::new(name);
    match value.and_then(|value| entry(name, value.as_ref())) {
        Some(entry) => environment.insert(name, Cow::Owned(entry)),
        None => environment.remove(name),
    };
}

/// PATH of an environment.
fn search_path<'a>(environment: &'a Environment<'_>) -> &'a [u8] {
    let path = environment.get(OsStr::new("PATH"));
    path.and_then(|path| path.to_bytes().strip_prefix(b"PATH="))
        .unwrap_or(DEFAULT_PATH.as_bytes())
}

impl Confinement {
    /// Commands with the server's identity and its environment without `SBX_*`.
    ///
    /// Call it before the server changes its own limits: commands get the original ones.
    ///
    /// # Errors
    /// `Unavailable` if the machine cannot enforce the network posture.
    pub fn dedicated(
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        directory: PathBuf,
        network: Posture,
        exits: Arc<Exits>,
    ) -> Result<Self> {
        let environment: Vec<_> = environment.into_iter().collect();
        let has_locale = environment.iter().any(|(name, value)| {
            let names = ["LANG", "LC_ALL", "LC_CTYPE"];
            !value.is_empty() && names.iter().any(|locale| name == locale)
        });
        let path = ("PATH".into(), DEFAULT_PATH.into());
        let language = ("LANG".into(), DEFAULT_LANG.into());
        let own = [path]
            .into_iter()
            .chain(environment)
            .chain((!has_locale).then_some(language))
            .filter(|(name, _)| !name.as_bytes().starts_with(b"SBX_"))
            .filter_map(|(name, value)| {
                let entry = entry(&name, &value)?;
                Some((name, entry))
            });
        let mut environment = BTreeMap::new();
        environment.extend(own);
        let networks = Arc::new(Networks::new(Subject::Machine, sys::landlock_abi()));
        networks.check(&network, false)?;
        Ok(Self {
            environment,
            chosen: Arc::default(),
            directory,
            venv: Mutex::default(),
            limits: vec![open_files()],
            network,
            networks,
            tcp_rules: TcpRules::new(None),
            exits,
            wall: None,
            namespaces: None,
            inner_gate: None,
        })
    }

    /// Commands of this process, whose network is open.
    #[cfg(test)]
    pub fn for_test() -> Self {
        let budget = crate::ledger::Budget::new(1 << 20);
        let seats = crate::http::seats::Seats::new(1, Arc::clone(&budget));
        let exits = Exits::new(crate::egress::Egress::new(seats), budget.whole(), None);
        Self::dedicated(std::env::vars_os(), "/".into(), Posture::Open, exits).unwrap()
    }

    /// The names of the network postures that commands can have here.
    pub fn postures(&self) -> Vec<&'static str> {
        self.networks.offered()
    }

    /// What a command reaches over the network that asks for a posture, or for none.
    ///
    /// # Errors
    /// `TooWide` if it asks for more than the workspace allows; `Unavailable` if the machine cannot enforce
    /// it.
    pub fn network(&self, asked: Option<&Posture>) -> Result<Posture> {
        let Some(asked) = asked else {
            return Ok(self.network.clone());
        };
        let posture = asked.clone().beneath(&self.network);
        let posture = posture.map_err(|TooWide(what)| {
            let ceiling = self.network.name();
            let text = format!(
                "network {what}, which is wider than {ceiling}, what all commands here have; a command can only tighten it"
            );
            Error::new(Kind::TooWide, text)
        })?;
        self.networks.check(&posture, self.owns(&posture))?;
        Ok(posture)
    }

    /// What commands reach over the network that ask for nothing else.
    pub fn posture(&self) -> &Posture {
        &self.network
    }

    /// What was allowed and refused to commands whose network is filtered.
    pub fn exits(&self) -> &Exits {
        &self.exits
    }

    /// Whether the sandbox's own network enforces a posture, so that rules need not.
    fn owns(&self, posture: &Posture) -> bool {
        self.own_network().is_some() && *posture == self.network
    }

    /// Where the connections of commands with a posture arrive; `None` if nothing filters them.
    fn gate(&self, posture: &Posture) -> Result<Option<Arc<Gate>>> {
        match (posture, &self.inner_gate) {
            (Posture::Open | Posture::Blocked, _) => Ok(None),
            (_, Some(gate)) if *posture == self.network => Ok(Some(Arc::clone(gate))),
            (Posture::Filtered(filter), _) => {
                let inside = self.own_network().map(inner_sockets);
                self.exits.gate(filter, inside).map(Some)
            }
        }
    }

    /// Serves the gate of a command that has started.
    fn serve_gate(&self, gate: Option<Arc<Gate>>, listener: Option<CallListener>) -> Result<()> {
        match (gate, listener, self.namespaces.as_deref()) {
            (Some(gate), Some(listener), namespaces) => {
                let is_inner = |inner: &Arc<Gate>| Arc::ptr_eq(inner, &gate);
                if let Some(namespaces) =
                    namespaces.filter(|_| self.inner_gate.as_ref().is_some_and(is_inner))
                {
                    // Until the sandbox ends: the last connections may be of programs that have ended.
                    self.exits
                        .serve_inside(&gate, namespaces.holder().as_fd())?;
                }
                self.exits.serve(gate, listener)
            }
            (Some(gate), None, Some(namespaces)) => {
                self.exits.serve_inside(&gate, namespaces.holder().as_fd())
            }
            _ => Ok(()),
        }
    }

    /// The namespaces of the commands, if the network there is the sandbox's own.
    pub fn own_network(&self) -> Option<&Arc<Namespaces>> {
        let namespaces = self.namespaces.as_ref();
        namespaces.filter(|namespaces| namespaces.has_network())
    }

    /// The namespaces of the commands; `None` for the server's own.
    pub fn namespaces(&self) -> Option<&Arc<Namespaces>> {
        self.namespaces.as_ref()
    }

    /// Makes the calling thread access files as the commands' user while the result lives; `None` if
    /// that is the server's own.
    ///
    /// # Errors
    /// `Forbidden` if the server may not act as the user.
    pub fn act(&self) -> Result<Option<ActingAs>> {
        let acting = self.wall.as_ref().map(|wall| ActingAs::new(wall.user));
        acting
            .transpose()
            .map_err(|errno| Error::system("cannot act as the sandbox", errno))
    }

    /// The environment of a command that does not change it, by name; `gate` is that of its filtered network.
    fn common_environment(&self, gate: Option<&Gate>) -> Environment<'_> {
        let own = self.environment.iter();
        let mut environment = BTreeMap::new();
        environment
            .extend(own.map(|(name, entry)| (name.as_os_str(), Cow::Borrowed(entry.as_c_str()))));
        if let Some(gate) = gate {
            let proxy = format!("http://127.0.0.1:{}", gate.port());
            for name in PROXY_VARIABLES {
                set(&mut environment, name, Some(&proxy));
            }
            // Node.js 24 and later ask for it.
            set(&mut environment, "NODE_USE_ENV_PROXY", Some("1"));
            if gate.filter().is_transparent {
                // glibc and c-ares look names up over TCP then: over UDP c-ares cannot.
                // Names are looked up as they are before the domains of the search list are tried: whether these exist may
                // be for the client's own proxy to know.
                set(&mut environment, "RES_OPTIONS", Some("use-vc ndots:0"));
            }
            for name in ["NO_PROXY", "no_proxy"] {
                set(
                    &mut environment,
                    name,
                    gate.is_inside().then_some(OWN_HOSTS),
                );
            }
        }
        for (name, value) in self.chosen.iter() {
            set(&mut environment, name, value.as_deref());
        }
        if let Some(venv) = self.venv() {
            set(&mut environment, "VIRTUAL_ENV", Some(&venv));
            let search = search_path(&environment);
            let path = [venv.as_bytes(), b"/bin:", search].concat();
            let path = entry(OsStr::new("PATH"), OsStr::from_bytes(&path));
            environment.extend(path.map(|path| (OsStr::new("PATH"), Cow::Owned(path))));
        }
        environment
    }

    /// The environment of a command, by name. Borrows what the command does not change.
    fn environment<'a>(&'a self, spec: &'a CommandSpec, gate: Option<&Gate>) -> Environment<'a> {
        let mut environment = self.common_environment(gate);
        if let Some(terminal) = &spec.terminal {
            set(&mut environment, "TERM", Some(terminal.name()));
            // Programs would believe these instead of the terminal.
            set(&mut environment, "LINES", None);
            set(&mut environment, "COLUMNS", None);
        }
        for (name, value) in spec.environment() {
            set(&mut environment, name, value.as_deref());
        }
        environment
    }

    /// Where commands start: the home of a sandbox, or where the server was started.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The home of the commands: that of a sandbox, else what the server's environment says, else where it was started.
    pub fn home(&self) -> &Path {
        let home = self.environment.get(OsStr::new("HOME"));
        let home = home.and_then(|entry| entry.to_bytes().strip_prefix(b"HOME="));
        let home = home.map(|home| Path::new(OsStr::from_bytes(home)));
        home.filter(|home| home.is_absolute())
            .unwrap_or(&self.directory)
    }

    /// Where the home is on the machine.
    pub fn real_home(&self) -> &Path {
        match &self.wall {
            Some(wall) => &wall.home,
            None => self.home(),
        }
    }

    /// The variables of commands that do not change them.
    pub fn variables(&self) -> Vec<(String, String)> {
        let environment = self.common_environment(None);
        let text = |entry: &CStr| {
            let entry = entry.to_string_lossy();
            let (name, value) = entry.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        };
        environment
            .values()
            .filter_map(|entry| text(entry))
            .collect()
    }

    /// Whether commands that do not change their environment have this variable.
    pub fn has_variable(&self, name: &str) -> bool {
        self.common_environment(None).contains_key(OsStr::new(name))
    }

    /// Whether a program is found in the PATH of commands that do not change it. It looks as the commands' user,
    /// because that one's links may lead anywhere.
    ///
    /// # Errors
    /// Those of [`Confinement::act`].
    pub fn finds(&self, program: &str) -> Result<bool> {
        let environment = self.common_environment(None);
        let _acting = self.act()?;
        let path = OsStr::from_bytes(search_path(&environment));
        Ok(std::env::split_paths(path).any(|directory| {
            let found = std::fs::metadata(self.directory.join(directory).join(program));
            found.is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
        }))
    }

    /// The absolute path of the virtual environment that commands have.
    pub fn venv(&self) -> Option<String> {
        lock(&self.venv).clone()
    }

    /// Gives the commands that start from now on a virtual environment: `VIRTUAL_ENV`, and its programs first in
    /// PATH unless the command's own environment sets that.
    pub fn set_venv(&self, path: String) {
        *lock(&self.venv) = Some(path);
    }

    /// The user of the commands; `None` for the server's own.
    pub fn user(&self) -> Option<User> {
        self.wall.as_ref().map(|wall| wall.user)
    }

    /// The limits of the sandbox as a whole; `None` for commands with the server's own identity.
    pub fn limits(&self) -> Option<&Arc<Limits>> {
        self.wall.as_ref().map(|wall| &wall.whole)
    }

    /// The Landlock ruleset of the workspace.
    fn file_rules(&self) -> Option<BorrowedFd<'_>> {
        let wall = self.wall.as_ref()?;
        wall.ruleset.as_ref().map(AsFd::as_fd)
    }

    /// Starts a command with these descriptors as 0, 1 and 2, `passed` as 4, and a
    /// mark for its descendants. The child stores its pid in `announcement` first.
    ///
    /// # Errors
    /// `ProgramNotFound`, `ProgramNotExecutable`, `ProgramForbidden`, `BadDirectory`, `NoResources`,
    /// `TooWide`, `Unavailable`, `Invalid`, `System`.
    pub fn spawn(
        &self,
        spec: &CommandSpec,
        stdio: [BorrowedFd<'_>; 3],
        passed: Option<BorrowedFd<'_>>,
        mark: Option<Mark>,
        announcement: &AtomicI32,
    ) -> Result<Spawned> {
        let network = self.network(spec.network.as_ref())?;
        let gate = self.gate(&network)?;
        let walls = self.networks.walls(
            &network,
            self.owns(&network),
            gate.as_ref().map(|gate| gate.port()),
            &self.tcp_rules,
        )?;
        let is_confined = self.wall.is_some() || network != Posture::Open;
        let environment = self.environment(spec, gate.as_deref());
        let search = search_path(&environment);
        let (programs, arguments) = (spec.programs(search), spec.arguments(search));
        let directory = self.directory.join(spec.directory().unwrap_or_default());
        let mark = mark.map(Mark::limit);
        let limits: Vec<_> = self.limits.iter().copied().chain(mark).collect();
        let plan = ChildPlan {
            programs: &programs,
            arguments: &arguments,
            environment: &environment.into_values().collect::<Vec<_>>(),
            directory: &CString::new(directory.as_os_str().as_bytes()).unwrap_or_default(),
            stdio,
            passed,
            has_terminal: spec.terminal.is_some(),
            oom_score: oom_score().as_bytes(),
            limits: &limits,
            nice: if self.wall.is_some() { NICE } else { 0 },
            cgroup: self.limits().and_then(|limits| limits.cgroup()),
            restriction: is_confined.then(|| Restriction {
                user: self.user(),
                rulesets: [self.file_rules(), walls.ruleset()],
                filter: walls.filter(),
                has_listener: walls.has_listener,
            }),
            inside: self.namespaces.as_deref().map(Namespaces::holder),
            announcement,
        };
        let mut left = BUSY_LIMIT;
        loop {
            match sys::spawn(&plan) {
                // A program that was just written: another child between clone and execve may still hold
                // the writer's descriptor. A real writer holds it longer.
                Err(SpawnError {
                    errno: Errno::ETXTBSY,
                    ..
                }) if !left.is_zero() => {
                    let pause = Duration::from_millis(2).min(left);
                    std::thread::sleep(pause);
                    left -= pause;
                }
                Err(error)
                    if (error.step, error.errno) == (SpawnStep::Enter, Errno::ESRCH)
                        || self
                            .namespaces
                            .as_ref()
                            .is_some_and(|inside| !inside.are_alive()) =>
                {
                    let text = "cannot start a command: the first process of this sandbox's namespaces has ended, \
                                and they with it; delete the sandbox and make another";
                    return Err(Error::new(Kind::System, text));
                }
                Ok(mut spawned) => {
                    if let Err(error) = self.serve_gate(gate, spawned.listener.take()) {
                        // Its sockets would fail.
                        announcement.store(0, Ordering::Release);
                        let _ = sys::signal_group(spawned.pid, libc::SIGKILL);
                        let _ = sys::wait(spawned.pidfd.as_fd(), true);
                        return Err(error);
                    }
                    return Ok(spawned);
                }
                Err(error) => {
                    // As the command's user: the text must not reveal files that it may not see.
                    return Err(match self.act() {
                        Ok(_acting) => start_error(error, spec, &programs, &directory),
                        Err(error) => error,
                    });
                }
            }
        }
    }
}

fn start_error(
    error: SpawnError,
    spec: &CommandSpec,
    programs: &[CString],
    directory: &Path,
) -> Error {
    let SpawnError { step, errno } = error;
    let program = match spec.line() {
        CommandLine::Shell(_) => "/bin/sh",
        CommandLine::Program(words) => words.first().map(String::as_str).unwrap_or_default(),
        CommandLine::Code { language, .. } => language.name(),
    };
    let cause = format!("{} ({errno:?})", errno.desc().to_lowercase());
    let (kind, why) = match (step, errno) {
        (_, Errno::EAGAIN | Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE) => {
            let why = format!("{cause}; try again when another command has ended");
            (Kind::NoResources, why)
        }
        // ENOTSUPP, which is none of the C library's: the memory for compiled filters is used up.
        (SpawnStep::Filter, Errno::UnknownErrno) => {
            let why =
                "the kernel has no room for its filter (net.core.bpf_jit_limit); try again later";
            (Kind::NoResources, why.to_owned())
        }
        (SpawnStep::Directory, _) => {
            let text = format!("cannot enter cwd {}: {cause}", directory.display());
            return Error::new(Kind::BadDirectory, text);
        }
        (SpawnStep::Execute, Errno::ENOENT | Errno::ENOTDIR) => {
            let why = if let CommandLine::Code { language, .. } = spec.line() {
                format!("there is no {} in PATH", language.program())
            } else if program.contains('/') {
                "there is no such file, or the interpreter it names is missing".to_owned()
            } else {
                "there is no such program in PATH".to_owned()
            };
            (Kind::ProgramNotFound, why)
        }
        (SpawnStep::Execute, Errno::ENOEXEC) => {
            let why = "it is no program; a script needs a first line such as #!/bin/sh";
            (Kind::ProgramNotExecutable, why.to_owned())
        }
        (SpawnStep::Execute, Errno::EACCES)
            if programs
                .iter()
                .any(|path| lacks_execute_permission(path, directory)) =>
        {
            let why = "it is a directory or has no execute permission";
            (Kind::ProgramNotExecutable, why.to_owned())
        }
        (SpawnStep::Execute, Errno::E2BIG) => {
            let why = format!(
                "the command or its environment is too long for the kernel ({cause}); pass large input by stdin or a file"
            );
            (Kind::Invalid, why)
        }
        (SpawnStep::Execute, Errno::EACCES | Errno::EPERM) => (Kind::ProgramForbidden, cause),
        (
            SpawnStep::Execute,
            Errno::EISDIR | Errno::ELIBBAD | Errno::ETXTBSY | Errno::ELOOP | Errno::ENAMETOOLONG,
        ) => (Kind::ProgramNotExecutable, cause),
        _ => (
            Kind::System,
            format!("{cause} while preparing it ({step:?})"),
        ),
    };
    Error::new(kind, format!("cannot start {program}: {why}"))
}

fn lacks_execute_permission(program: &CString, directory: &Path) -> bool {
    directory
        .join(OsStr::from_bytes(program.as_bytes()))
        .metadata()
        .is_ok_and(|metadata| metadata.is_dir() || metadata.permissions().mode() & 0o111 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_searched_only_where_sandboxes_may_look() {
        let path = "/root/bin:/usr/bin::/usr/../root:relative:/opt/none:/usr/local/bin";
        assert_eq!(
            searchable(OsStr::new(path)),
            "/usr/bin:/opt/none:/usr/local/bin"
        );
        assert_eq!(searchable(OsStr::new("/root/bin")), DEFAULT_PATH);
    }

    #[test]
    fn a_filter_without_room_is_a_lack_of_resources() {
        let line = CommandLine::Shell("true".to_owned());
        let spec = CommandSpec::new(line, Vec::new(), None).unwrap();
        for (step, errno, kind) in [
            (SpawnStep::Filter, 524, Kind::NoResources),
            (SpawnStep::Filter, libc::ENOMEM, Kind::NoResources),
            (SpawnStep::Filter, libc::EINVAL, Kind::System),
            (SpawnStep::Limits, 524, Kind::System),
        ] {
            let errno = Errno::from_raw(errno);
            let error = start_error(SpawnError { step, errno }, &spec, &[], Path::new("/"));
            assert_eq!(error.kind(), kind, "{step:?} {errno:?}: {error}");
        }
    }
}
