//! What no client sends, and what commands do to whoever reads them.

use std::fmt::Write;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Endpoint, document_of, everywhere, machine, modern, on_a_host};
use crate::fixture::{PATIENCE, Server, is_root, memory_of, wait_until};

/// Values of every type.
fn values() -> Vec<Value> {
    vec![
        json!(null),
        json!(true),
        json!(-1),
        json!(0),
        json!(1.5),
        json!(1e300),
        json!(u64::MAX),
        json!(""),
        json!("x\u{0}y"),
        json!("\u{202e}\u{feff}\u{10ffff}"),
        json!("../".repeat(2000)),
        json!([]),
        json!([[]]),
        json!({}),
        json!({ "a": { "b": [null] } }),
    ]
}

#[test]
fn arguments_of_any_type_are_results_or_refusals() {
    everywhere(|endpoint| {
        let tools = endpoint.modern("tools/list", &json!({})).json()["result"]["tools"].clone();
        for tool in tools.as_array().unwrap() {
            let name = tool["name"].as_str().unwrap();
            let properties = tool["inputSchema"]["properties"]
                .as_object()
                .cloned()
                .unwrap_or_default();
            for property in properties.keys() {
                for value in values() {
                    // What would run for long, or read the whole machine, is named so that it does not.
                    let mut arguments = match name {
                        "run" | "start" => json!({ "cmd": "true" }),
                        "output" | "input" | "stop" => json!({ "id": "none" }),
                        "ports" => json!({ "timeout": 0.01 }),
                        "glob" | "grep" => json!({ "path": "none", "pattern": "x" }),
                        _ => json!({ "path": "none" }),
                    };
                    if name == "write_file" {
                        arguments["content"] = "x".into();
                        arguments["path"] = "f".into();
                    }
                    if ["path", "id"].contains(&&**property) && value.is_null() {
                        continue;
                    }
                    arguments[property] = value;
                    let result = endpoint.result(name, &arguments);
                    assert!(result["content"][0]["text"].is_string(), "{result}");
                    if result["isError"] == true {
                        let code = result["structuredContent"]["code"].as_str().unwrap();
                        assert!(
                            !["internal", "kernel_failed"].contains(&code),
                            "{name} {arguments}: {result}"
                        );
                    }
                }
            }
        }
        assert_eq!(
            endpoint.call("run", &json!({ "cmd": "echo alive" }))["stdout"],
            "alive\n"
        );
    });
}

#[test]
fn bodies_that_are_deep_or_wide_cost_nothing() {
    let (_home, server) = machine();
    let endpoint = Endpoint::of(&server);
    let before = memory_of(server.pid(), "VmRSS");
    let deep = "[".repeat(4 << 20) + &"]".repeat(4 << 20);
    let wide = vec!["\"k\":1"; 1 << 20].join(",");
    let many = (0..100_000)
        .map(|number| format!("\"k{number}\":1"))
        .collect::<Vec<_>>()
        .join(",");
    let long = "9".repeat(8 << 20);
    for body in [
        deep.clone(),
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping","params":{{"x":{deep}}}}}"#),
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping","x":{deep}}}"#),
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping",{wide}}}"#),
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping",{many}}}"#),
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping","params":{{"_meta":{{{many}}}}}}}"#),
        format!(r#"{{"jsonrpc":"2.0","id":{long},"method":"ping"}}"#),
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{long}"}}"#),
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"{long}"}}}}"#),
        format!(
            r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"run","arguments":{{{many}}}}}}}"#
        ),
    ] {
        let reply = endpoint.post(&[], body.as_bytes());
        assert!(
            [200, 400].contains(&reply.status),
            "{}",
            &reply.text()[..200.min(reply.body.len())]
        );
        assert!(
            reply.body.len() <= body.len() + 1000,
            "{} bytes",
            reply.body.len()
        );
    }
    wait_until("the memory is given back", PATIENCE, || {
        memory_of(server.pid(), "VmRSS") < before + (8 << 20)
    });
}

