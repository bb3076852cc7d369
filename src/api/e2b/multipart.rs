//! `multipart/form-data` (RFC 7578), part by part as it arrives. Nothing holds more of a part than a buffer.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use memchr::memmem::Finder;

use super::errors::E2bError;
use crate::client::Peer;
use crate::http::request::BodyReader;
use crate::limits::ledger::{Charge, Item, Ledger};
use crate::workspace::UploadSource;

/// Bytes that are received at a time.
const READ_BYTES: usize = 256 * 1024;

/// The same for a tenant that holds its share of the server's memory. More than the header of a part.
const LEAST_READ_BYTES: usize = 32 * 1024;

/// Most bytes of the header of a part.
const MAX_HEAD_BYTES: usize = 16 * 1024;

/// Most characters of a boundary (RFC 2046 section 5.1.1).
const MAX_BOUNDARY: usize = 70;

/// The parts of a body.
pub(super) struct Multipart<'b, 'c> {
    body: &'b mut BodyReader<'c>,
    /// What stands before each part, and at the end: a line end, two hyphens and the boundary.
    delimiter: Finder<'static>,
    buffer: Box<[u8]>,
    /// Received and not taken: this part of `buffer`.
    unread: Range<usize>,
    /// How many of its first bytes are known to be the part's.
    known: usize,
    has_ended: bool,
    is_in_part: bool,
    _charge: Charge,
}

/// The header of a part.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PartHead {
    /// The name of the field.
    pub(super) name: String,
    /// The name of the file; `None` if the part is none.
    pub(super) filename: Option<String>,
}

impl<'b, 'c> Multipart<'b, 'c> {
    /// The parts of a body with this Content-Type; `None` if it is of another kind.
    ///
    /// # Errors
    /// The boundary is missing or impossible.
    pub(super) fn new(
        content_type: &[u8],
        body: &'b mut BodyReader<'c>,
        ledger: &Arc<Ledger>,
    ) -> Result<Option<Self>, E2bError> {
        let Some(boundary) = boundary(content_type)? else {
            return Ok(None);
        };
        let charge = ledger.charge_up_to(Item::Bodies, READ_BYTES, LEAST_READ_BYTES);
        let delimiter = [b"\r\n--", boundary.as_bytes()].concat();
        let mut buffer = vec![0; charge.bytes()].into_boxed_slice();
        // The first delimiter needs no line before it.
        buffer[..2].copy_from_slice(b"\r\n");
        Ok(Some(Self {
            body,
            delimiter: Finder::new(&delimiter).into_owned(),
            buffer,
            unread: 0..2,
            known: 0,
            has_ended: false,
            // What stands before the first delimiter means nothing.
            is_in_part: true,
            _charge: charge,
        }))
    }

    /// The header of the next part; `None` at the end. What was not read of the last part is dropped.
    pub(super) fn next(&mut self) -> Result<Option<PartHead>, E2bError> {
        let mut scratch = [0; 4096];
        while self.is_in_part {
            self.take(&mut scratch)?;
        }
        if self.has_ended {
            while self.body.read(&mut scratch)? > 0 {}
            return Ok(None);
        }
        let end = loop {
            if let Some(end) = memchr::memmem::find(self.unread(), b"\r\n\r\n") {
                break end;
            }
            if self.unread().len() > MAX_HEAD_BYTES || !self.receive()? {
                let text = format!("the header of a part has no end within {MAX_HEAD_BYTES} bytes");
                return Err(E2bError::invalid(text));
            }
        };
        let head = part_head(&self.unread()[..end])?;
        // The line end belongs to the header, unless there is nothing in the part.
        self.unread.start += end + 4;
        self.is_in_part = true;
        Ok(Some(head))
    }

    fn unread(&self) -> &[u8] {
        &self.buffer[self.unread.clone()]
    }

