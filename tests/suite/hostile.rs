//! The server under hostile or starving conditions: nothing on the socket crashes it, holds it up or
//! makes it grow, and running out of something is a clear error that passes when the cause passes.
//!
//! Exhaustion is made real by limits on the server process itself: connections, descriptors,
//! threads, address space. The random test is seeded: `SBX_FUZZ_SEED` repeats a run and
//! `SBX_FUZZ_COUNT` sets how many requests it sends.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::fixture::{
    Connection, PATIENCE, Random, Reply, Server, TOKEN, TempDir, can_change_user, cpu_time_of,
    descriptors_of, is_root, output_of, parse_replies, public_copy, reset, spare_uid, status_of,
    wait_until,
};
use crate::skip;

/// One request with a token on a fresh connection, which stays open. `None` while nothing is answered.
struct Probe {
    stream: TcpStream,
    received: Vec<u8>,
    ended: bool,
}

impl Probe {
    fn new(server: &Server) -> Self {
        let mut stream = TcpStream::connect(server.address).expect("the server is there");
        let request = format!(
            "GET /v1/processes HTTP/1.1\r\nHost: sandbox\r\nX-Sandbox-Token: {TOKEN}\r\n\r\n"
        );
        let _ = stream.write_all(request.as_bytes());
        stream.set_nonblocking(true).unwrap();
        Self {
            stream,
            received: Vec::new(),
            ended: false,
        }
    }

    /// The answer, if a whole one has come by now.
    fn reply(&mut self) -> Option<Reply> {
        let mut chunk = [0; 4096];
        while !self.ended {
            match self.stream.read(&mut chunk) {
                Ok(0) => self.ended = true,
                Ok(count) => self.received.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.ended = true,
            }
        }
        let replies = parse_replies(&self.received).ok()?;
        assert!(replies.len() <= 1, "one request, {} answers", replies.len());
        replies.into_iter().next()
    }

    fn status(&mut self) -> Option<u16> {
        self.reply().map(|reply| reply.status)
    }
}

/// Opens `count` connections with a request on each and waits until every one is answered. On a busy machine a few that
/// are not served yet may be closed, because they show no token and newer ones need their room.
fn probe_all(server: &Server, count: usize) -> (Vec<Probe>, Vec<Reply>) {
    let mut probes: Vec<Probe> = (0..count).map(|_| Probe::new(server)).collect();
    let mut replies = Vec::new();
    for (index, probe) in probes.iter_mut().enumerate() {
        wait_until(&format!("connection {index} is answered"), PATIENCE, || {
            probe.reply().is_some() || probe.ended
        });
        replies.extend(probe.reply());
    }
    let dropped = count - replies.len();
    assert!(
        dropped <= count / 10,
        "{dropped} of {count} connections were dropped without an answer"
    );
    (probes, replies)
}

/// A panic ends one connection only, which is why nothing else would show it.
#[track_caller]
fn assert_no_panic(server: &Server) {
    let log = server.log();
    if let Some(at) = log.find("panicked") {
        let lines: Vec<&str> = log[at..].lines().take(3).collect();
        panic!("the server's log: {lines:?}");
    }
}

/// Service is normal again: a fresh connection, a command, as few threads as before.
#[track_caller]
fn expect_recovery(server: &mut Server) {
    assert!(server.is_running(), "the server ended");
    wait_until("a fresh connection is served", PATIENCE, || {
        let mut probe = Probe::new(server);
        let mut status = None;
        wait_until("an answer of some kind", PATIENCE, || {
            status = probe.status();
            status.is_some() || probe.ended
        });
        status == Some(200)
    });
    assert_eq!(
        server.exec(&json!({"cmd": "echo recovered"})).stdout,
        "recovered\n"
    );
    assert_no_panic(server);
}

// ---------------------------------------------------------------------------------------------
// Running out.

#[test]
fn connections_above_the_cap_get_503_and_the_cap_counts_only_open_ones() {
    let mut server = Server::builder().env("SBX_MAX_CONNECTIONS", 4).start();
    for round in 0..4 {
        // Those of the round before count until the server has seen them go.
        let mut held = Vec::new();
        wait_until("as many as the cap are served", 3 * PATIENCE, || {
            held = (0..4).map(|_| Probe::new(&server)).collect();
            wait_until("answers", PATIENCE, || {
                held.iter_mut()
                    .all(|probe| probe.reply().is_some() || probe.ended)
            });
            held.iter_mut().all(|probe| probe.status() == Some(200))
        });
        // With a request and, in the odd rounds, from clients that only listen.
        for _ in 0..50 {
            let mut connection = server.connect();
            if round % 2 == 0 {
                let _ = connection
                    .stream
                    .write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
            }
            let received = connection.read_to_close();
            let replies = parse_replies(&received).unwrap();
            assert_eq!(replies.len(), 1, "an answer and the end");
            assert_eq!(replies[0].status, 503);
            assert_eq!(replies[0].code(), "too_many_connections");
            assert_eq!(replies[0].header("connection"), Some("close"));
            assert_eq!(replies[0].header("content-type"), Some("application/json"));
            assert!(replies[0].body.ends_with(b"}\n"));
        }
        // Those that were there first are not disturbed.
        for probe in &mut held {
            probe.received.clear();
            probe
                .stream
                .write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                .unwrap();
            wait_until("another answer", PATIENCE, || probe.status() == Some(200));
        }
    }
    expect_recovery(&mut server);
}

