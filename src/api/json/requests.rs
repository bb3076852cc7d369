//! JSON bodies, parsed by [`Fields`] into typed requests.

use std::ops::RangeInclusive;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::value::RawValue;

use super::network;
use crate::codec::fields::{Elements, Fields, JsonType, Members, decoded, strings, wrong_type};
use crate::command::{
    ChosenId, CommandLine, CommandSpec, EnvironmentChange, INTERACTIVE_SHELL, StdinSource,
    TerminalSize, TerminalSpec, check_environment,
};
use crate::confine::WholeLimits;
use crate::error::{Error, Result};
use crate::files::hash::Digest;
use crate::files::name::FilePath;
use crate::files::search::Matcher;
use crate::files::watch::Settings;
use crate::host::SandboxSpec;
use crate::isolation::Isolation;
use crate::language::Language;
use crate::process::OnDisconnect;
use crate::workspace::{ClientFile, FileState, SignalGroup};

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
    /// The command.
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
    spec.network = network::posture(fields)?;
    spec.id = fields.string("id")?.map(ChosenId::new).transpose()?;
    if let Some(text) = fields.string("stdin")? {
        if terminal.is_some() {
            let text = "stdin and pty are both given, but a terminal gets its input by POST stdin";
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
        [None, _] => Err(Error::invalid("rows is missing")),
        [_, None] => Err(Error::invalid("cols is missing")),
    }
}

