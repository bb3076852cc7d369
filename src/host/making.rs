//! Makes sandboxes: reserves slot and user, then makes home, confinement and workspace, all or nothing.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use nix::errno::Errno;

use super::table::{Reservation, SandboxTable};
use super::{Expiry, Host, Sandbox, SandboxSpec, Shortage};
use crate::clock::now_ms;
use crate::confine::{Grants, Home, SandboxSettings};
use crate::egress::Exits;
use crate::error::{Error, Kind, Result};
use crate::files::Root;
use crate::ports::{Ports, TcpPortsInside};
use crate::spec::isolation::Isolation;
use crate::spec::network::NetworkPolicy;
use crate::threads::lock::Mutex;
use crate::workspace::Workspace;
use crate::{fault, logging, sys};

impl Host {
    /// Makes as many of `count` sandboxes as there is capacity for: all of those, or none. Says why it makes no more.
    ///
    /// # Errors
    /// `Unavailable` if the machine cannot enforce what is asked for. `System`, `NoSpace`, `ShuttingDown`; nothing is
    /// left of any of them.
    pub fn create(
        &self,
        count: usize,
        spec: &SandboxSpec,
    ) -> Result<(Vec<Arc<Sandbox>>, Option<Shortage>)> {
        let network = self.network_of(spec);
        let isolation = self.isolation_of(spec);
        self.policy.check_isolation(isolation)?;
        self.policy.check_network(isolation, network)?;
        let has_network = isolation.owns_network(network);
        if spec.tcp_ports > 0 && *network != NetworkPolicy::Open && !has_network {
            let text = format!(
                "tcp_ports is unavailable with network {}: sockets of this policy listen on no TCP port",
                network.name()
            );
            return Err(Error::new(Kind::Unavailable, text));
        }
        self.limiter.check(spec.whole)?;
        let (read, write) = (&spec.read_only_paths, &spec.read_write_paths);
        let grants = Grants::open(read, write, &self.private, &self.users)?;
        let (reservations, shortage) = self.table().reserve(count)?;
        let mut reserved = Reserved {
            host: self,
            reservations,
        };
        let made: Result<Vec<_>> = reserved
            .reservations
            .iter()
            .map(|reservation| self.make(reservation, spec, &grants))
            .collect();
        // On an error the finished ones are dropped before `reserved`, which frees descriptors for the removals.
        let made = made.inspect_err(|error| {
            logging::info(format_args!("cannot make a sandbox: {error}"));
        })?;
        let mut table = self.table();
        table.insert(&made);
        table.reserved -= made.len();
        reserved.reservations.clear();
        drop(table);
        self.changed.notify_all();
        for sandbox in &made {
            let Sandbox { id, user, .. } = &**sandbox;
            logging::info(format_args!("sandbox {id} created, uid {}", user.uid));
        }
        Ok((made, shortage))
    }

    /// Makes one sandbox, or finds the one that a request with the same key has made.
    ///
    /// # Errors
    /// As [`Host::create`]; `OverLimit` if the host is full.
    pub fn create_once(&self, spec: &SandboxSpec) -> Result<Arc<Sandbox>> {
        let Some(key) = &spec.labels.key else {
            return self.create_one(spec);
        };
        let is_making = |table: &mut SandboxTable| table.keys.contains(key);
        let mut table = self.changed.wait_while(self.table(), is_making);
        let known = table.sandboxes.values();
        let known = known
            .into_iter()
            .find(|sandbox| sandbox.labels.key.as_ref() == Some(key));
        if let Some(known) = known {
            return Ok(Arc::clone(known));
        }
        table.keys.insert(key.clone());
        drop(table);
        let _key = KeyInUse { host: self, key };
        self.create_one(spec)
    }

    fn create_one(&self, spec: &SandboxSpec) -> Result<Arc<Sandbox>> {
        let (mut made, shortage) = self.create(1, spec)?;
        made.pop().ok_or_else(|| {
            let why = shortage.map_or_else(String::new, |shortage| format!(": {shortage}"));
            let text = format!("the host is full{why}; delete a sandbox");
            Error::new(Kind::OverLimit, text)
        })
    }

    /// What commands of a new sandbox reach.
    fn network_of<'a>(&'a self, spec: &'a SandboxSpec) -> &'a NetworkPolicy {
        spec.network.as_ref().unwrap_or(&self.default_network)
    }

