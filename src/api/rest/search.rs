//! Searches: queries and JSON to typed operations, what was found to documents and events.

use std::io::Write;
use std::time::Duration;

use super::call::{Answer, Call, event_stream};
use crate::api::json::optional_path;
use crate::api::json::search::{KINDS, SORTS, append_match, glob_response, grep_request, order};
use crate::client::{Client, Disconnected, KeepAlive, Lookout, send_all};
use crate::codec::escape;
use crate::error::Result;
use crate::files::SkipReason;
use crate::files::search::Matcher;
use crate::http::Refusal;
use crate::http::stream::{StreamClient, StreamWriter};
use crate::workspace::{Glob, GrepSink, Match, SortOrder, Summary, Workspace};

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
        order: order(query.choice("sort", &SORTS)?, query.value("after")?)?,
    };
    let is_by_name = matches!(glob.order, SortOrder::Name(_));
    let found = workspace.glob(&glob, &mut call.interrupt())?;
    Ok(glob_response(found, path, is_by_name))
}

/// `POST files/grep`.
pub(super) fn grep(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let request = call.parse(grep_request)?;
    let prepared = workspace.prepare_grep(request, &mut call.interrupt())?;
    let ping_interval = call.ping_interval();
    let write = move |stream: &mut StreamWriter| {
        let events = GrepEvents::new(stream.take(), ping_interval);
        prepared.run(Box::new(events));
    };
    Ok(event_stream(Box::new(write)))
}

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
        self.line(|out| {
            out.extend_from_slice(b"{\"event\":\"match\",");
            append_match(out, found)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

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
}
