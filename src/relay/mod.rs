//! The port proxy's relay, where this server is the client of an upstream server.
//!
//! The upstream server gets one request at a time: its head is written here and its body is framed anew. Its connection
//! is the next request's only if that comes from the same client, soon, if neither has a body, and if there is no doubt
//! where the answer ended. No byte of the answer reaches the client unparsed: the head is parsed by the rules for requests and written by
//! `connection`, the body is taken out of its framing and put into another. So neither side can put the other out of step.
//!
//! [`exchange`] runs until the head of the response has arrived; then the connection runs `Relay`,
//! or a `Tunnel` for another protocol. All of it runs on the client's thread. `Exchange` is the poll
//! loop of the first two: the request continues while the response arrives, and the end of the response
//! ends both. A tunnel has a separate loop, because there each direction ends independently and passes
//! its end on. Either side is read only when what it sent before was sent on, which bounds the
//! buffers and slows down the faster side.

mod redirect;
mod set_cookie;
mod tunnel;
mod upstream;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::socket::{Shutdown, shutdown};

use crate::fault;
use crate::http::body::BodyDecoder;
use crate::http::parse::{Framing, ResponseHead};
use crate::http::reader::{BODY_LIMIT, ReceiveError};
use crate::http::request::{BodyReader, Request};
use crate::http::response::{Body, Response, Takeover, append_status_line};
use crate::http::stream::{SEND_LIMIT, StreamWriter};
use crate::sys::Events;
pub use redirect::Home;
pub use set_cookie::Cookies;
pub use tunnel::connect_through;
use tunnel::{Connected, Tunnel};
pub use upstream::{Account, FieldChanges, Forward, RelayError, is_same_field, wants_upgrade};
use upstream::{Keep, MIN_READ_BYTES, ReadSize, Upstream, append_upgrade, poll_both};

/// Interim responses to one request: so many at once, and for each second. The client sees nothing of them, so that its pace
/// does not limit them.
///
/// Only the `100 Continue` that a client waits for is passed on. Clients and proxies that do not know the others take them for
/// the final response, and what the server inside sends next for the answer to their next request.
const MAX_UNSEEN_RESPONSES: u64 = 100;
const UNSEEN_RESPONSES_PER_SECOND: u64 = 10;

fn most_unseen(time: Duration) -> u64 {
    MAX_UNSEEN_RESPONSES + UNSEEN_RESPONSES_PER_SECOND * time.as_secs()
}

/// A client that waits for `100 Continue` gets it after this long if the upstream server has not
/// answered: many servers do not know the expectation (RFC 9110 section 10.1.1).
const GO_AHEAD_LIMIT: Duration = Duration::from_secs(1);

/// The answer to a client that asked for the connection that `socket` is: bytes in both directions.
pub fn connected(socket: OwnedFd, account: Account) -> Response {
    let connected = Connected { socket, account };
    Response::new(200, Body::Takeover(Box::new(connected)))
}

