//! Connections: kept alive, pipelined, closed and half-closed.

use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Trap, converse, converse_and_finish, head, joined, lossy};
use crate::fixture::{Server, TOKEN, TempDir, find, parse_replies};

#[test]
fn a_connection_serves_many_requests_and_survives_ordinary_errors() {
    let server = Server::start();
    let mut connection = server.connect();
    for round in 0..200 {
        assert_eq!(
            connection.request("GET", "/health", &[], b"").status,
            200,
            "{round}"
        );
        assert_eq!(connection.request("GET", "/nope", &[], b"").status, 404);
        assert_eq!(
            connection.request("PATCH", "/health", &[], b"body").status,
            405
        );
        assert_eq!(
            connection.request("POST", "/v1/exec", &[], b"{").status,
            400
        );
    }
    let token = connection.token.replace("wrong".to_owned());
    assert_eq!(
        connection.request("GET", "/v1/processes", &[], b"").status,
        403
    );
    connection.token = token;
    let body = json!({"cmd": "echo still here"}).to_string();
    for _ in 0..3 {
        let reply = connection.request("POST", "/v1/exec", &[], body.as_bytes());
        assert!(
            reply.text().contains("still here"),
            "a stream keeps the connection too"
        );
    }
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = Server::start();
    let dir = TempDir::new();
    let write = format!("/v1/files/write?path={}", dir.join("file"));
    let read = format!("/v1/files/read?path={}", dir.join("file"));
    let mut request = Vec::new();
    for round in 0..50 {
        let text = format!("text {round}");
        let exec = json!({"cmd": ["echo", text]}).to_string();
        let length = |size: usize| format!("Content-Length: {size}");
        request.extend(head("PUT", &write, length(text.len()).as_bytes()));
        request.extend(text.as_bytes());
        request.extend(head("GET", &read, b""));
        request.extend(head("HEAD", &read, b""));
        request.extend(head("GET", "/nope", b""));
        request.extend(head("OPTIONS", &read, b""));
        request.extend(head("PUT", &write, b"Transfer-Encoding: chunked"));
        request.extend(format!("3\r\nnew\r\n{:x}\r\n{round:02}\r\n0\r\n\r\n", 2).as_bytes());
        request.extend(head("GET", &read, b""));
        request.extend(head("POST", "/v1/exec", length(exec.len()).as_bytes()));
        request.extend(exec.as_bytes());
    }
    let mut connection = server.connect();
    let mut sender = connection.stream.try_clone().unwrap();
    let sending = thread::spawn(move || sender.write_all(&request).unwrap());
    for round in 0..50 {
        assert_eq!(connection.read_reply().status, 200);
        assert_eq!(connection.read_reply().text(), format!("text {round}"));
        let reply = connection.read_reply_to("HEAD");
        assert_eq!(
            reply.header("content-length"),
            Some(if round < 10 { "6" } else { "7" })
        );
        assert_eq!(connection.read_reply().status, 404);
        assert_eq!(connection.read_reply().status, 204);
        assert_eq!(connection.read_reply().status, 200);
        assert_eq!(connection.read_reply().text(), format!("new{round:02}"));
        assert!(
            connection
                .read_reply()
                .text()
                .contains(&format!("text {round}\\n"))
        );
    }
    sending.join().unwrap();
}

#[test]
fn nothing_is_executed_behind_a_request_that_closes() {
    let server = Server::start();
    for first in [
        head("GET", "/health", b"Connection: close"),
        head("GET", "/health", b"connection: CLOSE"),
        head("GET", "/health", b"Connection: foo, close"),
        head("GET", "/health", b"Connection: foo\r\nConnection: close"),
        head("GET", "/nope", b"Connection: close"),
        b"GET /health HTTP/1.0\r\n\r\n".to_vec(),
        b"GET /health HTTP/1.0\r\nConnection: close\r\n\r\n".to_vec(),
        b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n".to_vec(),
    ] {
        let trap = Trap::new();
        let received = converse(&server, &joined(&[&first, &trap.smuggled()]));
        let replies = parse_replies(&received).unwrap();
        assert_eq!(replies.len(), 1, "{}: {}", lossy(&first), lossy(&received));
        assert_eq!(
            replies[0].header("connection"),
            Some("close"),
            "{}",
            lossy(&first)
        );
        assert!(!trap.has("smuggled"), "{}", lossy(&first));
    }
}

