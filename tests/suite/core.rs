//! The promise of a build without features: it has the core, and says of everything else that it was left out.
//!
//! Compiled only for that build. `.ci/run` runs it together with the tests of the real clients, of Jobs, of `exec`
//! and of host mode.

use std::process::Command;

use serde_json::{Value, json};

use crate::fixture::{
    Ask, BINARY, Server, Subjects, TOKEN, TempDir, assert_error, is_root, routes_left_out,
};
use crate::skip;

/// The settings of what is left out, and the features.
const SETTINGS: [(&str, &str); 4] = [
    ("SBX_CONSOLE", "console"),
    ("SBX_CONTEXTS", "interpreter"),
    ("SBX_E2B_TEMPLATES", "e2b"),
    ("SBX_MCP", "mcp"),
];

/// What is left out beside routes: method, path, a header that decides, and the feature.
const LEFT_OUT: &[(&str, &str, Option<&str>, &str)] = &[
    ("POST", "/process.Process/Start", None, "e2b"),
    ("POST", "/filesystem.Filesystem/ListDir", None, "e2b"),
    ("GET", "/files?path=a", None, "e2b"),
    ("POST", "/files?path=a", None, "e2b"),
    ("GET", "/envs", None, "e2b"),
    ("POST", "/v2/sandboxes", None, "e2b"),
    ("GET", "/templates/a", None, "e2b"),
    ("POST", "/sandboxes", Some("X-API-Key"), "e2b"),
    ("GET", "/metrics", Some("E2b-Sandbox-Id"), "e2b"),
    ("GET", "/health", Some("X-API-Key"), "e2b"),
    ("POST", "/execute", Some("X-Access-Token"), "e2b"),
    ("GET", "/console", None, "console"),
    ("HEAD", "/console/app.js", None, "console"),
    ("GET", "/t/0123456789abcdef/", None, "console"),
    ("POST", "/mcp", None, "mcp"),
    ("GET", "/mcp", None, "mcp"),
    ("OPTIONS", "/mcp", None, "mcp"),
    ("POST", "/v1/sandboxes/a/mcp", None, "mcp"),
];

/// Asks for all that is left out, with and without a token. Each body would leave a file if it were executed.
fn check_left_out(server: &Server, file: &str) {
    let code = format!("touch {file}");
    let body = json!({
        "code": code, "language": "bash", "port": 1, "templateID": "base",
        "process": {"cmd": "/bin/sh", "args": ["-c", code]},
        "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": {"name": "run", "arguments": {"command": code}},
    });
    let body = body.to_string();
    let names = Subjects::below(".").with("ran", file);
    for token in [None, Some("wrong"), Some(TOKEN)] {
        let doors = LEFT_OUT.iter().map(|&(method, path, header, feature)| {
            (Ask::new(method, path, &body), header, feature)
        });
        let routes = routes_left_out().flat_map(|(feature, route)| {
            ["/v1", "/v1/sandboxes/a"].map(|prefix| (route.ask(prefix, &names), None, feature))
        });
        for (ask, header, feature) in doors.chain(routes) {
            let mut connection = server.connect();
            connection.token = token.map(str::to_owned);
            let mut headers = vec![("Accept", "application/json, text/event-stream")];
            headers.extend(header.map(|name| (name, TOKEN)));
            let reply = connection.request(ask.method, &ask.target, &headers, ask.body.as_bytes());
            let what = format!("{ask:?} by {token:?}");
            assert_eq!(reply.status, 501, "{what}: {}", reply.text());
            if ask.method == "HEAD" {
                continue;
            }
            assert_error(&reply, 501, "not_built");
            let text = reply.json()["error"].as_str().unwrap().to_owned();
            assert!(
                text.starts_with("this build of sbx-server has no "),
                "{text}"
            );
            let end = format!(": it was built without the feature {feature}");
            assert!(text.ends_with(&end), "{what}: {text}");
            // The connection serves the next request.
            assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
        }
    }
}

