//! One connection from accept to close, and the only code that frames a response.
//!
//! One rule keeps a connection in step: it serves another request only if the last one's body was read
//! to its end and its response was sent as announced. Everything else closes it.

use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};

use super::kept::KeptSlot;
use super::late::{LateStream, StreamHead};
use super::parse::{Framing, Head, NO_HOST, NO_SLASH, ParseError, at_most};
use super::reader::{BODY_LIMIT, SocketReader};
use super::request::{BodyReader, ReceiveError, Request};
use super::response::{Body, FindAnswer, Refusal, Response, append_status_line, reason};
use super::slots::{ConnectionSlot, FarEnd};
use super::stream::{SEND_LIMIT, StreamWriter};
use crate::limits::ledger::{Item, Ledger};
use crate::sys::{Events, PollEntry, poll};
use crate::threads::panics::contain;
use crate::threads::priority::{BackgroundTurn, EndedRequest, PacedRequest};
use crate::{fault, logging};

/// Size of one read and one write of a file.
const FILE_BYTES: usize = 256 * 1024;

/// The same for a tenant that holds its share of the server's memory.
const LEAST_FILE_BYTES: usize = 8 * 1024;

/// Size of one read of a body of unknown length.
const READER_BYTES: usize = 64 * 1024;

/// What a client may still send after the answer before it is cut off: libraries and proxies often read
/// the answer to an upload only when they have sent all of it.
const LINGER_BYTES: usize = 16 << 20;

/// The same on the spare thread, which does not wait for more.
const SPARE_LINGER_BYTES: usize = 64 * 1024;

/// Time for that. A thread is held meanwhile.
const LINGER_LIMIT: Duration = Duration::from_secs(2);

/// What a server serves.
pub trait Handler: Send + Sync + 'static {
    /// Answers a request. The connection drops what is left unread of the body.
    fn handle(&self, request: &mut Request<'_>) -> Response;

    /// Takes note of a request that was answered with `status` and not by [`Handler::handle`]: its head could not be
    /// parsed or did not arrive in time, or [`Handler::handle`] panicked.
    fn refused(&self, _status: u16) {}

    /// What a user of this machine is charged to before it shows a token: the ledger of the sandbox that has this uid.
    fn ledger_of_user(&self, _uid: u32) -> Option<Arc<Ledger>> {
        None
    }

    /// Whether it is a proxy, which takes targets that are no paths.
    fn is_proxy(&self) -> bool {
        false
    }
}

/// Serves requests until the connection ends; only one if `keep` is false.
pub fn serve(socket: &Arc<TcpStream>, slot: ConnectionSlot, handler: &dyn Handler, keep: bool) {
    // Fails only on a socket that was reset already.
    if socket.set_read_timeout(Some(BODY_LIMIT)).is_err()
        || socket.set_write_timeout(Some(SEND_LIMIT)).is_err()
    {
        return;
    }
    // A panic outside of what answers a request closes the connection.
    let _ = contain(|| serve_requests(socket, slot, handler, keep));
}

fn serve_requests(
    socket: &Arc<TcpStream>,
    mut slot: ConnectionSlot,
    handler: &dyn Handler,
    keep: bool,
) {
    let mut reader = SocketReader::new(Arc::clone(socket));
    slot.begin();
    let kept = Arc::<KeptSlot>::default();
    loop {
        reader.limit_head(slot.deadline());
        let for_much = || slot.ledger_for_much(|user| handler.ledger_of_user(user));
        let first = first_ledger(&slot, handler);
        // Before the head, which may be large.
        let turn = BackgroundTurn::of_this_thread(&first.work);
        let head = reader.read_head(&first, for_much, |client| kept.wait_for(client));
        let Some(head) = head.transpose() else {
            return;
        };
        fault::point("connection");
        match serve_request(&mut reader, &mut slot, head, turn, handler, keep, &kept) {
            Ok(true) => {}
            Ok(false) => {
                kept.clear();
                return if keep {
                    linger(socket, LINGER_LIMIT, LINGER_BYTES);
                } else {
                    // Others wait for the thread: what has arrived is read, so that the close is no reset.
                    linger(socket, Duration::ZERO, SPARE_LINGER_BYTES);
                };
            }
            Err(error) => {
                logging::debug(format_args!("closed a connection: {error}"));
                return;
            }
        }
    }
}

