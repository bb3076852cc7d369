//! The table of sandboxes: those that exist, are being made and are being deleted, and the capacity.
//!
//! One lock guards the table. It is never held while a sandbox is made or removed: slot, user and id are
//! reserved before and given back after. A sandbox that could not be deleted completely is no longer
//! listed, but keeps its slot and its user. So does a home of one that was never listed.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ids::Ids;
use super::records::{Record, RecordFile};
use super::sandbox::Sandbox;
use super::unfinished::Removal;
use super::users::Users;
use crate::error::{Error, Kind, Result};
use crate::limits::ledger::Ledger;
use crate::spec::sandbox::StopCause;
use crate::sys::{self, User};

/// Deleted sandboxes that are remembered, so that deleting one again is no error.
const REMEMBERED: usize = 4096;

/// A sandbox of an earlier server that cannot be taken over yet.
#[derive(Clone)]
pub(super) struct Unready {
    pub(super) record: Record,
    pub(super) file: Arc<RecordFile>,
    /// Why it is stopped.
    pub(super) cause: StopCause,
}

/// The sandboxes of a host in all states.
pub(super) struct SandboxTable {
    capacity: usize,
    ids: Ids,
    pub(super) sandboxes: HashMap<String, Arc<Sandbox>>,
    /// What those hold, by the uids of their users.
    ledgers: HashMap<u32, Arc<Ledger>>,
    /// Number of sandboxes that are being made.
    pub(super) reserved: usize,
    /// Number of those that are stopped.
    stopped: usize,
    /// Ids of sandboxes that are being stopped or started.
    pub(super) changing: HashSet<String>,
    /// How many wait for the end of such a change and come before what tenants ask for, by the ids.
    expected: Waiting,
    /// How many wait to delete a sandbox, by the ids: it is not changed any more.
    pub(super) doomed: Waiting,
    /// Keys of the requests that are making one.
    pub(super) keys: HashSet<String>,
    /// Sandboxes that are being deleted.
    pub(super) ending: HashMap<String, Arc<Sandbox>>,
    /// Stuck sandboxes whose deletion is being retried.
    pub(super) retried: HashMap<String, Arc<Sandbox>>,
    /// Deleted sandboxes of which something is left. They are not listed, but keep their slot and user.
    pub(super) stuck: HashMap<String, Arc<Sandbox>>,
    /// Homes without a sandbox that could not be removed; retried. Each keeps a slot, and its user.
    pub(super) unfinished: Vec<Removal>,
    /// Sandboxes of an earlier server whose roots could not be put together, as on a disk that is full; retried. They are not
    /// listed and can be deleted. Each keeps a slot, and its user.
    pub(super) unready: Vec<Unready>,
    /// Deleted sandboxes to which clients were connected, and when they ended.
    pub(super) parting: Vec<(Instant, Arc<Ledger>)>,
    /// Ids of deleted sandboxes, the newest last.
    ended: VecDeque<String>,
    users: Users,
    made: u64,
    /// When the last sandbox that ran has ended; `None` while there is one.
    empty_since: Option<Instant>,
    /// Whether creation is refused.
    pub(super) closed: bool,
}

/// How many wait for something that is to become of a sandbox, by the ids.
#[derive(Default)]
pub(super) struct Waiting(HashMap<String, usize>);

impl Waiting {
    pub(super) fn contains(&self, id: &str) -> bool {
        self.0.contains_key(id)
    }

    pub(super) fn add(&mut self, id: &str) {
        *self.0.entry(id.to_owned()).or_default() += 1;
    }

    /// One waits no more. Returns whether nobody does.
    pub(super) fn remove(&mut self, id: &str) -> bool {
        if let Some(count) = self.0.get_mut(id)
            && *count > 1
        {
            *count -= 1;
            return false;
        }
        self.0.remove(id);
        true
    }
}

