//! Base64 with padding (RFC 4648 section 4): the encoder for output that must be exact.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Appends the encoding of `data`.
pub(super) fn append(out: &mut Vec<u8>, data: &[u8]) {
    out.reserve(data.len().div_ceil(3) * 4);
    let digit = |bits: u32| ALPHABET[(bits & 63) as usize];
    let chunks = data.chunks_exact(3);
    let rest = chunks.remainder();
    for chunk in chunks {
        let bits = u32::from(chunk[0]) << 16 | u32::from(chunk[1]) << 8 | u32::from(chunk[2]);
        out.extend_from_slice(&[
            digit(bits >> 18),
            digit(bits >> 12),
            digit(bits >> 6),
            digit(bits),
        ]);
    }
    match *rest {
        [first] => {
            let bits = u32::from(first) << 16;
            out.extend_from_slice(&[digit(bits >> 18), digit(bits >> 12), b'=', b'=']);
        }
        [first, second] => {
            let bits = u32::from(first) << 16 | u32::from(second) << 8;
            out.extend_from_slice(&[digit(bits >> 18), digit(bits >> 12), digit(bits >> 6), b'=']);
        }
        _ => {}
    }
}

/// The encoding of `data`.
pub(super) fn encode(data: &[u8]) -> String {
    let mut out = Vec::new();
    append(&mut out, data);
    String::from_utf8(out).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