/// Answers one request, or refuses what is not one. Returns whether another may follow; an error means
/// that the client did not get the whole response.
fn serve_request(
    reader: &mut SocketReader,
    slot: &mut ConnectionSlot,
    head: Result<Head, ReceiveError>,
    turn: BackgroundTurn,
    handler: &dyn Handler,
    keep: bool,
    kept: &Arc<KeptSlot>,
) -> io::Result<bool> {
    let begun = Instant::now();
    let socket = &Arc::clone(reader.socket());
    let mut plan = Plan {
        asked: Asked::Body,
        http_1_1: true,
        keep_alive: false,
    };
    let mut ledger = first_ledger(slot, handler);
    let (paced, far_end) = (PacedRequest::default(), slot.far_end());
    // Connections to the proxy of a network are its tenant's from the beginning.
    let mut is_admitted = handler.is_proxy();
    if is_admitted && !ledger.is_whole() {
        PacedRequest::pace(&ledger.work);
    }
    let head = head.and_then(|head| {
        if head.path.is_empty() && !handler.is_proxy() {
            return Err(ParseError::Malformed(NO_SLASH).into());
        }
        // Programs that use a proxy name the host in the target, and some of them nowhere else.
        if head.minor_version == 1 && head.header("host").is_none() && !handler.is_proxy() {
            return Err(ParseError::Malformed(NO_HOST).into());
        }
        Ok(head)
    });
    let (response, mut body) = match head {
        Err(error) => {
            let refusal = Refusal::from(error);
            logging::debug(format_args!(
                "refused a request: {} {}",
                refusal.status, refusal.text
            ));
            handler.refused(refusal.status);
            (refusal.into(), BodyReader::unreadable(reader))
        }
        Ok(head) => {
            let body = BodyReader::new(reader, &head);
            let mut request = Request {
                head,
                body,
                may_block: keep,
                slot,
                ledger: Arc::clone(&ledger),
                is_admitted,
                closes: false,
                kept,
            };
            let response = contain(|| handler.handle(&mut request));
            let has_panicked = response.is_err();
            let response = response.unwrap_or_else(|_| {
                handler.refused(500);
                failed()
            });
            ledger = request.ledger;
            is_admitted = request.is_admitted;
            let Request {
                head, body, slot, ..
            } = request;
            if !is_admitted {
                // A proxy sends requests of others over the connection.
                slot.give_back();
            }
            let closes = request.closes || slot.deadline().is_some();
            plan.asked = match &*head.method {
                "HEAD" => Asked::Head,
                "CONNECT" => Asked::Tunnel,
                _ => Asked::Body,
            };
            plan.http_1_1 = head.minor_version == 1;
            plan.keep_alive =
                keep && !closes && !has_panicked && head.keep_alive && body.is_drainable();
            logging::debug(format_args!(
                "{} {} {} in {} us",
                head.method,
                logging::quoted_path(&head.path),
                response.status,
                begun.elapsed().as_micros()
            ));
            (response, body)
        }
    };
    plan.keep_alive &= !plan.is_tunnel(response.status);
    // A request that was refused has not taken it.
    kept.clear();
    let may_go_on = send_response(socket, response, plan, &mut body, &ledger);
    drop(paced);
    if let Some(ended) = turn.end() {
        let tenant = Some(ledger).filter(|_| is_admitted);
        charge(ended, tenant, &far_end, handler, keep);
    }
    Ok(may_go_on? && plan.keep_alive && body.drain())
}