/// Forwards a request over `socket` until the head of the response has arrived. Of interim responses the client gets a
/// `100 Continue` that it waits for.
///
/// # Errors
/// `Client` if the request cannot be received or the client has disconnected; `NoAnswer` if the server closes at once, or
/// begins with something other than HTTP/1.1; `Upstream` if it does so later, or with the first bytes of the body.
pub fn exchange(
    request: &mut Request<'_>,
    socket: Arc<OwnedFd>,
    forward: &Forward<'_>,
) -> Result<Response, RelayError> {
    let Request {
        head, body, ledger, ..
    } = request;
    let account = Account {
        ledger: Arc::clone(ledger),
        counter: forward.counter.clone(),
    };
    let upgrades = wants_upgrade(head);
    let to_head = head.method == "HEAD";
    let mut exchange = Exchange {
        upstream: Upstream::new(socket, head, body, forward, &account),
        request_ready: false,
        response_ready: false,
    };
    let mut client = body.client_writer();
    let begun = Instant::now();
    // When the client last sent a part of the body, or did not have to.
    let mut heard_at = begun;
    let mut unseen = 0;
    let mut keep = forward.keep.clone();
    loop {
        fault::point("relay");
        if exchange.request_ready || !exchange.takes_request(body) {
            heard_at = Instant::now();
        }
        // First, so that a malformed body is refused even if the server has answered early.
        exchange
            .advance_request(&mut client, body)
            .inspect_err(|_| refuse_answer_after_part(&client))?;
        if exchange.response_ready && client.is_flushed() {
            match exchange.upstream.try_read_head()? {
                None => exchange.response_ready = false,
                Some(response) if response.status >= 200 => {
                    let changes = forward.changes.clone();
                    let mut relay = Relay::new(exchange, response, to_head, account, changes, keep);
                    relay.begin()?;
                    let status = relay.head.status;
                    return Ok(Response::new(status, Body::Takeover(Box::new(relay))));
                }
                Some(response) if response.status == 101 && upgrades => {
                    let upstream = exchange.upstream;
                    let tunnel = Tunnel {
                        upstream,
                        head: response,
                        account,
                        changes: forward.changes.clone(),
                    };
                    return Ok(Response::new(101, Body::Takeover(Box::new(tunnel))));
                }
                Some(response) if response.status == 101 => {
                    let text = "it switched to a protocol that the client did not ask for";
                    return Err(RelayError::Upstream(text.to_owned()));
                }
                Some(_) if unseen >= most_unseen(begun.elapsed()) => {
                    let text = "it sent too many interim responses";
                    return Err(RelayError::Upstream(text.to_owned()));
                }
                Some(interim) => {
                    keep = keep.filter(|_| has_sure_end(&interim, to_head));
                    unseen += 1;
                    if interim.status == 100 {
                        client.push_raw(body.take_go_ahead());
                    }
                }
            }
        }
        // A client that sends its body without waiting gets the go-ahead immediately.
        let go_ahead_in = GO_AHEAD_LIMIT.saturating_sub(begun.elapsed());
        let mut holds_body = body.awaits_go_ahead() && exchange.upstream.takes_more();
        if holds_body && (body.has_more_at_hand() || go_ahead_in.is_zero()) {
            client.push_raw(body.take_go_ahead());
            holds_body = false;
        }
        client.flush()?;

        // Without a body to receive, the server may take its time.
        let takes_body = exchange.takes_request(body);
        let body_limit = takes_body.then(|| BODY_LIMIT.saturating_sub(heard_at.elapsed()));
        let limit = holds_body.then_some(go_ahead_in).or(body_limit);
        exchange.wait(&mut client, body, true, limit)?;
        if takes_body && !exchange.request_ready && heard_at.elapsed() >= BODY_LIMIT {
            refuse_answer_after_part(&client);
            return Err(RelayError::Client(ReceiveError::TimedOut));
        }
    }
}

/// Ends the connection of a client that has a part of an interim response: an answer behind it would look like the rest of
/// that.
fn refuse_answer_after_part(client: &StreamWriter) {
    if !client.is_flushed() {
        let _ = shutdown(client.descriptor().as_raw_fd(), Shutdown::Both);
    }
}

/// The exchange of one request and its response, between two polls.
struct Exchange {
    upstream: Upstream,
    /// Poll found bytes, or the end, of the request's body.
    request_ready: bool,
    /// Poll found bytes, or the end, of the response.
    response_ready: bool,
}

impl Exchange {
    /// Whether more of the request's body can be received and handed over.
    fn takes_request(&self, body: &BodyReader<'_>) -> bool {
        self.upstream.takes_more() && !body.awaits_go_ahead()
    }

    /// Hands over what has arrived of the request, and sends what is buffered for either side.
    fn advance_request(
        &mut self,
        client: &mut StreamWriter,
        body: &mut BodyReader<'_>,
    ) -> Result<(), RelayError> {
        let mut fed = Ok(());
        if self.takes_request(body) && (self.request_ready || body.has_more_at_hand()) {
            fed = self.upstream.feed(body);
            self.request_ready = false;
        }
        // Before the error, so that the client gets the part of the response that has arrived.
        client.flush()?;
        fed.map_err(RelayError::Client)?;
        self.upstream.flush();
        Ok(())
    }

