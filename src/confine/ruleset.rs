//! Landlock rulesets: the files of the machine that the commands of a sandbox may use, and how; and TCP.
//!
//! A ruleset is an allow-list. The system directories in it are opened once; each sandbox adds its home.
//! The server makes the ruleset, where errors can be reported, and the child applies it by its
//! descriptor (Documentation/userspace-api/landlock). The ruleset handles every file access right that
//! the running kernel knows, so the kernel refuses what is not listed here.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, NetPort, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
};
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

use super::given::GrantedAccess;
use super::grants::Grants;
use super::namespaces::Namespaces;
use super::system_files::{DEVICES, PROGRAMS, READABLE};
use crate::error::{Error, Kind, Result};
use crate::sys;
use crate::sys::paths::open;

/// Reading.
fn look() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::ReadDir
}

/// Reading and executing.
fn run() -> BitFlags<AccessFs> {
    look() | AccessFs::Execute
}

/// Using a device.
fn device() -> BitFlags<AccessFs> {
    look() | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev
}

/// What a sandbox with namespaces has of its own there, besides its home. The rules for what it shares with the
/// machine hold inside too, because a rule is about a file and not about its path.
fn own_files() -> [(&'static str, BitFlags<AccessFs>); 5] {
    let all = AccessFs::from_all(RIGHTS);
    [
        ("/tmp", all),
        ("/dev/shm", all),
        ("/dev/pts", device()),
        ("/proc", look()),
        // Nothing is in the directories below that others should not see.
        ("/", AccessFs::ReadDir.into()),
    ]
}

/// The newest access rights that the library knows; it drops those that the kernel lacks.
const RIGHTS: ABI = ABI::V9;

/// The rules that all sandboxes share.
pub(super) struct SystemRules {
    /// The running kernel's ABI, 0 without Landlock.
    pub(super) abi: u32,
    rules: Vec<SystemRule>,
}

struct SystemRule {
    path: &'static str,
    file: OwnedFd,
    access: BitFlags<AccessFs>,
}

impl SystemRules {
    /// Opens the listed files that the image has.
    pub(super) fn open() -> Self {
        let device = device();
        let lists: [(&[&'static str], BitFlags<AccessFs>); 3] =
            [(&PROGRAMS, run()), (&READABLE, look()), (&DEVICES, device)];
        let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
        Self {
            abi: sys::landlock_abi(),
            rules: lists
                .into_iter()
                .flat_map(|(paths, access)| paths.iter().map(move |path| (*path, access)))
                .filter_map(|(path, access)| {
                    let file = open(path, flags, Mode::empty()).ok()?;
                    Some(SystemRule { path, file, access })
                })
                .collect(),
        }
    }

    /// The layers that rulesets of this ABI enforce; that of TCP only without a network of its own.
    pub(super) fn layers(&self, has_network: bool) -> impl Iterator<Item = &'static str> {
        const TCP_BIND: &str = "landlock_tcp_bind";
        let since = [
            (1, "landlock_files"),
            (4, TCP_BIND),
            (6, "landlock_abstract_sockets"),
        ];
        let abi = self.abi;
        since
            .into_iter()
            .filter(move |(first, layer)| abi >= *first && !(has_network && *layer == TCP_BIND))
            .map(|(_, layer)| layer)
    }

    /// The listed files that the image has: those that can be written to, or the others.
    pub(super) fn paths(&self, are_writable: bool) -> impl Iterator<Item = &'static str> {
        let rules = self.rules.iter();
        let chosen =
            rules.filter(move |rule| rule.access.contains(AccessFs::WriteFile) == are_writable);
        chosen.map(|rule| rule.path)
    }

    /// Makes the ruleset of a sandbox whose root is its own: all files there, and none elsewhere; and of the machine's
    /// network, if it has that, what any sandbox has of it. It also keeps commands that are being started from being
    /// traced, and mounts as they are. `None` if the kernel has no Landlock.
    ///
    /// # Errors
    /// As [`SystemRules::of_sandbox`].
    pub(super) fn of_root(
        &self,
        namespaces: &Namespaces,
        tcp_ports: &[u16],
    ) -> Result<Option<OwnedFd>> {
        if self.abi == 0 {
            return Ok(None);
        }
        let root = namespaces
            .open("/")
            .map_err(|errno| Error::system(format_args!("{FAILED}: cannot open /"), errno))?;
        let all = AccessFs::from_all(RIGHTS);
        let files = [Ok(PathBeneath::new(root.as_fd(), all))].into_iter();
        // Commands of a network that is the sandbox's own share their sockets, and it keeps others from these.
        let is_alone = namespaces.has_network();
        of_files_and_ports(files, tcp_ports, is_alone, !is_alone).map(Some)
    }

    /// Makes the ruleset of the sandbox with this home, further paths, what it has of its own inside its namespaces,
    /// and the TCP ports that its commands can bind: all if its network is its own. `None` if the kernel has no
    /// Landlock.
    ///
    /// # Errors
    /// `System` if the kernel has Landlock but refuses the ruleset.
    pub(super) fn of_sandbox(
        &self,
        home: BorrowedFd<'_>,
        grants: &Grants,
        namespaces: Option<&Namespaces>,
        tcp_ports: &[u16],
    ) -> Result<Option<OwnedFd>> {
        if self.abi == 0 {
            return Ok(None);
        }
        let mut rules = vec![(home, AccessFs::from_all(RIGHTS))];
        rules.extend(
            self.rules
                .iter()
                .map(|rule| (rule.file.as_fd(), rule.access)),
        );
        for grant in grants.opened.iter().chain(&grants.devices.opened) {
            let access = match grant.access {
                GrantedAccess::Read => run(),
                GrantedAccess::Write => AccessFs::from_all(RIGHTS),
                GrantedAccess::Device => device(),
                GrantedAccess::Socket => AccessFs::ReadFile | AccessFs::ResolveUnix,
            };
            rules.push((grant.file.as_fd(), access));
        }
        let mut inside = Vec::new();
        if let Some(namespaces) = namespaces {
            for (path, access) in own_files() {
                let file = namespaces.open(path).map_err(|errno| {
                    let act = format!("{FAILED}: cannot open {path} of a sandbox");
                    Error::system(act, errno)
                })?;
                inside.push((file, access));
            }
        }
        rules.extend(inside.iter().map(|(file, access)| (file.as_fd(), *access)));
        let rules = rules.into_iter();
        let files = rules.map(|(file, access)| Ok(PathBeneath::new(file, access)));
        let is_alone = namespaces.is_some_and(Namespaces::has_network);
        of_files_and_ports(files, tcp_ports, is_alone, true).map(Some)
    }
}

/// A ruleset of all files that can be reached, and of the TCP ports that can be bound: all if the network is the sandbox's
/// own. With `is_scoped` no command reaches what another has bound to a name without a path.
fn of_files_and_ports<'a>(
    files: impl Iterator<Item = std::result::Result<PathBeneath<BorrowedFd<'a>>, RulesetError>>,
    tcp_ports: &[u16],
    is_alone: bool,
    is_scoped: bool,
) -> Result<OwnedFd> {
    let ports = tcp_ports.iter().filter(|_| !is_alone);
    let ports = ports.map(|port| Ok(NetPort::new(*port, AccessNet::BindTcp)));
    let ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(RIGHTS))
        .and_then(|ruleset| {
            if is_alone {
                Ok(ruleset)
            } else {
                ruleset.handle_access(AccessNet::BindTcp)
            }
        })
        .and_then(|ruleset| {
            if is_scoped {
                ruleset.scope(Scope::AbstractUnixSocket)
            } else {
                Ok(ruleset)
            }
        })
        .and_then(Ruleset::create)
        .and_then(|ruleset| ruleset.add_rules(files))
        .and_then(|ruleset| ruleset.add_rules(ports))
        .map_err(|error| failed(&error))?;
    descriptor_of(ruleset)
}

