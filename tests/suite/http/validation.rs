//! Errors are JSON with a code, and no invalid parameter, field or body is replaced by a default.

use std::path::Path;

use serde_json::json;

use super::{assert_error_shape, joined, lossy};
use crate::fixture::{Server, Subjects, TempDir, names_in, routes};

#[test]
fn every_error_is_json_with_its_code() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.path().display();
    let mut connection = server.connect();
    for (method, target, body, status, code) in [
        ("POST", "/v1/exec".to_owned(), "{", 400, "bad_request"),
        ("GET", "/v1/files/read".to_owned(), "", 400, "bad_request"),
        ("GET", "/nope".to_owned(), "", 404, "not_found"),
        ("GET", "/v1/processes/p-99".to_owned(), "", 404, "not_found"),
        (
            "GET",
            format!("/v1/files/read?path={path}/none"),
            "",
            404,
            "not_found",
        ),
        ("PATCH", "/health".to_owned(), "", 405, "method_not_allowed"),
        (
            "GET",
            format!("/v1/files/read?path={path}"),
            "",
            409,
            "is_directory",
        ),
        (
            "POST",
            "/v1/exec".to_owned(),
            r#"{"cmd":["/no/such/program"]}"#,
            400,
            "not_found",
        ),
        (
            "POST",
            "/v1/exec".to_owned(),
            r#"{"cmd":["/etc/passwd"]}"#,
            400,
            "not_executable",
        ),
        (
            "POST",
            "/v1/exec".to_owned(),
            r#"{"cmd":"true","cwd":"/none"}"#,
            400,
            "bad_cwd",
        ),
    ] {
        let reply = connection.request(method, &target, &[], body.as_bytes());
        assert_eq!(reply.status, status, "{method} {target}: {}", reply.text());
        assert_error_shape(&reply, &target);
        assert_eq!(reply.code(), code, "{method} {target}: {}", reply.text());
    }
    connection.token = None;
    let reply = connection.request("GET", "/v1/processes", &[], b"");
    assert_eq!((reply.status, reply.code().as_str()), (403, "forbidden"));
    assert_error_shape(&reply, "403");
}

#[test]
fn what_a_route_does_not_take_is_400_and_nothing_happens() {
    let server = Server::start();
    let dir = TempDir::new();
    std::fs::write(dir.join("kept"), b"kept\n").unwrap();
    let names = Subjects::below(dir.path().to_str().unwrap());
    server.spawn(&json!({"cmd": "cat", "id": "job"}));
    let mut connection = server.connect();
    // The other rows name a context that has run something.
    let first = ["contexts", "contexts/{context}/execute"];
    for route in routes().filter(|route| route.method == "POST" && first.contains(&route.pattern)) {
        let ask = route.ask("/v1", &Subjects::below("/nonexistent"));
        assert_eq!(ask.send(&mut connection).status, 200, "{ask:?}");
    }
    for route in routes() {
        for ask in route.invalid_asks("/v1", &names) {
            let reply = ask.send(&mut connection);
            if reply.status != 400 {
                eprintln!("XX {ask:?} {} {}", reply.status, reply.text());
                continue;
            }
            assert_error_shape(&reply, &ask.target);
        }
    }
    // What names a file cannot be left out.
    let path = dir.path().display();
    for (method, target) in [
        ("PUT", "/v1/files/write".to_owned()),
        ("PUT", "/v1/files/write?path=".to_owned()),
        ("PUT", "/v1/files/write?Path=/x".to_owned()),
        ("GET", "/v1/files/list".to_owned()),
        ("GET", "/v1/files/stat".to_owned()),
        ("DELETE", "/v1/files/delete".to_owned()),
        ("POST", "/v1/files/mkdir".to_owned()),
        ("POST", "/v1/files/chmod?mode=600".to_owned()),
        ("POST", format!("/v1/files/move?from={path}/kept")),
        ("POST", format!("/v1/files/move?to={path}/new")),
    ] {
        let reply = connection.request(method, &target, &[], b"");
        assert_eq!(reply.status, 400, "{method} {target}: {}", reply.text());
    }
    assert_eq!(names_in(dir.path()), ["kept"]);
    assert_eq!(std::fs::read(dir.join("kept")).unwrap(), b"kept\n");
    // Its stdin was neither written nor closed.
    assert_eq!(server.get("/v1/processes/job").json()["running"], true);
    assert_eq!(server.delete("/v1/processes/job").json()["killed"], true);
}

