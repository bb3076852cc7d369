//! The listening socket.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;

use nix::sys::socket::{
    self, AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, setsockopt, socket,
    sockopt,
};

/// Listens on an address.
///
/// # Errors
/// The error of socket(2), bind(2) or listen(2).
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let flags = SockFlag::SOCK_CLOEXEC;
    let listener = socket(family, SockType::Stream, flags, None)?;
    setsockopt(&listener, sockopt::ReuseAddr, &true)?;
    // Accepted sockets inherit these options. Keep-alive probes find a quiet client that vanished
    // within two minutes.
    setsockopt(&listener, sockopt::TcpNoDelay, &true)?;
    setsockopt(&listener, sockopt::KeepAlive, &true)?;
    setsockopt(&listener, sockopt::TcpKeepIdle, &60)?;
    setsockopt(&listener, sockopt::TcpKeepInterval, &15)?;
    setsockopt(&listener, sockopt::TcpKeepCount, &4)?;
    bind(listener.as_raw_fd(), &SockaddrStorage::from(address))?;
    socket::listen(&listener, Backlog::MAXALLOWABLE)?;
    Ok(listener.into())
}
