//! The heads of requests and responses, and their limits: pure functions of the bytes received so far.
//!
//! Requests and responses are read by the same rules. The parser refuses whatever two programs could
//! read differently, so that both see the same end of a message: bare CR or LF, NUL, folded lines,
//! white space before a colon, any doubt about the length of the body.

/// Most bytes of a request line and header fields.
pub const MAX_HEAD_BYTES: usize = 64 * 1024;
/// Most bytes of a request target.
pub const MAX_TARGET_BYTES: usize = 16 * 1024;
/// Most header fields.
pub const MAX_HEADERS: usize = 256;

/// Most bytes of a request line: a target, and room for any method and version.
const MAX_REQUEST_LINE_BYTES: usize = MAX_TARGET_BYTES + 64;

/// What the bytes received so far are.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress<H> {
    /// The beginning of a head.
    Partial,
    /// A head, and its length in bytes.
    Complete(H, usize),
}

/// The header fields of a message, in the order received.
///
/// All of them are in one buffer: a client sends ten of them with each request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fields {
    /// Each name and its value.
    text: Vec<u8>,
    /// Where they end.
    ends: Vec<(usize, usize)>,
}

impl Fields {
    /// Names as sent, with values without surrounding white space.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let mut start = 0;
        self.ends.iter().map(move |(name_end, end)| {
            let (name, value) = (&self.text[start..*name_end], &self.text[*name_end..*end]);
            start = *end;
            // Names are tokens, which are ASCII.
            (std::str::from_utf8(name).unwrap_or_default(), value)
        })
    }

    fn push(&mut self, (name, value): (&[u8], &[u8])) {
        self.text.extend_from_slice(name);
        let name_end = self.text.len();
        self.text.extend_from_slice(value);
        self.ends.push((name_end, self.text.len()));
    }

    /// The values of all fields of a name.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.iter()
            .filter(move |(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    }

    /// The options of all `Connection` fields (RFC 9110 section 7.6.1), in lower case.
    pub fn connection_options(&self) -> impl Iterator<Item = String> {
        self.values("connection")
            .flat_map(|value| value.split(|byte| *byte == b','))
            .map(|option| String::from_utf8_lossy(option.trim_ascii()).to_ascii_lowercase())
    }
}

/// A request without its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// As sent: methods are case-sensitive.
    pub method: String,
    /// The host, and perhaps the port, of a target that is a URL or an authority only, undecoded.
    pub authority: Option<Vec<u8>>,
    /// Whether the target is an `https://` URL. Whoever asks for one at a proxy wants it to speak TLS.
    pub is_https: bool,
    /// The path, undecoded, beginning with a slash (or `*`). Empty for a target that is an authority only, which
    /// `CONNECT` has (RFC 9112 section 3.2.3).
    pub path: Vec<u8>,
    /// The query without its question mark, undecoded.
    pub query: Option<Vec<u8>>,
    /// 0 or 1, for HTTP/1.0 or HTTP/1.1.
    pub minor_version: u8,
    pub fields: Fields,
    /// Where the body ends.
    pub framing: Framing,
    /// Whether the connection may serve another request.
    pub keep_alive: bool,
    /// Whether the client waits for `100 Continue` before it sends the body.
    pub expects_continue: bool,
}

/// A response without its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResponseHead {
    /// From 100 to 999.
    pub status: u16,
    /// The reason phrase, which may be empty.
    pub reason: Vec<u8>,
    pub fields: Fields,
    /// As announced; the status and the request decide as well where the body ends.
    pub framing: Framing,
    /// Whether the server takes another request on the connection.
    pub keep_alive: bool,
}

/// How a message announces the end of its body (RFC 9112 section 6.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// Not at all: a request has no body then.
    None,
    /// This many bytes.
    Length(u64),
    /// By an empty last chunk.
    Chunked,
}

