//! gzip (RFC 1952): the framing, the checksum and the length of each member, around the compression of
//! `miniz_oxide` (RFC 1951).
//!
//! Pure: bytes in, bytes out, in constant memory.

use std::io::{self, BufRead, ErrorKind, Read};
use std::sync::LazyLock;

use miniz_oxide::deflate::core::{
    CompressorOxide, TDEFLFlush, TDEFLStatus, compress, create_comp_flags_from_zip_params,
};
use miniz_oxide::inflate::stream::{InflateState, inflate};
use miniz_oxide::{DataFormat, MZError, MZFlush, MZStatus};

use crate::threads::Thread;

/// The first bytes of every gzip member.
pub const MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Bytes that are decompressed at a time.
const OUTPUT_BYTES: usize = 64 * 1024;

/// Memory of a [`Decoder`]: its output, and the window and tables of the decompressor.
pub const DECODER_BYTES: usize = OUTPUT_BYTES + 48 * 1024;

/// Memory of an [`Encoder`]: what `miniz_oxide` allocates.
pub const ENCODER_BYTES: usize = 320 * 1024;

/// The stack on which a compressor is made.
const MAKING_STACK_BYTES: usize = 2 << 20;

/// Longest name, comment or extra field of a member.
const MAX_FIELD_BYTES: usize = 64 * 1024;

/// How much an [`Encoder`] does for a short result.
#[derive(Clone, Copy)]
pub enum Level {
    /// What level 1 of gzip means.
    Fast = 1,
    /// What level 9 of gzip means.
    Best = 9,
}

/// Decompresses all members of a gzip stream. Zeros may follow the last one, nothing else.
pub struct Decoder<R> {
    input: R,
    state: Box<InflateState>,
    output: Box<[u8]>,
    /// The part of `output` that was not taken.
    unread: std::ops::Range<usize>,
    at: Position,
    crc: u32,
    length: u64,
}

/// Where a decoder is.
enum Position {
    /// Before a member; before the first, if `is_first`.
    Between {
        is_first: bool,
    },
    Data,
    End,
}

impl<R: BufRead> Decoder<R> {
    /// A decoder of what `input` gives.
    pub fn new(input: R) -> Self {
        Self {
            input,
            state: InflateState::new_boxed(DataFormat::Raw),
            output: vec![0; OUTPUT_BYTES].into_boxed_slice(),
            unread: 0..0,
            at: Position::Between { is_first: true },
            crc: 0,
            length: 0,
        }
    }

    /// Where the compressed data comes from.
    pub fn input(&mut self) -> &mut R {
        &mut self.input
    }

    /// As [`Decoder::input`], to look at.
    pub fn input_ref(&self) -> &R {
        &self.input
    }

    /// Decompresses until there is something to read, or the end.
    fn advance(&mut self) -> io::Result<()> {
        while self.unread.is_empty() {
            match self.at {
                Position::Between { is_first } => self.begin_member(is_first)?,
                Position::Data => self.inflate()?,
                Position::End => return Ok(()),
            }
        }
        Ok(())
    }

    fn inflate(&mut self) -> io::Result<()> {
        let input = fill(&mut self.input)?;
        let result = inflate(&mut self.state, input, &mut self.output, MZFlush::None);
        let is_at_end = input.is_empty();
        self.input.consume(result.bytes_consumed);
        self.unread = 0..result.bytes_written;
        let written = &self.output[self.unread.clone()];
        self.crc = crc32(self.crc, written);
        self.length = self.length.wrapping_add(written.len() as u64);
        match result.status {
            Ok(MZStatus::StreamEnd) => self.end_member(),
            Ok(_) | Err(MZError::Buf) if !is_at_end => Ok(()),
            Ok(_) | Err(MZError::Buf) => Err(ErrorKind::UnexpectedEof.into()),
            Err(_) => Err(invalid("the compressed data is broken")),
        }
    }

