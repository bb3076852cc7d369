//! Watches: what changes in a tree, told as it happens (inotify(7)).
//!
//! [`Watcher`] has one inotify instance and one watch for each directory. It promises that what it tells
//! leads from one state of the tree to the next, or says that it lost something ([`TreeChange::Overflow`]). Nothing
//! here waits for a client or knows how much of the processor it may take: an [`EventSink`] does. Nothing is open
//! between two calls except the inotify instance, so that a directory that is removed is noticed.

mod event;
mod limits;
mod nodes;
#[cfg(test)]
mod tests;
mod watcher;

pub use event::{Ended, EventSink, Settings, TreeChange, TreeEvent};
pub use limits::{WatchShare, watched};
pub use watcher::Watcher;
