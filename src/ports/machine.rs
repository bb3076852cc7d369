//! TCP ports of the machine, and of a sandbox with a network of its own. The kernel tells whether one of them has a server; all that have one are listed in
//! `/proc/net`, where it exists.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockType, SockaddrStorage, connect as connect_socket};

use super::port::{Listener, Owner, Port, is_exhaustion, unreachable};
use super::{Listing, MAX_LISTED};
use crate::client::Stopped;
use crate::codec::sort::{sort, sort_by};
use crate::confine::Namespaces;
use crate::error::{Error, Kind, Result};
use crate::sys::{self, Events, Pid, PollEntry, User, poll, proc};

pub(super) const ACCEPTED: &str = "a TCP port from 1 to 65535, in digits";

/// Longer command lines are cut.
const MAX_COMMAND_BYTES: u64 = 1024;

/// `TCP_LISTEN`, as /proc/net/tcp writes it.
const LISTEN: &str = "0A";

/// Where servers are reached, in the order of attempts.
const LOOPBACK: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

/// Parses a port number, which has exactly one spelling.
pub(super) fn parse(text: &[u8]) -> Option<u16> {
    let text = std::str::from_utf8(text).ok()?;
    text.parse()
        .ok()
        .filter(|port: &u16| *port != 0 && port.to_string() == text)
}

/// Connects by IPv4, then by IPv6, where the server is the owner's, if there is one.
pub(super) fn connect(port: u16, owner: Option<User>, limit: Duration) -> Result<OwnedFd> {
    let mut tried = Vec::new();
    for address in LOOPBACK {
        let address = SocketAddr::new(address, port);
        if let Some(owner) = owner
            && let Ok(Some(uid)) = sys::tcp_listener_uid(address)
            && proc::user_of(uid) != owner.uid
        {
            tried.push(format!(
                "{address}: uid {uid} listens on it, not the sandbox"
            ));
            continue;
        }
        match checked(TcpStream::connect_timeout(&address, limit), address, port)? {
            Ok(socket) => return Ok(socket),
            Err(cause) => tried.push(cause),
        }
    }
    Err(nothing_listens(port, &tried))
}

/// The same in the network of a sandbox.
pub(super) fn connect_inside(
    port: u16,
    namespaces: &Namespaces,
    limit: Duration,
) -> Result<OwnedFd> {
    let mut tried = Vec::new();
    for address in LOOPBACK {
        let address = SocketAddr::new(address, port);
        match checked(
            try_connect_inside(address, namespaces, limit),
            address,
            port,
        )? {
            Ok(socket) => return Ok(socket),
            Err(cause) => tried.push(cause),
        }
    }
    Err(nothing_listens(port, &tried))
}

fn try_connect_inside(
    address: SocketAddr,
    namespaces: &Namespaces,
    limit: Duration,
) -> std::io::Result<TcpStream> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let socket = TcpStream::from(namespaces.socket(family, SockType::Stream)?);
    socket.set_nonblocking(true)?;
    match connect_socket(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => {}
        Err(Errno::EINPROGRESS) => {
            let mut entries = [PollEntry::new(socket.as_fd(), Events::WRITABLE)];
            if !poll(&mut entries, Some(limit)) {
                return Err(ErrorKind::TimedOut.into());
            }
            if let Some(error) = socket.take_error()? {
                return Err(error);
            }
        }
        Err(errno) => return Err(errno.into()),
    }
    socket.set_nonblocking(false)?;
    Ok(socket)
}

