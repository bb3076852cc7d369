//! Every JSON shape of the API, coming in and going out, and the one table from a kind of error to
//! a status.
//!
//! What comes in is taken apart by [`Fields`], and what goes out is what is described here, key by key.

use std::io::{Cursor, Read};
use std::time::Duration;

use serde::Serialize;

use super::fields::{Elements, Fields, JsonType, Members, decoded, wrong_type};
use crate::command::{
    ChosenId, CommandLine, CommandSpec, EnvironmentChange, Input, check_environment,
};
use crate::error::{Error, Kind, Result};
use crate::files::name::{FilePath, show};
use crate::files::{Entry, FileKind, Page};
use crate::host::{Sandbox, Wish};
use crate::http::Refusal;
use crate::ports::{Listener, Port};
use crate::process::ring::Stream;
use crate::process::{Exit, OnGone, Process, Reason};
use crate::sys::Ending;

/// The number of the contract with clients.
pub(super) const PROTOCOL: u32 = 3;

/// Most bytes of a tag: it is kept, and sent in every list.
const MAX_TAG_BYTES: usize = 1024;

/// How an error looks to a client.
impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let (status, code) = match error.kind() {
            Kind::Invalid => (400, "bad_request"),
            Kind::ProgramNotFound => (400, "not_found"),
            Kind::ProgramNotExecutable => (400, "not_executable"),
            Kind::BadDirectory => (400, "bad_cwd"),
            Kind::ProgramForbidden => (400, "permission"),
            Kind::NoResources => (400, "no_resources"),
            Kind::Forbidden => (403, "forbidden"),
            Kind::NotFound => (404, "not_found"),
            Kind::IsDirectory => (409, "is_directory"),
            Kind::NotDirectory => (409, "not_directory"),
            Kind::NotEmpty => (409, "not_empty"),
            Kind::NotRegular => (409, "not_regular"),
            Kind::Leased => (409, "leased"),
            Kind::Exists => (409, "exists"),
            Kind::CrossDevice => (409, "cross_device"),
            Kind::StdinClosed => (409, "stdin_closed"),
            Kind::StdinBusy => (409, "stdin_busy"),
            Kind::IdInUse => (409, "id_in_use"),
            Kind::System => (500, "internal"),
            Kind::Unreachable => (502, "unreachable"),
            Kind::ShuttingDown => (503, "shutting_down"),
            Kind::Unfinished => (503, "unfinished"),
            Kind::NoSpace => (507, "no_space"),
        };
        Self::new(status, code, error.to_string())
    }
}

/// How the output of a command is put into events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    /// As text; what is not UTF-8 is replaced.
    Utf8,
    /// As it is.
    Base64,
}

/// The words for [`Encoding`].
pub(super) const ENCODINGS: [(&str, Encoding); 2] =
    [("utf-8", Encoding::Utf8), ("base64", Encoding::Base64)];

/// A request to run something.
pub(super) struct CommandRequest {
    /// What to run.
    pub(super) spec: CommandSpec,
    /// How to show its output.
    pub(super) encoding: Encoding,
    /// What becomes of it when its client goes away.
    pub(super) on_disconnect: OnGone,
}

