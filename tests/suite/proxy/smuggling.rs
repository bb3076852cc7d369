//! Neither side can put the other out of step: what a server sees is one request, and what a client
//! sees are responses.

use std::io::Write;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use super::Backend;
use crate::fixture::{PATIENCE, Server, TOKEN, find, parse_replies};

/// Sends bytes behind a proxied request's line and token; what reached the server, if anything did,
/// and what the client got.
fn attempt(server: &Server, rest: &[u8]) -> (Option<Vec<u8>>, Vec<u8>) {
    let (told, seen) = channel();
    let told = Arc::new(Mutex::new(told));
    let backend = Backend::start(move |mut connection| {
        let _ = connection.read_head();
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        // The head was taken out of the buffer: what is left must be the body and nothing else.
        let rest = connection.read_to_end();
        told.lock().unwrap().send(rest).unwrap();
    });
    let mut connection = server.connect();
    let mut request = format!(
        "POST {} HTTP/1.1\r\nHost: h\r\nX-Sandbox-Token: {TOKEN}\r\n",
        backend.path("/x")
    )
    .into_bytes();
    request.extend_from_slice(rest);
    let _ = connection.stream.write_all(&request);
    let _ = connection.stream.shutdown(std::net::Shutdown::Write);
    let answer = connection.read_to_close();
    let reached = answer.starts_with(b"HTTP/1.1 200") || answer.starts_with(b"HTTP/1.1 102");
    let seen = reached.then(|| seen.recv_timeout(PATIENCE).unwrap());
    (seen, answer)
}

const SMUGGLED: &str = "GET /v1/smuggled HTTP/1.1\r\nHost: evil\r\n\r\n";

#[test]
fn requests_that_could_be_read_in_two_ways_do_not_reach_a_server() {
    let server = Server::start();
    for lines in [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding:\u{b}chunked\r\n\r\n0\r\n\r\n",
        " Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "X: y\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "X: y\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "X: y\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "X: y\0\r\n\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        "Content-Length: +5\r\n\r\nhello",
        "Content-Length: 5,5\r\n\r\nhello",
    ] {
        let (seen, answer) = attempt(&server, format!("{lines}{SMUGGLED}").as_bytes());
        assert_eq!(seen, None, "{lines:?}");
        let replies = parse_replies(&answer).unwrap();
        assert_eq!(replies.len(), 1, "{lines:?}: {replies:?}");
        assert_eq!(replies[0].status, 400, "{lines:?}");
    }
}

#[test]
fn a_server_sees_one_request_and_its_body() {
    let server = Server::start();
    for (lines, body) in [
        ("Content-Length: 5\r\n\r\nhello", "hello"),
        ("Content-Length: 0\r\n\r\n", ""),
        ("\r\n", ""),
        (
            "Content-Length: 5\r\ncontent-length: 5\r\n\r\nhello",
            "hello",
        ),
        (
            "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            "5\r\nhello\r\n0\r\n\r\n",
        ),
        // Named as one of the connection's own, it frames the body all the same.
        (
            "Connection: Content-Length\r\nContent-Length: 5\r\n\r\nhello",
            "hello",
        ),
        (
            "Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nT: u\r\n\r\n",
            "5\r\nhello\r\n0\r\n\r\n",
        ),
    ] {
        let (seen, answer) = attempt(&server, format!("{lines}{SMUGGLED}").as_bytes());
        // The size of a chunk may be written with leading zeros.
        let seen = String::from_utf8(seen.unwrap()).unwrap();
        let seen = seen.trim_start_matches("0000000");
        let seen = if seen == "\r\n\r\n" { "" } else { seen };
        assert_eq!(seen, body, "{lines:?}");
        // The smuggled one was a request of this connection's, and had no token.
        let statuses: Vec<_> = parse_replies(&answer)
            .unwrap()
            .iter()
            .map(|reply| reply.status)
            .filter(|status| *status != 102)
            .collect();
        assert_eq!(statuses, [200, 403], "{lines:?}");
    }
}

#[test]
fn a_body_that_breaks_off_or_breaks_its_framing_never_looks_whole() {
    let server = Server::start();
    for lines in [
        "Content-Length: 50\r\n\r\nhello",
        "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nZ\r\n",
        "Transfer-Encoding: chunked\r\n\r\n5\r\nhello!!",
    ] {
        let (told, seen) = channel();
        let told = Mutex::new(told);
        let backend = Backend::start(move |mut connection| {
            let whole = connection.read_request().is_some();
            told.lock().unwrap().send(whole).unwrap();
        });
        let mut connection = server.connect();
        let head = format!(
            "POST {} HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {TOKEN}\r\n{lines}",
            backend.path("/")
        );
        connection.send(head.as_bytes());
        let _ = connection.stream.shutdown(std::net::Shutdown::Write);
        let answer = connection.read_to_close();
        assert!(!answer.starts_with(b"HTTP/1.1 200"), "{lines:?}");
        assert!(!seen.recv_timeout(PATIENCE).unwrap(), "{lines:?}");
    }
}

