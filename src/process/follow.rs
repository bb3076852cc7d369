//! Watching a process that somebody else drives: its log from the ring, or just its end.
//!
//! The follower has its own cursor and its own eventfd; the driver of the process does not know
//! how far it is, and never waits for it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::pump::deliver_rest;
use super::ring::{Cursor, Piece};
use super::{Audience, Gone, Process, Watch};
use crate::sys::{Events, PollEntry, poll};

/// See [`Process::follow`].
pub(super) fn follow(
    process: &Arc<Process>,
    mut cursor: Cursor,
    live: bool,
    audience: &mut dyn Audience,
) -> Result<(), Gone> {
    let mut silence = Silence::new(process);
    let mut buffer = Vec::new();
    loop {
        // Asked first: what was written before the end is in the ring when the end is known. And no
        // further than there: something that it left behind may go on writing for ever.
        let exit = process.exit();
        let end = process.position();
        while cursor.position() < end
            && let Some(piece) = process.read(&mut cursor, &mut buffer)
        {
            match piece {
                Piece::Data { stream, offset } => audience.output(stream, offset, &buffer),
                Piece::Dropped {
                    stream,
                    offset,
                    bytes,
                } => audience.dropped(stream, offset, bytes),
            }
            deliver_rest(audience)?;
            silence.broken();
        }
        if let Some(exit) = exit {
            audience.exit(&exit);
            return Ok(());
        }
        if !live {
            audience.caught_up(&cursor);
            return Ok(());
        }
        silence.wait(audience, None)?;
    }
}

/// See [`Process::wait_with`].
pub(super) fn wait(
    process: &Arc<Process>,
    audience: &mut dyn Audience,
    limit: Option<Duration>,
) -> Result<(), Gone> {
    let mut silence = Silence::new(process);
    let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
    while process.exit().is_none() && deadline.is_none_or(|deadline| Instant::now() < deadline) {
        silence.wait(audience, deadline)?;
    }
    Ok(())
}

/// Waiting for news of a process, with signs of life for the client meanwhile.
struct Silence {
    /// Nothing when there was no descriptor left: then it looks again every so often.
    watch: Option<Watch>,
    since: Instant,
}

impl Silence {
    fn new(process: &Arc<Process>) -> Self {
        Self {
            watch: process.watch().ok(),
            since: Instant::now(),
        }
    }

    fn broken(&mut self) {
        self.since = Instant::now();
    }

    /// Returns when there may be news, at `until`, or after a ping.
    fn wait(&mut self, audience: &mut dyn Audience, until: Option<Instant>) -> Result<(), Gone> {
        let now = Instant::now();
        let ping_at = self.since + audience.patience();
        let mut wake_at = until.map_or(ping_at, |until| until.min(ping_at));
        if self.watch.is_none() {
            wake_at = wake_at.min(now + Duration::from_millis(100));
        }
        let events = {
            let mut entries = [
                PollEntry::new(audience.descriptor(), audience.interest()),
                PollEntry::new(
                    self.watch.as_ref().map(|watch| watch.event.as_fd()),
                    Events::READABLE,
                ),
            ];
            poll(&mut entries, Some(wake_at.saturating_duration_since(now)));
            entries[0].events()
        };
        if let Some(watch) = &self.watch {
            watch.clear();
        }
        audience.ready(events)?;
        if self.since.elapsed() >= audience.patience() {
            audience.ping();
            self.broken();
        }
        deliver_rest(audience)
    }
}
