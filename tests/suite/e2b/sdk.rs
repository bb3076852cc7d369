//! The promise of the E2B door: the unmodified E2B SDKs do real work here.
//!
//! The newest releases for Python and JavaScript, and older ones that speak the protocol differently: Python 2.45.1
//! checks the form of the API key and uses the first version of the control plane; 2.20.0 has an RPC client of its own
//! and does not name the sandbox that it connects to; npm 2.20.1 does not name the sandbox in which it runs code. Each is
//! installed from its registry and kept under the target directory between runs. What is checked is in
//! `tests/client/e2b_client.py` and `e2b_client.mjs`; this file only prepares the environments and runs them.

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::client::{environment, run_checks};
use crate::examples::repository;
use crate::fixture::{BINARY, Server, TOKEN, is_root};
use crate::skip;

/// A release of `e2b`, and that of its code interpreter which goes with it.
struct Release {
    e2b: &'static str,
    interpreter: &'static str,
    /// What code that is run imports.
    more: &'static [&'static str],
}

const PYTHON_2_63: Release = Release {
    e2b: "2.63.0",
    interpreter: "2.11.5",
    more: &["matplotlib", "pandas"],
};

const PYTHON_2_45: Release = Release {
    e2b: "2.45.1",
    interpreter: "2.10.0",
    more: &[],
};

const PYTHON_2_20: Release = Release {
    e2b: "2.20.0",
    interpreter: "2.6.0",
    more: &[],
};

const NPM_2_51: Release = Release {
    e2b: "2.51.0",
    interpreter: "2.8.0",
    more: &[],
};

const NPM_2_20: Release = Release {
    e2b: "2.20.1",
    interpreter: "2.4.2",
    more: &[],
};

/// Words for the checks of commands and files that are over in a second or two.
const QUICK: &[&str] = &[
    "host",
    "machine",
    "sync",
    "commands_run",
    "commands_exit_codes",
    "commands_read_input",
    "files_of_every_content",
    "files_go_up_in_batches",
    "roots_have_files",
    "roots_are_built",
];

/// What older releases check: they differ from the newest in what they send, not in where.
const SHORT: &[&str] = &["host", "sync"];

