//! What is started: strings and arrays, PATH, working directory, environment, input; and under an id
//! that the client chose, once only.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::{Value, json};

use super::{read_until, write_file, write_program};
use crate::fixture::{
    Gate, Mark, Outcome, PATIENCE, Server, TempDir, assert_error, expect_same, numbered_text,
    output_of,
};

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
fn a_command_is_never_taken_for_options_of_its_shell() {
    let server = Server::start();
    for cmd in ["-n hello", "-x", "-s", "+x", "--version", "--"] {
        let mut body = json!({ "cmd": cmd, "stdin": "echo read\n" });
        let outcome = server.exec(&body);
        assert_eq!(outcome.exit["exit_code"], 127, "{cmd}: {outcome:?}");
        let program = cmd.split(' ').next().unwrap();
        assert!(
            outcome.stderr.contains(program) && outcome.stdout.is_empty(),
            "{cmd}: {outcome:?}"
        );
        body["pty"] = true.into();
        body.as_object_mut().unwrap().remove("stdin");
        assert_eq!(server.exec(&body).exit["exit_code"], 127, "{cmd}");
    }
}

#[test]
fn text_is_utf_8_where_nobody_says_otherwise() {
    let lang = |server: &Server| server.exec(&json!({ "cmd": "echo $LANG" })).stdout;
    let without = |names: &[&str]| {
        let builder = Server::builder();
        let mut command = builder.command();
        for name in ["LANG", "LC_ALL", "LC_CTYPE"] {
            command.env_remove(name);
        }
        for name in names {
            command.env(name, "C");
        }
        builder.start_as(command)
    };
    assert_eq!(lang(&without(&[])), "C.UTF-8\n");
    assert_eq!(lang(&without(&["LANG"])), "C\n");
    assert_eq!(lang(&without(&["LC_ALL"])), "\n");
    assert_eq!(lang(&without(&["LC_CTYPE"])), "\n");
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
    // Each directory may take a while to look at, and the server waits.
    let long = |count: usize| format!("{}{}", "/none:".repeat(count - 1), path(&[&two]));
    assert_eq!(run(&long(1000)), "two x\n");
    let body = json!({"cmd": ["sbx-tool"], "env": {"PATH": long(1001)}});
    let reply = server.post("/v1/exec", &body);
    assert_error(&reply, 400, "bad_request");
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
    let record = server.entry(&start["id"]);
    assert_eq!(
        (&record["running"], &record["exit_code"], &record["reason"]),
        (&json!(false), &json!(0), &json!("exited"))
    );
    let list = server.exec(&json!({"cmd": ["true", "x y"]}));
    assert_eq!(
        server.entry(&list.start["id"])["cmd"],
        json!(["true", "x y"])
    );
}

#[test]
fn fifteen_mebibytes_of_stdin_come_back_through_cat() {
    let server = Server::start();
    let text = numbered_text(15 << 20);
    let events: Vec<Value> = server
        .exec_stream(&json!({"cmd": ["cat"], "stdin": text}))
        .collect();
    expect_same(
        "the output",
        &output_of(&events, "stdout", 0).data,
        text.as_bytes(),
    );
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
    expect_same(
        "the output",
        outcome.stdout.as_bytes(),
        text.repeat(2).as_bytes(),
    );
    expect_same("the output", outcome.stderr.as_bytes(), text.as_bytes());
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
