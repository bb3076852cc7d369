//! The promise of everything that is not a plain file: it is read and written where it is, or
//! refused, and it never holds a worker.

use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::thread;
use std::time::Duration;

use nix::sys::stat::{Mode, SFlag};
use serde_json::json;

use super::{MIB, expect_error, expect_refusal, list, mkfifo, read, stat, target, write};
use crate::fixture::{
    PATIENCE, Reply, Server, TempDir, expect_same, find, is_root, names_in, random_bytes,
    status_of, wait_until,
};
use crate::skip;

#[test]
fn pipes_and_sockets_hold_nobody() {
    let server = Server::start();
    let dir = TempDir::new();
    let (idle, held, socket) = (dir.join("idle"), dir.join("held"), dir.join("socket"));
    mkfifo(&idle);
    mkfifo(&held);
    // Opened for both, it has a writer who says nothing and a reader who reads nothing.
    let _holder = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&held)
        .unwrap();
    let _socket = UnixListener::bind(&socket).unwrap();
    symlink("idle", dir.join("link")).unwrap();
    let quiet = status_of(server.pid(), "Threads");

    // All at once, before any answer is read.
    let mut asked = Vec::new();
    for _ in 0..60 {
        for path in [&idle, &held, &socket, &dir.join("link")] {
            for rest in ["", "&offset=0&length=10"] {
                let mut connection = server.connect();
                connection.send_request("GET", &target("read", path, rest), &[], b"");
                asked.push((path.clone(), connection));
            }
        }
        let mut connection = server.connect();
        connection.send_request(
            "PUT",
            &target("write", &idle, ""),
            &[],
            b"nobody reads this",
        );
        asked.push((format!("write {idle}"), connection));
        let mut connection = server.connect();
        connection.send_request("PUT", &target("write", &socket, ""), &[], b"nor this");
        asked.push((format!("write {socket}"), connection));
    }
    assert_eq!(server.get("/health").status, 200);
    for (what, mut connection) in asked {
        let reply = connection.read_reply();
        if what.starts_with("write") {
            expect_refusal(&reply);
        } else {
            assert_eq!(
                (reply.status, reply.code().as_str()),
                (409, "not_regular"),
                "{what}"
            );
        }
    }
    // A pipe that takes nothing holds an upload only as long as there is a client.
    let mut uploads = Vec::new();
    for _ in 0..20 {
        let mut connection = server.connect();
        connection.send_request(
            "PUT",
            &target("write", &held, ""),
            &[("Content-Length", "1000000")],
            &vec![0; 200_000],
        );
        uploads.push(connection);
    }
    write(&server, dir.join("file"), "", b"in between");
    drop(uploads);
    wait_until("every worker is free again", PATIENCE, || {
        status_of(server.pid(), "Threads") <= quiet + 4
    });
    for entry in list(&server, dir.join(""), "") {
        assert!(
            ["file", "symlink"].contains(&entry["type"].as_str().unwrap()),
            "{entry}"
        );
    }
    assert!(
        fs::symlink_metadata(&idle).unwrap().file_type().is_fifo(),
        "a pipe stays a pipe"
    );
    assert_eq!(
        names_in(dir.path()),
        ["file", "held", "idle", "link", "socket"]
    );
}

#[test]
fn what_is_written_to_a_pipe_comes_out_of_it() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("pipe");
    mkfifo(&path);
    let content = random_bytes(MIB, 1);
    for rest in ["", "&mode=644"] {
        // Opened for both, so that opening waits for nobody; the writer's end decides the rest.
        let mut reader = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let reading = thread::spawn(move || {
            let mut bytes = vec![0; MIB];
            reader.read_exact(&mut bytes).unwrap();
            bytes
        });
        write(&server, &path, rest, &content);
        expect_same("the content", &reading.join().unwrap(), &content);
    }
    assert!(fs::symlink_metadata(&path).unwrap().file_type().is_fifo());
    assert_eq!(names_in(dir.path()), ["pipe"]);
}

