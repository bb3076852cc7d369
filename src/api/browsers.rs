//! What keeps browsers from doing the work of strangers: requests of pages of other sites, and content of a sandbox that
//! would become a page of this server's address.
//!
//! Browsers say where a request comes from and what for (Fetch Metadata), but over plain HTTP only to loopback. So what
//! they say adds refusals, and its absence opens nothing.

use crate::http::Refusal;
use crate::http::parse::Head;

/// Makes browsers give the pages of an answer an origin of their own (Content Security Policy level 3). Policies add up:
/// a page has what all of them allow.
pub(super) const APART: (&str, &str) = (
    "Content-Security-Policy",
    "sandbox allow-scripts allow-forms",
);

/// Fields of the server's own answers: no page of another origin can use them as a script, a style or an image, and no
/// cache keeps them. A cache may not know that `X-Sandbox-Token` is a credential.
pub(super) const OWN: &[(&str, &str)] = &[
    ("X-Content-Type-Options", "nosniff"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
];

/// Fields by which an answer speaks for all of its address, and not for itself. `WWW-Authenticate` has browsers send
/// credentials to all of it.
pub(super) const OF_ADDRESS: &[&str] = &[
    "accept-ch",
    "alt-svc",
    "critical-ch",
    "cross-origin-opener-policy",
    "expect-ct",
    "nel",
    "origin-agent-cluster",
    "public-key-pins",
    "report-to",
    "reporting-endpoints",
    "sec-session-registration",
    "secure-session-registration",
    "service-worker-allowed",
    "set-login",
    "shared-storage-write",
    "speculation-rules",
    "strict-transport-security",
    "supports-loading-mode",
    "use-as-dictionary",
    "www-authenticate",
];

/// Whether a request has the value for a field of fetch metadata. Browsers send each once.
fn says(head: &Head, name: &str, is: impl FnMut(&[u8]) -> bool) -> bool {
    head.values(name).any(is)
}

/// Whether a browser sends a request for a page of another site, or of another origin of this one.
pub(super) fn is_foreign(head: &Head) -> bool {
    says(head, "sec-fetch-site", |site| {
        site != b"same-origin" && site != b"none"
    })
}

/// Whether the page that sends a request is of this server's origin, as the browser says.
pub(super) fn is_own(head: &Head) -> bool {
    !is_foreign(head) && says(head, "sec-fetch-site", |site| site == b"same-origin")
}

/// Whether a request only goes to an address, as by a link.
pub(super) fn follows_link(head: &Head) -> bool {
    is_safe(head) && says(head, "sec-fetch-mode", |mode| mode == b"navigate")
}

/// Whether a request changes nothing (RFC 9110 section 9.2.1).
pub(super) fn is_safe(head: &Head) -> bool {
    matches!(&*head.method, "GET" | "HEAD")
}

/// Whether a browser would make a page, or a part of one, of the answer. Browsers that send no metadata still say that
/// they take the answer over HTTPS, and do so only here.
pub(super) fn wants_page(head: &Head) -> bool {
    head.header("upgrade-insecure-requests").is_some()
        || says(head, "sec-fetch-mode", |mode| mode == b"navigate")
        || says(head, "sec-fetch-dest", |for_what| {
            matches!(
                for_what,
                b"document" | b"iframe" | b"frame" | b"fencedframe" | b"embed" | b"object"
            )
        })
}

/// Whether a browser asks for a program that would answer its requests to this address.
pub(super) fn wants_service_worker(head: &Head) -> bool {
    head.header("service-worker").is_some()
        || says(head, "sec-fetch-dest", |for_what| {
            for_what == b"serviceworker"
        })
}

/// The answer to a browser that asks for one.
pub(super) fn no_service_worker() -> Refusal {
    let text = "no server inside can install a service worker here: it would answer for all of this address";
    Refusal::new(403, "forbidden", text)
}
