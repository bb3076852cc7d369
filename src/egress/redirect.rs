//! Redirects the connections of programs without proxy support to the egress listener.
//!
//! The server keeps a copy of each socket that it hands out, and answers connect(2) too: it connects the copy to the
//! egress listener, sends the requested address in a first line, and lets the call succeed. A datagram socket is one
//! end of a pair of Unix sockets, on which the server answers look-ups of names.
//!
//! The walls do not depend on any of this. The requested address is read from the program's memory, which may change
//! meanwhile; the proxy judges whatever the line says. A call that the server does not understand continues in the kernel,
//! where a socket that was handed out reaches the egress listener or nothing (see the module above).

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::Read;
use std::net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, Shutdown, SockaddrStorage, getsockname, send, shutdown};
use nix::sys::stat::fstat;

use super::Exits;
use super::connect::judge;
use super::listener::EgressListener;
use super::names::stands_for_a_name;
use super::resolver::DNS_PORT;
use crate::spec::network::{Host, Verdict, host_and_port};
use crate::sys::{self, CallListener, Events, PollEntry, TcpState, WaitingCall, poll};
use crate::threads::lock::{Mutex, lock};

/// Most sockets of a workspace that are not connected, of which the server has copies.
const MAX_COPIES: usize = 64;

/// How long a handshake with the egress listener may take. It is on this machine, and the egress listener has room.
const HANDSHAKE_LIMIT: Duration = Duration::from_millis(100);

/// Begins a connection that was redirected. No other protocol of the proxy begins so.
pub(super) const MARK: u8 = 0;

/// Most bytes of the line that begins such a connection: a name, its port and the mark.
const MAX_LINE_BYTES: usize = 264;

/// Copies of sockets that were handed out and are not connected.
#[derive(Default)]
pub(super) struct Copies {
    /// Guards the copies with the numbers of their inodes, the oldest first.
    sockets: Mutex<VecDeque<(u64, OwnedFd)>>,
}

impl Copies {
    /// Keeps a copy, unless descriptors are scarce. Drops those that are of no use any more, and the oldest if there
    /// are too many: a connection of that one is refused by the kernel.
    pub(super) fn keep(&self, socket: OwnedFd) {
        let Some(inode) = inode(&socket).filter(|_| !sys::is_getting_scarce(socket.as_fd())) else {
            return;
        };
        let mut sockets = lock(&self.sockets);
        // A copy of a connection, or of a port, would keep it open when the program closes it.
        sockets.retain(|(_, socket)| sys::tcp_state(socket.as_fd()) == Ok(TcpState::Unconnected));
        if sockets.len() >= MAX_COPIES {
            sockets.pop_front();
        }
        sockets.push_back((inode, socket));
    }

    /// Takes a copy out.
    pub(super) fn take(&self, inode: u64) -> Option<OwnedFd> {
        let mut sockets = lock(&self.sockets);
        let index = sockets.iter().position(|(own, _)| *own == inode)?;
        sockets.remove(index).map(|(_, socket)| socket)
    }

    /// Drops all: no command is left that could connect one.
    pub(super) fn clear(&self) {
        lock(&self.sockets).clear();
    }
}

/// The number that /proc shows of a socket.
pub(super) fn inode(socket: impl AsFd) -> Option<u64> {
    fstat(socket).ok().map(|file| file.st_ino)
}

/// The inode of the socket that a call is about, its first argument. `None` if the argument is no socket, or the caller has
/// gone.
pub(super) fn socket_of(call: &WaitingCall) -> Option<u64> {
    let number = u32::try_from(call.arguments[0] & u64::from(u32::MAX)).ok()?;
    let link = fs::read_link(format!("/proc/{}/fd/{number}", call.thread)).ok()?;
    let inode = link.to_str()?.strip_prefix("socket:[")?;
    inode.strip_suffix(']')?.parse().ok()
}