    /// Waits until either side can go on, at most for `limit`. Polls for the response if the caller `wants_response` and the client has taken what came before.
    fn wait(
        &mut self,
        client: &mut StreamWriter,
        body: &BodyReader<'_>,
        wants_response: bool,
        limit: Option<Duration>,
    ) -> Result<(), RelayError> {
        let reads_request = self.takes_request(body);
        let reads_response = wants_response && client.is_flushed();
        let has_more =
            (reads_response && self.response_ready) || (reads_request && body.has_more_at_hand());
        let limit = if has_more {
            // Polls nevertheless, to notice a client that has disconnected.
            Some(Duration::ZERO)
        } else if !client.is_flushed() {
            Some(SEND_LIMIT)
        } else {
            limit
        };
        let client_socket = Arc::clone(client.socket());
        let upstream_socket = Arc::clone(self.upstream.reader.socket());
        let client_events = client.interest().and_if(reads_request, Events::READABLE);
        let upstream_events = Events::NONE
            .and_if(reads_response, Events::READABLE)
            .and_if(!self.upstream.writer.is_flushed(), Events::WRITABLE);
        let [from_client, from_upstream] = poll_both(
            [
                Some(client_socket.as_fd()),
                // A closed connection is always ready, so it is polled only for a reason.
                upstream_events.any().then(|| upstream_socket.as_fd()),
            ],
            [client_events, upstream_events],
            limit,
            || {
                client.trim();
                self.upstream.writer.trim();
                self.upstream.reader.trim();
            },
        );
        if limit == Some(SEND_LIMIT) && !from_client.any() && !from_upstream.any() {
            // The client would not take an error either.
            let _ = shutdown(client_socket.as_raw_fd(), Shutdown::Both);
            return Err(RelayError::Client(ReceiveError::TimedOut));
        }
        self.request_ready |= from_client.has(Events::READABLE);
        self.response_ready |= from_upstream.any();
        client.ready(from_client)?;
        if client.is_half_closed() && client.is_flushed() {
            client.probe();
        }
        Ok(())
    }
}

/// Whether there is no doubt where a response ends, and that its server then reads the next request.
fn has_sure_end(head: &ResponseHead, to_head: bool) -> bool {
    let is_sure = match (head.status, head.framing) {
        // The server may not have read all of a request that it refuses.
        (400.., _) => false,
        (_, Framing::Length(0)) | (100..200 | 204 | 304, Framing::None) => true,
        // Not every server knows that none of these has the content that it announces.
        (100..200 | 204 | 205 | 304, _) | (_, Framing::None) => false,
        (_, Framing::Length(_) | Framing::Chunked) => !to_head,
    };
    is_sure && head.keep_alive
}

/// A response whose head has arrived, and the rest of its exchange.
struct Relay {
    exchange: Exchange,
    head: ResponseHead,
    /// Of the response's body.
    decoder: BodyDecoder,
    /// Whether the end of the connection is that of the body.
    ends_by_close: bool,
    /// What has been read of the body and is not on its way to the client.
    beginning: Vec<u8>,
    /// The framing that the client gets.
    framing: Framing,
    account: Account,
    changes: FieldChanges,
    /// Where the server's connection stays, if it may.
    keep: Option<Keep>,
}

impl Relay {
    /// Determines where the body ends (RFC 9112 section 6.3).
    fn new(
        exchange: Exchange,
        head: ResponseHead,
        to_head: bool,
        account: Account,
        changes: FieldChanges,
        keep: Option<Keep>,
    ) -> Self {
        let (decoder, framing) = match (head.status, head.framing) {
            (204, _) => (BodyDecoder::Ended, Framing::None),
            // Has no content either, but may have a length.
            (205, _) => (BodyDecoder::Ended, Framing::Length(0)),
            // A length is that of the response to another request.
            (_, framing) if to_head || head.status == 304 => match framing {
                Framing::Length(_) => (BodyDecoder::Ended, framing),
                Framing::None | Framing::Chunked => (BodyDecoder::Ended, Framing::None),
            },
            (_, Framing::None) => (BodyDecoder::UntilClose, Framing::Chunked),
            (_, framing) => (BodyDecoder::new(framing), framing),
        };
        Self {
            keep: keep.filter(|_| has_sure_end(&head, to_head)),
            exchange,
            head,
            ends_by_close: matches!(decoder, BodyDecoder::UntilClose),
            decoder,
            beginning: Vec::new(),
            framing,
            account,
            changes,
        }
    }

