//! Every JSON document that this door answers with, key by key.

use std::borrow::Cow;
use std::io::{Cursor, Read};
use std::time::Duration;

use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use super::network::PostureDocument;
use crate::codec::shortened;
use crate::command::CommandLine;
use crate::files::name::{FilePath, show};
use crate::files::{Entry, FileKind, Packed, Page, Skipped, Unpacked};
use crate::host::Sandbox;
use crate::http::{Body, Response};
use crate::machine::Machine;
use crate::ports::{Listener, Port};
use crate::process::ring::Stream;
use crate::process::{Exit, Process, Reason, Terminal};
use crate::sys::Ending;
use crate::workspace::{Edited, FileChange, Globbed, Patched, Venv};

/// The version of the contract with clients.
pub(in crate::api) const PROTOCOL: u32 = 3;

/// `GET /health`.
#[derive(Serialize)]
pub(in crate::api) struct Health<'a> {
    pub(in crate::api) status: &'static str,
    pub(in crate::api) version: &'static str,
    pub(in crate::api) protocol: u32,
    pub(in crate::api) uptime_ms: u128,
    pub(in crate::api) mode: &'static str,
    pub(in crate::api) sandboxes: usize,
    pub(in crate::api) isolation: &'a RawValue,
}

/// `GET /v1/access`.
#[derive(Serialize)]
pub(in crate::api) struct AccessDocument {
    pub(in crate::api) mode: &'static str,
    /// `server`, `sandbox` or `nothing`.
    pub(in crate::api) opens: &'static str,
    /// The id, if it opens one sandbox.
    pub(in crate::api) sandbox: Option<String>,
}

/// What is enforced on every sandbox, and what can be chosen.
#[derive(Serialize)]
pub(in crate::api) struct MachineIsolation {
    #[serde(flatten)]
    always: Isolation,
    postures: Vec<&'static str>,
    isolations: Vec<&'static str>,
    /// Of sandboxes that choose none.
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<&'static str>,
    limits: Vec<&'static str>,
}

impl MachineIsolation {
    /// Describes what a machine can do, which does not change: to keep.
    pub(in crate::api) fn of(machine: &Machine) -> Box<RawValue> {
        let isolation = Self {
            always: Isolation::of(machine),
            postures: machine.postures(),
            isolations: machine.isolations(),
            default: machine.default_isolation(),
            limits: machine.limits(),
        };
        to_raw_value(&isolation).expect("names and numbers are JSON")
    }
}

/// The isolation layers that are enforced.
#[derive(Clone, Serialize)]
pub(in crate::api) struct Isolation {
    landlock_abi: u32,
    layers: Vec<&'static str>,
}

impl Isolation {
    /// Describes the isolation of a machine's sandboxes.
    pub(in crate::api) fn of(machine: &Machine) -> Self {
        Self {
            landlock_abi: machine.landlock_abi,
            layers: machine.layers(),
        }
    }
}

/// The answer to a request for sandboxes.
#[derive(Serialize)]
pub(in crate::api) struct CreatedDocument {
    pub(in crate::api) sandboxes: Vec<SandboxDocument>,
    /// Number of sandboxes that were not made.
    pub(in crate::api) rejected: usize,
    /// Why they were not, in a word and in a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::api) rejected_code: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::api) rejected_reason: Option<String>,
}

/// A sandbox.
#[derive(Serialize)]
pub(in crate::api) struct SandboxDocument {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
    uid: u32,
    home: String,
    created_at_ms: u64,
    idle_timeout_secs: Option<u64>,
    max_procs: u64,
    max_mem_mb: Option<u64>,
    max_total_mem_mb: Option<u64>,
    max_cpu: Option<f64>,
    limits: LimitsDocument,
    network: PostureDocument,
    tcp_ports: Vec<u16>,
    filesystem: FilesystemDocument,
    restrictions: Vec<&'static str>,
    isolation: SandboxIsolation,
}

/// What keeps the limits of a sandbox as a whole; those that it does not have are absent.
#[derive(Serialize)]
struct LimitsDocument {
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<&'static str>,
    processes: &'static str,
}

/// The paths that commands reach.
#[derive(Serialize)]
struct FilesystemDocument {
    read_only: Vec<String>,
    read_write: Vec<String>,
}

/// The isolation of a sandbox.
#[derive(Serialize)]
struct SandboxIsolation {
    #[serde(flatten)]
    layers: Isolation,
    mode: &'static str,
}

