//! Output: no byte of it is lost, moved or changed on its way into events, however it was written
//! and however the reads fell. The stream that carries it has the shape clients rely on.

use std::fmt::Write as _;
use std::io::Read;
use std::thread;

use serde_json::{Value, json};

use super::{text_of, write_file};
use crate::fixture::{
    Gate, Mark, Outcome, Server, TempDir, events_of, expect_same, memory_of, numbered_text,
    output_of, random_bytes,
};

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
    let before = memory_of(server.pid(), "VmHWM");
    let events: Vec<Value> = server.exec_stream(&json!({"cmd": ["cat", file]})).collect();
    let output = output_of(&events, "stdout", 0);
    assert_eq!(output.dropped, 0);
    expect_same("the output", &output.data, expected.as_bytes());
    let grown = memory_of(server.pid(), "VmHWM").saturating_sub(before);
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
    expect_same(
        "the output",
        &output_of(&events, "stdout", 0).data,
        expected.as_bytes(),
    );
    expect_same(
        "the output",
        &output_of(&events, "stderr", 0).data,
        expected.as_bytes(),
    );
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
    assert_eq!(server.entry(&outcome.start["id"])["stdout_bytes"], 440);
    assert_eq!(server.entry(&outcome.start["id"])["stderr_bytes"], 80);
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
        expect_same("the output", outcome.stdout.as_bytes(), text.as_bytes());
        let outcome = server.exec(&json!({"cmd": format!("{{ {cmd}; }} >&2")}));
        expect_same("the output", outcome.stderr.as_bytes(), text.as_bytes());
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
        outcome.events.len() > 5,
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
            expect_same("the output", outcome.stdout.as_bytes(), text.as_bytes());
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
        expect_same("the output", outcome.stdout.as_bytes(), expected.as_bytes());
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
    expect_same("the output", stdout.as_bytes(), text.as_bytes());
    expect_same("the output", stderr.as_bytes(), text.repeat(2).as_bytes());
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
    expect_same(
        "the output",
        &output_of(&events, "stdout", 0).data,
        &expected,
    );
    expect_same("the output", &output_of(&events, "stderr", 0).data, &bytes);
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
