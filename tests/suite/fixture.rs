//! Starting servers and talking to them.
//!
//! [`Server`] is a running `sbx-server` that dies with the value. [`Connection`] is one TCP
//! connection on which a test may send any bytes it likes; [`Reply`] is a parsed response.
//! [`EventStream`] reads the NDJSON events of a command one at a time, as they arrive.
//! [`Server::host`] is the same with many sandboxes, each a [`Sandbox`].

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use sha2::{Digest, Sha256};

/// The token that [`Server::start`] gives its servers.
pub const TOKEN: &str = "test-token-5e1f";

/// How long anything that should be prompt may take before a test gives up on it.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The program under test.
pub const BINARY: &str = env!("CARGO_BIN_EXE_sbx-server");

/// Says that a test could not run here. In CI that is a failure, elsewhere a loud line.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)*) => {{
        let reason = format!($($reason)*);
        assert!(std::env::var_os("CI").is_none(), "SKIPPED in CI, which is a failure: {reason}");
        eprintln!("SKIPPED: {reason}");
        return;
    }};
}

/// Polls `condition` until it holds; panics with `what` after `limit`.
#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A directory of its own for a test, removed with the value.
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new() -> Self {
        Self::below(std::env::temp_dir()).unwrap()
    }

    /// One in another place than usual.
    ///
    /// # Errors
    /// Nothing can be made there.
    pub fn below(parent: impl AsRef<std::path::Path>) -> std::io::Result<Self> {
        let mut name = [0u8; 8];
        std::fs::File::open("/dev/urandom")
            .unwrap()
            .read_exact(&mut name)
            .unwrap();
        let name = format!("sbx-test-{:016x}", u64::from_ne_bytes(name));
        let path = parent.as_ref().join(name);
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }

    /// One on a file system in memory, where there is one: for tests that make very many files.
    pub fn in_memory() -> Self {
        Self::below("/dev/shm").unwrap_or_else(|_| Self::new())
    }

    pub fn path(&self) -> &std::path::Path {
        &self.0
    }

    /// The path of `name` in the directory, as a string.
    pub fn join(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// How a server is to be started.
pub struct Builder {
    wrapper: Vec<String>,
    env: BTreeMap<String, String>,
    token: Option<String>,
    place: Option<HostPlace>,
}

impl Builder {
    /// Sets a variable of the server's environment.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "numbers are given as they are"
    )]
    pub fn env(mut self, name: &str, value: impl ToString) -> Self {
        self.env.insert(name.to_owned(), value.to_string());
        self
    }

    /// Starts the server without a token (on loopback).
    pub fn no_token(mut self) -> Self {
        self.token = None;
        self
    }

    /// Runs the server through another program, such as `unshare` with its options.
    pub fn wrapped_in(mut self, words: &[&str]) -> Self {
        self.wrapper = words.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// The command line and environment, for tests that watch the start itself fail.
    pub fn command(&self) -> Command {
        let mut words = self.wrapper.clone();
        words.push(BINARY.to_owned());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("SBX_") {
                command.env_remove(name);
            }
        }
        command
            .env("SBX_PORT", "0")
            .env("SBX_BIND", "127.0.0.1")
            .envs(&self.env);
        if let Some(token) = &self.token {
            command.env("SBX_TOKEN", token);
        }
        command
    }

    /// Starts the server and waits for its ready line.
    pub fn start(self) -> Server {
        let command = self.command();
        self.start_as(command)
    }

    /// Starts the server by a command made from [`Self::command`], and waits for its ready line.
    pub fn start_as(self, mut command: Command) -> Server {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut address = None;
        while address.is_none() {
            let mut line = String::new();
            let length = lines.read_line(&mut line).unwrap();
            assert!(
                length > 0,
                "the server ended before it was ready: {:?}\n{}",
                child.wait(),
                log.lock().unwrap()
            );
            address = line
                .split_once("listening on ")
                .and_then(|(_, rest)| rest.split_whitespace().next())
                .and_then(|text| text.parse::<SocketAddr>().ok());
            log.lock().unwrap().push_str(&line);
        }
        let sink = Arc::clone(&log);
        thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                let mut log = sink.lock().unwrap();
                log.push_str(&line);
                log.push('\n');
            }
        });
        Server {
            child,
            address: address.unwrap(),
            token: self.token,
            network: None,
            log,
            place: self.place,
        }
    }
}

/// What a server in host mode has to itself among all those that run at the same time: a directory
/// for homes and a range of users. Whatever still runs as one of them ends with the value.
pub struct HostPlace {
    directory: TempDir,
    first_uid: u32,
    /// Its name, which no two processes can have, keeps others off the range.
    _claim: UnixDatagram,
}

impl HostPlace {
    /// Users of one server.
    const UIDS: u32 = 64;
    /// Ranges of them, all below what [`spare_uid`] gives and within what a job container has.
    const RANGES: u32 = 300;

    fn new() -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        // Suites that run at the same time begin at different places, and a range is not used again
        // soon, whatever may be left of it.
        let begin = std::process::id() * 37;
        loop {
            let next = begin.wrapping_add(COUNTER.fetch_add(1, Ordering::Relaxed));
            let first_uid = 20_000 + next % Self::RANGES * Self::UIDS;
            let name = format!("sbx-test-uids-{first_uid}");
            let name = UnixAddress::from_abstract_name(name).unwrap();
            if let Ok(claim) = UnixDatagram::bind_addr(&name) {
                return Self {
                    directory: TempDir::new(),
                    first_uid,
                    _claim: claim,
                };
            }
        }
    }

    /// The users, as `SBX_UID_RANGE` has them.
    pub fn range(&self) -> String {
        format!("{}-{}", self.first_uid, self.first_uid + Self::UIDS - 1)
    }

    /// Where the homes are; the server makes it.
    pub fn homes(&self) -> PathBuf {
        self.directory.path().join("homes")
    }

    /// The processes that run as one of the users, with their users; zombies too.
    pub fn processes(&self) -> Vec<(i32, u32)> {
        let users = self.first_uid..self.first_uid + Self::UIDS;
        all_processes()
            .into_iter()
            .filter_map(|process| Some((process.pid, uid_of(process.pid)?)))
            .filter(|(_, uid)| users.contains(uid))
            .collect()
    }
}

