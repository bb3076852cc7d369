//! Watches that clients poll, and who is notified of watches.
//!
//! It needs the files of a workspace and no more of it: leases and operations are above it.
//!
//! One thread per workspace reads the events of all its watches, as long as there are any, into a ring for each. A
//! watch is no work: it does not keep its workspace from being idle, and it goes when nobody has read it for a while.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::client::{Client, Disconnected, KeepAlive, send_all};
use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::files::Root;
use crate::files::name::FilePath;
use crate::files::watch::{Ended, EventSink, Settings, TreeChange, TreeEvent, WatchShare, Watcher};
use crate::limits::ledger::{Charge, Item, Ledger};
use crate::spec::command::ChosenId;
use crate::sys::{Events, PollEntry, User, poll};
use crate::threads::Thread;
use crate::threads::lock::{Condvar, Mutex, lock};
use crate::threads::notify::Notifier;
use crate::threads::panics::contain;
use crate::threads::priority::{BackgroundTurn, BackgroundWork};

/// Most watches of a workspace.
const MAX_WATCHES: usize = 64;

/// Most events that a watch keeps.
const RING_EVENTS: usize = 10_000;

/// How long a watch stays that nobody reads.
const UNREAD_LIMIT: Duration = Duration::from_secs(300);

/// How long it is waited until a watch that makes room has given back what it had.
const GIVE_UP_LIMIT: Duration = Duration::from_secs(2);

/// How long a client that asks for what has happened waits for the thread.
const CATCH_UP_LIMIT: Duration = Duration::from_secs(2);

/// What has happened is reported after this time at the latest: half a move, or a file that is still written to.
const PENDING_LIMIT: Duration = Duration::from_millis(75);

/// Events whose places a watch may keep.
const FEW_EVENTS: usize = 64;

/// Events that are sent at a time, and about the bytes that they take.
const BATCH_EVENTS: usize = 256;
const BATCH_BYTES: usize = 64 * 1024;

/// What an event takes, besides its paths.
const EVENT_BYTES: usize = 128;

/// Bytes that are charged at a time.
const CHARGED_BYTES: usize = 16 * 1024;

/// Follows a watch. Events have numbers, each one more than the last.
pub trait WatchSubscriber {
    fn client(&mut self) -> &mut dyn Client;
    /// Something changed.
    fn event(&mut self, number: u64, event: &TreeEvent);
    /// This was all: why the watch is over, or `None` if it goes on after the event `last`.
    fn end(&mut self, last: u64, ended: Option<Ended>);
}

/// The registered watches of a workspace.
pub struct Watches {
    ledger: Arc<Ledger>,
    background: Arc<BackgroundWork>,
    /// What all watches of the workspace may have of the kernel's.
    pub(super) share: Arc<WatchShare>,
    table: Mutex<WatchTable>,
    /// Notified when a watcher of a removed watch is gone.
    given_back: Condvar,
    /// Notified when the thread has read all watches once.
    has_read: Condvar,
    /// Wakes the thread. `None` if the server had no descriptor left.
    wakeup: Mutex<Option<Arc<EventFd>>>,
}

#[derive(Default)]
struct WatchTable {
    all: Vec<Arc<RegisteredWatch>>,
    last_number: u64,
    /// Watches that the thread has not taken over yet.
    inbox: Vec<Driven>,
    has_thread: bool,
}

/// A watch that the thread reads.
struct Driven {
    watch: Arc<RegisteredWatch>,
    watcher: Watcher,
    /// Its files.
    root: Arc<Root>,
}

impl WatchTable {
    /// Removes the lasting watch that was unread for longest; `None` if there is none.
    fn give_up_one(&mut self) -> Option<Arc<RegisteredWatch>> {
        let lasting = self.all.iter().enumerate();
        let lasting = lasting.filter(|(_, watch)| watch.lasting.is_some());
        let (at, _) = lasting.min_by_key(|(_, watch)| lock(&watch.ring).read_at)?;
        let watch = self.all.remove(at);
        watch.is_removed.store(true, Ordering::Relaxed);
        Some(watch)
    }

