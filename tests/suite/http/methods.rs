//! `Expect`, `HEAD`, `OPTIONS` and 405: which methods a route has, and what each one answers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{assert_error_shape, converse_and_finish, head, joined};
use crate::fixture::{
    OUTER_ROUTES, PATIENCE, Reply, Server, Subjects, TempDir, routes, wait_until,
};

#[test]
fn a_client_that_expects_100_continue_gets_it_before_it_sends_the_body() {
    let server = Server::start();
    let dir = TempDir::new();
    let target = format!("/v1/files/write?path={}", dir.join("file"));
    let mut connection = server.connect();
    for (expect, framing, body) in [
        ("100-continue", "Content-Length: 5", &b"hello"[..]),
        (
            "100-Continue",
            "Transfer-Encoding: chunked",
            &b"5\r\nhello\r\n0\r\n\r\n"[..],
        ),
    ] {
        let _ = std::fs::remove_file(dir.join("file"));
        connection.send(&head(
            "PUT",
            &target,
            format!("Expect: {expect}\r\n{framing}").as_bytes(),
        ));
        let interim = connection.read_head();
        assert_eq!(interim.status, 100);
        assert!(
            interim.header("content-length").is_none(),
            "a 100 has no body"
        );
        connection.send(body);
        assert_eq!(connection.read_reply().status, 200);
        assert_eq!(std::fs::read(dir.join("file")).unwrap(), b"hello");
    }
    let exec = json!({"cmd": "echo asked"}).to_string();
    let lines = format!("Expect: 100-continue\r\nContent-Length: {}", exec.len());
    connection.send(&head("POST", "/v1/exec", lines.as_bytes()));
    assert_eq!(connection.read_head().status, 100);
    connection.send(exec.as_bytes());
    assert!(connection.read_reply().text().contains("asked\\n"));

    // One that does not wait after all: a 100 may come or not, the answer does.
    let lines = b"Expect: 100-continue\r\nContent-Length: 6";
    let request = joined(&[&head("PUT", &target, lines), b"at one"]);
    let replies = converse_and_finish(&server, &request);
    assert_eq!(replies.last().unwrap().status, 200);
    assert_eq!(std::fs::read(dir.join("file")).unwrap(), b"at one");
}

#[test]
fn a_refused_expectation_gets_the_final_status_and_no_100() {
    let server = Server::start();
    let dir = TempDir::new();
    std::fs::create_dir(dir.join("dir")).unwrap();
    let write = format!("/v1/files/write?path={}", dir.join("file"));
    let bad_mode = format!("{write}&mode=9");
    let expect = "Expect: 100-continue\r\nContent-Length: 5";
    let expect_chunked = "Expect: 100-continue\r\nTransfer-Encoding: chunked";
    let too_long = format!("Expect: 100-continue\r\nContent-Length: {}", (16 << 20) + 1);
    let cases = [
        ("PUT", "/v1/nope", expect, 404),
        ("PUT", "/v1/nope", expect_chunked, 404),
        ("PUT", "/v1/files/stat", expect, 405),
        ("PUT", bad_mode.as_str(), expect, 400),
        ("POST", "/v1/exec", too_long.as_str(), 413),
        (
            "PUT",
            write.as_str(),
            "Expect: miracles\r\nContent-Length: 5",
            417,
        ),
    ];
    for (method, target, lines, status) in cases {
        let mut connection = server.connect();
        connection.send(&head(method, target, lines.as_bytes()));
        let reply = connection.read_reply();
        assert_eq!(reply.status, status, "{method} {target}: {}", reply.text());
        assert_error_shape(&reply, target);
        // Whether the body comes after all cannot be known, so the connection is of no more use.
        assert_eq!(
            reply.header("connection"),
            Some("close"),
            "{method} {target}"
        );
        connection.expect_close();
    }
    let mut connection = server.connect();
    connection.token = Some("wrong".to_owned());
    connection.send_request(
        "PUT",
        &write,
        &[("Expect", "100-continue"), ("Content-Length", "5")],
        b"",
    );
    let reply = connection.read_reply();
    assert_eq!(reply.status, 403);
    connection.expect_close();
    assert!(!Path::new(&dir.join("file")).exists());
}

