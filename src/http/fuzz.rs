//! Fuzz tests of the parsers against a second implementation, which splits strings of whole messages
//! where the server decodes bytes as they arrive.

use super::chunked::{ChunkStep, Decoder};
use super::parse::{
    Framing, Head, MAX_HEAD_BYTES, MAX_HEADERS, MAX_TARGET_BYTES, ParseError, Progress, head,
    response_head,
};
use super::websocket::{Decoder as FrameDecoder, MAX_MESSAGE_BYTES, Received};
use crate::fuzz::{Random, bounded, check};

#[test]
fn a_head_is_read_as_the_grammar_says_however_it_arrives() {
    // More empty lines than a request may begin with.
    let empty_lines = b"\r\n".repeat(MAX_TARGET_BYTES);
    let tokens: &[&[u8]] = &[
        &empty_lines,
        b"\r\n",
        b"\r\n\r\n",
        b"\r",
        b"\n",
        b"\0",
        b" ",
        b"\t",
        b":",
        b": ",
        b",",
        b"?",
        b"#",
        b"*",
        b"GET ",
        b" HTTP/1.1\r\n",
        b" HTTP/1.0\r\n",
        b" HTTP/2.0\r\n",
        b"http://a",
        b"https://",
        b"Content-Length: ",
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"chunked",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Connection: close\r\n",
        b"keep-alive, close",
        b"Expect: 100-continue\r\n",
        b"Expect: x\r\n",
        b"Host: b\r\n",
        b"\x7f",
        b"\x80",
        b"\x0b",
    ];
    check("head", tokens, |input| {
        let whole = stable(input, head);
        match expected_head(input) {
            Some(Ok((expected, length))) => {
                let Ok(Progress::Complete(head, taken)) = whole else {
                    panic!("{whole:?}, and not {expected:?}");
                };
                assert_eq!((Expected::from(head), taken), (expected, length));
            }
            Some(Err(why)) => assert!(whole.is_err(), "{why}: {whole:?}"),
            None => {
                let bare = |pair: &[u8]| pair[1] == b'\n' && pair[0] != b'\r' || pair[1] == 0;
                let never = input.windows(2).any(bare);
                assert!(
                    whole.is_err() || !never && whole == Ok(Progress::Partial),
                    "{whole:?}"
                );
            }
        }
    });
}

#[test]
fn a_response_head_is_the_same_however_it_arrives() {
    let tokens: &[&[u8]] = &[
        b"\r\n",
        b"\r\n\r\n",
        b"\r",
        b"\n",
        b"\0",
        b" ",
        b":",
        b": ",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.0 ",
        b"HTTP/2 200\r\n",
        b"099",
        b"1000",
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"\x7f",
        b"\x80",
        b"\t",
    ];
    check("response", tokens, |input| {
        if let Ok(Progress::Complete(head, length)) = stable(input, response_head) {
            assert!(input[..length].ends_with(b"\r\n\r\n"));
            assert!((100..1000).contains(&head.status));
            // Writing the head and reading it again gives the same head.
            let mut written = format!("HTTP/1.1 {} ", head.status).into_bytes();
            written.extend_from_slice(&head.reason);
            for (name, value) in head.fields.iter() {
                assert!(is_token(name));
                written.extend([b"\r\n", name.as_bytes(), b":", value].concat());
            }
            written.extend_from_slice(b"\r\n\r\n");
            let again = response_head(&written);
            if input.starts_with(b"HTTP/1.1") {
                assert_eq!(again, Ok(Progress::Complete(head, written.len())));
            }
        }
    });
}

/// What a parser makes of the whole input. Panics if it judges a prefix differently.
fn stable<H: std::fmt::Debug + PartialEq>(
    input: &[u8],
    parse: fn(&[u8]) -> Result<Progress<H>, ParseError>,
) -> Result<Progress<H>, ParseError> {
    // A field of four bytes takes twelve times as much when parsed. Their list doubles when it is
    // full, and the count of allocated bytes then includes all of it again.
    let whole = bounded(input, 50, || parse(input));
    let mut random = Random::new(input.len() as u64);
    let some = (0..64).map(|_| random.below(input.len() + 1));
    let ends: Vec<_> = if input.len() <= 64 {
        (0..input.len()).collect()
    } else {
        some.collect()
    };
    for end in ends {
        let part = parse(&input[..end]);
        match (&part, &whole) {
            (Ok(Progress::Partial), Ok(Progress::Complete(_, length))) => {
                assert!(*length > end, "not seen at {end}, where it ends");
            }
            (Ok(Progress::Complete(..)), whole) => assert_eq!(&part, whole, "at {end}"),
            (Err(_), whole) => assert!(whole.is_err(), "{part:?} at {end}, then {whole:?}"),
            (Ok(Progress::Partial), _) => {}
        }
    }
    whole
}