    /// The watch that has an id already, if it is the same and has not ended.
    ///
    /// # Errors
    /// `IdInUse` if it is another one; `OverLimit` if there is no room for a new one.
    fn existing(
        &self,
        id: Option<&ChosenId>,
        settings: &Settings,
        root: &Root,
    ) -> Result<Option<Arc<RegisteredWatch>>> {
        let owner = root.account().map(|(_, owner)| owner);
        let same_id = |watch: &&Arc<RegisteredWatch>| id.is_some_and(|id| id.as_str() == watch.id);
        match self.all.iter().find(same_id) {
            Some(watch)
                if watch.settings == *settings
                    && watch.owner == owner
                    && watch.lasting.is_none() =>
            {
                let mut ring = lock(&watch.ring);
                ring.read_at = Instant::now();
                Ok(ring.ended.is_none().then(|| Arc::clone(watch)))
            }
            Some(watch) => Err(Error::new(
                Kind::IdInUse,
                format!("the id {} belongs to a watch of something else", watch.id),
            )),
            None if self.all.len() >= MAX_WATCHES => Err(Error::new(
                Kind::OverLimit,
                format!("there are {MAX_WATCHES} watches already; delete one"),
            )),
            None => Ok(None),
        }
    }
}

/// A watch that stays until it is removed, however long nobody reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lasting {
    /// Whether its reader wants to know what the files are that have changed.
    pub describes: bool,
}

/// A watch that clients poll.
pub struct RegisteredWatch {
    pub id: String,
    /// The directories that were watched when it began.
    pub directories: usize,
    settings: Settings,
    /// Whom files are accessed as, in a sandbox where there are several.
    owner: Option<User>,
    /// `None` if it goes when nobody reads it.
    pub lasting: Option<Lasting>,
    is_removed: AtomicBool,
    /// Whether the kernel has back what the watch had.
    has_given_back: AtomicBool,
    ring: Mutex<EventRing>,
    /// Notifies when the ring has changed.
    notifier: Arc<Notifier>,
}

struct EventRing {
    events: VecDeque<(u64, TreeEvent)>,
    /// The number of the last event.
    last: u64,
    ended: Option<Ended>,
    readers: usize,
    read_at: Instant,
    /// When the thread began to read last, and when it did so last and nothing was pending then.
    looked_at: Option<Instant>,
    settled_at: Option<Instant>,
    bytes: usize,
    /// What the settings of the watch take of it.
    settings: usize,
    charge: Charge,
}

impl Watches {
    pub(super) fn new(ledger: &Arc<Ledger>, background: &Arc<BackgroundWork>) -> Arc<Self> {
        Arc::new(Self {
            share: WatchShare::new(ledger.is_whole()),
            ledger: Arc::clone(ledger),
            background: Arc::clone(background),
            table: Mutex::default(),
            given_back: Condvar::new(),
            has_read: Condvar::new(),
            wakeup: Mutex::default(),
        })
    }

