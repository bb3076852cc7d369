//! Executions: the fields of a request, the events of an answer, the queue, and replays.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{
    Place, Ran, everywhere, everywhere_with, in_parallel, needs, on_a_machine, on_a_machine_with,
    without_pings,
};
use crate::fixture::{Mark, PATIENCE, assert_error, is_alive, output_of, pid_of, wait_until};

/// Code of each language that runs until it is interrupted.
const ENDLESS: [(&str, &str); 3] = [
    ("python", "while True: pass"),
    ("javascript", "while (true);"),
    ("bash", "while :; do :; done"),
];

#[test]
fn what_ends_a_script_ends_the_execution_only() {
    everywhere(|place| {
        needs!(place, "bash");
        let context = place.make(&json!({ "language": "bash", "id": "b" }));
        place.run("b", "x=kept");
        for options in ["-u", "-eu", "-euo pipefail"] {
            for code in ["echo \"$NOPE\"", "f() { : ${NOPE:?}; }; f", "((NOPE + 1))"] {
                let ran = place.run("b", &format!("set {options}; {code}; echo not"));
                ran.expect("completed", "kept");
                assert_eq!(ran.end()["exit_code"], 1, "{options} {code}");
                assert!(ran.text("stderr").contains("NOPE"));
                let ran = place.run("b", "set +eu; echo $x $$");
                assert_eq!(ran.text("stdout"), format!("kept {}\n", context["pid"]));
            }
        }
        place.run("b", "trap 'echo dbg' DEBUG");
        assert_eq!(place.run("b", "echo a").text("stdout"), "dbg\na\n");
        place.run("b", "trap - DEBUG");
        assert_eq!(place.run("b", "echo a").text("stdout"), "a\n");

        needs!(place, "python");
        place.python("p");
        needs!(place, "javascript");
        place.make(&json!({ "language": "javascript", "id": "j" }));
        for (id, code) in [
            ("p", "import sys; x = 1; sys.exit(3)"),
            ("j", "var x = 1; process.exit(3)"),
        ] {
            let ran = place.run(id, code);
            ran.expect("error", "kept");
            assert_eq!(ran.one("error")["name"], "SystemExit");
            assert_eq!(ran.end()["exit_code"], 3);
            let ran = place.run(id, "x");
            assert_eq!(ran.one("result")["data"]["text/plain"], "1");
        }
        place.run("j", "process.exit()").expect("completed", "kept");
        let ran = place.run("j", "Promise.reject(new Error('alone')); 1");
        ran.expect("error", "kept");
        assert_eq!(ran.one("error")["value"], "alone");
    });
}

#[test]
fn the_events_of_an_execution_in_each_language() {
    everywhere(|place| {
        let expect_end = |ran: &Ran, exit_code: Value| {
            let mut end = ran.end().clone();
            assert!(end["duration_ms"].is_u64());
            end.as_object_mut().unwrap().remove("duration_ms");
            let seq = ran.events.len() - 1;
            let expected = json!({
                "event": "end", "seq": seq, "reason": "completed", "state": "kept", "execution_count": 1,
                "exit_code": exit_code, "signal": null, "timed_out": false
            });
            assert_eq!(end, expected);
        };
        let expect_start = |ran: &Ran, context: &Value| {
            let expected = json!({
                "event": "start", "seq": 0, "execution": "e-1", "context": context["id"],
                "execution_count": 1, "generation": 1, "fresh": true, "pid": context["pid"],
                "stdout_offset": 0, "stderr_offset": 0
            });
            assert_eq!(ran.events[0], expected);
        };
        needs!(place, "python");
        let context = place.python("p");
        let ran = place.run(
            "p",
            "import sys\nprint('out')\nprint('err', file=sys.stderr)\n1 + 1",
        );
        expect_start(&ran, &context);
        let expected = [
            json!({ "event": "stdout", "seq": 1, "data": "out\n", "offset": 0, "bytes": 4 }),
            json!({ "event": "stderr", "seq": 2, "data": "err\n", "offset": 0, "bytes": 4 }),
            json!({
                "event": "result", "seq": 3, "is_main": true, "execution_count": 1,
                "data": { "text/plain": "2" }, "metadata": {}
            }),
        ];
        assert_eq!(ran.events[1..4], expected);
        expect_end(&ran, Value::Null);

        needs!(place, "javascript");
        let context = place.make(&json!({ "language": "javascript" }));
        let id = context["id"].as_str().unwrap();
        let ran = place.run(id, "console.log('out'); console.error('err'); ({a: 1})");
        expect_start(&ran, &context);
        assert_eq!(ran.names(), ["start", "stdout", "stderr", "result", "end"]);
        let data = &ran.one("result")["data"];
        assert_eq!(
            *data,
            json!({ "text/plain": "{ a: 1 }", "application/json": { "a": 1 } })
        );
        expect_end(&ran, Value::Null);

        let context = place.make(&json!({ "language": "bash" }));
        let id = context["id"].as_str().unwrap();
        let ran = place.run(id, "echo out; echo err >&2; (exit 3)");
        expect_start(&ran, &context);
        assert_eq!(
            (&*ran.text("stdout"), &*ran.text("stderr")),
            ("out\n", "err\n")
        );
        expect_end(&ran, json!(3));
    });
}

