//! Roots of sandboxes: the templates that there are, a block of ids for each sandbox, and whether the machine can put a root
//! together. A template is a directory of the machine, or a snapshot of the [store](super::store).
//!
//! A block belongs to a uid of the host's range: it is free when the uid is. What a sandbox changes of its template is in
//! its home.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

use super::claims::Claims;
use super::store::{self, MACHINE, Pin, Store};
use super::{Homes, leftovers};
use crate::codec::sort::sort;
use crate::config::HostSettings;
use crate::confine::{Policy, PrivateRoot, check_waiting_trees, root_unavailable};
use crate::error::{Error, Kind, Result};
use crate::limits::ledger::{Budget, Ledger};
use crate::logging;
use crate::spec::sandbox::RootSpec;
use crate::sys::paths::open;
use crate::sys::proc::IdBlocks;
use crate::sys::{IDS_OF_SANDBOX, User};

/// What sandboxes with a root of their own are made of.
pub(super) struct Roots {
    /// Directories, by their names.
    templates: HashMap<String, OwnedFd>,
    /// Archives, by the names that they have in the store.
    archives: Vec<(String, PathBuf)>,
    pub(super) store: Arc<Store>,
    /// What becomes part of it.
    #[cfg(all(feature = "e2b", feature = "file-tools"))]
    pub(super) builds: super::builds::Builds,
    /// What sandboxes are made of that name nothing.
    default: Option<String>,
    blocks: IdBlocks,
    /// Uids whose blocks have an owner on this machine.
    taken: Vec<u32>,
    /// Why there is no root, if there is none.
    lack: Option<String>,
}

impl Roots {
    /// Opens the templates and the store, claims the ids, and tries to make a root.
    ///
    /// # Errors
    /// `System` if a template cannot be opened, or another host has the ids or the store.
    pub(super) fn open(
        settings: &HostSettings,
        accounts: &[u32],
        claims: &Claims,
        homes: &Homes,
        policy: &Policy,
    ) -> Result<Self> {
        let store = Store::open(settings, homes)?;
        let mut roots = Self::new(settings, &store, claims)?;
        if roots.lack.is_none() {
            leftovers::wait_for_roots(&settings.users);
            roots.try_out(homes, policy, &settings.users, accounts);
        }
        Ok(roots)
    }

    fn new(settings: &HostSettings, store: &Arc<Store>, claims: &Claims) -> Result<Self> {
        let users = &settings.users;
        // What links lead to is held, too.
        let private = [&settings.homes, &store.path];
        let private = private.map(|path| path.canonicalize().unwrap_or_else(|_| path.clone()));
        let settings = &settings.roots;
        let (first, last) = (*settings.ids.start(), *settings.ids.end());
        // Each uid has the same block in every host, so that hosts which share no uid share no block.
        let blocks = IdBlocks {
            first_user: 0,
            first_id: first,
            count: (last - first).saturating_add(1) / IDS_OF_SANDBOX,
        };
        let mut roots = Self {
            templates: HashMap::new(),
            archives: Vec::new(),
            store: Arc::clone(store),
            #[cfg(all(feature = "e2b", feature = "file-tools"))]
            builds: super::builds::Builds::default(),
            default: settings.default.clone(),
            blocks,
            taken: Vec::new(),
            lack: None,
        };
        for (name, path) in &settings.templates {
            if path.is_file() {
                roots.archives.push((name.clone(), path.clone()));
                continue;
            }
            let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            let opened = open(path, flags, Mode::empty()).map_err(|errno| {
                let path = path.display();
                let act =
                    format_args!("cannot use SBX_TEMPLATES: cannot open {path}, which is {name}");
                Error::system(act, errno)
            })?;
            // Root inside reads all that is in it, whatever its mode.
            let real = path.canonicalize().unwrap_or_else(|_| path.clone());
            if private.iter().any(|private| private.starts_with(&real)) {
                let text = format!(
                    "cannot use SBX_TEMPLATES: {}, which is {name}, holds the homes or the snapshots of sandboxes; make a copy of what they may read",
                    path.display()
                );
                return Err(Error::new(Kind::System, text));
            }
            roots.templates.insert(name.clone(), opened);
        }
        let of_range = users.clone().filter_map(|uid| blocks.of_user(uid));
        if let (Some(first), Some(last)) = (of_range.clone().min(), of_range.max()) {
            let claimed = claims.add_ids(&(first..=last + (IDS_OF_SANDBOX - 1)));
            match claimed {
                // Nobody has asked for roots.
                Err(error) if settings.templates.is_empty() => roots.lack = Some(error.to_string()),
                claimed => claimed?,
            }
        }
        let foreign = subordinate_ids();
        roots.taken = users
            .clone()
            .filter(|uid| {
                let block = blocks.of_user(*uid).map(u64::from);
                block.is_none_or(|block| {
                    let end = block + u64::from(IDS_OF_SANDBOX);
                    foreign
                        .iter()
                        .any(|(first, count)| *first < end && block < first + count)
                })
            })
            .collect();
        blocks.announce();
        Ok(roots)
    }

