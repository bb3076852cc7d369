//! `process.Process`: commands and terminals.
//!
//! A command and the connection that started it are apart: it goes on without its client, and only its deadline ends
//! it.

use std::sync::Arc;
use std::time::Duration;

use serde::{Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::access::{check_user, user_of};
use super::calls::{Answer, Call, Document, ListAnswer, ListBody};
use super::connect::{self, Messages, append, push, push_end};
use super::errors::{Code, E2bError};
use super::paths::Paths;
use crate::client::{Client, Interrupt, Peer};
use crate::codec::fields::{Fields, JsonType, Members, decoded, strings, wrong_type};
use crate::codec::object::{object, object_of};
use crate::codec::table::Table;
use crate::codec::{base64, cut_character, most_json_bytes};
use crate::error::{Error, Kind};
use crate::http::Response;
use crate::http::request::BodyReader;
use crate::http::stream::{StreamClient, StreamWriter};
use crate::limits::ledger::Item;
use crate::process::ring::{Cursor, Stream};
use crate::process::{EVENT_BYTES, Exit, Extent, OnDisconnect, Process, Reason, Subscriber};
use crate::spec::command::{
    CommandLine, CommandSpec, EnvironmentChange, StdinSource, TerminalSize, TerminalSpec,
};
use crate::sys::{Ending, Pid};
use crate::workspace::{Lease, MemorySource, SignalGroup, Workspace};

/// The shell that clients name, and the one that every image has.
const USUAL_SHELL: &str = "/bin/bash";
const PLAIN_SHELL: &str = "/bin/sh";

/// Most bytes of a tag: it is kept, and sent in every list.
const MAX_TAG_BYTES: usize = 1024;

/// How long it may take until a killed process is gone. Only the kernel can hold it up.
const GONE_LIMIT: Duration = Duration::from_secs(5);

/// What is sent while nothing happens.
const KEEP_ALIVE: &[u8] = b"\0\0\0\0\x1a{\"event\":{\"keepalive\":{}}}";

/// `Start`.
pub(super) fn start(call: &mut Call<'_, '_>, workspace: &Workspace, fields: Fields<'_>) -> Answer {
    let user = user_of(call.request)?;
    check_user(workspace, user.as_deref())?;
    let mut start = StartRequest::parse(workspace, fields)?;
    start.user = user.filter(|user| !user.is_empty() && workspace.has_own_root());
    start.timeout = call.timeout()?;
    let lease = workspace.share()?;
    let run = match workspace.run_foreground(start.spec()?, OnDisconnect::Keep) {
        // Clients name this shell, and not every image has it.
        Err(error)
            if error.kind() == Kind::ProgramNotFound
                && start.words.first().is_some_and(|word| word == USUAL_SHELL) =>
        {
            PLAIN_SHELL.clone_into(&mut start.words[0]);
            workspace.run_foreground(start.spec()?, OnDisconnect::Keep)?
        }
        run => run?,
    };
    let keep_alive = call.keep_alive();
    Ok(connect::stream(move |stream: &mut StreamWriter| {
        let process = Arc::clone(run.process());
        let mut events = ProcessEvents::new(stream, keep_alive, &process, lease);
        events.is_own = true;
        run.follow(&mut events, None);
    }))
}

/// `Connect`.
pub(super) fn connect(
    call: &mut Call<'_, '_>,
    workspace: &Workspace,
    mut fields: Fields<'_>,
) -> Answer {
    let process = match selected(workspace, &mut fields, true)? {
        Selected::Process(process) => process,
        Selected::Ended(pid, exit) => {
            return Ok(connect::stream(move |stream: &mut StreamWriter| {
                let mut client = StreamClient::new(stream, KEEP_ALIVE, Duration::MAX);
                push(&mut client, &start_document(pid));
                push(
                    &mut client,
                    &object! { "event": object! { "end": end_document(&exit) } },
                );
                push_end(&mut client, None);
            }));
        }
    };
    let extent = call.deadline()?.map_or(Extent::Exit, Extent::Until);
    let keep_alive = call.keep_alive();
    // What is written from now on.
    let [stdout, stderr] = Stream::ALL.map(|stream| process.written(stream));
    let lease = workspace.share()?;
    Ok(connect::stream(move |stream: &mut StreamWriter| {
        let mut events = ProcessEvents::new(stream, keep_alive, &process, lease);
        // If the client has disconnected, the process goes on.
        let _ = process.follow(Cursor::at(stdout, stderr), extent, &mut events);
    }))
}

/// A process in the list. Its texts are not copied: each may be long, and there may be many.
#[derive(Serialize)]
struct Listed<'a> {
    config: Config<'a>,
    pid: Pid,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<&'a str>,
}

