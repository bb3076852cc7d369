//! Access control: what the host token and the tokens of sandboxes open.
//!
//! A sandbox's token is derived from a key and the sandbox's id, so it need not be stored, and it stays valid after the
//! sandbox has ended. The key is the host token, or on a host whose sandboxes outlive it that of its first start. Tokens are compared in constant time, so that
//! refusals cannot be timed to learn them.

use hmac::{Hmac, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

use crate::config::Secret;
use crate::error::{Error, Result};
use crate::sys;

/// Checks the tokens of requests.
pub struct Authenticator {
    host_token: Option<Secret>,
    /// The key that the tokens of sandboxes are derived with.
    key: Secret,
    strict_scopes: bool,
}

/// The access that a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access<'a> {
    /// The machine, or the management of sandboxes: only the host token opens it.
    Machine,
    /// The inside of a sandbox: its own token opens it, and the host token unless scopes are strict.
    Inside(&'a str),
    /// A sandbox as a whole: its own token and the host token open it, even with strict scopes.
    Sandbox(&'a str),
}

/// Whose token a request has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder<'a> {
    /// The host's, or no token is needed.
    Operator,
    /// That of the sandbox with this id.
    Sandbox(&'a str),
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// It has no token.
    Missing,
    /// Its token does not open this.
    Wrong,
    /// Its token is the host token, and scopes are strict.
    HostTokenInside,
}

impl Authenticator {
    /// Without a host token every request is accepted. The tokens of sandboxes are derived with `kept_key`, or else with the
    /// host token. With `strict_scopes` the host token does not
    /// open the inside of sandboxes.
    ///
    /// # Errors
    /// The kernel gives no random bytes for the key.
    pub fn new(
        host_token: Option<Secret>,
        kept_key: Option<Secret>,
        strict_scopes: bool,
    ) -> Result<Self> {
        let key = match (kept_key, &host_token) {
            (Some(key), _) => key,
            (None, Some(token)) => token.clone(),
            (None, None) => Secret::new(
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

    /// Checks a request's token. Returns whose it is.
    ///
    /// # Errors
    /// Why the request is refused.
    pub fn check<'a>(
        &self,
        presented: Option<&[u8]>,
        access: Access<'a>,
    ) -> std::result::Result<Holder<'a>, Refused> {
        let Some(host_token) = &self.host_token else {
            return Ok(Holder::Operator);
        };
        let presented = presented.ok_or(Refused::Missing)?;
        let is_host: bool = host_token.expose().ct_eq(presented).into();
        match access {
            Access::Inside(_) if is_host && self.strict_scopes => Err(Refused::HostTokenInside),
            _ if is_host => Ok(Holder::Operator),
            Access::Inside(id) | Access::Sandbox(id)
                if self.sandbox_token(id).as_bytes().ct_eq(presented).into() =>
            {
                Ok(Holder::Sandbox(id))
            }
            _ => Err(Refused::Wrong),
        }
    }

    /// Whether requests need a token.
    pub fn needs_token(&self) -> bool {
        self.host_token.is_some()
    }

    /// Derives the token of a sandbox: the HMAC-SHA256 of `sbx-sandbox:` and its id, in hexadecimal.
    pub fn sandbox_token(&self, id: &str) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.key.expose())
            .expect("HMAC takes keys of any length (RFC 2104)");
        mac.update(b"sbx-sandbox:");
        mac.update(id.as_bytes());
        format!("{:x}", mac.finalize().into_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authenticator(strict_scopes: bool) -> Authenticator {
        Authenticator::new(Some(Secret::new("secret")), None, strict_scopes).unwrap()
    }

    #[test]
    fn only_the_whole_token_opens() {
        let authenticator = authenticator(false);
        assert_eq!(
            authenticator.check(Some(b"secret"), Access::Machine),
            Ok(Holder::Operator)
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
        let authenticator = Authenticator::new(None, None, false).unwrap();
        for access in [Access::Machine, Access::Inside("a"), Access::Sandbox("a")] {
            assert_eq!(authenticator.check(None, access), Ok(Holder::Operator));
        }
    }

    #[test]
    fn a_sandbox_token_opens_its_sandbox_and_nothing_else() {
        let authenticator = authenticator(false);
        // Computed with: printf 'sbx-sandbox:a' | openssl dgst -sha256 -hmac secret
        assert_eq!(authenticator.sandbox_token("a"), TOKEN_OF_A);
        let token = Some(TOKEN_OF_A.as_bytes());
        assert_eq!(
            authenticator.check(token, Access::Inside("a")),
            Ok(Holder::Sandbox("a"))
        );
        assert_eq!(
            authenticator.check(token, Access::Sandbox("a")),
            Ok(Holder::Sandbox("a"))
        );
        for access in [Access::Machine, Access::Inside("b"), Access::Sandbox("b")] {
            assert_eq!(authenticator.check(token, access), Err(Refused::Wrong));
        }
    }

    const TOKEN_OF_A: &str = "15a46489fcdab04e5d178879ea9fde7aadfacf95286080ac09aecc6791c6cdc7";

    #[test]
    fn tokens_stay_what_they_are_when_the_hosts_changes() {
        let token = || Some(Secret::new("another"));
        let kept = Some(Secret::new("secret"));
        let authenticator = Authenticator::new(token(), kept, false).unwrap();
        assert_eq!(authenticator.sandbox_token("a"), TOKEN_OF_A);
        let own = authenticator.check(Some(TOKEN_OF_A.as_bytes()), Access::Inside("a"));
        assert_eq!(own, Ok(Holder::Sandbox("a")));
        for (presented, expected) in [
            ("another", Ok(Holder::Operator)),
            ("secret", Err(Refused::Wrong)),
        ] {
            let checked = authenticator.check(Some(presented.as_bytes()), Access::Machine);
            assert_eq!(checked, expected, "{presented}");
        }
    }

    #[test]
    fn strict_scopes_keep_the_host_token_out_of_sandboxes() {
        let host = Some(&b"secret"[..]);
        assert_eq!(
            authenticator(false).check(host, Access::Inside("a")),
            Ok(Holder::Operator)
        );
        let strict = authenticator(true);
        assert_eq!(
            strict.check(host, Access::Inside("a")),
            Err(Refused::HostTokenInside)
        );
        assert_eq!(
            strict.check(host, Access::Sandbox("a")),
            Ok(Holder::Operator)
        );
        assert_eq!(strict.check(host, Access::Machine), Ok(Holder::Operator));
    }

    #[test]
    fn tokens_of_two_servers_without_a_host_token_differ() {
        let one = Authenticator::new(None, None, false)
            .unwrap()
            .sandbox_token("a");
        let other = Authenticator::new(None, None, false)
            .unwrap()
            .sandbox_token("a");
        assert_ne!(one, other);
    }
}
