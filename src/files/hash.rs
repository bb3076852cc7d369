//! SHA-256 of files, piece by piece.

use std::io::Read;

use sha2::{Digest as _, Sha256};

use super::read::{ContentEnd, Opened};
use crate::error::{Error, Result};

/// A SHA-256.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest([u8; 32]);

impl Digest {
    /// Reads 64 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        let mut bytes = [0; 32];
        if digits.len() != 2 * bytes.len() {
            return None;
        }
        for (byte, digits) in bytes.iter_mut().zip(digits.chunks(2)) {
            let value = |digit: u8| char::from(digit).to_digit(16);
            *byte = u8::try_from(value(digits[0])? << 4 | value(digits[1])?).ok()?;
        }
        Some(Self(bytes))
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0
            .iter()
            .try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

/// The SHA-256 of bytes that come in pieces.
#[derive(Default)]
pub struct Hasher(Sha256);

impl Hasher {
    /// Takes the next bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The SHA-256 of all bytes.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

/// A file that is being hashed: what it holds when it is read, but not what is appended meanwhile.
pub struct FileHash {
    opened: Opened,
    end: ContentEnd,
    hasher: Hasher,
    size: u64,
}

/// The size and the SHA-256 of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hashed {
    /// Bytes that were hashed.
    pub size: u64,
    /// Their SHA-256.
    pub sha256: Digest,
}

impl FileHash {
    /// Begins to hash a file.
    pub fn new(opened: Opened) -> Self {
        Self {
            end: ContentEnd::new(opened.size),
            opened,
            hasher: Hasher::default(),
            size: 0,
        }
    }

    /// Bytes that were hashed.
    pub fn bytes(&self) -> u64 {
        self.size
    }

    /// Hashes the next piece of the file, as large as the buffer; the result at the end.
    ///
    /// # Errors
    /// The file cannot be read, or `Invalid`: it tells no size and goes on; `path` is for the text.
    pub fn step(
        &mut self,
        path: impl std::fmt::Display,
        buffer: &mut [u8],
    ) -> Result<Option<Hashed>> {
        let end = self.end.after(self.size, &self.opened.file);
        let end = end.map_err(|errno| Error::system(format_args!("cannot read {path}"), errno))?;
        let left = end.saturating_sub(self.size);
        let most = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
        let buffer = &mut buffer[..most];
        let count = loop {
            match self.opened.file.read(buffer) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::io(format_args!("cannot read {path}"), &error)),
                Ok(count) => break count,
            }
        };
        if count > 0 {
            self.hasher.feed(&buffer[..count]);
            self.size += count as u64;
            return Ok(None);
        }
        Ok(Some(Hashed {
            size: self.size,
            sha256: std::mem::take(&mut self.hasher).finish(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_back_as_they_were_shown() {
        let mut hasher = Hasher::default();
        hasher.feed(b"a");
        hasher.feed(b"bc");
        // Computed with: printf abc | sha256sum
        let shown = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digest = hasher.finish();
        assert_eq!(digest.to_string(), shown);
        assert_eq!(Digest::parse(shown), Some(digest));
        assert_eq!(Digest::parse(&shown.to_uppercase()), Some(digest));
        for text in [
            "",
            "ba78",
            &shown[1..],
            &format!("{shown}0"),
            &shown.replace('b', "+"),
        ] {
            assert_eq!(Digest::parse(text), None, "{text}");
        }
    }
}
