//! Trees as one stream: tar archives, plain or compressed by gzip, in both directions.
//!
//! [`header`], [`pax`] and [`write`] are pure functions of bytes. [`members`] reads an archive as
//! a stream of members, and [`unpack`] makes files of them beneath a directory that is held open: no
//! member goes through a link, or out of the directory. [`layer`] does that with layers of images, one over another. [`pack`] walks through a tree and writes one.
//!
//! Memory is bounded whatever an archive holds, and charged before it is taken.

mod attributes;
#[cfg(test)]
mod fuzz;
mod header;
mod input;
mod known;
mod layer;
mod members;
mod pack;
mod parts;
mod pax;
mod staging;
#[cfg(test)]
mod turns;
mod unpack;
mod write;

#[cfg(test)]
pub use input::CountedInput;
pub use input::Input;
pub use layer::Layer;
pub use pack::{BrokenOff, Extent, Packed, Packing, SENT_BYTES, Sink, Source};
pub use unpack::{Kept, Overwrite, Unpacked, Unpacking};

use crate::files::skip::{MAX_SKIPPED_NAMES, SkipReason};

/// A file that was left out, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// Its name, as bytes.
    pub name: Vec<u8>,
    pub reason: SkipReason,
}
