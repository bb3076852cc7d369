//! Every operation on a workspace, typed in and typed out: the policy that all doors share.
//!
//! Defaults, limits and the rules that join several mechanisms are here; a door only translates its
//! wire into these types and the results back. May use the mechanisms (`process`, `files`, `ports`);
//! must not use HTTP or JSON, so errors carry kinds and no statuses.

use std::sync::Arc;

use super::content::Readable;
use super::lease::Workspace;
use super::upload::{UploadSource, receive_range, receive_whole};
use crate::command::{CommandSpec, StdinSource};
use crate::error::{Error, Kind, Result};
use crate::files::name::FilePath;
use crate::files::{Entry, Page};
use crate::ledger::Item;
use crate::process::registry::StartOutcome;
use crate::process::ring::Cursor;
use crate::process::{OnDisconnect, Process, Subscriber};

/// Entries of a page unless the client sets a limit. Clients that do not page get whole directories
/// of ordinary size.
const PAGE_ENTRIES: u64 = 10_000;
const MAX_PAGE_ENTRIES: u64 = 100_000;

/// Bytes of input that one step passes to a process.
const STDIN_BYTES: usize = 64 * 1024;

/// The same in a workspace that holds its share of the server's memory.
const LEAST_STDIN_BYTES: usize = 4 * 1024;

/// The result of a request to run a command.
pub enum Run {
    /// The process runs without a client.
    Background(Arc<Process>),
    /// One client follows the process.
    Foreground(Foreground),
}

/// A process that one client follows to its end: one it started, or one it joined by its id.
pub struct Foreground(StartOutcome);

impl Foreground {
    /// The process.
    pub fn process(&self) -> &Arc<Process> {
        match &self.0 {
            StartOutcome::Started(pump) => pump.process(),
            StartOutcome::AlreadyExists(process) => process,
        }
    }

    /// Whether the process was already there.
    pub fn is_attached(&self) -> bool {
        matches!(self.0, StartOutcome::AlreadyExists(_))
    }

    /// Sends the output from its beginning, and the exit. `on_disconnect` decides about the process
    /// if the client goes away first.
    pub fn follow(self, subscriber: &mut dyn Subscriber, on_disconnect: OnDisconnect) {
        match self.0 {
            StartOutcome::Started(pump) => pump.run_foreground(subscriber, on_disconnect),
            StartOutcome::AlreadyExists(process) => {
                if process.follow(Cursor::default(), true, subscriber).is_err() {
                    process.leave(on_disconnect);
                }
            }
        }
    }
}

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

impl Workspace {
    /// Runs a command, or finds the process that already has its id. The input of a background
    /// command stays open unless it is given.
    ///
    /// # Errors
    /// The command cannot start, or its id belongs to a different command.
    pub fn run(&self, mut spec: CommandSpec) -> Result<Run> {
        let is_background = spec.background;
        if is_background && spec.input == StdinSource::Empty {
            spec.input = StdinSource::Open;
        }
        let run = Foreground(self.processes.start(spec, &self.confinement)?);
        if is_background {
            // Dropping the pump leaves the process to the supervisor.
            return Ok(Run::Background(Arc::clone(run.process())));
        }
        if run.is_attached() {
            run.process().join();
        }
        Ok(Run::Foreground(run))
    }

    /// A process by its id, or by its pid.
    ///
    /// # Errors
    /// `NotFound` if no known process has that name.
    pub fn process(&self, name: &str) -> Result<Arc<Process>> {
        self.processes.find(name).ok_or_else(|| no_process(name))
    }

    /// Sends a signal to a process's group. False if the process has ended.
    ///
    /// # Errors
    /// `NotFound`, or the kernel refuses the signal.
    pub fn signal(&self, process: &str, signal: i32) -> Result<(Arc<Process>, bool)> {
        let process = self.process(process)?;
        let signaled = process.signal(signal)?;
        Ok((process, signaled))
    }

