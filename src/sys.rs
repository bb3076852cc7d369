//! The one file with `unsafe`: thin wrappers around what nix and std do not wrap.
//!
//! Each function does one thing that the kernel offers and returns its errno. Policy lives with the
//! callers. The exception in size is [`spawn`], whose child half must be one ordered list of raw
//! system calls: between clone and execve it shares the server's memory, so it may not allocate,
//! lock or unwind (signal-safety(7), vfork(2)).

#![allow(unsafe_code, reason = "this is the module that holds it")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use dlmalloc::GlobalDlmalloc;
use nix::errno::Errno;

/// A process number, as the kernel counts them.
pub type Pid = libc::pid_t;

/// What became of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It exited with this status.
    Exited(i32),
    /// This signal ended it.
    Signaled(i32),
    /// Somebody else reaped it, which nobody should.
    Unknown,
}

/// A point in the child's preparation, in the order in which they are passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Step {
    /// clone(2) itself.
    Clone = 1,
    /// setsid(2).
    Session,
    /// Standard streams in place, everything else closed.
    Descriptors,
    /// Giving up what set-user-ID programs would give (`PR_SET_NO_NEW_PRIVS`).
    NoNewPrivileges,
    /// Resource limits.
    Limits,
    /// The Landlock ruleset, `landlock_restrict_self(2)`.
    Ruleset,
    /// Groups, group, user, capabilities.
    Identity,
    /// The system call filter, seccomp(2).
    Filter,
    /// Entering the working directory.
    Directory,
    /// execve(2) of every candidate.
    Execute,
}

impl Step {
    const ALL: [Self; 10] = [
        Self::Clone,
        Self::Session,
        Self::Descriptors,
        Self::NoNewPrivileges,
        Self::Limits,
        Self::Ruleset,
        Self::Identity,
        Self::Filter,
        Self::Directory,
        Self::Execute,
    ];

    fn from_number(number: i32) -> Self {
        Self::ALL
            .into_iter()
            .find(|step| *step as i32 == number)
            .unwrap_or(Self::Execute)
    }
}

/// Why there is no child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpawnError {
    /// Where it failed.
    pub step: Step,
    /// And with what.
    pub errno: Errno,
}

/// Everything the child needs, made before it exists.
pub struct ChildPlan<'a> {
    /// Paths to execute, tried in order as execvp(3) tries the directories of PATH.
    pub programs: &'a [CString],
    /// `argv`.
    pub arguments: &'a [CString],
    /// `envp`.
    pub environment: &'a [Cow<'a, CStr>],
    /// The working directory.
    pub directory: &'a CStr,
    /// What becomes descriptors 0, 1 and 2.
    pub stdio: [BorrowedFd<'a>; 3],
    /// Signals that the server ignores or handles and the child must not: until execve a handler would
    /// run on the server's memory, and anybody who runs as the child's user can send it a signal.
    pub changed_signals: &'a [c_int],
    /// Written to `/proc/self/oom_score_adj`.
    pub oom_score: &'a [u8],
    /// Resource limits to set.
    pub limits: &'a [(Resource, libc::rlimit)],
    /// How much less of the processor it gets than the server: its nice value (setpriority(2)).
    pub nice: c_int,
    /// What is given up for good besides; nothing, for a command with the server's own identity.
    pub restriction: Option<Restriction<'a>>,
    /// Where the child puts its number before anything else, so that others can find it while the
    /// caller waits for it.
    pub announcement: &'a AtomicI32,
}

/// A resource that setrlimit(2) limits: one of `RLIMIT_*`.
pub type Resource = c_int;

/// What a sandbox's command is without.
#[derive(Clone, Copy)]
pub struct Restriction<'a> {
    /// Who it is, with no group but this user's and no capability.
    pub user: User,
    /// The Landlock ruleset; none only where the kernel has no Landlock and that was accepted.
    pub ruleset: Option<BorrowedFd<'a>>,
    /// The seccomp filter; empty only where the kernel has no filters and that was accepted.
    pub filter: &'a [libc::sock_filter],
}

/// A child that has begun to run its program.
pub struct Spawned {
    /// Its number, which is also its process group and session.
    pub pid: Pid,
    /// Its pidfd.
    pub pidfd: OwnedFd,
}

/// The stack of a process that shares the server's memory, which must outlive it there. Enough for a
/// few frames: such a process only makes system calls.
struct ChildStack(Vec<MaybeUninit<u128>>);

impl ChildStack {
    const BYTES: usize = 32 * 1024;

    fn new() -> Self {
        Self(Vec::with_capacity(Self::BYTES / size_of::<u128>()))
    }

    /// Where it begins: at the end, growing down.
    fn top(&mut self) -> *mut c_void {
        self.0.as_mut_ptr().wrapping_add(self.0.capacity()).cast()
    }
}

/// Starts a process that shares this one's memory and runs `entry`, every signal blocked: a handler
/// of the server must not run in it. `stack`, and what `argument` points to, must outlive the new
/// process or its first execve.
fn clone(
    entry: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
    stack: &mut ChildStack,
    flags: c_int,
) -> Result<(Pid, OwnedFd), Errno> {
    let mut pidfd: c_int = -1;
    // SAFETY: both sets are filled by the kernel's own functions before they are read. The stack is
    // 16-aligned; that it and the argument live long enough is the caller's promise.
    let (result, errno) = unsafe {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let flags = flags | libc::CLONE_PIDFD | libc::SIGCHLD;
        let result = libc::clone(entry, stack.top(), flags, argument, &raw mut pidfd);
        let errno = Errno::last();
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        (result, errno)
    };
    if result < 0 {
        return Err(errno);
    }
    if pidfd < 0 {
        // A kernel that does not know CLONE_PIDFD (before Linux 5.2) ignores it.
        let _ = signal_process(result, libc::SIGKILL);
        // SAFETY: plain integers and no place for the status. Until it has ended, its stack is the
        // caller's.
        while unsafe { libc::waitpid(result, ptr::null_mut(), 0) } < 0
            && Errno::last() == Errno::EINTR
        {}
        return Err(Errno::ENOSYS);
    }
    // SAFETY: CLONE_PIDFD put a new descriptor there that nobody else owns.
    Ok((result, unsafe { OwnedFd::from_raw_fd(pidfd) }))
}

