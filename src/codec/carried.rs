//! What the program carries in compressed form: `build.rs` makes it.
//!
//! The form is LZMA, without a header and with the parameters that suit text (lc=3, lp=0, pb=0). It is a seventh shorter
//! than what archives use. Only what the build made is decompressed here, so nothing is said of data that is broken.

/// Decompresses a document, which its length precedes.
pub fn document(carried: &[u8]) -> Vec<u8> {
    let (length, compressed) = carried.split_first_chunk().unwrap_or((&[0; 4], &[]));
    decompress(compressed, u32::from_le_bytes(*length) as usize)
}

/// A document by the name of its file in the folder where the build put it.
macro_rules! carried {
    ($name:literal) => {
        $crate::codec::carried::document(include_bytes!(concat!(env!("OUT_DIR"), "/", $name)))
    };
}

pub(crate) use carried;

/// Kinds of the last few symbols, of which a decision depends: below 7 the last one is a literal.
const STATES: usize = 12;

// Where the probabilities of each decision are. Trees begin with one that is not used.
const IS_MATCH: usize = 0;
const IS_REPEATED: usize = IS_MATCH + STATES;
const IS_OLDER: usize = IS_REPEATED + STATES;
const IS_SECOND_OLDER: usize = IS_OLDER + STATES;
const IS_OLDEST: usize = IS_SECOND_OLDER + STATES;
const IS_LONG: usize = IS_OLDEST + STATES;
const LENGTH: usize = IS_LONG + STATES;
const REPEATED_LENGTH: usize = LENGTH + LENGTH_SIZE;
const DISTANCE_SLOT: usize = REPEATED_LENGTH + LENGTH_SIZE;
const DISTANCE: usize = DISTANCE_SLOT + 4 * 64;
const DISTANCE_END: usize = DISTANCE + 128;
const LITERAL: usize = DISTANCE_END + 16;
const PROBABILITIES: usize = LITERAL + 8 * LITERAL_SIZE;

/// Two choices, and trees for 8, 8 and 256 lengths.
const LENGTH_SIZE: usize = 2 + 8 + 8 + 256;

/// Trees for a byte without a byte to expect, and with one whose next bit is 0 or 1.
const LITERAL_SIZE: usize = 3 * 256;

/// Shortest match.
const MIN_LENGTH: usize = 2;

fn decompress(compressed: &[u8], length: usize) -> Vec<u8> {
    let mut coder = RangeDecoder::new(compressed);
    let mut out = Vec::with_capacity(length);
    let mut state = 0;
    // The last four distances, less one, the latest first.
    let mut distances = [0; 4];
    while out.len() < length {
        if coder.bit(IS_MATCH + state) == 0 {
            let last = out.last().copied().unwrap_or(0);
            let expected = (state >= 7).then(|| out[out.len() - 1 - distances[0]]);
            out.push(coder.literal(last, expected));
            state = match state {
                0..4 => 0,
                4..10 => state - 3,
                _ => state - 6,
            };
            continue;
        }
        let is_after_literal = state < 7;
        let count = if coder.bit(IS_REPEATED + state) == 0 {
            let count = coder.length(LENGTH);
            distances.rotate_right(1);
            distances[0] = coder.distance(count);
            state = if is_after_literal { 7 } else { 10 };
            count
        } else {
            let mut is_short = false;
            if coder.bit(IS_OLDER + state) == 0 {
                is_short = coder.bit(IS_LONG + state) == 0;
            } else {
                let which = match coder.bit(IS_SECOND_OLDER + state) {
                    0 => 1,
                    _ => 2 + coder.bit(IS_OLDEST + state),
                };
                distances[..=which].rotate_right(1);
            }
            state = match (is_short, is_after_literal) {
                (true, true) => 9,
                (false, true) => 8,
                (_, false) => 11,
            };
            if is_short {
                1
            } else {
                coder.length(REPEATED_LENGTH)
            }
        };
        // Byte by byte: a match may overlap what it makes.
        for _ in 0..count {
            out.push(out[out.len() - 1 - distances[0]]);
        }
    }
    out
}

