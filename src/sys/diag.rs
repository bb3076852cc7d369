//! What the kernel knows about this network namespace: single TCP sockets (`sock_diag(7)`) and routes
//! (`rtnetlink(7)`), looked up by their addresses. A look-up costs the same however many there are.
//!
//! Needs no privileges. A kernel without `inet_diag`, and some filters, do not answer.

use std::io::ErrorKind;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};

/// `SOCK_DIAG_BY_FAMILY` (`linux/sock_diag.h`).
const BY_FAMILY: u16 = 20;

/// `NLMSG_ERROR` and `NLMSG_DONE` (`linux/netlink.h`).
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// `NLM_F_REQUEST`, alone and with `NLM_F_DUMP`.
const ONE: u16 = 1;
const ALL: u16 = 0x301;

/// `RTM_GETROUTE`, `RTA_DST` and `RTN_LOCAL` (`linux/rtnetlink.h`).
const GET_ROUTE: u16 = 26;
const DESTINATION: u16 = 1;
const LOCAL: u8 = 2;

/// States of a TCP socket (`net/tcp_states.h`).
const SYN_RECEIVED: u8 = 3;
const TIME_WAIT: u8 = 6;
const CLOSED: u8 = 7;
const LISTEN: u8 = 10;
const NEW_SYN_RECEIVED: u8 = 12;

/// The index of the loopback interface, which is the first one of every network namespace. With it a look-up
/// finds the sockets that are bound to no interface or to this one.
const LOOPBACK: u32 = 1;

/// What a TCP socket is about (tcp(7), `TCP_INFO`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TcpState {
    /// Neither connected nor listening.
    Unconnected,
    /// It listens; so many connections of so many wait to be accepted.
    Listening { waiting: u32, most: u32 },
    /// Connected, or on the way to it or from it.
    Connected,
}

/// The state of a TCP socket.
///
/// # Errors
/// `EOPNOTSUPP` if it is another socket.
pub fn tcp_state(socket: BorrowedFd<'_>) -> Result<TcpState, Errno> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = libc::socklen_t::try_from(size_of::<libc::tcp_info>()).unwrap_or(0);
    // SAFETY: the kernel fills at most `length` bytes of the structure, of which zeroes are a value.
    let info = unsafe {
        let (level, option) = (libc::IPPROTO_TCP, libc::TCP_INFO);
        let pointer = info.as_mut_ptr().cast();
        let result = libc::getsockopt(socket.as_raw_fd(), level, option, pointer, &raw mut length);
        Errno::result(result)?;
        info.assume_init()
    };
    Ok(match info.tcpi_state {
        CLOSED => TcpState::Unconnected,
        // The kernel tells these numbers here (`tcp_get_info` in net/ipv4/tcp.c).
        LISTEN => TcpState::Listening {
            waiting: info.tcpi_unacked,
            most: info.tcpi_sacked,
        },
        _ => TcpState::Connected,
    })
}

/// As [`SocketDiag::tcp_peer_uid`], once; `None` also if the kernel cannot be asked, for example because no descriptor is left.
pub fn tcp_peer_uid(local: SocketAddr, peer: SocketAddr) -> Option<libc::uid_t> {
    SocketDiag::open().ok()?.tcp_peer_uid(local, peer).ok()?
}

/// The socket at the other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpPeer {
    /// Who has made it.
    pub uid: libc::uid_t,
    /// No other socket has or had the same.
    pub cookie: u64,
}

/// The socket at the other end of a connection; see [`SocketDiag::tcp_peer_uid`].
pub fn tcp_peer(local: SocketAddr, peer: SocketAddr) -> Option<TcpPeer> {
    SocketDiag::open().ok()?.tcp_peer(local, peer).ok()?
}