#[test]
fn a_field_of_the_wrong_type_is_400_and_names_the_field() {
    let server = Server::start();
    let dir = TempDir::new();
    let ran = dir.join("ran");
    let mut connection = server.connect();
    let too_long = "x".repeat(65);
    let fields = [
        ("cmd", json!(5)),
        ("cmd", json!(null)),
        ("cmd", json!(true)),
        ("cmd", json!({})),
        ("cmd", json!([])),
        ("cmd", json!(["echo", 5])),
        ("cmd", json!(["echo", null])),
        ("cmd", json!(["echo", "a\0b"])),
        ("cmd", json!(format!("touch {ran}\0"))),
        ("shell", json!("yes")),
        ("shell", json!(1)),
        ("shell", json!(false)),
        ("env", json!([])),
        ("env", json!("A=b")),
        ("env", json!({"A": []})),
        ("env", json!({"A": {"B": "c"}})),
        ("env", json!({"A=B": "c"})),
        ("env", json!({"": "c"})),
        ("env", json!({"A": "b\0c"})),
        ("env", json!({"A\0B": "c"})),
        ("cwd", json!(5)),
        ("cwd", json!(["/"])),
        ("cwd", json!("/\0")),
        ("timeout", json!("5")),
        ("timeout", json!(true)),
        ("timeout", json!(-1)),
        ("timeout", json!(0)),
        ("timeout", json!([1])),
        ("stdin", json!(5)),
        ("stdin", json!(["x"])),
        ("background", json!("yes")),
        ("background", json!(1)),
        ("pty", json!(1)),
        ("pty", json!("xterm")),
        ("pty", json!({ "rows": 0 })),
        ("pty", json!({ "cols": 4097 })),
        ("pty", json!({ "term": "a b" })),
        ("tag", json!(5)),
        ("encoding", json!("latin-1")),
        ("encoding", json!(5)),
        ("on_disconnect", json!("maybe")),
        ("on_disconnect", json!(true)),
        ("id", json!(5)),
        ("id", json!("")),
        ("id", json!("12345")),
        ("id", json!("p-5")),
        ("id", json!("a b")),
        ("id", json!("a/b")),
        ("id", json!("\u{e9}")),
        ("id", json!(too_long)),
    ];
    for (field, value) in &fields {
        for target in ["/v1/exec", "/v1/processes"] {
            let mut body = json!({"cmd": format!("touch {ran}")});
            body[field] = value.clone();
            let reply = connection.request("POST", target, &[], body.to_string().as_bytes());
            assert_eq!(reply.status, 400, "{target} {body}: {}", reply.text());
            assert_error_shape(&reply, target);
            let error = reply.json()["error"].as_str().unwrap().to_owned();
            assert!(error.contains(field), "the message names {field}: {error}");
            assert!(!Path::new(&ran).exists(), "{body} was executed");
        }
    }
    let mut body = json!({"cmd": ["touch", ran], "shell": true});
    let reply = connection.request("POST", "/v1/exec", &[], body.to_string().as_bytes());
    assert_eq!(
        reply.status,
        400,
        "an array is not for a shell: {}",
        reply.text()
    );
    body = json!({"command": format!("touch {ran}")});
    let reply = connection.request("POST", "/v1/exec", &[], body.to_string().as_bytes());
    assert_eq!(reply.status, 400, "no cmd: {}", reply.text());
    assert!(reply.text().contains("cmd"));
    assert!(!Path::new(&ran).exists());
}

#[test]
fn broken_json_is_400_never_a_default() {
    let server = Server::start();
    let dir = TempDir::new();
    let ran = dir.join("ran");
    let valid = json!({"cmd": format!("touch {ran}")}).to_string();
    let valid = valid.as_bytes();
    let mut bodies: Vec<Vec<u8>> = [
        &b""[..],
        b" ",
        b"null",
        b"5",
        b"[]",
        b"\"cmd\"",
        b"true",
        b"nonsense",
        b"{\"cmd\":\"\xff\"}",
    ]
    .iter()
    .map(|body| body.to_vec())
    .collect();
    bodies.push(br#"{"cmd":"\ud800"}"#.to_vec());
    bodies.push(joined(&[valid, b"x"]));
    bodies.push(joined(&[valid, valid]));
    bodies.push(joined(&[b"\xef\xbb\xbf", valid]));
    bodies.push(joined(&[valid, b"\0"]));
    for end in 0..valid.len() {
        bodies.push(valid[..end].to_vec());
    }
    let mut connection = server.connect();
    for body in &bodies {
        for target in ["/v1/exec", "/v1/processes"] {
            let reply = connection.request("POST", target, &[], body);
            assert_eq!(reply.status, 400, "{:?}: {}", lossy(body), reply.text());
            assert_error_shape(&reply, target);
            assert!(!Path::new(&ran).exists(), "{:?} was executed", lossy(body));
        }
    }
    assert_eq!(
        connection.request("POST", "/v1/exec", &[], valid).status,
        200
    );
    assert!(Path::new(&ran).exists());
}
