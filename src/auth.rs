//! Who may do what: the host token.
//!
//! Compared in constant time, so that its value cannot be learned by timing refusals.

use subtle::ConstantTimeEq;

use crate::config::Secret;

/// Decides over requests by their tokens.
pub struct Authenticator {
    host_token: Option<Secret>,
}

impl Authenticator {
    /// Without a token everybody is let in.
    pub fn new(host_token: Option<Secret>) -> Self {
        Self { host_token }
    }

    /// Whether a request with this token may act on the machine.
    pub fn opens_machine(&self, presented: Option<&[u8]>) -> bool {
        match (&self.host_token, presented) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(token), Some(presented)) => token.expose().ct_eq(presented).into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_opens() {
        let authenticator = Authenticator::new(Some(Secret::new("secret")));
        assert!(authenticator.opens_machine(Some(b"secret")));
        for wrong in [
            None,
            Some(&b""[..]),
            Some(b"secre"),
            Some(b"secrets"),
            Some(b"Secret"),
            Some(b"secret\0"),
        ] {
            assert!(!authenticator.opens_machine(wrong));
        }
    }

    #[test]
    fn no_token_lets_everybody_in() {
        assert!(Authenticator::new(None).opens_machine(None));
    }
}
