//! Whether this machine keeps a socket that is bound to 127.0.0.1 from leaving it.
//!
//! The kernel refuses a loopback source on any other device when it looks for the route, before a packet is made,
//! unless `route_localnet` is set for the device (Documentation/networking/ip-sysctl.rst). Where that is so nothing is
//! sent here.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect, setsockopt,
    socket, sockopt,
};

use crate::error::{Error, Kind, Result};
use crate::sys;

/// The settings of the network's devices.
const DEVICES: &str = "/proc/sys/net/ipv4/conf";

/// An address of documentation (RFC 5737), where nobody is.
const NOWHERE: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 9);

/// Checks that filtered networks are enforced here.
///
/// # Errors
/// `Unavailable`, with the reason.
pub fn check() -> Result<()> {
    let unavailable = |why: &str| {
        let text = format!("network allowlist cannot be enforced on this machine: {why}");
        Err(Error::new(Kind::Unavailable, text))
    };
    if !sys::has_listeners() {
        return unavailable("the kernel cannot leave system calls to the server (Linux 5.19)");
    }
    match routes_loopback(Path::new(DEVICES)) {
        Ok(false) => {}
        Ok(true) => {
            return unavailable(
                "route_localnet is set, so packets from 127.0.0.1 may leave it; unset it for all devices",
            );
        }
        Err(_) => return unavailable("/proc/sys/net/ipv4/conf cannot be read"),
    }
    match connect_from_loopback() {
        Errno::EINVAL | Errno::ENETUNREACH => Ok(()),
        errno => unavailable(&format!(
            "a socket of 127.0.0.1 may leave it: connecting one to another network gave {errno:?} and not EINVAL"
        )),
    }
}

/// Checks that the server can redirect connections here: that it may read the memory of commands
/// (Documentation/admin-guide/LSM/Yama.rst: of its descendants if the setting is below 2), and connect their sockets without
/// waiting (Documentation/networking/ip-sysctl.rst: the lowest bit of the setting, which is set unless somebody clears it).
///
/// # Errors
/// `Unavailable`, with the reason.
pub fn check_redirection() -> Result<()> {
    // Without the file the kernel has no such restriction.
    let setting = |name: &str| {
        let text = std::fs::read_to_string(format!("/proc/sys/{name}")).ok()?;
        Some(text.trim().parse::<u32>().unwrap_or(0))
    };
    let unavailable = |why: &str| {
        let text = format!("network cannot be transparent on this machine: {why}");
        Err(Error::new(Kind::Unavailable, text))
    };
    if setting("kernel/yama/ptrace_scope").is_some_and(|scope| scope >= 2) {
        return unavailable(
            "kernel.yama.ptrace_scope keeps the server from the memory of programs; set it to 1",
        );
    }
    if setting("net/ipv4/tcp_fastopen").is_some_and(|bits| bits & 1 == 0) {
        return unavailable(
            "net.ipv4.tcp_fastopen keeps the server from connecting without waiting; set it to 1",
        );
    }
    Ok(())
}

/// Whether any device sends packets with a loopback source.
fn routes_loopback(devices: &Path) -> io::Result<bool> {
    for device in std::fs::read_dir(devices)? {
        match std::fs::read_to_string(device?.path().join("route_localnet")) {
            Ok(setting) if setting.trim() == "0" => {}
            Ok(_) => return Ok(true),
            // The device has gone meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// What a socket as commands get it finds that connects to another network.
fn connect_from_loopback() -> Errno {
    let result = loopback_socket(SockFlag::SOCK_NONBLOCK).and_then(|socket| {
        let address = SockaddrStorage::from(SocketAddr::V4(NOWHERE));
        connect(socket.as_raw_fd(), &address)
    });
    // Success is as bad as a connection that is begun.
    result.err().unwrap_or(Errno::EISCONN)
}

/// A TCP socket of IPv4 that is bound to 127.0.0.1, whose port the kernel chooses when it connects.
///
/// # Errors
/// Of socket(2), setsockopt(2) or bind(2).
pub(super) fn loopback_socket(flags: SockFlag) -> nix::Result<OwnedFd> {
    let socket = socket(
        AddressFamily::Inet,
        SockType::Stream,
        flags | SockFlag::SOCK_CLOEXEC,
        SockProtocol::Tcp,
    )?;
    setsockopt(&socket, sockopt::IpBindAddressNoPort, &true)?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    bind(socket.as_raw_fd(), &SockaddrStorage::from(address))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_routes_loopback_is_found() {
        let devices = std::env::temp_dir().join(format!("sbx-devices-{}", std::process::id()));
        for (device, setting) in [("all", "0\n"), ("lo", "0\n"), ("eth0", "0\n")] {
            std::fs::create_dir_all(devices.join(device)).unwrap();
            std::fs::write(devices.join(device).join("route_localnet"), setting).unwrap();
        }
        assert!(!routes_loopback(&devices).unwrap());
        std::fs::write(devices.join("eth0/route_localnet"), "1\n").unwrap();
        assert!(routes_loopback(&devices).unwrap());
        std::fs::remove_dir_all(&devices).unwrap();
        assert!(routes_loopback(&devices).is_err());
    }
}
