//! What a command of a workspace runs as: its environment, where it starts, and the steps its
//! process takes before execve.
//!
//! A workspace has one [`Confinement`], made once. Everything a child needs is prepared here, in
//! the server; the steps themselves are `sys::spawn`'s ordered list. In dedicated mode the machine
//! is the sandbox and the command has the server's identity. In host mode a [`Policy`] says what all
//! sandboxes have in common, and each has a user, a Landlock ruleset and an environment of its own.

mod filter;
mod ruleset;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicI32;
use std::time::Duration;

use nix::errno::Errno;

use crate::command::{CommandLine, CommandSpec, EnvironmentChange};
use crate::error::{Error, Kind, Result};
use crate::sys::{
    self, ActingAs, ChildPlan, Resource, Restriction, SpawnError, Spawned, Step, User,
};
use ruleset::SystemRules;

/// What programs are searched in when the machine does not say.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// More than the server has itself, so that the kernel takes a command first; well below the most
/// (1000), so that a command that may write to /proc can still offer up its own children.
const OOM_SCORE_STEP: i32 = 300;

/// How long a program that is being written may keep a command from starting.
const BUSY_PATIENCE: Duration = Duration::from_millis(200);

/// How the commands of one workspace are started.
pub struct Confinement {
    common: Arc<Common>,
    /// By name, as execve(2) takes them: `NAME=value`.
    environment: BTreeMap<OsString, CString>,
    /// What was asked for when the sandbox was made, with others of its kind.
    asked: Arc<[EnvironmentChange]>,
    directory: PathBuf,
    limits: Vec<(Resource, libc::rlimit)>,
    /// What a sandbox's commands are without.
    wall: Option<Wall>,
}

/// What all commands of a server have in common.
struct Common {
    changed_signals: Vec<i32>,
    oom_score: String,
}

/// What keeps a sandbox's commands in.
struct Wall {
    user: User,
    ruleset: Option<OwnedFd>,
    policy: Arc<Policy>,
}

impl Common {
    fn new() -> Self {
        let own_score = std::fs::read_to_string("/proc/self/oom_score_adj")
            .ok()
            .and_then(|text| text.trim().parse::<i32>().ok())
            .unwrap_or(0);
        Self {
            changed_signals: sys::changed_signals(),
            oom_score: (own_score + OOM_SCORE_STEP).min(1000).to_string(),
        }
    }
}

/// The limit on open files that the server was started with, to be asked for before it raises its
/// own.
fn open_files() -> (Resource, libc::rlimit) {
    let (rlim_cur, rlim_max) =
        nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE)
            .unwrap_or((1024, libc::RLIM_INFINITY));
    let limit = libc::rlimit { rlim_cur, rlim_max };
    (libc::RLIMIT_NOFILE, limit)
}

/// How all sandboxes of a host are kept in.
pub struct Policy {
    common: Arc<Common>,
    rules: SystemRules,
    filter: Vec<libc::sock_filter>,
    /// Where programs are searched after the sandbox's own.
    search: OsString,
    open_files: (Resource, libc::rlimit),
}

/// What is particular to one sandbox.
pub struct SandboxSettings<'a> {
    /// The name under which it is known.
    pub id: &'a str,
    /// Who its commands are.
    pub user: User,
    /// Where it lives.
    pub home: &'a Path,
    /// The same, open.
    pub home_directory: BorrowedFd<'a>,
    /// What its commands find in their environment besides.
    pub environment: &'a Arc<[EnvironmentChange]>,
    /// Most processes and threads at once.
    pub max_processes: u64,
    /// Most bytes of data of each process.
    pub max_memory: Option<u64>,
}

impl Policy {
    /// To be called before the server changes its own limits: commands get those it was started with.
    ///
    /// # Errors
    /// The kernel has no system call filters, and `allow_unconfined` is not given.
    pub fn new(search: Option<&OsStr>, allow_unconfined: bool) -> Result<Arc<Self>> {
        let has_filters = sys::has_filters();
        if !has_filters && !allow_unconfined {
            return Err(Error::new(
                Kind::System,
                "cannot hold sandboxes: the kernel has no seccomp filters, or hides them; SBX_ALLOW_UNCONFINED=1 \
                 goes on without",
            ));
        }
        Ok(Arc::new(Self {
            common: Arc::new(Common::new()),
            rules: SystemRules::open(),
            filter: if has_filters {
                filter::program()
            } else {
                Vec::new()
            },
            search: searchable(search.unwrap_or(OsStr::new(DEFAULT_PATH))),
            open_files: open_files(),
        }))
    }

