//! Reading /proc (proc(5)): what the kernel tells about processes and the machine.
//!
//! In a container /proc may be missing or show another pid namespace, and any process may be gone
//! between two looks: everything here is optional.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;

use crate::sys::{self, Pid};

/// Part of what `/proc/<pid>/stat` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// It has ended and was not reaped.
    pub zombie: bool,
    /// A signal or a tracer has stopped it.
    pub stopped: bool,
    /// Its parent.
    pub parent: Pid,
    /// Its process group.
    pub group: Pid,
    /// Its session.
    pub session: Pid,
    /// Processor time it has used, in clock ticks.
    pub ticks: u64,
    /// When it was started, in clock ticks since boot: with its number, what tells it from all others.
    pub start_time: u64,
    /// Memory it has in RAM, in pages; what is shared counts for everybody who has it.
    pub resident_pages: u64,
}

/// What a process is doing; none if there is no such process.
pub fn stat(pid: Pid, buffer: &mut Vec<u8>) -> Option<Stat> {
    buffer.clear();
    File::open(format!("/proc/{pid}/stat"))
        .ok()?
        .read_to_end(buffer)
        .ok()?;
    parse(buffer)
}

/// The processes that /proc shows, if it shows those of this process's own namespace.
pub fn processes() -> impl Iterator<Item = Pid> {
    let entries = std::fs::read_dir("/proc").ok();
    entries
        .filter(|_| sys::proc_shows_this_namespace())
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// The number that was given to a process last: they go upwards, and begin anew at the end.
pub fn newest_number() -> Option<Pid> {
    let load = std::fs::read_to_string("/proc/loadavg").ok()?;
    load.split_whitespace().last()?.parse().ok()
}

/// The name in parentheses may hold anything, parentheses and spaces too: fields begin after the last.
fn parse(stat: &[u8]) -> Option<Stat> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let field = |index: usize| fields.get(index).copied();
    let number = |index| field(index)?.parse::<u64>().ok();
    let pid = |index| field(index)?.parse::<Pid>().ok();
    Some(Stat {
        // A process whose first thread has exited looks like one, and lives on in its others.
        zombie: matches!(field(0)?, "Z" | "X") && matches!(field(17)?, "0" | "1"),
        stopped: matches!(field(0)?, "T" | "t"),
        parent: pid(1)?,
        group: pid(2)?,
        session: pid(3)?,
        ticks: number(11)? + number(12)?,
        start_time: number(19)?,
        resident_pages: number(21)?,
    })
}

/// What the processes of one user take at the moment.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct UserUse {
    /// How many there are.
    pub processes: u64,
    /// Processor time that those have used, in seconds.
    pub cpu_seconds: f64,
    /// Their memory in RAM, in bytes; what several share counts for each.
    pub memory_bytes: u64,
}

/// What the processes of every user take.
pub fn use_by_user() -> HashMap<libc::uid_t, UserUse> {
    let (ticks_a_second, page_bytes) = (sys::clock_ticks(), sys::page_bytes());
    let mut users: HashMap<_, UserUse> = HashMap::new();
    let mut buffer = Vec::new();
    for pid in processes() {
        let Some(uid) = real_user(pid) else { continue };
        let Some(stat) = stat(pid, &mut buffer) else {
            continue;
        };
        let user = users.entry(uid).or_default();
        user.processes += 1;
        user.cpu_seconds += seconds(stat.ticks, ticks_a_second);
        user.memory_bytes += stat.resident_pages * page_bytes;
    }
    users
}

/// Who a process really is. Not the owner of its directory in /proc: that is root for a process that
/// is not dumpable.
pub fn real_user(pid: Pid) -> Option<libc::uid_t> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// Most processes and threads that the server's container may have at once, if that is limited
/// (Documentation/admin-guide/cgroup-v2.rst, `pids.max`).
pub fn process_limit() -> Option<u64> {
    ["/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"]
        .iter()
        .find_map(|path| std::fs::read_to_string(path).ok()?.trim().parse().ok())
}

/// Clock ticks have more than enough room in a float's 52 bits.
#[allow(clippy::cast_precision_loss, reason = "of some hundred million years")]
fn seconds(ticks: u64, a_second: u64) -> f64 {
    ticks as f64 / a_second.max(1) as f64
}

/// What the machine as a whole takes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct MachineUse {
    /// Processor time used since boot, in seconds, of all processors.
    pub cpu_seconds: Option<f64>,
    /// Memory that is in use, in bytes.
    pub memory_used_bytes: Option<u64>,
    /// Memory that there is, in bytes.
    pub memory_bytes: Option<u64>,
}

/// The machine's use: of the server's cgroup where that is counted (cgroup v2), as in a container,
/// else of everything there is.
pub fn machine_use() -> MachineUse {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let memory = read("/proc/meminfo").unwrap_or_default();
    let kibibytes = |name: &str| -> Option<u64> {
        let line = memory.lines().find_map(|line| line.strip_prefix(name))?;
        let number = line.trim().strip_suffix("kB")?.trim();
        Some(number.parse::<u64>().ok()? * 1024)
    };
    let (total, available) = (kibibytes("MemTotal:"), kibibytes("MemAvailable:"));
    let group = |file: &str| read(&format!("/sys/fs/cgroup/{file}"));
    let limit = group("memory.max").and_then(|text| text.trim().parse().ok());
    let group_used = group("memory.current").and_then(|text| text.trim().parse().ok());
    let group_cpu = group("cpu.stat").and_then(|text| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("usage_usec "))?;
        line.trim().parse::<u64>().ok()
    });
    MachineUse {
        cpu_seconds: group_cpu
            .map(|microseconds| seconds(microseconds, 1_000_000))
            .or_else(|| cpu_seconds(&read("/proc/stat")?)),
        memory_used_bytes: group_used.or_else(|| total?.checked_sub(available?)),
        memory_bytes: limit.into_iter().chain(total).min(),
    }
}

/// All but idle and waiting, of the line for all processors.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let fields: Vec<u64> = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_ascii_whitespace()
        .map_while(|field| field.parse().ok())
        .collect();
    // user, nice, system; then idle and iowait; irq, softirq, steal. Guests' time is in user's.
    let busy = fields.get(..3)?.iter().sum::<u64>() + fields.get(5..8)?.iter().sum::<u64>();
    Some(seconds(busy, sys::clock_ticks()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_name_does_not_shift_the_fields() {
        let stat = b"7 (a) S 1 1 1 (b) R 2 3 4 0 -1 0 0 0 0 0 5 6 0 0 20 0 1 0 99 0 8\n";
        let stat = parse(stat).unwrap();
        assert_eq!((stat.parent, stat.group, stat.session), (2, 3, 4));
        assert_eq!((stat.ticks, stat.start_time), (11, 99));
        assert_eq!(stat.resident_pages, 8);
    }

    #[test]
    fn idle_processors_are_not_busy() {
        let ticks = sys::clock_ticks();
        let text = format!("cpu  {ticks} 0 {ticks} 777 888 0 0 {ticks} 5 5\ncpu0 1 2\n");
        assert_eq!(cpu_seconds(&text), Some(3.0));
        assert_eq!(cpu_seconds("intr 1"), None);
    }

    #[test]
    fn this_process_is_among_its_users() {
        let own = use_by_user()[&nix::unistd::getuid().as_raw()];
        assert!(own.processes >= 1 && own.memory_bytes > 0, "{own:?}");
    }
}
