//! `blocked`: nothing is reached, by no kind of socket and in no way round.

use std::io::ErrorKind;
use std::net::{TcpListener, UdpSocket};

use serde_json::{Value, json};

use super::{Place, in_both_modes};
use crate::fixture::{PATIENCE, Server, is_root, wait_until};
use crate::skip;
use crate::walls::probe::Plan;

/// Servers of somebody else, who waits for whatever comes.
struct Attacker {
    tcp: Vec<TcpListener>,
    udp: Vec<UdpSocket>,
}

impl Attacker {
    fn new() -> Self {
        // Where there is no IPv6 nobody is reached by it.
        let addresses = ["127.0.0.1:0", "[::1]:0"];
        let tcp = addresses.iter().filter_map(|address| {
            let listener = TcpListener::bind(address).ok()?;
            listener.set_nonblocking(true).unwrap();
            Some(listener)
        });
        let udp = addresses.iter().filter_map(|address| {
            let socket = UdpSocket::bind(address).ok()?;
            socket.set_nonblocking(true).unwrap();
            Some(socket)
        });
        Self {
            tcp: tcp.collect(),
            udp: udp.collect(),
        }
    }

    /// The IPv4 address of the TCP server.
    fn address(&self) -> String {
        self.tcp[0].local_addr().unwrap().to_string()
    }

    /// How many have come since.
    fn visitors(&self) -> usize {
        let mut count = 0;
        for listener in &self.tcp {
            while listener.accept().is_ok() {
                count += 1;
            }
        }
        for socket in &self.udp {
            loop {
                match socket.recv_from(&mut [0; 64]) {
                    Ok(_) => count += 1,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(_) => {}
                }
            }
        }
        count
    }

    /// All ways to come.
    fn visits(&self) -> Vec<Vec<String>> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let mut acts = Vec::new();
        for listener in &self.tcp {
            let address = listener.local_addr().unwrap().to_string();
            acts.push(words(&["tcp-connect", &address]));
        }
        for socket in &self.udp {
            let address = socket.local_addr().unwrap();
            let from = if address.is_ipv4() {
                "127.0.0.1:0"
            } else {
                "[::1]:0"
            };
            acts.push(words(&["udp-send", from, &address.to_string()]));
        }
        acts
    }
}

fn blocked() -> Value {
    json!({ "network": "blocked" })
}

/// The plan of everything that makes a socket of the internet or of other machines.
fn every_socket(attacker: &Attacker) -> Plan {
    let mut plan = Plan::default();
    for act in attacker.visits() {
        let act: Vec<&str> = act.iter().map(String::as_str).collect();
        let expected = if act.last().unwrap().starts_with('[') {
            "EAFNOSUPPORT"
        } else {
            "ENETUNREACH"
        };
        plan.add(&act, expected);
    }
    let socket = libc::SYS_socket.to_string();
    for family in 0..=46 {
        for kind in 0..=10 {
            // TCP, UDP, ICMP, raw, MPTCP, UDP-Lite, SCTP; netlink's route, audit and generic.
            for protocol in [0, 1, 6, 9, 16, 17, 132, 136, 255, 256, 262] {
                let expected = match (family, protocol) {
                    // The kernel itself decides about their types.
                    (libc::AF_UNIX, _) => "ok|EPROTONOSUPPORT|ESOCKTNOSUPPORT",
                    (libc::AF_NETLINK, 0) => "ok|ESOCKTNOSUPPORT",
                    (libc::AF_NETLINK, _) => "EPROTONOSUPPORT",
                    (libc::AF_INET, _) => "ENETUNREACH",
                    _ => "EAFNOSUPPORT",
                };
                let words = [family, kind, protocol].map(|word| word.to_string());
                let [family, kind, protocol] = words.each_ref().map(String::as_str);
                plan.add(&["syscall", &socket, family, kind, protocol], expected);
            }
        }
    }
    let queue = libc::SYS_io_uring_setup.to_string();
    plan.add(&["syscall", &queue, "8", "buffer"], "ENOSYS");
    // What stays on the machine is as ever.
    plan.add(&["unix-listen", "own.sock"], "ok");
    plan.add(&["unix-connect", "own.sock"], "ok");
    plan
}