    /// Reads what has arrived of the body, while the client can get an error in its place.
    ///
    /// # Errors
    /// `Upstream` if the body fails before its first byte.
    fn begin(&mut self) -> Result<(), RelayError> {
        let (decoder, upstream) = (&mut self.decoder, &mut self.exchange.upstream);
        let out = &mut self.beginning;
        let result = decoder.append_available(&mut upstream.reader, out, MIN_READ_BYTES);
        let has_ended = matches!(decoder, BodyDecoder::Ended | BodyDecoder::Failed);
        let is_cut = result.is_err() || (has_ended && self.is_reset());
        self.exchange.response_ready = has_ended || !self.beginning.is_empty();
        if is_cut && self.beginning.is_empty() {
            let text = match result {
                Err(ReceiveError::Parse(_)) => "its response's body is not what its head announces",
                _ => "it closed the connection before its response's body",
            };
            return Err(RelayError::Upstream(text.to_owned()));
        }
        Ok(())
    }

    /// Whether a body that ends with its connection was cut off instead.
    fn is_reset(&self) -> bool {
        self.ends_by_close && self.exchange.upstream.was_reset()
    }

    /// Reads what has arrived of the body. Returns how the body ended, or `None` before its end.
    fn read(&mut self, client: &mut StreamWriter, size: &mut ReadSize) -> Option<io::Result<()>> {
        let (decoder, upstream) = (&mut self.decoder, &mut self.exchange.upstream);
        let beginning = std::mem::take(&mut self.beginning);
        let result = size.append(client, |out, most| {
            if beginning.is_empty() {
                return decoder.append_available(&mut upstream.reader, out, most);
            }
            out.extend_from_slice(&beginning);
            Ok(())
        });
        self.exchange.response_ready = !upstream.reader.unused().is_empty() || decoder.has_failed();
        let has_ended = matches!(decoder, BodyDecoder::Ended);
        if result.is_err() || (has_ended && self.is_reset()) {
            return Some(Err(io::ErrorKind::UnexpectedEof.into()));
        }
        has_ended.then(|| {
            client.finish();
            Ok(())
        })
    }
}

impl Takeover for Relay {
    fn append_head(&self, out: &mut Vec<u8>) {
        append_status_line(out, self.head.status, &self.head.reason);
        self.changes.append(out, &self.head.fields);
        if self.head.status == 426 {
            // Names the protocols to change to (RFC 9110 section 15.5.22).
            append_upgrade(out, &self.head.fields);
        }
    }

    fn framing(&self) -> Framing {
        self.framing
    }

