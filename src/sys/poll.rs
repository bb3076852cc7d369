//! poll(2) with types, reading what is ready, and options of sockets that nix does not have.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{SockaddrLike, SockaddrStorage};

/// Events of a descriptor, as poll(2) takes and returns them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Events(i16);

impl Events {
    /// Only [`Events::BROKEN`], which poll(2) always reports.
    pub const NONE: Self = Self(0);
    /// A read does not block: there is data, or the end of it.
    pub const READABLE: Self = Self(libc::POLLIN);
    /// A write does not block.
    pub const WRITABLE: Self = Self(libc::POLLOUT);
    /// The peer of a socket has shut down its sending side.
    pub const PEER_CLOSED: Self = Self(libc::POLLRDHUP);
    /// The other end is closed, or there is an error.
    pub const BROKEN: Self = Self(libc::POLLERR | libc::POLLHUP | libc::POLLNVAL);

    /// Adds `others` if `condition` holds.
    #[must_use]
    pub fn and_if(self, condition: bool, others: Self) -> Self {
        if condition {
            Self(self.0 | others.0)
        } else {
            self
        }
    }

    /// Whether these include any of the others.
    pub fn has(self, others: Self) -> bool {
        self.0 & others.0 != 0
    }

    pub fn any(self) -> bool {
        self.0 != 0
    }
}

/// One descriptor of a [`poll()`].
#[repr(transparent)]
pub struct PollEntry<'fd> {
    raw: libc::pollfd,
    descriptor: PhantomData<BorrowedFd<'fd>>,
}

impl<'fd> PollEntry<'fd> {
    /// Waits for `events` of a descriptor. Without one the entry is never ready.
    pub fn new(descriptor: impl Into<Option<BorrowedFd<'fd>>>, events: Events) -> Self {
        let descriptor = descriptor.into();
        let raw = libc::pollfd {
            fd: descriptor.map_or(-1, |descriptor| descriptor.as_raw_fd()),
            events: events.0,
            revents: 0,
        };
        Self {
            raw,
            descriptor: PhantomData,
        }
    }

    /// The events that the last [`poll()`] found.
    pub fn events(&self) -> Events {
        Events(self.raw.revents)
    }
}

/// Waits until a descriptor is ready. `None` means no limit; a limit is rounded up to milliseconds so
/// that it never ends early. Returns false if none is ready, even after a signal.
pub fn poll(entries: &mut [PollEntry<'_>], limit: Option<Duration>) -> bool {
    let timeout = limit.map_or(-1, |limit| {
        c_int::try_from(limit.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
    });
    // SAFETY: PollEntry is a pollfd (transparent), and its descriptors are borrowed for the call.
    unsafe {
        let count = entries.len() as libc::nfds_t;
        libc::poll(entries.as_mut_ptr().cast(), count, timeout) > 0
    }
}

/// Bytes that a pipe holds.
///
/// # Errors
/// `ENOTTY` if the descriptor has no such count.
pub fn readable_bytes(pipe: BorrowedFd<'_>) -> Result<usize, Errno> {
    let mut count: c_int = 0;
    // SAFETY: FIONREAD writes one integer.
    Errno::result(unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut count) })?;
    Ok(usize::try_from(count).unwrap_or_default())
}

/// Bounds the data that a TCP socket buffers before it sends it (tcp(7), `TCP_NOTSENT_LOWAT`), and that of the
/// connections that a listening socket accepts. What is sent already and not taken is in the client's
/// buffer.
///
/// # Errors
/// The error of setsockopt(2).
pub fn limit_unsent(socket: BorrowedFd<'_>, bytes: u32) -> Result<(), Errno> {
    let (value, size) = ((&raw const bytes).cast(), libc::socklen_t::BITS / 8);
    let (level, option) = (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT);
    // SAFETY: the kernel reads `size` bytes of a value that outlives the call.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, value, size) };
    Errno::result(result).map(drop)
}

/// Makes the kernel refuse messages with descriptors to a Unix socket: their sender gets `EPERM` (`SO_PASSRIGHTS`, Linux
/// 6.16). Descriptors that arrive are closed by whoever reads or closes the socket. Older kernels keep accepting them.
pub fn refuse_descriptors(socket: BorrowedFd<'_>) {
    /// asm-generic/socket.h
    const SO_PASSRIGHTS: c_int = 83;
    let (off, size): (c_int, _) = (0, libc::socklen_t::BITS / 8);
    // SAFETY: the kernel reads `size` bytes of a value that outlives the call.
    unsafe {
        let value = (&raw const off).cast();
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            value,
            size,
        );
    }
}

/// Connects a TCP socket without waiting, whether or not it is a blocking one: like connect(2), sendto(2) with
/// `MSG_FASTOPEN` begins a connection, and it has a flag for a single call. There is no data to send with it. Call it again
/// when the socket is writable, to learn how it ended.
///
/// # Errors
/// `EINPROGRESS` if the connection has begun; `EALREADY` while it has not ended; `EOPNOTSUPP` where
/// `net.ipv4.tcp_fastopen` is without its lowest bit; otherwise those of connect(2).
pub fn connect_without_waiting(socket: BorrowedFd<'_>, address: SocketAddr) -> Result<(), Errno> {
    let address = SockaddrStorage::from(address);
    let flags = libc::MSG_FASTOPEN | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the address outlives the call; no byte of the null pointer is read.
    let result = unsafe {
        let (to, length) = (address.as_ptr(), address.len());
        libc::sendto(socket.as_raw_fd(), ptr::null(), 0, flags, to, length)
    };
    Errno::result(result).map(drop)
}

/// Appends at most `most` bytes to `out` by one recv(2), without clearing its spare capacity first.
/// Returns 0 at the end of the stream.
///
/// # Errors
/// `EAGAIN` if there is no data: immediately or, if it `waits`, after the socket's receive timeout.
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
    // SAFETY: the kernel writes at most `most` bytes, which fit into the spare capacity, and returns
    // their count; `out` grows by exactly those.
    unsafe {
        let count = libc::recv(socket.as_raw_fd(), room.as_mut_ptr().cast(), most, flags);
        let count = usize::try_from(Errno::result(count)?).unwrap_or_default();
        out.set_len(out.len() + count);
        Ok(count)
    }
}
