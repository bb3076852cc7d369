//! The store of snapshots (`SBX_SNAPSHOTS_DIR`): trees that roots of sandboxes are made of, which nobody changes.
//!
//! A tree is called as its snapshot, in a directory that only root can enter: it has programs that run as other users. Its
//! record is written when all of it is on the disk, and removed before any of it is. So what has no record is no snapshot,
//! and a start removes it.
//!
//! [`record`] is the text of a record, [`image`] finds the layers of an image, [`archives`] imports archives of the machine, and
//! [`machine`] copies it. What an archive may do is the matter of `files`.

mod archives;
mod image;
mod machine;
mod record;

use std::cell::Cell;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::syncfs;

use super::homes::{Homes, lock_alone, names_in, open_private, open_private_at};
use super::records::directory::{Directory, WRITING};
use crate::clock::now_ms;
use crate::codec::sort::sort_by;
use crate::config::{HostSettings, SnapshotSettings};
use crate::error::{Error, Kind, Result, cause};
use crate::files::{Input, Kept, Layer, Root, Unpacked, remove_home};
use crate::limits::ledger::Ledger;
use crate::spec::command::EnvironmentChange;
use crate::sys::{self, User};
use crate::threads::Thread;
use crate::threads::lock::{Condvar, Mutex, lock};
use crate::{fault, logging};
use image::Image;
#[cfg(all(feature = "e2b", feature = "file-tools"))]
pub(super) use machine::GivesWay;
pub(super) use record::Origin;
pub use record::RootSettings;

/// The directory among the homes, unless the operator chooses another one. Its name is no id.
const DIRECTORY: &str = ".snapshots";

/// What the name of a record ends with, after that of the tree.
const RECORD: &str = "record";

/// A tree of nothing, which exists while the start tries out whether roots can be made of what is here.
const TRIAL: &str = ".trial";

/// The name of the snapshot that is a copy of the machine.
pub(super) const MACHINE: &str = "machine";

/// How long a request waits for the copy.
const COPY_LIMIT: Duration = Duration::from_secs(20);

/// How long a request may remove.
const REMOVAL_LIMIT: Duration = Duration::from_secs(5);

/// A tree that roots can be made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub id: String,
    /// `None` if a later one has taken it.
    pub name: Option<String>,
    /// Counts them in the order of their creation.
    number: u64,
    /// Milliseconds since 1970.
    pub created_at_ms: u64,
    /// Regular files and named pipes.
    pub files: u64,
    /// Bytes of the files, holes included.
    pub bytes: u64,
    /// How many members of its archive were left out.
    pub skipped: u64,
    /// What it counts for in the bounds.
    weight: u64,
    pub settings: RootSettings,
    /// The file that it was imported from at a start.
    pub(super) origin: Option<Origin>,
}

/// The store of a host.
pub(super) struct Store {
    /// The directory, and a lock on it as long as the server lives: two servers must not share a store.
    opened: OnceLock<(Directory, Flock<File>)>,
    /// Held by whoever opens it.
    opening: Mutex<Opening>,
    /// The homes, if it is one of theirs.
    homes: Option<OwnedFd>,
    pub(super) path: PathBuf,
    bounds: SnapshotSettings,
    /// Guards which snapshots there are, and their records.
    table: Mutex<SnapshotTable>,
    /// Guards the value alone.
    copying: Mutex<Copying>,
    copied: Condvar,
    /// What belongs to no snapshot and could not be removed.
    unremoved: Mutex<Vec<String>>,
}

/// The right to open the directory.
#[derive(Default)]
struct Opening;

/// A copy of the machine, which is made when it is needed.
#[derive(Default)]
struct Copying {
    is_running: bool,
    /// Why there is none.
    failed: Option<Error>,
}

/// The end of a copy, whatever ends it.
struct CopyTurn(Arc<Store>);

impl Drop for CopyTurn {
    fn drop(&mut self) {
        lock(&self.0.copying).is_running = false;
        self.0.copied.notify_all();
    }
}

#[derive(Default)]
struct SnapshotTable {
    all: Vec<Held>,
    /// How many are being imported.
    importing: usize,
    /// What these count for so far.
    importing_bytes: u64,
}

