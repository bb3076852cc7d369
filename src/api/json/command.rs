//! Commands, processes and terminals in JSON.

use std::borrow::Cow;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde::Serialize;
use serde_json::value::RawValue;

use super::network;
use crate::codec::fields::{Fields, JsonType, Members, decoded, missing, strings, wrong_type};
use crate::codec::shortened;
use crate::error::{Error, Result};
use crate::files::name::FilePath;
use crate::process::ring::Stream;
use crate::process::{Exit, OnDisconnect, Process, Reason, Terminal};
use crate::spec::command::{
    ChosenId, CommandLine, CommandSpec, EnvironmentChange, INTERACTIVE_SHELL, StdinSource,
    TerminalSize, TerminalSpec,
};
use crate::spec::language::Language;
use crate::sys::Ending;
use crate::workspace::{SignalGroup, Venv};

/// Most bytes of a tag: it is kept, and sent in every list.
const MAX_TAG_BYTES: usize = 1024;

/// How events carry the output of a command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::api) enum Encoding {
    /// As text. Bytes that are not UTF-8 become U+FFFD.
    #[default]
    Utf8,
    /// Byte for byte.
    Base64,
}

/// The values of an `encoding` parameter or field.
pub(in crate::api) const ENCODINGS: [(&str, Encoding); 2] =
    [("utf-8", Encoding::Utf8), ("base64", Encoding::Base64)];

/// A request to run a command.
pub(in crate::api) struct CommandRequest {
    pub(in crate::api) spec: CommandSpec,
    /// The encoding of its output.
    pub(in crate::api) encoding: Encoding,
    /// What happens to the command if the client disconnects.
    pub(in crate::api) on_disconnect: OnDisconnect,
}

/// Reads the body of `exec` and `processes`.
///
/// # Errors
/// `Invalid` if the body is no JSON object, or a field has a wrong type or value.
pub(in crate::api) fn command_request(fields: &mut Fields<'_>) -> Result<CommandRequest> {
    let shell = fields.boolean("shell")?;
    let terminal = terminal(fields)?;
    let line = match (command_line(fields.take("cmd"), shell)?, code(fields)?) {
        (Some(line), None) => line,
        (None, Some(line)) if shell.is_none() => line,
        (None, Some(_)) => return Err(Error::invalid("shell goes with cmd, not with code")),
        (Some(_), Some(_)) => {
            let text = "cmd and code are both given; send the one that is to be run";
            return Err(Error::invalid(text));
        }
        (None, None) if terminal.is_some() => CommandLine::Shell(INTERACTIVE_SHELL.to_owned()),
        (None, None) => {
            let text = format!(
                "cmd is missing, and so is code: cmd takes {ACCEPTED_COMMAND}, code a script"
            );
            return Err(Error::invalid(text));
        }
    };
    let environment = environment(fields)?;
    let directory = fields.string("cwd")?;
    let mut spec = CommandSpec::new(line, environment, directory)?;
    spec.timeout = fields.seconds("timeout")?;
    spec.background = fields.boolean("background")?.unwrap_or(false);
    spec.tag = tag(fields)?;
    spec.network = network::policy(fields)?;
    spec.id = fields.string("id")?.map(ChosenId::new).transpose()?;
    if let Some(text) = fields.string("stdin")? {
        if terminal.is_some() {
            let text = "stdin and pty are both given, but a terminal gets its input when it runs";
            return Err(Error::invalid(text));
        }
        spec.input = StdinSource::Given(text.into_bytes());
    }
    spec.terminal = terminal;
    let encoding = fields.choice("encoding", &ENCODINGS)?;
    let actions = [("kill", OnDisconnect::Kill), ("keep", OnDisconnect::Keep)];
    let on_disconnect = fields.choice("on_disconnect", &actions)?;
    Ok(CommandRequest {
        spec,
        encoding: encoding.unwrap_or_default(),
        on_disconnect: on_disconnect.unwrap_or(OnDisconnect::Kill),
    })
}

const ACCEPTED_COMMAND: &str = "a string or an array of strings";

