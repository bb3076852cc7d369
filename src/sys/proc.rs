//! Reads /proc (proc(5)): processes, and the use of the machine.
//!
//! In a container /proc may be missing or show another pid namespace, and a process may end at any
//! time, so every result is optional.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::str::FromStr;
use std::sync::{LazyLock, OnceLock};
use std::thread;
use std::time::Duration;

use nix::sched::{CpuSet, sched_getaffinity};

use crate::sys::{self, IDS_OF_SANDBOX, Pid};

/// What a thread does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadState {
    /// It runs, or waits for something that a signal breaks off.
    Runs,
    /// It sleeps in the kernel, and signals that do not kill leave it there.
    Blocked,
    Stopped,
    /// Its tracer has stopped it.
    Traced,
    Ended,
}

/// The ids of sandboxes that have a root of their own: a block for each user of the host's range, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdBlocks {
    /// The first user of the range.
    pub first_user: libc::uid_t,
    /// The first id of its block.
    pub first_id: libc::uid_t,
    /// How many blocks there are.
    pub count: u32,
}

static BLOCKS: OnceLock<IdBlocks> = OnceLock::new();

impl IdBlocks {
    /// From here on, whoever has an id of a block is known as the user that the block is for. Call it once, at the start.
    pub fn announce(self) {
        let _ = BLOCKS.set(self);
    }

    /// The first id of a user's block; `None` if there is none.
    pub fn of_user(self, uid: libc::uid_t) -> Option<libc::uid_t> {
        let index = uid.checked_sub(self.first_user)?;
        let first = index
            .checked_mul(IDS_OF_SANDBOX)?
            .checked_add(self.first_id)?;
        (index < self.count).then_some(first)
    }

    fn owner_of(self, id: libc::uid_t) -> Option<libc::uid_t> {
        let index = id.checked_sub(self.first_id)? / IDS_OF_SANDBOX;
        (index < self.count).then_some(self.first_user + index)
    }
}

/// The user whose sandbox has an id: itself, unless it is of a block.
pub fn user_of(id: libc::uid_t) -> libc::uid_t {
    let owner = BLOCKS.get().and_then(|blocks| blocks.owner_of(id));
    owner.unwrap_or(id)
}

/// An id as it is inside the sandbox whose block it is of.
pub fn id_inside(id: libc::uid_t) -> libc::uid_t {
    let blocks = BLOCKS.get().filter(|blocks| blocks.owner_of(id).is_some());
    blocks.map_or(id, |blocks| (id - blocks.first_id) % IDS_OF_SANDBOX)
}

/// Some fields of `/proc/<pid>/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    pub pid: Pid,
    /// The process has ended and was not reaped.
    pub zombie: bool,
    /// A signal or a tracer has stopped the process.
    pub stopped: bool,
    /// What the first thread does.
    pub state: ThreadState,
    /// The pid of the parent.
    pub parent: Pid,
    pub group: Pid,
    pub session: Pid,
    /// Processor time used, in clock ticks.
    pub ticks: u64,
    /// The number of threads.
    pub threads: u64,
    /// When the process started, in clock ticks since boot. Together with the pid it is unique.
    pub start_time: u64,
    /// Resident memory in pages, shared pages included.
    pub resident_pages: u64,
}

/// The state of a process; `None` if it does not exist.
pub fn stat(pid: Pid, buffer: &mut Vec<u8>) -> Option<Stat> {
    read_stat(pid, &format!("/proc/{pid}/stat"), buffer)
}

/// The same of one thread of a process.
pub fn stat_of_thread(pid: Pid, thread: Pid, buffer: &mut Vec<u8>) -> Option<Stat> {
    read_stat(thread, &format!("/proc/{pid}/task/{thread}/stat"), buffer)
}

/// Opens something once more while no descriptor is free, which passes: others are about to be closed. A process must not
/// be overlooked for that.
fn patiently<T>(open: impl Fn() -> io::Result<T>) -> io::Result<T> {
    const TRIES: u32 = 20;
    const PAUSE: Duration = Duration::from_millis(1);
    let is_short =
        |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
    for _ in 0..TRIES {
        match open() {
            Err(error) if is_short(&error) => thread::sleep(PAUSE),
            other => return other,
        }
    }
    open()
}

fn read_stat(pid: Pid, path: &str, buffer: &mut Vec<u8>) -> Option<Stat> {
    buffer.clear();
    let mut file = patiently(|| File::open(path)).ok()?;
    file.read_to_end(buffer).ok()?;
    parse(pid, buffer)
}

/// The name of a process, or of what is left of it.
pub fn name(pid: Pid) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()
}

