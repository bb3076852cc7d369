//! Searches: queries and JSON to typed operations, what was found to documents and events.

use std::io::Write;
use std::time::Duration;

use super::call::{Answer, Call, event_stream};
use super::documents::glob_response;
use super::files::optional_path;
use crate::client::{Client, Disconnected, KeepAlive, Lookout, send_all};
use crate::codec::escape;
use crate::codec::fields::{Elements, Fields, JsonType, decoded, wrong_type};
use crate::codec::query::Query;
use crate::error::{Error, Result};
use crate::files::SkipReason;
use crate::files::name::FilePath;
use crate::files::search::{Case, Matcher, Options};
use crate::http::Refusal;
use crate::http::stream::{StreamClient, StreamWriter};
use crate::workspace::{Glob, Grep, GrepSink, Kinds, Match, Order, SortKey, Summary, Workspace};

/// The words for kinds of files.
const KINDS: [(&str, Kinds); 4] = [
    ("file", Kinds::Files),
    ("dir", Kinds::Directories),
    ("link", Kinds::Links),
    ("any", Kinds::Any),
];

/// `GET files/glob`.
pub(super) fn glob(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let query = &call.query;
    let path = optional_path(query.value("path")?)?;
    let glob = Glob {
        path: path.clone(),
        patterns: Matcher::new(query.values("pattern"))?,
        kinds: query.choice("type", &KINDS)?.unwrap_or_default(),
        all: query.flag("all")?,
        limit: query.number("limit")?,
        order: order(query)?,
    };
    let is_by_name = matches!(glob.order, Order::Name(_));
    let found = workspace.glob(&glob, &mut call.interrupt())?;
    Ok(glob_response(found, path, is_by_name))
}

/// The order of a search, with the place to continue at: the path of the last entry, after its time and
/// a colon where the order is that of times.
fn order(query: &Query) -> Result<Order> {
    let sort = [("name", true), ("mtime", false)];
    let is_by_name = query.choice("sort", &sort)?.unwrap_or(true);
    let after = query.value("after")?.filter(|after| !after.is_empty());
    let path = |text: &[u8]| Ok::<_, Error>(FilePath::new(text)?.bytes().to_vec());
    if is_by_name {
        return Ok(Order::Name(after.map(path).transpose()?));
    }
    let moment = |text: &[u8]| {
        let colon = text.iter().position(|byte| *byte == b':');
        let (time, shown) = colon.map(|colon| (&text[..colon], &text[colon + 1..]))?;
        let modified = std::str::from_utf8(time).ok()?.parse().ok()?;
        let path = path(shown).ok()?;
        Some(SortKey { modified, path })
    };
    let bad = || Error::invalid("after is not what next said in an answer with sort=mtime");
    let after = after.map(|text| moment(text).ok_or_else(bad)).transpose()?;
    Ok(Order::Modified(after))
}

/// The words for case.
const CASES: [(&str, Case); 3] = [
    ("sensitive", Case::Sensitive),
    ("insensitive", Case::Insensitive),
    ("smart", Case::Smart),
];

/// `POST files/grep`.
pub(super) fn grep(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let request = grep_request(&call.json_body()?)?;
    let prepared = workspace.prepare_grep(request)?;
    let ping_interval = call.ping_interval();
    let write = move |stream: &mut StreamWriter| {
        let events = GrepEvents::new(stream.take(), ping_interval);
        prepared.run(Box::new(events));
    };
    Ok(event_stream(Box::new(write)))
}

