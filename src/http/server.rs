//! Accepting connections, each on a thread of its own.
//!
//! Accepting is cheap and never waits: clients open a connection per command. When there is no
//! thread, no descriptor or no place left, the client is told so (503) instead of being left in the
//! queue, and the loop neither spins nor stops.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use nix::sys::socket::{
    self, AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, setsockopt, socket,
    sockopt,
};

use super::Handler;
use super::connection;
use crate::logging;
use crate::memory::Room;
use crate::sys;

/// Virtual; a thread touches a small part of it.
const STACK_BYTES: usize = 256 * 1024;

/// What a connection may need at once, generously: its stack, and buffers.
const ROOM_BYTES: usize = STACK_BYTES + (2 << 20);

const NO_DESCRIPTORS: &str =
    "the server has no descriptor left for this connection; try again later";

/// Most connections at once.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// In all.
    pub all: usize,
    /// From this machine itself. Where that is sandboxes', they must not keep everybody else out.
    pub from_here: usize,
    /// Whether a thread is kept for when no further one is to be had, so that whoever may end what
    /// takes them all is heard. It serves one request of a connection, and none from this machine.
    pub keeps_thread: bool,
}

/// Listens at an address.
///
/// # Errors
/// It is in use, or not this machine's, or not for this user.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let flags = SockFlag::SOCK_CLOEXEC;
    let listener = socket(family, SockType::Stream, flags, None)?;
    setsockopt(&listener, sockopt::ReuseAddr, &true)?;
    // Accepted sockets inherit all of these, and so they are set before anybody can connect. A quiet
    // client that is gone without a word, or that has closed after its last request, is found out
    // within two minutes.
    setsockopt(&listener, sockopt::TcpNoDelay, &true)?;
    setsockopt(&listener, sockopt::KeepAlive, &true)?;
    setsockopt(&listener, sockopt::TcpKeepIdle, &60)?;
    setsockopt(&listener, sockopt::TcpKeepInterval, &15)?;
    setsockopt(&listener, sockopt::TcpKeepCount, &4)?;
    bind(listener.as_raw_fd(), &SockaddrStorage::from(address))?;
    socket::listen(&listener, Backlog::MAXALLOWABLE)?;
    Ok(listener.into())
}

/// How many connections are open.
#[derive(Clone, Default)]
pub struct Connections(Arc<AtomicUsize>);

impl Connections {
    /// The number now.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// A listening socket and what serves its connections.
pub struct Server<H> {
    listener: TcpListener,
    handler: Arc<H>,
    limits: Limits,
    open: Connections,
    /// Those of them that come from this machine.
    open_here: Arc<AtomicUsize>,
    /// Takes a connection to the thread that is kept, if it has nothing to do.
    kept: Option<SyncSender<(TcpStream, Place)>>,
    /// Closed to make room for accepting, and refusing, a connection when descriptors have run out.
    spare: Option<std::fs::File>,
}

impl<H: Handler> Server<H> {
    /// Serves connections within the limits, counting those that are `open`.
    ///
    /// # Errors
    /// The socket cannot be set up.
    pub fn new(
        listener: TcpListener,
        handler: Arc<H>,
        limits: Limits,
        open: Connections,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let kept = limits.keeps_thread.then(|| keep_thread(&handler));
        Ok(Self {
            kept: kept.transpose()?,
            listener,
            handler,
            limits,
            open,
            open_here: Arc::default(),
            spare: spare(),
        })
    }

    /// What becomes readable when somebody connects.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Accepts one connection, if there is one.
    pub fn accept(&mut self) {
        match self.listener.accept() {
            Ok((socket, peer)) => self.serve(socket, peer),
            Err(error) => {
                // Anything else: nobody there any more, or a connection that died in the queue (accept(2)).
                let lacking = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
                if error
                    .raw_os_error()
                    .is_some_and(|errno| lacking.contains(&errno))
                {
                    self.refuse_for_lack(&error);
                }
            }
        }
    }