impl Drop for HostPlace {
    fn drop(&mut self) {
        // One process that signals all of its user's gets even what forks faster than it is listed.
        for _ in 0..100 {
            let mut left = self.processes();
            left.retain(|(pid, _)| stat_of(*pid).is_some_and(|process| process.state != 'Z'));
            if left.is_empty() {
                return;
            }
            for uid in left
                .into_iter()
                .map(|(_, uid)| uid)
                .collect::<std::collections::BTreeSet<_>>()
            {
                let _ = Command::new("/bin/sh")
                    .args(["-c", "kill -9 -1"])
                    .uid(uid)
                    .gid(uid)
                    .current_dir("/")
                    .stderr(Stdio::null())
                    .status();
            }
        }
    }
}

/// A running server; it is killed when the value is dropped.
pub struct Server {
    child: Child,
    pub address: SocketAddr,
    pub token: Option<String>,
    /// The network namespace it listens in, as a file, where that is not the tests' own.
    pub network: Option<PathBuf>,
    log: Arc<Mutex<String>>,
    /// In host mode, what it has to itself. Dropped after the server was killed.
    pub place: Option<HostPlace>,
}

impl Server {
    /// A dedicated server with [`TOKEN`], on a free loopback port.
    pub fn start() -> Self {
        Self::builder().start()
    }

    pub fn builder() -> Builder {
        Builder {
            wrapper: Vec::new(),
            env: BTreeMap::new(),
            token: Some(TOKEN.to_owned()),
            place: None,
        }
    }

    /// A server in host mode, with homes and users of its own. Only for root, see [`is_root`].
    pub fn host() -> Builder {
        let place = HostPlace::new();
        let mut builder = Self::builder()
            .env("SBX_HOST_MODE", 1)
            .env("SBX_HOMES_DIR", place.homes().display())
            .env("SBX_UID_RANGE", place.range());
        builder.place = Some(place);
        builder
    }

    /// Makes a sandbox that is to be as `body` says.
    #[track_caller]
    pub fn sandbox_with(&self, body: &Value) -> Sandbox<'_> {
        let reply = self.post("/v1/sandboxes", body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        let made = reply.json();
        assert_eq!(made["rejected"], 0, "{made}");
        Sandbox::of(self, &made["sandboxes"][0])
    }

