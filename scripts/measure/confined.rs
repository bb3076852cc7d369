//! The floor of sandboxes: the kernel's own work, done here without a server. The directories of a
//! home, a command that becomes another user under a Landlock ruleset, a kill by user.

use std::ffi::{CStr, c_int};
use std::fs::{self, DirBuilder};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, chown};
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
};
use nix::sched::{CloneFlags, clone};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use super::program::Scratch;

/// A user that no server here gives.
const OWN_USER: u32 = 17_999;

/// A process that borrows this one's memory until it has ended, in the namespaces of a sandbox.
pub const NAMESPACES: CloneFlags = CloneFlags::CLONE_VM
    .union(CloneFlags::CLONE_VFORK)
    .union(CloneFlags::CLONE_NEWNS)
    .union(CloneFlags::CLONE_NEWPID)
    .union(CloneFlags::CLONE_NEWIPC)
    .union(CloneFlags::CLONE_NEWNET)
    .union(CloneFlags::CLONE_NEWUTS)
    .union(CloneFlags::CLONE_NEWCGROUP);

/// The same work without a server.
pub struct Floor {
    home: PathBuf,
    system: Vec<PathFd>,
}

impl Floor {
    const DIRECTORIES: [&str; 4] = ["", ".tmp", ".sbx", ".sbx/proxy"];

    pub fn new(scratch: &Scratch) -> Self {
        let system = [
            "/bin",
            "/lib",
            "/lib64",
            "/usr",
            "/etc",
            "/proc",
            "/dev/null",
        ];
        let system = system.iter().filter_map(|path| PathFd::new(path).ok());
        Self {
            home: scratch.path("floor"),
            system: system.collect(),
        }
    }

    /// A ruleset as simple as a sandbox's can be.
    pub fn ruleset(&self) -> OwnedFd {
        let read = AccessFs::from_read(ABI::V6);
        let system = self.system.iter().map(|path| PathBeneath::new(path, read));
        let ruleset = Ruleset::default()
            .handle_access(AccessFs::from_all(ABI::V6))
            .unwrap()
            .create()
            .unwrap()
            .add_rules(system.map(Ok::<_, landlock::RulesetError>))
            .unwrap();
        let ruleset: Option<OwnedFd> = ruleset.into();
        ruleset.expect("the server started, so there is Landlock")
    }

    pub fn make_home(&self) {
        for name in Self::DIRECTORIES {
            let path = self.home.join(name);
            DirBuilder::new().mode(0o700).create(&path).unwrap();
            chown(&path, Some(OWN_USER), Some(OWN_USER)).unwrap();
        }
    }

    /// Starts a program as another user, in the ruleset.
    pub fn start(ruleset: &OwnedFd, words: &[&CStr]) -> Pid {
        let ruleset = ruleset.as_raw_fd();
        let mut arguments: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
        arguments.push(std::ptr::null());
        let arguments = arguments.as_ptr();
        in_child(&mut || become_and_execute(ruleset, arguments))
    }

    pub fn wait(pid: Pid) {
        assert_eq!(waitpid(pid, None), Ok(WaitStatus::Exited(pid, 0)));
    }

    /// Ends what runs as the user, and removes the home.
    pub fn end(&self, running: Pid) {
        let killer = in_child(&mut kill_own);
        Self::wait(killer);
        let ended = waitpid(running, None).unwrap();
        assert!(matches!(ended, WaitStatus::Signaled(..)), "{ended:?}");
        for name in Self::DIRECTORIES.iter().rev() {
            fs::remove_dir(self.home.join(name)).unwrap();
        }
    }
}

/// `/bin/true`, started and waited for, from any number of threads: the C library's `posix_spawn` lets
/// one thread through at a time.
pub fn run_true() {
    let words = [c"/bin/true".as_ptr(), std::ptr::null()];
    Floor::wait(in_child(&mut || execute(words.as_ptr())));
}

/// Makes the namespaces of a sandbox, empty, and lets them go.
#[allow(unsafe_code)]
pub fn make_namespaces() {
    let mut stack = vec![0; 64 << 10];
    // SAFETY: as in `in_child`; there are no steps.
    let made = unsafe { clone(Box::new(|| 0), &mut stack, NAMESPACES, Some(libc::SIGCHLD)) };
    Floor::wait(made.unwrap());
}

/// Runs `steps` in a new process that borrows this one's memory until it has executed or ended, as
/// the server does it (and `posix_spawn`, which knows neither users nor rulesets).
#[allow(unsafe_code)]
fn in_child(steps: &mut dyn FnMut() -> isize) -> Pid {
    let mut stack = vec![0; 64 << 10];
    let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_VFORK;
    // SAFETY: the calling thread stands still until the new process has memory of its own, so the
    // stack and `steps` outlive its use of them; the steps are system calls.
    unsafe { clone(Box::new(steps), &mut stack, flags, Some(libc::SIGCHLD)) }.unwrap()
}

/// The steps of a command that is kept in; returns only if it cannot start.
#[allow(unsafe_code)]
fn become_and_execute(ruleset: c_int, arguments: *const *const libc::c_char) -> isize {
    // SAFETY: numbers. The raw setresuid changes this process alone; the C library's would look for
    // its threads.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0);
        libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>());
        libc::syscall(libc::SYS_setresgid, OWN_USER, OWN_USER, OWN_USER);
        libc::syscall(libc::SYS_setresuid, OWN_USER, OWN_USER, OWN_USER);
    }
    execute(arguments)
}

#[allow(unsafe_code)]
fn execute(arguments: *const *const libc::c_char) -> isize {
    let environment: [*const libc::c_char; 1] = [std::ptr::null()];
    // SAFETY: strings and arrays of them that end as they must and outlive the call.
    unsafe {
        libc::execve(*arguments, arguments, environment.as_ptr());
        libc::_exit(127)
    }
}

/// Kills everything that runs as the user.
#[allow(unsafe_code)]
fn kill_own() -> isize {
    // SAFETY: numbers; as above.
    unsafe {
        libc::syscall(libc::SYS_setresuid, OWN_USER, OWN_USER, OWN_USER);
        libc::kill(-1, libc::SIGKILL);
        libc::_exit(0)
    }
}
