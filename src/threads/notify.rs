//! Wakes threads that wait for something to happen and poll their clients meanwhile.
//!
//! Whoever waits has an eventfd of its own, so who makes things happen never waits for who follows them.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::client::{Client, Disconnected, KeepAlive};
use crate::sys::{Events, PollEntry, poll};
use crate::threads::lock::{Mutex, lock};

/// How often a listener without an eventfd looks by itself.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What listeners are woken by. The lock guards the list of their eventfds.
#[derive(Default)]
pub struct Notifier(Mutex<Vec<Arc<EventFd>>>);

impl Notifier {
    pub fn notify(&self) {
        for listener in lock(&self.0).iter() {
            // Fails only if the counter is full; the listener is awake then.
            let _ = listener.write(1);
        }
    }

    /// Listens until the value is dropped.
    pub fn listen(self: &Arc<Self>) -> Listener {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let event = event.ok().map(Arc::new);
        lock(&self.0).extend(event.clone());
        Listener {
            notifier: Arc::clone(self),
            event,
        }
    }
}

/// Becomes readable when there is a notification, and stays so until it is cleared.
pub struct Listener {
    notifier: Arc<Notifier>,
    /// `None` if the server has no descriptor left.
    event: Option<Arc<EventFd>>,
}

impl Listener {
    /// Returns after a notification, at `until`, or after a ping.
    ///
    /// # Errors
    /// The client disconnected.
    pub fn wait(
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

    /// Returns after a notification, or when `limit` has passed, without looking at a client.
    pub fn wait_alone(&self, limit: Duration) {
        let pause = limit.min(self.interval().unwrap_or(limit));
        let mut entries = [PollEntry::new(self.descriptor(), Events::READABLE)];
        poll(&mut entries, Some(pause));
        self.clear();
    }

    /// What to poll beside other descriptors.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.event.as_ref().map(|event| event.as_fd())
    }

    /// How long to sleep at most before looking again; `None` means no limit.
    pub fn interval(&self) -> Option<Duration> {
        self.event.is_none().then_some(LOOK_EVERY)
    }

    /// Forgets the notification.
    pub fn clear(&self) {
        if let Some(event) = &self.event {
            let _ = event.read();
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(own) = &self.event {
            lock(&self.notifier.0).retain(|event| !Arc::ptr_eq(event, own));
        }
    }
}
