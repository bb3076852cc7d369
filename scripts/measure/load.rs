//! Many things at once.

use std::thread;
use std::time::{Duration, Instant};

use super::report::Samples;

/// Lets each worker work in a thread of its own, again and again for a while; how often a second they
/// did it together.
pub fn rate<W: FnMut() + Send>(workers: &mut [W], time: Duration) -> f64 {
    let start = Instant::now();
    let count: u32 = thread::scope(|scope| {
        let threads: Vec<_> = workers
            .iter_mut()
            .map(|work| {
                scope.spawn(move || {
                    let mut count = 0;
                    while start.elapsed() < time {
                        work();
                        count += 1;
                    }
                    count
                })
            })
            .collect();
        threads.into_iter().map(|one| one.join().unwrap()).sum()
    });
    f64::from(count) / start.elapsed().as_secs_f64()
}

/// Lets each worker work so many times in a thread of its own, and adds how long each time took.
pub fn times<W: FnMut() + Send>(workers: &mut [W], count: usize, samples: &mut Samples) {
    thread::scope(|scope| {
        let threads: Vec<_> = workers
            .iter_mut()
            .map(|work| {
                scope.spawn(move || {
                    let mut own = Samples::default();
                    (0..count).for_each(|_| own.time(&mut *work));
                    own
                })
            })
            .collect();
        for thread in threads {
            samples.append(thread.join().unwrap());
        }
    });
}

/// Does something once for each number, each in a thread of its own.
pub fn together(count: usize, work: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        for number in 0..count {
            let work = &work;
            scope.spawn(move || work(number));
        }
    });
}