/// What is executed; `None` if no command is given.
fn command_line(cmd: Option<&RawValue>, shell: Option<bool>) -> Result<Option<CommandLine>> {
    let Some(cmd) = cmd else {
        return Ok(None);
    };
    let line = match (JsonType::of(cmd), shell) {
        (JsonType::String, Some(false)) => {
            let text =
                "cmd is a string but shell is false; send an array to run a program directly";
            return Err(Error::invalid(text));
        }
        (JsonType::Array, Some(true)) => {
            let text = "cmd is an array but shell is true; send a string to run it by /bin/sh";
            return Err(Error::invalid(text));
        }
        (JsonType::String, _) => CommandLine::Shell(decoded("cmd", cmd)?),
        _ => CommandLine::Program(strings("cmd", ACCEPTED_COMMAND, cmd)?),
    };
    Ok(Some(line))
}

/// The code that is executed; `None` if none is given.
fn code(fields: &mut Fields<'_>) -> Result<Option<CommandLine>> {
    let code = fields.string("code")?;
    let language = fields.string("language")?;
    let arguments = fields.take("args");
    let Some(code) = code else {
        return match (language, arguments) {
            (None, None) => Ok(None),
            (Some(_), _) => Err(Error::invalid("language goes with code, which is missing")),
            (None, Some(_)) => Err(Error::invalid("args goes with code, which is missing")),
        };
    };
    let arguments = arguments.map(|array| strings("args", "an array of strings", array));
    Ok(Some(CommandLine::Code {
        language: language.map_or(Ok(Language::Python), |name| Language::of(&name))?,
        code,
        arguments: arguments.transpose()?.unwrap_or_default(),
    }))
}

/// The terminal that a command gets, if any.
fn terminal(fields: &mut Fields<'_>) -> Result<Option<TerminalSpec>> {
    let Some(pty) = fields.take("pty") else {
        return Ok(None);
    };
    match JsonType::of(pty) {
        JsonType::Boolean => Ok((pty.get() == "true").then(TerminalSpec::default)),
        JsonType::Object => terminal_spec(pty.get().as_bytes())
            .map(Some)
            .map_err(|error| Error::invalid(format_args!("pty.{error}"))),
        _ => Err(wrong_type("pty", "true, false or an object", pty)),
    }
}

fn terminal_spec(fields: &[u8]) -> Result<TerminalSpec> {
    let mut fields = Fields::parse(fields)?;
    let usual = TerminalSpec::default();
    let [rows, columns] = terminal_sides(&mut fields)?;
    let size = TerminalSize::new(
        rows.unwrap_or_else(|| usual.size.rows().into()),
        columns.unwrap_or_else(|| usual.size.columns().into()),
    )?;
    let name = fields.string("term")?;
    TerminalSpec::new(size, name.unwrap_or_else(|| usual.name().to_owned()))
}

/// A label of the client.
pub(super) fn tag(fields: &mut Fields<'_>) -> Result<Option<String>> {
    let tag = fields.string("tag")?;
    if tag.as_ref().map_or(0, String::len) > MAX_TAG_BYTES {
        return Err(Error::invalid(format_args!(
            "tag is longer than {MAX_TAG_BYTES} bytes; keep what belongs to it on your side"
        )));
    }
    Ok(tag)
}

/// Rows and columns, where they are given.
fn terminal_sides(fields: &mut Fields<'_>) -> Result<[Option<u64>; 2]> {
    let range = 1..=u64::from(TerminalSize::MAX);
    Ok([
        fields.whole("rows", range.clone())?,
        fields.whole("cols", range)?,
    ])
}

/// Reads the body of `resize`.
///
/// # Errors
/// `Invalid` if rows or cols are missing, or not those of a terminal.
pub(in crate::api) fn resize_request(fields: &mut Fields<'_>) -> Result<TerminalSize> {
    match terminal_sides(fields)? {
        [Some(rows), Some(columns)] => TerminalSize::new(rows, columns),
        [rows, _] => {
            let field = if rows.is_none() { "rows" } else { "cols" };
            Err(missing(field, "a whole number"))
        }
    }
}