/// The address that connect(2) was called with, of IPv4 if it stands for one. `None` if it is of another family, or the
/// memory cannot be read.
fn requested_address(call: &WaitingCall) -> Option<SocketAddr> {
    // `sin6_addr` ends here; without a scope, which no address outside has.
    const IPV6_BYTES: usize = 24;
    let [_, pointer, length, ..] = call.arguments;
    // An `int`.
    let length = usize::try_from(length & u64::from(u32::MAX)).ok()?;
    if length < size_of::<libc::sockaddr_in>() {
        return None;
    }
    let mut bytes = [0; IPV6_BYTES];
    let known = if length < IPV6_BYTES { 8 } else { IPV6_BYTES };
    let memory = File::open(format!("/proc/{}/mem", call.thread)).ok()?;
    memory.read_exact_at(&mut bytes[..known], pointer).ok()?;
    let [first, second, high, low, a, b, c, d, long @ ..] = bytes;
    let family = libc::c_int::from(u16::from_ne_bytes([first, second]));
    let port = u16::from_be_bytes([high, low]);
    let address = match family {
        libc::AF_INET => IpAddr::from([a, b, c, d]),
        libc::AF_INET6 if known == IPV6_BYTES => IpAddr::from(long).to_canonical(),
        _ => return None,
    };
    Some(SocketAddr::new(address, port))
}

/// Answers connect(2). `is_resolver` tells whether a socket is an end of a pair on which names are looked up.
pub(super) fn answer_connect(
    exits: &Exits,
    listener: &EgressListener,
    copies: &Copies,
    is_resolver: impl FnOnce(u64) -> bool,
    calls: &CallListener,
    call: WaitingCall,
) {
    let Some(socket) = socket_of(&call) else {
        return calls.proceed(call);
    };
    let copy = copies.take(socket);
    if copy.is_none() && !is_resolver(socket) {
        return calls.proceed(call);
    }
    let address = requested_address(&call);
    // If the caller has gone, what was read may be another process's with its number.
    if !calls.is_waiting(call) {
        if let Some(copy) = copy {
            copies.keep(copy);
        }
        return;
    }
    let Some(copy) = copy else {
        return match address {
            Some(address) if address.port() == DNS_PORT => calls.succeed(call),
            _ => calls.refuse(call, Errno::EACCES),
        };
    };
    let Some(address) = address.filter(|address| !connects_directly(listener, *address)) else {
        // First: a copy of a connection would keep it open when the program closes it.
        drop(copy);
        return calls.proceed(call);
    };
    let redirected = redirect(exits, listener, &copy, address);
    match redirected {
        Ok(()) => calls.succeed(call),
        Err(errno) => calls.refuse(call, errno),
    }
    // The program may try again, unless the socket was connected.
    if redirected.is_err() {
        copies.keep(copy);
    }
}

/// Whether a program connects to an address by itself: to the proxy, and to the loopback interface of its own network.
fn connects_directly(listener: &EgressListener, address: SocketAddr) -> bool {
    let is_same = address.port() == listener.port();
    let is_own = listener.is_inside() && address.port() != DNS_PORT;
    let is_loopback = address.ip().is_loopback() || address.ip().is_unspecified();
    is_loopback && (is_same || is_own)
}

/// Connects a socket to the egress listener instead of an address.
fn redirect(
    exits: &Exits,
    listener: &EgressListener,
    socket: &OwnedFd,
    address: SocketAddr,
) -> nix::Result<()> {
    let port = address.port();
    let (name, stands_for_one) = match address.ip() {
        IpAddr::V4(address) => (listener.names().of(address), stands_for_a_name(address)),
        IpAddr::V6(_) => (None, false),
    };
    let host = name.map_or_else(|| Host::Address(address.ip().into()), Host::Name);
    // The proxy notes what is allowed.
    let verdict = match host {
        Host::Address(_) if stands_for_one => Verdict::refused("the name is not known any more"),
        _ => judge(exits, listener, &host, port),
    };
    if !verdict.is_allowed && !asks_for_names(exits, listener, &host, port) {
        exits.note(&host.to_string(), port, &verdict);
        return Err(Errno::EACCES);
    }
    connect_soon(socket, listener)?;
    listener.note_redirected(own_address(socket)?);
    let mut line = vec![MARK];
    line.extend_from_slice(format!("{host}:{port}\n").as_bytes());
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    // It fails if the program has shut the socket down meanwhile, and the proxy then closes the connection.
    let _ = send(socket.as_raw_fd(), &line, flags);
    Ok(())
}