#[test]
fn a_field_of_the_wrong_type_is_refused_before_anything_happens() {
    on_a_machine(|place| {
        needs!(place, "python");
        place.python("a");
        let cases = [
            ("code", json!(5)),
            ("code", json!(null)),
            ("id", json!(5)),
            ("id", json!("a/b")),
            ("timeout", json!("1")),
            ("timeout", json!(-1)),
            ("kill_after", json!([])),
            ("stdin", json!(5)),
            ("allow_input", json!("yes")),
            ("env", json!([])),
            ("env", json!({ "A": {} })),
            ("on_disconnect", json!("stop")),
            ("encoding", json!("latin-1")),
            ("max_output_bytes", json!(-1)),
            ("max_output_bytes", json!("5")),
            ("format", json!("xml")),
            // None that a context of this language could have.
            ("backend", json!("")),
            ("backend", json!("node")),
        ];
        for (name, value) in cases {
            let mut body = json!({ "code": "ran = True" });
            body[name] = value;
            let reply = place.post("contexts/a/execute", &body);
            assert_error(&reply, 400, "bad_request");
            assert!(reply.text().contains(name), "{}", reply.text());
            assert_error(&place.post("execute", &body), 400, "bad_request");
        }
        let both = json!({ "code": "ran = True", "stdin": "x", "allow_input": true });
        assert_error(&place.post("contexts/a/execute", &both), 400, "bad_request");
        for body in ["", "[]", "{", "5", "{}"] {
            let reply = place.request("POST", "contexts/a/execute", body);
            assert_error(&reply, 400, "bad_request");
        }
        assert_eq!(place.value("a", "'ran' in globals()"), "False");
        // Absent, and unknown.
        let body = json!({
            "code": "1", "id": null, "timeout": null, "kill_after": null, "stdin": null, "allow_input": null,
            "env": null, "on_disconnect": null, "encoding": null, "max_output_bytes": null, "format": null,
            "colour": "blue"
        });
        assert_eq!(place.execute("a", &body).result(), "1");
        assert_eq!(place.ids(), ["a"]);
        // What bash cannot be given.
        place.make(&json!({ "language": "bash", "id": "b" }));
        for body in [
            json!({ "code": "a\0b" }),
            json!({ "code": "a", "stdin": "\0" }),
            json!({ "code": "a", "env": { "a-b": "c" } }),
        ] {
            assert_error(&place.post("contexts/b/execute", &body), 400, "bad_request");
        }
    });
}

#[test]
fn errors_have_a_name_a_value_and_the_codes_lines() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("p");
        place.run("p", "def divide(a, b):\n    return a / b");
        let ran = place.run("p", "print('before')\ndivide(1, 0)\nprint('never')");
        ran.expect("error", "kept");
        let error = ran.one("error");
        assert_eq!(
            (&error["name"], &error["value"]),
            (&json!("ZeroDivisionError"), &json!("division by zero"))
        );
        let lines = error["traceback"].as_array().unwrap().iter();
        let lines: Vec<_> = lines.map(|line| line.as_str().unwrap()).collect();
        // Newer ones point at the place in a line of its own.
        let lines: Vec<_> = lines
            .into_iter()
            .filter(|line| !line.trim().starts_with(['^', '~']))
            .collect();
        let expected = [
            "Traceback (most recent call last):",
            "  File \"<cell 2>\", line 2, in <module>",
            "    divide(1, 0)",
            "  File \"<cell 1>\", line 2, in divide",
            "    return a / b",
            "ZeroDivisionError: division by zero",
        ];
        assert_eq!(lines, expected);
        assert_eq!(ran.text("stdout"), "before\n");
        assert_eq!(ran.end()["exit_code"], Value::Null);

        for (code, reason, exit_code) in [
            ("import sys; sys.exit()", "completed", json!(0)),
            ("sys.exit(0)", "completed", json!(0)),
            ("sys.exit(3)", "error", json!(3)),
            ("sys.exit('text')", "error", json!(1)),
        ] {
            let ran = place.run("p", code);
            ran.expect(reason, "kept");
            assert_eq!(ran.end()["exit_code"], exit_code, "{code}");
        }
        assert_eq!(place.value("p", "divide(4, 2)"), "2.0");

        needs!(place, "javascript");
        place.make(&json!({ "language": "javascript", "id": "j" }));
        let ran = place.run(
            "j",
            "function f() {\n  throw new RangeError('too far')\n}\nf()",
        );
        ran.expect("error", "kept");
        let error = ran.one("error");
        assert_eq!(
            (&error["name"], &error["value"]),
            (&json!("RangeError"), &json!("too far"))
        );
        let traceback = error["traceback"].to_string();
        assert!(traceback.contains("cell-1:2"), "{traceback}");
        assert!(!traceback.contains("node:"), "{traceback}");
    });
}

