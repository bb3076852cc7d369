//! Commands and terminals.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Door, Ran, everywhere, machine, on_a_host};
use crate::fixture::{Mark, PATIENCE, decode_base64, encode_base64, is_alive, wait_until};

const START: &str = "/process.Process/Start";
const CONNECT: &str = "/process.Process/Connect";

fn shell(script: &str) -> Value {
    json!({ "process": { "cmd": "/bin/sh", "args": ["-c", script] }, "stdin": false })
}

fn select(pid: i64) -> Value {
    json!({ "process": { "pid": pid } })
}

#[test]
fn a_command_tells_its_start_its_output_and_its_end() {
    everywhere(|door| {
        let ran = door.sh("echo out; echo err >&2; exit 3");
        assert_eq!(
            (&ran.stdout[..], &ran.stderr[..]),
            (&b"out\n"[..], &b"err\n"[..])
        );
        let end = json!({
            "exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"
        });
        assert_eq!(ran.end, end);
        assert!(ran.pid > 1);
        let ran = door.sh("true");
        assert_eq!(
            ran.end,
            json!({ "exitCode": 0, "exited": true, "status": "exit status 0" })
        );
        let ran = door.sh("kill -9 $$");
        let end = json!({
            "exitCode": -1, "exited": false, "status": "signal: killed", "error": "signal: killed"
        });
        assert_eq!(ran.end, end);
        // Byte for byte, and all of it before the end.
        let ran = door.sh("head -c 3000000 /dev/zero; printf '\\377\\303'");
        assert_eq!(ran.stdout.len(), 3_000_002);
        assert!(ran.stdout.ends_with(b"\0\xff\xc3"));
    });
}

#[test]
fn the_answer_begins_when_the_request_has_arrived_whole() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    let mut connection = door.connect();
    let body = super::envelope(0, shell("echo hi").to_string().as_bytes());
    let head = format!(
        "POST {START} HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\n\
         X-Access-Token: {}\r\nTransfer-Encoding: chunked\r\n\r\n",
        door.token
    );
    connection.send(head.as_bytes());
    // The first chunk has a part of the envelope's head.
    for part in [&body[..3], &body[3..20], &body[20..]] {
        connection.stream.set_nonblocking(true).unwrap();
        let mut byte = [0];
        let early = std::io::Read::read(&mut connection.stream, &mut byte);
        assert!(
            early.is_err(),
            "nothing is sent before the request is whole"
        );
        connection.stream.set_nonblocking(false).unwrap();
        connection.send(format!("{:x}\r\n", part.len()).as_bytes());
        connection.send(part);
        connection.send(b"\r\n");
    }
    connection.send(b"0\r\n\r\n");
    let reply = connection.read_reply();
    assert_eq!(reply.status, 200);
    let mut received = reply.body;
    let mut messages = Vec::new();
    while let Some(message) = super::take_message(&mut received) {
        messages.push(message);
    }
    assert_eq!(Ran::of(&messages).text(), "hi\n");
}

#[test]
fn environment_and_directory_are_those_that_were_asked_for() {
    everywhere(|door| {
        let run = |process: Value| door.run(&process).text();
        let home = run(
            json!({ "cmd": "/bin/sh", "args": ["-c", "echo $HOME; pwd; echo $A"], "envs": { "A": "b" } }),
        );
        let lines: Vec<_> = home.lines().collect();
        assert_eq!((lines[0], lines[2]), (lines[1], "b"), "{home}");
        assert!(
            door.sh("[ -n \"$PATH\" ] && [ -n \"$USER\" ] && [ -n \"$LOGNAME\" ]")
                .end["exitCode"]
                == 0
        );
        door.ok(
            "/filesystem.Filesystem/MakeDir",
            &json!({ "path": "e2b-cwd/b" }),
        );
        let directory = format!("{}/e2b-cwd/b\n", lines[0]);
        for cwd in ["e2b-cwd/b", "~/e2b-cwd/b", directory.trim_end()] {
            assert_eq!(run(json!({ "cmd": "pwd", "cwd": cwd })), directory);
        }
        for (process, word) in [
            (json!({ "cmd": "pwd", "cwd": "e2b-cwd/none" }), "cwd"),
            (json!({ "cmd": "pwd", "cwd": "~other" }), "~"),
            (json!({ "cmd": "no-such-program" }), "no-such-program"),
            (json!({ "cmd": "" }), "cmd"),
            (json!({ "args": [] }), "cmd"),
            (json!({ "cmd": "true", "args": [1] }), "args"),
            (json!({ "cmd": "true", "envs": { "A": 1 } }), "envs.A"),
        ] {
            let (code, text) = door.stream_fails(START, &json!({ "process": process }));
            assert_eq!(code, "invalid_argument", "{text}");
            assert!(text.contains(word), "{text}");
        }
        door.ok(
            "/filesystem.Filesystem/Remove",
            &json!({ "path": "e2b-cwd" }),
        );
    });
}

