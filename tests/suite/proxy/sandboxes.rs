//! Servers in sandboxes: reached by the names of their sockets, and never anything that is not the
//! sandbox's own, whatever its files are made to be.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::fixture::{PATIENCE, Sandbox, Server, Stop, exchange, has_namespaces, is_root};
use crate::skip;

pub const PYTHON: &str = "/usr/bin/python3";

/// Says who it is, or echoes after an upgrade; to a POST it never has anything to say.
const PROGRAM: &str = r#"
import os, socket, sys, threading

def serve(connection):
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return
        data += piece
    if b"upgrade: echo" in data.lower():
        connection.sendall(b"HTTP/1.1 101 Switching\r\nUpgrade: echo\r\nConnection: Upgrade\r\n\r\n")
        while piece := connection.recv(65536):
            connection.sendall(piece)
    elif data.startswith(b"POST "):
        while connection.recv(65536):
            pass
    else:
        body = b"from " + os.environ["SBX_SANDBOX_ID"].encode() + b"\n" + data
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    connection.close()

listener = socket.socket(socket.AF_UNIX)
# The address of a socket has less room than a path.
os.chdir(os.environ["SBX_PROXY_DIR"])
listener.bind(sys.argv[1] + ".sock")
listener.listen(100)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"#;

/// Skips the test where sandboxes, or programs in them, are not to be had.
macro_rules! need_sandboxes {
    () => {
        if !is_root() {
            skip!("host mode needs root");
        }
        if !Path::new(PYTHON).exists() {
            skip!("there is no {PYTHON}");
        }
    };
}

fn socket_path(sandbox: &Sandbox<'_>, name: &str) -> PathBuf {
    sandbox.home.join(".sbx/proxy").join(format!("{name}.sock"))
}

/// Starts a server on a name, and waits for it.
#[track_caller]
fn start(sandbox: &Sandbox<'_>, name: &str) {
    sandbox.spawn(&json!({ "cmd": [PYTHON, "-c", PROGRAM, name] }));
    let waited = sandbox.get(&format!("ports/{name}/wait?timeout=20"));
    assert_eq!(waited.json(), json!({ "port": name, "listening": true }));
}

/// Starts a server that says whose it is. False if there is no program for it.
pub fn serve_in(sandbox: &Sandbox<'_>, name: &str) -> bool {
    let is_there = Path::new(PYTHON).exists();
    if is_there {
        start(sandbox, name);
    }
    is_there
}

/// A server of root's, which nobody may reach; it says `not yours`.
fn listen_as_root(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        for mut connection in listener.incoming().map_while(Result::ok) {
            let _ = connection.write_all(b"HTTP/1.1 200 OK\r\n\r\nnot yours");
        }
    });
}

#[track_caller]
fn expect_unreachable(sandbox: &Sandbox<'_>, name: &str, cause: &str) {
    let begun = Instant::now();
    let reply = sandbox.get(&format!("proxy/{name}/"));
    assert_eq!(
        (reply.status, &*reply.code()),
        (502, "unreachable"),
        "{}",
        reply.text()
    );
    assert!(reply.text().contains(cause), "{}", reply.text());
    assert!(begun.elapsed() < Duration::from_secs(2));
    let waited = sandbox.get(&format!("ports/{name}/wait?timeout=0"));
    assert_eq!(waited.json()["listening"], false);
}

#[test]
fn a_server_in_a_sandbox_is_reached_by_its_name() {
    need_sandboxes!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    for name in ["app", "8000", "a.b_c-D", &"x".repeat(64)] {
        start(&sandbox, name);
        let reply = sandbox.get(&format!("proxy/{name}/a%2Fb//?x"));
        assert_eq!(reply.status, 200);
        let text = reply.text();
        assert!(text.starts_with(&format!("from {}\nGET /a%2Fb//?x HTTP/1.1\r\n", sandbox.id)));
        assert!(text.contains("\r\nHost: localhost\r\n"), "{text}");
        let prefix = format!(
            "\r\nX-Forwarded-Prefix: {}\r\n",
            sandbox.target(&format!("proxy/{name}"))
        );
        assert!(text.contains(&prefix), "{text}");
        assert!(!text.contains(&sandbox.token), "{text}");
    }
    let listed = sandbox.get("ports").json();
    let names: Vec<_> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| &entry["port"])
        .collect();
    assert_eq!(names, ["8000", "a.b_c-D", "app", &"x".repeat(64)]);
    assert_eq!(listed[2]["address"], ".sbx/proxy/app.sock");
    // The machine's own ports are not there.
    for path in ["/v1/proxy/8000/", "/v1/ports", "/v1/ports/80/wait"] {
        let reply = server.get(path);
        assert_eq!((reply.status, &*reply.code()), (404, "not_found"), "{path}");
    }
}

