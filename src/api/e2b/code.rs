//! The code interpreter: executions and contexts. Its errors are plain texts.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use serde_json::value::RawValue;

use super::calls::{Answer, Call};
use super::errors::E2bError;
use super::paths::Paths;
use super::processes::variables_in;
use crate::client::{Client, Disconnected};
use crate::clock::now_ms;
use crate::codec::escape;
use crate::codec::fields::{Fields, Members};
use crate::codec::object::object;
use crate::codec::time::rfc3339;
use crate::http::stream::{StreamClient, StreamWriter};
use crate::http::{Body, Response};
use crate::interpreter::event::{Bundle, CodeError, End, EndReason, Event};
use crate::interpreter::{
    Context, ContextSpec, DEFAULT_PREFIX, ExecutionSpec, ExecutionSubscriber,
};
use crate::spec::command::check_environment;
use crate::spec::language::Language;
use crate::workspace::{Lease, Workspace};

/// Silence after which a client gets a message that the code still runs.
const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(5);
const KEEP_ALIVE: &[u8] = b"{\"type\":\"keepalive\"}\n";

/// The names that clients have for the forms of a value, by MIME type.
const FORMS: [(&str, &str); 12] = [
    ("text/plain", "text"),
    ("text/html", "html"),
    ("text/markdown", "markdown"),
    ("image/svg+xml", "svg"),
    ("image/png", "png"),
    ("image/jpeg", "jpeg"),
    ("application/pdf", "pdf"),
    ("text/latex", "latex"),
    ("application/json", "json"),
    ("application/javascript", "javascript"),
    ("e2b/data", "data"),
    ("e2b/chart", "chart"),
];

/// `POST /execute`.
pub(super) fn execute(call: &mut Call<'_, '_>, workspace: &Workspace, _: &str) -> Answer {
    let body = call.body()?;
    let mut fields = Fields::parse(&body)?;
    let missing = || E2bError::invalid("code is missing");
    let mut spec = ExecutionSpec::new(fields.string("code")?.ok_or_else(missing)?);
    spec.sends_values = true;
    let environment = variables_in(&mut fields, "env_vars")?;
    check_environment(&environment)?;
    let environment = environment.into_iter();
    let environment = environment.filter_map(|(name, value)| Some((name, value?)));
    spec.environment = environment.collect();
    let id = fields.string("context_id")?;
    let language = fields.string("language")?;
    if id.is_some() && language.is_some() {
        let text = "only one of context_id and language can be given";
        return Err(E2bError::invalid(text));
    }
    let (id, language) = match id {
        Some(id) => match named(workspace, &id)? {
            Named::Context(_) => (Some(id), None),
            Named::Default(language) => (None, Some(language)),
        },
        None => (None, Some(language_of(language.as_deref())?)),
    };
    let context = ContextSpec {
        id,
        directory: Some(Paths::of(workspace).home()),
        ..ContextSpec::default()
    };
    let asked = workspace.execute_code(language, context, spec, false, &mut call.interrupt())?;
    let lease = workspace.share()?;
    let write = move |stream: &mut StreamWriter| {
        let client = StreamClient::new(stream, KEEP_ALIVE, KEEP_ALIVE_AFTER);
        let mut writer = CodeEvents {
            client,
            lease,
            has_error: false,
            is_lost: false,
        };
        asked.follow(&mut writer);
        if writer.is_lost {
            stream.break_off();
        }
    };
    Ok(Response::new(200, Body::Stream(Box::new(write)))
        .with_header("Content-Type", "application/json")
        .with_header("X-Accel-Buffering", "no"))
}

/// `GET /contexts`.
pub(super) fn list(_: &mut Call<'_, '_>, workspace: &Workspace, _: &str) -> Answer {
    let contexts = workspace.contexts.list();
    let mut documents = Vec::new();
    for language in LISTED {
        let is_made = contexts
            .iter()
            .any(|context| is_default(context.id(), language));
        if !is_made && workspace.has_program(language.program())? {
            documents.push(default_document(workspace, language));
        }
    }
    documents.extend(contexts.iter().map(document));
    Ok(Response::json(&documents))
}

