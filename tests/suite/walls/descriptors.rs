//! Descriptors that a sandbox sends to the server beside data. Whoever reads or closes the socket closes them, and closing a
//! connection can take as long as its owner likes (socket(7), `SO_LINGER`).

use std::io::{Read, Write};

use serde_json::json;

use super::probe::{SO_PASSRIGHTS, hide_option, refuses_descriptors};
use crate::fixture::{Held, PATIENCE, Sandbox, Server, is_root, kinds, wait_until};
use crate::skip;

/// Defines `stuck`, which returns a connection whose close waits until its program's patience ends, and `give`, which sends a
/// copy of it beside a byte. A process that exits does not wait, so whoever gets it last does.
pub const STUCK: &str = "
import array, os, socket, struct, sys, time
IP_MINTTL, TCP_USER_TIMEOUT = 21, 18
def stuck():
    listener = socket.socket(); listener.listen(1)
    near = socket.socket(); near.connect(('127.0.0.1', listener.getsockname()[1]))
    far = listener.accept()[0]
    near.setsockopt(socket.IPPROTO_IP, IP_MINTTL, 255)
    near.setsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT, 2**31 - 1)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 600))
    near.send(b'x')
    return near, far
def give(to, descriptor, data=b'x'):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [descriptor.fileno()]))]
    try: to.sendmsg([data], rights)
    except OSError as error: to.send(data); return error.strerror
    return 'sent'
";

/// A server that sends a descriptor with each of its answers, in the way that the path names, from a process of its own.
const SERVER: &str = "
os.chdir(os.environ['SBX_PROXY_DIR'])
listener = socket.socket(socket.AF_UNIX); listener.bind('evil.sock'); listener.listen(64)
OK = b'HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n'
while True:
    client = listener.accept()[0]
    if os.fork() == 0:
        way = client.recv(65536).split()[1]
        near, far = stuck()
        if way == b'/late': client.sendall(OK % 2 + b'o'); said = give(client, near, b'k')
        if way == b'/interim': said = give(client, near, b'HTTP/1.1 103 Early Hints\\r\\n\\r\\n')
        if way == b'/garbage': said = give(client, near, b'garbage')
        if way == b'/behind': said = give(client, near, OK % 0 + b'more')
        if way == b'/unread': client.sendall(OK % 10**7); client.send(bytes(10**4)); said = give(client, near, bytes(10**4))
        open('said', 'w').write(said)
        os._exit(0)
    client.close()
";

