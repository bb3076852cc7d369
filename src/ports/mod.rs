//! The servers inside a workspace: listing them, waiting for them, and connecting to them.
//!
//! A port leads to a TCP port of the loopback interface (the machine) or to a socket in a directory of
//! the home (a sandbox). Callers hold a [`Port`] and do not know which. Nothing here knows the protocol
//! that is spoken on a connection.

mod home;
mod machine;
mod port;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::client::{Client, Disconnected, KeepAlive};
use crate::error::{Error, Result};
use crate::sys::User;
use port::unreachable;

pub use port::{Listener, Port};

/// How long connecting may take. A local server answers immediately, unless its queue is full.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// The first and the longest pause between two looks for a server. Most servers that a client waits for
/// are about to listen.
const LOOK_PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));

/// The ports of a workspace.
pub struct Ports {
    backend: Backend,
    is_closed: AtomicBool,
}

enum Backend {
    /// TCP ports of the loopback interface, IPv4 before IPv6.
    Machine,
    /// Sockets in a home.
    Home(home::Sockets),
}

impl Ports {
    /// The TCP ports of the machine.
    pub fn machine() -> Arc<Self> {
        Self::of(Backend::Machine)
    }

    /// The sockets in the home `directory`, which belongs to `owner`.
    pub fn home(directory: Arc<OwnedFd>, owner: User) -> Arc<Self> {
        Self::of(Backend::Home(home::Sockets::new(directory, owner)))
    }

    fn of(backend: Backend) -> Arc<Self> {
        Arc::new(Self {
            backend,
            is_closed: AtomicBool::new(false),
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
            Backend::Home(_) => (home::parse(text).map(Port::Socket), home::ACCEPTED),
        };
        port.ok_or_else(|| {
            let text = String::from_utf8_lossy(text);
            Error::invalid(format!("port {text}: not accepted; it takes {accepted}"))
        })
    }

    /// Connects a stream socket to the server that listens on a port.
    ///
    /// # Errors
    /// `Unreachable` with what was tried and why it failed; `System` if the server has no descriptor or
    /// memory left.
    pub fn connect(&self, port: &Port) -> Result<OwnedFd> {
        match (&self.backend, port) {
            (Backend::Machine, Port::Number(number)) => machine::connect(*number, CONNECT_LIMIT),
            (Backend::Home(sockets), Port::Socket(name)) => sockets.connect(name, CONNECT_LIMIT),
            _ => Err(unreachable(port, "it belongs to another workspace")),
        }
    }

    /// All ports with a server, in order.
    ///
    /// # Errors
    /// `/proc/net/tcp` or the directory of the sockets cannot be read.
    pub fn list(&self) -> Result<Vec<Listener>> {
        match &self.backend {
            Backend::Machine => machine::list(),
            Backend::Home(sockets) => sockets.list(),
        }
    }

    fn is_listening(&self, port: &Port) -> bool {
        match (&self.backend, port) {
            (Backend::Machine, Port::Number(number)) => machine::is_listening(*number),
            (Backend::Home(sockets), Port::Socket(name)) => sockets.is_listening(name),
            _ => false,
        }
    }

    /// Waits until a server listens on a port. Returns false after `limit` (`None` means no limit), or
    /// when the workspace ends. Pings the client meanwhile.
    ///
    /// # Errors
    /// The client disconnected.
    pub fn wait(
        &self,
        port: &Port,
        limit: Option<Duration>,
        client: &mut dyn Client,
    ) -> std::result::Result<bool, Disconnected> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut keep_alive = KeepAlive::new();
        let mut pause = LOOK_PAUSE.0;
        loop {
            if self.is_listening(port) {
                return Ok(true);
            }
            let now = Instant::now();
            let is_late = deadline.is_some_and(|deadline| now >= deadline);
            if is_late || self.is_closed.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let again = now + pause;
            let until = deadline.map_or(again, |deadline| deadline.min(again));
            keep_alive.wait(client, None, Some(until))?;
            pause = (pause * 2).min(LOOK_PAUSE.1);
        }
    }
}