#[test]
fn devices_are_read_and_written_where_they_are() {
    let server = Server::start();
    let dir = TempDir::new();
    // Nodes of the test's own: a server that replaces what it should write must not do it in /dev.
    for (name, minor) in [("null", 3), ("zero", 5), ("full", 7), ("random", 8)] {
        let device = nix::sys::stat::makedev(1, minor);
        let path = dir.join(name);
        let made = nix::sys::stat::mknod(
            path.as_str(),
            SFlag::S_IFCHR,
            Mode::from_bits_truncate(0o666),
            device,
        );
        if made.is_err()
            || OpenOptions::new()
                .read(true)
                .write(true)
                .open(&path)
                .is_err()
        {
            skip!("making device nodes needs root and a file system that allows them");
        }
    }
    for name in ["null", "zero", "full", "random"] {
        expect_error(
            &server.get(&target("read", dir.join(name), "")),
            409,
            "not_regular",
        );
        assert_eq!(stat(&server, dir.join(name), "")["type"], "file");
        assert_eq!(
            stat(&server, dir.join(name), "&detail=full")["kind"],
            "char"
        );
    }
    assert_eq!(
        read(&server, dir.join("zero"), "&length=300000"),
        vec![0; 300_000]
    );
    assert_eq!(read(&server, dir.join("random"), "&length=16").len(), 16);
    // Devices without a length of their own have no end to count from: 0 bytes, whole.
    let mut connection = server.connect();
    connection.send_request(
        "GET",
        &target("read", dir.join("null"), "&length=10"),
        &[],
        b"",
    );
    let answer = connection.read_head();
    assert_eq!(answer.status, 200);

    for rest in ["", "&offset=0"] {
        write(&server, dir.join("null"), rest, &random_bytes(300_000, 1));
        expect_error(
            &server.put(&target("write", dir.join("full"), rest), b"x"),
            507,
            "no_space",
        );
    }
    for name in ["null", "zero", "full", "random"] {
        assert!(
            fs::symlink_metadata(dir.join(name))
                .unwrap()
                .file_type()
                .is_char_device(),
            "{name}"
        );
    }
    assert_eq!(names_in(dir.path()), ["full", "null", "random", "zero"]);
    // An endless read ends with its client.
    let quiet = status_of(server.pid(), "Threads");
    let mut endless = Vec::new();
    for _ in 0..20 {
        let mut connection = server.connect();
        connection.send_request(
            "GET",
            &target("read", dir.join("zero"), "&length=1000000000000"),
            &[],
            b"",
        );
        assert_eq!(connection.read_head().status, 200);
        endless.push(connection);
    }
    assert_eq!(server.get("/health").status, 200);
    drop(endless);
    wait_until("every worker is free again", PATIENCE, || {
        status_of(server.pid(), "Threads") <= quiet + 4
    });
}

#[test]
fn files_of_the_kernel_are_read_to_their_end() {
    let server = Server::start();
    // Their size is said to be 0, or a page, and is neither.
    for path in [
        "/proc/version",
        "/proc/filesystems",
        "/proc/cpuinfo",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/class/net/lo/mtu",
    ] {
        let Ok(content) = fs::read(path) else {
            continue;
        };
        let reply = server.get(&target("read", path, ""));
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
        if path.ends_with("cpuinfo") {
            // The clock rates in it change from one reading to the next.
            assert_eq!(
                find(&reply.body, b"processor"),
                find(&content, b"processor"),
                "{path}"
            );
            assert!(reply.body.len() > content.len() / 2, "{path}");
        } else {
            assert_eq!(reply.text(), String::from_utf8_lossy(&content), "{path}");
        }
        assert_eq!(read(&server, path, "&offset=0&length=0"), b"");
        let mut connection = server.connect();
        let first = connection.request("GET", &target("read", path, ""), &[], b"");
        assert_eq!(first.status, 200);
    }
    assert!(!list(&server, "/proc/self/task", "").is_empty());
}

#[test]
fn files_that_wait_for_something_hold_nobody() {
    let server = Server::start();
    let quiet = status_of(server.pid(), "Threads");
    // A terminal nobody types at, the kernel's log at its end, the kernel's trace without a trace.
    let mut asked = Vec::new();
    for _ in 0..10 {
        for path in ["/dev/ptmx", "/dev/kmsg", "/sys/kernel/tracing/trace_pipe"] {
            for rest in ["", "&length=100000000"] {
                let mut connection = server.connect();
                connection.send_request("GET", &target("read", path, rest), &[], b"");
                asked.push((format!("{path}{rest}"), connection));
            }
        }
    }
    assert_eq!(server.get("/health").status, 200);
    for (what, connection) in &mut asked {
        connection.stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = connection.read_head();
        assert!(
            head.status == 200 || head.status >= 400,
            "{what}: {}",
            head.status
        );
        // However it goes on, it comes to an end.
        if head.header("content-length") != Some("0") {
            connection
                .stream
                .shutdown(std::net::Shutdown::Write)
                .unwrap();
            connection.read_to_close();
        }
    }
    drop(asked);
    wait_until("every worker is free again", PATIENCE, || {
        status_of(server.pid(), "Threads") <= quiet + 4
    });
}

