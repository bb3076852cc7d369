//! Text as the inside of a JSON string, for output that comes at the speed of a pipe.
//!
//! Besides what JSON demands, DEL and what Python's `str.splitlines` takes for the end of a line are
//! escaped: U+0085, U+2028 and U+2029. Most text needs few escapes, so eight bytes are looked at
//! together; and what is written goes through a block of fixed size, a word at a time, so that the
//! growth of the result is no concern of the inner loop.

/// Appends bytes as the inside of a JSON string; each maximal part that is not UTF-8 becomes one
/// U+FFFD, as Unicode recommends.
pub(super) fn append(out: &mut Vec<u8>, data: &[u8]) {
    let mut block = Block::new(out);
    if std::str::from_utf8(data).is_ok() {
        block.append(data);
    } else {
        for chunk in data.utf8_chunks() {
            block.append(chunk.valid().as_bytes());
            if !chunk.invalid().is_empty() {
                block.put(*b"\xef\xbf\xbd\0\0\0\0\0", 3);
            }
        }
    }
    block.flush();
}

/// The bytes of a word that may need an escape have their highest bit set in the result: controls,
/// quote, backslash, DEL, and the first bytes of U+0085 (C2 85) and of U+2028 and U+2029 (E2 80 A8,
/// E2 80 A9). The lowest one found is right; above it there may be false ones, from its borrow.
fn suspects(word: u64) -> u64 {
    const EACH: u64 = 0x0101_0101_0101_0101;
    let below = |limit: u64, word: u64| word.wrapping_sub(EACH * limit) & !word;
    let equal = |byte: u8| below(1, word ^ (EACH * u64::from(byte)));
    let found =
        below(0x20, word) | equal(b'"') | equal(b'\\') | equal(0x7f) | equal(0xc2) | equal(0xe2);
    found & (EACH << 7)
}

/// Up to eight bytes, and how many they are.
type Word = ([u8; 8], usize);

/// What stands for each ASCII character.
static ESCAPES: [Word; 128] = {
    let mut escapes = [([0; 8], 1); 128];
    let mut byte = 0;
    while byte < 128 {
        escapes[byte as usize] = escape(byte);
        byte += 1;
    }
    escapes
};

const fn escape(byte: u8) -> Word {
    let short = match byte {
        b'"' | b'\\' => byte,
        b'\n' => b'n',
        b'\r' => b'r',
        b'\t' => b't',
        0x00..=0x1f | 0x7f => {
            let digits = *b"0123456789abcdef";
            let (high, low) = (digits[byte as usize >> 4], digits[byte as usize & 15]);
            return ([b'\\', b'u', b'0', b'0', high, low, 0, 0], 6);
        }
        _ => return ([byte, 0, 0, 0, 0, 0, 0, 0], 1),
    };
    ([b'\\', short, 0, 0, 0, 0, 0, 0], 2)
}

/// What of the result is gathered before it is appended.
const BLOCK_BYTES: usize = 4096;

/// What is on its way to `out`.
struct Block<'a> {
    out: &'a mut Vec<u8>,
    bytes: [u8; BLOCK_BYTES],
    length: usize,
}

impl<'a> Block<'a> {
    fn new(out: &'a mut Vec<u8>) -> Self {
        Self {
            out,
            bytes: [0; BLOCK_BYTES],
            length: 0,
        }
    }

    /// Adds the first `count` bytes of a word. All of them are written, which is one instruction; those
    /// beyond are overwritten next.
    fn put(&mut self, word: [u8; 8], count: usize) {
        if let Some(place) = self.bytes[self.length..].first_chunk_mut() {
            *place = word;
        }
        self.length += count;
        if self.length > BLOCK_BYTES - 8 {
            self.flush();
        }
    }

    fn flush(&mut self) {
        self.out.extend_from_slice(&self.bytes[..self.length]);
        self.length = 0;
    }