impl SandboxDocument {
    /// Describes a sandbox; its token is for the client that made it only.
    pub(in crate::api) fn of(sandbox: &Sandbox, landlock_abi: u32, token: Option<String>) -> Self {
        let limits = &sandbox.limits;
        Self {
            id: sandbox.id.clone(),
            token,
            uid: sandbox.user.uid,
            home: sandbox.home.to_string_lossy().into_owned(),
            created_at_ms: sandbox.created_at_ms,
            idle_timeout_secs: sandbox.idle_timeout.map(|limit| limit.as_secs()),
            max_procs: sandbox.max_processes,
            max_mem_mb: sandbox.max_memory.map(|bytes| bytes >> 20),
            max_total_mem_mb: limits.asked().memory.map(|bytes| bytes >> 20),
            max_cpu: limits.asked().cpu.map(|time| time.as_secs_f64()),
            limits: LimitsDocument {
                memory: limits.memory_by(),
                cpu: limits.cpu_by(),
                processes: limits.processes_by(),
            },
            network: PostureDocument::of(&sandbox.network),
            tcp_ports: sandbox.tcp_ports().to_vec(),
            filesystem: FilesystemDocument {
                read_only: sandbox.read_only_paths(),
                read_write: sandbox.read_write_paths(),
            },
            restrictions: sandbox.restrictions(),
            isolation: SandboxIsolation {
                layers: Isolation {
                    landlock_abi,
                    layers: sandbox.layers(),
                },
                mode: sandbox.isolation().name(),
            },
        }
    }
}

/// A command as the client sent it, or its beginning.
#[derive(Serialize)]
#[serde(untagged)]
enum CommandText<'a> {
    Script(Cow<'a, str>),
    Program(Vec<Cow<'a, str>>),
}

/// The fields of a request that name what is executed; those of the other kind are absent.
#[derive(Default, Serialize)]
struct CommandDocument<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    cmd: Option<CommandText<'a>>,
    /// Absent if the command is whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    cmd_truncated: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    language: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Vec<Cow<'a, str>>>,
    /// Absent if code and arguments are whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    code_truncated: Option<bool>,
}

/// Most bytes of a command in a list. The rest is in the document of the process.
const LISTED_COMMAND_BYTES: usize = 16 * 1024;

/// Takes texts while there is room for them.
struct Texts {
    left: usize,
    is_cut: bool,
}

impl Texts {
    /// The text, or its beginning with a mark.
    fn take<'a>(&mut self, text: &'a str) -> Cow<'a, str> {
        if text.len() <= self.left {
            self.left -= text.len();
            return text.into();
        }
        self.is_cut = true;
        shortened(text, std::mem::take(&mut self.left))
    }

    /// The texts that there is room for. Each counts one byte more, because many may be empty.
    fn take_all<'a>(&mut self, texts: &'a [String]) -> Vec<Cow<'a, str>> {
        let mut taken = Vec::new();
        for text in texts {
            if self.left == 0 {
                self.is_cut = true;
                break;
            }
            taken.push(self.take(text));
            self.left = self.left.saturating_sub(1);
        }
        taken
    }
}

impl<'a> CommandDocument<'a> {
    /// The whole command or only its beginning.
    fn of(command: &'a CommandLine, is_whole: bool) -> Self {
        let mut texts = Texts {
            left: if is_whole {
                usize::MAX
            } else {
                LISTED_COMMAND_BYTES
            },
            is_cut: false,
        };
        let cmd = match command {
            CommandLine::Shell(script) => CommandText::Script(texts.take(script)),
            CommandLine::Program(words) => CommandText::Program(texts.take_all(words)),
            CommandLine::Code {
                language,
                code,
                arguments,
            } => {
                return Self {
                    code: Some(texts.take(code)),
                    language: Some(language.name()),
                    args: Some(texts.take_all(arguments)),
                    code_truncated: texts.is_cut.then_some(true),
                    ..Self::default()
                };
            }
        };
        Self {
            cmd: Some(cmd),
            cmd_truncated: texts.is_cut.then_some(true),
            ..Self::default()
        }
    }
}

/// A process.
#[derive(Serialize)]
pub(in crate::api) struct ProcessDocument<'a> {
    id: &'a str,
    pid: i32,
    #[serde(flatten)]
    command: CommandDocument<'a>,
    tag: Option<&'a str>,
    started_at_ms: u64,
    running: bool,
    exit_code: Option<i32>,
    signal: Option<i32>,
    reason: Option<&'static str>,
    duration_ms: Option<u64>,
    background: bool,
    pty: Option<TerminalDocument<'a>>,
    stdout_bytes: u64,
    stderr_bytes: u64,
}

