//! Which ports listen, and waiting for one.

use std::net::{Shutdown, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Backend;
use crate::fixture::{
    Mark, ReservedPort, Server, TempDir, cpu_time_of, reset, status_of, wait_until,
};

/// What the server lists at `address`. Tests beside this one listen on ports of their own, and the same number may be
/// theirs on another address.
fn listed(server: &Server, address: SocketAddr) -> Option<Value> {
    let all = server.get("/v1/ports").json();
    let all = all.as_array().expect("an array").clone();
    all.into_iter().find(|entry| {
        entry["port"] == address.port() && entry["address"] == address.ip().to_string()
    })
}

#[test]
fn what_listens_is_listed_with_its_process() {
    let server = Server::start();
    let limit = Duration::from_secs(10);
    for address in ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0"] {
        let Ok(listener) = TcpListener::bind(address) else {
            continue;
        };
        let address = listener.local_addr().unwrap();
        // The kernel's table may skip a socket while others in it go away.
        let mut entry = None;
        wait_until("it is listed", limit, || {
            entry = listed(&server, address);
            entry.is_some()
        });
        let entry = entry.unwrap();
        assert_eq!(entry["pid"], std::process::id());
        assert!(
            entry["command"].as_str().unwrap().contains("suite"),
            "{entry}"
        );
        drop(listener);
        // A child of a test beside this one may hold it until its execve.
        wait_until("it is listed no more", limit, || {
            listed(&server, address).is_none()
        });
    }
    wait_until("the server itself is listed", limit, || {
        listed(&server, server.address).is_some_and(|own| own["pid"] == server.pid())
    });
    // A connection is nothing that listens.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    assert_eq!(listed(&server, client.local_addr().unwrap()), None);
}

#[test]
fn waiting_ends_when_something_listens() {
    let server = Server::start();
    let reserved = ReservedPort::new();
    let port = reserved.number();
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let path = format!("/v1/ports/{port}/wait?timeout=20");
    assert_eq!(
        server.get(&path).json(),
        json!({ "port": port, "listening": true })
    );
    drop(listener);
    let mut waiting = server.connect();
    waiting.send_request("GET", &path, &[], b"");
    waiting.read_head();
    thread::sleep(Duration::from_millis(300));
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let begun = Instant::now();
    let chunk = waiting.read_chunk().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(4));
    let document: Value = serde_json::from_slice(&chunk).unwrap();
    assert_eq!(document["listening"], true);
    // Looking did not disturb it.
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "somebody connected");
}

#[test]
fn waiting_ends_in_time() {
    let server = Server::start();
    let reserved = ReservedPort::new();
    let port = reserved.number();
    let begun = Instant::now();
    let reply = server.get(&format!("/v1/ports/{port}/wait?timeout=0.3"));
    assert!(begun.elapsed() >= Duration::from_millis(300));
    assert_eq!(reply.status, 200);
    assert_eq!(reply.json(), json!({ "port": port, "listening": false }));
    let reply = server.get(&format!("/v1/ports/{port}/wait?timeout=0"));
    assert_eq!(reply.json()["listening"], false);
    // One that the proxy would not reach does not count.
    let _listener = TcpListener::bind(("127.0.0.2", port)).unwrap();
    let reply = server.get(&format!("/v1/ports/{port}/wait?timeout=0"));
    assert_eq!(reply.json()["listening"], false);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let server = Server::start();
    for path in [
        "/v1/ports/0/wait",
        "/v1/ports/http/wait",
        "/v1/ports/80/wait?timeout=soon",
        "/v1/ports/80/wait?timeout=-1",
    ] {
        let reply = server.get(path);
        assert_eq!(
            (reply.status, &*reply.code()),
            (400, "bad_request"),
            "{path}"
        );
    }
    for path in ["/v1/ports/", "/v1/ports/80", "/v1/ports/80/wait/"] {
        assert_eq!(server.get(path).status, 404, "{path}");
    }
    let reply = server.request("DELETE", "/v1/ports", b"");
    assert_eq!(
        (reply.status, reply.header("allow")),
        (405, Some("GET, HEAD, OPTIONS"))
    );
    let mut stranger = server.connect();
    stranger.token = None;
    assert_eq!(stranger.request("GET", "/v1/ports", &[], b"").status, 403);
}

#[test]
fn waiting_keeps_its_client_company_and_ends_with_it() {
    let server = Server::builder().env("SBX_PING_SECS", 1).start();
    let reserved = ReservedPort::new();
    let path = format!("/v1/ports/{}/wait", reserved.number());
    server.get("/health");
    let threads = status_of(server.pid(), "Threads");
    let mut waiting = server.connect();
    waiting.send_request("GET", &path, &[], b"");
    waiting.read_head();
    assert_eq!(waiting.read_chunk().unwrap(), b" ");
    let before = cpu_time_of(server.pid());
    assert_eq!(waiting.read_chunk().unwrap(), b" ");
    let used = cpu_time_of(server.pid()).saturating_sub(before);
    assert!(used < Duration::from_millis(200), "{used:?}");
    reset(waiting);
    let mut other = server.connect();
    other.send_request("GET", &path, &[], b"");
    other.read_head();
    other.stream.shutdown(Shutdown::Both).unwrap();
    drop(other);
    wait_until("nobody waits any more", Duration::from_secs(3), || {
        status_of(server.pid(), "Threads") <= threads
    });
}

#[test]
fn a_server_is_started_waited_for_and_used() {
    if std::process::Command::new("python3")
        .arg("-V")
        .output()
        .is_err()
    {
        crate::skip!("python3 is not installed");
    }
    let server = Server::start();
    let directory = TempDir::new();
    let mark = Mark::new();
    std::fs::write(directory.join("page"), "it works").unwrap();
    let reserved = ReservedPort::new();
    let port = reserved.number();
    server.spawn(&json!({
        "cmd": ["python3", "-m", "http.server", port.to_string(), "--bind", "127.0.0.1", "--directory",
                directory.path().to_str().unwrap()],
        "env": { "MARK": mark.to_string() },
        "id": "web",
    }));
    let reply = server.get(&format!("/v1/ports/{port}/wait?timeout=20"));
    assert_eq!(reply.json()["listening"], true);
    let entry = listed(&server, SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
    assert!(
        entry["command"]
            .as_str()
            .unwrap()
            .contains(" -m http.server")
    );
    assert_eq!(
        server.get(&format!("/v1/proxy/{port}/page")).text(),
        "it works"
    );
    server.delete("/v1/processes/web");
}

/// Many wait for the same server and use it at once.
#[test]
fn a_crowd_waits_for_one_server() {
    let server = Arc::new(Server::start());
    let reserved = ReservedPort::new();
    let port = reserved.number();
    let count = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..30)
        .map(|_| {
            let (server, count) = (Arc::clone(&server), Arc::clone(&count));
            thread::spawn(move || {
                let reply = server.get(&format!("/v1/ports/{port}/wait?timeout=20"));
                assert_eq!(reply.json()["listening"], true);
                assert_eq!(server.get(&format!("/v1/proxy/{port}/")).text(), "fine");
                count.fetch_add(1, Ordering::Relaxed);
            })
        })
        .collect();
    thread::sleep(Duration::from_millis(200));
    let _backend = Backend::on(&format!("127.0.0.1:{port}"), |mut connection| {
        connection.read_request();
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfine");
    });
    for client in clients {
        client.join().unwrap();
    }
    assert_eq!(count.load(Ordering::Relaxed), 30);
}
