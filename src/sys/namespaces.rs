//! Namespaces: the process that holds a set of them, and processes and sockets that enter it (namespaces(7)).
//!
//! The holder is the first process of the pid namespace. The server prepares every step that it takes; the
//! child makes raw system calls on that memory, in order, and executes a program that only waits. A command
//! enters through a short process that changes into the namespaces and starts the command as its own sibling,
//! so the command is a child of the server's thread like any other.

use std::cell::Cell;
use std::ffi::{CString, c_int, c_ulong, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nix::errno::Errno;

use super::clone::{ChildStack, clone, clone_in, enter_cgroup, write_oom_score};
use super::identity::{drop_capabilities, forbid_root_capabilities};
use super::mounts::{MOVE_FROM_DESCRIPTOR, MOVE_TO_DESCRIPTOR, MountAttributes, MountSource};
use super::poll::{Events, PollEntry, poll};
use super::process::{Ending, Pid, pidfd_signal, wait};
use super::signals::{changed_signals, ignore_by_system_call, set_default};

/// The namespaces that every holder has.
const ALWAYS: c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// Which namespaces a holder has besides those of mounts, pids, IPC, host name and cgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceSet {
    /// One of users, in which the holder has the capabilities that it needs.
    pub user: bool,
    /// One of the network.
    pub network: bool,
}

impl NamespaceSet {
    fn flags(self) -> c_int {
        let user = if self.user { libc::CLONE_NEWUSER } else { 0 };
        ALWAYS | user | self.network_flag()
    }

    fn network_flag(self) -> c_int {
        if self.network { libc::CLONE_NEWNET } else { 0 }
    }
}

/// A step towards the holder's view of the file system.
#[derive(Debug)]
pub enum Setup {
    /// mkdir(2).
    Directory(CString, libc::mode_t),
    /// A new file with a content, mode 0644.
    File(CString, Vec<u8>),
    /// Writes a limit of the kernel (proc(5)). What the kernel refuses is left at that: in a namespace of users those
    /// for System V IPC can be changed since Linux 6.9.
    Limit(CString, Vec<u8>),
    /// symlink(2): the target, and the path of the link.
    Link(CString, CString),
    /// unlink(2).
    Remove(CString),
    /// mount(2).
    Mount {
        source: CString,
        target: CString,
        /// The type of file system; empty for none.
        kind: CString,
        /// `MS_*`.
        flags: c_ulong,
        /// Options of the file system.
        options: CString,
    },
    /// `mount_setattr(2)`: adds attributes to a mount, and to those below it if the last is true.
    Attributes(CString, u64, bool),
    /// Puts the mount that the plan brings in place (`move_mount(2)`).
    Attach(CString),
    /// Moves a mount over the mount point of the plan with this number, which has this path in the new root.
    Place {
        point: usize,
        path: CString,
        from: MountSource,
    },
    /// Makes the mount at this path the root, and takes everything else out of sight: by `pivot_root(2)`, or
    /// where that is refused by moving the mount over the root.
    Root(CString),
}

/// What a holder needs, prepared before it exists.
pub struct HolderPlan {
    /// Its namespaces.
    pub set: NamespaceSet,
    /// What it does there, in order.
    pub setup: Vec<Setup>,
    /// The program that it executes, open.
    pub program: Arc<OwnedFd>,
    /// The pidfd of the server.
    pub server: Arc<OwnedFd>,
    /// `argv` of that program.
    pub arguments: Vec<CString>,
    /// A mount without a place, for [`Setup::Attach`].
    pub root: Option<OwnedFd>,
    /// Further ones, for [`Setup::Place`].
    pub mounts: Vec<OwnedFd>,
    /// Directories and files of `root`, open, that they are moved over. To find them can take long: a sandbox has made the
    /// links on the way.
    pub points: Vec<OwnedFd>,
    /// With a namespace of users: where the child writes its pid and reads a byte when its users are mapped, 1 if
    /// they are.
    pub mapping: Option<UnixDatagram>,
}

/// The holder's steps, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HolderStep {
    /// clone(2).
    Clone,
    /// Have its users mapped.
    Users,
    /// Close the server's descriptors.
    Descriptors,
    /// Bring the loopback interface up.
    Loopback,
    /// The step of [`HolderPlan::setup`] with this index.
    Setup(usize),
    /// Give up all privileges.
    Privileges,
    Execute,
}

