//! Requests and responses of every framing come through as they are, and the connection is in step
//! afterwards.

use std::io::Write;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use super::{Backend, SilentPort};
use crate::fixture::{Connection, Server, TOKEN, parse_replies, random_bytes};

/// A second request on the same connection must be the server's own again.
#[track_caller]
fn expect_in_step(connection: &mut Connection) {
    let reply = connection.request("GET", "/health", &[], b"");
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.json()["status"], "ok");
}

#[test]
fn method_path_and_query_arrive_as_they_were_sent() {
    let server = Server::start();
    let backend = Backend::saying("fine");
    for (method, rest, line) in [
        ("GET", "", "GET / HTTP/1.1"),
        ("GET", "/", "GET / HTTP/1.1"),
        ("GET", "?a=b", "GET /?a=b HTTP/1.1"),
        ("GET", "/?", "GET /? HTTP/1.1"),
        ("GET", "//", "GET // HTTP/1.1"),
        ("GET", "//a//b/", "GET //a//b/ HTTP/1.1"),
        ("GET", "/%2F%2e%2E/%zz", "GET /%2F%2e%2E/%zz HTTP/1.1"),
        ("GET", "/../../v1/exec", "GET /../../v1/exec HTTP/1.1"),
        (
            "GET",
            "/a?b=c&d=%26+%zz?e",
            "GET /a?b=c&d=%26+%zz?e HTTP/1.1",
        ),
        ("POST", "/v1/exec", "POST /v1/exec HTTP/1.1"),
        ("DELETE", "/a", "DELETE /a HTTP/1.1"),
        ("OPTIONS", "/a", "OPTIONS /a HTTP/1.1"),
        ("PATCH", "/a", "PATCH /a HTTP/1.1"),
        ("PROPFIND", "/a", "PROPFIND /a HTTP/1.1"),
        ("get", "/a", "get /a HTTP/1.1"),
        ("M-SEARCH", "/a", "M-SEARCH /a HTTP/1.1"),
        ("TRACE", "/a", "TRACE /a HTTP/1.1"),
    ] {
        let reply = server.request(method, &backend.path(rest), b"");
        assert_eq!((reply.status, &*reply.text()), (200, "fine"), "{line}");
        assert_eq!(backend.next().line(), line);
    }
}

#[test]
fn bytes_that_are_no_text_arrive_as_they_were_sent() {
    let server = Server::start();
    let backend = Backend::saying("fine");
    let mut connection = server.connect();
    let mut request = format!("GET /v1/proxy/{}/caf", backend.port).into_bytes();
    request.extend_from_slice(b"\xe9/\xff?\xfe=\x80 HTTP/1.1\r\nHost: localhost\r\n");
    write!(request, "X-Sandbox-Token: {TOKEN}\r\nX-Bytes: ").unwrap();
    request.extend_from_slice(b"\xe9\xff\r\n\r\n");
    connection.send(&request);
    assert_eq!(connection.read_reply().text(), "fine");
    let received = backend.next();
    assert_eq!(
        received.line(),
        "GET /caf\u{e9}/\u{ff}?\u{fe}=\u{80} HTTP/1.1"
    );
    assert_eq!(received.value("x-bytes"), "\u{e9}\u{ff}");
}

#[test]
fn an_absolute_target_is_forwarded_by_its_path() {
    let server = Server::start();
    let backend = Backend::saying("fine");
    let target = format!("http://example.org:1{}", backend.path("/a?b"));
    assert_eq!(server.get(&target).text(), "fine");
    assert_eq!(backend.next().line(), "GET /a?b HTTP/1.1");
}

#[test]
fn responses_of_every_framing_leave_the_connection_in_step() {
    let server = Server::start();
    for (response, status, body) in [
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
            200,
            "hello",
        ),
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, ""),
        (
            "HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
            200,
            "hello",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nTrailer: t\r\n\r\n",
            200,
            "hello",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n0\r\n\r\n",
            200,
            "",
        ),
        ("HTTP/1.1 200 OK\r\n\r\nuntil the end", 200, "until the end"),
        ("HTTP/1.0 200 OK\r\n\r\nuntil the end", 200, "until the end"),
        ("HTTP/1.0 200\r\n\r\n", 200, ""),
        ("HTTP/1.1 204 No Content\r\n\r\n", 204, ""),
        (
            "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nextra",
            204,
            "",
        ),
        (
            "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\nETag: \"x\"\r\n\r\n",
            304,
            "",
        ),
        (
            "HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n",
            304,
            "",
        ),
        (
            "HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\n\r\n",
            205,
            "",
        ),
        (
            "HTTP/1.1 301 Moved\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n",
            301,
            "",
        ),
        (
            "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone",
            404,
            "gone",
        ),
        (
            "HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\noops",
            500,
            "oops",
        ),
        ("HTTP/1.1 799 Odd\r\nContent-Length: 1\r\n\r\nx", 799, "x"),
        // What follows a response is nobody's.
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
            200,
            "hello",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
            200,
            "",
        ),
    ] {
        let backend = Backend::answering(response);
        let mut connection = server.connect();
        for _ in 0..2 {
            let reply = connection.request("GET", &backend.path("/x"), &[], b"");
            assert_eq!(
                (reply.status, &*reply.text()),
                (status, body),
                "{response:?}"
            );
            assert_eq!(reply.header("connection"), None, "{response:?}");
        }
        expect_in_step(&mut connection);
    }
}

