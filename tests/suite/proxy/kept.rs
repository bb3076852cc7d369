//! Connections to servers inside serve several requests of one client, and nobody else's; only where no doubt is left whose
//! answer comes next, and not for long.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::{Accepted, Backend, Way};
use crate::fixture::{Connection, PATIENCE, Reply, Server, TOKEN};

/// Less than a head or a body may take, and than what the clients here wait for.
const SOON: Duration = Duration::from_secs(8);

/// A server that knows the number of each of its connections.
fn numbered(serve: impl Fn(usize, &mut Accepted) + Send + Sync + 'static) -> Backend {
    let count = AtomicUsize::new(0);
    Backend::start(move |mut connection| {
        serve(count.fetch_add(1, Ordering::Relaxed), &mut connection);
    })
}

const PLAIN: &str = "HTTP/1.1 200 OK\r\nX-Connection: N\r\nContent-Length: 2\r\n\r\nok";

/// Answers each request with these bytes, in which `N` is the number of the connection. HEAD gets no body.
fn answering(answer: &str) -> Backend {
    let answer = answer.to_owned();
    numbered(move |number, connection| {
        while let Some(request) = connection.read_request() {
            let mut answer = answer.replace('N', &number.to_string());
            if request.line().starts_with("HEAD ") {
                answer.truncate(answer.find("\r\n\r\n").unwrap() + 4);
            }
            connection.send(answer);
        }
    })
}

/// The number that the server answers.
#[track_caller]
fn number(reply: &Reply) -> usize {
    reply.header("x-connection").unwrap().parse().unwrap()
}

/// Whether two requests, which are made anew until they are, come on one connection. It may take a busy machine longer
/// than a connection is kept to send the second one.
fn ever_share(mut pair: impl FnMut() -> [Reply; 2]) -> bool {
    (0..20).any(|_| {
        let [first, second] = pair();
        number(&first) == number(&second)
    })
}

#[test]
fn requests_without_a_body_follow_each_other_on_one_connection() {
    let server = Server::start();
    let backend = answering(PLAIN);
    for way in Way::all(&server, backend.port) {
        let mut client = Way::connect(&server);
        for method in ["GET", "OPTIONS", "HEAD"] {
            let shared = ever_share(|| {
                let first = way.get(&mut client, "/");
                [first, way.request(&mut client, method, "/", &[], b"")]
            });
            assert!(shared, "{} {method}", way.name);
        }
        let received = backend.next();
        assert!(received.values("connection").is_empty(), "{received:?}");
    }
}

/// A server that reads no bodies takes them for requests. What it answers to those belongs to nobody.
#[test]
fn a_body_is_never_taken_for_the_next_request() {
    const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 6.6.6.6\r\n\r\n";
    let server = Server::start();
    let backend = Backend::start(|mut connection| {
        while let Some(request) = connection.read_head() {
            let mut words = request.head.split_whitespace();
            let Some(path) = words.find(|word| word.starts_with('/')) else {
                continue;
            };
            // So that the next request is on its way before the answer.
            if path == "/smuggled" && !connection.fill() {
                return;
            }
            let length = path.len();
            connection.send(format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{path}"
            ));
        }
    });
    let length = SMUGGLED.len().to_string();
    let chunked = format!("{:x}\r\n{SMUGGLED}\r\n0\r\n\r\n", SMUGGLED.len());
    let by_length = ("Content-Length", &*length);
    for way in Way::all(&server, backend.port) {
        for method in ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "BREW"] {
            for (headers, body) in [
                (&[by_length][..], SMUGGLED),
                (&[by_length, ("content-LENGTH", &*length)], SMUGGLED),
                (&[by_length, ("Connection", "content-length")], SMUGGLED),
                (&[("Transfer-Encoding", "chunked")], &*chunked),
            ] {
                let mut client = Way::connect(&server);
                // One that is there already is none for it either.
                assert_eq!(way.get(&mut client, "/before").text(), "/before");
                way.send(&mut client, method, "/attacker", headers, body.as_bytes());
                let reply = client.read_reply_to(method);
                assert_eq!(reply.status, 200, "{} {method} {headers:?}", way.name);
                for path in ["/victim", "/other"] {
                    let text = way.get(&mut client, path).text();
                    assert_eq!(text, path, "{} {method} {headers:?}", way.name);
                }
            }
        }
    }
}

