//! Hashing files.

use std::sync::Arc;

use crate::client::{Interrupt, Stopped};
use crate::error::{Error, Result};
use crate::files::hash::{FileHash, Hashed};
use crate::files::name::FilePath;
use crate::limits::ledger::{Charge, Item};
use crate::threads::priority::run_in_background;
use crate::workspace::lease::{Lease, Workspace};

/// Most files of one request.
const MAX_FILES: usize = 10_000;

/// Bytes in one step, and the least for a tenant that holds its share of the server's memory.
const STEP_BYTES: usize = 256 * 1024;
const LEAST_STEP_BYTES: usize = 8 * 1024;

/// What is hashed before a thread that gives way to others is worth its start, in bytes: a file of 1 MiB, or
/// 80 small ones, because opening a file counts too.
const IN_PLACE_BYTES: u64 = 5 << 18;
const OPENING_BYTES: u64 = 16 * 1024;

/// What the result for a file takes, besides three times its path, which a failure names again.
const RESULT_BYTES: usize = 512;

/// What came of files, in the order in which they were named.
type Results = Vec<(FilePath, Result<Hashed>)>;

/// Files that are being hashed, in the order in which they were named.
pub struct HashFiles {
    lease: Lease,
    paths: std::vec::IntoIter<FilePath>,
    /// The file that is read now.
    current: Option<(FilePath, FileHash)>,
    /// What came of the files before it.
    results: Results,
    _charge: Charge,
}

impl Workspace {
    /// Begins to hash files. What is wrong with one of them is a result for that one.
    ///
    /// # Errors
    /// There are none or too many; `OverLimit`.
    pub fn hash_files(&self, paths: Vec<FilePath>) -> Result<HashFiles> {
        if paths.is_empty() || paths.len() > MAX_FILES {
            let count = paths.len();
            return Err(Error::invalid(format!(
                "paths has {count} values; it takes 1 to {MAX_FILES}"
            )));
        }
        let bytes = paths
            .iter()
            .map(|path| 3 * path.bytes().len() + RESULT_BYTES);
        Ok(HashFiles {
            lease: self.share()?,
            current: None,
            results: Vec::new(),
            _charge: self.ledger.charge(Item::Responses, bytes.sum())?,
            paths: paths.into_iter(),
        })
    }

    /// Begins to hash one file.
    ///
    /// # Errors
    /// As [`Workspace::open_file`]; `OverLimit`.
    pub fn hash_file(&self, path: FilePath) -> Result<HashFiles> {
        let opened = self.files()?.open(&path, false)?;
        let mut files = self.hash_files(vec![path])?;
        files.current = files.paths.next().map(|path| (path, FileHash::new(opened)));
        Ok(files)
    }
}

impl HashFiles {
    /// Hashes until all files are done, and returns the results.
    ///
    /// # Errors
    /// It was interrupted; `NoThreads`.
    pub fn run(&mut self, interrupt: &mut dyn Interrupt) -> std::result::Result<Results, Stopped> {
        let mut results = self.advance(IN_PLACE_BYTES, interrupt);
        if let Ok(None) = results {
            let background = Arc::clone(&self.lease.background);
            run_in_background(&background, interrupt, &mut |interrupt| {
                results = self.advance(u64::MAX, interrupt);
            })?;
        }
        Ok(results?.unwrap_or_default())
    }

    /// Hashes about this many bytes. The results, if all files are done.
    fn advance(
        &mut self,
        mut budget: u64,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Option<Results>, Stopped> {
        let ledger = &self.lease.ledger;
        let charge = ledger.charge_up_to(Item::Responses, STEP_BYTES, LEAST_STEP_BYTES);
        let mut buffer = vec![0; charge.bytes()];
        loop {
            interrupt.check()?;
            if budget == 0 {
                return Ok(None);
            }
            let Some((path, hash)) = &mut self.current else {
                let Some(path) = self.paths.next() else {
                    return Ok(Some(std::mem::take(&mut self.results)));
                };
                budget = budget.saturating_sub(OPENING_BYTES);
                match self.lease.files()?.open(&path, false) {
                    Ok(opened) => self.current = Some((path, FileHash::new(opened))),
                    Err(error) => self.results.push((path, Err(error))),
                }
                continue;
            };
            let before = hash.bytes();
            let result = hash.step(&*path, &mut buffer).transpose();
            budget = budget.saturating_sub(hash.bytes() - before);
            if let Some(result) = result
                && let Some((path, _)) = self.current.take()
            {
                self.results.push((path, result));
            }
        }
    }
}
