//! Who may do what: the host token, and the tokens of sandboxes.
//!
//! A sandbox's token is derived from the host token and the sandbox's id, so it need not be kept, and
//! is still right after the sandbox has gone. Tokens are compared in constant time, so that their
//! values cannot be learned by timing refusals.

use hmac::{Hmac, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

use crate::config::Secret;
use crate::error::{Error, Result};
use crate::sys;

/// Decides over requests by their tokens.
pub struct Authenticator {
    host_token: Option<Secret>,
    /// What sandboxes' tokens are derived with.
    key: Secret,
    strict_scopes: bool,
}

/// What a request is about, as far as its token is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access<'a> {
    /// The machine, or the management of sandboxes: the host token's.
    Machine,
    /// The inside of a sandbox: its own token's, and the host token's unless scopes are strict.
    Inside(&'a str),
    /// The end of a sandbox: its own token's and the host token's.
    End(&'a str),
}

/// Why a token does not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// There is none.
    Missing,
    /// It is not one that opens this.
    Wrong,
    /// It is the host token, and scopes are strict.
    HostTokenInside,
}

impl Authenticator {
    /// Without a token everybody is let in. With `strict_scopes` the host token does not open what is
    /// inside a sandbox.
    ///
    /// # Errors
    /// The kernel has no random numbers.
    pub fn new(host_token: Option<Secret>, strict_scopes: bool) -> Result<Self> {
        let key = match &host_token {
            Some(token) => token.clone(),
            None => Secret::new(
                sys::random_bytes::<32>()
                    .map_err(|errno| Error::system("cannot make a key for tokens", errno))?,
            ),
        };
        Ok(Self {
            host_token,
            key,
            strict_scopes,
        })
    }

    /// Whether a request with this token may have this.
    ///
    /// # Errors
    /// Why not.
    pub fn check(
        &self,
        presented: Option<&[u8]>,
        access: Access<'_>,
    ) -> std::result::Result<(), Refused> {
        let Some(host_token) = &self.host_token else {
            return Ok(());
        };
        let presented = presented.ok_or(Refused::Missing)?;
        let is_host: bool = host_token.expose().ct_eq(presented).into();
        match access {
            Access::Inside(_) if is_host && self.strict_scopes => Err(Refused::HostTokenInside),
            _ if is_host => Ok(()),
            Access::Inside(id) | Access::End(id)
                if self.sandbox_token(id).as_bytes().ct_eq(presented).into() =>
            {
                Ok(())
            }
            _ => Err(Refused::Wrong),
        }
    }

    /// The token of a sandbox: the HMAC-SHA256 of its id, in hexadecimal.
    pub fn sandbox_token(&self, id: &str) -> String {
        use std::fmt::Write;
        let mut mac = Hmac::<Sha256>::new_from_slice(self.key.expose())
            .expect("HMAC takes keys of any length (RFC 2104)");
        mac.update(b"sbx-sandbox:");
        mac.update(id.as_bytes());
        let mut token = String::with_capacity(64);
        for byte in mac.finalize().into_bytes() {
            // Writing to memory does not fail.
            let _ = write!(token, "{byte:02x}");
        }
        token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authenticator(strict_scopes: bool) -> Authenticator {
        Authenticator::new(Some(Secret::new("secret")), strict_scopes).unwrap()
    }

    #[test]
    fn only_the_whole_token_opens() {
        let authenticator = authenticator(false);
        assert_eq!(
            authenticator.check(Some(b"secret"), Access::Machine),
            Ok(())
        );
        assert_eq!(
            authenticator.check(None, Access::Machine),
            Err(Refused::Missing)
        );
        for wrong in [&b""[..], b"secre", b"secrets", b"Secret", b"secret\0"] {
            assert_eq!(
                authenticator.check(Some(wrong), Access::Machine),
                Err(Refused::Wrong)
            );
        }
    }

    #[test]
    fn no_token_lets_everybody_in() {
        let authenticator = Authenticator::new(None, false).unwrap();
        for access in [Access::Machine, Access::Inside("a"), Access::End("a")] {
            assert_eq!(authenticator.check(None, access), Ok(()));
        }
    }

    #[test]
    fn a_sandbox_token_opens_its_sandbox_and_nothing_else() {
        let authenticator = authenticator(false);
        // Computed with: printf 'sbx-sandbox:a' | openssl dgst -sha256 -hmac secret
        assert_eq!(authenticator.sandbox_token("a"), TOKEN_OF_A);
        let token = Some(TOKEN_OF_A.as_bytes());
        assert_eq!(authenticator.check(token, Access::Inside("a")), Ok(()));
        assert_eq!(authenticator.check(token, Access::End("a")), Ok(()));
        for access in [Access::Machine, Access::Inside("b"), Access::End("b")] {
            assert_eq!(authenticator.check(token, access), Err(Refused::Wrong));
        }
    }

    const TOKEN_OF_A: &str = "15a46489fcdab04e5d178879ea9fde7aadfacf95286080ac09aecc6791c6cdc7";

    #[test]
    fn strict_scopes_keep_the_host_token_out_of_sandboxes() {
        let host = Some(&b"secret"[..]);
        assert_eq!(
            authenticator(false).check(host, Access::Inside("a")),
            Ok(())
        );
        let strict = authenticator(true);
        assert_eq!(
            strict.check(host, Access::Inside("a")),
            Err(Refused::HostTokenInside)
        );
        assert_eq!(strict.check(host, Access::End("a")), Ok(()));
        assert_eq!(strict.check(host, Access::Machine), Ok(()));
    }

    #[test]
    fn tokens_of_two_servers_without_a_host_token_differ() {
        let one = Authenticator::new(None, false).unwrap().sandbox_token("a");
        let other = Authenticator::new(None, false).unwrap().sandbox_token("a");
        assert_ne!(one, other);
    }
}
