//! User namespaces and mounts that belong to no directory yet: what the private root of a sandbox is made of
//! (`user_namespaces(7)`, `open_tree(2)`, `fsopen(2)`, overlayfs.rst).
//!
//! The namespaces own nothing, so that nobody inside may mount. The server makes the mounts, which show the ids of a block
//! of the machine as ids from 0 on.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag};
use nix::sys::stat::Mode;
use nix::sys::statvfs::{FsFlags, fstatvfs};
use nix::unistd::UnlinkatFlags;

use super::clone::{ChildStack, clone};
use super::identity::{ActingAs, NO_SETUID_FIXUP, User, set_secure_bits};
use super::paths::{openat, openat2, unlinkat};
use super::poll::{Events, PollEntry, poll};
use super::process::{pidfd_signal, wait};

/// How many ids a sandbox with a root of its own has.
pub const IDS_OF_SANDBOX: u32 = 65_536;

/// A user namespace whose ids from 0 on are those of a block of the server's.
pub struct UserNamespace(OwnedFd);

/// What the first process of a user namespace needs.
struct FirstPlan {
    owner: User,
    processes: libc::rlimit,
    /// The process that it ends with.
    server: libc::pid_t,
    /// Where it writes a byte when it is in its namespace.
    ready: c_int,
    /// Its namespace, open in the table that both share.
    made: Cell<Result<c_int, Errno>>,
}

impl UserNamespace {
    /// Makes one for the block that begins with `first`. All of its ids together have at most so many processes and threads:
    /// the kernel counts them for the owner, which is its root (`inc_rlimit_ucounts` in kernel/ucount.c).
    ///
    /// # Errors
    /// `EPERM` if this process may not; `ENOSPC` if there are as many as `/proc/sys/user` allows.
    pub fn new(first: libc::uid_t, max_processes: u64) -> Result<Self, Errno> {
        let (read, write) = std::io::pipe().map_err(|error| errno_of(&error))?;
        let plan = FirstPlan {
            owner: User {
                uid: first,
                gid: first,
            },
            processes: libc::rlimit {
                rlim_cur: max_processes,
                rlim_max: max_processes,
            },
            server: nix::unistd::getpid().as_raw(),
            ready: write.as_raw_fd(),
            made: Cell::new(Err(Errno::ESRCH)),
        };
        let mut stack = ChildStack::new();
        let argument = (&raw const plan).cast_mut().cast();
        let (pid, pidfd) = clone(first_process, argument, &mut stack, libc::CLONE_FILES)?;
        let mut entries = [
            PollEntry::new(read.as_fd(), Events::READABLE),
            PollEntry::new(pidfd.as_fd(), Events::READABLE),
        ];
        // False after a signal.
        while !poll(&mut entries, None) {}
        let made = plan.made.get();
        // SAFETY: the child has opened it, and nothing else owns it.
        let made = made.map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) });
        let map = format!("0 {first} {IDS_OF_SANDBOX}\n");
        let made = made.and_then(|users| {
            std::fs::write(format!("/proc/{pid}/uid_map"), &map)
                .and_then(|()| std::fs::write(format!("/proc/{pid}/gid_map"), &map))
                .map_err(|error| errno_of(&error))?;
            Ok(users)
        });
        // It uses the stack and the plan until it has ended.
        let _ = pidfd_signal(pidfd.as_fd(), libc::SIGKILL);
        let _ = wait(pidfd.as_fd(), true);
        made.map(Self)
    }
}

impl AsFd for UserNamespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

extern "C" fn first_process(argument: *mut c_void) -> c_int {
    // SAFETY: `UserNamespace::new` passes a plan that outlives this process, and reads the cell only after a byte was written
    // or this process has ended. Plain system calls on it.
    unsafe {
        let plan = &*argument.cast_const().cast::<FirstPlan>();
        let User { uid, gid } = plan.owner;
        let is_made = allow_processes(plan.processes)
            && set_secure_bits(NO_SETUID_FIXUP).is_ok()
            && libc::syscall(libc::SYS_setresgid, gid, gid, gid) == 0
            && libc::syscall(libc::SYS_setresuid, uid, uid, uid) == 0
            && libc::syscall(libc::SYS_unshare, libc::CLONE_NEWUSER) == 0
            // After the changes of user, which clear it (prctl(2)). It has the server's descriptors, its locks among them.
            && libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) == 0
            && libc::getppid() == plan.server;
        // By itself: others need a capability to look into it.
        let (at, path) = (libc::AT_FDCWD, c"/proc/self/ns/user".as_ptr());
        let flags = libc::O_RDONLY | libc::O_CLOEXEC;
        let users = if is_made {
            libc::syscall(libc::SYS_openat, at, path, flags)
        } else {
            -1
        };
        let users = Errno::result(users);
        let users = users.map(|users| c_int::try_from(users).unwrap_or(-1));
        plan.made.set(users);
        // As in `spawn`: a change of user may make the server's memory dumpable.
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::syscall(libc::SYS_write, plan.ready, c"".as_ptr(), 1);
        if !is_made {
            libc::_exit(1);
        }
        loop {
            libc::pause();
        }
    }
}

