//! Invalid requests in great number: mutations, from a fixed seed, of one request per route, over many
//! connections at once. The server must answer throughout and return to its initial state.
//!
//! `MUTATED_REQUESTS` is their number; half of them go to a server of each mode.
//!
//! A mutation may turn a request into any other, so the server must not be able to do harm. Its root
//! directory has one program, `true`, and no shell, and the server's own file is removed once it runs.
//! It has its own process ids, mounts and network, so that no process, file or port of the machine can
//! be named, and its files have at most 1 MiB. In dedicated mode it also runs as nobody; in host mode
//! its commands and files belong to the sandboxes' users.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use serde_json::{Value, json};

use crate::fixture::{
    Answer, Ask, Builder, OUTER_ROUTES, PATIENCE, Random, Reply, Server, Stop, Subjects, TOKEN,
    TempDir, copy_program, count_entries, descendants_of, in_network, is_root, memory_of,
    parse_replies, routes, wait_until,
};
use crate::skip;

/// Concurrent connections.
const CLIENTS: u64 = 4;

/// After this time without an answer, a client reports a request that hangs.
const SILENCE: Duration = Duration::from_secs(100);

/// Memory in bytes that a server may keep after the load: freed memory that the allocator holds, and
/// remembered processes.
const MORE_MEMORY: u64 = 8 << 20;

/// The root directory of a server.
struct Cell {
    root: TempDir,
}

impl Cell {
    /// `None` if this machine cannot make one.
    fn new() -> Option<Self> {
        let busybox = ["/bin/busybox", "/usr/bin/busybox"]
            .into_iter()
            .find(|path| fs::metadata(path).is_ok())?;
        let root = TempDir::new();
        fs::set_permissions(root.path(), PermissionsExt::from_mode(0o755)).unwrap();
        for name in ["bin", "dev", "dev/pts", "proc", "tmp", "w"] {
            fs::create_dir(root.join(name)).unwrap();
        }
        symlink("pts/ptmx", root.join("dev/ptmx")).unwrap();
        chown(root.join("w"), Some(65534), Some(65534)).unwrap();
        // By this name it is this program, whatever its arguments are.
        copy_program(busybox, root.join("bin/true"));
        for (name, minor) in [("null", 3), ("zero", 5), ("random", 8), ("urandom", 9)] {
            let path = root.join(&format!("dev/{name}"));
            mknod(
                path.as_str(),
                SFlag::S_IFCHR,
                Mode::empty(),
                makedev(1, minor),
            )
            .ok()?;
            fs::set_permissions(path, PermissionsExt::from_mode(0o666)).unwrap();
        }
        Some(Self { root })
    }

    fn start(&self, builder: Builder, user: &str) -> Server {
        // Not exec: what has changed its user is not killed with its parent (prctl(2)), but dies with
        // the first process of its namespace, which is the shell.
        let script = "
            cp \"$2\" \"$0/sbx-server\" && mount -t proc proc \"$0/proc\" || exit
            mount -t devpts -o newinstance,ptmxmode=666 devpts \"$0/dev/pts\" || exit
            ip link set lo up 2>/dev/null || ifconfig lo up 2>/dev/null || busybox ip link set lo up || exit
            prlimit --fsize=1048576 chroot --userspec=\"$1\" \"$0\" /sbx-server --init; exit";
        let root = self.root.path().to_str().unwrap();
        let wrapper = [
            "unshare",
            "--mount",
            "--pid",
            "--net",
            "--fork",
            "--kill-child",
            "/bin/sh",
            "-c",
        ];
        let mut server = builder
            .wrapped_in(&[&wrapper[..], &[script, root, user]].concat())
            .start();
        fs::remove_file(self.root.join("sbx-server")).unwrap();
        server.network = Some(format!("/proc/{}/ns/net", proper(&server)).into());
        server
    }
}

/// The server itself, below those who set the scene for it and its init.
fn proper(server: &Server) -> i32 {
    let all = descendants_of(server.pid());
    let is_parent = |pid: i32| all.iter().any(|process| process.parent == pid);
    all.iter()
        .find(|process| !is_parent(process.pid))
        .expect("it runs")
        .pid
}

/// A request that makes sense.
struct Request {
    method: &'static str,
    target: String,
    /// Bytes at the beginning of the target that are mostly left alone: whose it is.
    scope: usize,
    /// Bytes at the end of the target that are always left alone: the limit of a wait for something
    /// that never comes.
    limit: usize,
    /// Lines of the header beyond the token.
    header: String,
    body: Vec<u8>,
}