    /// Reads a member's header, or finds that there are no more.
    fn begin_member(&mut self, is_first: bool) -> io::Result<()> {
        if !is_first {
            loop {
                let input = fill(&mut self.input)?;
                let zeros = input.iter().take_while(|byte| **byte == 0).count();
                let (is_over, found) = (input.is_empty(), zeros < input.len());
                self.input.consume(zeros);
                if is_over {
                    self.at = Position::End;
                    return Ok(());
                }
                if found {
                    break;
                }
            }
        }
        let mut head = [0; 10];
        self.input.read_exact(&mut head)?;
        let flags = head[3];
        if !head.starts_with(&MAGIC) {
            return Err(invalid("something other than gzip follows the gzip data"));
        }
        if head[2] != 8 || flags & 0xe0 != 0 {
            return Err(invalid(
                "it has a compression or flags that gzip does not define",
            ));
        }
        if flags & 4 != 0 {
            let mut length = [0; 2];
            self.input.read_exact(&mut length)?;
            self.skip(usize::from(u16::from_le_bytes(length)))?;
        }
        // The name and the comment of the file.
        for flag in [8, 16] {
            if flags & flag != 0 {
                self.skip_text()?;
            }
        }
        if flags & 2 != 0 {
            self.skip(2)?;
        }
        self.state.reset(DataFormat::Raw);
        (self.crc, self.length) = (0, 0);
        self.at = Position::Data;
        Ok(())
    }

    fn end_member(&mut self) -> io::Result<()> {
        let mut trailer = [0; 8];
        self.input.read_exact(&mut trailer)?;
        if trailer != closing(self.crc, self.length) {
            return Err(invalid("the checksum or the length of the data is wrong"));
        }
        self.at = Position::Between { is_first: false };
        Ok(())
    }

    fn skip(&mut self, count: usize) -> io::Result<()> {
        let mut left = count;
        while left > 0 {
            let found = fill(&mut self.input)?.len().min(left);
            if found == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            self.input.consume(found);
            left -= found;
        }
        Ok(())
    }

    /// Skips a text that ends in NUL.
    fn skip_text(&mut self) -> io::Result<()> {
        for _ in 0..MAX_FIELD_BYTES {
            let mut byte = [0];
            self.input.read_exact(&mut byte)?;
            if byte == [0] {
                return Ok(());
            }
        }
        Err(invalid("its header has a field that is too long"))
    }
}

impl<R: BufRead> Read for Decoder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(buffer)?;
        self.consume(count);
        Ok(count)
    }
}

impl<R: BufRead> BufRead for Decoder<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.advance()?;
        Ok(&self.output[self.unread.clone()])
    }

    fn consume(&mut self, count: usize) {
        self.unread.start += count;
    }
}

/// What is buffered, retried when a signal interrupts.
fn fill(input: &mut impl BufRead) -> io::Result<&[u8]> {
    loop {
        match input.fill_buf() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(_) => break,
        }
    }
    // Asked again: the borrow of the first answer would last for the loop.
    input.fill_buf()
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(
        ErrorKind::InvalidData,
        format!("the gzip data is broken: {why}"),
    )
}

/// Compresses into one gzip member.
pub struct Encoder {
    compressor: Box<CompressorOxide>,
    crc: u32,
    length: u64,
    has_begun: bool,
}

impl Encoder {
    /// # Errors
    /// No thread can be started: making a compressor takes more stack than a connection has, until it is
    /// on the heap.
    pub fn new(level: Level) -> io::Result<Self> {
        // Negative window bits: without the framing of zlib.
        let flags = create_comp_flags_from_zip_params(level as i32, -15, 0);
        let mut compressor = None;
        Thread::new("compressor")
            .stack_bytes(MAKING_STACK_BYTES)
            .run(|| compressor = Some(Box::new(CompressorOxide::new(flags))))?;
        Ok(Self {
            compressor: compressor.expect("the thread has made it"),
            crc: 0,
            length: 0,
            has_begun: false,
        })
    }

    /// Appends compressed data to `out`; after `is_last` all of it and the trailer.
    pub fn push(&mut self, mut data: &[u8], is_last: bool, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.has_begun, true) {
            // No name and no time: the same files give the same bytes. XFL 4 is fastest, OS 255 unknown.
            out.extend_from_slice(&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 4, 255]);
        }
        self.crc = crc32(self.crc, data);
        self.length = self.length.wrapping_add(data.len() as u64);
        let flush = if is_last {
            TDEFLFlush::Finish
        } else {
            TDEFLFlush::None
        };
        loop {
            let start = out.len();
            out.resize(start + 32 * 1024, 0);
            let (status, taken, made) =
                compress(&mut self.compressor, data, &mut out[start..], flush);
            out.truncate(start + made);
            data = &data[taken..];
            let needs_more = is_last && status == TDEFLStatus::Okay;
            if data.is_empty() && !needs_more && made < 32 * 1024 {
                break;
            }
            if !matches!(status, TDEFLStatus::Okay) {
                break;
            }
        }
        if is_last {
            out.extend_from_slice(&closing(self.crc, self.length));
        }
    }
}

