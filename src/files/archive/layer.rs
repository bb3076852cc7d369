//! Layers of images: archives in files, each of which changes the tree that those below it have made.
//!
//! A layer hides files of those below it by members whose names begin with [`WHITEOUT`], wherever in the archive they are
//! (the Image Format Specification of the Open Container Initiative, "Image Layer Filesystem Changeset"). So it is read
//! twice: first for them, and to check its digests before anything of the tree is changed.

use std::fs::File;
use std::io::{self, BufRead, Chain, Cursor, Read, Seek};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use super::input::{Input, Reader};
use super::members::Members;
use super::parts::parts;
use super::unpack::{ENTRY_BYTES, Kept, Take, Unpacked, WHITEOUT, remove};
use crate::codec::gzip::{self, DECODER_BYTES, Decoder};
use crate::error::{Error, Kind, Result};
use crate::files::entry::DIRECTORY;
use crate::files::hash::{Digest, Hasher};
use crate::files::name::{Tree, show};
use crate::files::root::Files;
use crate::limits::ledger::{Item, Ledger};

/// What hides all that layers below have in a directory. Other names that begin like this are notes of AUFS.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Bytes that are read at a time.
const PIECE_BYTES: usize = 64 * 1024;

/// A layer.
pub struct Layer {
    /// The archive, plain or compressed by gzip.
    pub file: File,
    /// The SHA-256 of the file, if the image says one.
    pub stored: Option<Digest>,
    /// The SHA-256 of the plain archive, if the image says one.
    pub plain: Option<Digest>,
}

impl Files<'_> {
    /// Unpacks a layer over what those below it have made of this root. What was done before an error stays. `turn`
    /// is not read, but gives way to others again and again, and breaks off if nobody wants the image any more.
    ///
    /// # Errors
    /// `BadArchive` if a digest is another one; those of [`Files::unpack_root`].
    pub fn unpack_layer(
        &self,
        layer: &mut Layer,
        max_bytes: u64,
        room: &Take<'_>,
        turn: &mut dyn Input,
        ledger: &Arc<Ledger>,
    ) -> Result<Unpacked> {
        layer.read(true, turn, ledger, &mut |input| {
            self.hide(max_bytes, input, ledger)
        })?;
        let mut done = Unpacked::default();
        layer.read(false, turn, ledger, &mut |input| {
            done = self.unpack_root(Kept::Layer, max_bytes, room, input, ledger)?;
            Ok(())
        })?;
        Ok(done)
    }

    /// Removes what a layer hides of those below it. What cannot be unpacked is not even read.
    fn hide(&self, max_bytes: u64, input: &mut dyn Input, ledger: &Arc<Ledger>) -> Result<()> {
        let charge = ledger.charge(Item::Bodies, 0)?;
        let mut members = Members::new(input, false, charge)?;
        let (mut bytes, mut count) = (0_u64, 0_u64);
        while let Some(member) = members.next()? {
            bytes = bytes.saturating_add(members.stored());
            count += 1;
            if bytes > max_bytes || count > max_bytes / ENTRY_BYTES {
                return Err(Error::new(Kind::TooLarge, "a layer is too large"));
            }
            // Unpacking refuses names that are none.
            let Ok(Some(parts)) = parts(&member.name, 0) else {
                continue;
            };
            let Some((name, way)) = parts.split_last() else {
                continue;
            };
            let Some(hidden) = name.strip_prefix(WHITEOUT) else {
                continue;
            };
            if hidden.starts_with(WHITEOUT) && *name != OPAQUE {
                continue;
            }
            if matches!(hidden, b"" | b"." | b"..") {
                let text = format!("cannot unpack {}: it hides no file", show(&member.name));
                return Err(Error::new(Kind::BadArchive, text));
            }
            let directory = match self.way(way, &mut members)? {
                // There is nothing to hide.
                Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => continue,
                found => found.map_err(|errno| Error::system("cannot unpack a layer", errno))?,
            };
            if *name == OPAQUE {
                clear(&directory, &mut members)?;
            } else {
                remove(&directory, hidden, &mut members)?;
            }
        }
        Ok(())
    }

    /// Opens a directory below the root without following links.
    fn way(&self, parts: &[&[u8]], members: &mut Members<'_>) -> Result<nix::Result<OwnedFd>> {
        let start = self.start(Tree::Main);
        let mut directory = start.and_then(|start| self.resolve_in(start, b".", DIRECTORY));
        for part in parts {
            members.give_way()?;
            let flags = DIRECTORY | OFlag::O_NOFOLLOW;
            directory = directory.and_then(|above| self.resolve_in(&above, part, flags));
        }
        Ok(directory)
    }
}

