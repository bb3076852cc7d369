//! The text in a terminal's output, without its control sequences: for readers that have no screen.
//!
//! Left out are the sequences of ECMA-48 and its kin (CSI, OSC, DCS, SOS, PM, APC, charsets, titles),
//! and the control characters other than line feed and tab. A carriage return before a line feed
//! vanishes. One that stands alone begins a new line if the present one has text, so that each state of
//! a progress bar is a line of its own; what a program has overwritten stays readable. 8-bit controls
//! count where they are no part of a UTF-8 character.
//!
//! [`PlainText`] reads pieces of any size with a few bytes of state, and the result does not depend on
//! where they were cut. A string that never ends hides at most [`MAX_STRING_BYTES`], and an OSC no more
//! than its line: any bytes may look like the beginning of one.

/// Longest string of a DCS, SOS, PM or APC. Pictures are the longest.
const MAX_STRING_BYTES: usize = 1 << 20;

const BEL: u8 = 0x07;
const CAN: u8 = 0x18;
const SUB: u8 = 0x1a;
const ESC: u8 = 0x1b;
const DEL: u8 = 0x7f;
/// The 8-bit form of `ESC \`.
const ST: u8 = 0x9c;

/// Where in a control sequence the next byte is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SequenceState {
    /// In none.
    Text,
    /// After ESC.
    Escape,
    /// After ESC and a byte that another one follows, as in `ESC ( B`.
    Intermediate,
    /// In a CSI.
    Parameters,
    /// In the string of an OSC.
    Command,
    /// In another string, after this many bytes.
    String(usize),
}

/// Takes the control sequences out of a stream.
#[derive(Debug)]
pub struct PlainText {
    state: SequenceState,
    /// The first bytes of a character.
    character: Vec<u8>,
    /// How many bytes of a character are still to come, in text and in strings.
    expected: u8,
    /// A carriage return has not taken effect yet.
    is_returning: bool,
    line_has_text: bool,
    pending: u64,
}

impl PlainText {
    /// A filter for the beginning of a stream, or for what follows at any offset.
    pub fn new(is_beginning: bool) -> Self {
        Self {
            state: SequenceState::Text,
            character: Vec::new(),
            expected: 0,
            is_returning: false,
            line_has_text: !is_beginning,
            pending: 0,
        }
    }

    /// How many of the last bytes belong to a sequence or character that has not ended. A reader that
    /// resumes before them misses nothing.
    pub fn pending(&self) -> u64 {
        self.pending
    }

    /// Appends the text of the next bytes to `out`.
    pub fn push(&mut self, mut data: &[u8], out: &mut Vec<u8>) {
        while let Some(byte) = data.first() {
            let run = if self.pending == 0 {
                let is_plain = |byte: &u8| (b' '..DEL).contains(byte);
                data.iter().take_while(|byte| is_plain(byte)).count()
            } else {
                0
            };
            if run > 0 {
                self.line_has_text = true;
                out.extend_from_slice(&data[..run]);
                data = &data[run..];
                continue;
            }
            let length = out.len();
            self.byte(*byte, out);
            // Once there is text, what came before this byte has ended.
            self.pending = if out.len() > length {
                1
            } else {
                self.pending + 1
            };
            let is_clean = self.character.is_empty() && !self.is_returning;
            if self.state == SequenceState::Text && is_clean {
                self.pending = 0;
            }
            data = &data[1..];
        }
    }