/// Requests for all routes, in a workspace whose routes begin with `prefix`.
fn workspace_requests(prefix: &str) -> Vec<Request> {
    // No shell is there: these are what runs a program, and what has more parameters.
    let richer = [
        ("POST", "exec", r#"{"cmd":["/bin/true"]}"#),
        (
            "POST",
            "exec",
            r#"{"cmd":["/bin/true","a"],"encoding":"base64","timeout":5,"cwd":"/"}"#,
        ),
        (
            "POST",
            "procs",
            r#"{"cmd":["/bin/true"],"id":"job","tag":"t","env":{"A":1}}"#,
        ),
        ("GET", "processes/job/logs?follow=1&stdout_offset=0", ""),
        ("GET", "processes/job/attach?offset=-1&mode=ro", ""),
        ("GET", "processes/job/wait?timeout=0.01", ""),
        ("POST", "processes/job/wait?timeout=0", ""),
        ("POST", "processes/job/kill", r#"{"signal":"TERM"}"#),
        (
            "POST",
            "processes/job/kill",
            r#"{"signal":"INT","group":"foreground"}"#,
        ),
        ("POST", "processes/job/resize", r#"{"rows":30,"cols":100}"#),
        ("GET", "processes/job/logs?plain=1&encoding=base64", ""),
        (
            "POST",
            "exec",
            r#"{"cmd":["/bin/true"],"pty":{"rows":5,"cols":9,"term":"vt100"}}"#,
        ),
        (
            "POST",
            "exec",
            r#"{"code":"true","language":"bash","args":["a"]}"#,
        ),
        (
            "POST",
            "exec",
            r#"{"cmd":"true","network":{"mode":"allowlist","allow":["a.example:443","10.0.0.0/8"],"deny":["@private"]}}"#,
        ),
        ("POST", "venv", r#"{"path":"venv"}"#),
        ("PUT", "processes/job/stdin?eof=1", "input"),
        ("DELETE", "processes/p-4", ""),
        ("GET", "files/read?path=w/a&offset=1&length=3", ""),
        ("GET", "files/read?path=/w/b", ""),
        ("GET", "files/read?path=w/a&lines=1-2", ""),
        ("POST", "files/hash", r#"{"paths":["w/a","w/none"]}"#),
        (
            "POST",
            "files/compare",
            r#"{"path":"w","entries":[{"path":"a","size":12,"mtime_ms":1},{"path":"d/e/f","size":4,"sha256":"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}]}"#,
        ),
        ("PUT", "files/write?path=w/g&if_absent=1&hash=sha256", "g"),
        ("PUT", "files/write?path=w/a&mode=644", "some content"),
        (
            "POST",
            "files/write?path=w/b&offset=5&truncate_to=9&mkdir=1",
            "more",
        ),
        ("PUT", "files/write?path=w/d/e/f", "deep"),
        ("GET", "files/list?path=w&limit=5&after=a&detail=full", ""),
        ("GET", "files/stat?path=w/a&detail=full", ""),
        ("POST", "files/mkdir?path=w/d&mode=755", ""),
        (
            "POST",
            "files/watches",
            r#"{"path":"w","recursive":true,"exclude":["*.o"],"id":"mine"}"#,
        ),
        ("GET", "files/watches/mine/events?after=1&timeout=0.01", ""),
        ("POST", "files/copy?from=w/a&to=w/h&overwrite=1", ""),
        ("POST", "files/copy?from=w/d&to=w/i&recursive=1", ""),
        ("POST", "files/chmod?path=w/d&mode=755&recursive=1", ""),
        ("POST", "files/move?from=w/a&to=w/c", ""),
        (
            "GET",
            "files/glob?path=w&pattern=**/*&pattern=!b&type=file&all=1&limit=5&after=a&sort=name",
            "",
        ),
        (
            "POST",
            "files/grep",
            r#"{"pattern":"[a-c]+$","path":"w","glob":["*","!b"],"case":"smart","word":true,"before":1,"limit":5}"#,
        ),
        (
            "POST",
            "files/patch?path=w&strip=2&dry_run=0",
            "diff --git a/w/b b/w/b\nold mode 100644\nnew mode 100755\n--- a/w/b\n+++ b/w/b\n@@ -1 +1 @@\n-more\n+any\n",
        ),
        (
            "POST",
            "files/edit",
            r#"{"path":"w/b","edits":[{"old":"some","new":"any","count":"all"},{"lines":"1-2","new":""}],"dry_run":true}"#,
        ),
        (
            "PUT",
            "files/archive?path=w/t&strip=1&overwrite=keep",
            "no tar",
        ),
        (
            "GET",
            "files/archive?path=w&include=b&format=tar.gz&errors=fail",
            "",
        ),
        ("DELETE", "files/delete?path=w/c", ""),
        ("POST", "files/delete?path=w/d&recursive=1", ""),
        ("GET", "proxy/9/path?query=1", ""),
        (
            "POST",
            "contexts",
            r#"{"language":"bash","id":"m","tag":"t"}"#,
        ),
        (
            "POST",
            "contexts/m/execute",
            r#"{"code":":","id":"e","timeout":5,"max_output_bytes":9}"#,
        ),
        ("GET", "contexts/m/executions/e/events?after=0&follow=1", ""),
        ("GET", "contexts/m/logs?plain=1&encoding=base64", ""),
        ("POST", "contexts/m/interrupt", r#"{"kill_after":0.1}"#),
        ("POST", "contexts/m/input", r#"{"value":"x"}"#),
        (
            "POST",
            "execute",
            r#"{"code":":","language":"sh","context":"m","format":"simple"}"#,
        ),
        ("GET", "ports/9/wait?timeout=0.01", ""),
        ("OPTIONS", "files/write", ""),
        ("POST", "tickets", r#"{"port":9}"#),
        ("POST", "tickets", r#"{"port":"web"}"#),
    ];
    let richer =
        richer.map(|(method, route, body)| Ask::new(method, format!("{prefix}/{route}"), body));
    let names = Subjects::below("w");
    let each = routes()
        .filter(|route| route.answer != Answer::Endless)
        .map(|route| route.ask(prefix, &names));
    let all = each.chain(richer).map(|ask| Request {
        method: ask.method,
        scope: prefix.len(),
        limit: match ask.target.rfind("/wait?timeout=") {
            Some(at) if ask.target.contains("/ports/") => ask.target.len() - at,
            _ => 0,
        },
        target: ask.target,
        header: String::new(),
        body: ask.body.into(),
    });
    all.collect()
}

/// Requests of MCP clients of both eras, among them one for each tool, at an endpoint whose path begins with `prefix`.
fn mcp_requests(prefix: &str) -> Vec<Request> {
    let meta = r#""_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{}}"#;
    let request = |name: &str, method: &str, params: String| {
        let params = format!("{params}{}{meta}", if params.is_empty() { "" } else { "," });
        Request {
            method: "POST",
            target: format!("{prefix}/mcp"),
            scope: prefix.len(),
            limit: 0,
            header: format!(
                "Accept: application/json, text/event-stream\r\nMCP-Protocol-Version: 2026-07-28\r\n\
                 Mcp-Method: {method}\r\n{name}"
            ),
            body: format!(
                r#"{{"jsonrpc":"2.0","id":7,"method":"{method}","params":{{{params}}}}}"#
            )
            .into(),
        }
    };
    let tools = [
        ("run", r#"{"cmd":["/bin/true"],"wait":5,"env":{"A":1}}"#),
        (
            "start",
            r#"{"cmd":["/bin/true"],"id":"job","tag":"t","pty":true}"#,
        ),
        ("output", r#"{"id":"job","stdout_offset":0,"wait":0}"#),
        ("input", r#"{"id":"job","text":"a","eof":true}"#),
        ("stop", r#"{"id":"job","signal":"TERM"}"#),
        ("processes", "{}"),
        ("read_file", r#"{"path":"w/a","lines":"1-2"}"#),
        (
            "write_file",
            r#"{"path":"w/a","content":"one\ntwo\n","mode":"644"}"#,
        ),
        (
            "edit_file",
            r#"{"path":"w/a","edits":[{"old":"one","new":"1"}],"dry_run":true}"#,
        ),
        ("list_files", r#"{"path":"w","depth":2}"#),
        ("glob", r#"{"path":"w","pattern":["*","!b"],"limit":5}"#),
        (
            "grep",
            r#"{"pattern":"o+","path":"w","before":1,"limit":5}"#,
        ),
        ("ports", "{}"),
    ];
    let mut all: Vec<_> = tools
        .into_iter()
        .map(|(tool, arguments)| {
            let name = format!("Mcp-Name: {tool}\r\n");
            let params = format!(r#""name":"{tool}","arguments":{arguments}"#);
            request(&name, "tools/call", params)
        })
        .collect();
    let told = request(
        "Mcp-Name: run\r\n",
        "tools/call",
        r#""name":"run","arguments":{"cmd":["/bin/true"]}"#.to_owned(),
    );
    let body = String::from_utf8(told.body.clone()).unwrap();
    let body = body.replace(r#""_meta":{"#, r#""_meta":{"progressToken":"p","#);
    all.push(Request {
        body: body.into(),
        ..told
    });
    all.push(request("", "server/discover", String::new()));
    all.push(request("", "tools/list", String::new()));
    let initialize = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"a","version":"1"}}}"#;
    for body in [
        initialize,
        r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#,
        r#"{"jsonrpc":"2.0","id":"a","method":"ping"}"#,
    ] {
        all.push(Request {
            method: "POST",
            target: format!("{prefix}/mcp"),
            scope: prefix.len(),
            limit: 0,
            header: "Accept: application/json, text/event-stream\r\n".to_owned(),
            body: body.into(),
        });
    }
    all
}

/// One request for each route of E2B's clients, in a sandbox.
fn e2b_requests(sandbox: &str) -> Vec<Request> {
    let process = r#"{"process":{"pid":7}}"#;
    let unary = [
        ("process.Process/List", "{}"),
        (
            "process.Process/SendInput",
            r#"{"process":{"pid":7},"input":{"stdin":"aGk="}}"#,
        ),
        ("process.Process/CloseStdin", process),
        (
            "process.Process/SendSignal",
            r#"{"process":{"tag":"t"},"signal":"SIGNAL_SIGTERM"}"#,
        ),
        (
            "process.Process/Update",
            r#"{"process":{"pid":7},"pty":{"size":{"cols":80,"rows":24}}}"#,
        ),
        ("filesystem.Filesystem/Stat", r#"{"path":"w/a"}"#),
        ("filesystem.Filesystem/ListDir", r#"{"path":"w","depth":2}"#),
        ("filesystem.Filesystem/MakeDir", r#"{"path":"w/d/e"}"#),
        (
            "filesystem.Filesystem/Move",
            r#"{"source":"w/a","destination":"w/c"}"#,
        ),
        ("filesystem.Filesystem/Remove", r#"{"path":"w/d"}"#),
        (
            "filesystem.Filesystem/CreateWatcher",
            r#"{"path":"w","recursive":true,"includeEntry":true}"#,
        ),
        (
            "filesystem.Filesystem/GetWatcherEvents",
            r#"{"watcherId":"w-1"}"#,
        ),
        (
            "filesystem.Filesystem/RemoveWatcher",
            r#"{"watcherId":"w-1"}"#,
        ),
    ];
    let streams = [
        (
            "process.Process/Start",
            r#"{"process":{"cmd":"/bin/true","args":["a"],"envs":{"A":"b"},"cwd":"."},"tag":"t","stdin":false}"#,
        ),
        (
            "process.Process/Start",
            r#"{"process":{"cmd":"/bin/true"},"pty":{"size":{"cols":80,"rows":24}}}"#,
        ),
        ("process.Process/Connect", process),
        (
            "process.Process/StreamInput",
            r#"{"start":{"process":{"pid":7}}}"#,
        ),
        (WATCH, r#"{"path":"w","recursive":true}"#),
    ];
    let boundary = "multipart/form-data; boundary=b";
    let part = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"w/m\"\r\n\r\nmore\r\n--b--\r\n";
    let json = "application/json";
    let others = [
        ("GET", "files?path=w/a", "", ""),
        ("POST", "files?path=w/a", "application/octet-stream", "some"),
        ("POST", "files", boundary, part),
        ("POST", "files?path=w/m&username=user", boundary, part),
        (
            "GET",
            "files?path=w/a&signature=v1_x&signature_expiration=9",
            "",
            "",
        ),
        ("GET", "health", "", ""),
        ("GET", "metrics", "", ""),
        ("GET", "envs", "", ""),
        ("POST", "execute", json, r#"{"code":":","language":"bash"}"#),
        ("GET", "contexts", "", ""),
        ("POST", "contexts", json, r#"{"language":"bash","cwd":"."}"#),
        ("POST", "contexts/c-1/restart", "", ""),
        ("DELETE", "contexts/c-1", "", ""),
    ];
    let request = |method, route: &str, kind: &str, body: Vec<u8>| Request {
        method,
        target: format!("/{route}"),
        scope: 0,
        limit: if route == WATCH { WATCH.len() } else { 0 },
        header: format!(
            "X-Access-Token: {TOKEN}\r\nE2b-Sandbox-Id: {sandbox}\r\nContent-Type: {kind}\r\nConnect-Timeout-Ms: 50\r\n"
        ),
        body,
    };
    let unary = unary.map(|(route, body)| request("POST", route, json, body.into()));
    let streams = streams.map(|(route, body)| {
        let length = u32::try_from(body.len()).unwrap().to_be_bytes();
        let body = [&[0][..], &length, body.as_bytes()].concat();
        request("POST", route, "application/connect+json", body)
    });
    let others =
        others.map(|(method, route, kind, body)| request(method, route, kind, body.into()));
    unary.into_iter().chain(streams).chain(others).collect()
}

/// A stream that only its deadline ends.
const WATCH: &str = "filesystem.Filesystem/WatchDir";

/// One request for each of the other routes.
fn other_requests(sandboxes: &[String]) -> Vec<Request> {
    let mut all = vec![
        ("GET", "/nowhere".to_owned(), ""),
        ("GET", "/console".to_owned(), ""),
        ("GET", "/console/xterm.css".to_owned(), ""),
        ("GET", format!("/t/{}/a?b", "0".repeat(64)), ""),
        (
            "POST",
            "/v1/sandboxes".to_owned(),
            r#"{"count":1,"env":{"A":"b"},"max_procs":9}"#,
        ),
        (
            "POST",
            "/v1/sandboxes".to_owned(),
            r#"{"count":2,"idle_timeout_secs":60,"max_mem_mb":99,"max_total_mem_mb":99,"max_cpu":null}"#,
        ),
    ];
    let mut e2b = vec![
        (
            "POST",
            "/v2/sandboxes".to_owned(),
            r#"{"templateID":"base","timeout":60,"metadata":{"a":"b"},"envVars":{"A":"b"},"network":{"denyOut":["0.0.0.0/0"],"allowOut":["a.example"]}}"#,
        ),
        (
            "GET",
            "/v2/sandboxes?metadata=a%3Db&limit=2&order=asc&nextToken=1".to_owned(),
            "",
        ),
        ("GET", "/snapshots".to_owned(), ""),
        ("POST", "/v3/templates".to_owned(), "{}"),
    ];
    for id in sandboxes {
        e2b.push(("GET", format!("/sandboxes/{id}"), ""));
        e2b.push((
            "POST",
            format!("/v2/sandboxes/{id}/connect"),
            r#"{"timeout":9}"#,
        ));
        e2b.push((
            "POST",
            format!("/sandboxes/{id}/timeout"),
            r#"{"timeout":9}"#,
        ));
        e2b.push(("GET", format!("/sandboxes/{id}/metrics?start=1"), ""));
        e2b.push(("POST", format!("/sandboxes/{id}/pause"), ""));
        e2b.push(("DELETE", format!("/sandboxes/{id}"), ""));
    }
    for id in sandboxes {
        all.push(("GET", format!("/v1/sandboxes/{id}/metrics?disk=1"), ""));
    }
    // All sandboxes at once are not deleted: the other requests need some.
    let outer = OUTER_ROUTES
        .iter()
        .filter(|route| (route.method, route.pattern) != ("DELETE", "/v1/sandboxes"));
    for route in outer {
        let ids = if route.is_of_sandbox() {
            sandboxes
        } else {
            &[String::new()]
        };
        all.extend(ids.iter().map(|id| {
            let ask = route.ask(id);
            (ask.method, ask.target, route.body)
        }));
    }
    let request = |header: String| {
        move |(method, target, body): (&'static str, String, &str)| Request {
            method,
            target,
            scope: 0,
            limit: 0,
            header: header.clone(),
            body: body.into(),
        }
    };
    let all = all.into_iter().map(request(String::new()));
    let e2b = e2b
        .into_iter()
        .map(request(format!("X-API-KEY: {TOKEN}\r\n")));
    all.chain(e2b).collect()
}

/// Numbers at which something may change.
const NUMBERS: [&str; 12] = [
    "",
    "0",
    "-1",
    "1",
    "7",
    "8",
    "99",
    "4096",
    "65536",
    "9223372036854775807",
    "18446744073709551616",
    "1e9",
];

/// What means something in a target.
const TARGET_TOKENS: [&str; 26] = [
    "/",
    "//",
    "/..",
    "/.",
    "%2f",
    "%2e%2e",
    "%00",
    "%ff",
    "%",
    "&",
    "=",
    "?",
    "+",
    "path=",
    "recursive=1",
    "&detail=full",
    "/v1",
    "/processes",
    "/files",
    "job",
    "p-2",
    "%EE%BE%80",
    "limit=1",
    "offset=",
    "w/a",
    "true",
];

/// What means something anywhere.
const TOKENS: [&str; 24] = [
    "\r\n",
    "\r\n\r\n",
    "\r",
    "\n",
    "\0",
    " ",
    "\t",
    ":",
    "Content-Length: ",
    "Content-Length: 5\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Transfer-Encoding: x\r\n",
    "0\r\n\r\n",
    "5\r\n",
    ";",
    "Connection: close\r\n",
    "Expect: 100-continue\r\n",
    "Range: bytes=1-\r\n",
    "HTTP/1.0",
    "HTTP/1.1\r\n",
    "GET ",
    "null",
    "\"",
    "{",
];

/// Changes a part of a text for another, or puts one between.
fn mutate(bytes: &mut Vec<u8>, tokens: &[&str], random: &mut Random) {
    let start = random.below(bytes.len() + 1);
    let end = (start + random.below(6)).min(bytes.len());
    match random.below(6) {
        0 => drop(bytes.drain(start..end)),
        1 => drop(bytes.splice(start..start, random.of(tokens).bytes())),
        2 => drop(bytes.splice(start..end, random.of(tokens).bytes())),
        3 => {
            let copy = bytes[start..end].repeat(1 + random.below(3));
            bytes.splice(start..start, copy);
        }
        4 => {
            let digit = bytes[start..].iter().position(u8::is_ascii_digit);
            if let Some(at) = digit.map(|at| start + at) {
                bytes.splice(at..=at, random.of(&NUMBERS).bytes());
            }
        }
        _ => {
            if let Some(byte) = bytes.get_mut(start) {
                *byte = byte.wrapping_add(1 << random.below(7));
            }
        }
    }
}

/// A request with something changed, well enough framed that one can follow it.
fn orderly(base: &Request, random: &mut Random) -> Vec<u8> {
    let mut target = base.target.clone().into_bytes();
    let mut body = base.body.clone();
    let mut method = base.method;
    match random.below(8) {
        0..=4 => {
            let limit = target.split_off(target.len() - base.limit);
            // Mostly where the route is known already.
            if limit.is_empty() && !target.contains(&b'?') {
                target.extend_from_slice(b"?path=w/b&limit=5");
            }
            let query = target
                .iter()
                .position(|byte| *byte == b'?')
                .unwrap_or(base.scope);
            let scope = [0, base.scope, query, query, query, query][random.below(6)];
            let mut rest = target.split_off(scope);
            for _ in 0..=random.below(3) {
                mutate(&mut rest, &TARGET_TOKENS, random);
            }
            target.append(&mut rest);
            target.extend(limit);
        }
        5 => method = random.of(&["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "get"]),
        _ => {
            for _ in 0..=random.below(3) {
                mutate(&mut body, &TOKENS, random);
            }
        }
    }
    for byte in &mut target {
        if *byte <= b' ' || *byte == 0x7f || *byte == b'#' {
            *byte = b'_';
        }
    }
    if !target.starts_with(b"/") {
        target.insert(0, b'/');
    }
    let token = if random.one_in(50) { "wrong" } else { TOKEN };
    let mut request = [
        method.as_bytes(),
        b" ",
        &target,
        b" HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: ",
    ]
    .concat();
    write!(request, "{token}\r\n{}", base.header).unwrap();
    if random.one_in(8) {
        let extra = [
            "Range: bytes=0-1",
            "Accept: */*",
            "Range: bytes=-9",
            "Host: a",
            "If-Range: x",
            "X: \u{e9}",
        ];
        write!(request, "{}\r\n", random.of(&extra)).unwrap();
    }
    if random.one_in(4) {
        request.extend_from_slice(b"Transfer-Encoding: chunked\r\n\r\n");
        for piece in body.chunks(1 + random.below(20)) {
            write!(request, "{:x}\r\n", piece.len()).unwrap();
            request.extend_from_slice(piece);
            request.extend_from_slice(b"\r\n");
        }
        request.extend_from_slice(b"0\r\n\r\n");
    } else {
        write!(request, "Content-Length: {}\r\n\r\n", body.len()).unwrap();
        request.extend_from_slice(&body);
    }
    request
}

/// What became of the requests.
#[derive(Default)]
struct Tally {
    sent: AtomicU64,
    connections: AtomicU64,
    cut: AtomicU64,
    statuses: Mutex<BTreeMap<u16, u64>>,
}

impl Tally {
    fn answered(&self) -> u64 {
        self.statuses.lock().unwrap().values().sum()
    }
}

/// One connection: requests one behind the other, of which the last may be anything at all.
fn converse(address: SocketAddr, requests: &[Request], random: &mut Random, tally: &Tally) {
    let count = 1 + random.below(64);
    let mut bytes = Vec::new();
    for _ in 1..count {
        bytes.extend(orderly(&requests[random.below(requests.len())], random));
    }
    let base = loop {
        let base = &requests[random.below(requests.len())];
        if base.limit == 0 {
            break base;
        }
    };
    let mut last = orderly(base, random);
    for _ in 0..=random.below(5) {
        mutate(&mut last, &TOKENS, random);
    }
    bytes.extend(last);
    tally.sent.fetch_add(count as u64, Ordering::Relaxed);
    tally.connections.fetch_add(1, Ordering::Relaxed);

    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(SILENCE)).unwrap();
    let pieces = if random.one_in(8) {
        2 + random.below(20)
    } else {
        1
    };
    for piece in bytes.chunks(bytes.len().div_ceil(pieces)) {
        // It may have closed already, for good reason; what it said comes below.
        if stream.write_all(piece).is_err() {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
    let mut received = Vec::new();
    let end = stream.read_to_end(&mut received);
    let sent = || String::from_utf8_lossy(&bytes).into_owned();
    if let Err(error) = &end {
        let hangs = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        assert!(!hangs, "no answer and no end for {SILENCE:?}: {:?}", sent());
    }
    let replies = match parse_replies(&received) {
        Ok(replies) => replies,
        // A connection that is reset for what came behind may lose the end of what came before.
        Err(_) if end.is_err() || is_broken_off(&received, &bytes) => {
            tally.cut.fetch_add(1, Ordering::Relaxed);
            return;
        }
        Err(why) => panic!(
            "{why} in {:?} to {:?}",
            String::from_utf8_lossy(&received),
            sent()
        ),
    };
    let mut statuses = tally.statuses.lock().unwrap();
    for reply in replies.iter().filter(|reply| reply.status >= 200) {
        *statuses.entry(reply.status).or_default() += 1;
        let text = reply.text();
        let says = |causes: &[&str]| causes.iter().any(|cause| text.contains(cause));
        let may_fail = match reply.status {
            // A sandbox may be ending by another request, and has so many tickets a minute.
            503 => says(&["shutting_down", "is ending", "open links to ports"]),
            // What these are for E2B's clients: a language that is not here, and events that were lost.
            500 => says(&["cannot start ", " is not supported; ", "data_loss"]),
            status => [501, 502, 504, 507].contains(&status),
        };
        let is_bad = reply.status >= 500 && !may_fail;
        assert!(!is_bad, "{} {text} to {:?}", reply.status, sent());
        if reply.status >= 400 {
            assert!(is_refusal(reply), "{text} to {:?}", sent());
        }
    }
}

/// Whether an answer says what is wrong, in the form of the door that the request was for.
fn is_refusal(reply: &Reply) -> bool {
    if reply.header("content-type") != Some("application/json") {
        return !reply.body.is_empty();
    }
    let body = reply.json();
    body["error"].is_string()
        || body["error"]["code"].is_i64() && body["error"]["message"].is_string()
        || body["message"].is_string() && (body["code"].is_string() || body["code"].is_u64())
}

/// Whether the last answer is an archive that ends early, as a client asked for by `errors=fail`.
fn is_broken_off(received: &[u8], sent: &[u8]) -> bool {
    let (received, sent) = (
        String::from_utf8_lossy(received),
        String::from_utf8_lossy(sent),
    );
    let last = received.rsplit("HTTP/1.1 ").next().unwrap_or_default();
    let is_archive = |kind: &&str| last.contains(&format!("Content-Type: application/{kind}\r\n"));
    sent.contains("errors=fail") && ["x-tar", "gzip"].iter().any(is_archive)
}

/// What a server takes: memory, threads and descriptors. Watches do not count: they wait for their clients for
/// minutes, and nobody knows the ids that mutated requests have given them.
fn taken(pid: i32) -> [u64; 3] {
    let [threads, descriptors] = of_watches(pid);
    let count = |what: &str| count_entries(&format!("/proc/{pid}/{what}")) as u64;
    let rest = |what: &str, watches: u64| count(what).saturating_sub(watches);
    let memory = memory_of(pid, "VmRSS");
    [memory, rest("task", threads), rest("fd", descriptors)]
}

/// The threads and descriptors of watches that clients poll.
fn of_watches(pid: i32) -> [u64; 2] {
    let entries = |what: &str| {
        fs::read_dir(format!("/proc/{pid}/{what}"))
            .unwrap()
            .flatten()
    };
    let is_watching = |entry: &fs::DirEntry| {
        fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name == "watches\n")
    };
    let is_inotify = |entry: &fs::DirEntry| {
        fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == "anon_inode:inotify")
    };
    let threads = entries("task").filter(is_watching).count();
    let inotify = entries("fd").filter(is_inotify).count();
    // Each thread is woken by one of its own.
    [threads as u64, (inotify + threads) as u64]
}

/// Sends the requests and compares; `renew` makes the requests anew now and then.
fn storm(server: &Server, name: &str, seed: u64, renew: &(dyn Fn() -> Vec<Request> + Sync)) {
    let wanted = std::env::var("MUTATED_REQUESTS")
        .map_or(1_000_000, |text| text.parse::<u64>().unwrap())
        / 2;
    let network: PathBuf = server.network.clone().unwrap();
    let pid = proper(server);
    let idle = taken(pid);
    let tally = Tally::default();
    let healthy = AtomicU64::new(0);
    let slowest = Mutex::new(Duration::ZERO);
    let send_until = |until: u64, seed: u64| {
        let stop = Stop::default();
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.is_set() {
                    let asked = Instant::now();
                    assert_eq!(server.get("/health").status, 200);
                    let mut slowest = slowest.lock().unwrap();
                    *slowest = slowest.max(asked.elapsed());
                    healthy.fetch_add(1, Ordering::Relaxed);
                    drop(slowest);
                    thread::sleep(Duration::from_millis(50));
                }
            });
            let _guard = stop.guard();
            thread::scope(|scope| {
                for client in 0..CLIENTS {
                    let (tally, network) = (&tally, &network);
                    scope.spawn(move || {
                        in_network(network, || {
                            let mut random = Random(seed * CLIENTS + client + 1);
                            let mut requests = renew();
                            let mut turn = 0;
                            while tally.answered() < until {
                                turn += 1;
                                if turn % 16 == 0 {
                                    requests = renew();
                                }
                                converse(server.address, &requests, &mut random, tally);
                            }
                        });
                    });
                }
            });
        });
    };
    // A server that has seen everything once has grown to its size.
    send_until(wanted / 10, seed);
    let is_quiet = || descendants_of(pid).is_empty();
    wait_until("its commands have ended", PATIENCE, is_quiet);
    // A thread watches those with a limit on memory.
    server.delete("/v1/sandboxes");
    wait_until("its connections have ended", PATIENCE, || {
        taken(pid)[1] <= idle[1]
    });
    let before = taken(pid);
    let started = Instant::now();
    send_until(wanted, seed + 1);
    let elapsed = started.elapsed();
    server.delete("/v1/sandboxes");
    wait_until("its commands have ended", PATIENCE, is_quiet);
    wait_until(
        "threads and descriptors are what they were",
        PATIENCE,
        || {
            let now = taken(pid);
            now[1] <= before[1] && now[2] <= before[2]
        },
    );
    if name == "host" {
        wait_until("watches end with their sandboxes", PATIENCE, || {
            of_watches(pid) == [0, 0]
        });
    }
    let after = taken(pid);
    println!(
        "{name}: {} requests on {} connections ({} reset), {} answered: {:?}\n\
         /health {} times, {:?} at most; memory, threads, descriptors {before:?} {after:?}; {elapsed:?}",
        tally.sent.load(Ordering::Relaxed),
        tally.connections.load(Ordering::Relaxed),
        tally.cut.load(Ordering::Relaxed),
        tally.answered(),
        tally.statuses.lock().unwrap(),
        healthy.load(Ordering::Relaxed),
        slowest.lock().unwrap(),
    );
    assert!(
        after[0] <= before[0] + MORE_MEMORY,
        "memory: {before:?} {after:?}"
    );
    let statuses = tally.statuses.lock().unwrap();
    let is_answer = |status: &u16| statuses.contains_key(status);
    assert!(
        [200, 204, 400, 403, 404, 405, 409].iter().all(is_answer),
        "{statuses:?}"
    );
    assert!(!server.log().contains("panicked"), "{}", server.log());
}

#[test]
#[ignore = "sends a million requests, unless MUTATED_REQUESTS says otherwise"]
fn a_dedicated_server_survives_mutated_requests_as_it_was() {
    let Some(cell) = is_root().then(Cell::new).flatten() else {
        skip!("a root and a network of its own need root and busybox");
    };
    let server = cell.start(Server::builder(), "65534:65534");
    storm(&server, "dedicated", 11, &|| {
        let mut all = workspace_requests("/v1");
        all.extend(mcp_requests(""));
        all.extend(e2b_requests("machine"));
        all.extend(other_requests(&["0123456789abcdef01234567".to_owned()]));
        all
    });
}

#[test]
#[ignore = "sends a million requests, unless MUTATED_REQUESTS says otherwise"]
fn a_host_survives_mutated_requests_as_it_was() {
    let Some(cell) = is_root().then(Cell::new).flatten() else {
        skip!("a root and a network of its own need root and busybox");
    };
    let builder = Server::host()
        .env("SBX_HOMES_DIR", "/homes")
        .env("SBX_CAPACITY", 48);
    let server = cell.start(builder, "0:0");
    storm(&server, "host", 12, &|| {
        let create = || server.post("/v1/sandboxes", &json!({ "count": 3 })).json();
        let mut made = create();
        if made["rejected"] != 0 {
            server.delete("/v1/sandboxes");
            made = create();
        }
        let none = Vec::new();
        let id = |sandbox: &Value| sandbox["id"].as_str().unwrap().to_owned();
        let ids: Vec<_> = made["sandboxes"]
            .as_array()
            .unwrap_or(&none)
            .iter()
            .map(id)
            .collect();
        // One that is ended, and others that mostly live.
        let mut all = other_requests(&ids[..ids.len().min(1)]);
        for id in ids.iter().skip(1) {
            all.extend(workspace_requests(&format!("/v1/sandboxes/{id}")));
            all.extend(mcp_requests(&format!("/v1/sandboxes/{id}")));
            all.extend(e2b_requests(id));
        }
        all
    });
}
