//! The other side of a relayed exchange, where this server is the client: one request to an upstream
//! server, and what comes back.
//!
//! The upstream server sees exactly one request, with a head that is written here and a body that is
//! framed anew; its connection is used for nothing else. Nothing of what it answers reaches the
//! client unread: the head is parsed by the same rules as a request's and written anew by
//! `connection`, the body is taken out of its framing and put into another. So neither side can put
//! the other out of step.
//!
//! [`exchange`] runs until the head of the response is there, [`Relay`] and [`Tunnel`] from then on.
//! All of it happens on the client's own thread, in one poll over both sockets: either side is read
//! only when what it sent before has been passed on, which bounds the buffers, and the request's body
//! goes on while the response comes.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{Shutdown, shutdown};

use super::connection::{SEND_LIMIT, append_head};
use super::input::{BODY_LIMIT, Input, ReceiveError, Remaining};
use super::parse::{Fields, Framing, Head, ParseError, ResponseHead};
use super::request::{BodyReader, Request};
use super::response::{Body, Response};
use super::stream::{Disconnected, StreamWriter};
use crate::sys::{Events, PollEntry, poll};

/// How long an upstream server may take to say whether it wants a body, before the client is told to
/// send it: many servers do not know the question (RFC 9110 section 10.1.1).
const GO_AHEAD_LIMIT: Duration = Duration::from_secs(1);

/// The least and the most that is read at once. A quiet connection costs the least.
const READ_BYTES: (usize, usize) = (4 * 1024, 256 * 1024);

/// Memory that was needed for what came is given back when nothing has come for so long.
const REST_AFTER: Duration = Duration::from_secs(1);

/// Fields that are about one connection (RFC 9110 section 7.6.1), and those that frame a body.
/// `Trailer` is among them because trailers are not passed on.
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

/// How a request is passed on.
pub struct Forward<'a> {
    /// The path, which begins with a slash, and the query.
    pub target: Vec<u8>,
    /// The value of `Host`.
    pub host: &'a str,
    /// Further fields that are not passed on, in any case, and with underscores as well as dashes: to
    /// who gets them as CGI has them (RFC 3875 section 4.1.18) there is no difference.
    pub withheld: &'a [&'a str],
    /// Fields that are added. A value is one line.
    pub added: Vec<(&'a str, Vec<u8>)>,
}

/// Why there is no response.
#[derive(Debug)]
pub enum RelayError {
    /// The client's request does not come to its end.
    Client(ReceiveError),
    /// The upstream server does not answer as it should; the text says what it does instead.
    Upstream(String),
}

impl From<Disconnected> for RelayError {
    fn from(_: Disconnected) -> Self {
        Self::Client(ReceiveError::Closed)
    }
}

