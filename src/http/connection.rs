//! One connection from accept to close, and the only code that frames a response.
//!
//! The rule that keeps a connection in step: a further request is read only if the last one's body
//! was read to its end and its response was sent as promised. Anything else closes.

use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};

use super::input::{BODY_LIMIT, Input};
use super::parse::Framing;
use super::request::{BodyReader, Request};
use super::response::{Body, Refusal, Response, reason};
use super::stream::{Disconnected, StreamWriter};
use super::{Handler, MAX_DRAINED_BYTES};
use crate::logging;
use crate::sys::{Events, PollEntry, poll};

/// A client that takes nothing for so long, with data waiting for it, is given up. Shorter in unit
/// tests, which wait for it.
pub(super) const SEND_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 300 });

/// One read and one write of a file that is sent.
const FILE_BYTES: usize = 256 * 1024;

/// Serves requests until the connection ends, one way or the other; without `keep`, one of them.
pub(super) fn serve(socket: TcpStream, handler: &dyn Handler, keep: bool) {
    // A socket that refuses these has been reset already.
    if socket.set_read_timeout(Some(BODY_LIMIT)).is_err()
        || socket.set_write_timeout(Some(SEND_LIMIT)).is_err()
    {
        return;
    }
    let socket = Arc::new(socket);
    let mut input = Input::new(Arc::clone(&socket));
    loop {
        let head = match input.read_head() {
            Ok(Some(head)) => head,
            Ok(None) => return,
            Err(error) => {
                let refusal = Refusal::from(error);
                logging::debug(format_args!(
                    "refused a request: {} {}",
                    refusal.status, refusal.text
                ));
                let plan = Plan {
                    is_head: false,
                    http_1_1: true,
                    keep_alive: false,
                };
                let _ = send_response(&socket, refusal.into(), plan, None);
                linger(&socket);
                return;
            }
        };
        let begun = Instant::now();
        let body = BodyReader::new(&mut input, &head);
        let mut request = Request {
            head,
            body,
            may_last: keep,
        };
        let answer = catch_unwind(AssertUnwindSafe(|| handler.handle(&mut request)));
        let panicked = answer.is_err();
        let response = answer.unwrap_or_else(|_| {
            Refusal::new(
                500,
                "internal",
                "the server failed to handle this request; its log says where",
            )
            .into()
        });
        let Request { head, mut body, .. } = request;
        logging::debug(format_args!(
            "{} {} {} in {} us",
            head.method,
            logging::quoted(&head.path),
            response.status,
            begun.elapsed().as_micros()
        ));
        let plan = Plan {
            is_head: head.method == "HEAD",
            http_1_1: head.minor_version == 1,
            keep_alive: keep
                && head.keep_alive
                && body.is_drainable()
                && !panicked
                && !matches!(response.body, Body::Tunnel(_)),
        };
        if let Err(error) = send_response(&socket, response, plan, Some(&mut body)) {
            logging::debug(format_args!("gave a connection up: {error}"));
            return;
        }
        if !plan.keep_alive || !body.drain() {
            linger(&socket);
            return;
        }
    }
}

/// How a response is to be framed.
#[derive(Clone, Copy)]
struct Plan {
    /// The request was HEAD: everything but the body.
    is_head: bool,
    /// The client understands chunks.
    http_1_1: bool,
    /// The connection goes on afterwards.
    keep_alive: bool,
}

/// Sends a response; an error means that the connection cannot go on. What is relayed goes on with
/// the request's body meanwhile.
fn send_response(
    socket: &Arc<TcpStream>,
    response: Response,
    plan: Plan,
    request_body: Option<&mut BodyReader<'_>>,
) -> io::Result<()> {
    let Response {
        status,
        headers,
        body,
        held,
    } = response;
    let mut head = Vec::with_capacity(256);
    match &body {
        Body::Relayed(relay) => relay.append_head(&mut head),
        Body::Tunnel(tunnel) => tunnel.append_head(&mut head),
        _ => append_head(&mut head, status, reason(status).as_bytes()),
    }
    for (name, value) in headers {
        write!(head, "{name}: {value}\r\n")?;
    }
    let framing = match &body {
        Body::Empty if status == 204 => Framing::None,
        Body::Empty => Framing::Length(0),
        Body::Bytes(bytes) => Framing::Length(bytes.len() as u64),
        Body::File { length, .. } => Framing::Length(*length),
        Body::Reader(_) | Body::Stream(_) => Framing::Chunked,
        Body::Relayed(relay) => relay.framing(),
        Body::Tunnel(_) => Framing::None,
    };
    // A client of HTTP/1.0 learns the end from the close.
    let chunked = plan.http_1_1 && framing == Framing::Chunked;
    match framing {
        Framing::Length(length) => write!(head, "Content-Length: {length}\r\n")?,
        Framing::Chunked if chunked => {
            head.extend_from_slice(b"Transfer-Encoding: chunked\r\n");
        }
        Framing::Chunked | Framing::None => {}
    }
    if !plan.keep_alive && !matches!(body, Body::Tunnel(_)) {
        head.extend_from_slice(b"Connection: close\r\n");
    }
    head.extend_from_slice(b"\r\n");
    match body {
        Body::Relayed(relay) => {
            let mut stream = StreamWriter::new(Arc::clone(socket), head, chunked);
            let request_body = request_body.ok_or(io::ErrorKind::InvalidInput)?;
            let result = relay.run(&mut stream, request_body);
            if result.is_err() && framing == Framing::Chunked && !chunked {
                // Where the close is the end, only a reset says that this is not it.
                let now = nix::libc::linger {
                    l_onoff: 1,
                    l_linger: 0,
                };
                let _ = setsockopt(socket, sockopt::Linger, &now);
            }
            result?;
        }
        Body::Tunnel(tunnel) => {
            let mut stream = StreamWriter::new(Arc::clone(socket), head, false);
            let request_body = request_body.ok_or(io::ErrorKind::InvalidInput)?;
            tunnel.run(&mut stream, request_body.connection());
        }
        _ if plan.is_head => send_both(socket, &head, &[])?,
        Body::Empty => send_both(socket, &head, &[])?,
        Body::Bytes(bytes) => send_both(socket, &head, &bytes)?,
        Body::File {
            file,
            length,
            start,
        } => send_file(socket, &head, file, length, &start)?,
        Body::Reader(source) => send_reader(socket, head, source, chunked)?,
        Body::Stream(write) => {
            let mut stream = StreamWriter::new(Arc::clone(socket), head, chunked);
            write(&mut stream);
            stream.finish();
            send_rest(&mut stream)?;
        }
    }
    drop(held);
    Ok(())
}

