//! Fuzz tests of the REST door. What clients send is compared with a plain JSON document or a second
//! reading of the same text; what the server sends is read back as clients read it.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::events::EventWriter;
use crate::api::json::command::{CommandRequest, Encoding, command_request};
use crate::api::json::parsed;
use crate::api::json::sandbox::sandbox_request;
use crate::codec::base64;
use crate::codec::plain::PlainText;
use crate::codec::queries::QueryFilter;
use crate::codec::query::Query;
use crate::fuzz::{Random, Script, bounded, check};
use crate::http::range::{Range, byte_range};
use crate::http::stream::StreamWriter;
use crate::process::ring::{Cursor, Stream};
use crate::process::{Exit, OnDisconnect, Reason, Subscriber};
use crate::spec::command::{CommandLine, EnvironmentChange, INTERACTIVE_SHELL, StdinSource};
use crate::spec::language::Language;
use crate::sys::Ending;

#[test]
fn a_query_means_what_a_form_means() {
    let tokens: &[&[u8]] = &[
        b"&", b"=", b"+", b"%", b"%2", b"%2f", b"%2B", b"%00", b"%fF", b"%C3%A9", b"path=", b"n=",
        b"true", b"false", b"0777", b"7777", b"10000", b"1.5", b"1e9", b"inf", b"nan", b"-",
    ];
    check("query", tokens, |input| {
        let query = bounded(input, 128, || Query::parse(Some(input)));
        let Some(expected) = form(input) else {
            assert!(query.is_err());
            return;
        };
        let query = query.unwrap_or_else(|error| panic!("{error}"));
        for (name, value) in expected.iter().take(40) {
            let Ok(name) = std::str::from_utf8(name) else {
                continue;
            };
            let same = expected
                .iter()
                .filter(|(other, _)| other == name.as_bytes());
            if same.count() > 1 {
                assert!(query.value(name).is_err(), "{name} twice");
                continue;
            }
            assert_eq!(query.value(name).unwrap(), Some(&value[..]));
            let text = String::from_utf8_lossy(value);
            assert_eq!(
                query.number(name).ok().flatten(),
                whole_number(&text),
                "{text}"
            );
            assert_eq!(
                query.mode(name).ok().flatten(),
                permissions(&text),
                "{text}"
            );
            let flag = match &text[..] {
                "1" | "true" => Some(true),
                "0" | "false" => Some(false),
                _ => None,
            };
            assert_eq!(query.optional_flag(name).ok().flatten(), flag, "{text}");
            if let Ok(Some(duration)) = query.seconds(name) {
                let seconds: f64 = text.parse().unwrap();
                assert!(
                    (duration.as_secs_f64() - seconds).abs() <= 1e-9 + seconds * 1e-9,
                    "{text}"
                );
            } else {
                let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
                assert!(!plain || text.len() > 19, "{text} is a number of seconds");
            }
        }
        // Writing the pairs and reading them again gives the same pairs.
        let written: Vec<_> = expected
            .iter()
            .map(|(name, value)| format!("{}={}", percent_encoded(name), percent_encoded(value)))
            .collect();
        assert_eq!(form(written.join("&").as_bytes()), Some(expected.clone()));
        let again = Query::parse(Some(written.join("&").as_bytes())).unwrap();
        for (name, value) in expected.iter().take(40) {
            if let Ok(name) = std::str::from_utf8(name)
                && let Ok(found) = again.value(name)
            {
                assert_eq!(found, Some(&value[..]));
            }
        }
    });
}

/// The pairs of a form; `None` if a percent sign does not begin an escape.
fn form(raw: &[u8]) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
    let decoded = |text: &[u8]| -> Option<Vec<u8>> {
        let spaced: Vec<u8> = text
            .iter()
            .map(|byte| if *byte == b'+' { b' ' } else { *byte })
            .collect();
        let mut parts = spaced.split(|byte| *byte == b'%');
        let mut decoded = parts.next()?.to_vec();
        for part in parts {
            let digits = part
                .first_chunk::<2>()?
                .map(|digit| char::from(digit).to_digit(16));
            decoded.push(u8::try_from(digits[0]? * 16 + digits[1]?).ok()?);
            decoded.extend_from_slice(&part[2..]);
        }
        Some(decoded)
    };
    let mut pairs = Vec::new();
    for pair in raw.split(|byte| *byte == b'&') {
        let equals = pair.iter().position(|byte| *byte == b'=');
        let (name, value) = match equals {
            _ if pair.is_empty() => continue,
            Some(at) => (&pair[..at], &pair[at + 1..]),
            None => (pair, &b""[..]),
        };
        pairs.push((decoded(name)?, decoded(value)?));
    }
    Some(pairs)
}

