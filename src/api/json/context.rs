//! Interpreter contexts and executions: what requests ask for, and what answers say.

use std::time::Duration;

use serde::Serialize;

use super::command::{ENCODINGS, Encoding, codes, environment, milliseconds, tag};
use super::network;
use crate::codec::fields::Fields;
use crate::error::{Error, Result};
use crate::interpreter::event::End;
use crate::interpreter::{
    Abandoned, Context, ContextSpec, ContextState, Execution, ExecutionSpec, ExecutionState,
    KILL_AFTER,
};
use crate::spec::command::{ChosenId, check_environment};
use crate::spec::language::Language;

/// Largest `max_output_bytes`: what every JSON library holds in an integer.
const MAX_OUTPUT_BYTES: u64 = i64::MAX.cast_unsigned();

/// A request to execute code.
pub(in crate::api) struct ExecuteRequest {
    pub(in crate::api) spec: ExecutionSpec,
    /// Where: its id, and what a new one is made with.
    pub(in crate::api) context: ContextSpec,
    /// `None` if the request does not say.
    pub(in crate::api) language: Option<Language>,
    pub(in crate::api) is_stateless: bool,
    pub(in crate::api) encoding: Encoding,
    /// In the simple shape.
    pub(in crate::api) is_simple: bool,
}

/// Reads the body of `execute`.
///
/// # Errors
/// `Invalid` if the body is no JSON object, or a field is missing or has a wrong type or value;
/// `UnsupportedLanguage`.
pub(in crate::api) fn execute_request(fields: &mut Fields<'_>) -> Result<ExecuteRequest> {
    let mut spec = ExecutionSpec::new(fields.required_string("code")?);
    spec.id = id(fields, "id")?;
    spec.timeout = fields.seconds("timeout")?;
    spec.kill_after = fields.seconds("kill_after")?.unwrap_or(KILL_AFTER);
    spec.stdin = fields.string("stdin")?;
    spec.asks = fields.boolean("allow_input")?.unwrap_or(false);
    if spec.asks && spec.stdin.is_some() {
        let text = "stdin and allow_input are both given, but input comes from one of them";
        return Err(Error::invalid(text));
    }
    let environment = environment(fields)?;
    check_environment(&environment)?;
    let set = environment.into_iter();
    spec.environment = set
        .filter_map(|(name, value)| Some((name, value?)))
        .collect();
    let actions = [
        ("interrupt", Abandoned::Interrupt),
        ("keep", Abandoned::Keep),
    ];
    spec.abandoned = fields
        .choice("on_disconnect", &actions)?
        .unwrap_or(Abandoned::Interrupt);
    spec.max_output = fields
        .whole("max_output_bytes", 0..=MAX_OUTPUT_BYTES)?
        .unwrap_or(u64::MAX);
    let formats = [("events", false), ("simple", true)];
    let context = ContextSpec {
        id: id(fields, "context")?,
        backend: fields.string("backend")?,
        network: network::policy(fields)?,
        ..ContextSpec::default()
    };
    let is_stateless = fields.boolean("stateless")?.unwrap_or(false);
    if context.network.is_some() && !is_stateless {
        let text = "network goes with stateless, or with POST contexts: an existing context keeps its network";
        return Err(Error::invalid(text));
    }
    if is_stateless && context.id.is_some() {
        let text = "stateless and context are both given, but a stateless execution has a context of its own";
        return Err(Error::invalid(text));
    }
    Ok(ExecuteRequest {
        spec,
        context,
        language: language(fields)?,
        is_stateless,
        encoding: fields.choice("encoding", &ENCODINGS)?.unwrap_or_default(),
        is_simple: fields.choice("format", &formats)?.unwrap_or(false),
    })
}

/// Reads the body of a request for a context.
///
/// # Errors
/// As for [`execute_request`].
pub(in crate::api) fn context_request(fields: &mut Fields<'_>) -> Result<(Language, ContextSpec)> {
    let environment = environment(fields)?;
    check_environment(&environment)?;
    let spec = ContextSpec {
        id: id(fields, "id")?,
        backend: fields.string("backend")?,
        directory: fields
            .string("cwd")?
            .filter(|directory| !directory.is_empty()),
        environment,
        tag: tag(fields)?,
        network: network::policy(fields)?,
        user: None,
    };
    let language = language(fields)?.unwrap_or(Language::Python);
    Ok((language, spec))
}

