//! The end of a sandbox ends what the server holds for it, even where another sandbox holds the other end.
//!
//! Sandboxes pass descriptors over a path that they share, and in `landlock` they open each other's terminals if the
//! owner lets them.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use super::needs_root;
use super::starting::with_mounts;
use crate::fixture::{Held, PATIENCE, Sandbox, Server, TempDir, WebSocket, kinds, wait_until};

/// Keeps every descriptor that it is sent at `$1`, and if there is a `$2` every terminal of others that it may open. Says
/// in `held` how many these are. When there is a file `try`, it tries them and says in `tried` what comes of that.
const HOLDER: &str = r"
import array, errno, glob, os, socket, sys, time
listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o777)
listener.listen(1000); listener.setblocking(False)
held, seen = [], set()
def note(file, text):
    open('.new', 'w').write(text); os.rename('.new', file)
def attempt(descriptor):
    os.set_blocking(descriptor, False)
    try:
        if os.isatty(descriptor): return 'alive'
        os.write(descriptor, b'x' * 4096)
        return 'alive'
    except OSError as error: return errno.errorcode[error.errno]
note('held', '0')
while True:
    try:
        sender = listener.accept()[0]; sender.setblocking(True)
        rights = sender.recvmsg(1, 4096)[1]
        numbers = array.array('i'); numbers.frombytes(rights[0][2]); held += numbers
    except BlockingIOError: time.sleep(0.01)
    for path in glob.glob('/dev/pts/[0-9]*') if sys.argv[2:] else []:
        if path in seen or os.stat(path).st_uid == os.getuid(): continue
        try: held.append(os.open(path, os.O_RDWR | os.O_NOCTTY)); seen.add(path)
        except OSError: pass
    note('held', str(len(held)))
    if os.path.exists('try'):
        os.remove('try'); note('tried', ' '.join(sorted({attempt(one) for one in held})))
";

/// Sends the descriptors of its own that its other arguments name.
const GIVER: &str = r"
import array, socket, sys
rights = array.array('i', [int(number) for number in sys.argv[2:]])
to = socket.socket(socket.AF_UNIX); to.connect(sys.argv[1])
to.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
";

/// A directory that sandboxes share.
struct Shared(TempDir);

impl Shared {
    fn new() -> Self {
        let directory = TempDir::new();
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
        std::fs::write(directory.join("give.py"), GIVER).unwrap();
        Self(directory)
    }

    /// A shell command that gives descriptors to the holder.
    fn give(&self, numbers: &str) -> String {
        let directory = self.0.path().display();
        format!("python3 {directory}/give.py {directory}/holder {numbers}")
    }

    fn sandbox<'s>(&self, server: &'s Server, more: &Value) -> Sandbox<'s> {
        let mut body = more.clone();
        body["read_write_paths"] = json!([self.0.path()]);
        server.sandbox_with(&body)
    }
}

/// Another sandbox, which holds what it is given.
struct Holder<'s>(Sandbox<'s>);

impl<'s> Holder<'s> {
    fn new(server: &'s Server, shared: &Shared, opens_terminals: bool) -> Self {
        let sandbox = shared.sandbox(server, &json!({ "isolation": "landlock" }));
        let path = shared.0.join("holder");
        let mut words = vec!["python3", "-c", HOLDER, &path];
        words.extend(opens_terminals.then_some("terminals"));
        sandbox.spawn(&json!({ "cmd": words }));
        let holder = Self(sandbox);
        holder.await_count(0);
        holder
    }

    fn file(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.0.home.join(name)).ok()
    }

    #[track_caller]
    fn await_count(&self, count: usize) {
        let has = |text: String| text.parse::<usize>().is_ok_and(|held| held >= count);
        wait_until("all is held", PATIENCE, || {
            self.file("held").is_some_and(has)
        });
    }

    /// What comes of using the descriptors.
    fn try_all(&self) -> String {
        std::fs::write(self.0.home.join("try"), "").unwrap();
        let mut said = None;
        wait_until("it has tried", PATIENCE, || {
            said = self.file("tried");
            said.is_some()
        });
        said.unwrap()
    }
}

fn has_python() -> bool {
    let python = std::process::Command::new("python3").arg("-V").output();
    python.is_ok_and(|output| output.status.success())
}