/// Numbers at which children find the descriptors that they need.
///
/// A child that has a copy of the server's table of descriptors costs more the more of them are
/// open, for the copy and for closing it. So it shares the table and then takes a copy of no more
/// than its beginning, where what it needs was put before: `CLOSE_RANGE_UNSHARE`, see
/// `close_range(2)`.
struct ChildDescriptors {
    /// What is at those numbers meanwhile.
    placeholder: OwnedFd,
    /// The first number beyond all of them.
    beyond: c_int,
    /// Guards the places that no child is being started with.
    free: Mutex<Vec<[RawFd; ChildDescriptors::WIDTH]>>,
}

static CHILD_DESCRIPTORS: OnceLock<ChildDescriptors> = OnceLock::new();

impl ChildDescriptors {
    /// Starts at once that need no copy of the whole table.
    const PLACES: usize = 8;
    /// The standard streams and the ruleset.
    const WIDTH: usize = 4;

    fn reserve() -> Option<Self> {
        let placeholder = OwnedFd::from(std::fs::File::open("/dev/null").ok()?);
        let reserved: Vec<OwnedFd> = (0..Self::PLACES * Self::WIDTH)
            .map(|_| placeholder.try_clone())
            .collect::<Result<_, _>>()
            .ok()?;
        // They stay open as long as the process.
        let numbers: Vec<RawFd> = reserved.into_iter().map(OwnedFd::into_raw_fd).collect();
        let (free, _) = numbers.as_chunks();
        Some(Self {
            placeholder,
            beyond: numbers.iter().max()? + 1,
            free: Mutex::new(free.to_vec()),
        })
    }
}

/// Makes starting children independent of how many descriptors the server has open, where the kernel
/// can and there are enough of them.
///
/// To be called before there is a second thread, and before much is open.
pub fn reserve_child_descriptors() {
    const ENOUGH: u64 = 1024;
    let (last, unshare) = (libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE);
    // SAFETY: plain integers; there is no descriptor of that number, and with one thread no table that
    // could be shared.
    let is_possible = unsafe { libc::syscall(libc::SYS_close_range, last, last, unshare) } == 0;
    if is_possible
        && soft_limit(libc::RLIMIT_NOFILE) >= ENOUGH
        && let Some(reserved) = ChildDescriptors::reserve()
    {
        let _ = CHILD_DESCRIPTORS.set(reserved);
    }
}

/// The place of one child, given back when dropped.
struct Place {
    all: &'static ChildDescriptors,
    numbers: [RawFd; ChildDescriptors::WIDTH],
}

impl Place {
    /// One that is free, if there is any.
    fn take() -> Option<Self> {
        let all = CHILD_DESCRIPTORS.get()?;
        let numbers = all.free.lock().ok()?.pop()?;
        Some(Self { all, numbers })
    }