#[test]
fn a_shell_that_the_image_lacks_is_replaced() {
    // An image without it, made by an empty directory over it, needs mounts; the name alone shows the same.
    let (_home, server) = machine();
    let door = Door::open(&server);
    let (code, text) = door.stream_fails(START, &json!({ "process": { "cmd": "/bin/no-bash" } }));
    assert_eq!(code, "invalid_argument", "{text}");
    let ran = door.run(&json!({ "cmd": "/bin/bash", "args": ["-l", "-c", "echo hi"] }));
    assert_eq!(ran.text(), "hi\n");
}

/// Clients have all commands run by a login shell, and profiles of images set PATH anew.
#[test]
fn a_profile_does_not_hide_the_programs_of_the_workspace() {
    everywhere(|door| {
        let home = door.sh("echo $HOME").text().trim().to_owned();
        let tools = format!("{home}/tools'1");
        door.sh("mkdir -p \"$HOME/tools'1\"; echo 'echo from tools' >\"$HOME/tools'1/own-tool\"; chmod +x \"$HOME/tools'1/own-tool\"");
        door.sh("echo 'PATH=/usr/bin:/bin; export FROM_PROFILE=yes' >$HOME/.bash_profile");
        let path = format!("{tools}:/usr/local/bin:/usr/bin:/bin");
        for args in [
            json!(["-l", "-c", "own-tool; echo $FROM_PROFILE; echo $PATH"]),
            json!(["-i", "-l"]),
        ] {
            let is_terminal = args[0] == "-i";
            let mut request = json!({ "process": { "cmd": "/bin/bash", "args": args, "envs": { "PATH": path, "HOME": home } } });
            let text = if is_terminal {
                request["pty"] = json!({ "size": { "cols": 80, "rows": 24 } });
                let mut stream = door.begin(START, &request, &[]);
                let (_, start) = stream.next().unwrap();
                let pid = start["event"]["start"]["pid"].as_i64().unwrap();
                let typed = encode_base64(b"own-tool; echo $FROM_PROFILE; exit\n");
                let input = json!({ "process": { "pid": pid }, "input": { "pty": typed } });
                door.ok("/process.Process/SendInput", &input);
                let shown = stream.rest().into_iter().filter_map(|(_, message)| {
                    let data = message["event"]["data"]["pty"].as_str()?;
                    Some(decode_base64(data))
                });
                String::from_utf8_lossy(&shown.collect::<Vec<_>>().concat()).into_owned()
            } else {
                door.run(&request["process"]).text()
            };
            assert!(text.contains("from tools"), "{text}");
            assert!(text.contains("yes"), "{text}");
        }
        // What the client sees is what it has sent.
        let ran = door.run(&json!({ "cmd": "/bin/bash", "args": ["-l", "-c", "-n hello"] }));
        assert_eq!(ran.end["exitCode"], 127, "{ran:?}");
    });
}

#[test]
fn a_client_that_leaves_leaves_its_command_running() {
    everywhere(|door| {
        let mark = Mark::new();
        let script = format!("echo begun; sleep {mark}; true");
        let mut stream = door.begin(START, &shell(&script), &[]);
        let (_, start) = stream.next().unwrap();
        let pid = start["event"]["start"]["pid"].as_i64().unwrap();
        stream.next().unwrap();
        drop(stream);
        // Another client finds it, and it is listed.
        let listed = door.ok("/process.Process/List", &json!({}));
        let is_listed = |listed: &Value| {
            let mut all = listed["processes"].as_array().unwrap().iter();
            all.any(|process| process["pid"] == pid && process["config"]["cmd"] == "/bin/sh")
        };
        assert!(is_listed(&listed), "{listed}");
        let mut second = door.begin(CONNECT, &select(pid), &[]);
        assert_eq!(second.next().unwrap().1["event"]["start"]["pid"], pid);
        assert!(is_alive(i32::try_from(pid).unwrap()));
        assert_eq!(
            door.ok(
                "/process.Process/SendSignal",
                &json!({ "process": { "pid": pid }, "signal": "SIGNAL_SIGKILL" })
            ),
            json!({})
        );
        let messages = second.rest();
        assert_eq!(messages[0].1["event"]["end"]["status"], "signal: killed");
        mark.wait_gone(Duration::from_secs(10));
        // It is gone, and its end is still known.
        door.fails(
            "/process.Process/SendSignal",
            &json!({ "process": { "pid": pid }, "signal": 9 }),
            404,
            "not_found",
        );
        let messages = door.stream(CONNECT, &select(pid));
        assert_eq!(messages[0].1["event"]["start"]["pid"], pid);
        assert_eq!(messages[1].1["event"]["end"]["exitCode"], -1);
        assert!(!is_listed(&door.ok("/process.Process/List", &json!({}))));
    });
}