/// Reads the body of `exec` and `processes`.
///
/// # Errors
/// It is no JSON object, or a field is not what it should be.
pub(super) fn command_request(body: &[u8]) -> Result<CommandRequest> {
    let mut fields = Fields::parse(body)?;
    let shell = fields.boolean("shell")?;
    let accepted = "a string or an array of strings";
    let line = match (fields.take("cmd"), shell) {
        (None, _) => {
            return Err(Error::invalid(format!(
                "cmd is missing; it takes {accepted}"
            )));
        }
        (Some(cmd), shell) => match (JsonType::of(cmd), shell) {
            (JsonType::String, Some(false)) => {
                return Err(Error::invalid(
                    "cmd is a string but shell is false; send an array to run a program directly",
                ));
            }
            (JsonType::Array, Some(true)) => {
                return Err(Error::invalid(
                    "cmd is an array but shell is true; send a string to run it by /bin/sh",
                ));
            }
            (JsonType::String, _) => CommandLine::Shell(decoded("cmd", cmd)?),
            (JsonType::Array, _) => CommandLine::Program(
                decoded::<Elements<'_>>("cmd", cmd)?
                    .0
                    .into_iter()
                    .map(|word| match JsonType::of(word) {
                        JsonType::String => decoded("cmd", word),
                        _ => Err(wrong_type("cmd", accepted, word)),
                    })
                    .collect::<Result<_>>()?,
            ),
            _ => return Err(wrong_type("cmd", accepted, cmd)),
        },
    };
    let environment = environment(&mut fields)?;
    let directory = fields.string("cwd")?;
    let mut spec = CommandSpec::new(line, environment, directory)?;
    spec.timeout = fields.seconds("timeout")?;
    spec.background = fields.boolean("background")?.unwrap_or(false);
    spec.tag = fields.string("tag")?;
    if spec
        .tag
        .as_ref()
        .is_some_and(|tag| tag.len() > MAX_TAG_BYTES)
    {
        return Err(Error::invalid(format!(
            "tag is longer than {MAX_TAG_BYTES} bytes; keep what belongs to it on your side"
        )));
    }
    spec.id = fields.string("id")?.map(ChosenId::new).transpose()?;
    if let Some(text) = fields.string("stdin")? {
        spec.input = Input::Given(text.into_bytes());
    }
    let encoding = fields
        .choice("encoding", &ENCODINGS)?
        .unwrap_or(Encoding::Utf8);
    let on_disconnect = fields
        .choice(
            "on_disconnect",
            &[("kill", OnGone::Kill), ("keep", OnGone::Keep)],
        )?
        .unwrap_or(OnGone::Kill);
    Ok(CommandRequest {
        spec,
        encoding,
        on_disconnect,
    })
}

fn environment(fields: &mut Fields<'_>) -> Result<Vec<EnvironmentChange>> {
    let Some(variables) = fields.take("env") else {
        return Ok(Vec::new());
    };
    if JsonType::of(variables) != JsonType::Object {
        return Err(wrong_type("env", "an object", variables));
    }
    decoded::<Members<'_>>("env", variables)?
        .0
        .into_iter()
        .map(|(name, value)| {
            let value = match JsonType::of(value) {
                JsonType::Null => None,
                JsonType::String => Some(decoded("env", value)?),
                // As it was written, digit by digit.
                JsonType::Number | JsonType::Boolean => Some(value.get().to_owned()),
                JsonType::Array | JsonType::Object => {
                    let accepted = "a string, number, boolean or null";
                    return Err(wrong_type(&format!("env.{name}"), accepted, value));
                }
            };
            Ok((name, value))
        })
        .collect()
}

/// A request for sandboxes.
pub(super) struct SandboxRequest {
    /// How many.
    pub(super) count: usize,
    /// What they are to be like.
    pub(super) wish: Wish,
}

/// Most sandboxes that one request makes.
const MAX_SANDBOXES: u64 = 10_000;

/// Most bytes of the environment that sandboxes are made with. The kernel takes a single variable of
/// as much (`MAX_ARG_STRLEN`, execve(2)).
const MAX_ENVIRONMENT_BYTES: usize = 128 * 1024;

/// Most processes and threads that a sandbox may ask for.
const MAX_PROCESSES: u64 = 1 << 20;

/// Most memory that a sandbox may ask for, in MiB.
const MAX_MEMORY_MB: u64 = 1 << 30;

