//! Typing: what arrives, what ends it, and who may type while another does.

use std::thread;
use std::time::Duration;

use serde_json::json;

use super::{Place, everywhere};
use crate::fixture::{Server, assert_error, numbered_text, random_bytes, reset, sha256};

#[test]
fn the_end_of_file_character_is_typed_and_the_input_stays_open() {
    everywhere(|place| {
        let shell = place.shell();
        for settings in ["", "stty eof ^X; "] {
            shell.press(&format!("{settings}cat; echo the next\n"));
            shell.expect("next\r\n");
            shell.press("first\n");
            shell.expect("first\r\nfirst\r\n");
            let reply = place.request("POST", &shell.route("/stdin?eof=1"), b"second\n");
            assert_eq!(reply.json(), json!({ "written": 7, "eof": true }));
            shell.expect("second\r\nsecond\r\nthe next\r\n$ ");
            shell.press("stty sane\n");
            shell.expect("$ ");
        }
        shell.press("exit 9\n");
        assert_eq!(shell.end()["exit_code"], 9);
    });
}

/// A mebibyte that ends with a line.
fn pasted_lines() -> String {
    let mut text = numbered_text(1 << 20);
    text.push('\n');
    text
}

#[test]
fn a_paste_of_lines_arrives_byte_for_byte() {
    everywhere(|place| {
        let text = pasted_lines();
        let screen =
            place.open(&json!({ "cmd": "stty -echo; echo ready; sha256sum", "pty": true }));
        screen.expect("ready\r\n");
        let reply = place.request("POST", &screen.route("/stdin?eof=1"), text.as_bytes());
        assert_eq!(reply.json(), json!({ "written": text.len(), "eof": true }));
        screen.expect(&sha256(text.as_bytes()));
        assert_eq!(screen.end()["exit_code"], 0);
    });
}

#[test]
fn any_bytes_reach_a_program_that_reads_single_ones() {
    everywhere(|place| {
        let bytes = random_bytes(1 << 20, 7);
        let script = format!(
            "stty raw -echo; echo ready; head -c {} | sha256sum",
            bytes.len()
        );
        let screen = place.open(&json!({ "cmd": script, "pty": true }));
        screen.expect("ready");
        let reply = place.request("POST", &screen.route("/stdin"), &bytes);
        assert_eq!(
            reply.json(),
            json!({ "written": bytes.len(), "eof": false })
        );
        screen.expect(&sha256(&bytes));
        assert_eq!(screen.end()["exit_code"], 0);
    });
}

#[test]
fn what_a_program_echoes_does_not_stop_what_is_typed() {
    everywhere(|place| {
        let text = pasted_lines();
        let screen = place.open(&json!({ "cmd": "cat | sha256sum; echo end", "pty": true }));
        let reply = place.request("POST", &screen.route("/stdin?eof=1"), text.as_bytes());
        assert_eq!(reply.status, 200, "{}", reply.text());
        screen.expect(&sha256(text.as_bytes()));
        screen.expect("end\r\n");
        assert_eq!(screen.end()["exit_code"], 0);
    });
}

#[test]
fn lines_that_many_type_at_once_arrive_whole() {
    everywhere(|place| {
        let screen = place.open(&json!({ "cmd": "stty -echo; echo ready; cat", "pty": true }));
        screen.expect("ready\r\n");
        let route = screen.route("/stdin");
        let type_lines = |who: usize| {
            for number in 0..10 {
                let line = format!("line {number} of {who}, {}\n", "x".repeat(100 * who));
                let reply = place.request("POST", &route, line.as_bytes());
                assert_eq!(reply.status, 200, "{}", reply.text());
            }
        };
        thread::scope(|scope| {
            for who in 0..6 {
                scope.spawn(move || type_lines(who));
            }
        });
        place.request("POST", &screen.route("/stdin?eof=1"), b"");
        screen.end();
        screen.fetch();
        let text = String::from_utf8(screen.seen.borrow().1.clone()).unwrap();
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        let mut expected: Vec<String> = (0..6)
            .flat_map(|who| {
                (0..10)
                    .map(move |number| format!("line {number} of {who}, {}", "x".repeat(100 * who)))
            })
            .collect();
        expected.sort_unstable();
        assert_eq!(lines, expected);
    });
}

