//! Tools for commands, processes and ports.

use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use serde_json::value::RawValue;

use super::calls::{Outcome, ToolCall, ToolResult, fields, to_value};
use super::output::{Collector, ENOUGH_BYTES, Keep, Shown};
use crate::api::json::command::{
    ExitEvent, LISTED_COMMAND_BYTES, ProcessDocument, command_request, signal_request,
};
use crate::api::json::network::{ListenerDocument, PortDocument};
use crate::client::{Interrupt, Stopped};
use crate::codec::fields::{JsonType, decoded, wrong_type};
use crate::codec::object::object;
use crate::error::{Error, Kind};
use crate::process::ring::Cursor;
use crate::process::{Exit, Extent, OnDisconnect, Process};
use crate::spec::command::{CommandLine, CommandSpec};
use crate::workspace::{MemorySource, SignalGroup};

/// How long `run` waits for a command.
const RUN_WAIT: Duration = Duration::from_secs(120);

/// How long `ports` waits for a server.
const PORT_WAIT: Duration = Duration::from_secs(60);

/// What a process in a list takes: it has the beginning of its command.
const DOCUMENT_BYTES: usize = 4096;

/// What a word of a command takes besides its text: a place in a list that may just have grown, and the allocator's header.
const WORD_BYTES: usize = 2 * size_of::<Value>() + 32;

/// What the answer about a process that was started takes of each byte of its command: JSON writes some characters as six.
const ANSWER_USES: usize = 7;

/// What that answer takes besides.
const START_BYTES: usize = 2 * DOCUMENT_BYTES;

/// Characters of its command in the text.
const SHOWN_CHARACTERS: usize = 100;

/// Most processes in a list: the latest.
const MAX_PROCESSES: usize = 500;

/// A command that is waited for.
pub(super) fn run(call: &mut ToolCall<'_, '_>, arguments: &RawValue) -> Outcome {
    let wait = fields(arguments)?.seconds("wait")?.unwrap_or(RUN_WAIT);
    let spec = spec(call, arguments)?;
    let run = call.workspace.run_foreground(spec, OnDisconnect::Kill)?;
    let process = run.process().clone();
    let until = Instant::now().checked_add(wait);
    let mut collector = Collector::new(call, Keep::Ends, &Cursor::default(), false);
    run.follow(&mut collector, until);
    let exit = collector.exit;
    if exit.is_none() && until.is_none_or(|until| Instant::now() < until) {
        return Err(Stopped::Disconnected);
    }
    Ok(result(&process, exit, collector.show()?))
}

/// A command that is left running.
pub(super) fn start(call: &mut ToolCall<'_, '_>, arguments: &RawValue) -> Outcome {
    let spec = spec(call, arguments)?;
    // A client that is told of a failure would start it again.
    call.reserve(START_BYTES + listed_bytes(spec.line(), 2 * WORD_BYTES, ANSWER_USES))?;
    let process = call.workspace.start_background(spec)?;
    let text = format!("started {} (pid {})", process.id, process.pid);
    Ok(ToolResult::new(
        text,
        to_value(&ProcessDocument::of(&process, false)),
    ))
}

fn spec(call: &ToolCall<'_, '_>, arguments: &RawValue) -> Result<CommandSpec, Error> {
    let mut fields = fields(arguments)?;
    let mut spec = command_request(&mut fields)?.spec;
    spec.user = fields.string("user")?;
    if spec.user.is_some() && !call.workspace.has_own_root() {
        let text = "user goes with sandboxes that have a root of their own; here all commands have the same user";
        return Err(Error::invalid(text));
    }
    Ok(spec)
}

/// A process by its id. The error speaks of tools: there are no routes here.
fn process(call: &ToolCall<'_, '_>, id: &str) -> Result<Arc<Process>, Error> {
    call.workspace.process(id).map_err(|_| {
        let text =
            format!("there is no process {id:?}; the tool processes lists those that are known");
        Error::new(Kind::NotFound, text)
    })
}

