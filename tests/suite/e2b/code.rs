//! The code interpreter.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Door, everywhere, machine};
use crate::fixture::Reply;
use crate::skip;

/// The lines of an execution.
fn lines(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{}", reply.text());
    let text = String::from_utf8(reply.body.clone()).unwrap();
    assert!(text.ends_with('\n') && !text.contains("\n\n"), "{text:?}");
    assert!(
        !text.contains(['\u{85}', '\u{2028}', '\u{2029}']),
        "{text:?}"
    );
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn execute(door: &Door<'_>, body: &Value) -> Reply {
    let headers = [("content-type", "application/json")];
    door.request("POST", "/execute", &headers, body.to_string().as_bytes())
}

#[track_caller]
fn run(door: &Door<'_>, code: &str) -> Vec<Value> {
    lines(&execute(
        door,
        &json!({ "code": code, "context_id": null, "language": null, "env_vars": null }),
    ))
}

fn has_python(door: &Door<'_>) -> bool {
    door.sh("command -v python3").end["exitCode"] == 0
}

#[test]
fn code_tells_its_output_its_value_and_its_end() {
    everywhere(|door| {
        if !has_python(door) {
            skip!("no python3");
        }
        let lines = run(
            door,
            "import sys\nprint('out\\u2028')\nprint('err', file=sys.stderr)\n'a'",
        );
        assert_eq!(
            lines[0],
            json!({ "type": "number_of_executions", "execution_count": 1 })
        );
        assert_eq!(
            *lines.last().unwrap(),
            json!({ "type": "end_of_execution" })
        );
        let of = |kind: &str| {
            lines
                .iter()
                .find(|line| line["type"] == kind)
                .unwrap()
                .clone()
        };
        assert_eq!(of("stdout")["text"], "out\u{2028}\n");
        assert_eq!(of("stderr")["text"], "err\n");
        assert!(of("stdout")["timestamp"].as_str().unwrap().ends_with('Z'));
        // One pair of quotes goes.
        assert_eq!(
            of("result"),
            json!({ "type": "result", "is_main_result": true, "text": "a" })
        );
        let lines = run(door, "x = [1, {'b': None}]\nx");
        assert_eq!(lines[1]["json"], json!([1, { "b": null }]));
        assert_eq!(lines[1]["text"], "[1, {'b': None}]");
        assert_eq!(
            run(door, "print('☃é\u{1f600}', end='')")[1]["text"],
            "☃é\u{1f600}"
        );
        assert_eq!(run(door, "['☃']")[1]["json"], json!(["☃"]));
        // None is no value, and the context is the same.
        assert_eq!(run(door, "x.append(2)\nNone").len(), 2);
        assert_eq!(run(door, "len(x)")[1]["text"], "3");
        let lines = run(door, "1/0");
        assert_eq!(lines[1]["type"], "error");
        assert_eq!(
            (&lines[1]["name"], &lines[1]["value"]),
            (&"ZeroDivisionError".into(), &"division by zero".into())
        );
        assert!(lines[1]["traceback"].as_str().unwrap().contains("1/0"));
        assert!(!lines[1]["traceback"].as_str().unwrap().contains('\u{1b}'));
        assert_eq!(lines.len(), 3);
        let with = json!({ "code": "import os; os.environ['A']", "env_vars": { "A": "b" } });
        assert_eq!(self::lines(&execute(door, &with))[1]["text"], "b");
        assert_eq!(run(door, "'A' in os.environ")[1]["text"], "False");
    });
}

#[test]
fn values_come_in_the_forms_that_clients_name() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    if !has_python(&door) {
        skip!("no python3");
    }
    let code = "class Shown:\n  def __repr__(self): return 'text'\n  def _repr_html_(self): return '<b>'\n  \
                def _repr_markdown_(self): return '*'\n  def _repr_latex_(self): return '$'\n  \
                def _repr_json_(self): return {'a': 1}\n  def _repr_svg_(self): return '<svg/>'\n  \
                def _repr_png_(self): return b'png'\n  def _repr_jpeg_(self): return b'jpeg'\n  \
                def _repr_pdf_(self): return b'pdf'\n  def _repr_javascript_(self): return '1'\n  \
                def _repr_mimebundle_(self, **kw): return {'x/y': 'other', 'e2b/data': {'c': [1]}, 'e2b/chart': {'type': 'line'}}\n\
                Shown()";
    let result = &run(&door, code)[1];
    assert_eq!(
        *result,
        json!({
            "type": "result", "is_main_result": true, "text": "text", "html": "<b>", "markdown": "*",
            "svg": "<svg/>", "png": "cG5n", "jpeg": "anBlZw==", "pdf": "cGRm", "latex": "$",
            "json": { "a": 1 }, "javascript": "1", "data": { "c": [1] }, "chart": { "type": "line" },
            "extra": { "x/y": "other" },
        })
    );
    // A display is no main result.
    let lines = run(&door, "display(Shown()); 5");
    assert_eq!(
        (&lines[1]["is_main_result"], &lines[2]["text"]),
        (&false.into(), &"5".into())
    );
    // Other doors get nothing of what these clients want.
    let other = server.post("/v1/execute", &json!({ "code": "[1]" }));
    assert!(
        !other.text().contains("application/json"),
        "{}",
        other.text()
    );
}

