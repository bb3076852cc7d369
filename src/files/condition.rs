//! Conditions of a write, and turns of the writers of one file.
//!
//! A condition is checked twice: before the body is read, so that a refusal costs nothing, and when the file
//! is replaced. Between that check and the rename no write, edit, patch, move, copy or member of an archive
//! replaces the file, because each takes a [`Turn`] when it replaces one; a file that takes a free name needs
//! none. Deletions, writes to ranges, directories that are moved or exchanged as a whole, and programs are
//! not kept out.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::LazyLock;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::fstat;

use super::entry::{FileKind, FileVersion};
use super::hash::{Digest, FileHash};
use super::name::FilePath;
use super::name_at::{NameAt, key};
use super::read::Opened;
use super::root::Root;
use crate::client::{Interrupt, Stopped};
use crate::error::{Detail, Error, Kind};
use crate::sync::{Condvar, Mutex, lock};

/// What must hold for a file to be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// Nothing.
    Always,
    /// There is no file.
    Absent,
    /// The file has the content with this hash.
    Content(Digest),
}

/// Bytes that are hashed at a time.
const HASHED_BYTES: usize = 64 * 1024;

impl Root {
    /// Waits until no other request replaces one of these files.
    ///
    /// # Errors
    /// `Changed` if others take too long.
    pub fn turn(&self, paths: &[FilePath]) -> Result<Turn, Error> {
        let keys = paths.iter().map(|path| self.key(path)).collect();
        let named = || paths.first().map(FilePath::to_string).unwrap_or_default();
        Turn::take(keys).ok_or_else(|| changed(named(), BUSY))
    }

    /// Checks a condition before anything is changed.
    ///
    /// # Errors
    /// `Exists`; `Changed`; as [`Root::open`]; or the client disconnected.
    pub fn check(
        &self,
        path: &FilePath,
        condition: Condition,
        interrupt: &mut dyn Interrupt,
    ) -> Result<(), Stopped> {
        match condition {
            Condition::Always => Ok(()),
            Condition::Absent => match self.status(path.bytes(), AtFlags::empty()) {
                Err(Errno::ENOENT) => Ok(()),
                Ok(_) => Err(exists(path).into()),
                Err(errno) => Err(self
                    .error(format_args!("cannot write {path}"), errno)
                    .into()),
            },
            Condition::Content(expected) => match self.open(path, false) {
                Ok(opened) => check_content(path, opened, expected, interrupt),
                Err(error) if error.kind() == Kind::NotFound => Err(gone(path).into()),
                Err(error) => Err(error.into()),
            },
        }
    }
}

/// Checks again, when the whole body is there, that the file has the content. Returns the version that has.
/// It takes as long as the file is large, so it needs no turn; the version is compared in one.
pub(super) fn check_again(
    path: &str,
    target: &NameAt,
    expected: Digest,
    interrupt: &mut dyn Interrupt,
) -> Result<FileVersion, Stopped> {
    let failed = |errno| unreadable(path, errno);
    let file = target.open(OFlag::O_RDONLY).map_err(failed)?;
    let status = fstat(&file).map_err(failed)?;
    if FileKind::of(&status) != FileKind::Regular {
        return Err(changed(path, "it is no regular file any more").into());
    }
    let opened = Opened {
        file,
        kind: FileKind::Regular,
        size: super::entry::size(&status),
        mode: status.st_mode & 0o7777,
    };
    check_content(path, opened, expected, interrupt)?;
    Ok(FileVersion::of_status(&status))
}

/// Checks in a turn, right before the file is replaced, that it is still this version.
pub(super) fn check_version(
    path: &str,
    target: &NameAt,
    expected: &FileVersion,
) -> Result<(), Error> {
    let now = target.status().map_err(|errno| unreadable(path, errno))?;
    if FileVersion::of_status(&now) == *expected {
        return Ok(());
    }
    Err(changed(path, "it was changed meanwhile"))
}

fn unreadable(path: &str, errno: Errno) -> Error {
    match errno {
        Errno::ENOENT => gone(path),
        errno => Error::system(format_args!("cannot read {path}"), errno),
    }
}

fn check_content(
    path: impl std::fmt::Display,
    opened: Opened,
    expected: Digest,
    interrupt: &mut dyn Interrupt,
) -> Result<(), Stopped> {
    let mut hash = FileHash::new(opened);
    let mut buffer = vec![0; HASHED_BYTES];
    let found = loop {
        interrupt.check()?;
        if let Some(found) = hash.step(&path, &mut buffer)? {
            break found.sha256;
        }
    };
    if found == expected {
        return Ok(());
    }
    let error = changed(path, "it has another content than if_sha256 says");
    Err(error.with("sha256", Detail::Text(found.to_string())).into())
}

pub(super) fn exists(path: impl std::fmt::Display) -> Error {
    Error::new(Kind::Exists, format!("cannot write {path}: it exists"))
}

fn gone(path: impl std::fmt::Display) -> Error {
    changed(path, "it does not exist")
}

/// Why a request gives up its wait.
const BUSY: &str = "other requests are replacing it; try again";

pub(super) fn changed(path: impl std::fmt::Display, why: &str) -> Error {
    Error::new(Kind::Changed, format!("cannot write {path}: {why}"))
}

static REPLACED: LazyLock<Mutex<HashSet<Vec<u8>>>> = LazyLock::new(Mutex::default);
static NEXT: Condvar = Condvar::new();

/// How long a request waits for its turn. To copy over a large file that cannot be replaced takes longer.
const TURN_LIMIT: Duration = Duration::from_secs(10);

/// The only request that replaces some files at the moment, each named by its [key]. A request
/// that replaces a file by something made from it holds the turn from the reading on, so that it does not
/// undo what another one wrote in between. Others hold it for the time of a rename. Other files do not wait.
pub struct Turn(Vec<Vec<u8>>);

impl Turn {
    /// Waits until no other request replaces the file of a name, which is `shown` in errors. Whoever holds a
    /// turn must not take another.
    ///
    /// # Errors
    /// `Changed` if others take too long.
    pub(super) fn at(
        directory: &OwnedFd,
        name: &[u8],
        shown: impl std::fmt::Display,
    ) -> Result<Self, Error> {
        let key = key(directory, name).map_err(|errno| {
            let act = format_args!("cannot write {shown}");
            Error::system(act, errno)
        })?;
        Self::take(vec![key]).ok_or_else(|| changed(shown, BUSY))
    }

    /// Waits for the turn; `None` if others take too long.
    fn take(keys: Vec<Vec<u8>>) -> Option<Self> {
        let replaced = lock(&REPLACED);
        let (mut replaced, is_free) = NEXT.wait_while_for(replaced, TURN_LIMIT, |replaced| {
            keys.iter().any(|key| replaced.contains(key))
        });
        if !is_free {
            return None;
        }
        replaced.extend(keys.iter().cloned());
        Some(Self(keys))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut replaced = lock(&REPLACED);
        for key in &self.0 {
            replaced.remove(key);
        }
        drop(replaced);
        NEXT.notify_all();
    }
}