fn percent_encoded(bytes: &[u8]) -> String {
    let escapes: Vec<_> = bytes.iter().map(|byte| format!("%{byte:02x}")).collect();
    escapes.concat()
}

fn whole_number(text: &str) -> Option<u64> {
    let mut number = Some(0_u64);
    for one in text.chars() {
        let digit = u64::from(one.to_digit(10)?);
        number = number.and_then(|so_far| so_far.checked_mul(10)?.checked_add(digit));
    }
    number.filter(|number| !text.is_empty() && i64::try_from(*number).is_ok())
}

fn permissions(text: &str) -> Option<u32> {
    let digits: Option<Vec<u32>> = text.chars().map(|one| one.to_digit(8)).collect();
    let digits = digits.filter(|digits| !digits.is_empty())?;
    let leading = digits.iter().take_while(|digit| **digit == 0).count();
    let significant = &digits[leading..];
    (significant.len() <= 4).then(|| significant.iter().fold(0, |mode, digit| mode * 8 + digit))
}

/// Characters that end a line for Python's `str.splitlines`.
const LINE_BREAKS: &[char] = &[
    '\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}',
];

/// A client that reads events and knows what the process wrote.
#[derive(Default)]
struct Reader {
    /// Per stream, the bytes written; `None` stands for a dropped byte.
    written: [Vec<Option<u8>>; 2],
    /// Per stream, the next offset.
    next: [usize; 2],
    /// Per stream, the text since the last gap, and the offset where it began.
    text: [(usize, Vec<u8>); 2],
    /// Whether control sequences are left out.
    is_plain: bool,
    is_base64: bool,
}

impl Reader {
    fn raw(&self, index: usize, from: usize, to: usize) -> Vec<u8> {
        let bytes: Option<Vec<u8>> = self.written[index][from..to].iter().copied().collect();
        bytes.expect("what was dropped is not sent")
    }

    /// Checks that text sent in pieces is what it would be in one piece.
    fn compare_text(&mut self, index: usize) {
        let next = self.next[index];
        let (from, text) = std::mem::take(&mut self.text[index]);
        let raw = self.raw(index, from, next);
        match (self.is_plain, self.is_base64) {
            (false, false) => assert_eq!(text, String::from_utf8_lossy(&raw).as_bytes()),
            (true, true) => {
                let (mut filter, mut whole) = (PlainText::new(from == 0), Vec::new());
                filter.push(&raw, &mut whole);
                filter.finish(&mut whole);
                assert_eq!(text, whole);
            }
            // What was left out may have torn a character, which then is not the same in one piece.
            (true, false) => {}
            (false, true) => unreachable!("each event is compared by itself"),
        }
    }

    fn read(&mut self, sent: Vec<u8>) {
        let sent = String::from_utf8(sent).expect("events are UTF-8");
        for line in sent.split_terminator('\n') {
            assert!(
                !line.contains(LINE_BREAKS),
                "{line:?} is more than one line to clients"
            );
            let event: Value =
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
            self.event(&event);
        }
    }

    fn event(&mut self, event: &Value) {
        let number = |name: &str| usize::try_from(event[name].as_u64().unwrap()).unwrap();
        let index = |name: &str| usize::from(name == "stderr");
        match event["event"].as_str().unwrap() {
            name @ ("stdout" | "stderr") => {
                let (index, offset) = (index(name), number("offset"));
                assert_eq!(offset, self.next[index], "in order and without a hole");
                self.next[index] += number("bytes");
                let raw = self.raw(index, offset, self.next[index]);
                if let Some(text) = event["data"].as_str() {
                    assert!(self.is_plain || text == String::from_utf8_lossy(&raw));
                    self.text[index].1.extend_from_slice(text.as_bytes());
                } else {
                    let coded = event["data_b64"].as_str().unwrap();
                    let data = from_base64(coded.as_bytes());
                    if self.is_plain {
                        self.text[index].1.extend(data);
                    } else {
                        assert_eq!(data, raw);
                    }
                }
                assert!(!raw.is_empty(), "an event without output");
            }
            "dropped" => {
                let index = index(event["stream"].as_str().unwrap());
                assert_eq!(number("offset"), self.next[index]);
                if self.is_plain || !self.is_base64 {
                    self.compare_text(index);
                }
                let from = self.next[index];
                self.next[index] += number("bytes");
                self.text[index].0 = self.next[index];
                let dropped = &self.written[index][from..self.next[index]];
                assert!(!dropped.is_empty());
                if dropped.iter().any(Option::is_some) {
                    // The rest of a character whose beginning was dropped.
                    assert!(from > 0 && self.written[index][from - 1].is_none());
                    let is_rest = |byte: &Option<u8>| byte.is_some_and(|byte| byte & 0xc0 == 0x80);
                    assert!(dropped.len() <= 3 && dropped.iter().all(is_rest));
                }
            }
            "end" => {
                // What was held back may have been told with the text before it by now.
                for (index, name) in ["stdout_offset", "stderr_offset"].iter().enumerate() {
                    assert!(number(name) >= self.next[index]);
                    assert!(self.is_plain || number(name) == self.next[index]);
                }
            }
            "ping" => assert_eq!(event.as_object().unwrap().len(), 1),
            other => assert_eq!(other, "exit"),
        }
    }
}

