//! `GET /sandboxes/{id}/logs`: what the server knows of a sandbox, as lines for people. They are the starts and the
//! ends of its commands, and the last lines of their output.
//!
//! A client that follows asks again for what is later than the last line that it has. So a line keeps its time, and it
//! is reported only when nothing of the same time can come after it.

use std::ops::RangeInclusive;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::access::{self, AskedSandbox};
use super::calls::{Answer, Call, ListBody};
use super::errors::E2bError;
use super::processes::end_document;
use super::sandboxes::place;
use crate::api::json::list::to_json;
use crate::client::Interrupt;
use crate::clock::now_ms;
use crate::codec::object::object;
use crate::codec::shortened;
use crate::codec::sort::sort_by;
use crate::codec::time::rfc3339;
use crate::error::Error;
use crate::limits::ledger::{Charge, Item, Ledger, OverLimit};
use crate::process::Process;
use crate::process::ring::{Ring, Stream, TIME_STEP_MS};
use crate::sys::Pid;
use crate::workspace::Needs;

/// How old a line is at least. An end is known a moment after its time.
const HELD_BACK_MS: u64 = 2 * TIME_STEP_MS;

/// Bytes of the output of a process that are looked at, and of a line that are reported.
const OUTPUT_BYTES: usize = 32 * 1024;
const LINE_BYTES: usize = 2048;

/// Bytes of a line that are enough to report as many: as text it is no shorter, and its last character and a line end may
/// be cut.
const ENOUGH_BYTES: usize = LINE_BYTES + 8;

/// Most bytes of a command that are reported.
const COMMAND_BYTES: usize = 1024;

/// Most lines of an answer.
const MAX_LINES: usize = 1000;

/// What a line takes besides its text: its place in a vector that may just have grown, and the allocator's header.
const PLACE_BYTES: usize = 3 * size_of::<Line>() + 32;

/// What lines may take without a charge, and what is charged at a time.
const FREE_BYTES: usize = 16 * 1024;
const STEP_BYTES: usize = 32 * 1024;

/// The last lines of a time.
struct Lines {
    last: Vec<Line>,
    /// How many there were.
    count: u64,
    /// Most that are reported.
    most: usize,
    times: RangeInclusive<u64>,
    /// Bytes that they take.
    held: usize,
    charge: Charge,
    /// Why no more are added.
    refused: Option<OverLimit>,
}

struct Line {
    /// Milliseconds since 1970; lines of one time have the order in which they were found.
    at: (u64, u64),
    message: Message,
    pid: Option<Pid>,
}

/// What a line says.
enum Message {
    /// About the sandbox.
    Sandbox(&'static str),
    /// The command that has started.
    Started(String),
    /// How it has ended.
    Ended(String),
    Output(Stream, String),
}

/// A line as clients parse it.
#[derive(Default, Serialize)]
struct Members<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    command: Option<&'a str>,
    level: &'static str,
    logger: &'static str,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<Pid>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'a str>,
}

impl Line {
    /// Bytes that it takes.
    fn held(&self) -> usize {
        let text = match &self.message {
            Message::Sandbox(_) => 0,
            Message::Started(text) | Message::Ended(text) | Message::Output(_, text) => {
                text.capacity()
            }
        };
        PLACE_BYTES + text
    }

    fn members(&self) -> Members<'_> {
        let members = Members {
            level: "info",
            logger: "command",
            pid: self.pid,
            ..Members::default()
        };
        match &self.message {
            Message::Sandbox(message) => Members {
                logger: "sandbox",
                message,
                ..members
            },
            Message::Started(command) => Members {
                message: "started",
                command: Some(command),
                ..members
            },
            Message::Ended(status) => Members {
                message: "ended",
                status: Some(status),
                ..members
            },
            Message::Output(stream, message) => Members {
                logger: stream.name(),
                message,
                ..members
            },
        }
    }
}

impl Lines {
    fn new(
        ledger: &Arc<Ledger>,
        most: usize,
        times: RangeInclusive<u64>,
    ) -> Result<Self, E2bError> {
        Ok(Self {
            last: Vec::new(),
            count: 0,
            most,
            times,
            held: 0,
            charge: ledger.charge(Item::Responses, 0).map_err(Error::from)?,
            refused: None,
        })
    }

    /// Adds a line of a time that is asked for.
    fn add(&mut self, at_ms: u64, pid: Option<Pid>, message: Message) {
        if self.refused.is_some() || !self.times.contains(&at_ms) {
            return;
        }
        self.count += 1;
        let line = Line {
            at: (at_ms, self.count),
            message,
            pid,
        };
        let held = self.held + line.held();
        if held > FREE_BYTES.max(self.charge.bytes()) {
            self.refused = self.charge.set(held + STEP_BYTES).err();
            if self.refused.is_some() {
                return;
            }
        }
        self.held = held;
        self.last.push(line);
        // There may be many processes.
        if self.last.len() > 2 * self.most {
            self.keep_last();
        }
    }