#[test]
fn what_belongs_to_one_execution_is_gone_with_it() {
    everywhere(|place| {
        let cases = [
            (
                "python",
                "import os, sys; print(os.environ.get('A'), os.environ.get('HOME') == '/x', repr(sys.stdin.read()))",
                "b True 'line\\nrest'\n",
                "None False ''\n",
            ),
            (
                "javascript",
                "let read = ''; for await (const part of process.stdin) read += part; \
                 console.log(process.env.A, process.env.HOME == '/x', JSON.stringify(read))",
                "b true \"line\\nrest\"\n",
                "undefined false \"\"\n",
            ),
            (
                "bash",
                "echo ${A-unset} $([ $HOME = /x ]; echo $?) \"$(cat)\"",
                "b 0 line\nrest\n",
                "unset 1 \n",
            ),
        ];
        for (language, code, with, without) in cases {
            needs!(place, language);
            place.make(&json!({ "language": language, "id": language }));
            let body =
                json!({ "code": code, "stdin": "line\nrest", "env": { "A": "b", "HOME": "/x" } });
            let ran = place.execute(language, &body);
            assert_eq!(ran.text("stdout"), with, "{language}: {ran:?}");
            let ran = place.run(language, code);
            assert_eq!(ran.text("stdout"), without, "{language}: {ran:?}");
        }
    });
}

#[test]
fn output_is_exact_in_both_encodings() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        // Characters that end in another read than they begin in, and bytes that are no characters.
        let code = "import os, time\n\
            def parts(*parts):\n  for part in parts:\n    os.write(1, part); time.sleep(0.02)\n\
            parts(b'a\\xe2', b'\\x82', b'\\xac b', b'\\xf0\\x9f', b'\\x98\\x80\\n')\n\
            parts(b'\\xff\\xfe', b'\\x00\\x1b[1m', b'\\xe2\\x82')\n\
            os.write(2, '\\u2028\\u2029\\x85\"\\\\'.encode())";
        let ran = place.run("a", code);
        assert_eq!(
            ran.text("stdout"),
            "a\u{20ac} b\u{1f600}\n\u{fffd}\u{fffd}\0\u{1b}[1m\u{fffd}"
        );
        assert_eq!(ran.text("stderr"), "\u{2028}\u{2029}\u{85}\"\\");
        let raw = place.replay("a", "e-1", "?encoding=base64");
        let bytes = "a\u{20ac} b\u{1f600}\n".as_bytes();
        let bytes = [bytes, b"\xff\xfe\0\x1b[1m\xe2\x82"].concat();
        assert_eq!(output_of(&raw, "stdout", 0).data, bytes);
        let ran = place.execute("a", &json!({ "code": code, "encoding": "base64" }));
        let from = ran.one("start")["stdout_offset"].as_u64().unwrap();
        assert_eq!(output_of(&ran.events, "stdout", from).data, bytes);
        // No line of an answer is cut where a client may cut text.
        let target = place.target("contexts/a/executions/e-1/events");
        let body = place.connect().request("GET", &target, &[], b"").text();
        assert!(!body.contains(['\u{2028}', '\u{2029}', '\u{85}']), "{body}");
        assert!(body.contains("\\u2028\\u2029\\u0085"), "{body}");
    });
}

#[test]
fn output_beyond_the_limit_is_counted() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        let code = "import sys\nprint('x' * 99)\nprint('y' * 99, file=sys.stderr)\nprint('z' * 1_000_000)\n7";
        let ran = place.execute("a", &json!({ "code": code, "max_output_bytes": 150 }));
        ran.expect("completed", "kept");
        let (out, err) = (ran.text("stdout"), ran.text("stderr"));
        assert_eq!(out.len() + err.len(), 150);
        assert_eq!(ran.result(), "7");
        let dropped: Vec<_> = ran.all("dropped").collect();
        let lost = |stream: &str| {
            let mut dropped = dropped.iter();
            dropped
                .find(|event| event["stream"] == stream)
                .map_or(0, |event| event["bytes"].as_u64().unwrap())
        };
        assert_eq!(lost("stdout") + out.len() as u64, 1_000_101);
        assert_eq!(lost("stderr") + err.len() as u64, 100);
        let names = ran.names();
        assert_eq!(
            names[names.len() - 1 - dropped.len()..][0],
            "dropped",
            "{names:?}"
        );
        // Nothing at all.
        let ran = place.execute("a", &json!({ "code": "print('x')", "max_output_bytes": 0 }));
        assert_eq!(ran.names(), ["start", "dropped", "end"]);
        assert_eq!(ran.one("dropped")["bytes"], 2);
        // The limit is of one execution.
        assert_eq!(place.run("a", "print('x')").text("stdout"), "x\n");
    });
}

#[test]
fn an_id_makes_an_execution_repeatable() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        place.run("a", "n = 0");
        let body = json!({ "id": "once", "code": "n += 1; print(n); n" });
        let first = place.execute("a", &body);
        let again = place.execute("a", &body);
        assert_eq!(first.events, again.events);
        assert_eq!(place.value("a", "n"), "1");
        for (name, value) in [
            ("code", json!("2")),
            ("stdin", json!("x")),
            ("env", json!({ "A": "b" })),
        ] {
            let mut other = body.clone();
            other[name] = value;
            assert_error(&place.post("contexts/a/execute", &other), 409, "id_in_use");
        }
        // Attached to while it runs: both have all of it, and it ends with the last of them.
        let body =
            json!({ "id": "ask", "code": "print('asked'); print(input())", "allow_input": true });
        let (first, _) = place.begin_running("a", &body);
        let mut second = place.begin("a", &body);
        let mut seen = Vec::new();
        while seen
            .last()
            .is_none_or(|event: &Value| event["event"] != "input")
        {
            seen.push(second.next_output().unwrap());
        }
        drop(first);
        assert_eq!(place.context("a")["execution"], "ask");
        assert_eq!(
            place
                .post("contexts/a/input", &json!({ "value": "yes" }))
                .status,
            200
        );
        seen.extend(second);
        let ran = Ran::of(seen);
        ran.expect("completed", "kept");
        assert_eq!(ran.text("stdout"), "asked\nyes\n");
    });
}

