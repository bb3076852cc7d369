//! Threads that do one job each, and then wait a moment for the next.
//!
//! Starting a thread and ending it costs as much as the short jobs that connections often are. A thread that waits costs
//! its stack, of which a few pages are touched. A thread goes on after a job that has panicked.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::Thread;
use crate::threads::lock::{Condvar, Mutex, lock};
use crate::threads::panics::contain;

/// How long a thread waits for a job.
const LINGER: Duration = Duration::from_secs(1);

/// Most threads that wait.
const MOST_IDLE: usize = 4;

/// Threads for jobs of one kind.
pub struct ThreadPool<J>(Arc<Shared<J>>);

struct Shared<J> {
    name: &'static str,
    linger: Duration,
    work: Box<dyn Fn(J) + Send + Sync>,
    /// Guards the jobs that no thread has taken yet, and how many threads wait for one.
    queue: Mutex<Queue<J>>,
    has_changed: Condvar,
}

struct Queue<J> {
    jobs: VecDeque<J>,
    idle: usize,
    is_closed: bool,
}

impl<J: Send + 'static> ThreadPool<J> {
    /// Threads with this name, which do `work`.
    pub fn new(name: &'static str, work: impl Fn(J) + Send + Sync + 'static) -> Self {
        Self::with_linger(LINGER, name, work)
    }

    fn with_linger(
        linger: Duration,
        name: &'static str,
        work: impl Fn(J) + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Shared {
            name,
            linger,
            work: Box::new(work),
            queue: Mutex::new(Queue {
                jobs: VecDeque::new(),
                idle: 0,
                is_closed: false,
            }),
            has_changed: Condvar::new(),
        }))
    }

    /// Has a thread do a job: one that waits, or a new one. A new one inherits what is the calling thread's own, such as
    /// its file system uid.
    ///
    /// # Errors
    /// No thread waits, and none can be started. The job is given back.
    pub fn give(&self, job: J) -> Result<(), (J, io::Error)> {
        let mut queue = lock(&self.0.queue);
        queue.jobs.push_back(job);
        if queue.idle >= queue.jobs.len() {
            drop(queue);
            self.0.has_changed.notify_one();
            return Ok(());
        }
        drop(queue);
        let shared = Arc::clone(&self.0);
        let thread = Thread::new(self.0.name).keeping_memory();
        let thread = thread.start(move || shared.run());
        let Err(error) = thread else {
            return Ok(());
        };
        // A thread that has become free meanwhile may have taken it.
        match lock(&self.0.queue).jobs.pop_back() {
            Some(job) => Err((job, error)),
            None => Ok(()),
        }
    }
}

impl<J> Shared<J> {
    fn run(&self) {
        loop {
            let job = {
                let mut queue = lock(&self.queue);
                if queue.jobs.is_empty() && queue.idle < MOST_IDLE {
                    queue.idle += 1;
                    let waits = |queue: &mut Queue<J>| queue.jobs.is_empty() && !queue.is_closed;
                    (queue, _) = self.has_changed.wait_while_for(queue, self.linger, waits);
                    queue.idle -= 1;
                }
                queue.jobs.pop_front()
            };
            match job {
                // The panic was logged, and who waits for the job notices by what it has dropped.
                Some(job) => drop(contain(|| (self.work)(job))),
                None => return,
            }
        }
    }
}

impl<J> Drop for ThreadPool<J> {
    fn drop(&mut self) {
        lock(&self.0.queue).is_closed = true;
        self.0.has_changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// Longer than a test takes.
    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn jobs_are_done_at_the_same_time_and_threads_are_kept() {
        let (done, results) = mpsc::channel();
        let (start, waiting) = mpsc::sync_channel::<()>(0);
        let waiting = Mutex::new(waiting);
        let pool = ThreadPool::with_linger(LONG, "pool", move |number: usize| {
            done.send((number, thread::current().id())).unwrap();
            if number < 8 {
                lock(&waiting).recv().unwrap();
            }
        });
        for number in 0..8 {
            pool.give(number).unwrap();
        }
        let threads: HashSet<_> = (0..8).map(|_| results.recv().unwrap().1).collect();
        for _ in 0..8 {
            start.send(()).unwrap();
        }
        while lock(&pool.0.queue).idle < MOST_IDLE {
            thread::yield_now();
        }
        pool.give(8).unwrap();
        let (number, thread) = results.recv().unwrap();
        assert_eq!(number, 8);
        assert!(threads.contains(&thread));
        assert_eq!(threads.len(), 8);
    }

    #[test]
    fn a_thread_goes_on_after_a_job_that_has_panicked() {
        let (done, results) = mpsc::channel();
        let pool = ThreadPool::with_linger(LONG, "pool", move |panics: bool| {
            done.send(thread::current().id()).unwrap();
            if panics {
                std::panic::resume_unwind(Box::new("as the test wants it"));
            }
        });
        pool.give(true).unwrap();
        let first = results.recv().unwrap();
        while lock(&pool.0.queue).idle == 0 {
            thread::yield_now();
        }
        pool.give(false).unwrap();
        assert_eq!(results.recv().unwrap(), first);
    }

    #[test]
    fn threads_end_with_their_pool() {
        let (alive, dropped) = mpsc::channel::<()>();
        let (done, results) = mpsc::channel();
        let pool = ThreadPool::with_linger(LONG, "pool", move |()| {
            let _ = &alive;
            done.send(()).unwrap();
        });
        pool.give(()).unwrap();
        results.recv().unwrap();
        drop(pool);
        assert!(dropped.recv().is_err());
    }
}
