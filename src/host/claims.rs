//! Which uids this host has to itself: a lock on one byte per uid, in a file that the hosts of a machine share.
//!
//! A host kills all processes of a uid when it deletes a sandbox, so no two hosts may have the same uid. Byte `n` of the
//! file stands for uid `n`. Hosts whose ranges are disjoint run at the same time; the locks (fcntl(2), `F_OFD_SETLK`)
//! belong to the open file, which no child inherits, so they end with the server however it ends.
//!
//! The kernel tells which bytes another host has locked, and not which process that is: each host writes its pid at the
//! place of its first uid, where only the holder of the lock writes.

use std::fs::File;
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::stat::{Mode, fstat};

use crate::error::{Error, Kind, Result};
use crate::sys::paths::{mkdir, open, openat};

/// The directory of the file. Where this host cannot use it, the file is in one beside the homes, or else among them.
const DIRECTORY: &str = "/run/sbx-server";
const OTHER_DIRECTORY: &str = ".sbx-server";

/// The file.
const FILE: &str = "uids";

/// How long a lock is waited for, and the time between two attempts: the server before this one may be ending.
pub(super) const LOCK_LIMIT: Duration = Duration::from_secs(2);
pub(super) const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The claimed uids. They are free again when this is dropped.
pub(super) struct Claims(File);

/// The host that has some of the uids.
pub(super) struct Other {
    pub(super) users: RangeInclusive<u64>,
    pub(super) pid: u32,
}

impl Claims {
    /// Claims a range for a host with its homes in this directory. `end` is called with whoever has some of it, until nobody
    /// has.
    ///
    /// # Errors
    /// `System` if another host has one of the uids, or there is no place for the file; the text says which.
    pub(super) fn take(
        users: &RangeInclusive<u32>,
        homes: &Path,
        end: impl Fn(&Other),
    ) -> Result<Self> {
        let claims = Self(open_file(homes)?);
        let deadline = Instant::now() + LOCK_LIMIT;
        loop {
            let Some(other) = claims.add(users)? else {
                return Ok(claims);
            };
            end(&other);
            let Other { users: theirs, pid } = other;
            if Instant::now() >= deadline {
                let text = format!(
                    "cannot hold sandboxes: uids {}-{} of SBX_UID_RANGE overlap uids {}-{} of another host, pid {pid}; \
                     give each host of the machine a range of its own",
                    users.start(),
                    users.end(),
                    theirs.start(),
                    theirs.end()
                );
                return Err(Error::new(Kind::System, text));
            }
            thread::sleep(LOCK_PAUSE);
        }
    }

    /// The host that has some of these uids.
    ///
    /// # Errors
    /// `System`: there is no place for the file, or it cannot be locked.
    pub(super) fn holder(users: &RangeInclusive<u32>, homes: &Path) -> Result<Option<Other>> {
        Self(open_file(homes)?).add(users)
    }

    /// Claims one more uid. False if another host has it.
    ///
    /// # Errors
    /// `System`: the lock is unavailable for another reason.
    pub(super) fn add_one(&self, uid: u32) -> Result<bool> {
        Ok(self.add(&(uid..=uid))?.is_none())
    }

    /// Claims ids that are no uids of the host's range.
    ///
    /// # Errors
    /// `System` if another host has some of them.
    pub(super) fn add_ids(&self, ids: &RangeInclusive<u32>) -> Result<()> {
        let Some(other) = self.add(ids)? else {
            return Ok(());
        };
        let text = format!(
            "cannot hold sandboxes: another server (pid {}) has some of the ids {}-{}; choose others by SBX_ID_BLOCKS",
            other.pid,
            ids.start(),
            ids.end()
        );
        Err(Error::new(Kind::System, text))
    }

