//! The simple shape of an execution: lines with `text`, `image` or `error`, and nothing else.

use serde_json::value::RawValue;

use crate::client::{Client, Disconnected};
use crate::codec::fields::{JsonType, Members};
use crate::http::stream::StreamClient;
use crate::interpreter::ExecutionSubscriber;
use crate::interpreter::event::{Bundle, CodeError, End, EndReason, Event};

/// Writes what happens in an execution as such lines.
pub(super) struct SimpleWriter<'a> {
    client: StreamClient<'a>,
    /// An exception was told: the end says no more.
    has_error: bool,
}

impl<'a> SimpleWriter<'a> {
    /// What is sent while nothing happens.
    pub(super) const PING: &'static [u8] = b"{\"text\":\"\"}\n";

    pub(super) fn new(client: StreamClient<'a>) -> Self {
        Self {
            client,
            has_error: false,
        }
    }

    /// A line whose text may be large.
    fn line(&mut self, name: &str, value: &[u8]) -> Result<(), Disconnected> {
        let head = format!("{{\"{name}\":\"");
        self.client.push_text(&head, value, "\"}\n")
    }

    /// The image of a bundle, else its text.
    fn bundle(&mut self, bundle: &Bundle) -> Result<(), Disconnected> {
        let Ok(Members(values)) = serde_json::from_str::<Members<'_>>(&bundle.data) else {
            return Ok(());
        };
        // A JSON string, without its quotes.
        let string = |mime: &str| {
            let value: &RawValue = values.get(mime)?;
            let inner = value.get().strip_prefix('"')?.strip_suffix('"')?;
            (JsonType::of(value) == JsonType::String).then_some(inner)
        };
        let (before, value, after) = match (string("image/png"), string("text/plain")) {
            (Some(image), _) => ("{\"image\":\"", image, "\"}\n"),
            (None, Some(text)) => ("{\"text\":\"", text, "\\n\"}\n"),
            (None, None) => return Ok(()),
        };
        let value = value.as_bytes();
        self.client
            .push_value(before, value, after, true, Vec::extend_from_slice)
    }

    fn error(&mut self, error: &CodeError) -> Result<(), Disconnected> {
        self.has_error = true;
        let Some((last, lines)) = error.traceback.split_last() else {
            let client = &mut self.client;
            client.push_text("{\"error\":\"", error.name.as_bytes(), ": ")?;
            return client.push_text("", error.value.as_bytes(), "\"}\n");
        };
        self.client
            .push(|out| out.extend_from_slice(b"{\"error\":\""));
        for line in lines {
            self.client.push_text("", line.as_bytes(), "\\n")?;
        }
        self.client.push_text("", last.as_bytes(), "\"}\n")
    }

    fn end(&mut self, end: &End) -> Result<(), Disconnected> {
        let text = match end.reason {
            EndReason::Completed | EndReason::Error => return Ok(()),
            // What the code said of it does not tell why.
            EndReason::Timeout => "the execution was ended because its time was up",
            _ if self.has_error => return Ok(()),
            EndReason::Interrupted => "the execution was interrupted",
            EndReason::Disconnected => "the client disconnected",
            EndReason::Died => "the interpreter ended, and what the code had made is lost",
            EndReason::OutOfMemory => {
                "the interpreter was ended because the machine had no memory left"
            }
            EndReason::MemoryLimit => {
                "the interpreter was ended because the sandbox was above its limit on memory"
            }
            EndReason::Restarted => "the context was restarted",
            EndReason::Deleted => "the context was deleted",
            EndReason::Cancelled => "the execution was cancelled before it ran",
            EndReason::ContextDead => "the context died before the execution ran",
        };
        self.line("error", text.as_bytes())
    }
}

impl ExecutionSubscriber for SimpleWriter<'_> {
    fn client(&mut self) -> &mut dyn Client {
        &mut self.client
    }

    fn event(&mut self, _: u64, event: &Event, output: &[u8]) -> Result<(), Disconnected> {
        match event {
            Event::Output { .. } => self.line("text", output),
            Event::Bundle(bundle) => self.bundle(bundle),
            Event::Error(error) => self.error(error),
            Event::End(end) => self.end(end),
            Event::Queued { .. }
            | Event::Start(_)
            | Event::Clear { .. }
            | Event::Input { .. }
            | Event::Dropped { .. } => Ok(()),
        }
    }

    fn dropped(&mut self, _: u64, _: u64) -> Result<(), Disconnected> {
        Ok(())
    }
}
