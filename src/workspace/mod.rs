//! The objects that a request acts on: files under a root, commands under a confinement, processes
//! in a registry, servers behind ports.
//!
//! A door takes a [`Lease`] and calls the [operations]; it need not know what kind of workspace it
//! has, because kinds differ only in root, confinement and ports. A lease counts as activity while it
//! lives, so no workspace is ended for idleness during a request, a stream or a transfer. May use the
//! mechanisms; must not use HTTP, JSON or the doors.

mod content;
mod lease;
mod operations;
mod upload;
mod view;
mod watches;

pub use content::{Content, Span};
pub use lease::{Lease, Needs, Workspace};
pub use operations::{
    Archive, AttachSpec, Attachment, ClientFile, Compared, EditRequest, Edited, FileChange,
    FilePart, FileState, FileWrite, Glob, Globbed, Grep, GrepSink, Kinds, MAX_ARCHIVE_FILES, Match,
    Patched, SignalGroup, SortKey, SortOrder, Summary, Venv, ViewerEvent,
};
pub use upload::{GunzipSource, MemorySource, UploadReader, UploadSource};
pub use view::{CommandView, below};
pub use watches::{Lasting, WatchSubscriber};