    /// Claims a range unless another host has some of it.
    fn add(&self, users: &RangeInclusive<u32>) -> Result<Option<Other>> {
        let act = "cannot hold sandboxes: cannot lock their uids";
        let failed = |errno| Error::system(act, errno);
        let mut lock = write_lock(users);
        match fcntl(&self.0, FcntlArg::F_OFD_SETLK(&lock)) {
            Ok(_) => {
                let pid = std::process::id().to_ne_bytes();
                let written = self.0.write_at(&pid, place((*users.start()).into()));
                let failed = |error| Error::io(format_args!("{act}"), &error);
                return written.map(|_| None).map_err(failed);
            }
            Err(Errno::EAGAIN | Errno::EACCES) => {}
            Err(errno) => return Err(failed(errno)),
        }
        fcntl(&self.0, FcntlArg::F_OFD_GETLK(&mut lock)).map_err(failed)?;
        if i32::from(lock.l_type) == libc::F_UNLCK {
            // It has just been given up.
            return self.add(users);
        }
        let first = u64::try_from(lock.l_start).unwrap_or_default();
        let count = u64::try_from(lock.l_len).unwrap_or_default();
        let mut pid = [0; 4];
        let _ = self.0.read_at(&mut pid, place(first));
        Ok(Some(Other {
            users: first..=first + count.saturating_sub(1),
            pid: u32::from_ne_bytes(pid),
        }))
    }
}

/// Where the holder of a range that begins with this uid has its pid.
fn place(first: u64) -> u64 {
    first * 4
}

fn write_lock(users: &RangeInclusive<u32>) -> libc::flock {
    let (first, last) = (i64::from(*users.start()), i64::from(*users.end()));
    let short = |constant| libc::c_short::try_from(constant).unwrap_or_default();
    libc::flock {
        l_type: short(libc::F_WRLCK),
        l_whence: short(libc::SEEK_SET),
        l_start: first,
        l_len: last - first + 1,
        // As the kernel demands for these locks.
        l_pid: 0,
    }
}

/// Opens the file in the first directory that this host can use.
fn open_file(homes: &Path) -> Result<File> {
    let beside = homes.with_file_name(OTHER_DIRECTORY);
    let directories = [DIRECTORY.into(), beside, homes.join(OTHER_DIRECTORY)];
    let mut last = Errno::ENOENT;
    for directory in directories {
        match open_in(&directory) {
            Ok(file) => return Ok(file),
            // Somebody else's, who could lock all uids, or a link to where somebody else's is.
            Err(Errno::EPERM | Errno::ELOOP | Errno::ENOTDIR | Errno::EISDIR) => {
                let text = format!(
                    "cannot hold sandboxes: {} and the file {FILE} in it must belong to root alone; remove what is there",
                    directory.display()
                );
                return Err(Error::new(Kind::System, text));
            }
            Err(errno) => last = errno,
        }
    }
    let act = "cannot hold sandboxes: there is no place for the file that locks their uids";
    Err(Error::system(act, last))
}

/// Opens the file in a directory, and makes both if they are missing.
///
/// # Errors
/// `EPERM`, `ELOOP`, `ENOTDIR` or `EISDIR` if something else is there. Others if this host cannot use the directory, for example
/// because it is on a read-only file system or belongs to a user whom its user namespace does not have.
fn open_in(directory: &Path) -> std::result::Result<File, Errno> {
    let private = Mode::S_IRWXU;
    match mkdir(directory, private) {
        // Instead of EEXIST on a read-only file system.
        Ok(()) | Err(Errno::EEXIST | Errno::EROFS) => {}
        Err(Errno::EPERM) => return Err(Errno::EACCES),
        Err(errno) => return Err(errno),
    }
    let flags = OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let directory = open(directory, flags | OFlag::O_DIRECTORY, Mode::empty())?;
    let status = fstat(&directory)?;
    let is_ours = status.st_uid == 0 && status.st_mode & 0o022 == 0;
    is_ours.then_some(()).ok_or(Errno::EPERM)?;
    // O_NONBLOCK: it may be a pipe.
    let flags = flags | OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_NONBLOCK;
    let file = openat(&directory, FILE, flags, private & !Mode::S_IXUSR)?;
    let status = fstat(&file)?;
    let is_ours = status.st_uid == 0 && status.st_mode & (libc::S_IFMT | 0o077) == libc::S_IFREG;
    is_ours.then(|| File::from(file)).ok_or(Errno::EPERM)
}