    /// Tries to make a root with all that is in it for one of these uids that has no account, and remembers why it cannot be
    /// made.
    fn try_out(
        &mut self,
        homes: &Homes,
        policy: &Policy,
        uids: &RangeInclusive<u32>,
        accounts: &[u32],
    ) {
        let unused = uids.clone().filter(|uid| !accounts.contains(uid));
        let mut users = unused.map(|uid| User { uid, gid: uid });
        let Some(user) = users.find(|user| self.has_block(*user)) else {
            self.lack = Some("SBX_ID_BLOCKS has no ids for a uid of SBX_UID_RANGE".to_owned());
            return;
        };
        let tried = (|| {
            if !nix::unistd::geteuid().is_root() {
                return Err(root_unavailable("the server does not run as root"));
            }
            // So that it is gone at once.
            let spec = RootSpec {
                is_volatile: true,
                ..RootSpec::default()
            };
            let first = self.block_of(user).ok_or_else(no_ids)?;
            let home = homes.make_trial_root(user)?;
            let trial = self.store.open_trial()?;
            let name = self.templates.keys().min();
            if let Some(template) = name.and_then(|name| self.templates.get(name)) {
                PrivateRoot::new(template.as_fd(), home.as_fd(), first, &spec, 1)?;
            }
            let made = PrivateRoot::new(trial.as_fd(), home.as_fd(), first, &spec, 1)?;
            policy.try_root(&made)
        })();
        // All that is mounted there is gone by now.
        let _ = homes.remove_trial();
        self.store.remove_trial();
        if let Err(error) = tried {
            if !self.templates.is_empty() || !self.archives.is_empty() {
                logging::info(format_args!(
                    "no sandbox can have a root of its own: {error}"
                ));
            }
            // That passes, and is no reason to put aside what there is: tenants fill disks.
            self.lack = (error.kind() != Kind::NoSpace).then(|| error.to_string());
        }
    }

    /// The template that the root of a new sandbox is to be made of: its name, and the snapshot if it is one.
    ///
    /// # Errors
    /// `Unavailable`, with the reason; `Invalid` if there is no such template; those of [`Store::await_machine`].
    pub(super) fn choose(
        &self,
        template: Option<&str>,
        budget: &Arc<Budget>,
    ) -> Result<(String, Option<Pin>)> {
        self.check()?;
        let only = || {
            let mut names = self.names();
            names.pop().filter(|_| names.is_empty())
        };
        let name = template.or(self.default.as_deref()).map(str::to_owned);
        let name = name.or_else(only);
        if let Some(name) = name.as_deref() {
            if self.templates.contains_key(name) {
                return Ok((name.to_owned(), None));
            }
            if self.is_copy(name) {
                self.store.await_machine(budget.whole())?;
            }
            if let Some(pin) = self.store.pin(name) {
                return Ok((name.to_owned(), Some(pin)));
            }
        }
        let wanted = name.map_or("template is missing".to_owned(), |name| {
            format!("there is no template {name:?}")
        });
        let names = match self.names().join(", ") {
            names if names.is_empty() => "SBX_TEMPLATES or PUT /v1/snapshots makes one".to_owned(),
            names => format!("it takes one of {names}"),
        };
        Err(Error::invalid(format_args!("{wanted}; {names}")))
    }

