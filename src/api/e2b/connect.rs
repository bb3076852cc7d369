//! The codec of the Connect protocol with JSON, over HTTP/1.1 (connectrpc.com/docs/protocol).
//!
//! A message in a stream is in an envelope: a byte of flags, its length in four bytes, the greater ones first, and the
//! message. The last envelope of an answer has a flag of its own, and says whether the call has failed.

use serde_json::Value;

use super::errors::{Code, E2bError};
use crate::codec::fields::Fields;
use crate::codec::object::object;
use crate::codec::{base64, parsed_bytes};
use crate::http::request::{BodyReader, WholeBody};
use crate::http::stream::{StreamClient, StreamWriter};
use crate::http::{Body, Request, Response};
use crate::limits::ledger::{Charge, Item, Ledger};
use std::sync::Arc;

/// The flag of a compressed message.
const COMPRESSED: u8 = 1;

/// The flag of the last envelope of an answer.
const END: u8 = 2;

/// The flags and the length of a message.
const HEAD_BYTES: usize = 5;

/// Most bytes of a message.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Bytes that are received at a time.
const READ_BYTES: usize = 64 * 1024;

/// The peak of memory that a message takes, as a multiple of its length: the bytes, a text that grows while its escapes are
/// undone, and the copy that is kept.
const USES_OF_MESSAGE: usize = 4;

const UNARY: &str = "application/json";
const STREAM: &str = "application/connect+json";

/// Checks that a request has the form of a unary call.
pub(super) fn check_unary(request: &Request<'_>) -> Result<(), E2bError> {
    check(request, UNARY)
}

/// Checks that a request has the form of a streaming call.
pub(super) fn check_stream(request: &Request<'_>) -> Result<(), E2bError> {
    check(request, STREAM)
}

fn check(request: &Request<'_>, expected: &str) -> Result<(), E2bError> {
    let found = request.head.header("content-type").unwrap_or_default();
    let found = found.split(|byte| *byte == b';').next().unwrap_or_default();
    if !found.trim_ascii().eq_ignore_ascii_case(expected.as_bytes()) {
        let text = format!("this call takes Content-Type: {expected}");
        return Err(E2bError::invalid(text)
            .with_status(415)
            .with_header("Accept-Post", format!("{UNARY}, {STREAM}")));
    }
    for name in ["content-encoding", "connect-content-encoding"] {
        let encoding = request.head.header(name).unwrap_or(b"identity");
        if !encoding.eq_ignore_ascii_case(b"identity") {
            let text = format!("{name}: no compression is supported here; send identity");
            return Err(E2bError::unimplemented(text));
        }
    }
    Ok(())
}

/// The members of a message. An empty one has none.
pub(super) fn message(bytes: &[u8]) -> Result<Fields<'_>, E2bError> {
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    Ok(Fields::parse(bytes)?)
}

/// The only message of a request.
pub(super) fn only_message(body: &WholeBody) -> Result<&[u8], E2bError> {
    let broken = || E2bError::invalid("the body takes one message in an envelope");
    let (head, message) = body.split_at_checked(HEAD_BYTES).ok_or_else(broken)?;
    if length_of(head)? != message.len() {
        return Err(broken());
    }
    Ok(message)
}

/// The length in the head of an envelope.
fn length_of(head: &[u8]) -> Result<usize, E2bError> {
    let [flags, length @ ..] = head else {
        return Err(E2bError::invalid("an envelope is cut off"));
    };
    if *flags & COMPRESSED != 0 {
        let text = "a message is compressed; no compression is supported here";
        return Err(E2bError::unimplemented(text));
    }
    if *flags != 0 {
        let text = format!("an envelope has the flags {flags}; a request takes 0");
        return Err(E2bError::invalid(text));
    }
    let length = length
        .iter()
        .fold(0, |length, byte| length << 8 | usize::from(*byte));
    if length > MAX_MESSAGE_BYTES {
        let text = format!("a message has {length} bytes; it takes at most {MAX_MESSAGE_BYTES}");
        return Err(E2bError::new(Code::ResourceExhausted, text));
    }
    Ok(length)
}

/// The messages of a request, each as soon as it has arrived.
pub(super) struct Messages<'b, 'c> {
    body: &'b mut BodyReader<'c>,
    ledger: Arc<Ledger>,
    /// A message, and nothing of the next one.
    received: Vec<u8>,
    /// For the bytes of a long message, and what is parsed from them.
    charge: Option<Charge>,
}

