//! WebSocket frames (RFC 6455 sections 5 and 7): a pure codec for the server's side. It does no I/O.
//!
//! [`Decoder`] takes the client's bytes in pieces of any length and returns messages and control frames. It
//! rejects what the standard forbids, such as unmasked frames, reserved bits and opcodes, lengths not in
//! their shortest form, and fragmented control frames, at the first byte that is wrong. It buffers at most one
//! message. The functions `append_...` write unmasked frames, as a server must. There are no extensions.
//! `handshake` has the upgrade, and `channel` the connection.

/// Most bytes of a message, whose fragments count together.
pub const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// Most bytes of the payload of a control frame.
const MAX_CONTROL_BYTES: usize = 125;

/// Most bytes before a payload: two, the length and the mask.
const MAX_HEAD_BYTES: usize = 2 + 8 + 4;

/// The codes that end a connection (section 7.4.1).
pub mod code {
    /// The connection has done what it was opened for.
    pub const NORMAL: u16 = 1000;
    /// The server is shutting down.
    pub const GOING_AWAY: u16 = 1001;
    /// The client violates the protocol.
    pub const PROTOCOL: u16 = 1002;
    /// A message does not match its type, such as text that is not UTF-8.
    pub const INVALID: u16 = 1007;
    /// A message is too large.
    pub const TOO_LARGE: u16 = 1009;
    /// The server cannot continue.
    pub const FAILED: u16 = 1011;
}

const CONTINUATION: u8 = 0x0;
const TEXT: u8 = 0x1;
const BINARY: u8 = 0x2;
const CLOSE: u8 = 0x8;
const PING: u8 = 0x9;
const PONG: u8 = 0xa;

/// A message or a control frame of the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Received {
    Text(String),
    Binary(Vec<u8>),
    /// A ping. [`Decoder::control`] is its payload, which the pong must repeat.
    Ping,
    /// The answer to a ping.
    Pong,
    /// The close frame, with its code if it has one. Whatever follows must be ignored.
    Close(Option<u16>),
}

/// A violation of the protocol, which ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Violation {
    /// A frame that is not valid, for this reason.
    Protocol(&'static str),
    /// A text message, or the reason of a close frame, is not UTF-8.
    NotUtf8,
    /// A message is longer than [`MAX_MESSAGE_BYTES`].
    TooLarge,
}

use Violation::Protocol;

impl Violation {
    /// The code for the close frame.
    pub fn code(self) -> u16 {
        match self {
            Protocol(_) => code::PROTOCOL,
            Self::NotUtf8 => code::INVALID,
            Self::TooLarge => code::TOO_LARGE,
        }
    }

    /// The reason for the close frame.
    pub fn reason(self) -> &'static str {
        match self {
            Protocol(reason) => reason,
            Self::NotUtf8 => "text that is not UTF-8",
            Self::TooLarge => "a message over 1 MiB",
        }
    }
}

/// A frame whose head has arrived.
#[derive(Debug, Clone, Copy)]
struct Frame {
    is_last: bool,
    opcode: u8,
    mask: [u8; 4],
    /// Bytes of the payload.
    length: usize,
    /// Bytes of it that have arrived.
    received: usize,
}

impl Frame {
    fn is_control(&self) -> bool {
        self.opcode >= CLOSE
    }
}

/// Decodes the frames of one client.
pub struct Decoder {
    /// The beginning of an incomplete head.
    head: [u8; MAX_HEAD_BYTES],
    head_length: usize,
    frame: Option<Frame>,
    /// [`TEXT`] or [`BINARY`] while a message is incomplete.
    kind: Option<u8>,
    message: Vec<u8>,
    control: [u8; MAX_CONTROL_BYTES],
    control_length: usize,
}

impl Decoder {
    /// A decoder before the first frame.
    pub fn new() -> Self {
        Self {
            head: [0; MAX_HEAD_BYTES],
            head_length: 0,
            frame: None,
            kind: None,
            message: Vec::new(),
            control: [0; MAX_CONTROL_BYTES],
            control_length: 0,
        }
    }