pub(super) fn grep_request(body: &[u8]) -> Result<Grep> {
    let mut fields = Fields::parse(body)?;
    let missing = || Error::invalid("the field pattern is missing");
    let pattern = fields.string("pattern")?.ok_or_else(missing)?;
    let path = fields.string("path")?;
    let globs = match fields.take("glob") {
        None => Vec::new(),
        Some(list) if JsonType::of(list) == JsonType::Array => {
            let list = decoded::<Elements<'_>>("glob", list)?.0;
            let text = |raw| match JsonType::of(raw) {
                JsonType::String => decoded::<String>("glob", raw),
                _ => Err(wrong_type("an element of glob", "a string", raw)),
            };
            list.into_iter().map(text).collect::<Result<_>>()?
        }
        Some(other) => return Err(wrong_type("glob", "an array of patterns", other)),
    };
    let mut flag = |name: &str| Ok::<_, Error>(fields.boolean(name)?.unwrap_or(false));
    let (is_literal, is_word, is_multiline, all) = (
        flag("literal")?,
        flag("word")?,
        flag("multiline")?,
        flag("all")?,
    );
    let case = fields.choice("case", &CASES)?.unwrap_or_default();
    let mut number = |name: &str| fields.whole(name, 0..=u64::MAX);
    Ok(Grep {
        path: optional_path(path.as_deref().map(str::as_bytes))?,
        pattern,
        options: Options {
            is_literal,
            case,
            is_word,
            is_multiline,
        },
        globs: Matcher::new(globs.iter().map(String::as_bytes))?,
        all,
        context: [number("before")?, number("after")?],
        limit: number("limit")?,
        per_file: number("per_file")?,
        max_file_bytes: number("max_file_bytes")?,
    })
}

/// Most characters of a line in an event.
const MAX_LINE_CHARACTERS: usize = 2000;

/// Characters before a match that are kept of a longer line.
const KEPT_BEFORE: usize = 500;

/// Bytes of events that are collected before they are sent.
const PIECE_BYTES: usize = 32 * 1024;

/// Writes what a search finds as events.
struct GrepEvents {
    stream: StreamWriter,
    ping_interval: Duration,
    collected: Vec<u8>,
    keep_alive: KeepAlive,
    lookout: Lookout,
}

/// The client, as long as nothing else of the events is needed.
fn client(stream: &mut StreamWriter, ping_interval: Duration) -> StreamClient<'_> {
    StreamClient::new(stream, b"{\"event\":\"ping\"}\n", ping_interval)
}

impl GrepEvents {
    fn new(stream: StreamWriter, ping_interval: Duration) -> Self {
        Self {
            stream,
            ping_interval,
            collected: Vec::new(),
            keep_alive: KeepAlive::new(),
            lookout: Lookout::new(),
        }
    }

    /// Sends what was collected.
    fn send(&mut self) -> std::result::Result<(), Disconnected> {
        if !self.collected.is_empty() {
            let collected = &self.collected;
            self.stream.push(|out| out.extend_from_slice(collected));
            self.collected.clear();
            self.keep_alive.reset();
        }
        send_all(&mut client(&mut self.stream, self.ping_interval))
    }

    /// Adds a line.
    fn line(
        &mut self,
        write: impl FnOnce(&mut Vec<u8>) -> std::io::Result<()>,
    ) -> std::result::Result<(), Disconnected> {
        // Writing to memory does not fail.
        let _ = write(&mut self.collected);
        self.collected.push(b'\n');
        if self.collected.len() >= PIECE_BYTES {
            self.send()?;
        }
        Ok(())
    }
}

impl GrepSink for GrepEvents {
    fn ended(&mut self, outcome: Result<Summary>) -> std::result::Result<(), Disconnected> {
        self.line(|out| match outcome {
            Ok(Summary {
                matches,
                files,
                searched,
                skipped,
                truncated,
            }) => write!(
                out,
                "{{\"event\":\"end\",\"matches\":{matches},\"files\":{files},\"searched\":{searched},\
                 \"skipped\":{skipped},\"truncated\":{truncated}}}"
            ),
            Err(error) => {
                let document = serde_json::to_vec(&Refusal::from(error)).unwrap_or_default();
                out.extend_from_slice(b"{\"event\":\"error\",");
                out.extend_from_slice(document.get(1..).unwrap_or_default());
                Ok(())
            }
        })?;
        self.send()
    }