    /// A watch by its id.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn find(&self, id: &str) -> Result<Arc<RegisteredWatch>> {
        let table = lock(&self.table);
        let found = table.all.iter().find(|watch| watch.id == id);
        found.cloned().ok_or_else(|| {
            let text = format_args!(
                "there is no watch {id}; it may have been deleted, or unread for too long"
            );
            Error::new(Kind::NotFound, text)
        })
    }

    /// Removes a watch.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn remove(&self, id: &str) -> Result<()> {
        let watch = self.find(id)?;
        watch.is_removed.store(true, Ordering::Relaxed);
        lock(&self.table).all.retain(|other| other.id != id);
        watch.notifier.notify();
        self.wake();
        Ok(())
    }

    /// Waits until a watch has the events of all that has happened before.
    pub fn catch_up(&self, watch: &RegisteredWatch) {
        let asked = Instant::now();
        let is_behind = |table: &mut WatchTable| {
            let ring = lock(&watch.ring);
            let has_read = ring.settled_at >= Some(asked)
                || ring.looked_at >= Some(asked + PENDING_LIMIT)
                || ring.ended.is_some();
            !has_read && table.has_thread && !watch.is_removed.load(Ordering::Relaxed)
        };
        let table = lock(&self.table);
        self.wake();
        drop(
            self.has_read
                .wait_while_for(table, CATCH_UP_LIMIT, is_behind),
        );
    }

    /// Removes the lasting watch that was unread for longest, and waits until the kernel has what it had. False if
    /// there is none.
    pub(super) fn give_up_one(&self) -> bool {
        let mut table = lock(&self.table);
        let Some(given_up) = table.give_up_one() else {
            return false;
        };
        self.wake();
        let is_kept = |_: &mut WatchTable| !given_up.has_given_back.load(Ordering::Relaxed);
        drop(
            self.given_back
                .wait_while_for(table, GIVE_UP_LIMIT, is_kept),
        );
        true
    }

    /// As [`WatchTable::existing`].
    pub(super) fn existing(
        &self,
        id: Option<&ChosenId>,
        settings: &Settings,
        root: &Root,
    ) -> Result<Option<Arc<RegisteredWatch>>> {
        lock(&self.table).existing(id, settings, root)
    }

    /// Adds a watch of files of this root.
    ///
    /// # Errors
    /// As [`WatchTable::existing`]; `NoThreads`.
    pub(super) fn add(
        self: &Arc<Self>,
        id: Option<&ChosenId>,
        lasting: Option<Lasting>,
        watcher: Watcher,
        root: &Arc<Root>,
    ) -> Result<Arc<RegisteredWatch>> {
        let wakeup = self.make_wakeup()?;
        // Its watcher may end before it.
        let settings = watcher.settings().size();
        let charge = self.ledger.charge(Item::Watches, settings)?;
        // Held from here on: others add watches at the same time.
        let mut table = lock(&self.table);
        if lasting.is_some() && table.all.len() >= MAX_WATCHES {
            table.give_up_one();
        }
        if let Some(watch) = table.existing(id, watcher.settings(), root)? {
            return Ok(watch);
        }
        table.last_number += 1;
        let number = table.last_number;
        let id = id.map_or_else(|| format!("w-{number}"), |id| id.as_str().to_owned());
        let (settings, directories) = (watcher.settings().clone(), watcher.directories());
        let watch = Arc::new(RegisteredWatch::new(
            id,
            settings,
            root.account().map(|(_, owner)| owner),
            lasting,
            directories,
            charge,
        ));
        if !table.has_thread {
            let this = Arc::downgrade(self);
            let (woken, background) = (Arc::clone(&wakeup), Arc::clone(&self.background));
            Thread::new("watches")
                .start(move || drive_or_close(&this, &woken, &background))
                .map_err(|error| {
                    let text = format!("no thread is left for a watch: {error}");
                    Error::new(Kind::NoThreads, text)
                })?;
            table.has_thread = true;
        }
        // One that has ended gives way.
        table.all.retain(|other| {
            let stays = other.id != watch.id;
            if !stays {
                other.is_removed.store(true, Ordering::Relaxed);
            }
            stays
        });
        table.inbox.push(Driven {
            watch: Arc::clone(&watch),
            watcher,
            root: Arc::clone(root),
        });
        table.all.push(Arc::clone(&watch));
        drop(table);
        let _ = wakeup.write(1);
        Ok(watch)
    }

    fn make_wakeup(&self) -> Result<Arc<EventFd>> {
        let mut wakeup = lock(&self.wakeup);
        if let Some(wakeup) = &*wakeup {
            return Ok(Arc::clone(wakeup));
        }
        let made = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let made = made.map_err(|errno| Error::system("cannot make a watch", errno))?;
        Ok(Arc::clone(wakeup.insert(Arc::new(made))))
    }

    fn wake(&self) {
        if let Some(wakeup) = &*lock(&self.wakeup) {
            let _ = wakeup.write(1);
        }
    }

    pub(super) fn close(&self) {
        for watch in lock(&self.table).all.drain(..) {
            watch.is_removed.store(true, Ordering::Relaxed);
            watch.notifier.notify();
        }
        self.wake();
    }

    /// Ends all watches after their thread has ended.
    fn abandon(&self) {
        let (ended, inbox) = {
            let mut table = lock(&self.table);
            table.has_thread = false;
            let ended = std::mem::take(&mut table.all);
            (ended, std::mem::take(&mut table.inbox))
        };
        drop(inbox);
        self.has_read.notify_all();
        for watch in ended {
            watch.is_removed.store(true, Ordering::Relaxed);
            watch.has_given_back.store(true, Ordering::Relaxed);
            watch.notifier.notify();
        }
        self.given_back.notify_all();
    }

    /// Removes the watches that nobody has read for too long. Returns when the next one may be.
    fn expire(&self, now: Instant) -> Option<Instant> {
        let mut table = lock(&self.table);
        let mut next: Option<Instant> = None;
        table.all.retain(|watch| {
            let ring = lock(&watch.ring);
            let is_read = ring.readers > 0;
            let until = if is_read { now } else { ring.read_at } + UNREAD_LIMIT;
            let stays = now < until || watch.lasting.is_some();
            if stays && watch.lasting.is_none() {
                next = Some(next.map_or(until, |next| next.min(until)));
            } else if !stays {
                watch.is_removed.store(true, Ordering::Relaxed);
            }
            stays
        });
        next
    }
}