#[test]
fn events_tell_what_was_written_wherever_it_was_cut() {
    let tokens: &[&[u8]] = &[
        b"\n",
        b"\"",
        b"\\",
        b"\x7f",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b"\xe2\x80\xa9",
        b"\xe2\x80",
        b"\xf0\x9f\x98\x80",
        b"\xf0\x9f",
        b"\xef\xbf\xbd",
        b"\xed\xa0\x80",
        b"\xc0\x80",
        b"\xff",
        b"\xf4\x90\x80\x80",
        b"\xc3",
        b"\xa9",
        b"plain text of eight",
        b"\x1c\x1d\x1e\x0b\x0c",
        b"\x1b[1;31m",
        b"\x1b]0;",
        b"\x1b\\",
        b"\x07",
        b"\r",
        b"\x1b(",
        b"\x1bP",
        b"\x9b",
    ];
    check("events", tokens, |input| {
        let mut script = Script(input);
        let manner = script.byte();
        if manner % 4 == 0 {
            // Two pieces, split at every position.
            let data = &script.0[..script.0.len().min(32)];
            for at in 0..=data.len() {
                tell(Encoding::Utf8, |told| {
                    told.output(Stream::Stdout, &data[..at]);
                    told.output(Stream::Stdout, &data[at..]);
                });
            }
        } else if manner % 4 == 1 {
            let mut random = Random::new(u64::from(script.byte()));
            tell(Encoding::Utf8, |told| {
                while !script.is_at_end() {
                    let data = script.take(1 + random.below(7));
                    told.output(Stream::ALL[random.below(8) / 7], data);
                }
            });
        } else {
            let is_base64 = manner % 4 == 3;
            let encoding = if is_base64 {
                Encoding::Base64
            } else {
                Encoding::Utf8
            };
            tell_as(encoding, manner >= 128, |told| {
                while !script.is_at_end() {
                    let action = script.byte();
                    let stream = Stream::ALL[usize::from(action % 2)];
                    match action % 8 {
                        0..=5 => {
                            let count = usize::from(script.byte());
                            told.output(stream, script.take(count));
                        }
                        6 => told.events.client().ping(),
                        _ => told.dropped(stream, 1 + usize::from(script.byte())),
                    }
                }
            });
        }
    });
}

struct Told<'a> {
    events: EventWriter<'a>,
    reader: Reader,
}

impl Told<'_> {
    fn output(&mut self, stream: Stream, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        let written = &mut self.reader.written[stream.index()];
        let offset = written.len() as u64;
        written.extend(data.iter().copied().map(Some));
        self.events.output(stream, offset, data);
    }

    fn dropped(&mut self, stream: Stream, count: usize) {
        let written = &mut self.reader.written[stream.index()];
        let offset = written.len() as u64;
        written.resize(written.len() + count, None);
        self.events.dropped(stream, offset, count as u64);
    }
}

