//! From what a command asks for to a connection: judge, look up, judge again, connect.
//!
//! A name is looked up once, and only if it is allowed. Each address of the answer is judged, and the connection goes
//! to one that was: never to the name, whose answer may be another the second time. With a proxy of the client's own
//! the names are that proxy's to look up, and only addresses that are asked for are judged.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, socket};

use super::listener::EgressListener;
use super::{Exits, leads_here, socks};
use crate::codec::base64;
use crate::http::parse::{self, Progress};
use crate::spec::network::{Address, Host, Protocol, Upstream, Verdict};
use crate::sys::{Events, PollEntry, poll};

/// How long one address may take to answer.
const ADDRESS_LIMIT: Duration = Duration::from_secs(10);

/// How often who waits for an answer looks whether the sandbox has stopped.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// How long all addresses of a name may take, and the client's own proxy.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// Most bytes of the answer of the client's own proxy.
const MAX_ANSWER_BYTES: usize = 16 * 1024;

/// What is said about the port of the server, which no rule opens.
const SERVERS_PORT: &str = "the server's own port";

/// What is said when nothing of the sandbox runs any more.
const NOTHING_RUNS: &str = "the end of the sandbox's processes";

/// Why there is no connection.
#[derive(Debug)]
pub(super) enum ConnectError {
    /// A rule refuses it.
    Refused(Verdict),
    /// The name has no address, or cannot be looked up.
    Unknown(String),
    /// Nobody answers.
    Unreachable(io::Error),
    /// The client's own proxy does not connect; the text says why.
    Upstream(String),
}

/// Decides about a destination and connects to it.
///
/// # Errors
/// As said.
pub(super) fn open(
    exits: &Exits,
    listener: &EgressListener,
    host: &Host,
    port: u16,
) -> Result<TcpStream, ConnectError> {
    let deadline = Instant::now() + CONNECT_LIMIT;
    match route(exits, listener, host, port, deadline)? {
        Route::Direct(addresses) => connect_to_any(exits, &addresses, deadline),
        Route::Through(upstream) => {
            let socket = connect_to_upstream(exits, upstream, deadline)?;
            let mut timed = Timed {
                socket: &socket,
                deadline,
            };
            let handshake = match upstream.protocol {
                Protocol::Http => ask_http(&mut timed, upstream, host, port),
                Protocol::Socks => socks::ask(&mut timed, upstream, host, port),
            };
            handshake.map_err(|error| ConnectError::Upstream(error.to_string()))?;
            check_runs(exits)?;
            let _ = socket.set_read_timeout(None);
            Ok(socket)
        }
    }
}

/// How a plain request gets to its server: over this connection, to the server itself or to the client's own proxy.
///
/// # Errors
/// As for [`open`].
pub(super) fn open_for_request<'g>(
    exits: &Exits,
    listener: &'g EgressListener,
    host: &Host,
    port: u16,
) -> Result<(TcpStream, Option<&'g Upstream>), ConnectError> {
    match &listener.filter().upstream {
        Some(upstream) if upstream.protocol == Protocol::Http => {
            let deadline = Instant::now() + CONNECT_LIMIT;
            route(exits, listener, host, port, deadline)?;
            let socket = connect_to_upstream(exits, upstream, deadline)?;
            let _ = socket.set_read_timeout(None);
            Ok((socket, Some(upstream)))
        }
        _ => Ok((open(exits, listener, host, port)?, None)),
    }
}

/// Where an allowed connection leads.
enum Route<'g> {
    /// To one of these addresses, all of which were judged.
    Direct(Vec<SocketAddr>),
    /// To the client's own proxy.
    Through(&'g Upstream),
}

/// Decides, and notes the verdict.
fn route<'g>(
    exits: &Exits,
    listener: &'g EgressListener,
    host: &Host,
    port: u16,
    deadline: Instant,
) -> Result<Route<'g>, ConnectError> {
    let filter = listener.filter();
    // Another sandbox may have been given the connection that this was asked on.
    check_runs(exits)?;
    let note = |verdict: Verdict| {
        exits.note(&host.to_string(), port, &verdict);
        if verdict.is_allowed {
            Ok(())
        } else {
            Err(ConnectError::Refused(verdict))
        }
    };
    // Before the look-up, whose question leaves the machine.
    let named = match host {
        Host::Name(name) => Some(filter.judge_name(name, port)),
        Host::Address(_) => None,
    };
    if let Some(verdict) = &named
        && !verdict.is_allowed
    {
        note(verdict.clone())?;
    }
    let judge = |address: Address| {
        let verdict = judge_address(exits, listener, address, port, named.is_some());
        match &named {
            Some(named) if verdict.is_allowed => named.clone(),
            _ => verdict,
        }
    };
    if let Some(upstream) = &filter.upstream {
        note(match host {
            Host::Name(_) => named.unwrap_or_else(|| Verdict::refused("no rules")),
            Host::Address(address) => judge(*address),
        })?;
        return Ok(Route::Through(upstream));
    }
    let addresses = match host {
        Host::Address(address) => vec![*address],
        Host::Name(name) => match look_up_as_user(exits, name) {
            Ok(addresses) if deadline > Instant::now() => addresses,
            result => {
                if let Some(verdict) = named {
                    note(verdict)?;
                }
                let why = result.err().map_or_else(
                    || "the look-up took too long".to_owned(),
                    |error| error.to_string(),
                );
                return Err(ConnectError::Unknown(why));
            }
        },
    };
    let mut refusal = None;
    let mut allowed = Vec::new();
    let mut verdict = None;
    for address in addresses {
        let judged = judge(address);
        if judged.is_allowed {
            allowed.push(SocketAddr::new(address.ip(), port));
            verdict.get_or_insert(judged);
        } else {
            refusal.get_or_insert(judged);
        }
    }
    let verdict = verdict.or(refusal);
    note(verdict.unwrap_or_else(|| Verdict::refused("no address")))?;
    Ok(Route::Direct(allowed))
}