#[derive(Serialize)]
struct Config<'a> {
    #[serde(serialize_with = "arguments")]
    args: &'a CommandLine,
    cmd: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cwd: Option<&'a str>,
    /// In the order of their names; of several with one name the last counts.
    envs: Table<&'a str, &'a str>,
}

fn arguments<S: Serializer>(command: &CommandLine, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(command.words().skip(1))
}

/// What a variable takes in a map.
const VARIABLE_BYTES: usize = 64;

/// Variables that take little.
const FEW_VARIABLES: usize = 256;

/// What the document of a process has besides its texts.
const FRAME_BYTES: usize = 256;

/// `List`.
pub(super) fn list(call: &mut Call<'_, '_>, workspace: &Workspace, _: Fields<'_>) -> ListAnswer {
    let mut body = ListBody::new(Some("processes"), &workspace.ledger)?;
    let client = &mut call.interrupt();
    let interrupt = &mut workspace.paced(client);
    let processes = workspace.processes.list().into_iter();
    for process in processes.filter(|process| process.exit().is_none()) {
        // Its texts may be long.
        interrupt.check()?;
        let environment = process.environment.iter();
        let many = Some(environment.len()).filter(|count| *count > FEW_VARIABLES);
        let many = VARIABLE_BYTES * many.unwrap_or(0);
        let charge = workspace.ledger.charge(Item::Responses, many);
        let _charge = charge.map_err(Error::from)?;
        let envs = environment.filter_map(|(name, value)| Some((&**name, value.as_deref()?)));
        let envs = Table::from(envs.collect::<Vec<_>>());
        let texts = [&process.directory, &process.tag].into_iter().flatten();
        let texts = texts.map(String::as_str).chain(process.command.words());
        let texts = texts.chain(envs.iter().flat_map(|(name, value)| [*name, *value]));
        // Each is between quotes and behind a comma.
        let most = texts.map(|text| most_json_bytes(text) + 3).sum::<usize>();
        let listed = Listed {
            config: Config {
                args: &process.command,
                cmd: process.command.words().next().unwrap_or_default(),
                cwd: process.directory.as_deref(),
                envs,
            },
            pid: process.pid_inside(),
            tag: process.tag.as_deref(),
        };
        body.push_at_most(FRAME_BYTES + most, &listed)?;
    }
    Ok(body)
}

/// `SendInput`.
pub(super) fn send_input(
    call: &mut Call<'_, '_>,
    workspace: &Workspace,
    mut fields: Fields<'_>,
) -> Document {
    let process = running(workspace, &mut fields)?;
    let data = input(&mut fields)?;
    write(&call.request.body, workspace, &process, &data, false)?;
    Ok(object! {})
}

/// What a message takes besides its bytes, as if it were bytes.
const MESSAGE_COST: usize = 1024;

/// The messages after which a stream gives way to its tenant's other work.
const STEP_BYTES: usize = 64 * 1024;

/// `StreamInput`. Each message is acted on as it arrives.
pub(super) fn stream_input(call: &mut Call<'_, '_>, workspace: &Workspace) -> Document {
    let ledger = &workspace.ledger;
    let client = &mut call.interrupt();
    let interrupt = &mut workspace.paced(client);
    let mut messages = Messages::new(&mut call.request.body, ledger);
    let mut process = None;
    let mut taken = 0;
    while let Some(message) = messages.next()? {
        taken += MESSAGE_COST + message.len();
        // Not each time: what a person types does not wait for searches.
        if taken >= STEP_BYTES {
            taken = 0;
            interrupt.check()?;
        }
        let mut fields = connect::message(message)?;
        if let Some(start) = object(&mut fields, "start")? {
            let mut start = Fields::from(start);
            process = Some(running(workspace, &mut start)?);
            continue;
        }
        let Some(data) = object(&mut fields, "data")? else {
            // A sign of life.
            continue;
        };
        let missing = || E2bError::invalid("data comes before start");
        let process = process.as_ref().ok_or_else(missing)?;
        let data = input(&mut Fields::from(data))?;
        // The process may take it slowly, and the message may have members that mean nothing.
        drop(fields);
        write(messages.body(), workspace, process, &data, false)?;
    }
    Ok(object! {})
}