struct Held {
    snapshot: Snapshot,
    /// How many requests need it.
    uses: usize,
    /// Whether it is being deleted.
    is_leaving: bool,
}

impl SnapshotTable {
    /// Finds a snapshot by its name or its id.
    fn find(&mut self, key: &str) -> Option<&mut Held> {
        let mut all = self.all.iter_mut().filter(|held| !held.is_leaving);
        all.find(|Held { snapshot, .. }| {
            snapshot.id == key || snapshot.name.as_deref() == Some(key)
        })
    }

    /// What the snapshots, and those that are being imported, leave of a bound.
    fn room(&self, bounds: &SnapshotSettings) -> u64 {
        let weights = self.all.iter().map(|held| held.snapshot.weight);
        bounds
            .bytes
            .saturating_sub(weights.fold(self.importing_bytes, u64::saturating_add))
    }
}

/// Keeps a snapshot from being deleted.
pub struct Pin {
    store: Arc<Store>,
    snapshot: Snapshot,
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Some(held) = lock(&self.store.table).find(&self.snapshot.id) {
            held.uses -= 1;
        }
    }
}

impl Pin {
    pub(super) fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// What commands of its roots have in their environment.
    pub(super) fn environment(&self) -> Vec<EnvironmentChange> {
        self.snapshot.settings.environment.clone()
    }

    /// Its tree, to be read.
    ///
    /// # Errors
    /// `System`.
    pub(super) fn root(&self) -> Result<Root> {
        self.store.root(&self.snapshot.id)
    }
}

impl Store {
    /// Opens the store of a host. What was not finished is removed meanwhile. If the disk has no room for the directory there
    /// are no snapshots, and who makes one tries again.
    ///
    /// # Errors
    /// `System` if the directory is unsuitable, or another server has it.
    pub(super) fn open(settings: &HostSettings, homes: &Homes) -> Result<Arc<Self>> {
        let bounds = settings.snapshots.clone();
        let own = bounds.directory.is_none().then(|| homes.directory());
        let path = bounds.directory.clone();
        let mut store = Self {
            opened: OnceLock::new(),
            opening: Mutex::default(),
            homes: own.transpose()?,
            path: path.unwrap_or_else(|| homes.path.join(DIRECTORY)),
            bounds,
            table: Mutex::default(),
            copying: Mutex::default(),
            copied: Condvar::new(),
            unremoved: Mutex::default(),
        };
        let found = store
            .directory()
            .and_then(|directory| find(directory).map_err(|errno| store.unusable(&errno.into())));
        let mut unfinished = Vec::new();
        // At once: soon something is tried out again.
        store.remove_trial();
        match found {
            Err(error) if error.kind() == Kind::NoSpace => {
                logging::info(format_args!("there are no snapshots: {error}"));
            }
            found => {
                let all;
                (all, unfinished) = found?;
                store.table = Mutex::new(SnapshotTable {
                    all,
                    ..SnapshotTable::default()
                });
            }
        }
        let store = Arc::new(store);
        store.remove_later(unfinished);
        Ok(store)
    }

