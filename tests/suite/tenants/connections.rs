//! Connections: a tenant that opens as many as it can does not keep the operator, `sbx-server health` and the
//! other tenants out.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;

use super::{expect_service, head, send_and_hold};
use crate::fixture::{
    BINARY, Connection, PATIENCE, Sandbox, Server, is_root, parse_replies, status_of, wait_until,
};
use crate::skip;
use crate::walls::probe::Probe;

/// Most connections of the servers here.
const ALL: usize = 128;

fn host() -> Server {
    Server::host().env("SBX_MAX_CONNECTIONS", ALL).start()
}

/// The operator, another tenant and `sbx-server health` are served, again and again.
#[track_caller]
fn expect_room(server: &Server, neighbour: &Sandbox<'_>) {
    for _ in 0..5 {
        expect_service(server, neighbour);
        let finished = Command::new(BINARY)
            .arg("health")
            .env("SBX_PORT", server.address.port().to_string())
            .output()
            .unwrap();
        assert!(finished.status.success(), "{finished:?}");
    }
}

/// An idle connection on which a request with this token was answered; `None` if it was refused.
fn hold(connection: Connection, target: &str) -> Option<Connection> {
    let mut connection = connection;
    let reply = connection.request("GET", target, &[], b"");
    if reply.status == 200 {
        return Some(connection);
    }
    assert_eq!((reply.status, &*reply.code()), (503, "over_limit"));
    assert!(reply.text().contains("connections"), "{}", reply.text());
    assert_eq!(reply.header("connection"), Some("close"));
    connection.expect_close();
    None
}

#[test]
fn sandboxes_that_show_no_token() {
    if !is_root() {
        skip!("needs root");
    }
    let server = host();
    let neighbour = server.sandbox();
    let mut operator = hold(server.connect(), "/v1/sandboxes").unwrap();
    let address = server.address.to_string();
    let attackers: Vec<_> = (0..12).map(|_| server.sandbox()).collect();
    for attacker in &attackers {
        // More than one user may have, and together more than there are.
        Probe::new(attacker).hold(&[&["half-open", &address, "60"]]);
    }
    expect_room(&server, &neighbour);
    // Who was there before with a token stays.
    let reply = operator.request("GET", "/v1/sandboxes", &[], b"");
    assert_eq!(reply.status, 200);
}

#[test]
fn a_sandbox_that_shows_its_token() {
    if !is_root() {
        skip!("needs root");
    }
    let server = host();
    let (attacker, neighbour) = (server.sandbox(), server.sandbox());
    let target = attacker.target("processes");
    let held: Vec<_> = (0..ALL)
        .filter_map(|_| hold(attacker.connect(), &target))
        .collect();
    assert_eq!(held.len(), ALL / 4, "a quarter");
    expect_room(&server, &neighbour);
    // Streams and waits are connections too.
    assert!(hold(attacker.connect(), &target).is_none());
    drop(held);
    wait_until("it is served again", PATIENCE, || {
        hold(attacker.connect(), &target).is_some()
    });
}

/// A host that may have so many descriptors, if it can be started here.
fn host_with_descriptors(limit: usize) -> Option<Server> {
    let option = format!("--nofile={limit}:{limit}");
    let words = ["prlimit", &option];
    is_root().then(|| Server::host().wrapped_in(&words).start())
}

/// Each connection holds the directories of a walk, for as long as nobody reads the archive.
#[track_caller]
fn withstand_archives_of_a_deep_tree(limit: usize) {
    let Some(server) = host_with_descriptors(limit) else {
        skip!("needs root");
    };
    let (attacker, neighbour) = (server.sandbox(), server.sandbox());
    let deep = ["d"; 31].join("/");
    attacker.sh(&format!(
        "mkdir -p {deep} && head -c 20000000 /dev/urandom > {deep}/file"
    ));
    let request = head(&attacker, "GET", "files/archive?path=d", "");
    let mut held = Vec::new();
    for count in [300, 40, 40] {
        for _ in 0..count {
            let mut stream = send_and_hold(&server, &request);
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut line = [0; 12];
            if stream.read_exact(&mut line).is_ok() && line.ends_with(b" 200") {
                held.push(stream);
            }
        }
        expect_room(&server, &neighbour);
    }
    assert!(held.len() >= 16, "{} archives have begun", held.len());
    let delete = format!("/v1/sandboxes/{}", attacker.id);
    assert_eq!(server.delete(&delete).status, 200);
}

#[test]
fn archives_of_a_deep_tree_beside_1024_descriptors() {
    withstand_archives_of_a_deep_tree(1024);
}

#[test]
fn archives_of_a_deep_tree_beside_4096_descriptors() {
    withstand_archives_of_a_deep_tree(4096);
}

#[test]
fn idle_connections_beside_1024_descriptors() {
    let Some(server) = host_with_descriptors(1024) else {
        skip!("needs root");
    };
    let (attacker, neighbour) = (server.sandbox(), server.sandbox());
    let target = attacker.target("processes");
    let held: Vec<_> = (0..1100)
        .filter_map(|_| hold(attacker.connect(), &target))
        .collect();
    assert_eq!(held.len(), 1024 / 8 / 4, "a quarter of an eighth");
    assert!(server.log().contains("serves 128 of SBX_MAX_CONNECTIONS"));
    expect_room(&server, &neighbour);
}