/// What a process has printed after a place.
pub(super) fn output(call: &mut ToolCall<'_, '_>, arguments: &RawValue) -> Outcome {
    let mut fields = fields(arguments)?;
    let id = fields.required_string("id")?;
    let mut offset = |name| Ok::<_, Error>(fields.whole(name, 0..=u64::MAX)?.unwrap_or(0));
    let after = Cursor::at(offset("stdout_offset")?, offset("stderr_offset")?);
    let wait = fields.seconds("wait")?;
    drop(fields);
    let process = process(call, &id)?;
    if let Some(until) = wait.and_then(|wait| Instant::now().checked_add(wait)) {
        process.wait_for_output(call.client, after, ENOUGH_BYTES, until)?;
    }
    // Asked before the output is read: then that is complete if the process has ended.
    let exit = process.exit();
    let is_terminal = process.terminal().is_ok();
    let mut collector = Collector::new(call, Keep::Beginning, &after, is_terminal);
    process.follow(after, Extent::Held, &mut collector)?;
    Ok(result(&process, exit, collector.show()?))
}

/// A process and some of its output.
fn result(process: &Process, exit: Option<Exit>, [stdout, stderr]: [Shown; 2]) -> ToolResult {
    let mut text = stdout.text.clone();
    if !stderr.text.is_empty() {
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        // Writing to memory does not fail.
        let _ = write!(text, "[stderr]\n{}", stderr.text);
    }
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    let id = &process.id;
    let end = exit.as_ref().map(ExitEvent::of);
    let _ = match &end {
        None => write!(
            text,
            "[still running as {id}; output reads on, input types, stop ends it]"
        ),
        Some(end) => match (end.exit_code, end.signal) {
            (Some(code), _) => write!(text, "[exit code {code}]"),
            (None, signal) => {
                let signal = signal.map(|signal| format!("ended by signal {signal}, "));
                let signal = signal.unwrap_or_default();
                write!(text, "[{signal}reason: {}]", end.reason)
            }
        },
    };
    let truncated = stdout.is_cut || stderr.is_cut;
    if truncated {
        let _ = write!(
            text,
            "[not all is shown; output reads on with stdout_offset {} and stderr_offset {}]",
            stdout.offset, stderr.offset
        );
    }
    let mut structured = object! {
        "id": id.as_str(),
        "running": end.is_none(),
        "exit_code": end.as_ref().and_then(|end| end.exit_code),
        "signal": end.as_ref().and_then(|end| end.signal),
        "reason": end.as_ref().map(|end| end.reason),
        "timed_out": end.as_ref().is_some_and(|end| end.timed_out),
        "truncated": truncated,
        "stdout_offset": stdout.offset,
        "stderr_offset": stderr.offset,
    };
    // The macro would copy them.
    structured["stdout"] = stdout.text.into();
    structured["stderr"] = stderr.text.into();
    ToolResult::new(text, structured)
}

/// Input of a process.
pub(super) fn input(call: &mut ToolCall<'_, '_>, arguments: &RawValue) -> Outcome {
    let mut fields = fields(arguments)?;
    let id = fields.required_string("id")?;
    let text = fields.string("text")?.unwrap_or_default();
    let eof = fields.boolean("eof")?.unwrap_or(false);
    if text.is_empty() && !eof {
        return Err(Error::invalid("input takes text, or eof, which is true").into());
    }
    drop(fields);
    process(call, &id)?;
    let watch = || call.client.watch();
    let mut source = MemorySource::new(text.as_bytes(), &watch);
    call.workspace.processes.check_not_paused()?;
    let written = call.workspace.write_stdin(&id, &mut source, eof)?;
    let structured = object! { "written": written, "eof": eof };
    let end = if eof { ", and ended its input" } else { "" };
    Ok(ToolResult::new(
        format!("wrote {written} bytes to {id}{end}"),
        structured,
    ))
}

/// A signal to a process, or its end.
pub(super) fn stop(call: &mut ToolCall<'_, '_>, arguments: &RawValue) -> Outcome {
    let id = fields(arguments)?.required_string("id")?;
    let (signal, _) = signal_request(&mut fields(arguments)?)?;
    process(call, &id)?;
    let (process, signaled) = call.workspace.signal(&id, signal, SignalGroup::Own)?;
    let structured = object! { "id": process.id.as_str(), "signal": signal, "signaled": signaled };
    let text = if signaled {
        format!("sent signal {signal} to {id}")
    } else {
        format!("{id} had already ended")
    };
    Ok(ToolResult::new(text, structured))
}

