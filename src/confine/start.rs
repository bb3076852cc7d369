//! Starts a command: puts its restrictions together for `sys::spawn`, and says what has failed.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use nix::errno::Errno;

use super::environment::search_path;
use super::{Confinement, Mark, Namespaces};
use crate::error::{Error, Kind, Result, cause};
use crate::spec::account::Account;
use crate::spec::command::{CommandLine, CommandSpec};
use crate::spec::network::NetworkPolicy;
use crate::sys::{self, ChildPlan, Inside, Restriction, SpawnError, SpawnStep, Spawned, User};
use crate::threads::lock::lock;

/// Added to the server's `oom_score_adj` for commands, so that the kernel kills a command first, in thousandths of
/// the memory: as long as the server holds less than this part. Memory that belongs to no process, such as
/// a file in memory, counts for none. Below the maximum of 1000, so that a command can still raise the score
/// of its own children.
const OOM_SCORE_STEP: i32 = 900;

/// How long a start is retried while the program is open for writing.
const BUSY_LIMIT: Duration = Duration::from_millis(200);

/// Most directories of PATH in which a program is looked for. The server waits meanwhile, and each look can take a
/// millisecond where links lead to links.
const MAX_SEARCHED: usize = 1000;

/// The nice value of a sandbox's commands, so that the server gets the processor first.
const NICE: i32 = 10;

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

impl Confinement {
    /// Starts a command with the network that [`network`](Self::network) returned, with these descriptors as 0, 1 and 2,
    /// `passed` as 4, and a mark for its descendants. The child stores its pid in `announcement` first.
    ///
    /// # Errors
    /// `ProgramNotFound`, `ProgramNotExecutable`, `ProgramForbidden`, `BadDirectory`, `NoResources`,
    /// `TooWide`, `Unavailable`, `Invalid`, `System`.
    pub fn spawn(
        &self,
        spec: &CommandSpec,
        network: &NetworkPolicy,
        stdio: [BorrowedFd<'_>; 3],
        passed: Option<BorrowedFd<'_>>,
        mark: Option<Mark>,
        announcement: &AtomicI32,
    ) -> Result<Spawned> {
        if self.is_at_rest {
            return Err(Error::new(Kind::Stopped, "the sandbox is stopped"));
        }
        let listener = self.listener(network)?;
        let walls = self.networks.walls(
            network,
            self.owns(network),
            listener.as_ref().map(|listener| listener.port()),
            &self.tcp_rules,
        )?;
        let account = self.account(spec.user.as_deref())?;
        let is_confined = self.wall.is_some() || *network != NetworkPolicy::Open;
        let environment = self.environment(spec, listener.as_deref(), account.as_ref());
        let search = search_path(&environment);
        let (programs, arguments) = (spec.programs(search), spec.arguments(search));
        if programs.len() > MAX_SEARCHED {
            let text = format!(
                "PATH names {} directories, and a program is looked for in {MAX_SEARCHED} at most",
                programs.len()
            );
            return Err(Error::invalid(text));
        }
        let start = match (&self.root, &account) {
            (Some(root), Some(account)) => root.start_of(account),
            _ => self.directory.as_path(),
        };
        let directory = start.join(spec.directory().unwrap_or_default());
        let mark = mark.map(Mark::limit);
        let limits = Arc::clone(&*lock(&self.limits));
        let limits: Vec<_> = limits.iter().copied().chain(mark).collect();
        let (user, inside) = self.identity(account.as_ref())?;
        let plan = ChildPlan {
            programs: &programs,
            arguments: &arguments,
            environment: &environment
                .into_iter()
                .map(|(_, entry)| entry)
                .collect::<Vec<_>>(),
            directory: &CString::new(directory.as_os_str().as_bytes()).unwrap_or_default(),
            stdio,
            passed,
            has_terminal: spec.terminal.is_some(),
            oom_score: oom_score().as_bytes(),
            limits: &limits,
            nice: if self.wall.is_some() { NICE } else { 0 },
            cgroup: self.limits().and_then(|limits| limits.cgroup()),
            restriction: is_confined.then(|| Restriction {
                user,
                rulesets: [self.file_rules(), walls.ruleset()],
                filter: walls.filter(),
                has_listener: walls.has_listener,
                inside,
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
                    if let Err(error) = self.serve_listener(listener, spawned.listener.take()) {
                        // Its sockets would fail.
                        announcement.store(0, Ordering::Release);
                        let _ = sys::signal_group(spawned.pid, libc::SIGKILL);
                        let _ = sys::wait(spawned.pidfd.as_fd(), true);
                        return Err(error);
                    }
                    return Ok(spawned);
                }
                Err(error) => {
                    return Err(self.explain(error, spec, &programs, &directory));
                }
            }
        }
    }

    /// Whom a command with this account runs as.
    fn identity<'a>(
        &'a self,
        account: Option<&'a Account>,
    ) -> Result<(Option<User>, Option<Inside<'a>>)> {
        let Some(account) = account else {
            return Ok((self.user(), None));
        };
        let users = self.namespaces.as_deref().and_then(Namespaces::users);
        // Elsewhere its root would be that of the machine.
        let users =
            users.ok_or_else(|| Error::new(Kind::System, "the sandbox has no user namespace"))?;
        let user = User {
            uid: account.uid,
            gid: account.gid,
        };
        let inside = Inside {
            users: users.as_fd(),
            groups: &account.groups,
        };
        Ok((Some(user), Some(inside)))
    }

    /// Says why a command did not start. As its user: the text must not reveal files that it may not see. Where it has a
    /// root of its own, the files of the machine do not count.
    fn explain(
        &self,
        error: SpawnError,
        spec: &CommandSpec,
        programs: &[CString],
        directory: &Path,
    ) -> Error {
        let seen = if self.has_own_root() { &[] } else { programs };
        match self.act() {
            Ok(_acting) => start_error(error, spec, seen, directory),
            Err(error) => error,
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
    let cause = cause(errno);
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
