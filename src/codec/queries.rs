//! Removes queries from a terminal's output.
//!
//! A program queries its terminal by control sequences in its output: for the cursor's position, the device's
//! attributes, the colours. The terminal answers as if somebody typed. One that is fed old output answers
//! again, and the answers end up as input of whatever runs now. Everything but the queries passes unchanged. The
//! result does not depend on how the bytes are split. The filter buffers at most one control sequence.
//!
//! The sequences are those of ECMA-48 with xterm's extensions. They begin with ESC, or with a C1 control
//! character encoded in UTF-8.

/// Most bytes of a sequence that are held. A longer one passes: no query is that long.
const MAX_HELD_BYTES: usize = 1024;

const ESC: u8 = 0x1b;
const BEL: u8 = 0x07;
const CAN: u8 = 0x18;
const SUB: u8 = 0x1a;
const ENQ: u8 = 0x05;
/// The first byte of C1 control characters in UTF-8.
const C1: u8 = 0xc2;

/// The OSC commands that can be queries: colours, font and clipboard.
const QUERY_COMMANDS: [&[u8]; 15] = [
    b"4", b"5", b"10", b"11", b"12", b"13", b"14", b"15", b"16", b"17", b"18", b"19", b"21", b"50",
    b"52",
];

/// The XTWINOPS operations that are queries: state, position, sizes and titles of the window.
const QUERY_WINDOW_OPERATIONS: [&[u8]; 9] = [
    b"11", b"13", b"14", b"15", b"16", b"18", b"19", b"20", b"21",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SequenceState {
    /// Between sequences.
    Ground,
    /// After ESC, or after the first byte of a C1 control character.
    Begun,
    /// In a control sequence, before its final byte.
    Control,
    /// In the string of OSC (`is_command`) or DCS.
    String { is_command: bool },
    /// In a string, after what may begin its terminator.
    StringEnd { is_command: bool },
}

/// Removes queries from output.
pub struct QueryFilter {
    state: SequenceState,
    /// The sequence so far, which may turn out to be a query.
    held: Vec<u8>,
    /// Bytes of `held` that introduce it.
    introducer: usize,
    /// What may begin the terminator of a string.
    end: u8,
}

impl QueryFilter {
    /// A filter at the beginning of output.
    pub fn new() -> Self {
        Self {
            state: SequenceState::Ground,
            held: Vec::new(),
            introducer: 0,
            end: 0,
        }
    }

    /// Appends `bytes`, after what was held, to `out` without queries. Holds back an incomplete sequence.
    pub fn filter(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        for byte in bytes {
            self.step(*byte, out);
            let is_inside = matches!(
                self.state,
                SequenceState::Control | SequenceState::String { .. }
            );
            if is_inside && self.held.len() > MAX_HELD_BYTES {
                self.finish(out);
            }
        }
    }

    /// Appends the held beginning of a sequence to `out`.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.held);
        if matches!(self.state, SequenceState::StringEnd { .. }) {
            out.push(self.end);
        }
        self.state = SequenceState::Ground;
    }

    /// Text before and after a removed query must not join to a new sequence. So a sequence that another
    /// one interrupts, which terminals ignore, is removed too, and a string without a terminator gets one.
    fn step(&mut self, byte: u8, out: &mut Vec<u8>) {
        match self.state {
            SequenceState::Ground if byte == ENQ => {}
            SequenceState::Ground if byte == ESC || byte == C1 => self.begin(byte),
            SequenceState::Ground => out.push(byte),
            SequenceState::Begun if self.held == [ESC] => self.introduce(byte, byte, out),
            SequenceState::Begun => match byte {
                // A C1 control character stands for ESC and a letter.
                0x80..=0x9f => self.introduce(byte, byte - 0x40, out),
                0xa0..=0xbf => self.pass(byte, out),
                _ => {
                    out.extend_from_slice("\u{fffd}".as_bytes());
                    self.reset();
                    self.step(byte, out);
                }
            },
            SequenceState::Control => match byte {
                ESC => self.begin(byte),
                CAN | SUB => self.pass(byte, out),
                0x40..=0x7e if is_query(&self.held[self.introducer..], byte) => self.reset(),
                0x40..=0x7e => self.pass(byte, out),
                // A control character takes effect at once, even inside a sequence.
                ..b' ' => out.extend(Some(byte).filter(|byte| *byte != ENQ)),
                _ => self.held.push(byte),
            },
            SequenceState::String { is_command } => match byte {
                BEL if is_command => self.end_string(is_command, &[BEL], out),
                CAN | SUB => self.pass(byte, out),
                ESC | C1 => {
                    self.end = byte;
                    self.state = SequenceState::StringEnd { is_command };
                }
                _ => self.held.push(byte),
            },
            SequenceState::StringEnd { is_command } => match (self.end, byte) {
                (ESC, b'\\') | (C1, 0x9c) => {
                    self.end_string(is_command, &[self.end, byte], out);
                }
                (C1, _) => {
                    self.held.push(C1);
                    self.state = SequenceState::String { is_command };
                    self.step(byte, out);
                }
                _ => {
                    self.end_string(is_command, &[ESC, b'\\'], out);
                    self.begin(ESC);
                    self.step(byte, out);
                }
            },
        }
    }

    fn begin(&mut self, byte: u8) {
        self.held.clear();
        self.held.push(byte);
        self.state = SequenceState::Begun;
    }

    /// Handles the byte after the first one of a sequence; `letter` is what would follow ESC.
    fn introduce(&mut self, byte: u8, letter: u8, out: &mut Vec<u8>) {
        self.state = match letter {
            b'[' => SequenceState::Control,
            b']' => SequenceState::String { is_command: true },
            b'P' => SequenceState::String { is_command: false },
            // DECID, an old form of DA.
            b'Z' => return self.reset(),
            ESC => return self.begin(ESC),
            CAN | SUB => return self.pass(byte, out),
            ..b' ' => return out.extend(Some(byte).filter(|byte| *byte != ENQ)),
            0x7f => return,
            _ => return self.pass(byte, out),
        };
        self.held.push(byte);
        self.introducer = self.held.len();
    }

    /// Passes on the held sequence, which ends with `byte`.
    fn pass(&mut self, byte: u8, out: &mut Vec<u8>) {
        self.finish(out);
        out.push(byte);
    }

    /// Removes the held sequence.
    fn reset(&mut self) {
        self.held.clear();
        self.state = SequenceState::Ground;
    }

    /// Removes the held string if it is a query, else passes it on with the terminator `end`.
    fn end_string(&mut self, is_command: bool, end: &[u8], out: &mut Vec<u8>) {
        let content = &self.held[self.introducer..];
        let is_query = if is_command {
            let mut parts = content.split(|byte| *byte == b';');
            let command = parts.next().unwrap_or_default();
            QUERY_COMMANDS.contains(&command) && parts.any(|part| part == b"?")
        } else {
            // DECRQSS and XTGETTCAP.
            content.starts_with(b"$q") || content.starts_with(b"+q")
        };
        if is_query {
            self.reset();
        } else {
            out.append(&mut self.held);
            out.extend_from_slice(end);
            self.reset();
        }
    }
}

