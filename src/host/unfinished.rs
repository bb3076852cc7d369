//! Removals of homes that no sandbox has any more: deletions that an earlier server has begun and not ended, and what is
//! left of sandboxes that could not be made.
//!
//! A start removes what it can in a second. The rest, which may be millions of files, is removed while the server serves: a
//! tenant that leaves much behind keeps nobody waiting. What fails then, as when no descriptor is free, is tried again as
//! long as the server runs. Until a home is gone its uid stays taken, and its record says that it is to be removed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Host;
use super::homes::Homes;
use super::records::Records;
use crate::error::{Error, Kind, Result};
use crate::logging;
use crate::threads::Thread;

/// How long a start may take over all of them.
const START_LIMIT: Duration = Duration::from_secs(1);

/// A home that is to be removed, and then the record of its sandbox.
#[derive(Clone)]
pub(super) struct Removal {
    pub(super) id: String,
    /// The uid that is given back then, if no other home has it.
    pub(super) uid: Option<u32>,
}

/// What an earlier server has left, each with the owner of the home.
#[derive(Default)]
pub(super) struct Unfinished(Vec<Removal>);

impl Unfinished {
    /// Removes what an earlier server meant to. On a host that keeps nothing that is all there is.
    pub(super) fn at_start(homes: &Homes, records: Option<&Records>, removals: &[String]) -> Self {
        if records.is_some() {
            return Self::begin(homes, records, removals.to_vec(), START_LIMIT);
        }
        let all = homes.ids().unwrap_or_default();
        let unfinished = Self::begin(homes, None, all, START_LIMIT);
        Records::discard(homes);
        unfinished
    }

    /// Removes the homes of these ids and their records, as far as there is time.
    pub(super) fn begin(
        homes: &Homes,
        records: Option<&Records>,
        ids: Vec<String>,
        limit: Duration,
    ) -> Self {
        let deadline = Instant::now() + limit;
        let is_left = |id: &String| {
            Instant::now() >= deadline
                || !is_removed(id, remove(homes, records, id, Some(deadline)))
        };
        let left = ids.into_iter().filter(is_left);
        let with_uid = left.map(|id| {
            let uid = homes.owner(&id);
            Removal { id, uid }
        });
        Self(with_uid.collect())
    }

    /// The uids that they keep taken.
    pub(super) fn uids(&self) -> Vec<u32> {
        self.0.iter().filter_map(|removal| removal.uid).collect()
    }

    /// Removes the rest on a thread of its own. Sandboxes get the uids of the range then that had no other reason to be
    /// `taken`.
    pub(super) fn finish(self, host: &Arc<Host>, taken: Vec<u32>) {
        if self.0.is_empty() {
            return;
        }
        let count = self.0.len();
        let own = Arc::clone(host);
        let started = Thread::new("removals").start(move || self.remove_all(&own, &taken));
        match started {
            Ok(_) => logging::info(format_args!(
                "{count} deletions of an earlier server go on while this one serves"
            )),
            Err(error) => logging::info(format_args!(
                "{count} deletions of an earlier server are left to the next start: {error}"
            )),
        }
    }

    fn remove_all(self, host: &Host, taken: &[u32]) {
        let records = host.records.as_deref();
        let is_left =
            |Removal { id, .. }: &Removal| !is_removed(id, remove(&host.homes, records, id, None));
        let (left, gone): (Vec<_>, Vec<_>) = self.0.into_iter().partition(is_left);
        let mut table = host.table();
        let ids: Vec<_> = gone.iter().map(|removal| removal.id.clone()).collect();
        for mut removal in left.into_iter().chain(gone) {
            let is_given = |uid: &u32| host.users.contains(uid) && !taken.contains(uid);
            removal.uid = removal.uid.filter(is_given);
            table.put_off(removal);
        }
        // Homes of one uid may come from servers of different times: it is given back with the last of them.
        for id in ids {
            table.end_removal(&id);
        }
        drop(table);
        host.changed.notify_all();
    }
}

impl Host {
    /// Tries again to remove what could not be removed before.
    pub(super) fn retry_removals(&self, deadline: Instant) {
        let all = self.table().unfinished.clone();
        for Removal { id, .. } in all {
            let records = self.records.as_deref();
            if is_removed(&id, remove(&self.homes, records, &id, Some(deadline))) {
                logging::info(format_args!("removed what was left of sandbox {id}"));
                self.table().end_removal(&id);
                self.changed.notify_all();
            }
        }
    }
}

/// Removes a home and then its record, which says until then that it is to be removed. False if something is left at the
/// `deadline`.
fn remove(
    homes: &Homes,
    records: Option<&Records>,
    id: &str,
    deadline: Option<Instant>,
) -> Result<bool> {
    if !homes.remove(id, deadline)? {
        if deadline.is_none() {
            let text = format!("something was put into the home of {id} meanwhile");
            return Err(Error::new(Kind::System, text));
        }
        return Ok(false);
    }
    let cleared = records.map_or(Ok(()), |records| records.clear(id, None));
    let act = format_args!("cannot remove the record of {id}");
    cleared.map_err(|errno| Error::system(act, errno))?;
    Ok(true)
}

/// Whether a home is gone. Logs why not.
pub(super) fn is_removed(id: &str, result: Result<bool>) -> bool {
    result.unwrap_or_else(|error| {
        logging::info(format_args!(
            "cannot finish the deletion of sandbox {id}: {error}"
        ));
        false
    })
}
