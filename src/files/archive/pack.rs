//! Packs a tree into an archive, as it is found: names that come and go meanwhile, and files that
//! change, never make the archive one that cannot be read.
//!
//! A member has the size that its header promised: a file that shrinks is filled with zeros, one that
//! grows is cut, and both are counted as changed. The rest of a file that cannot be read is zeros, too,
//! and it is reported with what is left out: in a global header, which programs ignore, before the last member.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{FileStat, fstat};

use super::header::{BLOCK, Time};
use super::pax::is_kept;
use super::write::{MemberHeader, append_member, append_report};
use super::{MAX_SKIPPED_NAMES, Skipped};
use crate::client::Disconnected;
use crate::codec::gzip::{ENCODER_BYTES, Encoder, Level};
use crate::error::{Error, Kind, Result};
use crate::files::SkipReason;
use crate::files::describe::{Attribute, attributes_at};
use crate::files::entry::{FileKind, link_target, modified_ms, size};
use crate::files::name::FilePath;
use crate::files::root::Root;
use crate::files::search::{Filter, Found, Visit};
use crate::limits::ledger::{Charge, Item, Ledger};
use crate::sys::{IDS_OF_SANDBOX, proc};

/// Bytes that are read of a file, and sent, at a time.
const PIECE_BYTES: usize = 128 * 1024;

/// What the stream that an archive is sent through may hold of it, which is charged here.
pub const SENT_BYTES: usize = 2 * PIECE_BYTES;

/// Most files with several names whose first name is remembered. Of more, each name is a file of its own.
const MAX_HARD_LINKS: usize = 1 << 16;

/// Most bytes of the extended attributes of a file, names and values.
const MAX_ATTRIBUTE_BYTES: usize = 512 << 10;

/// What remembering one takes besides the name.
const HARD_LINK_BYTES: usize = 128;

/// How many names are passed without sending anything before the client is looked at.
const NAMES_BETWEEN_LOOKS: u32 = 16;

/// What is packed, opened when the request came: what became of its path since does not matter.
pub enum Source {
    /// A directory, with all that is in it.
    Directory(OwnedFd),
    /// A file, by this name.
    File(Vec<u8>, File),
}

/// What is packed of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Content and attributes that everybody understands.
    Files,
    /// All of the root of a machine: named pipes and extended attributes, too.
    Root,
    /// The same of what everybody on the machine may read, for a private root: bits of the mode that give rights are kept
    /// where root has given them to everybody, and owners whom no private root has are its root.
    PublicRoot,
}

pub struct Packing {
    /// What is left out.
    pub filter: Filter,
    /// Whether the archive is compressed by gzip.
    pub is_compressed: bool,
    /// Whether the archive breaks off at what cannot be packed.
    pub fails: bool,
    pub extent: Extent,
    /// Files and links that were not modified after this time are left out: milliseconds since 1970.
    pub newer_than: Option<i64>,
}

#[derive(Debug, Default)]
pub struct Packed {
    /// Regular files.
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Symbolic and hard links.
    pub links: u64,
    /// Content of the files.
    pub bytes: u64,
    /// Files that changed while they were read.
    pub changed: u64,
    /// The first that were left out.
    pub skipped: Vec<Skipped>,
    /// How many there are.
    pub skipped_total: u64,
}

/// Where an archive goes.
pub trait Sink {
    /// Sends bytes, and blocks while the client is slow.
    ///
    /// # Errors
    /// The client disconnected.
    fn send(&mut self, bytes: &[u8]) -> std::result::Result<(), Disconnected>;
    /// Looks whether the client is still there.
    ///
    /// # Errors
    /// The client disconnected.
    fn look(&mut self) -> std::result::Result<(), Disconnected>;
}

/// Why an archive is not complete.
pub enum BrokenOff {
    /// Something could not be packed.
    Failed(Error),
    /// The client disconnected.
    Disconnected,
}