    /// Drops all but the last lines that are reported.
    fn keep_last(&mut self) {
        sort_by(&mut self.last, |one, other| one.at.cmp(&other.at));
        let before = self.last.len().saturating_sub(self.most);
        self.last.drain(..before);
        self.held = self.last.iter().map(Line::held).sum();
    }
}

pub(super) fn logs(call: &mut Call<'_, '_>, id: &str) -> Answer {
    let start = call.query.number("start")?.unwrap_or(0);
    let limit = call.query.number("limit")?;
    let limit = limit.map_or(MAX_LINES, |limit| {
        usize::try_from(limit).unwrap_or(MAX_LINES)
    });
    let until = now_ms().saturating_sub(HELD_BACK_MS);
    let (created_at, place) = match place(call, id) {
        Ok(None) => (None, AskedSandbox::Machine),
        Ok(Some((_, sandbox))) => (
            Some(sandbox.created_at_ms),
            AskedSandbox::Sandbox(id.to_owned()),
        ),
        Err(failure) => {
            let host = call.context.machine.host();
            if !host.is_ok_and(|host| host.has_ended(id)) {
                return Err(failure);
            }
            // A client that follows asks once more after the end.
            let mut lines = Lines::new(&call.request.ledger, 1, until..=until)?;
            lines.add(until, None, Message::Sandbox("ended"));
            return respond(call, lines);
        }
    };
    let workspace = access::enter(call.context, call.request, &place, Needs::Files)?;
    let most = limit.min(MAX_LINES);
    let mut lines = Lines::new(&call.request.ledger, most, start..=until)?;
    if let Some(created_at) = created_at {
        lines.add(created_at, None, Message::Sandbox("started"));
    }
    let client = &mut call.interrupt();
    let interrupt = &mut workspace.paced(client);
    for process in workspace.processes.list() {
        // Looking at one takes a millisecond.
        interrupt.check()?;
        add_process(&process, &mut lines);
    }
    respond(call, lines)
}

/// Adds the lines of a process.
fn add_process(process: &Process, lines: &mut Lines) {
    let start = *lines.times.start();
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
    let pid = Some(process.pid_inside());
    if started >= start {
        let command = process.command.beginning(COMMAND_BYTES);
        lines.add(started, pid, Message::Started(command));
    }
    if last_output >= start || ended.is_some() {
        process
            .look_at_output(|ring| add_output(ring, process.pid_inside(), started, ended, lines));
    }
    if let Some((ended, exit)) = ended.zip(exit) {
        let end = end_document(&exit);
        let status = end.get("error").or(end.get("status"));
        let status = status.and_then(Value::as_str).unwrap_or_default();
        lines.add(ended, pid, Message::Ended(status.to_owned()));
    }
}

