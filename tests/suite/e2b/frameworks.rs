//! Frameworks of agents and of evaluations work through E2B's door with nothing but variables and the arguments of their
//! constructors, in sandboxes with a root of their own.
//!
//! What is checked is in `tests/client/frameworks`, one script for each. This file installs what they pin, makes a template of
//! packages of this machine and runs each script against a server of its own. No model is called.
//!
//! `crewai` has 900 MB of packages: it runs only with `SBX_LARGE_FRAMEWORKS=1`. `camel-ai` cannot run: it wants the release 1.x
//! of the code interpreter, which speaks another protocol.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use crate::client::{environment, node_modules};
use crate::examples::repository;
use crate::fixture::Server;
use crate::roots::users::needs_roots;
use crate::skip;

/// Installs packages in a fifth of the time that pip takes.
const UV: &str = "uv==0.13.9";

/// What the template consists of, with all that these need.
const TEMPLATE: &str = "adduser base-files bash ca-certificates coreutils dash debianutils findutils git grep gzip hostname \
                        libc-bin libstdc++6 login mawk passwd procps python3 sed tar util-linux";

/// What the code of smolagents imports in the sandbox before it does anything, as E2B's image has it.
const OF_TEMPLATE: [&str; 2] = ["numpy==2.3.5", "pillow==12.0.0"];

const E2B: &str = "e2b==2.63.0";
const INTERPRETER: &str = "e2b-code-interpreter==2.11.5";

#[test]
#[ignore = "installs gigabytes of packages: docs/testing.md"]
fn harbor_works() {
    python("harbor", 12, &["harbor[e2b]==0.26.0", E2B]);
}

#[test]
#[ignore = "installs gigabytes of packages: docs/testing.md"]
fn inspect_works() {
    // Later releases of modal lack what the package of sandboxes reads of it when it is loaded.
    let sandboxes = "inspect-sandboxes==0.6.1";
    let packages = ["inspect-ai==0.3.285", sandboxes, "modal==1.5.5", E2B];
    python("inspect", 12, &packages);
}

#[test]
#[ignore = "installs gigabytes of packages: docs/testing.md"]
fn verifiers_works() {
    python("verifiers", 11, &["verifiers[e2b]==0.4.0", "e2b==2.56.0"]);
}

#[test]
#[ignore = "installs gigabytes of packages: docs/testing.md"]
fn openai_agents_work() {
    python("openai", 10, &["openai-agents[e2b]==0.24.0"]);
}

#[test]
#[ignore = "installs gigabytes of packages: docs/testing.md"]
fn openai_agents_of_javascript_work() {
    let extensions = "@openai/agents-extensions@0.18.0";
    javascript(
        "openai",
        &["@openai/agents@0.20.0", extensions, "e2b@2.51.0"],
    );
}

#[test]
#[ignore = "installs gigabytes of packages: docs/testing.md"]
fn mastra_works() {
    let packages = ["@mastra/core@1.71.0", "@mastra/e2b@0.8.0", "e2b@2.51.0"];
    javascript("mastra", &packages);
}

#[test]
#[ignore = "installs gigabytes of packages: docs/testing.md"]
fn deepagents_works() {
    let packages = ["deepagents==0.6.12", "langchain-e2b==0.0.6", E2B];
    python("deepagents", 11, &packages);
}

#[test]
#[ignore = "installs gigabytes of packages: docs/testing.md"]
fn haystack_works() {
    let packages = ["haystack-ai==3.4.1", "e2b-haystack==2.0.0", E2B];
    python("haystack", 10, &packages);
}

#[test]
#[ignore = "installs gigabytes of packages: docs/testing.md"]
fn google_adk_works() {
    let packages = ["google-adk==2.13.0", "e2b-adk==0.1.2", E2B, INTERPRETER];
    python("adk", 10, &packages);
}

#[test]
#[ignore = "installs gigabytes of packages: docs/testing.md"]
fn smolagents_works() {
    python(
        "smolagents",
        10,
        &["smolagents[e2b]==1.26.0", E2B, INTERPRETER],
    );
}

#[test]
#[ignore = "installs gigabytes of packages: docs/testing.md"]
fn agno_works() {
    python("agno", 10, &["agno==3.1.10", E2B, INTERPRETER]);
}

#[test]
#[ignore = "installs gigabytes of packages: docs/testing.md"]
fn crewai_works() {
    if std::env::var_os("SBX_LARGE_FRAMEWORKS").is_none() {
        println!("not run: SBX_LARGE_FRAMEWORKS is not set");
        return;
    }
    let packages = ["crewai==1.15.30", "crewai-tools==1.15.30", E2B, INTERPRETER];
    python("crewai", 11, &packages);
}

/// Runs the script of a framework for Python, which needs Python 3.`minor` or later.
#[track_caller]
fn python(name: &str, minor: u32, packages: &[&str]) {
    needs_roots!();
    let python = match uv().and_then(|uv| installed(&uv, name, minor, packages)) {
        Ok(python) => python,
        Err(reason) => skip!("{name}: {reason}"),
    };
    let mut command = Command::new("timeout");
    command
        .args(["300".as_ref(), python.as_os_str()])
        .arg(script(&format!("{name}_e2b.py")))
        // Large packages take long to compile, and the scripts' own place is no cache.
        .env("PYTHONPYCACHEPREFIX", scratch("pycache"));
    run(name, command);
}

