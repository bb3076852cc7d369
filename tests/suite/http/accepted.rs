//! Valid requests are accepted in every form, and mean the same wherever TCP cuts them.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{Trap, converse_and_finish, head, joined, lossy};
use crate::fixture::{Connection, Server, TempDir, wait_until_received};

#[test]
fn lawful_variety_is_accepted() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("file");
    let mut connection = server.connect();
    let variants: &[(&[u8], &[u8])] = &[
        (b"Content-Length: 5", b"hello"),
        (b"content-length:5", b"hello"),
        (b"CONTENT-LENGTH:\t 5 \t", b"hello"),
        (b"Content-Length: 005", b"hello"),
        (b"X-Empty:\r\nContent-Length: 5", b"hello"),
        (b"X-Odd: \xe9\xff \"(),;\r\nContent-Length: 5", b"hello"),
        (
            b"!#$%&'*+-.^_`|~09aZ: odd but a token\r\nContent-Length: 5",
            b"hello",
        ),
        (b"Transfer-Encoding: chunked", b"5\r\nhello\r\n0\r\n\r\n"),
        (b"transfer-encoding:Chunked ", b"5\r\nhello\r\n0\r\n\r\n"),
        (
            b"Transfer-Encoding: chunked",
            b"1\r\nh\r\n004\r\nello\r\n000\r\n\r\n",
        ),
        (
            b"Transfer-Encoding: chunked",
            b"5;a=b;c=\"d e\"\r\nhello\r\n0;last\r\n\r\n",
        ),
        (
            b"Transfer-Encoding: chunked",
            b"5\r\nhello\r\n0\r\nA: b\r\nContent-Length: 9\r\n\r\n",
        ),
    ];
    for (lines, body) in variants {
        let _ = std::fs::remove_file(&path);
        let target = format!("/v1/files/write?path={path}");
        connection.send(&joined(&[&head("PUT", &target, lines), body]));
        let reply = connection.read_reply();
        assert_eq!(reply.status, 200, "{}: {}", lossy(lines), reply.text());
        assert_eq!(std::fs::read(&path).unwrap(), b"hello", "{}", lossy(lines));
    }
    // The hexadecimal digits of both cases.
    for size in ["1a", "1A"] {
        let target = format!("/v1/files/write?path={path}");
        let body = format!("{size}\r\nabcdefghijklmnopqrstuvwxyz\r\n0\r\n\r\n");
        connection.send(&joined(&[
            &head("PUT", &target, b"Transfer-Encoding: chunked"),
            body.as_bytes(),
        ]));
        assert_eq!(connection.read_reply().status, 200);
        assert_eq!(std::fs::read(&path).unwrap(), b"abcdefghijklmnopqrstuvwxyz");
    }
}

#[test]
fn a_request_means_the_same_wherever_it_is_cut_in_two_segments() {
    // Over IPv6 where there is any: the table that `wait_until_received` reads is short there,
    // while the other one holds what all other tests have left behind.
    let address = if TcpListener::bind("[::1]:0").is_ok() {
        "::1"
    } else {
        "127.0.0.1"
    };
    let server = Server::builder().env("SBX_BIND", address).start();
    let dir = TempDir::new();
    std::fs::write(dir.join("data"), b"0123456789").unwrap();
    let read = format!("/v1/files/read?path={}&offset=2&length=5", dir.join("data"));
    let write = format!("/v1/files/write?path={}", dir.join("written"));
    let exec = json!({"cmd": ["echo", "cut"]}).to_string();
    let requests: &[(&str, Vec<u8>)] = &[
        ("read", head("GET", &read, b"Accept: */*")),
        (
            "length",
            joined(&[
                &head("PUT", &write, b"Content-Length: 11"),
                b"hello\r\n\r\nab",
            ]),
        ),
        (
            "chunked",
            joined(&[
                &head("PUT", &write, b"Transfer-Encoding: chunked"),
                b"5;x=y\r\nhello\r\n6\r\n\r\n\r\nab\r\n0\r\nA: b\r\n\r\n",
            ]),
        ),
        (
            "exec",
            joined(&[
                &head(
                    "POST",
                    "/v1/exec",
                    format!("Content-Length: {}", exec.len()).as_bytes(),
                ),
                exec.as_bytes(),
            ]),
        ),
        (
            "two",
            joined(&[&head("GET", "/health", b""), &head("GET", &read, b"")]),
        ),
    ];
    for (name, request) in requests {
        let mut connection = server.connect();
        for cut in 1..request.len() {
            let _ = std::fs::remove_file(dir.join("written"));
            connection.send(&request[..cut]);
            wait_until_received(&connection.stream);
            connection.send(&request[cut..]);
            check_meaning(name, &mut connection, &dir, cut);
        }
        // And every byte in a segment of its own; a head has ten seconds, though, and a slow
        // machine needs them for looking.
        let start = Instant::now();
        for byte in request {
            connection.send(std::slice::from_ref(byte));
            if start.elapsed() < Duration::from_secs(5) {
                wait_until_received(&connection.stream);
            }
        }
        check_meaning(name, &mut connection, &dir, 0);
    }
}