    /// Adds valid UTF-8 with its escapes.
    fn append(&mut self, mut text: &[u8]) {
        while !text.is_empty() {
            let (word, length) = match text.first_chunk() {
                Some(word) => (*word, 8),
                None => padded(text),
            };
            let found = suspects(u64::from_le_bytes(word));
            if found == 0 {
                self.put(word, length);
                text = &text[length..];
                continue;
            }
            let plain = found.trailing_zeros() as usize / 8;
            self.put(word, plain);
            text = &text[plain..];
            let ((word, count), taken) = match *text {
                [0xc2, 0x85, ..] => ((*b"\\u0085\0\0", 6), 2),
                [0xe2, 0x80, 0xa8, ..] => ((*b"\\u2028\0\0", 6), 3),
                [0xe2, 0x80, 0xa9, ..] => ((*b"\\u2029\0\0", 6), 3),
                [first @ 0xc2, second, ..] => (([first, second, 0, 0, 0, 0, 0, 0], 2), 2),
                [first @ 0xe2, second, third, ..] => {
                    (([first, second, third, 0, 0, 0, 0, 0], 3), 3)
                }
                [byte, ..] => (ESCAPES[usize::from(byte & 0x7f)], 1),
                [] => return,
            };
            self.put(word, count);
            text = &text[taken..];
        }
    }
}

/// The last bytes of a text as a word, filled up with what needs no escape.
fn padded(rest: &[u8]) -> Word {
    let mut word = [b' '; 8];
    word[..rest.len()].copy_from_slice(rest);
    (word, rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(data: &[u8]) -> String {
        let mut out = Vec::new();
        append(&mut out, data);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn what_is_escaped_reads_back_as_it_was() {
        let all: String = ('\0'..='\u{2100}')
            .chain(['\u{FFFD}', '\u{1F600}', '\u{10FFFF}'])
            .collect();
        let escaped = text(all.as_bytes());
        assert_eq!(
            serde_json::from_str::<String>(&format!("\"{escaped}\"")).unwrap(),
            all
        );
    }

    /// Whatever stands before and behind an escape, at every place in a word.
    #[test]
    fn escapes_are_found_at_every_place() {
        for special in [
            "\n",
            "\"",
            "\u{85}",
            "\u{2028}",
            "\u{7f}",
            "\u{ff}",
            "\u{2029}\u{1}",
            "\u{2027}",
        ] {
            for before in 0..20 {
                for after in 0..20 {
                    let all = ["x".repeat(before), special.to_owned(), "y".repeat(after)].concat();
                    let escaped = text(all.as_bytes());
                    let back: String = serde_json::from_str(&format!("\"{escaped}\"")).unwrap();
                    assert_eq!(back, all);
                    assert!(!escaped.contains('\u{2028}') && !escaped.contains('\u{85}'));
                }
            }
        }
    }

    /// What Python's `str.splitlines` takes for the end of a line.
    #[test]
    fn nothing_that_ends_a_line_is_left() {
        let breaks = "\n\r\u{b}\u{c}\u{1c}\u{1d}\u{1e}\u{85}\u{2028}\u{2029}";
        assert!(!text(breaks.as_bytes()).contains(|character| breaks.contains(character)));
    }

    #[test]
    fn only_what_is_not_utf8_is_replaced() {
        for data in [
            &b"a\xffb"[..],
            b"\xe2\x98",
            b"\xf0\x9f\x98\x80\x80",
            b"\xc2",
            b"\xed\xa0\x80",
            b"\xe2\x80",
        ] {
            assert_eq!(text(data), String::from_utf8_lossy(data));
        }
    }

    /// The block in between is not to be seen, wherever its end falls.
    #[test]
    fn long_texts_come_whole() {
        for shift in 0..16 {
            let all = ["z".repeat(shift), "abc\n\"\u{1}é€\u{2028}😀".repeat(1500)].concat();
            let escaped = text(all.as_bytes());
            let back: String = serde_json::from_str(&format!("\"{escaped}\"")).unwrap();
            assert!(back == all);
            let broken = [all.as_bytes(), b"\xff", all.as_bytes()].concat();
            let escaped = text(&broken);
            let back: String = serde_json::from_str(&format!("\"{escaped}\"")).unwrap();
            assert!(back == String::from_utf8_lossy(&broken));
        }
    }
}
