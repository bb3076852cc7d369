//! The files of a workspace, beneath one root.
//!
//! [`Root`] resolves every path. An operation gets a descriptor from it, or a directory and one last
//! name in it ([`name_at`]), and acts on that: what was checked is what is acted on, whatever happens
//! to the path meanwhile. Operations run through [`Files`], which makes the calling thread act as the
//! owner of the files.
//!
//! Nothing here knows HTTP. Errors carry kinds, and their texts the path as the client wrote it.

mod archive;
mod beneath;
mod chmod;
mod condition;
mod copy;
mod describe;
mod entry;
#[cfg(test)]
mod fuzz;
pub mod hash;
mod home;
pub mod lines;
mod list;
pub mod name;
mod name_at;
mod read;
mod remove;
mod rename;
mod root;
pub mod search;
mod skip;
mod splice_pipe;
mod temporary;
#[cfg(test)]
mod tests;
pub mod text;
mod usage;
pub mod watch;
mod write;

pub use archive::{
    BrokenOff, Extent, Input, Kept, Layer, Overwrite, Packed, Packing, SENT_BYTES, Sink, Skipped,
    Source, Unpacked, Unpacking,
};
pub use chmod::Changed;
pub use condition::{Condition, Patient, Turn};
pub use copy::{CopyReport, Copying};
pub use describe::{Attribute, Description};
pub use entry::{Entry, FileKind, FileVersion, modified_ms};
pub use home::{make_home, remove_home};
pub use list::Page;
pub use read::Opened;
pub use remove::Aside;
pub use root::{Files, Root};
pub use skip::{SkipList, SkipReason, end_of};
pub use splice_pipe::SplicePipe;
pub use temporary::forget_ended_trees;
pub use usage::{Disk, DiskUse};
pub use write::{ClosedUpload, RangedWrite, Upload, is_temporary};
