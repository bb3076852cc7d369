//! The thread of a workspace that makes the sockets of its commands and accepts their connections.
//!
//! It ends some time after the last command. A caller that gets no processor time can hold it up, and with it the
//! other commands of its workspace, but no others.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::SockFlag;

use super::check::loopback_socket;
use super::gate::Gate;
use super::{Exits, proxy};
use crate::crew::Crew;
use crate::error::{Error, Kind, Result};
use crate::http::seats::{Peer, Seat};
use crate::http::server::refuse;
use crate::logging;
use crate::memory::Room;
use crate::sync::{Mutex, lock};
use crate::sys::{self, ActingAs, CallListener, WaitingCall};

/// How long the thread stays without a command, in milliseconds: starting it again takes as long as a tenth of one.
const LINGER_MS: u16 = 5_000;

/// Address space; a thread touches a small part of it.
const STACK_BYTES: usize = 256 * 1024;

/// A generous estimate of what a connection needs: its stack and its buffers.
const ROOM_BYTES: usize = STACK_BYTES + (1 << 20);

/// `SOCK_TYPE_MASK` of linux/net.h.
const TYPE_BITS: u64 = 0xf;

/// The thread, for those who give it commands.
pub(super) struct Worker(Arc<Served>);

/// Whose connections arrive at a gate.
pub(super) enum Source {
    /// A command that gets its sockets here.
    Command(CallListener),
    /// All commands of a sandbox with a network of its own. The descriptor is readable when that has ended.
    Network(OwnedFd),
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Command(listener) => listener.as_fd(),
            Self::Network(end) => end.as_fd(),
        }
    }
}

impl Worker {
    /// Starts the thread.
    ///
    /// # Errors
    /// `NoResources` if there is no thread or descriptor left.
    pub(super) fn start(exits: Arc<Exits>) -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(|errno| failed(&errno))?;
        let served = Arc::new_cyclic(|this: &Weak<Served>| {
            let this = Weak::clone(this);
            let lead = move |Lead| {
                if let Some(served) = this.upgrade() {
                    served.lead_or_give_up();
                }
            };
            Served {
                exits,
                epoll,
                watched: Mutex::default(),
                threads: Crew::new("network", STACK_BYTES, lead),
            }
        });
        let started = served.threads.give(Lead);
        started.map_err(|(_, error)| failed(&error))?;
        Ok(Self(served))
    }

    /// Gives the thread a source of connections to a gate. It need not wake up for that.
    ///
    /// # Errors
    /// `NoResources` if the kernel can watch no more.
    pub(super) fn add(&self, gate: Arc<Gate>, source: Source) -> Result<()> {
        let epoll = &self.0.epoll;
        let mut watched = lock(&self.0.watched);
        let mut gates = watched.gates.values();
        if !gates.any(|known| Arc::ptr_eq(known, &gate)) {
            let key = watched.watch(epoll, gate.listener().as_fd())?;
            watched.gates.insert(key, Arc::clone(&gate));
        }
        let key = watched.watch(epoll, source.as_fd())?;
        watched.sources.insert(key, (gate, Arc::new(source)));
        Ok(())
    }
}

fn failed(cause: &dyn std::fmt::Display) -> Error {
    let text = format!("cannot serve the network of commands: {cause}");
    Error::new(Kind::NoResources, text)
}

/// What the thread serves.
struct Served {
    exits: Arc<Exits>,
    epoll: Epoll,
    /// Guards what `epoll` watches.
    watched: Mutex<Watched>,
    threads: Crew<Lead>,
}

/// The job to wait for events. One thread has it; it passes it on when it has accepted a connection, and serves that itself,
/// so that no connection waits for another thread to wake up.
struct Lead;

/// What is watched, by the data of its events.
#[derive(Default)]
struct Watched {
    next_key: u64,
    sources: HashMap<u64, (Arc<Gate>, Arc<Source>)>,
    gates: HashMap<u64, Arc<Gate>>,
    /// Whether the sandbox has ended.
    is_over: bool,
}

impl Watched {
    fn watch(&mut self, epoll: &Epoll, descriptor: BorrowedFd<'_>) -> Result<u64> {
        let key = self.next_key;
        self.next_key += 1;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, key);
        let added = epoll.add(descriptor, event);
        added.map(|()| key).map_err(|errno| failed(&errno))
    }
}

impl Served {
    fn lead_or_give_up(&self) {
        if let Err(errno) = self.lead() {
            logging::info(format_args!("network: {errno:?}"));
            // The calls of its commands fail then, instead of waiting.
            lock(&self.exits.state).worker = None;
        }
    }

    /// Waits for events until it serves a connection, or for some time after the last source, or until it cannot go on.
    fn lead(&self) -> nix::Result<()> {
        // Also while it serves a connection: its sockets are the user's.
        let _acting = self.exits.user.map(ActingAs::new).transpose()?;
        let mut events = [EpollEvent::empty(); 16];
        loop {
            let count = match self.epoll.wait(&mut events, self.timeout()) {
                Ok(count) => count,
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(errno),
            };
            if count == 0 {
                // Who adds a source holds this lock.
                let mut state = lock(&self.exits.state);
                if lock(&self.watched).sources.is_empty() {
                    state.worker = None;
                    return Ok(());
                }
            }
            for event in &events[..count] {
                if let Some(connection) = self.serve(event.data(), event.events()) {
                    if self.threads.give(Lead).is_ok() {
                        // What is left of the events is told to the next one again.
                        self.serve_connection(connection);
                        return Ok(());
                    }
                    let text =
                        "the machine has no thread left for this connection; try again later";
                    refuse(&connection.socket, "no_threads", text);
                }
            }
        }
    }

