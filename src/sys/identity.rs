//! Users and capabilities: of the server's threads, and of what it starts.
//!
//! Raw calls wherever one thread changes: a C library's functions would change all of them.

use std::marker::PhantomData;
use std::ptr;

use nix::errno::Errno;

/// A user and its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    /// The user's number.
    pub uid: libc::uid_t,
    /// The group's number.
    pub gid: libc::gid_t,
}

/// While this value lives, the calling thread opens, creates and removes files as another user:
/// what that user may not do is refused, and what it creates is that user's (setfsuid(2),
/// credentials(7)). Leaving uid 0 also takes away the capabilities over files, and coming back
/// returns them (capabilities(7)). Other threads are not affected, nor is anything but access to files.
pub struct ActingAs {
    before: User,
    /// Whether this thread's capabilities stay when it leaves uid 0.
    keeps_capabilities: bool,
    /// Whether its effective uid is the user's too.
    is_effective: bool,
    /// Not Send: the same thread must change back.
    thread_bound: PhantomData<*const ()>,
}

impl ActingAs {
    /// Begins to act as `user`.
    ///
    /// # Errors
    /// `EPERM` if this process may not, or its user namespace has no such user.
    pub fn new(user: User) -> Result<Self, Errno> {
        Self::begin(user, false)
    }

    /// The same, with the capabilities over files that this thread has: as the root of a user namespace, which is no root
    /// here. The caller keeps it among the files of that root.
    ///
    /// # Errors
    /// As [`ActingAs::new`]; `EPERM` without `CAP_SETPCAP`.
    pub fn root_of_sandbox(user: User) -> Result<Self, Errno> {
        set_secure_bits(NO_SETUID_FIXUP)?;
        Self::begin(user, true)
    }

    /// The same with the effective uid, which is that of a user namespace's owner: whoever has it may look into all
    /// processes there, also without `CAP_SYS_PTRACE` (`user_namespaces(7)`). They cannot signal this thread, whose other
    /// uids stay.
    ///
    /// # Errors
    /// As [`ActingAs::root_of_sandbox`].
    pub fn owner_of_users(user: User) -> Result<Self, Errno> {
        let mut acting = Self::root_of_sandbox(user)?;
        set_effective_user(user.uid)?;
        acting.is_effective = true;
        Ok(acting)
    }

    fn begin(user: User, keeps_capabilities: bool) -> Result<Self, Errno> {
        let acting = Self {
            before: set_file_user(user),
            keeps_capabilities,
            is_effective: false,
            thread_bound: PhantomData,
        };
        // The calls report only what was before, so a second pair tells whether the first had an effect.
        if set_file_user(user) == user {
            Ok(acting)
        } else {
            Err(Errno::EPERM)
        }
    }
}

impl Drop for ActingAs {
    fn drop(&mut self) {
        if self.is_effective && set_effective_user(0).is_err() {
            std::process::abort();
        }
        set_file_user(self.before);
        let is_back = set_file_user(self.before) == self.before
            && (!self.keeps_capabilities || set_secure_bits(0).is_ok());
        if !is_back {
            // Going on with another user's identity would be worse than ending.
            std::process::abort();
        }
    }
}

/// Sets this thread's effective uid, and with it the one for access to files.
fn set_effective_user(uid: libc::uid_t) -> Result<(), Errno> {
    // SAFETY: plain integers; the highest uid leaves what it stands for.
    let result =
        unsafe { libc::syscall(libc::SYS_setresuid, libc::uid_t::MAX, uid, libc::uid_t::MAX) };
    Errno::result(result).map(drop)
}

