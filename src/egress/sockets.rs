//! The thread of a workspace that makes the sockets of its commands and accepts their connections. If a command looks
//! up names on a socket that the thread made, the thread answers these queries too.
//!
//! The thread ends some time after the last command. A command that calls it but gets no processor time can delay the
//! thread, and with it the other commands of its workspace, but not those of other workspaces.

use std::collections::{HashMap, VecDeque};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};

use super::dns::Question;
use super::listener::EgressListener;
use super::redirect::{self, Copies};
use super::{Exits, proxy, resolver};
use crate::error::{Error, Kind, Result};
use crate::http::server::refuse;
use crate::http::slots::{ConnectionSlot, Peer};
use crate::limits::memory::Room;
use crate::sys::{self, CallListener, WaitingCall};
use crate::threads::SMALL_STACK_BYTES;
use crate::threads::lock::{CountedPlace, Mutex, lock};
use crate::threads::panics::contain;
use crate::threads::pool::ThreadPool;
use crate::{fault, logging};

/// How long the thread stays without a command, at most: starting it again takes a tenth of a command's time.
const LINGER: Duration = Duration::from_secs(5);

/// A generous estimate of what a connection needs: its stack and its buffers.
const ROOM_BYTES: usize = SMALL_STACK_BYTES + (1 << 20);

/// Most sockets on which the programs of a workspace look up names.
const MAX_RESOLVERS: usize = 64;

/// How many of the sockets that the programs of a workspace have got are known. One that is not connected before so many others
/// were made is of no use.
const MAX_HANDED_OUT: usize = if cfg!(test) { 4 } else { 4096 };

/// Most names that are looked up for a workspace at the same time, in all of its runs. Further questions are dropped: programs ask again.
const MAX_LOOK_UPS: usize = 16;

/// Most bytes of a DNS question.
const MAX_QUESTION_BYTES: usize = 1024;

/// `SOCK_TYPE_MASK` of linux/net.h.
const TYPE_BITS: u64 = 0xf;

/// The handle by which a workspace gives the thread commands to serve.
pub(super) struct Worker(Arc<Served>);

/// Whose connections arrive at an egress listener.
pub(super) enum Source {
    /// A command that gets its sockets from this thread.
    Command(CallListener),
    /// All commands of a sandbox with a network of its own. The descriptor is readable when that network has ended.
    Network(OwnedFd),
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Command(calls) => calls.as_fd(),
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
            let work = move |job| match job {
                Job::Lead => {
                    if let Some(served) = this.upgrade() {
                        served.lead_or_give_up();
                    }
                }
                Job::LookUp(look_up) => {
                    if let Some(served) = this.upgrade() {
                        served.look_up(&look_up);
                    }
                }
            };
            Served {
                exits,
                epoll,
                watched: Mutex::default(),
                copies: Copies::default(),
                spare: Mutex::default(),
                resolvers: Arc::default(),
                threads: ThreadPool::new("network", work),
            }
        });
        let started = served.threads.give(Job::Lead);
        started.map_err(|(_, error)| failed(&error))?;
        Ok(Self(served))
    }

    /// Gives the thread a source of connections to an egress listener. The thread need not wake up for that.
    ///
    /// # Errors
    /// `NoResources` if epoll cannot watch more descriptors.
    pub(super) fn add(&self, listener: Arc<EgressListener>, source: Source) -> Result<()> {
        let epoll = &self.0.epoll;
        let mut watched = lock(&self.0.watched);
        let mut listeners = watched.listeners.values();
        if !listeners.any(|known| Arc::ptr_eq(known, &listener)) {
            let key = watched.watch(epoll, listener.tcp().as_fd())?;
            watched.listeners.insert(key, Arc::clone(&listener));
        }
        let key = watched.watch(epoll, source.as_fd())?;
        watched.sources.insert(key, (listener, Arc::new(source)));
        watched.unused_since = None;
        Ok(())
    }

    /// Closes the server's ends of all sockets of programs. The sources end by themselves, and the thread ends with
    /// them.
    pub(super) fn close(&self) {
        let epoll = &self.0.epoll;
        let mut watched = lock(&self.0.watched);
        watched.is_over = true;
        for (_, listener) in watched.listeners.drain() {
            let _ = epoll.delete(listener.tcp());
        }
        for (_, resolver) in watched.resolvers.drain() {
            let _ = epoll.delete(&resolver.socket);
        }
        // It may be waiting already. Reported once; without a descriptor it ends a little later.
        if let Ok(wakeup) = EventFd::from_value_and_flags(1, EfdFlags::EFD_CLOEXEC) {
            let event = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, u64::MAX);
            let _ = epoll.add(&wakeup, event);
            watched.wakeup = Some(wakeup);
        }
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
    /// Copies of sockets that programs may still connect.
    copies: Copies,
    /// Guards a socket that was made in advance, so that the next caller does not wait for it. A spare socket fits all
    /// egress listeners of a workspace.
    spare: Mutex<Option<OwnedFd>>,
    /// The number of sockets for look-ups.
    resolvers: Arc<AtomicUsize>,
    threads: ThreadPool<Job>,
}

