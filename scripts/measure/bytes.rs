//! What moved bytes must be.

use std::io::Write;

use super::client::{BLOCK, Client};

/// A stream that must repeat one unit, however it is cut into pieces.
pub struct Expected {
    /// The unit over and over, longer than a piece and a unit.
    repeated: Vec<u8>,
    unit: usize,
    pub seen: usize,
}

impl Expected {
    pub fn new(unit: &[u8]) -> Self {
        let repeated = unit.repeat((BLOCK + BLOCK / 2) / unit.len() + 2);
        Self {
            repeated,
            unit: unit.len(),
            seen: 0,
        }
    }

    /// What the files hold.
    pub fn pattern() -> Self {
        Self::new(&pattern())
    }

    #[track_caller]
    pub fn check(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            let phase = self.seen % self.unit;
            let length = piece.len().min(self.repeated.len() - phase);
            let wanted = &self.repeated[phase..phase + length];
            assert!(
                same(&piece[..length], wanted),
                "wrong bytes after {}",
                self.seen
            );
            self.seen += length;
            piece = &piece[length..];
        }
    }
}

/// Whether two slices of one length are equal. The C library's own comparison goes byte by byte and
/// would be what is measured; this loop the compiler turns into vectors.
pub fn same(a: &[u8], b: &[u8]) -> bool {
    a.iter()
        .zip(b)
        .fold(0, |difference, (a, b)| difference | (a ^ b))
        == 0
}

/// Bytes without structure; their number is prime, so no block begins like another.
pub fn pattern() -> Vec<u8> {
    let mut state = 1_u32;
    let step = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..65_521).map(step).collect()
}

pub fn send_pattern(to: &mut impl Write, size: usize) {
    let unit = pattern();
    let block = unit.repeat(BLOCK / unit.len());
    let mut left = size;
    while left > 0 {
        let length = left.min(block.len());
        to.write_all(&block[..length]).unwrap();
        left -= length;
    }
}

impl Client {
    pub fn download(&mut self, target: &str, size: usize) {
        self.send("GET", target, 0, b"");
        let mut expected = Expected::pattern();
        self.body(|piece| expected.check(piece));
        assert_eq!(expected.seen, size);
    }

    pub fn upload(&mut self, target: &str, size: usize) {
        self.send("PUT", target, size, b"");
        send_pattern(&mut self.stream, size);
        self.body(|_| ());
    }
}
