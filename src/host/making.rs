//! Makes sandboxes: reserves slot and user, then makes home, confinement and workspace, all or nothing.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use nix::errno::Errno;

use super::changing::starters;
use super::homes::make_directories;
use super::life::Life;
use super::records::RecordFile;
use super::roots::no_ids;
use super::sandbox::{IsEnding, Lasting};
use super::standing::Pausing;
use super::store::Pin;
use super::table::{Reservation, SandboxTable};
use super::unfinished::{Removal, is_removed};
use super::{Host, Sandbox, Shortage};
use crate::clock::now_ms;
use crate::confine::{
    DeviceRequest, Devices, FileIdentity, FileView, Grants, Home, SandboxSettings,
};
use crate::egress::Exits;
use crate::error::{Error, Kind, Result};
use crate::files::{DiskUse, Root};
use crate::ports::{Ports, TcpPortsInside};
use crate::spec::account::Account;
use crate::spec::isolation::{Isolation, TEMPORARY};
use crate::spec::network::{Filter, NetworkPolicy, Rule, Rules};
use crate::spec::sandbox::{Phase, ResourceLimits, RootChoice, RootSpec, SandboxSpec, Settings};
use crate::threads::lock::Mutex;
use crate::workspace::Workspace;
use crate::{fault, logging, sys};

