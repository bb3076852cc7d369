//! Rewrites the redirects that a server inside sends to its clients.
//!
//! The server inside knows itself by another address than its clients do, so a redirect to itself is changed to the
//! address at which the client has found it. A client follows a redirect with its token. If the redirect led to another
//! address, or to other paths of this one, the server inside could make the client act there with that token. So the
//! client is told of such a redirect in a way that it does not follow.

/// Rounds of percent-decoding. A path that still changes after these counts as one that climbs.
const MAX_DECODINGS: usize = 4;

/// Where a client has found a server inside.
#[derive(Debug, Clone)]
pub struct Home {
    /// The host and port by which the server inside knows itself.
    pub inside: String,
    /// The hosts by which the client may know it.
    pub hosts: Vec<Vec<u8>>,
    /// The path at which the client finds the root of the server inside, without a slash at its end.
    pub prefix: Vec<u8>,
    /// The path of the request below `prefix`. It is empty, or begins with a slash.
    pub request: Vec<u8>,
    /// Whether the client may be redirected elsewhere: it has sent no token that it would send there.
    pub may_leave: bool,
}

/// What to do with a redirect.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Redirect {
    /// Keep its location.
    AsSent,
    /// Replace its location by this one.
    To(Vec<u8>),
    /// It leads to another server, or a client may understand it so.
    Elsewhere,
}

impl Home {
    /// What to do with a redirect to this location, a URI reference as in RFC 3986 section 4.1. The result is also safe
    /// for clients that resolve it by the WHATWG URL standard.
    pub(super) fn redirect(&self, location: &[u8]) -> Redirect {
        // Those clients remove tabs and line ends, and read `\` as `/`.
        if location
            .iter()
            .any(|byte| *byte <= b' ' || matches!(byte, b'\\' | 0x7f))
        {
            return Redirect::Elsewhere;
        }
        let mut is_plain = false;
        let end = location.iter().position(|byte| b":/?#".contains(byte));
        let rest = match end.map(|end| (&location[..end], &location[end..])) {
            Some((scheme, [b':', rest @ ..])) => {
                let is_web = [&b"http"[..], b"https"]
                    .iter()
                    .any(|web| scheme.eq_ignore_ascii_case(web));
                if !is_web || !rest.starts_with(b"//") {
                    return Redirect::Elsewhere;
                }
                is_plain = scheme.len() == b"http".len();
                rest
            }
            _ => location,
        };
        if let Some(rest) = rest.strip_prefix(b"//") {
            let (host, path) = rest.split_at(begin_of(rest, b"/?#"));
            let is_inside = host.eq_ignore_ascii_case(self.inside.as_bytes());
            let is_own = self.hosts.iter().any(|own| host.eq_ignore_ascii_case(own));
            if !is_inside && !is_own {
                return Redirect::Elsewhere;
            }
            return match self.absolute(path) {
                // Without scheme and host, so that the client keeps its own scheme: this server may not know that it is
                // HTTPS.
                Redirect::AsSent if is_inside || is_plain => Redirect::To(path.to_vec()),
                redirect => redirect,
            };
        }
        let (path, suffix) = rest.split_at(begin_of(rest, b"?#"));
        if path.is_empty() {
            return Redirect::AsSent;
        }
        if path.starts_with(b"/") {
            return self.absolute(rest);
        }
        let folder = self.request.iter().rposition(|byte| *byte == b'/');
        let folder = folder.map_or(&b"/"[..], |slash| &self.request[..=slash]);
        let (merged, leaves) = without_dots(&[folder, path].concat());
        if climbs_once_decoded(&merged) {
            Redirect::Elsewhere
        } else if leaves || self.request.is_empty() {
            Redirect::To(place(&[&self.prefix, &merged, suffix]))
        } else {
            Redirect::AsSent
        }
    }

    /// What to do with a redirect to an absolute path on the server, with its query and fragment.
    fn absolute(&self, reference: &[u8]) -> Redirect {
        let (path, suffix) = reference.split_at(begin_of(reference, b"?#"));
        let (path, _) = without_dots(path);
        if climbs_once_decoded(&path) {
            return Redirect::Elsewhere;
        }
        // A server inside that knows the prefix has added it itself.
        let knows = path
            .strip_prefix(&self.prefix[..])
            .is_some_and(|rest| matches!(rest.first(), None | Some(b'/')));
        let prefix: &[u8] = if knows { b"" } else { &self.prefix };
        let place = place(&[prefix, &path, suffix]);
        if place == reference {
            Redirect::AsSent
        } else {
            Redirect::To(place)
        }
    }
}

/// Joins the parts of a reference. It begins with exactly one slash, because two would begin a host.
fn place(parts: &[&[u8]]) -> Vec<u8> {
    let all = parts.concat();
    let slashes = all.iter().take_while(|byte| **byte == b'/').count();
    [b"/", &all[slashes..]].concat()
}

/// The position of the first byte that is one of `bytes`, or the length of the text.
fn begin_of(text: &[u8], bytes: &[u8]) -> usize {
    let mut all = text.iter();
    all.position(|byte| bytes.contains(byte))
        .unwrap_or(text.len())
}