    /// The directory. It is made if it is missing, and locked.
    ///
    /// # Errors
    /// `NoSpace`; `System` if it is unsuitable, or another server has it.
    fn directory(&self) -> Result<&Directory> {
        if let Some((directory, _)) = self.opened.get() {
            return Ok(directory);
        }
        let _opening = lock(&self.opening);
        if let Some((directory, _)) = self.opened.get() {
            return Ok(directory);
        }
        let failed = |error: io::Error| self.unusable(&error);
        let directory = if let Some(homes) = &self.homes {
            open_private(homes, DIRECTORY)
        } else {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&self.path)
                .map_err(failed)?;
            open_private_at(&self.path)
        };
        let directory = directory.map_err(|errno| failed(errno.into()))?;
        let Some(lock) = lock_alone(&directory).map_err(failed)? else {
            let taken = io::Error::other("another server has its snapshots there");
            return Err(failed(taken));
        };
        let opened = self.opened.get_or_init(|| (Directory(directory), lock));
        Ok(&opened.0)
    }

    fn unusable(&self, error: &io::Error) -> Error {
        let path = self.path.display();
        Error::io(format_args!("cannot use SBX_SNAPSHOTS_DIR {path}"), error)
    }

    /// All snapshots, in the order of their creation.
    pub(super) fn list(&self) -> Vec<Snapshot> {
        let table = lock(&self.table);
        let there = table.all.iter().filter(|held| !held.is_leaving);
        let mut all: Vec<Snapshot> = there.map(|held| held.snapshot.clone()).collect();
        drop(table);
        sort_by(&mut all, |one, other| one.number.cmp(&other.number));
        all
    }

    /// Their names, in no order.
    pub(super) fn names(&self) -> Vec<String> {
        let table = lock(&self.table);
        let there = table.all.iter().filter(|held| !held.is_leaving);
        there
            .filter_map(|held| held.snapshot.name.clone())
            .collect()
    }

    /// Whether there is none at all.
    pub(super) fn is_empty(&self) -> bool {
        lock(&self.table).all.is_empty()
    }

    /// Whether a request is importing one, or needs one.
    pub(super) fn is_busy(&self) -> bool {
        let table = lock(&self.table);
        table.importing > 0 || table.all.iter().any(|held| held.uses > 0)
    }

    /// The snapshot with this name or id.
    pub(super) fn find(&self, key: &str) -> Option<Snapshot> {
        let mut table = lock(&self.table);
        table.find(key).map(|held| held.snapshot.clone())
    }

    /// The snapshot with this name or id, which stays as long as the result does.
    pub(super) fn pin(self: &Arc<Self>, key: &str) -> Option<Pin> {
        let mut table = lock(&self.table);
        let held = table.find(key)?;
        held.uses += 1;
        Some(Pin {
            store: Arc::clone(self),
            snapshot: held.snapshot.clone(),
        })
    }

    /// Waits for the copy of the machine, which a thread makes if there is none.
    ///
    /// # Errors
    /// `Unfinished` if it takes long; those of [`Store::import_machine`].
    pub(super) fn await_machine(self: &Arc<Self>, ledger: Arc<Ledger>) -> Result<()> {
        if self.find(MACHINE).is_some() {
            return Ok(());
        }
        let mut copying = lock(&self.copying);
        if !copying.is_running {
            *copying = Copying {
                is_running: true,
                failed: None,
            };
            drop(copying);
            let turn = CopyTurn(Arc::clone(self));
            let copy = move || {
                // Another thread may just have made it.
                if turn.0.find(MACHINE).is_none() {
                    let made = turn.0.import_machine(&ledger);
                    lock(&turn.0.copying).failed = made.err();
                }
            };
            let started = Thread::new("copy").start(copy);
            started.map_err(|error| {
                let text = format!("no thread is left to copy the machine: {error}");
                Error::new(Kind::NoThreads, text)
            })?;
            copying = lock(&self.copying);
        }
        let is_running = |copying: &mut Copying| copying.is_running;
        let (copying, is_done) = self.copied.wait_while_for(copying, COPY_LIMIT, is_running);
        match &copying.failed {
            _ if !is_done => {
                let text = "the machine is still being copied for its first sandbox; try again";
                Err(Error::new(Kind::Unfinished, text))
            }
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Opens the tree of a snapshot.
    ///
    /// # Errors
    /// `System`.
    pub(super) fn open_tree(&self, id: &str) -> Result<OwnedFd> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        openat(&**self.directory()?, id, flags, Mode::empty())
            .map_err(|errno| Error::system(format_args!("cannot open snapshot {id}"), errno))
    }

    /// Makes a tree of nothing, to try it out.
    ///
    /// # Errors
    /// `System`.
    pub(super) fn open_trial(&self) -> Result<OwnedFd> {
        match mkdirat(&**self.directory()?, TRIAL, Mode::from_bits_truncate(0o755)) {
            Ok(()) | Err(Errno::EEXIST) => self.open_tree(TRIAL),
            Err(errno) => Err(Error::system("cannot make a snapshot", errno)),
        }
    }

    /// Removes what was tried out.
    pub(super) fn remove_trial(&self) {
        if let Ok(directory) = self.directory() {
            let _ = remove_home(directory, TRIAL.as_bytes(), None);
        }
    }

    fn root(&self, id: &str) -> Result<Root> {
        let owner = User { uid: 0, gid: 0 };
        Ok(Root::private(
            Arc::new(self.open_tree(id)?),
            owner,
            true,
            "/",
        ))
    }

    /// Unpacks the archive of a root or an image, plain or compressed by gzip. There is no snapshot of it before
    /// [`Import::complete`].
    ///
    /// # Errors
    /// `BadArchive` and others of [`unpack_root`](crate::files::Files::unpack_root); `NoSpace` if the bounds or the disk leave
    /// no room. Nothing is left then.
    pub(super) fn import(
        self: &Arc<Self>,
        input: &mut dyn Input,
        ledger: &Arc<Ledger>,
    ) -> Result<Import> {
        self.import_as(new_id()?, true, input, ledger)
    }

    /// The same, with an id that was [made](new_id) before. What a root has is no image, whatever its files look like.
    ///
    /// # Errors
    /// As [`Store::import`].
    pub(super) fn import_as(
        self: &Arc<Self>,
        id: String,
        may_be_image: bool,
        input: &mut dyn Input,
        ledger: &Arc<Ledger>,
    ) -> Result<Import> {
        let mut table = lock(&self.table);
        let (count, most) = (table.all.len() + table.importing, self.bounds.most);
        if count >= most {
            let text =
                format!("there are {count} snapshots, and SBX_SNAPSHOTS_MAX is {most}; delete one");
            return Err(Error::new(Kind::NoSpace, text));
        }
        table.importing += 1;
        let left = table.room(&self.bounds);
        drop(table);
        let mut import = Import {
            store: Arc::clone(self),
            snapshot: None,
            id,
            taken: Cell::new(0),
            unpacked: None,
        };
        let limited = |error: Error| match error.kind() {
            Kind::TooLarge => no_room(),
            _ => error,
        };
        let root = self.make_tree(&import.id)?;
        let files = root.files()?;
        let take = |bytes| import.take(bytes);
        let mut done = files
            .unpack_root(Kept::Root, left, &take, input, ledger)
            .map_err(limited)?;
        let mut settings = RootSettings::default();
        if may_be_image && let Some(image) = Image::find(&files)? {
            let left = left.saturating_sub(import.taken.get());
            let layers = image.layers(&files);
            done = self
                .stack(&mut import, layers, left, input, ledger)
                .map_err(limited)?;
            settings = image.settings;
        }
        drop(files);
        fault::point("snapshot");
        // Before the record, which says that all of it is there.
        syncfs(&**self.directory()?).map_err(unmade)?;
        import.snapshot = Some(Snapshot {
            id: import.id.clone(),
            name: None,
            number: 0,
            created_at_ms: now_ms(),
            files: done.files,
            bytes: done.bytes,
            skipped: done.skipped_total,
            weight: import.taken.get(),
            settings,
            origin: None,
        });
        Ok(import)
    }

    /// Unpacks the layers of an image, one over another, into a tree that takes the place of the one that they are in.
    /// Files that later layers replace or hide count, too.
    fn stack(
        &self,
        import: &mut Import,
        layers: impl Iterator<Item = Result<Layer>>,
        bound: u64,
        turn: &mut dyn Input,
        ledger: &Arc<Ledger>,
    ) -> Result<Unpacked> {
        let id = new_id()?;
        let archive = std::mem::replace(&mut import.id, id);
        import.unpacked = Some((archive, import.taken.take()));
        let root = self.make_tree(&import.id)?;
        let files = root.files()?;
        let mut all = Unpacked::default();
        let take = |bytes| import.take(bytes);
        for layer in layers {
            let left = bound.saturating_sub(import.taken.get());
            let done = files.unpack_layer(&mut layer?, left, &take, turn, ledger)?;
            all.files += done.files;
            all.bytes += done.bytes;
            all.skipped_total += done.skipped_total;
        }
        drop(files);
        fault::point("layers");
        import.remove_unpacked();
        Ok(all)
    }

    /// Makes an empty tree.
    ///
    /// # Errors
    /// `NoSpace`; `System`.
    fn make_tree(&self, id: &str) -> Result<Root> {
        mkdirat(&**self.directory()?, id, Mode::S_IRWXU).map_err(unmade)?;
        self.root(id)
    }

    /// Bytes that the snapshots leave of their bound.
    pub(super) fn room(&self) -> u64 {
        lock(&self.table).room(&self.bounds)
    }

    /// A file that has no name on the disk.
    ///
    /// # Errors
    /// `NoSpace`; `System`.
    pub(super) fn temporary(&self) -> Result<File> {
        let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
        let opened = openat(&**self.directory()?, ".", flags, Mode::S_IRWXU);
        opened.map(File::from).map_err(unmade)
    }

    /// The file that a snapshot was imported from has been found as this, with the same content.
    pub(super) fn note_found(&self, id: &str, found: &str) {
        if let Some(held) = lock(&self.table).find(id)
            && let Some(origin) = &mut held.snapshot.origin
        {
            found.clone_into(&mut origin.found);
            let _ = self.write(&held.snapshot);
        }
    }

    fn write(&self, snapshot: &Snapshot) -> Result<()> {
        let text = snapshot.to_text();
        let directory = self.directory()?;
        directory
            .write(&record_of(&snapshot.id), &text)
            .map_err(|error| {
                let text = format!("cannot write down a snapshot: {error}");
                Error::new(Kind::NoSpace, text)
            })
    }

    /// Deletes a snapshot, unless `user_of` knows a sandbox that is made of the one with an id. Returns the id, and whether
    /// the tree is still being removed.
    ///
    /// # Errors
    /// `NotFound`; `InUse`; `System` if the record cannot be removed.
    pub(super) fn remove(
        self: &Arc<Self>,
        key: &str,
        user_of: &dyn Fn(&str) -> Option<String>,
    ) -> Result<(String, bool)> {
        let made_of_it = |user| {
            let why = format!("sandbox {user} is made of it; delete that first");
            in_use(key, &why)
        };
        // Asked before, too: nobody else is kept from using what stays.
        let found = self.find(key).ok_or_else(|| unknown(key))?;
        if let Some(user) = user_of(&found.id) {
            return Err(made_of_it(user));
        }
        let mut table = lock(&self.table);
        let held = table.find(&found.id).ok_or_else(|| unknown(key))?;
        if held.uses > 0 {
            return Err(in_use(key, "a request needs it"));
        }
        // From here on nobody begins to use it.
        held.is_leaving = true;
        let id = found.id;
        drop(table);
        let user = user_of(&id);
        let mut table = lock(&self.table);
        let removed = match user {
            Some(user) => Err(made_of_it(user)),
            // Nobody writes it meanwhile.
            None => self.directory().and_then(|directory| {
                directory.unlink(&record_of(&id)).map_err(|errno| {
                    Error::system(format_args!("cannot delete snapshot {key}"), errno)
                })
            }),
        };
        if let Err(error) = removed {
            let mut all = table.all.iter_mut();
            if let Some(held) = all.find(|held| held.snapshot.id == id) {
                held.is_leaving = false;
            }
            return Err(error);
        }
        table.all.retain(|held| held.snapshot.id != id);
        drop(table);
        let deadline = Some(Instant::now() + REMOVAL_LIMIT);
        let is_gone = remove_home(self.directory()?, id.as_bytes(), deadline);
        let is_left = !is_gone.unwrap_or(false);
        if is_left {
            self.remove_later(vec![id.clone()]);
        }
        Ok((id, is_left))
    }

    /// Removes what belongs to no snapshot on a thread of its own.
    fn remove_later(self: &Arc<Self>, names: Vec<String>) {
        if names.is_empty() {
            return;
        }
        let store = Arc::clone(self);
        let remove = move || {
            for name in names {
                store.remove_tree(&name);
            }
        };
        // Without a thread the next start does it.
        let _ = Thread::new("removals").start(remove);
    }

    fn remove_tree(&self, name: &str) {
        let directory = self.directory();
        let removed = directory.and_then(|own| remove_home(own, name.as_bytes(), None));
        if !matches!(removed, Ok(true)) {
            let path = self.path.join(name);
            logging::info(format_args!(
                "cannot remove {}, which belongs to no snapshot",
                path.display()
            ));
            lock(&self.unremoved).push(name.to_owned());
        }
    }

    /// Tries again, until `deadline`, to remove what could not be removed.
    pub(super) fn retry_removals(&self, deadline: Instant) {
        let mut names = std::mem::take(&mut *lock(&self.unremoved));
        names.retain(|name| {
            let directory = self.directory();
            let removed =
                directory.and_then(|own| remove_home(own, name.as_bytes(), Some(deadline)));
            !matches!(removed, Ok(true))
        });
        lock(&self.unremoved).append(&mut names);
    }
}