/// Why there is no holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HolderError {
    /// The step that failed.
    pub step: HolderStep,
    /// The error of its system call.
    pub errno: Errno,
}

/// A process that holds namespaces. It ends, and with it everything in its pid namespace, when this is
/// dropped, and when the thread that started it ends.
pub struct Holder {
    pid: Pid,
    pidfd: OwnedFd,
    set: NamespaceSet,
    /// Guards nothing but the turn of whoever signals all: a signal to all reaches another sender too, and one that was
    /// stopped would never send its own.
    sender: Mutex<()>,
}

/// What the child of [`Holder::start`] reads, and what it reports back.
struct RawPlan<'a> {
    plan: &'a HolderPlan,
    argv: Vec<*const libc::c_char>,
    /// The descriptors that the child keeps until it executes the program, in order.
    kept: Vec<RawFd>,
    changed_signals: &'static [c_int],
    failure: Cell<Option<HolderError>>,
}

impl Holder {
    /// Starts a holder and returns when it executes its program. It gets SIGKILL when the calling thread ends.
    ///
    /// # Errors
    /// The step that failed and its errno. Nothing is left of it.
    pub fn start(plan: &HolderPlan) -> Result<Self, HolderError> {
        let argv = plan.arguments.iter().map(|argument| argument.as_ptr());
        let given = [&*plan.program, &*plan.server];
        let files = given.into_iter().chain(&plan.root).chain(&plan.mounts);
        let mut kept = Vec::new();
        for descriptor in files.chain(&plan.points).map(AsRawFd::as_raw_fd) {
            // They are few, and the library's sorting is 4 KB of code.
            let place = kept.partition_point(|other| *other < descriptor);
            kept.insert(place, descriptor);
        }
        let raw = RawPlan {
            plan,
            kept,
            argv: argv.chain([ptr::null()]).collect(),
            changed_signals: changed_signals(),
            failure: Cell::new(None),
        };
        let flags = libc::CLONE_VFORK | libc::CLONE_FILES | plan.set.flags();
        let argument = (&raw const raw).cast_mut().cast();
        let failed = |step| move |errno| HolderError { step, errno };
        let cloned = clone(holder, argument, &mut ChildStack::new(), flags);
        let (pid, pidfd) = cloned.map_err(failed(HolderStep::Clone))?;
        if let Some(failure) = raw.failure.get() {
            let _ = wait(pidfd.as_fd(), true);
            return Err(failure);
        }
        // Something may have killed it before it got that far.
        if let Ok(Some(_)) = wait(pidfd.as_fd(), false) {
            return Err(failed(HolderStep::Execute)(Errno::ESRCH));
        }
        Ok(Self {
            pid,
            pidfd,
            set: plan.set,
            sender: Mutex::default(),
        })
    }

    /// Its pid, which is its own until it was reaped.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Its namespaces.
    pub fn set(&self) -> NamespaceSet {
        self.set
    }

    /// Whether it has not ended.
    pub fn is_alive(&self) -> bool {
        let mut entries = [PollEntry::new(self.pidfd.as_fd(), Events::READABLE)];
        !poll(&mut entries, Some(std::time::Duration::ZERO))
    }

    /// Ends it, and with it all processes in its pid namespace. Returns before they have ended.
    pub fn kill(&self) {
        let _ = pidfd_signal(self.pidfd.as_fd(), libc::SIGKILL);
    }

    /// Signals all processes in its pid namespace but itself, at once; with signal 0 none.
    ///
    /// # Errors
    /// `ESRCH` if there is none, or it has ended itself; those of clone(2).
    pub fn signal_all(&self, signal: c_int) -> Result<(), Errno> {
        let _turn = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let order = SignalAll {
            signal,
            result: Cell::new(Err(Errno::ESRCH)),
        };
        let argument = (&raw const order).cast_mut().cast();
        let announcement = AtomicI32::new(0);
        let none = (&b""[..], &Cell::new(false));
        let sent = clone_inside(
            self,
            None,
            signal_all,
            argument,
            libc::CLONE_FILES,
            &announcement,
            none,
        );
        let (_, pidfd) = sent.map_err(|error| match error {
            EntranceError::Cgroup(errno)
            | EntranceError::Enter(errno)
            | EntranceError::Clone(errno) => errno,
        })?;
        let _ = wait(pidfd.as_fd(), true);
        order.result.get()
    }