/// Passes a request on, until the head of the response has come. Interim responses go to the client.
///
/// # Errors
/// There will be no response.
pub fn exchange(
    request: &mut Request<'_>,
    socket: OwnedFd,
    forward: &Forward<'_>,
) -> Result<Response, RelayError> {
    let Request { head, body, .. } = request;
    let upgrades = wants_upgrade(head);
    let http_1_1 = head.minor_version == 1;
    let to_head = head.method == "HEAD";
    let mut upstream = Upstream::new(socket, head, body, forward);
    let mut client = body.client_writer();
    let begun = Instant::now();
    let mut heard_at = begun;
    // What poll found: something from the client, something from upstream.
    let (mut heard, mut answered) = (false, false);
    loop {
        if answered && client.is_flushed() {
            match upstream.read_head()? {
                None => answered = false,
                Some(response) if response.status >= 200 => {
                    let relay = Relay::new(upstream, response, to_head);
                    return Ok(Response::new(relay.head.status, Body::Relayed(relay)));
                }
                Some(switching) if switching.status == 101 && upgrades => {
                    let tunnel = Tunnel::new(upstream, switching);
                    return Ok(Response::new(101, Body::Tunnel(tunnel)));
                }
                Some(switching) if switching.status == 101 => {
                    let text = "it switched to a protocol that nobody asked for";
                    return Err(RelayError::Upstream(text.to_owned()));
                }
                Some(interim) if interim.status == 100 => {
                    client.push_raw(body.take_go_ahead());
                }
                Some(interim) if http_1_1 => {
                    let mut bytes = Vec::new();
                    append_head(&mut bytes, interim.status, &interim.reason);
                    append_fields(&mut bytes, end_to_end(&interim.fields));
                    bytes.extend_from_slice(b"\r\n");
                    client.push_raw(&bytes);
                }
                // A client of HTTP/1.0 knows no interim responses.
                Some(_) => {}
            }
        }
        // A client that sends its body unasked does not wait.
        let waits_for_answer =
            body.awaits_go_ahead() && !body.has_more_at_hand() && begun.elapsed() < GO_AHEAD_LIMIT;
        let feeding = upstream.takes_more() && client.is_flushed() && !waits_for_answer;
        if feeding && body.awaits_go_ahead() {
            client.push_raw(body.take_go_ahead());
            heard_at = Instant::now();
        } else if feeding && (heard || body.has_more_at_hand()) {
            upstream.feed(body).map_err(RelayError::Client)?;
            heard = false;
            heard_at = Instant::now();
        }
        client.flush()?;
        upstream.flush();

        let feeding = upstream.takes_more() && client.is_flushed() && !waits_for_answer;
        if !feeding {
            // The client is not waited for.
            heard_at = Instant::now();
        }
        let limit = if (answered && client.is_flushed()) || (feeding && body.has_more_at_hand()) {
            // There is more to do; but a client that is gone must be seen, however much there is.
            Some(Duration::ZERO)
        } else if waits_for_answer {
            Some(GO_AHEAD_LIMIT.saturating_sub(begun.elapsed()))
        } else if feeding {
            Some(BODY_LIMIT.saturating_sub(heard_at.elapsed()))
        } else {
            // A server may take its time, but not a client with what there is for it.
            (!client.is_flushed()).then_some(SEND_LIMIT)
        };
        let reading = client.is_flushed();
        let [from_client, from_upstream] = wait(&client, feeding, &upstream, reading, limit);
        if limit == Some(SEND_LIMIT) && !from_client.any() && !from_upstream.any() {
            // It would not take the answer to that either.
            let _ = shutdown(client.descriptor().as_raw_fd(), Shutdown::Both);
            return Err(RelayError::Client(ReceiveError::Closed));
        }
        heard |= from_client.has(Events::READABLE);
        answered |= from_upstream.any();
        let was_half_closed = client.is_half_closed();
        client.ready(from_client)?;
        if client.is_half_closed() && !was_half_closed && http_1_1 && client.is_flushed() {
            // Only sending tells whether anybody is there; see `ClientWatch`.
            client.push_raw(b"HTTP/1.1 102 Processing\r\n\r\n");
        }
        if feeding && !heard && heard_at.elapsed() >= BODY_LIMIT {
            return Err(RelayError::Client(ReceiveError::TimedOut));
        }
    }
}

/// Waits for either side; `limit` is none for ever.
fn wait(
    client: &StreamWriter,
    feeding: bool,
    upstream: &Upstream,
    reading: bool,
    limit: Option<Duration>,
) -> [Events; 2] {
    let events = Events::NONE
        .and_if(reading, Events::READABLE)
        .and_if(!upstream.is_flushed(), Events::WRITABLE);
    let mut entries = [
        PollEntry::new(
            client.descriptor(),
            client.interest().and_if(feeding, Events::READABLE),
        ),
        // A connection that has ended is always ready: it is looked at only for a reason.
        PollEntry::new(
            events.any().then(|| upstream.input.socket().as_fd()),
            events,
        ),
    ];
    poll(&mut entries, limit);
    entries.map(|entry| entry.events())
}

