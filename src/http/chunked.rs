//! The chunked transfer coding (RFC 9112 section 7.1), as a state machine: it tells which of the bytes
//! that it is shown are data, and keeps none of them.

use super::parse::{ParseError, at_most, header_parts, is_text};

/// Most bytes of one chunk's extensions, and of all trailers together.
const MAX_LINE_BYTES: usize = 4096;

/// Bytes of extensions that a body may have beyond one for each byte of data. They are ignored: without
/// a limit a client could send them endlessly.
const SPARE_EXTENSION_BYTES: u64 = 16 * 1024;

/// What the shown bytes are.
#[derive(Debug, PartialEq, Eq)]
pub enum ChunkStep {
    /// After `skip` bytes of framing come `length` bytes of data (at most what was shown).
    Data {
        /// Bytes of framing.
        skip: usize,
        /// Bytes of the body.
        length: usize,
    },
    /// All shown bytes (this many) are framing, and more are needed.
    More(usize),
    /// The body has ended, after this many bytes of framing.
    End(usize),
}

/// The position in the coding of one body.
#[derive(Debug, Default)]
pub struct Decoder {
    state: ChunkState,
    /// Bytes of this chunk's extensions, or of the trailers.
    line_bytes: usize,
    /// The trailer line that is being received. Trailers are ignored, but must have the form of a header
    /// line: anything else may be meant as the next request.
    trailer: Vec<u8>,
    data_bytes: u64,
    extension_bytes: u64,
}

#[derive(Debug, Clone, Copy)]
enum ChunkState {
    /// In the digits of a size; `digits` of them so far.
    Size {
        size: u64,
        digits: u32,
    },
    /// In an extension, which is ignored.
    Extension {
        size: u64,
    },
    /// Before the line feed of a size line.
    SizeEnd {
        size: u64,
    },
    /// In the data.
    Data {
        left: u64,
    },
    /// After the data, before the carriage return.
    DataEnd,
    /// Before the line feed after the data.
    DataEndLine,
    /// At the beginning of a trailer line.
    TrailerStart,
    /// In a trailer line.
    Trailer,
    /// Before the line feed of a trailer line.
    TrailerEnd,
    /// Before the last line feed.
    LastLine,
    Done,
}

impl Default for ChunkState {
    fn default() -> Self {
        Self::Size { size: 0, digits: 0 }
    }
}

