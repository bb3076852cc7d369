//! Upgraded connections: bytes in both directions, from the first to the last, as long as it takes.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use super::{Accepted, Backend};
use crate::fixture::{Connection, PATIENCE, Server, cpu_time_of, random_bytes, reset, status_of};

const SWITCHING: &str = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\nConnection: Upgrade, X-Hop\r\n\
                         X-Hop: 1\r\nSec-WebSocket-Accept: abc\r\n\r\n";

const ASKING: [(&str, &str); 5] = [
    ("Connection", "keep-alive, Upgrade"),
    ("Upgrade", "echo"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ("Sec-WebSocket-Version", "13"),
    ("Origin", "http://sandbox"),
];

/// A server that upgrades, and then does `serve`.
fn upgrading(serve: impl Fn(Accepted) + Send + Sync + 'static) -> Backend {
    Backend::start(move |mut connection| {
        if connection.read_request().is_some() && connection.send(SWITCHING) {
            serve(connection);
        }
    })
}

/// Gives back what it receives, and ends when the other side has ended.
fn echo(mut connection: Accepted) {
    loop {
        let bytes = std::mem::take(&mut connection.buffer);
        connection.send(bytes);
        if !connection.fill() {
            return;
        }
    }
}

#[track_caller]
fn upgraded(server: &Server, backend: &Backend) -> Connection {
    let mut connection = server.connect();
    connection.send_request("GET", &backend.path("/ws"), &ASKING, b"");
    let head = connection.read_head();
    assert_eq!(head.status, 101);
    connection
}

#[test]
fn an_upgrade_reaches_the_server_as_a_plain_request_does() {
    let server = Server::start();
    let backend = upgrading(echo);
    let mut connection = server.connect();
    connection.send_request("GET", &backend.path("/ws?a=b"), &ASKING, b"");
    let head = connection.read_head();
    assert_eq!(head.status, 101);
    assert_eq!(head.header("upgrade"), Some("echo"));
    assert_eq!(head.header("connection"), Some("Upgrade"));
    assert_eq!(head.header("sec-websocket-accept"), Some("abc"));
    assert_eq!(head.header("x-hop"), None);
    let received = backend.next();
    assert_eq!(received.line(), "GET /ws?a=b HTTP/1.1");
    assert_eq!(received.value("connection"), "Upgrade");
    assert_eq!(received.value("upgrade"), "echo");
    assert_eq!(
        received.value("sec-websocket-key"),
        "dGhlIHNhbXBsZSBub25jZQ=="
    );
    assert_eq!(received.value("origin"), "http://sandbox");
    let host = format!("localhost:{}", backend.port);
    assert_eq!(
        received.value("host"),
        host,
        "the same as for plain requests"
    );
    assert!(received.values("x-sandbox-token").is_empty());
    assert_eq!(received.value("x-forwarded-prefix"), backend.path(""));
    connection.send(b"hello");
    assert_eq!(connection.read_exactly(5), b"hello");
}

#[test]
fn what_is_sent_along_with_the_heads_is_not_lost() {
    let server = Server::start();
    let backend = Backend::start(|mut connection| {
        connection.read_request().unwrap();
        connection.send(format!("{SWITCHING}greeting"));
        echo(connection);
    });
    let mut connection = server.connect();
    let mut request = format!("GET {} HTTP/1.1\r\nHost: localhost\r\n", backend.path("/"));
    request += "X-Sandbox-Token: test-token-5e1f\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n";
    connection.send(format!("{request}early").as_bytes());
    assert_eq!(connection.read_head().status, 101);
    assert_eq!(connection.read_exactly(13), b"greetingearly");
}

#[test]
fn a_tunnel_is_no_way_back_to_this_server() {
    let server = Server::start();
    let backend = upgrading(echo);
    let mut connection = upgraded(&server, &backend);
    let request = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n";
    connection.send(request);
    assert_eq!(connection.read_exactly(request.len()), request);
}

#[test]
fn large_amounts_pass_in_both_directions_at_once() {
    let server = Server::start();
    let backend = upgrading(|connection| {
        // Both directions are full before either side reads.
        let mut writer = connection.stream.try_clone().unwrap();
        let sender = thread::spawn(move || writer.write_all(&random_bytes(30 << 20, 1)));
        let mut received = connection.buffer;
        received.resize(20 << 20, 0);
        (&connection.stream).read_exact(&mut received).unwrap();
        assert!(received == random_bytes(20 << 20, 2));
        sender.join().unwrap().unwrap();
    });
    let mut connection = upgraded(&server, &backend);
    let mut writer = connection.stream.try_clone().unwrap();
    let sender = thread::spawn(move || writer.write_all(&random_bytes(20 << 20, 2)));
    thread::sleep(Duration::from_millis(200));
    assert!(connection.read_exactly(30 << 20) == random_bytes(30 << 20, 1));
    sender.join().unwrap().unwrap();
    connection.expect_close();
    assert!(status_of(server.pid(), "VmHWM") < 16 * 1024, "in KiB");
}

#[test]
fn each_direction_ends_by_itself() {
    let server = Server::start();
    // The client ends first, and still hears what the server has to say.
    let backend = upgrading(|mut connection| {
        let question = connection.read_to_end();
        thread::sleep(Duration::from_millis(100));
        connection.send(format!("you said {}", String::from_utf8_lossy(&question)));
    });
    let mut connection = upgraded(&server, &backend);
    connection.send(b"goodbye");
    connection.stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(connection.read_to_close(), b"you said goodbye");
    // And the other way round.
    let (told, heard) = channel();
    let told = Mutex::new(told);
    let backend = upgrading(move |mut connection| {
        connection.send("that is all");
        connection.stream.shutdown(Shutdown::Write).unwrap();
        told.lock().unwrap().send(connection.read_to_end()).unwrap();
    });
    let mut connection = upgraded(&server, &backend);
    assert_eq!(connection.read_to_close(), b"that is all");
    connection.send(b"understood");
    drop(connection);
    assert_eq!(heard.recv_timeout(PATIENCE).unwrap(), b"understood");
}

#[test]
fn a_side_that_is_gone_ends_the_other() {
    let server = Server::start();
    for abruptly in [false, true] {
        let (told, ended) = channel();
        let told = Mutex::new(told);
        let backend = upgrading(move |mut connection| {
            connection.read_to_end();
            told.lock().unwrap().send(()).unwrap();
        });
        let connection = upgraded(&server, &backend);
        let begun = Instant::now();
        if abruptly {
            reset(connection);
        } else {
            drop(connection);
        }
        ended.recv_timeout(PATIENCE).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(4));
    }
    let backend = upgrading(drop);
    let mut connection = upgraded(&server, &backend);
    let begun = Instant::now();
    connection.expect_close();
    assert!(begun.elapsed() < Duration::from_secs(4));
}