/// Whether the connection is to become something else. A request with a body stays what it is, which
/// RFC 9110 section 7.8 allows.
fn wants_upgrade(head: &Head) -> bool {
    head.minor_version == 1
        && matches!(head.framing, Framing::None | Framing::Length(0))
        && head.fields.values("upgrade").next().is_some()
        && head
            .fields
            .connection_options()
            .any(|option| option == "upgrade")
}

/// The fields that are not about the connection on which they came.
fn end_to_end(fields: &Fields) -> impl Iterator<Item = (&str, &[u8])> {
    let named: Vec<String> = fields.connection_options().collect();
    fields.iter().filter(move |(name, _)| {
        !HOP_BY_HOP
            .iter()
            .copied()
            .chain(named.iter().map(String::as_str))
            .any(|other| other.eq_ignore_ascii_case(name))
    })
}

fn append_fields<'f>(out: &mut Vec<u8>, fields: impl Iterator<Item = (&'f str, &'f [u8])>) {
    for (name, value) in fields {
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(b": ");
        out.extend_from_slice(value);
        out.extend_from_slice(b"\r\n");
    }
}

/// The protocols that one side would change to, or changes to. The field is about one connection, and
/// therefore written for each.
fn append_upgrade(out: &mut Vec<u8>, fields: &Fields) {
    let protocols = fields.values("upgrade");
    append_fields(out, protocols.map(|value| ("Upgrade", value)));
    out.extend_from_slice(b"Connection: Upgrade\r\n");
}