/// Has a client read the events of `happens`, followed by those that end a stream.
fn tell(encoding: Encoding, happens: impl FnMut(&mut Told<'_>)) {
    tell_as(encoding, false, happens);
}

/// The same, without control sequences if it `is_plain`.
fn tell_as(encoding: Encoding, is_plain: bool, mut happens: impl FnMut(&mut Told<'_>)) {
    thread_local! {
        // A stream needs a socket, which this test does not use.
        static SOCKET: TcpStream = {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            TcpStream::connect(listener.local_addr().unwrap()).unwrap()
        };
    }
    let socket = SOCKET.with(|socket| socket.try_clone().unwrap());
    let mut stream = StreamWriter::for_test(socket);
    let mut events = EventWriter::new(&mut stream, encoding, Duration::from_secs(1));
    if is_plain {
        events = events.plain();
    }
    let reader = Reader {
        is_plain,
        is_base64: encoding == Encoding::Base64,
        ..Reader::default()
    };
    let mut told = Told { events, reader };
    happens(&mut told);
    let Told { mut events, reader } = told;
    let [stdout, stderr] = [0, 1].map(|index| reader.written[index].len());
    events.caught_up(&Cursor::at(stdout as u64, stderr as u64));
    events.exit(&Exit {
        ending: Ending::Exited(3),
        reason: Reason::Exited,
        duration: Duration::from_millis(5),
    });
    let mut reader = reader;
    reader.read(stream.take_pending());
    for index in [0, 1] {
        assert_eq!(
            reader.next[index],
            reader.written[index].len(),
            "all of it was told"
        );
        if is_plain || encoding == Encoding::Utf8 {
            reader.compare_text(index);
        }
    }
}

#[test]
fn base64_is_read_back_as_it_was() {
    check("base64", &[], |input| {
        let coded = bounded(input, 8, || base64::encode(input));
        assert_eq!(coded.len(), input.len().div_ceil(3) * 4);
        assert_eq!(from_base64(coded.as_bytes()), input);
        let mut behind = b"before".to_vec();
        base64::append(&mut behind, input);
        assert_eq!(behind, ["before", &coded].concat().as_bytes());
    });
}

/// Decodes bit by bit. Input that is not canonical is an error.
fn from_base64(coded: &[u8]) -> Vec<u8> {
    assert_eq!(coded.len() % 4, 0);
    let digits = coded
        .strip_suffix(b"==")
        .or(coded.strip_suffix(b"="))
        .unwrap_or(coded);
    let mut bits = Vec::new();
    for digit in digits {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            other => panic!("{other} is no digit"),
        };
        bits.extend((0..6).rev().map(|bit| value >> bit & 1));
    }
    let (bytes, rest) = bits.split_at(bits.len() / 8 * 8);
    assert!(
        rest.iter().all(|bit| *bit == 0) && rest.len() < 6,
        "padding holds nothing"
    );
    bytes
        .chunks(8)
        .map(|bits| bits.iter().fold(0, |byte, bit| byte << 1 | bit))
        .collect()
}

#[test]
fn a_range_is_the_positions_it_names() {
    let tokens: &[&[u8]] = &[
        b"bytes=",
        b"-",
        b",",
        b" ",
        b"\t",
        b"0-",
        b"-0",
        b"0-0",
        b"99999999999999999999999-",
        b"18446744073709551615",
        b"9223372036854775807",
        b"\n",
        b"bytes",
        b"=",
        b"+1",
        b"\xff",
    ];
    check("range", tokens, |input| {
        // The first line is the size; the rest is the header.
        let mut lines = input.splitn(2, |byte| *byte == b'\n');
        let size = String::from_utf8_lossy(lines.next().unwrap_or_default()).parse::<i64>();
        let size = size
            .unwrap_or(10)
            .unsigned_abs()
            .min(i64::MAX.unsigned_abs());
        let header = lines.next().unwrap_or_default();
        let found = byte_range(header, size);
        if let Range::Satisfiable { offset, length } = found {
            assert!(length > 0 && offset < size && length <= size - offset);
        }
        let Some((first, last)) = positions(header) else {
            assert_eq!(found, Range::None);
            return;
        };
        let size = u128::from(size);
        let (from, to) = match (first, last) {
            (Some(first), Some(last)) if first > last => {
                assert_eq!(found, Range::None);
                return;
            }
            (Some(first), last) => (first, last.map_or(size, |last| (last + 1).min(size))),
            (None, Some(count)) => (size.saturating_sub(count), size),
            (None, None) => {
                assert_eq!(found, Range::None);
                return;
            }
        };
        let expected = if from >= to {
            Range::Unsatisfiable
        } else {
            Range::Satisfiable {
                offset: u64::try_from(from).unwrap(),
                length: u64::try_from(to - from).unwrap(),
            }
        };
        assert_eq!(found, expected);
    });
}

/// The numbers on both sides of the hyphen, if the header is a single range of bytes.
fn positions(header: &[u8]) -> Option<(Option<u128>, Option<u128>)> {
    let text = std::str::from_utf8(header)
        .ok()?
        .strip_prefix("bytes=")?
        .trim();
    let mut sides = text.split('-').map(|side| {
        let most = u128::from(u64::MAX);
        let digits: Option<Vec<u32>> = side.chars().map(|one| one.to_digit(10)).collect();
        let add = |number: u128, digit: u32| (number * 10 + u128::from(digit)).min(most);
        digits.map(|digits| (!digits.is_empty()).then(|| digits.into_iter().fold(0, add)))
    });
    let both = (sides.next()??, sides.next()??);
    sides.next().is_none().then_some(both)
}

const JSON_TOKENS: &[&[u8]] = &[
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\"",
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b"\\u2028",
    b"null",
    b"true",
    b"false",
    b"0",
    b"-0",
    b"1e9",
    b"1.5",
    b"1e400",
    b"{}",
    b"[]",
    b"\"cmd\":",
    b"\"a\"",
    b"\"code\":",
    b"\"language\":",
    b"\"args\":",
    b"\"js\"",
    b"\"bash\"",
    b"\"shell\":",
    b"\"env\":",
    b"\"cwd\":",
    b"\"timeout\":",
    b"\"stdin\":",
    b"\"background\":",
    b"\"tag\":",
    b"\"id\":",
    b"\"encoding\":",
    b"\"on_disconnect\":",
    b"\"keep\"",
    b"\"base64\"",
    b"\"count\":",
    b"\"idle_timeout_secs\":",
    b"\"max_procs\":",
    b"\"max_mem_mb\":",
    b"\"max_total_mem_mb\":",
    b"\"max_cpu\":",
    b"\"pty\":",
    b"\"rows\":",
    b"\"cols\":",
    b"\"term\":",
    b"4096",
    b" ",
    b"\xff",
    b"\"p-1\"",
    b"\"A=B\"",
    b"\xc2\x85",
    b"18446744073709551615",
];

/// What is wrong with a document, for the messages of failed properties.
type Wrong = &'static str;

#[test]
fn a_command_is_what_its_json_says() {
    check("exec", JSON_TOKENS, |input| {
        let found = bounded(input, 64, || parsed(input, command_request));
        let Ok(document) = serde_json::from_slice::<Value>(input) else {
            // The server checks only the form of values that it ignores: they may be nested deeper,
            // hold half a surrogate pair, or hold larger numbers than the values that it reads.
            let is_json = serde_json::from_slice::<&serde_json::value::RawValue>(input).is_ok();
            assert!(
                found.is_err() || is_json,
                "{:?}",
                document_of(&found.ok().unwrap())
            );
            return;
        };
        let found = match (found, expected_command(&document)) {
            (Ok(found), Ok(())) => found,
            (Err(_), Err(_)) => return,
            (Ok(_), Err(why)) => panic!("accepted: {why}"),
            (Err(error), Ok(())) => panic!("refused: {error}"),
        };
        let known = document_of(&found);
        for (name, value) in &known {
            match (&document[name], value) {
                (sent, read) if name == "pty" => assert!(is_terminal(sent, read), "{sent} {read}"),
                (Value::Null, Value::String(text)) if name == "cmd" => {
                    assert_eq!(text, INTERACTIVE_SHELL);
                }
                (Value::Number(sent), Value::Number(read)) => {
                    let (sent, read) = (sent.as_f64().unwrap(), read.as_f64().unwrap());
                    assert!(
                        (sent - read).abs() <= 1e-9 + sent * 1e-9,
                        "{name}: {sent}, {read}"
                    );
                }
                (Value::Object(sent), Value::Object(read)) => {
                    assert!(same_environment(sent, read), "{sent:?} {read:?}");
                }
                (Value::String(sent), read) if name == "language" => {
                    assert_eq!(Language::of(sent).unwrap().name(), read);
                }
                // Each has a value that means the same as leaving the field out.
                (Value::Null, Value::Array(read)) if name == "args" => assert!(read.is_empty()),
                (Value::Null, read) if name == "language" => assert_eq!(read, "python"),
                (Value::Null, Value::Bool(false)) => {}
                (Value::Null, Value::Object(read)) => assert!(read.is_empty()),
                (Value::Null, Value::String(text)) => {
                    assert!(["utf-8", "kill", ""].contains(&&text[..]), "{name}: {text}");
                }
                (sent, read) => assert_eq!(sent, read, "{name}"),
            }
        }
        for name in [
            "cmd",
            "code",
            "language",
            "args",
            "env",
            "cwd",
            "timeout",
            "stdin",
            "background",
            "tag",
            "id",
            "pty",
        ] {
            let is_empty = [json!(null), json!(""), json!(false)].contains(&document[name]);
            assert!(is_empty || known.contains_key(name), "{name} was lost");
        }
        // Writing the command and reading it again gives the same command.
        let again = Value::Object(known).to_string();
        let again = parsed(again, command_request).unwrap();
        assert!(
            again.spec.fingerprint() == found.spec.fingerprint(),
            "not the same command"
        );
    });
}

/// The JSON document of a request.
fn document_of(request: &CommandRequest) -> Map<String, Value> {
    let spec = &request.spec;
    let environment: Map<String, Value> = spec.environment().iter().map(variable).collect();
    let mut document = Map::new();
    let mut put = |name: &str, value: Value| document.insert(name.to_owned(), value);
    match spec.line() {
        CommandLine::Shell(script) => put("cmd", json!(script)),
        CommandLine::Program(words) => put("cmd", json!(words)),
        CommandLine::Code {
            language,
            code,
            arguments,
        } => {
            put("language", json!(language.name()));
            put("args", json!(arguments));
            put("code", json!(code))
        }
    };
    put("env", Value::Object(environment));
    put("background", json!(spec.background));
    if let Some(directory) = spec.directory() {
        put("cwd", json!(directory));
    }
    if let Some(timeout) = spec.timeout {
        put("timeout", json!(timeout.as_secs_f64().max(1e-9)));
    }
    if let Some(tag) = &spec.tag {
        put("tag", json!(tag));
    }
    if let Some(id) = &spec.id {
        put("id", json!(id.as_str()));
    }
    if let Some(terminal) = &spec.terminal {
        let (rows, cols) = (terminal.size.rows(), terminal.size.columns());
        put(
            "pty",
            json!({ "rows": rows, "cols": cols, "term": terminal.name() }),
        );
    }
    if let StdinSource::Given(bytes) = &spec.input {
        put("stdin", json!(String::from_utf8(bytes.clone()).unwrap()));
    }
    let encoding = match request.encoding {
        Encoding::Utf8 => "utf-8",
        Encoding::Base64 => "base64",
    };
    put("encoding", json!(encoding));
    let on_disconnect = match request.on_disconnect {
        OnDisconnect::Kill => "kill",
        OnDisconnect::Keep => "keep",
    };
    put("on_disconnect", json!(on_disconnect));
    document
}

fn variable((name, value): &EnvironmentChange) -> (String, Value) {
    (name.clone(), json!(value))
}

/// Whether a terminal was read as it was sent: what was left out has its usual value.
fn is_terminal(sent: &Value, read: &Value) -> bool {
    let usual = json!({ "rows": 24, "cols": 80, "term": "xterm-256color" });
    ["rows", "cols", "term"].iter().all(|name| {
        let value = sent.get(name).filter(|value| !value.is_null());
        read[name] == *value.unwrap_or(&usual[name])
    })
}

/// Whether an environment was read as it was sent. Values that are not strings keep their spelling.
fn same_environment(sent: &Map<String, Value>, read: &Map<String, Value>) -> bool {
    sent.len() == read.len()
        && sent.iter().all(|(name, value)| match (value, &read[name]) {
            (Value::Number(_) | Value::Bool(_), Value::String(text)) => {
                serde_json::from_str::<Value>(text).is_ok_and(|back| back == *value)
            }
            (value, other) => value == other,
        })
}

fn expected_code<'a>(field: &dyn Fn(&str) -> Option<&'a Value>) -> Result<(), Wrong> {
    let Some(code) = field("code") else {
        let has_rest = field("language").or(field("args")).is_some();
        return if has_rest { Err("no code") } else { Ok(()) };
    };
    let code = code.as_str().ok_or("code")?;
    if field("cmd").is_some() || field("shell").is_some() {
        return Err("code and a command");
    }
    let known = ["python", "py", "javascript", "js", "node", "bash", "sh"];
    let language = field("language").map_or(Some("python"), Value::as_str);
    let language = language.filter(|name| known.contains(name));
    if matches!(language.ok_or("language")?, "bash" | "sh") && code.contains('\0') {
        return Err("NUL in bash");
    }
    let is_word = |word: &Value| word.as_str().is_some_and(|word| !word.contains('\0'));
    let is_list = |args: &Value| args.as_array().is_some_and(|args| args.iter().all(is_word));
    let has_words = field("args").is_none_or(is_list);
    has_words.then_some(()).ok_or("args")
}

