//! What is written down of each sandbox, so that the next server has it again: a file for each, in a directory that only
//! root can enter.
//!
//! A record is written beside and renamed to `ID.N`, where `N` counts its changes. The one before stays until the file
//! system was synchronized, so that a power cut costs the changes of the last second and no sandbox: the start takes the
//! highest whole one. Two further names say that something was not finished: `ID.making` has no sandbox that a client
//! knows, and `ID.deleting` is the first step of a deletion, which a start finishes.
//!
//! [`record`] is the text of a record, [`directory`] writes it, [`adoption`] is the start. Nothing here knows what a sandbox does.

pub(super) mod adoption;
pub(super) mod directory;
pub(super) mod record;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::unistd::{UnlinkatFlags, syncfs};

use super::homes::{Homes, names_in};
use super::ids::is_id;
use crate::config::Secret;
use crate::error::{Error, Kind, Result};
use crate::sys::paths::{renameat, unlinkat};
use crate::threads::Thread;
use crate::threads::lock::{Mutex, lock};
use crate::{fault, logging, sys};
use directory::{Directory, WRITING};
pub(super) use record::Record;
use record::Unreadable;

/// The directory, among the homes. Its name is no id.
const DIRECTORY: &str = ".sandboxes";

/// The key that tokens are derived with, and the machine's boot in which the last server ran.
const KEY: &str = "key";
const RUN: &str = "run";

/// What a record is called that is no record yet, or no more.
const MAKING: &str = "making";
const DELETING: &str = "deleting";

/// The records of a host's sandboxes.
pub(super) struct Records {
    directory: Directory,
    /// Records that have changed since the last synchronization; guards the list alone.
    outdated: Mutex<Vec<Arc<RecordFile>>>,
    is_synchronizing: AtomicBool,
}

/// The turn of one thread to synchronize.
struct SynchronizingTurn(Arc<Records>);

impl Drop for SynchronizingTurn {
    fn drop(&mut self) {
        self.0.is_synchronizing.store(false, Ordering::Release);
    }
}

/// Where the record of one sandbox is.
pub(super) struct RecordFile {
    id: String,
    /// Guards the names on the disk. Held while the record is written, so that its changes reach the disk in order; nobody
    /// else waits for it.
    generations: Mutex<Generations>,
}

#[derive(Default)]
struct Generations {
    /// That of the latest record; 0 for none.
    latest: u64,
    /// Those before it that are still on the disk.
    outdated: Vec<u64>,
    /// The latest that a synchronization was for. What was written after it, and outdated, nobody needs.
    durable: u64,
    /// Whether the sandbox is being deleted: its record changes no more.
    is_closed: bool,
}

/// How the server before this one has ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum LastRun {
    /// In order; or there was none.
    #[default]
    Ended,
    /// It was killed.
    Killed,
    /// With its machine.
    MachineEnded,
}

/// What the directory holds at a start.
#[derive(Default)]
pub(super) struct Found {
    /// Whole records, each with where it is.
    pub(super) records: Vec<(Record, Arc<RecordFile>)>,
    /// Sandboxes that were being deleted.
    pub(super) deletions: Vec<String>,
    /// Sandboxes that were being made.
    pub(super) unmade: Vec<String>,
    /// Sandboxes without a record that this version can use, and why.
    pub(super) rejected: Vec<(String, String)>,
}

impl RecordFile {
    pub(super) fn new(id: &str) -> Arc<Self> {
        Arc::new(Self {
            id: id.to_owned(),
            generations: Mutex::default(),
        })
    }

    fn name(&self, suffix: impl std::fmt::Display) -> String {
        format!("{}.{suffix}", self.id)
    }

    /// The name of the latest record. That of a sandbox which is being made has no number.
    fn latest_name(&self, generations: &Generations) -> String {
        match generations.latest {
            0 => self.name(MAKING),
            latest => self.name(latest),
        }
    }
}

impl Records {
    /// Opens the directory among the homes, and makes it if it is missing.
    ///
    /// # Errors
    /// `System` if it is unsuitable.
    pub(super) fn open(homes: &Homes) -> Result<Self> {
        Ok(Self {
            directory: Directory(homes.private_directory(DIRECTORY)?),
            outdated: Mutex::default(),
            is_synchronizing: AtomicBool::new(false),
        })
    }

