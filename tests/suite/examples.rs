//! The promise of `examples/`: each file runs as it is and prints what its reader expects.
//!
//! Those that need a server meet one in an empty directory. Those that use the `huggingface_hub`
//! client run with the oldest and the newest supported release, against the stand-in for the Jobs API
//! (`tests/client/run_example.py`).

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Deref;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as SocketAddress, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::client::environment;
use crate::fixture::{
    BINARY, PATIENCE, Server, TOKEN, TempDir, count_entries, is_root, wait_until,
};
use crate::skip;

/// The releases of `huggingface_hub` that the examples run with.
const OLDEST: &str = "1.22.0";
const NEWEST: &str = "2.4.0";

/// A path in the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Runs a program that must succeed and returns its output.
#[track_caller]
fn output_of(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{}: {text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// Asserts that these texts occur in the output, in this order.
#[track_caller]
fn assert_in_order(output: &str, expected: &[&str]) {
    let mut rest = output;
    for text in expected {
        let Some((_, after)) = rest.split_once(text) else {
            panic!("{text:?} is missing, or in the wrong place, in:\n{output}");
        };
        rest = after;
    }
}

/// A server that ends in order, so that an example that fails leaves no process behind: the next run
/// would find its port taken.
pub struct OrderlyServer(pub Server);

impl Deref for OrderlyServer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.0
    }
}