    /// Makes a socket that belongs to its network namespace, close-on-exec.
    ///
    /// # Errors
    /// `ESRCH` if the holder has ended, or that of socket(2).
    pub fn socket(&self, family: c_int, kind: c_int) -> Result<OwnedFd, Errno> {
        let user = if self.set.user {
            libc::CLONE_NEWUSER
        } else {
            0
        };
        let order = SocketOrder {
            holder: self.pidfd.as_raw_fd(),
            namespaces: user | self.set.network_flag(),
            family,
            kind: kind | libc::SOCK_CLOEXEC,
            result: Cell::new(Err(Errno::ESRCH)),
        };
        let argument = (&raw const order).cast_mut().cast();
        // With CLONE_FILES the socket is in the server's table.
        let flags = libc::CLONE_VFORK | libc::CLONE_FILES;
        let (_, pidfd) = clone(make_socket, argument, &mut ChildStack::new(), flags)?;
        let _ = wait(pidfd.as_fd(), true);
        // SAFETY: the child has made it, and nothing else owns it.
        let owned = |descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) };
        order.result.get().map(owned)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.kill();
    }
}

impl AsFd for Holder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// What [`Holder::signal_all`] has a process do.
struct SignalAll {
    signal: c_int,
    result: Cell<Result<(), Errno>>,
}

extern "C" fn signal_all(argument: *mut c_void) -> c_int {
    // SAFETY: `Holder::signal_all` passes a SignalAll that outlives this process and is not looked at meanwhile. Plain
    // integers.
    unsafe {
        let order = &*argument.cast_const().cast::<SignalAll>();
        // Not the first process, and not this one (kill(2)).
        let result = libc::syscall(libc::SYS_kill, -1, order.signal);
        order.result.set(Errno::result(result).map(drop));
        libc::_exit(0)
    }
}

struct SocketOrder {
    holder: RawFd,
    /// 0 where the network is the server's own.
    namespaces: c_int,
    family: c_int,
    kind: c_int,
    result: Cell<Result<RawFd, Errno>>,
}

extern "C" fn make_socket(argument: *mut c_void) -> c_int {
    // SAFETY: `Holder::socket` passes a SocketOrder that outlives this process and is not looked at
    // meanwhile. Plain integers.
    unsafe {
        let order = &*argument.cast_const().cast::<SocketOrder>();
        let has_entered = order.namespaces == 0 || set_namespaces(order.holder, order.namespaces);
        let descriptor = if has_entered {
            libc::syscall(libc::SYS_socket, order.family, order.kind, 0)
        } else {
            -1
        };
        let result = Errno::result(descriptor);
        order
            .result
            .set(result.map(|descriptor| RawFd::try_from(descriptor).unwrap_or(-1)));
        libc::_exit(0)
    }
}

/// setns(2) by a process that shares the server's memory.
///
/// # Safety
/// Only in a child that makes system calls only.
unsafe fn set_namespaces(holder: RawFd, namespaces: c_int) -> bool {
    // SAFETY: plain integers.
    unsafe {
        let result = libc::syscall(libc::SYS_setns, holder, namespaces);
        let errno = Errno::last_raw();
        // The change of credentials makes the memory as dumpable as `fs.suid_dumpable` says (proc(5)).
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        Errno::set_raw(errno);
        result == 0
    }
}