#[track_caller]
fn check_meaning(name: &str, connection: &mut Connection, dir: &TempDir, cut: usize) {
    let mut reply = connection.read_reply();
    if name == "two" {
        assert_eq!(reply.json()["status"], "ok", "{name} cut at {cut}");
        reply = connection.read_reply();
    }
    assert_eq!(reply.status, 200, "{name} cut at {cut}: {}", reply.text());
    match name {
        "read" | "two" => assert_eq!(reply.body, b"23456", "{name} cut at {cut}"),
        "exec" => assert!(reply.text().contains("cut\\n"), "{name} cut at {cut}"),
        _ => {
            let written = std::fs::read(dir.join("written")).unwrap();
            assert_eq!(written, b"hello\r\n\r\nab", "{name} cut at {cut}");
        }
    }
}

/// However many they are, and wherever they are cut, each is passed once.
#[test]
fn line_ends_before_a_request_begin_none() {
    let server = Server::start();
    let mut connection = server.connect();
    connection.send(b"\r");
    wait_until_received(&connection.stream);
    connection.send(&b"\n\r".repeat(100_000));
    connection.send(b"\n");
    connection.send(&head("GET", "/health", b""));
    assert_eq!(connection.read_reply().status, 200);
}

#[test]
fn no_beginning_of_a_request_is_taken_for_the_whole() {
    let server = Server::start();
    let trap = Trap::new();
    let bodies: &[(&[u8], &[u8])] = &[
        (b"Content-Length: 11", b"hello world"),
        (
            b"Transfer-Encoding: chunked",
            b"5\r\nhello\r\n6\r\n world\r\n0\r\nA: b\r\n\r\n",
        ),
    ];
    for (line, body) in bodies {
        let request = joined(&[&trap.victim_head(line), body]);
        for end in 0..request.len() {
            let replies = converse_and_finish(&server, &request[..end]);
            assert!(replies.len() <= 1, "the first {end} bytes: {replies:?}");
            if let Some(reply) = replies.first() {
                assert_eq!(reply.status, 400, "the first {end} bytes: {}", reply.text());
            }
            assert!(!trap.has("victim"), "the first {end} bytes were executed");
        }
        let left = std::fs::read_dir(trap.dir.path()).unwrap().count();
        assert_eq!(left, 0, "a broken upload leaves no litter");
        assert_eq!(converse_and_finish(&server, &request)[0].status, 200);
        std::fs::remove_file(trap.victim()).unwrap();
    }
}

#[test]
fn chunked_uploads_of_every_shape_arrive_intact() {
    let server = Server::start();
    let dir = TempDir::new();
    let data: Vec<u8> = (0..3_000_000u32)
        .map(|index| (index * 7 % 251) as u8)
        .collect();
    let mut connection = server.connect();
    for size in [
        1, 2, 1000, 4096, 65_535, 65_536, 65_537, 1_000_000, 3_000_000,
    ] {
        let data = &data[..data.len().min(size * 2000)];
        let path = dir.join("file");
        let target = format!("/v1/files/write?path={path}");
        let mut request = head("PUT", &target, b"Transfer-Encoding: chunked");
        for chunk in data.chunks(size) {
            request.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
            request.extend_from_slice(chunk);
            request.extend_from_slice(b"\r\n");
        }
        request.extend_from_slice(b"0\r\n\r\n");
        connection.send(&request);
        let reply = connection.read_reply();
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert!(std::fs::read(&path).unwrap() == data, "chunks of {size}");
    }
    // An empty one, and JSON that comes in chunks.
    let target = format!("/v1/files/write?path={}", dir.join("empty"));
    connection.send(&joined(&[
        &head("PUT", &target, b"Transfer-Encoding: chunked"),
        b"0\r\n\r\n",
    ]));
    assert_eq!(connection.read_reply().status, 200);
    assert_eq!(std::fs::read(dir.join("empty")).unwrap(), b"");
    connection.send(&joined(&[
        &head("POST", "/v1/exec", b"Transfer-Encoding: chunked"),
        b"8\r\n{\"cmd\":\"\r\n9\r\necho hi\"}\r\n0\r\n\r\n",
    ]));
    assert!(connection.read_reply().text().contains("hi\\n"));
}

#[test]
fn a_body_where_none_is_wanted_is_skipped() {
    let server = Server::start();
    let mut connection = server.connect();
    for (method, target, status) in [
        ("GET", "/health", 200),
        ("GET", "/v1/nope", 404),
        ("DELETE", "/v1/processes/p-7", 404),
    ] {
        // The body looks like a request: read as one, it would be answered.
        let body = head("GET", "/v1/processes", b"");
        let line = format!("Content-Length: {}", body.len());
        connection.send(&joined(&[&head(method, target, line.as_bytes()), &body]));
        assert_eq!(connection.read_reply().status, status, "{method} {target}");
        connection.send(&joined(&[
            &head(method, target, b"Transfer-Encoding: chunked"),
            format!("{:x}\r\n{}\r\n0\r\n\r\n", body.len(), lossy(&body)).as_bytes(),
        ]));
        assert_eq!(
            connection.read_reply().status,
            status,
            "{method} {target} chunked"
        );
    }
    assert_eq!(
        connection.request("GET", "/health", &[], b"").json()["status"],
        "ok"
    );
}
