//! Who comes first when all want the processor: the server before its commands, and short requests before
//! work that reads much.
//!
//! The kernel makes an autogroup of each session, and divides the processor between the autogroups
//! first; nice values count only within one (sched(7)). A command that starts many sessions would get
//! many shares, and the server one. So the server raises the nice value of its autogroup. Threads keep
//! theirs, but those for searching and hashing: the lowest one for all was measured to make the server
//! slower. A nice value cannot be lowered again, so such work has a thread of its own.

use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use nix::errno::Errno;
use nix::unistd::{getpid, getsid};

use crate::error::{Error, Kind, Result};
use crate::logging;
use crate::sys::make_thread_nice;

/// The nice value of work that reads much for one request.
const BACKGROUND_NICE: i32 = 10;

/// Memory for its stack.
const STACK_BYTES: usize = 256 * 1024;

fn builder() -> Builder {
    Builder::new().stack_size(STACK_BYTES)
}

fn no_thread(error: &std::io::Error) -> Error {
    logging::about(
        "threads",
        format_args!("no thread for a request that reads much: {error}"),
    );
    let text = format!("the machine has no thread left for this request: {error}; try again later");
    Error::new(Kind::NoThreads, text)
}

/// Runs `work` on a thread that gives way to others, and waits for it. On whose behalf this thread acts on
/// files does not hold there.
///
/// # Errors
/// `NoThreads`; `work` did not begin.
pub fn run_in_background(work: &mut (dyn FnMut() + Send)) -> Result<()> {
    let nice_work = || {
        make_thread_nice(BACKGROUND_NICE);
        work();
    };
    std::thread::scope(|scope| {
        let thread = builder().spawn_scoped(scope, nice_work);
        let thread = thread.map_err(|error| no_thread(&error))?;
        thread
            .join()
            .map_err(|panic| std::panic::resume_unwind(panic))
    })
}

/// A thread that gives way to others and waits for its work: there is one before the answer begins.
pub struct BackgroundThread {
    sender: SyncSender<Work>,
    thread: JoinHandle<()>,
}

type Work = Box<dyn FnOnce() + Send>;

impl BackgroundThread {
    /// # Errors
    /// `NoThreads`.
    pub fn start() -> Result<Self> {
        let (sender, receiver) = sync_channel::<Work>(1);
        let thread = builder().spawn(move || {
            if let Ok(work) = receiver.recv() {
                make_thread_nice(BACKGROUND_NICE);
                work();
            }
        });
        let thread = thread.map_err(|error| no_thread(&error))?;
        Ok(Self { sender, thread })
    }

    /// Runs `work`, and waits for it.
    pub fn run(self, work: Work) {
        // It waits for this, so it is there.
        let _ = self.sender.send(work);
        if let Err(panic) = self.thread.join() {
            std::panic::resume_unwind(panic);
        }
    }
}

/// Gives the autogroup of this process the largest share, if the process leads its session and has
/// `CAP_SYS_NICE`. Commands do not inherit it: each has a session of its own.
pub fn raise() {
    // Another leader's session has processes that are not the server's.
    if getsid(None) != Ok(getpid()) {
        return;
    }
    // Without CAP_SYS_ADMIN the kernel takes one such write in 100 ms on the whole machine, and init and
    // the server both make one.
    for _ in 0..5 {
        let written = std::fs::write("/proc/self/autogroup", "-20");
        let is_early = |error: std::io::Error| error.raw_os_error() == Some(Errno::EAGAIN as i32);
        if !written.is_err_and(is_early) {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
