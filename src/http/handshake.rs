//! The handshake of WebSocket (RFC 6455 section 4.2): whether a request is one, and the answer.
//!
//! Which subprotocol is selected, and who may connect, is up to the door.

use sha1::{Digest, Sha1};

use super::parse::{Framing, Head};
use super::response::{Refusal, append_status_line};
use crate::codec::base64;

/// What a server appends to a client's key before it hashes it.
const GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// Bytes of a client's key.
const KEY_BYTES: usize = 16;

/// A request for a WebSocket.
#[derive(Debug, PartialEq, Eq)]
pub struct Handshake {
    accept: String,
    /// The subprotocol that the door has selected.
    pub selected: Option<&'static str>,
}

impl Handshake {
    /// Checks that a request asks for a WebSocket of version 13.
    ///
    /// # Errors
    /// 426, with what is missing and the header fields that tell a client how to ask.
    pub fn of(head: &Head) -> Result<Self, Refusal> {
        let key = key(head).map_err(|what| {
            let text = format!("this is a WebSocket, and {what}; connect with a WebSocket client");
            Refusal::new(426, "upgrade_required", text)
                .with_header("Upgrade", "websocket")
                .with_header("Connection", "Upgrade")
                .with_header("Sec-WebSocket-Version", "13")
        })?;
        let digest = Sha1::new().chain_update(key).chain_update(GUID).finalize();
        Ok(Self {
            accept: base64::encode(&digest),
            selected: None,
        })
    }

    /// Appends the status line and the header fields of the answer.
    pub fn append_head(&self, out: &mut Vec<u8>) {
        append_status_line(out, 101, b"Switching Protocols");
        out.extend_from_slice(b"Upgrade: websocket\r\nConnection: Upgrade\r\n");
        for (name, value) in [
            ("Sec-WebSocket-Accept", Some(&self.accept[..])),
            ("Sec-WebSocket-Protocol", self.selected),
        ] {
            if let Some(value) = value {
                out.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
            }
        }
    }
}

/// The key of a request for a WebSocket, or what it lacks.
fn key(head: &Head) -> Result<&[u8], &'static str> {
    if head.method != "GET" || head.minor_version == 0 {
        return Err("the request is no GET of HTTP/1.1");
    }
    if !matches!(head.framing, Framing::None | Framing::Length(0)) {
        return Err("the request has a body");
    }
    for (name, option, what) in [
        (
            "upgrade",
            "websocket",
            "the request has no Upgrade: websocket",
        ),
        (
            "connection",
            "upgrade",
            "the request has no Connection: Upgrade",
        ),
    ] {
        let is_option = |one: &[u8]| one.eq_ignore_ascii_case(option.as_bytes());
        if !elements(head, name).any(is_option) {
            return Err(what);
        }
    }
    if only(head, "sec-websocket-version") != Some(b"13") {
        return Err("Sec-WebSocket-Version is not 13");
    }
    let is_key = |key: &&[u8]| base64::decode(key).is_some_and(|key| key.len() == KEY_BYTES);
    only(head, "sec-websocket-key")
        .filter(is_key)
        .ok_or("Sec-WebSocket-Key is not the base64 of 16 bytes")
}

/// The subprotocols that a client offers, in the order of its preference.
pub fn subprotocols(head: &Head) -> impl Iterator<Item = &[u8]> {
    elements(head, "sec-websocket-protocol")
}

/// The elements of all fields of a name, which are lists.
fn elements<'h>(head: &'h Head, name: &'h str) -> impl Iterator<Item = &'h [u8]> {
    head.values(name)
        .flat_map(|value| value.split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii)
        .filter(|element| !element.is_empty())
}

/// The value of a field that is there exactly once.
fn only<'h>(head: &'h Head, name: &'h str) -> Option<&'h [u8]> {
    let mut values = head.values(name);
    values.next().filter(|_| values.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::super::parse::{Progress, head};
    use super::*;

    const RIGHT: &str = "GET /chat HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
        Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n";

    fn parsed(request: &str) -> Head {
        match head(format!("{request}\r\n").as_bytes()) {
            Ok(Progress::Complete(head, _)) => head,
            other => panic!("{other:?}"),
        }
    }

    /// The example of RFC 6455 section 1.3.
    #[test]
    fn the_example_of_the_standard_is_accepted() {
        let mut handshake = Handshake::of(&parsed(RIGHT)).unwrap();
        handshake.selected = Some("chat");
        let mut out = Vec::new();
        handshake.append_head(&mut out);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSec-WebSocket-Protocol: chat\r\n"
        );
    }

    #[test]
    fn the_options_are_lists_in_any_case() {
        let request = RIGHT
            .replace("Upgrade: websocket", "UPGRADE: h2c\r\nUpgrade: , WebSocket")
            .replace("Connection: Upgrade", "Connection: keep-alive, UPGRADE");
        assert!(Handshake::of(&parsed(&request)).is_ok());
    }

    #[test]
    fn anything_else_is_refused_with_what_is_missing() {
        for (right, wrong, what) in [
            ("GET", "POST", "no GET"),
            ("GET", "HEAD", "no GET"),
            ("HTTP/1.1", "HTTP/1.0", "no GET"),
            ("Host: h", "Host: h\r\nContent-Length: 1", "body"),
            ("Host: h", "Host: h\r\nTransfer-Encoding: chunked", "body"),
            ("Upgrade: websocket\r\n", "", "no Upgrade"),
            ("Upgrade: websocket", "Upgrade: websockets", "no Upgrade"),
            ("Connection: Upgrade\r\n", "", "no Connection"),
            ("Connection: Upgrade", "Connection: close", "no Connection"),
            ("Version: 13", "Version: 8", "Version"),
            ("Version: 13", "Version: 13, 8", "Version"),
            ("Sec-WebSocket-Version: 13\r\n", "", "Version"),
            ("dGhlIHNhbXBsZSBub25jZQ==", "", "Key"),
            ("dGhlIHNhbXBsZSBub25jZQ==", "dGhlIHNhbXBsZSBub25j", "Key"),
            ("dGhlIHNhbXBsZSBub25jZQ==", "dGhlIHNhbXBsZSBub25jZQ", "Key"),
            (
                "dGhlIHNhbXBsZSBub25jZQ==",
                "dGhlIHNhbXBsZSBub25jZR==",
                "Key",
            ),
            (
                "dGhlIHNhbXBsZSBub25jZQ==",
                "!GhlIHNhbXBsZSBub25jZQ==",
                "Key",
            ),
            (
                "Host: h",
                "Host: h\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
                "Key",
            ),
        ] {
            assert!(RIGHT.contains(right));
            let refusal = Handshake::of(&parsed(&RIGHT.replacen(right, wrong, 1))).unwrap_err();
            assert_eq!((refusal.status, refusal.code), (426, "upgrade_required"));
            assert!(refusal.text.contains(what), "{}", refusal.text);
            let names: Vec<_> = refusal.headers.iter().map(|(name, _)| *name).collect();
            assert_eq!(names, ["Upgrade", "Connection", "Sec-WebSocket-Version"]);
        }
    }

    #[test]
    fn subprotocols_are_in_the_order_of_preference() {
        let request =
            format!("{RIGHT}Sec-WebSocket-Protocol: a,b , ,c\r\nSec-WebSocket-Protocol: d\r\n");
        let head = parsed(&request);
        let found: Vec<_> = subprotocols(&head).collect();
        assert_eq!(found, [b"a", b"b", b"c", b"d"]);
    }
}