/// Why bytes cannot be a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParseError {
    /// The syntax is wrong; the text says where.
    Malformed(&'static str),
    /// The head is longer than [`MAX_HEAD_BYTES`] or has more than [`MAX_HEADERS`] fields.
    HeadTooLarge,
    /// The target is longer than [`MAX_TARGET_BYTES`].
    TargetTooLong,
    /// An expectation other than `100-continue`.
    ExpectationUnknown,
}

use ParseError::Malformed;

impl Head {
    /// The value of the first header field of a name.
    pub fn header<'a>(&'a self, name: &'a str) -> Option<&'a [u8]> {
        self.values(name).next()
    }

    /// The host that the request names, and perhaps the port: that of its target if this is a URL, or else that of the
    /// field `Host` (RFC 9112 section 3.2.2).
    pub fn host(&self) -> Option<&[u8]> {
        self.authority.as_deref().or_else(|| self.header("host"))
    }

    /// See [`Fields::values`].
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.fields.values(name)
    }
}

/// Parses the head of a request at the beginning of `bytes`.
///
/// # Errors
/// The bytes cannot become a head, whatever follows.
pub fn head(bytes: &[u8]) -> Result<Progress<Head>, ParseError> {
    let mut lines = Lines { bytes, at: 0 };
    // Careless clients send empty lines before a request (RFC 9112 section 2.2).
    let request_line = loop {
        match lines.next()? {
            // One more byte: the carriage return may have arrived already.
            None if bytes.len() - lines.at > MAX_REQUEST_LINE_BYTES + 1 => {
                return Err(ParseError::TargetTooLong);
            }
            None => return partial(bytes),
            Some([]) => {}
            Some(line) => break line,
        }
    };
    // Checked here too, so that the answer does not depend on how the bytes arrive.
    if request_line.len() > MAX_REQUEST_LINE_BYTES {
        return Err(ParseError::TargetTooLong);
    }
    let (method, target, minor_version) = request_line_parts(request_line)?;
    let Some(fields) = fields(&mut lines)? else {
        return partial(bytes);
    };
    let RequestTarget {
        authority,
        is_https,
        path,
        query,
    } = target_parts(&method, target)?;
    let mut head = Head {
        method,
        authority,
        is_https,
        path,
        query,
        minor_version,
        framing: framing(&fields, minor_version)?,
        keep_alive: minor_version == 1
            && !fields.connection_options().any(|option| option == "close"),
        fields,
        expects_continue: false,
    };
    head.expects_continue = expects_continue(&head)?;
    let mut hosts = head.values("host");
    if hosts.next().is_some_and(|host| !is_host(host)) {
        return Err(Malformed(
            "the Host header is not a host with or without a port",
        ));
    }
    if hosts.next().is_some() {
        return Err(Malformed("more than one Host header"));
    }
    drop(hosts);
    Ok(Progress::Complete(head, lines.at))
}

/// Parses the head of a response at the beginning of `bytes`.
///
/// # Errors
/// The bytes cannot become a head, whatever follows.
pub fn response_head(bytes: &[u8]) -> Result<Progress<ResponseHead>, ParseError> {
    let mut lines = Lines { bytes, at: 0 };
    let Some(status_line) = lines.next()? else {
        // A server of another protocol may speak first and never end a line.
        let begins = b"HTTP/1.";
        let shown = bytes.len().min(begins.len());
        if bytes[..shown] != begins[..shown] {
            return Err(Malformed("it does not begin with HTTP/1."));
        }
        return partial(bytes);
    };
    let (minor_version, status, reason) = status_line_parts(status_line)?;
    let Some(fields) = fields(&mut lines)? else {
        return partial(bytes);
    };
    let head = ResponseHead {
        status,
        reason: reason.to_vec(),
        framing: framing(&fields, minor_version)?,
        keep_alive: minor_version == 1
            && !fields.connection_options().any(|option| option == "close"),
        fields,
    };
    Ok(Progress::Complete(head, lines.at))
}