/// Reads decisions, each of which takes as little as it was probable.
struct RangeDecoder<'a> {
    input: std::slice::Iter<'a, u8>,
    range: u32,
    code: u32,
    /// Of each decision that its bit is 0, in 2048ths.
    probabilities: Vec<u16>,
}

impl<'a> RangeDecoder<'a> {
    fn new(input: &'a [u8]) -> Self {
        let mut coder = Self {
            input: input.iter(),
            range: u32::MAX,
            code: 0,
            probabilities: vec![1024; PROBABILITIES],
        };
        // The first byte is always 0.
        for _ in 0..5 {
            coder.shift();
        }
        coder.range = u32::MAX;
        coder
    }

    fn shift(&mut self) {
        self.range <<= 8;
        self.code = self.code << 8 | u32::from(self.input.next().copied().unwrap_or(0));
    }

    /// A bit with the probability at `place`.
    fn bit(&mut self, place: usize) -> usize {
        let probability = &mut self.probabilities[place];
        let bound = (self.range >> 11) * u32::from(*probability);
        let bit = self.code >= bound;
        if bit {
            self.range -= bound;
            self.code -= bound;
            *probability -= *probability >> 5;
        } else {
            self.range = bound;
            *probability += (2048 - *probability) >> 5;
        }
        if self.range < 1 << 24 {
            self.shift();
        }
        usize::from(bit)
    }

    /// A number of `count` bits, the highest first, each with the probability that the bits before it choose.
    fn tree(&mut self, place: usize, count: u32) -> usize {
        let mut node = 1;
        while node >> count == 0 {
            node = node << 1 | self.bit(place + node);
        }
        node - (1 << count)
    }

    /// As [`RangeDecoder::tree`], the lowest bit first.
    fn reversed_tree(&mut self, place: usize, count: u32) -> usize {
        let number = self.tree(place, count);
        number.reverse_bits() >> (usize::BITS - count)
    }

    /// A number of `count` bits, each of which is as probably 0 as 1.
    fn even_bits(&mut self, count: u32) -> usize {
        let mut number = 0;
        for _ in 0..count {
            self.range >>= 1;
            let bit = self.code >= self.range;
            if bit {
                self.code -= self.range;
            }
            number = number << 1 | usize::from(bit);
            if self.range < 1 << 24 {
                self.shift();
            }
        }
        number
    }

    /// A byte after `last`. After a match, the byte that would have continued it is `expected`: as long as the bits are
    /// those of that one, it chooses the probabilities too.
    fn literal(&mut self, last: u8, expected: Option<u8>) -> u8 {
        let place = LITERAL + usize::from(last >> 5) * LITERAL_SIZE;
        let mut node = 1;
        if let Some(expected) = expected {
            for shift in (0..8).rev() {
                let hint = usize::from(expected >> shift & 1);
                let bit = self.bit(place + (1 + hint) * 256 + node);
                node = node << 1 | bit;
                if bit != hint {
                    break;
                }
            }
        }
        while node < 256 {
            node = node << 1 | self.bit(place + node);
        }
        node.to_le_bytes()[0]
    }

    /// The length of a match.
    fn length(&mut self, place: usize) -> usize {
        let tree = place + 2;
        let more = if self.bit(place) == 0 {
            self.tree(tree, 3)
        } else if self.bit(place + 1) == 0 {
            8 + self.tree(tree + 8, 3)
        } else {
            16 + self.tree(tree + 16, 8)
        };
        MIN_LENGTH + more
    }

    /// The distance of a match with this length, less one. Its slot is its two highest bits and how many follow.
    fn distance(&mut self, length: usize) -> usize {
        let set = (length - MIN_LENGTH).min(3);
        let slot = self.tree(DISTANCE_SLOT + set * 64, 6);
        if slot < 4 {
            return slot;
        }
        let count = u32::try_from(slot / 2 - 1).unwrap_or(0);
        let high = (2 | slot & 1) << count;
        if slot < 14 {
            return high + self.reversed_tree(DISTANCE + high - slot, count);
        }
        let middle = self.even_bits(count - 4) << 4;
        high + middle + self.reversed_tree(DISTANCE_END, 4)
    }
}
