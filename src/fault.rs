//! Fault points: named places at which a test has the server panic while something is held there, to see that it is
//! freed (`tests/suite/faults/panics.rs`).
//!
//! Only a build with the feature `fault-points` has them; in any other build [`point`] is nothing. In such a build
//! `SBX_FAULT=NAME` makes the first thread that gets to the point of this name panic, and `SBX_FAULT=NAME:COUNT` the first
//! so many. With `SBX_FAULT=NAME:kill` the server is killed there.

/// Panics here if the environment asks for it.
#[inline]
#[track_caller]
pub fn point(name: &str) {
    #[cfg(feature = "fault-points")]
    armed::pass(name);
    #[cfg(not(feature = "fault-points"))]
    let _ = name;
}

#[cfg(feature = "fault-points")]
mod armed {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use nix::sys::signal::{Signal, raise};

    struct Fault {
        name: String,
        /// How many threads panic there.
        count: usize,
        kills: bool,
        passed: AtomicUsize,
    }

    static FAULT: LazyLock<Option<Fault>> = LazyLock::new(|| {
        let asked = std::env::var("SBX_FAULT").ok()?;
        let (name, count) = asked.split_once(':').unwrap_or((&asked, "1"));
        let kills = count == "kill";
        Some(Fault {
            name: name.to_owned(),
            count: if kills { 1 } else { count.parse().ok()? },
            kills,
            passed: AtomicUsize::new(0),
        })
    });

    #[track_caller]
    pub(super) fn pass(name: &str) {
        let Some(fault) = FAULT.as_ref().filter(|fault| fault.name == name) else {
            return;
        };
        if fault.kills {
            let _ = raise(Signal::SIGKILL);
        }
        let passed = fault.passed.fetch_add(1, Ordering::Relaxed);
        assert!(passed >= fault.count, "the fault point {name}");
    }
}