#[test]
fn huge_output_costs_a_bounded_result() {
    everywhere(|endpoint| {
        let begun = Instant::now();
        let ran = endpoint.call(
            "run",
            &json!({ "cmd": "head -c 300000000 /dev/zero | tr '\\0' '\\033'; echo end >&2" }),
        );
        assert!(
            ran["stdout"].to_string().len() < 6 * 30_000 + 100,
            "a character is at most six"
        );
        assert_eq!(
            (&ran["stderr"], &ran["truncated"]),
            (&json!("end\n"), &json!(true))
        );
        assert!(ran["stdout"].as_str().unwrap().contains("bytes left out"));
        // The beginning is not held any more, which the offset shows.
        let rest = endpoint.call(
            "output",
            &json!({ "id": ran["id"], "stdout_offset": ran["stdout_offset"] }),
        );
        assert_eq!(rest["truncated"], true);
        assert!(
            rest["stdout_offset"].as_u64().unwrap() > 290_000_000,
            "{}",
            rest["stdout_offset"]
        );
        assert!(begun.elapsed() < Duration::from_secs(60));
    });
}

/// A client that asks for progress and reads nothing holds its own command up, and costs a bounded buffer.
#[test]
fn a_client_that_does_not_read_costs_no_memory() {
    let (_home, server) = machine();
    let endpoint = Endpoint::of(&server);
    let before = memory_of(server.pid(), "VmRSS");
    let params =
        json!({ "name": "run", "arguments": { "cmd": "yes" }, "_meta": { "progressToken": 1 } });
    let clients: Vec<_> = (0..8)
        .map(|_| endpoint.send_modern("tools/call", &params))
        .collect();
    let running = || {
        let listed = endpoint.call("processes", &json!({}));
        let listed = listed["processes"].as_array().unwrap().clone();
        listed
            .iter()
            .filter(|entry| entry["running"] == true)
            .map(|entry| entry["stdout_bytes"].as_u64().unwrap())
            .collect::<Vec<_>>()
    };
    let mut written = Vec::new();
    wait_until("all are held up", PATIENCE, || {
        let now = running();
        let is_still = now.len() == 8 && now == written;
        written = now;
        std::thread::sleep(Duration::from_millis(200));
        is_still
    });
    let more = memory_of(server.pid(), "VmRSS").saturating_sub(before);
    // Each has a log of at most 4 MiB besides.
    assert!(more < 8 * (5 << 20), "{more}");
    drop(clients);
    wait_until("all are killed", PATIENCE, || running().is_empty());
}

#[test]
fn clients_that_leave_at_any_moment_leave_nothing() {
    everywhere(|endpoint| {
        let whole = |params: &Value| {
            let (headers, body) = modern("tools/call", params);
            let body = body.to_string();
            let mut head = format!(
                "POST {} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\naccept: */*\r\n",
                endpoint.target, endpoint.token
            );
            for (name, value) in headers {
                write!(head, "{name}: {value}\r\n").unwrap();
            }
            format!("{head}content-length: {}\r\n\r\n{body}", body.len())
        };
        let calls = [
            json!({ "name": "run", "arguments": { "cmd": "sleep 600" } }),
            json!({ "name": "run", "arguments": { "cmd": "yes" }, "_meta": { "progressToken": 1 } }),
            json!({ "name": "grep", "arguments": { "pattern": "x", "all": true } }),
            json!({ "name": "ports", "arguments": { "wait_for": 9, "timeout": 600 } }),
        ];
        for call in &calls {
            let whole = whole(call);
            if call["arguments"]["wait_for"] == 9 && endpoint.target != "/mcp" {
                continue;
            }
            for cut in (1..whole.len()).step_by(37).chain([whole.len()]) {
                let mut connection = endpoint.connect();
                connection.send(&whole.as_bytes()[..cut]);
            }
        }
        wait_until("no command is left", PATIENCE, || {
            let listed = endpoint.call("processes", &json!({}));
            listed["processes"]
                .as_array()
                .unwrap()
                .iter()
                .all(|entry| entry["running"] == false)
        });
    });
}

