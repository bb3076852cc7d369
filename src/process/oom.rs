//! Whether the kernel killed a process because memory ran out.
//!
//! The exit status does not tell. The kernel counts such kills: `oom_kill` in the `memory.events` of
//! the server's cgroup (v2), in its `memory.oom_control` (v1), else in `/proc/vmstat` for the whole
//! machine. A SIGKILL that the server did not send is attributed to a kill that was counted since the
//! last read.

use std::sync::LazyLock;

use crate::threads::lock::{Mutex, lock};

struct Kills {
    /// The file with the count; `None` if no file has one.
    counter: Option<String>,
    /// The count at the last read.
    seen: u64,
    /// Counted kills that are not attributed to a process.
    unexplained: u64,
}

/// Guards the bookkeeping; the counter is read while it is not held.
static KILLS: LazyLock<Mutex<Kills>> = LazyLock::new(|| {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let found = counters(&groups)
        .into_iter()
        .find_map(|path| Some((count(&path)?, path)));
    let (seen, counter) = found.unzip();
    Mutex::new(Kills {
        counter,
        seen: seen.unwrap_or(0),
        unexplained: 0,
    })
});

/// Reads the count before the first command starts, so that older kills do not count.
pub(super) fn begin() {
    LazyLock::force(&KILLS);
}

/// Whether a kill was counted that explains one more death.
pub(super) fn killed_one() -> bool {
    let Some(counter) = lock(&KILLS).counter.clone() else {
        return false;
    };
    let count = count(&counter).unwrap_or(0);
    let mut kills = lock(&KILLS);
    kills.unexplained += count.saturating_sub(kills.seen);
    kills.seen = kills.seen.max(count);
    let explained = kills.unexplained > 0;
    kills.unexplained = kills.unexplained.saturating_sub(1);
    explained
}

/// Files that may have the count, given `/proc/self/cgroup` (cgroups(7)): the server's own group if its
/// path is visible, else the root of the mounted hierarchy, which in a container is the container's
/// group.
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
