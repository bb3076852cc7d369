//! The connection to an upstream server: one request is written to it, and the head of one response
//! is read from it.
//!
//! It also holds what `mod` and `tunnel` share: which header fields pass, the size of a read, and the one
//! place that polls both sockets.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{Shutdown, shutdown};

use super::redirect::{Home, Redirect};
use super::set_cookie::Cookies;
use crate::client::Disconnected;
use crate::http::KeptSlot;
use crate::http::parse::{
    Fields, Framing, Head, MAX_HEAD_BYTES, MAX_HEADERS, ParseError, ResponseHead,
};
use crate::http::reader::{ReceiveError, SocketReader};
use crate::http::request::BodyReader;
use crate::http::stream::StreamWriter;
use crate::limits::ledger::{Charge, Item, Ledger};
use crate::sys::{Events, PollEntry, poll};
use crate::threads::priority::PacedRequest;

/// The smallest size of a read, which is what a quiet connection costs.
pub(super) const MIN_READ_BYTES: usize = 4 * 1024;

/// The largest size of a read.
const MAX_READ_BYTES: usize = 256 * 1024;

/// What a read takes as a multiple of its size: a buffer that doubles.
const USES_OF_READ: usize = 2;

/// After this long without an event, [`poll_both`] has the buffers trimmed.
const TRIM_AFTER: Duration = Duration::from_secs(1);

/// The field that has a location in place of `Location` where no client should follow it.
const NOT_FOLLOWED: &str = "X-Sbx-Location";

/// Fields of one connection (RFC 9110 section 7.6.1), and those that frame a body. `Trailer` is among
/// them because trailers are not forwarded.
const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "content-length",
    "expect",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// How to forward a request.
pub struct Forward<'a> {
    /// The path, which begins with a slash, and the query.
    pub target: Vec<u8>,
    /// The value of `Host`.
    pub host: &'a str,
    /// Names of fields that are not forwarded, nor is any that [a server may take for one](is_same_field).
    pub withheld: &'a [&'a str],
    /// Fields to add. A value is one line.
    pub added: Vec<(&'a str, Vec<u8>)>,
    /// Counts the bytes of bodies, both ways.
    pub counter: Option<Arc<AtomicU64>>,
    /// What is changed in the fields of the response.
    pub changes: FieldChanges,
    /// Where the connection to the server stays, if its answer allows that, and the key for it. Without it the server is
    /// told to close it. Only for a request that announces no body and asks for no other protocol: a server that does not
    /// read the body takes it for the next request, which may be another client's.
    pub keep: Option<Keep>,
}

/// Where a connection stays, and the key for it.
pub type Keep = (Arc<KeptSlot>, Vec<u8>);

/// What is changed in the fields of a response. The default is nothing.
#[derive(Debug, Clone, Default)]
pub struct FieldChanges {
    /// Lists of the names of fields that are not passed on, in lower case. `*` at the end stands for any rest.
    pub dropped: Vec<&'static [&'static str]>,
    /// Where the client has found the server, to which its redirects lead.
    pub home: Option<Home>,
    /// For which addresses its cookies are.
    pub cookies: Cookies,
    /// Whether no shared cache may keep the response: the request had a token, which a cache may not know as one, or its
    /// address is a secret.
    pub is_private: bool,
    /// Whether caches have to tell the names of this server apart.
    pub varies_by_host: bool,
}

impl FieldChanges {
    /// Appends the fields of a response that are for its client.
    pub(super) fn append(&self, out: &mut Vec<u8>, fields: &Fields) {
        // In one line: nginx before 1.23 reads only the last.
        let mut varies = Vec::new();
        let mut has_location = false;
        for (name, value) in end_to_end(fields) {
            let is = |other: &&str| other.eq_ignore_ascii_case(name);
            let mut dropped = self.dropped.iter().copied().flatten();
            if dropped.any(|other| is_meant(other, name)) {
                continue;
            }
            if self.varies_by_host && is(&"vary") {
                varies.push(value);
                continue;
            }
            let (mut name, mut changed) = (name, None);
            if is(&"set-cookie") {
                changed = self.cookies.change(value);
            } else if is(&"location")
                && let Some(home) = &self.home
            {
                // An answer has one (RFC 9110 section 10.2.2), and each would get a prefix.
                if std::mem::replace(&mut has_location, true) {
                    continue;
                }
                match home.redirect(value) {
                    Redirect::AsSent => {}
                    Redirect::To(place) => changed = Some(place),
                    Redirect::Elsewhere if home.may_leave => {}
                    Redirect::Elsewhere => name = NOT_FOLLOWED,
                }
            }
            let value = changed.as_deref().unwrap_or(value);
            append_fields(out, [(name, value)].into_iter());
        }
        if self.varies_by_host {
            varies.push(b"Host");
            append_fields(out, [("Vary", &varies.join(&b", "[..])[..])].into_iter());
        }
        if self.is_private {
            // Besides what the server says: of several directives the strictest counts.
            append_fields(out, [("Cache-Control", &b"private"[..])].into_iter());
        }
    }
}

