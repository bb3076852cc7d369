//! Archives of the machine that a start imports, each content once.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use super::machine::GivesWay;
use super::{Origin, Store};
use crate::error::{Error, Kind, Result};
use crate::files::hash::Hasher;
use crate::limits::ledger::Ledger;
use crate::logging;

/// Bytes that are read at a time.
const PIECE_BYTES: usize = 64 * 1024;

impl Store {
    /// Imports an archive unless the snapshot with this name has the same content.
    ///
    /// # Errors
    /// As [`Store::import`]; the file cannot be read, or changes meanwhile.
    pub(in crate::host) fn import_file(
        self: &Arc<Self>,
        name: &str,
        path: &Path,
        ledger: &Arc<Ledger>,
    ) -> Result<()> {
        let failed = |error| Error::io("cannot read it", &error);
        let mut file = File::open(path).map_err(failed)?;
        let found = state_of(&file).map_err(failed)?;
        let known = self.find(name);
        let origin = known.as_ref().and_then(|known| known.origin.as_ref());
        if origin.is_some_and(|origin| origin.found == found) {
            return Ok(());
        }
        let mut hasher = Hasher::default();
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            match file.read(&mut piece).map_err(failed)? {
                0 => break,
                count => hasher.feed(&piece[..count]),
            }
        }
        let sha256 = hasher.finish().to_string();
        if let Some(known) = &known
            && origin.is_some_and(|origin| origin.sha256 == sha256)
        {
            self.note_found(&known.id, &found);
            return Ok(());
        }
        file.rewind().map_err(failed)?;
        let mut input = GivesWay::new(&file, ledger);
        let import = self.import(&mut input, ledger)?;
        if state_of(&file).map_err(failed)? != found {
            return Err(Error::new(Kind::Changed, "it was changed meanwhile"));
        }
        let made = import.complete(Some(name), Some(Origin { found, sha256 }))?;
        logging::info(format_args!(
            "template {name} imported as snapshot {}",
            made.id
        ));
        Ok(())
    }
}

/// What tells that a file is another one, or was changed.
fn state_of(file: &File) -> std::io::Result<String> {
    let status = file.metadata()?;
    let numbers = [status.dev(), status.ino(), status.len()];
    let [seconds, nanoseconds] = [status.mtime(), status.mtime_nsec()];
    Ok(format!("{numbers:?} {seconds}.{nanoseconds:09}"))
}
