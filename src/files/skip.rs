//! What an operation on many files leaves out, and why: one list of reasons for all of them.

use nix::errno::Errno;

use super::name::show;

/// Most files that are named.
pub(super) const MAX_SKIPPED_NAMES: usize = 100;

/// Most bytes of a path that are shown of what was left out.
const SHOWN_BYTES: usize = 4096;

/// What was left out.
#[derive(Debug, Default, Clone)]
pub struct SkipList {
    /// The first of it, and why.
    pub first: Vec<(String, SkipReason)>,
    /// How much there is.
    pub total: u64,
}

impl SkipList {
    /// Adds what has a name.
    pub fn add(&mut self, name: &[u8], reason: SkipReason) {
        if self.first.len() < MAX_SKIPPED_NAMES {
            self.first.push((end_of(show(name)), reason));
        }
        self.total += 1;
    }
}

/// The end of a path, which says what it leads to, after `…` if that is not all of it.
pub fn end_of(shown: String) -> String {
    let cut = shown.len().saturating_sub(SHOWN_BYTES);
    if cut == 0 {
        return shown;
    }
    let rest = (cut..).find_map(|at| shown.get(at..));
    ["…", rest.unwrap_or_default()].concat()
}

/// Why something was left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipReason {
    Fifo,
    Socket,
    Device,
    /// A type that archives have and files do not.
    Unknown,
    /// Something has its name already.
    Exists,
    /// It may not be read.
    Permission,
    /// Reading it failed.
    Io,
    /// It is on another mount.
    OtherMount,
    /// It is the copy that is being made.
    Itself,
    /// It is no text.
    Binary,
    /// It is larger than the limit.
    TooLarge,
}

impl SkipReason {
    /// Why what cannot be read is left out.
    pub fn of(errno: Errno) -> Self {
        match errno {
            Errno::EACCES | Errno::EPERM => Self::Permission,
            Errno::EXDEV => Self::OtherMount,
            _ => Self::Io,
        }
    }

    /// The word for clients.
    pub fn word(self) -> &'static str {
        match self {
            Self::Fifo => "fifo",
            Self::Socket => "socket",
            Self::Device => "device",
            Self::Unknown => "unknown",
            Self::Exists => "exists",
            Self::Permission => "permission",
            Self::Io => "io",
            Self::OtherMount => "other_mount",
            Self::Itself => "itself",
            Self::Binary => "binary",
            Self::TooLarge => "too_large",
        }
    }
}
