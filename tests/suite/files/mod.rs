//! The promise of the file routes: bytes and names come back as they were given, a whole-file
//! write is seen whole or not at all, nothing that is not a plain file can hold a worker, and
//! every refusal leaves what it refused untouched.
//!
//! The server runs on the same machine, so what it did is judged by the file system itself and not
//! by its own answers alone.

mod atomic;
mod comparing;
mod conditions;
mod content;
mod copies;
mod editing;
mod globbing;
mod grepping;
mod links;
mod looking;
mod names;
mod patching;
mod ranges;
mod refusals;
mod special;
mod trees;
mod watching;

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use serde_json::Value;

use crate::fixture::{
    Connection, PATIENCE, Reply, Sandbox, Server, TempDir, can_change_user, is_root, public_copy,
    wait_until,
};
use crate::skip;

/// Where a test of both modes works: a directory on the machine, or the home of a sandbox.
pub struct Place<'a> {
    pub server: &'a Server,
    prefix: String,
    token: Option<String>,
    /// As the test sees it.
    pub directory: PathBuf,
    /// As requests name it.
    base: String,
    pub is_sandbox: bool,
}

impl Place<'_> {
    /// Runs a test on a dedicated machine, and in a sandbox where tests may be a host.
    pub fn each(test: impl Fn(&Place<'_>)) {
        let server = Server::start();
        let dir = TempDir::new();
        test(&Place::machine(&server, &dir));
        if !is_root() {
            skip!("only root can be a host");
        }
        let server = Server::host().start();
        let sandbox = server.sandbox();
        test(&Place::sandbox(&server, &sandbox));
    }

    pub fn sandbox<'a>(server: &'a Server, sandbox: &Sandbox<'_>) -> Place<'a> {
        Place {
            server,
            prefix: sandbox.target(""),
            token: Some(sandbox.token.clone()),
            directory: sandbox.home.clone(),
            base: String::new(),
            is_sandbox: true,
        }
    }

    pub fn machine<'a>(server: &'a Server, dir: &TempDir) -> Place<'a> {
        Place {
            server,
            prefix: "/v1/".to_owned(),
            token: server.token.clone(),
            directory: dir.path().to_owned(),
            base: format!("{}/", dir.path().display()),
            is_sandbox: false,
        }
    }

    pub fn connect(&self) -> Connection {
        let mut connection = self.server.connect();
        connection.token.clone_from(&self.token);
        connection
    }

    /// The sizes of the files in the directory that the server has open, as [`open_files`].
    pub fn open_files(&self) -> Option<Vec<u64>> {
        open_files_of(self.pid(), &self.directory)
    }

    /// The server proper.
    pub fn pid(&self) -> i32 {
        if self.is_sandbox {
            self.server.inner_pid()
        } else {
            self.server.pid()
        }
    }

    /// The request target for a route such as `files/read?path=@a`, where `@` stands for the directory.
    pub fn target(&self, route: &str) -> String {
        format!("{}{}", self.prefix, self.told(route))
    }

    /// A text with the directory for each `@`.
    pub fn told(&self, text: &str) -> String {
        text.replace('@', &self.base)
    }

    pub fn request(&self, method: &str, route: &str, body: &[u8]) -> Reply {
        let target = self.target(route);
        self.connect().request(method, &target, &[], body)
    }

    pub fn get(&self, route: &str) -> Reply {
        self.request("GET", route, b"")
    }

    pub fn put(&self, route: &str, body: &[u8]) -> Reply {
        self.request("PUT", route, body)
    }

    /// A POST whose body may name the directory as `@`.
    pub fn post(&self, route: &str, body: &Value) -> Reply {
        let body = self.told(&body.to_string());
        self.request("POST", route, body.as_bytes())
    }

    /// A path in the directory, as the test sees it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Makes a file that belongs to whom the server acts as.
    pub fn make(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        self.give(&path);
        path
    }

    /// Gives a file, link or directory to whom the server acts as.
    pub fn give(&self, path: &Path) {
        let owner = fs::metadata(&self.directory).unwrap();
        std::os::unix::fs::lchown(path, Some(owner.uid()), Some(owner.gid())).unwrap();
    }
}

