//! What a bridge and the server say to each other (`PROTOCOL.md`): a pure codec.
//!
//! Whatever comes from a bridge may come from the code that it runs, so nothing of it is trusted: every field is
//! checked, JSON that is passed on has no line ends and no half characters, and its memory is asked for before it is
//! made.

use serde_json::value::RawValue;

use super::event::{Bundle, CodeError};
use crate::codec::fields::{Elements, Fields, JsonType, Members, decoded};
use crate::codec::{escape, shortened};
use crate::error::{Error, Result};
use crate::limits::ledger::Charge;

/// Most bytes of a frame.
pub(super) const MAX_FRAME_BYTES: usize = 64 << 20;

/// Most bytes of a line of a bash bridge.
const MAX_LINE_BYTES: usize = 4096;

/// How deep JSON that is passed on may be nested, counted from a bundle's values: many parsers go no deeper.
const MAX_DEPTH: usize = 120;

/// Most lines of a traceback that are passed on.
const MAX_TRACEBACK_LINES: usize = 1000;

/// Most bytes of an error. An execution keeps its error as long as it is known.
const MAX_ERROR_BYTES: usize = 4 << 20;

/// Most bytes of a prompt. The bridges cut it at 65,536 characters, which have four bytes at most.
const MAX_PROMPT_BYTES: usize = 256 << 10;

/// Most bytes of what an interpreter says of itself.
const MAX_TOLD_BYTES: usize = 1024;

/// Most bytes of why it failed. A context keeps it while it is dead.
const MAX_REASON_BYTES: usize = 8 << 10;

/// The form of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wire {
    /// JSON in frames, both ways.
    Frames,
    /// NUL-ended fields to the bridge, lines from it.
    Lines,
}

/// A message from a bridge.
pub(super) enum Incoming {
    /// It can run code.
    Ready { backend: String, version: String },
    /// It cannot, and ends.
    Failed { error: String },
    /// From now on SIGINT interrupts the code.
    Begun,
    /// It has the environment that it was asked to take, or why not.
    Adopted { error: Option<String> },
    /// To be answered by `synced`. `None` if there was no memory for it.
    Bundle {
        bundle: Option<Bundle>,
        n: Option<u64>,
    },
    /// To be answered by `synced`.
    Clear { wait: bool, n: Option<u64> },
    /// To be answered by `synced` once what the pipes hold is read.
    Sync { n: Option<u64> },
    /// To be answered by `input_reply`.
    Input {
        k: u64,
        prompt: String,
        password: bool,
    },
    /// The execution has ended.
    Done {
        error: Option<CodeError>,
        exit_code: Option<u8>,
        /// SIGINT ended it. Only bash says so: elsewhere it is an error.
        is_interrupted: bool,
    },
}

/// What is run.
#[derive(Default)]
pub(super) struct Run<'a> {
    pub(super) code: &'a str,
    pub(super) count: u64,
    pub(super) stdin: Option<&'a str>,
    pub(super) asks: bool,
    pub(super) environment: &'a [(String, String)],
    /// Whether results and displays are also sent as values.
    pub(super) sends_values: bool,
    /// SIGINT was sent since the last run.
    pub(super) is_signalled: bool,
}

/// The bytes of the first message, if it has arrived whole: of a frame with its head, of a line with its end.
///
/// # Errors
/// The message is longer than one may be.
pub(super) fn whole(wire: Wire, bytes: &[u8]) -> Result<Option<usize>> {
    match wire {
        Wire::Frames => {
            let Some((head, rest)) = bytes.split_first_chunk() else {
                return Ok(None);
            };
            let length = u32::from_le_bytes(*head) as usize;
            if length > MAX_FRAME_BYTES {
                return Err(broken("it announces a frame that is too long"));
            }
            Ok((rest.len() >= length).then_some(head.len() + length))
        }
        Wire::Lines => match memchr::memchr(b'\n', bytes) {
            Some(end) if end <= MAX_LINE_BYTES => Ok(Some(end + 1)),
            None if bytes.len() <= MAX_LINE_BYTES => Ok(None),
            _ => Err(broken("its line does not end")),
        },
    }
}

/// How many bytes the first message will have, if that is known.
pub(super) fn announced(wire: Wire, bytes: &[u8]) -> usize {
    match (wire, bytes.first_chunk()) {
        (Wire::Frames, Some(head)) => {
            let length = u32::from_le_bytes(*head) as usize;
            length.min(MAX_FRAME_BYTES) + head.len()
        }
        _ => 0,
    }
}

