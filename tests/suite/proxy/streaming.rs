//! Bodies move as they are made, in both directions at once, however large they are, and nobody is
//! waited for longer than somebody is there.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::Backend;
use crate::fixture::{
    PATIENCE, Server, descriptors_of, parse_replies, random_bytes, reset, status_of, wait_until,
};

/// Larger than every buffer on the way together.
const LARGE: usize = 256 << 20;

/// How soon the one side must learn that the other is gone.
const SOON: Duration = Duration::from_secs(1);

/// Sends `LARGE` bytes; their digest.
fn pour(mut into: impl Write) -> Vec<u8> {
    let piece = random_bytes(1 << 20, 3);
    let mut digest = Sha256::new();
    for _ in 0..LARGE / piece.len() {
        into.write_all(&piece).unwrap();
        digest.update(&piece);
    }
    digest.finalize().to_vec()
}

/// Receives `LARGE` bytes, after those of `begun`; their digest.
fn drink(mut from: impl Read, begun: &[u8]) -> Vec<u8> {
    let mut digest = Sha256::new();
    digest.update(begun);
    let mut left = LARGE - begun.len();
    let mut piece = vec![0; 1 << 20];
    while left > 0 {
        let most = piece.len().min(left);
        let count = from.read(&mut piece[..most]).unwrap();
        assert!(count > 0, "{left} bytes are missing");
        digest.update(&piece[..count]);
        left -= count;
    }
    digest.finalize().to_vec()
}

#[test]
fn a_large_download_arrives_whole_in_little_memory() {
    let server = Server::start();
    let (told, poured) = channel();
    let told = Mutex::new(told);
    let backend = Backend::start(move |mut connection| {
        connection.read_request().unwrap();
        connection.send(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {LARGE}\r\n\r\n"
        ));
        told.lock().unwrap().send(pour(&connection.stream)).unwrap();
    });
    let mut connection = server.connect();
    connection.send_request("GET", &backend.path("/"), &[], b"");
    let head = connection.read_head();
    assert_eq!(head.header("content-length"), Some(&*LARGE.to_string()));
    let begun = connection.read_exactly(1);
    // A client that takes nothing holds the server back, and costs it no more than buffers.
    thread::sleep(Duration::from_millis(200));
    assert!(status_of(server.pid(), "VmRSS") < 16 * 1024, "in KiB");
    let begun = [begun, connection.take_buffered()].concat();
    let received = drink(&connection.stream, &begun);
    assert_eq!(received, poured.recv_timeout(PATIENCE).unwrap());
    assert!(status_of(server.pid(), "VmHWM") < 16 * 1024, "in KiB");
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
}

#[test]
fn a_large_upload_arrives_whole_in_little_memory() {
    let server = Server::start();
    let (told, drunk) = channel();
    let told = Mutex::new(told);
    let backend = Backend::start(move |mut connection| {
        connection.read_head().unwrap();
        // One that is slow to begin holds the client back.
        thread::sleep(Duration::from_millis(200));
        let begun = std::mem::take(&mut connection.buffer);
        told.lock()
            .unwrap()
            .send(drink(&connection.stream, &begun))
            .unwrap();
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    });
    let mut connection = server.connect();
    let length = LARGE.to_string();
    let headers = [("Content-Length", &*length)];
    connection.send_request("PUT", &backend.path("/"), &headers, b"");
    let poured = pour(&connection.stream);
    assert_eq!(connection.read_reply().text(), "ok");
    assert_eq!(poured, drunk.recv_timeout(PATIENCE).unwrap());
    assert!(status_of(server.pid(), "VmHWM") < 16 * 1024, "in KiB");
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
}