/// Adds the last lines that a process has printed. A line that is not complete comes with the end of the process.
fn add_output(ring: &Ring, pid: Pid, started: u64, ended: Option<u64>, lines: &mut Lines) {
    let mut before = 0_usize;
    each_line(ring, started, &mut |_, at_ms, _| {
        before += usize::from(lines.times.contains(&at_ms));
    });
    // No more are made of them than are reported.
    before = before.saturating_sub(lines.most);
    let mut add = |stream: Stream, at_ms, text: &[u8]| {
        if lines.times.contains(&at_ms) && before > 0 {
            before -= 1;
            return;
        }
        let text = String::from_utf8_lossy(text.strip_suffix(b"\r").unwrap_or(text));
        let text = shortened(&text, LINE_BYTES).into_owned();
        lines.add(at_ms, Some(pid), Message::Output(stream, text));
    };
    let begun = each_line(ring, started, &mut add);
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

/// Shows each line of the latest output that is complete: its stream, its time, and its text, unless that is long.
/// Returns what is not complete. What came at no known time came when the process `started`.
fn each_line(ring: &Ring, started: u64, see: &mut dyn FnMut(Stream, u64, &[u8])) -> [Vec<u8>; 2] {
    let mut begun = <[Vec<u8>; 2]>::default();
    ring.latest(OUTPUT_BYTES, &mut |piece| {
        let at_ms = piece.at_ms.unwrap_or(started);
        let begun = &mut begun[piece.stream.index()];
        for part in piece.data.split_inclusive(|byte| *byte == b'\n') {
            let text = part.strip_suffix(b"\n");
            let is_complete = text.is_some();
            let text = text.unwrap_or(part);
            let room = ENOUGH_BYTES - begun.len();
            begun.extend_from_slice(&text[..text.len().min(room)]);
            if is_complete {
                see(piece.stream, at_ms, begun);
                begun.clear();
            }
        }
    });
    begun
}

/// Each line is JSON in a text.
fn respond(call: &Call<'_, '_>, mut lines: Lines) -> Answer {
    lines.keep_last();
    if let Some(refused) = lines.refused {
        return Err(Error::from(refused).into());
    }
    let mut body = ListBody::new(Some("logs"), &call.request.ledger)?;
    for line in &lines.last {
        let members = to_json(&line.members());
        let timestamp = rfc3339(line.at.0.cast_signed());
        body.push(&object! { "timestamp": timestamp, "line": String::from_utf8_lossy(&members) })?;
    }
    body.respond()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ledger::Budget;

    /// The lines of some output, of which the answer may have `most`.
    fn lines_of(output: &[u8], most: usize, budget: u64) -> Lines {
        let ledger = Budget::new(budget).whole();
        let mut lines = Lines::new(&ledger, most, 1..=2).unwrap();
        let mut ring = Ring::new(1 << 20);
        ring.append(Stream::Stdout, output);
        add_output(&ring, 7, 1, Some(2), &mut lines);
        lines
    }

    fn texts(lines: &Lines) -> Vec<&str> {
        lines
            .last
            .iter()
            .map(|line| line.members().message)
            .collect()
    }

    #[test]
    fn no_more_lines_are_made_than_the_answer_has() {
        let lines = lines_of(&vec![b'\n'; OUTPUT_BYTES], 1000, 1 << 20);
        assert_eq!((lines.last.len(), lines.count), (1000, 1000));
        let bytes = lines.last.capacity() * size_of::<Line>();
        assert!(bytes <= lines.charge.bytes(), "{bytes}");
        assert!(lines.held <= lines.charge.bytes());
        // They are the last ones, and what is not complete is one.
        assert_eq!(
            texts(&lines_of(b"a\nb\r\nc\nd", 2, 1 << 20)),
            ["b", "c", "d"]
        );
        assert_eq!(texts(&lines_of(b"a\nb", 0, 1 << 20)), [""; 0]);
    }

    #[test]
    fn lines_are_charged_before_they_are_kept() {
        let lines = lines_of(&vec![b'\n'; OUTPUT_BYTES], 1000, 128 * 1024);
        assert!(lines.refused.is_some());
        assert!(lines.held <= 64 * 1024, "{}", lines.held);
        let few = lines_of(b"a\nb\n", 1000, 0);
        assert!(few.refused.is_none());
        assert_eq!(few.charge.bytes(), 0);
    }

    #[test]
    fn a_long_line_is_cut_as_the_whole_of_it_would_be() {
        for line in [
            "x".repeat(LINE_BYTES),
            "x".repeat(LINE_BYTES + 1),
            "x".repeat(LINE_BYTES - 1) + "\u{1f600}",
            "\u{20ac}".repeat(LINE_BYTES),
            "x".repeat(ENOUGH_BYTES - 1) + "\r\r\r",
        ] {
            let expected = shortened(&line, LINE_BYTES);
            let lines = lines_of((line.clone() + "\n").as_bytes(), 9, 1 << 20);
            assert_eq!(texts(&lines), [expected], "{}", line.len());
        }
        let noise = lines_of(&[[0xe2; LINE_BYTES].as_slice(), b"\n"].concat(), 9, 1 << 20);
        let expected = "\u{fffd}".repeat(LINE_BYTES / 3) + "\u{2026}";
        assert_eq!(texts(&noise), [expected]);
    }

    #[test]
    fn lines_are_written_as_their_members_sort() {
        let lines = [
            Message::Sandbox("started"),
            Message::Started("a b".to_owned()),
            Message::Output(Stream::Stderr, "x".to_owned()),
            Message::Ended("exit status 1".to_owned()),
        ];
        let written = lines.map(|message| {
            let pid = (!matches!(message, Message::Sandbox(_))).then_some(7);
            let at = (1, 1);
            String::from_utf8(to_json(&Line { at, message, pid }.members())).unwrap()
        });
        assert_eq!(
            written,
            [
                r#"{"level":"info","logger":"sandbox","message":"started"}"#,
                r#"{"command":"a b","level":"info","logger":"command","message":"started","pid":7}"#,
                r#"{"level":"info","logger":"stderr","message":"x","pid":7}"#,
                r#"{"level":"info","logger":"command","message":"ended","pid":7,"status":"exit status 1"}"#,
            ]
        );
    }
}