/// Most bytes that the texts of a message take once they are decoded. An escape sequence of six bytes may stand for one.
pub(super) fn decoded_length(message: &[u8]) -> usize {
    let mut length = message.len();
    let mut rest = message;
    while let Some(at) = memchr::memchr(b'\\', rest) {
        let sequence = &rest[at..];
        let (taken, decoded) = match sequence {
            [_, b'u', b'0', b'0', b'0'..=b'7', ..] => (6, 1),
            [_, b'u', ..] => (6, 3),
            _ => (2, 1),
        };
        // A part of a sequence is no JSON.
        let taken = taken.min(sequence.len());
        length -= taken.saturating_sub(decoded);
        rest = &sequence[taken..];
    }
    length
}

/// Gives memory for the texts of a bundle, if there is any. Nothing else is decoded then.
pub(super) type Admit<'a> = &'a dyn Fn(usize) -> Option<Charge>;

/// Reads a message that [`whole`] has found. Decoded texts are no longer than the message, but those of a bundle may be.
///
/// # Errors
/// It is none of the protocol's.
pub(super) fn parse(wire: Wire, message: &[u8], admit: Admit<'_>) -> Result<Incoming> {
    match wire {
        Wire::Frames => parse_frame(message.get(4..).unwrap_or_default(), admit),
        Wire::Lines => parse_line(message),
    }
}

fn broken(why: &str) -> Error {
    Error::invalid(format!("the bridge broke its protocol: {why}"))
}

fn parse_line(line: &[u8]) -> Result<Incoming> {
    let line = std::str::from_utf8(line).map_err(|_| broken("a line is not UTF-8"))?;
    let line = line.trim_end();
    let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
    let done = |is_interrupted| {
        let exit_code = rest.parse().ok();
        let exit_code = Some(exit_code.ok_or_else(|| broken("a status is no number"))?);
        Ok(Incoming::Done {
            error: None,
            exit_code,
            is_interrupted,
        })
    };
    match word {
        "ready" => Ok(Incoming::Ready {
            backend: "bash".to_owned(),
            version: rest.to_owned(),
        }),
        "begun" => Ok(Incoming::Begun),
        "done" => done(false),
        "int" => done(true),
        _ => Err(broken("an unknown line")),
    }
}

fn parse_frame(frame: &[u8], admit: Admit<'_>) -> Result<Incoming> {
    let mut fields = Fields::parse(frame)?;
    let kind = fields.string("type")?.unwrap_or_default();
    let n = fields.whole("n", 0..=u64::MAX)?;
    Ok(match &*kind {
        "ready" => Incoming::Ready {
            backend: at_most(MAX_TOLD_BYTES, required(&mut fields, "backend")?)?,
            version: at_most(MAX_TOLD_BYTES, required(&mut fields, "version")?)?,
        },
        "failed" => Incoming::Failed {
            error: reason(&required(&mut fields, "error")?),
        },
        "begun" => Incoming::Begun,
        "adopted" => Incoming::Adopted {
            error: fields.string("error")?.as_deref().map(reason),
        },
        "display" | "result" => Incoming::Bundle {
            bundle: bundle(kind == "result", fields, admit)?,
            n,
        },
        "clear" => Incoming::Clear {
            wait: fields.boolean("wait")?.unwrap_or(false),
            n,
        },
        "sync" => Incoming::Sync { n },
        "input" => Incoming::Input {
            k: fields
                .whole("k", 0..=u64::MAX)?
                .ok_or_else(|| broken("k is missing"))?,
            prompt: at_most(
                MAX_PROMPT_BYTES,
                fields.string("prompt")?.unwrap_or_default(),
            )?,
            password: fields.boolean("password")?.unwrap_or(false),
        },
        "done" => Incoming::Done {
            error: fields.take("error").map(code_error).transpose()?,
            exit_code: fields
                .whole("exit_code", 0..=255)?
                .and_then(|code| u8::try_from(code).ok()),
            is_interrupted: false,
        },
        _ => return Err(broken("an unknown type of frame")),
    })
}

fn required(fields: &mut Fields<'_>, name: &'static str) -> Result<String> {
    let text = fields.string(name)?;
    text.ok_or_else(|| broken(&format!("{name} is missing")))
}

/// Why it failed, without what would be too long for an answer.
fn reason(error: &str) -> String {
    shortened(error, MAX_REASON_BYTES).into_owned()
}

