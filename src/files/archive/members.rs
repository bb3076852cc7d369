//! Reads the members of a tar archive from a stream, in bounded memory.
//!
//! The `tar` crate (0.4.46) is not used. It reads long names and pax records whole, whatever their size
//! (`EntryFields::read_all`); of a number in base 256 it keeps the low 64 bits, so a negative size is a large
//! one (`numeric_extended_from`); it reads sparse files of GNU's old format and not those of pax; and an
//! archive that is cut between two members is whole to it (`next_entry_raw`). Everything here is as
//! strict as the end of an archive needs it: what does not fit the format is an error, never skipped.
//!
//! Nothing here knows where members go; [`unpack`](super::unpack) does.

use std::fmt::Display;
use std::io::{self, BufRead, Chain, Cursor, ErrorKind, Read as _};

use super::header::{BLOCK, Block, Dialect, Header, Time, sparse_parts};
use super::input::{Input, Reader};
use super::pax::{Records, Sparse, decimal};
use crate::codec::gzip::{self, DECODER_BYTES, Decoder};
use crate::error::{Error, Kind, Result};
use crate::files::SkipReason;
use crate::files::describe::Attribute;
use crate::limits::ledger::Charge;

/// Most bytes of the pax headers and long names of one member.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;

/// Most parts of a sparse file, of 16 bytes each.
const MAX_SPARSE_PARTS: usize = 1 << 16;

/// Most zeros after the end of an archive. Programs fill the last record, of 10 KiB unless they are asked
/// otherwise.
const MAX_PADDING_BYTES: u64 = 16 << 20;

/// How often the memory of an extended header is charged: its bytes, and what they become.
const USES_OF_EXTENSION: usize = 3;

/// How data begins that is compressed in ways, or archived in formats, that are not supported.
const OTHER_FORMATS: [(&str, &[u8]); 11] = [
    ("zstd", b"\x28\xb5\x2f\xfd"),
    ("xz", b"\xfd7zXZ\0"),
    ("bzip2", b"BZh"),
    ("zip", b"PK\x03\x04"),
    ("zip", b"PK\x05\x06"),
    ("7z", b"7z\xbc\xaf\x27\x1c"),
    ("rar", b"Rar!\x1a\x07"),
    ("lz4", b"\x04\x22\x4d\x18"),
    ("lzip", b"LZIP"),
    ("lzma", b"\x5d\0\0"),
    ("compress", b"\x1f\x9d"),
];

/// What a header of tar has at offset 257, after a name that may begin like any other format (`tar(5)`).
const TAR_MAGIC: &[u8] = b"ustar";

/// What a member is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MemberKind {
    File,
    Directory,
    Symlink,
    HardLink,
    /// Left out, with the reason.
    Other(SkipReason),
}

/// A member's attributes. Names are as the archive has them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) name: Vec<u8>,
    pub(super) kind: MemberKind,
    pub(super) link: Vec<u8>,
    pub(super) mode: u32,
    pub(super) uid: u64,
    pub(super) gid: u64,
    pub(super) modified: Time,
    /// Bytes of the content, holes included.
    pub(super) size: u64,
    /// Extended attributes.
    pub(super) attributes: Vec<Attribute>,
}

/// An archive that is being read.
pub(super) struct Members<'i> {
    input: TarStream<'i>,
    /// Whether extended attributes are wanted.
    has_attributes: bool,
    /// For extensions, and for the decompressor.
    charge: Charge,
    /// What is charged in any case.
    base_charge: usize,
    /// What global headers say.
    global: Records,
    /// Bytes of the extended headers of the next member.
    extensions: u64,
    /// The content of the current member that was not read.
    content: Content,
}

