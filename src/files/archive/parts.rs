//! Which names a member may have.
//!
//! Pure: it sees a name, never a file. A name that passes leads below the directory that the archive is
//! unpacked in as long as no link is followed, which [`unpack`](super::unpack) sees to.

/// Longest name of a member, in bytes.
const MAX_NAME_BYTES: usize = 4096;

/// Longest part of a name (`NAME_MAX`).
const MAX_PART_BYTES: usize = 255;

/// Most parts of a name.
const MAX_LEVELS: usize = 256;

/// The parts of a member's name without the first `strip`; `None` if it has fewer. A `.` is no part.
pub(super) fn parts(
    name: &[u8],
    strip: usize,
) -> std::result::Result<Option<Vec<&[u8]>>, &'static str> {
    if name.is_empty() {
        return Err("its name is empty");
    }
    if name.starts_with(b"/") {
        return Err("its name is absolute");
    }
    if name.contains(&0) {
        return Err("its name has a NUL");
    }
    if name.len() > MAX_NAME_BYTES {
        return Err("its name has more than 4096 bytes");
    }
    let parts: Vec<_> = name
        .split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
        .collect();
    if parts.contains(&&b".."[..]) {
        return Err("its name has a ..");
    }
    if parts.iter().any(|part| part.len() > MAX_PART_BYTES) {
        return Err("its name has a part of more than 255 bytes");
    }
    if parts.len() > MAX_LEVELS {
        return Err("its name has more than 256 levels");
    }
    let is_short = parts.len() < strip || (strip > 0 && parts.len() == strip);
    Ok((!is_short).then(|| parts[strip..].to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_parts_that_lead_nowhere_else() {
        let long = "a".repeat(256);
        let deep = "a/".repeat(257);
        let far = "abc/".repeat(1025);
        for name in [
            "", "/", "/a", "..", "a/..", "a/../b", "../a", "a\0b", &long, &deep, &far,
        ] {
            assert!(parts(name.as_bytes(), 0).is_err(), "{name}");
        }
        for (name, strip, expected) in [
            (".", 0, Some("")),
            ("./", 0, Some("")),
            ("./a//b/./", 0, Some("a/b")),
            ("...", 0, Some("...")),
            ("..a/b..", 0, Some("..a/b..")),
            ("a/b", 1, Some("b")),
            ("./a/b", 1, Some("b")),
            ("a", 1, None),
            ("./", 1, None),
            ("a/b", 3, None),
        ] {
            let found = parts(name.as_bytes(), strip).unwrap();
            let found = found.map(|parts| String::from_utf8(parts.join(&b'/')).unwrap());
            assert_eq!(found.as_deref(), expected, "{name}");
        }
    }
}