#[test]
fn hundreds_of_idle_connections_cost_little_and_go_without_a_trace() {
    let server = Server::start();
    let _ = server.get("/health");
    let threads = status_of(server.pid(), "Threads");
    let descriptors = descriptors_of(server.pid());
    let memory = status_of(server.pid(), "VmRSS");
    let (held, replies) = probe_all(&server, 300);
    assert!(replies.iter().all(|reply| reply.status == 200));
    let grown = status_of(server.pid(), "VmRSS") - memory;
    assert!(grown < 300 * 64, "{grown} KiB for 300 idle connections");
    drop(held);
    wait_until("threads and descriptors are back", PATIENCE, || {
        status_of(server.pid(), "Threads") <= threads && descriptors_of(server.pid()) <= descriptors
    });
}

#[test]
fn running_out_of_descriptors_neither_spins_nor_lasts() {
    run_out_of_descriptors(40, 80);
}

#[test]
fn four_hundred_clients_of_a_server_with_256_descriptors_are_served_or_refused() {
    run_out_of_descriptors(256, 400);
}

#[track_caller]
fn run_out_of_descriptors(limit: usize, clients: usize) {
    let limited = format!("ulimit -n {limit} && exec \"$0\"");
    let mut server = Server::builder()
        .wrapped_in(&["sh", "-c", &limited])
        .start();
    let pid = server.pid();
    let dir = TempDir::new();
    std::fs::write(dir.join("file"), b"data").unwrap();

    // One client is there from the start, and has shown its token.
    let mut early = server.connect();
    assert_eq!(early.request("GET", "/v1/processes", &[], b"").status, 200);
    let descriptors = descriptors_of(pid);
    let kept = server.spawn(&json!({"cmd": "echo kept; cat"}));
    let mut probes: Vec<Probe> = (0..clients).map(|_| Probe::new(&server)).collect();
    // Those above the limit may be refused, or wait in the queue of the listening socket.
    let mut answered = 0;
    wait_until("the limit is reached", PATIENCE, || {
        answered = probes
            .iter_mut()
            .filter_map(Probe::status)
            .filter(|code| *code == 200)
            .count();
        answered >= limit / 3
    });
    assert!(answered < clients, "the limit was not reached");

    let before = cpu_time_of(pid);
    let started = Instant::now();
    thread::sleep(Duration::from_secs(2));
    let used = cpu_time_of(pid).saturating_sub(before);
    assert!(
        used * 5 < started.elapsed(),
        "spinning: {used:?} of processor time in 2 s"
    );
    assert!(
        server.log().lines().count() < 500,
        "and not into the log either"
    );

    // What needs a descriptor says so; what needs none works.
    assert_eq!(early.request("GET", "/health", &[], b"").status, 200);
    let target = format!("/v1/files/read?path={}", dir.join("file"));
    let reply = early.request("GET", &target, &[], b"");
    match reply.status {
        200 => assert_eq!(reply.body, b"data"),
        500 | 503 => assert!(reply.text().contains("EMFILE"), "{}", reply.text()),
        status => panic!("{status}: {}", reply.text()),
    }
    let body = json!({"cmd": "echo ran"}).to_string();
    let reply = early.request("POST", "/v1/exec", &[], body.as_bytes());
    match reply.status {
        200 => assert!(reply.text().contains("ran\\n"), "{}", reply.text()),
        400 => assert_eq!(reply.code(), "no_resources", "{}", reply.text()),
        500 | 503 => assert!(reply.text().contains("EMFILE"), "{}", reply.text()),
        status => panic!("{status}: {}", reply.text()),
    }

    for probe in &mut probes {
        if let Some(status) = probe.status() {
            assert!([200, 503].contains(&status), "{status}");
        }
    }
    drop(probes);
    expect_recovery(&mut server);
    assert_eq!(early.request("GET", &target, &[], b"").body, b"data");
    // Nothing is lost of what was there before.
    let target = format!("/v1/processes/{}", kept["id"].as_str().unwrap());
    let stdin = format!("{target}/stdin?eof=1");
    assert_eq!(early.request("PUT", &stdin, &[], b"on\n").status, 200);
    let logs = server.stream("GET", &format!("{target}/logs?follow=1"), b"");
    let output = output_of(&logs.collect::<Vec<_>>(), "stdout", 0);
    assert_eq!(output.data, b"kept\non\n");
    wait_until("descriptors are back", PATIENCE, || {
        descriptors_of(pid) <= descriptors
    });
}

