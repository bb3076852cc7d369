//! Wakes threads that wait for something to happen and poll their clients meanwhile.
//!
//! Whoever waits has an eventfd of its own, so who makes things happen never waits for who follows them. One that was notified
//! and has not looked yet is not notified again: a thousand listeners cost a process that writes byte by byte no thousand
//! system calls for each.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::client::{Client, Disconnected, KeepAlive};
use crate::sys::{Events, PollEntry, poll};
use crate::threads::lock::{Mutex, lock};
use crate::threads::priority::PacedRequest;

/// How often a listener without an eventfd looks by itself.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What listeners are woken by. The lock guards the list of their bells.
#[derive(Default)]
pub struct Notifier(Mutex<Vec<Arc<Bell>>>);

/// What wakes one listener.
struct Bell {
    event: EventFd,
    /// Whether the listener was notified since it looked last.
    has_rung: AtomicBool,
}

impl Bell {
    fn ring(&self) {
        if !self.has_rung.swap(true, Ordering::AcqRel) {
            let _ = self.event.write(1);
        }
    }

    /// What has happened by now is seen by who looks afterwards; what happens from now on rings again.
    fn silence(&self) {
        let _ = self.event.read();
        self.has_rung.swap(false, Ordering::AcqRel);
    }
}

impl Notifier {
    pub fn notify(&self) {
        lock(&self.0).iter().for_each(|bell| bell.ring());
    }

    /// Listens until the value is dropped.
    pub fn listen(self: &Arc<Self>) -> Listener {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let bell = event.ok().map(|event| {
            let has_rung = AtomicBool::new(false);
            Arc::new(Bell { event, has_rung })
        });
        lock(&self.0).extend(bell.clone());
        Listener {
            notifier: Arc::clone(self),
            bell,
        }
    }
}

/// Becomes readable when there is a notification, and stays so until it is cleared.
pub struct Listener {
    notifier: Arc<Notifier>,
    /// `None` if the server has no descriptor left.
    bell: Option<Arc<Bell>>,
}

impl Listener {
    /// Returns after a notification, at `until`, or after a ping. It is a step of a request that is paced: what is waited for can
    /// happen all the time.
    ///
    /// # Errors
    /// The client disconnected.
    pub fn wait(
        &self,
        keep_alive: &mut KeepAlive,
        client: &mut dyn Client,
        until: Option<Instant>,
    ) -> Result<(), Disconnected> {
        PacedRequest::step();
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
        self.bell.as_ref().map(|bell| bell.event.as_fd())
    }

    /// How long to sleep at most before looking again; `None` means no limit.
    pub fn interval(&self) -> Option<Duration> {
        self.bell.is_none().then_some(LOOK_EVERY)
    }

    /// Forgets the notification.
    pub fn clear(&self) {
        if let Some(bell) = &self.bell {
            bell.silence();
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(own) = &self.bell {
            lock(&self.notifier.0).retain(|bell| !Arc::ptr_eq(bell, own));
        }
    }
}