#[test]
fn a_client_that_is_slow_to_type_keeps_nobody_else_from_typing() {
    everywhere(|place| {
        let screen = place.open(&json!({ "cmd": "stty -echo; echo ready; cat", "pty": true }));
        screen.expect("ready\r\n");
        let mut slow = place.connect();
        let target = place.target(&screen.route("/stdin"));
        slow.send_request("POST", &target, &[("Content-Length", "20")], b"begun\n");
        screen.expect("begun\r\n");
        screen.press("others\n");
        screen.expect("others\r\n");
        slow.send(b"gone on with\n!");
        assert_eq!(
            slow.read_reply().json(),
            json!({ "written": 20, "eof": false })
        );
        screen.expect("gone on with\r\n");
        // One that vanishes in the middle takes nothing with it.
        let mut vanishing = place.connect();
        vanishing.send_request("POST", &target, &[("Content-Length", "20")], b" seen\n");
        screen.expect("! seen\r\n");
        reset(vanishing);
        screen.press("still\n");
        screen.expect("still\r\n");
    });
}

#[test]
fn keys_reach_a_foreground_command_by_its_id() {
    everywhere(|place| {
        let body = json!({ "cmd": "read line; echo \"<$line>\"", "pty": true, "id": "question" });
        let mut stream = place.stream("POST", "exec", &body);
        assert_eq!(stream.next().unwrap()["id"], "question");
        let reply = place.request("POST", "processes/question/stdin", b"yes\n");
        assert_eq!(reply.status, 200, "{}", reply.text());
        let events: Vec<_> = stream.filter(|event| event["event"] == "stdout").collect();
        let text: String = events
            .iter()
            .map(|event| event["data"].as_str().unwrap())
            .collect();
        assert_eq!(text, "yes\r\n<yes>\r\n");
    });
}

#[test]
fn nothing_is_typed_after_the_end() {
    everywhere(|place| {
        let screen = place.open(&json!({ "cmd": "true", "pty": true }));
        screen.end();
        for (query, body) in [("", "x"), ("", ""), ("?eof=1", "")] {
            let route = screen.route(&format!("/stdin{query}"));
            let reply = place.request("POST", &route, body.as_bytes());
            assert_error(&reply, 409, "stdin_closed");
        }
    });
}

#[test]
fn a_paste_that_nobody_reads_lets_go_at_the_end_and_blocks_nothing_else() {
    let server = Server::start();
    let place = Place::Machine(&server);
    let script = "stty raw -echo; echo ready; exec sleep 1000";
    let screen = place.open(&json!({ "cmd": script, "pty": true }));
    screen.expect("ready");
    let bytes = random_bytes(1 << 20, 8);
    let route = screen.route("/stdin");
    thread::scope(|scope| {
        let paste = scope.spawn(|| place.request("POST", &route, &bytes));
        let before = crate::fixture::cpu_time_of(server.pid());
        // The server does other things, and does not spin.
        for _ in 0..20 {
            assert_eq!(server.exec(&json!({ "cmd": "true" })).code(), Some(0));
            thread::sleep(Duration::from_millis(20));
        }
        let after = crate::fixture::cpu_time_of(server.pid());
        assert!(after < before + Duration::from_millis(350), "it spins");
        place.request("DELETE", &screen.route(""), b"");
        let reply = paste.join().unwrap();
        assert_error(&reply, 409, "stdin_closed");
        let written = reply.json()["written"].as_u64().unwrap();
        assert!((1..1 << 20).contains(&written), "{written}");
    });
}

/// The promise of a minute. A unit test has a shorter limit.
#[test]
#[ignore = "takes over a minute"]
fn a_terminal_that_nobody_reads_for_a_minute_is_busy() {
    everywhere(|place| {
        let script = "stty raw -echo; echo ready; exec sleep 1000";
        let screen = place.open(&json!({ "cmd": script, "pty": true }));
        screen.expect("ready");
        let bytes = random_bytes(1 << 20, 9);
        let reply = place.request("POST", &screen.route("/stdin"), &bytes);
        assert_error(&reply, 409, "stdin_busy");
        let written = reply.json()["written"].as_u64().unwrap();
        assert!((1..1 << 20).contains(&written), "{written}");
        let next = place.request("POST", &screen.route("/stdin"), b"");
        assert_eq!(next.status, 200, "others may type");
        assert_eq!(screen.entry()["running"], true);
        place.request("DELETE", &screen.route(""), b"");
    });
}