#[test]
fn descriptors_that_are_taken_away_meanwhile_are_503_and_come_back() {
    let mut server = Server::start();
    assert_eq!(server.exec(&json!({"cmd": "echo on"})).stdout, "on\n");
    let pid = server.pid().to_string();
    let limit_to = |limit: usize| {
        std::process::Command::new("prlimit")
            .args(["--pid", &pid, &format!("--nofile={limit}:")])
            .status()
            .is_ok_and(|status| status.success())
    };
    if std::fs::read_dir(format!("/proc/{pid}/fd")).is_err() {
        skip!("nobody here may see the descriptors of a process that is not dumpable");
    }
    if !limit_to(1000) {
        skip!("needs prlimit");
    }
    for _ in 0..3 {
        // No number below the first that is free can be had.
        let is_free = |number: &usize| {
            // Where what a descriptor stands for may not be asked, its number can be.
            std::fs::symlink_metadata(format!("/proc/{pid}/fd/{number}")).is_err()
        };
        let free = || (0..1_000_000).find(is_free);
        let mut lowest = free();
        wait_until("the server is at rest", PATIENCE, || {
            std::mem::replace(&mut lowest, free()) == free()
        });
        assert!(limit_to(lowest.unwrap()));
        let (refused, replies) = probe_all(&server, 5);
        for reply in replies {
            assert_eq!(reply.status, 503, "{}", reply.text());
            assert_eq!(reply.code(), "no_descriptors");
        }
        let before = cpu_time_of(server.pid());
        thread::sleep(Duration::from_millis(500));
        let used = cpu_time_of(server.pid()).saturating_sub(before);
        assert!(used < Duration::from_millis(200), "spinning: {used:?}");
        drop(refused);
        assert!(limit_to(1000));
        expect_recovery(&mut server);
    }
}

#[test]
fn running_out_of_threads_is_503_and_passes() {
    if !can_change_user() {
        skip!("needs root, setpriv and prlimit: the limit does not bind root");
    }
    let dir = TempDir::new();
    let uid = spare_uid(1);
    let words = format!(
        "cd / && exec setpriv --reuid={uid} --regid={uid} --clear-groups \
         prlimit --nproc=24:24 {}",
        public_copy(&dir)
    );
    let mut server = Server::builder().wrapped_in(&["sh", "-c", &words]).start();
    let mut early = server.connect();
    assert_eq!(early.request("GET", "/v1/processes", &[], b"").status, 200);
    let mut without_thread = 0;
    for round in 0..3 {
        let (held, replies) = probe_all(&server, 60);
        let refused: Vec<&Reply> = replies.iter().filter(|reply| reply.status != 200).collect();
        assert!(
            !refused.is_empty(),
            "round {round}: the limit was not reached"
        );
        assert!(refused.len() < 60, "round {round}: nobody was served");
        for reply in refused {
            assert_eq!(reply.status, 503, "round {round}: {}", reply.text());
            assert_eq!(reply.code(), "no_threads", "round {round}");
            assert_eq!(reply.header("connection"), Some("close"));
        }
        assert!(server.is_running());

        // Clients that are connected are served, and one whose command cannot be started gets an error.
        assert_eq!(early.request("GET", "/health", &[], b"").status, 200);
        let body = json!({"cmd": "echo ran"}).to_string();
        let reply = early.request("POST", "/v1/exec", &[], body.as_bytes());
        match reply.status {
            // A refused connection may have given its thread back by now.
            200 => assert!(reply.text().contains("\"exit\""), "{}", reply.text()),
            400 => assert_eq!(reply.code(), "no_resources", "{}", reply.text()),
            500 | 503 => assert!(reply.text().contains("EAGAIN"), "{}", reply.text()),
            status => panic!("{status}: {}", reply.text()),
        }
        // So is who asks for work that has a thread of its own.
        for (route, body) in [
            ("grep", json!({"pattern": "x", "path": "/etc/passwd"})),
            (
                "compare",
                json!({"path": "/dev", "entries": [{"path": "x", "size": 0}]}),
            ),
        ] {
            let target = format!("/v1/files/{route}");
            let reply = early.request("POST", &target, &[], body.to_string().as_bytes());
            let text = reply.text();
            if reply.status == 200 {
                assert!(
                    text.contains("\"searched\":") || text.contains("\"extra\":"),
                    "{text}"
                );
            } else {
                assert_eq!(
                    (reply.status, &*reply.code()),
                    (503, "no_threads"),
                    "{text}"
                );
                without_thread += 1;
            }
        }
        drop(held);
        expect_recovery(&mut server);
    }
    assert!(without_thread > 0, "there was always a thread");
}