#[test]
fn executions_run_one_after_another_in_the_order_of_arrival() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        let (first, _) = place.begin_running(
            "a",
            &json!({ "code": "order = []; input()", "allow_input": true }),
        );
        let mut waiting = Vec::new();
        for number in 0..64 {
            let mut stream =
                place.begin("a", &json!({ "code": format!("order.append({number})") }));
            let queued = stream.next_output().unwrap();
            let expected = json!({
                "event": "queued", "seq": 0, "execution": format!("e-{}", number + 2), "position": number + 1
            });
            assert_eq!(queued, expected);
            waiting.push((stream, queued));
        }
        assert_eq!(place.context("a")["queued"], 64);
        let reply = place.post("contexts/a/execute", &json!({ "code": "1" }));
        assert_error(&reply, 503, "queue_full");
        // One that leaves makes room; its code never runs.
        drop(waiting.remove(9));
        wait_until("it has left the queue", PATIENCE, || {
            place.context("a")["queued"] == 63
        });
        let body = json!({ "execution": "e-21", "kill_after": 20 });
        let reply = place.post("contexts/a/interrupt", &body);
        assert_eq!(
            reply.json(),
            json!({ "interrupted": true, "execution": "e-21", "ended": true })
        );
        wait_until("input is asked for", PATIENCE, || {
            place
                .post("contexts/a/input", &json!({ "value": "" }))
                .status
                == 200
        });
        assert_eq!(first.last().unwrap()["reason"], "completed");
        for (stream, queued) in waiting {
            let number = &queued["position"];
            let ran = Ran::of([vec![queued.clone()], stream.collect()].concat());
            if *number == 20 {
                ran.expect("cancelled", "kept");
                assert_eq!(ran.names(), ["queued", "end"]);
            } else {
                ran.expect("completed", "kept");
            }
        }
        let left: Vec<_> = (0..64).filter(|number| ![9, 19].contains(number)).collect();
        assert_eq!(place.value("a", "order"), format!("{left:?}"));
        let known = place.document("contexts/a/executions/e-11");
        assert_eq!(
            (&known["state"], &known["reason"]),
            (&json!("ended"), &json!("cancelled"))
        );
    });
}

#[test]
fn two_hundred_executions_of_eight_clients() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        place.run("a", "seen = []");
        in_parallel(8, |client| {
            let mut connection = place.connect();
            for number in 0..25 {
                let code = format!(
                    "seen.append(({client}, {number})); print('{client}-{number}'); len(seen)"
                );
                let target = place.target("contexts/a/execute");
                let reply = connection.request(
                    "POST",
                    &target,
                    &[],
                    json!({ "code": code }).to_string().as_bytes(),
                );
                let ran = Ran::of(crate::fixture::events_of(&reply.body));
                ran.expect("completed", "kept");
                assert_eq!(ran.text("stdout"), format!("{client}-{number}\n"));
            }
        });
        let orderly =
            "all([n for c, n in seen if c == client] == list(range(25)) for client in range(8))";
        assert_eq!(
            place.value("a", &format!("len(seen), {orderly}")),
            "(200, True)"
        );
    });
}

#[test]
fn contexts_run_in_parallel() {
    on_a_machine(|place| {
        needs!(place, "bash");
        // Each waits until all are there.
        let directory = place.directory.display();
        for id in ["a", "b", "c", "d"] {
            place.make(&json!({ "language": "bash", "id": id }));
        }
        in_parallel(4, |number| {
            let id = ["a", "b", "c", "d"][number];
            let code = format!(
                "touch {directory}/{id}; until [ -e {directory}/a -a -e {directory}/b -a -e {directory}/c -a -e {directory}/d ]; do sleep 0.01; done"
            );
            place
                .execute(id, &json!({ "code": code, "timeout": 20 }))
                .expect("completed", "kept");
        });
    });
}

#[test]
fn an_interrupt_keeps_the_state() {
    everywhere(|place| {
        for (language, endless) in ENDLESS {
            needs!(place, language);
            place.make(&json!({ "language": language, "id": language, "backend": "auto" }));
            let route = format!("contexts/{language}/interrupt");
            // An idle one ignores it.
            let idle = json!({ "interrupted": false, "execution": null, "ended": false });
            assert_eq!(place.post(&route, &json!({})).json(), idle);
            assert_eq!(place.request("POST", &route, "").json(), idle);
            place
                .run(language, if language == "bash" { "x=5" } else { "x = 5" })
                .expect("completed", "kept");
            // The answer waits for the end as long as the code may take to its kill, and two seconds otherwise.
            for body in [
                json!({ "kill_after": 20 }),
                json!({ "kill_after": 20, "execution": "mine" }),
            ] {
                let id = &body["execution"];
                let (running, start) =
                    place.begin_running(language, &json!({ "code": endless, "id": id }));
                let done = place.post(&route, &body).json();
                assert_eq!(
                    done,
                    json!({ "interrupted": true, "execution": start["execution"], "ended": true })
                );
                let end = running.last().unwrap();
                assert_eq!(
                    (&end["reason"], &end["state"]),
                    (&json!("interrupted"), &json!("kept")),
                    "{language}: {end}"
                );
                assert_eq!(end["timed_out"], false);
            }
            let show = ["echo $x", "console.log(x)", "print(x)"];
            let show = show[["bash", "javascript", "python"]
                .iter()
                .position(|name| *name == language)
                .unwrap()];
            assert_eq!(place.run(language, show).text("stdout"), "5\n");
            // One that has ended, and one that never was.
            let done = place.post(&route, &json!({ "execution": "mine" })).json();
            assert_eq!(done["interrupted"], false);
            assert_error(
                &place.post(&route, &json!({ "execution": "none" })),
                404,
                "not_found",
            );
        }
    });
}

