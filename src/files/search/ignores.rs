//! The ignore files of the directories on the way to a path, from that of its git repository on.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{Mode, fstat};

use super::matcher::{Matcher, Verdict};
use crate::error::Result;
use crate::files::entry::{DIRECTORY, FileKind, open_found};
use crate::files::root::Root;
use crate::limits::ledger::Charge;
use crate::sys::paths::{fstatat, openat};

/// What is read of one ignore file. Real ones have a few kilobytes.
const MAX_FILE_BYTES: u64 = 256 * 1024;

/// Most states that all patterns which hold in a directory have together. A name is compared with all of them at once, and
/// nothing else comes in between: for the longest path that takes a fifth of a second. Real files have hundreds.
const MAX_STATES: usize = 16 * 1024;

/// Most bytes that are read of the files above the first directory, which nobody can interrupt.
const MAX_ABOVE_BYTES: usize = 1 << 20;

/// The work of reading and compiling a byte, in steps of a pattern by a byte.
const BYTE_WORK: usize = 16;

/// What compiling takes for each byte of a file, at most.
const BYTES_PER_BYTE: usize = 64;

/// The rules that hold in a directory, innermost last.
pub(super) struct Ignores {
    rules: Vec<Rules>,
    /// The path that is looked at, from the repository on.
    path: Vec<u8>,
    /// Length of the path from there to the first directory, with the slash after it.
    above: usize,
    bytes: usize,
    charge: Charge,
    /// Bytes of files that were read since somebody asked.
    read: usize,
}

/// The patterns of one file.
struct Rules {
    /// How many directories deep its directory is.
    depth: usize,
    /// Length of the path of its directory from the repository on, with the slash after it.
    base: usize,
    matcher: Matcher,
}

impl Ignores {
    pub(super) fn new(charge: Charge) -> Self {
        Self {
            rules: Vec::new(),
            path: Vec::new(),
            above: 0,
            bytes: 0,
            charge,
            read: 0,
        }
    }

    /// The work of the files that were read since this was asked last.
    pub(super) fn take_work(&mut self) -> usize {
        std::mem::take(&mut self.read) * BYTE_WORK
    }

    /// The work of comparing a name with the rules, whose path has this length.
    pub(super) fn work_of(&self, path: usize) -> usize {
        self.states() * (self.above + path)
    }

    /// Adds the rules of the directories above the first one, up to that of its git repository. If it is in
    /// none beneath the root, there are no such rules.
    ///
    /// # Errors
    /// `OverLimit`.
    pub(super) fn enter_above(
        &mut self,
        root: &Root,
        first: &OwnedFd,
        names: &[&str],
    ) -> Result<()> {
        let path = root.path_of(first).unwrap_or_default();
        if path.is_empty() || has_git(first) {
            return Ok(());
        }
        let mut top = None;
        descend(root, first, &path, |directory, base| {
            if has_git(directory) {
                top = Some(base);
            }
            Ok(())
        })?;
        let Some(top) = top else {
            return Ok(());
        };
        self.path = [&path[top..], b"/"].concat();
        self.above = self.path.len();
        descend(root, first, &path, |directory, base| {
            if base < top || self.read >= MAX_ABOVE_BYTES || self.states() >= MAX_STATES {
                return Ok(());
            }
            names
                .iter()
                .try_for_each(|name| self.add(directory, name, 0, base - top))
        })
    }

    /// Adds the rules of a file in a directory. A file that cannot be read, and a link, has none.
    ///
    /// # Errors
    /// `OverLimit`.
    pub(super) fn enter(
        &mut self,
        directory: impl AsFd,
        name: &str,
        depth: usize,
        base: usize,
    ) -> Result<()> {
        self.add(directory, name, depth, self.above + base)
    }

    fn add(&mut self, directory: impl AsFd, name: &str, depth: usize, base: usize) -> Result<()> {
        let left = MAX_STATES.saturating_sub(self.states());
        if left == 0 {
            return Ok(());
        }
        let Ok(content) = read(directory, name) else {
            return Ok(());
        };
        self.read += content.len();
        self.charge
            .set(self.bytes + content.len() * BYTES_PER_BYTE)?;
        let matcher = Matcher::of_file(&content, left);
        drop(content);
        if !matcher.is_empty() {
            self.bytes += matcher.size() + size_of::<Rules>();
            self.rules.push(Rules {
                depth,
                base,
                matcher,
            });
        }
        self.charge.set(self.bytes)?;
        Ok(())
    }

    /// Drops the rules of directories that are at least `depth` deep.
    pub(super) fn leave(&mut self, depth: usize) {
        while let Some(last) = self.rules.pop_if(|last| last.depth >= depth) {
            self.bytes = self
                .bytes
                .saturating_sub(last.matcher.size() + size_of::<Rules>());
        }
    }

    /// How many states the rules go through for each byte of a path.
    pub(super) fn states(&self) -> usize {
        self.rules.iter().map(|rules| rules.matcher.states()).sum()
    }

    /// Whether a path is excluded. The innermost rules that say something about it decide.
    pub(super) fn exclude(&mut self, path: &[u8], is_directory: bool) -> bool {
        if self.rules.is_empty() {
            return false;
        }
        self.path.truncate(self.above);
        self.path.extend_from_slice(path);
        let path = &self.path;
        let verdict = self.rules.iter().rev().find_map(|rules| {
            let inside = path.get(rules.base..)?;
            rules.matcher.decide(inside, is_directory)
        });
        verdict == Some(Verdict::Matched)
    }
}

fn has_git(directory: &OwnedFd) -> bool {
    fstatat(directory, ".git", AtFlags::AT_SYMLINK_NOFOLLOW).is_ok()
}

/// Passes the directories above one to a function, the highest first, each with the length of its path and the slash after
/// it. Opens one name at a time, because there may be thousands of them. Ends early if the tree is changed.
fn descend(
    root: &Root,
    first: &OwnedFd,
    path: &[u8],
    mut visit: impl FnMut(&OwnedFd, usize) -> Result<()>,
) -> Result<()> {
    let start = root.start(root.tree_of(first));
    let mut opened = start.and_then(|start| root.resolve_in(&start, b"/", DIRECTORY));
    let mut base = 1;
    while let Ok(directory) = &opened {
        visit(directory, base)?;
        let Some(length) = memchr::memchr(b'/', &path[base..]) else {
            break;
        };
        let next = root.open_name(directory, &path[base..base + length], DIRECTORY);
        opened = next;
        base += length + 1;
    }
    Ok(())
}

fn read(directory: impl AsFd, name: &str) -> std::io::Result<Vec<u8>> {
    let find = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let found = openat(&directory, name, find, Mode::empty())?;
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let careful = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let again = || openat(&directory, name, careful, Mode::empty());
    let file = open_found(&found, flags, again)?;
    if FileKind::of(&fstat(&file)?) != FileKind::Regular {
        return Err(Errno::EINVAL.into());
    }
    let mut content = Vec::new();
    std::fs::File::from(file)
        .take(MAX_FILE_BYTES)
        .read_to_end(&mut content)?;
    Ok(content)
}