impl Host {
    /// Makes as many of `count` sandboxes as there is capacity for: all of those, or none. Says why it makes no more.
    ///
    /// # Errors
    /// `Unavailable` if the machine cannot enforce what is asked for. `System`, `NoSpace`, `ShuttingDown`; nothing is
    /// left of any of them, or is removed later and keeps its place until then.
    pub fn create(
        &self,
        count: usize,
        spec: &SandboxSpec,
    ) -> Result<(Vec<Arc<Sandbox>>, Option<Shortage>)> {
        let (root, pin) = self.root_of(spec)?;
        let mut environment = pin.as_ref().map_or_else(Vec::new, Pin::environment);
        environment.extend_from_slice(&spec.environment);
        let isolation = match &root {
            Some(_) => Isolation::Namespaces,
            None => self.isolation_of(spec),
        };
        let network = &self.network_of(spec, root.is_some());
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
        let view = FileView::new(isolation, root.is_some());
        let grants = self.grants(spec, view, None)?;
        let spec = Arc::new(SandboxSpec {
            environment: environment.into(),
            isolation: Some(isolation),
            root: root.clone(),
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
        let has_ids = |user| root.is_none() || self.roots.has_block(user);
        let (reservations, shortage) = self.table().reserve(count, has_ids)?;
        if root.is_some()
            && reservations.is_empty()
            && matches!(shortage, Some(Shortage::Uids { .. }))
        {
            return Err(no_ids());
        }
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
            // Of a build the next server removes what there is.
            if let Some(records) = self.records.as_ref().filter(|_| !spec.is_build) {
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
        // From here on the sandboxes keep it.
        drop(pin);
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

    /// What commands of a new sandbox reach. One with a root of its own has the machine's network only if that is asked for:
    /// else an open one is reached by TCP through the server, without a program's doing.
    fn network_of(&self, spec: &SandboxSpec, has_root: bool) -> NetworkPolicy {
        let chosen = spec.network.as_ref().unwrap_or(&self.default_network);
        match chosen {
            NetworkPolicy::Open if has_root && !spec.shares_network => {
                let rules = Rules {
                    allow: None,
                    deny: Rule::loopback(),
                };
                let mut all = Filter::new(rules, None);
                all.is_transparent = true;
                NetworkPolicy::Filtered(Arc::new(all))
            }
            chosen => chosen.clone(),
        }
    }

    /// The root of a new sandbox, and what keeps the snapshot that it is made of; `None` for the machine's.
    ///
    /// # Errors
    /// `Unavailable`, with the reason; `Invalid` if it does not go with what else is asked for.
    fn root_of(&self, spec: &SandboxSpec) -> Result<(Option<RootSpec>, Option<Pin>)> {
        let (template, user, is_usual, is_volatile) = match &spec.root_choice {
            RootChoice::Private {
                template,
                user,
                makes_user,
                is_volatile,
            } => (template.as_deref(), user.clone(), *makes_user, *is_volatile),
            RootChoice::Default if self.has_roots_by_default && spec.isolation.is_none() => {
                (None, None, false, false)
            }
            RootChoice::Default | RootChoice::Shared => return Ok((None, None)),
        };
        if spec.isolation == Some(Isolation::Landlock) {
            let text = "isolation landlock does not go with root private, which has namespaces";
            return Err(Error::invalid(text));
        }
        if !spec.read_only_paths.is_empty() || !spec.read_write_paths.is_empty() {
            let text = "read_only_paths and read_write_paths do not go with root private, which sees no path of the machine";
            return Err(Error::invalid(text));
        }
        let (template, pin) = self.roots.choose(template, &self.budget)?;
        let snapshot = pin.as_ref().map(Pin::snapshot);
        let settings = snapshot.map(|snapshot| &snapshot.settings);
        let root = RootSpec {
            template,
            snapshot: snapshot.map(|snapshot| snapshot.id.clone()),
            user: match settings.and_then(|settings| settings.user.clone()) {
                // It stands for whoever the template names.
                Some(own) if is_usual => Some(own),
                own => user.or(own),
            },
            directory: settings.and_then(|settings| settings.directory.clone()),
            is_volatile,
        };
        Ok((Some(root), pin))
    }

    /// Opens the paths and the devices of the machine that a sandbox reaches. `known` is what the paths led to when it was
    /// made. Devices are what their files say now.
    pub(super) fn grants(
        &self,
        spec: &SandboxSpec,
        view: FileView,
        known: Option<&[FileIdentity]>,
    ) -> Result<Grants> {
        let (read, write) = (&spec.read_only_paths, &spec.read_write_paths);
        let mut grants = Grants::open(read, write, &self.private, &self.users, known)?;
        let devices = Devices::open(&DeviceRequest {
            names: &spec.devices,
            directories: &self.cdi,
            private: &self.private,
            users: &self.users,
            granted: &grants.paths,
            view,
        });
        grants.devices = devices.map_err(|error| match error.kind() {
            Kind::Invalid if known.is_some() => {
                let text = format_args!("the sandbox cannot start without its devices: {error}");
                Error::new(Kind::Changed, text)
            }
            _ => error,
        })?;
        Ok(grants)
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
        let network = spec.network.as_ref().unwrap_or(&NetworkPolicy::Open);
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
            root: OnceLock::new(),
            ledger: self.budget.ledger(),
            disk: DiskUse::default(),
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
        if let Some(root) = &spec.root {
            make_directories(&home)
                .map_err(|errno| Error::system("cannot make the root of a sandbox", errno))?;
            fault::point("root directories");
            let makes_user = matches!(
                &spec.root_choice,
                RootChoice::Private { makes_user: true, user, .. } if *user == root.user
            );
            let root = self
                .roots
                .make(root, *user, &home, lasting.max_processes())?;
            root.furnish(makes_user)?;
            fault::point("root");
            let _ = lasting.root.set(root);
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
        let (spec, user) = (Arc::clone(&lasting.spec), lasting.user);
        let is_at_rest = phase.stopped.is_some();
        let isolation = lasting.isolation();
        let own_root = lasting.root.get().cloned();
        let account = own_root.as_ref().map(|root| root.usual_account());
        let wanted = lasting.resource_limits();
        let max_processes = lasting.max_processes();
        let ledger = Arc::clone(&lasting.ledger);
        let (egress, own) = (Arc::clone(&self.egress), Arc::clone(&ledger));
        let exits = match &own_root {
            Some(root) => Exits::of_users(egress, own, root.root()),
            None => Exits::new(egress, own, Some(user)),
        };
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
            home: paths(&lasting, account.as_ref()),
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
            root: own_root.clone(),
        })?;
        fault::point("sandbox");
        let home = Arc::new(home);
        let namespaces = confinement.namespaces().cloned();
        let tcp = match confinement.own_network() {
            Some(namespaces) => TcpPortsInside::All(Arc::clone(namespaces)),
            None if is_at_rest => TcpPortsInside::Given(Vec::new()),
            None => TcpPortsInside::Given(lasting.ports.ports().to_vec()),
        };
        let ports = match &own_root {
            Some(root) => Ports::root(Arc::clone(root.tree()), user, tcp),
            None => Ports::home(Arc::clone(&home), user, tcp),
        };
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
            let root = match (own_root, account) {
                (Some(root), Some(Account { uid, gid, home, .. })) => {
                    let owner = root.outside(uid, gid);
                    Root::private(Arc::clone(root.tree()), owner, uid == 0, &home)
                }
                _ => Root::home(home, user),
            };
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

/// The paths of a home: in a root of the sandbox's own that of its usual account.
fn paths(lasting: &Lasting, account: Option<&Account>) -> Home {
    let mut paths = Home::same(&lasting.home);
    match (account, &lasting.spec.shown_home) {
        (Some(account), _) => paths.in_sandbox = (&account.home).into(),
        (None, Some(shown)) if lasting.isolation() == Isolation::Namespaces => {
            paths.in_sandbox.clone_from(shown);
        }
        (None, _) => {}
    }
    paths
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

/// What is reserved for sandboxes that are being made. Those that are not done when this is dropped are removed; what
/// cannot be removed now, for want of a descriptor perhaps, is [removed later](Host::retry_removals).
struct Reserved<'a> {
    host: &'a Host,
    reservations: Vec<Reserve>,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        for Reserve { own, file } in self.reservations.drain(..) {
            let records = self.host.records.as_deref();
            // From here on the record says what a later server does with what is left. There may be none yet.
            let _ = records.map(|records| records.begin_deletion(&file));
            let is_gone = is_removed(&own.id, self.host.homes.remove(&own.id, None));
            if let Some(records) = records.filter(|_| is_gone) {
                records.end_deletion(&file);
            }
            let mut table = self.host.table();
            table.reserved -= 1;
            if is_gone {
                table.give_back(own.user);
            } else {
                table.put_off(Removal {
                    id: own.id,
                    uid: Some(own.user.uid),
                });
            }
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
