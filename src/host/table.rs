//! Which sandboxes there are, are coming and are going, and who may be next.
//!
//! All of it is under one lock that is never held while something is made or removed: room, user and
//! id are set aside before, and given back after. What could not be ended is no sandbox any more, and
//! keeps its room and its user.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::sandbox::Sandbox;
use super::users::Users;
use crate::error::{Error, Kind, Result};
use crate::sys::{self, User};

/// Ended sandboxes whose ids are remembered, so that ending one again is no error.
const REMEMBERED: usize = 4096;

/// What an id has of randomness; two digits each.
const ID_BYTES: usize = 12;

/// Which sandboxes there are, and who may be one.
pub(super) struct Table {
    capacity: usize,
    ids: Ids,
    pub(super) sandboxes: HashMap<String, Arc<Sandbox>>,
    /// Being made.
    pub(super) reserved: usize,
    /// Being ended.
    pub(super) ending: HashSet<String>,
    /// Being ended once more, having been stuck.
    pub(super) retried: HashSet<String>,
    /// Those that are not gone yet, because something of them is left. They are no sandboxes any more,
    /// and have their place and their user all the same.
    pub(super) stuck: HashMap<String, Arc<Sandbox>>,
    /// The newest last.
    ended: VecDeque<String>,
    users: Users,
    made: u64,
    /// Since when there has been no sandbox.
    empty_since: Option<Instant>,
    /// No more are made.
    pub(super) closed: bool,
}

impl Table {
    /// One without sandboxes, for at most `capacity` of them.
    pub(super) fn new(capacity: usize, users: Users, ids: Ids) -> Self {
        Self {
            capacity,
            ids,
            sandboxes: HashMap::new(),
            reserved: 0,
            ending: HashSet::new(),
            retried: HashSet::new(),
            stuck: HashMap::new(),
            ended: VecDeque::new(),
            users,
            made: 0,
            empty_since: Some(Instant::now()),
            closed: false,
        }
    }

    /// Places that are taken.
    pub(super) fn occupied(&self) -> usize {
        self.sandboxes.len()
            + self.reserved
            + self.ending.len()
            + self.retried.len()
            + self.stuck.len()
    }

    pub(super) fn is_ending(&self, id: &str) -> bool {
        self.ending.contains(id) || self.retried.contains(id)
    }

    /// Takes out a sandbox that is there, or partly there, to be ended.
    pub(super) fn take(&mut self, id: &str) -> Option<Arc<Sandbox>> {
        if let Some(sandbox) = self.sandboxes.remove(id) {
            self.ending.insert(id.to_owned());
            return Some(sandbox);
        }
        let sandbox = self.stuck.remove(id)?;
        self.retried.insert(id.to_owned());
        Some(sandbox)
    }

    /// Whether its end was told of.
    pub(super) fn has_ended(&self, id: &str) -> bool {
        self.ended.iter().any(|ended| ended == id)
    }

    /// Takes an ending sandbox for ended; whether that is news.
    fn note_end(&mut self, id: &str, is_retry: bool) -> bool {
        // Only who was stuck may have been told of before: there are many to look through.
        if is_retry && self.has_ended(id) {
            return false;
        }
        self.ended.push_back(id.to_owned());
        if self.ended.len() > REMEMBERED {
            self.ended.pop_front();
        }
        true
    }

    /// The number of those that are there, or coming or going, has changed. What could not be ended is
    /// none of them: a host must not live on for it.
    fn note_occupation(&mut self) {
        if self.sandboxes.len() + self.reserved + self.ending.len() > 0 {
            self.empty_since = None;
        } else {
            self.empty_since.get_or_insert_with(Instant::now);
        }
    }

    /// Takes back a user, for good if something of it may be left.
    pub(super) fn give_back(&mut self, user: User, is_clean: bool) {
        if is_clean {
            self.users.free(user);
        } else {
            self.users.set_aside(user);
        }
        self.note_occupation();
    }

    /// Sets aside what sandboxes need that must not be promised twice, for as many of `count` as there
    /// is room for.
    ///
    /// # Errors
    /// No more are made.
    pub(super) fn reserve(&mut self, count: usize) -> Result<Vec<Place>> {
        if self.closed {
            return Err(Error::new(
                Kind::ShuttingDown,
                "cannot make a sandbox: the server is ending",
            ));
        }
        let room = self.capacity.saturating_sub(self.occupied());
        let mut places = Vec::new();
        while places.len() < count.min(room)
            && let Some(user) = self.users.take(sys::user_has_processes)
        {
            self.made += 1;
            places.push(Place {
                id: self.ids.of(self.made),
                number: self.made,
                user,
            });
        }
        self.reserved += places.len();
        self.note_occupation();
        Ok(places)
    }

    /// Moves a sandbox from those that are ending to where it belongs, having been ended as `result`
    /// says: true if it is gone. Whether its end is news.
    pub(super) fn settle(&mut self, sandbox: &Arc<Sandbox>, result: &Result<bool>) -> bool {
        let id = &sandbox.id;
        self.ending.remove(id);
        let is_retry = self.retried.remove(id);
        let is_news = result.is_ok() && self.note_end(id, is_retry);
        if let Ok(true) = result {
            self.give_back(sandbox.user, true);
        } else {
            self.stuck.insert(id.clone(), Arc::clone(sandbox));
            self.note_occupation();
        }
        is_news
    }

    /// How long there has been no sandbox; none while there is one.
    pub(super) fn empty_for(&self) -> Option<Duration> {
        self.empty_since.map(|since| since.elapsed())
    }
}

/// Where a sandbox will be.
pub(super) struct Place {
    pub(super) id: String,
    pub(super) number: u64,
    pub(super) user: User,
}

/// What ids are made from.
pub(super) struct Ids {
    secret: [u8; 32],
}

impl Ids {
    /// # Errors
    /// The kernel has no random bytes.
    pub(super) fn new() -> Result<Self> {
        let secret = sys::random_bytes()
            .map_err(|errno| Error::system("cannot make ids for sandboxes", errno))?;
        Ok(Self { secret })
    }

    /// The id of the sandbox of this number: nobody can guess it, and no other has it.
    pub(super) fn of(&self, number: u64) -> String {
        let mut digest = Sha256::new();
        digest.update(self.secret);
        digest.update(number.to_le_bytes());
        let digest = digest.finalize();
        let mut id = String::with_capacity(2 * ID_BYTES);
        for byte in &digest[..ID_BYTES] {
            // Writing to memory does not fail.
            let _ = write!(id, "{byte:02x}");
        }
        id
    }
}

/// Whether a name could be an id.
pub(super) fn is_id(name: &str) -> bool {
    let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.len() == 2 * ID_BYTES && name.bytes().all(is_digit)
}