/// Removes dot segments from a path (RFC 3986 section 5.2.4). Also returns whether they led above the root.
fn without_dots(path: &[u8]) -> (Vec<u8>, bool) {
    let Some(rest) = path.strip_prefix(b"/") else {
        return (path.to_vec(), false);
    };
    let (mut kept, mut leaves) = (Vec::new(), false);
    let mut segments = rest.split(|byte| *byte == b'/').peekable();
    while let Some(segment) = segments.next() {
        let dots = dots_of(segment);
        match dots {
            Some(1) => {}
            Some(2) => leaves |= kept.pop().is_none(),
            _ => kept.push(segment),
        }
        if matches!(dots, Some(1 | 2)) && segments.peek().is_none() {
            kept.push(b"");
        }
    }
    ([b"/", &kept.join(&b'/')[..]].concat(), leaves)
}

/// Whether a proxy may find `..` segments in a path because it decodes the path, once or more often, before it resolves
/// them, reads a backslash as a slash, or ignores what follows a `;` (as Tomcat does) or a control character.
fn climbs_once_decoded(path: &[u8]) -> bool {
    let mut path = path.to_vec();
    for _ in 0..=MAX_DECODINGS {
        let mut segments = path.split(|byte| matches!(byte, b'/' | b'\\'));
        let climbs = segments.any(|segment| {
            let name = segment.split(|byte| *byte == b';' || *byte <= b' ').next();
            name == Some(b"..")
        });
        if climbs {
            return true;
        }
        let decoded = decoded(&path);
        if decoded == path {
            return false;
        }
        path = decoded;
    }
    true
}

/// Decodes percent-encoding once. A percent sign without two hexadecimal digits stays, as in lenient proxies.
fn decoded(mut path: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(path.len());
    let digit = |byte: u8| char::from(byte).to_digit(16);
    while let Some((byte, mut rest)) = path.split_first() {
        let mut byte = *byte;
        if let [b'%', high, low, after @ ..] = path
            && let (Some(high), Some(low)) = (digit(*high), digit(*low))
        {
            byte = u8::try_from(high * 16 + low).unwrap_or(byte);
            rest = after;
        }
        decoded.push(byte);
        path = rest;
    }
    decoded
}