/// `POST /contexts`.
pub(super) fn create(call: &mut Call<'_, '_>, workspace: &Workspace, _: &str) -> Answer {
    let body = call.body()?;
    let body: &[u8] = if body.trim_ascii().is_empty() {
        b"{}"
    } else {
        &body
    };
    let mut fields = Fields::parse(body)?;
    let language = language_of(fields.string("language")?.as_deref())?;
    let directory = fields.string("cwd")?.unwrap_or_default();
    let directory = Paths::of(workspace).absolute(directory.as_bytes())?;
    let spec = ContextSpec {
        directory: Some(String::from_utf8_lossy(&directory).into_owned()),
        ..ContextSpec::default()
    };
    let interrupt = &mut call.interrupt();
    let context = workspace.contexts.create(language, spec, interrupt)?;
    Ok(Response::json(&document(&context)))
}

/// `DELETE /contexts/{id}`.
pub(super) fn delete(_: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    if let Named::Context(_) = named(workspace, id)? {
        workspace.contexts.delete(id)?;
    }
    Ok(Response::json(&object! {}))
}

/// `POST /contexts/{id}/restart`.
pub(super) fn restart(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    Ok(Response::json(&match named(workspace, id)? {
        Named::Context(context) => {
            context.restart(&mut call.interrupt())?;
            document(&context)
        }
        Named::Default(language) => default_document(workspace, language),
    }))
}

/// The languages whose default contexts clients see before they are made: at their first use, so that a sandbox that
/// runs no code starts no interpreter.
const LISTED: [Language; 2] = [Language::Python, Language::JavaScript];

/// The context that a client means.
enum Named {
    Context(Arc<Context>),
    /// That of a language, which is not made yet.
    Default(Language),
}

/// # Errors
/// There is no context with this id.
fn named(workspace: &Workspace, id: &str) -> Result<Named, E2bError> {
    if let Ok(context) = workspace.contexts.find(id) {
        return Ok(Named::Context(context));
    }
    let mut listed = LISTED.into_iter();
    let default = listed.find(|language| is_default(id, *language));
    let unknown = || E2bError::not_found(format!("context {id} was not found"));
    default.map(Named::Default).ok_or_else(unknown)
}

fn is_default(id: &str, language: Language) -> bool {
    id.strip_prefix(DEFAULT_PREFIX) == Some(language.name())
}

fn default_document(workspace: &Workspace, language: Language) -> Value {
    let name = language.name();
    object! {
        "id": format!("{DEFAULT_PREFIX}{name}"),
        "language": name,
        "cwd": Paths::of(workspace).home(),
    }
}

fn document(context: &Arc<Context>) -> Value {
    object! {
        "id": context.id(),
        "language": context.language.name(),
        "cwd": context.directory(),
    }
}

/// The language of a name; Python if there is none.
fn language_of(name: Option<&str>) -> Result<Language, E2bError> {
    let name = name.unwrap_or("python").trim().to_ascii_lowercase();
    Language::of(&name).map_err(|_| {
        let text =
            format_args!("{name} is not supported; the languages are python, javascript and bash");
        E2bError::invalid(text)
    })
}

/// Writes what happens in an execution as lines.
struct CodeEvents<'a> {
    client: StreamClient<'a>,
    lease: Lease,
    /// An exception was told: the end says no more.
    has_error: bool,
    /// The sandbox ended under the execution. Clients ask whether it runs when their connection breaks.
    is_lost: bool,
}