    /// Bytes of memory that the incomplete message takes.
    pub fn held(&self) -> usize {
        self.message.capacity()
    }

    /// The payload of the last control frame.
    pub fn control(&self) -> &[u8] {
        &self.control[..self.control_length]
    }

    /// Decodes up to the end of the first message or control frame, or all bytes if there is no such end.
    /// Returns how many bytes it has consumed.
    ///
    /// # Errors
    /// The client violates the protocol. The decoder must not be used again.
    pub fn decode(&mut self, bytes: &[u8]) -> Result<(usize, Option<Received>), Violation> {
        let mut at = 0;
        loop {
            let Some(frame) = &mut self.frame else {
                let Some(byte) = bytes.get(at) else {
                    return Ok((at, None));
                };
                at += 1;
                self.head[self.head_length] = *byte;
                self.head_length += 1;
                self.frame = read_head(
                    &self.head[..self.head_length],
                    self.kind.is_some(),
                    self.message.len(),
                )?;
                if let Some(frame) = &self.frame {
                    self.head_length = 0;
                    if frame.is_control() {
                        self.control_length = 0;
                    } else if frame.opcode != CONTINUATION {
                        self.kind = Some(frame.opcode);
                    }
                }
                continue;
            };
            let count = (frame.length - frame.received).min(bytes.len() - at);
            let payload = &bytes[at..at + count];
            let target = if frame.is_control() {
                let target = &mut self.control[self.control_length..][..count];
                target.copy_from_slice(payload);
                self.control_length += count;
                target
            } else {
                let start = self.message.len();
                self.message.extend_from_slice(payload);
                &mut self.message[start..]
            };
            for (byte, index) in target.iter_mut().zip(frame.received..) {
                *byte ^= frame.mask[index % 4];
            }
            at += count;
            frame.received += count;
            if frame.received < frame.length {
                return Ok((at, None));
            }
            let (opcode, is_last) = (frame.opcode, frame.is_last);
            self.frame = None;
            if let Some(received) = self.finish(opcode, is_last)? {
                return Ok((at, Some(received)));
            }
        }
    }

    /// Returns what is complete at the end of a frame.
    fn finish(&mut self, opcode: u8, is_last: bool) -> Result<Option<Received>, Violation> {
        Ok(Some(match opcode {
            PING => Received::Ping,
            PONG => Received::Pong,
            CLOSE => Received::Close(close_code(self.control())?),
            _ if !is_last => return Ok(None),
            _ => {
                let message = std::mem::take(&mut self.message);
                if self.kind.take() == Some(TEXT) {
                    let text = String::from_utf8(message).map_err(|_| Violation::NotUtf8)?;
                    Received::Text(text)
                } else {
                    Received::Binary(message)
                }
            }
        }))
    }
}

/// Parses the head of a frame; `None` while it is incomplete. `in_message` says whether a message is incomplete,
/// and `before` how many bytes of it have arrived.
fn read_head(head: &[u8], in_message: bool, before: usize) -> Result<Option<Frame>, Violation> {
    let (first, rest) = head.split_first().unwrap_or((&0, &[]));
    let (is_last, opcode) = (first & 0x80 != 0, first & 0x0f);
    if first & 0x70 != 0 {
        return Err(Protocol("a reserved bit is set"));
    }
    match opcode {
        CONTINUATION if !in_message => return Err(Protocol("a fragment of no message")),
        TEXT | BINARY if in_message => {
            return Err(Protocol("a message inside another message"));
        }
        CLOSE | PING | PONG if !is_last => {
            return Err(Protocol("a control frame in fragments"));
        }
        CONTINUATION | TEXT | BINARY | CLOSE | PING | PONG => {}
        _ => return Err(Protocol("a reserved opcode")),
    }
    let Some((second, rest)) = rest.split_first() else {
        return Ok(None);
    };
    if second & 0x80 == 0 {
        return Err(Protocol("a frame without a mask"));
    }
    let short = second & 0x7f;
    if opcode >= CLOSE && usize::from(short) > MAX_CONTROL_BYTES {
        return Err(Protocol("a control frame over 125 bytes"));
    }
    let (digits, least) = match short {
        126 => (2, 126),
        127 => (8, 1 << 16),
        _ => (0, 0),
    };
    let Some((digits, rest)) = rest.split_at_checked(digits) else {
        return Ok(None);
    };
    let length = if digits.is_empty() {
        u64::from(short)
    } else {
        digits
            .iter()
            .fold(0, |sum, digit| sum << 8 | u64::from(*digit))
    };
    if length < least || length >> 63 != 0 {
        return Err(Protocol("a length that is not in its shortest form"));
    }
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if opcode < CLOSE && length > MAX_MESSAGE_BYTES - before {
        return Err(Violation::TooLarge);
    }
    let mask = rest.first_chunk();
    Ok(mask.map(|mask| Frame {
        is_last,
        opcode,
        mask: *mask,
        length,
        received: 0,
    }))
}