impl From<Error> for BrokenOff {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl From<Disconnected> for BrokenOff {
    fn from(_: Disconnected) -> Self {
        Self::Disconnected
    }
}

type Outcome = std::result::Result<(), BrokenOff>;

/// An archive that is being written.
struct Writer<'a> {
    sink: &'a mut dyn Sink,
    encoder: Option<Encoder>,
    /// Not sent yet.
    out: Vec<u8>,
    /// Blocks that are not compressed yet.
    plain: Vec<u8>,
    buffer: Vec<u8>,
    fails: bool,
    extent: Extent,
    newer_than: Option<i64>,
    /// The extended attributes of the next member.
    attributes: Vec<Attribute>,
    done: Packed,
    /// The first name of each file that has several.
    names: HashMap<(u64, u64), Vec<u8>>,
    names_charge: Charge,
    skipped_charge: Charge,
    unlooked: u32,
    _charge: Charge,
}

impl Root {
    /// Opens what is to be packed.
    ///
    /// # Errors
    /// `NotFound`, `Forbidden`, `NotRegular`.
    pub fn open_source(&self, path: &FilePath) -> Result<Source> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        match self.resolve(path, flags) {
            Err(Errno::ENOTDIR) => {
                let opened = self.open(path, false)?;
                Ok(Source::File(path.name().to_vec(), opened.file))
            }
            other => other
                .map(Source::Directory)
                .map_err(|errno| self.error(format_args!("cannot read {path}"), errno)),
        }
    }

    /// Packs a tree into `sink`. `describe` writes the report on it, which stands before the last member.
    ///
    /// # Errors
    /// The client disconnected; what the archive holds is over the tenant's share; or, if asked for, a
    /// file could not be packed. The archive has no end then.
    pub fn pack(
        &self,
        source: Source,
        packing: Packing,
        ledger: &Arc<Ledger>,
        sink: &mut dyn Sink,
        describe: &dyn Fn(&Packed) -> Vec<u8>,
    ) -> Outcome {
        let memory = 3 * PIECE_BYTES
            + SENT_BYTES
            + if packing.is_compressed {
                ENCODER_BYTES
            } else {
                0
            };
        let memory = charge(ledger, memory)?;
        let encoder = packing.is_compressed.then(|| Encoder::new(Level::Fast));
        let encoder = encoder.transpose().map_err(|error| {
            let text = format!("cannot start a thread to compress the archive: {error}");
            Error::new(Kind::NoThreads, text)
        })?;
        let mut writer = Writer {
            sink,
            encoder,
            out: Vec::new(),
            plain: Vec::new(),
            buffer: vec![0; PIECE_BYTES + 1],
            fails: packing.fails,
            extent: packing.extent,
            newer_than: packing.newer_than,
            attributes: Vec::new(),
            done: Packed::default(),
            names: HashMap::new(),
            names_charge: charge(ledger, 0)?,
            skipped_charge: charge(ledger, 0)?,
            unlooked: 0,
            _charge: memory,
        };
        let directory = match source {
            Source::File(name, file) => {
                let status = fstat(&file).map_err(unreadable)?;
                writer.file(&name, &status, file)?;
                return writer.finish(None, describe);
            }
            Source::Directory(directory) => directory,
        };
        let top = fstat(&directory).map_err(unreadable)?;
        let of_top = writer.attributes_of(directory.as_fd(), b".");
        let walk = self.walk_in(directory, packing.filter, None, ledger)?;
        let mut walk = walk.map_err(unreadable)?;
        while let Some(visit) = walk.next()? {
            match visit {
                Visit::Entry(found) => {
                    if !writer.entry(&found)? {
                        walk.skip_contents();
                    }
                }
                Visit::Passed => writer.sink.look()?,
                Visit::Unreadable(path, errno) => writer.skip(path, SkipReason::of(errno))?,
            }
        }
        writer.attributes = of_top;
        writer.finish(Some(&top), describe)
    }
}

