//! A connection to another server that a client's request leaves to the next one of the same client.
//!
//! It belongs to the client's connection and ends with it, so no client ever gets another's. It is closed 200 ms after the
//! answer, whatever the client does: servers that serve one connection at a time have others to serve. No clock is needed
//! for that, because the client's thread does nothing meanwhile but wait for the next request: who serves the connection
//! [waits here](KeptSlot::wait_for), and whoever answers a request first takes the connection, or clears the slot.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sys::{Events, PollEntry, poll};
use crate::threads::lock::{Mutex, lock};

/// How long it waits for the next request.
const KEPT_FOR: Duration = Duration::from_millis(200);

/// Where a client's connection keeps it.
#[derive(Default)]
pub struct KeptSlot(Mutex<Option<Kept>>);

struct Kept {
    /// What a request must have in common with the last one to get the connection.
    key: Vec<u8>,
    connection: Arc<OwnedFd>,
    until: Instant,
}

impl Kept {
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}

impl KeptSlot {
    /// Keeps a connection on which nothing is under way.
    pub fn put(&self, key: Vec<u8>, connection: Arc<OwnedFd>) {
        *lock(&self.0) = Some(Kept {
            key,
            connection,
            until: Instant::now() + KEPT_FOR,
        });
    }

    /// The connection, if it was kept with the same key and the server has neither closed it nor said anything. The slot
    /// is empty then.
    pub fn take(&self, key: &[u8]) -> Option<Arc<OwnedFd>> {
        let kept = lock(&self.0).take();
        let kept = kept.filter(|kept| kept.key == key && !kept.left().is_zero())?;
        let heard = Events::READABLE.and_if(true, Events::PEER_CLOSED);
        let mut entries = [PollEntry::new(kept.connection.as_fd(), heard)];
        let is_quiet = !poll(&mut entries, Some(Duration::ZERO));
        is_quiet.then_some(kept.connection)
    }

    pub fn clear(&self) {
        drop(lock(&self.0).take());
    }

    /// While a connection is kept, waits until the client sends something, and closes the connection when its time is
    /// over.
    pub(super) fn wait_for(&self, client: BorrowedFd<'_>) {
        let Some(left) = lock(&self.0).as_ref().map(Kept::left) else {
            return;
        };
        let mut entries = [PollEntry::new(client, Events::READABLE)];
        if left.is_zero() || !poll(&mut entries, Some(left)) {
            self.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Keeps a connection whose far end is returned.
    fn keep(slot: &KeptSlot, key: &[u8]) -> UnixStream {
        let (own, server) = UnixStream::pair().unwrap();
        slot.put(key.to_vec(), Arc::new(own.into()));
        server
    }

    #[test]
    fn only_a_quiet_connection_with_the_same_key_is_given_out() {
        let slot = KeptSlot::default();
        let _server = keep(&slot, b"a");
        assert!(slot.take(b"a").is_some());
        assert!(slot.take(b"a").is_none());
        let _server = keep(&slot, b"a");
        assert!(slot.take(b"b").is_none());
        assert!(slot.take(b"a").is_none());
        drop(keep(&slot, b"a"));
        assert!(slot.take(b"a").is_none());
        keep(&slot, b"a").write_all(b"x").unwrap();
        assert!(slot.take(b"a").is_none());
        let _server = keep(&slot, b"a");
        slot.clear();
        assert!(slot.take(b"a").is_none());
    }

    #[test]
    fn its_time_is_over_whatever_the_client_sends() {
        let slot = KeptSlot::default();
        let (client, mut far) = UnixStream::pair().unwrap();
        let _server = keep(&slot, b"a");
        slot.wait_for(client.as_fd());
        assert!(slot.take(b"a").is_none());
        far.write_all(b"G").unwrap();
        let _server = keep(&slot, b"a");
        slot.wait_for(client.as_fd());
        assert!(
            lock(&slot.0).is_some(),
            "the client begins its next request"
        );
        std::thread::sleep(KEPT_FOR);
        slot.wait_for(client.as_fd());
        assert!(lock(&slot.0).is_none(), "and does not go on");
        let _server = keep(&slot, b"a");
        std::thread::sleep(KEPT_FOR);
        assert!(slot.take(b"a").is_none(), "a request that has come late");
    }
}
