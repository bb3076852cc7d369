//! Errors are JSON with a code, and no invalid parameter, field or body is replaced by a default.

use std::path::Path;

use serde_json::json;

use super::{assert_error_shape, joined, lossy};
use crate::fixture::{Server, TempDir};

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
#[allow(clippy::too_many_lines, reason = "it is a list")]
fn a_parameter_that_does_not_parse_is_400_and_nothing_happens() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.path().display();
    std::fs::write(dir.join("old"), b"old").unwrap();
    let id = server.spawn(&json!({"cmd": "cat"}))["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let mut connection = server.connect();
    let write = |rest: &str| ("PUT", format!("/v1/files/write?path={path}/new{rest}"));
    let read = |rest: &str| ("GET", format!("/v1/files/read?path={path}/old{rest}"));
    let list = |rest: &str| ("GET", format!("/v1/files/list?path={path}{rest}"));
    let of_process = |method, rest: &str| (method, format!("/v1/processes/{id}/{rest}"));
    let cases = [
        ("PUT", "/v1/files/write".to_owned()),
        ("PUT", "/v1/files/write?path=".to_owned()),
        ("PUT", "/v1/files/write?Path=/x".to_owned()),
        write("%00"),
        write("%zz"),
        write("%4"),
        write("%"),
        write(&format!("&path={path}/other")),
        write("&offset=abc"),
        write("&offset="),
        write("&offset=-1"),
        write("&offset=1.5"),
        write("&offset=0x10"),
        write("&offset=99999999999999999999"),
        write("&offset=0&offset=1"),
        write("&truncate_to=abc"),
        write("&truncate_to=-1"),
        write("&mode=9"),
        write("&mode=888"),
        write("&mode=rwx"),
        write("&mode="),
        write("&mode=-1"),
        write("&mode=17777"),
        write("&mkdir=maybe"),
        write("&mkdir=2"),
        write("&if_sha256=abc"),
        write("&if_absent=maybe"),
        write("&hash=md5"),
        read("&lines=0"),
        read("&lines=2-1"),
        read("&offset=abc"),
        read("&offset=-1&length=1"),
        read("&length=abc"),
        read("&length=-1"),
        read("&length=99999999999999999999"),
        list("&limit=0"),
        list("&limit=abc"),
        list("&limit=-1"),
        list("&limit=100001"),
        ("GET", "/v1/files/list".to_owned()),
        ("GET", "/v1/files/stat".to_owned()),
        ("DELETE", "/v1/files/delete".to_owned()),
        (
            "DELETE",
            format!("/v1/files/delete?path={path}/old&recursive=maybe"),
        ),
        (
            "DELETE",
            format!("/v1/files/delete?path={path}/old&recursive="),
        ),
        (
            "DELETE",
            format!("/v1/files/delete?path={path}/old&path={path}/old"),
        ),
        ("POST", "/v1/files/mkdir".to_owned()),
        ("POST", format!("/v1/files/mkdir?path={path}/new&mode=9")),
        ("POST", format!("/v1/files/move?from={path}/old")),
        ("POST", format!("/v1/files/move?to={path}/new")),
        ("GET", format!("/v1/files/glob?path={path}&limit=0")),
        ("GET", format!("/v1/files/glob?path={path}&pattern=%5B")),
        ("POST", "/v1/files/edit".to_owned()),
        ("POST", "/v1/files/grep".to_owned()),
        ("POST", "/v1/files/patch?strip=101".to_owned()),
        ("POST", format!("/v1/files/copy?from={path}/old")),
        (
            "POST",
            format!("/v1/files/copy?from={path}/old&to={path}/new&overwrite=maybe"),
        ),
        ("GET", "/v1/files/watch".to_owned()),
        (
            "GET",
            format!("/v1/files/watch?path={path}&recursive=maybe"),
        ),
        ("GET", "/v1/files/watches/w-1/events?after=x".to_owned()),
        ("GET", "/v1/files/watches/w-1/events?timeout=x".to_owned()),
        ("POST", format!("/v1/files/chmod?path={path}/old")),
        ("POST", format!("/v1/files/chmod?path={path}/old&mode=9")),
        (
            "POST",
            format!("/v1/files/move?from={path}/old&to={path}/new%00"),
        ),
        of_process("GET", "logs?follow=maybe"),
        of_process("GET", "logs?stdout_offset=abc"),
        of_process("GET", "logs?plain=maybe"),
        of_process("GET", "logs?stderr_offset=-1"),
        of_process("GET", "attach?offset=-2"),
        of_process("GET", "attach?mode=x"),
        of_process("GET", "wait?timeout=abc"),
        of_process("GET", "wait?timeout=-1"),
        of_process("POST", "stdin?eof=maybe"),
    ];
    for (method, target) in &cases {
        let reply = connection.request(method, target, &[], b"");
        assert_eq!(reply.status, 400, "{method} {target}: {}", reply.text());
        assert_error_shape(&reply, target);
    }
    let names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["old"]);
    assert_eq!(std::fs::read(dir.join("old")).unwrap(), b"old");
    // Its stdin was neither written nor closed.
    assert_eq!(
        server.get(&format!("/v1/processes/{id}")).json()["running"],
        true
    );
    assert_eq!(
        server.delete(&format!("/v1/processes/{id}")).json()["killed"],
        true
    );
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
