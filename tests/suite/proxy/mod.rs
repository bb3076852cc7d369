//! The port proxy: a server inside is reached as if there were nothing in between.
//!
//! [`Backend`] is such a server, written by hand, so that it can answer in every way that HTTP has
//! and in many that it has not. What reached it is kept byte for byte.

mod browsers;
mod credentials;
mod failing;
mod headers;
mod kept;
mod peers;
mod ports;
mod redirects;
mod relaying;
pub mod sandboxes;
mod smuggling;
mod streaming;
mod upgrades;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, socket};

use serde_json::json;

use crate::fixture::{Connection, PATIENCE, Reply, Server, TOKEN, find};

/// A server behind a port. Each connection is served by a thread of its own.
pub struct Backend {
    pub port: u16,
    received: Receiver<Received>,
}

/// One request as it came.
#[derive(Debug, Clone)]
pub struct Received {
    /// The request line and the header lines, without the empty line.
    pub head: String,
    /// Out of its framing.
    pub body: Vec<u8>,
}

impl Received {
    pub fn line(&self) -> &str {
        self.head.lines().next().unwrap()
    }

    /// The values of a header, whatever the case of its name.
    pub fn values(&self, name: &str) -> Vec<&str> {
        self.head
            .split("\r\n")
            .skip(1)
            .map(|line| line.split_once(": ").unwrap())
            .filter(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
            .collect()
    }

    /// The value of a header that must be there once.
    #[track_caller]
    pub fn value(&self, name: &str) -> &str {
        let values = self.values(name);
        assert_eq!(values.len(), 1, "{name}: {values:?}");
        values[0]
    }
}

/// A connection as the backend has it.
pub struct Accepted {
    pub stream: TcpStream,
    /// Received and not used.
    pub buffer: Vec<u8>,
    told: Sender<Received>,
}

impl Accepted {
    /// Receives once; false at the end.
    pub fn fill(&mut self) -> bool {
        let mut piece = vec![0; 64 * 1024];
        match self.stream.read(&mut piece) {
            Ok(0) | Err(_) => false,
            Ok(count) => {
                self.buffer.extend_from_slice(&piece[..count]);
                true
            }
        }
    }

    /// Reads the head of a request and hands it to the test.
    pub fn read_head(&mut self) -> Option<Received> {
        let end = loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                break end;
            }
            if !self.fill() {
                return None;
            }
        };
        let head: Vec<u8> = self.buffer.drain(..end + 4).collect();
        // Bytes that are not text are kept apart, one character each.
        let head = head[..end].iter().map(|byte| char::from(*byte)).collect();
        Some(Received {
            head,
            body: Vec::new(),
        })
    }

    /// Reads a whole request, and tells the test.
    pub fn read_request(&mut self) -> Option<Received> {
        let mut request = self.read_head()?;
        if request.values("transfer-encoding") == ["chunked"] {
            request.body = self.read_chunks()?;
        } else if let [length] = request.values("content-length")[..] {
            let length = length.parse().unwrap();
            request.body = self.take(length)?;
        }
        let _ = self.told.send(request.clone());
        Some(request)
    }

    fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < length {
            if !self.fill() {
                return None;
            }
        }
        Some(self.buffer.drain(..length).collect())
    }

    fn read_chunks(&mut self) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let end = loop {
                if let Some(end) = find(&self.buffer, b"\r\n") {
                    break end;
                }
                if !self.fill() {
                    return None;
                }
            };
            let line = self.take(end + 2)?;
            let size = std::str::from_utf8(&line[..end]).unwrap();
            let size = usize::from_str_radix(size, 16).unwrap();
            let chunk = self.take(size + 2)?;
            body.extend_from_slice(&chunk[..size]);
            if size == 0 {
                return Some(body);
            }
        }
    }

    /// Sends bytes as they are; false if nobody takes them.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// Everything that comes until the end.
    pub fn read_to_end(&mut self) -> Vec<u8> {
        while self.fill() {}
        std::mem::take(&mut self.buffer)
    }
}