/// The head that the upstream server sees.
fn request_head(head: &Head, expects: bool, forward: &Forward<'_>) -> Vec<u8> {
    let mut out = Vec::with_capacity(1024);
    out.extend_from_slice(head.method.as_bytes());
    out.push(b' ');
    out.extend_from_slice(&forward.target);
    out.extend_from_slice(b" HTTP/1.1\r\n");
    append_fields(&mut out, [("Host", forward.host.as_bytes())].into_iter());
    let passed_on = end_to_end(&head.fields).filter(|(name, _)| {
        !name.eq_ignore_ascii_case("host")
            && !forward
                .withheld
                .iter()
                .any(|other| other.eq_ignore_ascii_case(&name.replace('_', "-")))
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
    } else {
        out.extend_from_slice(b"Connection: close\r\n\r\n");
    }
    out
}

/// The connection to an upstream server.
struct Upstream {
    input: Input<Arc<OwnedFd>>,
    output: StreamWriter<Arc<OwnedFd>>,
    /// How much of a head the parser has seen in vain.
    seen: usize,
    /// Whether the request has all been handed over, or is not taken any more.
    is_fed: bool,
    /// Whether it was by a reset that it was not taken. The kernel tells that once, so that who reads
    /// afterwards finds an end in order.
    was_reset: bool,
    size: ReadSize,
}

impl Upstream {
    fn new(socket: OwnedFd, head: &Head, body: &BodyReader<'_>, forward: &Forward<'_>) -> Self {
        let socket = Arc::new(socket);
        let head_bytes = request_head(head, body.awaits_go_ahead(), forward);
        let chunked = head.framing == Framing::Chunked;
        Self {
            input: Input::new(Arc::clone(&socket)),
            output: StreamWriter::new(socket, head_bytes, chunked),
            seen: 0,
            is_fed: body.is_over(),
            was_reset: false,
            size: ReadSize::default(),
        }
    }

    /// Whether more of the request can be handed over.
    fn takes_more(&self) -> bool {
        !self.is_fed && self.output.pending() < READ_BYTES.0
    }

    fn is_flushed(&self) -> bool {
        self.output.is_flushed()
    }

    /// Hands over what has come of the request's body.
    fn feed(&mut self, body: &mut BodyReader<'_>) -> Result<(), ReceiveError> {
        let (output, size) = (&mut self.output, &mut self.size);
        let mut result = Ok(());
        output.push(|out| result = size.append(out, |out, most| body.append_available(out, most)));
        result?;
        if body.is_over() {
            output.finish();
            self.is_fed = true;
        }
        Ok(())
    }

    /// Sends what can be sent. A server may answer and hang up before it has read everything, so that
    /// it takes no more is no error.
    fn flush(&mut self) {
        if let Err(errno) = self.output.try_flush() {
            self.was_reset = errno == Errno::ECONNRESET;
            self.output.discard();
            self.is_fed = true;
        }
        if self.is_fed && self.output.is_flushed() {
            // The memory: the response may be a long time coming.
            self.output.discard();
        }
    }

    fn read_head(&mut self) -> Result<Option<ResponseHead>, RelayError> {
        self.input
            .read_available_response(&mut self.seen)
            .map_err(|error| {
                let begun = if self.input.unused().is_empty() {
                    "before it answered"
                } else {
                    "in the middle of a response's head"
                };
                RelayError::Upstream(match error {
                    ReceiveError::Parse(ParseError::Malformed(what)) => {
                        format!("its answer is not HTTP/1.1: {what}")
                    }
                    ReceiveError::Parse(_) => format!(
                        "its response's head is larger than {} bytes or has more than {} fields",
                        super::MAX_HEAD_BYTES,
                        super::MAX_HEADERS
                    ),
                    ReceiveError::Reset => format!("it reset the connection {begun}"),
                    _ => format!("it closed the connection {begun}"),
                })
            })
    }
}

/// A response whose head has come, and the rest of its exchange.
pub struct Relay {
    upstream: Upstream,
    head: ResponseHead,
    /// Of the response's body.
    left: Remaining,
    /// What the client is told about the length.
    framing: Framing,
}

impl Relay {
    /// Finds out where the body ends (RFC 9112 section 6.3).
    fn new(upstream: Upstream, head: ResponseHead, to_head: bool) -> Self {
        let (left, framing) = match (head.status, head.framing) {
            (204, _) => (Remaining::Ended, Framing::None),
            // Has no content either, but may have a length.
            (205, _) => (Remaining::Ended, Framing::Length(0)),
            // A length says what another request would get.
            (_, framing) if to_head || head.status == 304 => match framing {
                Framing::Length(_) => (Remaining::Ended, framing),
                Framing::None | Framing::Chunked => (Remaining::Ended, Framing::None),
            },
            (_, Framing::None) => (Remaining::UntilClose, Framing::Chunked),
            (_, framing) => (Remaining::new(framing), framing),
        };
        Self {
            upstream,
            head,
            left,
            framing,
        }
    }

    /// How the body is to be framed; `Chunked` stands for a length that is not known.
    pub(super) fn framing(&self) -> Framing {
        self.framing
    }

    /// Appends the beginning of the head, without what frames the body.
    pub(super) fn append_head(&self, out: &mut Vec<u8>) {
        append_head(out, self.head.status, &self.head.reason);
        append_fields(out, end_to_end(&self.head.fields));
        if self.head.status == 426 {
            // It says what to change to (RFC 9110 section 15.5.22).
            append_upgrade(out, &self.head.fields);
        }
    }

    /// Passes the rest of the response on, and of the request meanwhile. An error means that one of
    /// them is not whole.
    pub(super) fn run(
        mut self,
        client: &mut StreamWriter,
        body: &mut BodyReader<'_>,
    ) -> io::Result<()> {
        let gone = |Disconnected| io::Error::from(io::ErrorKind::ConnectionReset);
        let broken = |_| io::Error::from(io::ErrorKind::UnexpectedEof);
        let mut size = ReadSize::default();
        let mut is_over = false;
        let (mut heard, mut answered) = (false, true);
        // What has come of the body goes with the head.
        let mut reading = true;
        loop {
            if reading && answered && !is_over {
                let (left, input) = (&mut self.left, &mut self.upstream.input);
                let ends_by_close = matches!(left, Remaining::UntilClose);
                let mut result = Ok(());
                client.push(|out| {
                    result = size.append(out, |out, most| left.append_available(input, out, most));
                });
                result.map_err(broken)?;
                answered = !input.unused().is_empty() || self.left.has_failed();
                if matches!(self.left, Remaining::Ended) {
                    if ends_by_close && self.upstream.was_reset {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    client.finish();
                    is_over = true;
                }
            }
            // It is too late for a go-ahead.
            let feeding = self.upstream.takes_more() && !body.awaits_go_ahead();
            if feeding && (heard || body.has_more_at_hand()) {
                self.upstream.feed(body).map_err(broken)?;
                heard = false;
            }
            client.flush().map_err(gone)?;
            self.upstream.flush();
            reading = client.is_flushed() && !is_over;
            if is_over && client.is_flushed() {
                return Ok(());
            }
            let feeding = self.upstream.takes_more() && !body.awaits_go_ahead();
            if (reading && answered) || (feeding && body.has_more_at_hand()) {
                continue;
            }

            let limit = if !client.is_flushed() {
                Some(SEND_LIMIT)
            } else if client.can_rest() || self.upstream.input.can_rest() {
                Some(REST_AFTER)
            } else {
                None
            };
            let [from_client, from_upstream] =
                wait(client, feeding, &self.upstream, reading, limit);
            if limit.is_some() && !from_client.any() && !from_upstream.any() {
                if !client.is_flushed() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                client.rest();
                self.upstream.input.rest();
                size = ReadSize::default();
            }
            heard |= from_client.has(Events::READABLE);
            answered |= from_upstream.any();
            client.ready(from_client).map_err(gone)?;
            if client.is_half_closed() && client.is_flushed() {
                client.probe();
            }
        }
    }
}

/// A connection that has become something else (RFC 9110 section 7.8): bytes in both directions.
pub struct Tunnel {
    upstream: Upstream,
    head: ResponseHead,
}

impl Tunnel {
    fn new(upstream: Upstream, head: ResponseHead) -> Self {
        Self { upstream, head }
    }

    /// Appends the head that tells the client.
    pub(super) fn append_head(&self, out: &mut Vec<u8>) {
        append_head(out, self.head.status, &self.head.reason);
        append_fields(out, end_to_end(&self.head.fields));
        append_upgrade(out, &self.head.fields);
    }

    /// Moves bytes until both directions have ended. Each ends by itself, and its end is passed on.
    pub(super) fn run(self, to_client: &mut StreamWriter, from_client: &mut Input) {
        let Upstream {
            input: mut from_upstream,
            output: mut to_upstream,
            ..
        } = self.upstream;
        let (mut up, mut down) = (Flow::new(), Flow::new());
        let (mut client_ready, mut upstream_ready) = (true, true);
        loop {
            up.advance(&mut client_ready, from_client, &mut to_upstream);
            down.advance(&mut upstream_ready, &mut from_upstream, to_client);
            // A client that is gone wants nothing more. Of a server that is gone the last words count.
            if up.left.has_failed() || down.target_is_lost || (up.is_over() && down.is_over()) {
                return;
            }
            let events = |flow: &Flow, ready: bool, into: bool, pending: bool| {
                Events::NONE
                    .and_if(flow.is_open() && into && !ready, Events::READABLE)
                    .and_if(pending, Events::WRITABLE)
            };
            let client_events = events(
                &up,
                client_ready,
                to_upstream.is_flushed(),
                !to_client.is_flushed(),
            );
            let upstream_events = events(
                &down,
                upstream_ready,
                to_client.is_flushed(),
                !to_upstream.is_flushed(),
            );
            // One that has ended and has to wait would only wake the thread, again and again.
            let watch_client = client_events.any() || !client_ready || !down.is_shut;
            let watch_upstream = upstream_events.any() || !upstream_ready;
            let mut entries = [
                PollEntry::new(watch_client.then(|| to_client.descriptor()), client_events),
                PollEntry::new(
                    watch_upstream.then(|| to_upstream.descriptor()),
                    upstream_events,
                ),
            ];
            let more = (client_ready && up.is_open() && to_upstream.is_flushed())
                || (upstream_ready && down.is_open() && to_client.is_flushed());
            // Silence may last; a client that takes nothing of what there is for it may not.
            let limit = if more {
                Some(Duration::ZERO)
            } else if !to_client.is_flushed() {
                Some(SEND_LIMIT)
            } else if to_client.can_rest() || to_upstream.can_rest() {
                Some(REST_AFTER)
            } else {
                None
            };
            let found = poll(&mut entries, limit);
            let [client_found, upstream_found] = entries.map(|entry| entry.events());
            if !found && !more {
                if !to_client.is_flushed() {
                    return;
                }
                to_client.rest();
                to_upstream.rest();
                (up.size, down.size) = (ReadSize::default(), ReadSize::default());
            }
            let ended = Events::READABLE.and_if(true, Events::BROKEN);
            client_ready |= client_found.has(ended);
            upstream_ready |= upstream_found.has(ended);
            // A client that ends in order does so in both directions, one after the other; of a server
            // there may be something left to be read.
            if (client_found.has(Events::BROKEN) && !(up.is_open() && down.is_shut))
                || (upstream_found.has(Events::BROKEN) && down.is_over())
            {
                return;
            }
        }
    }
}

/// One direction of a tunnel.
struct Flow {
    left: Remaining,
    size: ReadSize,
    /// Whether the target was told that nothing more comes.
    is_shut: bool,
    /// Whether the target takes nothing any more.
    target_is_lost: bool,
}

impl Flow {
    fn new() -> Self {
        Self {
            left: Remaining::UntilClose,
            size: ReadSize::default(),
            is_shut: false,
            target_is_lost: false,
        }
    }

    /// Whether more may come.
    fn is_open(&self) -> bool {
        matches!(self.left, Remaining::UntilClose) && !self.target_is_lost
    }

    fn is_over(&self) -> bool {
        self.is_shut || self.target_is_lost
    }

    /// Moves what can be moved without waiting.
    fn advance<A: AsFd, B: AsFd>(
        &mut self,
        ready: &mut bool,
        from: &mut Input<A>,
        to: &mut StreamWriter<B>,
    ) {
        if to.flush().is_ok() && *ready && self.is_open() && to.is_flushed() {
            let (left, size) = (&mut self.left, &mut self.size);
            to.push(|out| {
                // How it failed is in `left`.
                let _ = size.append(out, |out, most| left.append_available(from, out, most));
            });
            *ready = !from.unused().is_empty();
        }
        if to.flush().is_err() {
            to.discard();
            self.target_is_lost = true;
        }
        if !self.is_open() && to.is_flushed() && !self.is_over() {
            self.is_shut = true;
            let _ = shutdown(to.descriptor().as_raw_fd(), Shutdown::Write);
        }
    }
}

/// How much to read at once: much where much comes.
struct ReadSize(usize);

impl Default for ReadSize {
    fn default() -> Self {
        Self(READ_BYTES.0)
    }
}

impl ReadSize {
    fn append<E>(
        &mut self,
        out: &mut Vec<u8>,
        append: impl FnOnce(&mut Vec<u8>, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let before = out.len();
        append(out, self.0)?;
        let count = out.len() - before;
        if count >= self.0 {
            self.0 = (self.0 * 4).min(READ_BYTES.1);
        } else if count < self.0 / 8 {
            self.0 = (self.0 / 4).max(READ_BYTES.0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;
    use std::thread;

    use nix::sys::socket::{setsockopt, sockopt};

    use super::super::parse::{self, Progress};
    use super::*;

    /// An exchange with the server that `upstream` leads to; the client is given too.
    fn exchanged(
        request: &str,
        upstream: OwnedFd,
        outcome: impl FnOnce(TcpStream, Result<Response, RelayError>, &mut BodyReader<'_>),
    ) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, _) = listener.accept().unwrap();
        let Ok(Progress::Complete(head, _)) = parse::head(request.as_bytes()) else {
            panic!("no request: {request}");
        };
        let mut input = Input::new(Arc::new(socket));
        let body = BodyReader::new(&mut input, &head);
        let mut request = Request {
            head,
            body,
            may_last: true,
        };
        let forward = Forward {
            target: b"/".to_vec(),
            host: "localhost",
            withheld: &[],
            added: Vec::new(),
        };
        let response = exchange(&mut request, upstream, &forward);
        outcome(client, response, &mut request.body);
    }

    /// The same with a client that reads nothing, and a server that sends `beginning`, and then `rest`
    /// without end.
    fn with_deaf_client(
        request: &str,
        beginning: &'static str,
        rest: &'static str,
        outcome: impl FnOnce(Result<Response, RelayError>, &mut BodyReader<'_>),
    ) {
        let (near, mut far) = UnixStream::pair().unwrap();
        let server = thread::spawn(move || {
            let rest = rest.repeat(1000);
            let _ = far.write_all(beginning.as_bytes());
            while far.write_all(rest.as_bytes()).is_ok() {}
        });
        exchanged(request, near.into(), |_client, response, body| {
            outcome(response, body);
        });
        server.join().unwrap();
    }

    fn relay(response: Result<Response, RelayError>) -> Relay {
        match response.unwrap().body {
            Body::Relayed(relay) => relay,
            _ => panic!("no response to be relayed"),
        }
    }

    #[test]
    fn a_client_that_takes_no_interim_responses_is_given_up() {
        let interim = "HTTP/1.1 102 Processing\r\n\r\n";
        with_deaf_client("GET / HTTP/1.1\r\n\r\n", "", interim, |response, _| {
            let given_up = matches!(response, Err(RelayError::Client(ReceiveError::Closed)));
            assert!(given_up);
        });
    }

    #[test]
    fn a_client_that_takes_nothing_of_a_response_is_given_up() {
        let head = "HTTP/1.1 200 OK\r\n\r\n";
        with_deaf_client("GET / HTTP/1.1\r\n\r\n", head, "x", |response, body| {
            let mut client = body.client_writer();
            let error = relay(response).run(&mut client, body).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        });
    }

    #[test]
    fn a_client_that_takes_nothing_of_a_tunnel_is_given_up() {
        let request = "GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n";
        let head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n";
        with_deaf_client(request, head, "x", |response, body| {
            let Body::Tunnel(tunnel) = response.unwrap().body else {
                panic!("no tunnel");
            };
            let mut client = body.client_writer();
            tunnel.run(&mut client, body.connection());
        });
    }

    /// The kernel tells of a reset once, and here it tells whoever passes the request on: what is read
    /// afterwards ends as if in order.
    #[test]
    fn a_response_that_is_reset_while_the_request_goes_on_never_looks_whole() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let (told, was_reset) = channel();
        thread::spawn(move || {
            let _ = far.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
            // Reads nothing, and writes until nobody takes any more.
            let limit = Duration::from_millis(200);
            far.set_write_timeout(Some(limit)).unwrap();
            while far.write_all(&[b'x'; 4096]).is_ok() {}
            let now = libc::linger {
                l_onoff: 1,
                l_linger: 0,
            };
            setsockopt(&far, sockopt::Linger, &now).unwrap();
            drop(far);
            let _ = told.send(());
        });
        let request = "POST / HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n";
        exchanged(request, near.into(), |mut client, response, body| {
            let mut sending = client.try_clone().unwrap();
            thread::spawn(move || while sending.write_all(&[b'y'; 4096]).is_ok() {});
            let reading = thread::spawn(move || {
                was_reset.recv().unwrap();
                thread::sleep(Duration::from_millis(100));
                let mut piece = vec![0; 65_536];
                while let Ok(1..) = client.read(&mut piece) {}
            });
            let mut stream = body.client_writer();
            let result = relay(response).run(&mut stream, body);
            let _ = shutdown(stream.descriptor().as_raw_fd(), Shutdown::Both);
            reading.join().unwrap();
            assert!(result.is_err(), "half a response looks whole");
        });
    }
}