    /// The key that the tokens of sandboxes are derived with: that of the first server here, so that tokens stay what they
    /// are even if the host's changes.
    ///
    /// # Errors
    /// `System`: it can neither be read nor written.
    pub(super) fn key(&self, token: Option<&Secret>) -> Result<Secret> {
        let failed = |error: io::Error| Error::io("cannot keep the key of tokens", &error);
        if let Some(key) = self.directory.read(KEY).map_err(failed)? {
            if key.is_empty() {
                let text = "cannot use the key of tokens: the file .sandboxes/key is empty";
                return Err(Error::new(Kind::System, text));
            }
            return Ok(Secret::new(key));
        }
        let key = if let Some(token) = token {
            token.clone()
        } else {
            let random = sys::random_bytes::<32>();
            Secret::new(random.map_err(|errno| failed(errno.into()))?)
        };
        self.directory.write(KEY, key.expose()).map_err(failed)?;
        // Without it no token would open what is written down from now on.
        syncfs(&*self.directory).map_err(|errno| failed(errno.into()))?;
        Ok(key)
    }

    /// How the last server here has ended.
    ///
    /// # Errors
    /// `System`: it cannot be read.
    pub(super) fn last_run(&self) -> Result<LastRun> {
        let failed =
            |error: io::Error| Error::io("cannot read how the last server has ended", &error);
        let boot = boot();
        let last = self.directory.read(RUN).map_err(failed)?;
        Ok(last.map_or(LastRun::Ended, |last| {
            let last = String::from_utf8_lossy(&last);
            let (its, ended) = last.split_once(' ').unwrap_or((last.trim_end(), ""));
            match ended {
                _ if its != boot => LastRun::MachineEnded,
                "" => LastRun::Killed,
                _ => LastRun::Ended,
            }
        }))
    }

    /// The server begins. It counts as killed until [`Records::note_end`].
    pub(super) fn note_begin(&self) {
        let written = self
            .directory
            .write(RUN, format!("{}\n", boot()).as_bytes());
        if let Err(error) = written {
            logging::info(format_args!(
                "cannot write that the server has begun: {error}"
            ));
        }
    }

    /// The server ends in order.
    pub(super) fn note_end(&self) {
        let boot = boot();
        let _ = self
            .directory
            .write(RUN, format!("{boot} ended\n").as_bytes());
    }

    /// Writes down a sandbox that is about to be made. Until [`Records::complete`], a start removes what there is of it.
    ///
    /// # Errors
    /// `NoSpace` if it cannot be written.
    pub(super) fn begin(&self, record: &Record, file: &RecordFile) -> Result<()> {
        let written = self.directory.create(&file.name(MAKING), &record.to_text());
        written.map_err(|error| unwritten(&error))
    }

    /// The sandbox is made.
    ///
    /// # Errors
    /// `NoSpace` if the record cannot be renamed.
    pub(super) fn complete(&self, file: &Arc<RecordFile>) -> Result<()> {
        fault::point("record");
        let mut generations = lock(&file.generations);
        let renamed = self.directory.rename(&file.name(MAKING), &file.name(1));
        renamed.map_err(|error| unwritten(&error))?;
        generations.latest = 1;
        drop(generations);
        self.note_change(file);
        Ok(())
    }

    /// A record is to be on the disk soon.
    fn note_change(&self, file: &Arc<RecordFile>) {
        let mut outdated = lock(&self.outdated);
        // A synchronization may take minutes, and a sandbox change all the time.
        if !outdated.iter().any(|other| Arc::ptr_eq(other, file)) {
            outdated.push(Arc::clone(file));
        }
    }

    /// Removes all records, for a host whose sandboxes end with it.
    pub(super) fn discard(homes: &Homes) {
        if let Ok(Some(records)) = homes.existing_directory(DIRECTORY) {
            for name in names_in(&records).unwrap_or_default() {
                let _ = unlinkat(&records, name.as_str(), UnlinkatFlags::NoRemoveDir);
            }
        }
    }

    /// Writes a record anew. That of a sandbox which is being deleted stays.
    ///
    /// # Errors
    /// `NoSpace` if it cannot be written: the former one holds.
    pub(super) fn replace(
        &self,
        file: &Arc<RecordFile>,
        record: impl FnOnce() -> Record,
    ) -> Result<()> {
        let mut generations = lock(&file.generations);
        // Of a sandbox that no server takes over there is none.
        if generations.is_closed || generations.latest == 0 {
            return Ok(());
        }
        let next = generations.latest + 1;
        let written = self.directory.write(&file.name(next), &record().to_text());
        written.map_err(|error| unwritten(&error))?;
        let former = std::mem::replace(&mut generations.latest, next);
        // However often a sandbox changes between two synchronizations, two records of it are on the disk.
        if former > generations.durable {
            let _ = self.directory.unlink(&file.name(former));
        } else {
            generations.outdated.push(former);
        }
        drop(generations);
        self.note_change(file);
        Ok(())
    }