/// What the beginning of a command takes that a document has.
fn listed_bytes(command: &CommandLine, of_word: usize, of_byte: usize) -> usize {
    let texts = command.texts().take(LISTED_COMMAND_BYTES);
    let texts = texts.map(|text| of_word + of_byte * text.len());
    let most = LISTED_COMMAND_BYTES * (of_word + of_byte);
    texts.sum::<usize>().min(most)
}

/// What those of several processes take. Each may have thousands of words.
fn documents_bytes(call: &mut ToolCall<'_, '_>, all: &[Arc<Process>]) -> Result<usize, Stopped> {
    let paced = &mut call.workspace.paced(call.client);
    let mut bytes = 0;
    for process in all {
        paced.check()?;
        bytes += DOCUMENT_BYTES + listed_bytes(&process.command, WORD_BYTES, 1);
    }
    Ok(bytes)
}

/// The existing processes, and those of the history.
pub(super) fn processes(call: &mut ToolCall<'_, '_>, _: &RawValue) -> Outcome {
    let all = call.workspace.processes.list();
    let latest = &all[all.len().saturating_sub(MAX_PROCESSES)..];
    let bytes = documents_bytes(call, latest)?;
    call.reserve(bytes)?;
    let paced = &mut call.workspace.paced(call.client);
    let mut text = String::new();
    let mut documents = Vec::new();
    for process in latest {
        paced.check()?;
        let state = match process.exit().as_ref().map(ExitEvent::of) {
            None => "running".to_owned(),
            Some(end) => end
                .exit_code
                .map_or_else(|| end.reason.to_owned(), |code| format!("exit {code}")),
        };
        let command = process.command.beginning(4 * SHOWN_CHARACTERS);
        let command: String = command.chars().take(SHOWN_CHARACTERS).collect();
        let _ = writeln!(
            text,
            "{} (pid {}) {state}: {command}",
            process.id, process.pid
        );
        documents.push(to_value(&ProcessDocument::of(process, false)));
    }
    if documents.is_empty() {
        text.push_str("no process was started yet");
    }
    Ok(ToolResult::new(text, object! { "processes": documents }))
}

/// The servers inside, at once or when one listens.
pub(super) fn ports(call: &mut ToolCall<'_, '_>, arguments: &RawValue) -> Outcome {
    let mut fields = fields(arguments)?;
    let limit = fields.seconds("timeout")?.unwrap_or(PORT_WAIT);
    let awaited = match fields.take("wait_for") {
        None => None,
        Some(port) => {
            let name = match JsonType::of(port) {
                JsonType::Number => port.get().to_owned(),
                JsonType::String => decoded("wait_for", port)?,
                _ => return Err(wrong_type("wait_for", "a port", port).into()),
            };
            let port = call.workspace.ports.parse(name.as_bytes())?;
            let wait = call.workspace.wait_for_port(port)?;
            let listening = wait.run(Some(limit), call.client)?;
            Some((
                name,
                listening,
                to_value(&PortDocument::of(wait.port(), listening)),
            ))
        }
    };
    let listed = call.workspace.list_ports(call.client)?;
    // As values they take more.
    call.reserve(2 * listed.bytes)?;
    let documents: Vec<Value> = listed
        .listeners
        .iter()
        .map(|listener| to_value(&ListenerDocument::of(listener)))
        .collect();
    let mut text = String::new();
    if let Some((name, listening, _)) = &awaited {
        let state = if *listening {
            "listens"
        } else {
            "listens not yet"
        };
        let _ = writeln!(text, "a server {state} on port {name}");
    }
    for listener in &listed.listeners {
        let owner = listener
            .process
            .as_ref()
            .map(|owner| format!(": {}", owner.command));
        let _ = writeln!(text, "{}{}", listener.port, owner.unwrap_or_default());
    }
    if text.is_empty() {
        text.push_str("nothing listens");
    }
    let mut structured = object! { "ports": documents };
    if let Some((.., document)) = awaited {
        structured["waited_for"] = document;
    }
    Ok(ToolResult::new(text, structured))
}