    /// Puts a descriptor there; its number.
    fn put(&self, index: usize, source: BorrowedFd<'_>) -> Result<RawFd, Errno> {
        // SAFETY: replaces a descriptor that is this place's.
        Errno::result(unsafe {
            libc::dup3(source.as_raw_fd(), self.numbers[index], libc::O_CLOEXEC)
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for index in 0..self.numbers.len() {
            // The end of a pipe must not stay open here.
            let _ = self.put(index, self.all.placeholder.as_fd());
        }
        if let Ok(mut free) = self.all.free.lock() {
            free.push(self.numbers);
        }
    }
}

/// The plan as the child reads it: raw pointers and numbers, and the place where it leaves its error.
struct RawPlan<'a> {
    plan: &'a ChildPlan<'a>,
    /// What becomes descriptors 0, 1 and 2.
    stdio: [RawFd; 3],
    ruleset: Option<RawFd>,
    /// Where the table of descriptors is the server's own, the first number that is not needed.
    beyond: Option<c_int>,
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    step: AtomicI32,
    errno: AtomicI32,
    /// Set when the child could not open its own `oom_score_adj`.
    no_knob: AtomicI32,
}

/// Starts a program without copying the server's page tables.
///
/// `CLONE_VM | CLONE_VFORK` suspends the calling thread until the child has called execve or
/// exited, so the cost does not grow with the server's memory as fork's does, and the child's error
/// comes back in shared memory. Every signal is blocked meanwhile: a handler of the server must not
/// run in the child.
///
/// # Errors
/// The step that failed and its errno; no child is left then.
pub fn spawn(plan: &ChildPlan<'_>) -> Result<Spawned, SpawnError> {
    fn pointers(strings: &[impl AsRef<CStr>]) -> Vec<*const c_char> {
        let pointers = strings.iter().map(|string| string.as_ref().as_ptr());
        pointers.chain([ptr::null()]).collect()
    }
    let unprepared = |errno| SpawnError {
        step: Step::Descriptors,
        errno,
    };
    let ruleset = plan.restriction.and_then(|restriction| restriction.ruleset);
    let mut stdio = plan.stdio.map(|stream| stream.as_raw_fd());
    let mut raw_ruleset = ruleset.map(|ruleset| ruleset.as_raw_fd());
    let place = Place::take();
    if let Some(place) = &place {
        for (index, stream) in plan.stdio.into_iter().enumerate() {
            stdio[index] = place.put(index, stream).map_err(unprepared)?;
        }
        if let Some(ruleset) = ruleset {
            raw_ruleset = Some(place.put(stdio.len(), ruleset).map_err(unprepared)?);
        }
    }
    let raw = RawPlan {
        plan,
        stdio,
        ruleset: raw_ruleset,
        beyond: place.as_ref().map(|place| place.all.beyond),
        argv: pointers(plan.arguments),
        envp: pointers(plan.environment),
        step: AtomicI32::new(0),
        errno: AtomicI32::new(0),
        no_knob: AtomicI32::new(0),
    };
    let mut stack = ChildStack::new();
    let (pid, pidfd) = clone(
        child,
        (&raw const raw).cast_mut().cast(),
        &mut stack,
        match place {
            Some(_) => libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES,
            None => libc::CLONE_VM | libc::CLONE_VFORK,
        },
    )
    .map_err(|errno| SpawnError {
        step: Step::Clone,
        errno,
    })?;
    let step = match raw.step.load(Ordering::Acquire) {
        0 => {
            if raw.no_knob.load(Ordering::Acquire) != 0 {
                // Before execve the child shares the server's memory, which is not dumpable, so its
                // files in /proc are root's. Now they are its own user's.
                let _ = std::fs::write(format!("/proc/{pid}/oom_score_adj"), plan.oom_score);
            }
            return Ok(Spawned { pid, pidfd });
        }
        step => Step::from_number(step),
    };
    // The child has exited or is about to; it is ours to reap, and then its number is nobody's.
    plan.announcement.store(0, Ordering::Release);
    let _ = wait(pidfd.as_fd(), true);
    Err(SpawnError {
        step,
        errno: Errno::from_raw(raw.errno.load(Ordering::Acquire)),
    })
}

/// The child half of [`spawn`]: raw system calls only.
extern "C" fn child(argument: *mut c_void) -> c_int {
    // SAFETY: `spawn` passes a RawPlan that outlives this function.
    let raw = unsafe { &*argument.cast_const().cast::<RawPlan<'_>>() };
    let plan = raw.plan;
    let fail = |step: Step| -> ! {
        raw.errno.store(Errno::last_raw(), Ordering::Release);
        raw.step.store(step as i32, Ordering::Release);
        // SAFETY: ends the child without touching anything it shares with the server.
        unsafe { libc::_exit(127) }
    };
    // SAFETY: every call below is a plain system call on integers and on memory that `raw` keeps
    // alive; none allocates or locks.
    unsafe {
        plan.announcement.store(libc::getpid(), Ordering::Release);
        // A session of its own: the group and the session are how all of it is found again.
        if libc::setsid() < 0 {
            fail(Step::Session);
        }
        // From here on the table is the child's own.
        if let Some(beyond) = raw.beyond {
            let unshare = libc::CLOSE_RANGE_UNSHARE;
            if libc::syscall(libc::SYS_close_range, beyond, c_int::MAX, unshare) < 0 {
                fail(Step::Descriptors);
            }
        }
        // The server never has descriptors below 3 in use, so no dup2 overwrites a later source. The
        // ruleset's number may be a stream's, which is in its place by then.
        for (target, source) in [0, 1, 2].into_iter().zip(raw.stdio) {
            if libc::dup2(source, target) < 0 {
                fail(Step::Descriptors);
            }
        }
        // Everything is close-on-exec already, see `close_inherited_on_exec`; this makes sure.
        let mut first_to_close = 3;
        if let Some(ruleset) = raw.ruleset {
            if libc::dup2(ruleset, RULESET_DESCRIPTOR) < 0 {
                fail(Step::Descriptors);
            }
            first_to_close = RULESET_DESCRIPTOR + 1;
        }
        libc::syscall(libc::SYS_close_range, first_to_close, c_int::MAX, 0);
        // While all are blocked.
        for signal in plan.changed_signals {
            let default = KernelSigaction::DEFAULT;
            libc::syscall(
                libc::SYS_rt_sigaction,
                *signal,
                &raw const default,
                ptr::null::<c_void>(),
                8,
            );
        }
        // The kernel shall take the command before the server when memory runs out (proc(5)).
        // A machine without /proc has no such knob: not an error.
        let path = c"/proc/self/oom_score_adj".as_ptr();
        let flags = libc::O_WRONLY | libc::O_CLOEXEC;
        // Not by way of a C library, which makes two calls of it. execve closes it.
        let knob = libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags);
        if knob >= 0 {
            let score = plan.oom_score;
            libc::syscall(libc::SYS_write, knob, score.as_ptr(), score.len());
        } else {
            raw.no_knob.store(1, Ordering::Release);
        }
        if plan.restriction.is_some() && libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 {
            fail(Step::NoNewPrivileges);
        }
        for (resource, limit) in plan.limits {
            if libc::setrlimit(*resource, limit) < 0 {
                fail(Step::Limits);
            }
        }
        if let Some(restriction) = &plan.restriction
            && let Err(step) = restrict(restriction)
        {
            fail(step);
        }
        if libc::chdir(plan.directory.as_ptr()) < 0 {
            fail(Step::Directory);
        }
        // Last, so that the server does not wait for a child that yields to others. Nobody may not
        // raise it.
        if plan.nice > 0 {
            libc::setpriority(libc::PRIO_PROCESS, 0, plan.nice);
        }
        let no_signals = 0u64;
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const no_signals,
            ptr::null::<c_void>(),
            8,
        );
        let mut forbidden = false;
        for program in plan.programs {
            libc::execve(program.as_ptr(), raw.argv.as_ptr(), raw.envp.as_ptr());
            match Errno::last_raw() {
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => forbidden = true,
                _ => fail(Step::Execute),
            }
        }
        if forbidden {
            Errno::EACCES.set();
        }
        fail(Step::Execute)
    }
}

/// Where the child has its ruleset: right above the standard streams.
const RULESET_DESCRIPTOR: c_int = 3;