const MIB: usize = 1024 * 1024;

/// The routes that take one path, with a method of each.
const PATH_ROUTES: [(&str, &str); 6] = [
    ("GET", "read"),
    ("GET", "stat"),
    ("GET", "list"),
    ("PUT", "write"),
    ("DELETE", "delete"),
    ("POST", "mkdir"),
];

/// A directory of a workspace, in either mode.
struct Site<'a> {
    server: &'a Server,
    prefix: String,
    /// Its path for requests, without a slash at the end.
    base: String,
    /// Where it is on this machine.
    root: PathBuf,
}

/// Runs a test in a directory of a machine and, where this machine can have one, in the home of a sandbox.
fn in_both_modes(test: impl Fn(&Site<'_>)) {
    let server = Server::start();
    let dir = TempDir::new();
    test(&Site {
        server: &server,
        prefix: "/v1".to_owned(),
        base: dir.path().display().to_string(),
        root: dir.path().to_owned(),
    });
    if !is_root() {
        skip!("only root can be a host; the machine was tested");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    test(&Site {
        server: &server,
        prefix: format!("/v1/sandboxes/{}", sandbox.id),
        base: String::new(),
        root: sandbox.home.clone(),
    });
}

impl Site<'_> {
    /// The path of a file in it, for requests.
    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.base)
    }

    fn request(&self, method: &str, route: &str, body: &[u8]) -> Reply {
        let target = format!("{}/files/{route}", self.prefix);
        self.server.request(method, &target, body)
    }

    fn post(&self, route: &str, body: &Value) -> Reply {
        self.request("POST", route, body.to_string().as_bytes())
    }

    /// Writes a file by a request, so that it belongs to the workspace.
    #[track_caller]
    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let route = format!("write?path={}", encode(self.path(name)));
        expect_ok(&self.request("PUT", &route, content.as_ref()));
    }

    fn content(&self, name: &str) -> String {
        String::from_utf8(fs::read(self.root.join(name)).unwrap()).unwrap()
    }
}

/// Percent-encodes everything but the few characters that never mean anything.
fn encode(bytes: impl AsRef<[u8]>) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    for byte in bytes.as_ref() {
        if byte.is_ascii_alphanumeric() || b"/-._~".contains(byte) {
            text.push(char::from(*byte));
        } else {
            write!(text, "%{byte:02X}").unwrap();
        }
    }
    text
}

/// The request target for an operation on `path`; `rest` is further parameters, as `&a=b`.
fn target(route: &str, path: impl AsRef<[u8]>, rest: &str) -> String {
    format!("/v1/files/{route}?path={}{rest}", encode(path))
}

#[track_caller]
fn write(server: &Server, path: impl AsRef<[u8]>, rest: &str, body: &[u8]) -> Value {
    expect_ok(&server.put(&target("write", path, rest), body))
}

#[track_caller]
fn read(server: &Server, path: impl AsRef<[u8]>, rest: &str) -> Vec<u8> {
    let reply = server.get(&target("read", path, rest));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.body
}

#[track_caller]
fn stat(server: &Server, path: impl AsRef<[u8]>, rest: &str) -> Value {
    expect_ok(&server.get(&target("stat", path, rest)))
}

#[track_caller]
fn list(server: &Server, path: impl AsRef<[u8]>, rest: &str) -> Vec<Value> {
    let body = expect_ok(&server.get(&target("list", path, rest)));
    body["entries"].as_array().expect("entries").clone()
}

#[track_caller]
fn delete(server: &Server, path: impl AsRef<[u8]>, rest: &str) -> Value {
    expect_ok(&server.delete(&target("delete", path, rest)))
}