#[test]
fn running_out_of_address_space_is_503_and_passes() {
    if std::process::Command::new("prlimit")
        .arg("--version")
        .output()
        .is_err()
    {
        skip!("needs prlimit");
    }
    // How much it needs by itself is measured; what is left is for some dozens of stacks.
    let base = {
        let server = Server::start();
        let _ = server.exec(&json!({"cmd": "true"}));
        status_of(server.pid(), "VmHWM").max(status_of(server.pid(), "VmSize")) * 1024
    };
    // What runs out first, a stack or something small, depends on how it divides: several ways.
    for step in 0..6 {
        let limit = base + (16 << 20) + step * 52 * 1024;
        let option = format!("--as={limit}:{limit}");
        let mut server = Server::builder().wrapped_in(&["prlimit", &option]).start();
        let mut early = server.connect();
        assert_eq!(early.request("GET", "/v1/processes", &[], b"").status, 200);
        for round in 0..2 {
            let (held, replies) = probe_all(&server, 300);
            let refused: Vec<&Reply> = replies.iter().filter(|reply| reply.status != 200).collect();
            assert!(!refused.is_empty(), "the limit {limit} was not reached");
            assert!(refused.len() < 300, "nobody was served with {limit}");
            for reply in refused {
                assert_eq!(reply.status, 503, "round {round}: {}", reply.text());
                // What runs out first is chance.
                let code = reply.code();
                assert!(
                    ["no_memory", "no_threads"].contains(&code.as_str()),
                    "{code}"
                );
            }
            assert!(server.is_running(), "limit {limit}, round {round}");
            assert_eq!(early.request("GET", "/health", &[], b"").status, 200);
            drop(held);
            expect_recovery(&mut server);
        }
    }
}

/// Clients that show no token take all that the server has, by silence or half a head, and come again and again. Who has
/// a token is served.
#[track_caller]
fn expect_service_among_strangers(server: &mut Server, target: &str) {
    let mut strangers = Vec::new();
    let mut come = |count: usize| {
        for index in 0..count {
            let Ok(mut stream) = TcpStream::connect(server.address) else {
                continue;
            };
            if index % 2 == 0 {
                let _ = stream.write_all(b"POST /v1/exec HTTP/1.1\r\nX-Sandbox-Token:");
            }
            strangers.push(stream);
        }
    };
    come(400);
    for round in 0..5 {
        let started = Instant::now();
        let mut connection = server.connect();
        let reply = connection.request("GET", target, &[], b"");
        assert_eq!(reply.status, 200, "round {round}: {}", reply.text());
        // The connection stays, whoever comes.
        come(20);
        let reply = connection.request("GET", target, &[], b"");
        assert_eq!(reply.status, 200, "round {round}: {}", reply.text());
        let passed = started.elapsed();
        assert!(passed < Duration::from_secs(8), "round {round}: {passed:?}");
    }
    assert!(server.is_running());
    assert_no_panic(server);
}

#[test]
fn clients_without_a_token_that_take_all_threads_make_room() {
    if !can_change_user() {
        skip!("needs root, setpriv and prlimit: the limit does not bind root");
    }
    let dir = TempDir::new();
    let uid = spare_uid(3);
    let words = format!(
        "cd / && exec setpriv --reuid={uid} --regid={uid} --clear-groups \
         prlimit --nproc=24:24 {}",
        public_copy(&dir)
    );
    let mut server = Server::builder().wrapped_in(&["sh", "-c", &words]).start();
    expect_service_among_strangers(&mut server, "/v1/processes");
    // They leave threads for work, too.
    wait_until("a command runs", PATIENCE, || {
        server
            .post("/v1/exec", &json!({"cmd": "echo ran"}))
            .text()
            .contains("ran\\n")
    });
}

#[test]
fn clients_without_a_token_that_take_all_descriptors_make_room() {
    let limited = ["sh", "-c", "ulimit -n 160 && exec \"$0\""];
    let mut server = Server::builder().wrapped_in(&limited).start();
    expect_service_among_strangers(&mut server, "/v1/processes");
    if is_root() {
        let mut server = Server::host().wrapped_in(&limited).start();
        expect_service_among_strangers(&mut server, "/v1/sandboxes");
    }
}