impl SandboxTable {
    /// An empty table for at most `capacity` sandboxes, after so many that were made by earlier servers.
    pub(super) fn new(capacity: usize, users: Users, ids: Ids, made: u64) -> Self {
        Self {
            capacity,
            ids,
            sandboxes: HashMap::new(),
            ledgers: HashMap::new(),
            reserved: 0,
            stopped: 0,
            changing: HashSet::new(),
            expected: Waiting::default(),
            doomed: Waiting::default(),
            keys: HashSet::new(),
            ending: HashMap::new(),
            retried: HashMap::new(),
            stuck: HashMap::new(),
            unfinished: Vec::new(),
            unready: Vec::new(),
            parting: Vec::new(),
            ended: VecDeque::new(),
            users,
            made,
            empty_since: Some(Instant::now()),
            closed: false,
        }
    }

    /// Number of slots in use.
    pub(super) fn occupied(&self) -> usize {
        let listed = self.sandboxes.len() + self.unready.len();
        listed + self.reserved + self.ending.len() + self.count_stuck()
    }

    /// Number of slots that something keeps which could not be removed.
    pub(super) fn count_stuck(&self) -> usize {
        self.retried.len() + self.stuck.len() + self.unfinished.len()
    }

    /// Whether a sandbox is what is listed under its id, and nobody changes that.
    pub(super) fn is_settled(&self, sandbox: &Arc<Sandbox>) -> bool {
        let listed = self.sandboxes.get(&sandbox.id);
        listed.is_some_and(|listed| Arc::ptr_eq(listed, sandbox))
            && !self.changing.contains(&sandbox.id)
    }

