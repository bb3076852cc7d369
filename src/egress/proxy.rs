//! The proxy behind an egress listener: HTTP/1.1 with `CONNECT` and absolute targets (RFC 9110, RFC 9112), SOCKS 5, and
//! connections that were redirected here.
//!
//! Requests are parsed and framed as strictly as those of clients. A refusal names the rule, so that whoever reads the
//! output of a program knows what to add.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::{MsgFlags, recv, setsockopt, sockopt};

use super::connect::{self, ConnectError};
use super::dns::Question;
use super::listener::EgressListener;
use super::{Exits, redirect, resolver, socks};
use crate::fault;
use crate::http::parse::Framing;
use crate::http::reader::SocketReader;
use crate::http::slots::ConnectionSlot;
use crate::http::stream::StreamWriter;
use crate::http::{Handler, Refusal, Request, Response, connection};
use crate::relay::{
    Account, FieldChanges, Forward, RelayError, connect_through, connected, exchange,
};
use crate::spec::network::{Host, host_and_port};
use crate::threads::panics::contain;
use crate::threads::priority::{BackgroundTurn, PacedRequest};

/// How long a client may take for its first byte, and for each part of a SOCKS request.
const GREETING_LIMIT: Duration = Duration::from_secs(10);

/// Closes a socket by a reset.
const RESET: libc::linger = libc::linger {
    l_onoff: 1,
    l_linger: 0,
};

/// Header fields that are for the proxy.
const WITHHELD: [&str; 1] = ["proxy-authorization"];

/// The port of a plain request that names none.
const HTTP_PORT: u16 = 80;

/// Serves a connection of a command to its end.
pub(super) fn serve(
    socket: &Arc<TcpStream>,
    slot: ConnectionSlot,
    exits: Arc<Exits>,
    listener: Arc<EgressListener>,
) {
    if socket.set_read_timeout(Some(GREETING_LIMIT)).is_err() {
        return;
    }
    let mut first = [0];
    let count = recv(socket.as_raw_fd(), &mut first, MsgFlags::MSG_PEEK);
    if count != Ok(1) {
        return;
    }
    let is_transparent = listener.filter().is_transparent;
    let proxy = Proxy { exits, listener };
    let serve = match first {
        [socks::VERSION] => Proxy::serve_socks,
        [redirect::MARK] if is_transparent => Proxy::serve_redirected,
        _ => return connection::serve(socket, slot, &proxy, true),
    };
    let work = Arc::clone(&proxy.exits.ledger.work);
    let is_charged = !proxy.exits.ledger.is_whole();
    let turn = BackgroundTurn::of_this_thread(&work);
    let paced = PacedRequest::default();
    if is_charged {
        PacedRequest::pace(&work);
    }
    // The connection is closed, whatever has become of it.
    let _ = contain(|| serve(&proxy, socket));
    drop((paced, proxy));
    if is_charged && let Some(ended) = turn.end() {
        ended.pay_for(&work, true);
    }
    drop(slot);
}

struct Proxy {
    exits: Arc<Exits>,
    listener: Arc<EgressListener>,
}

impl Handler for Proxy {
    fn handle(&self, request: &mut Request<'_>) -> Response {
        self.answer(request).unwrap_or_else(Response::from)
    }

    fn is_proxy(&self) -> bool {
        true
    }
}

impl Proxy {
    fn account(&self) -> Account {
        Account {
            ledger: Arc::clone(&self.exits.ledger),
            counter: Some(Arc::clone(&self.exits.egress.moved)),
        }
    }

    fn answer(&self, request: &mut Request<'_>) -> Result<Response, Refusal> {
        fault::point("way-out");
        let is_connect = request.head.method == "CONNECT";
        let authority = request.head.authority.as_deref();
        let authority = authority.filter(|_| !request.head.is_https);
        let authority = authority.and_then(|authority| std::str::from_utf8(authority).ok());
        let Some((host, port)) = authority.and_then(host_and_port) else {
            let text = "this is the proxy of a sandbox's commands: it takes CONNECT host:port, requests for http:// URLs, \
                        and SOCKS 5; a host is a name, four decimal numbers, or an IPv6 address in brackets";
            return Err(Refusal::new(400, "bad_request", text));
        };
        if is_connect {
            let has_body = !matches!(request.head.framing, Framing::None | Framing::Length(0));
            let Some(port) = port.filter(|_| !has_body) else {
                let text = "CONNECT takes a host with a port, and has no body";
                return Err(Refusal::new(400, "bad_request", text));
            };
            let socket = connect::open(&self.exits, &self.listener, &host, port);
            let socket = socket.map_err(|failure| refusal(&failure, &host, port))?;
            return Ok(connected(socket.into(), self.account()));
        }
        self.forward(request, &host, port)
    }