/// A tree that is no snapshot yet. It is removed when this is dropped before.
pub(super) struct Import {
    store: Arc<Store>,
    id: String,
    snapshot: Option<Snapshot>,
    /// What its tree counts for so far.
    taken: Cell<u64>,
    /// The tree that an image was unpacked in, which is not the one that its layers make, and what that counts for.
    unpacked: Option<(String, u64)>,
}

impl Import {
    /// Gives its roots other settings.
    pub(super) fn with_settings(mut self, settings: RootSettings) -> Self {
        if let Some(snapshot) = &mut self.snapshot {
            snapshot.settings = settings;
        }
        self
    }

    /// Takes bytes of what all snapshots and imports may have together.
    fn take(&self, bytes: u64) -> Result<()> {
        let mut table = lock(&self.store.table);
        if table.room(&self.store.bounds) < bytes {
            return Err(no_room());
        }
        table.importing_bytes += bytes;
        self.taken.set(self.taken.get() + bytes);
        Ok(())
    }

    fn remove_unpacked(&mut self) {
        if let Some((id, taken)) = self.unpacked.take() {
            self.store.remove_tree(&id);
            lock(&self.store.table).importing_bytes -= taken;
        }
    }

    /// Makes a snapshot of it, which takes the name of another one that may have it.
    ///
    /// # Errors
    /// `NoSpace` if the record cannot be written. Nothing is left then.
    pub(super) fn complete(
        mut self,
        name: Option<&str>,
        origin: Option<Origin>,
    ) -> Result<Snapshot> {
        let store = Arc::clone(&self.store);
        let mut table = lock(&store.table);
        let Some(made) = &mut self.snapshot else {
            return Err(no_room());
        };
        let numbers = table.all.iter().map(|held| held.snapshot.number);
        made.number = numbers.max().unwrap_or(0) + 1;
        made.name = name.map(str::to_owned);
        made.origin = origin;
        store.write(made)?;
        fault::point("snapshot record");
        let mut all = table.all.iter_mut();
        let is_former = |held: &&mut Held| name.is_some() && held.snapshot.name.as_deref() == name;
        if let Some(former) = all.find(is_former) {
            former.snapshot.name = None;
            // Where that fails the later one has the name at the next start.
            let _ = store.write(&former.snapshot);
        }
        let made = made.clone();
        table.all.push(Held {
            snapshot: made.clone(),
            uses: 0,
            is_leaving: false,
        });
        table.importing_bytes -= self.taken.take();
        drop(table);
        self.snapshot = None;
        self.id.clear();
        // What it names is on the disk already.
        let _ = store.directory()?.sync(&record_of(&made.id));
        Ok(made)
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        self.remove_unpacked();
        if !self.id.is_empty() {
            self.store.remove_tree(&self.id);
        }
        let mut table = lock(&self.store.table);
        table.importing -= 1;
        table.importing_bytes -= self.taken.get();
    }
}

