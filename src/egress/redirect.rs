//! Connections of programs that know no proxy, which are led to the gate all the same.
//!
//! The server keeps a copy of each socket that it hands out, and answers connect(2) too: it connects the copy, tells the
//! proxy in a first line where the program wanted to go, and lets the call succeed. A datagram socket is one end of a pair of
//! Unix sockets, on which the server answers questions for names.
//!
//! Nothing here has to hold for the walls to hold. Where a program wants to go is read from its memory, which it may change
//! meanwhile; but that is no more than a wish, about which the proxy decides. A call that is not understood goes on in
//! the kernel, where a socket that was handed out reaches the gate or nothing (see the module above).

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{MsgFlags, SockaddrStorage, connect, send};
use nix::sys::stat::fstat;

use super::Exits;
use super::connect::judge;
use super::gate::Gate;
use super::resolver::DNS_PORT;
use crate::posture::{Host, host_and_port};
use crate::sync::{Mutex, lock};
use crate::sys::{CallListener, Events, PollEntry, WaitingCall, poll};

/// Sockets of a workspace that are not connected, of which the server has copies.
const MAX_COPIES: usize = 64;

/// How long the gate may take to accept. It is on this machine: longer only if more wait than it has places for.
const GATE_LIMIT: Duration = Duration::from_millis(100);

/// Begins a connection that was led here. No other protocol of the proxy begins so.
pub(super) const MARK: u8 = 0;

/// Most bytes of the line that begins such a connection: a name, its port and the mark.
const MAX_LINE_BYTES: usize = 264;

/// Copies of sockets that were handed out, by the number of their inode.
#[derive(Default)]
pub(super) struct Copies {
    /// Guards the copies, the oldest first.
    sockets: Mutex<VecDeque<(u64, OwnedFd)>>,
}

impl Copies {
    /// Keeps a copy, and closes the oldest if there are too many: a connection of that one is refused by the kernel.
    pub(super) fn keep(&self, socket: OwnedFd) {
        let Some(inode) = inode(&socket) else {
            return;
        };
        let mut sockets = lock(&self.sockets);
        if sockets.len() == MAX_COPIES {
            sockets.pop_front();
        }
        sockets.push_back((inode, socket));
    }

    /// Takes a copy out.
    pub(super) fn take(&self, inode: u64) -> Option<OwnedFd> {
        let mut sockets = lock(&self.sockets);
        let index = sockets.iter().position(|(own, _)| *own == inode)?;
        sockets.remove(index).map(|(_, socket)| socket)
    }
}

/// The number that /proc shows of a socket.
pub(super) fn inode(socket: impl AsFd) -> Option<u64> {
    fstat(socket).ok().map(|file| file.st_ino)
}

/// The socket that a call is about: its first argument. `None` if it is none, or the caller has gone.
pub(super) fn socket_of(call: &WaitingCall) -> Option<u64> {
    let number = u32::try_from(call.arguments[0] & u64::from(u32::MAX)).ok()?;
    let link = fs::read_link(format!("/proc/{}/fd/{number}", call.thread)).ok()?;
    let inode = link.to_str()?.strip_prefix("socket:[")?;
    inode.strip_suffix(']')?.parse().ok()
}

/// Where connect(2) shall lead; `None` if that is no IPv4 address, or the memory cannot be read.
fn wish_of(call: &WaitingCall) -> Option<SocketAddrV4> {
    let [_, pointer, length, ..] = call.arguments;
    // An `int`.
    if length & u64::from(u32::MAX) < size_of::<libc::sockaddr_in>() as u64 {
        return None;
    }
    let mut bytes = [0; 8];
    let memory = File::open(format!("/proc/{}/mem", call.thread)).ok()?;
    memory.read_exact_at(&mut bytes, pointer).ok()?;
    let [family @ .., high, low, a, b, c, d] = bytes;
    let is_ipv4 = libc::c_int::from(u16::from_ne_bytes(family)) == libc::AF_INET;
    let port = u16::from_be_bytes([high, low]);
    is_ipv4.then(|| SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), port))
}

