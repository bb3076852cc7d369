//! Finds lines in a file, piece by piece: any file in constant memory.
//!
//! A line ends after `\n`; what follows the last one is a line too, unless it is empty. Pure: nothing here
//! reads a file.

/// A range of lines, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineRange {
    /// The first line.
    pub first: u64,
    /// The last line; it may be beyond the end.
    pub last: u64,
}

impl LineRange {
    /// Reads `10-20`, `10-` (to the end) or `10` (that line alone).
    pub fn parse(text: &str) -> Option<Self> {
        let number = |text: &str| -> Option<u64> {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            // A number beyond any file means its end.
            is_number.then(|| text.parse().unwrap_or(u64::MAX))
        };
        let (first, last) = match text.split_once('-') {
            None => (number(text)?, number(text)?),
            Some((first, "")) => (number(first)?, u64::MAX),
            Some((first, last)) => (number(first)?, number(last)?),
        };
        (1 <= first && first <= last).then_some(Self { first, last })
    }
}

/// Where a range of lines is in a file.
#[derive(Debug, PartialEq, Eq)]
pub struct FoundLines {
    /// The first byte.
    pub offset: u64,
    /// Bytes, with the ends of the lines.
    pub length: u64,
    /// The existing lines of the range; `None` if the file has none of them.
    pub lines: Option<LineRange>,
    /// The lines of the file.
    pub total: u64,
}

/// Finds a range of lines in what it is fed.
pub struct LineFinder {
    range: LineRange,
    /// Bytes so far.
    offset: u64,
    /// Line ends so far.
    ends: u64,
    /// Where the first line begins.
    start: Option<u64>,
    /// Where the last line ends.
    end: Option<u64>,
    is_in_line: bool,
}

impl LineFinder {
    pub fn new(range: LineRange) -> Self {
        Self {
            range,
            offset: 0,
            ends: 0,
            start: (range.first == 1).then_some(0),
            end: None,
            is_in_line: false,
        }
    }

    /// Takes the next bytes of the file.
    pub fn feed(&mut self, bytes: &[u8]) {
        let Some(last) = bytes.last() else {
            return;
        };
        self.is_in_line = *last != b'\n';
        let ends = memchr::memchr_iter(b'\n', bytes).count() as u64;
        let behind = |end: u64| {
            let index = end
                .checked_sub(self.ends + 1)
                .filter(|_| end <= self.ends + ends)?;
            let mut places = memchr::memchr_iter(b'\n', bytes);
            let place = places.nth(usize::try_from(index).ok()?)?;
            Some(self.offset + place as u64 + 1)
        };
        self.start = self.start.or_else(|| behind(self.range.first - 1));
        self.end = self.end.or_else(|| behind(self.range.last));
        self.ends += ends;
        self.offset += bytes.len() as u64;
    }

    /// Ends the file.
    pub fn finish(self) -> FoundLines {
        let total = self.ends + u64::from(self.is_in_line);
        let LineRange { first, last } = self.range;
        if first > total {
            return FoundLines {
                offset: self.offset,
                length: 0,
                lines: None,
                total,
            };
        }
        let offset = self.start.unwrap_or(self.offset);
        FoundLines {
            offset,
            length: self.end.unwrap_or(self.offset) - offset,
            lines: Some(LineRange {
                first,
                last: last.min(total),
            }),
            total,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::check;

    fn found(bytes: &[u8], range: LineRange, piece: usize) -> FoundLines {
        let mut finder = LineFinder::new(range);
        for piece in bytes.chunks(piece) {
            finder.feed(piece);
        }
        finder.finish()
    }

    #[test]
    fn ranges_are_parsed() {
        let range = |first, last| Some(LineRange { first, last });
        for (text, expected) in [
            ("1", range(1, 1)),
            ("10-20", range(10, 20)),
            ("7-7", range(7, 7)),
            ("3-", range(3, u64::MAX)),
            ("3-99999999999999999999999", range(3, u64::MAX)),
            ("0", None),
            ("0-3", None),
            ("3-2", None),
            ("-3", None),
            ("-", None),
            ("", None),
            ("+1", None),
            ("1-2-3", None),
            ("1 - 2", None),
            ("a", None),
        ] {
            assert_eq!(LineRange::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn lines_are_found_whatever_the_pieces() {
        let tokens: &[&[u8]] = &[b"\n", b"a", b"\n\n", b"\r\n", b"0123456789abcdef\n"];
        check("lines", tokens, |input| {
            let Some((&[first, more, piece], text)) = input.split_first_chunk() else {
                return;
            };
            let first = u64::from(first % 8) + 1;
            let last = first + u64::from(more % 8);
            let model: Vec<&[u8]> = text.split_inclusive(|byte| *byte == b'\n').collect();
            let got = found(text, LineRange { first, last }, usize::from(piece).max(1));
            assert_eq!(got.total, model.len() as u64);
            let expected: Vec<u8> = (first..=last)
                .filter_map(|line| model.get(usize::try_from(line).unwrap() - 1))
                .flat_map(|line| line.to_vec())
                .collect();
            let offset = usize::try_from(got.offset).unwrap();
            let length = usize::try_from(got.length).unwrap();
            assert_eq!(text[offset..offset + length], expected);
            let lines = (first <= got.total).then(|| LineRange {
                first,
                last: last.min(got.total),
            });
            assert_eq!(got.lines, lines);
        });
    }
}
