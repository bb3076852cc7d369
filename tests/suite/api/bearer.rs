//! `Authorization: Bearer` where `X-Sandbox-Token` is absent.

use serde_json::json;

use crate::fixture::{Reply, Server, TOKEN, assert_error, is_root};
use crate::proxy::Backend;
use crate::skip;

fn ask(server: &Server, method: &str, target: &str, headers: &[(&str, &str)]) -> Reply {
    let mut connection = server.connect();
    connection.token = None;
    connection.request(method, target, headers, b"{\"cmd\":\"true\"}")
}

#[test]
fn a_bearer_token_opens_every_route() {
    let server = Server::start();
    let process = server.spawn(&json!({"cmd": "true"}));
    let one = format!("/v1/processes/{}", process["id"].as_str().unwrap());
    let bearer = format!("Bearer {TOKEN}");
    for (method, target) in [
        ("GET", "/v1/metrics"),
        ("POST", "/v1/exec"),
        ("POST", "/v1/processes"),
        ("GET", "/v1/processes"),
        ("GET", &one),
        ("GET", &format!("{one}/logs")),
        ("GET", &format!("{one}/wait")),
        ("POST", &format!("{one}/kill")),
        ("DELETE", &one),
        ("GET", "/v1/files/list?path=/"),
        ("HEAD", "/v1/files/read?path=/etc/passwd"),
        ("GET", "/v1/ports"),
    ] {
        let reply = ask(&server, method, target, &[("Authorization", &bearer)]);
        assert_eq!(reply.status, 200, "{method} {target}: {}", reply.text());
        let reply = ask(&server, method, target, &[("Authorization", "Bearer x")]);
        assert_eq!(reply.status, 403, "{method} {target}");
    }
}

#[test]
fn the_scheme_is_bearer_in_any_case() {
    let server = Server::start();
    for scheme in ["Bearer", "bearer", "BEARER", "bEaReR", "Bearer  "] {
        let value = format!("{scheme} {TOKEN}");
        let reply = ask(
            &server,
            "GET",
            "/v1/processes",
            &[("authorization", &value)],
        );
        assert_eq!(reply.status, 200, "{value}");
    }
    for value in [
        format!("Basic {TOKEN}"),
        format!("Token {TOKEN}"),
        format!("Bearer{TOKEN}"),
        format!("Bearer {TOKEN}x"),
        format!("Bearer Bearer {TOKEN}"),
        format!("Bearer \"{TOKEN}\""),
        format!("Bearer {TOKEN}, Bearer {TOKEN}"),
        "Bearer".to_owned(),
        "Bearer ".to_owned(),
        "Bear".to_owned(),
        TOKEN.to_owned(),
    ] {
        let reply = ask(
            &server,
            "GET",
            "/v1/processes",
            &[("Authorization", &value)],
        );
        assert_error(&reply, 403, "forbidden");
        assert!(!reply.text().contains(TOKEN), "{}", reply.text());
        assert!(reply.header("www-authenticate").is_none());
    }
}

#[test]
fn only_the_sandbox_token_header_counts_where_both_are_there() {
    let server = Server::start();
    let (right, wrong) = (format!("Bearer {TOKEN}"), "Bearer hf_something");
    for (token, authorization, status) in [
        (TOKEN, wrong, 200),
        (TOKEN, "Basic eA==", 200),
        ("wrong", &right, 403),
        ("", &right, 403),
    ] {
        let headers = [("X-Sandbox-Token", token), ("Authorization", authorization)];
        let reply = ask(&server, "GET", "/v1/processes", &headers);
        assert_eq!(reply.status, status, "{token:?} {authorization:?}");
        let headers = [headers[1], headers[0]];
        let reply = ask(&server, "GET", "/v1/processes", &headers);
        assert_eq!(reply.status, status, "{authorization:?} {token:?}");
    }
    // A proxy in front may have checked only one of two.
    for pair in [[wrong, &right], [&right, wrong]] {
        let headers = pair.map(|value| ("Authorization", value));
        assert_eq!(ask(&server, "GET", "/v1/processes", &headers).status, 403);
    }
    let same = [("Authorization", right.as_str()); 2];
    assert_eq!(ask(&server, "GET", "/v1/processes", &same).status, 200);
}

#[test]
fn a_bearer_token_is_not_passed_on() {
    let server = Server::start();
    let backend = Backend::saying("fine");
    let bearer = format!("Bearer {TOKEN}");
    let reply = ask(
        &server,
        "GET",
        &backend.path("/"),
        &[("Authorization", &bearer)],
    );
    assert_eq!(reply.text(), "fine");
    let head = backend.next().head;
    assert!(!head.contains(TOKEN), "{head}");
    assert!(!head.to_lowercase().contains("authorization"), "{head}");
}

#[test]
fn a_sandbox_token_can_be_a_bearer_token() {
    if !is_root() {
        skip!("only root can be a host");
    }
    let server = Server::host().start();
    let (a, b) = (server.sandbox(), server.sandbox());
    let bearer = format!("Bearer {}", a.token);
    let headers = [("Authorization", bearer.as_str())];
    for (target, status) in [
        (a.target("processes"), 200),
        (b.target("processes"), 403),
        ("/v1/sandboxes".to_owned(), 403),
    ] {
        assert_eq!(ask(&server, "GET", &target, &headers).status, status);
    }
}
