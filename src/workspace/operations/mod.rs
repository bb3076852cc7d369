//! Every operation on a workspace, typed in and typed out: the policy that all doors share.
//!
//! Defaults, limits and the rules that join several mechanisms are here; a door only translates its
//! wire into these types and the results back. May use the mechanisms (`process`, `files`, `ports`);
//! must not use HTTP or JSON, so errors carry kinds and no statuses.

mod archives;
mod edit;
mod files;
mod processes;
mod search;

pub use archives::MAX_ARCHIVE_FILES;
pub use edit::{EditRequest, Edited};
pub use files::FilePart;
pub use processes::Run;
pub use search::{Glob, Globbed, Kinds, Moment, Order};
