//! System calls that a filter leaves to the server (`seccomp_unotify(2)`): how the filter's listener gets here, what
//! it is notified of, and how a call is answered with a descriptor. Also which filters the kernel takes.

use std::ffi::{c_int, c_ulong, c_void};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, socketpair,
};

/// How a filter with a listener is attached. Once the server has received a call, only a deadly signal interrupts it.
pub(super) const LISTENER_FLAGS: c_ulong =
    libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;

/// Whether this process may attach filters that make a call fail with an errno (seccomp(2)).
pub fn has_filters() -> bool {
    knows_filters(0)
}

/// Whether the kernel has filters with a listener, with everything that is used here (Linux 5.19).
pub fn has_listeners() -> bool {
    knows_filters(LISTENER_FLAGS)
}

fn knows_filters(flags: c_ulong) -> bool {
    // Without a program the call fails with EFAULT if filters and flags are known, and with EINVAL if not.
    let none = ptr::null::<c_void>();
    let mode = libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: the kernel refuses the null pointer and changes nothing.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, none) };
    result < 0 && Errno::last() == Errno::EFAULT
}

/// The listener of a filter. Readable when a call waits; it has hung up when no process has the filter any more.
pub struct CallListener(OwnedFd);

/// A call that waits for an answer.
#[derive(Debug, Clone, Copy)]
pub struct WaitingCall {
    id: u64,
    /// The calling thread, as /proc names it. It may have gone, and another may have its number.
    pub thread: u32,
    /// The number of the system call.
    pub number: c_int,
    pub arguments: [u64; 6],
}

impl AsFd for CallListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl CallListener {
    /// Takes a call. Do so only when the listener is readable, and on one thread: else this may wait.
    ///
    /// # Errors
    /// `ENOENT` if the caller has gone.
    pub fn receive(&self) -> Result<WaitingCall, Errno> {
        // The kernel wants zeroes.
        let mut call = MaybeUninit::<libc::seccomp_notif>::zeroed();
        // SAFETY: the kernel fills the structure, of which zeroes are a value.
        let call = unsafe {
            self.ioctl(libc::SECCOMP_IOCTL_NOTIF_RECV, call.as_mut_ptr().cast())?;
            call.assume_init()
        };
        Ok(WaitingCall {
            id: call.id,
            thread: call.pid,
            number: call.data.nr,
            arguments: call.data.args,
        })
    }

    /// Gives the caller a copy of a descriptor, whose number its call returns.
    ///
    /// # Errors
    /// `ENOENT` if the caller has gone; `EMFILE` if it may have no more, which the call does not return by itself.
    pub fn answer(
        &self,
        call: WaitingCall,
        descriptor: BorrowedFd<'_>,
        is_close_on_exec: bool,
    ) -> Result<(), Errno> {
        let flags = if is_close_on_exec { libc::O_CLOEXEC } else { 0 };
        let mut addition = libc::seccomp_notif_addfd {
            id: call.id,
            flags: u32::try_from(libc::SECCOMP_ADDFD_FLAG_SEND).unwrap_or(0),
            srcfd: descriptor.as_raw_fd().cast_unsigned(),
            newfd: 0,
            newfd_flags: flags.cast_unsigned(),
        };
        self.ioctl(libc::SECCOMP_IOCTL_NOTIF_ADDFD, (&raw mut addition).cast())
    }

    /// Makes the call fail. A caller that has gone needs no answer.
    pub fn refuse(&self, call: WaitingCall, errno: Errno) {
        self.respond(call, -(errno as i32), 0);
    }

    /// Makes the call return 0.
    pub fn succeed(&self, call: WaitingCall) {
        self.respond(call, 0, 0);
    }

    /// Lets the kernel make the call. What its pointers lead to may have been changed, so this is for calls that are safe
    /// whatever they ask for.
    pub fn proceed(&self, call: WaitingCall) {
        self.respond(call, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE);
    }

    fn respond(&self, call: WaitingCall, error: c_int, flags: c_ulong) {
        let mut response = libc::seccomp_notif_resp {
            id: call.id,
            val: 0,
            error,
            flags: u32::try_from(flags).unwrap_or(0),
        };
        let _ = self.ioctl(libc::SECCOMP_IOCTL_NOTIF_SEND, (&raw mut response).cast());
    }

    /// Whether the call still waits: then the thread's number was the caller's until now.
    pub fn is_waiting(&self, call: WaitingCall) -> bool {
        let mut id = call.id;
        let request = libc::SECCOMP_IOCTL_NOTIF_ID_VALID;
        self.ioctl(request, (&raw mut id).cast()).is_ok()
    }

    fn ioctl(&self, request: libc::Ioctl, argument: *mut c_void) -> Result<(), Errno> {
        // SAFETY: each caller passes the structure of its request.
        Errno::result(unsafe { libc::ioctl(self.0.as_raw_fd(), request, argument) }).map(drop)
    }
}

/// The way of a listener from a child to the server.
pub(super) struct ListenerChannel {
    server: OwnedFd,
    pub(super) child: OwnedFd,
}

impl ListenerChannel {
    pub(super) fn new() -> Result<Self, Errno> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (server, child) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        Ok(Self { server, child })
    }

    /// The listener that the child has sent; `None` if something killed it before.
    pub(super) fn receive(self) -> Result<Option<CallListener>, Errno> {
        let mut byte = [0];
        let mut parts = [IoSliceMut::new(&mut byte)];
        let mut space = nix::cmsg_space!(RawFd);
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
        let server = self.server.as_raw_fd();
        let message = match recvmsg::<()>(server, &mut parts, Some(&mut space), flags) {
            Err(Errno::EAGAIN) => return Ok(None),
            received => received?,
        };
        let descriptors = message.cmsgs()?.find_map(|control| match control {
            ControlMessageOwned::ScmRights(descriptors) => descriptors.first().copied(),
            _ => None,
        });
        let descriptor = descriptors.ok_or(Errno::EBADMSG)?;
        // SAFETY: the kernel has just made it, and nothing else owns it.
        let listener = unsafe { OwnedFd::from_raw_fd(descriptor) };
        Ok(Some(CallListener(listener)))
    }
}

/// Sends a descriptor over the channel, by one system call.
pub(super) fn send_listener(channel: RawFd, listener: RawFd) -> Result<(), Errno> {
    const SPACE: usize = 4;
    let mut byte = 0_u8;
    let mut part = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    // Aligned as a control message must be.
    let mut space = [0_u64; SPACE];
    // SAFETY: zeroes are a value of the structure. The pointers are to variables that outlive the call, and the
    // control message fits: one header and one descriptor take 24 bytes.
    unsafe {
        let mut message = MaybeUninit::<libc::msghdr>::zeroed().assume_init();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = space.as_mut_ptr().cast();
        let length = u32::try_from(size_of::<RawFd>()).unwrap_or(0);
        message.msg_controllen = libc::CMSG_SPACE(length) as _;
        let control = libc::CMSG_FIRSTHDR(&raw const message);
        (*control).cmsg_level = libc::SOL_SOCKET;
        (*control).cmsg_type = libc::SCM_RIGHTS;
        (*control).cmsg_len = libc::CMSG_LEN(length) as _;
        ptr::write_unaligned(libc::CMSG_DATA(control).cast::<RawFd>(), listener);
        let flags = libc::MSG_NOSIGNAL;
        Errno::result(libc::syscall(
            libc::SYS_sendmsg,
            channel,
            &raw const message,
            flags,
        ))
        .map(drop)
    }
}
