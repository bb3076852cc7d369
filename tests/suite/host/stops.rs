//! A stop ends all that a sandbox had, as a deletion does: its connections, whoever has the other ends, and the threads of
//! the server that worked for it.

use std::fs::Permissions;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, getsockname};
use serde_json::json;

use super::{needs_root, with_users};
use crate::fixture::{
    PATIENCE, Sandbox, Server, TempDir, assert_error, has_namespaces, may_look_into_processes,
    threads_of, wait_until,
};
use crate::skip;

/// Has a tunnel and another connection to its proxy, serves one request behind port 8000, and gives all of them to who listens
/// at `$1`. `$2` is where the tunnel leads.
const GIVER: &str = r"
import os, socket, sys, time
host, port = os.environ['HTTP_PROXY'][7:].strip('/').split(':')
connect = lambda: socket.create_connection((host, int(port)))
tunnel, idle = connect(), connect()
tunnel.sendall(f'CONNECT {sys.argv[2]} HTTP/1.1\r\nHost: {sys.argv[2]}\r\n\r\n'.encode())
assert b' 200 ' in tunnel.recv(4096)
server = socket.socket(socket.AF_UNIX); server.bind(os.environ['SBX_PROXY_DIR'] + '/8000.sock'); server.listen(1)
print('ready', flush=True)
served = server.accept()[0]
served.recv(4096)
served.sendall(b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: first\n\n')
to = socket.socket(socket.AF_UNIX); to.connect(sys.argv[1])
socket.send_fds(to, [b'x'], [one.fileno() for one in (tunnel, idle, served)])
time.sleep(1000)
";

/// Takes connections at `$1`, and says of each whether it ends. On the second it asks for another tunnel.
const TAKER: &str = r"
import os, socket, sys
listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1] + '.new'); listener.listen(1)
os.chmod(sys.argv[1] + '.new', 0o777); os.rename(sys.argv[1] + '.new', sys.argv[1])
numbers = socket.recv_fds(listener.accept()[0], 1, 3)[1]
print('taken', flush=True)
sys.stdin.readline()
for at, number in enumerate(numbers):
    connection = socket.socket(fileno=number)
    connection.settimeout(5)
    try:
        if at == 1: connection.sendall(f'CONNECT {sys.argv[2]} HTTP/1.1\r\nHost: {sys.argv[2]}\r\n\r\n'.encode())
        print('ended' if connection.recv(4096) == b'' else 'sent')
    except socket.timeout: print('open')
    except OSError as error: print('ended')
";

const STOP: &str = r#"{"keep":"files"}"#;

