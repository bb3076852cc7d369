//! The promise to MCP clients: those that others wrote do real work here, in both eras of the protocol.
//!
//! The official Python client in its newest release, which speaks both eras, and one a year older; the official
//! TypeScript clients of both eras; and the conformance suite of the protocol, as far as it is about servers that have
//! tools and nothing else. Each is installed from its registry and kept under the target directory between runs. What
//! is checked is in `tests/client/mcp_client.py` and `mcp_client.mjs`.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::client::{environment, node_modules, run_checks};
use crate::examples::repository;
use crate::fixture::{BINARY, HostPlace, Server, TOKEN};
use crate::skip;

const PYTHON: &str = "2.3.0";
const OLD_PYTHON: &str = "1.22.0";

const TYPESCRIPT: &[&str] = &[
    "@modelcontextprotocol/client@2.4.0",
    "@modelcontextprotocol/sdk@1.32.2",
];

/// It needs a newer Node.js than Debian has.
const CONFORMANCE: &[&str] = &[
    "@modelcontextprotocol/conformance@0.2.0-alpha.12",
    "node@22",
];

/// What the suite can check of a server that has tools of its own.
const SCENARIOS: &[(&str, &[&str])] = &[
    ("server-initialize", &["2025-06-18", "2025-11-25"]),
    ("ping", &["2025-06-18", "2025-11-25"]),
    ("tools-list", &["2025-06-18", "2025-11-25", "2026-07-28"]),
    ("dns-rebinding-protection", &["2025-11-25", "2026-07-28"]),
    ("http-header-validation", &["2026-07-28"]),
    ("server-sse-multiple-streams", &["2026-07-28"]),
    ("input-required-result-unsupported-methods", &["2026-07-28"]),
];

/// Checks of this scenario that are about tools which a server under test is to have.
const STATELESS_FOR_TEST_SERVERS: &[&str] = &[
    "sep-2575-server-rejects-undeclared-capability",
    "sep-2575-missing-capability-http-400",
    "sep-2575-http-server-no-independent-requests-on-stream",
    "sep-2575-server-no-log-without-loglevel",
];

fn script(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/client")
        .join(name)
}

#[track_caller]
fn run_python(version: &str) {
    let python = match environment(&format!("mcp-{version}"), &[&format!("mcp=={version}")]) {
        Ok(python) => python,
        Err(reason) => skip!("the Python client {version}: {reason}"),
    };
    let place = HostPlace::new();
    let mut command = Command::new(python);
    command
        .env("SBX_UID_RANGE", place.range())
        .arg("-B")
        .arg(script("mcp_client.py"))
        .args([BINARY, version]);
    if let Err(reason) = run_checks(command) {
        skip!("{reason}");
    }
}

