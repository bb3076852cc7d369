//! The promise of the log: a line for each event, and every line is the server's own.
//!
//! That no secret of a dedicated server is in it is `auth.rs`, that nobody waits for it
//! `regression.rs` and `config.rs`.

use std::os::unix::fs::symlink;
use std::time::Duration;

use serde_json::json;

use crate::fixture::{PATIENCE, Server, TOKEN, TempDir, is_root, wait_until};
use crate::skip;

/// What would be a line of the log if it were let through, and clears a terminal.
const FORGED: &str = "\nsbx-server: forged\r\u{1b}[2J\u{9b}2J\u{2028}x";

/// The same in a target.
const ESCAPED: &str = "%0Asbx-server:%20forged%0D%1B[2J%C2%9B2J%E2%80%A8x";

/// Waits until the log tells of a request that is made now, so of all before it.
fn whole_log(server: &Server) -> String {
    assert_eq!(server.get("/last").status, 404);
    wait_until("the last request is logged", PATIENCE, || {
        server.log().contains("GET /last 404")
    });
    server.log()
}

/// Every line begins as the server's lines do and holds nothing that breaks it or moves a cursor.
#[track_caller]
fn is_the_servers_own(log: &str) {
    assert!(log.contains("forged"), "nothing was tried: {log}");
    for line in log.lines() {
        assert!(
            line.starts_with("sbx-server: ") || line.contains(" listening on "),
            "{line:?} in {log}"
        );
        assert!(!line.starts_with("sbx-server: forged"), "{log}");
        let is_plain = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
        assert!(line.bytes().all(is_plain), "{line:?}");
    }
}

/// Has the server told of hostile names in every place that a request has, below `prefix`.
fn try_to_forge(server: &Server, prefix: &str) {
    for target in [
        format!("{prefix}/processes/{ESCAPED}"),
        format!("{prefix}/processes/{ESCAPED}/logs"),
        format!("{prefix}/files/read?path={ESCAPED}"),
        format!("{prefix}/files/{ESCAPED}?path=x"),
        format!("{prefix}/proxy/{ESCAPED}/x"),
        format!("{prefix}/proxy/1/{ESCAPED}"),
        format!("/{ESCAPED}"),
    ] {
        let status = server.get(&target).status;
        assert!((400..503).contains(&status), "{target}: {status}");
    }
    for body in [
        json!({ "cmd": [FORGED] }),
        json!({ "cmd": FORGED, "id": FORGED }),
        json!({ "cmd": "true", "cwd": FORGED }),
        json!({ "cmd": "true", "tag": FORGED, "env": { FORGED: FORGED } }),
        json!({ "cmd": "true", "encoding": FORGED }),
        json!({ FORGED: FORGED }),
    ] {
        server.post(&format!("{prefix}/exec"), &body);
    }
    // Refused for want of a token, and for not being HTTP.
    let mut stranger = server.connect();
    stranger.token = Some("wrong".to_owned());
    let target = format!("{prefix}/files/{ESCAPED}");
    assert_eq!(stranger.request("GET", &target, &[], b"").status, 403);
    for text in [
        "FOR\u{1b}GED / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nfor\u{1b}ged: x\r\n\r\n",
        "GET /\u{1b}[2Jforged HTTP/1.1\r\n\r\n",
        "GET /\u{9b}2Jforged\u{2028} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ] {
        let mut stranger = server.connect();
        stranger.send(text.as_bytes());
        stranger.read_to_close();
    }
}

#[test]
fn nothing_that_a_client_writes_is_a_line_of_the_log() {
    let server = Server::builder().env("SBX_LOG", "debug").start();
    try_to_forge(&server, "/v1");
    // Failures are logged even without debug, with the name that the client gave.
    let directory = TempDir::new();
    symlink("/dev/full", directory.path().join(FORGED)).unwrap();
    let target = format!(
        "/v1/files/write?path={}/{ESCAPED}",
        directory.path().display()
    );
    assert_eq!(server.put(&target, b"x").status, 507);
    is_the_servers_own(&whole_log(&server));
}

#[test]
fn nothing_that_a_sandbox_or_its_user_writes_is_a_line_of_the_log() {
    if !is_root() {
        skip!("needs root: every sandbox has a user of its own");
    }
    let server = Server::host().env("SBX_LOG", "debug").start();
    let wish = json!({ "env": { FORGED: FORGED } });
    server.post("/v1/sandboxes", &wish);
    let wish = json!({ "env": { "FORGED": FORGED } });
    let sandbox = server.sandbox_with(&wish);
    try_to_forge(&server, &format!("/v1/sandboxes/{}", sandbox.id));
    server.get(&format!("/v1/sandboxes/{ESCAPED}"));
    // It chooses the names of its own processes too.
    sandbox.sh("cp /bin/sleep \"$(printf '\\nsbx-server: forged\\033[2J')\"; ./*forged* 0");
    is_the_servers_own(&whole_log(&server));
}