fn expected_command(document: &Value) -> Result<(), Wrong> {
    let fields = document.as_object().ok_or("no object")?;
    let field = |name: &str| fields.get(name).filter(|value| !value.is_null());
    let is = |name: &str, accepts: fn(&Value) -> bool| field(name).is_none_or(accepts);
    let no_nul = |text: &str| !text.contains('\0');
    let shell = match field("shell") {
        None => None,
        Some(shell) => Some(shell.as_bool().ok_or("shell")?),
    };
    let has_terminal = expected_terminal(field("pty"))?;
    match field("cmd") {
        Some(Value::String(text)) => {
            if shell == Some(false) || text.is_empty() || !no_nul(text) {
                return Err("cmd as a string");
            }
        }
        Some(Value::Array(words)) => {
            let words: Option<Vec<&str>> = words.iter().map(Value::as_str).collect();
            let words = words.ok_or("cmd of other things")?;
            let is_first = words.first().is_some_and(|word| !word.is_empty());
            if shell == Some(true) || !is_first || !words.iter().all(|word| no_nul(word)) {
                return Err("cmd as an array");
            }
        }
        None if has_terminal || field("code").is_some() => {}
        _ => return Err("cmd"),
    }
    expected_code(&field)?;
    if has_terminal && field("stdin").is_some() {
        return Err("stdin with a terminal");
    }
    expected_environment(field("env"))?;
    let is_seconds = |value: &Value| {
        value
            .as_f64()
            .is_some_and(|seconds| seconds > 0.0 && seconds < 1.8e19)
    };
    if !is("timeout", is_seconds) {
        return Err("timeout");
    }
    if !is("cwd", |value| {
        value.as_str().is_some_and(|text| !text.contains('\0'))
    }) {
        return Err("cwd");
    }
    if !is("stdin", Value::is_string) || !is("background", Value::is_boolean) {
        return Err("stdin or background");
    }
    if !is("tag", |tag| {
        tag.as_str().is_some_and(|tag| tag.len() <= 1024)
    }) {
        return Err("tag");
    }
    if !is("encoding", |word| word == "utf-8" || word == "base64") {
        return Err("encoding");
    }
    if !is("on_disconnect", |word| word == "kill" || word == "keep") {
        return Err("on_disconnect");
    }
    let may_be_chosen = |id: &Value| {
        let Some(id) = id.as_str() else { return false };
        let number = id.strip_prefix("p-").unwrap_or(id);
        let is_number = !number.is_empty() && number.chars().all(|one| one.is_ascii_digit());
        let is_plain = |one: char| one.is_ascii_alphanumeric() || "._-".contains(one);
        (1..=64).contains(&id.len())
            && id.chars().all(is_plain)
            && !is_number
            && id != "."
            && id != ".."
    };
    if is("id", may_be_chosen) {
        Ok(())
    } else {
        Err("id")
    }
}