    /// Makes a sandbox.
    #[track_caller]
    pub fn sandbox(&self) -> Sandbox<'_> {
        self.sandbox_with(&serde_json::json!({}))
    }

    /// The pid of the server proper in host mode, where what was started is init.
    #[track_caller]
    pub fn inner_pid(&self) -> i32 {
        let init = self.pid().cast_signed();
        all_processes()
            .into_iter()
            .filter(|process| process.parent == init)
            .map(|process| process.pid)
            .find(|pid| uid_of(*pid) == Some(0))
            .expect("init has the server for a child")
    }

    /// The pid of what was started: the server, or the wrapper around it.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything the server has written to stderr so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Sends a signal to the started process.
    pub fn signal(&self, signal: i32) {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::try_from(signal).unwrap()).unwrap();
    }

    /// Waits for the server to end by itself.
    #[track_caller]
    pub fn wait_for_exit(&mut self, limit: Duration) -> ExitStatus {
        let mut status = None;
        wait_until("the server ends", limit, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// Whether the started process still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// A new connection.
    pub fn connect(&self) -> Connection {
        match &self.network {
            None => Connection::open(self.address, self.token.clone()),
            Some(network) => in_network(network, || {
                Connection::open(self.address, self.token.clone())
            }),
        }
    }

    /// One request on a connection of its own.
    pub fn request(&self, method: &str, target: &str, body: &[u8]) -> Reply {
        self.connect().request(method, target, &[], body)
    }

    pub fn get(&self, target: &str) -> Reply {
        self.request("GET", target, b"")
    }

    pub fn delete(&self, target: &str) -> Reply {
        self.request("DELETE", target, b"")
    }

    pub fn put(&self, target: &str, body: &[u8]) -> Reply {
        self.request("PUT", target, body)
    }

    pub fn post(&self, target: &str, body: &Value) -> Reply {
        self.request("POST", target, body.to_string().as_bytes())
    }

    /// Runs a command to its end; the whole stream must be there, with exactly one `exit`, last.
    #[track_caller]
    pub fn exec(&self, body: &Value) -> Outcome {
        Outcome::of(self.exec_stream(body).collect())
    }

    /// Starts a command and returns its events as they arrive.
    #[track_caller]
    pub fn exec_stream(&self, body: &Value) -> EventStream {
        self.stream("POST", "/v1/exec", body.to_string().as_bytes())
    }

    /// Any request that is answered by a stream of events.
    #[track_caller]
    pub fn stream(&self, method: &str, target: &str, body: &[u8]) -> EventStream {
        self.connect().stream(method, target, body)
    }

    /// Starts a background process and returns its description (`id`, `pid`, ...).
    #[track_caller]
    pub fn spawn(&self, body: &Value) -> Value {
        let reply = self.post("/v1/processes", body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A sandbox of a server in host mode, asked with its own token. It stays when the value goes.
pub struct Sandbox<'a> {
    pub server: &'a Server,
    pub id: String,
    pub token: String,
    pub uid: u32,
    pub home: PathBuf,
}

impl<'a> Sandbox<'a> {
    /// From its description in the answer to the request that made it.
    #[track_caller]
    pub fn of(server: &'a Server, made: &Value) -> Self {
        let text = |name: &str| made[name].as_str().unwrap().to_owned();
        Self {
            server,
            id: text("id"),
            token: text("token"),
            uid: u32::try_from(made["uid"].as_u64().unwrap()).unwrap(),
            home: text("home").into(),
        }
    }

    /// The target of one of its routes, such as `exec` or `files/read?path=x`.
    pub fn target(&self, route: &str) -> String {
        format!("/v1/sandboxes/{}/{route}", self.id)
    }

    /// A new connection with its token.
    pub fn connect(&self) -> Connection {
        let mut connection = self.server.connect();
        connection.token = Some(self.token.clone());
        connection
    }

    /// One request on one of its routes.
    #[track_caller]
    pub fn request(&self, method: &str, route: &str, body: &[u8]) -> Reply {
        self.connect()
            .request(method, &self.target(route), &[], body)
    }

    #[track_caller]
    pub fn get(&self, route: &str) -> Reply {
        self.request("GET", route, b"")
    }

    #[track_caller]
    pub fn put(&self, route: &str, body: &[u8]) -> Reply {
        self.request("PUT", route, body)
    }

    #[track_caller]
    pub fn post(&self, route: &str, body: &Value) -> Reply {
        self.request("POST", route, body.to_string().as_bytes())
    }

    /// Starts a command in it and returns its events as they arrive.
    #[track_caller]
    pub fn exec_stream(&self, body: &Value) -> EventStream {
        self.connect()
            .stream("POST", &self.target("exec"), body.to_string().as_bytes())
    }

    /// Runs a command in it to its end.
    #[track_caller]
    pub fn exec(&self, body: &Value) -> Outcome {
        Outcome::of(self.exec_stream(body).collect())
    }

    /// What a shell command in it writes; it must succeed.
    #[track_caller]
    pub fn sh(&self, command: &str) -> String {
        let outcome = self.exec(&serde_json::json!({ "cmd": command }));
        assert_eq!(outcome.code(), Some(0), "{command}: {outcome:?}");
        outcome.stdout
    }

    /// Starts a background process in it and returns its description (`id`, `pid`, ...).
    #[track_caller]
    pub fn spawn(&self, body: &Value) -> Value {
        let reply = self.post("processes", body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    /// Ends it; all of it must be gone then.
    #[track_caller]
    pub fn delete(self) {
        let target = format!("/v1/sandboxes/{}", self.id);
        let reply = self.connect().request("DELETE", &target, &[], b"");
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json()["deleted"], true);
        assert!(!self.home.exists(), "its home is gone");
        assert_eq!(
            self.processes(),
            Vec::<i32>::new(),
            "its processes are gone"
        );
    }

    /// What runs as its user; zombies too.
    pub fn processes(&self) -> Vec<i32> {
        all_processes()
            .into_iter()
            .map(|process| process.pid)
            .filter(|pid| uid_of(*pid) == Some(self.uid))
            .collect()
    }
}

/// The real user of a process; none when there is no such process.
pub fn uid_of(pid: i32) -> Option<u32> {
    let status = std::fs::read(format!("/proc/{pid}/status")).ok()?;
    let status = String::from_utf8_lossy(&status);
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Whether the tests run as root, as host mode needs it.
pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// A server whose token nothing else on this machine knows, not even a test beside this one.
pub fn secret_server(builder: Builder) -> (Server, String) {
    let mut random = [0u8; 8];
    std::fs::File::open("/dev/urandom")
        .unwrap()
        .read_exact(&mut random)
        .unwrap();
    let secret = format!("s3cr3t-{:016x}", u64::from_ne_bytes(random));
    let mut server = builder.no_token().env("SBX_TOKEN", &secret).start();
    server.token = Some(secret.clone());
    (server, secret)
}

/// The words that make a program the first process of a process id namespace.
pub const NAMESPACE: [&str; 5] = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];

pub fn has_namespaces() -> bool {
    Command::new(NAMESPACE[0])
        .args(&NAMESPACE[1..])
        .arg("true")
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// A response, its body decoded from whatever framing it came in.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: u16,
    /// Names in lower case, in the order they came.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The `code` of an error reply.
    #[track_caller]
    pub fn code(&self) -> String {
        self.json()["code"]
            .as_str()
            .expect("an error has a code")
            .to_owned()
    }
}

/// One TCP connection to a server.
pub struct Connection {
    pub stream: TcpStream,
    pub token: Option<String>,
    /// Received and not yet consumed.
    buffer: Vec<u8>,
}

impl Connection {
    pub fn open(address: SocketAddr, token: Option<String>) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        Self {
            stream,
            token,
            buffer: Vec::new(),
        }
    }

    /// Sends bytes as they are. A server that refuses a connection has answered and gone before anything
    /// was sent: then the answer is what tells.
    pub fn send(&mut self, bytes: &[u8]) {
        match self.stream.write_all(bytes) {
            Err(error)
                if matches!(
                    error.kind(),
                    std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset
                ) => {}
            sent => sent.unwrap(),
        }
    }

    /// Sends a well-formed request, with the token and a Content-Length unless `headers` frame it.
    pub fn send_request(
        &mut self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) {
        let mut head = format!("{method} {target} HTTP/1.1\r\nHost: sandbox\r\n").into_bytes();
        if let Some(token) = &self.token {
            write!(head, "X-Sandbox-Token: {token}\r\n").unwrap();
        }
        for (name, value) in headers {
            write!(head, "{name}: {value}\r\n").unwrap();
        }
        let framed = |(name, _): &(&str, &str)| {
            name.eq_ignore_ascii_case("content-length")
                || name.eq_ignore_ascii_case("transfer-encoding")
        };
        if !headers.iter().any(framed) && (!body.is_empty() || matches!(method, "POST" | "PUT")) {
            write!(head, "Content-Length: {}\r\n", body.len()).unwrap();
        }
        head.extend_from_slice(b"\r\n");
        self.send(&head);
        self.send(body);
    }

    /// Sends a request and reads its whole reply.
    #[track_caller]
    pub fn request(
        &mut self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Reply {
        self.send_request(method, target, headers, body);
        self.read_reply_to(method)
    }

    /// Sends a request that is answered by a stream of events.
    #[track_caller]
    pub fn stream(mut self, method: &str, target: &str, body: &[u8]) -> EventStream {
        self.send_request(method, target, &[], body);
        let head = self.read_head();
        if head.status != 200 {
            let reply = self.read_body(head);
            panic!("{method} {target}: {} {}", reply.status, reply.text());
        }
        EventStream {
            connection: self,
            buffer: Vec::new(),
            ended: false,
            heard: Instant::now(),
        }
    }

    /// Reads one reply to anything but HEAD.
    #[track_caller]
    pub fn read_reply(&mut self) -> Reply {
        self.read_reply_to("GET")
    }

    #[track_caller]
    pub fn read_reply_to(&mut self, method: &str) -> Reply {
        let head = self.read_head();
        if method == "HEAD" {
            head
        } else {
            self.read_body(head)
        }
    }

    /// Reads a status line and headers; the body is left for [`Self::read_body`].
    #[track_caller]
    pub fn read_head(&mut self) -> Reply {
        let end = loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                break end;
            }
            assert!(
                self.fill(),
                "the connection ended inside a head: {:?}",
                String::from_utf8_lossy(&self.buffer)
            );
        };
        let head: Vec<u8> = self.buffer.drain(..end + 4).collect();
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let status = lines
            .next()
            .unwrap()
            .split(' ')
            .nth(1)
            .unwrap()
            .parse()
            .unwrap();
        let headers = lines
            .map(|line| {
                line.split_once(": ")
                    .unwrap_or_else(|| panic!("a bad header line: {line:?}"))
            })
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        Reply {
            status,
            headers,
            body: Vec::new(),
        }
    }

    /// Reads the body that `head` announces.
    #[track_caller]
    pub fn read_body(&mut self, mut head: Reply) -> Reply {
        if head.status == 204 || head.status == 304 || head.status < 200 {
            return head;
        }
        if head.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.read_chunk() {
                head.body.extend(chunk);
            }
        } else if let Some(length) = head.header("content-length") {
            let length: usize = length.parse().unwrap();
            head.body = self.read_exactly(length);
        } else {
            while self.fill() {}
            head.body = std::mem::take(&mut self.buffer);
        }
        head
    }

    /// One chunk of a chunked body; `None` at its end.
    #[track_caller]
    pub fn read_chunk(&mut self) -> Option<Vec<u8>> {
        let end = loop {
            if let Some(end) = find(&self.buffer, b"\r\n") {
                break end;
            }
            assert!(self.fill(), "the connection ended inside a chunked body");
        };
        let line: Vec<u8> = self.buffer.drain(..end + 2).collect();
        let size = usize::from_str_radix(std::str::from_utf8(&line[..end]).unwrap(), 16).unwrap();
        let chunk = self.read_exactly(size);
        assert_eq!(self.read_exactly(2), b"\r\n");
        (size > 0).then_some(chunk)
    }

    #[track_caller]
    pub fn read_exactly(&mut self, length: usize) -> Vec<u8> {
        while self.buffer.len() < length {
            assert!(
                self.fill(),
                "the connection ended {} bytes early",
                length - self.buffer.len()
            );
        }
        self.buffer.drain(..length).collect()
    }

    /// What was received and not used: for tests that go on reading by themselves.
    pub fn take_buffered(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.buffer)
    }

    /// Receives once; false at the end of the connection, orderly or not.
    pub fn fill(&mut self) -> bool {
        let mut chunk = [0; 16384];
        match self.stream.read(&mut chunk) {
            Ok(0) => false,
            Ok(count) => {
                self.buffer.extend_from_slice(&chunk[..count]);
                true
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
            // A machine that is stopped and goes on interrupts waits that have a limit.
            Err(error) if error.kind() == ErrorKind::Interrupted => true,
            Err(error) => panic!("reading: {error}"),
        }
    }

    /// Everything until the server closes.
    pub fn read_to_close(&mut self) -> Vec<u8> {
        while self.fill() {}
        std::mem::take(&mut self.buffer)
    }

    /// Asserts that the server closes and sends nothing more.
    #[track_caller]
    pub fn expect_close(&mut self) {
        let rest = self.read_to_close();
        assert!(
            rest.is_empty(),
            "more than expected before the close: {:?}",
            String::from_utf8_lossy(&rest)
        );
    }
}

/// The events of a stream, one at a time, as they arrive. Ends where the chunked body ends.
pub struct EventStream {
    pub connection: Connection,
    buffer: Vec<u8>,
    ended: bool,
    /// When the last event came that was no `ping`.
    heard: Instant,
}

impl EventStream {
    /// The next event that is not a `ping`.
    #[track_caller]
    pub fn next_output(&mut self) -> Option<Value> {
        self.find(|event| event["event"] != "ping")
    }
}

impl Iterator for EventStream {
    type Item = Value;

    #[track_caller]
    fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                let event: Value = serde_json::from_slice(&line).unwrap();
                if event["event"] != "ping" {
                    self.heard = Instant::now();
                }
                // A command that never ends is to fail its test, not to hang it.
                assert!(self.heard.elapsed() < 6 * PATIENCE, "nothing but pings");
                return Some(event);
            }
            if self.ended {
                assert!(self.buffer.is_empty(), "the stream ended inside a line");
                return None;
            }
            match self.connection.read_chunk() {
                Some(chunk) => self.buffer.extend(chunk),
                None => self.ended = true,
            }
        }
    }
}