/// Whether a name is the one of a list, or begins as one that ends with `*`.
fn is_meant(listed: &str, name: &str) -> bool {
    let begin = listed.strip_suffix('*');
    let name = begin.map_or(Some(name), |begin| name.get(..begin.len()));
    name.is_some_and(|name| name.eq_ignore_ascii_case(begin.unwrap_or(listed)))
}

/// Where the bytes that are moved are noted.
#[derive(Clone)]
pub struct Account {
    /// What the buffers are charged to.
    pub ledger: Arc<Ledger>,
    /// Counts the bytes.
    pub counter: Option<Arc<AtomicU64>>,
}

/// Why a request has no response.
#[derive(Debug, PartialEq, Eq)]
pub enum RelayError {
    /// The request cannot be received, the client takes nothing, or its tenant has no room for the head of the response.
    Client(ReceiveError),
    /// The upstream server does not answer in HTTP; the text says what it did.
    Upstream(String),
    /// The same, and nothing of an answer has come: no byte, or first bytes that are no head.
    NoAnswer(String),
}

impl From<Disconnected> for RelayError {
    fn from(_: Disconnected) -> Self {
        Self::Client(ReceiveError::Closed)
    }
}

impl From<RelayError> for io::Error {
    fn from(error: RelayError) -> Self {
        match error {
            RelayError::Client(ReceiveError::TimedOut) => io::ErrorKind::TimedOut.into(),
            RelayError::Client(error) => Self::other(format!("client: {error:?}")),
            RelayError::Upstream(text) | RelayError::NoAnswer(text) => Self::other(text),
        }
    }
}

/// The connection to an upstream server.
pub(super) struct Upstream {
    pub(super) reader: SocketReader<Arc<OwnedFd>>,
    pub(super) writer: StreamWriter<Arc<OwnedFd>>,
    /// Whether the whole request was handed over, or the server takes no more of it.
    is_fed: bool,
    /// Why sending failed. The kernel reports a reset once: reading afterwards finds an orderly end.
    failure: Option<Errno>,
    /// Whether a head has come.
    has_answered: bool,
    size: ReadSize,
}

impl Upstream {
    pub(super) fn new(
        socket: Arc<OwnedFd>,
        head: &Head,
        body: &BodyReader<'_>,
        forward: &Forward<'_>,
        account: &Account,
    ) -> Self {
        let head_bytes = request_head(head, body.awaits_go_ahead(), forward);
        let chunked = head.framing == Framing::Chunked;
        let mut reader = SocketReader::new(Arc::clone(&socket));
        reader.charge_to(&account.ledger);
        Self {
            reader,
            writer: StreamWriter::new(socket, head_bytes, chunked),
            is_fed: body.is_over(),
            failure: None,
            has_answered: false,
            size: ReadSize::new(account),
        }
    }

    /// Whether more of the request can be handed over.
    pub(super) fn takes_more(&self) -> bool {
        !self.is_fed && self.writer.pending() < MIN_READ_BYTES
    }

    /// Hands over what has arrived of the request's body.
    pub(super) fn feed(&mut self, body: &mut BodyReader<'_>) -> Result<(), ReceiveError> {
        let (writer, size) = (&mut self.writer, &mut self.size);
        size.append(writer, |out, most| body.append_available(out, most))?;
        if body.is_over() {
            writer.finish();
            self.is_fed = true;
        }
        Ok(())
    }

    /// Sends what the server takes. A server may answer and close before it has read everything, so it
    /// is not an error if it takes no more.
    pub(super) fn flush(&mut self) {
        if let Err(errno) = self.writer.try_flush() {
            self.failure = Some(errno);
            self.writer.discard();
            self.is_fed = true;
        }
    }

