//! Real servers and clients find nothing in between: uvicorn, Python's `http.server`, the
//! `websockets` client and curl.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::environment;
use crate::fixture::{PATIENCE, ReservedPort, Server, TOKEN, TempDir, random_bytes, sha256};
use crate::skip;

const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/client");

/// A program that is ended with the value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An interpreter that has the packages; they are installed once.
fn python() -> Result<PathBuf, String> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let packages = ["uvicorn==0.34.0", "websockets==14.2"];
    PYTHON
        .get_or_init(|| environment("proxied", &packages))
        .clone()
}

/// Starts the application in uvicorn and waits, through the proxy, until it listens. The port is the
/// application's for as long as the returned reservation lives.
#[track_caller]
fn uvicorn(server: &Server, python: &Path) -> (Running, ReservedPort) {
    let reserved = ReservedPort::new();
    let port = reserved.number();
    let child = Command::new(python)
        .args([
            "-B",
            "-m",
            "uvicorn",
            "proxied_app:app",
            "--log-level",
            "error",
        ])
        .args(["--port", &port.to_string(), "--app-dir", SCRIPTS])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let running = Running(child);
    let reply = server.get(&format!("/v1/ports/{port}/wait?timeout=60"));
    assert_eq!(reply.json()["listening"], true);
    (running, reserved)
}

#[test]
fn uvicorn_serves_plain_requests() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => skip!("uvicorn: {reason}"),
    };
    let server = Server::start();
    let (_running, reserved) = uvicorn(&server, &python);
    let port = reserved.number();
    let mut connection = server.connect();
    let body = random_bytes(5_000_000, 1);
    let target = format!("/v1/proxy/{port}/a%2Fb//c?x=%20&y");
    let reply = connection.request("POST", &target, &[], &body);
    let seen = reply.json();
    assert_eq!(seen["method"], "POST");
    assert_eq!(seen["raw_path"], "/a%2Fb//c");
    assert_eq!(seen["query"], "x=%20&y");
    assert_eq!(seen["size"], body.len());
    assert_eq!(seen["sha256"], sha256(&body));
    let headers = seen["headers"].as_array().unwrap();
    let header = |name: &str| -> Option<&Value> {
        headers
            .iter()
            .find(|pair| pair[0] == name)
            .map(|pair| &pair[1])
    };
    assert_eq!(header("host"), Some(&json!(format!("localhost:{port}"))));
    assert_eq!(header("x-sandbox-token"), None);
    assert_eq!(
        header("x-forwarded-prefix"),
        Some(&json!(format!("/v1/proxy/{port}")))
    );
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
}

#[test]
fn uvicorn_sends_events_one_by_one() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => skip!("uvicorn: {reason}"),
    };
    let server = Server::start();
    let (_running, reserved) = uvicorn(&server, &python);
    let port = reserved.number();
    let mut connection = server.connect();
    connection.send_request("GET", &format!("/v1/proxy/{port}/events"), &[], b"");
    assert_eq!(connection.read_head().status, 200);
    let mut at = Vec::new();
    while let Some(event) = connection.read_chunk() {
        assert_eq!(event, format!("data: {}\n\n", at.len()).as_bytes());
        at.push(Instant::now());
    }
    assert_eq!(at.len(), 5);
    assert!(
        at[4] - at[0] > Duration::from_millis(600),
        "they came together"
    );
}

#[test]
fn the_websockets_client_talks_to_uvicorn() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => skip!("websockets: {reason}"),
    };
    let server = Server::start();
    let (_running, reserved) = uvicorn(&server, &python);
    let port = reserved.number();
    let output = Command::new(&python)
        .args(["-B", &format!("{SCRIPTS}/proxied_websockets.py")])
        .arg(format!("ws://{}/v1/proxy/{port}", server.address))
        .arg(TOKEN)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn curl(server: &Server, target: &str, options: &[&str]) -> Output {
    Command::new("curl")
        .args([
            "-sS",
            "--max-time",
            "20",
            "-H",
            &format!("X-Sandbox-Token: {TOKEN}"),
        ])
        .args(options)
        .arg(format!("http://{}{target}", server.address))
        .output()
        .unwrap()
}

#[test]
fn curl_talks_to_pythons_http_server() {
    for program in ["curl", "python3"] {
        let found = Command::new(program).arg("--version").output();
        if !found.is_ok_and(|output| output.status.success()) {
            skip!("{program} is not installed");
        }
    }
    let server = Server::start();
    let directory = TempDir::new();
    let content = random_bytes(3_000_000, 4);
    std::fs::write(directory.join("data.bin"), &content).unwrap();
    for protocol in ["HTTP/1.0", "HTTP/1.1"] {
        let reserved = ReservedPort::new();
        let port = reserved.number();
        let options = ["--protocol", protocol];
        // Its default is HTTP/1.0; before Python 3.11 it has no such option.
        let options = if protocol == "HTTP/1.1" {
            &options[..]
        } else {
            &[]
        };
        let _running = Running(
            Command::new("python3")
                .args([
                    "-m",
                    "http.server",
                    &port.to_string(),
                    "--bind",
                    "127.0.0.1",
                ])
                .args(["--directory", directory.path().to_str().unwrap()])
                .args(options)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap(),
        );
        let waited = server.get(&format!("/v1/ports/{port}/wait?timeout=20"));
        if waited.json()["listening"] == false {
            assert_eq!(protocol, "HTTP/1.1");
            continue;
        }
        let target = format!("/v1/proxy/{port}/data.bin");
        let output = curl(&server, &target, &[]);
        assert!(
            output.status.success() && output.stdout == content,
            "{output:?}"
        );
        let output = curl(&server, &target, &["-I"]);
        let head = String::from_utf8_lossy(&output.stdout).to_lowercase();
        assert!(head.contains("content-length: 3000000"), "{head}");
        let output = curl(&server, &format!("/v1/proxy/{port}/"), &[]);
        assert!(String::from_utf8_lossy(&output.stdout).contains("data.bin"));
        // It has no PUT, and says so without reading the body, whatever curl expects.
        let file = directory.join("data.bin");
        let options = [
            "-T",
            &file,
            "-H",
            "Expect: 100-continue",
            "-w",
            "%{http_code}",
        ];
        let begun = Instant::now();
        let output = curl(&server, &target, &options);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.ends_with("501"), "{text}{output:?}");
        assert!(begun.elapsed() < PATIENCE);
    }
}
