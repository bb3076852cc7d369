//! A query parameter that a route does not have is refused, so that a misspelt one is not ignored.

use serde_json::json;

use crate::fixture::{Server, Subjects, TempDir, assert_error, is_root, names_in, routes};
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
        "the parameter recursive is not known here; files/list takes path, after, limit, detail, user"
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
    std::fs::write(dir.join("kept"), "kept").unwrap();
    let names = Subjects::below(dir.path().to_str().unwrap());
    server.spawn(&json!({"cmd": "sleep 1000", "id": "job"}));
    let mut connection = server.connect();
    for route in routes().filter(|route| !route.pattern.starts_with("proxy/")) {
        for parameter in ["unknown=1", "unknown", "Path=x", "%70=1"] {
            let ask = route.ask_for(parameter, "/v1", &names);
            for ask in [ask.by_alias(), Some(ask)].into_iter().flatten() {
                let reply = ask.send(&mut connection);
                assert_eq!(reply.status, 400, "{ask:?}: {}", reply.text());
            }
        }
    }
    assert_eq!(names_in(dir.path()), ["kept"]);
    let processes = server.get("/v1/processes").json();
    assert_eq!(processes.as_array().unwrap().len(), 1, "{processes}");
    assert_eq!(processes[0]["running"], true);
    // What runs would outlive a server that is killed.
    server.delete("/v1/processes/job");
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
