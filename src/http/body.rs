//! Where a body ends: takes the bytes of one message, and no more, out of their framing.
//!
//! Used for requests by `request` and for the responses of upstream servers by the relay. It keeps the
//! state, [`SocketReader`] the bytes.

use std::os::fd::{AsFd, BorrowedFd};

use super::chunked::{ChunkStep, Decoder};
use super::parse::{Framing, at_most};
use super::reader::{ReceiveError, SocketReader};
use crate::threads::priority::PacedRequest;

/// The most that one splice asks for. No pipe holds more.
const MAX_SPLICED_BYTES: usize = 1 << 30;

/// What of a body is still to come.
pub enum BodyDecoder {
    /// This many bytes, at least one.
    Length(u64),
    Chunked(Decoder),
    /// Everything until the sender closes; only responses and tunnels end like this.
    UntilClose,
    /// Nothing.
    Ended,
    /// Reading failed, so what follows on the connection cannot be told from one another.
    Failed,
}

impl BodyDecoder {
    pub fn new(framing: Framing) -> Self {
        match framing {
            Framing::None | Framing::Length(0) => Self::Ended,
            Framing::Length(length) => Self::Length(length),
            Framing::Chunked => Self::Chunked(Decoder::default()),
        }
    }

    /// Reads at least one byte; 0 at the end of the body.
    pub fn read<S: AsFd>(
        &mut self,
        reader: &mut SocketReader<S>,
        into: &mut [u8],
    ) -> Result<usize, ReceiveError> {
        PacedRequest::step();
        let most = self.at_most(into.len());
        let result = match self {
            Self::Ended => Ok(0),
            Self::Failed => Err(ReceiveError::Closed),
            Self::Length(_) | Self::UntilClose => reader.read(&mut into[..most]),
            Self::Chunked(decoder) => find_data(decoder, reader, most).inspect(|&count| {
                into[..count].copy_from_slice(&reader.unused()[..count]);
                reader.consume(count);
            }),
        };
        self.record(result)
    }

    /// Moves at least one byte into a pipe that has room. `None` if the body can only be
    /// [read](Self::read): it has no length, some of it was received already, it has ended, or the
    /// kernel cannot splice.
    pub fn splice<S: AsFd>(
        &mut self,
        reader: &mut SocketReader<S>,
        pipe: BorrowedFd<'_>,
    ) -> Result<Option<usize>, ReceiveError> {
        PacedRequest::step();
        if !matches!(self, Self::Length(_)) {
            return Ok(None);
        }
        let spliced = reader.splice(pipe, self.at_most(MAX_SPLICED_BYTES));
        let Some(result) = spliced.transpose() else {
            return Ok(None);
        };
        self.record(result).map(Some)
    }

    /// Appends what has arrived, at most `most` bytes, without blocking. When it fails, what came
    /// before the error was appended.
    pub fn append_available<S: AsFd>(
        &mut self,
        reader: &mut SocketReader<S>,
        out: &mut Vec<u8>,
        most: usize,
    ) -> Result<(), ReceiveError> {
        PacedRequest::step();
        let plain_most = self.at_most(most);
        let result = reader.without_blocking(|reader| match self {
            Self::Ended => Ok(0),
            Self::Failed => Err(ReceiveError::Closed),
            // Large bodies take this way: from the socket straight to where they are sent from.
            Self::Length(_) | Self::UntilClose => reader.read_append(out, plain_most),
            Self::Chunked(decoder) => append_data(decoder, reader, out, most),
        });
        match result {
            Err(ReceiveError::TimedOut) => Ok(()),
            result => self.record(result).map(drop),
        }
    }

    pub fn has_failed(&self) -> bool {
        matches!(self, Self::Failed)
    }

    fn at_most(&self, most: usize) -> usize {
        match self {
            Self::Length(left) => at_most(*left, most),
            _ => most,
        }
    }

    /// Moves on by the outcome of one read, where 0 bytes are the end.
    fn record(&mut self, result: Result<usize, ReceiveError>) -> Result<usize, ReceiveError> {
        let count = match result {
            Err(ReceiveError::Closed) if matches!(self, Self::UntilClose) => 0,
            Err(error) => {
                *self = Self::Failed;
                return Err(error);
            }
            Ok(count) => count,
        };
        match self {
            Self::Length(left) if *left > count as u64 => *left -= count as u64,
            Self::Length(_) => *self = Self::Ended,
            _ if count == 0 => *self = Self::Ended,
            _ => {}
        }
        Ok(count)
    }
}

/// Makes data of a chunked body, at most `most` bytes, the first unused bytes of `reader`, and returns
/// their number; 0 at the end of the body.
fn find_data<S: AsFd>(
    decoder: &mut Decoder,
    reader: &mut SocketReader<S>,
    most: usize,
) -> Result<usize, ReceiveError> {
    loop {
        if reader.unused().is_empty() {
            reader.receive_chunks()?;
        }
        // The decoder must not see what is not taken. Framing is small, so little is lost.
        let shown = &reader.unused()[..reader.unused().len().min(most)];
        match decoder.step(shown)? {
            ChunkStep::More(count) => reader.consume(count),
            ChunkStep::Data { skip, length } => {
                reader.consume(skip);
                return Ok(length);
            }
            ChunkStep::End(count) => {
                reader.consume(count);
                return Ok(0);
            }
        }
    }
}

/// Appends the data of all chunks that were received together; 0 at the end of the body.
fn append_data<S: AsFd>(
    decoder: &mut Decoder,
    reader: &mut SocketReader<S>,
    out: &mut Vec<u8>,
    most: usize,
) -> Result<usize, ReceiveError> {
    let full = out.len() + most;
    loop {
        let count = find_data(decoder, reader, full - out.len())?;
        out.extend_from_slice(&reader.unused()[..count]);
        reader.consume(count);
        if count == 0 || out.len() == full || reader.unused().is_empty() {
            return Ok(count);
        }
    }
}