/// Gives up, in the child, what a sandbox's command is without. The order matters: the ruleset needs
/// `PR_SET_NO_NEW_PRIVS`, groups need the capabilities that the user then gives up, and the filter
/// comes last because it forbids some of this.
///
/// # Safety
/// As for [`child`]: in the child of a `CLONE_VM` clone, raw system calls only.
unsafe fn restrict(restriction: &Restriction<'_>) -> Result<(), Step> {
    let Restriction {
        user,
        ruleset,
        filter,
    } = *restriction;
    let program = libc::sock_fprog {
        // The kernel takes 4096 instructions at most, and none for none.
        len: u16::try_from(filter.len()).unwrap_or(0),
        filter: filter.as_ptr().cast_mut(),
    };
    let nothing = [CapabilitySets::default(), CapabilitySets::default()];
    // SAFETY: plain system calls on integers and on memory that outlives them. The identity is set
    // by raw calls: a C library's functions would change all threads of the process, which are the
    // server's.
    unsafe {
        if ruleset.is_some() {
            if libc::syscall(libc::SYS_landlock_restrict_self, RULESET_DESCRIPTOR, 0) < 0 {
                return Err(Step::Ruleset);
            }
            libc::close(RULESET_DESCRIPTOR);
        }
        if libc::syscall(libc::SYS_setgroups, 0, ptr::null::<libc::gid_t>()) < 0
            || libc::syscall(libc::SYS_setresgid, user.gid, user.gid, user.gid) < 0
            || libc::syscall(libc::SYS_setresuid, user.uid, user.uid, user.uid) < 0
            || libc::syscall(
                libc::SYS_capset,
                &raw const CAPABILITIES_OF_SELF,
                nothing.as_ptr(),
            ) < 0
        {
            return Err(Step::Identity);
        }
        // Until execve this is the server's memory under the sandbox's user, and a change of user
        // sets whether it can be read to what the machine says (`fs.suid_dumpable`, proc(5)).
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        if !filter.is_empty()
            && libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                0,
                &raw const program,
            ) < 0
        {
            return Err(Step::Filter);
        }
    }
    Ok(())
}

/// Signals every process of a user: one process that is that user to kill(2) signals all it may
/// signal. The kernel goes through its processes in one piece and lets none fork that has a signal
/// waiting, so not even a fork storm gets around SIGKILL.
///
/// That process has the user for its effective one only, and `guise` for its real and saved one: so
/// it may signal them, and they may not signal it. Nothing else may run as `guise`, and the caller
/// sees to it that this function is not run twice at once with the same.
///
/// # Errors
/// No process to do it with, or it came to nothing.
pub fn signal_user(user: User, signal: c_int, guise: User) -> Result<(), Errno> {
    struct Order {
        user: User,
        signal: c_int,
        guise: User,
    }
    /// Shares the server's memory, and the C library's state of the thread that waits for it:
    /// system calls that nobody reads the errno of.
    extern "C" fn signaller(argument: *mut c_void) -> c_int {
        // SAFETY: `signal_user` passes an Order that outlives this process; plain integers.
        unsafe {
            let order = &*argument.cast_const().cast::<Order>();
            let (uid, guise) = (order.user.uid, order.guise.uid);
            if libc::syscall(libc::SYS_setresuid, guise, uid, guise) < 0 {
                libc::_exit(1)
            }
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            libc::kill(-1, order.signal);
            libc::_exit(0)
        }
    }
    let order = Order {
        user,
        signal,
        guise,
    };
    let mut stack = ChildStack::new();
    // Not CLONE_VFORK: should the new process stand still, this one must be able to end it. It uses no
    // descriptor, and a copy of them all would cost.
    let (_, pidfd) = clone(
        signaller,
        (&raw const order).cast_mut().cast(),
        &mut stack,
        libc::CLONE_VM | libc::CLONE_FILES,
    )?;
    let mut entries = [PollEntry::new(pidfd.as_fd(), Events::READABLE)];
    while !poll(&mut entries, Some(SIGNALLER_PATIENCE)) {
        let _ = pidfd_signal(pidfd.as_fd(), libc::SIGKILL);
    }
    // Its memory is this function's: it has ended before they go.
    match wait(pidfd.as_fd(), true)? {
        Some(Ending::Exited(0)) => Ok(()),
        // It could not change its user, or was ended before it had done anything.
        _ => Err(Errno::EAGAIN),
    }
}

/// Going through all processes of a machine takes milliseconds; on a busy one it may wait its turn.
const SIGNALLER_PATIENCE: Duration = Duration::from_secs(2);

/// Whether any process has this user for its real one, one that has ended and was not reaped
/// included (getpriority(2)).
pub fn user_has_processes(user: User) -> bool {
    // -1 is also a priority: errno tells.
    Errno::clear();
    // SAFETY: plain integers.
    let priority = unsafe { libc::getpriority(libc::PRIO_USER, user.uid) };
    !(priority == -1 && Errno::last() == Errno::ESRCH)
}

/// `linux/capability.h`.
const CAP_SYS_PTRACE: u32 = 19;
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

/// The first argument of capget(2) and capset(2).
#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: c_int,
}

static CAPABILITIES_OF_SELF: CapabilityHeader = CapabilityHeader {
    version: CAPABILITY_VERSION_3,
    pid: 0,
};

/// Half of the second: 32 capabilities of each set.
#[repr(C)]
#[derive(Default)]
struct CapabilitySets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Takes every capability from all programs that this process will start, which its own permitted
/// set does not feel (capabilities(7), the bounding and the inheritable set). Where there is no
/// right to, nothing happens: programs that run as another user than root have none anyway.
///
/// To be called before there is a second thread.
pub fn withhold_capabilities_from_children() {
    let mut sets = [CapabilitySets::default(), CapabilitySets::default()];
    // SAFETY: plain integers, and the two structures that version 3 of the interface has.
    unsafe {
        let mut capability = 0;
        while libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) == 0 {
            capability += 1;
        }
        if libc::syscall(
            libc::SYS_capget,
            &raw const CAPABILITIES_OF_SELF,
            sets.as_mut_ptr(),
        ) == 0
        {
            for half in &mut sets {
                half.inheritable = 0;
            }
            libc::syscall(
                libc::SYS_capset,
                &raw const CAPABILITIES_OF_SELF,
                sets.as_ptr(),
            );
        }
    }
}