/// The child's half of [`Holder::start`].
extern "C" fn holder(argument: *mut c_void) -> c_int {
    // SAFETY: `start` passes a RawPlan that outlives this function, and reads it after this process has
    // called execve or exited.
    let raw = unsafe { &*argument.cast_const().cast::<RawPlan<'_>>() };
    // SAFETY: this is the child that `hold` needs.
    let step = unsafe { hold(raw) };
    raw.failure.set(Some(HolderError {
        step,
        errno: Errno::last(),
    }));
    // SAFETY: ends the child without touching anything it shares with the server.
    unsafe { libc::_exit(127) }
}

/// Sets the namespaces up and executes the program. Returns only the step that failed, with its errno set.
///
/// # Safety
/// Only in the child of a `CLONE_VM | CLONE_VFORK` clone with all signals blocked.
unsafe fn hold(raw: &RawPlan<'_>) -> HolderStep {
    let plan = raw.plan;
    // SAFETY: plain system calls on integers and on memory that `raw` keeps alive. None allocates or locks.
    unsafe {
        // Before anything that takes time, and asked again afterwards: the server may have ended before.
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) < 0 {
            return HolderStep::Privileges;
        }
        let server = plan.server.as_raw_fd();
        if has_ended(server) {
            libc::_exit(1);
        }
        if let Some(mapping) = &plan.mapping
            && !have_users_mapped(mapping.as_raw_fd())
        {
            return HolderStep::Users;
        }
        // A private table with what is needed alone. It is made with the end of the server's, so that comes first.
        let program = plan.program.as_raw_fd();
        let (mut to, mut flags) = (c_int::MAX, libc::CLOSE_RANGE_UNSHARE);
        for kept in raw.kept.iter().rev().copied().chain([-1]) {
            let from = kept + 1;
            if from <= to && libc::syscall(libc::SYS_close_range, from, to, flags) < 0 {
                return HolderStep::Descriptors;
            }
            (to, flags) = (kept - 1, 0);
        }
        if plan.set.network && !bring_loopback_up() {
            return HolderStep::Loopback;
        }
        libc::umask(0);
        for (index, step) in plan.setup.iter().enumerate() {
            if !set_up(plan, step) {
                return HolderStep::Setup(index);
            }
        }
        let has_groups = libc::syscall(libc::SYS_setgroups, 0, ptr::null::<libc::gid_t>()) < 0;
        if has_groups || forbid_root_capabilities().is_err() || drop_capabilities().is_err() {
            return HolderStep::Privileges;
        }
        // A change of credentials may have cleared the signal (prctl(2)).
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0
            || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) < 0
            || libc::setsid() < 0
        {
            return HolderStep::Privileges;
        }
        // Its thread may have ended just before it had a child that wanted to know.
        if has_ended(server) {
            libc::_exit(1);
        }
        for signal in raw.changed_signals {
            set_default(*signal);
        }
        if plan.root.is_some() {
            // Before its main function a program opens /dev/null for each of these that is closed, and in the sandbox's
            // root it may find none that it may open.
            for _ in 0..3 {
                libc::syscall(libc::SYS_eventfd2, 0, 0);
            }
        }
        // The kernel reaps the orphans that this process adopts.
        ignore_by_system_call(libc::SIGCHLD);
        let (path, empty) = (c"".as_ptr(), [ptr::null::<libc::c_char>()]);
        let argv = raw.argv.as_ptr();
        let flags = libc::AT_EMPTY_PATH;
        libc::syscall(
            libc::SYS_execveat,
            program,
            path,
            argv,
            empty.as_ptr(),
            flags,
        );
        HolderStep::Execute
    }
}