/// A door through which clients reach a server inside. All of them do it in the same way.
pub struct Way {
    pub name: &'static str,
    /// Before the path that the server sees.
    pub prefix: String,
    /// What its requests have besides.
    pub headers: Vec<(&'static str, String)>,
}

impl Way {
    /// All ways to a port of a machine that is the only sandbox.
    pub fn all(server: &Server, port: u16) -> [Self; 3] {
        let ticket = server.post("/v1/tickets", &json!({ "port": port })).json();
        let ticket = ticket["path"].as_str().unwrap().trim_end_matches('/');
        [
            Self::proxy(port),
            Self {
                name: "ticket",
                prefix: ticket.to_owned(),
                headers: Vec::new(),
            },
            Self {
                name: "E2B's name",
                prefix: String::new(),
                headers: vec![
                    ("Host", format!("{port}-machine.localhost")),
                    ("E2B-Traffic-Access-Token", TOKEN.to_owned()),
                ],
            },
        ]
    }

    /// The way by REST.
    pub fn proxy(port: u16) -> Self {
        Self {
            name: "proxy",
            prefix: format!("/v1/proxy/{port}"),
            headers: vec![("X-Sandbox-Token", TOKEN.to_owned())],
        }
    }

    /// A connection of a client that sends nothing by itself.
    pub fn connect(server: &Server) -> Connection {
        let mut connection = server.connect();
        connection.token = None;
        connection
    }

    pub fn send(
        &self,
        client: &mut Connection,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) {
        let own = self.headers.iter().map(|(name, value)| (*name, &**value));
        let headers: Vec<_> = own.chain(headers.iter().copied()).collect();
        let target = format!("{}{path}", self.prefix);
        client.send_request(method, &target, &headers, body);
    }

    #[track_caller]
    pub fn request(
        &self,
        client: &mut Connection,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Reply {
        self.send(client, method, path, headers, body);
        client.read_reply_to(method)
    }

    #[track_caller]
    pub fn get(&self, client: &mut Connection, path: &str) -> Reply {
        self.request(client, "GET", path, &[], b"")
    }
}

/// A port of 127.0.0.1 on which nobody listens, nor can meanwhile.
pub struct SilentPort {
    pub port: u16,
    _socket: OwnedFd,
}

impl SilentPort {
    pub fn new() -> Self {
        let (family, kind) = (AddressFamily::Inet, SockType::Stream);
        let socket = socket(family, kind, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(socket.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
        let address: SockaddrIn = getsockname(socket.as_raw_fd()).unwrap();
        Self {
            port: address.port(),
            _socket: socket,
        }
    }
}

impl Backend {
    pub fn start(serve: impl Fn(Accepted) + Send + Sync + 'static) -> Self {
        Self::on("127.0.0.1:0", serve)
    }

    pub fn on(address: &str, serve: impl Fn(Accepted) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (told, received) = channel();
        let serve = std::sync::Arc::new(serve);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (serve, told) = (std::sync::Arc::clone(&serve), told.clone());
                let _ = stream.set_read_timeout(Some(3 * PATIENCE));
                let accepted = Accepted {
                    stream,
                    buffer: Vec::new(),
                    told,
                };
                thread::spawn(move || serve(accepted));
            }
        });
        Self { port, received }
    }

    /// Answers every request with the same bytes, and closes.
    pub fn answering(response: impl AsRef<[u8]>) -> Self {
        let response = response.as_ref().to_vec();
        Self::start(move |mut connection| {
            if connection.read_request().is_some() {
                connection.send(&response);
                let _ = connection.stream.shutdown(Shutdown::Write);
                connection.read_to_end();
            }
        })
    }

    /// Answers every request with `text`.
    pub fn saying(text: &str) -> Self {
        let length = text.len();
        Self::answering(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{text}"
        ))
    }

    /// The path of `rest` at this server.
    pub fn path(&self, rest: &str) -> String {
        format!("/v1/proxy/{}{rest}", self.port)
    }

    /// The next request that came to it whole.
    #[track_caller]
    pub fn next(&self) -> Received {
        self.received
            .recv_timeout(PATIENCE)
            .expect("a request reaches the server")
    }

    /// Asserts that no (further) request has reached it.
    #[track_caller]
    pub fn expect_nothing(&self) {
        let request = self.received.recv_timeout(Duration::from_millis(50));
        assert!(request.is_err(), "{request:?}");
    }
}