/// Reads the body of a request for sandboxes; an empty one asks for one of the usual kind.
///
/// # Errors
/// It is no JSON object, or a field is not what it should be.
pub(super) fn sandbox_request(body: &[u8]) -> Result<SandboxRequest> {
    let body = if body.trim_ascii().is_empty() {
        b"{}"
    } else {
        body
    };
    let mut fields = Fields::parse(body)?;
    let environment = environment(&mut fields)?;
    // By the rules of a command's own.
    check_environment(&environment)?;
    let size =
        |(name, value): &EnvironmentChange| name.len() + value.as_ref().map_or(0, String::len);
    if environment.iter().map(size).sum::<usize>() > MAX_ENVIRONMENT_BYTES {
        return Err(Error::invalid(format!(
            "env is larger than {MAX_ENVIRONMENT_BYTES} bytes; every command would carry it: put large values into files"
        )));
    }
    let count = fields.whole("count", 1..=MAX_SANDBOXES)?.unwrap_or(1);
    let idle = fields.whole("idle_timeout_secs", 0..=u32::MAX.into())?;
    let memory = fields.whole("max_mem_mb", 1..=MAX_MEMORY_MB)?;
    Ok(SandboxRequest {
        count: usize::try_from(count).unwrap_or(usize::MAX),
        wish: Wish {
            environment: environment.into(),
            // As SBX_IDLE_TIMEOUT has it, 0 is never.
            idle_timeout: idle.filter(|seconds| *seconds > 0).map(Duration::from_secs),
            max_processes: fields.whole("max_procs", 1..=MAX_PROCESSES)?,
            max_memory: memory.map(|megabytes| megabytes << 20),
        },
    })
}

/// Reads the body of `kill`; an empty one means SIGKILL.
///
/// # Errors
/// It is no signal.
pub(super) fn signal_request(body: &[u8]) -> Result<i32> {
    if body.trim_ascii().is_empty() {
        return Ok(libc::SIGKILL);
    }
    let accepted = "a name such as TERM or SIGTERM, or a number from 1 to 64";
    let mut fields = Fields::parse(body)?;
    let Some(signal) = fields.take("signal") else {
        return Ok(libc::SIGKILL);
    };
    let unknown = || Error::invalid(format!("signal {signal} is not known; it takes {accepted}"));
    match JsonType::of(signal) {
        JsonType::Number => signal
            .get()
            .parse()
            .ok()
            .filter(|number| (1..=64).contains(number))
            .ok_or_else(unknown),
        JsonType::String => {
            let upper = decoded::<String>("signal", signal)?.to_ascii_uppercase();
            let full = if upper.starts_with("SIG") {
                upper
            } else {
                format!("SIG{upper}")
            };
            full.parse::<nix::sys::signal::Signal>()
                .map(|signal| signal as i32)
                .map_err(|_| unknown())
        }
        _ => Err(wrong_type("signal", accepted, signal)),
    }
}

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

/// What stands between sandboxes, as it is, not as it should be.
#[derive(Serialize)]
pub(super) struct Isolation {
    pub(super) landlock_abi: u32,
    pub(super) layers: Vec<&'static str>,
}

/// What came of a request for sandboxes.
#[derive(Serialize)]
pub(super) struct CreatedDocument {
    pub(super) sandboxes: Vec<SandboxDocument>,
    /// For how many there was no room.
    pub(super) rejected: usize,
}

/// A sandbox in a list or on its own.
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
    /// Describes a sandbox, without what opens it.
    pub(super) fn of(sandbox: &Sandbox, isolation: Isolation) -> Self {
        Self {
            id: sandbox.id().to_owned(),
            token: None,
            uid: sandbox.user().uid,
            home: sandbox.home().to_string_lossy().into_owned(),
            created_at_ms: sandbox.created_at_ms(),
            idle_timeout_secs: sandbox.idle_timeout().map(|limit| limit.as_secs()),
            max_procs: sandbox.max_processes(),
            max_mem_mb: sandbox.max_memory().map(|bytes| bytes >> 20),
            isolation,
        }
    }

    /// Adds what opens it, for whoever made it.
    pub(super) fn with_token(mut self, token: String) -> Self {
        self.token = Some(token);
        self
    }
}