#[test]
fn the_deadline_of_a_start_kills_the_command_and_that_of_a_connect_ends_the_stream() {
    everywhere(|door| {
        let mark = Mark::new();
        let script = format!("sleep {mark} & sleep {mark}; true");
        let begun = Instant::now();
        let headers = [("connect-timeout-ms", "700")];
        let messages = door.begin(START, &shell(&script), &headers).rest();
        let (2, end) = messages.last().unwrap() else {
            panic!("{messages:?}");
        };
        assert_eq!(end["error"]["code"], "deadline_exceeded");
        assert!(begun.elapsed() >= Duration::from_millis(700));
        mark.wait_gone(Duration::from_secs(10));

        let mark = Mark::new();
        let script = format!("sleep {mark}; true");
        let mut stream = door.begin(START, &shell(&script), &[]);
        let pid = stream.next().unwrap().1["event"]["start"]["pid"]
            .as_i64()
            .unwrap();
        let messages = door.begin(CONNECT, &select(pid), &headers).rest();
        assert_eq!(messages.len(), 2, "{messages:?}");
        assert_eq!(messages[1].1["error"]["code"], "deadline_exceeded");
        assert!(is_alive(i32::try_from(pid).unwrap()));
        door.ok(
            "/process.Process/SendSignal",
            &json!({ "process": { "pid": pid }, "signal": "SIGNAL_SIGTERM" }),
        );
        let messages = stream.rest();
        assert_eq!(
            messages[0].1["event"]["end"]["status"],
            "signal: terminated"
        );
        for timeout in ["x", "-1", "12345678901", "1.5", ""] {
            let headers = [("connect-timeout-ms", timeout)];
            let messages = door.begin(START, &shell("true"), &headers).rest();
            assert_eq!(
                messages[0].1["error"]["code"], "invalid_argument",
                "{timeout}"
            );
        }
    });
}