#[test]
fn sandboxes_have_names_of_their_own() {
    need_sandboxes!();
    let server = Server::host().start();
    let (one, other) = (server.sandbox(), server.sandbox());
    start(&one, "app");
    start(&other, "app");
    for sandbox in [&one, &other] {
        let text = sandbox.get("proxy/app/").text();
        assert!(
            text.starts_with(&format!("from {}\n", sandbox.id)),
            "{text}"
        );
    }
    // Both on one connection, each by its own token; one's does not open the other's.
    let mut connection = one.connect();
    let reply = connection.request("GET", &one.target("proxy/app/"), &[], b"");
    assert_eq!(reply.status, 200);
    for target in ["proxy/app/", "ports", "ports/app/wait"] {
        let reply = connection.request("GET", &other.target(target), &[], b"");
        assert_eq!((reply.status, &*reply.code()), (403, "forbidden"));
    }
    connection.token = Some(other.token.clone());
    let reply = connection.request("GET", &other.target("proxy/app/"), &[], b"");
    assert!(reply.text().starts_with(&format!("from {}\n", other.id)));
}

#[test]
fn what_is_not_the_sandboxs_own_socket_is_not_reached() {
    need_sandboxes!();
    let server = Server::host().start();
    let (sandbox, neighbour) = (server.sandbox(), server.sandbox());
    start(&neighbour, "app");
    let path = |name| socket_path(&sandbox, name);
    expect_unreachable(&sandbox, "missing", "there is no such socket");
    // Links, by the sandbox itself.
    let theirs = socket_path(&neighbour, "app");
    let link = |target: &Path, name: &str| {
        sandbox.sh(&format!(
            "ln -s {} $SBX_PROXY_DIR/{name}.sock",
            target.display()
        ));
    };
    link(&theirs, "neighbour");
    expect_unreachable(&sandbox, "neighbour", "links are not followed");
    let rooted = server
        .place
        .as_ref()
        .unwrap()
        .homes()
        .parent()
        .unwrap()
        .join("root.sock");
    listen_as_root(&rooted);
    link(&rooted, "root");
    expect_unreachable(&sandbox, "root", "links are not followed");
    sandbox.sh("ln -s own.sock $SBX_PROXY_DIR/inside.sock");
    expect_unreachable(&sandbox, "inside", "links are not followed");
    // Sockets of others, as if they could be put there.
    listen_as_root(&path("owned"));
    expect_unreachable(&sandbox, "owned", "it belongs to uid 0");
    listen_as_root(&path("given"));
    chown(path("given"), Some(sandbox.uid), Some(sandbox.uid)).unwrap();
    let reply = sandbox.get("proxy/given/");
    assert_eq!(reply.status, 502);
    assert!(
        reply.text().contains("uid 0 listens on it"),
        "{}",
        reply.text()
    );
    // Things that are no sockets, and one that nobody listens on.
    sandbox.sh("touch $SBX_PROXY_DIR/file.sock; mkdir $SBX_PROXY_DIR/dir.sock; mkfifo $SBX_PROXY_DIR/pipe.sock");
    for name in ["file", "dir", "pipe"] {
        expect_unreachable(&sandbox, name, "it is not a socket");
    }
    drop(UnixListener::bind(path("stale")).unwrap());
    chown(path("stale"), Some(sandbox.uid), Some(sandbox.uid)).unwrap();
    expect_unreachable(&sandbox, "stale", "nothing listens on it");
    // Only what is its own is listed.
    let listed = sandbox.get("ports").json();
    let names: Vec<_> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| &entry["port"])
        .collect();
    assert_eq!(names, ["given", "stale"]);
    // A directory that leads elsewhere.
    for part in [".sbx/proxy", ".sbx"] {
        let theirs = neighbour.home.join(part);
        sandbox.sh(&format!(
            "mv ~/{part} ~/{part}.old; ln -s {} ~/{part}",
            theirs.display()
        ));
        expect_unreachable(&sandbox, "app", "");
        assert_ne!(sandbox.get("ports").status, 200);
        sandbox.sh(&format!("rm ~/{part}; mv ~/{part}.old ~/{part}"));
    }
    sandbox.sh("rm -r ~/.sbx");
    expect_unreachable(&sandbox, "app", "there is no such socket");
    assert_eq!(sandbox.get("ports").json(), json!([]));
}