/// A head with its fields exposed.
#[derive(Debug, PartialEq)]
struct Expected {
    method: String,
    path: Vec<u8>,
    query: Option<Vec<u8>>,
    minor_version: u8,
    fields: Vec<(String, Vec<u8>)>,
    framing: Framing,
    keep_alive: bool,
    expects_continue: bool,
}

impl From<Head> for Expected {
    fn from(head: Head) -> Self {
        let field = |(name, value): (&str, &[u8])| (name.to_owned(), value.to_vec());
        Self {
            method: head.method,
            path: head.path,
            query: head.query,
            minor_version: head.minor_version,
            fields: head.fields.iter().map(field).collect(),
            framing: head.framing,
            keep_alive: head.keep_alive,
            expects_continue: head.expects_continue,
        }
    }
}

/// The head that `input` begins with; `None` while it is incomplete.
fn expected_head(input: &[u8]) -> Option<Result<(Expected, usize), &'static str>> {
    let mut start = 0;
    while input[start..].starts_with(b"\r\n") {
        start += 2;
    }
    let text: String = input[start..]
        .iter()
        .map(|byte| char::from(*byte))
        .collect();
    let block = &text[..text.find("\r\n\r\n")?];
    // A byte of the input is a character of one or two bytes in `text`.
    let length = start + block.chars().count() + 4;
    Some(head_of_block(block, length).map(|head| (head, length)))
}

fn head_of_block(block: &str, length: usize) -> Result<Expected, &'static str> {
    if length > MAX_HEAD_BYTES {
        return Err("too long");
    }
    let mut lines = block.split("\r\n");
    let words: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else {
        return Err("not three words");
    };
    let minor_version = match version {
        "HTTP/1.0" => 0,
        "HTTP/1.1" => 1,
        _ => return Err("version"),
    };
    if !is_token(method) {
        return Err("method");
    }
    let latin = |text: &str| -> Vec<u8> { text.chars().map(|one| one as u8).collect() };
    let target_length = target.chars().count();
    if target_length > MAX_TARGET_BYTES
        || target_length + method.len() + version.len() + 2 > MAX_TARGET_BYTES + 64
    {
        return Err("long target");
    }
    if target.is_empty() || target.contains(|one: char| one <= ' ' || one == '\x7f' || one == '#') {
        return Err("target");
    }
    let (path, query) = path_and_query(target).ok_or("no path")?;
    let fields = lines
        .map(|line| {
            let (name, value) = line.split_once(':').filter(|(name, _)| is_token(name))?;
            let is_plain = |one: char| one == '\t' || (one >= ' ' && one != '\x7f');
            value.chars().all(is_plain).then(|| {
                let value = value.trim_matches([' ', '\t']);
                (name.to_owned(), latin(value))
            })
        })
        .collect::<Option<Vec<_>>>()
        .ok_or("header")?;
    if fields.len() > MAX_HEADERS {
        return Err("too many headers");
    }
    let values = |name: &str| -> Vec<String> {
        let of_name = fields
            .iter()
            .filter(|(key, _)| key.eq_ignore_ascii_case(name));
        of_name
            .map(|(_, value)| value.iter().map(|byte| char::from(*byte)).collect())
            .collect()
    };
    let framing = match (
        &values("content-length")[..],
        &values("transfer-encoding")[..],
    ) {
        ([], []) => Framing::None,
        ([], [coding]) if minor_version == 1 && coding.eq_ignore_ascii_case("chunked") => {
            Framing::Chunked
        }
        ([length, others @ ..], [])
            if others.iter().all(|other| other == length)
                && length.chars().all(|digit| digit.is_ascii_digit()) =>
        {
            Framing::Length(length.parse().map_err(|_| "length")?)
        }
        _ => return Err("framing"),
    };
    let mut options = values("connection").join(",").to_ascii_lowercase();
    options.retain(|one| one != '\t');
    let closes = options
        .split(',')
        .any(|option| option.trim_matches(' ') == "close");
    let expectations = values("expect");
    if !expectations
        .iter()
        .all(|value| value.eq_ignore_ascii_case("100-continue"))
    {
        return Err("expectation");
    }
    if values("host").len() > 1 || !values("host").iter().all(|host| is_host(host)) {
        return Err("hosts");
    }
    let has_body = !matches!(framing, Framing::None | Framing::Length(0));
    Ok(Expected {
        method: method.to_owned(),
        path: latin(path),
        query: query.map(latin),
        minor_version,
        fields,
        framing,
        keep_alive: minor_version == 1 && !closes,
        expects_continue: minor_version == 1 && has_body && !expectations.is_empty(),
    })
}