#[test]
fn input_is_sent_in_messages_and_as_a_stream() {
    everywhere(|door| {
        let start = json!({ "process": { "cmd": "cat" }, "tag": "the cat" });
        let mut stream = door.begin(START, &start, &[]);
        stream.next().unwrap();
        let selector = json!({ "tag": "the cat" });
        let send = |data: &str| json!({ "process": selector, "input": { "stdin": data } });
        door.ok("/process.Process/SendInput", &send("aGk="));
        // Neither padding nor the usual alphabet is needed.
        door.ok("/process.Process/SendInput", &send("-_8"));
        let mut body = super::envelope(
            0,
            json!({ "start": { "process": selector } })
                .to_string()
                .as_bytes(),
        );
        body.extend(super::envelope(0, b"{\"keepalive\":{}}"));
        body.extend(super::envelope(
            0,
            b"{\"data\":{\"input\":{\"stdin\":\"b25l\"}}}",
        ));
        body.extend(super::envelope(
            0,
            b"{\"data\":{\"input\":{\"stdin\":\"dHdv\"}}}",
        ));
        let headers = [("content-type", "application/connect+json")];
        let reply = door.request("POST", "/process.Process/StreamInput", &headers, &body);
        assert_eq!(reply.body, b"\0\0\0\0\x02{}\x02\0\0\0\x02{}");
        let close = json!({ "process": selector });
        assert_eq!(door.ok("/process.Process/CloseStdin", &close), json!({}));
        let mut output = Vec::new();
        let end = loop {
            let (_, message) = stream.next().unwrap();
            match message["event"]["data"]["stdout"].as_str() {
                Some(data) => output.extend(decode_base64(data)),
                None => break message,
            }
        };
        assert_eq!(output, b"hi\xfb\xffonetwo");
        assert_eq!(end["event"]["end"]["exitCode"], 0);
        door.fails("/process.Process/CloseStdin", &close, 404, "not_found");
        door.fails(
            "/process.Process/SendInput",
            &send("aGk="),
            404,
            "not_found",
        );

        // Each message is acted on as it arrives, before the request ends.
        let mut cat = door.begin(START, &json!({ "process": { "cmd": "cat" } }), &[]);
        let pid = cat.next().unwrap().1["event"]["start"]["pid"]
            .as_i64()
            .unwrap();
        let mut connection = door.connect();
        let head = format!(
            "POST /process.Process/StreamInput HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\n\
             E2b-Sandbox-Id: {}\r\nX-Access-Token: {}\r\nTransfer-Encoding: chunked\r\n\r\n",
            door.id, door.token
        );
        connection.send(head.as_bytes());
        let mut send = |message: &Value| {
            let message = super::envelope(0, message.to_string().as_bytes());
            connection.send(format!("{:x}\r\n", message.len()).as_bytes());
            connection.send(&message);
            connection.send(b"\r\n");
        };
        send(&json!({ "start": { "process": { "pid": pid } } }));
        send(&json!({ "data": { "input": { "stdin": "aGk=" } } }));
        assert_eq!(cat.next().unwrap().1["event"]["data"]["stdout"], "aGk=");
        drop(connection);
        // The input is free again once the server has noticed that.
        wait_until("the input can be closed", PATIENCE, || {
            let reply = door.call("/process.Process/CloseStdin", &select(pid));
            reply.status == 200
        });
        cat.rest();
        // A closed one is closed already.
        let mut sleeper = door.begin(START, &shell("sleep 1000"), &[]);
        let pid = sleeper.next().unwrap().1["event"]["start"]["pid"]
            .as_i64()
            .unwrap();
        assert_eq!(
            door.ok("/process.Process/CloseStdin", &select(pid)),
            json!({})
        );
        let input = json!({ "process": { "pid": pid }, "input": { "stdin": "aGk=" } });
        door.fails(
            "/process.Process/SendInput",
            &input,
            400,
            "failed_precondition",
        );
        door.ok(
            "/process.Process/SendSignal",
            &json!({ "process": { "pid": pid.to_string() }, "signal": "9" }),
        );
        sleeper.rest();
    });
}

#[test]
fn a_terminal_has_a_size_and_job_control() {
    everywhere(|door| {
        let start = json!({
            "process": { "cmd": "/bin/sh", "args": ["-i"], "envs": { "PS1": "> ", "TERM": "dumb" } },
            "pty": { "size": { "cols": 100, "rows": 30 } },
        });
        let mut stream = door.begin(START, &start, &[]);
        let pid = stream.next().unwrap().1["event"]["start"]["pid"]
            .as_i64()
            .unwrap();
        let mut seen = String::new();
        let mut until = |wanted: &str| {
            while !seen.contains(wanted) {
                let (_, message) = stream.next().unwrap();
                let data = message["event"]["data"]["pty"].as_str().unwrap();
                seen.push_str(&String::from_utf8_lossy(&decode_base64(data)));
            }
            seen.clear();
        };
        let type_in = |text: &str| {
            let input = encode_base64(text.as_bytes());
            let input = json!({ "process": { "pid": pid }, "input": { "pty": input } });
            door.ok("/process.Process/SendInput", &input);
        };
        until("> ");
        type_in("stty size\n");
        until("30 100");
        let size =
            json!({ "process": { "pid": pid }, "pty": { "size": { "cols": 81, "rows": 25 } } });
        door.ok("/process.Process/Update", &size);
        type_in("stty size; echo $TERM\n");
        until("25 81");
        type_in("tty; sleep 1000 & jobs; kill %1\n");
        until("sleep 1000");
        door.fails("/process.Process/CloseStdin", &select(pid), 500, "internal");
        type_in("exit 4\n");
        let messages = stream.rest();
        let end = &messages[messages.len() - 2].1["event"]["end"];
        assert_eq!(end["exitCode"], 4, "{messages:?}");
        let mut plain = door.begin(START, &shell("sleep 1000"), &[]);
        let pid = plain.next().unwrap().1["event"]["start"]["pid"]
            .as_i64()
            .unwrap();
        let size =
            json!({ "process": { "pid": pid }, "pty": { "size": { "cols": 81, "rows": 25 } } });
        door.fails("/process.Process/Update", &size, 500, "internal");
        door.ok(
            "/process.Process/SendSignal",
            &json!({ "process": { "pid": pid }, "signal": 9 }),
        );
    });
}