    /// The first step of a deletion. Another one changes nothing.
    ///
    /// # Errors
    /// The record cannot be renamed.
    pub(super) fn begin_deletion(&self, file: &RecordFile) -> Result<()> {
        let mut generations = lock(&file.generations);
        if generations.is_closed {
            return Ok(());
        }
        let name = file.latest_name(&generations);
        let renamed = self.directory.rename(&name, &file.name(DELETING));
        renamed.map_err(|error| {
            let act = format_args!("cannot begin to delete sandbox {}", file.id);
            Error::io(act, &error)
        })?;
        generations.is_closed = true;
        Ok(())
    }

    /// Nothing is left of the sandbox.
    pub(super) fn end_deletion(&self, file: &RecordFile) {
        let mut generations = lock(&file.generations);
        // That which says what happens to the others goes last.
        for outdated in std::mem::take(&mut generations.outdated) {
            let _ = self.directory.unlink(&file.name(outdated));
        }
        if !generations.is_closed {
            // It could not be renamed.
            let _ = self.directory.unlink(&file.latest_name(&generations));
            generations.is_closed = true;
        }
        let _ = self.directory.unlink(&file.name(DELETING));
    }

    /// Has a thread synchronize the file system if a record has changed, and then remove what is outdated. Call it once a
    /// second: one synchronization is for all changes meanwhile, and may take as long as the disk does.
    pub(super) fn synchronize(self: &Arc<Self>) {
        if lock(&self.outdated).is_empty() || self.is_synchronizing.swap(true, Ordering::AcqRel) {
            return;
        }
        let turn = SynchronizingTurn(Arc::clone(self));
        // Without a thread the next call tries again.
        let synchronize = |records: &Self| syncfs(&*records.directory).is_ok();
        let _ = Thread::new("records").start(move || turn.0.synchronize_by(synchronize));
    }

    fn synchronize_by(&self, synchronize: impl FnOnce(&Self) -> bool) {
        let changed = std::mem::take(&mut *lock(&self.outdated));
        let tried: Vec<_> = changed
            .iter()
            .map(|file| {
                let mut generations = lock(&file.generations);
                let latest = generations.latest;
                (std::mem::replace(&mut generations.durable, latest), latest)
            })
            .collect();
        let is_done = synchronize(self);
        for (file, (durable, latest)) in changed.iter().zip(tried) {
            let mut generations = lock(&file.generations);
            let needed = if is_done {
                latest..=u64::MAX
            } else {
                // Those before the last synchronization that succeeded are as good as they were, and others are not.
                generations.durable = durable;
                0..=durable
            };
            generations.outdated.retain(|outdated| {
                let is_needed = needed.contains(outdated);
                if !is_needed {
                    let _ = self.directory.unlink(&file.name(*outdated));
                }
                is_needed
            });
            drop(generations);
            if !is_done {
                self.note_change(file);
            }
        }
    }

