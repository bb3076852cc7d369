//! TCP ports that a sandbox is given to listen on: servers as people start them, and nobody else's ports.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

use serde_json::{Value, json};

use super::{SANDBOXES, needs_root};
use crate::fixture::{Builder, PATIENCE, Sandbox, Server, assert_error, wait_until};
use crate::walls::probe::{Plan, Probe};

/// Ports of a test's own, below those that the kernel chooses from.
struct Range {
    first: u16,
    last: u16,
}

impl Range {
    const MOST: u16 = 8;

    fn new(count: u16) -> Self {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let begin = u16::try_from(std::process::id() % 1000).unwrap();
        loop {
            let slot = (begin + NEXT.fetch_add(1, Ordering::Relaxed)) % 2000;
            let first = 12_000 + slot * Self::MOST;
            let last = first + count - 1;
            if (first..=last).all(|port| TcpListener::bind(("::", port)).is_ok()) {
                return Self { first, last };
            }
        }
    }

    fn host(&self) -> Builder {
        let range = format!("{}-{}", self.first, self.last);
        Server::host().env("SBX_TCP_PORT_RANGE", range)
    }
}

fn ports_of(server: &Server, sandbox: &Sandbox<'_>) -> Vec<u16> {
    let shown = server.get(&format!("{SANDBOXES}/{}", sandbox.id)).json();
    serde_json::from_value(shown["tcp_ports"].clone()).unwrap()
}

#[test]
fn servers_on_port_are_reached_through_the_proxy() {
    needs_root!();
    let range = Range::new(2);
    let server = range.host().start();
    let sandbox = server.sandbox_with(&json!({ "tcp_ports": 2 }));
    let ports = ports_of(&server, &sandbox);
    assert_eq!(ports, [range.first, range.last]);
    let shown = sandbox.sh("echo $PORT $SBX_TCP_PORTS");
    assert_eq!(shown, format!("{} {},{}\n", ports[0], ports[0], ports[1]));
    let node = "require('http').createServer((_, answer) => answer.end('of node')).listen(process.env.SECOND)";
    for (port, body) in [
        (
            ports[0],
            json!({ "cmd": "echo of python > index.html; exec python3 -m http.server $PORT" }),
        ),
        (
            ports[1],
            json!({ "cmd": ["node", "-e", node], "env": { "SECOND": ports[1] } }),
        ),
    ] {
        let port = port.to_string();
        // Nobody listens yet.
        let reply = sandbox.get(&format!("proxy/{port}/"));
        assert_error(&reply, 502, "unreachable");
        sandbox.spawn(&body);
        let reply = sandbox.get(&format!("ports/{port}/wait?timeout=20"));
        assert_eq!(reply.json()["listening"], true, "{}", reply.text());
    }
    for (port, text) in [(ports[0], "of python"), (ports[1], "of node")] {
        let reply = sandbox.get(&format!("proxy/{port}/"));
        assert_eq!((reply.status, reply.text().trim()), (200, text));
    }
    let listed = sandbox.get("ports").json();
    let listed: Vec<u64> = listed
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|one| one["port"].as_u64())
        .collect();
    for port in ports {
        assert!(listed.contains(&port.into()), "{listed:?}");
    }
}

