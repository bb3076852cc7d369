//! The endpoint for MCP clients, by raw requests: both eras of the protocol, every tool, and what no client sends.
//!
//! Clients that others wrote use it in [`clients`].

mod clients;
mod files;
mod hostile;
mod protocol;
mod tools;

use serde_json::{Value, json};

use crate::fixture::{Connection, Reply, Sandbox, Server, TempDir, is_root};

const ACCEPT: (&str, &str) = ("accept", "application/json, text/event-stream");
const MODERN: &str = "2026-07-28";
const SERVER_INFO: &str = "io.modelcontextprotocol/serverInfo";

/// An endpoint, and a token that opens it.
struct Endpoint<'a> {
    server: &'a Server,
    target: String,
    token: String,
}

impl<'a> Endpoint<'a> {
    /// That of a machine.
    fn of(server: &'a Server) -> Self {
        Self {
            server,
            target: "/mcp".to_owned(),
            token: server.token.clone().unwrap_or_default(),
        }
    }

    /// That of a sandbox, by its own token.
    fn of_sandbox(server: &'a Server, sandbox: &Sandbox<'_>) -> Self {
        Self {
            token: sandbox.token.clone(),
            ..Self::of(server)
        }
    }

    /// A connection that sends no credentials by itself.
    fn connect(&self) -> Connection {
        let mut connection = self.server.connect();
        connection.token = None;
        connection
    }

    /// Sends a message with these headers besides the token.
    #[track_caller]
    fn send(&self, headers: &[(&str, &str)], body: &[u8]) -> Connection {
        let mut connection = self.connect();
        let token = format!("Bearer {}", self.token);
        let own = [("authorization", &*token), ("host", "localhost")];
        connection.send_request("POST", &self.target, &[&own, headers].concat(), body);
        connection
    }

    #[track_caller]
    fn post(&self, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        self.send(&[&[ACCEPT], headers].concat(), body).read_reply()
    }

    /// A request of the former era.
    #[track_caller]
    fn legacy(&self, method: &str, params: &Value) -> Reply {
        let message = json!({ "jsonrpc": "2.0", "id": 7, "method": method, "params": params });
        self.post(&[], message.to_string().as_bytes())
    }

    /// Sends a request of the present era.
    #[track_caller]
    fn send_modern(&self, method: &str, params: &Value) -> Connection {
        let (headers, body) = modern(method, params);
        let headers = headers.iter().map(|(name, value)| (*name, &**value));
        let headers: Vec<_> = [ACCEPT].into_iter().chain(headers).collect();
        self.send(&headers, body.to_string().as_bytes())
    }

    /// A request of the present era.
    #[track_caller]
    fn modern(&self, method: &str, params: &Value) -> Reply {
        self.send_modern(method, params).read_reply()
    }

    /// The result of a call.
    #[track_caller]
    fn result(&self, tool: &str, arguments: &Value) -> Value {
        let reply = self.modern(
            "tools/call",
            &json!({ "name": tool, "arguments": arguments }),
        );
        assert_eq!(reply.status, 200, "{}", reply.text());
        let document = document_of(&reply);
        assert_eq!(document["id"], 7, "{document}");
        assert!(document["result"].is_object(), "{document}");
        document["result"].clone()
    }

    /// What a tool gives programs.
    #[track_caller]
    fn call(&self, tool: &str, arguments: &Value) -> Value {
        let result = self.result(tool, arguments);
        assert_eq!(result["isError"], false, "{tool} {arguments}: {result}");
        result["structuredContent"].clone()
    }

    /// Expects a tool to fail with this code; returns the text of the error.
    #[track_caller]
    fn fails(&self, tool: &str, arguments: &Value, code: &str) -> String {
        let result = self.result(tool, arguments);
        assert_eq!(result["isError"], true, "{tool} {arguments}: {result}");
        let structured = &result["structuredContent"];
        assert_eq!(structured["code"], code, "{structured}");
        let text = structured["error"].as_str().unwrap().to_owned();
        assert_eq!(result["content"][0]["text"], text);
        text
    }
}

/// The headers and the body of a request of the present era.
fn modern(method: &str, params: &Value) -> (Vec<(&'static str, String)>, Value) {
    let mut params = params.clone();
    params["_meta"]["io.modelcontextprotocol/protocolVersion"] = MODERN.into();
    params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = json!({});
    let mut headers = vec![
        ("mcp-protocol-version", MODERN.to_owned()),
        ("mcp-method", method.to_owned()),
    ];
    headers.extend(
        params["name"]
            .as_str()
            .map(|name| ("mcp-name", name.to_owned())),
    );
    let body = json!({ "jsonrpc": "2.0", "id": 7, "method": method, "params": params });
    (headers, body)
}

/// The last document of an answer: the body, or the last event of a stream.
#[track_caller]
fn document_of(reply: &Reply) -> Value {
    match reply.header("content-type") {
        Some("application/json") => reply.json(),
        Some("text/event-stream") => events_of(&reply.text()).pop().expect("there is an event"),
        other => panic!("{other:?}: {}", reply.text()),
    }
}

/// The documents of a stream of events. Comments are left out.
#[track_caller]
fn events_of(stream: &str) -> Vec<Value> {
    let blocks = stream.split_terminator("\n\n");
    let events = blocks.filter(|block| !block.starts_with(':'));
    let document = |block: &str| {
        let data = block.strip_prefix("event: message\ndata: ").expect(block);
        assert!(!data.contains('\n'), "{data:?}");
        serde_json::from_str(data).unwrap()
    };
    events.map(document).collect()
}

/// A machine that is one sandbox, with a directory of its own.
fn machine() -> (TempDir, Server) {
    let home = TempDir::new();
    let builder = Server::builder();
    let mut command = builder.command();
    command.current_dir(home.path());
    (home, builder.start_as(command))
}

/// Does the same in both modes.
#[track_caller]
fn everywhere(check: impl Fn(&Endpoint<'_>)) {
    let (_home, server) = machine();
    check(&Endpoint::of(&server));
    on_a_host(|server, sandbox| check(&Endpoint::of_sandbox(server, sandbox)));
}

/// Does something with a sandbox of a host, where there can be one.
#[track_caller]
fn on_a_host(check: impl Fn(&Server, &Sandbox<'_>)) {
    if !is_root() {
        crate::skip!("host mode needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    check(&server, &sandbox);
}
