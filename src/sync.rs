//! Locks that a panic elsewhere may have poisoned, and counted places.
//!
//! Every critical section of this program leaves its data consistent, also when it panics, so a
//! poisoned lock is used like any other.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Locks `mutex`.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits on `condvar` until `blocked` is false.
pub fn wait_while<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    blocked: impl FnMut(&mut T) -> bool,
) -> MutexGuard<'a, T> {
    let guard = condvar.wait_while(guard, blocked);
    guard.unwrap_or_else(PoisonError::into_inner)
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
