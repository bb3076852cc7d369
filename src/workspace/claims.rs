//! Files that requests are changing by what they read.
//!
//! A request that reads a file and replaces it by something made from it would silently undo what
//! another one did in between. So it claims the path first, and others that do the same wait. A claim is
//! no lock across system calls: nobody holds the mutex while it works, and a wait has a limit.

use std::collections::HashSet;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Result};
use crate::sync::lock;

/// How long a request waits for others.
const LIMIT: Duration = Duration::from_secs(10);

/// The claimed files of a workspace.
#[derive(Default)]
pub(super) struct Claims {
    claimed: Mutex<HashSet<Vec<u8>>>,
    released: Condvar,
}

/// Files that are claimed, until the value is dropped.
pub(super) struct Claim<'a> {
    claims: &'a Claims,
    keys: Vec<Vec<u8>>,
}

impl Claims {
    /// Claims all of the files, each named by a key. Waits until none of them is claimed.
    ///
    /// # Errors
    /// `Changed` if that takes too long.
    pub(super) fn claim(&self, keys: Vec<Vec<u8>>) -> Result<Claim<'_>> {
        let deadline = Instant::now() + LIMIT;
        let mut claimed = lock(&self.claimed);
        while keys.iter().any(|key| claimed.contains(key)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let why = "another request is changing this file for long; try again";
                return Err(Error::new(Kind::Changed, why));
            }
            let waited = self.released.wait_timeout(claimed, left);
            claimed = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        claimed.extend(keys.iter().cloned());
        drop(claimed);
        Ok(Claim { claims: self, keys })
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut claimed = lock(&self.claims.claimed);
        for key in &self.keys {
            claimed.remove(key);
        }
        drop(claimed);
        self.claims.released.notify_all();
    }
}
