//! What a script is: its code runs as a file of its own would, and everything of exec holds for it.

use serde_json::json;

use super::{LANGUAGES, everywhere};
use crate::fixture::{PATIENCE, assert_error, wait_until};

#[test]
fn code_of_every_language_runs_by_its_name_and_its_aliases() {
    everywhere(|place| {
        for (language, code) in place.languages() {
            assert_eq!(place.run(language, code), "hello\n", "{language}");
        }
        for (alias, code) in [
            ("py", "print(1)"),
            ("sh", "echo 1"),
            ("js", "console.log(1)"),
            ("node", "console.log(1)"),
        ] {
            let reply = place.post("exec", &json!({ "code": code, "language": alias }));
            let missing = reply.status == 400 && reply.json()["code"] == "not_found";
            assert!(missing || reply.status == 200, "{}", reply.text());
        }
        if place.has("python3") {
            assert_eq!(place.output(&json!({ "code": "print(1)" })), "1\n");
            assert_eq!(place.output(&json!({ "code": "" })), "");
        }
    });
}

#[test]
fn code_that_begins_as_an_option_is_code() {
    everywhere(|place| {
        for code in ["-x", "+x", "--version", "-c 'echo hi'"] {
            if place.has("bash") {
                let reply = place.post("exec", &json!({ "code": code, "language": "bash" }));
                let text = reply.text();
                assert!(
                    text.contains("not found") && text.contains("127"),
                    "{code}: {text}"
                );
            }
        }
        if place.has("python3") {
            assert_eq!(place.run("python", "-5; print(1)"), "1\n");
        }
        if place.has("node") {
            assert_eq!(place.run("javascript", "+1; console.log(1)"), "1\n");
        }
    });
}

#[test]
fn javascript_awaits_at_the_top_level() {
    everywhere(|place| {
        if !place.has("node") {
            return;
        }
        for (code, expected) in [
            ("console.log(await Promise.resolve(3))", "3\n"),
            ("import { sep } from 'path'\nconsole.log(await sep)", "/\n"),
            (
                "const { sep } = require('path'); console.log(await sep, require.main === module)",
                "/ true\n",
            ),
        ] {
            assert_eq!(place.run("javascript", code), expected, "{code}");
        }
    });
}

#[test]
fn arguments_are_the_scripts_own() {
    let args = json!(["--version", "", "zwölf ☃", "-c", "a b"]);
    let expected = r#"["--version", "", "zwölf ☃", "-c", "a b"]"#;
    everywhere(|place| {
        let run = |language: &str, code: &str| {
            place.output(&json!({ "language": language, "code": code, "args": args }))
        };
        let python = "import json, sys\nprint(json.dumps(sys.argv, ensure_ascii=False), __name__)";
        for (language, _) in place.languages() {
            match language {
                "python" => assert_eq!(
                    run(language, python),
                    format!("[\"<code>\", {} __main__\n", &expected[1..])
                ),
                "javascript" => assert_eq!(
                    run(
                        language,
                        "console.log(process.argv[1], JSON.stringify(process.argv.slice(2)))"
                    ),
                    format!("<code> {}\n", expected.replace(", ", ","))
                ),
                _ => {
                    let code = "printf '%s|' \"$0\" \"$@\"";
                    let seen = "bash|--version||zwölf ☃|-c|a b|";
                    assert_eq!(run(language, code), seen);
                    // More than an argument of a program may have.
                    let long = format!("{}\n{code}", "# filler\n".repeat(20_000));
                    assert_eq!(run(language, &long), seen);
                }
            }
        }
    });
}

#[test]
fn code_is_never_taken_for_options() {
    everywhere(|place| {
        if !place.has("bash") {
            return;
        }
        for code in ["-x", "-s", "+o", "--version"] {
            let body = json!({ "language": "bash", "code": code, "stdin": "echo read" });
            let outcome = place.exec(&body);
            assert_eq!(outcome.exit["exit_code"], 127, "{code}: {outcome:?}");
            assert!(outcome.stdout.is_empty(), "{code}: {outcome:?}");
        }
    });
}

