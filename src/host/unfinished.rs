//! Deletions that an earlier server has begun and not ended.
//!
//! A start removes what it can in a second. The rest, which may be millions of files, is removed while the server serves: a
//! tenant that leaves much behind keeps nobody waiting. Until then the uids stay taken.

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

/// The homes that are to be removed, by id, with their owners.
#[derive(Default)]
pub(super) struct Unfinished(Vec<(String, Option<u32>)>);

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
            (id, uid)
        });
        Self(with_uid.collect())
    }

    /// The uids that they keep taken.
    pub(super) fn uids(&self) -> Vec<u32> {
        self.0.iter().filter_map(|(_, uid)| *uid).collect()
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
        let (mut free, mut kept) = (Vec::new(), taken.to_vec());
        for (id, uid) in self.0 {
            let records = host.records.as_deref();
            if is_removed(&id, remove(&host.homes, records, &id, None)) {
                free.extend(uid);
            } else {
                kept.extend(uid);
            }
        }
        // Homes of one uid may come from servers of different times.
        for (at, uid) in free.iter().enumerate() {
            if host.users.contains(uid) && !kept.contains(uid) && !free[..at].contains(uid) {
                host.table().give(*uid);
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

fn is_removed(id: &str, result: Result<bool>) -> bool {
    result.unwrap_or_else(|error| {
        logging::info(format_args!(
            "cannot finish the deletion of sandbox {id}: {error}"
        ));
        false
    })
}
