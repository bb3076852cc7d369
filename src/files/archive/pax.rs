//! Pax extended headers (POSIX.1-2017, pax): records of what does not fit into a header block.

use super::header::{Malformed, Time};
use crate::files::describe::Attribute;

/// What extended headers say about a member. Unknown records are ignored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Records {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) modified: Option<Time>,
    /// Extended attributes that [are kept](is_kept), by their names.
    pub(super) attributes: Vec<Attribute>,
    pub(super) sparse: Sparse,
}

/// What GNU tar adds for sparse files, in the formats 0.0, 0.1 and 1.0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Sparse {
    /// 1.0: the map is at the beginning of the data.
    pub(super) map_in_data: bool,
    pub(super) name: Option<Vec<u8>>,
    /// The size with the holes.
    pub(super) size: Option<u64>,
    /// 0.0 and 0.1: offsets and lengths, in turn.
    pub(super) map: Vec<u64>,
}

/// How the keys of extended attributes begin.
pub(super) const ATTRIBUTE: &str = "SCHILY.xattr.";

/// Most extended attributes of a member.
const MAX_ATTRIBUTES: usize = 1024;

/// Whether an extended attribute goes with its file. Others belong to the machine that the file is on: to its overlays
/// (`trusted.`, `user.overlay.`), or to a policy of its own.
pub(super) fn is_kept(name: &str) -> bool {
    let is_own = name.starts_with("user.") && !name.starts_with("user.overlay.");
    is_own || name == "security.capability"
}

/// Most numbers of such a map.
const MAX_MAP: usize = 1 << 17;

impl Records {
    /// Adds the records of an extended header: `LENGTH KEY=VALUE\n`, where the length counts all of it. Those of extended
    /// attributes only if it `has_attributes`.
    pub(super) fn read(&mut self, mut data: &[u8], has_attributes: bool) -> Result<(), Malformed> {
        while !data.is_empty() {
            let broken = || "a pax record is broken".to_owned();
            let blank = data.iter().take(20).position(|byte| *byte == b' ');
            let blank = blank.ok_or_else(broken)?;
            let length = decimal(&data[..blank]).and_then(|length| usize::try_from(length).ok());
            let length = length.filter(|length| (blank + 1..=data.len()).contains(length));
            let (record, rest) = data.split_at(length.ok_or_else(broken)?);
            let record = record[blank + 1..].strip_suffix(b"\n").ok_or_else(broken)?;
            let equals = record.iter().position(|byte| *byte == b'=');
            let (key, value) = record.split_at(equals.filter(|at| *at > 0).ok_or_else(broken)?);
            if has_attributes || !key.starts_with(ATTRIBUTE.as_bytes()) {
                self.set(key, &value[1..])?;
            }
            data = rest;
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), Malformed> {
        let wrong = || {
            let key = String::from_utf8_lossy(key);
            format!("its pax record {key} has no such value")
        };
        // An empty value takes back what an earlier record said.
        let text = || (!value.is_empty()).then(|| value.to_vec());
        let number = || match value {
            b"" => Ok(None),
            value => decimal(value).map(Some).ok_or_else(wrong),
        };
        match key {
            b"path" => self.path = text(),
            b"linkpath" => self.link = text(),
            b"size" => self.size = number()?,
            b"uid" => self.uid = number()?,
            b"gid" => self.gid = number()?,
            b"mtime" => {
                self.modified = match value {
                    b"" => None,
                    value => Some(time(value).ok_or_else(wrong)?),
                }
            }
            b"GNU.sparse.major" => {
                self.sparse.map_in_data = number()?.is_some_and(|major| major > 0);
            }
            b"GNU.sparse.name" => self.sparse.name = text(),
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => self.sparse.size = number()?,
            b"GNU.sparse.map" => {
                let numbers = value.split(|byte| *byte == b',').map(decimal);
                let numbers = numbers.take(MAX_MAP).collect::<Option<_>>();
                self.sparse.map = numbers.ok_or_else(wrong)?;
            }
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => {
                let is_length = self.sparse.map.len() % 2 == 1;
                let is_next = key.ends_with(b"numbytes") == is_length;
                let is_next = is_next && self.sparse.map.len() < MAX_MAP;
                let number = decimal(value).filter(|_| is_next);
                self.sparse.map.push(number.ok_or_else(wrong)?);
            }
            key => {
                if let Ok(key) = std::str::from_utf8(key)
                    && let Some(name) = key.strip_prefix(ATTRIBUTE)
                    && is_kept(name)
                {
                    self.set_attribute(name, value)?;
                }
            }
        }
        Ok(())
    }

    fn set_attribute(&mut self, name: &str, value: &[u8]) -> Result<(), Malformed> {
        // By search in order: a header has room for tens of thousands of records, all of which may repeat names.
        let known = &mut self.attributes;
        let place = known.binary_search_by(|own| own.name.as_str().cmp(name));
        match place {
            Ok(at) => known[at].value = value.to_vec(),
            Err(_) if known.len() == MAX_ATTRIBUTES => {
                return Err("it has too many extended attributes".to_owned());
            }
            Err(at) => {
                let (name, value) = (name.to_owned(), value.to_vec());
                known.insert(at, Attribute { name, value });
            }
        }
        Ok(())
    }
}

/// A number of decimal digits.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    let digits = std::str::from_utf8(text).ok()?;
    let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_plain)
}