/// The header lines up to the empty one; `None` if some are missing.
fn fields(lines: &mut Lines<'_>) -> Result<Option<Fields>, ParseError> {
    let mut fields = Fields {
        text: Vec::with_capacity(lines.bytes.len() - lines.at),
        ends: Vec::new(),
    };
    while let Some(line) = lines.next()? {
        if line.is_empty() {
            return if lines.at > MAX_HEAD_BYTES {
                Err(ParseError::HeadTooLarge)
            } else {
                Ok(Some(fields))
            };
        }
        if fields.ends.len() == MAX_HEADERS {
            return Err(ParseError::HeadTooLarge);
        }
        fields.push(header_parts(line)?);
    }
    Ok(None)
}

fn partial<H>(bytes: &[u8]) -> Result<Progress<H>, ParseError> {
    if bytes.len() >= MAX_HEAD_BYTES {
        return Err(ParseError::HeadTooLarge);
    }
    Ok(Progress::Partial)
}

/// Lines that end in CRLF.
struct Lines<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Lines<'a> {
    /// The next line without its end; `None` if the end is missing.
    fn next(&mut self) -> Result<Option<&'a [u8]>, ParseError> {
        let rest = &self.bytes[self.at..];
        let Some(end) = rest
            .iter()
            .position(|byte| matches!(byte, b'\r' | b'\n' | 0))
        else {
            return Ok(None);
        };
        match (rest[end], rest.get(end + 1)) {
            (b'\r', Some(b'\n')) => {
                self.at += end + 2;
                Ok(Some(&rest[..end]))
            }
            (b'\r', None) => Ok(None),
            (b'\r', Some(_)) => Err(Malformed("a carriage return without a line feed")),
            (b'\n', _) => Err(Malformed("a line feed without a carriage return")),
            _ => Err(Malformed("a NUL byte in the head")),
        }
    }
}

fn request_line_parts(line: &[u8]) -> Result<(String, &[u8], u8), ParseError> {
    let mut parts = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(Malformed(
            "the request line is not METHOD TARGET VERSION with single spaces",
        ));
    };
    if method.is_empty() || !method.iter().copied().all(is_token) {
        return Err(Malformed("the method is not a token"));
    }
    if target.is_empty() || !target.iter().all(|byte| *byte > b' ' && *byte != 0x7f) {
        return Err(Malformed("the target is empty or has a control character"));
    }
    if target.len() > MAX_TARGET_BYTES {
        return Err(ParseError::TargetTooLong);
    }
    let minor_version = match version {
        b"HTTP/1.1" => 1,
        b"HTTP/1.0" => 0,
        _ => return Err(Malformed("the version is neither HTTP/1.1 nor HTTP/1.0")),
    };
    Ok((
        String::from_utf8_lossy(method).into_owned(),
        target,
        minor_version,
    ))
}

fn status_line_parts(line: &[u8]) -> Result<(u8, u16, &[u8]), ParseError> {
    let malformed = Malformed("the status line is not VERSION STATUS REASON");
    let (minor_version, rest) = match line.split_at_checked(9) {
        Some((b"HTTP/1.1 ", rest)) => (1, rest),
        Some((b"HTTP/1.0 ", rest)) => (0, rest),
        _ => return Err(malformed),
    };
    let (digits, rest) = rest.split_at_checked(3).ok_or(malformed)?;
    if !digits.iter().all(u8::is_ascii_digit) || digits[0] == b'0' {
        return Err(malformed);
    }
    let number = |number, digit: &u8| number * 10 + u16::from(digit - b'0');
    let status = digits.iter().fold(0, number);
    // Some servers leave out the reason and its space.
    let reason = match rest {
        [] => rest,
        [b' ', reason @ ..] => reason,
        _ => return Err(malformed),
    };
    if !is_text(reason) {
        return Err(Malformed("the reason has a control character"));
    }
    Ok((minor_version, status, reason))
}