/// As [`drive`]. After a panic the watches end, and the next one gets a new thread.
fn drive_or_close(this: &Weak<Watches>, wakeup: &EventFd, background: &Arc<BackgroundWork>) {
    let turn = BackgroundTurn::of_this_thread(background);
    if contain(|| drive(this, wakeup, turn)).is_err()
        && let Some(this) = this.upgrade()
    {
        this.abandon();
    }
}

/// Reads the events of a workspace's watches until there are none, or the workspace is gone.
fn drive(this: &Weak<Watches>, wakeup: &EventFd, mut turn: BackgroundTurn) {
    let mut driven: Vec<Driven> = Vec::new();
    loop {
        // Not held while it waits: the workspace may end.
        let Some(this) = this.upgrade() else {
            return;
        };
        let mut until = this.expire(Instant::now());
        fault::point("watches");
        {
            let mut table = lock(&this.table);
            driven.append(&mut table.inbox);
            let is_removed = |watch: &RegisteredWatch| watch.is_removed.load(Ordering::Relaxed);
            for removed in driven.extract_if(.., |driven| is_removed(&driven.watch)) {
                let Driven { watch, watcher, .. } = removed;
                drop(watcher);
                watch.has_given_back.store(true, Ordering::Relaxed);
            }
            this.given_back.notify_all();
            // Those that have ended are there to be read, and to be removed.
            if table.all.is_empty() {
                table.has_thread = false;
                this.has_read.notify_all();
                return;
            }
        }
        let begun = Instant::now();
        // Whoever is notified of an end may register anew at once, so the watcher has given back what it had by then.
        let mut over = Vec::new();
        driven.retain_mut(|driven| {
            let watch = &driven.watch;
            match watch.read(&driven.root, &mut driven.watcher, &mut turn) {
                Ok(next) => {
                    let mut ring = lock(&watch.ring);
                    ring.looked_at = Some(begun);
                    if next.is_none() {
                        ring.settled_at = Some(begun);
                    }
                    until = until.into_iter().chain(next).min();
                    true
                }
                Err(ended) => {
                    over.push((Arc::clone(watch), ended));
                    false
                }
            }
        });
        for (watch, ended) in over {
            watch.has_given_back.store(true, Ordering::Relaxed);
            watch.end(ended);
        }
        // Whoever asks in this moment waits by now.
        drop(lock(&this.table));
        this.given_back.notify_all();
        this.has_read.notify_all();
        drop(this);
        let mut entries: Vec<_> = driven
            .iter()
            .map(|driven| PollEntry::new(driven.watcher.descriptor(), Events::READABLE))
            .collect();
        entries.push(PollEntry::new(
            std::os::fd::AsFd::as_fd(wakeup),
            Events::READABLE,
        ));
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        poll(&mut entries, left);
        drop(entries);
        let _ = wakeup.read();
    }
}

impl RegisteredWatch {
    fn new(
        id: String,
        settings: Settings,
        owner: Option<User>,
        lasting: Option<Lasting>,
        directories: usize,
        charge: Charge,
    ) -> Self {
        Self {
            id,
            directories,
            settings,
            owner,
            lasting,
            is_removed: AtomicBool::new(false),
            has_given_back: AtomicBool::new(false),
            ring: Mutex::new(EventRing {
                events: VecDeque::new(),
                last: 0,
                ended: None,
                readers: 0,
                read_at: Instant::now(),
                looked_at: None,
                settled_at: None,
                settings: charge.bytes(),
                bytes: charge.bytes(),
                charge,
            }),
            notifier: Arc::default(),
        }
    }

