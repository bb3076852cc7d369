//! A gate: the port of a filter, which nobody else can have at any address.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::listen::HeldPort;
use crate::posture::Filter;

/// Where the connections of commands with one filter arrive.
///
/// The port belongs to the gate at every address of both families: Landlock's rule for the commands has a port and no
/// address, and a server at another address would be reached too. It must stay so until nothing with the filter runs.
pub struct Gate {
    filter: Arc<Filter>,
    listener: TcpListener,
    port: u16,
    _held: HeldPort,
}

impl Gate {
    /// Takes a free port.
    ///
    /// # Errors
    /// `System` if there is none.
    pub(super) fn open(filter: Arc<Filter>) -> Result<Self> {
        let opened = HeldPort::take(0).and_then(|held| {
            let listener = held.listen((Ipv4Addr::LOCALHOST, 0).into())?;
            listener.set_nonblocking(true)?;
            Ok((held, listener.local_addr()?.port(), listener))
        });
        let (held, port, listener) = opened
            .map_err(|error| Error::io("cannot open a port for a filtered network", &error))?;
        Ok(Self {
            filter,
            listener,
            port,
            _held: held,
        })
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