/// The end of a member: the checksum, and the length modulo 2^32.
fn closing(crc: u32, length: u64) -> [u8; 8] {
    (length << 32 | u64::from(crc)).to_le_bytes()
}

/// Tables for eight bytes at a time. In a box, so that the program's file has no room for them.
static TABLES: LazyLock<Box<[[u32; 256]; 8]>> = LazyLock::new(|| {
    let mut tables = Box::new([[0; 256]; 8]);
    for (value, index) in tables[0].iter_mut().zip(0_u32..) {
        *value = (0..8).fold(index, |value, _| (value >> 1) ^ ((value & 1) * 0xedb8_8320));
    }
    for row in 1..8 {
        for column in 0..256 {
            let value = tables[row - 1][column];
            tables[row][column] = value >> 8 ^ tables[0][value as usize & 0xff];
        }
    }
    tables
});

/// Continues a CRC-32 (RFC 1952 section 8); it begins with 0.
fn crc32(crc: u32, data: &[u8]) -> u32 {
    let (tables, mut crc): (&[_; 8], _) = (&TABLES, !crc);
    let (eights, rest) = data.as_chunks::<8>();
    for eight in eights {
        crc = (u64::from_le_bytes(*eight) ^ u64::from(crc))
            .to_le_bytes()
            .iter()
            .zip(tables.iter().rev())
            .fold(0, |sum, (byte, table)| sum ^ table[usize::from(*byte)]);
    }
    for byte in rest {
        crc = crc >> 8 ^ tables[0][usize::from(crc.to_le_bytes()[0] ^ byte)];
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compressed(data: &[u8]) -> Vec<u8> {
        let (mut encoder, mut out) = (Encoder::new(Level::Fast).unwrap(), Vec::new());
        for piece in data.chunks(1000) {
            encoder.push(piece, false, &mut out);
        }
        encoder.push(b"", true, &mut out);
        out
    }

    fn decompressed(data: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        // One byte at a time: every boundary is met.
        let input = io::BufReader::with_capacity(1, data);
        Decoder::new(input).read_to_end(&mut out).map(|_| out)
    }

    fn sample(length: usize) -> Vec<u8> {
        let values = (0..length).map(|at| at * at / 7 % 251);
        values.map(|value| u8::try_from(value).unwrap()).collect()
    }

    #[test]
    fn checksums_are_those_of_the_standard() {
        assert_eq!(crc32(0, b""), 0);
        assert_eq!(crc32(0, b"123456789"), 0xcbf4_3926);
        let data = sample(100);
        for at in 0..data.len() {
            assert_eq!(crc32(crc32(0, &data[..at]), &data[at..]), crc32(0, &data));
        }
    }

    #[test]
    fn data_comes_back_from_several_members() {
        for length in [0, 1, 4095, 200_000] {
            let data = sample(length);
            assert_eq!(decompressed(&compressed(&data)).unwrap(), data);
        }
        let both = [compressed(b"one, "), compressed(b"two"), vec![0; 700]].concat();
        assert_eq!(decompressed(&both).unwrap(), b"one, two");
        // With every optional field of the header.
        let mut full = vec![0x1f, 0x8b, 8, 2 | 4 | 8 | 16, 0, 0, 0, 0, 0, 3];
        full.extend_from_slice(b"\x03\x00abcname\0comment\0\xaa\xbb");
        full.extend_from_slice(&compressed(b"text")[10..]);
        assert_eq!(decompressed(&full).unwrap(), b"text");
    }

    #[test]
    fn cut_and_changed_data_is_refused() {
        let whole = compressed(&sample(3000));
        for end in 0..whole.len() {
            assert!(decompressed(&whole[..end]).is_err(), "cut at {end}");
        }
        for at in whole.len() - 8..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            assert!(decompressed(&changed).is_err(), "changed at {at}");
        }
        let mut followed = whole.clone();
        followed.extend_from_slice(b"and more than that");
        assert!(decompressed(&followed).is_err());
    }
}