impl Decoder {
    /// Decodes received bytes. The caller shows each byte once: after this step, the next bytes are
    /// those behind what the step counted.
    ///
    /// # Errors
    /// `Malformed`.
    pub fn step(&mut self, bytes: &[u8]) -> Result<ChunkStep, ParseError> {
        let malformed = Err(ParseError::Malformed("the chunked body is malformed"));
        let mut at = 0;
        loop {
            if let ChunkState::Data { left } = &mut self.state {
                let length = at_most(*left, bytes.len() - at);
                if length > 0 {
                    *left -= length as u64;
                    self.data_bytes += length as u64;
                    if *left == 0 {
                        self.state = ChunkState::DataEnd;
                    }
                    return Ok(ChunkStep::Data { skip: at, length });
                }
            }
            if matches!(self.state, ChunkState::Done) {
                return Ok(ChunkStep::End(at));
            }
            let Some(&byte) = bytes.get(at) else {
                return Ok(ChunkStep::More(at));
            };
            at += 1;
            let fits = is_text(&[byte]) && self.line_bytes < MAX_LINE_BYTES;
            self.state = match (self.state, byte) {
                (ChunkState::Size { size, digits }, byte)
                    if byte.is_ascii_hexdigit() && digits < 16 =>
                {
                    let digit = char::from(byte).to_digit(16).unwrap_or_default();
                    ChunkState::Size {
                        size: size << 4 | u64::from(digit),
                        digits: digits + 1,
                    }
                }
                (ChunkState::Size { size, digits: 1.. }, b';') => {
                    self.line_bytes = 0;
                    ChunkState::Extension { size }
                }
                (
                    ChunkState::Size { size, digits: 1.. } | ChunkState::Extension { size },
                    b'\r',
                ) => ChunkState::SizeEnd { size },
                (ChunkState::Extension { size }, _) if fits => {
                    self.line_bytes += 1;
                    self.extension_bytes += 1;
                    if self.extension_bytes > self.data_bytes + SPARE_EXTENSION_BYTES {
                        return malformed;
                    }
                    ChunkState::Extension { size }
                }
                (ChunkState::SizeEnd { size: 0 }, b'\n') => {
                    self.line_bytes = 0;
                    ChunkState::TrailerStart
                }
                (ChunkState::SizeEnd { size }, b'\n') => ChunkState::Data { left: size },
                (ChunkState::DataEnd, b'\r') => ChunkState::DataEndLine,
                (ChunkState::DataEndLine, b'\n') => ChunkState::default(),
                (ChunkState::TrailerStart, b'\r') => ChunkState::LastLine,
                (ChunkState::Trailer, b'\r') => ChunkState::TrailerEnd,
                (ChunkState::TrailerStart | ChunkState::Trailer, _) if fits => {
                    self.line_bytes += 1;
                    self.trailer.push(byte);
                    ChunkState::Trailer
                }
                (ChunkState::TrailerEnd, b'\n') => {
                    header_parts(&self.trailer)?;
                    self.trailer.clear();
                    ChunkState::TrailerStart
                }
                (ChunkState::LastLine, b'\n') => ChunkState::Done,
                _ => return malformed,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes `bytes` shown in pieces of `piece`; the body and how many bytes were used.
    fn decode(bytes: &[u8], piece: usize) -> Result<Option<(Vec<u8>, usize)>, ParseError> {
        let mut decoder = Decoder::default();
        let mut body = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let shown = &bytes[at..bytes.len().min(at + piece)];
            match decoder.step(shown)? {
                ChunkStep::Data { skip, length } => {
                    body.extend_from_slice(&shown[skip..skip + length]);
                    at += skip + length;
                }
                ChunkStep::More(count) => at += count,
                ChunkStep::End(count) => return Ok(Some((body, at + count))),
            }
        }
        Ok(None)
    }

    #[test]
    fn decodes_at_every_split() {
        let coded = b"5;x=y\r\nhello\r\n0A\r\n, chunked \r\n0\r\nTrailer: t\r\n\r\nNEXT";
        for piece in 1..=coded.len() {
            let (body, used) = decode(coded, piece).unwrap().unwrap();
            assert_eq!(body, b"hello, chunked ");
            assert_eq!(used, coded.len() - 4);
        }
    }

    #[test]
    fn extensions_are_no_way_to_send_without_end() {
        let chunk = [b"1;".as_slice(), &[b'e'; 4000], b"\r\nx\r\n"].concat();
        assert!(decode(&chunk.repeat(4), 1000).is_ok());
        assert!(decode(&chunk.repeat(6), 1000).is_err());
        // As signing clients send them: a short one with each large chunk.
        let large = [
            b"1000;sig=".as_slice(),
            &[b'e'; 80],
            b"\r\n",
            &[b'x'; 0x1000],
            b"\r\n",
        ]
        .concat();
        assert!(decode(&large.repeat(1000), 5000).is_ok());
    }

    #[test]
    fn every_prefix_wants_more() {
        let coded = b"3\r\nabc\r\n0\r\n\r\n";
        for end in 0..coded.len() {
            assert_eq!(decode(&coded[..end], 100), Ok(None), "{end}");
        }
    }

    #[test]
    fn forbids_what_is_not_the_coding() {
        for coded in [
            &b"\r\n"[..],
            b"g\r\n",
            b"-1\r\n",
            b"+1\r\n",
            b"0x1\r\n",
            b" 1\r\n",
            b"11111111111111111\r\n",
            b"1\nx",
            b"1\rx",
            b"1\r\nab",
            b"1\r\na\n",
            b"1\r\na\r\r",
            b"1;\0\r\n",
            b"0\r\n\n",
            b"0\r\na\n",
            b"0\r\nno colon\r\n",
            b"0\r\nA : b\r\n",
            b"0\r\n A: b\r\n",
            b"0\r\nPUT / HTTP/1.1\r\n",
        ] {
            assert!(
                decode(coded, 100).is_err(),
                "{:?}",
                String::from_utf8_lossy(coded)
            );
        }
    }
}
