//! Accepts connections and serves each on a thread of its own.
//!
//! Accepting is cheap, because clients open a connection per command. When no thread, descriptor or memory is left, the
//! oldest connections that have shown no token are closed, and the thread of one of them serves the new connection: who
//! is silent never keeps out who has a token. Where there is none to close, the client gets 503 instead of waiting in
//! the queue, and the loop neither spins nor stops.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::connection::{self, Handler};
use super::rush::{self, Opener, Rush};
use super::slots::{ConnectionSlot, ConnectionSlots, Eviction, Peer};
use crate::limits::memory::Room;
use crate::logging;
use crate::sys::{self, SocketDiag, TcpState};
use crate::threads::lock::{Condvar, Mutex, lock};
use crate::threads::{SMALL_STACK_BYTES, Thread};

/// A generous estimate of what a connection needs: its stack and its buffers.
const ROOM_BYTES: usize = SMALL_STACK_BYTES + (2 << 20);

/// How long one of those that make room may take to end, before the next one is closed too.
const TIME_TO_END: Duration = Duration::from_millis(10);

/// How long the loop waits for room in all.
const TIME_FOR_ROOM: Duration = Duration::from_millis(200);

/// What a connection needs and does not get.
#[derive(Debug, Clone, Copy)]
enum Lack {
    Threads,
    Descriptors,
    Memory,
}

impl Lack {
    /// Tells a client.
    fn refuse(self, socket: &TcpStream) {
        let text = |what: &str| format!("{what} left for this connection; try again later");
        match self {
            Self::Threads => refuse(socket, "no_threads", &text("the machine has no thread")),
            Self::Descriptors => {
                refuse(
                    socket,
                    "no_descriptors",
                    &text("the server has no descriptor"),
                );
            }
            Self::Memory => refuse(socket, "no_memory", &text("the machine has no memory")),
        }
    }
}

/// A listening socket and the handler of its connections.
pub struct Server<H> {
    listener: TcpListener,
    handler: Arc<H>,
    slots: ConnectionSlots,
    /// The users of a host's sandboxes.
    users: Option<RangeInclusive<u32>>,
    rush: Rush,
    /// Open from the start: who opens connections is asked most when descriptors run out.
    diag: Option<SocketDiag>,
    handover: Arc<Handover>,
    /// Closed when descriptors have run out, so that a connection can be accepted and refused.
    spare_descriptor: Option<std::fs::File>,
    /// Whether the latest connection was among the last that the limit on descriptors allows.
    was_scarce: bool,
}

impl<H: Handler> Server<H> {
    /// Serves connections that get one of `slots`. On a host, of whose sandboxes these are the `users`, users of this
    /// machine are distinguished.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking, or the spare thread cannot be started.
    pub fn new(
        listener: TcpListener,
        handler: Arc<H>,
        slots: ConnectionSlots,
        users: Option<RangeInclusive<u32>>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let handover = Arc::<Handover>::default();
        start_spare_thread(&handler, &handover)?;
        Ok(Self {
            diag: users.as_ref().and_then(|_| SocketDiag::open().ok()),
            handover,
            listener,
            handler,
            slots,
            users,
            rush: Rush::default(),
            spare_descriptor: spare_descriptor(),
            was_scarce: false,
        })
    }

