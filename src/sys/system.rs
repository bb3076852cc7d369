//! Facts about the kernel and this process: limits, features, units, mounts, randomness, and the
//! environment that /proc shows.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use nix::errno::Errno;

/// A resource of setrlimit(2): one of `RLIMIT_*`.
pub type Resource = c_int;

/// The soft and the hard limit of this process, which its children inherit.
pub fn limits(resource: Resource) -> libc::rlimit {
    let mut limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the kernel fills the structure.
    unsafe { libc::getrlimit(resource, &raw mut limit) };
    limit
}

/// Clock ticks per second, the unit of processor time in /proc (sysconf(3)).
pub fn clock_ticks() -> u64 {
    // SAFETY: reads a constant.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).unwrap_or(100)
}

/// Bytes per page of memory (sysconf(3)).
pub fn page_bytes() -> u64 {
    // SAFETY: reads a constant.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// The kernel's Landlock ABI, 0 without Landlock (Documentation/userspace-api/landlock).
pub fn landlock_abi() -> u32 {
    // SAFETY: with LANDLOCK_CREATE_RULESET_VERSION (1) the call takes no attribute and returns a number.
    let version = unsafe {
        let attribute = ptr::null::<c_void>();
        libc::syscall(libc::SYS_landlock_create_ruleset, attribute, 0, 1)
    };
    u32::try_from(version).unwrap_or(0)
}

/// Identifies the mount of an open file; bind mounts of one file system differ (statx(2),
/// `STATX_MNT_ID`). `None` before Linux 5.8.
pub fn mount_id(file: BorrowedFd<'_>) -> Option<u64> {
    status(file, libc::STATX_MNT_ID).map(|status| status.stx_mnt_id)
}

/// When an open file was made, in nanoseconds since 1970 (statx(2), `STATX_BTIME`): no call changes it. `None` if the file
/// system does not keep it.
pub fn birth_time(file: BorrowedFd<'_>) -> Option<i64> {
    let born = status(file, libc::STATX_BTIME)?.stx_btime;
    let seconds = born.tv_sec.wrapping_mul(1_000_000_000);
    Some(seconds.wrapping_add(born.tv_nsec.into()))
}

/// What statx(2) says of an open file. `None` without what `mask` asks for.
fn status(file: BorrowedFd<'_>, mask: c_uint) -> Option<libc::statx> {
    let mut status = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is an empty C string, the kernel fills `status`, and zeroes are a value of it.
    let status = unsafe {
        let (path, flags) = (c"".as_ptr(), libc::AT_EMPTY_PATH);
        if libc::statx(file.as_raw_fd(), path, flags, mask, status.as_mut_ptr()) != 0 {
            return None;
        }
        status.assume_init()
    };
    (status.stx_mask & mask != 0).then_some(status)
}

/// Unpredictable bytes (getrandom(2)), at most 256.
///
/// # Errors
/// `ENOSYS` if the kernel has no such call; `EIO` if it gave fewer bytes.
pub fn random_bytes<const COUNT: usize>() -> Result<[u8; COUNT], Errno> {
    let mut bytes = [0; COUNT];
    // SAFETY: the kernel writes at most `COUNT` bytes. Up to 256 it gives all or none.
    let count = Errno::result(unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), COUNT, 0) })?;
    if usize::try_from(count) == Ok(COUNT) {
        Ok(bytes)
    } else {
        Err(Errno::EIO)
    }
}

unsafe extern "C" {
    static environ: *const *mut c_char;
}

/// Overwrites the value of an environment variable where `/proc/<pid>/environ` shows it. Removing the
/// variable would only change the C library's copy.
///
/// Call it before there is a second thread.
pub fn scrub_environment(name: &str) {
    // SAFETY: environ is a null-terminated array of C strings that live as long as the process, and no
    // other thread reads or changes them.
    unsafe {
        let mut entry = environ;
        while !entry.is_null() && !(*entry).is_null() {
            let text = CStr::from_ptr(*entry).to_bytes();
            let value = text.strip_prefix(name.as_bytes());
            if value.is_some_and(|value| value.starts_with(b"=")) {
                for index in name.len() + 1..text.len() {
                    ptr::write_volatile((*entry).add(index).cast::<u8>(), b'x');
                }
            }
            entry = entry.add(1);
        }
    }
}