/// Reads what the directory holds: the snapshots, and the names of what is none. Other names are left alone.
fn find(directory: &Directory) -> nix::Result<(Vec<Held>, Vec<String>)> {
    let names = names_in(directory)?;
    let mut all: Vec<Held> = Vec::new();
    let mut unfinished = Vec::new();
    for name in &names {
        let (id, suffix) = name.split_once('.').unwrap_or((name, ""));
        match suffix {
            _ if !is_id(id) => {}
            WRITING => drop(directory.unlink(name)),
            "" if !names.contains(&record_of(id)) => unfinished.push(name.clone()),
            RECORD => match read(directory, id, &names) {
                Ok(snapshot) => all.push(Held {
                    snapshot,
                    uses: 0,
                    is_leaving: false,
                }),
                Err(why) => {
                    logging::info(format_args!("snapshot {id} cannot be used: {why}"));
                }
            },
            _ => {}
        }
    }
    // A name belongs to the last one that has got it.
    sort_by(&mut all, |one, other| {
        other.snapshot.number.cmp(&one.snapshot.number)
    });
    for place in 1..all.len() {
        let (later, rest) = all.split_at_mut(place);
        let own = &mut rest[0].snapshot.name;
        if own.is_some() && later.iter().any(|held| held.snapshot.name == *own) {
            *own = None;
        }
    }
    Ok((all, unfinished))
}