/// Takes `CAP_SYS_PTRACE` from all programs that this process will start, which its own permitted set
/// does not feel: without it not even root reads a non-dumpable process (ptrace(2)). Root gets what
/// is in the bounding set, and what is inheritable (capabilities(7)); neither may have it. Where
/// there is nothing to take, or no right to, nothing happens.
///
/// To be called before there is a second thread.
pub fn withhold_ptrace_from_children() {
    let mut sets = [CapabilitySets::default(), CapabilitySets::default()];
    // SAFETY: version 3 of the interface has one header and two of these sets.
    unsafe {
        libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0);
        if libc::syscall(
            libc::SYS_capget,
            &raw const CAPABILITIES_OF_SELF,
            sets.as_mut_ptr(),
        ) == 0
        {
            sets[0].inheritable &= !(1 << CAP_SYS_PTRACE);
            libc::syscall(
                libc::SYS_capset,
                &raw const CAPABILITIES_OF_SELF,
                sets.as_ptr(),
            );
        }
    }
}

/// `struct sigaction` as the raw system call takes it, which is the same on both targets: arm64 has
/// the restorer too, though it uses none.
#[repr(C)]
struct KernelSigaction {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

impl KernelSigaction {
    const DEFAULT: Self = Self {
        handler: libc::SIG_DFL,
        flags: 0,
        restorer: 0,
        mask: 0,
    };
}

/// Takes the ending of a child, if it has one (or waits for it).
///
/// # Errors
/// `ECHILD` when somebody else reaped it.
pub fn wait(pidfd: BorrowedFd<'_>, block: bool) -> Result<Option<Ending>, Errno> {
    let flags = libc::WEXITED | if block { 0 } else { libc::WNOHANG };
    loop {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: waitid fills `info`, which is all zeroes (no child) until then.
        let (result, info) = unsafe {
            let id = libc::id_t::try_from(pidfd.as_raw_fd()).unwrap_or_default();
            let result = libc::waitid(libc::P_PIDFD, id, info.as_mut_ptr(), flags);
            (Errno::result(result), info.assume_init())
        };
        match result {
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
            Ok(_) => {
                // SAFETY: for SIGCHLD information these fields are the ones that are set.
                let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
                return Ok(match info.si_code {
                    _ if pid == 0 => None,
                    libc::CLD_EXITED => Some(Ending::Exited(status)),
                    _ => Some(Ending::Signaled(status)),
                });
            }
        }
    }
}

/// Reaps any child; for init, whose children are nobody else's.
///
/// # Errors
/// `ECHILD` when there is no child left; with `block` off, `Ok(None)` means none has ended.
pub fn wait_any(block: bool) -> Result<Option<(Pid, Ending)>, Errno> {
    let mut status = 0;
    // SAFETY: waitpid writes one integer.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, if block { 0 } else { libc::WNOHANG }) };
    match Errno::result(pid)? {
        0 => Ok(None),
        pid if libc::WIFSIGNALED(status) => {
            Ok(Some((pid, Ending::Signaled(libc::WTERMSIG(status)))))
        }
        pid => Ok(Some((pid, Ending::Exited(libc::WEXITSTATUS(status))))),
    }
}

/// A descriptor that stands for a process whatever becomes of its number, see `pidfd_open(2)`.
///
/// # Errors
/// `ESRCH` when it is gone.
pub fn pidfd_open(pid: Pid) -> Result<OwnedFd, Errno> {
    // SAFETY: plain integers; a descriptor that is returned is new and ours.
    unsafe {
        let descriptor = Errno::result(libc::syscall(libc::SYS_pidfd_open, pid, 0))?;
        Ok(OwnedFd::from_raw_fd(
            RawFd::try_from(descriptor).unwrap_or(-1),
        ))
    }
}

/// Sends a signal to exactly the process that the descriptor stands for.
///
/// # Errors
/// `ESRCH` when it is gone.
pub fn pidfd_signal(pidfd: BorrowedFd<'_>, signal: c_int) -> Result<(), Errno> {
    // SAFETY: plain integers and a null siginfo.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            signal,
            ptr::null::<c_void>(),
            0,
        )
    };
    Errno::result(result).map(drop)
}

/// Sends a signal to a process group. The caller knows that the number is still this group's:
/// its leader has not been reaped.
///
/// # Errors
/// `ESRCH` when no process is left in it.
pub fn signal_group(group: Pid, signal: c_int) -> Result<(), Errno> {
    debug_assert!(group > 1);
    // SAFETY: plain integers.
    Errno::result(unsafe { libc::kill(-group, signal) }).map(drop)
}