    /// Receives more; false at the end of the body, or if there is no room.
    fn receive(&mut self) -> Result<bool, E2bError> {
        self.buffer.copy_within(self.unread.clone(), 0);
        self.unread = 0..self.unread.len();
        let room = &mut self.buffer[self.unread.end..];
        if room.is_empty() {
            return Ok(false);
        }
        let count = self.body.read(room)?;
        self.unread.end += count;
        Ok(count > 0)
    }

    /// Takes bytes of the part; 0 at its end.
    fn take(&mut self, into: &mut [u8]) -> Result<usize, E2bError> {
        loop {
            if !self.is_in_part {
                return Ok(0);
            }
            let unread = &self.buffer[self.unread.clone()];
            if self.known > 0 {
                let count = self.known.min(into.len());
                into[..count].copy_from_slice(&unread[..count]);
                self.unread.start += count;
                self.known -= count;
                return Ok(count);
            }
            let length = self.delimiter.needle().len();
            let found = self.delimiter.find(unread);
            // The last bytes may be the beginning of a delimiter.
            self.known = found.unwrap_or_else(|| unread.len().saturating_sub(length - 1));
            if self.known > 0 {
                continue;
            }
            if found.is_some() {
                self.unread.start += length;
                self.end_part()?;
            } else if !self.receive()? {
                return Err(E2bError::invalid("the body ends inside of a part"));
            }
        }
    }

    /// Reads what follows a delimiter: the end of its line, or two hyphens after the last part.
    fn end_part(&mut self) -> Result<(), E2bError> {
        loop {
            let unread = self.unread();
            if unread.starts_with(b"--") {
                self.has_ended = true;
                self.is_in_part = false;
                return Ok(());
            }
            let padding = unread.iter().take_while(|byte| b" \t".contains(byte));
            let padding = padding.count();
            match unread.get(padding..padding + 2).map(|end| end == b"\r\n") {
                Some(true) => {
                    // Stays, so that a part without header fields has an empty line, too.
                    self.unread.start += padding;
                    self.is_in_part = false;
                    return Ok(());
                }
                Some(false) => return Err(E2bError::invalid("a boundary has more on its line")),
                None if padding > MAX_HEAD_BYTES || !self.receive()? => {
                    return Err(E2bError::invalid("the body ends at a boundary"));
                }
                None => {}
            }
        }
    }
}

/// The bytes of the part whose header was given last.
impl UploadSource for Multipart<'_, '_> {
    type Error = E2bError;

    fn remaining(&self) -> Option<u64> {
        None
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, E2bError> {
        self.take(buffer)
    }

    fn splice(&mut self, _: BorrowedFd<'_>) -> Result<Option<usize>, E2bError> {
        Ok(None)
    }

    fn client(&self) -> Box<dyn Peer + Send> {
        Box::new(self.body.watch_client())
    }
}

/// The boundary in a Content-Type; `None` if it is not `multipart/form-data`.
fn boundary(content_type: &[u8]) -> Result<Option<String>, E2bError> {
    let text = String::from_utf8_lossy(content_type);
    let mut parts = text.split(';');
    let kind = parts.next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case("multipart/form-data") {
        return Ok(None);
    }
    let boundary = parts.find_map(|parameter| {
        let (name, value) = parameter.trim().split_once('=')?;
        name.eq_ignore_ascii_case("boundary")
            .then(|| value.trim_matches('"').to_owned())
    });
    let is_usable = |boundary: &String| {
        (1..=MAX_BOUNDARY).contains(&boundary.len())
            && boundary.bytes().all(|byte| (b' '..=b'~').contains(&byte))
    };
    let boundary = boundary.filter(is_usable);
    let missing =
        || E2bError::invalid("multipart/form-data takes a boundary of 1 to 70 characters");
    boundary.map(Some).ok_or_else(missing)
}

/// Reads the header of a part, without the empty line at its end.
fn part_head(bytes: &[u8]) -> Result<PartHead, E2bError> {
    let text = std::str::from_utf8(bytes);
    let text = text.map_err(|_| E2bError::invalid("the header of a part is not UTF-8"))?;
    let disposition = text.split("\r\n").find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim()
            .eq_ignore_ascii_case("content-disposition")
            .then_some(value)
    });
    let missing = || E2bError::invalid("a part has no Content-Disposition with a name");
    let disposition = disposition.ok_or_else(missing)?;
    let (mut name, mut filename) = (None, None);
    let mut rest = disposition;
    while let Some(at) = rest.find(';') {
        rest = rest[at + 1..].trim_start();
        let Some((key, value)) = rest.split_once('=') else {
            break;
        };
        let (value, after) = if let Some(quoted) = value.strip_prefix('"') {
            unquote(quoted)
        } else {
            let end = value.find(';').unwrap_or(value.len());
            (value[..end].trim().to_owned(), &value[end..])
        };
        match key.trim().to_ascii_lowercase().as_str() {
            "name" => name = Some(value),
            "filename" => filename = Some(value),
            _ => {}
        }
        rest = after;
    }
    Ok(PartHead {
        name: name.ok_or_else(missing)?,
        filename,
    })
}