#[test]
fn another_sandbox_is_not_reached_by_any_tool() {
    on_a_host(|server, sandbox| {
        let other = server.sandbox();
        other.sh("echo secret > mine; chmod 644 mine");
        let theirs = other.spawn(&json!({ "cmd": "sleep 600", "id": "theirs" }));
        let endpoint = Endpoint::of_sandbox(server, sandbox);
        let pid = theirs["pid"].to_string();
        for id in ["theirs", &*pid] {
            endpoint.fails("output", &json!({ "id": id }), "not_found");
            endpoint.fails("stop", &json!({ "id": id }), "not_found");
            endpoint.fails("input", &json!({ "id": id, "text": "x" }), "not_found");
        }
        let home = other.home.display().to_string();
        endpoint.fails(
            "read_file",
            &json!({ "path": format!("{home}/mine") }),
            "forbidden",
        );
        let ran = endpoint.call("run", &json!({ "cmd": format!("cat {home}/mine") }));
        assert_ne!(ran["exit_code"], 0);
        assert_eq!(
            endpoint.call("processes", &json!({}))["processes"]
                .as_array()
                .unwrap()
                .len(),
            1
        );
        assert!(other.get("processes/theirs").json()["running"] == true);
    });
}

/// A tenant that holds its share of the server's memory gets an error, and others their results.
#[test]
fn results_count_for_their_tenant() {
    on_a_host(|server, sandbox| {
        let endpoint = Endpoint::of_sandbox(server, sandbox);
        let neighbour = server.sandbox();
        let neighbour = Endpoint::of_sandbox(server, &neighbour);
        endpoint.call("run", &json!({ "cmd": "seq 40000 > f" }));
        // Results that nobody reads.
        let params = json!({ "name": "read_file", "arguments": { "path": "f" } });
        let stalled: Vec<_> = (0..64)
            .map(|_| endpoint.send_modern("tools/call", &params))
            .collect();
        let begun = Instant::now();
        assert_eq!(
            neighbour.call("run", &json!({ "cmd": "echo fine" }))["stdout"],
            "fine\n"
        );
        assert!(begun.elapsed() < Duration::from_secs(5));
        for mut connection in stalled {
            let reply = connection.read_reply();
            assert_eq!(reply.status, 200);
            assert!(document_of(&reply)["result"].is_object());
        }
        let _: &Server = server;
    });
}

/// Nothing is said to be written that nobody reads before the sandbox runs again.
#[test]
fn a_paused_sandbox_takes_no_input() {
    on_a_host(|server, sandbox| {
        let endpoint = Endpoint::of_sandbox(server, sandbox);
        endpoint.call("start", &json!({ "cmd": "exec cat", "id": "cat" }));
        let change = |act: &str| {
            let target = format!("/v1/sandboxes/{}/{act}", sandbox.id);
            assert_eq!(server.post(&target, &json!({})).status, 200);
        };
        change("pause");
        let input = json!({ "id": "cat", "text": "x" });
        endpoint.fails("input", &input, "paused");
        change("resume");
        assert_eq!(endpoint.call("input", &input)["written"], 1);
    });
}

/// Each word takes more than its text, and an empty one no text at all.
#[test]
fn a_list_of_commands_of_very_many_words_is_charged_before_it_is_made() {
    if !is_root() {
        crate::skip!("needs root");
    }
    let mut words = vec!["/bin/sh", "-c", "exec sleep 1000"];
    words.resize(16_300, "");
    check_charge_of_list(&json!({ "cmd": words }));
    let code = "exec sleep 1000";
    check_charge_of_list(&json!({ "code": code, "language": "bash", "args": &words[3..] }));
}

#[track_caller]
fn check_charge_of_list(command: &Value) {
    let builder = Server::host().wrapped_in(&["prlimit", "--as=1000000000"]);
    let server = builder.start();
    let sandbox = server.sandbox();
    for _ in 0..60 {
        sandbox.spawn(command);
    }
    let endpoint = Endpoint::of_sandbox(&server, &sandbox);
    let before = memory_of(server.inner_pid(), "VmHWM");
    let params = json!({ "name": "processes", "arguments": {} });
    let asked: Vec<_> = (0..16)
        .map(|_| endpoint.send_modern("tools/call", &params))
        .collect();
    for mut connection in asked {
        let reply = connection.read_reply();
        assert!(matches!(reply.status, 200 | 503), "{}", reply.status);
    }
    let more = memory_of(server.inner_pid(), "VmHWM").saturating_sub(before);
    // All of them together take 500 MB.
    assert!(more < 250 << 20, "{more}");
    sandbox.delete();
}
