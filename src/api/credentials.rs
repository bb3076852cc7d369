//! Where requests have their token, at all doors; and so what no server in a workspace gets.
//!
//! A door reads tokens by a [`TokenHeader`] or as a subprotocol, and both are withheld from such servers by every door,
//! whether or not it reads them: a client may send all that it has to all doors.

use std::borrow::Cow;

use subtle::ConstantTimeEq;

use crate::codec::base64;
use crate::http::Request;
use crate::http::handshake::subprotocols;
use crate::http::parse::Head;

/// The headers that carry a token at some door, in lower case.
pub(super) const NAMES: &[&str] = &[
    "x-sandbox-token",
    "authorization",
    "x-access-token",
    "e2b-traffic-access-token",
    "x-api-key",
];

/// One of [`NAMES`]: there is no other way to read a token.
#[derive(Debug, Clone, Copy)]
pub(super) struct TokenHeader(usize);

impl TokenHeader {
    pub(super) const SANDBOX_TOKEN: Self = Self(0);
    pub(super) const AUTHORIZATION: Self = Self(1);
    pub(super) const ACCESS_TOKEN: Self = Self(2);
    pub(super) const TRAFFIC_ACCESS_TOKEN: Self = Self(3);
    pub(super) const API_KEY: Self = Self(4);

    /// The name, in lower case.
    pub(super) const fn name(self) -> &'static str {
        NAMES[self.0]
    }

    /// The value of the first one.
    pub(super) fn value(self, head: &Head) -> Option<&[u8]> {
        head.header(self.name())
    }
}

/// Before an API key, in the form that some clients demand.
const KEY_PREFIX: &[u8] = b"e2b_";

/// The tokens that an API key may stand for.
pub(super) fn forms_of_key(key: &[u8]) -> [Option<&[u8]>; 2] {
    [Some(key), key.strip_prefix(KEY_PREFIX)]
}

/// Whether a subprotocol carries a token, in any case of its letters.
pub(super) fn is_bearer(subprotocol: &[u8]) -> bool {
    let beginning = subprotocol.trim_ascii().get(..BEARER_SUBPROTOCOL.len());
    beginning.is_some_and(|start| start.eq_ignore_ascii_case(BEARER_SUBPROTOCOL))
}

/// The beginning of a subprotocol of WebSocket that carries a token. Browsers can set no header there.
const BEARER_SUBPROTOCOL: &[u8] = b"sbx.bearer.";

/// Whether a token is the one that was presented, compared in constant time.
pub(super) fn is_same(token: &str, presented: &[u8]) -> bool {
    token.as_bytes().ct_eq(presented).into()
}

/// The token of a request, if it has one, and where it was found.
pub(super) type Presented<'r> = (&'static str, Option<Cow<'r, [u8]>>);

/// Finds the token of a request. Where a server behind a port answers, the subprotocols are for that server.
///
/// # Errors
/// There are several, and they differ.
pub(super) fn presented_token<'r>(
    request: &'r Request<'_>,
    is_proxied: bool,
) -> Result<Presented<'r>, &'static str> {
    let Ok(own) = only_value(request, TokenHeader::SANDBOX_TOKEN) else {
        return Err("there are different X-Sandbox-Token headers");
    };
    let Ok(offered) = offered_token(request) else {
        return Err("there are different sbx.bearer. subprotocols");
    };
    // If both headers are present, Authorization may be for a proxy in between.
    Ok(match (own, bearer(request), offered) {
        (None, None, Some(token)) if !is_proxied => {
            ("sbx.bearer. subprotocol", Some(Cow::Owned(token)))
        }
        (None, bearer, _) => ("Authorization header", bearer.map(Cow::Borrowed)),
        (Some(token), ..) => ("X-Sandbox-Token header", Some(Cow::Borrowed(token))),
    })
}

/// The value of a header; `None` if it is absent.
///
/// # Errors
/// It is present more than once, with different values.
fn only_value<'r>(request: &'r Request<'_>, header: TokenHeader) -> Result<Option<&'r [u8]>, ()> {
    let mut values = request.head.values(header.name());
    let first = values.next();
    if values.any(|other| Some(other) != first) {
        return Err(());
    }
    Ok(first)
}

/// The token among the subprotocols that a WebSocket client offers. One that cannot be decoded is empty, which
/// opens nothing.
///
/// # Errors
/// There are several, and they differ.
fn offered_token(request: &Request<'_>) -> Result<Option<Vec<u8>>, ()> {
    let mut tokens =
        subprotocols(&request.head).filter_map(|name| name.strip_prefix(BEARER_SUBPROTOCOL));
    let first = tokens.next();
    if tokens.any(|other| Some(other) != first) {
        return Err(());
    }
    Ok(first.map(|token| base64::decode_url(token).unwrap_or_default()))
}

/// The token in `Authorization: Bearer <token>` (RFC 6750 section 2.1). The scheme's case does not
/// matter (RFC 9110 section 11.1).
fn bearer<'r>(request: &'r Request<'_>) -> Option<&'r [u8]> {
    let credentials = only_value(request, TokenHeader::AUTHORIZATION).ok()??;
    let (scheme, token) = credentials.split_at_checked(7)?;
    let is_bearer = scheme.eq_ignore_ascii_case(b"bearer ");
    is_bearer.then(|| token.trim_ascii_start())
}
