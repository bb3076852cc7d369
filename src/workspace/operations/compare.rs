//! Comparing the files of a client with those of a tree, so that only what differs is sent again.

use std::sync::Arc;

use crate::client::{Interrupt, Stopped};
use crate::codec::sort::sort_by;
use crate::error::{Error, Kind, Result};
use crate::files::hash::{Digest, FileHash};
use crate::files::name::FilePath;
use crate::files::search::{Filter, Visit};
use crate::files::{FileKind, SkipList, SkipReason, modified_ms};
use crate::limits::ledger::{Charge, Item};
use crate::threads::priority::run_in_background;
use crate::workspace::lease::{Lease, Workspace};

/// Bytes that are hashed in one step, and the least for a tenant that holds its share of the server's memory.
const STEP_BYTES: usize = 256 * 1024;
const LEAST_STEP_BYTES: usize = 8 * 1024;

/// What a file takes besides four times its path.
const FILE_BYTES: usize = 256;

/// Names that are passed before the client is looked at.
const NAMES_BETWEEN_LOOKS: u64 = 256;

/// A file that the client has. What is `None` is not compared.
pub struct ClientFile {
    /// Relative to the tree.
    pub path: FilePath,
    /// Bytes.
    pub size: u64,
    /// Milliseconds since 1970, rounded down.
    pub modified_ms: Option<i64>,
    /// The SHA-256 of its content.
    pub sha256: Option<Digest>,
    /// What is known of it.
    pub state: FileState,
}

/// How a client's file compares with the one in the tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FileState {
    /// There is none, or none that a walk through the tree finds.
    #[default]
    Missing,
    /// It is another one, no regular file, or cannot be read.
    Different,
    /// Only its content is still to be compared.
    Unhashed,
    /// All that the client told is the same.
    Same,
}

/// A comparison in progress: everything but the content is compared.
pub struct CompareFiles {
    lease: Lease,
    tree: FilePath,
    files: Vec<ClientFile>,
    extra: u64,
    skipped: SkipList,
    /// How many of the files are done.
    done: usize,
    /// The file that is hashed now.
    current: Option<FileHash>,
    _charge: Charge,
}

pub struct Compared<'c> {
    /// The client's files, sorted by path.
    pub files: &'c [ClientFile],
    /// Files and links of the tree that the client did not name.
    pub extra: u64,
    /// What of the tree could not be read, so that files in it count as missing.
    pub skipped: &'c SkipList,
}