#[test]
fn the_python_client_works_in_both_eras() {
    run_python(PYTHON);
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_python_client_of_a_year_ago_works() {
    run_python(OLD_PYTHON);
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_typescript_clients_work_in_both_eras() {
    let modules = match node_modules("mcp-npm", TYPESCRIPT) {
        Ok(modules) => modules,
        Err(reason) => skip!("the TypeScript clients: {reason}"),
    };
    let place = HostPlace::new();
    let mut command = Command::new("node");
    command
        .env("SBX_UID_RANGE", place.range())
        .arg(script("mcp_client.mjs"))
        .arg(BINARY)
        .env("MCP_NODE_MODULES", modules);
    if let Err(reason) = run_checks(command) {
        skip!("{reason}");
    }
}

/// A client of the time when 2024-11-05 was the latest revision, and Streamable HTTP was already there.
#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_typescript_client_of_2024_11_05_works() {
    const PROGRAM: &str = "import { Client } from '@modelcontextprotocol/sdk/client/index.js'
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js'
const client = new Client({ name: 'test', version: '1' })
const headers = { Authorization: `Bearer ${process.argv[3]}` }
await client.connect(new StreamableHTTPClientTransport(new URL(process.argv[2]), { requestInit: { headers } }))
console.log('tools', (await client.listTools()).tools.length)
const result = await client.callTool({ name: 'run', arguments: { cmd: 'echo $((6 * 7))' } })
console.log(result.content[0].text)
await client.close()
";
    let modules = match node_modules("mcp-npm-1.10", &["@modelcontextprotocol/sdk@1.10.2"]) {
        Ok(modules) => modules,
        Err(reason) => skip!("the TypeScript client: {reason}"),
    };
    // Packages are found beside the program that imports them.
    let program = modules.join("../former.mjs");
    std::fs::write(&program, PROGRAM).unwrap();
    let server = Server::builder().start();
    let output = Command::new("node")
        .arg(program)
        .arg(format!("http://{}/mcp", server.address))
        .arg(TOKEN)
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{shown}{complaints}");
    assert!(
        shown.contains("tools 13") && shown.contains("42"),
        "{shown}"
    );
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_conformance_suite_of_the_protocol_passes() {
    let modules = match node_modules("mcp-conformance", CONFORMANCE) {
        Ok(modules) => modules,
        Err(reason) => skip!("the conformance suite: {reason}"),
    };
    // It sends no token.
    let server = Server::builder().no_token().start();
    let url = format!("http://{}/mcp", server.address);
    let run = |scenario: &str, version: &str| {
        let output = Command::new(modules.join(".bin/node"))
            .arg(modules.join("@modelcontextprotocol/conformance/dist/index.js"))
            .args([
                "server",
                "--url",
                &url,
                "--scenario",
                scenario,
                "--spec-version",
                version,
            ])
            .current_dir(modules.join(".."))
            .stdin(Stdio::null())
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    for (scenario, versions) in SCENARIOS {
        for version in *versions {
            let report = run(scenario, version);
            let summary = report
                .lines()
                .find(|line| line.starts_with("Passed: "))
                .expect(&report);
            let passed = summary
                .strip_prefix("Passed: ")
                .unwrap()
                .split('/')
                .next()
                .unwrap();
            assert!(
                summary.contains(", 0 failed") && passed != "0",
                "{scenario} {version}: {report}"
            );
        }
    }
    let report = run("server-stateless", "2026-07-28");
    let results = report.lines().filter(|line| line.contains("[sep-2575-"));
    let (failed, passed): (Vec<_>, Vec<_>) = results.partition(|line| line.contains("FAILURE"));
    assert!(
        passed
            .iter()
            .filter(|line| line.contains("SUCCESS"))
            .count()
            > 15,
        "{report}"
    );
    for line in failed {
        let is_known = STATELESS_FOR_TEST_SERVERS
            .iter()
            .any(|known| line.contains(known));
        assert!(is_known, "{line}\n{report}");
    }
}

#[test]
fn the_example_runs_and_is_what_the_page_shows() {
    let example = "examples/mcp_agent.py";
    let page = std::fs::read_to_string(repository("docs/mcp.md")).unwrap();
    let text = std::fs::read_to_string(repository(example)).unwrap();
    assert!(
        page.contains(text.trim_end()),
        "docs/mcp.md shows another {example}"
    );
    let python = match environment(&format!("mcp-{PYTHON}"), &[&format!("mcp=={PYTHON}")]) {
        Ok(python) => python,
        Err(reason) => skip!("the Python client: {reason}"),
    };
    let (_home, server) = super::machine();
    let output = Command::new(python)
        .arg("-B")
        .arg(repository(example))
        .env("MCP_URL", format!("http://{}/mcp", server.address))
        .env("SBX_TOKEN", server.token.as_deref().unwrap())
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{shown}{errors}");
    for expected in [
        "tools: run, start, output,",
        "attempt 1: exit code 1\nAssertionError: 3\n",
        "-    return sorted(values)[len(values) // 2 + 1]\n+    return sorted(values)[len(values) // 2]\n",
        "attempt 2: exit code 0\npassed\n",
    ] {
        assert!(shown.contains(expected), "{expected:?}: {shown}{errors}");
    }
}