/// What a command that ran to its end did.
#[derive(Debug)]
pub struct Outcome {
    pub start: Value,
    pub stdout: String,
    pub stderr: String,
    pub exit: Value,
    pub events: Vec<Value>,
}

impl Outcome {
    #[track_caller]
    pub fn of(events: Vec<Value>) -> Self {
        let exits = events
            .iter()
            .filter(|event| event["event"] == "exit")
            .count();
        assert_eq!(exits, 1, "exactly one exit: {events:?}");
        let exit = events.last().unwrap().clone();
        assert_eq!(exit["event"], "exit", "exit comes last");
        let start = events[0].clone();
        assert_eq!(start["event"], "start", "start comes first");
        let text = |stream: &str| {
            events
                .iter()
                .filter(|event| event["event"] == stream)
                .map(|event| event["data"].as_str().unwrap())
                .collect()
        };
        Self {
            start,
            stdout: text("stdout"),
            stderr: text("stderr"),
            exit,
            events,
        }
    }

    pub fn code(&self) -> Option<i64> {
        self.exit["exit_code"].as_i64()
    }
}

/// Position of `needle` in `haystack`.
pub fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack
        .windows(needle.len())
        .position(|window| window == needle)
}

/// The pids of all live (not zombie) processes whose command line contains `text`.
pub fn processes_with(text: &str) -> Vec<i32> {
    let own = std::process::id().cast_signed();
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| *pid != own)
        .filter(|pid| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| find(&line, text.as_bytes()).is_some())
        })
        .collect()
}

