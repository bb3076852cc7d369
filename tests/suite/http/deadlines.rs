//! Deadlines of slow clients. They are long, so each test waits for all of its connections at once.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::{assert_error_shape, head, joined};
use crate::fixture::{Connection, Server, TempDir};

#[test]
fn a_slow_head_has_10_seconds_and_a_slow_body_or_an_idle_connection_more() {
    let server = Arc::new(Server::start());
    let dir = Arc::new(TempDir::new());
    let mut waiting = Vec::new();

    // A head that trickles is not kept alive by its bytes. On the second request of a connection
    // the clock starts with that request.
    for earlier_requests in [0, 1] {
        let server = Arc::clone(&server);
        waiting.push(thread::spawn(move || {
            let mut connection = server.connect();
            for _ in 0..earlier_requests {
                assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
            }
            let started = Instant::now();
            let stop = trickle(
                &connection,
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
            );
            let reply = connection.read_reply();
            let after = started.elapsed();
            drop(stop);
            assert_eq!(reply.status, 408, "{}", reply.text());
            assert_error_shape(&reply, "408");
            assert_eq!(reply.header("connection"), Some("close"));
            assert!(
                after > Duration::from_secs(9),
                "a head has 10 s, not {after:?}"
            );
            assert!(
                after < Duration::from_secs(14),
                "a head has 10 s, not {after:?}"
            );
            connection.expect_close();
        }));
    }

    // Nothing at all is not a slow head: clients keep connections for later.
    for with_request in [false, true] {
        let server = Arc::clone(&server);
        waiting.push(thread::spawn(move || {
            let mut connection = server.connect();
            if with_request {
                assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
            }
            thread::sleep(Duration::from_secs(13));
            assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
        }));
    }

    // A head that is slow and in time, and a body with a long pause in it.
    for (name, cut, pause) in [("head", 20, 7), ("body", 5, 13)] {
        let (server, dir) = (Arc::clone(&server), Arc::clone(&dir));
        waiting.push(thread::spawn(move || {
            let mut connection = server.connect();
            let target = format!("/v1/files/write?path={}", dir.join(name));
            let request = joined(&[&head("PUT", &target, b"Content-Length: 10"), b"0123456789"]);
            let cut = if name == "head" {
                cut
            } else {
                request.len() - cut
            };
            connection.send(&request[..cut]);
            thread::sleep(Duration::from_secs(pause));
            connection.send(&request[cut..]);
            assert_eq!(connection.read_reply().status, 200, "{name}");
            assert_eq!(std::fs::read(dir.join(name)).unwrap(), b"0123456789");
        }));
    }
    for thread in waiting {
        thread.join().unwrap();
    }
}

/// Sends `start` and then a byte every half second until the returned value is dropped.
fn trickle(connection: &Connection, start: &[u8]) -> std::sync::mpsc::Sender<()> {
    let mut stream = connection.stream.try_clone().unwrap();
    stream.write_all(start).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    thread::spawn(move || {
        let pause = Duration::from_millis(500);
        while receiver.recv_timeout(pause) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            if stream.write_all(b"y").is_err() {
                break;
            }
        }
    });
    sender
}

#[test]
#[ignore = "takes two minutes: the deadlines of bodies (60 s) and idle connections (120 s)"]
fn a_stalled_body_is_408_and_an_idle_connection_closes_silently() {
    let server = Arc::new(Server::start());
    let dir = TempDir::new();
    let target = format!("/v1/files/write?path={}", dir.join("stalled"));
    let stalled = {
        let server = Arc::clone(&server);
        thread::spawn(move || {
            let mut connection = server.connect();
            connection
                .stream
                .set_read_timeout(Some(Duration::from_secs(90)))
                .unwrap();
            connection.send(&joined(&[
                &head("PUT", &target, b"Content-Length: 10"),
                b"0123",
            ]));
            let started = Instant::now();
            let reply = connection.read_reply();
            assert_eq!(reply.status, 408);
            assert!(
                (55..70).contains(&started.elapsed().as_secs()),
                "{:?}",
                started.elapsed()
            );
            connection.expect_close();
        })
    };
    let mut idle = server.connect();
    idle.stream
        .set_read_timeout(Some(Duration::from_secs(180)))
        .unwrap();
    let started = Instant::now();
    idle.expect_close();
    assert!(
        (110..135).contains(&started.elapsed().as_secs()),
        "{:?}",
        started.elapsed()
    );
    stalled.join().unwrap();
    assert!(!Path::new(&dir.join("stalled")).exists());
}