impl CodeEvents<'_> {
    fn line(&mut self, kind: &str, members: &[(&str, &str)]) {
        self.client.push(|out| {
            out.extend_from_slice(b"{\"type\":\"");
            out.extend_from_slice(kind.as_bytes());
            for (name, value) in members {
                out.extend_from_slice(format!("\",\"{name}\":\"").as_bytes());
                append_text(out, value.as_bytes());
            }
            out.extend_from_slice(b"\"}\n");
        });
    }

    fn raw(&mut self, text: &str) {
        self.client
            .push(|out| out.extend_from_slice(text.as_bytes()));
    }

    /// A value of JSON, which may be large.
    fn json(&mut self, before: &str, json: &str, after: &str) -> Result<(), Disconnected> {
        let append = |out: &mut Vec<u8>, part: &[u8]| {
            append_ascii(out, &String::from_utf8_lossy(part));
        };
        self.client
            .push_value(before, json.as_bytes(), after, true, append)
    }

    /// A text in a JSON string, which may be large.
    fn text(&mut self, before: &str, text: &[u8], after: &str) -> Result<(), Disconnected> {
        self.client
            .push_value(before, text, after, true, append_text)
    }

    fn bundle(&mut self, bundle: &Bundle) -> Result<(), Disconnected> {
        let Ok(Members(values)) = serde_json::from_str::<Members<'_>>(&bundle.data) else {
            return Ok(());
        };
        let is_main = bundle.is_main;
        self.raw(&format!(
            "{{\"type\":\"result\",\"is_main_result\":{is_main}"
        ));
        let is_known = |mime: &str| FORMS.iter().any(|(known, _)| *known == mime);
        for (mime, name) in FORMS {
            let Some(value) = values.get(mime) else {
                continue;
            };
            let text = if name == "text" { text_of(value) } else { None };
            match text {
                Some(text) => self.json(",\"text\":\"", text, "\"")?,
                None => self.json(&format!(",\"{name}\":"), value.get(), "")?,
            }
        }
        let mut others = values.iter().filter(|(mime, _)| !is_known(mime)).peekable();
        if others.peek().is_some() {
            let mut separator = ",\"extra\":{\"";
            for (mime, value) in others {
                self.text(separator, mime.as_bytes(), "\":")?;
                self.json("", value.get(), "")?;
                separator = ",\"";
            }
            self.raw("}");
        }
        self.raw("}\n");
        Ok(())
    }

    fn error(&mut self, error: &CodeError) -> Result<(), Disconnected> {
        self.has_error = true;
        let name = error.name.as_bytes();
        self.text("{\"type\":\"error\",\"name\":\"", name, "\",\"value\":\"")?;
        self.text("", error.value.as_bytes(), "\",\"traceback\":\"")?;
        for (index, line) in error.traceback.iter().enumerate() {
            let before = if index == 0 { "" } else { "\\n" };
            self.text(before, line.as_bytes(), "")?;
        }
        self.raw("\"}\n");
        Ok(())
    }

    fn end(&mut self, end: &End) {
        let is_own = matches!(end.reason, EndReason::Completed | EndReason::Error);
        if self.lease.is_closed() && !is_own {
            self.is_lost = true;
            return;
        }
        let (name, value) = match end.reason {
            EndReason::Completed | EndReason::Error => ("", ""),
            EndReason::Timeout => (
                "TimeoutError",
                "the execution was ended because its time was up",
            ),
            EndReason::Interrupted | EndReason::Disconnected => {
                ("KeyboardInterrupt", "the execution was interrupted")
            }
            EndReason::Died => (
                "InterpreterDied",
                "the interpreter ended, and what the code had made is lost",
            ),
            EndReason::OutOfMemory => (
                "OutOfMemory",
                "the interpreter was ended because the machine had no memory left",
            ),
            EndReason::MemoryLimit => (
                "OutOfMemory",
                "the interpreter was ended because the sandbox was above its limit on memory",
            ),
            EndReason::Restarted => ("ContextRestarted", "the context was restarted"),
            EndReason::Deleted => ("ContextDeleted", "the context was deleted"),
            EndReason::Cancelled => ("Cancelled", "the execution was cancelled before it ran"),
            EndReason::ContextDead => (
                "InterpreterDied",
                "the context died before the execution ran",
            ),
        };
        if !name.is_empty() && !self.has_error {
            self.line(
                "error",
                &[("name", name), ("value", value), ("traceback", "")],
            );
        }
        self.line("end_of_execution", &[]);
    }
}

/// Appends a text as it stands in a JSON string. A client of these decodes each piece that it receives by itself, so no
/// character may have more than one byte.
fn append_text(out: &mut Vec<u8>, text: &[u8]) {
    let mut escaped = Vec::with_capacity(text.len() + text.len() / 8);
    escape::append(&mut escaped, text);
    append_ascii(out, &String::from_utf8_lossy(&escaped));
}