#[test]
fn the_python_sdk_runs_commands_and_moves_files() {
    run_python(&PYTHON_2_63, QUICK);
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_python_sdk_2_63_works_unmodified() {
    run_python(&PYTHON_2_63, &[]);
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_python_sdk_2_45_works_unmodified() {
    run_python(&PYTHON_2_45, SHORT);
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_python_sdk_2_20_works_unmodified() {
    run_python(&PYTHON_2_20, SHORT);
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_npm_sdk_2_51_works_unmodified() {
    run_npm(&NPM_2_51);
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_npm_sdk_2_20_works_unmodified() {
    run_npm(&NPM_2_20);
}

#[test]
fn the_python_example_runs_and_is_what_the_page_shows() {
    let python = match python(&PYTHON_2_63) {
        Ok(python) => python,
        Err(reason) => skip!("the Python SDK: {reason}"),
    };
    let mut command = Command::new(python);
    command.arg("-B").arg(repository("examples/e2b_sandbox.py"));
    run_example(command, "examples/e2b_sandbox.py");
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_javascript_example_runs_and_is_what_the_page_shows() {
    let modules = match node_modules(&NPM_2_51) {
        Ok(modules) => modules,
        Err(reason) => skip!("the npm SDK: {reason}"),
    };
    // Packages are found beside the program that imports them.
    let program = modules.join("../e2b_sandbox.mjs");
    fs::copy(repository("examples/e2b_sandbox.mjs"), &program).unwrap();
    let mut command = Command::new("node");
    command.arg(program);
    run_example(command, "examples/e2b_sandbox.mjs");
}

/// Runs an example against a host, and compares what it prints.
#[track_caller]
fn run_example(mut command: Command, example: &str) {
    let page = fs::read_to_string(repository("docs/e2b.md")).unwrap();
    let text = fs::read_to_string(repository(example)).unwrap();
    assert!(
        page.contains(text.trim_end()),
        "docs/e2b.md shows another {example}"
    );
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().start();
    let url = format!("http://{}", server.address);
    let output = command
        .env("E2B_API_URL", &url)
        .env("E2B_SANDBOX_URL", &url)
        .env("E2B_API_KEY", TOKEN)
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{shown}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for expected in ["lines: 3\n", "exit code 0", "sum 6\n", "IndexError\n"] {
        assert!(shown.contains(expected), "{expected:?}: {shown}");
    }
    assert_eq!(
        server.get("/v1/sandboxes").json(),
        serde_json::json!([]),
        "it is killed"
    );
}

/// Runs the checks that `words` choose, or all of them, with a release for Python.
#[track_caller]
fn run_python(release: &Release, words: &[&str]) {
    let python = match python(release) {
        Ok(python) => python,
        Err(reason) => skip!("the Python SDK {}: {reason}", release.e2b),
    };
    let mut command = Command::new(python);
    command
        .arg("-B")
        .arg(script("e2b_client.py"))
        .args([BINARY, release.e2b])
        .args(words);
    run_with_users(command, release);
}

/// Runs all checks with a release for JavaScript.
#[track_caller]
fn run_npm(release: &Release) {
    let modules = match node_modules(release) {
        Ok(modules) => modules,
        Err(reason) => skip!("the npm SDK {}: {reason}", release.e2b),
    };
    let mut command = Command::new("node");
    command
        .arg(script("e2b_client.mjs"))
        .arg(BINARY)
        .env("E2B_NODE_MODULES", modules);
    run_with_users(command, release);
}

/// The interpreter that has a release for Python, or why there is none.
fn python(release: &Release) -> Result<PathBuf, String> {
    let Release {
        e2b,
        interpreter,
        more,
    } = release;
    let packages = [
        format!("e2b=={e2b}"),
        format!("e2b-code-interpreter=={interpreter}"),
    ];
    let packages = packages.iter().map(String::as_str);
    let packages: Vec<&str> = packages.chain(more.iter().copied()).collect();
    environment(&format!("e2b-{e2b}"), &packages)
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/client")
        .join(name)
}

/// The directory in which npm has installed a release, or why there is none.
fn node_modules(release: &Release) -> Result<PathBuf, String> {
    let packages = [
        format!("e2b@{}", release.e2b),
        format!("@e2b/code-interpreter@{}", release.interpreter),
    ];
    let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
    crate::client::node_modules(&format!("e2b-npm-{}", release.e2b), &packages)
}

/// Runs a program of checks to its end.
#[track_caller]
fn run_with_users(mut command: Command, release: &Release) {
    if !is_root() {
        skip!("host mode needs root");
    }
    let (users, _claim) = claim_users();
    command.env("SBX_UID_RANGE", users);
    let report = match run_checks(command) {
        Ok(report) => report,
        Err(reason) => skip!("{reason}"),
    };
    // An older release lacks features; the newest lacks only what the machine does not have.
    if [PYTHON_2_63.e2b, NPM_2_51.e2b].contains(&release.e2b)
        && let Some(line) = report.lines().find(|line| line.starts_with("SKIPPED"))
    {
        skip!("{line}");
    }
}

/// A range of users for one host, and the name that keeps other programs off it while it is held.
fn claim_users() -> (String, UnixDatagram) {
    const COUNT: u32 = 400;
    for first in (56_000..64_000).step_by(400) {
        let name = format!("sbx-test-uids-{first}");
        let name = SocketAddr::from_abstract_name(name).unwrap();
        if let Ok(claim) = UnixDatagram::bind_addr(&name) {
            return (format!("{first}-{}", first + COUNT - 1), claim);
        }
    }
    panic!("other programs hold all ranges of users");
}
