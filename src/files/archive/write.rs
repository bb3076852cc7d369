//! Writes the headers of members: ustar where it suffices, and pax records for what does not fit.
//!
//! Pure. The same attributes give the same bytes.

use super::header::{BLOCK, Block, Time, seal};
use super::pax::ATTRIBUTE;
use crate::files::describe::Attribute;

/// The attributes of a member.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemberHeader<'a> {
    pub(super) path: &'a [u8],
    pub(super) link: &'a [u8],
    pub(super) typeflag: u8,
    pub(super) mode: u32,
    pub(super) uid: u64,
    pub(super) gid: u64,
    pub(super) size: u64,
    pub(super) modified: Time,
    /// Extended attributes.
    pub(super) attributes: &'a [Attribute],
}

/// Appends the headers of a member.
pub(super) fn append_member(out: &mut Vec<u8>, entry: &MemberHeader<'_>) {
    let mut records = Vec::new();
    let mut block = [0; BLOCK];
    let is_text = |text: &[u8]| std::str::from_utf8(text).is_ok();
    let split = split_name(entry.path);
    let fits = split.is_some() && entry.link.len() <= 100;
    let is_plain = is_text(entry.path) && is_text(entry.link);
    if !fits && !is_plain {
        append_record(&mut records, "hdrcharset", b"BINARY");
    }
    let (prefix, name) = split.unwrap_or_else(|| {
        append_record(&mut records, "path", entry.path);
        (b"", &entry.path[..entry.path.len().min(100)])
    });
    block[..name.len()].copy_from_slice(name);
    block[345..345 + prefix.len()].copy_from_slice(prefix);
    if entry.link.len() > 100 {
        append_record(&mut records, "linkpath", entry.link);
    }
    let link = &entry.link[..entry.link.len().min(100)];
    block[157..157 + link.len()].copy_from_slice(link);
    for (key, at, number) in [
        ("uid", 108..116, entry.uid),
        ("gid", 116..124, entry.gid),
        ("size", 124..136, entry.size),
    ] {
        if !put_number(&mut block[at], number) {
            append_record(&mut records, key, number.to_string().as_bytes());
        }
    }
    let Time {
        seconds,
        nanoseconds,
    } = entry.modified;
    let whole = u64::try_from(seconds);
    let is_whole = whole.is_ok_and(|whole| put_number(&mut block[136..148], whole));
    if !is_whole || nanoseconds != 0 {
        append_record(&mut records, "mtime", shown(entry.modified).as_bytes());
    }
    for Attribute { name, value } in entry.attributes {
        append_record(&mut records, &[ATTRIBUTE, name].concat(), value);
    }
    put_number(&mut block[100..108], entry.mode.into());
    if !records.is_empty() {
        append_extension(out, b'x', &records);
    }
    finish(out, block, entry.typeflag);
}

/// Appends the report on an archive, a global header.
pub(super) fn append_report(out: &mut Vec<u8>, report: &[u8]) {
    let mut records = Vec::new();
    append_record(&mut records, "SBX.report", report);
    append_extension(out, b'g', &records);
}

fn append_extension(out: &mut Vec<u8>, typeflag: u8, records: &[u8]) {
    let mut block = [0; BLOCK];
    block[..10].copy_from_slice(b"PaxHeaders");
    put_number(&mut block[100..108], 0o644);
    put_number(&mut block[108..116], 0);
    put_number(&mut block[116..124], 0);
    put_number(&mut block[124..136], records.len() as u64);
    put_number(&mut block[136..148], 0);
    finish(out, block, typeflag);
    out.extend_from_slice(records);
    out.resize(
        out.len() + records.len().next_multiple_of(BLOCK) - records.len(),
        0,
    );
}

fn finish(out: &mut Vec<u8>, mut block: Block, typeflag: u8) {
    block[156] = typeflag;
    block[257..265].copy_from_slice(b"ustar\x0000");
    seal(&mut block);
    out.extend_from_slice(&block);
}