#[test]
fn contexts_are_made_used_restarted_and_removed() {
    everywhere(|door| {
        if !has_python(door) {
            skip!("no python3");
        }
        let request = |method: &str, target: &str, body: &Value| {
            let headers = [("content-type", "application/json")];
            door.request(method, target, &headers, body.to_string().as_bytes())
        };
        door.ok(
            "/filesystem.Filesystem/Remove",
            &json!({ "path": "e2b-code" }),
        );
        let made = door.ok(
            "/filesystem.Filesystem/MakeDir",
            &json!({ "path": "e2b-code" }),
        );
        // Those of the languages are there from the beginning.
        let listed = || {
            let listed = request("GET", "/contexts", &json!({})).json();
            let mut ids: Vec<_> = listed.as_array().unwrap().clone();
            ids.retain(|context| context["id"].as_str().unwrap().starts_with("default-"));
            ids
        };
        let home = door.sh("cd; pwd").text();
        let default = json!({ "id": "default-python", "language": "python", "cwd": home.trim() });
        let fresh = listed();
        assert!(fresh.contains(&default), "{fresh:?}");
        let at_default = |code: &str| {
            let body = json!({ "code": code, "context_id": "default-python" });
            lines(&execute(door, &body))
        };
        for (method, target) in [
            ("POST", "/contexts/default-python/restart"),
            ("DELETE", "/contexts/default-python"),
        ] {
            assert_eq!(request(method, target, &json!({})).status, 200, "{target}");
        }
        assert_eq!(at_default("y = 5; y")[1]["text"], "5");
        assert_eq!(run(door, "y")[1]["text"], "5");
        let mut now = listed();
        now.sort_by_key(|context| context["id"].as_str().unwrap().to_owned());
        let mut before = fresh;
        before.sort_by_key(|context| context["id"].as_str().unwrap().to_owned());
        assert_eq!(now, before);
        let place = &made["entry"]["path"];
        let context = request(
            "POST",
            "/contexts",
            &json!({ "language": " Python ", "cwd": "e2b-code" }),
        )
        .json();
        assert_eq!(
            (&context["language"], &context["cwd"]),
            (&"python".into(), place)
        );
        let id = context["id"].as_str().unwrap();
        let at = |code: &str| lines(&execute(door, &json!({ "code": code, "context_id": id })));
        assert_eq!(at("import os; x = 1; os.getcwd()")[1]["text"], *place);
        assert_eq!(run(door, "'x' in dir()")[1]["text"], "False");
        let listed = request("GET", "/contexts", &json!({})).json();
        assert!(listed.as_array().unwrap().contains(&context), "{listed}");
        assert_eq!(
            request("POST", &format!("/contexts/{id}/restart"), &json!({})).status,
            200
        );
        assert_eq!(at("'x' in dir()")[1]["text"], "False");
        let both = json!({ "code": "1", "context_id": id, "language": "python" });
        assert_eq!(execute(door, &both).status, 400);
        assert_eq!(
            request("DELETE", &format!("/contexts/{id}"), &json!({})).status,
            200
        );
        for reply in [
            request("DELETE", &format!("/contexts/{id}"), &json!({})),
            request("POST", &format!("/contexts/{id}/restart"), &json!({})),
            execute(door, &json!({ "code": "1", "context_id": id })),
        ] {
            assert_eq!(reply.status, 404);
            assert!(
                reply
                    .header("content-type")
                    .unwrap()
                    .starts_with("text/plain")
            );
            assert!(reply.text().contains(id), "{}", reply.text());
        }
        door.ok(
            "/filesystem.Filesystem/Remove",
            &json!({ "path": "e2b-code" }),
        );
    });
}

