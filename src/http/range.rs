//! The `Range` header of a request for a file (RFC 9110 section 14.2).

use super::parse::Head;

/// What a Range header asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Range {
    /// Nothing that this server understands: it sends the whole file (RFC 9110 section 14.2).
    None,
    /// This part, in bytes.
    Satisfiable {
        /// Of its first byte.
        offset: u64,
        /// How many.
        length: u64,
    },
    /// A part beyond the end of the file.
    Unsatisfiable,
}

/// The range in a request's header. Only GET has ranges. If-Range never matches, because files have
/// no version tags here (RFC 9110 sections 13.1.5, 14.2).
pub fn range_of(head: &Head, size: u64) -> Range {
    match head.header("range") {
        Some(header) if head.method == "GET" && head.header("if-range").is_none() => {
            byte_range(header, size)
        }
        _ => Range::None,
    }
}

/// The range in the value of a header, of a file of this size.
pub fn byte_range(header: &[u8], size: u64) -> Range {
    let parse = || -> Option<Range> {
        let set = std::str::from_utf8(header).ok()?.strip_prefix("bytes=")?;
        let (first, last) = set.trim().split_once('-')?;
        let number = |text: &str| -> Option<u64> {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            // A number beyond any file size means the end of the file.
            is_number.then(|| text.parse().unwrap_or(u64::MAX))
        };
        let (offset, end) = match (first, last) {
            ("", length) => (size.saturating_sub(number(length)?), size),
            (first, "") => (number(first)?, size),
            (first, last) => {
                let (first, last) = (number(first)?, number(last)?);
                if last < first {
                    return None;
                }
                (first, last.saturating_add(1).min(size))
            }
        };
        Some(if offset < end {
            let length = end - offset;
            Range::Satisfiable { offset, length }
        } else {
            Range::Unsatisfiable
        })
    };
    parse().unwrap_or(Range::None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_as_the_standard_has_them() {
        let part = |offset, length| Range::Satisfiable { offset, length };
        for (header, expected) in [
            ("bytes=0-0", part(0, 1)),
            ("bytes=2-5", part(2, 4)),
            ("bytes=2-", part(2, 8)),
            ("bytes=-3", part(7, 3)),
            ("bytes=-30", part(0, 10)),
            ("bytes=5-99999999999999999999999", part(5, 5)),
            ("bytes=9-9", part(9, 1)),
            ("bytes=10-", Range::Unsatisfiable),
            ("bytes=99999999999999999999-", Range::Unsatisfiable),
            ("bytes=-0", Range::Unsatisfiable),
            ("bytes=5-2", Range::None),
            ("bytes=0-1,3-4", Range::None),
            ("bytes=a-b", Range::None),
            ("bytes=-", Range::None),
            ("bytes=+1-2", Range::None),
            ("lines=1-2", Range::None),
            ("", Range::None),
        ] {
            assert_eq!(byte_range(header.as_bytes(), 10), expected, "{header}");
        }
        assert_eq!(byte_range(b"bytes=0-", 0), Range::Unsatisfiable);
    }
}