macro_rules! needs_python {
    () => {
        if !has_python() {
            crate::skip!("needs python3");
        }
    };
}

/// A server with terminals that no other server's sandboxes see: here are some that everyone may open.
fn with_own_terminals() -> Option<Server> {
    let mount = "mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts /dev/pts";
    with_mounts(Server::host(), mount).map(crate::fixture::Builder::start)
}

/// Landlock restricts no chmod, so what a sandbox does with its own terminals is its own affair.
#[test]
fn a_terminal_is_closed_to_others_unless_its_own_sandbox_opens_it() {
    needs_root!();
    let Some(server) = with_own_terminals() else {
        crate::skip!("needs a mount namespace");
    };
    let other = server.sandbox();
    for kind in kinds(&server) {
        let sandbox = server.sandbox_with(&kind);
        for mode in ["0600", "0666"] {
            let cmd = format!("chmod {mode} $(tty); touch {mode}; exec sleep 1000");
            sandbox.spawn(&json!({ "cmd": cmd, "pty": true }));
            wait_until("it has its mode", PATIENCE, || {
                sandbox.home.join(mode).exists()
            });
            let open = "for node in /dev/pts/[0-9]*; do (: < $node) 2> /dev/null && echo opened; done; true";
            let opened = other.sh(open);
            let expected = match (mode, kind["isolation"].as_str()) {
                ("0666", Some("landlock")) => "opened\n",
                _ => "",
            };
            assert_eq!(opened, expected, "{kind} {mode}");
        }
        sandbox.delete();
    }
}

#[test]
fn what_another_sandbox_holds_of_a_deleted_one_is_hung_up() {
    needs_root!();
    needs_python!();
    let Some(server) = with_own_terminals() else {
        crate::skip!("needs a mount namespace");
    };
    for kind in kinds(&server) {
        let shared = Shared::new();
        let holder = Holder::new(&server, &shared, true);
        let quiet = Held::after_one(&server, &kind);
        let sandbox = shared.sandbox(&server, &kind);
        let mut count = 0;
        let mut spawn = |cmd: String, more: &[(&str, Value)], held| {
            let mut body = json!({ "cmd": cmd });
            for (name, value) in more {
                body[*name] = value.clone();
            }
            count += held;
            sandbox.spawn(&body)["id"].as_str().unwrap().to_owned()
        };
        let lives = |numbers| format!("{}; exec sleep 1000", shared.give(numbers));
        let pty = [("pty", json!(true))];
        for _ in 0..4 {
            spawn(lives("1 2"), &[], 2);
            spawn(lives("0 1"), &[], 2);
            spawn(lives("1"), &pty, 1);
            // Over when its sandbox ends: only the holder keeps its outputs open.
            let ended = spawn(shared.give("1 2"), &[], 2);
            let reply = sandbox.get(&format!("processes/{ended}/wait?timeout=20"));
            assert_eq!(reply.json()["running"], false, "{}", reply.text());
        }
        let watched = spawn(format!("echo on; {}", lives("1")), &pty, 1);
        if kind["isolation"] == "landlock" {
            for _ in 0..4 {
                spawn("chmod 0666 $(tty); exec sleep 1000".to_owned(), &pty, 1);
            }
        }
        // Without WebSockets the terminal has no viewer.
        let mut viewer = cfg!(feature = "attach").then(|| {
            let target = sandbox.target(&format!("processes/{watched}/attach"));
            WebSocket::open(sandbox.connect(), &target)
        });
        if let Some(viewer) = &mut viewer {
            viewer.read_until("on");
        }
        let mut streams = vec![
            sandbox.exec_stream(&json!({ "cmd": lives("1 2") })),
            sandbox.connect().stream(
                "GET",
                &sandbox.target(&format!("processes/{watched}/logs?follow=true")),
                b"",
            ),
        ];
        count += 2;
        let languages: &[&str] = if cfg!(feature = "interpreter") {
            &["python", "bash"]
        } else {
            &[]
        };
        for &language in languages {
            let made = sandbox.post("contexts", &json!({ "language": language, "id": language }));
            assert_eq!(made.status, 200, "{}", made.text());
            let give = shared.give("1 2 4").replace("python3 ", "");
            let code = if language == "bash" {
                // The bridge's socket stays with the bridge.
                shared.give("1 2")
            } else {
                format!("import sys; sys.argv = '{give}'.split(); exec(open(sys.argv[0]).read())")
            };
            let body = json!({ "code": code, "timeout": 20 });
            let ran = sandbox.post(&format!("contexts/{language}/execute"), &body);
            assert!(ran.text().contains("completed"), "{}", ran.text());
            count += if language == "bash" { 2 } else { 3 };
        }
        holder.await_count(count);
        sandbox.delete();
        quiet.await_of(&server);
        for stream in &mut streams {
            let last = stream.last().unwrap();
            assert_eq!(
                (&last["event"], &last["reason"]),
                (&json!("exit"), &json!("deleted"))
            );
        }
        if let Some(mut viewer) = viewer {
            assert_eq!(viewer.read_to_end().2.0, 1001);
        }
        let said = holder.try_all();
        assert!(!said.contains("alive") && said.contains("EPIPE"), "{said}");
        // Nobody pays for it any more.
        assert_eq!(
            server
                .sandbox()
                .exec(&json!({ "cmd": "echo on", "pty": true }))
                .code(),
            Some(0)
        );
        holder.0.delete();
    }
}