/// `CloseStdin`.
pub(super) fn close_stdin(
    call: &mut Call<'_, '_>,
    workspace: &Workspace,
    mut fields: Fields<'_>,
) -> Document {
    let process = running(workspace, &mut fields)?;
    if process.terminal().is_ok() {
        let text = "the input of a terminal cannot be closed; send it the character 4 (Ctrl-D)";
        return Err(E2bError::new(Code::Internal, text));
    }
    match write(&call.request.body, workspace, &process, b"", true) {
        Err(error) if error.kind() == Kind::StdinClosed => Ok(object! {}),
        written => written.map(|()| object! {}).map_err(E2bError::from),
    }
}

/// `SendSignal`.
pub(super) fn send_signal(
    _: &mut Call<'_, '_>,
    workspace: &Workspace,
    mut fields: Fields<'_>,
) -> Document {
    let process = running(workspace, &mut fields)?;
    let signals = [
        ("SIGNAL_SIGKILL", "9", libc::SIGKILL),
        ("SIGNAL_SIGTERM", "15", libc::SIGTERM),
    ];
    let asked: String = match fields.take("signal") {
        Some(value) if JsonType::of(value) == JsonType::String => decoded("signal", value)?,
        Some(value) => value.get().to_owned(),
        None => String::new(),
    };
    let mut signals = signals.into_iter();
    let found = signals.find(|(name, number, _)| [*name, *number].contains(&&*asked));
    let Some((.., signal)) = found else {
        let text = format_args!("signal is {asked:?}; it takes SIGNAL_SIGKILL or SIGNAL_SIGTERM");
        return Err(E2bError::unimplemented(text));
    };
    let (_, was_running) = workspace.signal(&process.id, signal, SignalGroup::Own)?;
    // Clients look for it right after a kill.
    if signal == libc::SIGKILL {
        process.wait_gone(GONE_LIMIT);
    }
    if was_running {
        Ok(object! {})
    } else {
        Err(not_running(&process.pid_inside().to_string()))
    }
}

/// `Update`.
pub(super) fn update(
    _: &mut Call<'_, '_>,
    workspace: &Workspace,
    mut fields: Fields<'_>,
) -> Document {
    let process = running(workspace, &mut fields)?;
    let missing = || E2bError::invalid("pty.size is missing");
    let pty = object(&mut fields, "pty")?.ok_or_else(missing)?;
    let size = terminal_size(pty)?.ok_or_else(missing)?;
    match process.resize(size) {
        Err(error) if error.kind() == Kind::NotPty => {
            Err(E2bError::new(Code::Internal, error.to_string()))
        }
        resized => Ok(resized.map(|()| object! {})?),
    }
}

/// `GET /envs`: the variables of commands that do not change them.
pub(super) fn variables(_: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let variables = workspace.variables();
    let members = variables
        .into_iter()
        .map(|(name, value)| (name, value.into()));
    Ok(Response::json(&object_of(members)))
}

/// A command as a client asks for it.
struct StartRequest {
    words: Vec<String>,
    environment: Vec<EnvironmentChange>,
    directory: String,
    terminal: Option<TerminalSize>,
    tag: Option<String>,
    has_stdin: bool,
    timeout: Option<Duration>,
    /// In a sandbox where there are several.
    user: Option<String>,
}

