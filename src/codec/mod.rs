//! Small encodings that the doors share: JSON fields, form-encoded queries, JSON text, Base64,
//! terminal output as plain text,
//! times, gzip, documents that the program carries; and sorting.
//!
//! Pure functions of bytes. Nothing here knows a route, a status or a mechanism.

pub mod carried;
pub mod fields;
pub mod gzip;
pub mod near;
pub mod object;
pub mod plain;
pub mod queries;
pub mod query;
pub mod sort;
pub mod table;
pub mod time;

use std::borrow::Cow;
use std::ops::Range;
use std::time::Duration;

use memchr::memchr2;

pub use sbx_bulk::{base64, escape};

/// A decimal number of seconds, with or without a fraction and an exponent: what JSON and Rust write.
/// What a nanosecond does not divide is rounded down, but no further than to one. `None` if it is no such
/// number, or too large.
fn seconds(text: &str) -> Option<Duration> {
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = [whole, fraction].concat();
    if whole.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let point = i64::try_from(whole.len()).ok()? + i64::from(exponent.parse::<i32>().ok()?);
    let decimal = |places: Range<i64>| {
        places.into_iter().try_fold(0_u64, |number, place| {
            let digit = usize::try_from(place)
                .ok()
                .and_then(|place| digits.as_bytes().get(place));
            let digit = digit.map_or(0, |byte| u64::from(byte - b'0'));
            number.checked_mul(10)?.checked_add(digit)
        })
    };
    // More places can only be zeros, or too many.
    let most = i64::try_from(digits.len()).ok()? + 20;
    let seconds = decimal(0..point.min(most)).filter(|seconds| *seconds < u64::MAX)?;
    let nanoseconds = decimal(point..point + 9)?;
    let least = u64::from(digits.bytes().any(|byte| byte != b'0'));
    Some(Duration::from_secs(seconds) + Duration::from_nanos(nanoseconds))
        .map(|duration| duration.max(Duration::from_nanos(least)))
}

/// The value of a word in a list of choices.
fn choose<T: Copy>(choices: &[(&str, T)], word: &str) -> Option<T> {
    let mut choices = choices.iter();
    choices
        .find(|(name, _)| *name == word)
        .map(|(_, value)| *value)
}

/// The words of a list of choices, for an error text.
fn accepted_words<T>(choices: &[(&str, T)]) -> String {
    let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
    words.join(" or ")
}

/// Most bytes of a text in JSON, without its quotes.
pub fn most_json_bytes(text: &str) -> usize {
    // Control characters take six at most, all others twice what they take in the text.
    let controls = text.bytes().filter(|byte| *byte < b' ').count();
    2 * text.len() + 4 * controls
}

/// What a value takes while JSON is parsed, besides its text: its place in a map that grows, and its name.
const VALUE_BYTES: usize = 128;

/// Bytes that the values of some JSON take while it is parsed, besides their texts.
pub fn parsed_bytes(json: &[u8]) -> usize {
    let (mut rest, mut commas, mut is_text) = (json, 0_usize, false);
    // A comma in a text parts no values.
    while let Some(at) = memchr2(b'"', if is_text { b'\\' } else { b',' }, rest) {
        let byte = rest[at];
        is_text ^= byte == b'"';
        commas += usize::from(byte == b',');
        let escape = usize::from(byte == b'\\');
        rest = rest.get(at + 1 + escape..).unwrap_or_default();
    }
    commas * VALUE_BYTES
}

/// Stands for what was cut off a text.
const CUT: &str = "\u{2026}";

/// A text, or its beginning of at most so many bytes, and a mark.
pub fn shortened(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return text.into();
    }
    let end = most - cut_character(&text.as_bytes()[..most]);
    [&text[..end], CUT].concat().into()
}

/// How many bytes at the end are the first bytes of an incomplete character.
pub fn cut_character(data: &[u8]) -> usize {
    (1..=data.len().min(3))
        .find(|length| data[data.len() - length] >= 0xc0)
        .filter(|length| {
            let end = std::str::from_utf8(&data[data.len() - length..]);
            end.is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_characters() {
        for (most, expected) in [
            (0, "\u{2026}"),
            (1, "a\u{2026}"),
            (2, "a\u{2026}"),
            (3, "a\u{e9}\u{2026}"),
            (6, "a\u{e9}\u{2026}"),
            (7, "a\u{e9}\u{1f600}"),
            (9, "a\u{e9}\u{1f600}"),
        ] {
            assert_eq!(shortened("a\u{e9}\u{1f600}", most), expected, "{most}");
        }
    }

    #[test]
    fn a_text_is_no_longer_in_json_than_was_said() {
        for character in ('\0'..='\u{2ff}').chain(['\u{2028}', '\u{1f600}']) {
            let text = character.to_string().repeat(9);
            let json = serde_json::to_string(&text).unwrap();
            assert!(json.len() - 2 <= most_json_bytes(&text), "{json}");
        }
    }

    #[test]
    fn values_are_counted_outside_of_texts() {
        for (json, count) in [
            (r#"{"a":1,"b":[2,3],"c":{"d":4,"e":5}}"#, 4),
            (r#"["a,b","c\",d","\\",","]"#, 3),
            (r#"["no end,,,"#, 0),
            (r#"["no end\"#, 0),
            (r#"["no end\""#, 0),
            ("", 0),
            (",,,", 3),
        ] {
            assert_eq!(parsed_bytes(json.as_bytes()), count * VALUE_BYTES, "{json}");
        }
    }

    #[test]
    fn seconds_are_what_their_digits_say() {
        let nanoseconds = |text| seconds(text).map(|duration| duration.as_nanos());
        for (text, expected) in [
            ("0", 0),
            ("0.0", 0),
            ("1", 1_000_000_000),
            ("007", 7_000_000_000),
            ("0.3", 300_000_000),
            ("1.000000001", 1_000_000_001),
            ("1.0000000019", 1_000_000_001),
            ("2.", 2_000_000_000),
            ("15e-1", 1_500_000_000),
            ("1.5E+3", 1_500_000_000_000),
            ("0.0025e2", 250_000_000),
            ("5e-324", 1),
            ("1e-2000000000", 1),
            ("0e2000000000", 0),
            (
                "18446744073709551614.999999999",
                18_446_744_073_709_551_614_999_999_999,
            ),
        ] {
            assert_eq!(nanoseconds(text), Some(expected), "{text}");
        }
        for text in [
            "",
            ".",
            ".5",
            "-1",
            "+1",
            "-0",
            "e1",
            "1e",
            "1e1.5",
            "1 ",
            " 1",
            "1_0",
            "0x10",
            "inf",
            "nan",
            "1.2.3",
            "1e99999999999",
            "1e2000000000",
            "18446744073709551615",
            "2e19",
            "１",
        ] {
            assert_eq!(nanoseconds(text), None, "{text}");
        }
    }

    #[test]
    fn a_cut_character_is_recognised() {
        for (data, cut) in [
            (&b""[..], 0),
            (b"a", 0),
            (b"\xc3", 1),
            (b"a\xe2\x98", 2),
            (b"\xf0\x9f\x98", 3),
            (b"\xf0\x9f\x98\x80", 0),
            (b"\x98\x98\x98", 0),
            (b"\xff", 0),
            (b"\xe0\x80", 0),
            (b"\xed\xa0", 0),
        ] {
            assert_eq!(cut_character(data), cut, "{data:x?}");
        }
    }
}