/// The code in the payload of a close frame; `None` if the payload is empty.
fn close_code(payload: &[u8]) -> Result<Option<u16>, Violation> {
    let Some((code, reason)) = payload.split_first_chunk() else {
        let text = "the close frame has one byte; a close code takes two";
        return payload.is_empty().then_some(None).ok_or(Protocol(text));
    };
    let code = u16::from_be_bytes(*code);
    if !matches!(code, 1000..=1003 | 1007..=1014 | 3000..=4999) {
        return Err(Protocol("a code that nobody may close with"));
    }
    if std::str::from_utf8(reason).is_err() {
        return Err(Violation::NotUtf8);
    }
    Ok(Some(code))
}

fn append_frame(out: &mut Vec<u8>, opcode: u8, payload: &[u8]) {
    out.push(0x80 | opcode);
    let length = payload.len();
    match (u8::try_from(length), u16::try_from(length)) {
        (Ok(short @ ..=125), _) => out.push(short),
        (_, Ok(length)) => {
            out.push(126);
            out.extend_from_slice(&length.to_be_bytes());
        }
        _ => {
            out.push(127);
            out.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(payload);
}

/// Appends a text message.
pub fn append_text(out: &mut Vec<u8>, text: &[u8]) {
    append_frame(out, TEXT, text);
}

/// Appends a binary message.
pub fn append_binary(out: &mut Vec<u8>, bytes: &[u8]) {
    append_frame(out, BINARY, bytes);
}

/// Appends a ping. The client repeats the payload in its pong.
pub fn append_ping(out: &mut Vec<u8>, payload: &[u8]) {
    append_frame(out, PING, payload);
}

/// Appends a pong with the payload of a ping.
pub fn append_pong(out: &mut Vec<u8>, payload: &[u8]) {
    append_frame(out, PONG, payload);
}

/// Appends a close frame. A reason that is too long for it is cut.
pub fn append_close(out: &mut Vec<u8>, code: Option<u16>, reason: &str) {
    let Some(code) = code else {
        return append_frame(out, CLOSE, b"");
    };
    let mut ends = (0..=MAX_CONTROL_BYTES - 2).rev();
    let kept = ends.find_map(|end| reason.get(..end.min(reason.len())));
    let payload = [&code.to_be_bytes()[..], kept.unwrap_or("").as_bytes()].concat();
    append_frame(out, CLOSE, &payload);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MASK: [u8; 4] = [0x37, 0xfa, 0x21, 0x3d];

    /// A frame of a client, its length as short as can be.
    fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        append_frame(&mut out, first & 0x0f, payload);
        out[0] = first;
        out[1] |= 0x80;
        let at = out.len() - payload.len();
        let masked = payload.iter().zip(MASK.iter().cycle());
        let masked: Vec<u8> = masked.map(|(byte, mask)| byte ^ mask).collect();
        out.splice(at.., MASK.into_iter().chain(masked));
        out
    }

    /// All that the bytes say, and what breaks the protocol at the end.
    fn all(bytes: &[u8], piece: usize) -> (Vec<Received>, Option<Violation>) {
        let (mut decoder, mut received) = (Decoder::new(), Vec::new());
        for mut piece in bytes.chunks(piece) {
            while !piece.is_empty() {
                match decoder.decode(piece) {
                    Ok((count, one)) => {
                        assert!(count > 0, "no progress");
                        assert!(one.is_some() || count == piece.len());
                        received.extend(one);
                        piece = &piece[count..];
                    }
                    Err(violation) => return (received, Some(violation)),
                }
            }
        }
        (received, None)
    }

    #[track_caller]
    fn expect(bytes: &[u8], expected: &[Received]) {
        for piece in [1, 2, 3, 7, bytes.len().max(1)] {
            assert_eq!(all(bytes, piece), (expected.to_vec(), None), "{piece}");
        }
    }

    #[track_caller]
    fn forbid(bytes: &[u8], code: u16) {
        for piece in [1, 2, 3, bytes.len()] {
            let (_, violation) = all(bytes, piece);
            assert_eq!(violation.map(Violation::code), Some(code), "{bytes:x?}");
        }
        // Nothing less is forbidden: the last byte is the wrong one.
        assert_eq!(all(&bytes[..bytes.len() - 1], 1).1, None, "{bytes:x?}");
    }

    fn text(text: &str) -> Received {
        Received::Text(text.to_owned())
    }

    /// The examples of RFC 6455 section 5.7.
    #[test]
    fn reads_the_examples_of_the_standard() {
        let masked = b"\x81\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58";
        expect(masked, &[text("Hello")]);
        assert_eq!(frame(0x81, b"Hello"), masked);
        let mut out = Vec::new();
        append_text(&mut out, b"Hello");
        assert_eq!(out, b"\x81\x05Hello");
        for (length, head) in [
            (256, &b"\x82\x7e\x01\x00"[..]),
            (65_536, b"\x82\x7f\0\0\0\0\0\x01\0\0"),
        ] {
            let mut out = Vec::new();
            append_binary(&mut out, &vec![0; length]);
            assert_eq!(&out[..head.len()], head);
            assert_eq!(out.len(), head.len() + length);
        }
    }

    #[test]
    fn lengths_of_every_form_are_read() {
        for length in [0, 1, 125, 126, 127, 65_535, 65_536, MAX_MESSAGE_BYTES] {
            let payload: Vec<u8> = b"payload".iter().copied().cycle().take(length).collect();
            let bytes = frame(0x82, &payload);
            for piece in [1000, bytes.len()] {
                let expected = vec![Received::Binary(payload.clone())];
                assert_eq!(all(&bytes, piece), (expected, None));
            }
        }
    }

    #[test]
    fn control_frames_come_between_fragments() {
        let bytes = [
            frame(0x01, b"sn\xe2\x98"),
            frame(0x89, b"ping"),
            frame(0x00, b""),
            frame(0x8a, b""),
            frame(0x80, b"\x83ow"),
            frame(0x82, b"\xff"),
            frame(0x88, b"\x03\xe8bye"),
        ];
        expect(
            &bytes.concat(),
            &[
                Received::Ping,
                Received::Pong,
                text("sn\u{2603}ow"),
                Received::Binary(vec![0xff]),
                Received::Close(Some(1000)),
            ],
        );
    }

    #[test]
    fn the_payload_of_a_ping_is_kept_for_the_pong() {
        let mut decoder = Decoder::new();
        let bytes = frame(0x89, b"some payload");
        assert_eq!(
            decoder.decode(&bytes),
            Ok((bytes.len(), Some(Received::Ping)))
        );
        let mut out = Vec::new();
        append_pong(&mut out, decoder.control());
        assert_eq!(out, b"\x8a\x0csome payload");
    }

    #[test]
    fn forbids_what_the_standard_forbids() {
        for first in [0xc1, 0xa1, 0x91, 0xc9] {
            forbid(&[first], code::PROTOCOL);
        }
        for opcode in (0x3..=0x7).chain(0xb..=0xf) {
            forbid(&[0x80 | opcode], code::PROTOCOL);
        }
        // A fragment of nothing, with or without an end.
        forbid(&[0x80], code::PROTOCOL);
        forbid(&[0x00], code::PROTOCOL);
        // A message inside another.
        forbid(&[frame(0x01, b"a"), vec![0x81]].concat(), code::PROTOCOL);
        forbid(&[frame(0x02, b"a"), vec![0x02]].concat(), code::PROTOCOL);
        // Control frames in fragments, or too long.
        for first in [0x08, 0x09, 0x0a] {
            forbid(&[first], code::PROTOCOL);
            forbid(&[first | 0x80, 0xfe], code::PROTOCOL);
            forbid(&[first | 0x80, 0xff], code::PROTOCOL);
        }
        for short in [0, 5, 125, 126, 127] {
            forbid(&[0x81, short], code::PROTOCOL);
        }
        forbid(b"\x82\xfe\x00\x7d", code::PROTOCOL);
        forbid(b"\x82\xff\0\0\0\0\0\0\xff\xff", code::PROTOCOL);
        forbid(b"\x82\xff\x80\0\0\0\0\0\0\0", code::PROTOCOL);
    }

    #[test]
    fn a_message_over_the_limit_is_refused_before_it_arrives() {
        forbid(b"\x82\xff\0\0\0\0\0\x10\0\x01", code::TOO_LARGE);
        forbid(b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff", code::TOO_LARGE);
        let most = frame(0x02, &vec![0; MAX_MESSAGE_BYTES]);
        let (received, violation) = all(&[most.clone(), frame(0x80, b"")].concat(), 4096);
        assert_eq!((received.len(), violation), (1, None));
        let (_, violation) = all(&[most, frame(0x80, b"a")].concat(), 4096);
        assert_eq!(violation, Some(Violation::TooLarge));
    }

    #[test]
    fn text_is_utf_8_across_fragments() {
        let good = "\u{e9}\u{2603}\u{1f600}";
        for at in 0..=good.len() {
            let (one, other) = good.as_bytes().split_at(at);
            expect(
                &[frame(0x01, one), frame(0x80, other)].concat(),
                &[text(good)],
            );
        }
        for bad in [
            &b"\xff"[..],
            b"\xe2\x98",
            b"\xed\xa0\x80",
            b"\xc0\xaf",
            b"\xf4\x90\x80\x80",
        ] {
            forbid(&frame(0x81, bad), code::INVALID);
            expect(&frame(0x82, bad), &[Received::Binary(bad.to_vec())]);
        }
    }

    #[test]
    fn close_frames_have_a_valid_code_and_a_reason_of_text() {
        expect(&frame(0x88, b""), &[Received::Close(None)]);
        forbid(&frame(0x88, b"\x03"), code::PROTOCOL);
        forbid(&frame(0x88, b"\x03\xe8\xff"), code::INVALID);
        let valid = [
            1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999,
        ];
        for code in valid {
            let payload = u16::to_be_bytes(code);
            expect(&frame(0x88, &payload), &[Received::Close(Some(code))]);
        }
        for code in [
            0, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65_535,
        ] {
            forbid(&frame(0x88, &u16::to_be_bytes(code)), code::PROTOCOL);
        }
        let mut out = Vec::new();
        append_close(&mut out, Some(1000), &"\u{e9}".repeat(100));
        assert_eq!((out[0], usize::from(out[1])), (0x88, out.len() - 2));
        assert!(out[1] <= 125 && std::str::from_utf8(&out[4..]).is_ok());
    }

    #[test]
    fn a_message_takes_no_memory_before_it_arrives() {
        let mut decoder = Decoder::new();
        assert_eq!(
            decoder.decode(b"\x82\xff\0\0\0\0\0\x10\0\0"),
            Ok((10, None))
        );
        assert_eq!(decoder.decode(&MASK), Ok((4, None)));
        assert_eq!(decoder.held(), 0);
        assert_eq!(decoder.decode(&[0; 100]), Ok((100, None)));
        assert!(decoder.held() < 1000);
    }
}
