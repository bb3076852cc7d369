//! The servers inside a workspace: which there are, and how to get a connection to one.
//!
//! What a port leads to is the workspace's alone: on the machine a TCP port of the loopback
//! interface, in a home a socket in the directory for them. Whoever has a [`Port`] neither knows nor
//! asks. Nothing here knows what is spoken on a connection.

mod home;
mod machine;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::error::{Error, Kind, Result};
use crate::process::{Audience, Gone};
use crate::sys::{Pid, PollEntry, User, poll};

/// How long connecting may take. What listens here answers at once, unless its queue is full.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// How often it is looked whether something listens: more often at first, because most servers that
/// are waited for are about to be there.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));

/// The ports of a workspace.
pub struct Ports {
    place: Place,
    is_closed: AtomicBool,
}

/// What a port leads to.
enum Place {
    /// A TCP port of the loopback interface, IPv4 before IPv6.
    Machine,
    /// A socket in a home.
    Home(home::Sockets),
}

/// The name of a port that can be one in its workspace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port(Name);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Name {
    Number(u16),
    Socket(String),
}

impl fmt::Display for Port {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Name::Number(number) => number.fmt(formatter),
            Name::Socket(name) => name.fmt(formatter),
        }
    }
}

impl Port {
    /// The number of one that is no socket.
    pub fn number(&self) -> Option<u16> {
        match self.0 {
            Name::Number(number) => Some(number),
            Name::Socket(_) => None,
        }
    }
}

/// Something that listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// Where it is reached.
    pub port: Port,
    /// Where it listens: an IP address, or a path from the home on.
    pub address: String,
    /// Whose it is, where that can be told.
    pub process: Option<Owner>,
}

/// A process that holds a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Its number.
    pub pid: Pid,
    /// Its command line, shortened if it is long.
    pub command: String,
}

impl Ports {
    /// The TCP ports of the machine.
    pub fn machine() -> Arc<Self> {
        Self::of(Place::Machine)
    }

    /// The sockets of the home that `directory` is, and that belongs to `owner`.
    pub fn home(directory: Arc<OwnedFd>, owner: User) -> Arc<Self> {
        Self::of(Place::Home(home::Sockets::new(directory, owner)))
    }

    fn of(place: Place) -> Arc<Self> {
        Arc::new(Self {
            place,
            is_closed: AtomicBool::new(false),
        })
    }

    /// Ends all waiting: the workspace ends.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Reads a port as it stands in a URL.
    ///
    /// # Errors
    /// It can be none here.
    pub fn parse(&self, text: &[u8]) -> Result<Port> {
        let (name, accepted) = match &self.place {
            Place::Machine => (machine::parse(text).map(Name::Number), machine::ACCEPTED),
            Place::Home(_) => (home::parse(text).map(Name::Socket), home::ACCEPTED),
        };
        name.map(Port).ok_or_else(|| {
            let text = String::from_utf8_lossy(text);
            Error::invalid(format!("port {text}: not accepted; it takes {accepted}"))
        })
    }

    /// Connects to whatever listens on a port; a stream socket.
    ///
    /// # Errors
    /// [`Kind::Unreachable`], with what was tried and why it failed; or the server has no descriptor
    /// or memory left.
    pub fn connect(&self, port: &Port) -> Result<OwnedFd> {
        match (&self.place, &port.0) {
            (Place::Machine, Name::Number(number)) => machine::connect(*number, CONNECT_LIMIT),
            (Place::Home(sockets), Name::Socket(name)) => sockets.connect(name, CONNECT_LIMIT),
            _ => Err(unreachable(port, "it is another workspace's")),
        }
    }

    /// Everything that listens, in the order of its ports.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn list(&self) -> Result<Vec<Listener>> {
        match &self.place {
            Place::Machine => machine::list(),
            Place::Home(sockets) => sockets.list(),
        }
    }

    fn is_listening(&self, port: &Port) -> bool {
        match (&self.place, &port.0) {
            (Place::Machine, Name::Number(number)) => machine::is_listening(*number),
            (Place::Home(sockets), Name::Socket(name)) => sockets.is_listening(name),
            _ => false,
        }
    }

    /// Waits until something listens on a port, at most for `limit` (`None` is for ever), keeping
    /// `audience` company; whether something does.
    ///
    /// # Errors
    /// The client is gone.
    pub fn wait(
        &self,
        port: &Port,
        limit: Option<Duration>,
        audience: &mut dyn Audience,
    ) -> std::result::Result<bool, Gone> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut heard_at = Instant::now();
        let mut pause = LOOK_AGAIN.0;
        loop {
            if self.is_listening(port) {
                return Ok(true);
            }
            let now = Instant::now();
            let is_late = deadline.is_some_and(|deadline| now >= deadline);
            if is_late || self.is_closed.load(Ordering::Relaxed) {
                return Ok(false);
            }
            if now >= heard_at + audience.patience() {
                if audience.is_flushed() {
                    audience.ping();
                }
                heard_at = now;
            }
            audience.flush()?;
            let left = deadline.map_or(pause, |deadline| deadline.saturating_duration_since(now));
            let events = {
                let mut entries = [PollEntry::new(audience.descriptor(), audience.interest())];
                poll(&mut entries, Some(pause.min(left)));
                entries[0].events()
            };
            audience.ready(events)?;
            pause = (pause * 2).min(LOOK_AGAIN.1);
        }
    }
}

fn unreachable(port: impl fmt::Display, tried: &str) -> Error {
    Error::new(
        Kind::Unreachable,
        format!("cannot reach port {port}: {tried}"),
    )
}

/// Whether it is the server that lacks something, which says nothing about the port.
fn is_lack(errno: Errno) -> bool {
    let lacks = [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM, Errno::ENOBUFS];
    lacks.contains(&errno)
}
