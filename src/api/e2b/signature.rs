//! Signed requests for files: whoever knows the token of a sandbox can let others read or write one file.

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::errors::E2bError;
use crate::clock::now_ms;
use crate::codec::base64;
use crate::codec::query::Query;

/// The version, and the digest in Base64 without padding.
const SIGNATURE_BYTES: usize = 3 + 43;

/// What a signature allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Read,
    Write,
}

/// The signature of a request, with what it signs.
pub(super) struct Signature {
    given: Vec<u8>,
    /// Of what is before the token, which may be long.
    before: Sha256,
    /// What is after it.
    after: String,
    expires: Option<u64>,
}

impl Signature {
    /// That in the query of a request; `None` if it has none.
    pub(super) fn of(query: &Query, purpose: Purpose) -> Result<Option<Self>, E2bError> {
        let Some(given) = query.value("signature")? else {
            return Ok(None);
        };
        let expires = query.number("signature_expiration")?;
        let purpose = match purpose {
            Purpose::Read => "read",
            Purpose::Write => "write",
        };
        let path = query.value("path")?.unwrap_or_default();
        let user = query.value("username")?.unwrap_or_default();
        let mut before = Sha256::new();
        for part in [path, b":", purpose.as_bytes(), b":", user, b":"] {
            before.update(part);
        }
        let after = expires.map_or_else(String::new, |at: u64| format!(":{at}"));
        Ok(Some(Self {
            given: given.to_vec(),
            before,
            after,
            expires,
        }))
    }

    /// Whether it was made with a token.
    pub(super) fn is_by(&self, token: &[u8]) -> bool {
        if self.given.len() != SIGNATURE_BYTES {
            return false;
        }
        let mut digest = self.before.clone();
        digest.update(token);
        digest.update(self.after.as_bytes());
        let encoded = base64::encode(&digest.finalize());
        let expected = format!("v1_{}", encoded.trim_end_matches('='));
        expected.as_bytes().ct_eq(&self.given).into()
    }

    /// Whether its time is over.
    pub(super) fn has_expired(&self) -> bool {
        let now = now_ms() / 1000;
        self.expires.is_some_and(|at| at < now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signature(query: &str, purpose: Purpose) -> Signature {
        let query = Query::parse(Some(query.as_bytes())).unwrap();
        Signature::of(&query, purpose).unwrap().unwrap()
    }

    #[test]
    fn a_signature_is_that_of_the_clients() {
        // Python: base64(sha256(b"/a b:read::token")), without padding.
        let own = "v1_tjfYa0S6gGZxITz1BilX5UtLirKYatBKVyM/AGdo2UQ";
        let query = format!("path=/a%20b&signature={}", own.replace('+', "%2B"));
        let read = signature(&query, Purpose::Read);
        assert!(!signature(&query, Purpose::Write).is_by(b"token"));
        assert!(!read.is_by(b"other"));
        assert!(!signature(&query.replace("/a", "/b"), Purpose::Read).is_by(b"token"));
        assert!(!signature(&format!("{query}&username=x"), Purpose::Read).is_by(b"token"));
        assert!(
            !signature(&format!("{query}&signature_expiration=9"), Purpose::Read).is_by(b"token")
        );
        assert!(read.is_by(b"token"));
        assert!(!read.has_expired());
        let late = signature("path=a&signature=x&signature_expiration=9", Purpose::Read);
        assert!(late.has_expired());
    }
}
