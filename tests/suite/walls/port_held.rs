//! The server's port belongs to the server: what clients send to it, with their tokens, reaches no
//! sandbox, at any address of the machine.
//!
//! A sandbox cannot name the port that it listens on, but gets any by listen without bind. In networks
//! of their own these tests leave so few ports that it would get the server's at once.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;

use super::probe::Probe;
use crate::fixture::{
    BINARY, Builder, Connection, Network, PATIENCE, Server, connect_from_chosen_port, is_root,
    wait_until,
};
use crate::skip;

const FIRST: u16 = 40_000;
const PORT: u16 = 40_004;
const LAST: u16 = 40_009;

const RESERVED: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// A network of few ports, or skips the test.
macro_rules! network {
    () => {{
        let network = is_root()
            .then(|| Network::with_ports(FIRST, LAST))
            .flatten();
        let Some(network) = network else {
            skip!("needs root, nsenter, and a network namespace of its own");
        };
        network
    }};
}

fn host(address: &str, port: u16) -> Builder {
    Server::host()
        .env("SBX_BIND", address)
        .env("SBX_PORT", port)
}

/// All ports but the server's, as a probe that got every one of them tells them.
fn others(why_not_more: &str) -> String {
    let others = (FIRST..=LAST).filter(|port| *port != PORT);
    let others: Vec<String> = others.map(|port| port.to_string()).collect();
    format!("{} {why_not_more}", others.join(" "))
}

#[test]
fn no_sandbox_listens_on_the_servers_port() {
    let network = network!();
    for address in ["0.0.0.0", "127.0.0.1", "127.0.0.2", "::", "::1"] {
        let server = network.start(host(address, PORT));
        // What the server asked of the kernel would hide what it does itself.
        network.run(|| fs::write(RESERVED, "\n").unwrap());
        let sandbox = server.sandbox();
        let probe = Probe::new(&sandbox);
        for family in ["v4", "v6", "both"] {
            for options in [
                &[][..],
                &["reuse-address"],
                &["reuse-port"],
                &["reuse-address", "reuse-port"],
            ] {
                let act = [&["listen-without-bind", family], options].concat();
                assert_eq!(
                    probe.run_one(&act),
                    others("EADDRINUSE"),
                    "{address} {act:?}"
                );
            }
            for (option, errno) in [
                ("repair", "EPERM"),
                ("port-range", "ENOPROTOOPT"),
                ("loopback-only", "ENOPROTOOPT"),
            ] {
                let outcome = probe.run_one(&["listen-without-bind", family, option]);
                assert_eq!(outcome, errno, "{address} {family} {option}");
            }
        }
        let act = ["connect-and-listen", &server.address.to_string()];
        assert_eq!(probe.run_one(&act), others("EADDRNOTAVAIL"), "{address}");
    }
}

#[test]
fn a_client_of_the_servers_port_reaches_the_server_or_nobody() {
    let network = network!();
    for address in ["0.0.0.0", "127.0.0.1", "::", "::1"] {
        let server = network.start(host(address, PORT));
        network.run(|| fs::write(RESERVED, "\n").unwrap());
        let sandbox = server.sandbox();
        let probe = Probe::new(&sandbox);
        probe.hold(&[&["take-ports", "v4"], &["take-ports", "v6"]]);
        for to in ["127.0.0.1", "127.0.0.2", "127.255.255.254", "::1"] {
            let to = SocketAddr::new(to.parse::<IpAddr>().unwrap(), PORT);
            match network.run(|| connect_from_chosen_port(to)) {
                Ok(stream) => {
                    let mut connection = Connection::over(stream, None);
                    let reply = connection.request("GET", "/health", &[], b"");
                    assert_eq!(reply.json()["mode"], "host", "{address} {to}");
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{to}"),
            }
        }
    }
}

#[test]
fn a_host_that_cannot_have_its_port_everywhere_is_refused() {
    let network = network!();
    let others = [
        ("0.0.0.0", "[::1]"),
        ("127.0.0.1", "[::]"),
        ("127.0.0.1", "127.0.0.2"),
        ("::1", "127.0.0.1"),
    ];
    for (address, other) in others {
        let mut taken = None;
        // A program that a test beside this one is starting has a copy of the last socket until it runs.
        wait_until("the port is free again", PATIENCE, || {
            taken = network.run(|| TcpListener::bind(format!("{other}:{PORT}")).ok());
            taken.is_some()
        });
        let [enter, network] = &network.words();
        let builder = host(address, PORT).wrapped_in(&["timeout", "20", enter, network]);
        let output = builder.command().output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        for words in ["port 40004 on every address", "EADDRINUSE"] {
            assert!(text.contains(words), "{text}");
        }
    }
}

#[test]
fn a_host_starts_again_while_the_connections_of_the_last_one_end() {
    let network = network!();
    for address in ["0.0.0.0", "127.0.0.1", "::", "::1"] {
        let mut server = network.start(host(address, PORT));
        let mut kept = server.connect();
        assert_eq!(kept.request("GET", "/health", &[], b"").status, 200);
        // The server closes this one first.
        let mut closed = server.connect();
        let headers = [("Connection", "close")];
        assert_eq!(closed.request("GET", "/health", &headers, b"").status, 200);
        server.signal(libc::SIGTERM);
        server.wait_for_exit(PATIENCE);
        let server = network.start(host(address, PORT));
        assert_eq!(server.get("/health").status, 200);
    }
}

#[test]
fn the_port_is_taken_out_of_those_that_the_kernel_chooses_from() {
    let network = network!();
    let reserved = || network.run(|| fs::read_to_string(RESERVED).unwrap());
    network.run(|| fs::write(RESERVED, "100,200-205\n").unwrap());
    drop(network.start(Server::builder().env("SBX_PORT", PORT)));
    drop(network.start(host("127.0.0.1", 0)));
    assert_eq!(reserved(), "100,200-205\n");
    for _ in 0..2 {
        drop(network.start(host("127.0.0.1", PORT)));
        assert_eq!(reserved(), format!("100,200-205,{PORT}\n"));
    }
}

/// `sbx-server health` is what decides whether the machine lives on.
#[test]
fn a_sandbox_that_takes_all_ports_keeps_nobody_from_asking_the_server() {
    let network = network!();
    let server = network.start(host("0.0.0.0", PORT));
    let sandbox = server.sandbox();
    Probe::new(&sandbox).hold(&[&["take-ports", "both"]]);
    let address = server.address;
    let error = network
        .run(|| TcpStream::connect(("127.0.0.1", PORT)))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddrNotAvailable, "{address}");
    let words = network.words();
    let health = Command::new(&words[0])
        .args([&words[1], BINARY, "health"])
        .env("SBX_PORT", PORT.to_string())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&health.stderr);
    assert!(health.status.success(), "{text}");
}
