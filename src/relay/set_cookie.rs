//! `Set-Cookie` of a server that is reached by another address than its own (RFC 6265).
//!
//! Clients read the field in their own lax ways. What is written here is read alike by all: an attribute ends at a
//! semicolon, names have no case, and the last `Path` and `Domain` are the only ones.

/// Most bytes of a path. Browsers ignore longer ones, and take the directory of the request.
const MAX_PATH_BYTES: usize = 1024;

/// What is done to the cookies of a response.
#[derive(Debug, Clone, Default)]
pub enum Cookies {
    /// Nothing.
    #[default]
    AsSent,
    /// They are for the host of the request alone.
    OfHost,
    /// The same, and for paths below the one that stands for the server.
    Below {
        /// That path, without a slash at its end.
        prefix: Vec<u8>,
        /// The path of the request as the server sees it.
        request: Vec<u8>,
    },
}

impl Cookies {
    /// The value of `Set-Cookie` for the client; `None` if it is as the server sent it.
    pub(super) fn change(&self, cookie: &[u8]) -> Option<Vec<u8>> {
        if matches!(self, Self::AsSent) {
            return None;
        }
        let mut parts = cookie.split(|byte| *byte == b';');
        let mut kept = parts.next().unwrap_or_default().to_vec();
        let mut path = &b""[..];
        for part in parts {
            let end = part.iter().position(|byte| *byte == b'=');
            let (name, value) = part.split_at(end.unwrap_or(part.len()));
            let is = |other: &[u8]| name.trim_ascii().eq_ignore_ascii_case(other);
            if is(b"path") && matches!(self, Self::Below { .. }) {
                path = value.strip_prefix(b"=").unwrap_or_default().trim_ascii();
            } else if !is(b"domain") {
                kept.push(b';');
                kept.extend_from_slice(part);
            }
        }
        if let Self::Below { prefix, request } = self {
            kept.extend_from_slice(b"; Path=");
            kept.extend_from_slice(&below(prefix, path, request));
        }
        Some(kept)
    }
}

/// The path of a cookie below `prefix`.
fn below(prefix: &[u8], path: &[u8], request: &[u8]) -> Vec<u8> {
    let path = if path.starts_with(b"/") {
        path
    } else {
        directory(request)
    };
    let is_boundary = |rest: &[u8]| rest.is_empty() || rest.starts_with(b"/");
    // A server that knows of the prefix has put it there.
    if path.strip_prefix(prefix).is_some_and(is_boundary) && path.len() <= MAX_PATH_BYTES {
        return path.to_vec();
    }
    // Without a slash at its end it stands for the server as well, and still for no other port.
    if path == b"/" || prefix.len() + path.len() > MAX_PATH_BYTES {
        return prefix.to_vec();
    }
    [prefix, path].concat()
}

/// The path of a cookie that names none (RFC 6265 section 5.1.4), as far as it can be written in an attribute.
fn directory(request: &[u8]) -> &[u8] {
    let end = request.iter().position(|byte| *byte == b';');
    let request = &request[..end.unwrap_or(request.len())];
    match request.iter().rposition(|byte| *byte == b'/') {
        None | Some(0) => b"/",
        Some(slash) => &request[..slash],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(cookies: &Cookies, cookie: &str) -> String {
        let changed = cookies.change(cookie.as_bytes()).unwrap();
        String::from_utf8(changed).unwrap()
    }

    #[test]
    fn the_path_is_below_the_prefix_whatever_the_server_says() {
        for (request, cookie, expected) in [
            ("/", "a=b", "a=b; Path=/p/80"),
            ("", "a=b", "a=b; Path=/p/80"),
            ("/x", "a=b", "a=b; Path=/p/80"),
            ("/x/y/z", "a=b", "a=b; Path=/p/80/x/y"),
            ("/x;Domain=evil/y", "a=b", "a=b; Path=/p/80"),
            ("/x/y;Domain=evil/z", "a=b", "a=b; Path=/p/80/x"),
            ("/x/y", "a=b; Path=/", "a=b; Path=/p/80"),
            ("/", "a=b; Path=/x", "a=b; Path=/p/80/x"),
            ("/", "a=b;PATH = /x ;Secure", "a=b;Secure; Path=/p/80/x"),
            ("/", "a=b; path=/x; Path=/y", "a=b; Path=/p/80/y"),
            // The last one is none, as for browsers.
            ("/d/e", "a=b; Path=/x; Path", "a=b; Path=/p/80/d"),
            ("/d/e", "a=b; Path=x", "a=b; Path=/p/80/d"),
            ("/d/e", "a=b; Path=\"/x\"", "a=b; Path=/p/80/d"),
            ("/", "a=b; Path=/p/80/x", "a=b; Path=/p/80/x"),
            ("/", "a=b; Path=/p/80", "a=b; Path=/p/80"),
            ("/", "a=b; Path=/p/800", "a=b; Path=/p/80/p/800"),
            ("/", "a=b; Path=/p/81/", "a=b; Path=/p/80/p/81/"),
            ("/", "a=b; Path=/;\tpAtH\t=\t/x", "a=b; Path=/p/80/x"),
            ("/", "a=\"b; Path=/q; c\"", "a=\"b; c\"; Path=/p/80/q"),
            ("/", "", "; Path=/p/80"),
        ] {
            let cookies = Cookies::Below {
                prefix: b"/p/80".to_vec(),
                request: request.as_bytes().to_vec(),
            };
            assert_eq!(changed(&cookies, cookie), expected, "{request} {cookie}");
        }
    }

    #[test]
    fn a_path_that_browsers_would_ignore_is_not_written() {
        let long = format!("/{}/", "x".repeat(2000));
        let knowing = format!("/p/80{long}");
        for (request, cookie) in [
            ("/", format!("a=b; Path={long}")),
            ("/", format!("a=b; Path={knowing}")),
            (&*long, "a=b".to_owned()),
        ] {
            let cookies = Cookies::Below {
                prefix: b"/p/80".to_vec(),
                request: request.as_bytes().to_vec(),
            };
            assert_eq!(changed(&cookies, &cookie), "a=b; Path=/p/80");
        }
    }

    #[test]
    fn a_cookie_is_for_its_own_host() {
        for (cookie, expected) in [
            ("a=b; Domain=x; Path=/y; HttpOnly", "a=b; Path=/y; HttpOnly"),
            ("a=b;domain", "a=b"),
            ("a=b; DOMAIN =.x;Domain=y; Secure", "a=b; Secure"),
            ("Domain=x; Max-Age=1", "Domain=x; Max-Age=1"),
            ("a=b; XDomain=x", "a=b; XDomain=x"),
        ] {
            assert_eq!(changed(&Cookies::OfHost, cookie), expected);
        }
        assert_eq!(Cookies::AsSent.change(b"a=b; Domain=x"), None);
    }
}