/// Reads the body of `interrupt`: the execution, and when it is killed.
///
/// # Errors
/// As for [`execute_request`].
pub(in crate::api) fn interrupt_request(
    fields: &mut Fields<'_>,
) -> Result<(Option<String>, Option<Duration>)> {
    Ok((fields.string("execution")?, fields.seconds("kill_after")?))
}

/// Reads the body of `input`: a line, or `None` for the end of input.
///
/// # Errors
/// As for [`execute_request`].
pub(in crate::api) fn answer_request(fields: &mut Fields<'_>) -> Result<Option<String>> {
    let is_end = fields.boolean("eof")?.unwrap_or(false);
    match (fields.string("value")?, is_end) {
        (Some(value), false) => Ok(Some(value)),
        (None, true) => Ok(None),
        _ => Err(Error::invalid(
            "input takes value, a string, or eof, which is true",
        )),
    }
}

fn language(fields: &mut Fields<'_>) -> Result<Option<Language>> {
    let name = fields.string("language")?;
    name.map(|name| Language::of(&name)).transpose()
}

/// An id that a client chose for a context or an execution.
fn id(fields: &mut Fields<'_>, name: &'static str) -> Result<Option<String>> {
    let Some(id) = fields.string(name)? else {
        return Ok(None);
    };
    if !ChosenId::is_plain(&id) {
        let text = format!("{name} must be 1 to 64 of the characters A-Z a-z 0-9 . _ -");
        return Err(Error::invalid(text));
    }
    Ok(Some(id))
}

#[derive(Serialize)]
pub(in crate::api) struct ContextDocument {
    id: String,
    language: &'static str,
    backend: String,
    version: Option<String>,
    state: &'static str,
    why: Option<String>,
    pid: Option<i32>,
    generation: u64,
    execution_count: u64,
    execution: Option<String>,
    queued: usize,
    cwd: String,
    tag: Option<String>,
    created_at_ms: u64,
    warm: bool,
}

impl ContextDocument {
    /// Describes the present state of a context.
    pub(in crate::api) fn of(context: &Context) -> Self {
        let (generation, execution_count) = context.counts();
        let (execution, queued) = context.work();
        let (backend, version) = context.told().unzip();
        let (state, why) = match context.state() {
            ContextState::Starting => ("starting", None),
            ContextState::Idle => ("idle", None),
            ContextState::Busy => ("busy", None),
            ContextState::Dead(why) => ("dead", Some(why)),
        };
        Self {
            id: context.id().to_owned(),
            language: context.language.name(),
            backend: backend.unwrap_or_else(|| context.backend().to_owned()),
            version,
            state,
            why,
            pid: context.process().map(|process| process.pid),
            generation,
            execution_count,
            execution,
            queued,
            cwd: context.directory(),
            tag: context.spec().and_then(|spec| spec.tag.clone()),
            created_at_ms: context.created_at_ms(),
            warm: context.is_warm(),
        }
    }
}

#[derive(Serialize)]
pub(in crate::api) struct ExecutionDocument {
    id: String,
    context: String,
    state: &'static str,
    reason: Option<&'static str>,
    execution_count: u64,
    events: u64,
}

impl ExecutionDocument {
    /// Describes the present state of an execution.
    pub(in crate::api) fn of(context: &Context, execution: &Execution) -> Self {
        let (state, reason) = match execution.state() {
            ExecutionState::Queued => ("queued", None),
            ExecutionState::Running => ("running", None),
            ExecutionState::Ended(reason) => ("ended", Some(reason.name())),
        };
        Self {
            id: execution.id.clone(),
            context: context.id().to_owned(),
            state,
            reason,
            execution_count: execution.count(),
            events: execution.events(),
        }
    }
}

/// The last event of an execution.
#[derive(Serialize)]
pub(in crate::api) struct EndEvent {
    event: &'static str,
    seq: u64,
    reason: &'static str,
    state: &'static str,
    execution_count: u64,
    exit_code: Option<i32>,
    signal: Option<i32>,
    timed_out: bool,
    duration_ms: u64,
}

impl EndEvent {
    /// Describes how an execution ended.
    pub(in crate::api) fn of(seq: u64, end: &End) -> Self {
        let (exit_code, signal) = end.ending.map_or((None, None), codes);
        Self {
            event: "end",
            seq,
            reason: end.reason.name(),
            state: if end.is_kept { "kept" } else { "lost" },
            execution_count: end.count,
            exit_code,
            signal,
            timed_out: end.has_timed_out,
            duration_ms: milliseconds(end.duration),
        }
    }
}
