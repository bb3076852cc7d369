//! Fields of bodies that the server does not know: a misspelt one is refused before anything happens, and any other is
//! told in the answer.

use serde_json::{Value, json};

use crate::fixture::{PATIENCE, Server, TempDir, assert_error, events_of, is_root, wait_until};
use crate::skip;

#[track_caller]
fn refused(server: &Server, target: &str, body: &Value, names: [&str; 2]) {
    let reply = server.post(target, body);
    assert_error(&reply, 400, "bad_request");
    let text = reply.json()["error"].as_str().unwrap().to_owned();
    assert!(names.iter().all(|name| text.contains(name)), "{text}");
}

#[test]
fn a_misspelt_field_of_a_command_keeps_it_from_running() {
    let server = Server::start();
    let directory = TempDir::new();
    let made = directory.join("made");
    let cmd = format!("touch {made}");
    for (name, meant) in [
        ("timeout_secs", "timeout"),
        ("timeout_ms", "timeout"),
        ("timeouts", "timeout"),
        ("tiemout", "timeout"),
        ("environment", "env"),
        ("envs", "env"),
        ("working_dir", "cwd"),
        ("network_policy", "network"),
        ("backgruond", "background"),
        ("on_disconect", "on_disconnect"),
    ] {
        let mut body = json!({ "cmd": cmd });
        body[name] = json!(1);
        refused(&server, "/v1/exec", &body, [name, meant]);
        refused(&server, "/v1/processes", &body, [name, meant]);
    }
    // What is missing may be there under another name.
    refused(
        &server,
        "/v1/exec",
        &json!({ "command": cmd }),
        ["command", "cmd"],
    );
    refused(
        &server,
        "/v1/exec",
        &json!({ "script": "x", "language": "bash" }),
        ["script", "code"],
    );
    assert!(!std::path::Path::new(&made).exists());
    // Null is the same as absent.
    let reply = server.post("/v1/exec", &json!({ "cmd": "true", "timeout_secs": null }));
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[test]
fn a_misspelt_limit_makes_no_sandbox_without_limits() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().start();
    for (name, meant) in [
        ("max_memory_mb", "max_total_mem_mb"),
        ("memory", "max_total_mem_mb"),
        ("max_cpus", "max_cpu"),
        ("cpus", "max_cpu"),
        ("network_policy", "network"),
        ("netwrok", "network"),
        ("max_proc", "max_procs"),
        ("idle_timeout", "idle_timeout_secs"),
        ("read_only_path", "read_only_paths"),
        ("isolaton", "isolation"),
    ] {
        refused(&server, "/v1/sandboxes", &json!({ name: 1 }), [name, meant]);
    }
    assert_eq!(server.get("/v1/sandboxes").json(), json!([]));
    let made = server.post(
        "/v1/sandboxes",
        &json!({ "count": 1, "flavor": "x", "tier": {} }),
    );
    assert_eq!(made.status, 200, "{}", made.text());
    assert_eq!(made.json()["ignored"], json!(["flavor", "tier"]));
}

#[test]
fn other_unknown_fields_are_told() {
    let server = Server::start();
    let extra = json!({ "cmd": "echo hi", "user": "root", "sudo": [1, { "a": null }] });
    let ignored = json!(["sudo", "user"]);
    let start = &events_of(&server.post("/v1/exec", &extra).body)[0];
    assert_eq!(
        (&start["event"], &start["ignored"]),
        (&json!("start"), &ignored)
    );
    let started = server.post("/v1/processes", &extra).json();
    assert_eq!(started["ignored"], ignored, "{started}");
    let id = started["id"].as_str().unwrap();
    wait_until("it has ended", PATIENCE, || {
        server.get(&format!("/v1/processes/{id}")).json()["running"] == false
    });
    let killed = server.post(&format!("/v1/processes/{id}/kill"), &json!({ "whom": 1 }));
    assert_eq!(
        killed.json()["ignored"],
        json!(["whom"]),
        "{}",
        killed.text()
    );
    // As many as are of use, and none where there is none.
    let mut many = json!({ "cmd": "true" });
    for number in 0..100 {
        many[format!("x{number:02}")] = json!(number);
    }
    many["y".repeat(100)] = json!(1);
    let start = &events_of(&server.post("/v1/exec", &many).body)[0];
    assert_eq!(start["ignored"].as_array().unwrap().len(), 16);
    let start = &events_of(&server.post("/v1/exec", &json!({ "cmd": "true" })).body)[0];
    assert!(start.get("ignored").is_none(), "{start}");
}

#[test]
fn a_misspelt_field_of_a_file_to_compare_is_refused() {
    let server = Server::start();
    let directory = TempDir::new();
    std::fs::write(directory.join("a"), "a").unwrap();
    let compare = |entry: Value| {
        let whole = json!({ "path": "a", "size": 1 });
        json!({ "path": directory.path(), "entries": [whole, entry] })
    };
    for (name, meant) in [
        ("sha265", "sha256"),
        ("mtime_m", "mtime_ms"),
        ("mtimes_ms", "mtime_ms"),
    ] {
        let mut entry = json!({ "path": "b", "size": 1 });
        entry[name] = json!(1);
        refused(
            &server,
            "/v1/files/compare",
            &compare(entry),
            ["entries[1]: ", meant],
        );
    }
    let other = compare(json!({ "path": "b", "size": 1, "owner": "me", "tags": null }));
    let told = server.post("/v1/files/compare", &other).json();
    assert_eq!(told["ignored"], json!(["entries[1].owner"]), "{told}");
    assert_eq!(told["missing"], json!(["b"]));
    let entry = json!({ "path": "b", "size": 1, "one": 1, "two": 2 });
    let many = json!({ "path": directory.path(), "entries": vec![entry; 20], "rest": 1 });
    let told = server.post("/v1/files/compare", &many);
    assert_eq!(told.status, 400, "each file once: {}", told.text());
    let entries: Vec<_> = (0..20)
        .map(|at| json!({ "path": format!("{at}"), "size": 1, "one": 1 }))
        .collect();
    let many = json!({ "path": directory.path(), "entries": entries, "rest": 1 });
    let told = server.post("/v1/files/compare", &many).json();
    assert_eq!(told["ignored"].as_array().unwrap().len(), 16, "{told}");
}
