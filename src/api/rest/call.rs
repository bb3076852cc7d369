//! An admitted request as handlers see it, and the forms of answers that several of them share.

use std::time::Duration;

use crate::api::context::Context;
use crate::codec::query::Query;
use crate::http::parse::Framing;
use crate::http::request::WholeBody;
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
}

impl Call<'_, '_> {
    pub(super) fn ping_interval(&self) -> Duration {
        self.context.machine.ping_interval
    }

    pub(super) fn json_body(&mut self) -> Result<WholeBody, Refusal> {
        let ledger = &self.request.ledger;
        Ok(self.request.body.read_all(MAX_JSON_BYTES, ledger)?)
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

/// A JSON document that is sent when something has happened. Until then white space, which JSON
/// allows before a document, keeps the connection alive. `wait` gives nothing if the client is gone.
pub(super) fn json_later(
    ping_interval: Duration,
    wait: impl FnOnce(&mut StreamClient<'_>) -> Option<Vec<u8>> + Send + 'static,
) -> Response {
    let body = Body::Stream(Box::new(move |stream: &mut StreamWriter| {
        if let Some(document) = wait(&mut StreamClient::new(stream, b" ", ping_interval)) {
            stream.push(|out| {
                out.extend_from_slice(&document);
                out.push(b'\n');
            });
        }
    }));
    Response::new(200, body).with_header("Content-Type", "application/json")
}