/// Has an attack made in each kind of sandbox, and expects that nothing of it stays when the sandbox is deleted: on a kernel
/// that refuses descriptors, if this is one, and on one that does not. An argument tells the attack which.
fn nothing_stays_of(attack: impl Fn(&Sandbox<'_>, bool)) {
    let on = |server: &Server, refuses| {
        for kind in kinds(server) {
            let quiet = Held::after_one(server, &kind);
            let sandbox = server.sandbox_with(&kind);
            attack(&sandbox, refuses);
            sandbox.delete();
            quiet.await_of(server);
        }
    };
    if refuses_descriptors() {
        on(&Server::host().start(), true);
    }
    let builder = Server::host();
    let mut command = builder.command();
    hide_option(&mut command, libc::SOL_SOCKET, SO_PASSRIGHTS);
    on(&builder.start_as(command), false);
}

/// Has a server inside send a descriptor in each way, to clients that take the answer and to one that does not.
fn send_with_answers(sandbox: &Sandbox<'_>, refuses: bool) {
    let script = format!("{STUCK}{SERVER}");
    sandbox.spawn(&json!({ "cmd": ["python3", "-c", script] }));
    sandbox.get("ports/evil/wait?timeout=20");
    let said = sandbox.home.join(".sbx/proxy/said");
    for (way, statuses) in [
        ("late", &[200][..]),
        ("interim", &[502]),
        ("garbage", &[502]),
        ("behind", &[200]),
    ] {
        for _ in 0..3 {
            let _ = std::fs::remove_file(&said);
            let reply = sandbox.get(&format!("proxy/evil/{way}"));
            assert!(statuses.contains(&reply.status), "{way}: {}", reply.text());
            expect_said(&said, refuses);
        }
    }
    let _ = std::fs::remove_file(&said);
    let (server, id, token) = (sandbox.server, &sandbox.id, &sandbox.token);
    let mut client = std::net::TcpStream::connect(server.address).unwrap();
    let request = format!(
        "GET /v1/sandboxes/{id}/proxy/evil/unread HTTP/1.1\r\nHost: x\r\nX-Sandbox-Token: {token}\r\n\r\n"
    );
    client.write_all(request.as_bytes()).unwrap();
    client.read_exact(&mut [0; 12]).unwrap();
    expect_said(&said, refuses);
}

/// Waits for what a sender was told.
#[track_caller]
fn expect_said(file: &std::path::Path, refuses: bool) {
    let read = || std::fs::read_to_string(file).unwrap_or_default();
    wait_until("the descriptor is sent", PATIENCE, || !read().is_empty());
    let expected = if refuses {
        "Operation not permitted"
    } else {
        "sent"
    };
    assert_eq!(read(), expected);
}

#[test]
fn descriptors_that_come_with_answers_pin_no_thread() {
    if !is_root() {
        skip!("needs root");
    }
    nothing_stays_of(send_with_answers);
}

#[test]
fn descriptors_that_come_from_code_pin_no_thread() {
    if !is_root() {
        skip!("needs root");
    }
    nothing_stays_of(|sandbox, refuses| {
        let context = json!({ "language": "python", "id": "evil" });
        let made = sandbox.post("contexts", &context);
        if made.status != 200 && made.status != 201 {
            skip!("there is no python");
        }
        // Much of a message that is never whole: what comes behind it waits while the code closes its own copies.
        let code = format!(
            "{STUCK}
bridge = socket.socket(fileno=os.dup(4))
pairs = [stuck() for _ in range(40)]
bridge.setblocking(False)
bridge.send(struct.pack('<I', 60 << 20) + bytes(140000))
bridge.setblocking(True)
said = set()
for near, far in pairs:
    said.add(give(bridge, near))
    near.close()
open('said', 'w').write(' '.join(said))
os._exit(0)"
        );
        let ran = sandbox.post(
            "contexts/evil/execute",
            &json!({ "code": code, "timeout": 20 }),
        );
        assert!(ran.text().contains("died"), "{}", ran.text());
        expect_said(&sandbox.home.join("said"), refuses);
    });
}

/// A description that is shared has flags, an owner, a signal and locks that are shared too (fcntl(2)).
#[test]
fn no_open_file_is_shared_with_another_command() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let look = "import fcntl
for one in 0, 1, 2:
    print([fcntl.fcntl(one, name) for name in (fcntl.F_GETFL, fcntl.F_GETOWN, fcntl.F_GETSIG)])";
    let change = "import fcntl, os
for one in 0, 1, 2:
    fcntl.fcntl(one, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK)
    fcntl.fcntl(one, fcntl.F_SETSIG, 40)
    fcntl.fcntl(one, fcntl.F_SETOWN, os.getpid())
    fcntl.flock(one, fcntl.LOCK_EX)
print('changed')";
    for kind in kinds(&server) {
        let (one, other) = (server.sandbox_with(&kind), server.sandbox_with(&kind));
        for body in [
            json!({}),
            json!({ "stdin": "" }),
            json!({ "stdin": "text" }),
            json!({ "pty": true }),
        ] {
            let command = |code: &str| {
                let mut body = body.clone();
                body["cmd"] = json!(["python3", "-c", code]);
                body
            };
            let before = other.exec(&command(look)).stdout;
            assert_eq!(before.lines().count(), 3, "{before}");
            // What the server has open as well stays changed.
            let changed = one.exec(&command(change)).stdout;
            assert!(changed.contains("changed"), "{body}: {changed}");
            for sandbox in [&one, &other] {
                let after = sandbox.exec(&command(&format!(
                    "{look}\nfcntl.flock(0, fcntl.LOCK_EX | fcntl.LOCK_NB)"
                )));
                assert_eq!(after.stdout, before, "{body}");
            }
        }
    }
}

/// A connection that lingers is waited for by whoever closes it last; the kernel's own threads too, which close what
/// processes have sent to themselves. One with a timeout of its own stays in the kernel after the sandbox.
#[test]
fn no_socket_of_a_sandbox_lingers() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    for kind in kinds(&server) {
        for network in ["open", "allowlist"] {
            let network = match network {
                "allowlist" => json!({ "mode": network, "allow": [], "transparent": true }),
                _ => json!(network),
            };
            let mut body = kind.clone();
            body["network"] = network;
            let reply = server.post("/v1/sandboxes", &body);
            if reply.status != 200 {
                // The machine has no such network: `choices` tests that.
                continue;
            }
            let sandbox = Sandbox::of(&server, &reply.json()["sandboxes"][0]);
            let code = "import socket, struct
one = socket.socket()
for on, seconds in [(1, 600), (1, 0), (0, 0)]:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', on, seconds))
    print(struct.unpack('ii', one.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))[0])
one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2**31 - 1)
print(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
print(one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
print(one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))";
            let outcome = sandbox.exec(&json!({ "cmd": ["python3", "-c", code] }));
            assert_eq!(outcome.stdout, "0\n0\n0\n0\nNone 1\nNone 1\n", "{body}");
            sandbox.delete();
        }
    }
}
