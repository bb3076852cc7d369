//! What the processes of a sandbox hold of the machine's memory, as /proc tells it (proc(5)).
//!
//! There are two looks. The cheap one reads `status`, which counts memory that processes share once for each of them,
//! and knows nothing of memory files that nobody has mapped. The exact one divides shared memory among those that map
//! it, and finds memory files by their descriptors.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::confine::MemoryDisk;
use crate::proc;
use crate::process::registry::Starts;
use crate::sys::{ActingAs, Pid, User};

/// How often a process is looked at again that may be a command being started.
const TRIES: usize = 10;

/// Bytes of a block in `stat` (stat(2)).
const BLOCK: u64 = 512;

/// What one process holds, by `/proc/<pid>/status`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) pid: Pid,
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
        parse_status(pid, self.read(&format!("/proc/{pid}/status"))?)
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
            let owner = entry.uid();
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

fn parse_status(pid: Pid, status: &str) -> Option<Member> {
    let mut member = Member {
        pid,
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
            "Uid" => member.uid = libc::uid_t::try_from(number()?).ok()?,
            "VmSize" => member.size = bytes(),
            "RssAnon" => member.private += bytes(),
            "RssShmem" => member.shared = bytes(),
            "VmSwap" => {
                member.private += bytes();
                break;
            }
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

/// Bytes of memory that these processes of one user hold, with what is on the disks in memory of theirs. Exact where it is near `limit`; else at least on the right
/// side of it.
pub(super) fn exact_use(
    reader: &mut Reader,
    user: User,
    pids: &[Pid],
    disks: &[MemoryDisk],
    limit: u64,
) -> u64 {
    let members: Vec<_> = pids.iter().filter_map(|pid| reader.member(*pid)).collect();
    let members: Vec<_> = members
        .into_iter()
        .filter(|member| member.uid == user.uid)
        .collect();
    let borrowed = borrowers(&members, proc::waiting_threads);
    // As the user: the kernel shows the memory of a process to its own user.
    let Ok(_acting) = ActingAs::new(user) else {
        return members.iter().map(|member| member.private).sum();
    };
    let mut sum = Sum::default();
    let mut files = HashMap::new();
    let mut mapping = Vec::new();
    let own = members.iter().zip(borrowed);
    for member in own.filter_map(|(member, is_borrowed)| (!is_borrowed).then_some(member)) {
        let rollup = reader.read(&format!("/proc/{}/smaps_rollup", member.pid));
        if let Some((private, mapped)) = rollup.and_then(parse_rollup) {
            sum.private += private;
            sum.mapped += mapped;
            if mapped > 0 {
                mapping.push(member.pid);
            }
        } else {
            sum.private += member.private;
            sum.mapped += member.shared;
        }
        find_files(member.pid, &mut files);
    }
    let on_disks: u64 = disks.iter().map(|disk| disk.bytes).sum();
    sum.files = files.values().sum::<u64>() + on_disks;
    if sum.files > 0 && sum.least() <= limit && sum.most() > limit {
        // Which of them are mapped decides.
        let mapped: u64 = mapping
            .into_iter()
            .map(|pid| mapped_of_files(pid, &files, disks))
            .sum();
        sum.mapped = sum.mapped.saturating_sub(mapped);
        return sum.most();
    }
    sum.least()
}

/// Private and shared bytes, in proportion to those that share them.
fn parse_rollup(text: &str) -> Option<(u64, u64)> {
    let bytes = |name| proc::bytes_in(text, name);
    let private = bytes("Pss_Anon:")? + bytes("SwapPss:").unwrap_or(0);
    Some((private, bytes("Pss_Shmem:")?))
}

/// Adds the memory files that a process has open, by inode, and their bytes.
fn find_files(pid: Pid, files: &mut HashMap<u64, u64>) {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd"));
    for entry in entries.into_iter().flatten().filter_map(Result::ok) {
        let path = entry.path();
        // Looking at the link asks no file system, which may not answer.
        if std::fs::read_link(&path).is_ok_and(|target| is_memory_file(&target))
            && let Ok(file) = std::fs::metadata(&path)
        {
            files.insert(file.ino(), file.blocks() * BLOCK);
        }
    }
}

fn is_memory_file(target: &Path) -> bool {
    target
        .as_os_str()
        .as_encoded_bytes()
        .starts_with(b"/memfd:")
}

/// The bytes that a process has mapped of these memory files and disks, in proportion to those that share them.
fn mapped_of_files(pid: Pid, files: &HashMap<u64, u64>, disks: &[MemoryDisk]) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    mapped_in(&text, files, disks)
}

/// The same, given `smaps`. Only memory files have such names, and one kernel has them in one file system.
fn mapped_in(smaps: &str, files: &HashMap<u64, u64>, disks: &[MemoryDisk]) -> u64 {
    let (mut is_file, mut bytes) = (false, 0);
    for line in smaps.lines() {
        if let Some(value) = line.strip_prefix("Pss:") {
            let kibibytes = value.trim().trim_end_matches(" kB").parse().unwrap_or(0);
            bytes += if is_file { kibibytes * 1024 } else { 0 };
        } else if !line.split(' ').next().unwrap_or_default().ends_with(':') {
            // Addresses, rights, offset, device, inode and name.
            let mut fields = line.split_ascii_whitespace().skip(3);
            let device = fields.next().and_then(device_in);
            let inode = fields.next().and_then(|inode| inode.parse().ok());
            let is_named = fields
                .next()
                .is_some_and(|name| name.starts_with("/memfd:"));
            is_file = is_named && inode.is_some_and(|inode| files.contains_key(&inode))
                || disks.iter().any(|disk| Some(disk.device) == device);
        }
    }
    bytes
}

/// A device as `smaps` writes it: its major and its minor number in hexadecimal.
fn device_in(text: &str) -> Option<libc::dev_t> {
    let (major, minor) = text.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    Some(libc::makedev(number(major)?, number(minor)?))
}

/// Which processes have the memory of their parents until execve (vfork(2)), and would be counted twice. The parent's
/// thread waits so that only SIGKILL reaches it, and each can wait for one only. The processes are in the order of
/// their pids.
fn borrowers(members: &[Member], waiting_threads: impl Fn(Pid) -> usize) -> Vec<bool> {
    let shape = |member: &Member| (member.size, member.private, member.shared);
    let mut waiting = vec![None; members.len()];
    let is_borrower = |member: &Member| {
        let parent = members.binary_search_by_key(&member.parent, |parent| parent.pid);
        let Ok(at) = parent else {
            return false;
        };
        if shape(&members[at]) != shape(member) {
            return false;
        }
        let left = waiting[at].get_or_insert_with(|| waiting_threads(member.parent));
        let is_one = *left > 0;
        *left = left.saturating_sub(1);
        is_one
    };
    members.iter().map(is_borrower).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tpython3\nUmask:\t0022\nPPid:\t7\nUid:\t20001\t20001\t20001\t20001\n\
        VmSize:\t  100 kB\nVmRSS:\t  9 kB\nRssAnon:\t    20 kB\nRssFile:\t  5 kB\nRssShmem:\t  3 kB\n\
        VmSwap:\t  4 kB\nThreads:\t1\n";

    #[test]
    fn status_tells_what_a_process_holds() {
        let member = parse_status(9, STATUS).unwrap();
        let expected = Member {
            pid: 9,
            parent: 7,
            uid: 20_001,
            size: 100 << 10,
            private: 24 << 10,
            shared: 3 << 10,
        };
        assert_eq!(member, expected);
        // A kernel thread and a zombie have no memory.
        let none = parse_status(2, "Name:\tkthreadd\nPPid:\t0\nUid:\t0\t0\t0\t0\n").unwrap();
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
        assert_eq!(mapped_in(smaps, &HashMap::from([(1030, 0)]), &[]), 6 << 10);
        let all = HashMap::from([(1030, 0), (1031, 0), (1032, 0)]);
        assert_eq!(mapped_in(smaps, &all, &[]), 46 << 10);
        let disk = MemoryDisk {
            device: libc::makedev(0, 0x2a),
            bytes: 0,
        };
        let on_disk = "7f0-7f1 rw-s 00000000 00:2a 7    /dev/shm/a b\nPss:    8 kB\n";
        let all = [smaps, on_disk].concat();
        assert_eq!(mapped_in(&all, &HashMap::new(), &[disk]), 8 << 10);
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
    fn only_a_copy_of_a_waiting_parent_is_borrowed() {
        let member = |pid, parent, private| Member {
            pid,
            parent,
            uid: 0,
            size: 8,
            private,
            shared: 0,
        };
        let members = [
            member(1, 0, 4),
            member(2, 1, 4),
            member(3, 1, 4),
            member(4, 1, 5),
            member(5, 9, 4),
        ];
        let borrowed = |waiting: usize| {
            let found = borrowers(&members, |_| waiting);
            let pids = members.iter().map(|member| member.pid).zip(found);
            let pids = pids.filter_map(|(pid, is_borrower)| is_borrower.then_some(pid));
            pids.collect::<Vec<_>>()
        };
        assert!(borrowed(0).is_empty());
        assert_eq!(borrowed(1), [2], "the other one is a copy of its own");
        assert_eq!(borrowed(2), [2, 3]);
        assert_eq!(borrowed(3), [2, 3]);
    }
}