#[test]
fn clients_without_a_token_that_take_all_address_space_make_room() {
    let limited = |server: &Server| {
        let own = status_of(server.pid(), "VmHWM").max(status_of(server.pid(), "VmSize"));
        let bytes = own * 1024 + (16 << 20);
        format!("exec prlimit --as={bytes}:{bytes} \"$0\"")
    };
    let limit = limited(&Server::start());
    let mut server = Server::builder().wrapped_in(&["sh", "-c", &limit]).start();
    expect_service_among_strangers(&mut server, "/v1/processes");
    if is_root() {
        let limit = limited(&Server::host().start());
        let mut server = Server::host().wrapped_in(&["sh", "-c", &limit]).start();
        expect_service_among_strangers(&mut server, "/v1/sandboxes");
    }
}

#[test]
fn a_client_that_never_reads_costs_a_bounded_buffer() {
    let server = Server::start();
    let dir = TempDir::new();
    std::fs::write(dir.join("file"), vec![b'x'; 1 << 20]).unwrap();
    let _ = server.get("/health");
    let before = status_of(server.pid(), "VmRSS");
    let request = format!(
        "GET /v1/files/read?path={} HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {TOKEN}\r\n\r\n",
        dir.join("file")
    )
    .repeat(500);
    let mut silent = Vec::new();
    for _ in 0..8 {
        let mut connection = server.connect();
        connection
            .stream
            .set_write_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        // Pipelines without reading until nothing more is taken.
        while connection.stream.write_all(request.as_bytes()).is_ok() {}
        silent.push(connection);
    }
    let grown = status_of(server.pid(), "VmRSS").saturating_sub(before);
    assert!(
        grown < 16 << 10,
        "{grown} KiB for eight clients that do not read"
    );
    assert_eq!(server.get("/health").status, 200);
    // One of them comes to its senses: what it gets is in step.
    let mut connection = silent.pop().unwrap();
    for _ in 0..20 {
        let reply = connection.read_reply();
        assert_eq!((reply.status, reply.body.len()), (200, 1 << 20));
    }
    drop(silent);
    drop(connection);
    wait_until("their threads go", PATIENCE, || {
        status_of(server.pid(), "Threads") < 10
    });
}

// ---------------------------------------------------------------------------------------------
// Nonsense.

#[test]
fn things_that_are_not_http_hurt_nobody() {
    let mut server = Server::start();
    let random: Vec<u8> = {
        let mut random = Random(7);
        (0..1_000_000).map(|_| random.byte()).collect()
    };
    let mut nonsense: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"\r\n".to_vec(),
        b"\n".to_vec(),
        b"\0".to_vec(),
        b"GET".to_vec(),
        b"\r\n\r\n\r\n\r\n".to_vec(),
        b"\r\n".repeat(500_000),
        b"\n".repeat(500_000),
        b" ".repeat(500_000),
        vec![0; 500_000],
        vec![0xff; 500_000],
        b"GET / HTTP/1.1\r\n".repeat(30_000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\x04\0\0\0\0\0".to_vec(),
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03".repeat(100),
        b"SSH-2.0-OpenSSH_9.9\r\n".to_vec(),
        b"{\"cmd\":\"true\"}".to_vec(),
        b"GET http://sandbox/health HTTP/1.1\r\nHost: sandbox\r\n\r\n".to_vec(),
        b"OPTIONS * HTTP/1.1\r\nHost: sandbox\r\n\r\n".to_vec(),
        b"CONNECT sandbox:80 HTTP/1.1\r\nHost: sandbox:80\r\n\r\n".to_vec(),
        b"GET /%00%ff%fe HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
    ];
    nonsense.push(random.clone());
    for start in (0..random.len()).step_by(50_000) {
        nonsense.push(random[start..start + 1000].to_vec());
    }
    for bytes in &nonsense {
        let mut connection = server.connect();
        let _ = connection.stream.write_all(bytes);
        let _ = connection.stream.shutdown(Shutdown::Write);
        let received = connection.read_to_close();
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(60)]).into_owned();
        let replies = parse_replies(&received).unwrap_or_else(|error| panic!("{shown:?}: {error}"));
        for reply in &replies {
            assert!(
                reply.status == 200 || reply.status == 204 || (400..500).contains(&reply.status),
                "{shown:?}: {}",
                reply.status
            );
        }
    }
    assert!(server.is_running());
    assert_no_panic(&server);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn connections_that_are_reset_at_any_moment_leave_nothing_behind() {
    let mut server = Server::start();
    let _ = server.exec(&json!({"cmd": "true"}));
    let threads = status_of(server.pid(), "Threads");
    let descriptors = descriptors_of(server.pid());
    let body = json!({"cmd": "cat /dev/zero | tr '\\0' x"}).to_string();
    let request = format!(
        "POST /v1/exec HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {TOKEN}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    for end in (0..=request.len()).chain([request.len(); 20]) {
        let mut connection = server.connect();
        connection.send(&request.as_bytes()[..end]);
        if end == request.len() {
            // Reset while it is sending.
            assert!(connection.fill());
        }
        reset(connection);
    }
    expect_idle(&server, threads, descriptors);
    assert!(server.is_running());
    assert_no_panic(&server);
}