impl<'b, 'c> Messages<'b, 'c> {
    pub(super) fn new(body: &'b mut BodyReader<'c>, ledger: &Arc<Ledger>) -> Self {
        Self {
            body,
            ledger: Arc::clone(ledger),
            received: Vec::new(),
            charge: None,
        }
    }

    /// The next message; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, E2bError> {
        self.received.clear();
        if self.charge.is_some() {
            // The memory goes before its charge.
            self.received = Vec::new();
            self.charge = None;
        }
        if !self.receive(HEAD_BYTES)? {
            return match self.received.len() {
                0 => Ok(None),
                _ => Err(E2bError::invalid("the body ends inside of an envelope")),
            };
        }
        let whole = HEAD_BYTES + length_of(&self.received[..HEAD_BYTES])?;
        if whole > READ_BYTES {
            self.charge(USES_OF_MESSAGE * whole)?;
        }
        if !self.receive(whole)? {
            return Err(E2bError::invalid("the body ends inside of an envelope"));
        }
        let parsed = whole + parsed_bytes(&self.received[HEAD_BYTES..whole]);
        if parsed > USES_OF_MESSAGE * whole.max(READ_BYTES) {
            self.charge(parsed)?;
        }
        Ok(Some(&self.received[HEAD_BYTES..whole]))
    }

    fn charge(&mut self, bytes: usize) -> Result<(), E2bError> {
        self.charge = None;
        let charge = self.ledger.charge(Item::Bodies, bytes);
        self.charge = Some(charge.map_err(crate::error::Error::from)?);
        Ok(())
    }

    /// Receives until there are this many bytes; false if the body ends before.
    fn receive(&mut self, wanted: usize) -> Result<bool, E2bError> {
        while self.received.len() < wanted {
            let length = self.received.len();
            // No further than this message: what is behind it may be a long time coming.
            let next = wanted.min(length + READ_BYTES);
            if next > self.received.capacity() {
                // What has arrived may be there twice, and the message has no room besides.
                let capacity = wanted.min(next.max(2 * length));
                self.received.reserve_exact(capacity - length);
            }
            self.received.resize(next, 0);
            let count = self.body.read(&mut self.received[length..]);
            self.received
                .truncate(length + *count.as_ref().unwrap_or(&0));
            if count? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The client, to be watched.
    pub(super) fn body(&self) -> &BodyReader<'c> {
        self.body
    }
}

/// The answer to a unary call.
pub(super) fn unary(document: &Value) -> Result<Response, E2bError> {
    let body = document.to_string().into_bytes();
    Ok(Response::new(200, Body::Bytes(body)).with_header("Content-Type", UNARY))
}

/// Appends an envelope with what `write` appends.
pub(super) fn append(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    append_with(out, 0, write);
}

fn append_with(out: &mut Vec<u8>, flags: u8, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[flags, 0, 0, 0, 0]);
    write(out);
    // Nothing that is sent comes near to what four bytes hold.
    let length = u32::try_from(out.len() - start - HEAD_BYTES).unwrap_or(u32::MAX);
    out[start + 1..start + HEAD_BYTES].copy_from_slice(&length.to_be_bytes());
}

/// Appends an envelope with a document.
pub(super) fn append_document(out: &mut Vec<u8>, document: &Value) {
    append(out, |out| {
        // Writing to memory does not fail.
        let _ = serde_json::to_writer(out, document);
    });
}

/// Appends the last envelope of an answer.
pub(super) fn append_end(out: &mut Vec<u8>, failure: Option<&E2bError>) {
    append_with(out, END, |out| {
        let end = match failure {
            None => object! {},
            Some(E2bError { code, text, .. }) => {
                object! { "error": object! { "code": code.name(), "message": text.as_str() } }
            }
        };
        // Writing to memory does not fail.
        let _ = serde_json::to_writer(out, &end);
    });
}

/// The answer to a streaming call that has one message.
pub(super) fn only_answer(document: &Value) -> Response {
    let mut body = Vec::new();
    append_document(&mut body, document);
    append_end(&mut body, None);
    framed(Body::Bytes(body))
}

/// The answer to a streaming call that has failed. Its status is 200: some clients read no other body.
pub(super) fn failed_stream(failure: &E2bError) -> Response {
    let mut body = Vec::new();
    append_end(&mut body, Some(failure));
    framed(Body::Bytes(body))
}

/// An answer that `write` sends, message by message.
pub(super) fn stream(write: impl FnOnce(&mut StreamWriter) + Send + 'static) -> Response {
    framed(Body::Stream(Box::new(write)))
}