/// A client that is gone is noticed even while the server takes nothing of what it has sent.
#[test]
fn a_client_that_is_gone_is_noticed_behind_a_full_buffer() {
    let server = Server::start();
    let (told, ended) = channel();
    let told = Mutex::new(told);
    let backend = upgrading(move |connection| {
        // Reads nothing, and waits for the end by itself.
        let fd = std::os::fd::AsFd::as_fd(&connection.stream);
        let events = nix::poll::PollFlags::from_bits_retain(libc::POLLRDHUP);
        let mut entries = [nix::poll::PollFd::new(fd, events)];
        nix::poll::poll(&mut entries, 20_000u16).unwrap();
        told.lock().unwrap().send(()).unwrap();
    });
    let connection = upgraded(&server, &backend);
    connection.stream.set_nonblocking(true).unwrap();
    let deadline = Instant::now() + Duration::from_millis(500);
    while Instant::now() < deadline {
        let _ = (&connection.stream).write(&vec![0; 65_536]);
    }
    reset(connection);
    ended.recv_timeout(PATIENCE).unwrap();
}

#[test]
fn a_request_with_a_body_stays_what_it_is() {
    let server = Server::start();
    let backend = Backend::saying("plain");
    let mut connection = server.connect();
    let reply = connection.request("POST", &backend.path("/"), &ASKING, b"body");
    assert_eq!(reply.text(), "plain");
    assert!(backend.next().values("upgrade").is_empty());
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
}

/// A text frame with a mask, as clients send it (RFC 6455 section 5.2).
fn masked(text: &str) -> Vec<u8> {
    let length = u8::try_from(text.len()).unwrap();
    let mask = [1, 2, 3, 4];
    let data = text.bytes().zip(mask.into_iter().cycle());
    [0x81, 0x80 | length]
        .into_iter()
        .chain(mask)
        .chain(data.map(|(byte, mask)| byte ^ mask))
        .collect()
}