/// The number that the kernel knows a socket by, which no other one has or had (socket(7), `SO_COOKIE`).
///
/// # Errors
/// Those of getsockopt(2).
pub fn socket_cookie(socket: BorrowedFd<'_>) -> Result<u64, Errno> {
    let mut cookie = 0_u64;
    let mut length = libc::socklen_t::try_from(size_of_val(&cookie)).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes of the number.
    let result = unsafe {
        let pointer = (&raw mut cookie).cast();
        let (level, option) = (libc::SOL_SOCKET, libc::SO_COOKIE);
        libc::getsockopt(socket.as_raw_fd(), level, option, pointer, &raw mut length)
    };
    Errno::result(result).map(|_| cookie)
}

/// Asks about sockets, even when no more descriptors can be opened.
pub struct SocketDiag(Channel);

impl SocketDiag {
    /// # Errors
    /// As socket(2).
    pub fn open() -> Result<Self, Errno> {
        Channel::open(SockProtocol::NetlinkSockDiag).map(Self)
    }

    /// The user that made the socket at the other end of a connection within this machine: `local` is this
    /// end, `peer` the other one. `None` if there is no such socket here, and for a socket that no process holds any
    /// more, because the kernel then reports uid 0.
    ///
    /// A user that this process's user namespace does not map is the overflow uid, and one of a sandbox with ids of its own
    /// is the sandbox's.
    ///
    /// # Errors
    /// The kernel cannot be asked, or does not tell.
    pub fn tcp_peer_uid(
        &mut self,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Result<Option<libc::uid_t>, Errno> {
        let found = self.tcp_peer(local, peer)?;
        Ok(found.map(|peer| super::proc::user_of(peer.uid)))
    }

    /// The same, with which socket it is.
    fn tcp_peer(&mut self, local: SocketAddr, peer: SocketAddr) -> Result<Option<TcpPeer>, Errno> {
        Ok(look_up(&self.0, peer, local)?.and_then(|socket| {
            let ends = [socket.local, socket.remote];
            let is_meant = ends == [peer, local].map(|end| (end.ip().to_canonical(), end.port()));
            let without_process = [SYN_RECEIVED, TIME_WAIT, CLOSED, LISTEN, NEW_SYN_RECEIVED];
            let is_held = socket.inode != 0 && !without_process.contains(&socket.state);
            (is_meant && is_held).then_some(TcpPeer {
                uid: socket.uid,
                cookie: socket.cookie,
            })
        }))
    }
}

/// Whether a listening TCP socket would get a connection to an address of this machine.
///
/// # Errors
/// `ENOENT` if the kernel has no `inet_diag` for TCP; others if it has no such sockets, or forbids them.
pub fn is_tcp_listening(address: SocketAddr) -> Result<bool, Errno> {
    tcp_listener_uid(address).map(|uid| uid.is_some())
}

/// The user that made the listening TCP socket that would get a connection to an address of this machine; `None`
/// if there is none.
///
/// # Errors
/// As [`is_tcp_listening`].
pub fn tcp_listener_uid(address: SocketAddr) -> Result<Option<libc::uid_t>, Errno> {
    check_support()?;
    let unspecified = match address {
        SocketAddr::V4(_) => IpAddr::from([0; 4]),
        SocketAddr::V6(_) => IpAddr::from([0; 16]),
    };
    // The kernel prefers a connection, and no connection has this other end.
    let channel = Channel::open(SockProtocol::NetlinkSockDiag)?;
    let found = look_up(&channel, address, SocketAddr::new(unspecified, 0))?;
    Ok(found
        .filter(|socket| socket.state == LISTEN)
        .map(|socket| socket.uid))
}

/// Asks for nothing. To a look-up, a kernel that knows no TCP sockets gives the same answer as one that
/// has no such socket.
fn check_support() -> Result<(), Errno> {
    static IS_SUPPORTED: OnceLock<bool> = OnceLock::new();
    let is_supported = if let Some(known) = IS_SUPPORTED.get() {
        *known
    } else {
        let channel = Channel::open(SockProtocol::NetlinkSockDiag)?;
        let (answer, _) = ask_for_sockets(&channel, ALL, libc::AF_INET, &[0; SOCKET_BYTES])?;
        *IS_SUPPORTED.get_or_init(|| answer == DONE)
    };
    is_supported.then_some(()).ok_or(Errno::ENOENT)
}

/// What the kernel tells about a socket.
struct Found {
    state: u8,
    local: (IpAddr, u16),
    remote: (IpAddr, u16),
    uid: libc::uid_t,
    cookie: u64,
    /// 0 if no process holds the socket.
    inode: u32,
}

/// The size of `struct inet_diag_sockid` (`linux/inet_diag.h`).
const SOCKET_BYTES: usize = 48;

/// Finds the socket whose ends these are, else one that listens at `local`.
fn look_up(
    channel: &Channel,
    local: SocketAddr,
    remote: SocketAddr,
) -> Result<Option<Found>, Errno> {
    let ends = [local, remote].map(|end| end.ip().to_canonical());
    let (family, addresses) = match ends {
        [IpAddr::V4(local), IpAddr::V4(remote)] => {
            let padded = |address: [u8; 4]| {
                let [a, b, c, d] = address;
                [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
            };
            let addresses = [padded(local.octets()), padded(remote.octets())];
            (libc::AF_INET, addresses)
        }
        [IpAddr::V6(local), IpAddr::V6(remote)] => {
            (libc::AF_INET6, [local.octets(), remote.octets()])
        }
        _ => return Ok(None),
    };
    let interface = match local {
        // A link-local address belongs to an interface.
        SocketAddr::V6(address) if address.scope_id() != 0 => address.scope_id(),
        _ => LOOPBACK,
    };
    // struct inet_diag_sockid: ports and addresses in network order, the interface, and a cookie of
    // which all ones means any.
    let mut id = [0; SOCKET_BYTES];
    id[..2].copy_from_slice(&local.port().to_be_bytes());
    id[2..4].copy_from_slice(&remote.port().to_be_bytes());
    id[4..20].copy_from_slice(&addresses[0]);
    id[20..36].copy_from_slice(&addresses[1]);
    id[36..40].copy_from_slice(&interface.to_ne_bytes());
    id[40..].fill(0xff);
    match ask_for_sockets(channel, ONE, family, &id)? {
        (BY_FAMILY, body) => Ok(parse(&body)),
        // EINVAL: a kernel without IPv6.
        (ERROR, body) => match errno_of(&body) {
            Errno::ENOENT | Errno::EINVAL => Ok(None),
            errno => Err(errno),
        },
        _ => Err(Errno::EBADMSG),
    }
}

/// Sends a request about TCP sockets.
fn ask_for_sockets(
    channel: &Channel,
    flags: u16,
    family: libc::c_int,
    id: &[u8; SOCKET_BYTES],
) -> Result<(u16, Vec<u8>), Errno> {
    // struct inet_diag_req_v2: family, protocol, extensions, padding, states, socket. A dump without states is empty; a
    // look-up ignores them.
    let mut body = vec![0; 8];
    body[0] = u8::try_from(family).unwrap_or_default();
    body[1] = u8::try_from(libc::IPPROTO_TCP).unwrap_or_default();
    body.extend(id);
    channel.exchange(BY_FAMILY, flags, &body)
}

/// Whether the kernel delivers to this machine what it sends to an address. Where it does not tell, the answer is no only
/// if the address cannot be bound because it is not the machine's.
pub fn is_delivered_here(address: IpAddr) -> bool {
    has_local_route(address).unwrap_or_else(|_| {
        let bound = UdpSocket::bind((address, 0));
        !bound.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
    })
}

/// The same, by the kernel's routes.
///
/// # Errors
/// There is no route, or the kernel does not tell.
fn has_local_route(address: IpAddr) -> Result<bool, Errno> {
    let (family, octets) = match address {
        IpAddr::V4(address) => (libc::AF_INET, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6, address.octets().to_vec()),
    };
    // struct rtmsg, of which the family and the length of the destination matter, and the destination.
    let mut body = vec![0; 12];
    body[0] = u8::try_from(family).unwrap_or_default();
    body[1] = u8::try_from(octets.len() * 8).unwrap_or_default();
    let length = u16::try_from(octets.len() + 4).unwrap_or_default();
    body.extend([length, DESTINATION].map(u16::to_ne_bytes).concat());
    body.extend(octets);
    let channel = Channel::open(SockProtocol::NetlinkRoute)?;
    match channel.exchange(GET_ROUTE, ONE, &body)? {
        (ERROR, body) => Err(errno_of(&body)),
        (_, body) => body.get(7).map(|kind| *kind == LOCAL).ok_or(Errno::EBADMSG),
    }
}

/// A netlink socket of one protocol.
struct Channel(OwnedFd);

impl Channel {
    fn open(protocol: SockProtocol) -> Result<Self, Errno> {
        let (family, flags) = (AddressFamily::Netlink, SockFlag::SOCK_CLOEXEC);
        socket(family, SockType::Raw, flags, protocol).map(Self)
    }

    /// Sends a request. Returns the type and the body of the first message of the answer, which the kernel has written when
    /// send(2) returns. A request for one thing has no other message, so another one may follow.
    fn exchange(&self, kind: u16, flags: u16, body: &[u8]) -> Result<(u16, Vec<u8>), Errno> {
        const HEADER: usize = 16;
        // struct nlmsghdr: length, type, flags, sequence, sender.
        let length = u32::try_from(HEADER + body.len()).unwrap_or_default();
        let mut request = length.to_ne_bytes().to_vec();
        request.extend([kind, flags].map(u16::to_ne_bytes).concat());
        request.extend([0; 8]);
        request.extend(body);
        send(self.0.as_raw_fd(), &request, MsgFlags::empty())?;
        let mut answer = vec![0; 4096];
        let count = recv(self.0.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT)?;
        answer.truncate(count);
        let (kind, body) = (half(&answer, 4), answer.get(HEADER..));
        let (Some(kind), Some(body)) = (kind, body) else {
            return Err(Errno::EBADMSG);
        };
        Ok((kind, body.to_vec()))
    }
}

/// Parses a `struct inet_diag_msg`: family, state, timer, retransmissions, socket, expiry, two queues, uid,
/// inode.
fn parse(body: &[u8]) -> Option<Found> {
    let family = libc::c_int::from(*body.first()?);
    let end = |port: usize, address: usize| {
        let port = u16::from_be_bytes(*body.get(port..)?.first_chunk()?);
        let address = body.get(address..)?;
        let address = match family {
            libc::AF_INET => IpAddr::from(*address.first_chunk::<4>()?),
            _ => Ipv6Addr::from(*address.first_chunk::<16>()?).to_canonical(),
        };
        Some((address, port))
    };
    Some(Found {
        state: *body.get(1)?,
        local: end(4, 8)?,
        remote: end(6, 24)?,
        cookie: u64::from(word(body, 44)?) | u64::from(word(body, 48)?) << 32,
        uid: word(body, 64)?,
        inode: word(body, 68)?,
    })
}

/// What a message of the type `ERROR` says.
fn errno_of(body: &[u8]) -> Errno {
    let code = word(body, 0).map(|code| code.cast_signed().wrapping_neg());
    code.map_or(Errno::EBADMSG, Errno::from_raw)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// The listening addresses of the tests, each with one that leads to it.
    const ADDRESSES: [(&str, &str); 5] = [
        ("127.0.0.1:0", "127.0.0.1"),
        ("0.0.0.0:0", "127.0.0.1"),
        ("[::1]:0", "::1"),
        ("[::]:0", "::1"),
        ("[::]:0", "127.0.0.1"),
    ];

    /// Listens, and gives the address to connect to; `None` without IPv6.
    fn listen((at, reached_by): (&str, &str)) -> Option<(TcpListener, SocketAddr)> {
        let Ok(listener) = TcpListener::bind(at) else {
            assert!(at.starts_with('['), "{at}");
            return None;
        };
        let port = listener.local_addr().unwrap().port();
        Some((listener, SocketAddr::new(reached_by.parse().unwrap(), port)))
    }

    fn is_supported() -> bool {
        let supported = check_support();
        if let Err(errno) = supported {
            eprintln!("SKIPPED: the kernel has no sock_diag for TCP: {errno}");
        }
        supported.is_ok()
    }

    #[test]
    fn a_listener_is_found_by_every_address_that_leads_to_it() {
        if !is_supported() {
            return;
        }
        for addresses in ADDRESSES {
            let Some((listener, address)) = listen(addresses) else {
                continue;
            };
            assert_eq!(is_tcp_listening(address), Ok(true), "{addresses:?}");
            let uid = nix::unistd::geteuid().as_raw();
            assert_eq!(tcp_listener_uid(address), Ok(Some(uid)), "{addresses:?}");
            let client = TcpStream::connect(address).unwrap();
            let end = client.local_addr().unwrap();
            assert_eq!(is_tcp_listening(end), Ok(false), "a connection");
            drop(listener);
            // A child of another test may hold it until its execve.
            while is_tcp_listening(address) == Ok(true) {
                std::thread::yield_now();
            }
        }
        let elsewhere = TcpListener::bind("127.0.0.2:0").unwrap();
        let port = elsewhere.local_addr().unwrap().port();
        let here = SocketAddr::from(([127, 0, 0, 1], port));
        assert_eq!(is_tcp_listening(here), Ok(false));
    }

    #[test]
    fn the_user_at_the_other_end_is_known_while_the_socket_is_held() {
        if !is_supported() {
            return;
        }
        for addresses in ADDRESSES {
            let Some((listener, address)) = listen(addresses) else {
                continue;
            };
            let client = TcpStream::connect(address).unwrap();
            let (socket, peer) = listener.accept().unwrap();
            let local = socket.local_addr().unwrap();
            let uid = nix::unistd::geteuid().as_raw();
            assert_eq!(tcp_peer_uid(local, peer), Some(uid), "{addresses:?}");
            // One socket serves many questions, whatever their answers.
            let mut kept = SocketDiag::open().unwrap();
            for _ in 0..3 {
                assert_eq!(kept.tcp_peer_uid(local, peer), Ok(Some(uid)));
                assert_eq!(kept.tcp_peer_uid(peer, peer), Ok(None));
            }
            // The kernel would answer with the listener.
            let mut other = peer;
            other.set_port(1);
            assert_eq!(tcp_peer_uid(other, local), None);
            drop(client);
            while tcp_peer_uid(local, peer).is_some() {
                std::thread::yield_now();
            }
            drop(socket);
            assert_eq!(tcp_peer_uid(local, peer), None);
        }
    }

    #[test]
    fn a_socket_that_is_not_accepted_yet_has_no_user() {
        if !is_supported() {
            return;
        }
        let (_listener, address) = listen(ADDRESSES[0]).unwrap();
        let client = TcpStream::connect(address).unwrap();
        let end = client.local_addr().unwrap();
        assert_eq!(tcp_peer_uid(end, address), None);
        let nowhere = SocketAddr::from(([192, 0, 2, 1], 80));
        assert_eq!(tcp_peer_uid(address, nowhere), None);
    }

    #[test]
    fn a_socket_bound_to_the_loopback_interface_is_found() {
        use nix::sys::socket::{setsockopt, sockopt::BindToDevice};
        let Some((listener, address)) = is_supported().then(|| listen(ADDRESSES[0])).flatten()
        else {
            return;
        };
        let interface = std::ffi::OsString::from("lo");
        if setsockopt(&listener, BindToDevice, &interface).is_ok() {
            assert_eq!(is_tcp_listening(address), Ok(true));
        }
    }
}