    /// The head of the next response, interim ones included; `None` until it has arrived.
    pub(super) fn try_read_head(&mut self) -> Result<Option<ResponseHead>, RelayError> {
        let result = self.reader.try_read_response_head();
        self.has_answered |= matches!(result, Ok(Some(_)));
        result.map_err(|error| {
            if let ReceiveError::OverLimit(_) = error {
                return RelayError::Client(error);
            }
            let is_silent = self.reader.unused().is_empty();
            let begun = if is_silent {
                "before it answered"
            } else {
                "in the middle of a response's head"
            };
            let is_head = !matches!(error, ReceiveError::Parse(ParseError::Malformed(_)));
            let error_of = if self.has_answered || (is_head && !is_silent) {
                RelayError::Upstream
            } else {
                RelayError::NoAnswer
            };
            error_of(match error {
                ReceiveError::Parse(ParseError::Malformed(what)) => {
                    format!("its answer is not HTTP/1.1: {what}")
                }
                ReceiveError::Parse(_) => format!(
                    "its response's head is larger than {MAX_HEAD_BYTES} bytes or has more than {MAX_HEADERS} fields"
                ),
                ReceiveError::Reset => format!("it reset the connection {begun}"),
                _ => format!("it closed the connection {begun}"),
            })
        })
    }

    /// Whether sending failed with a reset.
    pub(super) fn was_reset(&self) -> bool {
        self.failure == Some(Errno::ECONNRESET)
    }

    /// The connection, if another request can follow this one: all of it was sent, and nothing has come behind the
    /// answer.
    pub(super) fn into_idle(self) -> Option<Arc<OwnedFd>> {
        let is_done = self.is_sent() && self.failure.is_none();
        let is_idle = is_done && self.reader.unused().is_empty();
        is_idle.then(|| Arc::clone(self.reader.socket()))
    }

    /// Tells the server that no other request follows this one, if all of it was sent.
    pub(super) fn end_requests(&self) {
        if self.is_sent() {
            let _ = shutdown(self.reader.socket().as_raw_fd(), Shutdown::Write);
        }
    }

    fn is_sent(&self) -> bool {
        self.is_fed && self.writer.is_flushed()
    }
}

/// The head of the request as the upstream server gets it.
fn request_head(head: &Head, expects: bool, forward: &Forward<'_>) -> Vec<u8> {
    let mut out = [head.method.as_bytes(), &forward.target].join(&b' ');
    out.extend_from_slice(b" HTTP/1.1\r\n");
    append_fields(&mut out, [("Host", forward.host.as_bytes())].into_iter());
    let passed_on = end_to_end(&head.fields).filter(|(name, _)| {
        let mut others = ["host"].iter().chain(forward.withheld);
        !others.any(|other| is_same_field(name, other))
    });
    append_fields(&mut out, passed_on);
    let added = forward.added.iter();
    append_fields(&mut out, added.map(|(name, value)| (*name, &value[..])));
    match head.framing {
        Framing::None => {}
        Framing::Length(length) => {
            out.extend_from_slice(format!("Content-Length: {length}\r\n").as_bytes());
        }
        Framing::Chunked => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
    }
    if expects {
        out.extend_from_slice(b"Expect: 100-continue\r\n");
    }
    if wants_upgrade(head) {
        append_upgrade(&mut out, &head.fields);
        out.extend_from_slice(b"\r\n");
    } else if forward.keep.is_some() {
        out.extend_from_slice(b"\r\n");
    } else {
        out.extend_from_slice(b"Connection: close\r\n\r\n");
    }
    out
}

/// Whether the client asks for another protocol on this connection. A request with a body is forwarded
/// as a plain one, which RFC 9110 section 7.8 allows.
pub fn wants_upgrade(head: &Head) -> bool {
    head.minor_version == 1
        && matches!(head.framing, Framing::None | Framing::Length(0))
        && head.fields.values("upgrade").next().is_some()
        && head
            .fields
            .connection_options()
            .any(|option| option == "upgrade")
}

/// The fields that are not about the connection on which they came.
pub(super) fn end_to_end(fields: &Fields) -> impl Iterator<Item = (&str, &[u8])> {
    // A set, because a head has room for thousands of options and hundreds of fields.
    let named = fields.connection_options();
    let named: HashSet<Vec<u8>> = named
        .map(|option| spelled_alike(&option).collect())
        .collect();
    fields.iter().filter(move |(name, _)| {
        !HOP_BY_HOP.iter().any(|other| is_same_field(name, other))
            && (named.is_empty() || !named.contains(&spelled_alike(name).collect::<Vec<_>>()))
    })
}

/// Whether a server may take a field for another one. CGI makes upper case and underscores of their names (RFC 3875
/// section 4.1.18), and so do interfaces after it, such as WSGI; some servers make underscores of all punctuation.
pub fn is_same_field(name: &str, other: &str) -> bool {
    name.len() == other.len() && spelled_alike(name).eq(spelled_alike(other))
}

/// What is the same for names that [a server may take for one another](is_same_field).
fn spelled_alike(name: &str) -> impl Iterator<Item = u8> {
    name.bytes().map(|byte| match byte.to_ascii_lowercase() {
        byte if byte.is_ascii_alphanumeric() => byte,
        _ => b'_',
    })
}