#[test]
fn a_device_that_fails_or_is_not_meant_is_answered() {
    let server = Server::start();
    let dir = TempDir::new();
    // The kernel's log refuses buffers that a message does not fit in.
    let mut log = OpenOptions::new().read(true).open("/dev/kmsg");
    if log.as_mut().is_ok_and(|log| log.read(&mut [0; 2]).is_err()) {
        let reply = server.get(&target("read", "/dev/kmsg", "&length=2"));
        assert!(reply.status >= 400, "{}", reply.status);
        reply.code();
    }
    // Nothing drives this device, so opening it fails: without a length it is not tried.
    let device = nix::sys::stat::makedev(254, 255);
    let path = dir.join("device");
    let mode = Mode::from_bits_truncate(0o666);
    if nix::sys::stat::mknod(path.as_str(), SFlag::S_IFCHR, mode, device).is_err() {
        skip!("making device nodes needs root");
    }
    let reply = server.get(&target("read", &path, ""));
    expect_error(&reply, 409, "not_regular");
}

#[test]
fn an_upload_ends_when_the_reader_of_its_pipe_leaves() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("pipe");
    mkfifo(&path);
    let reader = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&path)
        .unwrap();
    let length = MIB.to_string();
    let head = [
        ("Content-Length", length.as_str()),
        ("Expect", "100-continue"),
    ];
    let mut connection = server.connect();
    connection.send_request("PUT", &target("write", &path, ""), &head, b"");
    assert_eq!(connection.read_head().status, 100);
    drop(reader);
    // Another test's child may have a share of the reading end until its execve.
    let short = Some(Duration::from_millis(20));
    let usual = connection.stream.read_timeout().unwrap();
    connection.stream.set_read_timeout(short).unwrap();
    wait_until("it is answered", PATIENCE, || {
        connection.send(&[0; 100]);
        connection.stream.peek(&mut [0]).is_ok()
    });
    connection.stream.set_read_timeout(usual).unwrap();
    expect_error(&connection.read_reply(), 409, "not_regular");
}

/// Takes a lease on a file for as long as it runs, whoever asks for it back.
const LEASE: &str = "
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
kind = {'read': fcntl.F_RDLCK, 'write': fcntl.F_WRLCK}[sys.argv[1]]
fd = os.open(sys.argv[2], os.O_RDONLY if kind == fcntl.F_RDLCK else os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)
print('held', flush=True)
signal.alarm(60)
signal.pause()
";

#[test]
fn a_file_that_a_program_has_a_lease_on_is_nobodys_to_open_for_now() {
    fn each(get: impl Fn(&str) -> Reply, put: impl Fn(&str) -> Reply, kind: &str) {
        let refused = |reply: Reply, act: &str| {
            assert_eq!((reply.status, &*reply.code()), (409, "leased"), "{act}");
            let text = reply.text();
            assert!(text.contains(act) && text.contains("try again"), "{text}");
        };
        if kind == "write" {
            refused(get("files/read?path=leased"), "cannot read");
            refused(
                get("files/read?path=leased&offset=0&length=1"),
                "cannot read",
            );
        } else {
            assert_eq!(get("files/read?path=leased").text(), "content");
        }
        refused(put("files/write?path=leased&offset=1"), "cannot write");
        refused(
            put("files/write?path=leased&offset=1&mode=600"),
            "cannot write",
        );
        assert_eq!(get("files/stat?path=leased").status, 200);
        // A whole file takes the other's place, and nobody has to open that.
        assert_eq!(put("files/write?path=leased").status, 200);
        assert_eq!(get("files/read?path=leased").text(), "new");
    }
    let server = Server::start();
    let probe = json!({"cmd": ["python3", "-c", "import fcntl; fcntl.F_SETLEASE"]});
    if server.post("/v1/exec", &probe).status != 200 || server.exec(&probe).code() != Some(0) {
        skip!("needs python3, which can take leases");
    }
    let dir = TempDir::new();
    let place = format!("{}/", dir.path().display());
    for kind in ["read", "write"] {
        fs::write(dir.join("leased"), "content").unwrap();
        let holder = json!({"cmd": ["python3", "-c", LEASE, kind, dir.join("leased")]});
        let mut holder = server.exec_stream(&holder);
        let held = holder.find(|event| event["event"] == "stdout");
        assert!(held.is_some(), "it holds the lease");
        let at = |route: &str| format!("/v1/{}", route.replace("path=", &format!("path={place}")));
        let get = |route: &str| server.get(&at(route));
        each(get, |route| server.put(&at(route), b"new"), kind);
    }
    if is_root() {
        let server = Server::host().start();
        let sandbox = server.sandbox();
        for kind in ["read", "write"] {
            sandbox.sh("printf content > leased");
            let holder = json!({"cmd": ["python3", "-c", LEASE, kind, "leased"]});
            let mut holder = sandbox.exec_stream(&holder);
            let held = holder.find(|event| event["event"] == "stdout");
            assert!(held.is_some(), "it holds the lease");
            let get = |route: &str| sandbox.get(route);
            each(get, |route| sandbox.put(route, b"new"), kind);
        }
    }
}