/// Charges what a request took to the tenant that it was admitted for. What shows no token is nobody's, unless it comes from
/// a tenant's own program. That never shows one, or asks the proxy of its network, so it pays at once if it `may_pause`.
fn charge(
    ended: EndedRequest,
    tenant: Option<Arc<Ledger>>,
    far_end: &FarEnd,
    handler: &dyn Handler,
    may_pause: bool,
) {
    let pays_later = tenant.is_some() && !handler.is_proxy();
    let tenant = tenant.or_else(|| far_end.tenant(|user| handler.ledger_of_user(user)));
    match tenant.filter(|ledger| !ledger.is_whole()) {
        Some(ledger) if pays_later => ended.leave_to(&ledger.work),
        Some(ledger) => ended.pay_for(&ledger.work, may_pause),
        None => {}
    }
}

/// What is charged for a request before it shows a token.
fn first_ledger(slot: &ConnectionSlot, handler: &dyn Handler) -> Arc<Ledger> {
    let ledger = if handler.is_proxy() {
        slot.ledger()
    } else {
        slot.peer_ledger()
    };
    Arc::clone(ledger)
}

/// The answer of a handler that has panicked.
fn failed() -> Response {
    Refusal::panicked().into()
}

/// What a request asks for, by its method.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// HEAD: no body is sent.
    Head,
    /// CONNECT: success turns the connection into a tunnel.
    Tunnel,
    Body,
}

/// What the framing of a response depends on besides the response.
#[derive(Clone, Copy)]
struct Plan {
    asked: Asked,
    /// The client understands chunks.
    http_1_1: bool,
    /// Another request may follow.
    keep_alive: bool,
}

impl Plan {
    /// Whether the connection is another protocol's after a response: its head frames no body (RFC 9110 section 9.3.6).
    fn is_tunnel(self, status: u16) -> bool {
        status == 101 || (self.asked == Asked::Tunnel && (200..300).contains(&status))
    }
}

/// Frames and sends a response. False if it was another one in its place, and the connection ends.
fn send_response(
    socket: &Arc<TcpStream>,
    mut response: Response,
    plan: Plan,
    request: &mut BodyReader<'_>,
    ledger: &Arc<Ledger>,
) -> io::Result<bool> {
    if let Err(limit) = response.charge_to(ledger) {
        response = Refusal::from(limit).into();
    }
    let Response {
        status,
        headers,
        body,
        held,
        charge,
    } = response;
    let framing = match &body {
        Body::Empty if status == 204 => Framing::None,
        Body::Empty => Framing::Length(0),
        Body::Bytes(bytes) => Framing::Length(bytes.len() as u64),
        Body::File { length, .. } => Framing::Length(*length),
        Body::Reader(_) | Body::Stream(_) | Body::Late(_) => Framing::Chunked,
        Body::Takeover(takeover) => takeover.framing(),
    };
    let chunked = plan.http_1_1 && framing == Framing::Chunked;
    // A body of unknown length ends for a client of HTTP/1.0 when the connection does.
    let ends_by_close = framing == Framing::Chunked && !chunked;
    let mut head = Vec::with_capacity(256);
    match &body {
        Body::Takeover(takeover) => takeover.append_head(&mut head),
        _ => append_status_line(&mut head, status, reason(status).as_bytes()),
    }
    for (name, value) in &headers {
        write!(head, "{name}: {value}\r\n")?;
    }
    match framing {
        Framing::Length(length) => write!(head, "Content-Length: {length}\r\n")?,
        Framing::Chunked if chunked => {
            head.extend_from_slice(b"Transfer-Encoding: chunked\r\n");
        }
        Framing::Chunked | Framing::None => {}
    }
    // After this field, clients such as undici take chunks that break off for all of the body (RFC 9112 section 9.6 only
    // recommends it).
    if !plan.keep_alive && !plan.is_tunnel(status) && !chunked {
        head.extend_from_slice(b"Connection: close\r\n");
    }
    head.extend_from_slice(b"\r\n");
    let stream = |head| StreamWriter::new(Arc::clone(socket), head, chunked);
    let charged = |head| stream(head).charged_to(ledger);
    let mut is_replaced = false;
    let send = || match body {
        Body::Takeover(takeover) => takeover.run(&mut stream(head), request),
        _ if plan.asked == Asked::Head => send_slices(socket, [&head]),
        Body::Empty => send_slices(socket, [&head]),
        Body::Bytes(bytes) => send_slices(socket, [&head, &bytes]),
        Body::File {
            file,
            length,
            start,
        } => send_file(socket, &head, file, length, &start, ledger),
        // It charges its pieces itself, and so does a takeover.
        Body::Reader(source) => send_reader(stream(head), source, ledger),
        Body::Stream(write) => {
            let mut stream = charged(head);
            write(&mut stream);
            stream.finish();
            send_rest(&mut stream)
        }
        Body::Late(find) => {
            head.truncate(head.len() - 2);
            let head = StreamHead {
                lines: head,
                chunked,
            };
            is_replaced = send_late(socket, head, headers, find, plan, request, ledger)?;
            Ok(())
        }
    };
    // After a panic the client has less than was announced, which only a close can tell it.
    let result = contain(send).unwrap_or_else(|_| Err(io::Error::other("panicked")));
    if result.is_err() && ends_by_close {
        reset_on_close(socket);
    }
    drop((held, charge));
    result.map(|()| !is_replaced)
}