#[test]
fn languages_have_contexts_of_their_own() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    for (language, program, code, shown) in [
        ("javascript", "node", "6 * 7", "42"),
        ("js", "node", "6 * 8", "48"),
        ("bash", "bash", "echo $((6 * 7))", "42\n"),
    ] {
        if door.sh(&format!("command -v {program}")).end["exitCode"] != 0 {
            skip!("no {program}");
        }
        let lines = lines(&execute(
            &door,
            &json!({ "code": code, "language": language }),
        ));
        assert_eq!(lines[1]["text"], shown, "{lines:?}");
    }
    for language in ["r", "java", "ts", "typescript", "cobol"] {
        let reply = execute(&door, &json!({ "code": "1", "language": language }));
        assert_eq!(reply.status, 400);
        assert!(
            reply.text().contains("python, javascript and bash"),
            "{}",
            reply.text()
        );
    }
    for body in [json!({}), json!({ "code": 7 }), json!([])] {
        let reply = execute(&door, &body);
        assert_eq!(reply.status, 400, "{}", reply.text());
    }
}

#[test]
fn a_client_that_leaves_interrupts_its_code_and_keeps_the_context() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    if !has_python(&door) {
        skip!("no python3");
    }
    run(&door, "x = 1");
    let mut connection = door.connect();
    let body =
        json!({ "code": "print('begun', flush=True)\nimport time\ntime.sleep(1000)" }).to_string();
    let headers = [
        ("e2b-sandbox-id", &*door.id),
        ("x-access-token", &door.token),
    ];
    connection.send_request("POST", "/execute", &headers, body.as_bytes());
    assert_eq!(connection.read_head().status, 200);
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("begun") {
        seen.extend(connection.read_chunk().unwrap());
    }
    drop(connection);
    assert_eq!(run(&door, "x")[1]["text"], "1");
}

#[test]
fn code_whose_sandbox_is_killed_has_no_end() {
    super::on_a_host(|server| {
        let door = Door::open(server);
        if !has_python(&door) {
            skip!("no python3");
        }
        let mut connection = door.connect();
        let code = "print('begun', flush=True)\nimport time\ntime.sleep(1000)";
        let body = json!({ "code": code }).to_string();
        let headers = [
            ("e2b-sandbox-id", &*door.id),
            ("x-access-token", &door.token),
            // Some clients take what breaks off after this field in an answer for its end.
            ("connection", "close"),
        ];
        connection.send_request("POST", "/execute", &headers, body.as_bytes());
        let head = connection.read_head();
        assert_eq!(head.header("connection"), None);
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains("begun") {
            seen.extend(connection.read_chunk().unwrap());
        }
        let target = format!("/sandboxes/{}", door.id);
        let deleted = super::api(server, "DELETE", &target, &Value::Null);
        assert_eq!(deleted.status, 204);
        let rest = connection.read_to_close();
        assert!(!rest.ends_with(b"0\r\n\r\n"), "the body ends");
        seen.extend(rest);
        let seen = String::from_utf8_lossy(&seen);
        assert!(!seen.contains("end_of_execution"), "{seen}");
        assert_eq!(door.request("GET", "/health", &[], b"").status, 502);
    });
}

#[test]
fn quiet_code_shows_that_it_lives() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    if !has_python(&door) {
        skip!("no python3");
    }
    let begun = std::time::Instant::now();
    let lines = run(&door, "import time; time.sleep(5.5); 1");
    assert!(begun.elapsed() >= Duration::from_secs(5));
    assert!(lines.contains(&json!({ "type": "keepalive" })), "{lines:?}");
}