/// Runs `action` in a thread that has moved to another network namespace. Sockets made there stay
/// there, whichever thread uses them later.
pub fn in_network<T: Send>(network: &std::path::Path, action: impl FnOnce() -> T + Send) -> T {
    let namespace = std::fs::File::open(network).unwrap();
    let enter = || {
        nix::sched::setns(&namespace, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        action()
    };
    thread::scope(|scope| scope.spawn(enter).join().unwrap())
}

/// A number that occurs in no other command line, to be given to `sleep`: by it a test finds every
/// process of a command's tree again. Whatever is left of the tree ends with the value.
pub struct Mark(String);

impl Mark {
    pub fn new() -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        Self(format!("3600.{:07}{count:05}", std::process::id()))
    }

    /// The live processes that carry the mark.
    pub fn pids(&self) -> Vec<i32> {
        processes_with(&self.0)
    }

    /// Waits until at least `count` processes carry the mark.
    #[track_caller]
    pub fn wait_for(&self, count: usize) {
        wait_until("the marked processes run", PATIENCE, || {
            self.pids().len() >= count
        });
    }

    /// A process that carries the mark, as soon as one can be seen: on its way to another program a
    /// process has no command line for a moment.
    #[track_caller]
    pub fn any(&self) -> i32 {
        self.find("a marked process runs", |_| true)
    }

    /// A process that carries the mark and is as `is_meant` says, as soon as there is one.
    #[track_caller]
    pub fn find(&self, what: &str, is_meant: impl Fn(i32) -> bool) -> i32 {
        let mut found = None;
        wait_until(what, PATIENCE, || {
            found = self.pids().into_iter().find(|pid| is_meant(*pid));
            found.is_some()
        });
        found.unwrap()
    }

    /// Waits until no process carries the mark.
    #[track_caller]
    pub fn wait_gone(&self, limit: Duration) {
        wait_until("the marked processes end", limit, || self.pids().is_empty());
    }
}

impl std::fmt::Display for Mark {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // Repeated, because a test that failed may have left something that forks.
        for _ in 0..100 {
            let left = self.pids();
            if left.is_empty() {
                return;
            }
            for pid in left {
                let _ = nix::sys::signal::kill(
                    nix::unistd::Pid::from_raw(pid),
                    nix::sys::signal::Signal::SIGKILL,
                );
            }
        }
    }
}

/// A gate that commands wait at with `: < PATH` until the test opens it.
pub struct Gate {
    directory: TempDir,
    opened: Option<std::fs::File>,
}

impl Gate {
    pub fn new() -> Self {
        let directory = TempDir::new();
        nix::unistd::mkfifo(
            &directory.path().join("gate"),
            nix::sys::stat::Mode::S_IRWXU,
        )
        .unwrap();
        Self {
            directory,
            opened: None,
        }
    }

    /// The path of the FIFO; opening it for reading blocks while the gate is shut.
    pub fn path(&self) -> String {
        self.directory.join("gate")
    }

    /// Lets everyone through, now and later.
    pub fn open(&mut self) {
        // Opening a FIFO for both directions never blocks, whoever is or is not there.
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.path())
            .unwrap();
        self.opened = Some(file);
    }
}

/// One line of the process table.
#[derive(Debug, Clone)]
pub struct ProcessStat {
    pub pid: i32,
    pub state: char,
    pub parent: i32,
    pub session: i32,
    /// User and system time so far.
    pub cpu: Duration,
}

/// What `/proc/<pid>/stat` says; `None` when there is no such process.
pub fn stat_of(pid: i32) -> Option<ProcessStat> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let text = String::from_utf8_lossy(&text);
    // The name may hold anything, also spaces and brackets.
    let fields: Vec<&str> = text[text.rfind(')')? + 2..].split(' ').collect();
    let number = |index: usize| fields[index].parse::<i32>().unwrap();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Some(ProcessStat {
        pid,
        state: fields[0].chars().next()?,
        parent: number(1),
        session: number(3),
        cpu: Duration::from_millis(ticks * 10),
    })
}

