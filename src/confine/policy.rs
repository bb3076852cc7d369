//! The restrictions that all sandboxes of a host share, and the confinement that they give to each.

use std::ffi::{OsStr, OsString};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use super::devices::Devices;
use super::environment::entry;
use super::filter::Subject;
use super::given::GrantedPaths;
use super::namespaces::{NamespaceMaker, NamespacesSpec};
use super::network::{ABI_OF_SANDBOXES, Networks, TcpRules};
use super::private::{PROXY_DIRECTORY, root_unavailable};
use super::ruleset::SystemRules;
use super::{
    Confinement, DEFAULT_LANG, DEFAULT_PATH, Grants, Home, Limits, Namespaces, PrivateRoot,
    ProcessLimits, USER_NAME, Wall, inner_sockets, open_files, system_files,
};
use crate::codec::table::Table;
use crate::egress::{EgressListener, Exits};
use crate::error::{Error, Kind, Result};
use crate::spec::command::EnvironmentChange;
use crate::spec::isolation::Isolation;
use crate::spec::network::NetworkPolicy;
use crate::sys::{self, Resource, User};
use crate::threads::lock::Mutex;

/// The restrictions that all sandboxes of a host share.
pub struct Policy {
    rules: SystemRules,
    has_filters: bool,
    networks: Arc<Networks>,
    /// For commands in namespaces of their sandbox.
    inner_networks: Arc<Networks>,
    /// For commands with a root of their own.
    root_networks: Arc<Networks>,
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
    pub id: &'a str,
    /// The user of its commands.
    pub user: User,
    /// The paths of its home.
    pub home: Home,
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
    pub network: NetworkPolicy,
    /// Where its filtered connections leave.
    pub exits: Arc<Exits>,
    /// Paths that its commands reach besides.
    pub grants: &'a Grants,
    /// TCP ports that its commands can listen on.
    pub tcp_ports: &'a [u16],
    /// The limits of the sandbox as a whole.
    pub whole: &'a Arc<Limits>,
    /// Whether it runs nothing, so that it needs neither rules nor namespaces.
    pub is_at_rest: bool,
    /// The root that it has of its own.
    pub root: Option<Arc<PrivateRoot>>,
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
            root_networks: Arc::new(Networks::new(Subject::PrivateRoot, rules.abi)),
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
        let has_root = namespaces.is_some_and(|namespaces| namespaces.users().is_some());
        // Programs of a root inside have capabilities, and gain some.
        let mut layers = if has_root {
            vec!["uid", "rlimits"]
        } else {
            vec!["uid", "no_new_privs", "rlimits", "no_capabilities"]
        };
        layers.extend(self.has_filters.then_some("seccomp"));
        let has_network = namespaces.is_some_and(Namespaces::has_network);
        // In a root and a network of their own commands share their sockets, and the network keeps others from these.
        let ruled = self.rules.layers(has_network);
        let shares = has_root && has_network;
        layers.extend(ruled.filter(|layer| !shares || *layer == "landlock_files"));
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

    /// Tries a root: makes its namespaces once.
    ///
    /// # Errors
    /// `Unavailable`, with the reason; `System`.
    pub fn try_root(&self, root: &PrivateRoot) -> Result<()> {
        if !self.has_filters {
            return Err(root_unavailable("the kernel has no seccomp filters"));
        }
        if self.rules.abi < ABI_OF_SANDBOXES {
            return Err(root_unavailable(format_args!(
                "the kernel has no Landlock ABI {ABI_OF_SANDBOXES}"
            )));
        }
        let made = self.namespaces.make(&NamespacesSpec {
            user: root.root(),
            home: &Home::same(Path::new("/")),
            granted: &GrantedPaths::default(),
            devices: &Devices::default(),
            network: true,
            max_memory: None,
            max_processes: 16,
            root: Some(root),
        })?;
        made.end();
        self.root_networks.check(&NetworkPolicy::Blocked, true)
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

    /// The names of the network policies that are enforced here.
    pub fn network_policies(&self) -> Vec<&'static str> {
        self.networks.offered()
    }

