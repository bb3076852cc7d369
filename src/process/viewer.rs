//! One who watches the terminal of a process and may type there. Any number may at the same time.
//!
//! A viewer has a cursor of its own in the log, so nobody waits for a slow one. Typing is in turns: who
//! begins a piece of input finishes it before anybody else types. Nothing here blocks; [`Viewer::wakeup`] and
//! [`Viewer::typing`] are there to be polled.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::process::{Exit, Process};
use super::read_size::ReadSize;
use super::ring::{Cursor, Piece, Stream};
use super::stdin::StdinWriter;
use super::terminal::{SENT_BYTES, TYPED_BYTES, Terminal, VIEWERS};
use crate::error::{Error, Kind, Result};
use crate::spec::command::TerminalSize;
use crate::threads::notify::Listener;

/// How long a viewer leaves the terminal to others who have waited for their turn, before it takes the
/// next one.
const YIELD: Duration = Duration::from_millis(5);

/// Where a viewer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// The oldest byte that the log holds.
    Oldest,
    /// This offset.
    At(u64),
    /// The end: only what comes.
    End,
}

/// Output for a viewer.
#[derive(Debug, PartialEq, Eq)]
pub enum View<'a> {
    /// These bytes.
    Data(&'a [u8]),
    /// The log no longer holds this many bytes at this offset.
    Dropped { offset: u64, bytes: u64 },
}

/// One who watches a terminal.
pub struct Viewer {
    process: Arc<Process>,
    listener: Listener,
    cursor: Cursor,
    read_size: ReadSize,
    buffer: Vec<u8>,
    /// The takeover after which it may type; `None` if it may not.
    typist_since: Option<u64>,
    /// The size that it knows.
    size: TerminalSize,
    /// Held from the beginning of a piece of input to its end.
    turn: Option<StdinWriter>,
    yields_until: Option<Instant>,
}

