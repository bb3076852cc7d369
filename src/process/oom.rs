//! Whether the kernel killed something for lack of memory.
//!
//! The kernel does not say so in the exit status. It counts: `oom_kill` in the cgroup's
//! `memory.events` (cgroup v2), in `memory.oom_control` (v1), else in `/proc/vmstat` for the whole
//! machine. A process that SIGKILL ended, without anybody here having sent it, is put down to a
//! kill that was counted since the last look.

use std::sync::Mutex;

const COUNTERS: [&str; 3] = [
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",
    "/proc/vmstat",
];

struct Kills {
    /// The counter at the last look; `None` before the first.
    seen: Option<u64>,
    /// Counted kills that no process was put down to yet.
    unexplained: u64,
}

/// Guards the bookkeeping; the counter is read before it is taken.
static KILLS: Mutex<Kills> = Mutex::new(Kills {
    seen: None,
    unexplained: 0,
});

/// Takes the first look, so that older kills do not count.
pub(super) fn begin() {
    let count = count();
    super::lock(&KILLS).seen = Some(count);
}

/// Whether one more kill was counted that explains a death.
pub(super) fn killed_one() -> bool {
    let count = count();
    let mut kills = super::lock(&KILLS);
    let seen = kills.seen.unwrap_or(count);
    kills.seen = Some(count.max(seen));
    kills.unexplained += count.saturating_sub(seen);
    let explained = kills.unexplained > 0;
    kills.unexplained = kills.unexplained.saturating_sub(1);
    explained
}

fn count() -> u64 {
    COUNTERS
        .iter()
        .find_map(|path| {
            let text = std::fs::read_to_string(path).ok()?;
            text.lines()
                .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
        })
        .unwrap_or(0)
}