/// Limits this process and what it starts to so many processes, or to as many as it may have at all, by system calls only.
fn allow_processes(wanted: libc::rlimit) -> bool {
    let mut own = wanted;
    // SAFETY: structures that outlive the calls.
    unsafe {
        libc::setrlimit(libc::RLIMIT_NPROC, &raw const wanted) == 0
            || (libc::getrlimit(libc::RLIMIT_NPROC, &raw mut own) == 0 && {
                own.rlim_cur = own.rlim_max.min(wanted.rlim_max);
                own.rlim_max = own.rlim_cur;
                libc::setrlimit(libc::RLIMIT_NPROC, &raw const own) == 0
            })
    }
}

/// A step towards the root of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountStep {
    /// Show a directory under other ids.
    Map,
    /// Open what the overlay has of the sandbox's own.
    Open,
    /// Ask for an overlay.
    Begin,
    /// Give it its directories and options.
    Configure,
    /// Make it.
    Make,
    /// It can be written to.
    Write,
}

/// Why there is no mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountError {
    pub step: MountStep,
    pub errno: Errno,
}

/// Makes an overlay over a template, without a place in any directory. `own` has the directories `up` and `work`, whose
/// files belong on the disk to ids from 0 on, as those of the template do. `root` is the first id of the block. With
/// `is_volatile` no write waits for the disk.
///
/// # Errors
/// The step that failed and its errno.
pub fn overlay(
    template: BorrowedFd<'_>,
    own: BorrowedFd<'_>,
    users: &UserNamespace,
    root: User,
    is_volatile: bool,
) -> Result<OwnedFd, MountError> {
    if is_volatile {
        forget_former_mount(own);
    }
    let failed = |step| move |errno| MountError { step, errno };
    let mapped = |directory, attributes| {
        let mount = clone_mount(directory)?;
        set_attributes(&mount, attributes, Some(users))?;
        Ok(mount)
    };
    // They stay open until the overlay is made: the mount of a descriptor ends with it.
    let lower = mapped(template, READ_ONLY | NO_DEVICES).map_err(failed(MountStep::Map))?;
    let own = mapped(own, NO_DEVICES).map_err(failed(MountStep::Map))?;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let part = |name| openat(&own, name, flags, Mode::empty()).map_err(failed(MountStep::Open));
    let (upper, work) = (part("up")?, part("work")?);
    // SAFETY: a constant text; the result is a new descriptor.
    let context = unsafe {
        let result = libc::syscall(libc::SYS_fsopen, c"overlay".as_ptr(), FSOPEN_CLOEXEC);
        owned(result).map_err(failed(MountStep::Begin))?
    };
    let directories = [
        (c"lowerdir+", &lower),
        (c"upperdir", &upper),
        (c"workdir", &work),
    ];
    for (key, directory) in directories {
        configure(
            &context,
            FSCONFIG_SET_FD,
            Some(key),
            None,
            directory.as_raw_fd(),
        )
        .map_err(failed(MountStep::Configure))?;
    }
    let options = [
        (c"redirect_dir", c"on"),
        (c"metacopy", c"on"),
        (c"index", c"off"),
        (c"xino", c"auto"),
    ];
    for (key, value) in options {
        configure(&context, FSCONFIG_SET_STRING, Some(key), Some(value), 0)
            .map_err(failed(MountStep::Configure))?;
    }
    if is_volatile {
        configure(&context, FSCONFIG_SET_FLAG, Some(c"volatile"), None, 0)
            .map_err(failed(MountStep::Configure))?;
    }
    {
        // What it makes there belongs to whoever makes it, and root of the machine has no id there.
        let _acting = ActingAs::root_of_sandbox(root).map_err(failed(MountStep::Make))?;
        configure(&context, FSCONFIG_CMD_CREATE, None, None, 0).map_err(failed(MountStep::Make))?;
    }
    // SAFETY: plain integers; the result is a new descriptor.
    let mount = unsafe {
        let (context, flags) = (context.as_raw_fd(), FSMOUNT_CLOEXEC);
        let result = libc::syscall(libc::SYS_fsmount, context, flags, NO_DEVICES);
        owned(result).map_err(failed(MountStep::Make))?
    };
    // Where its work directory cannot be made it is read-only, and that is no error. On a disk that can be written to there
    // is no room for it.
    let is_read_only = |mount: &OwnedFd| {
        let status = fstatvfs(mount).map_err(failed(MountStep::Write))?;
        Ok(status.flags().contains(FsFlags::ST_RDONLY))
    };
    match is_read_only(&mount)? {
        true if is_read_only(&own)? => Err(failed(MountStep::Write)(Errno::EROFS)),
        true => Err(failed(MountStep::Write)(Errno::ENOSPC)),
        false => Ok(mount),
    }
}