/// Refuses a text that no bridge sends: it would be held for every client that reads it.
fn at_most(most: usize, text: String) -> Result<String> {
    if text.len() > most {
        return Err(broken("a text is too long"));
    }
    Ok(text)
}

fn code_error(error: &RawValue) -> Result<CodeError> {
    let mut fields = Fields::parse(error.get().as_bytes())?;
    let mut traceback = Vec::new();
    if let Some(lines) = fields.take("traceback") {
        let lines = decoded::<Elements<'_>>("traceback", lines)?.0;
        for line in lines.into_iter().take(MAX_TRACEBACK_LINES) {
            traceback.push(decoded("traceback", line)?);
        }
    }
    let error = CodeError {
        name: required(&mut fields, "name")?,
        value: fields.string("value")?.unwrap_or_default(),
        traceback,
    };
    if error.size() > MAX_ERROR_BYTES {
        return Err(broken("its error is too long"));
    }
    Ok(error)
}

fn bundle(is_main: bool, mut fields: Fields<'_>, admit: Admit<'_>) -> Result<Option<Bundle>> {
    let data = data(fields.take("data"))?;
    let metadata = object("metadata", fields.take("metadata"))?;
    let dropped = fields.take("dropped");
    let dropped = dropped.map(|dropped| object("dropped", Some(dropped)));
    let dropped = dropped.transpose()?;
    let display_id = fields.string("display_id")?;
    let is_update = fields.boolean("update")?.unwrap_or(false);
    drop(fields);
    let id = display_id.as_ref().map_or(0, String::len);
    let lengths = [data, metadata, dropped.unwrap_or_default()].map(line_length);
    let charge = admit(id + lengths.iter().sum::<usize>());
    Ok(charge.map(|charge| Bundle {
        is_main,
        data: one_line(data),
        metadata: one_line(metadata),
        display_id,
        is_update,
        dropped: dropped.map(one_line),
        charge,
    }))
}

/// The object of a bundle's values by MIME type: strings, or any JSON for some types.
fn data(data: Option<&RawValue>) -> Result<&str> {
    let data = data.ok_or_else(|| broken("data is missing"))?;
    for (mime, value) in decoded::<Members<'_>>("data", data)?.0 {
        if JsonType::of(value) != JsonType::String && !is_json(&mime) {
            return Err(broken("a value in data is no string"));
        }
    }
    passed_on(data)
}

/// Whether values of a MIME type are JSON and no text: objects of the types of E2B's clients are, too.
fn is_json(mime: &str) -> bool {
    mime.ends_with("json") || mime.starts_with("e2b/")
}

fn object<'a>(name: &str, object: Option<&'a RawValue>) -> Result<&'a str> {
    let Some(object) = object else {
        return Ok("{}");
    };
    if JsonType::of(object) != JsonType::Object {
        return Err(broken(&format!("{name} is no object")));
    }
    passed_on(object)
}

/// JSON that clients get with [`one_line`].
fn passed_on(value: &RawValue) -> Result<&str> {
    if depth(value.get()) > MAX_DEPTH {
        return Err(broken("a value is nested too deeply"));
    }
    Ok(value.get())
}