pub(super) fn environment(fields: &mut Fields<'_>) -> Result<Vec<EnvironmentChange>> {
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
                // As the client wrote it: 0.10 stays 0.10.
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

/// Reads the body of `kill`: the signal, and the group that gets it. An empty body means SIGKILL.
///
/// # Errors
/// `Invalid` if the signal or the group is not known.
pub(in crate::api) fn signal_request(fields: &mut Fields<'_>) -> Result<(i32, SignalGroup)> {
    let groups = [("foreground", SignalGroup::Foreground)];
    let group = fields.choice("group", &groups)?.unwrap_or(SignalGroup::Own);
    let signal = fields.take("signal").map_or(Ok(libc::SIGKILL), signal)?;
    Ok((signal, group))
}

/// What a client asks of the terminal that it is attached to. Several requests are carried out in the order
/// of the fields here.
pub(in crate::api) struct TerminalRequest {
    /// Take the input over from all others.
    pub(in crate::api) take: bool,
    /// Set the size.
    pub(in crate::api) resize: Option<TerminalSize>,
    /// Send a signal to the foreground group.
    pub(in crate::api) signal: Option<i32>,
    /// End the input.
    pub(in crate::api) eof: bool,
}

/// Reads a text frame of an attached client; `None` if it is no JSON object.
pub(in crate::api) fn terminal_request(text: &[u8]) -> Option<Result<TerminalRequest>> {
    let mut fields = Fields::parse(text).ok()?;
    let read = |fields: &mut Fields<'_>| {
        let resize = fields.take("resize");
        let request = TerminalRequest {
            take: fields.boolean("take")?.unwrap_or(false),
            resize: resize
                .map(|size| resize_request(&mut Fields::parse(size.get().as_bytes())?))
                .transpose()?,
            signal: fields.take("signal").map(signal).transpose()?,
            eof: fields.boolean("eof")?.unwrap_or(false),
        };
        if !request.take && request.resize.is_none() && request.signal.is_none() && !request.eof {
            let text = "this asks for nothing; a request has resize, signal, eof or take";
            return Err(Error::invalid(text));
        }
        Ok(request)
    };
    Some(read(&mut fields))
}

fn signal(signal: &RawValue) -> Result<i32> {
    let accepted = "a name such as TERM or SIGTERM, or a number from 1 to 64";
    let known = match JsonType::of(signal) {
        JsonType::Number => {
            let number = signal.get().parse().ok();
            number.filter(|number| (1..=64).contains(number))
        }
        JsonType::String => {
            let upper = decoded::<String>("signal", signal)?.to_ascii_uppercase();
            let full = if upper.starts_with("SIG") {
                upper
            } else {
                format!("SIG{upper}")
            };
            let known: Option<Signal> = full.parse().ok();
            known.map(|signal| signal as i32)
        }
        _ => return Err(wrong_type("signal", accepted, signal)),
    };
    known.ok_or_else(|| {
        Error::invalid(format_args!(
            "signal {signal} is not known; it takes {accepted}"
        ))
    })
}