#[test]
fn chunks_in_both_directions_move_at_the_same_time() {
    // The server gives back each byte before the client sends the next.
    let server = Server::start();
    let backend = Backend::start(|mut connection| {
        connection.read_head().unwrap();
        connection.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        let mut seen = String::new();
        for letter in ["a", "b", "c"] {
            while !seen.contains(letter) {
                assert!(connection.fill());
                seen = String::from_utf8_lossy(&connection.buffer).into_owned();
            }
            connection.send(format!("1\r\n{letter}\r\n"));
        }
        connection.send("0\r\n\r\n");
        connection.read_to_end();
    });
    let mut connection = server.connect();
    let headers = [("Transfer-Encoding", "chunked")];
    connection.send_request("POST", &backend.path("/"), &headers, b"");
    let head = connection.read_head();
    assert_eq!(head.status, 200);
    for letter in ["a", "b", "c"] {
        connection.send(format!("1\r\n{letter}\r\n").as_bytes());
        assert_eq!(connection.read_chunk().unwrap(), letter.as_bytes());
    }
    assert_eq!(connection.read_chunk(), None);
    // The request's own end comes late, and the connection is in step all the same.
    connection.send(b"0\r\n\r\n");
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
}

#[test]
fn events_arrive_one_by_one_as_they_are_sent() {
    let server = Server::start();
    for head in [
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
        "HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
    ] {
        let (go_on, gate) = channel::<()>();
        let gate = Mutex::new(gate);
        let backend = Backend::start(move |mut connection| {
            connection.read_request().unwrap();
            connection.send(head);
            for number in 0..5 {
                connection.send(format!("data: {number}\n\n"));
                // The next one only when this one was seen.
                gate.lock().unwrap().recv_timeout(PATIENCE).unwrap();
            }
        });
        let mut connection = server.connect();
        connection.send_request("GET", &backend.path("/events"), &[], b"");
        let reply = connection.read_head();
        assert_eq!(reply.header("content-type"), Some("text/event-stream"));
        for number in 0..5 {
            let event = connection.read_chunk().unwrap();
            assert_eq!(event, format!("data: {number}\n\n").as_bytes());
            go_on.send(()).unwrap();
        }
        assert_eq!(connection.read_chunk(), None);
        assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
    }
}

#[test]
fn a_server_that_answers_early_is_heard() {
    let server = Server::start();
    let backend = Backend::start(|mut connection| {
        connection.read_head().unwrap();
        // It has seen enough, and neither reads the body nor waits.
        connection.send("HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig");
    });
    for size in [1_000usize, 50 << 20] {
        let mut connection = server.connect();
        let length = size.to_string();
        let headers = [("Content-Length", &*length)];
        connection.send_request("PUT", &backend.path("/"), &headers, b"");
        let mut stream = connection.stream.try_clone().unwrap();
        let sender = thread::spawn(move || stream.write_all(&vec![b'x'; size]));
        let reply = connection.read_reply();
        assert_eq!((reply.status, &*reply.text()), (413, "big"), "{size} bytes");
        if reply.header("connection") == Some("close") {
            connection.read_to_close();
            let _ = sender.join().unwrap();
        } else {
            sender.join().unwrap().unwrap();
            assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
        }
    }
}

#[test]
fn a_client_that_goes_away_ends_the_servers_connection() {
    let server = Server::start();
    // Before the response, in the middle of one of each framing, and in the middle of a request.
    for (name, response, length, abruptly) in [
        ("waiting", "", 0, false),
        ("waiting", "", 0, true),
        (
            "chunked",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
            0,
            false,
        ),
        ("until the end", "HTTP/1.1 200 OK\r\n\r\na", 0, false),
        (
            "length",
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na",
            0,
            true,
        ),
        ("upload", "", 1000, false),
        ("upload", "", 1000, true),
    ] {
        let (told, ended) = channel();
        let told = Mutex::new(told);
        let backend = Backend::start(move |mut connection| {
            connection.read_head().unwrap();
            connection.send(response);
            told.lock().unwrap().send(()).unwrap();
            connection.read_to_end();
            told.lock().unwrap().send(()).unwrap();
        });
        let mut connection = server.connect();
        let length = length.to_string();
        let headers = [("Content-Length", &*length)];
        connection.send_request("POST", &backend.path("/"), &headers, b"");
        ended.recv_timeout(PATIENCE).unwrap();
        if !response.is_empty() {
            connection.read_head();
            connection.read_exactly(1);
        }
        let begun = Instant::now();
        if abruptly {
            reset(connection);
        } else {
            drop(connection);
        }
        ended.recv_timeout(PATIENCE).unwrap();
        let late = begun.elapsed();
        assert!(late < SOON, "{name}: {late:?}");
    }
}