/// SIGINT comes after the bridge has said that the code begins, and before Node.js watches for it.
#[test]
fn an_interrupt_just_before_a_script_ends_it() {
    const SIGINT_BEFORE_SECOND_SCRIPT: &str = "
        const { Script } = require('vm');
        const { watchdogHasPendingSigint } = process.binding('contextify');
        const original = Script.prototype.runInThisContext;
        let scripts = 0;
        Script.prototype.runInThisContext = function (options) {
            scripts += 1;
            if (scripts === 2) {
                Script.prototype.runInThisContext = original;
                require('child_process').execFileSync('kill', ['-INT', process.pid]);
                while (!watchdogHasPendingSigint());
            }
            return original.call(this, options);
        };";
    everywhere(|place| {
        needs!(place, "javascript");
        place.make(&json!({ "language": "javascript", "id": "j" }));
        place
            .run("j", SIGINT_BEFORE_SECOND_SCRIPT)
            .expect("completed", "kept");
        // The first script of an execution drops what came before.
        let endless = json!({ "code": "while (true);", "timeout": 10, "kill_after": 1 });
        let ran = place.execute("j", &endless);
        // The code has sent it, and not the server.
        ran.expect("error", "kept");
        assert_eq!(ran.one("error")["name"], "Interrupted");
        place.run("j", "scripts").expect("completed", "kept");
    });
}

/// Node.js closes what runs code before it sends itself a signal, and may then survive it.
#[test]
fn an_interpreter_that_can_run_nothing_more_is_lost() {
    everywhere(|place| {
        needs!(place, "javascript");
        place.make(&json!({ "language": "javascript", "id": "j" }));
        place.run("j", "process.kill(process.pid, 'SIGINT'); while (true);");
        place.run("j", "1 + 1").expect("died", "lost");
    });
}

#[test]
fn what_does_not_obey_an_interrupt_is_said_and_can_be_killed() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        place.run("a", "x = 5");
        let stubborn = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('now')\nwhile True: time.sleep(1)";
        let (mut running, start) = place.begin_running("a", &json!({ "code": stubborn }));
        assert_eq!(running.next_output().unwrap()["data"], "now\n");
        let done = place.post("contexts/a/interrupt", &json!({})).json();
        assert_eq!(
            done,
            json!({ "interrupted": true, "execution": "e-2", "ended": false })
        );
        assert_eq!(place.context("a")["state"], "busy");
        let done = place
            .post("contexts/a/interrupt", &json!({ "kill_after": 0.05 }))
            .json();
        assert_eq!(done["ended"], true);
        let end = running.last().unwrap();
        assert_eq!(
            (&end["reason"], &end["state"], &end["signal"]),
            (&json!("interrupted"), &json!("lost"), &json!(9))
        );
        assert!(!is_alive(pid_of(&start)));
        assert_error(
            &place.post("contexts/a/execute", &json!({ "code": "1" })),
            409,
            "context_dead",
        );
    });
}

#[test]
fn a_timeout_ends_the_code_and_says_what_it_cost() {
    everywhere(|place| {
        for (language, endless) in ENDLESS {
            needs!(place, language);
            place.make(&json!({ "language": language, "id": language }));
            let begun = Instant::now();
            let ran = place.execute(language, &json!({ "code": endless, "timeout": 0.3 }));
            ran.expect("timeout", "kept");
            assert_eq!(ran.end()["timed_out"], true);
            assert!(begun.elapsed() >= Duration::from_millis(300));
            assert!(ran.end()["duration_ms"].as_u64().unwrap() >= 300);
        }
        needs!(place, "python");
        let stubborn =
            "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass";
        let ran = place.execute(
            "python",
            &json!({ "code": stubborn, "timeout": 0.2, "kill_after": 0.2 }),
        );
        ran.expect("timeout", "lost");
        assert_eq!(
            (&ran.end()["timed_out"], &ran.end()["signal"]),
            (&json!(true), &json!(9))
        );
        assert_eq!(place.context("python")["state"], "dead");
        // Waiting in the queue does not count.
        place.python("q");
        let (first, _) =
            place.begin_running("q", &json!({ "code": "input()", "allow_input": true }));
        let second = place.begin("q", &json!({ "code": "1", "timeout": 0.2 }));
        let waited = Instant::now();
        wait_until("longer than its timeout", PATIENCE, || {
            waited.elapsed() > Duration::from_millis(400)
        });
        place.post("contexts/q/input", &json!({ "value": "" }));
        drop(first);
        Ran::of(second.collect()).expect("completed", "kept");
    });
}

