//! The thread of a workspace that makes the sockets of its commands and accepts their connections.
//!
//! It ends some time after the last command. A caller that gets no processor time can hold it up, and with it the
//! other commands of its workspace, but no others.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::SockFlag;

use super::check::loopback_socket;
use super::gate::Gate;
use super::{Exits, proxy};
use crate::error::{Error, Kind, Result};
use crate::http::seats::Peer;
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
pub(super) struct Worker(Arc<Inbox>);

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

struct Inbox {
    wakeup: EventFd,
    /// Guards the sources that the thread has not taken up yet.
    arrived: Mutex<Vec<(Arc<Gate>, Source)>>,
}

impl Worker {
    /// Starts the thread.
    ///
    /// # Errors
    /// `NoResources` if there is no thread or descriptor left.
    pub(super) fn start(exits: Arc<Exits>) -> Result<Self> {
        let failed = |cause: &dyn std::fmt::Display| {
            let text = format!("cannot serve the network of commands: {cause}");
            Error::new(Kind::NoResources, text)
        };
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wakeup = EventFd::from_flags(flags).map_err(|errno| failed(&errno))?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(|errno| failed(&errno))?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, WAKEUP);
        epoll.add(&wakeup, event).map_err(|errno| failed(&errno))?;
        let inbox = Arc::new(Inbox {
            wakeup,
            arrived: Mutex::default(),
        });
        let own = Arc::clone(&inbox);
        thread::Builder::new()
            .name("network".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || Served::new(exits, epoll).run(&own))
            .map_err(|error| failed(&error))?;
        Ok(Self(inbox))
    }

    /// Gives the thread a source of connections to a gate.
    pub(super) fn add(&self, gate: Arc<Gate>, source: Source) {
        lock(&self.0.arrived).push((gate, source));
        let _ = self.0.wakeup.write(1);
    }
}

/// The data of the event that tells of an arrival; nothing else has this key.
const WAKEUP: u64 = u64::MAX;

/// What the thread serves, by the data of its events.
struct Served {
    exits: Arc<Exits>,
    epoll: Epoll,
    next_key: u64,
    sources: HashMap<u64, (Arc<Gate>, Source)>,
    gates: HashMap<u64, Arc<Gate>>,
    /// Whether the sandbox has ended.
    is_over: bool,
}

impl Served {
    fn new(exits: Arc<Exits>, epoll: Epoll) -> Self {
        Self {
            exits,
            epoll,
            next_key: 0,
            sources: HashMap::new(),
            gates: HashMap::new(),
            is_over: false,
        }
    }

    fn run(mut self, inbox: &Inbox) {
        // Until the thread ends: its sockets are the user's, and so are those of the threads that it starts.
        let acting = self.exits.user.map(ActingAs::new).transpose();
        let Ok(_acting) = acting else {
            logging::info(format_args!("network: cannot act as the sandbox"));
            return;
        };
        let mut events = [EpollEvent::empty(); 16];
        loop {
            let timeout = match (self.sources.is_empty(), self.is_over) {
                (true, true) => EpollTimeout::ZERO,
                (true, false) => EpollTimeout::from(LINGER_MS),
                (false, _) => EpollTimeout::NONE,
            };
            let count = match self.epoll.wait(&mut events, timeout) {
                Ok(count) => count,
                Err(Errno::EINTR) => continue,
                Err(errno) => {
                    logging::info(format_args!("network: epoll_wait: {errno:?}"));
                    return;
                }
            };
            if count == 0 {
                let mut state = lock(&self.exits.state);
                if lock(&inbox.arrived).is_empty() {
                    state.worker = None;
                    return;
                }
            }
            for event in &events[..count] {
                match event.data() {
                    WAKEUP => self.take_arrivals(inbox),
                    key => self.serve(key, event.events()),
                }
            }
        }
    }

