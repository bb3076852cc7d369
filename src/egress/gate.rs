//! A gate: the port of a filter, where the connections of its commands arrive.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::sys::socket::{Backlog, SockaddrIn, bind, listen};

use crate::error::{Error, Result};
use crate::listen::HeldPort;
use crate::posture::Filter;

const FAILED: &str = "cannot open a port for a filtered network";

/// Where the connections of commands with one filter arrive.
///
/// On the machine's network the port belongs to the gate at every address of both families: Landlock's rule for the
/// commands has a port and no address, and a server at another address would be reached too. It must stay so until
/// nothing with the filter runs. In a network of the sandbox's own there is nothing else to reach.
pub struct Gate {
    filter: Arc<Filter>,
    listener: TcpListener,
    port: u16,
    /// `None` in a network of the sandbox's own.
    held: Option<HeldPort>,
}

impl Gate {
    /// Takes a free port of the machine.
    ///
    /// # Errors
    /// `System` if there is none.
    pub(super) fn open(filter: Arc<Filter>) -> Result<Self> {
        let opened = HeldPort::take(0).and_then(|held| {
            let listener = held.listen((Ipv4Addr::LOCALHOST, 0).into())?;
            listener.set_nonblocking(true)?;
            Ok((held, listener.local_addr()?.port(), listener))
        });
        let (held, port, listener) = opened.map_err(|error| Error::io(FAILED, &error))?;
        Ok(Self {
            filter,
            listener,
            port,
            held: Some(held),
        })
    }

    /// Takes a free port of a network that belongs to one sandbox; `socket` is a TCP socket of IPv4 that was made there.
    ///
    /// # Errors
    /// `System` if there is none.
    pub fn open_inside(filter: Arc<Filter>, socket: OwnedFd) -> Result<Self> {
        let address = SockaddrIn::from(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));
        let opened = bind(socket.as_raw_fd(), &address)
            .and_then(|()| listen(&socket, Backlog::MAXALLOWABLE))
            .map_err(std::io::Error::from)
            .and_then(|()| {
                let listener = TcpListener::from(socket);
                listener.set_nonblocking(true)?;
                Ok((listener.local_addr()?.port(), listener))
            });
        let (port, listener) = opened.map_err(|error| Error::io(FAILED, &error))?;
        Ok(Self {
            filter,
            listener,
            port,
            held: None,
        })
    }

    /// Whether it is in a network of the sandbox's own, where nobody else can connect to it.
    pub fn is_inside(&self) -> bool {
        self.held.is_none()
    }

    /// The rules of who connects.
    pub fn filter(&self) -> &Filter {
        &self.filter
    }

    /// The only port that its commands can connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn listener(&self) -> &TcpListener {
        &self.listener
    }

    /// Its address, as its commands see it.
    pub(super) fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }
}