    /// Readable when a connection can be accepted.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Accepts one connection if one waits.
    pub fn accept(&mut self) {
        if self.was_scarce {
            await_descriptors();
        }
        match self.listener.accept() {
            Ok((socket, address)) => self.serve(socket, address),
            Err(error) => {
                // Other errors belong to a connection that died in the queue (accept(2)).
                if let Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) =
                    error.raw_os_error()
                {
                    self.accept_with_spare_descriptor(&error);
                }
            }
        }
    }

    fn serve(&mut self, socket: TcpStream, address: SocketAddr) {
        if self.spare_descriptor.is_none() {
            self.spare_descriptor = spare_descriptor();
        }
        // One that takes the place of another leaves its number free. The next one gets that, which is among the last no more.
        let is_scarce = sys::is_scarce(socket.as_fd()) || (self.was_scarce && sys::are_few_left());
        self.was_scarce = is_scarce;
        let Some(connection) = self.admit(socket, address) else {
            return;
        };
        if is_scarce {
            self.serve_in_place_of_others(connection, Lack::Descriptors);
            return;
        }
        let Some(room) = Room::take(ROOM_BYTES) else {
            self.serve_in_place_of_others(connection, Lack::Memory);
            return;
        };
        // The socket stays in the slot until the thread takes it: a thread that cannot be started
        // must not close the socket before the client gets an answer.
        let slot = Arc::new(Mutex::new(Some(connection)));
        let taken = Arc::clone(&slot);
        let handler = Arc::clone(&self.handler);
        let handover = Arc::clone(&self.handover);
        let thread = Thread::new("connection").keeping_memory().start(move || {
            drop(room);
            let mut next = lock(&taken).take();
            while let Some((socket, slot)) = next {
                connection::serve(&socket, slot, &*handler, true);
                drop(socket);
                next = handover.take();
            }
        });
        if thread.is_err() {
            // A statement of its own, which ends the lock.
            let connection = lock(&slot).take();
            if let Some(connection) = connection {
                self.serve_in_place_of_others(connection, Lack::Threads);
            }
        }
    }

    /// Gives a connection a slot, or refuses it.
    fn admit(&mut self, socket: TcpStream, address: SocketAddr) -> Option<Admitted> {
        let own = socket.local_addr().unwrap_or(address);
        let is_local = self.users.is_some() && is_here(own, address);
        let waiting = self.waiting();
        let (peer, opener) = if !is_local {
            (Peer::at(address.ip()), Opener::Other)
        } else if self.slots.is_quiet() && rush::is_short(waiting) {
            // Asking the kernel takes longer than the rest of accepting.
            (Peer::User(None), Opener::Other)
        } else {
            let user = self.peer_uid(own, address);
            let opener = match (user, &self.users) {
                (Ok(user), Some(users)) if user.is_none_or(|user| users.contains(&user)) => {
                    Opener::Local(user)
                }
                // Whose it is could not be asked: it must not pay for what sandboxes do.
                _ => Opener::Other,
            };
            (Peer::User(user.ok().flatten()), opener)
        };
        if self.users.is_some() && self.rush.is_flood(waiting, opener, Instant::now()) {
            let text = "this user opens connections faster than others can; try again later";
            refuse(&socket, "too_many_connections", text);
            return None;
        }
        let socket = Arc::new(socket);
        let ledger = match peer {
            Peer::User(Some(user)) => self.handler.ledger_of_user(user),
            _ => None,
        };
        let Some(slot) = self.slots.take_charging(peer, &socket, ledger) else {
            let text = "all connections are in use; close idle ones or try again";
            refuse(&socket, "too_many_connections", text);
            return None;
        };
        Some((socket, slot))
    }

    /// How many connections wait to be accepted. Asked on a host only, where it matters.
    fn waiting(&self) -> u32 {
        let state = (self.users.as_ref()).map(|_| sys::tcp_state(self.listener.as_fd()));
        match state {
            Some(Ok(TcpState::Listening { waiting, .. })) => waiting,
            _ => 0,
        }
    }

    /// Which user of this machine is at the other end.
    fn peer_uid(&mut self, own: SocketAddr, peer: SocketAddr) -> Result<Option<u32>, Errno> {
        let diag = self.diag.as_mut().ok_or(Errno::EMFILE)?;
        diag.tcp_peer_uid(own, peer)
    }

    /// Serves a connection on the thread of one that makes room, else on the spare thread, or refuses it. The thread of
    /// one that has ended has given its descriptor and its memory back before; the spare thread has no descriptor to give.
    /// False if it is refused.
    fn serve_in_place_of_others(&mut self, connection: Admitted, lack: Lack) -> bool {
        let (socket, mut slot) = connection;
        let number = slot.limit_time_for_token();
        self.handover.put((socket, slot));
        let deadline = Instant::now() + TIME_FOR_ROOM;
        let mut is_made = false;
        while Instant::now() < deadline {
            let limit = match self.slots.make_room(number) {
                Eviction::Done => {
                    is_made = true;
                    TIME_TO_END
                }
                // One that has just come may be about to show a token.
                Eviction::Early(left) => left.min(TIME_TO_END),
                // Those that were closed may still be ending.
                Eviction::Nobody if is_made => TIME_TO_END,
                Eviction::Nobody => break,
            };
            if self.handover.is_taken_within(limit) {
                return true;
            }
        }
        let Some(connection) = self.handover.take() else {
            return true;
        };
        let may_be_spared = !matches!(lack, Lack::Descriptors);
        let refused = if may_be_spared && self.may_use_spare_thread(&connection.0) {
            self.handover.give_to_spare(connection)
        } else {
            Err(connection)
        };
        let Err((socket, _)) = refused else {
            return true;
        };
        let line = format_args!("no room for a connection: {lack:?}");
        logging::about("connections", line);
        lack.refuse(&socket);
        false
    }

    /// Whether the spare thread may serve a connection: of a host, none of a user who may be a sandbox's.
    fn may_use_spare_thread(&mut self, socket: &TcpStream) -> bool {
        match (&self.users, socket.local_addr(), socket.peer_addr()) {
            (Some(users), Ok(own), Ok(peer)) if is_here(own, peer) => {
                let users = users.clone();
                let user = self.peer_uid(own, peer);
                user.is_ok_and(|user| user.is_some_and(|user| !users.contains(&user)))
            }
            _ => true,
        }
    }

    /// Accepts one connection by the spare descriptor. If nobody makes room for it, waits 10 ms for others to be closed.
    fn accept_with_spare_descriptor(&mut self, error: &io::Error) {
        logging::about("connections", format_args!("cannot accept: {error}"));
        self.spare_descriptor = None;
        let is_served = if let Ok((socket, address)) = self.listener.accept() {
            let connection = self.admit(socket, address);
            connection.is_some_and(|new| self.serve_in_place_of_others(new, Lack::Descriptors))
        } else {
            // It is the kernel's memory that is missing, or another program has taken the descriptor.
            self.slots.make_room(usize::MAX);
            false
        };
        self.spare_descriptor = spare_descriptor();
        if !is_served {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Where a connection waits for the thread of another one.
#[derive(Default)]
struct Handover {
    waiting: Mutex<Waiting>,
    has_changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    /// For the next thread whose connection ends.
    connection: Option<Admitted>,
    for_spare: Option<Admitted>,
    /// Whether the spare thread has no connection.
    is_spare_free: bool,
}

impl Handover {
    fn put(&self, connection: Admitted) {
        lock(&self.waiting).connection = Some(connection);
    }

    fn take(&self) -> Option<Admitted> {
        let connection = lock(&self.waiting).connection.take()?;
        self.has_changed.notify_all();
        Some(connection)
    }

    fn is_taken_within(&self, limit: Duration) -> bool {
        let is_there = |waiting: &mut Waiting| waiting.connection.is_some();
        let waiting = lock(&self.waiting);
        self.has_changed.wait_while_for(waiting, limit, is_there).1
    }

    /// Gives the spare thread a connection, or gives it back if that has another one.
    fn give_to_spare(&self, connection: Admitted) -> Result<(), Admitted> {
        let mut waiting = lock(&self.waiting);
        if !std::mem::take(&mut waiting.is_spare_free) {
            return Err(connection);
        }
        waiting.for_spare = Some(connection);
        self.has_changed.notify_all();
        Ok(())
    }

    fn wait_for_spare(&self) -> Option<Admitted> {
        let mut waiting = lock(&self.waiting);
        waiting.is_spare_free = true;
        let is_none = |waiting: &mut Waiting| waiting.for_spare.is_none();
        waiting = self.has_changed.wait_while(waiting, is_none);
        waiting.for_spare.take()
    }
}

/// Starts the spare thread, which serves when no other thread can be started and nobody makes room: a client that can
/// delete what uses them all must be heard. It serves one request of a connection, and has its memory from the start.
fn start_spare_thread<H: Handler>(handler: &Arc<H>, handover: &Arc<Handover>) -> io::Result<()> {
    let (handler, handover) = (Arc::clone(handler), Arc::clone(handover));
    let room = Room::take(ROOM_BYTES);
    let serve = move || {
        let _room = room;
        while let Some((socket, slot)) = handover.wait_for_spare() {
            connection::serve(&socket, slot, &*handler, false);
        }
    };
    Thread::new("spare").start(serve).map(drop)
}

/// Whether a connection comes from this machine. Sandboxes cannot choose another source address, because
/// Landlock denies them bind(2).
fn is_here(own: SocketAddr, peer: SocketAddr) -> bool {
    let peer = peer.ip().to_canonical();
    peer.is_loopback() || peer == own.ip().to_canonical()
}

/// A connection and its slot.
type Admitted = (Arc<TcpStream>, ConnectionSlot);

/// Waits a moment for connections that are being closed to give their descriptors back, so that those that are kept for
/// ending processes are not used up meanwhile.
fn await_descriptors() {
    const TRIES: u32 = 10;
    const PAUSE: Duration = Duration::from_millis(1);
    for _ in 0..TRIES {
        if !sys::are_few_left() {
            return;
        }
        thread::sleep(PAUSE);
    }
}

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

#[cfg(test)]
mod tests {
    use super::super::{Request, Response};
    use super::*;
    use crate::limits::ledger::Budget;

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n";
    const WITH_TOKEN: &[u8] = b"GET /token HTTP/1.1\r\nHost: h\r\n\r\n";

    /// Answers with the thread that serves. A request for `/token` has one.
    struct Threads(Arc<Budget>);

    impl Handler for Threads {
        fn handle(&self, request: &mut Request<'_>) -> Response {
            if request.head.path == b"/token" {
                let operator = self.0.whole();
                request.slot.give_to_operator(&operator).unwrap();
                request.is_admitted = true;
            }
            let thread = thread::current();
            Response::json(&format!("{:?} {:?} end", thread.name(), thread.id()))
        }
    }

    fn server() -> Server<Threads> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let budget = Budget::new(1 << 30);
        let slots = ConnectionSlots::new(16, Arc::clone(&budget));
        Server::new(listener, Arc::new(Threads(budget)), slots, None).unwrap()
    }

    /// A client whose connection waits to be accepted.
    fn client(server: &Server<Threads>) -> TcpStream {
        let client = TcpStream::connect(server.listener.local_addr().unwrap()).unwrap();
        let limit = Some(Duration::from_secs(60));
        client.set_read_timeout(limit).unwrap();
        client
    }

    /// A client of which the server has accepted the connection as if it had no thread for it; false if it was refused.
    fn client_without_thread(server: &mut Server<Threads>, sent: &[u8]) -> (TcpStream, bool) {
        let mut client = client(server);
        client.write_all(sent).unwrap();
        // A connection to loopback is in the queue when connect(2) returns.
        let (socket, address) = server.listener.accept().unwrap();
        let connection = server.admit(socket, address).unwrap();
        let is_served = server.serve_in_place_of_others(connection, Lack::Threads);
        (client, is_served)
    }

    fn ask(client: &mut TcpStream, request: &[u8]) -> String {
        client.write_all(request).unwrap();
        answer(client)
    }

    fn answer(client: &mut TcpStream) -> String {
        let mut answer = Vec::new();
        let mut byte = [0];
        while !answer.ends_with(b"end\"\n") {
            match client.read(&mut byte) {
                Ok(1) => answer.extend_from_slice(&byte),
                _ => break,
            }
        }
        String::from_utf8(answer).unwrap()
    }

    fn thread_in(answer: &str) -> &str {
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        answer.lines().last().unwrap()
    }

    #[test]
    fn without_a_thread_the_oldest_client_without_a_token_gives_its_own() {
        let mut server = server();
        let [mut operator, mut stranger] = [WITH_TOKEN, REQUEST].map(|request| {
            let mut client = client(&server);
            client.write_all(request).unwrap();
            server.accept();
            (answer(&mut client), client)
        });
        let (mut newest, is_served) = client_without_thread(&mut server, WITH_TOKEN);
        assert!(is_served);
        let answered = answer(&mut newest);
        assert_eq!(thread_in(&answered), thread_in(&stranger.0));
        assert_eq!(stranger.1.read(&mut [0]).unwrap(), 0, "it is closed");
        // Those with a token stay.
        for client in [&mut operator.1, &mut newest] {
            assert!(ask(client, REQUEST).starts_with("HTTP/1.1 200 "));
        }
        assert_eq!(server.slots.count(), 2);
    }

    #[test]
    fn the_spare_thread_serves_when_all_have_a_token_and_one_request_of_a_connection() {
        let mut server = server();
        let mut operator = client(&server);
        server.accept();
        ask(&mut operator, WITH_TOKEN);
        while !lock(&server.handover.waiting).is_spare_free {
            thread::yield_now();
        }
        let (mut newest, is_served) = client_without_thread(&mut server, REQUEST);
        assert!(is_served);
        let answered = answer(&mut newest);
        assert!(answered.contains("Connection: close"), "{answered}");
        assert!(thread_in(&answered).contains("spare"), "{answered}");
        // It waits for no client that goes on.
        let begun = Instant::now();
        while !lock(&server.handover.waiting).is_spare_free {
            assert!(
                begun.elapsed() < Duration::from_secs(1),
                "the thread is held"
            );
            thread::yield_now();
        }
        assert!(ask(&mut operator, REQUEST).starts_with("HTTP/1.1 200 "));
    }

    #[test]
    fn a_long_queue_of_a_sandbox_is_refused_until_it_is_shorter() {
        let mut server = server();
        let listener = crate::sys::listen::listen("127.0.0.1:0".parse().unwrap()).unwrap();
        (server.listener, server.slots) =
            (listener, ConnectionSlots::new(1000, Budget::new(1 << 30)));
        let clients: Vec<_> = (0..400).map(|_| client(&server)).collect();
        let own = nix::unistd::getuid().as_raw();
        // If it cannot be asked whose they are, nobody is refused.
        for (diag, count, refused) in [(None, 30, 0), (SocketDiag::open().ok(), 370, 50)] {
            (server.users, server.diag) = (Some(own..=own), diag);
            server.rush = Rush::default();
            let mut admitted = Vec::new();
            for _ in 0..count {
                let (socket, address) = server.listener.accept().unwrap();
                admitted.extend(server.admit(socket, address));
            }
            assert_eq!(count - admitted.len(), refused);
        }
        drop(clients);
    }

    #[test]
    fn who_came_when_there_was_no_room_and_shows_no_token_goes() {
        let mut server = server();
        while !lock(&server.handover.waiting).is_spare_free {
            thread::yield_now();
        }
        let (mut silent, is_served) = client_without_thread(&mut server, b"");
        assert!(is_served);
        let begun = Instant::now();
        assert_eq!(silent.read(&mut [0]).unwrap(), 0);
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
}
