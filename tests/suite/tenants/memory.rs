//! Memory: with the server in a container of 256 MiB no tenant has it killed, whatever it makes the server
//! hold. Each attack here needs more than that, unless the server refuses or takes it slowly.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::thread;

use serde_json::json;

use super::{expect_service, head, send_and_hold};
use crate::fixture::{
    Frame, MemoryGroup, PATIENCE, Sandbox, Server, TOKEN, TempDir, WebSocket, frame, is_root,
    memory_of, wait_until,
};
use crate::skip;

pub(super) const MIB: usize = 1 << 20;

/// Memory of the container.
const LIMIT: u64 = 256 << 20;

/// Lets `attack` do its worst to a host in a small container. It returns what it holds.
#[track_caller]
pub(super) fn withstand<T>(attack: impl FnOnce(&Server, &Sandbox<'_>) -> T) {
    if !is_root() {
        skip!("needs root");
    }
    let Some(group) = MemoryGroup::new(LIMIT) else {
        skip!("no memory cgroup can be made here");
    };
    let mut server = group.holding(Server::host());
    {
        let (attacker, neighbour) = (server.sandbox(), server.sandbox());
        let held = attack(&server, &attacker);
        expect_service(&server, &neighbour);
        assert_eq!(
            group.kills(),
            0,
            "the kernel killed something: {}",
            server.log()
        );
        drop(held);
        // What was held is given back.
        wait_until("the attacker is served again", PATIENCE, || {
            let body = vec![b' '; 4 * MIB];
            let reply = attacker.request(
                "POST",
                "exec",
                &[&body, &b"{\"cmd\":\"true\"}"[..]].concat(),
            );
            [200, 400].contains(&reply.status)
        });
        eprintln!("peak: {:?} MiB", group.peak().map(|bytes| bytes >> 20));
    }
    assert!(server.is_running());
}

/// Waits for 503 `over_limit`. The server may still be busy with the requests that fill the share, and requests that
/// grow at the same time can be refused together: each is one too many, and what is left has room for one more.
/// So `hold_more` is called after each answer.
#[track_caller]
pub(super) fn expect_refused(
    sandbox: &Sandbox<'_>,
    method: &str,
    route: &str,
    body: &[u8],
    what: &str,
    mut hold_more: impl FnMut(),
) {
    wait_until("the request is refused", 3 * PATIENCE, || {
        let reply = sandbox.request(method, route, body);
        if [200, 400].contains(&reply.status) {
            hold_more();
            return false;
        }
        assert_eq!((reply.status, &*reply.code()), (503, "over_limit"));
        assert!(reply.text().contains(what), "{}", reply.text());
        true
    });
}

/// Whether the server lives. An attack goes on as long as it does.
pub(super) fn is_alive(server: &Server) -> bool {
    TcpStream::connect(server.address).is_ok()
}

#[test]
fn lists_of_long_commands_that_nobody_reads() {
    withstand(|server, attacker| {
        let script = format!("sleep 1000; : {}", "x".repeat(100_000));
        for _ in 0..60 {
            attacker.spawn(&json!({ "cmd": script }));
        }
        let list = head(attacker, "GET", "processes", "");
        (0..150)
            .take_while(|_| is_alive(server))
            .map(|_| send_and_hold(server, &list))
            .collect::<Vec<_>>()
    });
}

#[test]
fn the_documents_of_a_long_command_that_nobody_reads() {
    withstand(|server, attacker| {
        // A control character is six bytes of JSON.
        let words = vec!["\u{1}".repeat(100_000); 15];
        let cmd = [vec!["sleep".to_owned(), "1000".to_owned()], words].concat();
        // Sleep refuses the words, but the process is remembered.
        let process = attacker.spawn(&json!({ "cmd": cmd }));
        let route = format!("processes/{}", process["id"].as_str().unwrap());
        let describe = head(attacker, "GET", &route, "");
        let held: Vec<_> = (0..150)
            .take_while(|_| is_alive(server))
            .map(|_| send_and_hold(server, &describe))
            .collect();
        // It gets the beginning then.
        let document = attacker.get(&route).json();
        assert_eq!(document["cmd_truncated"], true);
        assert_eq!(document["cmd"][0], "sleep");
        held
    });
}

#[test]
fn messages_to_a_terminal_that_never_become_whole() {
    withstand(|_, attacker| {
        let process = attacker.spawn(&json!({ "cmd": ["cat"], "pty": true }));
        let route = format!("processes/{}/attach", process["id"].as_str().unwrap());
        let target = attacker.target(&route);
        let fragment = frame(0x02, &vec![b'x'; MIB - 1]);
        let mut held = Vec::new();
        let refused = (0..150).any(|_| {
            let mut socket = WebSocket::open_raw(attacker.connect(), &target);
            socket.connection.send(&fragment);
            // It has arrived when the ping after it is answered.
            socket.send_frame(0x89, b"");
            let frame = socket.next_frame();
            held.push(socket);
            match frame {
                Frame::Pong(_) => false,
                Frame::Close(code, reason) => {
                    assert_eq!(code, 1011, "{reason}");
                    true
                }
                other => panic!("{other:?}"),
            }
        });
        assert!(refused, "150 messages are held");
        held
    });
}

#[test]
fn stdin_that_commands_do_not_read() {
    withstand(|server, attacker| {
        let body = json!({ "cmd": ["sleep", "1000"], "stdin": "x".repeat(6 * MIB) }).to_string();
        let mut statuses = Vec::new();
        for _ in 0..80 {
            if !is_alive(server) {
                break;
            }
            statuses.push(
                attacker
                    .request("POST", "processes", body.as_bytes())
                    .status,
            );
        }
        assert!(statuses.contains(&503), "{statuses:?}");
        let small = json!({ "cmd": ["sleep", "1000"], "stdin": "x".repeat(2 * MIB) }).to_string();
        for _ in 0..40 {
            let _ = attacker.request("POST", "processes", small.as_bytes());
        }
        // Whatever is not refused is held.
        let body = small.as_bytes();
        expect_refused(attacker, "POST", "processes", body, "stdin", || ());
        // It can help itself.
        let list = attacker.get("processes").json();
        for process in list.as_array().unwrap() {
            let route = format!("processes/{}", process["id"].as_str().unwrap());
            assert_eq!(attacker.request("DELETE", &route, b"").status, 200);
        }
        assert_eq!(
            attacker
                .request("POST", "processes", small.as_bytes())
                .status,
            200
        );
    });
}

#[test]
fn bodies_that_are_sent_in_part() {
    withstand(|server, attacker| {
        let length = format!("Content-Length: {}\r\n", 6 * MIB);
        let mut request = head(attacker, "POST", "exec", &length);
        request.extend(vec![b' '; 5 * MIB]);
        let mut held: Vec<_> = (0..120)
            .take_while(|_| is_alive(server))
            .map(|_| send_and_hold(server, &request))
            .collect();
        let body = vec![b' '; 6 * MIB];
        let hold_more = || held.push(send_and_hold(server, &request));
        expect_refused(
            attacker,
            "POST",
            "exec",
            &body,
            "bodies of requests",
            hold_more,
        );
        // Small ones are still read: it may end what it has started.
        assert_eq!(attacker.sh("echo on"), "on\n");
        held
    });
}

/// A long message, and after it a short one that does not end.
#[test]
fn the_buffers_of_long_messages() {
    withstand(|server, attacker| {
        let envelope = |length: usize| {
            let frame = b"{\"keepalive\":{},\"x\":\"";
            let text = "a".repeat(length - frame.len() - 2);
            let head = u32::try_from(length).unwrap().to_be_bytes();
            [&[0], &head[..], frame, text.as_bytes(), b"\"}"].concat()
        };
        let (long, short) = (envelope(6 * MIB), envelope(66_000));
        let length = long.len() + short.len() + 1000;
        let begin = format!(
            "POST /process.Process/StreamInput HTTP/1.1\r\nHost: localhost\r\nX-Access-Token: {}\r\n\
             E2b-Sandbox-Id: {}\r\nContent-Type: application/connect+json\r\nContent-Length: {length}\r\n\r\n",
            attacker.token, attacker.id
        );
        let request = [begin.as_bytes(), &long, &short[..60_000]].concat();
        // One after the other, so that each is granted.
        let mut held = Vec::new();
        for _ in 0..60 {
            if !is_alive(server) {
                break;
            }
            let mut stream = server.connect().stream;
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
            let _ = stream.write_all(&request);
            held.push(stream);
        }
        held
    });
}

#[test]
fn files_that_nobody_reads() {
    withstand(|server, attacker| {
        let file = vec![b'x'; 8 * MIB];
        assert_eq!(attacker.put("files/write?path=file", &file).status, 200);
        let read = head(attacker, "GET", "files/read?path=file", "");
        (0..1000)
            .take_while(|_| is_alive(server))
            .map(|_| send_and_hold(server, &read))
            .collect::<Vec<_>>()
    });
}

#[test]
fn logs_that_nobody_reads() {
    withstand(|server, attacker| {
        let script = "head -c 4000000 /dev/zero; sleep 1000";
        let process = attacker.spawn(&json!({ "cmd": script }));
        let route = format!("processes/{}", process["id"].as_str().unwrap());
        wait_until("the log is there", PATIENCE, || {
            attacker.get(&route).json()["stdout_bytes"] == 4_000_000
        });
        let follow = head(attacker, "GET", &format!("{route}/logs?follow=1"), "");
        (0..1000)
            .take_while(|_| is_alive(server))
            .map(|_| send_and_hold(server, &follow))
            .collect::<Vec<_>>()
    });
}

#[test]
fn pages_of_a_large_directory_that_nobody_reads() {
    withstand(|server, attacker| {
        let directory = attacker.home.join("many");
        std::fs::create_dir(&directory).unwrap();
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o777)).unwrap();
        // Made in the container of the tests, which has more memory.
        let name = "n".repeat(220);
        for index in 0..40_000 {
            std::fs::File::create(directory.join(format!("{name}{index}"))).unwrap();
        }
        let list = head(attacker, "GET", "files/list?path=many&limit=100000", "");
        let mut held: Vec<_> = (0..40)
            .take_while(|_| is_alive(server))
            .map(|_| send_and_hold(server, &list))
            .collect();
        let route = "files/list?path=many&limit=100000";
        let hold_more = || held.push(send_and_hold(server, &list));
        expect_refused(attacker, "GET", route, b"", "responses", hold_more);
        held
    });
}