#[track_caller]
fn stop(sandbox: &Sandbox<'_>) {
    let reply = sandbox.request("POST", "pause", STOP.as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[track_caller]
fn resume(sandbox: &Sandbox<'_>) {
    let reply = sandbox.post("resume", &json!({}));
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[test]
fn connections_that_another_sandbox_was_given_end_with_a_stop() {
    needs_root!();
    let server = Server::host().start();
    let outside = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = format!("localhost:{}", outside.local_addr().unwrap().port());
    let shared = TempDir::new();
    std::fs::set_permissions(shared.path(), Permissions::from_mode(0o777)).unwrap();
    let socket = shared.join("taker");
    let network = json!({ "mode": "allowlist", "allow": [place] });
    let [owner, accomplice] = [network, json!("blocked")].map(|network| {
        server.sandbox_with(&json!({
            "isolation": "landlock", "network": network, "read_write_paths": [shared.path()],
        }))
    });
    thread::scope(|scope| {
        let taker = json!({ "cmd": ["python3", "-c", TAKER, socket, place] });
        let taker = accomplice.spawn(&taker);
        let taker = format!("processes/{}", taker["id"].as_str().unwrap());
        wait_until("it listens", PATIENCE, || Path::new(&socket).exists());
        let giver = json!({ "cmd": ["python3", "-c", GIVER, socket, place] });
        let mut giver = owner.exec_stream(&giver);
        let _tunnel = outside.accept().unwrap();
        while giver.next().unwrap()["data"] != "ready\n" {}
        let client = scope.spawn(|| owner.get("proxy/8000/").text());
        let said = || accomplice.get(&format!("{taker}/logs")).text();
        wait_until("they are taken", PATIENCE, || said().contains("taken"));
        stop(&owner);
        assert_eq!(
            accomplice
                .request("POST", &format!("{taker}/stdin"), b"\n")
                .status,
            200
        );
        let ended = accomplice.get(&format!("{taker}/wait?timeout=20")).text();
        assert!(ended.contains("\"reason\":\"exited\""), "{ended}");
        assert_eq!(said().matches("ended").count(), 3, "{}", said());
        assert_eq!(client.join().unwrap(), "data: first\n\n");
    });
    outside.set_nonblocking(true).unwrap();
    assert!(
        outside.accept().is_err(),
        "a connection was made after the stop"
    );
}

/// The threads that serve networks of sandboxes.
fn network_threads(server: &Server) -> Vec<String> {
    threads_of(server.inner_pid(), "network")
}

/// Without being told, such a thread would wait for five seconds in case another command comes.
#[test]
fn no_thread_is_left_of_a_network_when_its_sandbox_stops() {
    needs_root!();
    let server = Server::host().start();
    let network = json!({ "mode": "allowlist", "allow": ["localhost:1"] });
    let sandbox = server.sandbox_with(&json!({ "isolation": "landlock", "network": network }));
    let rounds = (0..5).map(|_| {
        assert_eq!(sandbox.sh("echo here"), "here\n");
        // The command may be faster than the thread.
        wait_until("a thread serves its network", PATIENCE, || {
            !network_threads(&server).is_empty()
        });
        let begun = Instant::now();
        stop(&sandbox);
        wait_until("the thread ends", PATIENCE, || {
            network_threads(&server).is_empty()
        });
        let taken = begun.elapsed();
        resume(&sandbox);
        taken
    });
    // On a busy machine some take long.
    let quickest = rounds.min().unwrap();
    assert!(quickest < Duration::from_secs(4), "{quickest:?}");
}

/// Neither one that waits for connections, nor one that waits until somebody answers who does not.
#[test]
fn no_thread_acts_as_a_user_whose_sandbox_was_deleted() {
    needs_root!();
    if !may_look_into_processes() {
        skip!("needs CAP_SYS_PTRACE");
    }
    let server = Server::host().start();
    // A listener with a full queue: the kernel drops what comes.
    let flags = SockFlag::SOCK_CLOEXEC;
    let listener =
        nix::sys::socket::socket(AddressFamily::Inet, SockType::Stream, flags, None).unwrap();
    nix::sys::socket::bind(listener.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
    nix::sys::socket::listen(&listener, Backlog::new(0).unwrap()).unwrap();
    let port = getsockname::<SockaddrIn>(listener.as_raw_fd())
        .unwrap()
        .port();
    let fill =
        || TcpStream::connect_timeout(&([127, 0, 0, 1], port).into(), Duration::from_secs(1));
    let _waiting: Vec<_> = std::iter::from_fn(|| fill().ok()).take(16).collect();
    let place = format!("localhost:{port}");
    let network = json!({ "mode": "allowlist", "allow": [place] });
    for stops in [false, true] {
        let sandbox = server.sandbox_with(&json!({ "isolation": "landlock", "network": network }));
        let uid = sandbox.sh("id -u").trim().to_owned();
        let ask = format!(
            "import os, socket; host, port = os.environ['HTTP_PROXY'][7:].strip('/').split(':'); \
             way = socket.create_connection((host, int(port))); \
             way.sendall(b'CONNECT {place} HTTP/1.1\\r\\nHost: {place}\\r\\n\\r\\n'); way.recv(1)"
        );
        sandbox.spawn(&json!({ "cmd": ["python3", "-c", ask] }));
        wait_until("a thread connects", PATIENCE, || {
            network_threads(&server).len() == 2
        });
        let begun = Instant::now();
        if stops {
            stop(&sandbox);
        }
        sandbox.delete();
        assert!(
            begun.elapsed() < Duration::from_secs(8),
            "{:?}",
            begun.elapsed()
        );
        let task = format!("/proc/{}/task", server.inner_pid());
        let acts = |thread: std::fs::DirEntry| {
            let status = std::fs::read_to_string(thread.path().join("status")).ok()?;
            let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
            Some(ids.split_whitespace().any(|id| id == uid))
        };
        let mut threads = std::fs::read_dir(task).unwrap();
        assert!(!threads.any(|thread| acts(thread.unwrap()).unwrap_or(false)));
        wait_until("the threads end", PATIENCE, || {
            network_threads(&server).is_empty()
        });
    }
}

/// Some end by the signal before the server has noted that they run.
#[test]
fn all_that_a_stop_kills_was_killed_by_this_server() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({ "auto_resume": true }));
    thread::scope(|scope| {
        let clients: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut reasons = Vec::new();
                    while reasons.len() < 60 {
                        // A stop may come between the resume and the start.
                        let reply = sandbox.post("exec", &json!({ "cmd": "sleep 0.01" }));
                        let text = reply.text();
                        let exit = text.lines().find(|line| line.contains("\"exit\""));
                        if let Some(exit) = exit {
                            let exit: serde_json::Value = serde_json::from_str(exit).unwrap();
                            reasons.push(exit["reason"].as_str().unwrap().to_owned());
                        }
                    }
                    reasons
                })
            })
            .collect();
        while !clients.iter().all(thread::ScopedJoinHandle::is_finished) {
            stop(&sandbox);
        }
        for client in clients {
            for reason in client.join().unwrap() {
                assert!(["exited", "killed"].contains(&&*reason), "{reason}");
            }
        }
    });
}

