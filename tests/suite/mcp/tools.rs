//! Commands, processes and ports as tools.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Endpoint, document_of, events_of, everywhere, machine};
use crate::fixture::{Mark, PATIENCE, wait_until};

#[test]
fn a_command_is_run_and_its_end_told() {
    everywhere(|endpoint| {
        let result = endpoint.result("run", &json!({ "cmd": "echo out; echo err >&2; exit 3" }));
        assert_eq!(result["isError"], false);
        assert_eq!(
            result["content"][0]["text"],
            "out\n[stderr]\nerr\n[exit code 3]"
        );
        let ran = &result["structuredContent"];
        let id = ran["id"].as_str().unwrap();
        assert!(id.starts_with("p-"));
        assert_eq!(
            *ran,
            json!({
                "id": id, "running": false, "exit_code": 3, "signal": null, "reason": "exited", "timed_out": false,
                "stdout": "out\n", "stderr": "err\n", "truncated": false, "stdout_offset": 4, "stderr_offset": 4,
            })
        );
        for (arguments, expected) in [
            (
                json!({ "cmd": ["printf", "%s|", "a b", "c"] }),
                json!({ "stdout": "a b|c|" }),
            ),
            (
                json!({ "cmd": "echo $A-$B", "env": { "A": 1, "B": "x y" } }),
                json!({ "stdout": "1-x y\n" }),
            ),
            (
                json!({ "cmd": "cat; echo .", "stdin": "given" }),
                json!({ "stdout": "given.\n" }),
            ),
            (json!({ "cmd": "cat" }), json!({ "stdout": "" })),
            (
                json!({ "cmd": "mkdir -p d && cd d && pwd" }),
                json!({ "exit_code": 0 }),
            ),
            (
                json!({ "cmd": "basename $PWD", "cwd": "d" }),
                json!({ "stdout": "d\n" }),
            ),
            (
                json!({ "cmd": "kill -TERM $$" }),
                json!({ "exit_code": null, "signal": 15, "reason": "signaled" }),
            ),
            (
                json!({ "cmd": "echo begun; sleep 600", "timeout": 0.2 }),
                json!({ "stdout": "begun\n", "signal": 9, "reason": "timeout", "timed_out": true, "running": false }),
            ),
            (
                json!({ "cmd": "printf 'caf\\303\\251 \\377'" }),
                json!({ "stdout": "caf\u{e9} \u{fffd}" }),
            ),
        ] {
            let ran = endpoint.call("run", &arguments);
            for (name, value) in expected.as_object().unwrap() {
                assert_eq!(ran[name], *value, "{arguments}: {ran}");
            }
        }
    });
}

#[test]
fn a_command_that_cannot_start_is_the_result_of_the_tool() {
    everywhere(|endpoint| {
        for (tool, arguments, code, named) in [
            ("run", json!({}), "bad_request", "cmd"),
            ("run", json!({ "cmd": 1 }), "bad_request", "cmd"),
            (
                "run",
                json!({ "cmd": ["/no/such"] }),
                "not_found",
                "/no/such",
            ),
            (
                "run",
                json!({ "cmd": ["/etc/passwd"] }),
                "not_executable",
                "passwd",
            ),
            (
                "run",
                json!({ "cmd": "true", "cwd": "/no/such" }),
                "bad_cwd",
                "/no/such",
            ),
            (
                "run",
                json!({ "cmd": "true", "wait": 0 }),
                "bad_request",
                "wait",
            ),
            (
                "run",
                json!({ "cmd": "true", "timeout": "1" }),
                "bad_request",
                "timeout",
            ),
            (
                "run",
                json!({ "cmd": "true", "command": "x" }),
                "bad_request",
                "\"command\"",
            ),
            (
                "run",
                json!({ "cmd": "true", "background": true }),
                "bad_request",
                "it takes cmd",
            ),
            (
                "start",
                json!({ "cmd": "true", "wait": 1 }),
                "bad_request",
                "\"wait\"",
            ),
            (
                "start",
                json!({ "cmd": "true", "id": "a/b" }),
                "bad_request",
                "id",
            ),
            ("output", json!({}), "bad_request", "id"),
            ("output", json!({ "id": "none" }), "not_found", "none"),
            (
                "input",
                json!({ "id": "none", "text": "x" }),
                "not_found",
                "none",
            ),
            ("input", json!({ "id": "none" }), "bad_request", "eof"),
            ("stop", json!({ "id": "none" }), "not_found", "none"),
            (
                "stop",
                json!({ "id": "none", "signal": "NOPE" }),
                "bad_request",
                "NOPE",
            ),
            ("processes", json!({ "all": true }), "bad_request", "none"),
            (
                "ports",
                json!({ "wait_for": [] }),
                "bad_request",
                "wait_for",
            ),
        ] {
            let text = endpoint.fails(tool, &arguments, code);
            assert!(text.contains(named), "{tool} {arguments}: {text}");
            // Models have tools, and no routes.
            for method in ["GET ", "POST ", "DELETE "] {
                assert!(!text.contains(method), "{tool} {arguments}: {text}");
            }
        }
    });
}