/// The name and the value of a header line.
///
/// # Errors
/// `Malformed`.
pub(super) fn header_parts(line: &[u8]) -> Result<(&[u8], &[u8]), ParseError> {
    if line.starts_with(b" ") || line.starts_with(b"\t") {
        return Err(Malformed("a folded header line"));
    }
    let colon = line.iter().position(|byte| *byte == b':');
    let colon = colon.ok_or(Malformed("a header line without a colon"))?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    if name.is_empty() || !name.iter().copied().all(is_token) {
        return Err(Malformed(
            "a header name is not a token, or has white space before its colon",
        ));
    }
    if !is_text(value) {
        return Err(Malformed("a header value has a control character"));
    }
    Ok((name, value.trim_ascii()))
}

/// The length of what is `left`, or `most` if that is less.
pub(super) fn at_most(left: u64, most: usize) -> usize {
    usize::try_from(left).map_or(most, |left| left.min(most))
}

/// Whether `bytes` have no control character other than tabs.
pub(super) fn is_text(bytes: &[u8]) -> bool {
    bytes
        .iter()
        .all(|byte| !byte.is_ascii_control() || *byte == b'\t')
}

/// `tchar` of RFC 9110 section 5.6.2.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Whether `text` is a host, which may be empty, and perhaps a port: the syntax of `Host` (RFC 9110 section 7.2).
fn is_host(text: &[u8]) -> bool {
    let is_in_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=".contains(byte);
    let name_end = if text.starts_with(b"[") {
        let end = text.iter().position(|byte| *byte == b']');
        end.filter(|end| {
            let address = &text[1..*end];
            let is_in_address = |byte: &u8| *byte == b':' || is_in_name(byte);
            !address.is_empty() && address.iter().all(is_in_address)
        })
        .map(|end| end + 1)
    } else {
        let end = text.iter().position(|byte| *byte == b':');
        Some(end.unwrap_or(text.len())).filter(|end| text[..*end].iter().all(is_in_name))
    };
    name_end.is_some_and(|end| match &text[end..] {
        [] => true,
        [b':', port @ ..] => port.iter().all(u8::is_ascii_digit),
        _ => false,
    })
}

/// The parts of a request target.
struct RequestTarget {
    authority: Option<Vec<u8>>,
    is_https: bool,
    path: Vec<u8>,
    query: Option<Vec<u8>>,
}

fn target_parts(method: &str, target: &[u8]) -> Result<RequestTarget, ParseError> {
    // Clients do not send fragments (RFC 9112 section 3.2): this # is part of an unescaped name.
    if target.contains(&b'#') {
        return Err(Malformed("the target has a #, which is sent as %23"));
    }
    // A client of a proxy sends the absolute form (RFC 9112 section 3.2.2), and so may a proxy.
    let plain = target.strip_prefix(b"http://");
    let absolute = plain.or(target.strip_prefix(b"https://"));
    let (authority, origin) = match absolute {
        None if method == "CONNECT" && !target.contains(&b'/') => (Some(target), &b""[..]),
        None => (None, target),
        Some(rest) => match rest.iter().position(|byte| matches!(byte, b'/' | b'?')) {
            Some(slash) if rest[slash] == b'/' => (Some(&rest[..slash]), &rest[slash..]),
            Some(_) => return Err(Malformed("the target has a query without a path")),
            None => (Some(rest), &b"/"[..]),
        },
    };
    if absolute.is_some()
        && authority.is_none_or(|host| matches!(host.first(), None | Some(b':')) || !is_host(host))
    {
        return Err(Malformed("the target is a URL without a valid host"));
    }
    if !origin.starts_with(b"/") && origin != b"*" && !origin.is_empty() {
        return Err(Malformed(NO_SLASH));
    }
    let (path, query) = match origin.iter().position(|byte| *byte == b'?') {
        Some(mark) => (&origin[..mark], Some(origin[mark + 1..].to_vec())),
        None => (origin, None),
    };
    Ok(RequestTarget {
        authority: authority.map(<[u8]>::to_vec),
        is_https: absolute.is_some() && plain.is_none(),
        path: path.to_vec(),
        query,
    })
}

