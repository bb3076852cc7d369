//! The way out of commands whose network is filtered: the sockets that they get, and the proxy that these lead to.
//!
//! Such a command can make no internet socket itself. Its filter leaves each socket(2) for TCP over IPv4 to the server,
//! which answers with a socket that is bound to 127.0.0.1: the kernel sends nothing from there to another device, and
//! Landlock lets it connect to one port only, that of the command's [`EgressListener`]. So whatever the program does
//! with its socket, it reaches the egress listener or nothing. Behind the egress listener is a proxy, which decides by
//! the rules.
//!
//! Where the filter is transparent the connections of programs without proxy support are redirected to the egress
//! listener (see `redirect`).
//!
//! In a network of the sandbox's own the egress listener is a socket of that network, and nothing else is there to be
//! reached. Commands make their sockets themselves.
//!
//! Each workspace has its [`Exits`]: one thread that makes the sockets and accepts the connections, so that no tenant
//! waits for another, and one thread for each connection. They act as the workspace's user where they touch files and
//! make sockets. May use `http` and `relay`; knows nothing of how commands are started.

mod check;
mod connect;
mod dns;
mod listener;
mod names;
mod proxy;
mod redirect;
mod report;
mod resolver;
mod sockets;
mod socks;

use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::error::{Error, Kind, Result};
use crate::http::slots::ConnectionSlots;
use crate::limits::ledger::Ledger;
use crate::limits::together::Connections;
use crate::spec::network::{Address, Filter};
use crate::sys::{self, ActingAs, CallListener, User};
use crate::threads::lock::{Mutex, lock};
pub use check::{check, check_redirection};
pub use listener::{EgressListener, MakeSocket};
use report::VerdictLog;
pub use report::{Report, VerdictRecord};
use sockets::{HandedOut, Source, Worker};

/// Most filters of a workspace whose commands run at the same time. Each takes a port.
const MAX_LISTENERS: usize = 16;

/// What all workspaces of a machine share.
pub struct Egress {
    /// The connections of the egress listeners count among all.
    slots: ConnectionSlots,
    /// The server's own port, which no rule opens. 0 until it is known.
    server_port: AtomicU16,
    /// Bytes that went through the egress listeners, both ways.
    moved: Arc<AtomicU64>,
    allowed: AtomicU64,
    refused: AtomicU64,
}

/// Numbers for all workspaces since the start.
pub struct Totals {
    /// Connections that rules allowed.
    pub allowed: u64,
    /// Connections that rules refused.
    pub refused: u64,
    /// Bytes of both directions.
    pub bytes: u64,
}

impl Egress {
    /// Egress listeners whose connections take `slots`.
    pub fn new(slots: ConnectionSlots) -> Arc<Self> {
        Arc::new(Self {
            slots,
            server_port: AtomicU16::new(0),
            moved: Arc::default(),
            allowed: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        })
    }

    /// Keeps connections from the port that the server itself listens on. Call it before the first request.
    pub fn close_port(&self, port: u16) {
        self.server_port.store(port, Ordering::Relaxed);
    }

    /// What has gone through the egress listeners.
    pub fn totals(&self) -> Totals {
        Totals {
            allowed: self.allowed.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            bytes: self.moved.load(Ordering::Relaxed),
        }
    }