/// Whether the command has one.
fn expected_terminal(terminal: Option<&Value>) -> Result<bool, Wrong> {
    let fields = match terminal {
        None => return Ok(false),
        Some(Value::Bool(wanted)) => return Ok(*wanted),
        Some(Value::Object(fields)) => fields,
        _ => return Err("pty"),
    };
    let field = |name: &str| fields.get(name).filter(|value| !value.is_null());
    for side in ["rows", "cols"] {
        let number = field(side).map(|side| side.as_u64().unwrap_or(0));
        if number.is_some_and(|number| !(1..=4096).contains(&number)) {
            return Err("a side of the terminal");
        }
    }
    let is_plain = |one: char| one.is_ascii_alphanumeric() || "._+-".contains(one);
    let term = field("term").map(|term| term.as_str().unwrap_or(""));
    if term.is_some_and(|term| !(1..=64).contains(&term.len()) || !term.chars().all(is_plain)) {
        return Err("term");
    }
    Ok(true)
}

fn expected_environment(environment: Option<&Value>) -> Result<(), Wrong> {
    let Some(environment) = environment else {
        return Ok(());
    };
    for (name, value) in environment.as_object().ok_or("env")? {
        let is_text = !value.is_array() && !value.is_object();
        if name.is_empty() || name.contains(['=', '\0']) || !is_text {
            return Err("a variable");
        }
        if value.as_str().is_some_and(|text| text.contains('\0')) {
            return Err("a variable's value");
        }
    }
    Ok(())
}