    /// Imports the archives that the operator has named, each content once; and copies the machine, if that is the default
    /// and was not done before. What has no room is left as it was, and the next start, or for the machine whoever needs it,
    /// tries again.
    ///
    /// # Errors
    /// Those of [`Store::import_file`], but for `NoSpace`.
    pub(super) fn import_archives(&self, ledger: &Arc<Ledger>) -> Result<()> {
        // So that a build without archives has nothing of them: the linker drops what is not called.
        if !cfg!(feature = "file-tools") {
            return Ok(());
        }
        for (name, path) in self.archives.iter().filter(|_| self.lack.is_none()) {
            let imported = self.store.import_file(name, path, ledger);
            let Err(error) = imported else { continue };
            let path = path.display();
            let why = format!("cannot import {path}, which is {name}: {error}");
            if error.kind() != Kind::NoSpace {
                let text = format!("cannot use SBX_TEMPLATES: {why}");
                return Err(Error::new(Kind::System, text));
            }
            logging::info(format_args!("{why}"));
        }
        let is_default = self
            .default
            .as_deref()
            .is_some_and(|name| self.is_copy(name));
        if is_default && self.lack.is_none() && self.store.find(MACHINE).is_none() {
            match self.store.import_machine(ledger) {
                Err(error) if error.kind() == Kind::NoSpace => {
                    logging::info(format_args!("cannot copy the machine: {error}"));
                }
                made => drop(made?),
            }
        }
        Ok(())
    }

    /// Whether the operator has given a template this name.
    pub(super) fn is_named(&self, name: &str) -> bool {
        let mut archives = self.archives.iter();
        self.templates.contains_key(name) || archives.any(|(own, _)| own == name)
    }

    /// Whether a name means a copy of the machine.
    pub(super) fn is_copy(&self, name: &str) -> bool {
        name == MACHINE && !self.is_named(name) && cfg!(feature = "file-tools")
    }

    /// Checks that sandboxes can have roots of their own here.
    ///
    /// # Errors
    /// `Unavailable`, with the reason.
    pub(super) fn check(&self) -> Result<()> {
        match &self.lack {
            None => Ok(()),
            Some(why) => Err(root_unavailable(why)),
        }
    }

