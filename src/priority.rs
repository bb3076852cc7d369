//! The server's place before its commands when all of them want the processor.
//!
//! The kernel makes an autogroup of each session, and divides the processor between the autogroups
//! first; nice values count only within one (sched(7)). A command that starts many sessions would get
//! many shares, and the server one. So the server raises the nice value of its autogroup. Threads keep
//! theirs: the lowest one for them as well was measured to make the server slower.

use std::time::Duration;

use nix::errno::Errno;
use nix::unistd::{getpid, getsid};

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
