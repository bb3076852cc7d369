//! Connections that end together, whoever has their other ends.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Weak};

use nix::sys::socket::{Shutdown, shutdown};

use crate::threads::lock::{Mutex, lock};

/// The connections of one run of a workspace. They are not kept open by this.
pub struct Connections<T> {
    /// `None` when they have ended; guards the list alone.
    open: Mutex<Option<Vec<Weak<T>>>>,
}

impl<T: AsFd> Connections<T> {
    pub fn new() -> Self {
        Self {
            open: Mutex::new(Some(Vec::new())),
        }
    }

    /// Notes one more. False if they have ended: then this one is for nobody.
    pub fn add(&self, connection: &Arc<T>) -> bool {
        let mut open = lock(&self.open);
        if let Some(open) = &mut *open {
            open.retain(|known| known.strong_count() > 0);
            open.push(Arc::downgrade(connection));
        }
        open.is_some()
    }

    /// Ends all of them for good.
    pub fn end(&self) {
        let ended = lock(&self.open).take();
        for connection in ended.iter().flatten().filter_map(Weak::upgrade) {
            let _ = shutdown(connection.as_fd().as_raw_fd(), Shutdown::Both);
        }
    }
}