impl<'a> ProcessDocument<'a> {
    /// Describes the present state of a process, with its whole command or only the beginning.
    pub(in crate::api) fn of(process: &'a Process, is_whole: bool) -> Self {
        let exit = process.exit();
        let (exit_code, signal) = exit.map_or((None, None), |exit| codes(exit.ending));
        Self {
            id: &process.id,
            pid: process.pid,
            command: CommandDocument::of(&process.command, is_whole),
            tag: process.tag.as_deref(),
            started_at_ms: process.started_at_ms,
            running: exit.is_none(),
            exit_code,
            signal,
            reason: exit.map(|exit| reason(exit.reason)),
            duration_ms: exit.map(|exit| milliseconds(exit.duration)),
            background: process.is_background(),
            pty: process.terminal().ok().map(TerminalDocument::of),
            stdout_bytes: process.written(Stream::Stdout),
            stderr_bytes: process.written(Stream::Stderr),
        }
    }
}

/// A virtual environment.
#[derive(Serialize)]
pub(in crate::api) struct VenvDocument<'a> {
    path: &'a str,
    python: String,
    created: bool,
}

impl<'a> VenvDocument<'a> {
    /// Describes a virtual environment and its interpreter.
    pub(in crate::api) fn of(venv: &'a Venv) -> Self {
        Self {
            path: &venv.path,
            python: format!("{}/bin/python", venv.path),
            created: venv.created,
        }
    }
}

/// The terminal of a process.
#[derive(Serialize)]
struct TerminalDocument<'a> {
    rows: u16,
    cols: u16,
    term: &'a str,
}

impl<'a> TerminalDocument<'a> {
    fn of(terminal: &'a Terminal) -> Self {
        let size = terminal.size();
        Self {
            rows: size.rows(),
            cols: size.columns(),
            term: terminal.name(),
        }
    }
}

/// A process at the end of a wait, which is its exit event too: a client may read it as either.
#[derive(Serialize)]
pub(in crate::api) struct WaitDocument<'a> {
    event: &'static str,
    timed_out: Option<bool>,
    #[serde(flatten)]
    process: ProcessDocument<'a>,
}

impl<'a> WaitDocument<'a> {
    /// Describes a process that has ended, or still runs when the wait's timeout has passed.
    pub(in crate::api) fn of(process: &'a Process, is_whole: bool) -> Self {
        let process = ProcessDocument::of(process, is_whole);
        Self {
            event: if process.running { "running" } else { "exit" },
            timed_out: process.reason.map(|reason| reason == TIMEOUT),
            process,
        }
    }
}

/// The last event of a stream.
#[derive(Serialize)]
pub(in crate::api) struct ExitEvent {
    event: &'static str,
    pub(in crate::api) exit_code: Option<i32>,
    pub(in crate::api) signal: Option<i32>,
    pub(in crate::api) timed_out: bool,
    duration_ms: u64,
    pub(in crate::api) reason: &'static str,
}