#[test]
fn sandboxes_are_what_their_json_says() {
    check("sandboxes", JSON_TOKENS, |input| {
        let found = bounded(input, 64, || parsed(input, sandbox_request));
        let is_blank = input.iter().all(u8::is_ascii_whitespace);
        let text = if is_blank { b"{}" } else { input };
        let Ok(document) = serde_json::from_slice::<Value>(text) else {
            let is_json = serde_json::from_slice::<&serde_json::value::RawValue>(input).is_ok();
            assert!(found.is_err() || is_json);
            return;
        };
        let number = |name: &str, least: u64, most: u64| match &document[name] {
            Value::Null => Ok(None),
            value => match value
                .as_u64()
                .filter(|number| (least..=most).contains(number))
            {
                Some(number) => Ok(Some(number)),
                None => Err("a number"),
            },
        };
        let expected = || {
            document.as_object().ok_or("no object")?;
            expected_environment(Some(&document["env"]).filter(|value| !value.is_null()))?;
            Ok::<_, Wrong>((
                number("count", 1, 10_000)?.unwrap_or(1),
                number("idle_timeout_secs", 0, u64::from(u32::MAX))?,
                number("max_procs", 1, 1 << 20)?,
                number("max_mem_mb", 1, 1 << 30)?,
                number("max_total_mem_mb", 1, 1 << 30)?,
                match &document["max_cpu"] {
                    Value::Null => None,
                    value => Some(
                        value
                            .as_f64()
                            .filter(|cores| (0.1..=4096.0).contains(cores))
                            .ok_or("a number")?,
                    ),
                },
            ))
        };
        match (found, expected()) {
            (Ok((made, spec)), Ok((count, idle, processes, memory, total, cpu))) => {
                assert_eq!(made as u64, count);
                assert_eq!(
                    spec.settings
                        .rules
                        .idle_timeout
                        .map_or(0, |limit| limit.as_secs()),
                    idle.unwrap_or(0)
                );
                assert_eq!(spec.settings.limits.processes, processes);
                assert_eq!(
                    spec.settings.limits.whole.memory,
                    total.map(|megabytes| megabytes << 20)
                );
                let found = spec
                    .settings
                    .limits
                    .whole
                    .cpu
                    .map(|time| time.as_secs_f64());
                let difference = found.unwrap_or(0.0) - cpu.unwrap_or(0.0);
                assert!(difference.abs() < 1e-6, "{found:?} {cpu:?}");
                assert_eq!(
                    spec.settings.limits.data,
                    memory.map(|megabytes| megabytes * 1024 * 1024)
                );
                let read = spec.environment.iter().map(variable).collect();
                let none = Map::new();
                let sent = document["env"].as_object().unwrap_or(&none);
                assert!(same_environment(sent, &read), "{sent:?} {read:?}");
            }
            (Err(_), Err(_)) => {}
            (Ok(_), Err(why)) => panic!("accepted: {why}"),
            (Err(error), Ok(_)) => panic!("refused: {error}"),
        }
    });
}