#[test]
fn two_hundred_websockets_at_once() {
    let server = Server::start();
    // Answers each frame of a client with its text, in a frame without a mask.
    let backend = upgrading(|mut connection| {
        loop {
            while connection.buffer.len() < 2
                || connection.buffer.len() < 6 + usize::from(connection.buffer[1] & 0x7f)
            {
                if !connection.fill() {
                    return;
                }
            }
            let length = usize::from(connection.buffer[1] & 0x7f);
            let frame: Vec<u8> = connection.buffer.drain(..6 + length).collect();
            let text = frame[6..].iter().zip(frame[2..6].iter().cycle());
            let text: Vec<u8> = text.map(|(byte, mask)| byte ^ mask).collect();
            connection.send([&[0x81, frame[1] & 0x7f][..], &text].concat());
        }
    });
    let mut sockets: Vec<_> = (0..200).map(|_| upgraded(&server, &backend)).collect();
    for round in 0..3 {
        for (number, socket) in sockets.iter_mut().enumerate() {
            socket.send(&masked(&format!("{round} of {number}")));
        }
        for (number, socket) in sockets.iter_mut().enumerate() {
            let text = format!("{round} of {number}");
            let frame = socket.read_exactly(2 + text.len());
            assert_eq!(&frame[2..], text.as_bytes());
        }
    }
    // Quiet ones cost memory for a stack and small buffers, and no time.
    assert!(status_of(server.pid(), "VmRSS") < 24 * 1024, "in KiB");
    let before = cpu_time_of(server.pid());
    thread::sleep(Duration::from_secs(1));
    let used = cpu_time_of(server.pid()).saturating_sub(before);
    assert!(used < Duration::from_millis(100), "{used:?}");
    for socket in sockets {
        socket.stream.shutdown(Shutdown::Write).unwrap();
    }
    crate::fixture::wait_until("their threads end", PATIENCE, || {
        status_of(server.pid(), "Threads") < 20
    });
}

/// What the burst needed is not kept for the quiet that follows.
#[test]
fn connections_that_are_quiet_after_a_burst_cost_little() {
    const COUNT: usize = 20;
    const BURST: usize = 1 << 20;
    let server = Server::start();
    let tunnel = upgrading(|connection| {
        // The first of them is quiet for as long as the others take.
        connection.stream.set_read_timeout(None).unwrap();
        echo(connection);
    });
    let stream = Backend::start(|mut connection| {
        connection.read_request();
        connection.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100000\r\n");
        connection.send(vec![b'x'; BURST]);
        connection.send("\r\n");
        connection.read_to_end();
    });
    let mut quiet = Vec::new();
    for _ in 0..COUNT {
        let mut connection = upgraded(&server, &tunnel);
        let mut writer = connection.stream.try_clone().unwrap();
        let sender = thread::spawn(move || writer.write_all(&vec![b'x'; BURST]));
        connection.read_exactly(BURST);
        sender.join().unwrap().unwrap();
        quiet.push(connection);
        let mut connection = server.connect();
        connection.send_request("GET", &stream.path("/"), &[], b"");
        connection.read_head();
        let mut left = BURST;
        while left > 0 {
            left -= connection.read_chunk().unwrap().len();
        }
        quiet.push(connection);
    }
    crate::fixture::wait_until("the memory is given back", PATIENCE, || {
        status_of(server.pid(), "VmRSS") < 8 * 1024
    });
    // And they go on.
    for connection in quiet.iter_mut().step_by(2) {
        connection.send(b"still here");
        assert_eq!(connection.read_exactly(10), b"still here");
    }
}

/// Longer than every limit that other connections have between two bytes; takes more than two minutes.
#[test]
#[ignore = "takes minutes"]
fn a_quiet_websocket_is_never_closed() {
    let server = Server::builder().env("SBX_IDLE_TIMEOUT", 5).start();
    let backend = upgrading(echo);
    let mut connection = upgraded(&server, &backend);
    thread::sleep(Duration::from_secs(130));
    connection.send(b"still here");
    assert_eq!(connection.read_exactly(10), b"still here");
}
