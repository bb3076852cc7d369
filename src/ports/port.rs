//! What the ports of every kind of workspace have in common: their names, listeners and errors.

use std::fmt;

use nix::errno::Errno;

use crate::error::{Error, Kind};
use crate::sys::Pid;

/// The name of a port, valid in the workspace that parsed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Port {
    /// A TCP port.
    Number(u16),
    /// A socket in a home.
    Socket(String),
}

impl fmt::Display for Port {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(formatter),
            Self::Socket(name) => name.fmt(formatter),
        }
    }
}

impl Port {
    /// The TCP port; `None` for a socket in a home.
    pub fn number(&self) -> Option<u16> {
        match self {
            Self::Number(number) => Some(*number),
            Self::Socket(_) => None,
        }
    }
}

/// A server that listens on a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// The port to reach it by.
    pub port: Port,
    /// An IP address, or a path relative to the home.
    pub address: String,
    /// `None` where the kernel does not show it.
    pub process: Option<Owner>,
}

impl Listener {
    /// At least the bytes that one takes whose texts have this length, in memory and as JSON.
    pub(super) fn bytes(texts: usize) -> usize {
        512 + 8 * texts
    }
}

/// A process that holds a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Its pid.
    pub pid: Pid,
    /// Its command line, cut if it is long.
    pub command: String,
}

/// The error of a port that could not be reached.
pub(super) fn unreachable(port: impl fmt::Display, tried: &str) -> Error {
    let text = format!("cannot reach port {port}: {tried}");
    Error::new(Kind::Unreachable, text)
}

/// Whether the server has run out of something, which says nothing about the port.
pub(super) fn is_exhaustion(errno: Errno) -> bool {
    let exhausted = [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM, Errno::ENOBUFS];
    exhausted.contains(&errno)
}
