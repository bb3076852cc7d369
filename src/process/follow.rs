//! Following a process that another thread drives: its log, or only its end.
//!
//! A follower has its own cursor and its own eventfd. The driver of the process does not know how far
//! a follower is, and never waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::process::{Process, Subscriber};
use super::read_size::ReadSize;
use super::ring::{Cursor, Piece, Stream};
use crate::client::{Client, Disconnected, KeepAlive, send_all};
use crate::fault;

/// How often it is looked whether a process is gone.
const GONE_STEP: Duration = Duration::from_millis(5);

/// How long a process has to be quiet after it has written something, for those who read it piece by piece.
const PAUSE: Duration = Duration::from_millis(250);

/// How far a subscriber follows a process that has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Up to the end of the log.
    Held,
    /// To the end of the process.
    Exit,
    /// The same, or to this moment.
    Until(Instant),
}

impl Process {
    /// Sends a subscriber the output from `cursor` on.
    ///
    /// # Errors
    /// The client disconnected.
    pub fn follow(
        self: &Arc<Self>,
        mut cursor: Cursor,
        extent: Extent,
        subscriber: &mut dyn Subscriber,
    ) -> Result<(), Disconnected> {
        let listener = self.notifier.listen();
        let mut keep_alive = KeepAlive::new();
        let mut buffer = Vec::new();
        let mut read_size = ReadSize::new(self.ledger());
        loop {
            // Read in this order: once the exit is known, all output of the process is in the log. The
            // loop goes no further than `end`, because a descendant may write without end.
            let exit = self.exit();
            fault::point("follow");
            let end = self.log.position();
            while cursor.position() < end
                && let Some(piece) = self.log.read(&mut cursor, &mut buffer, read_size.bytes())
            {
                match piece {
                    Piece::Data { stream, offset } => subscriber.output(stream, offset, &buffer),
                    Piece::Dropped {
                        stream,
                        offset,
                        bytes,
                    } => subscriber.dropped(stream, offset, bytes),
                }
                send_all(subscriber.client())?;
                read_size.note(buffer.len());
                keep_alive.reset();
            }
            if let Some(exit) = exit {
                subscriber.exit(&exit);
                return Ok(());
            }
            let until = match extent {
                Extent::Exit => None,
                Extent::Until(until) if Instant::now() < until => Some(until),
                Extent::Held | Extent::Until(_) => {
                    subscriber.caught_up(&cursor);
                    return Ok(());
                }
            };
            listener.wait(&mut keep_alive, subscriber.client(), until)?;
        }
    }

    /// Waits until the process has ended and its log is complete, or until `limit` has passed. Pings
    /// the client meanwhile.
    ///
    /// # Errors
    /// The client disconnected.
    pub fn wait_with(
        self: &Arc<Self>,
        client: &mut dyn Client,
        limit: Option<Duration>,
    ) -> Result<(), Disconnected> {
        let listener = self.notifier.listen();
        let mut keep_alive = KeepAlive::new();
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        while self.exit().is_none() && deadline.is_none_or(|deadline| Instant::now() < deadline) {
            listener.wait(&mut keep_alive, client, deadline)?;
        }
        Ok(())
    }

    /// Waits until the process has ended, or has written something after these offsets of its streams and then
    /// paused, or has written `enough` bytes, at most until a moment. Pings the client meanwhile.
    ///
    /// # Errors
    /// The client disconnected.
    pub fn wait_for_output(
        self: &Arc<Self>,
        client: &mut dyn Client,
        after: Cursor,
        enough: u64,
        until: Instant,
    ) -> Result<(), Disconnected> {
        let listener = self.notifier.listen();
        let mut keep_alive = KeepAlive::new();
        let (mut seen, mut paused_at) = (0, until);
        while self.exit().is_none() {
            let more = |stream| self.written(stream).saturating_sub(after.next(stream));
            let written: u64 = Stream::ALL.into_iter().map(more).sum();
            let now = Instant::now();
            if written > seen {
                seen = written;
                paused_at = until.min(now + PAUSE);
            }
            if now >= paused_at || seen >= enough {
                break;
            }
            listener.wait(&mut keep_alive, client, Some(paused_at))?;
        }
        Ok(())
    }

    /// Waits until the process has ended and its log is complete, at most `limit`; returns whether it
    /// has.
    pub fn wait_ended(self: &Arc<Self>, limit: Duration) -> bool {
        let listener = self.notifier.listen();
        let deadline = Instant::now() + limit;
        while self.exit().is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            listener.wait_alone(left);
        }
        true
    }

    /// Waits until the process is gone from `/proc`, at most `limit`. Its output may still be on its way.
    pub fn wait_gone(self: &Arc<Self>, limit: Duration) {
        let listener = self.notifier.listen();
        let deadline = Instant::now() + limit;
        while self.is_running() && Instant::now() < deadline {
            // The notification comes a moment later, or much later if a client takes the output slowly.
            listener.wait_alone(GONE_STEP);
        }
    }
}

impl Process {
    /// The end of all that it has written, without white space around it: at most this many bytes.
    pub fn last_words(&self, most: usize) -> String {
        let (mut cursor, mut piece) = (Cursor::default(), Vec::new());
        let (mut words, end) = (Vec::new(), self.log.position());
        while cursor.position() < end && self.log.read(&mut cursor, &mut piece, most).is_some() {
            words.append(&mut piece);
            words.drain(..words.len().saturating_sub(most));
        }
        String::from_utf8_lossy(&words).trim().to_owned()
    }
}