    fn matched(&mut self, found: &Match<'_>) -> std::result::Result<(), Disconnected> {
        let shown = Shown::of(found);
        self.line(|out| {
            out.extend_from_slice(b"{\"event\":\"match\",\"path\":\"");
            escape::append(out, found.path.as_bytes());
            write!(
                out,
                "\",\"line\":{},\"offset\":{},\"text\":\"",
                found.line, shown.offset
            )?;
            escape::append(out, shown.text.as_bytes());
            out.extend_from_slice(b"\",\"spans\":");
            serde_json::to_writer(&mut *out, &shown.spans)?;
            let mut is_context_cut = false;
            for (name, lines) in ["before", "after"].iter().zip(&found.context) {
                write!(out, ",\"{name}\":[")?;
                for (number, line) in lines.iter().enumerate() {
                    out.extend_from_slice(if number == 0 { b"\"" } else { b",\"" });
                    is_context_cut |= !is_short(line);
                    let line = &line[..line.len().min(4 * MAX_LINE_CHARACTERS)];
                    let text: String = String::from_utf8_lossy(line)
                        .chars()
                        .take(MAX_LINE_CHARACTERS)
                        .collect();
                    escape::append(out, text.as_bytes());
                    out.push(b'"');
                }
                out.push(b']');
            }
            if shown.is_cut {
                out.extend_from_slice(b",\"cut\":true");
            }
            if is_context_cut {
                out.extend_from_slice(b",\"context_cut\":true");
            }
            out.push(b'}');
            Ok(())
        })?;
        self.tick()
    }

    fn skipped(&mut self, path: &str, why: SkipReason) -> std::result::Result<(), Disconnected> {
        self.line(|out| {
            out.extend_from_slice(b"{\"event\":\"skipped\",\"path\":\"");
            escape::append(out, path.as_bytes());
            write!(out, "\",\"reason\":\"{}\"}}", why.word())
        })
    }

    fn tick(&mut self) -> std::result::Result<(), Disconnected> {
        let mut client = client(&mut self.stream, self.ping_interval);
        if self.lookout.look(&mut client)? {
            self.send()?;
            let mut client = self::client(&mut self.stream, self.ping_interval);
            self.keep_alive.ping_if_due(&mut client);
            client.flush()?;
        }
        Ok(())
    }
}

/// Whether an event has all of a text.
fn is_short(text: &[u8]) -> bool {
    text.len() <= MAX_LINE_CHARACTERS
        || text.len() <= 4 * MAX_LINE_CHARACTERS
            && String::from_utf8_lossy(text).chars().count() <= MAX_LINE_CHARACTERS
}

/// The text of a match as an event has it.
struct Shown {
    text: String,
    /// Characters of the text.
    spans: Vec<[usize; 2]>,
    /// Where the text begins in the file, in bytes.
    offset: u64,
    is_cut: bool,
}