enum Job {
    /// Waits for events. Only one thread does this. When it has accepted a connection, it passes this job on and serves
    /// the connection itself, so that no connection waits for another thread to wake up.
    Lead,
    /// Looks up a name and answers.
    LookUp(LookUp),
}

/// A name that is being looked up.
struct LookUp {
    listener: Arc<EgressListener>,
    resolver: Arc<Resolver>,
    question: Question,
    /// One of [`MAX_LOOK_UPS`].
    _place: CountedPlace,
    _room: Room,
}

/// The server's end of a socket on which a program looks up names.
struct Resolver {
    socket: OwnedFd,
    listener: Weak<EgressListener>,
    /// The inode of the program's end.
    inode: u64,
    /// One of [`MAX_RESOLVERS`].
    _place: CountedPlace,
}

/// What epoll watches. The keys are the data of its events.
#[derive(Default)]
struct Watched {
    next_key: u64,
    sources: HashMap<u64, (Arc<EgressListener>, Arc<Source>)>,
    listeners: HashMap<u64, Arc<EgressListener>>,
    resolvers: HashMap<u64, Arc<Resolver>>,
    /// Since when there are no sources.
    unused_since: Option<Instant>,
    /// Whether nothing runs in the workspace any more.
    is_over: bool,
    /// Tells the thread so.
    wakeup: Option<EventFd>,
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
        match contain(|| self.lead()) {
            Ok(Ok(())) => return,
            Ok(Err(errno)) => logging::info(format_args!("network: {errno:?}")),
            Err(_) => {}
        }
        let mut state = lock(&self.exits.state);
        let worker = state.worker.as_ref();
        if worker.is_some_and(|worker| std::ptr::eq(&raw const *worker.0, self)) {
            state.worker = None;
            // So the next command lets a new thread serve the sandbox's own network.
            state.serves_inside = false;
        }
        drop(state);
        // This closes the listeners of its commands, so that their calls fail instead of waiting.
        drop(std::mem::take(&mut *lock(&self.watched)));
    }

    /// Waits for events until it has served a connection, or for some time after the last source has ended.
    ///
    /// # Errors
    /// The errno if it cannot wait for events.
    fn lead(&self) -> nix::Result<()> {
        let mut events = [EpollEvent::empty(); 16];
        loop {
            let count = match self.epoll.wait(&mut events, self.timeout()) {
                Ok(count) => count,
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(errno),
            };
            // Whatever else happens: others may connect all the time.
            if self.timeout() == EpollTimeout::ZERO && self.give_up_if_unused() {
                return Ok(());
            }
            fault::point("network");
            for event in &events[..count] {
                if let Some(connection) = self.serve(event.data(), event.events()) {
                    if self.threads.give(Job::Lead).is_ok() {
                        // epoll reports the events that were not served to the next leader again.
                        let _ = contain(|| self.serve_connection(connection));
                        return Ok(());
                    }
                    let text =
                        "the machine has no thread left for this connection; try again later";
                    refuse(&connection.socket, "no_threads", text);
                }
            }
        }
    }

    /// Ends the thread, and closes the egress listener that was used last: nobody would accept what waits there. False if there
    /// is a source again.
    fn give_up_if_unused(&self) -> bool {
        // Sources are added under this lock.
        let mut state = lock(&self.exits.state);
        let mut watched = lock(&self.watched);
        if !watched.sources.is_empty() {
            return false;
        }
        state.worker = None;
        let closed = (state.last.take(), std::mem::take(&mut *watched));
        drop((watched, state));
        // Closing them can take the kernel a moment.
        drop(closed);
        true
    }

    fn serve_connection(&self, connection: Connection) {
        let Connection {
            socket,
            slot,
            room,
            listener,
        } = connection;
        drop(room);
        proxy::serve(&socket, slot, Arc::clone(&self.exits), listener);
    }

    fn timeout(&self) -> EpollTimeout {
        let mut watched = lock(&self.watched);
        if !watched.sources.is_empty() {
            return EpollTimeout::NONE;
        }
        if watched.is_over {
            return EpollTimeout::ZERO;
        }
        let unused = watched
            .unused_since
            .get_or_insert_with(Instant::now)
            .elapsed();
        let left = LINGER.saturating_sub(unused).as_millis();
        // At most five seconds.
        EpollTimeout::from(u16::try_from(left).unwrap_or(u16::MAX))
    }

    /// Serves one event: one call or question, or one new connection, which is returned. It serves no more at once, so
    /// that a command that makes sockets all the time does not keep the others waiting.
    fn serve(&self, key: u64, events: EpollFlags) -> Option<Connection> {
        let (listener, source) = {
            let watched = lock(&self.watched);
            if let Some(listener) = watched.listeners.get(&key) {
                let listener = Arc::clone(listener);
                drop(watched);
                return accept(&self.exits, listener);
            }
            if let Some(resolver) = watched.resolvers.get(&key) {
                let resolver = Arc::clone(resolver);
                drop(watched);
                self.serve_resolver(key, resolver);
                return None;
            }
            watched.sources.get(&key)?.clone()
        };
        match &*source {
            Source::Command(calls) if events.contains(EpollFlags::EPOLLIN) => {
                if let Ok(call) = calls.receive() {
                    self.answer(&listener, calls, call);
                }
            }
            // No process has the filter any more, or the network has ended.
            Source::Command(_) | Source::Network(_) => self.end(key),
        }
        None
    }

    /// Answers a call of a command.
    fn answer(&self, listener: &Arc<EgressListener>, calls: &CallListener, call: WaitingCall) {
        // Sockets belong to the user. No thread acts as the user while it waits: that would outlive the sandbox.
        let _acting = match self.exits.act() {
            Ok(acting) => acting,
            Err(errno) => return calls.refuse(call, errno),
        };
        match i64::from(call.number) {
            libc::SYS_socket => {
                if let Err(errno) = self.hand_out(listener, calls, &call) {
                    calls.refuse(call, errno);
                }
            }
            libc::SYS_connect => {
                let exits = &self.exits;
                let is_resolver = |inode| self.has_resolver(inode);
                redirect::answer_connect(exits, listener, &self.copies, is_resolver, calls, call);
            }
            libc::SYS_listen => {
                // A copy would keep the port open after the program has closed its socket.
                drop(redirect::socket_of(&call).and_then(|socket| self.copies.take(socket)));
                calls.proceed(call);
            }
            _ => calls.refuse(call, Errno::EOPNOTSUPP),
        }
    }

    /// Answers socket(2). Its arguments are in registers, so the caller cannot change them after the check.
    fn hand_out(
        &self,
        listener: &Arc<EgressListener>,
        calls: &CallListener,
        call: &WaitingCall,
    ) -> nix::Result<()> {
        let bits = |flag: SockFlag| u64::from(flag.bits().cast_unsigned());
        let (non_blocking, close_on_exec) =
            (bits(SockFlag::SOCK_NONBLOCK), bits(SockFlag::SOCK_CLOEXEC));
        // An `int`: the kernel does not look at the upper half.
        let kind = call.arguments[1] & u64::from(u32::MAX);
        if kind & !(TYPE_BITS | non_blocking | close_on_exec) != 0 {
            return Err(Errno::EINVAL);
        }
        let is_non_blocking = kind & non_blocking != 0;
        let is_close_on_exec = kind & close_on_exec != 0;
        let is_transparent = listener.filter().is_transparent;
        let is_datagram = kind & TYPE_BITS == SockType::Datagram as u64;
        let is_ipv6 = call.arguments[0] & u64::from(u32::MAX) == AddressFamily::Inet6 as u64;
        let socket = if is_transparent && is_datagram {
            self.add_resolver(listener, is_non_blocking)?
        } else {
            let socket = if is_ipv6 {
                listener.socket(AddressFamily::Inet6, is_non_blocking)?
            } else {
                self.socket(listener, is_non_blocking)?
            };
            self.exits
                .handed_out
                .add(sys::socket_cookie(socket.as_fd())?);
            socket
        };
        match calls.answer(*call, socket.as_fd(), is_close_on_exec) {
            Ok(()) if is_transparent && !is_datagram => self.copies.keep(socket),
            // ENOENT: the caller has ended.
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(errno) => return Err(errno),
        }
        if lock(&self.spare).is_none() {
            let next = listener.socket(AddressFamily::Inet, false).ok();
            *lock(&self.spare) = next;
        }
        Ok(())
    }

    /// The spare socket if there is one, else a new one.
    fn socket(
        &self,
        listener: &Arc<EgressListener>,
        is_non_blocking: bool,
    ) -> nix::Result<OwnedFd> {
        let Some(spare) = lock(&self.spare).take() else {
            return listener.socket(AddressFamily::Inet, is_non_blocking);
        };
        if is_non_blocking {
            fcntl(&spare, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        Ok(spare)
    }

    /// Makes a socket on which a program looks up names, and returns the program's end.
    fn add_resolver(
        &self,
        listener: &Arc<EgressListener>,
        is_non_blocking: bool,
    ) -> nix::Result<OwnedFd> {
        let place = CountedPlace::take(&self.resolvers, MAX_RESOLVERS).ok_or(Errno::EMFILE)?;
        // Unlike datagram sockets, these report that the other end was closed.
        let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
        let (socket, theirs) = socketpair(AddressFamily::Unix, kind, None, flags)?;
        if sys::is_getting_scarce(theirs.as_fd()) {
            return Err(Errno::ENFILE);
        }
        sys::refuse_descriptors(socket.as_fd());
        if is_non_blocking {
            fcntl(&theirs, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        let inode = redirect::inode(&theirs).ok_or(Errno::EBADF)?;
        let mut watched = lock(&self.watched);
        let key = watched.watch(&self.epoll, socket.as_fd());
        let key = key.map_err(|_| Errno::ENOBUFS)?;
        let resolver = Resolver {
            socket,
            listener: Arc::downgrade(listener),
            inode,
            _place: place,
        };
        watched.resolvers.insert(key, Arc::new(resolver));
        Ok(theirs)
    }

    fn has_resolver(&self, inode: u64) -> bool {
        let watched = lock(&self.watched);
        let mut resolvers = watched.resolvers.values();
        resolvers.any(|resolver| resolver.inode == inode)
    }

    /// Receives one question. Answers it at once if that needs no look-up; else another thread looks up the name.
    fn serve_resolver(&self, key: u64, resolver: Arc<Resolver>) {
        let mut message = [0; MAX_QUESTION_BYTES];
        let message = match resolver.receive(&mut message) {
            Ok(Some(message)) => message,
            Ok(None) => return,
            Err(Ended) => {
                let _ = self.epoll.delete(&resolver.socket);
                lock(&self.watched).resolvers.remove(&key);
                return;
            }
        };
        let (Some(question), Some(listener)) =
            (Question::parse(message), resolver.listener.upgrade())
        else {
            return;
        };
        if let Some(answer) = resolver::answer_at_once(&self.exits, &listener, &question) {
            return resolver.send(&question.answered(answer));
        }
        let place = CountedPlace::take(&self.exits.ledger.look_ups, MAX_LOOK_UPS);
        if let (Some(place), Some(room)) = (place, Room::take(SMALL_STACK_BYTES)) {
            // If there is no thread, the program asks again.
            let _ = self.threads.give(Job::LookUp(LookUp {
                resolver,
                listener,
                question,
                _place: place,
                _room: room,
            }));
        }
    }

    fn look_up(&self, look_up: &LookUp) {
        // The query is sent as the user.
        if let Ok(_acting) = self.exits.act() {
            let answer = resolver::answer(&self.exits, &look_up.listener, &look_up.question);
            look_up.resolver.send(&look_up.question.answered(answer));
        }
    }

    /// Drops a source, and the egress listeners that no source uses any more, except the last one, which is likely to
    /// be needed again.
    fn end(&self, key: u64) {
        let last = lock(&self.exits.state).last.clone();
        let mut watched = lock(&self.watched);
        let Watched {
            sources,
            listeners,
            is_over,
            ..
        } = &mut *watched;
        let Some((_, source)) = sources.remove(&key) else {
            return;
        };
        if sources.is_empty() {
            self.copies.clear();
        }
        let _ = self.epoll.delete(&*source);
        *is_over |= matches!(*source, Source::Network(_));
        listeners.retain(|_, listener| {
            let is_same = |other: &Arc<EgressListener>| Arc::ptr_eq(other, listener);
            let is_used = last.as_ref().is_some_and(is_same)
                || sources.values().any(|(other, _)| is_same(other));
            if !is_used {
                let _ = self.epoll.delete(listener.tcp());
            }
            is_used
        });
    }
}

/// The program has closed its end of a socket for look-ups.
struct Ended;

impl Resolver {
    /// Receives one message; `None` if none has arrived.
    ///
    /// # Errors
    /// `Ended` if the program has closed its end.
    fn receive<'m>(&self, into: &'m mut [u8]) -> std::result::Result<Option<&'m [u8]>, Ended> {
        match recv(self.socket.as_raw_fd(), into, MsgFlags::MSG_DONTWAIT) {
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
            Ok(0) | Err(_) => Err(Ended),
            Ok(count) => Ok(into.get(..count)),
        }
    }

    /// Sends an answer. If the program's socket has no room for it, the answer is lost, as in any network.
    fn send(&self, message: &[u8]) {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let _ = send(self.socket.as_raw_fd(), message, flags);
    }
}

/// A connection to serve.
struct Connection {
    socket: Arc<TcpStream>,
    slot: ConnectionSlot,
    room: Room,
    listener: Arc<EgressListener>,
}

/// Accepts a connection of a command; `None` if there is none to serve.
fn accept(exits: &Exits, listener: Arc<EgressListener>) -> Option<Connection> {
    let (socket, peer) = listener.tcp().accept().ok()?;
    if !is_of_command(exits, &listener, peer) || sys::is_scarce(socket.as_fd()) {
        return None;
    }
    let socket = Arc::new(socket);
    let user = exits.user.map(|user| user.uid);
    let Some(mut slot) = exits.egress.slots.take(Peer::User(user), &socket) else {
        refuse(
            &socket,
            "too_many_connections",
            "all connections of the server are in use; try again later",
        );
        return None;
    };
    if let Err(error) = slot.give_to_tenant(&exits.ledger) {
        refuse(&socket, "over_limit", &error.to_string());
        return None;
    }
    // If the workspace ends now, either its end closes this connection, or this check sees that it has ended.
    if !exits.connections.add(&socket) {
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
        slot,
        room,
        listener,
    })
}