#[test]
fn what_is_left_out_says_so_and_does_nothing() {
    let directory = TempDir::new();
    let file = directory.path().join("made");
    let server = Server::start();
    check_left_out(&server, file.to_str().unwrap());
    assert!(!file.exists());
    assert_eq!(server.get("/v1/processes").json(), json!([]));
    let metrics =
        server
            .connect()
            .request("GET", "/v1/metrics", &[("Accept", "application/json")], b"");
    assert_eq!(metrics.json()["processes_running"], 0);
}

#[test]
fn on_a_host_too() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    check_left_out(&server, "made");
    assert_eq!(server.get("/v1/sandboxes").json(), json!([]));
    let sandbox = server.sandbox();
    let path = format!("/v1/sandboxes/{}/execute", sandbox.id);
    let reply = server.post(&path, &json!({"code": "touch made", "language": "bash"}));
    assert_error(&reply, 501, "not_built");
    assert!(!sandbox.home.join("made").exists());
}

#[test]
fn a_path_that_was_never_there_is_still_unknown() {
    let server = Server::start();
    for path in ["/v1/nope", "/nope", "/metrics", "/sandboxes"] {
        assert_error(&server.get(path), 404, "not_found");
    }
    let mut stranger = server.connect();
    stranger.token = None;
    assert_error(
        &stranger.request("GET", "/v1/nope", &[], b""),
        403,
        "forbidden",
    );
}

#[test]
fn the_contract_does_not_list_what_is_left_out() {
    let server = Server::start();
    let contract = server.get("/openapi.json").json();
    let paths = contract["paths"].as_object().unwrap();
    assert!(paths.contains_key("/exec") && paths.contains_key("/files/read"));
    for path in paths.keys() {
        for word in [
            "contexts",
            "execut",
            "languages",
            "tickets",
            "attach",
            "mcp",
            "files/grep",
            "files/watch",
            "files/archive",
        ] {
            assert!(!path.contains(word), "{path}");
        }
    }
    assert!(contract["components"]["schemas"].get("Context").is_none());
    assert!(contract.pointer("/components/schemas/Process").is_some());

    let metrics =
        server
            .connect()
            .request("GET", "/v1/metrics", &[("Accept", "application/json")], b"");
    let promised = &contract["components"]["schemas"]["Metrics"];
    for name in ["contexts", "executions", "execution_seconds"] {
        assert!(metrics.json().get(name).is_none(), "{name}");
        assert!(promised["properties"].get(name).is_none(), "{name}");
        assert!(
            !promised["required"]
                .as_array()
                .unwrap()
                .contains(&json!(name))
        );
    }
}

#[test]
fn settings_of_what_is_left_out_are_not_listed_and_have_no_effect() {
    let help = Command::new(BINARY).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    assert!(help.contains("SBX_PORT"));
    let mut builder = Server::builder();
    for (name, _) in SETTINGS {
        assert!(!help.contains(name), "{name}: {help}");
        // Not even the value is looked at.
        builder = builder.env(name, "nonsense");
    }
    let log = builder.start().log();
    for (name, feature) in SETTINGS {
        let line = format!("{name} is ignored: this build is without the feature {feature}");
        assert!(log.contains(&line), "{log}");
    }
}

#[test]
fn commands_and_scripts_run() {
    let server = Server::start();
    let run = |body: Value| {
        let outcome = server.exec(&body);
        (outcome.stdout.clone(), outcome.exit["exit_code"].clone())
    };
    let printed = |text: &str| (text.to_owned(), json!(0));
    assert_eq!(run(json!({"cmd": "echo core"})), printed("core\n"));
    let script = json!({"code": "echo \"$1\"", "language": "bash", "args": ["core"]});
    assert_eq!(run(script), printed("core\n"));
}

#[test]
fn the_root_names_no_console() {
    let reply = Server::start().get("/");
    assert_eq!(reply.status, 200);
    assert!(!reply.text().contains("console"), "{}", reply.text());
    assert!(reply.text().contains("/openapi.json"));
}