/// A connection to a server, or why there is none.
fn checked(
    connected: std::io::Result<TcpStream>,
    address: SocketAddr,
    port: u16,
) -> Result<std::result::Result<OwnedFd, String>> {
    let connected = connected.and_then(|socket| {
        // Without a server the kernel may choose the same port for the client's end. The connection
        // then leads to itself.
        if socket.local_addr()? == address {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        socket.set_nodelay(true)?;
        Ok(socket)
    });
    connected.map(|socket| Ok(socket.into())).or_else(|error| {
        let errno = error.raw_os_error().map(Errno::from_raw);
        if let Some(errno) = errno.filter(|errno| is_exhaustion(*errno)) {
            let act = format!("cannot connect to port {port}");
            return Err(Error::system(act, errno));
        }
        Ok(Err(format!("{address}: {}", cause(&error))))
    })
}

fn nothing_listens(port: u16, tried: &[String]) -> Error {
    let tried = tried.join(", ") + "; start a server that listens there";
    unreachable(port, &tried)
}

fn cause(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionRefused => "nothing listens".to_owned(),
        ErrorKind::TimedOut => "it does not accept connections".to_owned(),
        _ => error.to_string(),
    }
}

/// Whether a server listens on the port of the loopback interface. Asks the kernel, which the server does not
/// notice, and connects only where the kernel does not tell.
pub(super) fn is_listening(port: u16) -> bool {
    let mut found = Ok(false);
    for address in LOOPBACK {
        found = sys::is_tcp_listening(SocketAddr::new(address, port));
        if found != Ok(false) {
            break;
        }
    }
    found
        .or_else(|_| is_in_table(port, None))
        .unwrap_or_else(|_| connect(port, None, Duration::from_millis(100)).is_ok())
}