impl Workspace {
    /// Begins to compare files with those of the directory `tree`. Links are not followed.
    ///
    /// # Errors
    /// A path is absolute, has a `..` or is there twice; `NotFound`, `NotDirectory`, `Forbidden`,
    /// `OverLimit`, `NoThreads`; or the client disconnected.
    pub fn compare_files(
        &self,
        tree: FilePath,
        mut files: Vec<ClientFile>,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<CompareFiles, Stopped> {
        let bytes = files
            .iter()
            .map(|file| 4 * file.path.bytes().len() + FILE_BYTES);
        let charge = self
            .ledger
            .charge(Item::Responses, bytes.sum())
            .map_err(Error::from)?;
        let mut walked = Ok((0, SkipList::default()));
        run_in_background(&self.background, interrupt, &mut |interrupt| {
            walked = self.compare_tree(&tree, &mut files, interrupt);
        })?;
        let (extra, skipped) = walked?;
        Ok(CompareFiles {
            lease: self.share()?,
            tree,
            files,
            extra,
            skipped,
            done: 0,
            current: None,
            _charge: charge,
        })
    }

    /// Compares all but the content. Returns how many files and links the client did not name, and what of
    /// the tree cannot be read.
    fn compare_tree(
        &self,
        tree: &FilePath,
        files: &mut [ClientFile],
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<(u64, SkipList), Stopped> {
        {
            // Paths of many megabytes may be much alike.
            let _own = self.background.alone.take(interrupt)?;
            check_paths(files)?;
        }
        let mut extra = 0;
        let mut skipped = SkipList::default();
        let mut passed = 0_u64;
        let root = self.files()?;
        let mut walk = root.walk(tree, Filter::default(), None, &self.ledger)?;
        while let Some(visit) = walk.next()? {
            passed += 1;
            if passed.is_multiple_of(NAMES_BETWEEN_LOOKS) {
                interrupt.check()?;
            }
            let found = match visit {
                Visit::Entry(found) => found,
                Visit::Passed => {
                    interrupt.check()?;
                    continue;
                }
                Visit::Unreadable(path, errno) => {
                    skipped.add(path, SkipReason::of(errno));
                    continue;
                }
            };
            let place = files.binary_search_by(|file| parts(&file.path).cmp(plain(found.path)));
            let Ok(place) = place else {
                extra += u64::from(found.kind != FileKind::Directory);
                continue;
            };
            let file = &mut files[place];
            let Ok(status) = found.status() else {
                continue;
            };
            let is_same = FileKind::of(&status) == FileKind::Regular
                && u64::try_from(status.st_size) == Ok(file.size)
                && file
                    .modified_ms
                    .is_none_or(|time| time == modified_ms(&status));
            file.state = match (is_same, file.sha256) {
                (false, _) => FileState::Different,
                (true, Some(_)) => FileState::Unhashed,
                (true, None) => FileState::Same,
            };
        }
        Ok((extra, skipped))
    }
}

impl CompareFiles {
    /// Compares the contents, and returns what was found.
    ///
    /// # Errors
    /// It was interrupted; `NoThreads`.
    pub fn run(
        &mut self,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Compared<'_>, Stopped> {
        let is_unhashed = |file: &ClientFile| file.state == FileState::Unhashed;
        if self.files.iter().any(is_unhashed) {
            let mut hashed = Ok(());
            let background = Arc::clone(&self.lease.background);
            run_in_background(&background, interrupt, &mut |interrupt| {
                hashed = self.compare_contents(interrupt);
            })?;
            hashed?;
        }
        Ok(Compared {
            files: &self.files,
            extra: self.extra,
            skipped: &self.skipped,
        })
    }

    fn compare_contents(
        &mut self,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<(), Stopped> {
        let ledger = &self.lease.ledger;
        let charge = ledger.charge_up_to(Item::Responses, STEP_BYTES, LEAST_STEP_BYTES);
        let mut buffer = vec![0; charge.bytes()];
        while let Some(file) = self.files.get_mut(self.done) {
            if file.state != FileState::Unhashed {
                self.done += 1;
                continue;
            }
            interrupt.check()?;
            let mut step = || {
                if self.current.is_none() {
                    let path = self.tree.child(file.path.bytes())?;
                    let opened = self.lease.files()?.open(&path, false)?;
                    self.current = Some(FileHash::new(opened));
                }
                let hash = self
                    .current
                    .as_mut()
                    .map(|hash| hash.step(&file.path, &mut buffer));
                hash.unwrap_or(Ok(None))
            };
            file.state = match step() {
                Ok(None) => continue,
                Ok(Some(found)) if (found.size, Some(found.sha256)) == (file.size, file.sha256) => {
                    FileState::Same
                }
                Err(error) if error.kind() == Kind::NotFound => FileState::Missing,
                Ok(Some(_)) | Err(_) => FileState::Different,
            };
            self.current = None;
        }
        Ok(())
    }
}

/// Sorts the files as a walk does, and checks that each path leads into the tree and is there once.
fn check_paths(files: &mut [ClientFile]) -> Result<()> {
    sort_by(files, |one, other| parts(&one.path).cmp(parts(&other.path)));
    let mut last = None;
    for ClientFile { path, .. } in files {
        let is_inside = !path.bytes().starts_with(b"/")
            && parts(path).next().is_some()
            && parts(path).all(|part| part != b"..");
        if !is_inside {
            let text = format!("{path}: not a path of a file in the tree");
            return Err(Error::invalid(text));
        }
        if last.is_some_and(|last| parts(last).eq(parts(path))) {
            return Err(Error::invalid(format_args!("{path}: named twice")));
        }
        last = Some(&*path);
    }
    Ok(())
}

/// The names that a path has.
fn parts(path: &FilePath) -> impl Iterator<Item = &[u8]> {
    plain(path.bytes()).filter(|part| !part.is_empty() && *part != b".")
}

fn plain(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/')
}