/// A ruleset by which no TCP socket is bound, and none is connected but to one port, or to none; `None` if the kernel
/// has no such rules (before ABI 4).
///
/// Every ruleset denies to move and link files from one directory to another (`EXDEV`) unless it has a rule that
/// allows this, even one that is not about files (Documentation/userspace-api/landlock.rst,
/// `LANDLOCK_ACCESS_FS_REFER`). So this one allows it everywhere beneath the root that the command has.
///
/// # Errors
/// `System` if the kernel refuses the ruleset, or the root cannot be opened.
pub(super) fn of_network(
    landlock_abi: u32,
    open_port: Option<u16>,
    namespaces: Option<&Namespaces>,
) -> Result<Option<OwnedFd>> {
    if landlock_abi < 4 {
        return Ok(None);
    }
    let ports = open_port.into_iter();
    let ports = ports.map(|port| Ok(NetPort::new(port, AccessNet::ConnectTcp)));
    let root = match namespaces {
        Some(namespaces) => namespaces.open("/"),
        None => open("/", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()),
    };
    let root =
        root.map_err(|errno| Error::system(format_args!("{FAILED}: cannot open /"), errno))?;
    let ruleset = Ruleset::default()
        .handle_access(AccessNet::BindTcp | AccessNet::ConnectTcp)
        .and_then(|ruleset| ruleset.handle_access(AccessFs::Refer))
        .and_then(Ruleset::create)
        .and_then(|ruleset| ruleset.add_rule(PathBeneath::new(&root, AccessFs::Refer)))
        .and_then(|ruleset| ruleset.add_rules(ports))
        .map_err(|error| failed(&error))?;
    descriptor_of(ruleset).map(Some)
}

fn descriptor_of(ruleset: RulesetCreated) -> Result<OwnedFd> {
    let descriptor: Option<OwnedFd> = ruleset.into();
    descriptor.ok_or_else(|| Error::new(Kind::System, format!("{FAILED}: the kernel made none")))
}

const FAILED: &str = "cannot make a Landlock ruleset";

/// The error with the errno that caused it, if there is one.
fn failed(error: &RulesetError) -> Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<std::io::Error>() {
            return Error::io(FAILED, error);
        }
        cause = error.source();
    }
    Error::new(Kind::System, format!("{FAILED}: {error}"))
}
