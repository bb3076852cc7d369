//! Commands: what a stream of events promises about the output, the end and the surroundings of
//! the process behind it.
//!
//! The promises held here: no byte of output is lost, moved or changed; there is one `exit`, it
//! is true, it is last and it is prompt; a timeout or a vanished client ends the whole tree; a
//! command that cannot start is refused before any stream; a start under the same id happens once;
//! a child sees nothing of the server's descriptors, signals or settings.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Read;
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::fixture::{
    Connection, EventStream, Gate, Mark, Outcome, PATIENCE, Server, Stop, TempDir, best_of,
    descendants_of, events_of, memory_of, numbered_text, output_of, processes_with, random_bytes,
    reset, stat_of, wait_until,
};
use crate::skip;

/// A second, within which a client that went away must be noticed, and what measuring it costs.
const NOTICED: Duration = Duration::from_millis(1100);

/// What may be said of a command that is longer than the kernel takes.
const TOO_LONG: [&str; 4] = ["bad_request", "not_found", "not_executable", "bad_cwd"];

// ------------------------------------------------------------------------------------- helpers

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
        let (event, data) = match serde_json::from_str::<Plain<'_>>(line) {
            Ok(plain) => (plain.event.to_owned(), plain.data.map(Cow::Borrowed)),
            Err(_) => {
                let value: Value = serde_json::from_str(line).unwrap();
                let text = |key: &str| value[key].as_str().map(str::to_owned);
                (text("event").unwrap(), text("data").map(Cow::Owned))
            }
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

/// Equality of long texts, without printing them when they differ.
#[track_caller]
fn assert_same(actual: &[u8], expected: &[u8]) {
    if actual != expected {
        let at = actual
            .iter()
            .zip(expected)
            .take_while(|(a, b)| a == b)
            .count();
        let around = |bytes: &[u8]| {
            let end = bytes.len().min(at + 20);
            String::from_utf8_lossy(&bytes[at.saturating_sub(20).min(end)..end]).into_owned()
        };
        panic!(
            "{} bytes where {} were expected; the first difference is at {at}: {:?} for {:?}",
            actual.len(),
            expected.len(),
            around(actual),
            around(expected)
        );
    }
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

fn entry(server: &Server, id: &Value) -> Value {
    let reply = server.get(&format!("/v1/processes/{}", id.as_str().unwrap()));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

fn server_pid(server: &Server) -> i32 {
    server.pid().cast_signed()
}

// ---------------------------------------------------------------------- output: nothing is lost

#[test]
fn two_thousand_runs_of_256_kib_lose_nothing() {
    let directory = TempDir::new();
    // Most of it without line ends, which need unescaping: half a gibibyte should be quick to check.
    let lines = numbered_text(256 << 10);
    let expected = [lines.replace('\n', " "), lines];
    let bodies = [0, 1].map(|index| {
        let file = write_file(&directory, &index.to_string(), &expected[index]);
        json!({"cmd": ["cat", file]}).to_string()
    });
    let server = Server::start();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut connection = server.connect();
                for run in 0..500 {
                    let kind = usize::from(run % 10 == 0);
                    let body = bodies[kind].as_bytes();
                    let reply = connection.request("POST", "/v1/exec", &[], body);
                    assert_eq!(reply.status, 200, "run {run}: {}", reply.text());
                    let (stdout, stderr, exit) = text_of(&reply.body);
                    assert!(
                        stdout == expected[kind],
                        "run {run}: {} bytes",
                        stdout.len()
                    );
                    assert_eq!(stderr, "", "run {run}");
                    assert_eq!(exit["exit_code"], 0, "run {run}");
                }
            });
        }
    });
}

#[test]
fn the_last_bytes_come_before_exit_even_if_a_grandchild_holds_the_pipes() {
    let directory = TempDir::new();
    let expected = numbered_text(100_000);
    let file = write_file(&directory, "text", &expected);
    let mark = Mark::new();
    // The pipes never reach their end here: only reading them to empty after the main process was
    // seen to end can be complete.
    let body = json!({"cmd": format!("sleep {mark} & cat {file}; exec cat {file} >&2")});
    let server = Server::start();
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for run in 0..60 {
                    let outcome = server.exec(&body);
                    assert!(
                        outcome.stdout == expected,
                        "run {run}: {}",
                        outcome.stdout.len()
                    );
                    assert!(
                        outcome.stderr == expected,
                        "run {run}: {}",
                        outcome.stderr.len()
                    );
                }
            });
        }
    });
    assert_eq!(mark.pids().len(), 120, "every grandchild lives on");
}

#[test]
fn the_shortest_commands_lose_nothing_either() {
    let server = Server::start();
    let body = json!({"cmd": ["echo", "hi"]}).to_string();
    let mut connection = server.connect();
    for run in 0..300 {
        let reply = connection.request("POST", "/v1/exec", &[], body.as_bytes());
        let events = events_of(&reply.body);
        let kinds: Vec<&str> = events
            .iter()
            .map(|event| event["event"].as_str().unwrap())
            .collect();
        assert_eq!(kinds, ["start", "stdout", "exit"], "run {run}");
        assert_eq!(events[1]["data"], "hi\n", "run {run}");
    }
}

#[test]
fn sixty_four_mebibytes_stream_without_a_gap_and_without_being_collected() {
    let directory = TempDir::new();
    let expected = numbered_text(64 << 20);
    let file = write_file(&directory, "text", &expected);
    let server = Server::start();
    let before = memory_of(server_pid(&server), "VmHWM");
    let events: Vec<Value> = server.exec_stream(&json!({"cmd": ["cat", file]})).collect();
    let output = output_of(&events, "stdout", 0);
    assert_eq!(output.dropped, 0);
    assert_same(&output.data, expected.as_bytes());
    let grown = memory_of(server_pid(&server), "VmHWM") - before;
    assert!(grown < 16 << 20, "the server grew by {grown} bytes");
}

#[test]
fn both_streams_at_full_speed_lose_nothing() {
    let directory = TempDir::new();
    let expected = numbered_text(8 << 20);
    let file = write_file(&directory, "text", &expected);
    let server = Server::start();
    let script = format!("cat {file} & cat {file} >&2; wait");
    let events: Vec<Value> = server.exec_stream(&json!({"cmd": script})).collect();
    assert_same(&output_of(&events, "stdout", 0).data, expected.as_bytes());
    assert_same(&output_of(&events, "stderr", 0).data, expected.as_bytes());
    assert_eq!(events.last().unwrap()["exit_code"], 0);
}

#[test]
fn offsets_and_bytes_of_events_count_raw_bytes_of_their_own_stream() {
    let server = Server::start();
    let script =
        "i=0; while [ $i -lt 40 ]; do printf 'aé€😀\\377'; printf 'e\\n' >&2; i=$((i+1)); done";
    let events: Vec<Value> = server.exec_stream(&json!({"cmd": script})).collect();
    // 1 + 2 + 3 + 4 bytes of text, and one byte that is none.
    assert_eq!(output_of(&events, "stdout", 0).end, 40 * 11);
    assert_eq!(output_of(&events, "stderr", 0).end, 40 * 2);
    let outcome = Outcome::of(events);
    assert_eq!(outcome.stdout, "aé€😀\u{fffd}".repeat(40));
    assert_eq!(outcome.stderr, "e\n".repeat(40));
    assert_eq!(entry(&server, &outcome.start["id"])["stdout_bytes"], 440);
    assert_eq!(entry(&server, &outcome.start["id"])["stderr_bytes"], 80);
}

#[test]
fn events_are_sent_as_they_are_made() {
    let server = Server::start();
    let mut gate = Gate::new();
    let script = format!("echo one; : < {}; echo two", gate.path());
    let mut stream = server.exec_stream(&json!({"cmd": script}));
    let start = stream.next().unwrap();
    assert_eq!(start["event"], "start");
    let first = stream.next_output().unwrap();
    assert_eq!(
        first["data"], "one\n",
        "sent although the command has not ended"
    );
    gate.open();
    assert_eq!(stream.next_output().unwrap()["data"], "two\n");
    assert_eq!(stream.next_output().unwrap()["event"], "exit");
    assert!(stream.next().is_none());
}

// ------------------------------------------------------------------- output: nothing is changed

/// Writing systems, combinations, and everything that is awkward in JSON or in a line of text.
fn many_scripts() -> String {
    let lines = [
        "Zażółć gęślą jaźń — «Ποικιλία» Съешь же ещё",
        "שלום עולם مرحبا بالعالم نیم‌فاصله",
        "नमस्ते दुनिया ภาษาไทย မြန်မာ ქართული հայերեն አማርኛ",
        "日本語のテキスト 漢字 한국어 \u{20000}\u{2a6d6}",
        "e\u{301} n\u{303} 👩‍👩‍👧‍👦 🏳️‍🌈 🇺🇳 👍🏽",
        "next line \u{85} line separator \u{2028} paragraph separator \u{2029} end",
        "quote \" backslash \\ slash / del \u{7f} nul \0 bell \u{7} esc \u{1b}[0m",
        "vt \u{b} ff \u{c} fs \u{1c} gs \u{1d} rs \u{1e} us \u{1f} tab \t cr \r nbsp \u{a0}",
        "bom \u{feff} replacement \u{fffd} nonchar \u{ffff}\u{fdd0} last \u{10ffff}",
        "edges \u{7ff}\u{800}\u{d7ff}\u{e000}\u{10000}\u{80}",
    ];
    lines.join("\n") + "\n"
}

#[test]
fn text_in_many_scripts_comes_back_byte_for_byte() {
    let directory = TempDir::new();
    let text = many_scripts();
    let file = write_file(&directory, "text", &text);
    let server = Server::start();
    for cmd in [
        format!("cat {file}"),
        // Every byte in a write of its own, and writes that never end where a character does.
        format!("dd if={file} bs=1 2>/dev/null"),
        format!("dd if={file} bs=7 2>/dev/null"),
        format!("dd if={file} ibs=1 obs=11 2>/dev/null"),
    ] {
        let outcome = server.exec(&json!({"cmd": cmd}));
        assert_same(outcome.stdout.as_bytes(), text.as_bytes());
        let outcome = server.exec(&json!({"cmd": format!("{{ {cmd}; }} >&2")}));
        assert_same(outcome.stderr.as_bytes(), text.as_bytes());
    }
}

/// Bytes as `printf` of the shell takes them.
fn octal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "\\{byte:03o}").unwrap();
        text
    })
}

#[test]
fn characters_split_over_two_writes_arrive_whole() {
    let server = Server::start();
    let mut script = String::new();
    let mut expected = String::new();
    for character in ["é", "€", "😀", "\u{2028}"] {
        for split in 1..character.len() {
            let (head, tail) = character.as_bytes().split_at(split);
            write!(script, "printf 'x{}'; sleep 0.1; ", octal(head)).unwrap();
            write!(script, "printf '{}y'; ", octal(tail)).unwrap();
            write!(expected, "x{character}y").unwrap();
        }
    }
    let outcome = server.exec(&json!({"cmd": script}));
    assert_eq!(outcome.stdout, expected);
    assert!(
        outcome.events.len() > 12,
        "the halves were written apart, and nothing waited for the end"
    );
}

