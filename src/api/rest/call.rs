//! An admitted request as handlers see it, and the forms of answers that several of them share.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::api::context::Context;
use crate::client::{Client, Interrupt, KeepAlive, Lookout, Stopped, send_all};
use crate::codec::fields::Fields;
use crate::codec::query::Query;
use crate::error::Error;
use crate::http::parse::Framing;
use crate::http::request::{ReceiveError, WaitingClient, WholeBody};
use crate::http::stream::{StreamClient, StreamWriter};
use crate::http::{Body, Refusal, Request, Response};

/// Most bytes of a JSON body.
const MAX_JSON_BYTES: u64 = 16 << 20;

/// The result of a handler.
pub(in crate::api) type Answer = Result<Response, Refusal>;

/// An admitted request, as its handler sees it.
pub(super) struct Call<'a, 'c> {
    pub(super) context: &'a Context,
    pub(super) request: &'a mut Request<'c>,
    pub(super) query: Query,
    /// The names of fields of the body, or parameters, that mean nothing here. The answer tells them.
    pub(super) ignored: Vec<String>,
}

impl Call<'_, '_> {
    pub(super) fn ping_interval(&self) -> Duration {
        self.context.machine.ping_interval
    }

    pub(super) fn json_body(&mut self) -> Result<WholeBody, Refusal> {
        let ledger = &self.request.ledger;
        Ok(self.request.body.read_json(MAX_JSON_BYTES, ledger)?)
    }