/// It is no flood where nobody else connects, from the first connection on.
#[test]
fn a_sandbox_alone_that_opens_many_connections_at_once() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    // As many as a user may have that has shown no token.
    let script = format!(
        "import socket
every = [socket.create_connection(('127.0.0.1', {})) for _ in range(120)]
for one in every:
    one.sendall(b'GET /health HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n')
print(sum(one.recv(12) == b'HTTP/1.1 200' for one in every))",
        server.address.port()
    );
    let ran = sandbox.exec(&serde_json::json!({ "cmd": ["python3", "-c", script] }));
    assert_eq!(ran.stdout, "120\n", "{}", ran.stderr);
}

#[test]
fn sandboxes_that_take_all_seats_together() {
    if !is_root() {
        skip!("needs root");
    }
    let server = host();
    let neighbour = server.sandbox();
    let attackers: Vec<_> = (0..5).map(|_| server.sandbox()).collect();
    let held: Vec<Vec<Connection>> = attackers
        .iter()
        .map(|attacker| {
            let target = attacker.target("processes");
            (0..ALL / 4)
                .map_while(|_| hold(attacker.connect(), &target))
                .collect()
        })
        .collect();
    // Each leaves as much as it may have itself.
    assert_eq!(held[0].len(), ALL / 4);
    assert!(held.iter().map(Vec::len).sum::<usize>() <= ALL - 8 - 4);
    assert_eq!(neighbour.sh("echo here"), "here\n");
    let health = Command::new(BINARY)
        .arg("health")
        .env("SBX_PORT", server.address.port().to_string())
        .status();
    assert!(health.unwrap().success());
    assert_eq!(server.get("/health").status, 200);
    // The operator can act with its own token, even in a sandbox.
    let reply = server.post(
        &neighbour.target("exec"),
        &serde_json::json!({ "cmd": "echo here" }),
    );
    assert!(reply.text().contains("here"), "{}", reply.text());
    let delete = format!("/v1/sandboxes/{}", attackers[0].id);
    assert_eq!(server.delete(&delete).status, 200);
    wait_until("the connections end with their sandbox", PATIENCE, || {
        held[0]
            .iter()
            .all(|connection| is_closed(&connection.stream))
    });
}

#[test]
fn the_oldest_connection_without_a_token_makes_room() {
    let server = Server::builder().env("SBX_MAX_CONNECTIONS", 8).start();
    let port = server.address.port();
    let connect = || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    let mut held: Vec<TcpStream> = (0..8).map(|_| connect()).collect();
    held[7].write_all(b"GET /health HTTP/1.1\r\n").unwrap();
    for _ in 0..3 {
        assert_eq!(server.get("/health").status, 200);
    }
    // Those of the tests have closed again, so one or more of the oldest made room and the newest did not.
    wait_until("the oldest was closed", PATIENCE, || is_closed(&held[0]));
    held[7]
        .write_all(b"Host: x\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut newest = Connection::over(held.pop().unwrap(), None);
    let replies = parse_replies(&newest.read_to_close()).unwrap();
    assert_eq!(replies[0].status, 200);
}

#[test]
fn a_sandbox_that_opens_connections_as_fast_as_it_can() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let (attacker, neighbour) = (server.sandbox(), server.sandbox());
    let address = server.address.to_string();
    let probe = Probe::new(&attacker);
    // It holds few of them, and many. How many are refused depends on how fast the machine lets it be.
    for kept in ["8", "64"] {
        std::thread::scope(|scope| {
            let flood = scope.spawn(|| probe.run(&[&["flood", &address, kept, "3000"]]));
            while !flood.is_finished() {
                expect_service(&server, &neighbour);
            }
            flood.join().unwrap()
        });
        let threads = status_of(server.inner_pid(), "Threads");
        assert!(threads < 400, "{threads} threads");
        assert_eq!(attacker.sh("echo here"), "here\n");
    }
}

/// A client that is no sandbox may be as fast as it can.
#[test]
fn an_operator_that_opens_connections_as_fast_as_it_can() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    assert_eq!(server.get("/v1/sandboxes").status, 200);
                }
            });
        }
    });
    assert_eq!(sandbox.sh("echo here"), "here\n");
}

/// Whether the server has closed a connection that it has sent nothing on.
fn is_closed(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let mut byte = [0];
    let result = stream.peek(&mut byte);
    stream.set_nonblocking(false).unwrap();
    !matches!(result, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}

/// The refusal of a tenant that has too many reaches a client that is still sending.
#[test]
fn a_refusal_reaches_a_client_that_is_still_sending() {
    if !is_root() {
        skip!("needs root");
    }
    let server = host();
    let attacker = server.sandbox();
    let target = attacker.target("processes");
    let _held: Vec<_> = (0..ALL)
        .map_while(|_| hold(attacker.connect(), &target))
        .collect();
    let mut connection = attacker.connect();
    let length = format!("Content-Length: {}\r\n", 4 << 20);
    let request = head(&attacker, "PUT", "files/write?path=file", &length);
    connection.send(&[request, vec![b'x'; 4 << 20]].concat());
    let reply = connection.read_reply();
    assert_eq!((reply.status, &*reply.code()), (503, "over_limit"));
}
