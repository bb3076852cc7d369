//! The promise of the E2B door: the unmodified command line of E2B (npm `@e2b/cli`) works here.
//!
//! It is installed from the registry of npm and kept under the target directory between runs.

use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use crate::client::node_modules;
use crate::fixture::{PATIENCE, Server, TempDir, is_root, wait_until};
use crate::skip;

use super::long_key;

const VERSION: &str = "2.19.0";

/// Runs a program in a terminal of its own.
const IN_TERMINAL: &str = "import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))";

/// The command line, for one server.
struct Cli<'a> {
    server: &'a Server,
    modules: PathBuf,
    /// Nothing of the user's is read.
    home: TempDir,
}

impl Cli<'_> {
    fn command(&self, program: &str, before: &[&str], words: &[&str]) -> Command {
        let url = format!("http://{}", self.server.address);
        let mut command = Command::new(program);
        command
            .args(before)
            .arg(self.modules.join("@e2b/cli/dist/index.js"))
            .args(words)
            .env("HOME", self.home.path())
            .env("E2B_API_URL", &url)
            .env("E2B_SANDBOX_URL", &url)
            .env("E2B_API_KEY", long_key())
            .env("NO_COLOR", "1")
            .stdin(Stdio::null());
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command("node", &[], words).output().unwrap()
    }

    /// What it prints when it succeeds.
    #[track_caller]
    fn ok(&self, words: &[&str]) -> String {
        let output = self.run(words);
        let shown = String::from_utf8_lossy(&output.stdout).into_owned();
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {shown}{complaints}");
        shown
    }

    /// Types a command and the end into a terminal that it opens.
    #[track_caller]
    fn in_terminal(&self, words: &[&str]) {
        let mut command = self.command("python3", &["-c", IN_TERMINAL, "node"], words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let typed = b"echo $((40 + 2)) in a terminal; exit\n";
        child.stdin.take().unwrap().write_all(typed).unwrap();
        let mut shown = String::new();
        let mut output = child.stdout.take().unwrap();
        output.read_to_string(&mut shown).unwrap();
        assert!(child.wait().unwrap().success(), "{words:?}: {shown}");
        for expected in ["42 in a terminal", "Closing terminal connection"] {
            assert!(shown.contains(expected), "{words:?}: {shown}");
        }
    }
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_command_line_works_unmodified() {
    let package = format!("@e2b/cli@{VERSION}");
    let modules = match node_modules(&format!("e2b-cli-{VERSION}"), &[&package]) {
        Ok(modules) => modules,
        Err(reason) => skip!("the command line of E2B: {reason}"),
    };
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().env("SBX_E2B_TEMPLATES", "mine").start();
    let cli = Cli {
        server: &server,
        modules,
        home: TempDir::new(),
    };
    assert!(cli.ok(&["sandbox", "list"]).contains("No sandboxes found"));
    let templates = cli.ok(&["template", "list"]);
    for name in ["base", "code-interpreter-v1", "mine"] {
        assert!(templates.contains(name), "{templates}");
    }
    let made = cli.ok(&["sandbox", "create", "--detach", "mine"]);
    let id = made.trim();
    for words in [&["list"][..], &["info", id]] {
        let shown = cli.ok(&[&["sandbox"], words].concat());
        assert!(shown.contains(id) && shown.contains("mine"), "{shown}");
    }
    let metrics = cli.ok(&["sandbox", "metrics", id]);
    assert!(metrics.contains("Memory"), "{metrics}");

    // What it prints while it follows.
    let path = cli.home.path().join("followed");
    let mut following = cli
        .command("node", &[], &["sandbox", "logs", "--follow", id])
        .stdout(File::create(&path).unwrap())
        .spawn()
        .unwrap();
    let followed = || std::fs::read_to_string(&path).unwrap();
    wait_until("it follows", PATIENCE, || followed().contains("started"));
    let output = cli.run(&[
        "sandbox",
        "exec",
        id,
        "echo out-$((6*7)); echo err-$((6*7)) >&2; exit 3",
    ]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(output.stdout, b"out-42\n");
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(complaints.starts_with("err-42\n"), "{complaints}");
    for expected in ["out-42", "err-42", "exit status 3"] {
        wait_until(expected, PATIENCE, || followed().contains(expected));
    }
    let logs = cli.ok(&["sandbox", "logs", "--format", "json", id]);
    let messages: Vec<_> = logs
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .map(|line| format!("{} {}", line["logger"], line["message"]).replace('"', ""))
        .collect();
    // The two streams are read one after the other.
    for (count, expected) in [
        (1, "sandbox started"),
        (1, "stdout out-42"),
        (1, "stderr err-42"),
    ] {
        let found = messages.iter().filter(|message| *message == expected);
        assert_eq!(found.count(), count, "{expected}: {messages:?}");
    }
    assert_eq!(messages.last().unwrap(), "command ended");

    cli.in_terminal(&["sandbox", "connect", id]);
    cli.in_terminal(&["sandbox", "create", "base"]);

    cli.ok(&["sandbox", "kill", id]);
    // It ends by itself, and without a failure. Whether it says "closed" before depends on which of
    // its two loops sees first that the sandbox is gone.
    assert!(following.wait().unwrap().success(), "{}", followed());
    assert!(cli.ok(&["sandbox", "logs", id]).contains("ended"));
}
