//! Starting a program: the plan, the server's half and the child's half.
//!
//! The child shares the server's memory until execve. It makes raw system calls only, in an order that
//! matters, on memory that was prepared before it exists.

use std::borrow::Cow;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

use nix::errno::Errno;

use super::clone::{ChildStack, clone_in, enter_cgroup, write_oom_score};
use super::descriptors::ReservedSlot;
use super::identity::{User, become_user, become_user_inside, keep_capabilities_inside};
use super::namespaces::{EntranceError, Holder, clone_inside};
use super::process::{Pid, pidfd_signal, wait};
use super::pty::take_controlling_terminal;
use super::seccomp::{CallListener, LISTENER_FLAGS, ListenerChannel, send_listener};
use super::signals::{changed_signals, set_default};
use super::system::Resource;

/// The child's steps, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpawnStep {
    /// clone(2).
    Clone,
    /// Enter the cgroup.
    Cgroup,
    /// Enter the namespaces of a sandbox (setns(2)).
    Enter,
    /// setsid(2).
    Session,
    /// Put the standard streams in place and close everything else.
    Descriptors,
    /// Make the terminal the session's controlling terminal.
    Terminal,
    /// Set `PR_SET_NO_NEW_PRIVS`: set-user-ID programs give nothing.
    NoNewPrivileges,
    /// Set resource limits.
    Limits,
    /// Enforce the Landlock rulesets.
    Ruleset,
    /// Enter the user namespace of a sandbox with a root of its own, and set groups, group and user, and drop capabilities.
    Identity,
    /// Install the system call filter.
    Filter,
    /// Enter the working directory.
    Directory,
    /// Try execve(2) on every candidate.
    Execute,
}

/// Why a program did not start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpawnError {
    /// The step that failed.
    pub step: SpawnStep,
    /// The error of its system call.
    pub errno: Errno,
}

/// What the child needs, prepared before it exists.
pub struct ChildPlan<'a> {
    /// Paths to execute, tried in order as execvp(3) tries the directories of PATH.
    pub programs: &'a [CString],
    /// `argv`.
    pub arguments: &'a [CString],
    /// `envp`.
    pub environment: &'a [Cow<'a, CStr>],
    pub directory: &'a CStr,
    /// Become descriptors 0, 1 and 2.
    pub stdio: [BorrowedFd<'a>; 3],
    /// Becomes descriptor 4.
    pub passed: Option<BorrowedFd<'a>>,
    /// Whether descriptor 0 becomes the controlling terminal.
    pub has_terminal: bool,
    /// Written to `/proc/self/oom_score_adj`.
    pub oom_score: &'a [u8],
    /// Resource limits to set.
    pub limits: &'a [(Resource, libc::rlimit)],
    /// The nice value if above 0 (setpriority(2)).
    pub nice: c_int,
    /// The directory of the cgroup that it runs in; `None` for the server's own.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// `None` for a command with the server's own identity.
    pub restriction: Option<Restriction<'a>>,
    /// Whose namespaces it starts in; `None` for the server's own.
    pub inside: Option<&'a Holder>,
    /// The child's process number is stored here first, for other threads: the caller waits for the
    /// child meanwhile. 0 after an error.
    pub announcement: &'a AtomicI32,
}

/// What a command gives up.
#[derive(Clone, Copy)]
pub struct Restriction<'a> {
    /// The user it runs as, without supplementary groups and capabilities; `None` for the server's own.
    pub user: Option<User>,
    /// Landlock rulesets, each a layer. None in the first place if the kernel has no Landlock and the operator
    /// accepted that.
    pub rulesets: [Option<BorrowedFd<'a>>; 2],
    /// The seccomp filter; empty if the kernel has none and the operator accepted that.
    pub filter: &'a [libc::sock_filter],
    /// Whether the filter leaves some calls to the server, which gets its listener.
    pub has_listener: bool,
    /// The user namespace that [`user`](Self::user) is of, where the sandbox has a root of its own. Its programs may
    /// change users there.
    pub inside: Option<Inside<'a>>,
}

/// Who a command is in the user namespace of its sandbox.
#[derive(Clone, Copy)]
pub struct Inside<'a> {
    pub users: BorrowedFd<'a>,
    /// Its further groups.
    pub groups: &'a [libc::gid_t],
}

