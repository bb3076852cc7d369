//! The body of a refused request never becomes the next request, and the client sees the refusal.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use super::{Trap, assert_error_shape, converse, head, joined, lossy};
use crate::fixture::{PATIENCE, Server, TOKEN, parse_replies};

#[test]
fn the_body_of_a_refused_request_is_skipped_up_to_64_kib() {
    let server = Server::start();
    let small = vec![b'x'; 65_536];
    let mut connection = server.connect();
    for _ in 0..3 {
        assert_eq!(
            connection.request("PUT", "/v1/nope", &[], &small).status,
            404
        );
        assert_eq!(
            connection.request("PATCH", "/v1/exec", &[], &small).status,
            405
        );
        assert_eq!(
            connection
                .request("PUT", "/v1/files/write?path=", &[], &small)
                .status,
            400
        );
        let token = connection.token.replace("wrong".to_owned());
        assert_eq!(
            connection.request("POST", "/v1/exec", &[], &small).status,
            403
        );
        connection.token = token;
        connection.send(&joined(&[
            &head("PUT", "/v1/nope", b"Transfer-Encoding: chunked"),
            b"7000\r\n",
            &small[..0x7000],
            b"\r\n0\r\n\r\n",
        ]));
        assert_eq!(connection.read_reply().status, 404);
    }
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
}

#[test]
fn a_longer_body_of_a_refused_request_is_not_waited_for() {
    let server = Server::start();
    for (line, first) in [
        ("Content-Length: 65537", &b""[..]),
        ("Content-Length: 1000000000000", &b""[..]),
        ("Transfer-Encoding: chunked", &b"fffffff\r\n"[..]),
    ] {
        for (method, target, token, status) in [
            ("PUT", "/v1/nope", TOKEN, 404),
            ("PATCH", "/v1/exec", TOKEN, 405),
            ("PUT", "/v1/files/write?path=", TOKEN, 400),
            ("POST", "/v1/exec", "wrong", 403),
        ] {
            let mut connection = server.connect();
            let started = Instant::now();
            let head = format!(
                "{method} {target} HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {token}\r\n{line}\r\n\r\n"
            );
            connection.send(&joined(&[head.as_bytes(), first]));
            if line.starts_with("Transfer") {
                // Only what was sent can show how long it is.
                let _ = connection.stream.write_all(&vec![b'x'; 200_000]);
            }
            let reply = connection.read_reply();
            assert_eq!(reply.status, status, "{method} {target} {line}");
            assert_error_shape(&reply, target);
            // Of a chunked body it is only known later that it is too long.
            let announced = reply.header("connection");
            assert!(
                announced == Some("close") || line.starts_with("Transfer"),
                "{method} {target} {line}"
            );
            connection.expect_close();
            assert!(
                started.elapsed() < Duration::from_secs(8),
                "{method} {target} {line}"
            );
        }
    }
}

#[test]
fn a_client_that_sends_everything_before_it_reads_still_sees_why_it_was_refused() {
    // Closing with unread bytes sends a reset, which breaks the client's writes and can overtake the
    // answer. The client here writes everything piece by piece, as ordinary ones do, and only then
    // reads.
    let server = Server::start();
    for (bytes, rounds) in [(1_000_000, 60), (12 << 20, 5)] {
        let body = vec![b'x'; bytes];
        let length = format!("Content-Length: {bytes}\r\n\r\n");
        let chunked = format!("Transfer-Encoding: chunked\r\n\r\n{bytes:x}\r\n");
        let malformed = "Transfer-Encoding: chunked\r\n\r\nzz\r\n";
        for (framing, token, status) in [
            (length.as_str(), "no", 403),
            (&chunked, "no", 403),
            (malformed, TOKEN, 400),
        ] {
            for round in 0..rounds {
                let mut connection = server.connect();
                let head = format!(
                    "PUT /v1/files/write?path=/x HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {token}\r\n{framing}"
                );
                connection.send(head.as_bytes());
                let sent = body
                    .chunks(4096)
                    .try_for_each(|piece| connection.stream.write_all(piece));
                assert!(sent.is_ok(), "{framing}, round {round}: {sent:?}");
                let mut received = Vec::new();
                connection.stream.read_to_end(&mut received).unwrap();
                let replies = parse_replies(&received).unwrap();
                assert_eq!(replies.len(), 1, "{framing}, round {round}");
                assert_eq!(replies[0].status, status, "{framing}, round {round}");
            }
        }
    }
}

#[test]
fn a_client_that_never_stops_sending_is_cut_off() {
    let server = Server::start();
    let piece = vec![b'x'; 1 << 20];
    // At full speed after 16 MiB and what the sockets hold, slowly after 2 s.
    for (bytes, pause) in [(1 << 20, 0), (1, 20)] {
        let mut connection = server.connect();
        let line = format!("Content-Length: {}", 1_u64 << 40);
        connection.send(&head("PUT", "/v1/nope", line.as_bytes()));
        assert_eq!(connection.read_reply().status, 404);
        let started = Instant::now();
        let mut sent = 0_u64;
        while connection.stream.write_all(&piece[..bytes]).is_ok() {
            sent += bytes as u64;
            assert!(sent < 128 << 20, "nothing limits how much is read");
            assert!(started.elapsed() < PATIENCE, "nothing limits the time");
            std::thread::sleep(Duration::from_millis(pause));
        }
        if pause > 0 {
            assert!(started.elapsed() > Duration::from_secs(1));
        }
    }
}

#[test]
fn the_end_after_a_refusal_is_an_orderly_one() {
    // A reset tells the client nothing, and makes some forget the answer that they already have.
    let server = Server::start();
    let long = joined(&[
        &head("PUT", "/v1/nope", b"Content-Length: 65537"),
        &vec![b'x'; 65_537],
    ]);
    let malformed = joined(&[&head("PUT", "/v1/nope", b"X : y"), &vec![b'x'; 20_000]]);
    let closing = joined(&[
        &head(
            "PUT",
            "/v1/nope",
            b"Connection: close\r\nContent-Length: 30000",
        ),
        &vec![b'x'; 30_000],
    ]);
    for (request, status) in [(long, 404), (malformed, 400), (closing, 404)] {
        for _ in 0..10 {
            let mut connection = server.connect();
            connection.stream.write_all(&request).unwrap();
            let mut received = Vec::new();
            connection
                .stream
                .read_to_end(&mut received)
                .expect("an end and no reset");
            let replies = parse_replies(&received).unwrap();
            assert_eq!(replies.len(), 1);
            assert_eq!(replies[0].status, status);
        }
    }
}

#[test]
fn a_refused_body_with_broken_framing_hides_no_request() {
    let server = Server::start();
    let trap = Trap::new();
    for body in [
        &b"zz\r\nhello\r\n0\r\n\r\n"[..],
        b"5\r\nhelloXX0\r\n\r\n",
        b"-1\r\n\r\n",
    ] {
        let first = joined(&[
            &head("PUT", "/v1/nope", b"Transfer-Encoding: chunked"),
            body,
        ]);
        let received = converse(&server, &joined(&[&first, &trap.smuggled()]));
        let replies = parse_replies(&received).unwrap();
        assert_eq!(replies.len(), 1, "{}: {}", lossy(body), lossy(&received));
        assert!([400, 404].contains(&replies[0].status));
        assert!(!trap.has("smuggled"), "{}", lossy(body));
    }
}