    /// Reads what the directory holds, and removes what nobody needs.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn find(&self) -> Result<Found> {
        let failed = |errno| Error::system("cannot read the records of sandboxes", errno);
        let mut files: Vec<(String, String)> = Vec::new();
        for name in names_in(&self.directory).map_err(failed)? {
            if let Some((id, suffix)) = name.split_once('.').filter(|(id, _)| is_id(id)) {
                files.push((id.to_owned(), suffix.to_owned()));
            }
        }
        crate::codec::sort::sort(&mut files);
        let mut found = Found::default();
        for of_one in files.chunk_by(|(one, _), (other, _)| one == other) {
            let id = &of_one[0].0;
            let has = |suffix: &str| of_one.iter().any(|(_, own)| own == suffix);
            if has(WRITING) {
                let _ = self.directory.unlink(&format!("{id}.{WRITING}"));
            }
            let numbers = of_one.iter().filter_map(|(_, suffix)| suffix.parse().ok());
            let mut numbers: Vec<u64> = numbers.filter(|number| *number > 0).collect();
            if has(DELETING) {
                found.deletions.push(id.clone());
            } else if !numbers.is_empty() {
                crate::codec::sort::sort_by(&mut numbers, |one, other| other.cmp(one));
                match self.read_latest(id, &numbers) {
                    Ok(record) => found.records.push(record),
                    Err(why) => found.rejected.push((id.clone(), why)),
                }
            } else if has(MAKING) {
                found.unmade.push(id.clone());
            }
        }
        Ok(found)
    }

    /// Reads the latest whole record of a sandbox; the highest of its numbers is the first.
    fn read_latest(
        &self,
        id: &str,
        numbers: &[u64],
    ) -> std::result::Result<(Record, Arc<RecordFile>), String> {
        let mut first_reason = None;
        for (place, number) in numbers.iter().enumerate() {
            let reason = match self.read_record(id, *number) {
                Ok(record) => {
                    let file = RecordFile::new(id);
                    // Those that are not whole go, too.
                    for outdated in &numbers[..place] {
                        let _ = self.directory.unlink(&file.name(outdated));
                    }
                    *lock(&file.generations) = Generations {
                        latest: *number,
                        outdated: numbers[place + 1..].to_vec(),
                        durable: *number,
                        is_closed: false,
                    };
                    if numbers.len() > 1 {
                        lock(&self.outdated).push(Arc::clone(&file));
                    }
                    return Ok((record, file));
                }
                // What the later version means holds, and not what was before.
                Err((reason, false)) => return Err(reason),
                Err((reason, true)) => reason,
            };
            first_reason.get_or_insert(reason);
        }
        Err(first_reason.unwrap_or_default())
    }

    /// Reads one record; or says why it cannot be used, and whether one before it can.
    fn read_record(&self, id: &str, number: u64) -> std::result::Result<Record, (String, bool)> {
        let name = format!("{id}.{number}");
        let text = self
            .directory
            .read(&name)
            .map_err(|error| (error.to_string(), false))?;
        let text = text.unwrap_or_default();
        let record = Record::parse(&text).map_err(|why| {
            let is_broken = matches!(why, Unreadable::Broken);
            (why.to_string(), is_broken)
        })?;
        if record.id != id {
            return Err((format!("it is that of sandbox {}", record.id), true));
        }
        Ok(record)
    }

    /// Removes all that is written down of a sandbox, or moves it to another directory.
    ///
    /// # Errors
    /// The directory cannot be changed.
    pub(super) fn clear(&self, id: &str, aside: Option<&OwnedFd>) -> nix::Result<()> {
        let of_id = |name: &String| {
            let rest = name.strip_prefix(id);
            rest.is_some_and(|rest| rest.starts_with('.'))
        };
        let deleting = format!("{id}.{DELETING}");
        let mut names: Vec<String> = names_in(&self.directory)?
            .into_iter()
            .filter(of_id)
            .collect();
        // That which says what happens to the others goes last.
        crate::codec::sort::sort_by(&mut names, |one, other| {
            (*one == deleting).cmp(&(*other == deleting))
        });
        for name in names {
            match aside {
                Some(aside) => renameat(&*self.directory, name.as_str(), aside, name.as_str())?,
                None => self.directory.unlink(&name).or_else(|errno| match errno {
                    Errno::ENOENT => Ok(()),
                    errno => Err(errno),
                })?,
            }
        }
        Ok(())
    }
}

/// The number of the machine's boot (random(4)).
fn boot() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    boot.unwrap_or_default().trim().to_owned()
}

/// The error of a request whose record cannot be written: the disk takes no more, for whatever reason.
fn unwritten(error: &io::Error) -> Error {
    let error = Error::io("cannot write down the sandbox", error);
    let text = format!("{error}; make room on the disk of SBX_HOMES_DIR");
    Error::new(Kind::NoSpace, text)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::spec::sandbox::SandboxSpec;

    const ID: &str = "0123456789abcdef01234567";

    struct Place(std::path::PathBuf);

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn changes_during_a_slow_or_failing_synchronization_leave_little() {
        let path = std::env::temp_dir().join(format!("sbx-records-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        let place = Place(path);
        let records = Records {
            directory: Directory(File::open(&place.0).unwrap().into()),
            outdated: Mutex::default(),
            is_synchronizing: AtomicBool::new(false),
        };
        let file = RecordFile::new(ID);
        let names = || std::fs::read_dir(&place.0).unwrap().count();
        let change = || {
            let record = || Record::for_test(ID, SandboxSpec::default());
            records.replace(&file, record).unwrap();
        };
        records
            .begin(&Record::for_test(ID, SandboxSpec::default()), &file)
            .unwrap();
        records.complete(&file).unwrap();
        change();
        records.synchronize_by(|_| true);
        for _ in 0..10 {
            records.synchronize_by(|records| {
                for _ in 0..10 {
                    change();
                }
                assert_eq!(lock(&records.outdated).len(), 1);
                false
            });
            assert_eq!(lock(&records.outdated).len(), 1);
            // The one that is on the disk for certain, and the latest.
            assert_eq!(names(), 2);
        }
        records.synchronize_by(|_| true);
        assert_eq!(names(), 1);
        assert!(lock(&records.outdated).is_empty());
    }
}
