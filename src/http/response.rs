//! What a handler answers: a status, header fields and the source of the body.
//!
//! A handler never frames. [`Body`] says what to send, and `connection` decides how. A response that
//! wants to send itself (the port proxy's) implements [`Takeover`].

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::late::LateStream;
use super::parse::{Framing, MAX_HEAD_BYTES, MAX_HEADERS, MAX_TARGET_BYTES, ParseError};
use super::request::{BodyReader, ReceiveError};
use super::stream::{FREE_BYTES, StreamWriter};
use crate::error::{Detail, Details, capped};
use crate::limits::ledger::{Charge, Item, Ledger, OverLimit};

pub struct Response {
    /// The status code; 101 turns the connection into something other than HTTP.
    pub status: u16,
    /// Header fields, without those of framing.
    pub headers: Vec<(&'static str, String)>,
    /// Where the body comes from.
    pub body: Body,
    /// Dropped after the last byte was sent.
    pub held: Option<Box<dyn Send>>,
    /// For a body of memory. What it lacks is charged before the body is sent.
    pub(super) charge: Option<Charge>,
}

/// The source of a body.
pub enum Body {
    Empty,
    /// Memory.
    Bytes(Vec<u8>),
    /// A file. If it turns out shorter than `length`, the connection is closed.
    File {
        /// Read from its current position.
        file: File,
        /// Bytes to send.
        length: u64,
        /// Bytes that were read already; sent first, part of `length`.
        start: Vec<u8>,
    },
    /// Everything up to an end that is not known beforehand.
    Reader(Box<dyn Read + Send>),
    /// A function that writes the body in pieces.
    Stream(Box<dyn FnOnce(&mut StreamWriter) + Send>),
    /// A function that finds the answer. It returns one that has not begun; `None` if it has begun a stream and
    /// written all of it, or if the client has disconnected. Header fields of this response go with either.
    Late(FindAnswer),
    /// A response that moves its own bytes, and those of the request, in both directions.
    Takeover(Box<dyn Takeover>),
}

/// Finds an answer, see [`Body::Late`].
pub type FindAnswer = Box<dyn FnOnce(&mut LateStream) -> Option<Response> + Send>;

/// A response that is sent while the rest of the request is received.
///
/// The connection asks for the head, adds the framing, and then calls [`Takeover::run`] with a stream
/// that begins with both. So the response never writes framing itself.
pub trait Takeover: Send {
    /// Appends the status line and the header fields, without those that frame the body.
    fn append_head(&self, out: &mut Vec<u8>);
    /// The framing of the body. `Chunked` stands for any body of unknown length.
    fn framing(&self) -> Framing;
    /// Sends the body. Also called for HEAD, because the request may have a body.
    ///
    /// # Errors
    /// The request or the response could not be passed on to its end.
    fn run(
        self: Box<Self>,
        client: &mut StreamWriter,
        request: &mut BodyReader<'_>,
    ) -> io::Result<()>;
}

impl Response {
    /// An answer without header fields.
    pub fn new(status: u16, body: Body) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body,
            held: None,
            charge: None,
        }
    }

    /// 200 with a JSON document and a line end.
    pub fn json(value: &impl Serialize) -> Self {
        Self::json_with_status(200, value)
    }

    fn json_with_status(status: u16, value: &impl Serialize) -> Self {
        // Fails only for maps whose keys are not strings; no document has any.
        let mut body = serde_json::to_vec(value).unwrap_or_default();
        body.push(b'\n');
        Self::new(status, Body::Bytes(body)).with_header("Content-Type", "application/json")
    }

    /// Adds a header field.
    #[must_use]
    pub fn with_header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Brings the charge that was taken before the body was made.
    #[must_use]
    pub fn charged(mut self, charge: impl Into<Option<Charge>>) -> Self {
        self.charge = charge.into();
        self
    }

    /// Charges a body of memory until it is sent: a client may take minutes to read it. A small body costs nothing, and
    /// neither does one that brings its charge.
    ///
    /// # Errors
    /// The tenant's share is smaller.
    pub fn charge_to(&mut self, ledger: &Arc<Ledger>) -> Result<(), OverLimit> {
        let Body::Bytes(bytes) = &mut self.body else {
            return Ok(());
        };
        let bytes = if bytes.capacity() > FREE_BYTES {
            bytes.shrink_to_fit();
            bytes.capacity()
        } else {
            0
        };
        match &mut self.charge {
            Some(charge) => charge.set(bytes),
            None if bytes == 0 => Ok(()),
            none @ None => {
                *none = Some(ledger.charge(Item::Responses, bytes)?);
                Ok(())
            }
        }
    }

    /// Keeps a value alive until the response was sent, besides those before.
    #[must_use]
    pub fn holding(mut self, held: impl Send + 'static) -> Self {
        self.held = Some(Box::new((self.held, held)));
        self
    }
}