pub(super) fn append_fields<'f>(
    out: &mut Vec<u8>,
    fields: impl Iterator<Item = (&'f str, &'f [u8])>,
) {
    for (name, value) in fields {
        for part in [name.as_bytes(), b": ", value, b"\r\n"] {
            out.extend_from_slice(part);
        }
    }
}

/// Appends the protocols of `Upgrade`. The field is about one connection, so it is written for each.
pub(super) fn append_upgrade(out: &mut Vec<u8>, fields: &Fields) {
    let protocols = fields.values("upgrade");
    append_fields(out, protocols.map(|value| ("Upgrade", value)));
    out.extend_from_slice(b"Connection: Upgrade\r\n");
}

/// Polls two sockets, each unless it is `None`, and returns their events: none of either after `limit`.
///
/// Calls `trim` after a second without an event. A connection that has moved much holds up to 528 KiB
/// of buffers; a thousand quiet tunnels would hold half a gigabyte.
pub(super) fn poll_both(
    sockets: [Option<BorrowedFd<'_>>; 2],
    events: [Events; 2],
    limit: Option<Duration>,
    trim: impl FnOnce(),
) -> [Events; 2] {
    PacedRequest::step();
    let mut entries = [
        PollEntry::new(sockets[0], events[0]),
        PollEntry::new(sockets[1], events[1]),
    ];
    let first = limit.map_or(TRIM_AFTER, |limit| limit.min(TRIM_AFTER));
    let rest = limit.map(|limit| limit.saturating_sub(first));
    if !poll(&mut entries, Some(first)) && rest != Some(Duration::ZERO) {
        trim();
        poll(&mut entries, rest);
    }
    entries.map(|entry| entry.events())
}

/// The size of a read. It follows the amount of data that arrives, as far as the tenant's share allows.
pub(super) struct ReadSize {
    bytes: usize,
    account: Account,
    /// For the buffers of the largest size so far.
    charge: Option<Charge>,
}

impl ReadSize {
    pub(super) fn new(account: &Account) -> Self {
        Self {
            bytes: MIN_READ_BYTES,
            account: account.clone(),
            charge: None,
        }
    }

    /// Adds to `to` what `read` appends; its second argument is the most that it may append.
    pub(super) fn append<S: AsFd>(
        &mut self,
        to: &mut StreamWriter<S>,
        read: impl FnOnce(&mut Vec<u8>, usize) -> Result<(), ReceiveError>,
    ) -> Result<(), ReceiveError> {
        let most = self.bytes;
        let mut result = Ok(());
        to.push(|out| {
            let before = out.len();
            result = read(out, most);
            let count = out.len() - before;
            if let Some(counter) = &self.account.counter {
                counter.fetch_add(count as u64, Ordering::Relaxed);
            }
            if count >= most {
                self.grow(most * 4);
            } else if count < most / 8 {
                self.bytes = (most / 4).max(MIN_READ_BYTES);
            }
        });
        result
    }

    fn grow(&mut self, wanted: usize) {
        let wanted = wanted.min(MAX_READ_BYTES);
        let charged = self.charge.as_ref().map_or(0, Charge::bytes);
        if wanted * USES_OF_READ > charged {
            self.charge = None;
            let charge = self
                .account
                .ledger
                .charge(Item::Responses, wanted * USES_OF_READ);
            self.charge = charge.ok();
        }
        if self.charge.is_some() {
            self.bytes = wanted;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::parse::{Progress, response_head};

    #[test]
    fn connection_options_name_fields_in_every_spelling() {
        let head = b"HTTP/1.1 200 OK\r\nConnection: X-One, x_two,,close\r\nx-one: 1\r\nX_TWO: 2\r\nX.Two: 2\r\n\
            X-Three: 3\r\nKeep_Alive: 4\r\n\r\n";
        let Ok(Progress::Complete(head, _)) = response_head(head) else {
            panic!("it is a head");
        };
        let passed: Vec<_> = end_to_end(&head.fields).collect();
        assert_eq!(passed, [("X-Three", &b"3"[..])]);
    }

    #[test]
    fn a_listed_name_stands_for_itself_or_for_what_begins_so() {
        for (listed, name, expected) in [
            ("x-a", "X-A", true),
            ("x-a", "x-ab", false),
            ("x-a", "x", false),
            ("x-a*", "X-A", true),
            ("x-a*", "x-AB", true),
            ("x-a*", "x-", false),
            ("x-a-*", "x-a", false),
        ] {
            assert_eq!(is_meant(listed, name), expected, "{listed} {name}");
        }
    }
}
