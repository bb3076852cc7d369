//! Following a process that another thread drives: its log, or only its end.
//!
//! A follower has its own cursor and its own eventfd. The driver of the process does not know how far
//! a follower is, and never waits for it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::portion::Portion;
use super::process::{Process, Subscriber};
use super::ring::{Cursor, Piece};
use crate::client::{Client, Disconnected, KeepAlive, send_all};
use crate::sync::lock;
use crate::sys::{Events, PollEntry, poll};

/// How often a follower without an eventfd looks at a process.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

impl Process {
    /// Sends a subscriber the output from `cursor` on: until the process has ended if `live`, else up to
    /// the end of the log.
    ///
    /// # Errors
    /// The client disconnected.
    pub fn follow(
        self: &Arc<Self>,
        mut cursor: Cursor,
        live: bool,
        subscriber: &mut dyn Subscriber,
    ) -> Result<(), Disconnected> {
        let wakeup = Wakeup::new(self);
        let mut keep_alive = KeepAlive::new();
        let mut buffer = Vec::new();
        let mut portion = Portion::new(self.ledger());
        loop {
            // Read in this order: once the exit is known, all output of the process is in the log. The
            // loop goes no further than `end`, because a descendant may write without end.
            let exit = self.exit();
            let end = self.log.position();
            while cursor.position() < end
                && let Some(piece) = self.log.read(&mut cursor, &mut buffer, portion.bytes())
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
                portion.note(buffer.len());
                keep_alive.reset();
            }
            if let Some(exit) = exit {
                subscriber.exit(&exit);
                return Ok(());
            }
            if !live {
                subscriber.caught_up(&cursor);
                return Ok(());
            }
            wakeup.wait(&mut keep_alive, subscriber.client(), None)?;
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
        let wakeup = Wakeup::new(self);
        let mut keep_alive = KeepAlive::new();
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        while self.exit().is_none() && deadline.is_none_or(|deadline| Instant::now() < deadline) {
            wakeup.wait(&mut keep_alive, client, deadline)?;
        }
        Ok(())
    }

    /// Waits until the process has ended and its log is complete, at most `limit`; returns whether it
    /// has.
    pub(super) fn wait_ended(self: &Arc<Self>, limit: Duration) -> bool {
        let wakeup = Wakeup::new(self);
        let deadline = Instant::now() + limit;
        while self.exit().is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let pause = left.min(wakeup.interval().unwrap_or(left));
            let mut entries = [PollEntry::new(wakeup.descriptor(), Events::READABLE)];
            poll(&mut entries, Some(pause));
            wakeup.clear();
        }
        true
    }
}

/// Becomes readable when the process has more output or has ended, its terminal was resized, or its stdin
/// is free again after this follower was refused.
pub(super) struct Wakeup {
    process: Arc<Process>,
    /// `None` if the server has no descriptor left.
    event: Option<Arc<EventFd>>,
}

impl Wakeup {
    pub(super) fn new(process: &Arc<Process>) -> Self {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let event = event.ok().map(Arc::new);
        lock(&process.wakeups).extend(event.clone());
        Self {
            process: Arc::clone(process),
            event,
        }
    }

    /// Returns after a wakeup, at `until`, or after a ping.
    fn wait(
        &self,
        keep_alive: &mut KeepAlive,
        client: &mut dyn Client,
        until: Option<Instant>,
    ) -> Result<(), Disconnected> {
        let next = self.interval().map(|interval| Instant::now() + interval);
        let until = until.into_iter().chain(next).min();
        let result = keep_alive.wait(client, self.descriptor(), until);
        self.clear();
        result
    }

    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.event.as_ref().map(|event| event.as_fd())
    }

    /// How long to sleep at most before the process is looked at; `None` means no limit.
    pub(super) fn interval(&self) -> Option<Duration> {
        self.event.is_none().then_some(POLL_INTERVAL)
    }

    pub(super) fn clear(&self) {
        if let Some(event) = &self.event {
            let _ = event.read();
        }
    }
}

impl Drop for Wakeup {
    fn drop(&mut self) {
        if let Some(own) = &self.event {
            lock(&self.process.wakeups).retain(|event| !Arc::ptr_eq(event, own));
        }
    }
}