/// How deep arrays and objects of valid JSON are nested.
fn depth(json: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let mut bytes = json.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            b'"' => {
                while let Some(byte) = bytes.next().filter(|byte| *byte != b'"') {
                    if byte == b'\\' {
                        bytes.next();
                    }
                }
            }
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

/// Valid JSON with the same value, for a line of events: without line ends of any kind, and with halves of
/// characters as text.
fn one_line(json: &str) -> String {
    // A character may become three times as long. What is not needed is not charged.
    let mut line = String::with_capacity(line_length(json));
    write_line(json, &mut |piece| line.push_str(piece));
    line
}

/// The length of [`one_line`].
fn line_length(json: &str) -> usize {
    let mut length = 0;
    write_line(json, &mut |piece| length += piece.len());
    length
}

fn write_line(json: &str, write: &mut dyn FnMut(&str)) {
    let mut rest = json;
    // Outside of strings line ends are white space, and inside they are escaped. The other separators are inside.
    while let Some(at) = rest.find(['\n', '\r', '\\', '\u{85}', '\u{2028}', '\u{2029}']) {
        let (before, from) = rest.split_at(at);
        write(before);
        let special = from.chars().next().unwrap_or(' ');
        rest = &from[special.len_utf8()..];
        match special {
            '\\' => rest = escape_sequence(rest, write),
            '\u{85}' => write("\\u0085"),
            '\u{2028}' => write("\\u2028"),
            '\u{2029}' => write("\\u2029"),
            _ => write(" "),
        }
    }
    write(rest);
}

/// Writes a backslash and what follows it, and returns the rest.
fn escape_sequence<'a>(rest: &'a str, write: &mut dyn FnMut(&str)) -> &'a str {
    let unit = |text: &str| u32::from_str_radix(text.strip_prefix('u')?.get(..4)?, 16).ok();
    let length = match unit(rest) {
        Some(0xdc00..=0xdfff) => {
            // Without a first half before it. A text with a backslash is valid JSON, and says what was there.
            write("\\");
            5
        }
        Some(0xd800..=0xdbff) => {
            let second = rest.get(5..).and_then(|after| after.strip_prefix('\\'));
            if matches!(second.and_then(unit), Some(0xdc00..=0xdfff)) {
                11
            } else {
                write("\\");
                5
            }
        }
        Some(_) => 5,
        None => rest.chars().next().map_or(0, char::len_utf8),
    };
    write("\\");
    let (sequence, rest) = rest.split_at(length);
    write(sequence);
    rest
}

/// Appends the frame or the fields that start a run.
pub(super) fn run(wire: Wire, run: &Run<'_>, out: &mut Vec<u8>) {
    match wire {
        Wire::Frames => frame(out, |out| {
            text(out, "{\"type\":\"run\",\"code\":", run.code);
            if let Some(stdin) = run.stdin {
                text(out, ",\"stdin\":", stdin);
            }
            let Run {
                count,
                asks,
                sends_values,
                is_signalled,
                ..
            } = run;
            raw(
                out,
                &format!(
                    ",\"count\":{count},\"ask\":{asks},\"values\":{sends_values},\"signalled\":{is_signalled},\"env\":"
                ),
            );
            let changes = run.environment.iter();
            members(out, changes.map(|(name, value)| (&**name, Some(&**value))));
            raw(out, "}");
        }),
        Wire::Lines => {
            field(out, &run.environment.len().to_string());
            for (name, value) in run.environment {
                field(out, &format!("{name}={value}"));
            }
            field(out, run.stdin.unwrap_or_default());
            field(out, run.code);
        }
    }
}

/// Appends `init`: `modules` are names and sources that the bridge may need.
pub(super) fn init(backend: &str, modules: &[(&str, &str)], out: &mut Vec<u8>) {
    frame(out, |out| {
        text(out, "{\"type\":\"init\",\"backend\":", backend);
        raw(out, ",\"modules\":");
        let modules = modules.iter();
        members(out, modules.map(|(name, source)| (*name, Some(*source))));
        raw(out, "}");
    });
}

pub(super) fn adopt(
    directory: Option<&str>,
    environment: &[(String, Option<String>)],
    out: &mut Vec<u8>,
) {
    frame(out, |out| {
        raw(out, "{\"type\":\"adopt\"");
        if let Some(directory) = directory {
            text(out, ",\"cwd\":", directory);
        }
        raw(out, ",\"env\":");
        let changes = environment.iter();
        members(
            out,
            changes.map(|(name, value)| (&**name, value.as_deref())),
        );
        raw(out, "}");
    });
}

pub(super) fn synced(n: Option<u64>, out: &mut Vec<u8>) {
    frame(out, |out| match n {
        Some(n) => raw(out, &format!("{{\"type\":\"synced\",\"n\":{n}}}")),
        None => raw(out, "{\"type\":\"synced\"}"),
    });
}

/// Appends `input_reply`. `None` is the end of input.
pub(super) fn input_reply(k: u64, value: Option<&str>, out: &mut Vec<u8>) {
    frame(out, |out| {
        let eof = value.is_none();
        raw(
            out,
            &format!("{{\"type\":\"input_reply\",\"k\":{k},\"eof\":{eof}"),
        );
        text(out, ",\"value\":", value.unwrap_or_default());
        raw(out, "}");
    });
}

/// Appends a source as a bridge of this form is sent.
pub(super) fn source(wire: Wire, source: &str, out: &mut Vec<u8>) {
    match wire {
        Wire::Frames => frame(out, |out| raw(out, source)),
        Wire::Lines => field(out, source),
    }
}