/// Whether a connection comes from a command of the workspace: other users of the machine can connect to its egress
/// listener too. The user is not enough: a sandbox that had the same uid before may have given sockets of its own to another one.
fn is_of_command(exits: &Exits, listener: &EgressListener, peer: SocketAddr) -> bool {
    let was_redirected = listener.take_redirected(peer);
    let Some(user) = exits.user.filter(|_| !listener.is_inside()) else {
        return true;
    };
    // The kernel does not tell the owner of a socket that the program has closed meanwhile.
    sys::tcp_peer(listener.address().into(), peer).map_or(was_redirected, |peer| {
        peer.uid == user.uid && (was_redirected || exits.handed_out.has(peer.cookie))
    })
}

/// The sockets that commands were given, by their cookies: the latest ones, because nobody tells which are closed.
#[derive(Default)]
pub(super) struct HandedOut(Mutex<VecDeque<u64>>);

impl HandedOut {
    fn add(&self, cookie: u64) {
        let mut cookies = lock(&self.0);
        if cookies.len() == MAX_HANDED_OUT {
            cookies.pop_front();
        }
        cookies.push_back(cookie);
    }

    fn has(&self, cookie: u64) -> bool {
        lock(&self.0).contains(&cookie)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_sockets_are_known() {
        let handed_out = HandedOut::default();
        for cookie in 1..=6 {
            handed_out.add(cookie);
        }
        let known: Vec<_> = (0..8).filter(|cookie| handed_out.has(*cookie)).collect();
        assert_eq!(known, [3, 4, 5, 6]);
    }
}