/// Whether a control sequence with these bytes before its final one is a query.
fn is_query(sequence: &[u8], last: u8) -> bool {
    let visible = |byte: &&u8| (b' '..=b'?').contains(*byte);
    let sequence: Vec<u8> = sequence.iter().filter(visible).copied().collect();
    let (prefix, rest) = match sequence.split_first() {
        Some((prefix @ b'<'..=b'?', rest)) => (*prefix, rest),
        _ => (0, &sequence[..]),
    };
    let end = rest.iter().position(|byte| *byte < b'0');
    let (parameters, intermediate) = rest.split_at(end.unwrap_or(rest.len()));
    let first = parameters.split(|byte| *byte == b';').next();
    match (prefix, intermediate, last) {
        // DA; DSR, except where `>` makes it XTMODKEYS; DECREQTPARM; XTVERSION.
        (_, b"", b'c') | (0 | b'?', b"", b'n') | (0, b"", b'x') | (b'>', b"", b'q')
        // kitty's keyboard; XTSMGRAPHICS; XTQMODKEYS; DECRQM; DECRQPSR; DECRQTSR.
        | (b'?', b"", b'u' | b'S' | b'm') | (0 | b'?', b"$", b'p') | (0, b"$", b'w' | b'u')
        // DECRQUPSS; DECRQDE; DECRQLP; DECRQCRA.
        | (0, b"&", b'u') | (0, b"\"", b'v') | (0, b"'", b'|') | (0, b"*", b'y') => true,
        (0, b"", b't') => first.is_some_and(|first| QUERY_WINDOW_OPERATIONS.contains(&first)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filtered(bytes: &[u8], piece: usize) -> Vec<u8> {
        let (mut filter, mut out) = (QueryFilter::new(), Vec::new());
        for piece in bytes.chunks(piece) {
            filter.filter(piece, &mut out);
        }
        filter.finish(&mut out);
        out
    }

    #[track_caller]
    fn expect(bytes: &[u8], expected: &[u8]) {
        for piece in [1, 2, 3, bytes.len().max(1)] {
            let out = filtered(bytes, piece);
            assert_eq!(
                out.escape_ascii().to_string(),
                expected.escape_ascii().to_string()
            );
        }
    }

    const QUERIES: [&[u8]; 45] = [
        b"\x1b[c",
        b"\x1b[0c",
        b"\x1b[>c",
        b"\x1b[>0c",
        b"\x1b[=c",
        b"\x1b[5n",
        b"\x1b[6n",
        b"\x1b[?6n",
        b"\x1b[?15n",
        b"\x1b[?25$p",
        b"\x1b[4$p",
        b"\x1b[x",
        b"\x1b[1x",
        b"\x1b[>q",
        b"\x1b[>0q",
        b"\x1b[?u",
        b"\x1b[?2;1;0S",
        b"\x1b[?4m",
        b"\x1b[1$w",
        b"\x1b[1$u",
        b"\x1b[&u",
        b"\x1b[\"v",
        b"\x1b[1;1;1;1;2;2*y",
        b"\x1b[18t",
        b"\x1b[14;2t",
        b"\x1b[21t",
        b"\x1bZ",
        b"\x05",
        b"\x1b]4;1;?\x07",
        b"\x1b]10;?\x1b\\",
        b"\x1b]11;?\x07",
        b"\x1b]12;?\xc2\x9c",
        b"\x1b]10;?;?\x07",
        b"\x1b]19;?\x07",
        b"\x1b]52;c;?\x07",
        b"\x1bP$qm\x1b\\",
        b"\x1bP$q q\x1b\\",
        b"\x1bP+q544e\x1b\\",
        b"\xc2\x9bc",
        b"\xc2\x9b6n",
        b"\xc2\x9d11;?\x07",
        b"\xc2\x90$qm\xc2\x9c",
        b"\xc2\x9a",
        b"\x1b[?996n",
        b"\x1b[1'|",
    ];

    #[test]
    fn queries_are_removed() {
        for query in QUERIES {
            expect(query, b"");
            expect(&[b"one", query, b"two"].concat(), b"onetwo");
            expect(&query.repeat(3), b"");
            // What is cut off is no query yet; what follows it decides.
            for end in 1..query.len() {
                expect(&query[..end], &query[..end]);
            }
        }
    }

    #[test]
    fn everything_else_passes() {
        for other in [
            &b"plain text\r\n\x07\x08\t\0\x7f"[..],
            "caf\u{e9} \u{2603} \u{a0}\u{9f}\u{c2}".as_bytes(),
            b"\xff\xfe\xc2",
            b"\x1b[31m\x1b[1;38;5;12mred\x1b[0m\x1b[H\x1b[2J\x1b[10;20H\x1b[?25l\x1b[?1049h",
            b"\x1b[3 q\x1b[\"q\x1b[1\"q\x1b[>4;1m\x1b[>1u\x1b[<u\x1b[=1u\x1b[>4n\x1b[s\x1b[u",
            b"\x1b[8;24;80t\x1b[22;0;0t\x1b[1t\x1b[2$x\x1b[1;1;2;2$z\x1b[!p\x1b[61\"p\x1b[4S",
            b"\x1b]0;title?\x07\x1b]2;?\x1b\\\x1b]8;;http://h/?\x1b\\link\x1b]8;;\x1b\\",
            b"\x1b]4;1;rgb:ff/00/00\x07\x1b]11;#000000\x1b\\\x1b]52;c;aGk=\x07",
            b"\x1bPq#0;2;0;0;0~-\x1b\\\x1bP1$r0m\x1b\\\x1b(B\x1b)0\x1b7\x1b8\x1bM\x1b=\x1bc\x1b\\",
            b"\x1b[1\x186n\x1b[1\x1a6n\x1b]11;?\x18\x1b",
        ] {
            expect(other, other);
        }
    }

    #[test]
    fn nothing_becomes_a_query_by_what_is_removed() {
        for (bytes, expected) in [
            (&b"\x1b[1\x1b[6n"[..], &b""[..]),
            (b"\x1b[1\x1b[1m", b"\x1b[1m"),
            (b"\x1b\x1b[6n[6n", b"[6n"),
            (b"\x1b]0;a\x1b[6nb", b"\x1b]0;a\x1b\\b"),
            (b"\x1b]11;?\x1b[m", b"\x1b[m"),
            (b"\x1bP$q\x1b[6n", b""),
            (b"\xc2\x1b[6n\x9b6n", b"\xef\xbf\xbd\x9b6n"),
            (b"\xc2\xc2\x9b6n", b"\xef\xbf\xbd"),
            // Control characters have their effect inside a sequence.
            (b"\x1b[\r\n6n", b"\r\n"),
            (b"\x1b\n[6n", b"\n"),
            (b"\x1b[3\n1m", b"\n\x1b[31m"),
        ] {
            expect(bytes, expected);
        }
    }

    #[test]
    fn what_is_held_is_bounded() {
        let mut filter = QueryFilter::new();
        let mut out = Vec::new();
        filter.filter(b"\x1b]52;c;", &mut out);
        for _ in 0..10_000 {
            filter.filter(b"some text", &mut out);
        }
        assert!(filter.held.capacity() <= 4 * MAX_HELD_BYTES);
        filter.finish(&mut out);
        assert_eq!(out.len(), 7 + 10_000 * 9);
    }
}