#[test]
fn head_answers_like_get_without_the_body() {
    let server = Server::start();
    let dir = TempDir::new();
    std::fs::write(dir.join("file"), b"0123456789").unwrap();
    let id = server.spawn(&json!({"cmd": "echo text"}))["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let one = format!("/v1/processes/{id}");
    wait_until("the process ends", PATIENCE, || {
        server.get(&one).json()["running"] == false
    });
    let path = dir.path().display();
    let targets = [
        "/health".to_owned(),
        "/v1/processes".to_owned(),
        "/v1/procs".to_owned(),
        one.clone(),
        format!("{one}/logs"),
        format!("{one}/logs?follow=1"),
        format!("{one}/attach"),
        format!("{one}/wait"),
        format!("/v1/files/read?path={path}/file"),
        format!("/v1/files/read?path={path}/file&offset=3&length=2"),
        format!("/v1/files/stat?path={path}/file"),
        format!("/v1/files/list?path={path}"),
        // The errors too.
        "/v1/nope".to_owned(),
        "/v1/exec".to_owned(),
        "/v1/processes/p-999".to_owned(),
        format!("/v1/files/read?path={path}/missing"),
        format!("/v1/files/read?path={path}"),
        "/v1/files/read".to_owned(),
    ];
    let mut connection = server.connect();
    for target in &targets {
        let get = connection.request("GET", target, &[], b"");
        connection.send_request("HEAD", target, &[], b"");
        let head = connection.read_head();
        assert_eq!(head.status, get.status, "HEAD {target}");
        assert_eq!(
            head.header("content-type"),
            get.header("content-type"),
            "HEAD {target}"
        );
        // A length that GET would give may be given or left out, but never differ.
        if get.status == 200 && target != "/health" && head.header("content-length").is_some() {
            let length = get.body.len().to_string();
            assert_eq!(
                head.header("content-length"),
                Some(length.as_str()),
                "HEAD {target}"
            );
        }
        // Had a body come, it would be read as the beginning of this answer.
        let reply = connection.request("GET", "/health", &[], b"");
        assert_eq!(reply.json()["status"], "ok", "after HEAD {target}");
    }
    let target = format!("/v1/files/read?path={path}/file");
    let reply = connection.request("HEAD", &target, &[], b"");
    assert_eq!(
        reply.header("content-length"),
        Some("10"),
        "the size of a file is what HEAD is for"
    );
}

#[test]
fn head_does_not_wait_for_what_it_does_not_send() {
    let server = Server::start();
    let id = server.spawn(&json!({"cmd": "sleep 60"}))["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let started = Instant::now();
    let mut connection = server.connect();
    let target = format!("/v1/processes/{id}/logs?follow=1");
    assert_eq!(connection.request("HEAD", &target, &[], b"").status, 200);
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!(
        server.delete(&format!("/v1/processes/{id}")).json()["killed"],
        true
    );
}

/// Every path with the methods it has, besides those of the proxy, which has all.
fn methods() -> BTreeMap<String, BTreeSet<String>> {
    let names = Subjects::below(".");
    let mut methods: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for route in routes().filter(|route| !route.pattern.starts_with("proxy/")) {
        let path = route.path("/v1", &names);
        let alias = path.replacen("/processes", "/procs", 1);
        for path in [path, alias] {
            let of_path = methods.entry(path).or_default();
            of_path.insert(route.method.to_owned());
        }
    }
    for route in OUTER_ROUTES.iter().filter(|route| !route.is_of_host()) {
        let of_path = methods.entry(route.pattern.to_owned()).or_default();
        of_path.insert(route.method.to_owned());
    }
    methods
}

fn allowed(reply: &Reply) -> BTreeSet<String> {
    let value = reply
        .header("allow")
        .unwrap_or_else(|| panic!("no Allow: {reply:?}"));
    value
        .split(',')
        .map(|method| method.trim().to_owned())
        .collect()
}

#[test]
fn options_and_405_tell_what_is_allowed() {
    let server = Server::start();
    let mut connection = server.connect();
    for (target, mut expected) in methods() {
        let target = &target;
        expected.insert("OPTIONS".to_owned());
        if expected.contains("GET") {
            expected.insert("HEAD".to_owned());
        }
        let reply = connection.request("OPTIONS", target, &[], b"");
        assert_eq!(reply.status, 204, "OPTIONS {target}: {}", reply.text());
        assert_eq!(allowed(&reply), expected, "OPTIONS {target}");
        for method in [
            "GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "TRACE", "BREW", "get",
        ] {
            if expected.contains(method) {
                continue;
            }
            let reply = connection.request(method, target, &[], b"");
            assert_eq!(reply.status, 405, "{method} {target}: {}", reply.text());
            assert_eq!(allowed(&reply), expected, "{method} {target}");
            if method != "HEAD" {
                assert_error_shape(&reply, target);
                assert_eq!(reply.code(), "method_not_allowed");
            }
        }
    }
    assert_eq!(
        connection.request("OPTIONS", "/v1/nope", &[], b"").status,
        404
    );
}

#[test]
fn only_exact_paths_are_routes() {
    let server = Server::start();
    let mut connection = server.connect();
    for target in [
        "/v1",
        "/v1/",
        "/v9/exec",
        "/v1/execs",
        "/v1/exec/",
        "//v1/exec",
        "/v1//exec",
        "/v1/./exec",
        "/v1/x/../exec",
        "/V1/exec",
        "/v1/EXEC",
        "/health/",
        "/health/x",
        "/v1/files",
        "/v1/files/",
        "/v1/files/erase",
        "/v1/processes/",
        "/v1/processes/p-1/",
        "/v1/processes/p-1/x",
        "/v1/sandboxes",
        "/v1/sandboxes/x/exec",
    ] {
        for method in ["GET", "POST", "DELETE"] {
            let reply = connection.request(method, target, &[], b"");
            assert_eq!(reply.status, 404, "{method} {target}: {}", reply.text());
            assert_eq!(reply.code(), "not_found", "{method} {target}");
            assert_error_shape(&reply, target);
        }
    }
    // A query does not change the route, and what nobody knows in it is ignored.
    let reply = connection.request("GET", "/health?path=/x&&=&a=b=c&%41", &[], b"");
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[test]
fn health_says_what_the_contract_says() {
    let server = Server::start();
    let reply = server.get("/health");
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    let health = reply.json();
    assert_eq!(health["status"], "ok");
    assert_eq!(health["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(health["protocol"], json!(3));
    assert_eq!(health["mode"], "dedicated");
    assert!(health["sandboxes"].is_u64(), "{health}");
    assert!(health["isolation"]["landlock_abi"].is_u64(), "{health}");
    assert!(health["isolation"]["layers"].is_array(), "{health}");
    let before = health["uptime_ms"].as_u64().unwrap();
    wait_until("the uptime grows", PATIENCE, || {
        server.get("/health").json()["uptime_ms"].as_u64().unwrap() > before
    });
}