#[test]
fn heads_that_are_sent_in_part() {
    withstand(|server, _| {
        let head = format!(
            "GET /health HTTP/1.1\r\nHost: localhost\r\nX: {}",
            "y".repeat(60_000)
        );
        (0..4000)
            .take_while(|_| is_alive(server))
            .map(|_| send_and_hold(server, head.as_bytes()))
            .collect::<Vec<_>>()
    });
}

/// A server behind a port that sends without end, to as many as ask.
fn endless_server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for socket in listener.incoming().map_while(Result::ok) {
            let serve = move || {
                let mut socket = socket;
                let _ = socket.read(&mut [0; 4096]);
                let _ = socket.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
                while socket.write_all(&[b'x'; 16_384]).is_ok() {}
            };
            let thread = thread::Builder::new().stack_size(256 * 1024);
            let _ = thread.spawn(serve);
        }
    });
    port
}

#[test]
fn proxied_responses_that_nobody_reads() {
    let Some(group) = MemoryGroup::new(LIMIT) else {
        skip!("no memory cgroup can be made here");
    };
    let mut server = group.holding(Server::builder());
    let request = format!(
        "GET /v1/proxy/{}/ HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {TOKEN}\r\n\r\n",
        endless_server()
    );
    let held: Vec<_> = (0..600)
        .take_while(|_| is_alive(&server))
        .map(|_| send_and_hold(&server, request.as_bytes()))
        .collect();
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.exec(&json!({ "cmd": "echo on" })).stdout, "on\n");
    assert_eq!(group.kills(), 0, "{}", server.log());
    let memory = memory_of(server.pid(), "VmHWM") >> 20;
    assert!(memory < 160, "{memory} MiB");
    drop(held);
    assert!(server.is_running());
}