/// The bytes of an archive.
enum TarStream<'i> {
    Plain(Stored<'i>),
    Gzip(Box<Decoder<Stored<'i>>>),
}

/// The first bytes, and the others.
type Stored<'i> = Chain<Cursor<Vec<u8>>, Reader<'i>>;

/// The data of a member in the archive.
#[derive(Default)]
struct Content {
    /// Bytes left.
    stored: u64,
    /// Bytes after them, up to a whole block.
    padding: u64,
    /// Offset in the file, and length, of the parts that are left, the last one first.
    parts: Vec<(u64, u64)>,
}

impl<'i> Members<'i> {
    /// Finds out how an archive is compressed. Memory is added to `charge`. Extended attributes are left out unless it
    /// `has_attributes`.
    ///
    /// # Errors
    /// `Unsupported` for what other programs made; `OverLimit`; or the source fails.
    pub(super) fn new(
        input: &'i mut dyn Input,
        has_attributes: bool,
        mut charge: Charge,
    ) -> Result<Self> {
        let mut input = Reader(input);
        // However few bytes the source hands over at a time.
        let mut first = Vec::new();
        (&mut input)
            .take(BLOCK as u64)
            .read_to_end(&mut first)
            .map_err(|error| unreadable(&error))?;
        let is_tar = first
            .get(257..)
            .is_some_and(|rest| rest.starts_with(TAR_MAGIC));
        let other = OTHER_FORMATS
            .iter()
            .find(|(_, magic)| first.starts_with(magic));
        if let Some((name, _)) = other.filter(|_| !is_tar) {
            let text =
                format!("{name} is not supported; send a tar archive, or one compressed by gzip");
            return Err(Error::new(Kind::Unsupported, text));
        }
        let is_gzip = first.first() == Some(&gzip::MAGIC[0]);
        let input = Cursor::new(first).chain(input);
        let mut base_charge = charge.bytes();
        // One byte is enough: no header of tar begins with it and has a valid checksum for its name.
        let input = if is_gzip {
            base_charge += DECODER_BYTES;
            charge.set(base_charge)?;
            TarStream::Gzip(Box::new(Decoder::new(input)))
        } else {
            TarStream::Plain(input)
        };
        Ok(Self {
            input,
            has_attributes,
            charge,
            base_charge,
            global: Records::default(),
            extensions: 0,
            content: Content::default(),
        })
    }

    fn input(&mut self) -> &mut dyn BufRead {
        match &mut self.input {
            TarStream::Plain(input) => input,
            TarStream::Gzip(input) => &mut **input,
        }
    }

    /// Gives way to others, compressed or not: few bytes may be much of an archive, and few of that much work.
    ///
    /// # Errors
    /// Nobody wants the archive any more.
    pub(super) fn give_way(&mut self) -> Result<()> {
        let stored = match &mut self.input {
            TarStream::Plain(input) => input,
            TarStream::Gzip(input) => input.input(),
        };
        let passed = stored.get_mut().1.0.give_way();
        passed.map_err(|error| unreadable(&error))
    }

    /// The next bytes, at least one. Gives way before.
    fn filled(&mut self) -> Result<&[u8]> {
        self.give_way()?;
        filled(self.input())
    }

    /// The next member; `None` at the end of the archive.
    ///
    /// # Errors
    /// `BadArchive`, even if it ends early; or the source fails.
    pub(super) fn next(&mut self) -> Result<Option<Member>> {
        self.skip_content()?;
        self.extensions = 0;
        let mut records = self.global.clone();
        let (mut long_name, mut long_link) = (None, None);
        let mut is_extended = false;
        let mut block = [0; BLOCK];
        loop {
            self.read_exact(&mut block)?;
            let Some(header) = Header::parse(&block).map_err(bad)? else {
                if is_extended {
                    return Err(bad("it ends after an extended header"));
                }
                self.read_end()?;
                return Ok(None);
            };
            is_extended = true;
            match header.typeflag {
                b'x' | b'X' => {
                    let data = self.read_extension(header.size)?;
                    records.read(&data, self.has_attributes).map_err(bad)?;
                }
                b'g' => {
                    let data = self.read_extension(header.size)?;
                    self.global.read(&data, false).map_err(bad)?;
                    // What belongs to one member only.
                    self.global.path = None;
                    self.global.link = None;
                    self.global.size = None;
                    self.global.sparse = Sparse::default();
                    records = self.global.clone();
                    is_extended = false;
                }
                b'L' => long_name = Some(self.read_text(header.size)?),
                b'K' => long_link = Some(self.read_text(header.size)?),
                // The label of a volume.
                b'V' => drop(self.read_extension(header.size)?),
                _ => {
                    records.path = records.path.or(long_name);
                    records.link = records.link.or(long_link);
                    return self.member(&header, records, &block).map(Some);
                }
            }
        }
    }

    /// Puts together what a header and its extensions say.
    fn member(&mut self, header: &Header, records: Records, block: &Block) -> Result<Member> {
        let Records {
            sparse, attributes, ..
        } = records;
        let path = sparse.name.or(records.path);
        let name = path.unwrap_or_else(|| header.name.clone());
        let kind = match header.typeflag {
            // Version 7 has no type for directories.
            0 | b'0' if name.ends_with(b"/") => MemberKind::Directory,
            0 | b'0' | b'7' | b'S' => MemberKind::File,
            b'1' => MemberKind::HardLink,
            b'2' => MemberKind::Symlink,
            b'3' | b'4' => MemberKind::Other(SkipReason::Device),
            b'5' | b'D' => MemberKind::Directory,
            b'6' => MemberKind::Other(SkipReason::Fifo),
            b'M' => return Err(bad("it is a part of a larger archive")),
            _ => MemberKind::Other(SkipReason::Unknown),
        };
        // Other types have a size at most as a hint, and no data.
        let has_data = !matches!(header.typeflag, b'1'..=b'6');
        let stored = records.size.unwrap_or(header.size);
        let stored = if has_data { stored } else { 0 };
        if i64::try_from(stored).is_err() {
            return Err(bad("its size is too large"));
        }
        self.begin_content(stored, vec![(0, stored)]);
        let mut size = stored;
        if header.typeflag == b'S' {
            if header.dialect != Dialect::Gnu {
                return Err(unknown_sparse());
            }
            size = super::header::whole(&block[483..495], "size").map_err(bad)?;
            let parts = self.read_gnu_map(block)?;
            self.content.parts = checked_map(parts, stored, size)?;
        } else if sparse.map_in_data {
            size = sparse.size.ok_or_else(unknown_sparse)?;
            let parts = self.read_map_in_data()?;
            self.content.parts = checked_map(parts, self.content.stored, size)?;
        } else if let Some(real) = sparse.size {
            size = real;
            let (pairs, odd) = sparse.map.as_chunks::<2>();
            if !odd.is_empty() {
                return Err(unknown_sparse());
            }
            let parts = pairs.iter().map(|[offset, length]| (*offset, *length));
            self.content.parts = checked_map(parts.collect(), stored, size)?;
        }
        let of_header = Time {
            seconds: header.modified,
            nanoseconds: 0,
        };
        Ok(Member {
            name,
            kind,
            link: records.link.unwrap_or_else(|| header.link.clone()),
            mode: header.mode,
            uid: records.uid.unwrap_or(header.uid),
            gid: records.gid.unwrap_or(header.gid),
            modified: records.modified.unwrap_or(of_header),
            size,
            attributes,
        })
    }

    /// Hands the content of the current member over in pieces, each with its offset in the file.
    ///
    /// # Errors
    /// Those of [`Members::next`] and of `take`.
    pub(super) fn read_content(
        &mut self,
        mut take: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        while let Some((offset, length)) = self.content.parts.pop() {
            let (mut offset, mut left) = (offset, length);
            while left > 0 {
                let most = usize::try_from(left).unwrap_or(usize::MAX);
                let found = self.filled()?;
                let piece = &found[..found.len().min(most)];
                take(offset, piece)?;
                let count = piece.len();
                self.input().consume(count);
                self.content.stored -= count as u64;
                offset += count as u64;
                left -= count as u64;
            }
        }
        Ok(())
    }

    /// How many bytes of content of the current member the archive has that were not read.
    pub(super) fn stored(&self) -> u64 {
        self.content.stored
    }

    /// Drops the rest of the content, and the padding.
    fn skip_content(&mut self) -> Result<()> {
        let Content {
            stored, padding, ..
        } = std::mem::take(&mut self.content);
        let mut left = stored + padding;
        while left > 0 {
            let found = self.filled()?.len();
            let count = usize::try_from(left).map_or(found, |left| left.min(found));
            self.input().consume(count);
            left -= count as u64;
        }
        Ok(())
    }

    fn begin_content(&mut self, stored: u64, parts: Vec<(u64, u64)>) {
        self.content = Content {
            stored,
            padding: stored.next_multiple_of(BLOCK as u64) - stored,
            parts,
        };
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> Result<()> {
        self.give_way()?;
        self.input()
            .read_exact(buffer)
            .map_err(|error| unreadable(&error))
    }

    /// Reads the data of an extended header.
    fn read_extension(&mut self, size: u64) -> Result<Vec<u8>> {
        self.extensions = self.extensions.saturating_add(size);
        if self.extensions > MAX_EXTENSION_BYTES {
            let text = format!(
                "the extended headers of a member have more than {MAX_EXTENSION_BYTES} bytes"
            );
            return Err(bad(text));
        }
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let all = usize::try_from(self.extensions).unwrap_or(usize::MAX);
        self.charge
            .set(self.base_charge + USES_OF_EXTENSION * all)?;
        let mut data = vec![0; size];
        self.read_exact(&mut data)?;
        self.begin_content(size as u64, Vec::new());
        self.content.stored = 0;
        self.skip_content()?;
        Ok(data)
    }

    /// Reads a long name of GNU tar, which ends in NUL.
    fn read_text(&mut self, size: u64) -> Result<Vec<u8>> {
        let mut text = self.read_extension(size)?;
        if text.last() == Some(&0) {
            text.pop();
        }
        Ok(text)
    }

    /// Reads the map of an old GNU sparse file: four parts in the header, the others in blocks after it.
    fn read_gnu_map(&mut self, header: &Block) -> Result<Vec<(u64, u64)>> {
        let mut parts = sparse_parts(&header[386..482]).map_err(bad)?;
        let mut has_more = header[482] != 0;
        while has_more {
            let mut block = [0; BLOCK];
            self.read_exact(&mut block)?;
            parts.extend(sparse_parts(&block[..504]).map_err(bad)?);
            has_more = block[504] != 0;
            self.check_parts(parts.len())?;
        }
        Ok(parts)
    }

    /// Reads the map of a sparse file in format 1.0: decimal numbers, one per line, in whole blocks
    /// before the data.
    fn read_map_in_data(&mut self) -> Result<Vec<(u64, u64)>> {
        let mut numbers = Vec::new();
        let mut wanted = None;
        let mut text = Vec::new();
        while wanted.is_none_or(|wanted| numbers.len() < wanted) {
            let left = self.content.stored.checked_sub(BLOCK as u64);
            self.content.stored = left.ok_or_else(unknown_sparse)?;
            let mut block = [0; BLOCK];
            self.read_exact(&mut block)?;
            text.extend_from_slice(&block);
            while let Some(end) = text.iter().position(|byte| *byte == b'\n')
                && wanted.is_none_or(|wanted| numbers.len() < wanted)
            {
                let number = decimal(&text[..end]).ok_or_else(unknown_sparse)?;
                text.drain(..=end);
                if wanted.is_some() {
                    numbers.push(number);
                } else {
                    let count = usize::try_from(number).unwrap_or(usize::MAX);
                    self.check_parts(count)?;
                    wanted = Some(2 * count);
                }
            }
            // No number is longer.
            if text.len() > 2 * BLOCK {
                return Err(unknown_sparse());
            }
        }
        let (pairs, _) = numbers.as_chunks::<2>();
        Ok(pairs
            .iter()
            .map(|[offset, length]| (*offset, *length))
            .collect())
    }

    fn check_parts(&mut self, count: usize) -> Result<()> {
        if count > MAX_SPARSE_PARTS {
            let text = format!(
                "a sparse file has more than {MAX_SPARSE_PARTS} parts; make the archive without tar -S"
            );
            return Err(bad(text));
        }
        let bytes = 3 * count * size_of::<(u64, u64)>();
        Ok(self.charge.set(self.base_charge + bytes)?)
    }

    /// Reads what follows the first block of zeros: a second one, and more zeros up to the end of the
    /// stream.
    fn read_end(&mut self) -> Result<()> {
        let mut second = [0; BLOCK];
        self.read_exact(&mut second)?;
        if second != [0; BLOCK] {
            return Err(bad("its end has one block of zeros instead of two"));
        }
        let mut padding = 0;
        loop {
            self.give_way()?;
            let found = self
                .input()
                .fill_buf()
                .map_err(|error| unreadable(&error))?;
            if found.is_empty() {
                return Ok(());
            }
            if found.iter().any(|byte| *byte != 0) {
                return Err(bad("something follows its end"));
            }
            let count = found.len();
            padding += count as u64;
            self.input().consume(count);
            if padding > MAX_PADDING_BYTES {
                return Err(bad("too many zeros follow its end"));
            }
        }
    }
}

/// The map of a sparse file, the last part first, if it is one for this many bytes of data in a file of
/// this size.
fn checked_map(parts: Vec<(u64, u64)>, stored: u64, size: u64) -> Result<Vec<(u64, u64)>> {
    let mut end = 0;
    let mut sum = 0_u64;
    for (offset, length) in &parts {
        if *offset < end {
            return Err(unknown_sparse());
        }
        end = offset.checked_add(*length).ok_or_else(unknown_sparse)?;
        sum += length;
    }
    if end > size || sum != stored || i64::try_from(size).is_err() {
        return Err(unknown_sparse());
    }
    Ok(parts.into_iter().rev().collect())
}

/// The next bytes, at least one.
fn filled(input: &mut dyn BufRead) -> Result<&[u8]> {
    let found = input.fill_buf().map_err(|error| unreadable(&error))?;
    if found.is_empty() {
        return Err(unreadable(&ErrorKind::UnexpectedEof.into()));
    }
    Ok(found)
}

fn bad(why: impl Display) -> Error {
    Error::new(Kind::BadArchive, format!("cannot read the archive: {why}"))
}

fn unknown_sparse() -> Error {
    bad("the map of a sparse file is broken; make the archive without tar -S")
}

fn unreadable(error: &io::Error) -> Error {
    match error.kind() {
        ErrorKind::UnexpectedEof => bad("it ends early"),
        ErrorKind::InvalidData => bad(error.to_string()),
        _ => Error::io("cannot read the archive", error),
    }
}