/// A child that runs its program.
pub struct Spawned {
    /// Its process number, which is also its process group and session.
    pub pid: Pid,
    /// Its pidfd.
    pub pidfd: OwnedFd,
    /// Tells of the calls that its filter leaves to the server.
    pub listener: Option<CallListener>,
}

/// The plan in the form that the child reads, and what it reports back. The server does not run this
/// thread until the child has called execve or exited, so cells are enough.
struct RawPlan<'a> {
    plan: &'a ChildPlan<'a>,
    /// Become descriptors 0, 1 and 2.
    stdio: [RawFd; 3],
    /// Become descriptors 3 to 7: a ruleset, what is passed, another ruleset, the channel for a listener, a user namespace.
    others: [Option<RawFd>; 5],
    /// With a shared table: the number from which on the child needs none.
    shared_end: Option<c_int>,
    /// Signals that the server ignores or handles and the child must not.
    changed_signals: &'static [c_int],
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    failure: Cell<Option<SpawnError>>,
    /// Whether the child wrote its own `oom_score_adj`.
    has_oom_score: Cell<bool>,
    /// The directory of the cgroup that the child has to enter by itself.
    cgroup_to_enter: Cell<Option<RawFd>>,
}

/// Starts a program without copying the server's page tables or its table of descriptors.
///
/// `CLONE_VM | CLONE_VFORK` suspends the calling thread until the child calls execve or exits. Its
/// cost does not grow with the server's memory as fork's does, and the child reports errors in shared
/// memory.
///
/// # Errors
/// The step that failed and its errno. The child has been reaped.
pub fn spawn(plan: &ChildPlan<'_>) -> Result<Spawned, SpawnError> {
    spawn_with(plan, ReservedSlot::take().as_ref())
}

fn spawn_with(plan: &ChildPlan<'_>, slot: Option<&ReservedSlot>) -> Result<Spawned, SpawnError> {
    fn pointers(strings: &[impl AsRef<CStr>]) -> Vec<*const c_char> {
        let pointers = strings.iter().map(|string| string.as_ref().as_ptr());
        pointers.chain([ptr::null()]).collect()
    }
    let failed = |step| move |errno| SpawnError { step, errno };
    let restriction = plan.restriction;
    let mut stdio = plan.stdio.map(|stream| stream.as_raw_fd());
    let [first, second] = restriction.map_or([None; 2], |restriction| restriction.rulesets);
    let has_listener = restriction.is_some_and(|restriction| restriction.has_listener);
    let channel = has_listener.then(ListenerChannel::new).transpose();
    let channel = channel.map_err(failed(SpawnStep::Descriptors))?;
    let child_end = channel.as_ref().map(|channel| channel.child.as_fd());
    let inside = restriction.and_then(|restriction| restriction.inside);
    let users = inside.map(|inside| inside.users);
    let others = [first, plan.passed, second, child_end, users];
    let mut others = others.map(|source| source.map(|source| source.as_raw_fd()));
    if let Some(slot) = slot {
        let sources = stdio.iter_mut().chain(others.iter_mut().flatten());
        for (index, source) in sources.enumerate() {
            *source = slot
                .put(index, *source)
                .map_err(failed(SpawnStep::Descriptors))?;
        }
    }
    let raw = RawPlan {
        plan,
        stdio,
        others,
        shared_end: slot.map(ReservedSlot::end),
        changed_signals: changed_signals(),
        argv: pointers(plan.arguments),
        envp: pointers(plan.environment),
        failure: Cell::new(None),
        has_oom_score: Cell::new(false),
        cgroup_to_enter: Cell::new(None),
    };
    let sharing = slot.map_or(0, |_| libc::CLONE_FILES);
    let argument = (&raw const raw).cast_mut().cast();
    let cloned = if let Some(holder) = plan.inside {
        let announcement = plan.announcement;
        let score = (plan.oom_score, &raw.has_oom_score);
        let cloned = clone_inside(
            holder,
            plan.cgroup,
            child,
            argument,
            sharing,
            announcement,
            score,
        );
        cloned.map_err(|error| match error {
            EntranceError::Cgroup(errno) => failed(SpawnStep::Cgroup)(errno),
            EntranceError::Enter(errno) => failed(SpawnStep::Enter)(errno),
            EntranceError::Clone(errno) => failed(SpawnStep::Clone)(errno),
        })
    } else {
        let (mut stack, to_enter) = (ChildStack::new(), &raw.cgroup_to_enter);
        let flags = libc::CLONE_VFORK | sharing;
        let cloned = clone_in(plan.cgroup, to_enter, child, argument, &mut stack, flags);
        cloned.map_err(failed(SpawnStep::Clone))
    };
    let (pid, pidfd) = cloned?;
    if let Some(failure) = raw.failure.get() {
        // Cleared before the child is reaped: then another process may get its number.
        plan.announcement.store(0, Ordering::Release);
        let _ = wait(pidfd.as_fd(), true);
        return Err(failure);
    }
    if !raw.has_oom_score.get() {
        // The server's memory is not dumpable, so until execve the child's files in /proc belong to
        // root. Then they belong to its user.
        let _ = std::fs::write(format!("/proc/{pid}/oom_score_adj"), plan.oom_score);
    }
    let listener = channel.map(ListenerChannel::receive).transpose();
    let listener = listener.map_err(|errno| {
        // Without the server its sockets would hang.
        let _ = pidfd_signal(pidfd.as_fd(), libc::SIGKILL);
        plan.announcement.store(0, Ordering::Release);
        let _ = wait(pidfd.as_fd(), true);
        failed(SpawnStep::Filter)(errno)
    })?;
    Ok(Spawned {
        pid,
        pidfd,
        listener: listener.flatten(),
    })
}

