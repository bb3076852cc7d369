//! Real clients at real terminals: Python's `websockets`, the WebSocket of browsers, xterm.js.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use crate::client::environment;
use crate::examples::is_installed;
use crate::fixture::{Server, TOKEN};
use crate::skip;

const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/client");

/// Packages of JavaScript, and the versions that the tests use.
const PACKAGES: [&str; 5] = [
    "@xterm/xterm@5.5.0",
    "@xterm/headless@5.5.0",
    "@xterm/addon-attach@0.11.0",
    "@xterm/addon-fit@0.10.0",
    // What Node.js has built in, for a release that has not.
    "undici@6.21.3",
];

/// An interpreter that has the packages; they are installed once.
fn python() -> Result<PathBuf, String> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    PYTHON
        .get_or_init(|| environment("attached", &["websockets==14.2"]))
        .clone()
}

/// A directory in which the packages of JavaScript are installed.
fn node_modules() -> Result<PathBuf, String> {
    static MODULES: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let install = || {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("attached-node");
        // Written last, so that an installation that broke off is not taken for a whole one.
        let mark = root.join("installed-with");
        if fs::read_to_string(&mark).is_ok_and(|with| with == PACKAGES.join(" ")) {
            return Ok(root);
        }
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).map_err(|error| error.to_string())?;
        let output = Command::new("npm")
            .args(["install", "--no-audit", "--no-fund", "--silent", "--prefix"])
            .arg(&root)
            .args(PACKAGES)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("npm: {error}"))?;
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(format!("npm cannot install them: {errors}"));
        }
        fs::write(&mark, PACKAGES.join(" ")).map_err(|error| error.to_string())?;
        Ok(root)
    };
    MODULES.get_or_init(install).clone()
}

#[track_caller]
fn assert_success(output: &Output) {
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_websockets_client_attaches_and_resumes() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => skip!("websockets: {reason}"),
    };
    let server = Server::builder().env("SBX_LOG_BYTES", 8 << 20).start();
    let output = Command::new(python)
        .args(["-B", &format!("{SCRIPTS}/attached_terminals.py")])
        .arg(format!("http://{}", server.address))
        .arg(TOKEN)
        .output();
    assert_success(&output.unwrap());
}

/// Runs a script of `tests/client` in Node.js with a server's address, the token, the packages, and `more`.
#[track_caller]
fn run_in_node(script: &str, server: &Server, more: &[&str]) {
    for program in ["node", "npm"] {
        if !is_installed(program, "--version") {
            skip!("{program} is not installed");
        }
    }
    let modules = match node_modules() {
        Ok(modules) => modules,
        Err(reason) => skip!("xterm.js: {reason}"),
    };
    let built_in = is_installed("node", "--experimental-websocket");
    let output = Command::new("node")
        .args(built_in.then_some("--experimental-websocket"))
        .arg(format!("{SCRIPTS}/{script}"))
        .arg(format!("http://{}", server.address))
        .arg(TOKEN)
        .arg(modules)
        .args(more)
        .stdin(Stdio::null())
        .output();
    assert_success(&output.unwrap());
}

#[test]
fn the_websocket_of_browsers_and_xterm_js_attach() {
    run_in_node("attached_terminals.mjs", &Server::start(), &[]);
}

#[test]
fn the_page_of_the_examples_is_a_terminal() {
    let server = Server::builder()
        .env("SBX_ALLOWED_ORIGINS", "http://127.0.0.1:8000")
        .start();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/terminal.html");
    run_in_node("terminal_page.mjs", &server, &[page]);
}

/// A shell of the example, whose input is not a terminal.
#[test]
fn the_python_example_is_a_terminal() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => skip!("websockets: {reason}"),
    };
    let server = Server::start();
    let mut child = Command::new(python)
        .arg("-B")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/terminal.py"))
        .env("URL", format!("http://{}", server.address))
        .env("TOKEN", TOKEN)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, b"echo $((6 * 7)); exit 9\n").unwrap();
    let output = child.wait_with_output().unwrap();
    drop(input);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(9), "{output:?}");
    assert!(text.contains("42\r\n"), "{text}");
}
