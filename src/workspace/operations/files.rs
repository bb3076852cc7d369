//! Reading, writing and listing files.

use crate::client::{Interrupt, Peer, Stopped};
use crate::error::{Error, Result};
use crate::files::hash::{Digest, Hasher};
use crate::files::name::FilePath;
use crate::files::{Attribute, Condition, Entry, Page};
use crate::limits::ledger::Item;
use crate::workspace::content::Readable;
use crate::workspace::lease::Workspace;
use crate::workspace::upload::{
    UploadSource, WhileConnected, receive_range, receive_whole, unless_stopped,
};

/// Entries of a page unless the client sets a limit. Clients that do not page get whole directories
/// of ordinary size.
const PAGE_ENTRIES: u64 = 10_000;
const MAX_PAGE_ENTRIES: u64 = 100_000;

/// The part of a file that a write replaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FilePart {
    /// All of it, in one step: readers see the old or the new content.
    Whole,
    /// A range, in place.
    Range {
        /// The first byte.
        offset: u64,
        /// The final size of the file; `None` keeps the bytes beyond the range.
        truncate_to: Option<u64>,
    },
}

/// How a file is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileWrite {
    /// What is replaced.
    pub part: FilePart,
    /// Permission bits; `None` keeps those of an existing file.
    pub mode: Option<u32>,
    /// Whether missing directories are made.
    pub makes_parents: bool,
    /// What must hold. Only for a whole file.
    pub condition: Condition,
    /// Whether to hash what is written. Only for a whole file.
    pub is_hashed: bool,
    /// Extended attributes of the new file, in place of all whose names begin so. Only for a whole file.
    pub attributes: Option<(&'static str, Vec<Attribute>)>,
}

impl Workspace {
    /// Opens a file for reading; a device only `with_devices`, since it may have no end.
    ///
    /// # Errors
    /// `NotFound`, `IsDirectory`, or `NotRegular` where reading could block without end.
    pub fn open_file(&self, path: FilePath, with_devices: bool) -> Result<Readable> {
        let opened = self.files()?.open(&path, with_devices)?;
        Ok(Readable::new(path, opened))
    }

    /// Writes what `source` sends to a part of a file, which is created if it is missing. Returns the
    /// size of the file, and the hash of what was written if it was asked for.
    ///
    /// # Errors
    /// The condition does not hold, the place cannot be written to, the disk is full, the source breaks
    /// off, or the workspace ended meanwhile. A file that was to be replaced as a whole is then unchanged.
    pub fn write_file<S: UploadSource>(
        &self,
        path: &FilePath,
        how: &FileWrite,
        source: &mut S,
    ) -> std::result::Result<(u64, Option<Digest>), S::Error> {
        let FileWrite {
            part,
            mode,
            makes_parents,
            condition,
            is_hashed,
            ref attributes,
        } = *how;
        if part != FilePart::Whole && (condition != Condition::Always || is_hashed) {
            let text = "if_sha256, if_absent and hash go with whole files, so not with offset";
            return Err(Error::invalid(text).into());
        }
        let mut hasher = is_hashed.then(Hasher::default);
        let files = self.files()?;
        let size = match part {
            FilePart::Whole => {
                self.check_condition(path, condition, source.client())?;
                let mut upload = files.upload(path, mode, makes_parents)?;
                if let Some((prefix, attributes)) = attributes {
                    upload.set_attributes(prefix, attributes)?;
                }
                receive_whole(self, source, upload, condition, hasher.as_mut())?
            }
            FilePart::Range {
                offset,
                truncate_to,
            } => {
                let end = offset.checked_add(source.remaining().unwrap_or(0));
                if end.is_none_or(|end| i64::try_from(end).is_err()) {
                    let text = "offset and the body's length together are larger than any file";
                    return Err(Error::invalid(text).into());
                }
                let range = files.write_range(path, offset, truncate_to, mode, makes_parents)?;
                receive_range(self, source, range)?
            }
        };
        self.check_open()?;
        Ok((size, hasher.map(Hasher::finish)))
    }

    /// Checks a condition before anything is received: once for all sources.
    fn check_condition(
        &self,
        path: &FilePath,
        condition: Condition,
        client: Box<dyn Peer + Send>,
    ) -> Result<()> {
        let mut check =
            |interrupt: &mut dyn Interrupt| self.files()?.check(path, condition, interrupt);
        self.work_if_long(&mut WhileConnected::new(client), &mut check)
            .map_err(unless_stopped)
    }

    /// One page of a directory: the entries after the name `after`, at most `limit`.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, or a limit that is not accepted; or it was interrupted.
    pub fn list_files(
        &self,
        path: &FilePath,
        after: Option<&FilePath>,
        limit: Option<u64>,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Page, Stopped> {
        let limit = limit.unwrap_or(PAGE_ENTRIES);
        if !(1..=MAX_PAGE_ENTRIES).contains(&limit) {
            return Err(Error::invalid(format_args!(
                "limit={limit}: not accepted; it takes 1 to {MAX_PAGE_ENTRIES}"
            ))
            .into());
        }
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let names = self.ledger.charge(Item::Responses, 0);
        let names = names.map_err(Error::from)?;
        let after = after.map(FilePath::bytes);
        self.files()?
            .list(path, after, limit, names, &mut self.paced(interrupt))
    }

    /// Describes a file; a link is not followed.
    ///
    /// # Errors
    /// `NotFound`, or the path may not be searched.
    pub fn stat_file(&self, path: &FilePath) -> Result<Entry> {
        self.files()?.stat(path)
    }

    /// Deletes a file, or with `recursive` a directory and everything in it.
    ///
    /// # Errors
    /// `NotFound`, `NotEmpty`, or `Unfinished` if there is too much for one request; or it was interrupted.
    pub fn delete_file(
        &self,
        path: &FilePath,
        recursive: bool,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<(), Stopped> {
        let names = self.ledger.charge(Item::Responses, 0);
        let names = names.map_err(Error::from)?;
        self.files()?
            .remove(path, recursive, Some(names), &mut self.paced(interrupt))
    }

    /// Makes a directory and its parents. An existing directory is no error and takes the `mode`.
    ///
    /// # Errors
    /// Something that is no directory is in the way, or the workspace ended meanwhile.
    pub fn make_directory(&self, path: &FilePath, mode: Option<u32>) -> Result<()> {
        self.files()?.make_directory(path, mode)?;
        self.check_open()
    }

    /// Renames a file or directory; makes parents and replaces a file.
    ///
    /// # Errors
    /// `NotFound`, `CrossDevice`, the target cannot be replaced, or the workspace ended meanwhile; or it was interrupted.
    pub fn move_file(
        &self,
        from: &FilePath,
        to: &FilePath,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<(), Stopped> {
        self.files()?.rename(from, to, &mut self.paced(interrupt))?;
        Ok(self.check_open()?)
    }
}