impl Writer<'_> {
    /// Packs what the walk has found. False if the walk is to leave out what is in it.
    fn entry(&mut self, found: &Found<'_>) -> std::result::Result<bool, BrokenOff> {
        self.unlooked += 1;
        if self.unlooked > NAMES_BETWEEN_LOOKS {
            self.unlooked = 0;
            self.sink.look()?;
        }
        let is_directory = found.kind == FileKind::Directory;
        let is_open = |status: FileStat| status.st_mode & 0o005 == 0o005;
        if self.is_public() && is_directory && !found.status().is_ok_and(is_open) {
            self.skip(found.path, SkipReason::Permission)?;
            return Ok(false);
        }
        self.attributes = match found.kind {
            FileKind::Regular | FileKind::Directory => {
                self.attributes_of(found.directory.as_fd(), found.name)
            }
            _ => Vec::new(),
        };
        let packed = match found.kind {
            FileKind::Regular => self.opened(found),
            FileKind::Directory => self.directory(found),
            FileKind::Link => self.link(found),
            FileKind::Pipe if self.extent == Extent::Root => self.pipe(found),
            FileKind::Pipe => Ok(self.skip(found.path, SkipReason::Fifo)?),
            FileKind::Socket => Ok(self.skip(found.path, SkipReason::Socket)?),
            FileKind::CharacterDevice | FileKind::BlockDevice => {
                Ok(self.skip(found.path, SkipReason::Device)?)
            }
        };
        match packed {
            Ok(()) => {}
            // Removed since it was found. A root that fails is one that nobody changes.
            Err(PackError::Errno(Errno::ENOENT)) if !self.fails || self.extent != Extent::Root => {}
            Err(PackError::Errno(errno)) => self.skip(found.path, SkipReason::of(errno))?,
            Err(PackError::BrokenOff(why)) => return Err(why),
        }
        Ok(true)
    }

    fn is_public(&self) -> bool {
        self.extent == Extent::PublicRoot
    }

    /// The header of a file.
    fn header<'a>(&self, path: &'a [u8], status: &FileStat) -> MemberHeader<'a> {
        let mut entry = MemberHeader::of(path, status);
        if self.is_public() {
            for id in [&mut entry.uid, &mut entry.gid] {
                *id = if *id < IDS_OF_SANDBOX.into() { *id } else { 0 };
            }
            if u64::from(status.st_gid) != entry.gid {
                entry.mode &= !0o2000;
            }
            if status.st_uid != 0 || status.st_mode & 0o001 == 0 {
                entry.mode &= 0o1777;
            }
        }
        entry
    }

    /// The extended attributes of a file, if those are packed.
    fn attributes_of(&self, directory: BorrowedFd<'_>, name: &[u8]) -> Vec<Attribute> {
        if self.extent == Extent::Files {
            return Vec::new();
        }
        let mut all = attributes_at(directory, name, "", MAX_ATTRIBUTE_BYTES);
        all.retain(|own| is_kept(&own.name) && !own.name.contains('='));
        all
    }

    fn pipe(&mut self, found: &Found<'_>) -> std::result::Result<(), PackError> {
        let status = found.status()?;
        let mut entry = self.header(found.path, &status);
        entry.typeflag = b'6';
        append_member(&mut self.plain, &entry);
        self.done.files += 1;
        Ok(self.flush_if_full()?)
    }

    fn opened(&mut self, found: &Found<'_>) -> std::result::Result<(), PackError> {
        let file = found.open(OFlag::O_RDONLY)?;
        let status = fstat(&file)?;
        if FileKind::of(&status) != FileKind::Regular {
            // Replaced since it was found.
            return Err(Errno::ENOENT.into());
        }
        if self.is_public() && status.st_mode & 0o004 == 0 {
            return Err(Errno::EACCES.into());
        }
        Ok(self.file(found.path, &status, file)?)
    }

    fn file(&mut self, path: &[u8], status: &FileStat, file: impl Read) -> Outcome {
        if self.is_too_old(status) {
            return Ok(());
        }
        let promised = size(status);
        let mut entry = self.header(path, status);
        let identity = (status.st_dev, status.st_ino);
        if let Some(first) = self.names.get(&identity) {
            let entry = MemberHeader {
                typeflag: b'1',
                link: first,
                ..entry
            };
            append_member(&mut self.plain, &entry);
            self.done.links += 1;
            return self.flush_if_full();
        }
        if status.st_nlink > 1 {
            self.remember(identity, path);
        }
        entry.typeflag = b'0';
        entry.size = promised;
        entry.attributes = &self.attributes;
        append_member(&mut self.plain, &entry);
        self.done.files += 1;
        self.done.bytes += promised;
        self.content(path, file, promised)
    }

    /// Sends exactly `promised` bytes, and fills the last block.
    fn content(&mut self, path: &[u8], mut file: impl Read, promised: u64) -> Outcome {
        let mut left = promised;
        let (mut is_short, mut is_lost, mut has_grown) = (false, false, false);
        while left > 0 {
            let most = usize::try_from(left).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
            // With the last piece one byte more, which only a file that has grown has.
            let asked = most + usize::from(most as u64 == left);
            let read = if is_lost {
                Ok(0)
            } else {
                file.read(&mut self.buffer[..asked])
            };
            let count = match read {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let errno = error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
                    self.skip(path, SkipReason::of(errno))?;
                    is_lost = true;
                    continue;
                }
                Ok(0) => {
                    is_short = true;
                    self.buffer[..most].fill(0);
                    most
                }
                Ok(count) => {
                    has_grown = count > most;
                    count.min(most)
                }
            };
            self.plain.extend_from_slice(&self.buffer[..count]);
            left -= count as u64;
            self.flush_if_full()?;
        }
        if promised == 0 {
            has_grown = file
                .read(&mut self.buffer[..1])
                .is_ok_and(|count| count > 0);
        }
        self.done.changed += u64::from(!is_lost && (is_short || has_grown));
        let filled = self.plain.len() + padding(promised);
        self.plain.resize(filled, 0);
        self.flush_if_full()
    }

    fn directory(&mut self, found: &Found<'_>) -> std::result::Result<(), PackError> {
        if !found.is_included {
            // Something in it may be, and then names it.
            return Ok(());
        }
        let status = found.status()?;
        let path = [found.path, b"/"].concat();
        let mut entry = self.header(&path, &status);
        entry.typeflag = b'5';
        entry.attributes = &self.attributes;
        append_member(&mut self.plain, &entry);
        self.done.directories += 1;
        Ok(self.flush_if_full()?)
    }

    fn link(&mut self, found: &Found<'_>) -> std::result::Result<(), PackError> {
        let status = found.status()?;
        if self.is_too_old(&status) {
            return Ok(());
        }
        let target = link_target(found.directory, found.name)?;
        let mut entry = self.header(found.path, &status);
        entry.typeflag = b'2';
        entry.link = &target;
        append_member(&mut self.plain, &entry);
        self.done.links += 1;
        Ok(self.flush_if_full()?)
    }

    fn is_too_old(&self, status: &FileStat) -> bool {
        self.newer_than
            .is_some_and(|limit| modified_ms(status) <= limit)
    }

    fn remember(&mut self, identity: (u64, u64), path: &[u8]) {
        let bytes = self.names_charge.bytes() + path.len() + HARD_LINK_BYTES;
        if self.names.len() < MAX_HARD_LINKS && self.names_charge.set(bytes).is_ok() {
            self.names.insert(identity, path.to_vec());
        }
    }

    fn skip(&mut self, path: &[u8], reason: SkipReason) -> Outcome {
        // A root has them while it is in use, and no archive of one can.
        let is_usual = matches!(reason, SkipReason::Socket | SkipReason::Device);
        if self.fails && !(is_usual && self.extent == Extent::Root) {
            let name = crate::files::name::show(path);
            let text = format!("cannot pack {name}: {}", reason.word());
            return Err(Error::new(Kind::NotRegular, text).into());
        }
        self.done.skipped_total += 1;
        let bytes = self.skipped_charge.bytes() + path.len();
        if self.done.skipped.len() < MAX_SKIPPED_NAMES && self.skipped_charge.set(bytes).is_ok() {
            self.done.skipped.push(Skipped {
                name: path.to_vec(),
                reason,
            });
        }
        Ok(())
    }

    fn finish(mut self, top: Option<&FileStat>, describe: &dyn Fn(&Packed) -> Vec<u8>) -> Outcome {
        // Python takes a global header without a member after it for a broken archive. The one that does no
        // harm is the directory itself.
        if let Some(top) = top {
            append_report(&mut self.plain, &describe(&self.done));
            let mut entry = self.header(b"./", top);
            entry.typeflag = b'5';
            entry.attributes = &self.attributes;
            append_member(&mut self.plain, &entry);
        }
        let end = self.plain.len() + 2 * BLOCK;
        self.plain.resize(end, 0);
        self.flush(true)
    }

    fn flush_if_full(&mut self) -> Outcome {
        if self.plain.len() < PIECE_BYTES {
            return Ok(());
        }
        self.flush(false)
    }

    fn flush(&mut self, is_last: bool) -> Outcome {
        self.unlooked = 0;
        match &mut self.encoder {
            None => self.sink.send(&self.plain)?,
            Some(encoder) => {
                encoder.push(&self.plain, is_last, &mut self.out);
                if is_last || self.out.len() >= PIECE_BYTES / 4 {
                    self.sink.send(&self.out)?;
                    self.out.clear();
                } else {
                    self.sink.look()?;
                }
            }
        }
        self.plain.clear();
        Ok(())
    }
}