/// What is wrong with a request of HTTP/1.1 that does not say which host it is for (RFC 9112 section 3.2).
pub(super) const NO_HOST: &str = "the Host header is missing";

/// What is wrong with a target that is no path, where one is needed.
pub(super) const NO_SLASH: &str = "the target does not begin with a slash";

fn framing(fields: &Fields, minor_version: u8) -> Result<Framing, ParseError> {
    let mut lengths = fields.values("content-length");
    let length = lengths.next();
    if lengths.any(|other| Some(other) != length) {
        return Err(Malformed("different Content-Length headers"));
    }
    let mut codings = fields.values("transfer-encoding");
    if let Some(coding) = codings.next() {
        if length.is_some() {
            return Err(Malformed("both Content-Length and Transfer-Encoding"));
        }
        let is_chunked = coding.eq_ignore_ascii_case(b"chunked") && codings.next().is_none();
        if minor_version == 0 || !is_chunked {
            return Err(Malformed(
                "a transfer coding other than chunked, or in HTTP/1.0",
            ));
        }
        return Ok(Framing::Chunked);
    }
    let Some(length) = length else {
        return Ok(Framing::None);
    };
    if length.is_empty() || !length.iter().all(u8::is_ascii_digit) {
        return Err(Malformed("Content-Length is not a number"));
    }
    std::str::from_utf8(length)
        .ok()
        .and_then(|text| text.parse().ok())
        .map(Framing::Length)
        .ok_or(Malformed("Content-Length is larger than any body"))
}

