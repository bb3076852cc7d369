//! Commands: what a stream of events promises about the output, the end and the surroundings of
//! the process behind it.
//!
//! The promises held here: no byte of output is lost, moved or changed; there is one `exit`, it
//! is true, it is last and it is prompt; a timeout or a vanished client ends the whole tree; a
//! command that cannot start is refused before any stream; a start under the same id happens once;
//! a child sees nothing of the server's descriptors, signals or settings.

mod child;
mod clients;
mod complete;
mod ending;
mod output;
mod refusals;
mod starting;

use std::borrow::Cow;
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::fixture::{EventStream, PATIENCE, Server, TempDir, wait_until};

/// What a stream said on stdout and stderr, and its exit. As fast as a test can be, for thousands of
/// runs: the data is not copied where it has nothing to unescape.
fn text_of(body: &[u8]) -> (String, String, Value) {
    /// Data as it stands in the line.
    #[derive(serde::Deserialize)]
    struct Plain<'a> {
        event: &'a str,
        data: Option<&'a str>,
    }
    let text = std::str::from_utf8(body).unwrap();
    let (mut stdout, mut stderr, mut exit) = (String::new(), String::new(), None);
    for line in text.split_terminator('\n') {
        assert!(exit.is_none(), "an event after exit: {line}");
        let (event, data) = if let Ok(plain) = serde_json::from_str::<Plain<'_>>(line) {
            (plain.event.to_owned(), plain.data.map(Cow::Borrowed))
        } else {
            let value: Value = serde_json::from_str(line).unwrap();
            let text = |key: &str| value[key].as_str().map(str::to_owned);
            (text("event").unwrap(), text("data").map(Cow::Owned))
        };
        match event.as_str() {
            "stdout" => stdout.push_str(&data.unwrap()),
            "stderr" => stderr.push_str(&data.unwrap()),
            "exit" => exit = Some(serde_json::from_str(line).unwrap()),
            "start" | "ping" => {}
            other => panic!("an unexpected event: {other}"),
        }
    }
    (stdout, stderr, exit.expect("a stream has an exit"))
}

/// A file in `directory`, and its path.
fn write_file(directory: &TempDir, name: &str, content: impl AsRef<[u8]>) -> String {
    let path = directory.join(name);
    std::fs::write(&path, content).unwrap();
    path
}

fn write_program(directory: &TempDir, name: &str, content: &str) -> String {
    let path = write_file(directory, name, content);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Reads events until `wanted` was printed on stdout.
#[track_caller]
fn read_until(stream: &mut EventStream, wanted: &str) {
    let mut seen = String::new();
    while !seen.contains(wanted) {
        let event = stream
            .next_output()
            .unwrap_or_else(|| panic!("ended before {wanted:?}"));
        assert_ne!(event["event"], "exit", "before {wanted:?}: {event}");
        seen.push_str(event["data"].as_str().unwrap_or_default());
    }
}

/// Bytes a process has written so far, to whatever.
fn written_by(pid: i32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
    text.lines()
        .find_map(|line| line.strip_prefix("wchar: "))
        .unwrap()
        .parse()
        .unwrap()
}

/// Waits until a process that writes has been stopped by a full pipe, and tells how far it came.
#[track_caller]
fn wait_until_blocked(pid: i32) -> u64 {
    let mut last = (0, Instant::now());
    wait_until("the writer is stopped by a full pipe", PATIENCE, || {
        let written = written_by(pid);
        if written != last.0 {
            last = (written, Instant::now());
        }
        written > 0 && last.1.elapsed() > Duration::from_millis(500)
    });
    last.0
}

fn stream_pid(server: &Server, id: &str) -> i32 {
    i32::try_from(server.entry(&json!(id))["pid"].as_i64().unwrap()).unwrap()
}

fn half_close(stream: &EventStream) {
    stream.connection.stream.shutdown(Shutdown::Write).unwrap();
}