/// Whether a connection is to a name server. There is one at every address, unless a rule names that address and the port.
pub(super) fn asks_for_names(
    exits: &Exits,
    listener: &EgressListener,
    host: &Host,
    port: u16,
) -> bool {
    let is_named = || {
        let verdict = judge(exits, listener, host, port);
        verdict.is_allowed && verdict.rule.ends_with(":53")
    };
    port == DNS_PORT && matches!(host, Host::Address(_)) && !is_named()
}

/// Connects a socket of a program to an egress listener that has room.
///
/// The program has the socket too. It decides whether that blocks, and can have it drop every packet that arrives, so
/// no call here may wait for the connection: this thread serves the other commands of the workspace, and accepts. An
/// egress listener whose queue is half full refuses, because it would not answer in time.
fn connect_soon(socket: &OwnedFd, listener: &EgressListener) -> nix::Result<()> {
    match sys::tcp_state(listener.tcp().as_fd())? {
        TcpState::Listening { waiting, most } if waiting < most.div_ceil(2) => {}
        _ => return Err(Errno::ECONNREFUSED),
    }
    let listening = listener.address();
    let to = match own_address(socket)? {
        SocketAddr::V4(_) => listening.into(),
        SocketAddr::V6(_) => {
            let address = listening.ip().to_ipv6_mapped();
            SocketAddr::from((address, listening.port()))
        }
    };
    let connect = || sys::connect_without_waiting(socket.as_fd(), to);
    match connect() {
        Err(Errno::EINPROGRESS) => {}
        other => return other,
    }
    let mut entries = [PollEntry::new(socket.as_fd(), Events::WRITABLE)];
    poll(&mut entries, Some(HANDSHAKE_LIMIT));
    connect().map_err(|errno| match errno {
        Errno::EALREADY | Errno::EINPROGRESS => {
            // The program may try again, and is to find it unconnected.
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
            Errno::ETIMEDOUT
        }
        errno => errno,
    })
}

/// The address of a socket's own end; of IPv4 if it stands for one.
fn own_address(socket: &OwnedFd) -> nix::Result<SocketAddr> {
    let own: SockaddrStorage = getsockname(socket.as_raw_fd())?;
    let ipv4 = own
        .as_sockaddr_in()
        .map(|own| SocketAddrV4::from(*own).into());
    let ipv6 = || {
        let own = SocketAddrV6::from(*own.as_sockaddr_in6()?);
        Some(SocketAddr::new(
            IpAddr::V6(*own.ip()).to_canonical(),
            own.port(),
        ))
    };
    ipv4.or_else(ipv6).ok_or(Errno::EAFNOSUPPORT)
}

/// Reads the line that begins a redirected connection: the requested destination. `None` if the line is malformed.
///
/// # Errors
/// The client has gone, or is too slow.
pub(super) fn read_line(mut client: impl Read) -> std::io::Result<Option<(Host, u16)>> {
    let mut line = Vec::new();
    let mut byte = [0];
    // Byte by byte: what follows is the server's.
    while line.len() < MAX_LINE_BYTES {
        client.read_exact(&mut byte)?;
        if byte == *b"\n" {
            let text = line.strip_prefix(&[MARK]);
            let text = text.and_then(|text| std::str::from_utf8(text).ok());
            let requested = text.and_then(host_and_port);
            return Ok(requested.and_then(|(host, port)| Some((host, port?))));
        }
        line.push(byte[0]);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_holds_the_requested_destination() {
        let read = |text: &[u8]| read_line(text).ok().flatten();
        let name = Host::Name("a.example".to_owned());
        assert_eq!(read(b"\0a.example:80\nGET /"), Some((name, 80)));
        let address = Host::Address([10, 0, 0, 1].into());
        assert_eq!(read(b"\x0010.0.0.1:443\n"), Some((address, 443)));
        for text in [
            b"a:80\n" as &[u8],
            b"\0a\n",
            b"\0a:0\n",
            b"\0a b:80\n",
            b"\0a:80",
            &[0; 1000],
        ] {
            assert_eq!(read(text), None, "{}", text.escape_ascii());
        }
    }
}