    /// What stands around each sandbox. Every one of these is a step that a command passes or does not
    /// start.
    pub fn layers(&self) -> Vec<&'static str> {
        let mut layers = vec!["uid", "no_new_privs", "rlimits", "no_capabilities"];
        layers.extend((!self.filter.is_empty()).then_some("seccomp"));
        layers.extend(self.rules.layers());
        layers
    }

    /// The Landlock ABI that rulesets are made for, 0 without Landlock.
    pub fn landlock_abi(&self) -> u32 {
        self.rules.abi()
    }

    /// How the commands of a sandbox are started.
    ///
    /// # Errors
    /// The ruleset cannot be made.
    pub fn confine(self: &Arc<Self>, sandbox: &SandboxSettings<'_>) -> Result<Confinement> {
        let home = sandbox.home.as_os_str();
        let below = |name: &str| sandbox.home.join(name).into_os_string();
        let mut path = below(".local/bin");
        path.push(":");
        path.push(&self.search);
        let environment = [
            ("PATH", path),
            ("HOME", home.to_owned()),
            ("TMPDIR", below(".tmp")),
            ("USER", USER_NAME.into()),
            ("LOGNAME", USER_NAME.into()),
            ("SBX_SANDBOX_ID", sandbox.id.into()),
            ("SBX_PROXY_DIR", below(".sbx/proxy")),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name.into(), entry(OsStr::new(name), &value)?)))
        .collect();
        let mut limits = vec![
            limit(libc::RLIMIT_NPROC, sandbox.max_processes),
            limit(libc::RLIMIT_CORE, 0),
            self.open_files,
        ];
        limits.extend(
            sandbox
                .max_memory
                .map(|bytes| limit(libc::RLIMIT_DATA, bytes)),
        );
        Ok(Confinement {
            common: Arc::clone(&self.common),
            environment,
            asked: Arc::clone(sandbox.environment),
            directory: sandbox.home.to_owned(),
            limits,
            wall: Some(Wall {
                user: sandbox.user,
                ruleset: self.rules.with_home(sandbox.home_directory)?,
                policy: Arc::clone(self),
            }),
        })
    }
}

/// What of a PATH is beneath directories of programs: elsewhere a sandbox may not look, and an entry
/// such as /root/.local/bin would make a missing program look like a forbidden one.
fn searchable(path: &OsStr) -> OsString {
    let entries = std::env::split_paths(path).filter(|entry| is_among_programs(entry));
    // What was split at colons has none. An empty list would be the working directory.
    match std::env::join_paths(entries) {
        Ok(path) if !path.is_empty() => path,
        _ => DEFAULT_PATH.into(),
    }
}

/// Whether a path is beneath a directory of programs, which every sandbox may read.
pub fn is_among_programs(path: &Path) -> bool {
    let resolved = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let path = resolved(path);
    ruleset::PROGRAMS
        .iter()
        .any(|directory| path.starts_with(resolved(Path::new(directory))))
}

/// Sandboxes yield to the server: however many processes one of them has, it is heard, and can end
/// them.
const NICE: i32 = 10;

/// What a sandbox's user is called in its environment; the machine's own list of users does not know
/// it.
const USER_NAME: &str = "sandbox";

/// A limit that cannot be raised again, and is not above what this process may set itself.
fn limit(resource: Resource, most: u64) -> (Resource, libc::rlimit) {
    let most = most.min(sys::hard_limit(resource));
    let limit = libc::rlimit {
        rlim_cur: most,
        rlim_max: most,
    };
    (resource, limit)
}

/// A variable as execve(2) takes it; none can hold a NUL.
fn entry(name: &OsStr, value: &OsStr) -> Option<CString> {
    CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok()
}

impl Confinement {
    /// Commands with the server's own identity, as the machine's image set it up.
    ///
    /// To be called before the server changes its own limits: commands get those it was started with.
    pub fn dedicated(
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        directory: PathBuf,
    ) -> Self {
        let default = ("PATH".into(), DEFAULT_PATH.into());
        let environment = [default]
            .into_iter()
            .chain(environment)
            .filter(|(name, _)| !name.as_bytes().starts_with(b"SBX_"))
            .filter_map(|(name, value)| {
                let entry = entry(&name, &value)?;
                Some((name, entry))
            });
        Self {
            common: Arc::new(Common::new()),
            environment: environment.collect(),
            asked: Arc::default(),
            directory,
            limits: vec![open_files()],
            wall: None,
        }
    }

    /// Makes the calling thread act on files as the commands would, while the result lives; nothing
    /// where they have the server's own identity.
    ///
    /// # Errors
    /// The user does not exist in the server's user namespace.
    pub fn act(&self) -> Result<Option<ActingAs>> {
        let acting = self.wall.as_ref().map(|wall| ActingAs::new(wall.user));
        acting
            .transpose()
            .map_err(|errno| Error::system("cannot act as the sandbox", errno))
    }