    /// Writes all of `source` to a process's input, and closes the input if `eof` is set. Returns
    /// the bytes written.
    ///
    /// # Errors
    /// `NotFound`; the input is closed or another client is writing to it; the source breaks off.
    pub fn write_stdin<S: UploadSource>(
        &self,
        process: &str,
        source: &mut S,
        eof: bool,
    ) -> std::result::Result<u64, S::Error> {
        let mut writer = self.process(process)?.stdin()?;
        let mut client = source.client();
        let charge = self
            .ledger
            .charge_up_to(Item::Bodies, STDIN_BYTES, LEAST_STDIN_BYTES);
        let mut buffer = vec![0; charge.bytes()];
        let mut written = 0;
        loop {
            let count = source.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            writer.write(&buffer[..count], &mut *client)?;
            written += count as u64;
        }
        if eof {
            writer.close();
        }
        Ok(written)
    }

    /// Kills a process with its descendants and forgets it. True if this call stopped it; false if
    /// it had ended or was deleted before.
    ///
    /// # Errors
    /// `NotFound` if there never was a process of that name; or the kernel has not let it die yet.
    pub fn delete_process(&self, name: &str) -> Result<bool> {
        let killed = self.processes.delete(name)?;
        killed.ok_or_else(|| no_process(name))
    }

    /// Opens a file for reading; a device only `with_devices`, since it may have no end.
    ///
    /// # Errors
    /// `NotFound`, `IsDirectory`, or `NotRegular` where reading could block without end.
    pub fn open_file(&self, path: FilePath, with_devices: bool) -> Result<Readable> {
        let opened = self.files()?.open(&path, with_devices)?;
        Ok(Readable::new(path, opened))
    }

    /// Writes what `source` sends to a part of a file, which is created if it is missing. Returns the
    /// size of the file. `mode` has permission bits; `None` keeps those of an existing file.
    ///
    /// # Errors
    /// The place cannot be written to, the disk is full, the source breaks off, or the workspace
    /// ended meanwhile. A file that was to be replaced as a whole is then unchanged.
    pub fn write_file<S: UploadSource>(
        &self,
        path: &FilePath,
        part: FilePart,
        mode: Option<u32>,
        make_parents: bool,
        source: &mut S,
    ) -> std::result::Result<u64, S::Error> {
        let files = self.files()?;
        let size = match part {
            FilePart::Whole => {
                let upload = files.upload(path, mode, make_parents)?;
                receive_whole(source, upload, &self.ledger)?
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
                let range = files.write_range(path, offset, truncate_to, mode, make_parents)?;
                receive_range(source, range, &self.ledger)?
            }
        };
        self.check_open()?;
        Ok(size)
    }

    /// One page of a directory: the entries after the name `after`, at most `limit`.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, or a limit that is not accepted.
    pub fn list_files(
        &self,
        path: &FilePath,
        after: Option<&FilePath>,
        limit: Option<u64>,
    ) -> Result<Page> {
        let limit = limit.unwrap_or(PAGE_ENTRIES);
        if !(1..=MAX_PAGE_ENTRIES).contains(&limit) {
            return Err(Error::invalid(format!(
                "limit={limit}: not accepted; it takes 1 to {MAX_PAGE_ENTRIES}"
            )));
        }
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let names = self.ledger.charge(Item::Responses, 0)?;
        self.files()?
            .list(path, after.map(FilePath::bytes), limit, names)
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
    /// `NotFound`, `NotEmpty`, or `Unfinished` if there is too much for one request.
    pub fn delete_file(&self, path: &FilePath, recursive: bool) -> Result<()> {
        self.files()?.remove(path, recursive)
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
    /// `NotFound`, `CrossDevice`, the target cannot be replaced, or the workspace ended meanwhile.
    pub fn move_file(&self, from: &FilePath, to: &FilePath) -> Result<()> {
        self.files()?.rename(from, to)?;
        self.check_open()
    }
}

fn no_process(name: &str) -> Error {
    let text = format!("there is no process {name}; GET processes lists those that are known");
    Error::new(Kind::NotFound, text)
}