/// While its sandbox lives, a command that has ended keeps its place for as long as its output is open: in the share of
/// its own sandbox.
#[test]
fn outputs_that_others_hold_count_in_the_share_of_their_own_sandbox_until_it_ends() {
    needs_root!();
    needs_python!();
    // Of these, commands may have 64.
    let server = Server::host()
        .wrapped_in(&["prlimit", "--nofile=512:512"])
        .start();
    let shared = Shared::new();
    let holder = Holder::new(&server, &shared, false);
    let victim = server.sandbox();
    let mut held = 0;
    let mut refused_after = Vec::new();
    for _ in 0..3 {
        let sandbox = shared.sandbox(&server, &json!({}));
        let mut begun = 0;
        loop {
            let reply = sandbox.post("processes", &json!({ "cmd": shared.give("1") }));
            if reply.status != 200 {
                assert_eq!(
                    (reply.status, &reply.json()["code"]),
                    (503, &json!("over_limit"))
                );
                break;
            }
            begun += 1;
            held += 1;
            let id = reply.json()["id"].as_str().unwrap().to_owned();
            let reply = sandbox.get(&format!("processes/{id}/wait?timeout=20"));
            assert_eq!(reply.json()["running"], false, "{}", reply.text());
            holder.await_count(held);
            assert!(begun < 64);
        }
        refused_after.push(begun);
        for terminal in [false, true] {
            let outcome = victim.exec(&json!({ "cmd": "echo on", "pty": terminal }));
            assert_eq!(outcome.stdout.trim(), "on");
        }
        let before = Held::by(&server);
        sandbox.delete();
        wait_until("its places are free", PATIENCE, || {
            Held::by(&server).is_less_by(&before, begun)
        });
    }
    assert!(refused_after[0] >= 16, "{refused_after:?}");
    assert_eq!(refused_after, [refused_after[0]; 3]);
}