/// The whole process table, zombies included.
pub fn all_processes() -> Vec<ProcessStat> {
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| stat_of(entry.ok()?.file_name().to_str()?.parse().ok()?))
        .collect()
}

/// Everything below `root` in the process table, zombies included.
pub fn descendants_of(root: i32) -> Vec<ProcessStat> {
    let all = all_processes();
    let mut found: Vec<ProcessStat> = Vec::new();
    let mut next = vec![root];
    while let Some(parent) = next.pop() {
        for process in all.iter().filter(|process| process.parent == parent) {
            next.push(process.pid);
            found.push(process.clone());
        }
    }
    found
}

/// A field of `/proc/<pid>/status` that counts kibibytes, such as `VmRSS` or `VmHWM`, in bytes.
#[track_caller]
pub fn memory_of(pid: i32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with(&format!("{field}:")))
        .unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        * 1024
}

/// The number of entries of a directory such as `/proc/<pid>/fd` or `/proc/<pid>/task`.
pub fn count_entries(path: &str) -> usize {
    std::fs::read_dir(path).unwrap().count()
}

/// Closes the connection with a reset, as a client does that dies or gives up.
pub fn reset(connection: Connection) {
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    nix::sys::socket::setsockopt(
        &connection.stream,
        nix::sys::socket::sockopt::Linger,
        &linger,
    )
    .unwrap();
    drop(connection);
}

/// The shortest of several measurements: what the program can do when the machine lets it.
pub fn best_of(runs: usize, mut measure: impl FnMut() -> Duration) -> Duration {
    (0..runs).map(|_| measure()).min().unwrap()
}

/// `size` bytes of lines in which every position can be told from every other.
pub fn numbered_text(size: usize) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(size + 64);
    let mut line = 0;
    while text.len() < size {
        writeln!(
            text,
            "{line:09} the quick brown fox jumps over the lazy dog"
        )
        .unwrap();
        line += 1;
    }
    text.truncate(size);
    text
}

/// Bytes without a pattern, the same in every run.
pub fn random_bytes(size: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}

/// The same numbers for the same seed, which is not 0 (xorshift64*).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    pub fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next()).unwrap() % limit.max(1)
    }

    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    pub fn of<'a, T: ?Sized>(&mut self, all: &[&'a T]) -> &'a T {
        all[self.below(all.len())]
    }
}

