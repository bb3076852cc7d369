//! Limits: each size is accepted up to its limit and refused above it, with its own status.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{Trap, assert_error_shape, converse, converse_and_finish, head, joined};
use crate::fixture::{Server, TempDir, parse_replies};

/// A head of exactly `size` bytes, its request line and its empty line included.
fn head_of(size: usize, long_lines: bool) -> Vec<u8> {
    let start = head("GET", "/health", b"");
    let mut bytes = start[..start.len() - 2].to_vec();
    let mut left = size - start.len();
    if !long_lines {
        // Not very many either: their number may have a limit of its own.
        let line = format!("A: {}\r\n", "b".repeat(500));
        while left > 2 * line.len() {
            bytes.extend_from_slice(line.as_bytes());
            left -= line.len();
        }
    }
    assert!(left > 5, "room for one line");
    bytes.extend_from_slice(format!("X: {}\r\n\r\n", "y".repeat(left - 5)).as_bytes());
    assert_eq!(bytes.len(), size);
    bytes
}

#[test]
fn a_head_may_have_64_kib_and_no_more() {
    let server = Server::start();
    let trap = Trap::new();
    for long_lines in [true, false] {
        let replies = converse_and_finish(&server, &head_of(65_536, long_lines));
        assert_eq!(replies[0].status, 200, "{}", replies[0].text());
        // The empty line at the end may count or not.
        let request = head_of(65_536 + 5, long_lines);
        trap.expect_refusal(&server, "a head too long", &request, &[431]);
        let request = head_of(1_000_000, long_lines);
        trap.expect_refusal(&server, "a head far too long", &request, &[431]);
    }
}

#[test]
fn a_head_without_an_end_is_refused_at_the_limit() {
    let server = Server::start();
    let started = Instant::now();
    let request = joined(&[
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
        &vec![b'y'; 66_000],
    ]);
    let replies = parse_replies(&converse(&server, &request)).unwrap();
    assert_eq!(replies[0].status, 431);
    assert!(
        started.elapsed() < Duration::from_secs(8),
        "by the limit, not by the deadline"
    );
}

#[test]
fn a_target_may_have_16_kib_and_no_more() {
    let server = Server::start();
    let mut connection = server.connect();
    let target = |size: usize| format!("/health?{}", "x".repeat(size - "/health?".len()));
    assert_eq!(
        connection.request("GET", &target(16_384), &[], b"").status,
        200
    );
    let reply = connection.request("GET", &target(16_385), &[], b"");
    assert_eq!(reply.status, 414);
    assert_error_shape(&reply, "414");
    // A target that never ends: either limit may be the one that it meets.
    let request = joined(&[b"GET /", &vec![b'y'; 70_000]]);
    let replies = parse_replies(&converse(&server, &request)).unwrap();
    assert!(
        [414, 431].contains(&replies[0].status),
        "{}",
        replies[0].text()
    );
    assert_eq!(replies.len(), 1);
}

#[test]
fn a_json_body_may_have_16_mib_and_no_more() {
    const LIMIT: usize = 16 << 20;
    let server = Server::start();
    let mut body = br#"{"cmd":"echo fits"}"#.to_vec();
    body.resize(LIMIT, b' ');
    let reply = server.request("POST", "/v1/exec", &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(reply.text().contains("fits\\n"));

    // One byte more is refused by its length, before any of it is sent.
    for target in ["/v1/exec", "/v1/processes"] {
        let mut connection = server.connect();
        let line = format!("Content-Length: {}", LIMIT + 1);
        connection.send(&head("POST", target, line.as_bytes()));
        let reply = connection.read_reply();
        assert_eq!(reply.status, 413);
        assert_error_shape(&reply, "413");
        assert_eq!(reply.header("connection"), Some("close"));
        connection.expect_close();
    }

    // Without a length it is refused once it is too long.
    body.push(b' ');
    let mut request = head("POST", "/v1/exec", b"Transfer-Encoding: chunked");
    for chunk in body.chunks(1 << 20) {
        request.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        request.extend_from_slice(chunk);
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"0\r\n\r\n");
    let replies = converse_and_finish(&server, &request);
    assert_eq!(replies.len(), 1);
    assert_eq!(replies[0].status, 413);
}

#[test]
fn the_limit_of_json_is_not_one_of_files() {
    let server = Server::start();
    let dir = TempDir::new();
    let data = vec![b'x'; (16 << 20) + 1];
    let reply = server.put(
        &format!("/v1/files/write?path={}", dir.join("large")),
        &data,
    );
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(
        std::fs::metadata(dir.join("large")).unwrap().len(),
        data.len() as u64
    );
}

#[test]
fn deeply_nested_json_is_refused_and_harmless() {
    // Recursion without a limit would overflow the stack, which no unwinding catches.
    let mut server = Server::start();
    for opening in ["[", "{\"a\":", "{\"cmd\":\"true\",\"ignored\":["] {
        let mut body = opening.repeat(1_000_000 / opening.len());
        body.insert_str(0, "{\"cmd\":\"true\",\"x\":");
        let reply = server.request("POST", "/v1/exec", body.as_bytes());
        assert_eq!(reply.status, 400, "{}", reply.text());
        // The same, closed properly: only its depth can be wrong.
        let depth = 200_000;
        let body = format!(
            "{{\"cmd\":\"true\",\"x\":{}{}}}",
            "[".repeat(depth),
            "]".repeat(depth)
        );
        let reply = server.request("POST", "/v1/exec", body.as_bytes());
        assert!([200, 400].contains(&reply.status), "{}", reply.text());
    }
    assert!(server.is_running());
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn a_body_that_must_have_a_length_is_411_without_one() {
    let server = Server::start();
    let dir = TempDir::new();
    let write = format!("/v1/files/write?path={}", dir.join("file"));
    let process = server.spawn(&json!({"cmd": "cat"}))["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let stdin = format!("/v1/processes/{process}/stdin");
    for (method, target) in [
        ("POST", "/v1/exec"),
        ("POST", "/v1/processes"),
        ("PUT", write.as_str()),
        ("POST", write.as_str()),
        ("POST", stdin.as_str()),
        ("PUT", stdin.as_str()),
    ] {
        let mut connection = server.connect();
        connection.send(&head(method, target, b""));
        let reply = connection.read_reply();
        assert_eq!(reply.status, 411, "{method} {target}: {}", reply.text());
        assert_error_shape(&reply, target);
    }
    assert!(!Path::new(&dir.join("file")).exists());
    assert_eq!(
        server.delete(&format!("/v1/processes/{process}")).status,
        200
    );
}