fn path_and_query(target: &str) -> Option<(&str, Option<&str>)> {
    let authority = target
        .strip_prefix("http://")
        .or(target.strip_prefix("https://"));
    let local = match authority.map(|rest| (rest, rest.find(['/', '?']))) {
        None => target,
        Some((rest, _)) if rest.starts_with([':', '/', '?']) || rest.is_empty() => return None,
        Some((rest, end)) if !is_host(&rest[..end.unwrap_or(rest.len())]) => return None,
        Some((_, None)) => "/",
        Some((rest, Some(end))) => &rest[end..],
    };
    let (path, query) = match local.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (local, None),
    };
    (local == "*" || local.starts_with('/')).then_some((path, query))
}

fn is_host(text: &str) -> bool {
    let others = "-._~%!$&'()*+,;=";
    let is_right = |one: char| one.is_ascii_alphanumeric() || others.contains(one);
    let name = match text.rsplit_once(':') {
        Some((name, port)) if port.chars().all(|digit| digit.is_ascii_digit()) => name,
        _ => text,
    };
    match name.strip_prefix('[') {
        Some(rest) => rest
            .strip_suffix(']')
            .is_some_and(|inner| !inner.is_empty() && inner.replace(':', "").chars().all(is_right)),
        None => name.chars().all(is_right),
    }
}

fn is_token(text: &str) -> bool {
    let others = "!#$%&'*+-.^_`|~";
    !text.is_empty()
        && text
            .chars()
            .all(|one| one.is_ascii_alphanumeric() || others.contains(one))
}

/// The result of a chunked body.
#[derive(Debug, PartialEq, Eq)]
struct Decoded {
    body: Vec<u8>,
    end: End,
}

#[derive(Debug, PartialEq, Eq)]
enum End {
    /// Complete, after this many bytes of input.
    At(usize),
    Missing,
    Broken,
}

#[test]
fn a_chunked_body_is_the_same_however_it_arrives() {
    let tokens: &[&[u8]] = &[
        b"\r\n",
        b"\r\n\r\n",
        b"\r",
        b"\n",
        b"0\r\n",
        b"0\r\n\r\n",
        b"1\r\n",
        b"a\r\n",
        b"F",
        b";",
        b";a=b",
        b";\"x\"",
        b"A: b\r\n",
        b": ",
        b" ",
        b"\0",
        b"\t",
        b"ffffffffffffffff\r\n",
        b"0000000000000000",
        b"10000\r\n",
        b"\x7f",
        b"\x80",
    ];
    check("chunked", tokens, |input| {
        let expected = Expectation::of(input);
        let mut random = Random::new(input.len() as u64);
        assert_eq!(
            bounded(input, 4, || decode(input, || usize::MAX)),
            expected,
            "at once"
        );
        assert_eq!(decode(input, || 1), expected, "byte by byte");
        assert_eq!(decode(input, || 1 + random.below(9)), expected, "in pieces");

        let mut coded = Vec::new();
        let mut rest = input;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at((1 + random.below(300)).min(rest.len()));
            coded.extend_from_slice(format!("{:x};e\r\n", piece.len()).as_bytes());
            coded.extend_from_slice(piece);
            coded.extend_from_slice(b"\r\n");
            rest = after;
        }
        coded.extend_from_slice(b"0\r\nT: v\r\n\r\n");
        let decoded = decode(&[&coded, input].concat(), || 1 + random.below(5000));
        assert_eq!(decoded.end, End::At(coded.len()));
        assert_eq!(decoded.body, input);
    });
}