    fn serve(&mut self, socket: TcpStream, peer: SocketAddr) {
        if self.spare.is_none() {
            self.spare = spare();
        }
        if sys::is_scarce(socket.as_fd()) {
            refuse(&socket, "no_descriptors", NO_DESCRIPTORS);
            return;
        }
        let place = Place::take(&self.open.0);
        let place_here = (self.limits.from_here < self.limits.all && is_here(&socket, peer))
            .then(|| Place::take(&self.open_here));
        if place.number > self.limits.all
            || place_here
                .as_ref()
                .is_some_and(|place| place.number > self.limits.from_here)
        {
            refuse(
                &socket,
                "too_many_connections",
                "all connections are in use; close idle ones or try again",
            );
            return;
        }
        let Some(room) = Room::take(ROOM_BYTES) else {
            refuse(
                &socket,
                "no_memory",
                "the machine has no memory left for this connection; try again later",
            );
            return;
        };
        // The socket stays here until the thread has it: a thread that does not start must not
        // close it before the client was told.
        let is_elsewhere = place_here.is_none();
        let slot = Arc::new(Mutex::new(Some((socket, place))));
        let taken = Arc::clone(&slot);
        let handler = Arc::clone(&self.handler);
        let thread = thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let _place_here = place_here;
                drop(room);
                let taken = taken.lock().ok().and_then(|mut slot| slot.take());
                if let Some((socket, _place)) = taken {
                    connection::serve(socket, &*handler, true);
                }
            });
        let Err(error) = thread else { return };
        let Some(left) = slot.lock().ok().and_then(|mut slot| slot.take()) else {
            return;
        };
        let refused = match &self.kept {
            Some(kept) if is_elsewhere => kept.try_send(left),
            _ => Err(TrySendError::Full(left)),
        };
        if let Err(TrySendError::Full((socket, _)) | TrySendError::Disconnected((socket, _))) =
            refused
        {
            logging::info(format_args!("no thread for a connection: {error}"));
            refuse(
                &socket,
                "no_threads",
                "the machine has no thread left for this connection; try again later",
            );
        }
    }

    /// Out of descriptors: answers one connection with the one kept for this, then waits a little
    /// for others to be given back.
    fn refuse_for_lack(&mut self, error: &io::Error) {
        logging::info(format_args!("cannot accept: {error}"));
        self.spare = None;
        if let Ok((socket, _)) = self.listener.accept() {
            refuse(&socket, "no_descriptors", NO_DESCRIPTORS);
        }
        self.spare = spare();
        thread::sleep(Duration::from_millis(10));
    }
}

/// Starts the thread that is kept. It takes a connection only when it has none.
fn keep_thread<H: Handler>(handler: &Arc<H>) -> io::Result<SyncSender<(TcpStream, Place)>> {
    let (sender, connections) = mpsc::sync_channel::<(TcpStream, Place)>(0);
    let handler = Arc::clone(handler);
    thread::Builder::new()
        .name("kept".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            for (socket, _place) in connections {
                connection::serve(socket, &*handler, false);
            }
        })?;
    Ok(sender)
}

/// Whether a connection comes from the machine it arrives at. Its sandboxes cannot choose the address
/// that they seem to come from: that takes bind(2).
fn is_here(socket: &TcpStream, peer: SocketAddr) -> bool {
    let own = socket.local_addr().map(|own| own.ip().to_canonical());
    let peer = peer.ip().to_canonical();
    peer.is_loopback() || own.is_ok_and(|own| own == peer)
}

/// One of the places for connections, given back when dropped.
struct Place {
    open: Arc<AtomicUsize>,
    number: usize,
}

impl Place {
    fn take(open: &Arc<AtomicUsize>) -> Self {
        let number = open.fetch_add(1, Ordering::Relaxed) + 1;
        Self {
            open: Arc::clone(open),
            number,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

fn spare() -> Option<std::fs::File> {
    std::fs::File::open("/dev/null").ok()
}

/// Tells a client why it is not served, without waiting for it: what it sends is not read.
fn refuse(mut socket: &TcpStream, code: &str, text: &str) {
    let body = format!("{{\"error\":\"{text}\",\"code\":\"{code}\"}}");
    let response = format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Retry-After: 1\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    if socket.set_nonblocking(true).is_ok() {
        let _ = socket.write_all(response.as_bytes());
        let _ = socket.shutdown(std::net::Shutdown::Write);
        // Closing with unread bytes is a reset, which may overtake the answer: at least what has
        // come already is taken.
        let mut scratch = [0; 4096];
        let mut rounds = 0;
        while rounds < 64 && matches!(socket.read(&mut scratch), Ok(1..)) {
            rounds += 1;
        }
    }
}