/// Whether the process with this pidfd has ended.
///
/// # Safety
/// As for [`hold`].
unsafe fn has_ended(pidfd: RawFd) -> bool {
    let mut entry = libc::pollfd {
        fd: pidfd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry, which outlives the call.
    unsafe { libc::poll(&raw mut entry, 1, 0) != 0 }
}

/// Tells the server the pid that it knows this process by, and waits until its users are mapped.
///
/// # Safety
/// As for [`hold`].
unsafe fn have_users_mapped(mapping: RawFd) -> bool {
    let mut name = [0_u8; 16];
    let mut answer = 0_u8;
    // SAFETY: buffers of the given sizes.
    unsafe {
        // /proc is still the server's, so this is the pid that the server sees.
        let (path, buffer) = (c"/proc/self".as_ptr(), name.as_mut_ptr());
        let (at, size) = (libc::AT_FDCWD, name.len());
        let length = libc::syscall(libc::SYS_readlinkat, at, path, buffer, size);
        if length <= 0 {
            return false;
        }
        libc::syscall(libc::SYS_write, mapping, name.as_ptr(), length);
        libc::syscall(libc::SYS_read, mapping, &raw mut answer, 1);
    }
    if answer != 1 {
        Errno::EPERM.set();
    }
    answer == 1
}

/// # Safety
/// As for [`hold`].
unsafe fn bring_loopback_up() -> bool {
    // SAFETY: all zeroes are an ifreq; the kernel reads its name and flags.
    unsafe {
        let mut request = MaybeUninit::<libc::ifreq>::zeroed().assume_init();
        for (to, from) in request.ifr_name.iter_mut().zip(*b"lo") {
            *to = from.cast_signed() as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = i16::try_from(libc::IFF_UP).unwrap_or(1);
        let kind = libc::SOCK_DGRAM;
        let socket = libc::syscall(libc::SYS_socket, libc::AF_INET, kind, 0);
        if socket < 0 {
            return false;
        }
        let command = libc::SIOCSIFFLAGS as c_ulong;
        let result = libc::syscall(libc::SYS_ioctl, socket, command, &raw const request);
        let errno = Errno::last_raw();
        libc::syscall(libc::SYS_close, socket);
        Errno::set_raw(errno);
        result == 0
    }
}

/// # Safety
/// As for [`hold`].
unsafe fn set_up(plan: &HolderPlan, step: &Setup) -> bool {
    let at = libc::AT_FDCWD;
    // SAFETY: C strings and a structure that outlive the calls.
    let result = unsafe {
        match step {
            Setup::Directory(path, mode) => {
                libc::syscall(libc::SYS_mkdirat, at, path.as_ptr(), *mode)
            }
            Setup::File(path, content) => {
                return write_file(path, libc::O_CREAT | libc::O_EXCL, content);
            }
            Setup::Limit(path, value) => {
                write_file(path, 0, value);
                0
            }
            Setup::Link(target, path) => {
                libc::syscall(libc::SYS_symlinkat, target.as_ptr(), at, path.as_ptr())
            }
            Setup::Remove(path) => libc::syscall(libc::SYS_unlinkat, at, path.as_ptr(), 0),
            Setup::Mount {
                source,
                target,
                kind,
                flags,
                options,
            } => libc::syscall(
                libc::SYS_mount,
                source.as_ptr(),
                target.as_ptr(),
                kind.as_ptr(),
                *flags,
                options.as_ptr(),
            ),
            Setup::Attributes(path, set, is_recursive) => {
                let attributes = MountAttributes {
                    set: *set,
                    clear: 0,
                    propagation: 0,
                    user_namespace: 0,
                };
                let flags = if *is_recursive { libc::AT_RECURSIVE } else { 0 };
                let size = size_of::<MountAttributes>();
                libc::syscall(
                    libc::SYS_mount_setattr,
                    at,
                    path.as_ptr(),
                    flags,
                    &raw const attributes,
                    size,
                )
            }
            Setup::Attach(path) => {
                let root = plan.root.as_ref().map_or(-1, AsRawFd::as_raw_fd);
                let (empty, flags) = (c"".as_ptr(), MOVE_FROM_DESCRIPTOR);
                libc::syscall(libc::SYS_move_mount, root, empty, at, path.as_ptr(), flags)
            }
            Setup::Place { point, from, .. } => {
                let number = |files: &[OwnedFd], at| files.get(at).map_or(-1, AsRawFd::as_raw_fd);
                let (empty, to) = (c"".as_ptr(), number(&plan.points, *point));
                let (mount, path, flags) = match from {
                    MountSource::Path(path) => (at, path.as_ptr(), MOVE_TO_DESCRIPTOR),
                    MountSource::Detached(index) => {
                        let flags = MOVE_FROM_DESCRIPTOR | MOVE_TO_DESCRIPTOR;
                        (number(&plan.mounts, *index), empty, flags)
                    }
                };
                libc::syscall(libc::SYS_move_mount, mount, path, to, empty, flags)
            }
            Setup::Root(path) => return become_root(path),
        }
    };
    result >= 0
}

/// Writes a whole file by one call.
///
/// # Safety
/// As for [`hold`].
unsafe fn write_file(path: &CString, flags: c_int, content: &[u8]) -> bool {
    let (at, flags) = (libc::AT_FDCWD, flags | libc::O_WRONLY | libc::O_CLOEXEC);
    // SAFETY: a C string and bytes that outlive the calls.
    unsafe {
        let file = libc::syscall(libc::SYS_openat, at, path.as_ptr(), flags, 0o644);
        if file < 0 {
            return false;
        }
        let (bytes, count) = (content.as_ptr(), content.len());
        let written = libc::syscall(libc::SYS_write, file, bytes, count);
        libc::syscall(libc::SYS_close, file);
        let is_whole = usize::try_from(written) == Ok(count);
        if !is_whole {
            Errno::ENOSPC.set();
        }
        is_whole
    }
}

/// # Safety
/// As for [`hold`].
unsafe fn become_root(path: &CString) -> bool {
    let (here, root) = (c".".as_ptr(), c"/".as_ptr());
    let nothing = ptr::null::<libc::c_char>();
    // SAFETY: C strings that outlive the calls.
    unsafe {
        if libc::syscall(libc::SYS_chdir, path.as_ptr()) < 0 {
            return false;
        }
        let has_changed = if libc::syscall(libc::SYS_pivot_root, here, here) == 0 {
            libc::syscall(libc::SYS_umount2, here, libc::MNT_DETACH) == 0
        } else {
            // The usual filter of containers refuses pivot_root also to who may mount.
            let flags = libc::MS_MOVE;
            libc::syscall(libc::SYS_mount, here, root, nothing, flags, nothing) == 0
                && libc::syscall(libc::SYS_chroot, here) == 0
        };
        has_changed && libc::syscall(libc::SYS_chdir, root) == 0
    }
}

/// What a process enters before it starts a command.
struct Entrance<'a> {
    /// The directory of the cgroup that it has to enter by itself.
    cgroup_to_enter: Cell<Option<RawFd>>,
    holder: RawFd,
    namespaces: c_int,
    entry: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
    stack: *mut c_void,
    flags: c_int,
    announcement: &'a AtomicI32,
    /// Written to `/proc/self/oom_score_adj`, if it is any; then `has_oom_score` is set.
    oom_score: &'a [u8],
    has_oom_score: &'a Cell<bool>,
    /// The pidfd of the process inside.
    result: Cell<Result<RawFd, EntranceError>>,
}

/// Why nothing runs inside.
#[derive(Debug, Clone, Copy)]
pub(super) enum EntranceError {
    /// The cgroup could not be entered.
    Cgroup(Errno),
    /// setns(2) failed.
    Enter(Errno),
    /// clone(2) failed.
    Clone(Errno),
}

/// As [`clone_in`], with `CLONE_VFORK`, in the namespaces of a holder. The kernel stores the new process's number, as the
/// server sees it, in `announcement` before it runs.
///
/// A process cannot change its own pid namespace, and the server's threads may lack the right to enter one. So
/// a short process enters, and starts the other one as its own sibling (`CLONE_PARENT`): a child of the calling
/// thread, without an exit signal until execve like every child of [`clone`]. The score for when memory runs out is set before,
/// and `Cell` tells whether. The short one is in the cgroup already: from
/// inside a namespace of cgroups none beyond its root can be entered.
pub(super) fn clone_inside(
    inside: &Holder,
    cgroup: Option<BorrowedFd<'_>>,
    entry: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
    flags: c_int,
    announcement: &AtomicI32,
    (oom_score, has_oom_score): (&[u8], &Cell<bool>),
) -> Result<(Pid, OwnedFd), EntranceError> {
    let mut stack = ChildStack::new();
    let entrance = Entrance {
        cgroup_to_enter: Cell::new(None),
        holder: inside.pidfd.as_raw_fd(),
        namespaces: inside.set.flags(),
        entry,
        argument,
        stack: stack.top(),
        flags: flags | libc::CLONE_VM | libc::CLONE_VFORK,
        announcement,
        oom_score,
        has_oom_score,
        result: Cell::new(Err(EntranceError::Enter(Errno::ESRCH))),
    };
    let own = (&raw const entrance).cast_mut().cast();
    let sharing = libc::CLONE_VFORK | libc::CLONE_FILES;
    let (to_enter, mut own_stack) = (&entrance.cgroup_to_enter, ChildStack::new());
    let cloned = clone_in(cgroup, to_enter, enter, own, &mut own_stack, sharing);
    let (_, pidfd) = cloned.map_err(EntranceError::Clone)?;
    let ending = wait(pidfd.as_fd(), true);
    let pid = announcement.load(Ordering::Acquire);
    match entrance.result.get() {
        // SAFETY: the kernel has made it, and nothing else owns it.
        Ok(pidfd) => Ok((pid, unsafe { OwnedFd::from_raw_fd(pidfd) })),
        Err(error) => {
            if pid != 0 || !matches!(ending, Ok(Some(Ending::Exited(_)))) {
                // Something killed the process that waited for the one inside, which may still use this memory; or no
                // descriptor was left for that one.
                announcement.store(0, Ordering::Release);
                end(pid);
            }
            Err(error)
        }
    }
}

/// Kills a child that nothing else waits for, and reaps it.
fn end(pid: Pid) {
    if pid <= 0 {
        return;
    }
    // SAFETY: plain integers and a null pointer. The child was not reaped, so the number is its own.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        while libc::waitpid(pid, ptr::null_mut(), libc::__WALL) < 0 && Errno::last() == Errno::EINTR
        {
        }
    }
}