/// Feeds the input to a decoder in pieces of the lengths that `piece` gives.
fn decode(input: &[u8], mut piece: impl FnMut() -> usize) -> Decoded {
    let mut decoder = Decoder::default();
    let mut body = Vec::new();
    let mut at = 0_usize;
    loop {
        let shown = &input[at..input.len().min(at.saturating_add(piece()))];
        match decoder.step(shown) {
            Ok(ChunkStep::Data { skip, length }) => {
                assert!(length > 0, "no progress");
                body.extend_from_slice(&shown[skip..skip + length]);
                at += skip + length;
            }
            Ok(ChunkStep::More(count)) => {
                assert_eq!(count, shown.len(), "all of it was framing");
                at += count;
                if at == input.len() {
                    let end = End::Missing;
                    return Decoded { body, end };
                }
            }
            Ok(ChunkStep::End(count)) => {
                let end = End::At(at + count);
                return Decoded { body, end };
            }
            Err(_) => {
                let end = End::Broken;
                return Decoded { body, end };
            }
        }
    }
}

/// Decodes the whole input by recursive descent.
struct Expectation<'a> {
    input: &'a [u8],
    at: usize,
    body: Vec<u8>,
    extensions: usize,
}

impl<'a> Expectation<'a> {
    fn of(input: &'a [u8]) -> Decoded {
        let mut expectation = Self {
            input,
            at: 0,
            body: Vec::new(),
            extensions: 0,
        };
        let end = match expectation.coding() {
            Ok(()) => End::At(expectation.at),
            Err(end) => end,
        };
        Decoded {
            body: expectation.body,
            end,
        }
    }

    fn peek(&self) -> Result<u8, End> {
        self.input.get(self.at).copied().ok_or(End::Missing)
    }

    fn expect(&mut self, wanted: &[u8]) -> Result<(), End> {
        for byte in wanted {
            if self.peek()? != *byte {
                return Err(End::Broken);
            }
            self.at += 1;
        }
        Ok(())
    }

    /// Text up to the end of the line, at most this many bytes.
    fn text(&mut self, most: usize) -> Result<&'a [u8], End> {
        let start = self.at;
        loop {
            match self.peek()? {
                b'\r' => return Ok(&self.input[start..self.at]),
                b'\t' | b' '..=b'~' | 0x80.. if self.at - start < most => self.at += 1,
                _ => return Err(End::Broken),
            }
        }
    }

    fn coding(&mut self) -> Result<(), End> {
        loop {
            let start = self.at;
            while self.peek()?.is_ascii_hexdigit() {
                self.at += 1;
                if self.at - start > 16 {
                    return Err(End::Broken);
                }
            }
            let digits = std::str::from_utf8(&self.input[start..self.at]).unwrap();
            let size = u64::from_str_radix(digits, 16).map_err(|_| End::Broken)?;
            if self.peek()? == b';' {
                self.at += 1;
                let room = (self.body.len() + 16 * 1024 - self.extensions).min(4096);
                self.extensions += self.text(room)?.len();
            }
            self.expect(b"\r\n")?;
            if size == 0 {
                break;
            }
            let rest = &self.input[self.at..];
            let here = usize::try_from(size).unwrap_or(usize::MAX).min(rest.len());
            self.body.extend_from_slice(&rest[..here]);
            self.at += here;
            self.expect(b"\r\n")?;
        }
        let mut room = 4096;
        while self.peek()? != b'\r' {
            let line = self.text(room)?;
            room -= line.len();
            self.expect(b"\r\n")?;
            let line: String = line.iter().map(|byte| char::from(*byte)).collect();
            if !line.split_once(':').is_some_and(|(name, _)| is_token(name)) {
                return Err(End::Broken);
            }
        }
        self.expect(b"\r\n")
    }
}

#[test]
fn frames_are_messages_however_they_arrive() {
    let tokens: &[&[u8]] = &[
        b"\x81\x80\0\0\0\0",
        b"\x81\x83\0\0\0\0abc",
        b"\x82\x83\x01\x02\x03\x04abc",
        b"\x01\x81\0\0\0\0\xe2",
        b"\x00\x81\0\0\0\0\x98",
        b"\x80\x81\0\0\0\0\x83",
        b"\x82\xfe\x00\x7e\0\0\0\0",
        b"\x82\xff\0\0\0\0\0\x01\0\0\0\0\0\0",
        b"\x82\xff\0\0\0\0\0\x10\0\x01\0\0\0\0",
        b"\x88\x82\0\0\0\0\x03\xe8",
        b"\x88\x80\0\0\0\0",
        b"\x89\x84\0\0\0\0ping",
        b"\x8a\x80\0\0\0\0",
        b"\xc1",
        b"\x83",
    ];
    check("websocket", tokens, |input| {
        let expected = expected_messages(input);
        let mut random = Random::new(input.len() as u64);
        // A frame of six bytes becomes a message of none, and the list of them doubles when it is full.
        let whole = bounded(input, 40, || messages(input, || usize::MAX));
        assert_eq!(whole, expected, "at once");
        assert_eq!(messages(input, || 1), expected, "byte by byte");
        let pieces = messages(input, || 1 + random.below(300));
        assert_eq!(pieces, expected, "in pieces");
    });
}

