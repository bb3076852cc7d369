//! How the commands of a workspace start: environment, working directory, limits and identity.
//!
//! A workspace has one [`Confinement`]. It prepares in the server everything that the child needs; the
//! child's steps are the ordered list of `sys::spawn`. In dedicated mode the machine is the sandbox, and
//! commands have the server's identity. In host mode a [`Policy`] holds what all sandboxes share, and each
//! sandbox has its own user, Landlock ruleset and environment.

mod cdi;
mod cgroup;
mod devices;
mod environment;
mod filter;
mod given;
mod grants;
mod limits;
mod mark;
mod namespaces;
mod network;
mod policy;
mod private;
mod ruleset;
mod start;
mod system_files;
mod trees;

use std::ffi::{CString, OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::socket::SockType;

use crate::codec::table::Table;
use crate::egress::{EgressListener, Exits, MakeSocket};
use crate::error::{Error, Kind, Result};
use crate::spec::account::{Account, Names};
use crate::spec::command::EnvironmentChange;
use crate::spec::network::{NetworkPolicy, TooWide};
use crate::sys::{self, ActingAs, CallListener, Resource, User};
use crate::threads::lock::{Mutex, lock};
pub use devices::{DeviceRequest, Devices, FileView};
use environment::entry;
use filter::Subject;
pub use given::GrantedPaths;
pub use grants::{FileIdentity, Grants};
pub use limits::{KillWatch, Limiter, Limits, MemoryKill, ended_for_memory};
pub use mark::Mark;
pub use namespaces::{HOLDER_ARGUMENT, IN_MEMORY, MemoryDisk, Namespaces, holders};
use network::{Networks, TcpRules};
pub use policy::{Policy, SandboxSettings};
pub use private::{PrivateRoot, root_unavailable};
pub use system_files::{PROGRAMS, is_among_programs};
pub use trees::{check_waiting_trees, close_unused_trees, have_trees};

/// PATH if the server's environment has none.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// LANG where nobody has chosen another: without it programs take text for ASCII.
const DEFAULT_LANG: &str = "C.UTF-8";

/// The limits of each process of a sandbox.
pub type ProcessLimits = Arc<[(Resource, libc::rlimit)]>;

/// How the commands of one workspace are started.
pub struct Confinement {
    /// `NAME=value`, by name.
    environment: Table<OsString, CString>,
    /// Variables that the client chose for the sandbox; shared by sandboxes of one request.
    chosen: Arc<[EnvironmentChange]>,
    /// Where commands start.
    directory: PathBuf,
    home: Home,
    /// The virtual environment of commands that start from now on.
    venv: Mutex<Option<String>>,
    /// Those of each process that starts from now on. Guards the list alone.
    limits: Mutex<ProcessLimits>,
    /// What commands reach over the network unless they choose less.
    network: NetworkPolicy,
    networks: Arc<Networks>,
    /// Those of commands whose network is confined.
    tcp_rules: TcpRules,
    /// Where filtered connections leave.
    exits: Arc<Exits>,
    /// `None` for commands with the server's identity.
    wall: Option<Wall>,
    /// Whether it starts nothing, and has no rules to start something with.
    is_at_rest: bool,
    /// `None` for commands in the server's own.
    namespaces: Option<Arc<Namespaces>>,
    /// Where filtered connections arrive if the network is the sandbox's own.
    inner_listener: Option<Arc<EgressListener>>,
    /// The root of the sandbox, if it has one of its own.
    root: Option<Arc<PrivateRoot>>,
}

/// The paths of a home. They differ where commands have mounts of their own.
#[derive(Debug, Clone)]
pub struct Home {
    /// As the server sees it.
    pub on_machine: PathBuf,
    /// As commands see it.
    pub in_sandbox: PathBuf,
}

impl Home {
    /// A home that commands see where the server does.
    pub fn same(path: &Path) -> Self {
        Self {
            on_machine: path.to_owned(),
            in_sandbox: path.to_owned(),
        }
    }
}

/// The restrictions of a sandbox's commands.
struct Wall {
    user: User,
    whole: Arc<Limits>,
    ruleset: Option<OwnedFd>,
}

/// The limit on open files; call it before the server raises its own.
fn open_files() -> (Resource, libc::rlimit) {
    (libc::RLIMIT_NOFILE, sys::limits(libc::RLIMIT_NOFILE))
}

/// Makes TCP sockets in the network of a sandbox, as long as that exists.
fn inner_sockets(namespaces: &Arc<Namespaces>) -> MakeSocket {
    let namespaces = Arc::downgrade(namespaces);
    Box::new(move |family| {
        let inside = namespaces.upgrade().ok_or(Errno::ENETDOWN);
        let socket = inside.and_then(|inside| inside.socket(family, SockType::Stream));
        socket.map_err(|errno| {
            Error::system("cannot make a socket in the network of a sandbox", errno)
        })
    })
}

/// `USER` and `LOGNAME` in a sandbox. Outside of namespaces /etc/passwd has no entry for its uid.
pub const USER_NAME: &str = "sandbox";

/// The home that variables name, or else the directory.
fn home_of(environment: &Table<OsString, CString>, directory: &Path) -> Home {
    let home = environment.get(OsStr::new("HOME"));
    let home = home.and_then(|entry| entry.to_bytes().strip_prefix(b"HOME="));
    let home = home.map(|home| Path::new(OsStr::from_bytes(home)));
    let home = home.filter(|home| home.is_absolute());
    Home::same(home.unwrap_or(directory))
}

impl Confinement {
    /// Commands with the server's identity and its environment without `SBX_*`.
    ///
    /// Call it before the server changes its own limits: commands get the original ones.
    ///
    /// # Errors
    /// `Unavailable` if the machine cannot enforce the network policy.
    pub fn dedicated(
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        directory: PathBuf,
        network: NetworkPolicy,
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
        let environment = Table::from(own.collect::<Vec<_>>());
        let networks = Arc::new(Networks::new(Subject::Machine, sys::landlock_abi()));
        networks.check(&network, false)?;
        Ok(Self {
            home: home_of(&environment, &directory),
            environment,
            chosen: Arc::default(),
            directory,
            venv: Mutex::default(),
            limits: Mutex::new([open_files()].into()),
            network,
            networks,
            tcp_rules: TcpRules::new(None),
            exits,
            wall: None,
            is_at_rest: false,
            namespaces: None,
            inner_listener: None,
            root: None,
        })
    }

    /// Commands of this process, whose network is open.
    #[cfg(test)]
    pub fn for_test() -> Self {
        let budget = crate::limits::ledger::Budget::new(1 << 20);
        let slots = crate::http::slots::ConnectionSlots::new(1, Arc::clone(&budget));
        let exits = Exits::new(crate::egress::Egress::new(slots), budget.whole(), None);
        Self::dedicated(std::env::vars_os(), "/".into(), NetworkPolicy::Open, exits).unwrap()
    }

    /// The names of the network policies that commands can have here.
    pub fn network_policies(&self) -> Vec<&'static str> {
        self.networks.offered()
    }

    /// What a command reaches over the network that asks for a policy, or for none.
    ///
    /// # Errors
    /// `TooWide` if it asks for more than the workspace allows; `Unavailable` if the machine cannot enforce
    /// it.
    pub fn network(&self, asked: Option<&NetworkPolicy>) -> Result<NetworkPolicy> {
        let Some(asked) = asked else {
            return Ok(self.network.clone());
        };
        let policy = asked.clone().beneath(&self.network);
        let policy = policy.map_err(|TooWide(what)| {
            let ceiling = self.network.name();
            let text = format!(
                "network {what}, which is wider than {ceiling}, what all commands here have; a command can only tighten it"
            );
            Error::new(Kind::TooWide, text)
        })?;
        self.networks.check(&policy, self.owns(&policy))?;
        Ok(policy)
    }

    /// What commands reach over the network that ask for nothing else.
    pub fn policy(&self) -> &NetworkPolicy {
        &self.network
    }

    /// What was allowed and refused to commands whose network is filtered.
    pub fn exits(&self) -> &Exits {
        &self.exits
    }

    /// Whether the sandbox's own network enforces a policy, so that rules need not.
    fn owns(&self, policy: &NetworkPolicy) -> bool {
        self.own_network().is_some() && *policy == self.network
    }

    /// Where the connections of commands with a policy arrive; `None` if nothing filters them.
    fn listener(&self, policy: &NetworkPolicy) -> Result<Option<Arc<EgressListener>>> {
        match (policy, &self.inner_listener) {
            (NetworkPolicy::Open | NetworkPolicy::Blocked, _) => Ok(None),
            (_, Some(listener)) if *policy == self.network => Ok(Some(Arc::clone(listener))),
            (NetworkPolicy::Filtered(filter), _) => {
                let inside = self.own_network().map(inner_sockets);
                self.exits.listener(filter, inside).map(Some)
            }
        }
    }

    /// Serves the egress listener of a command that has started.
    fn serve_listener(
        &self,
        listener: Option<Arc<EgressListener>>,
        calls: Option<CallListener>,
    ) -> Result<()> {
        match (listener, calls, self.namespaces.as_deref()) {
            (Some(listener), Some(calls), namespaces) => {
                let is_inner = |inner: &Arc<EgressListener>| Arc::ptr_eq(inner, &listener);
                if let Some(namespaces) =
                    namespaces.filter(|_| self.inner_listener.as_ref().is_some_and(is_inner))
                {
                    // Until the sandbox ends: the last connections may be of programs that have ended.
                    self.exits
                        .serve_inside(&listener, namespaces.holder().as_fd())?;
                }
                self.exits.serve(listener, calls)
            }
            (Some(listener), None, Some(namespaces)) => self
                .exits
                .serve_inside(&listener, namespaces.holder().as_fd()),
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
        self.act_as(None)
    }

    /// The same for a command that asks for a user.
    ///
    /// # Errors
    /// As [`Confinement::act`] and [`Confinement::account`].
    pub fn act_as(&self, asked: Option<&str>) -> Result<Option<ActingAs>> {
        let user = match (&self.root, self.account(asked)?) {
            (Some(root), Some(account)) => Some(root.outside(account.uid, account.gid)),
            _ => self.user(),
        };
        let acting = user.map(ActingAs::new);
        acting
            .transpose()
            .map_err(|errno| Error::system("cannot act as the sandbox", errno))
    }

    /// Where commands start: the home of a sandbox, or where the server was started.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The home of the commands: that of a sandbox, else what the server's environment says, else where it was started.
    pub fn home(&self) -> &Home {
        &self.home
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

    /// Gives the processes that start from now on other limits, which come from the policy.
    pub fn set_limits(&self, limits: ProcessLimits) {
        *lock(&self.limits) = limits;
    }

    /// Who a command is that asks for a user, or for none; `None` where all commands have the same.
    ///
    /// # Errors
    /// `Invalid` if there is no such account.
    pub fn account(&self, asked: Option<&str>) -> Result<Option<Account>> {
        let root = self.root.as_ref();
        root.map(|root| root.account(asked)).transpose()
    }

    /// The names of the users and of the groups of a root of their own, by number.
    pub fn names(&self) -> Option<Arc<[Names; 2]>> {
        self.root.as_ref().map(|root| root.names())
    }

    /// Whom files are accessed as for a user of a root of their own, whether that is its root, and where relative paths of
    /// the user begin; `None` without such a root.
    ///
    /// # Errors
    /// As [`Confinement::account`].
    pub fn file_account(&self, user: &str) -> Result<Option<(User, bool, String)>> {
        let Some(root) = &self.root else {
            return Ok(None);
        };
        let account = root.account(Some(user))?;
        let start = root.home_of(&account).display().to_string();
        let owner = root.outside(account.uid, account.gid);
        Ok(Some((owner, account.uid == 0, start)))
    }

    /// Who runs commands that choose nobody, where they can be any account.
    pub fn usual_account(&self) -> Option<Account> {
        self.root.as_ref().map(|root| root.usual_account())
    }

    /// Whether commands can be any account of the root that they have of their own.
    pub fn has_own_root(&self) -> bool {
        self.root.is_some()
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
}