impl StartRequest {
    fn parse(workspace: &Workspace, mut fields: Fields<'_>) -> Result<Self, E2bError> {
        let missing = |name| move || E2bError::invalid(format_args!("{name} is missing"));
        let process = object(&mut fields, "process")?;
        let mut process = Fields::from(process.ok_or_else(missing("process"))?);
        let program = process.string("cmd")?.ok_or_else(missing("process.cmd"))?;
        let arguments = process.take("args");
        let arguments =
            arguments.map(|array| strings("process.args", "an array of strings", array));
        let mut words = vec![program];
        words.extend(arguments.transpose()?.unwrap_or_default());
        let paths = Paths::of(workspace);
        let mut environment: Vec<EnvironmentChange> = Vec::new();
        for (name, value) in [
            ("HOME", paths.home()),
            ("USER", workspace.account()),
            ("LOGNAME", workspace.account()),
        ] {
            if !workspace.has_variable(name) {
                environment.push((name.to_owned(), Some(value)));
            }
        }
        environment.extend(variables_in(&mut process, "envs")?);
        let directory = process.string("cwd")?.unwrap_or_default();
        // Where commands of a template start is known there.
        let directory = if directory.is_empty() && workspace.has_own_root() {
            Vec::new()
        } else {
            paths.absolute(directory.as_bytes())?
        };
        let directory = String::from_utf8(directory);
        let pty = object(&mut fields, "pty")?;
        let tag = fields.string("tag")?;
        if tag.as_ref().is_some_and(|tag| tag.len() > MAX_TAG_BYTES) {
            let text = format!("tag takes at most {MAX_TAG_BYTES} bytes");
            return Err(E2bError::invalid(text));
        }
        Ok(Self {
            words,
            environment,
            directory: directory.map_err(|_| E2bError::invalid("the home is not UTF-8"))?,
            terminal: match pty {
                None => None,
                Some(pty) => Some(terminal_size(pty)?.unwrap_or_default()),
            },
            tag,
            has_stdin: fields.boolean("stdin")?.unwrap_or(true),
            timeout: None,
            user: None,
        })
    }

    fn spec(&self) -> Result<CommandSpec, E2bError> {
        let mut spec = CommandSpec::new(
            CommandLine::Program(self.words.clone()),
            self.environment.clone(),
            Some(self.directory.clone()),
        )?;
        if let Some(size) = self.terminal {
            let mut own = self.environment.iter().rev();
            let term = own.find(|(name, _)| name == "TERM");
            let term = term.and_then(|(_, value)| value.clone());
            spec.terminal = Some(match term {
                Some(term) => TerminalSpec::new(size, term)?,
                None => TerminalSpec::new(size, TerminalSpec::default().name().to_owned())?,
            });
        } else if self.has_stdin {
            spec.input = StdinSource::Open;
        }
        // Clients have all commands run by a login shell, whose profile would hide the programs of the workspace.
        let shell = self.words.first().map(String::as_str);
        spec.keeps_path = matches!(shell, Some(USUAL_SHELL | PLAIN_SHELL));
        spec.tag.clone_from(&self.tag);
        spec.timeout = self.timeout;
        spec.user.clone_from(&self.user);
        Ok(spec)
    }
}

/// The members of an object in a field; `None` if it is absent.
fn object<'a>(
    fields: &mut Fields<'a>,
    name: &'static str,
) -> Result<Option<Members<'a>>, E2bError> {
    match fields.take(name) {
        None => Ok(None),
        Some(value) if JsonType::of(value) == JsonType::Object => Ok(Some(decoded(name, value)?)),
        Some(value) => Err(wrong_type(name, "an object", value).into()),
    }
}

/// Variables in a field, which are texts.
pub(super) fn variables_in(
    fields: &mut Fields<'_>,
    name: &'static str,
) -> Result<Vec<EnvironmentChange>, E2bError> {
    let Some(Members(members)) = object(fields, name)? else {
        return Ok(Vec::new());
    };
    let members = members.into_iter().map(|(key, value)| {
        let field = format!("{name}.{key}");
        if JsonType::of(value) != JsonType::String {
            return Err(E2bError::from(wrong_type(&field, "a string", value)));
        }
        Ok((key, Some(decoded(&field, value)?)))
    });
    members.collect()
}

fn terminal_size(pty: Members<'_>) -> Result<Option<TerminalSize>, E2bError> {
    let Some(size) = object(&mut Fields::from(pty), "size")? else {
        return Ok(None);
    };
    let mut size = Fields::from(size);
    let usual = TerminalSize::default();
    let most = 0..=u32::MAX.into();
    let rows = size.whole("rows", most.clone())?;
    let columns = size.whole("cols", most)?;
    // A field at its default may be absent, so 0 says nothing.
    let rows = rows.filter(|rows| *rows > 0).unwrap_or(usual.rows().into());
    let columns = columns.filter(|columns| *columns > 0);
    let columns = columns.unwrap_or(usual.columns().into());
    Ok(Some(TerminalSize::new(rows, columns)?))
}

/// A process that a request selects.
enum Selected {
    Process(Arc<Process>),
    /// It ended a short time ago, and only that is known.
    Ended(Pid, Exit),
}

