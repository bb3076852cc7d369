//! What a handler answers: a status, headers and where the body comes from.
//!
//! A handler never frames: [`Body`] says what there is to send, and the connection decides how.

use std::fs::File;
use std::io::Read;

use serde::Serialize;

use super::stream::StreamWriter;
use super::upstream::{Relay, Tunnel};

/// An answer.
pub struct Response {
    /// The status code.
    pub status: u16,
    /// Besides those of framing.
    pub headers: Vec<(&'static str, String)>,
    /// What is sent.
    pub body: Body,
    /// Kept until the last byte is sent.
    pub held: Option<Box<dyn Send>>,
}

/// Where the bytes of a response come from.
pub enum Body {
    /// Nowhere: there is none.
    Empty,
    /// Memory.
    Bytes(Vec<u8>),
    /// A file, of which exactly this many bytes are promised. If it turns out shorter, the
    /// connection is closed.
    File {
        /// Read from its current position.
        file: File,
        /// Bytes to send.
        length: u64,
        /// Bytes that were read already; they come first and are part of `length`.
        start: Vec<u8>,
    },
    /// Something that ends when it ends.
    Reader(Box<dyn Read + Send>),
    /// Something that is written as it happens.
    Stream(Box<dyn FnOnce(&mut StreamWriter) + Send>),
    /// An upstream server, whose head stands in place of the response's own.
    Relayed(Relay),
    /// An upstream server that has taken the connection over for another protocol.
    Tunnel(Tunnel),
}

impl Response {
    /// An answer without headers of its own.
    pub fn new(status: u16, body: Body) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body,
            held: None,
        }
    }

    /// 200 with a JSON document.
    pub fn json(value: &impl Serialize) -> Self {
        Self::json_with_status(200, value)
    }

    fn json_with_status(status: u16, value: &impl Serialize) -> Self {
        // Only maps with keys that are no strings cannot be written, and there are none.
        let body = serde_json::to_vec(value).unwrap_or_default();
        Self::new(status, Body::Bytes(body)).with_header("Content-Type", "application/json")
    }

    /// Adds a header.
    #[must_use]
    pub fn with_header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Keeps something alive until the response is sent.
    #[must_use]
    pub fn holding(mut self, held: impl Send + 'static) -> Self {
        self.held = Some(Box::new(held));
        self
    }
}

/// An error as clients see it: a status, a code for programs, a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The status code.
    pub status: u16,
    /// A stable word.
    pub code: &'static str,
    /// What is wrong and what to do about it.
    pub text: String,
    /// A header that goes with it.
    pub header: Option<(&'static str, String)>,
}

impl Refusal {
    /// An error without a header.
    pub fn new(status: u16, code: &'static str, text: impl Into<String>) -> Self {
        Self {
            status,
            code,
            text: text.into(),
            header: None,
        }
    }

    /// Adds the header that the status demands (`Allow`, `Content-Range`).
    #[must_use]
    pub fn with_header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.header = Some((name, value.into()));
        self
    }
}

#[derive(Serialize)]
struct ErrorDocument<'a> {
    error: &'a str,
    code: &'a str,
}

impl From<Refusal> for Response {
    fn from(refusal: Refusal) -> Self {
        let mut response = Self::json_with_status(
            refusal.status,
            &ErrorDocument {
                error: &refusal.text,
                code: refusal.code,
            },
        );
        response.headers.extend(refusal.header);
        response
    }
}

/// The reason phrase of a status (RFC 9110 section 15).
pub(super) fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        204 => "No Content",
        206 => "Partial Content",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        411 => "Length Required",
        413 => "Content Too Large",
        414 => "URI Too Long",
        416 => "Range Not Satisfiable",
        417 => "Expectation Failed",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        507 => "Insufficient Storage",
        _ => "Unknown",
    }
}
