//! Accepts connections and serves each on a thread of its own.
//!
//! Accepting is cheap and never blocks, because clients open a connection per command. When no thread,
//! descriptor or slot is left, the client gets 503 instead of waiting in the queue, and the loop
//! neither spins nor stops.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::connection::{self, Handler};
use super::seats::{Peer, Seat, Seats};
use crate::logging;
use crate::memory::Room;
use crate::sync::{Condvar, Mutex, lock};
use crate::sys;

/// Address space; a thread touches a small part of it.
const STACK_BYTES: usize = 256 * 1024;

/// A generous estimate of what a connection needs: its stack and its buffers.
const ROOM_BYTES: usize = STACK_BYTES + (2 << 20);

const NO_DESCRIPTORS: &str =
    "the server has no descriptor left for this connection; try again later";

/// A listening socket and the handler of its connections.
pub struct Server<H> {
    listener: TcpListener,
    handler: Arc<H>,
    seats: Seats,
    spare_thread: Option<Arc<SpareThread>>,
    /// Closed when descriptors have run out, so that a connection can be accepted and refused.
    spare_descriptor: Option<std::fs::File>,
}

impl<H: Handler> Server<H> {
    /// Serves connections that get one of `seats`.
    ///
    /// With `is_host` the users of this machine are told apart, and there is a spare thread, which serves
    /// when no other thread can be started: a client that can delete the sandbox that uses them all must be
    /// heard. It serves one request of a connection, and no connection from this machine.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking, or the spare thread cannot be started.
    pub fn new(
        listener: TcpListener,
        handler: Arc<H>,
        seats: Seats,
        is_host: bool,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let spare_thread = is_host.then(|| SpareThread::start(&handler));
        Ok(Self {
            spare_thread: spare_thread.transpose()?,
            listener,
            handler,
            seats,
            spare_descriptor: spare_descriptor(),
        })
    }

    /// Readable when a connection can be accepted.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Accepts one connection if one waits.
    pub fn accept(&mut self) {
        match self.listener.accept() {
            Ok((socket, address)) => self.serve(socket, address),
            Err(error) => {
                // Other errors belong to a connection that died in the queue (accept(2)).
                if let Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) =
                    error.raw_os_error()
                {
                    self.refuse_for_lack(&error);
                }
            }
        }
    }

    fn serve(&mut self, socket: TcpStream, address: SocketAddr) {
        if self.spare_descriptor.is_none() {
            self.spare_descriptor = spare_descriptor();
        }
        if sys::is_scarce(socket.as_fd()) {
            refuse(&socket, "no_descriptors", NO_DESCRIPTORS);
            return;
        }
        let own = socket.local_addr().unwrap_or(address);
        let is_elsewhere = !is_here(own, address);
        let peer = if is_elsewhere || self.spare_thread.is_none() {
            Peer::at(address.ip())
        } else if self.seats.is_quiet() {
            // Asking the kernel takes longer than the rest of accepting.
            Peer::User(None)
        } else {
            Peer::User(sys::tcp_peer_uid(own, address))
        };
        let socket = Arc::new(socket);
        let Some(seat) = self.seats.take(peer, &socket) else {
            refuse(
                &socket,
                "too_many_connections",
                "all connections are in use; close idle ones or try again",
            );
            return;
        };
        let Some(room) = Room::take(ROOM_BYTES) else {
            refuse(
                &socket,
                "no_memory",
                "the machine has no memory left for this connection; try again later",
            );
            return;
        };
        // The socket stays in the slot until the thread takes it: a thread that cannot be started
        // must not close the socket before the client gets an answer.
        let slot = Arc::new(Mutex::new(Some((socket, seat))));
        let taken = Arc::clone(&slot);
        let handler = Arc::clone(&self.handler);
        let thread = thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn(move || {
                drop(room);
                let _cache = sys::MemoryCache::of_this_thread();
                let taken = lock(&taken).take();
                if let Some((socket, seat)) = taken {
                    connection::serve(&socket, seat, &*handler, true);
                }
            });
        let Err(error) = thread else { return };
        let Some(left) = lock(&slot).take() else {
            return;
        };
        let refused = match &self.spare_thread {
            Some(thread) if is_elsewhere => thread.give(left),
            _ => Err(left),
        };
        if let Err((socket, _)) = refused {
            logging::about(
                "connections",
                format_args!("no thread for a connection: {error}"),
            );
            refuse(
                &socket,
                "no_threads",
                "the machine has no thread left for this connection; try again later",
            );
        }
    }

    /// Answers one connection with the spare descriptor, then waits 10 ms for others to be closed.
    fn refuse_for_lack(&mut self, error: &io::Error) {
        logging::about("connections", format_args!("cannot accept: {error}"));
        self.spare_descriptor = None;
        if let Ok((socket, _)) = self.listener.accept() {
            refuse(&socket, "no_descriptors", NO_DESCRIPTORS);
        }
        self.spare_descriptor = spare_descriptor();
        thread::sleep(Duration::from_millis(10));
    }
}

/// A thread that takes a connection only while it has none.
#[derive(Default)]
struct SpareThread {
    /// Guards whether the thread waits for a connection, and the one that it gets.
    place: Mutex<(bool, Option<Seated>)>,
    is_given: Condvar,
}

impl SpareThread {
    fn start<H: Handler>(handler: &Arc<H>) -> io::Result<Arc<Self>> {
        let (spare, handler) = (Arc::<Self>::default(), Arc::clone(handler));
        let own = Arc::clone(&spare);
        thread::Builder::new()
            .name("spare".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                loop {
                    let (socket, seat) = own.wait();
                    connection::serve(&socket, seat, &*handler, false);
                }
            })?;
        Ok(spare)
    }

    /// Gives it a connection; it is the error if the thread has another one.
    fn give(&self, connection: Seated) -> Result<(), Seated> {
        let mut place = lock(&self.place);
        if !std::mem::take(&mut place.0) {
            return Err(connection);
        }
        place.1 = Some(connection);
        self.is_given.notify_one();
        Ok(())
    }

    fn wait(&self) -> Seated {
        let mut place = lock(&self.place);
        place.0 = true;
        loop {
            if let Some(given) = place.1.take() {
                return given;
            }
            place = self.is_given.wait_for(place, None);
        }
    }
}

/// Whether a connection comes from this machine. Sandboxes cannot choose another source address, because
/// Landlock denies them bind(2).
fn is_here(own: SocketAddr, peer: SocketAddr) -> bool {
    let peer = peer.ip().to_canonical();
    peer.is_loopback() || peer == own.ip().to_canonical()
}

/// A connection and its seat.
type Seated = (Arc<TcpStream>, Seat);

fn spare_descriptor() -> Option<std::fs::File> {
    std::fs::File::open("/dev/null").ok()
}

/// Answers 503 without waiting for the client.
pub fn refuse(mut socket: &TcpStream, code: &str, text: &str) {
    let body = format!("{{\"error\":\"{text}\",\"code\":\"{code}\"}}\n");
    let response = format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Retry-After: 1\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    if socket.set_nonblocking(true).is_ok() {
        let _ = socket.write_all(response.as_bytes());
        let _ = socket.shutdown(std::net::Shutdown::Write);
        // Closing with unread bytes sends a reset, which may overtake the answer. This reads at least
        // what has arrived.
        let mut scratch = [0; 4096];
        let mut rounds = 0;
        while rounds < 64 && matches!(socket.read(&mut scratch), Ok(1..)) {
            rounds += 1;
        }
    }
}