#[test]
fn a_client_that_goes_away_with_a_request_in_the_pipe_is_noticed_within_a_second() {
    // The bytes of the next request, unread, must not hide that nobody is there any more.
    let server = Server::start();
    // On a busy machine not every time.
    let is_noticed_soon = |_| {
        let mut connection = server.connect();
        let body = json!({"cmd": "sleep 60"}).to_string();
        connection.send_request("POST", "/v1/exec", &[], body.as_bytes());
        connection.send_request("GET", "/health", &[], b"");
        let head = connection.read_head();
        assert_eq!(head.status, 200);
        assert!(connection.read_chunk().is_some());
        drop(connection);
        let gone = Instant::now();
        wait_until("the command is killed", PATIENCE, || {
            let processes = server.get("/v1/processes").json();
            processes
                .as_array()
                .unwrap()
                .iter()
                .all(|entry| entry["running"] == false)
        });
        gone.elapsed() < Duration::from_millis(1100)
    };
    assert!((0..10).any(is_noticed_soon));
    for entry in server.get("/v1/processes").json().as_array().unwrap() {
        assert_eq!(entry["reason"], "disconnected");
    }
}

/// Waits until no command runs and there are as few threads and descriptors as there were; a
/// connection or two of the question itself may be among them.
#[track_caller]
fn expect_idle(server: &Server, threads: u64, descriptors: usize) {
    let mut seen = (0, 0, 0);
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let processes = server.get("/v1/processes").json();
        let processes = processes.as_array().unwrap();
        seen = (
            processes
                .iter()
                .filter(|entry| entry["running"] == true)
                .count(),
            status_of(server.pid(), "Threads"),
            descriptors_of(server.pid()),
        );
        if seen.0 == 0 && seen.1 <= threads + 2 && seen.2 <= descriptors + 2 {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    let (running, more_threads, more_descriptors) = seen;
    panic!(
        "left behind: {running} commands, {more_threads} threads instead of {threads}, \
         {more_descriptors} descriptors instead of {descriptors}"
    );
}

// ---------------------------------------------------------------------------------------------
// Random mutations.

/// Valid requests to start from. Nothing here kills, deletes or names a path outside the working
/// directory of the server, and the server has no privileges, whatever a mutation makes of it.
fn valid_request(random: &mut Random) -> Vec<u8> {
    let token = format!("X-Sandbox-Token: {TOKEN}\r\n");
    let token = if random.below(8) == 0 { "" } else { &token };
    let (start, body) = match random.below(24) {
        0 => ("GET /health", ""),
        1 => ("OPTIONS /v1/files/write", ""),
        2 => ("GET /v1/processes", ""),
        3 => ("GET /v1/processes/p-1", ""),
        4 => (
            "GET /v1/processes/p-1/logs?stdout_offset=1&stderr_offset=2",
            "",
        ),
        5 => ("GET /v1/processes/p-1/wait?timeout=0.01", ""),
        6 => ("GET /v1/files/read?path=kept&offset=3&length=5", ""),
        7 => ("GET /v1/files/stat?path=kept&detail=full", ""),
        8 => ("GET /v1/files/list?path=.&limit=10&after=a", ""),
        9 | 10 => (
            "PUT /v1/files/write?path=made&mode=644",
            "some content of a file",
        ),
        11 => (
            "PUT /v1/files/write?path=made&offset=5&truncate_to=9",
            "\r\n\r\nGET / HTTP/1.1",
        ),
        12 => (
            "POST /v1/exec",
            r#"{"cmd":["true"],"timeout":5,"env":{"A":"b"},"tag":"x"}"#,
        ),
        13 => (
            "POST /v1/exec",
            r#"{"cmd":"true","shell":true,"stdin":"abc\ud83d\ude00"}"#,
        ),
        14 => ("POST /v1/processes/p-1/stdin?eof=1", "text"),
        15 => ("POST /v1/processes/p-1/resize", r#"{"rows":30,"cols":100}"#),
        16 => ("GET /v1/processes/p-1/attach?offset=-1&mode=ro", ""),
        17 => (
            "POST /v1/files/compare",
            r#"{"path":".","entries":[{"path":"kept","size":8,"mtime_ms":-1,"sha256":null}]}"#,
        ),
        18 => (
            "POST /v1/exec",
            r#"{"code":"true","language":"sh","args":["a\ud83d"]}"#,
        ),
        19 => ("POST /v1/venv", r#"{"path":"a:b"}"#),
        20 => (
            "POST /v1/execute",
            r#"{"code":":","language":"bash","timeout":5,"stdin":"\ud83d"}"#,
        ),
        21 => (
            "GET /v1/contexts/default-bash/executions/e-1/events?after=1",
            "",
        ),
        22 => (
            "POST /v1/contexts/default-bash/interrupt",
            r#"{"kill_after":1}"#,
        ),
        _ => ("POST /v1/nope", "a body that nobody wants"),
    };
    let mut request = format!("{start} HTTP/1.1\r\nHost: sandbox\r\n{token}").into_bytes();
    if random.below(6) == 0 {
        request.extend_from_slice(b"Range: bytes=1-3\r\nX-Other: some, values; here=\"x\"\r\n");
    }
    if body.is_empty() {
        request.extend_from_slice(b"\r\n");
    } else if random.below(3) == 0 {
        request.extend_from_slice(b"Transfer-Encoding: chunked\r\n\r\n");
        let cut = random.below(body.len() + 1);
        for part in [&body[..cut], &body[cut..]] {
            if !part.is_empty() {
                request.extend_from_slice(format!("{:x}\r\n{part}\r\n", part.len()).as_bytes());
            }
        }
        request.extend_from_slice(b"0\r\n\r\n");
    } else {
        let expect = if random.below(6) == 0 {
            "Expect: 100-continue\r\n"
        } else {
            ""
        };
        let length = format!("{expect}Content-Length: {}\r\n\r\n{body}", body.len());
        request.extend_from_slice(length.as_bytes());
    }
    request
}

/// Fragments that matter to a parser.
const FRAGMENTS: &[&[u8]] = &[
    b"\r\n",
    b"\r",
    b"\n",
    b"\0",
    b" ",
    b"\t",
    b":",
    b"\r\n\r\n",
    b"\r\n ",
    b"%",
    b"%00",
    b"%2e%2e%2f",
    b"&",
    b"?",
    b"=",
    b"0",
    b"-",
    b"+",
    b"\"",
    b"\\u0000",
    b"\\ud800",
    b"[",
    b"{",
    b"}",
    b"\xff",
    b"\xc3",
    b"0\r\n\r\n",
    b"ffffffffffffffff",
    b"99999999999999999999",
    b"Content-Length: 3\r\n",
    b"Content-Length: 300\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip\r\n",
    b"Expect: 100-continue\r\n",
    b"Connection: close\r\n",
    b"HTTP/1.0",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
];

fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() + 1);
        let end = (at + 1 + random.below(12)).min(bytes.len());
        match random.below(8) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.byte(),
            2 => drop(bytes.drain(at.min(end)..end)),
            3 => bytes.truncate(at),
            4 => {
                let copy = bytes[at.min(end)..end].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, copy);
            }
            5 => {
                let long = [random.byte()].repeat(random.below(3000));
                bytes.splice(at..at, long);
            }
            _ => {
                let fragment = random.of(FRAGMENTS).to_vec();
                bytes.splice(at..at, fragment);
            }
        }
    }
}

