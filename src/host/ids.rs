//! The ids of sandboxes: unique, and not guessable.

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::sys;

/// Random bytes of an id, two digits each.
const ID_BYTES: usize = 12;

/// Derives ids from a secret and a counter.
pub(super) struct Ids([u8; 32]);

impl Ids {
    /// # Errors
    /// getrandom(2) fails.
    pub(super) fn new() -> Result<Self> {
        let secret = sys::random_bytes()
            .map_err(|errno| Error::system("cannot make ids for sandboxes", errno))?;
        Ok(Self(secret))
    }

    /// The id of the sandbox with this number: unique and not guessable.
    pub(super) fn of(&self, number: u64) -> String {
        let mut digest = Sha256::new();
        digest.update(self.0);
        digest.update(number.to_le_bytes());
        let mut id = format!("{:x}", digest.finalize());
        id.truncate(2 * ID_BYTES);
        id
    }
}

/// Whether a name has the form of an id.
pub(super) fn is_id(name: &str) -> bool {
    let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.len() == 2 * ID_BYTES && name.bytes().all(is_digit)
}