    /// Sandboxes of which there is anything.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Sandbox>> {
        let all = [&self.sandboxes, &self.ending, &self.retried, &self.stuck];
        all.into_iter().flat_map(HashMap::values)
    }

    /// Something was done for which the host is needed.
    pub(super) fn note_request(&mut self) {
        if let Some(since) = &mut self.empty_since {
            *since = Instant::now();
        }
    }

    pub(super) fn is_ending(&self, id: &str) -> bool {
        self.ending.contains_key(id) || self.retried.contains_key(id)
    }

    /// What a sandbox holds, even while it is being deleted: requests wait for that. `None` once a deletion was reported.
    pub(super) fn ledger_of(&self, id: &str) -> Option<Arc<Ledger>> {
        let leaving = || {
            let mut all = [&self.ending, &self.retried, &self.stuck].into_iter();
            let found = all.find_map(|sandboxes| sandboxes.get(id))?;
            (!self.has_ended(id)).then_some(found)
        };
        let sandbox = self.sandboxes.get(id).or_else(leaving)?;
        Some(Arc::clone(&sandbox.workspace.ledger))
    }

    /// Somebody waits for the end of a change.
    pub(super) fn expect(&mut self, id: &str) {
        self.expected.add(id);
    }

    /// Somebody waits no more. Returns whether nobody does.
    pub(super) fn stop_expecting(&mut self, id: &str) -> bool {
        self.expected.remove(id)
    }

    /// The id of the sandbox that is made next.
    #[cfg(test)]
    pub(super) fn next_id(&self) -> String {
        self.ids.of(self.made + 1)
    }

    #[cfg(test)]
    pub(super) fn expected_count(&self, id: &str) -> usize {
        self.expected.0.get(id).copied().unwrap_or(0)
    }

    /// Whether a request about a sandbox has to wait: for the end of a change, and if it `yields` for others that do.
    pub(super) fn is_blocked(&self, id: &str, yields: bool) -> bool {
        self.changing.contains(id) || (yields && self.expected.contains(id))
    }

    /// Lists sandboxes that were made, or replaces what they were until now.
    pub(super) fn insert(&mut self, made: &[Arc<Sandbox>]) {
        // So that nothing fails between the first and the last.
        self.sandboxes.reserve(made.len());
        self.ledgers.reserve(made.len());
        for sandbox in made {
            let ledger = Arc::clone(&sandbox.workspace.ledger);
            self.ledgers.insert(sandbox.user.uid, ledger);
            let new = Arc::clone(sandbox);
            let former = self.sandboxes.insert(sandbox.id.clone(), new);
            self.stopped += usize::from(sandbox.phase.stopped.is_some());
            self.stopped -=
                usize::from(former.is_some_and(|former| former.phase.stopped.is_some()));
        }
        self.note_occupation();
    }

    /// What the sandbox with this uid holds.
    pub(super) fn ledger_of_user(&self, uid: u32) -> Option<Arc<Ledger>> {
        self.ledgers.get(&uid).cloned()
    }

    /// Takes a sandbox, or the rest of a stuck one, out of the table for deletion. None that is being stopped or started.
    pub(super) fn take(&mut self, id: &str) -> Option<Arc<Sandbox>> {
        if self.changing.contains(id) {
            return None;
        }
        if let Some(sandbox) = self.sandboxes.remove(id) {
            self.ledgers.remove(&sandbox.user.uid);
            self.stopped -= usize::from(sandbox.phase.stopped.is_some());
            self.ending.insert(id.to_owned(), Arc::clone(&sandbox));
            return Some(sandbox);
        }
        let sandbox = self.stuck.remove(id)?;
        self.retried.insert(id.to_owned(), Arc::clone(&sandbox));
        Some(sandbox)
    }

    /// Whether a deletion of this id was reported as done.
    pub(super) fn has_ended(&self, id: &str) -> bool {
        self.ended.iter().any(|ended| ended == id)
    }

    /// Records a deletion; returns whether it is the first report for this id.
    fn note_end(&mut self, id: &str, is_retry: bool) -> bool {
        // Only a stuck sandbox can have been reported before, and the search is linear.
        if is_retry && self.has_ended(id) {
            return false;
        }
        self.ended.push_back(id.to_owned());
        if self.ended.len() > REMEMBERED {
            self.ended.pop_front();
        }
        true
    }

    /// Updates `empty_since`. Stopped and stuck sandboxes do not count: an idle host must not live on for them.
    fn note_occupation(&mut self) {
        if self.sandboxes.len() - self.stopped + self.reserved + self.ending.len() > 0 {
            self.empty_since = None;
        } else {
            self.empty_since.get_or_insert_with(Instant::now);
        }
    }

    /// Takes one out that could not be taken over.
    pub(super) fn take_unready(&mut self, id: &str) -> Option<Unready> {
        let mut all = self.unready.iter();
        let at = all.position(|unready| unready.record.id == id)?;
        Some(self.unready.swap_remove(at))
    }

    /// Takes back the user of a sandbox of which nothing is left.
    pub(super) fn give_back(&mut self, user: User) {
        self.users.free(user);
        self.note_occupation();
    }

    /// Keeps a slot and a user for a home that cannot be removed now.
    pub(super) fn put_off(&mut self, removal: Removal) {
        self.unfinished.push(removal);
        self.note_occupation();
    }

    /// Gives back what was kept for a home that is gone.
    pub(super) fn end_removal(&mut self, id: &str) {
        let mut all = self.unfinished.iter();
        // Another thread may have removed it, too.
        if let Some(index) = all.position(|removal| removal.id == id) {
            let uid = self.unfinished.swap_remove(index).uid;
            let is_kept = self.unfinished.iter().any(|other| other.uid == uid);
            if let Some(uid) = uid.filter(|_| !is_kept) {
                self.give(uid);
            }
        }
    }

    /// Gives away a uid from now on that was taken at the start.
    pub(super) fn give(&mut self, uid: u32) {
        self.users.free(User { uid, gid: uid });
    }

    /// Reserves slots, suitable users and ids for as many of `count` sandboxes as there is capacity for, and says why for no more.
    ///
    /// # Errors
    /// `ShuttingDown`.
    pub(super) fn reserve(
        &mut self,
        count: usize,
        is_suitable: impl Fn(User) -> bool,
    ) -> Result<(Vec<Reservation>, Option<Shortage>)> {
        if self.closed {
            let text = "cannot make a sandbox: the server is ending";
            return Err(Error::new(Kind::ShuttingDown, text));
        }
        let room = self.capacity.saturating_sub(self.occupied());
        let mut reservations = Vec::new();
        while reservations.len() < count.min(room)
            && let Some(user) = self
                .users
                .take(|user| sys::user_has_processes(user) || !is_suitable(user))
        {
            self.made += 1;
            reservations.push(Reservation {
                id: self.ids.of(self.made),
                number: self.made,
                user,
            });
        }
        let shortage = (reservations.len() < count).then(|| {
            if reservations.len() < room {
                Shortage::Uids {
                    aside: self.users.aside(),
                }
            } else {
                Shortage::Capacity {
                    capacity: self.capacity,
                    stuck: self.count_stuck(),
                }
            }
        });
        self.reserved += reservations.len();
        self.note_occupation();
        Ok((reservations, shortage))
    }

    /// Ends a deletion with its result (true if nothing is left). Returns whether this is the first
    /// report for this id.
    pub(super) fn settle(&mut self, sandbox: &Arc<Sandbox>, result: &Result<bool>) -> bool {
        let id = &sandbox.id;
        self.ending.remove(id);
        let connections = &sandbox.workspace.ledger.connections;
        let has_clients = match result {
            Ok(_) => connections.close(),
            Err(_) => connections.count() > 0,
        };
        if has_clients {
            let ledger = Arc::clone(&sandbox.workspace.ledger);
            self.parting.push((Instant::now(), ledger));
        }
        let is_retry = self.retried.remove(id).is_some();
        let is_first_report = result.is_ok() && self.note_end(id, is_retry);
        if let Ok(true) = result {
            self.give_back(sandbox.user);
        } else {
            self.stuck.insert(id.clone(), Arc::clone(sandbox));
            self.note_occupation();
        }
        is_first_report
    }

    /// How long no sandbox has run; `None` while one does.
    pub(super) fn empty_for(&self) -> Option<Duration> {
        self.empty_since.map(|since| since.elapsed())
    }
}

