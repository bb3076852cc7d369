//! A server that is not there, or does not behave, costs its own request an answer and nothing else.

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use super::{Backend, SilentPort, Way};
use crate::fixture::{PATIENCE, Reply, Server, TOKEN, wait_until};

#[test]
fn where_nothing_listens_the_answer_says_what_was_tried() {
    let server = Server::start();
    let silent = SilentPort::new();
    let port = silent.port;
    let mut connection = server.connect();
    for body in [&b""[..], b"a body that nobody wants"] {
        let begun = Instant::now();
        let target = format!("/v1/proxy/{port}/");
        let reply = connection.request("POST", &target, &[], body);
        assert_eq!((reply.status, &*reply.code()), (502, "unreachable"));
        assert!(begun.elapsed() < Duration::from_secs(4));
        let text = reply.json()["error"].as_str().unwrap().to_owned();
        for part in [
            format!("port {port}"),
            format!("127.0.0.1:{port}: nothing listens"),
            format!("[::1]:{port}: "),
        ] {
            assert!(text.contains(&part), "{text}");
        }
        assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
    }
}

#[test]
fn what_is_no_port_is_refused() {
    let server = Server::start();
    for port in [
        "0",
        "00",
        "080",
        "65536",
        "99999999999999999999",
        "+80",
        "-1",
        "http",
        "8000.sock",
        "%38%30",
        "80%2F",
        "..",
        ".",
        "",
    ] {
        let reply = server.get(&format!("/v1/proxy/{port}/"));
        assert_eq!(
            (reply.status, &*reply.code()),
            (400, "bad_request"),
            "{port}"
        );
    }
    for path in [
        "/v1/proxy",
        "/v1/Proxy/80/",
        "/v1//proxy/80/",
        "/v1/proxy?80",
    ] {
        let reply = server.get(path);
        assert_eq!((reply.status, &*reply.code()), (404, "not_found"), "{path}");
    }
}

#[test]
fn without_the_token_nothing_reaches_a_server() {
    let server = Server::start();
    let backend = Backend::saying("fine");
    for token in [None, Some("wrong".to_owned())] {
        let mut connection = server.connect();
        connection.token = token;
        for method in ["GET", "POST", "OPTIONS", "HEAD", "BREW"] {
            let mut connection = server.connect();
            connection.token = None;
            let reply = connection.request(method, &backend.path("/"), &[], b"");
            assert_eq!(reply.status, 403, "{method}");
        }
        let reply = connection.request("GET", &backend.path("/"), &[], b"");
        assert_eq!((reply.status, &*reply.code()), (403, "forbidden"));
    }
    backend.expect_nothing();
}

#[test]
fn a_server_that_hangs_up_before_it_answers_is_told_apart() {
    let server = Server::start();
    for answer in ["", "HTTP/1.1 200 OK\r\nX: "] {
        let backend = Backend::start(move |mut connection| {
            connection.read_request();
            connection.send(answer);
        });
        let mut connection = server.connect();
        let reply = connection.request("POST", &backend.path("/"), &[], b"body");
        assert_eq!((reply.status, &*reply.code()), (502, "bad_response"));
        let text = reply.json()["error"].as_str().unwrap().to_owned();
        let part = if answer.is_empty() {
            "before it answered"
        } else {
            "in the middle of a response's head"
        };
        assert!(text.contains(part), "{text}");
        assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
    }
    // At once, without reading anything.
    let backend = Backend::start(drop);
    let mut connection = server.connect();
    let reply = connection.request("POST", &backend.path("/"), &[], &vec![b'x'; 100_000]);
    assert_eq!((reply.status, &*reply.code()), (502, "bad_response"));
}

