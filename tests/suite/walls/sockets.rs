//! The sockets of a sandbox: none of others' can be reached but TCP's and UDP's, and nobody is
//! served from inside by TCP.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};

use super::probe::{Plan, Probe};
use super::{Neighbour, Vault};
use crate::fixture::{Server, is_root};
use crate::skip;

#[test]
fn unix_sockets_of_the_machine_and_of_a_neighbour_cannot_be_reached() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let neighbour = Neighbour::new(&server);
    let private = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(&neighbour.sandbox.home, private).unwrap();
    let sandbox = server.sandbox();
    let (probe, other) = (Probe::new(&sandbox), Probe::new(&neighbour.sandbox));
    let stream = neighbour.path("stream");
    let datagram = neighbour.path("datagram");
    let name = neighbour.marker.text.clone();
    let datagram_name = format!("{name}-datagram");
    other.hold(&[
        &["unix-listen", &stream],
        &["unix-bind", &datagram],
        &["chmod", &stream],
        &["chmod", &datagram],
        &["abstract-listen", &name],
        &["abstract-bind", &datagram_name],
    ]);
    let mut plan = Plan::default();
    // What sandboxes do not show to others nobody can connect to.
    for path in [&stream, &datagram] {
        plan.add(&["unix-connect", path], "EACCES");
        plan.add(&["unix-send", path], "EACCES");
    }
    plan.add(&["abstract-connect", &name], "EPERM");
    plan.add(&["abstract-send", &datagram_name], "EPERM");
    // The machine's own.
    let vault = Vault::new();
    let machine = format!("machine-{name}");
    let machine_datagram = format!("{machine}-datagram");
    let _listener =
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(&machine).unwrap()).unwrap();
    let receiver =
        UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&machine_datagram).unwrap())
            .unwrap();
    receiver.set_nonblocking(true).unwrap();
    let path = vault.path("socket");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
    plan.add(&["abstract-connect", &machine], "EPERM");
    plan.add(&["abstract-send", &machine_datagram], "EPERM");
    // A socket that has a path, and that everybody may use by its permissions, is closed by Landlock
    // only from ABI 9 on.
    let abi = server.get("/health").json()["isolation"]["landlock_abi"].as_u64();
    let by_path = if abi >= Some(9) { "EACCES" } else { "ok" };
    plan.add(&["unix-connect", &path], by_path);
    let closed = vault.path("closed");
    let _closed = UnixListener::bind(&closed).unwrap();
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o700)).unwrap();
    plan.add(&["unix-connect", &closed], "EACCES");
    // Its own it can make and use.
    plan.add(&["unix-listen", "own.sock"], "ok");
    plan.add(&["unix-connect", "own.sock"], "ok");
    plan.add(&["abstract-listen", &format!("own-{name}")], "ok");
    plan.add(&["abstract-connect", &format!("own-{name}")], "ok");
    probe.check(&plan);
    assert_eq!(listener.accept().is_ok(), by_path == "ok");
    assert!(receiver.recv(&mut [0; 8]).is_err(), "nothing has come");
}

#[test]
fn nobody_is_served_by_tcp_and_everybody_can_be_asked() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut plan = Plan::default();
    for address in [
        "0.0.0.0:0",
        "127.0.0.1:0",
        "0.0.0.0:8080",
        "127.0.0.1:1",
        "[::]:0",
        "[::1]:18080",
        "[::]:8080",
    ] {
        plan.add(&["tcp-bind", address], "EACCES|EAFNOSUPPORT|EADDRNOTAVAIL");
    }
    plan.add(&["tcp-bind", "0.0.0.0:0"], "EACCES");
    plan.add(&["tcp-bind", &server.address.to_string()], "EACCES");
    plan.add(
        &["tcp-connect", &listener.local_addr().unwrap().to_string()],
        "ok",
    );
    plan.add(&["udp-bind", "127.0.0.1:0"], "ok");
    plan.add(&["udp-echo"], "ok");
    probe.check(&plan);
}

/// Landlock's rules for connections do not see one that is opened with its first data.
#[test]
fn no_connection_is_opened_with_its_first_data() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut plan = Plan::default();
    for call in [libc::SYS_sendto, libc::SYS_sendmsg, libc::SYS_sendmmsg] {
        plan.add(&["fast-open", &call.to_string(), &address], "EOPNOTSUPP");
    }
    Probe::new(&sandbox).check(&plan);
    assert!(listener.accept().is_err(), "somebody has come");
}

#[test]
fn only_sockets_that_other_rules_cover_can_be_made() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    let mut plan = Plan::default();
    let mut add = |family: i32, kind: i32, protocol: i32, expected: &str| {
        let words = [family, kind, protocol].map(|word| word.to_string());
        let [family, kind, protocol] = words.each_ref().map(String::as_str);
        for call in [libc::SYS_socket, libc::SYS_socketpair] {
            let call = call.to_string();
            // A pair exists of unix sockets only; what is allowed for others is refused by them.
            let expected = match (expected, family) {
                ("ok", "1") => "ok",
                ("ok", _) if call == libc::SYS_socketpair.to_string() => "EOPNOTSUPP|EAFNOSUPPORT",
                ("ok", "10") => "ok|EAFNOSUPPORT",
                (other, _) => other,
            };
            plan.add(
                &["syscall", &call, family, kind, protocol, "buffer"],
                expected,
            );
        }
    };
    let (stream, datagram, packets) = (libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_SEQPACKET);
    for kind in [stream, datagram, packets] {
        add(libc::AF_UNIX, kind, 0, "ok");
    }
    add(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE, "ok");
    for protocol in 1..=22 {
        add(
            libc::AF_NETLINK,
            libc::SOCK_RAW,
            protocol,
            "EPROTONOSUPPORT",
        );
    }
    for family in [libc::AF_INET, libc::AF_INET6] {
        add(family, stream, 0, "ok");
        add(family, stream, libc::IPPROTO_TCP, "ok");
        add(
            family,
            stream | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            0,
            "ok",
        );
        add(family, datagram, 0, "ok");
        add(family, datagram, libc::IPPROTO_UDP, "ok");
        // MPTCP, SCTP, SMC, DCCP, UDP-Lite.
        for protocol in [262, 132, 256, 33, 136] {
            add(family, stream, protocol, "EPROTONOSUPPORT");
            add(family, datagram, protocol, "EPROTONOSUPPORT");
        }
        for protocol in [libc::IPPROTO_RAW, libc::IPPROTO_ICMP, libc::IPPROTO_TCP] {
            add(family, libc::SOCK_RAW, protocol, "EPERM");
        }
        for kind in [packets, 4, 6, 10] {
            add(family, kind, 0, "ESOCKTNOSUPPORT");
        }
    }
    let allowed = [
        libc::AF_UNIX,
        libc::AF_INET,
        libc::AF_INET6,
        libc::AF_NETLINK,
    ];
    for family in (0..=50).filter(|family| !allowed.contains(family)) {
        for kind in [stream, datagram, libc::SOCK_RAW, packets] {
            add(family, kind, 0, "EAFNOSUPPORT");
        }
    }
    probe.check(&plan);
}