    /// The names of the templates.
    pub(super) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.templates.keys().cloned().collect();
        names.extend(self.store.names());
        sort(&mut names);
        names.dedup();
        names
    }

    /// Those that the operator has given.
    pub(super) fn given_names(&self) -> Vec<String> {
        let archives = self.archives.iter().map(|(name, _)| name);
        let mut names: Vec<String> = self.templates.keys().chain(archives).cloned().collect();
        sort(&mut names);
        names
    }

    /// Checks that the store is the one that a root of an earlier server was made of, if it is empty: perhaps what it is on
    /// is not mounted.
    ///
    /// # Errors
    /// `System`, with what to do.
    pub(super) fn check_store(&self, id: &str, root: &RootSpec) -> Result<()> {
        match &root.snapshot {
            Some(snapshot) if self.store.is_empty() => {
                let path = self.store.path.display();
                let text = format!(
                    "cannot use SBX_SNAPSHOTS_DIR {path}: it has no snapshots, and sandbox {id} is made of {snapshot}; mount what \
                     it is on, or remove {id}.* in .sandboxes of SBX_HOMES_DIR if its snapshot is lost"
                );
                Err(Error::new(Kind::System, text))
            }
            _ => Ok(()),
        }
    }

    /// The template of sandboxes that choose nothing.
    pub(super) fn default(&self) -> Option<&str> {
        self.default.as_deref()
    }

    /// Whether a user has a block of ids.
    pub(super) fn has_block(&self, user: User) -> bool {
        self.block_of(user).is_some()
    }

    /// The first id of a user's block.
    pub(super) fn block_of(&self, user: User) -> Option<u32> {
        let block = self.blocks.of_user(user.uid);
        block.filter(|_| !self.taken.contains(&user.uid))
    }

    /// Why the root of a sandbox of an earlier server cannot be put together again with what there is; `None` if it can.
    /// Whether the machine can mount it now is no matter: that may pass, and a record that was put aside stays there.
    pub(super) fn objection(&self, root: &RootSpec, uid: u32) -> Option<String> {
        let name = &root.template;
        match &root.snapshot {
            Some(id) if self.store.find(id).is_none() => {
                return Some(format!("its snapshot {id} is not in SBX_SNAPSHOTS_DIR"));
            }
            None if !self.templates.contains_key(name) => {
                return Some(format!("its template {name} is not in SBX_TEMPLATES"));
            }
            _ => {}
        }
        let user = User { uid, gid: uid };
        (!self.has_block(user)).then(|| format!("SBX_ID_BLOCKS has no ids for its uid {uid}"))
    }

    /// Puts a root together, for a run with so many processes at most.
    ///
    /// # Errors
    /// `Unavailable`; `OverLimit`; `NoIds`; `NotFound` if there is no such template any more; `System`.
    pub(super) fn make(
        &self,
        root: &RootSpec,
        user: User,
        home: &OwnedFd,
        max_processes: u64,
    ) -> Result<Arc<PrivateRoot>> {
        self.check()?;
        check_waiting_trees()?;
        let first = self.block_of(user).ok_or_else(no_ids)?;
        if let Some(id) = &root.snapshot {
            let tree = self.store.open_tree(id)?;
            return PrivateRoot::new(tree.as_fd(), home.as_fd(), first, root, max_processes);
        }
        let template = self.templates.get(&root.template).ok_or_else(|| {
            let text = format!("there is no template {} any more", root.template);
            Error::new(Kind::System, text)
        })?;
        PrivateRoot::new(template.as_fd(), home.as_fd(), first, root, max_processes)
    }
}

/// Checks that what the operator has named is there.
///
/// # Errors
/// `NotFound` or `Invalid`, with the name.
pub fn check_templates(settings: &HostSettings) -> Result<()> {
    for (name, path) in &settings.roots.templates {
        if store::is_id(name) {
            let text =
                format_args!("cannot use SBX_TEMPLATES: {name} has the form of a snapshot's id");
            return Err(Error::invalid(text));
        }
        let act = format!(
            "cannot use SBX_TEMPLATES: {}, which is {name}",
            path.display()
        );
        let found = path.metadata();
        let found = found.map_err(|error| Error::io(&act, &error))?;
        let wanted = if cfg!(feature = "file-tools") {
            "a directory or an archive"
        } else {
            "a directory: this build is without the feature file-tools"
        };
        let is_archive = found.is_file() && cfg!(feature = "file-tools");
        if !found.is_dir() && !is_archive {
            return Err(Error::invalid(format_args!("{act}: it must be {wanted}")));
        }
    }
    Ok(())
}

/// No block of ids is free.
pub(super) fn no_ids() -> Error {
    let text = "no block of 65536 ids is free for the sandbox; delete one, or widen SBX_ID_BLOCKS";
    Error::new(Kind::NoIds, text)
}

/// What this machine has given to its users for containers of theirs (subuid(5)): first ids and counts.
fn subordinate_ids() -> Vec<(u64, u64)> {
    let mut all = Vec::new();
    for path in ["/etc/subuid", "/etc/subgid"] {
        let list = std::fs::read_to_string(path).unwrap_or_default();
        all.extend(list.lines().filter_map(|line| {
            let mut fields = line
                .split(':')
                .skip(1)
                .map(|field| field.trim().parse().ok());
            Some((fields.next()??, fields.next()??))
        }));
    }
    all
}