/// The same for JavaScript.
#[track_caller]
fn javascript(name: &str, packages: &[&str]) {
    needs_roots!();
    let modules = match node_modules(&format!("framework-npm-{name}"), packages) {
        Ok(modules) => modules,
        Err(reason) => skip!("{name}: {reason}"),
    };
    // Packages are found beside the program that imports them.
    let program = format!("{name}_e2b.mjs");
    let place = modules.join("..");
    for file in ["parts.mjs", &program] {
        fs::copy(script(file), place.join(file)).unwrap();
    }
    let mut command = Command::new("timeout");
    command.args(["300", "node"]).arg(place.join(program));
    run(name, command);
}

#[track_caller]
fn run(name: &str, mut command: Command) {
    let template = match template() {
        Ok(template) => template,
        Err(reason) => skip!("{name}: {reason}"),
    };
    // Releases that frameworks pin take no other keys.
    let token = crate::fixture::random_hex();
    let server = Server::host()
        .no_token()
        .env("SBX_TOKEN", &token)
        .env("SBX_ISOLATION", "auto")
        .env("SBX_TEMPLATES", format!("base={}", template.display()))
        .env("SBX_TEMPLATE", "base")
        .env("SBX_E2B_TEMPLATES", "*")
        .start();
    let url = format!("http://{}", server.address);
    let output = command
        .env("E2B_API_URL", &url)
        .env("E2B_SANDBOX_URL", &url)
        .env("E2B_API_KEY", format!("e2b_{token}"))
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let report = String::from_utf8_lossy(&output.stdout);
    println!("{report}");
    let summary = report.lines().last().unwrap_or_default();
    assert!(
        output.status.success() && summary.ends_with(" 0 failed"),
        "{name}: {}: {summary}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

fn script(name: &str) -> PathBuf {
    repository("tests/client/frameworks").join(name)
}

fn scratch(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("framework-{name}"))
}

fn uv() -> Result<PathBuf, String> {
    environment("uv", &[UV]).map(|python| python.with_file_name("uv"))
}

/// The interpreter of an environment that has these packages, or why there is none.
fn installed(uv: &Path, name: &str, minor: u32, packages: &[&str]) -> Result<PathBuf, String> {
    let root = scratch(name);
    let python = root.join("bin/python");
    let mark = root.join("installed-with");
    let with = packages.join(" ");
    if fs::read_to_string(&mark).is_ok_and(|before| before == with) && python.exists() {
        return Ok(python);
    }
    let base = python_of(minor).ok_or_else(|| format!("no Python of 3.{minor} or later"))?;
    let _ = fs::remove_dir_all(&root);
    let mut make = Command::new(uv);
    finish(make.args(["venv", "-q", "-p"]).arg(base).arg(&root))?;
    let mut install = Command::new(uv);
    let install = install.args(["pip", "install", "-q", "-p"]).arg(&python);
    finish(
        install
            .args(packages)
            .env("UV_CACHE_DIR", scratch("uv-cache")),
    )?;
    // Written last, so that an installation that broke off is not taken for a whole one.
    fs::write(&mark, with).map_err(|error| error.to_string())?;
    Ok(python)
}

/// A Python 3.`minor` or later: of the path, or one of pyenv's that is not in it.
fn python_of(minor: u32) -> Option<PathBuf> {
    let home = std::env::var("HOME").unwrap_or_default();
    let versions = fs::read_dir(Path::new(&home).join(".pyenv/versions"));
    let further = versions.into_iter().flatten().flatten();
    let further = further.map(|version| version.path().join("bin/python3"));
    let all = std::iter::once(PathBuf::from("python3")).chain(further);
    let question =
        format!("import sys; print(sys.executable); sys.exit(sys.version_info < (3, {minor}))");
    let mut told = all.filter_map(|python| {
        let output = Command::new(python).args(["-c", &question]).output().ok()?;
        let path = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| PathBuf::from(path.trim()))
    });
    told.next()
}

/// A root with Debian's Python in it, or why there is none. It is kept between runs.
fn template() -> Result<PathBuf, String> {
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = MAKING.lock();
    let tree = scratch("tree");
    if tree.exists() {
        return Ok(tree);
    }
    let part = scratch("tree.part");
    let _ = fs::remove_dir_all(&part);
    let packages = TEMPLATE.split_whitespace();
    finish(
        Command::new("python3")
            .arg(script("tree.py"))
            .arg(&part)
            .args(packages),
    )?;
    let version = Command::new("/usr/bin/python3").arg("-V").output();
    let version = version.map_err(|error| error.to_string())?.stdout;
    let version = String::from_utf8_lossy(&version);
    let version = version.trim().trim_start_matches("Python ");
    let minor = version.rsplit_once('.').map_or(version, |(minor, _)| minor);
    let mut install = Command::new(uv()?);
    let install = install.args(["pip", "install", "-q", "--only-binary", ":all:"]);
    let install = install.args(["--python-version", minor, "--target"]);
    let packages = format!("usr/local/lib/python{minor}/dist-packages");
    let install = install.arg(part.join(packages)).args(OF_TEMPLATE);
    finish(install.env("UV_CACHE_DIR", scratch("uv-cache")))?;
    fs::rename(&part, &tree).map_err(|error| error.to_string())?;
    Ok(tree)
}

fn finish(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| error.to_string())?;
    let told = String::from_utf8_lossy(&output.stderr);
    let failed = || format!("{command:?}: {}: {told}", output.status);
    output.status.success().then_some(()).ok_or_else(failed)
}
