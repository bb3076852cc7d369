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
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::fstat;

use super::entry::{FileKind, FileVersion};
use super::hash::{Digest, FileHash};
use super::name::FilePath;
use super::name_at::{NameAt, key};
use super::read::Opened;
use super::root::Root;
use crate::client::{Interrupt, LOOK_EVERY, Stopped};
use crate::codec::sort::sort;
use crate::error::{Detail, Error, Kind};
use crate::threads::lock::{Condvar, Mutex, lock};

/// What must hold for a file to be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
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
    /// `Changed` if others take too long; or it was interrupted.
    pub fn turn(&self, paths: &[FilePath], interrupt: &mut dyn Interrupt) -> Result<Turn, Stopped> {
        let keys = paths.iter().map(|path| self.key(path)).collect();
        let named = || paths.first().map(FilePath::to_string).unwrap_or_default();
        let turn = Turn::take(keys, interrupt)?;
        Ok(turn.ok_or_else(|| changed(named(), BUSY))?)
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
            Condition::Absent => match self.status(path, AtFlags::empty()) {
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

/// The turns of all workspaces: whoever holds the lock looks at one key, however many a request has.
static TURNS: LazyLock<Mutex<Turns>> = LazyLock::new(Mutex::default);
static NEXT: Condvar = Condvar::new();

#[derive(Default)]
struct Turns {
    /// The keys of files that are replaced.
    held: HashSet<Vec<u8>>,
    /// Those of them that others wait for: the end of another turn wakes nobody.
    awaited: HashSet<Vec<u8>>,
}

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
        match Self::take(vec![key], &mut Patient) {
            Ok(Some(turn)) => Ok(turn),
            Ok(None) | Err(_) => Err(changed(shown, BUSY)),
        }
    }

    /// Waits for the turn; `None` if others take too long.
    fn take(
        mut keys: Vec<Vec<u8>>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Option<Self>, Stopped> {
        let deadline = Instant::now() + TURN_LIMIT;
        // Requests for the same files meet at the first of them, and each key is there once.
        sort(&mut keys);
        keys.dedup();
        loop {
            let mut turn = Self(Vec::with_capacity(keys.len()));
            for key in &keys {
                if !lock(&TURNS).held.insert(key.clone()) {
                    break;
                }
                turn.0.push(key.clone());
            }
            let Some(busy) = keys.get(turn.0.len()) else {
                return Ok(Some(turn));
            };
            // Whoever waits holds nothing, so that no two wait for each other.
            drop(turn);
            let mut is_free = false;
            while !is_free {
                is_free = wait_for(busy);
                interrupt.check()?;
                if Instant::now() >= deadline {
                    return Ok(None);
                }
            }
        }
    }
}

/// Waits until nobody holds the turn of a key. False if somebody still does after a while.
fn wait_for(key: &[u8]) -> bool {
    let is_held = |turns: &mut Turns| {
        let is_held = turns.held.contains(key);
        if is_held && !turns.awaited.contains(key) {
            turns.awaited.insert(key.to_vec());
        }
        is_held
    };
    NEXT.wait_while_for(lock(&TURNS), LOOK_EVERY, is_held).1
}

/// Work that nothing interrupts.
pub struct Patient;

impl Interrupt for Patient {
    fn check(&mut self) -> Result<(), Stopped> {
        Ok(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut is_awaited = false;
        for key in &self.0 {
            let mut turns = lock(&TURNS);
            turns.held.remove(key);
            is_awaited |= turns.awaited.remove(key);
        }
        if is_awaited {
            NEXT.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::super::hash::Hasher;
    use super::*;

    fn keys(test: &str, numbers: &[usize]) -> Vec<Vec<u8>> {
        let numbers = numbers.iter();
        numbers
            .map(|number| format!("{test} {number}").into_bytes())
            .collect()
    }

    /// A client that leaves.
    struct Leaves;

    impl Interrupt for Leaves {
        fn check(&mut self) -> Result<(), Stopped> {
            Err(Stopped::Disconnected)
        }
    }

    /// Puts another file in the place of one that is being hashed.
    struct Replaces(PathBuf);

    impl Interrupt for Replaces {
        fn check(&mut self) -> Result<(), Stopped> {
            let other = self.0.with_extension("other");
            fs::write(&other, "other").unwrap();
            fs::rename(other, &self.0).unwrap();
            Ok(())
        }
    }

    #[test]
    fn a_file_that_is_replaced_while_it_is_checked_again_stays() {
        let directory = std::env::temp_dir().join(format!("sbx-condition-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let root = Root::machine(&directory).unwrap();
        let place = directory.join("file");
        let mut hasher = Hasher::default();
        hasher.feed(b"known");
        let known = hasher.finish();
        let commit = |interrupt: &mut dyn Interrupt| {
            fs::write(&place, "known").unwrap();
            let files = root.files().unwrap();
            let upload = files.upload(&FilePath::new(b"file").unwrap(), None, false);
            let upload = upload.unwrap();
            let version = upload.check_again(known, interrupt)?;
            Ok::<_, Stopped>(upload.commit_if(Condition::Content(known), version.as_ref())?)
        };
        match commit(&mut Replaces(place.clone())) {
            Err(Stopped::Failed(error)) => assert_eq!(error.kind(), Kind::Changed),
            _ => panic!("the other file is gone"),
        }
        assert_eq!(fs::read(&place).unwrap(), b"other");
        assert!(commit(&mut Patient).is_ok());
        assert_eq!(fs::read(&place).unwrap(), b"");
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn whoever_waits_for_a_turn_holds_none_and_may_leave() {
        let [first, second, both] =
            [&[1][..], &[2], &[1, 2, 1]].map(|numbers| keys("leaves", numbers));
        let taken = |keys: &[Vec<u8>]| Turn::take(keys.to_vec(), &mut Leaves);
        let turn = taken(&second).unwrap();
        assert!(turn.is_some());
        assert!(matches!(taken(&both), Err(Stopped::Disconnected)));
        assert!(lock(&TURNS).awaited.contains(&second[0]));
        // What it could have had is free.
        let other = taken(&first).unwrap();
        assert!(!lock(&TURNS).awaited.contains(&first[0]));
        drop((turn, other));
        let turn = taken(&both).unwrap();
        for key in [&first[0], &second[0]] {
            let turns = lock(&TURNS);
            assert!(turns.held.contains(key) && !turns.awaited.contains(key));
        }
        drop(turn);
        assert!(!lock(&TURNS).held.contains(&first[0]));
    }

    #[test]
    fn requests_for_some_of_the_same_files_follow_each_other() {
        let holders: Vec<_> = (0..5).map(|_| AtomicUsize::new(0)).collect();
        thread::scope(|scope| {
            for worker in 0..6 {
                let holders = &holders;
                scope.spawn(move || {
                    for round in 0..200 {
                        // In any order.
                        let files = [0, 2, 3].map(|step| (worker * (step + 1) + round + step) % 5);
                        let turn = Turn::take(keys("follow", &files), &mut Patient).unwrap();
                        let turn = turn.unwrap();
                        for (place, file) in files.iter().enumerate() {
                            let is_again = files[..place].contains(file);
                            let before = holders[*file].fetch_add(1, Ordering::SeqCst);
                            assert!(is_again || before == 0, "two hold {file}");
                        }
                        thread::yield_now();
                        for file in files {
                            holders[file].fetch_sub(1, Ordering::SeqCst);
                        }
                        drop(turn);
                    }
                });
            }
        });
    }
}
