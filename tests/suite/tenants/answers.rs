//! Answers that clients ask for and do not read: with the server in a small container no tenant has it killed by
//! asking, whatever makes an answer large. A refusal is no exception.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::memory::{MIB, expect_refused, is_alive, withstand};
use super::{expect_service, head, send_and_hold};
use crate::fixture::{PATIENCE, Sandbox, Server, memory_of, threads_of, wait_until};
use crate::skip;

/// A Python that sandboxes can run.
const PYTHON: &str = "/usr/bin/python3";

/// Connections that a tenant has for this.
const CONNECTIONS: usize = 70;

/// The same for batches.
const BATCHES: usize = 200;

/// Sends a request on so many connections, one after the other, and reads no more than tells that the answers have
/// begun.
fn hold(server: &Server, request: &[u8], connections: usize) -> Vec<TcpStream> {
    let ask = |_| {
        let stream = send_and_hold(server, request);
        status(&stream);
        stream
    };
    (0..connections)
        .take_while(|_| is_alive(server))
        .map(ask)
        .collect()
}

/// The status of an answer, which nobody takes; none if there is no answer.
fn status(stream: &TcpStream) -> String {
    let mut line = [0; 12];
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let count = stream.peek(&mut line).unwrap_or(0);
    let line = String::from_utf8_lossy(&line[..count]).into_owned();
    line.strip_prefix("HTTP/1.1 ")
        .unwrap_or_default()
        .to_owned()
}

fn statuses(held: &[TcpStream]) -> Vec<String> {
    held.iter().map(status).collect()
}

fn post(sandbox: &Sandbox<'_>, route: &str, body: &[u8]) -> Vec<u8> {
    let length = format!("Content-Length: {}\r\n", body.len());
    [&head(sandbox, "POST", route, &length), body].concat()
}

/// A message to the MCP endpoint of a sandbox.
fn message(sandbox: &Sandbox<'_>, body: &str) -> Vec<u8> {
    let fields = format!("Accept: */*\r\nContent-Length: {}\r\n", body.len());
    [&head(sandbox, "POST", "mcp", &fields), body.as_bytes()].concat()
}

fn tool(sandbox: &Sandbox<'_>, name: &str, arguments: &str) -> Vec<u8> {
    let params = format!("{{\"name\":\"{name}\",\"arguments\":{arguments}}}");
    let body =
        format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{params}}}");
    message(sandbox, &body)
}

#[test]
fn refusals_that_would_quote_megabytes() {
    withstand(|server, attacker| {
        // Shown as an escape it is nearly three times as long.
        let name = "\u{200b}".repeat(MIB);
        let mut held = hold(server, &tool(attacker, &name, "{}"), CONNECTIONS / 2);
        assert_eq!(statuses(&held), vec!["200"; CONNECTIONS / 2]);
        let ping = format!("{{\"jsonrpc\":\"2.0\",\"id\":\"{name}\",\"method\":\"ping\"}}");
        held.extend(hold(server, &message(attacker, &ping), CONNECTIONS / 2));
        held
    });
}

#[test]
fn hashes() {
    withstand(|server, attacker| {
        let paths = vec!["a".repeat(1500); 1500];
        let body = json!({ "paths": paths }).to_string().into_bytes();
        let request = post(attacker, "files/hash", &body);
        let mut held = hold(server, &request, CONNECTIONS);
        let hold_more = || held.push(send_and_hold(server, &request));
        expect_refused(attacker, "POST", "files/hash", &body, "", hold_more);
        held
    });
}

#[test]
fn comparisons() {
    withstand(|server, attacker| {
        let entry = |number| {
            let path = format!("{number}{}", "b".repeat(200));
            json!({ "path": path, "size": 1 })
        };
        let entries: Vec<_> = (0..15_000).map(entry).collect();
        let body = json!({ "path": ".", "entries": entries }).to_string();
        assert_eq!(
            attacker
                .request("POST", "files/compare", body.as_bytes())
                .status,
            200
        );
        let request = post(attacker, "files/compare", body.as_bytes());
        let held = hold(server, &request, CONNECTIONS);
        // Those that fit are held, and the others refused.
        let statuses = statuses(&held);
        let granted = statuses.iter().filter(|status| *status == "200").count();
        assert!((4..CONNECTIONS / 2).contains(&granted), "{statuses:?}");
        assert!(
            statuses
                .iter()
                .all(|status| ["200", "503"].contains(&&**status))
        );
        held
    });
}

/// Each byte of what the processes have printed is a line, and everybody asks at once.
#[test]
fn the_lines_of_many_processes() {
    withstand(|server, attacker| {
        let script = "yes '' | head -c 40000; yes '' | head -c 40000 >&2";
        for _ in 0..30 {
            attacker.sh(script);
        }
        let (id, token) = (&attacker.id, &attacker.token);
        let request = format!(
            "GET /sandboxes/{id}/logs HTTP/1.1\r\nHost: localhost\r\nX-API-KEY: {token}\r\n\r\n"
        );
        let (last, most) = request.as_bytes().split_last().unwrap();
        let mut held: Vec<_> = (0..CONNECTIONS)
            .map(|_| send_and_hold(server, most))
            .collect();
        for socket in &mut held {
            let _ = socket.write_all(&[*last]);
        }
        let statuses = statuses(&held);
        let granted = statuses.iter().filter(|status| *status == "200").count();
        assert!(granted > 0, "{statuses:?}");
        assert!(
            statuses
                .iter()
                .all(|status| ["200", "503"].contains(&&**status)),
            "{statuses:?}"
        );
        held
    });
}