/// Removes the sign by which the kernel refuses directories that were mounted before without waiting for the disk: whoever
/// asked for that has agreed to lose what a failure of the machine takes (overlayfs.rst, "Volatile mount").
fn forget_former_mount(own: BorrowedFd<'_>) {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    // Root of the machine alone can enter the directory.
    let Ok(work) = openat(own, "work/work", flags, Mode::empty()) else {
        return;
    };
    let _ = unlinkat(&work, "incompat/volatile/dirty", UnlinkatFlags::NoRemoveDir);
    for name in ["incompat/volatile", "incompat"] {
        let _ = unlinkat(&work, name, UnlinkatFlags::RemoveDir);
    }
}

/// Shows the tree of a mount a second time, without a place in any directory and without what is mounted in it.
///
/// # Errors
/// `EPERM` if this process may not mount; `EINVAL` where the kernel does not do it with a mount that has no place (before
/// Linux 6.15).
pub fn clone_mount(directory: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let flags =
        c_uint::try_from(libc::AT_EMPTY_PATH | libc::O_CLOEXEC).unwrap_or(0) | OPEN_TREE_CLONE;
    // SAFETY: a constant text; the result is a new descriptor.
    unsafe {
        let directory = directory.as_raw_fd();
        owned(libc::syscall(
            libc::SYS_open_tree,
            directory,
            c"".as_ptr(),
            flags,
        ))
    }
}

/// Shows a file or a directory a second time, as [`clone_mount`] does, for reading.
///
/// # Errors
/// As for [`clone_mount`].
pub fn read_only_mount(file: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let mount = clone_mount(file)?;
    set_attributes(&mount, READ_ONLY | NO_SET_USER_ID | NO_DEVICES, None)?;
    Ok(mount)
}

/// No way out, no links of the kernel's own, no other mounts.
const INSIDE: ResolveFlag = ResolveFlag::RESOLVE_IN_ROOT
    .union(ResolveFlag::RESOLVE_NO_MAGICLINKS)
    .union(ResolveFlag::RESOLVE_NO_XDEV);

/// Tries of openat2(2), which fails with `EAGAIN` while anything on the machine is renamed and a path has `..`: at least so
/// many, and then until so much time has passed. Links can make each of them take tens of milliseconds.
const LEAST_ATTEMPTS: usize = 8;
const ATTEMPTS_TIME: Duration = Duration::from_millis(100);

/// Opens a path as a program does whose root `directory` is: links lead anywhere in it, and none out. Close-on-exec.
///
/// # Errors
/// Those of openat2(2).
pub fn open_inside(directory: BorrowedFd<'_>, path: &[u8], flags: OFlag) -> Result<OwnedFd, Errno> {
    let how = OpenHow::new()
        .flags(flags | OFlag::O_CLOEXEC)
        .resolve(INSIDE);
    let path = if path.is_empty() { b"." } else { path };
    let begun = Instant::now();
    let mut attempts = 0;
    loop {
        attempts += 1;
        match openat2(directory, path, how) {
            Err(Errno::EAGAIN) if attempts < LEAST_ATTEMPTS || begun.elapsed() < ATTEMPTS_TIME => {}
            opened => return opened,
        }
    }
}

