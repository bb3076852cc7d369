//! The query of a request, decoded and read into types.
//!
//! Form-encoded, as clients send it: `+` is a space, `%XX` a byte. Values are bytes until something
//! is made of them, because a path may be any bytes.

use crate::error::{Error, Result};

/// The parameters of a request.
pub(super) struct Query(Vec<(Vec<u8>, Vec<u8>)>);

impl Query {
    /// Decodes a raw query.
    ///
    /// # Errors
    /// A percent sign that begins no escape.
    pub(super) fn parse(raw: Option<&[u8]>) -> Result<Self> {
        let pairs = raw
            .unwrap_or_default()
            .split(|byte| *byte == b'&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| {
                let mut halves = pair.splitn(2, |byte| *byte == b'=');
                let name = decode(halves.next().unwrap_or_default())?;
                Ok((name, decode(halves.next().unwrap_or_default())?))
            })
            .collect::<Result<_>>()?;
        Ok(Self(pairs))
    }

    /// A parameter's value, if it is there.
    ///
    /// # Errors
    /// It is there more than once.
    pub(super) fn value(&self, name: &str) -> Result<Option<&[u8]>> {
        let mut values = self
            .0
            .iter()
            .filter(|(key, _)| key == name.as_bytes())
            .map(|(_, value)| value.as_slice());
        let value = values.next();
        if values.next().is_some() {
            return Err(Error::invalid(format!(
                "the parameter {name} is given more than once"
            )));
        }
        Ok(value)
    }

    fn parsed<T>(
        &self,
        name: &str,
        accepted: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.value(name)? else {
            return Ok(None);
        };
        let text = String::from_utf8_lossy(value);
        parse(&text).map(Some).ok_or_else(|| {
            Error::invalid(format!("{name}={text}: not accepted; it takes {accepted}"))
        })
    }

    /// A whole number, as large as a file can be at most.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn number(&self, name: &str) -> Result<Option<u64>> {
        let plain = |text: &str| {
            let number: i64 = text
                .bytes()
                .all(|byte| byte.is_ascii_digit())
                .then(|| text.parse().ok())??;
            u64::try_from(number).ok()
        };
        self.parsed(name, "a whole number from 0 to 9223372036854775807", plain)
    }

    /// A yes or no; no if it is absent.
    ///
    /// # Errors
    /// It is neither.
    pub(super) fn flag(&self, name: &str) -> Result<bool> {
        Ok(self.optional_flag(name)?.unwrap_or(false))
    }

    /// A yes or no.
    ///
    /// # Errors
    /// It is neither.
    pub(super) fn optional_flag(&self, name: &str) -> Result<Option<bool>> {
        self.parsed(name, "1, true, 0 or false", |text| match text {
            "1" | "true" => Some(true),
            "0" | "false" => Some(false),
            _ => None,
        })
    }

    /// Permission bits in octal.
    ///
    /// # Errors
    /// They are not octal, or more than `7777`.
    pub(super) fn mode(&self, name: &str) -> Result<Option<u32>> {
        self.parsed(
            name,
            "octal permission bits such as 644, at most 7777",
            |text| {
                if text.starts_with('+') {
                    return None;
                }
                u32::from_str_radix(text, 8)
                    .ok()
                    .filter(|mode| *mode <= 0o7777)
            },
        )
    }

    /// One of some words.
    ///
    /// # Errors
    /// It is none of them.
    pub(super) fn choice<T: Copy>(&self, name: &str, choices: &[(&str, T)]) -> Result<Option<T>> {
        let accepted = choices
            .iter()
            .map(|(word, _)| *word)
            .collect::<Vec<_>>()
            .join(" or ");
        self.parsed(name, &accepted, |text| {
            choices
                .iter()
                .find(|(word, _)| *word == text)
                .map(|(_, choice)| *choice)
        })
    }

    /// A time in seconds, which may have a fraction.
    ///
    /// # Errors
    /// It is negative or no number.
    pub(super) fn seconds(&self, name: &str) -> Result<Option<std::time::Duration>> {
        self.parsed(name, "seconds, 0 or more", |text| {
            if !text.starts_with(|first: char| first.is_ascii_digit()) {
                return None;
            }
            std::time::Duration::try_from_secs_f64(text.parse().ok()?).ok()
        })
    }
}

fn decode(raw: &[u8]) -> Result<Vec<u8>> {
    let mut decoded = Vec::with_capacity(raw.len());
    let mut rest = raw;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        decoded.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digits = after
                    .get(..2)
                    .filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
                let byte = digits
                    .and_then(|digits| std::str::from_utf8(digits).ok())
                    .and_then(|digits| u8::from_str_radix(digits, 16).ok());
                let Some(byte) = byte else {
                    return Err(Error::invalid(
                        "the query has a % that is not followed by two hexadecimal digits",
                    ));
                };
                rest = &after[2..];
                byte
            }
            byte => *byte,
        });
    }
    Ok(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(raw: &str) -> Query {
        Query::parse(Some(raw.as_bytes())).unwrap()
    }

    #[test]
    fn decodes_forms() {
        let query = query("path=%2Fa+b%2B%C3%A9%26%3F%23%25.txt&x=&y&z=%ff");
        assert_eq!(
            query.value("path").unwrap().unwrap(),
            "/a b+é&?#%.txt".as_bytes()
        );
        assert_eq!(query.value("x").unwrap(), Some(&b""[..]));
        assert_eq!(query.value("y").unwrap(), Some(&b""[..]));
        assert_eq!(query.value("z").unwrap(), Some(&b"\xff"[..]));
        assert_eq!(query.value("w").unwrap(), None);
    }

    #[test]
    fn refuses_broken_escapes_and_repetition() {
        for raw in ["a=%", "a=%1", "a=%zz", "%g0=1"] {
            assert!(Query::parse(Some(raw.as_bytes())).is_err(), "{raw}");
        }
        assert!(query("a=1&a=1").value("a").is_err());
    }

    #[test]
    fn refuses_numbers_that_are_none() {
        for raw in [
            "n=",
            "n=-1",
            "n=+1",
            "n=%2B1",
            "n=1.5",
            "n=0x1",
            "n=9223372036854775808",
            "n=1%20",
        ] {
            assert!(query(raw).number("n").is_err(), "{raw}");
        }
        assert_eq!(
            query("n=9223372036854775807").number("n").unwrap(),
            Some(i64::MAX.cast_unsigned())
        );
        for raw in ["m=", "m=8", "m=10000", "m=-1", "m=%2B7", "m=rwx"] {
            assert!(query(raw).mode("m").is_err(), "{raw}");
        }
        assert_eq!(query("m=0600").mode("m").unwrap(), Some(0o600));
        for raw in ["s=", "s=-1", "s=nan", "s=inf", "s=1e400", "s=.5x"] {
            assert!(query(raw).seconds("s").is_err(), "{raw}");
        }
    }
}
