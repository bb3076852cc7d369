//! A mutual exclusion that can be released from outside of its guard, and a condition variable for it.
//!
//! The program does not unwind: a thread that panics stops where it stands, and its guards are never dropped. So
//! each thread knows the locks that it holds, and [`stop_thread`] releases them. The locks of `std` cannot do that.
//! Both are words that futex(2) waits on.

use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::libc::{self, c_int};
use nix::sys::time::TimeSpec;

pub(super) const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and others may wait for it.
const CONTENDED: u32 = 2;

/// How often to look before sleeping: most locks are held for less than a system call takes.
const SPINS: u32 = 100;

/// Most locks that a thread holds at a time.
const NESTED: usize = 8;

thread_local! {
    /// What this thread holds. Null is nothing.
    static OWN: [Cell<*const AtomicU32>; NESTED] = const { [const { Cell::new(ptr::null()) }; NESTED] };
}

/// Replaces one pointer of [`OWN`]. Nothing is remembered beyond [`NESTED`] locks, or while the thread ends.
fn replace_own(from: *const AtomicU32, to: *const AtomicU32) {
    let _ = OWN.try_with(|own| {
        if let Some(cell) = own.iter().find(|cell| cell.get() == from) {
            cell.set(to);
        }
    });
}

/// Stops this thread for good. What it holds is released; what it guards must be consistent at any time.
pub fn stop_thread() -> ! {
    release_all();
    loop {
        std::thread::park();
    }
}

/// Releases the locks that this thread holds. It must not use or drop any of their guards again.
fn release_all() {
    let _ = OWN.try_with(|own| {
        for cell in own {
            let word = cell.replace(ptr::null());
            // SAFETY: a guard that was not dropped borrows the lock that has this word.
            if let Some(word) = unsafe { word.as_ref() } {
                release(word);
            }
        }
    });
}

/// Data that one thread at a time may use. It has no poison: see [`crate::sync`].
#[derive(Default)]
pub struct Mutex<T> {
    word: AtomicU32,
    data: UnsafeCell<T>,
}

// SAFETY: only the thread that holds the lock reaches the data, so sharing the lock sends the data.
unsafe impl<T: Send> Sync for Mutex<T> {}

/// A lock that is held until this is dropped.
pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    /// The thread that locks is the one that releases.
    _on_this_thread: PhantomData<*const ()>,
}

// SAFETY: a shared guard gives a shared reference to the data.
unsafe impl<T: Sync> Sync for MutexGuard<'_, T> {}

impl<T> Mutex<T> {
    /// Not held.
    pub const fn new(data: T) -> Self {
        Self {
            word: AtomicU32::new(FREE),
            data: UnsafeCell::new(data),
        }
    }

    /// Takes it unless another thread holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let (set, fetch) = (Ordering::Acquire, Ordering::Relaxed);
        let taken = self.word.compare_exchange(FREE, HELD, set, fetch);
        taken.ok().map(|_| self.taken())
    }

    /// Waits until no other thread holds it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        acquire(&self.word);
        self.taken()
    }

    /// The guard of this thread, which has just taken the lock.
    fn taken(&self) -> MutexGuard<'_, T> {
        replace_own(ptr::null(), &raw const self.word);
        MutexGuard {
            mutex: self,
            _on_this_thread: PhantomData,
        }
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this thread holds the lock.
        unsafe { &*self.mutex.data.get() }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread holds the lock, and the guard is borrowed uniquely.
        unsafe { &mut *self.mutex.data.get() }
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        replace_own(&raw const self.mutex.word, ptr::null());
        release(&self.mutex.word);
    }
}

/// Threads wait here for a change of what a [`Mutex`] guards.
#[derive(Default)]
pub struct Condvar(AtomicU32);

impl Condvar {
    /// Nobody waits.
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Releases the lock, waits for a notification, at most for `limit`, and takes the lock again. It may return
    /// without either.
    pub fn wait_for<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        limit: Option<Duration>,
    ) -> MutexGuard<'a, T> {
        let mutex = guard.mutex;
        // A notification from here on changes the number, and the wait ends at once.
        let seen = self.0.load(Ordering::Relaxed);
        drop(guard);
        futex_wait(&self.0, seen, limit);
        mutex.lock()
    }

    /// Waits as long as `blocked`.
    pub fn wait_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        mut blocked: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        while blocked(&mut guard) {
            guard = self.wait_for(guard, None);
        }
        guard
    }

    /// Waits as long as `blocked`, at most for `limit`. False if it still is.
    pub fn wait_while_for<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        limit: Duration,
        mut blocked: impl FnMut(&mut T) -> bool,
    ) -> (MutexGuard<'a, T>, bool) {
        let begun = Instant::now();
        while blocked(&mut guard) {
            let left = limit.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return (guard, false);
            }
            guard = self.wait_for(guard, Some(left));
        }
        (guard, true)
    }

    /// Wakes one of those who wait.
    pub fn notify_one(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
        futex_wake(&self.0, 1);
    }

    /// Wakes all who wait.
    pub fn notify_all(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
        futex_wake(&self.0, c_int::MAX);
    }
}