    /// What a command finds that asks for these changes, by name. Most commands change little, and so
    /// little is copied.
    fn environment<'a>(
        &'a self,
        changes: &'a [EnvironmentChange],
    ) -> BTreeMap<&'a OsStr, Cow<'a, CStr>> {
        let mut environment: BTreeMap<_, _> = self
            .environment
            .iter()
            .map(|(name, entry)| (name.as_os_str(), Cow::Borrowed(entry.as_c_str())))
            .collect();
        for (name, value) in self.asked.iter().chain(changes) {
            let name = OsStr::new(name);
            let entry = value.as_ref().and_then(|value| entry(name, value.as_ref()));
            match entry {
                Some(entry) => environment.insert(name, Cow::Owned(entry)),
                None => environment.remove(name),
            };
        }
        environment
    }

    /// Starts a command with these three standard streams. Its number is in `announcement` before it
    /// does anything.
    ///
    /// # Errors
    /// One of the kinds that say why a command cannot start.
    pub fn spawn(
        &self,
        spec: &CommandSpec,
        stdio: [BorrowedFd<'_>; 3],
        announcement: &AtomicI32,
    ) -> Result<Spawned> {
        let environment = self.environment(spec.environment());
        let search = environment
            .get(OsStr::new("PATH"))
            .and_then(|path| path.to_bytes().strip_prefix(b"PATH="))
            .unwrap_or(DEFAULT_PATH.as_bytes());
        let programs = spec.programs(search);
        let directory = self.directory.join(spec.directory().unwrap_or_default());
        let plan = ChildPlan {
            programs: &programs,
            arguments: &spec.arguments(),
            environment: &environment.into_values().collect::<Vec<_>>(),
            directory: &CString::new(directory.as_os_str().as_bytes()).unwrap_or_default(),
            stdio,
            changed_signals: &self.common.changed_signals,
            oom_score: self.common.oom_score.as_bytes(),
            limits: &self.limits,
            nice: if self.wall.is_some() { NICE } else { 0 },
            restriction: self.wall.as_ref().map(|wall| Restriction {
                user: wall.user,
                ruleset: wall.ruleset.as_ref().map(AsFd::as_fd),
                filter: &wall.policy.filter,
            }),
            announcement,
        };
        let mut patience = BUSY_PATIENCE;
        loop {
            match sys::spawn(&plan) {
                // A program that was written just now: another child, between clone and execve, may still
                // have the writer's descriptor. A real writer is one for longer.
                Err(SpawnError {
                    errno: Errno::ETXTBSY,
                    ..
                }) if !patience.is_zero() => {
                    let pause = Duration::from_millis(2).min(patience);
                    std::thread::sleep(pause);
                    patience -= pause;
                }
                result => {
                    // What cannot be seen by the command's user is not told about.
                    return result.map_err(|error| match self.act() {
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
    };
    let cause = format!("{} ({errno:?})", errno.desc().to_lowercase());
    let (kind, text) = match (step, errno) {
        (_, Errno::EAGAIN | Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE) => (
            Kind::NoResources,
            format!("cannot start {program}: {cause}; try again when something has ended"),
        ),
        (Step::Directory, _) => (
            Kind::BadDirectory,
            format!("cannot enter cwd {}: {cause}", directory.display()),
        ),
        (Step::Execute, Errno::ENOENT | Errno::ENOTDIR) if program.contains('/') => (
            Kind::ProgramNotFound,
            format!(
                "cannot start {program}: there is no such file, or the interpreter it names is missing"
            ),
        ),
        (Step::Execute, Errno::ENOENT | Errno::ENOTDIR) => (
            Kind::ProgramNotFound,
            format!("cannot start {program}: there is no such program in PATH"),
        ),
        (Step::Execute, Errno::ENOEXEC) => (
            Kind::ProgramNotExecutable,
            format!(
                "cannot start {program}: it is no program; a script needs a first line such as #!/bin/sh"
            ),
        ),
        (Step::Execute, Errno::EACCES)
            if programs
                .iter()
                .any(|path| lacks_execute_permission(path, directory)) =>
        {
            (
                Kind::ProgramNotExecutable,
                format!("cannot start {program}: it is a directory or has no execute permission"),
            )
        }
        (Step::Execute, Errno::E2BIG) => (
            Kind::Invalid,
            format!(
                "cannot start {program}: the command or its environment is too long for the kernel ({cause}); pass large input by stdin or a file"
            ),
        ),
        (Step::Execute, Errno::EACCES | Errno::EPERM) => (
            Kind::ProgramForbidden,
            format!("cannot start {program}: {cause}"),
        ),
        (
            Step::Execute,
            Errno::EISDIR | Errno::ELIBBAD | Errno::ETXTBSY | Errno::ELOOP | Errno::ENAMETOOLONG,
        ) => (
            Kind::ProgramNotExecutable,
            format!("cannot start {program}: {cause}"),
        ),
        _ => (
            Kind::System,
            format!("cannot start {program}: {cause} while preparing it ({step:?})"),
        ),
    };
    Error::new(kind, text)
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
}
