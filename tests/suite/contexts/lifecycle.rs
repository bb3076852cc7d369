//! From the making of a context to its end.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{
    LANGUAGES, PATH, Place, everywhere, everywhere_with, in_parallel, needs, on_a_machine,
};
use crate::fixture::{
    Mark, PATIENCE, Server, TempDir, assert_error, command_line_of, is_alive, is_root, pid_of,
    wait_until,
};
use crate::skip;

#[test]
fn languages_are_those_in_path() {
    everywhere(|place| {
        let names = |value: Value| {
            let languages = value.as_array().unwrap().clone();
            languages
                .iter()
                .map(|language| language["language"].as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        let listed = place.document("languages");
        assert_eq!(
            listed[0]["backends"],
            json!(["plain", "ipython", "jupyter:KERNEL"])
        );
        assert_eq!(listed[1]["backends"], json!(["node"]));
        assert_eq!(listed[2]["backends"], json!(["bash"]));
        assert_eq!(names(listed), LANGUAGES.map(|(language, _)| language));
        // Nothing was started to find out.
        assert_eq!(place.document("contexts"), json!([]));
    });
    // A machine that has none of them.
    let nowhere = TempDir::new();
    let server = Server::builder()
        .env("PATH", nowhere.path().display())
        .start();
    let listed = server.get("/v1/languages").json();
    for (number, program) in ["python3", "node", "bash"].into_iter().enumerate() {
        assert_eq!(listed[number]["available"], false, "{program}");
        let body = json!({ "language": listed[number]["language"] });
        for target in ["/v1/contexts", "/v1/execute"] {
            let mut body = body.clone();
            body["code"] = json!("1");
            let reply = server.post(target, &body);
            assert_error(&reply, 400, "not_found");
            let says = format!("there is no {program} in PATH");
            assert!(reply.text().contains(&says), "{}", reply.text());
        }
    }
    assert_eq!(server.get("/v1/contexts").json(), json!([]));
}

#[test]
fn languages_are_those_that_a_sandbox_finds() {
    if !is_root() {
        skip!("needs root: every sandbox has a user of its own");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({"env": {"PATH": "tools"}}));
    let available = || {
        let listed = server.get(&sandbox.target("languages")).json();
        [0, 1, 2].map(|number| listed[number]["available"].as_bool().unwrap())
    };
    assert_eq!(available(), [false; 3]);
    let secret = TempDir::new();
    fs::set_permissions(secret.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let tools = sandbox.home.join("tools");
    fs::create_dir(&tools).unwrap();
    fs::set_permissions(&tools, fs::Permissions::from_mode(0o755)).unwrap();
    let hidden = secret.path().join("program");
    for program in [tools.join("node"), hidden.clone()] {
        fs::write(&program, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    }
    assert_eq!(available(), [false, true, false]);
    // A link tells nothing about what the sandbox may not see.
    std::os::unix::fs::symlink(&hidden, tools.join("bash")).unwrap();
    assert_eq!(available(), [false, true, false]);
    let reply = server.post(&sandbox.target("contexts"), &json!({"language": "bash"}));
    assert_eq!(reply.status, 400, "{}", reply.text());
}

#[test]
fn a_context_is_described_from_its_first_moment() {
    everywhere(|place| {
        needs!(place, "python");
        let made = place.make(&json!({
            "id": "My_own.1-x", "language": "py", "backend": "plain", "cwd": "/usr", "tag": "a b",
            "env": { "COLOUR": "blue", "NUMBER": 7 }
        }));
        let created = made["created_at_ms"].as_u64().unwrap();
        assert!(created > 1_700_000_000_000, "{created}");
        let version = made["version"].as_str().unwrap();
        assert!(version.starts_with("3."), "{version}");
        let pid = made["pid"].as_i64().unwrap();
        let expected = json!({
            "id": "My_own.1-x", "language": "python", "backend": "plain", "version": version,
            "state": "idle", "why": null, "pid": pid, "generation": 1, "execution_count": 0,
            "execution": null, "queued": 0, "cwd": "/usr", "tag": "a b", "created_at_ms": created,
            "warm": false
        });
        assert_eq!(made, expected);
        assert_eq!(place.context("My_own.1-x"), expected);
        assert_eq!(place.document("contexts"), json!([expected]));
        let seen = "import os; (os.getcwd(), os.environ['COLOUR'], os.environ['NUMBER'])";
        let value = place.value("My_own.1-x", seen);
        assert_eq!(value, "('/usr', 'blue', '7')");
        assert_eq!(place.value("My_own.1-x", "os.getpid()"), pid.to_string());
        // It is none of the processes.
        assert_eq!(place.document("processes"), json!([]));
        assert_eq!(place.context("My_own.1-x")["execution_count"], 2);
    });
}

#[test]
fn every_language_has_its_names_and_keeps_its_state() {
    everywhere(|place| {
        let cases: [(&str, &[&str], &str, &str, &str); 3] = [
            (
                "python",
                &["python", "py"],
                "x = 41",
                "print(x + 1)",
                "42\n",
            ),
            (
                "javascript",
                &["javascript", "js", "node"],
                "let x = 41",
                "console.log(x + 1)",
                "42\n",
            ),
            (
                "bash",
                &["bash", "sh"],
                "x=41; cd /usr",
                "echo $((x + 1)) $PWD",
                "42 /usr\n",
            ),
        ];
        for (language, names, set, show, shown) in cases {
            needs!(place, language);
            for name in names {
                let made = place.make(&json!({ "language": name, "id": name }));
                assert_eq!(made["language"], language);
                place.run(name, set).expect("completed", "kept");
                let ran = place.run(name, show);
                ran.expect("completed", "kept");
                assert_eq!(ran.text("stdout"), shown);
                assert_eq!(ran.one("start")["fresh"], false);
            }
        }
    });
}

#[test]
fn an_id_makes_the_request_repeatable() {
    everywhere(|place| {
        needs!(place, "bash");
        let body = json!({ "language": "bash", "id": "mine" });
        let made = place.make(&body);
        place.run("mine", "x=5");
        let again = place.make(&body);
        assert_eq!(again["pid"], made["pid"]);
        assert_eq!(place.run("mine", "echo $x").text("stdout"), "5\n");
        for other in ["python", "javascript"] {
            let reply = place.post("contexts", &json!({ "language": other, "id": "mine" }));
            assert_error(&reply, 409, "id_in_use");
        }
        for bad in ["", "a/b", "a b", "\u{e9}", &"x".repeat(65)] {
            let reply = place.post("contexts", &json!({ "language": "bash", "id": bad }));
            assert_error(&reply, 400, "bad_request");
        }
        place.make(&json!({ "language": "bash", "id": "x".repeat(64) }));
        // An id of the server's is never one that a client has chosen.
        place.make(&json!({ "language": "bash", "id": "c-1" }));
        let named = place.make(&json!({ "language": "bash" }));
        assert_eq!(named["id"], "c-2");
        assert_eq!(place.ids(), ["mine", &"x".repeat(64), "c-1", "c-2"]);
        // Many at once get one context.
        let pids = in_parallel(8, |_| {
            place.make(&json!({ "language": "bash", "id": "ours" }))["pid"].clone()
        });
        assert!(pids.iter().all(|pid| *pid == pids[0]), "{pids:?}");
    });
}

#[test]
fn what_cannot_be_made_says_why_and_leaves_nothing() {
    everywhere(|place| {
        needs!(place, "python");
        let refuse = |body: &Value, status: u16, code: &str, says: &str| {
            let reply = place.post("contexts", body);
            assert_error(&reply, status, code);
            assert!(reply.text().contains(says), "{}", reply.text());
        };
        let unsupported = "unsupported_language";
        refuse(
            &json!({ "language": "cobol" }),
            400,
            unsupported,
            "python, javascript or bash",
        );
        refuse(
            &json!({ "backend": "node" }),
            400,
            "bad_request",
            "plain, ipython",
        );
        refuse(
            &json!({ "language": "bash", "backend": "plain" }),
            400,
            "bad_request",
            "bash",
        );
        refuse(&json!({ "cwd": "/nowhere" }), 400, "bad_cwd", "/nowhere");
        refuse(&json!({ "cwd": 5 }), 400, "bad_request", "cwd");
        refuse(&json!({ "env": { "A": [] } }), 400, "bad_request", "env.A");
        refuse(&json!({ "env": { "A=B": "c" } }), 400, "bad_request", "A=B");
        refuse(
            &json!({ "tag": "x".repeat(100_000) }),
            400,
            "bad_request",
            "tag",
        );
        let nowhere = json!({ "env": { "PATH": "/nowhere" } });
        refuse(&nowhere, 400, "not_found", "there is no python3 in PATH");
        // A python without IPython.
        let directory = place.directory.join("programs");
        fs::create_dir(&directory).unwrap();
        fs::write(
            directory.join("IPython.py"),
            "raise ImportError('not here')",
        )
        .unwrap();
        let without = json!({ "PYTHONPATH": directory });
        let body = json!({ "backend": "ipython", "env": without });
        refuse(&body, 400, "no_backend", "back end ipython: ImportError");
        let auto = place.make(&json!({ "id": "auto", "env": without }));
        assert_eq!(auto["backend"], "plain");
        place.remove("auto");
        // An interpreter that does not come up: its last words.
        let program = directory.join("python3");
        fs::write(&program, "#!/bin/sh\necho no luck today >&2\nexit 3\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let body = json!({ "env": { "PATH": format!("{}:{PATH}", directory.display()) } });
        refuse(&body, 500, "kernel_failed", "no luck today");
        assert_eq!(place.document("contexts"), json!([]));
    });
}

/// A PATH whose Python is never ready, and shows as `mark`.
fn path_of_a_stuck_python(place: &Place, mark: &Mark) -> String {
    let directory = place.directory.join("programs");
    fs::create_dir(&directory).unwrap();
    let program = directory.join("python3");
    fs::write(&program, format!("#!/bin/sh\nexec sleep {mark}\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    format!("{}:{PATH}", directory.display())
}

#[test]
fn a_client_that_leaves_takes_an_interpreter_that_is_not_ready_with_it() {
    everywhere(|place| {
        let mark = Mark::new();
        let path = path_of_a_stuck_python(&place, &mark);
        let ask = |id: Value| {
            let body = json!({ "env": { "PATH": path }, "id": id }).to_string();
            let mut connection = place.connect();
            connection.send_request("POST", &place.target("contexts"), &[], body.as_bytes());
            mark.wait_for(1);
            drop(connection);
        };
        ask(Value::Null);
        mark.wait_gone(PATIENCE);
        wait_until("it is gone", PATIENCE, || place.ids().is_empty());
        // Whoever knows its id may ask for it again.
        ask(json!("mine"));
        assert_eq!(place.context("mine")["state"], "starting");
        place.remove("mine");
        mark.wait_gone(PATIENCE);
    });
}

#[test]
fn deleting_ends_the_whole_tree_and_is_repeatable() {
    everywhere(|place| {
        for (language, code) in [
            (
                "python",
                "import subprocess\nfor _ in range(2): subprocess.Popen(['setsid', 'sleep', SECONDS])",
            ),
            (
                "javascript",
                "for (let i = 0; i < 2; i++) require('child_process').spawn('setsid', ['sleep', SECONDS])",
            ),
            ("bash", "for i in 1 2; do setsid sleep SECONDS & done"),
        ] {
            needs!(place, language);
            let mark = Mark::new();
            let made = place.make(&json!({ "language": language, "id": language }));
            let seconds = mark.to_string();
            let seconds = if language == "bash" {
                seconds
            } else {
                format!("'{seconds}'")
            };
            place
                .run(language, &code.replace("SECONDS", &seconds))
                .expect("completed", "kept");
            mark.wait_for(2);
            place.remove(language);
            mark.wait_gone(PATIENCE);
            assert!(!is_alive(pid_of(&made)));
            let reply = place.request("DELETE", &format!("contexts/{language}"), "");
            assert_eq!(reply.json(), json!({ "id": language, "deleted": false }));
            assert_error(
                &place.get(&format!("contexts/{language}")),
                404,
                "not_found",
            );
            let reply = place.post(
                &format!("contexts/{language}/execute"),
                &json!({ "code": "1" }),
            );
            assert_error(&reply, 404, "not_found");
        }
        let reply = place.request("DELETE", "contexts/never", "");
        assert_error(&reply, 404, "not_found");
    });
}

#[test]
fn a_restart_begins_anew() {
    everywhere(|place| {
        for (language, set, show, endless) in [
            ("python", "x = 1", "'x' in globals()", "while True: pass"),
            (
                "javascript",
                "var x = 1",
                "typeof x !== 'undefined'",
                "while (true);",
            ),
            (
                "bash",
                "x=1",
                "[[ -v x ]] && echo True || echo False",
                "while :; do :; done",
            ),
        ] {
            needs!(place, language);
            let body =
                json!({ "language": language, "id": language, "cwd": "/usr", "env": { "A": "b" } });
            let made = place.make(&body);
            place.run(language, set);
            let (running, _) = place.begin_running(language, &json!({ "code": endless }));
            let mut waiting = place.begin(language, &json!({ "code": set }));
            assert_eq!(waiting.next_output().unwrap()["event"], "queued");
            let reply = place.post(&format!("contexts/{language}/restart"), &json!({}));
            assert_eq!(reply.status, 200, "{}", reply.text());
            let restarted = reply.json();
            assert_eq!(restarted["generation"], 2);
            assert_eq!(restarted["execution_count"], 0);
            assert_eq!(restarted["state"], "idle");
            assert_eq!(restarted["cwd"], "/usr");
            assert_ne!(restarted["pid"], made["pid"]);
            assert!(!is_alive(pid_of(&made)));
            let end = running.last().unwrap();
            assert_eq!(
                (&end["reason"], &end["state"]),
                (&json!("restarted"), &json!("lost"))
            );
            let end = waiting.last().unwrap();
            assert_eq!(
                (&end["reason"], &end["state"]),
                (&json!("restarted"), &json!("lost"))
            );
            let ran = place.run(language, show);
            ran.expect("completed", "kept");
            let start = ran.one("start");
            assert_eq!(
                (&start["fresh"], &start["generation"]),
                (&json!(true), &json!(2))
            );
            assert_eq!(
                (&start["execution_count"], &start["stdout_offset"]),
                (&json!(1), &json!(0))
            );
            let shown = ran.events[1].to_string().to_lowercase();
            assert!(shown.contains("false"), "{shown}");
        }
    });
}

#[test]
fn a_context_that_died_says_so_and_can_be_restarted() {
    everywhere(|place| {
        for (language, code, status) in [
            ("python", "import os; print('last'); os._exit(7)", 7),
            (
                "javascript",
                "console.log('last'); process.reallyExit(7)",
                7,
            ),
            ("bash", "echo last; exit 7", 7),
        ] {
            needs!(place, language);
            place.make(&json!({ "language": language, "id": language }));
            let ran = place.run(language, code);
            ran.expect("died", "lost");
            assert_eq!(ran.end()["exit_code"], status);
            assert_eq!(ran.text("stdout"), "last\n");
            let dead = place.context(language);
            assert_eq!(dead["state"], "dead");
            assert!(dead["why"].as_str().unwrap().contains('7'), "{dead}");
            let route = format!("contexts/{language}");
            let reply = place.post(&format!("{route}/execute"), &json!({ "code": "1" }));
            assert_error(&reply, 409, "context_dead");
            assert!(reply.text().contains("restart"), "{}", reply.text());
            // What is known of it stays.
            assert_eq!(place.logged(language, "stdout"), "last\n");
            let executions = place.document(&format!("{route}/executions"));
            assert_eq!(executions[0]["reason"], "died");
            assert_eq!(
                place.make(&json!({ "language": language, "id": language }))["state"],
                "dead"
            );
            let reply = place.post(&format!("{route}/restart"), &json!({}));
            assert_eq!(reply.json()["generation"], 2);
            assert_eq!(
                place.run(language, hello_in(language)).text("stdout"),
                "hello\n"
            );
            assert_eq!(place.logged(language, "stdout"), "hello\n");
        }
    });
}

fn hello_in(language: &str) -> &'static str {
    let mut languages = LANGUAGES.into_iter();
    languages.find(|(name, _)| *name == language).unwrap().1
}

#[test]
fn an_interpreter_that_dies_while_idle_takes_those_that_wait_with_it() {
    everywhere(|place| {
        needs!(place, "python");
        let made = place.python("a");
        let kill = format!("kill -9 {}", made["pid"]);
        let reply = place.post("exec", &json!({ "cmd": kill }));
        assert_eq!(reply.status, 200);
        wait_until("it is dead", PATIENCE, || {
            place.context("a")["state"] == "dead"
        });
        let why = place.context("a")["why"].clone();
        assert!(
            why.as_str().unwrap().contains("signal 9") || why.as_str().unwrap().contains("SIGKILL"),
            "{why}"
        );

        place.python("b");
        let (running, start) =
            place.begin_running("b", &json!({ "code": "import time; time.sleep(3600)" }));
        let waiting: Vec<_> = (0..3)
            .map(|_| place.begin("b", &json!({ "code": "1" })))
            .collect();
        place.post(
            "exec",
            &json!({ "cmd": format!("kill -9 {}", start["pid"]) }),
        );
        let end = running.last().unwrap();
        assert_eq!(
            (&end["reason"], &end["signal"]),
            (&json!("died"), &json!(9))
        );
        for stream in waiting {
            let ran = super::Ran::of(stream.collect());
            ran.expect("context_dead", "lost");
            assert_eq!(ran.names(), ["queued", "end"]);
        }
    });
}

#[test]
fn a_delete_that_meets_a_restart_or_an_execution_wins() {
    everywhere(|place| {
        needs!(place, "bash");
        let server = match place.sandbox {
            Some(_) => place.server.inner_pid(),
            None => place.server.pid(),
        };
        for round in 0..30 {
            place.make(&json!({ "language": "bash", "id": "a" }));
            let route = ["contexts/a/restart", "contexts/a/execute"][round % 2];
            in_parallel(3, |number| {
                if number == 0 {
                    place.remove("a");
                } else {
                    let reply = place.post(route, &json!({ "code": "echo" }));
                    assert!([200, 404, 409].contains(&reply.status), "{}", reply.text());
                }
            });
            assert_eq!(place.ids(), Vec::<String>::new());
        }
        // The default one is made anew.
        for _ in 0..30 {
            let body = json!({ "language": "bash", "code": "echo on" });
            place.execute_anywhere(&body);
            in_parallel(2, |number| {
                if number == 0 {
                    place.remove("default-bash");
                } else {
                    let reply = place.post("execute", &body);
                    assert!([200, 409].contains(&reply.status), "{}", reply.text());
                }
            });
        }
        for id in place.ids() {
            place.remove(&id);
        }
        wait_until("no interpreter is left", PATIENCE, || {
            let processes = crate::fixture::descendants_of(server);
            processes
                .iter()
                .all(|process| !command_line_of(process.pid).starts_with(b"bash\0-c"))
        });
    });
}

#[test]
fn execute_has_a_context_of_its_own_for_each_language() {
    everywhere(|place| {
        for (language, hello) in place.languages() {
            let body = json!({ "language": language, "code": hello });
            let ran = place.execute_anywhere(&body);
            assert_eq!(ran.text("stdout"), "hello\n");
            let name = format!("default-{language}");
            assert_eq!(ran.one("start")["context"], name);
            assert_eq!(place.execute_anywhere(&body).one("start")["fresh"], false);
            // It is started anew when it is dead.
            place.post(
                "exec",
                &json!({ "cmd": format!("kill -9 {}", place.context(&name)["pid"]) }),
            );
            wait_until("it is dead", PATIENCE, || {
                place.context(&name)["state"] == "dead"
            });
            let start = place.execute_anywhere(&body).one("start").clone();
            assert_eq!(
                (&start["fresh"], &start["generation"]),
                (&json!(true), &json!(2))
            );
        }
        needs!(place, "python");
        assert_eq!(
            place.execute_anywhere(&json!({ "code": "6 * 7" })).result(),
            "42"
        );
        // A context by its name, even if the request alone would choose another language.
        place.make(&json!({ "id": "b", "language": "bash" }));
        let ran = place.execute_anywhere(&json!({ "context": "b", "code": "echo hello" }));
        assert_eq!(ran.text("stdout"), "hello\n");
        let reply = place.post("execute", &json!({ "context": "none", "code": "1" }));
        assert_error(&reply, 404, "not_found");
        let reply = place.post("execute", &json!({ "language": "cobol", "code": "1" }));
        assert_error(&reply, 400, "unsupported_language");
    });
}

#[test]
fn a_stateless_execution_leaves_nothing() {
    everywhere(|place| {
        for (language, hello) in place.languages() {
            let before = place.ids();
            let mark = Mark::new();
            let body = json!({ "language": language, "code": hello, "stateless": true });
            let ran = place.execute_anywhere(&body);
            ran.expect("completed", "kept");
            assert_eq!(ran.text("stdout"), "hello\n");
            assert_eq!(ran.one("start")["fresh"], true);
            let pid = pid_of(ran.one("start"));
            // Its end was sent when it was not listed any more.
            assert_eq!(place.ids(), before);
            wait_until("it is gone", PATIENCE, || !is_alive(pid));
            mark.wait_gone(PATIENCE);
        }
        let body = json!({ "code": "1", "stateless": true, "context": "a" });
        assert_error(&place.post("execute", &body), 400, "bad_request");
        // A client that leaves takes it with it.
        needs!(place, "bash");
        let mark = Mark::new();
        let body =
            json!({ "language": "bash", "stateless": true, "code": format!("sleep {mark}") });
        let mut stream = place.connect().stream(
            "POST",
            &place.target("execute"),
            body.to_string().as_bytes(),
        );
        assert_eq!(stream.next_output().unwrap()["event"], "start");
        mark.wait_for(1);
        drop(stream);
        mark.wait_gone(PATIENCE);
        wait_until("it is gone", PATIENCE, || {
            place
                .document("contexts")
                .as_array()
                .unwrap()
                .iter()
                .all(|context| context["id"].as_str().unwrap().starts_with("default-"))
        });
    });
}

#[test]
fn whatever_ends_a_stateless_execution_its_context_is_not_listed_then() {
    everywhere(|place| {
        needs!(place, "bash");
        let before = place.ids();
        for (code, reason) in [
            ("exit 3", "died"),
            ("kill -9 $$", "died"),
            ("sleep 1000", "timeout"),
            ("trap '' INT; while :; do :; done", "timeout"),
        ] {
            let body = json!({
                "language": "bash", "stateless": true, "code": code, "timeout": 0.3, "kill_after": 0.1
            });
            let ran = place.execute_anywhere(&body);
            assert_eq!(ran.one("end")["reason"], reason, "{code}");
            assert_eq!(place.ids(), before, "{code}");
        }
    });
}

#[test]
fn a_context_is_deleted_once() {
    everywhere(|place| {
        needs!(place, "bash");
        place.make(&json!({ "language": "bash", "id": "once" }));
        place.remove("once");
        for _ in 0..2 {
            let reply = place.request("DELETE", "contexts/once", "");
            assert_eq!(reply.status, 200, "{}", reply.text());
            assert_eq!(reply.json(), json!({ "id": "once", "deleted": false }));
        }
        place.make(&json!({ "language": "bash", "id": "once" }));
        place.remove("once");
        assert_error(
            &place.request("DELETE", "contexts/never", ""),
            404,
            "not_found",
        );
    });
}

#[test]
fn there_are_as_many_contexts_as_the_machine_allows() {
    everywhere_with(&[("SBX_CONTEXTS", "3")], |place| {
        needs!(place, "bash");
        let bash = json!({ "language": "bash" });
        for _ in 0..3 {
            place.make(&bash);
        }
        assert_error(&place.post("contexts", &bash), 503, "too_many_contexts");
        let body = json!({ "language": "bash", "code": "echo", "stateless": true });
        assert_error(&place.post("execute", &body), 503, "too_many_contexts");
        // One with the id of one that is there is no other.
        place.make(&json!({ "language": "bash", "id": "c-2" }));
        place.remove("c-2");
        place.make(&bash);
        assert_error(&place.post("contexts", &bash), 503, "too_many_contexts");
    });
}

#[test]
fn contexts_of_two_sandboxes_never_meet() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().env("PATH", PATH).start();
    let (first, second) = (server.sandbox(), server.sandbox());
    let (one, other) = (Place::of(&first), Place::of(&second));
    needs!(one, "python");
    let made = one.python("same");
    assert_error(&other.get("contexts/same"), 404, "not_found");
    assert_error(
        &other.post("contexts/same/execute", &json!({ "code": "1" })),
        404,
        "not_found",
    );
    let made_too = other.python("same");
    assert_ne!(made["pid"], made_too["pid"]);
    one.run("same", "secret = 5; open('mine', 'w').write('secret')");
    assert_eq!(other.value("same", "'secret' in globals()"), "False");
    // Neither by processes, nor by files, nor by signals.
    let (pid, home) = (&made["pid"], first.home.display());
    for code in [
        format!("open('/proc/{pid}/environ').read()"),
        format!("open('/proc/{pid}/fd/4')"),
        format!("import os; os.listdir('/proc/{pid}/fd')"),
        format!("open('{home}/mine').read()"),
        format!("import os; os.kill({pid}, 0)"),
        format!(
            "import os; os.pidfd_open({pid}); import signal; signal.pidfd_send_signal(os.pidfd_open({pid}), 9)"
        ),
    ] {
        let ran = other.run("same", &code);
        ran.expect("error", "kept");
    }
    assert_eq!(one.value("same", "secret"), "5");
    // A token is good for its own sandbox alone.
    let mut stranger = server.connect();
    stranger.token = Some(second.token.clone());
    let target = first.target("contexts/same/execute");
    let reply = stranger.request("POST", &target, &[], br#"{"code":"1"}"#);
    assert_error(&reply, 403, "forbidden");
    // With the sandbox everything of it ends.
    let mark = crate::fixture::Mark::new();
    one.run(
        "same",
        &format!("import subprocess; subprocess.Popen(['setsid', 'sleep', '{mark}'])"),
    );
    mark.wait_for(1);
    let (running, _) =
        one.begin_running("same", &json!({ "code": "import time; time.sleep(3600)" }));
    let reply = server.delete(&format!("/v1/sandboxes/{}", first.id));
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(first.processes(), Vec::<i32>::new());
    assert!(mark.pids().is_empty());
    let end = running.last().unwrap();
    assert_eq!(
        (&end["event"], &end["state"]),
        (&json!("end"), &json!("lost"))
    );
    assert_eq!(other.value("same", "1 + 1"), "2");
}

#[test]
fn a_sandbox_that_ends_says_so_to_whoever_waits_for_an_interpreter() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().env("PATH", PATH).start();
    let sandbox = server.sandbox();
    let place = Place::of(&sandbox);
    let mark = Mark::new();
    let path = path_of_a_stuck_python(&place, &mark);
    let body = json!({ "env": { "PATH": path } }).to_string();
    let mut waiting = place.connect();
    waiting.send_request("POST", &place.target("contexts"), &[], body.as_bytes());
    mark.wait_for(1);
    let reply = server.delete(&format!("/v1/sandboxes/{}", sandbox.id));
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_error(&waiting.read_reply(), 503, "shutting_down");
    assert!(mark.pids().is_empty());
}

#[test]
fn a_host_itself_has_no_contexts() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().start();
    for route in [
        "languages",
        "contexts",
        "contexts/a",
        "contexts/a/logs",
        "venv",
    ] {
        assert_error(&server.get(&format!("/v1/{route}")), 404, "not_found");
    }
    for target in [
        "/v1/contexts",
        "/v1/execute",
        "/v1/contexts/a/execute",
        "/execute",
        "/v1/venv",
    ] {
        assert_error(
            &server.post(target, &json!({ "code": "1" })),
            404,
            "not_found",
        );
    }
}

#[test]
fn metrics_count_contexts_and_executions() {
    everywhere(|place| {
        needs!(place, "bash");
        let metrics = || {
            let accept = [("Accept", "application/json")];
            let reply = place
                .server
                .connect()
                .request("GET", "/v1/metrics", &accept, b"");
            let metrics = reply.json();
            let seconds = metrics["execution_seconds"].as_f64().unwrap();
            (
                metrics["contexts"].clone(),
                metrics["executions"].clone(),
                seconds,
            )
        };
        assert_eq!(metrics(), (json!(0), json!(0), 0.0));
        for id in ["a", "b"] {
            place.make(&json!({ "language": "bash", "id": id }));
        }
        assert_eq!(metrics(), (json!(2), json!(0), 0.0));
        place.run("a", "sleep 0.2");
        place.run("b", "exit 3");
        let (contexts, executions, seconds) = metrics();
        assert_eq!((contexts, executions), (json!(1), json!(2)));
        assert!((0.2..20.0).contains(&seconds), "{seconds}");
        place.remove("a");
        assert_eq!(metrics().0, 0);
        let reply = place.server.get("/v1/metrics");
        assert!(
            reply.text().contains("\nsbx_executions_total 2\n"),
            "{}",
            reply.text()
        );
    });
}

#[test]
fn an_idle_context_is_no_work_and_a_running_execution_is() {
    on_a_machine(|place| {
        needs!(place, "python");
        let mut server = Server::builder().env("SBX_IDLE_TIMEOUT", 2).start();
        let here = Place {
            server: &server,
            sandbox: None,
            directory: place.directory,
        };
        let made = here.python("a");
        let (mut running, _) =
            here.begin_running("a", &json!({ "code": "input()", "allow_input": true }));
        assert_eq!(running.next_output().unwrap()["event"], "input");
        let witness = Server::builder().env("SBX_IDLE_TIMEOUT", 2).start();
        let mut witness = witness;
        witness.wait_for_exit(PATIENCE);
        // It was idle for as long, but for what runs.
        let reply = here.post("contexts/a/input", &json!({ "value": "x" }));
        assert_eq!(reply.status, 200, "{}", reply.text());
        super::Ran::of_rest(running.collect()).expect("completed", "kept");
        server.wait_for_exit(PATIENCE);
        wait_until("it ends", PATIENCE, || !is_alive(pid_of(&made)));
    });
}

#[test]
fn code_stands_still_in_a_pause_and_so_does_its_timeout() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().env("PATH", PATH).start();
    let sandbox = server.sandbox();
    let place = Place::of(&sandbox);
    place.python("a");
    place.value("a", "x = 7; x");
    let code = "import time\nfor n in range(8):\n    print(n, flush=True)\n    time.sleep(0.25)\nn";
    let (stream, start) = place.begin_running("a", &json!({ "code": code, "timeout": 4 }));
    let change = |act: &str| {
        let target = format!("/v1/sandboxes/{}/{act}", sandbox.id);
        let reply = server.post(&target, &json!({}));
        assert_eq!(reply.status, 200, "{}", reply.text());
    };
    change("pause");
    let paused = Instant::now();
    assert_error(
        &place.post("execute", &json!({ "code": "1" })),
        409,
        "paused",
    );
    wait_until("the timeout would have passed", PATIENCE, || {
        paused.elapsed() > Duration::from_secs(5)
    });
    change("resume");
    let mut events = vec![start];
    events.extend(stream);
    let last = events.last().unwrap();
    assert_eq!(
        (&last["event"], &last["reason"]),
        (&json!("end"), &json!("completed")),
        "{last}"
    );
    assert_eq!(place.value("a", "x + n"), "14");
}
