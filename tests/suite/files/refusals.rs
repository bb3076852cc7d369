//! The promise of refusals: each has its status and code, changes nothing, and leaves the connection
//! usable or closed.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;

use super::{PATH_ROUTES, begin, encode, expect_error, expect_refusal, target, words};
use crate::fixture::{Connection, PATIENCE, Server, TOKEN, TempDir, names_in};

#[test]
fn every_refusal_has_its_status_and_code() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("file"), "content").unwrap();
    fs::create_dir(dir.join("dir")).unwrap();
    let long = format!("{}/x", "n".repeat(256));
    for row in [
        "GET    read   missing                            404 not_found",
        "GET    read   missing/below&offset=0&length=1    404 not_found",
        "GET    stat   missing                            404 not_found",
        "GET    list   missing                            404 not_found",
        "DELETE delete missing                            404 not_found",
        "DELETE delete missing&recursive=1                404 not_found",
        "GET    read   dir                                409 is_directory",
        "GET    read   dir&offset=0&length=0              409 is_directory",
        "PUT    write  dir                                409 is_directory",
        "PUT    write  dir&offset=0                       409 is_directory",
        "PUT    write  dir/                               409 is_directory",
        "PUT    write  file/below                         409 not_directory",
        "PUT    write  file/below/deeper&offset=0         409 not_directory",
        "GET    read   file/below                         409 not_directory",
        "GET    list   file                               409 not_directory",
        "GET    list   file/below                         409 not_directory",
        "DELETE delete file/below                         409 not_directory",
        "POST   mkdir  file/below                         409 not_directory",
    ] {
        let [method, route, path, status, code] = words(row);
        let (path, rest) = path.split_at(path.find('&').unwrap_or(path.len()));
        let reply = server.request(method, &target(route, dir.join(path), rest), b"");
        let got = format!("{} {}", reply.status, reply.code());
        assert_eq!(got, format!("{status} {code}"), "{row}: {}", reply.text());
        let message = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(
            message.contains(path.trim_end_matches('/')),
            "it names the path: {message}"
        );
        assert_eq!(reply.header("content-type"), Some("application/json"));
    }
    for (method, route) in PATH_ROUTES {
        let deep = format!("/{}", "d/".repeat(3000));
        expect_refusal(&server.request(method, &target(route, dir.join(&long), ""), b""));
        expect_refusal(&server.request(method, &target(route, deep, ""), b""));
    }
    // `exists()` of a client is a stat that is not found, even below a file.
    let reply = server.get(&target("stat", dir.join("file/below"), ""));
    assert!([404, 409].contains(&reply.status), "{}", reply.text());
    assert_eq!(names_in(dir.path()), ["dir", "file"]);
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"content");
}

#[test]
fn a_route_knows_its_methods() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("file"), "content").unwrap();
    let all = ["GET", "HEAD", "PUT", "POST", "DELETE", "PATCH"];
    for (route, allowed) in [
        ("read", ["GET", "HEAD"].as_slice()),
        ("stat", &["GET", "HEAD"]),
        ("list", &["GET", "HEAD"]),
        ("write", &["PUT", "POST"]),
        ("delete", &["DELETE", "POST"]),
        ("mkdir", &["POST"]),
        ("move", &["POST"]),
    ] {
        let path = target(route, dir.join("file"), "");
        let reply = server.request("OPTIONS", &path, b"");
        assert_eq!(reply.status, 204, "{route}");
        let said: BTreeSet<String> = reply
            .header("allow")
            .unwrap()
            .split(", ")
            .map(str::to_owned)
            .collect();
        for method in all {
            assert_eq!(
                said.contains(method),
                allowed.contains(&method),
                "OPTIONS {route}: {said:?}"
            );
            if !allowed.contains(&method) {
                let reply = server.request(method, &path, b"");
                assert_eq!(reply.status, 405, "{method} {route}");
                let allow: BTreeSet<String> = reply
                    .header("allow")
                    .unwrap()
                    .split(", ")
                    .map(str::to_owned)
                    .collect();
                assert_eq!(allow, said, "{method} {route}");
            }
        }
    }
    for path in [
        "/v1/files",
        "/v1/files/",
        "/v1/files/nothing",
        "/v1/files/read/",
        "/v1/Files/read",
        "/v1/files/read/x",
    ] {
        expect_error(&server.get(path), 404, "not_found");
    }
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"content");
}

#[test]
fn nothing_happens_without_the_token() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("file"), "content").unwrap();
    fs::create_dir(dir.join("dir")).unwrap();
    for token in [
        None,
        Some("wrong"),
        Some(""),
        Some(&TOKEN[..TOKEN.len() - 1]),
    ] {
        for row in [
            "GET     read   file",
            "HEAD    read   file",
            "GET     stat   file",
            "GET     list   dir",
            "PUT     write  file",
            "PUT     write  file&offset=0&truncate_to=0",
            "PUT     write  new/file",
            "DELETE  delete file",
            "DELETE  delete dir&recursive=1",
            "POST    mkdir  new",
            "OPTIONS read   file",
        ] {
            let [method, route, path] = words(row);
            let (path, rest) = path.split_at(path.find('&').unwrap_or(path.len()));
            let mut connection = Connection::open(server.address, token.map(str::to_owned));
            let reply = connection.request(method, &target(route, dir.join(path), rest), &[], b"");
            assert_eq!(reply.status, 403, "{row} with {token:?}");
        }
        let mut connection = Connection::open(server.address, token.map(str::to_owned));
        let moved = format!(
            "/v1/files/move?from={}&to={}",
            encode(dir.join("file")),
            encode(dir.join("x"))
        );
        assert_eq!(connection.request("POST", &moved, &[], b"").status, 403);
    }
    assert_eq!(names_in(dir.path()), ["dir", "file"]);
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"content");
}

#[test]
fn an_upload_says_its_length() {
    let server = Server::start();
    let dir = TempDir::new();
    for rest in ["", "&offset=0"] {
        let mut connection = server.connect();
        let head = format!(
            "PUT {} HTTP/1.1\r\nHost: sandbox\r\nX-Sandbox-Token: {TOKEN}\r\n\r\n",
            target("write", dir.join("file"), rest)
        );
        connection.send(head.as_bytes());
        expect_error(&connection.read_reply(), 411, "length_required");
    }
    assert_eq!(names_in(dir.path()), Vec::<String>::new());
}

#[test]
fn a_refused_upload_leaves_the_connection_in_step_or_closed() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::create_dir(dir.join("dir")).unwrap();
    // A small body is read to its end, so that the connection can go on.
    let mut connection = server.connect();
    for _ in 0..3 {
        let reply = connection.request(
            "PUT",
            &target("write", dir.join("dir"), ""),
            &[],
            &[b'G'; 1000],
        );
        expect_error(&reply, 409, "is_directory");
    }
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
    // A large one is not: the answer comes, then the end.
    let body = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n".repeat(100_000);
    let mut connection = begin(
        &server,
        "PUT",
        &target("write", dir.join("dir"), ""),
        body.len(),
    );
    connection.stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let _ = connection.stream.write_all(&body);
    expect_error(&connection.read_reply(), 409, "is_directory");
    connection.expect_close();
    assert_eq!(names_in(dir.path()), ["dir"]);
}
