//! A raw HTTP client: one connection, a request, its answer. It asserts instead of returning errors:
//! what uses it cannot go on after one, and a figure from a failed request would be none.
//!
//! Stands alone, so that other programs beside the bench can use it too.

use std::io::{Read, Write};
use std::net::TcpStream;

/// What every server that is started here takes for its token.
pub const TOKEN: &str = "bench";

/// How much is moved by one read or write.
pub const BLOCK: usize = 256 << 10;

/// One connection, and what it has received and not yet used.
pub struct Client {
    pub stream: TcpStream,
    buffer: Vec<u8>,
    used: usize,
    filled: usize,
}

/// How a reply's body is framed.
pub enum Framing {
    Length(usize),
    Chunked,
}

impl Client {
    pub fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        Self {
            stream,
            buffer: Vec::new(),
            used: 0,
            filled: 0,
        }
    }

    /// Sends a request that announces `length` bytes of body and begins with `body`.
    pub fn send(&mut self, method: &str, target: &str, length: usize, body: &[u8]) {
        let request = request(method, target, "", length, body);
        self.stream.write_all(&request).unwrap();
    }

    /// Received and not yet used.
    pub fn rest(&self) -> &[u8] {
        &self.buffer[self.used..self.filled]
    }

    /// Receives once.
    pub fn fill(&mut self) {
        if self.used == self.filled {
            self.used = 0;
            self.filled = 0;
        } else if self.buffer.len() - self.filled < BLOCK / 2 {
            self.buffer.copy_within(self.used..self.filled, 0);
            self.filled -= self.used;
            self.used = 0;
        }
        if self.buffer.len() - self.filled < BLOCK / 2 {
            self.buffer.resize(self.filled + BLOCK, 0);
        }
        let length = self.stream.read(&mut self.buffer[self.filled..]).unwrap();
        assert!(length > 0, "the connection ended too soon");
        self.filled += length;
    }

    /// Reads the head of a reply that must have a status like this.
    pub fn raw_head(&mut self, status: &[u8]) -> &[u8] {
        let end = loop {
            if let Some(end) = find(self.rest(), b"\r\n\r\n") {
                break end + 4;
            }
            self.fill();
        };
        let head = &self.buffer[self.used..self.used + end];
        self.used += end;
        let line = head.strip_prefix(b"HTTP/1.1 ");
        let is_as_expected = line.is_some_and(|line| line.starts_with(status));
        assert!(is_as_expected, "{}", String::from_utf8_lossy(head));
        head
    }

    /// Reads the head of a reply that must be a success.
    pub fn head(&mut self) -> Framing {
        let head = self.raw_head(b"2");
        let header = |name: &[u8]| {
            let lines = head.split(|byte| *byte == b'\n');
            let named = |line: &&[u8]| {
                let own = line.get(..name.len());
                own.is_some_and(|own| own.eq_ignore_ascii_case(name))
            };
            Some(lines.into_iter().find(named)?[name.len()..].trim_ascii())
        };
        match header(b"content-length:") {
            Some(length) => Framing::Length(std::str::from_utf8(length).unwrap().parse().unwrap()),
            None if head.starts_with(b"HTTP/1.1 204") => Framing::Length(0),
            None => {
                let coding = header(b"transfer-encoding:");
                assert_eq!(coding, Some(&b"chunked"[..]));
                Framing::Chunked
            }
        }
    }

    /// Hands `length` bytes to `take`, in pieces.
    pub fn take(&mut self, length: usize, mut take: impl FnMut(&[u8])) {
        let mut left = length;
        while left > 0 {
            if self.rest().is_empty() {
                self.fill();
            }
            let piece = self.rest().len().min(left);
            take(&self.rest()[..piece]);
            self.used += piece;
            left -= piece;
        }
    }

    /// The whole body, in pieces.
    pub fn body(&mut self, mut take: impl FnMut(&[u8])) {
        match self.head() {
            Framing::Length(length) => self.take(length, take),
            Framing::Chunked => loop {
                let line = loop {
                    if let Some(end) = find(self.rest(), b"\r\n") {
                        break end;
                    }
                    self.fill();
                };
                let size = std::str::from_utf8(&self.rest()[..line]).unwrap();
                let size = usize::from_str_radix(size, 16).unwrap();
                self.used += line + 2;
                self.take(size, &mut take);
                self.take(2, |_| ());
                if size == 0 {
                    return;
                }
            },
        }
    }

    /// A short reply's body.
    pub fn reply(&mut self) -> String {
        let mut body = Vec::new();
        self.body(|piece| body.extend_from_slice(piece));
        String::from_utf8(body).unwrap()
    }

    /// The body of a short answer with a length, where it was received.
    pub fn short_reply(&mut self) -> &[u8] {
        let Framing::Length(length) = self.head() else {
            panic!("a length was expected");
        };
        while self.rest().len() < length {
            self.fill();
        }
        self.used += length;
        &self.buffer[self.used - length..self.used]
    }

    pub fn health(&mut self) {
        self.send("GET", "/health", 0, b"");
        let reply = self.reply();
        assert!(reply.contains(r#""status":"ok""#), "{reply}");
    }

    /// Sends a small JSON document; the answer's body.
    pub fn post(&mut self, target: &str, body: &str) -> String {
        self.send("POST", target, body.len(), body.as_bytes());
        self.reply()
    }

    pub fn run_true(&mut self) {
        self.run_true_in("/v1");
    }

    /// `prefix` says in which sandbox.
    pub fn run_true_in(&mut self, prefix: &str) {
        let events = self.post(&format!("{prefix}/exec"), r#"{"cmd":["/bin/true"]}"#);
        assert!(events.contains(r#""exit_code":0"#), "{events}");
    }
}

/// The bytes of a request that announces `length` bytes of body and begins with `body`. `headers` are
/// more of them, each with its line's end.
pub fn request(method: &str, target: &str, headers: &str, length: usize, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "{method} {target} HTTP/1.1\r\nHost: sandbox\r\nX-Sandbox-Token: {TOKEN}\r\n{headers}Content-Length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

/// Position of `needle`, which is near the start if it is there at all.
pub fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack
        .windows(needle.len())
        .position(|window| window == needle)
}