    /// Reads the body, a JSON object.
    pub(super) fn parse<T>(
        &mut self,
        read: impl FnOnce(&mut Fields<'_>) -> Result<T, Error>,
    ) -> Result<T, Refusal> {
        let body = self.json_body()?;
        self.parse_fields(Fields::parse(&body)?, read)
    }

    /// Reads the body, a JSON object that may be left out.
    pub(super) fn parse_optional<T>(
        &mut self,
        read: impl FnOnce(&mut Fields<'_>) -> Result<T, Error>,
    ) -> Result<T, Refusal> {
        let body = self.json_body()?;
        self.parse_fields(Fields::parse_optional(&body)?, read)
    }

    fn parse_fields<T>(
        &mut self,
        mut fields: Fields<'_>,
        read: impl FnOnce(&mut Fields<'_>) -> Result<T, Error>,
    ) -> Result<T, Refusal> {
        let parsed = read(&mut fields);
        // Also where something is missing: it may be there under another name.
        self.ignored.append(&mut fields.unknown(parsed.is_ok())?);
        Ok(parsed?)
    }

    /// Whether the request has the host's token, or needs none.
    pub(super) fn is_operator(&self) -> bool {
        self.context.is_operator(self.request)
    }

    /// Adds to a document what of the request was ignored.
    pub(super) fn tell_ignored(&self, mut response: Response) -> Response {
        if let Body::Bytes(document) = &mut response.body
            && !self.ignored.is_empty()
            && document.starts_with(b"{\"")
            && let Some(end) = document.iter().rposition(|byte| *byte == b'}')
        {
            document.splice(end..end, self.ignored_member().into_bytes());
        }
        response
    }

    /// The member of an answer that tells what of the request was ignored; empty if there is nothing to tell.
    pub(super) fn ignored_member(&self) -> String {
        if self.ignored.is_empty() {
            return String::new();
        }
        format!(",\"ignored\":{}", json!(self.ignored))
    }

    /// Stops long work that the answer waits for when the client disconnects.
    pub(super) fn interrupt(&self) -> BeforeAnswer {
        BeforeAnswer {
            client: self.request.body.watch_client(),
            lookout: Lookout::new(),
            until: None,
        }
    }

    /// The same, or when the answer has to begin.
    pub(super) fn interrupt_at(&self, until: Instant) -> BeforeAnswer {
        let mut interrupt = self.interrupt();
        interrupt.until = Some(until);
        interrupt
    }

    /// Refuses a request without a body where one is needed: a forgotten body is no empty one.
    pub(super) fn require_body(&self) -> Result<(), Refusal> {
        if self.request.head.framing == Framing::None {
            return Err(Refusal::new(
                411,
                "length_required",
                "the body is missing; send Content-Length, or a chunked body",
            ));
        }
        Ok(())
    }
}

/// A stream of events, one JSON object in each line. Proxies must neither collect nor keep it.
pub(super) fn event_stream(write: Box<dyn FnOnce(&mut StreamWriter) + Send>) -> Response {
    Response::new(200, Body::Stream(write))
        .with_header("Content-Type", "application/x-ndjson")
        .with_header("X-Accel-Buffering", "no")
}

/// A JSON document that is sent when something has happened. Until then white space, which JSON
/// allows before a document, keeps the connection alive. `wait` gives nothing if the client has disconnected; of what
/// it gives, only the body is sent.
pub(super) fn json_later(
    ping_interval: Duration,
    wait: impl FnOnce(&mut StreamClient<'_>) -> Option<Response> + Send + 'static,
) -> Response {
    let body = Body::Stream(Box::new(move |stream: &mut StreamWriter| {
        let mut client = StreamClient::new(stream, b" ", ping_interval);
        let document = wait(&mut client);
        if let Some(Body::Bytes(bytes)) = document.as_ref().map(|document| &document.body) {
            for part in bytes.chunks(PART_BYTES) {
                client.push(|out| out.extend_from_slice(part));
                if bytes.len() > PART_BYTES && send_all(&mut client).is_err() {
                    return;
                }
            }
        }
    }));
    Response::new(200, body).with_header("Content-Type", "application/json")
}

/// Bytes of a document that are sent at a time: it is charged, and a copy of it would not be.
const PART_BYTES: usize = 32 * 1024;

/// How long work may go on before its answer begins, so that a failure has its status.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// The JSON document of work that may take long. If it does, the answer begins with 200 and white space, and a
/// failure after that is a document too: `{"error", "code"}`.
pub(super) fn long_work(
    call: &Call<'_, '_>,
    mut work: impl FnMut(&mut dyn Interrupt) -> Result<Response, Stopped> + Send + 'static,
) -> Answer {
    let mut interrupt = call.interrupt_at(Instant::now() + ANSWER_WITHIN);
    match work(&mut interrupt) {
        Ok(response) => Ok(response),
        Err(stopped @ (Stopped::Failed(_) | Stopped::Disconnected)) => Err(stopped.into()),
        Err(Stopped::Due) => Ok(json_later(call.ping_interval(), move |client| {
            let mut interrupt = DuringAnswer {
                client,
                keep_alive: KeepAlive::new(),
                lookout: Lookout::new(),
            };
            match work(&mut interrupt) {
                Ok(response) => Some(response),
                Err(Stopped::Failed(error)) => Some(Refusal::from(error).into()),
                Err(Stopped::Disconnected | Stopped::Due) => None,
            }
        })),
    }
}

/// Asks whether to go on while no byte of the answer is sent.
pub(super) struct BeforeAnswer {
    client: WaitingClient,
    lookout: Lookout,
    /// When the answer has to begin.
    until: Option<Instant>,
}

impl From<Stopped> for Refusal {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Failed(error) => error.into(),
            Stopped::Disconnected | Stopped::Due => ReceiveError::Closed.into(),
        }
    }
}

impl Interrupt for BeforeAnswer {
    fn check(&mut self) -> Result<(), Stopped> {
        let looked = self.lookout.look(&mut self.client)?;
        match self.until {
            Some(until) if looked && Instant::now() >= until => Err(Stopped::Due),
            _ => Ok(()),
        }
    }
}

/// Keeps the connection alive while the document is not ready.
struct DuringAnswer<'a, 'w> {
    client: &'a mut StreamClient<'w>,
    keep_alive: KeepAlive,
    lookout: Lookout,
}

impl Interrupt for DuringAnswer<'_, '_> {
    fn check(&mut self) -> Result<(), Stopped> {
        if self.lookout.look(self.client)? {
            self.keep_alive.ping_if_due(self.client);
            self.client.flush()?;
        }
        Ok(())
    }
}