impl Shown {
    fn of(found: &Match<'_>) -> Self {
        let is_cut = !is_short(found.text);
        let mut start = 0;
        if is_cut {
            let first = found.spans.first().map_or(0, |span| span.start);
            start = first.saturating_sub(KEPT_BEFORE);
            // Not within a character.
            start += found.text[start..]
                .iter()
                .take(3)
                .take_while(|byte| **byte & 0xc0 == 0x80)
                .count();
        }
        let window = &found.text[start..];
        let window = &window[..window.len().min(4 * MAX_LINE_CHARACTERS)];
        let (mut spans, mut at, mut characters) = (Vec::new(), 0, 0);
        for span in found.spans {
            let mut place = |byte: usize| {
                let byte = byte.saturating_sub(start).min(window.len());
                characters += String::from_utf8_lossy(&window[at..byte]).chars().count();
                at = byte;
                characters.min(MAX_LINE_CHARACTERS)
            };
            let ends = [place(span.start), place(span.end)];
            if ends[0] < ends[1] {
                spans.push(ends);
            }
        }
        Self {
            text: String::from_utf8_lossy(window)
                .chars()
                .take(MAX_LINE_CHARACTERS)
                .collect(),
            spans,
            offset: found.offset + start as u64,
            is_cut,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn shown(text: &[u8], spans: &[std::ops::Range<usize>]) -> Shown {
        Shown::of(&Match {
            path: "x",
            line: 1,
            offset: 10,
            text,
            spans,
            context: [Vec::new(), Vec::new()],
        })
    }

    #[test]
    fn a_search_that_broke_off_says_why() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, _) = listener.accept().unwrap();
        let mut stream = StreamWriter::for_test(socket);
        let mut events = GrepEvents::new(stream.take(), Duration::from_secs(1));
        let error = Error::new(crate::error::Kind::OverLimit, "no memory");
        events.ended(Err(error)).unwrap();
        drop((events, stream));
        let mut text = String::new();
        std::io::Read::read_to_string(&mut far, &mut text).unwrap();
        let expected = r#"{"event":"error","error":"no memory","code":"over_limit"}"#;
        assert_eq!(text, format!("{expected}\n"));
    }

    #[test]
    fn spans_are_in_characters_and_long_lines_are_cut_around_the_match() {
        let short = shown("\u{e9}\u{20ac}x\u{1f600}y".as_bytes(), &[2..6, 10..11]);
        assert_eq!(
            (short.spans, short.offset, short.is_cut),
            (vec![[1, 3], [4, 5]], 10, false)
        );
        let broken = shown(b"\xffa\xff", &[1..2, 2..3]);
        assert_eq!(
            (broken.text.as_str(), broken.spans),
            ("\u{fffd}a\u{fffd}", vec![[1, 2], [2, 3]])
        );
        let long = "\u{e9}".repeat(5000) + "here" + &"\u{e9}".repeat(5000);
        let cut = shown(long.as_bytes(), &[10_000..10_004, 10_004..20_004]);
        assert!(cut.is_cut);
        let [from, to] = cut.spans[0];
        let text: String = cut.text.chars().skip(from).take(to - from).collect();
        assert_eq!(
            (text.as_str(), cut.text.chars().count()),
            ("here", MAX_LINE_CHARACTERS)
        );
        assert_eq!(cut.spans[1], [to, MAX_LINE_CHARACTERS]);
        assert!(
            long.as_bytes()[usize::try_from(cut.offset).unwrap() - 10..]
                .starts_with(cut.text.as_bytes())
        );
        assert!(!shown(&"\u{e9}".repeat(2000).into_bytes(), &[]).is_cut);
    }

    #[test]
    fn a_search_is_read_from_json() {
        let body = json!({"pattern": "x", "glob": ["*.rs", "!b"], "case": "smart", "before": 2, "limit": 5});
        let grep = grep_request(body.to_string().as_bytes()).unwrap();
        assert_eq!(
            (grep.pattern.as_str(), grep.context, grep.limit),
            ("x", [Some(2), None], Some(5))
        );
        assert_eq!(grep.options.case, Case::Smart);
        for (body, named) in [
            (json!({}), "pattern"),
            (json!({"pattern": 1}), "pattern"),
            (json!({"pattern": "x", "glob": "x"}), "glob"),
            (json!({"pattern": "x", "glob": [1]}), "glob"),
            (json!({"pattern": "x", "glob": ["["]}), "["),
            (json!({"pattern": "x", "case": "any"}), "case"),
            (json!({"pattern": "x", "word": 1}), "word"),
            (json!({"pattern": "x", "limit": -1}), "limit"),
            (json!({"pattern": "x", "path": ""}), "path"),
        ] {
            let Err(error) = grep_request(body.to_string().as_bytes()) else {
                panic!("{body}")
            };
            assert!(error.to_string().contains(named), "{error}");
        }
    }
}
