//! A client's connection to poll, ping and flush.
//!
//! Mechanisms that wait (for a command's output, for a port to open) poll the client beside their own
//! descriptors, so that a disconnect ends the wait. They use these traits and know no protocol: `http`
//! implements them. Only [`KeepAlive`] decides when to ping.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::sys::{Events, PollEntry, poll};

/// The client closed its connection, or the connection broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disconnected;

/// The far end of a connection, which may disconnect at any time.
pub trait Peer {
    /// The socket to poll.
    fn descriptor(&self) -> BorrowedFd<'_>;
    /// The events to poll the socket for.
    fn interest(&self) -> Events;
    /// Handles the events that poll reported.
    ///
    /// # Errors
    /// The client disconnected.
    fn ready(&mut self, events: Events) -> Result<(), Disconnected>;
}

/// A client that receives a stream.
///
/// Data goes into the client's buffer, and [`Client::flush`] sends from there. Add data only when
/// [`Client::is_flushed`]: this bounds the buffer, and a slow client slows down its producer.
pub trait Client: Peer {
    /// Adds a ping to the buffer.
    fn ping(&mut self);
    /// The time without data after which a ping is due.
    fn ping_after(&self) -> Duration;
    /// Sends what the socket takes without blocking.
    ///
    /// # Errors
    /// The client disconnected.
    fn flush(&mut self) -> Result<(), Disconnected>;
    /// Whether the buffer is empty.
    fn is_flushed(&self) -> bool;
}

/// How often work that does not wait for its client looks whether the client is still there.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Notices that a client disconnects while work goes on that never waits for it.
pub struct Lookout {
    due_at: Instant,
}

impl Lookout {
    /// Looks for the first time after a moment.
    pub fn new() -> Self {
        Self {
            due_at: Instant::now() + LOOK_EVERY,
        }
    }

    /// Looks if it is time to; costs next to nothing otherwise. Returns whether it looked.
    ///
    /// # Errors
    /// The client disconnected.
    pub fn look(&mut self, client: &mut dyn Peer) -> Result<bool, Disconnected> {
        let now = Instant::now();
        if now < self.due_at {
            return Ok(false);
        }
        self.due_at = now + LOOK_EVERY;
        check_peer(client)?;
        Ok(true)
    }
}

/// Sends the client's whole buffer and blocks while the client is slow.
///
/// # Errors
/// The client disconnected.
pub fn send_all(client: &mut dyn Client) -> Result<(), Disconnected> {
    loop {
        client.flush()?;
        if client.is_flushed() {
            return Ok(());
        }
        wait_for(client, None, None)?;
    }
}

/// As [`send_all`], but gives up a client that takes nothing for `limit`.
///
/// # Errors
/// The client disconnected, or was given up.
pub fn send_all_within(client: &mut dyn Client, limit: Duration) -> Result<(), Disconnected> {
    loop {
        client.flush()?;
        if client.is_flushed() {
            return Ok(());
        }
        let begun = Instant::now();
        if !wait_for(client, None, Some(limit))? && begun.elapsed() >= limit {
            return Err(Disconnected);
        }
    }
}

/// Sleeps until the client is ready, `wake` is readable or `limit` has passed. False in the last case.
fn wait_for(
    client: &mut dyn Client,
    wake: Option<BorrowedFd<'_>>,
    limit: Option<Duration>,
) -> Result<bool, Disconnected> {
    let mut entries = [
        PollEntry::new(client.descriptor(), client.interest()),
        PollEntry::new(wake, Events::READABLE),
    ];
    let is_ready = poll(&mut entries, limit);
    let events = entries[0].events();
    client.ready(events)?;
    Ok(is_ready)
}

/// Pings a client that was sent nothing for [`Client::ping_after`].
pub struct KeepAlive {
    last_sent: Instant,
}

impl KeepAlive {
    /// Starts the time to the first ping.
    pub fn new() -> Self {
        Self {
            last_sent: Instant::now(),
        }
    }