    fn run(
        mut self: Box<Self>,
        client: &mut StreamWriter,
        body: &mut BodyReader<'_>,
    ) -> io::Result<()> {
        let mut size = ReadSize::new(&self.account);
        // How the response ended; reported when the client has taken all of it.
        let mut outcome = None;
        // The first read adds to the head in the buffer: a small response is sent at once.
        let mut reads = true;
        loop {
            if reads && self.exchange.response_ready {
                outcome = self.read(client, &mut size);
            }
            self.exchange.advance_request(client, body)?;
            reads = outcome.is_none() && client.is_flushed();
            if client.is_flushed()
                && let Some(outcome) = outcome.take()
            {
                if outcome.is_ok()
                    && let Some((slot, key)) = self.keep.take()
                    && let Some(connection) = self.exchange.upstream.into_idle()
                {
                    slot.put(key, connection);
                }
                return outcome;
            }
            if outcome.is_some() {
                // The server may serve others while the client takes the rest.
                self.keep = None;
                self.exchange.upstream.end_requests();
            }
            self.exchange.wait(client, body, outcome.is_none(), None)?;
        }
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

    use super::*;
    use crate::http::parse::{self, Progress};
    use crate::http::reader::SocketReader;
    use crate::http::slots::ConnectionSlot;

    /// Sends `request` to the server behind `upstream`. `outcome` gets the client's socket, the response
    /// and the body.
    fn exchanged(
        request: &str,
        upstream: OwnedFd,
        outcome: impl FnOnce(TcpStream, Result<Response, RelayError>, &mut BodyReader<'_>),
    ) {
        exchanged_while(request, upstream, |_, _| {}, outcome);
    }

    /// The same; `begin` gets both ends of the client's connection before.
    fn exchanged_while(
        request: &str,
        upstream: OwnedFd,
        begin: impl FnOnce(&TcpStream, &TcpStream),
        outcome: impl FnOnce(TcpStream, Result<Response, RelayError>, &mut BodyReader<'_>),
    ) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, _) = listener.accept().unwrap();
        begin(&client, &socket);
        let Ok(Progress::Complete(head, _)) = parse::head(request.as_bytes()) else {
            panic!("no request: {request}");
        };
        let socket = Arc::new(socket);
        let mut slot = ConnectionSlot::for_test(&socket);
        let ledger = Arc::clone(slot.ledger());
        let mut reader = SocketReader::new(socket);
        let body = BodyReader::new(&mut reader, &head);
        let mut request = Request {
            head,
            body,
            may_block: true,
            slot: &mut slot,
            ledger,
            is_admitted: false,
            closes: false,
            kept: &Arc::default(),
        };
        let forward = Forward {
            target: b"/".to_vec(),
            host: "localhost",
            withheld: &[],
            added: Vec::new(),
            counter: None,
            changes: FieldChanges::default(),
            keep: None,
        };
        let response = exchange(&mut request, Arc::new(upstream), &forward);
        outcome(client, response, &mut request.body);
    }

    /// The same with a client that reads nothing and a server that sends `beginning`, then `rest` for
    /// ever.
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

    fn takeover(response: Result<Response, RelayError>) -> Box<dyn Takeover> {
        match response.unwrap().body {
            Body::Takeover(takeover) => takeover,
            _ => panic!("no response to be relayed"),
        }
    }

    #[test]
    fn a_client_that_takes_nothing_of_a_response_is_given_up() {
        let head = "HTTP/1.1 200 OK\r\n\r\n";
        with_deaf_client("GET / HTTP/1.1\r\n\r\n", head, "x", |response, body| {
            let mut client = body.client_writer();
            let error = takeover(response).run(&mut client, body).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        });
    }

    /// It may serve one connection at a time.
    #[test]
    fn a_server_is_released_while_the_client_has_not_taken_the_answer() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let (told, is_released) = channel();
        let server = thread::spawn(move || {
            let _ = far.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            let mut received = Vec::new();
            let _ = far.read_to_end(&mut received);
            let _ = told.send(());
        });
        let request = "GET / HTTP/1.1\r\n\r\n";
        exchanged(request, near.into(), |mut client, response, body| {
            // Of an answer before; no socket takes as much at once.
            let before = vec![b'x'; 32 << 20];
            let mut stream = body.client_writer();
            stream.push_raw(&before);
            let reading = thread::spawn(move || {
                is_released.recv().unwrap();
                let mut received = Vec::new();
                let _ = client.read_to_end(&mut received);
                received
            });
            takeover(response).run(&mut stream, body).unwrap();
            let _ = shutdown(stream.descriptor().as_raw_fd(), Shutdown::Both);
            let received = reading.join().unwrap();
            assert_eq!(received.len(), before.len() + 2);
        });
        server.join().unwrap();
    }

    #[test]
    fn a_client_that_takes_nothing_of_a_tunnel_is_given_up() {
        let request = "GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n";
        let head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n";
        with_deaf_client(request, head, "x", |response, body| {
            assert_eq!(response.as_ref().unwrap().status, 101);
            let mut client = body.client_writer();
            let error = takeover(response).run(&mut client, body).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        });
    }

    /// The kernel reports a reset once. Here it reports it to the side that sends the request: the
    /// response that is read afterwards seems to end in order.
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
            let result = takeover(response).run(&mut stream, body);
            let _ = shutdown(stream.descriptor().as_raw_fd(), Shutdown::Both);
            reading.join().unwrap();
            assert!(result.is_err(), "half a response looks whole");
        });
    }
}