/// Sends a signal to a process by its number. The caller knows whose it is: its own unreaped child's,
/// or has looked just now.
///
/// # Errors
/// `ESRCH` when it is gone.
pub fn signal_process(pid: Pid, signal: c_int) -> Result<(), Errno> {
    // SAFETY: plain integers.
    Errno::result(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// What poll(2) is asked for, and what it finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Events(i16);

impl Events {
    /// Nothing but what is always told: [`Events::BROKEN`].
    pub const NONE: Self = Self(0);
    /// Something can be read, or the end has come.
    pub const READABLE: Self = Self(libc::POLLIN);
    /// Something can be written.
    pub const WRITABLE: Self = Self(libc::POLLOUT);
    /// The peer of a socket will send no more.
    pub const PEER_CLOSED: Self = Self(libc::POLLRDHUP);
    /// The other end is gone altogether, or there was an error.
    pub const BROKEN: Self = Self(libc::POLLERR | libc::POLLHUP | libc::POLLNVAL);

    /// These, and the others if `condition` holds.
    #[must_use]
    pub fn and_if(self, condition: bool, others: Self) -> Self {
        if condition {
            Self(self.0 | others.0)
        } else {
            self
        }
    }

    /// Whether any of the others is among these.
    pub fn has(self, others: Self) -> bool {
        self.0 & others.0 != 0
    }

    /// Whether there is any.
    pub fn any(self) -> bool {
        self.0 != 0
    }
}

/// One descriptor in a poll.
#[repr(transparent)]
pub struct PollEntry<'fd> {
    raw: libc::pollfd,
    descriptor: PhantomData<BorrowedFd<'fd>>,
}

impl<'fd> PollEntry<'fd> {
    /// Asks for events of a descriptor; without one the entry is never ready.
    pub fn new(descriptor: impl Into<Option<BorrowedFd<'fd>>>, events: Events) -> Self {
        let fd = descriptor
            .into()
            .map_or(-1, |descriptor| descriptor.as_raw_fd());
        Self {
            raw: libc::pollfd {
                fd,
                events: events.0,
                revents: 0,
            },
            descriptor: PhantomData,
        }
    }

    /// What was found.
    pub fn events(&self) -> Events {
        Events(self.raw.revents)
    }

    /// Whether anything was found.
    pub fn is_ready(&self) -> bool {
        self.events().any()
    }
}

/// Waits until a descriptor is ready, at most for `limit` (`None` is for ever), which is rounded up
/// to milliseconds so that nothing comes early. False when none is, also after a signal.
pub fn poll(entries: &mut [PollEntry<'_>], limit: Option<Duration>) -> bool {
    let timeout = limit.map_or(-1, |limit| {
        c_int::try_from(limit.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
    });
    // SAFETY: PollEntry is a pollfd (transparent), and its descriptors are borrowed for the call.
    unsafe {
        libc::poll(
            entries.as_mut_ptr().cast(),
            entries.len() as libc::nfds_t,
            timeout,
        ) > 0
    }
}

/// Bytes that can be read from a pipe without waiting.
///
/// # Errors
/// `ENOTTY` for something that is no pipe.
pub fn readable_bytes(pipe: BorrowedFd<'_>) -> Result<usize, Errno> {
    let mut count: c_int = 0;
    // SAFETY: FIONREAD writes one integer.
    Errno::result(unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut count) })?;
    Ok(usize::try_from(count).unwrap_or_default())
}

/// Receives once, at most `most` bytes, to the end of `out`, whose spare room need not be cleared
/// first (recv(2)). 0 is the end.
///
/// # Errors
/// `EAGAIN` when nothing has come: unless it `waits`, or after the socket's receive timeout.
pub fn receive_append(
    socket: BorrowedFd<'_>,
    out: &mut Vec<u8>,
    most: usize,
    waits: bool,
) -> Result<usize, Errno> {
    out.reserve(most);
    let flags = if waits { 0 } else { libc::MSG_DONTWAIT };
    let room = out.spare_capacity_mut();
    let most = most.min(room.len());
    // SAFETY: the kernel writes at most `most` bytes, which there is room for, and says how many it
    // has written; only those become part of `out`.
    unsafe {
        let count = libc::recv(socket.as_raw_fd(), room.as_mut_ptr().cast(), most, flags);
        let count = usize::try_from(Errno::result(count)?).unwrap_or_default();
        out.set_len(out.len() + count);
        Ok(count)
    }
}

/// The signals that do not have their default effect on this process: ignored ones, which a child
/// would inherit through execve, and those that a library handles.
pub fn changed_signals() -> Vec<c_int> {
    (1..=64)
        .filter(|signal| {
            let mut action = KernelSigaction::DEFAULT;
            // The raw call: a C library does not tell about the signals it keeps for itself, and
            // may have been started with them ignored.
            // SAFETY: asks only; the kernel fills `action`.
            let result = unsafe {
                libc::syscall(
                    libc::SYS_rt_sigaction,
                    *signal,
                    ptr::null::<c_void>(),
                    &raw mut action,
                    8,
                )
            };
            result == 0 && action.handler != libc::SIG_DFL
        })
        .collect()
}

/// Gives a signal its default effect again, whatever the server was started with: with SIGCHLD
/// ignored, the kernel would reap children before anybody could learn how they ended (wait(2)).
pub fn restore_default(signal: c_int) {
    // SAFETY: installs no handler.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// Ignores a signal; commands get its default effect back.
pub fn ignore(signal: c_int) {
    // SAFETY: installs no handler.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

unsafe extern "C" {
    static environ: *const *mut c_char;
}

/// Overwrites the value of a variable where the kernel shows it (`/proc/<pid>/environ`): removing a
/// variable only edits the library's copy.
///
/// To be called before there is a second thread.
pub fn scrub_environment(name: &str) {
    // SAFETY: environ is a null-terminated array of C strings that live as long as the process, and
    // no other thread exists that could read or change them.
    unsafe {
        let mut entry = environ;
        while !entry.is_null() && !(*entry).is_null() {
            let text = CStr::from_ptr(*entry).to_bytes();
            if text
                .strip_prefix(name.as_bytes())
                .is_some_and(|rest| rest.starts_with(b"="))
            {
                for index in name.len() + 1..text.len() {
                    ptr::write_volatile((*entry).add(index).cast::<u8>(), b'x');
                }
            }
            entry = entry.add(1);
        }
    }
}

/// Makes sure that descriptors 0, 1 and 2 are taken, so that nothing the server opens lands there.
pub fn occupy_standard_streams() {
    loop {
        // SAFETY: opens a path; descriptors below 3 are left open on purpose.
        unsafe {
            let descriptor = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            if descriptor > 2 {
                libc::close(descriptor);
            }
            if !(0..=2).contains(&descriptor) {
                return;
            }
        }
    }
}

/// Makes whatever descriptors the process was started with end at execve, so that no command gets
/// one, also where `close_range(2)` is missing or filtered.
pub fn close_inherited_on_exec() {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else {
        return;
    };
    for descriptor in entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()) {
        if descriptor > 2 {
            // SAFETY: changes a flag; a number that is not open is an error without effect.
            unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
}

/// Whether descriptors are about to run out, going by the number of a new one (the kernel gives the
/// lowest that is free). What is left is for ending processes and answering those that are connected.
pub fn is_scarce(descriptor: BorrowedFd<'_>) -> bool {
    is_beyond(descriptor, |limit| (limit / 8).min(32))
}

/// The same for what is kept for long and can be done without: it leaves room for connections and
/// commands.
pub fn is_getting_scarce(descriptor: BorrowedFd<'_>) -> bool {
    is_beyond(descriptor, |limit| (limit / 4).min(512))
}

fn is_beyond(descriptor: BorrowedFd<'_>, reserve: impl Fn(u64) -> u64) -> bool {
    let limit = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE)
        .map_or(u64::MAX, |(soft, _)| soft);
    let reserve = reserve(limit);
    u64::try_from(descriptor.as_raw_fd()).unwrap_or(0) >= limit - reserve
}

/// Whether /proc is there and counts processes as this process does: in a container it may be missing,
/// or show another pid namespace.
pub fn proc_shows_this_namespace() -> bool {
    std::fs::read_link("/proc/self")
        .is_ok_and(|own| own.as_os_str() == std::process::id().to_string().as_str())
}

/// Splits the process in two; to be called before there is a second thread.
///
/// # Errors
/// No process, no memory.
pub fn fork() -> Result<Option<Pid>, Errno> {
    // SAFETY: with one thread the child's memory is consistent.
    let pid = Errno::result(unsafe { libc::fork() })?;
    Ok((pid != 0).then_some(pid))
}

/// The Landlock ABI of the running kernel, 0 where there is none (Documentation/userspace-api/landlock).
pub fn landlock_abi() -> u32 {
    // SAFETY: with LANDLOCK_CREATE_RULESET_VERSION the call takes no attribute and only returns a number.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            ptr::null::<c_void>(),
            0,
            1,
        )
    };
    u32::try_from(version).unwrap_or(0)
}

/// A user and group to act as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    /// Its number.
    pub uid: libc::uid_t,
    /// Its group.
    pub gid: libc::gid_t,
}