/// Whether `/proc/net`, as it is in these namespaces, has a server that listens on the port of the loopback
/// interface.
pub(super) fn is_in_table(port: u16, namespaces: Option<&Namespaces>) -> std::io::Result<bool> {
    let mut is_found = false;
    let mut look = |socket: Socket| {
        let is_reachable = socket.address.is_unspecified() || LOOPBACK.contains(&socket.address);
        is_found = socket.port == port && is_reachable;
        if is_found {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    for_each_listening(namespaces, &mut look)?;
    Ok(is_found)
}

/// All listening sockets with their processes.
pub(super) fn list(listing: &mut Listing<'_>) -> std::result::Result<(), Stopped> {
    let sockets = listening(None, usize::MAX, |_| true, listing)?;
    let mut sockets: Vec<_> = sockets.into_iter().map(|socket| (socket, None)).collect();
    find_owners(&mut sockets);
    for (_, owner) in &sockets {
        let command = owner.as_ref().map_or(0, |owner| owner.command.len());
        listing.charge(8 * command)?;
    }
    show(sockets, listing);
    Ok(())
}

/// The listening sockets on these ports.
pub(super) fn list_of(
    ports: &[u16],
    listing: &mut Listing<'_>,
) -> std::result::Result<(), Stopped> {
    if !ports.is_empty() {
        let is_given = |socket: &Socket| ports.contains(&socket.port);
        show_without_owners(listening(None, MAX_LISTED, is_given, listing)?, listing);
    }
    Ok(())
}

/// The listening sockets of a sandbox with a network of its own; without those that the server has there.
pub(super) fn list_inside(
    namespaces: &Namespaces,
    owner: User,
    listing: &mut Listing<'_>,
) -> std::result::Result<(), Stopped> {
    let is_own = |socket: &Socket| proc::user_of(socket.uid) == owner.uid;
    let sockets = listening(Some(namespaces), MAX_LISTED, is_own, listing)?;
    show_without_owners(sockets, listing);
    Ok(())
}

/// A listening socket and its process, once that is known.
type Found = (Socket, Option<Owner>);

/// The first listening sockets of a kind, at most so many.
fn listening(
    namespaces: Option<&Namespaces>,
    most: usize,
    is_meant: impl Fn(&Socket) -> bool,
    listing: &mut Listing<'_>,
) -> std::result::Result<Vec<Socket>, Stopped> {
    let mut sockets = Vec::new();
    let mut stopped = None;
    let mut add = |socket: Socket| {
        let added = listing.pass().and_then(|()| {
            if is_meant(&socket) {
                listing.charge(Listener::bytes(socket.address.to_string().len()))?;
                sockets.push(socket);
            }
            Ok(())
        });
        stopped = added.err();
        if stopped.is_some() || sockets.len() >= most {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    let read = for_each_listening(namespaces, &mut add);
    if let Some(stopped) = stopped {
        return Err(stopped);
    }
    read.map_err(|error| {
        let text = format!("cannot list ports: /proc/net/tcp: {error}");
        Stopped::Failed(Error::new(Kind::System, text))
    })?;
    Ok(sockets)
}

fn show_without_owners(sockets: Vec<Socket>, listing: &mut Listing<'_>) {
    let sockets = sockets.into_iter().map(|socket| (socket, None));
    show(sockets.collect(), listing);
}

fn show(mut sockets: Vec<Found>, listing: &mut Listing<'_>) {
    let key = |(socket, _): &Found| (socket.port, socket.address);
    sort_by(&mut sockets, |one, other| key(one).cmp(&key(other)));
    for (socket, process) in sockets {
        listing.add(Listener {
            port: Port::Number(socket.port),
            address: socket.address.to_string(),
            process,
        });
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Socket {
    address: IpAddr,
    port: u16,
    uid: libc::uid_t,
    inode: u64,
}

/// Calls `found` for every listening socket until it breaks off.
///
/// # Errors
/// `/proc/net/tcp` cannot be read.
fn for_each_listening(
    namespaces: Option<&Namespaces>,
    found: &mut dyn FnMut(Socket) -> ControlFlow<()>,
) -> std::io::Result<()> {
    for (table, optional) in [("tcp", false), ("tcp6", true)] {
        let file = match namespaces {
            None => File::open(format!("/proc/net/{table}")),
            Some(namespaces) => namespaces.open_network_file(table),
        };
        let file = match file {
            Ok(file) => file,
            // A kernel without IPv6.
            Err(_) if optional => continue,
            Err(error) => return Err(error),
        };
        // The kernel lists listening sockets before connections, of which there may be very many. It
        // does not generate what is not read.
        for line in BufReader::with_capacity(4096, file).lines().skip(1) {
            match parse_line(&line?) {
                Line::Listening(socket) => {
                    if found(socket).is_break() {
                        return Ok(());
                    }
                }
                Line::Connection => break,
                Line::Unknown => {}
            }
        }
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
enum Line {
    Listening(Socket),
    Connection,
    Unknown,
}

/// Parses one line: `sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode ...` (proc(5)).
fn parse_line(line: &str) -> Line {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    match fields.get(3) {
        Some(&LISTEN) => {}
        Some(_) => return Line::Connection,
        None => return Line::Unknown,
    }
    let socket = || {
        let (address, port) = fields[1].split_once(':')?;
        Some(Socket {
            address: parse_address(address)?,
            port: u16::from_str_radix(port, 16).ok()?,
            uid: fields.get(7)?.parse().ok()?,
            inode: fields.get(9)?.parse().ok()?,
        })
    };
    socket().map_or(Line::Unknown, Line::Listening)
}

/// Parses an address: words of 32 bits in the machine's byte order.
fn parse_address(text: &str) -> Option<IpAddr> {
    let word = |at: usize| {
        let word = u32::from_str_radix(text.get(at..at + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    match text.len() {
        8 => Some(IpAddr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?].concat();
            Some(IpAddr::from(<[u8; 16]>::try_from(words).ok()?))
        }
        _ => None,
    }
}

/// Finds for each socket the process with the lowest pid that holds it.
fn find_owners(sockets: &mut [Found]) {
    let mut left = sockets.len();
    let mut pids: Vec<Pid> = proc::processes().collect();
    sort(&mut pids);
    for pid in pids {
        // The kernel hides the descriptors of other users' processes.
        let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else {
            continue;
        };
        for descriptor in descriptors.flatten() {
            if left == 0 {
                return;
            }
            let inode = fs::read_link(descriptor.path()).ok().and_then(|target| {
                let target = target.to_str()?.strip_prefix("socket:[")?;
                target.strip_suffix(']')?.parse::<u64>().ok()
            });
            let Some(inode) = inode else { continue };
            let held = |(socket, owner): &&mut Found| socket.inode == inode && owner.is_none();
            if let Some((_, owner)) = sockets.iter_mut().find(held) {
                let command = command(pid);
                *owner = Some(Owner { pid, command });
                left -= 1;
            }
        }
    }
}

/// The command line of a process, its words separated by spaces.
fn command(pid: Pid) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(format!("/proc/{pid}/cmdline")) {
        let _ = file.take(MAX_COMMAND_BYTES).read_to_end(&mut bytes);
    }
    let words: Vec<_> = bytes
        .split(|byte| *byte == 0)
        .map(String::from_utf8_lossy)
        .collect();
    words.join(" ").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::limits::ledger::Budget;
    use crate::ports::{Never, Ports};

    #[test]
    fn a_port_is_written_in_one_way() {
        assert_eq!(parse(b"1"), Some(1));
        assert_eq!(parse(b"65535"), Some(65535));
        for text in [
            &b""[..],
            b"0",
            b"00",
            b"080",
            b"65536",
            b"+80",
            b"-1",
            b"80 ",
            b"8e1",
            b"http",
            b"80.sock",
            b"..",
            b"\xff",
            b"%38",
            "\u{661}".as_bytes(),
        ] {
            assert_eq!(parse(text), None, "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn reads_the_tables_of_the_kernel() {
        let line = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 12345 1 0";
        let socket = |address: &str, port, inode| {
            let address = address.parse().unwrap();
            Line::Listening(Socket {
                address,
                port,
                uid: 1000,
                inode,
            })
        };
        if cfg!(target_endian = "little") {
            assert_eq!(parse_line(line), socket("127.0.0.1", 8080, 12345));
            let line = line.replace("0100007F", "00000000000000000000000001000000");
            assert_eq!(parse_line(&line), socket("::1", 8080, 12345));
            let line = line.replace("00000000000000000000000001000000", &"0".repeat(32));
            assert_eq!(parse_line(&line), socket("::", 8080, 12345));
        }
        assert_eq!(parse_line(&line.replace(" 0A ", " 01 ")), Line::Connection);
        for odd in [
            "",
            "x",
            "0: 1 2 0A",
            "0: 0100007:1F90 0 0A 0 0 0 0 0 1",
            "0: 010000é:1F90 0 0A 0 0 0 0 0 1",
        ] {
            assert_eq!(parse_line(odd), Line::Unknown, "{odd}");
        }
    }

    #[test]
    fn finds_what_listens_and_whose_it_is() {
        for address in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0", "[::]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                // No IPv6 here.
                assert!(address.starts_with('['));
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            assert!(is_listening(port));
            // The table may skip a socket while others in it go away.
            while !is_in_table(port, None).unwrap() {
                std::thread::yield_now();
            }
            assert!(connect(port, None, Duration::from_secs(1)).is_ok());
            let budget = Budget::new(1 << 20).whole();
            let all = Ports::machine()
                .list(&budget, &mut Never)
                .unwrap()
                .listeners;
            let found = all
                .iter()
                .find(|found| found.port == Port::Number(port))
                .unwrap();
            let owner = found.process.as_ref().unwrap();
            // This process, or one that it has just forked.
            assert!(owner.command.contains("sbx"), "{owner:?}");
            drop(listener);
            // A child of another test may hold it until its execve.
            while is_listening(port) {
                std::thread::yield_now();
            }
            let tried = connect(port, None, Duration::from_secs(1))
                .unwrap_err()
                .to_string();
            assert!(tried.contains(&format!("127.0.0.1:{port}: nothing listens")));
        }
    }

    #[test]
    fn what_listens_elsewhere_is_not_reached() {
        let listener = TcpListener::bind("127.0.0.2:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(!is_listening(port));
        assert!(connect(port, None, Duration::from_secs(1)).is_err());
    }
}