#[test]
fn long_output_shows_both_ends_and_the_rest_is_read_on() {
    everywhere(|endpoint| {
        // 20,000 lines of 7 bytes.
        let ran = endpoint.call("run", &json!({ "cmd": "seq 100000 119999; seq 3 >&2" }));
        assert_eq!(ran["truncated"], true);
        let shown = ran["stdout"].as_str().unwrap();
        assert!(shown.chars().count() <= 30_000, "{}", shown.len());
        assert!(shown.starts_with("100000\n100001\n") && shown.ends_with("119998\n119999\n"));
        assert_eq!(ran["stderr"], "1\n2\n3\n");
        let all = (100_000..120_000).map(|line| {
            line.to_string()
                + "
"
        });
        let all: String = all.collect();
        let offset = ran["stdout_offset"].as_u64().unwrap();
        let mut read = all[..usize::try_from(offset).unwrap()].to_owned();
        assert!(shown.starts_with(&read));
        let mut offset = offset;
        loop {
            let more = endpoint.call(
                "output",
                &json!({ "id": ran["id"], "stdout_offset": offset, "stderr_offset": 6 }),
            );
            assert!(more["stdout"].as_str().unwrap().chars().count() <= 30_000);
            assert_eq!(more["stderr"], "");
            read.push_str(more["stdout"].as_str().unwrap());
            offset = more["stdout_offset"].as_u64().unwrap();
            if more["truncated"] == false {
                assert_eq!(
                    (&more["running"], &more["exit_code"]),
                    (&json!(false), &json!(0))
                );
                break;
            }
        }
        assert!(read == all, "{} of {} bytes", read.len(), all.len());
    });
}

#[test]
fn a_command_that_is_not_over_goes_on_and_is_read_on() {
    everywhere(|endpoint| {
        let ran = endpoint.call(
            "run",
            &json!({ "cmd": "echo first; read line; echo got $line; exit 4", "wait": 0.3 }),
        );
        // Its input is empty, so it does not wait.
        assert_eq!(
            (&ran["running"], &ran["stdout"]),
            (&json!(false), &json!("first\ngot\n"))
        );

        let mark = Mark::new();
        let command = format!("echo first; sleep {mark}");
        let ran = endpoint.call("run", &json!({ "cmd": command, "wait": 0.3 }));
        assert_eq!(ran["running"], true);
        assert_eq!(
            (&ran["exit_code"], &ran["reason"]),
            (&Value::Null, &Value::Null)
        );
        assert_eq!(
            (&ran["stdout"], &ran["stdout_offset"]),
            (&json!("first\n"), &json!(6))
        );
        mark.wait_for(1);
        let listed = endpoint.call("processes", &json!({}));
        let entry = listed["processes"]
            .as_array()
            .unwrap()
            .iter()
            .find(|entry| entry["id"] == ran["id"])
            .unwrap();
        assert_eq!(
            (&entry["running"], &entry["background"]),
            (&json!(true), &json!(true))
        );
        let stopped = endpoint.call("stop", &json!({ "id": ran["id"] }));
        assert_eq!(
            stopped,
            json!({ "id": ran["id"], "signal": 9, "signaled": true })
        );
        let end = endpoint.call(
            "output",
            &json!({ "id": ran["id"], "stdout_offset": 6, "wait": 20 }),
        );
        assert_eq!(
            (&end["running"], &end["signal"], &end["reason"]),
            (&json!(false), &json!(9), &json!("killed"))
        );
        assert_eq!(end["stdout"], "");
        mark.wait_gone(PATIENCE);
        let again = endpoint.call("stop", &json!({ "id": ran["id"] }));
        assert_eq!(again["signaled"], false);
    });
}