#[test]
fn characters_on_the_edge_of_any_read_arrive_whole() {
    let directory = TempDir::new();
    let server = Server::start();
    for character in ["é", "€", "😀"] {
        for shift in 0..character.len() {
            let text = "-".repeat(shift) + &character.repeat((1 << 20) / character.len());
            let file = write_file(&directory, "text", &text);
            let outcome = server.exec(&json!({"cmd": ["cat", file]}));
            assert_same(outcome.stdout.as_bytes(), text.as_bytes());
        }
    }
}

#[test]
fn only_bytes_that_are_not_utf8_become_replacement_characters() {
    let directory = TempDir::new();
    let server = Server::start();
    let mut bytes: Vec<u8> = Vec::new();
    for bad in [
        &b"\x80"[..],
        b"\xbf\xbf",
        b"\xc0\xaf",
        b"\xc3",
        b"\xe2\x82",
        b"\xe2",
        b"\xe0\x80\xaf",
        b"\xed\xa0\x80",
        b"\xed\xbf\xbf",
        b"\xf0\x9f\x98",
        b"\xf0\x80\x80\xaf",
        b"\xf4\x90\x80\x80",
        b"\xf5\xff\xfe",
        b"\xc3\xc3\xa9",
        b"\xe2\xe2\x82\xac",
    ] {
        bytes.extend_from_slice("aé€😀".as_bytes());
        bytes.extend_from_slice(bad);
    }
    bytes.extend(random_bytes(20_000, 7));
    // The end is the first half of a character: it must not be swallowed.
    bytes.extend_from_slice(b"end \xf0\x9f");
    let expected = String::from_utf8_lossy(&bytes);
    let file = write_file(&directory, "bytes", &bytes);
    for cmd in [
        format!("cat {file}"),
        format!("dd if={file} bs=1 2>/dev/null"),
        format!("dd if={file} bs=5 2>/dev/null"),
    ] {
        let outcome = server.exec(&json!({"cmd": cmd}));
        assert_same(outcome.stdout.as_bytes(), expected.as_bytes());
        assert_eq!(
            output_of(&outcome.events, "stdout", 0).end,
            bytes.len() as u64,
            "every raw byte is accounted for"
        );
    }
}

#[test]
fn half_a_character_at_the_end_is_told_even_if_a_grandchild_holds_the_pipe() {
    let server = Server::start();
    let mark = Mark::new();
    let outcome = server.exec(&json!({"cmd": format!("sleep {mark} & printf 'a\\342\\202'")}));
    assert_eq!(outcome.stdout, "a\u{fffd}");
}

#[test]
fn no_event_holds_what_some_clients_split_lines_at() {
    let directory = TempDir::new();
    let text = "a\u{85}b\u{2028}c\u{2029}d\u{b}e\u{c}f\u{1c}g\u{1d}h\u{1e}i\r\n".repeat(50);
    let file = write_file(&directory, "text", &text);
    let server = Server::start();
    let body =
        json!({"cmd": format!("cat {file}; dd if={file} bs=1 >&2 2>/dev/null; cat {file} >&2")});
    let reply = server.post("/v1/exec", &body);
    let (stdout, stderr, exit) = text_of(&reply.body);
    assert_same(stdout.as_bytes(), text.as_bytes());
    assert_same(stderr.as_bytes(), text.repeat(2).as_bytes());
    assert_eq!(exit["exit_code"], 0);
    let id = events_of(&reply.body)[0]["id"].as_str().unwrap().to_owned();
    let logs = server.get(&format!("/v1/processes/{id}/logs"));
    for raw in [reply.body, logs.body] {
        for forbidden in ["\u{85}", "\u{2028}", "\u{2029}"] {
            assert!(
                !String::from_utf8(raw.clone()).unwrap().contains(forbidden),
                "raw {forbidden:?} in the stream"
            );
        }
        let control = raw.iter().find(|byte| **byte < 0x20 && **byte != b'\n');
        assert_eq!(control, None, "a raw control character in the stream");
    }
}

#[test]
fn base64_is_exact_for_any_bytes() {
    let directory = TempDir::new();
    let bytes = random_bytes(1_000_003, 42);
    let small = random_bytes(3_001, 43);
    let file = write_file(&directory, "bytes", &bytes);
    let small_file = write_file(&directory, "small", &small);
    let server = Server::start();
    // Dribbles whose lengths are no multiple of three, then a flood.
    let script = format!("dd if={small_file} bs=7 2>/dev/null; cat {file}; cat {file} >&2");
    let events: Vec<Value> = server
        .exec_stream(&json!({"cmd": script, "encoding": "base64"}))
        .collect();
    let expected = [small, bytes.clone()].concat();
    assert_same(&output_of(&events, "stdout", 0).data, &expected);
    assert_same(&output_of(&events, "stderr", 0).data, &bytes);
    for event in events
        .iter()
        .filter(|event| event["event"] == "stdout" || event["event"] == "stderr")
    {
        assert!(
            event["data_b64"].is_string() && event.get("data").is_none(),
            "{event}"
        );
    }
    assert_eq!(events.last().unwrap()["event"], "exit");
}

#[test]
fn utf8_is_the_default_encoding_and_can_be_named() {
    let server = Server::start();
    assert_eq!(
        server
            .exec(&json!({"cmd": "printf €", "encoding": "utf-8"}))
            .stdout,
        "€"
    );
    assert_eq!(
        server
            .exec(&json!({"cmd": "printf €", "encoding": null}))
            .stdout,
        "€"
    );
}

// -------------------------------------------------------------------------------- shape of a stream

#[test]
fn a_stream_has_the_headers_and_events_that_clients_rely_on() {
    let server = Server::start();
    let mut connection = server.connect();
    let body = json!({"cmd": "echo out; echo err >&2; exit 3"}).to_string();
    connection.send_request("POST", "/v1/exec", &[], body.as_bytes());
    let head = connection.read_head();
    assert_eq!(head.status, 200);
    assert!(
        head.header("content-type")
            .unwrap()
            .starts_with("application/x-ndjson")
    );
    assert_eq!(head.header("transfer-encoding"), Some("chunked"));
    assert_eq!(head.header("x-accel-buffering"), Some("no"));
    let reply = connection.read_body(head);
    let outcome = Outcome::of(events_of(&reply.body));
    assert!(outcome.start["pid"].as_i64().unwrap() > 1);
    assert!(outcome.start["id"].as_str().unwrap().starts_with("p-"));
    assert_eq!(
        (outcome.stdout.as_str(), outcome.stderr.as_str()),
        ("out\n", "err\n")
    );
    let exit = outcome.exit.as_object().unwrap();
    assert_eq!(exit["exit_code"], 3);
    assert_eq!(exit["signal"], Value::Null, "the key is there");
    assert_eq!(exit["timed_out"], false);
    assert_eq!(exit["reason"], "exited");
    assert!(exit["duration_ms"].is_u64());
    // The connection is where it should be.
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
}