#[test]
#[cfg(feature = "console")]
fn a_ticket_leads_to_its_sandbox_through_stops() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let made = sandbox.post("tickets", &json!({ "port": "8000" })).json();
    let ticket = made["path"].as_str().unwrap();
    let serve = r"
import http.server, os, socket, socketserver
class Server(socketserver.UnixStreamServer):
    def get_request(self): return super().get_request()[0], ('', 0)
path = os.environ['SBX_PROXY_DIR'] + '/8000.sock'
if os.path.exists(path): os.remove(path)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers(); self.wfile.write(b'here')
Server(path, Handler).serve_forever()
";
    for _ in 0..2 {
        sandbox.spawn(&json!({ "cmd": ["python3", "-c", serve] }));
        wait_until("the ticket leads there", PATIENCE, || {
            server.get(ticket).text() == "here"
        });
        stop(&sandbox);
        let refused = server.get(ticket);
        crate::fixture::assert_error(&refused, 409, "stopped");
        resume(&sandbox);
    }
    let id = sandbox.id.clone();
    sandbox.delete();
    assert_eq!(server.get(ticket).status, 404, "{id}");
}

/// Takes descriptors at `$1`, and keeps them.
const KEEPER: &str = r"
import os, socket, sys
listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1] + '.new'); listener.listen(1)
os.chmod(sys.argv[1] + '.new', 0o777); os.rename(sys.argv[1] + '.new', sys.argv[1])
kept = []
while True:
    giver = listener.accept()[0]
    kept += socket.recv_fds(giver, 1, 1)[1]
    giver.sendall(b'x')
";

/// Gives the file `$2` to who listens at `$1`.
const FILE_GIVER: &str = r"
import socket, sys
to = socket.socket(socket.AF_UNIX); to.connect(sys.argv[1])
file = open(sys.argv[2], 'w')
socket.send_fds(to, [b'x'], [file.fileno()])
to.recv(1)
";

/// What is in the directories in memory of an ended run stays there as long as somebody has a file of it.
#[test]
fn files_in_memory_of_ended_runs_do_not_add_up() {
    needs_root!();
    if !has_namespaces() {
        skip!("this machine has no namespaces");
    }
    let server = Server::host().start();
    let shared = TempDir::new();
    std::fs::set_permissions(shared.path(), Permissions::from_mode(0o777)).unwrap();
    let accomplice = server.sandbox_with(&json!({
        "isolation": "landlock", "read_write_paths": [shared.path()],
    }));
    for file in ["/tmp/file", "/dev/shm/file"] {
        let owner = server.sandbox_with(&json!({
            "isolation": "namespaces", "read_write_paths": [shared.path()],
        }));
        let socket = shared.join(&owner.id);
        let keeper = accomplice.spawn(&json!({ "cmd": ["python3", "-c", KEEPER, socket] }));
        wait_until("it listens", PATIENCE, || Path::new(&socket).exists());
        for run in 1..=2 {
            let cmd = json!({ "cmd": ["python3", "-c", FILE_GIVER, socket, file] });
            assert_eq!(owner.exec(&cmd).stderr, "");
            stop(&owner);
            if run == 1 {
                resume(&owner);
            }
        }
        assert_error(&owner.post("resume", &json!({})), 503, "over_limit");
        // Its files can be used meanwhile.
        assert_eq!(owner.put("files/write?path=file", b"text").status, 200);
        let route = format!("processes/{}", keeper["id"].as_str().unwrap());
        assert_eq!(accomplice.request("DELETE", &route, b"").status, 200);
        wait_until("it starts", PATIENCE, || {
            owner.post("resume", &json!({})).status == 200
        });
        assert_eq!(owner.sh("ls /tmp | grep -v sbx-test; cat file"), "text");
        for _ in 0..4 {
            stop(&owner);
            wait_until("it starts", PATIENCE, || {
                owner.post("resume", &json!({})).status == 200
            });
        }
    }
}

