//! Files in full, one by one and as whole trees of a bounded depth.

use std::sync::Arc;

use nix::unistd::{User as Account, geteuid};

use crate::client::{Interrupt, Stopped};
use crate::confine::{Home, USER_NAME};
use crate::error::{Error, Kind, Result};
use crate::files::name::FilePath;
use crate::files::search::{Filter, Visit};
use crate::files::{Description, FileKind};
use crate::spec::account::Names;
use crate::sys::User;
use crate::workspace::lease::Workspace;

/// Names that are passed before the client is looked at.
const NAMES_BETWEEN_LOOKS: usize = 256;

impl Workspace {
    /// The home: where the paths of its clients begin that are relative to one. Without sandboxes it is that of the
    /// user that the server runs as.
    pub fn home(&self) -> &Home {
        self.confinement.home()
    }

    /// The user of its commands; `None` for the server's own.
    pub fn user(&self) -> Option<User> {
        self.confinement.user()
    }

    /// Whether it has a root of its own, where commands can be any account.
    pub fn has_own_root(&self) -> bool {
        self.confinement.has_own_root()
    }

    /// The names of the users and of the groups of its own root, by number; `None` if they are those of the machine.
    pub fn names(&self) -> Option<Arc<[Names; 2]>> {
        self.confinement.names()
    }

    /// The name of that user.
    pub fn account(&self) -> String {
        let uid = geteuid();
        if let Some(usual) = self.confinement.usual_account() {
            return usual.name;
        }
        match self.user() {
            Some(_) => USER_NAME.to_owned(),
            None => match Account::from_uid(uid) {
                Ok(Some(account)) => account.name,
                _ => uid.to_string(),
            },
        }
    }

    /// Whether the machine has an account by this name that is not that of the commands.
    pub fn has_account(&self, name: &str) -> bool {
        self.user().is_none()
            && Account::from_name(name)
                .is_ok_and(|account| account.is_some_and(|account| account.uid != geteuid()))
    }

    /// The variables of commands that do not change them.
    pub fn variables(&self) -> Vec<(String, String)> {
        self.confinement.variables()
    }

    /// Has watchers told that the attributes of a file changed, as after an upload that sets its owner.
    pub fn renew_owner(&self, path: &FilePath) {
        if let Ok(files) = self.files() {
            files.renew_owner(path);
        }
    }

    /// Whether commands that do not change their environment have this variable.
    pub fn has_variable(&self, name: &str) -> bool {
        self.confinement.has_variable(name)
    }

    /// Describes a file, with the attributes whose names begin with `prefix`.
    ///
    /// # Errors
    /// `NotFound`, or the path may not be searched.
    pub fn describe_file(&self, path: &FilePath, prefix: &str) -> Result<Description> {
        self.files()?.describe(path, prefix)
    }

    /// Describes what is in a directory, down to `depth` levels of which its own names are the first. Links are not
    /// entered, and every directory comes before what is in it. `take` gets each path, relative to the directory.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `Forbidden`; the client disconnected; those of `take`.
    pub fn describe_tree<E: From<Stopped>>(
        &self,
        path: &FilePath,
        depth: usize,
        prefix: &str,
        interrupt: &mut dyn Interrupt,
        mut take: impl FnMut(&[u8], &Description) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let failed = |error: Error| E::from(Stopped::Failed(error));
        let files = self.files().map_err(failed)?;
        let mut interrupt = self.paced(interrupt);
        let walk = files.walk(path, Filter::default(), None, &self.ledger);
        let mut walk = walk.map_err(failed)?;
        let (mut is_deepest, mut passed) = (false, 0_usize);
        loop {
            if std::mem::take(&mut is_deepest) {
                walk.skip_contents();
            }
            passed += 1;
            if passed.is_multiple_of(NAMES_BETWEEN_LOOKS) {
                interrupt.check()?;
            }
            let found = match walk.next().map_err(failed)? {
                None => return Ok(()),
                Some(Visit::Entry(found)) => found,
                Some(Visit::Passed) => {
                    interrupt.check()?;
                    continue;
                }
                Some(Visit::Unreadable(b".", errno)) => {
                    let error = Error::system(format_args!("cannot list {path}"), errno);
                    return Err(failed(error));
                }
                // What is in it is not shown; the directory is.
                Some(Visit::Unreadable(..)) => continue,
            };
            let level = found.path.split(|byte| *byte == b'/').count();
            is_deepest = found.kind == FileKind::Directory && level >= depth;
            if let Some(description) = found.describe(prefix) {
                take(found.path, &description)?;
            }
        }
    }

    /// Has root make what is missing of a directory's absolute path, for the user of this workspace. False if there is a
    /// directory, or there are no users to choose among.
    ///
    /// # Errors
    /// Those of [`Workspace::make_directory`], as they are for root.
    pub fn make_directory_by_root(&self, path: &FilePath) -> Result<bool> {
        let is_missing = || {
            self.stat_file(path)
                .is_err_and(|error| error.kind() == Kind::NotFound)
        };
        let Some((_, owner)) = self.root.account() else {
            return Ok(false);
        };
        if !path.bytes().starts_with(b"/") || !is_missing() {
            return Ok(false);
        }
        let root = self.share_as("root")?;
        root.files()?.make_directory_for(path, owner)?;
        self.check_open().map(|()| true)
    }

    /// Makes a directory and its parents.
    ///
    /// # Errors
    /// `Exists` if there is one; `NotDirectory` if something else is there; those of [`Workspace::make_directory`].
    pub fn make_new_directory(&self, path: &FilePath) -> Result<()> {
        match self.stat_file(path) {
            Ok(entry) if entry.kind == FileKind::Directory => Err(Error::new(
                Kind::Exists,
                format!("cannot make directory {path}: it exists"),
            )),
            Ok(_) => Err(Error::new(
                Kind::NotDirectory,
                format!("cannot make directory {path}: something else is there"),
            )),
            Err(error) if error.kind() == Kind::NotFound => self.make_directory(path, None),
            Err(error) => Err(error),
        }
    }
}