/// Seconds, with a sign and a fraction if there are any. What is finer than a nanosecond is cut.
fn time(text: &[u8]) -> Option<Time> {
    let (is_negative, text) = match text.strip_prefix(b"-") {
        Some(text) => (true, text),
        None => (false, text),
    };
    let mut halves = text.splitn(2, |byte| *byte == b'.');
    let whole = i64::try_from(decimal(halves.next()?)?).ok()?;
    let fraction = halves.next().unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let digits = fraction.iter().copied().chain(std::iter::repeat(b'0'));
    let nanoseconds = digits
        .take(9)
        .fold(0, |value, digit| value * 10 + u32::from(digit - b'0'));
    Some(match (is_negative, nanoseconds) {
        (false, _) => Time {
            seconds: whole,
            nanoseconds,
        },
        (true, 0) => Time {
            seconds: -whole,
            nanoseconds,
        },
        (true, _) => Time {
            seconds: -whole - 1,
            nanoseconds: 1_000_000_000 - nanoseconds,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(data: &[u8]) -> Result<Records, Malformed> {
        let mut records = Records::default();
        records.read(data, true).map(|()| records)
    }

    /// A record with its length, which counts its own digits.
    fn record(key: &str, value: &[u8]) -> Vec<u8> {
        let rest = [b" ", key.as_bytes(), b"=", value, b"\n"].concat();
        let length = (1..10_000)
            .find(|length: &usize| length.to_string().len() + rest.len() == *length)
            .unwrap();
        [length.to_string().as_bytes(), &rest].concat()
    }

    #[test]
    fn records_are_read_and_unknown_ones_ignored() {
        let data = [
            record("path", b"a=b"),
            record("linkpath", b"\xff\nnew"),
            record("SCHILY.xattr.user.a", b"before"),
            record("SCHILY.xattr.user.a", b"\0\n9 x"),
            record("SCHILY.xattr.security.capability", b"\x01"),
            record("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            record("SCHILY.xattr.user.overlay.opaque", b"y"),
            record("SCHILY.xattr.security.selinux", b"x"),
            record("SCHILY.xattr.user.\u{ff}", b""),
            record("mtime", b"1700000000.5"),
            record("size", b"7"),
            record("uid", b"1"),
            record("uid", b""),
            record("GNU.sparse.offset", b"0"),
            record("GNU.sparse.numbytes", b"5"),
        ];
        let records = read(&data.concat()).unwrap();
        assert_eq!(records.path.as_deref(), Some(&b"a=b"[..]));
        assert_eq!(records.link.as_deref(), Some(&b"\xff\nnew"[..]));
        assert_eq!((records.size, records.uid), (Some(7), None));
        assert_eq!(records.modified.unwrap().nanoseconds, 500_000_000);
        assert_eq!(records.sparse.map, [0, 5]);
        let attribute = |name: &str, value: &[u8]| Attribute {
            name: name.to_owned(),
            value: value.to_vec(),
        };
        let kept = [
            attribute("security.capability", b"\x01"),
            attribute("user.a", b"\0\n9 x"),
            attribute("user.\u{ff}", b""),
        ];
        assert_eq!(records.attributes, kept);
    }

    #[test]
    fn attributes_are_bounded_and_repeated_ones_replaced() {
        let key = |name: usize| format!("{ATTRIBUTE}user.{name}");
        let mut data = Vec::new();
        // The highest first: each goes before the others.
        for name in (0..MAX_ATTRIBUTES).rev().chain(0..MAX_ATTRIBUTES) {
            data.extend(record(&key(name), name.to_string().as_bytes()));
        }
        let records = read(&data).unwrap();
        assert_eq!(records.attributes.len(), MAX_ATTRIBUTES);
        for Attribute { name, value } in &records.attributes {
            assert_eq!(name.as_bytes(), [b"user.", &value[..]].concat());
        }
        data.extend(record(&key(MAX_ATTRIBUTES), b""));
        read(&data).unwrap_err();
        // Who keeps none bounds none.
        let mut records = Records::default();
        records.read(&data, false).unwrap();
        assert_eq!(records, Records::default());
    }

    #[test]
    fn broken_records_are_refused() {
        for data in [
            &b"x"[..],
            b"6 a=b",
            b"5 a=b\n",
            b"7 a=b\n",
            b"6 ab=\n\n",
            b"0 a=b\n",
            b"6 =ab\n",
            b"5 abc\n",
            b"99999999999999999999 a=b\n",
            b"10 size=x\n",
            b"11 size=-1\n",
            b"24 GNU.sparse.numbytes=1\n",
        ] {
            assert!(read(data).is_err(), "{}", data.escape_ascii());
        }
    }

    #[test]
    fn times_with_fractions() {
        for (text, expected) in [
            ("0", Some((0, 0))),
            ("1.5", Some((1, 500_000_000))),
            ("1.", Some((1, 0))),
            ("1.1234567899", Some((1, 123_456_789))),
            ("-1", Some((-1, 0))),
            ("-1.25", Some((-2, 750_000_000))),
            ("", None),
            ("-", None),
            ("1.x", None),
            ("+1", None),
            ("99999999999999999999", None),
        ] {
            let found = time(text.as_bytes()).map(|time| (time.seconds, time.nanoseconds));
            assert_eq!(found, expected, "{text}");
        }
    }
}