/// Appends JSON with all characters beyond ASCII escaped. They are in strings only.
fn append_ascii(out: &mut Vec<u8>, json: &str) {
    if json.is_ascii() {
        return out.extend_from_slice(json.as_bytes());
    }
    for character in json.chars() {
        if character.is_ascii() {
            out.push(character as u8);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            out.extend_from_slice(format!("\\u{unit:04x}").as_bytes());
        }
    }
}

/// What stands in a JSON string that is a text, without one pair of quotes around it: Python shows texts with them.
fn text_of(value: &RawValue) -> Option<&str> {
    let text = value.get().strip_prefix('"')?.strip_suffix('"')?;
    let inner = ["'", "\\\""].into_iter().find_map(|quote| {
        let inner = text.strip_prefix(quote)?;
        inner.strip_suffix(quote)
    });
    Some(inner.unwrap_or(text))
}

impl ExecutionSubscriber for CodeEvents<'_> {
    fn client(&mut self) -> &mut dyn Client {
        &mut self.client
    }

    fn event(&mut self, _: u64, event: &Event, output: &[u8]) -> Result<(), Disconnected> {
        match event {
            Event::Start(start) => {
                let count = start.count;
                self.raw(&format!(
                    "{{\"type\":\"number_of_executions\",\"execution_count\":{count}}}\n"
                ));
            }
            Event::Output { stream, .. } => {
                let timestamp = rfc3339(now_ms().cast_signed());
                let head = format!("{{\"type\":\"{}\",\"text\":\"", stream.name());
                let tail = format!("\",\"timestamp\":\"{timestamp}\"}}\n");
                return self.text(&head, output, &tail);
            }
            Event::Bundle(bundle) => return self.bundle(bundle),
            Event::Error(error) => return self.error(error),
            Event::Dropped { bytes, .. } => {
                let text = format!("[{bytes} bytes of output were dropped]\n");
                let timestamp = rfc3339(now_ms().cast_signed());
                self.line("stderr", &[("text", &text), ("timestamp", &timestamp)]);
            }
            Event::End(end) => self.end(end),
            Event::Queued { .. } | Event::Clear { .. } | Event::Input { .. } => {}
        }
        Ok(())
    }

    fn dropped(&mut self, first: u64, last: u64) -> Result<(), Disconnected> {
        let text = format!("[{} events were dropped]\n", last - first + 1);
        let timestamp = rfc3339(now_ms().cast_signed());
        self.line("stderr", &[("text", &text), ("timestamp", &timestamp)]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn no_character_has_more_than_one_byte() {
        let mut out = Vec::new();
        append_text(&mut out, "a\"☃\u{1f600}\u{2028}\n".as_bytes());
        assert_eq!(out, br#"a\"\u2603\ud83d\ude00\u2028\n"#);
    }

    #[test]
    fn one_pair_of_quotes_goes() {
        for (text, expected) in [
            ("'a'", "a"),
            ("\"it's\"", "it's"),
            ("''", ""),
            ("'", "'"),
            ("'a", "'a"),
            ("''a''", "'a'"),
            ("b'a'", "b'a'"),
            ("", ""),
            ("\"", "\""),
            ("\\", "\\"),
            ("\\\"", "\\\""),
        ] {
            let json = RawValue::from_string(json!(text).to_string()).unwrap();
            let inner = text_of(&json).unwrap();
            assert_eq!(format!("\"{inner}\""), json!(expected).to_string());
        }
        let list = RawValue::from_string("[1]".to_owned()).unwrap();
        assert_eq!(text_of(&list), None);
    }

    #[test]
    fn a_language_that_is_not_there_is_named() {
        assert_eq!(language_of(None).unwrap(), Language::Python);
        assert_eq!(language_of(Some(" JS ")).unwrap(), Language::JavaScript);
        let failure = language_of(Some("r")).unwrap_err();
        assert_eq!(failure.status, 400);
        assert!(failure.text.contains("python, javascript and bash"));
    }
}
