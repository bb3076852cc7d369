//! The way of an upload's bytes from a socket into a file that copies them once: through a pipe, which
//! holds the socket's own pages (splice(2)), and from there into the file's.

use std::fs::File;
use std::io::{Read, Result, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice};

use crate::sys;

/// What the pipe holds: as much as the kernel lets everybody have. Through smaller ones the bytes are
/// slower than by reading and writing.
const CAPACITY: i32 = 1024 * 1024;

/// So many there are at most. A user's pipes have 64 MiB in all unless that was raised, and most of it
/// is left for those of commands, which would shrink beyond it (pipe(7)).
const MOST: usize = 16;

static OPEN: AtomicUsize = AtomicUsize::new(0);

/// A pipe between a socket and a file. It is empty whenever nothing is on its way.
pub struct Conduit {
    exit: File,
    entrance: OwnedFd,
    _counted: Counted,
}

/// One of those that are open.
struct Counted;

impl Counted {
    fn new() -> Option<Self> {
        let counted = Self;
        (OPEN.fetch_add(1, Ordering::Relaxed) < MOST).then_some(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Conduit {
    /// Nothing where there are enough, or where descriptors or room in pipes are scarce: the bytes can be
    /// read and written as well.
    pub fn new() -> Option<Self> {
        let counted = Counted::new()?;
        let (exit, entrance) = nix::unistd::pipe2(OFlag::O_CLOEXEC).ok()?;
        if sys::is_scarce(entrance.as_fd()) {
            return None;
        }
        fcntl(&entrance, FcntlArg::F_SETPIPE_SZ(CAPACITY)).ok()?;
        Some(Self {
            exit: exit.into(),
            entrance,
            _counted: counted,
        })
    }

    /// Where bytes are put in.
    pub fn entrance(&self) -> BorrowedFd<'_> {
        self.entrance.as_fd()
    }

    /// Moves the `count` bytes that were put in to a place of a file, or to where the file stands.
    ///
    /// # Errors
    /// The file takes no more; what is left is lost.
    pub(super) fn pour(&mut self, file: &File, place: Option<u64>, count: usize) -> Result<()> {
        let mut place = place
            .map(i64::try_from)
            .transpose()
            .map_err(|_| Errno::EFBIG)?;
        let mut left = count;
        while left > 0 {
            let flags = SpliceFFlags::SPLICE_F_MOVE;
            match splice(&self.exit, None, file, place.as_mut(), left, flags) {
                Ok(0) => return Err(Errno::EIO.into()),
                Ok(moved) => left -= moved,
                Err(Errno::EINTR) => {}
                // Not every file system has a way for pages.
                Err(Errno::EINVAL) => return self.copy(file, place, left),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn copy(&mut self, mut file: &File, place: Option<i64>, count: usize) -> Result<()> {
        let mut bytes = vec![0; count];
        self.exit.read_exact(&mut bytes)?;
        match place {
            Some(place) => file.write_all_at(&bytes, place.cast_unsigned()),
            None => file.write_all(&bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poured(conduit: &mut Conduit, file: &File, place: Option<u64>) {
        let entered = nix::unistd::write(conduit.entrance(), b"some bytes").unwrap();
        conduit.pour(file, place, entered).unwrap();
    }

    /// As some file systems do, a file that is only appended to refuses pages (splice(2)). One test,
    /// because all share the bound.
    #[test]
    fn bytes_arrive_by_either_way_and_conduits_have_a_bound() {
        let mut conduit = Conduit::new().unwrap();
        let path = std::env::temp_dir().join(format!("sbx-conduit-{}", std::process::id()));
        let file = File::options()
            .append(true)
            .create(true)
            .open(&path)
            .unwrap();
        for place in [None, None, Some(0)] {
            poured(&mut conduit, &file, place);
        }
        assert_eq!(
            std::fs::read(&path).unwrap(),
            b"some bytessome bytessome bytes"
        );
        let file = File::create(&path).unwrap();
        for place in [None, None, Some(5)] {
            poured(&mut conduit, &file, place);
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"some some bytesbytes");
        std::fs::remove_file(&path).unwrap();

        let others: Vec<_> = std::iter::from_fn(Conduit::new).take(MOST).collect();
        assert_eq!(others.len(), MOST - 1);
        drop(others);
        assert!(Conduit::new().is_some());
    }
}