/// Begins a head: of a response, or of an interim one.
pub(super) fn append_head(out: &mut Vec<u8>, status: u16, reason: &[u8]) {
    out.extend_from_slice(format!("HTTP/1.1 {status} ").as_bytes());
    out.extend_from_slice(reason);
    out.extend_from_slice(b"\r\n");
}

/// One system call for the usual small answer.
fn send_both(socket: &TcpStream, head: &[u8], body: &[u8]) -> io::Result<()> {
    send_slices(socket, &mut [IoSlice::new(head), IoSlice::new(body)])
}

fn send_slices(mut socket: &TcpStream, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
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

/// Sends the head and exactly `length` bytes. The head takes its place in the first block: clients
/// read in blocks too, and would read twice as often if every one of theirs straddled two.
fn send_file(
    socket: &TcpStream,
    head: &[u8],
    mut file: File,
    length: u64,
    start: &[u8],
) -> io::Result<()> {
    let mut left = length - start.len() as u64;
    let mut buffer = vec![0; FILE_BYTES.min(usize::try_from(left).unwrap_or(FILE_BYTES))];
    let (mut head, mut start) = (head, start);
    loop {
        let room = FILE_BYTES.saturating_sub(head.len() + start.len());
        let most = room
            .min(buffer.len())
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = match file.read(&mut buffer[..most]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read,
        };
        let block = &buffer[..*read.as_ref().unwrap_or(&0)];
        let mut slices = [head, start, block].map(IoSlice::new);
        send_slices(socket, &mut slices)?;
        left -= block.len() as u64;
        if left == 0 {
            return Ok(());
        }
        if read? == 0 && most > 0 {
            // Shorter than promised: only closing can tell the client.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (head, start) = (&[], &[]);
    }
}

fn send_reader(
    socket: &Arc<TcpStream>,
    head: Vec<u8>,
    mut source: Box<dyn Read + Send>,
    chunked: bool,
) -> io::Result<()> {
    let mut stream = StreamWriter::new(Arc::clone(socket), head, chunked);
    let mut buffer = vec![0; FILE_BYTES];
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

/// Sends what is buffered, at the client's pace.
fn send_rest(stream: &mut StreamWriter) -> io::Result<()> {
    let gone = |Disconnected| io::Error::from(io::ErrorKind::ConnectionReset);
    stream.flush().map_err(gone)?;
    while !stream.is_flushed() {
        if !poll(
            &mut [PollEntry::new(stream.descriptor(), Events::WRITABLE)],
            Some(SEND_LIMIT),
        ) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.flush().map_err(gone)?;
    }
    Ok(())
}

/// Closes so that the answer arrives although the client may still be sending: a plain close with
/// unread bytes is a reset, which may overtake the answer (RFC 9112 section 9.6). A client that is
/// done closes at once, and so costs nothing.
fn linger(mut socket: &TcpStream) {
    if socket.shutdown(Shutdown::Write).is_err() {
        return;
    }
    let deadline = Instant::now() + Duration::from_secs(1);
    let mut scratch = [0; 4096];
    let mut drained = 0;
    while drained <= MAX_DRAINED_BYTES {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero()
            || !poll(
                &mut [PollEntry::new(socket.as_fd(), Events::READABLE)],
                Some(left),
            )
        {
            return;
        }
        match socket.read(&mut scratch) {
            Ok(0) | Err(_) => return,
            Ok(count) => drained += count as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    struct Fragile;

    impl Handler for Fragile {
        fn handle(&self, request: &mut Request<'_>) -> Response {
            assert_ne!(request.head.path, b"/panic", "as the test wants it");
            Response::json(&"fine")
        }
    }

    fn ask(listener: &TcpListener, requests: &str) -> String {
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, _) = listener.accept().unwrap();
        let server = thread::spawn(move || serve(socket, &Fragile, true));
        client.write_all(requests.as_bytes()).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        server
            .join()
            .expect("the connection's thread outlives a panic");
        answer
    }

    #[test]
    fn a_panic_costs_one_request_and_its_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let answer = ask(
            &listener,
            "GET /panic HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n",
        );
        assert!(answer.starts_with("HTTP/1.1 500 "), "{answer}");
        assert!(answer.contains("Connection: close"), "{answer}");
        assert!(!answer.contains("fine"), "{answer}");
        let answer = ask(&listener, "GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n");
        assert_eq!(answer.matches("\"fine\"").count(), 2, "{answer}");
    }
}