/// Sockets of a filtered network lead nowhere when their sandbox has ended, however busy another keeps them.
#[test]
fn sockets_of_a_deleted_sandbox_that_another_holds_lead_nowhere() {
    needs_root!();
    needs_python!();
    let server = Server::host().start();
    for kind in kinds(&server) {
        let shared = Shared::new();
        let mut body = kind.clone();
        body["network"] =
            json!({ "mode": "allowlist", "allow": ["example.com"], "transparent": true });
        if server.post("/v1/sandboxes", &body).status != 200 {
            eprintln!("not here: {body}");
            continue;
        }
        let path = shared.0.join("sockets");
        let keeper = shared.sandbox(&server, &json!({ "isolation": "landlock" }));
        let keep = format!(
            "{RECEIVE}
import time
port, sockets = receive({path:?}, 9)
open('holds', 'w')
lone, lookers = sockets[0], sockets[1:]
while lookers:
    for looker in list(lookers):
        try: looker.send(b'no question')
        except OSError: lookers.remove(looker)
    time.sleep(0.1)
open('hung-up', 'w')
try: lone.connect(('127.0.0.1', port)); said = 'connected'
except OSError as error: said = errno.errorcode[error.errno]
open('said', 'w').write(said)
time.sleep(1000)"
        );
        keeper.spawn(&json!({ "cmd": ["python3", "-c", keep] }));
        wait_until("it listens", PATIENCE, || Path::new(&path).exists());
        let quiet = Held::after_one(&server, &body);
        let sandbox = shared.sandbox(&server, &body);
        // What looks names up is a socket of the server's in `landlock` only.
        let looker = if kind["isolation"] == "landlock" {
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"
        } else {
            "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)[0]"
        };
        let give = format!(
            "{SEND}
sockets = [socket.socket()] + [{looker} for _ in range(8)]
port = int(os.environ['HTTPS_PROXY'].rsplit(':', 1)[1].strip('/'))
send({path:?}, port, sockets)
import time; time.sleep(1000)"
        );
        sandbox.spawn(&json!({ "cmd": ["python3", "-c", give] }));
        wait_until("it holds them", PATIENCE, || {
            keeper.home.join("holds").exists()
        });
        sandbox.delete();
        quiet.await_of(&server);
        let said = keeper.home.join("said");
        let read = || std::fs::read_to_string(&said).unwrap_or_default();
        wait_until("it has tried", PATIENCE, || !read().is_empty());
        assert_ne!(read(), "connected");
        keeper.delete();
    }
}

/// A server inside that has given its connections away before it ends, whatever part of the answer it has sent.
#[test]
fn requests_whose_connection_another_sandbox_holds_end_with_theirs() {
    needs_root!();
    needs_python!();
    let server = Server::host().start();
    for kind in kinds(&server) {
        let shared = Shared::new();
        let path = shared.0.join("sockets");
        let keeper = shared.sandbox(&server, &json!({ "isolation": "landlock" }));
        let keep = format!(
            "{RECEIVE}
import time
port, sockets = receive({path:?}, 4)
open('holds', 'w')
time.sleep(1000)"
        );
        keeper.spawn(&json!({ "cmd": ["python3", "-c", keep] }));
        wait_until("it listens", PATIENCE, || Path::new(&path).exists());
        let quiet = Held::after_one(&server, &kind);
        let sandbox = shared.sandbox(&server, &kind);
        let give = format!(
            "{SEND}
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.environ['SBX_PROXY_DIR'] + '/evil.sock'); listener.listen(9)
sockets = []
for part in [b'', b'HTTP/1.1 200', b'HTTP/1.1 200 OK\\r\\nContent-Length: 9\\r\\n\\r\\nx', \
        b'HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n1\\r\\nx']:
    one = listener.accept()[0]; one.recv(65536); one.sendall(part); sockets.append(one)
send({path:?}, 0, sockets)
import time; time.sleep(1000)"
        );
        sandbox.spawn(&json!({ "cmd": ["python3", "-c", give] }));
        assert_eq!(sandbox.get("ports/evil/wait?timeout=20").status, 200);
        let clients: Vec<_> = (0..4)
            .map(|_| {
                let mut client = sandbox.connect();
                client.send_request("GET", &sandbox.target("proxy/evil/"), &[], b"");
                client
            })
            .collect();
        wait_until("it holds them", PATIENCE, || {
            keeper.home.join("holds").exists()
        });
        sandbox.delete();
        quiet.await_of(&server);
        drop(clients);
        keeper.delete();
    }
}

/// Defines `receive`, which waits at a path for a port and sockets.
const RECEIVE: &str = "
import array, errno, os, socket
def receive(path, count):
    listener = socket.socket(socket.AF_UNIX); listener.bind(path); os.chmod(path, 0o777); listener.listen(1)
    data, rights, _, _ = listener.accept()[0].recvmsg(16, 4096)
    numbers = array.array('i'); numbers.frombytes(rights[0][2])
    assert len(numbers) == count
    return int(data), [socket.socket(fileno=number) for number in numbers]
";

/// Defines `send`, its other end.
const SEND: &str = "
import array, os, socket
def send(path, port, sockets):
    to = socket.socket(socket.AF_UNIX); to.connect(path)
    rights = array.array('i', [one.fileno() for one in sockets])
    to.sendmsg([str(port).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
";
