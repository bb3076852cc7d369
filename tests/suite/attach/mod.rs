//! Attaching to terminals over `WebSocket`.

mod clients;
mod ending;
mod handshake;
mod hostile;
mod input;
mod output;

use serde_json::{Value, json};

use crate::fixture::{Connection, PATIENCE, Sandbox, Server, WebSocket, is_root, wait_until};

/// Where terminals run: on a dedicated machine, or in a sandbox of a host.
pub struct Place<'a> {
    pub server: &'a Server,
    sandbox: Option<Sandbox<'a>>,
}

impl<'a> Place<'a> {
    pub fn in_sandbox(server: &'a Server) -> Self {
        let sandbox = Some(server.sandbox());
        Self { server, sandbox }
    }

    pub fn target(&self, route: &str) -> String {
        match &self.sandbox {
            Some(sandbox) => sandbox.target(route),
            None => format!("/v1/{route}"),
        }
    }

    pub fn connect(&self) -> Connection {
        match &self.sandbox {
            Some(sandbox) => sandbox.connect(),
            None => self.server.connect(),
        }
    }

    #[track_caller]
    pub fn post(&self, route: &str, body: &Value) -> Value {
        let target = self.target(route);
        let body = body.to_string();
        let reply = self
            .connect()
            .request("POST", &target, &[], body.as_bytes());
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    /// Starts a script at a terminal and returns the process's id.
    #[track_caller]
    pub fn terminal(&self, script: &str) -> String {
        let body = json!({ "cmd": script, "pty": true });
        let started = self.post("processes", &body);
        started["id"].as_str().unwrap().to_owned()
    }

    /// Starts a program that sets its input up by `stty`, says so, and reads. Returns when it
    /// has said so: what is typed earlier is echoed.
    #[track_caller]
    pub fn reader(&self, settings: &str) -> String {
        let id = self.terminal(&format!("stty {settings}; echo ready; exec cat"));
        let target = self.target(&format!("processes/{id}/logs?plain=1"));
        wait_until("the program reads", PATIENCE, || {
            let reply = self.connect().request("GET", &target, &[], b"");
            reply.text().contains("ready")
        });
        id
    }

    #[track_caller]
    pub fn attach(&self, id: &str, query: &str) -> WebSocket {
        let target = self.target(&format!("processes/{id}/attach?{query}"));
        WebSocket::open(self.connect(), &target)
    }

    #[track_caller]
    pub fn attach_raw(&self, id: &str, query: &str) -> WebSocket {
        let target = self.target(&format!("processes/{id}/attach?{query}"));
        WebSocket::open_raw(self.connect(), &target)
    }

    pub fn delete(&self, id: &str) {
        let target = self.target(&format!("processes/{id}"));
        let reply = self.connect().request("DELETE", &target, &[], b"");
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
}

/// Runs a test on a dedicated machine and, as root, in a sandbox of a host.
pub fn in_both_modes(test: impl Fn(&Place<'_>)) {
    in_both_modes_with(&[], test);
}

/// The same with these variables of the server.
pub fn in_both_modes_with(variables: &[(&str, &str)], test: impl Fn(&Place<'_>)) {
    let with = |builder: crate::fixture::Builder| {
        variables
            .iter()
            .fold(builder, |builder, (name, value)| builder.env(name, value))
            .start()
    };
    let server = with(Server::builder());
    test(&Place {
        server: &server,
        sandbox: None,
    });
    if is_root() {
        test(&Place::in_sandbox(&with(Server::host())));
    }
}