    /// The directory that is watched.
    pub fn path(&self) -> &FilePath {
        &self.settings.path
    }

    /// Takes the events that nobody has taken, and why the watch is over, if it is. The charge is for the events.
    pub fn take(&self) -> (Vec<TreeEvent>, Option<Ended>, Charge) {
        let mut ring = lock(&self.ring);
        ring.read_at = Instant::now();
        let bytes = ring.bytes - ring.settings;
        let ledger = ring.charge.ledger();
        let charge = ledger.charge_up_to(Item::Watches, bytes, bytes);
        let events = std::mem::take(&mut ring.events);
        ring.count_bytes();
        let is_removed = self.is_removed.load(Ordering::Relaxed);
        let ended = if is_removed {
            Some(Ended::Closed)
        } else {
            ring.ended
        };
        let events = events.into_iter().map(|(_, event)| event).collect();
        (events, ended, charge)
    }

    /// Moves what has happened into the ring.
    fn read(
        &self,
        root: &Root,
        watcher: &mut Watcher,
        turn: &mut BackgroundTurn,
    ) -> std::result::Result<Option<Instant>, Ended> {
        let files = root.files()?;
        let mut sink = RingSink {
            watch: self,
            turn,
            has_told: false,
        };
        let result = watcher.advance(&files, &mut sink);
        if sink.has_told {
            self.notifier.notify();
        }
        result
    }

    fn end(&self, ended: Ended) {
        let mut ring = lock(&self.ring);
        if ended.is_loss() {
            ring.push(TreeEvent::overflow());
        }
        ring.ended = Some(ended);
        drop(ring);
        self.notifier.notify();
    }

    /// Tells a subscriber the events after a number, which then are forgotten up to that number; waits for the first
    /// one at most until `until`. If there has been no event with that number, the subscriber knows another watch that
    /// had this id: it gets an overflow, and then all that is held.
    ///
    /// # Errors
    /// The client disconnected.
    pub(super) fn tell(
        &self,
        after: u64,
        until: Instant,
        subscriber: &mut dyn WatchSubscriber,
    ) -> std::result::Result<(), Disconnected> {
        let _reader = Reader::new(self);
        let listener = self.notifier.listen();
        let mut keep_alive = KeepAlive::new();
        let known = lock(&self.ring).known(after);
        let mut told = known;
        let mut has_told = known < after;
        if has_told {
            subscriber.event(known, &TreeEvent::overflow());
        }
        loop {
            let (events, ended) = lock(&self.ring).after(known, told);
            for (number, event) in &events {
                subscriber.event(*number, event);
                told = *number;
                has_told = true;
            }
            let is_last = events.is_empty();
            // The client may not take them.
            drop(events);
            send_all(subscriber.client())?;
            if !is_last {
                continue;
            }
            let is_removed = self.is_removed.load(Ordering::Relaxed);
            // The end of a workspace deletes its files, which the client did not ask for.
            let ended = if is_removed {
                Some(Ended::Closed)
            } else {
                ended
            };
            let now = Instant::now();
            if has_told || ended.is_some() || now >= until {
                subscriber.end(told, ended);
                return Ok(());
            }
            listener.wait(&mut keep_alive, subscriber.client(), Some(until))?;
        }
    }
}

/// Moves events into the ring of a watch, within what its tenant may use of the processor.
struct RingSink<'a> {
    watch: &'a RegisteredWatch,
    turn: &'a mut BackgroundTurn,
    has_told: bool,
}

impl RingSink<'_> {
    fn look(&self) -> std::result::Result<(), Ended> {
        if self.watch.is_removed.load(Ordering::Relaxed) {
            return Err(Ended::Closed);
        }
        Ok(())
    }
}

impl EventSink for RingSink<'_> {
    fn event(&mut self, event: TreeEvent) -> std::result::Result<(), Ended> {
        self.has_told = true;
        lock(&self.watch.ring).push(event);
        Ok(())
    }

    fn check(&mut self) -> std::result::Result<(), Ended> {
        while self.turn.give_way() {
            self.look()?;
        }
        self.look()
    }
}

