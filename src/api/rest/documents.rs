//! Every JSON document that this door answers with, key by key.

use std::io::{Cursor, Read};
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use crate::command::CommandLine;
use crate::files::name::{FilePath, show};
use crate::files::{Entry, FileKind, Page};
use crate::host::Sandbox;
use crate::machine::Machine;
use crate::ports::{Listener, Port};
use crate::process::ring::Stream;
use crate::process::{Exit, Process, Reason};
use crate::sys::Ending;

/// The version of the contract with clients.
pub(super) const PROTOCOL: u32 = 3;

/// `GET /health`.
#[derive(Serialize)]
pub(super) struct Health {
    pub(super) status: &'static str,
    pub(super) version: &'static str,
    pub(super) protocol: u32,
    pub(super) uptime_ms: u128,
    pub(super) mode: &'static str,
    pub(super) sandboxes: usize,
    pub(super) isolation: Isolation,
}

/// The isolation layers that are enforced.
#[derive(Serialize)]
pub(super) struct Isolation {
    landlock_abi: u32,
    layers: Vec<&'static str>,
}

impl Isolation {
    /// Describes the isolation of a machine's sandboxes.
    pub(super) fn of(machine: &Machine) -> Self {
        Self {
            landlock_abi: machine.landlock_abi,
            layers: machine.layers(),
        }
    }
}

/// The answer to a request for sandboxes.
#[derive(Serialize)]
pub(super) struct CreatedDocument {
    pub(super) sandboxes: Vec<SandboxDocument>,
    /// Number of sandboxes that exceeded the capacity.
    pub(super) rejected: usize,
}

/// A sandbox.
#[derive(Serialize)]
pub(super) struct SandboxDocument {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
    uid: u32,
    home: String,
    created_at_ms: u64,
    idle_timeout_secs: Option<u64>,
    max_procs: u64,
    max_mem_mb: Option<u64>,
    isolation: Isolation,
}

impl SandboxDocument {
    /// Describes a sandbox; its token is for the client that made it only.
    pub(super) fn of(sandbox: &Sandbox, isolation: Isolation, token: Option<String>) -> Self {
        Self {
            id: sandbox.id.clone(),
            token,
            uid: sandbox.user.uid,
            home: sandbox.home.to_string_lossy().into_owned(),
            created_at_ms: sandbox.created_at_ms,
            idle_timeout_secs: sandbox.idle_timeout.map(|limit| limit.as_secs()),
            max_procs: sandbox.max_processes,
            max_mem_mb: sandbox.max_memory.map(|bytes| bytes >> 20),
            isolation,
        }
    }
}

/// A process.
#[derive(Serialize)]
pub(super) struct ProcessDocument {
    id: String,
    pid: i32,
    cmd: Value,
    tag: Option<String>,
    started_at_ms: u64,
    running: bool,
    exit_code: Option<i32>,
    signal: Option<i32>,
    reason: Option<&'static str>,
    duration_ms: Option<u64>,
    background: bool,
    stdout_bytes: u64,
    stderr_bytes: u64,
}

impl ProcessDocument {
    /// Describes the present state of a process.
    pub(super) fn of(process: &Process) -> Self {
        let exit = process.exit();
        let (exit_code, signal) = exit.as_ref().map_or((None, None), codes);
        Self {
            id: process.id.clone(),
            pid: process.pid,
            cmd: match &process.command {
                CommandLine::Shell(script) => json!(script),
                CommandLine::Program(words) => json!(words),
            },
            tag: process.tag.clone(),
            started_at_ms: process.started_at_ms,
            running: exit.is_none(),
            exit_code,
            signal,
            reason: exit.map(|exit| reason(exit.reason)),
            duration_ms: exit.map(|exit| milliseconds(exit.duration)),
            background: process.is_background(),
            stdout_bytes: process.written(Stream::Stdout),
            stderr_bytes: process.written(Stream::Stderr),
        }
    }
}

/// A process at the end of a wait, which is its exit event too: a client may read it as either.
#[derive(Serialize)]
pub(super) struct WaitDocument {
    event: &'static str,
    timed_out: Option<bool>,
    #[serde(flatten)]
    process: ProcessDocument,
}

impl WaitDocument {
    /// Describes a process that has ended, or still runs when the wait's timeout has passed.
    pub(super) fn of(process: &Process) -> Self {
        let process = ProcessDocument::of(process);
        Self {
            event: if process.running { "running" } else { "exit" },
            timed_out: process.reason.map(|reason| reason == TIMEOUT),
            process,
        }
    }
}

/// The last event of a stream.
#[derive(Serialize)]
pub(super) struct ExitEvent {
    event: &'static str,
    exit_code: Option<i32>,
    signal: Option<i32>,
    timed_out: bool,
    duration_ms: u64,
    reason: &'static str,
}

impl ExitEvent {
    /// Describes how a process ended.
    pub(super) fn of(exit: &Exit) -> Self {
        let (exit_code, signal) = codes(exit);
        Self {
            event: "exit",
            exit_code,
            signal,
            timed_out: exit.reason == Reason::Timeout,
            duration_ms: milliseconds(exit.duration),
            reason: reason(exit.reason),
        }
    }
}