    fn count(&self, is_allowed: bool) {
        let counter = if is_allowed {
            &self.allowed
        } else {
            &self.refused
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// The ways out of one workspace.
pub struct Exits {
    this: Weak<Self>,
    egress: Arc<Egress>,
    ledger: Arc<Ledger>,
    /// Who connects to the egress listeners; `None` for the server's own user.
    user: Option<User>,
    /// Whether that user owns the user namespace of the commands, which have many users.
    owns_users: bool,
    log: VerdictLog,
    /// Guards which egress listeners there are and whether the thread runs.
    state: Mutex<ExitsState>,
    /// Those of commands.
    connections: Connections<TcpStream>,
    handed_out: HandedOut,
}

#[derive(Default)]
struct ExitsState {
    listeners: Vec<Weak<EgressListener>>,
    /// The one that was used last stays open: opening one takes as long as a tenth of a command.
    last: Option<Arc<EgressListener>>,
    worker: Option<Worker>,
    /// Whether the thread serves the sandbox's own network.
    serves_inside: bool,
    is_closed: bool,
}

impl ExitsState {
    /// The egress listener that a filter has.
    ///
    /// # Errors
    /// `Stopped` if nothing runs any more; `OverLimit` if it has none, and there are too many to make one.
    fn known_listener(&mut self, filter: &Filter) -> Result<Option<Arc<EgressListener>>> {
        self.check_open()?;
        self.listeners
            .retain(|listener| listener.strong_count() > 0);
        let mut listeners = self.listeners.iter().filter_map(Weak::upgrade);
        if let Some(listener) = listeners.find(|listener| listener.filter() == filter) {
            return Ok(Some(listener));
        }
        // One more than commands use.
        if self.listeners.len() > MAX_LISTENERS {
            let text = format!(
                "commands with {MAX_LISTENERS} different networks run already; let some end, or use one of theirs"
            );
            return Err(Error::new(Kind::OverLimit, text));
        }
        Ok(None)
    }

    fn check_open(&self) -> Result<()> {
        if self.is_closed {
            return Err(Error::new(Kind::Stopped, "the sandbox has stopped"));
        }
        Ok(())
    }
}

impl Exits {
    /// The ways out of a workspace whose commands have this user, and whose connections are charged to this ledger.
    pub fn new(egress: Arc<Egress>, ledger: Arc<Ledger>, user: Option<User>) -> Arc<Self> {
        Self::with(egress, ledger, user, false)
    }

    /// The same of a workspace whose commands are in a user namespace that this user owns.
    pub fn of_users(egress: Arc<Egress>, ledger: Arc<Ledger>, owner: User) -> Arc<Self> {
        Self::with(egress, ledger, Some(owner), true)
    }

    fn with(
        egress: Arc<Egress>,
        ledger: Arc<Ledger>,
        user: Option<User>,
        owns_users: bool,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            egress,
            ledger,
            user,
            owns_users,
            log: VerdictLog::default(),
            state: Mutex::default(),
            connections: Connections::new(),
            handed_out: HandedOut::default(),
        })
    }

    /// The egress listener of a filter: on the machine's network, or in the one that `inside` makes sockets in. It
    /// keeps its port while somebody holds it.
    ///
    /// # Errors
    /// `Unavailable` if the machine does not keep sockets from leaving; `OverLimit` if there are too many egress listeners;
    /// `Stopped` if nothing runs any more; `System` if there is no port left.
    pub fn listener(
        &self,
        filter: &Arc<Filter>,
        inside: Option<MakeSocket>,
    ) -> Result<Arc<EgressListener>> {
        if let Some(listener) = lock(&self.state).known_listener(filter)? {
            return Ok(listener);
        }
        let own = Arc::clone(filter);
        let made = if let Some(make) = inside {
            EgressListener::open_inside(own, make)?
        } else {
            check()?;
            EgressListener::open(own)?
        };
        let made = Arc::new(made);
        // Another command may have been faster, or the end of the sandbox.
        let mut state = lock(&self.state);
        if let Some(listener) = state.known_listener(filter)? {
            return Ok(listener);
        }
        state.listeners.push(Arc::downgrade(&made));
        Ok(made)
    }

    /// Makes the sockets of a command, and serves what its egress listener is asked for, until no process has the
    /// filter any more.
    ///
    /// # Errors
    /// `NoResources` if no thread can be started.
    pub fn serve(&self, listener: Arc<EgressListener>, calls: CallListener) -> Result<()> {
        self.add(&mut lock(&self.state), listener, Source::Command(calls))
    }

    /// Serves what the egress listener in the sandbox's own network is asked for, until `end` is readable. Later calls
    /// do nothing.
    ///
    /// # Errors
    /// `NoResources` if no thread can be started, or there is no descriptor left.
    pub fn serve_inside(&self, listener: &Arc<EgressListener>, end: BorrowedFd<'_>) -> Result<()> {
        let mut state = lock(&self.state);
        if state.serves_inside {
            return Ok(());
        }
        let end = end.try_clone_to_owned();
        let end = end.map_err(|error| Error::io("cannot serve the network of commands", &error))?;
        self.add(&mut state, Arc::clone(listener), Source::Network(end))?;
        state.serves_inside = true;
        Ok(())
    }

    fn add(
        &self,
        state: &mut ExitsState,
        listener: Arc<EgressListener>,
        source: Source,
    ) -> Result<()> {
        state.check_open()?;
        let worker = if let Some(worker) = &state.worker {
            worker
        } else {
            let Some(exits) = self.this.upgrade() else {
                return Ok(());
            };
            state.worker.insert(Worker::start(exits)?)
        };
        worker.add(Arc::clone(&listener), source)?;
        // Not before: one that nobody serves would keep what others send it.
        state.last = Some(listener);
        Ok(())
    }

    /// Nothing runs in the workspace any more. Sockets and connections of its commands that others were given lead nowhere
    /// from here on, and its threads end.
    pub fn close(&self) {
        let mut state = lock(&self.state);
        state.is_closed = true;
        state.last = None;
        if let Some(worker) = &state.worker {
            worker.close();
        }
        drop(state);
        self.connections.end();
    }

    /// Acts as the user of the commands while the value lives: what is made then is that user's.
    fn act(&self) -> nix::Result<Option<ActingAs>> {
        let act = if self.owns_users {
            ActingAs::owner_of_users
        } else {
            ActingAs::new
        };
        self.user.map(act).transpose()
    }

    fn is_closed(&self) -> bool {
        lock(&self.state).is_closed
    }

    /// What was allowed and refused.
    pub fn report(&self) -> Report {
        self.log.report()
    }

    fn note(&self, host: &str, port: u16, verdict: &crate::spec::network::Verdict) {
        self.egress.count(verdict.is_allowed);
        self.log.add(host, port, verdict);
    }

    /// Whether an address and a port lead to the server.
    fn is_server(&self, address: Address, port: u16) -> bool {
        port == self.egress.server_port.load(Ordering::Relaxed) && leads_here(address)
    }
}

/// Whether an address leads to this machine.
fn leads_here(address: Address) -> bool {
    address
        .with_embedded()
        .map(Address::ip)
        .any(|address| address.is_loopback() || sys::is_delivered_here(address))
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::limits::ledger::Budget;

    #[test]
    fn a_sandbox_that_has_stopped_gets_no_listener() {
        let budget = Budget::new(1 << 20);
        let slots = ConnectionSlots::new(1, Arc::clone(&budget));
        let exits = Exits::new(Egress::new(slots), budget.whole(), None);
        exits.close();
        let refused = exits.listener(&Arc::default(), None).err().unwrap();
        assert_eq!(refused.kind(), Kind::Stopped);
    }

    #[test]
    fn own_addresses_are_known() {
        for (text, expected) in [
            ("127.0.0.1", true),
            ("127.8.9.1", true),
            ("0.0.0.0", true),
            ("192.0.2.1", false),
            ("::1", true),
            ("::ffff:0.0.0.0", true),
            ("64:ff9b::7f00:1", true),
            ("2001:db8::1", false),
        ] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(leads_here(address.into()), expected, "{text}");
        }
    }
}