/// Keeps a watch from going while it is read.
struct Reader<'a>(&'a RegisteredWatch);

impl<'a> Reader<'a> {
    fn new(watch: &'a RegisteredWatch) -> Self {
        lock(&watch.ring).readers += 1;
        Self(watch)
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        let mut ring = lock(&self.0.ring);
        ring.readers -= 1;
        ring.read_at = Instant::now();
    }
}

impl EventRing {
    fn push(&mut self, event: TreeEvent) {
        self.last += 1;
        self.bytes += bytes_of(&event);
        let is_full = self.events.len() >= RING_EVENTS;
        let has_room = !is_full
            && (self.bytes <= self.charge.bytes()
                || self.charge.set(self.bytes + CHARGED_BYTES).is_ok());
        let event = if has_room {
            event
        } else {
            self.events.clear();
            TreeEvent::overflow()
        };
        self.events.push_back((self.last, event));
        if !has_room {
            self.count_bytes();
        }
    }

    /// The event that a client knows last that asks for those after `after`: this one; or the one before all that are
    /// held, if there has been none with this number.
    fn known(&self, after: u64) -> u64 {
        if after <= self.last {
            return after;
        }
        let first = self.events.front();
        first.map_or(self.last, |(number, _)| number - 1)
    }

    /// Forgets the events up to `known`, and returns some after `told`. Why the watch is over, if it is.
    fn after(&mut self, known: u64, told: u64) -> (Vec<(u64, TreeEvent)>, Option<Ended>) {
        let before = self.events.len();
        while self
            .events
            .front()
            .is_some_and(|(number, _)| *number <= known)
        {
            self.events.pop_front();
        }
        if self.events.len() < before {
            self.count_bytes();
        }
        let first = self.events.partition_point(|(number, _)| *number <= told);
        let events = self.events.range(first..).take(BATCH_EVENTS);
        let mut bytes = 0;
        let events = events.take_while(|(_, event)| {
            let has_room = bytes < BATCH_BYTES;
            bytes += bytes_of(event);
            has_room
        });
        (events.cloned().collect(), self.ended)
    }

    fn count_bytes(&mut self) {
        // What an event takes has room for its place, but not for those of events that are gone.
        if self.events.capacity() > FEW_EVENTS.max(4 * self.events.len()) {
            self.events.shrink_to(FEW_EVENTS);
        }
        let events = self.events.iter().map(|(_, event)| bytes_of(event));
        self.bytes = self.settings + events.sum::<usize>();
        // Less than before, so it cannot be refused.
        let _ = self.charge.set(self.bytes);
    }
}