fn expects_continue(head: &Head) -> Result<bool, ParseError> {
    let mut expected = false;
    for value in head.values("expect") {
        if !value.eq_ignore_ascii_case(b"100-continue") {
            return Err(ParseError::ExpectationUnknown);
        }
        // Ignored in HTTP/1.0 (RFC 9110 section 10.1.1).
        expected = head.minor_version == 1;
    }
    Ok(expected && head.framing != Framing::None && head.framing != Framing::Length(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete(text: &str) -> Head {
        match head(text.as_bytes()) {
            Ok(Progress::Complete(head, length)) => {
                assert_eq!(length, text.len());
                head
            }
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[track_caller]
    fn forbid(text: &str) {
        assert!(
            matches!(head(text.as_bytes()), Err(Malformed(_))),
            "{text:?}: {:?}",
            head(text.as_bytes())
        );
    }

    const REQUEST: &str =
        "\r\nPUT /a%20b?c=d&e HTTP/1.1\r\nHost: h\r\nContent-Length: 12\r\nX-Y:  v w \t\r\n\r\n";

    #[test]
    fn reads_a_whole_head() {
        let head = complete(REQUEST);
        assert_eq!(head.method, "PUT");
        assert_eq!(head.path, b"/a%20b");
        assert_eq!(head.query.as_deref(), Some(&b"c=d&e"[..]));
        assert_eq!(head.framing, Framing::Length(12));
        assert_eq!(head.header("x-y"), Some(&b"v w"[..]));
        assert!(head.keep_alive);
    }

    #[test]
    fn every_prefix_is_partial_and_every_suffix_is_left_alone() {
        for end in 0..REQUEST.len() {
            assert_eq!(
                head(&REQUEST.as_bytes()[..end]),
                Ok(Progress::Partial),
                "{end}"
            );
        }
        let longer = format!("{REQUEST}body bytes\n\0");
        let Ok(Progress::Complete(_, length)) = head(longer.as_bytes()) else {
            panic!()
        };
        assert_eq!(length, REQUEST.len());
    }

    #[test]
    fn forbids_what_two_parties_could_read_differently() {
        for line in [
            "A\n: b",
            "A: b\rc",
            "A: b\0",
            "A : b",
            " A: b",
            "\tA: b",
            "A b",
            ": b",
            "A: b\u{7f}",
            "Content-Length: -1",
            "Content-Length: +1",
            "Content-Length: ",
            "Content-Length: 0x10",
            "Content-Length: 1 2",
            "Content-Length: 1, 1",
            "Content-Length: 18446744073709551616",
            "Content-Length: 1\r\nContent-Length: 2",
            "Content-Length: 1\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: gzip",
            "Transfer-Encoding: gzip, chunked",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: \u{b}chunked",
            "Host: a\r\nHost: b",
        ] {
            forbid(&format!("GET / HTTP/1.1\r\n{line}\r\n\r\n"));
        }
    }

    #[test]
    fn forbids_bad_request_lines() {
        for line in [
            "GET / HTTP/1.2",
            "GET / HTTP/2.0",
            "GET / http/1.1",
            "GET  / HTTP/1.1",
            "GET / HTTP/1.1 ",
            " GET / HTTP/1.1",
            "GET /",
            "GET",
            "G@T / HTTP/1.1",
            "GET a HTTP/1.1",
            "GET /\u{1} HTTP/1.1",
            "CONNECT a:1/ HTTP/1.1",
            "connect a:1 HTTP/1.1",
            "CONNECT http://a?b HTTP/1.1",
            "GET /a#b HTTP/1.1",
            "GET /?a#b HTTP/1.1",
            "GET x://a/b HTTP/1.1",
            "GET http://a?b/health HTTP/1.1",
            "GET http:///b HTTP/1.1",
            "GET https://:80/b HTTP/1.1",
            "GET http://user@a/b HTTP/1.1",
            "GET http://a:x/b HTTP/1.1",
            "GET http://a,b\\c/b HTTP/1.1",
        ] {
            forbid(&format!("{line}\r\n\r\n"));
        }
    }

    #[test]
    fn targets_of_proxies_name_their_authority() {
        for (line, authority, path, query) in [
            ("CONNECT a:1 HTTP/1.1", Some("a:1"), "", None),
            ("CONNECT [::1]:1 HTTP/1.1", Some("[::1]:1"), "", None),
            (
                "GET http://a:80/b?c HTTP/1.1",
                Some("a:80"),
                "/b",
                Some("c"),
            ),
            ("GET http://a HTTP/1.1", Some("a"), "/", None),
            ("GET https://a/b HTTP/1.1", Some("a"), "/b", None),
            ("GET /b HTTP/1.1", None, "/b", None),
            ("CONNECT /b HTTP/1.1", None, "/b", None),
        ] {
            let head = complete(&format!("{line}\r\n\r\n"));
            assert_eq!(
                head.authority.as_deref(),
                authority.map(str::as_bytes),
                "{line}"
            );
            assert_eq!(head.is_https, line.contains("https:"), "{line}");
            assert_eq!(head.path, path.as_bytes(), "{line}");
            assert_eq!(head.query.as_deref(), query.map(str::as_bytes), "{line}");
        }
    }

    #[test]
    fn a_host_is_a_name_or_an_address_with_or_without_a_port() {
        let names = [
            "",
            "a",
            "a.b:80",
            "a_b:",
            "127.0.0.1:1",
            "[::1]",
            "[::1]:1",
            "a%41",
            "\t a ",
        ];
        for host in names {
            let head = complete(&format!("GET / HTTP/1.1\r\nHost:{host}\r\n\r\n"));
            assert_eq!(head.host(), Some(host.trim().as_bytes()));
        }
        for host in [
            "a b", "a/b", "a@b", "a:80:80", "a:x", "a:-1", "::1", "[::1", "[]", "[::1]a", "[a b]",
            "a\\b", "a?b", "\"a\"", "<a>", "http://a", "a\u{e9}",
        ] {
            forbid(&format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        }
    }

    #[test]
    fn the_target_decides_over_the_host_field() {
        for (target, host) in [("/", "b"), ("http://a:1/", "a:1"), ("https://a", "a")] {
            let head = complete(&format!("GET {target} HTTP/1.1\r\nHost: b\r\n\r\n"));
            assert_eq!(head.host(), Some(host.as_bytes()));
        }
        assert_eq!(complete("GET / HTTP/1.0\r\n\r\n").host(), None);
    }

    #[test]
    fn forbids_early_what_can_never_become_right() {
        forbid("GET / HTTP/1.1\nHost: h");
        forbid("\n");
        forbid("GET / HTTP/1.1\r\nA: b\rX");
    }

    #[test]
    fn forbids_chunked_in_http_1_0() {
        forbid("GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n");
    }

    #[test]
    fn a_long_request_line_comes_to_the_same_however_it_arrives() {
        let empty_lines = "\r\n".repeat(MAX_TARGET_BYTES);
        let target = "a".repeat(MAX_TARGET_BYTES - 1);
        for (text, is_right) in [
            (format!("{empty_lines}GET / HTTP/1.1\r\n\r\n"), true),
            (
                format!("{} /{target} HTTP/1.1\r\n\r\n", "M".repeat(54)),
                true,
            ),
            (
                format!("{} /{target} HTTP/1.1\r\n\r\n", "M".repeat(55)),
                false,
            ),
        ] {
            assert_eq!(head(text.as_bytes()).is_ok(), is_right);
            for end in (0..20).map(|back| text.len() - 1 - back) {
                let part = head(&text.as_bytes()[..end]);
                assert!(!is_right || part == Ok(Progress::Partial), "{part:?}");
            }
        }
    }

    #[test]
    fn limits_have_their_own_errors() {
        let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(MAX_TARGET_BYTES));
        assert_eq!(head(long.as_bytes()), Err(ParseError::TargetTooLong));
        assert_eq!(
            head(
                "GET /"
                    .bytes()
                    .chain(vec![b'a'; MAX_TARGET_BYTES + 100])
                    .collect::<Vec<_>>()
                    .as_slice()
            ),
            Err(ParseError::TargetTooLong)
        );
        let large = format!("GET / HTTP/1.1\r\nA: {}", "a".repeat(MAX_HEAD_BYTES));
        assert_eq!(head(large.as_bytes()), Err(ParseError::HeadTooLarge));
        assert_eq!(
            head(format!("{large}\r\n\r\n").as_bytes()),
            Err(ParseError::HeadTooLarge)
        );
        let many = format!(
            "GET / HTTP/1.1\r\n{}\r\n",
            "A: b\r\n".repeat(MAX_HEADERS + 1)
        );
        assert_eq!(head(many.as_bytes()), Err(ParseError::HeadTooLarge));
    }

    #[test]
    fn knows_when_a_connection_ends() {
        assert!(!complete("GET / HTTP/1.0\r\n\r\n").keep_alive);
        assert!(!complete("GET / HTTP/1.1\r\nConnection: x, Close\r\n\r\n").keep_alive);
        assert!(complete("GET / HTTP/1.1\r\nConnection: keep-alive\r\n\r\n").keep_alive);
    }

    #[test]
    fn takes_the_path_of_an_absolute_target() {
        assert_eq!(complete("GET http://h:1/a?b HTTP/1.1\r\n\r\n").path, b"/a");
        assert_eq!(complete("GET http://h HTTP/1.1\r\n\r\n").path, b"/");
        assert_eq!(complete("GET /a:b HTTP/1.1\r\n\r\n").path, b"/a:b");
        assert_eq!(complete("OPTIONS * HTTP/1.1\r\n\r\n").path, b"*");
    }

    #[test]
    fn expectations() {
        let with = |version, length| {
            complete(&format!(
                "PUT / HTTP/1.{version}\r\nExpect: 100-Continue\r\nContent-Length: {length}\r\n\r\n"
            ))
            .expects_continue
        };
        assert!(with(1, 5));
        assert!(!with(1, 0));
        assert!(!with(0, 5));
        assert_eq!(
            head(b"PUT / HTTP/1.1\r\nExpect: 200-ok\r\n\r\n"),
            Err(ParseError::ExpectationUnknown)
        );
    }

    const RESPONSE: &str = "HTTP/1.1 404 Not Found\r\nServer: s\r\nContent-Length: 12\r\n\r\n";

    fn response(text: &str) -> ResponseHead {
        match response_head(text.as_bytes()) {
            Ok(Progress::Complete(head, length)) => {
                assert_eq!(length, text.len());
                head
            }
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn reads_the_head_of_a_response() {
        let head = response(RESPONSE);
        assert_eq!((head.status, &head.reason[..]), (404, &b"Not Found"[..]));
        assert_eq!(head.fields.iter().next(), Some(("Server", &b"s"[..])));
        assert_eq!(head.framing, Framing::Length(12));
        for (line, reason) in [
            ("HTTP/1.0 200", ""),
            ("HTTP/1.1 200 ", ""),
            ("HTTP/1.1 999 a  b\tc\u{e9}", "a  b\tc\u{e9}"),
        ] {
            let head = response(&format!("{line}\r\n\r\n"));
            assert_eq!(head.reason, reason.as_bytes(), "{line}");
            assert_eq!(head.framing, Framing::None);
        }
    }

    #[test]
    fn every_prefix_of_a_response_is_partial() {
        for end in 0..RESPONSE.len() {
            assert_eq!(
                response_head(&RESPONSE.as_bytes()[..end]),
                Ok(Progress::Partial),
                "{end}"
            );
        }
    }

    #[test]
    fn forbids_responses_that_could_be_read_differently() {
        for text in [
            "HTTP/1.1 200 OK\nA: b\n\n",
            "HTTP/1.1 200 OK\r\nA: b\rc\r\n\r\n",
            "HTTP/1.1 200 O\0K\r\n\r\n",
            "HTTP/1.1 200 O\u{1}K\r\n\r\n",
            "HTTP/1.1 20 OK\r\n\r\n",
            "HTTP/1.1 2000 OK\r\n\r\n",
            "HTTP/1.1 099 OK\r\n\r\n",
            "HTTP/1.1 +20 OK\r\n\r\n",
            "HTTP/1.1  200 OK\r\n\r\n",
            "HTTP/2 200 OK\r\n\r\n",
            "HTTP/1.2 200 OK\r\n\r\n",
            "ICY 200 OK\r\n\r\n",
            "SSH-2.0-",
            "\r\nHTTP/1.1 200 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
            "HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
            "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        ] {
            let read = response_head(text.as_bytes());
            assert!(matches!(read, Err(Malformed(_))), "{text:?}: {read:?}");
        }
        let endless = format!("HTTP/1.1 200 {}", "a".repeat(MAX_HEAD_BYTES));
        assert_eq!(
            response_head(endless.as_bytes()),
            Err(ParseError::HeadTooLarge)
        );
        let many = "A: b\r\n".repeat(MAX_HEADERS + 1);
        assert_eq!(
            response_head(format!("HTTP/1.1 200 OK\r\n{many}\r\n").as_bytes()),
            Err(ParseError::HeadTooLarge)
        );
    }

    #[test]
    fn the_same_length_twice_is_one_length() {
        let head = complete("PUT / HTTP/1.1\r\nContent-Length: 3\r\ncontent-length: 3\r\n\r\n");
        assert_eq!(head.framing, Framing::Length(3));
    }
}