/// Nothing has been sent to the client, so it gets an answer.
#[test]
fn a_body_that_makes_no_sense_from_the_start_is_an_error() {
    let server = Server::start();
    for begins in [
        "zz\r\n",
        "hello",
        "\r\n",
        ";\r\n",
        " 5\r\nhello\r\n",
        "-1\r\n",
        "0x5\r\nhello\r\n",
        "5\nhello",
        "fffffffffffffffff\r\n",
        "0\r\nHTTP/1.1 200 OK\r\n\r\n",
        "<html>",
    ] {
        let backend = Backend::answering(format!(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{begins}"
        ));
        for way in Way::all(&server, backend.port) {
            let mut client = Way::connect(&server);
            for (method, body) in [("GET", &b""[..]), ("POST", b"body")] {
                let reply = way.request(&mut client, method, "/", &[], body);
                assert_eq!(
                    (reply.status, &*reply.code()),
                    (502, "bad_response"),
                    "{} {method} {begins:?}",
                    way.name
                );
            }
            // It has no body for HEAD, and the client's connection is in step.
            let reply = way.request(&mut client, "HEAD", "/", &[], b"");
            assert_eq!(reply.status, 200, "{} {begins:?}", way.name);
            assert_eq!(client.request("GET", "/health", &[], b"").status, 200);
            client.send(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n");
            assert!(client.read_to_close().starts_with(b"HTTP/1.1 200 "));
        }
    }
}

#[test]
fn the_head_of_a_response_has_limits() {
    let server = Server::start();
    let large = format!("X: {}\r\n", "x".repeat(70_000));
    let many = "X: y\r\n".repeat(300);
    for lines in [&large, &many] {
        let backend = Backend::answering(format!("HTTP/1.1 200 OK\r\n{lines}\r\n"));
        let reply = server.get(&backend.path("/"));
        assert_eq!((reply.status, &*reply.code()), (502, "bad_response"));
    }
    let fits = format!("X: {}\r\n", "x".repeat(60_000));
    let backend = Backend::answering(format!(
        "HTTP/1.1 200 OK\r\n{fits}Content-Length: 0\r\n\r\n"
    ));
    assert_eq!(
        server.get(&backend.path("/")).header("x").unwrap().len(),
        60_000
    );
    // One that never ends.
    let backend = Backend::start(|mut connection| {
        connection.read_request();
        connection.send("HTTP/1.1 200 ");
        while connection.send([b'x'; 1000]) {}
    });
    let reply = server.get(&backend.path("/"));
    assert_eq!((reply.status, &*reply.code()), (502, "bad_response"));
}

/// The client sees none of these, so nothing but their number can limit them.
#[test]
fn a_server_that_never_stops_saying_continue_is_given_up() {
    let server = Server::start();
    let backend = Backend::start(|mut connection| {
        connection.read_request();
        while connection.send("HTTP/1.1 100 Continue\r\n\r\n".repeat(100)) {}
    });
    let reply = server.get(&backend.path("/"));
    assert_eq!((reply.status, &*reply.code()), (502, "bad_response"));
}

#[test]
fn a_server_that_never_stops_saying_wait_ends_with_its_client() {
    let server = Server::start();
    let (told, ended) = std::sync::mpsc::channel();
    let told = std::sync::Mutex::new(told);
    let backend = Backend::start(move |mut connection| {
        connection.read_request();
        while connection.send("HTTP/1.1 102 Processing\r\n\r\n".repeat(100)) {}
        told.lock().unwrap().send(()).unwrap();
    });
    for version in ["1.0", "1.1"] {
        // The client sees none of them, and the server is given up.
        let mut connection = server.connect();
        let path = backend.path("/");
        connection.send(
            format!("GET {path} HTTP/{version}\r\nHost: x\r\nX-Sandbox-Token: {TOKEN}\r\n\r\n")
                .as_bytes(),
        );
        thread::sleep(Duration::from_millis(100));
        crate::fixture::reset(connection);
        ended.recv_timeout(PATIENCE).unwrap();
    }
}

#[test]
fn a_server_whose_queue_is_full_is_given_up_in_time() {
    let server = Server::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(0).unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    // Nobody accepts: the queue takes one or two, and drops what comes then.
    let limit = Duration::from_millis(200);
    let mut queued = Vec::new();
    while let Ok(stream) = std::net::TcpStream::connect_timeout(&address, limit) {
        queued.push(stream);
        assert!(queued.len() < 100);
    }
    let begun = Instant::now();
    let reply = server.get(&format!("/v1/proxy/{}/", address.port()));
    assert_eq!((reply.status, &*reply.code()), (502, "unreachable"));
    assert!(begun.elapsed() < Duration::from_secs(15));
    let text = reply.text();
    assert!(text.contains("does not accept connections"), "{text}");
}

#[test]
fn an_open_exchange_is_activity_until_its_end() {
    let mut server = Server::builder().env("SBX_IDLE_TIMEOUT", 1).start();
    let backend = Backend::start(|mut connection| {
        connection.read_request();
        connection.send("HTTP/1.1 200 OK\r\n\r\nbegun");
        connection.read_to_end();
    });
    let mut connection = server.connect();
    connection.send_request("GET", &backend.path("/"), &[], b"");
    connection.read_head();
    thread::sleep(Duration::from_secs(4));
    assert!(server.is_running(), "it ended under an open exchange");
    drop(connection);
    let status = server.wait_for_exit(PATIENCE);
    assert_eq!(status.code(), Some(0));
}

#[test]
fn the_server_ends_promptly_with_exchanges_open() {
    let mut server = Server::start();
    let backend = Backend::start(|mut connection| {
        connection.read_request();
        connection.send("HTTP/1.1 200 OK\r\n\r\nbegun");
        connection.read_to_end();
    });
    let mut connection = server.connect();
    connection.send_request("GET", &backend.path("/"), &[], b"");
    connection.read_head();
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait_for_exit(Duration::from_secs(5)).code(), Some(0));
    wait_until("the client is told", PATIENCE, || !connection.fill());
}

