//! Hashing files.

use crate::client::{Interrupt, Stopped};
use crate::error::{Error, Result};
use crate::files::hash::{FileHash, Hashed};
use crate::files::name::FilePath;
use crate::ledger::{Charge, Item};
use crate::workspace::lease::{Lease, Workspace};

/// Most files of one request.
const MAX_FILES: usize = 10_000;

/// Bytes in one step, and the least for a tenant that holds its share of the server's memory.
const STEP_BYTES: usize = 256 * 1024;
const LEAST_STEP_BYTES: usize = 8 * 1024;

/// What the result for a file takes, besides twice its path: for a failure names it again.
const RESULT_BYTES: usize = 512;

/// Files that are being hashed, in the order in which they were named.
pub struct HashFiles {
    lease: Lease,
    paths: std::vec::IntoIter<FilePath>,
    /// The file that is read now.
    current: Option<(FilePath, FileHash)>,
    /// What came of the files before it.
    results: Vec<(FilePath, Result<Hashed>)>,
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
            .map(|path| 4 * path.bytes().len() + RESULT_BYTES);
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
    /// It was interrupted.
    pub fn run(
        &mut self,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Vec<(FilePath, Result<Hashed>)>, Stopped> {
        let ledger = &self.lease.ledger;
        let charge = ledger.charge_up_to(Item::Responses, STEP_BYTES, LEAST_STEP_BYTES);
        let mut buffer = vec![0; charge.bytes()];
        loop {
            interrupt.check()?;
            let Some((path, hash)) = &mut self.current else {
                let Some(path) = self.paths.next() else {
                    return Ok(std::mem::take(&mut self.results));
                };
                match self.lease.files()?.open(&path, false) {
                    Ok(opened) => self.current = Some((path, FileHash::new(opened))),
                    Err(error) => self.results.push((path, Err(error))),
                }
                continue;
            };
            let result = hash.step(&*path, &mut buffer).transpose();
            if let Some(result) = result
                && let Some((path, _)) = self.current.take()
            {
                self.results.push((path, result));
            }
        }
    }
}
