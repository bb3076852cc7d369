//! The door for E2B's SDKs, by raw requests: every form that a client relies on, and what no client sends.
//!
//! The unmodified SDKs do real work in [`sdk`].

mod access;
mod builds;
mod cli;
mod code;
mod entries;
mod files;
mod frameworks;
mod hostile;
mod logs;
mod pausing;
mod processes;
mod roots;
mod sandboxes;
mod sdk;
mod temporary;
mod watches;

use serde_json::{Value, json};

use crate::fixture::{Connection, Reply, Server, TOKEN, TempDir, is_root};

/// A sandbox that this door has made, or the machine.
struct Door<'a> {
    server: &'a Server,
    id: String,
    token: String,
}

/// One message of a stream: its flags, and its document.
type Message = (u8, Value);

impl<'a> Door<'a> {
    /// A new sandbox of a host, or the machine itself.
    #[track_caller]
    fn open(server: &'a Server) -> Self {
        Self::with(server, &json!({ "templateID": "base" }))
    }

    #[track_caller]
    fn with(server: &'a Server, body: &Value) -> Self {
        let reply = api(server, "POST", "/v2/sandboxes", body);
        assert_eq!(reply.status, 201, "{}", reply.text());
        let made = reply.json();
        let text = |name: &str| made[name].as_str().unwrap().to_owned();
        Self {
            server,
            id: text("sandboxID"),
            token: text("envdAccessToken"),
        }
    }

    /// A connection that sends no credentials by itself.
    fn connect(&self) -> Connection {
        let mut connection = self.server.connect();
        connection.token = None;
        connection
    }

    /// A request of a client of the sandbox.
    #[track_caller]
    fn request(&self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        let own = [
            ("e2b-sandbox-id", &*self.id),
            ("x-access-token", &self.token),
        ];
        let headers = [&own, headers].concat();
        self.connect().request(method, target, &headers, body)
    }

    /// A unary call.
    #[track_caller]
    fn call(&self, method: &str, message: &Value) -> Reply {
        let headers = [
            ("content-type", "application/json"),
            ("connect-protocol-version", "1"),
        ];
        self.request("POST", method, &headers, message.to_string().as_bytes())
    }

    /// The answer of a unary call that succeeds.
    #[track_caller]
    fn ok(&self, method: &str, message: &Value) -> Value {
        let reply = self.call(method, message);
        assert_eq!(reply.status, 200, "{method} {message}: {}", reply.text());
        assert_eq!(reply.header("content-type"), Some("application/json"));
        reply.json()
    }

    /// Expects a unary call to fail.
    #[track_caller]
    fn fails(&self, method: &str, message: &Value, status: u16, code: &str) -> String {
        let reply = self.call(method, message);
        assert_eq!(reply.status, status, "{method} {message}: {}", reply.text());
        let document = reply.json();
        assert_eq!(document["code"], code, "{document}");
        document["message"].as_str().unwrap().to_owned()
    }

    /// Begins a streaming call and reads the head of its answer.
    #[track_caller]
    fn begin(&self, method: &str, message: &Value, headers: &[(&str, &str)]) -> Stream {
        let mut connection = self.connect();
        let own = [
            ("e2b-sandbox-id", &*self.id),
            ("x-access-token", &self.token),
            ("content-type", "application/connect+json"),
        ];
        let body = envelope(0, message.to_string().as_bytes());
        connection.send_request("POST", method, &[&own, headers].concat(), &body);
        let head = connection.read_head();
        let (status, is_whole) = (head.status, head.header("content-length").is_some());
        let kind = head.header("content-type").map(str::to_owned);
        let whole = (is_whole || status != 200).then(|| connection.read_body(head).body);
        let text = whole.as_deref().map(String::from_utf8_lossy);
        assert_eq!(status, 200, "{text:?}");
        assert_eq!(kind.as_deref(), Some("application/connect+json"));
        Stream {
            whole,
            connection,
            received: Vec::new(),
            has_ended: false,
        }
    }

    /// All messages of a streaming call.
    #[track_caller]
    fn stream(&self, method: &str, message: &Value) -> Vec<Message> {
        self.begin(method, message, &[]).rest()
    }

    /// The error at the end of a streaming call that has no other message.
    #[track_caller]
    fn stream_fails(&self, method: &str, message: &Value) -> (String, String) {
        let messages = self.stream(method, message);
        let [(2, end)] = &messages[..] else {
            panic!("{messages:?}");
        };
        let text = |name: &str| end["error"][name].as_str().unwrap().to_owned();
        (text("code"), text("message"))
    }