/// Why no more sandboxes can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    /// There are as many as the operator allows.
    Capacity {
        capacity: usize,
        /// How many of them are deleted but for something that is left.
        stuck: usize,
    },
    /// No uid is free.
    Uids {
        /// How many no sandbox has, but processes.
        aside: usize,
    },
}

impl Shortage {
    /// The word for programs.
    pub fn code(self) -> &'static str {
        match self {
            Self::Capacity { .. } => "capacity",
            Self::Uids { .. } => "no_uid",
        }
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Capacity { capacity, stuck: 0 } => {
                write!(formatter, "all {capacity} places of SBX_CAPACITY are taken")
            }
            Self::Capacity { capacity, stuck } => write!(
                formatter,
                "all {capacity} places of SBX_CAPACITY are taken, {stuck} by deleted sandboxes of which something is left"
            ),
            Self::Uids { aside: 0 } => {
                formatter.write_str("all uids of SBX_UID_RANGE that can be given are taken")
            }
            Self::Uids { aside } => write!(
                formatter,
                "no uid of SBX_UID_RANGE is free, and {aside} of them are put aside because processes have them"
            ),
        }
    }
}

/// What a new sandbox gets.
pub(super) struct Reservation {
    pub(super) id: String,
    pub(super) number: u64,
    pub(super) user: User,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_who_gives_up_leaves_the_others_waiting() {
        let mut waiting = Waiting::default();
        waiting.add("a");
        waiting.add("a");
        assert!(!waiting.remove("a"));
        assert!(waiting.contains("a"));
        assert!(waiting.remove("a"));
        assert!(!waiting.contains("a"));
        assert!(waiting.remove("a"));
    }
}