#[test]
fn a_client_that_disconnects_interrupts_its_execution_or_keeps_it() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        place.run("a", "x = 5");
        let endless = json!({ "code": "while True: pass", "id": "left" });
        let (running, _) = place.begin_running("a", &endless);
        drop(running);
        place.wait_idle("a");
        let known = place.document("contexts/a/executions/left");
        assert_eq!(known["reason"], "disconnected");
        assert_eq!(place.value("a", "x"), "5");
        // Never more than SIGINT.
        let code =
            "try:\n  print('now')\n  while True: pass\nexcept KeyboardInterrupt: y = input()";
        let body = json!({ "code": code, "id": "stays", "allow_input": true });
        let (mut running, _) = place.begin_running("a", &body);
        assert_eq!(running.next_output().unwrap()["data"], "now\n");
        drop(running);
        wait_until("it asks", PATIENCE, || {
            place
                .post("contexts/a/input", &json!({ "value": "z" }))
                .status
                == 200
        });
        place.wait_idle("a");
        assert_eq!(place.value("a", "y"), "'z'");
        // Kept: it goes on, and is followed by its events.
        let body = json!({ "code": "print('on'); print(input())", "id": "kept", "allow_input": true, "on_disconnect": "keep" });
        drop(place.begin_running("a", &body));
        wait_until("it asks", PATIENCE, || {
            place
                .post("contexts/a/input", &json!({ "value": "off" }))
                .status
                == 200
        });
        let ran = Ran::of(place.replay("a", "kept", "?follow=1"));
        ran.expect("completed", "kept");
        assert_eq!(ran.text("stdout"), "on\noff\n");
        // Queued: one leaves the queue, the other does not.
        let (running, _) =
            place.begin_running("a", &json!({ "code": "input()", "allow_input": true }));
        let queued = |id: &str, then: &str| {
            let code = format!("{id} = 1");
            let mut stream = place.begin(
                "a",
                &json!({ "code": code, "id": id, "on_disconnect": then }),
            );
            assert_eq!(stream.next_output().unwrap()["event"], "queued");
        };
        queued("stay", "keep");
        queued("leave", "interrupt");
        wait_until("one has left", PATIENCE, || {
            place.context("a")["queued"] == 1
        });
        assert_eq!(
            place.document("contexts/a/executions/leave")["reason"],
            "cancelled"
        );
        place.post("contexts/a/input", &json!({ "value": "" }));
        drop(running);
        place.wait_idle("a");
        let ran = Ran::of(place.replay("a", "stay", "?follow=1"));
        ran.expect("completed", "kept");
        assert_eq!(
            place.value("a", "'stay' in globals(), 'leave' in globals()"),
            "(True, False)"
        );
    });
}

#[test]
fn events_can_be_read_again_from_anywhere() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        let code = "import sys\nfor i in range(5):\n  print(i); display(i); print(i, file=sys.stderr)\n1/0";
        let ran = place.run("a", code);
        let all = &ran.events;
        assert_eq!(place.replay("a", "e-1", ""), *all);
        for (after, _) in all.iter().enumerate() {
            let rest = place.replay("a", "e-1", &format!("?after={after}&follow=1"));
            assert_eq!(rest, all[after + 1..]);
        }
        assert_eq!(
            place.replay("a", "e-1", "?after=100000"),
            Vec::<Value>::new()
        );
        for query in ["after=-1", "after=x", "follow=2", "encoding=x"] {
            let route = format!("contexts/a/executions/e-1/events?{query}");
            assert_error(&place.get(&route), 400, "bad_request");
        }
        let known = place.document("contexts/a/executions/e-1");
        let expected = json!({
            "id": "e-1", "context": "a", "state": "ended", "reason": "error", "execution_count": 1,
            "events": all.len()
        });
        assert_eq!(known, expected);
        // Two viewers of one that runs, from different places; one that does not follow has what there is.
        let code = "for i in range(3): print(input())";
        let (asking, _) = place.begin_running(
            "a",
            &json!({ "code": code, "allow_input": true, "id": "live" }),
        );
        let answer = |value: &str| {
            let body = json!({ "value": value });
            wait_until("it asks", PATIENCE, || {
                place.post("contexts/a/input", &body).status == 200
            });
        };
        answer("one");
        wait_until("it is shown", PATIENCE, || {
            place.document("contexts/a/executions/live")["events"].as_u64() >= Some(4)
        });
        let first = place.replay("a", "live", "");
        assert_eq!(first[0]["event"], "start");
        assert_ne!(first.last().unwrap()["event"], "end");
        let follow = |query: &str| {
            let route = place.target(&format!("contexts/a/executions/live/events?{query}"));
            place.connect().stream("GET", &route, b"")
        };
        let (whole, rest) = (follow("follow=1"), follow("follow=1&after=2"));
        answer("two");
        answer("three");
        let whole = without_pings(whole.collect());
        assert_eq!(without_pings(rest.collect()), whole[3..]);
        assert_eq!(Ran::of(whole).text("stdout"), "one\ntwo\nthree\n");
        drop(asking);
    });
}