    /// Ends the stream: appends a character that was cut.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        self.end_character(out);
        *self = Self::new(false);
    }

    fn byte(&mut self, byte: u8, out: &mut Vec<u8>) {
        if self.expected > 0 && (0x80..0xc0).contains(&byte) {
            self.expected -= 1;
            match self.state {
                SequenceState::Text => {
                    self.character.push(byte);
                    if self.expected == 0 {
                        self.end_character(out);
                    }
                }
                SequenceState::String(length) => self.string(length),
                _ => {}
            }
            return;
        }
        self.end_character(out);
        match (self.state, byte) {
            (SequenceState::Text, _) => self.text(byte, out),
            (SequenceState::Command, BEL)
            | (SequenceState::Command | SequenceState::String(_), CAN | SUB | ST) => {
                self.state = SequenceState::Text;
            }
            // Also the first byte of `ESC \`, which ends a string.
            (_, ESC) => self.state = SequenceState::Escape,
            (SequenceState::Command, b'\n') => self.otherwise(byte, out),
            (SequenceState::Command, _) => self.expected = continuations(byte),
            (SequenceState::String(length), _) => {
                self.expected = continuations(byte);
                self.string(length);
            }
            (SequenceState::Escape, b'[') => self.state = SequenceState::Parameters,
            (SequenceState::Escape, b']') => self.state = SequenceState::Command,
            // `ESC k` is the title of screen(1) and tmux(1).
            (SequenceState::Escape, b'P' | b'X' | b'^' | b'_' | b'k') => {
                self.state = SequenceState::String(0);
            }
            (SequenceState::Escape | SequenceState::Intermediate, b' '..=b'/') => {
                self.state = SequenceState::Intermediate;
            }
            (SequenceState::Escape | SequenceState::Intermediate, b'0'..=b'~')
            | (SequenceState::Parameters, b'@'..=b'~')
            | (_, CAN | SUB) => self.state = SequenceState::Text,
            (SequenceState::Parameters, b' '..=b'?') | (_, DEL) => {}
            _ => self.otherwise(byte, out),
        }
    }

    /// The byte does not belong to the sequence, which ends without it.
    fn otherwise(&mut self, byte: u8, out: &mut Vec<u8>) {
        self.state = SequenceState::Text;
        self.text(byte, out);
    }

    fn string(&mut self, length: usize) {
        self.state = if length < MAX_STRING_BYTES {
            SequenceState::String(length + 1)
        } else {
            SequenceState::Text
        };
    }

    fn text(&mut self, byte: u8, out: &mut Vec<u8>) {
        match byte {
            b'\n' => {
                self.is_returning = false;
                self.line_has_text = false;
                out.push(byte);
            }
            b'\r' => self.is_returning = true,
            ESC => self.state = SequenceState::Escape,
            0x9b => self.state = SequenceState::Parameters,
            0x9d => self.state = SequenceState::Command,
            0x90 | 0x98 | 0x9e | 0x9f => self.state = SequenceState::String(0),
            b'\t' | b' '..DEL | 0xa0.. => {
                self.expected = continuations(byte);
                self.character.push(byte);
                if self.expected == 0 {
                    self.end_character(out);
                }
            }
            ..b' ' | DEL..0xa0 => {}
        }
    }

    /// Appends the bytes of a character, which is whole, or broken off by the next byte.
    fn end_character(&mut self, out: &mut Vec<u8>) {
        self.expected = 0;
        if self.character.is_empty() {
            return;
        }
        if std::mem::take(&mut self.is_returning) && self.line_has_text {
            out.push(b'\n');
        }
        self.line_has_text = true;
        out.append(&mut self.character);
    }
}

