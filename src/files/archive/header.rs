//! The header block of a tar member, as POSIX (ustar, pax), GNU tar and tar of Unix version 7 write it.
//!
//! A pure function of 512 bytes. What a header may not say is an error and never a guess: a size that
//! is negative or too large would make data look like headers.

/// Bytes of a header, and the unit of everything in an archive.
pub(super) const BLOCK: usize = 512;

pub(super) type Block = [u8; BLOCK];

/// Why an archive cannot be read.
pub(super) type Malformed = String;

/// Seconds since 1970, and nanoseconds of that second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Whole seconds, rounded down.
    pub seconds: i64,
    /// 0 to 999,999,999.
    pub nanoseconds: u32,
}

/// A header's fields, without what extensions say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) name: Vec<u8>,
    pub(super) link: Vec<u8>,
    pub(super) typeflag: u8,
    pub(super) mode: u32,
    pub(super) uid: u64,
    pub(super) gid: u64,
    /// Bytes of data that follow.
    pub(super) size: u64,
    pub(super) modified: i64,
    pub(super) dialect: Dialect,
}

/// Whose fields come after the link's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    Version7,
    Posix,
    Gnu,
}

impl Header {
    /// Reads a header; `None` for a block of zeros, which ends an archive.
    pub(super) fn parse(block: &Block) -> Result<Option<Self>, Malformed> {
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        check_sum(block)?;
        let dialect = match &block[257..265] {
            b"ustar  \0" => Dialect::Gnu,
            magic if magic.starts_with(b"ustar") => Dialect::Posix,
            _ => Dialect::Version7,
        };
        let mut name = text(&block[..100]).to_vec();
        // The prefix of star is shorter: times follow it.
        let prefix_end = if &block[508..] == b"tar\0" { 476 } else { 500 };
        let prefix = text(&block[345..prefix_end]);
        if dialect == Dialect::Posix && !prefix.is_empty() {
            name = [prefix, &name].join(&b'/');
        }
        Ok(Some(Self {
            name,
            link: text(&block[157..257]).to_vec(),
            typeflag: block[156],
            mode: u32::try_from(number(&block[100..108], "mode")? & 0o7777).unwrap_or(0),
            uid: whole(&block[108..116], "uid")?,
            gid: whole(&block[116..124], "gid")?,
            size: whole(&block[124..136], "size")?,
            modified: number(&block[136..148], "mtime")?,
            dialect,
        }))
    }
}

/// One block of the map of an old GNU sparse file: offset and length of each part that has data.
pub(super) fn sparse_parts(fields: &[u8]) -> Result<Vec<(u64, u64)>, Malformed> {
    fields
        .chunks_exact(24)
        .take_while(|part| part[0] != 0)
        .map(|part| {
            let offset = whole(&part[..12], "offset of a sparse part")?;
            Ok((offset, whole(&part[12..], "length of a sparse part")?))
        })
        .collect()
}

/// The bytes before the first NUL.
fn text(field: &[u8]) -> &[u8] {
    let end = field.iter().position(|byte| *byte == 0);
    &field[..end.unwrap_or(field.len())]
}

/// A number that is not negative.
pub(super) fn whole(field: &[u8], what: &str) -> Result<u64, Malformed> {
    u64::try_from(number(field, what)?).map_err(|_| format!("its {what} is negative"))
}

/// A number in octal digits; or in base 256, as GNU tar writes what does not fit (two's complement,
/// marked by the first bit).
fn number(field: &[u8], what: &str) -> Result<i64, Malformed> {
    if field[0] & 0x80 != 0 {
        // The bit after the mark is the sign.
        let first = i128::from(field[0] & 0x7f) - if field[0] & 0x40 == 0 { 0 } else { 0x80 };
        let value = field[1..]
            .iter()
            .fold(first, |value, byte| value << 8 | i128::from(*byte));
        return i64::try_from(value).map_err(|_| format!("its {what} is too large"));
    }
    let digits = text(field).trim_ascii();
    digits.iter().try_fold(0_i64, |value, digit| match digit {
        b'0'..=b'7' => Ok(value << 3 | i64::from(digit - b'0')),
        _ => Err(format!("its {what} is not a number")),
    })
}

/// Compares the checksum: the sum of all bytes, with the sum itself as blanks. Some old programs
/// add the bytes as signed.
fn check_sum(block: &Block) -> Result<(), Malformed> {
    let expected = number(&block[148..156], "checksum")?;
    let (unsigned, signed) = sums(block);
    if expected == unsigned || expected == signed {
        Ok(())
    } else {
        Err("the checksum of a header is wrong".to_owned())
    }
}

/// Completes a header with its checksum.
pub(super) fn seal(block: &mut Block) {
    let sum = format!("{:06o}\0 ", sums(block).0);
    block[148..156].copy_from_slice(sum.as_bytes());
}

fn sums(block: &Block) -> (i64, i64) {
    let mut blanked = *block;
    blanked[148..156].fill(b' ');
    blanked.iter().fold((0, 0), |(unsigned, signed), byte| {
        let as_signed = i64::from(byte.cast_signed());
        (unsigned + i64::from(*byte), signed + as_signed)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_octal_and_base_256() {
        for (field, expected) in [
            (&b"0000644\0"[..], Ok(0o644)),
            (b"    644 ", Ok(0o644)),
            (b"        ", Ok(0)),
            (b"\0\0\0\0\0\0\0\0", Ok(0)),
            (b"77777777", Ok(0o77_777_777)),
            (b"\x80\0\0\0\0\0\x01\x02", Ok(0x102)),
            (b"\xff\xff\xff\xff\xff\xff\xff\xfe", Ok(-2)),
            (b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff", Ok(i64::MAX)),
            (b"\x80\0\0\0\x80\0\0\0\0\0\0\0", Err("too large")),
            (
                b"\xbf\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
                Err("too large"),
            ),
            (b"0000648\0", Err("not a number")),
            (b"-000644\0", Err("not a number")),
            (b"0x12    ", Err("not a number")),
        ] {
            let found = number(field, "size");
            match expected {
                Ok(expected) => assert_eq!(found, Ok(expected), "{field:x?}"),
                Err(why) => assert!(found.unwrap_err().contains(why), "{field:x?}"),
            }
        }
        assert!(whole(b"\xff\xff\xff\xff\xff\xff\xff\xfe", "size").is_err());
    }

    #[test]
    fn a_header_is_read_only_with_its_checksum() {
        let mut block = [0; BLOCK];
        assert_eq!(Header::parse(&block), Ok(None));
        block[..4].copy_from_slice(b"name");
        block[257..265].copy_from_slice(b"ustar\x0000");
        block[345..351].copy_from_slice(b"prefix");
        block[0] = 0xff;
        seal(&mut block);
        let header = Header::parse(&block).unwrap().unwrap();
        assert_eq!(header.name, b"prefix/\xffame");
        let signed = format!("{:06o}\0 ", sums(&block).1);
        block[148..156].copy_from_slice(signed.as_bytes());
        assert!(Header::parse(&block).is_ok());
        for at in [0, 99, 130, 156, 300, 511] {
            let mut broken = block;
            broken[at] ^= 1;
            assert!(Header::parse(&broken).is_err(), "byte {at}");
        }
    }
}
