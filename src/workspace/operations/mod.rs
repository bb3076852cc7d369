//! Every operation on a workspace, typed in and typed out: the policy that all doors share.
//!
//! Defaults, limits and the rules that join several mechanisms are here; a door only translates its
//! wire into these types and the results back. May use the mechanisms (`process`, `files`, `ports`);
//! must not use HTTP or JSON, so errors carry kinds and no statuses.

mod archives;
mod compare;
#[cfg(feature = "interpreter")]
mod contexts;
mod edit;
mod entries;
mod files;
mod grep;
mod hash;
mod patch;
mod ports;
mod processes;
mod search;
mod terminals;
mod trees;
mod venv;
mod watch;

pub use archives::{Archive, MAX_ARCHIVE_FILES};
pub use compare::{ClientFile, Compared, FileState};
pub use edit::{EditRequest, Edited};
pub use files::{FilePart, FileWrite};
pub use grep::{Grep, GrepSink, Match, Summary};
pub use patch::{FileChange, Patched};
pub use processes::SignalGroup;
pub use search::{Glob, Globbed, Kinds, SortKey, SortOrder};
pub use terminals::{AttachSpec, Attachment, ViewerEvent};
pub use venv::Venv;
