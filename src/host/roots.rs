//! Roots of sandboxes: the templates that there are, a block of ids for each sandbox, and whether the machine can put a root
//! together.
//!
//! A block belongs to a uid of the host's range: it is free when the uid is. What a sandbox changes of its template is in
//! its home.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

use super::claims::Claims;
use super::{Homes, leftovers};
use crate::codec::sort::sort;
use crate::config::{HostSettings, RootSettings};
use crate::confine::{Policy, PrivateRoot, root_unavailable};
use crate::error::{Error, Kind, Result};
use crate::logging;
use crate::spec::sandbox::RootSpec;
use crate::sys::paths::open;
use crate::sys::proc::IdBlocks;
use crate::sys::{IDS_OF_SANDBOX, User};

/// What sandboxes with a root of their own are made of.
pub(super) struct Roots {
    /// Directories, by their names.
    templates: HashMap<String, OwnedFd>,
    /// What sandboxes are made of that name nothing.
    default: Option<String>,
    blocks: IdBlocks,
    /// Uids whose blocks have an owner on this machine.
    taken: Vec<u32>,
    /// Why there is no root, if there is none.
    lack: Option<String>,
}

impl Roots {
    /// Opens the templates, claims the ids, and tries to make a root.
    ///
    /// # Errors
    /// `System` if a template cannot be opened, or another host has the ids.
    pub(super) fn open(
        settings: &HostSettings,
        accounts: &[u32],
        claims: &Claims,
        homes: &Homes,
        policy: &Policy,
    ) -> Result<Self> {
        let mut roots = Self::new(&settings.roots, &settings.users, &settings.homes, claims)?;
        if roots.lack.is_none() {
            leftovers::wait_for_roots(&settings.users);
            roots.try_out(homes, policy, &settings.users, accounts);
        }
        Ok(roots)
    }

    fn new(
        settings: &RootSettings,
        users: &RangeInclusive<u32>,
        homes: &Path,
        claims: &Claims,
    ) -> Result<Self> {
        let (first, last) = (*settings.ids.start(), *settings.ids.end());
        // Each uid has the same block in every host, so that hosts which share no uid share no block.
        let blocks = IdBlocks {
            first_user: 0,
            first_id: first,
            count: (last - first).saturating_add(1) / IDS_OF_SANDBOX,
        };
        let mut roots = Self {
            templates: HashMap::new(),
            default: settings.default.clone(),
            blocks,
            taken: Vec::new(),
            lack: None,
        };
        for (name, path) in &settings.templates {
            let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            let opened = open(path, flags, Mode::empty()).map_err(|errno| {
                let path = path.display();
                let act =
                    format_args!("cannot use SBX_TEMPLATES: cannot open {path}, which is {name}");
                Error::system(act, errno)
            })?;
            // Root inside reads all that is in it, whatever its mode.
            let real = path.canonicalize().unwrap_or_else(|_| path.clone());
            if homes.starts_with(&real) {
                let text = format!(
                    "cannot use SBX_TEMPLATES: {}, which is {name}, holds the homes of sandboxes; make a copy of what they may read",
                    path.display()
                );
                return Err(Error::new(Kind::System, text));
            }
            roots.templates.insert(name.clone(), opened);
        }
        if roots.templates.is_empty() {
            roots.lack = Some("SBX_TEMPLATES names no template".to_owned());
            return Ok(roots);
        }
        let of_range = users.clone().filter_map(|uid| blocks.of_user(uid));
        if let (Some(first), Some(last)) = (of_range.clone().min(), of_range.max()) {
            claims.add_ids(&(first..=last + (IDS_OF_SANDBOX - 1)))?;
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
        let Some(name) = self.templates.keys().min().cloned() else {
            return;
        };
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
            let spec = RootSpec {
                template: name,
                user: None,
                is_volatile: false,
            };
            let home = homes.make_trial_root(user)?;
            let made = self.make(&spec, user, &home)?;
            policy.try_root(&made)
        })();
        // All that is mounted there is gone by now.
        let _ = homes.remove_trial();
        if let Err(error) = tried {
            logging::info(format_args!(
                "no sandbox can have a root of its own: {error}"
            ));
            // That passes, and is no reason to put aside what there is: tenants fill disks.
            self.lack = (error.kind() != Kind::NoSpace).then(|| error.to_string());
        }
    }

    /// The name of the template that the root of a new sandbox is to be made of.
    ///
    /// # Errors
    /// `Unavailable`, with the reason; `Invalid` if there is no such template.
    pub(super) fn choose(&self, template: Option<&str>) -> Result<String> {
        self.check()?;
        let only = || (self.templates.len() == 1).then(|| self.templates.keys().next())?;
        let name = template.or(self.default.as_deref());
        let name = name.or_else(|| only().map(String::as_str));
        match name {
            Some(name) if self.templates.contains_key(name) => Ok(name.to_owned()),
            name => {
                let wanted = name.map_or("template is missing".to_owned(), |name| {
                    format!("there is no template {name:?}")
                });
                let names = self.names().join(", ");
                Err(Error::invalid(format_args!(
                    "{wanted}; it takes one of {names}"
                )))
            }
        }
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
    pub(super) fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.templates.keys().map(String::as_str).collect();
        sort(&mut names);
        names
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

    /// Why the root of a sandbox of an earlier server cannot be put together again; `None` if it can.
    pub(super) fn objection(&self, root: &RootSpec, uid: u32) -> Option<String> {
        let name = &root.template;
        if let Err(error) = self.check() {
            return Some(error.to_string());
        }
        if !self.templates.contains_key(name) {
            return Some(format!("its template {name} is not in SBX_TEMPLATES"));
        }
        let user = User { uid, gid: uid };
        (!self.has_block(user)).then(|| format!("SBX_ID_BLOCKS has no ids for its uid {uid}"))
    }

    /// Puts a root together.
    ///
    /// # Errors
    /// `NoIds`; `NotFound` if there is no such template any more; `System`.
    pub(super) fn make(
        &self,
        root: &RootSpec,
        user: User,
        home: &OwnedFd,
    ) -> Result<Arc<PrivateRoot>> {
        let first = self.block_of(user).ok_or_else(no_ids)?;
        let template = self.templates.get(&root.template).ok_or_else(|| {
            let text = format!("there is no template {} any more", root.template);
            Error::new(Kind::System, text)
        })?;
        PrivateRoot::new(template.as_fd(), home.as_fd(), first, root)
    }
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
