//! Connections to servers inside serve several requests of one client, and nobody else's.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;

use super::{Accepted, Backend};
use crate::fixture::{Connection, PATIENCE, Server, TOKEN};

/// Answers each request with the number of its connection, and perhaps with more behind it.
fn counting(more: &'static str) -> Backend {
    numbered(move |number, connection| {
        while connection.read_request().is_some() {
            let text = format!("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{number}{more}");
            connection.send(text);
        }
    })
}

/// A server that knows the number of each of its connections.
fn numbered(serve: impl Fn(usize, &mut Accepted) + Send + Sync + 'static) -> Backend {
    let count = Arc::new(AtomicUsize::new(0));
    Backend::start(move |mut connection| {
        serve(count.fetch_add(1, Ordering::Relaxed), &mut connection);
    })
}

/// The number that the server answers.
#[track_caller]
fn get(client: &mut Connection, target: &str) -> String {
    let reply = client.request("GET", target, &[], b"");
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.text()
}

#[test]
fn requests_of_a_client_follow_each_other_on_one_connection() {
    let (server, backend) = (Server::start(), counting(""));
    let path = backend.path("/");
    let mut client = server.connect();
    for _ in 0..3 {
        assert_eq!(get(&mut client, &path), "0");
        let received = backend.next();
        assert!(received.values("connection").is_empty(), "{received:?}");
    }
    // One that cannot be repeated gets a fresh one, which stays for the next.
    let posted = client.request("POST", &path, &[], b"body");
    assert_eq!(posted.text(), "1");
    assert_eq!(get(&mut client, &path), "1");
    let head = client.request("HEAD", &path, &[], b"");
    assert_eq!(head.status, 200);
}

#[test]
fn a_connection_belongs_to_one_client_one_way_and_one_credential() {
    let server = Server::start();
    let (backend, other) = (counting(""), counting(""));
    let path = backend.path("/");
    let mut client = server.connect();
    assert_eq!(get(&mut client, &path), "0");
    assert_eq!(get(&mut server.connect(), &path), "1");
    assert_eq!(get(&mut client, &path), "0");
    let bearer = [("Authorization", "Bearer something-for-a-proxy-before")];
    let reply = client.request("GET", &path, &bearer, b"");
    assert_eq!(reply.text(), "2");
    assert_eq!(get(&mut client, &path), "3");
    assert_eq!(get(&mut client, &other.path("/")), "0");
    let named = client.request("GET", &path, &[("Host", "elsewhere.example")], b"");
    assert_eq!(named.text(), "4");
}

/// Whatever leaves a doubt where the answer ended, or whether there is room for another.
#[test]
fn a_doubt_ends_a_connection() {
    let server = Server::start();
    let mut client = server.connect();
    let with_more = counting("x").path("/");
    for expected in ["0", "1"] {
        assert_eq!(get(&mut client, &with_more), expected);
    }
    for answer in [
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\n",
        "HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n",
        "HTTP/1.0 200 OK\r\nContent-Length: 1\r\nConnection: keep-alive\r\n\r\n",
    ] {
        let backend = numbered(move |number, connection| {
            while connection.read_request().is_some() {
                connection.send(format!("{answer}{number}"));
            }
        });
        for expected in ["0", "1"] {
            assert_eq!(get(&mut client, &backend.path("/")), expected, "{answer}");
        }
    }
    // A server that answers before it has read the request goes on reading what it does not want.
    let early = numbered(|number, connection| {
        let _ = connection.read_head();
        connection.send(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{number}"
        ));
        connection.read_to_end();
    });
    let mut other = server.connect();
    other.send(
        format!(
            "POST {} HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {TOKEN}\r\nContent-Length: 2\r\n\r\na",
            early.path("/")
        )
        .as_bytes(),
    );
    assert_eq!(other.read_reply().text(), "0");
    other.send(b"b");
    assert_eq!(get(&mut other, &early.path("/")), "1");
}

#[test]
fn a_request_is_repeated_when_its_connection_was_closed_meanwhile() {
    let server = Server::start();
    let backend = numbered(|number, connection| {
        connection.read_request();
        connection.send(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{number}"
        ));
        // The next request is on its way when the connection is closed.
        connection.read_request();
    });
    let mut client = server.connect();
    for expected in ["0", "1", "2"] {
        assert_eq!(get(&mut client, &backend.path("/")), expected);
    }
    // But not when a part of an answer has come.
    let broken = numbered(|number, connection| {
        connection.read_request();
        connection.send(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{number}"
        ));
        connection.read_request();
        connection.send("HTTP/1.1 200 O");
    });
    assert_eq!(get(&mut client, &broken.path("/")), "0");
    let reply = client.request("GET", &broken.path("/"), &[], b"");
    assert_eq!((reply.status, &*reply.code()), (502, "bad_response"));
}

/// A server that serves one connection at a time has others to serve.
#[test]
fn a_connection_is_closed_a_moment_after_the_answer() {
    let server = Server::start();
    let (ended, end) = channel();
    let backend = Backend::start(move |mut connection| {
        connection.read_request();
        connection.send("HTTP/1.1 204 No Content\r\n\r\n");
        assert!(connection.read_request().is_none());
        ended.send(()).unwrap();
    });
    let mut client = server.connect();
    let reply = client.request("GET", &backend.path("/"), &[], b"");
    assert_eq!(reply.status, 204);
    end.recv_timeout(PATIENCE).unwrap();
    assert_eq!(client.request("GET", "/health", &[], b"").status, 200);
}