#[test]
fn images_for_models() {
    withstand(|server, attacker| {
        let image = [&b"\x89PNG"[..], &vec![0; 5 * MIB - 100]].concat();
        assert_eq!(attacker.put("files/write?path=x.png", &image).status, 200);
        let request = tool(attacker, "read_file", "{\"path\":\"x.png\"}");
        let (last, most) = request.split_last().unwrap();
        let mut held: Vec<_> = (0..CONNECTIONS)
            .map(|_| send_and_hold(server, most))
            .collect();
        // All at once.
        for socket in &mut held {
            let _ = socket.write_all(&[*last]);
        }
        assert_eq!(statuses(&held), vec!["200"; CONNECTIONS]);
        held
    });
}

/// Each answer of a batch is small, and clients ask for a hundred of them behind a call that waits.
#[test]
fn batches_of_messages_to_models() {
    withstand(|server, attacker| {
        attacker.spawn(&json!({ "cmd": "cat", "id": "slow" }));
        let request = |method: &str, params: Value| json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let output = json!({ "name": "output", "arguments": { "id": "slow", "wait": 60 } });
        let mut messages = vec![request("tools/call", output)];
        messages.resize(100, request("tools/list", json!({})));
        let batch = message(attacker, &json!(messages).to_string());
        let pid = server.inner_pid();
        let threads = || threads_of(pid, "connection").len();
        let memory = || memory_of(pid, "VmRSS") / MIB as u64;
        let before = memory();
        let mut held: Vec<_> = (0..BATCHES)
            .take_while(|_| is_alive(server))
            .map(|_| send_and_hold(server, &batch))
            .collect();
        assert_eq!(held.len(), BATCHES);
        wait_until("all wait", PATIENCE, || threads() >= BATCHES);
        let neighbour = server.sandbox();
        expect_service(server, &neighbour);
        // Half of them leave before their answers are made, and the answers of the others are not read.
        let left = held.split_off(BATCHES / 2);
        drop(left);
        assert_eq!(
            attacker
                .request("POST", "processes/slow/stdin", b"on\n")
                .status,
            200
        );
        assert_eq!(statuses(&held), vec!["200"; BATCHES / 2]);
        expect_service(server, &neighbour);
        drop(held);
        wait_until("nothing works on", PATIENCE, || threads() < 10);
        wait_until("the memory is given back", PATIENCE, || {
            memory() < before + 32
        });
    });
}

/// Writes a frame of a context's bridge to the server: an error that six bytes of JSON make of each of its bytes.
const FORGE: &str = r#"
import os, stat, time
value = b'\\u0001' * ((4 << 20) - 100)
frame = b'{"type":"done","error":{"name":"E","value":"' + value + b'","traceback":["t"]}}'
frame = len(frame).to_bytes(4, 'little') + frame
for number in map(int, os.listdir('/proc/self/fd')):
    try:
        if number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode):
            rest = frame
            while rest: rest = rest[os.write(number, rest):]
    except OSError:
        pass
time.sleep(1000)
"#;

#[test]
fn the_events_of_a_forged_error() {
    if Command::new("python3").arg("-V").output().is_err() {
        skip!("needs Python");
    }
    withstand(|server, attacker| {
        let context = json!({ "id": "a", "backend": "plain" });
        assert_eq!(attacker.post("contexts", &context).status, 200);
        let execute = |format: &str| {
            let body = json!({ "code": FORGE, "context": "a", "id": "forged", "format": format });
            post(attacker, "execute", body.to_string().as_bytes())
        };
        let mut held = vec![send_and_hold(server, &execute("events"))];
        let route = "contexts/a/executions/forged";
        wait_until("the execution ends", PATIENCE, || {
            attacker.get(route).json()["state"] == "ended"
        });
        let events = head(attacker, "GET", &format!("{route}/events"), "");
        let before = memory_of(server.inner_pid(), "VmRSS");
        held.extend(hold(server, &events, CONNECTIONS / 2));
        held.extend(hold(server, &execute("simple"), CONNECTIONS / 2));
        assert_eq!(statuses(&held), vec!["200"; 1 + CONNECTIONS / 2 * 2]);
        let after = memory_of(server.inner_pid(), "VmRSS");
        assert!(after < before + 40 * MIB as u64, "{before} {after}");
        drop(held);
        // Who reads gets all of it.
        let whole = attacker.get(&format!("{route}/events"));
        let lines = whole.text();
        let error = lines.lines().find(|line| line.contains("\"error\""));
        let error: serde_json::Value = serde_json::from_str(error.unwrap()).unwrap();
        assert_eq!(error["value"].as_str().unwrap().len(), (4 << 20) - 100);
    });
}

