//! Terminals over plain HTTP: what programs see of theirs, and what clients can do to it.
//!
//! Most tests run in both modes by the same code: see [`everywhere`]. [`Screen`] is a person at a terminal:
//! types, and waits for what should appear.

mod ending;
mod input;
mod plain;
mod programs;
mod refusals;
mod start;
mod walls;

use std::cell::RefCell;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::fixture::{
    Connection, EventStream, PATIENCE, Reply, Sandbox, Server, events_of, find, is_root, output_of,
};

/// A workspace of either mode.
enum Place<'a> {
    Machine(&'a Server),
    Sandbox(&'a Sandbox<'a>),
}

impl Place<'_> {
    #[track_caller]
    fn request(&self, method: &str, route: &str, body: &[u8]) -> Reply {
        self.connect()
            .request(method, &self.target(route), &[], body)
    }

    #[track_caller]
    fn post(&self, route: &str, body: &Value) -> Reply {
        self.request("POST", route, body.to_string().as_bytes())
    }

    #[track_caller]
    fn get(&self, route: &str) -> Reply {
        self.request("GET", route, b"")
    }

    #[track_caller]
    fn stream(&self, method: &str, route: &str, body: &Value) -> EventStream {
        let body = body.to_string();
        let body = if method == "GET" { "" } else { &body };
        self.connect()
            .stream(method, &self.target(route), body.as_bytes())
    }

    fn connect(&self) -> Connection {
        match self {
            Self::Machine(server) => server.connect(),
            Self::Sandbox(sandbox) => sandbox.connect(),
        }
    }

    fn target(&self, route: &str) -> String {
        match self {
            Self::Machine(_) => format!("/v1/{route}"),
            Self::Sandbox(sandbox) => sandbox.target(route),
        }
    }

    /// Starts a command in the background at a terminal.
    #[track_caller]
    fn open(&self, body: &Value) -> Screen<'_> {
        let reply = self.post("processes", body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        Screen {
            place: self,
            process: reply.json(),
            seen: RefCell::new((0, Vec::new())),
        }
    }

    /// A shell whose prompt and echo do not disturb what a test waits for.
    #[track_caller]
    fn shell(&self) -> Screen<'_> {
        let screen = self.open(&shell());
        screen.expect("$ ");
        screen
    }
}

fn shell() -> Value {
    let environment = json!({ "PS1": "$ ", "TERM": "dumb" });
    json!({ "cmd": ["bash", "--norc"], "pty": true, "env": environment })
}

/// Runs a test on a dedicated machine and in a sandbox.
fn everywhere(test: impl Fn(&Place<'_>)) {
    test(&Place::Machine(&Server::start()));
    if is_root() {
        let server = Server::host().env("PATH", SYSTEM_PATH).start();
        test(&Place::Sandbox(&server.sandbox()));
    }
}

/// Where programs are on every machine; the test's own PATH may lead into root's home.
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A process at a terminal, and somebody who looks at it.
struct Screen<'a> {
    place: &'a Place<'a>,
    process: Value,
    /// The offset up to which the output was fetched, and what of it no [`Screen::expect`] has passed.
    seen: RefCell<(u64, Vec<u8>)>,
}

impl Screen<'_> {
    fn route(&self, rest: &str) -> String {
        format!("processes/{}{rest}", self.process["id"].as_str().unwrap())
    }

    #[track_caller]
    fn post(&self, rest: &str, body: &Value) -> Reply {
        self.place.post(&self.route(rest), body)
    }

    /// Types keys.
    #[track_caller]
    fn press(&self, keys: &str) {
        let reply = self
            .place
            .request("POST", &self.route("/stdin"), keys.as_bytes());
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json(), json!({ "written": keys.len(), "eof": false }));
    }

    /// Fetches what was written since.
    #[track_caller]
    fn fetch(&self) {
        let (offset, rest) = &mut *self.seen.borrow_mut();
        let query = format!("/logs?encoding=base64&stdout_offset={offset}");
        let reply = self.place.get(&self.route(&query));
        assert_eq!(reply.status, 200, "{}", reply.text());
        let output = output_of(&events_of(&reply.body), "stdout", *offset);
        assert_eq!(output.dropped, 0);
        *offset = output.end;
        rest.extend(output.data);
    }

    /// Waits for a text and passes it by. Returns what came before it.
    #[track_caller]
    fn expect(&self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.fetch();
            let rest = &mut self.seen.borrow_mut().1;
            let at = find(rest, text.as_bytes());
            if let Some(at) = at {
                let before = String::from_utf8_lossy(&rest[..at]).into_owned();
                rest.drain(..at + text.len());
                return before;
            }
            let seen = String::from_utf8_lossy(rest);
            assert!(Instant::now() < deadline, "{text:?} is not in {seen:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the end; returns the process's document.
    #[track_caller]
    fn end(&self) -> Value {
        let reply = self.place.get(&self.route("/wait?timeout=20"));
        assert_eq!(reply.status, 200, "{}", reply.text());
        let document = reply.json();
        assert_eq!(document["running"], false, "{document}");
        document
    }

    #[track_caller]
    fn entry(&self) -> Value {
        self.place.get(&self.route("")).json()
    }

    #[track_caller]
    fn resize(&self, rows: u16, columns: u16) {
        let reply = self.post("/resize", &json!({ "rows": rows, "cols": columns }));
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(
            reply.json(),
            json!({ "id": self.process["id"], "rows": rows, "cols": columns })
        );
    }

    /// Signals the foreground group.
    #[track_caller]
    fn interrupt(&self, signal: &str) -> Value {
        let reply = self.post("/kill", &json!({ "signal": signal, "group": "foreground" }));
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }
}