#[test]
fn a_replay_says_what_it_lacks_and_the_one_who_asked_lacks_nothing() {
    on_a_machine_with(&[("SBX_LOG_BYTES", "65536")], |place| {
        needs!(place, "python");
        place.python("a");
        let code = "for i in range(20_000): print(f'{i:099}')\ndisplay('x')\n1/0";
        let ran = place.run("a", code);
        ran.expect("error", "kept");
        let out = ran.text("stdout");
        assert!(
            out.lines()
                .enumerate()
                .all(|(number, line)| line.parse() == Ok(number))
        );
        assert_eq!(out.len(), 2_000_000);
        let again = place.replay("a", "e-1", "");
        assert_eq!(again[0], ran.events[0]);
        assert_eq!(again.last(), ran.events.last());
        assert!(again.contains(ran.one("error")) && again.contains(ran.one("display")));
        // Every number is there, or said to be lost.
        let mut next = 0;
        let mut lost = 0;
        for event in &again {
            if event["event"] == "dropped" {
                assert_eq!(event["from_seq"], next);
                assert!(event.get("seq").is_none());
                next = event["to_seq"].as_u64().unwrap() + 1;
                lost += 1;
            } else {
                assert_eq!(*event, ran.events[usize::try_from(next).unwrap()]);
                next += 1;
            }
        }
        assert!(lost > 0);
        assert_eq!(next, ran.events.len() as u64);
    });
}

#[test]
fn a_large_value_takes_no_lines_from_a_slow_client() {
    on_a_machine_with(&[("SBX_LOG_BYTES", "65536")], |place| {
        needs!(place, "python");
        place.python("a");
        let code = "for i in range(5000): print(f'{i:099}')\n\
            display({'text/plain': 'x' * (6 << 20)}, raw=True)\n\
            for i in range(5000, 6000): print(f'{i:099}')";
        let stream = place.begin("a", &json!({ "code": code }));
        wait_until("the value is there", PATIENCE, || {
            let execution = place.document("contexts/a/executions/e-1");
            execution["events"].as_u64() > Some(2)
        });
        let ran = Ran::of(stream.collect());
        ran.expect("completed", "kept");
        assert_eq!(ran.all("dropped").count(), 0);
        let out = ran.text("stdout");
        assert!(
            out.lines()
                .enumerate()
                .all(|(number, line)| line.parse() == Ok(number))
        );
        assert_eq!(out.lines().count(), 6000);
        // What is too large for the log is gone with the client that has taken it.
        wait_until("it is forgotten", PATIENCE, || {
            let target = place.target("contexts/a/executions/e-1/events");
            place.connect().request("GET", &target, &[], b"").body.len() < 1 << 20
        });
    });
}

#[test]
fn what_runs_is_never_forgotten() {
    on_a_machine(|place| {
        needs!(place, "python");
        place.python("a");
        let body = json!({ "code": "input()", "allow_input": true, "id": "long" });
        let (running, _) = place.begin_running("a", &body);
        for _ in 0..140 {
            let mut waiting = place.begin("a", &json!({ "code": "1" }));
            let queued = waiting.next_output().unwrap();
            let body = json!({ "execution": queued["execution"] });
            assert_eq!(
                place.post("contexts/a/interrupt", &body).json()["ended"],
                true
            );
        }
        assert_eq!(
            place.document("contexts/a/executions/long")["state"],
            "running"
        );
        let body = json!({ "execution": "long" });
        assert_eq!(
            place.post("contexts/a/interrupt", &body).json()["ended"],
            true
        );
        assert_eq!(running.last().unwrap()["reason"], "interrupted");
    });
}

#[test]
fn a_timeout_is_told_also_after_an_interrupt_that_was_ignored() {
    on_a_machine(|place| {
        needs!(place, "python");
        place.python("a");
        let code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('now')\nwhile True: pass";
        let body = json!({ "code": code, "timeout": 3, "kill_after": 0.1 });
        let (mut running, _) = place.begin_running("a", &body);
        assert_eq!(running.next_output().unwrap()["data"], "now\n");
        assert_eq!(
            place.post("contexts/a/interrupt", &json!({})).json()["ended"],
            false
        );
        let end = running.last().unwrap();
        assert_eq!(
            (&end["reason"], &end["timed_out"]),
            (&json!("timeout"), &json!(true))
        );
    });
}

#[test]
fn the_last_sixty_four_executions_are_known() {
    on_a_machine(|place| {
        needs!(place, "bash");
        place.make(&json!({ "language": "bash", "id": "a" }));
        for number in 0..70 {
            place.run("a", &format!("echo {number}"));
        }
        let known = place.document("contexts/a/executions");
        let known = known.as_array().unwrap();
        assert_eq!(known.len(), 64);
        assert_eq!(
            (&known[0]["id"], &known[63]["id"]),
            (&json!("e-7"), &json!("e-70"))
        );
        assert_eq!(known[63]["execution_count"], 70);
        assert_error(&place.get("contexts/a/executions/none"), 404, "not_found");
        assert_error(
            &place.get("contexts/a/executions/none/events"),
            404,
            "not_found",
        );
    });
}

