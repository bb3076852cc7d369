//! A query parameter that a route does not have is refused, so that a misspelt one is not ignored.

use serde_json::json;

use crate::fixture::{Server, TempDir, assert_error, is_root};
use crate::proxy::Backend;
use crate::skip;

#[test]
fn an_unknown_parameter_is_named_with_the_known_ones() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.path().display();
    let reply = server.get(&format!("/v1/files/list?path={path}&recursive=1"));
    assert_error(&reply, 400, "bad_request");
    assert_eq!(
        reply.json()["error"],
        "the parameter recursive is not known here; files/list takes path, after, limit, detail"
    );
    let reply = server.get("/v1/ports?all=1");
    assert_eq!(
        reply.json()["error"],
        "the parameter all is not known here; ports takes no parameters"
    );
    let reply = server.get("/v1/metrics?disks=1");
    assert_eq!(
        reply.json()["error"],
        "the parameter disks is not known here; /v1/metrics takes disk"
    );
}

#[test]
fn every_route_refuses_an_unknown_parameter_before_it_acts() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.path().display();
    std::fs::write(dir.join("kept"), "kept").unwrap();
    let process = server.spawn(&json!({"cmd": "sleep 1000"}));
    let id = process["id"].as_str().unwrap();
    let run = json!({"cmd": format!("touch {path}/ran")}).to_string();
    for family in ["processes", "procs"] {
        for (method, target) in [
            ("GET", format!("{family}?tag=x")),
            ("POST", format!("{family}?background=1")),
            ("GET", format!("{family}/{id}?x")),
            ("DELETE", format!("{family}/{id}?force=1")),
            ("GET", format!("{family}/{id}/logs?offset=1")),
            ("GET", format!("{family}/{id}/attach?token=x")),
            ("GET", format!("{family}/{id}/wait?timeout=0&timeout_ms=1")),
            ("POST", format!("{family}/{id}/kill?signal=9")),
            ("POST", format!("{family}/{id}/resize?rows=1&cols=1")),
            ("POST", format!("{family}/{id}/stdin?close=1")),
            ("POST", "exec?timeout=1".to_owned()),
            ("GET", "venv?path=x".to_owned()),
            ("GET", "network?recent=1".to_owned()),
            ("POST", format!("venv?path={path}/venv")),
            ("PUT", format!("files/write?path={path}/new&modes=600")),
            ("GET", format!("files/read?path={path}/kept&limit=1")),
            ("HEAD", format!("files/read?path={path}/kept&Path=x")),
            ("GET", format!("files/stat?path={path}/kept&follow=1")),
            ("POST", "files/hash?algorithm=md5".to_owned()),
            ("POST", format!("files/compare?path={path}")),
            ("GET", format!("files/archive?path={path}&recursive=1")),
            ("DELETE", format!("files/delete?path={path}/kept&force=1")),
            ("POST", format!("files/mkdir?path={path}/made&parents=1")),
            ("PUT", format!("files/archive?path={path}/made&mode=600")),
            (
                "POST",
                format!("files/move?from={path}/kept&to={path}/gone&overwrite=1"),
            ),
            ("GET", format!("files/glob?path={path}&recursive=1")),
            ("POST", format!("files/edit?path={path}/kept")),
            ("POST", format!("files/grep?path={path}")),
            ("POST", format!("files/patch?path={path}&fuzz=1")),
            (
                "POST",
                format!("files/copy?from={path}/kept&to={path}/copy&force=1"),
            ),
            (
                "POST",
                format!("files/chmod?path={path}/kept&mode=0&follow=1"),
            ),
            ("GET", format!("files/watch?path={path}&depth=1")),
            ("POST", "files/watches?path=x".to_owned()),
            ("GET", "files/watches/w-1/events?before=1".to_owned()),
            ("DELETE", "files/watches/w-1?force=1".to_owned()),
            ("GET", "languages?all=1".to_owned()),
            ("GET", "contexts?language=bash".to_owned()),
            ("POST", "contexts?language=bash".to_owned()),
            ("GET", "contexts/c-1?x".to_owned()),
            ("DELETE", "contexts/c-1?force=1".to_owned()),
            ("POST", "contexts/c-1/execute?timeout=1".to_owned()),
            ("POST", "contexts/c-1/interrupt?kill_after=1".to_owned()),
            ("POST", "contexts/c-1/restart?wait=1".to_owned()),
            ("POST", "contexts/c-1/input?eof=1".to_owned()),
            ("GET", "contexts/c-1/logs?offset=1".to_owned()),
            ("GET", "contexts/c-1/executions?after=1".to_owned()),
            ("GET", "contexts/c-1/executions/e-1?x".to_owned()),
            (
                "GET",
                "contexts/c-1/executions/e-1/events?before=1".to_owned(),
            ),
            ("POST", "execute?language=bash".to_owned()),
            ("POST", "../execute?language=bash".to_owned()),
            ("GET", "ports/80/wait?timeout=0&%70=1".to_owned()),
        ] {
            let target = match target.strip_prefix("..") {
                Some(outside) => outside.to_owned(),
                None => format!("/v1/{target}"),
            };
            let reply = server.request(method, &target, run.as_bytes());
            assert_eq!(reply.status, 400, "{method} {target}: {}", reply.text());
        }
    }
    assert_eq!(crate::fixture::names_in(dir.path()), ["kept"]);
    let processes = server.get("/v1/processes").json();
    assert_eq!(processes.as_array().unwrap().len(), 1, "{processes}");
    assert_eq!(processes[0]["running"], true);
    // What runs would outlive a server that is killed.
    server.delete(&format!("/v1/processes/{id}"));
}

#[test]
fn the_open_routes_and_the_proxy_ignore_their_query() {
    let server = Server::start();
    for target in ["/?a=1", "/health?a=1", "/openapi.json?a=%", "/health?%zz"] {
        assert_eq!(server.get(target).status, 200, "{target}");
    }
    let backend = Backend::saying("fine");
    assert_eq!(server.get(&backend.path("/a?b=%&c")).text(), "fine");
    assert!(backend.next().line().starts_with("GET /a?b=%&c "));
}

#[test]
fn a_host_refuses_them_too() {
    if !is_root() {
        skip!("only root can be a host");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    for (method, target) in [
        ("GET", "/v1/sandboxes?all=1".to_owned()),
        ("POST", "/v1/sandboxes?count=3".to_owned()),
        ("DELETE", "/v1/sandboxes?force=1".to_owned()),
        ("GET", format!("/v1/sandboxes/{}?x=1", sandbox.id)),
        ("DELETE", format!("/v1/sandboxes/{}?x=1", sandbox.id)),
        ("GET", format!("/v1/sandboxes/{}/token?x=1", sandbox.id)),
        ("GET", sandbox.target("files/list?path=/&x=1")),
    ] {
        let reply = server.request(method, &target, b"");
        assert_error(&reply, 400, "bad_request");
    }
    assert_eq!(
        server.get("/v1/sandboxes").json().as_array().unwrap().len(),
        1
    );
}