/// An answer of this server has the address of the server inside: a cache would show it when that one answers again.
#[test]
fn no_cache_keeps_what_the_server_says_of_one_inside() {
    let server = Server::start();
    let silent = SilentPort::new();
    let check = |reply: &Reply, status: u16, what: &str| {
        assert_eq!(reply.status, status, "{what}: {}", reply.text());
        for (name, value) in [
            ("cache-control", "no-store"),
            ("x-content-type-options", "nosniff"),
        ] {
            let fields = reply.headers.iter().filter(|(other, _)| other == name);
            let values: Vec<_> = fields.map(|(_, value)| &**value).collect();
            assert_eq!(values, [value], "{what} {status}");
        }
    };
    for way in Way::all(&server, silent.port) {
        let mut client = Way::connect(&server);
        check(&way.get(&mut client, "/"), 502, way.name);
        let foreign = [
            ("Origin", "http://evil.example"),
            ("Sec-Fetch-Site", "cross-site"),
        ];
        if way.name != "ticket" {
            let reply = way.request(&mut client, "GET", "/", &foreign, b"");
            check(&reply, 403, way.name);
            let bare = Way {
                headers: way
                    .headers
                    .into_iter()
                    .filter(|(name, _)| *name == "Host")
                    .collect(),
                ..way
            };
            let reply = bare.get(&mut client, "/");
            assert!(matches!(reply.status, 401 | 403));
            check(&reply, reply.status, bare.name);
        }
    }
    let gone = [("Host", "3000-0123456789abcdef01234567.localhost")];
    check(
        &server.connect().request("GET", "/", &gone, b""),
        502,
        "gone",
    );
    check(&server.get("/v1/proxy/0/"), 400, "no port");
    check(&server.get("/t/none/"), 404, "no ticket");
    let open = Server::builder().no_token().start();
    let foreign = [("Host", "rebound.example")];
    let target = format!("/v1/proxy/{}/", silent.port);
    let reply = open.connect().request("GET", &target, &foreign, b"");
    check(&reply, 403, "another name");
}