/// `linux/mount.h`.
const OPEN_TREE_CLONE: c_uint = 1;
const FSOPEN_CLOEXEC: c_uint = 1;
const FSMOUNT_CLOEXEC: c_uint = 1;
const FSCONFIG_SET_FLAG: c_uint = 0;
const FSCONFIG_SET_STRING: c_uint = 1;
const FSCONFIG_SET_FD: c_uint = 5;
const FSCONFIG_CMD_CREATE: c_uint = 6;
const READ_ONLY: u64 = 1;
const NO_SET_USER_ID: u64 = 2;
const NO_DEVICES: u64 = 4;
const ID_MAPPED: u64 = 0x0010_0000;

/// `struct mount_attr` of linux/mount.h.
#[repr(C)]
pub(super) struct MountAttributes {
    pub(super) set: u64,
    pub(super) clear: u64,
    pub(super) propagation: u64,
    pub(super) user_namespace: u64,
}

fn set_attributes(mount: &OwnedFd, set: u64, users: Option<&UserNamespace>) -> Result<(), Errno> {
    let users = users.and_then(|users| u64::try_from(users.0.as_raw_fd()).ok());
    let attributes = MountAttributes {
        set: set | users.map_or(0, |_| ID_MAPPED),
        clear: 0,
        // Nothing that is mounted on the machine later appears there.
        propagation: libc::MS_PRIVATE,
        user_namespace: users.unwrap_or(0),
    };
    // SAFETY: a constant text, and a structure of this size that outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<MountAttributes>(),
        )
    };
    Errno::result(result).map(drop)
}

fn configure(
    context: &OwnedFd,
    command: c_uint,
    key: Option<&CStr>,
    value: Option<&CStr>,
    number: c_int,
) -> Result<(), Errno> {
    let pointer = |text: Option<&CStr>| text.map_or(ptr::null(), CStr::as_ptr);
    // SAFETY: texts that outlive the call, or none.
    let result = unsafe {
        let (context, key, value) = (context.as_raw_fd(), pointer(key), pointer(value));
        libc::syscall(libc::SYS_fsconfig, context, command, key, value, number)
    };
    Errno::result(result).map(drop)
}

/// # Safety
/// The result of a call that makes a descriptor.
unsafe fn owned(result: libc::c_long) -> Result<OwnedFd, Errno> {
    let descriptor = c_int::try_from(Errno::result(result)?).unwrap_or(-1);
    // SAFETY: the kernel has just made it, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}

/// `move_mount(2)`.
pub(super) const MOVE_FROM_DESCRIPTOR: c_uint = 0x4;
pub(super) const MOVE_TO_DESCRIPTOR: c_uint = 0x40;

/// What is mounted somewhere: the mount at a path, or of those without a place the one with this number.
#[derive(Debug)]
pub enum MountSource {
    Path(CString),
    Detached(usize),
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn the_first_process_of_users_ends_with_the_process_that_wanted_it() {
        if !nix::unistd::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "SKIPPED in CI");
            eprintln!("SKIPPED: another user needs root");
            return;
        }
        let (mut ends, held) = std::io::pipe().unwrap();
        let (is_ready, ready) = std::io::pipe().unwrap();
        let mut stack = ChildStack::new();
        // SAFETY: the child makes system calls only.
        let server = unsafe { libc::fork() };
        if server == 0 {
            let none = libc::rlimit {
                rlim_cur: libc::RLIM_INFINITY,
                rlim_max: libc::RLIM_INFINITY,
            };
            let plan = FirstPlan {
                owner: User {
                    uid: 60_999,
                    gid: 60_999,
                },
                processes: none,
                server: nix::unistd::getpid().as_raw(),
                ready: ready.as_raw_fd(),
                made: Cell::new(Err(Errno::ESRCH)),
            };
            let argument = (&raw const plan).cast_mut().cast();
            let started = clone(first_process, argument, &mut stack, libc::CLONE_FILES);
            let mut byte = 0_u8;
            // SAFETY: a buffer of one byte. Nothing of the process is tidied up.
            unsafe {
                libc::read(is_ready.as_raw_fd(), (&raw mut byte).cast(), 1);
                libc::_exit(c_int::from(started.is_err() || plan.made.get().is_err()));
            }
        }
        drop((held, ready));
        let mut status = 0;
        // SAFETY: a place for the status.
        assert_eq!(unsafe { libc::waitpid(server, &raw mut status, 0) }, server);
        assert_eq!(status, 0, "no namespace was made");
        // The first process has the other end.
        let mut entries = [PollEntry::new(ends.as_fd(), Events::READABLE)];
        assert!(
            poll(&mut entries, Some(Duration::from_secs(20))),
            "it still runs"
        );
        assert_eq!(ends.read(&mut [0]).unwrap(), 0);
    }
}
