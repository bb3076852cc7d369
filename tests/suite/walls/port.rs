//! The server's own port, as seen from inside: a sandbox opens itself, and nothing else.

use std::time::{Duration, Instant};

use serde_json::json;

use super::Neighbour;
use super::probe::{Plan, Probe};
use crate::fixture::{Ask, PATIENCE, Sandbox, Server, Subjects, is_root, routes, wait_until};
use crate::skip;

/// Every route of a sandbox, with something that it would do.
fn asks_of(sandbox: &Sandbox<'_>) -> Vec<Ask> {
    let names = Subjects::below(".")
        .with("old", "marker")
        .with("process", "p-1");
    let prefix = sandbox.prefix();
    let mut asks = Vec::new();
    for route in routes() {
        let ask = route.ask(&prefix, &names);
        asks.extend(ask.by_alias());
        asks.push(ask);
    }
    for (method, route) in [
        ("GET", "token"),
        ("OPTIONS", "exec"),
        ("HEAD", "files/stat?path=marker"),
        ("GET", "nonsense"),
        ("GET", "../sandboxes"),
    ] {
        asks.push(Ask::new(method, sandbox.target(route), ""));
    }
    asks
}

/// Every route of the host.
const HOST_ROUTES: &[(&str, &str, &str)] = &[
    ("POST", "/v1/sandboxes", "{}"),
    ("POST", "/v1/sandboxes", r#"{"count":5}"#),
    ("GET", "/v1/sandboxes", ""),
    ("DELETE", "/v1/sandboxes", ""),
    ("OPTIONS", "/v1/sandboxes", ""),
    ("POST", "/v1/exec", r#"{"cmd":"touch /harm"}"#),
    ("POST", "/v1/processes", r#"{"cmd":"touch /harm"}"#),
    ("GET", "/v1/processes", ""),
    (
        "POST",
        "/v1/execute",
        r#"{"code":"touch /harm","language":"bash"}"#,
    ),
    (
        "POST",
        "/execute",
        r#"{"code":"touch /harm","language":"bash"}"#,
    ),
    ("GET", "/v1/files/read?path=/etc/shadow", ""),
    ("PUT", "/v1/files/write?path=/harm", "x"),
    ("GET", "/v1/files/list?path=/root", ""),
    ("GET", "/v1/proxy/22/", ""),
    ("GET", "/v1", ""),
];

#[test]
fn no_token_but_its_own_opens_a_sandbox_and_its_own_opens_nothing_else() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let neighbour = Neighbour::new(&server);
    let sandbox = server.sandbox();
    let other = &neighbour.sandbox;
    let process = other.spawn(&json!({ "cmd": ["sleep", "1000"] }));
    assert_eq!(process["id"], "p-1");
    let address = server.address.to_string();
    let guess = "0".repeat(64);
    let short = &other.token[..63];
    let upper = other.token.to_uppercase();
    let hosts_length = "x".repeat(server.token.as_ref().unwrap().len());
    let mut plan = Plan::default();
    for token in [
        &sandbox.token,
        "",
        &guess,
        short,
        &upper,
        &hosts_length,
        &other.id,
    ] {
        for Ask {
            method,
            target,
            body,
        } in asks_of(other)
        {
            // An argument of a program has no zero bytes.
            let body = body.replace('\0', "");
            plan.add(&["http", &address, method, &target, token, &body], "403");
        }
        for target in [
            format!("/v1/sandboxes/{}", other.id),
            "/v1/sandboxes/0".to_owned(),
        ] {
            for method in ["GET", "DELETE", "OPTIONS", "PUT"] {
                plan.add(&["http", &address, method, &target, token, ""], "403");
            }
        }
        for (method, target, body) in HOST_ROUTES {
            plan.add(&["http", &address, method, target, token, body], "403");
        }
    }
    // What opens it is the host's to know; and its path is one only as it is.
    for target in [
        format!("/v1/sandboxes/{}/token", sandbox.id),
        format!("/v1/sandboxes/{}/../{}/exec", sandbox.id, other.id),
        format!(
            "/v1/sandboxes/{}/exec/../../{}/files/list?path=/",
            sandbox.id, other.id
        ),
        format!(
            "/v1/sandboxes/{}%2f..%2f{}/files/list?path=/",
            sandbox.id, other.id
        ),
        format!("//v1/sandboxes/{}/files/list?path=/", other.id),
    ] {
        plan.add(
            &["http", &address, "GET", &target, &sandbox.token, ""],
            "403|404",
        );
    }
    let own = format!("/v1/sandboxes/{}", sandbox.id);
    plan.add(&["http", &address, "GET", &own, &sandbox.token, ""], "200");
    let probe = Probe::new(&sandbox);
    probe.check(&plan);
    // Nothing has happened.
    neighbour.check();
    let processes = server.get(&other.target("processes")).json();
    assert_eq!(processes.as_array().unwrap().len(), 1, "{processes}");
    assert_eq!(processes[0]["running"], true);
    assert_eq!(
        server.get("/v1/sandboxes").json().as_array().unwrap().len(),
        2
    );
    assert!(!std::path::Path::new("/harm").exists());
    // Its own routes are its own.
    let mut plan = Plan::default();
    for (method, route, body) in [
        ("POST", "exec", r#"{"cmd":"echo x"}"#),
        ("GET", "processes", ""),
        ("PUT", "files/write?path=x", "x"),
        ("GET", "files/read?path=x", ""),
        ("GET", "files/list?path=/", ""),
    ] {
        plan.add(
            &[
                "http",
                &address,
                method,
                &sandbox.target(route),
                &sandbox.token,
                body,
            ],
            "200",
        );
    }
    plan.add(&["http", &address, "GET", "/health", "", ""], "200");
    probe.check(&plan);
}

#[test]
fn refused_requests_do_not_keep_a_neighbour_from_being_idle() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let other = server.sandbox_with(&json!({ "idle_timeout_secs": 2 }));
    let made = Instant::now();
    let address = server.address.to_string();
    let target = other.target("processes");
    let act = ["http", address.as_str(), "GET", &target, &sandbox.token, ""];
    let probe = Probe::new(&sandbox);
    let home = other.home.clone();
    wait_until("the neighbour is evicted", PATIENCE, || {
        let outcome = probe.run_one(&act);
        assert!(matches!(outcome.as_str(), "403" | "404"), "{outcome}");
        !home.exists()
    });
    assert!(made.elapsed() >= Duration::from_secs(2), "not early");
}

#[test]
fn a_sandbox_may_end_itself() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let other = server.sandbox();
    let address = server.address.to_string();
    let own = format!("/v1/sandboxes/{}", sandbox.id);
    let probe = Probe::new(&sandbox);
    let body = probe.command(&[&["http", &address, "DELETE", &own, &sandbox.token, ""]]);
    let events: Vec<_> = sandbox.exec_stream(&body).collect();
    // The one that asked is ended with it, and so hears no answer.
    assert_eq!(events.last().unwrap()["reason"], "deleted", "{events:?}");
    wait_until("it is gone", PATIENCE, || !sandbox.home.exists());
    assert_eq!(other.sh("echo here"), "here\n");
}