/// Decides about a destination by what it was asked for as: the addresses of a name are judged when they are known.
pub(super) fn judge(exits: &Exits, listener: &EgressListener, host: &Host, port: u16) -> Verdict {
    match host {
        Host::Name(name) => listener.filter().judge_name(name, port),
        Host::Address(address) => judge_address(exits, listener, *address, port, false),
    }
}

fn judge_address(
    exits: &Exits,
    listener: &EgressListener,
    address: Address,
    port: u16,
    is_named: bool,
) -> Verdict {
    if exits.is_server(address, port) {
        return Verdict::refused(SERVERS_PORT);
    }
    let filter = listener.filter();
    filter.judge_address(address, port, leads_here(address), is_named)
}

/// The addresses of a name, each once.
///
/// # Errors
/// It has none, or nobody knows.
pub(super) fn look_up(name: &str) -> io::Result<Vec<Address>> {
    let mut addresses = Vec::new();
    // The port does not matter; the resolver wants one.
    for found in (name, 0).to_socket_addrs()? {
        let address = Address::from(found.ip());
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    if addresses.is_empty() {
        return Err(io::Error::other("the name has no address"));
    }
    Ok(addresses)
}

/// Checks that something of the sandbox may still run: it can have stopped, and even be deleted, while somebody waited.
fn check_runs(exits: &Exits) -> Result<(), ConnectError> {
    if exits.is_closed() {
        return Err(ConnectError::Refused(Verdict::refused(NOTHING_RUNS)));
    }
    Ok(())
}

/// As [`look_up`]. The query is sent as the user of the commands.
fn look_up_as_user(exits: &Exits, name: &str) -> io::Result<Vec<Address>> {
    let _acting = exits.act()?;
    look_up(name)
}

/// Connects to the first address that answers.
fn connect_to_any(
    exits: &Exits,
    addresses: &[SocketAddr],
    deadline: Instant,
) -> Result<TcpStream, ConnectError> {
    let mut failure = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        check_runs(exits)?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ConnectError::Unreachable(io::ErrorKind::TimedOut.into()));
        }
        match connect(exits, address, left.min(ADDRESS_LIMIT)) {
            Ok(socket) => {
                check_runs(exits)?;
                let _ = socket.set_nodelay(true);
                return Ok(socket);
            }
            Err(error) => failure = error,
        }
    }
    Err(ConnectError::Unreachable(failure))
}