/// Decodes padded base64; anything else is a failure.
#[track_caller]
pub fn decode_base64(text: &str) -> Vec<u8> {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut values = [255u8; 256];
    for (value, symbol) in (0..).zip(ALPHABET) {
        values[usize::from(*symbol)] = value;
    }
    assert!(
        text.len().is_multiple_of(4),
        "base64 of {} characters",
        text.len()
    );
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let symbols = text.trim_end_matches('=').as_bytes();
    assert!(text.len() - symbols.len() <= 2, "too much padding");
    for group in symbols.chunks(4) {
        let mut bits = 0u32;
        for symbol in group {
            let value = values[usize::from(*symbol)];
            assert!(value < 64, "not base64: {:?}", char::from(*symbol));
            bits = bits << 6 | u32::from(value);
        }
        bits <<= 6 * (4 - group.len());
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    bytes
}

/// One output stream as its events told it.
#[derive(Debug, Default)]
pub struct Output {
    /// The bytes that were given, one piece after another.
    pub data: Vec<u8>,
    /// Bytes that were said to be lost.
    pub dropped: u64,
    /// The offset after the last event.
    pub end: u64,
}

/// Puts the events of `stream` together, asserting that each one begins where the last one ended,
/// the first at `offset`: nothing is missing or told twice without being said.
#[track_caller]
pub fn output_of(events: &[Value], stream: &str, offset: u64) -> Output {
    let mut output = Output {
        end: offset,
        ..Output::default()
    };
    for event in events {
        let dropped = event["event"] == "dropped" && event["stream"] == stream;
        if event["event"] != stream && !dropped {
            continue;
        }
        assert_eq!(
            event["offset"].as_u64(),
            Some(output.end),
            "offsets are contiguous: {event}"
        );
        let bytes = event["bytes"].as_u64().unwrap();
        assert!(bytes > 0, "an event about nothing: {event}");
        output.end += bytes;
        if dropped {
            output.dropped += bytes;
        } else if let Some(data) = event["data_b64"].as_str() {
            let data = decode_base64(data);
            assert_eq!(data.len() as u64, bytes, "bytes counts raw bytes");
            output.data.extend(data);
        } else {
            output
                .data
                .extend_from_slice(event["data"].as_str().unwrap().as_bytes());
        }
    }
    output
}

/// The events of a whole body of a stream.
#[track_caller]
pub fn events_of(body: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(body).unwrap();
    assert!(
        text.is_empty() || text.ends_with('\n'),
        "a stream ends with a whole line"
    );
    text.split_terminator('\n')
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Takes apart everything that came on a connection until its end: a sequence of whole responses
/// and nothing else. Strict, because it is the oracle of tests that send nonsense. It does not
/// know the requests, so responses to HEAD cannot be among them.
pub fn parse_replies(mut bytes: &[u8]) -> Result<Vec<Reply>, String> {
    let mut replies = Vec::new();
    while !bytes.is_empty() {
        let (reply, rest) = parse_reply(bytes)?;
        replies.push(reply);
        bytes = rest;
    }
    Ok(replies)
}

fn parse_reply(bytes: &[u8]) -> Result<(Reply, &[u8]), String> {
    let end = find(bytes, b"\r\n\r\n").ok_or("a head without an end")?;
    let head = std::str::from_utf8(&bytes[..end]).map_err(|error| format!("a head: {error}"))?;
    let mut rest = &bytes[end + 4..];
    let mut lines = head.split("\r\n");
    let status_line = lines.next().unwrap_or_default();
    let status = status_line
        .strip_prefix("HTTP/1.1 ")
        .and_then(|text| text.get(..3))
        .and_then(|text| text.parse::<u16>().ok())
        .ok_or_else(|| format!("a status line: {status_line:?}"))?;
    let mut headers: Vec<(String, String)> = Vec::new();
    for line in lines {
        let (name, value) = line
            .split_once(": ")
            .ok_or_else(|| format!("a header: {line:?}"))?;
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    let mut reply = Reply {
        status,
        headers,
        body: Vec::new(),
    };
    let length = reply.header("content-length").map(str::to_owned);
    let chunked = reply.header("transfer-encoding") == Some("chunked");
    if status < 200 || status == 204 || status == 304 {
        if chunked || length.is_some_and(|length| length != "0") {
            return Err(format!("a {status} with a body"));
        }
    } else if chunked {
        if length.is_some() {
            return Err("two framings in one response".to_owned());
        }
        loop {
            let end = find(rest, b"\r\n").ok_or("a chunk without a size")?;
            let size = std::str::from_utf8(&rest[..end])
                .ok()
                .and_then(|text| usize::from_str_radix(text, 16).ok())
                .ok_or("a chunk size that is no number")?;
            let chunk = rest
                .get(end + 2..end + 2 + size)
                .ok_or("a chunk that is cut off")?;
            reply.body.extend_from_slice(chunk);
            rest = rest[end + 2 + size..]
                .strip_prefix(b"\r\n")
                .ok_or("a chunk without an end")?;
            if size == 0 {
                break;
            }
        }
    } else if let Some(length) = length {
        let length: usize = length
            .parse()
            .map_err(|error| format!("{length:?}: {error}"))?;
        reply.body = rest.get(..length).ok_or("a body that is cut off")?.to_vec();
        rest = &rest[length..];
    } else {
        reply.body = rest.to_vec();
        rest = &[];
    }
    Ok((reply, rest))
}

/// Waits until the process at the other end of a loopback connection has read all that was sent,
/// so that what is sent next comes to it as a segment of its own.
#[track_caller]
pub fn wait_until_received(stream: &TcpStream) {
    let own = format!("{:04X}", stream.local_addr().unwrap().port());
    let peer = format!("{:04X}", stream.peer_addr().unwrap().port());
    let ipv6 = stream.local_addr().unwrap().is_ipv6();
    let table = if ipv6 {
        "/proc/net/tcp6"
    } else {
        "/proc/net/tcp"
    };
    wait_until("what was sent is read", PATIENCE, || {
        let table = std::fs::read_to_string(table).unwrap();
        // sl local remote state tx:rx ...; the line of the other end has the ports the other way.
        table.lines().skip(1).all(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            !(fields[1].ends_with(&format!(":{peer}"))
                && fields[2].ends_with(&format!(":{own}"))
                && !fields[4].ends_with(":00000000"))
        })
    });
}

/// A number from `/proc/<pid>/status`, such as `Threads` or `VmRSS` (in KiB).
pub fn status_of(pid: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find(|line| line.split(':').next() == Some(field));
    let value = line.unwrap_or_else(|| panic!("no {field}: {status}"));
    value.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// The processor time that a process has used so far.
pub fn cpu_time_of(pid: u32) -> Duration {
    cpu_time_in(&format!("/proc/{pid}"))
}

/// The same of its threads that have this name.
pub fn cpu_time_of_threads(pid: u32, name: &str) -> Duration {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads
        .map(|thread| thread.unwrap().path().display().to_string())
        .filter(|thread| {
            std::fs::read_to_string(format!("{thread}/comm")).is_ok_and(|comm| comm.trim() == name)
        })
        .map(|thread| cpu_time_in(&thread))
        .sum()
}

fn cpu_time_in(directory: &str) -> Duration {
    let stat = std::fs::read_to_string(format!("{directory}/stat")).unwrap();
    // The name in parentheses may hold anything; the fields are counted behind it.
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    // USER_HZ is 100 on every Linux that this runs on.
    Duration::from_millis(ticks * 10)
}

/// How many descriptors a process has open.
pub fn descriptors_of(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .count()
}

/// A uid that owns nothing and runs nothing, so that limits per user count only the server.
pub fn spare_uid(offset: u32) -> u32 {
    40_000 + std::process::id() % 5_000 + offset * 5_000
}

/// A copy of the program that any user can start.
pub fn public_copy(dir: &TempDir) -> String {
    let copy = dir.join("sbx-server");
    std::fs::copy(BINARY, &copy).unwrap();
    for path in [dir.path().to_path_buf(), copy.clone().into()] {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
    }
    copy
}

/// Whether a test may run a server as another user: root, with the programs that it takes.
pub fn can_change_user() -> bool {
    nix::unistd::geteuid().is_root()
        && std::process::Command::new("setpriv")
            .args([
                "--reuid=12345",
                "--regid=12345",
                "--clear-groups",
                "prlimit",
                "--nproc",
            ])
            .output()
            .is_ok_and(|output| output.status.success())
}

/// Gives two names each other's file, in one step: the quickest way to swap a directory for a link
/// under somebody who is looking. False if one of them is not there.
#[allow(unsafe_code)]
pub fn exchange(left: &std::ffi::CStr, right: &std::ffi::CStr) -> bool {
    let (from, to) = (left.as_ptr(), right.as_ptr());
    let (here, how) = (libc::AT_FDCWD, libc::RENAME_EXCHANGE);
    // SAFETY: both are strings that end in NUL and outlive the call. Neither nix nor the C library
    // that Rust brings has a function for it on this target.
    let status = unsafe { libc::syscall(libc::SYS_renameat2, here, from, here, to, how) };
    status == 0
}

/// Tells threads that work alongside a test to end, also when the test fails.
#[derive(Default)]
pub struct Stop(AtomicBool);

impl Stop {
    /// Whether it is time to end.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets it when the returned value is dropped.
    pub fn guard(&self) -> impl Drop + '_ {
        struct Guard<'a>(&'a Stop);
        impl Drop for Guard<'_> {
            fn drop(&mut self) {
                self.0.0.store(true, Ordering::Relaxed);
            }
        }
        Guard(self)
    }
}