/// What mutated requests may be answered with. 500 is not among them: none is the server's fault.
const STATUSES: &[u16] = &[
    100, 102, 200, 204, 206, 400, 403, 404, 405, 408, 409, 411, 413, 414, 416, 417, 426, 431, 501,
];

/// A server without privileges in a directory of its own: what a mutation makes of a command or
/// a path is anything at all. `None` if there is none.
fn harmless_server(dir: &TempDir) -> Option<Server> {
    let work = dir.join("work");
    std::fs::create_dir(&work).unwrap();
    std::fs::write(format!("{work}/kept"), b"0123456789").unwrap();
    let copy = public_copy(dir);
    let mut script = format!("cd {work} && exec ");
    if can_change_user() {
        let uid = spare_uid(2);
        std::os::unix::fs::chown(&work, Some(uid), Some(uid)).unwrap();
        script += "setpriv --clear-groups ";
        script += &["--reuid=", "--regid="]
            .map(|name| format!("{name}{uid} "))
            .concat();
    } else if nix::unistd::geteuid().is_root() {
        return None;
    }
    script += &copy;
    Some(Server::builder().wrapped_in(&["sh", "-c", &script]).start())
}

#[test]
fn tens_of_thousands_of_mutated_requests_do_no_harm() {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().unwrap())
    };
    let seed = number("SBX_FUZZ_SEED").unwrap_or(0x5eed);
    let count = number("SBX_FUZZ_COUNT").unwrap_or(30_000);
    eprintln!("seed {seed}, {count} requests");

    let dir = TempDir::new();
    let Some(mut server) = harmless_server(&dir) else {
        skip!("as root this needs setpriv, to have no privileges");
    };
    let _ = server.exec(&json!({"cmd": "echo p-1"}));
    let threads = status_of(server.pid(), "Threads");
    let descriptors = descriptors_of(server.pid());

    let sent = Arc::new(AtomicU64::new(0));
    let statistics: Arc<Mutex<BTreeMap<u16, u64>>> = Arc::default();
    let done = Arc::new(AtomicBool::new(false));
    let address = server.address;
    let health = {
        let done = Arc::clone(&done);
        thread::spawn(move || {
            let mut slowest = Duration::ZERO;
            while !done.load(Ordering::Relaxed) {
                let started = Instant::now();
                let mut connection = Connection::open(address, None);
                assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
                slowest = slowest.max(started.elapsed());
                thread::sleep(Duration::from_millis(20));
            }
            slowest
        })
    };
    let workers: Vec<_> = (0..4u64)
        .map(|worker| {
            let (sent, statistics) = (Arc::clone(&sent), Arc::clone(&statistics));
            thread::spawn(move || {
                let mut round = 0;
                while sent.load(Ordering::Relaxed) < count {
                    let case = seed ^ (worker << 56) ^ (round << 8);
                    round += 1;
                    let mut random = Random(case);
                    let requests = 1 + random.below(4);
                    let mut bytes = Vec::new();
                    for _ in 0..requests {
                        let mut request = valid_request(&mut random);
                        if random.below(4) > 0 {
                            mutate(&mut request, &mut random);
                        }
                        bytes.extend(request);
                    }
                    sent.fetch_add(requests as u64, Ordering::Relaxed);
                    let statuses = check_conversation(address, &bytes, &mut random, case);
                    for status in statuses {
                        *statistics.lock().unwrap().entry(status).or_default() += 1;
                    }
                }
            })
        })
        .collect();
    let outcomes: Vec<_> = workers.into_iter().map(thread::JoinHandle::join).collect();
    done.store(true, Ordering::Relaxed);
    let slowest = health.join().expect("/health answers throughout");
    assert!(
        outcomes.iter().all(Result::is_ok),
        "seed {seed}: see the messages above"
    );
    let statistics = statistics.lock().unwrap();
    eprintln!("answers by status: {statistics:?}");
    for status in [200, 400, 403, 404, 405, 409, 411, 417] {
        assert!(
            statistics.contains_key(&status),
            "the mutations do not reach {status}: {statistics:?}"
        );
    }
    assert!(slowest < Duration::from_secs(5), "/health took {slowest:?}");
    assert_no_panic(&server);
    assert!(server.is_running(), "seed {seed}");
    assert!(
        status_of(server.pid(), "VmHWM") < 64 << 10,
        "memory is bounded"
    );
    expect_idle(&server, threads, descriptors);
    assert_eq!(server.exec(&json!({"cmd": "echo fine"})).stdout, "fine\n");
}

