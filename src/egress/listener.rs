//! An egress listener: the port of a filter, where the connections of its commands arrive.

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockaddrIn, bind, listen};

use super::check::loopback_socket;
use super::names::Names;
use crate::error::{Error, Result};
use crate::spec::network::Filter;
use crate::sys::listen::HeldPort;
use crate::threads::lock::{Mutex, lock};

const FAILED: &str = "cannot open a port for a filtered network";

/// Where the connections of commands with one filter arrive.
///
/// On the machine's network the port belongs to the egress listener at every address of both families: Landlock's rule
/// for the commands has a port and no address, and a server at another address would be reached too. It must stay so
/// until nothing with the filter runs. In a network of the sandbox's own there is nothing else to reach.
pub struct EgressListener {
    filter: Arc<Filter>,
    listener: TcpListener,
    port: u16,
    network: Network,
    names: Names,
    /// Guards where connections come from that the server has redirected here and not accepted yet.
    redirected: Mutex<HashSet<SocketAddr>>,
}

/// Whose network an egress listener is in.
enum Network {
    /// The machine's.
    Machine { _port: HeldPort },
    /// The sandbox's own.
    Inside(MakeSocket),
}

/// Makes a TCP socket of IPv4 or IPv6 in the network of a sandbox.
pub type MakeSocket = Box<dyn Fn(AddressFamily) -> Result<OwnedFd> + Send + Sync>;

impl EgressListener {
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
            network: Network::Machine { _port: held },
            names: Names::default(),
            redirected: Mutex::default(),
        })
    }

    /// Takes a free port of a network that belongs to one sandbox, in which `make` makes sockets.
    ///
    /// # Errors
    /// `System` if there is none.
    pub fn open_inside(filter: Arc<Filter>, make: MakeSocket) -> Result<Self> {
        let socket = make(AddressFamily::Inet)?;
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
            network: Network::Inside(make),
            names: Names::default(),
            redirected: Mutex::default(),
        })
    }

    /// Whether it is in a network of the sandbox's own, where nobody else can connect to it.
    pub fn is_inside(&self) -> bool {
        matches!(self.network, Network::Inside(_))
    }

    /// A TCP socket for a program, which reaches nothing but the egress listener, or the program's own network. Only there
    /// it may be one of IPv6. Its descriptor is closed by execve.
    ///
    /// # Errors
    /// Of socket(2), setsockopt(2), bind(2) or fcntl(2); `EIO` if the network of the sandbox has ended.
    pub(super) fn socket(
        &self,
        family: AddressFamily,
        is_non_blocking: bool,
    ) -> nix::Result<OwnedFd> {
        match &self.network {
            Network::Machine { .. } if family != AddressFamily::Inet => Err(Errno::EAFNOSUPPORT),
            Network::Machine { .. } if is_non_blocking => loopback_socket(SockFlag::SOCK_NONBLOCK),
            Network::Machine { .. } => loopback_socket(SockFlag::empty()),
            Network::Inside(make) => {
                let socket = make(family).map_err(|_| Errno::EIO)?;
                if is_non_blocking {
                    fcntl(&socket, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
                }
                Ok(socket)
            }
        }
    }

    /// The names that its programs looked up.
    pub(super) fn names(&self) -> &Names {
        &self.names
    }

    /// Notes that the server itself has connected a program's socket here, from this address.
    pub(super) fn note_redirected(&self, from: SocketAddr) {
        lock(&self.redirected).insert(from);
    }

    /// Whether the server has connected a socket here from this address. The answer is yes once for each connection.
    pub(super) fn take_redirected(&self, from: SocketAddr) -> bool {
        lock(&self.redirected).remove(&from)
    }

    /// The rules of who connects.
    pub fn filter(&self) -> &Filter {
        &self.filter
    }

    /// The only port that its commands can connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn tcp(&self) -> &TcpListener {
        &self.listener
    }

    /// Its address, as its commands see it.
    pub(super) fn address(&self) -> SocketAddrV4 {
        SocketAddrV4::new(Ipv4Addr::LOCALHOST, self.port)
    }
}
