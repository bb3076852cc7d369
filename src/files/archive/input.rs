//! Where the bytes of an archive come from, as little of it as reading needs.
//!
//! `dyn BufRead` has a table of all that can be done with a reader, for each kind of reader: 4 KB each.

use std::io::{self, BufRead, Read};

/// What has bytes.
pub trait Input {
    /// As [`BufRead::fill_buf`].
    ///
    /// # Errors
    /// The source breaks off.
    fn fill(&mut self) -> io::Result<&[u8]>;
    /// As [`BufRead::consume`].
    fn used(&mut self, count: usize);
    /// Gives way to others. What is made of a few bytes may take long, so this is called between steps of microseconds, and
    /// costs next to nothing mostly.
    ///
    /// # Errors
    /// Nobody wants the archive any more.
    fn give_way(&mut self) -> io::Result<()>;
}

/// What is in memory, and how often it gave way.
#[cfg(test)]
pub struct CountedInput<R>(pub R, pub usize);

#[cfg(test)]
impl<R: BufRead> Input for CountedInput<R> {
    fn fill(&mut self) -> io::Result<&[u8]> {
        self.0.fill_buf()
    }

    fn used(&mut self, count: usize) {
        self.0.consume(count);
    }

    fn give_way(&mut self) -> io::Result<()> {
        self.1 += 1;
        Ok(())
    }
}

/// The same as a reader.
pub(super) struct Reader<'i>(pub(super) &'i mut dyn Input);

impl Read for Reader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.0.fill()?.read(into)?;
        self.0.used(count);
        Ok(count)
    }
}

impl BufRead for Reader<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.0.fill()
    }

    fn consume(&mut self, count: usize) {
        self.0.used(count);
    }
}
