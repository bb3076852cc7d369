//! What a watch is asked for and what it tells. Only types: no kernel, and no HTTP.

use nix::errno::Errno;

use crate::client::Disconnected;
use crate::error::{Error, Kind};
use crate::files::FileKind;
use crate::files::name::FilePath;
use crate::files::search::Matcher;

/// What of a tree is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    pub path: FilePath,
    /// Whether the directories in it are watched too.
    pub recursive: bool,
    /// What is left out, with all that is in it. Relative to the path.
    pub exclude: Matcher,
}

impl Settings {
    /// About how many bytes of memory they take, with the copy of the path that a reader has.
    pub fn size(&self) -> usize {
        2 * self.path.size() + self.exclude.size()
    }
}

/// What happened to a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreeChange {
    /// It is new, or came from outside of the tree.
    Created,
    /// Its content was written to.
    Modified,
    /// It is gone, or went out of the tree.
    Deleted,
    /// It had this path before. What had the new path before is gone.
    Moved(Vec<u8>),
    /// Its mode, owner or times changed.
    Attributes,
    /// Changes were lost: the tree has to be read again.
    Overflow,
}

/// A change in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeEvent {
    pub change: TreeChange,
    /// Relative to the directory that is watched.
    pub path: Vec<u8>,
    /// The type; of what is gone only whether it was a directory.
    pub kind: FileKind,
}

/// Why a watch is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The directory is not at its path any more.
    Deleted,
    /// Nobody deleted the directory: the watch itself was, or its workspace ends.
    Closed,
    /// A new directory cannot be watched: the kernel or the share has no watch left.
    NoWatches,
    /// The tenant holds its share of the server's memory.
    OverLimit,
    /// The kernel failed.
    Failed(Errno),
    /// Nobody wants events any more.
    Disconnected,
}

impl TreeEvent {
    pub fn overflow() -> Self {
        Self {
            change: TreeChange::Overflow,
            path: Vec::new(),
            kind: FileKind::Directory,
        }
    }
}

impl Ended {
    /// Whether changes are lost by it, because the watch should have gone on.
    pub fn is_loss(self) -> bool {
        matches!(self, Self::NoWatches | Self::OverLimit | Self::Failed(_))
    }
}

impl From<Disconnected> for Ended {
    fn from(_: Disconnected) -> Self {
        Self::Disconnected
    }
}

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        match error.kind() {
            Kind::OverLimit => Self::OverLimit,
            _ => Self::Failed(Errno::EIO),
        }
    }
}

/// Takes the events, and decides whether and when the watch goes on.
pub trait EventSink {
    /// Something changed.
    ///
    /// # Errors
    /// The watch is over.
    fn event(&mut self, event: TreeEvent) -> std::result::Result<(), Ended>;
    /// Asked between the steps of the work, each of which takes well below a millisecond: may pause.
    ///
    /// # Errors
    /// The watch is over.
    fn check(&mut self) -> std::result::Result<(), Ended>;
}

pub(super) type Outcome<T = ()> = std::result::Result<T, Ended>;
