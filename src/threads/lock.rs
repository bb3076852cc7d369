//! Locks and counted places.
//!
//! A lock that a thread held when it [panicked](crate::threads::panics) is used like any other: what `std` calls poison is
//! ignored. Critical sections are short, and change their data by steps that each leave it usable; a server that
//! refused the data from then on would fail more requests than one that goes on. That is decided here, so all
//! locks are taken by these functions, but those of `sys` and of the log, which call nothing else.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, TryLockError};
use std::time::Duration;

pub use std::sync::Mutex;

use super::order::Held;

/// A lock that is held until this is dropped.
pub struct MutexGuard<'a, T> {
    guard: std::sync::MutexGuard<'a, T>,
    held: Held,
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// Waits until no other thread holds `mutex`, and takes it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    let held = Held::in_order::<T>();
    let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
    MutexGuard { guard, held }
}

/// Takes `mutex` unless another thread holds it.
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    let guard = match mutex.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return None,
    };
    // Who does not wait may take locks in any order.
    let held = Held::in_any_order::<T>();
    Some(MutexGuard { guard, held })
}

/// Threads wait here for a change of what a [`Mutex`] guards.
#[derive(Default)]
pub struct Condvar(std::sync::Condvar);

impl Condvar {
    /// Nobody waits.
    pub const fn new() -> Self {
        Self(std::sync::Condvar::new())
    }

    /// Releases the lock, waits for a notification, at most for `limit`, and takes the lock again. It may return
    /// without either.
    pub fn wait_for<'a, T>(
        &self,
        MutexGuard { guard, held }: MutexGuard<'a, T>,
        limit: Option<Duration>,
    ) -> MutexGuard<'a, T> {
        let guard = match limit {
            None => self.0.wait(guard).unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                let waited = self.0.wait_timeout(guard, limit);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        MutexGuard { guard, held }
    }

    /// Waits as long as `blocked`.
    pub fn wait_while<'a, T>(
        &self,
        MutexGuard { guard, held }: MutexGuard<'a, T>,
        blocked: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        let waited = self.0.wait_while(guard, blocked);
        let guard = waited.unwrap_or_else(PoisonError::into_inner);
        MutexGuard { guard, held }
    }

    /// Waits as long as `blocked`, at most for `limit`. False if it still is.
    pub fn wait_while_for<'a, T>(
        &self,
        MutexGuard { guard, held }: MutexGuard<'a, T>,
        limit: Duration,
        blocked: impl FnMut(&mut T) -> bool,
    ) -> (MutexGuard<'a, T>, bool) {
        let waited = self.0.wait_timeout_while(guard, limit, blocked);
        let (guard, result) = waited.unwrap_or_else(PoisonError::into_inner);
        (MutexGuard { guard, held }, !result.timed_out())
    }

    /// Wakes one of those who wait.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all who wait.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
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

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_lock_that_was_held_in_a_panic_is_used_like_any_other() {
        let (shared, changed) = (Arc::new(Mutex::new(1)), Arc::new(Condvar::new()));
        let (theirs, theirs_changed) = (Arc::clone(&shared), Arc::clone(&changed));
        let panicked = thread::spawn(move || {
            let mut number = lock(&theirs);
            *number = 2;
            theirs_changed.notify_all();
            std::panic::resume_unwind(Box::new(()));
        });
        let number = changed.wait_while(lock(&shared), |number| *number == 1);
        assert_eq!(*number, 2);
        drop(number);
        assert!(panicked.join().is_err());
        assert!(shared.is_poisoned());
        assert_eq!(try_lock(&shared).as_deref(), Some(&2));
        let (number, has_changed) =
            changed.wait_while_for(lock(&shared), Duration::from_millis(1), |_| true);
        assert_eq!((*number, has_changed), (2, false));
        assert!(try_lock(&shared).is_none());
        let number = changed.wait_for(number, Some(Duration::from_millis(1)));
        assert_eq!(*number, 2);
    }
}