/// While it lives, the calling thread opens, makes and removes files as another user: what that user
/// may not do is refused, and what is made is that user's (setfsuid(2), credentials(7)). Leaving
/// uid 0 takes the capabilities over files away as well; coming back returns them
/// (capabilities(7)). Only this thread changes, and only in what it does to files.
pub struct ActingAs {
    before: User,
    /// It is the thread that must come back, not another one.
    thread_bound: PhantomData<*const ()>,
}

impl ActingAs {
    /// Begins to act as `user`.
    ///
    /// # Errors
    /// `EPERM`: this process may not, or its user namespace does not have that user.
    pub fn new(user: User) -> Result<Self, Errno> {
        let before = set_file_user(user);
        let acting = Self {
            before,
            thread_bound: PhantomData,
        };
        // The calls do not say whether they had an effect; the next ones do.
        if set_file_user(user) == user {
            Ok(acting)
        } else {
            Err(Errno::EPERM)
        }
    }
}

impl Drop for ActingAs {
    fn drop(&mut self) {
        set_file_user(self.before);
        if set_file_user(self.before) != self.before {
            // To go on with somebody else's identity would be worse than to end.
            std::process::abort();
        }
    }
}

/// Sets who this thread is to the file system; who it was.
fn set_file_user(user: User) -> User {
    // Raw calls: they act on this thread alone, whatever a C library makes of them.
    // SAFETY: plain integers. The group is changed while the user is still allowed to: leaving root
    // it goes first, and coming back it does not matter, for CAP_SETGID is not one of those lost.
    let (gid, uid) = unsafe {
        (
            libc::syscall(libc::SYS_setfsgid, user.gid),
            libc::syscall(libc::SYS_setfsuid, user.uid),
        )
    };
    User {
        uid: libc::uid_t::try_from(uid).unwrap_or(libc::uid_t::MAX),
        gid: libc::gid_t::try_from(gid).unwrap_or(libc::gid_t::MAX),
    }
}

/// What tells the mount that an open file was reached by from every other, bind mounts of the same
/// file system included (statx(2), `STATX_MNT_ID`); `None` before Linux 5.8.
pub fn mount_id(file: BorrowedFd<'_>) -> Option<u64> {
    let mut status = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is an empty C string, the kernel fills `status`, and zeroes are a value of it.
    let status = unsafe {
        let flags = libc::AT_EMPTY_PATH;
        let (path, mask) = (c"".as_ptr(), libc::STATX_MNT_ID);
        if libc::statx(file.as_raw_fd(), path, flags, mask, status.as_mut_ptr()) != 0 {
            return None;
        }
        status.assume_init()
    };
    (status.stx_mask & libc::STATX_MNT_ID != 0).then_some(status.stx_mnt_id)
}

/// Exchanges two names at once (rename(2), `RENAME_EXCHANGE`).
///
/// # Errors
/// As rename(2).
#[cfg(test)]
pub fn exchange_names(one: &CStr, other: &CStr) -> Result<(), Errno> {
    // SAFETY: two C strings that outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_renameat2,
            libc::AT_FDCWD,
            one.as_ptr(),
            libc::AT_FDCWD,
            other.as_ptr(),
            libc::RENAME_EXCHANGE,
        )
    };
    Errno::result(result).map(drop)
}

/// Bytes that nobody can guess (getrandom(2)).
///
/// # Errors
/// A kernel without that call.
pub fn random_bytes<const COUNT: usize>() -> Result<[u8; COUNT], Errno> {
    let mut bytes = [0; COUNT];
    // SAFETY: the kernel writes at most as many bytes as there are. Up to 256 it gives all or none.
    let count = Errno::result(unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), COUNT, 0) })?;
    if usize::try_from(count) == Ok(COUNT) {
        Ok(bytes)
    } else {
        Err(Errno::EIO)
    }
}

/// Whether the kernel has system call filters that refuse with an error (seccomp(2)).
pub fn has_filters() -> bool {
    let action = libc::SECCOMP_RET_ERRNO;
    // SAFETY: asks only.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_GET_ACTION_AVAIL,
            0,
            &raw const action,
        )
    };
    result == 0
}

/// The most that this process may set a limit of its children to.
pub fn hard_limit(resource: Resource) -> u64 {
    limits(resource).rlim_max
}

/// The most that this process may have itself.
fn soft_limit(resource: Resource) -> u64 {
    limits(resource).rlim_cur
}

/// Both limits of this process.
fn limits(resource: Resource) -> libc::rlimit {
    let mut limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the kernel fills the structure.
    unsafe { libc::getrlimit(resource, &raw mut limit) };
    limit
}