fn moving(server: &Server, from: impl AsRef<[u8]>, to: impl AsRef<[u8]>) -> Reply {
    let target = format!("/v1/files/move?from={}&to={}", encode(from), encode(to));
    server.request("POST", &target, b"")
}

#[track_caller]
fn expect_ok(reply: &Reply) -> Value {
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

#[track_caller]
fn expect_error(reply: &Reply, status: u16, code: &str) {
    assert_eq!(
        (reply.status, reply.code().as_str()),
        (status, code),
        "{}",
        reply.text()
    );
    let message = reply.json()["error"]
        .as_str()
        .expect("an error has a message")
        .to_owned();
    assert!(!message.is_empty());
}

/// A refusal by the client's fault whose exact status nobody relies on.
#[track_caller]
fn expect_refusal(reply: &Reply) {
    assert!(
        (400..500).contains(&reply.status),
        "{} {}",
        reply.status,
        reply.text()
    );
    reply.code();
}

/// Sends a request of which the server may want only a part: it answers and closes, and what is
/// still on its way then is nobody's.
pub fn send_what_is_wanted(server: &Server, method: &str, target: &str, body: &[u8]) -> Reply {
    let mut connection = begin(server, method, target, body.len());
    connection.stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let _ = connection.stream.write_all(body);
    connection.read_reply_to(method)
}

/// Sends the head of a request whose body of `length` bytes is to follow.
fn begin(server: &Server, method: &str, target: &str, length: usize) -> Connection {
    let mut connection = server.connect();
    connection.send_request(
        method,
        target,
        &[("Content-Length", &length.to_string())],
        b"",
    );
    connection
}

/// The words of a row of a table.
#[track_caller]
fn words<const N: usize>(row: &str) -> [&str; N] {
    let words: Vec<&str> = row.split_whitespace().collect();
    words
        .try_into()
        .unwrap_or_else(|words| panic!("not {N} words: {words:?}"))
}

fn mode_of(path: impl AsRef<Path>) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn chmod(path: impl AsRef<Path>, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn mkfifo(path: impl AsRef<Path>) {
    nix::unistd::mkfifo(path.as_ref(), Mode::from_bits_truncate(0o644)).unwrap();
}

/// The sizes of the files under `directory` that the server has open, named or not. `None` where
/// the test may not look (the server hides its descriptors from everybody but root).
fn open_files(server: &Server, directory: &Path) -> Option<Vec<u64>> {
    open_files_of(server.pid(), directory)
}

fn open_files_of(pid: i32, directory: &Path) -> Option<Vec<u64>> {
    // In a container the directory can be read and the links in it cannot.
    fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    Some(
        descriptors
            .flatten()
            .filter(|entry| {
                fs::read_link(entry.path()).is_ok_and(|link| link.starts_with(directory))
            })
            .filter_map(|entry| Some(fs::metadata(entry.path()).ok()?.len()))
            .collect(),
    )
}

/// Waits until the server has put at least `bytes` of an upload into a file under `directory`.
fn wait_for_upload(server: &Server, directory: &Path, bytes: u64) {
    wait_until("the upload is being written", PATIENCE, || {
        open_files(server, directory)
            .unwrap()
            .into_iter()
            .any(|size| size >= bytes)
    });
}

/// Waits until the server holds no file under `directory` any more.
fn wait_for_release(server: &Server, directory: &Path) {
    wait_until("the upload is given up", PATIENCE, || {
        open_files(server, directory).unwrap().is_empty()
    });
}

/// Reads a file over and over, as another program would, and judges every reading.
struct Watcher {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<usize>,
}

impl Watcher {
    fn start(path: impl Into<PathBuf>, allowed: Vec<Vec<u8>>) -> Self {
        let path = path.into();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut readings = 0;
            loop {
                let last = stopped.load(Ordering::SeqCst);
                let content = fs::read(&path).expect("the file is always there");
                assert!(
                    allowed.contains(&content),
                    "reading {readings} saw {} bytes that were never the content",
                    content.len()
                );
                readings += 1;
                if last {
                    return readings;
                }
            }
        });
        Self { stop, thread }
    }

    /// Stops after one more reading; panics if any was wrong.
    fn finish(self) -> usize {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap()
    }
}

