//! A template of the machine itself: a copy of its directories of programs, and only of what everybody there may read.
//!
//! It is an archive that is never written: one thread packs what another one unpacks.

use std::io::{self, BufRead, BufReader, PipeWriter, Read, Write, pipe};
use std::path::Path;
use std::sync::Arc;

use super::{Import, MACHINE, Snapshot, Store, new_id};
use crate::client::Disconnected;
use crate::confine::PROGRAMS;
use crate::error::{Error, Result};
use crate::files::search::{Filter, Matcher};
use crate::files::{BrokenOff, Extent, Input, Packing, Root, Sink};
use crate::limits::ledger::Ledger;
use crate::logging;
use crate::threads::Thread;
use crate::threads::lock::{Mutex, lock};
use crate::threads::priority::BackgroundTurn;
use crate::workspace::Archive;

/// Bytes that are read in one go.
const PIECE_BYTES: usize = 64 << 10;

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
        let import = self.import_tree(new_id()?, root, &patterns, extent, ledger)?;
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
        root: Root,
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
            self.import_as(id, false, &mut GivesWay::new(read, ledger), ledger)
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
    root: Root,
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
    let archive = Archive::of_root(root, ledger, packing)?;
    match archive.send(&mut ToStore(write), &|_| Vec::new()) {
        Err(BrokenOff::Failed(error)) => Err(error),
        // Who reads it says why it does no more.
        Ok(()) | Err(BrokenOff::Disconnected) => Ok(()),
    }
}

/// Reads what is in a file or a pipe, and gives way to others of the tenant before each piece. It ends with the workspace.
pub(in crate::host) struct GivesWay<R> {
    source: BufReader<R>,
    turn: BackgroundTurn,
}

impl<R: Read> GivesWay<R> {
    pub(in crate::host) fn new(source: R, ledger: &Ledger) -> Self {
        Self {
            source: BufReader::with_capacity(PIECE_BYTES, source),
            turn: BackgroundTurn::of_this_thread(&ledger.work).after_others(),
        }
    }
}

impl<R: Read> Input for GivesWay<R> {
    fn fill(&mut self) -> io::Result<&[u8]> {
        self.give_way()?;
        self.source.fill_buf()
    }

    fn used(&mut self, count: usize) {
        self.source.consume(count);
    }

    fn give_way(&mut self) -> io::Result<()> {
        let passed = self.turn.pass(&mut || Ok(()));
        passed.map_err(|_| io::ErrorKind::ConnectionAborted.into())
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
