//! Files in full, one by one and as whole trees of a bounded depth.

use std::path::Path;

use nix::unistd::{User as Account, geteuid};

use crate::confine::USER_NAME;
use crate::error::{Error, Kind, Result};
use crate::files::name::FilePath;
use crate::files::search::{Filter, Visit};
use crate::files::{Description, FileKind};
use crate::ledger::{Charge, Item};
use crate::sys::User;
use crate::workspace::lease::Workspace;

/// What a description takes in a list and in an answer that is made of it, besides its path.
const DESCRIPTION_BYTES: usize = 1024;

/// The files of a tree, each with its path relative to the tree.
pub struct Tree {
    /// Every directory comes before what is in it.
    pub entries: Vec<(Vec<u8>, Description)>,
    /// For the list, and the answer that is made of it.
    pub charge: Charge,
}

impl Workspace {
    /// Where the paths of its clients begin that are relative to a home: the home of a sandbox, or of the user that
    /// the server runs as.
    pub fn home(&self) -> &Path {
        self.confinement.home()
    }

    /// The user of its commands; `None` for the server's own.
    pub fn user(&self) -> Option<User> {
        self.confinement.user()
    }

    /// The name of that user.
    pub fn account(&self) -> String {
        let uid = geteuid();
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
    /// entered.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `Forbidden`; `OverLimit` if there is no memory for so many.
    pub fn describe_tree(&self, path: &FilePath, depth: usize, prefix: &str) -> Result<Tree> {
        let mut charge = self.ledger.charge(Item::Responses, 0)?;
        let mut entries = Vec::new();
        let files = self.files()?;
        let mut walk = files.walk(path, Filter::default(), None, &self.ledger)?;
        let mut is_deepest = false;
        loop {
            if is_deepest {
                walk.skip_contents();
            }
            let Some(visit) = walk.next()? else {
                return Ok(Tree { entries, charge });
            };
            let found = match visit {
                Visit::Entry(found) => found,
                Visit::Unreadable(b".", errno) => {
                    return Err(Error::system(format_args!("cannot list {path}"), errno));
                }
                // What is in it is not shown; the directory is.
                Visit::Unreadable(..) => {
                    is_deepest = false;
                    continue;
                }
            };
            let level = found.path.split(|byte| *byte == b'/').count();
            is_deepest = found.kind == FileKind::Directory && level >= depth;
            if let Some(description) = found.describe(prefix) {
                let attributes = description.attributes.iter();
                let attributes = attributes.map(|attribute| attribute.value.len());
                let bytes = DESCRIPTION_BYTES + 8 * found.path.len() + attributes.sum::<usize>();
                charge.set(charge.bytes() + bytes)?;
                entries.push((found.path.to_vec(), description));
            }
        }
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