#[test]
fn http_1_0_gets_streams_that_end_with_the_connection() {
    let server = Server::start();
    let body = json!({"cmd": "echo one; echo two >&2; exit 3"}).to_string();
    let request = format!(
        "POST /v1/exec HTTP/1.0\r\nX-Sandbox-Token: {TOKEN}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let received = converse(&server, request.as_bytes());
    let end = find(&received, b"\r\n\r\n").unwrap();
    let head = lossy(&received[..end]).to_ascii_lowercase();
    assert!(head.contains(" 200 "), "{head}");
    assert!(
        !head.contains("transfer-encoding"),
        "chunks mean nothing to HTTP/1.0: {head}"
    );
    assert!(!head.contains("content-length"), "{head}");
    let events: Vec<Value> = received[end + 4..]
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect();
    assert_eq!(events[0]["event"], "start");
    assert_eq!(events.last().unwrap()["exit_code"], 3);
    // A 100 would be an answer to such a client.
    let dir = TempDir::new();
    let request = format!(
        "PUT /v1/files/write?path={} HTTP/1.0\r\nX-Sandbox-Token: {TOKEN}\r\n\
         Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
        dir.join("file")
    );
    let replies = parse_replies(&converse(&server, request.as_bytes())).unwrap();
    assert_eq!(
        replies.iter().map(|reply| reply.status).collect::<Vec<_>>(),
        [200]
    );
    assert_eq!(std::fs::read(dir.join("file")).unwrap(), b"hello");
}

#[test]
fn chunked_framing_in_http_1_0_is_not_believed() {
    // A recipient of that version in between would not have understood it.
    let server = Server::start();
    let trap = Trap::new();
    let request = format!(
        "PUT /v1/files/write?path={} HTTP/1.0\r\nX-Sandbox-Token: {TOKEN}\r\n\
         Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        trap.victim()
    );
    let received = converse(&server, &joined(&[request.as_bytes(), &trap.smuggled()]));
    let replies = parse_replies(&received).unwrap();
    assert_eq!(replies.len(), 1, "{}", lossy(&received));
    assert_eq!(replies[0].header("connection"), Some("close"));
    assert!(!trap.has("smuggled"));
}

#[test]
fn streams_have_the_headers_that_keep_proxies_from_collecting_them() {
    let server = Server::start();
    let mut connection = server.connect();
    let body = json!({"cmd": "echo hi"}).to_string();
    let reply = connection.request("POST", "/v1/exec", &[], body.as_bytes());
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    assert_eq!(reply.header("transfer-encoding"), Some("chunked"));
    assert_eq!(reply.header("x-accel-buffering"), Some("no"));
    assert_eq!(reply.header("content-length"), None);
    let id = server.spawn(&json!({"cmd": "echo hi"}))["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let target = format!("/v1/processes/{id}/logs?follow=1");
    let reply = connection.request("GET", &target, &[], b"");
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    assert_eq!(reply.header("transfer-encoding"), Some("chunked"));
    assert_eq!(reply.header("x-accel-buffering"), Some("no"));
}

#[test]
fn a_client_that_half_closes_still_gets_its_answers() {
    let server = Server::start();
    let dir = TempDir::new();
    let write = format!("/v1/files/write?path={}", dir.join("file"));
    let one = head("GET", "/health", b"");
    let replies = converse_and_finish(&server, &one);
    assert_eq!(
        replies.iter().map(|reply| reply.status).collect::<Vec<_>>(),
        [200]
    );

    let put = joined(&[&head("PUT", &write, b"Content-Length: 5"), b"hello"]);
    let replies = converse_and_finish(&server, &joined(&[&one, &put, &one]));
    assert_eq!(
        replies.iter().map(|reply| reply.status).collect::<Vec<_>>(),
        [200, 200, 200]
    );
    assert_eq!(std::fs::read(dir.join("file")).unwrap(), b"hello");

    // A command that is quiet for longer than it takes to notice a client that is gone.
    let body = json!({"cmd": "sleep 2; echo late; exit 4"}).to_string();
    let line = format!("Content-Length: {}", body.len());
    let exec = joined(&[&head("POST", "/v1/exec", line.as_bytes()), body.as_bytes()]);
    let replies = converse_and_finish(&server, &exec);
    assert_eq!(replies.len(), 1);
    assert!(
        replies[0].text().contains("late\\n"),
        "{}",
        replies[0].text()
    );
    assert!(
        replies[0].text().contains("\"exit_code\":4"),
        "{}",
        replies[0].text()
    );
}

#[test]
fn a_client_that_half_closes_in_the_middle_is_not_waited_for() {
    let server = Server::start();
    let trap = Trap::new();
    let started = Instant::now();
    for bytes in [
        b"GET /hea".to_vec(),
        head("GET", "/health", b"")[..40].to_vec(),
        joined(&[&trap.victim_head(b"Content-Length: 5"), b"123"]),
        joined(&[
            &trap.victim_head(b"Transfer-Encoding: chunked"),
            b"5\r\nhello\r\n",
        ]),
        joined(&[
            &head("POST", "/v1/exec", b"Content-Length: 50"),
            b"{\"cmd\":",
        ]),
        joined(&[&head("PUT", "/v1/nope", b"Content-Length: 50"), b"12345"]),
    ] {
        for reply in converse_and_finish(&server, &bytes) {
            assert!(
                [400, 404].contains(&reply.status),
                "{}: {reply:?}",
                lossy(&bytes)
            );
        }
    }
    assert!(
        started.elapsed() < Duration::from_secs(8),
        "no deadline was waited for"
    );
    assert!(!trap.has("victim"));
}
