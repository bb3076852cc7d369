//! What a command of a workspace runs as: its environment, where it starts, and the steps its
//! process takes before execve.
//!
//! A workspace has one [`Confinement`], made once. Everything a child needs is prepared here, in
//! the server; the steps themselves are `sys::spawn`'s ordered list. In dedicated mode the machine
//! is the sandbox and the command has the server's identity.

#[cfg_attr(
    not(test),
    expect(dead_code, reason = "sandboxes, which get it, are not there yet")
)]
mod filter;

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;

use crate::command::{CommandLine, CommandSpec};
use crate::error::{Error, Kind, Result};
use crate::sys::{self, ChildPlan, SpawnError, Spawned, Step};

/// What programs are searched in when the machine does not say.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// More than the server has itself, so that the kernel takes a command first; well below the most
/// (1000), so that a command can still offer up its own children.
const OOM_SCORE_STEP: i32 = 300;

/// How long a program that is being written may keep a command from starting.
const BUSY_PATIENCE: Duration = Duration::from_millis(200);

/// How the commands of one workspace are started.
pub struct Confinement {
    environment: BTreeMap<OsString, OsString>,
    directory: PathBuf,
    ignored_signals: Vec<i32>,
    oom_score: String,
    open_files: libc::rlimit,
}

impl Confinement {
    /// Commands with the server's own identity, as the machine's image set it up.
    ///
    /// To be called before the server changes its own limits: commands get those it was started with.
    pub fn dedicated(
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        directory: PathBuf,
    ) -> Self {
        let mut environment: BTreeMap<_, _> = environment
            .into_iter()
            .filter(|(name, _)| !name.as_bytes().starts_with(b"SBX_"))
            .collect();
        environment
            .entry("PATH".into())
            .or_insert_with(|| DEFAULT_PATH.into());
        let own_score = std::fs::read_to_string("/proc/self/oom_score_adj")
            .ok()
            .and_then(|text| text.trim().parse::<i32>().ok())
            .unwrap_or(0);
        let (soft, hard) =
            nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE)
                .unwrap_or((1024, libc::RLIM_INFINITY));
        Self {
            environment,
            directory,
            ignored_signals: sys::ignored_signals(),
            oom_score: (own_score + OOM_SCORE_STEP).min(1000).to_string(),
            open_files: libc::rlimit {
                rlim_cur: soft,
                rlim_max: hard,
            },
        }
    }

    /// Starts a command with these three standard streams.
    ///
    /// # Errors
    /// One of the kinds that say why a command cannot start.
    pub fn spawn(&self, spec: &CommandSpec, stdio: [BorrowedFd<'_>; 3]) -> Result<Spawned> {
        let mut environment = self.environment.clone();
        for (name, value) in spec.environment() {
            match value {
                Some(value) => environment.insert(name.into(), value.into()),
                None => environment.remove(OsStr::new(name)),
            };
        }
        let search = environment
            .get(OsStr::new("PATH"))
            .map_or(OsStr::new(DEFAULT_PATH), OsString::as_os_str);
        let programs = spec.programs(search.as_bytes());
        let directory = self.directory.join(spec.directory().unwrap_or_default());
        let plan = ChildPlan {
            programs: &programs,
            arguments: &spec.arguments(),
            environment: &environment
                .into_iter()
                .filter_map(|(name, value)| {
                    let mut entry = name.into_vec();
                    entry.push(b'=');
                    entry.extend_from_slice(value.as_bytes());
                    CString::new(entry).ok()
                })
                .collect::<Vec<_>>(),
            directory: &CString::new(directory.as_os_str().as_bytes()).unwrap_or_default(),
            stdio,
            ignored_signals: &self.ignored_signals,
            oom_score: self.oom_score.as_bytes(),
            open_files: self.open_files,
        };
        let mut patience = BUSY_PATIENCE;
        loop {
            match sys::spawn(&plan) {
                // A program that was written just now: another child, between clone and execve, still
                // has the writer's descriptor. A real writer is one for longer.
                Err(SpawnError {
                    errno: Errno::ETXTBSY,
                    ..
                }) if !patience.is_zero() => {
                    let pause = Duration::from_millis(2).min(patience);
                    std::thread::sleep(pause);
                    patience -= pause;
                }
                result => {
                    return result.map_err(|error| start_error(error, spec, &programs, &directory));
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