/// A JSON document that is charged while it grows, once it is not small.
pub struct ChargedDocument {
    bytes: Vec<u8>,
    charge: Charge,
}

impl ChargedDocument {
    /// Bytes that are charged at a time, at least.
    const STEP_BYTES: usize = 32 * 1024;

    /// An empty one.
    ///
    /// # Errors
    /// The tenant's share is used up.
    pub fn new(ledger: &Arc<Ledger>) -> Result<Self, OverLimit> {
        let charge = ledger.charge(Item::Responses, 0)?;
        Ok(Self {
            bytes: Vec::new(),
            charge,
        })
    }

    /// Adds what `write` appends, at most this many bytes unless they are few.
    ///
    /// # Errors
    /// The tenant's share is smaller. The document is not whole then.
    pub fn push(&mut self, most: usize, write: impl FnOnce(&mut Vec<u8>)) -> Result<(), OverLimit> {
        let needed = self.bytes.len() + most;
        if needed > FREE_BYTES && needed > self.bytes.capacity() {
            let capacity = needed.max(self.bytes.len() * 3 / 2) + Self::STEP_BYTES;
            self.charge.set(capacity)?;
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        write(&mut self.bytes);
        let held = self.bytes.capacity();
        if held > FREE_BYTES && held > self.charge.bytes() {
            self.charge.set(held)?;
        }
        Ok(())
    }

    pub fn respond(self) -> Response {
        Response::new(200, Body::Bytes(self.bytes))
            .with_header("Content-Type", "application/json")
            .charged(self.charge)
    }
}

/// An error as clients see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub status: u16,
    /// A stable word for programs.
    pub code: &'static str,
    /// A sentence for people: what is wrong, and what to do about it.
    pub text: String,
    /// The header fields that the status requires (`Allow`, `Content-Range`).
    pub headers: Vec<(&'static str, String)>,
    /// More members of the document.
    pub details: Details,
}

impl Refusal {
    /// The answer to a client for a request whose handler has panicked.
    pub fn panicked() -> Self {
        let text = "the server failed to handle this request; its log says where";
        Self::new(500, "internal", text)
    }

    /// An error without header fields. Its text is [`capped`].
    pub fn new(status: u16, code: &'static str, text: impl Display) -> Self {
        Self {
            status,
            code,
            text: capped(&text),
            headers: Vec::new(),
            details: Details::new(),
        }
    }

    /// Adds members to the document.
    #[must_use]
    pub fn with_details(mut self, details: Details) -> Self {
        self.details.extend(details);
        self
    }