#[test]
fn an_http_1_0_client_gets_the_same_lines_until_the_close() {
    let server = Server::start();
    let mut connection = server.connect();
    let body = json!({"cmd": "echo old"}).to_string();
    let token = server.token.clone().unwrap();
    connection.send(
        format!("POST /v1/exec HTTP/1.0\r\nX-Sandbox-Token: {token}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            .as_bytes(),
    );
    let head = connection.read_head();
    assert_eq!(head.status, 200);
    assert_eq!(head.header("transfer-encoding"), None);
    let outcome = Outcome::of(events_of(&connection.read_to_close()));
    assert_eq!(outcome.stdout, "old\n");
}

#[test]
fn requests_sent_ahead_wait_for_their_turn_and_are_no_sign_of_a_vanished_client() {
    let server = Server::start();
    let mut connection = server.connect();
    let first = json!({"cmd": "sleep 1.3; echo first"}).to_string();
    let second = json!({"cmd": "echo second"}).to_string();
    connection.send_request("POST", "/v1/exec", &[], first.as_bytes());
    connection.send_request("POST", "/v1/exec", &[], second.as_bytes());
    connection.send_request("GET", "/health", &[], b"");
    assert_eq!(
        Outcome::of(events_of(&connection.read_reply().body)).stdout,
        "first\n"
    );
    assert_eq!(
        Outcome::of(events_of(&connection.read_reply().body)).stdout,
        "second\n"
    );
    assert_eq!(connection.read_reply().json()["status"], "ok");
}

#[test]
fn quiet_streams_are_pinged() {
    let server = Server::builder().env("SBX_PING_SECS", 1).start();
    let events: Vec<Value> = server
        .exec_stream(&json!({"cmd": "sleep 3.4; echo late"}))
        .collect();
    let late = events
        .iter()
        .position(|event| event["event"] == "stdout")
        .unwrap();
    let pings = events[..late]
        .iter()
        .filter(|event| event["event"] == "ping")
        .count();
    assert!(
        (2..=4).contains(&pings),
        "{pings} pings in 3.4 seconds: {events:?}"
    );
    Outcome::of(events);
}

// ------------------------------------------------------------------------------------- the end

#[test]
fn exit_comes_within_250_ms_though_a_grandchild_holds_the_pipes() {
    let server = Server::start();
    let mark = Mark::new();
    let mut connection = server.connect();
    let body = json!({"cmd": format!("sleep {mark} & echo done")}).to_string();
    let best = best_of(5, || {
        let begin = Instant::now();
        // The whole reply is read: the stream, too, must end, and leave the connection usable.
        let reply = connection.request("POST", "/v1/exec", &[], body.as_bytes());
        let taken = begin.elapsed();
        let outcome = Outcome::of(events_of(&reply.body));
        assert_eq!(outcome.stdout, "done\n");
        assert_eq!(outcome.exit["reason"], "exited");
        taken
    });
    assert!(
        best < Duration::from_millis(250),
        "the fastest of five took {best:?}"
    );
    assert_eq!(mark.pids().len(), 5, "the sleepers live on");
    drop(connection);
    // Longer than a client's absence may go unnoticed: it must not be taken out on the sleepers.
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(
        mark.pids().len(),
        5,
        "the sleepers live on after the client has gone"
    );
}

#[test]
fn a_grandchild_that_floods_the_pipes_does_not_hold_up_the_exit() {
    let server = Server::start();
    let mark = Mark::new();
    let best = best_of(3, || {
        let begin = Instant::now();
        let script = format!("yes {mark} & yes {mark} >&2 & sleep 0.2; exit 3");
        let events: Vec<Value> = server.exec_stream(&json!({"cmd": script})).collect();
        let taken = begin.elapsed();
        assert_eq!(events.last().unwrap()["exit_code"], 3);
        output_of(&events, "stdout", 0);
        output_of(&events, "stderr", 0);
        taken
    });
    assert!(best < Duration::from_millis(200 + 250), "{best:?}");
    assert_eq!(mark.pids().len(), 6, "the writers live on");
}

#[test]
fn a_plain_command_ends_promptly() {
    let server = Server::start();
    let best = best_of(5, || {
        let begin = Instant::now();
        assert_eq!(server.exec(&json!({"cmd": ["true"]})).code(), Some(0));
        begin.elapsed()
    });
    assert!(
        best < Duration::from_millis(100),
        "the fastest of five took {best:?}"
    );
}

#[test]
fn a_server_left_behind_survives_writing_to_the_old_pipes() {
    let directory = TempDir::new();
    let server = Server::start();
    let mark = Mark::new();
    let counter = directory.join("counter");
    // Each round is more than a pipe holds, on both streams; a write that fails is the end of it.
    let script = format!(
        "(: {mark}; i=0; while head -c 100000 /dev/zero && head -c 100000 /dev/zero >&2; do \
         i=$((i+1)); echo $i > {counter}; done) & echo started"
    );
    // Through a connection that closes at once, as real clients do.
    let outcome = server.exec(&json!({"cmd": script}));
    assert_eq!(outcome.exit["exit_code"], 0);
    let count = || {
        std::fs::read_to_string(&counter)
            .ok()
            .and_then(|text| text.trim().parse::<u64>().ok())
            .unwrap_or(0)
    };
    // What was begun before the exit could still lie in the pipe, so many rounds.
    wait_until("the left-behind server goes on writing", PATIENCE, || {
        count() > 50
    });
    // And when its record is long forgotten.
    for _ in 0..300 {
        server.exec(&json!({"cmd": ["true"]}));
    }
    let id = outcome.start["id"].as_str().unwrap();
    assert_eq!(
        server.get(&format!("/v1/processes/{id}")).status,
        404,
        "its record has gone"
    );
    let then = count();
    wait_until("it goes on writing without its record", PATIENCE, || {
        count() > then + 50
    });
}

#[test]
fn a_process_that_closed_its_output_still_tells_its_end() {
    let server = Server::start();
    let begin = Instant::now();
    let outcome = server.exec(&json!({"cmd": "echo last; exec >&- 2>&-; sleep 0.5; exit 9"}));
    assert!(
        begin.elapsed() >= Duration::from_millis(500),
        "it ended later than its output did"
    );
    assert_eq!(outcome.stdout, "last\n");
    assert_eq!(outcome.code(), Some(9));
}

#[test]
fn exit_codes_and_signals_are_told_truly() {
    let server = Server::start();
    for code in [0, 1, 2, 100, 126, 127, 128, 137, 255] {
        let exit = server.exec(&json!({"cmd": format!("exit {code}")})).exit;
        assert_eq!(
            (exit["exit_code"].as_i64(), &exit["signal"]),
            (Some(code), &Value::Null)
        );
        assert_eq!(exit["reason"], "exited");
    }
    for signal in [1, 2, 6, 9, 10, 11, 13, 14, 15, 31, 40] {
        let exit = server
            .exec(&json!({"cmd": format!("kill -{signal} $$; sleep 5")}))
            .exit;
        assert_eq!(
            (&exit["exit_code"], exit["signal"].as_i64()),
            (&Value::Null, Some(signal))
        );
        assert_eq!(exit["reason"], "signaled");
        assert_eq!(exit["timed_out"], false);
    }
    assert_eq!(
        server.exec(&json!({"cmd": "no-such-program-here"})).code(),
        Some(127)
    );
    let directory = TempDir::new();
    let plain = write_file(&directory, "plain", "");
    assert_eq!(server.exec(&json!({"cmd": plain})).code(), Some(126));
}

#[test]
fn the_reason_says_who_ended_it() {
    let server = Server::start();
    let mark = Mark::new();
    let start = |extra: Value| {
        let mut body = json!({"cmd": format!("echo ready; exec sleep {mark}")});
        body.as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        let mut stream = server.exec_stream(&body);
        let id = stream.next().unwrap()["id"].as_str().unwrap().to_owned();
        read_until(&mut stream, "ready\n");
        (stream, id)
    };
    let ended = |mut stream: EventStream, signal: i64, reason: &str| {
        let exit = stream.next_output().unwrap();
        assert_eq!(exit["event"], "exit");
        assert_eq!(exit["reason"], reason);
        assert_eq!(exit["exit_code"], Value::Null);
        assert_eq!(exit["signal"], signal, "{reason}");
        assert_eq!(exit["timed_out"], reason == "timeout");
        assert!(stream.next().is_none(), "exit is last");
    };

    let (stream, id) = start(json!({}));
    assert_eq!(
        server
            .post(
                &format!("/v1/processes/{id}/kill"),
                &json!({"signal": "TERM"})
            )
            .status,
        200
    );
    ended(stream, 15, "killed");
    assert_eq!(entry(&server, &json!(id))["reason"], "killed");

    let (stream, id) = start(json!({}));
    assert_eq!(
        server.delete(&format!("/v1/processes/{id}")).json()["killed"],
        true
    );
    ended(stream, 9, "deleted");

    let (stream, id) = start(json!({"timeout": 0.6}));
    ended(stream, 9, "timeout");
    assert_eq!(entry(&server, &json!(id))["reason"], "timeout");

    let (stream, id) = start(json!({}));
    kill(Pid::from_raw(mark.pids()[0]), Signal::SIGTERM).unwrap();
    ended(stream, 15, "signaled");
    assert_eq!(entry(&server, &json!(id))["reason"], "signaled");

    let (stream, id) = start(json!({}));
    drop(stream);
    wait_until("the record says disconnected", PATIENCE, || {
        entry(&server, &json!(id))["reason"] == "disconnected"
    });
    let record = entry(&server, &json!(id));
    assert_eq!(
        (&record["running"], &record["signal"], &record["exit_code"]),
        (&json!(false), &json!(9), &Value::Null)
    );
}

/// A memory cgroup with a limit, removed with the value.
struct MemoryGroup(std::path::PathBuf);

impl MemoryGroup {
    fn new(limit: u64) -> Option<Self> {
        let name = format!("sbx-test-{}", std::process::id());
        let candidates = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ];
        for (root, file) in candidates {
            let path = std::path::Path::new(root).join(&name);
            if std::fs::create_dir(&path).is_err() {
                continue;
            }
            let group = Self(path);
            // In a file system that is none of the kernel's groups, a file could be made as well.
            if group.0.join(file).exists()
                && std::fs::write(group.0.join(file), limit.to_string()).is_ok()
            {
                return Some(group);
            }
        }
        None
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        for _ in 0..1000 {
            // Removing a group works as soon as the last process in it has been reaped.
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn the_kernel_kills_the_hog_and_not_the_server_and_the_reason_says_oom() {
    let Some(group) = MemoryGroup::new(96 << 20) else {
        skip!("no memory cgroup can be made here");
    };
    let enter = format!(
        "echo $$ > {}/cgroup.procs && exec \"$0\"",
        group.0.display()
    );
    let server = Server::builder().wrapped_in(&["sh", "-c", &enter]).start();
    // tail keeps what has no line end until it has seen the end, which never comes.
    let outcome = server.exec(&json!({"cmd": ["tail", "/dev/zero"], "timeout": 60}));
    assert_eq!(outcome.exit["signal"], 9);
    assert_eq!(outcome.exit["reason"], "oom");
    assert_eq!(
        server.exec(&json!({"cmd": "echo fine"})).stdout,
        "fine\n",
        "the server lives"
    );
    // A death by SIGKILL is not always the kernel's doing.
    assert_eq!(
        server.exec(&json!({"cmd": "kill -9 $$"})).exit["reason"],
        "signaled"
    );
    drop(server);
}

// ----------------------------------------------------------------------------------------- stdin

#[test]
fn fifteen_mebibytes_of_stdin_come_back_through_cat() {
    let server = Server::start();
    let text = numbered_text(15 << 20);
    let events: Vec<Value> = server
        .exec_stream(&json!({"cmd": ["cat"], "stdin": text}))
        .collect();
    assert_same(&output_of(&events, "stdout", 0).data, text.as_bytes());
    assert_eq!(Outcome::of(events).code(), Some(0));
}

#[test]
fn stdin_is_fed_while_output_is_read() {
    let directory = TempDir::new();
    let server = Server::start();
    let text = numbered_text(4 << 20);
    let file = write_file(&directory, "text", &text);
    // It fills its output before it takes any input: whoever feeds first and reads then hangs.
    let outcome =
        server.exec(&json!({"cmd": format!("cat {file}; cat; cat {file} >&2"), "stdin": text}));
    assert_same(outcome.stdout.as_bytes(), text.repeat(2).as_bytes());
    assert_same(outcome.stderr.as_bytes(), text.as_bytes());
}

#[test]
fn stdin_that_is_not_read_does_not_hold_the_call() {
    let server = Server::start();
    let text = numbered_text(8 << 20);
    for cmd in [
        "true",
        "exec <&-; sleep 0.2",
        "head -c 10 >/dev/null",
        "sleep 0.2",
    ] {
        let outcome = server.exec(&json!({"cmd": cmd, "stdin": text}));
        assert_eq!(outcome.code(), Some(0), "{cmd}");
        let duration = outcome.exit["duration_ms"].as_u64().unwrap();
        assert!(duration < 5_000, "{cmd}: {duration} ms");
    }
    // Nor when it is left to a grandchild.
    let mark = Mark::new();
    let outcome =
        server.exec(&json!({"cmd": format!("sleep {mark} <&0 & echo done"), "stdin": text}));
    assert_eq!(outcome.stdout, "done\n");
}

#[test]
fn stdin_is_empty_unless_it_is_given() {
    let server = Server::start();
    for body in [
        json!({"cmd": "cat; read x; echo $?"}),
        json!({"cmd": "cat; read x; echo $?", "stdin": null}),
        json!({"cmd": "cat; read x; echo $?", "stdin": ""}),
    ] {
        assert_eq!(server.exec(&body).stdout, "1\n", "{body}");
    }
    assert_eq!(
        server
            .exec(&json!({"cmd": ["cat"], "stdin": "a\u{0}é\u{2028}\n"}))
            .stdout,
        "a\u{0}é\u{2028}\n"
    );
}

// --------------------------------------------------------------------------- what is run, and how

#[test]
fn a_string_is_for_the_shell_and_an_array_is_not() {
    let server = Server::start();
    let run = |body: Value| server.exec(&body).stdout;
    assert_eq!(run(json!({"cmd": "echo $((1+1)) | tr 2 3"})), "3\n");
    assert_eq!(run(json!({"cmd": "echo shell", "shell": true})), "shell\n");
    assert_eq!(run(json!({"cmd": "echo shell", "shell": null})), "shell\n");
    assert_eq!(
        run(json!({"cmd": ["echo", "$HOME", "a  b", "*", ";", "", "é'\"\\"]})),
        "$HOME a  b * ;  é'\"\\\n"
    );
    assert_eq!(
        run(json!({"cmd": ["printf", "[%s]", "", "x y"], "shell": false})),
        "[][x y]"
    );
    assert_eq!(
        run(json!({"cmd": "printf '%s' 'line\nbreak é \u{2028}'"})),
        "line\nbreak é \u{2028}"
    );
}

#[test]
fn a_command_may_have_many_arguments() {
    let server = Server::start();
    let words: Vec<String> = (0..20_000).map(|index| index.to_string()).collect();
    let cmd = [
        &[
            "sh".to_owned(),
            "-c".to_owned(),
            "echo $#".to_owned(),
            "sh".to_owned(),
        ],
        &words[..],
    ]
    .concat();
    assert_eq!(server.exec(&json!({"cmd": cmd})).stdout, "20000\n");
}

#[test]
fn a_server_without_standard_streams_gives_its_commands_theirs() {
    // Pipes and sockets of the server then lie where a child expects its own streams.
    let server = Server::builder()
        .wrapped_in(&["sh", "-c", "exec \"$0\" <&- >&-"])
        .start();
    for _ in 0..3 {
        let outcome = server.exec(&json!({"cmd": "cat; echo out; echo err >&2", "stdin": "in\n"}));
        assert_eq!(
            (outcome.stdout.as_str(), outcome.stderr.as_str()),
            ("in\nout\n", "err\n")
        );
        assert_eq!(
            server.exec(&json!({"cmd": "cat; echo out"})).stdout,
            "out\n"
        );
    }
}

#[test]
fn a_working_directory_that_has_gone_is_a_bad_cwd() {
    let directory = TempDir::new();
    let inside = directory.join("inside");
    std::fs::create_dir(&inside).unwrap();
    let enter = format!("cd {inside} && exec \"$0\"");
    let server = Server::builder().wrapped_in(&["sh", "-c", &enter]).start();
    assert_eq!(
        server.exec(&json!({"cmd": ["pwd"]})).stdout,
        format!("{inside}\n")
    );
    std::fs::remove_dir(&inside).unwrap();
    let reply = server.post("/v1/exec", &json!({"cmd": "pwd"}));
    assert_eq!(
        (reply.status, reply.code().as_str()),
        (400, "bad_cwd"),
        "{}",
        reply.text()
    );
    assert_eq!(
        server.exec(&json!({"cmd": ["pwd"], "cwd": "/"})).stdout,
        "/\n"
    );
}

#[test]
fn programs_are_searched_in_the_childs_own_path() {
    let server = Server::start();
    let (one, two) = (TempDir::new(), TempDir::new());
    write_program(&one, "sbx-tool", "#!/bin/sh\necho one $1\n");
    write_program(&two, "sbx-tool", "#!/bin/sh\necho two $1\n");
    let path = |directories: &[&TempDir]| {
        directories
            .iter()
            .map(|directory| directory.path().to_str().unwrap())
            .collect::<Vec<_>>()
            .join(":")
    };
    let run = |path: &str| {
        server
            .exec(&json!({"cmd": ["sbx-tool", "x"], "env": {"PATH": path}}))
            .stdout
    };
    assert_eq!(run(&path(&[&one, &two])), "one x\n");
    assert_eq!(run(&path(&[&two, &one])), "two x\n");
    assert_eq!(
        run(&format!("/nonexistent:/etc/hostname:{}", path(&[&two]))),
        "two x\n"
    );
    // One that may not be run does not hide the next one.
    std::fs::set_permissions(one.join("sbx-tool"), std::fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(run(&path(&[&one, &two])), "two x\n");
    // The server's own PATH does not count.
    let reply = server.post(
        "/v1/exec",
        &json!({"cmd": ["ls"], "env": {"PATH": path(&[&two])}}),
    );
    assert_eq!((reply.status, reply.code().as_str()), (400, "not_found"));
    // With a slash it is a path, from the command's directory.
    let outcome = server.exec(&json!({"cmd": ["./sbx-tool", "y"], "cwd": two.path()}));
    assert_eq!(outcome.stdout, "two y\n");
}

#[test]
fn cwd_is_from_the_servers_working_directory() {
    let server = Server::start();
    let here = std::env::current_dir().unwrap();
    let pwd = |cwd: Value| {
        server
            .exec(&json!({"cmd": ["pwd", "-P"], "cwd": cwd}))
            .stdout
            .trim_end()
            .to_owned()
    };
    let path = |path: &std::path::Path| path.canonicalize().unwrap().to_str().unwrap().to_owned();
    assert_eq!(pwd(Value::Null), path(&here));
    assert_eq!(pwd(json!("tests")), path(&here.join("tests")));
    assert_eq!(pwd(json!("tests/..")), path(&here));
    assert_eq!(pwd(json!("/")), "/");
    let directory = TempDir::new();
    std::fs::create_dir(directory.path().join("a é b")).unwrap();
    std::os::unix::fs::symlink("a é b", directory.path().join("link")).unwrap();
    assert_eq!(
        pwd(json!(directory.join("link"))),
        path(&directory.path().join("a é b"))
    );
}

/// The environment of a command, as the command itself sees it.
fn environment(server: &Server, body: Value) -> BTreeMap<String, String> {
    let mut body = body;
    body["cmd"] = json!(["env", "-0"]);
    let text = server.exec(&body).stdout;
    text.split_terminator('\0')
        .map(|pair| pair.split_once('=').unwrap())
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

#[test]
fn env_takes_numbers_and_booleans_as_text_and_null_as_removal() {
    let server = Server::builder()
        .env("INHERITED", "yes")
        .env("REMOVED", "no")
        .start();
    let seen = environment(
        &server,
        json!({"env": {
            "A": 1, "B": null, "C": true, "D": false, "E": "", "F": 1.5, "G": -7, "H": 12_345_678_901_234_567_890_u64,
            "REMOVED": null, "TEXT": "é \u{2028} = \n $HOME", "with.dot": "d", "HOME": "/elsewhere",
        }}),
    );
    let expected = [
        ("A", "1"),
        ("C", "true"),
        ("D", "false"),
        ("E", ""),
        ("F", "1.5"),
        ("G", "-7"),
        ("H", "12345678901234567890"),
        ("TEXT", "é \u{2028} = \n $HOME"),
        ("with.dot", "d"),
        ("HOME", "/elsewhere"),
        ("INHERITED", "yes"),
    ];
    for (name, value) in expected {
        assert_eq!(seen.get(name).map(String::as_str), Some(value), "{name}");
    }
    assert_eq!(seen.get("B"), None);
    assert_eq!(seen.get("REMOVED"), None);
    // It was for that command alone.
    let seen = environment(&server, json!({}));
    assert_eq!(seen.get("REMOVED").map(String::as_str), Some("no"));
    assert_eq!(seen.get("A"), None);
}

#[test]
fn the_servers_own_variables_reach_no_command() {
    let server = Server::builder()
        .env("SBX_PING_SECS", 15)
        .env("SBX_MAX_HOSTS", 3)
        .env("SBX_UNHEARD_OF", "x")
        .start();
    let seen = environment(&server, json!({}));
    let own: Vec<&String> = seen
        .keys()
        .filter(|name| name.starts_with("SBX_"))
        .collect();
    assert!(own.is_empty(), "{own:?}");
    assert!(
        !seen
            .values()
            .any(|value| value.contains(crate::fixture::TOKEN))
    );
    assert!(seen.contains_key("PATH"));
}

#[test]
fn a_command_that_ran_is_in_the_registry_as_it_was_sent() {
    let server = Server::start();
    let mut gate = Gate::new();
    let script = format!("  : < {} # é", gate.path());
    let mut stream = server.exec_stream(&json!({"cmd": script, "tag": "my tag"}));
    let start = stream.next().unwrap();
    let list = server.get("/v1/processes").json();
    assert_eq!(list.as_array().unwrap().len(), 1);
    let record = &list[0];
    assert_eq!(
        (&record["id"], &record["pid"]),
        (&start["id"], &start["pid"])
    );
    assert_eq!(record["cmd"], json!(script));
    assert_eq!(record["tag"], "my tag");
    assert_eq!(
        (&record["running"], &record["background"]),
        (&json!(true), &json!(false))
    );
    gate.open();
    Outcome::of(std::iter::once(start.clone()).chain(stream).collect());
    let record = entry(&server, &start["id"]);
    assert_eq!(
        (&record["running"], &record["exit_code"], &record["reason"]),
        (&json!(false), &json!(0), &json!("exited"))
    );
    let list = server.exec(&json!({"cmd": ["true", "x y"]}));
    assert_eq!(
        entry(&server, &list.start["id"])["cmd"],
        json!(["true", "x y"])
    );
}

// ------------------------------------------------------------------------------------ refusals

/// Asserts a 400 whose text names the field, and that the connection goes on.
#[track_caller]
fn refused(connection: &mut Connection, body: &str, field: &str) {
    let reply = connection.request("POST", "/v1/exec", &[], body.as_bytes());
    assert_eq!(reply.status, 400, "{body:.200}: {}", reply.text());
    let error = reply.json();
    assert!(
        error["error"].as_str().unwrap().contains(field),
        "{body:.200}: {error} does not name {field}"
    );
    assert!(error["code"].is_string(), "{error}");
    let reply = connection.request("POST", "/v1/processes", &[], body.as_bytes());
    assert_eq!(
        reply.status,
        400,
        "as a process: {body:.200}: {}",
        reply.text()
    );
}

#[test]
fn every_wrong_type_is_a_400_that_names_the_field() {
    let server = Server::start();
    let mut connection = server.connect();
    for cmd in [
        "null",
        "\"\"",
        "[]",
        "[1]",
        "[\"echo\", null]",
        "[[\"a\"]]",
        "{\"a\": 1}",
        "1",
        "true",
        "\"a\\u0000b\"",
        "[\"echo\", \"a\\u0000b\"]",
    ] {
        refused(&mut connection, &format!("{{\"cmd\": {cmd}}}"), "cmd");
    }
    refused(&mut connection, "{}", "cmd");
    refused(&mut connection, "{\"Cmd\": \"true\"}", "cmd");
    for (field, values) in [
        ("shell", &["\"yes\"", "1", "[]", "{}"][..]),
        (
            "env",
            &[
                "\"A=1\"",
                "1",
                "true",
                "[]",
                "[\"A=1\"]",
                "{\"A\": []}",
                "{\"A\": {}}",
                "{\"A\": \"x\\u0000\"}",
                "{\"\": \"x\"}",
                "{\"A=B\": \"x\"}",
                "{\"A\\u0000\": \"x\"}",
            ],
        ),
        (
            "cwd",
            &["1", "true", "[]", "{}", "[\"/\"]", "\"/tmp\\u0000\""],
        ),
        (
            "timeout",
            &["\"5\"", "true", "[]", "{}", "0", "0.0", "-1", "-0.5"],
        ),
        ("stdin", &["1", "true", "[]", "{}", "[\"a\"]"]),
        ("background", &["\"yes\"", "1", "0", "[]", "{}"]),
        ("tag", &["1", "true", "[]", "{}"]),
        ("encoding", &["\"latin1\"", "\"\"", "1", "true", "[]", "{}"]),
        (
            "on_disconnect",
            &["\"ignore\"", "\"\"", "1", "true", "[]", "{}"],
        ),
    ] {
        for value in values {
            refused(
                &mut connection,
                &format!("{{\"cmd\": \"true\", \"{field}\": {value}}}"),
                field,
            );
        }
    }
    let long = format!("\"{}\"", "x".repeat(65));
    for id in [
        "1",
        "true",
        "[]",
        "{}",
        "\"\"",
        "\"a b\"",
        "\"a/b\"",
        "\"é\"",
        "\"a\\u0000\"",
        "\"123\"",
        "\"p-1\"",
        "\"p-99999999999999999999\"",
        &long,
    ] {
        refused(
            &mut connection,
            &format!("{{\"cmd\": \"true\", \"id\": {id}}}"),
            "id",
        );
    }
    assert_eq!(
        server.get("/v1/processes").json(),
        json!([]),
        "nothing was started"
    );
}

#[test]
fn shell_must_agree_with_the_kind_of_command() {
    let server = Server::start();
    let mut connection = server.connect();
    refused(
        &mut connection,
        "{\"cmd\": \"true\", \"shell\": false}",
        "shell",
    );
    refused(
        &mut connection,
        "{\"cmd\": [\"true\"], \"shell\": true}",
        "shell",
    );
}

#[test]
fn bodies_that_are_not_an_object_are_refused() {
    let server = Server::start();
    let mut connection = server.connect();
    let deep = "[".repeat(100_000);
    let deep_field = format!(
        "{{\"cmd\": \"true\", \"env\": {}",
        "{\"a\":".repeat(100_000)
    );
    // What is not looked at need not be refused, but must not be a crash either.
    let deep_unknown = format!(
        "{{\"cmd\": \"true\", \"x\": {}{}}}",
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    for body in [
        "",
        " ",
        "null",
        "true",
        "1",
        "\"true\"",
        "[]",
        "[\"cmd\"]",
        "{",
        "{\"cmd\": \"true\"",
        "{\"cmd\": \"true\"} x",
        "{\"cmd\": \"true\"}{\"cmd\": \"true\"}",
        "{'cmd': 'true'}",
        "{\"cmd\": \"\\ud800\"}",
        "{\"cmd\": \"true\",}",
        "{\"cmd\": \"true\", \"timeout\": NaN}",
        "{\"cmd\": \"true\", \"timeout\": Infinity}",
        "cmd=true",
        &deep,
        &deep_field,
    ] {
        let reply = connection.request("POST", "/v1/exec", &[], body.as_bytes());
        assert_eq!(reply.status, 400, "{body:.80}: {}", reply.text());
        assert!(reply.json()["error"].is_string());
    }
    let reply = connection.request("POST", "/v1/exec", &[], b"{\"cmd\": \"echo \xff\"}");
    assert_eq!(reply.status, 400, "not UTF-8: {}", reply.text());
    assert_eq!(
        server.get("/v1/processes").json(),
        json!([]),
        "nothing was started"
    );
    let reply = connection.request("POST", "/v1/exec", &[], deep_unknown.as_bytes());
    assert!(matches!(reply.status, 200 | 400), "{}", reply.text());
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
}

#[test]
fn numbers_beyond_any_clock_are_no_crash() {
    let server = Server::start();
    for timeout in [
        "1e300",
        "1e999",
        "1e-300",
        "99999999999999999999999999",
        "9223372036854775808",
    ] {
        let body = format!("{{\"cmd\": \"echo ok\", \"timeout\": {timeout}}}");
        let reply = server.request("POST", "/v1/exec", body.as_bytes());
        // Far away is as good as never; what cannot be represented may be refused instead.
        assert!(
            matches!(reply.status, 200 | 400),
            "{timeout}: {} {}",
            reply.status,
            reply.text()
        );
        if reply.status == 200 && timeout != "1e-300" {
            assert_eq!(
                Outcome::of(events_of(&reply.body)).stdout,
                "ok\n",
                "{timeout}"
            );
        }
    }
}

#[test]
fn unknown_fields_are_ignored_and_null_is_absent() {
    let server = Server::start();
    let outcome =
        server.exec(&json!({"cmd": "echo hi", "frobnicate": [1, {"a": null}], "": 1, "Env": 3}));
    assert_eq!(outcome.stdout, "hi\n");
    let outcome = server.exec(&json!({
        "cmd": "echo hi", "shell": null, "env": null, "cwd": null, "timeout": null, "stdin": null, "background": null,
        "tag": null, "encoding": null, "on_disconnect": null, "id": null,
    }));
    assert_eq!(outcome.stdout, "hi\n");
}

/// Asserts that a command does not start, on both routes, with this code and no trace.
#[track_caller]
fn cannot_start(server: &Server, body: &Value, codes: &[&str]) {
    for route in ["/v1/exec", "/v1/processes"] {
        let reply = server.post(route, body);
        assert_eq!(reply.status, 400, "{body}: {}", reply.text());
        assert!(
            codes.contains(&reply.code().as_str()),
            "{body}: {} is none of {codes:?}",
            reply.text()
        );
    }
}

#[test]
fn a_command_that_cannot_start_is_a_400_with_a_code() {
    let server = Server::start();
    let directory = TempDir::new();
    let plain = write_file(&directory, "plain", "echo hi\n");
    let not_a_program = write_program(&directory, "garbage", "\u{1}\u{2}\u{3}");
    let lost_interpreter = write_program(&directory, "lost", "#!/nonexistent/interpreter\n");
    std::os::unix::fs::symlink("/nonexistent", directory.path().join("dangling")).unwrap();
    std::os::unix::fs::symlink("loop", directory.path().join("loop")).unwrap();

    cannot_start(
        &server,
        &json!({"cmd": ["no-such-program-here"]}),
        &["not_found"],
    );
    cannot_start(
        &server,
        &json!({"cmd": ["/nonexistent/program"]}),
        &["not_found"],
    );
    cannot_start(
        &server,
        &json!({"cmd": ["", "x"]}),
        &["not_found", "bad_request"],
    );
    cannot_start(
        &server,
        &json!({"cmd": [directory.join("dangling")]}),
        &["not_found"],
    );
    cannot_start(&server, &json!({"cmd": [lost_interpreter]}), &["not_found"]);
    cannot_start(
        &server,
        &json!({"cmd": [format!("{plain}/below")]}),
        &["not_found"],
    );
    cannot_start(&server, &json!({"cmd": [plain]}), &["not_executable"]);
    cannot_start(
        &server,
        &json!({"cmd": [not_a_program]}),
        &["not_executable"],
    );
    cannot_start(
        &server,
        &json!({"cmd": [directory.path()]}),
        &["not_executable"],
    );
    cannot_start(
        &server,
        &json!({"cmd": ["plain"], "env": {"PATH": directory.path()}}),
        &["not_executable"],
    );
    for cwd in [
        "/nonexistent".to_owned(),
        plain.clone(),
        directory.join("loop"),
        directory.join("dangling"),
        format!("{plain}/x"),
    ] {
        cannot_start(&server, &json!({"cmd": "true", "cwd": cwd}), &["bad_cwd"]);
    }
    // More than the kernel takes as arguments is an answer too.
    cannot_start(
        &server,
        &json!({"cmd": ["true", "x".repeat(300_000)]}),
        &TOO_LONG,
    );
    cannot_start(&server, &json!({"cmd": ["x".repeat(300_000)]}), &TOO_LONG);
    cannot_start(
        &server,
        &json!({"cmd": "true", "cwd": "x/".repeat(5000)}),
        &TOO_LONG,
    );

    assert_eq!(
        server.get("/v1/processes").json(),
        json!([]),
        "none of them is in the registry"
    );
    assert_eq!(
        descendants_of(server_pid(&server))
            .iter()
            .filter(|process| process.state == 'Z')
            .count(),
        0
    );

    // The text says what was tried, so that a user can act.
    let reply = server.post("/v1/exec", &json!({"cmd": ["no-such-program-here"]}));
    assert!(
        reply.text().contains("no-such-program-here"),
        "{}",
        reply.text()
    );
    let reply = server.post("/v1/exec", &json!({"cmd": "true", "cwd": "/nonexistent"}));
    assert!(reply.text().contains("/nonexistent"), "{}", reply.text());
}

/// The words that run a program as a user that nobody else is, with limits of `prlimit`.
fn as_nobody_else(uid: &str, limit: &str) -> Vec<String> {
    let words = [
        "prlimit",
        limit,
        "setpriv",
        "--reuid",
        uid,
        "--regid",
        uid,
        "--clear-groups",
    ];
    words.map(str::to_owned).to_vec()
}

fn can_run_as(words: &[String]) -> bool {
    std::process::Command::new(&words[0])
        .args(&words[1..])
        .args([crate::fixture::BINARY, "--version"])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

#[test]
fn what_may_not_be_reached_is_refused_with_a_code() {
    let words = as_nobody_else("54320", "--core=0");
    if !can_run_as(&words) {
        skip!("cannot run the server as another user");
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let server = Server::builder().wrapped_in(&words).start();
    let directory = TempDir::new();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let program = write_program(&directory, "tool", "#!/bin/sh\n");
    cannot_start(
        &server,
        &json!({"cmd": [program]}),
        &["permission", "not_executable"],
    );
    cannot_start(
        &server,
        &json!({"cmd": "true", "cwd": directory.path()}),
        &["permission", "bad_cwd"],
    );
    assert_eq!(
        server
            .exec(&json!({"cmd": ["id", "-u"], "cwd": "/"}))
            .stdout,
        "54320\n"
    );
}

/// Starts sleepers until one is refused, checks the refusal, and that all is well again after.
fn exhaust(server: &Server, mark: &Mark, accepted: &[(u16, &str)]) {
    let mut ids = Vec::new();
    let refusal = loop {
        assert!(ids.len() < 300, "the limit was never met");
        let reply = server.post(
            "/v1/processes",
            &json!({"cmd": ["sleep", mark.to_string()]}),
        );
        if reply.status != 200 {
            break reply;
        }
        ids.push(reply.json()["id"].as_str().unwrap().to_owned());
    };
    assert!(ids.len() > 3, "only {} could run", ids.len());
    let seen = (refusal.status, refusal.code());
    assert!(
        accepted
            .iter()
            .any(|(status, code)| seen == (*status, (*code).to_owned())),
        "{seen:?}: {}",
        refusal.text()
    );
    for id in ids {
        wait_until("a process can be deleted", PATIENCE, || {
            server.delete(&format!("/v1/processes/{id}")).status == 200
        });
    }
    mark.wait_gone(PATIENCE);
    wait_until("commands run again", PATIENCE, || {
        let reply = server.post("/v1/exec", &json!({"cmd": "echo again | cat"}));
        reply.status == 200 && text_of(&reply.body).0 == "again\n"
    });
}

#[test]
fn running_out_of_processes_is_a_clear_error_that_passes() {
    let words = as_nobody_else("54321", "--nproc=40");
    if !can_run_as(&words) {
        skip!("cannot run the server as another user");
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let server = Server::builder().wrapped_in(&words).start();
    let mark = Mark::new();
    exhaust(
        &server,
        &mark,
        &[(400, "no_resources"), (503, "no_threads")],
    );
}

#[test]
fn running_out_of_descriptors_is_a_clear_error_that_passes() {
    let server = Server::builder()
        .wrapped_in(&["prlimit", "--nofile=64:64"])
        .start();
    let mark = Mark::new();
    exhaust(
        &server,
        &mark,
        &[
            (400, "no_resources"),
            (500, "internal"),
            (503, "too_many_connections"),
        ],
    );
}

// ------------------------------------------------------------------------------------ timeouts

/// Trees of every shape, as shell scripts; MARK stands for the mark.
const TREES: &[(&str, &str)] = &[
    ("the main process alone", "exec sleep MARK"),
    ("children", "sleep MARK & sleep MARK & sleep MARK"),
    (
        "orphans of its group",
        "(sleep MARK &); (sleep MARK &); sleep MARK",
    ),
    (
        "a child with a session of its own",
        "setsid sleep MARK & sleep MARK",
    ),
    (
        "a whole tree with a session of its own",
        "setsid sh -c 'sleep MARK & (sleep MARK &) sleep MARK' & sleep MARK",
    ),
    ("sessions in sessions", "sh NEST 12 MARK & sleep MARK"),
    (
        "job control",
        "bash -c 'set -m; sleep MARK & (sleep MARK; :) & sleep MARK | cat & wait'",
    ),
    (
        "stopped processes",
        "sleep MARK & kill -STOP $!; kill -STOP $$; sleep MARK",
    ),
    (
        "a stopped child with a session of its own",
        "setsid sh -c 'sleep MARK & kill -STOP $$; wait' & sleep MARK",
    ),
    (
        "those that ignore signals",
        "trap '' TERM INT HUP QUIT; setsid sleep MARK & sleep MARK; sleep MARK",
    ),
    (
        "one that forks without end",
        "while :; do sleep MARK & sleep 0.02; done",
    ),
    (
        "a session that begins sessions without end",
        "setsid sh -c 'while :; do setsid sleep MARK & sleep 0.005; done' & sleep MARK",
    ),
    (
        "sessions without end",
        "while :; do setsid sleep MARK & sleep 0.02; done",
    ),
    (
        "a chain, each link of which ends",
        "f() { : MARK; sleep 0.02; f & }; f & sleep MARK",
    ),
    (
        "such a chain as a job",
        "bash -c 'f() { : MARK; sleep 0.02; f & }; set -m; f & wait; sleep MARK'",
    ),
    (
        "one that closed its output",
        "exec >&- 2>&- <&-; sleep MARK & sleep MARK",
    ),
    (
        "a main process that waits for a stuck reader",
        "yes MARK | sleep MARK",
    ),
];

/// A script that starts itself in a new session, and so on, `$1` times.
const NEST: &str = "[ \"$1\" -gt 0 ] && setsid sh \"$0\" $(($1-1)) \"$2\" & sleep $2\n";

#[test]
fn a_timeout_leaves_no_process_of_the_tree() {
    let directory = TempDir::new();
    let nest = write_file(&directory, "nest", NEST);
    let server = Server::start();
    thread::scope(|scope| {
        for (name, script) in TREES {
            let (server, nest) = (&server, &nest);
            scope.spawn(move || {
                let mark = Mark::new();
                let script = script
                    .replace("MARK", &mark.to_string())
                    .replace("NEST", nest);
                let events = server
                    .exec_stream(&json!({"cmd": format!("echo ready; {script}"), "timeout": 1.5}));
                let outcome = Outcome::of(events.collect());
                assert_eq!(
                    outcome.stdout, "ready\n",
                    "{name}: what was printed is kept"
                );
                let exit = &outcome.exit;
                assert_eq!(exit["timed_out"], true, "{name}: {exit}");
                assert_eq!(exit["reason"], "timeout", "{name}: {exit}");
                assert_eq!(exit["exit_code"], Value::Null, "{name}: {exit}");
                assert_eq!(exit["signal"], 9, "{name}: {exit}");
                let duration = exit["duration_ms"].as_u64().unwrap();
                assert!((1500..4000).contains(&duration), "{name}: {duration} ms");
                let deadline = Instant::now() + Duration::from_secs(3);
                while !mark.pids().is_empty() {
                    let left = || {
                        let line = |pid: i32| {
                            std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()
                        };
                        mark.pids()
                            .into_iter()
                            .map(|pid| {
                                (
                                    stat_of(pid),
                                    String::from_utf8_lossy(&line(pid)).replace('\0', " "),
                                )
                            })
                            .collect::<Vec<_>>()
                    };
                    assert!(
                        Instant::now() < deadline,
                        "{name}: left over: {:#?}",
                        left()
                    );
                    thread::sleep(Duration::from_millis(10));
                }
            });
        }
    });
}

#[test]
fn a_timeout_comes_when_it_was_asked_for() {
    let server = Server::start();
    let mark = Mark::new();
    let mut late = Duration::MAX;
    for timeout in [0.05, 0.3, 1.0] {
        let begin = Instant::now();
        let exit = server
            .exec(&json!({"cmd": ["sleep", mark.to_string()], "timeout": timeout}))
            .exit;
        let taken = begin.elapsed();
        assert_eq!(exit["reason"], "timeout");
        assert!(
            taken >= Duration::from_secs_f64(timeout),
            "{taken:?} for {timeout}"
        );
        late = late.min(taken.saturating_sub(Duration::from_secs_f64(timeout)));
    }
    assert!(late < Duration::from_millis(500), "at best {late:?} late");
    // The smallest one is still a timeout, and a whole number is as good as a fraction.
    assert_eq!(
        server
            .exec(&json!({"cmd": ["sleep", mark.to_string()], "timeout": 1e-9}))
            .exit["timed_out"],
        true
    );
    assert_eq!(
        server
            .exec(&json!({"cmd": ["sleep", mark.to_string()], "timeout": 1}))
            .exit["timed_out"],
        true
    );
}

#[test]
fn a_command_that_ends_in_time_has_not_timed_out_and_nothing_is_killed_later() {
    let server = Server::start();
    let mark = Mark::new();
    let outcome = server.exec(&json!({"cmd": format!("sleep {mark} & exit 4"), "timeout": 0.8}));
    assert_eq!(
        (outcome.code(), &outcome.exit["timed_out"]),
        (Some(4), &json!(false))
    );
    // Beyond the deadline, which must have died with the command.
    thread::sleep(Duration::from_millis(1200));
    assert_eq!(
        mark.pids().len(),
        1,
        "what the command left behind is no business of its timeout"
    );
    assert_eq!(entry(&server, &outcome.start["id"])["reason"], "exited");
}

#[test]
fn many_timeouts_at_once_all_come() {
    let server = Server::start();
    let mark = Mark::new();
    let mut streams: Vec<(usize, EventStream)> = (0..60)
        .map(|index| {
            // In an order that is not the order of their ends.
            let timeout = 0.5 + f64::from((index * 37) % 60) / 60.0;
            let body = json!({"cmd": ["sleep", mark.to_string()], "timeout": timeout});
            (usize::try_from(index).unwrap(), server.exec_stream(&body))
        })
        .collect();
    for (index, stream) in &mut streams {
        let exit = Outcome::of(stream.collect()).exit;
        assert_eq!(exit["reason"], "timeout", "{index}");
    }
    mark.wait_gone(Duration::from_secs(2));
}

// --------------------------------------------------------------------------- clients that go away

fn half_close(stream: &EventStream) {
    stream.connection.stream.shutdown(Shutdown::Write).unwrap();
}

/// What a client does when it goes.
type Vanish<'a> = &'a dyn Fn(EventStream, &Mark);

/// How long after `vanish` the marked processes are gone, at best; they must be gone each time.
fn noticed_after(server: &Server, script: &str, vanish: impl Fn(EventStream, &Mark)) -> Duration {
    best_of(3, || {
        let mark = Mark::new();
        let script = script.replace("MARK", &mark.to_string());
        let mut stream = server.exec_stream(&json!({"cmd": script}));
        read_until(&mut stream, "ready\n");
        // The last program in the line has been started, too.
        wait_until("the command is under way", PATIENCE, || {
            mark.pids().iter().any(|pid| {
                std::fs::read_link(format!("/proc/{pid}/exe"))
                    .is_ok_and(|exe| !exe.ends_with("dash"))
            })
        });
        vanish(stream, &mark);
        let begin = Instant::now();
        mark.wait_gone(PATIENCE);
        begin.elapsed()
    })
}

#[test]
fn a_vanished_client_is_noticed_within_a_second() {
    let server = Server::start();
    let silent = "echo ready; setsid sleep MARK & sleep MARK";
    let flood = "echo ready; exec yes MARK";
    let blocked = |mark: &Mark| {
        let pid = mark.pids()[0];
        wait_until_blocked(pid);
    };
    let cases: [(&str, &str, Vanish<'_>); 6] = [
        ("closed", silent, &|stream, _| drop(stream)),
        ("reset", silent, &|stream, _| reset(stream.connection)),
        ("closed with a full pipe", flood, &|stream, mark| {
            blocked(mark);
            drop(stream);
        }),
        ("reset with a full pipe", flood, &|stream, mark| {
            blocked(mark);
            reset(stream.connection);
        }),
        (
            "closed a while after its sending half",
            silent,
            &|stream, _| {
                half_close(&stream);
                thread::sleep(Duration::from_millis(1300));
                drop(stream);
            },
        ),
        (
            "the same, having read everything",
            silent,
            &|mut stream, _| {
                half_close(&stream);
                // What lies unread would make of the close a reset, which is easily seen.
                assert_eq!(stream.next().unwrap()["event"], "ping");
                drop(stream);
            },
        ),
    ];
    for (name, script, vanish) in cases {
        let best = noticed_after(&server, script, vanish);
        assert!(best < NOTICED, "{name}: noticed after {best:?} at best");
    }
}

#[test]
fn a_client_that_goes_while_output_flows_is_noticed() {
    let server = Server::start();
    let best = noticed_after(&server, "echo ready; yes MARK | cat", |mut stream, _| {
        for _ in 0..20 {
            stream.next_output().unwrap();
        }
        drop(stream);
    });
    assert!(best < NOTICED, "noticed after {best:?} at best");
}

#[test]
fn a_client_that_has_only_closed_its_sending_half_gets_its_result() {
    let server = Server::start();
    let stream = server.exec_stream(&json!({"cmd": "echo early; sleep 2.5; echo late; exit 5"}));
    half_close(&stream);
    let outcome = Outcome::of(stream.collect());
    assert_eq!(outcome.stdout, "early\nlate\n");
    assert_eq!(
        (outcome.code(), &outcome.exit["reason"]),
        (Some(5), &json!("exited"))
    );
}

#[test]
fn a_kept_command_goes_on_without_its_client_and_can_be_taken_up_again() {
    let server = Server::start();
    let directory = TempDir::new();
    let text = numbered_text(1 << 20);
    let file = write_file(&directory, "text", &text);
    for how in ["closed", "reset"] {
        let mut gate = Gate::new();
        let script = format!("cat {file}; : < {}; echo end; exit 6", gate.path());
        let mut stream = server.exec_stream(&json!({"cmd": script, "on_disconnect": "keep"}));
        let id = stream.next().unwrap()["id"].as_str().unwrap().to_owned();
        let mut events = Vec::new();
        while output_of(&events, "stdout", 0).end < 200_000 {
            events.push(stream.next_output().unwrap());
        }
        if how == "reset" {
            reset(stream.connection);
        } else {
            drop(stream);
        }
        let had = output_of(&events, "stdout", 0);
        // It is not held up by the reader it has lost.
        wait_until("the output is complete", PATIENCE, || {
            entry(&server, &json!(id))["stdout_bytes"] == text.len()
        });
        assert_eq!(entry(&server, &json!(id))["running"], true, "{how}");
        gate.open();
        let target = format!("/v1/processes/{id}/logs?follow=1&stdout_offset={}", had.end);
        let events: Vec<Value> = server.stream("GET", &target, b"").collect();
        let rest = output_of(&events, "stdout", had.end);
        assert_eq!(rest.dropped, 0);
        assert_same(
            &[had.data, rest.data].concat(),
            format!("{text}end\n").as_bytes(),
        );
        let exit = events.last().unwrap();
        assert_eq!(
            (&exit["event"], &exit["exit_code"], &exit["reason"]),
            (&json!("exit"), &json!(6), &json!("exited"))
        );
    }
}

#[test]
fn a_kept_command_still_gets_all_of_its_input_and_its_timeout() {
    let server = Server::start();
    let mut gate = Gate::new();
    let text = numbered_text(4 << 20);
    let script = format!(": < {}; wc -c; exec sleep 600", gate.path());
    let body = json!({"cmd": script, "stdin": text, "timeout": 3, "on_disconnect": "keep"});
    let mut stream = server.exec_stream(&body);
    let id = stream.next().unwrap()["id"].clone();
    drop(stream);
    wait_until("it is on its own", PATIENCE, || {
        entry(&server, &id)["background"] == true
    });
    gate.open();
    let target = format!("/v1/processes/{}/logs?follow=1", id.as_str().unwrap());
    let events: Vec<Value> = server.stream("GET", &target, b"").collect();
    assert_eq!(
        output_of(&events, "stdout", 0).data,
        format!("{}\n", text.len()).as_bytes()
    );
    assert_eq!(events.last().unwrap()["reason"], "timeout");
}

#[test]
fn a_kept_command_that_was_blocked_by_its_client_goes_on() {
    let server = Server::start();
    let mark = Mark::new();
    let mut stream =
        server.exec_stream(&json!({"cmd": ["yes", mark.to_string()], "on_disconnect": "keep"}));
    let id = stream.next().unwrap()["id"].as_str().unwrap().to_owned();
    let pid = stream_pid(&server, &id);
    let blocked_at = wait_until_blocked(pid);
    drop(stream);
    wait_until("it writes on", PATIENCE, || {
        written_by(pid) > blocked_at + (20 << 20)
    });
    assert_eq!(
        server.delete(&format!("/v1/processes/{id}")).json()["killed"],
        true
    );
    mark.wait_gone(PATIENCE);
}

fn stream_pid(server: &Server, id: &str) -> i32 {
    i32::try_from(entry(server, &json!(id))["pid"].as_i64().unwrap()).unwrap()
}

#[test]
fn a_connection_that_dies_right_after_exit_kills_nothing() {
    let server = Server::start();
    let mark = Mark::new();
    for round in 0..20 {
        let mut stream = server.exec_stream(&json!({"cmd": format!("sleep {mark} & echo done")}));
        let id = stream.next().unwrap()["id"].clone();
        // As real clients do it: reading stops at the exit event, whatever may follow.
        while stream.next_output().unwrap()["event"] != "exit" {}
        if round % 2 == 0 {
            reset(stream.connection);
        } else {
            drop(stream);
        }
        assert_eq!(entry(&server, &id)["reason"], "exited");
    }
    thread::sleep(Duration::from_millis(1300));
    assert_eq!(mark.pids().len(), 20);
}

// ------------------------------------------------------------------------------ bounded resources

#[test]
fn a_slow_reader_slows_its_command_and_not_the_memory() {
    let directory = TempDir::new();
    let text = numbered_text(48 << 20);
    let file = write_file(&directory, "text", &text);
    let server = Server::start();
    let before = memory_of(server_pid(&server), "VmHWM");
    let mut stream = server.exec_stream(&json!({"cmd": ["cat", file]}));
    let start = stream.next().unwrap();
    let pid = i32::try_from(start["pid"].as_i64().unwrap()).unwrap();
    let written = wait_until_blocked(pid);
    assert!(
        written < 40 << 20,
        "{written} bytes were taken from the pipe for a reader that does not read"
    );
    let outcome_is_late = server.exec(&json!({"cmd": "echo other"}));
    assert_eq!(outcome_is_late.stdout, "other\n", "others are not held up");
    let events: Vec<Value> = stream.collect();
    let output = output_of(&events, "stdout", 0);
    assert_eq!(output.dropped, 0);
    assert_same(&output.data, text.as_bytes());
    let grown = memory_of(server_pid(&server), "VmHWM") - before;
    assert!(grown < 16 << 20, "the server grew by {grown} bytes");
}

#[test]
fn waiting_costs_no_processor_time() {
    let server = Server::start();
    let mark = Mark::new();
    let sleeping = |script: &str| {
        let mut stream =
            server.exec_stream(&json!({"cmd": script.replace("MARK", &mark.to_string())}));
        read_until(&mut stream, "ready\n");
        stream
    };
    // Each of these leaves a descriptor that is ready for ever for whoever polls it carelessly.
    let closed_output = sleeping("echo ready; exec >&- 2>&-; sleep MARK");
    let closed_stderr = sleeping("echo ready; exec 2>&-; sleep MARK");
    let half_closed = sleeping("echo ready; sleep MARK");
    half_close(&half_closed);
    let mut sent_ahead = sleeping("echo ready; sleep MARK");
    sent_ahead
        .connection
        .send_request("GET", "/health", &[], b"");
    let mut stuck = server.exec_stream(&json!({"cmd": ["yes", mark.to_string()]}));
    wait_until_blocked(i32::try_from(stuck.next().unwrap()["pid"].as_i64().unwrap()).unwrap());
    let unread = server.exec_stream(
        &json!({"cmd": format!("exec sleep {mark}"), "stdin": numbered_text(1 << 20)}),
    );
    let closed_stdin = server.exec_stream(
        &json!({"cmd": format!("exec <&-; sleep {mark}"), "stdin": numbered_text(1 << 20)}),
    );
    server.exec(&json!({"cmd": format!("sleep {mark} & echo left behind")}));
    let writer_left =
        server.exec(&json!({"cmd": format!("(exec >&-; sleep {mark}) & echo half left behind")}));
    assert_eq!(writer_left.code(), Some(0));
    let background = server.spawn(&json!({"cmd": format!("exec >&-; sleep {mark}")}));
    let follower = server.stream(
        "GET",
        &format!(
            "/v1/processes/{}/logs?follow=1",
            background["id"].as_str().unwrap()
        ),
        b"",
    );

    let used = || stat_of(server_pid(&server)).unwrap().cpu;
    let before = used();
    thread::sleep(Duration::from_secs(2));
    let spent = used().saturating_sub(before);
    assert!(
        spent < Duration::from_millis(300),
        "{spent:?} of processor time in two idle seconds"
    );
    drop((
        closed_output,
        closed_stderr,
        half_closed,
        sent_ahead,
        stuck,
        unread,
        closed_stdin,
        follower,
    ));
}

#[test]
fn three_hundred_commands_run_at_once() {
    let server = Server::start();
    let mut gate = Gate::new();
    let mut streams: Vec<EventStream> = (0..300)
        .map(|index| {
            let script = format!(
                "echo ready; : < {}; echo {index} out; echo {index} err >&2; exit {}",
                gate.path(),
                index % 200
            );
            server.exec_stream(&json!({"cmd": script}))
        })
        .collect();
    let mut ids = BTreeSet::new();
    let mut pids = BTreeSet::new();
    for stream in &mut streams {
        let start = stream.next().unwrap();
        ids.insert(start["id"].as_str().unwrap().to_owned());
        pids.insert(start["pid"].as_i64().unwrap());
        read_until(stream, "ready\n");
    }
    assert_eq!((ids.len(), pids.len()), (300, 300));
    let list = server.get("/v1/processes").json();
    assert_eq!(
        list.as_array()
            .unwrap()
            .iter()
            .filter(|entry| entry["running"] == true)
            .count(),
        300
    );
    gate.open();
    for (index, stream) in streams.iter_mut().enumerate() {
        let events: Vec<Value> = stream.collect();
        let text = |name: &str| {
            events
                .iter()
                .filter(|event| event["event"] == name)
                .map(|event| event["data"].as_str().unwrap())
                .collect::<String>()
        };
        assert_eq!(
            (text("stdout"), text("stderr")),
            (format!("{index} out\n"), format!("{index} err\n"))
        );
        let exit = events.last().unwrap();
        assert_eq!(
            (&exit["event"], exit["exit_code"].as_u64()),
            (&json!("exit"), Some(index as u64 % 200))
        );
    }
}

// --------------------------------------------------------------------------- starting only once

#[test]
fn the_same_id_attaches_instead_of_running_twice() {
    let server = Server::start();
    let directory = TempDir::new();
    let runs = directory.join("runs");
    let body = json!({"cmd": format!("echo run >> {runs}; echo out; echo err >&2; exit 3"), "id": "job-1", "env": {"A": 1, "B": null}});
    let first = server.exec(&body);
    assert_eq!(first.start["id"], "job-1");
    assert_ne!(first.start["attached"], true);
    let second = server.exec(&body);
    assert_eq!(second.start["attached"], true);
    assert_eq!(
        (&second.start["id"], &second.start["pid"]),
        (&first.start["id"], &first.start["pid"])
    );
    assert_eq!(
        (second.stdout.as_str(), second.stderr.as_str()),
        ("out\n", "err\n")
    );
    assert_eq!(second.exit, first.exit);
    // What does not change the command may differ.
    let mut other = body.clone();
    other["tag"] = json!("again");
    other["encoding"] = json!("base64");
    let events: Vec<Value> = server.exec_stream(&other).collect();
    assert_eq!(output_of(&events, "stdout", 0).data, b"out\n");
    assert!(events.iter().any(|event| event["data_b64"].is_string()));
    assert_eq!(
        std::fs::read_to_string(&runs).unwrap(),
        "run\n",
        "it ran once"
    );
    // The id works wherever the server's own would.
    assert_eq!(server.get("/v1/processes/job-1").json()["exit_code"], 3);
    assert_eq!(
        server.get("/v1/processes/job-1/wait").json()["running"],
        false
    );
    assert_eq!(
        server.get("/v1/processes").json().as_array().unwrap().len(),
        1
    );
}

#[test]
fn an_attached_client_follows_a_running_command() {
    let server = Server::start();
    let mut gate = Gate::new();
    let body =
        json!({"cmd": format!("echo before; : < {}; echo after", gate.path()), "id": "slow.job_1"});
    let mut first = server.exec_stream(&body);
    let start = first.next().unwrap();
    read_until(&mut first, "before\n");
    let mut second = server.exec_stream(&body);
    assert_eq!(second.next().unwrap()["attached"], true);
    read_until(&mut second, "before\n");
    gate.open();
    for stream in [first, second] {
        let events: Vec<Value> = std::iter::once(start.clone()).chain(stream).collect();
        assert_eq!(Outcome::of(events).stdout, "after\n");
    }
}

#[test]
fn sixteen_concurrent_starts_with_one_id_run_once() {
    let server = Server::start();
    let directory = TempDir::new();
    for round in 0..10 {
        let runs = directory.join(&format!("runs-{round}"));
        let body = json!({"cmd": format!("echo run >> {runs}; sleep 0.1; echo out"), "id": format!("round-{round}")});
        let fresh = AtomicUsize::new(0);
        let pids: BTreeSet<i64> = thread::scope(|scope| {
            let workers: Vec<_> = (0..16)
                .map(|_| {
                    scope.spawn(|| {
                        let outcome = server.exec(&body);
                        assert_eq!(outcome.stdout, "out\n");
                        assert_eq!(outcome.code(), Some(0));
                        if outcome.start["attached"] != true {
                            fresh.fetch_add(1, Ordering::Relaxed);
                        }
                        outcome.start["pid"].as_i64().unwrap()
                    })
                })
                .collect();
            workers
                .into_iter()
                .map(|worker| worker.join().unwrap())
                .collect()
        });
        assert_eq!(
            std::fs::read_to_string(&runs).unwrap(),
            "run\n",
            "round {round}"
        );
        assert_eq!(pids.len(), 1, "round {round}");
        assert_eq!(
            fresh.load(Ordering::Relaxed),
            1,
            "round {round}: one start is the first"
        );
    }
    assert_eq!(
        server.get("/v1/processes").json().as_array().unwrap().len(),
        10
    );
}

#[test]
fn a_different_command_under_the_same_id_is_409() {
    let server = Server::start();
    let base = json!({"cmd": "cat", "id": "one", "env": {"A": "1"}, "cwd": "/", "stdin": "x"});
    server.exec(&base);
    let changed = |field: &str, value: Value| {
        let mut body = base.clone();
        body[field] = value;
        for route in ["/v1/exec", "/v1/processes"] {
            let reply = server.post(route, &body);
            assert_eq!(
                (reply.status, reply.code().as_str()),
                (409, "id_in_use"),
                "{body}"
            );
        }
    };
    changed("cmd", json!("cat "));
    changed("cmd", json!(["cat"]));
    changed("env", json!({"A": "2"}));
    changed("env", json!({}));
    changed("env", json!({"A": null}));
    changed("cwd", json!("/tmp"));
    changed("stdin", json!("y"));
    changed("stdin", Value::Null);
    assert_eq!(server.exec(&base).stdout, "x");
}

#[test]
fn an_id_whose_command_could_not_start_is_still_free() {
    let server = Server::start();
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                let reply = server.post(
                    "/v1/exec",
                    &json!({"cmd": ["no-such-program-here"], "id": "again"}),
                );
                assert_eq!((reply.status, reply.code().as_str()), (400, "not_found"));
            });
        }
    });
    assert_eq!(
        server
            .exec(&json!({"cmd": "echo now", "id": "again"}))
            .stdout,
        "now\n"
    );
}

#[test]
fn a_deleted_id_is_free_again() {
    let server = Server::start();
    let mark = Mark::new();
    let first = server.spawn(&json!({"cmd": ["sleep", mark.to_string()], "id": "server"}));
    assert_eq!(server.delete("/v1/processes/server").json()["killed"], true);
    let second = server.spawn(&json!({"cmd": ["sleep", mark.to_string(), "0"], "id": "server"}));
    assert_ne!(first["pid"], second["pid"]);
    assert_eq!(server.delete("/v1/processes/server").json()["killed"], true);
    mark.wait_gone(PATIENCE);
}

// ------------------------------------------------------------- what a child sees of the server

/// Fields of `/proc/self/status` of a command.
fn status_of_a_command(server: &Server) -> BTreeMap<String, String> {
    let text = server
        .exec(&json!({"cmd": ["cat", "/proc/self/status"]}))
        .stdout;
    text.lines()
        .filter_map(|line| line.split_once(":\t"))
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect()
}

#[test]
fn no_signal_is_blocked_or_ignored_in_a_child() {
    let clean = Server::start();
    let odd = [
        "env",
        "--block-signal=USR1,USR2,CHLD,ALRM",
        "--ignore-signal=INT,QUIT,HUP,PIPE,CHLD,USR1",
    ];
    let works = std::process::Command::new(odd[0])
        .args(&odd[1..])
        .arg("true")
        .status()
        .is_ok_and(|status| status.success());
    if !works {
        skip!("env cannot set signal masks here");
    }
    // Inherited or of its own making: neither reaches a child, nor keeps the server from its work.
    let inherited = Server::builder().wrapped_in(&odd).start();
    for server in [clean, inherited] {
        let status = status_of_a_command(&server);
        for field in ["SigBlk", "SigIgn", "SigCgt"] {
            assert_eq!(status[field], "0000000000000000", "{field}");
        }
        assert_eq!(
            server.exec(&json!({"cmd": "exit 7"})).code(),
            Some(7),
            "the end of a child is still seen"
        );
        let exit = server.exec(&json!({"cmd": "kill -PIPE $$"})).exit;
        assert_eq!(exit["signal"], 13);
        let background = server.spawn(&json!({"cmd": "exit 8"}));
        let ended = server
            .get(&format!(
                "/v1/processes/{}/wait",
                background["id"].as_str().unwrap()
            ))
            .json();
        assert_eq!(ended["exit_code"], 8);
    }
}

#[test]
fn a_child_has_three_descriptors_and_no_more() {
    // One that the server itself was handed must not go on either.
    let wrapper = ["sh", "-c", "exec 7</etc/passwd 8>/dev/null; exec \"$0\""];
    let server = Server::builder().wrapped_in(&wrapper).start();
    let directory = TempDir::new();
    let mark = Mark::new();
    let file = write_file(&directory, "text", numbered_text(1 << 20));
    let stop = Stop::default();
    thread::scope(|scope| {
        let stopping = stop.guard();
        // Everything that opens descriptors goes on meanwhile.
        let idle: Vec<Connection> = (0..20).map(|_| server.connect()).collect();
        let sleeper = server.exec_stream(&json!({"cmd": ["sleep", mark.to_string()]}));
        for busy in 0..3 {
            let (server, stop, file, directory) = (&server, &stop, &file, &directory);
            scope.spawn(move || {
                while !stop.is_set() {
                    match busy {
                        0 => drop(server.get(&format!("/v1/files/read?path={file}"))),
                        1 => drop(server.put(
                            &format!("/v1/files/write?path={}", directory.join("new")),
                            &vec![0; 100_000],
                        )),
                        _ => drop(server.exec(&json!({"cmd": ["cat"], "stdin": "x"}))),
                    }
                }
            });
        }
        for run in 0..150 {
            // The fourth is the directory that ls itself has open.
            let body = if run % 2 == 0 {
                json!({"cmd": ["ls", "/proc/self/fd"]})
            } else {
                json!({"cmd": ["ls", "/proc/self/fd"], "stdin": "x"})
            };
            let outcome = server.exec(&body);
            assert_eq!(outcome.stdout, "0\n1\n2\n3\n", "run {run}");
        }
        let background = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
        let mut names: Vec<String> = std::fs::read_dir(format!("/proc/{}/fd", background["pid"]))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["0", "1", "2"]);
        drop((idle, sleeper, stopping));
    });
}

#[test]
fn a_child_leads_a_session_of_its_own_without_a_terminal() {
    let server = Server::start();
    let outcome = server.exec(&json!({"cmd": ["cat", "/proc/self/stat"]}));
    let fields: Vec<&str> = outcome.stdout[outcome.stdout.rfind(')').unwrap() + 2..]
        .split(' ')
        .collect();
    let pid = outcome.start["pid"].to_string();
    assert!(
        outcome.stdout.starts_with(&format!("{pid} ")),
        "the pid that was told is the process's own"
    );
    assert_eq!(
        (fields[2], fields[3]),
        (pid.as_str(), pid.as_str()),
        "group and session"
    );
    assert_eq!(fields[4], "0", "no terminal");
    let own = stat_of(server_pid(&server)).unwrap();
    assert_ne!(own.session.to_string(), pid);
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let umask = text
        .lines()
        .find_map(|line| line.strip_prefix("Umask:\t"))
        .unwrap();
    assert_eq!(
        status_of_a_command(&server)["Umask"],
        umask,
        "as the server was started"
    );
}

#[test]
fn the_kernel_is_told_to_prefer_a_child_when_memory_runs_out() {
    let server = Server::start();
    let score = |text: &str| text.trim().parse::<i32>().unwrap();
    let own =
        score(&std::fs::read_to_string(format!("/proc/{}/oom_score_adj", server.pid())).unwrap());
    for body in [
        json!({"cmd": ["cat", "/proc/self/oom_score_adj"]}),
        json!({"cmd": "cat /proc/self/oom_score_adj"}),
    ] {
        let child = score(&server.exec(&body).stdout);
        assert!(child > own, "child {child}, server {own}");
    }
    // Also where it cannot be raised any more, or was set from outside, commands run.
    let highest = Server::builder()
        .wrapped_in(&[
            "sh",
            "-c",
            "echo 1000 > /proc/self/oom_score_adj; exec \"$0\"",
        ])
        .start();
    assert_eq!(
        highest
            .exec(&json!({"cmd": ["cat", "/proc/self/oom_score_adj"]}))
            .stdout,
        "1000\n"
    );
}

#[test]
fn a_childs_output_is_not_seen_by_another() {
    // Descriptors of one command must not leak into the next: its pipe would never end, and its
    // neighbour could write into it.
    let server = Server::start();
    let mark = Mark::new();
    thread::scope(|scope| {
        for worker in 0..4 {
            let (server, mark) = (&server, &mark);
            scope.spawn(move || {
                for run in 0..50 {
                    let outcome = server.exec(&json!({"cmd": format!("echo {worker} {run}")}));
                    assert_eq!(outcome.stdout, format!("{worker} {run}\n"));
                    let background = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
                    let pipes: Vec<String> = (0..3)
                        .map(|fd| {
                            std::fs::read_link(format!("/proc/{}/fd/{fd}", background["pid"]))
                                .unwrap()
                        })
                        .map(|link| link.to_str().unwrap().to_owned())
                        .collect();
                    assert_eq!(pipes.iter().collect::<BTreeSet<_>>().len(), 3, "{pipes:?}");
                    server.delete(&format!(
                        "/v1/processes/{}",
                        background["id"].as_str().unwrap()
                    ));
                }
            });
        }
    });
    mark.wait_gone(PATIENCE);
    assert_eq!(processes_with(&mark.to_string()), Vec::<i32>::new());
}

#[test]
fn a_head_of_a_stream_is_read_even_by_a_client_that_reads_byte_by_byte() {
    // The smallest reader there is: nothing may depend on how the bytes are taken.
    let server = Server::start();
    let mut connection = server.connect();
    let body = json!({"cmd": "echo é€😀"}).to_string();
    connection.send_request(
        "POST",
        "/v1/exec",
        &[("Connection", "close")],
        body.as_bytes(),
    );
    let mut all = Vec::new();
    let mut byte = [0];
    while connection.stream.read(&mut byte).unwrap() == 1 {
        all.push(byte[0]);
    }
    let text = String::from_utf8(all).unwrap();
    assert!(text.contains("é€😀") || text.contains("\\u00e9"), "{text}");
    assert!(text.ends_with("0\r\n\r\n"), "{text}");
}