/// Each is decompressed for its client, which needs no token.
#[test]
fn files_of_the_console_for_clients_without_gzip() {
    withstand(|server, _| {
        let request = b"GET /console/xterm.mjs HTTP/1.1\r\nHost: localhost\r\n\r\n";
        // More than the kernel keeps.
        let requests = request.repeat(30);
        let mut held = Vec::new();
        while held.len() < 1000 && is_alive(server) {
            let stream = send_and_hold(server, &requests);
            match &*status(&stream) {
                "200" => held.push(stream),
                status => {
                    assert_eq!(status, "503");
                    return held;
                }
            }
        }
        panic!("{} clients are not charged", held.len());
    });
}

/// Ends the head of its answer for the path `/whole` only.
const HEADS: &str = r#"
import os, socket
server = socket.socket(socket.AF_UNIX)
server.bind(os.environ["SBX_PROXY_DIR"] + "/web.sock")
server.listen(100)
held = []
while True:
    client, _ = server.accept()
    request = client.recv(65536)
    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nA: " + b"x" * 60000)
    if b"/whole" in request:
        client.sendall(b"\r\n\r\n")
        client.close()
    else:
        held.append(client)
"#;

#[test]
fn heads_that_a_server_inside_never_ends() {
    if !Path::new(PYTHON).exists() {
        skip!("there is no Python for programs in sandboxes");
    }
    withstand(|server, attacker| {
        attacker.spawn(&json!({ "cmd": [PYTHON, "-c", HEADS] }));
        let waited = attacker.get("ports/web/wait?timeout=60");
        assert_eq!(waited.json()["listening"], true, "{}", waited.text());
        let request = head(attacker, "GET", "proxy/web/", "");
        let mut held = Vec::new();
        let route = "proxy/web/whole";
        expect_refused(attacker, "GET", route, b"", "responses", || {
            held.extend((0..20).map(|_| send_and_hold(server, &request)));
        });
        held
    });
}

/// What a request is charged for its body is enough for its refusal, too.
#[test]
fn a_refusal_takes_no_more_than_its_body_is_charged_for() {
    let server = Server::start();
    let large = "\u{200b}".repeat(5 * MIB);
    let deep = "a/".repeat(15 * MIB / 2);
    let token = server.token.clone().unwrap();
    let refusals = [
        (
            "/v1/exec",
            format!("{{\"cmd\":\"x\",\"encoding\":\"{large}\"}}"),
        ),
        (
            "/v1/exec",
            format!("{{\"code\":\"x\",\"language\":\"{large}\"}}"),
        ),
        (
            "/v1/exec",
            format!("{{\"cmd\":\"x\",\"env\":{{\"={large}\":\"\"}}}}"),
        ),
        (
            "/v1/exec",
            format!("{{\"cmd\":\"x\",\"network\":\"{large}\"}}"),
        ),
        ("/v1/files/hash", format!("{{\"paths\":[\"{large}\"]}}")),
        (
            "/v1/files/edit",
            format!("{{\"path\":\"{large}\",\"edits\":[]}}"),
        ),
        (
            "/filesystem.Filesystem/Stat",
            format!("{{\"path\":\"{large}\"}}"),
        ),
        (
            "/filesystem.Filesystem/Stat",
            format!("{{\"path\":\"{deep}\"}}"),
        ),
        (
            "/execute",
            format!("{{\"code\":\"1\",\"language\":\"{large}\"}}"),
        ),
        (
            "/mcp",
            format!("{{\"jsonrpc\":\"2.0\",\"id\":\"{large}\",\"method\":\"ping\"}}"),
        ),
        (
            "/mcp",
            format!(
                "{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{{\"name\":\"{large}\"}}}}"
            ),
        ),
        (
            "/mcp",
            format!(
                "{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{{\"name\":\"stop\",\
                 \"arguments\":{{\"{large}\":1}}}}}}"
            ),
        ),
    ];
    let mut told = String::new();
    for (target, body) in &refusals {
        let clear = format!("/proc/{}/clear_refs", server.pid());
        if std::fs::write(clear, "5").is_err() {
            skip!("the peak of memory cannot be reset here");
        }
        let before = memory_of(server.pid(), "VmRSS");
        let mut connection = server.connect();
        let fields = [
            ("accept", "*/*"),
            ("content-type", "application/json"),
            ("x-access-token", &*token),
        ];
        connection.send_request("POST", target, &fields, body.as_bytes());
        let reply = connection.read_reply();
        assert!(reply.body.len() < 120_000, "{target}: {}", reply.body.len());
        let peak = memory_of(server.pid(), "VmHWM").saturating_sub(before);
        let shown = body.as_bytes()[..60].escape_ascii();
        writeln!(told, "{target} {shown}: {} MiB", peak >> 20).unwrap();
        assert!(peak < 4 * body.len() as u64, "{told}");
    }
    eprintln!("{told}");
}
