//! A template of the machine itself: a copy of its directories of programs, and only of what everybody there may read.
//!
//! It is an archive that is never written: one thread packs what another one unpacks.

use std::io::{BufReader, PipeWriter, Write, pipe};
use std::path::Path;
use std::sync::Arc;

use super::{Import, MACHINE, Snapshot, Store, new_id};
use crate::client::Disconnected;
use crate::confine::PROGRAMS;
use crate::error::{Error, Result};
use crate::files::name::FilePath;
use crate::files::search::{Filter, Matcher};
use crate::files::{BrokenOff, Extent, Packing, Root, Sink};
use crate::limits::ledger::Ledger;
use crate::logging;
use crate::threads::Thread;
use crate::threads::lock::{Mutex, lock};

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
        let root = Root::machine(Path::new("/"))?;
        let (patterns, extent) = (programs(), Extent::PublicRoot);
        let import = self.import_tree(new_id()?, &root, &patterns, extent, ledger)?;
        let made = import.complete(Some(MACHINE), None)?;
        logging::info(format_args!("the machine is snapshot {}", made.id));
        Ok(made)
    }

    /// Copies the tree of a root, but for what has a path of these patterns.
    ///
    /// # Errors
    /// As [`Store::import`]; `BadArchive` if it cannot be read to its end.
    pub(in crate::host) fn import_tree(
        self: &Arc<Self>,
        id: String,
        root: &Root,
        excluded: &[String],
        extent: Extent,
        ledger: &Arc<Ledger>,
    ) -> Result<Import> {
        let failed = |error| Error::io("cannot copy the root of a machine", &error);
        let (read, write) = pipe().map_err(failed)?;
        let unpacked = Mutex::new(None);
        let import = std::thread::scope(|scope| {
            let pack = || {
                // What is not packed to its end is no archive for whoever reads it.
                let packed = pack(root, excluded, extent, write, ledger);
                *lock(&unpacked) = packed.err();
            };
            let started = Thread::new("packing").start_scoped(scope, pack);
            started.map_err(failed)?;
            self.import_as(id, &mut BufReader::new(read), ledger)
        });
        import.map_err(|error| lock(&unpacked).take().unwrap_or(error))
    }
}

/// What of the machine is no program.
fn programs() -> Vec<String> {
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
    patterns
}

fn pack(
    root: &Root,
    excluded: &[String],
    extent: Extent,
    write: PipeWriter,
    ledger: &Arc<Ledger>,
) -> Result<()> {
    let packing = Packing {
        filter: Filter {
            exclude: Matcher::new(excluded.iter().map(String::as_bytes))?,
            ..Filter::default()
        },
        is_compressed: false,
        // What everybody may read of the machine changes while it is read.
        fails: extent == Extent::Root,
        extent,
        newer_than: None,
    };
    let files = root.files()?;
    let source = files.open_source(&FilePath::new(b"/")?)?;
    let describe = |_: &_| Vec::new();
    match files.pack(source, packing, ledger, &mut ToStore(write), &describe) {
        Err(BrokenOff::Failed(error)) => Err(error),
        // Who reads it says why it does no more.
        Ok(()) | Err(BrokenOff::Disconnected) => Ok(()),
    }
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