/// Gives sockets that are not connected to who listens at `$1`.
const SOCKET_GIVER: &str = r"
import socket, sys
to = socket.socket(socket.AF_UNIX); to.connect(sys.argv[1])
given = [socket.socket() for _ in range(8)]
socket.send_fds(to, [b'x'], [one.fileno() for one in given])
to.recv(1)
";

/// Takes sockets at `$1`. For each port in its input it asks the proxy there for what is at `$2`, by one of them and by one of
/// its own, and says what came back.
const SOCKET_TAKER: &str = r"
import os, socket, sys
listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1] + '.new'); listener.listen(1)
os.chmod(sys.argv[1] + '.new', 0o777); os.rename(sys.argv[1] + '.new', sys.argv[1])
giver = listener.accept()[0]
taken = [socket.socket(fileno=one) for one in socket.recv_fds(giver, 1, 8)[1]]
giver.sendall(b'x')
print('taken', flush=True)
for port in sys.stdin:
    for name, one in (('own', socket.socket()), ('taken', taken.pop())):
        try:
            one.settimeout(5)
            one.connect(('127.0.0.1', int(port)))
            one.sendall(f'GET http://{sys.argv[2]}/ HTTP/1.1\r\nHost: {sys.argv[2]}\r\nConnection: close\r\n\r\n'.encode())
            print(name, one.recv(4096)[:12], flush=True)
        except OSError as error: print(name, 'refused', flush=True)
    print('tried', flush=True)
";

/// The kernel remembers who has made a socket by the uid, which is another sandbox's after a deletion.
#[test]
fn sockets_that_a_deleted_sandbox_gave_away_do_not_pass_for_the_next_ones() {
    needs_root!();
    let server = with_users(2).start();
    let outside = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = outside.local_addr().unwrap().to_string();
    let shared = TempDir::new();
    std::fs::set_permissions(shared.path(), Permissions::from_mode(0o777)).unwrap();
    let socket = shared.join("taker");
    let paths =
        json!({ "isolation": "landlock", "network": "open", "read_write_paths": [shared.path()] });
    let [first, accomplice] = [(); 2].map(|()| server.sandbox_with(&paths));
    let taker = json!({ "cmd": ["python3", "-c", SOCKET_TAKER, socket, place] });
    let taker = accomplice.spawn(&taker);
    let taker = format!("processes/{}", taker["id"].as_str().unwrap());
    wait_until("it listens", PATIENCE, || Path::new(&socket).exists());
    let given = first.exec(&json!({ "cmd": ["python3", "-c", SOCKET_GIVER, socket] }));
    assert_eq!(given.stderr, "");
    let uid = first.uid;
    first.delete();
    let network = json!({ "mode": "allowlist", "allow": [place] });
    let next = server.sandbox_with(&json!({ "isolation": "landlock", "network": network }));
    assert_eq!(next.uid, uid);
    next.spawn(&json!({ "cmd": "sleep 1000" }));
    let proxy = next.sh("echo $HTTP_PROXY");
    let port = proxy
        .trim()
        .rsplit(':')
        .next()
        .unwrap()
        .trim_end_matches('/');
    let input = format!("{port}\n");
    let sent = accomplice.request("POST", &format!("{taker}/stdin"), input.as_bytes());
    assert_eq!(sent.status, 200);
    let said = || accomplice.get(&format!("{taker}/logs?follow=0")).text();
    wait_until("it has tried", PATIENCE, || said().contains("tried"));
    assert!(!said().contains("HTTP"), "{}", said());
    outside.set_nonblocking(true).unwrap();
    assert!(outside.accept().is_err(), "a connection was made");
    // Its own programs are served.
    let client = format!("curl -s -o answer http://{place}/");
    next.spawn(&json!({ "cmd": client }));
    let mut connection = None;
    wait_until("a connection is made", PATIENCE, || {
        connection = outside.accept().ok();
        connection.is_some()
    });
    let (mut connection, _) = connection.unwrap();
    let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello";
    std::io::Write::write_all(&mut connection, answer).unwrap();
    wait_until("it has the answer", PATIENCE, || {
        std::fs::read(next.home.join("answer")).is_ok_and(|text| text == b"hello")
    });
}
