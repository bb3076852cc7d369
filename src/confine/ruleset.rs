//! The Landlock ruleset of a sandbox: what of the machine's files its commands may use, and how.
//!
//! A ruleset is an allow-list. Its descriptors of system directories are opened once; each sandbox
//! adds its home. The ruleset is made in the server, where errors can be reported, and applied in
//! the child by its descriptor (Documentation/userspace-api/landlock). Every right over files that
//! the running kernel knows is handled, so what is not listed here is refused.

use std::os::fd::{BorrowedFd, OwnedFd};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope,
};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use crate::error::{Error, Kind, Result};
use crate::sys;

/// Programs and what they need. Not in the list, and so closed: /root, /home, /tmp, /var, /run, /mnt,
/// /srv, whatever else an image or a job adds at the top, and the homes of other sandboxes.
pub(super) const PROGRAMS: [&str; 10] = [
    "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr", "/etc", "/opt", "/nix",
];

/// What tells about the machine, and two things that distributions keep elsewhere and link to from
/// /etc: without them there are no names of hosts, and no certificates.
const TOLD: [&str; 4] = [
    "/proc",
    "/sys",
    "/etc/resolv.conf",
    "/var/lib/ca-certificates",
];

/// Devices that every program may expect; not all of /dev, where disks are.
const DEVICES: [&str; 8] = [
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/ptmx",
    "/dev/pts",
];

/// The newest set of rights that the library knows; it leaves out what the kernel does not.
const RIGHTS: ABI = ABI::V9;

/// The rules that all sandboxes have.
pub(super) struct SystemRules {
    abi: u32,
    rules: Vec<(OwnedFd, BitFlags<AccessFs>)>,
}

impl SystemRules {
    /// Opens what there is of the lists; an image need not have all of it.
    pub(super) fn open() -> Self {
        let look = AccessFs::ReadFile | AccessFs::ReadDir;
        let device = look | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev;
        let lists: [(&[&str], BitFlags<AccessFs>); 3] = [
            (&PROGRAMS, look | AccessFs::Execute),
            (&TOLD, look),
            (&DEVICES, device),
        ];
        let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
        Self {
            abi: sys::landlock_abi(),
            rules: lists
                .into_iter()
                .flat_map(|(paths, access)| paths.iter().map(move |path| (*path, access)))
                .filter_map(|(path, access)| Some((open(path, flags, Mode::empty()).ok()?, access)))
                .collect(),
        }
    }

    /// The running kernel's ABI, 0 without Landlock.
    pub(super) fn abi(&self) -> u32 {
        self.abi
    }

    /// What a ruleset of this ABI does.
    pub(super) fn layers(&self) -> impl Iterator<Item = &'static str> {
        let since = [
            (1, "landlock_files"),
            (4, "landlock_tcp_bind"),
            (6, "landlock_abstract_sockets"),
        ];
        let abi = self.abi;
        since
            .into_iter()
            .filter(move |(first, _)| abi >= *first)
            .map(|(_, layer)| layer)
    }

    /// The ruleset of the sandbox that lives in `home`; none where the kernel has no Landlock.
    ///
    /// # Errors
    /// It cannot be made although the kernel has Landlock.
    pub(super) fn with_home(&self, home: BorrowedFd<'_>) -> Result<Option<OwnedFd>> {
        if self.abi == 0 {
            return Ok(None);
        }
        let system = self
            .rules
            .iter()
            .map(|(path, access)| Ok(PathBeneath::new(path, *access)));
        let ruleset = Ruleset::default()
            .handle_access(AccessFs::from_all(RIGHTS))
            .and_then(|ruleset| ruleset.handle_access(AccessNet::BindTcp))
            .and_then(|ruleset| ruleset.scope(Scope::AbstractUnixSocket))
            .and_then(Ruleset::create)
            .and_then(|ruleset| {
                ruleset.add_rule(PathBeneath::new(home, AccessFs::from_all(RIGHTS)))
            })
            .and_then(|ruleset| ruleset.add_rules(system))
            .map_err(|error| failed(&error))?;
        let descriptor: Option<OwnedFd> = ruleset.into();
        match descriptor {
            Some(descriptor) => Ok(Some(descriptor)),
            None => Err(Error::new(
                Kind::System,
                format!("{FAILED}: the kernel took none"),
            )),
        }
    }
}

const FAILED: &str = "cannot make the sandbox's Landlock ruleset";

/// With the name of the errno, if there is one behind it.
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