/// Connects to an address, over a socket of the commands' user. Gives up when nothing of the sandbox runs any more.
fn connect(exits: &Exits, address: &SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let deadline = Instant::now() + limit;
    let family = if address.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = {
        let _acting = exits.act()?;
        socket(family, SockType::Stream, flags, None)?
    };
    match nix::sys::socket::connect(socket.as_raw_fd(), &SockaddrStorage::from(*address)) {
        Ok(()) | Err(Errno::EINPROGRESS) => {}
        Err(errno) => return Err(errno.into()),
    }
    let mut entries = [PollEntry::new(socket.as_fd(), Events::WRITABLE)];
    loop {
        if exits.is_closed() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if poll(&mut entries, Some(left.min(LOOK_INTERVAL))) {
            break;
        }
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    let socket = TcpStream::from(socket);
    if let Some(error) = socket.take_error()? {
        return Err(error);
    }
    socket.set_nonblocking(false)?;
    Ok(socket)
}

/// Connects to the client's own proxy. No rule is asked, because whoever chose the rules chose the proxy. Only the server
/// itself is refused.
fn connect_to_upstream(
    exits: &Exits,
    upstream: &Upstream,
    deadline: Instant,
) -> Result<TcpStream, ConnectError> {
    let failed = |what: &dyn std::fmt::Display| {
        ConnectError::Upstream(format!("{upstream} is not reached: {what}"))
    };
    let addresses = match &upstream.host {
        Host::Address(address) => vec![*address],
        Host::Name(name) => look_up_as_user(exits, name).map_err(|error| failed(&error))?,
    };
    if addresses
        .iter()
        .any(|address| exits.is_server(*address, upstream.port))
    {
        return Err(failed(&SERVERS_PORT));
    }
    let addresses: Vec<_> = addresses
        .into_iter()
        .map(|address| SocketAddr::new(address.ip(), upstream.port))
        .collect();
    connect_to_any(exits, &addresses, deadline).map_err(|failure| match failure {
        ConnectError::Unreachable(error) => failed(&error),
        failure => failure,
    })
}

/// A connection to the client's own proxy until it is agreed on. That proxy may send a byte now and then for ever, so
/// all of it has one deadline.
struct Timed<'s> {
    socket: &'s TcpStream,
    deadline: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.socket.set_read_timeout(Some(left))?;
        self.socket.read(buffer)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The value of `Proxy-Authorization` for the client's own proxy (RFC 7617).
pub(super) fn proxy_authorization(upstream: &Upstream) -> Option<Vec<u8>> {
    let (user, password) = upstream.credentials.as_ref()?;
    let mut value = b"Basic ".to_vec();
    base64::append(&mut value, format!("{user}:{password}").as_bytes());
    Some(value)
}

/// Asks a proxy for a connection by `CONNECT`.
fn ask_http(
    socket: &mut (impl Read + Write),
    upstream: &Upstream,
    host: &Host,
    port: u16,
) -> io::Result<()> {
    let mut request =
        format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n").into_bytes();
    if let Some(value) = proxy_authorization(upstream) {
        request.extend_from_slice(b"Proxy-Authorization: ");
        request.extend_from_slice(&value);
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"\r\n");
    socket.write_all(&request)?;
    // Byte by byte: what follows the head is the server's.
    let mut answer = Vec::new();
    let mut byte = [0];
    for _ in 0..MAX_ANSWER_BYTES {
        socket.read_exact(&mut byte)?;
        answer.push(byte[0]);
        if byte != *b"\n" {
            continue;
        }
        match parse::response_head(&answer) {
            Ok(Progress::Partial) => {}
            // An interim response.
            Ok(Progress::Complete(head, _)) if head.status < 200 => answer.clear(),
            Ok(Progress::Complete(head, _)) if head.status < 300 => return Ok(()),
            Ok(Progress::Complete(head, _)) => {
                let text = format!("{upstream} answered {}", head.status);
                return Err(io::Error::other(text));
            }
            Err(_) => break,
        }
    }
    Err(io::Error::other(format!(
        "{upstream} does not speak HTTP/1.1"
    )))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::Arc;
    use std::thread;

    use super::super::Egress;
    use super::*;
    use crate::http::slots::ConnectionSlots;
    use crate::limits::ledger::Budget;
    use crate::spec::network::{Filter, Rules};

    #[test]
    fn no_rule_opens_the_servers_own_port_by_whatever_name_or_address() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        let budget = Budget::new(1 << 20);
        let egress = Egress::new(ConnectionSlots::new(1, Arc::clone(&budget)));
        let exits = Exits::new(Arc::clone(&egress), budget.whole(), None);
        let open_by = |host: &str, upstream: Option<Upstream>| {
            let listener =
                EgressListener::open(Arc::new(Filter::new(Rules::default(), upstream))).unwrap();
            open(&exits, &listener, &Host::parse(host).unwrap(), port)
        };
        assert!(
            open_by("127.0.0.1", None).is_ok(),
            "another server's is open"
        );
        egress.close_port(port);
        for host in [
            "127.0.0.1",
            "127.9.8.7",
            "0.0.0.0",
            "::1",
            "::ffff:127.0.0.1",
            "localhost",
        ] {
            match open_by(host, None) {
                Err(ConnectError::Refused(verdict)) => {
                    assert_eq!(verdict.rule, SERVERS_PORT, "{host}");
                }
                other => panic!("{host}: {other:?}"),
            }
        }
        for host in ["127.0.0.1", "localhost"] {
            let url = format!("http://{host}:{port}");
            let upstream = Upstream::parse(Protocol::Http, &url);
            match open_by("192.0.2.1", upstream) {
                Err(ConnectError::Upstream(text)) => {
                    assert!(text.ends_with(SERVERS_PORT), "{text}");
                }
                other => panic!("{host}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_proxy_that_never_comes_to_an_end_is_given_up() {
        let upstream = Upstream::parse(Protocol::Http, "http://user:word@proxy.example:8080");
        let upstream = upstream.unwrap();
        let host = Host::parse("a.example").unwrap();
        // Byte by byte without an end, and interim responses without an end.
        for (answer, pause) in [("x", 10), ("HTTP/1.1 100 Continue\r\n\r\n", 0)] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let proxy = thread::spawn(move || {
                let (mut client, _) = listener.accept().unwrap();
                while client.write_all(answer.as_bytes()).is_ok() {
                    thread::sleep(Duration::from_millis(pause));
                }
            });
            let mut timed = Timed {
                socket: &socket,
                deadline: Instant::now() + Duration::from_millis(300),
            };
            assert!(ask_http(&mut timed, &upstream, &host, 80).is_err());
            assert!(socks::ask(&mut timed, &upstream, &host, 80).is_err());
            drop(socket);
            proxy.join().unwrap();
        }
    }
}