/// The exit code, or the signal that ended the process.
fn codes(exit: &Exit) -> (Option<i32>, Option<i32>) {
    match exit.ending {
        Ending::Exited(code) => (Some(code), None),
        Ending::Signaled(signal) => (None, Some(signal)),
        Ending::Unknown => (None, None),
    }
}

const TIMEOUT: &str = "timeout";

fn reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Exited => "exited",
        Reason::Signaled => "signaled",
        Reason::Timeout => TIMEOUT,
        Reason::OutOfMemory => "oom",
        Reason::Killed => "killed",
        Reason::Deleted => "deleted",
        Reason::Disconnected => "disconnected",
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A file or directory. Without detail it has exactly the keys of the clients' own type, whose
/// constructor fails on any other key.
#[derive(Serialize)]
pub(super) struct EntryDocument {
    name: String,
    path: String,
    #[serde(rename = "type")]
    kind: &'static str,
    size: u64,
    mtime_ms: Option<i64>,
    mode: String,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    detail: Option<Detail>,
}

#[derive(Serialize)]
struct Detail {
    name_b64: String,
    uid: u32,
    gid: u32,
    inode: u64,
    nlink: u64,
    kind: &'static str,
    link_target: Option<String>,
}

impl EntryDocument {
    /// Describes an entry. A client can use `path` to name it.
    pub(super) fn of(entry: &Entry, path: String, detail: bool) -> Self {
        Self {
            name: show(&entry.name),
            path,
            kind: match entry.kind {
                FileKind::Directory => "dir",
                FileKind::Link => "symlink",
                _ => "file",
            },
            size: entry.size,
            mtime_ms: entry.modified_ms,
            mode: format!("{:o}", entry.mode),
            detail: detail.then(|| Detail {
                name_b64: crate::codec::base64::encode(&entry.name),
                uid: entry.uid,
                gid: entry.gid,
                inode: entry.inode,
                nlink: entry.links,
                kind: match entry.kind {
                    FileKind::Regular => "file",
                    FileKind::Directory => "dir",
                    FileKind::Link => "symlink",
                    FileKind::Pipe => "fifo",
                    FileKind::Socket => "socket",
                    FileKind::CharacterDevice => "char",
                    FileKind::BlockDevice => "block",
                },
                link_target: entry.target.as_deref().map(show),
            }),
        }
    }
}

/// Bytes of a page that are written before they are sent.
const PAGE_PIECE_BYTES: usize = 64 * 1024;

/// One page of a directory: `{"entries": [...], "next": ...}`, written piece by piece as it is read, so
/// that it takes no more memory than the names.
pub(super) struct PageDocument {
    page: Page,
    path: FilePath,
    detail: bool,
    piece: Cursor<Vec<u8>>,
    has_ended: bool,
}

impl PageDocument {
    /// Describes a page of the directory `path`.
    pub(super) fn new(page: Page, path: FilePath, detail: bool) -> Self {
        Self {
            page,
            path,
            detail,
            piece: Cursor::new(b"{\"entries\":[".to_vec()),
            has_ended: false,
        }
    }

    fn next_piece(&mut self) -> std::io::Result<()> {
        let is_first = self.piece.get_ref().ends_with(b"[");
        let mut separator = if is_first { "" } else { "," };
        let mut piece = std::mem::take(self.piece.get_mut());
        piece.clear();
        while piece.len() < PAGE_PIECE_BYTES {
            let Some(entry) = self.page.next() else {
                piece.extend_from_slice(b"],\"next\":");
                serde_json::to_writer(&mut piece, &self.page.after.as_deref().map(show))?;
                piece.extend_from_slice(b"}\n");
                self.has_ended = true;
                break;
            };
            piece.extend_from_slice(separator.as_bytes());
            separator = ",";
            let path = self.path.join(&show(&entry.name));
            serde_json::to_writer(&mut piece, &EntryDocument::of(&entry, path, self.detail))?;
        }
        self.piece = Cursor::new(piece);
        Ok(())
    }
}

impl Read for PageDocument {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.piece.read(buffer)?;
        if read > 0 || self.has_ended {
            return Ok(read);
        }
        self.next_piece()?;
        self.piece.read(buffer)
    }
}

/// A port as in a URL: a number, or the name of a socket.
fn port_value(port: &Port) -> Value {
    match port.number() {
        Some(number) => json!(number),
        None => json!(port.to_string()),
    }
}

/// A listening socket.
#[derive(Serialize)]
pub(super) struct ListenerDocument<'a> {
    port: Value,
    address: &'a str,
    pid: Option<i32>,
    command: Option<&'a str>,
}

impl<'a> ListenerDocument<'a> {
    /// Describes a listening socket.
    pub(super) fn of(listener: &'a Listener) -> Self {
        let process = listener.process.as_ref();
        Self {
            port: port_value(&listener.port),
            address: &listener.address,
            pid: process.map(|owner| owner.pid),
            command: process.map(|owner| owner.command.as_str()),
        }
    }
}

/// Whether something listens on a port.
#[derive(Serialize)]
pub(super) struct PortDocument {
    port: Value,
    listening: bool,
}

impl PortDocument {
    /// Describes a port at the end of a wait.
    pub(super) fn of(port: &Port, listening: bool) -> Self {
        Self {
            port: port_value(port),
            listening,
        }
    }
}