#[test]
fn what_is_no_plain_request_has_a_connection_of_its_own() {
    let server = Server::start();
    let backend = answering(PLAIN);
    let way = Way::proxy(backend.port);
    let mut client = Way::connect(&server);
    let upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket")];
    for (method, headers) in [
        ("GET", &[("Content-Length", "0")][..]),
        ("POST", &[("Content-Length", "0")]),
        ("DELETE", &[]),
        ("GET", &upgrade),
    ] {
        let before = number(&way.get(&mut client, "/"));
        let own = number(&way.request(&mut client, method, "/", headers, b""));
        let after = number(&way.get(&mut client, "/"));
        assert!(before < own && own < after, "{method} {headers:?}");
    }
}

#[test]
fn a_connection_belongs_to_one_client_one_way_and_one_credential() {
    let server = Server::start();
    let (backend, other) = (answering(PLAIN), answering(PLAIN));
    let ways = Way::all(&server, backend.port);
    let mut client = Way::connect(&server);
    let get = |client: &mut Connection, headers: &[(&str, &str)]| {
        ways[0].request(client, "GET", "/", headers, b"")
    };
    let mut last = number(&get(&mut client, &[]));
    let next = number(&get(&mut Way::connect(&server), &[]));
    assert!(next > last, "another client's");
    for header in [
        ("Authorization", "Bearer something-for-a-proxy-before"),
        ("X-Access-Token", "x"),
        ("X-API-Key", "x"),
        ("Host", "elsewhere.example"),
        // Two clients of a proxy before.
        ("X-Forwarded-For", "192.0.2.1"),
        ("X-Forwarded-For", "192.0.2.2"),
    ] {
        let next = number(&get(&mut client, &[header]));
        assert!(next > last, "{header:?}");
        let shared = ever_share(|| [(); 2].map(|()| get(&mut client, &[header])));
        assert!(shared, "{header:?}");
        last = number(&get(&mut client, &[header]));
    }
    for way in &ways {
        let next = number(&way.get(&mut client, "/"));
        assert!(next > last, "{}", way.name);
        last = next;
    }
    assert_eq!(number(&Way::proxy(other.port).get(&mut client, "/")), 0);
}