#[test]
fn no_socket_leads_out_of_a_blocked_command() {
    in_both_modes(|place| {
        let attacker = Attacker::new();
        let mut plan = every_socket(&attacker);
        // In the directory of the test.
        plan.add(&["unlink", "own.sock"], "ok");
        let mut more = blocked();
        more["cwd"] = place.path("").into();
        place.check(&plan, &more);
        assert_eq!(attacker.visitors(), 0);
        // Without the policy all of these come.
        let mut plan = Plan::default();
        for act in attacker.visits() {
            let act: Vec<&str> = act.iter().map(String::as_str).collect();
            plan.add(&act, "ok");
        }
        place.check(&plan, &json!({}));
        let expected = attacker.tcp.len() + attacker.udp.len();
        let mut visitors = 0;
        wait_until("all have come", PATIENCE, || {
            visitors += attacker.visitors();
            visitors == expected
        });
    });
}

#[test]
fn no_socket_leads_out_of_a_blocked_sandbox() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let place = Place::sandbox(&server, &blocked());
    let attacker = Attacker::new();
    place.check(&every_socket(&attacker), &json!({}));
    assert_eq!(attacker.visitors(), 0);
}

/// A looser command can pass its sockets, but Landlock asks the one who connects.
#[test]
fn a_tcp_socket_that_is_passed_to_a_blocked_command_leads_nowhere() {
    in_both_modes(|place| {
        let attacker = Attacker::new();
        let (path, address) = (place.path("giver.sock"), attacker.address());
        let give: Vec<Vec<String>> = vec![
            vec!["give-sockets".to_owned(), path.clone()],
            vec!["stay".to_owned()],
        ];
        let giver = place.post("processes", &place.acts(&give, &json!({})));
        assert_eq!(giver.status, 200, "{}", giver.text());
        wait_until("sockets are given", PATIENCE, || {
            std::fs::symlink_metadata(&path).is_ok()
        });
        let mut plan = Plan::default();
        for (act, expected) in [
            ("connect", "EACCES"),
            ("bind", "EACCES"),
            ("connect-after-unspecified", "EACCES"),
            ("fast-open", "EOPNOTSUPP"),
        ] {
            plan.add(&["use-given", &path, act, &address], expected);
        }
        place.check(&plan, &blocked());
        assert_eq!(attacker.visitors(), 0);
        let mut plan = Plan::default();
        plan.add(&["use-given", &path, "connect", &address], "ok");
        place.check(&plan, &json!({}));
        wait_until("it has come", PATIENCE, || attacker.visitors() == 1);
    });
}

/// Whatever a command becomes.
#[test]
fn nothing_that_a_blocked_command_starts_is_freer() {
    in_both_modes(|place| {
        let attacker = Attacker::new();
        let address = attacker.address();
        let out = place.path("out");
        let inner = json!([["tcp-connect", address]]).to_string();
        let program = crate::walls::probe::words(&place.program).join(" ");
        // A child, one of another session, and one whose parents have ended.
        let script = format!(
            "echo '{inner}' | {program}; echo '{inner}' | setsid {program}; \
             (echo '{inner}' | setsid {program} > {out}.part; mv {out}.part {out}) &"
        );
        let outcome = place.exec(&json!(script), &blocked());
        let told = crate::walls::probe::outcomes(&outcome.stdout);
        assert_eq!(told, ["ENETUNREACH", "ENETUNREACH"], "{outcome:?}");
        wait_until("the orphan has tried", PATIENCE, || {
            std::fs::exists(&out).unwrap()
        });
        let told = crate::walls::probe::outcomes(&std::fs::read_to_string(&out).unwrap());
        assert_eq!(told, ["ENETUNREACH"]);
        assert_eq!(attacker.visitors(), 0);
    });
}

#[test]
fn programs_say_that_the_network_is_unreachable() {
    in_both_modes(|place| {
        let said = |cmd: &[&str]| {
            let outcome = place.exec(&json!(cmd), &blocked());
            assert_eq!(outcome.code(), Some(1), "{outcome:?}");
            outcome.stderr
        };
        let python = "import socket; socket.create_connection(('127.0.0.1', 80))";
        let text = said(&["python3", "-c", python]);
        assert!(text.contains("Network is unreachable"), "{text}");
        let node = "require('net').connect(80, '127.0.0.1')";
        let text = said(&["node", "-e", node]);
        assert!(text.contains("ENETUNREACH"), "{text}");
        // Programs that look at the interfaces of the machine go on.
        let outcome = place.exec(
            &json!([
                "python3",
                "-c",
                "import socket; print(len(socket.if_nameindex()) > 0)"
            ]),
            &blocked(),
        );
        assert_eq!(outcome.stdout, "True\n", "{outcome:?}");
    });
}
