//! The listening socket, and the port that it listens on.

use std::fs::OpenOptions;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::sys::socket::{
    self, AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, SockaddrIn6, SockaddrStorage,
    bind, getsockname, setsockopt, socket, sockopt,
};

/// The list of ports that the kernel does not choose by itself (Documentation/networking/ip-sysctl.rst).
const RESERVED_PORTS: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// What the kernel buffers for a client that does not read. It counts as memory of the server's cgroup, and would
/// grow to megabytes for each connection.
const UNSENT_BYTES: u32 = 256 * 1024;

/// Listens on an address.
///
/// # Errors
/// The error of socket(2), bind(2) or listen(2).
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = open(address)?;
    // Accepted sockets inherit these options. Keep-alive probes find a quiet client that vanished
    // within two minutes.
    setsockopt(&listener, sockopt::TcpNoDelay, &true)?;
    setsockopt(&listener, sockopt::KeepAlive, &true)?;
    setsockopt(&listener, sockopt::TcpKeepIdle, &60)?;
    setsockopt(&listener, sockopt::TcpKeepInterval, &15)?;
    setsockopt(&listener, sockopt::TcpKeepCount, &4)?;
    super::limit_unsent(listener.as_fd(), UNSENT_BYTES)?;
    bind(listener.as_raw_fd(), &SockaddrStorage::from(address))?;
    socket::listen(&listener, Backlog::MAXALLOWABLE)?;
    Ok(listener.into())
}

/// A port that nobody else can listen on while the value lives, at any address of either family: a socket
/// that is bound to all of them and never listens.
///
/// A program that may not choose a port can still get any free one by listen(2) without bind(2), which
/// Landlock does not see. A port that a server has on one address is free on the others.
pub struct HeldPort {
    holder: OwnedFd,
    number: u16,
}

impl HeldPort {
    /// Takes a port on all addresses; 0 means any that is free on all of them.
    ///
    /// # Errors
    /// The error of socket(2) or bind(2); `EADDRINUSE` if another process has the port on any address.
    pub fn take(port: u16) -> io::Result<Self> {
        // This one is of both families.
        let holder = match bind_holder((Ipv6Addr::UNSPECIFIED, port).into()) {
            // A kernel without IPv6.
            Err(Errno::EAFNOSUPPORT | Errno::EADDRNOTAVAIL) => {
                bind_holder((Ipv4Addr::UNSPECIFIED, port).into())
            }
            other => other,
        }?;
        let address: SockaddrStorage = getsockname(holder.as_raw_fd())?;
        let v6 = address.as_sockaddr_in6().map(SockaddrIn6::port);
        let v4 = address.as_sockaddr_in().map(SockaddrIn::port);
        let number = v6.or(v4).ok_or(Errno::EAFNOSUPPORT)?;
        Ok(Self { holder, number })
    }

    /// Listens on an address with this port. Call it once.
    ///
    /// # Errors
    /// As [`listen`].
    pub fn listen(&self, mut address: SocketAddr) -> io::Result<TcpListener> {
        address.set_port(self.number);
        let listener = listen(address)?;
        // Both had the option until here, or they would have excluded each other.
        setsockopt(&self.holder, sockopt::ReuseAddr, &false)?;
        Ok(listener)
    }
}

/// Keeps the kernel from choosing ports for a program that names none, even while no server has them. Changes the
/// network namespace for good; does nothing where this process may not.
pub fn reserve(ports: &RangeInclusive<u16>) {
    let (first, last) = (ports.start(), ports.end());
    let setting = OpenOptions::new().write(true).open(RESERVED_PORTS);
    // At any offset but 0 the kernel adds to the list.
    let _ = setting.and_then(|list| list.write_at(format!("{first}-{last}\n").as_bytes(), 1));
}

fn bind_holder(address: SocketAddr) -> nix::Result<OwnedFd> {
    let holder = open(address)?;
    if address.is_ipv6() {
        setsockopt(&holder, sockopt::Ipv6V6Only, &false)?;
    }
    bind(holder.as_raw_fd(), &SockaddrStorage::from(address))?;
    Ok(holder)
}

/// Opens a socket that can be bound to a port of which connections are still ending.
fn open(address: SocketAddr) -> nix::Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let socket = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    const ADDRESSES: [&str; 5] = ["0.0.0.0", "127.0.0.1", "127.0.0.2", "::", "::1"];

    /// Listens on a held port of this machine, where it has the address.
    fn serve(at: &str, port: u16) -> Option<(HeldPort, TcpListener)> {
        let held = HeldPort::take(port).unwrap();
        match held.listen((at.parse::<std::net::IpAddr>().unwrap(), port).into()) {
            Ok(listener) => Some((held, listener)),
            Err(error) => {
                assert!(at.contains(':'), "{at}: {error}");
                None
            }
        }
    }

    /// Tries to listen on a port in every way that names it.
    fn intrude(port: u16) {
        for address in ADDRESSES.iter().chain(&["::ffff:127.0.0.1"]) {
            let address = SocketAddr::new(address.parse().unwrap(), port);
            for (reuses_address, reuses_port, only_v6) in
                (0..8).map(|bits| (bits & 1, bits & 2, bits & 4))
            {
                let Ok(socket) = open(address) else { continue };
                setsockopt(&socket, sockopt::ReuseAddr, &(reuses_address != 0)).unwrap();
                setsockopt(&socket, sockopt::ReusePort, &(reuses_port != 0)).unwrap();
                if address.is_ipv6() {
                    setsockopt(&socket, sockopt::Ipv6V6Only, &(only_v6 != 0)).unwrap();
                }
                let bound = bind(socket.as_raw_fd(), &SockaddrStorage::from(address));
                let listening = bound.and_then(|()| socket::listen(&socket, Backlog::MAXALLOWABLE));
                assert!(listening.is_err(), "{address}");
            }
        }
    }

    #[test]
    fn a_held_port_is_nobody_elses_at_any_address() {
        for at in ADDRESSES {
            let Some((_held, listener)) = serve(at, 0) else {
                continue;
            };
            intrude(listener.local_addr().unwrap().port());
        }
    }

    #[test]
    fn a_held_port_can_be_held_again_while_its_connections_end() {
        for at in ADDRESSES {
            let Some((held, listener)) = serve(at, 0) else {
                continue;
            };
            let address = listener.local_addr().unwrap();
            let client = TcpStream::connect(address).unwrap();
            let (open, _) = listener.accept().unwrap();
            // This end closes first, so that it is the one that waits for late packets.
            let closed = TcpStream::connect(address).unwrap();
            drop(listener.accept().unwrap());
            drop((closed, listener, held));
            let mut again = None;
            // A child of another test may hold the sockets until its execve.
            while again.is_none() {
                std::thread::yield_now();
                again = HeldPort::take(address.port()).ok();
                again = again.filter(|held| held.listen(address).is_ok());
            }
            intrude(address.port());
            drop((client, open));
        }
    }

    #[test]
    fn a_port_that_another_has_in_the_other_family_is_refused() {
        let Ok(other) = TcpListener::bind("[::1]:0") else {
            return;
        };
        let port = other.local_addr().unwrap().port();
        let error = HeldPort::take(port).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