/// Whether a signal waits for a thread, or for any thread of its process.
pub fn has_pending(pid: Pid, thread: Pid, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/status"));
    let status = status.unwrap_or_default();
    ["SigPnd:", "ShdPnd:"].iter().any(|name| {
        let mask = status.lines().find_map(|line| line.strip_prefix(name));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
    })
}

/// Whose directory in /proc a process has: its effective user's, or root's if it is not dumpable. Quicker than
/// [`real_user`]. `None` if there is no such process.
pub fn owner(pid: Pid) -> Option<libc::uid_t> {
    let path = format!("/proc/{pid}");
    nix::sys::stat::stat(path.as_str())
        .ok()
        .map(|stat| user_of(stat.st_uid))
}

/// Whether a signal or a tracer has stopped a process.
pub fn is_stopped(pid: Pid) -> bool {
    stat(pid, &mut Vec::new()).is_some_and(|stat| stat.stopped)
}

/// Whether a process group exists in a session, zombies included.
pub fn is_group_in_session(group: Pid, session: Pid) -> bool {
    let mut buffer = Vec::new();
    let mut is_member = |pid| {
        let stat = stat(pid, &mut buffer);
        stat.is_some_and(|stat| stat.group == group && stat.session == session)
    };
    // Usually its leader still runs.
    is_member(group) || processes().any(is_member)
}

/// The children of a thread (`CONFIG_PROC_CHILDREN`); none if it has ended. A process that a terminating
/// sibling precedes in the list may be missing while the list changes.
pub fn children_of_thread(pid: Pid, thread: Pid) -> Vec<Pid> {
    let path = format!("/proc/{pid}/task/{thread}/children");
    let listed = patiently(|| std::fs::read_to_string(&path));
    let listed = listed.unwrap_or_default();
    let pids = listed.split_ascii_whitespace();
    pids.filter_map(|pid| pid.parse().ok()).collect()
}

/// The children of a process.
pub fn children(process: &Stat) -> Vec<Pid> {
    let pid = process.pid;
    if process.threads <= 1 {
        return children_of_thread(pid, pid);
    }
    let threads = threads(pid);
    threads
        .flat_map(|tid| children_of_thread(pid, tid))
        .collect()
}

/// Whether /proc lists the children of threads, and shows this process's own pid namespace.
pub fn lists_children() -> bool {
    static LISTED: LazyLock<bool> = LazyLock::new(|| {
        let own = std::process::id();
        Path::new(&format!("/proc/self/task/{own}/children")).exists()
    });
    shows_this_namespace() && *LISTED
}

/// The threads of a process; none if it has ended.
pub fn threads(pid: Pid) -> impl Iterator<Item = Pid> {
    let path = format!("/proc/{pid}/task");
    let entries = patiently(|| std::fs::read_dir(&path)).ok();
    let names = entries.into_iter().flatten();
    names.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// Those that trace the process or one of its first `most` threads (ptrace(2)).
pub fn tracers(pid: Pid, most: usize) -> HashSet<Pid> {
    let status = |tid| std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).ok();
    let tracer = |tid| number_of(&status(tid)?, "TracerPid:");
    let threads: HashSet<Pid> = threads(pid).take(most).filter_map(tracer).collect();
    // A thread traces, and the process is its thread group.
    let process = |tid: Pid| {
        let status = std::fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
        number_of(&status, "Tgid:")
    };
    threads.into_iter().filter_map(process).collect()
}

/// A hard limit of a process, by its name in `/proc/<pid>/limits`; `u64::MAX` if it is unlimited, `None` if there is no
/// such process.
pub fn hard_limit(pid: Pid, name: &str) -> Option<u64> {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let values = limits.lines().find_map(|line| line.strip_prefix(name))?;
    let value = values.split_ascii_whitespace().nth(1)?;
    Some(value.parse().unwrap_or(u64::MAX))
}

/// Whether a process has `PR_SET_NO_NEW_PRIVS`, and whether its bounding set of capabilities is empty. It can undo
/// neither. `None` if there is no such process.
pub fn deprivation(pid: Pid) -> Option<(bool, bool)> {
    let status = status(pid);
    let no_new_privileges = number_of::<u8>(&status, "NoNewPrivs:")? == 1;
    Some((
        no_new_privileges,
        number_of(&status, "CapBnd:") == Some(0_u8),
    ))
}

/// Whether a process is in a pid namespace below this process's own, as those of containers are.
pub fn is_nested(pid: Pid) -> bool {
    let status = status(pid);
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    line.is_some_and(|line| line.split_ascii_whitespace().count() > 1)
}

/// The number that a process has in its own pid namespace; `None` if there is no such process.
pub fn own_number(pid: Pid) -> Option<Pid> {
    let status = status(pid);
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().last()?.parse().ok()
}