fn framed(body: Body) -> Response {
    Response::new(200, body)
        .with_header("Content-Type", STREAM)
        .with_header("X-Accel-Buffering", "no")
}

/// Adds one message to a stream.
pub(super) fn push(client: &mut StreamClient<'_>, document: &Value) {
    client.push(|out| append_document(out, document));
}

pub(super) fn push_end(client: &mut StreamClient<'_>, failure: Option<&E2bError>) {
    client.push(|out| append_end(out, failure));
}

/// The bytes of a field: Base64 in either alphabet, with or without padding.
pub(super) fn bytes(
    fields: &mut Fields<'_>,
    name: &'static str,
) -> Result<Option<Vec<u8>>, E2bError> {
    let Some(text) = fields.string(name)? else {
        return Ok(None);
    };
    let mut digits = text.into_bytes();
    while digits.last() == Some(&b'=') {
        digits.pop();
    }
    for digit in &mut digits {
        match *digit {
            b'+' => *digit = b'-',
            b'/' => *digit = b'_',
            _ => {}
        }
    }
    let decoded = base64::decode_url(&digits);
    let accepted = || E2bError::invalid(format_args!("{name} takes Base64"));
    decoded.map(Some).ok_or_else(accepted)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::http::parse::{self, Progress};
    use crate::http::reader::SocketReader;
    use crate::limits::ledger::Budget;

    #[test]
    fn an_envelope_has_its_length_before_it() {
        let mut out = b"before".to_vec();
        append(&mut out, |out| out.extend_from_slice(b"{\"a\":1}"));
        append_end(&mut out, None);
        assert_eq!(out, b"before\0\0\0\0\x07{\"a\":1}\x02\0\0\0\x02{}");
        assert_eq!(length_of(&out[6..11]).unwrap(), 7);
    }

    #[test]
    fn envelopes_that_no_client_sends_are_refused() {
        for (head, code) in [
            (&[1, 0, 0, 0, 1][..], Code::Unimplemented),
            (&[2, 0, 0, 0, 1], Code::InvalidArgument),
            (&[0, 255, 255, 255, 255], Code::ResourceExhausted),
            (&[], Code::InvalidArgument),
        ] {
            assert_eq!(length_of(head).unwrap_err().code, code);
        }
    }

    #[test]
    fn what_is_held_of_messages_is_charged() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut sent = Vec::new();
        let lengths = [3 << 20, READ_BYTES + 1, 100, 0, 2 << 20];
        for length in lengths {
            append(&mut sent, |out| out.resize(out.len() + length, b' '));
        }
        let text = format!(
            "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n",
            sent.len()
        );
        let Ok(Progress::Complete(head, _)) = parse::head(text.as_bytes()) else {
            panic!("{text}");
        };
        let sender = std::thread::spawn(move || far.write_all(&sent).map(|()| far));
        let (socket, _) = listener.accept().unwrap();
        let mut reader = SocketReader::new(Arc::new(socket));
        let mut body = BodyReader::new(&mut reader, &head);
        // One item may have half of it.
        let ledger = Budget::new(32 << 20).whole();
        let mut messages = Messages::new(&mut body, &ledger);
        for length in lengths {
            let message = messages.next().ok().flatten();
            assert_eq!(message.map(<[u8]>::len), Some(length));
            let charged = messages.charge.as_ref().map_or(0, Charge::bytes);
            let room = messages.received.capacity();
            assert!(
                room <= charged.max(READ_BYTES),
                "{length}: {room} {charged}"
            );
        }
        assert!(messages.next().ok().flatten().is_none());
        assert!(messages.received.capacity() <= READ_BYTES);
        let free = ledger.charge(Item::Bodies, 16 << 20);
        assert!(free.is_ok());
        sender.join().unwrap().unwrap();
    }

    #[test]
    fn bytes_come_in_any_alphabet() {
        for (text, expected) in [
            ("aGk=", Some(&b"hi"[..])),
            ("aGk", Some(b"hi")),
            ("++//", Some(b"\xfb\xef\xff")),
            ("--__", Some(b"\xfb\xef\xff")),
            ("", Some(b"")),
            ("a", None),
            ("a b=", None),
        ] {
            let body = format!(r#"{{"x":"{text}"}}"#);
            let found = bytes(&mut message(body.as_bytes()).unwrap(), "x").ok();
            assert_eq!(found.flatten().as_deref(), expected, "{text}");
        }
    }
}
