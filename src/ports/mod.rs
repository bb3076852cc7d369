//! The servers inside a workspace: listing them, waiting for them, and connecting to them.
//!
//! A port leads to a TCP port of a loopback interface (the machine, a sandbox that was given some, and one that has
//! a network of its own) or to a socket in a directory of the home (a sandbox). Callers hold a [`Port`] and do not know which. Nothing here knows the protocol
//! that is spoken on a connection.

mod home;
mod machine;
mod port;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::client::{Client, Disconnected, Interrupt, KeepAlive, Stopped};
use crate::confine::Namespaces;
use crate::error::{Error, Kind, Result};
use crate::limits::ledger::{Charge, Item, Ledger};
use crate::limits::together::Connections;
use crate::sys::User;
use crate::threads::lock::CountedPlace;
use crate::threads::priority::{BackgroundTurn, BackgroundWork};
use port::unreachable;

pub use port::{Listener, Port};

/// How long connecting may take. A local server answers immediately, unless its queue is full.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// The first and the longest pause between two looks for a server. Most servers that a client waits for
/// are about to listen.
const LOOK_PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(250));

/// Pauses become longer with the time that was waited, to this part of it: a server is noticed so much late.
const LATENESS: u32 = 16;

/// Most clients that wait for ports of one workspace at once. Each has a thread, which looks a few times a second.
const MAX_WAITS: usize = 64;

/// Most TCP ports, and most sockets, that are listed of a sandbox.
const MAX_LISTED: usize = if cfg!(test) { 8 } else { 1000 };

/// A list that takes no more is not charged.
const FREE_LIST_BYTES: usize = 64 * 1024;

/// How many are looked at before others come first.
const PASSED_BETWEEN_LOOKS: usize = 16;

/// The ports of a workspace.
pub struct Ports {
    backend: Backend,
    is_closed: AtomicBool,
    waits: Arc<AtomicUsize>,
    /// Those to servers inside.
    connections: Connections<OwnedFd>,
}

enum Backend {
    /// TCP ports of the loopback interface, IPv4 before IPv6.
    Machine,
    /// Sockets in a home, and TCP ports.
    Home(home::Sockets, TcpPortsInside),
}

/// The TCP ports of a sandbox.
pub enum TcpPortsInside {
    /// Those of the machine that it was given.
    Given(Vec<u16>),
    /// All of a network that is its own.
    All(Arc<Namespaces>),
}

impl TcpPortsInside {
    fn has(&self, number: u16) -> bool {
        match self {
            Self::Given(given) => given.contains(&number),
            Self::All(_) => true,
        }
    }

    fn is_listening(&self, number: u16) -> bool {
        match self {
            Self::Given(_) => machine::is_listening(number),
            Self::All(namespaces) => {
                machine::is_in_table(number, Some(namespaces)).unwrap_or(false)
            }
        }
    }

    fn list(&self, owner: User, listing: &mut Listing<'_>) -> std::result::Result<(), Stopped> {
        match self {
            Self::Given(given) => machine::list_of(given, listing),
            Self::All(namespaces) => machine::list_inside(namespaces, owner, listing),
        }
    }
}

impl Ports {
    /// The TCP ports of the machine.
    pub fn machine() -> Arc<Self> {
        Self::of(Backend::Machine)
    }

    /// The sockets in the home `directory`, which belongs to `owner`, and these TCP ports.
    pub fn home(directory: Arc<OwnedFd>, owner: User, tcp_ports: TcpPortsInside) -> Arc<Self> {
        let sockets = home::Sockets::new(directory, &home::DIRECTORY, owner);
        Self::of(Backend::Home(sockets, tcp_ports))
    }

    /// The sockets in `directory`, the root of a sandbox whose processes are known as `owner`, and these TCP ports.
    pub fn root(directory: Arc<OwnedFd>, owner: User, tcp_ports: TcpPortsInside) -> Arc<Self> {
        let sockets = home::Sockets::new(directory, &home::DIRECTORY_OF_ROOT, owner);
        Self::of(Backend::Home(sockets, tcp_ports))
    }

    fn of(backend: Backend) -> Arc<Self> {
        Arc::new(Self {
            backend,
            is_closed: AtomicBool::new(false),
            waits: Arc::default(),
            connections: Connections::new(),
        })
    }