    /// Restarts the time to the next ping, because data was sent.
    pub fn reset(&mut self) {
        self.last_sent = Instant::now();
    }

    /// When the next ping is due.
    pub fn due_at(&self, client: &dyn Client) -> Instant {
        self.last_sent + client.ping_after()
    }

    /// Adds a ping to the client's buffer if one is due and the buffer is empty. Behind unsent data a
    /// ping would be useless.
    pub fn ping_if_due(&mut self, client: &mut dyn Client) {
        if Instant::now() < self.due_at(client) {
            return;
        }
        if client.is_flushed() {
            client.ping();
        }
        self.reset();
    }

    /// Sleeps until the client is ready, `wake` is readable, `until` has passed or a ping is due. Does not
    /// wait for a client that takes nothing.
    ///
    /// # Errors
    /// The client disconnected.
    pub fn wait(
        &mut self,
        client: &mut dyn Client,
        wake: Option<BorrowedFd<'_>>,
        until: Option<Instant>,
    ) -> Result<(), Disconnected> {
        let due_at = self.due_at(client);
        let wake_at = until.map_or(due_at, |until| until.min(due_at));
        let left = wake_at.saturating_duration_since(Instant::now());
        wait_for(client, wake, Some(left))?;
        self.ping_if_due(client);
        client.flush()
    }
}

/// Why long work stops before its end. Only after [`Stopped::Due`] it may go on from where it stopped.
#[derive(Debug)]
pub enum Stopped {
    /// The client disconnected.
    Disconnected,
    /// The answer has to begin now.
    Due,
    /// The work failed.
    Failed(Error),
}

impl From<Disconnected> for Stopped {
    fn from(_: Disconnected) -> Self {
        Self::Disconnected
    }
}

impl From<Error> for Stopped {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Asked between the steps of long work whether to go on. A step takes milliseconds.
pub trait Interrupt: Send {
    /// # Errors
    /// `Disconnected` or `Due`.
    fn check(&mut self) -> Result<(), Stopped>;
}

impl<T: Interrupt + ?Sized> Interrupt for &mut T {
    fn check(&mut self) -> Result<(), Stopped> {
        (**self).check()
    }
}

/// Work that no client ends: what it takes may still come after its tenant's other work.
pub struct Uninterrupted;

impl Interrupt for Uninterrupted {
    fn check(&mut self) -> Result<(), Stopped> {
        Ok(())
    }
}

/// Whether a client is still there, without waiting.
///
/// # Errors
/// The client disconnected.
pub fn check_peer(client: &mut dyn Peer) -> Result<(), Disconnected> {
    let mut entries = [PollEntry::new(client.descriptor(), client.interest())];
    poll(&mut entries, Some(Duration::ZERO));
    let events = entries[0].events();
    client.ready(events)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer whose hang-up is reported by poll.
    struct Far(std::os::unix::net::UnixStream);

    impl Peer for Far {
        fn descriptor(&self) -> BorrowedFd<'_> {
            std::os::fd::AsFd::as_fd(&self.0)
        }

        fn interest(&self) -> Events {
            Events::PEER_CLOSED
        }

        fn ready(&mut self, events: Events) -> Result<(), Disconnected> {
            if events.has(Events::PEER_CLOSED) {
                return Err(Disconnected);
            }
            Ok(())
        }
    }

    #[test]
    fn a_lookout_notices_that_the_client_is_gone() {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut client = Far(near);
        let mut lookout = Lookout::new();
        let until_it_looks = |lookout: &mut Lookout, client: &mut Far| {
            let started = Instant::now();
            while !lookout.look(client)? {
                assert!(started.elapsed() < Duration::from_secs(20));
            }
            Ok::<_, Disconnected>(())
        };
        assert_eq!(until_it_looks(&mut lookout, &mut client), Ok(()));
        drop(far);
        assert_eq!(until_it_looks(&mut lookout, &mut client), Err(Disconnected));
    }
}