#[test]
fn a_server_that_goes_away_ends_the_clients_connection() {
    let server = Server::start();
    for head in [
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na",
    ] {
        let backend = Backend::start(move |mut connection| {
            connection.read_request();
            connection.send(head);
        });
        let mut connection = server.connect();
        connection.send_request("GET", &backend.path("/"), &[], b"");
        let begun = Instant::now();
        let bytes = connection.read_to_close();
        let text = String::from_utf8_lossy(&bytes);
        assert!(parse_replies(&bytes).is_err(), "it looks whole: {text:?}");
        assert!(
            text.contains("\r\n\r\n"),
            "what came is passed on: {text:?}"
        );
        assert!(begun.elapsed() < SOON);
    }
    // A client of HTTP/1.0 has nothing but the close to go by: it is reset.
    let backend =
        Backend::answering("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n");
    let mut connection = server.connect();
    let (path, token) = (backend.path("/"), crate::fixture::TOKEN);
    connection.send(format!("GET {path} HTTP/1.0\r\nX-Sandbox-Token: {token}\r\n\r\n").as_bytes());
    let mut bytes = Vec::new();
    let end = connection.stream.read_to_end(&mut bytes);
    assert!(
        end.is_err(),
        "it looks whole: {:?}",
        String::from_utf8_lossy(&bytes)
    );
}

#[test]
fn nothing_is_left_of_connections_that_were_given_up() {
    let server = Server::start();
    let backend = Backend::start(|mut connection| {
        connection.read_request();
        connection.send("HTTP/1.1 200 OK\r\n\r\nbegun");
        connection.read_to_end();
    });
    server.get("/health");
    let descriptors = descriptors_of(server.pid());
    let threads = status_of(server.pid(), "Threads");
    for round in 0..40 {
        let mut connection = server.connect();
        connection.send_request("GET", &backend.path("/"), &[], b"");
        match round % 4 {
            0 => reset(connection),
            1 => drop(connection),
            2 => {
                connection.read_head();
                reset(connection);
            }
            _ => {
                connection.read_head();
                connection.stream.shutdown(Shutdown::Both).unwrap();
            }
        }
    }
    wait_until("descriptors are given back", PATIENCE, || {
        descriptors_of(server.pid()) <= descriptors
    });
    wait_until("threads end", PATIENCE, || {
        status_of(server.pid(), "Threads") <= threads
    });
}

#[test]
fn a_quiet_exchange_takes_no_processor_time() {
    let server = Server::start();
    let backend = Backend::start(|mut connection| {
        connection.read_request();
        connection.send("HTTP/1.1 200 OK\r\n\r\nbegun");
        connection.read_to_end();
    });
    let mut clients = Vec::new();
    for half in [false, true] {
        let mut connection = server.connect();
        connection.send_request("GET", &backend.path("/"), &[], b"");
        connection.read_head();
        if half {
            connection.stream.shutdown(Shutdown::Write).unwrap();
        }
        clients.push(connection);
    }
    // One that sends much more than anybody takes, in both directions.
    let flood = Backend::start(|mut connection| {
        connection.read_head();
        connection.send("HTTP/1.1 200 OK\r\n\r\n");
        while connection.send(vec![b'x'; 65_536]) {}
    });
    let mut connection = server.connect();
    let headers = [("Content-Length", "1000000000")];
    connection.send_request("POST", &flood.path("/"), &headers, b"");
    connection.stream.set_nonblocking(true).unwrap();
    while connection.stream.write(&vec![b'x'; 65_536]).is_ok() {}
    thread::sleep(Duration::from_millis(500));
    let before = crate::fixture::cpu_time_of(server.pid());
    thread::sleep(Duration::from_secs(1));
    let used = crate::fixture::cpu_time_of(server.pid()).saturating_sub(before);
    assert!(used < Duration::from_millis(100), "{used:?}");
}