    /// Ends all waits, because the workspace ends.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Parses the port of a URL.
    ///
    /// # Errors
    /// `Invalid` if this workspace has no such ports.
    pub fn parse(&self, text: &[u8]) -> Result<Port> {
        let (port, accepted) = match &self.backend {
            Backend::Machine => (machine::parse(text).map(Port::Number), machine::ACCEPTED),
            Backend::Home(_, tcp_ports) => {
                let given = machine::parse(text).filter(|number| tcp_ports.has(*number));
                let socket = || home::parse(text).map(Port::Socket);
                (given.map(Port::Number).or_else(socket), home::ACCEPTED)
            }
        };
        port.ok_or_else(|| {
            let text = String::from_utf8_lossy(text);
            Error::invalid(format_args!(
                "port {text}: not accepted; it takes {accepted}"
            ))
        })
    }

    /// Connects a stream socket to the server that listens on a port.
    ///
    /// # Errors
    /// `Unreachable` with what was tried and why it failed; `System` if the server has no descriptor or
    /// memory left.
    pub fn connect(&self, port: &Port) -> Result<Arc<OwnedFd>> {
        let connection = Arc::new(self.connect_new(port)?);
        // Who listens may be another sandbox by now, which was given the socket.
        if self.connections.add(&connection) {
            Ok(connection)
        } else {
            Err(self.over())
        }
    }

    /// The error of a workspace in which nothing runs any more.
    fn over(&self) -> Error {
        if self.is_closed.load(Ordering::Relaxed) {
            Error::deleted()
        } else {
            Error::new(Kind::Stopped, "the sandbox has stopped")
        }
    }

    /// Ends all connections: nothing runs in the workspace any more, and who has the other ends was given them.
    pub fn end_connections(&self) {
        self.connections.end();
    }

    fn connect_new(&self, port: &Port) -> Result<OwnedFd> {
        match (&self.backend, port) {
            (Backend::Machine, Port::Number(number)) => {
                machine::connect(*number, None, CONNECT_LIMIT)
            }
            (Backend::Home(sockets, TcpPortsInside::Given(given)), Port::Number(number))
                if given.contains(number) =>
            {
                machine::connect(*number, Some(sockets.owner()), CONNECT_LIMIT)
            }
            (Backend::Home(sockets, TcpPortsInside::All(namespaces)), Port::Number(number)) => {
                // A socket in the home may have a number for a name.
                let name = number.to_string();
                if sockets.is_listening(&name) {
                    return sockets.connect(&name, CONNECT_LIMIT);
                }
                machine::connect_inside(*number, namespaces, CONNECT_LIMIT)
            }
            (Backend::Home(sockets, _), Port::Socket(name)) => sockets.connect(name, CONNECT_LIMIT),
            _ => Err(unreachable(port, "it belongs to another workspace")),
        }
    }

    /// All ports with a server, in order: of a sandbox, at most [`MAX_LISTED`] TCP ports and as many sockets.
    ///
    /// # Errors
    /// `/proc/net/tcp` or the directory of the sockets cannot be read; `OverLimit`; it was interrupted.
    pub fn list(
        &self,
        ledger: &Arc<Ledger>,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Listed, Stopped> {
        let charge = ledger.charge(Item::Responses, 0).map_err(Error::from);
        let mut listing = Listing {
            listed: Listed {
                listeners: Vec::new(),
                bytes: 0,
                charge: charge?,
            },
            passed: 0,
            interrupt,
        };
        match &self.backend {
            Backend::Machine => machine::list(&mut listing)?,
            Backend::Home(sockets, tcp_ports) => {
                tcp_ports.list(sockets.owner(), &mut listing)?;
                sockets.list(&mut listing)?;
            }
        }
        Ok(listing.listed)
    }

    fn is_listening(&self, port: &Port) -> bool {
        match (&self.backend, port) {
            (Backend::Machine, Port::Number(number)) => machine::is_listening(*number),
            (Backend::Home(sockets, tcp_ports), Port::Number(number)) => {
                let is_everything = matches!(tcp_ports, TcpPortsInside::All(_));
                tcp_ports.is_listening(*number)
                    || (is_everything && sockets.is_listening(&number.to_string()))
            }
            (Backend::Home(sockets, _), Port::Socket(name)) => sockets.is_listening(name),
            _ => false,
        }
    }

    /// Prepares to wait for a port. Each look is part of the workspace's `work`.
    ///
    /// # Errors
    /// `OverLimit` if as many clients wait for ports of this workspace as may.
    pub fn wait(self: &Arc<Self>, port: Port, work: &Arc<BackgroundWork>) -> Result<Wait> {
        let Some(place) = CountedPlace::take(&self.waits, MAX_WAITS) else {
            let text = format!(
                "cannot wait for port {port}: {MAX_WAITS} requests wait for ports of this sandbox, and no more may"
            );
            return Err(Error::new(Kind::OverLimit, text));
        };
        Ok(Wait {
            ports: Arc::clone(self),
            work: Arc::clone(work),
            port,
            _place: place,
        })
    }
}

/// The servers of a workspace.
pub struct Listed {
    pub listeners: Vec<Listener>,
    /// What they take, and what is written of them.
    pub bytes: usize,
    pub charge: Charge,
}

/// A list that is being made. It is charged as it grows, because a sandbox can have any number of servers; and others come
/// before it.
struct Listing<'l> {
    listed: Listed,
    passed: usize,
    interrupt: &'l mut dyn Interrupt,
}