/// Sends the late answer: the rest of its stream, or all of it with these header fields besides its own. True if the client got
/// another answer in its place.
fn send_late(
    socket: &Arc<TcpStream>,
    head: StreamHead,
    headers: Vec<(&'static str, String)>,
    find: FindAnswer,
    plan: Plan,
    request: &mut BodyReader<'_>,
    ledger: &Arc<Ledger>,
) -> io::Result<bool> {
    let mut client = LateStream::new(socket, head, plan.http_1_1, ledger);
    let found = match contain(|| find(&mut client)) {
        Ok(found) => found,
        Err(panicked) => {
            if client.has_begun() {
                panicked.resume();
            }
            let keep_alive = false;
            let plan = Plan { keep_alive, ..plan };
            return send_response(socket, failed(), plan, request, ledger).map(|_| true);
        }
    };
    match (found, client.into_stream()) {
        (Some(mut response), None) => {
            response.headers.extend(headers);
            send_response(socket, response, plan, request, ledger).map(|_| false)
        }
        (None, Some(mut stream)) => {
            stream.finish();
            send_rest(&mut stream).map(|()| false)
        }
        // The client has disconnected, or gets no second answer.
        (None, None) | (Some(_), Some(_)) => Err(io::ErrorKind::ConnectionAborted.into()),
    }
}

/// Makes the close a reset, so that a client that waits for the close does not take half a body for
/// the whole.
fn reset_on_close(socket: &TcpStream) {
    let at_once = nix::libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    let _ = setsockopt(socket, sockopt::Linger, &at_once);
}

/// Sends all parts, with one system call if they are small.
fn send_slices<const N: usize>(mut socket: &TcpStream, parts: [&[u8]; N]) -> io::Result<()> {
    let mut slices = &mut parts.map(IoSlice::new)[..];
    // Drops empty parts.
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match socket.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => IoSlice::advance_slices(&mut slices, count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sends the head and exactly `length` bytes. The head counts for the first block, so that all blocks
/// begin at multiples of their size: a client that reads in blocks then reads half as often.
fn send_file(
    socket: &TcpStream,
    head: &[u8],
    mut file: File,
    length: u64,
    start: &[u8],
    ledger: &Arc<Ledger>,
) -> io::Result<()> {
    let mut left = length - start.len() as u64;
    let wanted = at_most(left, FILE_BYTES);
    let charge = ledger.charge_up_to(Item::Responses, wanted, wanted.min(LEAST_FILE_BYTES));
    let mut buffer = vec![0; charge.bytes()];
    let block = if buffer.len() == wanted {
        FILE_BYTES
    } else {
        buffer.len()
    };
    let (mut head, mut start) = (head, start);
    loop {
        let room = block - (head.len() + start.len()) % block;
        let most = at_most(left, room.min(buffer.len()));
        let read = match file.read(&mut buffer[..most]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read,
        };
        let block = &buffer[..*read.as_ref().unwrap_or(&0)];
        send_slices(socket, [head, start, block])?;
        left -= block.len() as u64;
        if left == 0 {
            return Ok(());
        }
        if read? == 0 && most > 0 {
            // The file is shorter than announced. Only closing can tell the client.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (head, start) = (&[], &[]);
    }
}

fn send_reader(
    mut stream: StreamWriter,
    mut source: Box<dyn Read + Send>,
    ledger: &Arc<Ledger>,
) -> io::Result<()> {
    // Once read, and once framed.
    let charge = ledger.charge_up_to(Item::Responses, 2 * READER_BYTES, LEAST_FILE_BYTES);
    let mut buffer = vec![0; charge.bytes() / 2];
    loop {
        let count = match source.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        stream.push(|out| out.extend_from_slice(&buffer[..count]));
        send_rest(&mut stream)?;
    }
    stream.finish();
    send_rest(&mut stream)
}

/// Sends what is buffered, as fast as the client takes it.
fn send_rest(stream: &mut StreamWriter) -> io::Result<()> {
    loop {
        stream.try_flush()?;
        if stream.is_flushed() {
            return Ok(());
        }
        let mut writable = [PollEntry::new(stream.descriptor(), Events::WRITABLE)];
        if !poll(&mut writable, Some(SEND_LIMIT)) {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

/// Closes so that the answer reaches a client that is still sending. Closing immediately with unread bytes
/// would send a reset, which can overtake the answer (RFC 9112 section 9.6). So the sending side is
/// shut down first, and what still arrives is dropped, until the client closes or a limit is reached.
/// Not inlined: its buffer would be on the stack of every idle connection.
#[inline(never)]
fn linger(mut socket: &TcpStream, limit: Duration, bytes: usize) {
    if socket.shutdown(Shutdown::Write).is_err() {
        return;
    }
    let deadline = Instant::now() + limit;
    let mut scratch = [0; 16 * 1024];
    let mut dropped = 0;
    while dropped < bytes {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut readable = [PollEntry::new(socket.as_fd(), Events::READABLE)];
        if !poll(&mut readable, Some(left)) {
            return;
        }
        match socket.read(&mut scratch) {
            Ok(0) | Err(_) => return,
            Ok(count) => dropped += count,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc::{Receiver, channel};
    use std::thread;

    use super::super::slots::{ConnectionSlots, Peer};
    use nix::time::{ClockId, clock_gettime};

    use super::*;
    use crate::limits::ledger::Budget;
    use crate::threads::lock::{Mutex, lock};

    #[derive(Default)]
    struct Fragile {
        refused: Mutex<Vec<u16>>,
    }

    struct Begun(bool);

    impl Read for Begun {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            if std::mem::replace(&mut self.0, true) {
                std::panic::resume_unwind(Box::new("as the test wants it"));
            }
            out[..5].copy_from_slice(b"begun");
            Ok(5)
        }
    }

    impl Handler for Fragile {
        fn handle(&self, request: &mut Request<'_>) -> Response {
            if request.head.path == b"/panic" {
                std::panic::resume_unwind(Box::new("as the test wants it"));
            }
            let is_stream = request.head.path == b"/stream";
            let body = match &*request.head.path {
                b"/begun" => Body::Reader(Box::new(Begun(false))),
                b"/late" | b"/stream" => Body::Late(Box::new(move |stream| {
                    if is_stream {
                        stream.begin("text/plain");
                        stream.push(|out| out.extend_from_slice(b"begun"));
                        stream.flush().unwrap();
                    }
                    std::panic::resume_unwind(Box::new("as the test wants it"))
                })),
                _ => return Response::json(&"fine"),
            };
            Response::new(200, body)
        }

        fn refused(&self, status: u16) {
            lock(&self.refused).push(status);
        }
    }

    /// A handler whose answers no tenant has room for.
    struct Large;

    impl Handler for Large {
        fn handle(&self, request: &mut Request<'_>) -> Response {
            let body = Body::Bytes(vec![b'x'; 1 << 20]);
            request.ledger = crate::limits::ledger::Budget::new(1 << 20).ledger();
            if request.head.path == b"/late" {
                let find = move |_: &mut LateStream| Some(Response::new(200, body));
                return Response::new(200, Body::Late(Box::new(find)));
            }
            Response::new(200, body)
        }
    }

    #[test]
    fn an_answer_without_room_is_a_refusal_and_the_connection_goes_on() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = Arc::new(listener.accept().unwrap().0);
        let request = "GET / HTTP/1.1\r\nHost: h\r\n\r\nGET /late HTTP/1.1\r\nHost: h\r\n\r\n";
        client.write_all(request.as_bytes()).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let slot = ConnectionSlot::for_test(&socket);
        serve(&socket, slot, &Large, true);
        drop(socket);
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert_eq!(answer.matches("HTTP/1.1 503 ").count(), 2, "{answer}");
        assert_eq!(answer.matches("\"over_limit\"").count(), 2, "{answer}");
    }

    /// A handler whose answers take time, as those to a tenant that shows its token first, and then shows none.
    struct Costly {
        tenant: Arc<Ledger>,
        of_user: Option<Arc<Ledger>>,
    }

    impl Handler for Costly {
        fn handle(&self, request: &mut Request<'_>) -> Response {
            request.ledger = Arc::clone(&self.tenant);
            if request.head.path != b"/without" {
                request.admit();
            }
            let mut buffer = [0; 64];
            while request.head.path == b"/body" && request.body.read(&mut buffer).unwrap() > 0 {}
            if request.head.path == b"/body" {
                assert!(self.tenant.work.is_charged(), "before its end");
            }
            let time = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
            let until = time() + Duration::from_millis(20);
            while time() < until {}
            Response::json(&"fine")
        }

        fn ledger_of_user(&self, uid: u32) -> Option<Arc<Ledger>> {
            let own = nix::unistd::geteuid().as_raw();
            self.of_user.clone().filter(|_| uid == own)
        }
    }

    fn tenant() -> Arc<Ledger> {
        crate::limits::ledger::Budget::new(1 << 20).ledger()
    }

    /// Has a request served while the client waits for the answer.
    fn serve_one(handler: &Costly, request: &[u8]) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = Arc::new(listener.accept().unwrap().0);
        thread::scope(|scope| {
            scope.spawn(|| {
                client.write_all(request).unwrap();
                let mut answer = String::new();
                client.read_to_string(&mut answer).unwrap();
                assert!(answer.contains(" 200 "), "{answer}");
            });
            let slot = ConnectionSlot::for_test(&socket);
            serve(&socket, slot, handler, true);
            drop(socket);
        });
    }

    /// Over a connection that a proxy keeps, requests of others follow those of a tenant.
    #[test]
    fn only_what_a_tenant_was_admitted_for_is_charged_to_it() {
        for (path, is_charged) in [("/with-token", true), ("/without", false)] {
            let tenant = tenant();
            let handler = Costly {
                tenant: Arc::clone(&tenant),
                of_user: None,
            };
            let request = format!("GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
            serve_one(&handler, request.as_bytes());
            let unpaid = tenant.work.unpaid();
            assert_eq!(unpaid >= Duration::from_millis(20), is_charged, "{path}");
            assert_eq!(unpaid.is_zero(), !is_charged, "{path}");
        }
    }

    /// Code of a sandbox can leave its token out.
    #[test]
    fn what_a_tenants_program_asks_for_without_a_token_is_charged_to_the_tenant() {
        let (of_token, of_user) = (tenant(), tenant());
        let handler = Costly {
            tenant: Arc::clone(&of_token),
            of_user: Some(Arc::clone(&of_user)),
        };
        let request = "GET /without HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
        serve_one(&handler, request.as_bytes());
        assert!(of_user.work.is_charged() && !of_token.work.is_charged());
    }

    /// It may never end.
    #[test]
    fn a_request_is_charged_while_it_lasts() {
        let handler = Costly {
            tenant: tenant(),
            of_user: None,
        };
        let head = "POST /body HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
        let request = format!("{head}{}0\r\n\r\n", "1\r\nx\r\n".repeat(100_000));
        serve_one(&handler, request.as_bytes());
    }

    /// What a client gets, and what tells of the refused requests once the connection is served.
    fn begin(requests: &str) -> (io::Result<String>, Receiver<Vec<u16>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, _) = listener.accept().unwrap();
        let (served, is_served) = channel();
        thread::spawn(move || {
            let handler = Fragile::default();
            let socket = Arc::new(socket);
            let slot = ConnectionSlot::for_test(&socket);
            serve(&socket, slot, &handler, true);
            let refused = std::mem::take(&mut *lock(&handler.refused));
            served.send(refused).unwrap();
        });
        client.write_all(requests.as_bytes()).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        let read = client.read_to_string(&mut answer);
        (read.map(|_| answer), is_served)
    }

    fn ask(requests: &str) -> (String, Vec<u16>) {
        let (answer, is_served) = begin(requests);
        (answer.unwrap(), is_served.recv().unwrap())
    }

    #[test]
    fn the_handler_is_told_of_requests_that_cannot_be_parsed() {
        let long_target = format!("GET /{} HTTP/1.1\r\nHost: h\r\n\r\n", "a".repeat(20_000));
        let long_head = format!(
            "GET / HTTP/1.1\r\nHost: h\r\nA: {}\r\n\r\n",
            "a".repeat(70_000)
        );
        for (request, status) in [
            ("GET / HTTP/1.1\r\nHost: h\r\nA : b\r\n\r\n", 400),
            (&long_target, 414),
            ("PUT / HTTP/1.1\r\nHost: h\r\nExpect: x\r\n\r\n", 417),
            ("GET / HTTP/1.1\r\n\r\n", 400),
            ("GET http://h/ HTTP/1.1\r\n\r\n", 400),
            (&long_head, 431),
        ] {
            let (answer, refused) = ask(&format!("GET / HTTP/1.1\r\nHost: h\r\n\r\n{request}"));
            assert!(answer.contains(&format!("HTTP/1.1 {status} ")), "{answer}");
            assert_eq!(refused, [status]);
        }
    }

    /// Notes the requests and reads no body. What it notes of refused ones may panic, where nothing answers for it.
    #[derive(Default)]
    struct Noting {
        seen: Mutex<Vec<Vec<u8>>>,
        panics: bool,
        ledger: Option<Arc<Ledger>>,
    }

    impl Handler for Noting {
        fn handle(&self, request: &mut Request<'_>) -> Response {
            lock(&self.seen).push(request.head.path.clone());
            Response::json(&"noted")
        }

        fn refused(&self, _: u16) {
            if self.panics {
                std::panic::resume_unwind(Box::new("as the test wants it"));
            }
        }

        fn ledger_of_user(&self, uid: u32) -> Option<Arc<Ledger>> {
            let own = nix::unistd::geteuid().as_raw();
            self.ledger.clone().filter(|_| uid == own)
        }
    }

    /// Serves a client that sends this. Its answer, and how many slots are taken after.
    fn note(handler: &Noting, requests: &[u8]) -> (String, usize) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = Arc::new(listener.accept().unwrap().0);
        client.write_all(requests).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let slots = ConnectionSlots::new(4, Budget::new(1 << 30));
        let slot = slots.take(Peer::User(None), &socket).unwrap();
        assert_eq!(slots.count(), 1);
        serve(&socket, slot, handler, true);
        let taken = slots.count();
        // A slot that was not given back would keep the connection open.
        drop((socket, slots));
        let mut answer = String::new();
        let _ = client.read_to_string(&mut answer);
        (answer, taken)
    }

    #[test]
    fn a_body_that_nobody_reads_is_no_request() {
        let smuggled = "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n";
        let length = smuggled.len();
        let last = "GET /last HTTP/1.1\r\nHost: h\r\n\r\n";
        let post = "POST /first HTTP/1.1\r\nHost: h\r\n";
        let framed = [
            format!("Content-Length: {length}\r\n\r\n{smuggled}"),
            format!("Transfer-Encoding: chunked\r\n\r\n{length:x}\r\n{smuggled}\r\n0\r\n\r\n"),
        ];
        for body in framed {
            let handler = Noting::default();
            let (answer, _) = note(&handler, format!("{post}{body}{last}").as_bytes());
            assert_eq!(
                *lock(&handler.seen),
                [b"/first".to_vec(), b"/last".to_vec()]
            );
            assert_eq!(answer.matches("HTTP/1.1 200 ").count(), 2, "{answer}");
        }
        // One that is too long to be dropped ends the connection.
        let body = smuggled.repeat(3000);
        let request = format!("{post}Content-Length: {}\r\n\r\n{body}{last}", body.len());
        let handler = Noting::default();
        let (answer, _) = note(&handler, request.as_bytes());
        assert_eq!(*lock(&handler.seen), [b"/first".to_vec()]);
        assert!(answer.contains("Connection: close"), "{answer}");
    }

    #[test]
    fn the_slot_is_free_however_a_connection_ends() {
        let fine = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n";
        let handler = Noting::default();
        assert_eq!(note(&handler, fine).1, 0);
        assert_eq!(note(&handler, b"GET / HTTP/1.1\r\n").1, 0, "half a head");
        assert_eq!(note(&handler, b"nonsense\r\n\r\n").1, 0);
        let handler = Noting {
            panics: true,
            ..Noting::default()
        };
        let (answer, taken) = note(&handler, b"nonsense\r\n\r\n");
        assert_eq!((&*answer, taken), ("", 0), "it has panicked");
    }

    #[test]
    fn a_large_head_is_charged_to_the_sandbox_that_sends_it() {
        let field = format!("A: {}\r\n", "a".repeat(20_000));
        let request = format!("GET / HTTP/1.1\r\nHost: h\r\n{field}\r\n");
        let (answer, _) = note(&Noting::default(), request.as_bytes());
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        // The client is a process of this user.
        let handler = Noting {
            ledger: Some(Budget::new(4096).ledger()),
            ..Noting::default()
        };
        let (answer, _) = note(&handler, request.as_bytes());
        if lock(&handler.seen).is_empty() {
            assert!(answer.contains("\"over_limit\""), "{answer}");
        } else {
            let own = TcpListener::bind("127.0.0.1:0").unwrap();
            let known = crate::sys::is_tcp_listening(own.local_addr().unwrap());
            assert!(known.is_err(), "the kernel tells whose a socket is");
        }
        let (answer, _) = note(&handler, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }

    #[test]
    fn a_panic_costs_one_request_and_its_connection() {
        let (answer, refused) =
            ask("GET /panic HTTP/1.1\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 500 "), "{answer}");
        assert!(answer.contains("Connection: close"), "{answer}");
        assert!(answer.contains("\"internal\""), "{answer}");
        assert!(!answer.contains("fine"), "{answer}");
        assert_eq!(refused, [500]);
        // A response that has begun is broken off.
        let (answer, _) =
            ask("GET /begun HTTP/1.1\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n");
        assert!(answer.ends_with("\r\nbegun\r\n"), "{answer}");
        // So that a client that reads until the end of the connection does not take half of it for the whole.
        let broken = begin("GET /begun HTTP/1.0\r\n\r\n").0.unwrap_err();
        assert_eq!(broken.kind(), io::ErrorKind::ConnectionReset);
        // Of one that has not begun the client gets another one, and all of it.
        for version in ["1.1", "1.0"] {
            let late = format!(
                "GET /late HTTP/{version}\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n"
            );
            let (answer, _) = ask(&late);
            assert!(answer.starts_with("HTTP/1.1 500 "), "{answer}");
            assert!(answer.ends_with("\"internal\"}\n"), "{answer}");
        }
        let (answer, _) =
            ask("GET /stream HTTP/1.1\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        assert!(
            !answer.ends_with("0\r\n\r\n") && !answer.contains("fine"),
            "{answer}"
        );
        let (answer, _) = ask("GET / HTTP/1.1\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(answer.matches("\"fine\"").count(), 2, "{answer}");
    }
}