/// Takes a lock that is only a word. [`stop_thread`] knows nothing of it.
#[inline]
pub(super) fn acquire(word: &AtomicU32) {
    let (set, fetch) = (Ordering::Acquire, Ordering::Relaxed);
    if word.compare_exchange(FREE, HELD, set, fetch).is_err() {
        acquire_contended(word);
    }
}

#[cold]
fn acquire_contended(word: &AtomicU32) {
    let (set, fetch) = (Ordering::Acquire, Ordering::Relaxed);
    for _ in 0..SPINS {
        match word.load(fetch) {
            FREE if word.compare_exchange(FREE, HELD, set, fetch).is_ok() => return,
            CONTENDED => break,
            _ => std::hint::spin_loop(),
        }
    }
    // Whoever has waited cannot know that it was the only one.
    while word.swap(CONTENDED, set) != FREE {
        futex_wait(word, CONTENDED, None);
    }
}

#[inline]
pub(super) fn release(word: &AtomicU32) {
    if word.swap(FREE, Ordering::Release) == CONTENDED {
        futex_wake(word, 1);
    }
}

/// Sleeps while the word is `value`, at most for `limit`; it may return early (`futex(2)`, `FUTEX_WAIT`).
fn futex_wait(word: &AtomicU32, value: u32, limit: Option<Duration>) {
    let limit = limit.map(|limit| *TimeSpec::from_duration(limit).as_ref());
    let limit: *const libc::timespec = limit.as_ref().map_or(ptr::null(), ptr::from_ref);
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word and the time outlive the call. All errors mean that the caller looks again.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, limit) };
}

fn futex_wake(word: &AtomicU32, most: c_int) {
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel reads nothing at the address; it may even be gone.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, most) };
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn one_thread_at_a_time() {
        let mutex = Mutex::new(0_u64);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let mut number = mutex.lock();
                        let read = *number;
                        if read.is_multiple_of(1000) {
                            thread::yield_now();
                        }
                        *number = read + 1;
                    }
                });
            }
        });
        assert_eq!(*mutex.lock(), 160_000);
    }

    #[test]
    fn whoever_waits_hears_of_a_change() {
        let state = Mutex::new(0);
        let changed = Condvar::new();
        thread::scope(|scope| {
            for own in 0..4 {
                let (state, changed) = (&state, &changed);
                scope.spawn(move || {
                    for round in 0..500 {
                        let turn = round * 4 + own;
                        let mut guard = changed.wait_while(state.lock(), |state| *state != turn);
                        *guard += 1;
                        drop(guard);
                        changed.notify_all();
                    }
                });
            }
        });
        assert_eq!(*state.lock(), 2000);
    }

    #[test]
    fn a_wait_ends_in_time() {
        let (mutex, condvar) = (Mutex::new(()), Condvar::new());
        let limit = Duration::from_millis(30);
        let begun = Instant::now();
        let (guard, in_time) = condvar.wait_while_for(mutex.lock(), limit, |()| true);
        assert!(!in_time && begun.elapsed() >= limit);
        let (_guard, in_time) = condvar.wait_while_for(guard, limit, |()| false);
        assert!(in_time);
    }

    #[test]
    fn a_thread_that_stops_releases_what_it_holds_and_no_more() {
        let locks: Arc<[Mutex<u32>; 3]> = Arc::new([const { Mutex::new(0) }; 3]);
        let theirs = Arc::clone(&locks);
        let (done, is_done) = mpsc::channel();
        // It never ends, and is there until the test program is.
        thread::spawn(move || {
            let (first, _second) = (theirs[0].lock(), theirs[1].lock());
            // Not in the order in which they were taken.
            drop(first);
            let mut again = theirs[0].lock();
            *again = 7;
            done.send(()).unwrap();
            stop_thread();
        });
        is_done.recv().unwrap();
        let own = locks[2].lock();
        assert_eq!((*locks[0].lock(), *locks[1].lock(), *own), (7, 0, 0));
        // What another thread holds is its own matter.
        assert_eq!(locks[2].word.load(Ordering::Relaxed), HELD);
    }
}