/// A process in a list or on its own.
#[derive(Serialize)]
pub(super) struct ProcessDocument {
    id: String,
    pid: i32,
    cmd: CommandDocument,
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

/// A command as it was sent.
#[derive(Serialize)]
#[serde(untagged)]
enum CommandDocument {
    Shell(String),
    Program(Vec<String>),
}

impl ProcessDocument {
    /// Describes a process as it is now.
    pub(super) fn of(process: &Process) -> Self {
        let exit = process.exit();
        Self {
            id: process.id().to_owned(),
            pid: process.pid(),
            cmd: match process.command() {
                CommandLine::Shell(script) => CommandDocument::Shell(script.clone()),
                CommandLine::Program(words) => CommandDocument::Program(words.clone()),
            },
            tag: process.tag().map(str::to_owned),
            started_at_ms: process.started_at_ms(),
            running: exit.is_none(),
            exit_code: exit.and_then(|exit| exit_code(&exit)),
            signal: exit.and_then(|exit| signal(&exit)),
            reason: exit.map(|exit| reason(exit.reason)),
            duration_ms: exit.map(|exit| milliseconds(exit.duration)),
            background: process.is_background(),
            stdout_bytes: process.written(Stream::Stdout),
            stderr_bytes: process.written(Stream::Stderr),
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
    /// Tells how a process ended.
    pub(super) fn of(exit: &Exit) -> Self {
        Self {
            event: "exit",
            exit_code: exit_code(exit),
            signal: signal(exit),
            timed_out: exit.reason == Reason::Timeout,
            duration_ms: milliseconds(exit.duration),
            reason: reason(exit.reason),
        }
    }
}

fn exit_code(exit: &Exit) -> Option<i32> {
    match exit.ending {
        Ending::Exited(code) => Some(code),
        Ending::Signaled(_) | Ending::Unknown => None,
    }
}

fn signal(exit: &Exit) -> Option<i32> {
    match exit.ending {
        Ending::Exited(_) | Ending::Unknown => None,
        Ending::Signaled(signal) => Some(signal),
    }
}

fn reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Exited => "exited",
        Reason::Signaled => "signaled",
        Reason::Timeout => "timeout",
        Reason::OutOfMemory => "oom",
        Reason::Killed => "killed",
        Reason::Deleted => "deleted",
        Reason::Disconnected => "disconnected",
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A file or directory. Without detail it has exactly the keys that clients build their own entry
/// from: one more would break them.
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
    /// Describes an entry that `path` names again, with `detail` in full.
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
                name_b64: super::base64::encode(&entry.name),
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

/// What is made of a page before it is sent.
const PAGE_PIECE_BYTES: usize = 64 * 1024;

/// One page of a directory: `{"entries": [...], "next": ...}`, made piece by piece as it is read, so
/// that a page costs no more memory than its names.
pub(super) struct PageDocument {
    page: Page,
    path: FilePath,
    detail: bool,
    piece: Cursor<Vec<u8>>,
    has_ended: bool,
}

impl PageDocument {
    /// Describes a page of the directory `path`, its entries with `detail` in full.
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
                piece.push(b'}');
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

/// A port as it stands in a URL: a number, or the name of a socket.
struct PortValue<'a>(&'a Port);

impl Serialize for PortValue<'_> {
    fn serialize<S: serde::Serializer>(
        &self,
        serializer: S,
    ) -> std::result::Result<S::Ok, S::Error> {
        match self.0.number() {
            Some(number) => serializer.serialize_u16(number),
            None => serializer.collect_str(self.0),
        }
    }
}

/// Something that listens.
#[derive(Serialize)]
pub(super) struct ListenerDocument<'a> {
    port: PortValue<'a>,
    address: &'a str,
    pid: Option<i32>,
    command: Option<&'a str>,
}

impl<'a> ListenerDocument<'a> {
    /// Shows a listener.
    pub(super) fn of(listener: &'a Listener) -> Self {
        let process = listener.process.as_ref();
        Self {
            port: PortValue(&listener.port),
            address: &listener.address,
            pid: process.map(|owner| owner.pid),
            command: process.map(|owner| owner.command.as_str()),
        }
    }
}

/// Whether something listens on a port.
#[derive(Serialize)]
pub(super) struct PortDocument<'a> {
    port: PortValue<'a>,
    listening: bool,
}

