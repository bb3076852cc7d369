//! What a panic does: it ends the piece of work that it is in, and the rest of the server goes on.
//!
//! A panic is a bug. It unwinds the stack of its thread, so everything that the work held is freed by `Drop`: its
//! slot, its leases, its charges, its process. [`contain`] is where the unwinding ends: around a request, a job of a
//! thread that has several, a task of the supervisor. A thread that has only one piece of work ends.
//!
//! Half a server would hang its clients, so a panic that leaves a thread that everybody depends on ends the server: such
//! threads run in [`essential`].
//!
//! A panic must not unwind through frames that are not Rust's. The functions that the kernel or assembly call are
//! `extern "C"`, and a panic in one aborts its process (the Rust reference, "Unwinding"). The child's side of a clone
//! is such a function: its process is another one, which ends alone. It makes only system calls and has nothing to
//! panic with.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use crate::{logging, sys};

/// The exit status after a panic that ends the server, as Rust programs have it.
const STATUS: i32 = 101;

/// A piece of work has panicked. The log says where.
#[derive(Debug)]
pub struct Panicked(Box<dyn Any + Send>);

impl Panicked {
    /// Goes on with the panic, without another line in the log.
    pub fn resume(self) -> ! {
        resume_unwind(self.0)
    }
}

/// Makes panics log one line with their place. The message is left out because it may quote data of a client, as
/// that of a failed string slice does.
pub fn install() {
    std::panic::set_hook(Box::new(|panic| {
        // Before the stack is unwound.
        sys::prepare_unwinding();
        match panic.location() {
            Some(place) => logging::info(format_args!("panicked at {place}")),
            None => logging::info(format_args!("panicked")),
        }
    }));
}

/// Does a piece of work that may panic. What it shares with others must be consistent at any time, as all of this
/// program is: see [`crate::threads::lock`].
///
/// # Errors
/// It has panicked. What it owned was dropped.
pub fn contain<T>(work: impl FnOnce() -> T) -> Result<T, Panicked> {
    catch_unwind(AssertUnwindSafe(work)).map_err(Panicked)
}

/// Does what the server cannot go on without: a panic in it ends the server.
pub fn essential<T>(work: impl FnOnce() -> T) -> T {
    contain(work).unwrap_or_else(|_| std::process::exit(STATUS))
}

/// What a thread has returned that works for this one. If it has panicked, so does this one.
pub fn joined<T>(joined: thread::Result<T>) -> T {
    joined
        .map_err(Panicked)
        .unwrap_or_else(|panicked| panicked.resume())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_panics_is_an_error_and_frees_what_it_held() {
        let held = std::sync::Arc::new(());
        let theirs = std::sync::Arc::clone(&held);
        let done = contain(move || {
            assert_eq!(std::sync::Arc::strong_count(&theirs), 2);
            resume_unwind(Box::new("as the test wants it"));
        });
        assert!(done.is_err());
        assert_eq!(std::sync::Arc::strong_count(&held), 1);
        assert_eq!(contain(|| 1).ok(), Some(1));
        assert_eq!(essential(|| 2), 2);
    }

    #[test]
    fn a_thread_panics_with_the_one_that_works_for_it() {
        let panicked = thread::spawn(|| resume_unwind(Box::new(()))).join();
        assert!(contain(|| joined::<()>(panicked)).is_err());
        assert_eq!(joined(thread::spawn(|| 3).join()), 3);
    }
}
