//! The ignore files of the directories on the way to a path.

use std::io::Read;
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, fstat};

use super::matcher::{Matcher, Verdict};
use crate::error::Result;
use crate::files::entry::FileKind;
use crate::ledger::Charge;

/// What is read of one ignore file. Real ones have a few kilobytes.
const MAX_FILE_BYTES: u64 = 256 * 1024;

/// What compiling takes for each byte of a file, at most.
const BYTES_PER_BYTE: usize = 64;

/// The rules that hold in a directory, innermost last.
pub(super) struct Ignores {
    rules: Vec<Rules>,
    bytes: usize,
    charge: Charge,
}

/// The patterns of one file.
struct Rules {
    /// How many directories deep its directory is.
    depth: usize,
    /// Length of the path of its directory, with the slash after it.
    base: usize,
    matcher: Matcher,
}

impl Ignores {
    pub(super) fn new(charge: Charge) -> Self {
        Self {
            rules: Vec::new(),
            bytes: 0,
            charge,
        }
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
        let Ok(content) = read(directory, name) else {
            return Ok(());
        };
        self.charge
            .set(self.bytes + content.len() * BYTES_PER_BYTE)?;
        let matcher = Matcher::of_file(&content);
        drop(content);
        self.bytes += matcher.size() + size_of::<Rules>();
        self.charge.set(self.bytes)?;
        if !matcher.is_empty() {
            self.rules.push(Rules {
                depth,
                base,
                matcher,
            });
        }
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

    /// Whether a path is excluded. The innermost rules that say something about it decide.
    pub(super) fn exclude(&self, path: &[u8], is_directory: bool) -> bool {
        let verdict = self.rules.iter().rev().find_map(|rules| {
            let inside = path.get(rules.base..)?;
            rules.matcher.decide(inside, is_directory)
        });
        verdict == Some(Verdict::Matched)
    }
}

fn read(directory: impl AsFd, name: &str) -> std::io::Result<Vec<u8>> {
    let careful = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let file = openat(directory, name, OFlag::O_RDONLY | careful, Mode::empty())?;
    if FileKind::of(&fstat(&file)?) != FileKind::Regular {
        return Err(Errno::EINVAL.into());
    }
    let mut content = Vec::new();
    std::fs::File::from(file)
        .take(MAX_FILE_BYTES)
        .read_to_end(&mut content)?;
    Ok(content)
}