/// The SHA-256 of `bytes`, in hex.
pub fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// What a [`Bucket`] was asked for.
#[derive(Debug, Clone)]
pub struct Asked {
    pub path: String,
    /// The `Authorization` that came with it.
    pub token: Option<String>,
}

/// What a [`Bucket`] does when it is asked for a path.
enum Answer {
    File(Vec<u8>),
    Refusal { status: u16, once: bool },
    Redirect(String),
    Stall,
}

#[derive(Default)]
struct Shelves {
    answers: BTreeMap<String, Vec<Answer>>,
    asked: Vec<Asked>,
    when_asked: Option<Arc<dyn Fn() + Send + Sync>>,
    /// Connections of requests that are not answered.
    stalled: Vec<TcpStream>,
    /// How much of a file is sent before the connection breaks off.
    cut: BTreeMap<String, usize>,
}

/// A small web server that holds files, as the place does that a server is downloaded from.
pub struct Bucket {
    address: SocketAddr,
    shelves: Arc<Mutex<Shelves>>,
}

impl Bucket {
    /// On a free port of this machine's loopback.
    pub fn start() -> Self {
        Self::serve(TcpListener::bind("127.0.0.1:0").unwrap())
    }

    /// The same in another network namespace.
    pub fn start_in(network: &std::path::Path) -> Self {
        Self::serve(in_network(network, || {
            TcpListener::bind("127.0.0.1:0").unwrap()
        }))
    }

    /// The thread lives as long as the tests: nobody waits for it.
    fn serve(listener: TcpListener) -> Self {
        let address = listener.local_addr().unwrap();
        let shelves = Arc::new(Mutex::new(Shelves::default()));
        let mine = Arc::clone(&shelves);
        thread::spawn(move || {
            for stream in listener.incoming() {
                // A client that went away is no concern of the bucket's.
                let _ = Self::answer(stream.unwrap(), &mine);
            }
        });
        Self { address, shelves }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn put(&self, path: &str, bytes: &[u8]) {
        self.set(path, Answer::File(bytes.to_vec()));
    }

    /// Answers with this status from now on.
    pub fn refuse(&self, path: &str, status: u16) {
        self.set(
            path,
            Answer::Refusal {
                status,
                once: false,
            },
        );
    }

    /// Answers with this status once, and then as before.
    pub fn refuse_once(&self, path: &str, status: u16) {
        self.set(path, Answer::Refusal { status, once: true });
    }

    pub fn redirect(&self, path: &str, url: &str) {
        self.set(path, Answer::Redirect(url.to_owned()));
    }

    /// Never answers, and keeps the connection.
    pub fn stall(&self, path: &str) {
        self.set(path, Answer::Stall);
    }

    /// Announces the whole file and closes the connection after `length` bytes of it.
    pub fn break_off(&self, path: &str, length: usize) {
        self.shelves
            .lock()
            .unwrap()
            .cut
            .insert(path.to_owned(), length);
    }

    /// Does something whenever a request has come and before it is answered.
    pub fn when_asked(&self, action: impl Fn() + Send + Sync + 'static) {
        self.shelves.lock().unwrap().when_asked = Some(Arc::new(action));
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<Asked> {
        self.shelves.lock().unwrap().asked.clone()
    }

    fn set(&self, path: &str, answer: Answer) {
        let mut shelves = self.shelves.lock().unwrap();
        shelves
            .answers
            .entry(path.to_owned())
            .or_default()
            .push(answer);
    }

    fn answer(mut stream: TcpStream, shelves: &Mutex<Shelves>) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
        let target = first.split(' ').nth(1).unwrap_or_default();
        let path = target.split('?').next().unwrap_or_default().to_owned();
        let mut token = None;
        for line in lines
            .map_while(Result::ok)
            .take_while(|line| !line.is_empty())
        {
            let (name, value) = line.split_once(": ").unwrap_or_default();
            if name.eq_ignore_ascii_case("authorization") {
                token = Some(value.to_owned());
            }
        }
        let mut shelves = shelves.lock().unwrap();
        let asked = Asked {
            path: path.clone(),
            token,
        };
        shelves.asked.push(asked);
        if let Some(action) = &shelves.when_asked {
            action();
        }
        let cut = shelves.cut.get(&path).copied();
        let known = shelves.answers.entry(path).or_default();
        let (head, body) = match known.last() {
            Some(Answer::File(bytes)) => ("200 OK".to_owned(), bytes.clone()),
            Some(Answer::Redirect(url)) => (format!("302 Found\r\nLocation: {url}"), Vec::new()),
            Some(Answer::Refusal { status, once }) => {
                let head = format!("{status} No");
                if *once {
                    known.pop();
                }
                (head, Vec::new())
            }
            Some(Answer::Stall) => {
                shelves.stalled.push(stream);
                return Ok(());
            }
            None => ("404 Not Found".to_owned(), b"not here".to_vec()),
        };
        drop(shelves);
        write!(
            stream,
            "HTTP/1.1 {head}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        )?;
        stream.write_all(&body[..cut.unwrap_or(body.len())])
    }
}