#[test]
fn a_quiet_stream_shows_that_it_lives() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    let headers = [("keepalive-ping-interval", "1")];
    let mut stream = door.begin(START, &shell("sleep 1000"), &headers);
    let pid = stream.next().unwrap().1["event"]["start"]["pid"].clone();
    for _ in 0..2 {
        assert_eq!(
            stream.next().unwrap(),
            (0, json!({ "event": { "keepalive": {} } }))
        );
    }
    door.ok(
        "/process.Process/SendSignal",
        &json!({ "process": { "pid": pid }, "signal": 9 }),
    );
    stream.rest();
}

#[test]
fn streams_of_a_sandbox_that_is_killed_end() {
    on_a_host(|server| {
        let door = Door::open(server);
        let mut stream = door.begin(START, &shell("sleep 1000"), &[]);
        stream.next().unwrap();
        let target = format!("/sandboxes/{}", door.id);
        assert_eq!(
            super::api(server, "DELETE", &target, &Value::Null).status,
            204
        );
        // There is no end of the command, and clients ask now whether the sandbox runs.
        let (flags, end) = stream.next().unwrap();
        assert_eq!((flags, &end["error"]["code"]), (2, &"unavailable".into()));
        let text = end["error"]["message"].as_str().unwrap();
        assert!(text.contains("killed or reached its end of life"), "{text}");
        assert_eq!(door.request("GET", "/health", &[], b"").status, 502);
        assert_eq!(stream.rest(), []);
    });
}

#[test]
fn calls_under_which_their_sandbox_is_killed_say_that_it_is_gone() {
    on_a_host(|server| {
        let door = Door::open(server);
        // Nothing reads what is written after the first line.
        let script = "read line; echo begun; sleep 1000";
        let process = json!({ "cmd": "/bin/sh", "args": ["-c", script] });
        let start = json!({ "process": process, "stdin": true });
        let mut command = door.begin(START, &start, &[]);
        let pid = &command.next().unwrap().1["event"]["start"]["pid"];
        let mut watch = door.begin(
            "/filesystem.Filesystem/WatchDir",
            &json!({ "path": "~" }),
            &[],
        );
        assert_eq!(watch.next().unwrap().1, json!({ "start": {} }));
        let data = encode_base64(format!("\n{}", "x".repeat(600_000)).as_bytes());
        let input = json!({ "process": { "pid": pid }, "input": { "stdin": data } });
        let mut writing = door.connect();
        let headers = [
            ("e2b-sandbox-id", &*door.id),
            ("x-access-token", &door.token),
            ("content-type", "application/json"),
        ];
        let body = input.to_string();
        writing.send_request(
            "POST",
            "/process.Process/SendInput",
            &headers,
            body.as_bytes(),
        );
        assert!(command.next().unwrap().1["event"]["data"].is_object());
        let target = format!("/sandboxes/{}", door.id);
        let deleted = super::api(server, "DELETE", &target, &Value::Null);
        assert_eq!(deleted.status, 204);
        let head = writing.read_head();
        let reply = writing.read_body(head);
        assert_eq!(reply.status, 502, "{}", reply.text());
        assert!(reply.text().contains("was not found"), "{}", reply.text());
        for stream in [command, watch] {
            let messages = stream.rest();
            let (_, end) = messages.last().unwrap();
            assert_eq!(end["error"]["code"], "unavailable", "{messages:?}");
        }
    });
}

#[test]
fn a_kill_is_answered_when_the_process_is_gone() {
    everywhere(|door| {
        for pty in [Value::Null, json!({ "size": { "rows": 20, "cols": 80 } })] {
            for _ in 0..10 {
                // Its end is not told before its output, which this client does not read.
                let script = "yes | head -c 1000000; sleep 1000";
                let process = json!({ "cmd": "/bin/sh", "args": ["-c", script] });
                let start = json!({ "process": process, "pty": pty, "stdin": false });
                let mut stream = door.begin(START, &start, &[]);
                let pid = stream.next().unwrap().1["event"]["start"]["pid"].as_i64();
                let pid = i32::try_from(pid.unwrap()).unwrap();
                let signal = json!({ "process": { "pid": pid }, "signal": "SIGNAL_SIGKILL" });
                door.ok("/process.Process/SendSignal", &signal);
                assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
            }
        }
    });
}