impl ExitEvent {
    /// Describes how a process ended.
    pub(in crate::api) fn of(exit: &Exit) -> Self {
        let (exit_code, signal) = codes(exit.ending);
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
pub(super) fn codes(ending: Ending) -> (Option<i32>, Option<i32>) {
    match ending {
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
        Reason::MemoryLimit => "memory_limit",
        Reason::Killed => "killed",
        Reason::Deleted => "deleted",
        Reason::Disconnected => "disconnected",
    }
}

pub(super) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A file or directory. Without detail it has exactly the keys of the clients' own type, whose
/// constructor fails on any other key.
#[derive(Serialize)]
pub(in crate::api) struct EntryDocument {
    name: String,
    path: String,
    #[serde(rename = "type")]
    kind: &'static str,
    size: u64,
    mtime_ms: Option<i64>,
    mode: String,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    detail: Option<Detail>,
    /// If it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::api) sha256: Option<String>,
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
    pub(in crate::api) fn of(entry: &Entry, path: String, detail: bool) -> Self {
        Self {
            name: show(&entry.name),
            path,
            kind: type_word(entry.kind),
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
            sha256: None,
        }
    }
}

/// The type of a file in clients' words.
pub(in crate::api) fn type_word(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Directory => "dir",
        FileKind::Link => "symlink",
        _ => "file",
    }
}

/// A document as text.
pub(in crate::api) fn to_json(document: &impl Serialize) -> Vec<u8> {
    // Fails only for maps whose keys are not strings; no document has any.
    serde_json::to_vec(document).unwrap_or_default()
}

/// Bytes of a list that are written before they are sent.
const PIECE_BYTES: usize = 32 * 1024;

/// A document with a list, written piece by piece as the client takes it, so that it takes no more memory
/// than its items.
pub(in crate::api) struct ListDocument<F> {
    /// Appends the next item; false if there is none.
    append_next: F,
    tail: Vec<u8>,
    is_empty: bool,
    has_ended: bool,
    piece: Cursor<Vec<u8>>,
}

impl<F> ListDocument<F>
where
    F: FnMut(&mut Vec<u8>) -> serde_json::Result<bool> + Send + 'static,
{
    /// A JSON array.
    pub(in crate::api) fn array(append_next: F) -> Self {
        Self::new(b"[", append_next, b"]\n".to_vec())
    }

    /// A list between the other parts of a document.
    fn new(head: &[u8], append_next: F, tail: Vec<u8>) -> Self {
        Self {
            append_next,
            tail,
            is_empty: true,
            has_ended: false,
            piece: Cursor::new(head.to_vec()),
        }
    }

    /// The answer with this document: at once if it is small.
    pub(in crate::api) fn respond(mut self) -> Response {
        // Writing to memory does not fail, and neither does serializing a document.
        let _ = self.append_piece();
        let body = if self.has_ended {
            Body::Bytes(self.piece.into_inner())
        } else {
            Body::Reader(Box::new(self))
        };
        Response::new(200, body).with_header("Content-Type", "application/json")
    }

    fn append_piece(&mut self) -> std::io::Result<()> {
        let piece = self.piece.get_mut();
        while piece.len() < PIECE_BYTES {
            let start = piece.len();
            if !self.is_empty {
                piece.push(b',');
            }
            if !(self.append_next)(piece)? {
                piece.truncate(start);
                piece.append(&mut self.tail);
                self.has_ended = true;
                break;
            }
            self.is_empty = false;
        }
        Ok(())
    }
}

impl<F> Read for ListDocument<F>
where
    F: FnMut(&mut Vec<u8>) -> serde_json::Result<bool> + Send + 'static,
{
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.piece.read(buffer)?;
        if read > 0 || self.has_ended {
            return Ok(read);
        }
        self.piece.get_mut().clear();
        self.piece.set_position(0);
        self.append_piece()?;
        self.piece.read(buffer)
    }
}

/// One page of the directory `path`: `{"entries": [...], "next": ...}`.
pub(in crate::api) fn page_response(mut page: Page, path: FilePath, detail: bool) -> Response {
    let next = page.after.as_deref().map(show);
    let tail = format!("],\"next\":{}}}\n", json!(next)).into_bytes();
    let append_next = move |out: &mut Vec<u8>| {
        let Some(entry) = page.next() else {
            return Ok(false);
        };
        let path = path.join(&show(&entry.name));
        serde_json::to_writer(out, &EntryDocument::of(&entry, path, detail)).map(|()| true)
    };
    ListDocument::new(b"{\"entries\":[", append_next, tail).respond()
}

/// Where a search by names goes on; `None` if there is no more.
pub(in crate::api) fn next_of_glob(found: &Globbed, is_by_name: bool) -> Option<String> {
    let last = found.entries.last().filter(|_| found.has_more)?;
    let shown = show(&last.moment.path);
    Some(if is_by_name {
        shown
    } else {
        format!("{}:{shown}", last.moment.modified)
    })
}

/// What a search by names found: `{"entries": [...], "next": ...}`.
pub(in crate::api) fn glob_response(found: Globbed, path: FilePath, is_by_name: bool) -> Response {
    let next = next_of_glob(&found, is_by_name);
    let tail = format!("],\"next\":{}}}\n", json!(next)).into_bytes();
    let Globbed {
        entries, charge, ..
    } = found;
    let mut entries = entries.into_iter();
    let append_next = move |out: &mut Vec<u8>| {
        let Some(found) = entries.next() else {
            return Ok(false);
        };
        let path = path.below(&show(&found.moment.path));
        serde_json::to_writer(out, &EntryDocument::of(&found.entry, path, false)).map(|()| true)
    };
    ListDocument::new(b"{\"entries\":[", append_next, tail)
        .respond()
        .holding(charge)
}

/// What an edit did.
#[derive(Serialize)]
pub(in crate::api) struct EditDocument<'a> {
    path: String,
    replaced: usize,
    size: u64,
    sha256: String,
    diff: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    diff_truncated: Option<bool>,
}

impl<'a> EditDocument<'a> {
    /// Describes an edit of the file `path`.
    pub(in crate::api) fn of(path: &FilePath, edited: &'a Edited) -> Self {
        Self {
            path: path.to_string(),
            replaced: edited.replaced,
            size: edited.size,
            sha256: edited.sha256.to_string(),
            diff: String::from_utf8_lossy(&edited.diff),
            diff_truncated: edited.diff_is_cut.then_some(true),
        }
    }
}

