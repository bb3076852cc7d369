//! What moved bytes must be, and a look at every one of them.

use std::io::Write;
use std::sync::LazyLock;

use super::client::{BLOCK, Client, request};

/// Bytes that are repeated over and over.
pub struct Unit {
    /// Longer than a piece and a unit.
    repeated: Vec<u8>,
    length: usize,
}

impl Unit {
    pub fn new(unit: &[u8]) -> Self {
        Self {
            repeated: unit.repeat((BLOCK + BLOCK / 2) / unit.len() + 2),
            length: unit.len(),
        }
    }

    pub fn len(&self) -> usize {
        self.length
    }

    /// Some bytes, as they stand at an offset of the endless repetition.
    pub fn at(&self, offset: usize, most: usize) -> &[u8] {
        let phase = offset % self.length;
        &self.repeated[phase..self.repeated.len().min(phase + most)]
    }

    /// Writes `length` bytes, as they stand at an offset.
    pub fn send(&self, to: &mut impl Write, offset: usize, length: usize) {
        let mut sent = 0;
        while sent < length {
            let piece = self.at(offset + sent, (length - sent).min(BLOCK));
            to.write_all(piece).unwrap();
            sent += piece.len();
        }
    }
}

/// What files hold: bytes without structure. Their number is prime, so no block begins like another.
pub static PATTERN: LazyLock<Unit> = LazyLock::new(|| {
    let mut state = 1_u32;
    let step = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    Unit::new(&(0..65_521).map(step).collect::<Vec<_>>())
});

/// A stream that must repeat a unit, however it is cut into pieces.
pub struct Expected<'a> {
    unit: &'a Unit,
    /// Where the next piece begins.
    pub offset: usize,
}

impl<'a> Expected<'a> {
    pub fn new(unit: &'a Unit, offset: usize) -> Self {
        Self { unit, offset }
    }

    #[track_caller]
    pub fn check(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            let wanted = self.unit.at(self.offset, piece.len());
            let (now, rest) = piece.split_at(wanted.len());
            assert!(same(now, wanted), "wrong bytes after {}", self.offset);
            self.offset += now.len();
            piece = rest;
        }
    }
}

/// Whether two slices of one length are equal. The C library's own comparison goes byte by byte and
/// would be what is measured; so would a plain loop, which is not turned into vectors where programs
/// are made small.
fn same(a: &[u8], b: &[u8]) -> bool {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<64>(), b.as_chunks::<64>());
    let mut difference = 0;
    for (a, b) in a.iter().zip(b) {
        for (a, b) in a.as_chunks::<16>().0.iter().zip(b.as_chunks::<16>().0) {
            difference |= u128::from_ne_bytes(*a) ^ u128::from_ne_bytes(*b);
        }
    }
    difference == 0 && a_rest == b_rest
}

impl Client {
    /// Receives a range of what files hold.
    pub fn expect(&mut self, offset: usize, length: usize) {
        let mut expected = Expected::new(&PATTERN, offset);
        self.body(|piece| expected.check(piece));
        assert_eq!(expected.offset, offset + length, "bytes are missing");
    }

    pub fn download(&mut self, target: &str, headers: &str, offset: usize, length: usize) {
        let request = request("GET", target, headers, 0, b"");
        self.stream.write_all(&request).unwrap();
        self.expect(offset, length);
    }

    pub fn upload(&mut self, target: &str, offset: usize, length: usize) {
        self.send("PUT", target, length, b"");
        PATTERN.send(&mut self.stream, offset, length);
        self.body(|_| ());
    }
}