#[test]
fn the_simple_shape() {
    everywhere(|place| {
        needs!(place, "python");
        let lines = |reply: &crate::fixture::Reply| -> Vec<Value> {
            assert_eq!(reply.status, 200, "{}", reply.text());
            reply
                .text()
                .lines()
                .map(|line| serde_json::from_str(line).unwrap())
                .collect()
        };
        let target = match place.sandbox {
            None => "/execute".to_owned(),
            Some(sandbox) => format!("/sandboxes/{}/execute", sandbox.id),
        };
        let simply = |body: Value| {
            lines(
                &place
                    .connect()
                    .request("POST", &target, &[], body.to_string().as_bytes()),
            )
        };
        assert_eq!(
            simply(json!({ "code": "x = 5; print('out')\nx + 1" })),
            [json!({ "text": "out\n" }), json!({ "text": "6\n" })]
        );
        let picture = "class P:\n  def _repr_png_(self): return b'\\x89PNG'\n  def __repr__(self): return 'p'\nP()";
        assert_eq!(
            simply(json!({ "code": picture })),
            [json!({ "image": "iVBORw==" })]
        );
        let shown = simply(json!({ "code": "import sys; print('err', file=sys.stderr)\nx / 0" }));
        assert_eq!(shown[0], json!({ "text": "err\n" }));
        let error = shown[1]["error"].as_str().unwrap();
        assert!(
            error.starts_with("Traceback")
                && error.ends_with("ZeroDivisionError: division by zero"),
            "{error}"
        );
        assert_eq!(shown.len(), 2);
        // A type that it has no word for.
        assert_eq!(
            simply(json!({ "code": "display({'text/html': '<b>'}, raw=True)" })),
            Vec::<Value>::new()
        );
        for (code, more, says) in [
            ("import os; os._exit(3)", json!({}), "lost"),
            ("while True: pass", json!({ "timeout": 0.2 }), "time"),
        ] {
            let mut body = more;
            body["code"] = json!(code);
            let shown = simply(body);
            let error = shown.last().unwrap()["error"].as_str().unwrap();
            assert!(error.contains(says), "{shown:?}");
        }
        // Through the other routes by a field, and as it is said there.
        let body = json!({ "code": "print('x')", "format": "simple" });
        assert_eq!(
            lines(&place.post("execute", &body)),
            [json!({ "text": "x\n" })]
        );
        place.python("a");
        assert_eq!(
            lines(&place.post("contexts/a/execute", &body)),
            [json!({ "text": "x\n" })]
        );
        assert_error(
            &place.connect().request("POST", &target, &[], b"{}"),
            400,
            "bad_request",
        );
        assert_error(
            &place.connect().request("GET", &target, &[], b""),
            405,
            "method_not_allowed",
        );
    });
}

#[test]
fn logs_have_what_was_written_between_executions() {
    everywhere(|place| {
        needs!(place, "bash");
        place.make(&json!({ "language": "bash", "id": "a" }));
        let fifo = place.directory.join("gate");
        let gate = fifo.display();
        let ran = place.run(
            "a",
            &format!("mkfifo {gate}; (read line < {gate}; echo late) & echo early"),
        );
        assert_eq!(ran.text("stdout"), "early\n");
        place.post("exec", &json!({ "cmd": format!("echo > {gate}") }));
        wait_until("it is logged", PATIENCE, || {
            place.logged("a", "stdout") == "early\nlate\n"
        });
        let ran = place.run("a", "echo next");
        assert_eq!(ran.text("stdout"), "next\n");
        assert_eq!(ran.one("start")["stdout_offset"], 11);
        assert_eq!(place.logged("a", "stdout"), "early\nlate\nnext\n");
    });
}

#[test]
fn server_ends_with_all_contexts_and_says_so_to_their_clients() {
    on_a_machine(|place| {
        needs!(place, "python");
        let mut server = crate::fixture::Server::builder()
            .env("PATH", super::PATH)
            .start();
        let here = Place {
            server: &server,
            ..place
        };
        let mark = Mark::new();
        let made = here.python("a");
        here.run(
            "a",
            &format!("import subprocess; subprocess.Popen(['setsid', 'sleep', '{mark}'])"),
        );
        mark.wait_for(1);
        let (running, _) = here.begin_running("a", &json!({ "code": "while True: pass" }));
        server.signal(15);
        let last = running.last();
        server.wait_for_exit(PATIENCE);
        assert!(!is_alive(pid_of(&made)));
        if let Some(last) = last {
            assert_eq!(
                (&last["event"], &last["state"]),
                (&json!("end"), &json!("lost")),
                "{last}"
            );
        }
    });
}

#[test]
fn bodies_as_large_as_json_may_be() {
    everywhere_with(&[], |place| {
        needs!(place, "python");
        place.python("a");
        let text = "x\u{e9}\u{1f600}\"\\\n".repeat(300_000);
        let body = json!({ "code": format!("t = {text:?}; len(t)", text = text.replace('\u{1f600}', "y")), "timeout": 60 });
        let ran = place.execute("a", &body);
        assert_eq!(ran.result(), (6 * 300_000).to_string());
        let body = json!({ "code": "import sys; t = sys.stdin.read(); len(t)", "stdin": text });
        assert_eq!(
            place.execute("a", &body).result(),
            (6 * 300_000).to_string()
        );
        let too_large = "x".repeat(17 << 20);
        assert_error(
            &place.post("contexts/a/execute", &json!({ "code": too_large })),
            413,
            "too_large",
        );
    });
}