impl Viewer {
    /// A viewer that may only watch.
    ///
    /// # Errors
    /// `NotPty` if the process has no terminal; `Invalid` if the offset is beyond what it has written.
    pub fn new(process: &Arc<Process>, start: Start) -> Result<Self> {
        let size = process.terminal()?.size();
        // Before the offset is chosen, so that no output is missed.
        let listener = process.notifier.listen();
        let written = process.written(Stream::Stdout);
        let offset = match start {
            Start::Oldest => process.log.held_from(Stream::Stdout),
            Start::At(offset) if offset > written => {
                let text = format!(
                    "offset={offset} is beyond the output of process {}, which is {written} bytes",
                    process.id
                );
                return Err(Error::invalid(text));
            }
            Start::At(offset) => offset,
            Start::End => written,
        };
        VIEWERS.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            process: Arc::clone(process),
            listener,
            cursor: Cursor::at(offset, 0),
            read_size: ReadSize::new(process.ledger()),
            buffer: Vec::new(),
            typist_since: None,
            size,
            turn: None,
            yields_until: None,
        })
    }

    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    fn terminal(&self) -> Result<&Terminal> {
        self.process.terminal()
    }

    /// The offset of the next byte.
    pub fn offset(&self) -> u64 {
        self.cursor.next(Stream::Stdout)
    }

    /// Reads output up to the offset `end`; `None` if it has all of that.
    pub fn read(&mut self, end: u64) -> Option<View<'_>> {
        let left = end.checked_sub(self.offset()).filter(|left| *left > 0)?;
        let most = usize::try_from(left).map_or(self.read_size.bytes(), |left| {
            left.min(self.read_size.bytes())
        });
        let log = &self.process.log;
        let view = match log.read(&mut self.cursor, &mut self.buffer, most)? {
            Piece::Data { .. } => {
                SENT_BYTES.fetch_add(self.buffer.len() as u64, Ordering::Relaxed);
                View::Data(&self.buffer)
            }
            Piece::Dropped { offset, bytes, .. } => View::Dropped { offset, bytes },
        };
        self.read_size.note(self.buffer.len());
        Some(view)
    }

    /// How the process ended, once all its output is in the log.
    pub fn exit(&self) -> Option<Exit> {
        self.process.exit()
    }

    /// Readable when there may be more to read, the process has ended, or something about its terminal has
    /// changed. `None` if the server has no descriptor left.
    pub fn wakeup(&self) -> Option<BorrowedFd<'_>> {
        self.listener.descriptor()
    }

    /// How long to sleep at most, however nothing wakes it up.
    pub fn interval(&self) -> Option<Duration> {
        let now = Instant::now();
        let yields = self
            .yields_until
            .and_then(|until| until.checked_duration_since(now));
        let retries = self.turn.as_ref().map(|_| StdinWriter::RETRY_INTERVAL);
        let all = [yields, retries, self.listener.interval()];
        all.into_iter().flatten().min()
    }

    /// Makes [`Viewer::wakeup`] unreadable. What has changed before is to be looked at after this.
    pub fn clear_wakeup(&self) {
        self.listener.clear();
    }

    /// Lets it type, beside all others who may.
    pub fn join_typists(&mut self) -> Result<()> {
        self.typist_since = Some(self.terminal()?.takeovers());
        Ok(())
    }

    /// Makes it the only viewer that may type.
    pub fn take_over(&mut self) -> Result<()> {
        self.typist_since = Some(self.terminal()?.take_over());
        self.process.notifier.notify();
        Ok(())
    }

    /// Whether it may type. A takeover by another ends its turn too.
    pub fn may_type(&mut self) -> bool {
        let takeovers = self.terminal().map_or(0, Terminal::takeovers);
        if self.typist_since.is_some_and(|since| since < takeovers) {
            self.typist_since = None;
            self.end_turn();
        }
        self.typist_since.is_some()
    }

    /// The size that it knows.
    pub fn size(&self) -> TerminalSize {
        self.size
    }

    /// The size if another has changed it since it was last known.
    pub fn new_size(&mut self) -> Option<TerminalSize> {
        let size = self.terminal().map_or(self.size, Terminal::size);
        let is_new = size != self.size;
        self.size = size;
        is_new.then_some(size)
    }

    /// Sets the size.
    ///
    /// # Errors
    /// `NotRunning`, or the kernel refuses.
    pub fn resize(&mut self, size: TerminalSize) -> Result<()> {
        // Before, so that a change by another after this one is seen.
        let before = std::mem::replace(&mut self.size, size);
        self.process
            .resize(size)
            .inspect_err(|_| self.size = before)
    }

    /// Types the beginning of `input` and returns how many bytes that was: 0 while another types, or the
    /// terminal takes none. The turn lasts until [`Viewer::end_turn`].
    ///
    /// # Errors
    /// `StdinClosed` if the process has ended; `StdinBusy` if the terminal has taken nothing for a minute.
    pub fn type_some(&mut self, input: &[u8]) -> Result<usize> {
        self.yields_until.take_if(|until| *until <= Instant::now());
        if self.yields_until.is_some() {
            return Ok(0);
        }
        if self.turn.is_none() {
            self.turn = match self.process.stdin() {
                Ok(turn) => Some(turn),
                Err(error) if error.kind() == Kind::StdinBusy => return Ok(0),
                Err(error) => return Err(error),
            };
        }
        let turn = self.turn.as_mut();
        let count = turn.map_or(Ok(0), |turn| turn.write_some(input))?;
        TYPED_BYTES.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }

    /// Where to poll for room, while it is its turn.
    pub fn typing(&self) -> Option<BorrowedFd<'_>> {
        self.turn.as_ref().and_then(StdinWriter::descriptor)
    }

    /// Lets others type. If some have waited, they are first.
    pub fn end_turn(&mut self) {
        if let Some(turn) = self.turn.take()
            && turn.is_awaited()
        {
            self.yields_until = Some(Instant::now() + YIELD);
        }
    }

    /// The character that ends a program's input.
    pub fn end_of_file_character(&self) -> Result<u8> {
        Ok(self.terminal()?.end_of_file_character())
    }
}

impl Drop for Viewer {
    fn drop(&mut self) {
        VIEWERS.fetch_sub(1, Ordering::Relaxed);
    }
}
