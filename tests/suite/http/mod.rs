//! HTTP on the wire: every request is either understood exactly or refused and the connection closed.
//!
//! The promise held here is that no byte sequence puts a connection out of step: a refused request
//! is followed by nothing, wherever a request is cut it means the same, and every limit has its
//! status. Requests are written by hand, because a client library would not send most of them.
//! The oracle of a smuggled request is a file: it must not exist afterwards.

mod accepted;
mod connections;
mod deadlines;
mod framing;
mod hosts;
mod limits;
mod methods;
mod refused_bodies;
mod validation;

use std::io::Write;
use std::net::Shutdown;
use std::path::Path;

use crate::fixture::{Reply, Server, TOKEN, TempDir, parse_replies};

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
        self.expect_nothing_ran(name);
    }

    #[track_caller]
    fn expect_nothing_ran(&self, name: &str) {
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
        self.expect_nothing_ran(name);
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
    assert!(reply.body.ends_with(b"}\n"), "{what}: {:?}", reply.text());
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