/// Whether a process has this real uid and has not ended; `None` if /proc does not tell.
pub fn user_has_living(uid: libc::uid_t) -> Option<bool> {
    let is_meant = |pid: Pid| {
        let status = status(pid);
        number_of(&status, "Uid:").map(user_of) == Some(uid) && !is_zombie(&status)
    };
    shows_this_namespace().then(|| processes().any(is_meant))
}

/// Whether a process has not ended.
pub fn is_living(pid: Pid) -> bool {
    let status = status(pid);
    !status.is_empty() && !is_zombie(&status)
}

fn is_zombie(status: &str) -> bool {
    number_of(status, "Threads:") <= Some(1_u32)
        && status
            .lines()
            .any(|line| line.starts_with("State:\tZ") || line.starts_with("State:\tX"))
}

/// `/proc/<pid>/status`; empty if there is no such process.
fn status(pid: Pid) -> String {
    let path = format!("/proc/{pid}/status");
    patiently(|| std::fs::read_to_string(&path)).unwrap_or_default()
}

/// The pids of all processes; none if /proc shows another pid namespace.
pub fn processes() -> impl Iterator<Item = Pid> {
    let entries = patiently(|| std::fs::read_dir("/proc")).ok();
    entries
        .filter(|_| shows_this_namespace())
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// Whether /proc is mounted and shows this process's own pid namespace: in a container it may be missing
/// or show another.
pub fn shows_this_namespace() -> bool {
    std::fs::read_link("/proc/self")
        .is_ok_and(|own| own.as_os_str() == std::process::id().to_string().as_str())
}

/// The pid that the kernel allocated last. Pids grow, and start again at low numbers after the highest.
pub fn newest_pid() -> Option<Pid> {
    let load = patiently(|| std::fs::read_to_string("/proc/loadavg")).ok()?;
    load.split_whitespace().last()?.parse().ok()
}

/// Parses `/proc/<pid>/stat`. The name in parentheses may contain spaces and parentheses, so the fields
/// start after the last parenthesis.
fn parse(pid: Pid, stat: &[u8]) -> Option<Stat> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let field = |index: usize| fields.get(index).copied();
    let number = |index| field(index)?.parse::<u64>().ok();
    let related = |index| field(index)?.parse::<Pid>().ok();
    Some(Stat {
        pid,
        // A process whose first thread has exited shows the same state. Its thread count is higher.
        zombie: matches!(field(0)?, "Z" | "X") && matches!(field(17)?, "0" | "1"),
        stopped: matches!(field(0)?, "T" | "t"),
        state: match field(0)? {
            "D" => ThreadState::Blocked,
            "T" => ThreadState::Stopped,
            "t" => ThreadState::Traced,
            "Z" | "X" => ThreadState::Ended,
            _ => ThreadState::Runs,
        },
        parent: related(1)?,
        group: related(2)?,
        session: related(3)?,
        ticks: number(11)? + number(12)?,
        threads: number(17)?,
        start_time: number(19)?,
        resident_pages: number(21)?,
    })
}

/// What the running processes of one user use.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct UserUse {
    /// The number of processes.
    pub processes: u64,
    /// Processor time that they have used.
    pub cpu: Duration,
    /// Resident memory in bytes. Memory that several processes share is counted for each.
    pub memory_bytes: u64,
}

/// What the running processes use, by real uid.
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
        user.cpu += duration(stat.ticks, ticks_a_second);
        user.memory_bytes += stat.resident_pages * page_bytes;
    }
    users
}

/// The user of a process, by its real uid. The owner of its directory in /proc does not tell: it is root if the
/// process is not dumpable.
pub fn real_user(pid: Pid) -> Option<libc::uid_t> {
    number_of(&status(pid), "Uid:").map(user_of)
}

/// The same, quicker if the process is dumpable and not privileged: then its effective user is its real one.
pub fn user(pid: Pid) -> Option<libc::uid_t> {
    match owner(pid)? {
        0 => real_user(pid),
        uid => Some(uid),
    }
}

/// The first number of a line of `/proc/<pid>/status`.
fn number_of<Number: FromStr>(status: &str, name: &str) -> Option<Number> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// The limit of processes and threads in the server's container (`pids.max`, see
/// Documentation/admin-guide/cgroup-v2.rst); `None` means no limit.
pub fn process_limit() -> Option<u64> {
    ["/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"]
        .into_iter()
        .find_map(number_in)
}

