//! The query of a request, decoded and parsed into types.
//!
//! It is form-encoded: `+` is a space, `%XX` a byte. Values stay bytes until they are parsed, because
//! a path may hold any bytes.

use std::time::Duration;

use super::{accepted_words, choose};
use crate::error::{Error, Result};

/// The parameters of a request.
pub struct Query(Vec<(Vec<u8>, Vec<u8>)>);

impl Query {
    /// Decodes a raw query.
    ///
    /// # Errors
    /// `Invalid` if a percent sign is not followed by two hexadecimal digits.
    pub fn parse(raw: Option<&[u8]>) -> Result<Self> {
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

    /// The value of a parameter; `None` if it is absent.
    ///
    /// # Errors
    /// `Invalid` if it is given more than once.
    pub fn value(&self, name: &str) -> Result<Option<&[u8]>> {
        let mut pairs = self.0.iter().filter(|(key, _)| key == name.as_bytes());
        let value = pairs.next().map(|(_, value)| value.as_slice());
        if pairs.next().is_some() {
            return Err(Error::invalid(format_args!(
                "the parameter {name} is given more than once"
            )));
        }
        Ok(value)
    }

    /// A text; what is no UTF-8 in it becomes U+FFFD.
    ///
    /// # Errors
    /// `Invalid` if it is given more than once.
    pub fn text(&self, name: &str) -> Result<Option<String>> {
        let value = self.value(name)?;
        Ok(value.map(|value| String::from_utf8_lossy(value).into_owned()))
    }

    /// All values of a parameter that may be repeated, in their order.
    pub fn values<'q>(&'q self, name: &'q str) -> impl Iterator<Item = &'q [u8]> {
        let pairs = self.0.iter().filter(move |(key, _)| key == name.as_bytes());
        pairs.map(|(_, value)| value.as_slice())
    }

    /// All names and values, in their order.
    pub fn pairs(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.0
            .iter()
            .map(|(name, value)| (name.as_slice(), value.as_slice()))
    }

    /// Checks that every parameter is one of `known`, which `route` takes.
    ///
    /// # Errors
    /// `Invalid`, with the first unknown parameter and the known ones.
    pub fn check_names(&self, known: &[&str], route: &str) -> Result<()> {
        let is_known = |name: &[u8]| known.iter().any(|known| known.as_bytes() == name);
        let Some((name, _)) = self.0.iter().find(|(name, _)| !is_known(name)) else {
            return Ok(());
        };
        let name = String::from_utf8_lossy(name);
        let known = match known {
            [] => "no parameters".to_owned(),
            known => known.join(", "),
        };
        Err(Error::invalid(format_args!(
            "the parameter {name} is not known here; {route} takes {known}"
        )))
    }

    /// What `parse` makes of a parameter.
    ///
    /// # Errors
    /// `Invalid`, with what is `accepted`, if it makes nothing of it.
    pub fn parsed<T>(
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
            Error::invalid(format_args!(
                "{name}={text}: not accepted; it takes {accepted}"
            ))
        })
    }

    /// A whole number up to the largest size of a file.
    ///
    /// # Errors
    /// `Invalid` if the value is no such number.
    pub fn number(&self, name: &str) -> Result<Option<u64>> {
        self.parsed(
            name,
            "a whole number from 0 to 9223372036854775807",
            |text| {
                let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
                let number: i64 = text.parse().ok().filter(|_| is_plain)?;
                u64::try_from(number).ok()
            },
        )
    }

    /// A flag; false if it is absent.
    ///
    /// # Errors
    /// `Invalid` if the value is not 1, true, 0 or false.
    pub fn flag(&self, name: &str) -> Result<bool> {
        Ok(self.optional_flag(name)?.unwrap_or(false))
    }

    /// A flag; `None` if it is absent.
    ///
    /// # Errors
    /// `Invalid` if the value is not 1, true, 0 or false.
    pub fn optional_flag(&self, name: &str) -> Result<Option<bool>> {
        self.parsed(name, "1, true, 0 or false", |text| match text {
            "1" | "true" => Some(true),
            "0" | "false" => Some(false),
            _ => None,
        })
    }

    /// Permission bits in octal.
    ///
    /// # Errors
    /// `Invalid` if they are not octal, or above `7777`.
    pub fn mode(&self, name: &str) -> Result<Option<u32>> {
        let accepted = "octal permission bits such as 644, at most 7777";
        self.parsed(name, accepted, |text| {
            let mode = u32::from_str_radix(text, 8).ok()?;
            (mode <= 0o7777 && !text.starts_with('+')).then_some(mode)
        })
    }

    /// One of several words.
    ///
    /// # Errors
    /// `Invalid` if the value is another word.
    pub fn choice<T: Copy>(&self, name: &str, choices: &[(&str, T)]) -> Result<Option<T>> {
        let accepted = accepted_words(choices);
        self.parsed(name, &accepted, |text| choose(choices, text))
    }

    /// A time in seconds, with or without a fraction.
    ///
    /// # Errors
    /// `Invalid` if the value is negative or no number.
    pub fn seconds(&self, name: &str) -> Result<Option<Duration>> {
        self.parsed(name, "seconds, 0 or more", super::seconds)
    }
}

/// Undoes percent-encoding; a plus is a plus.
///
/// # Errors
/// `Invalid` if a percent sign is not followed by two hexadecimal digits.
pub fn percent_decoded(raw: &[u8]) -> Result<Vec<u8>> {
    decode_with(raw, b'+')
}

fn decode(raw: &[u8]) -> Result<Vec<u8>> {
    decode_with(raw, b' ')
}

/// Undoes percent-encoding; a plus stands for `plus`.
fn decode_with(raw: &[u8], plus: u8) -> Result<Vec<u8>> {
    let mut decoded = Vec::with_capacity(raw.len());
    let mut rest = raw;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        decoded.push(match byte {
            b'+' => plus,
            b'%' => {
                let digits = after
                    .get(..2)
                    .and_then(|digits| str::from_utf8(digits).ok());
                let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
                // from_str_radix accepts a plus sign.
                let Some(byte) = byte.filter(|_| after[0] != b'+') else {
                    let text = "the query has a % that is not followed by two hexadecimal digits";
                    return Err(Error::invalid(text));
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