/// The child's half of [`spawn`].
extern "C" fn child(argument: *mut c_void) -> c_int {
    // SAFETY: `spawn` passes a RawPlan that outlives this function, and reads it after this process
    // has called execve or exited.
    let raw = unsafe { &*argument.cast_const().cast::<RawPlan<'_>>() };
    // SAFETY: this is the child that `run` needs.
    let step = unsafe { run(raw) };
    raw.failure.set(Some(SpawnError {
        step,
        errno: Errno::last(),
    }));
    // SAFETY: ends the child without touching anything it shares with the server.
    unsafe { libc::_exit(127) }
}

/// Where the child has its rulesets until it has applied them. A program finds the descriptor that it was
/// passed at the number between them.
const RULESET_DESCRIPTORS: [RawFd; 2] = [3, 5];

/// Where it has the channel for its listener until it has used it.
const CHANNEL_DESCRIPTOR: RawFd = 6;

/// Where it has its user namespace until it has entered it.
const USERS_DESCRIPTOR: RawFd = 7;

/// The first number above all that a child has.
const FIRST_FREE_DESCRIPTOR: RawFd = 8;

/// Prepares the child and executes its program. Returns only the step that failed, with its errno set.
///
/// # Safety
/// Only in the child of a `CLONE_VM | CLONE_VFORK` clone with all signals blocked.
unsafe fn run(raw: &RawPlan<'_>) -> SpawnStep {
    let plan = raw.plan;
    // SAFETY: plain system calls on integers and on memory that `raw` keeps alive. None allocates or
    // locks.
    unsafe {
        // In another pid namespace the kernel has stored it: there this call gives another number.
        if plan.inside.is_none() {
            plan.announcement.store(libc::getpid(), Ordering::Release);
        }
        // Before the descriptor is closed and the right is given up.
        if let Some(directory) = raw.cgroup_to_enter.get()
            && enter_cgroup(directory).is_err()
        {
            return SpawnStep::Cgroup;
        }
        // The command's processes are found again by their group and session.
        if libc::setsid() < 0 {
            return SpawnStep::Session;
        }
        if place_descriptors(raw) < 0 {
            return SpawnStep::Descriptors;
        }
        if plan.has_terminal && take_controlling_terminal().is_err() {
            return SpawnStep::Terminal;
        }
        for signal in raw.changed_signals {
            set_default(*signal);
        }
        // When memory runs out the kernel shall kill the command before the server. Inside of namespaces it has the score
        // already, and the path may lead elsewhere.
        if plan.inside.is_none() && write_oom_score(plan.oom_score) {
            raw.has_oom_score.set(true);
        }
        let gets_no_more = plan
            .restriction
            .is_some_and(|restriction| restriction.inside.is_none());
        if gets_no_more && libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 {
            return SpawnStep::NoNewPrivileges;
        }
        for (resource, limit) in plan.limits {
            if libc::setrlimit(*resource, limit) < 0 {
                return SpawnStep::Limits;
            }
        }
        if let Some(restriction) = &plan.restriction
            && let Err(step) = restrict(restriction)
        {
            return step;
        }
        if libc::chdir(plan.directory.as_ptr()) < 0 {
            return SpawnStep::Directory;
        }
        // Late, because the server waits for this process. An unprivileged server may not undo it.
        if plan.nice > 0 {
            libc::setpriority(libc::PRIO_PROCESS, 0, plan.nice);
        }
        let (none, before) = (0u64, ptr::null::<c_void>());
        let how = libc::SIG_SETMASK;
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            how,
            &raw const none,
            before,
            size_of::<u64>(),
        );
        let mut is_forbidden = false;
        for program in plan.programs {
            libc::execve(program.as_ptr(), raw.argv.as_ptr(), raw.envp.as_ptr());
            match Errno::last_raw() {
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => is_forbidden = true,
                _ => return SpawnStep::Execute,
            }
        }
        if is_forbidden {
            Errno::EACCES.set();
        }
        SpawnStep::Execute
    }
}