#[test]
fn a_sandbox_listens_on_its_own_ports_and_on_no_others() {
    needs_root!();
    let range = Range::new(4);
    let server = range.host().start();
    let one = server.sandbox_with(&json!({ "tcp_ports": 2 }));
    let other = server.sandbox_with(&json!({ "tcp_ports": 1 }));
    let none = server.sandbox();
    let (ports, its) = (ports_of(&server, &one), ports_of(&server, &other));
    assert_eq!((ports.len(), its.len()), (2, 1));
    assert!(!ports.contains(&its[0]));
    let mut plan = Plan::default();
    for port in range.first..=range.last {
        let expected = if ports.contains(&port) {
            "ok"
        } else {
            "EACCES"
        };
        for at in ["127.0.0.1", "0.0.0.0"] {
            plan.add(&["tcp-bind", &format!("{at}:{port}")], expected);
        }
    }
    plan.add(&["tcp-bind", "127.0.0.1:0"], "EACCES");
    plan.add(&["tcp-bind", &server.address.to_string()], "EACCES");
    Probe::new(&one).check(&plan);
    let mut plan = Plan::default();
    for port in range.first..=range.last {
        plan.add(&["tcp-bind", &format!("127.0.0.1:{port}")], "EACCES");
    }
    Probe::new(&none).check(&plan);
    assert_eq!(ports_of(&server, &none), [] as [u16; 0]);
    // Another's port leads nowhere by its token, whoever listens there.
    let listener = TcpListener::bind(("127.0.0.1", its[0])).unwrap();
    for sandbox in [&one, &none, &other] {
        let reply = sandbox.get(&format!("proxy/{}/", its[0]));
        assert_error(&reply, 502, "unreachable");
    }
    let reply = other.get(&format!("proxy/{}/", its[0]));
    assert!(reply.text().contains("not the sandbox"), "{}", reply.text());
    listener.set_nonblocking(true).unwrap();
    assert!(
        listener.accept().is_err(),
        "the proxy came to another's server"
    );
}

#[test]
fn ports_are_given_again_only_when_nothing_listens_on_them() {
    needs_root!();
    let range = Range::new(3);
    let server = range.host().start();
    let make = |count: usize| server.post(SANDBOXES, &json!({ "tcp_ports": count }));
    let squatter = TcpListener::bind(("127.0.0.1", range.first)).unwrap();
    assert_error(&make(3), 503, "over_limit");
    let first = make(2).json();
    assert_eq!(
        first["sandboxes"][0]["tcp_ports"],
        json!([range.first + 1, range.last])
    );
    let reply = make(1);
    assert_error(&reply, 503, "over_limit");
    assert!(
        reply.text().contains("SBX_TCP_PORT_RANGE"),
        "{}",
        reply.text()
    );
    // Nothing is left of one that had too few, nor of all that were asked for with it.
    let reply = server.post(SANDBOXES, &json!({ "tcp_ports": 1, "count": 2 }));
    assert_error(&reply, 503, "over_limit");
    assert_eq!(server.get("/health").json()["sandboxes"], 1);
    drop(squatter);
    wait_until("the port is free", PATIENCE, || make(1).status == 200);
    let id = first["sandboxes"][0]["id"].as_str().unwrap();
    assert_eq!(server.delete(&format!("{SANDBOXES}/{id}")).status, 200);
    wait_until("the ports are free", PATIENCE, || make(2).status == 200);
}

#[test]
fn what_cannot_be_had_is_refused() {
    needs_root!();
    let without = Server::host().start();
    let reply = without.post(SANDBOXES, &json!({ "tcp_ports": 1 }));
    assert_error(&reply, 400, "unavailable");
    assert!(
        reply.text().contains("SBX_TCP_PORT_RANGE"),
        "{}",
        reply.text()
    );
    assert_eq!(
        without.post(SANDBOXES, &json!({ "tcp_ports": 0 })).status,
        200
    );
    let reply = without.sandbox().get("proxy/8000/");
    assert_error(&reply, 502, "unreachable");
    assert!(reply.text().contains("tcp_ports"), "{}", reply.text());

    let server = Range::new(2).host().start();
    for ports in [
        json!(17),
        json!(-1),
        json!(1.5),
        json!("1"),
        json!([8000]),
        json!(true),
    ] {
        let reply = server.post(SANDBOXES, &json!({ "tcp_ports": ports }));
        assert_error(&reply, 400, "bad_request");
    }
    let blocked = json!({ "tcp_ports": 1, "network": "blocked" });
    assert_error(&server.post(SANDBOXES, &blocked), 400, "unavailable");
    let blocked: Value = json!({ "tcp_ports": 0, "network": "blocked" });
    assert_eq!(server.post(SANDBOXES, &blocked).status, 200);
}