#[test]
fn a_server_cannot_put_headers_or_responses_into_the_clients_connection() {
    let server = Server::start();
    for response in [
        "HTTP/1.1 200 OK\r\nX: a\nSet-Cookie: evil\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: a\rSet-Cookie: evil\r\n\r\n",
        "HTTP/1.1 200 O\nK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX : y\r\n\r\n",
        "HTTP/1.1 200 OK\r\n folded\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc",
        "HTTP/1.1 103 A\r\nX: a\nB: c\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        "HTTP/2 200\r\n\r\n",
        "HTTP/0.9 200\r\n\r\n",
        "<html>no head at all</html>",
        "SSH-2.0-OpenSSH_9.6",
        "\r\n\r\n",
        "HTTP/1.1 99 Low\r\n\r\n",
    ] {
        let backend = Backend::answering(response);
        let mut connection = server.connect();
        let reply = connection.request("GET", &backend.path("/"), &[], b"");
        assert_eq!(
            (reply.status, &*reply.code()),
            (502, "bad_response"),
            "{response:?}"
        );
        assert!(
            reply.json()["error"]
                .as_str()
                .unwrap()
                .contains(&backend.port.to_string())
        );
        // Nothing is wrong with the client's own connection.
        let reply = connection.request("GET", "/health", &[], b"");
        assert_eq!(reply.status, 200, "{response:?}");
    }
}

#[test]
fn a_chunked_body_that_is_none_ends_the_connection() {
    let server = Server::start();
    for rest in [
        "zz\r\n",
        "5\r\nhelloX",
        "-1\r\n",
        "fffffffffffffffff\r\n",
        "5\r\nhel",
        "",
    ] {
        let backend = Backend::answering(format!(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n{rest}"
        ));
        let mut connection = server.connect();
        connection.send_request("GET", &backend.path("/"), &[], b"");
        let bytes = connection.read_to_close();
        assert!(find(&bytes, b"abc").is_some(), "{rest:?}");
        assert!(parse_replies(&bytes).is_err(), "{rest:?} looks whole");
    }
}

/// The server answers as soon as the head has come, which must not hide that the request is malformed.
#[test]
fn a_request_with_a_malformed_chunk_is_400_even_if_the_server_answers_early() {
    let server = Server::start();
    let backend = Backend::start(|mut connection| {
        if connection.read_head().is_some() {
            connection.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi");
            connection.read_to_end();
        }
    });
    for round in 0..40 {
        for body in ["zz\r\n", "5\r\nhelloX", "5\r\nhello\r\n-1\r\n"] {
            let mut connection = server.connect();
            let head = format!(
                "POST {} HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {TOKEN}\r\nTransfer-Encoding: chunked\r\n\r\n{body}",
                backend.path("/")
            );
            connection.send(head.as_bytes());
            let replies = parse_replies(&connection.read_to_close()).unwrap();
            assert_eq!(replies.len(), 1, "round {round}, {body:?}");
            assert_eq!(replies[0].status, 400, "round {round}, {body:?}");
            assert_eq!(replies[0].code(), "bad_request", "round {round}, {body:?}");
        }
    }
}

#[test]
fn a_server_that_hangs_up_early_does_not_reveal_it_as_a_short_body() {
    let server = Server::start();
    let backend = Backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort");
    let mut connection = server.connect();
    connection.send_request("GET", &backend.path("/"), &[], b"");
    connection.send_request("GET", "/health", &[], b"");
    let bytes = connection.read_to_close();
    assert!(parse_replies(&bytes).is_err(), "it looks whole");
    assert!(
        find(&bytes, b"status").is_none(),
        "a second response follows"
    );
}

#[test]
fn what_an_upgrade_did_not_start_is_no_tunnel() {
    let server = Server::start();
    // The classic: a server that refuses the upgrade, and a client that goes on as if it had not.
    let backend = Backend::answering("HTTP/1.1 426 No\r\nContent-Length: 0\r\n\r\n");
    let mut connection = server.connect();
    let headers = [("Connection", "Upgrade"), ("Upgrade", "websocket")];
    connection.send_request("GET", &backend.path("/"), &headers, b"");
    connection.send(
        format!(
            "GET {} HTTP/1.1\r\nHost: localhost\r\n\r\n",
            backend.path("/again")
        )
        .as_bytes(),
    );
    assert_eq!(connection.read_reply().status, 426);
    assert_eq!(connection.read_reply().status, 403);
    assert_eq!(backend.next().line(), "GET / HTTP/1.1");
    backend.expect_nothing();
}