fn read(
    directory: &Directory,
    id: &str,
    names: &[String],
) -> std::result::Result<Snapshot, String> {
    let text = directory.read(&record_of(id));
    let text = text.map_err(|error| error.to_string())?;
    let snapshot = Snapshot::parse(&text.unwrap_or_default()).map_err(|why| why.to_string())?;
    if snapshot.id != id || !names.iter().any(|name| name == id) {
        return Err("its record is that of another one, or its files are gone".to_owned());
    }
    Ok(snapshot)
}

/// Whether a text has the form of a snapshot's id.
pub fn is_id(text: &str) -> bool {
    text.strip_prefix("s-").is_some_and(super::ids::is_id)
}

/// An id for a snapshot.
///
/// # Errors
/// The kernel gives no random bytes.
pub(super) fn new_id() -> Result<String> {
    let random = sys::random_bytes();
    let random =
        random.map_err(|errno| Error::system("cannot make an id for a snapshot", errno))?;
    Ok(format!("s-{:024x}", u128::from_le_bytes(random) >> 32))
}

fn record_of(id: &str) -> String {
    format!("{id}.{RECORD}")
}

/// Why a disk takes no more is no concern of the client's.
fn unmade(errno: Errno) -> Error {
    let text = format!("cannot make a snapshot: {}", cause(errno));
    Error::new(Kind::NoSpace, text)
}