impl Drop for OrderlyServer {
    fn drop(&mut self) {
        if self.0.is_running() {
            self.0.signal(Signal::SIGTERM as i32);
            let deadline = Instant::now() + PATIENCE;
            while self.0.is_running() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Waits until no other run on this machine uses the ports that examples name, and claims them. An
/// abstract socket's name belongs to one process at a time.
#[must_use]
pub fn claim_ports() -> UnixDatagram {
    let name = SocketAddress::from_abstract_name("sbx-test-example-ports").unwrap();
    let mut claim = None;
    wait_until("the ports are free", Duration::from_secs(300), || {
        claim = UnixDatagram::bind_addr(&name).ok();
        claim.is_some()
    });
    claim.unwrap()
}

/// A dedicated server whose working directory is this one.
pub fn server_in(directory: &TempDir) -> OrderlyServer {
    let path = directory.path().to_str().unwrap();
    let server = Server::builder()
        .wrapped_in(&["sh", "-c", r#"cd "$0" && exec "$@""#, path])
        .start();
    OrderlyServer(server)
}

/// Runs a program with an example as its last argument, and the server's address and token.
#[track_caller]
fn run(program: &[&str], example: &str, address: SocketAddr) -> String {
    output_of(
        Command::new(program[0])
            .args(&program[1..])
            .arg(repository(example))
            .env("URL", format!("http://{address}"))
            .env("TOKEN", TOKEN),
    )
}

/// Whether a program is installed and runs with this argument.
pub fn is_installed(program: &str, argument: &str) -> bool {
    let probe = Command::new(program)
        .arg(argument)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    probe.is_ok_and(|status| status.success())
}

#[test]
fn the_curl_example_runs() {
    for (program, argument) in [("curl", "--version"), ("python3", "--version")] {
        if !is_installed(program, argument) {
            skip!("{program} is not installed");
        }
    }
    let directory = TempDir::new();
    let _ports = claim_ports();
    let server = server_in(&directory);
    let output = run(&["sh"], "examples/curl.sh", server.address);
    assert_in_order(
        &output,
        &[
            r#""data":"one\n""#,
            r#""data":"two\n""#,
            r#""event":"exit","exit_code":3"#,
            r#""id":"ticker""#,
            "tick 1",
            "tick 3",
            r#""event":"exit","exit_code":0"#,
            "hello from curl",
            "hello from curl",
            r#"{"id":"web","killed":true}"#,
            r#"{"deleted":true}"#,
        ],
    );
    assert_eq!(count_entries(directory.path().to_str().unwrap()), 0);
}

#[test]
fn the_javascript_example_runs() {
    if !is_installed("node", "--version") {
        skip!("node is not installed");
    }
    let directory = TempDir::new();
    let server = server_in(&directory);
    let output = run(&["node"], "examples/fetch.mjs", server.address);
    assert_eq!(
        output,
        "line 1\nline 2\nline 3\nexit code 0\nhello from fetch\n"
    );
    assert_eq!(count_entries(directory.path().to_str().unwrap()), 0);
}

#[test]
fn the_example_of_an_agent_repairs_its_error() {
    if !is_installed("python3", "--version") {
        skip!("python3 is not installed");
    }
    let directory = TempDir::new();
    let server = server_in(&directory);
    let output = run(&["python3"], "examples/agent.py", server.address);
    assert_in_order(
        &output,
        &[
            "print(len(prices), 'prices')\n3 prices\n",
            ">>> sum(prices) / count\n",
            "NameError: name 'count' is not defined\nIt failed",
            ">>> sum(prices) / len(prices)\n5.333333333333333\n",
        ],
    );
    let contexts = server.get("/v1/contexts").json();
    assert_eq!(contexts, serde_json::json!([]), "it is deleted");
    assert_eq!(count_entries(directory.path().to_str().unwrap()), 0);
}

#[test]
fn the_example_of_sandboxes_that_last_runs() {
    if !is_root() {
        skip!("host mode needs root");
    }
    if !is_installed("python3", "--version") {
        skip!("python3 is not installed");
    }
    let server = Server::host().start();
    let output = run(&["python3"], "examples/lasting.py", server.address);
    assert_eq!(
        output,
        "task 7 is paused\ntask 7 is paused\ntask 7 is running\ntask 7 is stopped\nprocesses: []\ndeleted: True\n"
    );
}

#[test]
fn the_notebook_page_shows_what_cells_do() {
    for program in ["node", "python3"] {
        if !is_installed(program, "--version") {
            skip!("{program} is not installed");
        }
    }
    let server = Server::builder()
        .env("SBX_ALLOWED_ORIGINS", "http://127.0.0.1:8000")
        .start();
    let server = OrderlyServer(server);
    output_of(
        Command::new("node")
            .arg(repository("tests/client/notebook_page.mjs"))
            .arg(format!("http://{}", server.address))
            .arg(TOKEN)
            .arg(repository("examples/notebook.html")),
    );
}

#[test]
fn the_example_of_a_folder_up_and_down_runs() {
    let has_filters = Command::new("python3")
        .args(["-c", "import tarfile; tarfile.data_filter"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !has_filters {
        skip!("python3 is not installed, or older than the filters of tarfile");
    }
    let directory = TempDir::new();
    let server = server_in(&directory);
    let output = run(&["python3"], "examples/tree.py", server.address);
    assert_eq!(
        output,
        "2 files up\nchanged: ['notes.txt']\nchanged: []\none\ntwo\n"
    );
    assert_eq!(count_entries(directory.path().to_str().unwrap()), 0);
}

#[test]
fn the_streaming_example_resumes_after_broken_connections() {
    let python = match newest_client() {
        Ok(python) => python,
        Err(reason) => skip!("httpx: {reason}"),
    };
    let directory = TempDir::new();
    let server = server_in(&directory);
    let address = break_connections_to(server.address);
    let program = [python.to_str().unwrap(), "-B"];
    let output = run(&program, "examples/stream_resume.py", address);
    let (lost, lines): (Vec<&str>, Vec<&str>) = output
        .lines()
        .partition(|line| line.starts_with("connection lost"));
    assert!(!lost.is_empty(), "no connection was lost:\n{output}");
    let mut expected: Vec<String> = (1..=10).map(|n| format!("line {n}")).collect();
    expected.push("exit code 0".to_owned());
    assert_eq!(lines, expected, "{output}");
}

/// Listens in front of a server and breaks the first two connections in the middle of an event: the
/// first connection in the first event with output, the second in the second one.
fn break_connections_to(server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for (number, client) in (1..).zip(listener.incoming()) {
            let (client, upstream) = (client.unwrap(), TcpStream::connect(server).unwrap());
            let (mut requests, mut to_server) =
                (client.try_clone().unwrap(), upstream.try_clone().unwrap());
            thread::spawn(move || std::io::copy(&mut requests, &mut to_server));
            let break_in = (number <= 2).then_some(number);
            thread::spawn(move || relay_answers(upstream, client, break_in));
        }
    });
    address
}

/// Passes a server's answers on, up to the middle of the output event of this number if there is one.
fn relay_answers(mut server: TcpStream, mut client: TcpStream, break_in: Option<usize>) {
    const OUTPUT: &[u8] = br#""event":"stdout""#;
    let (mut seen, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(length @ 1..) = server.read(&mut buffer) {
        let sent = seen.len();
        seen.extend_from_slice(&buffer[..length]);
        let last = break_in.and_then(|number| {
            let events = seen.windows(OUTPUT.len()).enumerate();
            let mut starts = events.filter(|(_, window)| *window == OUTPUT);
            starts
                .nth(number - 1)
                .map(|(start, _)| start + OUTPUT.len())
        });
        let end = last.unwrap_or(seen.len());
        if client.write_all(&seen[sent.min(end)..end]).is_err() || last.is_some() {
            break;
        }
    }
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}

/// An interpreter with the newest supported client, and with `httpx`.
pub fn newest_client() -> Result<PathBuf, String> {
    environment("examples", &["huggingface_hub==2.4.0", "httpx>=0.28,<0.29"])
}

#[test]
fn the_example_of_one_sandbox_runs_with_the_oldest_and_the_newest_client() {
    let _ports = claim_ports();
    run_with_clients(
        "examples/sandbox.py",
        &[
            "line 1\nline 2\nline 3\nexit code 0\n",
            "failed: no such luck\n",
            "hello from huggingface_hub\n",
            "through the proxy: hello from huggingface_hub\n",
        ],
    );
}

#[test]
fn the_example_of_a_pool_runs_with_the_oldest_and_the_newest_client() {
    if !is_root() {
        skip!("host mode needs root");
    }
    run_with_clients(
        "examples/sandbox_pool.py",
        &[
            "task 0: user ",
            "task 1: user ",
            "task 7: user ",
            "machines: 1\n",
        ],
    );
}

/// Runs a script that uses the client of this version against the stand-in for the Jobs API.
#[track_caller]
fn run_with_client(python: &Path, version: &str, script: &Path) -> String {
    output_of(
        Command::new(python)
            .arg("-B")
            .arg(repository("tests/client/run_example.py"))
            .args([BINARY, version])
            .arg(script),
    )
}

/// Runs a script with [`newest_client`]: one that uses the client against the stand-in for the Jobs
/// API, any other against a dedicated server.
#[track_caller]
pub fn run_python(python: &Path, script: &str, uses_client: bool) {
    if uses_client {
        run_with_client(python, NEWEST, Path::new(script));
    } else {
        let directory = TempDir::new();
        let server = server_in(&directory);
        run(&[python.to_str().unwrap(), "-B"], script, server.address);
    }
}

#[track_caller]
fn run_with_clients(example: &str, expected: &[&str]) {
    if !is_installed("openssl", "version") {
        skip!("openssl is not installed");
    }
    // The oldest release brings httpx with it.
    let oldest = || {
        environment(
            &format!("huggingface_hub-{OLDEST}"),
            &[&format!("huggingface_hub=={OLDEST}")],
        )
    };
    for (version, python) in [(OLDEST, oldest()), (NEWEST, newest_client())] {
        let python = match python {
            Ok(python) => python,
            Err(reason) => skip!("the real client {version}: {reason}"),
        };
        let output = run_with_client(&python, version, &repository(example));
        assert_in_order(&output, expected);
    }
}