#[test]
fn failures_name_the_lines_of_the_code() {
    everywhere(|place| {
        for (language, _) in place.languages() {
            let fail = |code: &str| {
                let outcome = place.exec(&json!({ "language": language, "code": code }));
                assert_ne!(outcome.code(), Some(0), "{outcome:?}");
                outcome.stderr
            };
            match language {
                "python" => {
                    let said = fail("def deep():\n    raise ValueError('oh')  # here\n\ndeep()\n");
                    assert!(said.starts_with(
                        "Traceback (most recent call last):\n  File \"<code>\", line 4"
                    ));
                    assert!(said.contains("line 2, in deep\n    raise ValueError('oh')  # here\n"));
                    assert!(said.ends_with("ValueError: oh\n"), "{said}");
                    assert!(!said.contains("<string>"), "{said}");
                    let caught = "import sys, traceback\ntry:\n    1 / 0  # here\nexcept Exception:\n    traceback.print_exc()\n    sys.exit(1)";
                    let said = fail(caught);
                    assert!(said.contains("    1 / 0  # here\n"), "{said}");
                    let said = fail("x = 1\nif x\n");
                    assert!(
                        said.contains("File \"<code>\", line 2") && said.contains("SyntaxError"),
                        "{said}"
                    );
                    assert_eq!(
                        place
                            .exec(&json!({ "code": "import sys; sys.exit(3)" }))
                            .code(),
                        Some(3)
                    );
                }
                "javascript" => {
                    let said = fail("function deep() {\n  throw new Error('oh');\n}\ndeep();");
                    assert!(said.contains("<code>:2"), "{said}");
                    assert!(said.contains("throw new Error('oh');"), "{said}");
                }
                _ => {
                    for filler in ["", &"# filler\n".repeat(20_000)] {
                        let lines = filler.lines().count() + 2;
                        let said = fail(&format!("{filler}true\nno-such-program\n"));
                        assert!(
                            said.contains(&format!("line {lines}: no-such-program")),
                            "{said}"
                        );
                    }
                }
            }
        }
    });
}

#[test]
fn a_script_has_input_a_limit_of_time_a_terminal_and_an_id() {
    everywhere(|place| {
        if !place.has("python3") {
            crate::skip!("there is no python3");
        }
        let code = "import sys\nprint(sys.stdin.read().upper())";
        let given = json!({ "code": code, "stdin": "given" });
        assert_eq!(place.output(&given), "GIVEN\n");

        let endless = json!({ "code": "while True: pass", "timeout": 0.5 });
        let outcome = place.exec(&endless);
        assert_eq!(outcome.exit["reason"], "timeout", "{outcome:?}");

        let terminal = json!({ "code": "import os\nprint(os.get_terminal_size(), os.isatty(0))", "pty": { "rows": 10, "cols": 20 } });
        assert_eq!(
            place.output(&terminal),
            "os.terminal_size(columns=20, lines=10) True\r\n"
        );

        let once = json!({ "code": "print(1)", "id": "once", "args": ["x"] });
        assert_eq!(place.output(&once), "1\n");
        assert_eq!(place.exec(&once).start["attached"], true);
        let same = json!({ "code": "print(1)", "id": "once", "args": ["x"], "language": "py" });
        assert_eq!(place.exec(&same).start["attached"], true);
        for other in [
            json!({ "code": "print(2)", "id": "once", "args": ["x"] }),
            json!({ "code": "print(1)", "id": "once" }),
            json!({ "code": "print(1)", "id": "once", "args": ["x"], "language": "bash" }),
            json!({ "cmd": "print(1)", "id": "once" }),
        ] {
            assert_error(&place.post("exec", &other), 409, "id_in_use");
        }

        // In the background, with input that comes later.
        let reply = place.post(
            "processes",
            &json!({ "code": "print(input())", "id": "later" }),
        );
        assert_eq!(reply.status, 200, "{}", reply.text());
        let typed = place.request("POST", "processes/later/stdin?eof=1", &json!("typed"));
        assert_eq!(typed.status, 200, "{}", typed.text());
        let ended = place.get("processes/later/wait?timeout=20");
        assert_eq!(ended.json()["exit_code"], 0, "{}", ended.text());
        let logs = place.get("processes/later/logs").text();
        assert!(logs.contains("typed"), "{logs}");
    });
}

