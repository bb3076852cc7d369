//! Whether the kernel killed something for lack of memory.
//!
//! The kernel does not say so in the exit status. It counts: `oom_kill` in the `memory.events` of
//! the server's cgroup (v2), in its `memory.oom_control` (v1), else in `/proc/vmstat` for the whole
//! machine. A process that SIGKILL ended, without anybody here having sent it, is put down to a
//! kill that was counted since the last look.

use std::sync::Mutex;

struct Kills {
    /// The file that counts, once it was looked for.
    counter: Option<String>,
    /// The count at the last look.
    seen: u64,
    /// Counted kills that no process was put down to yet.
    unexplained: u64,
}

/// Guards the bookkeeping; the counter is read while it is not held.
static KILLS: Mutex<Kills> = Mutex::new(Kills {
    counter: None,
    seen: 0,
    unexplained: 0,
});

/// Takes the first look, so that older kills do not count.
pub(super) fn begin() {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let counter = counters(&groups)
        .into_iter()
        .find(|path| count(path).is_some());
    let seen = counter.as_deref().and_then(count).unwrap_or(0);
    let mut kills = super::lock(&KILLS);
    kills.counter = counter;
    kills.seen = seen;
}

/// Whether one more kill was counted that explains a death.
pub(super) fn killed_one() -> bool {
    let Some(counter) = super::lock(&KILLS).counter.clone() else {
        return false;
    };
    let count = count(&counter).unwrap_or(0);
    let mut kills = super::lock(&KILLS);
    kills.unexplained += count.saturating_sub(kills.seen);
    kills.seen = kills.seen.max(count);
    let explained = kills.unexplained > 0;
    kills.unexplained = kills.unexplained.saturating_sub(1);
    explained
}

/// Where the count may be, the nearest first, given `/proc/self/cgroup` (cgroups(7)): the server's
/// own group where its path can be seen, else the root of what is mounted, which in a container is
/// the container's group.
fn counters(groups: &str) -> Vec<String> {
    let mut counters = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let path = path.trim_end_matches('/');
        if controllers.is_empty() {
            counters.push(format!("/sys/fs/cgroup{path}/memory.events"));
        } else if controllers
            .split(',')
            .any(|controller| controller == "memory")
        {
            counters.push(format!("/sys/fs/cgroup/memory{path}/memory.oom_control"));
        }
    }
    counters.extend(
        [
            "/sys/fs/cgroup/memory.events",
            "/sys/fs/cgroup/memory/memory.oom_control",
            "/proc/vmstat",
        ]
        .map(str::to_owned),
    );
    counters
}

fn count(path: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_group_comes_first() {
        assert_eq!(counters("0::/a/b\n")[0], "/sys/fs/cgroup/a/b/memory.events");
        assert_eq!(
            counters("3:cpu,memory:/x\n0::/\n")[..2],
            [
                "/sys/fs/cgroup/memory/x/memory.oom_control",
                "/sys/fs/cgroup/memory.events"
            ]
        );
        assert_eq!(counters("garbage").last().unwrap(), "/proc/vmstat");
    }
}
