//! Every operation on a workspace, typed in and typed out: the policy that all doors share.
//!
//! Defaults, limits and the rules that join several mechanisms are here; a door only translates its
//! wire into these types and the results back. May use the mechanisms (`process`, `files`, `ports`);
//! must not use HTTP or JSON, so errors carry kinds and no statuses.

mod files;
mod processes;
mod terminals;

pub use files::FilePart;
pub use processes::{Run, SignalGroup};
pub use terminals::{AttachSpec, Attachment, Scene};