/// The text up to the closing quote, and what follows that. Clients escape quotes and control characters by percent and
/// nothing else, and some double backslashes.
fn unquote(quoted: &str) -> (String, &str) {
    let mut text = String::new();
    let mut rest = quoted.chars();
    while let Some(character) = rest.next() {
        match character {
            '"' => return (text, rest.as_str()),
            '\\' if rest.as_str().starts_with(['\\', '"']) => text.extend(rest.next()),
            '%' => {
                let digits = rest.as_str().get(..2);
                let digits = digits.filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
                let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
                match escaped.filter(|byte| *byte < b' ' || matches!(byte, b'"' | 0x7f)) {
                    Some(byte) => {
                        text.push(char::from(byte));
                        rest = rest.as_str()[2..].chars();
                    }
                    None => text.push('%'),
                }
            }
            other => text.push(other),
        }
    }
    (text, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boundary_is_found_in_a_content_type() {
        for (text, expected) in [
            ("multipart/form-data; boundary=abc", Some(Some("abc"))),
            (
                "Multipart/Form-Data;charset=x; Boundary=\"a b\"",
                Some(Some("a b")),
            ),
            ("application/octet-stream", Some(None)),
            ("multipart/form-data", None),
            ("multipart/form-data; boundary=", None),
        ] {
            let found = boundary(text.as_bytes()).ok();
            let expected = expected.map(|boundary| boundary.map(str::to_owned));
            assert_eq!(found, expected, "{text}");
        }
        assert!(
            boundary(format!("multipart/form-data; boundary={}", "x".repeat(71)).as_bytes())
                .is_err()
        );
    }

    #[test]
    fn names_of_files_are_those_that_were_sent() {
        for (header, name, filename) in [
            (
                "form-data; name=\"file\"; filename=\"a/b c.txt\"",
                "file",
                Some("a/b c.txt"),
            ),
            (
                "form-data; name=file; filename=plain",
                "file",
                Some("plain"),
            ),
            ("form-data; name=\"x\"", "x", None),
            (
                "form-data; filename=\"q%22;%0D%0A%09é%41%\"; name=\"file\"",
                "file",
                Some("q\";\r\n\té%41%"),
            ),
            (
                r#"form-data; name="file"; filename="a\\b\c""#,
                "file",
                Some(r"a\b\c"),
            ),
        ] {
            let head = format!("X: y\r\nContent-Disposition: {header}");
            let expected = PartHead {
                name: name.to_owned(),
                filename: filename.map(str::to_owned),
            };
            assert_eq!(part_head(head.as_bytes()).unwrap(), expected);
        }
        for head in ["", "X: y", "Content-Disposition: form-data; filename=x"] {
            assert!(part_head(head.as_bytes()).is_err(), "{head}");
        }
    }
}
