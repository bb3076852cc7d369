//! Makes sandboxes: reserves slot and user, then makes home, confinement and workspace, all or nothing.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use nix::errno::Errno;

use super::changing::starters;
use super::life::Life;
use super::records::RecordFile;
use super::sandbox::{IsEnding, Lasting};
use super::standing::Pausing;
use super::table::{Reservation, SandboxTable};
use super::{Host, Sandbox, Shortage};
use crate::clock::now_ms;
use crate::confine::{FileIdentity, Grants, Home, SandboxSettings};
use crate::egress::Exits;
use crate::error::{Error, Kind, Result};
use crate::files::Root;
use crate::ports::{Ports, TcpPortsInside};
use crate::spec::isolation::{Isolation, TEMPORARY};
use crate::spec::network::NetworkPolicy;
use crate::spec::sandbox::{Phase, ResourceLimits, SandboxSpec, Settings};
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
        let limits = spec.settings.limits;
        self.limiter.check(limits.whole)?;
        let grants = self.grants(spec, None)?;
        let spec = Arc::new(SandboxSpec {
            isolation: Some(isolation),
            network: Some(network.clone()),
            settings: Settings {
                limits: ResourceLimits {
                    processes: limits.processes.or(Some(self.default_max_processes)),
                    ..limits
                },
                ..spec.settings.clone()
            },
            read_only_paths: grants.paths.read_only.clone(),
            read_write_paths: grants.paths.read_write.clone(),
            ..spec.clone()
        });
        let (reservations, shortage) = self.table().reserve(count)?;
        let reserve = |own: Reservation| Reserve {
            file: RecordFile::new(&own.id),
            own,
        };
        let mut reserved = Reserved {
            host: self,
            reservations: reservations.into_iter().map(reserve).collect(),
        };
        let made: Result<Vec<_>> = reserved
            .reservations
            .iter()
            .map(|reservation| self.make(reservation, &spec, &grants))
            .collect();
        let made = made.and_then(|made| {
            // All of them exist, or none.
            if let Some(records) = &self.records {
                for sandbox in &made {
                    records.complete(&sandbox.file)?;
                }
            }
            Ok(made)
        });
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
            let Lasting { id, user, .. } = &*sandbox.lasting;
            logging::info(format_args!("sandbox {id} created, uid {}", user.uid));
        }
        Ok((made, shortage))
    }

    /// Makes one sandbox, or finds the one that a request with the same key has made.
    ///
    /// # Errors
    /// As [`Host::create`]; `OverLimit` if the host is full.
    pub fn create_once(&self, spec: &SandboxSpec) -> Result<Arc<Sandbox>> {
        let Some(key) = &spec.key else {
            return self.create_one(spec);
        };
        let is_making = |table: &mut SandboxTable| table.keys.contains(key);
        let mut table = self.changed.wait_while(self.table(), is_making);
        let known = table.sandboxes.values();
        let known = known
            .into_iter()
            .find(|sandbox| sandbox.spec.key.as_ref() == Some(key));
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

    /// Opens the paths of the machine that a sandbox reaches. `known` is what they led to when it was made.
    pub(super) fn grants(
        &self,
        spec: &SandboxSpec,
        known: Option<&[FileIdentity]>,
    ) -> Result<Grants> {
        let (read, write) = (&spec.read_only_paths, &spec.read_write_paths);
        Grants::open(read, write, &self.private, &self.users, known)
    }

    /// What surrounds a new sandbox.
    fn isolation_of(&self, spec: &SandboxSpec) -> Isolation {
        spec.isolation.unwrap_or(self.default_isolation)
    }

    /// Makes a sandbox of a reservation. Until its record is complete, the next server removes what there is of it.
    fn make(
        &self,
        reservation: &Reserve,
        spec: &Arc<SandboxSpec>,
        grants: &Grants,
    ) -> Result<Arc<Sandbox>> {
        let Reservation { id, number, user } = &reservation.own;
        let network = self.network_of(spec);
        let ports = if self.isolation_of(spec).owns_network(network) {
            self.tcp_ports.of_own_network(spec.tcp_ports)
        } else {
            self.tcp_ports.take(spec.tcp_ports)?
        };
        let phase = Phase::begin(1, now_ms());
        let lasting = Arc::new(Lasting {
            id: id.clone(),
            number: *number,
            user: *user,
            home: self.homes.path.join(id),
            created_at_ms: now_ms(),
            spec: Arc::clone(spec),
            given: Arc::clone(&grants.identities),
            life: Mutex::new(Life::begin(spec.settings.clone())),
            turn: Mutex::default(),
            token: OnceLock::new(),
            ports,
            ledger: self.budget.ledger(),
            current: Mutex::new(phase),
            file: Arc::clone(&reservation.file),
        });
        if let Some(records) = &self.records {
            records.begin(&lasting.record(phase), &lasting.file)?;
        }
        let home = self.homes.make(id, *user).map_err(unmade)?;
        fault::point("home");
        if sys::is_getting_scarce(home.as_fd()) {
            let act = "cannot make a sandbox: the server needs its last descriptors for the existing ones; \
                       delete some, or raise the limit on open files";
            return Err(Error::system(act, Errno::EMFILE));
        }
        self.assemble(lasting, phase, home, None, grants)
    }

    /// Puts together what a sandbox is in one phase of its life; `former` is what it was in the one before.
    pub(super) fn assemble(
        &self,
        lasting: Arc<Lasting>,
        phase: Phase,
        home: OwnedFd,
        former: Option<&Sandbox>,
        grants: &Grants,
    ) -> Result<Arc<Sandbox>> {
        let (spec, user) = (&*lasting.spec, lasting.user);
        let is_at_rest = phase.stopped.is_some();
        let isolation = lasting.isolation();
        let mut paths = Home::same(&lasting.home);
        if let (Some(shown), Isolation::Namespaces) = (&spec.shown_home, isolation) {
            paths.in_sandbox.clone_from(shown);
        }
        let wanted = lasting.resource_limits();
        let max_processes = lasting.max_processes();
        let ledger = Arc::clone(&lasting.ledger);
        let exits = Exits::new(Arc::clone(&self.egress), Arc::clone(&ledger), Some(user));
        let limits = if is_at_rest {
            self.limiter.at_rest(wanted.whole)
        } else {
            // Somebody may still have what kept the limits of the run before.
            let name = format!("{}-{}", lasting.id, phase.runs);
            self.limiter.apply(
                &name,
                wanted.whole,
                max_processes.saturating_add(starters(isolation)),
            )?
        };
        let confinement = self.policy.confine(SandboxSettings {
            id: &lasting.id,
            user,
            home: paths,
            home_directory: home.as_fd(),
            environment: &spec.environment,
            max_processes,
            max_memory: wanted.data,
            isolation,
            network: lasting.network().clone(),
            exits,
            grants,
            tcp_ports: lasting.ports.ports(),
            whole: &limits,
            is_at_rest,
        })?;
        fault::point("sandbox");
        let home = Arc::new(home);
        let namespaces = confinement.namespaces().cloned();
        let tcp = match confinement.own_network() {
            Some(namespaces) => TcpPortsInside::All(Arc::clone(namespaces)),
            None if is_at_rest => TcpPortsInside::Given(Vec::new()),
            None => TcpPortsInside::Given(lasting.ports.ports().to_vec()),
        };
        let ports = Ports::home(Arc::clone(&home), user, tcp);
        // Before any command can change what is there.
        let in_memory = namespaces.as_ref().map(|inside| inside.open_disks());
        let in_memory = in_memory.transpose().map_err(|errno| {
            Error::system("cannot open the directories of a sandbox in memory", errno)
        })?;
        let (names, in_memory): (Vec<_>, Vec<_>) = in_memory.into_iter().flatten().unzip();
        let temporary = names.iter().position(|name| *name == TEMPORARY);
        let temporary = temporary.map(|at| in_memory[at].try_clone());
        let temporary = temporary.transpose().map_err(|error| {
            Error::io("cannot open the temporary directory of a sandbox", &error)
        })?;
        let (shared, contexts) = (Arc::clone(&self.shared), self.contexts);
        let workspace = if let Some(former) = former {
            let first = phase.first_process();
            let former = &former.workspace;
            former.renewed(confinement, ports, shared, contexts, first)
        } else {
            let root = Root::home(home, user);
            Workspace::new(root, confinement, ports, shared, ledger, contexts)
        };
        workspace.begin_run(temporary, &in_memory);
        if is_at_rest {
            workspace.close_processes();
        }
        Ok(Arc::new(Sandbox {
            lasting,
            phase,
            limits,
            is_ending: Mutex::new(IsEnding(false)),
            pausing: Pausing::new(phase.since_ms),
            granted: Arc::clone(&grants.paths),
            policy: Arc::clone(&self.policy),
            namespaces,
            is_loss_known: AtomicBool::new(false),
            workspace,
        }))
    }
}

/// The error of a home that cannot be made. On a disk that takes no more, why it does not is no concern of the client's.
fn unmade(error: Error) -> Error {
    match error.kind() {
        Kind::Forbidden => Error::new(Kind::NoSpace, error),
        _ => error,
    }
}

/// One of the sandboxes that are being made, and where it is written down.
struct Reserve {
    own: Reservation,
    file: Arc<RecordFile>,
}

/// What is reserved for sandboxes that are being made. Nothing is left of those that are not done when this is dropped.
struct Reserved<'a> {
    host: &'a Host,
    reservations: Vec<Reserve>,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        for Reserve { own, file } in self.reservations.drain(..) {
            let records = self.host.records.as_deref();
            let begun = records.map(|records| records.begin_deletion(&file));
            let is_clean = self.host.homes.remove(&own.id, None).is_ok();
            if let (Some(records), Some(Ok(()))) = (records, begun) {
                records.end_deletion(&file);
            }
            let mut table = self.host.table();
            table.reserved -= 1;
            table.give_back(own.user, is_clean);
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