    fn serve_connection(&self, connection: Connection) {
        let Connection {
            socket,
            seat,
            room,
            gate,
        } = connection;
        drop(room);
        proxy::serve(&socket, seat, Arc::clone(&self.exits), gate);
    }

    fn timeout(&self) -> EpollTimeout {
        let watched = lock(&self.watched);
        match (watched.sources.is_empty(), watched.is_over) {
            (true, true) => EpollTimeout::ZERO,
            (true, false) => EpollTimeout::from(LINGER_MS),
            (false, _) => EpollTimeout::NONE,
        }
    }

    /// Serves one call, so that a command that makes sockets all the time does not keep the others waiting, or accepts
    /// one connection.
    fn serve(&self, key: u64, events: EpollFlags) -> Option<Connection> {
        let (gate, source) = {
            let watched = lock(&self.watched);
            let source = watched.sources.get(&key);
            (
                watched.gates.get(&key).cloned(),
                source.map(|(_, source)| Arc::clone(source)),
            )
        };
        if let Some(gate) = gate {
            return accept(&self.exits, gate);
        }
        match &*source? {
            Source::Command(listener) if events.contains(EpollFlags::EPOLLIN) => {
                if let Ok(call) = listener.receive() {
                    hand_out(listener, call);
                }
            }
            // No process has the filter any more, or the network.
            Source::Command(_) | Source::Network(_) => self.end(key),
        }
        None
    }

    /// Lets go of a source, and of gates that nothing leads to; but not of the last one, which is likely to be needed
    /// again.
    fn end(&self, key: u64) {
        let last = lock(&self.exits.state).last.clone();
        let mut watched = lock(&self.watched);
        let Watched {
            sources,
            gates,
            is_over,
            ..
        } = &mut *watched;
        let Some((_, source)) = sources.remove(&key) else {
            return;
        };
        let _ = self.epoll.delete(&*source);
        *is_over |= matches!(*source, Source::Network(_));
        gates.retain(|_, gate| {
            let is_gate = |other: &Arc<Gate>| Arc::ptr_eq(other, gate);
            let is_used = last.as_ref().is_some_and(is_gate)
                || sources.values().any(|(other, _)| is_gate(other));
            if !is_used {
                let _ = self.epoll.delete(gate.listener());
            }
            is_used
        });
    }
}

/// Answers socket(2). What is asked for is in registers, so the caller cannot change it meanwhile.
fn hand_out(listener: &CallListener, call: WaitingCall) {
    let bits = |flag: SockFlag| u64::from(flag.bits().cast_unsigned());
    let (non_blocking, close_on_exec) =
        (bits(SockFlag::SOCK_NONBLOCK), bits(SockFlag::SOCK_CLOEXEC));
    // An `int`: the kernel does not look at the upper half.
    let kind = call.arguments[1] & u64::from(u32::MAX);
    if i64::from(call.number) != libc::SYS_socket {
        return listener.refuse(call, Errno::EOPNOTSUPP);
    }
    if kind & !(TYPE_BITS | non_blocking | close_on_exec) != 0 {
        return listener.refuse(call, Errno::EINVAL);
    }
    let flags = if kind & non_blocking == 0 {
        SockFlag::empty()
    } else {
        SockFlag::SOCK_NONBLOCK
    };
    let answered = loopback_socket(flags)
        .and_then(|socket| listener.answer(call, socket.as_fd(), kind & close_on_exec != 0));
    match answered {
        Ok(()) | Err(Errno::ENOENT) => {}
        Err(errno) => listener.refuse(call, errno),
    }
}

/// A connection that is to be served.
struct Connection {
    socket: Arc<TcpStream>,
    seat: Seat,
    room: Room,
    gate: Arc<Gate>,
}

/// Accepts a connection of a command; `None` if there is none to serve.
fn accept(exits: &Exits, gate: Arc<Gate>) -> Option<Connection> {
    let (socket, peer) = gate.listener().accept().ok()?;
    // Other users of the machine can connect too.
    if !(gate.is_inside() || is_of_user(exits, gate.address(), peer))
        || sys::is_scarce(socket.as_fd())
    {
        return None;
    }
    let socket = Arc::new(socket);
    let user = exits.user.map(|user| user.uid);
    let Some(mut seat) = exits.egress.seats.take(Peer::User(user), &socket) else {
        refuse(
            &socket,
            "too_many_connections",
            "all connections of the server are in use; try again later",
        );
        return None;
    };
    if let Err(error) = seat.give_to_tenant(&exits.ledger) {
        refuse(&socket, "over_limit", &error.to_string());
        return None;
    }
    let Some(room) = Room::take(ROOM_BYTES) else {
        refuse(
            &socket,
            "no_memory",
            "the machine has no memory left for this connection; try again later",
        );
        return None;
    };
    Some(Connection {
        socket,
        seat,
        room,
        gate,
    })
}

/// Whether a connection comes from a command of the workspace.
fn is_of_user(exits: &Exits, gate: SocketAddr, peer: SocketAddr) -> bool {
    exits
        .user
        .is_none_or(|user| sys::tcp_peer_uid(gate, peer) == Some(user.uid))
}