fn frame(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    write(out);
    // A body is at most 16 MiB, and no byte of it becomes more than six.
    let length = u32::try_from(out.len() - start - 4).unwrap_or(0);
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

fn field(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(text.as_bytes());
    out.push(0);
}

fn raw(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(text.as_bytes());
}

/// Appends `before` and a JSON string.
fn text(out: &mut Vec<u8>, before: &str, value: &str) {
    raw(out, before);
    out.push(b'"');
    escape::append(out, value.as_bytes());
    out.push(b'"');
}

/// Appends an object of strings and nulls.
fn members<'a>(out: &mut Vec<u8>, members: impl Iterator<Item = (&'a str, Option<&'a str>)>) {
    out.push(b'{');
    for (index, (name, value)) in members.enumerate() {
        text(out, if index == 0 { "" } else { "," }, name);
        out.push(b':');
        match value {
            Some(value) => text(out, "", value),
            None => raw(out, "null"),
        }
    }
    out.push(b'}');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ledger::{Budget, Item};

    fn unlimited(bytes: usize) -> Option<Charge> {
        let ledger = Budget::new(1 << 30).whole();
        ledger.charge(Item::Executions, bytes).ok()
    }

    fn framed(json: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        source(Wire::Frames, json, &mut bytes);
        bytes
    }

    fn read(json: &str) -> Result<Incoming> {
        let bytes = framed(json);
        assert_eq!(whole(Wire::Frames, &bytes).unwrap(), Some(bytes.len()));
        parse(Wire::Frames, &bytes, &unlimited)
    }

    #[test]
    fn what_is_decoded_is_no_longer_than_it_was_said_to_be() {
        for json in [
            r#""""#,
            r#""text \u00e4 \u2028 \ud83d\ude00 \u0001\u007f \n\t\\ \"""#,
            r#""\\u0041 \\\u0041""#,
            "\"\u{e4}\u{20ac}\"",
        ] {
            let text: String = serde_json::from_str(json).unwrap();
            let most = decoded_length(json.as_bytes());
            assert!((text.len()..=json.len()).contains(&most), "{json}: {most}");
        }
        assert_eq!(decoded_length(&br"\u0001".repeat(1000)), 1000);
        for part in [r"\", r"\u", r"\u00", "a\\"] {
            assert!(decoded_length(part.as_bytes()) <= part.len());
        }
    }

    #[test]
    fn a_message_is_whole_at_its_last_byte() {
        for (wire, message) in [
            (Wire::Frames, framed("{\"type\":\"sync\"}")),
            (Wire::Lines, b"done 0\n".to_vec()),
        ] {
            for end in 0..message.len() {
                assert_eq!(whole(wire, &message[..end]).unwrap(), None, "{end}");
            }
            let more = [&message[..], b"x"].concat();
            assert_eq!(whole(wire, &more).unwrap(), Some(message.len()));
        }
        assert!(
            whole(Wire::Frames, &[1, 0, 0, 4]).is_err(),
            "a byte too long"
        );
        assert!(whole(Wire::Lines, &[b'x'; MAX_LINE_BYTES + 1]).is_err());
    }

    #[test]
    fn refuses_what_is_not_of_the_protocol() {
        for json in [
            "",
            "[]",
            "{}",
            "{\"type\":\"dance\"}",
            "{\"type\":7}",
            "{\"type\":\"ready\"}",
            "{\"type\":\"display\"}",
            "{\"type\":\"display\",\"data\":[]}",
            "{\"type\":\"display\",\"data\":{\"text/plain\":1}}",
            "{\"type\":\"result\",\"data\":{},\"metadata\":1}",
            "{\"type\":\"input\"}",
            "{\"type\":\"done\",\"error\":1}",
            "{\"type\":\"done\",\"error\":{}}",
            "{\"type\":\"done\",\"error\":{\"name\":\"E\",\"traceback\":[1]}}",
            "{\"type\":\"done\",\"exit_code\":256}",
            "{\"type\":\"done\",\"exit_code\":-1}",
            "{\"type\":\"sync\",\"n\":-1}",
        ] {
            assert!(read(json).is_err(), "{json}");
        }
        for line in [
            "",
            "\n",
            "done\n",
            "done x\n",
            "done 256\n",
            "int\n",
            "sync\n",
            "\u{fffd}\n",
        ] {
            assert!(
                parse(Wire::Lines, line.as_bytes(), &unlimited).is_err(),
                "{line}"
            );
        }
        assert!(parse(Wire::Lines, b"\xff\n", &unlimited).is_err());
    }

    #[test]
    fn what_is_passed_on_is_one_line_of_json() {
        for (json, expected) in [
            ("{}", "{}"),
            ("{\n\"a\"\r\n:\t1}", "{ \"a\"  :\t1}"),
            ("\"\\n\\\\n\\u2028\"", "\"\\n\\\\n\\u2028\""),
            ("\"\u{2028}\u{85}\u{2029}\"", "\"\\u2028\\u0085\\u2029\""),
            ("\"\\ud83d\\ude00\"", "\"\\ud83d\\ude00\""),
            ("\"\\ud83d\"", "\"\\\\ud83d\""),
            ("\"\\ud83dx\\ude00\"", "\"\\\\ud83dx\\\\ude00\""),
            ("\"\\ud83d\\n\"", "\"\\\\ud83d\\n\""),
            ("\"\\ud83d\\ud83d\\ude00\"", "\"\\\\ud83d\\ud83d\\ude00\""),
            ("\"\\\\ud83d\"", "\"\\\\ud83d\""),
        ] {
            let line = one_line(json);
            assert_eq!(line, expected);
            assert_eq!(
                (line.len(), line.capacity()),
                (line_length(json), line.len())
            );
            serde_json::from_str::<serde_json::Value>(&line).unwrap();
        }
    }

    #[test]
    fn a_bundle_is_made_of_memory_that_was_asked_for() {
        let text = "\u{85}".repeat(1000);
        let json =
            format!("{{\"type\":\"display\",\"data\":{{\"a\":\"{text}\"}},\"display_id\":\"d\"}}");
        let Incoming::Bundle { bundle, .. } = read(&json).unwrap() else {
            panic!("no bundle");
        };
        let bundle = bundle.unwrap();
        let taken = bundle.data.capacity() + bundle.metadata.capacity() + 1;
        assert_eq!((bundle.charge.bytes(), taken), (6011, 6011));
        let refused = parse(Wire::Frames, &framed(&json), &|_| None).unwrap();
        assert!(matches!(refused, Incoming::Bundle { bundle: None, .. }));
    }

    #[test]
    fn why_it_failed_is_short() {
        let json = format!(
            "{{\"type\":\"failed\",\"error\":\"{}\"}}",
            "x".repeat(1 << 20)
        );
        let Incoming::Failed { error } = read(&json).unwrap() else {
            panic!("no failure");
        };
        assert!(error.len() < MAX_REASON_BYTES + 100);
    }

    #[test]
    fn what_is_passed_on_is_no_deeper_than_parsers_go() {
        for (json, expected) in [
            ("1", 0),
            ("[]", 1),
            ("{\"a\":[{}]}", 3),
            ("[\"[[[\\\"[[\",[]]", 2),
            ("\"\\\\\"", 0),
        ] {
            assert_eq!(depth(json), expected, "{json}");
        }
        let nested = |levels: usize| {
            let (open, close) = ("[".repeat(levels), "]".repeat(levels));
            read(&format!(
                "{{\"type\":\"display\",\"data\":{{\"a/json\":{open}{close}}}}}"
            ))
        };
        assert!(nested(MAX_DEPTH - 1).is_ok());
        assert!(nested(MAX_DEPTH).is_err());
        assert!(nested(1_000_000).is_err());
    }

    #[test]
    fn a_run_arrives_as_it_was_given() {
        let environment = [("A".to_owned(), "b\n\u{2028}".to_owned())];
        let given = Run {
            code: "print(\"\u{1f600}\\\")\n",
            count: 7,
            stdin: Some("in"),
            environment: &environment,
            ..Run::default()
        };
        let mut bytes = Vec::new();
        run(Wire::Frames, &given, &mut bytes);
        let json: serde_json::Value = serde_json::from_slice(&bytes[4..]).unwrap();
        assert_eq!(json["code"], given.code);
        assert_eq!(json["env"]["A"], "b\n\u{2028}");
        assert_eq!((&json["count"], &json["stdin"]), (&7.into(), &"in".into()));
        assert_eq!(json["ask"], false);

        bytes.clear();
        run(Wire::Lines, &given, &mut bytes);
        let fields: Vec<&[u8]> = bytes.split(|byte| *byte == 0).collect();
        let expected = ["1", "A=b\n\u{2028}", "in", given.code, ""];
        assert_eq!(fields, expected.map(str::as_bytes));
    }
}