/// Whatever leaves a doubt where the answer ended, or whether the server reads another request.
#[test]
fn a_doubt_ends_a_connection() {
    const FINAL: &str = "\r\n\r\nHTTP/1.1 200 OK\r\nX-Connection: N\r\nContent-Length: 0";
    let server = Server::start();
    let mut tried = 0;
    let mut is_kept = |method: &str, answer: &str| {
        let backend = answering(answer);
        let way = Way::proxy(backend.port);
        let mut client = Way::connect(&server);
        let mut ask = |_| {
            way.send(&mut client, method, "/", &[], b"");
            let mut reply = client.read_head();
            if method != "HEAD" {
                reply = client.read_body(reply);
            }
            reply
        };
        tried += 1;
        ever_share(|| [0, 1].map(&mut ask))
    };
    let with_number = |rest: &str| rest.replacen("\r\n", "\r\nX-Connection: N\r\n", 1);
    for (method, rest) in [
        ("GET", "200 OK\r\nContent-Length: 1\r\n\r\nx"),
        ("GET", "200 OK\r\nContent-Length: 0\r\n\r\n"),
        (
            "GET",
            "200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nT: u\r\n\r\n",
        ),
        ("GET", "302 Found\r\nContent-Length: 0\r\n\r\n"),
        ("GET", "204 No Content\r\n\r\n"),
        ("GET", "304 Not Modified\r\n\r\n"),
        ("GET", "205 Reset\r\nContent-Length: 0\r\n\r\n"),
        ("HEAD", "200 OK\r\nContent-Length: 0\r\n\r\n"),
    ] {
        let rest = with_number(rest);
        assert!(
            is_kept(method, &format!("HTTP/1.1 {rest}")),
            "{method} {rest}"
        );
    }
    for (method, rest) in [
        // Content that is announced where there is none.
        ("GET", "204 No Content\r\nContent-Length: 1\r\n\r\n"),
        (
            "GET",
            "204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n",
        ),
        ("GET", "205 Reset\r\nContent-Length: 1\r\n\r\n"),
        ("GET", "205 Reset\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("GET", "205 Reset\r\n\r\n"),
        ("GET", "304 Not Modified\r\nContent-Length: 1\r\n\r\n"),
        (
            "GET",
            "304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n",
        ),
        ("HEAD", "200 OK\r\nContent-Length: 1\r\n\r\n"),
        ("HEAD", "200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("HEAD", "200 OK\r\n\r\n"),
        // The server closes, or may; or it may not have read all of a request that it refuses.
        (
            "GET",
            "200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx",
        ),
        (
            "GET",
            "200 OK\r\nContent-Length: 1\r\nConnection: x, Close\r\n\r\nx",
        ),
        ("GET", "400 Bad\r\nContent-Length: 1\r\n\r\nx"),
        ("GET", "404 Not Found\r\nContent-Length: 1\r\n\r\nx"),
        ("GET", "500 Oh\r\nContent-Length: 1\r\n\r\nx"),
        // What follows is nobody's.
        ("GET", "200 OK\r\nContent-Length: 1\r\n\r\nxy"),
        (
            "GET",
            "200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n\r\n",
        ),
        (
            "GET",
            "200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        ),
    ] {
        let rest = with_number(rest);
        assert!(
            !is_kept(method, &format!("HTTP/1.1 {rest}")),
            "{method} {rest}"
        );
    }
    for answer in [
        format!("HTTP/1.1 103 Early\r\nContent-Length: 1{FINAL}\r\n\r\n"),
        format!("HTTP/1.1 103 Early\r\nConnection: close{FINAL}\r\n\r\n"),
        PLAIN.replace("HTTP/1.1", "HTTP/1.0"),
        PLAIN.replace(
            "HTTP/1.1 200 OK",
            "HTTP/1.0 200 OK\r\nConnection: keep-alive",
        ),
    ] {
        assert!(!is_kept("GET", &answer), "{answer}");
    }
    assert_eq!(tried, 30);
}

#[test]
fn a_request_is_repeated_when_its_connection_was_of_no_use() {
    let server = Server::start();
    // What a server does with the second request of a connection, and whether that is no answer to it.
    for (second, is_repeated) in [
        ("", true),
        ("\0\0\0\0", true),
        ("</html>\r\n\r\n", true),
        ("x\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", true),
        ("HTTP/1.1 200 O", false),
        ("HTTP/1.1 103 Early\r\n\r\n", false),
        ("HTTP/1.1 103 Early\r\n\r\nx\r\n", false),
    ] {
        let (told, seen) = channel();
        let told = Mutex::new(told);
        let backend = numbered(move |number, connection| {
            let tell = || told.lock().unwrap().send(number).unwrap();
            if connection.read_request().is_some() {
                tell();
                connection.send(PLAIN.replace('N', &number.to_string()));
            }
            // The next request is on its way when it is answered like that.
            if connection.read_request().is_some() {
                tell();
                connection.send(second);
            }
        });
        let way = Way::proxy(backend.port);
        let mut client = Way::connect(&server);
        let tried = (0..20).any(|_| {
            let first = number(&way.get(&mut client, "/"));
            way.send(&mut client, "GET", "/again", &[], b"");
            let reply = client.read_head();
            let reply = client.read_body(reply);
            let numbers: Vec<usize> = seen.try_iter().collect();
            // It has come too late for the first one's connection.
            if numbers == [first, first + 1] && reply.status == 200 {
                return false;
            }
            if is_repeated {
                assert_eq!(reply.status, 200, "{second:?}");
                assert_eq!(numbers, [first, first, first + 1], "{second:?}");
            } else {
                assert_eq!((reply.status, &*reply.code()), (502, "bad_response"));
                assert_eq!(numbers, [first, first], "{second:?}");
            }
            true
        });
        assert!(tried, "no request has shared a connection");
    }
    // A fresh one is tried once.
    let backend = Backend::start(|mut connection| {
        connection.read_request();
        connection.send("</html>\r\n\r\n");
    });
    let reply = Way::proxy(backend.port).get(&mut Way::connect(&server), "/");
    assert_eq!((reply.status, &*reply.code()), (502, "bad_response"));
    backend.next();
    backend.expect_nothing();
}

/// A server that answers once, and tells when the connection has ended.
fn telling_of_ends() -> (Backend, Receiver<()>) {
    let (told, ended) = channel();
    let told = Mutex::new(told);
    let backend = Backend::start(move |mut connection| {
        connection.read_request();
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        connection.read_to_end();
        let _ = told.lock().unwrap().send(());
    });
    (backend, ended)
}

/// A server that serves one connection at a time has others to serve, whatever a client does that has had its answer.
#[test]
fn a_connection_is_closed_a_moment_after_the_answer() {
    let server = Server::start();
    let own = format!("Host: x\r\nX-Sandbox-Token: {TOKEN}\r\n");
    for next in [
        "",
        "G",
        "GET / HTTP/1.1\r\nHost: ",
        "\r\n",
        // What waits, for something to happen or for a body.
        &format!("GET /v1/ports/9/wait?timeout=60 HTTP/1.1\r\n{own}\r\n"),
        &format!(
            "POST /v1/exec HTTP/1.1\r\n{own}Content-Length: 18\r\n\r\n{{\"cmd\":\"sleep 60\"}}"
        ),
        &format!("POST /v1/exec HTTP/1.1\r\n{own}Content-Length: 9\r\n\r\n{{"),
        "POST /v1/exec HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
        "GET\r\n\r\n",
    ] {
        let (backend, ended) = telling_of_ends();
        for way in Way::all(&server, backend.port) {
            let mut client = Way::connect(&server);
            assert_eq!(way.get(&mut client, "/").text(), "ok", "{}", way.name);
            client.send(next.as_bytes());
            let end = ended.recv_timeout(SOON);
            assert!(end.is_ok(), "{}: held by {next:?}", way.name);
        }
    }
    // A client that sends no other request leaves none.
    let (backend, ended) = telling_of_ends();
    let way = Way::proxy(backend.port);
    let mut client = Way::connect(&server);
    let reply = way.request(&mut client, "GET", "/", &[("Connection", "close")], b"");
    assert_eq!(reply.text(), "ok");
    assert_eq!(backend.next().value("connection"), "close");
    ended.recv_timeout(PATIENCE).unwrap();
}

/// A client that goes on as slowly as it can.
#[test]
fn a_head_that_does_not_end_holds_no_connection() {
    let server = Server::start();
    let (backend, ended) = telling_of_ends();
    let mut client = Way::connect(&server);
    let way = Way::proxy(backend.port);
    assert_eq!(way.get(&mut client, "/").text(), "ok");
    let (stop, stopped) = channel::<()>();
    let dripping = std::thread::spawn(move || {
        client.send(b"GET / HTTP/1.1\r\nX: ");
        while stopped.recv_timeout(Duration::from_millis(20)).is_err() {
            client.send(b"x");
        }
    });
    let end = ended.recv_timeout(SOON);
    stop.send(()).unwrap();
    dripping.join().unwrap();
    assert!(end.is_ok(), "held by a head that does not end");
}