/// How many bytes follow the first one of a UTF-8 character.
fn continuations(first: u8) -> u8 {
    match first {
        0xc2..=0xdf => 1,
        0xe0..=0xef => 2,
        0xf0..=0xf4 => 3,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::{Script, check};

    fn plain(data: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut filter = PlainText::new(true);
        filter.push(data, &mut out);
        filter.finish(&mut out);
        out
    }

    #[test]
    fn sequences_vanish_and_text_stays() {
        for (data, text) in [
            ("plain text\twith a tab\n", "plain text\twith a tab\n"),
            ("\x1b[1;31mred\x1b[0m \x1b[?2004h$ ", "red $ "),
            ("\x1b]0;a title\x07after", "after"),
            ("\x1b]8;;http://a/\x1b\\link\x1b]8;;\x1b\\", "link"),
            ("\x1b]0;\u{2733} \u{1f600}\u{9c}\x1b\\after", "after"),
            (
                "\x1bP1$r0m\x1b\\a\x1bXb\x1b\\c\x1b^d\x1b\\e\x1b_f\x07g\x1b\\h",
                "aceh",
            ),
            ("\x1bktitle\x1b\\after", "after"),
            ("\x1b(0lqk\x1b(B \x1b)A\x1b#8\x1b%G\x1b F", "lqk "),
            ("\x1b7\x1b8\x1b=\x1b>\x1bM\x1bcx", "x"),
            ("a\x07b\x08c\x0e\x0f\x00\x7fd", "abcd"),
            // Sequences that another byte breaks off.
            ("\x1b[31\x18a\x1b]title\x1ab\x1b\x1b[0mc", "abc"),
            ("\x1b[3\nline\x1b]no end\nnext", "\nline\nnext"),
            ("\x1b[31\u{e9}\x1b\u{e9}", "\u{e9}\u{e9}"),
            // Line ends.
            ("a\r\nb\r\r\nc\n\r\nd", "a\nb\nc\n\nd"),
            ("10%\r20%\r\x1b[K30%\r\n", "10%\n20%\n30%\n"),
            ("\r\r\x1b[2Ka\r\r\rb\r", "a\nb"),
            ("done\r\x1b[K\nnext", "done\nnext"),
            ("", ""),
        ] {
            assert_eq!(
                String::from_utf8(plain(data.as_bytes())).unwrap(),
                text,
                "{data:?}"
            );
        }
    }

    #[test]
    fn eight_bit_controls_count_where_they_are_no_part_of_a_character() {
        for (data, text) in [
            (&b"a\x9b31mb"[..], &b"ab"[..]),
            (b"a\x9d0;title\x9cb\x90x\x9cc\x85d", b"abcd"),
            (
                "\u{db}\u{2db}m \u{41b}31m".as_bytes(),
                "\u{db}\u{2db}m \u{41b}31m".as_bytes(),
            ),
            // Broken characters stay as they are; events replace them.
            (
                b"\xe2\x98a\xc3\x1b[mb\xffc\xe2\x98",
                b"\xe2\x98a\xc3b\xffc\xe2\x98",
            ),
        ] {
            assert_eq!(plain(data), text, "{}", data.escape_ascii());
        }
    }

    #[test]
    fn a_string_without_an_end_hides_no_more_than_its_bound() {
        let mut data = b"\x1bP".to_vec();
        data.resize(data.len() + 2 * MAX_STRING_BYTES, b'x');
        let shown = plain(&data).len();
        assert!(
            (MAX_STRING_BYTES - 2..=MAX_STRING_BYTES).contains(&shown),
            "{shown}"
        );
    }

    /// The text, and how much of the data is behind it, do not depend on the cuts. Nothing that controls
    /// a terminal is left.
    #[test]
    fn plain_text_is_the_same_wherever_the_output_was_cut() {
        let tokens: &[&[u8]] = &[
            b"\x1b[",
            b"\x1b]",
            b"\x1b\\",
            b"\x1bP",
            b"\x07",
            b"\r\n",
            b"\r",
            b"\n",
            b"31;1m",
            b"\x1b(B",
            b"\xe2\x98\x83",
            b"\xc2\x9b",
            b"\x9b",
            b"\x9c",
            b"\x9d",
            b"\x18",
            b"\x1bk",
        ];
        check("plain", tokens, |input| {
            let mut script = Script(input);
            let cut = usize::from(script.byte());
            let data = script.0;
            let whole = plain(data);
            let mut filter = PlainText::new(true);
            let mut pieces = Vec::new();
            let mut step = cut % 7;
            let mut rest = data;
            let mut taken = 0;
            while !rest.is_empty() {
                step = (step * 5 + cut) % 11;
                let (now, later) = rest.split_at(rest.len().min(step + 1));
                rest = later;
                taken += now.len() as u64;
                filter.push(now, &mut pieces);
                assert!(filter.pending() <= taken);
                // Only for short ones: it takes the square of the length.
                if data.len() > 2048 {
                    continue;
                }
                let rest = &data[usize::try_from(taken - filter.pending()).unwrap()..];
                // Resuming here gives the same, but for the end of a line that may appear once more or less.
                let mut resumed = pieces.clone();
                let mut fresh = PlainText::new(false);
                fresh.push(rest, &mut resumed);
                fresh.finish(&mut resumed);
                let without_lines = |text: &[u8]| -> Vec<u8> {
                    text.iter().copied().filter(|byte| *byte != b'\n').collect()
                };
                assert_eq!(without_lines(&resumed), without_lines(&whole));
            }
            filter.finish(&mut pieces);
            assert_eq!(pieces, whole);
            let is_control = |byte: &u8| matches!(*byte, ..b' ' | DEL) && !b"\t\n".contains(byte);
            assert!(!whole.iter().any(is_control), "{}", whole.escape_ascii());
            assert!(whole.len() <= data.len());
        });
    }
}