/// Removes all that is in a directory.
fn clear(directory: &OwnedFd, members: &mut Members<'_>) -> Result<()> {
    let failed = |errno| Error::system("cannot unpack a layer", errno);
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let listed = openat(directory, ".", flags, Mode::empty()).and_then(Dir::from_fd);
    for entry in listed.map_err(failed)?.iter() {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_bytes();
        if !matches!(name, b"." | b"..") {
            remove(directory, name, members)?;
        }
    }
    Ok(())
}

impl Layer {
    /// Hands the archive over, which must be read to its end, and then checks the digests.
    fn read(
        &mut self,
        is_checked: bool,
        turn: &mut dyn Input,
        ledger: &Arc<Ledger>,
        take: &mut dyn FnMut(&mut dyn Input) -> Result<()>,
    ) -> Result<()> {
        let _charge = ledger.charge(Item::Bodies, PIECE_BYTES + DECODER_BYTES)?;
        let unreadable = |error: io::Error| Error::io("cannot read a layer", &error);
        self.file.rewind().map_err(unreadable)?;
        let mut pieces = Pieces {
            file: &mut self.file,
            turn,
            piece: vec![0; PIECE_BYTES],
            unread: 0..0,
        };
        let is_compressed = pieces.fill().map_err(unreadable)?.starts_with(&gzip::MAGIC);
        let hasher = || is_checked.then(Hasher::default);
        let mut stored = Hashed(&mut pieces, hasher());
        let (stored, plain) = if is_compressed {
            let archive = Cursor::new(Vec::new()).chain(Reader(&mut stored));
            let mut inflated = Inflated(Decoder::new(archive));
            let mut plain = Hashed(&mut inflated, hasher());
            take(&mut plain)?;
            let plain = plain.finish();
            drop(inflated);
            (stored.finish(), plain)
        } else {
            take(&mut stored)?;
            let digest = stored.finish();
            (digest, digest)
        };
        for (expected, found) in [(self.stored, stored), (self.plain, plain)] {
            if let (Some(expected), Some(found)) = (expected, found)
                && expected != found
            {
                let text = format!(
                    "the image is broken: a layer has the SHA-256 {found}, and should have {expected}"
                );
                return Err(Error::new(Kind::BadArchive, text));
            }
        }
        Ok(())
    }
}

/// A file in pieces. Others have their turn whenever one is asked for: it may be the first of much that is compressed.
struct Pieces<'p> {
    file: &'p mut File,
    turn: &'p mut dyn Input,
    piece: Vec<u8>,
    unread: std::ops::Range<usize>,
}

impl Input for Pieces<'_> {
    fn fill(&mut self) -> io::Result<&[u8]> {
        self.give_way()?;
        if self.unread.is_empty() {
            self.unread = 0..self.file.read(&mut self.piece)?;
        }
        Ok(&self.piece[self.unread.clone()])
    }

    fn used(&mut self, count: usize) {
        self.unread.start += count;
    }

    fn give_way(&mut self) -> io::Result<()> {
        self.turn.give_way()
    }
}

/// What is in a layer that is compressed.
struct Inflated<'p>(Decoder<Chain<Cursor<Vec<u8>>, Reader<'p>>>);

impl Input for Inflated<'_> {
    fn fill(&mut self) -> io::Result<&[u8]> {
        self.0.fill_buf()
    }

    fn used(&mut self, count: usize) {
        self.0.consume(count);
    }

    fn give_way(&mut self) -> io::Result<()> {
        self.0.input().get_mut().1.0.give_way()
    }
}

/// What is hashed while it is read.
struct Hashed<'h>(&'h mut dyn Input, Option<Hasher>);

impl Hashed<'_> {
    fn finish(self) -> Option<Digest> {
        self.1.map(Hasher::finish)
    }
}

impl Input for Hashed<'_> {
    fn fill(&mut self) -> io::Result<&[u8]> {
        self.0.fill()
    }

    fn used(&mut self, count: usize) {
        // It has them: they were asked for.
        if let Some(hasher) = &mut self.1
            && let Ok(bytes) = self.0.fill()
        {
            hasher.feed(&bytes[..count.min(bytes.len())]);
        }
        self.0.used(count);
    }

    fn give_way(&mut self) -> io::Result<()> {
        self.0.give_way()
    }
}
