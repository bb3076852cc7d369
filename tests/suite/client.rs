//! The promise of compatibility: the unmodified `huggingface_hub` client does real work here.
//!
//! The oldest release that has `Sandbox` in its first form, and the newest; for pools also the last
//! of the first form and one between. Each is installed from the Python package index into a virtual
//! environment of its own, which is kept under the target directory between runs. What is checked is
//! in `tests/client/real_client.py` (dedicated sandboxes) and `pool_client.py` (pools); this file
//! only prepares the environments and runs them. With a machine for each job: `jobs.rs`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use crate::examples::is_installed;
use crate::fixture::{BINARY, is_root};
use crate::skip;

/// What is checked.
const DEDICATED: &str = "real_client.py";
const POOLS: &str = "pool_client.py";

/// How checks end that find no place to run.
const CANNOT_RUN: i32 = 77;

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn huggingface_hub_1_22_works_unmodified() {
    run_client("1.22.0", DEDICATED, &[]);
}

#[test]
fn huggingface_hub_2_4_works_unmodified() {
    run_client("2.4.0", DEDICATED, &[]);
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn pools_of_huggingface_hub_1_22_work_unmodified() {
    run_client("1.22.0", POOLS, &[]);
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn pools_of_huggingface_hub_1_31_work_unmodified() {
    run_client("1.31.0", POOLS, &[]);
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn pools_of_huggingface_hub_2_0_work_unmodified() {
    run_client("2.0.0", POOLS, &[]);
}

#[test]
fn pools_of_huggingface_hub_2_4_work_unmodified() {
    run_client("2.4.0", POOLS, &[]);
}

/// Runs the checks with one of these words in their names, or all of them, with the client of this
/// version.
#[track_caller]
pub fn run_client(version: &str, checks: &str, words: &[&str]) {
    if checks == POOLS && !is_root() {
        skip!("host mode needs root");
    }
    let package = format!("huggingface_hub=={version}");
    let name = format!("huggingface_hub-{version}");
    let python = match environment(&name, &[&package]) {
        Ok(python) => python,
        Err(reason) => skip!("the real client {version}: {reason}"),
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/client");
    let mut command = Command::new(python);
    command
        .arg("-B")
        .arg(script.join(checks))
        .arg(BINARY)
        .arg(version)
        .args(words);
    if let Err(reason) = run_checks(command) {
        skip!("{reason}");
    }
}

/// Runs a program of checks to its end. Returns what it has printed, or why it cannot run here.
#[track_caller]
pub fn run_checks(mut command: Command) -> Result<String, String> {
    // The way to run some of the checks only: SBX_CLIENT_CHECKS="timeout links" cargo test ...
    if let Ok(names) = std::env::var("SBX_CLIENT_CHECKS") {
        command.args(names.split_whitespace());
    }
    let output = command.stdin(Stdio::null()).output().unwrap();
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{report}");
    if output.status.code() == Some(CANNOT_RUN) {
        return Err(report.trim().to_owned());
    }
    let summary = report.lines().last().unwrap_or_default();
    assert!(
        output.status.success() && summary.ends_with(" 0 failed"),
        "{}: {summary}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr),
    );
    Ok(report)
}

/// The interpreter of a virtual environment that has these packages, or why there is none.
pub fn environment(name: &str, packages: &[&str]) -> Result<PathBuf, String> {
    // Two tests may want the same one.
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _installing = INSTALLING.lock();
    let known = run(Command::new("python3").args([
        "-c",
        "import sys; assert sys.version_info >= (3, 10), sys.version; print(sys.base_prefix)",
    ]))
    .map_err(|error| format!("python3 of 3.10 or later is needed: {error}"))?;
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let python = root.join("bin/python");
    // Written last, so that an installation that broke off is not taken for a whole one.
    let mark = root.join("installed-with");
    if fs::read_to_string(&mark).is_ok_and(|with| with == known) && python.exists() {
        return Ok(python);
    }
    let _ = fs::remove_dir_all(&root);
    run(Command::new("python3").args(["-m", "venv"]).arg(&root))
        .map_err(|error| format!("python3 -m venv does not work: {error}"))?;
    run(Command::new(&python)
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ])
        .args(packages))
    .map_err(|error| format!("it cannot be installed from the package index: {error}"))?;
    fs::write(&mark, known).map_err(|error| error.to_string())?;
    Ok(python)
}

/// The directory in which npm has installed these packages, or why there is none.
pub fn node_modules(name: &str, packages: &[&str]) -> Result<PathBuf, String> {
    // Two tests may want the same one.
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _installing = INSTALLING.lock();
    for program in ["node", "npm"] {
        if !is_installed(program, "--version") {
            return Err(format!("{program} is not installed"));
        }
    }
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let modules = root.join("node_modules");
    // Written last, so that an installation that broke off is not taken for a whole one.
    let mark = root.join("installed-with");
    if fs::read_to_string(&mark).is_ok_and(|with| with == packages.join(" ")) {
        return Ok(modules);
    }
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root).map_err(|error| error.to_string())?;
    run(Command::new("npm")
        .args(["install", "--no-audit", "--no-fund", "--silent", "--prefix"])
        .arg(&root)
        .args(packages)
        .stdin(Stdio::null()))
    .map_err(|error| format!("npm cannot install it: {error}"))?;
    fs::write(&mark, packages.join(" ")).map_err(|error| error.to_string())?;
    Ok(modules)
}

/// The output of a command that succeeds, or what it complained about.
fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!(
            "{}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        ))
    }
}