impl Listing<'_> {
    /// One more is looked at.
    fn pass(&mut self) -> std::result::Result<(), Stopped> {
        self.passed += 1;
        if self.passed.is_multiple_of(PASSED_BETWEEN_LOOKS) {
            self.interrupt.check()?;
        }
        Ok(())
    }

    /// One more is to be listed.
    fn charge(&mut self, bytes: usize) -> std::result::Result<(), Stopped> {
        let listed = &mut self.listed;
        listed.bytes += bytes;
        // A short list costs nothing.
        if listed.bytes > FREE_LIST_BYTES && listed.bytes > listed.charge.bytes() {
            let charged = listed.charge.set(listed.bytes + FREE_LIST_BYTES);
            charged.map_err(Error::from)?;
        }
        Ok(())
    }

    fn add(&mut self, listener: Listener) {
        self.listed.listeners.push(listener);
    }
}

/// One client's wait for a port.
pub struct Wait {
    ports: Arc<Ports>,
    work: Arc<BackgroundWork>,
    port: Port,
    _place: CountedPlace,
}

impl Wait {
    /// The port that is waited for.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Waits until a server listens on the port. Returns false after `limit` (`None` means no limit), or when
    /// the workspace ends. Pings the client meanwhile.
    ///
    /// # Errors
    /// The client disconnected.
    pub fn run(
        &self,
        limit: Option<Duration>,
        client: &mut dyn Client,
    ) -> std::result::Result<bool, Disconnected> {
        let begun = Instant::now();
        let deadline = limit.and_then(|limit| begun.checked_add(limit));
        let mut keep_alive = KeepAlive::new();
        let mut turn = BackgroundTurn::of_this_thread(&self.work);
        loop {
            // Where the kernel lists all servers for each look, a sandbox decides how long a look takes.
            while turn.give_way() {
                if self.ports.is_closed.load(Ordering::Relaxed) {
                    return Ok(false);
                }
                keep_alive.wait(client, None, Some(Instant::now()))?;
            }
            if self.ports.is_listening(&self.port) {
                return Ok(true);
            }
            let now = Instant::now();
            let is_late = deadline.is_some_and(|deadline| now >= deadline);
            if is_late || self.ports.is_closed.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let again = now + ((now - begun) / LATENESS).clamp(LOOK_PAUSE.0, LOOK_PAUSE.1);
            let until = deadline.map_or(again, |deadline| deadline.min(again));
            keep_alive.wait(client, None, Some(until))?;
        }
    }
}

/// What never interrupts.
#[cfg(test)]
struct Never;

#[cfg(test)]
impl Interrupt for Never {
    fn check(&mut self) -> std::result::Result<(), Stopped> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ledger::Budget;

    #[test]
    fn a_list_is_charged_as_it_grows() {
        let budget = Budget::new(1 << 20);
        let (ledger, mut never) = (budget.whole(), Never);
        let mut listing = Listing {
            listed: Listed {
                listeners: Vec::new(),
                bytes: 0,
                charge: ledger.charge(Item::Responses, 0).ok().unwrap(),
            },
            passed: 0,
            interrupt: &mut never,
        };
        let one = Listener::bytes(10);
        let count = (0..10_000)
            .take_while(|_| listing.charge(one).is_ok())
            .count();
        assert!((1 << 18..=1 << 20).contains(&(count * one)), "{count}");
        let refused = listing.charge(one);
        let Err(Stopped::Failed(error)) = refused else {
            panic!("it was not refused");
        };
        assert_eq!(error.kind(), Kind::OverLimit);
    }
}