/// Reads the request to reach a port: its number, or its name, as the port proxy takes it in a path.
///
/// # Errors
/// `Invalid` if it is missing, or is neither a text nor a number.
pub(in crate::api) fn port_request(fields: &mut Fields<'_>) -> Result<String> {
    let port = fields.take("port");
    let port = port.ok_or_else(|| Error::invalid("port is missing"))?;
    let is_whole = || port.get().bytes().all(|byte| byte.is_ascii_digit());
    match JsonType::of(port) {
        JsonType::String => decoded("port", port),
        JsonType::Number if is_whole() => Ok(port.get().to_owned()),
        _ => Err(wrong_type("port", "a whole number or a name", port)),
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

/// Most sandboxes of one request.
const MAX_SANDBOXES: u64 = 10_000;

/// Most bytes of a sandbox's environment: as much as the kernel takes in a single variable
/// (`MAX_ARG_STRLEN`, execve(2)).
const MAX_ENVIRONMENT_BYTES: usize = 128 * 1024;

/// Largest `max_procs`.
const MAX_PROCESSES: u64 = 1 << 20;

/// Most TCP ports of a sandbox.
const MAX_TCP_PORTS: u64 = 16;

/// Most paths that are added to what a sandbox can read, or change.
const MAX_PATHS: usize = 64;

/// Largest `max_mem_mb` and `max_total_mem_mb`, in MiB.
const MAX_MEMORY_MB: u64 = 1 << 30;

/// The values of `max_cpu`, in seconds of processor time for each second.
const CPU: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(4096);

/// The same for people.
const ACCEPTED_CPU: &str = "a number of processors from 0.1 to 4096";

/// Reads the body of a request for sandboxes: their number and settings. An empty body asks for one
/// sandbox with the defaults.
///
/// # Errors
/// `Invalid` if the body is no JSON object, or a field has a wrong type or value.
pub(in crate::api) fn sandbox_request(fields: &mut Fields<'_>) -> Result<(usize, SandboxSpec)> {
    let environment = environment(fields)?;
    // The same rules hold for the variables of a command.
    check_environment(&environment)?;
    let size =
        |(name, value): &EnvironmentChange| name.len() + value.as_ref().map_or(0, String::len);
    if environment.iter().map(size).sum::<usize>() > MAX_ENVIRONMENT_BYTES {
        return Err(Error::invalid(format_args!(
            "env is larger than {MAX_ENVIRONMENT_BYTES} bytes; every command would carry it: put large values into files"
        )));
    }
    let count = fields.whole("count", 1..=MAX_SANDBOXES)?.unwrap_or(1);
    let idle = fields.whole("idle_timeout_secs", 0..=u32::MAX.into())?;
    let memory = fields.whole("max_mem_mb", 1..=MAX_MEMORY_MB)?;
    let total = fields.whole("max_total_mem_mb", 1..=MAX_MEMORY_MB)?;
    let ports = fields.whole("tcp_ports", 0..=MAX_TCP_PORTS)?.unwrap_or(0);
    let spec = SandboxSpec {
        environment: environment.into(),
        // 0 means never, as in SBX_IDLE_TIMEOUT.
        idle_timeout: idle.filter(|seconds| *seconds > 0).map(Duration::from_secs),
        max_processes: fields.whole("max_procs", 1..=MAX_PROCESSES)?,
        max_memory: memory.map(|megabytes| megabytes << 20),
        isolation: fields.choice("isolation", &Isolation::NAMES)?,
        whole: WholeLimits {
            memory: total.map(|megabytes| megabytes << 20),
            cpu: fields.processors("max_cpu", ACCEPTED_CPU, CPU)?,
        },
        network: network::posture(fields)?,
        read_only_paths: paths(fields, "read_only_paths")?,
        read_write_paths: paths(fields, "read_write_paths")?,
        tcp_ports: usize::try_from(ports).unwrap_or(usize::MAX),
        ..SandboxSpec::default()
    };
    Ok((usize::try_from(count).unwrap_or(usize::MAX), spec))
}

/// Absolute paths; none if there is no such field.
fn paths(fields: &mut Fields<'_>, name: &'static str) -> Result<Vec<String>> {
    let accepted = format!("an array of at most {MAX_PATHS} absolute paths");
    let paths = fields
        .take(name)
        .map(|array| strings(name, &accepted, array));
    let paths = paths.transpose()?.unwrap_or_default();
    if paths.len() > MAX_PATHS {
        let count = paths.len();
        return Err(Error::invalid(format_args!(
            "{name} has {count} paths; it takes {accepted}"
        )));
    }
    Ok(paths)
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

/// Reads the body of a request about several files.
///
/// # Errors
/// `Invalid` if `paths` is no list of paths.
pub(in crate::api) fn paths_request(fields: &mut Fields<'_>) -> Result<Vec<FilePath>> {
    let accepted = "a list of paths";
    let Some(paths) = fields.take("paths") else {
        return Err(Error::invalid(format_args!(
            "paths is missing; it takes {accepted}"
        )));
    };
    if JsonType::of(paths) != JsonType::Array {
        return Err(wrong_type("paths", accepted, paths));
    }
    let paths = decoded::<Elements<'_>>("paths", paths)?.0;
    let path = |path: &RawValue| {
        if JsonType::of(path) != JsonType::String {
            return Err(wrong_type("paths", accepted, path));
        }
        FilePath::new(decoded::<String>("paths", path)?.as_bytes())
    };
    paths.into_iter().map(path).collect()
}

/// Reads the body of a request to compare a tree: its path, and the client's files.
///
/// # Errors
/// `Invalid` if a field is missing, or has a wrong type or value.
pub(in crate::api) fn compare_request(
    fields: &mut Fields<'_>,
) -> Result<(FilePath, Vec<ClientFile>)> {
    let missing = |name| Error::invalid(format_args!("{name} is missing"));
    let tree = fields.string("path")?.ok_or_else(|| missing("path"))?;
    let entries = fields.take("entries").ok_or_else(|| missing("entries"))?;
    if JsonType::of(entries) != JsonType::Array {
        return Err(wrong_type("entries", "an array of objects", entries));
    }
    let read = |entry: &RawValue| -> Result<_> {
        let mut fields = Fields::parse(entry.get().as_bytes())?;
        let path = fields.string("path")?.ok_or_else(|| missing("path"))?;
        let digest = |text: String| {
            let wrong = || Error::invalid("sha256 takes 64 hexadecimal digits");
            Digest::parse(&text).ok_or_else(wrong)
        };
        Ok(ClientFile {
            path: FilePath::new(path.as_bytes())?,
            size: fields
                .whole("size", 0..=u64::MAX)?
                .ok_or_else(|| missing("size"))?,
            modified_ms: fields.integer("mtime_ms")?,
            sha256: fields.string("sha256")?.map(digest).transpose()?,
            state: FileState::default(),
        })
    };
    let entries = decoded::<Elements<'_>>("entries", entries)?.0.into_iter();
    let named = |(number, entry): (usize, _)| {
        read(entry).map_err(|error| Error::invalid(format_args!("entries[{number}]: {error}")))
    };
    let files = entries.enumerate().map(named).collect::<Result<_>>()?;
    Ok((FilePath::new(tree.as_bytes())?, files))
}

/// Reads the body of a request for a watch, and the id that the client chose.
///
/// # Errors
/// `Invalid` if a field has a wrong type or value.
pub(in crate::api) fn watch_request(fields: &mut Fields<'_>) -> Result<(Settings, Option<String>)> {
    let path = fields.string("path")?;
    let path = path.ok_or_else(|| Error::invalid("path is missing; it takes a directory"))?;
    let patterns = fields.take("exclude");
    let patterns = patterns.map(|list| strings("exclude", "a list of patterns", list));
    let patterns = patterns.transpose()?.unwrap_or_default();
    let settings = Settings {
        path: FilePath::new(path.as_bytes())?,
        recursive: fields.boolean("recursive")?.unwrap_or(false),
        exclude: Matcher::new(patterns.iter().map(String::as_bytes))?,
    };
    Ok((settings, fields.string("id")?))
}

/// Reads the body of a request for a virtual environment: its path, if the client has chosen one.
///
/// # Errors
/// `Invalid` if the body is no JSON object, or the path has a wrong type or value.
pub(in crate::api) fn venv_request(fields: &mut Fields<'_>) -> Result<Option<FilePath>> {
    let path = fields.string("path")?;
    path.map(|path| FilePath::new(path.as_bytes())).transpose()
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
}