#[test]
fn a_process_is_started_typed_to_and_followed() {
    everywhere(|endpoint| {
        let script = "while read line; do echo got $line; done; echo over";
        let arguments = json!({ "cmd": script, "id": "echo", "tag": "mine" });
        let started = endpoint.call("start", &arguments);
        assert_eq!(
            (&started["id"], &started["running"], &started["tag"]),
            (&json!("echo"), &json!(true), &json!("mine"))
        );
        let again = endpoint.call("start", &arguments);
        assert_eq!(
            again["pid"], started["pid"],
            "the same id is the same process"
        );
        endpoint.fails(
            "start",
            &json!({ "cmd": "true", "id": "echo" }),
            "id_in_use",
        );

        let typed = endpoint.call("input", &json!({ "id": "echo", "text": "one\ntwo\n" }));
        assert_eq!(typed, json!({ "written": 8, "eof": false }));
        let read = endpoint.call("output", &json!({ "id": "echo", "wait": 20 }));
        assert_eq!(
            (&read["stdout"], &read["running"]),
            (&json!("got one\ngot two\n"), &json!(true))
        );
        // Nothing more comes.
        let begun = Instant::now();
        let offset = &read["stdout_offset"];
        let nothing = endpoint.call(
            "output",
            &json!({ "id": "echo", "stdout_offset": offset, "wait": 0.3 }),
        );
        assert!(begun.elapsed() >= Duration::from_millis(300));
        assert_eq!(
            (&nothing["stdout"], &nothing["stdout_offset"]),
            (&json!(""), offset)
        );
        let typed = endpoint.call(
            "input",
            &json!({ "id": "echo", "text": "three\n", "eof": true }),
        );
        assert_eq!(typed, json!({ "written": 6, "eof": true }));
        let mut last = endpoint.call(
            "output",
            &json!({ "id": "echo", "stdout_offset": offset, "wait": 20 }),
        );
        wait_until("the end", PATIENCE, || {
            last = endpoint.call(
                "output",
                &json!({ "id": "echo", "stdout_offset": offset, "wait": 20 }),
            );
            last["running"] == false
        });
        assert_eq!(
            (&last["stdout"], &last["exit_code"]),
            (&json!("got three\nover\n"), &json!(0))
        );
        endpoint.fails(
            "input",
            &json!({ "id": "echo", "text": "x" }),
            "stdin_closed",
        );
    });
}

#[test]
fn a_terminal_is_read_as_plain_text() {
    everywhere(|endpoint| {
        let script = r"test -t 0 && printf '\033[1mbold\033[0m '; stty size; read line; printf 'got %s\r\n' $line";
        let started = endpoint.call(
            "start",
            &json!({ "cmd": script, "pty": { "rows": 30, "cols": 90 } }),
        );
        assert_eq!(started["pty"]["rows"], 30);
        let id = &started["id"];
        let mut read = Value::Null;
        wait_until("the size", PATIENCE, || {
            read = endpoint.call("output", &json!({ "id": id, "wait": 5 }));
            read["stdout"].as_str().unwrap().contains("90")
        });
        assert_eq!(read["stdout"], "bold 30 90\n");
        endpoint.call("input", &json!({ "id": id, "text": "word\n" }));
        wait_until("the answer", PATIENCE, || {
            read = endpoint.call(
                "output",
                &json!({ "id": id, "stdout_offset": read["stdout_offset"], "wait": 5 }),
            );
            read["running"] == false
        });
        let all = endpoint.call("output", &json!({ "id": id }));
        let text = all["stdout"].as_str().unwrap();
        assert!(
            text.contains("got word\n") && !text.contains('\u{1b}'),
            "{text:?}"
        );
    });
}

#[test]
fn servers_are_waited_for_and_listed() {
    let (_home, server) = machine();
    let endpoint = Endpoint::of(&server);
    let port = crate::fixture::ReservedPort::new();
    let number = port.number();
    let none = endpoint.call("ports", &json!({ "wait_for": number, "timeout": 0.1 }));
    assert_eq!(
        none["waited_for"],
        json!({ "port": number, "listening": false })
    );
    let script = format!("exec python3 -m http.server --bind 127.0.0.1 {number}");
    if !crate::examples::is_installed("python3", "--version") {
        crate::skip!("python3 is not installed");
    }
    let started = endpoint.call("start", &json!({ "cmd": script }));
    let found = endpoint.call(
        "ports",
        &json!({ "wait_for": number.to_string(), "timeout": 30 }),
    );
    assert_eq!(
        found["waited_for"],
        json!({ "port": number, "listening": true })
    );
    let ports = found["ports"].as_array().unwrap();
    assert!(
        ports
            .iter()
            .any(|listener| listener["port"] == number && listener["pid"] == started["pid"]),
        "{ports:?}"
    );
    endpoint.call("stop", &json!({ "id": started["id"] }));
}