#[test]
fn a_response_to_head_has_a_length_and_no_body() {
    let server = Server::start();
    for (response, length) in [
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n",
            Some("12345"),
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            None,
        ),
        ("HTTP/1.1 200 OK\r\n\r\n", None),
        // One that does not know what HEAD is.
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
            Some("5"),
        ),
    ] {
        let backend = Backend::answering(response);
        let mut connection = server.connect();
        let reply = connection.request("HEAD", &backend.path("/"), &[], b"");
        assert_eq!(reply.status, 200);
        assert_eq!(reply.header("content-length"), length, "{response:?}");
        assert_eq!(reply.header("transfer-encoding"), None);
        expect_in_step(&mut connection);
        assert!(backend.next().line().starts_with("HEAD / "));
    }
}

#[test]
fn bodies_of_requests_arrive_whole() {
    let server = Server::start();
    let backend = Backend::saying("thanks");
    let mut connection = server.connect();
    for size in [0, 1, 4096, 65_536, 3_000_000] {
        let body = random_bytes(size, 7);
        let reply = connection.request("POST", &backend.path("/up"), &[], &body);
        assert_eq!(reply.text(), "thanks");
        let received = backend.next();
        assert_eq!(received.value("content-length"), size.to_string());
        assert!(received.values("transfer-encoding").is_empty());
        assert!(received.body == body, "{size} bytes");
    }
    for chunks in [vec![], vec![1], vec![5, 70_000, 1, 200_000]] {
        let sizes = || chunks.iter().copied();
        let mut coded = Vec::new();
        for size in sizes() {
            write!(coded, "{size:X};ext=1\r\n").unwrap();
            coded.extend(random_bytes(size, 8));
            coded.extend_from_slice(b"\r\n");
        }
        coded.extend_from_slice(b"0\r\nX-Trailer: x\r\n\r\n");
        let headers = [("Transfer-Encoding", "chunked")];
        let reply = connection.request("PUT", &backend.path("/up"), &headers, &coded);
        assert_eq!(reply.text(), "thanks");
        let received = backend.next();
        assert_eq!(received.value("transfer-encoding"), "chunked");
        assert!(received.values("content-length").is_empty());
        let body: Vec<u8> = sizes().flat_map(|size| random_bytes(size, 8)).collect();
        assert!(received.body == body, "{chunks:?}");
    }
    expect_in_step(&mut connection);
}

#[test]
fn a_request_without_a_body_gets_none() {
    let server = Server::start();
    let backend = Backend::saying("fine");
    let mut connection = server.connect();
    connection.send_request("DELETE", &backend.path("/"), &[], b"");
    assert_eq!(connection.read_reply().text(), "fine");
    let received = backend.next();
    assert!(received.values("content-length").is_empty());
    assert!(received.values("transfer-encoding").is_empty());
}

#[test]
fn pipelined_requests_go_each_where_they_belong() {
    let server = Server::start();
    let (one, two) = (Backend::saying("one"), Backend::saying("two"));
    let mut connection = server.connect();
    connection.send_request("POST", &one.path("/a"), &[], b"first");
    connection.send_request("GET", &two.path("/b"), &[], b"");
    connection.send_request("GET", "/health", &[], b"");
    connection.send_request("GET", &one.path("/c"), &[], b"");
    connection.stream.shutdown(Shutdown::Write).unwrap();
    let replies = parse_replies(&connection.read_to_close()).unwrap();
    let texts: Vec<_> = replies
        .iter()
        .filter(|reply| reply.status != 102)
        .map(|reply| reply.text().chars().take(3).collect::<String>())
        .collect();
    assert_eq!(texts, ["one", "two", "{\"s", "one"]);
    assert_eq!(one.next().body, b"first");
    assert_eq!(two.next().line(), "GET /b HTTP/1.1");
    assert_eq!(one.next().line(), "GET /c HTTP/1.1");
}

#[test]
fn every_request_on_a_connection_is_authorized_by_itself() {
    let server = Server::start();
    let backend = Backend::saying("fine");
    let mut connection = server.connect();
    let reply = connection.request("GET", &backend.path("/"), &[], b"");
    assert_eq!(reply.text(), "fine");
    backend.next();
    connection.token = None;
    let reply = connection.request("GET", &backend.path("/"), &[], b"");
    assert_eq!((reply.status, &*reply.code()), (403, "forbidden"));
    connection.token = Some("wrong".to_owned());
    let reply = connection.request("GET", &backend.path("/"), &[], b"");
    assert_eq!(reply.status, 403);
    backend.expect_nothing();
}

