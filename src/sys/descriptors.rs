//! The table of descriptors: what is inherited, what commands get, and when the table is nearly full.
//!
//! Before `main` runs, std opens `/dev/null` for each of descriptors 0, 1 and 2 that is closed, so
//! nothing that the server opens is below 3.

use std::ffi::{c_int, c_uint};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use nix::errno::Errno;

use super::system::limits;

/// Sets close-on-exec on every inherited descriptor above 2, so that no command gets one, and reserves
/// numbers for the descriptors of commands.
///
/// Call it before there is a second thread, and before much is open.
pub fn prepare_descriptors() {
    let flags = libc::CLOSE_RANGE_CLOEXEC | libc::CLOSE_RANGE_UNSHARE;
    // SAFETY: plain integers. With one thread the table is not shared, so CLOSE_RANGE_UNSHARE changes
    // nothing; it tells whether the kernel has it.
    if unsafe { libc::syscall(libc::SYS_close_range, 3, c_uint::MAX, flags) } == 0 {
        if let Some(slots) = ReservedSlots::reserve() {
            let _ = RESERVED.set(slots);
        }
    } else {
        close_inherited_one_by_one();
    }
}

/// For kernels before Linux 5.11, and filters that refuse `close_range(2)`.
fn close_inherited_one_by_one() {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
    for descriptor in entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()) {
        if descriptor > 2 {
            // SAFETY: changes a flag; a number that is not open is an error without effect.
            unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
}

/// Low numbers where children find their descriptors.
///
/// A child with a copy of the whole table costs more the more is open: 100 µs more with 1,000
/// descriptors and 560 µs more with 4,000, where a command takes 640 µs; nothing with ten. So a child
/// shares the table at first, and then copies only the part up to these numbers
/// (`close_range(2)`, `CLOSE_RANGE_UNSHARE`). Reserving them adds 65 system calls to the start: 1 % of
/// its time.
pub(super) struct ReservedSlots {
    /// The first number above every slot.
    end: c_int,
    /// Guards the slots that no starting child uses.
    free: Mutex<Vec<[RawFd; Self::WIDTH]>>,
}

static RESERVED: OnceLock<ReservedSlots> = OnceLock::new();

impl ReservedSlots {
    /// Children that can start at the same time without a copy of the whole table.
    const COUNT: usize = 8;
    /// The standard streams, two rulesets, a passed descriptor, a channel and a user namespace.
    const WIDTH: usize = 8;
    /// With a lower limit on open files the slots would take too large a share, and tables are small.
    const LEAST_LIMIT: u64 = 1024;

    /// `None` if the limit is too low, or no number is left.
    pub(super) fn reserve() -> Option<Self> {
        if limits(libc::RLIMIT_NOFILE).rlim_cur < Self::LEAST_LIMIT {
            return None;
        }
        let mut slots = [[0; Self::WIDTH]; Self::COUNT];
        let mut end = 3;
        for number in slots.as_flattened_mut() {
            // A raw call: musl's fcntl makes two.
            // SAFETY: duplicates standard input at the lowest free number above the last one.
            let result =
                unsafe { libc::syscall(libc::SYS_fcntl, PLACEHOLDER, libc::F_DUPFD_CLOEXEC, end) };
            *number = RawFd::try_from(result).ok().filter(|new| *new >= end)?;
            end = *number + 1;
        }
        let free = Mutex::new(slots.to_vec());
        Some(Self { end, free })
    }

    fn free(&self) -> MutexGuard<'_, Vec<[RawFd; Self::WIDTH]>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` if all slots are in use.
    pub(super) fn take(&'static self) -> Option<ReservedSlot> {
        let numbers = self.free().pop()?;
        Some(ReservedSlot {
            slots: self,
            numbers,
        })
    }
}

/// Keeps reserved numbers in use between children; standard input is always open.
const PLACEHOLDER: RawFd = 0;

/// The reserved numbers of one child, until dropped.
pub(super) struct ReservedSlot {
    slots: &'static ReservedSlots,
    numbers: [RawFd; ReservedSlots::WIDTH],
}

impl ReservedSlot {
    /// `None` if all slots are in use or the kernel has no `CLOSE_RANGE_UNSHARE`.
    pub(super) fn take() -> Option<Self> {
        RESERVED.get()?.take()
    }

    /// Duplicates `source` at the slot's number `index`, and returns that number.
    pub(super) fn put(&self, index: usize, source: RawFd) -> Result<RawFd, Errno> {
        // SAFETY: replaces a descriptor that belongs to this slot.
        Errno::result(unsafe { libc::dup3(source, self.numbers[index], libc::O_CLOEXEC) })
    }

    /// The number from which on a child needs no descriptor.
    pub(super) fn end(&self) -> c_int {
        self.slots.end
    }
}

impl Drop for ReservedSlot {
    fn drop(&mut self) {
        for index in 0..self.numbers.len() {
            // A child's end of a pipe must not stay open in the server.
            let _ = self.put(index, PLACEHOLDER);
        }
        self.slots.free().push(self.numbers);
    }
}

/// Makes a file share the extents of another (`ioctl_ficlone(2)`).
///
/// # Errors
/// `EOPNOTSUPP`, `EINVAL` or `EXDEV` where the file systems cannot.
pub fn clone_file(to: BorrowedFd<'_>, from: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: the argument is a descriptor, which is open during the call.
    Errno::result(unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONE, from.as_raw_fd()) }).map(drop)
}

/// Whether a new descriptor is among the last that the limit allows. The rest is kept for ending
/// processes and answering connected clients.
///
/// Goes by the descriptor's number, because the kernel gives the lowest free one.
pub fn is_scarce(descriptor: BorrowedFd<'_>) -> bool {
    is_within_last(descriptor, last)
}

/// Whether no more descriptors are free than are to be kept, whatever number the next one gets. Looks at the last ones
/// of a high limit alone.
pub fn are_few_left() -> bool {
    const LOOKED_AT: u64 = 4096;
    let limit = limits(libc::RLIMIT_NOFILE).rlim_cur;
    let numbers = limit.saturating_sub(LOOKED_AT)..limit;
    let entry = |number| libc::pollfd {
        fd: i32::try_from(number).unwrap_or(-1),
        events: 0,
        revents: 0,
    };
    let mut entries: Vec<_> = numbers.map(entry).collect();
    // SAFETY: the entries are there during the call, which writes to each and waits for none.
    let polled = unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, 0) };
    // POLLNVAL tells that a number is free (poll(2)).
    let is_free = |entry: &&libc::pollfd| entry.revents & libc::POLLNVAL != 0;
    let free = entries.iter().filter(is_free).count();
    polled >= 0 && u64::try_from(free).is_ok_and(|free| free < last(limit))
}

/// How many are kept for ending processes and answering connected clients.
fn last(limit: u64) -> u64 {
    (limit / 8).min(32)
}

/// As [`is_scarce`], for optional descriptors that stay open for long: leaves room for connections and
/// commands.
pub fn is_getting_scarce(descriptor: BorrowedFd<'_>) -> bool {
    is_within_last(descriptor, |limit| (limit / 4).min(512))
}

fn is_within_last(descriptor: BorrowedFd<'_>, reserve: impl Fn(u64) -> u64) -> bool {
    let limit = limits(libc::RLIMIT_NOFILE).rlim_cur;
    u64::try_from(descriptor.as_raw_fd()).unwrap_or(0) >= limit - reserve(limit)
}