/// Appends a record with its length, which counts its own digits.
fn append_record(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length.to_string().len() + rest != length {
        length = length.to_string().len() + rest;
    }
    out.extend_from_slice(format!("{length} {key}=").as_bytes());
    out.extend_from_slice(value);
    out.push(b'\n');
}

/// Writes octal digits and a NUL; false, and zero, if they do not fit.
fn put_number(field: &mut [u8], number: u64) -> bool {
    let digits = field.len() - 1;
    let text = format!("{number:0digits$o}");
    let fits = text.len() <= digits;
    if fits {
        field[..digits].copy_from_slice(text.as_bytes());
    } else {
        field[..digits].fill(b'0');
    }
    fits
}

/// Splits a path into the prefix and the name of a ustar header, if it fits.
fn split_name(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if path.len() <= 100 {
        return Some((b"", path));
    }
    // The name is not empty: a slash at the end belongs to it.
    let inner = &path[..path.len() - 1];
    let slashes = inner.iter().enumerate().filter(|(_, byte)| **byte == b'/');
    let mut cuts = slashes.map(|(slash, _)| (&path[..slash], &path[slash + 1..]));
    cuts.find(|(prefix, name)| !prefix.is_empty() && prefix.len() <= 155 && name.len() <= 100)
}

/// Seconds with a fraction.
fn shown(time: Time) -> String {
    let Time {
        seconds,
        nanoseconds,
    } = time;
    match (seconds, nanoseconds) {
        (seconds, 0) => seconds.to_string(),
        (0.., _) => format!("{seconds}.{nanoseconds:09}"),
        _ => {
            let (whole, rest) = ((seconds + 1).unsigned_abs(), 1_000_000_000 - nanoseconds);
            format!("-{whole}.{rest:09}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::archive::CountedInput;
    use crate::files::archive::members::Members;
    use crate::limits::ledger::{Budget, Item};

    #[test]
    fn headers_are_read_back_as_they_were_written() {
        let long = [b"d".repeat(120), b"f".repeat(140)].join(&b'/');
        let paths: [&[u8]; 6] = [
            b"a",
            b"\xff",
            b"dir/",
            &long,
            &[&b"p".repeat(155)[..], &b"n".repeat(100)].join(&b'/'),
            &[&b"\xff".repeat(101)[..], b"/"].concat(),
        ];
        let attributes = [Attribute {
            name: "user.a".to_owned(),
            value: b"\0\n=".to_vec(),
        }];
        for path in paths {
            for (seconds, nanoseconds) in [(0, 0), (1, 5), (-1, 0), (-2, 750_000_000), (1 << 40, 1)]
            {
                for (uid, link) in [(0, &b""[..]), (u64::from(u32::MAX), &b"\xfe".repeat(200))] {
                    let entry = MemberHeader {
                        path,
                        link,
                        typeflag: b'2',
                        mode: 0o7755,
                        uid,
                        gid: 7,
                        size: 0,
                        modified: Time {
                            seconds,
                            nanoseconds,
                        },
                        attributes: &attributes,
                    };
                    let mut out = Vec::new();
                    append_member(&mut out, &entry);
                    append_report(&mut out, b"{}");
                    out.resize(out.len() + 2 * BLOCK, 0);
                    let mut archive = CountedInput(&out[..], 0);
                    let charge = Budget::new(1 << 30)
                        .whole()
                        .charge(Item::Bodies, 0)
                        .unwrap();
                    let mut members = Members::new(&mut archive, true, charge).unwrap();
                    let member = members.next().unwrap().unwrap();
                    assert_eq!(member.name, path);
                    assert_eq!((member.link.as_slice(), member.mode), (link, 0o7755));
                    assert_eq!((member.uid, member.gid), (uid, 7));
                    assert_eq!(member.modified, entry.modified);
                    assert_eq!(member.attributes, attributes);
                    assert!(members.next().unwrap().is_none());
                }
            }
        }
    }
}
