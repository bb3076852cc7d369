//! What one tenant holds of the server is charged to it: whatever it does, the operator and the other
//! tenants are served.

mod answers;
mod connections;
mod limits;
mod memory;
mod watchdog;

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use crate::fixture::{Sandbox, Server};

/// Sends bytes on a connection of its own and reads nothing. The server may refuse or close it at any time.
fn send_and_hold(server: &Server, bytes: &[u8]) -> TcpStream {
    let mut stream = server.connect().stream;
    let limit = Duration::from_millis(500);
    stream.set_write_timeout(Some(limit)).unwrap();
    let _ = stream.write_all(bytes);
    stream
}

/// The head of a request with this sandbox's token.
fn head(sandbox: &Sandbox<'_>, method: &str, route: &str, fields: &str) -> Vec<u8> {
    let (target, token) = (sandbox.target(route), &sandbox.token);
    let line =
        format!("{method} {target} HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {token}\r\n");
    format!("{line}{fields}\r\n").into_bytes()
}

/// The operator and another tenant are served.
#[track_caller]
fn expect_service(server: &Server, neighbour: &Sandbox<'_>) {
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(neighbour.sh("echo here"), "here\n");
    assert_eq!(server.get("/v1/sandboxes").status, 200);
}
