//! Takes out of a terminal's output what a terminal would answer.
//!
//! A program asks its terminal questions in its output: where the cursor is, what the terminal can do, which
//! colours it has. A terminal that is shown old output answers them again, as if somebody typed. Whatever
//! else the output has passes unchanged. The filter is a pure function of the bytes, however they are cut,
//! and holds at most one control sequence.
//!
//! The sequences are those of ECMA-48 as xterm extends them. They begin with ESC, or with the C1
//! characters as UTF-8 has them.

/// Most bytes of a sequence that is held. A longer one passes: no question is that long.
const MAX_HELD_BYTES: usize = 1024;

const ESC: u8 = 0x1b;
const BEL: u8 = 0x07;
const CAN: u8 = 0x18;
const SUB: u8 = 0x1a;
const ENQ: u8 = 0x05;
/// The first byte of C1 characters in UTF-8.
const C1: u8 = 0xc2;

/// Colours and the clipboard: the commands of OSC that can ask.
const ASKING_COMMANDS: [&[u8]; 15] = [
    b"4", b"5", b"10", b"11", b"12", b"13", b"14", b"15", b"16", b"17", b"18", b"19", b"21", b"50",
    b"52",
];

/// Reports of XTWINOPS: state, position, sizes and titles of the window.
const ASKING_WINDOW_OPERATIONS: [&[u8]; 9] = [
    b"11", b"13", b"14", b"15", b"16", b"18", b"19", b"20", b"21",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Between sequences.
    Ground,
    /// After the first byte of one: ESC, or that of a C1 character.
    Begun,
    /// In a control sequence, before its final byte.
    Control,
    /// In a string: that of OSC or that of DCS.
    String { is_command: bool },
    /// In a string, after what may begin its end.
    StringEnd { is_command: bool },
}

/// Removes questions from output.
pub struct QueryFilter {
    state: State,
    /// The sequence so far, which may turn out to be a question.
    held: Vec<u8>,
    /// Bytes of `held` that introduce it.
    introducer: usize,
    /// What may begin the end of a string.
    end: u8,
}

impl QueryFilter {
    /// Between sequences.
    pub fn new() -> Self {
        Self {
            state: State::Ground,
            held: Vec::new(),
            introducer: 0,
            end: 0,
        }
    }

    /// Appends to `out` what passes of `bytes`, and of what was held before.
    pub fn filter(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        for byte in bytes {
            self.step(*byte, out);
            let is_inside = matches!(self.state, State::Control | State::String { .. });
            if is_inside && self.held.len() > MAX_HELD_BYTES {
                self.finish(out);
            }
        }
    }

    /// Appends to `out` what is held: the beginning of a sequence.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.held);
        if matches!(self.state, State::StringEnd { .. }) {
            out.push(self.end);
        }
        self.state = State::Ground;
    }

    /// What is removed must not join what stands before and after it. So a sequence that another one
    /// interrupts, which terminals ignore, is removed too, and a string that has no end gets one.
    fn step(&mut self, byte: u8, out: &mut Vec<u8>) {
        match self.state {
            State::Ground if byte == ENQ => {}
            State::Ground if byte == ESC || byte == C1 => self.begin(byte),
            State::Ground => out.push(byte),
            State::Begun if self.held == [ESC] => self.introduce(byte, byte, out),
            State::Begun => match byte {
                // A C1 character is ESC and a letter in other words.
                0x80..=0x9f => self.introduce(byte, byte - 0x40, out),
                0xa0..=0xbf => self.pass(byte, out),
                _ => {
                    out.extend_from_slice("\u{fffd}".as_bytes());
                    self.reset();
                    self.step(byte, out);
                }
            },
            State::Control => match byte {
                ESC => self.begin(byte),
                CAN | SUB => self.pass(byte, out),
                0x40..=0x7e if is_question(&self.held[self.introducer..], byte) => self.reset(),
                0x40..=0x7e => self.pass(byte, out),
                // It has its effect at once.
                ..b' ' => out.extend(Some(byte).filter(|byte| *byte != ENQ)),
                _ => self.held.push(byte),
            },
            State::String { is_command } => match byte {
                BEL if is_command => self.end_string(is_command, &[BEL], out),
                CAN | SUB => self.pass(byte, out),
                ESC | C1 => {
                    self.end = byte;
                    self.state = State::StringEnd { is_command };
                }
                _ => self.held.push(byte),
            },
            State::StringEnd { is_command } => match (self.end, byte) {
                (ESC, b'\\') | (C1, 0x9c) => {
                    self.end_string(is_command, &[self.end, byte], out);
                }
                (C1, _) => {
                    self.held.push(C1);
                    self.state = State::String { is_command };
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
        self.state = State::Begun;
    }

    /// Handles what follows the first byte of a sequence; `letter` is what it means.
    fn introduce(&mut self, byte: u8, letter: u8, out: &mut Vec<u8>) {
        self.state = match letter {
            b'[' => State::Control,
            b']' => State::String { is_command: true },
            b'P' => State::String { is_command: false },
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

    /// Lets the held sequence pass, which ends with `byte`.
    fn pass(&mut self, byte: u8, out: &mut Vec<u8>) {
        self.finish(out);
        out.push(byte);
    }

    /// Removes the held sequence.
    fn reset(&mut self) {
        self.held.clear();
        self.state = State::Ground;
    }

    /// Removes the held string if it asks, or lets it pass with `end`.
    fn end_string(&mut self, is_command: bool, end: &[u8], out: &mut Vec<u8>) {
        let content = &self.held[self.introducer..];
        let asks = if is_command {
            let mut parts = content.split(|byte| *byte == b';');
            let command = parts.next().unwrap_or_default();
            ASKING_COMMANDS.contains(&command) && parts.any(|part| part == b"?")
        } else {
            // DECRQSS and XTGETTCAP.
            content.starts_with(b"$q") || content.starts_with(b"+q")
        };
        if asks {
            self.reset();
        } else {
            out.append(&mut self.held);
            out.extend_from_slice(end);
            self.reset();
        }
    }
}

/// Whether a control sequence with these bytes before its final one asks for an answer.
fn is_question(sequence: &[u8], last: u8) -> bool {
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
        (0, b"", b't') => first.is_some_and(|first| ASKING_WINDOW_OPERATIONS.contains(&first)),
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

    const QUESTIONS: [&[u8]; 45] = [
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
    fn questions_are_taken_out() {
        for question in QUESTIONS {
            expect(question, b"");
            expect(&[b"one", question, b"two"].concat(), b"onetwo");
            expect(&question.repeat(3), b"");
            // What is cut off is no question yet; what follows it decides.
            for end in 1..question.len() {
                expect(&question[..end], &question[..end]);
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
    fn nothing_becomes_a_question_by_what_is_removed() {
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