fn bytes_of(event: &TreeEvent) -> usize {
    let from = match &event.change {
        TreeChange::Moved(from) => from.len(),
        _ => 0,
    };
    EVENT_BYTES + event.path.len() + from
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::FileKind;
    use crate::files::search::Matcher;
    use crate::limits::ledger::Budget;

    fn watch(ledger: &Arc<Ledger>) -> Arc<RegisteredWatch> {
        let exclude = Matcher::new([&b"*.log"[..]]).unwrap();
        let settings = Settings {
            path: FilePath::new(b"w").unwrap(),
            recursive: false,
            exclude,
        };
        let charge = ledger.charge(Item::Watches, settings.size()).unwrap();
        let id = "one".to_owned();
        Arc::new(RegisteredWatch::new(id, settings, None, None, 1, charge))
    }

    fn created(number: usize) -> TreeEvent {
        TreeEvent {
            change: TreeChange::Created,
            path: number.to_string().into_bytes(),
            kind: FileKind::Regular,
        }
    }

    #[test]
    fn a_ring_keeps_10_000_events_and_then_says_that_they_were_lost() {
        let ledger = Budget::new(1 << 30).whole();
        let watch = watch(&ledger);
        let mut ring = lock(&watch.ring);
        for number in 1..=RING_EVENTS {
            ring.push(created(number));
        }
        assert!(ring.charge.bytes() > RING_EVENTS * EVENT_BYTES);
        let (events, _) = ring.after(0, 0);
        assert_eq!(events[0], (1, created(1)));
        // What is known makes room.
        ring.after(10, 10);
        for number in 1..=10 {
            ring.push(created(RING_EVENTS + number));
        }
        assert_eq!(ring.after(10, 10).0[0].0, 11);
        ring.push(created(0));
        ring.push(created(1));
        let (events, _) = ring.after(10, 10);
        let last = RING_EVENTS as u64 + 11;
        assert_eq!(
            events,
            [(last, TreeEvent::overflow()), (last + 1, created(1))]
        );
        assert!(ring.charge.bytes() < 2 * CHARGED_BYTES);
        // The settings stay as long as the watch does.
        ring.after(last + 1, last + 1);
        assert!(ring.events.capacity() <= FEW_EVENTS);
        assert_eq!(ring.charge.bytes(), watch.settings.size());
    }

    #[test]
    fn few_events_with_long_paths_are_given_at_a_time() {
        let ledger = Budget::new(1 << 30).whole();
        let watch = watch(&ledger);
        let long = || TreeEvent {
            path: vec![b'x'; 30_000],
            ..created(0)
        };
        let mut ring = lock(&watch.ring);
        (0..BATCH_EVENTS).for_each(|_| ring.push(long()));
        assert_eq!(ring.after(0, 0).0.len(), 3);
        assert_eq!(ring.after(3, 3).0[0].0, 4);
        drop(ring);
        // Those that are taken are charged as long as they are there.
        let (events, _, charge) = watch.take();
        assert!(charge.bytes() > events.len() * 30_000);
        assert!(lock(&watch.ring).charge.bytes() < 30_000);
    }

    #[test]
    fn a_ring_that_the_tenant_has_no_memory_for_says_that_events_were_lost() {
        let ledger = Budget::new(64 << 10).whole();
        let watch = watch(&ledger);
        let mut ring = lock(&watch.ring);
        for number in 0..1000 {
            ring.push(created(number));
            assert!(ring.bytes <= 64 << 10);
        }
        let first = ring.after(0, 0).0[0].clone();
        assert_eq!((first.0 > 1, first.1), (true, TreeEvent::overflow()));
    }

    #[test]
    fn a_watch_gives_way_to_others_of_its_tenant_until_it_is_removed() {
        let ledger = Budget::new(1 << 20).whole();
        let watch = watch(&ledger);
        let (begun, owed) = (Instant::now(), Duration::from_millis(500));
        let mut sink = RingSink {
            watch: &watch,
            turn: &mut BackgroundTurn::of_this_thread(&BackgroundWork::owing(owed)),
            has_told: false,
        };
        let mut longest = Duration::ZERO;
        while begun.elapsed() < owed {
            let asked = Instant::now();
            assert_eq!(sink.check(), Ok(()));
            longest = longest.max(asked.elapsed());
        }
        assert!(longest > owed / 2, "{longest:?}");
        watch.is_removed.store(true, Ordering::Relaxed);
        assert_eq!(sink.check(), Err(Ended::Closed));
    }

    #[test]
    fn a_watch_that_nobody_reads_goes_after_five_minutes() {
        let ledger = Budget::new(1 << 20).whole();
        let watches = Watches::new(&ledger, &Arc::default());
        let watch = watch(&ledger);
        lock(&watches.table).all.push(Arc::clone(&watch));
        let read_at = lock(&watch.ring).read_at;
        let after = |seconds| read_at + Duration::from_secs(seconds);
        assert_eq!(watches.expire(after(299)), Some(after(300)));
        assert!(watches.find("one").is_ok());
        // As long as it is read it stays, and after that as long again.
        let reader = Reader::new(&watch);
        assert_eq!(watches.expire(after(1000)), Some(after(1300)));
        drop(reader);
        let read_at = lock(&watch.ring).read_at;
        let limit = read_at + UNREAD_LIMIT;
        assert_eq!(watches.expire(read_at), Some(limit));
        assert_eq!(watches.expire(limit), None);
        assert_eq!(watches.find("one").err().unwrap().kind(), Kind::NotFound);
        assert!(watch.is_removed.load(Ordering::Relaxed));
    }
}
