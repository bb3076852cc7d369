//! Locks and counted places.
//!
//! Every critical section of this program leaves its data consistent, also when it panics, so a lock that a
//! thread held when it [panicked](crate::panics) is used like any other.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use crate::sys::{Condvar, Mutex, MutexGuard};

/// Locks `mutex`.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

/// One of a limited number of places, counted until it is dropped.
pub struct CountedPlace(Arc<AtomicUsize>);

impl CountedPlace {
    /// Takes a place; `None` if `most` are taken.
    pub fn take(count: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let place = Self(Arc::clone(count));
        (count.fetch_add(1, Ordering::Relaxed) < most).then_some(place)
    }
}

impl Drop for CountedPlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