    /// Runs a command in a shell to its end.
    #[track_caller]
    fn sh(&self, script: &str) -> Ran {
        self.run(&json!({ "cmd": "/bin/sh", "args": ["-c", script] }))
    }

    #[track_caller]
    fn run(&self, process: &Value) -> Ran {
        let start = json!({ "process": process, "stdin": false });
        Ran::of(&self.stream("/process.Process/Start", &start))
    }
}

/// A streaming call whose messages are read one by one.
struct Stream {
    connection: Connection,
    /// An answer that was known as a whole.
    whole: Option<Vec<u8>>,
    received: Vec<u8>,
    has_ended: bool,
}

impl Stream {
    /// The next message; `None` after the last one.
    #[track_caller]
    fn next(&mut self) -> Option<Message> {
        loop {
            if let Some(message) = take_message(&mut self.received) {
                assert!(!self.has_ended, "a message after the end: {message:?}");
                self.has_ended = message.0 == 2;
                return Some(message);
            }
            match self.whole.take() {
                Some(whole) => self.received.extend(whole),
                None if self.received.is_empty() && self.has_ended => {
                    return None;
                }
                None => match self.connection.read_chunk() {
                    Some(chunk) => self.received.extend(chunk),
                    None => panic!("the stream ended inside of a message: {:?}", self.received),
                },
            }
        }
    }

    /// The rest; the last message is the end of the stream.
    #[track_caller]
    fn rest(mut self) -> Vec<Message> {
        let mut messages = Vec::new();
        while let Some(message) = self.next() {
            messages.push(message);
        }
        assert!(self.has_ended, "{messages:?}");
        messages
    }
}

fn take_message(received: &mut Vec<u8>) -> Option<Message> {
    let length = received.get(1..5)?;
    let length = u32::from_be_bytes(length.try_into().unwrap()) as usize;
    if received.len() < 5 + length {
        return None;
    }
    let message: Vec<u8> = received.drain(..5 + length).collect();
    Some((message[0], serde_json::from_slice(&message[5..]).unwrap()))
}

fn envelope(flags: u8, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[flags], &length[..], message].concat()
}

/// What a command has done.
#[derive(Debug)]
struct Ran {
    pid: i64,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    end: Value,
}

impl Ran {
    #[track_caller]
    fn of(messages: &[Message]) -> Self {
        let mut messages = messages.iter();
        let mut event = || messages.next().unwrap_or_else(|| panic!("no end"));
        let (0, first) = event() else {
            panic!("no start");
        };
        let mut ran = Self {
            pid: first["event"]["start"]["pid"].as_i64().unwrap(),
            stdout: Vec::new(),
            stderr: Vec::new(),
            end: Value::Null,
        };
        loop {
            let (flags, message) = event();
            let event = &message["event"];
            if *flags == 2 {
                assert_eq!(*message, json!({}), "after {ran:?}");
                return ran;
            }
            let data = &event["data"];
            for (name, out) in [("stdout", &mut ran.stdout), ("stderr", &mut ran.stderr)] {
                if let Some(text) = data[name].as_str() {
                    out.extend(crate::fixture::decode_base64(text));
                }
            }
            if !event["end"].is_null() {
                assert!(ran.end.is_null(), "two ends");
                ran.end = event["end"].clone();
            }
        }
    }

    fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).unwrap()
    }
}

/// A request of a client of the API.
#[track_caller]
fn api(server: &Server, method: &str, target: &str, body: &Value) -> Reply {
    let mut connection = server.connect();
    let key = connection.token.take().unwrap_or_default();
    let body = match body {
        Value::Null => String::new(),
        body => body.to_string(),
    };
    let headers = [("x-api-key", &*key), ("content-type", "application/json")];
    connection.request(method, target, &headers, body.as_bytes())
}

/// A machine that is one sandbox, with a home of its own.
fn machine() -> (TempDir, Server) {
    let home = TempDir::new();
    let server = Server::builder().env("HOME", home.path().display()).start();
    (home, server)
}

/// Does the same in both modes.
#[track_caller]
fn everywhere(check: impl Fn(&Door<'_>)) {
    let (_home, server) = machine();
    check(&Door::open(&server));
    on_a_host(|server| check(&Door::open(server)));
}

/// Does something with a host, where there can be one.
#[track_caller]
fn on_a_host(check: impl Fn(&Server)) {
    if !is_root() {
        crate::skip!("host mode needs root");
    }
    let server = Server::host().start();
    check(&server);
}

/// The API key of servers, in the form that some clients demand.
fn long_key() -> String {
    format!("e2b_{TOKEN}")
}