/// Reads the body of a request for a virtual environment: its path, if the client has chosen one.
///
/// # Errors
/// `Invalid` if the body is no JSON object, or the path has a wrong type or value.
pub(in crate::api) fn venv_request(fields: &mut Fields<'_>) -> Result<Option<FilePath>> {
    let path = fields.string("path")?;
    path.map(|path| FilePath::new(path.as_bytes())).transpose()
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
pub(in crate::api) const LISTED_COMMAND_BYTES: usize = 16 * 1024;

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

    /// The texts that fit. Each counts one byte more, because many may be empty.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::json::parsed;
    use crate::codec::fields::MAX_VALUES;

    fn refused(body: &str) -> String {
        match parsed(body.as_bytes(), command_request) {
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
            ("code", "1"),
            ("code", "[]"),
            ("code", "\"print()\""),
            ("language", "1"),
            ("language", "\"ruby\""),
            ("language", "\"Python\""),
            ("args", "\"a\""),
            ("args", "[1]"),
            ("args", "[\"\\u0000\"]"),
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
            ("pty", "1"),
            ("pty", "\"xterm\""),
            ("pty", "[]"),
            ("rows", "0"),
            ("rows", "4097"),
            ("rows", "1.5"),
            ("cols", "\"80\""),
            ("term", "1"),
            ("term", "\"\""),
            ("term", "\"a/b\""),
        ] {
            let rest = match field {
                "cmd" => "",
                "language" | "args" => ",\"code\":\"\"",
                _ => ",\"cmd\":\"true\"",
            };
            let text = if matches!(field, "rows" | "cols" | "term") {
                refused(&format!("{{\"pty\":{{\"{field}\":{value}}}{rest}}}"))
            } else {
                refused(&format!("{{\"{field}\":{value}{rest}}}"))
            };
            assert!(text.contains(field), "{field}={value}: {text}");
        }
    }

    #[test]
    fn numbers_in_the_environment_keep_their_digits() {
        let request = parsed(br#"{"cmd":"x","env":{"A":1,"B":0.10,"C":true,"D":null,"E":"s","F":123456789012345678901234567890}}"#, command_request)
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
        let request = parsed(
            br#"{"cmd":["a"],"cwd":null,"timeout":null,"id":null,"future":{"x":1}}"#,
            command_request,
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
        assert!(parsed(words(MAX_VALUES).as_bytes(), command_request).is_ok());
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
        assert!(parsed(br#"{"cmd":"x","shell":true}"#, command_request).is_ok());
        assert!(parsed(br#"{"cmd":["x"],"shell":false}"#, command_request).is_ok());
    }

    #[test]
    fn code_is_run_in_place_of_a_command() {
        let line = |body: &str| {
            let request = parsed(body.as_bytes(), command_request).unwrap();
            request.spec.line().clone()
        };
        let run = |language, code: &str, arguments: &[&str]| CommandLine::Code {
            language,
            code: code.to_owned(),
            arguments: arguments.iter().map(|word| (*word).to_owned()).collect(),
        };
        assert_eq!(line(r#"{"code":"1"}"#), run(Language::Python, "1", &[]));
        assert_eq!(
            line(r#"{"cmd":null,"code":"","args":["","-x"],"language":"js"}"#),
            run(Language::JavaScript, "", &["", "-x"])
        );
        for (names, language) in [
            (&["python", "py"][..], Language::Python),
            (&["javascript", "js", "node"], Language::JavaScript),
            (&["bash", "sh"], Language::Bash),
        ] {
            for name in names {
                let body = format!("{{\"code\":\"\",\"language\":\"{name}\"}}");
                assert_eq!(line(&body), run(language, "", &[]));
            }
        }
        for body in [
            r#"{"code":"1","shell":true}"#,
            r#"{"cmd":"x","args":["y"]}"#,
            r#"{"cmd":"x","language":"bash"}"#,
            r#"{"code":"\u0000","language":"bash"}"#,
        ] {
            refused(body);
        }
        let pty = r#"{"pty":true,"code":"1"}"#;
        assert_eq!(line(pty), run(Language::Python, "1", &[]));
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
            let request = parsed(body.as_bytes(), signal_request).unwrap();
            assert_eq!(request, (9, SignalGroup::Own), "{body}");
        }
        let foreground = parsed(br#"{"signal":"INT","group":"foreground"}"#, signal_request);
        assert_eq!(foreground.unwrap(), (2, SignalGroup::Foreground));
        for body in [
            "{\"signal\":0}",
            "{\"signal\":65}",
            "{\"signal\":\"9\"}",
            "{\"signal\":\"NOPE\"}",
            "{\"signal\":1.5}",
            "{\"group\":\"all\"}",
            "{\"group\":1}",
            "[]",
        ] {
            assert!(parsed(body.as_bytes(), signal_request).is_err(), "{body}");
        }
    }

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