/// How many processors the server may use: by its affinity (`sched_getaffinity(2)`), and by the quota of its container
/// (the kernel's cgroup-v2.rst and sched-bwc.rst). The function of std does the same and takes 8 KB.
pub fn processors() -> usize {
    let allowed = sched_getaffinity(nix::unistd::Pid::this())
        .ok()
        .map_or(1, |set| {
            let is_allowed = |cpu: &usize| set.is_set(*cpu).unwrap_or(false);
            (0..CpuSet::count()).filter(is_allowed).count()
        });
    let read = |path| std::fs::read_to_string(path).ok();
    let quota = read("/sys/fs/cgroup/cpu.max").or_else(|| {
        let quota = read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")?;
        let period = read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")?;
        Some(quota + &period)
    });
    let quota = quota.and_then(|quota| processors_of(&quota));
    allowed.min(quota.unwrap_or(usize::MAX)).max(1)
}

/// How many processors a quota and its period are, rounded down; `None` without a limit, which is `max` or -1.
fn processors_of(quota: &str) -> Option<usize> {
    let mut numbers = quota.split_whitespace().map(str::parse::<usize>);
    let (quota, period) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    quota.checked_div(period)
}

/// So many ticks as time.
fn duration(ticks: u64, a_second: u64) -> Duration {
    let a_second = a_second.max(1);
    let rest = ticks % a_second * 1_000_000 / a_second;
    Duration::from_secs(ticks / a_second) + Duration::from_micros(rest)
}

/// The number that is all of a file.
pub fn number_in(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Whether the machine has any swap (proc(5)).
pub fn has_swap() -> bool {
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    swaps.lines().count() > 1
}

/// The size in a line such as `VmSize:    1024 kB`, in bytes.
pub fn bytes_in(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// What the whole machine uses.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct MachineUse {
    /// Processor time used since boot by all processors.
    pub cpu: Option<Duration>,
    /// Memory in use, in bytes.
    pub memory_used_bytes: Option<u64>,
    /// Total memory, in bytes.
    pub memory_bytes: Option<u64>,
}

/// The use of the server's cgroup, if cgroup v2 counts it (as in a container), else of the machine.
pub fn machine_use() -> MachineUse {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let memory = read("/proc/meminfo").unwrap_or_default();
    let total = bytes_in(&memory, "MemTotal:");
    let available = bytes_in(&memory, "MemAvailable:");
    let limit = number_in("/sys/fs/cgroup/memory.max");
    let group_used = number_in("/sys/fs/cgroup/memory.current");
    let group_cpu: Option<u64> = read("/sys/fs/cgroup/cpu.stat").and_then(|text| {
        let mut lines = text.lines();
        let usage = lines.find_map(|line| line.strip_prefix("usage_usec "))?;
        usage.trim().parse().ok()
    });
    MachineUse {
        cpu: group_cpu
            .map(Duration::from_micros)
            .or_else(|| busy_time(&read("/proc/stat")?)),
        memory_used_bytes: group_used.or_else(|| total?.checked_sub(available?)),
        memory_bytes: limit.into_iter().chain(total).min(),
    }
}

/// Parses the busy time of all processors from `/proc/stat`.
fn busy_time(stat: &str) -> Option<Duration> {
    let fields: Vec<u64> = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_ascii_whitespace()
        .map_while(|field| field.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal; the user field includes guests.
    let busy = fields.get(..3)?.iter().sum::<u64>() + fields.get(5..8)?.iter().sum::<u64>();
    Some(duration(busy, sys::clock_ticks()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_as_std_counts_them() {
        let expected = std::thread::available_parallelism().unwrap().get();
        assert_eq!(processors(), expected);
        for (quota, expected) in [
            ("max 100000\n", None),
            ("250000 100000\n", Some(2)),
            ("50000 100000\n", Some(0)),
            ("-1\n100000\n", None),
            ("400000\n100000\n", Some(4)),
            ("1 0\n", None),
            ("", None),
        ] {
            assert_eq!(processors_of(quota), expected, "{quota}");
        }
    }

    #[test]
    fn a_hostile_name_does_not_shift_the_fields() {
        let stat = b"7 (a) S 1 1 1 (b) R 2 3 4 0 -1 0 0 0 0 0 5 6 0 0 20 0 1 0 99 0 8\n";
        let stat = parse(42, stat).unwrap();
        assert_eq!((stat.parent, stat.group, stat.session), (2, 3, 4));
        assert_eq!((stat.ticks, stat.start_time), (11, 99));
        assert_eq!(stat.resident_pages, 8);
    }

    #[test]
    fn idle_processors_are_not_busy() {
        let ticks = sys::clock_ticks();
        let text = format!("cpu  {ticks} 0 {ticks} 777 888 0 0 {ticks} 5 5\ncpu0 1 2\n");
        assert_eq!(busy_time(&text), Some(Duration::from_secs(3)));
        assert_eq!(busy_time("intr 1"), None);
    }

    #[test]
    fn this_process_is_among_its_users() {
        let own = use_by_user()[&nix::unistd::getuid().as_raw()];
        assert!(own.processes >= 1 && own.memory_bytes > 0, "{own:?}");
    }
}
