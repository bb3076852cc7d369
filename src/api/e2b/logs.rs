//! `GET /sandboxes/{id}/logs`: what the server knows of a sandbox, as lines for people. They are the starts and the
//! ends of its commands, and the last lines of their output.
//!
//! A client that follows asks again for what is later than the last line that it has. So a line keeps its time, and it
//! is reported only when nothing of the same time can come after it.

use std::ops::RangeInclusive;

use serde_json::{Value, json};

use super::access::{self, AskedSandbox};
use super::calls::{Answer, Call, ListBody};
use super::processes::end_document;
use super::sandboxes::place;
use crate::clock::now_ms;
use crate::codec::shortened;
use crate::codec::sort::sort_by;
use crate::codec::time::rfc3339;
use crate::process::Process;
use crate::process::ring::{Stream, TIME_STEP_MS};

/// How old a line is at least. An end is known a moment after its time.
const HELD_BACK_MS: u64 = 2 * TIME_STEP_MS;

/// Bytes of the output of a process that are looked at, and of a line that are reported.
const OUTPUT_BYTES: usize = 32 * 1024;
const LINE_BYTES: usize = 2048;

/// Most bytes of a command that are reported.
const COMMAND_BYTES: usize = 1024;

/// Most lines of an answer.
const MAX_LINES: usize = 1000;

/// The last lines, and how many there were.
#[derive(Default)]
struct Lines {
    last: Vec<Line>,
    count: u64,
}

/// A line.
struct Line {
    /// Milliseconds since 1970; lines of one time have the order in which they were found.
    at: (u64, u64),
    logger: &'static str,
    message: String,
    fields: Value,
}

impl Lines {
    fn add(&mut self, at_ms: u64, logger: &'static str, message: String, fields: Value) {
        self.count += 1;
        self.last.push(Line {
            at: (at_ms, self.count),
            logger,
            message,
            fields,
        });
    }

    /// Drops all but the last lines of a time.
    fn keep_last(&mut self, most: usize, times: &RangeInclusive<u64>) {
        self.last.retain(|line| times.contains(&line.at.0));
        sort_by(&mut self.last, |one, other| one.at.cmp(&other.at));
        let before = self.last.len().saturating_sub(most);
        self.last.drain(..before);
    }
}

/// The handler.
pub(super) fn logs(call: &mut Call<'_, '_>, id: &str) -> Answer {
    let start = call.query.number("start")?.unwrap_or(0);
    let limit = call.query.number("limit")?;
    let limit = limit.map_or(MAX_LINES, |limit| {
        usize::try_from(limit).unwrap_or(MAX_LINES)
    });
    let until = now_ms().saturating_sub(HELD_BACK_MS);
    let mut lines = Lines::default();
    let about = |lines: &mut Lines, at_ms, message: &str| {
        lines.add(at_ms, "sandbox", message.to_owned(), json!({}));
    };
    let place = match place(call, id) {
        Ok(None) => AskedSandbox::Machine,
        Ok(Some((_, sandbox))) => {
            about(&mut lines, sandbox.created_at_ms, "started");
            AskedSandbox::Sandbox(id.to_owned())
        }
        Err(failure) => {
            let host = call.context.machine.host();
            if !host.is_ok_and(|host| host.has_ended(id)) {
                return Err(failure);
            }
            // A client that follows asks once more after the end.
            about(&mut lines, until, "ended");
            return respond(call, &lines);
        }
    };
    let workspace = access::enter(call.context, call.request, &place)?;
    for process in workspace.processes.list() {
        add_process(&process, start, &mut lines);
        // There may be many processes.
        if lines.last.len() > 2 * MAX_LINES {
            lines.keep_last(MAX_LINES, &(start..=until));
        }
    }
    lines.keep_last(limit.min(MAX_LINES), &(start..=until));
    respond(call, &lines)
}

/// Adds the lines of a process whose time may be `start` or later.
fn add_process(process: &Process, start: u64, lines: &mut Lines) {
    let started = process.started_at_ms;
    let exit = process.exit();
    let last_output = process.last_output_ms().unwrap_or(0);
    let ended = exit.map(|exit| {
        let duration = u64::try_from(exit.duration.as_millis()).unwrap_or(u64::MAX);
        // Its output may have been read later than it was reaped.
        started.saturating_add(duration).max(last_output)
    });
    if ended.is_some_and(|ended| ended < start) {
        return;
    }
    let pid = process.pid;
    if started >= start {
        let command = process.command.beginning(COMMAND_BYTES);
        let fields = json!({ "pid": pid, "command": command });
        lines.add(started, "command", "started".to_owned(), fields);
    }
    if last_output >= start || ended.is_some() {
        add_output(process, ended, lines);
    }
    if let Some((ended, exit)) = ended.zip(exit) {
        let end = end_document(&exit);
        let fields = json!({ "pid": pid, "status": end.get("error").or(end.get("status")) });
        lines.add(ended, "command", "ended".to_owned(), fields);
    }
}

/// Adds the last lines that a process has printed. A line that is not complete comes with the end of the process.
fn add_output(process: &Process, ended: Option<u64>, lines: &mut Lines) {
    let mut add = |stream: Stream, at_ms, text: &[u8]| {
        let text = String::from_utf8_lossy(text.strip_suffix(b"\r").unwrap_or(text));
        let text = shortened(&text, LINE_BYTES).into_owned();
        lines.add(at_ms, stream.name(), text, json!({ "pid": process.pid }));
    };
    let mut begun = <[Vec<u8>; 2]>::default();
    for piece in process.latest_output(OUTPUT_BYTES) {
        let at_ms = piece.at_ms.unwrap_or(process.started_at_ms);
        let begun = &mut begun[piece.stream.index()];
        let mut rest = &piece.data[..];
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            begun.extend_from_slice(&rest[..end]);
            add(piece.stream, at_ms, begun);
            begun.clear();
            rest = &rest[end + 1..];
        }
        begun.extend_from_slice(rest);
    }
    let Some(ended) = ended else {
        return;
    };
    for stream in Stream::ALL {
        let rest = &begun[stream.index()];
        if !rest.is_empty() {
            add(stream, ended, rest);
        }
    }
}

/// Each line is JSON in a text.
fn respond(call: &Call<'_, '_>, lines: &Lines) -> Answer {
    let mut body = ListBody::new(Some("logs"), &call.request.ledger)?;
    for line in &lines.last {
        let mut members = line.fields.clone();
        members["level"] = "info".into();
        members["logger"] = line.logger.into();
        members["message"] = line.message.as_str().into();
        let timestamp = rfc3339(line.at.0.cast_signed());
        body.push(&json!({ "timestamp": timestamp, "line": members.to_string() }))?;
    }
    body.respond()
}