    /// Forwards a plain request.
    fn forward(
        &self,
        request: &mut Request<'_>,
        host: &Host,
        port: Option<u16>,
    ) -> Result<Response, Refusal> {
        let number = port.unwrap_or(HTTP_PORT);
        let opened = connect::open_for_request(&self.exits, &self.listener, host, number);
        let (socket, upstream) = opened.map_err(|failure| refusal(&failure, host, number))?;
        let authority = port.map_or_else(|| host.to_string(), |port| format!("{host}:{port}"));
        let mut target = Vec::new();
        let mut added = Vec::new();
        if let Some(upstream) = upstream {
            target.extend_from_slice(format!("http://{authority}").as_bytes());
            let credentials = connect::proxy_authorization(upstream);
            added.extend(credentials.map(|value| ("Proxy-Authorization", value)));
        }
        target.extend_from_slice(&request.head.path);
        if let Some(query) = &request.head.query {
            target.push(b'?');
            target.extend_from_slice(query);
        }
        let forward = Forward {
            target,
            host: &authority,
            withheld: &WITHHELD,
            added,
            counter: Some(Arc::clone(&self.exits.egress.moved)),
            changes: FieldChanges::default(),
            keep: None,
        };
        let socket = Arc::new(socket.into());
        exchange(request, socket, &forward).map_err(|error| match error {
            RelayError::Client(error) => error.into(),
            RelayError::Upstream(text) | RelayError::NoAnswer(text) => Refusal::new(
                502,
                "bad_response",
                format!("{authority} cannot be understood: {text}"),
            ),
        })
    }

    fn serve_socks(&self, socket: &Arc<TcpStream>) -> std::io::Result<()> {
        let Some((host, port)) = socks::read_request(&mut &**socket)? else {
            return Ok(());
        };
        match connect::open(&self.exits, &self.listener, &host, port) {
            Ok(server) => {
                socks::reply(&**socket, socks::Reply::Succeeded)?;
                self.join(socket, server)
            }
            Err(failure) => socks::reply(&**socket, reply_to(&failure)),
        }
    }

    /// Serves a program without proxy support. A reset is all that tells it of a failure.
    fn serve_redirected(&self, socket: &Arc<TcpStream>) -> std::io::Result<()> {
        let server = match redirect::read_line(&**socket)? {
            Some((host, port))
                if redirect::asks_for_names(&self.exits, &self.listener, &host, port) =>
            {
                return self.answer_questions(socket);
            }
            Some((host, port)) => connect::open(&self.exits, &self.listener, &host, port).ok(),
            None => None,
        };
        match server {
            Some(server) => self.join(socket, server),
            None => Ok(setsockopt(socket, sockopt::Linger, &RESET)?),
        }
    }

    /// Answers the look-ups of a program that uses TCP for them: each message has its length before it (RFC 1035 section
    /// 4.2.2).
    fn answer_questions(&self, socket: &Arc<TcpStream>) -> std::io::Result<()> {
        let mut client = &**socket;
        loop {
            let mut length = [0; 2];
            client.read_exact(&mut length)?;
            let mut message = vec![0; u16::from_be_bytes(length).into()];
            client.read_exact(&mut message)?;
            let Some(question) = Question::parse(&message) else {
                return Ok(());
            };
            let answer = {
                // The query is sent as the user.
                let _acting = self.exits.act()?;
                resolver::answer(&self.exits, &self.listener, &question)
            };
            let mut answered = question.answered(answer);
            let length = u16::try_from(answered.len()).map_err(std::io::Error::other)?;
            answered.splice(..0, length.to_be_bytes());
            client.write_all(&answered)?;
        }
    }

    /// Moves bytes between a client and its server.
    fn join(&self, client: &Arc<TcpStream>, server: TcpStream) -> std::io::Result<()> {
        let mut from_client = SocketReader::new(Arc::clone(client));
        let mut to_client = StreamWriter::new(Arc::clone(client), Vec::new(), false);
        let account = self.account();
        connect_through(&mut from_client, &mut to_client, server.into(), &account)
    }
}

/// The answer to a request that leads to no connection.
fn refusal(failure: &ConnectError, host: &Host, port: u16) -> Refusal {
    match failure {
        ConnectError::Refused(verdict) => Refusal::new(
            403,
            "not_allowed",
            format!(
                "{host}:{port} is not reached from here: the network of this sandbox refuses it ({})",
                verdict.rule
            ),
        ),
        ConnectError::Unknown(why) => Refusal::new(
            502,
            "unknown_host",
            format!("the address of {host} is not known: {why}"),
        ),
        ConnectError::Unreachable(error) => {
            let text = format!("{host}:{port} does not answer: {error}");
            if error.kind() == ErrorKind::TimedOut {
                Refusal::new(504, "timeout", text)
            } else {
                Refusal::new(502, "unreachable", text)
            }
        }
        ConnectError::Upstream(why) => Refusal::new(502, "bad_proxy", why.clone()),
    }
}

/// The same in SOCKS.
fn reply_to(failure: &ConnectError) -> socks::Reply {
    match failure {
        ConnectError::Refused(_) => socks::Reply::NotAllowed,
        ConnectError::Unreachable(error) if error.kind() == ErrorKind::ConnectionRefused => {
            socks::Reply::Refused
        }
        ConnectError::Unreachable(_) | ConnectError::Unknown(_) => socks::Reply::HostUnreachable,
        ConnectError::Upstream(_) => socks::Reply::Failed,
    }
}