/// Answers connect(2). `is_resolver` tells whether a socket is an end of a pair on which names are looked up.
pub(super) fn answer_connect(
    exits: &Exits,
    gate: &Gate,
    copies: &Copies,
    is_resolver: impl FnOnce(u64) -> bool,
    listener: &CallListener,
    call: WaitingCall,
) {
    let Some(socket) = socket_of(&call) else {
        return listener.proceed(call);
    };
    let copy = copies.take(socket);
    if copy.is_none() && !is_resolver(socket) {
        return listener.proceed(call);
    }
    let wish = wish_of(&call);
    // If the caller has gone, what was read may be another process's with its number.
    if !listener.is_waiting(call) {
        if let Some(copy) = copy {
            copies.keep(copy);
        }
        return;
    }
    let Some(copy) = copy else {
        return match wish {
            Some(wish) if wish.port() == DNS_PORT => listener.succeed(call),
            _ => listener.refuse(call, Errno::EACCES),
        };
    };
    let Some(wish) = wish.filter(|wish| !is_left_alone(gate, *wish)) else {
        // Closed first: a copy of a connection would keep it open when the program closes it.
        drop(copy);
        return listener.proceed(call);
    };
    match lead(exits, gate, &copy, wish) {
        Ok(()) => listener.succeed(call),
        Err(errno) => {
            copies.keep(copy);
            listener.refuse(call, errno);
        }
    }
}

/// Whether a program may connect to an address by itself: to the proxy, and to the loopback interface of its own network.
fn is_left_alone(gate: &Gate, wish: SocketAddrV4) -> bool {
    let is_gate = wish.port() == gate.port();
    wish.ip().is_loopback() && (is_gate || (gate.is_inside() && wish.port() != DNS_PORT))
}

/// Leads a socket to the gate instead of an address.
fn lead(exits: &Exits, gate: &Gate, socket: &OwnedFd, wish: SocketAddrV4) -> nix::Result<()> {
    let port = wish.port();
    let host = match gate.names().of(*wish.ip()) {
        Some(name) => Host::Name(name),
        None => Host::Address((*wish.ip()).into()),
    };
    // The proxy notes what is allowed.
    let verdict = judge(exits, gate, &host, port);
    if !asks_for_names(&host, port) && !verdict.is_allowed {
        exits.note(&host.to_string(), port, &verdict);
        return Err(Errno::EACCES);
    }
    connect_soon(socket, gate.address())?;
    let mut line = vec![MARK];
    line.extend_from_slice(format!("{host}:{port}\n").as_bytes());
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    send(socket.as_raw_fd(), &line, flags).map(drop)
}

/// Whether a connection is to a name server. There is one at every address.
pub(super) fn asks_for_names(host: &Host, port: u16) -> bool {
    port == DNS_PORT && matches!(host, Host::Address(_))
}

/// Connects a socket of a program, whose flags are the program's too, within [`GATE_LIMIT`].
fn connect_soon(socket: &OwnedFd, address: SocketAddr) -> nix::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(socket, FcntlArg::F_GETFL)?);
    let may_block = !flags.contains(OFlag::O_NONBLOCK);
    if may_block {
        fcntl(socket, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    }
    let mut connected = connect(socket.as_raw_fd(), &SockaddrStorage::from(address));
    if connected == Err(Errno::EINPROGRESS) {
        let mut entries = [PollEntry::new(socket.as_fd(), Events::WRITABLE)];
        connected = if poll(&mut entries, Some(GATE_LIMIT)) {
            // Tells how it ended.
            connect(socket.as_raw_fd(), &SockaddrStorage::from(address))
        } else {
            Err(Errno::ETIMEDOUT)
        };
    }
    if may_block {
        fcntl(socket, FcntlArg::F_SETFL(flags))?;
    }
    connected
}

/// Reads the line that begins a connection: where the program wanted to go. `None` if it is none.
///
/// # Errors
/// The client has gone, or is too slow.
pub(super) fn read_line(mut client: impl Read) -> std::io::Result<Option<(Host, u16)>> {
    let mut line = Vec::new();
    let mut byte = [0];
    // Byte by byte: what follows is the server's.
    while line.len() < MAX_LINE_BYTES {
        client.read_exact(&mut byte)?;
        if byte == *b"\n" {
            let text = line.strip_prefix(&[MARK]);
            let text = text.and_then(|text| std::str::from_utf8(text).ok());
            let wish = text.and_then(host_and_port);
            return Ok(wish.and_then(|(host, port)| Some((host, port?))));
        }
        line.push(byte[0]);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_where_a_program_wanted_to_go() {
        let read = |text: &[u8]| read_line(text).ok().flatten();
        let name = Host::Name("a.example".to_owned());
        assert_eq!(read(b"\0a.example:80\nGET /"), Some((name, 80)));
        let address = Host::Address([10, 0, 0, 1].into());
        assert_eq!(read(b"\x0010.0.0.1:443\n"), Some((address, 443)));
        for text in [
            b"a:80\n" as &[u8],
            b"\0a\n",
            b"\0a:0\n",
            b"\0a b:80\n",
            b"\0a:80",
            &[0; 1000],
        ] {
            assert_eq!(read(text), None, "{}", text.escape_ascii());
        }
    }
}