    /// What surrounds a new sandbox.
    fn isolation_of(&self, spec: &SandboxSpec) -> Isolation {
        spec.isolation.unwrap_or(self.default_isolation)
    }

    fn make(
        &self,
        reservation: &Reservation,
        spec: &SandboxSpec,
        grants: &Grants,
    ) -> Result<Arc<Sandbox>> {
        let network = self.network_of(spec).clone();
        let isolation = self.isolation_of(spec);
        let lease = if isolation.owns_network(&network) {
            self.tcp_ports.of_own_network(spec.tcp_ports)
        } else {
            self.tcp_ports.take(spec.tcp_ports)?
        };
        let home = self.homes.make(&reservation.id, reservation.user)?;
        fault::point("home");
        if sys::is_getting_scarce(home.as_fd()) {
            let act = "cannot make a sandbox: the server needs its last descriptors for the existing ones; \
                       delete some, or raise the limit on open files";
            return Err(Error::system(act, Errno::EMFILE));
        }
        let mut paths = Home::same(&self.homes.path.join(&reservation.id));
        if let (Some(shown), Isolation::Namespaces) = (&spec.shown_home, isolation) {
            paths.in_sandbox.clone_from(shown);
        }
        let max_processes = spec.max_processes.unwrap_or(self.default_max_processes);
        let ledger = self.budget.ledger();
        let user = Some(reservation.user);
        let exits = Exits::new(Arc::clone(&self.egress), Arc::clone(&ledger), user);
        let id = &reservation.id;
        // A command in namespaces is started by a process that ends at once.
        let starter = u64::from(isolation == Isolation::Namespaces);
        let limits = self
            .limiter
            .apply(id, spec.whole, max_processes + starter)?;
        let confinement = self.policy.confine(SandboxSettings {
            id: &reservation.id,
            user: reservation.user,
            home: paths,
            home_directory: home.as_fd(),
            environment: &spec.environment,
            max_processes,
            max_memory: spec.max_memory,
            isolation,
            network: network.clone(),
            exits,
            grants,
            tcp_ports: lease.ports(),
            whole: &limits,
        })?;
        fault::point("sandbox");
        let home = Arc::new(home);
        let namespaces = confinement.namespaces().cloned();
        let tcp = match confinement.own_network() {
            Some(namespaces) => TcpPortsInside::All(Arc::clone(namespaces)),
            None => TcpPortsInside::Given(lease.ports().to_vec()),
        };
        let ports = Ports::home(Arc::clone(&home), reservation.user, tcp);
        // Before any command can change what is there.
        let temporary = namespaces.as_ref().map(|inside| inside.open_temporary());
        let temporary = temporary.transpose().map_err(|errno| {
            Error::system("cannot open the temporary directory of a sandbox", errno)
        })?;
        let root = Root::home(home, reservation.user).with_temporary(temporary.flatten());
        let shared = Arc::clone(&self.shared);
        Ok(Arc::new(Sandbox {
            id: reservation.id.clone(),
            number: reservation.number,
            user: reservation.user,
            home: self.homes.path.join(&reservation.id),
            created_at_ms: now_ms(),
            idle_timeout: spec.idle_timeout,
            expiry: Mutex::new(spec.lifetime.and_then(Expiry::after)),
            labels: spec.labels.clone(),
            token: OnceLock::new(),
            max_processes,
            max_memory: spec.max_memory,
            limits,
            is_ending: Mutex::new(false),
            network,
            granted: Arc::clone(&grants.paths),
            policy: Arc::clone(&self.policy),
            namespaces,
            is_loss_known: AtomicBool::new(false),
            ports: lease,
            workspace: Workspace::new(root, confinement, ports, shared, ledger, self.contexts),
        }))
    }
}

/// What is reserved for sandboxes that are being made. Nothing is left of those that are not done when this is dropped.
struct Reserved<'a> {
    host: &'a Host,
    reservations: Vec<Reservation>,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        for reservation in self.reservations.drain(..) {
            let is_clean = self.host.homes.remove(&reservation.id, None).is_ok();
            let mut table = self.host.table();
            table.reserved -= 1;
            table.give_back(reservation.user, is_clean);
            drop(table);
            self.host.changed.notify_all();
        }
    }
}

/// The key of a request that is making a sandbox.
struct KeyInUse<'a> {
    host: &'a Host,
    key: &'a str,
}

impl Drop for KeyInUse<'_> {
    fn drop(&mut self) {
        self.host.table().keys.remove(self.key);
        self.host.changed.notify_all();
    }
}
