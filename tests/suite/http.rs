//! HTTP on the wire: every request is either understood exactly or refused and the connection closed.
//!
//! The promise held here is that no byte sequence puts a connection out of step: a refused request
//! is followed by nothing, wherever a request is cut it means the same, and every limit has its
//! status. Requests are written by hand, because a client library would not send most of them.
//! The oracle of a smuggled request is a file: it must not exist afterwards.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::fixture::{
    Connection, PATIENCE, Reply, Server, TOKEN, TempDir, find, parse_replies, wait_until,
    wait_until_received,
};

// ---------------------------------------------------------------------------------------------
// Requests written by hand, and the trap that shows whether one was executed.

/// Sends `bytes` on a connection of its own and returns all that comes until the server closes.
/// A server may close before it has taken everything, so a send that fails is no error here.
#[track_caller]
fn converse(server: &Server, bytes: &[u8]) -> Vec<u8> {
    let mut connection = server.connect();
    let _ = connection.stream.write_all(bytes);
    connection.read_to_close()
}

/// As [`converse`], but the client closes its sending half, so that a kept connection ends too.
#[track_caller]
fn converse_and_finish(server: &Server, bytes: &[u8]) -> Vec<Reply> {
    let mut connection = server.connect();
    let _ = connection.stream.write_all(bytes);
    let _ = connection.stream.shutdown(Shutdown::Write);
    let received = connection.read_to_close();
    parse_replies(&received).unwrap_or_else(|error| panic!("{error}: {}", lossy(&received)))
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A head with the token and `lines` (which carry their own line ends between them).
fn head(method: &str, target: &str, lines: &[u8]) -> Vec<u8> {
    let mut bytes =
        format!("{method} {target} HTTP/1.1\r\nHost: sandbox\r\nX-Sandbox-Token: {TOKEN}\r\n")
            .into_bytes();
    bytes.extend_from_slice(lines);
    if !lines.is_empty() {
        bytes.extend_from_slice(b"\r\n");
    }
    bytes.extend_from_slice(b"\r\n");
    bytes
}

fn joined(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

/// Two requests that leave a file behind if they are executed.
struct Trap {
    dir: TempDir,
}

impl Trap {
    fn new() -> Self {
        Self {
            dir: TempDir::new(),
        }
    }

    fn victim(&self) -> String {
        self.dir.join("victim")
    }

    /// The malformed request: its target would write `victim`.
    fn victim_head(&self, lines: &[u8]) -> Vec<u8> {
        let target = format!("/v1/files/write?path={}", self.victim());
        head("PUT", &target, lines)
    }

    /// The request that nobody may see, valid in itself.
    fn smuggled(&self) -> Vec<u8> {
        let target = format!("/v1/files/write?path={}", self.dir.join("smuggled"));
        joined(&[&head("PUT", &target, b"Content-Length: 3"), b"ran"])
    }

    fn has(&self, name: &str) -> bool {
        Path::new(&self.dir.join(name)).exists()
    }

    /// Sends a malformed request with a valid one behind it, twice: in the same bytes, and once the
    /// answer is there. One refusal must come, then the end, and neither request may be executed.
    #[track_caller]
    fn expect_refusal(&self, server: &Server, name: &str, request: &[u8], statuses: &[u16]) {
        let received = converse(server, &joined(&[request, &self.smuggled()]));
        self.check_refusal(name, &received, statuses);

        let mut connection = server.connect();
        let _ = connection.stream.write_all(request);
        let received = connection.read_to_close();
        self.check_refusal(name, &received, statuses);
        let _ = connection.stream.write_all(&self.smuggled());
        let more = connection.read_to_close();
        assert!(
            more.is_empty(),
            "{name}: answered after the end: {}",
            lossy(&more)
        );
        assert!(
            !self.has("victim"),
            "{name}: the malformed request was executed"
        );
        assert!(
            !self.has("smuggled"),
            "{name}: the request behind it was executed"
        );
    }

    #[track_caller]
    fn check_refusal(&self, name: &str, received: &[u8], statuses: &[u16]) {
        let replies = parse_replies(received)
            .unwrap_or_else(|error| panic!("{name}: {error}: {}", lossy(received)));
        assert_eq!(
            replies.len(),
            1,
            "{name}: exactly one answer: {}",
            lossy(received)
        );
        let reply = &replies[0];
        assert!(
            statuses.contains(&reply.status),
            "{name}: {} instead of {statuses:?}: {}",
            reply.status,
            reply.text()
        );
        assert_error_shape(reply, name);
        assert_eq!(
            reply.header("connection"),
            Some("close"),
            "{name}: the close is announced"
        );
        assert!(
            !self.has("victim"),
            "{name}: the malformed request was executed"
        );
        assert!(
            !self.has("smuggled"),
            "{name}: the request behind it was executed"
        );
    }
}

/// Every error is JSON with a sentence and a code.
#[track_caller]
fn assert_error_shape(reply: &Reply, what: &str) {
    assert!(reply.status >= 400, "{what}: {} is no error", reply.status);
    assert_eq!(
        reply.header("content-type"),
        Some("application/json"),
        "{what}"
    );
    let body = reply.json();
    let object = body
        .as_object()
        .unwrap_or_else(|| panic!("{what}: not an object: {body}"));
    assert!(
        object["error"].as_str().is_some_and(|text| text.len() > 5),
        "{what}: {body}"
    );
    let code = object["code"]
        .as_str()
        .unwrap_or_else(|| panic!("{what}: no code: {body}"));
    assert!(
        !code.is_empty()
            && code
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte == b'_'),
        "{what}: the code is for programs: {body}"
    );
}

#[test]
fn the_trap_itself_works() {
    // Without this every test below would pass against a server that executes nothing.
    let server = Server::start();
    let trap = Trap::new();
    let valid = joined(&[&trap.victim_head(b"Content-Length: 5"), b"12345"]);
    let replies = converse_and_finish(&server, &joined(&[&valid, &trap.smuggled()]));
    assert_eq!(
        replies.iter().map(|reply| reply.status).collect::<Vec<_>>(),
        [200, 200]
    );
    assert!(trap.has("victim") && trap.has("smuggled"));
}

// ---------------------------------------------------------------------------------------------
// What is refused.

#[test]
fn every_dangerous_framing_is_refused_and_nothing_behind_it_runs() {
    let server = Server::start();
    let trap = Trap::new();
    let lines: &[&[u8]] = &[
        // Content-Length that is not one plain number.
        b"Content-Length: -5",
        b"Content-Length: +5",
        b"Content-Length: zz",
        b"Content-Length: 5zz",
        b"Content-Length: 5 5",
        b"Content-Length: 5, 6",
        b"Content-Length: 6, 5",
        b"Content-Length: 0x5",
        b"Content-Length: 5.0",
        b"Content-Length: 5e0",
        b"Content-Length: 5;",
        b"Content-Length: ",
        b"Content-Length: ,",
        b"Content-Length: \"5\"",
        b"Content-Length: \xd9\xa5",
        b"Content-Length: 5\x0b",
        // Two of them that differ.
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 6\r\nContent-Length: 5",
        b"Content-Length: 5\r\nX: y\r\ncontent-length: 50",
        b"Content-Length: 5\r\nContent-Length: ",
        b"Content-Length: 5\r\nContent-Length: -5",
        // Two framings at once.
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Transfer-Encoding: chunked\r\nContent-Length: 0",
        b"Content-Length: 5\r\nTransfer-Encoding: identity",
        b"Content-Length: 5\r\nTransfer-Encoding: ",
        // Transfer codings that are not chunked, or only look like it.
        b"Transfer-Encoding: gzip",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked, gzip",
        b"Transfer-Encoding: chunked, chunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunkedx",
        b"Transfer-Encoding: \"chunked\"",
        b"Transfer-Encoding: chunked;a=b",
        b"Transfer-Encoding: chunked\x0b",
        b"Transfer-Encoding: \x0bchunked",
        b"Transfer-Encoding: \xa0chunked",
        b"Transfer-Encoding: ",
        // White space where a name and its colon must touch.
        b"Content-Length : 5",
        b"Content-Length\t: 5",
        b"Transfer-Encoding : chunked",
        b"Content-Length: 5\r\nX : y",
        // Folded lines, also ones that fold nothing.
        b"Content-Length: 5\r\nX: y\r\n z",
        b"Content-Length: 5\r\nX: y\r\n\tz",
        b"Content-Length: 5\r\nX: y\r\n \r\nZ: z",
        b"X: y\r\n Content-Length: 5",
        b" Content-Length: 5",
        // Bare CR and NUL.
        b"Content-Length: 5\r\nX: a\rb",
        b"Content-Length: 5\r\nX: a\r",
        b"Content-Length: 5\r\n\rX: a",
        b"Content-Length: 5\r\nX\r: a",
        b"Content-Length: 5\rX: a",
        b"Content-Length: 5\r",
        b"Content-Length: 5\r\nX: a\0b",
        b"Content-Length: 5\r\nX\0: a",
        b"Content-Length: 5\0",
        // Not a header line at all.
        b"Content-Length: 5\r\nno colon here",
        b"Content-Length: 5\r\n: no name",
        b"Content-Length: 5\r\nX Y: z",
        b"Content-Length: 5\r\nX(Y): z",
        b"Content-Length: 5\r\nX,Y: z",
        b"Content-Length: 5\r\n\"X\": z",
        b"Content-Length: 5\r\n\xc3\xa9: z",
    ];
    for line in lines {
        let request = joined(&[&trap.victim_head(line), b"12345"]);
        trap.expect_refusal(&server, &lossy(line), &request, &[400]);
    }
}

#[test]
fn a_length_beyond_every_number_is_refused() {
    let server = Server::start();
    let trap = Trap::new();
    // 2^64 + 5 is 5 to whoever lets it wrap around.
    for length in [
        "18446744073709551621",
        "99999999999999999999999999999999999999",
    ] {
        let line = format!("Content-Length: {length}");
        let request = joined(&[&trap.victim_head(line.as_bytes()), b"12345"]);
        trap.expect_refusal(&server, &line, &request, &[400, 413]);
    }
}

#[test]
fn every_malformed_request_line_is_refused_and_nothing_behind_it_runs() {
    let server = Server::start();
    let trap = Trap::new();
    let lines: &[&[u8]] = &[
        b"GET",
        b"GET ",
        b"GET /health",
        b"GET /health ",
        b"GET  /health HTTP/1.1",
        b"GET /health  HTTP/1.1",
        b" GET /health HTTP/1.1",
        b"\tGET /health HTTP/1.1",
        b"GET\t/health\tHTTP/1.1",
        b"GET /health HTTP/1.1 ",
        b"GET /health HTTP/1.1 x",
        b"GET /hea lth HTTP/1.1",
        b"GET /hea\tlth HTTP/1.1",
        b"GET /hea\0lth HTTP/1.1",
        b"GET /hea\rlth HTTP/1.1",
        b"GET /health\r HTTP/1.1",
        b"GET /health HTTP/1.1\r",
        b"GET /health HTTP/1.1\0",
        b"\0GET /health HTTP/1.1",
        b"GET health HTTP/1.1",
        b"GET ?x HTTP/1.1",
        b"G@T /health HTTP/1.1",
        b"GET, /health HTTP/1.1",
        b"G\xc3\x89T /health HTTP/1.1",
        b"/health HTTP/1.1",
        b"GET /health http/1.1",
        b"GET /health HTTP/1",
        b"GET /health HTTP/1.",
        b"GET /health HTTP/11",
        b"GET /health HTTP/1.1.1",
        b"GET /health HTTP/+1.1",
        b"GET /health HTTP/a.b",
        b"GET /health HTTX/1.1",
        b"GET /health HTTP 1.1",
        b"GET /health HTTP/0.9",
        b"GET /health HTTP/2.0",
        b"PRI * HTTP/2.0",
        b"Host: first",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ];
    for line in lines {
        let request = joined(&[line, b"\r\nHost: sandbox\r\n\r\n"]);
        trap.expect_refusal(&server, &lossy(line), &request, &[400]);
    }
}

#[test]
fn every_malformed_chunked_body_is_refused_and_nothing_behind_it_runs() {
    let server = Server::start();
    let trap = Trap::new();
    let bodies: &[&[u8]] = &[
        b"zz\r\nhello\r\n0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5x\r\nhello\r\n0\r\n\r\n",
        b" 5\r\nhello\r\n0\r\n\r\n",
        b"5.\r\nhello\r\n0\r\n\r\n",
        b"5,5\r\nhello\r\n0\r\n\r\n",
        b"\r\nhello\r\n0\r\n\r\n",
        b";a=b\r\nhello\r\n0\r\n\r\n",
        // Sizes that only fit after wrapping around.
        b"10000000000000005\r\nhello\r\n0\r\n\r\n",
        b"ffffffffffffffffffffff\r\nhello\r\n0\r\n\r\n",
        // Lines that end otherwise than by CR LF.
        b"5\nhello\r\n0\r\n\r\n",
        b"5\rhello\r\n0\r\n\r\n",
        b"5;a\nb\r\nhello\r\n0\r\n\r\n",
        b"5;a\rb\r\nhello\r\n0\r\n\r\n",
        b"5;a\0b\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhello\r0\r\n\r\n",
        b"5\r\nhello0\r\n\r\n",
        b"5\r\nhelloXX0\r\n\r\n",
        b"5\r\nhelloX\n0\r\n\r\n",
        b"5\r\nhello\rX0\r\n\r\n",
        b"5\r\nhello world\r\n0\r\n\r\n",
        // Trailers are header lines, and as strict.
        b"5\r\nhello\r\n0\r\nno colon\r\n\r\n",
        b"5\r\nhello\r\n0\r\nX : y\r\n\r\n",
        b"5\r\nhello\r\n0\r\n folded: y\r\n\r\n",
        b"5\r\nhello\r\n0\r\nX: y\r\n z\r\n\r\n",
        b"5\r\nhello\r\n0\r\nX: a\rb\r\n\r\n",
        b"5\r\nhello\r\n0\r\nX: a\0b\r\n\r\n",
        b"5\r\nhello\r\n0\r\n: y\r\n\r\n",
        // The next request is not a trailer.
        b"5\r\nhello\r\n0\r\n",
    ];
    for body in bodies {
        let head = trap.victim_head(b"Transfer-Encoding: chunked");
        let request = joined(&[&head, body]);
        if body.ends_with(b"0\r\n") && !body.ends_with(b"\r\n\r\n") {
            // Not complete without what follows: the smuggled request line is the bad trailer.
            let received = converse(&server, &joined(&[&request, &trap.smuggled()]));
            trap.check_refusal(&lossy(body), &received, &[400]);
        } else {
            trap.expect_refusal(&server, &lossy(body), &request, &[400]);
        }
    }
}

#[test]
fn endless_chunk_extensions_and_trailers_are_refused() {
    let server = Server::start();
    let trap = Trap::new();
    let head = trap.victim_head(b"Transfer-Encoding: chunked");
    let long = vec![b'a'; 200_000];
    let extension = joined(&[&head, b"5;", &long, b"\r\nhello\r\n0\r\n\r\n"]);
    trap.expect_refusal(&server, "a long extension", &extension, &[400, 431]);
    let trailer = joined(&[&head, b"5\r\nhello\r\n0\r\nX: ", &long, b"\r\n\r\n"]);
    trap.expect_refusal(&server, "a long trailer", &trailer, &[400, 431]);
    let trailers = joined(&[
        &head,
        b"5\r\nhello\r\n0\r\n",
        &b"X: y\r\n".repeat(40_000),
        b"\r\n",
    ]);
    trap.expect_refusal(&server, "many trailers", &trailers, &[400, 431]);
    let digits = joined(&[&head, &vec![b'0'; 200_000], b"5\r\nhello\r\n0\r\n\r\n"]);
    trap.expect_refusal(&server, "a long size", &digits, &[400, 431]);
}

#[test]
fn a_bare_line_feed_never_puts_a_connection_out_of_step() {
    // Whether a bare LF ends a header line is the server's choice, but it is one choice: the
    // bytes behind it are never read both as a header and as a request.
    let server = Server::start();
    let trap = Trap::new();
    for line in [
        "X: a\nContent-Length: 5",
        "X: a\n\nContent-Length: 5",
        "\nContent-Length: 5",
    ] {
        let request = joined(&[
            &trap.victim_head(line.as_bytes()),
            b"12345",
            &trap.smuggled(),
        ]);
        let replies = parse_replies(&converse(&server, &request)).unwrap();
        assert_eq!(replies.len(), 1, "{line:?}: {replies:?}");
        assert_eq!(replies[0].header("connection"), Some("close"), "{line:?}");
        assert!(!trap.has("smuggled"), "{line:?}");
    }
}

// ---------------------------------------------------------------------------------------------
// What is accepted, however it is cut.

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

// ---------------------------------------------------------------------------------------------
// Limits.

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
    let request = joined(&[b"GET /health HTTP/1.1\r\nX: ", &vec![b'y'; 66_000]]);
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

// ---------------------------------------------------------------------------------------------
// Deadlines. They are long, so all of them are waited for at once.

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
            let stop = trickle(&connection, b"GET /health HTTP/1.1\r\nX-Slow: ");
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

// ---------------------------------------------------------------------------------------------
// Expect, HEAD, OPTIONS.

#[test]
fn a_client_that_expects_100_continue_gets_it_before_it_sends_the_body() {
    let server = Server::start();
    let dir = TempDir::new();
    let target = format!("/v1/files/write?path={}", dir.join("file"));
    let mut connection = server.connect();
    for (expect, framing, body) in [
        ("100-continue", "Content-Length: 5", &b"hello"[..]),
        (
            "100-Continue",
            "Transfer-Encoding: chunked",
            &b"5\r\nhello\r\n0\r\n\r\n"[..],
        ),
    ] {
        let _ = std::fs::remove_file(dir.join("file"));
        connection.send(&head(
            "PUT",
            &target,
            format!("Expect: {expect}\r\n{framing}").as_bytes(),
        ));
        let interim = connection.read_head();
        assert_eq!(interim.status, 100);
        assert!(
            interim.header("content-length").is_none(),
            "a 100 has no body"
        );
        connection.send(body);
        assert_eq!(connection.read_reply().status, 200);
        assert_eq!(std::fs::read(dir.join("file")).unwrap(), b"hello");
    }
    let exec = json!({"cmd": "echo asked"}).to_string();
    let lines = format!("Expect: 100-continue\r\nContent-Length: {}", exec.len());
    connection.send(&head("POST", "/v1/exec", lines.as_bytes()));
    assert_eq!(connection.read_head().status, 100);
    connection.send(exec.as_bytes());
    assert!(connection.read_reply().text().contains("asked\\n"));

    // One that does not wait after all: a 100 may come or not, the answer does.
    let lines = b"Expect: 100-continue\r\nContent-Length: 6";
    let request = joined(&[&head("PUT", &target, lines), b"at one"]);
    let replies = converse_and_finish(&server, &request);
    assert_eq!(replies.last().unwrap().status, 200);
    assert_eq!(std::fs::read(dir.join("file")).unwrap(), b"at one");
}

#[test]
fn a_refused_expectation_gets_the_final_status_and_no_100() {
    let server = Server::start();
    let dir = TempDir::new();
    std::fs::create_dir(dir.join("dir")).unwrap();
    let write = format!("/v1/files/write?path={}", dir.join("file"));
    let bad_mode = format!("{write}&mode=9");
    let expect = "Expect: 100-continue\r\nContent-Length: 5";
    let expect_chunked = "Expect: 100-continue\r\nTransfer-Encoding: chunked";
    let too_long = format!("Expect: 100-continue\r\nContent-Length: {}", (16 << 20) + 1);
    let cases = [
        ("PUT", "/v1/nope", expect, 404),
        ("PUT", "/v1/nope", expect_chunked, 404),
        ("PUT", "/v1/files/stat", expect, 405),
        ("PUT", bad_mode.as_str(), expect, 400),
        ("POST", "/v1/exec", too_long.as_str(), 413),
        (
            "PUT",
            write.as_str(),
            "Expect: miracles\r\nContent-Length: 5",
            417,
        ),
    ];
    for (method, target, lines, status) in cases {
        let mut connection = server.connect();
        connection.send(&head(method, target, lines.as_bytes()));
        let reply = connection.read_reply();
        assert_eq!(reply.status, status, "{method} {target}: {}", reply.text());
        assert_error_shape(&reply, target);
        // Whether the body comes after all cannot be known, so the connection is of no more use.
        assert_eq!(
            reply.header("connection"),
            Some("close"),
            "{method} {target}"
        );
        connection.expect_close();
    }
    let mut connection = server.connect();
    connection.token = Some("wrong".to_owned());
    connection.send_request(
        "PUT",
        &write,
        &[("Expect", "100-continue"), ("Content-Length", "5")],
        b"",
    );
    let reply = connection.read_reply();
    assert_eq!(reply.status, 403);
    connection.expect_close();
    assert!(!Path::new(&dir.join("file")).exists());
}

#[test]
fn head_answers_like_get_without_the_body() {
    let server = Server::start();
    let dir = TempDir::new();
    std::fs::write(dir.join("file"), b"0123456789").unwrap();
    let id = server.spawn(&json!({"cmd": "echo text"}))["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let one = format!("/v1/processes/{id}");
    wait_until("the process ends", PATIENCE, || {
        server.get(&one).json()["running"] == false
    });
    let path = dir.path().display();
    let targets = [
        "/health".to_owned(),
        "/v1/processes".to_owned(),
        "/v1/procs".to_owned(),
        one.clone(),
        format!("{one}/logs"),
        format!("{one}/logs?follow=1"),
        format!("{one}/wait"),
        format!("/v1/files/read?path={path}/file"),
        format!("/v1/files/read?path={path}/file&offset=3&length=2"),
        format!("/v1/files/stat?path={path}/file"),
        format!("/v1/files/list?path={path}"),
        // The errors too.
        "/v1/nope".to_owned(),
        "/v1/exec".to_owned(),
        "/v1/processes/p-999".to_owned(),
        format!("/v1/files/read?path={path}/missing"),
        format!("/v1/files/read?path={path}"),
        "/v1/files/read".to_owned(),
    ];
    let mut connection = server.connect();
    for target in &targets {
        let get = connection.request("GET", target, &[], b"");
        connection.send_request("HEAD", target, &[], b"");
        let head = connection.read_head();
        assert_eq!(head.status, get.status, "HEAD {target}");
        assert_eq!(
            head.header("content-type"),
            get.header("content-type"),
            "HEAD {target}"
        );
        // A length that GET would give may be given or left out, but never differ.
        if get.status == 200 && target != "/health" && head.header("content-length").is_some() {
            let length = get.body.len().to_string();
            assert_eq!(
                head.header("content-length"),
                Some(length.as_str()),
                "HEAD {target}"
            );
        }
        // Had a body come, it would be read as the beginning of this answer.
        let reply = connection.request("GET", "/health", &[], b"");
        assert_eq!(reply.json()["status"], "ok", "after HEAD {target}");
    }
    let target = format!("/v1/files/read?path={path}/file");
    let reply = connection.request("HEAD", &target, &[], b"");
    assert_eq!(
        reply.header("content-length"),
        Some("10"),
        "the size of a file is what HEAD is for"
    );
}

#[test]
fn head_does_not_wait_for_what_it_does_not_send() {
    let server = Server::start();
    let id = server.spawn(&json!({"cmd": "sleep 60"}))["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let started = Instant::now();
    let mut connection = server.connect();
    let target = format!("/v1/processes/{id}/logs?follow=1");
    assert_eq!(connection.request("HEAD", &target, &[], b"").status, 200);
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!(
        server.delete(&format!("/v1/processes/{id}")).json()["killed"],
        true
    );
}

/// Every route with the methods it has.
const ROUTES: &[(&str, &[&str])] = &[
    ("/health", &["GET"]),
    ("/v1/exec", &["POST"]),
    ("/v1/processes", &["GET", "POST"]),
    ("/v1/procs", &["GET", "POST"]),
    ("/v1/processes/p-1", &["GET", "DELETE"]),
    ("/v1/procs/p-1", &["GET", "DELETE"]),
    ("/v1/processes/p-1/logs", &["GET"]),
    ("/v1/procs/p-1/logs", &["GET"]),
    ("/v1/processes/p-1/wait", &["GET", "POST"]),
    ("/v1/processes/p-1/kill", &["POST"]),
    ("/v1/processes/p-1/stdin", &["POST", "PUT"]),
    ("/v1/files/read", &["GET"]),
    ("/v1/files/write", &["PUT", "POST"]),
    ("/v1/files/list", &["GET"]),
    ("/v1/files/stat", &["GET"]),
    ("/v1/files/delete", &["DELETE", "POST"]),
    ("/v1/files/mkdir", &["POST"]),
    ("/v1/files/move", &["POST"]),
];

fn allowed(reply: &Reply) -> BTreeSet<String> {
    let value = reply
        .header("allow")
        .unwrap_or_else(|| panic!("no Allow: {reply:?}"));
    value
        .split(',')
        .map(|method| method.trim().to_owned())
        .collect()
}

#[test]
fn options_and_405_tell_what_is_allowed() {
    let server = Server::start();
    let mut connection = server.connect();
    for (target, methods) in ROUTES {
        let mut expected: BTreeSet<String> = methods.iter().map(ToString::to_string).collect();
        expected.insert("OPTIONS".to_owned());
        if expected.contains("GET") {
            expected.insert("HEAD".to_owned());
        }
        let reply = connection.request("OPTIONS", target, &[], b"");
        assert_eq!(reply.status, 204, "OPTIONS {target}: {}", reply.text());
        assert_eq!(allowed(&reply), expected, "OPTIONS {target}");
        for method in [
            "GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "TRACE", "BREW", "get",
        ] {
            if expected.contains(method) {
                continue;
            }
            let reply = connection.request(method, target, &[], b"");
            assert_eq!(reply.status, 405, "{method} {target}: {}", reply.text());
            assert_eq!(allowed(&reply), expected, "{method} {target}");
            if method != "HEAD" {
                assert_error_shape(&reply, target);
                assert_eq!(reply.code(), "method_not_allowed");
            }
        }
    }
    assert_eq!(
        connection.request("OPTIONS", "/v1/nope", &[], b"").status,
        404
    );
}

#[test]
fn only_exact_paths_are_routes() {
    let server = Server::start();
    let mut connection = server.connect();
    for target in [
        "/",
        "/v1",
        "/v1/",
        "/v2/exec",
        "/v1/execute",
        "/v1/exec/",
        "//v1/exec",
        "/v1//exec",
        "/v1/./exec",
        "/v1/x/../exec",
        "/V1/exec",
        "/v1/EXEC",
        "/health/",
        "/health/x",
        "/v1/files",
        "/v1/files/",
        "/v1/files/erase",
        "/v1/processes/",
        "/v1/processes/p-1/",
        "/v1/processes/p-1/x",
        "/v1/sandboxes",
        "/v1/sandboxes/x/exec",
    ] {
        for method in ["GET", "POST", "DELETE"] {
            let reply = connection.request(method, target, &[], b"");
            assert_eq!(reply.status, 404, "{method} {target}: {}", reply.text());
            assert_eq!(reply.code(), "not_found", "{method} {target}");
            assert_error_shape(&reply, target);
        }
    }
    // A query does not change the route, and what nobody knows in it is ignored.
    let reply = connection.request("GET", "/health?path=/x&&=&a=b=c&%41", &[], b"");
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[test]
fn health_says_what_the_contract_says() {
    let server = Server::start();
    let reply = server.get("/health");
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    let health = reply.json();
    assert_eq!(health["status"], "ok");
    assert_eq!(health["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(health["protocol"], json!(3));
    assert_eq!(health["mode"], "dedicated");
    assert!(health["sandboxes"].is_u64(), "{health}");
    assert!(health["isolation"]["landlock_abi"].is_u64(), "{health}");
    assert!(health["isolation"]["layers"].is_array(), "{health}");
    let before = health["uptime_ms"].as_u64().unwrap();
    wait_until("the uptime grows", PATIENCE, || {
        server.get("/health").json()["uptime_ms"].as_u64().unwrap() > before
    });
}

// ---------------------------------------------------------------------------------------------
// Errors and validation.

#[test]
fn every_error_is_json_with_its_code() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.path().display();
    let mut connection = server.connect();
    for (method, target, body, status, code) in [
        ("POST", "/v1/exec".to_owned(), "{", 400, "bad_request"),
        ("GET", "/v1/files/read".to_owned(), "", 400, "bad_request"),
        ("GET", "/nope".to_owned(), "", 404, "not_found"),
        ("GET", "/v1/processes/p-99".to_owned(), "", 404, "not_found"),
        (
            "GET",
            format!("/v1/files/read?path={path}/none"),
            "",
            404,
            "not_found",
        ),
        ("PATCH", "/health".to_owned(), "", 405, "method_not_allowed"),
        (
            "GET",
            format!("/v1/files/read?path={path}"),
            "",
            409,
            "is_directory",
        ),
        (
            "POST",
            "/v1/exec".to_owned(),
            r#"{"cmd":["/no/such/program"]}"#,
            400,
            "not_found",
        ),
        (
            "POST",
            "/v1/exec".to_owned(),
            r#"{"cmd":["/etc/passwd"]}"#,
            400,
            "not_executable",
        ),
        (
            "POST",
            "/v1/exec".to_owned(),
            r#"{"cmd":"true","cwd":"/none"}"#,
            400,
            "bad_cwd",
        ),
    ] {
        let reply = connection.request(method, &target, &[], body.as_bytes());
        assert_eq!(reply.status, status, "{method} {target}: {}", reply.text());
        assert_error_shape(&reply, &target);
        assert_eq!(reply.code(), code, "{method} {target}: {}", reply.text());
    }
    connection.token = None;
    let reply = connection.request("GET", "/v1/processes", &[], b"");
    assert_eq!((reply.status, reply.code().as_str()), (403, "forbidden"));
    assert_error_shape(&reply, "403");
}

#[test]
fn a_parameter_that_does_not_parse_is_400_and_nothing_happens() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.path().display();
    std::fs::write(dir.join("old"), b"old").unwrap();
    let id = server.spawn(&json!({"cmd": "cat"}))["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let mut connection = server.connect();
    let write = |rest: &str| ("PUT", format!("/v1/files/write?path={path}/new{rest}"));
    let read = |rest: &str| ("GET", format!("/v1/files/read?path={path}/old{rest}"));
    let list = |rest: &str| ("GET", format!("/v1/files/list?path={path}{rest}"));
    let of_process = |method, rest: &str| (method, format!("/v1/processes/{id}/{rest}"));
    let cases = [
        ("PUT", "/v1/files/write".to_owned()),
        ("PUT", "/v1/files/write?path=".to_owned()),
        ("PUT", "/v1/files/write?Path=/x".to_owned()),
        write("%00"),
        write("%zz"),
        write("%4"),
        write("%"),
        write(&format!("&path={path}/other")),
        write("&offset=abc"),
        write("&offset="),
        write("&offset=-1"),
        write("&offset=1.5"),
        write("&offset=0x10"),
        write("&offset=99999999999999999999"),
        write("&offset=0&offset=1"),
        write("&truncate_to=abc"),
        write("&truncate_to=-1"),
        write("&mode=9"),
        write("&mode=888"),
        write("&mode=rwx"),
        write("&mode="),
        write("&mode=-1"),
        write("&mode=17777"),
        write("&mkdir=maybe"),
        write("&mkdir=2"),
        read("&offset=abc"),
        read("&offset=-1&length=1"),
        read("&length=abc"),
        read("&length=-1"),
        read("&length=99999999999999999999"),
        list("&limit=0"),
        list("&limit=abc"),
        list("&limit=-1"),
        list("&limit=100001"),
        ("GET", "/v1/files/list".to_owned()),
        ("GET", "/v1/files/stat".to_owned()),
        ("DELETE", "/v1/files/delete".to_owned()),
        (
            "DELETE",
            format!("/v1/files/delete?path={path}/old&recursive=maybe"),
        ),
        (
            "DELETE",
            format!("/v1/files/delete?path={path}/old&recursive="),
        ),
        (
            "DELETE",
            format!("/v1/files/delete?path={path}/old&path={path}/old"),
        ),
        ("POST", "/v1/files/mkdir".to_owned()),
        ("POST", format!("/v1/files/mkdir?path={path}/new&mode=9")),
        ("POST", format!("/v1/files/move?from={path}/old")),
        ("POST", format!("/v1/files/move?to={path}/new")),
        (
            "POST",
            format!("/v1/files/move?from={path}/old&to={path}/new%00"),
        ),
        of_process("GET", "logs?follow=maybe"),
        of_process("GET", "logs?stdout_offset=abc"),
        of_process("GET", "logs?stderr_offset=-1"),
        of_process("GET", "wait?timeout=abc"),
        of_process("GET", "wait?timeout=-1"),
        of_process("POST", "stdin?eof=maybe"),
    ];
    for (method, target) in &cases {
        let reply = connection.request(method, target, &[], b"");
        assert_eq!(reply.status, 400, "{method} {target}: {}", reply.text());
        assert_error_shape(&reply, target);
    }
    let names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["old"]);
    assert_eq!(std::fs::read(dir.join("old")).unwrap(), b"old");
    // Its stdin was neither written nor closed.
    assert_eq!(
        server.get(&format!("/v1/processes/{id}")).json()["running"],
        true
    );
    assert_eq!(
        server.delete(&format!("/v1/processes/{id}")).json()["killed"],
        true
    );
}

#[test]
fn a_field_of_the_wrong_type_is_400_and_names_the_field() {
    let server = Server::start();
    let dir = TempDir::new();
    let ran = dir.join("ran");
    let mut connection = server.connect();
    let too_long = "x".repeat(65);
    let fields = [
        ("cmd", json!(5)),
        ("cmd", json!(null)),
        ("cmd", json!(true)),
        ("cmd", json!({})),
        ("cmd", json!([])),
        ("cmd", json!(["echo", 5])),
        ("cmd", json!(["echo", null])),
        ("cmd", json!(["echo", "a\0b"])),
        ("cmd", json!(format!("touch {ran}\0"))),
        ("shell", json!("yes")),
        ("shell", json!(1)),
        ("shell", json!(false)),
        ("env", json!([])),
        ("env", json!("A=b")),
        ("env", json!({"A": []})),
        ("env", json!({"A": {"B": "c"}})),
        ("env", json!({"A=B": "c"})),
        ("env", json!({"": "c"})),
        ("env", json!({"A": "b\0c"})),
        ("env", json!({"A\0B": "c"})),
        ("cwd", json!(5)),
        ("cwd", json!(["/"])),
        ("cwd", json!("/\0")),
        ("timeout", json!("5")),
        ("timeout", json!(true)),
        ("timeout", json!(-1)),
        ("timeout", json!(0)),
        ("timeout", json!([1])),
        ("stdin", json!(5)),
        ("stdin", json!(["x"])),
        ("background", json!("yes")),
        ("background", json!(1)),
        ("tag", json!(5)),
        ("encoding", json!("latin-1")),
        ("encoding", json!(5)),
        ("on_disconnect", json!("maybe")),
        ("on_disconnect", json!(true)),
        ("id", json!(5)),
        ("id", json!("")),
        ("id", json!("12345")),
        ("id", json!("p-5")),
        ("id", json!("a b")),
        ("id", json!("a/b")),
        ("id", json!("\u{e9}")),
        ("id", json!(too_long)),
    ];
    for (field, value) in &fields {
        for target in ["/v1/exec", "/v1/processes"] {
            let mut body = json!({"cmd": format!("touch {ran}")});
            body[field] = value.clone();
            let reply = connection.request("POST", target, &[], body.to_string().as_bytes());
            assert_eq!(reply.status, 400, "{target} {body}: {}", reply.text());
            assert_error_shape(&reply, target);
            let error = reply.json()["error"].as_str().unwrap().to_owned();
            assert!(error.contains(field), "the message names {field}: {error}");
            assert!(!Path::new(&ran).exists(), "{body} was executed");
        }
    }
    let mut body = json!({"cmd": ["touch", ran], "shell": true});
    let reply = connection.request("POST", "/v1/exec", &[], body.to_string().as_bytes());
    assert_eq!(
        reply.status,
        400,
        "an array is not for a shell: {}",
        reply.text()
    );
    body = json!({"command": format!("touch {ran}")});
    let reply = connection.request("POST", "/v1/exec", &[], body.to_string().as_bytes());
    assert_eq!(reply.status, 400, "no cmd: {}", reply.text());
    assert!(reply.text().contains("cmd"));
    assert!(!Path::new(&ran).exists());
}

#[test]
fn broken_json_is_400_never_a_default() {
    let server = Server::start();
    let dir = TempDir::new();
    let ran = dir.join("ran");
    let valid = json!({"cmd": format!("touch {ran}")}).to_string();
    let valid = valid.as_bytes();
    let mut bodies: Vec<Vec<u8>> = [
        &b""[..],
        b" ",
        b"null",
        b"5",
        b"[]",
        b"\"cmd\"",
        b"true",
        b"nonsense",
        b"{\"cmd\":\"\xff\"}",
    ]
    .iter()
    .map(|body| body.to_vec())
    .collect();
    bodies.push(br#"{"cmd":"\ud800"}"#.to_vec());
    bodies.push(joined(&[valid, b"x"]));
    bodies.push(joined(&[valid, valid]));
    bodies.push(joined(&[b"\xef\xbb\xbf", valid]));
    bodies.push(joined(&[valid, b"\0"]));
    for end in 0..valid.len() {
        bodies.push(valid[..end].to_vec());
    }
    let mut connection = server.connect();
    for body in &bodies {
        for target in ["/v1/exec", "/v1/processes"] {
            let reply = connection.request("POST", target, &[], body);
            assert_eq!(reply.status, 400, "{:?}: {}", lossy(body), reply.text());
            assert_error_shape(&reply, target);
            assert!(!Path::new(&ran).exists(), "{:?} was executed", lossy(body));
        }
    }
    assert_eq!(
        connection.request("POST", "/v1/exec", &[], valid).status,
        200
    );
    assert!(Path::new(&ran).exists());
}

// ---------------------------------------------------------------------------------------------
// Connections: kept, pipelined, closed, half-closed.

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

// ---------------------------------------------------------------------------------------------
// Bodies of refused requests.

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
            let head =
                format!("{method} {target} HTTP/1.1\r\nX-Sandbox-Token: {token}\r\n{line}\r\n\r\n");
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
    // Closing with unread bytes sends a reset, which can overtake the answer. The client here
    // writes all it can, as ordinary ones do, and only then reads.
    let server = Server::start();
    let body = vec![b'x'; 4 << 20];
    for round in 0..40 {
        let mut connection = server.connect();
        connection.token = Some("wrong".to_owned());
        let line = format!("Content-Length: {}", body.len());
        let head = format!(
            "PUT /v1/files/write?path=/x HTTP/1.1\r\nX-Sandbox-Token: no\r\n{line}\r\n\r\n"
        );
        connection.send(head.as_bytes());
        let _ = connection.stream.write_all(&body);
        let mut received = Vec::new();
        let _ = connection.stream.read_to_end(&mut received);
        let replies = parse_replies(&received)
            .unwrap_or_else(|error| panic!("round {round}: {error}: {}", lossy(&received)));
        assert_eq!(replies.len(), 1, "round {round}: the answer is lost");
        assert_eq!(replies[0].status, 403, "round {round}");
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
