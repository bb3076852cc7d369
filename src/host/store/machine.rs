//! A template of the machine itself: a copy of its directories of programs, and only of what everybody there may read.
//!
//! It is an archive that is never written: one thread packs what another one unpacks.

use std::io::{BufReader, PipeWriter, Write, pipe};
use std::path::Path;
use std::sync::Arc;

use super::{MACHINE, Snapshot, Store};
use crate::client::Disconnected;
use crate::confine::PROGRAMS;
use crate::error::{Error, Result};
use crate::files::name::FilePath;
use crate::files::search::{Filter, Matcher};
use crate::files::{Extent, Packing, Root, Sink};
use crate::limits::ledger::Ledger;
use crate::logging;
use crate::threads::Thread;
use crate::threads::panics::joined;

/// Where some machines have what a link in /etc leads to, without which no certificate is known.
const CERTIFICATES: [&str; 3] = ["/var", "/var/lib", "/var/lib/ca-certificates"];

impl Store {
    /// Copies the machine, and gives the copy its name.
    ///
    /// # Errors
    /// `NoSpace` if the bounds or the disk leave no room; `System`; `NoThreads`. Nothing is left then.
    pub(in crate::host) fn import_machine(
        self: &Arc<Self>,
        ledger: &Arc<Ledger>,
    ) -> Result<Snapshot> {
        let failed = |error| Error::io("cannot copy the machine", &error);
        let (read, write) = pipe().map_err(failed)?;
        let charged = Arc::clone(ledger);
        let pack = move || {
            // What is not packed to its end is no archive for whoever reads it.
            if let Err(error) = pack(write, &charged) {
                logging::info(format_args!("cannot copy the machine: {error}"));
            }
        };
        let packing = Thread::new("packing").start(pack).map_err(failed)?;
        // The pipe ends with the import, and with it the packing.
        let import = self.import(&mut BufReader::new(read), ledger);
        joined(packing.join());
        let made = import?.complete(Some(MACHINE), None)?;
        logging::info(format_args!("the machine is snapshot {}", made.id));
        Ok(made)
    }
}

fn pack(write: PipeWriter, ledger: &Arc<Ledger>) -> Result<()> {
    let mut patterns = vec!["/*".to_owned()];
    for directory in PROGRAMS {
        patterns.push(format!("!{directory}"));
    }
    for directory in CERTIFICATES {
        patterns.push(format!("!{directory}"));
        patterns.push(format!("{directory}/*"));
    }
    // All of the last one.
    patterns.pop();
    let packing = Packing {
        filter: Filter {
            exclude: Matcher::new(patterns.iter().map(String::as_bytes))?,
            ..Filter::default()
        },
        is_compressed: false,
        fails: false,
        extent: Extent::PublicRoot,
        newer_than: None,
    };
    let root = Root::machine(Path::new("/"))?;
    let files = root.files()?;
    let source = files.open_source(&FilePath::new(b"/")?)?;
    // Who reads it says why it does no more.
    let _ = files.pack(source, packing, ledger, &mut ToStore(write), &|_| {
        Vec::new()
    });
    Ok(())
}

/// Hands pieces of the archive over.
struct ToStore(PipeWriter);

impl Sink for ToStore {
    fn send(&mut self, bytes: &[u8]) -> std::result::Result<(), Disconnected> {
        self.0.write_all(bytes).map_err(|_| Disconnected)
    }

    fn look(&mut self) -> std::result::Result<(), Disconnected> {
        Ok(())
    }
}