/// Sends the bytes in a few pieces, then ends its half: whole, well-formed answers must come, and an end.
fn check_conversation(
    address: std::net::SocketAddr,
    bytes: &[u8],
    random: &mut Random,
    case: u64,
) -> Vec<u16> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut rest = bytes;
    while !rest.is_empty() {
        let size = if random.below(2) == 0 {
            rest.len()
        } else {
            1 + random.below(rest.len())
        };
        if stream.write_all(&rest[..size]).is_err() {
            break;
        }
        rest = &rest[size..];
    }
    let _ = stream.shutdown(Shutdown::Write);
    let mut received = Vec::new();
    if let Err(error) = stream.read_to_end(&mut received) {
        assert_eq!(
            error.kind(),
            ErrorKind::ConnectionReset,
            "case {case:#x}: {error}: {:?}",
            String::from_utf8_lossy(bytes)
        );
    }
    // HEAD answers without a body, which only shows to one who knows the request.
    if crate::fixture::find(bytes, b"HEAD").is_some() {
        return Vec::new();
    }
    let replies = parse_replies(&received).unwrap_or_else(|error| {
        panic!(
            "case {case:#x}: {error}\nsent {:?}\nreceived {:?}",
            String::from_utf8_lossy(bytes),
            String::from_utf8_lossy(&received)
        )
    });
    for reply in &replies {
        assert!(
            STATUSES.contains(&reply.status),
            "case {case:#x}: {} {}\nsent {:?}",
            reply.status,
            reply.text(),
            String::from_utf8_lossy(bytes)
        );
    }
    replies.iter().map(|reply| reply.status).collect()
}