/// What a patch did.
#[derive(Serialize)]
pub(in crate::api) struct PatchDocument<'a> {
    files: Vec<PatchedDocument<'a>>,
}

impl<'a> PatchDocument<'a> {
    /// Describes what was done to these files.
    pub(in crate::api) fn of(patched: &'a [Patched]) -> Self {
        let files = patched.iter().map(PatchedDocument::of).collect();
        Self { files }
    }
}

/// What it did to a file.
#[derive(Serialize)]
struct PatchedDocument<'a> {
    path: &'a str,
    change: &'static str,
    hunks: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    moved: Option<&'a [i64]>,
}

impl<'a> PatchedDocument<'a> {
    fn of(patched: &'a Patched) -> Self {
        let is_moved = patched.moved.iter().any(|lines| *lines != 0);
        Self {
            path: &patched.path,
            change: match patched.change {
                FileChange::Created => "created",
                FileChange::Modified => "modified",
                FileChange::Deleted => "deleted",
                FileChange::Renamed => "renamed",
                FileChange::Copied => "copied",
            },
            hunks: patched.moved.len(),
            from: patched.from.as_deref(),
            moved: is_moved.then_some(&patched.moved),
        }
    }
}

/// What an archive has, or what was made of it.
#[derive(Serialize)]
pub(in crate::api) struct ArchiveDocument {
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    files: u64,
    dirs: u64,
    links: u64,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    changed: Option<u64>,
    skipped: Vec<SkippedDocument>,
    skipped_total: u64,
}

impl ArchiveDocument {
    /// Describes what an archive has.
    pub(in crate::api) fn packed(done: &Packed) -> Self {
        Self {
            path: None,
            files: done.files,
            dirs: done.directories,
            links: done.links,
            bytes: done.bytes,
            changed: Some(done.changed),
            skipped: SkippedDocument::all(&done.skipped),
            skipped_total: done.skipped_total,
        }
    }

    /// Describes what was made of an archive beneath `path`.
    pub(in crate::api) fn unpacked(path: &FilePath, done: &Unpacked) -> Self {
        Self {
            path: Some(path.to_string()),
            files: done.files,
            dirs: done.directories,
            links: done.links,
            bytes: done.bytes,
            changed: None,
            skipped: SkippedDocument::all(&done.skipped),
            skipped_total: done.skipped_total,
        }
    }
}

#[derive(Serialize)]
struct SkippedDocument {
    name: String,
    reason: &'static str,
}

impl SkippedDocument {
    fn all(files: &[Skipped]) -> Vec<Self> {
        let document = |file: &Skipped| Self {
            name: show(&file.name),
            reason: file.reason.word(),
        };
        files.iter().map(document).collect()
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
pub(in crate::api) struct ListenerDocument<'a> {
    port: Value,
    address: &'a str,
    pid: Option<i32>,
    command: Option<&'a str>,
}

impl<'a> ListenerDocument<'a> {
    /// Describes a listening socket.
    pub(in crate::api) fn of(listener: &'a Listener) -> Self {
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
pub(in crate::api) struct PortDocument {
    port: Value,
    listening: bool,
}

impl PortDocument {
    /// Describes a port at the end of a wait.
    pub(in crate::api) fn of(port: &Port, listening: bool) -> Self {
        Self {
            port: port_value(port),
            listening,
        }
    }
}

/// An address that leads to a port without a token.
#[derive(Serialize)]
pub(in crate::api) struct TicketDocument {
    port: Value,
    path: String,
}

impl TicketDocument {
    /// Describes a ticket for a port.
    pub(in crate::api) fn of(port: &Port, ticket: &str) -> Self {
        Self {
            port: port_value(port),
            path: format!("/t/{ticket}/"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters_and_marked() {
        let texts = |left| Texts {
            left,
            is_cut: false,
        };
        let words = ["echo", "\u{e9}\u{e9}\u{e9}", "", "x"].map(str::to_owned);
        for (left, expected, is_cut) in [
            (100, &["echo", "\u{e9}\u{e9}\u{e9}", "", "x"][..], false),
            (8, &["echo", "\u{e9}\u{2026}"], true),
            (5, &["echo"], true),
            (2, &["ec\u{2026}"], true),
        ] {
            let mut texts = texts(left);
            assert_eq!(texts.take_all(&words), expected, "{left}");
            assert_eq!(texts.is_cut, is_cut, "{left}");
        }
    }
}