/// Leaves the child the standard streams, its rulesets and what it is passed, and nothing else. Negative on
/// failure.
///
/// # Safety
/// As for [`run`].
unsafe fn place_descriptors(raw: &RawPlan<'_>) -> c_int {
    // SAFETY: plain integers. Once the table is the child's own, it concerns nothing of the server.
    unsafe {
        if let Some(end) = raw.shared_end {
            let unshare = libc::CLOSE_RANGE_UNSHARE;
            if libc::syscall(libc::SYS_close_range, end, c_int::MAX, unshare) < 0 {
                return -1;
            }
        }
        let mut others = raw.others;
        for source in others.iter_mut().flatten() {
            // Above every target: another one could overwrite it, and dup2 to its own number would keep
            // close-on-exec.
            if *source < FIRST_FREE_DESCRIPTOR {
                *source = libc::fcntl(*source, libc::F_DUPFD_CLOEXEC, FIRST_FREE_DESCRIPTOR);
            }
            if *source < 0 {
                return -1;
            }
        }
        // The server uses no descriptor below 3, so no dup2 overwrites the source of a later stream. The
        // others may overwrite the source of a stream that is in place by then.
        for (target, source) in (0..).zip(raw.stdio) {
            if libc::dup2(source, target) < 0 {
                return -1;
            }
        }
        for (target, source) in (3..).zip(others) {
            match source {
                Some(source) if libc::dup2(source, target) < 0 => return -1,
                Some(_) => {}
                None => {
                    libc::close(target);
                }
            }
        }
        // Everything else is close-on-exec already; this closes it also if that was missed.
        libc::syscall(libc::SYS_close_range, FIRST_FREE_DESCRIPTOR, c_int::MAX, 0);
        0
    }
}

/// Gives up what a command must not have. The order matters: rulesets need
/// `PR_SET_NO_NEW_PRIVS`, setting groups needs capabilities that the user then gives up, and the filter
/// forbids some of these calls. Where a sandbox has a root of its own, rulesets and filter need a capability in the user
/// namespace instead, which is given up last.
///
/// # Safety
/// As for [`run`].
unsafe fn restrict(restriction: &Restriction<'_>) -> Result<(), SpawnStep> {
    let filter = restriction.filter;
    let program = libc::sock_fprog {
        // The kernel takes at most 4096 instructions, and refuses an empty program.
        len: u16::try_from(filter.len()).unwrap_or(0),
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: plain system calls on integers and on memory that outlives them.
    unsafe {
        for (ruleset, descriptor) in restriction.rulesets.iter().zip(RULESET_DESCRIPTORS) {
            if ruleset.is_none() {
                continue;
            }
            if libc::syscall(libc::SYS_landlock_restrict_self, descriptor, 0) < 0 {
                return Err(SpawnStep::Ruleset);
            }
            libc::close(descriptor);
        }
        if let Some(user) = restriction.user {
            let became = match &restriction.inside {
                None => become_user(user),
                Some(inside) => enter_users(user, inside),
            };
            became.map_err(|_| SpawnStep::Identity)?;
            // Until execve this is the server's memory, run by the sandbox's user. A change of user makes
            // it as dumpable as `fs.suid_dumpable` says (proc(5)): not at all, unless somebody debugs programs of
            // root. Then other threads that act for users make it so again, and only Landlock keeps tracers out:
            // this process has a domain of its own by now.
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        }
        let is_inside = restriction.inside.is_some();
        if filter.is_empty() {
            // Nothing else keeps root from what belongs to the machine.
            return if is_inside {
                Err(SpawnStep::Filter)
            } else {
                Ok(())
            };
        }
        let mode = libc::SECCOMP_SET_MODE_FILTER;
        let flags = if restriction.has_listener {
            LISTENER_FLAGS
        } else {
            0
        };
        let listener = libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program);
        if listener < 0 {
            return Err(SpawnStep::Filter);
        }
        if restriction.has_listener {
            // It is close-on-exec; the channel is not.
            let listener = RawFd::try_from(listener).unwrap_or(-1);
            send_listener(CHANNEL_DESCRIPTOR, listener).map_err(|_| SpawnStep::Filter)?;
            libc::close(CHANNEL_DESCRIPTOR);
        }
        if let Some(user) = restriction.user.filter(|_| is_inside) {
            keep_capabilities_inside(user.uid == 0).map_err(|_| SpawnStep::Identity)?;
        }
    }
    Ok(())
}