extern "C" fn enter(argument: *mut c_void) -> c_int {
    // SAFETY: `clone_inside` passes an Entrance that outlives this process and is not looked at meanwhile. Plain
    // system calls.
    unsafe {
        let entrance = &*argument.cast_const().cast::<Entrance<'_>>();
        if let Some(directory) = entrance.cgroup_to_enter.get()
            && let Err(errno) = enter_cgroup(directory)
        {
            entrance.result.set(Err(EntranceError::Cgroup(errno)));
            libc::_exit(1)
        }
        // Here, where /proc is the server's, and the process inside gets the same. One that shares memory with others and
        // is not waited for by vfork would set theirs too (proc(5)).
        if !entrance.oom_score.is_empty() && write_oom_score(entrance.oom_score) {
            entrance.has_oom_score.set(true);
        }
        if !set_namespaces(entrance.holder, entrance.namespaces) {
            entrance
                .result
                .set(Err(EntranceError::Enter(Errno::last())));
            libc::_exit(1)
        }
        let flags = entrance.flags | libc::CLONE_PARENT | libc::CLONE_PARENT_SETTID;
        let pid = libc::clone(
            entrance.entry,
            entrance.stack,
            flags,
            entrance.argument,
            entrance.announcement.as_ptr(),
        );
        // Not CLONE_PIDFD: it wants the same argument. Nobody reaps a child that is announced.
        let pidfd = if pid < 0 {
            -1
        } else {
            libc::syscall(libc::SYS_pidfd_open, pid, 0)
        };
        let result = Errno::result(pidfd).map(|pidfd| RawFd::try_from(pidfd).unwrap_or(-1));
        entrance.result.set(result.map_err(EntranceError::Clone));
        libc::_exit(i32::from(result.is_err()))
    }
}