/// Sets this thread's user for access to files, and returns the one before.
fn set_file_user(user: User) -> User {
    // SAFETY: plain integers. The group goes first: leaving root, the user's call takes the right to
    // change groups away; coming back, CAP_SETGID is not among what was lost.
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

/// Whether any process has this user as its real uid, zombies included (getpriority(2)).
pub fn user_has_processes(user: User) -> bool {
    // -1 is also a priority, so errno decides.
    Errno::clear();
    // SAFETY: plain integers.
    let priority = unsafe { libc::getpriority(libc::PRIO_USER, user.uid) };
    !(priority == -1 && Errno::last() == Errno::ESRCH)
}

/// Turns the calling process into `user` for good, without supplementary groups and capabilities, by
/// system calls only. Groups come first: the change of user takes away the right to set them.
pub(super) fn become_user(User { uid, gid }: User) -> Result<(), Errno> {
    let no_groups = ptr::null::<libc::gid_t>();
    // SAFETY: plain integers and an empty list.
    unsafe {
        Errno::result(libc::syscall(libc::SYS_setgroups, 0, no_groups))?;
        Errno::result(libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
        Errno::result(libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
    }
    drop_capabilities()
}

/// Gives up all capabilities of the calling thread, by a system call only.
pub(super) fn drop_capabilities() -> Result<(), Errno> {
    set_capabilities([CapabilitySets::default(); 2])
}

/// From the next execve on, user 0 gets no capabilities for being that user, by a system call only
/// (capabilities(7), `SECBIT_NOROOT` and its lock).
pub(super) fn forbid_root_capabilities() -> Result<(), Errno> {
    const NOROOT_LOCKED: libc::c_int = 0b11;
    set_secure_bits(NOROOT_LOCKED)
}

/// Leaving uid 0 takes no capability away (capabilities(7), `SECBIT_NO_SETUID_FIXUP`).
pub(super) const NO_SETUID_FIXUP: libc::c_int = 0b100;

/// Sets the flags of this thread's capabilities, by a system call only.
pub(super) fn set_secure_bits(bits: libc::c_int) -> Result<(), Errno> {
    // SAFETY: plain integers.
    let result = unsafe { libc::prctl(libc::PR_SET_SECUREBITS, bits, 0, 0, 0) };
    Errno::result(result).map(drop)
}

/// What root and its programs can have inside a sandbox with a root of its own: the capabilities that containers leave.
/// `CHOWN`, `DAC_OVERRIDE`, `FOWNER`, `FSETID`, `KILL`, `SETGID`, `SETUID`, `SETPCAP`, `NET_BIND_SERVICE`, `NET_RAW`,
/// `SYS_CHROOT`, `MKNOD`, `AUDIT_WRITE`, `SETFCAP` (`linux/capability.h`).
const INSIDE: u32 = 0b1010_1000_0000_0100_0010_0101_1111_1011;

/// Turns the calling process, which has entered a user namespace with all capabilities in it, into this user of it, by
/// system calls only. The capabilities stay until [`keep_capabilities_inside`].
pub(super) fn become_user_inside(
    User { uid, gid }: User,
    groups: &[libc::gid_t],
) -> Result<(), Errno> {
    // SAFETY: plain integers, and a list that outlives the call.
    unsafe {
        let (count, list) = (groups.len(), groups.as_ptr());
        Errno::result(libc::syscall(libc::SYS_setgroups, count, list))?;
        Errno::result(libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
        // Else the change to another user than root takes the right to install a filter away.
        set_secure_bits(NO_SETUID_FIXUP)?;
        Errno::result(libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
    }
    set_secure_bits(0)
}

/// Gives up the capabilities that nothing inside a sandbox with a root of its own has; of a user other than root all, by
/// system calls only. What cannot be had by executing a program is gone for good.
pub(super) fn keep_capabilities_inside(is_root: bool) -> Result<(), Errno> {
    for capability in 0..64_u32 {
        if capability < u32::BITS && INSIDE & (1 << capability) != 0 {
            continue;
        }
        // SAFETY: plain integers.
        let dropped = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        if dropped < 0 {
            match Errno::last() {
                // The kernel has no more capabilities.
                Errno::EINVAL => break,
                errno => return Err(errno),
            }
        }
    }
    let kept = if is_root { INSIDE } else { 0 };
    let first = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: 0,
    };
    set_capabilities([first, CapabilitySets::default()])
}

/// The first argument of capget(2) and capset(2): the interface's version 3 (`linux/capability.h`), and
/// 0 for the calling thread.
static THIS_THREAD: [u32; 2] = [0x2008_0522, 0];

/// One half of the second argument: 32 capabilities of each set.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapabilitySets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

fn set_capabilities(sets: [CapabilitySets; 2]) -> Result<(), Errno> {
    // SAFETY: version 3 has one header and two sets.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw const THIS_THREAD, sets.as_ptr()) };
    Errno::result(result).map(drop)
}

/// `linux/capability.h`.
const CAP_SYS_PTRACE: u32 = 19;

/// Takes all capabilities from the programs that this process starts; its own stay. Without the
/// right to it nothing happens, and programs of users other than root have none anyway.
///
/// Call it before there is a second thread.
pub fn withhold_capabilities_from_children() {
    withhold_from_children(0..64);
}

/// Takes `CAP_SYS_PTRACE` from the programs that this process starts; its own stays. Without it not even
/// root reads a process that is not dumpable (ptrace(2)).
///
/// Call it before there is a second thread.
pub fn withhold_ptrace_from_children() {
    withhold_from_children(CAP_SYS_PTRACE..CAP_SYS_PTRACE + 1);
}

/// Removes capabilities from the bounding and the inheritable set, which are where a program of root
/// gets its own from (capabilities(7)).
fn withhold_from_children(capabilities: std::ops::Range<u32>) {
    let mut sets = [CapabilitySets::default(); 2];
    // SAFETY: version 3 has one header and two sets.
    let result =
        unsafe { libc::syscall(libc::SYS_capget, &raw const THIS_THREAD, sets.as_mut_ptr()) };
    for capability in capabilities {
        // SAFETY: plain integers.
        let dropped = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        if dropped < 0 && Errno::last() == Errno::EINVAL {
            // The kernel has no more capabilities.
            break;
        }
        sets[(capability / 32) as usize].inheritable &= !(1 << (capability % 32));
    }
    if result == 0 {
        let _ = set_capabilities(sets);
    }
}