/// Why a single file was not packed.
enum PackError {
    Errno(Errno),
    BrokenOff(BrokenOff),
}

impl From<Errno> for PackError {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl From<BrokenOff> for PackError {
    fn from(why: BrokenOff) -> Self {
        Self::BrokenOff(why)
    }
}

impl<'a> MemberHeader<'a> {
    fn of(path: &'a [u8], status: &FileStat) -> Self {
        Self {
            path,
            link: b"",
            typeflag: b'0',
            mode: status.st_mode & 0o7777,
            uid: proc::id_inside(status.st_uid).into(),
            gid: proc::id_inside(status.st_gid).into(),
            size: 0,
            modified: Time {
                seconds: status.st_mtime,
                nanoseconds: u32::try_from(status.st_mtime_nsec).unwrap_or(0),
            },
            attributes: &[],
        }
    }
}

fn charge(ledger: &Arc<Ledger>, bytes: usize) -> Result<Charge> {
    Ok(ledger.charge(Item::Responses, bytes)?)
}

fn unreadable(errno: Errno) -> Error {
    Error::system("cannot read what is to be packed", errno)
}

fn padding(size: u64) -> usize {
    usize::try_from(size.next_multiple_of(BLOCK as u64) - size).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives some bytes, and fails then.
    struct Broken(usize);

    impl Read for Broken {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            if self.0 == 0 {
                return Err(Errno::EIO.into());
            }
            let count = std::mem::take(&mut self.0);
            buffer[..count].fill(b'x');
            Ok(count)
        }
    }