#[test]
fn other_signals_and_processes_are_refused() {
    everywhere(|door| {
        let mut stream = door.begin(START, &shell("sleep 1000"), &[]);
        let pid = stream.next().unwrap().1["event"]["start"]["pid"]
            .as_i64()
            .unwrap();
        for signal in [json!("SIGNAL_SIGHUP"), json!(1), json!("x"), Value::Null] {
            let signal = json!({ "process": { "pid": pid }, "signal": signal });
            door.fails("/process.Process/SendSignal", &signal, 501, "unimplemented");
        }
        for process in [
            json!({}),
            json!({ "pid": "x" }),
            json!({ "pid": -1 }),
            json!(7),
            Value::Null,
        ] {
            let signal = json!({ "process": process, "signal": 9 });
            door.fails(
                "/process.Process/SendSignal",
                &signal,
                400,
                "invalid_argument",
            );
        }
        for process in [
            json!({ "pid": 4_000_000_000_u32 }),
            json!({ "tag": "none" }),
            json!({ "pid": 1 }),
        ] {
            let signal = json!({ "process": process, "signal": 9 });
            door.fails("/process.Process/SendSignal", &signal, 404, "not_found");
            let (code, _) = door.stream_fails(CONNECT, &json!({ "process": process }));
            assert_eq!(code, "not_found");
        }
        assert!(is_alive(i32::try_from(pid).unwrap()));
        door.ok(
            "/process.Process/SendSignal",
            &json!({ "process": { "pid": pid }, "signal": 9 }),
        );
        wait_until("it has ended", PATIENCE, || {
            !is_alive(i32::try_from(pid).unwrap())
        });
    });
}

#[test]
fn another_account_is_refused() {
    everywhere(|door| {
        let basic = |user: &str| format!("Basic {}", encode_base64(format!("{user}:").as_bytes()));
        let own = door.sh("echo $USER").text();
        for user in [own.trim(), "user"] {
            let headers = [("authorization", &*basic(user))];
            let messages = door.begin(START, &shell("echo hi"), &headers).rest();
            assert_eq!(Ran::of(&messages).text(), "hi\n", "{user}");
        }
        for user in ["nobody", "daemon", "no such"] {
            let headers = [("authorization", &*basic(user))];
            let messages = door.begin(START, &shell("echo hi"), &headers).rest();
            assert_eq!(messages[0].1["error"]["code"], "unauthenticated", "{user}");
        }
    });
}

#[test]
fn the_end_of_a_process_is_known_for_a_while_however_many_end_after_it() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    let first = door.sh("exit 7").pid;
    for _ in 0..300 {
        door.run(&json!({ "cmd": "true" }));
    }
    let messages = door.stream(CONNECT, &select(first));
    assert_eq!(messages[0].1["event"]["start"]["pid"], first);
    assert_eq!(messages[1].1["event"]["end"]["exitCode"], 7, "{messages:?}");
    assert_eq!((messages.len(), messages[2].0), (3, 2));
    door.fails(
        "/process.Process/CloseStdin",
        &select(first),
        404,
        "not_found",
    );
}

#[test]
fn of_several_processes_with_a_tag_one_that_runs_is_meant() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    let start = |program: &str, arguments: &[&str]| {
        let process = json!({ "cmd": program, "args": arguments });
        door.begin(
            START,
            &json!({ "process": process, "tag": "t", "stdin": false }),
            &[],
        )
    };
    let mut older = start("sleep", &["1000"]);
    let pid = older.next().unwrap().1["event"]["start"]["pid"].clone();
    start("true", &[]).rest();
    let selector = json!({ "process": { "tag": "t" } });
    let mut connected = door.begin(CONNECT, &selector, &[]);
    assert_eq!(connected.next().unwrap().1["event"]["start"]["pid"], pid);
    door.ok(
        "/process.Process/SendSignal",
        &json!({ "process": { "tag": "t" }, "signal": 9 }),
    );
    older.rest();
}

#[test]
fn no_message_has_a_part_of_a_character() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    let script = "i=0; while [ $i -lt 20000 ]; do printf '\\342\\230\\203\\303\\251'; i=$((i+1)); done; printf '\\342\\230'";
    let messages = door.stream(START, &shell(script));
    let parts: Vec<Vec<u8>> = messages
        .iter()
        .filter_map(|(_, message)| message["event"]["data"]["stdout"].as_str())
        .map(decode_base64)
        .collect();
    let (last, parts) = parts.split_last().unwrap();
    assert!(parts.iter().all(|part| std::str::from_utf8(part).is_ok()));
    // What never becomes a character comes at the end.
    assert_eq!(last, b"\xe2\x98");
    assert_eq!(parts.concat(), "☃é".repeat(20_000).as_bytes());
}