/// The process that a request selects, if it runs.
fn running(workspace: &Workspace, fields: &mut Fields<'_>) -> Result<Arc<Process>, E2bError> {
    match selected(workspace, fields, false)? {
        Selected::Process(process) => Ok(process),
        Selected::Ended(pid, _) => Err(not_running(&pid.to_string())),
    }
}

/// The process that a request selects. One that has ended only if `ended` is set.
fn selected(
    workspace: &Workspace,
    fields: &mut Fields<'_>,
    ended: bool,
) -> Result<Selected, E2bError> {
    let missing = || E2bError::invalid("process takes pid or tag");
    let selector = object(fields, "process")?.ok_or_else(missing)?;
    let mut selector = Fields::from(selector);
    let (name, found) = match (selector.take("pid"), selector.string("tag")?) {
        (Some(pid), _) => {
            let pid = number(pid).ok_or_else(missing)?;
            let found = pid.parse().ok();
            let found = found.and_then(|pid| workspace.processes.find_inside(pid));
            (pid, found)
        }
        (None, Some(tag)) => {
            let all = workspace.processes.list().into_iter().rev();
            let tagged = all.filter(|process| process.tag.as_ref() == Some(&tag));
            // The latest, and of those that run if there is one.
            let found = tagged.min_by_key(|process| process.exit().is_some());
            (tag, found)
        }
        (None, None) => return Err(missing()),
    };
    if let Some(process) = found.filter(|process| ended || process.exit().is_none()) {
        return Ok(Selected::Process(process));
    }
    let recent = name.parse().ok().filter(|_| ended);
    let recent = recent.and_then(|pid| Some((pid, workspace.processes.recent_end(pid)?)));
    recent
        .map(|(pid, exit)| Selected::Ended(pid, exit))
        .ok_or_else(|| not_running(&name))
}

/// The digits of a number, which may be in a text.
fn number(value: &RawValue) -> Option<String> {
    let digits = value.get().trim_matches('"');
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.to_owned())
}

fn not_running(name: &str) -> E2bError {
    E2bError::not_found(format_args!("there is no process {name}, or it has ended"))
}

/// The bytes of `input`, for pipes and terminals alike.
fn input(fields: &mut Fields<'_>) -> Result<Vec<u8>, E2bError> {
    let missing = || E2bError::invalid("input takes stdin or pty");
    let input = object(fields, "input")?.ok_or_else(missing)?;
    let mut input = Fields::from(input);
    let stdin = connect::bytes(&mut input, "stdin")?;
    Ok(match stdin {
        Some(stdin) => stdin,
        // A field at its default may be absent.
        None => connect::bytes(&mut input, "pty")?.unwrap_or_default(),
    })
}

fn write(
    body: &BodyReader<'_>,
    workspace: &Workspace,
    process: &Process,
    data: &[u8],
    eof: bool,
) -> Result<(), Error> {
    let watch = || Box::new(body.watch_client()) as Box<dyn Peer + Send>;
    let mut source = MemorySource::new(data, &watch);
    workspace
        .write_stdin(&process.id, &mut source, eof)
        .map(drop)
}

/// Writes what happens to a process as messages.
struct ProcessEvents<'a> {
    client: StreamClient<'a>,
    lease: Lease,
    is_terminal: bool,
    /// Whether the stream belongs to the client that started the process: then its deadline is that of the stream.
    is_own: bool,
    /// Bytes that were lost, because the client took too long.
    lost: u64,
    /// Per stream, the first bytes of a character. Some clients decode each message by itself.
    carried: [Vec<u8>; 2],
}

impl<'a> ProcessEvents<'a> {
    /// Begins with the process's pid.
    fn new(
        stream: &'a mut StreamWriter,
        keep_alive: Duration,
        process: &Process,
        lease: Lease,
    ) -> Self {
        stream.cover(EVENT_BYTES);
        let mut client = StreamClient::new(stream, KEEP_ALIVE, keep_alive);
        push(&mut client, &start_document(process.pid_inside()));
        Self {
            client,
            lease,
            is_terminal: process.terminal().is_ok(),
            is_own: false,
            lost: 0,
            carried: <[Vec<u8>; 2]>::default(),
        }
    }