#[test]
fn a_call_that_asks_for_it_tells_progress() {
    everywhere(|endpoint| {
        for token in [json!("t\n1"), json!(7)] {
            let arguments = json!({ "cmd": "printf 'a\\303'; sleep 0.2; printf '\\251\\n\\nevent: x\\n\\n'; sleep 0.2; echo err >&2" });
            let params = json!({ "name": "run", "arguments": arguments, "_meta": { "progressToken": token } });
            let reply = endpoint.modern("tools/call", &params);
            assert_eq!(reply.status, 200, "{}", reply.text());
            assert_eq!(reply.header("content-type"), Some("text/event-stream"));
            assert_eq!(reply.header("x-accel-buffering"), Some("no"));
            let mut events = events_of(&reply.text());
            let last = events.pop().unwrap();
            assert_eq!(
                last["result"]["structuredContent"]["stdout"],
                "a\u{e9}\n\nevent: x\n\n"
            );
            let mut told = String::new();
            let mut before = 0;
            for event in &events {
                assert_eq!(event["method"], "notifications/progress");
                assert!(event.get("id").is_none());
                assert_eq!(event["params"]["progressToken"], token);
                let progress = event["params"]["progress"].as_u64().unwrap();
                assert!(progress > before, "{events:?}");
                before = progress;
                told.push_str(event["params"]["message"].as_str().unwrap());
            }
            assert!(events.len() >= 3, "{events:?}");
            assert_eq!(told, "a\u{e9}\n\nevent: x\n\nerr\n");
        }
        // One that has nothing to tell is a stream too.
        let params = json!({ "name": "processes", "_meta": { "progressToken": 1 } });
        let reply = endpoint.modern("tools/call", &params);
        assert_eq!(reply.header("content-type"), Some("text/event-stream"));
        assert!(document_of(&reply)["result"].is_object());
    });
}

#[test]
fn a_call_that_takes_long_turns_into_a_stream() {
    let server = crate::fixture::Server::builder()
        .env("SBX_PING_SECS", 1)
        .start();
    let endpoint = Endpoint::of(&server);
    // Whether it prints meanwhile or not.
    std::thread::scope(|scope| {
        for command in [
            "sleep 13; echo done",
            "for n in $(seq 130); do sleep 0.1; echo $n; done; echo done",
        ] {
            let endpoint = &endpoint;
            scope.spawn(move || {
                let begun = Instant::now();
                let mut connection = endpoint.send_modern(
                    "tools/call",
                    &json!({ "name": "run", "arguments": { "cmd": command } }),
                );
                let head = connection.read_head();
                let waited = begun.elapsed();
                assert!(
                    waited > Duration::from_secs(9) && waited < Duration::from_secs(13),
                    "{waited:?}"
                );
                assert_eq!(head.header("content-type"), Some("text/event-stream"));
                let reply = connection.read_body(head);
                let text = reply.text();
                assert!(text.matches(": ping\n\n").count() >= 2, "{text}");
                let result = &document_of(&reply)["result"]["structuredContent"];
                assert!(
                    result["stdout"].as_str().unwrap().ends_with("done\n"),
                    "{text}"
                );
            });
        }
    });
}

#[test]
fn a_client_that_closes_cancels() {
    everywhere(|endpoint| {
        for meta in [json!({}), json!({ "progressToken": 1 })] {
            let mark = Mark::new();
            let params = json!({ "name": "run", "arguments": { "cmd": format!("sleep {mark} & sleep {mark}") }, "_meta": meta });
            let connection = endpoint.send_modern("tools/call", &params);
            mark.wait_for(2);
            drop(connection);
            mark.wait_gone(PATIENCE);
            // It is reaped a moment later.
            wait_until("it has ended for that reason", PATIENCE, || {
                let listed = endpoint.call("processes", &json!({}));
                let last = listed["processes"].as_array().unwrap().last().unwrap();
                last["reason"] == "disconnected"
            });
        }
        // What start has started goes on.
        let mark = Mark::new();
        let started = endpoint.call("start", &json!({ "cmd": format!("sleep {mark}") }));
        mark.wait_for(1);
        endpoint.call("stop", &json!({ "id": started["id"] }));
        mark.wait_gone(PATIENCE);
    });
}

#[test]
fn a_client_that_only_stops_sending_gets_its_answer() {
    everywhere(|endpoint| {
        for meta in [json!({}), json!({ "progressToken": 1 })] {
            let params = json!({ "name": "run", "arguments": { "cmd": "sleep 0.5; echo late" }, "_meta": meta });
            let mut connection = endpoint.send_modern("tools/call", &params);
            connection
                .stream
                .shutdown(std::net::Shutdown::Write)
                .unwrap();
            let mut head = connection.read_head();
            while head.status == 102 {
                head = connection.read_head();
            }
            let reply = connection.read_body(head);
            assert_eq!(
                document_of(&reply)["result"]["structuredContent"]["stdout"],
                "late\n"
            );
        }
    });
}
