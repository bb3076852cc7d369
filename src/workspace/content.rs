//! The content of a file, in the form that is cheapest to send.
//!
//! Small files are read at once; large ones stay descriptors, so that the sender can move their
//! bytes without copying; devices are read as far as they give bytes without blocking.

use std::fs::File;
use std::io::{Cursor, ErrorKind, Read, Seek, SeekFrom};

use crate::client::{Interrupt, Stopped};
use crate::error::{Error, Result};
use crate::files::lines::{FoundLines, LineFinder, LineRange};
use crate::files::name::FilePath;
use crate::files::{FileKind, Opened};
use crate::limits::ledger::Item;
use crate::workspace::lease::Workspace;

/// Files up to this size are read before the answer begins, so that its head and body go out in one
/// packet. It also limits the first read of a file of size 0: files in /proc have size 0 and yet
/// content.
const SMALL_FILE_BYTES: u64 = 64 * 1024;

/// Bytes in one step of a search for lines, and the least for a tenant that holds its share of memory.
const SEARCH_BYTES: usize = 256 * 1024;
const LEAST_SEARCH_BYTES: usize = 8 * 1024;

/// Where the bytes of a file come from.
pub enum Content {
    /// Memory.
    Bytes(Vec<u8>),
    /// A file. Exactly `length` bytes are promised, even if the file shrinks meanwhile.
    File {
        /// Read from its current position.
        file: File,
        /// Bytes in all, `start` included.
        length: u64,
        /// The first bytes, already read.
        start: Vec<u8>,
    },
    /// A source of unknown length.
    Reader(Box<dyn Read + Send>),
}

/// A part of a regular file, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The first byte.
    pub offset: u64,
    /// How many bytes.
    pub length: u64,
}

/// An open file. The caller chooses which part to read.
pub struct Readable {
    path: FilePath,
    opened: Opened,
}

impl Readable {
    pub(super) fn new(path: FilePath, opened: Opened) -> Self {
        Self { path, opened }
    }

    pub fn path(&self) -> &FilePath {
        &self.path
    }

    /// The size of a regular file in bytes; `None` for a device, which has no ranges.
    pub fn size(&self) -> Option<u64> {
        (self.opened.kind == FileKind::Regular).then_some(self.opened.size)
    }

    /// Exactly this part. The caller announces its length, so the sender must send all of it.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn exactly(self, span: Span) -> Result<Content> {
        self.content(|opened| file_content(opened, span, true))
    }

    /// The content from `offset` on, at most `length` bytes. `None` means from the beginning, and to
    /// the end.
    ///
    /// # Errors
    /// The file cannot be read, or the device has no offsets.
    pub fn part(self, offset: Option<u64>, length: Option<u64>) -> Result<Content> {
        let size = self.size();
        let wanted = length.unwrap_or(u64::MAX);
        self.content(|opened| match size {
            // Files in /proc have size 0 and yet content.
            Some(0) if offset.unwrap_or(0) == 0 && length.is_none() => unsized_content(opened.file),
            Some(size) => {
                let offset = offset.unwrap_or(0);
                let length = wanted.min(size.saturating_sub(offset));
                file_content(opened, Span { offset, length }, false)
            }
            None => device_content(opened.file, offset, wanted),
        })
    }

    /// A range of lines. All of the file is read, because the answer says how many lines it has.
    ///
    /// # Errors
    /// The file cannot be read; `NoThreads`; or it was interrupted.
    pub fn lines(
        mut self,
        range: LineRange,
        workspace: &Workspace,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<(FoundLines, Content), Stopped> {
        let failed = |error| Error::io(format_args!("cannot read {}", self.path), &error);
        let ledger = &workspace.ledger;
        let charge = ledger.charge_up_to(Item::Responses, SEARCH_BYTES, LEAST_SEARCH_BYTES);
        let mut buffer = vec![0; charge.bytes()];
        let mut finder = LineFinder::new(range);
        let mut search = |interrupt: &mut dyn Interrupt| {
            loop {
                match self.opened.file.read(&mut buffer).map_err(failed)? {
                    0 => return Ok(()),
                    count => finder.feed(&buffer[..count]),
                }
                interrupt.check()?;
            }
        };
        workspace.work_if_long(interrupt, &mut search)?;
        let found = finder.finish();
        let span = Span {
            offset: found.offset,
            length: found.length,
        };
        self.opened.file.rewind().map_err(failed)?;
        let content = self.content(|opened| file_content(opened, span, true))?;
        Ok((found, content))
    }

    fn content(self, read: impl FnOnce(Opened) -> std::io::Result<Content>) -> Result<Content> {
        read(self.opened)
            .map_err(|error| Error::io(format_args!("cannot read {}", self.path), &error))
    }
}

/// A part of a regular file. Unless the part is `promised`, a small one may come out shorter.
fn file_content(
    Opened { mut file, .. }: Opened,
    Span { offset, length }: Span,
    promised: bool,
) -> std::io::Result<Content> {
    // The kernel refuses offsets beyond the largest file; an empty part needs no offset.
    if offset > 0 && length > 0 {
        file.seek(SeekFrom::Start(offset))?;
    }
    let mut start = Vec::new();
    if length <= SMALL_FILE_BYTES {
        start = read_start(&mut file, length)?;
        if !promised || start.len() as u64 == length {
            return Ok(Content::Bytes(start));
        }
    }
    Ok(Content::File {
        file,
        length,
        start,
    })
}

/// A file of unknown size, read to its end.
fn unsized_content(mut file: File) -> std::io::Result<Content> {
    let start = read_start(&mut file, SMALL_FILE_BYTES)?;
    Ok(if (start.len() as u64) < SMALL_FILE_BYTES {
        Content::Bytes(start)
    } else {
        Content::Reader(Box::new(Cursor::new(start).chain(file)))
    })
}

fn read_start(file: &mut File, most: u64) -> std::io::Result<Vec<u8>> {
    // Reserved in one step: growing would take a call for each step.
    let mut start = Vec::with_capacity(usize::try_from(most).unwrap_or(0));
    file.take(most).read_to_end(&mut start)?;
    Ok(start)
}

/// A device may have no end, so it is read until the next read would block.
fn device_content(mut file: File, offset: Option<u64>, length: u64) -> std::io::Result<Content> {
    if let Some(offset) = offset {
        file.seek(SeekFrom::Start(offset))?;
    }
    let mut device = UntilDry(file.take(length));
    // The client can still get an error of the first read.
    let mut start = vec![0; usize::try_from(length.min(SMALL_FILE_BYTES)).unwrap_or(0)];
    let count = device.read(&mut start)?;
    start.truncate(count);
    Ok(if count == 0 {
        Content::Bytes(start)
    } else {
        Content::Reader(Box::new(Cursor::new(start).chain(device)))
    })
}

/// A reader that ends where the next read would block.
struct UntilDry<R>(R);

impl<R: Read> Read for UntilDry<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self.0.read(buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            other => other,
        }
    }
}