/// Clock ticks in a second, as /proc counts processor time (sysconf(3)).
pub fn clock_ticks() -> u64 {
    // SAFETY: asks only.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).unwrap_or(100)
}

/// Bytes of a page of memory (sysconf(3)).
pub fn page_bytes() -> u64 {
    // SAFETY: asks only.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Makes a system call fail with `errno` on this thread, as if the kernel did not have it or a
/// container's filter hid it (seccomp(2)); for good.
///
/// # Errors
/// As seccomp(2).
#[cfg(test)]
pub fn hide_system_call(number: libc::c_long, errno: Errno) -> Result<(), Errno> {
    let statement = |code: u32, k: u32, jt: u8| libc::sock_filter {
        code: u16::try_from(code).unwrap_or(u16::MAX),
        jt,
        jf: 0,
        k,
    };
    let number = u32::try_from(number).map_err(|_| Errno::EINVAL)?;
    let mut filter = [
        // The number is the first word of struct seccomp_data.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, number, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
        statement(
            libc::BPF_RET | libc::BPF_K,
            libc::SECCOMP_RET_ERRNO | errno as u32,
            0,
        ),
    ];
    let program = libc::sock_fprog {
        len: 4,
        filter: filter.as_mut_ptr(),
    };
    nix::sys::prctl::set_no_new_privs()?;
    // SAFETY: the program and its filter live through the call, which copies them.
    let result = unsafe {
        let mode = libc::SECCOMP_SET_MODE_FILTER;
        libc::syscall(libc::SYS_seccomp, mode, 0, &raw const program)
    };
    Errno::result(result).map(drop)
}

/// Where the program's memory comes from.
///
/// musl's allocator gives what is free back to the kernel at once and asks for it again with the next
/// request: a mapping, a page fault and an interrupt to the other processors, several times a
/// request. dlmalloc keeps small pieces, which are what requests are made of. Large ones are musl's,
/// which maps the largest each by itself: the memory of a log that is gone is the machine's again.
struct Allocator;

#[cfg(not(test))]
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

impl Allocator {
    /// From so many bytes on, a piece is a large one.
    const LARGE: usize = 64 * 1024;

    const fn is_large(size: usize) -> bool {
        size >= Self::LARGE
    }
}

// SAFETY: every piece goes back to where it came from, for its size is the same then; and both
// allocators keep the contract.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe {
            if Self::is_large(layout.size()) {
                System.alloc(layout)
            } else {
                GlobalDlmalloc.alloc(layout)
            }
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe {
            if Self::is_large(layout.size()) {
                System.alloc_zeroed(layout)
            } else {
                GlobalDlmalloc.alloc_zeroed(layout)
            }
        }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract, and the size says whose the memory is.
        unsafe {
            if Self::is_large(layout.size()) {
                System.dealloc(memory, layout);
            } else {
                GlobalDlmalloc.dealloc(memory, layout);
            }
        }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller keeps the contract, which includes that `size` makes a valid layout with
        // the same alignment. The two pieces are different ones, and both hold what is copied.
        unsafe {
            match (Self::is_large(layout.size()), Self::is_large(size)) {
                (true, true) => System.realloc(memory, layout, size),
                (false, false) => GlobalDlmalloc.realloc(memory, layout, size),
                _ => {
                    let new = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
                    if !new.is_null() {
                        ptr::copy_nonoverlapping(memory, new, layout.size().min(size));
                        self.dealloc(memory, layout);
                    }
                    new
                }
            }
        }
    }
}

/// The allocator, and how much each thread has asked it for.
#[cfg(test)]
struct CountingAllocator;

#[cfg(test)]
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[cfg(test)]
thread_local! {
    static ALLOCATED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Bytes that this thread has ever asked for; memory that is asked to grow counts in full again.
#[cfg(test)]
pub fn allocated_bytes() -> usize {
    ALLOCATED.get()
}

// SAFETY: every call is passed on as it came; the counter needs no memory and has no destructor.
#[cfg(test)]
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.set(ALLOCATED.get().wrapping_add(layout.size()));
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { Allocator.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { Allocator.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATED.set(ALLOCATED.get().wrapping_add(size));
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { Allocator.realloc(memory, layout, size) }
    }
}

#[cfg(test)]
mod tests {
    /// Across the size from which on memory is somebody else's, in every direction.
    #[test]
    fn memory_that_grows_and_shrinks_keeps_what_it_holds() {
        let sizes = [
            1,
            100,
            65_535,
            65_536,
            70_000,
            5 << 20,
            65_536,
            65_535,
            17,
            200_000,
            3,
        ];
        let mut memory: Vec<u8> = Vec::new();
        for size in sizes {
            let kept = memory.len().min(size);
            memory.truncate(kept);
            memory.shrink_to(size);
            memory.reserve_exact(size - kept);
            memory.extend((kept..size).map(|index| u8::try_from(index % 251).unwrap()));
            let expected = (0..size).map(|index| u8::try_from(index % 251).unwrap());
            assert!(memory.iter().copied().eq(expected), "{size}");
            assert!(vec![0u8; size].iter().all(|byte| *byte == 0), "{size}");
        }
    }
}

/// How often each place in the program was passed, as `-C instrument-coverage` counts.
#[cfg(all(test, guided))]
pub fn execution_counters() -> &'static [std::sync::atomic::AtomicU64] {
    unsafe extern "C" {
        // Of LLVM's profiling runtime (compiler-rt, InstrProfiling.h).
        fn __llvm_profile_begin_counters() -> *mut u64;
        fn __llvm_profile_end_counters() -> *mut u64;
    }
    // SAFETY: the two are the bounds of a section of the program that holds nothing but its counters,
    // which are aligned, live as long as it does, and are only ever read and written as whole words.
    unsafe {
        let (begin, end) = (
            __llvm_profile_begin_counters(),
            __llvm_profile_end_counters(),
        );
        std::slice::from_raw_parts(begin.cast(), (end.addr() - begin.addr()) / size_of::<u64>())
    }
}
