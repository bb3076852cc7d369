//! Places for work that is as large as it is: few have one at a time, and the others wait.

use crate::client::{Interrupt, LOOK_EVERY, Stopped};
use crate::threads::lock::{Condvar, Mutex, lock};

/// A number of places. Whoever waits for one sleeps.
pub struct Places {
    /// Guards how many nobody has.
    free: Mutex<usize>,
    is_given_back: Condvar,
}

/// One of them, given back when it is dropped.
pub struct Place<'a>(&'a Places);

impl Places {
    /// So many, which nobody has.
    pub const fn new(count: usize) -> Self {
        Self {
            free: Mutex::new(count),
            is_given_back: Condvar::new(),
        }
    }

    /// Waits for a place.
    ///
    /// # Errors
    /// It was interrupted.
    pub fn take(&self, interrupt: &mut dyn Interrupt) -> Result<Place<'_>, Stopped> {
        loop {
            interrupt.check()?;
            let (mut free, is_free) =
                self.is_given_back
                    .wait_while_for(lock(&self.free), LOOK_EVERY, |free| *free == 0);
            if is_free {
                *free -= 1;
                return Ok(Place(self));
            }
        }
    }
}

impl Default for Places {
    /// A single one.
    fn default() -> Self {
        Self::new(1)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *lock(&self.0.free) += 1;
        self.0.is_given_back.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::client::Uninterrupted;

    /// A client that leaves after so many looks.
    struct Leaves(usize);

    impl Interrupt for Leaves {
        fn check(&mut self) -> Result<(), Stopped> {
            self.0 = self.0.checked_sub(1).ok_or(Stopped::Disconnected)?;
            Ok(())
        }
    }

    #[test]
    fn no_more_than_there_are_places_work_and_all_get_one() {
        let places = Places::new(2);
        let working = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..20 {
                scope.spawn(|| {
                    let _place = places.take(&mut Uninterrupted).unwrap();
                    assert!(working.fetch_add(1, Ordering::SeqCst) < 2);
                    std::thread::yield_now();
                    working.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        assert_eq!(*lock(&places.free), 2);
    }

    #[test]
    fn a_client_that_leaves_waits_no_longer_and_takes_no_place() {
        let places = Places::default();
        let held = places.take(&mut Uninterrupted).unwrap();
        for looks in [0, 1] {
            assert!(matches!(
                places.take(&mut Leaves(looks)),
                Err(Stopped::Disconnected)
            ));
        }
        drop(held);
        assert!(places.take(&mut Leaves(1)).is_ok());
    }
}
