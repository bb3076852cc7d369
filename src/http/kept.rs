//! A connection to another server that a client's request leaves to the next one of the same client.
//!
//! It belongs to the client's connection and ends with it, so no client ever gets another's. A moment after the answer
//! it is closed: servers that serve one connection at a time have others to serve.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::sync::{Mutex, lock};
use crate::sys::{Events, PollEntry, poll};

/// How long it waits for the next request.
pub(super) const KEPT_FOR: Duration = Duration::from_millis(200);

/// Where a client's connection keeps it.
#[derive(Default)]
pub struct KeptSlot {
    /// Guards the connection, and what a request must have in common with the last one to get it.
    kept: Mutex<Option<(Vec<u8>, Arc<OwnedFd>)>>,
}

impl KeptSlot {
    /// Keeps a connection on which nothing is under way.
    pub fn put(&self, key: Vec<u8>, connection: Arc<OwnedFd>) {
        *lock(&self.kept) = Some((key, connection));
    }

    /// The connection, if it was kept with the same key and the server has neither closed it nor said anything.
    pub fn take(&self, key: &[u8]) -> Option<Arc<OwnedFd>> {
        let kept = lock(&self.kept).take();
        let (_, connection) = kept.filter(|(own, _)| own == key)?;
        let heard = Events::READABLE.and_if(true, Events::PEER_CLOSED);
        let is_quiet = !poll(
            &mut [PollEntry::new(connection.as_fd(), heard)],
            Some(Duration::ZERO),
        );
        is_quiet.then_some(connection)
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.kept).is_none()
    }

    pub(super) fn clear(&self) {
        *lock(&self.kept) = None;
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn only_a_quiet_connection_with_the_same_key_is_given_out() {
        let slot = KeptSlot::default();
        let kept = |key: &[u8]| {
            let (own, server) = UnixStream::pair().unwrap();
            slot.put(key.to_vec(), Arc::new(own.into()));
            server
        };
        let _server = kept(b"a");
        assert!(slot.take(b"a").is_some());
        assert!(slot.take(b"a").is_none());
        let _server = kept(b"a");
        assert!(slot.take(b"b").is_none());
        assert!(slot.is_empty());
        drop(kept(b"a"));
        assert!(slot.take(b"a").is_none());
        kept(b"a").write_all(b"x").unwrap();
        assert!(slot.take(b"a").is_none());
        let _server = kept(b"a");
        slot.clear();
        assert!(slot.take(b"a").is_none());
    }
}