/// Enters the user namespace of the sandbox and becomes a user of it, with all capabilities there.
///
/// # Safety
/// As for [`run`].
unsafe fn enter_users(user: User, inside: &Inside<'_>) -> Result<(), Errno> {
    // SAFETY: plain integers.
    unsafe {
        Errno::result(libc::syscall(
            libc::SYS_setns,
            USERS_DESCRIPTOR,
            libc::CLONE_NEWUSER,
        ))?;
        libc::close(USERS_DESCRIPTOR);
    }
    become_user_inside(user, inside.groups)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::FromRawFd;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::sys::Ending;
    use crate::sys::descriptors::ReservedSlots;
    use crate::sys::namespaces::HolderPlan;

    /// Lists what a child has open, and then what its fourth descriptor says.
    const PROGRAM: &CStr = c"n=0; while [ $n -lt 300 ]; do [ -e /proc/$$/fd/$n ] && echo $n; n=$((n+1)); done; cat /dev/fd/4";

    /// What a child says that was passed a file.
    fn passed(
        file: BorrowedFd<'_>,
        restriction: Option<Restriction<'_>>,
        slot: Option<ReservedSlot>,
    ) -> String {
        let (mut read, write) = std::io::pipe().unwrap();
        let null = File::open("/dev/null").unwrap();
        let spawned = spawn_with(
            &ChildPlan {
                programs: &[c"/bin/sh".to_owned()],
                arguments: &[c"sh".to_owned(), c"-c".to_owned(), PROGRAM.to_owned()],
                environment: &[Cow::Borrowed(c"PATH=/usr/bin:/bin")],
                directory: c"/",
                stdio: [null.as_fd(), write.as_fd(), write.as_fd()],
                passed: Some(file),
                has_terminal: false,
                oom_score: b"0",
                limits: &[],
                nice: 0,
                cgroup: None,
                restriction,
                inside: None,
                announcement: &AtomicI32::new(0),
            },
            slot.as_ref(),
        );
        drop(slot);
        let spawned = spawned.unwrap();
        drop(write);
        let mut text = String::new();
        read.read_to_string(&mut text).unwrap();
        let ending = wait(spawned.pidfd.as_fd(), true).unwrap();
        assert_eq!(ending, Some(Ending::Exited(0)));
        text
    }

    /// A ruleset that forbids what no test does: making character devices. `None` without Landlock.
    fn ruleset() -> Option<OwnedFd> {
        let handled = 1_u64 << 6;
        // SAFETY: the attribute of the first version is one integer; the result is a new descriptor.
        unsafe {
            let size = size_of_val(&handled);
            let ruleset = libc::syscall(
                libc::SYS_landlock_create_ruleset,
                &raw const handled,
                size,
                0,
            );
            let ruleset = RawFd::try_from(ruleset).unwrap();
            (ruleset >= 0).then(|| OwnedFd::from_raw_fd(ruleset))
        }
    }

    /// A cgroup of version 2 that no process is in, mounted for this thread only. `None` where the test may not
    /// make one.
    fn cgroup() -> Option<std::path::PathBuf> {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).ok()?;
        let mount = std::env::temp_dir().join(format!("sbx-cgroup-{}", std::process::id()));
        std::fs::create_dir_all(&mount).unwrap();
        let target = CString::new(mount.to_str()?).unwrap();
        let private = libc::MS_REC | libc::MS_PRIVATE;
        // SAFETY: constant texts, and one that outlives the calls.
        let result = unsafe {
            let none = c"none".as_ptr();
            libc::mount(none, c"/".as_ptr(), ptr::null(), private, ptr::null());
            libc::mount(none, target.as_ptr(), c"cgroup2".as_ptr(), 0, ptr::null())
        };
        let group = mount.join(format!("sbx-test-{}", std::process::id()));
        (result == 0 && std::fs::create_dir(&group).is_ok()).then_some(group)
    }

    /// What `/proc/self/cgroup` says in a child that is started in a cgroup.
    fn group_of_child(cgroup: &File, holder: Option<&Holder>) -> String {
        let (mut read, write) = std::io::pipe().unwrap();
        let null = File::open("/dev/null").unwrap();
        let spawned = spawn(&ChildPlan {
            programs: &[c"/bin/cat".to_owned()],
            arguments: &[c"cat".to_owned(), c"/proc/self/cgroup".to_owned()],
            environment: &[],
            directory: c"/",
            stdio: [null.as_fd(), write.as_fd(), write.as_fd()],
            passed: None,
            has_terminal: false,
            oom_score: b"0",
            limits: &[],
            nice: 0,
            cgroup: Some(cgroup.as_fd()),
            restriction: None,
            inside: holder,
            announcement: &AtomicI32::new(0),
        });
        let spawned = spawned.unwrap();
        drop(write);
        let mut text = String::new();
        read.read_to_string(&mut text).unwrap();
        wait(spawned.pidfd.as_fd(), true).unwrap();
        text
    }

    #[test]
    fn a_child_is_in_its_cgroup_with_and_without_clone3() {
        let Some(path) = cgroup() else {
            return;
        };
        let name = path.file_name().unwrap().to_str().unwrap();
        let group = File::open(&path).unwrap();
        let is_inside = |text: &str| {
            let mut lines = text.lines().filter(|line| line.starts_with("0::"));
            lines.any(|line| line.ends_with(&format!("/{name}")))
        };
        let holder = Holder::start(&HolderPlan::sleeping());
        let holder = holder.map_err(|error| format!("{error:?}")).unwrap();
        for is_hidden in [false, true] {
            if is_hidden {
                crate::sys::hide_system_call(libc::SYS_clone3, Errno::ENOSYS).unwrap();
            }
            for holder in [None, Some(&holder)] {
                let text = group_of_child(&group, holder);
                assert!(is_inside(&text), "{text}");
            }
        }
        holder.kill();
        let is_busy = |error: std::io::Error| error.kind() == std::io::ErrorKind::ResourceBusy;
        while std::fs::remove_dir(&path).is_err_and(is_busy) {}
    }

    #[test]
    fn a_child_has_the_standard_streams_and_what_it_was_passed() {
        // A table of this thread's own, where it may use any number.
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES).unwrap();
        let file = nix::sys::memfd::memfd_create(c"", nix::sys::memfd::MFdFlags::MFD_CLOEXEC);
        let file = File::from(file.unwrap());
        file.write_all_at(b"hello", 0).unwrap();
        // SAFETY: the first is above all that is replaced, and nothing in this thread uses those.
        let sources = unsafe {
            let high = libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 400);
            [3, 4, 5, 290].map(|number| {
                assert_eq!(libc::dup3(high, number, libc::O_CLOEXEC), number);
                BorrowedFd::borrow_raw(number)
            })
        };
        // Its number may be one of those that were replaced.
        std::mem::forget(file);
        let slots: &ReservedSlots = Box::leak(Box::new(ReservedSlots::reserve().unwrap()));
        let ruleset = ruleset();
        let is_root = nix::unistd::Uid::effective().is_root();
        let restrict = |rulesets| Restriction {
            user: is_root.then_some(User { uid: 0, gid: 0 }),
            rulesets,
            filter: &[],
            has_listener: false,
            inside: None,
        };
        let ruleset = ruleset.as_ref().map(AsFd::as_fd);
        let restrictions = [
            None,
            Some(restrict([None, None])),
            Some(restrict([ruleset, None])),
            Some(restrict([None, ruleset])),
            Some(restrict([ruleset, ruleset])),
        ];
        for source in sources {
            for restriction in restrictions {
                for slot in [None, slots.take()] {
                    let text = passed(source, restriction, slot);
                    assert_eq!(text, "0\n1\n2\n4\nhello", "from {source:?}");
                }
            }
        }
    }
}