#[test]
fn what_happens_to_sandboxes_and_their_host_is_in_the_log() {
    if !is_root() {
        skip!("needs root: every sandbox has a user of its own");
    }
    // Few enough to be served under any limit of descriptors, so that the log has no line about them.
    let host = Server::host().env("SBX_MAX_CONNECTIONS", 64);
    let mut server = host.start();
    let idle = server.sandbox_with(&json!({ "idle_timeout_secs": 1 })).id;
    let deleted = server.sandbox().id;
    assert_eq!(
        server.delete(&format!("/v1/sandboxes/{deleted}")).status,
        200
    );
    let mut stranger = server.connect();
    stranger.token = None;
    assert_eq!(
        stranger.request("GET", "/v1/sandboxes", &[], b"").status,
        403
    );
    let expected = [
        " listening on ".to_owned(),
        format!("sandbox {idle} created, uid "),
        format!("sandbox {deleted} created, uid "),
        format!("sandbox {deleted} deleted, uid "),
        "refused GET /v1/sandboxes: the X-Sandbox-Token header is missing".to_owned(),
        format!("sandbox {idle} evicted, uid "),
        "told to end".to_owned(),
    ];
    let holds = |log: &str, words: &String| log.lines().any(|line| line.contains(words.as_str()));
    for words in &expected[..6] {
        wait_until(words, PATIENCE, || holds(&server.log(), words));
    }
    server.signal(libc::SIGTERM);
    assert!(server.wait_for_exit(PATIENCE).success());
    wait_until(&expected[6], PATIENCE, || {
        holds(&server.log(), &expected[6])
    });
    // One line each: nobody else's requests are logged.
    assert_eq!(server.log().lines().count(), expected.len());
}

#[test]
fn a_flood_of_refused_requests_hides_no_other_line() {
    let server = Server::start();
    let mut stranger = server.connect();
    stranger.token = Some("wrong".to_owned());
    let mut refuse = || {
        assert_eq!(
            stranger.request("GET", "/v1/processes", &[], b"").status,
            403
        );
    };
    for _ in 0..500 {
        refuse();
    }
    let refused = |log: &str| log.matches("refused GET /v1/processes").count();
    // About someone else.
    assert_eq!(
        server.put("/v1/files/write?path=/dev/full", b"x").status,
        507
    );
    wait_until("the failure is logged", PATIENCE, || {
        server.log().contains("failed PUT /v1/files/write: 507 ")
    });
    let written = refused(&server.log());
    assert!(written < 400, "{written} of 500 lines");
    wait_until("what was left out is told", PATIENCE, || {
        refuse();
        std::thread::sleep(Duration::from_millis(50));
        server.log().contains(" lines about client 127.0.0.1")
    });
}

#[test]
fn no_secret_of_a_host_or_its_sandboxes_is_in_the_log() {
    if !is_root() {
        skip!("needs root: every sandbox has a user of its own");
    }
    let server = Server::host().env("SBX_LOG", "debug").start();
    let sandbox = server.sandbox_with(&json!({ "env": { "A": "env-v4lue-of-sandbox" } }));
    let body = json!({ "cmd": "cat; echo $B", "env": { "B": "env-v4lue-of-command" }, "stdin": "stdin-s3cret" });
    assert_eq!(
        sandbox.exec(&body).stdout,
        "stdin-s3cretenv-v4lue-of-command\n"
    );
    let target = format!("/v1/sandboxes/{}", sandbox.id);
    assert_eq!(server.get(&format!("{target}/token")).status, 200);
    let bad = json!({ "env": { "A": ["env-v4lue-refused"] } });
    assert_eq!(server.post("/v1/sandboxes", &bad).status, 400);
    let bad = json!({ "cmd": "true", "env": { "A": ["env-v4lue-refused"] } });
    assert_eq!(sandbox.post("exec", &bad).status, 400);
    // A token that opens something, and not this.
    let mut connection = server.connect();
    connection.token = Some(sandbox.token.clone());
    let reply = connection.request("GET", "/v1/sandboxes", &[], b"");
    assert_eq!(reply.status, 403);
    let log = whole_log(&server);
    assert!(log.contains(&format!("POST {target}/exec 200")), "{log}");
    for secret in [sandbox.token.as_str(), TOKEN, "v4lue", "s3cret"] {
        assert!(!log.contains(secret), "{secret} in {log}");
    }
}

#[test]
fn a_failure_that_is_the_machines_is_in_the_log() {
    let server = Server::start();
    assert_eq!(
        server.put("/v1/files/write?path=/dev/full", b"x").status,
        507
    );
    assert_eq!(server.get("/v1/files/read?path=/none").status, 404);
    wait_until("the failure is logged", PATIENCE, || {
        server.log().contains("failed PUT /v1/files/write: 507 ")
    });
    assert_eq!(
        server.log().lines().count(),
        2,
        "the ready line and the failure: {}",
        server.log()
    );
}