/// What passes has no question left in it, nor does any come of what was taken out.
#[test]
fn questions_are_taken_out_however_they_arrive() {
    let tokens: &[&[u8]] = &[
        b"\x1b",
        b"\x1b[",
        b"\x1b[6n",
        b"\x1b[c",
        b"\x1b]",
        b"\x1b]11;?",
        b"\x1bP$q",
        b"\x1b\\",
        b"\x07",
        b"\x05",
        b"\x18",
        b"\xc2",
        b"\x9b",
        b"\x9c",
        b"\x9d",
        b"?",
        b";",
        b"$p",
        b"n",
        b"m",
        b"\x7f",
        b"\n",
    ];
    check("queries", tokens, |input| {
        let filter = |input: &[u8], mut piece: Box<dyn FnMut() -> usize>| {
            let (mut filter, mut out, mut rest) = (QueryFilter::new(), Vec::new(), input);
            while !rest.is_empty() {
                let (now, later) = rest.split_at(piece().min(rest.len()));
                filter.filter(now, &mut out);
                rest = later;
            }
            filter.finish(&mut out);
            out
        };
        let whole = filter(input, Box::new(|| usize::MAX));
        assert_eq!(filter(input, Box::new(|| 1)), whole, "byte by byte");
        let mut random = Random::new(input.len() as u64);
        let pieces = filter(input, Box::new(move || 1 + random.below(9)));
        assert_eq!(pieces, whole, "in pieces");
        assert_eq!(filter(&whole, Box::new(|| usize::MAX)), whole, "again");
    });
}
