//! Whole trees as archives: who may do what, how much memory it takes, and when it ends.
//!
//! The archive is a stream in both directions; nothing here holds more of it than a buffer, which is charged
//! to the tenant. What an archive is, and where its members may go, is the matter of
//! [`files::archive`](crate::files). Nothing here knows HTTP: bytes come from an [`UploadSource`] and go to a
//! [`Sink`].

use std::sync::Arc;

use crate::client::Disconnected;
use crate::error::{Error, Result};
use crate::files::name::FilePath;
use crate::files::{
    BrokenOff, Kept, Overwrite, Packed, Packing, Root, Sink, Source, Unpacked, Unpacking,
};
use crate::limits::ledger::Ledger;
use crate::threads::priority::{BackgroundTurn, BackgroundWork};
use crate::workspace::lease::Workspace;
use crate::workspace::upload::{UploadReader, UploadSource};

/// Most files, directories and links of an archive unless the client sets a limit.
pub const MAX_ARCHIVE_FILES: u64 = 1_000_000;

/// An archive that is made while it is sent.
pub struct Archive {
    root: Arc<Root>,
    ledger: Arc<Ledger>,
    background: Arc<BackgroundWork>,
    source: Source,
    packing: Packing,
}

impl Archive {
    /// Prepares to pack a whole root that belongs to no workspace.
    ///
    /// # Errors
    /// `System`.
    pub fn of_root(root: Root, ledger: &Arc<Ledger>, packing: Packing) -> Result<Self> {
        let source = root.files()?.open_source(&FilePath::new(b"/")?)?;
        Ok(Self {
            source,
            root: Arc::new(root),
            ledger: Arc::clone(ledger),
            background: Arc::clone(&ledger.work),
            packing,
        })
    }

    /// Whether it is compressed.
    pub fn is_compressed(&self) -> bool {
        self.packing.is_compressed
    }

    /// Sends the archive. `describe` writes the report at its end.
    ///
    /// # Errors
    /// The archive is not complete.
    pub fn send(
        self,
        sink: &mut dyn Sink,
        describe: &dyn Fn(&Packed) -> Vec<u8>,
    ) -> std::result::Result<(), BrokenOff> {
        let files = self.root.files()?;
        let turn = BackgroundTurn::of_this_thread(&self.background).after_others();
        let sink = &mut GivesWay { sink, turn };
        files.pack(self.source, self.packing, &self.ledger, sink, describe)
    }
}

/// Gives way to others each time that something is sent. The end of the workspace ends it as that of the client does.
struct GivesWay<'a> {
    sink: &'a mut dyn Sink,
    turn: BackgroundTurn,
}

impl Sink for GivesWay<'_> {
    fn send(&mut self, bytes: &[u8]) -> std::result::Result<(), Disconnected> {
        self.sink.send(bytes)?;
        self.look()
    }

    fn look(&mut self) -> std::result::Result<(), Disconnected> {
        let passed = self.turn.pass(&mut || Ok(self.sink.look()?));
        passed.map_err(|_| Disconnected)
    }
}

impl Workspace {
    /// Prepares to pack a directory, or a file.
    ///
    /// # Errors
    /// `NotFound`, `Forbidden`, or `NotRegular`.
    pub fn pack_archive(&self, path: &FilePath, packing: Packing) -> Result<Archive> {
        Ok(Archive {
            source: self.files()?.open_source(path)?,
            root: Arc::clone(&self.root),
            ledger: Arc::clone(&self.ledger),
            background: Arc::clone(&self.background),
            packing,
        })
    }

    /// Unpacks the archive that `source` sends into a directory; `is_atomic`: all of it or nothing.
    ///
    /// # Errors
    /// The archive is broken or has what must not be unpacked, a limit is reached, a file is in the way,
    /// the disk is full, the source breaks off, or the workspace ended meanwhile. Unless `is_atomic`,
    /// what came before stays.
    pub fn unpack_archive<S: UploadSource>(
        &self,
        path: &FilePath,
        options: Unpacking,
        is_atomic: bool,
        source: &mut S,
    ) -> std::result::Result<Unpacked, S::Error> {
        self.check_unpacking(options, is_atomic)?;
        let files = self.files()?;
        let ledger = &self.ledger;
        let mut input = UploadReader::new(source, &self.background, ledger);
        let unpacked = if is_atomic && !options.dry_run {
            files.unpack_atomically(path, options, &mut input, ledger)
        } else {
            files.unpack(path, options, &mut input, ledger)
        };
        drop(files);
        match (unpacked, input.take_error()) {
            (Err(_), Some(broken_off)) => Err(broken_off),
            (unpacked, _) => {
                let unpacked = unpacked?;
                self.check_open()?;
                Ok(unpacked)
            }
        }
    }

    fn check_unpacking(&self, options: Unpacking, is_atomic: bool) -> Result<()> {
        if options.kept != Kept::Files && !self.files()?.may_set_owners() {
            let text = "owners=1 needs a dedicated machine on which the server runs as root, or root of a sandbox with a root \
                        of its own";
            return Err(Error::invalid(text));
        }
        if is_atomic && options.overwrite == Overwrite::Keep {
            let text =
                "overwrite=keep does not go with atomic=1, which leaves only what the archive has";
            return Err(Error::invalid(text));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    struct Looked(usize);

    impl Sink for Looked {
        fn send(&mut self, _: &[u8]) -> std::result::Result<(), Disconnected> {
            Ok(())
        }

        fn look(&mut self) -> std::result::Result<(), Disconnected> {
            self.0 += 1;
            Ok(())
        }
    }

    #[test]
    fn an_archive_pauses_for_others_of_its_tenant_and_looks_after_its_client() {
        let (begun, owed) = (Instant::now(), Duration::from_secs(1));
        let turn = BackgroundTurn::of_this_thread(&BackgroundWork::owing(owed));
        let (mut looked, mut sent) = (Looked(0), 0);
        let mut sink = GivesWay {
            sink: &mut looked,
            turn,
        };
        // Not asked yet what it used.
        while begun.elapsed() < owed {
            sink.send(b"piece").unwrap();
            sent += 1;
        }
        assert!(looked.0 > sent, "{} looks, {sent} pieces", looked.0);
    }
}