    fn data(&mut self, stream: Stream, data: &[u8]) {
        let name = match stream {
            _ if self.is_terminal => "pty",
            Stream::Stdout => "stdout",
            Stream::Stderr => "stderr",
        };
        self.client.push(|out| {
            out.reserve(data.len() / 3 * 4 + 64);
            append(out, |out| {
                out.extend_from_slice(b"{\"event\":{\"data\":{\"");
                out.extend_from_slice(name.as_bytes());
                out.extend_from_slice(b"\":\"");
                base64::append(out, data);
                out.extend_from_slice(b"\"}}}");
            });
        });
    }

    /// Sends what was held back.
    fn release(&mut self) {
        for stream in Stream::ALL {
            let carried = std::mem::take(&mut self.carried[stream.index()]);
            if !carried.is_empty() {
                self.data(stream, &carried);
            }
        }
    }

    fn end(&mut self, failure: Option<&E2bError>) {
        let text = format!(
            "{} bytes of output were lost, because this client took them too slowly",
            self.lost
        );
        let loss = (self.lost > 0).then(|| E2bError::new(Code::DataLoss, text));
        push_end(&mut self.client, failure.or(loss.as_ref()));
    }
}

impl Subscriber for ProcessEvents<'_> {
    fn client(&mut self) -> &mut dyn Client {
        &mut self.client
    }

    fn output(&mut self, stream: Stream, _: u64, data: &[u8]) {
        let carried = std::mem::take(&mut self.carried[stream.index()]);
        let joined;
        let data = if carried.is_empty() {
            data
        } else {
            joined = [&carried, data].concat();
            &joined[..]
        };
        let (whole, cut) = data.split_at(data.len() - cut_character(data));
        if !whole.is_empty() {
            self.data(stream, whole);
        }
        self.carried[stream.index()] = cut.to_vec();
    }

    fn dropped(&mut self, _: Stream, _: u64, bytes: u64) {
        self.release();
        self.lost += bytes;
    }

    fn exit(&mut self, exit: &Exit) {
        self.release();
        if exit.reason == Reason::Timeout && self.is_own {
            return self.end(Some(&E2bError::overdue()));
        }
        // What ends with its sandbox has no result.
        if self.lease.is_closed() && exit.ending != Ending::Exited(0) {
            return self.end(Some(&E2bError::ended()));
        }
        let end = end_document(exit);
        push(
            &mut self.client,
            &object! { "event": object! { "end": end } },
        );
        self.end(None);
    }

    fn caught_up(&mut self, _: &Cursor) {
        self.release();
        self.end(Some(&E2bError::overdue()));
    }
}

fn start_document(pid: Pid) -> Value {
    object! { "event": object! { "start": object! { "pid": pid } } }
}

/// How a process has ended, in the words of Go's `os.ProcessState`, which clients know.
pub(super) fn end_document(exit: &Exit) -> Value {
    let (code, status) = match exit.ending {
        Ending::Exited(code) => (code, format!("exit status {code}")),
        Ending::Signaled(signal) => (-1, format!("signal: {}", signal_name(signal))),
        Ending::Unknown => (-1, "unknown".to_owned()),
    };
    let why = match exit.reason {
        Reason::OutOfMemory => " (the machine had no memory left)",
        Reason::MemoryLimit => " (the sandbox was above its limit on memory)",
        Reason::Timeout => " (its time was up)",
        _ => "",
    };
    let exited = matches!(exit.ending, Ending::Exited(_));
    let mut document = object! { "exitCode": code, "exited": exited, "status": status.as_str() };
    if exit.ending != Ending::Exited(0) {
        document["error"] = format!("{status}{why}").into();
    }
    document
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_keep_alive_is_an_envelope() {
        let mut out = Vec::new();
        connect::append_document(&mut out, &json!({ "event": { "keepalive": {} } }));
        assert_eq!(out, KEEP_ALIVE);
    }

    #[test]
    fn ends_are_told_in_the_words_of_go() {
        let end = |ending, reason| {
            end_document(&Exit {
                ending,
                reason,
                duration: Duration::ZERO,
            })
        };
        assert_eq!(
            end(Ending::Exited(0), Reason::Exited),
            json!({ "exitCode": 0, "exited": true, "status": "exit status 0" })
        );
        assert_eq!(
            end(Ending::Exited(3), Reason::Exited),
            json!({ "exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3" })
        );
        assert_eq!(
            end(Ending::Signaled(9), Reason::Killed),
            json!({ "exitCode": -1, "exited": false, "status": "signal: killed", "error": "signal: killed" })
        );
    }
}
