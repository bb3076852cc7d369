//! Base64 (RFC 4648): section 4, with padding, for output that clients get byte for byte; and the reading
//! of short texts, also of section 5, for URLs and without padding.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Input bytes per block. A block is encoded into an array, so the result grows once per block.
const BLOCK_BYTES: usize = 3 * 1024;

/// Appends the encoding of `data`.
pub fn append(out: &mut Vec<u8>, data: &[u8]) {
    out.reserve(data.len().div_ceil(3) * 4);
    let mut encoded = [0; BLOCK_BYTES / 3 * 4];
    for block in data.chunks(BLOCK_BYTES) {
        let triples = block.chunks_exact(3);
        let rest = triples.remainder();
        let length = (block.len() - rest.len()) / 3 * 4;
        for (triple, quad) in triples.zip(encoded.chunks_exact_mut(4)) {
            if let ([first, second, third], Some(quad)) = (triple, quad.first_chunk_mut()) {
                *quad = digits([*first, *second, *third]);
            }
        }
        out.extend_from_slice(&encoded[..length]);
        // Only the last block has a rest.
        match *rest {
            [first] => {
                let [one, two, ..] = digits([first, 0, 0]);
                out.extend_from_slice(&[one, two, b'=', b'=']);
            }
            [first, second] => {
                let [one, two, three, _] = digits([first, second, 0]);
                out.extend_from_slice(&[one, two, three, b'=']);
            }
            _ => {}
        }
    }
}

/// Encodes three bytes as four digits.
fn digits([first, second, third]: [u8; 3]) -> [u8; 4] {
    let bits = u32::from_be_bytes([0, first, second, third]);
    let digit = |shift: u32| ALPHABET[(bits >> shift & 63) as usize];
    [digit(18), digit(12), digit(6), digit(0)]
}

/// Returns the encoding of `data`.
pub fn encode(data: &[u8]) -> String {
    let mut out = Vec::new();
    append(&mut out, data);
    String::from_utf8(out).unwrap_or_default()
}

/// Decodes a text with padding; `None` if it is none that [`encode`] writes.
pub fn decode(text: &[u8]) -> Option<Vec<u8>> {
    let unpadded = text.strip_suffix(b"==").or(text.strip_suffix(b"="));
    let is_whole = text.len().is_multiple_of(4);
    decode_digits(unpadded.unwrap_or(text).iter().copied()).filter(|_| is_whole)
}

/// Decodes a text in the alphabet for URLs, without padding.
pub fn decode_url(text: &[u8]) -> Option<Vec<u8>> {
    decode_digits(text.iter().map(|byte| match byte {
        b'-' => b'+',
        b'_' => b'/',
        // No digits of this alphabet.
        b'+' | b'/' => b'=',
        byte => *byte,
    }))
}

fn decode_digits(digits: impl Iterator<Item = u8>) -> Option<Vec<u8>> {
    let (mut out, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for digit in digits {
        bits = bits << 6 | u32::from(value_of(digit)?);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count & 0xff) as u8);
            bits &= (1 << count) - 1;
        }
    }
    // Bits that are left over are zero, and there are fewer than in a digit.
    (bits == 0 && count < 6).then_some(out)
}

/// The six bits of a digit.
fn value_of(digit: u8) -> Option<u8> {
    Some(match digit {
        b'A'..=b'Z' => digit - b'A',
        b'a'..=b'z' => digit - b'a' + 26,
        b'0'..=b'9' => digit - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_what_it_encodes_and_nothing_else() {
        for data in [
            &b""[..],
            b"f",
            b"fo",
            b"foo",
            b"foob",
            b"\xfb\xff\xfe",
            b"\xff\xff",
        ] {
            let text = encode(data);
            assert_eq!(decode(text.as_bytes()).as_deref(), Some(data));
            let url = text.replace('+', "-").replace('/', "_");
            let url = url.trim_end_matches('=');
            assert_eq!(decode_url(url.as_bytes()).as_deref(), Some(data));
        }
        for text in [
            "Z", "Zg", "Zg=", "Zg=a", "Z===", "====", "Zh==", "Zg==Zg==", "Zm9v=", "-_-_", "Zg =",
            "Zm9v\n",
        ] {
            assert_eq!(decode(text.as_bytes()), None, "{text}");
        }
        for text in ["Z", "Zg==", "Zh", "+//+", "Zm9v\n", "Zm9vY", "Zm9v "] {
            assert_eq!(decode_url(text.as_bytes()), None, "{text}");
        }
    }

    /// The vectors of RFC 4648 section 10.
    #[test]
    fn encodes_the_vectors_of_the_standard() {
        for (data, encoded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(encode(data.as_bytes()), encoded);
        }
        assert_eq!(encode(&[0xfb, 0xff, 0xfe]), "+//+");
    }

    /// The blocks leave no trace in the result.
    #[test]
    fn long_data_is_encoded_as_one() {
        let data: Vec<u8> = (0..100_000u32).map(|number| (number % 251) as u8).collect();
        for length in [3071, 3072, 3073, 6144, 6145, 99_998, 99_999, 100_000] {
            let in_pieces: String = data[..length].chunks(3).map(encode).collect();
            assert_eq!(encode(&data[..length]), in_pieces, "{length}");
        }
    }
}