    /// Adds a header field that the status requires.
    #[must_use]
    pub fn with_header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

impl From<OverLimit> for Refusal {
    fn from(limit: OverLimit) -> Self {
        Self::new(503, "over_limit", limit)
    }
}

impl From<ReceiveError> for Refusal {
    fn from(error: ReceiveError) -> Self {
        match error {
            // The client has disconnected and does not read this.
            ReceiveError::Closed | ReceiveError::Reset => {
                Self::new(400, "disconnected", "the client closed the connection")
            }
            ReceiveError::TimedOut => Self::new(
                408,
                "timeout",
                "the request took too long to arrive: a head has 10 s, and 60 s may pass between bytes of a body",
            ),
            ReceiveError::TooLarge(limit) => Self::new(
                413,
                "too_large",
                format!("the body is larger than {limit} bytes; use files/write for large data"),
            ),
            ReceiveError::NoMemory => Self::new(
                503,
                "no_memory",
                "the machine has no memory left for this body (ENOMEM); try again later, or use files/write for large data",
            ),
            ReceiveError::OverLimit(limit) => limit.into(),
            ReceiveError::Parse(ParseError::Malformed(what)) => {
                Self::new(400, "bad_request", format!("this is not HTTP/1.1: {what}"))
            }
            ReceiveError::Parse(ParseError::HeadTooLarge) => Self::new(
                431,
                "head_too_large",
                format!(
                    "the request's head is larger than {MAX_HEAD_BYTES} bytes or has more than {MAX_HEADERS} fields"
                ),
            ),
            ReceiveError::Parse(ParseError::TargetTooLong) => Self::new(
                414,
                "uri_too_long",
                format!("the request target is longer than {MAX_TARGET_BYTES} bytes"),
            ),
            ReceiveError::Parse(ParseError::ExpectationUnknown) => Self::new(
                417,
                "expectation_failed",
                "the only expectation understood is 100-continue",
            ),
        }
    }
}

impl Serialize for Refusal {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut document = serializer.serialize_map(None)?;
        document.serialize_entry("error", &self.text)?;
        document.serialize_entry("code", self.code)?;
        for (name, detail) in &self.details {
            match detail {
                Detail::Number(number) => document.serialize_entry(name, number)?,
                Detail::Text(text) => document.serialize_entry(name, text)?,
                Detail::Numbers(numbers) => document.serialize_entry(name, numbers)?,
            }
        }
        document.end()
    }
}

impl From<Refusal> for Response {
    fn from(refusal: Refusal) -> Self {
        let mut response = Self::json_with_status(refusal.status, &refusal);
        response.headers.extend(refusal.headers);
        response
    }
}

/// Appends the status line of a response or an interim response.
pub fn append_status_line(out: &mut Vec<u8>, status: u16, reason: &[u8]) {
    out.extend_from_slice(b"HTTP/1.1 ");
    // Three digits.
    let digits =
        [status / 100, status / 10, status].map(|digit| b"0123456789"[usize::from(digit % 10)]);
    out.extend_from_slice(&digits);
    out.push(b' ');
    out.extend_from_slice(reason);
    out.extend_from_slice(b"\r\n");
}

/// The reason phrase of a status (RFC 9110 section 15).
pub(super) fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        202 => "Accepted",
        204 => "No Content",
        206 => "Partial Content",
        303 => "See Other",
        308 => "Permanent Redirect",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        406 => "Not Acceptable",
        408 => "Request Timeout",
        409 => "Conflict",
        411 => "Length Required",
        413 => "Content Too Large",
        414 => "URI Too Long",
        415 => "Unsupported Media Type",
        416 => "Range Not Satisfiable",
        417 => "Expectation Failed",
        426 => "Upgrade Required",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        507 => "Insufficient Storage",
        _ => "Unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ledger::Budget;

    fn of_bytes(bytes: usize) -> Response {
        Response::new(200, Body::Bytes(vec![b'x'; bytes]))
    }

    #[test]
    fn a_large_body_is_charged_once() {
        let ledger = Budget::new(1 << 20).whole();
        let is_free = || ledger.charge(Item::Responses, 400_000).is_ok();
        let mut response = of_bytes(300_000);
        response.charge_to(&ledger).unwrap();
        assert!(!is_free());
        response.charge_to(&ledger).unwrap();
        drop(response);
        // The charge that it brings becomes what it takes.
        let charge = ledger.charge(Item::Responses, 500_000).unwrap();
        let mut response = of_bytes(100_000).charged(charge);
        response.charge_to(&ledger).unwrap();
        assert!(is_free());
        drop(response);
        assert!(of_bytes(600_000).charge_to(&ledger).is_err());
        // A small one costs nothing, so it is never refused.
        let used_up = ledger.charge(Item::Responses, 500_000).unwrap();
        let nothing = ledger.charge(Item::Responses, 0).unwrap();
        of_bytes(FREE_BYTES).charge_to(&ledger).unwrap();
        let mut small = of_bytes(FREE_BYTES).charged(nothing);
        small.charge_to(&ledger).unwrap();
        drop(used_up);
    }

    #[test]
    fn a_document_is_charged_while_it_grows() {
        let ledger = Budget::new(1 << 20).whole();
        let mut document = ChargedDocument::new(&ledger).unwrap();
        let mut push = || document.push(1000, |out| out.extend_from_slice(&[b'x'; 1000]));
        let pushed = (0..10_000).take_while(|_| push().is_ok()).count();
        // As much as the item may hold, less the room to grow.
        assert!((250..525).contains(&pushed), "{pushed}");
        assert!(document.bytes.capacity() <= 1 << 19);
    }
}