#[test]
fn a_process_shows_its_code() {
    everywhere(|place| {
        let long = "# \u{2603}".repeat(10_000);
        let sent = json!({ "code": long, "language": "sh", "args": ["a"], "id": "long" });
        place.output(&sent);
        place.output(&json!({ "code": "true", "language": "bash", "id": "short" }));
        let whole = place.get("processes/long").json();
        assert_eq!(whole["code"], *long);
        assert_eq!(whole["language"], "bash");
        assert_eq!(whole["args"], json!(["a"]));
        for absent in ["cmd", "cmd_truncated", "code_truncated"] {
            assert!(whole.get(absent).is_none(), "{absent}");
        }
        let listed = place.get("processes").json();
        let entry = |id: &str| {
            let all = listed.as_array().unwrap().iter();
            all.clone().find(|entry| entry["id"] == id).unwrap()
        };
        let beginning = entry("long")["code"].as_str().unwrap();
        let cut = beginning.strip_suffix('\u{2026}').unwrap();
        assert!(long.starts_with(cut) && cut.len() > 16_000);
        assert_eq!(entry("long")["args"], json!([]));
        assert_eq!(entry("long")["code_truncated"], true);
        assert_eq!(entry("short")["code"], "true");
        assert!(entry("short").get("code_truncated").is_none());
    });
}

#[test]
fn five_megabytes_of_code_run() {
    everywhere(|place| {
        for (language, code) in place.languages() {
            let filler = if language == "javascript" {
                "// filler\n"
            } else {
                "# filler, for the rest\n"
            };
            let long = format!("{}{code}", filler.repeat((5 << 20) / filler.len()));
            assert_eq!(place.run(language, &long), "hello\n", "{language}");
        }
    });
}

#[test]
fn what_cannot_run_is_refused() {
    everywhere(|place| {
        let refused = |body: serde_json::Value, code: &str| {
            let reply = place.post("exec", &body);
            assert_error(&reply, 400, code);
            let started = place.post("processes", &body);
            assert_error(&started, 400, code);
            reply.json()["error"].as_str().unwrap().to_owned()
        };
        let said = refused(
            json!({ "code": "1", "language": "ruby" }),
            "unsupported_language",
        );
        for (language, ..) in LANGUAGES {
            assert!(said.contains(language), "{said}");
        }
        refused(json!({ "code": "1", "cmd": "true" }), "bad_request");
        refused(json!({ "language": "python" }), "bad_request");
        refused(json!({ "cmd": "true", "args": ["x"] }), "bad_request");
        refused(
            json!({ "code": "a\u{0}", "language": "bash" }),
            "bad_request",
        );
        refused(json!({ "code": "1", "cwd": "no/such" }), "bad_cwd");
        for (language, program, code) in LANGUAGES {
            let body = json!({ "code": code, "language": language, "env": { "PATH": "/nowhere" } });
            assert_eq!(
                refused(body, "not_found"),
                format!("cannot start {language}: there is no {program} in PATH")
            );
        }
    });
}

#[test]
fn a_client_that_leaves_ends_its_script() {
    everywhere(|place| {
        let mut stream = place.stream(&json!({
            "code": "echo ready; sleep 1000", "language": "bash", "id": "left"
        }));
        while stream.next_output().unwrap()["event"] != "stdout" {}
        drop(stream);
        wait_until("the script ends", PATIENCE, || {
            place.get("processes/left").json()["reason"] == "disconnected"
        });
    });
}
