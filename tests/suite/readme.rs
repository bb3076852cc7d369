//! The README tells the truth: every example in it is run, in order, and what it prints is what the
//! README shows. Those about many sandboxes meet a server in host mode, the others a dedicated one.
//!
//! Examples are the `console` blocks: a line that begins with `$ ` is a command (a backslash at its
//! end continues it), the lines under it are its output. What differs from run to run, such as pids,
//! times and ids, may differ.

use std::process::{Command, Stdio};

use crate::fixture::{BINARY, Server, TOKEN, TempDir, is_root};
use crate::skip;

const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");

/// A command and the output that is shown under it.
#[derive(Debug, PartialEq)]
struct Example {
    command: String,
    output: String,
}

fn examples(text: &str) -> Vec<Example> {
    let mut examples: Vec<Example> = Vec::new();
    let mut inside = false;
    let mut continued = false;
    for line in text.lines() {
        if line.starts_with("```") {
            inside = line == "```console";
        } else if !inside {
        } else if continued {
            let command = &mut examples.last_mut().unwrap().command;
            command.push('\n');
            command.push_str(line);
            continued = line.ends_with('\\');
        } else if let Some(command) = line.strip_prefix("$ ") {
            continued = line.ends_with('\\');
            let command = command.to_owned();
            examples.push(Example {
                command,
                output: String::new(),
            });
        } else {
            let output = &mut examples.last_mut().expect("a command comes first").output;
            output.push_str(line);
            output.push('\n');
        }
    }
    examples
}

/// The heading of the section about host mode.
const HOST: &str = "\n## Many sandboxes on one machine\n";

/// The README's section about host mode, and the text before and after it.
fn parts(text: &str) -> (&str, [&str; 2]) {
    let (before, rest) = text.split_once(HOST).expect("the README has the section");
    let end = rest.find("\n## ").expect("more sections follow");
    (&rest[..end], [before, &rest[end..]])
}

/// The text with each number that differs from run to run replaced by `N`, and each id and token by
/// `H`.
fn steady(text: &str) -> String {
    const CHANGING: [&str; 9] = [
        r#""pid":"#,
        r#""uid":"#,
        r#""created_at_ms":"#,
        r#""uptime_ms":"#,
        r#""duration_ms":"#,
        r#""started_at_ms":"#,
        r#""mtime_ms":"#,
        r#""inode":"#,
        r#""landlock_abi":"#,
    ];
    let mut result = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        if let Some(key) = CHANGING.into_iter().find(|key| rest.starts_with(key)) {
            let after = rest[key.len()..].trim_start_matches(|c: char| c.is_ascii_digit());
            result.push_str(key);
            if after.len() + key.len() < rest.len() {
                result.push('N');
            }
            rest = after;
        } else if let Some(after) = without_id(rest) {
            result.push('H');
            rest = after;
        } else {
            let length = rest.chars().next().unwrap().len_utf8();
            result.push_str(&rest[..length]);
            rest = &rest[length..];
        }
    }
    result
}

/// What follows an id or a token: a run of 24 hexadecimal digits or more.
fn without_id(text: &str) -> Option<&str> {
    let after = text.trim_start_matches(|c: char| c.is_ascii_digit() || ('a'..='f').contains(&c));
    (text.len() - after.len() >= 24).then_some(after)
}

