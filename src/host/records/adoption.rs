//! A host's beginning where another one was: which of its records and homes are sandboxes, and what happens to the rest.
//!
//! Nothing is guessed. A record and a home become a sandbox if they agree with each other and with nobody else; what does
//! not is put aside, where nobody gets it and nothing deletes it, and so are the uids that it has.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use super::{Found, LastRun, Record, RecordFile, Records};
use crate::error::{Error, Kind, Result};
use crate::host::homes::Homes;
use crate::host::roots::Roots;
use crate::logging;

/// What a host takes over.
#[derive(Default)]
pub(in crate::host) struct Adoption {
    /// How the last server has ended.
    pub(in crate::host) last_run: LastRun,
    /// The sandboxes.
    pub(in crate::host) records: Vec<(Record, Arc<RecordFile>)>,
    /// Those whose homes and records are to be removed.
    pub(in crate::host) removals: Vec<String>,
    /// Uids of homes that no sandbox has.
    pub(in crate::host) aside: Vec<u32>,
}

impl Adoption {
    /// The uids of the sandboxes.
    pub(in crate::host) fn uids(&self) -> Vec<u32> {
        self.records.iter().map(|(record, _)| record.uid).collect()
    }
}

/// Decides about all records and homes. Nothing is removed yet: processes may still use it.
///
/// # Errors
/// `System` if more than `most` would be aside, the snapshots of all are missing, or something cannot be read or moved.
pub(in crate::host) fn adopt(
    homes: &Homes,
    records: &Records,
    roots: &Roots,
    users: &RangeInclusive<u32>,
    accounts: &[u32],
    most: usize,
) -> Result<Adoption> {
    let last_run = records.last_run()?;
    let Found {
        records: read,
        mut deletions,
        unmade,
        mut rejected,
    } = records.find()?;
    deletions.extend(unmade);
    let mut aside = Vec::new();
    let mut kept: Vec<(Record, Arc<RecordFile>)> = Vec::with_capacity(read.len());
    for (record, file) in read {
        if let Some(root) = &record.spec.root {
            roots.check_store(&record.id, root)?;
        }
        let uid = record.uid;
        let same = kept.iter().find(|(other, _)| other.uid == uid);
        let why = if let Some((other, _)) = same {
            Some(format!("its uid {uid} is that of sandbox {}", other.id))
        } else if !users.contains(&uid) {
            Some(format!("its uid {uid} is not in SBX_UID_RANGE"))
        } else if accounts.contains(&uid) {
            Some(format!("its uid {uid} has an account or a group"))
        } else {
            let root = record.spec.root.as_ref();
            homes
                .objection(&record.id, uid)
                .or_else(|| roots.objection(root?, uid))
        };
        match why {
            None => kept.push((record, file)),
            Some(why) => {
                aside.push(uid);
                rejected.push((record.id, why));
            }
        }
    }
    let has_record = |id: &String| {
        let mut kept = kept.iter().map(|(record, _)| &record.id);
        kept.any(|kept| kept == id) || deletions.contains(id)
    };
    for id in homes.ids()? {
        if !has_record(&id) && !rejected.iter().any(|(other, _)| *other == id) {
            rejected.push((id, "its home has no record".to_owned()));
        }
    }
    aside.extend(put_aside(homes, records, &rejected, most)?);
    records.note_begin();
    Ok(Adoption {
        last_run,
        records: kept,
        removals: deletions,
        aside,
    })
}

/// Moves what belongs to no sandbox aside, and returns the uids that all homes there have.
fn put_aside(
    homes: &Homes,
    records: &Records,
    rejected: &[(String, String)],
    most: usize,
) -> Result<Vec<u32>> {
    let directory = homes.aside()?;
    let shown: PathBuf = directory.path();
    let count = directory.ids()?.len() + rejected.len();
    if count > most {
        let (id, why) = rejected.first().map_or(("", ""), |(id, why)| (id, why));
        let text = format!(
            "cannot hold sandboxes: {count} homes and records belong to no sandbox, and SBX_ASIDE_MAX is {most}; look at \
             {}, remove what nobody needs, or set SBX_ASIDE_MAX (the first of {} new ones, {id}: {why})",
            shown.display(),
            rejected.len()
        );
        return Err(Error::new(Kind::System, text));
    }
    for (id, why) in rejected {
        let moved = directory
            .take(homes, id)
            .and_then(|()| records.clear(id, Some(directory.descriptor())));
        moved.map_err(|errno| {
            let act = format_args!("cannot put sandbox {id} aside in {}", shown.display());
            Error::system(act, errno)
        })?;
        logging::info(format_args!(
            "sandbox {id} is not taken over, and put aside in {}: {why}",
            shown.display()
        ));
    }
    directory.owners()
}