    struct Nowhere;

    impl Sink for Nowhere {
        fn send(&mut self, _: &[u8]) -> std::result::Result<(), Disconnected> {
            Ok(())
        }

        fn look(&mut self) -> std::result::Result<(), Disconnected> {
            Ok(())
        }
    }

    fn writer<'a>(sink: &'a mut Nowhere, ledger: &Arc<Ledger>) -> Writer<'a> {
        Writer {
            sink,
            encoder: None,
            out: Vec::new(),
            plain: Vec::new(),
            buffer: vec![0; PIECE_BYTES + 1],
            fails: false,
            extent: Extent::Files,
            newer_than: None,
            attributes: Vec::new(),
            done: Packed::default(),
            names: HashMap::new(),
            names_charge: charge(ledger, 0).unwrap(),
            skipped_charge: charge(ledger, 0).unwrap(),
            unlooked: 0,
            _charge: charge(ledger, 0).unwrap(),
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_to_its_end_is_told_or_ends_the_archive() {
        let ledger = crate::limits::ledger::Budget::new(1 << 30).whole();
        let mut sink = Nowhere;
        let mut writer = writer(&mut sink, &ledger);
        assert!(writer.content(b"f", Broken(3), 1000).is_ok());
        let content = [&b"xxx"[..], &[0; 2 * BLOCK - 3]].concat();
        assert_eq!(writer.plain, content);
        assert_eq!((writer.done.changed, writer.done.skipped_total), (0, 1));
        assert_eq!(writer.done.skipped[0].name, b"f");
        assert_eq!(writer.done.skipped[0].reason, SkipReason::Io);
        writer.fails = true;
        let ended = writer.content(b"f", Broken(3), 1000);
        assert!(matches!(ended, Err(BrokenOff::Failed(_))));
    }

    #[test]
    fn a_file_that_has_another_size_than_it_told_is_counted_as_changed() {
        let ledger = crate::limits::ledger::Budget::new(1 << 30).whole();
        let piece = PIECE_BYTES as u64;
        for promised in [0, 1, piece - 1, piece, piece + 1, 2 * piece] {
            let sizes = [promised.saturating_sub(1), promised, promised + 1];
            for size in sizes {
                let mut sink = Nowhere;
                let mut writer = writer(&mut sink, &ledger);
                let file = std::io::repeat(b'x').take(size);
                assert!(writer.content(b"f", file, promised).is_ok());
                let expected = u64::from(size != promised);
                assert_eq!(writer.done.changed, expected, "{size} of {promised}");
            }
        }
    }
}