/// Waits until it is killed. The program of a holder.
pub fn wait_for_end() -> ! {
    // SAFETY: a C string, and no arguments.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, c"sandbox-init".as_ptr(), 0, 0, 0);
        loop {
            libc::pause();
        }
    }
}

#[cfg(test)]
impl HolderPlan {
    /// Namespaces in which nothing is set up, and whose first process sleeps.
    pub(super) fn sleeping() -> Self {
        let program = std::fs::File::open("/bin/sleep").unwrap();
        let server = super::pidfd_open(std::process::id().cast_signed()).unwrap();
        Self {
            set: NamespaceSet {
                user: false,
                network: false,
            },
            setup: Vec::new(),
            program: Arc::new(program.into()),
            server: Arc::new(server),
            arguments: vec![c"sleep".to_owned(), c"1000".to_owned()],
            root: None,
            mounts: Vec::new(),
            points: Vec::new(),
            mapping: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn one_sender_of_signals_does_not_stop_the_other() {
        if !nix::unistd::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "SKIPPED in CI");
            eprintln!("SKIPPED: namespaces need root");
            return;
        }
        let holder = match Holder::start(&HolderPlan::sleeping()) {
            Ok(holder) => Arc::new(holder),
            Err(error) => {
                assert!(std::env::var_os("CI").is_none(), "SKIPPED in CI");
                eprintln!("SKIPPED: no namespaces here: {error:?}");
                return;
            }
        };
        let (done, is_done) = channel();
        for signal in [libc::SIGSTOP, 0] {
            let (holder, done) = (Arc::clone(&holder), done.clone());
            std::thread::spawn(move || {
                for _ in 0..2000 {
                    // There is nobody else inside.
                    assert_eq!(holder.signal_all(signal), Err(Errno::ESRCH));
                }
                done.send(()).unwrap();
            });
        }
        drop(done);
        for _ in 0..2 {
            let ended = is_done.recv_timeout(Duration::from_secs(60));
            ended.expect("a sender was stopped");
        }
    }
}