/// What waits in the kernel for a client that does not read is memory of the server's container too.
#[test]
fn an_unread_response_holds_little_of_the_kernels_memory() {
    let server = Server::start();
    let directory = TempDir::new();
    let large = std::fs::File::create(directory.path().join("large")).unwrap();
    large.set_len(256 << 20).unwrap();
    let mut client = server.connect();
    let target = format!("/v1/files/read?path={}", directory.join("large"));
    client.send_request("GET", &target, &[], b"");
    let ends = [
        client.stream.peer_addr().unwrap().port(),
        client.stream.local_addr().unwrap().port(),
    ]
    .map(|port| format!(":{port:04X}"));
    let queued = || {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        // sl local remote state tx:rx ...
        table.lines().skip(1).find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let is_meant = fields[1].ends_with(&ends[0]) && fields[2].ends_with(&ends[1]);
            is_meant.then(|| usize::from_str_radix(&fields[4][..8], 16).unwrap())
        })
    };
    let mut before = None;
    wait_until("the server waits for the client", PATIENCE, || {
        thread::sleep(std::time::Duration::from_millis(100));
        let now = queued().filter(|bytes| *bytes > 0);
        std::mem::replace(&mut before, now) == now && now.is_some()
    });
    assert!(before < Some(MIB), "{before:?}");
}

#[test]
fn displays_that_grow_beyond_what_was_sent() {
    withstand(|server, attacker| {
        if attacker.sh("command -v python3").is_empty() {
            return eprintln!("SKIPPED: there is no python3");
        }
        // Each of these characters has two bytes, and six when it is passed on. The last event of code that runs is not
        // dropped for the sake of later ones.
        let code = "import os, struct, time\n\
            head, tail = b'{\"type\":\"display\",\"data\":{\"text/plain\":\"', b'\"}}'\n\
            piece, count = '\\x85'.encode() * 32768, 160\n\
            def send(data):\n\
            \x20   while data: data = data[os.write(4, data):]\n\
            send(struct.pack('<I', len(head) + count * len(piece) + len(tail)) + head)\n\
            for _ in range(count): send(piece)\n\
            send(tail)\n\
            time.sleep(1000)";
        let body = json!({ "code": code, "on_disconnect": "keep" }).to_string();
        let mut held = Vec::new();
        for number in 0..9 {
            let context = json!({ "id": format!("c{number}"), "backend": "plain" }).to_string();
            let route = format!("contexts/c{number}");
            let made = attacker.request("POST", "contexts", context.as_bytes());
            assert_eq!(made.status, 200, "{}", made.text());
            let length = format!("Content-Length: {}\r\n", body.len());
            let mut request = head(attacker, "POST", &format!("{route}/execute"), &length);
            request.extend(body.as_bytes());
            held.push(send_and_hold(server, &request));
            wait_until("the display is handled", PATIENCE, || {
                let execution = attacker.get(&format!("{route}/executions/e-1")).json();
                execution["events"].as_u64() > Some(1) || !is_alive(server)
            });
        }
        drop(held);
    });
}