/// Messages, and the code of what broke the protocol after them.
type Messages = (Vec<Received>, Option<u16>);

fn messages(input: &[u8], mut piece: impl FnMut() -> usize) -> Messages {
    let (mut decoder, mut found, mut at) = (FrameDecoder::new(), Vec::new(), 0_usize);
    while at < input.len() {
        let end = input.len().min(at.saturating_add(piece()));
        match decoder.decode(&input[at..end]) {
            Err(violation) => return (found, Some(violation.code())),
            Ok((count, received)) => {
                assert!(received.is_some() || at + count == end, "it takes all");
                at += count;
                found.extend(received);
            }
        }
    }
    (found, None)
}

/// Reads frames one after another from the whole input.
fn expected_messages(mut input: &[u8]) -> Messages {
    let mut found = Vec::new();
    let mut open: Option<(bool, Vec<u8>)> = None;
    let code = loop {
        let [first, rest @ ..] = input else {
            break None;
        };
        let (is_last, opcode) = (first >> 7 == 1, first & 15);
        let is_control = matches!(opcode, 8..=10);
        let is_right = match opcode {
            0 => open.is_some(),
            1 | 2 => open.is_none(),
            _ => is_control && is_last,
        };
        if !is_right || (first >> 4) & 7 != 0 {
            break Some(1002);
        }
        let [second, rest @ ..] = rest else {
            break None;
        };
        if *second < 128 || (is_control && *second > 128 + 125) {
            break Some(1002);
        }
        let digits = [0, 2, 8][usize::from(second.saturating_sub(253))];
        if rest.len() < digits {
            break None;
        }
        let mut length = u128::from(second & 127);
        if digits > 0 {
            let mut bytes = [0; 16];
            bytes[16 - digits..].copy_from_slice(&rest[..digits]);
            length = u128::from_be_bytes(bytes);
            let range = if digits == 2 {
                126..1 << 16
            } else {
                1 << 16..1 << 63
            };
            if !range.contains(&length) {
                break Some(1002);
            }
        }
        let held = open.as_ref().map_or(0, |(_, message)| message.len());
        if !is_control && length > (MAX_MESSAGE_BYTES - held) as u128 {
            break Some(1009);
        }
        let length = usize::try_from(length).unwrap();
        let Some((mask, payload)) = rest[digits..].split_at_checked(4) else {
            break None;
        };
        if payload.len() < length {
            break None;
        }
        input = &payload[length..];
        let payload: Vec<u8> = (0..length).map(|at| payload[at] ^ mask[at & 3]).collect();
        match opcode {
            9 => found.push(Received::Ping),
            10 => found.push(Received::Pong),
            8 => match &payload[..] {
                [] => found.push(Received::Close(None)),
                [_] => break Some(1002),
                [high, low, reason @ ..] => {
                    let code = u16::from(*high) * 256 + u16::from(*low);
                    let reserved = [1004, 1005, 1006];
                    let is_known = (1000..1015).contains(&code) && !reserved.contains(&code);
                    if !is_known && !(3000..5000).contains(&code) {
                        break Some(1002);
                    }
                    if std::str::from_utf8(reason).is_err() {
                        break Some(1007);
                    }
                    found.push(Received::Close(Some(code)));
                }
            },
            _ => {
                let (is_text, mut message) = open.take().unwrap_or((opcode == 1, Vec::new()));
                message.extend(payload);
                if !is_last {
                    open = Some((is_text, message));
                } else if !is_text {
                    found.push(Received::Binary(message));
                } else if let Ok(text) = String::from_utf8(message) {
                    found.push(Received::Text(text));
                } else {
                    break Some(1007);
                }
            }
        }
    };
    (found, code)
}