fn no_room() -> Error {
    let text = "the snapshot is larger than what others leave of SBX_SNAPSHOTS_BYTES; delete some";
    Error::new(Kind::NoSpace, text)
}

fn in_use(key: &str, why: &str) -> Error {
    let text = format!("cannot delete snapshot {key}: {why}");
    Error::new(Kind::InUse, text)
}

/// No snapshot has this name or id.
pub(super) fn unknown(key: &str) -> Error {
    Error::new(Kind::NotFound, format!("there is no snapshot {key}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_server_leaves_is_told_apart() {
        if !nix::unistd::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "SKIPPED in CI");
            eprintln!("SKIPPED: records belong to root");
            return;
        }
        let path = std::env::temp_dir().join(format!("sbx-store-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        let directory = Directory(File::open(&path).unwrap().into());
        let id = |number: u64| format!("s-{number:024x}");
        let record = |number: u64, name: Option<&str>| {
            let snapshot = Snapshot {
                id: id(number),
                name: name.map(str::to_owned),
                number,
                created_at_ms: 0,
                files: 0,
                bytes: 0,
                skipped: 0,
                weight: 0,
                settings: RootSettings::default(),
                origin: None,
            };
            let name = record_of(&id(number));
            directory.write(&name, &snapshot.to_text()).unwrap();
        };
        // Killed between the records of two that have had one name.
        record(1, Some("a"));
        record(3, Some("a"));
        record(2, None);
        // Of which there is no tree, or whose record is another one's.
        record(4, Some("b"));
        std::fs::copy(path.join(record_of(&id(1))), path.join(record_of(&id(5)))).unwrap();
        for number in [1, 2, 3, 5, 6] {
            std::fs::create_dir(path.join(id(number))).unwrap();
        }
        for other in [TRIAL, "s-1", "lost+found", "0123456789abcdef01234567"] {
            std::fs::create_dir(path.join(other)).unwrap();
        }
        let half = path.join(format!("{}.{WRITING}", id(3)));
        std::fs::write(&half, "half").unwrap();
        let (mut all, mut unfinished) = find(&directory).unwrap();
        assert!(!half.exists());
        std::fs::remove_dir_all(&path).unwrap();
        sort_by(&mut all, |one, other| {
            one.snapshot.number.cmp(&other.snapshot.number)
        });
        let found: Vec<_> = all
            .iter()
            .map(|held| (held.snapshot.number, held.snapshot.name.as_deref()))
            .collect();
        assert_eq!(found, [(1, None), (2, None), (3, Some("a"))]);
        unfinished.sort();
        assert_eq!(unfinished, [id(6)]);
    }
}