/// The number of dots if a segment consists of dots only, plain or percent-encoded; else `None`.
fn dots_of(mut segment: &[u8]) -> Option<usize> {
    let mut count = 0;
    while !segment.is_empty() {
        segment = match segment {
            [b'.', rest @ ..] | [b'%', b'2', b'e' | b'E', rest @ ..] => rest,
            _ => return None,
        };
        count += 1;
    }
    Some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(prefix: &str, request: &str) -> Home {
        Home {
            inside: "localhost:3000".to_owned(),
            hosts: vec![b"box.example:8000".to_vec()],
            prefix: prefix.as_bytes().to_vec(),
            request: request.as_bytes().to_vec(),
            may_leave: false,
        }
    }

    fn leads(home: &Home, location: &str) -> String {
        match home.redirect(location.as_bytes()) {
            Redirect::AsSent => location.to_owned(),
            Redirect::To(place) => String::from_utf8(place).unwrap(),
            Redirect::Elsewhere => "elsewhere".to_owned(),
        }
    }

    #[test]
    fn a_redirect_to_the_server_leads_to_where_the_client_has_found_it() {
        let home = home("/p/3000", "/a/b");
        for (location, expected) in [
            ("/", "/p/3000/"),
            ("/x?q=/../y#z", "/p/3000/x?q=/../y#z"),
            ("/p/3000/x", "/p/3000/x"),
            ("/p/3000", "/p/3000"),
            ("/p/30001", "/p/3000/p/30001"),
            ("/x//y/", "/p/3000/x//y/"),
            ("http://localhost:3000/x", "/p/3000/x"),
            ("HTTP://LOCALHOST:3000", "/p/3000"),
            ("http://localhost:3000?q", "/p/3000?q"),
            ("//localhost:3000/x", "/p/3000/x"),
            ("https://box.example:8000/x", "/p/3000/x"),
            (
                "https://box.example:8000/p/3000/x",
                "https://box.example:8000/p/3000/x",
            ),
            ("c", "c"),
            ("../c?d", "../c?d"),
            ("c/../../d", "c/../../d"),
            ("./c:d", "./c:d"),
            ("?q", "?q"),
            ("#f", "#f"),
            ("", ""),
        ] {
            assert_eq!(leads(&home, location), expected, "{location}");
        }
    }

    #[test]
    fn no_redirect_leads_above_the_server() {
        let home = home("/p/3000", "/a/b");
        for (location, expected) in [
            ("/../../v1/sandboxes", "/p/3000/v1/sandboxes"),
            ("/p/3000/../../v1/sandboxes", "/p/3000/v1/sandboxes"),
            ("/%2e%2E/v1", "/p/3000/v1"),
            ("/x/.%2e/..", "/p/3000/"),
            ("/.", "/p/3000/"),
            ("../../v1/sandboxes", "/p/3000/v1/sandboxes"),
            ("%2e%2e/%2e./v1?q", "/p/3000/v1?q"),
            ("../..", "/p/3000/"),
            (
                "https://box.example:8000/v1/sandboxes",
                "/p/3000/v1/sandboxes",
            ),
            ("https://box.example:8000/p/3000/../v1", "/p/3000/p/v1"),
            ("//box.example:8000/v1", "/p/3000/v1"),
            ("http://localhost:3000/../v1", "/p/3000/v1"),
        ] {
            assert_eq!(leads(&home, location), expected, "{location}");
        }
        for location in ["c", "./c", "../c"] {
            let bare = Home {
                request: Vec::new(),
                ..home.clone()
            };
            assert_eq!(leads(&bare, location), "/p/3000/c");
        }
    }

    /// A proxy in front of this server may decode a path, resolve it, and send the result here.
    #[test]
    fn a_redirect_that_climbs_once_decoded_leads_elsewhere() {
        for (home, location) in [
            (home("/p/3000", "/a/b"), "/p/3000/..%2f..%2fv1"),
            (home("/p/3000", "/a/b"), "/..%2F..%2Fv1"),
            (home("/p/3000", "/a/b"), "..%2f..%2f..%2fv1"),
            (home("/p/3000", "/a/b"), "x/%2e%2e%2fv1?q"),
            (home("/p/3000", "/a/b"), "/%252e%252e/v1"),
            (home("/p/3000", "/a/b"), "/%25252e%25252e%25252fv1"),
            (home("/p/3000", "/a/b"), "/%2525252525252e./v1"),
            (home("/p/3000", "/a/b"), "/..%5c..%5cv1"),
            (home("/p/3000", "/a/b"), "/%2e%2e%255cv1"),
            (home("/p/3000", "/a/b"), "/..;/..;a=b/v1"),
            (home("/p/3000", "/a/b"), "/%2e%2e%3bx/v1"),
            (home("/p/3000", "/a/b"), "/..%00/v1"),
            (home("/p/3000", "/a/b"), "/%zz/..%2fv1"),
            (home("/p/3000", "/a/b"), "http://localhost:3000/..%2fv1"),
            (
                home("/p/3000", "/a/b"),
                "https://box.example:8000/p/3000/..%2f..%2fv1",
            ),
            (home("", "/a/b"), "/..%2fv1"),
        ] {
            assert_eq!(leads(&home, location), "elsewhere", "{location}");
        }
        let home = home("/p/3000", "/a/b");
        for (location, expected) in [
            ("/x%2fy", "/p/3000/x%2fy"),
            ("/x?to=/..%2fv1#..%2f", "/p/3000/x?to=/..%2fv1#..%2f"),
            ("/a..%2f...;/100%25", "/p/3000/a..%2f...;/100%25"),
            ("%2e%2e%", "%2e%2e%"),
        ] {
            assert_eq!(leads(&home, location), expected, "{location}");
        }
    }

    #[test]
    fn a_client_that_came_by_https_stays_there() {
        for (home, expected) in [
            (home("/p/3000", "/a"), "/p/3000/x?q"),
            (home("", "/a"), "/p/3000/x?q"),
        ] {
            for location in [
                "http://box.example:8000/p/3000/x?q",
                "HTTP://BOX.example:8000/p/3000/x?q",
            ] {
                assert_eq!(leads(&home, location), expected);
            }
            let location = "https://box.example:8000/p/3000/x";
            assert_eq!(leads(&home, location), location);
        }
        assert_eq!(leads(&home("", "/a"), "http://box.example:8000"), "/");
    }

    #[test]
    fn what_leads_elsewhere_or_may_be_read_so_is_seen() {
        for home in [home("/p/3000", "/a"), home("", "/a")] {
            for location in [
                "http://evil.example/",
                "//evil.example/",
                "//evil.example:8000",
                "https://box.example:8000@evil.example/",
                "https://box.example:8000.evil.example/",
                "https://box.example/",
                "http://localhost:30000/",
                "/\\evil.example",
                "\\\\evil.example",
                "/\t/evil.example",
                "http:/evil.example",
                "http:evil",
                "http:///evil.example",
                "javascript:alert(1)",
                "data:text/html,x",
                "c:d",
                "a b",
                "\u{7f}",
            ] {
                assert_eq!(leads(&home, location), "elsewhere", "{location}");
            }
        }
    }

    #[test]
    fn at_a_name_of_its_own_all_paths_are_the_servers() {
        let home = home("", "/a/b");
        for (location, expected) in [
            ("/x", "/x"),
            ("/../x", "/x"),
            ("../../../x", "/x"),
            ("/..//evil.example/", "/evil.example/"),
            ("x", "x"),
            ("http://localhost:3000/x", "/x"),
            ("http://localhost:3000//evil.example", "/evil.example"),
            ("http://localhost:3000", "/"),
            ("https://box.example:8000/x", "https://box.example:8000/x"),
        ] {
            assert_eq!(leads(&home, location), expected, "{location}");
        }
    }
}