/// Does `work` over and over in another thread until `body` is over, however it ends.
fn meanwhile<T>(mut work: impl FnMut() + Send, body: impl FnOnce() -> T) -> T {
    struct StopOnDrop<'a>(&'a AtomicBool);
    impl Drop for StopOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                work();
            }
        });
        let _stop = StopOnDrop(&stop);
        body()
    })
}

/// Something mounted for a test; unmounted with the value.
pub struct Mount(PathBuf);

impl Mount {
    pub fn tmpfs(at: &Path, options: &str) -> Option<Self> {
        Self::new(at, &["-t", "tmpfs", "-o", options, "tmpfs"])
    }

    /// An overlay of a directory, as containers have theirs of an image; `parts` gets its own.
    pub fn overlay(lower: &str, parts: &str, at: &Path) -> Option<Self> {
        let (upper, work) = (format!("{parts}/upper"), format!("{parts}/work"));
        fs::create_dir_all(&upper).ok()?;
        fs::create_dir_all(&work).ok()?;
        let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        Self::new(at, &["-t", "overlay", "-o", &options, "overlay"])
    }

    fn bind(from: &Path, at: &Path) -> Option<Self> {
        Self::new(at, &["--bind", from.to_str()?])
    }

    /// The same by a program in user space, as buckets and other machines' disks are mounted: there a
    /// file must have a name from the start.
    fn in_user_space(from: &Path, at: &Path) -> Option<Self> {
        let status = Command::new("bindfs").arg(from).arg(at).status();
        status.ok()?.success().then(|| Self(at.to_owned()))
    }

    fn new(at: &Path, arguments: &[&str]) -> Option<Self> {
        let output = Command::new("mount")
            .args(arguments)
            .arg(at)
            .output()
            .ok()?;
        output.status.success().then(|| Self(at.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Removes a tree that is too deep for paths, however the test ends.
struct DeepTree(PathBuf);

impl DeepTree {
    /// Makes so many directories within a first one, deeper than any path can say. `fill` puts files into each, from above.
    fn make(path: PathBuf, levels: usize, mut fill: impl FnMut(usize, &OwnedFd)) -> Self {
        fs::create_dir(&path).unwrap();
        let mut level = OwnedFd::from(File::open(&path).unwrap());
        for number in 0..levels {
            fill(number, &level);
            mkdirat(&level, "directory", Mode::S_IRWXU).unwrap();
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
            level = openat(&level, "directory", flags, Mode::empty()).unwrap();
        }
        fill(levels, &level);
        Self(path)
    }
}

impl Drop for DeepTree {
    fn drop(&mut self) {
        if self.0.exists() {
            let _ = Command::new("rm").arg("-rf").arg(&self.0).status();
        }
    }
}

/// The user of [`unprivileged`].
const NOBODY: u32 = 65534;

/// A server without privileges; `None` where a test may not become somebody else.
fn unprivileged(dir: &TempDir) -> Option<Server> {
    if !can_change_user() {
        return None;
    }
    // The binary may lie where nobody else can look.
    let binary = public_copy(dir);
    let start = "cd / && exec setpriv --reuid=65534 --regid=65534 --clear-groups \"$0\"";
    Some(
        Server::builder()
            .wrapped_in(&["sh", "-c", start, &binary])
            .start(),
    )
}

/// A directory that the unprivileged server may do everything in.
fn his_directory(dir: &TempDir, name: &str) -> String {
    let path = dir.join(name);
    fs::create_dir(&path).unwrap();
    std::os::unix::fs::chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
    path
}
