//! What the processes of a sandbox hold of the machine's memory, as /proc tells it (proc(5)).
//!
//! There are two looks. The cheap one reads `status`, which counts memory that processes share once for each of them,
//! and knows nothing of memory files that nobody has mapped. The exact one divides shared memory among those that map
//! it, and finds memory files by their descriptors.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::sharing::have_one_address_space;
use crate::codec::sort::sort_by;
use crate::confine::MemoryDisk;
use crate::process::registry::Starts;
use crate::sys::{ActingAs, Pid, User, proc};

/// How often a process is looked at again that may be a command being started, or whose threads come and go.
const TRIES: usize = 10;

/// How many of its threads are looked at again.
const YOUNGEST: usize = 8;

/// Bytes of a block in `stat` (stat(2)).
const BLOCK: u64 = 512;

/// What one process holds, by `/proc/<pid>/status`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) pid: Pid,
    /// A thread of it that has its memory. The first one may have ended before the others.
    thread: Pid,
    threads: u64,
    parent: Pid,
    pub(super) uid: libc::uid_t,
    /// Bytes of address space.
    size: u64,
    /// Bytes of memory of its own, swapped out ones too.
    pub(super) private: u64,
    /// Resident bytes that it may share.
    pub(super) shared: u64,
}

/// What the whole machine holds of shared memory and memory files, those in swap too. `None` if /proc does not tell.
pub(super) fn machine_shared() -> Option<u64> {
    shared_in(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn shared_in(meminfo: &str) -> Option<u64> {
    let bytes = |name| proc::bytes_in(meminfo, name);
    let in_swap = bytes("SwapTotal:")?.checked_sub(bytes("SwapFree:")?)?;
    Some(bytes("Shmem:")? + in_swap)
}

/// Reads files of /proc into one buffer.
pub(super) struct Reader(Vec<u8>);

impl Reader {
    pub(super) fn new() -> Self {
        Self(vec![0; 4096])
    }

    /// The beginning of a file, which the kernel writes in one piece.
    fn read(&mut self, path: &str) -> Option<&str> {
        let count = File::open(path).ok()?.read(&mut self.0).ok()?;
        let read = &self.0[..count];
        match std::str::from_utf8(read) {
            Ok(text) => Some(text),
            // A process chooses its name, of at most 15 bytes.
            Err(error) if error.valid_up_to() < 64 => {
                let line = read.iter().position(|byte| *byte == b'\n')?;
                std::str::from_utf8(&read[line..]).ok()
            }
            Err(_) => None,
        }
    }

    /// What a process holds; `None` if it has ended.
    pub(super) fn member(&mut self, pid: Pid) -> Option<Member> {
        let member = parse_status(pid, pid, self.read(&format!("/proc/{pid}/status"))?)?;
        for round in 0..TRIES {
            if member.size > 0 || member.threads <= 1 {
                break;
            }
            let mut threads: Vec<_> = proc::threads(pid).collect();
            // The last are the youngest, which may have begun when their elders ended.
            threads.reverse();
            threads.truncate(if round == 0 { usize::MAX } else { YOUNGEST });
            for thread in threads {
                let status = self.read(&format!("/proc/{pid}/task/{thread}/status"));
                let other = status.and_then(|status| parse_status(pid, thread, status));
                if let Some(other) = other.filter(|other| other.size > 0) {
                    return Some(other);
                }
            }
        }
        Some(member)
    }

    /// The processes of watched users, and what they hold, by pid. `starts` tells for a user which children are no
    /// processes of its own yet.
    pub(super) fn members(
        &mut self,
        is_watched: impl Fn(libc::uid_t) -> bool,
        is_sandbox: impl Fn(libc::uid_t) -> bool,
        starts: impl Fn(libc::uid_t) -> Option<Starts>,
    ) -> Vec<Member> {
        let mut members = Vec::new();
        for pid in proc::processes() {
            let Ok(entry) = std::fs::metadata(format!("/proc/{pid}")) else {
                continue;
            };
            let owner = proc::user_of(entry.uid());
            if is_watched(owner) {
                members.extend(self.member(pid).filter(|member| member.uid == owner));
            } else if !is_sandbox(owner) {
                // Of one that hides its memory, root is the owner.
                let member = self.member(pid);
                let member = member.filter(|member| is_watched(member.uid));
                members.extend(member.and_then(|member| self.hidden(member, &starts)));
            }
        }
        members
    }

    /// What a process holds that hides its memory; `None` if it is a command that is being started, which has the
    /// server's memory until execve.
    fn hidden(
        &mut self,
        member: Member,
        starts: impl Fn(libc::uid_t) -> Option<Starts>,
    ) -> Option<Member> {
        for _ in 0..TRIES {
            let Some(before) = starts(member.uid) else {
                std::thread::yield_now();
                continue;
            };
            if before.pids.contains(&member.pid) {
                return None;
            }
            let again = self.member(member.pid)?;
            if starts(member.uid).is_some_and(|after| after.begun == before.begun) {
                return Some(again);
            }
        }
        None
    }
}

fn parse_status(pid: Pid, thread: Pid, status: &str) -> Option<Member> {
    let mut member = Member {
        pid,
        thread,
        ..Member::default()
    };
    for line in status.lines() {
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        let number = || {
            let first = value.split_ascii_whitespace().next()?;
            first.parse::<u64>().ok()
        };
        let bytes = || number().unwrap_or(0) * 1024;
        match name {
            "PPid" => member.parent = Pid::try_from(number()?).ok()?,
            "Uid" => member.uid = proc::user_of(libc::uid_t::try_from(number()?).ok()?),
            "VmSize" => member.size = bytes(),
            "RssAnon" => member.private += bytes(),
            "RssShmem" => member.shared = bytes(),
            "VmSwap" => {
                member.private += bytes();
                break;
            }
            // Comes before only where there is no memory.
            "Threads" => member.threads = number()?,
            _ => {}
        }
    }
    Some(member)
}

/// What the processes of one sandbox hold together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sum {
    private: u64,
    /// Shared mappings, each page once.
    mapped: u64,
    /// Memory files and files on disks in memory, mapped or not.
    files: u64,
}

impl Sum {
    /// The least that it can be: every mapped page may be of a memory file.
    fn least(self) -> u64 {
        self.private + self.mapped.max(self.files)
    }

    fn most(self) -> u64 {
        self.private + self.mapped + self.files
    }
}

/// What an exact look has found of one process.
struct Measured {
    pid: Pid,
    /// Its private memory, of which it may share pages with processes that were forked.
    private: u64,
    /// The same as the cheap look counted it at that time.
    held: u64,
}

impl Measured {
    /// Takes in what the cheap look counts now. What has been added is the process's own alone. What others have too
    /// `is_lent`, and stays when one lets go of it.
    fn update(&mut self, held: u64, is_lent: bool) {
        let now = (self.private + held).saturating_sub(self.held);
        self.private = if is_lent { now.max(self.private) } else { now };
        self.held = held;
    }
}

/// Bytes of memory that these processes of one user hold, with what is on the disks in memory of theirs. Exact where it
/// is near `limit`; else at least on the right side of it. `None` if `is_given_up`. If they have ids besides that
/// user's, no single one of these could look at all of them; the `owner` of their user namespace can.
pub(super) fn exact_use(
    reader: &mut Reader,
    user: User,
    owner: Option<User>,
    pids: &[Pid],
    disks: &[MemoryDisk],
    limit: u64,
    is_given_up: impl Fn() -> bool,
) -> Option<u64> {
    let is_own = |member: &Member| member.uid == user.uid;
    let members: Vec<_> = pids.iter().filter_map(|pid| reader.member(*pid)).collect();
    let members: Vec<_> = members.into_iter().filter(is_own).collect();
    // As the user: the kernel shows the memory of a process to its own user.
    let acting = match owner {
        Some(owner) => ActingAs::owner_of_users(owner),
        None => ActingAs::new(user),
    };
    let Ok(_acting) = acting else {
        return Some(members.iter().map(|member| member.private).sum());
    };
    let mut sum = Sum {
        files: disks.iter().map(|disk| disk.bytes).sum(),
        ..Sum::default()
    };
    let mut files = HashMap::new();
    let (mut measured, mut lenders) = (Vec::new(), HashSet::new());
    let mut mapping = Vec::new();
    // The largest first: those above the limit are soon known to be.
    let mut by_size: Vec<_> = members.iter().collect();
    sort_by(&mut by_size, |one, other| {
        (other.private + other.shared).cmp(&(one.private + one.shared))
    });
    for member in by_size {
        if is_given_up() {
            return None;
        }
        sum.files += find_files(member.thread, &mut files);
        let is_shared = shares_with_parent(&members, member);
        let Some(before) = reader.member(member.pid).filter(is_own) else {
            continue;
        };
        // A thread that has ended has nothing to share.
        if is_shared && before.size > 0 && before.thread == member.thread {
            lenders.insert(member.parent);
            continue;
        }
        let rollup = reader.read(&format!("/proc/{}/smaps_rollup", before.thread));
        let (private, mapped) = rollup
            .and_then(parse_rollup)
            .unwrap_or((before.private, before.shared));
        measured.push(Measured {
            pid: member.pid,
            private,
            held: before.private,
        });
        sum.private += private;
        sum.mapped += mapped;
        if mapped > 0 {
            mapping.push(before.thread);
        }
        if sum.least() > limit {
            sum.private = private_now(reader, user, &mut measured, &lenders);
            if sum.least() > limit {
                return Some(sum.least());
            }
        }
    }
    sum.private = private_now(reader, user, &mut measured, &lenders);
    if sum.files > 0 && sum.least() <= limit && sum.most() > limit {
        // Which of them are mapped decides.
        let mut mapped = 0;
        for thread in mapping {
            if is_given_up() {
                return None;
            }
            mapped += mapped_of_files(thread, &files, disks);
        }
        sum.mapped = sum.mapped.saturating_sub(mapped);
        return Some(sum.most());
    }
    Some(sum.least())
}

/// The private memory of all of these at one moment: measuring them may take long, and they may have moved memory from
/// one to the other meanwhile.
fn private_now(
    reader: &mut Reader,
    user: User,
    measured: &mut [Measured],
    lenders: &HashSet<Pid>,
) -> u64 {
    let mut sum = 0;
    for one in measured {
        let member = reader.member(one.pid);
        let held = member.filter(|member| member.uid == user.uid);
        let held = held.map_or(0, |member| member.private);
        one.update(held, lenders.contains(&one.pid));
        sum += one.private;
    }
    sum
}

/// Whether a process has its memory in common with its parent, which is one of `members` and is counted for it. These
/// are in the order of their pids.
fn shares_with_parent(members: &[Member], member: &Member) -> bool {
    let parent = members.binary_search_by_key(&member.parent, |parent| parent.pid);
    parent.is_ok_and(|at| have_one_address_space(member.thread, members[at].thread))
}

/// Private and shared bytes, in proportion to those that share them.
fn parse_rollup(text: &str) -> Option<(u64, u64)> {
    let bytes = |name| proc::bytes_in(text, name);
    let private = bytes("Pss_Anon:")? + bytes("SwapPss:").unwrap_or(0);
    Some((private, bytes("Pss_Shmem:")?))
}

/// Adds the memory files that a process has open, by inode, and returns the bytes of those that are new.
fn find_files(pid: Pid, files: &mut HashMap<u64, u64>) -> u64 {
    let mut found = 0;
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd"));
    for entry in entries.into_iter().flatten().filter_map(Result::ok) {
        let path = entry.path();
        // Looking at the link asks no file system, which may not answer.
        if std::fs::read_link(&path).is_ok_and(|target| is_memory_file(&target))
            && let Ok(file) = std::fs::metadata(&path)
            && let Entry::Vacant(entry) = files.entry(file.ino())
        {
            found += *entry.insert(file.blocks() * BLOCK);
        }
    }
    found
}

fn is_memory_file(target: &Path) -> bool {
    target
        .as_os_str()
        .as_encoded_bytes()
        .starts_with(b"/memfd:")
}

/// The bytes that a process has mapped of these memory files and disks, in proportion to those that share them.
fn mapped_of_files(pid: Pid, files: &HashMap<u64, u64>, disks: &[MemoryDisk]) -> u64 {
    let smaps = File::open(format!("/proc/{pid}/smaps"));
    smaps.map_or(0, |smaps| mapped_in(BufReader::new(smaps), files, disks))
}

/// The same, given `smaps`, which may be 100 MB long. Only memory files have such names, and one kernel has them in one
/// file system.
fn mapped_in(mut smaps: impl BufRead, files: &HashMap<u64, u64>, disks: &[MemoryDisk]) -> u64 {
    let (mut is_file, mut bytes) = (false, 0);
    let mut line = Vec::new();
    while smaps
        .read_until(b'\n', &mut line)
        .is_ok_and(|read| read > 0)
    {
        // A name may be anything.
        let text = String::from_utf8_lossy(&line);
        if let Some(value) = text.strip_prefix("Pss:") {
            let kibibytes = value.trim().trim_end_matches(" kB").parse().unwrap_or(0);
            bytes += if is_file { kibibytes * 1024 } else { 0 };
        } else if !text.split(' ').next().unwrap_or_default().ends_with(':') {
            // Addresses, rights, offset, device, inode and name.
            let mut fields = text.split_ascii_whitespace().skip(3);
            let device = fields.next().and_then(device_in);
            let inode = fields.next().and_then(|inode| inode.parse().ok());
            let is_named = fields
                .next()
                .is_some_and(|name| name.starts_with("/memfd:"));
            is_file = is_named && inode.is_some_and(|inode| files.contains_key(&inode))
                || disks.iter().any(|disk| Some(disk.device) == device);
        }
        line.clear();
    }
    bytes
}

/// A device as `smaps` writes it: its major and its minor number in hexadecimal.
fn device_in(text: &str) -> Option<libc::dev_t> {
    let (major, minor) = text.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    Some(libc::makedev(number(major)?, number(minor)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tpython3\nUmask:\t0022\nPPid:\t7\nUid:\t20001\t20001\t20001\t20001\n\
        VmSize:\t  100 kB\nVmRSS:\t  9 kB\nRssAnon:\t    20 kB\nRssFile:\t  5 kB\nRssShmem:\t  3 kB\n\
        VmSwap:\t  4 kB\nThreads:\t1\n";

    #[test]
    fn status_tells_what_a_process_holds() {
        let member = parse_status(9, 9, STATUS).unwrap();
        let expected = Member {
            pid: 9,
            thread: 9,
            threads: 0,
            parent: 7,
            uid: 20_001,
            size: 100 << 10,
            private: 24 << 10,
            shared: 3 << 10,
        };
        assert_eq!(member, expected);
        // A kernel thread and a zombie have no memory.
        let none = parse_status(2, 2, "Name:\tkthreadd\nPPid:\t0\nUid:\t0\t0\t0\t0\n").unwrap();
        assert_eq!((none.private, none.shared), (0, 0));
    }

    #[test]
    fn the_own_status_is_read() {
        let pid = Pid::try_from(std::process::id()).unwrap();
        let member = Reader::new().member(pid).unwrap();
        assert_eq!(member.uid, nix::unistd::getuid().as_raw());
        assert!(
            member.private > 0 && member.size > member.private,
            "{member:?}"
        );
    }

    #[test]
    fn shared_memory_of_the_machine_may_be_in_swap() {
        let text = "Shmem:    40 kB\nSwapTotal:    9 kB\nSwapFree:    2 kB\n";
        assert_eq!(shared_in(text), Some(47 << 10));
        assert_eq!(shared_in("SwapTotal:    9 kB\nSwapFree:    2 kB\n"), None);
    }

    #[test]
    fn a_rollup_has_private_and_shared_memory() {
        let text = "5-7 ---p 00000000 00:00 0    [rollup]\nRss:    50 kB\nPss:    40 kB\nPss_Anon:    10 kB\n\
            Pss_File:    12 kB\nPss_Shmem:    8 kB\nSwap:    3 kB\nSwapPss:    2 kB\n";
        assert_eq!(parse_rollup(text), Some((12 << 10, 8 << 10)));
        assert_eq!(parse_rollup(""), None);
    }

    #[test]
    fn mapped_memory_files_are_told_from_other_shared_memory() {
        let smaps = "\
            7f0-7f1 rw-s 00000000 00:01 1030    /memfd:a b (deleted)\nSize: 4 kB\nPss:    6 kB\nPss_Dirty: 6 kB\n\
            7f1-7f2 rw-s 00000000 00:01 1031    /dev/zero (deleted)\nPss:    20 kB\n\
            7f2-7f3 rw-s 00000000 00:01 1032    /memfd:other (deleted)\nPss:    40 kB\n\
            7f3-7f4 rw-p 00000000 00:00 0\nPss:    80 kB\nVmFlags: rd wr\n";
        assert_eq!(
            mapped_in(smaps.as_bytes(), &HashMap::from([(1030, 0)]), &[]),
            6 << 10
        );
        let all = HashMap::from([(1030, 0), (1031, 0), (1032, 0)]);
        assert_eq!(mapped_in(smaps.as_bytes(), &all, &[]), 46 << 10);
        let disk = MemoryDisk {
            device: libc::makedev(0, 0x2a),
            bytes: 0,
        };
        let on_disk = "7f0-7f1 rw-s 00000000 00:2a 7    /dev/shm/a b\nPss:    8 kB\n";
        let all = [smaps, on_disk].concat();
        assert_eq!(mapped_in(all.as_bytes(), &HashMap::new(), &[disk]), 8 << 10);
    }

    #[test]
    fn a_sum_lies_between_all_files_mapped_and_none() {
        let sum = Sum {
            private: 10,
            mapped: 5,
            files: 7,
        };
        assert_eq!((sum.least(), sum.most()), (17, 22));
    }

    #[test]
    fn a_process_that_is_being_started_is_not_counted() {
        let pid = Pid::try_from(std::process::id()).unwrap();
        let mut reader = Reader::new();
        let member = reader.member(pid).unwrap();
        let starts = |begun, pids: &[Pid]| {
            let pids = pids.to_vec();
            Some(Starts { pids, begun })
        };
        assert!(reader.hidden(member, |_| starts(1, &[pid])).is_none());
        assert!(reader.hidden(member, |_| starts(1, &[])).is_some());
        assert!(reader.hidden(member, |_| None).is_none());
        // One begins with every look.
        let begun = std::cell::Cell::new(0);
        let restless = |_| starts(begun.replace(begun.get() + 1), &[]);
        assert!(reader.hidden(member, restless).is_none());
    }

    #[test]
    fn memory_that_has_moved_since_counts_where_it_is() {
        let private_at = |held, is_lent| {
            // Half of 100 is another's too.
            let mut one = Measured {
                pid: 1,
                private: 50,
                held: 100,
            };
            one.update(held, is_lent);
            one.private
        };
        let at = [100, 150, 70, 50, 0];
        assert_eq!(at.map(|held| private_at(held, false)), [50, 100, 20, 0, 0]);
        assert_eq!(at.map(|held| private_at(held, true)), [50, 100, 50, 50, 50]);
    }

    #[test]
    fn a_process_whose_first_thread_has_ended_has_memory() {
        let none = "Name:\tx\nPPid:\t7\nUid:\t5\t5\t5\t5\nThreads:\t3\n";
        let member = parse_status(9, 9, none).unwrap();
        assert_eq!((member.size, member.threads), (0, 3));
        let member = parse_status(9, 12, STATUS).unwrap();
        assert_eq!((member.pid, member.thread), (9, 12));
    }
}