    /// The paths of the machine that all sandboxes can read, or those that they can write to.
    pub fn paths(&self, are_writable: bool) -> impl Iterator<Item = &'static str> {
        self.rules.paths(are_writable)
    }

    /// Checks that a network policy is enforced here for sandboxes with this isolation.
    ///
    /// # Errors
    /// `Unavailable`, with the reason.
    pub fn check_network(&self, isolation: Isolation, policy: &NetworkPolicy) -> Result<()> {
        self.networks.check(policy, isolation.owns_network(policy))
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

    /// The limits of each process of a sandbox that may have so many, with so many bytes of data each.
    pub fn limits(&self, max_processes: u64, max_memory: Option<u64>) -> ProcessLimits {
        let data = max_memory.map(|bytes| limit(libc::RLIMIT_DATA, bytes));
        let always = [
            limit(libc::RLIMIT_NPROC, max_processes),
            limit(libc::RLIMIT_CORE, NO_CORE),
            self.open_files(max_processes),
        ];
        always.into_iter().chain(data).collect()
    }

    /// Prepares the confinement of a sandbox.
    ///
    /// # Errors
    /// `System` if the ruleset cannot be made; `Unavailable`, `NoResources` or `System` if its namespaces cannot.
    pub fn confine(&self, sandbox: SandboxSettings<'_>) -> Result<Confinement> {
        let namespaces = match sandbox.isolation {
            _ if sandbox.is_at_rest => None,
            Isolation::Landlock => None,
            Isolation::Namespaces => Some(self.namespaces.make(&NamespacesSpec {
                user: sandbox.user,
                home: &sandbox.home,
                granted: &sandbox.grants.paths,
                devices: &sandbox.grants.devices,
                network: sandbox.isolation.owns_network(&sandbox.network),
                max_memory: most_in_memory(&sandbox),
                max_processes: sandbox.max_processes,
                root: sandbox.root.as_deref(),
            })?),
        };
        let inner_listener = match (&namespaces, &sandbox.network) {
            (Some(namespaces), NetworkPolicy::Filtered(filter)) => {
                let own = Arc::clone(filter);
                Some(EgressListener::open_inside(own, inner_sockets(namespaces)).map(Arc::new)?)
            }
            _ => None,
        };
        let home = &sandbox.home.in_sandbox;
        let below = |name: &str| home.join(name).into_os_string();
        let has_own_root = sandbox.root.is_some();
        let path = if has_own_root {
            DEFAULT_PATH.into()
        } else {
            let mut path = below(".local/bin");
            path.push(":");
            path.push(&self.search);
            path
        };
        let (temporary, sockets) = if has_own_root {
            ("/tmp".into(), PROXY_DIRECTORY.into())
        } else {
            (below(".tmp"), below(".sbx/proxy"))
        };
        let user = match &sandbox.root {
            Some(root) => root.usual_account().name,
            None => USER_NAME.to_owned(),
        };
        let ports: Vec<String> = sandbox.tcp_ports.iter().map(u16::to_string).collect();
        let first_port = ports.first().map(|port| ("PORT", port.into()));
        let all_ports = first_port
            .is_some()
            .then(|| ("SBX_TCP_PORTS", ports.join(",").into()));
        let own = [
            ("PATH", path),
            ("HOME", home.into()),
            ("TMPDIR", temporary),
            ("USER", user.as_str().into()),
            ("LOGNAME", user.as_str().into()),
            ("LANG", DEFAULT_LANG.into()),
            ("SBX_SANDBOX_ID", sandbox.id.into()),
            ("SBX_PROXY_DIR", sockets),
        ]
        .into_iter()
        .chain(first_port)
        .chain(all_ports);
        // Those that the server itself sets count.
        let environment = sandbox.grants.devices.variables().chain(own).filter_map(
            |(name, value): (&str, OsString)| Some((name.into(), entry(OsStr::new(name), &value)?)),
        );
        Ok(Confinement {
            environment: Table::from(environment.collect::<Vec<_>>()),
            chosen: Arc::clone(sandbox.environment),
            directory: home.clone(),
            home: sandbox.home,
            venv: Mutex::default(),
            limits: Mutex::new(self.limits(sandbox.max_processes, sandbox.max_memory)),
            network: sandbox.network,
            networks: Arc::clone(if has_own_root {
                &self.root_networks
            } else if namespaces.is_some() {
                &self.inner_networks
            } else {
                &self.networks
            }),
            tcp_rules: TcpRules::new(namespaces.clone()),
            exits: sandbox.exits,
            wall: Some(Wall {
                user: sandbox.user,
                whole: Arc::clone(sandbox.whole),
                ruleset: if sandbox.is_at_rest {
                    None
                } else if let Some(namespaces) = namespaces.as_deref().filter(|_| has_own_root) {
                    self.rules.of_root(namespaces, sandbox.tcp_ports)?
                } else {
                    self.rules.of_sandbox(
                        sandbox.home_directory,
                        sandbox.grants,
                        namespaces.as_deref(),
                        sandbox.tcp_ports,
                    )?
                },
            }),
            is_at_rest: sandbox.is_at_rest,
            namespaces,
            inner_listener,
            root: sandbox.root,
        })
    }
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
    let entries =
        std::env::split_paths(path).filter(|entry| system_files::is_among_programs(entry));
    // An empty PATH would mean the working directory.
    match std::env::join_paths(entries) {
        Ok(path) if !path.is_empty() => path,
        _ => DEFAULT_PATH.into(),
    }
}

/// Open files that every process of a sandbox may have: the usual soft limit, which programs expect.
const ENOUGH_FILES: u64 = 1024;

/// Bytes of a core file. The kernel makes no file that is smaller than a page, and if the machine has a program for core
/// dumps, only this number keeps it from being started as root: it counts as no limit otherwise, 0 included (core(5)).
const NO_CORE: u64 = 1;

/// A limit that the child cannot raise again, capped at the server's own hard limit.
fn limit(resource: Resource, most: u64) -> (Resource, libc::rlimit) {
    let most = most.min(sys::limits(resource).rlim_max);
    let limit = libc::rlimit {
        rlim_cur: most,
        rlim_max: most,
    };
    (resource, limit)
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
}