impl<'a> PortDocument<'a> {
    /// Shows what was found.
    pub(super) fn of(port: &'a Port, listening: bool) -> Self {
        Self {
            port: PortValue(port),
            listening,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fields::MAX_VALUES;
    use super::*;

    fn refused(body: &str) -> String {
        match command_request(body.as_bytes()) {
            Ok(_) => panic!("{body} was accepted"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_wrong_type_names_its_field() {
        for (field, value) in [
            ("cmd", "1"),
            ("cmd", "[1]"),
            ("cmd", "{}"),
            ("shell", "\"yes\""),
            ("env", "[]"),
            ("env", "{\"A\":[]}"),
            ("cwd", "1"),
            ("timeout", "\"1\""),
            ("timeout", "true"),
            ("timeout", "0"),
            ("timeout", "-1"),
            ("timeout", "1e400"),
            ("stdin", "1"),
            ("background", "1"),
            ("tag", "1"),
            ("encoding", "\"latin1\""),
            ("on_disconnect", "\"ignore\""),
            ("id", "7"),
        ] {
            let rest = if field == "cmd" {
                ""
            } else {
                ",\"cmd\":\"true\""
            };
            let text = refused(&format!("{{\"{field}\":{value}{rest}}}"));
            assert!(text.contains(field), "{field}={value}: {text}");
        }
    }

    #[test]
    fn numbers_in_the_environment_keep_their_digits() {
        let request = command_request(
            br#"{"cmd":"x","env":{"A":1,"B":0.10,"C":true,"D":null,"E":"s","F":123456789012345678901234567890}}"#,
        )
        .unwrap();
        let environment: Vec<_> = request
            .spec
            .environment()
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_deref()))
            .collect();
        assert_eq!(
            environment,
            [
                ("A", Some("1")),
                ("B", Some("0.10")),
                ("C", Some("true")),
                ("D", None),
                ("E", Some("s")),
                ("F", Some("123456789012345678901234567890"))
            ]
        );
    }

    #[test]
    fn null_is_absent_and_unknown_fields_are_ignored() {
        let request = command_request(
            br#"{"cmd":["a"],"cwd":null,"timeout":null,"id":null,"future":{"x":1}}"#,
        )
        .unwrap();
        assert_eq!(
            request.spec.line(),
            &CommandLine::Program(vec!["a".to_owned()])
        );
        assert_eq!(request.spec.timeout, None);
    }

    #[test]
    fn more_values_than_any_command_has_are_refused() {
        let words = |count: usize| format!("{{\"cmd\":[{}\"\"]}}", "\"a\",".repeat(count - 1));
        assert!(command_request(words(MAX_VALUES).as_bytes()).is_ok());
        assert!(refused(&words(MAX_VALUES + 1)).contains("cmd"));
        let numbers: Vec<String> = (0..=MAX_VALUES).map(|number| number.to_string()).collect();
        let members = format!("\"{}\":0,", numbers.join("\":0,\""));
        assert!(refused(&format!("{{{members}\"cmd\":\"x\"}}")).contains("the body"));
        assert!(
            refused(&format!("{{\"env\":{{{members}\"x\":0}},\"cmd\":\"x\"}}")).contains("env")
        );
    }

    #[test]
    fn the_kind_of_command_and_shell_must_agree() {
        refused(r#"{"cmd":"x","shell":false}"#);
        refused(r#"{"cmd":["x"],"shell":true}"#);
        assert!(command_request(br#"{"cmd":"x","shell":true}"#).is_ok());
        assert!(command_request(br#"{"cmd":["x"],"shell":false}"#).is_ok());
    }

    #[test]
    fn signals_by_name_and_number() {
        for body in [
            "",
            "{}",
            "{\"signal\":null}",
            "{\"signal\":9}",
            "{\"signal\":\"KILL\"}",
            "{\"signal\":\"sigkill\"}",
        ] {
            assert_eq!(signal_request(body.as_bytes()).unwrap(), 9, "{body}");
        }
        for body in [
            "{\"signal\":0}",
            "{\"signal\":65}",
            "{\"signal\":\"9\"}",
            "{\"signal\":\"NOPE\"}",
            "{\"signal\":1.5}",
            "[]",
        ] {
            assert!(signal_request(body.as_bytes()).is_err(), "{body}");
        }
    }
}