    fn take_arrivals(&mut self, inbox: &Inbox) {
        let _ = inbox.wakeup.read();
        for (gate, source) in std::mem::take(&mut *lock(&inbox.arrived)) {
            let is_known = self.gates.values().any(|known| Arc::ptr_eq(known, &gate));
            if !is_known && let Some(key) = self.watch(gate.listener().as_fd()) {
                self.gates.insert(key, Arc::clone(&gate));
            }
            // Without this the source is dropped, and the calls of a command fail.
            if let Some(key) = self.watch(source.as_fd()) {
                self.sources.insert(key, (gate, source));
            }
        }
    }

    fn watch(&mut self, descriptor: BorrowedFd<'_>) -> Option<u64> {
        let key = self.next_key;
        self.next_key += 1;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, key);
        let added = self.epoll.add(descriptor, event);
        added
            .inspect_err(|errno| logging::info(format_args!("network: epoll_ctl: {errno:?}")))
            .ok()
            .map(|()| key)
    }

    /// Serves one call or one connection, so that a command that makes sockets all the time does not keep the others
    /// waiting.
    fn serve(&mut self, key: u64, events: EpollFlags) {
        if let Some(gate) = self.gates.get(&key) {
            accept(&self.exits, gate);
        } else if let Some((_, source)) = self.sources.get(&key) {
            match source {
                Source::Command(listener) if events.contains(EpollFlags::EPOLLIN) => {
                    if let Ok(call) = listener.receive() {
                        hand_out(listener, call);
                    }
                }
                // No process has the filter any more, or the network.
                Source::Command(_) | Source::Network(_) => self.end(key),
            }
        }
    }

    /// Lets go of a source, and of its gate if nothing else leads there.
    fn end(&mut self, key: u64) {
        let Some((gate, source)) = self.sources.remove(&key) else {
            return;
        };
        let _ = self.epoll.delete(&source);
        self.is_over |= matches!(source, Source::Network(_));
        let is_used = |(own, _): &(Arc<Gate>, _)| Arc::ptr_eq(own, &gate);
        if !self.sources.values().any(is_used) {
            let _ = self.epoll.delete(gate.listener());
            self.gates.retain(|_, own| !Arc::ptr_eq(own, &gate));
        }
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

/// Accepts a connection of a command and serves it on a thread of its own.
fn accept(exits: &Arc<Exits>, gate: &Arc<Gate>) {
    let Ok((socket, peer)) = gate.listener().accept() else {
        return;
    };
    // Other users of the machine can connect too.
    if !(gate.is_inside() || is_of_user(exits, gate.address(), peer))
        || sys::is_scarce(socket.as_fd())
    {
        return;
    }
    let socket = Arc::new(socket);
    let user = exits.user.map(|user| user.uid);
    let Some(mut seat) = exits.egress.seats.take(Peer::User(user), &socket) else {
        return refuse(
            &socket,
            "too_many_connections",
            "all connections of the server are in use; try again later",
        );
    };
    if let Err(error) = seat.give_to_tenant(&exits.ledger) {
        return refuse(&socket, "over_limit", &error.to_string());
    }
    let Some(room) = Room::take(ROOM_BYTES) else {
        return refuse(
            &socket,
            "no_memory",
            "the machine has no memory left for this connection; try again later",
        );
    };
    let (exits, gate) = (Arc::clone(exits), Arc::clone(gate));
    let serve = {
        let socket = Arc::clone(&socket);
        move || {
            drop(room);
            proxy::serve(&socket, seat, exits, gate);
        }
    };
    let thread = thread::Builder::new().stack_size(STACK_BYTES).spawn(serve);
    if thread.is_err() {
        let text = "the machine has no thread left for this connection; try again later";
        refuse(&socket, "no_threads", text);
    }
}

/// Whether a connection comes from a command of the workspace.
fn is_of_user(exits: &Exits, gate: SocketAddr, peer: SocketAddr) -> bool {
    exits
        .user
        .is_none_or(|user| sys::tcp_peer_uid(gate, peer) == Some(user.uid))
}