#[test]
fn a_client_of_http_1_0_is_answered_and_closed() {
    let server = Server::start();
    for (response, body) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "hello"),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            "hello",
        ),
        (
            "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\nhello",
            "hello",
        ),
    ] {
        let backend = Backend::answering(response);
        let mut connection = server.connect();
        let target = backend.path("/");
        connection
            .send(format!("GET {target} HTTP/1.0\r\nX-Sandbox-Token: {TOKEN}\r\n\r\n").as_bytes());
        let bytes = connection.read_to_close();
        let replies = parse_replies(&bytes).unwrap();
        assert_eq!(replies.len(), 1, "{response:?}");
        assert_eq!(replies[0].text(), body);
        assert_eq!(replies[0].header("transfer-encoding"), None);
    }
}

/// A client that does not know them takes the first for the answer, and the answer for that to its next request: so do
/// Python's `http.client` and older proxies, whose next request may be somebody else's.
#[test]
fn interim_responses_are_not_passed_on() {
    let server = Server::start();
    let interim = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n\
         HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 199 Odd\r\n\r\n";
    for (method, content) in [("GET", "ok"), ("HEAD", ""), ("POST", "ok")] {
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{content}");
        let backend = Backend::answering(format!("{interim}{answer}"));
        let mut connection = server.connect();
        connection.send_request(method, &backend.path("/"), &[], b"");
        let head = connection.read_head();
        assert_eq!(head.status, 200, "{method}");
        if method != "HEAD" {
            assert_eq!(connection.read_body(head).text(), content);
        }
        expect_in_step(&mut connection);
    }
}

#[test]
fn a_server_says_whether_it_wants_a_body() {
    let server = Server::start();
    let willing = Backend::start(|mut connection| {
        let head = connection.read_head().unwrap();
        assert_eq!(head.values("expect"), ["100-continue"]);
        connection.send("HTTP/1.1 100 Continue\r\n\r\n");
        while connection.buffer.len() < 5 && connection.fill() {}
        let body = String::from_utf8(connection.buffer.clone()).unwrap();
        connection.send(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{body}"
        ));
    });
    let expecting = [("Expect", "100-continue"), ("Content-Length", "5")];
    let mut connection = server.connect();
    connection.send_request("PUT", &willing.path("/"), &expecting, b"");
    assert_eq!(connection.read_head().status, 100);
    connection.send(b"hello");
    assert_eq!(connection.read_reply().text(), "hello");
    expect_in_step(&mut connection);

    let unwilling = Backend::start(|mut connection| {
        connection.read_head().unwrap();
        connection.send("HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n");
        assert!(connection.read_to_end().is_empty(), "no byte of the body");
    });
    let mut connection = server.connect();
    connection.send_request("PUT", &unwilling.path("/"), &expecting, b"");
    let reply = connection.read_reply();
    assert_eq!(reply.status, 413);
    assert_eq!(reply.header("connection"), Some("close"));
    connection.expect_close();
}

#[test]
fn a_server_that_ignores_the_question_gets_the_body_after_a_moment() {
    let server = Server::start();
    let backend = Backend::saying("thanks");
    let mut connection = server.connect();
    let expecting = [("Expect", "100-continue"), ("Content-Length", "5")];
    let begun = Instant::now();
    connection.send_request("PUT", &backend.path("/"), &expecting, b"");
    assert_eq!(connection.read_head().status, 100);
    assert!(
        begun.elapsed() >= Duration::from_millis(900),
        "it was asked"
    );
    connection.send(b"hello");
    assert_eq!(connection.read_reply().text(), "thanks");
    assert_eq!(backend.next().body, b"hello");
    expect_in_step(&mut connection);
}

#[test]
fn a_client_that_has_closed_its_sending_half_gets_its_response() {
    let server = Server::start();
    let backend = Backend::start(|mut connection| {
        connection.read_request().unwrap();
        std::thread::sleep(Duration::from_millis(700));
        connection.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
        std::thread::sleep(Duration::from_millis(700));
        connection.send("2\r\nde\r\n0\r\n\r\n");
    });
    let mut connection = server.connect();
    connection.send_request("POST", &backend.path("/"), &[], b"body");
    connection.stream.shutdown(Shutdown::Write).unwrap();
    let replies = parse_replies(&connection.read_to_close()).unwrap();
    let last = replies.last().unwrap();
    assert_eq!((last.status, &*last.text()), (200, "abcde"));
}

#[test]
fn ipv6_is_tried_after_ipv4() {
    let server = Server::start();
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        crate::skip!("there is no IPv6 here");
    }
    // Nobody else may listen on the same port of the other protocol meanwhile.
    let held = SilentPort::new();
    let backend = Backend::on(&format!("[::1]:{}", held.port), |mut connection| {
        if connection.read_request().is_some() {
            connection.send("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nsix");
        }
    });
    assert_eq!(server.get(&backend.path("/")).text(), "six");
}