#[test]
fn names_that_are_none_are_refused() {
    need_sandboxes!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let long = "x".repeat(65);
    for name in [
        ".", "..", "", "a%2Fb", "a%00", "%2e%2e", "a+b", "a~", "\u{e4}", &long,
    ] {
        let reply = sandbox.get(&format!("proxy/{name}/"));
        assert_eq!(
            (reply.status, &*reply.code()),
            (400, "bad_request"),
            "{name}"
        );
    }
}

/// The name is swapped all the time for root's socket, or for a link to the neighbour's: what answers
/// is the sandbox's own server or nobody.
#[test]
fn a_name_that_is_swapped_never_leads_to_somebody_else() {
    need_sandboxes!();
    let server = Server::host().start();
    let (sandbox, neighbour) = (server.sandbox(), server.sandbox());
    start(&sandbox, "app");
    start(&neighbour, "app");
    for kind in ["root", "neighbour"] {
        let other = socket_path(&sandbox, "other");
        if kind == "root" {
            listen_as_root(&other);
        } else {
            symlink(socket_path(&neighbour, "app"), &other).unwrap();
        }
        let name = |path: &Path| std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        let (left, right) = (name(&socket_path(&sandbox, "app")), name(&other));
        let stop = Stop::default();
        thread::scope(|scope| {
            let _guard = stop.guard();
            scope.spawn(|| {
                while !stop.is_set() {
                    exchange(&left, &right);
                }
            });
            let mut connection = sandbox.connect();
            let target = sandbox.target("proxy/app/");
            let (mut own_answers, mut refused) = (0, 0);
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_secs(2) || own_answers == 0 || refused == 0 {
                assert!(
                    begun.elapsed() < PATIENCE,
                    "{own_answers} own, {refused} refused"
                );
                let reply = connection.request("GET", &target, &[], b"");
                match reply.status {
                    200 => {
                        let own = format!("from {}\n", sandbox.id);
                        assert!(reply.text().starts_with(&own), "{}", reply.text());
                        own_answers += 1;
                    }
                    502 => refused += 1,
                    status => panic!("{status}: {}", reply.text()),
                }
            }
        });
        // As it was, for the next round.
        if fs::symlink_metadata(&other)
            .unwrap()
            .file_type()
            .is_symlink()
            != (kind == "neighbour")
            || sandbox.get("proxy/app/").status != 200
        {
            exchange(&left, &right);
        }
        fs::remove_file(&other).unwrap();
    }
}

#[test]
fn deleting_a_sandbox_ends_what_is_open_to_it() {
    need_sandboxes!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    start(&sandbox, "app");
    let mut tunnel = sandbox.connect();
    let headers = [("Connection", "Upgrade"), ("Upgrade", "echo")];
    tunnel.send_request("GET", &sandbox.target("proxy/app/"), &headers, b"");
    assert_eq!(tunnel.read_head().status, 101);
    tunnel.send(b"hello");
    assert_eq!(tunnel.read_exactly(5), b"hello");
    // A request that has not come to its end, and somebody who waits for ever.
    let mut upload = sandbox.connect();
    let headers = [("Content-Length", "1000")];
    upload.send_request("POST", &sandbox.target("proxy/app/"), &headers, b"x");
    let mut waiting = sandbox.connect();
    waiting.send_request("GET", &sandbox.target("ports/never/wait"), &[], b"");
    waiting.read_head();
    let begun = Instant::now();
    sandbox.delete();
    let mut rest = Vec::new();
    let _ = tunnel.stream.read_to_end(&mut rest);
    assert!(rest.is_empty());
    let told: Value = serde_json::from_slice(&waiting.read_chunk().unwrap()).unwrap();
    assert_eq!(told["listening"], false);
    // Or the sandbox was gone before the request was passed on.
    let reply = upload.read_reply();
    assert!([502, 404].contains(&reply.status), "{}", reply.text());
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
}

/// A sandbox can have any number of servers, and each takes memory of the server while they are listed.
#[test]
fn a_list_of_ports_has_an_end() {
    const LISTEN: &str = r"
import socket, time
all = [socket.create_server(('127.0.0.1', 0)) for _ in range(900)]
print('ready', flush=True)
time.sleep(1000)
";
    need_sandboxes!();
    if !has_namespaces() {
        skip!("this machine has no namespaces");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({ "isolation": "namespaces", "network": "blocked" }));
    let _streams = [(); 2].map(|()| {
        let mut stream = sandbox.exec_stream(&json!({ "cmd": ["python3", "-c", LISTEN] }));
        assert!(stream.any(|event| event["data"] == "ready\n"));
        stream
    });
    let listed = sandbox.get("ports").json();
    assert_eq!(listed.as_array().unwrap().len(), 1000);
}
