//! Starts threads.

use std::io;
use std::thread::{self, Builder, JoinHandle, Scope, ScopedJoinHandle};

use super::panics::{essential, joined};
use crate::sys::MemoryCache;

/// The stack of a thread whose work calls no deep code.
pub const SMALL_STACK_BYTES: usize = 256 * 1024;

/// What a thread does.
type Work<'w> = Box<dyn FnOnce() + Send + 'w>;

/// A thread to be started: its name, its stack, and what the server does without it.
pub struct Thread {
    name: &'static str,
    stack_bytes: usize,
    keeps_memory: bool,
    is_essential: bool,
}

impl Thread {
    /// A thread with a small stack and no cache, whose panic ends only its work. Names have up to 15 bytes
    /// (prctl(2), `PR_SET_NAME`).
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            stack_bytes: SMALL_STACK_BYTES,
            keeps_memory: false,
            is_essential: false,
        }
    }

    pub fn stack_bytes(self, stack_bytes: usize) -> Self {
        Self {
            stack_bytes,
            ..self
        }
    }

    /// Keeps freed memory for the next allocation of the thread: for one that allocates all the time.
    pub fn keeping_memory(self) -> Self {
        Self {
            keeps_memory: true,
            ..self
        }
    }

    /// Ends the server if the thread panics: the server cannot go on without it.
    pub fn essential(self) -> Self {
        Self {
            is_essential: true,
            ..self
        }
    }

    /// Starts it.
    ///
    /// # Errors
    /// There is no room for its stack, or there are as many threads as there may be (`EAGAIN`, `pthread_create(3)`).
    pub fn start(self, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
        self.start_boxed(Box::new(work))
    }

    // Not generic: all that the standard library does to start a thread would be in the program once for each caller.
    fn start_boxed(self, work: Work<'static>) -> io::Result<JoinHandle<()>> {
        let (builder, work) = self.prepare(work);
        builder.spawn(work)
    }

    /// Starts it for work that may borrow, and waits until it is done.
    ///
    /// # Errors
    /// As for [`Thread::start`].
    pub fn run(self, work: impl FnOnce() + Send) -> io::Result<()> {
        self.run_boxed(Box::new(work))
    }

    fn run_boxed(self, work: Work<'_>) -> io::Result<()> {
        thread::scope(|scope| {
            joined(self.start_boxed_in(scope, work)?.join());
            Ok(())
        })
    }

    /// Starts it in a scope, which waits for it.
    ///
    /// # Errors
    /// As for [`Thread::start`].
    pub fn start_scoped<'scope>(
        self,
        scope: &'scope Scope<'scope, '_>,
        work: impl FnOnce() + Send + 'scope,
    ) -> io::Result<ScopedJoinHandle<'scope, ()>> {
        self.start_boxed_in(scope, Box::new(work))
    }

    fn start_boxed_in<'scope>(
        self,
        scope: &'scope Scope<'scope, '_>,
        work: Work<'scope>,
    ) -> io::Result<ScopedJoinHandle<'scope, ()>> {
        let (builder, work) = self.prepare(work);
        builder.spawn_scoped(scope, work)
    }

    fn prepare(self, work: Work<'_>) -> (Builder, impl FnOnce() + Send) {
        let Self {
            name,
            stack_bytes,
            keeps_memory,
            is_essential,
        } = self;
        let builder = Builder::new().name(name.to_owned()).stack_size(stack_bytes);
        let work = move || {
            let _cache = keeps_memory.then(MemoryCache::of_this_thread);
            if is_essential {
                essential(work);
            } else {
                work();
            }
        };
        (builder, work)
    }
}