#[test]
fn every_example_prints_what_the_readme_shows() {
    let text = std::fs::read_to_string(README).unwrap();
    if !has_curl() {
        skip!("curl is not installed");
    }
    let (_, dedicated) = parts(&text);
    let examples: Vec<_> = dedicated.into_iter().flat_map(examples).collect();
    assert!(
        examples.len() > 30,
        "only {} examples were found",
        examples.len()
    );
    let directory = TempDir::new();
    let path = directory.path().to_str().unwrap();
    // Relative paths are the server's, and curl's where it reads or writes files.
    let server = Server::builder()
        .wrapped_in(&["sh", "-c", r#"cd "$0" && exec "$@""#, path])
        .start();
    check_examples(&text, &examples, &server, &directory);
}

#[test]
fn every_example_of_host_mode_prints_what_the_readme_shows() {
    let text = std::fs::read_to_string(README).unwrap();
    if !has_curl() {
        skip!("curl is not installed");
    }
    if !is_root() {
        skip!("host mode needs root");
    }
    let (host, _) = parts(&text);
    let capacity = host
        .split_once("SBX_CAPACITY=")
        .and_then(|(_, rest)| rest.split(' ').next())
        .expect("the README starts a host");
    let examples = examples(host);
    assert!(
        examples.len() > 10,
        "only {} examples were found",
        examples.len()
    );
    let server = Server::host().env("SBX_CAPACITY", capacity).start();
    check_examples(&text, &examples, &server, &TempDir::new());
}

fn has_curl() -> bool {
    let found = Command::new("curl")
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    found.is_ok_and(|status| status.success())
}

/// Runs the examples in order, in this directory, and compares. What the first sandbox that is made
/// is called is `ID` for the examples after it, and its token `S`, as the README has it.
#[track_caller]
fn check_examples(text: &str, examples: &[Example], server: &Server, directory: &TempDir) {
    let helper = text
        .lines()
        .find(|line| line.starts_with("sbx() {"))
        .expect("the README defines sbx()");
    let mut sandbox: Option<[String; 2]> = None;
    let mut shown = String::new();
    let mut seen = String::new();
    for Example { command, output } in examples {
        let [id, token] = sandbox.clone().unwrap_or_default();
        let result = Command::new("sh")
            .arg("-c")
            .arg(format!("{helper}\n{command}"))
            .env("URL", format!("http://{}", server.address))
            .env("T", TOKEN)
            .env("ID", id)
            .env("S", token)
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&result.stderr);
        assert!(errors.is_empty(), "{command}\n{errors}");
        let mut printed = String::from_utf8(result.stdout).unwrap();
        if !printed.is_empty() && !printed.ends_with('\n') {
            printed.push('\n');
        }
        if sandbox.is_none()
            && let Ok(made) = serde_json::from_str::<serde_json::Value>(&printed)
            && let Some(made) = made["sandboxes"].get(0)
        {
            sandbox = Some(["id", "token"].map(|name| made[name].as_str().unwrap().to_owned()));
        }
        if let Some(place) = &server.place {
            printed = printed.replace(place.homes().to_str().unwrap(), "/sbx/homes");
        }
        shown.push_str(&steady(&format!("$ {command}\n{output}")));
        seen.push_str(&steady(&format!("$ {command}\n{printed}")));
    }
    if shown != seen {
        let line = shown
            .lines()
            .zip(seen.lines())
            .position(|(shown, seen)| shown != seen);
        let from = line.unwrap_or_default().saturating_sub(2);
        let part = |text: &str| {
            text.lines()
                .skip(from)
                .take(8)
                .collect::<Vec<_>>()
                .join("\n")
        };
        panic!(
            "the README shows\n{}\n\nbut this was printed\n{}",
            part(&shown),
            part(&seen)
        );
    }
}

#[test]
fn every_variable_and_every_module_is_in_the_readme() {
    let text = std::fs::read_to_string(README).unwrap();
    let help = Command::new(BINARY).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let variables = help.lines().filter_map(|line| {
        let name = line.trim_start().split(' ').next()?;
        name.starts_with("SBX_").then(|| name.to_owned())
    });
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
    let modules = std::fs::read_dir(sources)
        .into_iter()
        .flatten()
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let end = if entry.path().is_dir() { "/" } else { "" };
            name + end
        });
    for name in variables.chain(modules) {
        assert!(
            text.contains(&format!("`{name}`")),
            "the README lacks {name}"
        );
    }
}

#[test]
fn examples_and_their_changing_numbers_are_recognized() {
    let text =
        "text\n```sh\n$ not me\n```\n```console\n$ one \\\n  two\nout 1\nout 2\n$ three\n```\n";
    let example = |command: &str, output: &str| Example {
        command: command.to_owned(),
        output: output.to_owned(),
    };
    let expected = [
        example("one \\\n  two", "out 1\nout 2\n"),
        example("three", ""),
    ];
    assert_eq!(examples(text), expected);
    assert_eq!(
        steady(r#"{"pid":12,"duration_ms":null,"id":"p-7"}"#),
        r#"{"pid":N,"duration_ms":null,"id":"p-7"}"#
    );
    let ids = format!(
        r#"{{"id":"{}","other":"{}"}}"#,
        "0a".repeat(12),
        "0a".repeat(11)
    );
    assert_eq!(
        steady(&ids),
        format!(r#"{{"id":"H","other":"{}"}}"#, "0a".repeat(11))
    );
    let text = format!("a\n## B\nb\n{HOST}c\n### d\n## E\ne");
    assert_eq!(parts(&text), ("c\n### d", ["a\n## B\nb\n", "\n## E\ne"]));
}
