//! The bridges of the interpreters without the server: `tests/bridges` plays its side of the protocol.
//!
//! They run in Python, each file in a process of its own. They take a minute together, so CI runs them apart from the
//! rest. `BRIDGE_PYTHON`, `BRIDGE_NODE` and `BRIDGE_BASH` choose other interpreters than those in PATH.

use std::path::PathBuf;
use std::process::Command;

use crate::client::environment;
use crate::contexts::PACKAGES;
use crate::skip;

/// Runs a file of tests with this Python. None of its tests may be skipped.
#[track_caller]
fn run(file: &str, python: PathBuf) {
    let python = std::env::var_os("BRIDGE_PYTHON").map_or(python, PathBuf::from);
    let mut command = Command::new("python3");
    command
        .args([
            "-m",
            "unittest",
            "discover",
            "-s",
            "tests/bridges",
            "-p",
            file,
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("BRIDGE_PYTHON", python);
    let output = command.output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let last = told.trim_end().lines().last().unwrap_or_default();
    if last != "OK" {
        skip!("{file}: {last}");
    }
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn bash() {
    run("test_bash.py", "python3".into());
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn node() {
    run("test_node.py", "python3".into());
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn python() {
    run("test_python.py", "python3".into());
    run("test_runs.py", "python3".into());
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn ipython() {
    match environment("contexts", &PACKAGES) {
        Ok(python) => run("test_ipython.py", python),
        Err(reason) => skip!("no packages for Python: {reason}"),
    }
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn jupyter() {
    match environment("contexts", &PACKAGES) {
        Ok(python) => run("test_jupyter.py", python),
        Err(reason) => skip!("no packages for Python: {reason}"),
    }
}
